"""What the tests share: small models of every kind, and scripts run as a user runs them."""

import contextlib
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import common
import train
from model import Llama3Scaling, ModelConfig, Transformer

ROOT = Path(__file__).parent.parent
SMALL = dict(vocab_size=97, context_length=700, num_layers=3, num_heads=4, d_model=32, d_ff=48)
KINDS = {
    "llama": ModelConfig(**SMALL),
    "llama_gqa": ModelConfig(**SMALL, num_kv_heads=2),
    "llama_mqa_tied": ModelConfig(**SMALL, num_kv_heads=1, tie_embeddings=True),
    "llama3": ModelConfig(**SMALL, rope_theta=5e4, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "qwen2": ModelConfig(**SMALL, num_kv_heads=2, qkv_bias=True, norm_epsilon=1e-6),
    "qwen3": ModelConfig(**SMALL, num_kv_heads=2, head_dim=20, qk_norm=True),
    "gpt2": ModelConfig(**SMALL, norm="layernorm", mlp="gelu", tie_embeddings=True),
}


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model whose parameters are all random, and large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return model


@pytest.fixture(params=KINDS, ids=str)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def quick_training():
    """Training without the second of matrix products that only MFU needs, and without samples of text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "matmul_peak", lambda device, dtype: 1e11)
        patch.setattr(train, "generate", lambda *_: "a sample")
        yield


def run_script(*arguments, ranks: int = 1, env: dict | None = None) -> subprocess.CompletedProcess:
    """`python SCRIPT ...`, or the same under torchrun, from the repository's root; stderr is no terminal."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    command = [sys.executable, *launcher, *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


def run_here(script: str, *arguments) -> subprocess.CompletedProcess:
    """As `run_script`, but in this process, which has imported torch: for the many ways to be refused."""
    words, out, error, code = [script, *map(str, arguments)], io.StringIO(), io.StringIO(), 0
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(error)
    with mock.patch.object(sys, "argv", words), streams[0], streams[1]:
        try:
            common.run(importlib.import_module(script.removesuffix(".py")).plan)
        except SystemExit as stopped:
            code = stopped.code
    return subprocess.CompletedProcess(words, code, out.getvalue(), error.getvalue())


def assert_refused(result: subprocess.CompletedProcess, *words: str) -> None:
    """Exit status 2, and one line on stderr that holds all `words`."""
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0], lines[0]
