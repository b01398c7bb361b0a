"""What do the calibrations do to sinks on text, and to what is learnt? (BB Figure 12, Table 7; SO)

    python -m reproduce.text                                              # from results/text/*.jsonl: seconds
    python -m reproduce.text runs/text/none-42 --numbers mine --out mine  # trains a run: a quarter of an hour
    python -m reproduce.text runs/text --numbers mine --out mine          # all 18: seven hours

A file holds what one run of configs/text_sink.py came to: what it was made with; each evaluation, with the
sinks of 100 held-out windows, as the text falls and with BOS first; and what was measured at its last step.
"""

from pathlib import Path

import numpy as np
import torch

import train
from lib import checkpoint
from lib.data import TokenData, default_folder
from lib.results import Experiment
from lib.runs import read_log, write_log
from lib.settings import Command, UserError, run_script
from reproduce import trainings
from reproduce.trainings import CONFIG, NotedSettings, differences


def text(settings: NotedSettings):
    """What do the calibrations do to sinks on text, and to what is learnt? (BB Figure 12, Table 7; SO)"""
    experiment = Experiment("text", "BB Figure 12, Table 7; SO", settings)
    Path(settings.numbers).mkdir(parents=True, exist_ok=True)
    for key, run in trainings.named(settings.runs, trainings.text_runs()).items():
        trainings.train_all([run])
        write_log(Path(settings.numbers, "-".join(map(str, key)) + ".jsonl"), record(run, *key))
    rows, ends = [], []
    for run, evaluations in trainings.noted_text_runs(settings.numbers):
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
        raise UserError(f"nothing noted in {settings.numbers}: name runs, as runs/text/none-42")
    title = "Which calibration ends sinks on text, and what does it cost? (dots: seeds; lines: their means)"
    trainings.draw_kinds(experiment.folder / "text.png", title, panels_of(rows, ends))
    hours = sum(run["core_hours"] for run in ends)
    columns = ("config", "calibration", "seed", "step", "val_loss", "text_loss", "sink_rate", "mean_alpha1")
    columns += ("max_alpha1", "disparity", "effective_rank")
    return experiment.save(rows, columns, ends, runs=ends, core_hours=round(hours, 2))


def record(run: train.Settings, *key):
    """A run in a few kB: how it was made, its evaluations with their sinks, and what it came to."""
    log = list(read_log(Path(run.out)))
    T = run.sequence_length
    step_tokens = run.global_batch_size * T
    seconds = sum(step_tokens / row["tokens_per_second"] for row in log[1:])
    begun = {name: log[0][name] for name in ("commit", "dtype", "data")}
    yield begun | {"step_tokens": step_tokens, "core_hours": seconds * log[0]["threads"] / 3600}
    for row in log:
        if "sinks" in row:
            lengths = (32, 64, 128, 256, T) if row["step"] == run.max_iters else (64, T)
            shown = [sink for sink in row["sinks"] if sink["sequence_length"] in lengths]
            yield {"step": row["step"], "val_loss": row["val_loss"], "sinks": shown}
    model = checkpoint.load(run.out)
    tokens = TokenData(default_folder(run.source, run.tokenizer), run.bos_first)
    windows = tokens.held_out(tokens.num_windows("val", T), T)  # all of them
    loss = train.evaluate(model, *windows, run.micro_batch_size, torch.device("cpu"), torch.float32)
    row, layers = trainings.end_of(run, *key)
    yield row | {"text_loss": loss, "layers": layers}


def panels_of(rows, ends):
    """Six panels of the runs of CONFIG: sinks by tokens, by length and by layer, the loss, SO's two links."""
    rows = [row for row in rows if row["config"] == CONFIG and row["bos_first"]]
    last = max([row["step"] for row in rows], default=0)
    at_64 = [row for row in rows if row["sequence_length"] == 64]
    at_end = sorted([row for row in rows if row["step"] == last], key=lambda row: row["sequence_length"])
    losses = differences([row for row in at_64 if row["step"] > 0], "val_loss")
    by_layer = [run | layer for run in ends if run["config"] == CONFIG for layer in run["layers"]]
    return [
        (at_64, "tokens", "sink_rate", "share of heads that sink (T = 64)"),
        (at_end, "sequence_length", "sink_rate", "the same by length, at the end"),
        (by_layer, "layer", "sink_rate", "the same by layer, at the end (T = 64)"),
        (losses, "tokens", "val_loss", "held-out loss, minus that of none (nats/token)"),
        (by_layer, "layer", "disparity", "disparity of the stream at position 1"),
        (by_layer, "layer", "effective_rank", "effective rank of the stream"),
    ]


COMMANDS = {"": Command(text, NotedSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
