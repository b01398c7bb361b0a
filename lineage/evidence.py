"""What else tells that two models are one? Equal bits, and coordinates that agree (ours).

A merge by layers keeps *bits*, but not names, nor the embedding matrix that neurons are seen through.

*Coordinates*: birth draws every coordinate of the residual stream alike, and element-wise optimisers treat
them alike. So without a common birth a trained model is as likely as itself with its coordinates relabelled:
this gives the distribution of whatever compares two (Hoeffding 1951; BB compares with Gaussian matrices). A
rotated basis escapes it, but not match.py. A few rows of each matrix are read.
"""

import functools
import hashlib
import math
from collections import Counter, defaultdict

import numpy as np
import torch
from scipy.special import log_ndtr
from torch import Tensor

from lib.runtime import progress
from lineage.judge import CHANCE_LOG10_P
from lineage.layout import BATCH, NO_WEIGHTS, is_varied
from lineage.views import MOST_EXPERTS, evenly_spaced, is_along

BLOCK = 32  # rows that are read of a matrix: so many of its first, and of its last


@functools.lru_cache(maxsize=16)
def digests_of(stack):
    """Of each layer the SHA-256 of the first numbers of its matrices, by name: those of varied ones."""
    layers = []
    for names in progress(stack.layers, desc="bits", leave=False):
        layers.append({})
        for name in names.values():
            if len(stack.source.shapes[name]) > 1 and not NO_WEIGHTS.search(name):
                begun = first_numbers(stack.source, name)
                if is_varied(begun):
                    layers[-1][name] = hashlib.sha256(begun.numpy()).hexdigest()  # in whatever format
    return layers


def first_numbers(source, name):
    """The first BATCH numbers of a tensor, or of each of some experts that it stacks, float32."""
    shape = source.shapes[name]
    first = slice(0, -(-BATCH // shape[-1]))
    parts = [(first,)]
    if len(shape) > 2:
        parts = [(i, *[0] * (len(shape) - 3), first) for i in evenly_spaced(shape[0], MOST_EXPERTS)]
    return torch.cat([source.read(name, part).flatten()[:BATCH] for part in parts]).float()


def why_bare(stack):
    """What a model has in place of layers that could tell a birth; "" if it has some."""
    if not stack.layers:
        first = ", ".join([*stack.source.shapes][:3]) or "nothing: is it an optimizer's state?"
        return f"{stack.model} has no layers, but {'an embedding matrix alone' if stack.tables else first}"
    begun = [sorted(digests.values()) for digests in digests_of(stack) if not stack.tables]
    if len(begun) > 1 and begun[0] and begun.count(begun[0]) == len(begun):
        return f"all layers of {stack.model} have the same numbers, as a formula gives"
    return ""


def equal_layers(base, suspect):
    """{suspect's layer: base's layer of the same bits}, from 1; and whether any matrix is equal.

    All matrices of the two layers, or all of their MLPs, begin with the same numbers. What stands in several
    layers of the base, as a formula gives it, tells nothing.
    """
    counts = Counter(digest for layer in digests_of(base) for digest in {*layer.values()})
    places = {}
    for number, layer in enumerate(digests_of(base), start=1):
        places |= {digest: number for digest in layer.values() if counts[digest] == 1}
    equal, are_any = {}, False
    for number, layer in enumerate(digests_of(suspect), start=1):
        mlps = {name for mlp in suspect.mlps[number - 1] for name in mlp.matrices.values()}
        for names in (mlps, layer.keys()):
            found = {places.get(layer.get(name)) for name in names}
            are_any |= any(found)
            if any(found) and len(found) == 1:
                equal[number] = found.pop()
    return equal, are_any


def is_copy(stack, other):
    """Does every matrix of a stack's layers begin bit for bit as one of another stack's?"""
    own, others = ({d for layer in digests_of(each) for d in layer.values()} for each in (stack, other))
    return bool(own) and own <= others


def look(a, b):
    """Tests of the coordinates of the "body" and of the "embedding"; and the layers that agree by themselves.

    Of each of these, by its number: the least correlation of its matrices with their namesakes, number by
    number, and one less their mean, the distance. A matrix whose stored rows are not along the stream has few
    coordinates in few rows: it joins number by number alone. What is constant in one of the two says nothing.
    """
    if a.width != b.width:
        return {}, {}
    correlations, agreements = defaultdict(list), defaultdict(list)
    for layer, rest in progress(dict.fromkeys([*a.matrices, *b.matrices]), desc="coordinates", leave=False):
        names = [stack.matrices.get((layer, rest)) for stack in (a, b)]
        shapes = [stack.source.shapes.get(name) for stack, name in zip((a, b), names)]
        if not all(names) or (layer is not None and shapes[0] != shapes[1]):
            correlations[layer].append(0.0)
            continue
        rows = [rows_looked_at(stack, name, min(shapes)) for stack, name in zip((a, b), names)]
        if not all(map(is_varied, rows)):
            continue
        if is_along(b, names[1], shapes[1]):
            agreements[layer].append(agreement(*rows))
        else:
            rows = [each.T for each in rows]
        rows = [(each - each.mean(0)).flatten() for each in rows]
        correlations[layer].append(torch.cosine_similarity(*rows, dim=0).item())
    tests = {"embedding": joint_test(agreements.pop(None))} if None in agreements else {}
    agreements = {0: sum(agreements.values(), [])} | agreements  # all layers together, and each
    bodies = {layer: joint_test(found, len(agreements)) for layer, found in agreements.items() if found}
    if bodies:
        tests["body"] = min(bodies.values(), key=lambda test: test["log10_p"])
    told = {layer: correlations[layer] for layer, test in bodies.items() if layer and test["same"]}
    distances = {layer: round(1 - float(np.clip(np.mean(found), 0, 1)), 6) for layer, found in told.items()}
    return tests, {layer: (min(found), distances[layer]) for layer, found in told.items()}


def parts_looked_at(shape):
    """The parts of a tensor that are read: first and last rows, of the first and last expert."""
    if len(shape) < 2:
        return [()]
    *experts, count, _ = shape
    size = min(BLOCK, -(-count // 2))
    last = [number - 1 for number in experts]
    return [(*[0] * len(experts), slice(0, size)), (*last, slice(count - size, count))]


def rows_looked_at(stack, name, shape):
    """Some rows of a matrix of at least this shape, as they are stored, (n, columns) of float32.

    Without the mean of its diagonal: a birth may be near a multiple of the identity.
    """
    parts = parts_looked_at(shape)
    rows = torch.cat([stack.source.read(name, part)[:, : shape[-1]] for part in parts]).float()
    numbers = torch.cat([torch.arange(part[-1].start, part[-1].stop) for part in parts])
    diagonal = (torch.arange(len(rows)), numbers % shape[-1])
    return rows.index_put_(diagonal, -rows[diagonal].mean(), accumulate=True)


def agreement(A: Tensor, B: Tensor):
    """The mean correlation of A's columns with those of B, (n, d) each; that of relabelled ones, its std.

    S = mean_j C[j, pi(j)] over uniform permutations pi has mean(C) and variance sum(C'^2) / (d^2 (d - 1)), C'
    doubly centred, by products of n rows with n.
    """
    d = A.shape[1]
    A, B = (weight - weight.mean(0) for weight in (A, B))
    A, B = (weight / weight.norm(dim=0).clamp(min=1e-30) for weight in (A, B))
    matched = torch.dot(A.flatten(), B.flatten()).item() / d
    A, B = (weight - weight.mean(1, keepdim=True) for weight in (A, B))
    excess = torch.dot(A.flatten(), B.flatten()).item() / d
    variance = ((A @ A.T) * (B @ B.T)).sum().item() / max(1, d - 1)
    return matched, matched - excess, max(0.0, variance) ** 0.5 / d


def joint_test(agreements, searches=1):
    """What several agreements say together: `z`, its tail, corrected for searches, and if it is `same`.

    Their coordinates are relabelled together, so that the std of the sum is at most the sum of theirs. A z of
    250 is an effect, no probability.
    """
    matched, means, stds = np.transpose(agreements)
    z = float((matched - means).sum() / max(1e-30, stds.sum()))
    log10_p = min(0.0, log_ndtr(-z) / math.log(10) + math.log10(searches))
    test = {"matched": float(matched.mean()), "z": z, "log10_p": log10_p, "p": 10**log10_p}
    return test | {"same": bool(log10_p <= CHANCE_LOG10_P)}
