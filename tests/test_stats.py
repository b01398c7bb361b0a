"""stats.py against exact arithmetic, scipy, and loops over pairs."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from scipy.integrate import quad

import stats
from common import UserError
from stats import CosineStatistics


@pytest.mark.parametrize("n, d, shift", [(2, 5, 0.0), (40, 7, 0.0), (150, 16, 3.0), (30, 3, 100.0)])
def test_cosine_statistics_equal_a_loop_over_pairs(n, d, shift):
    states = torch.randn(n, d, generator=torch.Generator().manual_seed(n)) + shift
    statistics = CosineStatistics(d)
    for part in states.split(11):
        statistics.update(part)
    pairs = [
        math.sumprod(a, b) / math.sqrt(math.sumprod(a, a) * math.sumprod(b, b))
        if hasattr(math, "sumprod")
        else np.dot(a, b) / math.sqrt(np.dot(a, a) * np.dot(b, b))
        for a, b in itertools.combinations(states.double().tolist(), 2)
    ]
    mean, std = statistics.mean_and_std()
    assert mean == pytest.approx(np.mean(pairs), abs=1e-12)
    assert std == pytest.approx(np.std(pairs), abs=1e-6)  # the root of a difference: half the digits
    unit = states.double() / states.double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(statistics.direction(), unit.mean(0))


def test_cosine_statistics_in_closed_cases():
    same, opposite, orthogonal = CosineStatistics(4), CosineStatistics(4), CosineStatistics(4)
    same.update(torch.ones(50, 4) * torch.arange(1, 51)[:, None])
    assert same.mean_and_std() == pytest.approx((1.0, 0.0), abs=1e-7)
    opposite.update(
        torch.tensor([[1e-30, 0, 0, 0], [-1e30, 0, 0, 0]])
    )  # no epsilon: the scale does not matter
    assert opposite.mean_and_std()[0] == pytest.approx(-1.0)
    orthogonal.update(torch.eye(4))
    assert orthogonal.mean_and_std() == pytest.approx((0.0, 0.0), abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_cosine_statistics_refuse_states_without_direction(bad):
    statistics = CosineStatistics(3)
    statistics.update(torch.tensor([[1.0, 2.0, 3.0], [bad, bad, bad]]))
    with pytest.raises(UserError, match="zero or not finite"):
        statistics.mean_and_std()


def exact_log10_p(count: int, n: int, V: int) -> float:
    """log10 of V P[Binomial(n, 1/V) >= count] in integers; math.log10 takes integers of any size."""
    tail = sum(math.comb(n, j) * (V - 1) ** (n - j) for j in range(count, n + 1))
    return min(0.0, math.log10(tail * V) - n * math.log10(V))


@pytest.mark.parametrize(
    "count, n, V",
    [
        (1, 1, 2),
        (1, 10, 5),
        (3, 1000, 50257),
        (33, 1000, 50257),
        (1000, 1000, 50257),
        (400, 2000, 97),
        (7, 50, 3),
    ]
    + [(170, 2000, 151936), (2, 2, 32000), (500, 500, 4096)],
)  # several below 1e-308, where p itself is 0
def test_binomial_tail_against_exact_integers(count, n, V):
    # log-gammas of about n log n, good to 1e-16 relative, bound the error
    assert stats.binomial_log10_p(count, n, V) == pytest.approx(
        exact_log10_p(count, n, V), rel=1e-9, abs=1e-9
    )


def test_binomial_tail_of_the_papers_size():
    p = stats.binomial_log10_p(3000, 10_000, 50257)
    assert -12_000 < p < -10_000 and math.isfinite(stats.binomial_log10_p(10_000, 10_000, 50257))


def exact_expected_maximum(n: int, V: int) -> float:
    """E[max count] of n uniform draws over V: sum over m of 1 - P[max <= m].

    P[max <= m] = n!/V^n [x^n] (sum_{k<=m} x^k/k!)^V, the power by squaring in exact fractions.
    """

    def multiply(a, b):
        product = [Fraction(0)] * (n + 1)
        for i, x in enumerate(a):
            for j, y in enumerate(b[: n + 1 - i]):
                product[i + j] += x * y
        return product

    expected = Fraction(0)
    for m in range(n):
        base = [Fraction(1, math.factorial(k)) for k in range(m + 1)]
        power, exponent = [Fraction(1)], V
        while exponent:
            power = multiply(power, base) if exponent & 1 else power
            base, exponent = multiply(base, base), exponent >> 1
        power += [Fraction(0)] * (n + 1 - len(power))
        expected += 1 - power[n] * math.factorial(n) / Fraction(V) ** n
    return float(expected)


@pytest.mark.parametrize("n, V", [(1, 10), (2, 5), (12, 40), (25, 7), (30, 300)])
def test_uniform_baseline_against_exact_fractions(n, V):
    counts = stats.uniform_counts(n, V, 5, repetitions=4000)
    # A count's standard deviation is below 1.2 here: five standard errors of 4,000 draws.
    assert counts[0] == pytest.approx(exact_expected_maximum(n, V), abs=5 * 1.2 / math.sqrt(4000))
    assert (np.diff(counts) <= 0).all() and counts.sum() <= n + 1e-9
    assert stats.uniform_counts(n, V, n, repetitions=10).sum() == pytest.approx(n)


@pytest.mark.parametrize(
    "t, dof", [(1.3, 5), (3.0, 100), (-12.0, 40), (0.01, 3), (0.0, 9), (1e-9, 2), (2.0, 499)]
)
def test_student_tail_against_scipy(t, dof):
    expected = math.log10(2 * scipy.stats.t.sf(abs(t), dof))
    # scipy's own tail is good to about 12 digits
    assert stats.student_log10_p(t, dof) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("dof", [5, 20, 98, 499, 998, 5000, 65_535, 524_287, 10**6])
@pytest.mark.parametrize("t", [0.3, 1.3, 4.4, 8, 20, 30, 36, 37, 40, 60, 240, 1e4])
def test_student_tail_against_its_integral(t, dof):
    """The density at t times the integral of what it falls to, which does not underflow; to 1e-8 of log p."""
    fall = lambda u: (1 + (2 * t * u + u * u) / (dof + t * t)) ** (-(dof + 1) / 2)  # noqa: E731
    scale = (dof + t * t) / (dof + 1) / t
    pieces = [0, 1, 4, 16, 64, 256, 1024, math.inf]
    area = sum(
        quad(fall, a * scale, b * scale, epsabs=0, epsrel=1e-11)[0] for a, b in itertools.pairwise(pieces)
    )
    expected = (math.log(2 * area) + scipy.stats.t.logpdf(t, dof)) / math.log(10)
    assert stats.student_log10_p(t, dof) == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_student_tail_where_p_underflows():
    """Far out, p falls as t^-dof: a tenth more of t costs dof * log10(1.1) digits."""
    p = [stats.student_log10_p(t, 499) for t in (1e4, 1.1e4)]
    assert p[0] < -1000 and p[1] - p[0] == pytest.approx(-499 * math.log10(1.1), rel=1e-4)


@pytest.mark.parametrize("n, part", [(40, 40), (41, 7), (5, 1), (64, 3)])
def test_t_test_of_disjoint_pairs_against_scipy(n, part):
    """Pairs are (0, 1), (2, 3), ... of each batch, whose odd last state has no partner."""
    states = torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).double() + 0.4
    statistics = CosineStatistics(6)
    for chunk in states.split(part):
        statistics.update(chunk)
    batches = [chunk[: len(chunk) // 2 * 2] for chunk in states.split(part)]
    pairs = torch.cat([F.cosine_similarity(batch[::2], batch[1::2]) for batch in batches])
    if part == 1:
        assert statistics.log10_p() is None
        return
    expected = scipy.stats.ttest_1samp(pairs, 0).pvalue
    assert statistics.log10_p() == pytest.approx(math.log10(expected), rel=1e-9)


def test_t_test_needs_two_pairs_and_survives_identical_ones():
    statistics = CosineStatistics(2)
    statistics.update(torch.ones(3, 2))
    assert statistics.log10_p() is None
    statistics.update(torch.ones(20, 2))
    assert math.isfinite(statistics.log10_p()) and statistics.log10_p() < -100


def test_pairwise_cosine_with_and_without_an_epsilon():
    states = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)) * 1e-8
    pairs = list(itertools.combinations(states.double(), 2))
    floored = [F.cosine_similarity(a, b, dim=0, eps=1e-8).item() for a, b in pairs]
    exact = [F.cosine_similarity(a, b, dim=0, eps=0).item() for a, b in pairs]
    for epsilon, cosines in ((0.0, exact), (1e-8, floored)):
        found = stats.pairwise_cosine(states, epsilon)
        assert found == pytest.approx(
            dict(mean_cosine=np.mean(cosines), std_cosine=np.std(cosines)), abs=1e-9
        )
    assert abs(np.mean(exact) - np.mean(floored)) > 1e-3


def test_wilson_interval():
    low, high = stats.wilson(8, 10)  # by the formula, z = 1.96
    z, p, n = scipy.stats.norm.ppf(0.975), 0.8, 10
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert (low, high) == pytest.approx(
        ((centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n))
    )


def test_rows_over_seeds_are_means_of_what_is_measured():
    rows = [{"layer": k % 2, "theory": 0.5, "mean_cosine": float(k), "std_cosine": 2.0 * k} for k in range(6)]
    merged = stats.over_seeds(rows)
    spread = np.std([0, 2, 4])
    first = {
        "layer": 0,
        "theory": 0.5,
        "mean_cosine": 2.0,
        "std_cosine": 4.0,
        "seed_std": pytest.approx(spread),
    }
    assert merged[0] == first and len(merged) == 2 and merged[1]["mean_cosine"] == 3.0


def test_split_and_column():
    rows = [{"a": 1, "b": 2}, {"a": 3, "b": 2}, {"a": 1, "b": 5}]
    assert list(stats.split(rows, "a")) == [1, 3] and list(stats.split(rows, "a", "b")) == [
        (1, 2),
        (3, 2),
        (1, 5),
    ]
    assert stats.column(rows, "b").tolist() == [2, 2, 5]
