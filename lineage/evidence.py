"""What else tells that two models are one? Equal bits, and coordinates that agree (ours).

A merge by layers keeps *bits*, but not names, nor the embedding matrix that units are seen through.

*Coordinates*: birth draws every coordinate of the residual stream alike, and element-wise optimisers treat
them alike. So without a common birth a trained model is as likely as itself with its coordinates relabelled:
this gives the exact distribution of whatever compares two (BB compares with Gaussian matrices). A rotated
basis escapes it, but not match.py.
"""

import functools
import hashlib
import math
from collections import defaultdict

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from lib.random import keyed_generator
from lib.runtime import progress
from lib.settings import UserError
from lineage.layout import BATCH, NO_WEIGHTS, is_varied
from lineage.table import CHANCE_LOG10_P
from lineage.views import WIDE, residual_rows

MOST_ROWS, FEW_ROWS = 2**14, 2**8  # of a matrix, evenly spaced, that are compared; the second of wide ones


@functools.lru_cache(maxsize=4)  # of two models the beginnings, and all
def digests_of(stack, count=None):
    """By a layer's number, from 1, if its MLPs count, the SHA-256 of each matrix that counts.

    If there is a `count`, of the first numbers of the layer's smallest matrices that count, and of no others.
    """
    of_mlps = {name for mlp in stack.mlps for name in mlp.matrices.values()}
    layers = {}
    for number, names in enumerate(progress(stack.layers.values(), desc="bits", leave=False), start=1):
        digests = {}
        largest = 0  # of the matrices that were read
        for size, name in sorted((math.prod(stack.source.shapes[name]), name) for name in names.values()):
            if count and digests and size > largest:
                break
            weight = stack.source.read(name)
            if weight.ndim > 1 and is_varied(weight) and not NO_WEIGHTS.search(name):
                numbers = weight.flatten()[:count].float().numpy()  # in whatever format they are kept
                digests[name] = hashlib.sha256(numbers).hexdigest()
                largest = size
        if digests and (count or of_mlps.intersection(names.values()) <= digests.keys()):
            layers[number] = sorted(digests.values())
    return layers


def why_bare(stack):
    """What a model has in place of layers that could tell a birth; "" if it has some."""
    name = stack.model
    if not stack.layers:
        first = ", ".join([*stack.source.shapes][:3]) or "nothing: is it an optimizer's state?"
        return f"{name} has no layers, but {'an embedding matrix alone' if stack.tables else first}"
    begun = [*digests_of(stack, BATCH).values()] if not stack.tables else []
    if len(begun) > 1 and begun.count(begun[0]) == len(begun):
        return f"all layers of {name} have the same numbers, as a formula gives"
    return ""


def equal_layers(base, suspect, count=BATCH):
    """The number of the base's layer for each of the suspect's that has its matrices, and no others.

    All is read only of two in which some layers begin alike.
    """
    equal = {}
    base_layers = digests_of(base, count)
    for number, digests in digests_of(suspect, count).items():
        same = [base_number for base_number in base_layers if base_layers[base_number] == digests]
        if same:
            equal[number] = min(same, key=lambda base_number: abs(base_number - number))
    return equal_layers(base, suspect, None) if equal and count else equal


class Correlation:
    """Pearson's correlation of every column of A with every column of B, over matrices that stream by.

    Each counts with its columns centred and its mean square 1: its mean row and its scale are the data's.
    """

    def __init__(self, d):
        self.products = torch.zeros(d, d, dtype=torch.float64)
        self.squares = torch.zeros(2, d, dtype=torch.float64)

    def update(self, A: Tensor, B: Tensor):
        """Add rows (n, d) of each; returns the correlation of all of A's numbers with B's."""
        A = A.float() - A.mean(0, dtype=torch.float32)
        B = B.float() - B.mean(0, dtype=torch.float32)
        products = A.T @ B
        squares = torch.stack([A.square().sum(0), B.square().sum(0)]).double()
        mean_squares = squares.mean(1, keepdim=True).div(len(A)).clamp(min=1e-60)  # (2, 1)
        self.products.add_(products, alpha=mean_squares.prod().rsqrt().item())
        self.squares += squares / mean_squares
        return (products.trace() / squares.sum(1).prod().clamp(min=1e-60).sqrt()).item()

    def value(self) -> Tensor | None:
        """(d, d) float64, 0 where a column is constant; None without rows."""
        scale = torch.outer(*self.squares).sqrt()
        if not scale.any():
            return None
        return torch.where(scale > 0, self.products / scale, 0.0)


def weight_correlations(a, b):
    """Correlations of the residual coordinates over the rows of all weight matrices that two stacks share.

    They are matched by name and shape: "body" has those of the layers, "embedding" the tables and the head,
    up to the shorter vocabulary; a kind without matrices is missing. And for each layer of b, from 1, with a
    namesake in a: that one's number, and the least correlation of their matrices, number by number.
    """
    if a.width != b.width:
        return {}, {}
    sums = {"body": Correlation(a.width), "embedding": Correlation(a.width)}
    most = MOST_ROWS if a.width <= WIDE else FEW_ROWS
    correlations = defaultdict(list)  # of each layer's matrices
    for place in progress(a.matrices | b.matrices, desc="coordinates", leave=False):
        names = (a.matrices.get(place), b.matrices.get(place))
        layer, _ = place
        shapes = [stack.source.shapes.get(name) for stack, name in zip((a, b), names)]
        correlation = 0.0  # of a matrix that the other model has not
        if all(names) and (layer is None or shapes[0] == shapes[1]):
            rows = [residual_rows(stack, name, stack.source.read(name)) for stack, name in zip((a, b), names)]
            count = min(map(len, rows))
            rows_a, rows_b = (each[: count : 1 + count // most] for each in rows)
            if not is_varied(rows_b) and torch.equal(rows_a.float(), rows_b.float()):
                continue  # a mask, or another constant, which unrelated models share
            kind = "embedding" if layer is None else "body"
            correlation = sums[kind].update(rows_a, rows_b)
        correlations[layer].append(correlation)
    values = {kind: total.value() for kind, total in sums.items()}
    values = {kind: value for kind, value in values.items() if value is not None}
    base_numbers = {layer: number for number, layer in enumerate(a.layers, start=1)}
    namesakes = {}
    for number, layer in enumerate(b.layers, start=1):
        if layer in base_numbers and layer in correlations:
            namesakes[number] = (base_numbers[layer], min(correlations[layer]))
    return values, namesakes


def diagonal_test(C: Tensor, key, permutations=9999):
    """Is the mean of C's diagonal, (d, d), above that of C with its columns relabelled?

    S = mean_j C[j, pi(j)] over uniform permutations pi has mean(C) and variance sum(C'^2) / (d^2 (d - 1)), C'
    doubly centred (Hoeffding 1951). Returns `matched`, the mean of the diagonal; `z` and its tail `log10_p`,
    an approximation: a z of 250 is an effect, no probability; the exact `p`, (1 + #{S(pi) >= S}) /
    (1 + permutations), which `key` draws; and whether the two say `same` birth.
    """
    d = len(C)
    mean = C.mean().item()
    centred = C - C.mean(0) - C.mean(1, keepdim=True) + mean
    std = (centred.square().sum().item() / (d * d * max(1, d - 1))) ** 0.5
    if not std > 0:
        raise UserError("nothing varies in one of the models, or its weights are huge")
    values = C.numpy()
    coordinates = np.arange(d)
    matched = values[coordinates, coordinates].mean()
    generator = keyed_generator("relabel", *key)
    orders = (generator.permutation(d) for _ in range(permutations))
    exceeding = sum(values[coordinates, order].mean() >= matched for order in orders)
    z = (matched - mean) / std
    log10_p = stats.norm.logsf(z) / math.log(10)
    return {
        "matched": matched,
        "z": z,
        "log10_p": log10_p,
        "p": (1 + exceeding) / (1 + permutations),
        "same": bool(log10_p <= CHANCE_LOG10_P and exceeding == 0),
    }
