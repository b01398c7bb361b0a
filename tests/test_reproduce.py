"""python -m reproduce: what it makes, leaves out and reports, and a smoke test of its commands."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, run_here
from matplotlib.figure import Figure

from lib.settings import UserError
from model import PRESETS
from reproduce import __main__ as main
from reproduce import family, siblings, tables
from reproduce.claims import CLAIMS

PROBE = "probe.py --model tiny_gpt2 --num-sequences 4 --sequence-length 2"
WIDTH = "contraction.py width --seed 1 2 --num-sequences 8"


@pytest.fixture
def few(tmp_path, monkeypatch):
    """`reproduce` with four results, one of which cannot be made, in a folder with a blank."""
    folder = tmp_path / "a b"
    chosen = {
        "setup": main.RESULTS["setup"],
        "deep/probe": {"command": PROBE},
        "rate": {"command": "sinks.py rate --model nowhere"},
        "width": {"command": WIDTH},
    }
    monkeypatch.setattr(main, "RESULTS", chosen)
    claims = [claim for claim in CLAIMS if claim.result in (None, "setup", "width")]
    claims += [replace(claim, result="rate") for claim in CLAIMS if claim.result == "laptop/rate"][:1]
    monkeypatch.setattr(main, "CLAIMS", claims)
    return main.Settings(out=str(folder), runs=str(folder / "runs"), device="cpu", dtype="float32")


def report_lines(text: str) -> list[list[str]]:
    """The cells of the report's table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def test_a_failure_stops_nothing_and_is_reported(few, capsys):
    folder = Path(few.out)
    with pytest.raises(UserError, match="rate failed .*nowhere"):
        main.reproduce(few)
    assert {"setup.json", "width.json", "width.png", "deep", "README.md"} <= {
        p.name for p in folder.iterdir()
    }
    lines = report_lines((folder / "README.md").read_text())
    assert all(len(line) == 7 for line in lines)
    by_item = {line[0]: line for line in lines}
    (rate_line,) = [line for line in lines if "sinks.py rate" in line[6]]
    assert rate_line[3] == "not made" and rate_line[4] == ""
    width_line = by_item["ours: width"]
    assert "width^" in width_line[3] and width_line[4] == "" and width_line[5] == "[figure](width.png)"
    assert f"--out '{folder}'" in width_line[6]
    assert [line[3] for line in lines if line[0].startswith("Table 6")] == ["not run here"]
    assert "3 of 4 results are there, 3 made now" in capsys.readouterr().out


def test_what_is_there_is_left_out_unless_its_settings_changed(few, capsys):
    folder = Path(few.out)
    few = replace(few, only=("width", "deep/probe", "setup"))
    main.reproduce(few)
    before = {name: (folder / f"{name}.json").stat().st_mtime_ns for name in few.only}
    assert ", 3 made now" in capsys.readouterr().out
    main.reproduce(few)
    main.reproduce(replace(few, device="auto", dtype="auto"))  # any device and dtype will do
    assert capsys.readouterr().out.count(", 0 made now") == 2
    assert {name: (folder / f"{name}.json").stat().st_mtime_ns for name in few.only} == before
    main.RESULTS["width"] = {"command": WIDTH + " --input-seed 3"}
    main.RESULTS["deep/probe"] = {"command": PROBE.replace("4", "5")}
    main.reproduce(few)
    assert ", 2 made now" in capsys.readouterr().out


@pytest.mark.parametrize(
    "old, new",
    [("", "{"), ('"settings": {', '"settings": [], "was": {'), ('"rows": [', '"rows": 3, "r": [')]
    + [('"environment": {', '"environment": {}, "was": {')],
)
def test_a_damaged_result_is_made_anew(few, old, new):
    few = replace(few, only=("setup",))
    path = Path(few.out) / "setup.json"
    main.reproduce(few)
    text = path.read_text()
    path.write_text(text.replace(old, new) if old else new)
    main.reproduce(few)
    assert json.loads(path.read_text())["rows"] == json.loads(text)["rows"]


def test_a_figure_that_fails_leaves_no_result(few, monkeypatch):
    """The JSON is written last: it says that all is there."""

    def no_disk(*_, **__):
        raise UserError("no disk left")

    monkeypatch.setattr("contraction.curves", no_disk)
    with pytest.raises(UserError, match="width failed [(]no disk left"):
        main.reproduce(replace(few, only=("width",)))
    assert not (Path(few.out) / "width.json").exists() and (Path(few.out) / "README.md").exists()


def test_figures_are_drawn_from_what_is_there_alone(few, capsys):
    folder = Path(few.out)
    main.reproduce(replace(few, only=("width", "deep/probe", "setup")))
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 8.5}\n{"step": 2, "loss": 7.5}\n')
    (folder / "broken.json").write_text("{")
    drawn = {path: path.read_bytes() for path in folder.rglob("*.png")}
    for path in drawn:
        path.unlink()
    capsys.readouterr()
    main.reproduce(replace(few, figures=True))
    assert "3 results" in capsys.readouterr().out  # setup has no figure
    assert {path: path.read_bytes() for path in drawn} == drawn
    assert (folder / "run" / "loss.png").exists()


def test_every_committed_figure_can_be_drawn_anew(tmp_path, monkeypatch):
    """Each PNG of results/ comes from a JSON, or a log, beside it. (To render them would take 15 seconds.)"""
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).touch())
    for path in (ROOT / "results").rglob("*.json*"):
        target = tmp_path / path.relative_to(ROOT / "results")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    main.redraw(tmp_path)
    for path in (ROOT / "results").rglob("*.png"):
        assert (tmp_path / path.relative_to(ROOT / "results")).exists(), path


def committed(path: str) -> str:
    """A file as it was committed: commands that a user ran since may have written over it."""
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip(f"no commit with {path} here")
    return shown.stdout


def test_tables_of_the_docs_are_those_of_the_committed_results(tmp_path, monkeypatch):
    """Whatever stood below a mark, the committed rows come back; what is no table stays."""
    names = [*main.RESULTS, *tables.UNCLAIMED, *tables.PAPER_SCALE]
    results = {name: json.loads(committed(f"results/{name}.json")) for name in names}
    paths = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    texts = {path: committed(path) for path in paths}
    (tmp_path / "docs").mkdir()
    for name, text in texts.items():
        spoiled = re.sub(r"(<!-- table: .*-->\n)(?:\|.*\n)+", r"\1| spoiled |\n", text)
        assert ("| spoiled |" in spoiled) == ("<!-- table: " in text)
        (tmp_path / name).write_text(spoiled)
    assert sum(text.count("<!-- table: ") for text in texts.values()) == len(tables.TABLES)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    tables.write_tables(results)
    for name, text in texts.items():
        assert (tmp_path / name).read_text() == text


def test_a_table_by_hand():
    """Two births of one kind, one of another; a share of 1/8 and its bounds, in per cent."""
    row = {"test": "t", "inputs": "i", "model": "m", "scheme": "gpt2", "rate": 0.125, "low": 0.0, "high": 0.5}
    rows = [row, row | {"scheme": "normal", "rate": 1.0}, row | {"test": "u"}]
    assert tables.markdown(tables.error_rates({"errors": {"rows": rows}})).splitlines() == [
        "| inputs | test | m, gpt2 | m, normal |",
        "| --- | --- | --- | --- |",
        "| i | t | 12.5 (0.0 to 50.0) | 100.0 (0.0 to 50.0) |",
        "| i | u | 12.5 (0.0 to 50.0) | as gpt2 |",
    ]
    births = row | {"inputs": "weights", "test": "units"}
    table = tables.markdown(tables.headline({"errors": {"rows": [births, births | {"scheme": "normal"}]}}))
    assert table.splitlines()[0] == "| test | m |"
    assert table.splitlines()[2] == "| hidden units found again | 12.5 (0.0 to 50.0) |"
    rows = [
        {"test": "t", "tokens": 10_240, "times_fewer_tokens": None, "seconds": 1.23456, "log10_p": -1234.5}
    ]
    assert tables.markdown(tables.cost({"cost": {"rows": rows}})).splitlines()[2:] == [
        "| t | 10,240 | n/a | 1.235 | -1,234 |"
    ]


def test_how_far_a_child_may_be_changed_by_hand():
    """The last strength before a test first fails, in the order of the rows; ways of hiding have none."""
    same = {"change": "bits", "verdict": "same birth", "body_z": 9.0, "relabel_z": 9.0, "closed_form_z": None}
    rows = [
        same | {"strength": 8, "relabel_z": 4.0},
        same | {"strength": 4},
        same | {"strength": 2, "verdict": "no evidence"},
        same | {"change": "hiding", "strength": "rotate"},
    ]
    lines = tables.markdown(tables.power({"power": {"rows": rows}})).splitlines()
    assert lines[2:] == ["| bits | 8, 4, 2 | 4 | 2 | none | none |"]


@pytest.mark.parametrize("scale", ("smoke", "laptop", "paper"))
def test_every_run_that_a_command_reads_is_trained(scale, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = main.Settings(out="o", scale=scale, runs="r")
    family_settings = siblings.Settings(scale=scale, runs="r")
    runs = {"lineage": family.lineage_runs(family_settings), "": {}}
    runs["calibrations"] = siblings.calibration_runs(family_settings)
    runs["matching"] = siblings.matching_runs(family_settings)
    runs["strangers"] = family.stranger_runs(family_settings)
    for name in main.names_of(scale):
        result = main.RESULTS[name]
        folders = {run.out: run for run in runs[result.get("runs", "")].values()}
        words = shlex.split(main.command_line(name, settings))
        read = [word for word in words if word.startswith("r/")]
        assert set(read) <= set(folders), name
        presets = [word.split("@")[0] for word in words if "@" in word]
        presets += [folders[word].model for word in read if word.startswith("r/lineage")]
        assert len({PRESETS[preset].d_model for preset in presets}) < 2, name


@pytest.mark.parametrize("scale", main.WORDS)
def test_every_command_can_be_read(scale, tmp_path):
    settings = main.Settings(out=str(tmp_path), scale=scale, runs="runs")
    for name in main.names_of(scale):
        _, wanted = main.read_line(name, settings)
        assert Path(wanted.out) == (tmp_path / name).parent


def test_text_and_folder_stand_in_the_command(tmp_path):
    settings = main.Settings(out=str(tmp_path), runs="runs")
    text = tmp_path / "a b.txt"
    text.write_text("some text")
    _, wanted = main.read_line("calibrations", replace(settings, text=str(text)))
    assert wanted.text == str(text)
    assert "--out" not in main.command_line("width", replace(settings, out="results"))


def test_every_claim_reads_a_result_that_is_made():
    assert {claim.result for claim in CLAIMS if claim.result} == set(main.RESULTS)


def test_committed_results_are_those_of_the_commands():
    """What is committed was made with the settings that the commands have today."""
    settings = main.with_folders(main.Settings(out=str(ROOT / "results")))
    text = json.loads((ROOT / "results/calibrations.json").read_text())["settings"]["text"]
    stale = []
    for name in main.RESULTS:
        wanted = main.read_line(name, replace(settings, text=text if name == "calibrations" else None))[1]
        if not main.is_made(ROOT / f"results/{name}.json", wanted):
            stale.append(name)
    assert stale == []


def test_paper_scale_is_a_night():
    """What is committed of it was made by its commands; it reads no training run."""
    names = main.names_of("night")
    settings = main.Settings(out=str(ROOT / "results/paper_scale"), scale="night")
    assert not any("runs" in main.RESULTS[name] for name in names) and len(names) == 8
    with pytest.raises(UserError, match="width has no size for the night"):
        main.reproduce(replace(settings, only=("width",)))
    for name in names:
        path = ROOT / f"results/paper_scale/{name}.json"
        assert not path.exists() or main.is_made(path, main.read_line(name, settings)[1]), name


def test_smoke(quick_training, tmp_path):
    """The papers in small, trained and measured from nothing; then again, from what is there.

    Left out: what takes long and has tests of its own, or is a twin. `--scale smoke` makes all.
    """
    left_out = {"lineage", "matrix", "errors", "trained", "compare", "power", "recipes", "cost"}
    left_out |= {"qwen/persistence", "outside/identify"}
    left_out |= {name for name in main.RESULTS if name.endswith("/probe")} | {"nano_llama/cure"}
    left_out |= {name for name in main.RESULTS if name.startswith("laptop/")}  # here those of backcopy/
    left_out |= {"matching/rate", "matching/anatomy", "matching/intervene", "letter/intervene"}  # and these
    names = [name for name in main.RESULTS if name not in left_out]
    words = ("--scale", "smoke", "--out", tmp_path, "--only", *names)
    first = run_here("reproduce.__main__", *words)
    assert first.returncode == 0, first.stderr[-3000:]
    text = (tmp_path / "README.md").read_text()
    made = {claim.item for claim in CLAIMS if claim.result in names}
    for line in report_lines(text):
        assert line[0] not in made or line[3] not in ("", "not made"), line
    for path in re.findall(r"\[figure\]\((.*?)\)", text):
        assert (tmp_path / path).exists()
    again = run_here("reproduce.__main__", *words)
    assert again.returncode == 0 and ", 0 made now" in again.stdout, again.stderr
    assert text == (tmp_path / "README.md").read_text()
    assert not (ROOT / "results" / "runs").exists()
