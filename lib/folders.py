"""What is in a stranger's checkpoint folder?

    >>> from pathlib import Path
    >>> weights = Weights(Path("/models/Llama-2-7b-hf"))  # or Mistral, Qwen2, Qwen3; or our own
    >>> weights.read("model.norm.weight").shape           # one tensor at a time
    torch.Size([4096])

A folder holds config.json and model.safetensors, or shards and their index. Nothing in it is ever executed.
"""

import json
import os
import typing
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from lib.runtime import sha256
from lib.settings import UserError
from model import Llama3Scaling, ModelConfig, Transformer

FAMILIES = {  # model_type: what its configurations leave out
    "llama": {"norm_epsilon": 1e-6},
    "mistral": {"norm_epsilon": 1e-6},
    "qwen2": {"norm_epsilon": 1e-6, "qkv_bias": True},
    "qwen3": {"norm_epsilon": 1e-6, "qk_norm": True, "head_dim": 128},
}
KEYS = {  # Hugging Face's name: ours
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "head_dim": "head_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "rms_norm_eps": "norm_epsilon",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "context_length",
    "tie_word_embeddings": "tie_embeddings",
}
SCALING_KEYS = {  # the same for Llama 3's RoPE
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
}
JSON_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


# ---- configurations ----------------------------------------------------------------------------------------


def read_config(folder) -> ModelConfig:
    """The architecture that a folder's config.json describes; UserError for one that is not ours."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
        family = raw.pop("model_type")
    except JSON_ERRORS as error:
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from None
    if family == "bornbiased":
        if isinstance(raw.get("rope_scaling"), dict):
            raw["rope_scaling"] = checked(Llama3Scaling, raw["rope_scaling"], path)
        return checked(ModelConfig, raw, path)
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"{path}: foreign architecture {family!r}; expected {', '.join(FAMILIES)}")
    return read_family_config(family, raw, path)


def read_family_config(family, raw, path) -> ModelConfig:
    """A Hugging Face configuration of one of FAMILIES as ours; UserError for what our model does not do."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{path}: rope_parameters cannot be {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)  # their defaults
    strange = {
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "biases of its linear layers": raw.get("attention_bias") or raw.get("mlp_bias"),
        "sliding-window attention": raw.get("use_sliding_window", family == "mistral") and window,
        "quantised weights": raw.get("quantization_config"),
        f"RoPE of type {rope_type!r}": rope_type not in ("default", "llama3"),
        "RoPE on a part of the head": raw.get("partial_rotary_factor", 1) != 1
        or rope.get("partial_rotary_factor", 1) != 1,
    }
    for name, is_strange in strange.items():
        if is_strange:
            raise UserError(f"{path}: {name} is not supported; expected a plain {', '.join(FAMILIES)}")
    values = dict(FAMILIES[family])
    for theirs, ours in KEYS.items():
        if theirs in raw:
            values[ours] = raw[theirs]
    values["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if rope_type == "llama3":
        scaling = {ours: rope[theirs] for theirs, ours in SCALING_KEYS.items() if theirs in rope}
        values["rope_scaling"] = checked(Llama3Scaling, scaling, path)
    return checked(ModelConfig, values, path)


def checked(kind: type, values, path):
    """`kind(**values)`, a dataclass from a stranger's JSON; UserError for wrong types and strange numbers."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        types = typing.get_args(hints.get(name)) or (hints.get(name),)
        is_number = type(value) in (int, float)
        is_expected = type(value) in types or (is_number and float in types)
        if not is_expected or (is_number and not 0 < value < 2**40):
            raise UserError(f"{path}: {name} cannot be {value!r}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        reason = str(error).removeprefix(f"{kind.__name__}.__init__() ")
        raise UserError(f"{path}: {reason}") from None


def parameter_shapes(config: ModelConfig, path="config"):
    """The shapes of a model's parameters, by name; UserError for sizes beyond any memory."""
    try:
        with torch.device("meta"):
            model = Transformer(config)
    except (RuntimeError, TypeError):
        raise UserError(f"{path}: no memory could hold these sizes") from None
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


# ---- weights -----------------------------------------------------------------------------------------------


class Weights:
    """The tensors of a checkpoint folder, read one at a time.

    Has `config`, and `shapes` by name. UserError unless the tensors are those of config.json.
    """

    def __init__(self, folder):
        check_file(folder, "config.json")
        self.folder = folder
        self.config = read_config(folder)
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in self.file_names():
            check_file(folder, name)
            self.open_file(folder / name)
        self.check_shapes()

    def file_names(self):
        """model.safetensors, or the shards that the index names."""
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            return ["model.safetensors"]
        try:
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
        except JSON_ERRORS:
            raise UserError(f"{index}: expected a weight_map to .safetensors files") from None
        if outside:
            raise UserError(f"{index}: expected .safetensors files in this folder, not {outside[0]!r}")
        return sorted(names)

    def open_file(self, path) -> None:
        """Note the names and shapes of a file's tensors."""
        try:
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():
                    tensor = file.get_slice(name)
                    self.files[name] = path
                    self.shapes[name] = tuple(tensor.get_shape())
                    if tensor.get_dtype() not in ("F32", "BF16", "F16"):
                        raise UserError(f"{path}: {name} is of type {tensor.get_dtype()}")
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"cannot read {path}: {error}") from None

    def read(self, name) -> Tensor:
        """One tensor, in memory of its own."""
        with safetensors.safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name).clone()

    def check_shapes(self) -> None:
        """UserError unless the tensors are those of the configuration, by name and shape."""
        if self.config.num_layers > len(self.files):  # building the layers might take all memory
            text = f"{len(self.files)} tensors are too few for {self.config.num_layers} layers"
            raise UserError(f"{self.folder}: {text}")
        expected = parameter_shapes(self.config, self.folder / "config.json")
        extra = {name for name in self.shapes if name not in expected and not name.endswith("inv_freq")}
        if "lm_head.weight" in extra and self.has_stored_tied_head():
            extra.remove("lm_head.weight")
        for name in sorted(expected.keys() | extra):
            if expected.get(name) != self.shapes.get(name):
                here = self.shapes.get(name, "missing")
                wanted = expected.get(name, "no such tensor")
                raise UserError(f"{self.folder}: {name} is {here}, but config.json asks for {wanted}")

    def has_stored_tied_head(self):
        """Is the head the token table, stored twice, as some tied folders have it?"""
        table = "model.embed_tokens.weight"
        return table in self.shapes and torch.equal(self.read("lm_head.weight"), self.read(table))


def check_file(folder, name) -> None:
    """UserError if a file is missing, or its SHA-256 not the one in checksums.json, where there is one."""
    path = folder / name
    sums = folder / "checksums.json"
    if not os.path.isfile(path):
        raise UserError(f"no checkpoint in {folder}: {name} is missing")
    try:
        known = json.loads(sums.read_text()).get(name) if sums.exists() else None
        is_whole = known is None or known == sha256(path)
    except JSON_ERRORS as error:
        raise UserError(f"cannot read {path} or {sums}: {error}") from None
    if not is_whole:
        raise UserError(f"corrupt checkpoint: {path} is not what checksums.json says")
