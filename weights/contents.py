"""Which tensors of a checkpoint, of any architecture, are its weights? They are read by name, or in parts."""

import math
import re
from os.path import isdir

import torch

from lib.files import as_user_error
from lib.settings import UserError
from weights import ranges
from weights.files import folder_of, is_gguf, open_gguf, read_config, read_index, weight_files
from weights.fp8 import UNSCALED, with_scales
from weights.storage import open_tensors

FLOATS = ("F64", "F32", "F16", "BF16", UNSCALED)
NO_WEIGHT = ("BOOL", "I64")  # which masks and lookup tables have
MOMENT = re.compile(r"(?:^|[./])(?:\w*exp_avg\w*|momentum\w*|step)$")  # what an optimizer keeps of a weight
SPARSE = re.compile(r"\.(?:compressed|bitmask|weight_meta|meta)$")  # numbers that are not zero, and where
BUFFER = ("bias", "mask", "_ids", "_index", "freqs_cis")  # how names of tensors end that need not be weights


class Weights:
    """The weights of a model by name: `shapes` has their shapes, and `read` reads one."""

    def __init__(self, tensors, place=None, packed=()):
        self.tensors = tensors  # LazyTensors by name
        self.place = place  # the folder or file; None: not on the disk
        self.packed = dict(packed)  # how many numbers each tensor has that cannot be read
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.bytes_read = 0  # of what `read` returned so far, if someone wants to know,
        self.digest = None  # and a SHA-256 of these

    @property
    def is_scaled(self):
        """Are all numbers what they stand for? Those in FP8 are not if no scales are beside them."""
        return all(tensor.kind != UNSCALED for tensor in self.tensors.values())

    def expect(self, parts):
        """Fetch parts of tensors, (name, part) each, that will be read, together, if they are on the Hub."""
        if self.place and any(folder_of(self.place).glob(".*.parts")):
            spans = []
            for name, part in parts:
                spans += self.tensors[name].spans(part)
            ranges.fetch(spans, is_told=True)

    def read(self, name, part=()):
        """One tensor, or a part, in memory of its own; UserError for one that is not finite.

        A part has an index or a slice for each of the first axes, or for the first axis row numbers, (n,).
        """
        with as_user_error(f"{self.place}: {name}"):
            weight = finite(self.place, name, self.tensors[name].read(part))
        if self.digest is not None:
            content = weight.contiguous().flatten().view(torch.uint8).numpy()
            self.bytes_read += len(content)
            self.digest.update(content)
        return weight

    @property
    def files(self):
        """The files that have the weights; none of a newborn."""
        if self.place is None:
            return []
        return [self.place] if is_gguf(self.place) else weight_files(self.place)


def finite(place, name, weight):
    """The same weight; UserError if it is not finite."""
    if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():  # which takes no memory
        raise UserError(f"{place}: {name} is not finite: check it for NaN")
    return weight


def open_weights(place, may_be_packed=False) -> Weights:
    """The Weights in a folder or file; UserError for packed ones, unless some may be."""
    if is_gguf(place):
        tensors = open_gguf(place).tensors
    else:
        tensors = open_tensors(weight_files(place), read_index(place) if isdir(place) else None)
    tensors = with_scales(read_config(place), tensors)
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
    return Weights(weights, place, packed)


def packed_error(place, packed):
    """The UserError of a checkpoint with packed tensors."""
    if any(SPARSE.search(name) for name in packed):
        remedy = "take the model that was pruned, or load this one by transformers with "
        remedy += "CompressedTensorsConfig(run_compressed=False), and save it"
        return UserError(f"{place}: {min(packed)} has sparse numbers without their zeros: {remedy}")
    remedy = "take the model that was quantised, or what transformers' dequantize() makes of this"
    return UserError(f"{place}: {min(packed)} has packed numbers: {remedy}")


def is_packed(name, tensor):
    """Are a tensor's numbers those of a quantised matrix? Masks and lookup tables are not called weights."""
    if SPARSE.search(name):
        return True
    if tensor.kind in FLOATS or len(tensor.shape) < 2 or name.endswith(BUFFER):
        return False
    return tensor.kind not in NO_WEIGHT or name.endswith(("weight", "kernel"))
