"""What becomes of models that differ in one thing, trained on one text in one order? (BB 6, B.3; SO)

    python -m reproduce.trainings lineage                            # who is related? twelve runs, 90 minutes
    python -m reproduce.trainings calibrations                       # calibrations, explicit sinks: six hours
    python -m reproduce.trainings text                               # the same on text, seven hours
    python -m reproduce.trainings perplexity --text wiki.txt         # `laptop` on any text, six hours

Each run is made once, in runs/, by one thread, and reused; one that was stopped is taken up again.
"""

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro

import sinks
import train
from lib import checkpoint, runtime
from lib.data import TokenData, default_folder
from lib.files import sha256
from lib.inputs import TextSettings, read_tokens
from lib.results import Experiment, interval
from lib.runs import begun_settings, merged_settings, read_log, read_rows, write_log
from lib.settings import (
    Command,
    OutputSettings,
    RunSettings,
    UserError,
    check_choice,
    read_config_file,
    run_script,
)
from lineage.outputs import PaperSettings, last_outputs, paper_test
from lineage.verdict import compare_pair, read_model
from measure import attention
from measure.units import hidden_units, replace_units
from reproduce.baselines import BASELINES, similarities
from reproduce.text import CALIBRATIONS, CONFIG, KINDS, differences, draw_calibrations, read_runs, reading_of

SEEDS = (42, 123, 1000, 2000)
BASE, OTHER = 1000, 123  # seeds that learn a second corpus; BASE is the base of their table
STEPS = {"llama": {42: 150, 123: 600, 1000: 600, 2000: 150}, "qwen": dict.fromkeys(SEEDS, 60)}
STEPS_ON_DOCSTRINGS = {"llama": 200, "qwen": 40}  # the second corpus
TABLES = {  # newborns; newborns and their children; and others' children; children after a second corpus
    "llama": ("4a", "4b, 8", "4c", "5"),
    "qwen": ("9", "10", "11", "12"),
}
CALIBRATION_SEEDS = {"backcopy": range(42, 58), "laptop": range(42, 50)}  # by configuration
CALIBRATION_KINDS = {"backcopy": KINDS, "laptop": CALIBRATIONS}
TEXT = "results/text"  # what the runs on text came to
TEXT_SEEDS = range(42, 45)
RUNGS = {  # variants of configs/text_sink.py: a seed of each
    "text_eight_layers": {"num_layers": 8, "max_iters": 3072},
    "text_as_it_falls": {"bos_first": False, "max_iters": 6144},
    "text_without_builders": {},  # those that none-42 has at its end are zero from birth on
}
# What may differ in a run that is there: not how long it was, nor when and on what it was evaluated.
MAY_DIFFER = train.MAY_CHANGE - {"max_iters", "eval_every", "eval_sequences"} | {"keep"}


@dataclass
class PerplexitySettings(RunSettings):
    """What `perplexity` is asked."""

    folders: tyro.conf.Positional[tuple[str, ...]] = ()  # of some runs to make, like runs/laptop
    text: str = "data/wikitext-2/test.txt"  # file of held-out English: in BB, WikiText-2's


@dataclass
class TrainSettings:
    """What `train` is asked."""

    folders: tyro.conf.Positional[tuple[str, ...]] = ()  # of runs, like runs/lineage/tiny_llama-1000


@dataclass
class NotedRunsSettings(OutputSettings):
    """What `text` and `calibrations` are asked."""

    folders: tyro.conf.Positional[tuple[str, ...]] = ()  # of some runs to make, like runs/text/none-42


def training(name, config="", **changes) -> train.Settings:
    """The run runs/<name>: train.py's defaults, or configs/<config>.py, with changes."""
    run = train.Settings()
    if config:
        run, _ = read_config_file(str(Path(train.__file__).parent / f"configs/{config}.py"), run)
    return replace(run, out=f"runs/{name}", **changes)


def lineage_runs():
    """Runs by (style, seed, corpus): all seeds learn corpus 1 in one order, two go on to corpus 2."""
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


def calibrated(kind):
    """The settings of one of KINDS."""
    return {"explicit_sink": True} if kind == "explicit" else {"attn_calibration": kind}


def calibration_runs():
    """Runs of every calibration by (configuration, calibration, seed)."""
    runs = {}
    for config, seeds in CALIBRATION_SEEDS.items():
        for kind in CALIBRATION_KINDS[config]:
            for seed in seeds:
                name = f"calibrations/{config}-{kind}-{seed}"
                if (kind, seed) == ("none", 42):  # what `train.py configs/<config>.py` makes
                    name = config
                changes = calibrated(kind) | {"seed": seed, "keep": "last", "track_sinks": False}
                runs[config, kind, seed] = training(name, config, **changes)
    return runs


def text_runs():
    """Runs on text by (configuration, calibration, seed): of configs/text_sink.py, and variants."""
    runs = {}
    for seed in TEXT_SEEDS:
        for kind in KINDS:
            changes = calibrated(kind) | {"seed": seed}
            runs[CONFIG, kind, seed] = training(f"text/{kind}-{seed}", CONFIG, **changes)
    for rung, changes in RUNGS.items():
        runs[rung, "none", 42] = training(f"text/{rung}-42", CONFIG, **changes)
    return runs


def train_named(settings: TrainSettings) -> None:
    """Train the runs of some folders, unless they are there."""
    runs = [*lineage_runs().values(), *calibration_runs().values(), *text_runs().values()]
    by_folder = {run.out: run for run in runs}
    for folder in settings.folders:
        check_choice(folder, by_folder, "run")
    train_all([by_folder[folder] for folder in settings.folders])


def train_all(runs) -> None:
    """Train each run that is not there, on one thread; take it up again if it was stopped."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number, run in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {run.out}", flush=True)
        if Path(run.out, "settings.json").exists():
            run = merged_settings(run, begun_settings(run), (), vars(run).keys() - MAY_DIFFER)
        last = Path(run.out, f"step_{run.max_iters:07}")
        if not last.exists():
            train.train(run, context_of(run))
        if not last.exists():
            raise KeyboardInterrupt  # what stopped the training stops whoever asked for it
    torch.set_num_threads(threads)


def context_of(run):
    """What lasts as long as a run's training: silence, in one of them."""
    if Path(run.out).name != "text_without_builders-42":
        return contextlib.nullcontext
    return partial(silenced, later_builders(TEXT, "none-42"))


def later_builders(folder, run):
    """The (layer, unit) that were measured to build a run's sink at its last step; UserError if none were."""
    path = Path(folder, f"birth_{run}.jsonl")
    if not path.exists():
        raise UserError(f"{path} is missing: python -m reproduce.birth runs/text/{run} --numbers {folder}")
    sink = next(read_rows(path))
    return [(row["layer"], row["unit"]) for row in sink["builders"]]


@contextlib.contextmanager
def silenced(units, model):
    """While this lasts, some hidden units, (layer, unit) each, of a newborn are zero, and learn nothing.

    Their down columns are zero from birth on, so that a checkpoint computes what was trained.
    """
    for layer, unit in units:
        model.model.layers[layer - 1].mlp.down_proj.weight.data[:, unit] = 0
    with hidden_units(model, replace_units(units)):
        yield


def lineage(settings: RunSettings):
    """What do `compare`, the paper's test and four baselines say of each pair in the papers' tables?"""
    runtime.start(settings)  # hours of training are not for an --out that cannot be written
    runs = lineage_runs()
    train_all(list(runs.values()))
    experiment = Experiment("lineage", "BB Tables 4, 5, 8-12", settings)  # its seconds are of measuring
    learned = runs["llama", BASE, 1]
    data = TokenData(default_folder(learned.source, learned.tokenizer))
    text = data.held_out(200, 64)[0].to(experiment.device)  # (200, 64)
    pairs = table_pairs("llama", runs) + table_pairs("qwen", runs)
    models, weights, outputs = {}, {}, {}  # by folder: for the baselines, for `compare`, for the paper's test
    for folder in {folder for pair in pairs for folder in pair[1:3]}:
        spec = checkpoint.parse_spec(folder)
        model = spec.load(experiment.device, experiment.dtype)
        models[folder] = model
        weights[folder] = read_model(folder, spec.open())
        outputs[folder] = last_outputs(model, model.config.vocab_size, PaperSettings())
    rows = []
    for table, base, suspect, kin in runtime.progress(pairs, desc="lineage", unit=" pairs"):
        row = {"table": table, "base": base, "suspect": suspect, "kin": kin}
        row |= compare_pair(weights[base], weights[suspect])[0]
        row |= paper_test(outputs[base], outputs[suspect])
        rows.append(row | similarities(models[base], models[suspect], text))
    columns = ("table", "base", "suspect", "kin", "verdict", "paper_t_p", "paper_u_p", *BASELINES)
    return experiment.save(rows, columns)


def table_pairs(style, runs):
    """(table, base, suspect, whether they are related) of every row of a style's tables."""
    newborns, children, others, continued = TABLES[style]
    child = {seed: runs[style, seed, 1].out for seed in SEEDS}
    birth = {seed: f"{child[seed]}/step_0000000" for seed in SEEDS}
    unrelated = list(zip(SEEDS, SEEDS[1:] + SEEDS[:1]))  # each seed and the next
    pairs = [(newborns, birth[seed], birth[other], False) for seed, other in unrelated]
    pairs += [(children, birth[seed], child[seed], True) for seed in SEEDS]
    pairs += [(others, birth[seed], child[other], False) for seed, other in unrelated]
    pairs += [(continued, child[BASE], runs[style, seed, 2].out, seed == BASE) for seed in (BASE, OTHER)]
    return pairs


def calibrations(settings: NotedRunsSettings):
    """Which scaling of heads ends with fewer sinks, and a lower loss? Trains what is not noted (BB Figure 12)

    <out>/calibrations.jsonl notes what each run came to.
    """
    experiment = Experiment("calibrations", "BB Figure 12; SO", settings)
    path = Path(settings.out, "calibrations.jsonl")
    rows = noted_rows(path, calibration_runs(), settings.folders, lambda run, *key: end_of(run, *key)[0])
    for run, _ in read_runs(TEXT):
        if run["config"] == CONFIG:
            rows.append({name: run.get(name) for name in rows[0]})
    draw_calibrations(experiment.folder / "calibrations.png", rows)
    return experiment.save(rows, differences=paired_differences(rows))


def noted_rows(path, runs, folders, measure, **same):
    """A row of each run that a file notes, after runs that are named, or else not noted, were made and noted.

    A row is noted if it has the items `same`. `measure` takes a run and its key.
    """
    by_folder = {run.out: run for run in runs.values()}
    for folder in folders:
        check_choice(folder, by_folder, "run")
    rows = [row for row in read_rows(path) if row.items() >= same.items()]
    noted = {(row["config"], row["calibration"], row["seed"]): row for row in rows}
    for key, run in runs.items():
        if run.out in folders or (not folders and key not in noted):
            train_all([run])
            noted[key] = measure(run, *key) | same
            write_log(path, [noted[each] for each in runs if each in noted])
    return [noted[key] for key in runs if key in noted]


def paired_differences(rows):
    """Each kind's sink rate and losses minus those of the same seeds with none: means and intervals."""
    found = []
    for key in ("sink_rate", "val_loss", "mean_loss"):
        for config in dict.fromkeys(row["config"] for row in rows):
            paired = differences([row for row in rows if row["config"] == config], key)
            for kind in dict.fromkeys(row["calibration"] for row in paired):
                values = [row[key] for row in paired if row["calibration"] == kind]
                if len(values) > 1:
                    row = {"config": config, "calibration": kind, "of": key, "seeds": len(values)}
                    found.append(row | interval(values))
    return found


@torch.inference_mode()
def end_of(run: train.Settings, config, kind, seed):
    """What a run came to, a row: losses (nats/token) after birth, sinks, SO's links in the mean of layers.

    And the rows of its layers by `sinks.dissect`, with the share of heads that sink. All but losses are of 64
    held-out tokens of the text that it learned.
    """
    log = list(read_log(Path(run.out)))
    losses = [row["val_loss"] for row in log if row["step"] > 0 and "val_loss" in row]
    row = begun_row(run, config, kind, seed)
    row |= {"val_loss": losses[-1], "mean_loss": np.mean(losses)}
    row["uniform_alpha1"] = attention.uniform_alpha(64)
    reading, spec = reading_of(run), checkpoint.parse_spec(run.out)
    model = spec.load()
    found, alpha = attention.sink_statistics(model, read_tokens(reading, spec, 64))  # alpha (n, L, H)
    row |= found
    layers = sinks.dissect(reading, spec, model)["layers"]
    for name in ("disparity", "effective_rank", "output_tau"):
        row[name] = np.mean([layer[name] for layer in layers if layer[name] is not None])
    rates = (alpha > attention.EPSILON).double().mean(dim=(0, 2)).tolist()
    return row, [layer | {"sink_rate": rate} for layer, rate in zip(layers, rates)]


def perplexity(settings: PerplexitySettings):
    """What does each model of `laptop` lose on a text that nobody trained on, in nats/token? (BB Table 7)

    <out>/perplexity.jsonl notes what each run lost.
    """
    if not Path(settings.text).is_file():
        raise UserError(f"no text file '{settings.text}': the paper's is the test split of WikiText-2")
    experiment = Experiment("perplexity", "BB Table 7", settings)

    def measure(run, config, kind, seed):
        spec = checkpoint.parse_spec(run.out)
        loss = text_loss(settings.text, spec, spec.load(experiment.device, experiment.dtype))
        return begun_row(run, config, kind, seed) | {"text_loss": loss}

    runs = {key: run for key, run in calibration_runs().items() if key[0] == "laptop"}
    path = Path(settings.out, "perplexity.jsonl")
    rows = noted_rows(path, runs, settings.folders, measure, text_sha256=sha256(Path(settings.text)))
    return experiment.save(rows)


def begun_row(run, config, kind, seed):
    """The first columns of a run's row: which one it is, its threads, and the commit that began it."""
    begun = next(read_log(Path(run.out)))
    row = {"config": config, "calibration": kind, "seed": seed}
    return row | {name: begun[name] for name in ("threads", "commit")}


def text_loss(text, spec, model):
    """Mean loss on 256 windows of a text file, nats/token."""
    device = model.lm_head.weight.device
    reading = TextSettings(text=text, num_sequences=256, device=device.type)
    tokens = read_tokens(reading, spec, model.config.context_length + 1)
    return train.evaluate(model, tokens[:, :-1], tokens[:, 1:], 16, device, torch.float32)  # no autocast


def text(settings: NotedRunsSettings) -> None:
    """What do the calibrations do to sinks on text? Trains runs, notes what each came to (seven hours)"""
    runtime.start(settings)
    runs = {run.out: (key, run) for key, run in text_runs().items()}
    for folder in settings.folders or runs:
        check_choice(folder, runs, "run")
        key, run = runs[folder]
        train_all([run])
        path = Path(settings.out, "-".join(map(str, key)) + ".jsonl")
        write_log(path, record(run, *key))
        print(f"see {path}")


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
    row, layers = end_of(run, *key)
    yield row | {"text_loss": loss, "layers": layers}


COMMANDS = {
    "lineage": Command(lineage, RunSettings(dtype="float32")),
    "calibrations": Command(calibrations, NotedRunsSettings()),
    "text": Command(text, NotedRunsSettings(out="results/text")),
    "perplexity": Command(perplexity, PerplexitySettings(dtype="float32")),
    "train": Command(train_named, TrainSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
