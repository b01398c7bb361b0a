"""How is a file of the Hub read where only a few of its bytes are wanted?

It stands in the user's cache, as large as it is, but sparse: what was not fetched is zeros, which take no
room. `.FILE.blocks` beside it has a byte for each BLOCK, 1 once this is on the disk, so that a killed process
leaves nothing false. Any reader of files reads it, after `need` has been told which bytes.
"""

import contextlib
import json
import math
import os
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from lib.settings import UserError, rank

BLOCK = 2**16  # bytes that are fetched together
MOST_BLOCKS = 2**7  # of a request
LARGEST_HEADER = 2**25  # bytes
THREADS = 8  # requests at a time: an answer takes a while to begin
PLANS = []  # of each block of `together` that runs, what it will need


class NoRanges(UserError):
    """A server sends files whole."""


def blocks_of(path):
    """The file that tells which blocks of a file are here."""
    return path.with_name(f".{path.name}.blocks")


def is_by_blocks(place):
    """Are files fetched by blocks: one, or those in a folder?"""
    return place is not None and (blocks_of(place).exists() or any(place.glob(".*.blocks")))


def begin(path, size) -> None:
    """Make room for a file of the Hub; what is here of it stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for place, length in ((blocks_of(path), -(-size // BLOCK)), (path, size)):
        with open(place, "ab") as file:
            file.truncate(length)


def need(path, start, stop) -> None:
    """Have bytes `start` to `stop` of a file on this disk, if it is one that is fetched by blocks."""
    if blocks_of(path).exists():
        if PLANS:
            PLANS[-1].append((path, start, stop))
        else:
            fetch([(path, start, stop)])


@contextlib.contextmanager
def together():
    """What is read while this block runs may be zeros; when it is done, all that was to be read is here.

    So its bytes are fetched together, those side by side by one request, and their size is told beforehand.
    """
    PLANS.append([])
    try:
        yield
    finally:
        wanted = PLANS.pop()
    fetch(wanted, is_told=True)


def fetch(wanted, is_told=False) -> None:
    """Fetch what is not here of parts of files, (path, start, stop) each."""
    parts = defaultdict(list)
    for path, start, stop in wanted:
        parts[path].append(slice(start // BLOCK, -(-stop // BLOCK)))
    requests = []
    for path in parts:
        is_here = np.fromfile(blocks_of(path), bool)
        is_missing = np.zeros_like(is_here)
        for part in parts[path]:
            is_missing[part] = ~is_here[part]
        edges = np.flatnonzero(np.diff(is_missing, prepend=False, append=False)).tolist()
        for first, last in zip(edges[::2], edges[1::2]):
            for block in range(first, last, MOST_BLOCKS):
                requests.append((path, block, min(block + MOST_BLOCKS, last)))
    if requests and is_told and rank() == 0:
        size = sum(last - first for _, first, last in requests) * BLOCK
        whole = sum(path.stat().st_size for path in parts)
        repo, _, _ = place_on_hub(wanted[0][0])
        said = f"{size / 1e9:.3g} GB of {whole / 1e9:.3g}"
        print(f"not here: fetching {repo} from the Hub, {said}", file=sys.stderr)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch_blocks, requests))


def place_on_hub(path):
    """The repository, commit and name of a file that is fetched by blocks, as its path tells them."""
    folder = next(parent for parent in path.parents if parent.name.startswith("models--"))
    _, commit, *names = path.relative_to(folder).parts
    return folder.name.removeprefix("models--").replace("--", "/"), commit, "/".join(names)


def fetch_blocks(request) -> None:
    """Fetch blocks `first` to `last` of a file, and note that they are here; NoRanges if only all is sent."""
    from huggingface_hub import constants, hf_hub_url  # not before it is needed: it takes a while
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    path, first, last = request
    repo, commit, name = place_on_hub(path)
    size = path.stat().st_size
    start, stop = first * BLOCK, min(last * BLOCK, size)
    headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo, name, revision=commit)
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        with http_stream_backoff("GET", url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            is_range = response.headers.get("Content-Range") == f"bytes {start}-{stop - 1}/{size}"
            if not is_range and stop - start < size:
                raise NoRanges(f"{url} does not send a part of a file")
            content = response.read()
        if len(content) != stop - start:
            raise OSError(f"{len(content):,} bytes came, expected {stop - start:,}")
        write(path, start, content)
        write(blocks_of(path), first, b"\1" * (last - first))
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        said = f"cannot fetch more of {repo}: {type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{said}. The same command takes it up: what was fetched is kept") from None


def write(path, start, content) -> None:
    """Write bytes into a file that is there, from place `start`, safe on the disk."""
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def rows_of(shape, part):
    """The numbers of the rows along its last axis that a part of a tensor has, in the part's shape."""
    return torch.arange(math.prod(shape[:-1])).view(shape[:-1])[part]


def need_part(path, span, shape, part) -> None:
    """Have a part of a tensor, of this shape, that stands from `span[0]` to `span[1]` in a file."""
    start, stop = span
    rows = rows_of(shape, part)
    if rows.numel():
        row_bytes = (stop - start) // math.prod(shape[:-1])
        need(path, start + rows.min().item() * row_bytes, start + (rows.max().item() + 1) * row_bytes)


def spans_of(path):
    """From where to where each tensor stands in a .safetensors file that is fetched by blocks; else {}."""
    if not blocks_of(path).exists():
        return {}
    need(path, 0, 8)
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > LARGEST_HEADER:
            raise ValueError(f"its header has {size:,} bytes")
        need(path, 8, 8 + size)
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: [8 + size + place for place in tensor["data_offsets"]] for name, tensor in header.items()}
