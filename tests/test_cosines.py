"""The cosines of probe.py against exact arithmetic, scipy, and loops over pairs."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import normal

import probe as cosines
from lib.settings import UserError
from probe import CosineStatistics
from reproduce.mechanisms import pairwise_cosine


def statistics_of(states: torch.Tensor, batch_size: int = 1000) -> CosineStatistics:
    statistics = CosineStatistics(states.shape[1])
    for batch in states.split(batch_size):
        statistics.update(batch)
    return statistics


@pytest.mark.parametrize("n, d, shift", [(2, 5, 0.0), (150, 16, 3.0), (30, 3, 100.0)])
def test_cosine_statistics_equal_a_loop_over_pairs(n, d, shift):
    states = normal(n, d, seed=n).float() + shift
    statistics = statistics_of(states, batch_size=11)
    pairs = []
    for a, b in itertools.combinations(states.double().numpy(), 2):
        pairs.append(np.dot(a, b) / math.sqrt(np.dot(a, a) * np.dot(b, b)))
    row = statistics.summary()
    assert row["mean_cosine"] == pytest.approx(np.mean(pairs), abs=1e-12)  # float64 sums of numbers up to 1
    assert row["std_cosine"] == pytest.approx(np.std(pairs), abs=1e-6)  # a difference's root: half the digits
    torch.testing.assert_close(statistics.direction(), F.normalize(states.double()).mean(0))
    # batches are sums in another order, of which the std keeps half the digits
    assert pairwise_cosine(states) == pytest.approx(row, abs=1e-6)


def test_lengths_play_no_part():
    states = torch.tensor([[1e-30, 0.0], [-1e30, 0.0]])
    # float64, and a standard deviation that is the root of a difference
    assert statistics_of(states).summary() == pytest.approx({"mean_cosine": -1, "std_cosine": 0}, abs=1e-7)
    for seed in range(9):  # of equal states that difference is rounding, of either sign
        assert statistics_of(normal(1, 7, seed=seed).expand(5, 7)).summary()["std_cosine"] < 1e-7


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_cosine_statistics_refuse_states_without_direction(bad):
    statistics = statistics_of(torch.tensor([[1.0, 2.0, 3.0], [bad, bad, bad]]))
    with pytest.raises(UserError, match="zero or not finite"):
        statistics.summary()


def exact_log10_p(count: int, n: int, V: int) -> float:
    """log10 of V P[Binomial(n, 1/V) >= count] in integers; math.log10 takes integers of any size."""
    tail = sum(math.comb(n, j) * (V - 1) ** (n - j) for j in range(count, n + 1))
    return min(0.0, math.log10(tail * V) - n * math.log10(V))


# Of the last two p is below 1e-308.
COUNTS = [(1, 10, 5), (2, 2, 32000), (33, 1000, 50257), (1000, 1000, 50257), (400, 2000, 97)]


@pytest.mark.parametrize("count, n, V", COUNTS)
def test_binomial_tail_against_exact_integers(count, n, V):
    # log-gammas of about n log n, good to 1e-16 relative, bound the error
    expected = pytest.approx(exact_log10_p(count, n, V), rel=1e-9, abs=1e-9)
    assert cosines.binomial_log10_p(count, n, V) == expected


@pytest.mark.parametrize("n, V", [(2, 5), (5, 7)])
def test_uniform_baseline_by_all_outcomes(n, V):
    outcomes = itertools.product(range(V), repeat=n)
    counts = [np.sort(np.bincount(outcome, minlength=max(n, V)))[::-1][:n] for outcome in outcomes]
    # A count's standard deviation is below 1.2 here: five standard errors of 4,000 draws.
    expected = pytest.approx(np.mean(counts, axis=0), abs=5 * 1.2 / math.sqrt(4000))
    assert cosines.uniform_counts(n, V, n, repetitions=4000) == expected
