"""Read and write files that are never half there, and never hang us or fill the memory."""

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

LARGEST = 2**25  # bytes of a file that is read whole; an index of 100,000 tensors has a third
LARGEST_TOKENIZER = 2**26  # bytes; Gemma's has half


def check_regular(path, largest=math.inf) -> None:
    """UserError unless a path is, or links to, a readable regular file of at most `largest` bytes."""
    if not os.path.exists(path):
        raise UserError(f"{path} is missing")
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise UserError(f"cannot read {path}: not a regular file, or no permission")
    size = os.path.getsize(path)
    if size > largest:
        raise UserError(f"cannot read {path}: it has {size:,} bytes, expected {largest:,} at most")


def read_bytes(path, largest=LARGEST):
    """The bytes of a regular file; UserError if it is none, too large or not readable."""
    check_regular(path, largest)
    return path.read_bytes()


def read_json(path, largest=LARGEST):
    """The JSON object in a file, a dictionary; UserError for anything else."""
    try:
        values = json.loads(read_bytes(path, largest))
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"cannot read {path}: expected a JSON object")
    return values


def sha256(path):
    """The SHA-256 of a regular file, in hexadecimal."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_file(path):
    """A context with a temporary path that replaces `path` at the end; on failure `path` stays as it was."""
    host = os.uname().nodename
    temporary = path.with_name(f".{path.name}.{host}.{os.getpid()}.tmp")
    try:
        for left in path.parent.glob(f".{glob.escape(path.name)}.{host}.*.tmp"):
            process = left.name.split(".")[-2]
            if left == temporary or not os.path.exists(f"/proc/{process}"):
                remove(left)  # a killed process left it; it may have had our number
        yield temporary
        if path.is_dir():  # os.replace does not replace one
            remove(path)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from None
    finally:
        remove(temporary)


@contextlib.contextmanager
def atomic_folder(path):
    """A context with a temporary folder that replaces `path` at the end, synced to the disk."""
    with atomic_file(path) as new:
        new.mkdir(parents=True)
        yield new
        for file in new.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def remove(path) -> None:
    """Remove a file or folder if it exists; a folder is renamed first, so nobody sees half of it."""
    if path.is_dir() and not path.is_symlink():
        doomed = tempfile.mkdtemp(".tmp", ".", path.parent)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    elif path.exists():
        path.unlink()


def remove_leftovers(folder) -> None:
    """Remove what killed processes left unfinished in a folder of ours."""
    for leftover in folder.glob(".*.tmp"):
        remove(leftover)
