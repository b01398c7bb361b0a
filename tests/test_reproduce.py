"""python -m reproduce: what it makes, leaves out and reports, and a smoke test of its commands."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, run_here

from lib.settings import UserError
from reproduce import __main__ as main
from reproduce.claims import CLAIMS

PROBE = "probe.py --model tiny_gpt2 --num-sequences 4 --sequence-length 2"
ENGAGE = "contraction.py engage --model tiny_gpt2 --seed 1 2 --num-sequences 200"


@pytest.fixture
def few(tmp_path, monkeypatch):
    """`reproduce` with three results, one of which cannot be made, in a folder with a blank."""
    commands = {"deep/probe": PROBE, "persistence": "sinks.py rate --model nowhere", "engage": ENGAGE}
    monkeypatch.setattr(main, "RESULTS", commands)
    claims = [claim for claim in CLAIMS if claim.result in (None, *commands)]
    monkeypatch.setattr(main, "CLAIMS", claims)
    return main.Settings(out=str(tmp_path / "a b"), device="cpu", dtype="float32")


def report_lines(text: str) -> list[list[str]]:
    """The cells of the report's table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def test_a_failure_stops_nothing_and_is_reported(few):
    folder = Path(few.out)
    with pytest.raises(UserError, match="persistence failed .*nowhere"):
        main.reproduce(few)
    lines = {line[0]: line for line in report_lines((folder / "README.md").read_text())}
    assert lines["Figure 11"][3:6] == ["not run here", "", ""]
    assert lines["Figure 6"][4:6] == ["holds", "[figure](engage.png)"]
    assert f"--out '{folder}'" in lines["Figure 6"][6]


def test_what_is_there_is_left_out_unless_its_settings_changed(few):
    folder = Path(few.out)
    few = replace(few, only=("engage", "deep/probe"))
    main.reproduce(few)
    before = {name: (folder / f"{name}.json").stat().st_mtime_ns for name in few.only}
    main.reproduce(replace(few, device="auto", dtype="auto"))  # any device and dtype will do
    assert {name: (folder / f"{name}.json").stat().st_mtime_ns for name in few.only} == before
    main.RESULTS["engage"] = ENGAGE + " --input-seed 3"
    (folder / "deep/probe.json").write_text("{")
    main.reproduce(few)
    assert (folder / "engage.json").stat().st_mtime_ns > before["engage"]
    assert json.loads((folder / "deep/probe.json").read_text())["rows"]


def test_a_figure_that_fails_leaves_no_result(few, monkeypatch):
    """The JSON is written last: it says that all is there."""

    def no_disk(*_, **__):
        raise UserError("no disk left")

    monkeypatch.setattr("probe.plot_probe", no_disk)
    with pytest.raises(UserError, match="deep/probe failed [(]no disk left"):
        main.reproduce(replace(few, only=("deep/probe",)))
    assert not (Path(few.out) / "deep/probe.json").exists()


def test_committed_results_are_those_of_the_commands():
    """What is committed was made with the settings that the commands have today; every claim reads one."""
    settings = main.Settings(out=str(ROOT / "results"))
    wanted = {name: main.read_line(name, settings)[1] for name in main.RESULTS}
    stale = [name for name in wanted if not main.is_made(ROOT / f"results/{name}.json", wanted[name])]
    assert stale == []
    assert {claim.result for claim in CLAIMS if claim.result} <= set(main.RESULTS)


def test_smoke(quick_training, tmp_path):
    """The papers in small, trained and measured from nothing; then again, from what is there.

    Left out: what takes long and has tests of its own, or is a twin. `--scale smoke` makes all.
    """
    left_out = {"lineage", "matrix", "errors", "compare", "power", "nano_llama/cure"}
    left_out |= {"qwen/persistence", "outside/identify"}
    names = [name for name in main.RESULTS if name not in left_out]
    names = [name for name in names if not name.endswith("/probe") and not name.startswith("laptop/")]
    words = ("--scale", "smoke", "--out", tmp_path, "--only", *names)
    reports = []
    for _ in range(2):
        done = run_here("reproduce.__main__", *words)
        assert done.returncode == 0, done.stderr
        reports.append((tmp_path / "README.md").read_text())
    assert reports[0] == reports[1]  # with the seconds of the first time
    made = {claim.item for claim in CLAIMS if claim.result in names}
    for line in report_lines(reports[0]):
        assert line[0] not in made or line[3] != "", line
