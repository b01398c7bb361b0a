"""What calibrations do to sinks on text, and how a sink is born (BB Figure 12, Table 7; SO; ours).

    python -m reproduce.runs runs/text/none-42                     # a run: a quarter of an hour
    python -m reproduce.text runs/text/none-42 --out mine          # measure it
    python -m reproduce.text birth runs/text/none-42 --out mine    # its sink at each kept step: half a minute
    python -m reproduce.text                                       # from results/text/*.jsonl: seconds

A .jsonl file records one run of configs/text_sink.py. `birth` measures at each step the last step's sink
heads, its largest dimension at position 1, and the neurons that build it.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import tyro

from lib import runtime
from lib.figures import column, curves
from lib.files import read_json
from lib.results import Experiment
from lib.settings import Command, OutputSettings, UserError, run_script
from measure import attention
from measure.anatomy import chain, rows_by_layer
from measure.units import observe
from reproduce.interventions import num_needed
from sources import checkpoint
from sources.data import default_folder, open_data
from sources.inputs import TextSettings, read_tokens
from sources.runs import read_rows, write_log

TEXT = "results/text"  # folder of the records
CONFIG = "text_sink"  # of the runs that are compared; others are its variants
MOST_BUILDERS = 8  # unless fewer make 99 % of the dimension
LINKS = ("builders", "dimension", "norm_ratio", "value_ratio", "key_alignment", "alpha1")  # of the chain


@dataclass
class NotedSettings(OutputSettings):
    """The settings of `text` and `birth`."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # run folders to measure and record in <out>/text


def noted(settings: NotedSettings, pattern, measure):
    """The rows of each recorded run, after measuring and recording the named ones, a file each."""
    folder = Path(settings.out, "text") if settings.runs else Path(TEXT)
    folder.mkdir(parents=True, exist_ok=True)
    for run in settings.runs:
        begun = read_json(Path(run, "settings.json")) | {"out": run}
        name, rows = measure(SimpleNamespace(**begun))
        write_log(folder / f"{name}.jsonl", rows)
    files = [list(read_rows(path)) for path in sorted(folder.glob(pattern))]
    if not files:
        raise UserError(f"no records in {folder}: name runs, such as runs/text/none-42")
    return files


def text(settings: NotedSettings):
    """What do the calibrations do to sinks on text, and to the loss? (BB Figure 12, Table 7; SO)"""
    experiment = Experiment("text", "BB Figure 12, Table 7; SO", settings)
    rows, runs = [], []
    for begun, *evaluations, end in noted(settings, "text_*.jsonl", record):
        key = {name: end[name] for name in ("config", "calibration", "seed")}
        runs.append(begun | end)
        for evaluation in evaluations:
            tokens = evaluation["step"] * begun["step_tokens"]
            for measured in evaluation["sinks"]:
                row = key | {"step": evaluation["step"], "tokens": tokens} | measured
                alpha1 = row.pop("alpha1")  # by layer and head
                rows.append(row | {"mean_alpha1": np.mean(alpha1), "val_loss": evaluation["val_loss"]})
    columns = ("config", "calibration", "seed", "step", "val_loss", "text_loss", "sink_rate", "disparity")
    result = experiment.save(rows, columns, runs, runs=runs)
    points = [row for row in rows if row["config"] == CONFIG and row["bos_first"]]
    last = max(column(points, "step"), default=0)
    ends = [row for row in points if row["step"] == last and row["sequence_length"] <= 128]
    ends.sort(key=lambda row: row["sequence_length"])
    question = "Which calibration ends sinks on text, and what does it cost? (a dot per seed)"
    keys = {"x": "val_loss", "y": "sink_rate", "series": "calibration", "panel": "sequence_length"}
    labels = {"style": "o", "xlabel": "held-out loss (nats/token)", "ylabel": "share of heads that sink"}
    curves(ends, experiment.folder / "text.png", question, **keys, **labels)
    return result


@torch.no_grad()
def record(run):
    """A run's name, and its record as rows: how it was made, its evaluations, its last step."""
    name, _, _ = Path(run.out).name.rpartition("-")
    model, reading, spec = checkpoint.load(run.out), reading_of(run), checkpoint.find_model(run.out)
    kind = "explicit" if model.config.explicit_sink else model.config.attn_calibration
    config = CONFIG if name == kind else name
    log = list(read_rows(Path(run.out, "metrics.jsonl")))
    T = run.sequence_length
    begun = {name: log[0][name] for name in ("commit", "dtype", "data")}
    rows = [begun | {"step_tokens": run.global_batch_size * T}]
    for row in log:
        if "sinks" in row:
            lengths = (32, 64, 128, 256, T) if row["step"] == run.max_iters else (64, T)
            shown = [sink for sink in row["sinks"] if sink["sequence_length"] in lengths]
            rows.append({"step": row["step"], "val_loss": row["val_loss"], "sinks": shown})
    data = open_data(run, is_new=False)
    inputs, targets = data.held_out(data.num_windows("val", T), T)  # all of them
    loss = sum(model(*windows).item() for windows in zip(inputs.split(8), targets.split(8)))  # sums
    losses = [row["val_loss"] for row in log if row["step"] > 0 and "val_loss" in row]
    end = {"config": config, "calibration": kind, "seed": run.seed, "threads": log[0]["threads"]}
    end |= {"val_loss": losses[-1], "mean_loss": np.mean(losses), "text_loss": loss / targets.numel()}
    tokens = read_tokens(reading, spec, 64)
    found, alpha = attention.sink_statistics(model, tokens)  # alpha (n, L, H)
    layers = rows_by_layer(chain(model, tokens), observe(model, tokens))
    for name in ("disparity", "effective_rank", "output_tau"):
        end[name] = np.mean([layer[name] for layer in layers if layer[name] is not None])
    rates = (alpha > attention.EPSILON).double().mean(dim=(0, 2)).tolist()
    layers = [layer | {"sink_rate": rate} for layer, rate in zip(layers, rates)]
    rows.append(end | found | {"layers": layers})
    return f"{config}-{kind}-{run.seed}", rows


def reading_of(run):
    """TextSettings for a run's train.Settings: held-out text, with BOS first if it trained so."""
    begins_with_bos = run.bos_first or run.tokenizer == "bytes"  # backcopy's documents do
    text = str(default_folder(run.source, run.tokenizer))
    return TextSettings(text=text, bos="always" if begins_with_bos else "never", device="cpu")


@torch.inference_mode()
def born(run):
    """A run's name, and rows: its builders, then the links of each kept step."""
    steps = checkpoint.steps(run.out)
    tokens = read_tokens(reading_of(run), checkpoint.find_model(run.out), 64)  # (n, 64)
    end = checkpoint.load(steps[-1])
    activity = observe(end, tokens)
    builders = activity.builders(min(MOST_BUILDERS, num_needed(activity)))
    alpha = attention.attention_to(end, tokens)[0][..., 0].mean(0)  # (L, H)
    is_sink = alpha >= alpha.max().clamp(max=attention.EPSILON)  # at least the largest
    heads = [(place + 1, head) for place, head in is_sink.nonzero().tolist()]  # layers from 1
    sink = {"layer": activity.layer, "dimension": activity.dimension, "heads": heads}
    name = Path(run.out).name
    rows = [{"run": name} | sink | {"builders": [{"layer": layer, "unit": unit} for layer, unit in builders]}]
    for step in runtime.progress(steps, desc=run.out, unit=" steps"):
        key = {"run": name, "step": int(step.name.removeprefix("step_"))}
        rows.append(key | links_of(checkpoint.load(step), tokens, sink, builders))
    return f"birth_{name}", rows


def links_of(model, tokens, sink, builders):
    """A number for each of LINKS in a step's model, its disparity and its sink rate."""
    activity, links = observe(model, tokens), chain(model, tokens)
    at_1 = [activity.at_1[layer - 1, unit] for layer, unit in builders]
    sink_layers, heads = np.array(sink["heads"]).T
    alignments = [links[layer]["key_alignment"][1:] for layer in np.unique(sink_layers)]
    found, alpha = attention.sink_statistics(model, tokens)  # alpha (n, L, H)
    return {
        "builders": torch.stack(at_1).abs().mean().item(),
        "dimension": activity.state[sink["layer"], sink["dimension"]].abs().item(),
        "disparity": activity.disparity[sink["layer"]].item(),
        "norm_ratio": torch.stack(column(links.values(), "norm_ratio")).mean().item(),
        "value_ratio": torch.stack(column(links.values(), "value_ratio")).mean().item(),
        "key_alignment": torch.stack(alignments).mean().item(),
        "alpha1": alpha[:, sink_layers - 1, heads].mean().item(),
        "sink_rate": found["sink_rate"],
    }


def birth(settings: NotedSettings):
    """How is a sink born? Which link comes first? (ours)"""
    experiment = Experiment("birth", "ours", settings)
    rows, builders, order = [], [], []
    for sink, *steps in noted(settings, "birth_*.jsonl", born):
        key = {"run": sink["run"]}
        builders += [key | {"dimension": sink["dimension"]} | row for row in sink["builders"]]
        order.append(key | {link: half_way(steps, link) for link in LINKS})
        for step in steps:
            for link, value in step.items():
                if link not in ("run", "step"):
                    rows.append(key | {"step": step["step"], "link": link, "value": value})
    return experiment.save(rows, shown=builders, builders=builders, half_way=order)


def half_way(steps, link):
    """The step from which a link stays beyond half of its change; None if it never does."""
    values = np.array(column(steps, link))
    is_beyond = abs(values - values[-1]) < abs(values - values[0])
    stays = np.logical_and.accumulate(is_beyond[::-1])[::-1]
    return steps[stays.argmax()]["step"] if stays.any() else None


COMMANDS = {"": Command(text, NotedSettings()), "birth": Command(birth, NotedSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
