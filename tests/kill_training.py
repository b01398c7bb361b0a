"""Is a run that was killed at any moment, or told to stop, and resumed the run that was not?

    python tests/kill_training.py            # SIGKILL at each of some 200 moments, of one process and of two
    python tests/kill_training.py 5          # at five of them, evenly spread, of two processes

The (first) process kills itself where it opens, renames or removes a file of its run, which Python announces
(PEP 578). The run is resumed and killed again, then resumed to its end: all that its files hold must come out
the same, to the last bit, but for PASSING in metrics.jsonl; and no other file may be left.

Then SIGTERM is sent at each of STAGES, twice and to the whole process group, as `timeout` does it. All must
end with status 0 before the last step; resumed, the run must come out the same.
"""

import itertools
import json
import os
import random
import signal
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import ranks
import torch
import torch._dynamo  # which an optimizer imports: once here, not in every process

import train
from lib import runtime
from sources import checkpoint, data
from sources.runs import Run

runtime.PATIENCE = timedelta(seconds=240)  # ranks that wait for one another in vain give up

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
PASSING = ("tokens_per_second", "commit")  # which two equal runs need not have in common
SMALL = {  # seven steps of a small model, with a checkpoint that is removed again
    "model": "backcopy",
    "d_model": 64,
    "d_ff": 96,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "sequence_length": 16,
    "global_batch_size": 4,
    "micro_batch_size": 3,
    "max_iters": 7,
    "warmup_iters": 2,
    "log_every": 3,
    "eval_every": 7,
    "eval_sequences": 4,
    "save_every": 3,
}
STAGES = [  # a run is told to stop when it calls this function for the second time
    (train, "learning_rate"),
    (train, "mean_loss"),
    (train, "sinks_by_length"),
    (train, "generate"),
    (Run, "save"),
]


def prepare(folder: Path) -> Path:
    """A small data set of bytes."""
    text = folder / "text.txt"
    text.write_text(Path(random.__file__).read_text("utf-8") * 4)
    out = str(folder / "tokens")
    return data.prepare(data.Settings(source=(str(text),), tokenizer="bytes", held_out=0.2, out=out))


def stop_at(stage) -> None:
    """Let the second call of a stage's function begin with two SIGTERM to all of the process group."""
    module, name = stage
    function = getattr(module, name)
    calls = itertools.count(1)

    def stopped(*words, **options):
        if next(calls) == 2:
            os.killpg(0, signal.SIGTERM)
            os.killpg(0, signal.SIGTERM)
        return function(*words, **options)

    setattr(module, name, stopped)


def train_until(moment, stage, counter, settings: train.Settings, rank, world_size, port) -> None:
    """Train, counting moments in the shared `counter`; die at the one that is given, or stop at a stage."""
    if stage and rank == 0:
        stop_at(stage)
    run = os.path.abspath(settings.out)

    def announced(event: str, arguments: tuple) -> None:
        if rank == 0 and event in EVENTS and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            if not os.path.isabs(path) or path.startswith(run):  # shutil.rmtree names files within a folder
                counter.value += 1
                if counter.value == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    if world_size > 1:  # as torchrun has it
        ranks.become(rank, world_size, port)
    settings = replace(settings, resume=Path(run, "settings.json").exists())
    sys.stdout = open(os.devnull, "w")
    sys.addaudithook(announced)
    train.train(settings)
    os._exit(0)


def attempt(settings: train.Settings, world_size: int, moment=0, stage=None) -> tuple[int, int]:
    """Train in processes of their own: the exit status of one that fails, and how many moments were seen."""
    port = ranks.free_port()
    counter = ranks.processes.Value("i", 0)
    group = []
    for rank in range(world_size):
        arguments = (moment, stage, counter, settings, rank, world_size, port)
        group.append(ranks.processes.Process(target=train_until, args=arguments))
        group[-1].start()
        os.setpgid(group[-1].pid, group[0].pid)  # a group of their own
    group[0].join()
    for process in group[1:]:
        if group[0].exitcode:
            process.kill()
        process.join()
    return group[0].exitcode or group[-1].exitcode, counter.value


def contents(run: Path) -> dict[str, str | bytes]:
    """Every file of a run folder by name, and what it holds that two equal runs have in common."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = json.dumps([{k: v for k, v in row.items() if k not in PASSING} for row in rows])
        elif path.is_file() and path.name != ".lock":  # which names a process
            found[name] = path.read_bytes().replace(str(run).encode(), b"RUN")
            found[name] = found[name].replace(b'"resume": true', b'"resume": false')
    return found


def report(text: str, is_fine: bool) -> None:
    print(text, "same bits" if is_fine else "DIFFERENT", flush=True)
    if not is_fine:
        sys.exit(1)


def kill_at_moments(folder: Path, tokens: Path, world_size: int, count: int | None) -> None:
    """Kill a run at every moment, or at `count` of them, then at another one; resume it to its end."""
    whole = train.Settings(**SMALL, data=str(tokens), out=str(folder / f"{world_size}_whole"))
    _, total = attempt(whole, world_size)
    expected = contents(Path(whole.out))
    count = count or total
    for i in range(count):
        moment = 1 + (2 * i + 1) * total // (2 * count)  # 1, 2, ..., total, if that many are wanted
        settings = replace(whole, out=str(folder / f"{world_size}_killed_at_{moment}"))
        statuses = [attempt(settings, world_size, death)[0] for death in (moment, 1 + moment % 40, 0)]
        is_killed = statuses[2] == 0 and {-signal.SIGKILL} <= set(statuses) <= {0, -signal.SIGKILL}
        is_fine = is_killed and contents(Path(settings.out)) == expected
        report(f"{world_size} processes, moment {moment} of {total}: ended with {statuses},", is_fine)


def stop_at_stages(folder: Path, tokens: Path, world_size: int, is_compiled: bool, stages) -> None:
    """Tell a run to stop at each of some stages, and resume it to its end."""
    kind = f"{world_size} processes, {'compiled' if is_compiled else 'eager'}"
    more = {"eval_every": 3, "track_sinks": True, "compile": is_compiled}  # step 5 is not saved for itself
    whole = train.Settings(**{**SMALL, **more, "data": str(tokens), "out": str(folder / kind)})
    attempt(whole, world_size)
    expected = contents(Path(whole.out))
    for stage in stages:
        settings = replace(whole, out=str(folder / f"{kind} {stage[1]}"))
        statuses = [attempt(settings, world_size, stage=stage)[0]]
        reached = int(checkpoint.steps(settings.out)[-1].name.removeprefix("step_"))
        statuses.append(attempt(settings, world_size)[0])
        is_fine = statuses == [0, 0] and reached < 7 and contents(Path(settings.out)) == expected
        report(f"{kind}: told in {stage[1]} to stop, at step {reached} ended with {statuses},", is_fine)


def main() -> None:
    """Kill and stop runs of one process and of two; exit status 1 if any comes out different."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what was forked cannot use a GPU that its parent has seen
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = prepare(folder)
        if len(sys.argv) > 1:
            kill_at_moments(folder, tokens, 2, int(sys.argv[1]))
            stop_at_stages(folder, tokens, 2, False, [(train, "mean_loss")])
            return
        for world_size in (1, 2):
            kill_at_moments(folder, tokens, world_size, None)
            for is_compiled in (False, True):
                stop_at_stages(folder, tokens, world_size, is_compiled, STAGES)


if __name__ == "__main__":
    main()
