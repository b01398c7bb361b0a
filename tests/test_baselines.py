"""baselines.py: the paper's test against scipy and by hand, the four similarities against numpy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import KINDS, random_model

import baselines
import checkpoint
import init
from baselines import cka, identity_taus, judge_taus, kendall, null_taus, paper_test, top_dimensions
from checkpoint import Newborn
from common import UserError
from model import ModelConfig
from probe import gaussian_vectors, random_tokens

CONFIG = ModelConfig(300, 64, 3, 4, 64, 96, num_kv_heads=2)
TOKENS = random_tokens(0, range(40), 12, 300)
CPU = ("cpu", torch.float32)


def normal(seed: int, *shape) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# ---- the paper's test --------------------------------------------------------------------------------------


def tau_b(x: np.ndarray, y: np.ndarray) -> float:
    """Kendall's tau-b over all pairs."""
    concordant, tied_x, tied_y, pairs = 0, 0, 0, 0
    for i, j in itertools.combinations(range(len(x)), 2):
        a, b = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
        concordant, pairs = concordant + a * b, pairs + 1
        tied_x, tied_y = tied_x + (a == 0), tied_y + (b == 0)
    return concordant / ((pairs - tied_x) * (pairs - tied_y)) ** 0.5


def test_kendall_with_ties():
    generator = np.random.default_rng(0)
    a, b = generator.integers(5, size=(30, 8)), generator.integers(4, size=(30, 8))
    b[:, 0], a[:, 3] = a[:, 0], 2  # a perfect match, and a constant column
    chosen = np.array([0, 3, 5, 7])
    found = kendall(a, b, chosen)
    expected = [0 if j == 3 else tau_b(a[:, j], b[:, j]) for j in chosen]
    np.testing.assert_allclose(found, expected, atol=1e-12)  # float64
    assert found[0] == pytest.approx(1, abs=1e-12) and found[1] == 0
    plain = [scipy.stats.kendalltau(a[:, j], b[:, j]).statistic for j in (0, 5, 7)]
    np.testing.assert_allclose(found[[0, 2, 3]], plain, atol=1e-12)
    assert kendall(a, b, np.array([], dtype=int)).shape == (0,)


def test_kendall_of_a_softmax():
    a, b, chosen = normal(1, 25, 9), normal(2, 25, 9), np.array([1, 2, 6])
    soft = []
    for x in (a, b):
        x = np.exp(x[:, chosen] / 10)
        soft.append(x / x.sum(axis=1, keepdims=True))
    expected = [tau_b(soft[0][:, j], soft[1][:, j]) for j in range(3)]
    np.testing.assert_allclose(kendall(a, b, chosen, 10.0), expected, atol=1e-12)  # float64
    assert not np.allclose(kendall(a, b, chosen), expected)


def test_sides_and_ties_of_the_means():
    rows = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 4, 1, 5, 1]], dtype=np.float32)  # means 2.5 3.5 4 1 5 5
    assert top_dimensions(rows, "top", 3).tolist() == [4, 5, 2]
    assert top_dimensions(rows, "bottom", 3).tolist() == [3, 0, 1]
    assert sorted(top_dimensions(rows, "top", 6)) == list(range(6))


@pytest.mark.parametrize(
    "side, top_k, temperature", [("top", None, None), ("bottom", 20, None), ("top", 25, 10.0)]
)
def test_paper_test_by_hand(side, top_k, temperature):
    a, n, d = normal(3, 60, 50), 60, 50
    b = 0.7 * a + normal(4, 60, 50)
    found = paper_test(torch.from_numpy(a), torch.from_numpy(b), side, top_k, temperature)
    sign, top_k = 1 if side == "top" else -1, top_k or 25
    tops = [set(np.argsort(-sign * x.mean(axis=0))[:top_k].tolist()) for x in (a, b)]
    chosen = sorted(tops[0] & tops[1])
    if temperature:
        a, b = (np.exp(x[:, chosen] / temperature) for x in (a, b))
        a, b = (x / x.sum(axis=1, keepdims=True) for x in (a, b))
    else:
        a, b = a[:, chosen], b[:, chosen]
    taus, k = [scipy.stats.kendalltau(x, y).statistic for x, y in zip(a.T, b.T)], len(chosen)
    assert found["paper_k"] == k and found["paper_mean_tau"] == pytest.approx(np.mean(taus), rel=1e-9)
    z = np.mean(taus) / np.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)) / k)
    assert found["closed_form_z"] == pytest.approx(z, rel=1e-9)
    t_p, u_p = [], []
    for trial in range(10):
        null = null_taus(n, d, side, top_k, temperature, trial)
        t_p.append(scipy.stats.ttest_ind(taus, null, alternative="greater").pvalue)
        u_p.append(scipy.stats.mannwhitneyu(taus, null, alternative="greater").pvalue)
    assert found["paper_t_p"] == pytest.approx(np.mean(t_p), rel=1e-6)
    assert found["paper_u_p"] == pytest.approx(np.mean(u_p), rel=1e-6)
    assert found["paper_t_p"] < 0.01  # columns correlate by 0.57


def test_the_null_is_of_independent_gaussians():
    taus = np.concatenate([null_taus(40, 60, "top", 30, None, trial) for trial in range(40)])
    assert len(taus) == pytest.approx(40 * 15, rel=0.1)  # half of 30 meet, up to 4 errors of about 0.02
    expected = (2 * 85 / (9 * 40 * 39)) ** 0.5
    assert baselines.kendall_std(40) == pytest.approx(expected, rel=1e-12)
    assert abs(taus.mean()) < 4 * expected / len(taus) ** 0.5
    assert taus.std() == pytest.approx(expected, rel=4 / (2 * len(taus)) ** 0.5)  # four errors
    assert len({null_taus(40, 60, "top", 30, None, trial)[0] for trial in range(10)}) == 10


def test_too_few_dimensions_say_nothing():
    for taus in (np.zeros(0), np.array([0.9])):
        found = judge_taus(taus, 50, 40, "top", 20, None)
        assert (found["paper_t_p"], found["paper_u_p"], found["paper_k"]) == (1.0, 1.0, len(taus))
    a, b = normal(5, 10, 4), normal(5, 10, 4)
    a[:, :2], b[:, 2:] = a[:, :2] + 9, b[:, 2:] + 9  # tops that do not meet
    assert identity_taus(a, b, "top", 2, None).shape == (0,)
    for top_k in (0, 5, -1):
        with pytest.raises(UserError, match="top-k"):
            paper_test(torch.from_numpy(a), torch.from_numpy(b), top_k=top_k)


def test_identical_models_and_strangers():
    outputs = [
        baselines.last_positions(Newborn(CONFIG, seed), 150, 12, "tokens", 0, 300, *CPU) for seed in range(8)
    ]
    same = paper_test(outputs[0], outputs[0].clone())
    assert same["paper_k"] == 32 and same["paper_mean_tau"] == pytest.approx(1, abs=1e-12)
    assert same["paper_t_p"] < 1e-50 and same["paper_u_p"] < 1e-5 and same["closed_form_z"] > 50
    found = [paper_test(a, b) for a, b in itertools.combinations(outputs, 2)]
    for key in ("paper_t_p", "paper_u_p"):
        p = np.array([row[key] for row in found])
        assert p.min() > 1e-4 and p.max() > 0.5, p
    z = np.array([row["closed_form_z"] for row in found])
    assert abs(z).max() < 4.5 and abs(z.mean()) < 1


def test_last_positions_are_the_models():
    model = init.newborn(CONFIG, 3)
    with torch.inference_mode():
        for kind, inputs in (("tokens", TOKENS), ("gaussian", gaussian_vectors(0, range(40), 12, 64))):
            found = baselines.last_positions(Newborn(CONFIG, 3), 40, 12, kind, 0, 300, *CPU)
            # float32 states of order 1, in batches of another size
            torch.testing.assert_close(found, model.hidden(inputs)[:, -1], rtol=0, atol=2e-5)


# ---- the four similarities ---------------------------------------------------------------------------------


@pytest.fixture(params=["llama_gqa", "llama_mqa_tied", "qwen3", "gpt2"])
def two(request, tmp_path):
    """Two random models of a kind: their sources, and their weights in float64."""
    sources, weights = [], []
    for seed in (1, 2):
        checkpoint.save(tmp_path / str(seed), random_model(KINDS[request.param], seed))
        sources.append(checkpoint.tensors(tmp_path / str(seed)))
        weights.append({n: sources[-1].read(n).double().numpy() for n in sources[-1].shapes})
    return sources, weights


def stds(weights: dict, kind: str, depth: int) -> np.ndarray:
    return np.array([weights[f"model.layers.{i}.self_attn.{kind}_proj.weight"].std() for i in range(depth)])


def test_intrinsic_and_pcs(two):
    sources, (a, b) = two
    expected = np.mean([scipy.stats.pearsonr(stds(a, kind, 3), stds(b, kind, 3))[0] for kind in "qkvo"])
    # float32 standard deviations, which differ by a few per cent between the layers
    assert baselines.intrinsic(*sources) == pytest.approx(expected, abs=1e-4)
    x, y = (
        np.concatenate([w[n].ravel() for n in w if "embed" not in n and "lm_head" not in n]) for w in (a, b)
    )
    # float32 products
    assert baselines.pcs(*sources) == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-6)


def test_ics(two):
    sources, weights = two
    config, terms = sources[0].config, []
    H, G, Dh = config.num_heads, config.kv_heads, config.head_size
    for w in weights:
        terms.append([])
        for layer in (1, 2):
            X, name = w["model.embed_tokens.weight"], f"model.layers.{layer}."
            q, k, v, o = (w[f"{name}self_attn.{kind}_proj.weight"] for kind in "qkvo")
            up, down = (w[f"{name}mlp.{kind}_proj.weight"] for kind in ("up", "down"))
            scores, values = 0, 0
            for head in range(H):
                own, theirs = (
                    slice(head * Dh, (head + 1) * Dh),
                    slice(head * G // H * Dh, (head * G // H + 1) * Dh),
                )
                scores = scores + q[own].T @ k[theirs]
                values = values + v[theirs].T @ o[:, own].T
            terms[-1] += [X @ middle @ X.T for middle in (scores, values, up.T @ down.T)]
    expected = [np.corrcoef(x.ravel(), y.ravel())[0, 1] for x, y in zip(*terms)]
    assert baselines.ics(*sources) == pytest.approx(np.mean(expected), abs=1e-5)  # float32 products


def gram_cka(x: np.ndarray, y: np.ndarray) -> float:
    """CKA by centred Gram matrices: <K, L> / |K| |L|."""
    H = np.eye(len(x)) - 1 / len(x)
    K, L = H @ x @ x.T @ H, H @ y @ y.T @ H
    return (K * L).sum() / np.linalg.norm(K) / np.linalg.norm(L)


@pytest.mark.parametrize("n, d1, d2", [(50, 10, 20), (10, 30, 20), (25, 10, 40), (30, 30, 30)])
def test_cka(n, d1, d2):
    x = normal(6, n, d1) + 3
    y = x[:, :5] @ normal(7, 5, d2) + normal(8, n, d2)
    found = cka(torch.from_numpy(x), torch.from_numpy(y))
    assert found == pytest.approx(gram_cka(x, y), rel=1e-9) and 0.05 < found < 1  # float64
    turned = x @ np.linalg.qr(normal(9, d1, d1))[0] * 4 - 1
    assert cka(torch.from_numpy(x), torch.from_numpy(turned)) == pytest.approx(1, rel=1e-9)


def test_reef_is_the_cka_of_block_outputs(two):
    sources, _ = two
    tokens, layers = TOKENS % 97, []
    for source in sources:
        layers.append([])
        with torch.inference_mode():
            checkpoint.load(source.folder).hidden(
                tokens, on_state=lambda i, x, to=layers[-1]: to.append(x[:, -1].double())
            )
    expected = [[gram_cka(x.numpy(), y.numpy()) for y in layers[1][1:]] for x in layers[0][1:]]
    mean, found = baselines.reef(*sources, tokens, *CPU)
    np.testing.assert_allclose(found, expected, atol=1e-5)  # float32 states
    assert mean == pytest.approx(np.mean(np.diag(expected)), abs=1e-5)


def test_another_depth():
    a, b = Newborn(CONFIG, 1), Newborn(replace(CONFIG, num_layers=5), 2)
    profiles = []
    for kind in "qkvo":
        five = stds({n: b.read(n).double().numpy() for n in b.shapes}, kind, 5)
        three = stds({n: a.read(n).double().numpy() for n in a.shapes}, kind, 3)
        profiles.append(np.corrcoef(three, five[[0, 2, 4]])[0, 1])  # a third is every second
    # float32 standard deviations that differ by one per cent between the layers
    assert baselines.intrinsic(a, b) == pytest.approx(np.mean(profiles), abs=1e-3)
    assert baselines.intrinsic(b, a) == pytest.approx(np.mean(profiles), abs=1e-3)
    found = baselines.similarities(a, b, TOKENS, *CPU)
    assert np.shape(found["reef_matrix"]) == (3, 5) and np.isfinite(found["reef_matrix"]).all()
    assert found["reef"] == pytest.approx(np.mean([found["reef_matrix"][i][i] for i in range(3)]), rel=1e-12)
    one = replace(CONFIG, num_layers=1)
    assert baselines.intrinsic(Newborn(one, 1), Newborn(one, 2)) == 0  # a single layer has no profile


def test_identical_models_are_alike_and_strangers_less():
    a, b = Newborn(CONFIG, 1), Newborn(CONFIG, 2)
    same, other = (baselines.similarities(a, x, TOKENS, *CPU) for x in (a, b))
    for name in ("intrinsic", "reef", "pcs", "ics"):
        assert same[name] == pytest.approx(1, abs=1e-6)  # float32 products
        assert other[name] < 0.98
    assert abs(other["ics"]) < 0.05
    variances = {n: 4e-4 / (6 if "o_proj" in n or "down" in n else 1) for n in a.shapes if "proj" in n}
    gains, weights = 7 * 64, sum(np.prod(a.shapes[n]) * variance for n, variance in variances.items())
    # Only the gains, all 1, are shared: their part of the squared norm; other products average out to 0.002.
    assert other["pcs"] == pytest.approx(gains / (gains + weights), abs=0.01)
    with pytest.raises(UserError, match="attention and MLP"):
        part = Newborn(replace(CONFIG, sublayers="mlp"), 1)
        baselines.similarities(part, part, TOKENS, *CPU)


def test_other_shapes_and_vocabularies():
    a = Newborn(CONFIG, 1)
    b = Newborn(replace(CONFIG, vocab_size=200, d_ff=80, num_kv_heads=4), 2)
    found = baselines.similarities(a, b, TOKENS % 200, *CPU)
    assert all(np.isfinite(found[name]) for name in ("intrinsic", "reef", "pcs", "ics"))
