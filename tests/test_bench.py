"""reproduce/bench.py at a size for tests: that it measures what it says it measures."""

import sys

import pytest
import torch
from conftest import assert_refused, run_here

from lib.files import read_json
from lib.speed import forward_flops
from model import PRESETS, ModelConfig, Transformer
from reproduce import bench

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    """A preset of tiny_llama's name whose passes take milliseconds."""
    monkeypatch.setitem(PRESETS, "tiny_llama", ModelConfig(97, 64, 2, 2, 32, 48))


@pytest.fixture
def known_peak(monkeypatch):
    """A matrix product of 1e11 FLOP/s, which takes no time."""
    monkeypatch.setattr(bench, "matmul_peak", lambda device, dtype: 1e11)


def test_forward_rows_of_a_tiny_model(tmp_path, known_peak):
    flags = ["--model", "tiny_llama", "--sequence-length", 16, "--rounds", 1, "--tokens", 256]
    done = run_here("reproduce.bench", "--work", "forward", *flags, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "bench.json")["rows"]
    assert [row["dtype"] for row in rows] == ["bfloat16", "float32"]
    flops = forward_flops(PRESETS["tiny_llama"], 16, last_only=True) / 16  # of a token
    for row in rows:
        assert row["work"] == "forward" and row["sequence_length"] == 16
        assert row["ratio"] == pytest.approx(row["ours"] / row["transformers"])
        assert row["batch_size"] == 16
        assert 0 < row["share"] == pytest.approx(row["ours"] * flops / 1e11)
        assert row["peak_gflops"] == 100


def test_training_rows_at_a_size_for_tests(tmp_path, monkeypatch, known_peak):
    monkeypatch.setattr(bench, "TRAINED", {"tiny_llama": (2, 16)})
    words = ("--work", "training", "--rounds", 2, "--dtype", "bfloat16")
    assert run_here("reproduce.bench", *words, "--out", tmp_path).returncode == 0
    (row,) = read_json(tmp_path / "bench.json")["rows"]
    config = PRESETS["tiny_llama"]
    flops = 3 * (forward_flops(config, 16) / 16 + 2 * config.d_model * config.vocab_size)
    assert (row["work"], row["batch_size"]) == ("training", 2) and row["dtype"] == "bfloat16"
    assert row["share"] == pytest.approx(row["ours"] * flops / 1e11)
    assert row["ratio"] == pytest.approx(row["ours"] / row["transformers"])


def test_a_training_step_lowers_the_loss():
    torch.manual_seed(0)
    model = Transformer(PRESETS["tiny_llama"])
    window = torch.randint(97, (2, 17))
    work = bench.training_work(model, model, window, torch.float32)
    losses = [work().item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


def test_transformers_is_needed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run_here("reproduce.bench", "--model", "tiny_llama", "--sequence-length", 8, "--out", tmp_path)
    assert_refused(done, "pip install -r requirements-dev.txt")


def test_turns_alternate_and_medians_count(monkeypatch):
    order = []
    seconds = iter([3.0, 30.0, 20.0, 2.0, 1.0, 5.0])
    peaks = iter([5.0, 7.0, 1000.0])

    def seconds_of(work):
        order.append(work)
        return next(seconds)

    monkeypatch.setattr(bench, "seconds_of", seconds_of)
    monkeypatch.setattr(bench, "matmul_peak", lambda device, dtype: next(peaks))
    works = {"ours": "A", "transformers": "B"}
    columns = bench.take_turns(works, 60, 2.0, 3, CPU, torch.float32)
    assert order == ["B", "A", "A", "B", "B", "A"]
    assert columns["ours"] == 60 / 20 and columns["transformers"] == 60 / 2
    assert columns["ratio"] == pytest.approx(0.1)
    assert columns["lowest"] == pytest.approx(3 / 30) and columns["highest"] == pytest.approx(1 / 5)
    assert columns["share"] == pytest.approx(60 / 20 * 2 / 7) and columns["peak_gflops"] == 7e-9


@pytest.mark.parametrize("name", ["nano_gpt2", "nano_llama", "nano_qwen"])
def test_transformers_model_has_the_same_shape(name):
    """The same matrices, by size; GPT-NeoX packs three of ours in one and adds linear biases."""
    with torch.device("meta"):
        ours = Transformer(PRESETS[name])
        theirs = bench.transformers_model(PRESETS[name])
    sizes = []
    for model in (ours, theirs):
        named = model.named_parameters()
        sizes.append(sum(p.numel() for n, p in named if p.dim() == 2 and not n.startswith("lm_head")))
    assert sizes[0] == sizes[1]
    assert theirs.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--model", "nano_lama"], "nano_llama"),
        (["--sequence-length", 2000], "1024"),
        (["--rounds", 0], "at least 1"),
        (["--work", "foward"], "forward"),
    ],
    ids=str,
)
def test_mistakes(words, expected, tmp_path):
    assert_refused(run_here("reproduce.bench", *words, "--out", tmp_path / "new"), expected)
    assert not (tmp_path / "new").exists()
