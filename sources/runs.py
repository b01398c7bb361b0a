"""A run folder: what it holds, and how it stays whole."""

import contextlib
import fcntl
import json
import mmap
import os
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lib import runtime
from lib.figures import curves
from lib.files import atomic_file, atomic_folder, check_regular, read_json, remove, remove_leftovers, sha256
from lib.results import HUB_COMMITS, commit
from lib.settings import UserError, from_values, is_first_process, say
from sources import checkpoint

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, and their suffixes in a file
STEP_FILES = ("config.json", "model.safetensors", "optimizer.safetensors")  # that --resume reads
LARGEST_LOG = 2**31  # bytes: ten million steps
DRAWN = 2000  # points of a curve; a longer log is thinned


@dataclass(frozen=True)
class State:
    """The contents of a step's state.json."""

    step: int
    data: str  # fingerprint of the data set
    sha256: dict[str, str]  # of the step's other files


class Run:
    """A run folder; only the first process writes into it, and a step is there whole or not at all."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.settings_file = self.folder / "settings.json"
        self.log = self.folder / "metrics.jsonl"

    def step_folder(self, step):
        return self.folder / f"step_{step:07}"

    def has_begun(self):
        return any(self.folder.glob("step_*"))

    def settings(self, asked, given, may_change=()):
        """The settings the run started with, plus those of `asked` that are given and may change."""
        begun = from_values(type(asked), read_json(self.settings_file), self.settings_file)
        changes = {"resume": True, "out": asked.out}
        for name in given:
            value = getattr(asked, name)
            if name in may_change:
                changes[name] = value
            elif value != getattr(begun, name):
                was = f"--{name.replace('_', '-')} {getattr(begun, name)}"
                raise UserError(f"{self.folder} was started with {was}: resume with the same")
        return replace(begun, **changes)

    def lock(self):
        """Lock the folder until the returned file is closed, and remove what killed processes left.

        The file names the holder. UserError if another process group holds it.
        """
        path = self.folder / ".lock"
        lock = path.open("a+")
        if is_first_process():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                remedy = f"stop it, or choose another --out (the lock is {path})"
                raise UserError(f"{path.read_text()} trains in {self.folder}: {remedy}") from None
            except OSError as error:
                raise UserError(f"cannot lock {path}: {error}: choose an --out elsewhere") from None
            lock.truncate(0)
            print(f"process {os.getpid()} of {os.uname().nodename}", end="", file=lock, flush=True)
            remove_leftovers(self.folder)
        return lock

    def newest(self):
        """The model and State of the newest whole step; UserError if all are damaged."""
        for folder in checkpoint.steps(self.folder)[::-1]:
            try:
                state = from_values(State, read_json(folder / "state.json"), folder / "state.json")
                sums = {name: sha256(folder / name) for name in STEP_FILES}
                if folder != self.step_folder(state.step) or not sums.items() <= state.sha256.items():
                    raise UserError("its files do not match state.json")
                return checkpoint.load(folder), state
            except UserError as error:
                say(f"skipping {folder}: {error}")
        raise UserError(f"no checkpoint in {self.folder} can be resumed")

    def restore(self, optimizer, model, step) -> None:
        """Load a step's moments of a model's parameters into a fresh AdamW."""
        if step > 0:
            with safe_open(self.step_folder(step) / "optimizer.safetensors", "pt") as moments:
                for name, parameter in model.named_parameters():
                    values = {"step": torch.tensor(float(step), device=parameter.device)}
                    for moment in MOMENTS:
                        values[moment] = moments.get_tensor(f"{name}.{moment}").to(parameter, copy=True)
                    optimizer.state[parameter] = values

    def begin(self, settings, step, tokens) -> None:
        """Bring the folder to its state after a step: cut later rows, prune steps that a kill left."""
        if not is_first_process():
            return
        with atomic_file(self.settings_file) as temporary:
            temporary.write_text(json.dumps(asdict(settings), indent=1) + "\n")
        if step == 0:
            birth = {"step": 0, "commit": commit(), "dtype": settings.dtype, "hub": HUB_COMMITS}
            birth |= {"threads": torch.get_num_threads(), "processes": runtime.world_size()}
            birth["data"] = tokens.meta.fingerprint
            write_log(self.log, [birth])
        else:
            self.cut(step)
        self.prune(settings.keep, step)

    def cut(self, step) -> None:
        """Cut the log after the row of a step, before its evaluation, which is repeated."""
        if self.log.exists():
            with self.opened_log() as log:
                place = log.rfind(b'{"step": %d, "loss"' % step)
                end = log.rfind(b"\n") if place < 0 else log.find(b"\n", place)
            os.truncate(self.log, end + 1)

    @contextlib.contextmanager
    def opened_log(self):
        """A context with the bytes of the log, memory-mapped."""
        check_regular(self.log, LARGEST_LOG)
        with self.log.open("rb") as file:
            yield mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.log.stat().st_size else b""

    def append(self, row) -> None:
        """Append a row to the log; UserError if it cannot be written."""
        if is_first_process():
            try:
                with self.log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                raise UserError(f"cannot write {self.log}: {error}") from None

    def save(self, step, model, optimizer, tokens, keep) -> None:
        """Write a step's checkpoint, and remove those that `keep` does not keep."""
        if not is_first_process():
            return
        with atomic_folder(self.step_folder(step)) as new:
            checkpoint.write(new, model, tokens.tokenizer)
            moments = {}  # none before the first step
            for name, parameter in model.named_parameters():
                for moment in MOMENTS if step > 0 else ():
                    moments[f"{name}.{moment}"] = optimizer.state[parameter][moment]
            save_file(moments, new / "optimizer.safetensors")
            sums = {file.name: sha256(file) for file in sorted(new.iterdir())}
            state = State(step, tokens.meta.fingerprint, sums)
            (new / "state.json").write_text(json.dumps(asdict(state)) + "\n")
        self.prune(keep, step)

    def prune(self, keep, newest) -> None:
        """Up to the newest step, remove those not kept, and all optimizers but the last two."""
        known = [folder for folder in checkpoint.steps(self.folder) if folder <= self.step_folder(newest)]
        for folder in known[:-2]:
            step = int(folder.name.removeprefix("step_"))
            if keep == "all" or step == 0 or (keep == "powers" and is_power_of_two(step)):
                (folder / "state.json").unlink(missing_ok=True)
                (folder / "optimizer.safetensors").unlink(missing_ok=True)
            else:
                remove(folder)

    def diverged(self, step, what):
        """The UserError for a loss that is not finite; renames the step's checkpoint if there is one."""
        bad = self.step_folder(step)
        if bad.exists() and is_first_process():
            aside = self.folder / f"diverged_{step:07}"
            remove(aside)  # of an earlier attempt
            bad.rename(aside)
        good = [folder for folder in checkpoint.steps(self.folder) if folder < bad]
        hint = "start from other weights"
        if good:
            hint = f"try --init-from {shlex.quote(str(good[-1]))} --out ANOTHER and a lower --learning-rate"
        return UserError(f"step {step}: {what}; {hint}")

    def draw_loss(self) -> None:
        """Draw loss.png from the log."""
        if not is_first_process():
            return
        points = []
        for key, split in (("val_loss", "held out"), ("loss", "training")):
            for row in parsed(self.lines_with(b'"%s"' % key.encode())):
                points.append({"step": row["step"], "split": split, "loss": row[key]})
        options = {"x": "step", "y": "loss", "series": "split", "style": ".-", "ylabel": "loss, nats/token"}
        if points:
            curves(points, self.folder / "loss.png", "Does the loss fall?", **options)

    def lines_with(self, key):
        """The lines of the log with a key; of a long log about DRAWN of them, evenly spread."""
        lines = []
        with self.opened_log() as log:
            place, last = log.find(key), log.rfind(key)
            while place >= 0:
                lines.append(log[log.rfind(b"\n", 0, place) + 1 : log.find(b"\n", place)])
                after = log.find(key, place + max(1, len(log) // DRAWN))
                place = last if after < 0 and place < last else after
        return lines


def is_power_of_two(step):
    """Whether a step is 0, 1, 2, 4, 8, ..."""
    return step & (step - 1) == 0


def parsed(lines):
    """Yield the JSON rows of lines, skipping half-written ones."""
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def read_rows(path):
    """Yield the rows of a log; none if the file is missing."""
    if path.exists():
        check_regular(path, LARGEST_LOG)
        with path.open(errors="replace") as lines:
            yield from parsed(lines)


def write_log(path, rows) -> None:
    """Write a file of JSON rows, one a line."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with atomic_file(path) as temporary:
        temporary.write_text(text)
