"""Do the papers hold? Every table and figure of both, their number beside ours.

    python paper.py                                    # four hours on 2 cores, most of it training; resumes
    python paper.py --only layers mlp --out mine       # some of it
    python paper.py --scale smoke --out /tmp/smoke     # does everything work? four minutes

Each experiment is a command of this project. Its training runs are made once and reused, and it is left out
where <out> holds its result with the same settings (to measure anew, give another --out, or remove the file).
One that fails does not stop the others. <out>/README.md then has a line for each table and figure, made from
the JSON files alone. `--scale paper` asks for the papers' own sizes, and so for GPUs and weeks.
"""

import importlib
import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import common
import train
from checkpoint import config_of
from common import UserError, atomic_path, setting
from experiment import conduct
from findings import claim

CHILD, STRANGER = "{runs}/lineage/tiny_llama-1000", "{runs}/lineage/tiny_llama-123"
KIN = f"tiny_llama@1000 {CHILD} {CHILD}-docstrings {STRANGER} tiny_llama@123:1000"
BIRTHS = f"tiny_llama@1000 tiny_llama@123 {CHILD} {STRANGER} {CHILD}-docstrings {STRANGER}-docstrings"
SINKING = "--model {runs}/backcopy --data data/backcopy-bytes --bos"
READING = "--model {runs}/laptop --data data/python-bpe_4096"
TINY = "--model tiny_gpt2 --seed 1 2 --num-sequences 8"  # flags that make an experiment quick
SHORT, PROBE = TINY + " --sequence-length 12", "--model tiny_gpt2 --num-sequences 20 --sequence-length 4 8"
LOOK = "--num-sequences 20"
FULL = "--num-sequences 10000 --sequence-length 1024"
COMMANDS = {  # result: its command at laptop scale, what smoke adds, what the papers' scale adds
    "setup": ("paper.py --only setup", "", ""),
    "probe": ("probe.py --seed 42 43", PROBE, FULL),
    "ten_thousand/probe": ("probe.py --seed 42 --num-sequences 10000", PROBE, FULL),
    "lengths/probe": ("probe.py --seed 42 43 --sequence-length 16 64 256 --num-sequences 500", PROBE,
        "--num-sequences 10000 --sequence-length 64 256 1024"),
    "nano_llama/probe": ("probe.py --model nano_llama", PROBE, FULL),
    "gpt2_1b/probe": ("probe.py --model gpt2_1b --num-sequences 300", PROBE, FULL),
    "layers": ("contraction.py layers", SHORT, FULL),
    "nano_llama/layers": ("contraction.py layers --model nano_llama --seed 42 --num-sequences 300 "
        "--sequence-length 64", SHORT, FULL),
    "ablation": ("contraction.py ablation", SHORT, FULL),
    "overlap": ("contraction.py overlap", SHORT, FULL),
    "mlp": ("contraction.py mlp", TINY, "--num-sequences 10000"),
    "engage": ("contraction.py engage", TINY, "--num-sequences 10000"),
    "amplify": ("contraction.py amplify", SHORT, ""),
    "intra": ("contraction.py intra", SHORT, ""),
    "variance": ("contraction.py variance", SHORT, ""),
    "predict": ("contraction.py predict", SHORT, FULL),
    "cure": ("contraction.py cure", SHORT, FULL),
    "nano_llama/cure": ("contraction.py cure --model nano_llama --seed 42 43", SHORT, FULL),
    "width": ("contraction.py width", "--seed 1 2 --num-sequences 200", ""),
    "lineage": ("families.py lineage --runs {runs}", "--size smoke", "--size paper"),
    "calibrations": ("families.py calibrations --runs {runs}", "--size smoke", "--size paper"),
    "births": ("families.py births --runs {runs}", "--size smoke", "--size paper"),
    "compare": (f"seedprint.py compare {KIN}", "", ""),
    "matrix": (f"seedprint.py matrix {BIRTHS}", "", ""),
    "identify": (f"seedprint.py identify {CHILD}", "--seeds 990-1010", ""),
    "outside/identify": (f"seedprint.py identify {CHILD} --seeds 2000-101999", "--seeds 2000-2020", ""),
    "cost": (f"seedprint.py cost tiny_llama@1000 {CHILD}", "--permutations 99", ""),
    "calibrate": ("seedprint.py calibrate", "--model tiny_gpt2 --schemes gpt2 --num-births 14 "
        "--paper-births 3 --paper-sequences 20 --permutations 99", "--paper-sequences 10000"),
    "persistence": (f"seedprint.py persistence {CHILD} --stranger {STRANGER}", "--paper-sequences 50", ""),
    "qwen/persistence": ("seedprint.py persistence {runs}/lineage/tiny_qwen-1000 --stranger "
        "{runs}/lineage/tiny_qwen-123", "--paper-sequences 50", ""),
    "sink_variance": ("sinks.py variance --model nano_gpt2 --sequence-length 256",
        f"--model tiny_gpt2 --sequence-length 32 {LOOK}", "--sequence-length 1024"),
    "backcopy/rate": (f"sinks.py rate {SINKING}", LOOK, ""),
    "backcopy/anatomy": (f"sinks.py anatomy {SINKING} --sequence-length 128", LOOK, ""),
    "backcopy/intervene": (f"sinks.py intervene {SINKING} --sequence-length 128", LOOK, ""),
    "laptop/rate": (f"sinks.py rate {READING}", LOOK, ""),
    "laptop/anatomy": (f"sinks.py anatomy {READING}", LOOK, ""),
    "laptop/intervene": (f"sinks.py intervene {READING}", LOOK, ""),
}  # fmt: skip
GPUS = "torchrun --nproc-per-node 8 "
COVERAGE = (  # what a paper has, the result that speaks of it, words in its claims; a command: not run here
    ("Table 1a, Figure 1a", "probe", "Finding 1.1"), ("Figure 1a", "ten_thousand/probe", "Figure 1a"),
    ("Table 1b", "nano_llama/probe", "Finding 1.1"), ("Table 1c", "gpt2_1b/probe", "Finding 1.1"),
    ("Tables 1a-c, 10,000 x 1,024", "python probe.py --model nano_gpt2 nano_llama gpt2_1b --device cuda", ""),
    ("Finding 1.2", "lengths/probe", "Finding 1.2"), ("Finding 1.3", "probe", "Finding 1.3"),
    ("Figure 1b, Figure 10", "probe", "Figure 10"),
    ("Finding 2.1, Figure 2", "layers", "Finding 2.1"), ("Figure 7", "layers", "Figure 7"),
    ("Figures 2 and 7 by theory (ours)", "layers", "of its theory"),
    ("Finding 2.2", "overlap", "Finding 2.2"), ("Finding 2.2, by weights alone (ours)", "predict", ""),
    ("Table 2", "ablation", "Table 2"), ("Figure 3", "ablation", "Figure 3"),
    ("Figure 4", "mlp", "Figure 4"), ("Figure 5, Proposition 2", "mlp", "stack mlp0"),
    ("Footnote 5", "mlp", "footnote 5"), ("Figure 6", "engage", "Figure 6"),
    ("Table 3", "amplify", "Table 3"), ("Proposition 4", "amplify", "of its theory"),
    ("Figure 8", "intra", "Figure 8"), ("Proposition 5", "intra", "Proposition 5"),
    ("its exact law (ours)", "intra", "exact theory"),
    ("Figure 9, Equation 2", "variance", "uniform theory"),
    ("with the logits' variance (ours)", "variance", "its theory"),
    ("Figure 11", "persistence", "Figure 11"),
    ("Table 4a", "lineage", "Table 4a: paper"), ("Table 4b", "lineage", "Table 4b, 8: paper"),
    ("Table 4c", "lineage", "Table 4c: paper"), ("Table 5", "lineage", "Table 5:"),
    ("Table 6", "python seedprint.py compare Llama-2-7b-hf vicuna-7b-v1.5 --paper-test", ""),
    ("Table 7", "calibrations", "Table 7"),
    ("Table 7, 26 billion tokens", GPUS + "train.py configs/nano_llama.py --attn-calibration attenuate", ""),
    ("Table 8", "lineage", "Table 4b, 8:"), ("Table 9", "lineage", "Table 9: paper"),
    ("Table 10", "lineage", "Table 10: paper"), ("Table 11", "lineage", "Table 11: paper"),
    ("Table 12", "lineage", "Table 12:"),
    ("Tables 4, 5, 8-12, by our tests", "lineage", ": verdict"),
    ("Tables 4 to 12, 10 billion tokens", "python families.py lineage --size paper", ""),
    ("Table 13", "setup", "Table 13"), ("Table 14", "setup", "Table 14"),
    ("Figure 12", "calibrations", "Figure 12"), ("Figure 12, a model with sinks", "backcopy/rate", ""),
    ("Figure 13", "calibrate", "own embedding"), ("Figure 13, Gaussian inputs", "calibrate", "gaussian"),
    ("Figure 14", "qwen/persistence", "Figure 14"), ("Figure 14, LLaMA style", "persistence", "Figure 14"),
    ("SO: variance", "sink_variance", ""), ("SO: the chain", "backcopy/anatomy", ""),
    ("SO: the chain, on text", "laptop/anatomy", ""),
    ("SO: interventions", "backcopy/intervene", ""), ("SO: interventions, on text", "laptop/intervene", ""),
    ("SO: headnorm", "calibrations", "headnorm"),
    ("Ours: the cure", "cure", ""), ("Ours: a LLaMA's cure", "nano_llama/cure", ""),
    ("Ours: width", "width", ""), ("Ours: training the unprejudiced", "births", ""),
    ("Ours: which seed?", "identify", ""), ("Ours: none of these seeds", "outside/identify", ""),
    ("Ours: kin and strangers", "compare", ""), ("Ours: a family tree", "matrix", ""),
    ("Ours: cost", "cost", ""),
)  # fmt: skip


@dataclass
class Settings(common.RunSettings):
    """What `paper.py` can be told."""

    only: tuple[str, ...] = setting((), "experiments to make (default: all)", COMMANDS)
    scale: str = setting("laptop", "how large", ("smoke", "laptop", "paper"))
    runs: str | None = setting(None, "folder of the training runs (default: runs; smoke: in --out)")
    text: str | None = setting(None, "held-out English, for Table 7's perplexity")


# ---- Tables 13 and 14 --------------------------------------------------------------------------------------

TABLES = {
    "13": dict(d_model=768, d_ff=2048, num_layers=12, num_heads=12, head_size=64, vocab_size=32_000,
        norm="rmsnorm", mlp="swiglu", context_length=2048),
    "14": dict(warmup_iters=2000, max_iters=200_000, global_batch_size=128, micro_batch_size=32,
        weight_decay=0.1, grad_clip=1.0),
}  # fmt: skip


def setup(s: common.RunSettings, *_) -> dict:
    """The papers' hyperparameters beside those of `nano_llama` and its configuration file."""
    config = f"{Path(__file__).parent}/configs/nano_llama.py"
    sources = {"13": config_of("nano_llama"), "14": common.parse_settings(train.Settings, "", [config])}
    rows = [dict(table=table, name=name, paper=value, ours=getattr(sources[table], name))
        for table, values in TABLES.items() for name, value in values.items()]  # fmt: skip
    return dict(rows=rows)


def judge_setup(rows: list[dict]) -> list[dict]:
    """BB Tables 13 and 14: are ours the same?"""
    claims = []
    for table in TABLES:
        part = [row for row in rows if row["table"] == table]
        same = sum(row["paper"] == row["ours"] for row in part)
        text = f"nano_llama's numbers are the paper's (Table {table})"
        claims.append(claim(text, f"{len(part)} of {len(part)}", f"{same} of {len(part)}", same == len(part)))
    return claims


# ---- every experiment --------------------------------------------------------------------------------------


def command(name: str, s: Settings) -> str:
    """The command line of an experiment at the scale of `s`, as a user would type it after `python`."""
    plain, smoke, full = COMMANDS[name]
    text = plain if s.text is None or name != "calibrations" else f"{plain} --text {shlex.quote(s.text)}"
    text = f"{text} {dict(smoke=smoke, laptop='', paper=full)[s.scale]}".strip()
    out = "" if "/" not in name else f" --out {Path(s.out) / Path(name).parent}"
    return text.replace("{runs}", s.runs) + (out or f" --out {s.out}" * (s.out != "results"))


def planned(name: str, s: Settings) -> tuple:
    """The settings of an experiment's command, and what to do."""
    if name == "setup":
        wanted = common.RunSettings(s.device, s.dtype, s.out)
        return wanted, partial(conduct, wanted, "setup", "BB Tables 13, 14", setup, "", judge_setup, False)
    words = shlex.split(f"{command(name, s)} --device {s.device} --dtype {s.dtype}")
    ((wanted, work),) = importlib.import_module(Path(words[0]).stem).plan(words[1:])
    return wanted, work


def stored(name: str, s: Settings) -> dict | None:
    """An experiment's result, if there is a whole one."""
    try:
        result = json.loads((Path(s.out) / f"{name}.json").read_text())
        return result if {"settings", "rows", "claims", "environment"} <= result.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def is_done(name: str, s: Settings, wanted) -> bool:
    """Is there a result with the `wanted` settings? "auto" is any device and dtype, no text any text."""
    result = stored(name, s)
    if result is None:
        return False
    asked = json.loads(json.dumps(asdict(wanted)))
    free = {
        "out",
        *(key for key, value in asked.items() if value == "auto" or (key, value) == ("text", None)),
    }
    return all(result["settings"].get(key) == value for key, value in asked.items() if key not in free)


def run(s: Settings) -> None:
    """Make what is not there, write README.md, and say what failed; UserError if something did."""
    failed, made, begun = {}, [], time.perf_counter()
    for i, name in enumerate(s.only or COMMANDS, start=1):
        minutes = (time.perf_counter() - begun) / 60
        place = f"[{i} of {len(s.only or COMMANDS)}, {minutes:.0f} min] {name}"
        try:
            wanted, work = planned(name, s)
            if is_done(name, s, wanted):
                print(f"{place}: {Path(s.out) / name}.json has it", flush=True)
                continue
            print(f"{place}: python {command(name, s)}", flush=True)
            work()
            made.append(name)
        except Exception as error:  # of whatever kind: the others go on
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{place} failed: {failed[name]}", file=sys.stderr, flush=True)
    with atomic_path(Path(s.out) / "README.md") as new:
        new.write_text(report(s))
    count = len(s.only or COMMANDS) - len(failed)
    print(f"{count} experiments are there, {len(made)} made now; the tables: {Path(s.out) / 'README.md'}")
    if failed:
        raise UserError("; ".join(f"{name} failed ({reason})" for name, reason in failed.items()))


# ---- the tables --------------------------------------------------------------------------------------------


def report(s: Settings) -> str:
    """README.md of the results: a line for each claim about a table or figure, from the JSON files alone."""
    results = {name: stored(name, s) for name in COMMANDS}
    lines, holds, total = [], 0, 0
    for item, name, words in COVERAGE:
        if name not in COMMANDS:
            lines.append(f"| {item} | | | not run here | | | `{name}` |")
            continue
        if results[name] is None:
            lines.append(f"| {item} | | | not made | | | `python {command(name, s)}` |")
            continue
        for found in results[name]["claims"]:
            if words in found["claim"]:
                paper = "n/a" if found["paper"] is None else found["paper"]
                figure = Path(s.out) / f"{name}.png"
                shown = f"[figure]({name}.png)" if figure.exists() else ""
                holds, total = holds + found["holds"], total + 1
                verdict = "holds" if found["holds"] else "**does not hold**"
                cells = (
                    item,
                    found["claim"],
                    paper,
                    found["measured"],
                    verdict,
                    shown,
                    f"`python {command(name, s)}`",
                )
                lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    done = [result for result in results.values() if result]
    spent = sum(result.get("training_seconds", 0) for result in done) / 60
    minutes = sum(result["environment"]["seconds"] for result in done) / 60
    devices = ", ".join(dict.fromkeys(result["environment"]["device"] for result in done))
    words = (
        f"{holds} of {total} claims hold. {len(done)} of {len(results)} experiments are there: {minutes:.0f} "
    )
    words += f"minutes of measuring and {spent:.0f} of training steps, on {devices}.\n"
    head = "| of the paper | claim | paper | ours | | figure | command |\n|---|---|---|---|---|---|---|\n"
    return TITLE.format(scale=s.scale) + words + "\n" + head + "\n".join(lines) + "\n"


TITLE = """# Do the papers hold?

Every table and figure of *Transformers Are Born Biased*, and what *The Structural Origin of Attention Sink*
(SO) claims, at {scale} scale. Written by `python paper.py` from the JSON files beside it; whether a claim
holds is computed from their rows. "n/a": the number does not survive in our copy of the paper. "Not run
here": it needs what no laptop has.

"""


def plan(words: list[str]) -> list:
    """The settings of a command line, and what to do."""
    s = common.parse_settings(Settings, __doc__, words)
    s.runs = s.runs or (f"{s.out}/runs" if s.scale == "smoke" else "runs")
    if s.text and not Path(s.text).is_file():
        raise UserError(f"no text file '{s.text}'")
    common.start(s)  # can we write there?
    return [(s, partial(run, s))]


if __name__ == "__main__":
    common.run(plan)
