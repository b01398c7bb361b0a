"""What is in a stranger's checkpoint?

A folder holds config.json, and weights in one file or in shards and their index; a file of weights, or a
.gguf file, which has all in it, may be named in its place. Nothing is executed: a .safetensors or .gguf file
is a table of names before the numbers, and of a pickle `weights_only` allows tensors and plain values alone.
"""

import argparse
import functools
import hashlib
import json
import math
import re
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from os.path import exists, isdir, isfile
from pathlib import Path

import safetensors
import sentencepiece
import torch

from init import birth_value
from lib.files import GIT_LFS, as_user_error, check_regular, read_json
from lib.settings import UserError, from_values, rank
from model import ModelConfig, Transformer
from sources.checkpoint import KEYS, config_of, finite, is_ours
from strangers import ranges
from strangers.gguf import GGUF, MERGE, LazyTensor

CONVERTED = Path(__file__).parents[1] / "models" / "converted"  # what .gguf files hold, as folders
UNSCALED = "F8 without scales"
FLOATS = ("F64", "F32", "F16", "BF16", "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16")
FLOATS += (UNSCALED,)
SHARD = re.compile(r"\d+(?=([-_.]of[-_]\d+))")  # in a file's name: which of how many
RANK = re.compile(r"(consolidated\.|[mt]p_rank_|model-rank-|model_part-|model(?=\d+-mp))(\d+)")  # of several
OTHER_ZIPS = (".keras", ".npz")  # a file of torch.save is a zip file, too
OTHER_FORMAT = "files of this format are not read here: load it where it was made, and save its weights as "
OTHER_FORMAT += ".safetensors, by torch.save, or as .gguf"
NESTED = ("model", "state_dict", "model_state_dict", "module")  # where training scripts put the weights
STACK = re.compile(r"(?!.*[./]\d+[./])(?:.*[./])?(?:layers?|blocks?|h)[./]")  # of tensors with all layers
FP8 = ("F8_E4M3", "torch.float8_e4m3fn")
NO_SCALE = LazyTensor((), "F32", partial(torch.ones, ()))
SCALE = re.compile(r"_scale(?:_inv|_ub)?$|\.q?scale_(?:weight|input)$|scaled_fp8$")  # or a mark, beside FP8
SCALES_OF_OWNER = ("scale", "scale_weight", "qscale_weight")
BLOCK_SIZE = re.compile(r'"weight_block_size": \[(\d+), (\d+)\]')  # as config.json tells it
BITS = re.compile(r'"bits": (\d)')  # of a packed number, as config.json tells them
NO_WEIGHT = ("BOOL", "I64", "torch.bool", "torch.int64")  # which masks and lookup tables have
MOMENT = re.compile(r"(?:^|[./])(?:\w*exp_avg\w*|momentum\w*|step)$")  # what an optimizer keeps of a weight
NO_PARAMETER = re.compile(r"inv_freq$|\.attn\.(?:masked_)?bias$")  # nor a mask
BUFFER = re.compile(r"(?:bias|mask|_ids|_index|freqs_cis)$")  # tensors that need not be weights
FAMILIES = {  # model_type: what its configurations leave out
    "llama": {"norm_epsilon": 1e-6},
    "qwen2": {"norm_epsilon": 1e-6, "qkv_bias": True},
}
C_ATTN = re.compile(r"(?:^|\.)h\.\d+\.attn\.c_attn\.weight$")
PLAIN = {  # what our model does; other values of these keys are refused
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    "per_layer_config": None,
}
MLP_SIZE = re.compile(r'"\w*(intermediate_size|ffn|n_inner|d_ff)\w*": [1-9]')  # as config.json tells it
TOKEN_TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")  # as in `transformers`, these are
WEIGHT_FILES += ("pytorch_model.bin", "pytorch_model.bin.index.json")  # read before those


PART_OF_EACH = "a part of each matrix: name a folder, or join the parts first"


class ForeignArchitecture(UserError):
    """A folder is a checkpoint, but not of an architecture that `model.py` is."""

    def __init__(self, reason):
        super().__init__(f"{reason}. `seedprint.py compare` reads any, by its weights alone")


def beginning(path):
    """A file's first bytes, as text; "" where there is none."""
    if not isfile(path):
        return ""
    check_regular(path)
    ranges.need(Path(path), 0, 64)
    with open(path, "rb") as file:
        return file.read(64).decode("latin-1")


def read_bytes(path):
    """The bytes of a regular file."""
    check_regular(path)
    return path.read_bytes()


def sha256(path):
    """The SHA-256 of a regular file, in hexadecimal."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_gguf(place):
    """Is a place a .gguf file, whatever its name?"""
    return isfile(place) and (place.suffix == ".gguf" or beginning(place).startswith("GGUF"))


def converted_place(path):
    """The folder to which a .gguf file is converted, by its content."""
    return CONVERTED / sha256(path)


@functools.lru_cache(8)
def open_gguf(path):
    """A .gguf file, whose header is parsed once; UserError for what is none, or a part."""
    if len(shards_of(path)) > 1:
        raise UserError(f"{path} {MERGE}")
    with as_user_error(path):
        return GGUF(path)


def safetensors_of(path):
    """The LazyTensors of a .safetensors file, by name; each part is read into memory of its own."""
    spans = ranges.spans_of(path)  # of one that is fetched by blocks
    file = safetensors.safe_open(path, "pt")
    tensors = {}
    for name in file.keys():
        tensor = file.get_slice(name)
        read = partial(fetched_part, path, spans[name], tensor) if spans else partial(part_of, tensor)
        tensors[name] = LazyTensor(tuple(tensor.get_shape()), tensor.get_dtype(), read)
    return tensors


def pickled_tensors(path):
    """The LazyTensors of a file of torch.save, by name."""
    with torch.serialization.safe_globals([argparse.Namespace]):  # Megatron's settings
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for key in NESTED:
        if isinstance(values.get(key), dict):
            return tensors_in(values[key])
    return tensors_in(values)


def tensors_in(values, prefix=""):
    """The LazyTensors in dictionaries of dictionaries, by their keys with dots between them."""
    tensors = {}
    for key, value in values.items():
        if isinstance(value, dict):
            tensors |= tensors_in(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            read = partial(copy_of, value.detach())
            tensors[f"{prefix}{key}"] = LazyTensor(tuple(value.shape), str(value.dtype), read)
    return tensors


def part_of(tensor, part=()):
    """A part of a tensor in a file, by default all; no more of the file is touched."""
    return tensor[part]


def fetched_part(path, span, tensor, part=()):
    """The same of a tensor of a file that is fetched by blocks."""
    ranges.need_part(path, span, tensor.get_shape(), part)
    return tensor[part]


def copy_of(tensor, part=()):
    """The same of a tensor that is mapped into memory, in memory of its own."""
    return tensor[part].clone()


def open_tensors(paths):
    """The LazyTensors of several files, by name."""
    tensors = {}
    for path in paths:
        check_regular(path)
        begun = beginning(path)
        is_safe = begun[8:9] == "{"  # behind the length of a header
        is_other = path.suffix.lower() in OTHER_ZIPS or not begun.startswith(("PK", GIT_LFS.decode()))
        if begun and is_other and not is_safe:
            raise UserError(f"{path}: {OTHER_FORMAT}")
        with as_user_error(path):
            found = safetensors_of(path) if is_safe else pickled_tensors(path)
        if tensors.keys() & found.keys():
            raise UserError(f"{path} has {PART_OF_EACH}")
        tensors |= found
    return tensors


def unstacked(tensors):
    """Tensors, of which those that hold all layers, as MaxText's along the second axis, are one for each."""
    stacks = defaultdict(list)
    for name, tensor in tensors.items():
        if STACK.match(name) and len(tensor.shape) > 1:
            stacks[STACK.match(name)[0]].append(name)
    layers = dict(tensors)
    for prefix, names in stacks.items():
        axes = [axis for axis in (0, 1) if len({tensors[name].shape[axis] for name in names}) == 1]
        for name in names if axes else ():
            tensor = layers.pop(name)
            shape = list(tensor.shape)
            for layer in range(shape.pop(axes[0])):
                read = partial(part_of_layer, tensor.read, axes[0], layer)
                place = f"{prefix}{layer}.{name.removeprefix(prefix)}"
                layers[place] = LazyTensor(tuple(shape), tensor.kind, read)
    return layers


def part_of_layer(read, axis, layer, part=()):
    """A part of one layer, of a tensor that holds all of them along its first or second axis."""
    first = part[:axis] or (slice(None),) * axis
    return read((*first, layer, *part[axis:]))


def gpt2_tensors(tensors):
    """Tensors, of which a GPT-2's have one name and are (outputs, inputs), whoever stored them."""
    joined = [tensor.shape for name, tensor in tensors.items() if C_ATTN.search(name)]
    if not joined or any(max(shape) != 3 * min(shape) for shape in joined):
        return tensors
    is_turned = all(rows < columns for rows, columns in joined)  # as Hugging Face's, but not nanoGPT's
    found = {}
    for name, tensor in tensors.items():
        if is_turned and ".c_" in name and len(tensor.shape) == 2:
            tensor = LazyTensor(tensor.shape[::-1], tensor.kind, partial(turned, tensor.read))
        found[name.rpartition("transformer.")[2]] = tensor
    return found


def turned(read, part=()):
    """A part of a matrix whose stored rows are its columns."""
    return read().t()[part].contiguous()


def with_scales(place, raw, tensors):
    """Tensors, of which those in FP8 are multiplied by the scales beside them, which are no weights."""
    packed = [name for name, tensor in tensors.items() if tensor.kind in FP8]
    if not packed:
        return tensors
    weights = {name: tensor for name, tensor in tensors.items() if not SCALE.search(name)}
    said = BLOCK_SIZE.search(json.dumps(raw))
    blocks = [int(size) for size in said.groups()] if said else [128, 128]
    for name in weights.keys() & packed:
        shape, owner = tensors[name].shape, name.removesuffix("weight")
        beside = [f"{name}_scale_inv", f"{name}_scale", *(f"{owner}{end}" for end in SCALES_OF_OWNER)]
        beside = [scale for scale in beside if scale in tensors]
        fitting = [scale for scale in beside if block_sizes(shape, tensors[scale].shape, blocks)]
        found = (fitting or beside or [""])[0]
        weights.pop(found, None)
        scale = tensors.get(found, NO_SCALE)
        read = partial(multiplied, f"{place}: {name}", tensors[name].read, scale.read, shape, blocks)
        weights[name] = LazyTensor(shape, "F32" if found else UNSCALED, read)
    return weights


def block_sizes(shape, counts, told):
    """Along each axis of a tensor, how many numbers share one of so many scales; None where they do not fit.

    `told` has those of matrices; others divide an axis, or are powers of two. The last block may be short.
    """
    sizes = ([1] * len(shape) + told)[2:]
    counts = [*counts, *[1] * (len(shape) - len(counts))]
    found = []
    for n, count, size in zip(shape, counts, sizes):
        tried = [size, n // max(1, count), *[2**power for power in range(n.bit_length())]]
        found += [size for size in tried if (count - 1) * size < n <= count * size][:1]
    return found if len(found) == len(counts) else None


def multiplied(label, read, read_scale, shape, told, part=()):
    """A part of a tensor in FP8, in float32, times its scales: one for all, one for each row or block."""
    with as_user_error(label):
        weight = read(part).float()
        factors = read_scale()
        if factors.dtype == torch.uint8:  # exponents, of which 255 is NaN
            factors = factors.view(torch.float8_e8m0fnu)
        factors = factors.float()
        factors = factors.view(*factors.shape, *[1] * (len(shape) - factors.ndim))
        blocks = block_sizes(shape, factors.shape, told)
        if not blocks:
            raise UserError(f"{label}: scales of shape {[*factors.shape]} do not divide {[*shape]}")
        for axis in reversed(range(len(shape))):
            numbers = torch.arange(shape[axis])[part[axis] if axis < len(part) else slice(None)]
            factors = factors.movedim(axis, 0)[numbers // blocks[axis]]
            factors = factors.movedim(0, axis) if numbers.ndim else factors
        return weight.mul_(factors)


def weight_files(place):
    """The files of a checkpoint's weights: a single file, or the shards that an index names."""
    if not isdir(place):
        second = RANK.sub(lambda found: f"{found[1]}{int(found[2]) or 1:0{len(found[2])}}", str(place))
        if RANK.search(second) and exists(second):
            raise UserError(f"{place} has {PART_OF_EACH}")
        return shards_of(place)
    names = [name for name in WEIGHT_FILES if exists(place / name)]
    if not names:
        there = ", ".join(sorted(path.name for path in place.glob("*"))[:5]) or "nothing"
        raise UserError(f"{place / WEIGHT_FILES[0]} is missing: the folder has {there}. A file may be named")
    path = place / names[0]
    if path.suffix != ".json":
        return [path]
    with as_user_error(path):
        shards = set(read_json(path)["weight_map"].values())
        for shard in shards:
            if Path(shard).name != shard:
                raise UserError(f"{path}: expected files in this folder, not {shard!r}")
    return sorted(place / shard for shard in shards)


def shards_of(path):
    """A file, or by their names all shards of whose model it is one; UserError if some are not there."""
    found = SHARD.search(path.name)
    if not found:
        return [path]
    alike = SHARD.sub("", path.name)
    paths = [other for other in path.parent.iterdir() if SHARD.sub("", other.name) == alike]
    count = int(re.search(r"\d+", found[1])[0])
    if len(paths) != count:
        raise UserError(f"{path} is one of {count} shards of a model, of which {len(paths)} are here")
    return sorted(paths)


def folder_of(place):
    """The folder of a checkpoint, whose single file of weights may be named."""
    return place if isdir(place) else place.parent


def raw_config(place):
    """What config.json of a checkpoint says, a dictionary; None where there is none."""
    if is_gguf(place):
        values = open_gguf(place).values
        size = values.get(f"{values.get('general.architecture')}.feed_forward_length")
        return {"intermediate_size": size} if isinstance(size, int) else None
    path = folder_of(place) / "config.json"
    return read_json(path) if exists(path) else None


def config_from_hf(raw, place):
    """The architecture that a config.json describes, ours or one of FAMILIES; UserError for any other."""
    if raw is None:
        raise ForeignArchitecture(f"{folder_of(place) / 'config.json'} is missing")
    if is_ours(raw):
        return config_of(raw, place)
    family = raw.get("model_type")
    if family not in list(FAMILIES):  # a stranger's list or object has no hash
        known = f"model.py trains and reads {', '.join(FAMILIES)}"
        raise ForeignArchitecture(f"{place}: foreign architecture {family!r}; {known}")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "none"):
        raise ForeignArchitecture(f"{place}: RoPE of type {rope_type!r} is not supported")
    for key, plain in PLAIN.items():
        value = rope.get(key, raw.get(key, plain))
        if value != plain:
            raise ForeignArchitecture(f"{place}: {key} {value!r} is not supported; expected {plain}")
    values = FAMILIES[family] | {ours: raw[theirs] for ours, theirs in KEYS.items() if theirs in raw}
    values["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    with as_user_error(place):
        config = from_values(ModelConfig, values, place)
        window = window_of(raw, config.num_layers, place)
        if window is not None:  # up to it, all is plain
            config = replace(config, context_length=min(window, config.context_length))
    return config


def window_of(raw, num_layers, place):
    """The positions that layers which slide attend to, as `transformers` has it; None where none slides."""
    family = raw["model_type"]
    if family == "llama":
        return None
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    before = raw.get("max_window_layers", 28)  # layers before the first that slides
    kinds = raw.get("layer_types")
    if kinds is None:
        return window if before < num_layers else None
    slides = "sliding_attention" in kinds
    is_known = len(kinds) == num_layers and set(kinds) <= {"full_attention", "sliding_attention"}
    if not is_known or (slides and window is None):
        raise ForeignArchitecture(f"{place}: these layer_types, with a window of {window}, are not supported")
    return window if slides else None


def parameter_shapes(config):
    """The shapes of a model's parameters, by name."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class CheckpointReader:
    """The parameters of a checkpoint, read one at a time; `shapes` has theirs by name."""

    def __init__(self, place, tensors, config, family="bornbiased", names_mlps=False, packed=()):
        self.place = place  # None: not on the disk
        self.tensors = tensors
        self.config = config  # None: of an architecture that is not ours
        self.family = family  # model_type of a foreign architecture; "" if nothing tells it
        self.names_mlps = names_mlps  # does config.json tell their size?
        self.packed = dict(packed)  # how many numbers each tensor has that cannot be read
        self.is_scaled = all(tensor.kind != UNSCALED for tensor in tensors.values())
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def expect(self, parts):
        """Fetch parts of tensors, (name, part) each, that will be read, together, if they are on the Hub."""
        if ranges.is_by_blocks(self.place):
            with ranges.together():
                for name, part in parts:
                    self.tensors[name].read(part)

    def read(self, name, part=()):
        """One tensor, or a part, in memory of its own; UserError for one that is not finite."""
        return finite(self.place, name, self.tensors[name].read(part))


class Newborn(CheckpointReader):
    """A CheckpointReader of a newborn: each parameter is drawn when it is read."""

    def __init__(self, config, seed, embedding_seed=None, scheme="gpt2"):
        tensors = {}
        for name, shape in parameter_shapes(config).items():
            draw = partial(birth_value, config, name, shape, seed, embedding_seed, scheme)
            tensors[name] = LazyTensor(shape, "F32", lambda part=(), draw=draw: draw()[part])
        super().__init__(None, tensors, config)


def open_spec(spec, any_architecture=False):
    """The CheckpointReader of a model by name; UserError if it is not model.py's, unless any is allowed."""
    if spec.preset:
        return Newborn(spec.own_config, spec.seed, spec.embedding_seed, spec.scheme)
    place = spec.folder if any_architecture or spec.is_ours else spec.place
    return open_checkpoint(place, any_architecture)


def open_checkpoint(place, any_architecture=False):
    """The CheckpointReader of a model that `model.py` is; of the tensors as they are, if it may be any."""
    raw, tensors, packed = contents(place)
    if packed and not any_architecture:
        raise packed_error(place, packed)
    try:
        return own_checkpoint(place, raw, tensors)
    except UserError as error:
        if not any_architecture:
            raise
        if not isinstance(error, ForeignArchitecture) and rank() == 0:  # the weights suffice
            print(f"{error}: it is read by its weights alone", file=sys.stderr)
    raw = raw or {}
    # names of a .gguf file say nothing of norms: gains stand there as they are
    family = "" if is_gguf(place) else str(raw.get("model_type", ""))
    names_mlps = MLP_SIZE.search(json.dumps(raw)) is not None
    return CheckpointReader(place, unstacked(gpt2_tensors(tensors)), None, family, names_mlps, packed)


def contents(place):
    """What config.json of a checkpoint says, its LazyTensors, and how many numbers others pack."""
    raw = raw_config(place)
    tensors = open_gguf(place).tensors if is_gguf(place) else open_tensors(weight_files(place))
    tensors = with_scales(place, raw, tensors)
    for name, tensor in tensors.items():
        if tensor.shape == (0,) and name.endswith("weight"):
            advice = "it was saved under ZeRO-3 without gathering: zero_to_fp32.py gathers the parts"
            raise UserError(f"{place}: {name} is empty; {advice}")
    weights, packed = {}, {}
    said = BITS.search(json.dumps(raw))
    for name, tensor in tensors.items():
        if is_packed(name, tensor):
            bits = re.search(r"\d+|$", tensor.kind)[0] or 8  # of a number in the file, which has several
            packed[name] = math.prod(tensor.shape) * int(bits) // int(said[1] if said else 4)
        elif tensor.kind in FLOATS and 0 not in tensor.shape and not MOMENT.search(name):
            weights[name] = tensor
    return raw, weights, packed


def packed_error(place, packed):
    """The UserError of a checkpoint with packed tensors."""
    remedy = "take the model that was quantised, or what transformers' dequantize() makes of this"
    return UserError(f"{place}: {min(packed)} has packed numbers: {remedy}")


def is_packed(name, tensor):
    """Are a tensor's numbers those of a quantised matrix? Masks and lookup tables are not called weights."""
    if tensor.kind in FLOATS or len(tensor.shape) < 2 or BUFFER.search(name):
        return False
    return tensor.kind not in NO_WEIGHT or name.endswith(("weight", "kernel"))


def own_checkpoint(place, raw, tensors):
    """The CheckpointReader of our architecture; UserError unless the tensors are config.json's."""
    config = config_from_hf(raw, place)
    if config.num_layers > len(tensors):  # building the layers might take all memory
        raise UserError(f"{place}: too few tensors for {config.num_layers} layers")
    expected = parameter_shapes(config)
    tensors = {name: tensor for name, tensor in tensors.items() if not NO_PARAMETER.search(name)}
    if config.tie_embeddings and HEAD in tensors:
        head = tensors.pop(HEAD)
        table = tensors.setdefault(TOKEN_TABLE, head)
        if table is not head and not torch.equal(head.read(), table.read()):
            said = f"{HEAD} is not {TOKEN_TABLE}, though config.json ties them"
            raise UserError(f"{place}: {said}: set its tie_word_embeddings to false")
    differing = expected.keys() ^ tensors.keys()
    if differing:
        raise ForeignArchitecture(f"{place}: {min(differing)} is unknown, or missing: has it a prefix?")
    for name, shape in sorted(expected.items()):
        if tensors[name].shape != shape:
            said = f"{name} is {tensors[name].shape}, expected {shape} by config.json: correct what it says"
            raise UserError(f"{place}: {said}")
    return CheckpointReader(place, tensors, config)


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
    folder = folder_of(place)
    if exists(folder / "tokenizer.json"):
        return read_json(folder / "tokenizer.json")["model"]["vocab"]
    if exists(folder / "tokenizer.model"):
        content = read_bytes(folder / "tokenizer.model")
        try:
            coder = sentencepiece.SentencePieceProcessor(model_proto=content)
            return coder.id_to_piece(list(range(coder.vocab_size())))
        except (RuntimeError, UnicodeDecodeError):  # a file of another kind, as Llama 3's
            return []
    if exists(folder / "vocab.json"):
        return read_json(folder / "vocab.json")
    if exists(folder / "vocab.txt"):
        return read_bytes(folder / "vocab.txt").decode().splitlines()
    return []
