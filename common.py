"""How does every script read its settings, find its device, share its work and save its results?

A script describes its settings once, in a dataclass; flags, config files and `--help` are made from it.
`python probe.py quick.py --seed 7` takes the file's lines first, like `num_sequences = 4 * 128  # a look`:
literals and arithmetic, parsed but never executed. Under `torchrun` the same command shares its work among
processes; rank 0 prints and writes.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import fcntl
import functools
import glob
import hashlib
import itertools
import math
import operator
import os
import shutil
import sys
import tempfile
import time
import types
import typing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm


class UserError(Exception):
    """A user's mistake: the message says what is wrong, what was expected and what to do."""


def run(plan) -> None:
    """Do as a script what `plan(words)` makes of the command line: a list of (settings, work).

    All mistakes that `plan` finds, it finds before the first work. Exit status: 0, 2 with one line for a
    UserError, 1 for anything else.
    """
    with contextlib.suppress(AttributeError):  # a terminal need not have every letter of a sample
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does
    try:
        for _, work in plan(sys.argv[1:]):
            work()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank meets the same mistake
            line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))  # may quote strangers
            print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, BrokenPipeError) as error:  # the latter: `| head` has read enough
        if isinstance(error, KeyboardInterrupt):
            print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- settings ----------------------------------------------------------------------------------------------


def setting(default, help: str, choices=(), least=None):
    """A dataclass field: its help, the words it allows, or the least number; None is chosen at run time."""
    return dataclasses.field(default=default, metadata=dict(help=help, choices=tuple(choices), least=least))


@dataclasses.dataclass
class RunSettings:
    """What every experiment can be told: where to compute, how precisely, and where to write."""

    device: str = setting("auto", "where to compute; auto: cuda, then cpu", ("auto", "cpu", "cuda"))
    dtype: str = setting("auto", "of the blocks; auto: bfloat16 where fast", ("auto", "float32", "bfloat16"))
    out: str = setting("results", "folder that receives the JSON and PNG files")


def choose(name: str, choices, what: str) -> str:
    """`name`, if it is one of `choices`; otherwise a UserError that names the closest one, or all of them."""
    if name not in choices:
        near = [c for c in choices if c.endswith(f"/{name}")] or difflib.get_close_matches(name, choices, n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(choices)}"
        raise UserError(f"unknown {what} {name!r}: {hint}")
    return name


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see --help)")


def parse_settings(settings_class, description: str, arguments: list[str] | None = None):
    """A `settings_class`: its defaults, then a config file's lines, then flags (None: the command line's).

    Fields that no `setting` describes are the caller's to fill.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser(description=description, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("config", nargs="?", metavar="CONFIG.py", help="a file of lines NAME = VALUE")
    kinds, flags, hints = {}, {}, typing.get_type_hints(settings_class)
    described = [field for field in dataclasses.fields(settings_class) if field.metadata]
    for field in described:
        hint, default, choices = hints[field.name], field.default, field.metadata["choices"]
        hint = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint  # X | None
        many = typing.get_origin(hint) is tuple
        item = typing.get_args(hint)[0] if many else hint
        metavar = "|".join(choices) if 0 < len(choices) < 12 else "NAME" if item is str else "N"
        keywords = {"type": item, "metavar": metavar, "nargs": "+" if many else None}
        if item is bool:
            keywords = {"action": argparse.BooleanOptionalAction}
        shown = " ".join(map(str, default)) if many and default else default
        help = field.metadata["help"].replace("%", "%%") + ("" if default is None else f" (default: {shown})")
        kinds[field.name], flags[field.name] = (item, many), "--" + field.name.replace("_", "-")
        parser.add_argument(flags[field.name], default=argparse.SUPPRESS, help=help, **keywords)
    given, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        if word.startswith("--"):
            choose(word.split("=")[0], flags.values(), "flag")
        raise UserError(f"unexpected argument '{word}' (see --help)")
    config = vars(given).pop("config")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()}
    settings = settings_class(**(_read_config(config, kinds) if config is not None else {}) | values)
    for field in described:
        value, (_, choices, least) = getattr(settings, field.name), field.metadata.values()
        words = value if isinstance(value, tuple) else () if value is None else (value,)
        if len(set(words)) < len(words):
            raise UserError(f"{flags[field.name]}: {max(words, key=words.count)} is given twice")
        for word in words:
            if choices:
                choose(word, choices, f"value for {flags[field.name]}:")
            if least is not None and not least <= word < math.inf:
                raise UserError(f"{flags[field.name]} {word}: expected at least {least}")
    return settings


def leading(words: list[str]) -> tuple[list[str], list[str]]:
    """A command line's words before the first flag or config file, and the rest."""
    first = list(itertools.takewhile(lambda w: not w.startswith("-") and not w.endswith(".py"), words))
    return first, words[len(first) :]


def subcommand(words: list[str], choices, default: str, what: str) -> tuple[str, list[str]]:
    """A command line's first word, one of `choices` (`default` if it is a flag or a file), and the rest."""
    first, _ = leading(words)
    return (choose(first[0], choices, what), words[1:]) if first else (default, words)


def _read_config(path: str, kinds: dict[str, tuple]) -> dict:
    """The settings a config file assigns, each of the (type, whether many) that `kinds` has for its name."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8-sig"), filename=path)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise UserError(f"cannot read config file '{path}': {error}") from None
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        place = f"{path}:{node.lineno}"
        if not isinstance(node, ast.Assign) or [type(target) for target in node.targets] != [ast.Name]:
            raise UserError(f"{place}: expected NAME = VALUE")
        name = choose(node.targets[0].id, kinds, f"setting in {place}:")
        try:
            value = _evaluate(node.value)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            raise UserError(f"{place}: expected a literal or arithmetic on literals") from None
        item, many = kinds[name]
        items = value if many and isinstance(value, tuple) else (value,)
        if not items or any(type(x) is not item and (item, type(x)) != (float, int) for x in items):
            raise UserError(f"{place}: {name} expects {item.__name__}, not {value!r}")
        values[name] = items if many else value
    return values


_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}
_ARITHMETIC |= {ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}
_ARITHMETIC |= {ast.Pow: lambda base, exponent: base**exponent if exponent < 100 else math.inf}


def _evaluate(node: ast.expr):
    """The value of a literal or of arithmetic on literals; ValueError, TypeError or ArithmeticError else."""
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_evaluate(item) for item in node.elts)
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _ARITHMETIC:
        operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.operand,)
        return _ARITHMETIC[type(node.op)](*map(_evaluate, operands))
    return ast.literal_eval(node)


# ---- device and processes ----------------------------------------------------------------------------------


def start(settings: RunSettings) -> tuple:
    """Begin an experiment: torchrun's group joined, `out` writable; settings with device and dtype, these."""
    device = torch.device("cpu")
    if settings.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
            raise UserError(f"more processes than GPUs: this machine has {torch.cuda.device_count()}")
        torch.cuda.set_device(device)
    elif settings.device == "cuda":
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=1))
    try:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=settings.out).close()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to the folder --out {settings.out!r}: {error}") from None
    dtype = "bfloat16" if device.type == "cuda" or bfloat16_is_fast() else "float32"
    dtype = dtype if settings.dtype == "auto" else settings.dtype
    return dataclasses.replace(settings, device=str(device), dtype=dtype), device, getattr(torch, dtype)


def bfloat16_is_fast() -> bool:
    """Does this CPU multiply bfloat16 matrices by instructions of their own?"""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def rank() -> int:
    """This process's number in the group; otherwise 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes in the group; otherwise 1."""
    return dist.get_world_size() if dist.is_initialized() else 1


def shard(count: int) -> range:
    """This rank's share of range(count): contiguous, every index in exactly one rank's share."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def progress(*iterable, **keywords) -> tqdm:
    """A tqdm bar on rank 0's stderr; silent where that is no terminal."""
    return tqdm(*iterable, disable=None if rank() == 0 else True, **keywords)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The element-wise sum of all ranks' tensors, in place; alone, the tensor as it is."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def seconds(work, *arguments) -> float:
    """Seconds that `work(*arguments)` takes; reading a number of its tensor waits for the device."""
    begun = time.perf_counter()
    work(*arguments).flatten()[0].item()
    return time.perf_counter() - begun


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product, median of 9: the limit that MFU refers to."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = [seconds(torch.nn.functional.linear, a, b) for _ in range(10)]
    return 2 * size**3 / sorted(times[1:])[4]


@functools.cache
def known_peak(device: torch.device, dtype: torch.dtype) -> float:
    """`matmul_peak` of all ranks together, measured once in a process."""
    return sum_over_ranks(torch.tensor(matmul_peak(device, dtype), device=device)).item()


# ---- results -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_path(path: Path):
    """A temporary path that takes the place of `path` when the block is done; `path` survives any failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def alive(process: int) -> bool:
    """Is there a process of this number?"""
    try:
        os.kill(process, 0)  # no signal, only the question
    except OSError as error:
        return isinstance(error, PermissionError)  # somebody else's
    return True


@contextlib.contextmanager
def atomic_folder(path: Path):
    """A temporary folder that takes the place of `path` when the block is done, safe on the disk."""
    new, old = (path.with_name(f".{path.name}.{kind}.tmp") for kind in (f"{os.getpid()}.new", "old"))
    try:
        for stale in path.parent.glob(f".{glob.escape(path.name)}.*.new.tmp"):
            if not alive(int(stale.name.split(".")[-3])):  # its process was killed
                shutil.rmtree(stale, ignore_errors=True)
        if old.exists() and not path.exists():
            os.rename(old, path)  # we were killed between the two renames below
        shutil.rmtree(new, ignore_errors=True)  # a killed process may have had our number, as in containers
        new.mkdir(parents=True)
        yield new
        for file in new.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
        os.rename(new, path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextlib.contextmanager
def alone(run: Path):
    """The run folder for this process group alone; UserError if another one trains in it."""
    folder = os.open(run, os.O_RDONLY)
    try:
        if rank() == 0:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(f"another process trains in {run}: wait for it, or choose another --out") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(folder)


def sha256(path: Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
