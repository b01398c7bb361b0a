"""lib/runtime.py: devices, formats, and shards of the work."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from lib import runtime
from lib.settings import RunSettings, UserError


def test_device_and_dtype(tmp_path, monkeypatch):
    def start(**settings):
        return runtime.start(RunSettings(out=str(tmp_path / "new" / "folder"), **settings))

    settings, *chosen = start(device="cpu", dtype="float32")
    assert chosen == [torch.device("cpu"), torch.float32]
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start()[1].type == "cpu"
    assert start(dtype=None)[2] == torch.float32  # a training's: bfloat16 on a GPU
    with pytest.raises(UserError, match="--device cpu"):
        start(device="cuda")
    monkeypatch.setattr(runtime, "choose_device", lambda name: torch.device("cuda"))
    assert start(dtype=None)[0].dtype == "bfloat16" and start()[0].dtype == "float32"


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runtime.choose_device("auto") == torch.device("cuda", 1)
    assert runtime.choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="more processes than GPUs"):
        runtime.choose_device("auto")


def test_unwritable_out(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere"), "null\0byte"):
        with pytest.raises(UserError, match=re.escape(repr(str(out)))):
            runtime.start(RunSettings(device="cpu", out=str(out)))


@pytest.mark.parametrize("count, world", [(0, 2), (2, 3), (7, 1), (64, 8)])
def test_shards_partition_the_range(monkeypatch, count, world):
    shards = []
    monkeypatch.setattr(runtime, "world_size", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(runtime, "rank", lambda rank=rank: rank)
        shards.append(runtime.shard(count))
    assert list(itertools.chain(*shards)) == list(range(count))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
