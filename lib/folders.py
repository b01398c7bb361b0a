"""What is in a stranger's checkpoint folder?

    >>> from pathlib import Path
    >>> weights = Weights(Path("/models/Llama-2-7b-hf"))  # or Mistral, Qwen2, Qwen3; or our own
    >>> weights.read("model.norm.weight").shape           # one tensor at a time
    torch.Size([4096])
    >>> open_weights(Path("/models/pythia-70m")).width    # of any architecture: names and shapes
    512

A folder holds config.json, and weights in one file or in shards and their index; a single file of weights, or
a .gguf file, which has all of that in it, may be named in a folder's place. Nothing in it is ever executed.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lib.files import LARGEST_TOKENIZER, check_sum, read_json
from lib.parts import GAINS_FROM_ONE, TABLE
from lib.settings import LARGEST_NUMBER, UserError, at_least, from_values
from lib.tensors import QUANTISED, TensorFiles, open_file
from model import ModelConfig, Transformer, rope_frequencies

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
    "partial_rotary_factor": 1.0,
}
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim")  # as architectures call the residual stream's width
TEXT_KEYS = ("text_config", "llm_config", "language_config")  # the language model of one that sees, or hears
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # each may come in shards, with an index
GGUF_KEYS = {  # Hugging Face's name of a value: a .gguf file's, behind the architecture's
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
LLAMA3_ROPE = {  # which a .gguf file leaves out
    "rope_type": "llama3",
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
SCALING_KEYS = {  # the same for Llama 3's RoPE
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
}


class ForeignArchitecture(UserError):
    """A folder is a checkpoint, but not of an architecture that `model.py` is."""


# ---- configurations ----------------------------------------------------------------------------------------


def config_path(place):
    """The config.json of a checkpoint: in its folder, or beside its single file of weights."""
    folder = place if place.is_dir() else place.parent
    return folder / "config.json"


def has_config(place):
    """Does anything say what a checkpoint's architecture is?"""
    return place.is_dir() or place.suffix == ".gguf" or config_path(place).exists()


def read_raw_config(place):
    """What config.json says, and its path; UserError for folders that only look like a checkpoint."""
    path = config_path(place)
    if place.suffix == ".gguf":
        return gguf_config(place), place
    refuse_adapter(place)
    check_sum(path)
    raw = read_json(path)
    quantisation = raw.get("quantization_config")
    if quantisation is not None:
        raise UserError(f"{path}: the weights are quantised; {merge_line('.dequantize()', path.parent)}")
    return raw, path


def refuse_adapter(place) -> None:
    """UserError for a LoRA adapter, with the line to type."""
    folder = config_path(place).parent
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        line = merge_line(".merge_and_unload()", folder, "peft", "AutoPeftModelForCausalLM")
        raise UserError(f"{folder} is a LoRA adapter, which changes another model: {line}")


def merge_line(method, folder, library="transformers", name="AutoModelForCausalLM"):
    """The line to type for a folder of plain weights."""
    code = f"from {library} import {name} as M; M.from_pretrained('{folder}'){method}"
    return f"make a folder of plain weights: python -c \"{code}.save_pretrained('plain')\""


def gguf_config(place):
    """What config.json would say of a .gguf file's model."""
    file = open_file(place)
    family = file.values["general.architecture"]
    numbers = {key: value for key, value in file.values.items() if isinstance(value, int | float | str)}
    values = {key.removeprefix(f"{family}."): value for key, value in numbers.items()}
    raw = {theirs: values[key] for theirs, key in GGUF_KEYS.items() if key in values}
    rope = {"rope_type": values.get("rope.scaling.type", "none")}
    rotated = values.get("rope.dimension_count", raw.get("head_dim"))
    if rotated != raw.setdefault("head_dim", rotated):
        rope = {"rope_type": "partial"}
    elif "rope_freqs.weight" in file.shapes:  # Weights compares them with what the model makes of this
        factors = TensorFiles([place]).read("rope_freqs.weight")
        rope = LLAMA3_ROPE | {"factor": factors.max().item()}
    return raw | {
        "model_type": f"{family} with experts" if values.get("expert_count") else family,
        "vocab_size": file.shapes.get("model.embed_tokens.weight", (0,))[0],
        "tie_word_embeddings": "lm_head.weight" not in file.shapes,
        "rope_scaling": rope,
    }


def read_config(place):
    """The architecture that config.json describes; ForeignArchitecture for one that is not ours."""
    raw, path = read_raw_config(place)
    family = raw.pop("model_type", None)
    if family == "bornbiased":
        return checked_config(raw, path, {})
    if family not in list(FAMILIES):  # a stranger's list or object has no hash
        raise ForeignArchitecture(
            f"{path}: foreign architecture {family!r}; expected {', '.join(FAMILIES)}. "
            "`seedprint.py compare` reads any"
        )
    return read_family_config(family, raw, path)


def read_family_config(family, raw, path):
    """A Hugging Face configuration of one of FAMILIES as ours; UserError for what our model does not do."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict | list) for value in rope.values()):
        raise UserError(f"{path}: rope_parameters cannot be {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "none", "llama3"):
        raise ForeignArchitecture(f"{path}: RoPE of type {rope_type!r} is not supported")
    for key, plain in PLAIN.items():
        value = rope.get(key, raw.get(key, plain))
        if value not in (plain, None):
            raise ForeignArchitecture(f"{path}: {key} {value!r} is not supported; expected {plain}")
    values = dict(FAMILIES[family])
    for ours, theirs in KEYS.items():
        if theirs in raw:
            values[ours] = raw[theirs]
    values["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if rope_type == "llama3":
        scaling = {ours: rope[theirs] for ours, theirs in SCALING_KEYS.items() if theirs in rope}
        values["rope_scaling"] = scaling
    config = checked_config(values, path, KEYS | SCALING_KEYS)
    window = raw.get("sliding_window", 4096)
    if raw.get("use_sliding_window", family == "mistral") and type(window) is int and window > 0:
        config = replace(config, context_length=min(window, config.context_length))  # up to it, all is plain
    return config


def checked_config(values, path, their_names):
    """What a stranger's config.json says, as ours; UserError for wrong types and strange numbers.

    `their_names` maps our names to the file's, where they differ.
    """
    config = from_values(ModelConfig, values, path)
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


class Weights(TensorFiles):
    """The parameters of a checkpoint of our architecture, read one at a time.

    Has `config`, `width`, `family`, and `shapes` by name. UserError unless the tensors are config.json's.
    """

    def __init__(self, place):
        self.place = place
        self.config = read_config(place)
        self.width = self.config.d_model
        self.family = "bornbiased"
        super().__init__(weight_files(place))
        if self.config.num_layers > len(self.files):  # building the layers might take all memory
            raise UserError(f"{place}: too few tensors for {self.config.num_layers} layers")
        expected = parameter_shapes(self.config, config_path(place))
        for name in set(self.shapes) - set(expected):
            if name.endswith("inv_freq") or self.is_tied_head(name) or self.is_rope(name):
                del self.shapes[name]
        self.check(expected, place)

    def is_tied_head(self, name):
        """Is a tensor the head of a tied model, which is its token table stored twice?"""
        table = "model.embed_tokens.weight"
        is_head = name == "lm_head.weight" and table in self.shapes
        return is_head and torch.equal(self.read(name), self.read(table))

    def is_rope(self, name):
        """Are these a .gguf file's factors of RoPE, and Llama 3's?"""
        if name != "rope_freqs.weight":
            return False
        plain = rope_frequencies(replace(self.config, rope_scaling=None))
        factors = plain / rope_frequencies(self.config)
        return factors.shape == self.shapes[name] and torch.allclose(factors, self.read(name), rtol=1e-3)


class ForeignWeights(TensorFiles):
    """The tensors of a checkpoint of any architecture, read one at a time.

    Has `width`, the residual stream's, `family`, config.json's model_type, and `shapes` by name; `config` is
    None. UserError for weights that are quantised.
    """

    def __init__(self, place):
        self.place = place
        self.config = None
        raw, path = {}, place
        if has_config(place):
            raw, path = read_raw_config(place)
        super().__init__(weight_files(place))
        self.check_sums()
        self.family = str(raw.get("model_type", ""))
        if place.suffix == ".gguf" and self.family in GAINS_FROM_ONE:
            self.family = ""  # such a file has gains as they are
        self.width = hidden_size(raw, path) if raw else table_width(self.shapes, place)
        for name, kind in self.types.items():
            if kind in QUANTISED and name.endswith("weight") and len(self.shapes[name]) > 1:
                line = merge_line(".dequantize()", path.parent)
                raise UserError(f"{place}: {name} is of {kind}, quantised weights; {line}")


def open_weights(place):
    """The tensors of a checkpoint folder or a single file: Weights, or ForeignWeights if not of our kind."""
    if not has_config(place):
        refuse_adapter(place)
        return ForeignWeights(place)
    try:
        return Weights(place)
    except ForeignArchitecture:
        return ForeignWeights(place)


def table_width(shapes, place):
    """The residual stream's width by the token table; UserError where there is no table."""
    tables = [name for name in shapes if TABLE.search(name) and len(shapes[name]) == 2]
    if not tables:
        raise UserError(f"{place} has no config.json beside it, and no token table that tells its width")
    return shapes[tables[0]][1]


def hidden_size(raw, path):
    """The residual stream's width that config.json names; UserError if it names none."""
    for key in TEXT_KEYS:
        if isinstance(raw.get(key), dict):
            raw = raw | raw[key]
    for key in WIDTH_KEYS:
        width = raw.get(key)
        if type(width) is int and 0 < width < LARGEST_NUMBER:
            return width
    raise UserError(f"{path} names no hidden size; expected one of {', '.join(WIDTH_KEYS)}")


def weight_files(place):
    """The files of a checkpoint's weights: a single file, or the shards that an index names.

    As in `transformers`, safetensors come before .bin, a whole before its shards. UserError for names outside
    the folder.
    """
    if not place.is_dir():
        return [place]
    for name in WEIGHT_FILES:
        whole = place / name
        index = place / f"{name}.index.json"
        if whole.exists():
            return [whole]
        if index.exists():
            return shards(index, whole.suffix)
    return [place / WEIGHT_FILES[0]]


def shards(index, suffix):
    """The files that an index names, each once."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise UserError(f"{index}: expected a weight_map to {suffix} files")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(suffix):
            raise UserError(f"{index}: expected {suffix} files in this folder, not {name!r}")
    return sorted({index.parent / name for name in names.values()})


# ---- tokens ------------------------------------------------------------------------------------------------


def token_ids(place):
    """Each token's id by its string, as a checkpoint's tokenizer has them; {} for one that has none.

    The blank at a word's beginning is written in one way, whatever the tokenizer. UserError for a tokenizer
    that is damaged.
    """
    folder = config_path(place).parent
    ids = {}
    if place.suffix == ".gguf":
        tokens = open_file(place).values.get("tokenizer.ggml.tokens", [])
        ids = from_values(Vocabulary, {"ids": dict(zip(tokens, range(len(tokens))))}, place).ids
    elif (folder / "tokenizer.json").exists():
        path = folder / "tokenizer.json"
        raw = read_json(path, LARGEST_TOKENIZER)
        model = raw.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else {}
        ids = from_values(Vocabulary, {"ids": vocabulary}, path).ids
        if isinstance(ids, list):  # of strings and their scores
            ids = {token: number for number, (token, _) in enumerate(ids)}
    elif (folder / "vocab.json").exists():
        path = folder / "vocab.json"
        ids = from_values(Vocabulary, {"ids": read_json(path, LARGEST_TOKENIZER)}, path).ids
    return {token.replace("\u0120", "\u2581"): number for token, number in ids.items()}


@dataclass(frozen=True)
class Vocabulary:
    """Each token's id by its string."""

    ids: dict[str, at_least(0)] | list[tuple[str, float]]


def shared_tokens(base, suspect, count):
    """The ids of the tokens that two sources have, in each of them, (n,) each, of `count` rows of both.

    They are the same ids, unless both bring a tokenizer, and these differ: then tokens of the same string.
    """
    ids = torch.arange(count)
    if base.place is None or suspect.place is None:
        return ids, ids
    theirs = token_ids(suspect.place)
    ours = token_ids(base.place)
    shared = [token for token in ours if theirs.get(token, count) < count and ours[token] < count]
    if not shared or ours == theirs:
        return ids, ids
    return torch.tensor([ours[token] for token in shared]), torch.tensor([theirs[token] for token in shared])
