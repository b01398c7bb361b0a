"""seedprint.py's own test against scipy, pair by pair."""

import numpy as np
import pytest
import scipy.stats

from reproduce.released import released_test
from seedprint import kendall, null_taus, paper_test


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def tau_b(x: np.ndarray, y: np.ndarray) -> float:
    first, second = np.triu_indices(len(x), 1)
    a = np.sign(x[first] - x[second])
    b = np.sign(y[first] - y[second])
    return (a * b).sum() / ((a != 0).sum() * (b != 0).sum()) ** 0.5


def test_kendall_with_ties():
    generator = np.random.default_rng(0)
    a = generator.integers(5, size=(30, 8))
    b = generator.integers(4, size=(30, 8))
    b[:, 0] = a[:, 0]  # a perfect match
    a[:, 3] = 2  # a constant column
    taus = kendall(a, b, np.array([0, 3, 5, 7]))
    expected = [1, 0, tau_b(a[:, 5], b[:, 5]), tau_b(a[:, 7], b[:, 7])]
    np.testing.assert_allclose(taus, expected, atol=1e-12)  # float64


def test_paper_test_by_hand():
    n = 60
    d = 50
    a = normal(3, n, d)
    b = 0.7 * a + normal(4, n, d)  # columns correlate by 0.57
    result = paper_test(a, b)
    chosen = [np.argsort(-rows.mean(axis=0))[:25] for rows in (a, b)]
    chosen = sorted(set(chosen[0]) & set(chosen[1]))
    a = a[:, chosen]
    b = b[:, chosen]
    taus = [scipy.stats.kendalltau(x, y).statistic for x, y in zip(a.T, b.T)]
    assert result["paper_k"] == len(chosen)
    assert result["paper_mean_tau"] == pytest.approx(np.mean(taus), rel=1e-9)
    error = np.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)) / len(chosen))
    assert result["closed_form_z"] == pytest.approx(np.mean(taus) / error, rel=1e-9)
    t_p = []
    u_p = []
    for trial in range(10):
        null = null_taus(n, d, trial)
        t_p.append(scipy.stats.ttest_ind(taus, null, alternative="greater").pvalue)
        u_p.append(scipy.stats.mannwhitneyu(taus, null, alternative="greater").pvalue)
    assert result["paper_t_p"] == pytest.approx(np.mean(t_p), rel=1e-6)
    assert result["paper_u_p"] == pytest.approx(np.mean(u_p), rel=1e-6)
    assert result["paper_t_p"] < 0.01


def test_the_null_is_of_independent_gaussians():
    trials = [null_taus(40, 60, trial) for trial in range(40)]
    taus = np.concatenate(trials)
    assert len(taus) == pytest.approx(40 * 15, rel=0.1)  # half of 30 meet, up to 4 errors of about 0.02
    expected = (2 * 85 / (9 * 40 * 39)) ** 0.5
    assert abs(taus.mean()) < 4 * expected / len(taus) ** 0.5
    assert taus.std() == pytest.approx(expected, rel=4 / (2 * len(taus)) ** 0.5)  # four errors
    assert len({tuple(trial) for trial in trials}) == 40  # each has draws of its own


@pytest.mark.parametrize("k", [0, 1])
def test_too_few_dimensions_say_nothing(k):
    """Of four dimensions none is among the two top ones of both, or one is."""
    a = normal(1, 10, 4) + 9 * np.array([1, 1, 0, 0])
    b = normal(2, 10, 4) + 9 * np.array([0, k, 1, 1 - k])
    result = paper_test(a, b)
    assert (result["paper_t_p"], result["paper_u_p"], result["paper_k"]) == (1.0, 1.0, k)


def released_by_hand(a: np.ndarray, b: np.ndarray, count: int) -> tuple[int, float, float]:
    """k, z and p of the `count` lowest dimensions, column by column."""
    both = sorted(set(a.mean(0).argsort()[:count]) & set(b.mean(0).argsort()[:count]))
    shares = [scipy.special.softmax(x[:, both].astype(np.float64) / 10, axis=1) for x in (a, b)]
    taus = [tau_b(x, y) for x, y in zip(shares[0].T, shares[1].T)]
    n, k = len(a), len(both)
    z = np.mean(taus) * np.sqrt(k) / np.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))
    return k, z, min(1, 2 * (1 - scipy.stats.norm.cdf(z)))


# of 4,500 dimensions 400 count, of 300 thirty
@pytest.mark.parametrize("n, d, count, share", [(50, 300, 30, 0.3), (50, 300, 30, 0), (12, 4500, 400, 0.3)])
def test_released_test_by_hand(n, d, count, share):
    a = normal(5, n, d) + 2 * normal(6, d)
    b = share * a + normal(7, n, d) + 2 * normal(6, d)
    found = released_test(a.astype(np.float32), b.astype(np.float32))
    k, z, p = released_by_hand(a, b, count)
    assert found["released_k"] == k > 10
    assert found["released_z"] == pytest.approx(z, rel=1e-3, abs=1e-3)  # two float32 ranks may be swapped
    assert found["released_p"] == pytest.approx(p, rel=0.05, abs=1e-9)
    assert (p < 0.01) == (share > 0)


def test_no_shared_dimension_is_no_evidence():
    """Of 20 dimensions two count, and the models' are others."""
    a = normal(1, 10, 20) - 9 * np.isin(range(20), (0, 1))
    b = normal(2, 10, 20) - 9 * np.isin(range(20), (2, 3))
    assert released_test(a, b) == {"released_k": 0, "released_z": 0, "released_p": 1}
