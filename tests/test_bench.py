"""reproduce/bench.py at a size for tests: that it measures what it says it measures."""

from functools import partial

import pytest
import torch
from conftest import run_here

from lib.files import read_json
from model import PRESETS, ModelConfig, Transformer
from reproduce import bench


@pytest.fixture(autouse=True)
def small_cases(monkeypatch):
    """A preset of tiny_llama's name whose passes take milliseconds, and no other case."""
    monkeypatch.setitem(PRESETS, "tiny_llama", ModelConfig(97, 64, 2, 2, 32, 48))
    monkeypatch.setattr(bench, "CASES", (("forward", "tiny_llama", 4, 16), ("training", "tiny_llama", 2, 16)))


def test_rows_of_both_works(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "peak_memory", lambda maker: 1.0)  # is tested below
    done = run_here("reproduce.bench", "--rounds", 2, "--dtype", "bfloat16", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "bench.json")["rows"]
    assert [row["work"] for row in rows] == ["forward", "training"]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["ours"] / row["transformers"])


def test_both_pass_over_the_same_tokens():
    """Each returns one state a sequence; ours is what the model says of all tokens but the last."""
    tokens = torch.randint(97, (4, 17))
    arguments = ("forward", "tiny_llama", tokens, torch.float32)
    ours, theirs = (bench.make_work(whose, *arguments)() for whose in ("ours", "transformers"))
    assert ours.shape == theirs.shape == (4, 32)
    model = bench.newborn("tiny_llama", 0)
    assert torch.allclose(ours, model.hidden(tokens[:, :-1])[:, -1], atol=1e-6)


def test_turns_alternate_and_medians_count(monkeypatch):
    order = []
    seconds = iter([3.0, 30.0, 20.0, 2.0, 1.0, 5.0])

    def seconds_of(work):
        work()
        return next(seconds)

    monkeypatch.setattr(bench, "seconds_of", seconds_of)
    row = bench.take_turns(lambda: order.append("A"), lambda: order.append("B"), 60, 3)
    assert order == ["A", "B"] + ["B", "A", "A", "B", "B", "A"]
    assert row["ours"] == 60 / 20 and row["transformers"] == 60 / 2
    assert row["ratio"] == pytest.approx(0.1)
    assert row["lowest"] == pytest.approx(3 / 30) and row["highest"] == pytest.approx(1 / 5)


def test_peak_memory_is_of_a_process_of_its_own():
    """Blocks of 0.5 and 1 GiB, more than importing takes; all else is the same, but for some MiB."""
    small, large = (bench.peak_memory(partial(partial, torch.ones, size)) for size in (2**27, 2**28))
    assert large - small == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", ["nano_gpt2", "nano_llama"])
def test_transformers_model_has_the_same_shape(name):
    """The same matrices, by size; GPT-NeoX packs three of ours in one and adds linear biases."""
    with torch.device("meta"):
        models = [Transformer(PRESETS[name]), bench.transformers_model(PRESETS[name])]
    sizes = []
    for model in models:
        matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2}
        sizes.append(sum(n for name, n in matrices.items() if not name.startswith(("lm_head", "embed_out"))))
    assert sizes[0] == sizes[1]
