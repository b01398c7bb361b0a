"""measure/lineage.py against all permutations, numpy and scipy; on children, evasions and strangers."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import scipy.stats
import torch
import torch.nn.functional as F
from conftest import KINDS, ROOT
from evade import WAYS, evade

import init
from lib import checkpoint, folders
from lib.checkpoint import Newborn, final_states
from lib.inputs import random_tokens
from lib.settings import UserError
from measure import lineage
from measure.lineage import Correlation, diagonal_test, gram_test
from model import ModelConfig, Transformer

CONFIG = ModelConfig(300, 64, 3, 4, 64, 96, num_kv_heads=2)  # of most models that are compared here
SMALLEST = ModelConfig(97, 64, 2, 2, 32, 32)  # where many pairs are compared
BLOCKS = "the weights of the blocks"
HIDDEN_UNITS = "the hidden units, in any basis of the residual stream"
TABLES = ("model.embed_tokens", "lm_head")


class Altered:
    """A source whose tensors are changed as they are read, by `change(name, weight)`."""

    def __init__(self, source, change):
        self.source = source
        self.change = change
        self.config = source.config
        self.shapes = source.shapes

    def read(self, name: str) -> torch.Tensor:
        return self.change(name, self.source.read(name))


def noised(source, size: float) -> Altered:
    """Every matrix with Gaussian noise of `size` times its standard deviation, the same at each reading."""

    def change(name, weight):
        if weight.ndim != 2:
            return weight
        noise = init.keyed_generator("noise", name).standard_normal(weight.shape, np.float32)
        return weight + size * weight.std() * torch.from_numpy(noise)

    return Altered(source, change)


def open_folder(folder: Path) -> folders.Weights:
    """The source of a checkpoint folder."""
    return checkpoint.parse_spec(str(folder)).open()


def fingerprint(source, vocab_size: int) -> torch.Tensor:
    """Of the states at 16 sequences of 32 tokens."""
    tokens = random_tokens(0, range(16), 32, vocab_size)
    return lineage.fingerprint(final_states(source, tokens).flatten(0, 1))


def compare(a, b) -> tuple[dict, str, str]:
    """Every test of two sources, the verdict, and what it rests on."""
    vocab_size = min(a.config.vocab_size, b.config.vocab_size)
    prints = (fingerprint(a, vocab_size), fingerprint(b, vocab_size))
    tests, correlations, _ = lineage.compare_sources(a, b, prints, seed=0, permutations=999)
    assert set(correlations) <= set(tests)
    json.dumps(tests, allow_nan=False)
    return tests, *lineage.verdict(tests)


def assert_uniform(p_values: list[float]) -> None:
    """p values in steps far below the distance from uniform that so few of them could prove."""
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 0.001


def four_errors(share: float, draws: int) -> float:
    """Four standard errors of a share that is estimated by draws."""
    return 4 * (share * (1 - share) / draws) ** 0.5


# ---- the exact test of coordinates -------------------------------------------------------------------------


@pytest.mark.parametrize("d, seed", [(2, 0), (3, 1), (6, 2), (7, 3)])
def test_z_and_p_are_those_of_all_permutations(d, seed):
    C = np.random.default_rng(seed).standard_normal((d, d)) + 0.5 * np.eye(d)
    result = diagonal_test(torch.from_numpy(C), ("all", seed), 9999)
    sums = np.array([C[np.arange(d), order].mean() for order in itertools.permutations(range(d))])
    matched = np.trace(C) / d
    z = (matched - sums.mean()) / sums.std()
    # float64 sums of 49 numbers
    assert result["matched"] == pytest.approx(matched, rel=1e-9)
    assert result["mismatched"] == pytest.approx(C[~np.eye(d, dtype=bool)].mean(), rel=1e-9)
    assert result["z"] == pytest.approx(z, rel=1e-9)
    assert result["log10_p"] == pytest.approx(np.log10(scipy.stats.norm.sf(z)), rel=1e-9)
    share = (sums >= matched - 1e-12).mean()
    # the 1 that is added to both counts moves p by 1e-4
    assert result["p"] == pytest.approx(share, abs=four_errors(share, 9999) + 1e-4)
    # At the smallest visible effect, with the mean and the spread as they are, p would be 1e-6.
    smallest = (d - 1) / d * result["smallest_visible"]
    assert scipy.stats.norm.sf(smallest / sums.std()) == pytest.approx(1e-6, rel=1e-6)


def test_relabelling_is_a_function_of_its_key():
    C = torch.from_numpy(np.random.default_rng(0).standard_normal((20, 20)))
    first = diagonal_test(C, ("a", 1), 1234)
    assert first == diagonal_test(C.clone(), ("a", 1), 1234)
    assert {diagonal_test(C, ("a", seed), 1234)["p"] for seed in range(5)} != {first["p"]}
    count = first["p"] * 1235
    assert count == pytest.approx(round(count)) and 1 <= count <= 1235  # all permutations, and the 1


def test_identity_is_the_extreme():
    result = diagonal_test(torch.eye(64).double(), ("a", 1), 999)
    assert result["p"] == 1 / 1000 and result["same"] is True
    # S is the number of fixed points / 64: mean 1 / 64, variance 1 / 64^2, by their law
    assert result["z"] == pytest.approx(63, rel=1e-9)
    assert not diagonal_test(-torch.eye(64).double(), ("a", 1), 999)["same"]


@pytest.mark.parametrize("value", [0.0, 0.25, torch.nan])
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


def strangers_that_read_the_same(generator: np.random.Generator, n: int, d: int) -> list[torch.Tensor]:
    """Two arrays (n, d): five slow factors (AR(1), 0.98) in common, loadings and noise of their own."""
    factors = np.zeros((n, 5))
    for i, shock in enumerate(generator.standard_normal((n, 5))):
        factors[i] = 0.98 * factors[i - 1] + shock
    arrays = []
    for noise in generator.standard_normal((2, n, d)):
        arrays.append(torch.from_numpy(factors @ generator.standard_normal((5, d)) + noise))
    return arrays


def test_p_is_uniform_though_rows_depend_on_each_other():
    """What the rows share, strangers share, too: only which coordinate has it tells them from kin.

    Given the rows' factors, a stranger's columns are exchangeable, so that each relabelling of it is as
    likely: p is uniform. A test that takes the 150 rows for independent expects correlations of
    1 / sqrt(150) with errors that average out over 24 columns, and rejects.
    """
    generator = np.random.default_rng(5)
    plain = []
    whole = []
    naive = []
    for i in range(300):
        a, b = strangers_that_read_the_same(generator, 150, 24)
        C = torch.from_numpy(np.corrcoef(a.T, b.T)[:24, 24:])
        plain.append(diagonal_test(C, ("plain", i), 199)["p"])
        whole.append(lineage.relabelling_test(a, b, i, 199)["p"])
        naive.append(scipy.stats.norm.sf(C.diagonal().mean().item() * (150 * 24) ** 0.5))
    assert_uniform(plain)
    assert_uniform(whole)
    assert (np.array(naive) < 0.01).mean() > 0.2  # 1 % if rows were independent


# ---- coordinates of states ---------------------------------------------------------------------------------


def test_unit_ranks_against_scipy():
    generator = np.random.default_rng(0)
    a = generator.integers(6, size=(40, 5))  # many ties
    b = generator.standard_normal((40, 5))  # none
    b[:, 4] = a[:, 4] + 0.01 * b[:, 4]
    A = lineage.unit_ranks(torch.from_numpy(a).float())
    B = lineage.unit_ranks(torch.from_numpy(b).float())
    expected = scipy.stats.spearmanr(a, b).statistic[:5, 5:]
    np.testing.assert_allclose(A.T @ B, expected, atol=1e-6)  # float32
    ranks = scipy.stats.rankdata(a, axis=0) - 20.5
    np.testing.assert_allclose(A, ranks / np.sqrt((ranks**2).sum(axis=0)), atol=1e-7)  # float32
    constant = torch.cat([torch.from_numpy(b).float(), torch.full((40, 2), 0.3)], dim=1)
    assert torch.equal(lineage.unit_ranks(constant), torch.cat([B, torch.zeros(40, 2)], dim=1))


@pytest.mark.parametrize("n, d", [(60, 20), (20, 60), (30, 30), (3, 8)])
def test_decorrelated_by_its_singular_values(n, d):
    generator = np.random.default_rng(n)
    shared = generator.standard_normal((n, 3)) @ generator.standard_normal((3, d))  # a strong common part
    ranks = lineage.unit_ranks(torch.from_numpy(shared + generator.standard_normal((n, d))))
    U, values, V = np.linalg.svd(ranks.double().numpy(), full_matrices=False)
    expected = U @ np.diag(values / np.sqrt(values**2 + 0.03)) @ V
    expected /= np.linalg.norm(expected, axis=0)
    white = lineage.decorrelated(ranks)
    np.testing.assert_allclose(white, expected, atol=2e-5)  # float32 products, divided by as little as 0.17
    order = torch.from_numpy(generator.permutation(d))
    torch.testing.assert_close(lineage.decorrelated(ranks[:, order]), white[:, order], rtol=0, atol=2e-5)
    if n > d:
        eye = torch.eye(d)
        before = (ranks.T @ ranks - eye).abs().max()
        assert (white.T @ white - eye).abs().max() < 0.5 * before


def test_constant_columns_stay_zero():
    rows = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    rows[:, [3, 7]] = 2.0
    assert lineage.fingerprint(rows)[:, [3, 7]].abs().max() < 1e-3


def test_relabelling_test_of_plain_arrays():
    """The test takes (n, d) arrays of any kind, and their order of columns decides."""
    generator = np.random.default_rng(0)
    base, noise, stranger = generator.standard_normal((3, 300, 24))
    child = base + noise
    kin = lineage.relabelling_test(base, torch.from_numpy(child))
    C = lineage.relation(lineage.fingerprint(torch.tensor(base)), lineage.fingerprint(torch.tensor(child)))
    assert kin["z"] == pytest.approx(diagonal_test(C, ("relabel", 0))["z"], rel=1e-5)  # float32
    assert kin["same"] and kin["p"] == 1e-4
    assert lineage.relabelling_test(base, stranger)["p"] > 0.01
    assert lineage.relabelling_test(base, child[:, ::-1].copy())["p"] > 0.01


@pytest.mark.parametrize("n, d", [(3, 8), (8, 2)])
def test_the_least_that_can_be_compared(n, d):
    rows = np.random.default_rng(0).standard_normal((n, d))
    result = lineage.relabelling_test(rows, rows, permutations=99)
    assert result["matched"] == pytest.approx(1, abs=1e-5)  # float32
    assert lineage.paper_test(rows, rows, top_k=1)["paper_k"] == 1
    assert lineage.paper_test(rows, rows, top_k=d)["paper_k"] == d


ROWS = np.random.default_rng(1).standard_normal((10, 4))


@pytest.mark.parametrize("test", [lineage.relabelling_test, lineage.paper_test])
@pytest.mark.parametrize(
    "a, b",
    [
        (ROWS, ROWS[:9]),
        (ROWS, ROWS[:, :3]),
        (ROWS[:2], ROWS[:2]),
        (ROWS[:, :1], ROWS[:, :1]),
        (ROWS[0], ROWS[0]),
        (ROWS, np.full_like(ROWS, np.nan)),
    ],
    ids=["rows", "columns", "two rows", "one column", "a vector", "NaN"],
)
def test_unlike_rows_are_refused(test, a, b):
    with pytest.raises(UserError, match="expected two|not finite"):
        test(a, b)


# ---- coordinates of weights --------------------------------------------------------------------------------


def test_streaming_correlation_against_numpy():
    generator = np.random.default_rng(0)
    A = generator.standard_normal((9000, 6)) * [1, 1, 5, 0.01, 1, 1] + [0, 1, 0, 0.02, 0, 0]
    B = 0.5 * A[:, ::-1] + generator.standard_normal((9000, 6))
    A[:, 5] = 0.0  # constant columns, of numbers that float32 and its sums hold exactly
    B[:, 2] = 0.5
    A = torch.from_numpy(A).float()
    B = torch.from_numpy(B).float()
    assert Correlation(6).value() is None
    correlation = Correlation(6)
    correlation.update(A, B)  # longer than a batch
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(np.corrcoef(A.double().T, B.double().T)[:6, 6:])
    np.testing.assert_allclose(correlation.value(), expected, atol=2e-6)  # float32 sums of 2,048 products
    assert (correlation.value()[5] == 0).all() and (correlation.value()[:, 2] == 0).all()


def test_correlation_with_a_large_mean():
    A = 10 + 0.01 * torch.randn(3000, 4, generator=torch.Generator().manual_seed(0))
    B = A + 0.01 * torch.randn(3000, 4, generator=torch.Generator().manual_seed(1))
    correlation = Correlation(4)
    correlation.update(A, B)
    expected = np.corrcoef(A.double().T, B.double().T)[:4, 4:]
    np.testing.assert_allclose(correlation.value(), expected, atol=0.01)  # float32 leaves 4 digits of 0.01


def test_correlation_of_bfloat16_matrices():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(9000, 6, generator=generator).bfloat16()
    B = (0.3 * A.float() + torch.randn(9000, 6, generator=generator)).bfloat16()
    expected = np.corrcoef(A.double().T, B.double().T)[:6, 6:]
    both = Correlation(6)
    both.update(A, B)
    np.testing.assert_allclose(both.value(), expected, atol=2**-9)  # each is rounded to 8 bits, and below 1
    mixed = Correlation(6)
    mixed.update(A, B.float())
    np.testing.assert_allclose(mixed.value(), expected, atol=2e-6)  # float32 products


def stacked_correlation(sources, kind: str, left_out: list[str]) -> np.ndarray:
    """Correlations of the residual coordinates, from all rows of both models at once."""
    stacks = ([], [])
    for name, shape in sources[0].shapes.items():
        in_blocks = name.startswith("model.layers.")
        if len(shape) != 2 or in_blocks != (kind == "body") or name in left_out:
            continue
        weights = [source.read(name).double().numpy() for source in sources]
        if "o_proj" in name or "down_proj" in name:
            weights = [weight.T for weight in weights]
        rows = min(len(weight) for weight in weights)
        for stack, weight in zip(stacks, weights):
            centred = weight[:rows] - weight[:rows].mean(axis=0)
            stack.append(centred / (centred**2).mean() ** 0.5)
    a, b = (np.concatenate(stack) for stack in stacks)
    d = a.shape[1]
    return np.corrcoef(a.T, b.T)[:d, d:]


ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def matrices(layers, kinds: list[str]) -> list[str]:
    """The names of some layers' matrices."""
    return [f"model.layers.{layer}.{kind}.weight" for layer in layers for kind in kinds]


@pytest.mark.parametrize(
    "changes, left_out",
    [
        ({}, []),
        (dict(d_ff=40), matrices(range(3), MLP)),
        (dict(num_layers=2), matrices([2], ATTENTION + MLP)),
        (dict(tie_embeddings=True), ["lm_head.weight"]),
        (dict(vocab_size=70), []),
        (dict(num_kv_heads=1), matrices(range(3), ATTENTION[1:3])),
        (dict(mlp="gelu", num_layers=2), matrices([2], ATTENTION + MLP) + matrices([0, 1], MLP[:1])),
    ],
    ids=["alike", "d_ff", "layers", "tied", "vocabulary", "heads", "several"],
)
def test_weight_correlations_against_a_stack(changes, left_out):
    a = noised(Newborn(KINDS["llama_gqa"], 1), 0.5)
    b = Newborn(replace(KINDS["llama_gqa"], **changes), 1)
    for pair in ((a, b), (b, a)):
        correlations, skipped = lineage.weight_correlations(*pair)
        assert sorted(skipped) == sorted(left_out)
        for kind in ("body", "embedding"):
            expected = stacked_correlation(pair, kind, left_out)
            np.testing.assert_allclose(correlations[kind], expected, atol=2e-6)  # float32 products


def test_no_matrix_in_common():
    a = Newborn(KINDS["llama"], 1)
    b = Newborn(replace(KINDS["llama"], head_dim=4, d_ff=40), 1)
    correlations, skipped = lineage.weight_correlations(a, b)
    assert set(correlations) == {"embedding"} and len(skipped) == 3 * 7
    tests, verdict, _ = compare(a, b)
    assert set(tests) == {"relabel", "embedding", "any_order"}
    assert verdict.startswith("inconclusive")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_weights_are_refused(value):
    newborn = Newborn(KINDS["llama"], 1)

    def change(name, weight):
        if name != "model.layers.1.mlp.up_proj.weight":
            return weight
        return weight.index_fill(0, torch.tensor([3]), value)

    broken = Altered(newborn, change)
    for pair in ((broken, newborn), (newborn, broken)):
        with pytest.raises(UserError, match="not finite"):
            lineage.weight_correlations(*pair)
        with pytest.raises(UserError, match="not finite"):
            gram_test(lineage.neuron_grams(*pair, 3), ("a", 1))


# ---- Gram matrices -----------------------------------------------------------------------------------------


def save_perturbed(folder: Path, config: ModelConfig = CONFIG) -> folders.Weights:
    """A newborn whose gains and biases are no longer 1 and 0."""
    model = init.newborn(config, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    checkpoint.save(folder, model)
    return open_folder(folder)


def without_diagonal(gram: np.ndarray) -> np.ndarray:
    """A matrix whose diagonal is 0, the rest centred."""
    off = ~np.eye(len(gram), dtype=bool)
    return np.where(off, gram - gram[off].mean(), 0)


@pytest.mark.parametrize("units", [96, 40])  # all, and the first 40
def test_neuron_gram_by_hand(units, tmp_path):
    source = save_perturbed(tmp_path / "a")
    prefix = "model.layers.1."
    weights = {name: source.read(prefix + name + ".weight").double().numpy() for name in MLP}
    gain = source.read(prefix + "post_attention_layernorm.weight").double().numpy()
    gram = 0
    for rows in (weights[MLP[0]] * gain, weights[MLP[1]] * gain, weights[MLP[2]].T):
        W = rows[:units]
        ridge = np.trace(W.T @ W) / 64 * np.eye(64)
        gram = gram + W @ np.linalg.inv(W.T @ W + ridge) @ W.T
    # float32 numbers of up to 1, from a solve whose condition is at most that of W'W + ridge, below 10
    np.testing.assert_allclose(lineage.neuron_gram(source, 1, units), without_diagonal(gram), atol=3e-6)


def test_coordinate_gram_by_hand(tmp_path):
    source = save_perturbed(tmp_path / "a")
    gram = np.zeros((64, 64))
    for name in matrices(range(3), ATTENTION + MLP):
        weight = source.read(name).double().numpy()
        if "o_proj" in name or "down_proj" in name:
            weight = weight.T
        gram += weight.T @ weight / (weight**2).sum()
    np.testing.assert_allclose(
        lineage.coordinate_gram(source, 9), without_diagonal(gram), atol=1e-6
    )  # float32


@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, tie_embeddings=True, qkv_bias=True)], ids=["untied", "tied"]
)
def test_grams_do_not_see_what_they_should_not(config, tmp_path):
    base = save_perturbed(tmp_path / "a", config)
    children = {}
    for way in WAYS:
        evade(way, tmp_path / "a", tmp_path / way, seed=3)
        children[way] = open_folder(tmp_path / way)
    for layer in range(3):
        gram = lineage.neuron_gram(base, layer)
        for way in ("rotate", "permute"):  # float32 rounding of entries of 0.01 or so
            torch.testing.assert_close(lineage.neuron_gram(children[way], layer), gram, rtol=0, atol=1e-7)
        assert not torch.allclose(lineage.neuron_gram(children["neurons"], layer), gram, rtol=0, atol=1e-3)
    gram = lineage.coordinate_gram(base, 9)  # entries of 0.1
    torch.testing.assert_close(lineage.coordinate_gram(children["neurons"], 9), gram, rtol=0, atol=1e-6)
    assert not torch.allclose(lineage.coordinate_gram(children["permute"], 9), gram, rtol=0, atol=1e-3)


def test_gram_test_by_brute_force():
    """Mantel's statistic of every permutation, and its share of them at least as large."""
    generator = np.random.default_rng(0)
    a, b = (lineage.off_diagonal(torch.from_numpy(x + x.T)) for x in generator.standard_normal((2, 6, 6)))
    b = lineage.off_diagonal(b + 0.2 * a)
    result = gram_test([(a, b)], ("a", 1), 4999)
    off = ~np.eye(6, dtype=bool)
    assert result["correlation"] == pytest.approx(np.corrcoef(a[off], b[off])[0, 1], rel=1e-9)  # float64
    sums = []
    for order in itertools.permutations(range(6)):
        sums.append((a.numpy() * b.numpy()[np.ix_(order, order)]).sum())
    share = (sums >= sums[0] - 1e-9).mean()
    # the errors of 4,999 draws, and 3e-3 for ties that float64 breaks
    assert result["p"] == pytest.approx(share, abs=four_errors(share, 4999) + 3e-3)
    # the errors of these draws' mean and standard deviation
    assert result["z"] == pytest.approx((sums[0] - np.mean(sums)) / np.std(sums), abs=0.15)
    assert result == gram_test([(a, b)], ("a", 1), 4999)


def test_p_of_newborn_strangers_is_uniform():
    results = {"body": [], "neurons": [], "coordinates": []}
    for i in range(120):
        a = Newborn(SMALLEST, 2 * i)
        b = Newborn(SMALLEST, 2 * i + 1)
        grams = (lineage.coordinate_gram(a, 9), lineage.coordinate_gram(b, 9))
        correlations, _ = lineage.weight_correlations(a, b)
        results["body"].append(diagonal_test(correlations["body"], ("body", i), 199))
        results["neurons"].append(gram_test(lineage.neuron_grams(a, b, 4), ("neurons", i)))
        results["coordinates"].append(gram_test([grams], ("coordinates", i)))
    for tests in results.values():
        assert_uniform([test["p"] for test in tests])
        z = np.array([test["z"] for test in tests])
        assert abs(z.mean()) < 4 / 120**0.5 and 0.74 < z.std() < 1.26  # four errors of 120 values
        assert not any(test["same"] for test in tests)


def test_gram_z_of_a_noised_copy():
    a = Newborn(CONFIG, 1)
    b = noised(a, 0.5)
    coordinates = (lineage.coordinate_gram(a, 9), lineage.coordinate_gram(b, 9))
    for pairs in (lineage.neuron_grams(a, b, 4), [coordinates]):
        result = gram_test(pairs, ("a", 1))
        assert result["z"] > 10 and result["p"] == 0.01 and result["same"]


def test_few_permutations_make_no_birth():
    """Two permutations have a standard deviation by chance near 0: its Student's tail knows."""
    grams = [lineage.coordinate_gram(Newborn(SMALLEST, seed), 9) for seed in range(120)]
    for i, pair in enumerate(zip(grams[::2], grams[1::2])):
        assert not gram_test([pair], ("few", i), 2)["same"]


def test_an_outlier_coordinate_makes_no_birth():
    """Trained models have a few large coordinates; where two coincide, plain Gram matrices are fooled."""
    config = ModelConfig(97, 64, 1, 2, 32, 64)
    large = torch.ones(32)
    large[3] = 12.0

    def enlarge(name, weight):
        if "down_proj" in name:
            return weight * large[:, None]
        return weight * large if weight.ndim == 2 else weight

    for seed in range(100):
        a = Altered(Newborn(config, 2 * seed), enlarge)
        b = Altered(Newborn(config, 2 * seed + 1), enlarge)
        assert not gram_test(lineage.neuron_grams(a, b, 1), ("outlier", seed))["same"]


@pytest.mark.parametrize(
    "depth, count, layers", [(3, 4, [0, 1, 2]), (5, 3, [0, 2, 4]), (12, 4, [0, 4, 7, 11]), (1, 4, [0])]
)
def test_layers_are_evenly_spaced(depth, count, layers):
    assert lineage.evenly_spaced_layers(depth, count) == layers


def test_neurons_of_layers_that_both_have():
    a = Newborn(SMALLEST, 1)
    b = Newborn(replace(SMALLEST, num_layers=9), 1)
    for pair in ((a, b), (b, a)):
        grams = list(lineage.neuron_grams(*pair, 4))
        assert len(grams) == 2  # q, k, v, gate and up of two depths are the same; down differs by a scale
        for first, second in grams:
            assert np.corrcoef(first.flatten(), second.flatten())[0, 1] > 0.99


# ---- children ----------------------------------------------------------------------------------------------


def tuned(model: Transformer, steps: int = 40) -> Transformer:
    """A few steps of AdamW on random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(50, (4, 17), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    """A base that has been trained a little."""
    folder = tmp_path_factory.mktemp("base") / "a"
    checkpoint.save(folder, tuned(init.newborn(CONFIG, 1), 20))
    return folder


@pytest.fixture(scope="module")
def base(base_folder):
    """Its source."""
    return open_folder(base_folder)


def pruned(weight: torch.Tensor) -> torch.Tensor:
    """The larger half of the weights."""
    return weight.where(weight.abs() > weight.abs().median(), 0)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """To int8, with a scale for each row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


CHANGES = {
    "identical": torch.clone,
    "scaled": lambda weight: 3 * weight,
    "pruned": pruned,
    "bfloat16": torch.Tensor.bfloat16,
    "int8": rounded,
}


@pytest.mark.parametrize("name", CHANGES)
def test_altered_weights_are_recognised(base, name):
    def change(_, weight):
        return CHANGES[name](weight) if weight.ndim == 2 else weight

    tests, *verdict = compare(base, Altered(base, change))
    assert verdict == ["same birth", BLOCKS] and tests["body"]["p"] == 0.001
    if name in ("identical", "scaled"):
        assert tests["body"]["matched"] == pytest.approx(1, abs=1e-5)  # float32 sums


def test_noised_weights_are_recognised_either_way_round(base):
    for pair in ((base, noised(base, 0.5)), (noised(base, 0.5), base)):
        tests, verdict, _ = compare(*pair)
        assert verdict == "same birth"
        assert tests["body"]["matched"] == pytest.approx(1.25**-0.5, abs=0.02)  # if all columns were alike


def grown(model: Transformer, **changes) -> Transformer:
    """The model's weights, by name, in a newborn of another shape: the beginning of what is longer there."""
    other = init.newborn(replace(model.config, **changes), 999)
    weights = model.state_dict()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name in weights:
                part = tuple(slice(min(sizes)) for sizes in zip(parameter.shape, weights[name].shape))
                parameter[part] = weights[name][part]
    return other


def without_layer(model: Transformer, gone: int) -> Transformer:
    """The model without one of its layers: those above it move down."""
    other = init.newborn(replace(model.config, num_layers=model.config.num_layers - 1), 999)
    other.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    other.model.norm.load_state_dict(model.model.norm.state_dict())
    other.lm_head.load_state_dict(model.lm_head.state_dict())
    kept = [block for layer, block in enumerate(model.model.layers) if layer != gone]
    for block, old in zip(other.model.layers, kept):
        block.load_state_dict(old.state_dict())
    return other


SHAPES = {
    "more tokens": dict(vocab_size=337),
    "fewer tokens": dict(vocab_size=200),
    "narrower MLP": dict(d_ff=80),
    "narrower MLP, fewer heads": dict(d_ff=80, num_heads=3, num_kv_heads=1, head_dim=16),
}
# Nothing is in the place where it was: what is left looks like a transplanted table, trained.
UNMATCHED = ("narrower MLP, fewer heads", "without layer 0")


@pytest.mark.parametrize("name", ["tuned", *SHAPES, "without layer 0", "without layer 1", "without layer 2"])
def test_rebuilt_models_are_recognised(base, base_folder, name, tmp_path):
    model = checkpoint.load(str(base_folder))
    if name in SHAPES:
        model = grown(model, **SHAPES[name])
    elif name == "tuned":
        model = tuned(model)
    else:
        model = without_layer(model, int(name[-1]))
    checkpoint.save(tmp_path / "b", model)
    tests, verdict, _ = compare(base, open_folder(tmp_path / "b"))
    if name in UNMATCHED:
        assert verdict.startswith("inconclusive") and tests["any_order"]["z"] > 10, tests
    else:
        assert verdict == "same birth", tests


def test_blocks_that_do_nothing():
    """A model deepened by a block whose outputs are zero, as LLaMA Pro is: by kin, and by a stranger."""
    outputs = ("model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj")

    def silence(name, weight):
        return torch.zeros_like(weight) if name.startswith(outputs) else weight

    deep = Altered(Newborn(CONFIG, 1), silence)
    assert compare(Newborn(CONFIG, 1), deep)[1] == "same birth"
    assert compare(Newborn(CONFIG, 2), deep)[1] != "same birth"
    assert gram_test(lineage.neuron_grams(Newborn(CONFIG, 1), deep, 4), ("a", 1))["same"]


# ---- evasions ----------------------------------------------------------------------------------------------

KINDS_OF_THIEF = {
    "gqa": {},
    "tied_qwen2": dict(tie_embeddings=True, qkv_bias=True),
    "qwen3": dict(qk_norm=True, head_dim=20),
}


@pytest.mark.parametrize("name", KINDS_OF_THIEF)
@pytest.mark.parametrize("way", WAYS)
def test_evasions_keep_the_logits_and_are_seen_through(name, way, tmp_path):
    base = save_perturbed(tmp_path / "a", replace(CONFIG, **KINDS_OF_THIEF[name]))
    evade(way, tmp_path / "a", tmp_path / "b", seed=5)
    tokens = random_tokens(1, range(3), 20, 300)
    with torch.inference_mode():
        logits = [checkpoint.load(str(tmp_path / folder))(tokens) for folder in "ab"]
    # float32 rounding of the weights and of sums of 64 to 96 terms; the logits are of order 0.2
    torch.testing.assert_close(*logits, rtol=0, atol=3e-6)
    tests, verdict, reason = compare(base, open_folder(tmp_path / "b"))
    assert tests["body"]["z"] < 4.5  # matched by their places, these weights are a stranger's
    if way == "neurons":
        # The states are what they were; a transplanted table, trained, would look the same.
        assert tests["relabel"]["z"] > 30 and tests["embedding"]["z"] > 30 and tests["any_order"]["z"] > 10
        assert verdict.startswith("inconclusive") and "order" in reason
    else:
        assert (verdict, reason) == ("same birth", HIDDEN_UNITS)
        assert tests["basis_free"]["p"] == 0.01 and tests["basis_free"]["z"] > 10


def test_evade_as_a_script(tmp_path):
    save_perturbed(tmp_path / "a")
    words = ["permute", tmp_path / "a", tmp_path / "b", "--seed", "4"]
    script = [sys.executable, ROOT / "tests" / "evade.py", *words]
    process = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    evade("permute", tmp_path / "a", tmp_path / "c", seed=4)
    b, c = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in "bc")
    assert b.keys() == c.keys() and all(torch.equal(b[name], c[name]) for name in b)


# ---- strangers ---------------------------------------------------------------------------------------------


def test_strangers_are_strangers(base):
    for seed in range(2, 8):
        tests, verdict, _ = compare(base, Newborn(CONFIG, seed))
        assert verdict != "same birth" and "any_order" in tests, tests
        assert abs(tests["body"]["z"]) < 4.5 and abs(tests["embedding"]["z"]) < 4.5


@pytest.mark.parametrize(
    "sublayers", [("attention", "attention"), ("attention", "full"), ("full", "attention")]
)
def test_strangers_of_attention_alone(sublayers):
    a, b = (Newborn(replace(CONFIG, sublayers=kind), seed) for seed, kind in enumerate(sublayers))
    tests, verdict, _ = compare(a, b)
    assert verdict == "no evidence" and "basis_free" not in tests


@pytest.mark.parametrize("tables", [TABLES[:1], TABLES], ids=["table", "both"])
def test_a_transplanted_table_is_no_birth(base, tables):
    def transplant(name, weight):
        return base.read(name) if name.startswith(tables) else weight

    tests, verdict, reason = compare(base, Altered(Newborn(CONFIG, 2), transplant))
    assert verdict == "no evidence" and "embedding" in reason
    assert tests["embedding"]["p"] == 0.001 and tests["embedding"]["z"] > 10
    assert abs(tests["body"]["z"]) < 4.5


@pytest.mark.parametrize("case", ["kept", "drifted", "reordered"])
def test_a_transplanted_table_is_no_birth_after_training(base_folder, case, tmp_path):
    """The table ties the coordinates of strangers, and training writes what they share into the blocks.

    So it is with a table that has drifted since, and with one whose tokens come in another order.
    """
    first = checkpoint.load(str(base_folder))
    if case == "drifted":
        tuned(first, 40)
    second = init.newborn(CONFIG, 2)
    second.model.embed_tokens.load_state_dict(first.model.embed_tokens.state_dict())
    tuned(second, 100)
    if case == "reordered":
        for table in (second.model.embed_tokens, second.lm_head):
            table.weight.data = table.weight.data.roll(17, dims=0)
    for name, model in (("a", first), ("b", second)):
        checkpoint.save(tmp_path / name, model)
    tests, verdict, _ = compare(open_folder(tmp_path / "a"), open_folder(tmp_path / "b"))
    assert abs(tests["body"]["z"]) < 4.5 and abs(tests["basis_free"]["z"]) < 4.5
    assert verdict != "same birth", tests


def test_seeds_of_tables_and_blocks_apart():
    """Newborns that share the seed of their tables, and newborns that share the others."""
    _, verdict, reason = compare(Newborn(CONFIG, 1, 9), Newborn(CONFIG, 2, 9))
    assert verdict == "no evidence" and "embedding" in reason
    assert compare(Newborn(CONFIG, 1, 8), Newborn(CONFIG, 1, 9))[1:] == ("same birth", BLOCKS)


# ---- the verdict -------------------------------------------------------------------------------------------

OUTCOMES = {
    "same": {"same": True, "p": 1e-4},
    "between": {"same": False, "p": 1e-3},
    "nothing": {"same": False, "p": 0.5},
}
TESTS = ("relabel", "body", "embedding", "basis_free", "any_order")
STRENGTH = {"no evidence": 0, "inconclusive": 1, "same birth": 2}


def verdict_of(**outcomes: str | None) -> str:
    """The verdict, in two words, of tests that came out so; a test of None was not made."""
    tests = {name: OUTCOMES[outcome] for name, outcome in outcomes.items() if outcome is not None}
    verdict, reason = lineage.verdict(tests)
    assert reason
    return verdict.split(":")[0]


def every_combination():
    """What the five tests may say, together; only `relabel` is always made."""
    choices = [list(OUTCOMES), *[[None, *OUTCOMES]] * 4]
    for combination in itertools.product(*choices):
        yield dict(zip(TESTS, combination))


@pytest.mark.parametrize(
    "outcomes, verdict",
    [
        ("same same same same same", "same birth"),
        ("same same same nothing same", "inconclusive"),
        ("same same same - same", "same birth"),  # nothing else to ask
        ("nothing same nothing - -", "same birth"),
        ("nothing nothing nothing same nothing", "same birth"),
        ("same nothing same nothing nothing", "no evidence"),
        ("same nothing same nothing same", "inconclusive"),
        ("same between same nothing nothing", "inconclusive"),
        ("nothing nothing nothing nothing same", "inconclusive"),
        ("same nothing nothing nothing nothing", "inconclusive"),
        ("between nothing nothing nothing nothing", "inconclusive"),
        ("nothing - same - nothing", "inconclusive"),
        ("nothing nothing nothing - nothing", "no evidence"),
        ("nothing - nothing nothing nothing", "no evidence"),
        ("nothing nothing nothing nothing nothing", "no evidence"),
    ],
)
def test_verdicts(outcomes, verdict):
    words = [None if word == "-" else word for word in outcomes.split()]
    assert verdict_of(**dict(zip(TESTS, words))) == verdict


def test_same_birth_rests_on_weights_alone():
    """On hidden units, or on blocks that no transplanted table can have tied."""
    for outcomes in every_combination():
        units = outcomes["basis_free"]
        table_may_tie = outcomes["embedding"] == "same" and units is not None
        expected = units == "same" or (outcomes["body"] == "same" and not table_may_tie)
        assert (verdict_of(**outcomes) == "same birth") == expected, outcomes


def test_no_evidence_is_said_of_blocks_that_were_compared():
    for outcomes in every_combination():
        if verdict_of(**outcomes) == "no evidence":
            assert outcomes["body"] or outcomes["basis_free"], outcomes
            assert outcomes["body"] not in ("same", "between"), outcomes
            assert "same" not in (outcomes["basis_free"], outcomes["any_order"]), outcomes
            assert outcomes["relabel"] == "nothing" or outcomes["embedding"] == "same", outcomes


@pytest.mark.parametrize("name", ["relabel", "body", "basis_free", "any_order"])
def test_more_likeness_never_weakens_a_verdict(name):
    for outcomes in every_combination():
        verdicts = [verdict_of(**outcomes | {name: word}) for word in ("nothing", "between", "same")]
        strengths = [STRENGTH[verdict] for verdict in verdicts]
        assert strengths == sorted(strengths), outcomes


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
    taus = lineage.kendall(a, b, np.array([0, 3, 5, 7]))
    expected = [1, 0, tau_b(a[:, 5], b[:, 5]), tau_b(a[:, 7], b[:, 7])]
    np.testing.assert_allclose(taus, expected, atol=1e-12)  # float64
    plain = [scipy.stats.kendalltau(a[:, j], b[:, j]).statistic for j in (0, 5, 7)]
    np.testing.assert_allclose(taus[[0, 2, 3]], plain, atol=1e-12)
    assert lineage.kendall(a, b, np.array([], dtype=int)).shape == (0,)


def softened(rows: np.ndarray, temperature: float) -> np.ndarray:
    """Softmax over the columns."""
    exponentials = np.exp(rows / temperature)
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def test_kendall_of_a_softmax():
    a = normal(1, 25, 9)
    b = normal(2, 25, 9)
    chosen = np.array([1, 2, 6])
    soft_a = softened(a[:, chosen], 10)
    soft_b = softened(b[:, chosen], 10)
    expected = [tau_b(soft_a[:, j], soft_b[:, j]) for j in range(3)]
    np.testing.assert_allclose(lineage.kendall(a, b, chosen, 10.0), expected, atol=1e-12)  # float64
    assert not np.allclose(lineage.kendall(a, b, chosen), expected)


def test_sides_and_ties_of_the_means():
    rows = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 4, 1, 5, 1]], dtype=np.float32)  # means 2.5 3.5 4 1 5 5
    assert lineage.top_dimensions(rows, "top", 3).tolist() == [4, 5, 2]
    assert lineage.top_dimensions(rows, "bottom", 3).tolist() == [3, 0, 1]
    assert sorted(lineage.top_dimensions(rows, "top", 6)) == list(range(6))


@pytest.mark.parametrize(
    "side, top_k, temperature", [("top", None, None), ("bottom", 20, None), ("top", 25, 10.0)]
)
def test_paper_test_by_hand(side, top_k, temperature):
    n = 60
    d = 50
    a = normal(3, n, d)
    b = 0.7 * a + normal(4, n, d)  # columns correlate by 0.57
    result = lineage.paper_test(a, b, side, top_k, temperature)
    k = top_k or 25
    sign = 1 if side == "top" else -1
    chosen = [np.argsort(-sign * rows.mean(axis=0))[:k] for rows in (a, b)]
    chosen = sorted(set(chosen[0]) & set(chosen[1]))
    a = a[:, chosen]
    b = b[:, chosen]
    if temperature:
        a = softened(a, temperature)
        b = softened(b, temperature)
    taus = [scipy.stats.kendalltau(x, y).statistic for x, y in zip(a.T, b.T)]
    # Ranks of float32 and of float64 numbers are the same: what follows is float64.
    assert result["paper_k"] == len(chosen)
    assert result["paper_mean_tau"] == pytest.approx(np.mean(taus), rel=1e-9)
    error = np.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)) / len(chosen))
    assert result["closed_form_z"] == pytest.approx(np.mean(taus) / error, rel=1e-9)
    t_p = []
    u_p = []
    for trial in range(10):
        null = lineage.null_taus(n, d, side, k, temperature, trial)
        t_p.append(scipy.stats.ttest_ind(taus, null, alternative="greater").pvalue)
        u_p.append(scipy.stats.mannwhitneyu(taus, null, alternative="greater").pvalue)
    assert result["paper_t_p"] == pytest.approx(np.mean(t_p), rel=1e-6)
    assert result["paper_u_p"] == pytest.approx(np.mean(u_p), rel=1e-6)
    assert result["paper_t_p"] < 0.01


def test_the_null_is_of_independent_gaussians():
    trials = [lineage.null_taus(40, 60, "top", 30, None, trial) for trial in range(40)]
    taus = np.concatenate(trials)
    assert len(taus) == pytest.approx(40 * 15, rel=0.1)  # half of 30 meet, up to 4 errors of about 0.02
    expected = (2 * 85 / (9 * 40 * 39)) ** 0.5
    assert lineage.kendall_std(40) == pytest.approx(expected, rel=1e-12)
    assert abs(taus.mean()) < 4 * expected / len(taus) ** 0.5
    assert taus.std() == pytest.approx(expected, rel=4 / (2 * len(taus)) ** 0.5)  # four errors
    assert len({tuple(trial) for trial in trials}) == 40  # each has draws of its own


@pytest.mark.parametrize("taus", [np.zeros(0), np.array([0.9])])
def test_too_few_dimensions_say_nothing(taus):
    result = lineage.judge_taus(taus, 50, 40, "top", 20, None)
    assert (result["paper_t_p"], result["paper_u_p"], result["paper_k"]) == (1.0, 1.0, len(taus))


def test_tops_that_do_not_meet():
    a = normal(5, 10, 4) + [9, 9, 0, 0]
    b = normal(6, 10, 4) + [0, 0, 9, 9]
    assert lineage.identity_taus(a, b, "top", 2).shape == (0,)
    assert lineage.paper_test(a, b, top_k=2)["paper_t_p"] == 1.0


@pytest.mark.parametrize("top_k", [0, 5, -1])
def test_top_k_outside_the_width_is_refused(top_k):
    with pytest.raises(UserError, match="top-k"):
        lineage.paper_test(ROWS, ROWS, top_k=top_k)


def test_paper_test_of_identical_models_and_of_strangers():
    tokens = random_tokens(0, range(150), 12, 300)
    outputs = [final_states(Newborn(CONFIG, seed), tokens, last_only=True) for seed in range(8)]
    same = lineage.paper_test(outputs[0], outputs[0].clone())
    assert same["paper_k"] == 32 and same["paper_mean_tau"] == pytest.approx(1, abs=1e-12)  # float64
    assert same["paper_t_p"] < 1e-50 and same["paper_u_p"] < 1e-5 and same["closed_form_z"] > 50
    strangers = [lineage.paper_test(a, b) for a, b in itertools.combinations(outputs, 2)]
    for name in ("paper_t_p", "paper_u_p"):
        p = np.array([test[name] for test in strangers])
        assert p.min() > 1e-4 and p.max() > 0.5, p  # 28 values, which depend on each other
    z = np.array([test["closed_form_z"] for test in strangers])
    assert abs(z).max() < 4.5 and abs(z.mean()) < 1


# ---- memory ------------------------------------------------------------------------------------------------

MEMORY = """
import ctypes, json, pathlib, sys, threading
import safetensors.torch, torch
from lib import checkpoint, folders
from lib.inputs import random_tokens
from measure import lineage
from model import ModelConfig

torch.set_num_threads(1)
config = ModelConfig(2000, 64, 32, 4, 256, 2048)
generator = torch.Generator().manual_seed(0)
parent = pathlib.Path(sys.argv[1])
weights = {}
for name, shape in folders.parameter_shapes(config).items():
    weights[name] = torch.zeros(shape) if len(shape) == 2 else torch.ones(shape)
size = 4 * sum(weight.numel() for weight in weights.values())
for name in ("base", "child"):
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoint.config_json(config)))
    for weight in weights.values():
        if weight.ndim == 2:
            weight += torch.empty(weight.shape).uniform_(-0.02, 0.02, generator=generator)
    half = {name: weight.bfloat16() for name, weight in weights.items()}
    safetensors.torch.save_file(half, folder / "model.safetensors")
del weights, weight, half
ctypes.CDLL("libc.so.6").malloc_trim(0)  # what writing left behind


def resident():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])


def watch():
    while not done.wait(0.02):
        peaks.append(resident())


lineage.relation(torch.ones(8, 8), torch.ones(8, 8))  # a library's first product allocates
before = resident()
peaks = []
done = threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
sources = [checkpoint.parse_spec(str(parent / name)).open() for name in ("base", "child")]
tokens = random_tokens(0, range(2), 16, 2000)
prints = [lineage.fingerprint(checkpoint.final_states(source, tokens).flatten(0, 1)) for source in sources]
tests, _, _ = lineage.compare_sources(*sources, prints, 0, 99, 19, 1)
done.set()
watcher.join()
print(json.dumps({"verdict": lineage.verdict(tests)[0], "growth": max(peaks) - before, "size": size}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_one_block_at_a_time_is_in_memory(tmp_path):
    """Two models of 0.24 GB each in float32 are compared in a fraction of it; pages of files not counted."""
    script = [sys.executable, "-c", MEMORY, tmp_path]
    process = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["verdict"] == "same birth" and result["size"] > 2e8
    assert result["growth"] < 0.5 * result["size"], result  # a block is 1/32 of a model
