"""How do weights enter and leave: own runs, Hugging Face folders, seeds?

    >>> import checkpoint
    >>> model = checkpoint.load("nano_llama@42")          # newborn; with embedding seed 7: "nano_llama@42:7"
    >>> model = checkpoint.load("runs/laptop")            # a run's newest step; or runs/laptop/step_0000100
    >>> model = checkpoint.load("/models/Llama-2-7b-hf")  # or Mistral, Qwen2, Qwen3: safetensors, or shards

A folder holds `model.safetensors` (or shards and their index) and `config.json`. LLaMA's and Qwen's are as
Hugging Face's, so `transformers` opens them; config.json of all else is our ModelConfig as it stands. Ours
also have `checksums.json`, and `state.pt` to resume from. Nothing in a stranger's folder is ever executed.
"""

import json
import os
import re
import shutil
import typing
from dataclasses import asdict
from pathlib import Path

import safetensors
import safetensors.torch
import torch

import common
from common import UserError, choose
from init import birth_value, newborn
from model import PRESETS, Llama3Scaling, ModelConfig, Transformer

FAMILIES = {"llama": {}, "mistral": {}}
FAMILIES |= {"qwen2": dict(qkv_bias=True), "qwen3": dict(qk_norm=True, head_dim=128)}
KEYS = {  # Hugging Face's name: ours
    "vocab_size": "vocab_size", "hidden_size": "d_model", "intermediate_size": "d_ff", "head_dim": "head_dim",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "rms_norm_eps": "norm_epsilon",
    "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "context_length",
    "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip
SCALING = {  # the same for Llama 3's RoPE
    "factor": "factor", "original_max_position_embeddings": "original_context_length",
    "low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor",
}  # fmt: skip


# ---- configurations ----------------------------------------------------------------------------------------


def typed(kind: type, values: dict, place: Path):
    """`kind(**values)`, a dataclass from a stranger's JSON; UserError for wrong types and strange numbers."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        expected = typing.get_args(hints.get(name)) or (hints.get(name),)
        number = type(value) in (int, float)
        fits = type(value) in expected or (number and float in expected)
        if not fits or (number and not 0 < value < 2**40):
            raise UserError(f"{place}: {name} cannot be {value!r}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: {str(error).removeprefix(f'{kind.__name__}.__init__() ')}") from None


def read_config(folder: Path) -> ModelConfig:
    """The architecture that a folder's config.json describes; UserError for one that is not ours."""
    place = folder / "config.json"
    try:
        raw = json.loads(place.read_text("utf-8"))
        kind = raw.pop("model_type")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"cannot read {place}: {type(error).__name__}: {error}") from None
    if kind == "bornbiased":
        if isinstance(raw.get("rope_scaling"), dict):
            raw["rope_scaling"] = typed(Llama3Scaling, raw["rope_scaling"], place)
        return typed(ModelConfig, raw, place)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"{place}: foreign architecture {kind!r}; expected {', '.join(FAMILIES)}")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{place}: rope_parameters cannot be {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    window = raw.get("sliding_window", 4096 if kind == "mistral" else None)  # their default
    windowed = raw.get("use_sliding_window", kind == "mistral") and window
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1))
    for strange, what in (
        (raw.get("hidden_act", "silu") != "silu", f"hidden_act {raw.get('hidden_act')!r}"),
        (raw.get("attention_bias") or raw.get("mlp_bias"), "biases of its linear layers"),
        (windowed, "sliding-window attention"),
        (raw.get("quantization_config"), "quantised weights"),
        (rope_type not in ("default", "llama3"), f"RoPE of type {rope_type!r}"),
        (partial != 1, "RoPE on a part of the head"),
    ):
        if strange:
            raise UserError(f"{place}: {what} is not supported; expected a plain {', '.join(FAMILIES)}")
    values = {"norm_epsilon": 1e-6} | FAMILIES[kind]  # what they leave out
    values |= {ours: raw[theirs] for theirs, ours in KEYS.items() if theirs in raw}
    values["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if rope_type == "llama3":
        given = {ours: rope[theirs] for theirs, ours in SCALING.items() if theirs in rope}
        values["rope_scaling"] = typed(Llama3Scaling, given, place)
    return typed(ModelConfig, values, place)


def config_json(config: ModelConfig) -> dict:
    """What config.json says: a Hugging Face configuration where theirs can say it, else our own."""
    llama = (config.norm, config.mlp, config.sublayers, config.attn_calibration)
    split = config.qkv_bias and (config.qk_norm or config.head_dim is not None)  # no Qwen2 has these
    if llama != ("rmsnorm", "swiglu", "full", "none") or split:
        return {"model_type": "bornbiased", **asdict(config)}
    kind = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"
    values = asdict(config) | {"num_kv_heads": config.kv_heads, "head_dim": config.head_size}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := values["rope_scaling"]:
        rope |= {"rope_type": "llama3"} | {theirs: scaling[ours] for theirs, ours in SCALING.items()}
    common_keys = {"hidden_act": "silu", "attention_bias": False, "dtype": "float32", "rope_parameters": rope}
    theirs = {theirs: values[ours] for theirs, ours in KEYS.items() if kind != "qwen2" or ours != "head_dim"}
    return {"model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"], **theirs, **common_keys}


# ---- specs -------------------------------------------------------------------------------------------------


def find(spec: str) -> tuple[str, int, int] | Path:
    """(preset, seed, embedding seed) of PRESET@SEED, or the folder of any other spec, or a UserError."""
    match = re.fullmatch(r"([^/]+)@(\d+)(?::(\d+))?", spec)
    if match and not os.path.isdir(spec):
        preset, seed, embedding_seed = match.groups()
        return choose(preset, PRESETS, "preset"), int(seed), int(embedding_seed or seed)
    if not os.path.isdir(spec):
        hint = f"expected a checkpoint folder, or PRESET@SEED with one of {', '.join(PRESETS)}"
        hint = f"give it a seed, as in {spec}@42" if spec in PRESETS else hint
        raise UserError(f"no model '{spec}': {hint}")
    own = os.path.exists(Path(spec) / "config.json")
    return Path(spec) if own else next(iter(steps(spec)[::-1]), Path(spec))


def steps(run: str | Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first."""
    return sorted(Path(run).glob("step_" + "[0-9]" * 7))


def config_of(spec: str) -> ModelConfig:
    """The architecture of a preset or spec, without its weights."""
    found = (spec,) if spec in PRESETS else find(spec)
    return read_config(found) if isinstance(found, Path) else PRESETS[found[0]]


def shared_context(specs, lengths: tuple[int, ...] | None = None, flag: str = "--sequence-length") -> int:
    """The shortest context of the models; UserError if one of the `lengths` does not fit it."""
    context = min(config_of(spec).context_length for spec in specs)
    for T in lengths or ():
        if not 1 <= T <= context:
            raise UserError(f"{flag} {T}: expected 1 to {context}, the model's context")
    return context


def load(spec: str, device="cpu", dtype=torch.float32, scheme="gpt2", seeds: tuple = ()) -> Transformer:
    """The model of a spec, or of a preset and `seeds`, drawn by `scheme`; in eval mode, blocks in `dtype`."""
    found = (spec, *seeds) if seeds and spec in PRESETS else find(str(spec))
    if not isinstance(found, Path):
        return newborn(*found, scheme, device, dtype)
    weights = Weights(found)
    with torch.device("meta"):
        model = Transformer(weights.config).cast_blocks(dtype)
    model = model.to_empty(device=device).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
            if not parameter.isfinite().all():
                raise UserError(f"{spec}: {name} is not finite: check it for NaN")
    return model


def tensors(spec: str, scheme: str = "gpt2") -> "Weights | Newborn":
    """The parameters of a spec's model one at a time: `config`, `shapes` by name, `read(name)`."""
    found = find(str(spec))
    return Weights(found) if isinstance(found, Path) else Newborn(PRESETS[found[0]], *found[1:], scheme)


def models(specs: tuple[str, ...], seeds: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """(spec, seed) of every model: a preset with each of the seeds, PRESET@SEED with its own, else None.

    UserError for a model that is named twice.
    """
    own = {spec: find(spec) for spec in specs if spec not in PRESETS}
    alone = {spec: None if isinstance(found, Path) else found[1] for spec, found in own.items()}
    pairs = [(spec, seed) for spec in specs for seed in ([alone[spec]] if spec in own else seeds)]
    if len(set(pairs)) < len(pairs):
        raise UserError("a model is named twice")
    return pairs


def skeleton(config: ModelConfig, place: str | Path = "config") -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, by name; UserError for sizes beyond any memory."""
    try:
        with torch.device("meta"):
            return {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    except (RuntimeError, TypeError):
        raise UserError(f"{place}: no memory could hold these sizes") from None


class Newborn:
    """The tensors of a newborn, each drawn when it is read."""

    def __init__(self, config: ModelConfig, seed: int, embedding_seed: int | None = None, scheme="gpt2"):
        self.config, self.key, self.shapes = config, (seed, embedding_seed, scheme), skeleton(config)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, float32."""
        return birth_value(self.config, name, self.shapes[name], *self.key)


class Weights:
    """The tensors of a checkpoint folder, read one at a time; UserError unless they are its config.json's."""

    def __init__(self, folder: Path):
        check(folder, "config.json")
        self.folder, self.config, self.files, self.shapes = folder, read_config(folder), {}, {}
        index = folder / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if os.path.exists(index):
            try:
                names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
                if not all(Path(name).name == name and name.endswith(".safetensors") for name in names):
                    raise ValueError("a file elsewhere")
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UserError(f"{index}: expected a weight_map to .safetensors files here") from None
        for name in sorted(names):
            check(folder, name)
            try:
                with safetensors.safe_open(folder / name, "pt") as file:
                    for key in file.keys():
                        self.files[key], piece = folder / name, file.get_slice(key)
                        self.shapes[key] = tuple(piece.get_shape())
                        if piece.get_dtype() not in ("F32", "BF16", "F16"):
                            raise UserError(f"{folder / name}: {key} is of type {piece.get_dtype()}")
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(f"cannot read {folder / name}: {error}") from None
        self.match()

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in memory of its own."""
        with safetensors.safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name).clone()

    def match(self) -> None:
        """UserError unless the tensors are those of the configuration, by name and shape."""
        if self.config.num_layers > len(self.files):  # building them might take all memory
            few = f"{len(self.files)} tensors are too few for {self.config.num_layers} layers"
            raise UserError(f"{self.folder}: {few}")
        expected = skeleton(self.config, self.folder / "config.json")
        strange = {n for n in self.shapes.keys() - expected if not n.endswith("rotary_emb.inv_freq")}
        table, head = "model.embed_tokens.weight", "lm_head.weight"
        if head in strange and table in self.shapes and torch.equal(self.read(head), self.read(table)):
            strange.remove(head)  # some tied folders store the table twice
        for name in sorted(expected.keys() | strange):
            if expected.get(name) != self.shapes.get(name):
                here, there = self.shapes.get(name, "missing"), expected.get(name, "no such tensor")
                raise UserError(f"{self.folder}: {name} is {here}, but config.json asks for {there}")


# ---- folders of our own ------------------------------------------------------------------------------------


def check(folder: Path, name: str) -> None:
    """UserError if a file is missing, or its SHA-256 not the one in checksums.json, where there is one."""
    sums = folder / "checksums.json"
    if not os.path.isfile(folder / name):
        raise UserError(f"no checkpoint in {folder}: {name} is missing")
    try:
        known = json.loads(sums.read_text()).get(name) if sums.exists() else None
        whole = known is None or known == common.sha256(folder / name)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"cannot read {folder / name} or {sums}: {error}") from None
    if not whole:
        raise UserError(f"corrupt checkpoint: {folder / name} is not what checksums.json says")


def own_tokenizer(spec: str) -> Path | None:
    """The SentencePiece file beside a checkpoint, if there is one; UserError if it is damaged."""
    if not isinstance(found := find(spec), Path) or not (found / "tokenizer.model").is_file():
        return None
    check(found, "tokenizer.model")
    return found / "tokenizer.model"


def check_tokenizer(spec: str, data) -> None:
    """UserError where a checkpoint has a tokenizer beside it, and a `data` set (a TokenData) is another's."""
    own = data.tokenizer_file.read_bytes() if data.tokenizer_file else data.tokenizer.encode()
    kinds, found = ("tokenizer.model", "tokenizer.txt", "tokenizer.json"), find(spec)  # no set is of the last
    beside = [kind for kind in kinds if isinstance(found, Path) and os.path.isfile(found / kind)]
    if beside:
        check(found, beside[0])
        if (found / beside[0]).read_bytes() != own:
            raise UserError(f"{data.folder} was made by another tokenizer than {found / beside[0]}")


def save(folder: Path, model: Transformer, state: dict | None = None, tokenizer: Path | str = "") -> None:
    """Write a checkpoint folder, complete or not at all; UserError if the disk is full or read-only.

    `tokenizer` is a SentencePiece file, or the name of one that has none.
    """
    try:
        with common.atomic_folder(folder) as new:
            weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
            safetensors.torch.save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
            (new / "config.json").write_text(json.dumps(config_json(model.config), indent=1) + "\n")
            if state is not None:
                torch.save(state, new / "state.pt")
            if isinstance(tokenizer, Path):
                shutil.copyfile(tokenizer, new / "tokenizer.model")
            elif tokenizer:
                (new / "tokenizer.txt").write_text(tokenizer)
            sums = {file.name: common.sha256(file) for file in sorted(new.iterdir())}
            (new / "checksums.json").write_text(json.dumps(sums, indent=1) + "\n")
    except (RuntimeError, safetensors.SafetensorError) as error:  # how torch and safetensors say disk full
        raise UserError(f"cannot write {folder}: {str(error).splitlines()[0]}") from None


def load_state(folder: Path) -> dict:
    """What state.pt holds: tensors and numbers, never code."""
    check(folder, "state.pt")
    try:
        return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load fails in many ways
        raise UserError(f"cannot read {folder / 'state.pt'}: {type(error).__name__}") from None
