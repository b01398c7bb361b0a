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
    with pytest.raises(UserError, match="--device cpu"):
        start(device="cuda")


def test_bfloat16_where_it_is_measured_to_be_fast(tmp_path, monkeypatch, capsys):
    """At 1.5 times float32's speed; the choice is the first thing that an experiment says."""
    settings = RunSettings(out=str(tmp_path), device="cpu")
    for gain, expected in ((1.49, "float32"), (1.51, "bfloat16")):
        monkeypatch.setattr(runtime, "bfloat16_gain", lambda gain=gain: gain)
        assert runtime.start(settings)[2] == getattr(torch, expected)
        assert capsys.readouterr().out == f"--dtype auto: {expected} on cpu\n"


@pytest.mark.parametrize("gain, expected", [(1.0, "float32"), (2.0, "bfloat16")])
def test_ranks_take_the_first_ones_choice(gain, expected, monkeypatch):
    """Here is rank 1, which has measured something else than rank 0, whose gain the sum brings."""
    monkeypatch.setattr(runtime, "rank", lambda: 1)
    monkeypatch.setattr(runtime, "bfloat16_gain", lambda: 3.0 - gain)
    monkeypatch.setattr(runtime, "sum_over_ranks", lambda tensor: tensor + gain)
    assert runtime.choose_dtype(torch.device("cpu")) == expected


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
