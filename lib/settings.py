"""How do flags, config files and mistakes reach a script?

A script describes its settings once, in a dataclass. tyro makes the flags and `--help` from it:

    python train.py configs/laptop.py --seed 7      # the file's values first, then the flags
    python sinks.py --model runs/laptop             # the default subcommand, `rate`
    python seedprint.py compare --help              # positional models, flags, units, defaults
"""

import dataclasses
import difflib
import inspect
import itertools
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch.distributed as dist
import tyro

CONFIG_HELP = "\n\nA CONFIG.py before the flags has lines NAME = VALUE."


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


def check_choice(name, choices, what) -> None:
    """UserError, which names the closest choice or all of them, if a name is not one of the choices."""
    if name not in choices:
        matches = difflib.get_close_matches(name, choices, n=1)
        hint = f"did you mean {matches[0]}?" if matches else f"choose from {', '.join(choices)}"
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
    """Is this the process that speaks? Under torchrun every rank meets the same mistake."""
    return os.environ.get("RANK", "0") == "0" or not dist.is_torchelastic_launched()


def say(text) -> None:
    """Print a line, at once, from the first process alone."""
    if is_first_process():
        print(text, flush=True)


def run_script(commands, document) -> None:
    """Do what the command line asks. Exit status: 0, 2 with one line for a UserError, 1 for anything else."""
    script = Path(sys.argv[0]).name
    sys.stdout.reconfigure(line_buffering=True)  # also into a pipe
    try:
        function, settings = read_command(commands, sys.argv[1:], document)
        if is_first_process():
            print(f"{script}: {function.__doc__.splitlines()[0]}")
        function(settings)
    except UserError as error:
        if is_first_process():
            line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error)[:1000])
            print(f"{script}: {line}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # stdout was closed, as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
