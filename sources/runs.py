"""What does a run folder hold, and how does it stay whole?"""

import contextlib
import json
import os
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import filelock
import torch

from lib import runtime
from lib.figures import curves
from lib.files import atomic_file, check_regular, read_json, remove_leftovers
from lib.results import HUB_COMMITS, commit
from lib.settings import UserError, from_values, is_first_process
from sources import checkpoint, data


def begun_settings(settings, may_begin=False):
    """The settings that the run in `out` was begun with; of none UserError, or these if they `may_begin`."""
    path = Path(settings.out, "settings.json")
    if not path.exists() and not checkpoint.steps(settings.out):
        if not may_begin:
            raise UserError(f"no run in {settings.out} to resume: check --out, or begin one without --resume")
        if is_first_process():
            print(f"no run in {settings.out} to resume: it begins")
        return settings
    return from_values(type(settings), read_json(path), path)


def merged_settings(settings, begun, may_change, given):
    """The settings to resume a run with: as it was begun, save those that are `given` and may change."""
    changes = {"resume": True, "out": settings.out}
    for name in given:
        value = getattr(settings, name)
        if name in may_change:
            changes[name] = value
        elif value != getattr(begun, name) and (name, value) != ("dtype", "auto"):
            was = f"--{name.replace('_', '-')} {getattr(begun, name)}"
            raise UserError(f"{settings.out} was begun with {was}: resume with the same")
    return replace(begun, **changes)


def open_data(settings, device):
    """The data set to train on; the default one is prepared, by rank 0, where it is missing."""
    folder = Path(settings.data or data.default_folder(settings.source, settings.tokenizer))
    if settings.data is None and runtime.rank() == 0 and not folder.exists():
        print(f"preparing {folder}, once")
        data.prepare(data.Settings(source=settings.source, tokenizer=settings.tokenizer))
    runtime.wait_for_all(device)
    tokens = data.TokenData(folder, settings.bos_first)
    tokens.num_windows("train", settings.sequence_length)  # a UserError if there is none
    return tokens


@contextlib.contextmanager
def sole_owner(folder):
    """Hold a run folder for this process group alone, swept of what killed ones left; UserError if held."""
    lock = filelock.FileLock(folder / ".lock", blocking=False)
    try:
        if runtime.rank() == 0:
            lock.acquire()
            remove_leftovers(folder)
        yield
    except filelock.Timeout:
        raise UserError(f"another process trains in {folder}: stop it, or choose another --out") from None
    finally:
        lock.release()


def load_newest(run):
    """Model, state and optimizer's tensors of the newest whole checkpoint; UserError if all are damaged."""
    for folder in checkpoint.steps(run)[::-1]:
        try:
            state, tensors = checkpoint.read_state(folder)
            return checkpoint.load(folder), state, tensors
        except UserError as error:
            if runtime.rank() == 0:
                print(f"skipping {folder}: {error}")
    raise UserError(f"no checkpoint in {run} can be resumed")


def begin(run, settings, step, tokens) -> None:
    """Make a run whole, as it is after a step: a kill leaves later rows of the log, and folders to prune."""
    with atomic_file(run / "settings.json") as temporary:
        temporary.write_text(json.dumps(asdict(settings), indent=1) + "\n")
    birth = {"step": 0, "commit": commit(), "dtype": settings.dtype, "threads": torch.get_num_threads()}
    birth |= {"processes": runtime.world_size(), "data": tokens.meta.fingerprint}
    rows = [birth | {"hub": HUB_COMMITS}]
    if step > 0:
        rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] <= step]
    write_log(run / "metrics.jsonl", rows)
    prune(run, settings.keep, step)


def read_rows(path):
    """The rows of a file that `write_log` wrote, if it is there, without half ones, as after a full disk."""
    if not path.exists():
        return
    check_regular(path, 2**27)  # bytes: half a million steps
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def write_log(path, rows) -> None:
    """Write a file of JSON rows, a line each, anew."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with atomic_file(path) as temporary:
        temporary.write_text(text)


def append_row(run, row) -> None:
    """Add a step's row to metrics.jsonl; UserError if it cannot be written."""
    path = run / "metrics.jsonl"
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from None


def amend_row(run, step, values) -> None:
    """Add values to a step's row of metrics.jsonl."""
    path = run / "metrics.jsonl"
    write_log(path, [row | values if row["step"] == step else row for row in read_rows(path)])


def is_power_of_two(step):
    """Is a step 1, 2, 4, 8, ..., or birth, 0?"""
    return step & (step - 1) == 0


def prune(run, keep, newest) -> None:
    """Of the steps up to the newest, remove those not to be kept, and all optimizers but the last two's."""
    known = [folder for folder in checkpoint.steps(run) if folder.name <= f"step_{newest:07}"]
    for folder in known[:-2]:
        step = int(folder.name.removeprefix("step_"))
        if keep == "all" or step == 0 or (keep == "powers" and is_power_of_two(step)):
            (folder / "state.json").unlink(missing_ok=True)
            (folder / "optimizer.safetensors").unlink(missing_ok=True)
        else:
            doomed = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            folder.rename(doomed)  # at once: no half of a checkpoint is ever seen
            shutil.rmtree(doomed)


def diverged(run, step, what):
    """What to say of a loss that is no number; the bad checkpoint of its step, if saved, is put aside."""
    bad = run / f"step_{step:07}"
    if bad.exists() and runtime.rank() == 0:
        aside = run / f"diverged_{step:07}"
        shutil.rmtree(aside, ignore_errors=True)  # of an earlier attempt
        bad.rename(aside)
    good = [folder for folder in checkpoint.steps(run) if folder.name < bad.name]
    hint = "begin with other weights"
    if good:
        hint = f"try --init-from {shlex.quote(str(good[-1]))} --out ANOTHER and a lower --learning-rate"
    return UserError(f"step {step}: {what}; {hint}")


def draw_loss(run) -> None:
    """loss.png from metrics.jsonl."""
    points = []
    for row in read_rows(run / "metrics.jsonl"):
        for key, split in (("loss", "training"), ("val_loss", "held out")):
            if key in row:
                points.append({"step": row["step"], "split": split, "loss": row[key]})
    options = {"x": "step", "y": "loss", "series": "split", "style": ".-", "ylabel": "loss, nats/token"}
    if points:
        curves(points, run / "loss.png", "Does the loss fall?", **options)
