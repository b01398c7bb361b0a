"""Do two models order inputs alike? The paper's test of a common birth, SeedPrint (BB 6.1).

>>> a, b = np.random.default_rng(0).standard_normal((2, 1000, 256), np.float32)
>>> 0 < paper_test(a, b)["paper_t_p"] < 1
True
"""

import functools
import warnings

import numpy as np
from scipy import stats

from init import keyed_generator

NULLS = 10  # Gaussian pairs that the paper's test compares with


def paper_test(a, b):
    """The paper's test of two models' last-position states on the same inputs, arrays (n, d) of float32.

    Kendall's tau of the dimensions that are among the half with the largest mean outputs in both models, the
    `paper_k` identity dimensions. p of the one-sided t- and U-tests against the taus of NULLS Gaussian
    pairs, averaged; `closed_form_z` is the mean tau over the error that k independent dimensions would have.
    """
    taus = identity_taus(np.asarray(a), np.asarray(b))
    n, d = a.shape
    k = len(taus)
    mean_tau = taus.mean() if k else 0.0
    std = (2 * (2 * n + 5) / (9 * n * (n - 1))) ** 0.5  # of Kendall's tau between independent columns
    p_values = []  # of the t-test and the U-test
    for trial in range(NULLS):
        null = null_taus(n, d, trial)
        if min(k, len(null)) < 2:  # too few dimensions to say anything
            p_values.append((1.0, 1.0))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # identical models: all taus are 1
            t_test = stats.ttest_ind(taus, null, alternative="greater")
        u_test = stats.mannwhitneyu(taus, null, alternative="greater")
        p_values.append((t_test.pvalue, u_test.pvalue))
    t_p, u_p = np.nan_to_num(np.mean(p_values, axis=0), nan=1.0).tolist()
    return {
        "paper_k": k,
        "paper_mean_tau": mean_tau,
        "paper_t_p": t_p,
        "paper_u_p": u_p,
        "closed_form_z": mean_tau / (std / max(1, k) ** 0.5),
    }


def top_dimensions(rows):
    """The half of the dimensions with the largest mean outputs, of (n, d)."""
    mean = rows.mean(axis=0, dtype=np.float64)
    return np.argsort(-mean, kind="stable")[: rows.shape[1] // 2]


def kendall(a, b, chosen):
    """Kendall's tau-b of a's and b's columns j, (n, d) each, for j in `chosen`; 0 for a constant column."""
    a = a[:, chosen].astype(np.float64)
    b = b[:, chosen].astype(np.float64)
    taus = [stats.kendalltau(x, y, method="asymptotic").statistic for x, y in zip(a.T, b.T)]
    return np.nan_to_num(np.array(taus, dtype=float))


def identity_taus(a, b):
    """Kendall's tau of arrays (n, d) on the dimensions that are among the top ones of both."""
    return kendall(a, b, np.intersect1d(top_dimensions(a), top_dimensions(b)))


@functools.lru_cache(maxsize=512)
def null_taus(n, d, trial):
    """The identity dimensions' taus of two Gaussian matrices (n, d): the paper's null."""
    generator = keyed_generator("paper null", n, d, trial)
    a = generator.standard_normal((n, d), np.float32)
    b = generator.standard_normal((n, d), np.float32)
    return identity_taus(a, b)
