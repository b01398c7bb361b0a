"""What does a run folder hold, and how does it stay whole?

    runs/laptop/settings.json     what the run was told            metrics.jsonl   a line for each step
    runs/laptop/step_0000100/     a checkpoint (lib/checkpoint.py)  loss.png        both losses by step

A run is one process group's alone. What a killed process left there is skipped, or made again.
"""

import contextlib
import functools
import json
import os
import shutil
import socket
from dataclasses import asdict
from pathlib import Path

import filelock

from lib import checkpoint, runtime
from lib.figures import curves
from lib.files import atomic_file, check_regular, read_bytes, read_json
from lib.settings import LARGEST_NUMBER, UserError, from_values

LARGEST_LOG = 2**27  # bytes of metrics.jsonl: half a million steps
LONGEST_LINE = 2**16  # characters of one of its lines


def stored_settings(run, settings_class):
    """The settings that a run was begun with, None if there is no run; UserError if they cannot be read."""
    path = run / "settings.json"
    if not os.path.isdir(run) or not (path.exists() or checkpoint.steps(run)):
        return None
    return from_values(settings_class, read_json(path), path)


def trained_length(folder):
    """Tokens in a sequence of the run that a checkpoint is of; None where that is not known."""
    try:
        length = read_json(folder.parent / "settings.json").get("sequence_length")
    except UserError:
        return None
    return length if isinstance(length, int) else None  # the file may be a stranger's


def check_settings(settings, may_change) -> None:
    """UserError for a folder that holds another run: one whose settings differ in what may not change."""
    run = Path(settings.out)
    if os.path.exists(run / "config.json"):
        raise UserError(f"{run} is a checkpoint: choose another --out for the run")
    if settings.global_batch_size < runtime.world_size():
        raise UserError(f"--global-batch-size {settings.global_batch_size}: less than one for each process")
    if checkpoint.steps(run) and not settings.resume:
        raise UserError(f"{run} holds a run: go on with --resume, or choose another --out")
    stored = stored_settings(run, type(settings)) if settings.resume else None
    for name, value in asdict(stored or settings).items():
        if name not in may_change and value != getattr(settings, name):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{run} was begun with {flag} {value}: resume with the same")


@contextlib.contextmanager
def sole_owner(folder):
    """Hold a run folder for this process group alone; UserError, which names its holder, if it is held."""
    path = folder / ".lock"
    if path.is_symlink() or path.is_dir():
        raise UserError(f"{path} is no lock of ours: remove it")
    if path.exists():
        check_regular(path)
    lock = filelock.FileLock(path, blocking=False)
    try:
        if runtime.rank() == 0:
            lock.acquire()
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except filelock.Timeout:
        holder = read_bytes(path).decode(errors="replace") or "another process"
        raise UserError(f"{holder} trains in {folder}: stop it, or choose another --out") from None
    except (OSError, NotImplementedError):
        pass  # a file system without locks
    try:
        yield
    finally:
        if lock.is_locked:
            path.write_text("")
            lock.release()


def load_newest(run):
    """Model, state and optimizer's tensors of the newest whole checkpoint; UserError if all are damaged."""
    reasons = []
    for folder in checkpoint.steps(run)[::-1]:
        try:
            state, tensors = checkpoint.read_state(folder)
            return checkpoint.load(folder), state, tensors
        except UserError as error:
            reasons.append(str(error))
            if runtime.rank() == 0:
                print(f"skipping {folder}: {error}")
    raise UserError(f"no checkpoint in {run} can be resumed: {reasons[0]}")


def begin_logs(settings, run, step) -> None:
    """Write settings.json, and keep the log's rows up to a step, None at birth: later ones come again."""
    with atomic_file(run / "settings.json") as temporary:
        temporary.write_text(json.dumps(asdict(settings), indent=1) + "\n")
    with atomic_file(run / "metrics.jsonl") as temporary, temporary.open("w") as file:
        for row in read_log(run):
            if step is not None and row["step"] <= step:
                file.write(json.dumps(row) + "\n")


def read_log(run):
    """The rows of metrics.jsonl, one a step; lines that are no row, as of a full disk, are left out."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return
    check_regular(path, LARGEST_LOG)
    with path.open(errors="replace") as lines:
        for line in iter(functools.partial(lines.readline, LONGEST_LINE), ""):
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                row = json.loads(line)
                if is_step(row["step"]):
                    yield row


def is_step(value):
    """Is what a log says a step's number?"""
    return type(value) is int and 0 <= value < LARGEST_NUMBER


def is_power_of_two(number):
    """Is a whole number 1, 2, 4, 8, ...?"""
    return number > 0 and number & (number - 1) == 0


def append_row(run, row) -> None:
    """Add a row to metrics.jsonl."""
    path = run / "metrics.jsonl"
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from None


def prune(run, keep, newest) -> None:
    """Of the steps up to the newest, remove those not to be kept, and all optimizers but the last two's."""
    known = [folder for folder in checkpoint.steps(run) if folder.name <= f"step_{newest:07}"]
    for folder in known[:-2]:
        step = int(folder.name.removeprefix("step_"))
        try:
            if keep == "all" or step == 0 or (keep == "powers" and is_power_of_two(step)):
                (folder / "state.json").unlink(missing_ok=True)
                (folder / "optimizer.safetensors").unlink(missing_ok=True)
            else:
                doomed = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
                folder.rename(doomed)  # at once: no half of a checkpoint is ever seen
                shutil.rmtree(doomed)
        except OSError as error:
            raise UserError(f"cannot remove {folder}: {error.strerror}") from None


def diverged(run, step, what):
    """What to say of a loss that is no number; the step's own checkpoint, if saved, is renamed: it is bad."""
    bad = run / f"step_{step:07}"
    if bad.exists() and runtime.rank() == 0:
        aside = run / f"diverged_{step:07}"
        shutil.rmtree(aside, ignore_errors=True)  # of an earlier attempt
        try:
            os.replace(bad, aside)
        except OSError as error:
            raise UserError(f"cannot write {aside}: {error}") from None
    good = [folder for folder in checkpoint.steps(run) if folder.name < bad.name]
    hint = "other weights"
    if good:
        hint = f"--init-from {good[-1]} --out ANOTHER and a lower --learning-rate"
    return UserError(f"step {step}: {what}; try {hint}")


def lines_to_open(folder):
    """Python that opens a checkpoint: in `transformers` where that knows its kind, and its tokenizer."""
    folder = folder.resolve()
    text = f"""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("{folder}")"""
    if read_json(folder / "config.json")["model_type"] == "bornbiased":
        text = f"""
    from lib.checkpoint import load  # in this repository
    model = load("{folder}")"""
    if (folder / "tokenizer.model").exists():
        text += f"""
    from sentencepiece import SentencePieceProcessor
    tokenizer = SentencePieceProcessor(model_file="{folder}/tokenizer.model")"""
    return text


def draw_loss(run) -> None:
    """loss.png from metrics.jsonl."""
    points = []
    for key, split in (("loss", "training"), ("val_loss", "held out")):
        for row in read_log(run):
            if isinstance(row.get(key), float) and abs(row[key]) < LARGEST_NUMBER:
                points.append({"step": row["step"], "split": split, "nats": row[key]})
    if not points:
        return
    steps = max(point["step"] for point in points)
    last = {point["split"]: point["nats"] for point in points}
    texts = [f"{split} {nats:.2f}" for split, nats in last.items()]
    curves(
        points,
        run / "loss.png",
        x="step",
        y="nats",
        series="split",
        title=f"Loss after {steps:,} steps: {', '.join(texts)} nats a token",
        style=".-",
        ylabel="loss, nats a token",
    )
