"""Is a 7B folder compared in a laptop's memory? Against a noised copy and a stranger, made as they are read.

    python tests/write_shards.py /tmp/7b && python tests/streaming.py --folder /tmp/7b   # 13 GB, half an hour

Needs Linux. Writes bench_streaming.json: seconds, and the peak of anonymous resident memory.
"""

import contextlib
import math
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import seedprint
from init import draw
from lib.checkpoint import Newborn, parse_spec
from lib.results import Experiment
from lib.settings import Command, RunSettings, run_script
from measure import comparison, lineage

READ = seedprint.CompareSettings(layers=4)  # what the tests read of a model, by default
PARTS = {"state_fingerprint": comparison, "weight_correlations": lineage, "unit_census": comparison}
KEYS = ("verdict", "sentence", "units_found", "body_z", "relabel_z")  # of a row of `compare`


@dataclass
class Settings(RunSettings):
    """What it can be told."""

    folder: str = "/tmp/7b"
    """checkpoint folder"""
    suspects: tuple[Literal["noised copy", "stranger"], ...] = ("noised copy", "stranger")
    """what it is compared with"""


class Noised:
    """A source's tensors in bfloat16 with noise of `share` of their own std, made as they are read."""

    def __init__(self, source, share: float):
        self.source = source
        self.share = share
        self.config = source.config
        self.place = None
        self.width = source.width
        self.family = source.family
        self.shapes = source.shapes

    def read(self, name: str) -> torch.Tensor:
        """One tensor; the noise is the same at each reading."""
        weight = self.source.read(name)
        if weight.ndim == 2 and self.share > 0:
            std = weight[:1024].float().std().item()
            weight.add_(draw(-1, name, weight.shape, self.share * std))
        return weight.bfloat16()


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@contextlib.contextmanager
def anonymous_peak():
    """A list of anonymous resident memory in the block, every 50 ms, in bytes."""
    samples = [anonymous_bytes()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            samples.append(anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def timed(name: str, seconds: dict):
    """One of PARTS, what takes long; each call adds to its `seconds`."""
    function = getattr(PARTS[name], name)

    def call(*arguments):
        begun = time.perf_counter()
        result = function(*arguments)
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
        return result

    return mock.patch.object(PARTS[name], name, call)


def stream(settings: Settings) -> dict:
    """Compare the folder with a noised copy and with a stranger."""
    base = parse_spec(settings.folder).open()
    experiment = Experiment("bench_streaming", "", settings)
    reading = replace(READ, device=experiment.settings.device, dtype=experiment.settings.dtype)
    size = sum(math.prod(shape) for shape in base.shapes.values())
    suspects = {"noised copy": Noised(base, 0.1), "stranger": Noised(Newborn(base.config, 1), 0)}
    rows = []
    for name in settings.suspects:
        begun = time.perf_counter()
        seconds = {}
        with anonymous_peak() as samples, contextlib.ExitStack() as stack:
            for part in PARTS:
                stack.enter_context(timed(part, seconds))
            pair = (base, suspects[name])
            models = [comparison.read_model("", source, base.config.vocab_size, reading) for source in pair]
            compared, _ = comparison.compare_pair(*models, READ)
        row = {
            "suspect": name,
            "parameters": size,
            "states_seconds": seconds["state_fingerprint"],
            "weights_seconds": seconds["weight_correlations"],
            "census_seconds": seconds["unit_census"],
            "seconds": time.perf_counter() - begun,
            "anonymous_gb": max(samples) / 1e9,
        }
        rows.append(row | {key: compared[key] for key in KEYS})
    return experiment.save(rows)


COMMANDS = {"": Command(stream, Settings())}


def main() -> None:
    """Do what the command line asks."""
    run_script(COMMANDS, __doc__)


if __name__ == "__main__":
    main()
