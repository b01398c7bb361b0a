"""Find, load and save a model by name.

checkpoint.load("nano_llama@42:7")      # a newborn of seed 42, its embedding of seed 7
checkpoint.load("runs/laptop")          # a run's newest step; or a folder, a .gguf file, ORG/NAME of the Hub
"""

import functools
import json
import re
from dataclasses import asdict, dataclass, replace
from os.path import exists, isdir, isfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from init import newborn
from lib.files import as_user_error, atomic_file, atomic_folder, check_regular, read_json
from lib.settings import UserError, check_choice, from_values
from model import PRESETS, ModelConfig, Transformer

WEIGHTS = "model.safetensors"
TOKENIZERS = ("tokenizer.model", "tokenizer.json", "tokenizer.txt")
OURS = "bornbiased"  # marks a config.json written here; the model_type of models that only model.py runs
PARTS = r"(.*\.)?([qkvo]_proj|(gate|up|down)_proj|embed_tokens|lm_head|((input|post_attention)_layer)?norm)"
THEIRS = re.compile(PARTS + r"\.weight|.*\.[qkv]_proj\.bias")  # the parameters of a LLaMA or a Qwen2
KEYS = {  # of config.json: our name, and Hugging Face's
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "head_dim": "head_dim",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "norm_epsilon": "rms_norm_eps",
    "num_kv_heads": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}


@dataclass(frozen=True)
class Spec:
    """A model by name: a newborn of a preset and its seeds, or a checkpoint folder that was saved here."""

    name: str  # as the user wrote it
    folder: Path | None = None
    preset: str | None = None
    seed: int | None = None
    embedding_seed: int | None = None
    scheme: str = "gpt2"  # how the newborn is drawn

    is_ours = True  # a stranger's is not

    @property
    def label(self):
        """The name with its seed, and the embedding seed if it is another."""
        if self.name != self.preset:
            return self.name
        embedding = "" if self.embedding_seed in (None, self.seed) else f":{self.embedding_seed}"
        return f"{self.name}@{self.seed}{embedding}"

    @property
    def config(self):
        """What is known without the weights: a ModelConfig; a stranger's is a strangers.lens.Shape."""
        if self.preset:
            return PRESETS[self.preset]
        return config_of(read_json(self.folder / "config.json"), self.folder)

    @functools.cached_property
    def tokenizer_file(self):
        """The file of the model's own tokenizer; None if there is none that we can read."""
        places = [self.folder / name for name in TOKENIZERS if self.folder]
        return next(filter(isfile, places), None)

    @property
    def run(self):
        """The settings of the run that saved it; {} if there are none."""
        settings = self.folder and self.folder.parent / "settings.json"
        return read_json(settings) if self.is_ours and settings and exists(settings) else {}

    def begins_with_bos(self, tokenizer):
        """Whether the model was trained with BOS in front: its run's settings say so."""
        return bool(self.run.get("bos_first"))

    def load(self, device="cpu", dtype=torch.float32):
        """The Transformer in eval mode, its blocks in `dtype`; a stranger's is a strangers.lens.Lens."""
        if self.preset:
            return newborn(self.preset, self.seed, self.embedding_seed, self.scheme, device, dtype)
        path = self.folder / WEIGHTS
        check_regular(path)
        with as_user_error(path):
            weights = load_file(path)
        return built(self.config, weights, path, device, dtype)

    own_config = config  # a stranger's: its ModelConfig, if model.py can run it
    load_own = load  # a stranger's: that Transformer


def built(config: ModelConfig, weights, place, device, dtype):
    """The Transformer of tensors by name, in eval mode; UserError if they do not fit, or are not finite."""
    if config.num_layers > len(weights):  # building the layers might take all memory
        raise UserError(f"{place}: too few tensors for {config.num_layers} layers")
    with torch.device("meta"):
        model = Transformer(config).cast_blocks(dtype)
    parameters = dict(model.named_parameters())
    shapes = {(name, tuple(parameter.shape)) for name, parameter in parameters.items()}
    differing = shapes ^ {(name, tuple(weight.shape)) for name, weight in weights.items()}
    if differing:
        name, shape = min(differing)
        raise UserError(f"{place}: it does not fit model.py at {name} {shape}: was that changed since?")
    for name, weight in weights.items():
        weights[name] = finite(place, name, weight).to(device, parameters[name].dtype).contiguous()
    model.load_state_dict(weights, assign=True)  # without a copy
    return model.eval()


def finite(place, name, weight):
    """The same weight; UserError if it is not finite."""
    if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():  # which takes no memory
        raise UserError(f"{place}: {name} is not finite: check it for NaN")
    return weight


def parse_spec(text, scheme="gpt2", in_parts=False):
    """The Spec of PRESET@SEED, PRESET@SEED:EMBEDDING_SEED, a folder, a file, smollm2, or a name of the Hub.

    If `in_parts`, weights on the Hub are fetched when they are read, and no more than that.
    """
    path = Path(text)
    match = re.fullmatch(r"([^/]+)@(\d{1,40})(?::(\d{1,40}))?", text)
    if match and not exists(path):
        preset, seed, embedding_seed = match.groups()
        check_choice(preset, PRESETS, "preset")
        return Spec(text, None, preset, int(seed), int(embedding_seed or seed), scheme)
    folder = path.parent if path.name in (WEIGHTS, "ckpt.pt") else path
    for place in (folder, *steps(folder)[-1:]):  # a run means its newest step
        config = place / "config.json"
        if isfile(place / WEIGHTS) and isfile(config) and is_ours(read_json(config)):
            return Spec(text, place)
    if not in_parts and isfile(folder / "ckpt.pt") and not exists(folder / "config.json"):
        hint = "save it as a GPT-2 of transformers; `seedprint.py compare` reads its weights as they are"
        raise UserError(f"{text}: nanoGPT's ckpt.pt has no config.json: {hint}")
    from strangers.names import find  # the only place where the core enters strangers/

    return find(text, in_parts)


def specs_of(names, seeds, embedding_seed=None, scheme="gpt2"):
    """The Specs of `--model` and `--seed`: presets with each of the seeds, others as they are."""
    specs = []
    for name in names:
        if name in PRESETS:
            specs += [Spec(name, None, name, seed, embedding_seed, scheme) for seed in seeds]
        else:
            specs.append(parse_spec(name, scheme))
    return specs


def load(name, device="cpu", dtype=torch.float32):
    """The model that a name or folder means, in eval mode, its blocks in `dtype`."""
    return parse_spec(str(name)).load(device, dtype)


def steps(run):
    """The checkpoint folders of a run, oldest first, without links."""
    found = sorted(Path(run).glob("step_" + "[0-9]" * 7))
    return [folder for folder in found if isdir(folder) and not folder.is_symlink()]


def shortest_context(specs):
    """The number of positions that all models can read."""
    return min(spec.config.context_length for spec in specs)


def check_lengths(lengths, context, flag="--sequence-length") -> None:
    """UserError for a length that does not fit the models' context."""
    for length in lengths:
        if not 1 <= length <= context:
            limit = f"1 to {context}, the model's context or window"
            raise UserError(f"{flag} {length}: expected {limit} (context_length in model.py's PRESETS)")


def save(folder, model, tokenizer=None) -> None:
    """Write a checkpoint folder, whole or not at all; UserError if the disk is full or read-only."""
    with atomic_folder(folder) as new:
        write(new, model, tokenizer)


def save_constants(path, constants, **facts) -> None:
    """Write constants, (G, D) each by layer, as keys.N and values.N, (1, G, 1, D), with `facts` as metadata.

    So a key-value cache of `transformers` holds one token in layer N, counted from 0 (docs/sinks.md).
    """
    tensors = {}
    for layer, (key, value) in constants.items():
        tensors[f"keys.{layer - 1}"] = key[None, :, None].contiguous()
        tensors[f"values.{layer - 1}"] = value[None, :, None].contiguous()
    with atomic_file(path) as temporary:
        save_file(tensors, temporary, {name: str(fact) for name, fact in facts.items()})


def write(folder, model, tokenizer=None) -> None:
    """Write a checkpoint and its tokenizer's files into an empty folder."""
    parameters = dict(model.named_parameters())
    save_file(parameters, folder / WEIGHTS, {"format": "pt"})
    config = config_json(model.config, parameters)
    if tokenizer is not None:
        tokenizer.save(folder, config["model_type"])
        special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.ends}
        (folder / "generation_config.json").write_text(json.dumps(special, indent=1) + "\n")
        if "architectures" in config:  # else transformers takes Llama's
            config |= special
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def config_json(config: ModelConfig, names=()):
    """What config.json says of a model, by its parameters' names: a LLaMA's or Qwen2's keys, or our own."""
    whole = replace(config, num_kv_heads=config.kv_heads, head_dim=config.head_size)
    family = "qwen2" if config.qkv_bias else "llama"
    raw = {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        **{theirs: getattr(whole, ours) for ours, theirs in KEYS.items()},
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        OURS: True,
    }
    is_theirs = all(map(THEIRS.fullmatch, names)) and config_of(raw, family) == whole
    return raw if is_theirs else {"model_type": OURS, **asdict(config)}


def is_ours(raw):
    """Whether `config_json` wrote a config.json; what transformers has saved since may be another model."""
    return OURS in (raw.get("model_type"), *raw) and "transformers_version" not in raw


def config_of(raw, place):
    """The ModelConfig of what `config_json` wrote; UserError if it is damaged."""
    values = {name: value for name, value in raw.items() if name != "model_type"}
    if raw.get("model_type") != OURS:
        with as_user_error(place):
            values = {ours: raw[theirs] for ours, theirs in KEYS.items()}
            values["rope_theta"] = raw["rope_parameters"]["rope_theta"]
            values["qkv_bias"] = {"llama": False, "qwen2": True}[raw["model_type"]]
    return from_values(ModelConfig, values, place)
