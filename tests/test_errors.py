"""reproduce/errors.py: strangers by the dozen at a tiny size, and the interval over births by brute force."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import assert_refused, run_here

import init
from lib import checkpoint
from lib.checkpoint import Newborn, final_states
from lib.files import read_json
from lib.inputs import random_tokens, random_vectors
from measure import lineage
from measure.cosines import wilson
from model import PRESETS, ModelConfig
from reproduce import errors
from reproduce.errors import RateSettings, interval_over_births
from seedprint import PaperSettings, last_outputs

SMALL = ModelConfig(97, 64, 2, 2, 32, 48)
CPU = {"device": "cpu", "dtype": "float32"}
FLAGS = ["--model", "tiny_llama", "--schemes", "gpt2", "normal", "--num-births", 14, "--paper-births", 3]
FLAGS += ["--paper-sequences", 20, "--paper-length", 8, "--num-sequences", 2, "--sequence-length", 16]
FLAGS += ["--permutations", 99, "--dtype", "float32"]
EXACT_PAIRS = {"relabelling": 84, "weights": 14, "basis-free": 14}


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    """A preset of tiny_llama's name whose newborns take milliseconds."""
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)


# ---- error rates -------------------------------------------------------------------------------------------


def test_rows_and_figures(tmp_path):
    done = run_here("reproduce.errors", *FLAGS, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("errors.png", "errors_tau.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    result = read_json(tmp_path / "errors.json")
    state_tests = ("relabelling", "t-test", "U-test", "closed form")
    expected = set(itertools.product(state_tests, errors.STATE_INPUTS, ("gpt2", "normal")))
    expected |= {("weights", "weights", "gpt2")}
    assert {(row["test"], row["inputs"], row["scheme"]) for row in result["rows"]} == expected
    assert len(result["rows"]) == len(expected)
    for row in result["rows"]:
        assert row["model"] == "tiny_llama"
        assert row["num_pairs"] == EXACT_PAIRS.get(row["test"], 3)
        assert row["rate"] == row["rejections"] / row["num_pairs"]
        assert 0 <= row["low"] <= row["rate"] <= row["high"] <= 1
        assert 0 <= row["ks_p"] <= 1
        if row["test"] in EXACT_PAIRS:
            rate = scipy.stats.binomtest(row["rejections"], row["num_pairs"])
            interval = rate.proportion_ci(0.99, method="wilson")
            assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), abs=1e-12)
    assert {point["scheme"] for point in result["points"] + result["taus"]} == {"gpt2"}  # the first


@pytest.mark.parametrize("inputs", ["shared embedding", "gaussian"])
def test_relabelling_p_by_hand(inputs):
    settings = RateSettings(
        num_births=14, num_sequences=3, sequence_length=9, permutations=49, first_seed=5, input_seed=2, **CPU
    )
    newborns = errors.strangers("tiny_llama", "normal", inputs, settings)
    p = errors.relabelling_p(newborns, inputs, settings)
    given = random_vectors(2, range(3), 9, 32) if inputs == "gaussian" else random_tokens(2, range(3), 9, 97)
    table_seed = 0 if inputs == "shared embedding" else None
    prints = []
    for seed in range(5, 19):
        states = final_states(Newborn(SMALL, seed, table_seed, "normal"), given)
        prints.append(lineage.fingerprint(states.flatten(0, 1)).double())
    expected = []
    pairs = set()
    for i in range(14):
        for j in [k % 14 for k in range(i + 1, i + 7)]:
            test = lineage.diagonal_test(prints[i].T @ prints[j], (2, i, j), 49)
            expected.append(test["p"])
            pairs.add(frozenset((i, j)))
    np.testing.assert_allclose(p, expected, atol=1e-12)
    assert len(pairs) == len(p) == 84  # no pair comes twice


@pytest.mark.parametrize("inputs, kind", [("own embedding", "tokens"), ("gaussian", "gaussian")])
def test_paper_p_by_hand(inputs, kind):
    settings = RateSettings(
        paper_births=3, paper_sequences=30, paper_length=9, first_seed=5, input_seed=2, **CPU
    )
    newborns = errors.strangers("tiny_llama", "gpt2", inputs, settings)
    p, taus = errors.paper_p(newborns, inputs, settings)
    reading = PaperSettings(inputs=kind, paper_sequences=30, paper_length=9, input_seed=2, **CPU)
    outputs = [last_outputs(Newborn(SMALL, seed), 97, reading) for seed in (5, 6, 7)]
    count = 0
    for pair, (i, j) in enumerate(((0, 1), (0, 2), (1, 2))):
        test = lineage.paper_test(outputs[i], outputs[j])
        assert p["t-test"][pair] == test["paper_t_p"]
        assert p["U-test"][pair] == test["paper_u_p"]
        assert p["closed form"][pair] == pytest.approx(scipy.stats.norm.sf(test["closed_form_z"]), rel=1e-12)
        count += test["paper_k"]
    assert len(taus) == count


def test_strangers_are_rejected_as_often_as_they_should():
    """On rows through its own embedding, p is uniform; on inputs that strangers share, it is not.

    What is added to a residual stream stays in its coordinate: shared vectors name the coordinates.
    """
    settings = RateSettings(num_births=40, num_sequences=4, sequence_length=16, permutations=199, **CPU)
    for inputs in errors.STATE_INPUTS:
        newborns = errors.strangers("tiny_llama", "gpt2", inputs, settings)
        p = errors.relabelling_p(newborns, inputs, settings)
        # p comes in steps of 1/200, below the distance of 0.13 that 240 values could prove at 0.001
        if inputs == "own embedding":
            assert scipy.stats.kstest(p, "uniform").pvalue > 0.001
        else:
            assert (p == 1 / 200).all()


def test_weights_p_by_hand():
    settings = RateSettings(num_births=14, permutations=49, first_seed=5, input_seed=2)
    newborns = errors.strangers("tiny_llama", "normal", "weights", settings)
    p = errors.weights_p(newborns, settings)
    assert p.keys() == {"weights"}
    for i in range(14):
        a = Newborn(SMALL, 5 + i, None, "normal")
        b = Newborn(SMALL, 5 + (i + 1) % 14, None, "normal")
        C = np.corrcoef(scaled_rows(a).T, scaled_rows(b).T)[:32, 32:]
        assert p["weights"][i] == lineage.diagonal_test(torch.from_numpy(C), (2, i), 49)["p"]


def scaled_rows(source) -> np.ndarray:
    """Rows, along the residual stream, of the blocks' matrices, each centred and of mean square 1."""
    parts = []
    for name, shape in source.shapes.items():
        if not name.startswith("model.layers.") or len(shape) != 2:
            continue
        weight = source.read(name).double().numpy()
        if "o_proj" in name or "down_proj" in name:
            weight = weight.T
        centred = weight - weight.mean(axis=0)
        parts.append(centred / (centred**2).mean() ** 0.5)
    return np.concatenate(parts)


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


# ---- what the figures draw ---------------------------------------------------------------------------------


def test_quantiles():
    p = np.random.default_rng(0).random(500)
    points = errors.quantiles(p, {"panel": "m, i"})
    assert len(points) <= 60
    assert points[0]["observed"] == pytest.approx(-np.log10(p.min()))
    assert points[-1]["observed"] == pytest.approx(-np.log10(p.max()))
    assert points[0]["expected"] == points[0]["uniform"] == pytest.approx(-np.log10(0.5 / 500))
    assert {point["panel"] for point in points} == {"m, i"}


def test_tau_histogram():
    taus = np.array([-0.9, 0.0, 0.001, 0.05, 0.9])
    bins = errors.tau_histogram(taus, 100, {"panel": "m, i"})
    assert sum(point["share"] for point in bins) == pytest.approx(100)
    assert bins[0]["share"] == bins[-1]["share"] == pytest.approx(20)
    std = (2 * 205 / (9 * 100 * 99)) ** 0.5
    inside = 100 * (1 - 2 * scipy.stats.norm.sf(0.3 / std))
    assert sum(point["gaussian"] for point in bins) == pytest.approx(inside)


# ---- cost --------------------------------------------------------------------------------------------------


def save_kin(folder, noise: float) -> None:
    """A folder of a newborn of width 64 and seed 1, its parameters noised."""
    model = init.newborn(replace(SMALL, d_model=64), 1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * 0.02 * torch.randn_like(parameter))
    checkpoint.save(folder, model)


def test_cost_is_the_least_that_suffices(tmp_path):
    folders = [str(tmp_path / name) for name in ("base", "child")]
    for folder, noise in zip(folders, (0.0, 0.4)):
        save_kin(Path(folder), noise)
    flags = ["--sequence-length", 4, "--permutations", 199, "--dtype", "float32", "--out", tmp_path]
    done = run_here("reproduce.errors", "cost", *folders, *flags)
    assert done.returncode == 0, done.stderr
    weights, *rows = read_json(tmp_path / "cost.json")["rows"]
    assert weights["test"] == "weights" and weights["tokens"] == 0 and weights["reached"]
    a, b = [checkpoint.parse_spec(folder).open() for folder in folders]
    for row in rows:
        assert row["reached"] and row["log10_p"] <= -6
        assert row["times_fewer_tokens"] == 10_240_000 / row["tokens"]
        if row["test"] == "relabelling":
            value = relabelling_log10_p(a, b)
        else:
            value = paper_log10_p(row["test"], a, b)
        n = row["tokens"] // 4
        assert row["log10_p"] == pytest.approx(value(n), rel=1e-6)  # float32 products
        assert n == 1 or value(n // 2) > -6  # with half of the sequences, it would not have said so
    tests = [row["test"] for row in rows]
    assert sorted(tests) == sorted(["relabelling", "closed form", "t-test", "U-test"])


def relabelling_log10_p(a, b):
    """log10 p of the exact test of states as a function of n sequences of 4 tokens."""

    def value(n: int) -> float:
        tokens = random_tokens(0, range(n), 4, 97)
        prints = [lineage.fingerprint(final_states(source, tokens).flatten(0, 1)) for source in (a, b)]
        C = prints[0].double().T @ prints[1].double()
        return lineage.diagonal_test(C, (0,), 199)["log10_p"]

    return value


def paper_log10_p(test: str, a, b):
    """log10 p of one of the paper's tests as a function of n sequences of 4 tokens."""

    def value(n: int) -> float:
        if n < 4:
            return 0.0
        tokens = random_tokens(0, range(n), 4, 97)
        outputs = [final_states(source, tokens, last_only=True) for source in (a, b)]
        result = lineage.paper_test(*outputs)
        p = scipy.stats.norm.sf(result["closed_form_z"])
        if test != "closed form":
            p = result[f"paper_{test[0].lower()}_p"]
        return np.log10(p)

    return value


def test_cost_of_a_test_that_does_not_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "states_log10_p", lambda *_: -5.0)
    save_kin(tmp_path / "base", 0.0)
    done = run_here("reproduce.errors", "cost", tmp_path / "base", tmp_path / "base", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    _, *rows = read_json(tmp_path / "cost.json")["rows"]
    assert not any(row["reached"] for row in rows)
    assert {row["times_fewer_tokens"] for row in rows} == {None}


# ---- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--num-births", 13],
        ["--paper-births", 2],
        ["--sequence-length", 65],
        ["--paper-length", 65],
        ["--top-k", 33],
        ["--model", "tiny_lama"],
        ["--schemes", "gpt3"],
        ["--inputs", "gaussian"],
        ["calibrate"],
        ["cost", "tiny_llama@1"],
        ["cost", "tiny_llama@1", "tiny_llama@2"],
    ],
    ids=str,
)
def test_mistakes(words, tmp_path):
    expected = {"cost": "two models of one birth", "--model": "model"}.get(words[0], words[0])
    model = [] if {"cost", "calibrate", "--model"} & set(words) else ["--model", "tiny_llama"]
    assert_refused(run_here("reproduce.errors", *words, *model, "--out", tmp_path / "new"), expected)
    assert not (tmp_path / "new" / "errors.json").exists()
