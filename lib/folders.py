"""What is in a stranger's checkpoint folder?

    >>> from pathlib import Path
    >>> weights = Weights(Path("/models/Llama-2-7b-hf"))  # or Mistral, Qwen2, Qwen3; or our own
    >>> weights.read("model.norm.weight").shape           # one tensor at a time
    torch.Size([4096])

A folder holds config.json and model.safetensors, or shards and their index. Nothing in it is ever executed.
"""

import math
from pathlib import Path

import safetensors
import torch

from lib.files import check_regular, check_sum, read_json
from lib.settings import LARGEST_NUMBER, UserError, from_values
from model import ModelConfig, Transformer

FAMILIES = {  # model_type: what its configurations leave out
    "llama": {"norm_epsilon": 1e-6},
    "mistral": {"norm_epsilon": 1e-6},
    "qwen2": {"norm_epsilon": 1e-6, "qkv_bias": True},
    "qwen3": {"norm_epsilon": 1e-6, "qk_norm": True, "head_dim": 128},
}
KEYS = {  # our name: Hugging Face's
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
PLAIN = {  # what our model does; other values of these keys are refused
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
SCALING_KEYS = {  # the same for Llama 3's RoPE
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
}


# ---- configurations ----------------------------------------------------------------------------------------


def read_config(folder):
    """The architecture that a folder's config.json describes; UserError for one that is not ours."""
    path = folder / "config.json"
    check_sum(path)
    raw = read_json(path)
    family = raw.pop("model_type", None)
    if family == "bornbiased":
        return checked_config(raw, path, {})
    if family not in list(FAMILIES):  # a stranger's list or object has no hash
        raise UserError(f"{path}: foreign architecture {family!r}; expected {', '.join(FAMILIES)}")
    return read_family_config(family, raw, path)


def read_family_config(family, raw, path):
    """A Hugging Face configuration of one of FAMILIES as ours; UserError for what our model does not do."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict | list) for value in rope.values()):
        raise UserError(f"{path}: rope_parameters cannot be {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise UserError(f"{path}: RoPE of type {rope_type!r} is not supported")
    if raw.get("use_sliding_window", family == "mistral") and raw.get("sliding_window", 4096):
        raise UserError(f"{path}: sliding_window is not supported; expected null")
    for key, plain in PLAIN.items():
        value = rope.get(key, raw.get(key, plain))
        if value not in (plain, None):
            raise UserError(f"{path}: {key} {value!r} is not supported; expected {plain}")
    values = dict(FAMILIES[family])
    for ours, theirs in KEYS.items():
        if theirs in raw:
            values[ours] = raw[theirs]
    values["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if rope_type == "llama3":
        scaling = {ours: rope[theirs] for ours, theirs in SCALING_KEYS.items() if theirs in rope}
        values["rope_scaling"] = scaling
    return checked_config(values, path, KEYS | SCALING_KEYS)


def checked_config(values, path, their_names):
    """What a stranger's config.json says, as ours; UserError for wrong types and strange numbers.

    `their_names` maps our names to the file's, where they differ.
    """
    config = from_values(ModelConfig, values, path, their_names)
    for part in (config, config.rope_scaling):
        for name, value in vars(part or config).items():
            if type(value) in (int, float) and not 1 / LARGEST_NUMBER < value < LARGEST_NUMBER:
                raise UserError(f"{path}: {their_names.get(name, name)} cannot be {value}")
    return config


def parameter_shapes(config, path="config"):
    """The shapes of a model's parameters, by name; UserError for sizes beyond any memory."""
    try:
        with torch.device("meta"):
            model = Transformer(config)
    except (RuntimeError, TypeError):
        raise UserError(f"{path}: no memory could hold these sizes") from None
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


# ---- weights -----------------------------------------------------------------------------------------------


class TensorFiles:
    """The tensors of safetensors files, read one at a time. Has `shapes`, by name.

    UserError for what is no such file, or has numbers of other types than `types`.
    """

    def __init__(self, paths, types=("F32", "BF16", "F16")):
        self.files = {}  # name: Path
        self.shapes = {}
        for path in paths:
            check_regular(path)
            try:
                with safetensors.safe_open(path, "pt") as file:
                    for name in file.keys():
                        if name in self.files:
                            raise UserError(f"{path}: {name} is in {self.files[name].name}, too")
                        tensor = file.get_slice(name)
                        self.files[name] = path
                        self.shapes[name] = tuple(tensor.get_shape())
                        if tensor.get_dtype() not in types:
                            raise UserError(f"{path}: {name} is of type {tensor.get_dtype()}")
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(f"cannot read {path}: {error}") from None

    def check(self, expected, place) -> None:
        """UserError unless the tensors are the `expected` ones, by name and shape, and their files whole."""
        for name in sorted(expected.keys() | self.shapes):
            here = self.shapes.get(name, "missing")
            wanted = expected.get(name, "no such tensor")
            if here != wanted:
                raise UserError(f"{place}: {name} is {here}, expected {wanted}")
        for path in set(self.files.values()):
            check_sum(path, largest=math.inf)

    def read(self, name):
        """One tensor, in memory of its own."""
        try:
            with safetensors.safe_open(self.files[name], "pt") as file:
                return file.get_tensor(name).clone()
        except (OSError, safetensors.SafetensorError) as error:  # it may be gone by now
            raise UserError(f"cannot read {self.files[name]}: {error}") from None


class Weights(TensorFiles):
    """The parameters of a checkpoint folder, read one at a time.

    Has `config`, and `shapes` by name. UserError unless the tensors are those of config.json.
    """

    def __init__(self, folder):
        self.config = read_config(folder)
        super().__init__(weight_files(folder))
        if self.config.num_layers > len(self.files):  # building the layers might take all memory
            raise UserError(f"{folder}: too few tensors for {self.config.num_layers} layers")
        expected = parameter_shapes(self.config, folder / "config.json")
        for name in set(self.shapes) - set(expected):
            if name.endswith("inv_freq") or self.is_tied_head(name):
                del self.shapes[name]
        self.check(expected, folder)

    def is_tied_head(self, name):
        """Is a tensor the head of a tied model, which is its token table stored twice?"""
        table = "model.embed_tokens.weight"
        is_head = name == "lm_head.weight" and table in self.shapes
        return is_head and torch.equal(self.read(name), self.read(table))


def weight_files(folder):
    """model.safetensors or, without it, the shards that the index names, as `transformers` has it.

    UserError for names outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    if whole.exists() or not index.exists():
        return [whole]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise UserError(f"{index}: expected a weight_map to .safetensors files")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{index}: expected .safetensors files in this folder, not {name!r}")
    return sorted({folder / name for name in names.values()})
