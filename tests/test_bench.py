"""reproduce/bench.py at a size for tests: that it measures what it says it measures."""

import pytest
import torch
import torch.nn.functional as F
from conftest import run_here

from lib.files import read_json
from model import PRESETS, ModelConfig, Transformer
from reproduce import bench

pytest.importorskip("transformers")
TOKENS = torch.randint(97, (4, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small_cases(monkeypatch):
    """A preset of tiny_llama's name whose passes take milliseconds, and no other case."""
    monkeypatch.setitem(PRESETS, "tiny_llama", ModelConfig(97, 64, 2, 2, 32, 48))
    monkeypatch.setattr(bench, "CASES", (("tiny_llama", 2, 16),))


def test_rows(tmp_path):
    done = run_here("reproduce.bench", "--device", "cpu", "--dtype", "bfloat16", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = read_json(tmp_path / "bench.json")["rows"]
    assert row["ratio"] == pytest.approx(row["ours"] / row["transformers"])


def test_both_learn_the_same_windows():
    logits = bench.newborn("tiny_llama", 0)(TOKENS[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).item()
    works = bench.training_steps("tiny_llama", TOKENS, torch.float32)
    losses = [[work().item() for _ in range(3)] for work in works]
    assert losses[0][0] == pytest.approx(expected, rel=1e-5)  # float32 sums of 64 losses
    for first, _, third in losses:
        assert third < first


def test_transformers_model_has_the_same_parameters():
    with torch.device("meta"):
        models = Transformer(PRESETS["nano_llama"]), bench.transformers_model(PRESETS["nano_llama"])
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in models]
    assert shapes[0] == shapes[1]
