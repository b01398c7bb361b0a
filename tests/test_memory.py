"""reproduce/memory.py: the memory of a training step, worked out, in closed form and measured."""

import pytest
import torch
from conftest import assert_refused, run_here

from lib.files import read_json
from model import PRESETS, ModelConfig
from reproduce import memory


def rows_of(folder) -> list[dict]:
    """The rows of a folder's memory.json."""
    return read_json(folder / "memory.json")["rows"]


def test_weights_gradients_and_moments_in_closed_form(tmp_path):
    """Four bytes for each weight and each gradient, eight for AdamW's moments (and 4 for each step count)."""
    done = run_here("reproduce.memory", "--model", "matching", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path)
    assert (row["micro_batch_size"], row["sequence_length"]) == (128, 24)  # configs/matching.py
    V, d, d_ff, L = 257, 32, 96, 2
    parameters = 2 * V * d + L * (4 * d * d + 3 * d * d_ff + 2 * d) + d
    assert row["parameters"] == parameters
    assert row["weights_gib"] == pytest.approx(4 * parameters / 2**30)
    assert row["gradients_gib"] == pytest.approx(4 * parameters / 2**30)
    num_tensors = 2 + L * (4 + 3 + 2) + 1
    moments = 8 * parameters + 4 * num_tensors
    assert row["moments_gib"] == pytest.approx(moments / 2**30)
    parts = ("weights", "gradients", "moments", "activations")
    assert row["total_gib"] == pytest.approx(sum(row[f"{part}_gib"] for part in parts))


def test_logits_dominate_a_wide_vocabulary(monkeypatch):
    """Where all else is small, the peak has the logits, their log-softmax and the gradient of one of them."""
    monkeypatch.setitem(PRESETS, "wide", ModelConfig(50_000, 64, 1, 1, 8, 8, tie_embeddings=True))
    row = memory.worked_out("wide", 16, 64, torch.float32)
    logits = 16 * 64 * 50_000 * 4 / 2**30
    assert 2 * logits < row["activations_gib"] < 4 * logits


@pytest.mark.parametrize("name, dtype", [("tiny_llama", "float32"), ("tiny_gpt2", "bfloat16")])
def test_worked_out_is_what_a_process_takes(name, dtype, tmp_path):
    """Within 15 %: the process rounds its pages, keeps freed small blocks, and needs buffers for products."""
    words = ("--micro-batch-size", 8, "--sequence-length", 128, "--dtype", dtype, "--measure")
    done = run_here("reproduce.memory", "--model", name, *words, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path)
    assert row["ratio"] == pytest.approx(row["total_gib"] / row["measured_gib"])
    assert row["ratio"] == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--model", "nano_lama"], "nano_llama"),
        (["--model", "tiny_gpt2"], "--micro-batch-size"),
        (["--sequence-length", 5000], "1024"),
        (["--micro-batch-size", 0], "at least 1"),
    ],
    ids=str,
)
def test_mistakes(words, expected, tmp_path):
    assert_refused(run_here("reproduce.memory", *words, "--out", tmp_path / "new"), expected)
    assert not (tmp_path / "new").exists()
