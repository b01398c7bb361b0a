"""reproduce/errors.py: unrelated newborns by the dozen at a tiny size, and their p by hand."""

import itertools

import pytest
import scipy.stats
from conftest import run_here

from lib.files import read_json
from model import PRESETS, ModelConfig
from reproduce import errors
from reproduce.disguise import newborn_source

SMALL = ModelConfig(300, 64, 2, 2, 32, 48)
SHOWS = {"own embedding": False, "shared embedding": True, "gaussian": True}  # do strangers look related?


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)


def test_rows(tmp_path):
    """Shared vectors name the coordinates: what is added to a residual stream stays in its coordinate."""
    flags = ["--model", "tiny_llama", "--schemes", "gpt2", "normal", "--num-births", 5]
    flags += ["--paper-sequences", 100, "--dtype", "float32"]
    done = run_here("reproduce.errors", *flags, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "errors.json")["rows"]
    of_states = itertools.product(SHOWS, ("t-test", "U-test", "closed form"), ("gpt2", "normal"))
    of_weights = [("weights", test, "gpt2") for test in ("units", "weights", "embedding matrices")]
    assert {(row["inputs"], row["test"], row["scheme"]) for row in rows} == {*of_states, *of_weights}
    for row in rows:
        assert row["num_pairs"] == 10 and row["rate"] == row["rejections"] / 10
        interval = scipy.stats.binomtest(row["rejections"], 10).proportion_ci(0.99, method="wilson")
        assert (row["low"], row["high"]) == pytest.approx(interval, rel=1e-9, abs=1e-12)
        if row["scheme"] == "gpt2":
            assert (row["rejections"] >= 8) == SHOWS.get(row["inputs"], False), row
    (units,) = [row for row in rows if row["test"] == "units"]
    assert units["rejections"] == 0


def test_a_birth_among_strangers_is_found():
    born = [newborn_source(SMALL, seed) for seed in (1, 2, 1)]  # the second pair is one birth
    units, *exact = errors.p_of_weights(born).values()
    assert units == [1, 0, 1]
    for p in exact:
        assert p[1] < 1e-6 and min(p[0], p[2]) > 0.01
