"""Read files, and write them whole or not at all."""

import contextlib
import glob
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from lib.settings import UserError

ROOT = Path(__file__).parent.parent  # of this project
GIT_LFS = b"version https://git-lfs"  # how a pointer begins


def check_regular(path) -> None:
    """UserError unless a path is, or links to, a readable regular file."""
    if not os.path.exists(path):
        raise UserError(f"{path} is missing")
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise UserError(f"cannot read {path}: not a regular file, or no permission")


def read_json(path):
    """The JSON object in a file, a dictionary; UserError for anything else."""
    check_regular(path)
    with as_user_error(path):
        values = json.loads(path.read_bytes())
    if not isinstance(values, dict):
        raise UserError(f"cannot read {path}: expected a JSON object")
    return values


@contextlib.contextmanager
def as_user_error(path):
    """UserError for whatever a library raises when it reads a file: a damaged one may fail in any way."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust's panics are not of class Exception
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        remedy = "if it is damaged, download it again"
        if os.path.isfile(path) and open(path, "rb").read(len(GIT_LFS)) == GIT_LFS:
            remedy = "it is a git-LFS pointer, not the file itself: run `git lfs pull`"
        elif type(error).__name__ == "UnpicklingError":
            remedy = "if it has more than tensors and plain values, save its tensors alone, where it was made"
        raise UserError(f"cannot read {path}: {reason}; {remedy}") from None


@contextlib.contextmanager
def atomic_file(path):
    """A context with a temporary path that replaces `path` at the end; a file stays as it was on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            process = left.name.split(".")[-2]
            if left == temporary or (os.path.exists("/proc/self") and not os.path.exists(f"/proc/{process}")):
                remove(left)
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
        doomed = path.with_name(f".{path.name}.{os.getpid()}.removed.tmp")
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)
