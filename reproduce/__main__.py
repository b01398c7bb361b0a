"""Do the papers hold? Every table and figure of both, their number beside ours.

    python -m reproduce                                    # 13 hours of one core; resumes
    python -m reproduce --only layers mlp --out mine       # some of it

A command makes each result that is missing, or was made by other code than today's. Runs of training that it
reads are made before, once. <out>/README.md has a line for each table, figure, finding and proposition.
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
from lib.results import code_digest, content_digest
from lib.settings import Command, OutputSettings, UserError, run_script
from reproduce.claims import CLAIMS

LLAMA, QWEN = "runs/lineage/tiny_llama", "runs/lineage/tiny_qwen"
SMALL, LARGE = [f"models/qwen2.5-coder-{size}b-instruct-q4_k_m.gguf" for size in (0.5, 1.5)]
GEMMA, FEW = "models/gemma-3-270m-q4_k_m.gguf", "--num-sequences 25"
WIKITEXT = "data/wikitext-2/test.txt"
LONG = "--num-sequences 16 --sequence-length 64 512"
TRANSPLANT = "-m reproduce.interventions transplant"
FOUR_CASES = f"sinks.py transplant --model smollm2 {SMALL} {LARGE} --num-sequences 12"
RESULTS = {  # <out>/NAME.json, and what is typed after `python` to make it
    "probe": "probe.py --seed 42 43 --dtype float32",
    "ten_thousand/probe": "probe.py --seed 42 --num-sequences 10000",
    "lengths/probe": "probe.py --seed 42 43 --sequence-length 16 64 256 --num-sequences 500",
    "nano_llama/probe": "probe.py --model nano_llama",
    "gpt2_1b/probe": "probe.py --model gpt2_1b --num-sequences 300",
    "centered/probe": "probe.py --seed 42 43 --init centered",
    "layers": "contraction.py layers --dtype float32",
    "nano_llama/layers": "contraction.py layers --model nano_llama --seed 42 --num-sequences 300 "
    "--sequence-length 64",
    "ablation": "-m reproduce.mechanisms ablation",
    "mlp": "-m reproduce.mechanisms mlp",
    "engage": "-m reproduce.mechanisms engage",
    "amplify": "-m reproduce.mechanisms amplify",
    "intra": "-m reproduce.mechanisms intra",
    "variance": "-m reproduce.mechanisms variance",
    "predict": "contraction.py predict",
    "cure": "contraction.py cure",
    "nano_llama/cure": "contraction.py cure --model nano_llama --seed 42 43",
    "width": "-m reproduce.mechanisms width",
    "lineage": "-m reproduce.trainings lineage",
    "calibrations": "-m reproduce.trainings calibrations",
    "text": "-m reproduce.text",
    "birth": "-m reproduce.text birth",
    "perplexity": f"-m reproduce.trainings perplexity --text {WIKITEXT}",
    "compare": f"seedprint.py compare tiny_llama@1000 {LLAMA}-1000 {LLAMA}-123 tiny_llama@123:1000",
    "matrix": f"seedprint.py matrix tiny_llama@1000 tiny_llama@123 {LLAMA}-1000 {LLAMA}-123",
    "identify": f"seedprint.py identify {LLAMA}-1000",
    "outside/identify": f"seedprint.py identify {LLAMA}-1000 --seeds 2000 101999",
    "robustness": f"-m reproduce.robustness smollm2 {GEMMA} {SMALL} {LARGE}",
    "errors": "-m reproduce.errors",
    "persistence": f"seedprint.py persistence {LLAMA}-1000 --stranger {LLAMA}-123",
    "qwen/persistence": f"seedprint.py persistence {QWEN}-1000 --stranger {QWEN}-123",
    "backcopy/rate": "sinks.py rate --model runs/backcopy --text data/backcopy-bytes --first-token bos",
    "smollm2/rate": "sinks.py rate --model smollm2 --sequence-length 64 128 256",
    "smollm2/anatomy": "sinks.py anatomy --model smollm2",
    "smollm2/first": "-m reproduce.interventions first --model smollm2 --num-sequences 25",
    "smollm2/intervene": "-m reproduce.interventions intervene --model smollm2 --factor 2 8 32",
    "smollm2/silence": "-m reproduce.interventions silence --model smollm2",
    "qwen2.5-coder-0.5b/rate": f"sinks.py rate --model {SMALL} {FEW} --sequence-length 64",
    "qwen2.5-coder-0.5b/anatomy": f"sinks.py anatomy --model {SMALL} {FEW}",
    "qwen2.5-coder-0.5b/intervene": f"-m reproduce.interventions intervene --model {SMALL} {FEW}",
    "qwen2.5-coder-1.5b/rate": f"sinks.py rate --model {LARGE} {FEW} --sequence-length 64",
    "qwen2.5-coder-1.5b/anatomy": f"sinks.py anatomy --model {LARGE} {FEW}",
    "qwen2.5-coder-1.5b/intervene": f"-m reproduce.interventions intervene --model {LARGE} {FEW}",
    "models/silence": f"-m reproduce.interventions silence --model smollm2 {SMALL} {LARGE} {FEW}",
    "smollm2/transplant": f"{TRANSPLANT} --model smollm2 {LONG}",
    "smollm2/wikitext/transplant": f"{TRANSPLANT} --model smollm2 {LONG} --text {WIKITEXT}",
    "qwen2.5-coder-0.5b/transplant": f"{TRANSPLANT} --model {SMALL} {LONG}",
    "qwen2.5-coder-0.5b/wikitext/transplant": f"{TRANSPLANT} --model {SMALL} {LONG} --text {WIKITEXT}",
    "models/transplant": FOUR_CASES,
    "models/wikitext/transplant": f"{FOUR_CASES} --text {WIKITEXT}",
    "bench": "-m reproduce.bench",
}


@dataclass
class Settings(OutputSettings):
    """Which results are to be made."""

    only: tuple[Literal[tuple(RESULTS)], ...] | None = None  # results to make; None: all
    keep: bool = False  # keep results that were made by other code than today's, or changed by hand


def reproduce(settings: Settings) -> None:
    """Make what is missing, changed or of other code, and write README.md; UserError if a command failed."""
    runtime.start(settings)  # can we write there?
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = []
    try:
        for name in settings.only or RESULTS:
            result = read_result(settings.out, name)
            if result is not None and (settings.keep or is_of_this_code(result)):
                continue
            command = command_line(name, settings.out)
            print(f"{name}: python {command}", flush=True)
            words = shlex.split(command)
            runs = [word for word in words if word.startswith("runs/")]  # to be trained before
            if runs and not run(["-m", "reproduce.trainings", "train", *runs]) or not run(words):
                failed.append(name)
    finally:  # also where somebody interrupts
        write_report(settings.out)
    if failed:
        raise UserError(f"these commands failed: {', '.join(failed)}")


def command_line(name, out):
    """The command of a result, as a user would type it after `python`."""
    folder = str(Path(out, name).parent)
    return RESULTS[name] if folder == "results" else f"{RESULTS[name]} --out {shlex.quote(folder)}"


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


def is_of_this_code(result):
    """Is a result what a command wrote, whose code is the one that is here now, comments aside?"""
    try:
        made = result["environment"]
        return made["code"] == code_digest(made["files"]) and made["content"] == content_digest(result)
    except (KeyError, OSError):  # older than digests; or a file is gone
        return False


def write_report(out) -> None:
    """README.md of the results: HEADER.md, if it is there, and a line for each claim, from the JSON alone."""
    header = Path(out, "HEADER.md")
    lines = [header.read_text()] if header.exists() else []
    lines.append("| item | the paper says | its number | ours | verdict | figure | command |")
    lines.append("|---|---|---|---|---|---|---|")
    for claim in CLAIMS:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells(claim, out)) + " |")
    with atomic_file(header.with_name("README.md")) as temporary:
        temporary.write_text("\n".join(lines) + "\n")


def cells(claim, out):
    """A line of the report."""
    measured, verdict, figure, command = "not run here", "", "", ""
    if claim.result:
        command = f"`python {command_line(claim.result, out)}`"
        result = read_result(out, claim.result)
        if result is not None:
            measured, verdict = claim.read(result)
            command += f", {result['environment']['seconds']:.0f} s"
            command += "" if is_of_this_code(result) else ", of other code or changed"
        if Path(out, f"{claim.result}.png").exists():
            figure = f"[figure]({claim.result}.png)"
    return claim.item, claim.says, claim.number, measured, verdict, figure, command


COMMANDS = {"": Command(reproduce, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
