"""What is in a stranger's checkpoint folder?

    >>> from pathlib import Path
    >>> weights = Weights(Path("/models/Llama-2-7b-hf"))  # or Mistral, Qwen2, Qwen3; or our own
    >>> weights.read("model.norm.weight").shape           # one tensor at a time
    torch.Size([4096])
    >>> Weights(Path("/models/pythia-70m"), any_architecture=True).width
    512

A folder holds config.json, and weights in one file or in shards and their index; a single file of weights, or
a .gguf file, which has all of that in it, may be named in a folder's place. Nothing in it is ever executed. A
.safetensors file is a table of names before the numbers, and so is a .gguf file. A .bin file of torch.save is
a zip file with a pickle in it, which may name tensors and their storages, and nothing else.
"""

import contextlib
import os
import pickletools
import re
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import safetensors
import torch

from lib.files import LARGEST_TOKENIZER, check_regular, read_json
from lib.gguf import GGUF, Stored
from lib.settings import LARGEST_NUMBER, UserError, from_values
from model import ModelConfig, Transformer

FLOATS = ("F64", "F32", "F16", "BF16", "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16")
NESTED = ("model", "state_dict", "model_state_dict")  # where training scripts put the weights
LARGEST_HEADER = 2**23  # bytes; one of 50,000 tensors, more than any file has
LARGEST_PICKLE = 2**22  # bytes; one of 10,000 tensors has half of it
PICKLED = re.compile(  # what torch.save names where it saves tensors
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)"
    r"|torch (Float|BFloat16|Half|Double|Byte|Char|Short|Int|Long|Bool)Storage"
)
PLAIN_OPCODES = set(
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE BINPERSID REDUCE "
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET BUILD".split()
)
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
LARGEST_WIDTH = 2**20  # of a residual stream
TABLE_NAMES = "embed_tokens|wte|word_embeddings?|embed_in|tok_embeddings|embeddings?|shared"
TABLE = re.compile(rf"(?:^|\.)(?:{TABLE_NAMES})\.weight$")
TOKEN_TABLE = "model.embed_tokens.weight"
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
SCALING_KEYS = {  # our name of a part of Llama 3's RoPE: Hugging Face's
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
}


class ForeignArchitecture(UserError):
    """A folder is a checkpoint, but not of an architecture that `model.py` is."""


# ---- files of tensors --------------------------------------------------------------------------------------


def safetensors_of(path):
    """The Stored tensors of a .safetensors file, by name."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > LARGEST_HEADER:
        raise UserError(f"cannot read {path}: expected a .safetensors file with a header of sane size")
    file = safetensors.safe_open(path, "pt")
    tensors = {}
    for name in file.keys():
        tensor = file.get_slice(name)
        tensors[name] = Stored(
            tuple(tensor.get_shape()), tensor.get_dtype(), partial(copy_of, file.get_tensor, name)
        )
    return tensors


def copy_of(read, *arguments):
    """A tensor in memory of its own: the file's pages are let go."""
    return read(*arguments).clone()


def pickled_tensors(path):
    """The Stored tensors of a file of torch.save, by name."""
    check_pickle(path)
    values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for key in NESTED:
        if isinstance(values.get(key), dict):
            values = values[key]
    tensors = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if value.numel() * value.element_size() > path.stat().st_size:
                raise UserError(f"{path}: {name} has more numbers than the file")
            tensors[str(name)] = Stored(tuple(value.shape), str(value.dtype), partial(copy_of, value.detach))
    return tensors


def check_pickle(path) -> None:
    """UserError unless a file is a zip file as torch.save writes it of tensors, numbers and texts."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            is_pickle = entry.filename.endswith(".pkl")
            if entry.compress_type != zipfile.ZIP_STORED or (is_pickle and entry.file_size > LARGEST_PICKLE):
                raise UserError(f"cannot read {path}: torch.save does not write {entry.filename} like this")
            for opcode, argument, _ in pickletools.genops(archive.read(entry)) if is_pickle else ():
                is_plain = opcode.name in PLAIN_OPCODES
                if opcode.name == "GLOBAL":
                    is_plain = PICKLED.fullmatch(argument)
                if not is_plain:
                    raise UserError(f"cannot read {path}: its pickle has {opcode.name} {argument!r}")


@contextlib.contextmanager
def refusing(path):
    """UserError where a file is none, or cannot be read: a damaged one may fail in any way."""
    check_regular(path)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot read {path}: {type(error).__name__}: {reason}") from None


def open_gguf(path):
    """A .gguf file; UserError for what is none."""
    with refusing(path):
        return GGUF(path)


def open_tensors(paths):
    """The Stored tensors of several files, by name."""
    tensors = {}
    for path in paths:
        with refusing(path):
            is_pickle = path.suffix in (".bin", ".pt", ".pth")
            tensors |= pickled_tensors(path) if is_pickle else safetensors_of(path)
    return tensors


def check_shapes(tensors, expected, place) -> None:
    """UserError unless the tensors are the `expected` ones, by name and shape."""
    for name in sorted(expected.keys() | tensors):
        here = tensors[name].shape if name in tensors else "missing"
        wanted = expected.get(name, "no such tensor")
        if here != wanted:
            raise UserError(f"{place}: {name} is {here}, expected {wanted}")


# ---- configurations ----------------------------------------------------------------------------------------


def folder_of(place):
    """The folder of a checkpoint, whose single file of weights may be named."""
    return place if os.path.isdir(place) else place.parent


def gguf_config(file):
    """What config.json would say of a GGUF's model."""
    family = file.values["general.architecture"]
    raw = {}
    for theirs, key in GGUF_KEYS.items():
        value = file.values.get(f"{family}.{key}")
        if isinstance(value, int | float):
            raw[theirs] = value
    rope = str(file.values.get(f"{family}.rope.scaling.type", "none"))
    if "rope_freqs.weight" in file.tensors:  # Llama 3's, whose parameters are not in the file
        rope = "rope_freqs"
    table = file.tensors.get(TOKEN_TABLE)
    has_experts = f"{family}.expert_count" in file.values
    return raw | {
        "model_type": f"{family} with experts" if has_experts else family,
        "vocab_size": table.shape[0] if table else 0,
        "tie_word_embeddings": "lm_head.weight" not in file.tensors,
        "rope_scaling": {"rope_type": rope},
    }


def read_config(place):
    """The architecture of a checkpoint, without its weights; ForeignArchitecture for one that is not ours."""
    if place.suffix == ".gguf":
        return described(gguf_config(open_gguf(place)), place)
    return described(read_json(folder_of(place) / "config.json"), place)


def described(raw, place):
    """The architecture that a config.json describes, ours or one of FAMILIES; UserError for any other."""
    family = raw.get("model_type")
    if family == "bornbiased":
        return checked_config({key: value for key, value in raw.items() if key != "model_type"}, place)
    if family not in list(FAMILIES):  # a stranger's list or object has no hash
        known = ", ".join(FAMILIES)
        hint = "`seedprint.py compare` reads any"
        raise ForeignArchitecture(f"{place}: foreign architecture {family!r}; expected {known}. {hint}")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{place}: rope_parameters cannot be {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "none", "llama3"):
        raise ForeignArchitecture(f"{place}: RoPE of type {rope_type!r} is not supported")
    for key, plain in PLAIN.items():
        value = rope.get(key, raw.get(key, plain))
        if value not in (plain, None):
            raise ForeignArchitecture(f"{place}: {key} {value!r} is not supported; expected {plain}")
    values = FAMILIES[family] | {ours: raw[theirs] for ours, theirs in KEYS.items() if theirs in raw}
    values["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if rope_type == "llama3":
        values["rope_scaling"] = {ours: rope.get(theirs) for ours, theirs in SCALING_KEYS.items()}
    config = checked_config(values, place)
    window = raw.get("sliding_window")
    if raw.get("use_sliding_window", family == "mistral") and isinstance(window, int):
        config = replace(config, context_length=min(window, config.context_length))  # up to it, all is plain
    return config


def checked_config(values, place):
    """What a stranger's config.json says, as ours; UserError for wrong types and strange numbers."""
    config = from_values(ModelConfig, values, place)
    for part in (config, config.rope_scaling):
        for name, value in vars(part or config).items():
            if type(value) in (int, float) and not 1 / LARGEST_NUMBER < value < LARGEST_NUMBER:
                raise UserError(f"{place}: {name} cannot be {value}")
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


class Weights:
    """The parameters of a checkpoint, read one at a time. UserError unless the tensors are config.json's.

    Has `config`, `width` (of the residual stream), `family` (config.json's model_type), and `shapes` by name.
    With `any_architecture` it may be another's than ours: `config` is None, and the tensors are as they are.
    """

    def __init__(self, place, any_architecture=False):
        self.place = place
        self.config = None
        self.family = "bornbiased"
        raw = {}
        if place.suffix == ".gguf":
            file = open_gguf(place)
            raw = gguf_config(file)
            self.tensors = file.tensors
        else:
            path = folder_of(place) / "config.json"
            if os.path.isdir(place) or not any_architecture or os.path.exists(path):
                raw = read_json(path)
            self.tensors = open_tensors(weight_files(place))
        for name, tensor in self.tensors.items():
            if tensor.kind not in FLOATS and name.endswith("weight") and len(tensor.shape) > 1:
                raise UserError(f"{place}: {name} is of {tensor.kind}: dequantize() it in transformers")
        try:
            self.config = described(raw, place)
            self.width = self.config.d_model
            self.check_parameters()
        except ForeignArchitecture:
            if not any_architecture:
                raise
            self.config = None
            self.family = str(raw.get("model_type", ""))
            if place.suffix == ".gguf":
                self.family = ""  # its names say nothing of norms: gains stand there as they are
            self.width = residual_width(raw, self.tensors, place)
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}

    def check_parameters(self) -> None:
        """UserError unless the tensors are those of our architecture; a tied head may be stored twice."""
        if self.config.num_layers > len(self.tensors):  # building the layers might take all memory
            raise UserError(f"{self.place}: too few tensors for {self.config.num_layers} layers")
        expected = parameter_shapes(self.config, self.place)
        for name in self.tensors.keys() - expected:
            is_head = name == "lm_head.weight" and TOKEN_TABLE in self.tensors
            is_tied_head = is_head and torch.equal(self.read(name), self.read(TOKEN_TABLE))
            if is_tied_head or name.endswith("inv_freq"):
                del self.tensors[name]
        differing = expected.keys() ^ self.tensors.keys()
        if differing and all("norm" in name or name.endswith("bias") for name in differing):
            raise ForeignArchitecture(f"{self.place}: {min(differing)} is unknown, or missing")
        check_shapes(self.tensors, expected, self.place)

    def read(self, name):
        """One tensor, in memory of its own."""
        return self.tensors[name].read()


def residual_width(raw, tensors, place):
    """The residual stream's width: config.json's hidden_size, or the token table's; UserError for neither."""
    width = raw.get("hidden_size")
    for name, tensor in tensors.items():
        if width is None and TABLE.search(name) and len(tensor.shape) == 2:
            width = tensor.shape[1]
    if type(width) is not int or not 0 < width < LARGEST_WIDTH:
        raise UserError(f"{place} has no hidden_size in a config.json, and no token table that tells it")
    return width


def weight_files(place):
    """The files of a checkpoint's weights: a single file, or the shards that an index names.

    As in `transformers`, safetensors come before .bin, a whole before its shards. UserError for names outside
    the folder.
    """
    if not os.path.isdir(place):
        return [place]
    for name in WEIGHT_FILES:
        whole = place / name
        index = place / f"{name}.index.json"
        if os.path.exists(whole):
            return [whole]
        if os.path.exists(index):
            with refusing(index):
                shards = set(read_json(index)["weight_map"].values())
                for shard in shards:
                    if Path(shard).name != shard or not shard.endswith(whole.suffix):
                        raise UserError(f"{index}: expected {whole.suffix} in this folder, not {shard!r}")
            return sorted(place / shard for shard in shards)
    return [place / WEIGHT_FILES[0]]


# ---- tokens ------------------------------------------------------------------------------------------------


def token_ids(place):
    """Each token's id by its string, as a checkpoint's tokenizer has them; {} for one that has none.

    The blank at a word's beginning is written in one way, whatever the tokenizer.
    """
    path = place if place.suffix == ".gguf" else folder_of(place) / "tokenizer.json"
    if not os.path.exists(path):
        return {}
    with refusing(path):
        if place.suffix == ".gguf":
            vocabulary = GGUF(path).values.get("tokenizer.ggml.tokens", [])
        else:
            vocabulary = read_json(path, LARGEST_TOKENIZER)["model"]["vocab"]
        if isinstance(vocabulary, list):  # of strings, or of strings and their scores
            strings = [token[0] if isinstance(token, list) else token for token in vocabulary]
            vocabulary = dict(zip(strings, range(len(strings))))
        ids = {}
        for token, number in vocabulary.items():
            if isinstance(token, str) and type(number) is int and number >= 0:
                ids[token.replace("\u0120", "\u2581")] = number
    return ids
