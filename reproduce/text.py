"""What do the calibrations do to sinks on text, and to what is learnt? (BB Figure 12, Table 7; SO)

    python -m reproduce.text                         # rows and figure, in seconds, from results/text/*.jsonl

A file holds what one run of configs/text_sink.py came to: what it was made with; each evaluation, with the
sinks of 100 held-out windows, as the text falls and with BOS first; and what was measured at its last step.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import sinks
from lib.data import default_folder
from lib.figures import COLOURS, legend_below, new_figure, save_figure
from lib.files import read_bytes
from lib.results import Experiment, interval
from lib.settings import Command, OutputSettings, UserError, run_script

CONFIG = "text_sink"  # the runs that the figure compares; others are variants of it
CALIBRATIONS = ("none", "amplify", "attenuate", "headnorm")  # the papers'; a fork's are its own to compare
KINDS = (*CALIBRATIONS, "explicit")  # and none, but with an explicit sink (ours)


@dataclass
class Settings(OutputSettings):
    """Where the numbers of the runs are."""

    numbers: str = "results/text"  # folder of what each run came to, .jsonl


def read_runs(folder):
    """What each run of a folder came to: a row of its making and its end, and a row for each evaluation."""
    for path in sorted(Path(folder).glob("text_*.jsonl")):
        begun, *evaluations, end = map(json.loads, read_bytes(path).splitlines())
        yield begun | end, evaluations


def reading_of(run):
    """How sinks are measured of a run, by its train.Settings: on held-out text, after BOS if it begins so."""
    begins_with_bos = run.bos_first or run.tokenizer == "bytes"  # as backcopy's documents do
    text = str(default_folder(run.source, run.tokenizer))
    return sinks.Settings(text=text, first_token="bos" if begins_with_bos else None, device="cpu")


def text(settings: Settings):
    """What do the calibrations do to sinks on text, and to what is learnt? (BB Figure 12, Table 7; SO)"""
    experiment = Experiment("text", "BB Figure 12, Table 7; SO", settings)
    rows, ends = [], []
    for run, evaluations in read_runs(settings.numbers):
        key = {name: run[name] for name in ("config", "calibration", "seed")}
        ends.append(run)
        for evaluation in evaluations:
            tokens = evaluation["step"] * run["step_tokens"]
            for measured in evaluation["sinks"]:
                row = key | {"step": evaluation["step"], "tokens": tokens} | measured
                alpha1 = row.pop("alpha1")  # by layer and head
                row |= {"mean_alpha1": np.mean(alpha1), "max_alpha1": np.max(alpha1)}
                rows.append(row | {"val_loss": evaluation["val_loss"]})
    if not ends:
        raise UserError(f"no runs in {settings.numbers}: make some by python -m reproduce.trainings text")
    draw(experiment.folder / "text.png", [row for row in rows if row["config"] == CONFIG], ends)
    hours = sum(run["core_hours"] for run in ends)
    columns = ("config", "calibration", "seed", "step", "val_loss", "text_loss", "sink_rate", "mean_alpha1")
    columns += ("max_alpha1", "disparity", "effective_rank")
    return experiment.save(rows, columns, ends, runs=ends, core_hours=round(hours, 2))


def draw(path, rows, ends) -> None:
    """Draw sinks by tokens, by length and by layer, what is lost, and SO's two links, by calibration."""
    title = "Which calibration ends sinks on text, and what does it cost? (dots: seeds; lines: their means)"
    figure, grid = new_figure(title, 2, 3, height=3.2)
    ends = [run for run in ends if run["config"] == CONFIG]
    with_bos = [row for row in rows if row["bos_first"]]
    longest = max(row["sequence_length"] for row in rows)
    last = max(row["step"] for row in rows)
    at_64 = [row for row in with_bos if row["sequence_length"] == 64]
    at_end = [row for row in with_bos if row["step"] == last]
    by_layer = [run | layer for run in ends for layer in run["layers"]]
    losses = differences([row for row in at_64 if row["step"] > 0], "val_loss")
    panels = [
        (at_64, "tokens", "sink_rate", "share of heads that sink (T = 64)", "linear"),
        (at_end, "sequence_length", "sink_rate", f"the same by length, up to {longest}, at the end", "log"),
        (by_layer, "layer", "sink_rate", "the same by layer, at the end (T = 64)", "linear"),
        (losses, "tokens", "val_loss", "held-out loss, minus that of none (nats/token)", "linear"),
        (by_layer, "layer", "disparity", "disparity of the stream at position 1", "linear"),
        (by_layer, "layer", "effective_rank", "effective rank of the stream", "linear"),
    ]
    for axes, (points, x, y, title, scale) in zip(grid.flat, panels):
        for kind, colour in zip(KINDS, COLOURS):
            chosen = [point for point in points if point["calibration"] == kind]
            places = sorted({point[x] for point in chosen})
            means = [np.mean([point[y] for point in chosen if point[x] == place]) for place in places]
            axes.plot(places, means, color=colour, lw=1.5, label=kind)
            seeds = [point[y] for point in chosen]
            axes.plot([point[x] for point in chosen], seeds, ".", color=colour, ms=3)
        axes.set_title(title, fontsize=10)
        axes.set(xlabel=x.replace("_", " "), xscale=scale)
    grid[1, 0].axhline(0, color="black", lw=0.6)
    legend_below(figure, grid[0, 0])
    save_figure(figure, path)


def differences(rows, key):
    """Rows of `key` minus that of the uncalibrated run of the same seed and step."""
    base = {(row["seed"], row.get("step")): row[key] for row in rows if row["calibration"] == "none"}
    pairs = [(row, base.get((row["seed"], row.get("step")))) for row in rows if row["calibration"] != "none"]
    return [row | {key: row[key] - other} for row, other in pairs if other is not None]


def draw_calibrations(path, rows) -> None:
    """Draw each configuration's sink rates, and losses minus those of the same seed uncalibrated."""
    configs = list(dict.fromkeys(row["config"] for row in rows))
    title = "Which calibration ends sinks, and what does it cost? (a dot: a seed; bars: 95 % of the mean)"
    figure, grid = new_figure(title, 2, len(configs), height=2.8)
    for (rates, costs), config in zip(grid.T, configs):
        chosen = [row for row in rows if row["config"] == config]
        seeds = len({row["seed"] for row in chosen})
        kinds = [kind for kind in KINDS if any(row["calibration"] == kind for row in chosen)]
        rates.set_title(f"{config}: {seeds} seeds of each", fontsize=10)
        draw_strips(rates, chosen, "sink_rate", kinds)
        draw_strips(costs, differences(chosen, "val_loss"), "val_loss", kinds)
        costs.axhline(0, color="black", lw=0.6)
    grid[0, 0].set_ylabel("share of heads that sink")
    grid[1, 0].set_ylabel("held-out loss, minus none's (nats/token)")
    save_figure(figure, path)


def draw_strips(axes, rows, key, kinds) -> None:
    """Draw `key` of each seed, side by side for each calibration, and the interval of the mean."""
    for place, (kind, colour) in enumerate(zip(kinds, COLOURS)):
        values = [row[key] for row in rows if row["calibration"] == kind]
        spread = place + np.linspace(-0.3, 0.3, max(2, len(values)))[: len(values)]
        axes.plot(spread, values, "o", ms=3.5, color=colour, alpha=0.7)
        if len(values) > 1:
            mean, low, high = interval(values).values()
            axes.errorbar(place, mean, [[mean - low], [high - mean]], color="black", capsize=4, fmt="_")
    axes.set_xticks(range(len(kinds)), kinds, fontsize=8)


COMMANDS = {"": Command(text, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
