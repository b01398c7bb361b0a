"""reproduce/errors.py: strangers by the dozen at a tiny size, and the interval over births by brute force."""

import itertools

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import assert_refused, run_here

from lib.checkpoint import Newborn, final_states
from lib.files import read_json
from lib.inputs import random_tokens, random_vectors
from measure import lineage
from measure.census import Units, unit_census
from measure.cosines import wilson
from model import PRESETS, ModelConfig
from reproduce import errors
from reproduce.errors import Settings, interval_over_births
from seedprint import PaperSettings, last_outputs

SMALL = ModelConfig(97, 64, 2, 2, 32, 48)
CPU = {"device": "cpu", "dtype": "float32"}
FLAGS = ["--model", "tiny_llama", "--schemes", "gpt2", "normal", "--num-births", 5, "--trap-births", 3]
FLAGS += ["--paper-sequences", 20, "--paper-length", 8, "--num-sequences", 2, "--sequence-length", 16]
FLAGS += ["--permutations", 99, "--dtype", "float32"]


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    """A preset of tiny_llama's name whose newborns take milliseconds."""
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)


# ---- error rates -------------------------------------------------------------------------------------------


def test_rows_and_figures(tmp_path):
    done = run_here("reproduce.errors", *FLAGS, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
    result = read_json(tmp_path / "errors.json")
    state_tests = ("relabelling", "t-test", "U-test", "closed form")
    expected = set(itertools.product(state_tests, errors.STATE_INPUTS, ("gpt2", "normal")))
    expected |= {(test, "weights", "gpt2") for test in ("weights", "token tables", "units")}
    assert {(row["test"], row["inputs"], row["scheme"]) for row in result["rows"]} == expected
    assert len(result["rows"]) == len(expected)
    for row in result["rows"]:
        assert row["model"] == "tiny_llama"
        assert row["num_pairs"] == (3 if row["inputs"] in ("shared embedding", "gaussian") else 10)
        assert row["rate"] == row["rejections"] / row["num_pairs"]
        assert 0 <= row["low"] <= row["rate"] <= row["high"] <= 1
        if row["test"] == "units":
            assert 0 < row["largest_share"] < 0.2
        else:
            assert 0 <= row["ks_p"] <= 1
        if row["test"] not in errors.PAPER_TESTS:
            rate = scipy.stats.binomtest(row["rejections"], row["num_pairs"])
            interval = rate.proportion_ci(0.99, method="wilson")
            assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), abs=1e-12)


@pytest.mark.parametrize("inputs", ["shared embedding", "gaussian"])
def test_relabelling_p_by_hand(inputs):
    settings = Settings(trap_births=5, num_sequences=3, sequence_length=9, permutations=49, **CPU)
    newborns = errors.strangers("tiny_llama", "normal", inputs, settings)
    p = errors.relabelling_p(newborns, inputs, settings)["relabelling"]
    given = random_vectors(0, range(3), 9, 32) if inputs == "gaussian" else random_tokens(0, range(3), 9, 97)
    table_seed = 0 if inputs == "shared embedding" else None
    prints = []
    for seed in range(1, 6):
        states = final_states(Newborn(SMALL, seed, table_seed, "normal"), given)
        prints.append(lineage.fingerprint(states.flatten(0, 1)).double())
    expected = []
    for i, j in itertools.combinations(range(5), 2):
        expected.append(lineage.diagonal_test(prints[i].T @ prints[j], (0, i, j), 49)["p"])
    np.testing.assert_allclose(p, expected, atol=1e-12)


@pytest.mark.parametrize("inputs, kind", [("own embedding", "tokens"), ("gaussian", "gaussian")])
def test_paper_p_by_hand(inputs, kind):
    settings = Settings(num_births=3, trap_births=3, paper_sequences=30, paper_length=9, **CPU)
    newborns = errors.strangers("tiny_llama", "gpt2", inputs, settings)
    p = errors.paper_p(newborns, inputs, settings)
    reading = PaperSettings(inputs=kind, paper_sequences=30, paper_length=9, **CPU)
    outputs = [last_outputs(Newborn(SMALL, seed), 97, reading) for seed in (1, 2, 3)]
    for pair, (i, j) in enumerate(((0, 1), (0, 2), (1, 2))):
        test = lineage.paper_test(outputs[i], outputs[j])
        assert p["t-test"][pair] == test["paper_t_p"]
        assert p["U-test"][pair] == test["paper_u_p"]
        assert p["closed form"][pair] == pytest.approx(scipy.stats.norm.sf(test["closed_form_z"]), rel=1e-12)


def test_strangers_are_rejected_as_often_as_they_should():
    """On rows through its own embedding, p is uniform; on inputs that strangers share, it is not.

    What is added to a residual stream stays in its coordinate: shared vectors name the coordinates.
    """
    settings = Settings(
        num_births=22, trap_births=5, num_sequences=4, sequence_length=16, permutations=199, **CPU
    )
    for inputs in errors.STATE_INPUTS:
        newborns = errors.strangers("tiny_llama", "gpt2", inputs, settings)
        p = errors.relabelling_p(newborns, inputs, settings)["relabelling"]
        # p comes in steps of 1/200, below the distance of 0.13 that 231 values could prove at 0.001
        if inputs == "own embedding":
            assert scipy.stats.kstest(p, "uniform").pvalue > 0.001
        else:
            assert (p == 1 / 200).all()


def test_weights_p_by_hand():
    settings = Settings(num_births=4, permutations=49)
    newborns = errors.strangers("tiny_llama", "normal", "weights", settings)
    p = errors.weights_p(newborns, settings)
    rows = [scaled_rows(Newborn(SMALL, seed, None, "normal")) for seed in range(1, 5)]
    expected = {"weights": [], "token tables": []}
    for i, j in itertools.combinations(range(4), 2):
        for test, a, b in zip(expected, rows[i], rows[j]):
            C = np.corrcoef(a.T, b.T)[:32, 32:]
            expected[test].append(lineage.diagonal_test(torch.from_numpy(C), (0, i, j), 49)["p"])
    assert {test: values.tolist() for test, values in p.items()} == expected


def test_units_rate_by_hand():
    settings = Settings(num_births=4, units=20, layers=2)
    newborns = errors.strangers("tiny_llama", "gpt2", "weights", settings)
    rejected, largest_share = errors.units_found(newborns, settings)
    models = [Units(Newborn(SMALL, seed)) for seed in range(1, 5)]
    ids = torch.arange(97)
    shares = []
    for a, b in itertools.combinations(models, 2):
        shares += [match.share for match in unit_census(a, b, (ids, ids), 20, 2).matches]
    assert largest_share == max(shares)
    assert rejected.tolist() == [False] * 6


def scaled_rows(source) -> list[np.ndarray]:
    """Rows of the blocks' matrices, and of the tables, each matrix centred and of mean square 1."""
    parts = ([], [])
    for name, shape in source.shapes.items():
        if len(shape) != 2:
            continue
        weight = source.read(name).double().numpy()
        if "o_proj" in name or "down_proj" in name:
            weight = weight.T
        centred = weight - weight.mean(axis=0)
        is_table = not name.startswith("model.layers.")
        parts[is_table].append(centred / (centred**2).mean() ** 0.5)
    return [np.concatenate(part) for part in parts]


# ---- over births -------------------------------------------------------------------------------------------


def resampled_rates(rejected: np.ndarray, births: int, resamples: int) -> np.ndarray:
    """Rates of `rejected` over all pairs of births drawn with replacement, a birth with itself left out."""
    generator = np.random.default_rng(0)
    value = dict(zip(itertools.combinations(range(births), 2), rejected))
    rates = []
    for _ in range(resamples):
        drawn = sorted(generator.integers(births, size=births))
        values = [value[i, j] for i, j in itertools.combinations(drawn, 2) if i != j]
        if values:
            rates.append(np.mean(values))
    return np.array(rates)


def test_interval_over_births_by_brute_force():
    rejected = np.random.default_rng(1).random(66) < 0.3
    low, high = interval_over_births(rejected, 12)
    rates = resampled_rates(rejected, 12, 2000)
    # 2,000 resamples know the half per cent quantile, of some ten values, within about a tenth of the width
    assert (low, high) == pytest.approx(np.quantile(rates, (0.005, 0.995)), abs=0.05)
    assert low < rejected.mean() < high
    assert interval_over_births(rejected, 12) == (low, high)


def test_interval_is_wide_when_births_decide():
    """16 births, 120 pairs, as many rejections: of two births all pairs, or of pairs at random."""
    of_two_births = np.array([i < 2 for i, _ in itertools.combinations(range(16), 2)])
    of_random_pairs = np.random.default_rng(0).permutation(of_two_births)
    wide_low, wide_high = interval_over_births(of_two_births, 16)
    low, high = interval_over_births(of_random_pairs, 16)
    assert of_two_births.sum() == of_random_pairs.sum() == 29
    assert wide_high - wide_low > 1.5 * (high - low)
    assert wide_low < 29 / 120 < wide_high
    assert low < 29 / 120 < high


@pytest.mark.parametrize("births", [3, 16])
@pytest.mark.parametrize("value", [False, True])
def test_where_all_pairs_agree(births, value):
    rejected = np.full(births * (births - 1) // 2, value)
    disjoint = births // 2
    assert interval_over_births(rejected, births) == wilson(value * disjoint, disjoint, 0.99)


# ---- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["--sequence-length", 65], ["--paper-length", 65], ["--top-k", 33]], ids=str
)
def test_mistakes(words, tmp_path):
    model = ["--model", "tiny_llama", "--out", tmp_path / "new"]
    assert_refused(run_here("reproduce.errors", *words, *model), words[0])
    assert not (tmp_path / "new" / "errors.json").exists()
