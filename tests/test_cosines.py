"""measure/cosines.py against exact arithmetic, scipy, and loops over pairs."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from scipy.integrate import quad

from lib.settings import UserError
from measure import cosines
from measure.cosines import CosineStatistics


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Independent N(0, 1), float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def statistics_of(states: torch.Tensor, batch_size: int = 1000) -> CosineStatistics:
    """The statistics of states (n, d) that come in batches."""
    statistics = CosineStatistics(states.shape[1])
    for batch in states.split(batch_size):
        statistics.update(batch)
    return statistics


# ---- cosines of all pairs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n, d, shift", [(2, 5, 0.0), (40, 7, 0.0), (150, 16, 3.0), (30, 3, 100.0)])
def test_cosine_statistics_equal_a_loop_over_pairs(n, d, shift):
    states = normal(n, d, seed=n) + shift
    statistics = statistics_of(states, batch_size=11)
    pairs = []
    for a, b in itertools.combinations(states.double().numpy(), 2):
        pairs.append(np.dot(a, b) / math.sqrt(np.dot(a, a) * np.dot(b, b)))
    mean, std = statistics.mean_and_std()
    assert mean == pytest.approx(np.mean(pairs), abs=1e-12)  # float64 sums of numbers up to 1
    assert std == pytest.approx(np.std(pairs), abs=1e-6)  # the root of a difference: half the digits
    torch.testing.assert_close(statistics.direction(), F.normalize(states.double()).mean(0))
    assert cosines.pairwise_cosine(states) == pytest.approx({"mean_cosine": mean, "std_cosine": std})


@pytest.mark.parametrize(
    "states, expected",
    [
        (torch.arange(1.0, 51)[:, None].expand(50, 4), (1.0, 0.0)),  # one direction, many lengths
        (torch.tensor([[1e-30, 0.0], [-1e30, 0.0]]), (-1.0, 0.0)),  # no epsilon: the length plays no part
        (torch.eye(4), (0.0, 0.0)),
    ],
    ids=["same", "opposite", "orthogonal"],
)
def test_cosine_statistics_in_closed_cases(states, expected):
    # float64, and a standard deviation that is the root of a difference
    assert statistics_of(states).mean_and_std() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_cosine_statistics_refuse_states_without_direction(bad):
    statistics = statistics_of(torch.tensor([[1.0, 2.0, 3.0], [bad, bad, bad]]))
    with pytest.raises(UserError, match="zero or not finite"):
        statistics.mean_and_std()


def test_floored_cosine_is_that_of_torch():
    states = normal(12, 5) * 1e-8  # half of the norms are below the epsilon of 2e-8
    pairs = list(itertools.combinations(states.double(), 2))
    means = []
    for epsilon in (0.0, 2e-8):
        expected = [F.cosine_similarity(a, b, dim=0, eps=epsilon).item() for a, b in pairs]
        row = {"mean_cosine": np.mean(expected), "std_cosine": np.std(expected)}
        assert cosines.floored_cosine(states, epsilon) == pytest.approx(row, abs=1e-9)  # float64
        means.append(row["mean_cosine"])
    assert abs(means[0] - means[1]) > 1e-3  # the epsilon matters
    assert cosines.floored_cosine(states, 0.0) == pytest.approx(cosines.pairwise_cosine(states), abs=1e-9)


# ---- the odds of a count -----------------------------------------------------------------------------------


def exact_log10_p(count: int, n: int, V: int) -> float:
    """log10 of V P[Binomial(n, 1/V) >= count] in integers; math.log10 takes integers of any size."""
    tail = sum(math.comb(n, j) * (V - 1) ** (n - j) for j in range(count, n + 1))
    return min(0.0, math.log10(tail * V) - n * math.log10(V))


COUNTS = [(1, 1, 2), (1, 10, 5), (2, 2, 32000), (7, 50, 3), (3, 1000, 50257), (33, 1000, 50257)]
UNDERFLOWING = [(1000, 1000, 50257), (400, 2000, 97), (500, 500, 4096)]  # p is below 1e-308


@pytest.mark.parametrize("count, n, V", COUNTS + UNDERFLOWING)
def test_binomial_tail_against_exact_integers(count, n, V):
    # log-gammas of about n log n, good to 1e-16 relative, bound the error
    expected = pytest.approx(exact_log10_p(count, n, V), rel=1e-9, abs=1e-9)
    assert cosines.binomial_log10_p(count, n, V) == expected


def exact_expected_maximum(n: int, V: int) -> float:
    """E[max count] of n uniform draws over V: the sum over m of 1 - P[max <= m].

    P[max <= m] = n!/V^n [x^n] (sum_{k<=m} x^k/k!)^V, the power by squaring in exact fractions.
    """

    def product(a: list[Fraction], b: list[Fraction]) -> list[Fraction]:
        coefficients = [Fraction(0)] * (n + 1)
        for i, x in enumerate(a):
            for j, y in enumerate(b[: n + 1 - i]):
                coefficients[i + j] += x * y
        return coefficients

    expected = Fraction(0)
    for m in range(n):
        base = [Fraction(1, math.factorial(k)) for k in range(m + 1)]
        power = [Fraction(1)]
        for bit in f"{V:b}":
            power = product(power, power)
            if bit == "1":
                power = product(power, base)
        expected += 1 - power[n] * math.factorial(n) / Fraction(V) ** n
    return float(expected)


@pytest.mark.parametrize("n, V", [(1, 10), (2, 5), (12, 40), (16, 7), (16, 100)])
def test_uniform_baseline_against_exact_fractions(n, V):
    counts = cosines.uniform_counts(n, V, 5, repetitions=4000)
    # A count's standard deviation is below 1.2 here: five standard errors of 4,000 draws.
    assert counts[0] == pytest.approx(exact_expected_maximum(n, V), abs=5 * 1.2 / math.sqrt(4000))
    assert (np.diff(counts) <= 0).all()
    assert cosines.uniform_counts(n, V, n, repetitions=10).sum() == pytest.approx(n)  # every draw counts


# ---- the odds of a mean ------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [-12.0, -0.3, 0.0, 1e-9, 0.01, 1.3, 3.0])
@pytest.mark.parametrize("dof", [2, 5, 40, 499])
def test_student_tails_against_scipy(t, dof):
    # scipy's own tail is good to about 12 digits
    two_sided = math.log10(2 * scipy.stats.t.sf(abs(t), dof))
    assert cosines.student_log10_p(t, dof) == pytest.approx(two_sided, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("dof", [5, 98, 998, 65_535, 10**6])
@pytest.mark.parametrize("t", [0.3, 4.4, 20, 36, 60])
def test_student_tail_against_its_integral(t, dof):
    """The density at t times the integral of what it falls to, which does not underflow; cut at -300."""

    def fall(u: float) -> float:
        return (1 + (2 * t * u + u * u) / (dof + t * t)) ** (-(dof + 1) / 2)

    scale = (dof + t * t) / (dof + 1) / t
    pieces = itertools.pairwise([0, 1, 4, 16, 64, 256, 1024, math.inf])
    area = sum(quad(fall, a * scale, b * scale, epsabs=0, epsrel=1e-11)[0] for a, b in pieces)
    log10_p = (math.log(2 * area) + scipy.stats.t.logpdf(t, dof)) / math.log(10)
    # quad and scipy are both good to some 1e-10 of log p
    assert cosines.student_log10_p(t, dof) == pytest.approx(max(-300, log10_p), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("t", [240.0, 1e4, math.inf])
def test_student_tails_end_at_minus_300(t):
    assert cosines.student_log10_p(t, 499) == cosines.student_log10_p(-t, 499) == -300


@pytest.mark.parametrize("n, batch_size", [(40, 40), (41, 7), (64, 3)])
def test_t_test_of_disjoint_pairs_against_scipy(n, batch_size):
    """Pairs are (0, 1), (2, 3), ... of each batch, whose odd last state has no partner."""
    states = normal(n, 6, seed=n).double() + 0.4
    pairs = []
    for batch in states.split(batch_size):
        even = batch[: len(batch) // 2 * 2]
        pairs.append(F.cosine_similarity(even[::2], even[1::2]))
    p = scipy.stats.ttest_1samp(torch.cat(pairs), 0).pvalue
    assert statistics_of(states, batch_size).log10_p() == pytest.approx(math.log10(p), rel=1e-9)  # float64


def test_t_test_needs_two_pairs_and_survives_identical_ones():
    assert statistics_of(normal(5, 6), batch_size=1).log10_p() is None
    assert statistics_of(torch.ones(3, 2)).log10_p() is None
    assert -300 <= statistics_of(torch.ones(20, 2)).log10_p() < -100


# ---- intervals ---------------------------------------------------------------------------------------------


def test_interval_is_scipys():
    values = normal(5).double().numpy() + 3
    reference = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    expected = {"alpha": values.mean(), "low": reference.low, "high": reference.high}
    assert cosines.interval(values, "alpha") == pytest.approx(expected, rel=1e-9)


def test_wilson_interval_by_its_formula():
    low, high = cosines.wilson(8, 10)
    z = scipy.stats.norm.ppf(0.975)
    p = 0.8
    n = 10
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    expected = ((centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n))
    assert (low, high) == pytest.approx(expected)
