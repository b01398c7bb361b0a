"""How are weights in 8 bits and the scales beside them made numbers again?"""

import json
import re
from functools import partial

import torch

from weights.lazy import LazyTensor, row_numbers

UNSCALED = "F8 without scales"  # the kind of such a tensor
SCALE = re.compile(r"_scale(?:_inv|_ub)?$|\.q?scale_(?:weight|input)$|scaled_fp8$")  # or a mark, beside FP8
BLOCK_SIZE = re.compile(r'"weight_block_size": \[(\d+), (\d+)\]')  # as config.json tells it


def with_scales(config, tensors):
    """Tensors, of which those in FP8 are multiplied by the scales beside them, which are no weights."""
    if all(tensor.kind != "F8_E4M3" for tensor in tensors.values()):
        return tensors
    weights = {name: tensor for name, tensor in tensors.items() if not SCALE.search(name)}
    stated = BLOCK_SIZE.search(json.dumps(config))
    blocks = [int(size) for size in stated.groups()] if stated else [128, 128]
    for name, tensor in weights.items():
        if tensor.kind == "F8_E4M3":
            scale = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
            read = partial(multiplied, tensor, scale, blocks)
            spans = partial(scaled_spans, tensor, scale)
            weights[name] = LazyTensor(tensor.shape, "F32" if scale else UNSCALED, read, spans)
    return weights


def scaled_spans(tensor, scale, part=()):
    """The bytes of files that `multiplied` reads."""
    return tensor.spans(part) + (scale.spans() if scale else [])


def multiplied(tensor, scale, blocks, part=()):
    """A part of a tensor in FP8, in float32, times its scales: one for all, one for each row or block."""
    weight = tensor.read(part).float()
    if scale is None:
        return weight
    shape = tensor.shape
    factors = scale.read()
    if factors.dtype == torch.uint8:  # exponents, of which 255 is NaN
        factors = factors.view(torch.float8_e8m0fnu)
    factors = factors.float().view((*factors.shape, *[1] * (len(shape) - factors.ndim)))
    sizes = ([1] * len(shape) + blocks)[2:]
    for axis, (n, count) in enumerate(zip(shape, factors.shape)):
        if not 1 < count < n:
            sizes[axis] = n // count
        if not (count - 1) * sizes[axis] < n <= count * sizes[axis]:  # the last block may be short
            raise ValueError(f"its scales of shape {[*scale.shape]} do not divide {[*shape]}")
    rows = row_numbers(shape, part)
    places = [place // size for place, size in zip(torch.unravel_index(rows, shape[:-1]), sizes)]
    return weight.mul_(factors[tuple(places)].repeat_interleave(sizes[-1], -1)[..., : shape[-1]])
