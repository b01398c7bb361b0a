"""reproduce/power.py: what tests say of a changed child, layer maps, and the least that suffices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import assert_refused, run_here

import init
import seedprint
from lib import checkpoint
from lib.checkpoint import Newborn, final_states
from lib.files import read_json
from lib.inputs import random_tokens
from measure import comparison, lineage
from model import PRESETS, ModelConfig
from reproduce import power, thief

SMALL = ModelConfig(97, 64, 6, 2, 32, 48)
CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    """A preset of tiny_llama's name whose newborns take milliseconds."""
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)


def save_run(folder) -> None:
    """A run folder of a birth and two steps, each further from it."""
    birth = Newborn(SMALL, 1)
    for step, size in ((0, 0), (1, 0.1), (8, 0.3)):
        thief.save(folder / f"step_{step:07}", thief.noised(birth, size))


def test_power(tmp_path):
    save_run(tmp_path / "run")
    small = ["--num-sequences", 4, "--sequence-length", 16, "--permutations", 199, "--layers", 1]
    small += ["--paper-sequences", 20, "--paper-length", 8, "--dtype", "float32"]
    done = run_here("reproduce.power", "changes", "tiny_llama@1", tmp_path / "run", *small, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "power.png").read_bytes().startswith(b"\x89PNG")
    rows = read_json(tmp_path / "power.json")["rows"]
    by_change = {(row["change"], row["strength"]): row for row in rows}
    expected = {(name, size) for name, (_, sizes) in power.CHANGES.items() for size in sizes}
    expected |= {(power.HIDING, way) for way in ("as it is", *thief.WAYS)}
    expected |= {(power.STEPS, 1), (power.STEPS, 8)}
    assert set(by_change) == expected and len(rows) == len(expected)
    for way in thief.WAYS:  # as it is, but for the coordinates
        row = by_change[power.HIDING, way]
        assert row["units_share"] == 1 and row["verdict"] == "same birth"
        assert (row["body_z"] > 20) == (way == "signs")
    for name, (_, sizes) in power.CHANGES.items():
        shares = [by_change[name, size]["units_share"] for size in sizes]
        assert shares[0] > 0.9 and shares[-1] < shares[0], name
    states = {"num_sequences": 4, "sequence_length": 16, "permutations": 199}
    settings = power.PowerSettings(**states, layers=1, paper_sequences=20, paper_length=8, **CPU)
    sources = [Newborn(SMALL, 1), checkpoint.parse_spec(str(tmp_path / "run/step_0000008")).open()]
    pair = [comparison.read_model("", source, 97, settings) for source in sources]
    compared, _ = comparison.compare_pair(*pair, settings)
    row = by_change[power.STEPS, 8]
    assert (row["body_z"], row["relabel_z"]) == (compared["body_z"], compared["relabel_z"])
    outputs = [seedprint.last_outputs(source, 97, settings) for source in sources]
    assert row["closed_form_z"] == pytest.approx(lineage.paper_test(*outputs)["closed_form_z"])


def test_recipes(tmp_path):
    thief.save(tmp_path / "child", thief.noised(Newborn(SMALL, 1), 0.3))
    models = ["tiny_llama@1", tmp_path / "child", "tiny_llama@2"]
    done = run_here("reproduce.power", "recipes", *models, "--dtype", "float32", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "recipes.png").read_bytes().startswith(b"\x89PNG")
    rows = read_json(tmp_path / "recipes.json")["rows"]
    assert [(row["recipe"], row["sentence"]) for row in rows] == [
        ("fine-tune", "all layers, in their order"),
        ("layers removed", "layers 1–2 and 5–6 of the base, in this order; 3 and 4 are gone"),
        ("layers repeated", "layers 1–4 and 3–6 of the base, in this order; 3 and 4 are repeated"),
        ("mixture of experts", "layers 1–6 of the base, each as 4 experts"),
        ("merge", rows[4]["sentence"]),
        ("merge", "layers 1–3 of base and layers 4–6 of stranger, in this order"),
    ]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["changes", "tiny_llama@1"], "two models"),
        (["recipes", "tiny_llama@1", "tiny_llama@2"], "three models"),
        (["recipes", "tiny_llama@1", "tiny_gpt2@1", "tiny_llama@2"], "width"),
        (["changes", "tiny_llama@1", "tiny_llama@2", "--paper-length", 65], "--paper-length 65"),
        (["cost", "tiny_llama@1"], "two models of one birth"),
        (["cost", "tiny_llama@1", "tiny_llama@2"], "two models of one birth"),
    ],
    ids=str,
)
def test_mistakes(words, expected, tmp_path):
    assert_refused(run_here("reproduce.power", *words, "--out", tmp_path / "new"), expected)
    assert not list((tmp_path / "new").glob("*.json"))


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
    done = run_here("reproduce.power", "cost", *folders, *flags)
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
    monkeypatch.setattr(power, "states_log10_p", lambda *_: -5.0)
    save_kin(tmp_path / "base", 0.0)
    done = run_here("reproduce.power", "cost", tmp_path / "base", tmp_path / "base", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    _, *rows = read_json(tmp_path / "cost.json")["rows"]
    assert not any(row["reached"] for row in rows)
    assert {row["times_fewer_tokens"] for row in rows} == {None}
