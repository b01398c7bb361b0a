"""python -m reproduce: what it makes, keeps and reports; every command is one that its script knows."""

import functools
import importlib
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT, run_here

from lib.files import read_json
from lib.settings import UserError, read_command
from reproduce import __main__ as main
from reproduce.claims import CLAIMS
from reproduce.runs import RUNS

SMALL = "--model backcopy --seed 1 --num-sequences 4"
PAIR = "backcopy@1 backcopy@2"
SINKS = "--model backcopy --num-sequences 2"
PROBE = "probe.py --model backcopy --num-sequences 4 --sequence-length 2"
# What is typed in place of a result's own words, so that it takes a second.
TINY = dict.fromkeys(("ablation", "mlp", "engage", "predict"), SMALL)
TINY |= dict.fromkeys(("layers", "amplify", "intra", "variance", "cure"), f"{SMALL} --sequence-length 4")
TINY |= dict.fromkeys(("compare", "matrix"), f"{PAIR} --units-per-layer 8")
TINY |= dict.fromkeys(("smollm2/anatomy", "smollm2/ablate", "smollm2/transplant"), SINKS)
TINY |= {
    "probe": "--model backcopy --num-sequences 4 --sequence-length 4",
    "identify": "backcopy@1 --seeds 0 3",
    "smollm2/rate": f"{SINKS} --sequence-length 12",
    "smollm2/intervene": f"{SINKS} --factor 2",
}
ENGAGE = "-m reproduce.mechanisms engage --model tiny_gpt2 --seed 1 2 --num-sequences 200"


@pytest.fixture
def few(tmp_path, monkeypatch):
    """`reproduce` with three results, one of which cannot be made, in a folder with a blank."""
    commands = {"deep/probe": PROBE, "persistence": "sinks.py rate --model nowhere", "engage": ENGAGE}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(main, "RESULTS", commands)
    claims = [claim for claim in CLAIMS if claim.result in ("", *commands)]
    monkeypatch.setattr(main, "CLAIMS", claims)
    return main.Settings(out=str(tmp_path / "a b"))


@pytest.fixture
def asked(monkeypatch):
    """The processes that are asked for, none of which is begun."""
    words = []
    monkeypatch.setattr(main, "run", lambda command, **_: words.append(command) or True)
    return words


def report_lines(text: str) -> list[list[str]]:
    """The cells of the report's table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def test_a_failure_stops_nothing_and_is_reported(few, capfd, monkeypatch):
    """What each command's process ends with decides; what it does is done here, as torch is imported."""
    folder = Path(few.out)
    begin = main.run

    def run(words):
        done = run_here(*[word for word in words if word != "-m"])
        print(done.stderr, file=sys.stderr)
        return begin(["-c", f"raise SystemExit({done.returncode})"])

    monkeypatch.setattr(main, "run", run)
    with pytest.raises(UserError, match="failed: persistence$"):
        main.reproduce(few)
    assert "nowhere" in capfd.readouterr().err
    lines = {line[0]: line for line in report_lines((folder / "README.md").read_text())}
    assert lines["Figure 11"][3:6] == ["not run here", "", ""]
    assert lines["Figure 6"][4:6] == ["holds", "[figure](engage.png)"]
    assert f"--out '{folder}'" in lines["Figure 6"][6]


def test_what_is_missing_is_made_and_what_is_named_again(few, asked):
    main.reproduce(few)
    assert [words[0] for words in asked] == ["probe.py", "sinks.py", "-m"]
    path = Path(few.out, "deep/probe.json")
    path.parent.mkdir()
    path.write_text('{"environment": {"commit": null}}')
    Path(few.out, "engage.json").write_text("{")  # damaged
    asked.clear()
    main.reproduce(few)
    assert [words[0] for words in asked] == ["sinks.py", "-m"]
    asked.clear()
    main.reproduce(replace(few, names=("deep/probe",)))
    assert [words[0] for words in asked] == ["probe.py"]


@pytest.mark.parametrize("name", TINY)
def test_committed_columns_are_those_that_the_code_writes(name, tmp_path):
    committed = read_json(ROOT / f"results/{name}.json")
    words = main.RESULTS[name].removeprefix("-m ").split(" --")[0]
    script, *subcommand = words.split()[:2]
    done = run_here(script, *subcommand, *TINY[name].split(), "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    made = read_json(tmp_path / f"{Path(name).name}.json")
    assert columns(made) == columns(committed)


def columns(result: dict) -> tuple[set, set]:
    """The keys of a result, but for files of models, which newborns lack, and those of its rows."""
    return set(result) - {"sources", "models"}, {key for row in result["rows"] for key in row}


@pytest.mark.parametrize("name, runs", [("backcopy/rate", ["runs/backcopy"]), ("layers", [])])
def test_a_result_trains_the_runs_that_it_reads(name, runs, tmp_path, asked):
    main.reproduce(main.Settings(names=(name,), out=str(tmp_path)))
    assert asked[:-1] == ([["-m", "reproduce.runs", *runs]] if runs else [])
    assert asked[-1][-2:] == ["--out", str(Path(tmp_path, name).parent)]


def test_a_training_holds_up_no_result_that_reads_no_run(tmp_path, asked):
    with main.PREPARING:
        thread = threading.Thread(target=main.make, args=("layers", tmp_path, 2), daemon=True)
        thread.start()
        thread.join(timeout=60)
        assert asked


def test_an_interrupted_training_saves_before_we_end(tmp_path):
    """SIGTERM reaches the process that was begun, and we wait for it."""
    child = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('saved') or exit())"
    ours = "import signal; from reproduce import __main__ as main\n"
    ours += "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
    ours += f"main.run(['-c', {child + '; print(0, flush=True); time.sleep(60)'!r}])"
    process = subprocess.Popen([sys.executable, "-c", ours], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "0\n"  # the child has begun
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0] == "saved\n"


def settings_of(name):
    """The settings that a result's command means, and its words."""
    words = shlex.split(main.command_line(name, "mine"))
    if words[0] == "-m":
        words.pop(0)
    script = importlib.import_module(words.pop(0).removesuffix(".py"))
    _, settings = read_command(script.COMMANDS, words, script.__doc__)
    return settings, words


@pytest.mark.parametrize("name", main.RESULTS)
def test_commands_are_ones_that_their_scripts_know(name):
    settings, words = settings_of(name)
    assert Path("mine", name).parent == Path(settings.out)
    runs = {word.partition("/step_")[0] for word in words if word.startswith("runs/")}
    assert runs <= {*RUNS, "runs/lineage"}


@pytest.mark.parametrize("name", main.RESULTS)
def test_a_committed_result_has_the_settings_of_its_command(name):
    """But for the folder, and for what the machine decides."""
    wanted = json.loads(json.dumps(asdict(settings_of(name)[0])))
    kept = read_json(ROOT / f"results/{name}.json")["settings"]
    for values in (wanted, kept):
        for machine in ("out", "device", "dtype"):
            values.pop(machine, None)
    assert kept == wanted


def test_a_committed_result_names_a_commit_of_this_repository():
    git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    if git(["git", "rev-parse", "--is-shallow-repository"]).stdout != "false\n":
        pytest.skip("the history is not whole here")
    commits = set()
    for name in main.RESULTS:
        commits.add(read_json(ROOT / f"results/{name}.json")["environment"]["commit"])
    assert len(commits) <= 3
    for commit in commits:
        assert git(["git", "merge-base", "--is-ancestor", commit, "HEAD"]).returncode == 0, commit


def test_committed_results():
    """Every claim reads a result that has a command, and every JSON has one; the page is that of the JSON."""
    assert {claim.result for claim in CLAIMS if claim.result} <= main.RESULTS.keys()
    committed = [path.relative_to(ROOT / "results") for path in ROOT.glob("results/**/*.json")]
    names = {str(path.with_suffix("")) for path in committed if path.parts[0] not in ("paper_scale", "h100")}
    assert names <= main.RESULTS.keys()
    page = report_lines((ROOT / "results/README.md").read_text())
    for claim, line in zip(CLAIMS, page, strict=True):
        cells = main.cells(claim, ROOT / "results")
        assert list(cells[:6]) == [cell.replace("\\|", "|") for cell in line[:6]]
