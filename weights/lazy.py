"""A tensor that is read when it is asked for, and the rows of bytes that it may stand in."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch


class LazyTensor(NamedTuple):
    """A tensor in a file, of any format. `read()` reads it; whoever changes it copies it first.

    `read(part)` reads a part: `part` has an index, or a slice, for each of the first axes, but not the last.
    For the first axis it may have a tensor of row numbers, (n,).
    """

    shape: tuple
    kind: str  # of its numbers, as `read` finds them: F32, BF16, ...
    read: Callable
    spans: Callable = lambda part=(): []  # which bytes `read(part)` reads: (path, start, stop) each


def row_numbers(shape, part=()):
    """The numbers of the rows, along the last axis, that a part of a tensor of this shape has."""
    return torch.arange(math.prod(shape[:-1])).view(shape[:-1])[part]
