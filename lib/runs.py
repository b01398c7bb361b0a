"""What does a run folder hold, and how does it stay whole?

    runs/laptop/settings.json     what the run was told            metrics.jsonl   a line for each step
    runs/laptop/step_0000100/     a checkpoint (lib/checkpoint.py)  loss.png        both losses by step

A run is one process group's alone. What a killed process left there is skipped, or made again.
"""

import contextlib
import json
import os
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import filelock

from lib import checkpoint, runtime
from lib.figures import curves
from lib.files import atomic_file, check_regular, read_json
from lib.settings import LARGEST_NUMBER, UserError, from_values

LARGEST_LOG = 2**27  # bytes of metrics.jsonl: half a million steps


def stored_settings(run, settings_class):
    """The settings that a run was begun with; UserError if there is no run."""
    path = Path(run, "settings.json")
    if not checkpoint.steps(run) and not os.path.exists(path):
        raise UserError(f"no run in {run} to resume: check --out, or begin one without --resume")
    return from_values(settings_class, read_json(path), path)


def check_settings(settings, may_change) -> None:
    """UserError for a folder that holds another run: one whose settings differ in what may not change."""
    run = Path(settings.out)
    if os.path.exists(run / "config.json"):
        raise UserError(f"{run} is a checkpoint: choose another --out for the run")
    if not checkpoint.steps(run):
        return
    if not settings.resume:
        raise UserError(f"{run} holds a run: go on with --resume, or choose another --out")
    for name, value in asdict(stored_settings(run, type(settings))).items():
        if name not in may_change and value != getattr(settings, name):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{run} was begun with {flag} {value}: resume with the same")


@contextlib.contextmanager
def sole_owner(folder):
    """Hold a run folder for this process group alone; UserError if another one holds it."""
    path = folder / ".lock"
    if path.is_symlink():
        raise UserError(f"{path} is no lock of ours: remove it")
    lock = filelock.FileLock(path, blocking=False)
    try:
        if runtime.rank() == 0:
            lock.acquire()
    except filelock.Timeout:
        raise UserError(f"another process trains in {folder}: stop it, or choose another --out") from None
    except (OSError, NotImplementedError):
        pass  # a file system without locks
    try:
        yield
    finally:
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
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            if type(row["step"]) is int:
                yield row


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
        hint = f"--init-from {shlex.quote(str(good[-1]))} --out ANOTHER and a lower --learning-rate"
    return UserError(f"step {step}: {what}; try {hint}")


def lines_to_open(folder):
    """Python that opens a checkpoint: in `transformers` where that knows its kind, and its tokenizer."""
    folder = folder.resolve()
    text = f"""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained({str(folder)!r})"""
    if read_json(folder / "config.json")["model_type"] == "bornbiased":
        text = f"""
    from lib.checkpoint import load  # in this repository
    model = load({str(folder)!r})"""
    if (folder / "tokenizer.model").exists():
        text += f"""
    from sentencepiece import SentencePieceProcessor
    tokenizer = SentencePieceProcessor(model_file={str(folder / "tokenizer.model")!r})"""
    return text


def draw_loss(run) -> None:
    """loss.png from metrics.jsonl."""
    points = []
    for row in read_log(run):
        for key, split in (("loss", "training"), ("val_loss", "held out")):
            if isinstance(row.get(key), float) and abs(row[key]) < LARGEST_NUMBER:
                points.append({"step": row["step"], "split": split, "loss": row[key]})
    options = {"x": "step", "y": "loss", "series": "split", "style": ".-", "ylabel": "loss, nats a token"}
    if points:
        curves(points, run / "loss.png", "Does the loss fall?", **options)
