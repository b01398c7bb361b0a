"""Flags, config files and users' mistakes: tyro makes flags and `--help` from a script's dataclass."""

import dataclasses
import difflib
import inspect
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

NANOGPT = {"block_size": "sequence_length", "batch_size": "global_batch_size or micro_batch_size"}  # and ours
NANOGPT |= {"n_layer": "num_layers", "n_head": "num_heads", "n_embd": "d_model", "lr": "learning_rate"}
NANOGPT |= {"dataset": "source or data", "out_dir": "out", "eval_interval": "eval_every"}
Names = Annotated[  # of two models or more, without a flag
    tuple[str, ...],
    msgspec.Meta(min_length=2),
    tyro.conf.Positional,
    tyro.conf.arg(metavar="MODEL ...", help_behavior_hint=""),
]


class UserError(Exception):
    """A user's mistake: the message says what is wrong, what was expected and what to do."""


class Command(NamedTuple):
    """A subcommand in a script's COMMANDS; the one named "" is the default."""

    function: Callable
    defaults: object  # the settings of an empty command line
    begun: Callable | None = None  # of train.py: the settings that the run in a folder began with, or None


@dataclasses.dataclass
class OutputSettings:
    """Settings of every command that writes results."""

    out: str = "out"  # folder that receives the JSON and PNG files


@dataclasses.dataclass
class RunSettings(OutputSettings):
    """Settings of the commands that measure or train a model."""

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
        meant = NANOGPT.get(name) or closest(name, choices)
        hint = f"did you mean {meant}?" if meant else f"choose from {', '.join(choices)}"
        raise UserError(f"unknown {what} {name!r}: {hint}")


def read_command(commands, words, document):
    """The function that a command line asks for, and its arguments; `document` is the script's docstring."""
    subcommands = [name for name in commands if name]
    name = ""
    if words and words[0] in subcommands:
        name, *words = words
        document = commands[name].function.__doc__
    elif subcommands:
        if words and closest(words[0], subcommands):
            check_choice(words[0], subcommands, "subcommand")
        document += "\nsubcommands (each has its own --help):\n"
        for each in subcommands:
            document += f"  {each:12} {commands[each].function.__doc__.splitlines()[0]}\n"
        if "" not in commands and words[:1] in (["-h"], ["--help"]):
            print(document)
            sys.exit(0)
    if name not in commands:
        raise UserError(f"name a subcommand: {', '.join(subcommands)}")
    function, defaults, begun = commands[name]
    if begun is None:
        return function, read_flags(defaults, words, document, name)
    defaults, words = run_defaults(defaults, begun, words)
    return function, read_flags(defaults, words, document, name), defaults


def run_defaults(defaults, begun, words):
    """What the flags of train.py default to, and the flags.

    These are `defaults`, or with --resume what the run in --out began with; a config file, if `words` begin
    with one, changes them.
    """
    path, values = "command line", {}
    if words and words[0].endswith(".py"):
        path, *words = words
        values = read_config_file(path, defaults)
    if "--resume" in words or ("--no-resume" not in words and values.get("resume")):
        out = values.get("out", defaults.out)
        for place, word in enumerate(words):
            if word.partition("=")[0] == "--out":
                out = word.partition("=")[2] or "".join(words[place + 1 : place + 2])
        defaults = begun(os.path.expanduser(out)) or defaults
    return from_values(type(defaults), vars(defaults) | values, path), words


def read_flags(defaults, words, document, name=""):
    """Settings from `defaults`, overridden by flags."""
    for word in words:
        key, _, value = word.removeprefix("--").replace("-", "_").partition("=")
        if word.startswith("--") and key in NANOGPT:
            check_choice(key, vars(defaults), "flag")
        if value in ("True", "False") and isinstance(getattr(defaults, key, None), bool):
            raise UserError(f"{word}: expected --{key} or --no-{key}".replace("_", "-"))
    settings = tyro.cli(
        type(defaults),
        args=words,
        default=defaults,
        prog=f"{sys.argv[0]} {name}".strip(),
        description=inspect.cleandoc(document),
        console_outputs=rank() == 0,
    )
    for field in dataclasses.fields(settings):
        if getattr(settings, field.name) == () and field.default != ():
            raise UserError(f"{field.name}: expected one value or more")
    return from_values(type(settings), vars(settings), "command line")


def read_config_file(path, defaults):
    """The settings in a config file, Python lines NAME = VALUE, by name; UserError for unknown ones."""
    if not os.path.exists(path):
        folders = (Path(path).parent, Path(__file__).parents[1] / "configs")
        check_choice(path, [str(file) for folder in folders for file in folder.glob("*.py")], "config file")
    try:
        names = runpy.run_path(path)
    except Exception as error:  # the file is the user's own code, and may fail in any way
        raise UserError(f"cannot run config file {path!r}: {type(error).__name__}: {error}") from None
    values = {}
    for name, value in names.items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            values[name] = value
    from_values(type(defaults), vars(defaults) | values, path)
    return values


def from_values(kind, values, place):
    """The dataclass `kind` with these values; UserError for unknown names, wrong types or bad numbers."""
    fields = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        check_choice(name, fields, f"setting in {place}:")
    try:
        return msgspec.convert({name: at_home(name, value) for name, value in values.items()}, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{place}: {error}".replace("`array` of length >=", "values, at least")) from None


def at_home(name, value):
    """A setting's value, with ~/ as the user's folder in what may be a path."""
    if isinstance(value, list | tuple):
        return [at_home(name, each) for each in value]
    return os.path.expanduser(value) if isinstance(value, str) and name != "prompt" else value


def rank():
    """This process's number among torchrun's; 0 without it. Number 0 prints and writes."""
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def say(text) -> None:
    """Print a line from the first process, at once."""
    if rank() == 0:
        print(text, flush=True)


def run_script(commands, document) -> None:
    """Run the command line. Exit status: 0; 2 with one line for a user's mistake; 1 for anything else."""
    script = Path(sys.argv[0]).name
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # also into a pipe
    try:
        function, *arguments = read_command(commands, sys.argv[1:], document)
        say(f"{script}: {function.__doc__.splitlines()[0]}")
        function(*arguments)
    except UserError as error:
        where = f"{script}: rank {rank()}" if rank() else script
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
        print(f"{where}: {line}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
