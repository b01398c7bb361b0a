"""paper.py: what it makes, leaves out, reports and writes; and a smoke test of its every command."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, run_here

import experiment
import families
import paper
from common import UserError
from model import PRESETS

PROBE = "probe.py --model tiny_gpt2 --num-sequences 4 --sequence-length 2"
WIDTH = "contraction.py width --seed 1 2 --num-sequences 8"


@pytest.fixture
def few(tmp_path, monkeypatch):
    """paper.py with four experiments, one of which fails, in a folder with a blank."""
    tmp_path = tmp_path / "a b"
    broken = "sinks.py rate --model nowhere"
    commands = {"setup": paper.COMMANDS["setup"], "deep/probe": (PROBE, "", ""), "rate": (broken, "", "")}
    monkeypatch.setattr(paper, "COMMANDS", commands | {"width": (WIDTH, "", "")})
    rows = (("Table 1", "deep/probe", "Finding 1.1"), ("Figure 12", "rate", ""), ("Width", "width", "gelu"))
    monkeypatch.setattr(paper, "COVERAGE", (*rows, ("Table 6", "python seedprint.py compare A B", "")))
    return paper.Settings(out=str(tmp_path), runs=str(tmp_path / "runs"), device="cpu", dtype="float32")


def test_a_failure_stops_nothing_and_is_reported(few, capsys):
    tmp_path = Path(few.out)
    with pytest.raises(UserError, match="rate failed .*nowhere"):
        paper.run(few)
    assert {"setup.json", "width.json", "width.png", "deep", "README.md"} <= {
        p.name for p in tmp_path.iterdir()
    }
    text = (tmp_path / "README.md").read_text()
    rows = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert (
        "| not made |" in rows["Figure 12"] and "tanh" not in text and "| not run here |" in rows["Table 6"]
    )
    assert "`python seedprint.py compare A B`" in rows["Table 6"]
    result = json.loads((tmp_path / "deep" / "probe.json").read_text())
    claim = next(c for c in result["claims"] if "Finding 1.1" in c["claim"])
    assert f"| {claim['claim']} | BB | n/a | {claim['measured']} |" in rows["Table 1"]
    assert f"--out '{tmp_path}/deep'`" in rows["Table 1"] and "[figure](deep/probe.png)" in rows["Table 1"]
    assert len(re.findall("^[|] Width ", text, re.MULTILINE)) == 2
    assert f"{tmp_path}/README.md" in capsys.readouterr().out


def test_what_is_there_is_left_out_unless_its_settings_changed(few, capsys):
    tmp_path = Path(few.out)
    few = replace(few, only=("width", "deep/probe", "setup"))
    paper.run(few)
    before = {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in few.only}
    assert ", 3 made now" in capsys.readouterr().out
    paper.run(few)
    paper.run(replace(few, device="auto", dtype="auto"))  # any device and dtype will do
    assert capsys.readouterr().out.count(", 0 made now") == 2
    assert {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in few.only} == before
    paper.COMMANDS["width"] = (WIDTH + " --input-seed 3", "", "")
    paper.COMMANDS["deep/probe"] = (PROBE.replace("4", "5"), "", "")
    paper.run(few)
    assert ", 2 made now" in capsys.readouterr().out
    text = (tmp_path / "setup.json").read_text()
    wrong = (
        ('"environment": {', '"environment": {}, "was": {'),
        ('"claim":', '"clam":'),
        ('"experiment":', '"experience":'),
        ('"rows": [', '"rows": 3, "r": ['),
    )
    wrong += (('"settings": {', '"settings": [], "was": {'),)
    for damage in ("{", "[]", '{"rows": []}', "", *(text.replace(old, new) for old, new in wrong)):
        (tmp_path / "setup.json").write_text(damage)
        paper.run(replace(few, only=("setup",)))
        assert ", 1 made now" in capsys.readouterr().out
        assert json.loads((tmp_path / "setup.json").read_text())["rows"] == json.loads(text)["rows"]
    paper.run(replace(few, dtype="bfloat16"))
    assert ", 2 made now" in capsys.readouterr().out


def test_a_figure_that_fails_leaves_no_result(few, monkeypatch):
    """The JSON is written last: it says that all is there."""

    def broken(*_):
        raise UserError("no disk left")

    monkeypatch.setattr(experiment, "draw", broken)
    with pytest.raises(UserError, match="width failed [(]no disk left"):
        paper.run(replace(few, only=("width",)))
    assert not (Path(few.out) / "width.json").exists() and (Path(few.out) / "README.md").exists()


def test_an_interruption_writes_the_tables_of_what_is_there(few, monkeypatch):
    paper.run(replace(few, only=("width",)))
    (Path(few.out) / "README.md").unlink()
    monkeypatch.setattr(paper, "train_for", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        paper.run(replace(few, only=("deep/probe",)))
    assert "gelu" in (Path(few.out) / "README.md").read_text()


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_every_run_that_a_command_reads_is_trained_by_a_family(scale):
    s = paper.Settings(out="o", scale=scale, runs="r")
    made = {
        run.out: run
        for name in families.EXPERIMENTS
        for run in families.EXPERIMENTS[name][0](families.Settings(size=scale, runs="r")).values()
    }
    for name in paper.COMMANDS:
        words = shlex.split(paper.command(name, s))
        for word in words:
            if word.startswith("r/"):
                assert word in made, (name, word)
                model = made[word].model
                assert not word.startswith("r/lineage") or Path(word).name.startswith(model)
        widths = {PRESETS[w.split("@")[0]].d_model for w in words if "@" in w}
        widths |= {PRESETS[made[w].model].d_model for w in words if w.startswith("r/lineage")}
        assert len(widths) < 2, name


def test_every_command_can_be_read_at_every_scale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.txt").write_text("some text")
    for scale in ("smoke", "laptop", "paper"):
        s = paper.Settings(out=str(tmp_path), scale=scale, runs="runs")
        for name in paper.COMMANDS:
            settings, _ = paper.planned(name, s)
            assert settings.out.rstrip("/.") == str(tmp_path / name).rsplit("/", 1)[0]
            assert name != "calibrations" or settings.text is None
    told = replace(s, text="a b.txt")
    words = shlex.split(paper.command("calibrations", told))
    assert words[-4:] == ["--text", "a b.txt", "--out", str(tmp_path)]
    assert paper.planned("calibrations", told)[0].text == "a b.txt"
    assert "--out" not in paper.command("width", replace(s, out="results"))


def test_every_table_and_figure_of_the_papers_has_a_line():
    items = " ".join(item for item, _, _ in paper.COVERAGE)
    items = items.replace("Tables 1a-c", "").replace("Figures 2 and 7", "")
    for number in range(1, 15):
        assert re.search(rf"Table {number}\b|Table {number}a", items), f"Table {number}"
        assert re.search(rf"Figure {number}\b|Figure {number}a", items), f"Figure {number}"
    named = "Finding 1.1|Finding 1.2|Finding 1.3|Finding 2.1|Finding 2.2|Proposition 2|Proposition 4"
    named += "|Proposition 5|Equation 2|Footnote 5|SO: headnorm|SO: interventions"
    spoken = items + " ".join(words for _, _, words in paper.COVERAGE)
    assert [word for word in named.split("|") if word not in spoken] == []


def test_tables_13_and_14_are_compared_number_by_number():
    rows = paper.setup(None)["rows"]
    assert all(claim["holds"] for claim in paper.judge_setup(rows)) and len(rows) == 15
    other = [row | dict(ours=11) if row["name"] == "num_layers" else row for row in rows]
    assert [(c["holds"], c["measured"]) for c in paper.judge_setup(other)] == [
        (False, "8 of 9"),
        (True, "6 of 6"),
    ]


def test_smoke(quick_training, tmp_path):
    """The papers in small, trained and measured from nothing; then again, from what is there.

    Left out: what takes long and has tests of its own, or is a twin. `--scale smoke` makes all.
    """
    left_out = {"matrix", "calibrate", "compare", "cost", "qwen/persistence", "outside/identify"}
    left_out |= {name for name in paper.COMMANDS if name.endswith("/probe")} | {"nano_llama/cure"}
    names = [name for name in paper.COMMANDS if name not in left_out]
    done = run_here("paper.py", "--scale", "smoke", "--out", tmp_path, "--only", *names)
    assert done.returncode == 0, done.stderr[-3000:]
    text = (tmp_path / "README.md").read_text()
    assert {name for _, name, _ in paper.COVERAGE if name in paper.COMMANDS} == {*paper.COMMANDS}
    for item, name, words in paper.COVERAGE:
        assert f"| {item} |" in text, (item, name, words)
        assert name not in names or f"| {item} |  |  | not made |" not in text
    for _, path in re.findall(r"\[(figure)\]\((.*?)\)", text):
        assert (tmp_path / path).exists()
    again = run_here("paper.py", "--scale", "smoke", "--out", tmp_path, "--only", *names)
    assert again.returncode == 0 and ", 0 made now" in again.stdout, again.stderr
    assert text == (tmp_path / "README.md").read_text()
    assert not (ROOT / "results" / "runs").exists()
