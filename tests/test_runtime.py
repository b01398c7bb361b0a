"""lib/runtime.py: devices, shares of the work, and files and folders that survive a failure."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_script

from lib import runs, runtime
from lib.settings import RunSettings, UserError

# ---- device ------------------------------------------------------------------------------------------------


def test_device_and_dtype(tmp_path, monkeypatch):
    def start(**settings):
        return runtime.start(RunSettings(out=str(tmp_path / "new" / "folder"), **settings))

    settings, *chosen = start(device="cpu", dtype="float32")
    assert chosen == [torch.device("cpu"), torch.float32]
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    for is_fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda is_fast=is_fast: is_fast)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert start(device="cpu")[2] == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start()[1].type == "cpu"
    with pytest.raises(UserError, match="--device cpu"):
        start(device="cuda")


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runtime.choose_device("auto") == torch.device("cuda", 1)
    assert runtime.choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="more processes than GPUs: this machine has 2"):
        runtime.choose_device("cuda")


def test_unwritable_out(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere"), "null\0byte"):
        with pytest.raises(UserError, match=re.escape(repr(str(out)))):
            runtime.start(RunSettings(device="cpu", out=str(out)))


def test_a_batch_is_never_a_single_sequence():
    cpu = torch.device("cpu")
    assert runtime.default_batch_size(cpu, 64) * 64 == runtime.BATCH_TOKENS["cpu"]
    assert runtime.default_batch_size(cpu, 10**6) == 2


# ---- processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shares_partition_the_range(monkeypatch, count, world):
    shares = []
    monkeypatch.setattr(runtime, "world_size", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(runtime, "rank", lambda rank=rank: rank)
        shares.append(runtime.share(count))
    assert list(itertools.chain(*shares)) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


TWO_RANKS = """
import sys
import torch
from lib import runs, runtime
from lib.results import Experiment
from lib.settings import Command, RunSettings, UserError, run_script

def work(settings):
    "Sum a share of the numbers below 10, and refuse."
    experiment = Experiment("sum", "none", settings)
    mine = torch.tensor(sum(runtime.share(10)))
    total = runtime.sum_over_ranks(mine.clone()).item()
    runtime.wait_for_all(experiment.device)
    experiment.save([{"total": total, "others": total - mine.item()}])
    raise UserError("that was all")

run_script({"": Command(work, RunSettings(out=sys.argv.pop(), device="cpu"))}, "What?")
"""


def test_two_processes_share_and_one_speaks(tmp_path):
    """Sums see both; the JSON, the table and the mistake come from the first alone."""
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    result = run_script(script, tmp_path / "out", ranks=2, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 1, result.stderr  # torchrun's own, when a process ends with 2
    saved = json.loads((tmp_path / "out" / "sum.json").read_text())
    assert saved["rows"] == [{"total": 45, "others": 35}]  # 0 + ... + 4 = 10 is the first's
    assert saved["environment"]["processes"] == 2
    assert result.stdout.split() == ["total", "others", "45", "35"]
    assert result.stderr.count("two.py: that was all") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sum.json"]


# ---- files -------------------------------------------------------------------------------------------------


def test_a_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    with runtime.atomic_file(path) as temporary:
        temporary.write_text("old")
        assert not path.exists()
    with pytest.raises(RuntimeError), runtime.atomic_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("was_there", [False, True])
def test_a_failure_leaves_the_old_folder(tmp_path, was_there):
    path = tmp_path / "run"
    if was_there:
        with runtime.atomic_folder(path) as new:
            (new / "old").write_text("all")
    with pytest.raises(RuntimeError), runtime.atomic_folder(path) as new:
        (new / "torn").write_text("half")
        raise RuntimeError
    left = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")]
    assert left == (["run", "run/old"] if was_there else [])
    with runtime.atomic_folder(path) as new:
        (new / "whole").write_text("all")
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")] == ["run", "run/whole"]


def test_a_folder_that_a_process_of_our_number_left_half_written(tmp_path):
    left = tmp_path / f".run.{os.getpid()}.tmp"  # as in containers, where numbers come again
    left.mkdir()
    (left / "torn").write_text("half")
    with runtime.atomic_folder(tmp_path / "run") as new:
        (new / "whole").write_text("all")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["whole"]
    assert not left.exists()


def test_killed_while_a_folder_takes_its_place(tmp_path):
    """Between the two renames nothing bears the folder's name; the next attempt finds the old one again."""
    run = tmp_path / "run"
    with runtime.atomic_folder(run) as new:
        (new / "file").write_text("old")
    code = f"""
import os, pathlib, signal
from lib import runs, runtime
rename = os.rename
def rename_and_die(old, new):
    rename(old, new)
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = rename_and_die
with runtime.atomic_folder(pathlib.Path({str(run)!r})) as new:
    (new / "file").write_text("new")
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert not run.exists()
    with pytest.raises(RuntimeError), runtime.atomic_folder(run):
        raise RuntimeError
    assert (run / "file").read_text() == "old"
    runs.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [run]


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    (tmp_path / ".loss.csv.123.tmp").write_text("")
    (tmp_path / ".step_0000001.45.tmp").mkdir()
    (tmp_path / ".step_0000001.45.tmp" / "x").write_text("")
    kept = [".lock", ".step_0000001.old.tmp", "notes.7.tmp", "step_0000001"]
    for name in kept:
        (tmp_path / name).mkdir()
    runs.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


HOLD = """
import pathlib, sys, time
from lib.runs import sole_owner
with sole_owner(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_run_folder_has_one_owner(tmp_path):
    """A second process is refused; a killed one holds nothing."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout.readline() == "held\n"
            with pytest.raises(UserError, match="another process trains"), runs.sole_owner(tmp_path):
                pass
        finally:
            owner.kill()
    for _ in range(2):
        with runs.sole_owner(tmp_path):
            pass


def test_sha256(tmp_path):
    (tmp_path / "abc").write_text("abc")  # the example of FIPS 180-2, Appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert runtime.sha256(tmp_path / "abc") == expected
