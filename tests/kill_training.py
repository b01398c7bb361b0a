"""Is a run that was killed at any moment, or met a full disk, and resumed, the run that was not?

    python tests/kill_training.py            # SIGKILL at each of some 200 moments, of one process and of two
    python tests/kill_training.py 5          # at five of them, evenly spread
    python tests/kill_training.py full 20    # files may not grow beyond 20 random sizes

A moment is one at which the (first) process opens, renames or removes a file of its run: Python announces
each (PEP 578), and the process kills itself there. So no clock decides what is tested. After the first kill
the run is resumed and killed again, then resumed to its end. All that its files hold must come out the same,
to the last bit, but for the speeds in metrics.jsonl; and no other file may be left.
"""

import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


import torch
import torch._dynamo  # which an optimizer imports: once here, not in every process

import train
from lib import checkpoint, data, runtime
from lib.settings import UserError

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
SPEEDS = ("tokens_per_second", "mfu")
FULL = 28  # the exit status of a process that met a full disk
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


def train_until(settings: train.Settings, moment: int, counter, size: int, ranks: tuple) -> None:
    """Train, counting moments in the shared `counter`, and die at the one that is given; 0: never.

    Files may have `size` bytes; `ranks` are this process's number, how many there are, and where they meet.
    """
    run = os.path.abspath(settings.out)
    rank, world_size, port = ranks

    def announced(event: str, arguments: tuple) -> None:
        if rank == 0 and event in EVENTS and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            if not os.path.isabs(path) or path.startswith(run):  # shutil.rmtree names files within a folder
                counter.value += 1
                if counter.value == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    if world_size > 1:  # as torchrun has it
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}
    settings = replace(settings, resume=Path(run, "settings.json").exists())
    runtime.matmul_peak = lambda device, dtype: 1e11  # only MFU needs it, and it takes a second
    sys.stdout = open(os.devnull, "w")
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    sys.addaudithook(announced)
    try:
        train.train(settings)
    except UserError as error:
        os._exit(FULL if "cannot write" in str(error) else 1)
    os._exit(0)


def attempt(settings: train.Settings, world_size=1, moment=0, size=resource.RLIM_INFINITY) -> tuple[int, int]:
    """Train in processes of their own: the first one's exit status, and how many moments it saw."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    counter = processes.Value("i", 0)
    ranks = []
    for rank in range(world_size):
        arguments = (settings, moment, counter, size, (rank, world_size, port))
        ranks.append(processes.Process(target=train_until, args=arguments))
        ranks[-1].start()
    ranks[0].join()
    for process in ranks[1:]:
        if ranks[0].exitcode:
            process.kill()
        process.join()
    return ranks[0].exitcode, counter.value


def contents(run: Path) -> dict[str, str | bytes]:
    """Every file of a run folder by name, and what it holds that two equal runs have in common."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = json.dumps([{k: v for k, v in row.items() if k not in SPEEDS} for row in rows])
        elif path.is_file():
            found[name] = path.read_bytes().replace(str(run).encode(), b"RUN")
            found[name] = found[name].replace(b'"resume": true', b'"resume": false')
    return found


def differences(run: Path, expected: dict) -> str:
    """The files in which a finished run differs from the one that was not disturbed; "" if in none."""
    found = contents(run)
    return ", ".join(sorted(name for name in expected | found if expected.get(name) != found.get(name)))


def kill_at_moments(folder: Path, tokens: Path, world_size: int, count: int | None) -> None:
    """Kill a run at every moment, or at `count` of them, then at another one; resume it to its end."""
    folder /= str(world_size)
    _, total = attempt(small_run(tokens, folder / "whole"), world_size)
    expected = contents(folder / "whole")
    count = count or total
    for i in range(count):
        moment = 1 + i * (total - 1) // max(1, count - 1)
        settings = small_run(tokens, folder / f"killed_at_{moment}")
        statuses = [attempt(settings, world_size, death)[0] for death in (moment, 1 + moment % 40, 0)]
        wrong = differences(Path(settings.out), expected)
        kills = statuses.count(-signal.SIGKILL)
        if kills == 0 or statuses[2] or not set(statuses) <= {0, -signal.SIGKILL}:
            wrong += f" statuses {statuses}"
        report(f"{world_size} processes, moment {moment} of {total}: {kills} kills", wrong)


def fill_the_disk(folder: Path, tokens: Path, count: int) -> None:
    """Let files grow to `count` random sizes only: the message says so, and the run can be resumed."""
    attempt(small_run(tokens, folder / "whole"))
    expected = contents(folder / "whole")
    draw = random.Random(0)
    for number in range(count):
        size = round(10 ** draw.uniform(2, 6.8))
        settings = small_run(tokens, folder / f"full_{number}")
        status, _ = attempt(settings, size=size)
        for step in checkpoint.steps(settings.out):
            checkpoint.parse_spec(str(step)).open()
        attempt(settings)
        wrong = differences(Path(settings.out), expected)
        if status not in (0, FULL):
            wrong += f" status {status}"
        report(f"{size} bytes: {'the disk is full' if status else 'room enough'}", wrong)


def report(text: str, wrong: str) -> None:
    """Say how a run came out; exit status 1 if it is another one."""
    print(f"{text}, {f'DIFFERENT {wrong}' if wrong else 'same bits'}", flush=True)
    if wrong:
        sys.exit(1)


def main() -> None:
    """Disturb runs as the words ask; exit status 1 if any comes out different."""
    words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        tokens = prepare(folder)
        if words[:1] == ["full"]:
            fill_the_disk(folder, tokens, int(words[1]))
        else:
            for world_size in (1, 2):
                kill_at_moments(folder, tokens, world_size, int(words[0]) if words else None)


if __name__ == "__main__":
    main()
