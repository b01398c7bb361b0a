"""What becomes of siblings: models that differ in one thing, trained on the same text in the same order?

    python -m reproduce.siblings calibrations --text wiki.txt   # BB Figure 12, Table 7; SO; 80 minutes

Each run is made once and reused, and taken up where it was stopped.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import sinks
import train
from lib import checkpoint, runtime
from lib.data import default_folder
from lib.figures import legend_below, new_figure, save_figure, unique
from lib.inputs import TextSettings, read_tokens
from lib.results import Experiment
from lib.runs import merged_settings, read_log
from lib.settings import Command, RunSettings, UserError, read_config_file, run_script
from measure import attention
from model import CHOICES

SEEDS = (42, 123, 1000, 2000)
STYLES = {  # steps of each seed's training; steps on the second corpus
    "llama": ({42: 150, 123: 600, 1000: 600, 2000: 150}, 200),
    "qwen": ({42: 60, 123: 60, 1000: 60, 2000: 60}, 40),
}
BASE = 1000  # seed of the table of children after a second corpus
CONTINUED = (BASE, 123)  # seeds that learn it
DOCSTRINGS = {"source": ("docstrings+site",), "learning_rate": 5e-4, "warmup_iters": 20}
CONFIGS = Path(train.__file__).with_name("configs")
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
# What may differ in a run that is there already: not how long it was, nor when and on what it was evaluated.
MAY_DIFFER = {"keep"} | train.MAY_CHANGE - {"max_iters", "eval_every", "eval_sequences"}


@dataclass
class Settings(RunSettings):
    """What `python -m reproduce.family` can be told, and `calibrations` too."""

    scale: Literal["smoke", "laptop"] = "laptop"
    """of the training; smoke: does it work?"""
    runs: str = "runs"
    """folder of the training runs, made once and reused"""

    def training(self, config, name, **changes) -> train.Settings:
        """The run <runs>/<name> at this scale: configs/<config>.py ("": the defaults), changed."""
        settings = train.Settings()
        if config:
            settings = read_config_file(str(CONFIGS / f"{config}.py"), settings)
        if self.scale == "smoke":
            changes |= SMOKE
        if self.dtype != "auto":  # a config file may ask for one
            changes["dtype"] = self.dtype
        changes |= {"device": self.device, "out": str(Path(self.runs, name))}
        return replace(settings, **changes)


@dataclass
class CalibrationSettings(Settings):
    """What `calibrations` can be told."""

    text: str | None = None
    """file of held-out English, for Table 7's perplexity"""


# ---- runs --------------------------------------------------------------------------------------------------


def train_all(runs) -> None:
    """Train each run that is not there yet."""
    for number, run in enumerate(runs.values(), start=1):
        if runtime.rank() == 0:
            print(f"run {number} of {len(runs)}: {run.out}", flush=True)
        trained(run)


def trained(run: train.Settings):
    """The folder of a run, which is trained if it is not there, and taken up again if it was stopped.

    UserError if the folder holds a run of other settings. A signal that stops training stops whoever asked.
    """
    run, _, _ = runtime.start(replace(run, resume=len(checkpoint.steps(run.out)) > 0))
    try:
        merged_settings(run, MAY_DIFFER)
    except UserError as error:
        raise UserError(f"{error}; or move it away, or name another folder by --runs") from None
    last = Path(run.out, f"step_{run.max_iters:07}")
    if not last.exists():
        train.train(run)
    if not last.exists():
        raise KeyboardInterrupt
    return run.out


def lineage_runs(settings: Settings):
    """Runs by (style, seed, corpus): all seeds learn corpus 1 in one order, two go on to corpus 2."""
    seeds = SEEDS[1:3] if settings.scale == "smoke" else SEEDS
    runs = {}
    for style, (steps, more_steps) in STYLES.items():
        preset = f"tiny_{style}"
        for seed in seeds:
            changes = {"model": preset, "seed": seed, "max_iters": steps[seed], "save_every": 50}
            runs[style, seed, 1] = settings.training("", f"lineage/{preset}-{seed}", **changes)
        for seed in CONTINUED:
            child = runs[style, seed, 1]
            tokenizer = default_folder(child.source, child.tokenizer) / "tokenizer.model"
            changes = DOCSTRINGS | {"model": preset, "seed": seed, "max_iters": more_steps}
            changes |= {"init_from": child.out, "tokenizer": str(tokenizer)}
            runs[style, seed, 2] = settings.training("", f"lineage/{preset}-{seed}-docstrings", **changes)
    return runs


def begin(name, paper, settings: Settings, runs):
    """Train what is missing, then begin an experiment: its seconds are those of measuring."""
    runtime.start(settings)  # hours of training are not for a folder that cannot be written
    train_all(runs)
    return Experiment(name, paper, settings)


def losses(run):
    """A run's last held-out loss, and the mean of all its evaluations after birth."""
    later = [row["val_loss"] for row in read_log(Path(run)) if row["step"] > 0 and "val_loss" in row]
    return {"val_loss": later[-1], "mean_loss": np.mean(later)}


# ---- four calibrations (BB 6.2, SO) ------------------------------------------------------------------------


def calibrations(settings: CalibrationSettings):
    """Which scaling of heads ends with fewer sinks, and a lower loss? (BB Figure 12, Table 7; SO)"""
    if settings.text and not Path(settings.text).is_file():
        raise UserError(f"no text file '{settings.text}'")
    runs = calibration_runs(settings)
    experiment = begin("calibrations", "BB Figure 12, Table 7; SO", settings, runs)
    rows = []
    for (config, kind, seed), run in runs.items():
        key = {"config": config, "calibration": kind, "seed": seed}
        rows.append(key | losses(run.out) | measure_sinks(experiment, config, run))
    draw_calibrations(rows, experiment.folder / "calibrations.png")
    return experiment.save(rows)


def calibration_runs(settings: Settings):
    """Runs of every calibration by (config, calibration, seed)."""
    seeds = {"laptop": SEEDS[:3], "backcopy": (*SEEDS, 7)}  # the task is a quick one
    if settings.scale == "smoke":
        seeds = {"backcopy": SEEDS[:2]}
    runs = {}
    for config, kind in itertools.product(seeds, CHOICES["attn_calibration"]):
        for seed in seeds[config]:
            name = f"calibrations/{config}-{kind}-{seed}"
            if (kind, seed) == ("none", 42):  # what `train.py configs/<config>.py` makes
                name = config
            changes = {"seed": seed, "attn_calibration": kind, "keep": "last", "track_sinks": True}
            runs[config, kind, seed] = settings.training(config, name, **changes)
    return runs


@torch.inference_mode()
def measure_sinks(experiment, config, run: train.Settings):
    """A run's loss on the settings' text, its sinks at 64 tokens, and SO's links in the mean of layers."""
    spec = checkpoint.parse_spec(run.out)
    model = spec.load(experiment.device)
    reading = sinks.Settings(
        text=str(default_folder(run.source, run.tokenizer)),
        first_token="bos" if config == "backcopy" else None,
        num_sequences=4 if experiment.settings.scale == "smoke" else 100,
        device=experiment.settings.device,
    )
    row = {"text_loss": text_loss(experiment, spec, model), "uniform_alpha1": attention.uniform_alpha(64)}
    row |= attention.sink_statistics(model, read_tokens(reading, spec, 64))[0]
    layers = sinks.dissect(reading, spec, model)["layers"]
    for name in ("disparity", "effective_rank", "output_tau"):
        row[name] = np.mean([layer[name] for layer in layers if layer[name] is not None])
    return row


def text_loss(experiment, spec, model):
    """Mean loss on 256 windows of the settings' text, in nats a token (BB Table 7).

    None without a text, or a tokenizer for it.
    """
    settings = experiment.settings
    if settings.text is None or spec.tokenizer_file is None:
        return None
    reading = TextSettings(text=settings.text, num_sequences=256, device=settings.device)
    tokens = read_tokens(reading, spec, model.config.context_length + 1)
    return train.evaluate(model, tokens[:, :-1], tokens[:, 1:], 16, experiment.device, experiment.dtype)


def draw_calibrations(rows, path) -> None:
    """Held-out loss against the sink rate, a point a seed, a panel a configuration."""
    configs = unique(rows, "config")
    title = "Which calibration of heads ends with fewer sinks, and with a lower loss? (a point a seed)"
    figure, grid = new_figure(title, columns=len(configs), sharex=True)
    for axes, config in zip(grid[0], configs):
        for kind in CHOICES["attn_calibration"]:
            part = [row for row in rows if (row["config"], row["calibration"]) == (config, kind)]
            rates = [100 * row["sink_rate"] for row in part]
            axes.plot(rates, [row["val_loss"] for row in part], "o", label=kind, alpha=0.7)
        axes.set(title=f"train.py configs/{config}.py", xlabel="sink rate at 64 tokens, % of heads")
        axes.set(ylabel="held-out loss, nats a token")
    legend_below(figure, grid[0, 0])
    save_figure(figure, path)


COMMANDS = {"calibrations": Command(calibrations, CalibrationSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
