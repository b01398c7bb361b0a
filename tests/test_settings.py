"""lib/settings.py: flags, config files, subcommands, and what a mistake in them is answered with."""

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from conftest import ROOT, module_name, plain, python_files, run_here

from lib.settings import Command, RunSettings, UserError, at_least, read_command, run_script

# Whose help is read: every script with settings.
SCRIPTS = [module_name(path) for path in python_files() if "\nCOMMANDS = " in path.read_text()]


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
    """Measure the rate.

    More about it.
    """


def compare(settings: RunSettings) -> None:
    """Compare two models."""


COMMANDS = {"rate": Command(rate, Settings()), "compare": Command(compare, RunSettings())}
COMMANDS[""] = COMMANDS["rate"]


def command(*words):
    """What a script of two subcommands is asked for."""
    return read_command(COMMANDS, [str(word) for word in words], "Which of two?")


def test_flags():
    assert command() == (rate, Settings())
    _, given = command("--steps", 7, "--rate", "1e-3", "--seed", 5, 6, -7, "--length=64", "--resume")
    assert given == Settings(steps=7, rate=1e-3, seed=(5, 6, -7), length=(64,), resume=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_each_setting_means(script):
    """In each command's help, the trailing comment of each of its own fields; tyro breaks lines."""
    commands = importlib.import_module(script).COMMANDS
    for name, command in commands.items():
        printed = "".join(plain(run_here(script, *filter(None, [name]), "--help").stdout).split())
        if name or len(commands) == 1:  # "" is one of the others, or in a list of them
            source = inspect.getsource(type(command.defaults))
            for meaning in re.findall(r"^    \w+: .* = .*?  # (.+)$", source, re.MULTILINE):
                assert "".join(meaning.split()) in printed, meaning


def test_names_that_complete_a_command(tmp_path):
    """A command may look at what flags and config files named: also where they give the default."""
    commands = {"": Command(rate, Settings(), lambda settings, *names: (settings.steps, *names))}
    words = ["--steps", "100", "--no-resume", "--kind=large", "--seed", "-7"]
    flags = {"steps", "resume", "kind", "seed"}
    assert read_command(commands, words, "?") == (rate, (100, flags, set()))
    (tmp_path / "c.py").write_text("import math\nsteps = 100\n_rate = math.pi")
    (tmp_path / "d.py").write_text("name = 'y'")
    files = [str(tmp_path / "c.py"), str(tmp_path / "d.py")]
    assert read_command(commands, files + words, "?") == (rate, (100, flags, {"steps", "name"}))


def test_config_file_then_flags(tmp_path):
    config = tmp_path / "c.py"
    text = '"""Why."""\nimport math\n_width = 4 * 32\nsteps = _width - 2**3  # 120\nrate = 2\n'
    text += "seed = [3, 2 + 2]\nresume = True\nkind = 'large'\nname = '--odd'\nlength = None"
    config.write_text(text)
    expected = Settings(steps=120, rate=2.0, seed=(3, 4), resume=True, kind="large", name="--odd")
    assert command(config) == command("rate", config) == (rate, expected)
    _, given = command(config, "--steps", 9, "--no-resume", "--seed", 1)
    assert (given.steps, given.rate, given.seed, given.resume) == (9, 2.0, (1,), False)


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
        (["--step", 3], ["--step", "Perhaps you meant", "--steps INT"]),
        (["--steps", 3, "late.py"], ["late.py"]),  # a config file comes before the flags
        (["--steps", 0], ["Expected `int` >= 1 - at `$.steps`"]),
        (["missing.py"], ["unknown config file 'missing.py'"]),
        ([ROOT / "configs" / "labtop.py"], ["did you mean", "configs/laptop.py"]),
        ("stepz = 3", ["stepz", "did you mean steps"]),
        ("steps = '3'", ["steps", "int", "str"]),
        ("steps = 1 / 0", ["ZeroDivisionError: division by zero"]),
    ],
)
def test_refusals(words, message, tmp_path, monkeypatch, capsys):
    """Of flags, and of the texts of a config file."""
    monkeypatch.chdir(tmp_path)
    if isinstance(words, str):
        (tmp_path / "c.py").write_text(words)
        words, message = ["c.py"], [*message, "c.py"]
    printed = plain(refusal(monkeypatch, capsys, *words))
    for word in message:
        assert word in printed


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
    assert refusal(monkeypatch, capsys, commands=commands) == ""
    with pytest.raises(TypeError):
        run_script({"": Command(fail, RunSettings())}, "What?")


HELP = """
import os, sys, contraction, probe, seedprint, sinks, train, reproduce.robustness
assert not {"datasets", "transformers", "huggingface_hub"} & sys.modules.keys()
sys.argv = ["probe.py", "--help"]
reader, closed = os.pipe()
os.close(reader)
for number in (os.open("/dev/full", os.O_WRONLY), closed):
    if os.fork() == 0:
        os.dup2(number, 1)
        sys.stdout = open(1, "w")
        probe.run_script(probe.COMMANDS, probe.__doc__)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 2
probe.run_script(probe.COMMANDS, probe.__doc__)
"""


def test_a_stdout_that_fails_is_told_and_optional_packages_are_not_imported():
    """By a line, and a status that is not 0: of a full disk, a reader that ended, and none from the start."""
    words = shlex.join([sys.executable, "-c", HELP])
    done = subprocess.run(["bash", "-c", f"{words} >&-"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 2, lines
    for word, line in zip(("is full", "stdout was closed", "stdout is closed"), lines, strict=True):
        assert word in line


SURROUNDINGS = [
    (MemoryError(), "--micro-batch-size"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "--micro-batch-size"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9"), "--micro-batch-size"),
    (RuntimeError("No working C++ compiler found in config.cpp.cxx: (None, 'g++')"), "--no-compile"),
]


@pytest.mark.parametrize("error, remedy", SURROUNDINGS)
def test_surroundings_that_fail_are_named(error, remedy, monkeypatch, capsys):
    def fail(settings: RunSettings) -> None:
        """Fail, by no fault of the program."""
        raise error

    message = refusal(monkeypatch, capsys, commands={"": Command(fail, RunSettings())})
    assert remedy in message and message.count("\n") == 1


def test_a_text_that_stdout_cannot_spell(tmp_path):
    script = "from lib.settings import *\ndef f(s):\n    'F.'\n    print('caf\u00e9' + chr(0xd800))\n"
    script += "run_script({'': Command(f, RunSettings())}, 'What?')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, env=environment)
    assert done.returncode == 0 and done.stdout.endswith(b"caf\\xe9\\ud800\n"), done.stderr
