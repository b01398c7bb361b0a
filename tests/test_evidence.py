"""lineage/evidence.py: bits, and coordinates against all permutations, numpy and scipy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import KINDS

from lib.settings import UserError
from lineage import evidence
from lineage.disguise import as_source, weights_of
from lineage.evidence import Correlation, diagonal_test, digests_of
from lineage.layout import Stack, find_stacks
from lineage.table import ALIKE_R
from reproduce.robustness import cut, noised
from strangers.formats import Newborn

CONFIG = replace(KINDS["llama_gqa"], d_model=64, d_ff=96)
BASE = Newborn(CONFIG, 1)


def find(source) -> Stack:
    """The stack of a checkpoint."""
    return find_stacks(source)[0]


def numbered(base: Stack, suspect: Stack, is_thorough=True) -> dict:
    """The base's layer of each whole layer of the suspect that has its bits."""
    equal, are_any = evidence.equal_parts(base, suspect, is_thorough)
    assert are_any
    return {part: layer for part, layer in equal.items() if isinstance(part, int)}


def test_layers_that_only_begin_alike():
    """One number of the largest matrix of the last layer differs."""
    weights = weights_of(BASE)
    weights["model.layers.2.mlp.down_proj.weight"][-1, -1] += 1
    nearly = as_source(weights, CONFIG)
    base, suspect = find(BASE), find(nearly)
    assert numbered(base, suspect, is_thorough=False) == {1: 1, 2: 2, 3: 3}
    assert digests_of(base)[3] != digests_of(suspect)[3]
    assert numbered(base, suspect) == {1: 1, 2: 2}
    assert numbered(suspect, find(cut(nearly, [2, 0]))) == {1: 3, 2: 1}


def four_errors(share: float, draws: int) -> float:
    """Four standard errors of a share that is estimated by draws."""
    return 4 * (share * (1 - share) / draws) ** 0.5


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


def test_agreement_is_that_of_all_permutations():
    """Two matrices together, whose coordinates are relabelled alike: the std of the sum is bounded."""
    generator = np.random.default_rng(0)
    A = generator.standard_normal((2, 9, 6)) + 3
    B = 0.5 * A + generator.standard_normal((2, 9, 6))
    tests, sums = [], np.zeros(720)
    for a, b in zip(A, B):
        C = np.corrcoef(a.T, b.T)[:6, 6:]
        S = np.array([C[np.arange(6), order].mean() for order in itertools.permutations(range(6))])
        tests.append(evidence.agreement(torch.from_numpy(a), torch.from_numpy(b)))
        # float32 sums of 54 products
        assert tests[-1] == pytest.approx((np.trace(C) / 6, S.mean(), S.std()), abs=1e-6)
        sums += S
    joint = evidence.joint_test(tests, searches=10)
    assert 0 < joint["z"] <= (sums[0] - sums.mean()) / sums.std()
    assert joint["log10_p"] == pytest.approx(np.log10(10 * scipy.stats.norm.sf(joint["z"])))


@pytest.mark.parametrize("shape", [(5, 8), (64, 8), (65, 8), (500, 8), (2, 40, 8), (30, 5, 8)])
def test_a_look_reads_the_beginning_the_end_and_no_more(shape):
    weight = torch.randn(shape)
    stack = Stack("", 8, {}, source=as_source({"x": weight}, None))
    rows = evidence.rows_looked_at(stack, "x", shape)
    flat = weight.reshape(-1, 8)
    assert len(rows) <= 64 and len(rows.unique(dim=0)) == len(rows)
    assert torch.equal(rows[0], flat[0]) and torch.equal(rows[-1], flat[-1])
    assert all((row == flat).all(dim=1).any() for row in rows)


def test_a_look_tells_children_from_strangers():
    """In each layer; copied attention beside other MLPs is no layer of the base's, and a table tells none."""
    weights, other = weights_of(BASE), weights_of(Newborn(CONFIG, 2))
    table = {name: weight for name, weight in weights.items() if "layers" not in name}
    attention = {name: weight for name, weight in weights.items() if "attn" in name}
    cases = {
        "noise of 0.3 std": (noised(BASE, 0.3), {1: 1, 2: 2, 3: 3}),
        "bfloat16": (as_source({n: w.bfloat16() for n, w in weights.items()}, CONFIG), {1: 1, 2: 2, 3: 3}),
        "a stranger": (as_source(other, CONFIG), {}),
        "its table": (as_source(other | table, CONFIG), {}),
        "its attention": (as_source(other | attention, CONFIG), {}),
    }
    for case, (source, expected) in cases.items():
        tests, namesakes = evidence.look(find(BASE), find(source))
        found = {layer: number for layer, (number, r, _) in namesakes.items() if r >= ALIKE_R}
        assert found == expected, case
        assert tests["embedding"]["same"] == (case not in ("a stranger", "its attention"))


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
    correlation.update(A, B)
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
        correlations, layer_r = evidence.weight_correlations(*map(find, pair))
        for kind in ("body", "embedding"):
            stacks = zip(*[rows for _, rows in shared_rows(pair, kind, left_out)])
            expected = np.corrcoef(*(np.concatenate(stack).T for stack in stacks))[:32, 32:]
            np.testing.assert_allclose(correlations[kind], expected, atol=2e-6)  # float32 products
        for layer, (base_layer, r, _) in layer_r.items():
            found = [rows for name, rows in shared_rows(pair, "body", left_out) if f".{layer - 1}." in name]
            least = 0 if left_out == ".mlp." else np.min([(a * b).mean() for a, b in found])
            assert r == pytest.approx(least, abs=2e-6) and layer == base_layer
        assert len(layer_r) == min(source.config.num_layers for source in pair)


def test_few_rows_of_wide_models_say_the_same(monkeypatch):
    """Of matrices of 192 to 320 rows, 20 or so: what is correlated is as much, to the error of so few."""
    a = Newborn(replace(KINDS["llama_gqa"], d_model=192, d_ff=320, vocab_size=300), 1)
    for b in (noised(a, 1.0), Newborn(a.config, 2)):
        all_rows, all_layers = evidence.weight_correlations(find(a), find(b))
        monkeypatch.setattr(evidence, "WIDE", 100)
        monkeypatch.setattr(evidence, "FEW_ROWS", 20)
        few_rows, few_layers = evidence.weight_correlations(find(a), find(b))
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
