"""Do the papers hold? Their tables and figures, their number beside ours.

    python paper.py --only lineage      # BB Tables 4a-c, 5, 8-12: trains twelve small models once, 80 minutes
    python paper.py --only calibrations --text wiki.txt   # BB Figure 12, Table 7, SO: 32 models, 90 minutes

Table 6 needs 7B models that you have on disk: python seedprint.py compare Llama-2-7b-hf vicuna-7b-v1.5
"""

import itertools
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import attention
import checkpoint
import common
import reading
import sinks
import train
from baselines import THRESHOLD
from common import UserError, claim, setting
from data import TRIGGERS, TokenData
from evidence import SAME_BIRTH
from figures import draw
from model import CHOICES, Transformer
from seedprint import Compare, examine, open_models
from stats import column, interval, split

SEEDS = (42, 123, 1000, 2000)
SINKS = ("sink_rate", "mean_alpha1")
STEPS = {"tiny_llama": (150, 600, 600, 150), "tiny_qwen": (60, 60, 60, 60)}  # of each seed's training
CONTINUED = {"tiny_llama": 200, "tiny_qwen": 40}  # steps on the second corpus, of seeds 1000 and 123
T_TEST, U_TEST = "paper_t_p", "paper_u_p"
PAPER = {  # p that survive in the paper, a table's rows in order
    ("tiny_llama", "4a", T_TEST): (0.357, 0.678, 0.363, 0.434),
    ("tiny_llama", "4a", U_TEST): (0.532, 0.565, 0.335, 0.481),
    ("tiny_llama", "4b", T_TEST): (2.20e-8, 7.09e-6, 5.58e-4, 4.00e-10),
    ("tiny_llama", "4b", U_TEST): (6.28e-8, 1.37e-5, 2.81e-3, 1.27e-9),
    ("tiny_llama", "4c", T_TEST): (0.385, 0.035, 0.426, 0.388),
    ("tiny_llama", "4c", U_TEST): (0.486, 0.096, 0.337, 0.287),
    ("tiny_qwen", "4a", T_TEST): (0.094, 0.125, 0.451, 0.130),
    ("tiny_qwen", "4a", U_TEST): (0.074, 0.094, 0.529, 0.095),
    ("tiny_qwen", "4b", T_TEST): (7.36e-15, 4.41e-13, 1.06e-24, 4.87e-24),
    ("tiny_qwen", "4b", U_TEST): (3.38e-13, 2.01e-11, 2.05e-19, 1.92e-20),
    ("tiny_qwen", "4c", T_TEST): (0.286, 0.036, 0.026, 0.112),
    ("tiny_qwen", "4c", U_TEST): (0.254, 0.040, 0.043, 0.123),
}
NAMES = {"tiny_qwen": {"4a": "9", "4b": "10", "4c": "11", "5": "12"}, "tiny_llama": {"4b": "4b, 8"}}


@dataclass
class Settings(common.RunSettings):
    """What `paper.py` can be told."""

    only: tuple[str, ...] = setting(("lineage",), "experiments to make", ("lineage", "calibrations"))
    runs: str = setting("runs", "folder of the training runs, made once and reused")
    text: str | None = setting(None, "held-out English, for Table 7's perplexity")


def trained(s: train.Settings) -> str:
    """The run of these settings, trained if it is not there, taken up again if it was stopped.

    UserError if the folder holds a run of other settings.
    """
    done = checkpoint.steps(s.out)
    s = replace(s, resume=bool(done), dtype=str(common.start(s)[1]).removeprefix("torch."))
    train.check(s)
    if not done or int(done[-1].name.removeprefix("step_")) < s.max_iters:
        train.train(s)
    return s.out


def family(model: str, s: Settings) -> tuple[dict, dict]:
    """Runs of the four seeds on one corpus in one order, and of two of them continued on a second one."""
    settings, runs = (
        train.Settings(model=model, save_every=50, device=s.device, dtype=s.dtype),
        f"{s.runs}/lineage",
    )
    first = {}
    for seed, steps in zip(SEEDS, STEPS[model]):
        first[seed] = trained(replace(settings, seed=seed, max_iters=steps, out=f"{runs}/{model}-{seed}"))
    tokenizer = f"{train.data.default_folder(train.data.Settings())}/tokenizer.model"
    second = replace(settings, source=("docstrings",), tokenizer=tokenizer, learning_rate=5e-4)
    second = replace(second, warmup_iters=20, max_iters=CONTINUED[model])
    return first, {
        seed: trained(replace(second, seed=seed, init_from=first[seed], out=f"{first[seed]}-docstrings"))
        for seed in (1000, 123)
    }


def pairs(first: dict, second: dict) -> list[tuple]:
    """(table, base, suspect, whether they are kin) of every row of the tables."""
    born, rows = {seed: f"{run}/step_0000000" for seed, run in first.items()}, []
    for seed, other in zip(SEEDS, (*SEEDS[1:], SEEDS[0])):
        rows.append(("4a", born[seed], born[other], False))  # two newborns
        rows.append(("4b", born[seed], first[seed], True))  # a newborn and its child
        rows.append(
            ("4c", born[other], first[seed], False)
        )  # and another's, of the same data in the same order
    continued = [("5", first[1000], second[seed], seed == 1000) for seed in (1000, 123)]
    return sorted(rows + continued, key=lambda row: row[0])


def lineage(s: Settings) -> dict:
    """BB Tables 4a-c, 5 and 8 to 12: every method's verdict on kin and strangers."""
    options = Compare(paper_test=True, baselines=True, device=s.device, dtype=s.dtype, out=s.out)
    device, dtype = common.start(s)
    started, rows = time.perf_counter(), []
    for model in STEPS:
        listed = pairs(*family(model, s))
        text = TokenData(train.data.default_folder(train.data.Settings()))
        for i, (table, base, suspect, kin) in enumerate(common.progress(listed, desc=model, unit=" pairs")):
            (a, b), vocab = open_models([base, suspect], options)
            row, _ = examine(a, b, options, vocab, text, device, dtype)
            del row["reef_matrix"], row["skipped"]
            says = {name: row[name] < 0.01 for name in (T_TEST, U_TEST)}
            says |= {name: row[name] >= THRESHOLD for name in ("intrinsic", "reef", "pcs", "ics")}
            says |= {"relabelling": row["permutation_p"] < 0.01, "verdict": row["verdict"] == SAME_BIRTH}
            key = dict(table=NAMES[model].get(table, table), base=base, suspect=suspect, kin=kin)
            for name in (T_TEST, U_TEST):
                theirs = PAPER.get((model, table, name))
                row[f"{name}_theirs"] = theirs[i % 4] if theirs else None
            rows.append(key | row | {f"{name}_right": said == kin for name, said in says.items()})
    columns = "table base suspect kin paper_t_p paper_u_p intrinsic reef pcs ics relabel_z body_z verdict"
    made = common.environment(device, dtype, started)
    return common.report(
        s, "lineage", "BB Tables 4, 5, 8-12", rows, judge_lineage(rows), columns, environment=made
    )


def judge_lineage(rows: list[dict]) -> list[dict]:
    """BB Tables 4, 5, 8 to 12: who is right?"""
    claims = []
    judged = ("paper_t_p", "paper_u_p", "intrinsic", "reef", "pcs", "ics", "relabelling", "verdict")
    for table, part in split(rows, "table").items():
        for name in judged:
            right = column(part, f"{name}_right")
            text = f"Table {table}: {name.replace('_', ' ')} is right on every pair"
            claims.append(claim(text, None, f"{right.sum()} of {len(part)}", right.all()))
    return claims


# ---- four calibrations trained alike (BB 6.2, SO) ----------------------------------------------------------

CALIBRATED = {"laptop": (42, 123, 1000), "backcopy": (42, 123, 1000, 2000, 7)}  # config: seeds
EXPECTED = (  # a calibration, another, of what it has less (-1) or more (1), in words, the paper's number
    ("amplify", "none", "sink_rate", -1, "amplify lowers the sink rate (Figure 12)", None),
    ("attenuate", "amplify", "sink_rate", -1, "attenuate lowers it further (Figure 12)", None),
    ("attenuate", "none", "mean_alpha1", -1, "attenuate lowers raw alpha_1 (ours)", None),
    ("headnorm", "none", "mean_alpha1", -1, "headnorm lowers raw alpha_1 (ours)", None),
    ("headnorm", "none", "mean_loss", -1, "headnorm learns faster: mean loss of all evaluations (SO)", None),
    ("headnorm", "none", "val_loss", -1, "headnorm ends at a lower held-out loss (ours)", None),
    ("attenuate", "none", "text_loss", -1, "attenuate is better on WikiText-2 (Table 7)", -0.015),
    ("amplify", "none", "text_loss", 1, "amplify is worse on WikiText-2 (Table 7)", 0.029),
)


def calibrated_run(config: str, calibration: str, seed: int, s: Settings) -> tuple[str, TokenData]:
    """A training run as the config file says, made once, and its data set."""
    settings = common.parse_settings(train.Settings, "", [f"configs/{config}.py"])
    out = f"{s.runs}/calibrations/{config}-{calibration}-{seed}"
    settings = replace(settings, attn_calibration=calibration, seed=seed, out=out, device=s.device)
    settings = replace(settings, dtype=s.dtype, keep="last", track_sinks=True)
    return trained(settings), train.open_data(settings, torch.device(s.device))


def text_loss(run: str, model: Transformer, s: Settings, dtype) -> float | None:
    """Mean loss, in nats a token, on 128 windows of the held-out text (BB Table 7); None without one."""
    if s.text is None or not (checkpoint.find(run) / "tokenizer.model").exists():
        return None
    T, device, total = model.config.context_length, torch.device(s.device), 0.0
    wanted = reading.Settings(text=s.text, num_sequences=128, device=s.device)
    with torch.inference_mode():
        for part in reading.tokens(wanted, run, T + 1, model.config.vocab_size).split(16):
            total += train.loss_sum(model, part[:, :-1], part[:, 1:], device, dtype).item()
    return total / (128 * T)


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
    awake = torch.isin(tokens[:, 2:], torch.tensor([ord(a) for a in TRIGGERS], device=tokens.device))
    return dict(at_triggers=weights[awake].mean().item(), elsewhere=weights[~awake].mean().item())


def calibrations(s: Settings) -> dict:
    """BB Figure 12, Table 7 and SO: sinks, perplexity and convergence of the four, on the same batches."""
    device, dtype = common.start(s)
    if s.text and not Path(s.text).is_file():
        raise UserError(f"no text file '{s.text}'")
    s, started, rows, curve, lengths = replace(s, device=device.type), time.perf_counter(), [], [], []
    for config, kind in itertools.product(CALIBRATED, CHOICES["attn_calibration"]):
        for seed in CALIBRATED[config]:
            run, data = calibrated_run(config, kind, seed, s)
            model, key = checkpoint.load(run, device), dict(config=config, calibration=kind, seed=seed)
            logged = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
            losses = [dict(step=line["step"], loss=line["val_loss"]) for line in logged if "val_loss" in line]
            wanted = sinks.Rate(data=str(data.folder), device=device.type, bos=config == "backcopy")
            found, _, _ = sinks.rate(wanted, run, model)
            chain, _, more = sinks.anatomy(replace(wanted, sequence_length=64), run, model)
            ratios = [column(layer, "dominance_ratio") for layer in split(chain, "layer").values()]
            row = key | dict(val_loss=losses[-1]["loss"], mean_loss=float(column(losses[1:], "loss").mean()))
            row["text_loss"] = text_loss(run, model, s, dtype)
            at64 = next(row for row in found if row["sequence_length"] == 64)
            row |= {name: at64[name] for name in ("sink_rate", "mean_alpha1", "max_alpha1", "uniform_alpha1")}
            row["dominance_ratio"] = float(np.mean([ratio[0] / np.median(ratio) for ratio in ratios]))
            row["super_neuron_ratio"] = more["super_neurons"][0]["ratio"]
            if config == "backcopy":
                row |= asleep_and_awake(model, reading.tokens(wanted, run, 128, model.config.vocab_size))
            rows.append(row)
            curve += [key | point for point in losses]
            lengths += [key | row for row in found]
    more = dict(environment=common.environment(device, dtype, started), curve=curve, lengths=lengths)
    columns = "config calibration seed val_loss text_loss sink_rate mean_alpha1 max_alpha1 dominance_ratio"
    claims = judge_calibrations(rows)
    result = common.report(s, "calibrations", "BB Figure 12, Table 7; SO", rows, claims, columns, **more)
    panels = [over_runs(lengths, "sequence_length", key) for key in SINKS]
    draw("calibrated_rate", sum(panels, []), Path(s.out) / "calibrated_rate.png")
    later = [point for point in curve if point["step"]]  # the loss at birth would hide the rest
    draw("calibrations", over_runs(later, "step", "loss"), Path(s.out) / "calibrations.png")
    return result


def over_runs(points: list[dict], x: str, y: str) -> list[dict]:
    """Mean and standard deviation of `y` over seeds, at each `x`: the points of a figure."""
    drawn = []
    for (config, kind, at), part in split(points, "config", "calibration", x).items():
        values = column(part, y)
        point = {"panel": f"{config}: {y.replace('_', ' ')}", "calibration": kind, x: at}
        point["theory"] = part[0]["uniform_alpha1"] if y == "mean_alpha1" else None
        drawn.append(point | dict(value=float(values.mean()), error=float(values.std())))
    return drawn


def judge_calibrations(rows: list[dict]) -> list[dict]:
    """The papers' orderings on each configuration: mean differences of paired runs, and 95 % intervals."""
    claims = []
    for config, part in split(rows, "config").items():
        runs = split(part, "calibration")
        for kind, than, key, sign, text, paper in EXPECTED:
            if all(row[key] is not None for row in part):
                found = interval(column(runs[kind], key) - column(runs[than], key))
                mean, low, high = found.values()
                measured = f"{mean:+.4f}, {low:+.4f} to {high:+.4f}" + " nats" * key.endswith("loss")
                claims.append(claim(f"{config}: {text}", paper, measured, sign * mean > 0 and low * high > 0))
        none, attenuate = (column(runs[kind], "sink_rate") for kind in ("none", "attenuate"))
        text = f"{config}: attenuate keeps every sink rate below 0.01, where none has sinks (Figure 12)"
        measured = f"at most {attenuate.max():.3f}; none at least {none.min():.3f}"
        claims.append(claim(text, None, measured, none.min() > 0.01 > attenuate.max()))
        if "elsewhere" in part[0]:
            mean, low, high = interval(
                column(runs["none"], "elsewhere") - column(runs["none"], "at_triggers")
            ).values()
            text = f"{config}: its head pays more to BOS where it has nothing to copy (Guo et al. 2024)"
            claims.append(claim(text, None, f"{mean:+.3f}, {low:+.3f} to {high:+.3f}", low > 0))
    return claims


EXPERIMENTS = {"lineage": lineage, "calibrations": calibrations}


def main() -> None:
    """Parse the command line and make the experiments."""
    s = common.parse_settings(Settings, __doc__)
    for name in s.only:
        EXPERIMENTS[name](s)


if __name__ == "__main__":
    common.run(main)
