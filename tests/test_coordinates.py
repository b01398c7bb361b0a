"""lineage/coordinates.py against all permutations, numpy and scipy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import KINDS

from lib.checkpoint import Newborn
from lib.settings import UserError
from lineage import coordinates
from lineage.coordinates import Correlation, diagonal_test
from reproduce.changes import noised


def four_errors(share: float, draws: int) -> float:
    """Four standard errors of a share that is estimated by draws."""
    return 4 * (share * (1 - share) / draws) ** 0.5


# ---- the exact test of coordinates -------------------------------------------------------------------------


@pytest.mark.parametrize("d, seed", [(2, 0), (7, 3)])
def test_z_and_p_are_those_of_all_permutations(d, seed):
    C = np.random.default_rng(seed).standard_normal((d, d)) + 0.5 * np.eye(d)
    result = diagonal_test(torch.from_numpy(C), ("all", seed), 9999)
    sums = np.array([C[np.arange(d), order].mean() for order in itertools.permutations(range(d))])
    matched = np.trace(C) / d
    z = (matched - sums.mean()) / sums.std()
    # float64 sums of 49 numbers
    assert result["matched"] == pytest.approx(matched, rel=1e-9)
    assert result["z"] == pytest.approx(z, rel=1e-9)
    assert result["log10_p"] == pytest.approx(np.log10(scipy.stats.norm.sf(z)), rel=1e-9)
    share = (sums >= matched - 1e-12).mean()
    # the 1 that is added to both counts moves p by 1e-4
    assert result["p"] == pytest.approx(share, abs=four_errors(share, 9999) + 1e-4)


@pytest.mark.parametrize("value", [0.25, torch.nan])
def test_nothing_to_compare_is_refused(value):
    with pytest.raises(UserError, match="nothing"):
        diagonal_test(torch.full((5, 5), value).double(), ("a", 1), 99)


def test_a_high_z_alone_does_not_decide():
    """A single huge entry on the diagonal: z is sqrt(d - 1) = 7, but one relabelling in 50 keeps it."""
    C = torch.zeros(50, 50).double()
    C[3, 3] = 1
    result = diagonal_test(C, ("a", 1), 9999)
    assert result["log10_p"] < -6 and not result["same"]
    assert result["p"] == pytest.approx(1 / 50, abs=four_errors(0.02, 9999))


# ---- coordinates of weights --------------------------------------------------------------------------------


def test_streaming_correlation_against_numpy():
    generator = np.random.default_rng(0)
    A = generator.standard_normal((9000, 7)) * [1, 1, 5, 0.01, 1, 1, 0.01] + [0, 1, 0, 0.02, 0, 0, 10]
    B = 0.5 * A[:, ::-1] + generator.standard_normal((9000, 7))
    A[:, 5] = 0.0  # constant columns, of numbers that float32 and its sums hold exactly
    B[:, 2] = 0.5
    A = torch.from_numpy(A).float()
    B = torch.from_numpy(B).float()
    correlation = Correlation(7)
    assert correlation.value() is None
    correlation.update(A, B)  # longer than a batch
    values = correlation.value()
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(np.corrcoef(A.double().T, B.double().T)[:7, 7:])
    np.testing.assert_allclose(values[:6], expected[:6], atol=2e-6)  # float32 sums of 2,048 products
    np.testing.assert_allclose(values[6], expected[6], atol=0.01)  # float32 leaves 4 digits of 0.01 beside 10
    assert (values[5] == 0).all() and (values[:, 2] == 0).all()


def shared_rows(sources, kind: str, left_out: str):
    """The name of each matrix that both models have, and its rows along the stream, centred and scaled."""
    for name, shape in sources[0].shapes.items():
        in_blocks = name.startswith("model.layers.")
        if len(shape) != 2 or in_blocks != (kind == "body") or left_out in name:
            continue
        weights = [source.read(name).double().numpy() for source in sources]
        if "o_proj" in name or "down_proj" in name:
            weights = [weight.T for weight in weights]
        rows = min(len(weight) for weight in weights)
        centred = [weight[:rows] - weight[:rows].mean(axis=0) for weight in weights]
        yield name, [weight / (weight**2).mean() ** 0.5 for weight in centred]


@pytest.mark.parametrize(
    "changes, left_out",
    [
        (dict(d_ff=40), ".mlp."),
        (dict(num_layers=2), "layers.2."),
        (dict(tie_embeddings=True), "lm_head"),
        (dict(vocab_size=70), "none"),
    ],
    ids=["d_ff", "layers", "tied", "vocabulary"],
)
def test_weight_correlations_against_a_stack(changes, left_out):
    a = noised(Newborn(KINDS["llama_gqa"], 1), 0.5)
    b = Newborn(replace(KINDS["llama_gqa"], **changes), 1)
    for pair in ((a, b), (b, a)):
        correlations, layer_r = coordinates.weight_correlations(*pair)
        for kind in ("body", "embedding"):
            stacks = zip(*[rows for _, rows in shared_rows(pair, kind, left_out)])
            expected = np.corrcoef(*(np.concatenate(stack).T for stack in stacks))[:32, 32:]
            np.testing.assert_allclose(correlations[kind], expected, atol=2e-6)  # float32 products
        for (layer, base_layer), r in layer_r.items():
            found = [rows for name, rows in shared_rows(pair, "body", left_out) if f".{layer - 1}." in name]
            least = 0 if left_out == ".mlp." else np.min([(a * b).mean() for a, b in found])
            assert r == pytest.approx(least, abs=2e-6) and layer == base_layer
        assert len(layer_r) == min(source.config.num_layers for source in pair)


def test_few_rows_of_wide_models_say_the_same(monkeypatch):
    """Of matrices of 192 to 320 rows, 20 or so: what is correlated is as much, to the error of so few."""
    a = Newborn(replace(KINDS["llama_gqa"], d_model=192, d_ff=320, vocab_size=300), 1)
    for b in (noised(a, 1.0), Newborn(a.config, 2)):
        all_rows, all_layers = coordinates.weight_correlations(a, b)
        monkeypatch.setattr(coordinates, "WIDE", 100)
        monkeypatch.setattr(coordinates, "FEW_ROWS", 20)
        few_rows, few_layers = coordinates.weight_correlations(a, b)
        monkeypatch.undo()
        for kind, matrices in (("body", 3 * 7), ("embedding", 2)):
            # 192 columns have 17 rows or more of a matrix each: five errors of the mean of their correlations
            error = 5 / (192 * 17 * matrices) ** 0.5
            means = [values[kind].diagonal().mean().item() for values in (few_rows, all_rows)]
            assert means[0] == pytest.approx(means[1], abs=error)
            # a column's own correlation is one of 17 or more rows of each
            assert (few_rows[kind] - all_rows[kind]).abs().max() < 5.5 / (17 * matrices) ** 0.5
        for layers, r in all_layers.items():  # the least of seven
            assert few_layers[layers] == pytest.approx(r, abs=5 / (192 * 17) ** 0.5)


def test_a_common_identity_is_no_kinship():
    """Of matrices that begin as the identity what was learnt since is compared."""
    noise = torch.randn(3, 96, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    rows = [coordinates.without_identity(each + torch.eye(96)) for each in noise]
    for found, since in zip(rows, noise):
        torch.testing.assert_close(found, since - since.diagonal().mean() * torch.eye(96), atol=1e-6, rtol=0)
    torch.testing.assert_close(coordinates.without_identity(noise[0]), noise[0], atol=0, rtol=0)
    few = coordinates.without_identity(noise[0] + torch.eye(96), 7)
    torch.testing.assert_close(few, rows[0][::7], atol=0, rtol=0)


# ---- the paper's test --------------------------------------------------------------------------------------


def normal(seed: int, *shape: int) -> np.ndarray:
    """Independent N(0, 1), float64."""
    return np.random.default_rng(seed).standard_normal(shape)


def tau_b(x: np.ndarray, y: np.ndarray) -> float:
    """Kendall's tau-b over all pairs."""
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
    taus = coordinates.kendall(a, b, np.array([0, 3, 5, 7]))
    expected = [1, 0, tau_b(a[:, 5], b[:, 5]), tau_b(a[:, 7], b[:, 7])]
    np.testing.assert_allclose(taus, expected, atol=1e-12)  # float64


def test_paper_test_by_hand():
    n = 60
    d = 50
    a = normal(3, n, d)
    b = 0.7 * a + normal(4, n, d)  # columns correlate by 0.57
    result = coordinates.paper_test(a, b)
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
        null = coordinates.null_taus(n, d, trial)
        t_p.append(scipy.stats.ttest_ind(taus, null, alternative="greater").pvalue)
        u_p.append(scipy.stats.mannwhitneyu(taus, null, alternative="greater").pvalue)
    assert result["paper_t_p"] == pytest.approx(np.mean(t_p), rel=1e-6)
    assert result["paper_u_p"] == pytest.approx(np.mean(u_p), rel=1e-6)
    assert result["paper_t_p"] < 0.01


def test_the_null_is_of_independent_gaussians():
    trials = [coordinates.null_taus(40, 60, trial) for trial in range(40)]
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
    result = coordinates.paper_test(a, b)
    assert (result["paper_t_p"], result["paper_u_p"], result["paper_k"]) == (1.0, 1.0, k)
