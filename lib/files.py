"""How are files read and written, so that none can hang us, fill the memory, or be half there?"""

import contextlib
import glob
import hashlib
import json
import math
import os
import shutil
import tempfile

from safetensors import SafetensorError

from lib.settings import UserError

LARGEST = 2**25  # bytes of a file that is read whole; an index of 100,000 shards' tensors has a third of it
LARGEST_TOKENIZER = 2**26  # bytes; Gemma's has half of it


def check_regular(path, largest=math.inf) -> None:
    """UserError unless a path, or what it links to, is a regular file (no pipe), not too large."""
    if not os.path.exists(path):
        raise UserError(f"{path} is missing")
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise UserError(f"cannot read {path}: it is no regular file, or closed to us")
    size = os.path.getsize(path)
    if size > largest:
        raise UserError(f"cannot read {path}: it has {size:,} bytes, expected {largest:,} at most")


def read_bytes(path, largest=LARGEST):
    """What a regular file holds; UserError if it is none, too large, or closed to us."""
    check_regular(path, largest)
    return path.read_bytes()


def read_json(path, largest=LARGEST):
    """The JSON object that a file holds, a dictionary; UserError if it holds anything else."""
    try:
        values = json.loads(read_bytes(path, largest))
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"cannot read {path}: expected a JSON object")
    return values


def sha256(path):
    """A regular file's SHA-256, in hexadecimal."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_file(path):
    """A temporary path that takes the place of `path` when the block is done; `path` survives any failure."""
    host = os.uname().nodename
    temporary = path.with_name(f".{path.name}.{host}.{os.getpid()}.tmp")
    try:
        for left in path.parent.glob(f".{glob.escape(path.name)}.{host}.*.tmp"):
            process = left.name.split(".")[-2]
            if left == temporary or not os.path.exists(f"/proc/{process}"):
                remove(left)  # of a killed process, which may have had our number
        yield temporary
        if path.is_dir():  # which nothing takes the place of
            remove(path)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from None
    finally:
        remove(temporary)


@contextlib.contextmanager
def atomic_folder(path):
    """A temporary folder that takes the place of `path` when the block is done, safe on the disk."""
    with atomic_file(path) as new:
        new.mkdir(parents=True)
        yield new
        for file in new.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def remove(path) -> None:
    """Remove a file or a folder, if it is there; a folder at once, so that no half of it is ever seen."""
    if path.is_dir() and not path.is_symlink():
        doomed = tempfile.mkdtemp(".tmp", ".", path.parent)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    elif path.exists():
        path.unlink()


def remove_leftovers(folder) -> None:
    """Remove what killed processes left unfinished in a folder that is ours alone."""
    for leftover in folder.glob(".*.tmp"):
        remove(leftover)
