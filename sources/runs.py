"""What a run starts or resumes with, its signals, and a run folder that stays whole."""

import contextlib
import fcntl
import json
import os
import signal
import threading
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from init import newborn
from lib import runtime
from lib.figures import curves
from lib.files import as_user_error, atomic_file, atomic_folder, check_regular, read_json, remove
from lib.results import HUB_COMMITS, commit
from lib.settings import UserError, from_values, rank, say
from model import PRESETS
from sources import checkpoint, saving
from sources.inputs import check_tokenizer

OPTIMIZER = "optimizer.safetensors"  # of a step that can be resumed; its metadata name the data set
SIZES = ("num_layers", "num_heads", "d_model", "d_ff")  # of a preset; settings may change them
OF_BIRTH = {"model", "seed", "embedding_seed", "init", *SIZES}  # settings that --init-from takes the place of
# Settings that may change when a run goes on. A new max_iters also changes the learning rate's schedule.
MAY_CHANGE = {"device", "log_every", "eval_every", "eval_sequences", "track_sinks", "save_every", "compile"}
MAY_CHANGE |= {"resume", "out", "max_iters", "micro_batch_size", "peak_tflops"}


class Run:
    """A run folder; only the first process writes into it, and a step is there whole or not at all."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.settings_file = self.folder / "settings.json"
        self.log = self.folder / "metrics.jsonl"
        self.kept_back = []  # lines of the log that could not be written yet
        self.told = set()

    def step_folder(self, step):
        return self.folder / f"step_{step:07}"

    def has_steps(self):
        return any(self.folder.glob("step_*"))

    def settings(self, kind):
        """The settings that the run began with, to go on with it; None if there are none."""
        if not self.settings_file.exists():
            return None
        values = read_json(self.settings_file)
        values = {name: value for name, value in values.items() if value is not None}  # null: the default
        begun = from_values(kind, values, self.settings_file)
        return replace(begun, resume=True, out=str(self.folder))

    @contextlib.contextmanager
    def lock(self):
        """A context in which no other process trains in the folder; what killed ones left is removed."""
        if rank() > 0:
            yield
            return
        try:
            file = (self.folder / ".lock").open("w")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{self.folder} is locked, does a process train in it? {error}") from None
        with file:
            for left in self.folder.glob(".*.tmp"):
                remove(left)
            yield

    def rows(self, settings, step, tokens):
        """The log up to the row of a step; for a new run, a row that says what made it."""
        if self.has_steps():
            return [row for row in read_rows(self.log) if row["step"] <= step] or [{"step": step}]
        birth = {"step": step, "commit": commit(), "dtype": settings.dtype, "hub": HUB_COMMITS}
        birth |= {"threads": torch.get_num_threads(), "processes": runtime.world_size()}
        return [birth | {"data": tokens.meta.fingerprint}]

    def write_settings(self, settings, rows) -> None:
        """Write the settings and the log; remove what a killed process had no time to remove."""
        if rank() == 0:
            self.prune(settings.keep)
            write_log(self.log, rows)
            with atomic_file(self.settings_file) as temporary:
                temporary.write_text(json.dumps(asdict(settings), indent=1) + "\n")

    def append(self, row) -> None:
        """Append a row to the log. A full disk does not end a run: the next save decides."""
        if rank() == 0:
            self.kept_back.append(json.dumps(row) + "\n")
            try:
                with atomic_append(self.log) as file:
                    file.write("".join(self.kept_back))
                self.kept_back.clear()
            except OSError as error:
                self.tell_once(f"{self.log} cannot be written now, training goes on: {error}")

    def tell_once(self, text) -> None:
        """Say that something that is not needed to go on could not be done."""
        if text not in self.told:
            self.told.add(text)
            say(text)

    def save(self, step, model, optimizers, tokens, keep) -> None:
        """Write a step's checkpoint; of earlier ones, remove those that `keep` does not keep."""
        if rank() > 0:
            return
        with atomic_folder(self.step_folder(step)) as new:
            saving.write(new, model, tokens.tokenizer)
            state, groups = {}, []  # no state before the first step, nor of a frozen or unused parameter
            for number, optimizer in enumerate(optimizers):
                for name, parameter in model.named_parameters():
                    for key, value in optimizer.state.get(parameter, {}).items():
                        state[f"{number}/{name}.{key}"] = torch.as_tensor(value)
                numbers = []  # of groups, which some optimizers change
                for group in optimizer.param_groups:
                    numbers.append(
                        {key: value for key, value in group.items() if type(value) in (int, float)}
                    )
                groups.append(numbers)
            facts = {"data": tokens.meta.fingerprint, "groups": groups}
            save_file(state, new / OPTIMIZER, {"facts": json.dumps(facts)})  # of several the order is random
        self.prune(keep)

    def best(self):
        """The row with the lowest held-out loss, of as many windows as the newest; {} if there is none."""
        rows = [row for row in read_rows(self.log) if "val_loss" in row]
        rows = [row for row in rows if row.get("val_windows") == rows[-1].get("val_windows")]
        return min(rows, key=lambda row: row["val_loss"], default={})

    def prune(self, keep) -> None:
        """Of checkpoints before the newest two, keep the weights or nothing."""
        best = self.best().get("step")
        for folder in checkpoint.steps(self.folder)[:-2]:
            step = int(folder.name.removeprefix("step_"))
            is_power = step & (step - 1) == 0  # of two, or 0
            if keep == "optimizers":
                continue
            if keep == "all" or step == 0 or (keep == "powers" and (is_power or step == best)):
                remove(folder / OPTIMIZER)
            else:
                remove(folder)

    def draw_loss(self) -> None:
        """Draw loss.png from the log."""
        points = []
        for row in read_rows(self.log) if rank() == 0 else ():
            for key, split in (("val_loss", "held out"), ("loss", "training")):
                if key in row:
                    points.append({"step": row["step"], "split": split, "loss": row[key]})
        if points:
            options = {"x": "step", "y": "loss", "series": "split", "style": ".-"}
            path = self.folder / "loss.png"
            try:
                curves(points, path, "Does the loss fall?", ylabel="nats/token", **options)
            except (OSError, UserError) as error:
                self.tell_once(f"{path} cannot be drawn now, training goes on: {error}")


def load_step(folder, tokens):
    """The model of a step's folder, and the step; UserError if it cannot be gone on with on these data."""
    path = folder / OPTIMIZER
    if not path.exists():
        raise UserError(f"{path} is missing: a run with --keep optimizers has it at all its steps")
    check_regular(path)
    with as_user_error(path), safe_open(path, "pt") as moments:
        facts = json.loads((moments.metadata() or {}).get("facts", "{}"))
        if facts.get("data") != tokens.meta.fingerprint:
            raise UserError(f"{tokens.folder} is not the data set that {folder.parent} was started with")
    return checkpoint.load(folder), int(folder.name.removeprefix("step_"))


def restore(optimizers, model, folder) -> None:
    """Load a step's state of a model's parameters into fresh optimizers, each its own."""
    path = folder / OPTIMIZER
    parameters = dict(model.named_parameters())
    with as_user_error(path), safe_open(path, "pt") as state:
        for key in state.keys():
            number, _, name = key.partition("/")
            name, _, part = name.rpartition(".")
            value = state.get_tensor(key).to(parameters[name].device, copy=True)
            optimizers[int(number)].state[parameters[name]][part] = value
        groups = json.loads(state.metadata()["facts"])["groups"]
    for optimizer, numbers in zip(optimizers, groups):
        for group, values in zip(optimizer.param_groups, numbers):
            group.update(values)


def check_agreement(facts) -> None:
    """UserError unless all ranks have the same `facts`, a dictionary."""
    first, *others = runtime.gathered(facts)
    for number, theirs in enumerate(others, start=1):
        for name in first:
            if theirs[name] != first[name]:
                differ = f"rank 0 has {name} {first[name]}, rank {number} {theirs[name]}"
                raise UserError(f"{differ}: give all machines the same code, data, settings and run folder")


@contextlib.contextmanager
def listening_for_signals():
    """A context whose list collects SIGTERM, SIGINT and SIGUSR1, which then do not end the process."""
    received = []
    is_main = threading.current_thread() is threading.main_thread()  # no other thread may listen
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) if is_main else ()
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def start_settings(settings, defaults):
    """The settings of a new run; UserError for settings that contradict --resume or --init-from.

    `defaults` are a config file's settings, which --init-from may contradict.
    """
    if settings.resume and not changed(settings, type(settings)()) - MAY_CHANGE:
        raise UserError(f"no run in {settings.out} to resume: check --out, or start one without --resume")
    if settings.init_from:
        for name in sorted(changed(settings, defaults) & OF_BIRTH):
            raise UserError(f"{flag(name)}: {settings.init_from} sets it; leave one out")
        if defaults.model != type(settings)().model:
            say(f"the config file's model {defaults.model} is ignored: --init-from {settings.init_from}")
    if settings.warmup_iters is None:
        settings = replace(settings, warmup_iters=min(100, settings.max_iters // 6))
    return settings


def resume_settings(settings, run: Run):
    """The settings that a run goes on with; UserError, naming it, for one that may not change."""
    begun = run.settings(type(settings))
    if begun is None:
        raise UserError(f"{run.folder} holds a run without its settings.json: change --out")
    for name in ("warmup_iters", "dtype"):  # None: what the run settled on
        if getattr(settings, name) is None:
            settings = replace(settings, **{name: getattr(begun, name)})
    for name in sorted(changed(settings, begun) - MAY_CHANGE):
        was = f"{flag(name)} {getattr(begun, name)}"
        raise UserError(f"{run.folder} holds a run, started with {was}: go on with that, or change --out")
    return settings


def changed(settings, others):
    """The names of the settings that differ from others."""
    return {name for name, value in asdict(settings).items() if value != getattr(others, name)}


def flag(name):
    """A setting as the command line spells it."""
    return "--" + name.replace("_", "-")


def new_config(settings):
    """The ModelConfig that a new run begins with; UserError for settings that do not fit."""
    wishes = {"attn_calibration": settings.attn_calibration, "explicit_sink": settings.explicit_sink}
    wishes = {name: wish for name, wish in wishes.items() if wish}  # else it is the preset's own
    if settings.init_from:
        config = checkpoint.find_model(settings.init_from).transformer_config
        for name, wish in wishes.items():
            if wish != getattr(config, name):
                raise UserError(f"{flag(name)} {wish}: {settings.init_from} has {getattr(config, name)}")
    else:
        sizes = {name: getattr(settings, name) for name in SIZES if getattr(settings, name) is not None}
        if "num_heads" in sizes:
            sizes |= {"num_kv_heads": None, "head_dim": None}  # these follow from the number of heads
        try:
            config = replace(PRESETS[settings.model], **sizes, **wishes)
        except ValueError as error:
            raise UserError(f"inconsistent sizes: {error}") from None
    checkpoint.check_lengths((settings.sequence_length,), config.context_length)
    return config


def new_model(settings, config, tokens):
    """The float32 model that a new run begins with; UserError if it does not fit the data."""
    if settings.init_from:
        spec = checkpoint.find_model(settings.init_from)
        check_tokenizer(spec, tokens)
        model = spec.transformer()
    else:
        config = replace(config, vocab_size=tokens.vocab_size)
        model = newborn(config, settings.seed, settings.embedding_seed, settings.init)
    if tokens.vocab_size > model.config.vocab_size:
        sizes = f"{tokens.vocab_size} tokens, the model {model.config.vocab_size}"
        raise UserError(f"{tokens.folder} has {sizes}: use another --tokenizer")
    return model


@contextlib.contextmanager
def atomic_append(path):
    """A file to append to, which is as it was if that fails."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a") as file:
            yield file
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise


def read_rows(path):
    """Yield the rows of a log, except a half-written last one; none if the file is missing."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def write_log(path, rows) -> None:
    """Write a file of JSON rows, one a line."""
    with atomic_file(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
