"""Do the papers hold? Every table and figure of both, their number beside ours.

    python paper.py                                    # four hours on 2 cores, mostly training; resumes
    python paper.py --only layers mlp --out mine       # some of it
    python paper.py --scale smoke --out /tmp/smoke     # does everything work? four minutes

Each experiment is a command of this project, left out where <out> holds its result with the same settings;
its training runs are made once and reused. One that fails does not stop the others. <out>/README.md has a
line for each table and figure. `--scale paper` asks for the papers' own sizes, and so for GPUs and weeks.
"""

import importlib
import json
import shlex
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import common
import data
import families
import train
from checkpoint import config_of
from common import UserError, atomic_path, setting
from experiment import conduct
from figures import FIGURES
from findings import VERDICTS, claim
from kinship import OPENWEBTEXT
from stats import split

# Parts of commands; {words} in braces depend on the scale.
CHILD, STRANGER = "{runs}/lineage/{size}_llama-1000", "{runs}/lineage/{size}_llama-123"
KIN = f"{{size}}_llama@1000 {CHILD} {CHILD}-{{second}} {STRANGER} {{size}}_llama@123:1000"
BIRTHS = f"{{size}}_llama@1000 {{size}}_llama@123 {CHILD} {STRANGER} {CHILD}-{{second}} {STRANGER}-{{second}}"
SINKING = "--model {runs}/backcopy --data data/backcopy-bytes --bos"
READING = "{runs}/{text} --data {data}"
TINY = "--model tiny_gpt2 --seed 1 2 --num-sequences 8"  # flags that make contraction.py quick
SHORT = TINY + " --sequence-length 12"
PROBE = "--model tiny_gpt2 --num-sequences 20 --sequence-length 4 8"  # and probe.py
LOOK = "--num-sequences 20"  # and sinks.py
FULL = "--num-sequences 10000 --sequence-length 1024"  # the papers' protocol
COMMANDS = {  # result: its command at laptop scale, what smoke adds, what the papers' scale adds
    "setup": ("paper.py --only setup", "", ""),
    "probe": ("probe.py --seed 42 43", PROBE, FULL),
    "ten_thousand/probe": ("probe.py --seed 42 --num-sequences 10000", PROBE, FULL),
    "lengths/probe": ("probe.py --seed 42 43 --sequence-length 16 64 256 --num-sequences 500", PROBE,
        "--num-sequences 10000 --sequence-length 64 256 1024"),
    "nano_llama/probe": ("probe.py --model nano_llama", PROBE, FULL),
    "gpt2_1b/probe": ("probe.py --model gpt2_1b --num-sequences 300", PROBE, FULL),
    "centered/probe": ("probe.py --seed 42 43 --init centered", PROBE, FULL),
    "layers": ("contraction.py layers", SHORT, FULL),
    "nano_llama/layers": ("contraction.py layers --model nano_llama --seed 42 --num-sequences 300 "
        "--sequence-length 64", SHORT, FULL),
    "ablation": ("contraction.py ablation", SHORT, FULL),
    "overlap": ("contraction.py overlap", SHORT, FULL),
    "mlp": ("contraction.py mlp", TINY, "--num-sequences 10000"),
    "engage": ("contraction.py engage", TINY, "--num-sequences 10000"),
    "amplify": ("contraction.py amplify", SHORT, ""),
    "intra": ("contraction.py intra", SHORT, ""),
    "variance": ("contraction.py variance", TINY + " --sequence-length 32", ""),
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
    "cost": (f"seedprint.py cost {{size}}_llama@1000 {CHILD}", "--permutations 199", ""),
    "calibrate": ("seedprint.py calibrate", "--model tiny_gpt2 --schemes gpt2 --num-births 14 "
        "--num-sequences 2 --sequence-length 8 --paper-births 3 --paper-sequences 20 --permutations 99",
        "--paper-sequences 10000"),
    "persistence": (f"seedprint.py persistence {CHILD} --stranger {STRANGER}", "--paper-sequences 50", ""),
    "qwen/persistence": ("seedprint.py persistence {runs}/lineage/{size}_qwen-1000 --stranger "
        "{runs}/lineage/{size}_qwen-123", "--paper-sequences 50", ""),
    "sink_variance": ("sinks.py variance --model nano_gpt2 --sequence-length 256",
        f"--model tiny_gpt2 --sequence-length 32 {LOOK}", "--sequence-length 1024"),
    "backcopy/rate": (f"sinks.py rate {SINKING}", LOOK, ""),
    "backcopy/anatomy": (f"sinks.py anatomy {SINKING} --sequence-length 128", LOOK, ""),
    "backcopy/intervene": (f"sinks.py intervene {SINKING} --sequence-length 128", LOOK, ""),
    "laptop/rate": (f"sinks.py rate --model {{size}}_llama@42 {READING}", LOOK, ""),
    "laptop/anatomy": (f"sinks.py anatomy --model {READING}", LOOK, ""),
    "laptop/intervene": (f"sinks.py intervene --model {READING}", LOOK, ""),
}  # fmt: skip
PAPER_TEXT = data.default_folder(data.Settings(**OPENWEBTEXT)).name
# What a paper has; the result that speaks of it, or a command that is not run here; words in its claims.
COVERAGE = (
    ("Table 1a, Figure 1a", "probe", "Finding 1.1"), ("Figure 1a", "ten_thousand/probe", "Figure 1a"),
    ("Table 1b, T = 64", "nano_llama/probe", "Finding 1.1"), ("Table 1c", "gpt2_1b/probe", "Finding 1.1"),
    ("Tables 1a-c, 10,000 x 1,024", "python probe.py --model nano_gpt2 nano_llama gpt2_1b --device cuda", ""),
    ("Finding 1.2", "lengths/probe", "Finding 1.2"), ("Finding 1.3", "probe", "Finding 1.3"),
    ("Figure 1b, Figure 10", "probe", "Figure 10"),
    ("Finding 2.1, Figure 2", "layers", "Finding 2.1"), ("Figure 7", "layers", "Figure 7"),
    ("Figures 2 and 7 by theory (ours)", "layers", "of its theory"),
    ("Figure 7, a LLaMA (should not)", "nano_llama/layers", "(Fi"),
    ("a LLaMA by theory (ours)", "nano_llama/layers", "of its theory"),
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
    ("Table 4a", "lineage", "Table 4a:"), ("Table 4b", "lineage", "Table 4b, 8: paper"),
    ("Table 4c", "lineage", "Table 4c:"), ("Table 5", "lineage", "Table 5:"),
    ("Tables 5 and 12, The Stack", "python train.py --init-from RUN --source hf:bigcode/the-stack-dedup "
        "--tokenizer RUN/step_0200000/tokenizer.model", ""),
    ("Table 6", "python seedprint.py compare Llama-2-7b-hf vicuna-7b-v1.5 --paper-test", ""),
    ("Table 7", "calibrations", "Table 7"),
    ("Table 7, its size", "torchrun train.py configs/nano_llama.py --attn-calibration attenuate", ""),
    ("Table 8", "lineage", "Table 4b, 8:"), ("Table 9", "lineage", "Table 9:"),
    ("Table 10", "lineage", "Table 10:"), ("Table 11", "lineage", "Table 11:"),
    ("Table 12", "lineage", "Table 12:"),
    ("Tables 4, 5 and 8-12, their size", "python families.py lineage --size paper", ""),
    ("Table 13", "setup", "Table 13"), ("Table 14", "setup", "Table 14"),
    ("Figure 12", "calibrations", "Figure 12"), ("Figure 12, a model with sinks", "backcopy/rate", ""),
    ("Figure 12, a text model", "laptop/rate", "/"),
    ("Figure 12, at birth (should not)", "laptop/rate", "_llama@42: some"),
    ("Figure 13", "calibrate", "own embedding"), ("Figure 13, Gaussian inputs", "calibrate", "gaussian"),
    ("Figure 14", "qwen/persistence", "Figure 14"), ("Figure 14, a LLaMA", "persistence", "Figure 14"),
    ("SO: variance", "sink_variance", ""), ("SO: the chain", "backcopy/anatomy", ""),
    ("SO: the chain, on text", "laptop/anatomy", ""),
    ("SO: interventions", "backcopy/intervene", ""), ("SO: interventions, on text", "laptop/intervene", ""),
    ("SO: headnorm", "calibrations", "headnorm"), ("Ours: the cure", "cure", ""),
    ("Ours: do the cured prefer tokens? (should not)", "centered/probe", "Finding 1.1"),
    ("Ours: is a LLaMA biased? (should not)", "nano_llama/cure", "gpt2 is"),
    ("Ours: width", "width", ""), ("Ours: training the unprejudiced", "births", ""),
    ("Ours: which seed?", "identify", ""), ("Ours: of these seeds? (should not)", "outside/identify", ""),
    ("Ours: kin", "compare", "_llama-1000"), ("Ours: a stranger (should not)", "compare", "_llama-123:"),
    ("Ours: a stranger with the base's embedding (should not)", "compare", "_llama@123:1000:"),
    ("Ours: a family tree", "matrix", ""), ("Ours: cost", "cost", ""),
)  # fmt: skip
CONTROL = "(should not)"  # in items whose claim holds of others
OWNERS = {"BB": "BB", "SO": "SO", "ours": "ours", "rival": "rivals", CONTROL: "controls, which should not,"}
DRAWN = {"Figure 12": "calibrated_rate", "Figure 14": "qwen/persistence_p",
    "Figure 14, a LLaMA": "persistence_p"}  # fmt: skip


@dataclass
class Settings(common.RunSettings):
    """What `paper.py` can be told."""

    only: tuple[str, ...] | None = setting(None, "experiments to make (default: all)", COMMANDS)
    scale: str = setting("laptop", "how large", ("smoke", "laptop", "paper"))
    out: str | None = setting(None, "folder of the results (default: results; results-smoke, results-paper)")
    runs: str | None = setting(None, "folder of training runs (default: runs, runs-paper; smoke: in --out)")
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


def judge_setup(rows: list[dict]):
    """BB Tables 13 and 14: are ours the same?"""
    for table, part in split(rows, "table").items():
        same, n = sum(row["paper"] == row["ours"] for row in part), len(part)
        text = f"nano_llama's numbers are the paper's (Table {table})"
        yield claim(text, f"{n} of {n}", f"{same} of {n}", same == n)


# ---- every experiment --------------------------------------------------------------------------------------


def command(name: str, s: Settings) -> str:
    """The command line of an experiment at the scale of `s`, as a user would type it after `python`."""
    plain, smoke, full = COMMANDS[name]
    folder = Path(s.out) / Path(name).parent
    words = dict(size="tiny", second="docstrings", text="laptop", data="data/python-bpe_4096")
    if s.scale == "smoke":
        words |= dict(text="backcopy", data="data/backcopy-bytes")
    if s.scale == "paper":
        words = dict(size="nano", second="stories", text="nano_llama", data="data/" + PAPER_TEXT)
    text = f"{plain} {dict(smoke=smoke, laptop='', paper=full)[s.scale]}".strip()
    text = text.format(runs=shlex.quote(s.runs), **words)
    text += f" --text {shlex.quote(s.text)}" if s.text and name == "calibrations" else ""
    return text + f" --out {shlex.quote(str(folder))}" * (str(folder) != "results")


def planned(name: str, s: Settings) -> tuple:
    """The settings of an experiment's command, and what to do."""
    if name == "setup":
        wanted = common.RunSettings(s.device, s.dtype, s.out)
        return wanted, partial(conduct, wanted, name, "BB Tables 13, 14", setup, judge=judge_setup, plot=None)
    words = shlex.split(f"{command(name, s)} --device {s.device} --dtype {s.dtype}")
    ((wanted, work),) = importlib.import_module(Path(words[0]).stem).plan(words[1:])
    return wanted, work


def train_for(name: str, s: Settings) -> None:
    """The training runs that an experiment reads, made if they are not there."""
    for mark, family in {"/lineage/": "lineage", "--data": "calibrations"}.items():
        if mark in COMMANDS[name][0]:
            families.train_all(family, families.Settings(s.device, s.dtype, s.out, s.scale, s.runs))


def stored(name: str, s: Settings) -> dict | None:
    """An experiment's result, if there is a whole one with its command's settings.

    "auto" is any device and dtype, and no text is any text.
    """
    asked, path = json.loads(json.dumps(asdict(planned(name, s)[0]))), Path(s.out) / f"{name}.json"
    free = {key for key, value in asked.items() if value == "auto" or (key, value) == ("text", None)}
    try:
        result = json.loads(path.read_text())
        known = result["settings"] | {"device": result["settings"]["device"].split(":")[0]}
        whole = {"seconds", "device"} <= result["environment"].keys() and type(result["rows"]) is list
        whole &= all({"claim", "of", "paper", "measured", "verdict"} <= c.keys() for c in result["claims"])
        drawn = result["experiment"] not in (*FIGURES, "probe", "matrix") or path.with_suffix(".png").exists()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    same = all(known.get(key) == value for key, value in asked.items() if key not in {"out", *free})
    return result if whole and same and drawn else None


def run(s: Settings) -> None:
    """Make what is not there, write README.md, and say what failed; UserError if something did."""
    failed, made, begun = {}, [], time.perf_counter()
    names = [name for name in COMMANDS if name in (s.only or COMMANDS)]
    try:
        for i, name in enumerate(names, start=1):
            place = f"[{i} of {len(names)}, {(time.perf_counter() - begun) / 60:.0f} min] {name}"
            try:
                _, work = planned(name, s)
                if stored(name, s):
                    print(f"{place}: {Path(s.out) / name}.json has it", flush=True)
                    continue
                why = ", as what is there is of other settings" * (Path(s.out) / f"{name}.json").exists()
                print(f"{place}: python {command(name, s)}{why}", flush=True)
                train_for(name, s)
                work()
                made.append(name)
            except Exception as error:  # of whatever kind: the others go on
                failed[name] = (str(error) or type(error).__name__).splitlines()[0]
                print(f"{place} failed: {failed[name]}", file=sys.stderr, flush=True)
                if not isinstance(error, UserError):
                    traceback.print_exc()
    finally:
        with atomic_path(Path(s.out) / "README.md") as new:
            new.write_text(report(s))
    print(f"{len(names) - len(failed)} of {len(names)} experiments are there, {len(made)} made now", end="; ")
    print(f"the tables: {Path(s.out) / 'README.md'}")
    if failed:
        raise UserError("; ".join(f"{name} failed ({reason})" for name, reason in failed.items()))


# ---- the tables --------------------------------------------------------------------------------------------


def report(s: Settings) -> str:
    """README.md of the results: a line for each claim about a table or figure, from the JSON files alone."""
    done, lines = {name: found for name in COMMANDS if (found := stored(name, s))}, []
    for item, name, words in COVERAGE:
        claims = done[name]["claims"] if name in done else []
        lines += [(item, name, c) for c in claims if words in c["claim"]] or [(item, name, None)]
    for name, result in done.items():
        said = {c["claim"]: item for item, of, c in lines if of == name and c}
        if not said or not all(CONTROL in item for item in said.values()):  # of a control no more is claimed
            lines += [("besides", name, c) for c in result["claims"] if c["claim"] not in said]
    owned = {(name, c["claim"]): (CONTROL if CONTROL in item else c["of"], c) for item, name, c in lines if c}
    counts = Counter((of, c["verdict"]) for of, c in owned.values())
    tally = [f"{who} {'/'.join(str(counts[of, v]) for v in VERDICTS.values())}" for of, who in OWNERS.items()]
    spent = sum(result.get("training_seconds", 0) for result in done.values()) / 60
    made = [result["environment"] for result in done.values()]
    minutes, devices = sum(e["seconds"] for e in made) / 60, ", ".join({e["device"]: 0 for e in made})
    text = f"Claims that hold/do not/are open: {', '.join(tally)}. {len(done)} of {len(COMMANDS)} experiments"
    text += f" are there: {minutes:.0f} minutes of measuring and {spent:.0f} of training steps, on {devices}."
    return TABLE.format(scale=s.scale, text=text, rows="\n".join(row(*line, s, done) for line in lines))


def row(item: str, name: str, found: dict | None, s: Settings, done: dict) -> str:
    """A line of the table: a claim of the result `name`; without one, why there is none."""
    if name not in COMMANDS:
        cells = [item, "", "", "", "not run here", "", "", f"`{name}`"]
    elif found is None:
        why = "not decided" if name in done else "not made"
        why += ": needs --text" * (item.startswith("Table 7") and name in done)
        cells = [item, "", "", "", why, "", "", f"`python {command(name, s)}`"]
    else:
        used = replace(s, text=done[name]["settings"].get("text"))
        drawn = f"{DRAWN.get(item, name)}.png"
        shown = f"[figure]({drawn})" if (Path(s.out) / drawn).exists() else ""
        theirs = found["paper"] or ("n/a" if found["of"] in ("BB", "SO") else "")
        holds = found["verdict"].replace("does not hold", "**does not hold**")
        holds += ", rightly" * (CONTROL in item and "not" in holds)
        made = f"`python {command(name, used)}`, {done[name]['environment']['seconds']:.0f} s"
        told = (found["claim"], found["of"], theirs, found["measured"], holds, shown, made)
        cells = [item, *(str(cell).replace("|", "\\|") for cell in told)]
    return f"| {' | '.join(cells)} |"


TABLE = """# Do the papers hold?

Every table and figure of *Transformers Are Born Biased* (BB), and what *The Structural Origin of Attention
Sink* (SO) claims, at {scale} scale. Written by `python paper.py` from the JSON files beside it; whether a
claim holds is computed from their rows, and open where an interval has both answers. Of SO we had the
abstract alone, so its terms are as we read them. Rivals are methods that BB says fail; controls, models of
which a claim should not hold. "n/a": not legible in the text we have of the paper. "Not run here": it needs
a download, or hours. Table 7's text is the test split of WikiText-2. Seconds are without training, which
`families.py` does once.

{text}

| of the paper | claim | whose | paper | measured | | figure | command |
|---|---|---|---|---|---|---|---|
{rows}
"""


def plan(words: list[str]) -> list:
    """The settings of a command line, and what to do."""
    s = common.parse_settings(Settings, __doc__, words)
    suffix = "" if s.scale == "laptop" else f"-{s.scale}"
    s.out = s.out or f"results{suffix}"
    s.runs = s.runs or (f"{s.out}/runs" if s.scale == "smoke" else f"runs{suffix}")
    if s.text and not Path(s.text).is_file():
        raise UserError(f"no text file '{s.text}'")
    common.start(s)  # can we write there?
    if common.world_size() > 1:
        raise UserError("one process is enough here: its commands may be given torchrun one by one")
    return [(s, partial(run, s))]


if __name__ == "__main__":
    common.run(plan)
