"""Why does a newborn prefer tokens? Its states contract: every mechanism of BB section 4, with its theory.

    python contraction.py                        # all of them, about ten minutes on 2 cores
    python contraction.py layers --seed 42       # Figures 2 and 7: which sublayer contracts, layer by layer
    torchrun --nproc-per-node 2 contraction.py overlap --seed {0..99} --num-sequences 2000

The first word is an experiment, one of EXPERIMENTS below, or all; alone, it refuses a flag that it does not
read. Inputs are Gaussian vectors like embeddings (BB 4.1), but tokens in `overlap`, `predict` and `cure`.
"""

import functools
import itertools
import math
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import common
import theory
from checkpoint import config_of, load, models, shared_context
from common import UserError, setting
from experiment import conduct, judge_each
from init import SCHEMES, STD, newborn, variant
from model import ACTIVATIONS, PRESETS, ModelConfig, Transformer, rope_table
from probe import RANKS, gaussian_vectors, preference_row, probe
from stats import over_seeds, pairwise_cosine, uniform_counts


@dataclass
class Settings(common.RunSettings):
    """What `contraction.py` can be told; None: the experiment's own default."""

    model: tuple[str, ...] | None = setting(None, "presets, PRESET@SEED, or checkpoint folders")
    seed: tuple[int, ...] | None = setting(None, "seeds of the presets' weights")
    embedding_seed: int | None = setting(None, "seed of embedding and head (default: 0 for all seeds)")
    init: str | None = setting(None, "how the weights are drawn (default: gpt2)", SCHEMES)
    input_seed: int = setting(0, "seed of the random inputs")
    num_sequences: int | None = setting(None, "random sequences, or vectors, of a seed and length", least=2)
    sequence_length: tuple[int, ...] | None = setting(None, "positions in a sequence")
    batch_size: int | None = setting(None, "sequences in a forward pass (default: as probe.py's)", least=1)

    def born(self, name: str, seed: int, dtype="float32", init: str | None = None) -> Transformer:
        """A model as these settings ask; in float32 wherever that is cheap."""
        seeds = (seed, self.embedding_seed)
        return load(name, self.device, getattr(torch, dtype), init or self.init, seeds)

    def vectors(self, T: int, d: int) -> torch.Tensor:
        """The Gaussian inputs, (num_sequences, T, d)."""
        return gaussian_vectors(self.input_seed, range(self.num_sequences), T, d).to(self.device)


def bare(s: Settings, name: str, seed: int, **changes) -> Transformer:
    """The model changed, a newborn without vocabulary; its `block.mlp` alone is MLP0 (BB Definition 1)."""
    if name not in PRESETS:
        return variant(s.born(name, seed), **changes)
    return newborn(replace(PRESETS[name], vocab_size=1, **changes), seed, scheme=s.init, device=s.device)


# ---- which sublayer contracts? (BB 4.1) --------------------------------------------------------------------


def ablated(s: Settings, name: str, seed: int):
    """(key of a row, its model, what `probe` finds) for the full model, MLP only and attention only."""
    model = s.born(name, seed, s.dtype)
    for kind, T in itertools.product(("full", "mlp", "attention"), s.sequence_length):
        part, label = variant(model, sublayers=kind), f"{name} {kind}, seed {seed}, T={T}"
        found = probe(part, T, s.num_sequences, s.batch_size, s.input_seed, label, gaussian=True)
        yield {"model": name, "variant": kind, "sequence_length": T}, part, found


def layers(s: Settings, name: str, seed: int):
    """Figures 2 and 7: cosine of the last positions of two sequences after each block."""
    rows = []
    for key, part, found in ablated(s, name, seed):
        law, _ = theory.kernel_recursion(part.config, key["sequence_length"], s.init)
        for layer, cosines in enumerate(found["layers"]):
            mean, std = cosines.mean_and_std()
            rows.append(key | {"layer": layer, "mean_cosine": mean, "std_cosine": std, "theory": law[layer]})
    return rows, []


def ablation(s: Settings, name: str, seed: int):
    """Figure 3 and Table 2: token preference and final contraction of the three."""
    rows, points = [], []
    for key, part, found in ablated(s, name, seed):
        key, counts = {"seed": seed} | key, found["token_counts"].sort(descending=True).values
        uniform = uniform_counts(s.num_sequences, part.config.vocab_size, RANKS).tolist()
        significance = {"cosine_log10_p": found["cosines"].log10_p()}
        rows.append(key | preference_row(part, found, uniform) | significance)
        for rank, (count, law) in enumerate(zip(counts.tolist(), uniform), start=1):
            points.append(key | {"rank": rank, "count": count, "theory": law})
    return rows, points


# ---- the MLP's asymmetric activation (BB 4.2) --------------------------------------------------------------


def mlp(s: Settings, name: str, seed: int):
    """Figures 4 and 5, Proposition 2: MLP0 stacks of one set of weights, and the MLP-only model."""
    own = bare(s, name, seed, sublayers="mlp")
    relu, tanh = variant(own, mlp="relu"), variant(own, mlp="tanh")
    stacks = {"mlp0_relu": relu, "mlp0_tanh": tanh, "standard": own, "standard_relu": relu}
    x, rows = s.vectors(1, own.config.d_model), []
    for stack, model in stacks.items():
        states = []
        if stack.startswith("mlp0"):
            law = theory.relu_recursion(model.config.num_layers) if model is relu else itertools.repeat(0.0)
            states.append(x[:, 0])
            for block in model.model.layers:  # no norm, no residual
                states.append(block.mlp(states[-1]))
        else:
            law, _ = theory.kernel_recursion(model.config, 1, s.init)
            model.hidden(x, on_state=lambda layer, x, states=states: states.append(x[:, 0]))
        for layer, (state, c) in enumerate(zip(states, law)):
            key = {"model": name, "stack": stack, "layer": layer, "theory": c}
            rows.append(key | pairwise_cosine(state))
            if stack == "mlp0_relu":  # and as torch's `cosine_similarity` has it, with norms of at least 1e-8
                key |= {"stack": "mlp0_relu_epsilon", "theory": None}
                rows.append(key | pairwise_cosine(state, epsilon=1e-8))
    return rows, []


def engage(s: Settings, name: str, seed: int):
    """Figure 6: LayerNorm spreads the pre-activations until the activation's asymmetry tells."""
    model = bare(s, name, seed, sublayers="mlp", num_layers=1)
    block, config, rows, points = model.model.layers[0], model.config, [], []
    x, z = s.vectors(1, config.d_model)[:, 0], torch.linspace(-2, 2, 81, dtype=torch.float64)
    for normed, inputs in ((True, block.post_attention_layernorm(x)), (False, x)):
        g = (block.mlp.gate_proj or block.mlp.up_proj)(inputs)
        std = STD * inputs.square().sum(1).mean().sqrt().item()
        law = theory.one_block_cosine(config.mlp, std, config.d_model)
        key = {"model": name, "normed": normed, "theory": law, "preactivation_std": g.std().item()}
        rows.append(key | pairwise_cosine(block.mlp(inputs)))
        density = torch.histc(g, 81, -2.025, 2.025)  # bins about the z
        key = {"curve": f"pre-activations {'with' if normed else 'without'} LayerNorm", "half": None}
        points += [key | {"z": a, "y": b} for a, b in zip(z.tolist(), (density / density.max()).tolist())]
    key, phi = {"curve": f"activation ({config.mlp})"}, ACTIVATIONS[config.mlp](z)
    points += [key | {"z": a, "y": b, "half": a / 2} for a, b in zip(z.tolist(), phi.tolist())]
    return rows, [{"model": name} | point for point in points]


# ---- attention amplifies (BB 4.3, 4.4) ---------------------------------------------------------------------


def amplify(s: Settings, name: str, seed: int):
    """Table 3, Proposition 4: the last position after MLP0, MLP0 twice, and MLP0 then Attn0, all ReLU."""
    model, rows = bare(s, name, seed, sublayers="mlp", mlp="relu", num_layers=2), []
    one, two = (block.mlp for block in model.model.layers)
    _, c, c2 = theory.relu_recursion(2)
    for T in s.sequence_length:
        first = [one(x) for x in s.vectors(T, model.config.d_model)]  # a sequence (T, d) at a time
        last, mean = torch.stack([x[-1] for x in first]), torch.stack([x.mean(0) for x in first])
        stacks = ("mlp0", last, c), ("mlp0_mlp0", two(last), c2), ("mlp0_attn0", mean, theory.amplifier(c, T))
        for stack, states, law in stacks:
            key = {"model": name, "stack": stack, "sequence_length": T, "theory": law}
            rows.append(key | pairwise_cosine(states))
    return rows, []


def intra(s: Settings, name: str, seed: int):
    """Figure 8, Proposition 5: mean cosine within a sequence, diagonal included, along attention blocks."""
    model, rows = bare(s, name, seed, sublayers="attention"), []
    config, L = model.config, model.config.num_layers
    for T in s.sequence_length:
        x, count = s.vectors(T, config.d_model), torch.arange(1, T + 1, device=s.device)[:, None]  # (n, T, d)
        _, attention = theory.kernel_recursion(config, T, s.init, residual=False)
        limit, rope = theory.averaging_limit(T, L), rope_table(config, x)
        for stack, law in (("attn0", theory.averaging_stack(T, L)), ("attention", attention[1:])):
            state = x
            for layer, block in enumerate(model.model.layers):  # without residual
                if stack == "attn0":
                    state = state.cumsum(1) / count
                else:
                    state = block.self_attn(block.input_layernorm(state), rope, False, None)
                unit = F.normalize(state.double(), dim=2, eps=0)
                key = {"model": name, "stack": stack, "sequence_length": T, "layer": layer + 1}
                key |= {"exact_theory": law[layer], "limit_theory": limit[layer]}
                rows.append(key | {"mean_cosine": unit.mean(1).square().sum(1).mean().item()})
    return rows, []


def variance(s: Settings, name: str, seed: int):
    """Figure 9, Equation 2: standard deviation of the aggregated values by position, in the first block."""
    model, rows, squares = bare(s, name, seed, sublayers="attention", num_layers=1), [], []
    config, T = model.config, max(s.sequence_length)

    watch = lambda _, heads, *qkv: squares.append(heads.double().square().mean((0, 1, 3)))  # noqa: E731
    for i in range(s.num_sequences):
        x = gaussian_vectors(s.input_seed, range(i, i + 1), T, config.d_model)
        model.hidden(x.to(s.device), on_heads=watch)  # heads: (1, H, T, Dh)
    law, measured = theory.aggregated_std(config, T).tolist(), torch.stack(squares).mean(0).sqrt()
    for i, (std, c) in enumerate(zip(measured.tolist(), law), start=1):
        rows.append(dict(model=name, position=i, std=std, uniform_theory=law[0] / math.sqrt(i), theory=c))
    return rows, []


# ---- from weights to favourite tokens, and the cure (Finding 2.2, and ours) --------------------------------


def on_tokens(s: Settings, name: str, seed: int, T: int, init: str):
    """(row, points): a newborn on random tokens, beside what its weights alone foretell of it."""
    model = s.born(name, seed, s.dtype, "gpt2" if init == "projected" else init)
    if init == "projected":
        theory.project_out_mean_output(model)
    begun = time.perf_counter()
    foreseen, foreseen_cosine = theory.mean_field(model, T)
    seconds = time.perf_counter() - begun
    found = probe(model, T, s.num_sequences, s.batch_size, s.input_seed, f"{name} {init}, seed {seed}, T={T}")
    row = preference_row(model, found, uniform_counts(s.num_sequences, model.config.vocab_size, RANKS))
    counts, direction = found["token_counts"], F.normalize(found["cosines"].direction().cpu(), dim=0)
    downs = [block.mlp.down_proj.weight.float().square().mean().item() for block in model.model.layers]
    law, _ = theory.kernel_recursion(model.config, T, init)
    row |= {
        "direction_count": int(counts[row["direction_token"]]),
        "runner_up_count": int(counts.topk(2).values[1]),
        "direction_cosine": float(foreseen @ direction),
        "predicted_token": int(model.unembed(foreseen.to(s.device, torch.float32)).argmax()),
        "mean_field_cosine": foreseen_cosine,
        "predicted_cosine": law[-1],
        "seconds": seconds,
        "down_std": math.sqrt(sum(downs) / len(downs)),
    }
    key = {"model": name, "init": init, "seed": seed, "sequence_length": T}
    points = [dict(predicted=a, measured=b) for a, b in zip(foreseen.tolist(), direction.tolist())]
    return key | row, [{"model": name} | point for point in points]


def overlap(s: Settings, name: str, seed: int):
    """Finding 2.2: is the token of the contraction direction the most frequent one?"""
    return [on_tokens(s, name, seed, T, s.init)[0] for T in s.sequence_length], []


def predict(s: Settings, name: str, seed: int):
    """Ours: the favourite tokens and their direction from the weights alone, without a forward pass."""
    found = [on_tokens(s, name, seed, T, s.init) for T in s.sequence_length]
    return [row for row, _ in found], found[0][1]


def cure(s: Settings, name: str, seed: int):
    """Ours: newborns whose down projections cannot pass on what all hidden units share."""
    kinds = itertools.product(s.sequence_length, ("gpt2", "centered", "projected"))
    return [on_tokens(s, name, seed, T, init)[0] for T, init in kinds], []


def width(s: Settings, name: None, seed: int):
    """Ours: contraction of one MLP0 block over its width, for unit-variance inputs."""
    rows, tiny = [], ModelConfig(1, 1, num_layers=1, num_heads=1, d_model=2, d_ff=2, sublayers="mlp")
    for kind, scale, d in itertools.product(("gelu", "swiglu"), (True, False), (128, 256, 512, 1024)):
        config, std = replace(tiny, d_model=d, d_ff=4 * d, mlp=kind), d**-0.5 if scale else STD
        block = newborn(config, seed, scheme="normal", device=s.device).model.layers[0].mlp
        for weight in block.parameters():
            weight.mul_(std / STD)
        scaling = f"weight std {'1/sqrt(d)' if scale else STD}"
        key = {"mlp": kind, "d_model": d, "weight_std": std, "scaling": scaling}
        key["theory"] = theory.one_block_cosine(kind, std * math.sqrt(d), d)
        rows.append(key | pairwise_cosine(block(s.vectors(1, d)[:, 0] / STD)))
    return rows, []


# ---- the experiments ---------------------------------------------------------------------------------------

EIGHT, TEN = tuple(range(42, 50)), tuple(range(42, 52))
GPT2 = dict(model=("nano_gpt2",), init="gpt2")
PROBED = GPT2 | dict(batch_size=None, sequence_length=(64,))
TOKENS = PROBED | dict(embedding_seed=0, seed=EIGHT, num_sequences=400)
EXPERIMENTS = {  # name: what samples it for a model and a seed, its source, and what it reads, with defaults
    "layers": (layers, "BB Figures 2, 7",
        PROBED | dict(seed=EIGHT, num_sequences=24, sequence_length=(64, 512))),
    "ablation": (ablation, "BB Figure 3, Table 2", TOKENS | dict(seed=(42,), num_sequences=500)),
    "overlap": (overlap, "BB Finding 2.2", TOKENS),
    "mlp": (mlp, "BB Figures 4, 5, Proposition 2", GPT2 | dict(seed=TEN, num_sequences=300)),
    "engage": (engage, "BB Figure 6", GPT2 | dict(seed=TEN, num_sequences=300)),
    "amplify": (amplify, "BB Table 3, Proposition 4",
        GPT2 | dict(seed=TEN, num_sequences=20, sequence_length=(100, 128, 1024))),
    "intra": (intra, "BB Figure 8, Proposition 5",
        GPT2 | dict(seed=EIGHT, num_sequences=4, sequence_length=(32, 128, 512))),
    "variance": (variance, "BB Figure 9, Equation 2",
        GPT2 | dict(model=("nano_gpt2", "gpt2_1b"), seed=(42,), num_sequences=32, sequence_length=(1024,))),
    "predict": (predict, "ours", TOKENS),
    "cure": (cure, "ours", {k: v for k, v in TOKENS.items() if k != "init"} | dict(num_sequences=120)),
    "width": (width, "ours", dict(seed=EIGHT, num_sequences=600)),
}  # fmt: skip
LAWS = ("theory", "exact_theory", "uniform_theory", "predicted_cosine")  # of newborns, not of checkpoints
COLUMNS = {  # of rows too wide to show
    "ablation": "model seed variant top1_token top1_count ratio log10_p mean_cosine cosine_log10_p",
    "overlap": "model seed top1_token top1_count runner_up_count direction_token direction_count",
    "predict": "model seed direction_cosine predicted_token direction_token mean_field_cosine mean_cosine",
    "cure": "model seed init mean_cosine top1_token top1_count uniform_max_count log10_p down_std",
}


def fill(name: str, given: Settings, strict: bool) -> Settings:
    """`given` with the experiment's defaults; `strict`: UserError for a flag that it does not read."""
    defaults, told = EXPERIMENTS[name][2], {k: v for k, v in vars(given).items() if v is not None}
    unread = [flag for flag in told if getattr(Settings, flag) is None and flag not in defaults]
    if strict and unread:
        raise UserError(f"{name} does not read --{unread[0].replace('_', '-')}")
    s = Settings(**(defaults | {flag: value for flag, value in told.items() if flag not in unread}))
    if "batch_size" not in defaults:  # no forward passes of `probe`: float32 is cheap
        s.dtype = "float32"
    for config in map(config_of, s.model or ()):
        if config.sublayers != "full" or config.num_layers < 2:
            raise UserError("expected models of attention and MLPs, and of two layers or more")
    if s.sequence_length:  # the experiment's own lengths, as far as the model goes
        context = shared_context(s.model, given.sequence_length)
        fitting = tuple(T for T in s.sequence_length if T <= context)
        s.sequence_length = given.sequence_length or fitting or (context,)
    if any(seed is None for _, seed in models(s.model or (), s.seed)) and name == "cure":
        raise UserError("cure compares how newborns are drawn: give --model a preset")
    return s


@torch.inference_mode()
def run(name: str, settings: Settings) -> dict:
    """Sample an experiment for every model and seed (points: its first); write JSON and figure; the JSON."""
    sample, paper, _ = EXPERIMENTS[name]

    def measure(s: Settings, *_) -> dict:
        chosen = models(s.model, s.seed) if s.model else [(None, seed) for seed in s.seed]
        rows, points = [], []
        for model, seed in common.progress(chosen, desc=name, unit=" models"):
            more, drawn = sample(s, model, seed)
            if seed is None:
                more = [row | {law: None for law in LAWS if law in row} for row in more]
            rows, points = rows + more, points + drawn * all(point["model"] != model for point in points)
        return {"rows": rows if "seed" in rows[0] else over_seeds(rows), "points": points}

    return conduct(settings, name, paper, measure, COLUMNS.get(name, ""), functools.partial(judge_each, name))


def plan(words: list[str]) -> list:
    """The settings of a command line's experiment, or of all, and what to do."""
    name, words = common.subcommand(words, [*EXPERIMENTS, "all"], "all", "experiment")
    given = common.parse_settings(Settings, __doc__, words)
    filled = {one: fill(one, given, name != "all") for one in (EXPERIMENTS if name == "all" else [name])}
    return [(s, functools.partial(run, one, s)) for one, s in filled.items()]


if __name__ == "__main__":
    common.run(plan)
