"""The trainings that results read: each a command of train.py, on one thread, resumed where it stopped.

python -m reproduce.runs runs/lineage            # who is related? twelve runs: three hours
python -m reproduce.runs runs/text               # calibrations, explicit sinks on text, 15 runs: five hours
python -m reproduce.runs runs/text/none-42       # one of these: a quarter of an hour
"""

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from lib.files import read_json
from lib.settings import Command, UserError, check_choice, run_script
from sources.data import default_folder

SEEDS = (42, 123, 1000, 2000)
BASE, OTHER = 1000, 123  # seeds that learn a second corpus; BASE is the base in the tables
STEPS = {"llama": {42: 150, 123: 600, 1000: 600, 2000: 150}, "qwen": dict.fromkeys(SEEDS, 60)}
STEPS_ON_DOCSTRINGS = {"llama": 200, "qwen": 40}  # the second corpus
SHORT = "--max-iters 100 --sequence-length 64 --global-batch-size 8 --learning-rate 3e-4"
CALIBRATIONS = ("none", "amplify", "attenuate", "headnorm")  # the papers'


def commands():
    """By a run's folder, what is typed after `python train.py`, but for --out."""
    runs = {"runs/backcopy": "configs/backcopy.py", "runs/released": f"--model nano_llama {SHORT}"}
    tokenizer = default_folder(("python",), "bpe:4096") / "tokenizer.model"
    for style, steps in STEPS.items():
        for seed in SEEDS:
            words = f"--model tiny_{style} --seed {seed} --max-iters {steps[seed]} --save-every 50"
            runs[f"runs/lineage/tiny_{style}-{seed}"] = words
        for seed in (BASE, OTHER):
            parent = f"runs/lineage/tiny_{style}-{seed}"
            words = f"--init-from {parent} --source docstrings --tokenizer {tokenizer}"
            words += f" --max-iters {STEPS_ON_DOCSTRINGS[style]} --learning-rate 5e-4 --warmup-iters 20"
            runs[f"{parent}-docstrings"] = words
    for seed in (42, 43, 44):
        runs[f"runs/text/explicit-{seed}"] = f"configs/text_sink.py --seed {seed} --explicit-sink"
        for kind in CALIBRATIONS:
            runs[f"runs/text/{kind}-{seed}"] = f"configs/text_sink.py --seed {seed} --attn-calibration {kind}"
    return runs


RUNS = commands()


@dataclass
class Settings:
    """Which runs."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # run folders, or folders of runs, like runs/lineage


def train_named(settings: Settings) -> None:
    """Train the named runs, or what is left of them; UserError if one does not end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in settings.runs:
        run_folder = Path(name.partition("/step_")[0])
        folders = [folder for folder in RUNS if run_folder in (Path(folder), Path(folder).parent)]
        if not folders:
            check_choice(name, list(RUNS), "run")
        for folder in folders:
            words = ["train.py", *shlex.split(RUNS[folder]), "--out", folder]
            print(shlex.join(["python", *words]), flush=True)
            has_ended = run(words, OMP_NUM_THREADS="1")
            if has_ended:  # a signal stops train.py early, without an error
                last = read_json(Path(folder, "settings.json"))["max_iters"]
                has_ended = Path(folder, f"step_{last:07}").exists()
            if not has_ended:
                raise UserError(f"{folder} did not end: the same command resumes it")


RUNNING = set()  # processes, of several threads


def run(words, **environment):
    """Run `python WORDS` as a process of its own, which is told if we are stopped; did it end well?"""
    process = subprocess.Popen([sys.executable, *words], env=os.environ | environment)
    RUNNING.add(process)
    try:
        return process.wait() == 0
    except KeyboardInterrupt:
        stop_all()
        raise
    finally:
        RUNNING.discard(process)


def stop_all() -> None:
    """Tell all processes that `run` waits for to stop: a training finishes its step, and saves."""
    running = list(RUNNING)
    for process in running:
        process.terminate()
    for process in running:
        process.wait()


COMMANDS = {"": Command(train_named, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
