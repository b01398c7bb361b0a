"""reproduce.family: the papers' pairs, and every method's answer as the methods' own commands give it."""

from dataclasses import replace

import pytest
import torch
from test_siblings import CPU, small_task

import model
import seedprint
from lib.checkpoint import parse_spec
from lib.data import TokenData
from reproduce import family, rivals, siblings


def test_runs_and_pairs_are_the_papers():
    runs = family.lineage_runs(siblings.Settings(runs="r"))
    first = [run for (_, _, corpus), run in runs.items() if corpus == 1]
    assert {(run.source, run.data_seed) for run in first} == {(("python",), 0)}  # one corpus in one order
    second = runs["llama", 123, 2]
    assert second.init_from == "r/lineage/tiny_llama-123" and second.source == ("docstrings+site",)
    assert second.tokenizer == "data/python-bpe_4096/tokenizer.model"
    child = {seed: f"r/lineage/tiny_qwen-{seed}" for seed in siblings.SEEDS}
    pairs = family.table_pairs("qwen", runs)
    assert ("9", f"{child[2000]}/step_0000000", f"{child[42]}/step_0000000", False) in pairs
    assert ("10", f"{child[42]}/step_0000000", child[42], True) in pairs
    assert ("12", child[1000], f"{child[1000]}-docstrings", True) in pairs
    assert pairs[-1] == ("12", child[1000], f"{child[123]}-docstrings", False)


@pytest.mark.usefixtures("quick_training")
def test_every_method_answers_for_every_pair(tmp_path, monkeypatch):
    """Small models, trained for two steps: rows are what `compare`, `paper` and `rivals` say of a pair."""
    small = {"d_model": 64, "d_ff": 96, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
    for preset in ("tiny_llama", "tiny_qwen"):
        monkeypatch.setitem(model.PRESETS, preset, replace(model.PRESETS[preset], **small))
    small_task(tmp_path, monkeypatch)
    settings = siblings.Settings(scale="smoke", out="out", **CPU)
    rows = family.lineage(settings)["rows"]
    for row in rows:
        assert (row["verdict"] == "same birth") == row["kin"], row
        assert (row["pcs"] > 0.95) == row["kin"]
    base, suspect = rows[2]["base"], rows[2]["suspect"]
    flags = {"models": (base, suspect), "out": "out", **CPU}
    asked = seedprint.CompareSettings(**flags, sequence_length=8, permutations=199, layers=2, units=64)
    expected = seedprint.compare(asked)["rows"][0]
    asked = seedprint.PaperSettings(**flags, paper_sequences=20, paper_length=8)
    expected |= seedprint.paper(asked)["rows"][0]
    text, _ = TokenData("data/backcopy-bytes").held_out(200, 8)
    sources = [parse_spec(name).open() for name in (base, suspect)]
    expected |= rivals.similarities(*sources, text, torch.device("cpu"), torch.float32)
    assert rows[2] == {"table": "4b, 8", "kin": True} | expected


def test_children_of_a_real_model(tmp_path, monkeypatch):
    """A newborn in its place: every child is found, no stranger is."""
    config = model.ModelConfig(300, 64, 6, 4, 64, 96, num_kv_heads=2)
    monkeypatch.setitem(model.PRESETS, "tiny_llama", replace(config, context_length=256))
    settings = family.RealSettings(base="tiny_llama@1", text=None, steps=2, out=str(tmp_path), **CPU)
    rows = family.real(settings)["rows"]
    for row in rows:
        assert row["verdict"] == ("same birth" if row["kin"] else "no evidence"), row["sentence"]
    by_name = {row["suspect"]: row for row in rows}
    assert by_name["hidden, cut to 5 layers"]["base_layers"] == [1, 2, 4, 5, 6]
    assert 0 < by_name["trained"]["distance"] < 0.1
