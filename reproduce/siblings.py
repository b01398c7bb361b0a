"""What becomes of siblings: models that differ in one thing, trained on the same text in the same order?

    python -m reproduce.siblings births                         # is an unprejudiced birth better? 35 minutes
    python -m reproduce.siblings calibrations --text wiki.txt   # BB Figure 12, Table 7; SO; 80 minutes
    python -m reproduce.siblings positions                      # a sink on position 1; ten minutes

Each run is made once and reused, and taken up where it was stopped. `--scale paper` is the papers' own.
"""

import lib.interrupt  # noqa: F401 # isort: skip
import itertools
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Literal

import pandas as pd
import torch

import sinks
import train
from init import newborn
from lib import checkpoint, runtime
from lib.checkpoint import parse_spec
from lib.data import TRIGGERS, default_folder
from lib.figures import between, curves
from lib.inputs import TextSettings, read_tokens
from lib.results import Experiment
from lib.runs import check_settings, read_log
from lib.settings import Command, RunSettings, UserError, read_config_file, run_script
from measure import attention, theory
from measure.cosines import interval
from model import CHOICES, PRESETS
from probe import count_predictions

SEEDS = (42, 123, 1000, 2000)
OPENWEBTEXT = {"source": ("hf:Skylion007/openwebtext",), "tokenizer": "bpe:32000"}  # the papers' text
PAPER_DATA = default_folder(**OPENWEBTEXT)
PAPER_NUMBERS = {  # BB Tables 13 and 14
    "13": {
        "d_model": 768,
        "d_ff": 2048,
        "num_layers": 12,
        "num_heads": 12,
        "head_size": 64,
        "vocab_size": 32_000,
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "context_length": 2048,
    },
    "14": {
        "warmup_iters": 2000,
        "max_iters": 200_000,
        "global_batch_size": 128,
        "micro_batch_size": 32,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
    },
}
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
SIGNS = ("sink_rate", "mean_alpha1", "max_alpha1", "first_share", "norm_ratio", "value_ratio")
DRAWN_POSITIONS = (1, 2, 4, 8, 16, 32, 64)
PANELS = {  # of a figure, by the value that it shows
    "loss": "held-out loss",
    "sink_rate": "share of heads that sink on position 1",
    "mean_alpha1": "attention to position 1, mean of heads",
    "norm_ratio": "length of the stream, position 1 / others",
    "value_ratio": "length of values, position 1 / others",
    "first_share": "share of heads that attend most to position 1",
    "disparity": "largest / mean |dimension|",
    "effective_rank": "effective rank",
    "std": "std by position",
}
WINDOW = 10  # steps, over which a drawn training loss is averaged

Runs = dict[tuple, train.Settings]


@dataclass
class Settings(RunSettings):
    """What `births`, and `python -m reproduce.family`, can be told."""

    scale: Literal["smoke", "laptop", "paper"] = "laptop"
    """of the training; smoke: does it work?"""
    runs: str = "runs"
    """folder of the training runs, made once and reused"""

    def training(self, config, name, **changes) -> train.Settings:
        """The run <runs>/<name> at this scale: configs/<config>.py ("": the defaults), changed."""
        settings = train.Settings()
        if config:
            path = Path(train.__file__).with_name("configs") / f"{config}.py"
            settings = read_config_file(str(path), settings)
        if self.scale == "smoke":
            changes |= SMOKE
        changes |= {"device": self.device, "dtype": self.dtype, "out": str(Path(self.runs, name))}
        return replace(settings, **changes)

    def some(self, seeds):
        """The seeds; two of them at the smallest scale."""
        return seeds[:2] if self.scale == "smoke" else seeds


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
        check_settings(run, MAY_DIFFER)
    except UserError as error:
        raise UserError(f"{error}; or move it away, or name another folder by --runs") from None
    last = Path(run.out, f"step_{run.max_iters:07}")
    if not last.exists():
        train.train(run)
    if not last.exists():
        raise KeyboardInterrupt
    return run.out


def begin(name, paper, settings: Settings, runs):
    """Train what is missing, then begin an experiment: its seconds are those of measuring."""
    runtime.start(settings)  # hours of training are not for a folder that cannot be written
    train_all(runs)
    return Experiment(name, paper, settings)


def logged(run, key):
    """What a run's log says of `key`, by step."""
    table = pd.DataFrame(read_log(Path(run)))
    return table.set_index("step")[key].dropna()


def losses(run):
    """A run's last held-out loss, and the mean of all its evaluations after birth."""
    after_birth = logged(run, "val_loss").drop(0)
    return {"val_loss": after_birth.iloc[-1], "mean_loss": after_birth.mean()}


def training_seconds(runs):
    """What all steps of the runs took, without evaluations and checkpoints."""
    total = 0.0
    for run in runs.values():
        tokens = run.global_batch_size * run.sequence_length
        total += (tokens / logged(run.out, "tokens_per_second")).sum()
    return total


def setup(settings: RunSettings):
    """Are the papers' hyperparameters those of `nano_llama` and its config file? (BB Tables 13, 14)"""
    experiment = Experiment("setup", "BB Tables 13, 14", settings)
    training = Settings(scale="paper").training("nano_llama", "nano_llama")
    rows = []
    for table, ours in (("13", PRESETS["nano_llama"]), ("14", training)):
        for name, number in PAPER_NUMBERS[table].items():
            rows.append({"table": table, "name": name, "paper": number, "ours": getattr(ours, name)})
    return experiment.save(rows)


# ---- four calibrations (BB 6.2, SO) ------------------------------------------------------------------------


def calibrations(settings: CalibrationSettings):
    """Which scaling of heads ends with fewer sinks, and a lower loss? (BB Figure 12, Table 7; SO)"""
    if settings.text and not Path(settings.text).is_file():
        raise UserError(f"no text file '{settings.text}'")
    runs = calibration_runs(settings)
    experiment = begin("calibrations", "BB Figure 12, Table 7; SO", settings, runs)
    rows, curve, lengths, links, spread = [], [], [], [], []
    for (config, kind, seed), run in runs.items():
        key = {"config": config, "calibration": kind, "seed": seed}
        row, rates, layers, values = measure_sinks(experiment, config, run)
        rows.append(key | losses(run.out) | row)
        curve += [key | point for point in training_curve(run.out)]
        lengths += [key | rate for rate in rates]
        links += [key | layer for layer in layers]
        spread += [key | value for value in values]
    columns = ("config", "calibration", "seed", "val_loss", "text_loss", "sink_rate", "mean_alpha1")
    columns += ("disparity", "effective_rank", "norm_ratio", "value_ratio", "first_share")
    more = {"curve": curve, "lengths": lengths, "links": links, "spread": spread}
    return experiment.save(rows, columns, draw_calibrations, training_seconds=training_seconds(runs), **more)


def calibration_runs(settings: Settings):
    """Runs of every calibration by (config, calibration, seed)."""
    seeds = {"backcopy": (*SEEDS, 7), "laptop": SEEDS[:3], "nano_llama": SEEDS[:3]}  # the task is a quick one
    configs = {"smoke": ["backcopy"], "laptop": ["laptop", "backcopy"], "paper": ["nano_llama", "backcopy"]}
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
def measure_sinks(experiment, config, run: train.Settings):
    """A run's row, its sinks by length, and SO's links at birth and after training, by layer and by position.

    The row has its loss on the settings' text, and at 64 tokens its sinks, what foretells them, and the means
    of SO's links over layers.
    """
    settings = experiment.settings
    spec = parse_spec(run.out)
    model = spec.load(experiment.device)
    reading = {
        "data": str(default_folder(run.source, run.tokenizer)),
        "bos": config == "backcopy",
        "num_sequences": 4 if settings.scale == "smoke" else 100,
        "device": settings.device,
    }
    rate_settings = sinks.RateSettings(**reading)
    rates = sinks.sink_rates(rate_settings, spec, model)["rows"]
    row = {"text_loss": text_loss(experiment, spec, model)}
    at_64 = pd.DataFrame(rates).set_index("sequence_length").loc[64]
    row |= at_64[["uniform_alpha1", *SIGNS]].to_dict()
    links, spread = [], []
    birth = newborn(spec.config, run.seed, run.embedding_seed, run.init, experiment.device)
    for state, measured in (("birth", birth), ("trained", model)):
        chain = sinks.dissect(sinks.LengthSettings(**reading), spec, measured)
        layers = pd.DataFrame(chain["layers"])
        links += layers.assign(state=state).to_dict("records")
        for name in ("disparity", "others_disparity", "effective_rank", "output_tau"):
            row[f"birth_{name}" if state == "birth" else name] = layers[name].astype(float).mean()
        by_position = pd.DataFrame(chain["rows"])[["layer", "position", "std"]]
        by_position = by_position[by_position["position"].isin(DRAWN_POSITIONS)]
        law = theory.aggregated_std(spec.config, 64, tokens=True)
        law = (law / law[0])[by_position["position"].to_numpy() - 1]
        spread += by_position.assign(state=state, theory=law).to_dict("records")
    if config == "backcopy":
        row |= asleep_and_awake(model, read_tokens(rate_settings, spec, 128))
    return row, rates, links, spread


def training_curve(run):
    """A run's held-out loss, its sinks and what foretells them, at every evaluation."""
    table = pd.DataFrame(read_log(Path(run))).dropna(subset="val_loss")
    table = table[["step", "val_loss", *SIGNS]]
    return table.rename(columns={"val_loss": "loss"}).to_dict("records")


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


@torch.inference_mode()
def asleep_and_awake(model, tokens):
    """What the head with the largest alpha_1 pays to position 1 at `backcopy`'s triggers, and elsewhere.

    The queries are those of tokens (n, T) from position 3 on, the first that can be triggers and have letters
    to attend to.
    """
    first = tokens.new_tensor([1])
    layers = []

    def watch(layer, heads, q, k, v):
        layers.append(attention.weights_on(q, k, first)[:, :, 2:, 0])  # (n, H, T - 2)

    model.hidden(tokens, on_heads=watch)
    weights = torch.cat(layers, dim=1)  # (n, L H, T - 2)
    head = weights.mean((0, 2)).argmax()
    weights = weights[:, head]
    is_trigger = torch.isin(tokens[:, 2:], tokens.new_tensor([*TRIGGERS.encode()]))
    awake = weights[is_trigger].mean().item()
    asleep = weights[~is_trigger].mean().item()
    return {"at_triggers": awake, "elsewhere": asleep}


def draw_calibrations(result, folder) -> None:
    """Held-out loss and what foretells sinks by step; sinks by length; SO's links by layer and position."""
    by_step = result["curve"]
    later = [point for point in by_step if point["step"] > 0]  # birth would hide the rest
    last_steps = {point["config"]: point["step"] for point in by_step}
    ends = [point for point in by_step if point["step"] == last_steps[point["config"]]]
    style = {"y": "mean", "series": "calibration", "panel": "panel", "panels_in_a_row": 2}
    style |= {"band": "std", "band_label": "std of seeds", "ylabel": "", "share": ""}
    curves(
        means(later, "loss", "step"),
        folder / "calibrations.png",
        x="step",
        title=f"Lowest held-out loss in the end: {best(result['rows'], 'val_loss', '.2f')}",
        **style | {"ylabel": "held-out loss, nats a token"},
    )
    lengths = result["lengths"]
    rates = means(lengths, "sink_rate", "sequence_length")
    alphas = means(lengths, "mean_alpha1", "sequence_length", "uniform_alpha1")
    curves(
        rates + alphas,
        folder / "calibrated_rate.png",
        x="sequence_length",
        theories={"uniform_alpha1": "uniform attention"},
        log="x",
        ticks=sinks.LENGTHS,
        lowest=0,
        band_limits=(0, 1),
        title=f"Smallest share of sink heads at 64 tokens: {best(result['rows'], 'sink_rate', '.1%')}",
        **style,
    )
    ratios = means(by_step, "norm_ratio", "step") + means(by_step, "value_ratio", "step")
    curves(
        sorted([point | {"one": 1.0} for point in ratios], key=itemgetter("config")),
        folder / "calibrated_signs.png",
        x="step",
        lowest=0,
        theories={"one": "as long as at other positions"},
        title=f"How long is position 1's stream in the end, beside other positions'? "
        f"{beside_none(ends, 'norm_ratio')}",
        **style,
    )
    curves(
        means(by_step, "first_share", "step"),
        folder / "calibrated_share.png",
        x="step",
        lowest=0,
        band_limits=(0, 1),
        title=f"How many heads attend most to position 1 in the end? {beside_none(ends, 'first_share')}",
        **style,
    )
    for name, title in (
        ("disparity", "Does one dimension dominate at position 1? Largest / mean, mean of layers: "),
        ("effective_rank", "How many dimensions does the stream use, in the mean of layers? "),
    ):
        curves(
            means(result["links"], name, "layer", by="state"),
            folder / f"calibrated_{name}.png",
            x="layer",
            title=title + birth_and_trained(result["links"], name),
            lowest=0,
            **style | {"share": "y"},
        )
    spread = first_layer(result["spread"])
    curves(
        means(spread, "std", "position", "theory", by="state"),
        folder / "calibrated_variance.png",
        x="position",
        theories={"theory": "newborn that reads random tokens"},
        log="xy",
        title=f"How much do values vary at position {DRAWN_POSITIONS[-1]}, beside position 1, at birth? "
        f"{beside_none(last_position(spread), 'std')}",
        **style | {"share": "xy", "ylabel": "std of layer 1's aggregated values, of position 1's"},
    )


def calibration_means(rows, key):
    """(configuration, means over seeds by calibration) for each configuration."""
    for config, part in pd.DataFrame(rows).groupby("config", sort=False):
        yield config, part.groupby("calibration", sort=False)[key].mean()


def best(rows, key, form):
    """The calibration with the least value for each configuration, beside none, as text."""
    texts = []
    for config, values in calibration_means(rows, key):
        least = values.idxmin()
        lowest = f"{values[least]:{form}}"
        uncalibrated = f"{values['none']:{form}}"
        if lowest == uncalibrated:
            texts.append(f"no calibration differs from none on {config} ({lowest})")
        else:
            texts.append(f"{least} on {config} ({lowest}; uncalibrated {uncalibrated})")
    return ", ".join(texts)


def beside_none(rows, key):
    """A value without calibration, and its range with the others, for each configuration, as text."""
    texts = []
    for config, values in calibration_means(rows, key):
        others = between(values.drop("none"), ".2f")
        texts.append(f"{config} {values['none']:.2f} uncalibrated, {others} calibrated")
    return "; ".join(texts)


def birth_and_trained(links, key):
    """The range of a link over calibrations, in the mean of layers, at birth and trained, as text."""
    texts = []
    for config, part in pd.DataFrame(links).groupby("config", sort=False):
        ranges = {}
        for state, rows in part.groupby("state", sort=False):
            ranges[state] = between(rows.groupby("calibration")[key].mean(), ".3g")
        texts.append(f"{config} {ranges['birth']} at birth, {ranges['trained']} trained")
    return "; ".join(texts)


def last_position(spread):
    """The rows of newborns at the last of the positions."""
    return [row for row in spread if row["position"] == DRAWN_POSITIONS[-1] and row["state"] == "birth"]


def first_layer(points):
    """The spread of the first layer's values at each position, in that of position 1."""
    table = pd.DataFrame(points)
    table = table[table["layer"] == 1].copy()
    at_first = table["std"].where(table["position"] == 1).ffill()
    return table.assign(std=table["std"] / at_first).to_dict("records")


def means(points, value, *along: str, by=""):
    """Mean and standard deviation of a value over seeds, a panel for each configuration, and each `by`."""
    keys = ["config", by] if by else ["config"]
    groups = pd.DataFrame(points).groupby([*keys, "calibration", *along], sort=False, dropna=False)
    table = groups[value].agg(["mean", "std"]).reset_index()
    table["panel"] = table[keys].agg(", ".join, axis=1) + ": " + PANELS[value]
    return table.to_dict("records")


# ---- a sink on position 1, whatever stands there (ours) ----------------------------------------------------


def positions(settings: Settings):
    """Does every seed of configs/matching.py sink on position 1, whatever letter stands there? (ours)

    A row has the head with the largest alpha_1. `any_share` is the share of first letters on which the
    alpha_1 of some head is above 0.3; `any_least` is the largest alpha_1 of any head, on the letter with the
    least.
    """
    runs = matching_runs(settings)
    experiment = begin("positions", "ours", settings, runs)
    rows, curve = [], []
    for seed, run in runs.items():
        spec = parse_spec(run.out)
        reading = sinks.FirstSettings(
            data=str(default_folder(run.source, run.tokenizer)),
            sequence_length=run.sequence_length,
            num_sequences=4 if settings.scale == "smoke" else 100,
            device=experiment.device.type,
        )
        lists = sinks.by_first_token(reading, spec, spec.load(experiment.device))
        sleepiest = max(lists["rows"], key=itemgetter("alpha1"))
        largest = pd.DataFrame(lists["points"]).groupby("first_token")["alpha1"].max()  # of any head
        any_head = {"any_least": largest.min(), "any_share": (largest > sinks.EPSILON).mean()}
        signs = {sign: logged(run.out, sign).iloc[-1] for sign in SIGNS}
        rows.append({"seed": seed} | sleepiest | any_head | losses(run.out) | signs)
        curve += [{"seed": seed} | point for point in training_curve(run.out)]
    columns = ("seed", "layer", "head", "alpha1", "least", "sink_share", "any_share", "any_least", *SIGNS)
    more = {"curve": curve, "training_seconds": training_seconds(runs)}
    return experiment.save(rows, columns, draw_positions, **more)


def matching_runs(settings: Settings):
    """Runs of configs/matching.py by seed; that of the first is what `train.py configs/matching.py` makes."""
    runs = {}
    for seed in settings.some((*SEEDS, 7)):
        name = "matching" if seed == SEEDS[0] else f"positions/matching-{seed}"
        runs[seed] = settings.training("matching", name, seed=seed, keep="last")
    return runs


def draw_positions(result, folder) -> None:
    """positions.png: the sink rate and what foretells it, by step, for each seed."""
    last = max(point["step"] for point in result["curve"])
    rates = [100 * point["sink_rate"] for point in result["curve"] if point["step"] == last]
    points = []
    for sign in ("sink_rate", "first_share", "norm_ratio"):
        for point in result["curve"]:
            name = f"seed {point['seed']}"
            points.append({"seed": name, "step": point["step"], "panel": PANELS[sign], "value": point[sign]})
    curves(
        points,
        folder / "positions.png",
        x="step",
        y="value",
        series="seed",
        title=f"After {last:,} steps {between(rates, '.0f')} % of heads sink on position 1, "
        f"over {len(rates)} seeds",
        panel="panel",
        share="x",
        lowest=0,
        ylabel="",
    )


# ---- is an unprejudiced birth a better one? (ours) ---------------------------------------------------------


def births(settings: Settings):
    """Is an unprejudiced birth a better one? GPT-2 styles drawn by `gpt2` and by `centered` (ours)"""
    runs = birth_runs(settings)
    experiment = begin("births", "ours", settings, runs)
    rows = []
    for (init, seed), run in runs.items():
        model = checkpoint.load(run.out, experiment.device)
        num_sequences = 4 if settings.scale == "smoke" else 200
        mean_cosine, _ = count_predictions(model, 64, num_sequences)["cosines"].mean_and_std()
        row = {"init": init, "seed": seed, "birth_loss": logged(run.out, "val_loss")[0]}
        rows.append(row | losses(run.out) | {"mean_cosine": mean_cosine})
    more = {"points": loss_points(runs), "training_seconds": training_seconds(runs)}
    return experiment.save(rows, draw=draw_births, **more)


def birth_runs(settings: Settings):
    """Runs of both births by (init, seed)."""
    config, changes = "laptop", {"model": "tiny_gpt2"}
    if settings.scale == "paper":
        config, changes = "nano_gpt2", OPENWEBTEXT
    runs = {}
    for init, seed in itertools.product(("gpt2", "centered"), settings.some(SEEDS)):
        name = f"births/{config}-{init}-{seed}"
        runs[init, seed] = settings.training(config, name, init=init, seed=seed, keep="last", **changes)
    return runs


def loss_points(runs):
    """Training loss of both births by step, and the difference of paired runs, with 95 % intervals."""
    by_run = {}
    for key, run in runs.items():
        loss = logged(run.out, "loss")
        by_run[key] = loss.groupby((loss.index - 1) // WINDOW).mean()
    table = pd.DataFrame(by_run)  # a row for each window, a column for each (init, seed)
    difference = table["centered"] - table["gpt2"]
    curves_of = [  # panel, series, losses (windows, seeds), level to draw
        ("training loss, mean of seeds", "gpt2", table["gpt2"], None),
        ("training loss, mean of seeds", "centered", table["centered"], None),
        ("centered - gpt2", "difference", difference, 0.0),
    ]
    points = []
    for panel, init, losses_by_seed, zero in curves_of:
        for window, row in losses_by_seed.iterrows():
            loss = interval(row)
            point = {"panel": panel, "init": init, "step": WINDOW * (window + 1), "loss": loss["mean"]}
            points.append(point | {"error": loss["high"] - loss["mean"], "zero": zero})
    return points


def draw_births(result, folder) -> None:
    """births.png: the training loss of both births, and their difference, by step."""
    last = result["points"][-1]  # a difference
    low = last["loss"] - last["error"]
    high = last["loss"] + last["error"]
    seen = "no difference is seen" if low < 0 < high else "they differ"
    curves(
        result["points"],
        folder / "births.png",
        x="step",
        y="loss",
        series="init",
        title=f"Training loss of a centered birth less the usual one's, last {WINDOW} steps: "
        f"{last['loss']:+.2f} nats a token ({low:+.2f} to {high:+.2f}): {seen}",
        highest=0.6,  # so that a difference of 0.01 looks small
        panel="panel",
        theories={"zero": "no difference"},
        band="error",
        band_label="95 % interval",
        share="x",
        ylabel="nats a token",
    )


COMMANDS = {
    "setup": Command(setup, RunSettings()),
    "births": Command(births, Settings()),
    "calibrations": Command(calibrations, CalibrationSettings()),
    "positions": Command(positions, Settings()),
}
FIGURES = {"calibrations": draw_calibrations, "positions": draw_positions, "births": draw_births}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
