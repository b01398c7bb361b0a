"""Is a 7B folder compared in a laptop's memory? Against a noised copy and a stranger, made as they are read.

    python tests/write_shards.py /tmp/7b && python tests/streaming.py --folder /tmp/7b    # 13 GB

Needs Linux. Writes bench_streaming.json: seconds, and the peak of anonymous resident memory.
"""

import contextlib
import math
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import checkpoint
import common
import evidence
from common import setting
from experiment import conduct
from findings import claim

from init import draw


@dataclass
class Settings(common.RunSettings):
    """What it can be told."""

    folder: str = setting("/tmp/7b", "checkpoint folder")


class Noised:
    """A source's tensors in bfloat16 with noise of `share` of their own std, made as they are read."""

    def __init__(self, source, share: float):
        self.source, self.share, self.config, self.shapes = source, share, source.config, source.shapes

    def read(self, name: str) -> torch.Tensor:
        weight = self.source.read(name)
        if weight.ndim == 2 and self.share:
            weight.add_(draw(-1, name, weight.shape, self.share * weight[:1024].float().std().item()))
        return weight.bfloat16()


@contextlib.contextmanager
def anonymous_peak():
    """A list that receives the peak of anonymous resident memory in the block, in bytes (Linux)."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            status = Path("/proc/self/status").read_text()
            peak[0] = max(peak[0], 1024 * int(status.split("RssAnon:")[1].split()[0]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def measure(s: Settings, device, dtype) -> dict:
    base, rows = checkpoint.tensors(s.folder), []
    at = (16, 64, 0, base.config.vocab_size, device, dtype)
    size = sum(math.prod(shape) for shape in base.shapes.values())
    suspects = {"noised copy": Noised(base, 0.1), "stranger": Noised(checkpoint.Newborn(base.config, 1), 0)}
    for name, suspect in suspects.items():
        begun = time.perf_counter()
        with anonymous_peak() as peak:
            prints = [evidence.all_positions(source, *at) for source in (base, suspect)]
            read = time.perf_counter() - begun
            row, _ = evidence.compare_pair(base, suspect, prints, 0, 9999)
        row = {key: row[key] for key in ("verdict", "relabel_z", "body_z", "basis_free_z")}
        times = dict(states_seconds=read, seconds=time.perf_counter() - begun)
        rows.append(dict(suspect=name, parameters=size) | times | dict(anonymous_gb=peak[0] / 1e9) | row)
    return dict(rows=rows)


def judge(rows: list[dict]) -> list[dict]:
    peak, found = max(row["anonymous_gb"] for row in rows), [row["verdict"] for row in rows]
    text = f"{rows[0]['parameters'] / 1e9:.1f}B parameters are compared in less than 3 GB of memory"
    right, text_right = found == ["same birth", "no evidence"], "the copy is kin and the stranger is not"
    return [claim(text, None, f"{peak:.2f} GB", peak < 3), claim(text_right, None, ", ".join(found), right)]


def plan(words: list[str]) -> list:
    s = common.parse_settings(Settings, __doc__, words)
    return [(s, partial(conduct, s, "bench_streaming", "", measure, judge=judge, plot=None))]


if __name__ == "__main__":
    common.run(plan)
