"""What calibrations do to sinks on text, and how a sink is born (BB Figure 12, Table 7; SO; ours).

    python -m reproduce.trainings train runs/text/none-42          # a run: a quarter of an hour
    python -m reproduce.text runs/text/none-42 --out mine          # measure it
    python -m reproduce.text birth runs/text/none-42 --out mine    # its sink at each kept step: half a minute
    python -m reproduce.text                                       # from results/text/*.jsonl: seconds

A .jsonl file records one run of configs/text_sink.py: how it was made, each evaluation, and measurements of
its last step. `birth` measures at each step the last step's sink heads, its largest dimension at position 1,
and the neurons that build it.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from scipy.stats import rankdata

import sinks
from lib import runtime
from lib.figures import COLOURS, curves, new_figure, save_figure, unique
from lib.files import read_json
from lib.random import keyed_generator
from lib.results import Experiment
from lib.settings import Command, OutputSettings, UserError, run_script
from measure import attention
from measure.units import observe
from reproduce.claims import differences
from reproduce.interventions import num_needed
from sources import checkpoint
from sources.data import default_folder, open_data
from sources.inputs import read_tokens
from sources.runs import read_rows, write_log

CALIBRATIONS = ("none", "amplify", "attenuate", "headnorm")  # the papers'
KINDS = (*CALIBRATIONS, "explicit")  # explicit: `none` with an explicit sink (ours)
TEXT = "results/text"  # folder of the records
CONFIG = "text_sink"  # of the runs that are compared; others are its variants
DRAWS = 9999  # random sets of neurons to compare with the builders
LARGEST_SHARE = 0.99  # of the dimension that the builders make together,
MOST_BUILDERS = 8  # unless that takes more neurons
LINKS = {  # columns, and their names in the figure
    "builders": "builders: activation at position 1",
    "dimension": "their dimension at position 1",
    "norm_ratio": "norm of the stream there, to others'",
    "value_ratio": "norm of the values there, to others'",
    "key_alignment": "alignment of other keys, sink layers",
    "alpha1": "attention of the sink heads",
}


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
    rows, ends = [], []
    for begun, *evaluations, end in noted(settings, "text_*.jsonl", record):
        key = {name: end[name] for name in ("config", "calibration", "seed")}
        ends.append(begun | end)
        for evaluation in evaluations:
            tokens = evaluation["step"] * begun["step_tokens"]
            for measured in evaluation["sinks"]:
                row = key | {"step": evaluation["step"], "tokens": tokens} | measured
                alpha1 = row.pop("alpha1")  # by layer and head
                row |= {"mean_alpha1": np.mean(alpha1), "max_alpha1": np.max(alpha1)}
                rows.append(row | {"val_loss": evaluation["val_loss"]})
    hours = sum(run["core_hours"] for run in ends)
    columns = ("config", "calibration", "seed", "step", "val_loss", "text_loss", "sink_rate", "mean_alpha1")
    columns += ("max_alpha1", "disparity", "effective_rank")
    result = experiment.save(rows, columns, ends, runs=ends, core_hours=round(hours, 2))
    draw_text(experiment.folder / "text.png", rows, ends)
    return result


@torch.no_grad()
def record(run):
    """A run's name, and its record as rows: how it was made, its evaluations, its last step."""
    name, _, _ = Path(run.out).name.rpartition("-")
    kind = "explicit" if run.explicit_sink else run.attn_calibration
    config = CONFIG if name == kind else name
    log = list(read_rows(Path(run.out, "metrics.jsonl")))
    T = run.sequence_length
    step_tokens = run.global_batch_size * T
    seconds = sum(step_tokens / row["tokens_per_second"] for row in log if "tokens_per_second" in row)
    begun = {name: log[0][name] for name in ("commit", "dtype", "data")}
    rows = [begun | {"step_tokens": step_tokens, "core_hours": seconds * log[0]["threads"] / 3600}]
    for row in log:
        if "sinks" in row:
            lengths = (32, 64, 128, 256, T) if row["step"] == run.max_iters else (64, T)
            shown = [sink for sink in row["sinks"] if sink["sequence_length"] in lengths]
            rows.append({"step": row["step"], "val_loss": row["val_loss"], "sinks": shown})
    tokens = open_data(run, is_new=False)
    inputs, targets = tokens.held_out(tokens.num_windows("val", T), T)  # all of them
    model = checkpoint.load(run.out)
    loss = sum(model(*windows).item() for windows in zip(inputs.split(8), targets.split(8)))  # sums
    end, layers = end_of(run, config, kind, run.seed)
    rows.append(end | {"text_loss": loss / targets.numel(), "layers": layers})
    return f"{config}-{kind}-{run.seed}", rows


@torch.inference_mode()
def end_of(run, config, kind, seed):
    """A row of a run's losses, and its sinks and links on 64 held-out tokens; and a row per layer."""
    log = read_rows(Path(run.out, "metrics.jsonl"))
    losses = [row["val_loss"] for row in log if row["step"] > 0 and "val_loss" in row]
    row = begun_row(run, config, kind, seed)
    row |= {"val_loss": losses[-1], "mean_loss": np.mean(losses)}
    row["uniform_alpha1"] = (1 / torch.arange(1, 65).double()).mean().item()
    reading, spec = reading_of(run), checkpoint.parse_spec(run.out)
    model = spec.load()
    found, alpha = attention.sink_statistics(model, read_tokens(reading, spec, 64))  # alpha (n, L, H)
    row |= found
    layers = sinks.anatomy_rows(reading, spec, model)["layers"]
    for name in ("disparity", "effective_rank", "output_tau"):
        row[name] = np.mean([layer[name] for layer in layers if layer[name] is not None])
    rates = (alpha > attention.EPSILON).double().mean(dim=(0, 2)).tolist()
    return row, [layer | {"sink_rate": rate} for layer, rate in zip(layers, rates)]


def begun_row(run, config, kind, seed):
    """The first columns of a run's row: its name, threads and commit."""
    begun = next(read_rows(Path(run.out, "metrics.jsonl")))
    row = {"config": config, "calibration": kind, "seed": seed}
    return row | {name: begun[name] for name in ("threads", "commit")}


def reading_of(run):
    """sinks.Settings for a run's train.Settings: held-out text, with BOS first if it trained so."""
    begins_with_bos = run.bos_first or run.tokenizer == "bytes"  # backcopy's documents do
    text = str(default_folder(run.source, run.tokenizer))
    return sinks.Settings(text=text, bos="always" if begins_with_bos else "never", device="cpu")


def draw_text(path, rows, ends) -> None:
    """Draw runs of CONFIG: sinks by tokens, length and layer, the loss, SO's two links."""
    rows = [row for row in rows if row["config"] == CONFIG and row["bos_first"]]
    last = max([row["step"] for row in rows], default=0)
    at_64 = [row for row in rows if row["sequence_length"] == 64]
    at_end = sorted([row for row in rows if row["step"] == last], key=lambda row: row["sequence_length"])
    losses = differences([row for row in at_64 if row["step"] > 0], "val_loss")
    by_layer = [run | layer for run in ends if run["config"] == CONFIG for layer in run["layers"]]
    title = "Which calibration ends sinks on text, and what does it cost? (dots: seeds; lines: their means)"
    panels = [
        (at_64, "tokens", "sink_rate", "share of heads that sink (T = 64)"),
        (at_end, "sequence_length", "sink_rate", "the same by length, at the end"),
        (by_layer, "layer", "sink_rate", "the same by layer, at the end (T = 64)"),
        (losses, "tokens", "val_loss", "held-out loss, minus that of none (nats/token)"),
        (by_layer, "layer", "disparity", "disparity of the stream at position 1"),
        (by_layer, "layer", "effective_rank", "effective rank of the stream"),
    ]
    draw_kinds(path, title, panels)


def draw_kinds(path, title, panels) -> None:
    """Draw six panels (points, x, y, title): for each calibration a dot per seed, and the mean."""
    figure, grid = new_figure(title, 2, 3, height=3.2)
    for axes, (points, x, y, title) in zip(grid.flat, panels):
        for kind, colour in zip(KINDS, COLOURS):
            chosen = [point for point in points if point["calibration"] == kind]
            places = unique(chosen, x)
            means = [np.mean([point[y] for point in chosen if point[x] == place]) for place in places]
            axes.plot(places, means, "_-", color=colour, lw=1.5, ms=9, label=kind)
            axes.plot([point[x] for point in chosen], [point[y] for point in chosen], ".", color=colour, ms=4)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x.replace("_", " "))
        if y == "val_loss":  # minus that of none
            axes.axhline(0, color="black", lw=0.6)
        if x == "sequence_length":
            axes.set_xscale("log")
    save_figure(figure, path, grid[0, 0])


@torch.inference_mode()
def born(run):
    """A run's name, and rows: its builders, then the links of each kept step."""
    steps = checkpoint.steps(run.out)
    tokens = read_tokens(reading_of(run), checkpoint.parse_spec(run.out), 64)  # (n, 64)
    end = checkpoint.load(steps[-1])
    activity = observe(end, tokens)
    layer = activity.layer
    builders = activity.builders(layer, min(MOST_BUILDERS, num_needed(activity, layer, LARGEST_SHARE)))
    alpha = attention.attention_to(end, tokens)[..., 0].mean(0)  # (L, H)
    is_sink = alpha >= alpha.max().clamp(max=attention.EPSILON)  # at least the largest
    heads = [(place + 1, head) for place, head in is_sink.nonzero().tolist()]  # layers from 1
    sink = {"layer": layer, "dimension": activity.dimension(layer), "heads": heads}
    name = Path(run.out).name
    rows = [{"run": name} | sink | {"builders": specials(checkpoint.load(steps[0]), tokens, sink, builders)}]
    for step in runtime.progress(steps, desc=run.out, unit=" steps"):
        key = {"run": name, "step": int(step.name.removeprefix("step_"))}
        rows.append(key | links_of(checkpoint.load(step), tokens, sink, builders))
    return f"birth_{name}", rows


def links_of(model, tokens, sink, builders):
    """A number for each of LINKS in a step's model, and for the builders at other positions."""
    activity = observe(model, tokens, with_chain=True)
    at_1 = [activity.at_1[layer][unit] for layer, unit in builders]
    elsewhere = [activity.elsewhere[layer][unit] for layer, unit in builders]
    sink_layers, heads = np.array(sink["heads"]).T
    alignments = [activity.of["key_alignment"][one][1:] for one in np.unique(sink_layers)]
    found, alpha = attention.sink_statistics(model, tokens)  # alpha (n, L, H)
    return {
        "builders": torch.stack(at_1).abs().mean().item(),
        "builders_elsewhere": torch.stack(elsewhere).mean().item(),
        "dimension": activity.state[sink["layer"], sink["dimension"]].abs().item(),
        "disparity": activity.disparity[sink["layer"]].item(),
        "norm_ratio": found["norm_ratio"],
        "value_ratio": found["value_ratio"],
        "key_alignment": torch.stack(alignments).mean().item(),
        "alpha1": alpha[:, sink_layers - 1, heads].mean().item(),
        "sink_rate": found["sink_rate"],
    }


def specials(newborn, tokens, sink, builders):
    """Each builder's percentiles in its layer at initialization; `p` of their mean against random neurons."""
    activity = observe(newborn, tokens)
    weights = torch.stack([newborn.down(layer)[sink["dimension"]].abs() for layer in activity.at_1])
    rises = [at_1.abs() - activity.elsewhere[layer] for layer, at_1 in activity.at_1.items()]
    activations = torch.stack(rises)  # (L, d_ff)
    below = rankdata([activations, weights], "min", axis=2) - 1  # neurons of the layer below it
    activation, weight = 100 * (below / (weights.shape[1] - 1))  # (L, d_ff) each
    both = activation + weight
    layers, units = np.array(builders).T
    found = both[layers - 1, units].mean()
    generator = keyed_generator("random units", *[number for builder in builders for number in builder])
    others = generator.integers(both.shape[1], size=(DRAWS, len(builders)))
    drawn = both[layers - 1, others].mean(1)  # (DRAWS,)
    p = (1 + np.sum(drawn >= found)) / (1 + DRAWS)
    rows = []
    for layer, unit in builders:
        row = {"layer": layer, "unit": unit, "percentile_activation": activation[layer - 1, unit]}
        rows.append(row | {"percentile_weight": weight[layer - 1, unit], "p": p})
    return rows


def birth(settings: NotedSettings):
    """How is a sink born? Which link comes first, and were its builders special at initialization? (ours)"""
    experiment = Experiment("birth", "ours", settings)
    rows, points, builders, order = [], [], [], []
    for sink, *steps in noted(settings, "birth_*.jsonl", born):
        key = {"run": sink["run"]}
        builders += [key | {"dimension": sink["dimension"]} | row for row in sink["builders"]]
        order.append(key | {link: half_way(steps, link) for link in LINKS})
        for step in steps:
            place = max(0.5, step["step"])  # step 0, on a logarithmic axis
            for link, value in step.items():
                if link not in ("run", "step"):
                    rows.append(key | {"step": step["step"], "link": link, "value": value})
                if link in LINKS:
                    points.append(key | {"link": LINKS[link], "step": place, "size": value / steps[-1][link]})
    question = "How is a sink born? (each link over its value at the last step)"
    keys = {"x": "step", "y": "size", "series": "link", "panel": "run", "style": ".-"}
    options = {"xlabel": "step (birth at the left)", "ylabel": "times its last value", "ylim": (0, 2)}
    result = experiment.save(rows, shown=builders, builders=builders, half_way=order)
    curves(points, experiment.folder / "birth.png", question, **keys, log="x", **options)
    return result


def half_way(steps, link):
    """The step from which a link stays beyond half of its change; None if it never does."""
    values = np.array([step[link] for step in steps])
    is_beyond = abs(values - values[-1]) < abs(values - values[0])
    stays = np.logical_and.accumulate(is_beyond[::-1])[::-1]
    return steps[stays.argmax()]["step"] if stays.any() else None


COMMANDS = {"": Command(text, NotedSettings()), "birth": Command(birth, NotedSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
