"""What does a neuron read and write, as the tokens see it? (ours)

A neuron's gate, up and down weights each give a number for every token t, by the row E_t of the model's own
embedding matrix. These are its three *views*; without a gate it has two:

    gate_t = W_gate E_t        up_t = W_up E_t        down_t = W_down^T E_t

Rotating the residual stream rotates E and the weights alike, and changes no view. The centred rows of E are
Q R, by a QR decomposition: the d numbers R w say all but Q, which all neurons share. The neurons of a layer's
experts are one layer's neurons.
"""

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineage.layers import UNGATED, units_of

LONGEST_ROW = 10.0  # of an embedding matrix, in units of the median: one token must not drown all others
MOST_EXPERTS = 8  # of a layer that are read
BATCH = 4096  # rows of an embedding matrix that are read, or multiplied, together
RIDGE = 3.0  # of whitening: half more neurons are found under noise of three std than with 0.03


class Reading(NamedTuple):
    """How a stack is read, where its names leave a choice: all choices are tried (`lineage/align.py`)."""

    embedding: str  # the embedding matrix
    backward: bool  # of two matrices of an MLP without names the other one writes
    turned: bool  # square matrices of MLPs are stored the other way
    interleaved: bool  # a row of the gate and a row of up, where they are in one matrix; else in halves


def readings(stack, embeddings):
    """Every Reading of a stack by some embedding matrices, the likeliest first; [] where something lacks."""
    if stack.lack:
        return []
    mlps = [mlp for layer in stack.layers for mlp in layer.mlps]
    names = {name for mlp in mlps for name in mlp.matrices.values()}
    shapes = {stack.source.shapes[name] for name in names}
    is_guess = not all(mlp.is_named for mlp in mlps)
    has_square = any(shape[-1] == shape[-2] for shape in shapes)
    is_fused = any("gate_up" in mlp.matrices for mlp in mlps)
    choices = [(False, True) if is_open else (False,) for is_open in (is_guess, has_square, is_fused)]
    return [Reading(*choice) for choice in itertools.product(embeddings, *choices)]


class Neurons:
    """The neurons of a stack's layers by one Reading, as some tokens see them."""

    def __init__(self, stack, reading, root):
        self.stack = stack
        self.reading = reading
        self.root = root  # R, (d, d), or some directions of it, (k, d)
        self.kept = {}

    def views(self, layer, experts=()):
        """The views of a layer's neurons by name, (k, m) float32 each: columns of norm 1, or 0 for dead ones.

        Of its experts those of these numbers count. What is zero for all neurons is no view.
        """
        key = (layer, tuple(experts))
        if key not in self.kept:
            self.kept[key] = self.views_of(self.stack.layers[layer - 1], experts)
        return self.kept[key]

    def views_of(self, layer, experts):
        """The same, of a lineage.layers.Layer: one matrix after another is in memory."""
        mlps = [mlp for mlp in layer.mlps if mlp.number is None or mlp.number in experts]
        is_ungated = any(mlp.matrices.keys() == UNGATED for mlp in mlps)
        columns, is_alive = {}, True
        for view in ("up", "down") if is_ungated else ("gate", "up", "down"):
            seen = torch.cat([self.root @ scaled(self.rows(mlp, view)).T for mlp in mlps], dim=1)
            lengths = seen.norm(dim=0)
            if lengths.any():
                columns[view] = seen.div_(lengths.clamp(min=1e-30))
                is_alive = (lengths > 0) & is_alive
        return {view: whitened(each.mul_(is_alive)) for view, each in columns.items()}

    def rows(self, mlp, view):
        """An MLP's neurons by their weights of a view, (m, d) float32."""
        is_backward = self.reading.backward and not mlp.is_named
        role = {"up": "down", "down": "up"}[view] if is_backward else view
        name = mlp.matrices.get(role, mlp.matrices.get("gate_up"))
        weight = self.stack.source.read(name, () if mlp.index is None else (mlp.index,))
        if not is_stored_along(self.stack.width, name, weight.shape, self.reading.turned, view == "down"):
            weight = weight.T
        if role in mlp.matrices:
            return weight.float()
        count = units_of(self.stack.source.shapes[mlp.matrices["down"]], self.stack.width)
        fused = weight[: 2 * count]
        if self.reading.interleaved:
            return fused[role == "up" :: 2].float()
        return (fused[count:] if role == "up" else fused[:count]).float()


def scaled(weight: Tensor) -> Tensor:
    """A matrix whose largest |number| is 1, in place, so that no product overflows."""
    return weight.div_(weight.norm(torch.inf).clamp(min=1e-30))


def is_stored_along(width, name, shape, turned, writes):
    """Are the stored rows of a matrix along the stream? A writer's columns are.

    A square one is stored as (outputs, inputs), but those called kernels; or as is `turned`.
    """
    if shape[-1] != width or shape[-2] != width:
        return shape[-1] == width
    return writes == (name.endswith("kernel") != turned)


def evenly_spaced(count, limit=None):
    """Up to `limit` numbers of 0..count - 1, evenly spaced; None: all."""
    numbers = np.linspace(0, count - 1, min(count, limit or count)).round()
    return np.unique(numbers.astype(int)).tolist()


def living(views):
    """How many of a layer's neurons are not dead."""
    return int(next(iter(views.values())).any(dim=0).sum()) if views else 0


def whitened(columns: Tensor) -> Tensor:
    """(X X' + ridge)^(-1/2) X of X (k, m), whose columns have norm 1, scaled to it again.

    What all neurons share no longer drowns what is theirs. The symmetric root commutes with rotations.
    """
    values, vectors = torch.linalg.eigh(columns @ columns.T)
    white = (vectors * (values.clamp(min=0) + RIDGE).rsqrt()) @ vectors.T @ columns
    return white / white.norm(dim=0).clamp(min=1e-30)


def token_rows(stack, embedding, ids) -> Tensor:
    """The rows (n, d) float32 of some tokens, centred; the longest are scaled to LONGEST_ROW."""
    rows = torch.empty(len(ids), stack.width)
    for place in range(0, len(ids), BATCH):  # so that no more than the result is in memory
        rows[place : place + BATCH] = stack.source.read(embedding, (ids[place : place + BATCH],))
    longest = LONGEST_ROW * rows.norm(dim=1).median().item()
    if longest > 0:
        rows.renorm_(2, 0, longest)
    return rows.sub_(rows.mean(dim=0))
