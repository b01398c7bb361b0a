"""Do the papers hold? What BB, and the abstract and summaries of SO, state: their number beside ours.

    python -m reproduce --out mine               # what is missing there: all takes ten hours of one core
    python -m reproduce layers mlp --out mine    # these anew, whether they are there or not

A command makes each result, after the runs of training that it reads: the costliest first, --jobs of them at
a time, a core each. Killed at any moment, the same command goes on: a result is there whole or not at all.
Results name a commit; in the folder results/ it has to be one without changes.
"""

import shlex
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from lib import runtime
from lib.files import atomic_file, read_json
from lib.results import ROOT, commit
from lib.settings import Command, OutputSettings, UserError, at_least, run_script
from reproduce.claims import CLAIMS
from reproduce.runs import run, stop_all

LLAMA, QWEN = "runs/lineage/tiny_llama", "runs/lineage/tiny_qwen"
SMALL, LARGE = [f"models/qwen2.5-coder-{size}b-instruct-q4_k_m.gguf" for size in (0.5, 1.5)]
GEMMA = "models/gemma-3-270m-q4_k_m.gguf"
TWO, FOUR, TWELVE, FEW = [f"--num-sequences {count}" for count in (2, 4, 12, 25)]
BFLOAT16, WIKI = "--dtype bfloat16", "--text data/wikitext-2/test.txt"
LONG = "--num-sequences 16 --sequence-length 64 512"
RELEASED = "-m reproduce.released runs/released/step_0000000 runs/released nano_llama@43"
TRANSPLANT = "-m reproduce.interventions transplant"
THREE_MODELS = f"sinks.py transplant --model smollm2 {SMALL} {LARGE} {TWELVE}"
RESULTS = {  # <out>/NAME.json, and what is typed after `python` to make it
    "probe": "probe.py --seed 42 43",
    "ten_thousand/probe": f"probe.py --seed 42 --num-sequences 10000 {BFLOAT16}",
    "lengths/probe": f"probe.py --seed 42 43 --sequence-length 16 64 256 --num-sequences 500 {BFLOAT16}",
    "nano_llama/probe": f"probe.py --model nano_llama {BFLOAT16}",
    "gpt2_1b/probe": f"probe.py --model gpt2_1b --num-sequences 300 {BFLOAT16}",
    "layers": "contraction.py layers",
    "nano_llama/layers": "contraction.py layers --model nano_llama --seed 42 --num-sequences 300 "
    f"--sequence-length 64 {BFLOAT16}",
    "ablation": f"-m reproduce.mechanisms ablation {BFLOAT16}",
    "mlp": "-m reproduce.mechanisms mlp",
    "engage": "-m reproduce.mechanisms engage",
    "amplify": "-m reproduce.mechanisms amplify",
    "intra": "-m reproduce.mechanisms intra",
    "variance": "-m reproduce.mechanisms variance",
    "predict": f"-m reproduce.mechanisms predict {BFLOAT16}",
    "cure": f"contraction.py cure {BFLOAT16}",
    "nano_llama/cure": f"contraction.py cure --model nano_llama --seed 42 43 {BFLOAT16}",
    "lineage": "-m reproduce.lineage tables runs/lineage",
    "text": "-m reproduce.text",
    "birth": "-m reproduce.text birth",
    "compare": f"seedprint.py compare --neurons tiny_llama@1000 {LLAMA}-1000 {LLAMA}-123 tiny_llama@123:1000",
    "disguised/compare": "seedprint.py compare tiny_llama@42 disguised tiny_llama@7",
    "matrix": f"seedprint.py matrix --neurons tiny_llama@1000 tiny_llama@123 {LLAMA}-1000 {LLAMA}-123",
    "identify": f"seedprint.py identify {LLAMA}-1000",
    "robustness": f"-m reproduce.robustness smollm2 {GEMMA} {SMALL} {LARGE}",
    "released/tokens/paper_test": f"{RELEASED} --paper-sequences 300",
    "released/gaussian/paper_test": f"{RELEASED} --paper-sequences 300 --inputs gaussian",
    "errors": "-m reproduce.errors",
    "persistence": f"-m reproduce.lineage persistence {LLAMA}-1000 --stranger {LLAMA}-123",
    "qwen/persistence": f"-m reproduce.lineage persistence {QWEN}-1000 --stranger {QWEN}-123",
    "backcopy/rate": "sinks.py rate --model runs/backcopy --text data/backcopy-bytes --bos always",
    "smollm2/rate": "sinks.py rate --model smollm2 --sequence-length 64 128 256",
    "smollm2/anatomy": "sinks.py anatomy --model smollm2",
    "smollm2/intervene": "-m reproduce.interventions intervene --model smollm2 --factor 2 8 32",
    "smollm2/hide": "-m reproduce.hide --model smollm2",
    "qwen2.5-coder-0.5b/hide": f"-m reproduce.hide --model {SMALL} --num-sequences 6",
    "qwen2.5-coder-1.5b/hide": f"-m reproduce.hide --model {LARGE} --num-sequences 3",
    "gemma-3-270m/hide": f"-m reproduce.hide --model {GEMMA}",
    "models/value": f"-m reproduce.hide value --model smollm2 {SMALL} {LARGE}",
    "text/hide": "-m reproduce.hide --model runs/text/none-42 runs/text/attenuate-42",
    "smollm2/ablate": "-m reproduce.interventions ablate --model smollm2",
    "smollm2/wikitext/rate": f"sinks.py rate --sequence-length 2048 8192 {FOUR} {WIKI}",
    "qwen2.5-coder-0.5b/wikitext/rate": f"sinks.py rate --model {SMALL} --sequence-length 8192 {TWO} {WIKI}",
    "gemma-3-270m/wikitext/rate": f"sinks.py rate --model {GEMMA} --sequence-length 8192 {FOUR} {WIKI}",
    "qwen2.5-coder-0.5b/rate": f"sinks.py rate --model {SMALL} {FEW} --sequence-length 64",
    "qwen2.5-coder-0.5b/anatomy": f"sinks.py anatomy --model {SMALL} {FEW}",
    "qwen2.5-coder-0.5b/intervene": f"-m reproduce.interventions intervene --model {SMALL} {FEW}",
    "qwen2.5-coder-1.5b/rate": f"sinks.py rate --model {LARGE} {FEW} --sequence-length 64",
    "qwen2.5-coder-1.5b/anatomy": f"sinks.py anatomy --model {LARGE} {FEW}",
    "qwen2.5-coder-1.5b/intervene": f"-m reproduce.interventions intervene --model {LARGE} {FEW}",
    "models/ablate": f"-m reproduce.interventions ablate --model smollm2 {SMALL} {LARGE} {FEW}",
    "smollm2/transplant": f"{TRANSPLANT} --model smollm2 {LONG}",
    "smollm2/wikitext/transplant": f"{TRANSPLANT} --model smollm2 {LONG} {WIKI}",
    "qwen2.5-coder-0.5b/transplant": f"{TRANSPLANT} --model {SMALL} {LONG}",
    "qwen2.5-coder-0.5b/wikitext/transplant": f"{TRANSPLANT} --model {SMALL} {LONG} {WIKI}",
    "gemma-3-270m/rate": f"sinks.py rate --model {GEMMA} {FEW} --sequence-length 64",
    "gemma-3-270m/anatomy": f"sinks.py anatomy --model {GEMMA} {FEW}",
    "gemma-3-270m/intervene": f"-m reproduce.interventions intervene --model {GEMMA} {FEW}",
    "gemma-3-270m/ablate": f"-m reproduce.interventions ablate --model {GEMMA} {FEW}",
    "gemma-3-270m/transplant": f"sinks.py transplant --model {GEMMA} {TWELVE}",
    "gemma-3-270m/wikitext/transplant": f"sinks.py transplant --model {GEMMA} {TWELVE} {WIKI}",
    "models/bos": f"-m reproduce.interventions bos --model smollm2 {SMALL} {GEMMA} {TWELVE} {WIKI}",
    "models/repeats": f"-m reproduce.interventions repeats --model smollm2 {SMALL} {GEMMA} {FEW}",
    "models/transplant": THREE_MODELS,
    "models/wikitext/transplant": f"{THREE_MODELS} {WIKI}",
}
PREPARING = threading.Lock()
FIRST = {"disguised": "-m reproduce.disguise tiny_llama@42"}  # a folder that a result reads, and its command


@dataclass
class Settings(OutputSettings):
    """Which results are to be made."""

    names: tyro.conf.Positional[tuple[Literal[tuple(RESULTS)], ...]] = ()  # made anew; none: what is missing
    out: str = "results"  # folder that receives them; move it to results/ when all is there
    jobs: at_least(1) = 1  # commands at a time, of one thread each
    only: tuple[str, ...] = ()  # of what is missing, that whose name has one of these in it; (): all


def reproduce(settings: Settings) -> None:
    """Make what is named, or else what is missing, and write README.md; UserError if a command failed."""
    runtime.start(settings)  # can we write there?
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if Path(settings.out).resolve() == ROOT / "results" and (commit() or "").endswith("-dirty"):
        raise UserError("code was changed since the last commit, which results would name: commit it first")
    missing = [name for name in RESULTS if read_result(settings.out, name) is None]
    if settings.only:
        missing = [name for name in missing if any(part in name for part in settings.only)]
    waiting = sorted(settings.names or missing, key=seconds_of, reverse=True)
    failed = []
    try:
        with ThreadPoolExecutor(settings.jobs) as pool:
            ended = {pool.submit(make, name, settings.out, settings.jobs): name for name in waiting}
            try:
                for done in as_completed(ended):
                    waiting.remove(ended[done])
                    if not done.result():
                        failed.append(ended[done])
                    hours = sum(map(seconds_of, waiting)) / 3600
                    print(f"{ended[done]}: {len(waiting)} left, {hours:.1f} hours of a core", flush=True)
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                stop_all()
                raise
    finally:  # also where somebody interrupts
        write_report(settings.out)
    if failed:
        raise UserError(f"these commands failed: {', '.join(failed)}")


def seconds_of(name):
    """What the committed result took; a quarter of an hour for one that is not there."""
    result = read_result("results", name)
    return 900 if result is None else result["environment"]["seconds"]


def make(name, out, jobs):
    """Make a result, and first what it reads; did it end well?"""
    command = command_line(name, out)
    print(f"{name}: python {command}", flush=True)
    words = shlex.split(command)
    if not prepare(words):
        return False
    return run(words, **({"OMP_NUM_THREADS": "1"} if jobs > 1 else {}))


def prepare(words):
    """Make the runs or the disguised model that a command reads, if they are not there; did it end well?"""
    runs = [word for word in words if word.startswith("runs/")]
    commands = [["-m", "reproduce.runs", *runs]] if runs else []
    commands += [shlex.split(FIRST[word]) for word in words if word in FIRST and not Path(word).exists()]
    if not commands:
        return True
    with PREPARING:  # two results may read the same runs
        return all(run(command) for command in commands)


def command_line(name, out):
    """The command of a result, as a user would type it after `python`."""
    return f"{RESULTS[name]} --out {shlex.quote(str(Path(out, name).parent))}"


def read_result(out, name):
    """A result's JSON; None if there is none, or if it is damaged."""
    try:
        return read_json(Path(out, f"{name}.json"))
    except UserError:
        return None


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
            made = result["environment"]
            command += f", {made['seconds']:.0f} s, commit {str(made['commit'])[:7]}"
        if Path(out, f"{claim.result}.png").exists():
            figure = f"[figure]({claim.result}.png)"
    return claim.item, claim.says, claim.number, measured, verdict, figure, command


COMMANDS = {"": Command(reproduce, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
