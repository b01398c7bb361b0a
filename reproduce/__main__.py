"""Do the papers hold? Every table and figure of both, their number beside ours.

    python -m reproduce                                    # four hours on 2 cores, mostly training; resumes
    python -m reproduce --only layers mlp --out mine       # some of it

Each result is made by a command of this project, and kept once it is there; training runs that a command
names are made before it, once. A command that fails does not stop the others. <out>/README.md has a line for
each table, figure, finding and proposition, and is always written: `--only engage` makes nothing else.
"""

import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lib import runtime
from lib.files import atomic_file, read_json
from lib.settings import Command, RunSettings, UserError, run_script
from reproduce.claims import CLAIMS

LLAMA, QWEN = "runs/lineage/tiny_llama", "runs/lineage/tiny_qwen"
RESULTS = {  # <out>/NAME.json, and what is typed after `python` to make it
    "probe": "probe.py --seed 42 43",
    "ten_thousand/probe": "probe.py --seed 42 --num-sequences 10000",
    "lengths/probe": "probe.py --seed 42 43 --sequence-length 16 64 256 --num-sequences 500",
    "nano_llama/probe": "probe.py --model nano_llama",
    "gpt2_1b/probe": "probe.py --model gpt2_1b --num-sequences 300",
    "centered/probe": "probe.py --seed 42 43 --init centered",
    "layers": "contraction.py layers",
    "nano_llama/layers": "contraction.py layers --model nano_llama --seed 42 --num-sequences 300 "
    "--sequence-length 64",
    "ablation": "contraction.py ablation",
    "mlp": "contraction.py mlp",
    "engage": "contraction.py engage",
    "amplify": "contraction.py amplify",
    "intra": "contraction.py intra",
    "variance": "contraction.py variance",
    "predict": "contraction.py predict",
    "cure": "contraction.py cure",
    "nano_llama/cure": "contraction.py cure --model nano_llama --seed 42 43",
    "width": "contraction.py width",
    "lineage": "-m reproduce.trainings lineage",
    "calibrations": "-m reproduce.trainings calibrations",
    "compare": f"seedprint.py compare tiny_llama@1000 {LLAMA}-1000 {LLAMA}-123 tiny_llama@123:1000",
    "matrix": f"seedprint.py matrix tiny_llama@1000 tiny_llama@123 {LLAMA}-1000 {LLAMA}-123",
    "identify": f"seedprint.py identify {LLAMA}-1000",
    "outside/identify": f"seedprint.py identify {LLAMA}-1000 --seeds 2000 101999",
    "robustness": "-m reproduce.robustness",
    "errors": "-m reproduce.errors",
    "persistence": f"seedprint.py persistence {LLAMA}-1000 --stranger {LLAMA}-123",
    "qwen/persistence": f"seedprint.py persistence {QWEN}-1000 --stranger {QWEN}-123",
    "backcopy/rate": "sinks.py rate --model runs/backcopy --text data/backcopy-bytes --first-token bos",
    "smollm2/rate": "sinks.py rate --model smollm2 --sequence-length 64 128 256",
    "smollm2/anatomy": "sinks.py anatomy --model smollm2",
    "smollm2/first": "sinks.py first --model smollm2 --num-sequences 25",
    "smollm2/intervene": "sinks.py intervene --model smollm2 --factor 2 8 32",
    "smollm2/silence": "sinks.py silence --model smollm2 --units 4",
    "bench": "-m reproduce.bench --dtype bfloat16",
}


@dataclass
class Settings:
    """Options of `python -m reproduce`."""

    only: tuple[Literal[tuple(RESULTS)], ...] | None = None  # results to make; None: all
    out: str = "results"  # folder of the results
    text: str | None = None  # file of held-out English, for Table 7's perplexity


def reproduce(settings: Settings) -> None:
    """Make every result that is not there, and write README.md; UserError if a command failed."""
    runtime.start(RunSettings(out=settings.out))  # can we write there?
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = settings.only or RESULTS
    failed = []
    try:
        for number, name in enumerate(names, start=1):
            command = command_line(name, settings)
            print(f"[{number} of {len(names)}] python {command}", flush=True)
            if read_result(settings.out, name) is None and not make(command):
                failed.append(name)
    finally:  # also where somebody interrupts
        write_report(settings)
    print(f"{len(names) - len(failed)} of {len(names)} results are there; see {settings.out}/README.md")
    if failed:
        raise UserError(f"these commands failed: {', '.join(failed)}")


def command_line(name, settings: Settings):
    """The command of a result, as a user would type it after `python`."""
    command = RESULTS[name]
    if settings.text is not None and name == "calibrations":
        command += f" --text {shlex.quote(settings.text)}"
    folder = Path(settings.out, name).parent
    if str(folder) != "results":
        command += f" --out {shlex.quote(str(folder))}"
    return command


def make(command):
    """Train the runs that a command reads, then run it; did all end well?"""
    words = shlex.split(command)
    runs = [word for word in words if word.startswith("runs/")]
    if runs and not run(["-m", "reproduce.trainings", "train", *runs]):
        return False
    return run(words)


def run(words):
    """Run `python WORDS` as a process of its own; did it end well?"""
    process = subprocess.Popen([sys.executable, *words])
    try:
        return process.wait() == 0
    except KeyboardInterrupt:
        process.terminate()  # a training finishes its step, and saves
        process.wait()
        raise


def read_result(out, name):
    """A result's JSON; None if there is none, or if it is damaged."""
    try:
        return read_json(Path(out, f"{name}.json"))
    except UserError:
        return None


def write_report(settings: Settings) -> None:
    """README.md of the results: HEADER.md, if it is there, and a line for each claim, from the JSON alone."""
    header = Path(settings.out, "HEADER.md")
    lines = [header.read_text() if header.exists() else "# Do the papers hold?\n"]
    lines.append("| item | the paper says | its number | ours | verdict | figure | command |")
    lines.append("|---|---|---|---|---|---|---|")
    for claim in CLAIMS:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells(claim, settings)) + " |")
    with atomic_file(header.with_name("README.md")) as temporary:
        temporary.write_text("\n".join(lines) + "\n")


def cells(claim, settings: Settings):
    """A line of the report."""
    measured, verdict, figure, command = "not run here", "", "", ""
    if claim.result:
        command = f"`python {command_line(claim.result, settings)}`"
        result = read_result(settings.out, claim.result)
        if result is not None:
            measured, verdict = claim.read(result)
            command += f", {result['environment']['seconds']:.0f} s"
        if Path(settings.out, f"{claim.result}.png").exists():
            figure = f"[figure]({claim.result}.png)"
    return claim.item, claim.says, claim.number, measured, verdict, figure, command


COMMANDS = {"": Command(reproduce, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
