"""reproduce/: runs of two steps, rows as each method has them, verdicts of rows made by hand, and speed."""

import shlex
import shutil
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
from reproduce import claims, lineage, runs, text
from sources import checkpoint, data, saving
from sources.runs import read_rows, start_settings

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


@pytest.mark.parametrize("reached, is_well", [(5, True), (3, True), (5, False)])
def test_a_run_that_was_stopped_stops_what_asked_for_it(reached, is_well, tmp_path, monkeypatch):
    """A signal ends train.py early, with status 0: nothing must be measured then."""
    monkeypatch.chdir(tmp_path)

    def stopped(words, **environment):
        assert words == "train.py configs/backcopy.py --out runs/backcopy".split()
        assert environment == {"OMP_NUM_THREADS": "1"}
        saving.save(tmp_path / f"runs/backcopy/step_{reached:07}", newborn("backcopy", 1))
        (tmp_path / "runs/backcopy/settings.json").write_text('{"max_iters": 5}')
        return is_well

    monkeypatch.setattr(runs, "run", stopped)
    done = run_here("reproduce.runs", "runs/backcopy")
    assert (done.returncode == 0) == (is_well and reached == 5)
    assert_refused(run_here("reproduce.runs", "runs/nowhere"), "unknown run")


@pytest.mark.parametrize("folder", runs.RUNS)
def test_the_command_of_a_run_begins_it(folder, tmp_path, monkeypatch):
    """tiny_llama of seed 42 is the default but for settings that may change: --resume begins none."""
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "run", lambda words, **_: commands.append(words))
    with pytest.raises(UserError, match="did not end"):
        runs.train_named(runs.Settings((folder,)))
    words = commands[0][1:]
    config = [str(ROOT / words.pop(0))] if words[0].startswith("configs/") else []
    _, settings, defaults = read_command(train.COMMANDS, [*config, *words], train.__doc__)
    begun = start_settings(settings, defaults)
    assert (begun.out, begun.resume) == (folder, False)


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


def test_text_and_birth(quick, monkeypatch):
    small = replace(model.PRESETS["text_sink"], vocab_size=257, num_layers=2)
    monkeypatch.setitem(model.PRESETS, "text_sink", small)
    folders = [str(quick(f"runs/text/{kind}-42")) for kind in ("none", "attenuate", "explicit")]
    variant = shutil.copytree(folders[2], "runs/text/text_variant-42")
    named = text.NotedSettings(runs=(*folders, str(variant)), out="out")
    found = text.text(named)
    kinds = {(row["config"], row["calibration"]) for row in found["runs"]}
    ours = {("text_sink", kind) for kind in ("none", "attenuate", "explicit")}
    assert kinds == ours | {("text_variant", "explicit")}
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
    found = text.birth(replace(named, runs=("runs/text/none-42",)))
    assert {row["step"] for row in found["rows"]} == {0, 1, 2} and found["builders"]


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


HOLDS, FAILS, OPEN, NONE = "holds", "does not hold", "open", ""


def rows_of(table: dict) -> list[dict]:
    """The rows of a table of columns; a single value is every row's."""
    length = max(np.size(values) for values in table.values())
    columns = {name: np.resize(np.array(values, object), length).tolist() for name, values in table.items()}
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def test_one_rule_for_every_verdict():
    assert claims.verdict([True, np.True_]) == HOLDS
    assert claims.verdict([True, None, np.False_]) == FAILS
    assert claims.verdict([True, None]) == OPEN
    assert claims.verdict([]) == NONE
    ends = [(0.1, 0.2), (-0.2, -0.1), (-0.1, 0.2), (0.0, 0.0), (float("nan"), float("nan"))]
    assert [claims.above(*interval) for interval in ends] == [True, False, None, None, None]
    assert [claims.below(*interval) for interval in ends] == [False, True, None, None, None]


def calibrated(*first):
    """Losses of the runs of two calibrations, of one seed each."""
    names = ["amplify"] * len(first) + ["none"] * len(first)
    losses = [*first, 2.0, 2.1, 2.05][: 2 * len(first)]
    return dict(config="c", seed=[*range(len(first))] * 2, calibration=names, loss=losses)


def by_seeds(theory, seeds):
    return dict(mean_cosine=0.3, seed_std=0.02 * (seeds > 1), theory=[theory], num_seeds=seeds)


PROBED = dict(ratio=3.0, log10_p=0.0)
LENGTHS = dict(sequence_length=[16, 64], top1_count=[60, 5], num_sequences=500)
VARIANTS = dict(variant=["full"] * 3 + ["mlp"] * 3, mean_cosine=[0.0, 0.1, 0.4, 0.1, 0.11, 0.12])
SIZES = dict(variant=["mlp"] * 2 + ["full"] * 2, value=[0.05, 0.05, 0.1, 0.02])
POSITIONS = dict(layer=[1, 2] * 3, position=[1, 1, 2, 2, 3, 3], ratio=[3.0, 4.0, 3.5, 4.5, 3.0, 4.2])
JUDGED = [
    (claims.beyond_chance, PROBED | dict(num_sequences=[1000]), (), OPEN),  # fewer sequences than the paper's
    (claims.beyond_chance, PROBED | dict(num_sequences=[10_000]), (), FAILS),
    (claims.grows_with_length, LENGTHS, (), FAILS),
    (claims.own_favourites, dict(top1_token=[1, 1], log10_p=0.0), (), OPEN),
    (claims.more_often, dict(hit=[True] * 3 + [False] * 5), ("hit", 2e-5), HOLDS),
    (claims.more_often, dict(hit=[False] * 90_000), ("hit", 2e-4), FAILS),
    (claims.widening, VARIANTS, (), FAILS),
    (claims.ordered, SIZES, ("value", "variant", "full", "mlp"), FAILS),
    (claims.within, by_seeds(0.4, 10), (), FAILS),
    (claims.within, by_seeds(0.4, 2), (), HOLDS),  # Student's interval of two is wide
    (claims.within, by_seeds(0.31, 1), (), OPEN),
    (claims.decay, dict(std=[1, 1, 1, 1, 1, 1, 1.1]), (), FAILS),
    (claims.decay, dict(std=[1, 0.7, 0.75, 0.8]), (), HOLDS),  # the octave of position 4 is not full
    (claims.than_none, calibrated(3.0, 3.1, 3.0), ("amplify", "loss", claims.below), FAILS),
    (claims.than_none, calibrated(1.0), ("amplify", "loss", claims.below), OPEN),
    (claims.right_answers, dict(kin=[False, True], paper_t_p=[0.5, 1e-9], paper_u_p=0.005), (), FAILS),
    (claims.right_answers, dict(kin=[False, True], paper_t_p=[0.5, 1e-9], paper_u_p=[0.2, 0]), (), HOLDS),
    (claims.at_most, dict(pcs=[0.9], ics=0.2), (0.8, "pcs", "ics"), FAILS),
    (claims.by_interval, dict(rate=[0.02], low=0.02, high=0.05), ("rate", claims.below, 0.01), FAILS),
    (claims.by_interval, dict(rate=[0.2], low=-0.1, high=0.3), ("rate", claims.above), OPEN),
    (claims.first_stands_out, POSITIONS, ("ratio",), FAILS),
]


@pytest.mark.parametrize(("judge", "table", "arguments", "expected"), JUDGED)
def test_judges(judge, table, arguments, expected):
    assert claims.verdict(judge(rows_of(table), *arguments)[1]) == expected


def test_rows_are_selected_and_judged_apart():
    stacks = []
    for stack, sign in (("a", 1), ("b", -1)):
        stacks += [dict(stack=stack, layer=n, mean_cosine=sign * n) for n in range(4)]
    result = dict(rows=[], summary=stacks, settings=dict(seed=[1, 2]))
    both = claims.Claim("item", "says", "", "name", claims.rises, part="summary", apart="stack")
    text, verdict = both.read(result)
    assert verdict == FAILS and "stack b: -1 to -3 at layer 1 to 3" in text  # 0 is the input
    one = claims.Claim("item", "says", "", "name", claims.rises, part="summary", stack="a", layer=[1, 3])
    assert one.read(result) == ("1 to 3 at layer 1 to 3", HOLDS)
    assert claims.rows_where(result, "summary")[0]["num_seeds"] == 2  # known by the settings
    lacking = claims.Claim("item", "says", "", "name", claims.rises, stack="a")
    assert lacking.read(result) == ("not run here", NONE)
