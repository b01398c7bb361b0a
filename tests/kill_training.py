"""Is a run that was killed at any moment, and resumed, the run that was not?

    python tests/kill_training.py            # SIGKILL at each of some 170 moments: five minutes
    python tests/kill_training.py 5          # at five of them, evenly spread

A moment is one at which the process opens, renames or removes a file of its run: Python announces each (PEP
578), and the process kills itself there. So no clock decides what is tested. After the first kill the run is
resumed and killed again, then resumed to its end. All that its files hold must come out the same, to the last
bit, but for the speeds in metrics.jsonl.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


import train
from lib import data, speed

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
SPEEDS = ("tokens_per_second", "mfu")
# A process that was forked may compute only if its parent never did: the parent here only starts others.
processes = multiprocessing.get_context("fork")


def prepare(folder: Path) -> Path:
    """A small data set of Python text, as bytes."""
    text = folder / "text.txt"
    text.write_text(Path(random.__file__).read_text("utf-8") * 4)
    out = str(folder / "tokens")
    return data.prepare(data.Settings(source=(str(text),), tokenizer="bytes", held_out=0.2, out=out))


def small_run(tokens: Path, out: Path) -> train.Settings:
    """Seven steps of a small model, with a checkpoint that is removed again; taken up where it stands."""
    return train.Settings(
        model="backcopy",
        data=str(tokens),
        out=str(out),
        device="cpu",
        dtype="float32",
        resume=True,
        sequence_length=16,
        global_batch_size=4,
        micro_batch_size=2,
        max_iters=7,
        warmup_iters=2,
        log_every=3,
        eval_every=7,
        eval_sequences=4,
        save_every=3,
    )


def train_until(settings: train.Settings, moment: int, counter) -> None:
    """Train, counting moments in the shared `counter`, and die at the one that is given; 0: never."""
    run = os.path.abspath(settings.out)

    def announced(event: str, arguments: tuple) -> None:
        if event in EVENTS and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            if not os.path.isabs(path) or path.startswith(run):  # shutil.rmtree names files within a folder
                counter.value += 1
                if counter.value == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

    speed.matmul_peak = lambda device, dtype: 1e11  # only MFU needs it, and it takes a second
    sys.stdout = open(os.devnull, "w")
    sys.addaudithook(announced)
    train.train(settings)


def attempt(settings: train.Settings, moment: int = 0) -> tuple[bool, int]:
    """Train in a process of its own; was it killed, and how many moments did it see?"""
    counter = processes.Value("i", 0)
    process = processes.Process(target=train_until, args=(settings, moment, counter))
    process.start()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        sys.exit(f"training ended with status {process.exitcode}")
    return process.exitcode != 0, counter.value


def contents(run: Path) -> dict[str, str | bytes]:
    """Every file of a run folder by name, and what it holds that two equal runs have in common."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = json.dumps([{k: v for k, v in row.items() if k not in SPEEDS} for row in rows])
        elif path.is_file() and path.name != "checksums.json":
            found[name] = path.read_bytes().replace(str(run).encode(), b"RUN")
    return found


def main() -> None:
    """Kill a run at every moment, or at as many as asked; exit status 1 if any comes out different."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        tokens = prepare(folder)
        _, total = attempt(small_run(tokens, folder / "whole"))
        expected = contents(folder / "whole")
        count = int(sys.argv[1]) if len(sys.argv) > 1 else total
        for i in range(count):
            moment = 1 + i * (total - 1) // max(1, count - 1)
            settings = small_run(tokens, folder / f"killed_at_{moment}")
            kills = 0
            for death in (moment, 1 + moment % 40, 0):
                was_killed, _ = attempt(settings, death)
                kills += was_killed
            found = contents(Path(settings.out))
            differing = sorted(name for name in expected | found if expected.get(name) != found.get(name))
            verdict = f"DIFFERENT {differing}" if differing else "same bits"
            print(f"moment {moment} of {total}: {kills} kills, {verdict}", flush=True)
            if differing:
                sys.exit(1)


if __name__ == "__main__":
    main()
