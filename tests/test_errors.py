"""reproduce/errors.py: strangers by the dozen at a tiny size, and the interval over births by brute force."""

import itertools

import numpy as np
import pytest
import scipy.stats
from conftest import run_here

from lib.checkpoint import Newborn, final_states
from lib.files import read_json
from lib.inputs import random_tokens
from measure import lineage
from measure.cosines import wilson
from model import PRESETS, ModelConfig
from reproduce import errors
from reproduce.errors import Settings, interval_over_births

SMALL = ModelConfig(97, 64, 2, 2, 32, 48)
CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    """A preset of tiny_llama's name whose newborns take milliseconds."""
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)
    monkeypatch.setattr(errors, "PERMUTATIONS", 99)


def test_rows(tmp_path):
    flags = ["--model", "tiny_llama", "--schemes", "gpt2", "normal", "--num-births", 5]
    flags += ["--paper-sequences", 20, "--dtype", "float32"]
    done = run_here("reproduce.errors", *flags, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "errors.json")["rows"]
    assert {row["test"] for row in rows} >= {"relabelling", "t-test", "weights", "token tables", "units"}
    for row in rows:
        assert row["num_pairs"] == 10 and row["rate"] == row["rejections"] / 10
        assert 0 <= row["low"] <= row["rate"] <= row["high"] <= 1
        if row["test"] == "units":
            assert row["rejections"] == 0 and 0 < row["largest_share"] < 0.2


def test_p_of_states_by_hand():
    newborns = errors.strangers("tiny_llama", "normal", "shared embedding", 4)
    p = errors.p_of_states(newborns, "shared embedding", Settings(paper_sequences=30, **CPU))
    prints, outputs = [], []
    for seed in range(1, 5):
        newborn = Newborn(SMALL, seed, 0, "normal")
        states = final_states(newborn, random_tokens(0, range(16), 64, 97))
        prints.append(lineage.fingerprint(states.flatten(0, 1)).double())
        outputs.append(final_states(newborn, random_tokens(0, range(30), 64, 97))[:, -1])
    for pair, (i, j) in enumerate(itertools.combinations(range(4), 2)):
        exact = lineage.diagonal_test(prints[i].T @ prints[j], (0, i, j), 99)["p"]
        assert p["relabelling"][pair] == pytest.approx(exact, abs=1e-12)
        test = lineage.paper_test(outputs[i], outputs[j])
        # float32 states of one position or of all may round otherwise, and so change a rank
        assert p["t-test"][pair] == pytest.approx(test["paper_t_p"], rel=0.05)
        assert p["closed form"][pair] == pytest.approx(scipy.stats.norm.sf(test["closed_form_z"]), rel=0.05)


def test_strangers_are_rejected_as_often_as_they_should():
    """On rows through its own embedding, p is uniform; on inputs that strangers share, it is not.

    What is added to a residual stream stays in its coordinate: shared vectors name the coordinates.
    """
    for inputs, count in (("own embedding", 22), ("shared embedding", 5), ("gaussian", 5)):
        newborns = errors.strangers("tiny_llama", "gpt2", inputs, count)
        p = errors.p_of_states(newborns, inputs, Settings(paper_sequences=3, **CPU))["relabelling"]
        # p comes in steps of 1/100, below the distance of 0.13 that 231 values could prove at 0.001
        if inputs == "own embedding":
            assert scipy.stats.kstest(p, "uniform").pvalue > 0.001
        else:
            assert (p == 1 / 100).all()


def test_p_of_weights():
    p = errors.p_of_weights(errors.strangers("tiny_llama", "normal", "weights", 4))
    sources = [Newborn(SMALL, seed, None, "normal") for seed in range(1, 5)]
    for pair, (i, j) in enumerate(itertools.combinations(range(4), 2)):
        correlations = lineage.weight_correlations(sources[i], sources[j])
        for test, part in (("weights", "body"), ("token tables", "embedding")):
            assert p[test][pair] == lineage.diagonal_test(correlations[part], (0, i, j), 99)["p"]


def test_interval_over_births_by_brute_force():
    """Rates over all pairs of births drawn with replacement, a birth with itself left out."""
    rejected = np.random.default_rng(1).random(66) < 0.3
    low, high = interval_over_births(rejected, 12)
    generator = np.random.default_rng(0)
    value = dict(zip(itertools.combinations(range(12), 2), rejected))
    rates = []
    for _ in range(2000):
        drawn = sorted(generator.integers(12, size=12))
        rates.append(np.mean([value[i, j] for i, j in itertools.combinations(drawn, 2) if i != j]))
    # 2,000 resamples know the half per cent quantile, of some ten values, within about a tenth of the width
    assert (low, high) == pytest.approx(np.quantile(rates, (0.005, 0.995)), abs=0.05)
    for value in (False, True):  # where all pairs agree
        assert interval_over_births(np.full(120, value), 16) == wilson(value * 8, 8, 0.99)
