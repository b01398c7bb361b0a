"""What is in a stranger's checkpoint?

A folder holds config.json, and weights in one file or in shards and their index; a file of weights, or a
.gguf file, which has all in it, may be named in its place. Nothing is executed: a .safetensors or .gguf file
is a table of names before the numbers, and of a pickle `weights_only` allows tensors and plain values alone.
"""

import functools
import hashlib
import json
import math
import re
import sys
from functools import partial
from os.path import exists, isdir, isfile
from pathlib import Path

import sentencepiece
import torch

from init import births
from lib.files import GIT_LFS, as_user_error, check_regular, read_json
from lib.settings import UserError, from_values, rank
from model import ModelConfig, Transformer
from sources.checkpoint import KEYS, config_of, finite, is_ours
from strangers import ranges
from strangers.gguf import GGUF, LARGEST_HEADER, LazyTensor
from strangers.gguf import KEYS as GGUF_KEYS

UNSCALED = "F8 without scales"
FLOATS = ("F64", "F32", "F16", "BF16", UNSCALED)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}
DTYPES |= {"I64": torch.int64, "BOOL": torch.bool}
CODES = {dtype: code for code, dtype in DTYPES.items()}
SHARD = re.compile(r"\d+(?=[-_.]of[-_](\d+))")  # in a file's name: which of how many
OTHER_ZIPS = (".keras", ".npz")  # a file of torch.save is a zip file, too
OTHER_FORMAT = "files of this format are not read here: load it where it was made, and save its weights as "
OTHER_FORMAT += ".safetensors, by torch.save, or as .gguf"
NESTED = ("model", "state_dict", "model_state_dict", "module")  # where training scripts put the weights
SCALE = re.compile(r"_scale(?:_inv|_ub)?$|\.q?scale_(?:weight|input)$|scaled_fp8$")  # or a mark, beside FP8
BLOCK_SIZE = re.compile(r'"weight_block_size": \[(\d+), (\d+)\]')  # as config.json tells it
NO_WEIGHT = ("BOOL", "I64")  # which masks and lookup tables have
MOMENT = re.compile(r"(?:^|[./])(?:\w*exp_avg\w*|momentum\w*|step)$")  # what an optimizer keeps of a weight
NO_PARAMETER = ("inv_freq", ".attn.bias", ".attn.masked_bias")  # how names of buffers end
BUFFER = ("bias", "mask", "_ids", "_index", "freqs_cis")  # and of tensors that need not be weights
FAMILIES = {  # model_type: what its configurations leave out
    "llama": {"norm_epsilon": 1e-6},
    "qwen2": {"norm_epsilon": 1e-6, "qkv_bias": True},
}
PLAIN = {  # what our model does; other values of these keys are refused
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    "use_sliding_window": False,
    "per_layer_config": None,
    "rope_type": "default",
    "type": "default",  # of RoPE, in old ones
}
GGUF_MODELS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}  # that are run
NEUTRAL = ("0", "0.0", "1.0", "none")  # what a header may say of anything
MLP_SIZE = re.compile(r'"\w*(intermediate_size|ffn|n_inner|d_ff)\w*": [1-9]')  # as config.json tells it
TOKEN_TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # in a config.json
COUNTS = dict.fromkeys(LAYERS, "layers") | {"vocab_size": "tokens"}
NUMBERS = re.compile(r"(\d+)")  # in names of files
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # the surest first
SHARDING = b"DCP_SHARDING_INFO"  # where torch.distributed's files of one process each say what they hold
WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors")  # as in `transformers`, these are
WEIGHT_FILES += ("pytorch_model.bin", "pytorch_model-*-of-*.bin")  # read before those


class ForeignArchitecture(UserError):
    """A folder is a checkpoint, but not of an architecture that `model.py` is."""


def beginning(path):
    """A file's first bytes, as text."""
    check_regular(path)
    return ranges.read(Path(path), 0, 64).decode("latin-1")


def sha256(path):
    """The SHA-256 of a regular file, in hexadecimal."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_gguf(place):
    """Is a place a .gguf file, whatever its name?"""
    return isfile(place) and (place.suffix == ".gguf" or beginning(place).startswith("GGUF"))


@functools.lru_cache(8)
def open_gguf(path):
    """A .gguf file, whose header is parsed once; UserError for what is none, or a part."""
    with as_user_error(path):
        return GGUF(path)


def safetensors_of(path):
    """The LazyTensors of a .safetensors file, by name; they stand side by side, up to its end."""
    size = int.from_bytes(ranges.read(path, 0, 8), "little")
    if size > LARGEST_HEADER:
        raise ValueError(f"its header has {size:,} bytes")
    header, place = json.loads(ranges.read(path, 8, 8 + size)), 8 + size
    header.pop("__metadata__", None)
    tensors = {}
    begin = place
    for name, said in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, dtype, (start, stop) = said["shape"], DTYPES.get(said["dtype"]), said["data_offsets"]
        is_whole = begin + start == place and all(type(n) is int and n >= 0 for n in shape) and start <= stop
        if not is_whole or (dtype and stop - start != math.prod(shape) * dtype.itemsize):
            raise ValueError(f"{name} of shape {shape} does not stand where it should")
        read = partial(part_of, path, place, tuple(shape), dtype)
        tensors[name] = LazyTensor(tuple(shape), said["dtype"], read)
        place = begin + stop
    if place != path.stat().st_size:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, expected {place:,}")
    return tensors


def part_of(path, place, shape, dtype, part=()):
    """A part of a tensor that stands at a place in a file; no more than its first to its last row is read."""
    wanted = torch.arange(math.prod(shape[:-1])).view(shape[:-1])[part]
    rows = ranges.read_rows(path, place, dtype.itemsize * math.prod(shape[-1:]), wanted.flatten())
    return rows.view(dtype).view((*wanted.shape, *shape[-1:]))


def pickled_tensors(path):
    """The LazyTensors of a file of torch.save, by name."""
    values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    nested = [values[key] for key in NESTED if isinstance(values.get(key), dict)]
    return tensors_in([*nested, values][0])


def tensors_in(values, prefix=""):
    """The LazyTensors in dictionaries of dictionaries, by their keys with dots between them."""
    tensors = {}
    for key, value in values.items():
        if isinstance(value, dict):
            tensors |= tensors_in(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            value = value.detach()
            kind = CODES.get(value.dtype, str(value.dtype))
            read = partial(lambda value, part=(): value[part].clone(), value)
            tensors[f"{prefix}{key}"] = LazyTensor(tuple(value.shape), kind, read)
    return tensors


def open_tensors(paths):
    """The LazyTensors of several files, by name."""
    tensors = {}
    for path in paths:
        begun = beginning(path)
        is_safe = begun[8:9] == "{"  # behind the length of a header
        is_other = path.suffix.lower() in OTHER_ZIPS or not begun.startswith(("PK", GIT_LFS.decode()))
        if begun and is_other and not is_safe:
            raise UserError(f"{path}: {OTHER_FORMAT}")
        with as_user_error(path):
            found = safetensors_of(path) if is_safe else pickled_tensors(path)
        if tensors.keys() & found.keys():
            raise UserError(f"{path} has a part of each matrix, as other files: join the parts first")
        tensors |= found
    return tensors


def with_scales(raw, tensors):
    """Tensors, of which those in FP8 are multiplied by the scales beside them, which are no weights."""
    if all(tensor.kind != "F8_E4M3" for tensor in tensors.values()):
        return tensors
    weights = {name: tensor for name, tensor in tensors.items() if not SCALE.search(name)}
    said = BLOCK_SIZE.search(json.dumps(raw))
    blocks = [int(size) for size in said.groups()] if said else [128, 128]
    for name, tensor in weights.items():
        if tensor.kind == "F8_E4M3":
            scale = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
            read = partial(multiplied, tensor, scale, blocks)
            weights[name] = LazyTensor(tensor.shape, "F32" if scale else UNSCALED, read)
    return weights


def multiplied(tensor, scale, blocks, part=()):
    """A part of a tensor in FP8, in float32, times its scales: one for all, one for each row or block."""
    weight = tensor.read(part).float()
    if scale is None:
        return weight
    shape, factors = tensor.shape, scale.read()
    if factors.dtype == torch.uint8:  # exponents, of which 255 is NaN
        factors = factors.view(torch.float8_e8m0fnu)
    factors = factors.float().view((*factors.shape, *[1] * (len(shape) - factors.ndim)))
    sizes = ([1] * len(shape) + blocks)[2:]
    for axis, (n, count) in enumerate(zip(shape, factors.shape)):
        if not 1 < count < n:
            sizes[axis] = n // count
        if not (count - 1) * sizes[axis] < n <= count * sizes[axis]:  # the last block may be short
            raise ValueError(f"its scales of shape {[*scale.shape]} do not divide {[*shape]}")
    rows = torch.arange(math.prod(shape[:-1])).view(shape[:-1])[part]
    places = [place // size for place, size in zip(torch.unravel_index(rows, shape[:-1]), sizes)]
    return weight.mul_(factors[tuple(places)].repeat_interleave(sizes[-1], -1)[..., : shape[-1]])


def weight_files(place):
    """The files of a checkpoint's weights: one, or all shards of a model, which are known by their names."""
    paths = [place]
    if isdir(place):
        paths = next(filter(None, (sorted(place.glob(pattern)) for pattern in WEIGHT_FILES)), [])
    if not paths:
        there = ", ".join(sorted(path.name for path in place.glob("*"))[:5]) or "nothing"
        raise UserError(f"{place / WEIGHT_FILES[0]} is missing: the folder has {there}. A file may be named")
    shard = SHARD.search(paths[0].name)
    if shard and not isdir(place):
        alike = SHARD.sub("", place.name)
        paths = sorted(path for path in place.parent.iterdir() if SHARD.sub("", path.name) == alike)
    count = int(shard[1]) if shard else 1
    if len(paths) != count:
        raise UserError(f"{paths[0]} is one of {count} shards of a model, of which {len(paths)} are here")
    return paths


def folder_of(place):
    """The folder of a checkpoint, whose single file of weights may be named."""
    return place if isdir(place) else place.parent


def raw_config(place):
    """What config.json of a checkpoint says, a dictionary; None where there is none."""
    if is_gguf(place):
        return open_gguf(place).config
    path = folder_of(place) / "config.json"
    return read_json(path) if exists(path) else None


def run_config(place):
    """What config.json says, or would say of a .gguf file; UserError if more is in that than is followed."""
    if not is_gguf(place):
        return raw_config(place)
    header = open_gguf(place)
    with as_user_error(place):
        name = header.values["general.architecture"]
        if name not in GGUF_MODELS:
            known = f"of .gguf files {', '.join(GGUF_MODELS)} are run"
            raise ForeignArchitecture(f"{place}: {known}, not {name}: take safetensors")
        raw = {"rope_theta": 10_000.0, "num_key_value_heads": header.config["num_attention_heads"]}
        raw["head_dim"] = header.config["hidden_size"] // header.config["num_attention_heads"]
        raw |= {"model_type": GGUF_MODELS[name], "tie_word_embeddings": HEAD not in header.tensors}
        raw |= header.config
        raw["vocab_size"] = header.tensors[TOKEN_TABLE].shape[0]
        if name == "gemma3":
            raw["query_pre_attn_scalar"] = raw["head_dim"]
        else:
            raw.pop("sliding_window", None)
        implied = dict.fromkeys(("rope.dimension_count", "attention.value_length"), raw["head_dim"])
        implied |= {"vocab_size": raw["vocab_size"], "attention.causal": True}
        more = []  # than is followed
        for key, value in header.said.items():
            if GGUF_KEYS.get(key) not in raw and str(value) not in (*NEUTRAL, str(implied.get(key))):
                more.append(f"{name}.{key} = {value}")
        for tensor in header.tensors:
            is_bias = tensor.endswith("bias") and name != "qwen2"
            if is_bias or not tensor.startswith(("model.", "lm_head.")):  # as factors of RoPE
                more.append(tensor)
        if more:
            raise ForeignArchitecture(f"{place}: {more[0]} is not followed: take safetensors")
    return raw


def config_from_hf(place):
    """The architecture that a config.json describes, ours or one of FAMILIES; UserError for any other."""
    raw = run_config(place)
    if raw is None:
        raise ForeignArchitecture(f"{folder_of(place) / 'config.json'} is missing")
    if is_ours(raw):
        return config_of(raw, place)
    family = raw.get("model_type")
    if family not in list(FAMILIES):  # a stranger's list or object has no hash
        raise ForeignArchitecture(f"{place}: model.py trains and reads {', '.join(FAMILIES)}, not {family!r}")
    with as_user_error(place):
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        for key, plain in PLAIN.items():
            value = rope.get(key, raw.get(key, plain))
            if value != plain:
                raise ForeignArchitecture(f"{place}: {key} {value!r} is not supported; expected {plain}")
        if set(raw.get("layer_types") or ()) - {"full_attention"}:
            raise ForeignArchitecture(f"{place}: layers that slide are not supported")
        values = FAMILIES[family] | {ours: raw[theirs] for ours, theirs in KEYS.items() if theirs in raw}
        values["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
        return from_values(ModelConfig, values, place)


def parameter_shapes(config):
    """The shapes of a model's parameters, by name."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class CheckpointReader:
    """The parameters of a checkpoint, read one at a time; `shapes` has theirs by name."""

    def __init__(self, place, tensors, config, names_mlps=False, packed=()):
        self.place = place  # None: not on the disk
        self.tensors = tensors
        self.config = config  # None: of an architecture that is not ours
        self.names_mlps = names_mlps  # does config.json tell their size?
        self.packed = dict(packed)  # how many numbers each tensor has that cannot be read
        self.is_scaled = all(tensor.kind != UNSCALED for tensor in tensors.values())
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    @functools.cached_property
    def told(self):
        """What is said beside the weights: of "layers" and "tokens" how many (or None), of "parts" a phrase.

        The phrase says why these are a part of a model; "" if nothing says so.
        """
        told = {"layers": None, "tokens": None, "parts": ""}
        if self.place is not None:
            told |= counts_told(self.place) | {"parts": parts_told(self.place)}
        return told

    def expect(self, parts):
        """Fetch parts of tensors, (name, part) each, that will be read, together, if they are on the Hub."""
        if self.place and any(folder_of(self.place).glob(".*.parts")):
            with as_user_error(self.place), ranges.together():
                for name, part in parts:
                    self.tensors[name].read(part)

    def read(self, name, part=()):
        """One tensor, or a part, in memory of its own; UserError for one that is not finite.

        A part has an index or a slice for each of the first axes, or for the first axis row numbers, (n,).
        """
        with as_user_error(f"{self.place}: {name}"):
            return finite(self.place, name, self.tensors[name].read(part))


class Newborn(CheckpointReader):
    """A CheckpointReader of a newborn: each parameter is drawn when it is read."""

    def __init__(self, config, seed, embedding_seed=None, scheme="gpt2"):
        tensors = {}
        draws = births(config, seed, embedding_seed, scheme)
        for name, shape in parameter_shapes(config).items():
            tensors[name] = LazyTensor(shape, "F32", lambda part=(), draw=draws[name]: draw()[part])
        super().__init__(None, tensors, config)


def open_spec(spec, any_architecture=False):
    """The CheckpointReader of a model by name; UserError if it is not model.py's, unless any is allowed."""
    if spec.preset:
        return Newborn(spec.own_config, spec.seed, spec.embedding_seed, spec.scheme)
    return open_checkpoint(spec.folder, any_architecture)


def open_checkpoint(place, any_architecture=False):
    """The CheckpointReader of a model that `model.py` is; of the tensors as they are, if it may be any."""
    tensors, packed = contents(place, any_architecture)
    try:
        return own_checkpoint(place, tensors)
    except UserError as error:
        if not any_architecture:
            raise UserError(f"{error}. `seedprint.py compare` reads any, by its weights alone") from None
        if not isinstance(error, ForeignArchitecture) and rank() == 0:  # the weights suffice
            print(f"{error}: it is read by its weights alone", file=sys.stderr)
    names_mlps = MLP_SIZE.search(json.dumps(raw_config(place))) is not None
    return CheckpointReader(place, tensors, None, names_mlps, packed)


def contents(place, may_be_packed=False):
    """A checkpoint's LazyTensors, and how many numbers others pack; UserError for these, if none may."""
    tensors = open_gguf(place).tensors if is_gguf(place) else open_tensors(weight_files(place))
    tensors = with_scales(raw_config(place), tensors)
    bare = [name.replace("_orig_mod.", "").removeprefix("module.") for name in tensors]  # of compile, and DDP
    names = bare if len({*bare}) == len(tensors) else tensors
    weights, packed = {}, {}
    for name, tensor in zip(names, tensors.values()):
        if is_packed(name, tensor):
            packed[name] = math.prod(tensor.shape) * (8 if "32" in tensor.kind else 2)  # of 4 bits, or so
        elif tensor.kind in FLOATS and 0 not in tensor.shape and not MOMENT.search(name):
            weights[name] = tensor
    if packed and not may_be_packed:
        raise packed_error(place, packed)
    return weights, packed


def packed_error(place, packed):
    """The UserError of a checkpoint with packed tensors."""
    remedy = "take the model that was quantised, or what transformers' dequantize() makes of this"
    return UserError(f"{place}: {min(packed)} has packed numbers: {remedy}")


def is_packed(name, tensor):
    """Are a tensor's numbers those of a quantised matrix? Masks and lookup tables are not called weights."""
    if tensor.kind in FLOATS or len(tensor.shape) < 2 or name.endswith(BUFFER):
        return False
    return tensor.kind not in NO_WEIGHT or name.endswith(("weight", "kernel"))


def own_checkpoint(place, tensors):
    """The CheckpointReader of our architecture; UserError unless the tensors are config.json's."""
    config = config_from_hf(place)
    if config.num_layers > len(tensors):  # building the layers might take all memory
        raise UserError(f"{place}: too few tensors for {config.num_layers} layers")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(NO_PARAMETER)}
    if config.tie_embeddings and HEAD in tensors:
        head = tensors[HEAD]
        if torch.equal(head.read(), tensors.setdefault(TOKEN_TABLE, head).read()):
            del tensors[HEAD]
    shapes = {(name, tensor.shape) for name, tensor in tensors.items()}
    differing = shapes ^ set(parameter_shapes(config).items())
    if differing:
        name, shape = min(differing)
        raise UserError(f"{place}: {name} {shape} is unknown or missing, by its config.json: correct that")
    return CheckpointReader(place, tensors, config)


def counts_told(place):
    """How many layers and tokens the whole model has, by what is beside its weights, if it says that."""
    raw = raw_config(place) or {}
    counts = {}
    for level in (raw, raw.get("text_config")):
        for key, value in level.items() if isinstance(level, dict) else ():
            if key in COUNTS and type(value) is int and value > 0:
                counts.setdefault(COUNTS[key], value)
    return counts if "tokens" in counts else counts | {"tokens": len(token_ids(place)) or None}


def parts_told(place):
    """What says that a file is one part of a model: a note in it, or a file beside it; "" if nothing."""
    if is_gguf(place):
        return ""
    path, *shards = weight_files(place)
    is_noted = SHARDING in ranges.read(path, 0, ranges.NEAR)
    if is_noted and not path.name.startswith("model-"):  # as it names whole matrices
        return f"{SHARDING.decode()} in {path.name} says where its parts of matrices belong"
    words = NUMBERS.split(place.name)
    for other in sorted(place.parent.iterdir()) if isfile(place) and not shards else ():
        theirs = NUMBERS.split(other.name)
        differing = [i for i, word in enumerate(words) if theirs[i : i + 1] != [word]]
        is_sibling = len(theirs) == len(words) and len(differing) == 1 and differing[0] % 2
        if is_sibling and has_no_other_vectors(other, place):
            return f"{other.name} beside {place.name} holds other parts of it"
    return ""


def has_no_other_vectors(path, other):
    """Are the vectors in two files the same, as in parts of one model? True if one cannot be read."""
    try:
        tensors, others = open_tensors([path]), open_tensors([other])
        both = [(tensors[name], others[name]) for name in tensors.keys() & others.keys()]
        vectors = [pair for pair in both if pair[0].kind in FLOATS and len(pair[0].shape) == 1]
        return all(mine.kind == its.kind and torch.equal(mine.read(), its.read()) for mine, its in vectors)
    except Exception:
        return True


def token_ids(place):
    """Each token's id by its string, as a checkpoint's tokenizer has them; {} for one that has none."""
    with as_user_error(place):
        vocabulary = vocabulary_of(place)
        if isinstance(vocabulary, list):  # of strings, or of strings and their scores
            strings = [token[0] if isinstance(token, list) else token for token in vocabulary]
            vocabulary = dict(zip(strings, range(len(strings))))
        # a blank is written in one way
        return {token.replace("\u0120", "\u2581"): number for token, number in vocabulary.items()}


def vocabulary_of(place):
    """A checkpoint's tokens: their ids by string, or a list in the order of ids; by the surest file."""
    if is_gguf(place):
        return open_gguf(place).values.get("tokenizer.ggml.tokens", [])
    path = next(filter(exists, (folder_of(place) / name for name in VOCABULARIES)), None)
    if path is None:
        return []
    check_regular(path)
    if path.suffix == ".txt":
        return path.read_text("utf-8").splitlines()
    if path.suffix == ".json":
        values = read_json(path)
        return values["model"]["vocab"] if path.name == "tokenizer.json" else values
    try:
        coder = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        return coder.id_to_piece(list(range(coder.vocab_size())))
    except (RuntimeError, UnicodeDecodeError):  # a file of another kind, as Llama 3's
        return []
