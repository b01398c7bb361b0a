"""What the tests share: small models of every kind, and scripts run as a user runs them."""

import argparse
import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lib import settings
from model import ModelConfig, Transformer

ROOT = Path(__file__).parent.parent
LINES = Path(argparse.__file__).read_text("utf-8").splitlines(keepends=True)
TEXTS = [f"# {i}: café ☕\n" + "".join(LINES[4 * i : 4 * i + 4]) for i in range(400)]
SMALL = dict(vocab_size=97, context_length=700, num_layers=3, num_heads=4, d_model=32, d_ff=48)
KINDS = {
    "llama": ModelConfig(**SMALL),
    "llama_gqa": ModelConfig(**SMALL, num_kv_heads=2),
    "llama_mqa_tied": ModelConfig(**SMALL, num_kv_heads=1, tie_embeddings=True),
    "qwen2": ModelConfig(**SMALL, num_kv_heads=2, qkv_bias=True, norm_epsilon=1e-6),
    "gpt2": ModelConfig(**SMALL, norm="layernorm", mlp="gelu", tie_embeddings=True),
}

DRAWN = set()  # names of figures


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Independent N(0, 1), float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model whose parameters are all random, and large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, 0.2)
    return model


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def save_byte_tokenizer(folder: Path, *special: str) -> None:
    """tokenizer.json: special tokens, and then one for each byte."""
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    coder = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    coder.add_special_tokens(list(special))
    coder.save(str(folder / "tokenizer.json"))


@pytest.fixture(autouse=True)
def figures_are_drawn_once(request, monkeypatch):
    """A figure, which takes half a second, is drawn for the first test that asks; later files are empty."""
    from matplotlib.figure import Figure  # here, as xdist's first process needs none of it

    save = Figure.savefig

    def save_once(figure, path, **options):
        if path.name in DRAWN and request.module.__name__ != "test_lib":
            path.touch()
        else:
            save(figure, path, **options)
            DRAWN.add(path.name)

    monkeypatch.setattr(Figure, "savefig", save_once)


@pytest.fixture(scope="module")
def quick_training():
    """Training without samples of text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("train"), "generate", lambda *_, **__: "a sample")
        yield


def run_script(*arguments, env: dict | None = None) -> subprocess.CompletedProcess:
    """`python probe.py ...` or `python -m sources.data ...` from the repository's root."""
    command = [sys.executable, *map(str, arguments)]
    env = {**os.environ, **(env or {})}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def run_here(script: str, *words) -> subprocess.CompletedProcess:
    """As `run_script`, but in this process; `script` is a module: "probe", "probe.py" or "sources.data"."""
    module = importlib.import_module(script.removesuffix(".py"))
    arguments = [module.__file__, *map(str, words)]
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # has `reconfigure`, as stdout has
    error = io.StringIO()
    code = 0
    with mock.patch.object(sys, "argv", arguments):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                settings.run_script(module.COMMANDS, module.__doc__)
            except SystemExit as stopped:
                code = stopped.code or 0
    out.flush()
    return subprocess.CompletedProcess(arguments, code, out.buffer.getvalue().decode(), error.getvalue())


def plain(text: str) -> str:
    """A text on one line, without the lines and corners of a box that tyro draws."""
    return " ".join(re.sub("[\u2500-\u257f]", " ", text).split())


def assert_refused(result: subprocess.CompletedProcess, *words: str) -> None:
    """Exit status 2, no traceback, and a message on stderr that holds all `words`."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    for word in words:
        assert plain(word) in plain(result.stderr), result.stderr
