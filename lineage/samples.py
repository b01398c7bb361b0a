"""Which rows of which matrices of a layer are compared? (ours)

A few rows of each matrix are read. They are known by what the matrix does, whatever it is called: in an MLP
gate, up or down, or `out` for what attention writes; others by their names. Of many experts a few are read.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lineage.layers import MLP_ROLES, Layer, units_of
from lineage.names import NO_WEIGHTS, WRITERS, expert_key, is_called
from lineage.views import MOST_EXPERTS, evenly_spaced

BLOCK = 32  # rows that are read of a matrix: so many of its first, and of its last
FEWEST = 16  # rows, and columns, of a matrix that can tell something
PIECE, VARIED = 16, 60  # numbers side by side; how many such pieces must differ, as no mask's do
BATCH = 4096  # numbers of a matrix of which that is judged


class Sample(NamedTuple):
    """Rows of a matrix that are read."""

    name: str  # of the tensor
    parts: list  # of the tensor: an index or slice of each axis but the last
    shape: tuple  # of the matrix, or of all that a tensor stacks
    size: int  # how many numbers it stands for
    is_mlp: bool = False


def sample_of(name, shape, start=0, count=None) -> Sample:
    """The first and last rows of a matrix, or of `count` of its rows; of a stack's first and last one."""
    *stacked, rows, columns = shape
    count = count or rows - start
    size = min(BLOCK, -(-count // 2))
    last = [number - 1 for number in stacked]
    first_part = (*[0] * len(stacked), slice(start, start + size))
    last_part = (*last, slice(start + count - size, start + count))
    shape = (*stacked, count, columns)
    return Sample(name, [first_part, last_part], shape, math.prod(shape))


def samples_of(layer: Layer, shapes, width, experts=None):
    """The Samples of a layer, {(role or name, number): Sample}.

    `experts` has the numbers of those that are read, which here are 0, 1, ...; without it they are evenly
    spaced. What differs from others in a number alone is an expert, too, though no MLP.
    """
    samples = {}
    if experts is None:
        numbers = sorted(layer.experts)
        experts = [numbers[place] for place in evenly_spaced(len(numbers), MOST_EXPERTS)]
    stands_for = len(layer.experts) / max(1, len(experts))
    plain = [mlp for mlp in layer.mlps if mlp.number is None]
    for place, mlp in enumerate(plain):
        for role, sample in mlp_samples(mlp, shapes, width).items():
            samples[role, -1 - place] = sample
    for place, number in enumerate(experts):
        if number in layer.experts:
            for role, sample in mlp_samples(layer.experts[number], shapes, width).items():
                samples[role, place] = sample._replace(size=int(stands_for * sample.size))
    for key, members in families(layer, shapes).items():
        numbers = list(members)
        chosen = [numbers[place] for place in evenly_spaced(len(numbers), MOST_EXPERTS)]
        for number in chosen:
            sample = sample_of(members[number], shapes[members[number]])
            samples[key, number] = sample._replace(size=sample.size * len(numbers) // len(chosen))
    return samples


def mlp_samples(mlp, shapes, width):
    """The Samples of an MLP by role. Gate and up in one matrix are two, if they are its halves."""
    samples = {}
    for role, name in mlp.matrices.items():
        shape = shapes[name][-2:]
        if role == "gate_up" and shape[-1] == width:
            count = units_of(shapes[mlp.matrices["down"]], width)
            samples["gate"] = sample_of(name, shape, 0, count)
            samples["up"] = sample_of(name, shape, count, count)
        else:
            samples[role] = sample_of(name, shape)
    for role, sample in samples.items():
        parts = sample.parts
        if mlp.index is not None:
            parts = [(mlp.index, *part) for part in parts]
        samples[role] = sample._replace(parts=parts, is_mlp=True)
    return samples


def families(layer: Layer, shapes):
    """A layer's matrices outside its MLPs, by name but for a number in it, and by that number."""
    taken = {full for mlp in layer.mlps for full in mlp.matrices.values()} | {layer.router}
    found, writers = {}, []
    for rest, full in layer.names.items():
        rows = shapes[full][-2:]
        if full in taken or len(rows) < 2 or min(rows) < FEWEST or NO_WEIGHTS.search(full):
            continue
        key, number = expert_key(rest)
        found.setdefault(key, {})[number] = full
        if is_called(full, WRITERS):
            writers.append(key)
    if len(writers) == 1 and writers[0] not in MLP_ROLES:
        found["out"] = found.pop(writers[0])
    return found


def read_sample(source, sample: Sample) -> Tensor:
    """The rows of a Sample as they are stored, (n, columns) of float32, with a diagonal of zeros.

    A birth may be near a multiple of the identity.
    """
    columns = sample.shape[-1]
    rows = torch.cat([source.read(sample.name, part)[:, :columns] for part in sample.parts]).float()
    numbers = [torch.arange(part[-1].start, part[-1].stop) for part in sample.parts]
    rows[torch.arange(len(rows)), torch.cat(numbers) % columns] = 0
    return rows


def is_varied(weight: Tensor):
    """Do most pieces of a tensor differ, as no mask's, identity's or constant's do? Of some is judged.

    Single numbers would not tell: in eight bits, or by a scale, weights have few different ones.
    """
    numbers = weight.flatten()
    pieces = numbers[: len(numbers) // PIECE * PIECE].view(-1, PIECE)
    pieces = pieces[:: 1 + len(numbers) // (BATCH + 1)].float().numpy()
    return len({piece.tobytes() for piece in pieces}) > max(VARIED, len(pieces) / 2)
