"""common.py: settings, shards, statistics, and files that survive a failure."""

import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import common
import experiment
import figures
import findings
from common import UserError, parse_settings, setting


@dataclass
class Settings(common.RunSettings):
    """One setting of every type."""

    steps: int = setting(100, "how many")
    rate: float = setting(0.5, "how fast, in 100 % of it")
    name: str = setting("x", "what")
    seed: tuple[int, ...] = setting((1, 2), "which")
    length: tuple[int, ...] | None = setting(None, "how long")
    limit: int | None = setting(None, "at most")
    kind: str = setting("small", "size", ("small", "large"))
    resume: bool = setting(False, "go on")


def parse(*arguments) -> Settings:
    return parse_settings(Settings, "A test.", [str(a) for a in arguments])


def test_defaults_and_flags():
    assert parse() == Settings()
    given = parse("--steps", 7, "--rate", "1e-3", "--seed", 5, 6, 7, "--length", 64, "--limit=3", "--resume")
    assert (given.steps, given.rate, given.seed, given.length) == (7, 1e-3, (5, 6, 7), (64,))
    assert (given.limit, given.resume, given.kind, given.device) == (3, True, "small", "auto")
    assert parse("--seed", -4, "--no-resume").seed == (-4,)


def test_config_file_then_flags(tmp_path):
    config = tmp_path / "quick.py"
    config.write_text(
        '"""Why."""\nsteps = 4 * 32 - 2**3  # 120\nrate = -(3 * 4) / -96\nseed = (3, 2 + 2)\nresume = True\n'
        "limit = -1\n"
    )
    given = parse(config, "--steps", 9)
    assert (given.steps, given.rate, given.seed, given.resume, given.limit) == (9, 0.125, (3, 4), True, -1)
    config.write_text("resume = False\nkind = 'large'\nname = '--odd'\nrate = 2\nlength = [8]\nseed = 3, 4")
    given = parse("--resume", config)
    assert (given.kind, given.length, given.resume, given.name) == ("large", (8,), True, "--odd")
    assert given.rate == 2 and parse(config, "--seed", 1).seed == (1,) and parse(config).seed == (3, 4)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--step", 3], ["--step", "--steps"]),
        (["--sed=3"], ["--sed", "--seed"]),
        (["--zzz"], ["--zzz", "--steps"]),
        (["--steps", "many"], ["--steps", "int", "many"]),
        (["--steps", "1.5"], ["--steps", "1.5"]),
        (["--steps"], ["--steps", "one argument"]),
        (["--seed"], ["--seed", "at least one"]),
        (["--kind", "huge"], ["--kind", "huge", "large"]),
        (["--device", "tpu"], ["--device", "tpu", "did you mean cpu?"]),
        (["a.py", "b.py"], ["unexpected", "b.py"]),
        (["missing.py"], ["missing.py", "No such file"]),
    ],
)
def test_bad_flags(arguments, words):
    with pytest.raises(UserError) as error:
        parse(*arguments)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("stepz = 3", ["c.py:1", "stepz", "did you mean steps"]),
        ("steps = '3'", ["c.py:1", "steps", "int", "'3'"]),
        ("steps = 1e3", ["c.py:1", "steps", "int", "1000.0"]),
        ("\nsteps = open('x')", ["c.py:2", "literal"]),
        ("steps = __import__('os').system('touch hacked')", ["c.py:1", "literal"]),
        ("steps = 1 / 0", ["c.py:1"]),
        ("steps = True", ["c.py:1", "int", "True"]),
        ("steps = rate = 3", ["c.py:1", "NAME = VALUE"]),
        ("seed = ()", ["c.py:1", "seed"]),
        ("seed = 1, 2.5", ["c.py:1", "seed", "int"]),
        ("steps = 1, 2", ["c.py:1", "steps", "int"]),
        ("limit = None", ["c.py:1", "limit", "int"]),
        ("name = 5", ["c.py:1", "name", "str"]),
        ("steps = 'a' - 1", ["c.py:1"]),
        ("steps = 10**10**10", ["c.py:1"]),
        ("steps = " + "1+" * 5000 + "1", ["c.py"]),
        ("import os", ["c.py:1", "NAME = VALUE"]),
        ("for i in (): pass", ["c.py:1", "NAME = VALUE"]),
        ("steps = ", ["c.py", "invalid syntax"]),
        ("kind = 'larg'", ["--kind", "larg", "did you mean large"]),
        ("resume = 3", ["c.py:1", "resume", "bool"]),
    ],
)
def test_bad_config_files(tmp_path, text, words):
    config = tmp_path / "c.py"
    config.write_text(text)
    with pytest.raises(UserError) as error:
        parse(config)
    for word in words:
        assert word in str(error.value)
    assert not Path("hacked").exists()


def test_config_files_that_are_no_text(tmp_path):
    for content in (b"\xff\xfe\x00steps", b"steps = 1\x00"):
        (tmp_path / "c.py").write_bytes(content)
        with pytest.raises(UserError, match="c.py"):
            parse(tmp_path / "c.py")
    with pytest.raises(UserError, match="directory"):
        parse(tmp_path)


def test_help_names_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as status:
        parse("--help")
    assert status.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for flag in (
        "--steps N",
        "--seed N [N ...]",
        "--kind small|large",
        "--no-resume",
        "--dtype",
        "--out NAME",
    ):
        assert flag in text
    assert "(default: 1 2)" in text and "(default: 100)" in text and "in 100 % of it" in text


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shards_partition_the_range(monkeypatch, count, world):
    shards = []
    monkeypatch.setattr(common, "world_size", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(common, "rank", lambda rank=rank: rank)
        shards.append(common.shard(count))
    assert list(itertools.chain(*shards)) == list(range(count))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_atomic_path_keeps_the_old_file_on_failure(tmp_path):
    path = tmp_path / "a.json"
    with common.atomic_path(path) as temporary:
        temporary.write_text("old")
    with pytest.raises(RuntimeError), common.atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def write_big(out: Path, setup: str = "") -> subprocess.CompletedProcess:
    """Save a result of about a megabyte in a process of its own."""
    code = f"""
import common, experiment, sys
sys.argv[0] = "big.py"
settings = common.RunSettings(out={str(out)!r}, device="cpu")
def plan(words):
    common.start(settings)
    {setup}
    result = dict(experiment="big", rows=[{{"x": list(range(200_000))}}])
    experiment.save(result, common.Path(settings.out))
    return []
common.run(plan)
"""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_full_disk(tmp_path):
    """A file size limit stands in for a disk that fills while the result is written."""
    (tmp_path / "big.json").write_text("old")
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    result = write_big(
        tmp_path, limit + f"resource.setrlimit(resource.RLIMIT_FSIZE, ({2**16}, {resource.RLIM_INFINITY}))"
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "big.json" in result.stderr, (
        result.stderr
    )
    assert (tmp_path / "big.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_unwritable_out(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere"), "null\0byte"):
        with pytest.raises(UserError, match=re.escape(repr(str(out)))):
            common.start(common.RunSettings(out=str(out)))
    result = write_big(tmp_path / "file")
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr


def test_killed_while_writing_leaves_no_half_file(tmp_path):
    setup = f"import os, signal; os.replace = lambda *_: os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert write_big(tmp_path, setup).returncode == -signal.SIGKILL
    assert not (tmp_path / "big.json").exists()
    assert write_big(tmp_path).returncode == 0
    assert len(json.loads((tmp_path / "big.json").read_text())["rows"][0]["x"]) == 200_000


def test_the_json_is_exact_and_a_line_an_item(tmp_path, capsys):
    rows = [
        {"name": "[1,  2]", "value": 0.1 + 0.2, "none": None},
        {"name": "}, {", "value": 1e-300, "none": None},
    ]
    claims = [findings.claim("it is so", None, 3, True), findings.claim("it is not", 58.5, 0.1, False)]
    settings = common.RunSettings(out=str(tmp_path))
    measure = lambda *_: {"rows": rows, "details": [[1, 2], [3]]}  # noqa: E731
    experiment.conduct(settings, "x", "BB", measure, "name value absent", lambda rows: claims, plot=None)
    text = (tmp_path / "x.json").read_text()
    saved = json.loads(text)
    assert saved["rows"] == rows and saved["claims"] == claims and saved["details"] == [[1, 2], [3]]
    assert saved["environment"]["torch"] == torch.__version__ and saved["settings"]["out"] == str(tmp_path)
    assert f"  {json.dumps(rows[0])}," in text.splitlines()
    printed = capsys.readouterr().out
    assert "[1,  2]     0.3\n" in printed and "holds: it is so (measured 3)\n" in printed
    assert "does not hold: it is not (measured 0.1, paper 58.5)\n" in printed
    with pytest.raises(ValueError):  # NaN is no JSON
        experiment.conduct(
            settings, "x", "BB", lambda *_: {"rows": [{"name": math.nan}]}, judge=list, plot=None
        )
    assert (tmp_path / "x.json").read_text() == text


def test_other_errors_keep_their_traceback():
    code = "import common\ncommon.run(lambda words: 1 / 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "ZeroDivisionError" in result.stderr


def test_device_and_dtype(tmp_path, monkeypatch):
    def start(**settings):
        return common.start(common.RunSettings(out=str(tmp_path / "new" / "folder"), **settings))

    settings, *on = start(device="cpu", dtype="float32")
    assert on == [torch.device("cpu"), torch.float32]
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    for bfloat16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda bfloat16=bfloat16: bfloat16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert start(device="cpu")[2] == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start()[1].type == "cpu"
    with pytest.raises(UserError, match="--device cpu"):
        start(device="cuda")


def test_environment_names_the_commit_or_nothing():
    record = experiment.environment(torch.device("cpu"), torch.bfloat16)
    assert record["dtype"] == "bfloat16" and record["processes"] == 1 and record["torch"] == torch.__version__
    assert record["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["commit"])
    assert record["device"] and os.sep not in record["device"]


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], ("all", [])),
        (["layers", "--seed", "3"], ("layers", ["--seed", "3"])),
        (["--seed", "3"], ("all", ["--seed", "3"])),
        (["quick.py", "--seed", "3"], ("all", ["quick.py", "--seed", "3"])),
    ],
)
def test_subcommand(words, expected):
    assert common.subcommand(words, ("layers", "all"), "all", "experiment") == expected


def test_unknown_subcommand_names_the_closest():
    with pytest.raises(UserError, match="did you mean a/rate or b/rate"):
        common.choose("rate", ("calibrate", "a/rate", "b/rate"), "experiment")
    with pytest.raises(UserError, match="unknown experiment 'layer': did you mean layers"):
        common.subcommand(["layer"], ("layers", "all"), "all", "experiment")


def test_long_series_are_printed_at_powers_of_two_and_the_end(capsys):
    rows = [{"layer": layer, "c": layer / 8} for layer in range(13)]
    experiment.print_result({"rows": rows, "claims": []}, "layer c")
    shown = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == [0, 1, 2, 4, 8, 12]


def test_a_folder_that_a_process_of_our_number_left_half_written(tmp_path):
    left = tmp_path / f".run.{os.getpid()}.new.tmp"  # as in containers, where numbers come again
    left.mkdir()
    (left / "torn").write_text("half")
    with common.atomic_folder(tmp_path / "run") as new:
        (new / "whole").write_text("all")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["whole"] and not left.exists()


def test_ticks_of_logarithmic_axes_are_plain_text(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    points = [dict(x=10**i, y=3.0**-i, s="costs $1 and $2") for i in range(4)]
    figures.curves(points, tmp_path / "x.png", "x", "y", "s", {}, ("x", "y"), log="xy")
    drawn[0].draw_without_rendering()
    (axes,) = drawn[0].axes
    ticks = axes.get_xticklabels(which="both") + axes.get_yticklabels(which="both")
    shown = {tick.get_text() for tick in ticks}
    assert {"1", "10", "1000", "0.1"} <= shown and not any("$" in text for text in shown), shown
