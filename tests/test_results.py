"""lib/results.py: the JSON is exact and survives failures; the table shows what it should."""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from lib import files, results
from lib.settings import RunSettings, UserError


def begun(folder: Path) -> results.Experiment:
    """An experiment that has begun."""
    return results.Experiment("x", "BB Table 1", RunSettings(device="cpu", out=str(folder)))


# ---- the JSON ----------------------------------------------------------------------------------------------


def test_the_json_is_exact_and_a_line_an_item(tmp_path, capsys):
    rows = [
        {"name": "[1,  2]", "value": 0.1 + 0.2, "none": None, "seed": 123456},
        {"name": "}, {", "value": 1e-300, "none": None, "seed": None},
    ]
    returned = begun(tmp_path).save(rows, columns=("name", "value", "absent", "seed"), details=[[1, 2], [3]])
    text = (tmp_path / "x.json").read_text()
    saved = json.loads(text)
    assert saved == files.read_json(tmp_path / "x.json") == returned
    assert list(saved) == ["experiment", "paper", "settings", "environment", "rows", "details"]
    assert (saved["experiment"], saved["paper"]) == ("x", "BB Table 1")
    assert saved["rows"] == rows and saved["details"] == [[1, 2], [3]]
    dtype = saved["environment"]["dtype"]
    assert saved["settings"] == {"device": "cpu", "dtype": dtype, "out": str(tmp_path)}
    assert saved["environment"]["torch"] == torch.__version__ and saved["environment"]["seconds"] >= 0
    assert f"  {json.dumps(rows[0])}," in text.splitlines()
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed[0] == ["name", "value", "seed"]
    assert printed[1:] == [["[1,", "2]", "0.3", "123456"], ["},", "{", "1e-300", "None"]]


def test_nan_is_no_json(tmp_path):
    begun(tmp_path).save([{"value": 1.0}])
    text = (tmp_path / "x.json").read_text()
    with pytest.raises(UserError, match="not finite"):
        begun(tmp_path).save([{"value": math.nan}])
    assert (tmp_path / "x.json").read_text() == text
    assert len(list(tmp_path.iterdir())) == 1


BIG = """
import os, resource, signal, sys
from lib.results import Experiment
from lib.settings import Command, RunSettings, run_script

def work(settings):
    "Save a result of about a megabyte."
    experiment = Experiment("big", "none", settings)
    SETUP
    experiment.save([{"x": list(range(200_000))}])

run_script({"": Command(work, RunSettings(out=sys.argv.pop(), device="cpu"))}, "What?")
"""


def write_big(out: Path, setup: str = "pass") -> subprocess.CompletedProcess:
    """Save a large result in a process of its own, after `setup`."""
    command = [sys.executable, "-c", BIG.replace("SETUP", setup), str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_full_disk(tmp_path):
    """A file size limit stands in for a disk that fills while the result is written."""
    (tmp_path / "big.json").write_text("old")
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({2**16}, {resource.RLIM_INFINITY}))"
    result = write_big(tmp_path, f"signal.signal(signal.SIGXFSZ, signal.SIG_IGN); {limit}")
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and f"cannot write {tmp_path}/big.json" in result.stderr
    assert (tmp_path / "big.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_killed_while_writing(tmp_path):
    """No half file is left under the result's name, and the next attempt succeeds."""
    kill = f"os.replace = lambda *_: os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert write_big(tmp_path, kill).returncode == -signal.SIGKILL
    assert not (tmp_path / "big.json").exists()
    begun(tmp_path).save([{"value": 1}])
    assert files.read_json(tmp_path / "x.json")["rows"] == [{"value": 1}]


def test_environment_names_the_commit_or_nothing():
    record = results.environment(torch.device("cpu"), torch.bfloat16)
    assert (record["dtype"], record["processes"], record["torch"]) == ("bfloat16", 1, torch.__version__)
    assert record["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["commit"])
    assert record["device"] and os.sep not in record["device"]


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(results, "__file__", str(tmp_path / "lib" / "results.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results.commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))  # and where there is no git
    assert results.commit() is None


# ---- the table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("along", ["layer", "position"])
def test_long_series_are_printed_at_powers_of_two_and_the_end(capsys, along):
    results.print_rows([{along: index, "c": index / 8} for index in range(13)], (along, "c"))
    shown = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == [0, 1, 2, 4, 8, 12]


def test_means_over_seeds():
    """Groups by all that was not measured, in order of appearance; numpy's mean and standard deviation."""
    generator = np.random.default_rng(0)
    samples = []
    for _ in range(3):
        for layer in (4, 2):
            for length in (None, 8):
                c, std = generator.normal(size=2)
                samples.append({"layer": layer, "c": c, "length": length, "kind": "x", "std": std})
    rows = results.mean_over_seeds(samples, ("c", "std"))
    assert [(row["layer"], row["length"]) for row in rows] == [(4, None), (4, 8), (2, None), (2, 8)]
    for row in rows:
        group = [s for s in samples if (s["layer"], s["length"]) == (row["layer"], row["length"])]
        c = np.array([sample["c"] for sample in group])
        std = np.array([sample["std"] for sample in group])
        assert list(row) == ["layer", "length", "kind", "c", "std", "seed_std"]
        assert len(group) == 3 and row["kind"] == "x"
        measured = (row["c"], row["std"], row["seed_std"])
        # Sums of three numbers in another order.
        assert measured == pytest.approx((c.mean(), std.mean(), c.std()), rel=1e-12)
    json.dumps(rows)  # plain numbers, none of numpy's
