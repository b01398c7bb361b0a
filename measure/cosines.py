"""Is it more than chance? Cosines over all pairs of states, and the probability of a count (BB B.2)."""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import logsumexp
from scipy.stats import binom

from lib.random import keyed_generator
from lib.runtime import sum_over_ranks
from lib.settings import UserError


class CosineStatistics:
    """Mean and standard deviation of the cosine over all pairs of n states, in O(d^2) memory for any n.

    Let u be the states divided by their norms. Over ordered pairs of different states, the cosines sum to
    |sum u|^2 - n, and their squares to |sum u u^T|^2 - n, where the norm of the matrix is Frobenius's.
    """

    def __init__(self, d, device="cpu"):
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.sum = torch.zeros(d, dtype=torch.float64, device=device)
        self.outer = torch.zeros(d, d, dtype=torch.float64, device=device)

    def update(self, states) -> None:
        """Add states (n, d)."""
        unit = states.double() / states.double().norm(dim=1, keepdim=True)
        self.count += len(unit)
        self.sum += unit.sum(dim=0)
        self.outer.addmm_(unit.T, unit)

    def reduce(self) -> None:
        """Replace each sum by its sum over the ranks; `sum_over_ranks` adds in place."""
        for tensor in (self.count, self.sum, self.outer):
            sum_over_ranks(tensor)

    def direction(self):
        """Mean of the unit vectors, (d,) float64: the contraction direction (BB section 4)."""
        return self.sum / self.count

    def summary(self):
        """Mean and standard deviation over all n(n - 1)/2 pairs, as columns of a row.

        n is at least 2. Raises UserError if a state was zero or not finite.
        """
        if not self.sum.isfinite().all():
            raise UserError("the model's states are zero or not finite: check its weights for NaN")
        n = self.count.item()
        pairs = n * (n - 1)
        mean = (self.sum.square().sum().item() - n) / pairs
        mean_square = (self.outer.square().sum().item() - n) / pairs
        return {"mean_cosine": mean, "std_cosine": max(0.0, mean_square - mean**2) ** 0.5}


def pairwise_cosine(states):
    """Mean and standard deviation of the cosine over all pairs of states (n, d), as columns of a row."""
    statistics = CosineStatistics(states.shape[1], states.device)
    statistics.update(states)
    return statistics.summary()


def floored_cosine(states, epsilon):
    """`pairwise_cosine` as torch's `cosine_similarity` has it: norms below `epsilon` count as epsilon."""
    unit = F.normalize(states.double(), dim=1, eps=epsilon)
    cosines = (unit @ unit.T)[*torch.tril_indices(len(unit), len(unit), -1)]
    return {"mean_cosine": cosines.mean().item(), "std_cosine": cosines.std(correction=0).item()}


def binomial_log10_p(count, n, num_choices):
    """log10 of a bound on the probability that any of V = num_choices tokens has at least `count` of n draws.

    Bonferroni's bound, min(1, V P[Binomial(n, 1/V) >= count]), is above it, since the events of two tokens
    can happen together. The probability itself may be too small for a float (BB B.2 prints 0.00).
    """
    log_tail = logsumexp(binom.logpmf(np.arange(count, n + 1), n, 1 / num_choices))
    return min(0.0, (math.log(num_choices) + log_tail) / math.log(10))


@functools.cache
def uniform_counts(n, num_choices, places, repetitions=1000):
    """How often the most frequent of n uniform draws comes up, the second, ...: simulated means, (places,).

    The first one is the baseline of BB Figure 1a. Its standard error is below 1 % for 1,000 draws of 50,257.
    """
    generator = keyed_generator("uniform", n, num_choices)
    total = np.zeros(places)
    for _ in range(repetitions):
        _, counts = np.unique(generator.integers(num_choices, size=n), return_counts=True)
        counts = np.sort(counts)[::-1][:places]
        total[: len(counts)] += counts
    return total / repetitions
