"""Flags, config files and users' mistakes.

A script describes its settings once, in a dataclass. tyro makes the flags and `--help` from it:

    python train.py configs/laptop.py --seed 7      # the file's values first, then the flags
    python sinks.py --model runs/laptop             # the default subcommand, `rate`
    python seedprint.py compare --help              # positional models, flags, units, defaults
"""

import contextlib
import dataclasses
import difflib
import inspect
import itertools
import os
import runpy
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch.distributed as dist
import tyro

CONFIG_HELP = "\n\nA CONFIG.py before the flags has lines NAME = VALUE."
MEETING = timedelta(minutes=10)  # how long ranks wait for a rank that has not started
LESS = "out of memory: try a smaller --micro-batch-size or --batch-size"
REMEDIES = {  # for failures of the machine: words of the error, and what to do
    "MemoryError": LESS,
    "t allocate memory": LESS,
    "C++ compiler": "no working C++ compiler: --no-compile needs none",
    "C compiler": "no working C compiler: --no-compile needs none",
    "Broken pipe": "stdout was closed too early: redirect it to a file",
    "No space left": "the disk of stdout or of a file is full",
    "wait timeout": "a rank did not start: see its own output",
}


class UserError(Exception):
    """A user's mistake: the message says what is wrong, what was expected and what to do."""


class Command(NamedTuple):
    """A subcommand in a script's COMMANDS; the one named "" is the default."""

    function: Callable
    defaults: object  # the settings of an empty command line
    complete: Callable | None = None  # (settings, names from flags, from files) -> settings
    has_config: bool = True  # a word ending in .py before the flags is a config file


@dataclasses.dataclass
class OutputSettings:
    """Settings of every command that writes results."""

    out: str = "out"  # folder that receives the JSON and PNG files


@dataclasses.dataclass
class RunSettings(OutputSettings):
    """Settings of every command that runs a model."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # where to compute; auto: cuda, then cpu
    dtype: Literal["float32", "bfloat16"] = "float32"  # number format of the blocks


def at_least(least, kind=int):
    """The type of numbers from `least` to 2^24."""
    return Annotated[kind, msgspec.Meta(ge=least, le=2**24)]


def closest(name, choices, cutoff=0.6):
    """The choice that a misspelt name resembles most; "" if it resembles none."""
    return "".join(difflib.get_close_matches(name, choices, n=1, cutoff=cutoff))


def check_choice(name, choices, what) -> None:
    """UserError, naming the closest choice or all of them, if a name is not one of the choices."""
    if name not in choices:
        meant = closest(name, choices)
        hint = f"did you mean {meant}?" if meant else f"choose from {', '.join(choices)}"
        raise UserError(f"unknown {what} {name!r}: {hint}")


def read_command(commands, words, document):
    """The function and settings that a command line asks for; `document` is the script's docstring."""
    subcommands = [name for name in commands if name]
    name = ""
    if words and words[0] in subcommands:
        name, *words = words
        document = commands[name].function.__doc__
    elif subcommands and words[:1] in (["-h"], ["--help"]):
        lines = [document.strip(), "", "subcommands (each has its own --help):"]
        for subcommand in subcommands:
            lines.append(f"  {subcommand:12} {commands[subcommand].function.__doc__.splitlines()[0]}")
        document = "\n".join(lines)
        if "" not in commands:
            print(document)
            sys.exit(0)
    elif words and not os.path.exists(words[0]) and closest(words[0], subcommands):
        check_choice(words[0], subcommands, "subcommand")
    if name not in commands:
        raise UserError(f"name a subcommand: {', '.join(subcommands)}")
    command = commands[name]
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    settings, in_files = read_settings(command.defaults, words, document, name, command.has_config)
    if command.complete is not None:
        given = [flag[2:].replace("-", "_") for flag in flags]
        settings = command.complete(settings, {name.removeprefix("no_") for name in given}, in_files)
    return command.function, settings


def read_settings(defaults, words, document, subcommand="", has_config=True):
    """Settings from `defaults`, overridden by config files, then by flags; and the names in the files."""
    before_flags = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    positional = []
    in_files = set()
    for word in before_flags:
        if has_config and word.endswith(".py"):
            defaults, names = read_config_file(word, defaults)
            in_files |= names
        else:
            positional.append(word)
    settings = tyro.cli(
        type(defaults),
        args=positional + words[len(before_flags) :],
        default=defaults,
        prog=f"{Path(sys.argv[0]).name} {subcommand}".strip(),
        description=inspect.cleandoc(document) + (CONFIG_HELP if has_config else ""),
        console_outputs=is_first_process(),
    )
    for field in dataclasses.fields(settings):
        if getattr(settings, field.name) == () and field.default != ():
            raise UserError(f"{field.name}: expected one value or more")
    return from_values(type(settings), vars(settings), "command line"), in_files


def read_config_file(path, defaults):
    """`defaults` with the settings of a config file; and the names that the file sets."""
    if not os.path.exists(path):
        check_choice(path, [str(file) for file in Path(path).parent.glob("*.py")], "config file")
    try:
        names = runpy.run_path(path)
    except Exception as error:  # the file is the user's own code, and may fail in any way
        raise UserError(f"cannot run config file {path!r}: {type(error).__name__}: {error}") from None
    values = {}
    for name, value in names.items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            values[name] = value
    return from_values(type(defaults), vars(defaults) | values, path), values.keys()


def from_values(kind, values, place):
    """The dataclass `kind` with these values; UserError for unknown names, wrong types or bad numbers."""
    fields = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        check_choice(name, fields, f"setting in {place}:")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{place}: {error}") from None


def is_first_process():
    """Whether this process prints and writes: rank 0 under torchrun."""
    return os.environ.get("RANK", "0") == "0" or not dist.is_torchelastic_launched()


def say(text) -> None:
    """Print a line from the first process, at once."""
    if is_first_process():
        print(text, flush=True)


def meet(mistake=""):
    """Wait for torchrun's ranks; returns store, rank, size. UserError if any rank reports a mistake."""
    store, rank, size = next(dist.rendezvous("env://", timeout=MEETING))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # several machines count restarts separately
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    store.set(f"mistake {rank}", mistake)
    raise_first(store.get(f"mistake {other}").decode() for other in range(size))
    return store, rank, size


def raise_first(mistakes) -> None:
    """UserError for the first rank with a mistake that is not empty."""
    for rank, mistake in enumerate(mistakes):
        if mistake:
            raise UserError(f"rank {rank}: {mistake}" if rank else mistake)


def mistake_in(error):
    """The message for a user's mistake or a failing machine; "" for a bug of ours."""
    if isinstance(error, UserError):
        return str(error)
    text = f"{type(error).__name__}: {error}".strip()
    remedies = [f"{remedy} ({text.splitlines()[-1]})" for part, remedy in REMEDIES.items() if part in text]
    return "".join(remedies[:1])


def run_script(commands, document) -> None:
    """Run the command line. Exit status: 0; 2 with one line for a user's mistake; 1 for anything else."""
    script = Path(sys.argv[0]).name
    try:
        if sys.stdout is None:
            raise UserError("stdout is closed: redirect it, for example to > log.txt")
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # also into a pipe
        function, settings = read_command(commands, sys.argv[1:], document)
        say(f"{script}: {function.__doc__.splitlines()[0]}")
        function(settings)
    except Exception as error:
        mistake = mistake_in(error)
        if not mistake:
            raise
        if dist.is_torchelastic_launched() and not dist.is_initialized():  # the others wait for this rank
            with contextlib.suppress(UserError, RuntimeError, ValueError):
                meet(mistake)
        if is_first_process():
            line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in mistake[:1000])
            print(f"{script}: {line}", file=sys.stderr)
        if isinstance(error, OSError):  # discard what stdout still holds
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
