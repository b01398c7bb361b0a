"""reproduce/runs.py, text.py, lineage.py: runs of two steps on letters, and rows as each method has them."""

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_refused, run_here

import model
import seedprint
import train
from init import newborn
from lib.files import read_json
from lib.settings import UserError, read_command
from reproduce import lineage, runs, text
from sources import checkpoint, data
from sources.runs import read_rows

CPU = {"device": "cpu", "dtype": "float32"}
TWO_STEPS = CPU | {"source": ("backcopy",), "tokenizer": "bytes", "sequence_length": 32, "max_iters": 2}
TWO_STEPS |= {"warmup_iters": 1, "save_every": 1, "global_batch_size": 4, "eval_sequences": 4}


@pytest.fixture
def quick(tmp_path, monkeypatch, quick_training):
    """A folder to work in with a small data set of letters, and a function that trains two steps of a run."""
    monkeypatch.chdir(tmp_path)
    letters = data.backcopy
    with monkeypatch.context() as patch:
        patch.setattr(data, "backcopy", lambda: letters(count=3000))
        data.prepare(data.Settings(source=("backcopy",), tokenizer="bytes", held_out=0.03))

    def trained(folder):
        words = shlex.split(runs.RUNS[folder].replace("configs/", f"{ROOT}/configs/"))
        _, settings, _ = read_command(train.COMMANDS, [*words, "--out", folder], train.__doc__)
        return train.train(replace(settings, **TWO_STEPS))

    return trained


def test_every_run_is_one_that_train_knows(monkeypatch):
    monkeypatch.chdir(ROOT)
    for folder, words in runs.RUNS.items():
        _, settings, _ = read_command(train.COMMANDS, [*shlex.split(words), "--out", folder], train.__doc__)
        assert settings.out == folder and settings.init_from in (None, *runs.RUNS)


@pytest.mark.parametrize("reached, is_well", [(5, True), (3, True), (5, False)])
def test_a_run_that_was_stopped_stops_what_asked_for_it(reached, is_well, tmp_path, monkeypatch):
    """A signal ends train.py early, with status 0: nothing must be measured then."""
    monkeypatch.chdir(tmp_path)

    def stopped(words, **environment):
        assert words == "train.py configs/backcopy.py --out runs/backcopy --resume".split()
        assert environment == {"OMP_NUM_THREADS": "1"}
        checkpoint.save(tmp_path / f"runs/backcopy/step_{reached:07}", newborn("backcopy", 1))
        (tmp_path / "runs/backcopy/settings.json").write_text('{"max_iters": 5}')
        return is_well

    monkeypatch.setattr(runs, "run", stopped)
    done = run_here("reproduce.runs", "runs/backcopy")
    assert (done.returncode == 0) == (is_well and reached == 5)
    assert_refused(run_here("reproduce.runs", "runs/nowhere"), "unknown run")


def test_every_method_answers_for_every_pair(quick, monkeypatch):
    """Small models, trained for two steps: rows say what `paper` says of a pair."""
    small = {"vocab_size": 257, "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    for preset in ("tiny_llama", "tiny_qwen"):
        monkeypatch.setitem(model.PRESETS, preset, replace(model.PRESETS[preset], **small))
    monkeypatch.setattr(lineage, "SEEDS", (1000, 123))
    short = {"paper_sequences": 60, "paper_length": 9}
    monkeypatch.setattr(lineage, "PaperSettings", partial(lineage.PaperSettings, **short))
    monkeypatch.setattr(lineage, "default_folder", lambda *_: data.default_folder(("backcopy",), "bytes"))
    for folder in runs.RUNS:
        if "lineage" in folder and ("-1000" in folder or "-123" in folder):
            quick(folder)
    rows = lineage.tables(lineage.TableSettings(out="out", **CPU))["rows"]
    assert len(rows) == 16  # two of each table
    for row in rows:
        assert (row["verdict"] == "same birth") == row["kin"], row
        assert (row["pcs"] > 0.95) == row["kin"]
    pair = (rows[2]["base"], rows[2]["suspect"])
    expected = seedprint.paper(seedprint.PaperSettings(models=pair, out="out", **CPU, **short))["rows"][0]
    assert rows[2].items() >= {key: expected[key] for key in ("paper_mean_tau", "paper_t_p")}.items()


def test_text(quick, monkeypatch):
    small = replace(model.PRESETS["text_sink"], vocab_size=257, num_layers=2)
    monkeypatch.setitem(model.PRESETS, "text_sink", small)
    folders = [str(quick(f"runs/text/{kind}-42")) for kind in ("none", "attenuate")]
    named = text.NotedSettings(runs=tuple(folders), out="out")
    found = text.text(named)
    log = list(read_rows(Path(folders[1], "metrics.jsonl")))
    rows = [row for row in found["rows"] if row["calibration"] == "attenuate" and row["step"] == 2]
    for row, sinks in zip(rows, log[-1]["sinks"], strict=True):
        assert (row["sequence_length"], row["bos_first"]) == (sinks["sequence_length"], sinks["bos_first"])
        assert row["val_loss"] == log[-1]["val_loss"]
        assert row["tokens"] == 2 * 4 * 32
    tokens = data.TokenData(data.default_folder(("backcopy",), "bytes"), bos_first=True)
    (ours,) = [row for row in found["runs"] if row["calibration"] == "attenuate"]
    windows = tokens.held_out(10**6, 32)
    loss = train.mean_loss(checkpoint.load(folders[1]), *windows, 9, torch.device("cpu"), torch.float32)
    assert ours["text_loss"] == pytest.approx(loss, rel=1e-5)  # float32 sums
    assert ours["mean_loss"] == np.mean([row["val_loss"] for row in log if row["step"] and "val_loss" in row])


def test_what_is_noted_is_shown(tmp_path):
    """The committed numbers give the committed results, and say of a folder without any what to do."""
    for function, name in ((text.text, "text"), (text.birth, "birth")):
        made = function(text.NotedSettings(out=str(tmp_path)))
        assert made["rows"] == read_json(ROOT / f"results/{name}.json")["rows"]
    with pytest.raises(UserError, match="nowhere/settings.json"):
        text.text(text.NotedSettings(runs=("nowhere",), out=str(tmp_path)))


def test_half_of_the_way():
    """The step from which on a link stays beyond half of its way, up or down."""
    steps = [{"step": step, "up": up, "down": -up} for step, up in ((0, 1), (1, 4), (2, 2), (4, 4), (8, 5))]
    assert text.half_way(steps, "up") == text.half_way(steps, "down") == 4
