"""How do flags, config files and mistakes reach a script?

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
MEETING = timedelta(minutes=10)  # how long ranks that have begun wait for one that has not
LESS = "out of memory: a smaller --micro-batch-size, or --batch-size, takes less"
REMEDIES = {  # where our surroundings fail: words of the error, and what to do
    "MemoryError": LESS,
    "t allocate memory": LESS,
    "C++ compiler": "no C++ compiler works here: --no-compile needs none",
    "C compiler": "no C compiler works here: --no-compile needs none",
    "Broken pipe": "stdout was closed before all was said: send it to a file",
    "No space left": "the disk that stdout or a file goes to is full",
    "wait timeout": "a rank has not come: what does it say itself?",
}


class UserError(Exception):
    """A user's mistake: the message says what is wrong, what was expected and what to do."""


class Command(NamedTuple):
    """What a name in a script's COMMANDS does; "" is meant where none is named."""

    function: Callable
    defaults: object  # the settings of a command line without words
    complete: Callable | None = None  # settings, names that flags gave, that files gave -> the settings meant
    has_config: bool = True  # a word that ends in .py, before the flags, is a config file, and run


@dataclasses.dataclass
class OutputSettings:
    """What every command that writes results is asked."""

    out: str = "out"  # folder that receives the JSON and PNG files


@dataclasses.dataclass
class RunSettings(OutputSettings):
    """What every command that runs a model is asked."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # where to compute; auto: cuda, then cpu
    dtype: Literal["float32", "bfloat16"] = "float32"  # number format of the blocks


def at_least(least, kind=int):
    """The type of numbers that are finite, not below `least`, and not absurdly large."""
    return Annotated[kind, msgspec.Meta(ge=least, le=2**24)]


def closest(name, choices, cutoff=0.6):
    """The choice that a name is a slip of; "" if it is like none of them."""
    return "".join(difflib.get_close_matches(name, choices, n=1, cutoff=cutoff))


def check_choice(name, choices, what) -> None:
    """UserError, which names the closest choice or all of them, if a name is not one of the choices."""
    if name not in choices:
        meant = closest(name, choices)
        hint = f"did you mean {meant}?" if meant else f"choose from {', '.join(choices)}"
        raise UserError(f"unknown {what} {name!r}: {hint}")


def read_command(commands, words, document):
    """The function that a command line asks for, and its settings; the document is the script's."""
    subcommands = [name for name in commands if name]
    name = ""
    if words and words[0] in subcommands:
        name, *words = words
        document = commands[name].function.__doc__
    elif subcommands and words[:1] in (["-h"], ["--help"]):
        lines = [document.strip(), "", "subcommands, each with a --help of its own:"]
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
    """The settings of `defaults`, then config files, then flags, and the names that the files give."""
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
    """The settings that a config file gives, `defaults` for what it does not name; and the names it gives."""
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
    """The dataclass `kind` of a place's values; UserError for unknown names, wrong types, strange numbers."""
    fields = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        check_choice(name, fields, f"setting in {place}:")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{place}: {error}") from None


def is_first_process():
    """Is this the process that speaks and writes? Under torchrun every rank meets the same mistake."""
    return os.environ.get("RANK", "0") == "0" or not dist.is_torchelastic_launched()


def say(text) -> None:
    """Print a line, at once, from the first process alone."""
    if is_first_process():
        print(text, flush=True)


def meet(mistake=""):
    """Wait for torchrun's ranks: their store, this one's number, their count. UserError for any's mistake."""
    store, rank, size = next(dist.rendezvous("env://", timeout=MEETING))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # machines: each of several counts restarts for itself
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    store.set(f"mistake {rank}", mistake)
    raise_first(store.get(f"mistake {other}").decode() for other in range(size))
    return store, rank, size


def raise_first(mistakes) -> None:
    """UserError for the first of all ranks' mistakes that is not empty."""
    for rank, mistake in enumerate(mistakes):
        if mistake:
            raise UserError(f"rank {rank}: {mistake}" if rank else mistake)


def mistake_in(error):
    """What to say of a user's mistake, or of surroundings that fail; nothing of a fault of the program."""
    if isinstance(error, UserError):
        return str(error)
    text = f"{type(error).__name__}: {error}".strip()
    remedies = [f"{remedy} ({text.splitlines()[-1]})" for part, remedy in REMEDIES.items() if part in text]
    return "".join(remedies[:1])


def run_script(commands, document) -> None:
    """Do what the command line asks. Exit status: 0, 2 with one line for a mistake, 1 for anything else."""
    script = Path(sys.argv[0]).name
    try:
        if sys.stdout is None:
            raise UserError("stdout is closed: send it somewhere, as by > log.txt")
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # also into a pipe
        function, settings = read_command(commands, sys.argv[1:], document)
        say(f"{script}: {function.__doc__.splitlines()[0]}")
        function(settings)
    except Exception as error:
        mistake = mistake_in(error)
        if not mistake:
            raise
        if dist.is_torchelastic_launched() and not dist.is_initialized():  # others wait for this rank
            with contextlib.suppress(UserError, RuntimeError, ValueError):
                meet(mistake)
        if is_first_process():
            line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in mistake[:1000])
            print(f"{script}: {line}", file=sys.stderr)
        if isinstance(error, OSError):  # what stdout still holds has no place to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
