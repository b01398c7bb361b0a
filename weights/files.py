"""Which files are one model's weights, and what does its config.json say?

A folder holds config.json, and weights in one file or in shards. A file of weights, or a .gguf file, which
has all in it, may be named in its place.
"""

import functools
import hashlib
import re
from os.path import exists, isabs, isdir, isfile
from pathlib import Path

from lib.files import as_user_error, check_regular, read_json
from lib.settings import UserError
from weights import ranges
from weights.gguf import GGUF
from weights.gguf_config import config_of_header

# In the order in which transformers looks for them.
WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors")
WEIGHT_FILES += ("pytorch_model.bin", "pytorch_model-*-of-*.bin")
INDEX = "model.safetensors.index.json"  # decides, if the files that it names are there
SHARD = re.compile(r"\d+(?=[-_.]of[-_](\d+))")  # in a file's name: which of how many


def beginning(path):
    """A file's first bytes, as text."""
    check_regular(path)
    return ranges.read(Path(path), 0, 64).decode("latin-1")


def sha256(path):
    """The SHA-256 of a regular file, in hexadecimal."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_gguf(place):
    """Is a place a .gguf file, whatever its name?"""
    return isfile(place) and (place.suffix == ".gguf" or beginning(place).startswith("GGUF"))


@functools.lru_cache(8)
def open_gguf(path):
    """A .gguf file, whose header is parsed once; UserError for what is none, or a part."""
    with as_user_error(path):
        return GGUF(path)


def folder_of(place):
    """The folder of a checkpoint, whose single file of weights may be named."""
    return place if isdir(place) else place.parent


def read_index(place):
    """The file of each tensor, {name: path}, by a folder's index; {} if a file that it names is not there."""
    path = place / INDEX
    if not isfile(path):
        return {}
    names = indexed_names(path)
    files = {name: place / file for name, file in names.items()}
    return files if all(isfile(file) for file in files.values()) else {}


def indexed_names(path):
    """What an index says, {tensor: name of its file}; {} if it is none. UserError for a file elsewhere."""
    values = read_json(path)
    names = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        return {}
    for name in names.values():
        if isabs(name) or ".." in Path(name).parts:
            raise UserError(f"{path} names a file outside its folder: {name}")
    return names


def weight_files(place):
    """The files of a checkpoint's weights: one, or all shards of a model, by its index or by their names."""
    paths = [place]
    if isdir(place):
        indexed = sorted({*read_index(place).values()})
        if indexed:
            return indexed
        paths = next(filter(None, (sorted(place.glob(pattern)) for pattern in WEIGHT_FILES)), [])
    if not paths:
        there = ", ".join(sorted(path.name for path in place.glob("*"))[:5]) or "nothing"
        raise UserError(f"{place / WEIGHT_FILES[0]} is missing: the folder has {there}. A file may be named")
    shard = SHARD.search(paths[0].name)
    if shard and not isdir(place):
        alike = SHARD.sub("", place.name)
        paths = sorted(path for path in place.parent.iterdir() if SHARD.sub("", path.name) == alike)
    count = int(shard[1]) if shard else 1
    if len(paths) != count:
        raise UserError(f"{paths[0]} is one of {count} shards of a model, of which {len(paths)} are here")
    return paths


def read_config(place):
    """What config.json of a checkpoint says, a dictionary; None where there is none."""
    if is_gguf(place):
        return open_gguf(place).config
    path = folder_of(place) / "config.json"
    return read_json(path) if exists(path) else None


def full_config(place):
    """What config.json says, or would say of a .gguf file; UserError if that says more than is followed."""
    if not is_gguf(place):
        return read_config(place)
    with as_user_error(place):
        return config_of_header(place, open_gguf(place))
