"""bench.py at a size for tests: that it measures what it says it measures."""

import json

import pytest
import torch
from conftest import assert_refused, run_here, run_script

import bench
from model import PRESETS, Transformer, forward_flops


def test_one_table_of_a_tiny_model(tmp_path):
    flags = ["--model", "tiny_llama", "--sequence-length", 16, "--rounds", 1, "--tokens", 256]
    done = run_script("bench.py", "forward", *flags, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["dtype"] for row in rows] == ["bfloat16", "float32"]
    flops = forward_flops(PRESETS["tiny_llama"], 16, last_only=True) / 16  # of a token
    for row in rows:
        assert row["work"] == "forward" and row["ratio"] == pytest.approx(row["ours"] / row["transformers"])
        assert {row["batch_size_ours"], row["batch_size_transformers"]} <= {4, 8, 16}
        assert 0 < row["share"] == pytest.approx(row["ours"] * flops / row["peak_gflops"] / 1e9)


def test_training_at_a_size_for_tests(monkeypatch):
    monkeypatch.setattr(bench, "TRAINED", {"tiny_llama": (2, 16)})
    monkeypatch.setattr(bench.common, "matmul_peak", lambda device, dtype: 1e11)
    (row,) = bench.training_rows(bench.Settings(rounds=2), "tiny_llama", torch.device("cpu"))
    config = PRESETS["tiny_llama"]
    flops = 3 * (forward_flops(config, 16) / 16 + 2 * config.d_model * config.vocab_size)
    assert row["work"] == "training, 2 sequences" and row["dtype"] == "bfloat16"
    assert row["share"] == pytest.approx(row["ours"] * flops / 1e11)
    assert row["ratio"] == pytest.approx(row["ours"] / row["transformers"])


def test_without_transformers_there_is_half_a_table(monkeypatch):
    monkeypatch.setattr(bench, "transformers_model", lambda config, head=False: None)
    s = bench.Settings(sequence_length=(8,), rounds=1, tokens=16)
    (row,) = bench.forward_rows(s, "tiny_gpt2", torch.device("cpu"), [torch.float32])
    assert row["ours"] > 0 and row["transformers"] is None and row["ratio"] is None
    assert [claim["claim"][:17] for claim in bench.verdicts([row | {"sequence_length": 64}])] == [
        "forward, T = 64, "
    ]


def test_turns_alternate_and_medians_count(monkeypatch):
    said, clock = [], iter([3.0, 30.0, 20.0, 2.0, 1.0, 10.0])
    monkeypatch.setattr(bench, "seconds", lambda work: (said.append(work), next(clock))[1])
    monkeypatch.setattr(bench.common, "matmul_peak", lambda device, dtype: 5.0)
    took, peaks = bench.take_turns({"a": "A", "b": "B"}, ["x"], 3, torch.device("cpu"))
    assert said == ["B", "A", "A", "B", "B", "A"]
    assert took == {"a": 20.0, "b": 2.0} and peaks == {"x": 5.0}


@pytest.mark.parametrize("name", ["nano_gpt2", "nano_llama", "nano_qwen"])
def test_transformers_model_has_the_same_shape(name):
    """The same matrices, by size; GPT-NeoX packs three of ours in one and adds linear biases."""
    with torch.device("meta"):
        ours, theirs = Transformer(PRESETS[name]), bench.transformers_model(PRESETS[name])

    def size(model):
        named = model.named_parameters()
        return sum(p.numel() for n, p in named if p.dim() == 2 and not n.startswith("lm_head"))

    assert size(ours) == size(theirs)
    assert theirs.config._attn_implementation == "sdpa"


def test_bad_inputs(tmp_path):
    for flags, words in (
        (["--model", "nano_lama"], ["nano_lama", "nano_llama"]),
        (["--sequence-length", "2000"], ["2000", "1024"]),
        (["--rounds", "0"], ["at least 1"]),
        (["--tokens", "0"], ["at least 1"]),
    ):
        assert_refused(run_here("bench.py", "forward", *flags, "--out", tmp_path / "new"), *words)
    assert_refused(run_here("bench.py", "foward", "--out", tmp_path / "new"), "forward")
    assert not (tmp_path / "new").exists()


def test_verdicts_are_computed():
    def row(model, work, T, dtype, ours, theirs, share):
        return bench.row(
            model, work, T, getattr(torch, dtype), {"ours": ours, "transformers": theirs}, 1, 1
        ) | {"share": share}

    rows = [
        row("nano_gpt2", "forward", 64, "float32", 10, 9, 0.91),
        row("m", "forward", 64, "float32", 10, 9, 0.89),
        row("nano_llama", "forward", 512, "bfloat16", 12, 10, 0.5),
        row("nano_llama", "forward", 512, "float32", 6, 4.1, 0.5),
        row("nano_llama", "training, 4 sequences", 512, "bfloat16", 12, 10, 0.2),
    ]
    assert [c["holds"] for c in bench.verdicts(rows)] == [False, True, False, False, True]
    assert [c["measured"] for c in bench.verdicts(rows)] == [[0.91, 0.89], [1.2], [2.927], [0.2], [1.2]]
    assert bench.verdicts([]) == []
