"""What becomes of siblings: models that differ in one thing, trained on the same text in the same order?

    python families.py births                         # ours: is an unprejudiced birth better? 35 minutes
    python families.py calibrations --text wiki.txt   # BB Figure 12, Table 7, SO: 32 models, 80 minutes
    python families.py lineage                        # BB Tables 4a-c, 5, 8-12: kinship.py's; an hour

Each run is made once and reused, and taken up where it was stopped. `--size paper` is the papers' own.
"""

import itertools
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import attention
import checkpoint
import common
import data
import kinship
import reading
import sinks
import train
from common import UserError, setting
from experiment import conduct, figure
from findings import above, claim, ours
from kinship import OPENWEBTEXT, SEEDS
from model import CHOICES, Transformer
from probe import probe
from stats import column, interval, split

SMOKE = dict(source=("backcopy",), tokenizer="bytes", sequence_length=32, eval_sequences=4)  # the quickest
SMOKE |= dict(max_iters=2, warmup_iters=1, save_every=1, global_batch_size=4, micro_batch_size=4)


@dataclass
class Settings(common.RunSettings):
    """What `families.py` can be told."""

    size: str = setting("laptop", "of the training; smoke: does it work?", ("smoke", "laptop", "paper"))
    runs: str = setting("runs", "folder of the training runs, made once and reused")
    text: str | None = setting(None, "held-out English, for Table 7's perplexity")

    def training(self, config: str, out: str, **changes) -> train.Settings:
        """A run of configs/<config>.py (or of the defaults), changed, at this size, in the folder `out`."""
        words = [f"{Path(__file__).parent}/configs/{config}.py"] if config else []
        settings = common.parse_settings(train.Settings, "", words)
        changes |= SMOKE if self.size == "smoke" else {}
        return replace(settings, **dict(device=self.device, dtype=self.dtype, out=out) | changes)

    def seeds(self, seeds: tuple[int, ...]) -> tuple[int, ...]:
        """Of these seeds, those of this size."""
        return seeds[:2] if self.size == "smoke" else seeds


def trained(s: train.Settings) -> str:
    """The run of these settings, trained if it is not there, taken up again if it was stopped.

    UserError if the folder holds a run of other settings. Stopped by a signal, it stops whoever asked for it.
    """
    whole = lambda: (Path(s.out) / f"step_{s.max_iters:07}").exists()  # noqa: E731
    s, *_ = common.start(replace(s, resume=bool(checkpoint.steps(s.out))))
    try:
        compared = {"max_iters", "eval_every", "eval_sequences"}
        train.check(s, (train.FREE | {"keep"}) - compared)
    except UserError as error:
        raise UserError(f"{error}; or move it away, or name another folder by --runs") from None
    if not whole():
        train.train(s)
    if not whole():
        raise KeyboardInterrupt
    return s.out


def logged(run: str, key: str = "val_loss") -> list[dict]:
    """The lines of a run's log that have a `key`: its step, and its value as `loss`."""
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [dict(step=line["step"], loss=line[key]) for line in lines if key in line]


def seconds(s: train.Settings) -> float:
    """What a run's steps took, without evaluations and checkpoints."""
    per_second = column(logged(s.out, "tokens_per_second"), "loss")
    return float(s.global_batch_size * s.sequence_length * (1 / per_second).sum())


def paired(text: str, paper, runs: dict, kind: str, than: str, key: str, sign: int, of: str) -> dict:
    """A claim: runs of a `kind` have less (sign -1) or more (1) of `key` than siblings; open within noise."""
    mean, low, high = interval(column(runs[kind], key) - column(runs[than], key)).values()
    measured = f"{mean:+.4f}, {low:+.4f} to {high:+.4f}" + " nats" * key.endswith("loss")
    return claim(text, paper, measured, above(*sorted((sign * low, sign * high))), of)


# ---- four calibrations (BB 6.2, SO) ------------------------------------------------------------------------

EXPECTED = (  # a calibration, another, of what it has less (-1) or more (1), a claim, its number, whose it is
    ("amplify", "none", "sink_rate", -1, "amplify lowers the sink rate (Figure 12)", None, "BB"),
    ("attenuate", "amplify", "sink_rate", -1, "attenuate lowers it further (Figure 12)", None, "BB"),
    ("attenuate", "none", "sink_rate", -1, "attenuate lowers the sink rate (Figure 12)", None, "BB"),
    ("attenuate", "none", "mean_alpha1", -1, "attenuate lowers raw alpha_1", None, "ours"),
    ("attenuate", "none", "val_loss", -1, "attenuate ends at a lower held-out loss", None, "ours"),
    ("headnorm", "none", "mean_alpha1", -1, "headnorm lowers raw alpha_1", None, "ours"),
    ("headnorm", "none", "mean_loss", -1, "headnorm learns faster: its mean loss (SO)", None, "SO"),
    ("headnorm", "none", "val_loss", -1, "headnorm ends at a lower held-out loss", None, "ours"),
    ("attenuate", "none", "text_loss", -1, "attenuate is better on WikiText-2 (Table 7)", -0.015, "BB"),
    ("amplify", "none", "text_loss", 1, "amplify is worse on WikiText-2 (Table 7)", 0.029, "BB"),
)


def calibrated(s: Settings) -> dict:
    """Runs of each calibration and seed, as the config files say."""
    runs, text = {}, {"smoke": (), "laptop": ("laptop",), "paper": ("nano_llama",)}[s.size]
    for config, kind in itertools.product((*text, "backcopy"), CHOICES["attn_calibration"]):
        for seed in s.seeds((*SEEDS, 7) if config == "backcopy" else SEEDS[:3]):  # the task is a quick one
            plain = (kind, seed) == ("none", 42)  # what `train.py configs/<config>.py` makes
            out = f"{s.runs}/{config}" if plain else f"{s.runs}/calibrations/{config}-{kind}-{seed}"
            changes = OPENWEBTEXT if config == "nano_llama" else {}
            changes = changes | dict(attn_calibration=kind, seed=seed, keep="last", track_sinks=True)
            runs[config, kind, seed] = s.training(config, out, **changes)
    return runs


def text_loss(run: str, model: Transformer, s: Settings, dtype) -> float | None:
    """Mean loss, in nats a token, on 256 windows of the held-out text (BB Table 7); None without one."""
    if s.text is None or checkpoint.own_tokenizer(run) is None:
        return None
    wanted = reading.Settings(text=s.text, num_sequences=256, device=s.device)
    read = reading.tokens(wanted, run, model.config.context_length + 1, model.config.vocab_size)
    return train.evaluate(model, read[:, :-1], read[:, 1:], 16, torch.device(s.device), dtype)


@torch.inference_mode()
def asleep_and_awake(model: Transformer, tokens: Tensor) -> dict:
    """What the head with the largest alpha_1 pays to position 1 at `backcopy`'s triggers, and elsewhere.

    Of queries from position 3 on, the first that can be triggers and have letters to attend to.
    """
    weights, first = [], torch.ones(1, dtype=torch.int64, device=tokens.device)
    watch = lambda layer, heads, q, k, v: weights.append(attention.weights_on(q, k, first))  # noqa: E731
    model.hidden(tokens, on_heads=watch)
    weights = torch.cat(weights, dim=1)[:, :, 2:, 0]  # (n, all heads, T - 2)
    weights = weights[:, weights.mean((0, 2)).argmax()]
    awake = torch.isin(tokens[:, 2:], torch.tensor([ord(a) for a in data.TRIGGERS], device=tokens.device))
    return dict(at_triggers=weights[awake].mean().item(), elsewhere=weights[~awake].mean().item())


@torch.inference_mode()
def every_calibration(runs: dict, s: Settings, device, dtype) -> dict:
    """A row for each run: losses and sinks; `curve`, its evaluations, and `lengths`, its sinks by length."""
    rows, curve, lengths = [], [], []
    for (config, kind, seed), settings in runs.items():
        run, key = settings.out, dict(config=config, calibration=kind, seed=seed)
        model, losses = checkpoint.load(run, device), logged(run)
        folder = str(train.open_data(settings, device).folder)
        wanted = sinks.Rate(data=folder, device=device.type, bos=config == "backcopy")
        wanted.num_sequences = 4 if s.size == "smoke" else wanted.num_sequences
        found = sinks.rate(wanted, run, model)["rows"]
        chain = sinks.anatomy(replace(wanted, sequence_length=64), run, model)["rows"]
        ratios = [column(layer, "dominance_ratio") for layer in split(chain, "layer").values()]
        row = key | dict(val_loss=losses[-1]["loss"], mean_loss=float(column(losses[1:], "loss").mean()))
        row["text_loss"] = text_loss(run, model, s, dtype)
        at64 = next(row for row in found if row["sequence_length"] == 64)
        row |= {name: at64[name] for name in ("sink_rate", "mean_alpha1", "max_alpha1", "uniform_alpha1")}
        row["dominance_ratio"] = float(np.mean([ratio[0] / np.median(ratio) for ratio in ratios]))
        if config == "backcopy":
            row |= asleep_and_awake(model, reading.tokens(wanted, run, 128, model.config.vocab_size))
        rows.append(row)
        curve += [key | point for point in losses]
        lengths += [key | row for row in found]
    later = [point for point in curve if point["step"]]  # the loss at birth would hide the rest
    panels = [over_runs(lengths, "sequence_length", key) for key in ("sink_rate", "mean_alpha1")]
    drawn = dict(points=list(over_runs(later, "step", "loss")), by_length=list(itertools.chain(*panels)))
    return dict(rows=rows, curve=curve, lengths=lengths) | drawn


def over_runs(points: list[dict], x: str, y: str):
    """Mean and standard deviation of `y` over seeds, at each `x`: the points of a figure."""
    for (config, kind, at), part in split(points, "config", "calibration", x).items():
        values = column(part, y)
        point = {"panel": f"{config}: {y.replace('_', ' ')}", "calibration": kind, x: at}
        point["theory"] = part[0]["uniform_alpha1"] if y == "mean_alpha1" else None
        yield point | dict(value=float(values.mean()), error=float(values.std()))


def judge_calibrations(rows: list[dict]):
    """The papers' orderings on each configuration: mean differences of paired runs, and 95 % intervals."""
    for config, part in split(rows, "config").items():
        runs = split(part, "calibration")
        for kind, than, key, sign, text, paper, of in EXPECTED:
            if all(row[key] is not None for row in part):
                yield paired(f"{config}: {text}", paper, runs, kind, than, key, sign, of)
        none, attenuate = (column(runs[kind], "sink_rate") for kind in ("none", "attenuate"))
        text = f"{config}: attenuate keeps every sink rate below 0.01, where none has sinks (Figure 12)"
        measured = f"at most {attenuate.max():.3f}; none at least {none.min():.3f}"
        yield claim(text, None, measured, none.min() > 0.01 > attenuate.max())
        if "elsewhere" in part[0]:
            change = column(runs["none"], "elsewhere") - column(runs["none"], "at_triggers")
            mean, low, high = interval(change).values()
            text = f"{config}: its head pays more to BOS where it has nothing to copy (Guo et al. 2024)"
            yield ours(text, f"{mean:+.3f}, {low:+.3f} to {high:+.3f}", above(low, high))


# ---- is an unprejudiced birth a better one? (ours) ---------------------------------------------------------


def newborns(s: Settings) -> dict:
    """Runs of a GPT-2 style drawn by `gpt2` and by `centered`, for each seed."""
    config, changes = ("nano_gpt2", OPENWEBTEXT) if s.size == "paper" else ("laptop", dict(model="tiny_gpt2"))
    runs = {}
    for init, seed in itertools.product(("gpt2", "centered"), s.seeds(SEEDS)):
        out = f"{s.runs}/births/{config}-{init}-{seed}"
        runs[init, seed] = s.training(config, out, init=init, seed=seed, keep="last", **changes)
    return runs


def every_birth(runs: dict, s: Settings, device, dtype) -> dict:
    """A row for each run; `points`, its training loss on the same batches."""
    rows, losses, points, window = [], {}, [], 1 if s.size == "smoke" else 10
    for (init, seed), settings in runs.items():
        ends, model = logged(settings.out), checkpoint.load(settings.out, device)
        row = dict(init=init, seed=seed, birth_loss=ends[0]["loss"], val_loss=ends[-1]["loss"])
        row["mean_loss"] = float(column(ends[1:], "loss").mean())
        rows.append(row | dict(mean_cosine=probe(model, 64, 200)["cosines"].mean_and_std()[0]))
        values = column(logged(settings.out, "loss"), "loss")
        values = values[: len(values) // window * window].reshape(-1, window).mean(1)
        losses.setdefault(init, []).append(values)
    drawn = {init: np.array(values) for init, values in losses.items()}  # (seeds, steps / window)
    drawn["difference"] = drawn["centered"] - drawn["gpt2"]
    for kind, values in drawn.items():
        title = "centered - gpt2" if kind == "difference" else "training loss, mean of seeds"
        for i, part in enumerate(values.T, start=1):
            found = interval(part)
            error = found["high"] - found["mean"] if kind == "difference" else part.std()
            point = dict(panel=title, init=kind, step=i * window, loss=found["mean"], error=float(error))
            points.append(point | dict(zero=0.0 if kind == "difference" else None))
    return dict(rows=rows, points=points)


def judge_births(rows: list[dict]) -> list[dict]:
    """Ours: paired differences of `centered` and `gpt2`, with 95 % intervals over seeds."""
    runs, who = split(rows, "init"), "an unprejudiced birth (centered)"
    asked = {
        "mean_loss": "learns faster: mean loss of all evaluations after birth",
        "val_loss": "ends at a lower held-out loss",
        "mean_cosine": "ends with less contraction of random sequences",
    }
    on = (None, runs, "centered", "gpt2")
    return [paired(f"{who} {text}", *on, key, -1, "ours") for key, text in asked.items()]


# ---- the experiments ---------------------------------------------------------------------------------------

EXPERIMENTS = {  # name: its runs, what measures them, its judge, its source, printed columns, its figures
    "lineage": (kinship.family, kinship.every_method, kinship.judge, "BB Tables 4, 5, 8-12",
        f"table base suspect kin {' '.join(kinship.METHODS[:6])} relabel_z body_z verdict", None),
    "calibrations": (calibrated, every_calibration, judge_calibrations, "BB Figure 12, Table 7; SO",
        "config calibration seed val_loss text_loss sink_rate mean_alpha1 max_alpha1 dominance_ratio",
        partial(figure, calibrated_rate="by_length")),
    "births": (newborns, every_birth, judge_births, "ours", "", figure),
}  # fmt: skip


def train_all(name: str, s: Settings) -> dict[tuple, train.Settings]:
    """The runs of an experiment, each trained if it is not yet."""
    runs = EXPERIMENTS[name][0](s)
    for i, settings in enumerate(runs.values(), start=1):
        if common.rank() == 0:
            print(f"run {i} of {len(runs)}: {settings.out}", flush=True)
        trained(settings)
    return runs


def run(name: str, s: Settings) -> dict:
    """Train what is not yet trained, measure, judge, write JSON and figures; returns the JSON."""
    _, measure, judge, paper, columns, plot = EXPERIMENTS[name]
    common.start(s)  # can we write there?
    runs = train_all(name, s)
    spent = dict(training_seconds=sum(map(seconds, runs.values())))
    measured = lambda *on: measure(runs, *on) | spent  # noqa: E731
    return conduct(s, name, paper, measured, columns, judge, plot)


def plan(words: list[str]) -> list:
    """The settings of a command line, and what to do."""
    name, words = common.subcommand(words, EXPERIMENTS, "", "experiment")
    if not {"-h", "--help"} & {*words}:
        common.choose(name, EXPERIMENTS, "experiment")  # none is the default: each takes an hour
    s = common.parse_settings(Settings, __doc__, words)
    s.runs = str(Path(s.runs))  # a part of the runs' names
    if s.text and not Path(s.text).is_file():
        raise UserError(f"no text file '{s.text}'")
    return [(s, partial(run, name, s))]


if __name__ == "__main__":
    common.run(plan)
