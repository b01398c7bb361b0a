"""How are bytes of a file read, whether it is on this disk or on the Hub?

Of a file of the Hub parts are fetched as they are asked for. It stands in the user's cache as a file of its
size, zeros at first. For each part that is there, `.FILE.parts` beside it has an empty file START-STOP.
"""

import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from lib.settings import UserError, rank

NEAR = 2**16  # bytes between two parts, at most, that are fetched as one
LARGEST = 2**23  # bytes of a request
LARGEST_HEADER = 2**25  # bytes; Gemma's, with 262,144 tokens, has half of it
THREADS = 8  # requests at a time: an answer takes a while to begin


def parts_of(path):
    """The folder of a file's parts; it is there if the file is fetched in parts."""
    return path.with_name(f".{path.name}.parts")


def begin(path, size) -> None:
    """Make room for a file of the Hub; what is here of it stays."""
    parts_of(path).mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.truncate(size)


@functools.cache
def spans(path):
    """The parts of a file that are here, (start, stop) each; whoever fetches more adds them."""
    return [tuple(map(int, name.split("-"))) for name in os.listdir(parts_of(path))]


def read(path, start, stop):
    """Bytes `start` to `stop` of a file, or fewer at its end."""
    stop = min(stop, path.stat().st_size)
    content = bytearray(max(0, stop - start))
    fetch([(path, start, stop)])
    with open(path, "rb") as file:
        file.seek(start)
        file.readinto(content)
    return content


class Rows(NamedTuple):
    """Rows of bytes that stand side by side in a file, as those of a tensor do."""

    path: Path
    start: int  # where the first begins
    row_bytes: int

    def span(self, numbers):
        """What of the file is read for some rows, by their numbers (n,): from the first to the last."""
        if not len(numbers):
            return self.path, self.start, self.start
        first, last = numbers.min().item(), numbers.max().item()
        return self.path, self.start + first * self.row_bytes, self.start + (last + 1) * self.row_bytes

    def read(self, numbers):
        """Rows by their numbers (n,): bytes (n, row_bytes)."""
        path, start, stop = self.span(numbers)
        if start == stop:
            return torch.empty(len(numbers), self.row_bytes, dtype=torch.uint8)
        content = read(path, start, stop)
        if len(content) != stop - start:
            raise ValueError("it ends before its end")
        table = torch.frombuffer(content, dtype=torch.uint8).view(-1, self.row_bytes)
        is_run = (numbers.diff() == 1).all()
        return table if is_run else table[numbers - numbers.min()]


def missing(path, start, stop):
    """What is not here of bytes `start` to `stop` of a file: (path, start, stop) of each gap."""
    gaps = []
    for first, last in sorted(spans(path)):
        if first < stop and last > start:
            if first > start:
                gaps.append((path, start, first))
            start = last
    return [*gaps, (path, start, stop)] if start < stop else gaps


def fetch(wanted, is_told=False) -> None:
    """Fetch what is not here of parts of files, (path, start, stop) each; near ones by one request.

    A file that is not fetched in parts is whole already.
    """
    in_parts = {path for path in {path for path, _, _ in wanted} if parts_of(path).exists()}
    gaps = set()
    for path, start, stop in set(wanted):
        if path in in_parts:
            gaps.update(missing(path, start, stop))
    merged = []
    for path, start, stop in sorted(gaps):
        if merged and merged[-1][0] == path and start <= merged[-1][2] + NEAR:
            merged[-1][2] = max(stop, merged[-1][2])
        else:
            merged.append([path, start, stop])
    if merged and is_told and rank() == 0:
        size = sum(stop - start for _, start, stop in merged)
        repo, _, _ = place_on_hub(merged[0][0])
        print(f"not here: fetching {repo} from the Hub, {size / 1e9:.3g} GB", file=sys.stderr)
    requests = []
    for path, start, stop in merged:
        requests += [(path, place, min(place + LARGEST, stop)) for place in range(start, stop, LARGEST)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch_part, requests))


def place_on_hub(path):
    """The repository, commit and name of a file that is fetched in parts, as its path tells them."""
    folder = next(parent for parent in path.parents if parent.name.startswith("models--"))
    _, commit, *names = path.relative_to(folder).parts
    return folder.name.removeprefix("models--").replace("--", "/"), commit, "/".join(names)


def fetch_part(part) -> None:
    """Fetch a part of a file, or all of it where a server knows no parts."""
    from huggingface_hub import constants, hf_hub_url  # not before it is needed: it takes a while
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    path, start, stop = part
    repo, commit, name = place_on_hub(path)
    size = path.stat().st_size
    headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo, name, revision=commit)
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        with http_stream_backoff("GET", url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            if response.headers.get("Content-Range") != f"bytes {start}-{stop - 1}/{size}":
                start, stop = 0, size
            with open(path, "r+b") as file:
                file.seek(start)
                for chunk in response.iter_bytes():
                    file.write(chunk[: stop - file.tell()])
                if file.tell() != stop:
                    raise ValueError(f"{file.tell() - start:,} bytes came, expected {stop - start:,}")
                file.flush()
                os.fsync(file.fileno())
        (parts_of(path) / f"{start}-{stop}").touch()
        spans(path).append((start, stop))
    except Exception as error:
        said = f"cannot fetch more of {repo}: {type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{said}. The same command takes it up: what was fetched is kept") from None
