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

import math
import os
import pickletools
import re
import shlex
import zipfile
from dataclasses import replace
from pathlib import Path

import safetensors
import torch

from lib.files import LARGEST, LARGEST_TOKENIZER, check_regular, check_sum, read_json
from lib.gguf import GGUF
from lib.parts import GAINS_FROM_ONE, TABLE
from lib.settings import LARGEST_NUMBER, UserError, from_values
from model import ModelConfig, Transformer, rope_frequencies

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
FLOATS = tuple(TYPES.values())  # numbers that are weights; other ones stand for weights that are quantised
NESTED = ("model", "state_dict", "model_state_dict")  # where training scripts put the weights
LARGEST_PICKLE = 2**22  # bytes; one of 10,000 tensors has half of it
MOST_TENSORS = 200_000  # DeepSeek-V3 has 91,000
PICKLED = re.compile(  # what torch.save names where it saves tensors
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)"
    r"|torch (Float|BFloat16|Half|Double|Byte|Char|Short|Int|Long|Bool)Storage"
)
PLAIN_OPCODES = set(
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE BINPERSID REDUCE "
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET".split()
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


# ---- files of tensors --------------------------------------------------------------------------------------


class SafetensorsFile:
    """The `shapes` and `types` of a .safetensors file's tensors, by name, and the tensors."""

    def __init__(self, path):
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > LARGEST:
            raise UserError(f"cannot read {path}: its header has {header:,} bytes")
        self.path = path
        self.file = safetensors.safe_open(path, "pt")
        names = self.file.keys()
        check_count(path, names)
        slices = {name: self.file.get_slice(name) for name in names}
        self.shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
        self.types = {name: tensor.get_dtype() for name, tensor in slices.items()}

    def read(self, name):
        """One tensor, in memory of its own."""
        return self.file.get_tensor(name).clone()


class TorchFile:
    """The same of a .bin file."""

    def __init__(self, path):
        check_pickle(path)
        self.path = path
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for key in NESTED:
            if isinstance(values.get(key), dict):
                values = values[key]
        self.tensors = {}
        for name, value in values.items():
            if isinstance(name, str) and isinstance(value, torch.Tensor):
                self.tensors[name] = value.detach()
                if value.numel() * value.element_size() > path.stat().st_size:
                    raise UserError(f"{path}: {name} has more numbers than the file")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        kinds = {name: tensor.dtype for name, tensor in self.tensors.items()}
        self.types = {name: TYPES.get(kind, str(kind)) for name, kind in kinds.items()}

    def read(self, name):
        """One tensor, in memory of its own."""
        return self.tensors[name].clone()


def check_pickle(path) -> None:
    """UserError unless a file is a zip file as torch.save writes it of tensors, numbers and texts."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"cannot read {path}: it is no zip file, as torch.save has written since version 1.6")
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            is_pickle = entry.filename.endswith(".pkl")
            if entry.compress_type != zipfile.ZIP_STORED or (is_pickle and entry.file_size > LARGEST_PICKLE):
                raise UserError(f"cannot read {path}: torch.save does not write {entry.filename} like this")
            before = ""
            for opcode, argument, _ in pickletools.genops(archive.read(entry)) if is_pickle else ():
                is_plain = opcode.name in PLAIN_OPCODES
                is_plain |= opcode.name == "GLOBAL" and PICKLED.fullmatch(argument) is not None
                is_plain |= opcode.name == "BUILD" and before == "SETITEM"  # an OrderedDict's _metadata
                if not is_plain:
                    name = argument if opcode.name == "GLOBAL" else opcode.name
                    raise UserError(f"cannot read {path}: its pickle has {name!r}, which is no tensor")
                before = opcode.name


def check_count(path, names) -> None:
    """UserError for more tensors than any model has."""
    if len(names) > MOST_TENSORS:
        raise UserError(f"cannot read {path}: {len(names):,} tensors, expected {MOST_TENSORS:,} at most")


def open_file(path):
    """The tensors of one file; UserError for what is no file of tensors."""
    check_regular(path)
    kinds = {".gguf": GGUF, ".bin": TorchFile, ".pt": TorchFile, ".pth": TorchFile}
    try:
        return kinds.get(path.suffix, SafetensorsFile)(path)
    except UserError:
        raise
    except Exception as error:  # a damaged file may fail in any way
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot read {path}: {type(error).__name__}: {reason}") from None


class TensorFiles:
    """The tensors of several files, read one at a time. Has `shapes` and `types`, by name.

    UserError for what is no such file, or not as checksums.json says, and for a tensor that two of them have.
    """

    def __init__(self, paths):
        self.files = {}  # by the name of a tensor
        self.shapes = {}
        self.types = {}
        for path in paths:
            file = open_file(path)
            check_sum(path, math.inf)
            for name in file.shapes:
                if name in self.files:
                    raise UserError(f"{path}: {name} is in {self.files[name].path.name}, too")
                self.files[name] = file
            check_count(path, self.files)
            self.shapes |= file.shapes
            self.types |= file.types

    def check(self, expected, place, types=FLOATS) -> None:
        """UserError unless the tensors are the `expected` ones, by name and shape."""
        for name in sorted(expected.keys() | self.shapes):
            here = self.shapes.get(name, "missing")
            wanted = expected.get(name, "no such tensor")
            if here != wanted:
                raise UserError(f"{place}: {name} is {here}, expected {wanted}")
            if self.types[name] not in types:
                raise UserError(f"{place}: {name} is of type {self.types[name]}")

    def read(self, name):
        """One tensor, in memory of its own."""
        try:
            return self.files[name].read(name)
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:  # it may be gone by now
            raise UserError(f"cannot read {name}: {error}") from None


# ---- configurations ----------------------------------------------------------------------------------------


def folder_of(place):
    """The folder of a checkpoint, whose single file of weights may be named."""
    return place if os.path.isdir(place) else place.parent


def read_raw_config(place):
    """What config.json says, and its path; UserError for folders that only look like a checkpoint."""
    if place.suffix == ".gguf":
        return gguf_config(place), place
    folder = folder_of(place)
    path = folder / "config.json"
    if os.path.exists(folder / "adapter_config.json") and not os.path.exists(path):
        line = merge_line(".merge_and_unload()", folder, "peft", "AutoPeftModelForCausalLM")
        raise UserError(f"{folder} is a LoRA adapter, which changes another model: {line}")
    check_sum(path)
    raw = read_json(path)
    if raw.get("quantization_config") is not None:
        raise UserError(f"{path}: the weights are quantised; {merge_line('.dequantize()', folder)}")
    return raw, path


def merge_line(method, folder, library="transformers", name="AutoModelForCausalLM"):
    """The line to type for a folder of plain weights."""
    code = f"from {library} import {name} as M; M.from_pretrained({str(folder)!r}){method}"
    return "make a folder of plain weights: python -c " + shlex.quote(code + ".save_pretrained('plain')")


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
        factors = file.read("rope_freqs.weight")
        rope = LLAMA3_ROPE | {"factor": factors.max().item()}
    return raw | {
        "model_type": f"{family} with experts" if values.get("expert_count") else family,
        "vocab_size": file.shapes.get("model.embed_tokens.weight", (0,))[0],
        "tie_word_embeddings": "lm_head.weight" not in file.shapes,
        "rope_scaling": rope,
    }


def read_config(place):
    """The architecture that config.json describes; ForeignArchitecture for one that is not ours."""
    return described(*read_raw_config(place))


def described(raw, path):
    """The architecture that the values of a config.json describe."""
    family = raw.get("model_type")
    if family == "bornbiased":
        values = {key: value for key, value in raw.items() if key != "model_type"}
        return checked_config(values, path, {})
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
    """The parameters of a checkpoint, read one at a time. UserError unless the tensors are config.json's.

    Has `config`, `width` (of the residual stream), `family` (config.json's model_type), and `shapes` by name.
    With `any_architecture` it may be another's than ours: `config` is None, and the tensors are as they are.
    """

    def __init__(self, place, any_architecture=False):
        self.place = place
        self.config = None
        self.family = ""
        raw = {}
        folder = folder_of(place)
        has_config = os.path.isdir(place) or place.suffix == ".gguf"
        has_config |= any(os.path.exists(folder / name) for name in ("config.json", "adapter_config.json"))
        try:
            if has_config or not any_architecture:
                raw, path = read_raw_config(place)
                self.config = described(raw, path)
        except ForeignArchitecture:
            if not any_architecture:
                raise
        super().__init__(weight_files(place))
        if self.config is not None:
            self.width = self.config.d_model
            self.family = "bornbiased"
            self.check_parameters()
            return
        family = str(raw.get("model_type", ""))
        if place.suffix != ".gguf" or family not in GAINS_FROM_ONE:  # such a .gguf file has gains as they are
            self.family = family
        self.width = hidden_size(raw, path) if raw else table_width(self.shapes, place)
        for name, kind in self.types.items():
            if kind not in FLOATS and name.endswith("weight") and len(self.shapes[name]) > 1:
                line = merge_line(".dequantize()", folder)
                raise UserError(f"{place}: {name} is of {kind}, quantised weights; {line}")

    def check_parameters(self) -> None:
        """UserError unless the tensors are those of our architecture."""
        if self.config.num_layers > len(self.files):  # building the layers might take all memory
            raise UserError(f"{self.place}: too few tensors for {self.config.num_layers} layers")
        expected = parameter_shapes(self.config, self.place)
        for name in set(self.shapes) - set(expected):
            if name.endswith("inv_freq") or self.is_tied_head(name) or self.is_rope(name):
                del self.shapes[name]
        self.check(expected, self.place)

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
    if not os.path.isdir(place):
        return [place]
    for name in WEIGHT_FILES:
        whole = place / name
        index = place / f"{name}.index.json"
        if os.path.exists(whole):
            return [whole]
        if os.path.exists(index):
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

    The blank at a word's beginning is written in one way, whatever the tokenizer.
    """
    vocabulary = {}
    folder = folder_of(place)
    if place.suffix == ".gguf":
        vocabulary = open_file(place).values.get("tokenizer.ggml.tokens", [])
    elif os.path.exists(folder / "tokenizer.json"):
        model = read_json(folder / "tokenizer.json", LARGEST_TOKENIZER).get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else {}
        if isinstance(vocabulary, list):  # of strings and their scores
            vocabulary = [pair[0] if isinstance(pair, list) and pair else None for pair in vocabulary]
    elif os.path.exists(folder / "vocab.json"):
        vocabulary = read_json(folder / "vocab.json", LARGEST_TOKENIZER)
    if isinstance(vocabulary, list):
        vocabulary = dict(zip(vocabulary, range(len(vocabulary))))
    ids = {}
    for token, number in vocabulary.items() if isinstance(vocabulary, dict) else ((None, None),):
        if not isinstance(token, str) or type(number) is not int or not 0 <= number < LARGEST_NUMBER:
            raise UserError(f"{place}: its tokenizer has {token!r} as token {number!r}")
        ids[token.replace("\u0120", "\u2581")] = number
    return ids


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
