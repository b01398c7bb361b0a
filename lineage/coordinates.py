"""Do the coordinates of two models agree, and could it be chance? An exact test (ours).

    >>> from lib import checkpoint
    >>> from lineage import coordinates
    >>> a = checkpoint.parse_spec("nano_llama@42").open()
    >>> b = checkpoint.parse_spec("nano_llama@43").open()
    >>> correlations, layers = coordinates.weight_correlations(a, b)  # "body" and "embedding": (d, d) each
    >>> coordinates.diagonal_test(correlations["body"], ("body", 0))["z"]  # near 0: unrelated

Birth draws every coordinate of the residual stream alike, and element-wise optimisers treat them alike:
without a common birth, a trained model is as likely as itself with its coordinates relabelled. So relabelling
one of two gives the exact distribution of whatever compares them, however trained and however dependent the
rows (ours; BB compares with Gaussian matrices). A rotated basis escapes this, but not `lineage/match.py`.
"""

import math
from collections import defaultdict

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from init import keyed_generator
from lib.runtime import progress
from lib.settings import UserError
from lineage.parts import find, is_varied, residual_rows

SAME_LOG10_P = -6.0  # from here on two models are of one birth
PERMUTATION_BATCH = 1000  # permutations drawn at once
ROW_BATCH = 2048  # rows of a weight matrix converted at once
MOST_ROWS = 2**14  # of a matrix, evenly spaced, that are compared,
WIDE, FEW_ROWS = 1536, 2**8  # and of one with longer rows


class Correlation:
    """Pearson's correlation of every column of A with every column of B, over matrices that stream by.

    Each counts with its columns centred and its mean square 1: its mean row and its scale are the data's.
    """

    def __init__(self, d):
        self.products = torch.zeros(d, d, dtype=torch.float64)
        self.squares = torch.zeros(2, d, dtype=torch.float64)
        self.sums, self.batch = torch.zeros(2, d, d)  # made once: new memory costs more than what it holds

    def update(self, A: Tensor, B: Tensor):
        """Add rows (n, d) of each; returns the correlation of all of A's numbers with B's."""
        means = [rows.mean(0, dtype=torch.float32) for rows in (A, B)]
        products = self.sums.zero_()
        squares = torch.zeros_like(self.squares)
        for a, b in zip(A.split(ROW_BATCH), B.split(ROW_BATCH)):
            a = a.float() - means[0]
            b = b.float() - means[1]
            products += torch.mm(a.T, b, out=self.batch)
            squares += torch.stack([a.square().sum(0), b.square().sum(0)])
        mean_squares = squares.mean(1, keepdim=True).div(len(A)).clamp(min=1e-60)  # (2, 1)
        scale = mean_squares.prod().rsqrt().item()
        for total, part in zip(self.products.split(ROW_BATCH // 16), products.split(ROW_BATCH // 16)):
            total.add_(part, alpha=scale)
        self.squares += squares / mean_squares
        return (products.trace() / squares.sum(1).prod().clamp(min=1e-60).sqrt()).item()

    def value(self) -> Tensor | None:
        """(d, d) float64, 0 where a column is constant; None without rows."""
        scale = torch.outer(*self.squares).sqrt()
        if not scale.any():
            return None
        return torch.where(scale > 0, self.products / scale, 0.0)


def weight_correlations(a, b):
    """Correlations of the residual coordinates over the rows of all weight matrices that two sources share.

    They are matched by name and shape. "body" has those of the blocks, "embedding" the tables and the head,
    up to the shorter vocabulary. A kind without matrices is missing; models of different width have none.
    Returns these, and for each layer of b with a namesake in a, by its number and that one's, how far the
    numbers of their matrices correlate: the least of all.
    """
    a, b = find(a), find(b)
    if a.width != b.width:
        return {}, {}
    sums = {"body": Correlation(a.width), "embedding": Correlation(a.width)}
    most = MOST_ROWS if a.width <= WIDE else FEW_ROWS
    correlations = defaultdict(list)  # of each layer's matrices
    for place in progress(a.matrices | b.matrices, desc="coordinates", leave=False):
        names = (a.matrices.get(place), b.matrices.get(place))
        layer, _ = place
        kind = "embedding" if layer is None else "body"
        correlation = 0.0  # of a matrix that the other model has not
        if all(names) and (layer is None or a.shapes[names[0]] == b.shapes[names[1]]):
            rows = [residual_rows(part, name, part.read(name)) for part, name in zip((a, b), names)]
            count = min(map(len, rows))
            rows_a, rows_b = (without_identity(each[:count], 1 + count // most) for each in rows)
            if not is_varied(rows_b) and torch.equal(rows_a.float(), rows_b.float()):
                continue  # a mask, or another constant, which unrelated models share
            correlation = sums[kind].update(rows_a, rows_b)
        correlations[layer].append(correlation)
    values = {kind: total.value() for kind, total in sums.items()}
    values = {kind: value for kind, value in values.items() if value is not None}
    shared = [layer for layer in correlations if layer in a.numbers and layer in b.numbers]
    return values, {(b.numbers[layer], a.numbers[layer]): min(correlations[layer]) for layer in shared}


def without_identity(rows, step=1):
    """Every `step`-th of rows (m, d), without the identity that strangers may have begun from, too."""
    size = min(rows.shape)
    mean = rows[:size, :size].diagonal().float().mean()
    if mean.abs() > rows[::step].float().std():
        rows = rows.float().clone()
        rows.diagonal().sub_(mean)
    return rows[::step]


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
    exceeding = 0
    for start in range(0, permutations, PERMUTATION_BATCH):
        batch = min(PERMUTATION_BATCH, permutations - start)
        orders = generator.permuted(np.tile(coordinates, (batch, 1)), axis=1)  # (batch, d)
        sampled = values[coordinates, orders].mean(axis=1)
        exceeding += int((sampled >= matched).sum())
    z = (matched - mean) / std
    log10_p = stats.norm.logsf(z) / math.log(10)
    return {
        "matched": matched,
        "z": z,
        "log10_p": log10_p,
        "p": (1 + exceeding) / (1 + permutations),
        "same": bool(log10_p <= SAME_LOG10_P and exceeding == 0),
    }
