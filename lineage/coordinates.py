"""Do the coordinates of two models' weights agree, as chance does not? (ours)

Birth draws every coordinate of the residual stream alike, and element-wise optimisers treat them alike. So
without a common birth a trained model is as likely as itself with its coordinates relabelled: this gives the
distribution of whatever compares two (Hoeffding 1951; BB compares with Gaussian matrices). A rotated basis
escapes it, but not lineage/align.py. A few rows of each matrix are read.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr
from torch import Tensor

from lib.runtime import progress
from lineage.names import end_of
from lineage.partners import ALIKE_R
from lineage.samples import is_varied, read_sample, sample_of, samples_of

CHANCE_LOG10_P = -6.0  # up to here nothing is chance's: no pair of 990 newborns passes (results/errors.json)
MOST = 0.5  # of a layer's numbers, which must be compared before it is said to be the base's


class Agreement(NamedTuple):
    """How well the columns of two matrices agree."""

    r: float  # the mean correlation of a column with its partner
    mean: float  # of the same with columns relabelled at random
    std: float


@dataclass(frozen=True)
class JointTest:
    """What several Agreements say together."""

    r: float  # their mean
    z: float  # a z of 250 is an effect, no probability
    log10_p: float

    @property
    def p(self):
        return 10**self.log10_p

    @property
    def agrees(self):
        return self.log10_p <= CHANCE_LOG10_P


class AlikeLayer(NamedTuple):
    """A layer of the suspect whose coordinates agree with one of the base's."""

    base_layer: int
    least_r: float  # of its matrices with their partners
    distance: float  # 1 less their mean
    is_whole: bool  # was most of it compared?

    @property
    def is_base(self):
        return self.is_whole and self.least_r >= ALIKE_R


@dataclass(frozen=True)
class Coordinates:
    """What the coordinates of two stacks say."""

    body: JointTest | None = None  # of all layers together, of a layer, or of a role: the one that says most
    embedding: JointTest | None = None
    layers: dict | None = None  # AlikeLayers by the suspect's number, from 1


def compare_coordinates(base, suspect, partners) -> Coordinates:
    """What the coordinates of two Stacks say, whose layers correspond so."""
    if base.width != suspect.width:
        return Coordinates()
    embedding = embeddings_test(base, suspect)
    agreements = []  # (layer, role, Agreement)
    correlations, compared = defaultdict(list), defaultdict(int)
    # Each layer with its partner: all matrices, of which those along the stream have its coordinates
    for number, partner in enumerate(progress(partners, desc="coordinates", leave=False), start=1):
        if partner.layer is None:
            continue
        ours, theirs = base.layers[partner.layer - 1], suspect.layers[number - 1]
        our_samples = samples_of(ours, base.source.shapes, base.width, [pair[0] for pair in partner.experts])
        experts = [pair[1] for pair in partner.experts]
        for key, sample in samples_of(theirs, suspect.source.shapes, suspect.width, experts).items():
            other = our_samples.get(key)
            if other is None or other.shape != sample.shape:
                continue
            rows = [read_sample(base.source, other), read_sample(suspect.source, sample)]
            if not all(map(is_varied, rows)):
                continue
            found = agreement(*rows)
            correlations[number].append(found.r)
            compared[number] += sample.size
            if sample.shape[-1] == suspect.width:  # its rows are along the stream
                agreements.append((number, key[0], found))
    # All together, each layer by itself, each role by itself
    groups = defaultdict(list)
    for number, role, found in agreements:
        for key in ("all", number, role):
            groups[key].append(found)
    is_moved = any(partner.is_found and partner.layer != n for n, partner in enumerate(partners, start=1))
    searches = len(groups) * (len(base.layers) if is_moved else 1)
    tests = {key: joint_test(group, searches) for key, group in groups.items()}
    body = min(tests.values(), key=lambda test: test.log10_p, default=None)
    layers = {}
    for number, found in correlations.items():
        if number in tests and tests[number].agrees:
            distance = round(1 - float(np.clip(np.mean(found), 0, 1)), 6)
            partner = partners[number - 1].layer
            least = min(base.layers[partner - 1].size, suspect.layers[number - 1].size)
            is_whole = compared[number] >= MOST * least
            layers[number] = AlikeLayer(partner, min(found), distance, is_whole)
    return Coordinates(body, embedding, layers)


def embeddings_test(base, suspect):
    """The JointTest of two stacks' embedding matrices and heads; None if none are varied."""
    found = []
    for ours, theirs in embedding_pairs(base, suspect):
        shape = min(base.source.shapes[ours], suspect.source.shapes[theirs])
        rows = []
        for stack, name in ((base, ours), (suspect, theirs)):
            rows.append(read_sample(stack.source, sample_of(name, shape)))
        if all(map(is_varied, rows)):
            found.append(agreement(*rows))
    return joint_test(found) if found else None


def embedding_pairs(base, suspect):
    """Names of embedding matrices and heads that correspond: those called alike, or else the first ones."""
    ours, theirs = [*base.embeddings, *base.lm_heads], [*suspect.embeddings, *suspect.lm_heads]
    alike = [(name, other) for name in ours for other in theirs if end_of(name) == end_of(other)]
    return dict.fromkeys(alike or zip(ours[:1], theirs[:1]))


def agreement(A: Tensor, B: Tensor) -> Agreement:
    """How A's columns correlate with those of B, (n, d) each, and with relabelled ones.

    S = mean_j C[j, pi(j)] over uniform permutations pi has mean(C) and variance sum(C'^2) / (d^2 (d - 1)), C'
    doubly centred, by products of n rows with n. Scales of columns count for nothing.
    """
    d = A.shape[1]
    A = A - A.mean(0)
    B = B - B.mean(0)
    A = A / A.norm(dim=0).clamp(min=1e-30)
    B = B / B.norm(dim=0).clamp(min=1e-30)
    r = (A * B).sum().item() / d
    A = A - A.mean(1, keepdim=True)
    B = B - B.mean(1, keepdim=True)
    excess = (A * B).sum().item() / d
    variance = ((A @ A.T) * (B @ B.T)).sum().item() / max(1, d - 1)
    return Agreement(r, r - excess, max(0.0, variance) ** 0.5 / d)


def joint_test(agreements, searches=1) -> JointTest:
    """What several Agreements say together, corrected for searches.

    Their coordinates are relabelled together, so that the std of the sum is at most the sum of theirs.
    """
    r, means, stds = np.transpose(agreements)
    z = float((r - means).sum() / max(1e-30, stds.sum()))
    log10_p = min(0.0, log_ndtr(-z) / math.log(10) + math.log10(searches))
    return JointTest(float(r.mean()), z, float(log10_p))
