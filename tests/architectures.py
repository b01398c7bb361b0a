"""Which architectures does the lens read? Every causal language model of `transformers`, tiny. (ours)

    python tests/architectures.py                 # writes docs/architectures.md: five minutes
    python tests/architectures.py llama gpt2      # prints what is found of these, and writes nothing

A model of each type is built with random weights, and read through `hf/lens.py`. At 24 positions,
beyond its window of 8, it is compared with itself as it is: each head's mean attention with its own eager
weights, states with its `hidden_states`, a neuron at zero with the model whose weights of that unit are zero.
At 7 positions a constant that is position 1's own key and value has to receive what position 1 receives.
"""

import contextlib
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf.check import check
from hf.lens import Lens
from hf.loading import quiet
from lib.files import read_json
from lib.results import ROOT
from lib.runtime import progress
from lib.settings import UserError

PAGE = ROOT / "docs" / "architectures.md"
LARGEST_ERROR = 1e-5
MOST_NUMBERS = 10**9  # of a model that is built
LONG = 24  # positions, beyond the window
OPTIONAL = ("num_key_value_heads", "sliding_window", "n_inner", "head_dim", "q_lora_rank", "rotary_dim")
TINY = read_json(Path(__file__).with_suffix(".json"))
# "sizes" has each number's names, of all that configurations have for them; "special" what a configuration
# needs besides, or cannot have (null).


def tiny_config(model_type):
    """A configuration with those of the sizes that its class has: what it refuses to be told is left out."""
    config_class = CONFIG_MAPPING[model_type]
    usual = config_class()
    text = getattr(usual, "text_config", None)
    if isinstance(text, transformers.PreTrainedConfig):
        return config_class(text_config=tiny_config(text.model_type).to_dict())
    sizes = {}
    for size, names in TINY["sizes"].items():
        for name in names.split():
            with contextlib.suppress(Exception):  # a class may refuse to tell
                if getattr(usual, name) is not None or name not in OPTIONAL:
                    sizes[name] = int(size)
    if "kv_lora_rank" in sizes:  # with it there are as many keys as queries
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= {"use_sliding_window": True} if hasattr(usual, "use_sliding_window") else {}
    sizes |= TINY["special"].get(model_type, {})
    for _ in range(5):
        try:
            return config_class(**{name: size for name, size in sizes.items() if size is not None})
        except Exception as error:
            refused = [name for name in sizes if f"'{name}'" in str(error)]
            if not refused:
                raise
            sizes.pop(refused[0])
    raise ValueError("no sizes suit it")


def build(model_type):
    """A tiny model of a type, whose random weights make attention uneven."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_NUMBERS:
        raise ValueError(f"its towers make it {size:,} numbers large")
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = drawn / parameter.shape[-1] ** 0.5
        else:
            parameter.data += 0.05 * drawn
    return model


@torch.no_grad()
def errors_of(lens):
    """The largest errors of what a lens sees, by name, against the model as it is; none of what it lacks."""
    tokens = lens.probe_tokens(LONG)
    truth = lens.model(input_ids=tokens, output_attentions=True, output_hidden_states=True, use_cache=False)
    alphas, streams = [], []
    lens.hidden(
        tokens,
        on_state=lambda layer, x: streams.append(x),
        on_heads=lambda layer, heads, q, k, v, alpha: alphas.append(alpha(range(1, LONG + 1))),
    )
    weights = truth.attentions
    if len(weights) == lens.config.num_layers:
        weights = [weights[layer - 1] for layer in lens.attending]
    means = [some.sum(2) / (some > 0).sum(2) for some in weights]  # over the queries that see a position
    heads = [(alpha - mean).abs().max().item() for alpha, mean in zip(alphas, means)]
    errors = {"heads": max(heads)}
    if "states" not in lens.lacks and len(truth.hidden_states) == len(streams):
        states = zip(streams[1:-1], truth.hidden_states[1:-1])
        errors["states"] = max([(x - y).abs().max().item() for x, y in states])
    if "units" not in lens.lacks:
        errors["units"] = max(unit_error(lens, tokens, layer) for layer in lens.banks)
    return errors


def unit_error(lens, tokens, layer):
    """The largest difference of logits between a unit of each bank at zero, and its weights at zero."""
    units = [bank.first + bank.count // 2 for bank in lens.banks[layer]]

    def on_units(at, values):
        values = values.clone()
        is_changed = lens.banks[at][0].down.data_ptr() == lens.banks[layer][0].down.data_ptr()  # or is shared
        values[..., units if is_changed else []] = 0
        return values

    with lens.hidden_units(on_units):
        ablated = lens.unembed(lens.hidden(tokens))
    changed = []
    for bank in lens.banks[layer]:
        unit = bank.count // 2
        column = bank.down[divmod(unit, bank.down.shape[1])] if bank.down.ndim == 3 else bank.down[:, unit]
        changed.append((column, column.clone()))
        column.zero_()
    expected = lens.model(input_ids=tokens, use_cache=False).logits
    for column, before in changed:
        column.copy_(before)
    return (ablated - expected).abs().max().item()


def read(model_type):
    """How much of a type's tiny model the lens sees, and what it does not see, or why."""
    try:
        with quiet():
            model = build(model_type)
            lens = Lens(model)
            check(lens)
            worst = max(errors_of(lens).values())
    except UserError as error:
        return "refused", str(error)
    except Exception as error:  # of a tiny model, whatever its class raises
        return "refused", f"not built, or run: {type(error).__name__}: {error}".partition("\n")[0][:160]
    if worst > LARGEST_ERROR:
        return "refused", f"what is seen differs by {worst:.2g}"
    said = "; ".join(f"no {name}: {why}" for name, why in lens.lacks.items())
    return ("in part" if lens.lacks else "wholly"), said


def page(rows):
    """What docs/architectures.md says."""
    lines = ["# Architectures", "", __doc__.partition("(ours)")[2].strip("\n"), ""]
    for found, some in rows.items():
        lines += [f"## {found.capitalize()}: {len(some)}", ""]
        if found == "wholly":
            lines += [", ".join(f"`{model_type}`" for model_type, _ in some), ""]
        else:
            lines += ["| what is not seen, or why | types |", "|---|---|"]
            types = {}  # by reason
            for model_type, said in some:
                types.setdefault(said.strip(" :"), []).append(f"`{model_type}`")
            lines += [f"| {said} | {', '.join(names)} |" for said, names in types.items()] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rows = {"wholly": [], "in part": [], "refused": []}
    for model_type in progress(sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found, said = read(model_type)
        rows[found].append((model_type, said))
        if sys.argv[1:]:
            print(f"{model_type}: {found}. {said}")
    if not sys.argv[1:]:
        PAGE.write_text(page(rows))
    print(", ".join(f"{len(some)} {found}" for found, some in rows.items()))
