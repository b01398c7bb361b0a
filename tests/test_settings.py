"""lib/settings.py: flags, config files, subcommands, and what a mistake in them is answered with."""

import io
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from conftest import ROOT, plain

from lib.settings import Command, RunSettings, UserError, at_least, read_command, run_script


@dataclass
class Settings(RunSettings):
    """One setting of every type."""

    steps: at_least(1) = 100  # optimizer steps, how many
    rate: at_least(0, float) = 0.5  # learning rate, in 100 % of it
    name: str = "x"  # what
    seed: tuple[int, ...] = (1, 2)  # which
    length: tuple[at_least(2), ...] | None = None  # how long, in tokens
    kind: Literal["small", "large"] = "small"  # size
    resume: bool = False  # go on


def rate(settings: Settings) -> None:
    """Measure the rate."""


def train(settings: Settings, config: Settings) -> None:
    """Train, from a config file, too."""


def begun(out):
    """The settings of a run that may be resumed."""
    return Settings(steps=7, name="begun", resume=True) if out == "there" else None


def compare(settings: RunSettings) -> None:
    """Compare two models."""


COMMANDS = {"rate": Command(rate, Settings()), "compare": Command(compare, RunSettings())}
COMMANDS[""] = COMMANDS["rate"]


def command(*words):
    return read_command(COMMANDS, [str(word) for word in words], "Which of two?")


def test_flags():
    assert command() == (rate, Settings())
    _, given = command("--steps", 7, "--rate", "1e-3", "--seed", 5, 6, -7, "--length=64", "--resume")
    assert given == Settings(steps=7, rate=1e-3, seed=(5, 6, -7), length=(64,), resume=True)


def test_help_says_what_each_setting_means(capsys):
    with pytest.raises(SystemExit):
        command("rate", "--help")
    printed = plain(capsys.readouterr().out)
    for meaning in ("optimizer steps, how many", "learning rate, in 100 % of it", "how long, in tokens"):
        assert meaning in printed


def test_config_file_then_flags(tmp_path):
    config = tmp_path / "c.py"
    text = '"""Why."""\nimport math\n_width = 4 * 32\nsteps = _width - 2**3  # 120\nrate = 2\n'
    text += "seed = [3, 2 + 2]\nkind = 'large'\nname = '--odd'\nlength = None"
    config.write_text(text)
    file = Settings(steps=120, rate=2.0, seed=(3, 4), kind="large", name="--odd")
    commands = {"": Command(train, Settings(), begun)}
    assert read_command(commands, [str(config)], "?") == (train, file, file)
    words = [str(config), "--steps", "9", "--seed", "1"]
    assert read_command(commands, words, "?") == (train, replace(file, steps=9, seed=(1,)), file)
    # A run that is resumed has its own settings as defaults.
    ours = begun("there")
    for words in (["--out", "there"], ["--out=there"]):
        resumed = read_command(commands, ["--resume", *words, "--steps", "100"], "?")
        assert resumed == (train, replace(ours, steps=100, out="there"), ours)
    words = [str(config), "--resume", "--out", "there"]
    changed = replace(file, resume=True)
    assert read_command(commands, words, "?") == (train, replace(changed, out="there"), changed)
    assert read_command(commands, ["--resume"], "?") == (
        train,
        Settings(resume=True),
        Settings(),
    )  # no run is there


def test_subcommands():
    assert command("--steps", 3) == command("rate", "--steps", 3) == (rate, Settings(steps=3))
    assert command("compare", "--out", "x") == (compare, RunSettings(out="x"))
    with pytest.raises(UserError, match="name a subcommand: compare"):
        read_command({"compare": COMMANDS["compare"]}, [], "One?")
    with pytest.raises(UserError, match="unknown subcommand 'rates': did you mean rate"):
        command("rates")


def refusal(monkeypatch, capsys, *words, commands=COMMANDS) -> str:
    """What a script says on stderr that ends with status 2."""
    monkeypatch.setattr(sys, "argv", ["folder/script.py", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        run_script(commands, "What?")
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--step", 3], "--steps INT"),
        (["--steps", 3, "late.py"], "late.py"),  # a config file comes before the flags
        (["--steps", 0], "Expected `int` >= 1 - at `$.steps`"),
        (["missing.py"], "unknown config file 'missing.py'"),
        ("stepz = 3", "c.py"),
        ("steps = '3'", "`int`"),
        ("steps = 1 / 0", "ZeroDivisionError"),
    ],
)
def test_refusals(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if isinstance(words, str):
        (tmp_path / "c.py").write_text(words)
        words = ["c.py"]
    commands = {**COMMANDS, "": Command(train, Settings(), begun)}
    assert message in plain(refusal(monkeypatch, capsys, *words, commands=commands))


def test_mistakes_are_one_line_and_faults_keep_their_traceback(monkeypatch, capsys):
    def refuse(settings: RunSettings) -> None:
        """Refuse, and try to make the terminal red."""
        raise UserError("no model \x1b[31m\nx")

    def fail(settings: RunSettings) -> None:
        """Fail, by a fault of the program."""
        settings / 0

    commands = {"": Command(refuse, RunSettings())}
    assert refusal(monkeypatch, capsys, commands=commands) == "script.py: no model \\x1b[31m\\nx\n"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("RANK", "1")  # under torchrun every rank meets the same mistake
    assert refusal(monkeypatch, capsys, commands=commands).startswith("script.py: rank 1: no model")
    with pytest.raises(TypeError):
        run_script({"": Command(fail, RunSettings())}, "What?")


def test_optional_packages_are_not_imported():
    script = "import sys, contraction, probe, seedprint, sinks, train, reproduce.robustness\n"
    script += "sys.exit(len({'datasets', 'transformers', 'huggingface_hub'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_a_text_that_stdout_cannot_spell(monkeypatch):
    def say(settings: RunSettings) -> None:
        """Say it."""
        print("caf\u00e9" + chr(0xD800))

    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    run_script({"": Command(say, RunSettings())}, "What?")
    out.flush()
    assert out.buffer.getvalue().endswith(b"caf\\xe9\\ud800\n")
