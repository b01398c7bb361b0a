"""A tensor that is read when it is asked for."""

from collections.abc import Callable
from typing import NamedTuple


class LazyTensor(NamedTuple):
    """A tensor in a file, of any format. `read()` reads it; whoever changes it copies it first.

    `read(part)` reads a part: `part` has an index, or a slice, for each of the first axes, but not the last.
    For the first axis it may have a tensor of row numbers, (n,).
    """

    shape: tuple
    kind: str  # of its numbers, as `read` finds them: F32, BF16, ...
    read: Callable
