"""Which rows of which matrices of two layers are compared? (ours)

A few rows of each matrix are read. Matrices correspond by what they do in an MLP, whatever they are called,
and the others by name. Of many experts a few are read: those that correspond.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineage.layers import Layer
from lineage.names import NO_WEIGHTS, WRITERS, expert_key, is_called
from lineage.views import MOST_EXPERTS, evenly_spaced

BLOCK = 32  # rows that are read of a matrix: so many of its first, and of its last
FEWEST = 16  # rows, and columns, of a matrix that can tell something
PIECE, VARIED = 16, 60  # numbers side by side; how many such pieces must differ, as no mask's do
BATCH = 4096  # numbers of a matrix of which that is judged


class Sample(NamedTuple):
    """Rows of a matrix that are read."""

    name: str
    parts: list  # (index or slice of each axis but the last) of the tensor
    shape: tuple  # of the matrix, or of all that a tensor stacks
    size: int  # how many numbers it stands for


class SamplePair(NamedTuple):
    """What corresponds in two layers."""

    role: str  # what the two do: of an MLP gate, up, down; of others their name, without an expert's number
    base: Sample
    suspect: Sample


def sample_of(name, shape, start=0, count=None) -> Sample:
    """The first and last rows of a matrix, or of `count` of its rows; of a stack's first and last one."""
    *stacked, rows, columns = shape
    count = count or rows - start
    size = min(BLOCK, -(-count // 2))
    last = [number - 1 for number in stacked]
    first_part = (*[0] * len(stacked), slice(start, start + size))
    last_part = (*last, slice(start + count - size, start + count))
    shape = (*stacked, count, columns)
    return Sample(name, [first_part, last_part], shape, int(np.prod(shape)))


def sample_of_role(mlp, role, shapes, width) -> Sample | None:
    """Rows of an MLP's matrix; of a gate that is stored above `up` its own."""
    name = mlp.matrices.get(role)
    if name is not None:
        sample = sample_of(name, shapes[name][-2:])
    else:
        name = mlp.matrices.get("gate_up")
        if name is None or shapes[name][-1] != width or role not in ("gate", "up"):
            return None
        down = shapes[mlp.matrices["down"]]
        count = down[-1] if down[-2] == width else down[-2]
        sample = sample_of(name, shapes[name][-2:], count * (role == "up"), count)
    if mlp.index is None:
        return sample
    return sample._replace(parts=[(mlp.index, *part) for part in sample.parts])


def read_sample(source, sample: Sample, columns=None) -> Tensor:
    """The rows of a Sample as they are stored, (n, columns) of float32.

    Without the mean of its diagonal: a birth may be near a multiple of the identity.
    """
    rows = torch.cat([source.read(sample.name, part)[:, :columns] for part in sample.parts]).float()
    numbers = [torch.arange(part[-1].start, part[-1].stop) for part in sample.parts]
    diagonal = (torch.arange(len(rows)), torch.cat(numbers) % rows.shape[1])
    return rows.index_put_(diagonal, -rows[diagonal].mean(), accumulate=True)


def pairs_of_layers(base: Layer, suspect: Layer, experts, shapes, widths):
    """The SamplePairs of two layers, of which experts correspond by number, (base's, suspect's) each.

    `shapes` and `widths` are those of the two models.
    """
    pairs = []
    plain = [[mlp for mlp in layer.mlps if mlp.number is None] for layer in (base, suspect)]
    mlp_pairs = [(mlps, 1) for mlps in zip(*plain)]
    experts = [pair for pair in experts if None not in pair]
    stands_for = max(1, len(suspect.experts)) / max(1, len(experts))  # each that is read for so many
    of_base, of_suspect = base.experts, suspect.experts
    for ours, theirs in experts:
        mlp_pairs.append(((of_base[ours], of_suspect[theirs]), stands_for))
    for mlps, count in mlp_pairs:
        fused = all("gate_up" in mlp.matrices for mlp in mlps)
        for role in ("gate_up", "down") if fused else ("gate", "up", "down"):
            samples = [sample_of_role(mlp, role, *each) for mlp, each in zip(mlps, zip(shapes, widths))]
            if None not in samples and samples[0].shape == samples[1].shape:
                samples = [sample._replace(size=int(count * sample.size)) for sample in samples]
                pairs.append(SamplePair(role, *samples))
    others = [named_samples(layer, each) for layer, each in zip((base, suspect), shapes)]
    common = [key for key in others[0] if key in others[1]]
    if not common:  # by other names: what attention writes
        writers = []
        for samples in others:
            writers.append([sample for sample in samples.values() if is_called(sample.name, WRITERS)])
        if len(writers[0]) == len(writers[1]) == 1:
            pairs.append(SamplePair("out", writers[0][0], writers[1][0]))
    for key in common:
        pairs.append(SamplePair(key[0], others[0][key], others[1][key]))
    return [pair for pair in pairs if pair.base.shape == pair.suspect.shape]


def named_samples(layer: Layer, shapes):
    """The Samples of a layer's matrices outside its MLPs, by (name without an expert's number, that number).

    Of many that differ in a number alone a few are taken.
    """
    taken = {full for mlp in layer.mlps for full in mlp.matrices.values()} | {layer.router}
    families = {}
    for rest, full in layer.names.items():
        rows = shapes[full][-2:]
        if full not in taken and len(rows) == 2 and min(rows) >= FEWEST and not NO_WEIGHTS.search(full):
            key, number = expert_key(rest)
            families.setdefault(key, {})[number] = full
    samples = {}
    for key, members in families.items():
        numbers = list(members)
        for place in evenly_spaced(len(numbers), MOST_EXPERTS):
            full = members[numbers[place]]
            stands_for = len(numbers) / min(len(numbers), MOST_EXPERTS)
            sample = sample_of(full, shapes[full])
            samples[key, numbers[place]] = sample._replace(size=int(stands_for * sample.size))
    return samples


def samples_to_read(layer: Layer, shapes, experts):
    """(name, part) of all that bits and coordinates may read of a layer, of whose experts these are read."""
    parts = []
    for sample in named_samples(layer, shapes).values():
        parts += [(sample.name, part) for part in sample.parts]
    for mlp in layer.mlps:
        if mlp.number is None or mlp.number in experts:
            for name in mlp.matrices.values():
                for part in sample_of(name, shapes[name][-2:]).parts:
                    parts.append((name, part if mlp.index is None else (mlp.index, *part)))
    return parts


def is_varied(weight: Tensor):
    """Do most pieces of a tensor differ, as no mask's, identity's or constant's do? Of some is judged.

    Single numbers would not tell: in eight bits, or by a scale, weights have few different ones.
    """
    numbers = weight.flatten()
    pieces = numbers[: len(numbers) // PIECE * PIECE].view(-1, PIECE)
    pieces = pieces[:: 1 + len(numbers) // (BATCH + 1)].float().numpy()
    return len({piece.tobytes() for piece in pieces}) > max(VARIED, len(pieces) / 2)
