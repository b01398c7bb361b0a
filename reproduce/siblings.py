"""What becomes of siblings: models that differ in one thing, trained on the same text in the same order?

    python -m reproduce.siblings births                         # is an unprejudiced birth better? 35 minutes
    python -m reproduce.siblings calibrations --text wiki.txt   # BB Figure 12, Table 7, SO: 32 models, 80 minutes

Each run is made once and reused, and taken up where it was stopped. `--scale paper` is the papers' own size.
"""

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

import sinks
import train
from lib import checkpoint, runtime
from lib.checkpoint import Spec, parse_spec
from lib.data import TRIGGERS
from lib.figures import curves
from lib.inputs import TextSettings, read_tokens
from lib.results import Experiment, mean_over_seeds
from lib.settings import Command, RunSettings, UserError, read_config, run_script
from measure import attention
from measure.cosines import interval
from model import CHOICES, Transformer
from probe import count_predictions

CONFIGS = Path(__file__).parent.parent / "configs"
SEEDS = (42, 123, 1000, 2000)
OPENWEBTEXT = {"source": ("hf:Skylion007/openwebtext",), "tokenizer": "bpe:32000"}  # the papers' text
SMOKE = {  # the quickest training
    "source": ("backcopy",),
    "tokenizer": "bytes",
    "sequence_length": 32,
    "eval_sequences": 4,
    "max_iters": 2,
    "warmup_iters": 1,
    "save_every": 1,
    "global_batch_size": 4,
    "micro_batch_size": 4,
}
# What siblings need not have in common. What an evaluation reads and when it comes, they must.
MAY_DIFFER = train.MAY_CHANGE - {"max_iters", "eval_every", "eval_sequences"} | {"keep"}


@dataclass
class Settings(RunSettings):
    """What `births`, and `python -m reproduce.family`, can be told."""

    scale: Literal["smoke", "laptop", "paper"] = "laptop"
    """of the training; smoke: does it work?"""
    runs: str = "runs"
    """folder of the training runs, made once and reused"""

    def training(self, config: str, name: str, **changes) -> train.Settings:
        """The run <runs>/<name> at this scale: configs/<config>.py ("": the defaults), changed."""
        values = {}
        if config:
            values = read_config(str(CONFIGS / f"{config}.py"), train.Settings)
        values |= changes
        if self.scale == "smoke":
            values |= SMOKE
        values |= {"device": self.device, "dtype": self.dtype, "out": str(Path(self.runs, name))}
        return train.Settings(**values)

    def some(self, seeds: tuple[int, ...]) -> tuple[int, ...]:
        """The seeds; two of them at the smallest scale."""
        return seeds[:2] if self.scale == "smoke" else seeds


@dataclass
class CalibrationSettings(Settings):
    """What `calibrations` can be told."""

    text: str | None = None
    """file of held-out English, for Table 7's perplexity"""


# ---- runs --------------------------------------------------------------------------------------------------


def train_all(runs: dict[tuple, train.Settings]) -> None:
    """Train each run that is not there yet."""
    for number, run in enumerate(runs.values(), start=1):
        if runtime.rank() == 0:
            print(f"run {number} of {len(runs)}: {run.out}", flush=True)
        trained(run)


def trained(run: train.Settings) -> str:
    """The folder of a run, which is trained if it is not there, and taken up again if it was stopped.

    UserError if the folder holds a run of other settings. A signal that stops training stops whoever asked.
    """
    run = replace(run, resume=len(checkpoint.steps(run.out)) > 0)
    run, _, _ = runtime.start(run)
    try:
        train.check_run_folder(run, MAY_DIFFER)
    except UserError as error:
        raise UserError(f"{error}; or move it away, or name another folder by --runs") from None
    last = Path(run.out) / f"step_{run.max_iters:07}"
    if not last.exists():
        train.train(run)
    if not last.exists():
        raise KeyboardInterrupt
    return run.out


def logged(run: str, key: str) -> pd.Series:
    """What a run's log says of `key`, by step."""
    lines = Path(run, "metrics.jsonl").read_text().splitlines()
    table = pd.DataFrame([json.loads(line) for line in lines])
    return table.set_index("step")[key].dropna()


def training_seconds(runs: dict[tuple, train.Settings]) -> float:
    """What all steps of the runs took, without evaluations and checkpoints."""
    total = 0.0
    for run in runs.values():
        tokens = run.global_batch_size * run.sequence_length
        total += tokens * float((1 / logged(run.out, "tokens_per_second")).sum())
    return total


# ---- four calibrations (BB 6.2, SO) ------------------------------------------------------------------------


def calibrations(settings: CalibrationSettings) -> dict:
    """Which scaling of heads ends with fewer sinks, and a lower loss? (BB Figure 12, Table 7; SO)"""
    if settings.text and not Path(settings.text).is_file():
        raise UserError(f"no text file '{settings.text}'")
    runtime.start(settings)  # can we write there? Before hours of training
    runs = calibration_runs(settings)
    train_all(runs)
    experiment = Experiment("calibrations", "BB Figure 12, Table 7; SO", settings)
    rows, curve, lengths = [], [], []
    for (config, kind, seed), run in runs.items():
        key = {"config": config, "calibration": kind, "seed": seed}
        losses = logged(run.out, "val_loss")
        ends = {"val_loss": losses.iloc[-1], "mean_loss": losses.iloc[1:].mean()}
        row, sinks_by_length = measure_sinks(config, run, experiment)
        rows.append(key | ends | row)
        curve += [key | {"step": step, "loss": loss} for step, loss in losses.items()]
        lengths += [key | point for point in sinks_by_length]
    columns = ("config", "calibration", "seed", "val_loss", "text_loss", "sink_rate", "mean_alpha1")
    return experiment.save(
        rows,
        (*columns, "max_alpha1", "dominance_ratio"),
        draw_calibrations,
        curve=curve,
        lengths=lengths,
        training_seconds=training_seconds(runs),
    )


def calibration_runs(settings: Settings) -> dict[tuple, train.Settings]:
    """Runs by (config, calibration, seed)."""
    seeds = {"laptop": SEEDS[:3], "nano_llama": SEEDS[:3], "backcopy": (*SEEDS, 7)}  # the task is a quick one
    configs = {"smoke": ("backcopy",), "laptop": ("laptop", "backcopy"), "paper": ("nano_llama", "backcopy")}
    runs = {}
    for config, kind in itertools.product(configs[settings.scale], CHOICES["attn_calibration"]):
        changes = {"attn_calibration": kind, "keep": "last", "track_sinks": True}
        if config == "nano_llama":
            changes |= OPENWEBTEXT
        for seed in settings.some(seeds[config]):
            name = f"calibrations/{config}-{kind}-{seed}"
            if (kind, seed) == ("none", 42):  # what `train.py configs/<config>.py` makes
                name = config
            runs[config, kind, seed] = settings.training(config, name, seed=seed, **changes)
    return runs


@torch.inference_mode()
def measure_sinks(config: str, run: train.Settings, experiment: Experiment) -> tuple[dict, list[dict]]:
    """The sinks of a run at 64 tokens, its loss on the settings' text; and sinks by length."""
    settings = experiment.settings
    spec = parse_spec(run.out)
    model = spec.load(experiment.device)
    reading = {
        "data": str(train.open_data(run, experiment.device).folder),
        "bos": config == "backcopy",
        "num_sequences": 4 if settings.scale == "smoke" else 100,
        "device": settings.device,
    }
    lengths, _ = sinks.sink_rates(sinks.RateSettings(**reading), spec, model)
    chain, _ = sinks.dissect(sinks.LengthSettings(**reading, sequence_length=64), spec, model)
    dominance = pd.DataFrame(chain).pivot(index="position", columns="layer", values="dominance_ratio")
    row = {"text_loss": text_loss(settings, spec, model, experiment.dtype)}
    at_64 = {point["sequence_length"]: point for point in lengths}[64]
    for name in ("sink_rate", "mean_alpha1", "max_alpha1", "uniform_alpha1"):
        row[name] = at_64[name]
    row["dominance_ratio"] = float((dominance.loc[1] / dominance.median()).mean())
    if config == "backcopy":
        row |= asleep_and_awake(model, read_tokens(TextSettings(**reading), spec, 128))
    return row, lengths


def text_loss(settings: CalibrationSettings, spec: Spec, model: Transformer, dtype) -> float | None:
    """Mean loss, in nats a token, on 256 windows of the text (BB Table 7); None without it, or a tokenizer."""
    if settings.text is None or spec.tokenizer_file is None:
        return None
    reading = TextSettings(text=settings.text, num_sequences=256, device=settings.device)
    tokens = read_tokens(reading, spec, model.config.context_length + 1)
    return train.evaluate(model, tokens[:, :-1], tokens[:, 1:], 16, torch.device(settings.device), dtype)


@torch.inference_mode()
def asleep_and_awake(model: Transformer, tokens: Tensor) -> dict:
    """What the head with the largest alpha_1 pays to position 1 at `backcopy`'s triggers, and elsewhere.

    The queries are those of tokens (n, T) from position 3 on, the first that can be triggers and have letters
    to attend to.
    """
    first = torch.tensor([1], device=tokens.device)
    layers = []

    def watch(layer, heads, q, k, v):
        layers.append(attention.weights_on(q, k, first)[:, :, 2:, 0])  # (n, H, T - 2)

    model.hidden(tokens, on_heads=watch)
    weights = torch.cat(layers, dim=1)  # (n, L H, T - 2)
    head = weights.mean((0, 2)).argmax()
    weights = weights[:, head]
    triggers = torch.tensor([ord(letter) for letter in TRIGGERS], device=tokens.device)
    is_trigger = torch.isin(tokens[:, 2:], triggers)
    return {
        "at_triggers": weights[is_trigger].mean().item(),
        "elsewhere": weights[~is_trigger].mean().item(),
    }


def draw_calibrations(result: dict, folder: Path) -> None:
    """calibrations.png: held-out loss by step; calibrated_rate.png: sink rate and alpha_1 by length."""
    later = [point for point in result["curve"] if point["step"] > 0]  # birth would hide the rest
    style = {"y": "value", "series": "calibration", "panel": "panel", "share": ""}
    style |= {"band": "seed_std", "band_label": "std of seeds"}
    curves(
        means(later, "step", "loss"),
        folder / "calibrations.png",
        x="step",
        xlabel="training step",
        ylabel="held-out loss, nats a token",
        **style,
    )
    points = means(result["lengths"], "sequence_length", "sink_rate")
    points += means(result["lengths"], "sequence_length", "mean_alpha1", "uniform_alpha1")
    curves(
        points,
        folder / "calibrated_rate.png",
        x="sequence_length",
        theories={"theory": "uniform attention"},
        panels_in_a_row=2,
        log="x",
        ticks=sinks.LENGTHS,
        xlabel="tokens in a sequence",
        ylabel="",
        **style,
    )


def means(points: list[dict], x: str, y: str, theory: str | None = None) -> list[dict]:
    """The mean of `y` over seeds at each `x`, a panel for each configuration."""
    samples = []
    for point in points:
        sample = {"panel": f"{point['config']}: {y.replace('_', ' ')}", "calibration": point["calibration"]}
        sample |= {x: point[x], "theory": point.get(theory), "value": point[y]}
        samples.append(sample)
    return mean_over_seeds(samples, ("value",))


# ---- is an unprejudiced birth a better one? (ours) ---------------------------------------------------------


def births(settings: Settings) -> dict:
    """Is an unprejudiced birth a better one? GPT-2 styles drawn by `gpt2` and by `centered` (ours)"""
    runtime.start(settings)  # can we write there? Before hours of training
    runs = birth_runs(settings)
    train_all(runs)
    experiment = Experiment("births", "ours", settings)
    rows = []
    for (init, seed), run in runs.items():
        losses = logged(run.out, "val_loss")
        model = checkpoint.load(run.out, experiment.device)
        mean_cosine, _ = count_predictions(model, 64, 200)["cosines"].mean_and_std()
        row = {"init": init, "seed": seed, "birth_loss": losses.iloc[0], "val_loss": losses.iloc[-1]}
        rows.append(row | {"mean_loss": losses.iloc[1:].mean(), "mean_cosine": mean_cosine})
    points = loss_points(runs, 1 if settings.scale == "smoke" else 10)
    return experiment.save(rows, (), draw_births, points=points, training_seconds=training_seconds(runs))


def birth_runs(settings: Settings) -> dict[tuple, train.Settings]:
    """Runs by (init, seed)."""
    config, changes = "laptop", {"model": "tiny_gpt2"}
    if settings.scale == "paper":
        config, changes = "nano_gpt2", OPENWEBTEXT
    runs = {}
    for init, seed in itertools.product(("gpt2", "centered"), settings.some(SEEDS)):
        name = f"births/{config}-{init}-{seed}"
        runs[init, seed] = settings.training(config, name, init=init, seed=seed, keep="last", **changes)
    return runs


def loss_points(runs: dict[tuple, train.Settings], window: int) -> list[dict]:
    """Training loss by step, means of `window` steps and of the seeds; and the difference of paired runs."""
    losses = {}
    for key, run in runs.items():
        loss = logged(run.out, "loss")
        losses[key] = loss.groupby((loss.index - 1) // window * window + window).mean()
    table = pd.DataFrame(losses)  # a row for each window, a column for each (init, seed)
    points = []
    for init in ("gpt2", "centered"):
        for step, values in table[init].iterrows():
            point = {"panel": "training loss, mean of seeds", "init": init, "step": step}
            points.append(point | {"loss": values.mean(), "error": values.std(ddof=0), "zero": None})
    for step, values in (table["centered"] - table["gpt2"]).iterrows():
        difference = interval(values)
        point = {"panel": "centered - gpt2", "init": "difference", "step": step, "loss": difference["mean"]}
        points.append(point | {"error": difference["high"] - difference["mean"], "zero": 0.0})
    return points


def draw_births(result: dict, folder: Path) -> None:
    """births.png: the training loss of both births, and their difference, by step."""
    curves(
        result["points"],
        folder / "births.png",
        x="step",
        y="loss",
        series="init",
        panel="panel",
        theories={"zero": "no difference"},
        band="error",
        band_label="std of seeds; 95 % interval",
        share="x",
        xlabel="training step",
        ylabel="nats a token",
    )


COMMANDS = {
    "births": Command(births, Settings()),
    "calibrations": Command(calibrations, CalibrationSettings()),
}


def main() -> None:
    """Do what the command line asks."""
    run_script(COMMANDS, __doc__)


if __name__ == "__main__":
    main()
