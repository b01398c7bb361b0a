"""reproduce.trainings: runs made once, taken up and told apart; rows as each method gives them by itself."""

import json
from dataclasses import asdict, replace
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
from lib.settings import OutputSettings, RunSettings, UserError
from measure.units import observe
from model import PRESETS
from reproduce import text, trainings
from sources import checkpoint, data
from sources.inputs import TextSettings, read_tokens
from sources.runs import read_rows

CPU = {"device": "cpu", "dtype": "float32"}
TWO_STEPS = CPU | {"source": ("backcopy",), "tokenizer": "bytes", "sequence_length": 32, "max_iters": 2}
TWO_STEPS |= {"warmup_iters": 1, "save_every": 1, "global_batch_size": 4, "eval_sequences": 4}


@pytest.fixture
def quick(tmp_path, monkeypatch, quick_training):
    """A folder to work in, with a small data set of letters, on which every run is two steps long."""
    monkeypatch.chdir(tmp_path)
    letters, training = data.backcopy, trainings.training
    with monkeypatch.context() as patch:
        patch.setattr(data, "backcopy", lambda: letters(count=3000))
        data.prepare(data.Settings(source=("backcopy",), tokenizer="bytes", held_out=0.03))
    monkeypatch.setattr(
        trainings, "training", lambda *names, **changes: training(*names, **(changes | TWO_STEPS))
    )


def test_a_run_is_taken_up_where_it_was_stopped(quick, monkeypatch):
    run = trainings.training("a", "backcopy")
    trainings.train_all([replace(run, out="runs/whole")])

    def killed(step, settings):
        if step == 1:
            raise RuntimeError("killed")
        return rate(step, settings)

    rate = train.learning_rate
    with monkeypatch.context() as patch:
        patch.setattr(train, "learning_rate", killed)
        with pytest.raises(RuntimeError, match="killed"):
            trainings.train_all([run])
    trainings.train_all([run])
    ends = [Path(out, "step_0000002/model.safetensors").read_bytes() for out in (run.out, "runs/whole")]
    assert ends[0] == ends[1]
    monkeypatch.setattr(train, "train", None)  # it is made once
    trainings.train_all([run])


def test_a_run_that_was_stopped_stops_what_asked_for_it(tmp_path, monkeypatch):
    """A signal ends `train` early and without an error: nothing must be measured then."""

    def stopped(run):
        checkpoint.save(tmp_path / "run/step_0000003", newborn("backcopy", 1))

    monkeypatch.setattr(train, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        trainings.train_all([train.Settings(out=str(tmp_path / "run"), max_iters=5)])


def test_a_run_of_other_settings_is_not_reused(tmp_path):
    run = train.Settings(out=str(tmp_path / "run"), max_iters=5, **CPU)
    checkpoint.save(tmp_path / "run/step_0000005", newborn("backcopy", 1))
    (tmp_path / "run/settings.json").write_text(json.dumps(asdict(run)))
    as_train_may_leave_it = replace(run, keep="last", log_every=1, dtype="auto")
    trainings.train_all([run, as_train_may_leave_it])
    with pytest.raises(UserError, match="trained with learning_rate 0.001"):
        trainings.train_all([replace(run, learning_rate=0.5)])


def test_one_run_alone(quick):
    """`train` makes what it is asked for, and nothing else."""
    done = run_here("reproduce.trainings", "train", "runs/calibrations/backcopy-none-57")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in Path("runs").iterdir()] == ["calibrations"]
    assert_refused(run_here("reproduce.trainings", "train", "runs/nowhere"), "unknown run")


def test_mistakes_before_hours_of_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    for command, *words in (["calibrations", "--out", "file"], ["perplexity", "--text", "nowhere.txt"]):
        assert_refused(run_here("reproduce.trainings", command, *words), words[1])
    assert not Path("runs").exists()


def test_every_method_answers_for_every_pair(quick, monkeypatch):
    """Small models, trained for two steps: rows say what `paper` says of a pair."""
    small = {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    for preset in ("tiny_llama", "tiny_qwen"):
        monkeypatch.setitem(model.PRESETS, preset, replace(model.PRESETS[preset], **small))
    monkeypatch.setattr(trainings, "SEEDS", (1000, 123))
    short = {"paper_sequences": 60, "paper_length": 9}
    monkeypatch.setattr(trainings, "PaperSettings", partial(trainings.PaperSettings, **short))
    rows = trainings.lineage(RunSettings(out="out", **CPU))["rows"]
    assert len(rows) == 16  # two of each table
    for row in rows:
        assert (row["verdict"] == "same birth") == row["kin"], row
        assert (row["pcs"] > 0.95) == row["kin"]
    pair = (rows[2]["base"], rows[2]["suspect"])
    expected = seedprint.paper(seedprint.PaperSettings(models=pair, out="out", **CPU, **short))["rows"][0]
    assert rows[2].items() >= {key: expected[key] for key in ("paper_mean_tau", "paper_t_p")}.items()


def test_calibrations(quick, monkeypatch):
    """Some of them, two steps long: rows from the logs."""
    monkeypatch.setitem(trainings.CALIBRATED, "backcopy", (("none", "attenuate", "explicit"), (42, 123)))
    monkeypatch.setitem(trainings.CALIBRATED, "laptop", ((), ()))
    runs = trainings.calibration_runs("backcopy")
    found = trainings.calibrations(OutputSettings(out="out"))
    rows = found["rows"]
    for row, run in zip(rows, runs.values(), strict=True):
        log = read_rows(Path(run.out, "metrics.jsonl"))
        losses = [row["val_loss"] for row in log if "val_loss" in row]
        kind = "explicit" if run.explicit_sink else run.attn_calibration
        assert row["calibration"] == kind
        assert (row["constant_alpha"] > 0) == (kind == "explicit")
        assert row["val_loss"] == row["mean_loss"] == losses[-1] < losses[0]
    losses = {(row["calibration"], row["seed"]): row["val_loss"] for row in rows}
    for row in found["differences"]:
        if row["of"] == "val_loss":
            by_seed = [losses[row["calibration"], seed] - losses["none", seed] for seed in (42, 123)]
            assert row["mean"] == pytest.approx(np.mean(by_seed)) and row["low"] <= row["mean"] <= row["high"]


def test_text_and_birth(quick, monkeypatch):
    """Two steps on letters in place of code: what is committed of a run is what its folder says."""
    kinds = ("none", "attenuate")
    monkeypatch.setitem(trainings.CALIBRATED, "text_sink", (kinds, (42,)))
    monkeypatch.setitem(model.PRESETS, "text_sink", replace(model.PRESETS["text_sink"], num_layers=2))
    runs = trainings.calibration_runs("text_sink")
    trainings.train_named(trainings.TrainSettings(runs=("runs/text",)))
    named = text.NotedSettings(runs=tuple(run.out for run in runs.values()), out="out")
    found = text.text(named)
    names = {path.name for path in Path("out/text").iterdir()}
    assert names == {f"text_sink-{kind}-42.jsonl" for kind in kinds}
    run = runs["text_sink", "attenuate", 42]
    log = list(read_rows(Path(run.out, "metrics.jsonl")))
    rows = [row for row in found["rows"] if row["calibration"] == "attenuate" and row["step"] == 2]
    for row, sinks in zip(rows, log[-1]["sinks"], strict=True):
        assert (row["sequence_length"], row["bos_first"]) == (sinks["sequence_length"], sinks["bos_first"])
        assert row["max_alpha1"] == np.max(sinks["alpha1"]) and row["val_loss"] == log[-1]["val_loss"]
        assert row["tokens"] == 2 * 4 * 32
    tokens = data.TokenData(data.default_folder(run.source, run.tokenizer), bos_first=True)
    ours = next(row for row in found["runs"] if row["calibration"] == "attenuate")
    windows = tokens.held_out(10**6, 32)
    loss = train.mean_loss(checkpoint.load(run.out), *windows, 9, torch.device("cpu"), torch.float32)
    assert ours["text_loss"] == pytest.approx(loss, rel=1e-5)  # float32 sums
    # birth: the later builders, asked of the newborn
    found = text.birth(replace(named, runs=("runs/text/none-42",)))
    assert {row["step"] for row in found["rows"]} == {0, 1, 2}
    windows = data.TokenData(tokens.folder).held_out(100, 64)[0]
    windows[:, 0] = 256
    steps = checkpoint.steps("runs/text/none-42")
    newborn_activity, activity = (observe(checkpoint.load(step), windows) for step in (steps[0], steps[-1]))
    builders = [(row["layer"], row["unit"]) for row in found["builders"]]
    assert builders == activity.builders(activity.layer, len(builders))
    for row in found["builders"]:
        layer = newborn_activity.at_1[row["layer"]].abs() - newborn_activity.elsewhere[row["layer"]]
        below = (layer < layer[row["unit"]]).sum().item()
        assert row["percentile_activation"] == pytest.approx(100 * below / (len(layer) - 1))
        assert 1e-4 <= row["p"] <= 1
    assert Path("out/birth.png").exists()
    assert {path.name for path in Path("out/text").glob("birth*")} == {"birth_none-42.jsonl"}


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


def test_perplexity_is_the_cross_entropy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"line {i}: {i * i} and {'x' * (i % 7)}" for i in range(3000)))
    sets = data.Settings(source=(str(file),), tokenizer="bpe:290", held_out=0.5, out=str(tmp_path / "data"))
    tokenizer = data.TokenData(data.prepare(sets)).tokenizer
    config = replace(PRESETS["tiny_llama"], vocab_size=290, context_length=32, num_layers=1)
    runs = {("laptop", kind, 1): train.Settings(out=kind) for kind in "ab"}
    made = []
    monkeypatch.setattr(trainings, "calibration_runs", lambda config: runs)
    monkeypatch.setattr(trainings, "train_all", made.extend)
    for seed, run in enumerate(runs.values()):
        checkpoint.save(Path(run.out), newborn(config, seed), tokenizer=tokenizer)
        Path(run.out, "metrics.jsonl").write_text('{"step": 0, "threads": 1, "commit": "c"}\n')
    spec = checkpoint.parse_spec("a")
    tokens = read_tokens(TextSettings(text=str(file), num_sequences=256, device="cpu"), spec, 33)
    with torch.inference_mode():
        p = spec.load()(tokens[:, :-1]).double().softmax(-1)
    expected = -p.gather(2, tokens[:, 1:, None]).log().mean().item()
    settings = trainings.PerplexitySettings(text=str(file), out=".", **CPU)
    row, _ = trainings.perplexity(settings)["rows"]
    assert row["text_loss"] == pytest.approx(expected, rel=1e-5)  # float32 logits
    assert made == [*runs.values()]
