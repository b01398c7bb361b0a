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
from collections import Counter, defaultdict

import numpy as np
import torch
from scipy.special import log_ndtr
from torch import Tensor

from lib.random import keyed_generator
from lib.runtime import progress
from lib.settings import UserError
from lineage.layout import BATCH, NO_WEIGHTS, is_varied
from lineage.table import CHANCE_LOG10_P
from lineage.views import MOST_EXPERTS, WIDE, evenly_spaced, is_along, residual_rows

MOST_ROWS, FEW_ROWS = 2**14, 2**8  # of a matrix, evenly spaced, that are compared; the second of wide ones
LOOKED_AT, BLOCK = 64, 32  # rows of a matrix that a look reads, in blocks of so many that lie side by side


@functools.lru_cache(maxsize=4)  # of two models the beginnings, and all
def digests_of(stack, count=None):
    """By a layer's number, from 1, the SHA-256 of each matrix that counts, by its name and its expert.

    If there is a `count`, of the first numbers of each, of few experts, and no more rows are read.
    """
    experts = defaultdict(list)  # by the name of a matrix, or of their stack
    for mlp in stack.mlps:
        for name in mlp.matrices.values():
            experts[name].append(mlp.expert)
    parts = {}  # by a layer's number, and a matrix's name and expert
    for number, names in enumerate(stack.layers.values(), start=1):
        for name in names.values():
            shape = stack.source.shapes[name]
            if len(shape) < 2 or NO_WEIGHTS.search(name):
                continue
            there = experts.get(name, [None])
            for place in evenly_spaced(len(there), MOST_EXPERTS if count else None):
                part = () if there[place] is None else (there[place],)
                if count:
                    part += (0,) * (len(shape) - 2 - len(part)) + (slice(0, -(-count // shape[-1])),)
                parts[number, name, there[place]] = part
    stack.source.expect((name, part) for (_, name, _), part in parts.items())
    layers = {number: {} for number in range(1, len(stack.layers) + 1)}
    for (number, name, expert), part in progress(parts.items(), desc="bits", leave=False):
        weight = stack.source.read(name, part)
        if is_varied(weight):
            numbers = weight.flatten()[:count].float().numpy()  # in whatever format they are kept
            layers[number][name, expert] = hashlib.sha256(numbers).hexdigest()
    return layers


def parts_of(stack, count):
    """Layers by number, and MLPs by label: of each its layer's number, and the digests of its matrices."""
    parts = {}
    for number, digests in digests_of(stack, count).items():
        mlps = [mlp for mlp in stack.mlps if mlp.layer == number]
        wanted = {name for mlp in mlps for name in mlp.matrices.values()}
        if digests and wanted.issubset(name for name, _ in digests):
            parts[number] = number, tuple(sorted(digests.values()))
        for mlp in mlps:
            matrices = {(name, mlp.expert) for name in mlp.matrices.values()}
            if matrices <= digests.keys():
                parts[mlp.label] = number, tuple(sorted(digests[matrix] for matrix in matrices))
    return parts


def why_bare(stack):
    """What a model has in place of layers that could tell a birth; "" if it has some."""
    name = stack.model
    if not stack.layers:
        first = ", ".join([*stack.source.shapes][:3]) or "nothing: is it an optimizer's state?"
        return f"{name} has no layers, but {'an embedding matrix alone' if stack.tables else first}"
    begun = [sorted(digests.values()) for digests in digests_of(stack, BATCH).values() if not stack.tables]
    if len(begun) > 1 and begun[0] and begun.count(begun[0]) == len(begun):
        return f"all layers of {name} have the same numbers, as a formula gives"
    return ""


def equal_parts(base, suspect, is_thorough=True):
    """By a layer's number or an MLP's label, the base's layer that it has the matrices of; and are any equal?

    They begin alike. If this `is_thorough`, all of two models is read in which some do. Of matrices that
    stand in several layers of the base, as a formula gives them, whole layers alone are told.
    """
    count = BATCH
    while True:
        places = defaultdict(list)
        for number, digests in parts_of(base, count).values():
            places[digests].append(number)
        layers = Counter()
        for digests in digests_of(base, count).values():
            layers.update({*digests.values()})
        own = {digest for digest in layers if layers[digest] == 1}
        equal = {}
        for part, (number, digests) in parts_of(suspect, count).items():
            if places[digests] and (part == number or own.issuperset(digests)):
                equal[part] = min(places[digests], key=lambda place: abs(place - number))
        theirs = {digest for digests in digests_of(suspect, count).values() for digest in digests.values()}
        if not (count and is_thorough and theirs.intersection(layers)):
            return equal, not own.isdisjoint(theirs)
        count = None


def centred(rows: Tensor):
    """Rows (n, d) of float32 whose columns have mean 0."""
    return rows.float() - rows.mean(0, dtype=torch.float32)


def correlation_of(A: Tensor, B: Tensor):
    """The correlation of all numbers of two matrices with centred columns."""
    A, B = A.flatten(), B.flatten()
    return torch.dot(A, B).item() / max(1e-60, torch.dot(A, A).item() * torch.dot(B, B).item()) ** 0.5


class Correlation:
    """Pearson's correlation of every column of A with every column of B, over matrices that stream by.

    Each counts with its columns centred and its mean square 1: its mean row and its scale are the data's.
    """

    def __init__(self, d):
        self.products = torch.zeros(d, d, dtype=torch.float64)
        self.squares = torch.zeros(2, d, dtype=torch.float64)

    def update(self, A: Tensor, B: Tensor):
        """Add rows (n, d) of each; returns the correlation of all of A's numbers with B's."""
        A, B = centred(A), centred(B)
        products = A.T @ B
        squares = torch.stack([A.square().sum(0), B.square().sum(0)]).double()
        mean_squares = squares.mean(1, keepdim=True).div(len(A)).clamp(min=1e-60)  # (2, 1)
        self.products.add_(products, alpha=mean_squares.prod().rsqrt().item())
        self.squares += squares / mean_squares
        return correlation_of(A, B)

    def value(self) -> Tensor | None:
        """(d, d) float64, 0 where a column is constant; None without rows."""
        scale = torch.outer(*self.squares).sqrt()
        if not scale.any():
            return None
        return torch.where(scale > 0, self.products / scale, 0.0)


def rows_of_both(a, b, rows_of):
    """Yield the layer of each matrix that one of two stacks has, and its name and rows in both, or None.

    Matrices are matched by name and shape; tables and heads, which are no layer's, by name. A mask, or
    another constant which unrelated models share, is left out.
    """
    for place in progress(a.matrices | b.matrices, desc="coordinates", leave=False):
        names = [stack.matrices.get(place) for stack in (a, b)]
        shapes = [stack.source.shapes.get(name) for stack, name in zip((a, b), names)]
        layer, _ = place
        if not all(names) or (layer is not None and shapes[0] != shapes[1]):
            yield layer, None, None
            continue
        rows = [rows_of(stack, name, min(shapes)) for stack, name in zip((a, b), names)]
        if not torch.equal(rows[0].float(), rows[1].float()) or is_varied(rows[1]):
            yield layer, names[1], rows


def namesakes_of(a, b, correlations):
    """For each layer of b, from 1, with a namesake in a: that one's number, strength, and distance.

    `correlations` has those of its matrices, number by number, by the layer's name. The least is its
    strength, and one minus their mean its distance.
    """
    base_numbers = {layer: number for number, layer in enumerate(a.layers, start=1)}
    namesakes = {}
    for number, layer in enumerate(b.layers, start=1):
        if layer in base_numbers and correlations.get(layer):
            distance = round(1 - float(np.clip(np.mean(correlations[layer]), 0, 1)), 6)  # of float32's sums
            namesakes[number] = (base_numbers[layer], min(correlations[layer]), distance)
    return namesakes


def weight_correlations(a, b):
    """Correlations of the residual coordinates over the rows of all weight matrices that two stacks share.

    "body" has those of the layers, "embedding" the tables and the head, up to the shorter vocabulary; a kind
    without matrices is missing. And the layers' `namesakes_of`.
    """
    if a.width != b.width:
        return {}, {}
    sums = {"body": Correlation(a.width), "embedding": Correlation(a.width)}
    correlations = defaultdict(list)  # of each layer's matrices
    for layer, _, rows in rows_of_both(a, b, all_rows):
        kind = "embedding" if layer is None else "body"
        correlations[layer].append(sums[kind].update(*rows) if rows else 0.0)
    values = {kind: total.value() for kind, total in sums.items()}
    values = {kind: value for kind, value in values.items() if value is not None}
    return values, namesakes_of(a, b, correlations)


def look(a, b):
    """Tests of coordinates, of few rows of each matrix, and the namesakes whose agreement is not chance's.

    Each layer is tested by itself. A matrix whose stored rows are not along the stream has few coordinates in
    few rows: it joins number by number alone.
    """
    if a.width != b.width:
        return {}, {}
    correlations, agreements = defaultdict(list), defaultdict(list)
    for layer, name, rows in rows_of_both(a, b, rows_looked_at):
        if rows and is_along(b, name, b.source.shapes[name]):
            agreements[layer].append(agreement(*rows))
        elif rows:
            rows = [each.T for each in rows]
        correlations[layer].append(correlation_of(*map(centred, rows)) if rows else 0.0)
    tests = {}
    embedding = agreements.pop(None, [])
    layers = {layer: joint_test(found, len(agreements)) for layer, found in agreements.items()}
    if layers:
        best = min(layers.values(), key=lambda test: test["log10_p"])
        tests["body"] = joint_test(sum(agreements.values(), [])) | {
            key: best[key] for key in ("log10_p", "p", "same")
        }
    if embedding:
        tests["embedding"] = joint_test(embedding)
    told = {layer: correlations[layer] for layer in layers if layers[layer]["same"]}
    return tests, namesakes_of(a, b, told)


def all_rows(stack, name, shape):
    """The rows along the stream of a matrix of at least this shape, (n, d); if they are many, some."""
    count = math.prod(shape) // stack.width
    step = 1 + count // (MOST_ROWS if stack.width <= WIDE else FEW_ROWS)
    return residual_rows(stack, name, stack.source.read(name))[:count:step]


def parts_looked_at(shape):
    """The parts of a tensor of this shape that a look reads."""
    if len(shape) < 2:
        return [()]
    *experts, count, _ = shape
    total = math.prod(shape[:-1])
    size = min(BLOCK, count)
    parts = [(*[slice(0, number) for number in experts], slice(0, count))]
    if total > LOOKED_AT:
        parts = []
        for start in evenly_spaced(total - size + 1, LOOKED_AT // size):
            expert, first = divmod(start, count)
            first = min(first, count - size)
            parts.append((*[expert][: len(experts)], slice(first, first + size)))
    return parts


def rows_looked_at(stack, name, shape):
    """LOOKED_AT rows of a matrix of at least this shape, as they are stored, (n, columns); or of several."""
    columns = shape[-1]
    read = [stack.source.read(name, part)[..., :columns] for part in parts_looked_at(shape)]
    return torch.cat([rows.reshape(-1, columns) for rows in read])


def agreement(A: Tensor, B: Tensor):
    """The mean correlation of A's columns with those of B, (n, d) each; that of relabelled ones, its std.

    What relabelled columns give is that of `diagonal_test`, by products of n rows with n.
    """
    correlated, rows = [], []
    for weight in (A, B):
        weight = centred(weight)
        weight /= weight.norm(dim=0).clamp(min=1e-30)
        correlated.append(weight)
        rows.append(weight - weight.mean(1, keepdim=True))
    d = A.shape[1]
    matched = torch.dot(*[weight.flatten() for weight in correlated]).item() / d
    excess = torch.dot(*[weight.flatten() for weight in rows]).item() / d
    A, B = rows
    variance = ((A @ A.T) * (B @ B.T)).sum().item() / max(1, d - 1)
    return matched, matched - excess, max(0.0, variance) ** 0.5 / d


def joint_test(agreements, searches=1):
    """What `diagonal_test` says of several agreements together, with p corrected for so many searches.

    Their coordinates are relabelled together, so that the std of the sum is at most the sum of theirs.
    """
    matched, means, stds = np.transpose(agreements)
    z = float((matched - means).sum() / max(1e-30, stds.sum()))
    log10_p = log_ndtr(-z) / math.log(10) + math.log10(searches)
    test = {"matched": float(matched.mean()), "z": z, "log10_p": log10_p, "p": min(1.0, 10**log10_p)}
    return test | {"same": bool(log10_p <= CHANCE_LOG10_P)}


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
    log10_p = log_ndtr(-z) / math.log(10)
    return {
        "matched": matched,
        "z": z,
        "log10_p": log10_p,
        "p": (1 + exceeding) / (1 + permutations),
        "same": bool(log10_p <= CHANCE_LOG10_P and exceeding == 0),
    }
