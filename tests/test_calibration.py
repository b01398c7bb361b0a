"""calibration.py: strangers by the hundred at a tiny size, and the interval over births by brute force."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import assert_refused, run_script

import calibration
import common
import evidence
import seedprint
import stats
from baselines import last_positions, paper_test
from calibration import Settings, over_births
from checkpoint import Newborn
from model import PRESETS, ModelConfig
from probe import gaussian_vectors, random_tokens

TINY = ["--model", "tiny_llama", "--schemes", "gpt2", "--num-births", 14, "--paper-births", 3]
TINY += ["--paper-sequences", 20, "--paper-length", 8, "--num-sequences", 2, "--sequence-length", 16]
TINY += ["--permutations", 99, "--dtype", "float32"]
SMALL = ModelConfig(97, 64, 2, 2, 32, 48)
CPU = ("cpu", torch.float32)
PAIRS = {"relabelling": 84, "weights": 14, "basis-free": 14}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A tiny run: its output, its folder and its JSON."""
    out = tmp_path_factory.mktemp("calibrate")
    done = run_script("seedprint.py", "calibrate", *TINY, "--out", out)
    assert done.returncode == 0, done.stderr
    return done, out, json.loads((out / "calibrate.json").read_text())


def test_calibrate_keeps_the_contract(calibrated):
    done, out, result = calibrated
    for name in ("calibrate.png", "calibrate_tau.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert {"experiment", "paper", "settings", "environment", "rows", "claims"} <= result.keys()
    assert result["experiment"] == "calibrate" and result["claims"]
    for row in result["rows"]:
        assert set("test inputs scheme model num_pairs rejections rate low high".split()) <= row.keys()
        assert row["rate"] == row["rejections"] / row["num_pairs"] and 0 <= row["low"] <= row["high"] <= 1
        assert row["num_pairs"] == PAIRS.get(row["test"], 3)
        assert (row["model"], row["scheme"]) == ("tiny_llama", "gpt2")
        if row["test"] in PAIRS:
            found = scipy.stats.binomtest(row["rejections"], row["num_pairs"]).proportion_ci(
                0.99, method="wilson"
            )
            assert (row["low"], row["high"]) == pytest.approx((found.low, found.high), abs=1e-12)
    tests = ("relabelling", "t-test", "U-test", "closed form")
    expected = {(test, inputs) for test in tests for inputs in calibration.INPUTS}
    expected |= {("weights", "weights"), ("basis-free", "weights")}
    assert {(row["test"], row["inputs"]) for row in result["rows"]} == expected and len(result["rows"]) == 14
    assert [claim["claim"] in done.stdout for claim in result["claims"]] == [True] * len(result["claims"])


def test_exact_p_by_hand(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)
    s = Settings(
        num_births=14, num_sequences=3, sequence_length=9, permutations=49, first_seed=5, input_seed=2
    )
    found = calibration.exact_p(s, "tiny_llama", "normal", "shared embedding", *CPU)
    tokens, prints = random_tokens(2, range(3), 9, 97), []
    for seed in range(5, 19):
        rows = evidence.states(Newborn(SMALL, seed, 0, "normal"), tokens).flatten(0, 1)
        prints.append(evidence.fingerprint(rows))
    p = []
    for i in range(14):
        for j in (k % 14 for k in range(i + 1, i + 7)):
            p.append(evidence.diagonal_test(prints[i].T.double() @ prints[j].double(), (2, i, j), 49)["p"])
    np.testing.assert_allclose(found, p, atol=1e-12)
    pairs = {frozenset((i, (i + ahead) % 14)) for i in range(14) for ahead in range(1, 7)}
    assert len(pairs) == len(found) == 84  # no pair comes twice


@pytest.mark.parametrize("inputs, kind", [("own embedding", "tokens"), ("gaussian", "gaussian")])
def test_paper_p_by_hand(monkeypatch, inputs, kind):
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)
    s = Settings(paper_births=3, paper_sequences=30, paper_length=9, first_seed=5, input_seed=2)
    p, taus = calibration.paper_p(s, "tiny_llama", "gpt2", inputs, *CPU)
    outputs = [last_positions(Newborn(SMALL, seed), 30, 9, kind, 2, 97, *CPU) for seed in (5, 6, 7)]
    count = 0
    for i, j in ((0, 1), (0, 2), (1, 2)):
        said = paper_test(outputs[i], outputs[j])
        assert p["t-test"][i, j] == said["paper_t_p"] and p["U-test"][i, j] == said["paper_u_p"]
        expected = scipy.stats.norm.sf(said["closed_form_z"])
        assert p["closed form"][i, j] == pytest.approx(expected, rel=1e-12)
        count += said["paper_k"]
    assert len(taus) == count


def test_strangers_are_rejected_as_often_as_they_should(monkeypatch):
    """On rows through its own embedding, p is uniform; on inputs that strangers share, it is not.

    What is added to a residual stream stays in its coordinate: shared vectors name the coordinates.
    """
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)
    s = Settings(num_births=40, num_sequences=4, sequence_length=16, permutations=199)
    for inputs in calibration.INPUTS:
        p = calibration.exact_p(s, "tiny_llama", "gpt2", inputs, *CPU)
        # p comes in steps of 1/200, below the distance of 0.13 that 240 values could prove at 0.001
        if inputs == "own embedding":
            assert scipy.stats.kstest(p, "uniform").pvalue > 0.001
        else:
            assert (p == 1 / 200).all()


def test_p_of_weights_by_hand(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)
    s = Settings(num_births=14, permutations=49, first_seed=5, input_seed=2)
    found = calibration.exact_weights(s, "tiny_llama", "normal")
    assert found.keys() == {"weights", "basis-free"}
    for i in range(14):
        a, b = (Newborn(SMALL, 5 + j, None, "normal") for j in (i, (i + 1) % 14))
        rows = [], []
        for name, shape in a.shapes.items():
            if name.startswith("model.layers.") and len(shape) == 2:
                for part, source in zip(rows, (a, b)):
                    weight = source.read(name).double().numpy()
                    weight = weight.T if "o_proj" in name or "down_proj" in name else weight
                    centred = weight - weight.mean(axis=0)
                    part.append(centred / (centred**2).mean() ** 0.5)
        C = np.corrcoef(*(np.concatenate(part).T for part in rows))[:32, 32:]
        assert found["weights"][i] == evidence.diagonal_test(torch.from_numpy(C), (2, i), 49)["p"]
        grams = [(evidence.neuron_gram(a, 0), evidence.neuron_gram(b, 0))]
        assert found["basis-free"][i] == evidence.gram_test(grams, (2, i))["p"]


def test_gaussian_inputs_are_the_same_for_all(monkeypatch):
    given = []
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)
    monkeypatch.setattr(evidence, "states", lambda one, x, *more: given.append(x) or torch.randn(3, 9, 32))
    s = Settings(num_births=14, num_sequences=3, sequence_length=9, permutations=9, input_seed=4)
    calibration.exact_p(s, "tiny_llama", "gpt2", "gaussian", *CPU)
    assert len(given) == 14 and all(torch.equal(x, gaussian_vectors(4, range(3), 9, 32)) for x in given)


# ---- over births -------------------------------------------------------------------------------------------


def resampled(rejected: np.ndarray, resamples: int) -> np.ndarray:
    """Rates of `rejected` over all pairs of births drawn with replacement, a birth with itself left out."""
    generator, births, rates = np.random.default_rng(0), len(rejected), []
    for _ in range(resamples):
        drawn = generator.integers(births, size=births)
        values = [rejected[min(i, j), max(i, j)] for n, i in enumerate(drawn) for j in drawn[:n] if i != j]
        rates.append(np.mean(values)) if values else None
    return np.array(rates)


def test_interval_over_births_by_brute_force():
    rejected = np.triu(np.random.default_rng(1).random((12, 12)) < 0.3, 1)
    low, high = over_births(rejected)
    rates = resampled(rejected, 2000)
    # 2,000 resamples know the half per cent quantile, of some ten values, within about a tenth of the width
    assert (low, high) == pytest.approx(np.quantile(rates, (0.005, 0.995)), abs=0.05)
    assert low < rejected[np.triu_indices(12, 1)].mean() < high
    assert over_births(rejected) == (low, high)


def test_interval_is_wide_when_births_decide():
    """16 births, 120 pairs, as many rejections: of two births all pairs, or of pairs at random."""
    births, pairs = np.zeros((16, 16), bool), np.zeros((16, 16), bool)
    births[:2, :] = births[:, :2] = True
    births = np.triu(births, 1)
    chosen = np.random.default_rng(0).permutation(120)[: births.sum()]
    pairs[tuple(index[chosen] for index in np.triu_indices(16, 1))] = True
    wide, narrow = over_births(births), over_births(pairs)
    assert births.sum() == pairs.sum() == 29
    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])
    assert wide[0] < 29 / 120 < wide[1] and narrow[0] < 29 / 120 < narrow[1]


@pytest.mark.parametrize("births", [3, 16])
def test_where_all_pairs_agree(births):
    for value in (False, True):
        rejected = np.triu(np.full((births, births), value), 1)
        assert over_births(rejected) == stats.wilson(value * (births // 2), births // 2, 0.99)


# ---- what the figures draw ---------------------------------------------------------------------------------


def test_quantiles_and_histogram():
    p = np.random.default_rng(0).random(500)
    points = calibration.quantiles(p, dict(model="m", inputs="i"))
    assert len(points) <= 60
    first, last = points[0], points[-1]
    assert first["observed"] == pytest.approx(-np.log10(p.min())) and last["observed"] == pytest.approx(
        -np.log10(p.max())
    )
    assert first["expected"] == pytest.approx(-np.log10(0.5 / 500))
    taus = np.array([-0.9, 0.0, 0.001, 0.05, 0.9])
    drawn = calibration.spread(taus, replace(Settings(), paper_sequences=100), dict(model="m", inputs="i"))
    assert sum(point["share"] for point in drawn) == pytest.approx(100)
    assert drawn[0]["share"] == drawn[-1]["share"] == pytest.approx(20)
    expected = (2 * 205 / (9 * 100 * 99)) ** 0.5
    inside = 100 * (1 - 2 * scipy.stats.norm.sf(0.3 / expected))
    assert sum(point["gaussian"] for point in drawn) == pytest.approx(inside)


# ---- mistakes ----------------------------------------------------------------------------------------------


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs the command line in this process, which saves the seconds of an import, and expects a refusal."""

    def run(words: list, *expected: str) -> None:
        monkeypatch.setattr(sys, "argv", ["seedprint.py", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            common.run(seedprint.plan)
        done = subprocess.CompletedProcess(words, stopped.value.code, *capsys.readouterr())
        assert_refused(done, *expected)

    return run


def test_bad_inputs(refused, tmp_path):
    for words in (
        ["--num-births", 13],
        ["--paper-births", 2],
        ["--paper-sequences", 1],
        ["--permutations", 0],
        ["--num-sequences", 0],
        ["--sequence-length", 0],
        ["--sequence-length", 257],
        ["--paper-length", 257],
        ["--first-seed", -1],
        ["--top-k", 257],
        ["--top-k", -1],
        ["--model", "tiny_lama"],
        ["--schemes", "gpt3"],
        ["--side", "left"],
        ["--seeds", "0-5"],
    ):
        refused(["calibrate", "--model", "tiny_llama", *words, "--out", tmp_path / "new"], words[0])
    refused(["calibrate", "tiny_llama"], "tiny_llama")
    assert not (tmp_path / "new").exists()
    done = run_script("seedprint.py", "calibrate", "--num-births", 13, "--out", tmp_path / "new")
    assert_refused(done, "--num-births", "14")
