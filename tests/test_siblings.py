"""reproduce.siblings: runs made once, taken up and told apart; rows recomputed from logs and by hand."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conftest import assert_refused, run_here

import train
from init import newborn
from lib import checkpoint, data
from lib.inputs import TextSettings, read_tokens
from lib.results import Experiment
from lib.runs import read_log
from lib.settings import UserError
from model import PRESETS
from reproduce import siblings

CPU = {"device": "cpu", "dtype": "float32"}


def small_task(folder: Path, monkeypatch) -> None:
    """Work in a folder that has the default data set of the letters, but a small one."""
    monkeypatch.chdir(folder)
    whole = data.backcopy
    with monkeypatch.context() as patch:
        patch.setattr(data, "backcopy", lambda: whole(count=3000))
        out = data.default_folder(("backcopy",), "bytes")
        data.prepare(data.Settings(source=("backcopy",), tokenizer="bytes", held_out=0.02, out=str(out)))


# ---- runs --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_training")
def test_a_run_is_taken_up_where_it_was_stopped(tmp_path, monkeypatch):
    small_task(tmp_path, monkeypatch)
    run = siblings.Settings(scale="smoke", runs="runs", **CPU).training("backcopy", "a")
    siblings.trained(replace(run, out="runs/whole"))

    def killed(step, settings):
        if step == 1:
            raise RuntimeError("killed")
        return rate(step, settings)

    rate = train.learning_rate
    with monkeypatch.context() as patch:
        patch.setattr(train, "learning_rate", killed)
        with pytest.raises(RuntimeError, match="killed"):
            siblings.trained(run)
    siblings.train_all({"a": run})
    ends = [Path(out, "step_0000002/model.safetensors").read_bytes() for out in (run.out, "runs/whole")]
    assert ends[0] == ends[1]
    monkeypatch.setattr(train, "train", None)  # it is made once
    assert siblings.trained(run) == "runs/a"


def test_a_run_that_was_stopped_stops_what_asked_for_it(tmp_path, monkeypatch):
    """A signal ends `train` early and without an error: siblings must not be measured then."""

    def stopped(run):
        checkpoint.save(tmp_path / "run/step_0000003", newborn("backcopy", 1))

    monkeypatch.setattr(train, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        siblings.trained(train.Settings(out=str(tmp_path / "run"), max_iters=5, **CPU))


def test_a_run_of_other_settings_is_not_reused(tmp_path):
    run = train.Settings(out=str(tmp_path / "run"), max_iters=5, **CPU)
    checkpoint.save(tmp_path / "run/step_0000005", newborn("backcopy", 1))
    (tmp_path / "run/settings.json").write_text(json.dumps(asdict(run)))
    assert siblings.trained(run) == run.out
    assert siblings.trained(replace(run, keep="last", log_every=1)) == run.out  # as train.py may leave a run
    with pytest.raises(UserError, match="--learning-rate.*--runs"):
        siblings.trained(replace(run, learning_rate=0.5))


def test_losses_are_those_after_birth(tmp_path):
    log = [{"step": 0, "val_loss": 9.0}, {"step": 1, "loss": 8.0}, {"step": 2, "val_loss": 7.1}]
    log.append({"step": 3, "val_loss": 5.1})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    assert siblings.losses(tmp_path) == {"val_loss": 5.1, "mean_loss": pytest.approx(6.1)}


def test_mistakes_before_hours_of_training(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(run_here("reproduce.siblings"), "calibrations")
    words = ["calibrations", "--out", tmp_path / "file", "--runs", tmp_path / "runs"]
    assert_refused(run_here("reproduce.siblings", *words), "--out")
    assert not (tmp_path / "runs").exists()


# ---- calibrations ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_training")
def test_calibrations(tmp_path, monkeypatch):
    """All of them, two steps long: rows from the logs."""
    small_task(tmp_path, monkeypatch)
    settings = siblings.CalibrationSettings(scale="smoke", out="out", **CPU)
    rows = siblings.calibrations(settings)["rows"]
    for row, run in zip(rows, siblings.calibration_runs(settings).values(), strict=True):
        log = list(read_log(Path(run.out)))
        assert row["calibration"] == run.attn_calibration
        assert row["val_loss"] == row["mean_loss"] == log[-1]["val_loss"] < log[0]["val_loss"]
        assert row["mean_alpha1"] == pytest.approx(row["uniform_alpha1"], rel=0.15)


def test_text_loss_is_the_cross_entropy(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i}: {i * i} and {'x' * (i % 7)}" for i in range(3000)))
    sets = data.Settings(source=(str(text),), tokenizer="bpe:290", held_out=0.5, out=str(tmp_path / "data"))
    tokenizer = data.TokenData(data.prepare(sets)).load_tokenizer()
    config = replace(PRESETS["tiny_llama"], vocab_size=290, context_length=32, num_layers=1)
    checkpoint.save(tmp_path / "a", newborn(config, 1), tokenizer=tokenizer)
    spec = checkpoint.parse_spec(str(tmp_path / "a"))
    model = spec.load()
    settings = siblings.CalibrationSettings(text=str(text), out=str(tmp_path / "out"), **CPU)
    experiment = Experiment("x", "", settings)
    tokens = read_tokens(TextSettings(text=str(text), num_sequences=256, device="cpu"), spec, 33)
    with torch.inference_mode():
        p = model(tokens[:, :-1]).double().softmax(-1)
    expected = -p.gather(2, tokens[:, 1:, None]).log().mean().item()
    assert siblings.text_loss(experiment, spec, model) == pytest.approx(expected, rel=1e-5)
