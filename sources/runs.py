"""What does a run folder hold, and how does it stay whole?"""

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

MOMENTS = ("exp_avg", "exp_avg_sq")  # of a parameter's gradient, in AdamW and behind its name in a file
STEP_FILES = ("config.json", "model.safetensors", "optimizer.safetensors")  # that resuming reads
LARGEST_LOG = 2**31  # bytes: ten million steps
DRAWN = 2000  # points of a curve; a longer log is thinned


@dataclass(frozen=True)
class State:
    """What state.json says of a step."""

    step: int
    data: str  # fingerprint of the data set
    sha256: dict[str, str]  # of the step's other files


class Run:
    """A run folder. The first process alone writes into it; a step is there as a whole or not at all."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.settings_file = self.folder / "settings.json"
        self.log = self.folder / "metrics.jsonl"

    def steps(self):
        """The folders of its checkpoints, oldest first."""
        return checkpoint.steps(self.folder)

    def step_folder(self, step):
        return self.folder / f"step_{step:07}"

    def has_begun(self):
        return any(self.folder.glob("step_*"))

    def settings(self, asked, given, may_change=()):
        """The settings it was begun with, changed by those of `asked` that are given and may change."""
        begun = from_values(type(asked), read_json(self.settings_file), self.settings_file)
        changes = {"resume": True, "out": asked.out}
        for name in given:
            value = getattr(asked, name)
            if name in may_change:
                changes[name] = value
            elif value != getattr(begun, name):
                was = f"--{name.replace('_', '-')} {getattr(begun, name)}"
                raise UserError(f"{self.folder} was begun with {was}: resume with the same")
        return replace(begun, **changes)

    def lock(self):
        """Hold the folder, swept of what killed processes left, until the file that is returned is closed.

        It says who holds it. UserError if another process group does.
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
        """Model and State of the newest whole step; UserError if all are damaged."""
        for folder in self.steps()[::-1]:
            try:
                state = from_values(State, read_json(folder / "state.json"), folder / "state.json")
                sums = {name: sha256(folder / name) for name in STEP_FILES}
                if folder != self.step_folder(state.step) or not sums.items() <= state.sha256.items():
                    raise UserError("its files are not those that state.json was written for")
                return checkpoint.load(folder), state
            except UserError as error:
                say(f"skipping {folder}: {error}")
        raise UserError(f"no checkpoint in {self.folder} can be resumed")

    def restore(self, optimizer, model, step) -> None:
        """Give an AdamW, which has made no step, the moments that a step has of a model's parameters."""
        if step > 0:
            with safe_open(self.step_folder(step) / "optimizer.safetensors", "pt") as moments:
                for name, parameter in model.named_parameters():
                    values = {"step": torch.tensor(float(step), device=parameter.device)}
                    for moment in MOMENTS:
                        values[moment] = moments.get_tensor(f"{name}.{moment}").to(parameter, copy=True)
                    optimizer.state[parameter] = values

    def begin(self, settings, step, tokens) -> None:
        """Make the folder what it is after a step: a kill leaves later rows, and steps to prune."""
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
        """Cut the log off behind the row of a step, before that of its evaluation, which is made again."""
        if self.log.exists():
            with self.opened_log() as log:
                place = log.rfind(b'{"step": %d, "loss"' % step)
                end = log.rfind(b"\n") if place < 0 else log.find(b"\n", place)
            os.truncate(self.log, end + 1)

    @contextlib.contextmanager
    def opened_log(self):
        """The bytes of the log, which are not read before they are asked for."""
        check_regular(self.log, LARGEST_LOG)
        with self.log.open("rb") as file:
            yield mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.log.stat().st_size else b""

    def append(self, row) -> None:
        """Add a row to the log; UserError if it cannot be written."""
        if is_first_process():
            try:
                with self.log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                raise UserError(f"cannot write {self.log}: {error}") from None

    def save(self, step, model, optimizer, tokens, keep) -> None:
        """Write a step's checkpoint, and remove those that `keep` does not select."""
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
        """Of steps up to the newest, remove those not to be kept, and all optimizers but the last two's."""
        known = [folder for folder in self.steps() if folder <= self.step_folder(newest)]
        for folder in known[:-2]:
            step = int(folder.name.removeprefix("step_"))
            if keep == "all" or step == 0 or (keep == "powers" and is_power_of_two(step)):
                (folder / "state.json").unlink(missing_ok=True)
                (folder / "optimizer.safetensors").unlink(missing_ok=True)
            else:
                remove(folder)

    def diverged(self, step, what):
        """What to say of a loss that is no number; the bad checkpoint of its step, if saved, is put aside."""
        bad = self.step_folder(step)
        if bad.exists() and is_first_process():
            aside = self.folder / f"diverged_{step:07}"
            remove(aside)  # of an earlier attempt
            bad.rename(aside)
        good = [folder for folder in self.steps() if folder < bad]
        hint = "begin with other weights"
        if good:
            hint = f"try --init-from {shlex.quote(str(good[-1]))} --out ANOTHER and a lower --learning-rate"
        return UserError(f"step {step}: {what}; {hint}")

    def draw_loss(self) -> None:
        """loss.png from the log."""
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
        """The lines of the log that hold a key; of a long log as many as are drawn, evenly spread."""
        lines = []
        with self.opened_log() as log:
            place, last = log.find(key), log.rfind(key)
            while place >= 0:
                lines.append(log[log.rfind(b"\n", 0, place) + 1 : log.find(b"\n", place)])
                after = log.find(key, place + max(1, len(log) // DRAWN))
                place = last if after < 0 and place < last else after
        return lines


def is_power_of_two(step):
    """Is a step 1, 2, 4, 8, ..., or birth, 0?"""
    return step & (step - 1) == 0


def parsed(lines):
    """The JSON rows of some lines, without half ones, as after a full disk."""
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def read_rows(path):
    """The rows of a file that `write_log` wrote, or of a run's log; none if it is not there."""
    if path.exists():
        check_regular(path, LARGEST_LOG)
        with path.open(errors="replace") as lines:
            yield from parsed(lines)


def write_log(path, rows) -> None:
    """Write a file of JSON rows, a line each, anew."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with atomic_file(path) as temporary:
        temporary.write_text(text)
