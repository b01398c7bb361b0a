"""reproduce/power.py: what tests say of a changed child."""

import pytest
from conftest import assert_refused, run_here

import seedprint
from lib import checkpoint
from lib.checkpoint import Newborn
from lib.files import read_json
from lib.inputs import random_tokens
from measure import lineage, verdict
from model import PRESETS, ModelConfig
from reproduce import power, thief

SMALL = ModelConfig(97, 64, 6, 2, 32, 48)
CPU = {"device": "cpu", "dtype": "float32"}


def test_power(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny_llama", SMALL)  # whose newborns take milliseconds
    for step, size in ((0, 0), (1, 0.1), (8, 0.3)):  # each further from its birth
        thief.save(tmp_path / f"run/step_{step:07}", thief.noised(Newborn(SMALL, 1), size))
    small = ["--num-sequences", 4, "--sequence-length", 16, "--permutations", 199, "--layers", 1]
    small += ["--paper-sequences", 20, "--paper-length", 8, "--dtype", "float32"]
    done = run_here("reproduce.power", "tiny_llama@1", tmp_path / "run", *small, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "power.png").read_bytes().startswith(b"\x89PNG")
    rows = read_json(tmp_path / "power.json")["rows"]
    by_change = {(row["change"], row["strength"]): row for row in rows}
    expected = {(name, size) for name, (_, sizes) in power.CHANGES.items() for size in sizes}
    expected |= {("way of hiding", way) for way in ("as it is", *thief.WAYS)}
    expected |= {("training steps", 1), ("training steps", 8)}
    assert set(by_change) == expected and len(rows) == len(expected)
    for way in thief.WAYS:  # as it is, but for the coordinates
        row = by_change["way of hiding", way]
        assert row["units_share"] == 1 and row["verdict"] == "same birth"
        assert (row["body_z"] > 20) == (way == "signs")
    for name, (_, sizes) in power.CHANGES.items():
        shares = [by_change[name, size]["units_share"] for size in sizes]
        assert shares[0] > 0.9 and shares[-1] < shares[0], name
    states = {"num_sequences": 4, "sequence_length": 16, "permutations": 199}
    settings = power.Settings(**states, layers=1, paper_sequences=20, paper_length=8, **CPU)
    sources = [Newborn(SMALL, 1), checkpoint.parse_spec(str(tmp_path / "run/step_0000008")).open()]
    tokens = random_tokens(0, range(4), 16, 97)
    pair = [verdict.read_model("", source, tokens) for source in sources]
    compared, _ = verdict.compare_pair(*pair, permutations=199, layers=1)
    row = by_change["training steps", 8]
    assert (row["body_z"], row["relabel_z"]) == (compared["body_z"], compared["relabel_z"])
    outputs = [seedprint.last_outputs(source, 97, settings) for source in sources]
    assert row["closed_form_z"] == pytest.approx(lineage.paper_test(*outputs)["closed_form_z"])

    for words, expected in (
        (["tiny_llama@1"], "two models"),
        (["tiny_llama@1", "tiny_gpt2@1"], "width"),
        (["tiny_llama@1", "tiny_llama@2", "--paper-length", 65], "--paper-length 65"),
    ):
        assert_refused(run_here("reproduce.power", *words, "--out", tmp_path / "new"), expected)
    assert not list((tmp_path / "new").glob("*.json"))
