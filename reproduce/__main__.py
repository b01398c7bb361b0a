"""Do the papers hold? Every table and figure of both, their number beside ours.

    python -m reproduce                                    # four hours on 2 cores, mostly training; resumes
    python -m reproduce --only layers mlp --out mine       # some of it
    python -m reproduce --scale smoke --out /tmp/smoke     # does everything work? three minutes
    python -m reproduce --scale night --out overnight      # newborns of the papers' own size: a night
    python -m reproduce --figures                          # draw what is there anew: a minute

Each result is made by a command of this project, and left out where <out> holds it with the same settings;
its training runs are made once and reused. A command that fails does not stop the others. <out>/README.md
has a line for each table, figure, finding and proposition. `night` makes what the papers' own lengths change
in newborns; `--scale paper` asks for all of their sizes, and so for GPUs and weeks.
"""

import lib.interrupt  # noqa: F401 # isort: skip
import dataclasses
import importlib
import json
import shlex
import sys
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import contraction
import probe
import seedprint
import sinks
from lib import runtime
from lib.files import atomic_file, read_json
from lib.runs import draw_loss
from lib.settings import Command, RunSettings, UserError, read_command, run_script
from reproduce import errors, family, power, siblings, tables
from reproduce.claims import CLAIMS

FIGURES = {}  # what draws the result of each experiment
for script in (probe, contraction, seedprint, sinks, errors, power, siblings):
    FIGURES |= script.FIGURES

# name: its command, what scales add to it, which runs it reads
RESULTS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())
WORDS = {  # what the braces mean
    "smoke": {
        "size": "tiny",
        "text": "backcopy",
        "data": "data/backcopy-bytes",
        "matching": "data/backcopy-bytes",
        "kin": "tiny_llama@1000",
        "strangers": "{runs}/strangers/tiny_llama-1000 {runs}/strangers/tiny_llama-1",
    },
    "laptop": {
        "size": "tiny",
        "text": "laptop",
        "data": "data/python-bpe_4096",
        "matching": "data/matching-bytes",
        "kin": "{runs}/lineage/tiny_llama-1000",
        "strangers": " ".join(f"{{runs}}/strangers/tiny_llama-{seed}" for seed in family.STRANGERS),
    },
    "night": {},
    "paper": {
        "size": "nano",
        "text": "nano_llama",
        "data": str(siblings.PAPER_DATA),
        "matching": "data/matching-bytes",
        "kin": "{runs}/lineage/nano_llama-1000",
        "strangers": " ".join(f"{{runs}}/strangers/nano_llama-{seed}" for seed in family.STRANGERS),
    },
}


@dataclass
class Settings(RunSettings):
    """What `python -m reproduce` can be told."""

    only: tuple[Literal[tuple(RESULTS)], ...] | None = None
    """results to make (default: all; at night those that have a size for it)"""
    scale: Literal[tuple(WORDS)] = "laptop"
    """how large"""
    out: str | None = None
    """folder of the results (default: results; results-smoke, -night, -paper)"""
    runs: str | None = None
    """folder of the training runs (default: runs, runs-paper; at smoke scale in --out)"""
    text: str | None = None
    """held-out English, for Table 7's perplexity"""
    figures: bool = False
    """make nothing, and draw the figures of all results in --out anew"""


def reproduce(settings: Settings) -> None:
    """Make every result that is not there, and write README.md; UserError if a command failed."""
    settings = with_folders(settings)
    runtime.start(settings)  # can we write there?
    if settings.figures:
        redraw(Path(settings.out))
        return
    if runtime.world_size() > 1:
        raise UserError("one process is enough here: its commands may be given torchrun one by one")
    names = settings.only or names_of(settings.scale)
    for name in set(names) - set(names_of(settings.scale)):
        raise UserError(f"{name} has no size for the night: choose from {', '.join(names_of('night'))}")
    failures = {}
    num_made = 0
    try:
        for number, name in enumerate(names, start=1):
            print(f"[{number} of {len(names)}] python {command_line(name, settings)}", flush=True)
            try:
                num_made += make(name, settings)
            except Exception as error:  # of whatever kind: the others go on
                reason = (str(error) or type(error).__name__).splitlines()[0]
                failures[name] = f"{name} failed ({reason})"
                print(failures[name], file=sys.stderr, flush=True)
                if not isinstance(error, UserError):
                    traceback.print_exc()
    finally:  # also where somebody interrupts
        write_report(settings)
    print(f"{len(names) - len(failures)} of {len(names)} results are there, {num_made} made now;", end=" ")
    print(f"see {settings.out}/README.md")
    if failures:
        raise UserError("; ".join(failures.values()))


def names_of(scale):
    """The results of a scale: all, but at night those alone whose commands say how large they are then."""
    return [name for name, result in RESULTS.items() if scale != "night" or "night" in result]


def with_folders(settings: Settings) -> Settings:
    """The settings with the folders that the scale suggests; UserError for a text that is not there."""
    suffix = "" if settings.scale == "laptop" else f"-{settings.scale}"
    out = settings.out or f"results{suffix}"
    runs = settings.runs or (f"{out}/runs" if settings.scale == "smoke" else f"runs{suffix}")
    if settings.text is not None and not Path(settings.text).is_file():
        raise UserError(f"no text file '{settings.text}'")
    return dataclasses.replace(settings, out=out, runs=runs)


def command_line(name, settings: Settings):
    """The command of a result at the settings' scale, as a user would type it after `python`."""
    runs = shlex.quote(settings.runs)
    words = {word: meaning.replace("{runs}", runs) for word, meaning in WORDS[settings.scale].items()}
    text = f"{RESULTS[name]['command']} {RESULTS[name].get(settings.scale, '')}".strip()
    text = text.format(runs=runs, scale=settings.scale, **words)
    if settings.text is not None and name == "calibrations":
        text += f" --text {shlex.quote(settings.text)}"
    folder = (Path(settings.out) / name).parent
    if str(folder) != "results":
        text += f" --out {shlex.quote(str(folder))}"
    return text


def read_line(name, settings: Settings):
    """The function that makes a result, and its settings."""
    words = shlex.split(command_line(name, settings))
    module = words.pop(0).removesuffix(".py")
    if module == "-m":
        module = words.pop(0)
    script = importlib.import_module(module)
    words += ["--device", settings.device, "--dtype", settings.dtype]
    return read_command(script.COMMANDS, words, script.__doc__)


def make(name, settings: Settings):
    """Make a result, and the runs that it reads, unless it is there; was it made?"""
    function, wanted = read_line(name, settings)
    path = Path(settings.out) / f"{name}.json"
    if is_made(path, wanted):
        return False
    training = siblings.Settings(
        device=settings.device,
        dtype=settings.dtype,
        out=settings.out,
        scale=settings.scale,
        runs=settings.runs,
    )
    runs = RESULTS[name].get("runs")
    if runs == "lineage":
        siblings.train_all(family.lineage_runs(training))
    if runs == "strangers":
        siblings.train_all(family.stranger_runs(training))
    if runs == "calibrations":
        siblings.train_all(siblings.calibration_runs(training))
    if runs == "matching":
        siblings.train_all(siblings.matching_runs(training))
    function(wanted)
    return True


def is_made(path, wanted):
    """Is there a result with these settings? "auto" is any device and dtype, and no text is any text."""
    result = read_result(path)
    if result is None:
        return False
    known = result["settings"]
    for name, value in json.loads(json.dumps(dataclasses.asdict(wanted))).items():
        is_free = name == "out" or value == "auto" or (name == "text" and value is None)
        if not is_free and known.get(name) != value:
            return False
    return True


def read_result(path):
    """A result's JSON; None if there is none, or one that is not whole."""
    try:
        result = read_json(path)
        is_whole = isinstance(result["settings"], dict) and isinstance(result["rows"], list)
        is_whole = is_whole and {"seconds", "device"} <= result["environment"].keys()
    except (UserError, KeyError, TypeError, AttributeError):
        return None
    return result if is_whole else None


def redraw(folder) -> None:
    """Draw the figures of all results in a folder, and of the runs whose log is there, from these alone."""
    count = 0
    for path in sorted(folder.rglob("*.json")):
        result = read_result(path) or {}
        draw = FIGURES.get(result.get("experiment"))
        if draw is None:
            continue
        try:
            draw(result, path.parent)
        except KeyError as error:
            raise UserError(f"{path} lacks {error}: another version wrote it; make it anew") from None
        count += 1
    for path in sorted(folder.rglob("metrics.jsonl")):
        draw_loss(path.parent)
        count += 1
    print(f"the figures of {count} results in {folder} are drawn anew")


# ---- the report --------------------------------------------------------------------------------------------

REPORT = """# Do the papers hold?

Every table, figure, finding and proposition of *Transformers Are Born Biased* (BB), and what *The Structural
Origin of Attention Sink* (SO) is known to say, at {scale} scale. `python -m reproduce` writes this page from
the JSON files beside it. There is a verdict only where the paper states what can be checked; it is *open*
where an interval has both answers. Items that begin with "ours" have none. Of SO we had the abstract and
summaries. Seconds are without training. Table 7's text is the test split of WikiText-2.{larger}

{minutes:.0f} minutes of measuring and {training:.0f} of training steps, on {devices}.

| item | the paper says | its number | ours | verdict | figure | command |
|---|---|---|---|---|---|---|
{lines}
"""


def write_report(settings: Settings) -> None:
    """README.md of the results, a line for each claim, and the docs' tables: from the JSON files alone."""
    names = names_of(settings.scale)
    results = read_results(settings.out, names)
    environments = [result["environment"] for result in results.values()]
    larger = ""
    if settings.scale != "night" and (Path(settings.out) / "paper_scale/README.md").exists():
        larger = "\n[Newborns at the papers' own size](paper_scale/README.md) have a page of their own."
    claims = [claim for claim in CLAIMS if settings.scale != "night" or claim.result in names]
    text = REPORT.format(
        scale=settings.scale,
        larger=larger,
        minutes=sum(environment["seconds"] for environment in environments) / 60,
        training=sum(result.get("training_seconds", 0) for result in results.values()) / 60,
        devices=", ".join(sorted({environment["device"] for environment in environments})),
        lines="\n".join(report_line(claim, results, settings) for claim in claims),
    )
    out = Path(settings.out)
    with atomic_file(out / "README.md") as temporary:
        temporary.write_text(text)
    if out.resolve() == tables.ROOT / "results" and results.keys() == RESULTS.keys():
        tables.write_tables(results | read_results(out, tables.UNCLAIMED + tables.PAPER_SCALE))


def read_results(folder, names):
    """The results of a folder, by name, that are there."""
    results = {name: read_result(Path(folder) / f"{name}.json") for name in names}
    return {name: result for name, result in results.items() if result is not None}


def report_line(claim, results, settings: Settings):
    """A line of the table; a claim whose result is not there says what would make it."""
    measured, verdict, figure = "", "", ""
    if claim.result is None:
        measured = "not run here"
        command = f"`{claim.command}`"
    else:
        command = f"`python {command_line(claim.result, settings)}`"
        if claim.result not in results:
            measured = "not made"
        else:
            result = results[claim.result]
            measured, verdict = claim.measure(result)
            command += f", {result['environment']['seconds']:.0f} s"
            name = claim.figure or f"{claim.result}.png"
            if (Path(settings.out) / name).exists():
                figure = f"[figure]({name})"
    cells = (claim.item, claim.says, claim.number, measured, verdict, figure, command)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


COMMANDS = {"": Command(reproduce, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
