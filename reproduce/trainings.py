"""Train models that differ in one thing on the same text in the same order (BB 6, B.3; SO).

    python -m reproduce.trainings lineage                            # who is related? twelve runs, 90 minutes
    python -m reproduce.trainings calibrations                       # calibrations, explicit sinks: six hours
    python -m reproduce.trainings perplexity --text wiki.txt         # `laptop` on any text, six hours
    python -m reproduce.trainings train runs/lineage                 # some runs, or a folder of them

Each run is made once, in runs/, on one thread, and reused; a stopped one resumes.
"""

import functools
import itertools
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import tyro

import train
from lib import runtime
from lib.figures import unique
from lib.files import check_regular
from lib.results import Experiment, interval
from lib.settings import (
    Command,
    OutputSettings,
    RunSettings,
    UserError,
    check_choice,
    read_config_file,
    run_script,
)
from lineage.compare import CompareSettings, Model, compare_models
from reproduce.baselines import BASELINES, similarities
from reproduce.text import CALIBRATIONS, CONFIG, KINDS, TEXT, begun_row, differences, draw_kinds, end_of
from seedprint import PaperSettings, last_outputs, paper_test
from sources import checkpoint
from sources.data import TokenData, default_folder
from sources.inputs import TextSettings, read_tokens
from sources.runs import MAY_CHANGE, Run, read_rows
from strangers.formats import open_spec, sha256

SEEDS = (42, 123, 1000, 2000)
BASE, OTHER = 1000, 123  # seeds that learn a second corpus; BASE is the base in the table
STEPS = {"llama": {42: 150, 123: 600, 1000: 600, 2000: 150}, "qwen": dict.fromkeys(SEEDS, 60)}
STEPS_ON_DOCSTRINGS = {"llama": 200, "qwen": 40}  # the second corpus
CALIBRATED = {  # for each configuration, the calibrations to train, and the seeds
    "backcopy": (KINDS, range(42, 58)),
    "laptop": (CALIBRATIONS, range(42, 50)),
    CONFIG: (KINDS, range(42, 45)),
}
# What may differ in an existing run: not its length, nor when and on what it was evaluated.
MAY_DIFFER = MAY_CHANGE - {"max_iters", "eval_every", "eval_sequences"} | {"keep", "dtype"}


@dataclass
class TrainSettings:
    """The settings of `train`."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # run folders, or folders of runs, like runs/lineage


@dataclass
class PerplexitySettings(RunSettings):
    """The settings of `perplexity`."""

    text: str = "data/wikitext-2/test.txt"  # file of held-out English: in BB, WikiText-2's


def training(name, config="", **changes) -> train.Settings:
    """The settings of runs/<name>: train.py's defaults, or configs/<config>.py, with changes."""
    run = train.Settings()
    if config:
        run = read_config_file(str(Path(train.__file__).parent / f"configs/{config}.py"), run)
    return replace(run, out=f"runs/{name}", **changes)


def lineage_runs():
    """Runs by (style, seed, corpus): all seeds learn corpus 1 in one order, two continue with corpus 2."""
    runs = {}
    for style, steps in STEPS.items():
        preset = f"tiny_{style}"
        for seed in SEEDS:
            changes = {"model": preset, "seed": seed, "max_iters": steps[seed], "save_every": 50}
            runs[style, seed, 1] = training(f"lineage/{preset}-{seed}", **changes)
        for seed in (BASE, OTHER):
            parent = runs[style, seed, 1]
            tokenizer = default_folder(parent.source, parent.tokenizer) / "tokenizer.model"
            changes = {"init_from": parent.out, "source": ("docstrings",), "tokenizer": str(tokenizer)}
            changes |= {"max_iters": STEPS_ON_DOCSTRINGS[style], "learning_rate": 5e-4, "warmup_iters": 20}
            runs[style, seed, 2] = training(f"lineage/{preset}-{seed}-docstrings", **changes)
    return runs


def calibration_runs(*configs):
    """Runs by (configuration, calibration, seed), for some configurations."""
    runs = {}
    for config in configs:
        kinds, seeds = CALIBRATED[config]
        for kind, seed in itertools.product(kinds, seeds):
            changes = {"explicit_sink": True} if kind == "explicit" else {"attn_calibration": kind}
            name = f"text/{kind}-{seed}"
            if config != CONFIG:
                changes |= {"keep": "last", "track_sinks": False}
                is_plain = (kind, seed) == ("none", 42)  # as `train.py configs/<config>.py`
                name = config if is_plain else f"calibrations/{config}-{kind}-{seed}"
            runs[config, kind, seed] = training(name, config, seed=seed, **changes)
    return runs


def train_named(settings: TrainSettings) -> None:
    """Train the named runs that do not exist."""
    runs = [*lineage_runs().values(), *calibration_runs(*CALIBRATED).values()]
    chosen = []
    for folder in settings.runs:
        found = [run for run in runs if Path(folder) in (Path(run.out), Path(run.out).parent)]
        if not found:
            check_choice(folder, [run.out for run in runs], "run")
        chosen += found
    train_all(chosen)


def train_all(runs) -> None:
    """Train each run that does not exist, on one thread, and resume stopped ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number, run in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {run.out}", flush=True)
        folder = Run(run.out)
        begun = folder.settings(train.Settings)
        for name, value in asdict(begun or run).items():
            if name not in MAY_DIFFER | MAY_CHANGE and value != getattr(run, name):
                raise UserError(f"{run.out} was trained with {name} {value}: remove it, or rename it")
        if begun is not None:
            run = replace(begun, max_iters=run.max_iters)
        last = folder.step_folder(run.max_iters)
        if not last.exists():
            train.train(run)
        if not last.exists():
            raise KeyboardInterrupt  # a signal that stopped the training stops us
    torch.set_num_threads(threads)


def lineage(settings: RunSettings):
    """Ask `compare`, the paper's test and four baselines about the pairs in the paper's tables (90 min)"""
    runtime.start(settings)  # fail before hours of training if --out cannot be written
    runs = lineage_runs()
    train_all(runs.values())
    experiment = Experiment("lineage", "BB Tables 4, 5, 8-12", settings)  # a clock starts
    learned = runs["llama", BASE, 1]
    data = TokenData(default_folder(learned.source, learned.tokenizer))
    tokens = data.held_out(200, 64)[0].to(experiment.device)  # (200, 64)
    pairs = table_pairs(runs, "llama", "4a", "4b, 8", "4c", "5")
    pairs += table_pairs(runs, "qwen", "9", "10", "11", "12")

    @functools.cache
    def read(folder):
        spec = checkpoint.parse_spec(folder)
        model = spec.load(experiment.device, experiment.dtype)
        outputs = last_outputs(model, model.config.vocab_size, PaperSettings())
        return model, Model(folder, open_spec(spec)), outputs

    rows = []
    for table, base, suspect, kin in runtime.progress(pairs, desc="lineage", unit=" pairs"):
        models, weights, outputs = zip(read(base), read(suspect))
        row = {"table": table, "base": base, "suspect": suspect, "kin": kin}
        row |= compare_models(*weights, CompareSettings(neurons=True))[0]
        rows.append(row | paper_test(*outputs) | similarities(*models, tokens))
    columns = ("table", "base", "suspect", "kin", "verdict", "paper_t_p", "paper_u_p", *BASELINES)
    return experiment.save(rows, columns)


def table_pairs(runs, style, newborns, children, others, continued):
    """Rows (table, base, suspect, whether they are related) of a style's four tables."""
    child = {seed: runs[style, seed, 1].out for seed in SEEDS}
    birth = {seed: f"{child[seed]}/step_0000000" for seed in SEEDS}
    unrelated = list(zip(SEEDS, SEEDS[1:] + SEEDS[:1]))  # each seed and the next
    pairs = [(newborns, birth[seed], birth[other], False) for seed, other in unrelated]
    pairs += [(children, birth[seed], child[seed], True) for seed in SEEDS]
    pairs += [(others, birth[seed], child[other], False) for seed, other in unrelated]
    pairs += [(continued, child[BASE], runs[style, seed, 2].out, seed == BASE) for seed in (BASE, OTHER)]
    return pairs


def calibrations(settings: OutputSettings):
    """Which scaling of heads gives fewer sinks, and a lower loss? (BB Figure 12; six hours)"""
    runtime.start(settings)
    runs = calibration_runs("backcopy", "laptop")
    train_all(runs.values())
    experiment = Experiment("calibrations", "BB Figure 12; SO", settings)
    rows = [end_of(run, *key)[0] for key, run in runs.items()]
    for path in sorted(Path(TEXT).glob(f"{CONFIG}-*.jsonl")):
        begun, *_, end = read_rows(path)
        rows.append({name: (begun | end).get(name) for name in rows[0]})
    rates, costs = [], []
    for config in unique(rows, "config"):
        chosen = [row for row in rows if row["config"] == config]
        rates.append((chosen, "calibration", "sink_rate", f"{config}: share of heads that sink"))
        chosen = differences(chosen, "val_loss")
        costs.append((chosen, "calibration", "val_loss", f"{config}: loss, minus that of none (nats/token)"))
    title = "Which calibration ends sinks, and what does it cost? (dots: seeds; bars: their means)"
    result = experiment.save(rows, differences=paired_differences(rows))
    draw_kinds(experiment.folder / "calibrations.png", title, rates + costs)
    return result


def paired_differences(rows):
    """Means and intervals of each kind's sink rate and losses, minus those of `none` with the same seeds."""
    found = []
    for key in ("sink_rate", "val_loss", "mean_loss"):
        values = defaultdict(list)
        for row in differences(rows, key):
            values[row["config"], row["calibration"]].append(row[key])
        for (config, kind), of_seeds in values.items():
            if len(of_seeds) > 1:
                row = {"config": config, "calibration": kind, "of": key, "seeds": len(of_seeds)}
                found.append(row | interval(of_seeds))
    return found


def perplexity(settings: PerplexitySettings):
    """The loss of each `laptop` model on another text, in nats/token (BB Table 7; six hours)"""
    check_regular(Path(settings.text))
    runtime.start(settings)
    runs = calibration_runs("laptop")
    train_all(runs.values())
    experiment = Experiment("perplexity", "BB Table 7", settings)
    reading = TextSettings(text=settings.text, num_sequences=256, device=experiment.device.type)
    rows = []
    for key, run in runs.items():
        spec = checkpoint.parse_spec(run.out)
        model = spec.load(experiment.device, experiment.dtype)
        tokens = read_tokens(reading, spec, model.config.context_length + 1)
        windows = tokens[:, :-1], tokens[:, 1:]
        loss = train.mean_loss(model, *windows, 16, experiment.device, torch.float32)  # no autocast
        rows.append(begun_row(run, *key) | {"text_loss": loss, "text_sha256": sha256(Path(settings.text))})
    return experiment.save(rows)


COMMANDS = {
    "lineage": Command(lineage, RunSettings(dtype="float32")),
    "calibrations": Command(calibrations, OutputSettings()),
    "perplexity": Command(perplexity, PerplexitySettings(dtype="float32")),
    "train": Command(train_named, TrainSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
