"""bench.py at a size for tests: that it measures what it says it measures."""

import json

import pytest
import torch
from conftest import assert_refused, run_script

import bench
import init
from model import PRESETS, forward_flops


def test_bench_on_a_tiny_model(tmp_path):
    flags = [
        "--model",
        "tiny_llama",
        "--sequence-length",
        16,
        "--rounds",
        3,
        "--tokens",
        256,
        "--out",
        tmp_path,
    ]
    done = run_script("bench.py", "forward", *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    contestants = {(row["implementation"], row["dtype"]) for row in rows}
    assert contestants == {(i, d) for i in ("bornbiased", "transformers") for d in ("bfloat16", "float32")}
    fastest = next(r for r in rows if (r["implementation"], r["dtype"]) == ("bornbiased", "bfloat16"))
    for row in rows:
        assert row["batch_size"] in (4, 8, 16)
        flops = row["sequences_per_second"] * forward_flops(PRESETS["tiny_llama"], 16, last_only=True)
        assert row["gflops"] == pytest.approx(flops / 1e9)
        assert 0 < row["share_of_peak"] == pytest.approx(row["gflops"] / row["peak_gflops"])
        speedup = fastest["sequences_per_second"] / row["sequences_per_second"]
        assert row["speedup"] == pytest.approx(speedup)


@pytest.mark.parametrize("name", ["nano_gpt2", "nano_llama", "nano_qwen"])
def test_transformers_model_has_the_same_shape(name):
    """The same matrices, by size; GPT-NeoX packs three of ours in one and adds linear biases."""
    from model import Transformer

    with torch.device("meta"):
        ours, theirs = Transformer(PRESETS[name]), bench.transformers_model(PRESETS[name])

    def size(model):
        return sum(
            p.numel() for n, p in model.named_parameters() if p.dim() == 2 and not n.startswith("lm_head")
        )

    assert size(ours) == size(theirs)
    assert theirs.config._attn_implementation == "sdpa"


def test_bad_inputs(tmp_path):
    for flags, words in (
        (["--model", "nano_lama"], ["nano_lama", "nano_llama"]),
        (["--sequence-length", "2000"], ["2000", "1024"]),
        (["--rounds", "0"], ["at least 1"]),
    ):
        assert_refused(run_script("bench.py", "forward", *flags, "--out", tmp_path / "new"), *words)
    assert not (tmp_path / "new").exists()


def test_verdicts_are_computed():
    def row(model, T, implementation, dtype, share, speedup):
        names = ("model", "sequence_length", "implementation", "dtype", "share_of_peak", "speedup")
        return dict(zip(names, (model, T, implementation, dtype, share, speedup)))

    rows = [
        row("nano_gpt2", 64, "bornbiased", "float32", 0.91, 2),
        row("m", 64, "bornbiased", "float32", 0.89, 2),
    ]
    rows += [row("nano_llama", 512, "transformers", "bfloat16", 0.5, 1.2)]
    rows += [row("nano_llama", 512, "transformers", "float32", 0.5, 2.9)]
    assert [c["holds"] for c in bench.verdicts(rows)] == [False, True, False]
    assert bench.verdicts([]) == []


def test_training_and_files_at_a_size_for_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TRAINED", {"tiny_llama": (2, 16)})
    monkeypatch.setattr(bench.common, "matmul_peak", lambda device, dtype: 1e11)
    rows = bench.training_rows("tiny_llama", 2, torch.device("cpu"))
    assert [row["implementation"] for row in rows] == ["bornbiased", "transformers"]
    config = PRESETS["tiny_llama"]
    flops = 3 * (forward_flops(config, 16) / 16 + 2 * config.d_model * config.vocab_size)
    for row in rows:
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / 1e11)
        assert row["speedup"] == pytest.approx(rows[0]["tokens_per_second"] / row["tokens_per_second"])
    assert [
        c["holds"] for c in bench.training_verdicts([rows[0] | {"mfu": 0.2}, rows[1] | {"speedup": 1.2}])
    ] == [
        False,
        True,
    ]
    monkeypatch.setattr(bench, "newborn", lambda name, seed, device: init.newborn("tiny_llama", seed))
    files = bench.file_rows(1, torch.device("cpu"))
    assert [row["work"] for row in files][1:] == [
        "tokenize, tokenizer",
        "tokenize, bytes",
        "save nano_llama",
        "load nano_llama",
    ]
    assert all(row["seconds"] > 0 for row in files)
    assert (
        bench.file_verdicts([{"work": "tokenize, tokenizer", "megabytes_per_second": 2.9}])[0]["holds"]
        is False
    )
