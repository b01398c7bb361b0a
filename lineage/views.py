"""What does a neuron read and write, as the tokens see it? (ours)

A neuron's gate, up and down weights each give a number for every token t, by the row E_t of the model's own
embedding matrix. These are its three *views*; without a gate it has two:

    gate_t = W_gate E_t        up_t = W_up E_t        down_t = W_down^T E_t

Rotating the residual stream rotates E and
the weights alike, and changes no view. The centred rows of E are Q R: the d numbers R w say all but Q, which
all neurons share. The neurons of all of a layer's experts are one layer's neurons.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineage.layout import UNGATED, WRITERS, is_called, units_of

LONGEST_ROW = 10.0  # of a table, in units of the median: one token must not drown all others
MOST_EXPERTS = 16  # of a layer, evenly spaced, that are read
RIDGE = 3.0  # of decorrelation: half more neurons are found under noise of three std than with 0.03


class Reading(NamedTuple):
    """How a stack is read, where its names leave a choice: all choices are tried (`lineage/match.py`)."""

    table: str  # the embedding matrix
    backward: bool  # of two matrices of an MLP without names the other one writes
    turned: bool  # square matrices of MLPs are stored the other way
    in_turn: bool  # a row of the gate and a row of up, where they are in one matrix; else in halves


def readings(stack, tables):
    """Every Reading of a stack by some tables, the likeliest first; [] where something is lacking."""
    if stack.lack:
        return []
    mlps = [mlp for layer in stack.mlps for mlp in layer]
    shapes = [stack.source.shapes[name] for mlp in mlps for name in mlp.matrices.values()]
    is_guess = not all(mlp.is_named for mlp in mlps)
    has_square = any(shape[-1] == shape[-2] for shape in shapes)
    is_fused = any("gate_up" in mlp.matrices for mlp in mlps)
    choices = [(False, True)[: 1 + is_open] for is_open in (is_guess, has_square, is_fused)]
    return [Reading(*choice) for choice in itertools.product(tables, *choices)]


class Neurons:
    """The neurons of a stack's layers by one Reading, as some tokens see them."""

    def __init__(self, stack, reading, root):
        self.stack = stack
        self.reading = reading
        self.root = root  # R, (d, d), or some directions of it, (k, d)
        self.views = functools.cache(self.views_of)

    def views_of(self, layer):
        """The views of a layer's neurons by name, (k, m) float32 each: columns of norm 1, or 0 for dead ones.

        What is zero for all of them is no view.
        """
        mlps = self.stack.mlps[layer - 1]
        mlps = [mlps[place] for place in evenly_spaced(len(mlps), MOST_EXPERTS)]
        is_ungated = any(mlp.matrices.keys() == UNGATED for mlp in mlps)
        names = ("up", "down") if is_ungated else ("gate", "up", "down")
        rows = {view: torch.cat([self.rows(mlp, view) for mlp in mlps]) for view in names}
        largest = {view: weights.norm(torch.inf, dim=1) for view, weights in rows.items()}  # (m,) each
        largest = {view: lengths for view, lengths in largest.items() if lengths.any()}
        views = {}
        for view, lengths in largest.items():
            columns = self.root @ rows.pop(view).div_(lengths.clamp(min=1e-30)[:, None]).T
            columns *= torch.stack([*largest.values()]).all(dim=0)  # of those that live
            views[view] = decorrelated(columns / columns.norm(dim=0).clamp(min=1e-30))
        return views

    def rows(self, mlp, view):
        """An MLP's neurons by their weights of a view, (m, d) float32."""
        is_backward = self.reading.backward and not mlp.is_named
        role = {"up": "down", "down": "up"}[view] if is_backward else view
        name = mlp.matrices.get(role, mlp.matrices.get("gate_up"))
        weight = self.stack.source.read(name, () if mlp.expert is None else (mlp.expert,))
        if not is_along(self.stack, name, weight.shape, self.reading.turned, view == "down"):
            weight = weight.T
        if role in mlp.matrices:
            return weight.float()
        count = units_of(self.stack.source.shapes[mlp.matrices["down"]], self.stack.width)
        turns = (count, 2) if self.reading.in_turn else (2, count)
        rows = weight[: 2 * count].unflatten(0, turns)
        return rows.select(int(self.reading.in_turn), int(role == "up")).float()


def is_along(stack, name, shape, turned=False, writes=None):
    """Are the stored rows of a matrix along the stream? A writer's columns are.

    A square one is stored as (outputs, inputs), but those called kernels; or as is `turned`. Its name tells
    if it `writes`, where None is given.
    """
    if shape[-1] != stack.width or shape[-2] != stack.width:
        return shape[-1] == stack.width
    writes = is_called(name, WRITERS) if writes is None else writes
    return writes == (name.endswith("kernel") != turned)


def evenly_spaced(count, limit=None):
    """Up to `limit` numbers of 0..count - 1, evenly spaced; None: all."""
    numbers = np.linspace(0, count - 1, min(count, limit or count)).round()
    return np.unique(numbers.astype(int)).tolist()


def living(views):
    """How many of a layer's neurons are not dead."""
    return int(next(iter(views.values())).any(dim=0).sum()) if views else 0


def decorrelated(columns: Tensor) -> Tensor:
    """(X X' + ridge)^(-1/2) X of X (k, m), whose columns have norm 1, scaled to it again.

    What all neurons share no longer drowns what is theirs. The symmetric root commutes with rotations.
    """
    values, vectors = torch.linalg.eigh(columns @ columns.T)
    white = (vectors * (values.clamp(min=0) + RIDGE).rsqrt()) @ vectors.T @ columns
    return white / white.norm(dim=0).clamp(min=1e-30)


def token_rows(stack, table, ids) -> Tensor:
    """The rows (n, d) float32 of some tokens in a table, centred; the longest are scaled to LONGEST_ROW."""
    rows = stack.source.read(table, (ids,)).float()
    longest = LONGEST_ROW * rows.norm(dim=1).median().item()
    if longest > 0:
        rows.renorm_(2, 0, longest)
    return rows - rows.mean(dim=0)
