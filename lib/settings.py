"""How do flags, config files and mistakes reach a script?

A script describes its settings once, in a dataclass. tyro makes the flags and `--help` from it:

    python train.py configs/laptop.py --seed 7      # the file's values first, then the flags
    python sinks.py --model runs/laptop             # the default subcommand, `rate`
    python seedprint.py compare --help              # positional models, flags, units, defaults

A config file is the user's own Python; each public name in it must be a setting, of its type.
"""

import dataclasses
import difflib
import inspect
import math
import os
import runpy
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import tyro


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


def at_least(least, default):
    """A dataclass field whose numbers must be finite and not below `least`."""
    return dataclasses.field(default=default, metadata={"least": least})


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
    for position, word in enumerate(words):
        if word.startswith("-"):
            break
        if word.endswith(".py"):
            values = read_config_file(words.pop(position), type(defaults))
            defaults = dataclasses.replace(defaults, **values)
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


def read_config_file(path, settings_class):
    """The values that a config file gives to settings of this class."""
    try:
        names = runpy.run_path(path)
    except OSError as error:
        raise UserError(f"cannot read config file {path!r}: {error.strerror}") from None
    except Exception as error:  # the file is the user's own code, and may fail in any way
        raise UserError(f"cannot run config file {path!r}: {type(error).__name__}: {error}") from None
    values = {}
    for name, value in names.items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            values[name] = value
    return checked_values(values, settings_class, path)


def checked_values(values, settings_class, path):
    """The values that a file gives to settings of this class; UserError for unknown names and wrong types."""
    hints = typing.get_type_hints(settings_class)
    checked = {}
    for name, value in values.items():
        closest(name, hints, f"setting in {path}:")
        hint = hints[name]
        if fits((value,), hint):  # a single value where several may be
            value = (value,)
        if not fits(value, hint):
            expected = hint.__name__ if isinstance(hint, type) else str(hint).removeprefix("typing.")
            raise UserError(f"{path}: {name} expects {expected}, not {value!r}")
        checked[name] = tuple(value) if isinstance(value, list) else value
    return checked


def fits(value, hint):
    """Is a value of the type that a field's hint names? A whole number serves as a float."""
    options = typing.get_args(hint)
    kind = typing.get_origin(hint)
    if kind in (types.UnionType, typing.Union):
        return any(fits(value, option) for option in options)
    if kind is Literal:
        return value in options
    if kind is tuple:
        is_sequence = isinstance(value, tuple | list) and len(value) > 0
        return is_sequence and all(fits(item, options[0]) for item in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def check(settings) -> None:
    """UserError for a number below its least, or not finite, and for a value given twice."""
    for field in dataclasses.fields(settings):
        flag = "--" + field.name.replace("_", "-")
        value = getattr(settings, field.name)
        values = value if isinstance(value, tuple) else (value,)
        is_positional = field.default == ()  # such words may be missing, or come twice
        if not values and not is_positional:
            raise UserError(f"{flag}: expected at least one value")
        if len(set(values)) < len(values) and not is_positional:
            twice = max(values, key=values.count)
            raise UserError(f"{flag}: {twice} is given twice")
        for number in values:
            if not isinstance(number, int | float):
                continue
            if not -math.inf < number < math.inf:
                raise UserError(f"{flag} {number}: expected a finite number")
            least = field.metadata.get("least", number)
            if number < least:
                raise UserError(f"{flag} {number}: expected a number of at least {least}")


# ---- a script's whole life ---------------------------------------------------------------------------------


def program_name():
    """What a user types after `python`: a script's name, or -m and a module's."""
    module = sys.modules["__main__"].__spec__
    if module is None:
        return Path(sys.argv[0]).name
    return f"-m {module.name.removesuffix('.__main__')}"


def is_first_process():
    """Is this the process that speaks? Under torchrun every rank meets the same mistake."""
    return os.environ.get("RANK", "0") == "0"


def run_script(commands, document) -> None:
    """Do what the command line asks. Exit status: 0, 2 with one line for a UserError, 1 for anything else."""
    script = program_name()
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal need not have every letter of a sample
    try:
        function, settings = read_command(commands, sys.argv[1:], document)
        function(settings)
    except UserError as error:
        if is_first_process():
            printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
            print(f"{script}: {printable}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{script}: interrupted", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
