"""Do the papers hold? Every table and figure of both, their number beside ours.

    python -m reproduce                                    # four hours on 2 cores, mostly training; resumes
    python -m reproduce --only layers mlp --out mine       # some of it
    python -m reproduce --scale smoke --out /tmp/smoke     # does everything work? three minutes

Each result is made by a command of this project (reproduce/commands.toml), and left out where <out> holds it
with the same settings; its training runs are made once and reused. A command that fails does not stop the
others. <out>/README.md has a line for each table, figure, finding and proposition, and is always written:
`--only engage` makes nothing else where that is there.
"""

import importlib
import json
import shlex
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lib import runtime
from lib.files import atomic_file, read_json
from lib.settings import Command, RunSettings, UserError, read_command, run_script
from reproduce import siblings
from reproduce.claims import CLAIMS

LINES = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())
RESULTS = LINES["laptop"]  # name: what is typed after `python`


@dataclass
class Settings(RunSettings):
    """What `python -m reproduce` can be told."""

    only: tuple[Literal[tuple(RESULTS)], ...] | None = None
    """results to make; None: all"""
    scale: Literal["smoke", "laptop"] = "laptop"
    """how large; smoke: does it work?"""
    out: str | None = None
    """folder of the results; None: results, at smoke scale results-smoke"""
    text: str | None = None
    """held-out English, for Table 7's perplexity"""

    @property
    def runs(self):
        """The folder of the training runs."""
        return f"{self.out}/runs" if self.scale == "smoke" else "runs"


def reproduce(settings: Settings) -> None:
    """Make every result that is not there, and write README.md; UserError if a command failed."""
    if settings.out is None:
        settings.out = "results" if settings.scale == "laptop" else "results-smoke"
    runtime.start(settings)  # can we write there?
    names = settings.only or RESULTS
    failures = []
    try:
        for number, name in enumerate(names, start=1):
            print(f"[{number} of {len(names)}] python {command_line(name, settings)}", flush=True)
            try:
                make(name, settings)
            except Exception as error:  # of whatever kind: the others go on
                failures.append(f"{name} failed ({error})")
                print(failures[-1], flush=True)
                if not isinstance(error, UserError):
                    traceback.print_exc()
    finally:  # also where somebody interrupts
        write_report(settings)
    print(f"{len(names) - len(failures)} of {len(names)} results are there; see {settings.out}/README.md")
    if failures:
        raise UserError("; ".join(failures))


def command_line(name, settings: Settings):
    """The command of a result at the settings' scale, as a user would type it after `python`."""
    text = RESULTS[name]
    if settings.scale == "smoke":
        more = LINES["smoke"]
        text += f" {more.get(name, more.get(Path(name).name, ''))}".rstrip()
    text = text.format(runs=shlex.quote(settings.runs), scale=settings.scale)
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
    function, wanted = read_command(script.COMMANDS, words, script.__doc__)
    for flag in ("device", "dtype"):
        if getattr(settings, flag) != "auto":
            setattr(wanted, flag, getattr(settings, flag))
    return function, wanted


def make(name, settings: Settings) -> None:
    """Make a result, and the runs that it reads, unless it is there."""
    function, wanted = read_line(name, settings)
    if is_made(Path(settings.out) / f"{name}.json", wanted):
        return
    training = siblings.Settings(settings.device, settings.dtype, scale=settings.scale, runs=settings.runs)
    if "{runs}/lineage" in RESULTS[name]:
        siblings.train_all(siblings.lineage_runs(training))
    elif "{runs}/" in RESULTS[name]:
        siblings.train_all(siblings.calibration_runs(training))
    function(wanted)


def is_made(path, wanted):
    """Is there a result with these settings? "auto" is any device and dtype, and no text is any text."""
    result = read_result(path)
    if result is None:
        return False
    given = result["settings"] | {"out": wanted.out}
    free = {name for name, value in vars(wanted).items() if value == "auto" or (name == "text" and not value)}
    asked = json.loads(json.dumps(vars(wanted)))  # tuples are lists in the file
    return all(name in free or given.get(name) == value for name, value in asked.items())


def read_result(path):
    """A result's JSON; None if there is none, or if it is damaged."""
    try:
        return read_json(path)
    except UserError:
        return None


FINDINGS = """
Six findings of what is committed here, each with its figure; its JSON stands beside it:

1. A newborn GPT-2 prefers tokens: of 1,000 random sequences 22 end in one token with seed 42, and 18 in
   another with seed 43, where the most frequent of uniform draws comes up 2.1 times ([figure](probe.png)).
2. MLPs begin the contraction and attention amplifies it: after twelve layers unrelated sequences have a
   cosine of 0.333, with MLPs alone 0.236, with attention alone -0.001 ([figure](layers.png)).
3. Its direction can be computed from the weights, with a cosine above 0.99 to the measured one
   ([figure](predict.png)), and centering the MLPs' output matrices at birth cures it: unrelated sequences
   then have a cosine below 0.004, where it was 0.30 to 0.40 ([figure](cure.png)).
4. Hidden units of a child are found again, 704 of 704 in every layer: after training
   ([figure](compare.png)), after each way of hiding it, with noise of 1.5 std, and with 90 % of its weights
   pruned ([figure](power.png)). Of a stranger's it is 1 of 704.
5. Of the heads of a real model, SmolLM2-135M, 73 % are sinks, and two of its 46,080 hidden units hold that
   up: with both silenced 28 % are left, with either alone 70 % or more ([figure](smollm2/silence.png)).
6. The paper's t-test with Gaussian inputs calls all 132 unrelated pairs of two architectures kin, where
   newborns are drawn as the paper draws them; drawn as Hugging Face does, at most 5 of 66 of one
   ([figure](errors.png)).
"""
REPORT = """
Every table, figure, finding and proposition of *Transformers Are Born Biased* (BB), and what *The Structural
Origin of Attention Sink* (SO) is known to say. `python -m reproduce` writes this page from the JSON files
beside it. There is a verdict only where the paper states what can be checked: a claim *holds* if all its
cases do, *does not hold* if one refutes it, and is *open* where an interval has both answers. Of SO we had
the abstract and summaries. Seconds are without training. Table 7's text is the test split of WikiText-2. What
was not run needs GPUs: docs/gpu.md.

| item | the paper says | its number | ours | verdict | figure | command |
|---|---|---|---|---|---|---|
"""
NOTE = """
*SO: variance* is read by octaves of positions. One that the sequence does not fill is left out: at T = 64 the
last was one position, whose rise alone made the verdict *open*. The rule was changed after that was seen.
Tables 4a and 9 have the same numbers, since a newborn Qwen's biases are zero: it is the newborn LLaMA.
"""


def write_report(settings: Settings) -> None:
    """README.md of the results, a line for each claim: from the JSON files alone."""
    out = Path(settings.out)
    lines = []
    for claim in CLAIMS:
        measured, verdict, figure, command = "not run here", "", "", ""
        if claim.result is not None:
            command = f"`python {command_line(claim.result, settings)}`"
            result = read_result(out / f"{claim.result}.json")
            if result is not None:
                measured, verdict = claim.read(result)
                command += f", {result['environment']['seconds']:.0f} s"
            if (out / f"{claim.result}.png").exists():
                figure = f"[figure]({claim.result}.png)"
        cells = (claim.item, claim.says, claim.number, measured, verdict, figure, command)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    findings = FINDINGS if settings.out == "results" else ""
    with atomic_file(out / "README.md") as temporary:
        temporary.write_text("# Do the papers hold?\n" + findings + REPORT + "".join(lines) + NOTE)


COMMANDS = {"": Command(reproduce, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
