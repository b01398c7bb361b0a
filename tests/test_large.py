"""reproduce/large.py on models of a few thousand parameters."""

from pathlib import Path

import pytest
import torch
from conftest import KINDS

from lib import checkpoint
from lib.checkpoint import Newborn
from lib.inputs import random_tokens
from model import Transformer
from reproduce import large

CONFIG = KINDS["llama"]
BASE = Newborn(CONFIG, 0)


def test_the_disguise_computes_the_same():
    logits = []
    for change in (large.noised, large.disguised):
        model = Transformer(CONFIG).eval()
        model.load_state_dict({name: change(name, BASE.read(name)) for name in BASE.shapes})
        with torch.no_grad():
            logits.append(model(random_tokens(0, range(4), 32, CONFIG.vocab_size)))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-4)  # float32, and logits of 0.1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_what_is_written_is_compared(tmp_path):
    large.write(tmp_path / "base", BASE, lambda name, weight: weight)
    large.write(tmp_path / "child", BASE, large.disguised)
    written = checkpoint.parse_spec(str(tmp_path / "child")).open()
    for name in BASE.shapes:
        assert torch.equal(written.read(name), large.disguised(name, BASE.read(name)).bfloat16())
    row = large.compared(tmp_path / "base", tmp_path / "child")
    assert row["verdict"] == "same birth" and "its residual basis was changed" in row["sentence"]
    assert 0.01 < row["own_gigabytes"] < 2 and row["seconds"] > 0
