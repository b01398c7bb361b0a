"""How is an experiment's result kept and shown?

An experiment notes where and when it begins, returns rows, and saves them as <out>/<name>.json: `experiment`,
`paper` (its source), `settings`, `environment`, `rows` (flat objects), and whatever else its figure reads.

    experiment = Experiment("probe", "BB Table 1", settings)
    rows = ...                                        # on experiment.device, in experiment.dtype
    draw_probe(rows, experiment.folder / "probe.png")
    return experiment.save(rows, columns=("model", "seed"))
"""

import contextlib
import dataclasses
import functools
import json
import platform
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lib.files import atomic_file
from lib.runtime import rank, start, world_size
from lib.settings import RunSettings, UserError


class Experiment:
    """An experiment from its beginning to its JSON: settings, device and dtype are chosen when it begins."""

    def __init__(self, name, paper, settings: RunSettings):
        self.name = name
        self.paper = paper
        self.settings, self.device, self.dtype = start(settings)
        self.folder = Path(settings.out)
        self.environment = environment(self.device, self.dtype)
        self.begun = time.perf_counter()

    def save(self, rows, columns=(), shown=None, **more):
        """Write the JSON, print the rows; returns what the JSON holds.

        Figures are drawn before, so that the JSON is a sign that all is there. Of the rows that are `shown`
        (None: all) the `columns` are printed (none: all). `more` goes into the JSON.
        """
        seconds = round(time.perf_counter() - self.begun, 2)
        result = {
            "experiment": self.name,
            "paper": self.paper,
            "settings": dataclasses.asdict(self.settings),
            "environment": {**self.environment, "seconds": seconds},
            "rows": rows,
            **more,
        }
        if rank() == 0:
            try:
                json.dumps(rows, allow_nan=False, default=np.generic.item)
            except ValueError:
                raise UserError("the result is not finite: check the weights for huge numbers") from None
            write_json(result, self.folder / f"{self.name}.json")
            print_rows(rows if shown is None else shown, columns)
        return result


def environment(device, dtype):
    """What a result is made with: versions, device, commit, threads and processes."""
    device_name = processor_name()
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name,
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "processes": world_size(),
    }


def processor_name():
    """The processor's name as Linux tells it, elsewhere its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(": ")[1]
    return platform.machine()


def commit():
    """HEAD's commit, with "-dirty" if any code was changed since; None if this is no checkout."""
    root = Path(__file__).parent.parent

    def git(*words):
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)

    try:
        head = git("rev-parse", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", "*.py")
    except OSError:  # there is no git
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("-dirty" if changed.returncode else "")


def write_json(result, path) -> None:
    """Write a result, a line for each row: made for reading and for git diff. ValueError for NaN.

    numpy's numbers are written as Python's.
    """
    dump = functools.partial(json.dumps, allow_nan=False, default=np.generic.item)
    parts = []
    for key, value in result.items():
        if isinstance(value, list):
            lines = [dump(item) for item in value]
            text = "[\n  " + ",\n  ".join(lines) + "\n ]"
        else:
            text = dump(value)
        parts.append(f'"{key}": {text}')
    with atomic_file(path) as temporary:
        temporary.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def print_rows(rows, columns=()) -> None:
    """Print rows as a table; of layers and positions 0, the powers of two and the last."""
    table = pd.DataFrame(rows, dtype=object)  # a seed stays a whole number beside a model that has none
    for along in ("layer", "position"):
        if along in table:
            indices = table[along].fillna(0)
            last = indices.max()
            for owner in {"model", "checkpoint"} & set(table):  # models may have different numbers of layers
                last = indices.groupby(table[owner]).transform("max")
            table = table[indices.map(is_power_of_two) | (indices == 0) | (indices == last)]
    present = [name for name in columns or table.columns if name in table]
    print(table[present].fillna("n/a").to_string(index=False, float_format="{:.4g}".format))


def is_power_of_two(number):
    """Is a whole number 1, 2, 4, 8, ...?"""
    return number > 0 and number & (number - 1) == 0


def mean_over_seeds(samples, measured):
    """One row for samples that differ in the `measured` values only: their means.

    `seed_std` is the standard deviation of the first measured value. The columns' order is kept.
    """
    table = pd.DataFrame(samples)
    keys = [name for name in table if name not in measured]
    rows = []
    for _, group in table.groupby(keys, sort=False, dropna=False):
        row = {name: samples[group.index[0]][name] for name in keys}
        for name in measured:
            row[name] = float(group[name].to_numpy().mean())
        row["seed_std"] = float(group[measured[0]].to_numpy().std())
        rows.append(row)
    return rows
