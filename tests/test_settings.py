"""lib/settings.py: flags, config files, subcommands, and what a mistake in them is answered with."""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from conftest import plain
from tyro.conf import Positional, arg

from lib.settings import (
    Command,
    RunSettings,
    UserError,
    at_least,
    read_command,
    read_settings,
    run_script,
)


@dataclass
class Settings(RunSettings):
    """One setting of every type."""

    steps: at_least(1) = 100
    """optimizer steps, how many"""
    rate: at_least(0, float) = 0.5
    """learning rate, in 100 % of it"""
    name: str = "x"
    """what"""
    seed: tuple[int, ...] = (1, 2)
    """which"""
    length: tuple[at_least(2), ...] | None = None
    """how long, in tokens"""
    limit: int | None = None
    """at most"""
    kind: Literal["small", "large"] = "small"
    """size"""
    resume: bool = False
    """go on"""


@dataclass
class Pair(RunSettings):
    """Two models, and how many rows to compare."""

    base: Annotated[str, Positional, arg(metavar="BASE")] = ""
    """the older model"""
    suspect: Annotated[tuple[str, ...], Positional, arg(metavar="SUSPECT")] = ()
    """the others"""
    rows: at_least(2) = 64
    """rows of a matrix"""


def parse(*words) -> Settings:
    """The settings of a command line."""
    return read_settings(Settings(), [str(word) for word in words], "A test?")


# ---- flags -------------------------------------------------------------------------------------------------


def test_defaults_and_flags():
    assert parse() == Settings()
    given = parse("--steps", 7, "--rate", "1e-3", "--seed", 5, 6, 7, "--length", 64, "--limit=3", "--resume")
    assert (given.steps, given.rate, given.seed, given.length) == (7, 1e-3, (5, 6, 7), (64,))
    assert (given.limit, given.resume, given.kind, given.device) == (3, True, "small", "auto")
    assert parse("--seed", -4, "--no-resume").seed == (-4,)
    assert parse("--rate", 3).rate == 3


@pytest.mark.parametrize(
    "words, message",
    [
        (["--step", 3], ["--step", "Perhaps you meant", "--steps INT"]),
        (["--steps", "1.5"], ["--steps", "1.5"]),
        (["--device", "tpu"], ["--device", "tpu", "auto", "cpu", "cuda"]),
        (["stray"], ["stray"]),
        (["--steps", 3, "late.py"], ["late.py"]),  # a config file comes before the flags
    ],
)
def test_flags_that_tyro_refuses(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    assert stopped.value.code == 2
    printed = plain(capsys.readouterr().err)
    for word in message:
        assert word in printed


@pytest.mark.parametrize(
    "words, message",
    [
        (["--steps", 0], "Expected `int` >= 1 - at `$.steps`"),
        (["--length", 5, 1], "Expected `int` >= 2 - at `$.length"),
        (["--rate", "nan"], "Expected `float` >= 0.0 - at `$.rate`"),
        (["--rate", "1e400"], "Expected `float` <= 1"),
        (["--steps", 10**30], "`int` <= 1"),
        (["--seed", 3, 4, 3], "seed (3, 4, 3): expected one value or more"),
        (["--seed"], "seed (): expected one value or more"),
        (["missing.py"], "cannot read config file 'missing.py': there is no such file"),
    ],
)
def test_flags_that_are_refused(words, message):
    with pytest.raises(UserError) as error:
        parse(*words)
    assert message in str(error.value)


# ---- config files ------------------------------------------------------------------------------------------


def configured(tmp_path, text: str, *flags) -> Settings:
    """The settings of a config file and of flags after it."""
    config = tmp_path / "c.py"
    config.write_text(text)
    return parse(config, *flags)


def test_config_file_then_flags(tmp_path):
    text = '"""Why."""\nimport math\n_width = 4 * 32\nsteps = _width - 2**3  # 120\nrate = math.sqrt(0.25)\n'
    text += "seed = 3, 2 + 2\nresume = True\nkind = 'large'\nname = '--odd'\n"
    given = configured(tmp_path, text, "--steps", 9, "--no-resume")
    assert (given.steps, given.rate, given.seed, given.resume) == (9, 0.5, (3, 4), False)
    assert (given.kind, given.name, given.limit, given.length) == ("large", "--odd", None, None)
    assert configured(tmp_path, text, "--seed", 1).seed == (1,)
    assert configured(tmp_path, text) == Settings(
        steps=120, rate=0.5, seed=(3, 4), resume=True, kind="large", name="--odd"
    )


def test_values_that_fit_by_their_meaning(tmp_path):
    """A list for a tuple, a whole number for a float, None where it may be."""
    given = configured(tmp_path, "seed = [3]\nlength = None\nrate = 2\nlimit = None")
    assert (given.seed, given.length, given.rate, given.limit) == ((3,), None, 2.0, None)
    assert configured(tmp_path, "seed = [3, 4]\nlength = [8]").length == (8,)


@pytest.mark.parametrize(
    "text, words",
    [
        ("stepz = 3", ["stepz", "did you mean steps"]),
        ("def steps(): pass", ["steps", "int", "function"]),
        ("from math import pi", ["pi", "setting"]),
        ("steps = '3'", ["steps", "int", "str"]),
        ("steps = True", ["steps", "int", "bool"]),
        ("steps = 0", ["steps", ">= 1"]),
        ("rate = float('nan')", ["rate"]),
        ("seed = 3", ["seed", "array", "int"]),
        ("seed = 1, 2.5", ["seed", "int", "float"]),
        ("seed = 1, 1", ["seed"]),
        ("kind = 'larg'", ["kind", "larg"]),
        ("steps = 1 / 0", ["ZeroDivisionError: division by zero"]),
        ("steps = ", ["SyntaxError", "invalid syntax"]),
        ("import no_such_module", ["ModuleNotFoundError", "no_such_module"]),
    ],
)
def test_bad_config_files(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        configured(tmp_path, text)
    for word in words:
        assert word in str(error.value)
    assert str(tmp_path / "c.py") in str(error.value) or words == ["seed"]  # which was checked as a flag is


# ---- subcommands -------------------------------------------------------------------------------------------


def rate(settings: Settings) -> None:
    """Measure the rate.

    More about it.
    """


def compare(settings: Pair) -> None:
    """Compare two models."""


COMMANDS = {"rate": Command(rate, Settings()), "compare": Command(compare, Pair())}
COMMANDS[""] = COMMANDS["rate"]


def command(*words):
    """What a script of two subcommands is asked for."""
    return read_command(COMMANDS, [str(word) for word in words], "Which of two?")


def test_subcommands_and_the_default(tmp_path):
    config = tmp_path / "c.py"
    config.write_text("steps = 5")
    assert command() == (rate, Settings())
    assert command("--steps", 3) == (rate, Settings(steps=3))
    assert command("rate", "--steps", 3) == (rate, Settings(steps=3))
    for words in ([config, "--rate", 1], ["rate", config, "--rate", 1]):
        assert command(*words) == (rate, Settings(steps=5, rate=1))
    models = ("compare", "a", "b", "c", "--rows", 9)
    assert command(*models) == (compare, Pair(base="a", suspect=("b", "c"), rows=9))
    assert command("compare", "a", "b", "b")[1].suspect == ("b", "b")  # a check may compare twins
    with pytest.raises(SystemExit):  # tyro's refusal of a word that is no flag
        command("compar")
    for words in ([], ["--rows", "3"], ["compar"]):
        with pytest.raises(UserError, match="name a subcommand: compare"):
            read_command({"compare": COMMANDS["compare"]}, words, "One?")
    alone = {"": Command(rate, Settings())}
    assert read_command(alone, ["--steps", "3"], "One?") == (rate, Settings(steps=3))


def helped(capsys, *words) -> str:
    """What --help prints, on one line."""
    with pytest.raises(SystemExit) as stopped:
        command(*words)
    assert stopped.value.code == 0
    return plain(capsys.readouterr().out)


def test_help_lists_subcommands(capsys):
    text = helped(capsys, "--help")
    for part in ("Which of two?", "rate Measure the rate.", "compare Compare two models."):
        assert part in text


def test_help_names_every_flag_with_its_default(capsys):
    text = helped(capsys, "rate", "--help")
    for part in ("Measure the rate.", "--steps INT", "--kind {small,large}", "--resume", "--dtype", "--out"):
        assert part in text
    for part in ("optimizer steps, how many (default: 100)", "in 100 % of it", "(default: 1 2)", "CONFIG.py"):
        assert part in text
    text = helped(capsys, "compare", "--help")
    for part in ("BASE", "SUSPECT", "the older model", "rows of a matrix (default: 64)"):
        assert part in text


# ---- a script's whole life ---------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script whose only command is `work`: its exit status and what it says on stderr."""
    monkeypatch.setattr(sys, "argv", ["folder/script.py"])

    def run(work) -> tuple[int, str]:
        code = 0
        try:
            run_script({"": Command(work, RunSettings())}, "What?")
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr().err

    return run


def refuse(settings: RunSettings) -> None:
    """Refuse, and try to make the terminal red."""
    raise UserError("no model \x1b[31m\nx")


def test_mistakes_are_one_line_and_status_2(run, monkeypatch):
    assert run(lambda settings: None) == (0, "")
    assert run(refuse) == (2, "script.py: no model \\x1b[31m\\nx\n")
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        run(lambda settings: 1 / 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("RANK", "1")  # under torchrun every rank meets the same mistake
    assert run(refuse) == (2, "")


def test_too_little_memory(run):
    for take in (lambda settings: torch.empty(2**60), lambda settings: np.empty(2**50)):
        assert run(take) == (2, "script.py: there is too little memory: choose a smaller model or batch\n")
