"""Save and print the result of an experiment: <out>/<name>.json, and a table."""

import dataclasses
import functools
import json
import math
import platform
import subprocess
import time
import tomllib
from pathlib import Path

import numpy as np
import torch
from scipy.special import stdtrit  # scipy.stats takes a second to import

from lib.files import ROOT, atomic_file
from lib.runtime import start, world_size
from lib.settings import RunSettings, UserError, rank

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
HUB_COMMITS = {}  # the commit of each Hub name that this process read


class Experiment:
    """An experiment, from its start to its JSON."""

    def __init__(self, name, paper, settings: RunSettings):
        """Join torchrun's processes, choose device and dtype, make the folder --out, start the clock."""
        self.name = name
        self.paper = paper
        self.settings, self.device, self.dtype = start(settings)
        self.folder = Path(settings.out)
        self.begun = time.perf_counter()

    def save(self, rows, columns=(), shown=None, **more):
        """Write the JSON and print `columns` of the rows `shown` (default: all); returns the result."""
        seconds = round(time.perf_counter() - self.begun, 2)
        result = {
            "experiment": self.name,
            "paper": self.paper,
            "settings": dataclasses.asdict(self.settings),
            "environment": environment(self.device, self.dtype) | {"seconds": seconds},
            "rows": rows,
            **more,
        }
        if rank() == 0:
            try:
                write_json(result, self.folder / f"{self.name}.json")
            except ValueError:
                raise UserError(f"{self.name}: a result is not finite: look for huge weights") from None
            print_rows(rows if shown is None else shown, columns)
        return result


def environment(device, dtype):
    """What made a result: versions, device, commits, threads and processes."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "version": VERSION,
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "processes": world_size(),
        "hub": HUB_COMMITS,
    }


@functools.cache
def commit():
    """HEAD's commit, plus "-dirty" if code was changed or added since; None if git has no such file."""
    tracked = "git ls-files --error-unmatch model.py >&2 && git rev-parse HEAD"
    command = f'{tracked} && test -n "$(git status --porcelain -uall -- "*.py")" && echo -dirty'
    printed = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    return "".join(printed.split()) or None


def write_json(result, path) -> None:
    """Write a result as JSON with a line per row, for readers and git diff; ValueError for NaN."""
    dump = functools.partial(json.dumps, allow_nan=False, default=np.generic.item)
    parts = []
    for key, value in result.items():
        text = dump(value)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(map(dump, value)) + "\n ]"
        parts.append(f'"{key}": {text}')
    with atomic_file(path) as temporary:
        temporary.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def print_rows(rows, columns=()) -> None:
    """Print rows as a table; of layers and positions only 0, powers of two and the last."""
    present = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in columns or present if name in present]
    count = len(rows)
    for along in {"layer", "position"} & set(names):
        last = max(row[along] for row in rows)
        rows = [row for row in rows if row[along] & (row[along] - 1) == 0 or row[along] == last]
    lines = [names]
    for row in rows:
        values = [row.get(name) for name in names]
        lines.append([f"{value:.4g}" if isinstance(value, float) else str(value) for value in values])
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print(*[text.rjust(width) for text, width in zip(line, widths)])
    if len(rows) < count:
        print(f"({len(rows)} of {count} rows; the JSON has all)")


def mean_over_seeds(samples, measured, theories=()):
    """Average rows that differ only in `seed` and the named columns: means of `measured`, and seed_std."""
    groups = {}
    named = {"seed", *measured, *theories}  # theories differ in their last bits
    for sample in samples:
        key = tuple(item for item in sample.items() if item[0] not in named)
        groups.setdefault(key, []).append(sample)
    rows = []
    for group in groups.values():
        row = dict(group[0])
        row.pop("seed", None)
        for name in measured:
            row[name] = float(np.mean([sample[name] for sample in group]))
        rows.append(row | {"seed_std": float(np.std([sample[measured[0]] for sample in group]))})
    return rows


def interval(values, name="mean", least=-math.inf, largest=math.inf):
    """The mean of n > 1 independent values as `name`, and its 95 % interval `low`, `high` (Student's t)."""
    values = np.asarray(values, np.float64)
    mean = values.mean()
    half = stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / len(values) ** 0.5
    return {name: mean, "low": max(least, mean - half), "high": min(largest, mean + half)}
