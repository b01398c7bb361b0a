"""How is an experiment made, judged, saved and shown?

An experiment is a function `measure(settings, device, dtype)` that returns numbers. `conduct` chooses the
device, takes the time, has findings.py judge the rows, and writes a JSON file and a figure. The JSON holds
`experiment`, `paper` (its source), `settings`, `environment`, `rows` (flat objects) and `claims`.
"""

import contextlib
import dataclasses
import json
import platform
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import findings
from common import RunSettings, atomic_path, rank, start, world_size
from figures import draw
from stats import split


def figure(result: dict, folder: Path, **more: str) -> None:
    """The figure of a result's points, or rows, as figures.py has it; and `more`, by name, of other keys."""
    draw(result["experiment"], result.get("points") or result["rows"], folder / f"{result['experiment']}.png")
    for name, key in more.items():
        draw(name, result[key], folder / f"{name}.png")


def conduct(s: RunSettings, name: str, paper: str, measure, columns="", judge=None, plot=figure) -> dict:
    """Make an experiment; print it, write its figures and, as a sign that all is there, <out>/<name>.json.

    `measure` returns the JSON's keys: `rows`, and what it likes: `points` to be drawn, `summary` to be judged
    instead of the rows by `judge` (None: the function of that name in findings.py). `plot(result, folder)`
    draws. Returns the JSON.
    """
    s, device, dtype = start(s)
    made, begun = environment(device, dtype), time.perf_counter()
    found = measure(s, device, dtype)
    rows = found.pop("rows")
    claims = list((judge or getattr(findings, name))(found.get("summary", rows)))
    made["seconds"] = round(time.perf_counter() - begun, 2)
    result = {"experiment": name, "paper": paper, "settings": dataclasses.asdict(s), "environment": made}
    result |= {"rows": rows, "claims": claims} | found
    if plot is not None:
        plot(result, Path(s.out))
    save(result, Path(s.out))
    print_result(result, columns or " ".join(rows[0]))
    return result


def judge_each(name: str, rows: list[dict]) -> list[dict]:
    """What findings.py says of an experiment's rows; of several models, one by one."""
    parts, claims = split(rows, "model") if "model" in rows[0] else {}, getattr(findings, name)
    if len(parts) < 2:
        return list(claims(rows))
    return [one | {"claim": f"{m}: {one['claim']}"} for m, part in parts.items() for one in claims(part)]


def environment(device: torch.device, dtype: torch.dtype) -> dict:
    """What a result is made with; `commit` is HEAD's, if this is a checkout, "-dirty" if code was changed."""
    name, commit = platform.machine(), None
    with contextlib.suppress(OSError, StopIteration):  # /proc/cpuinfo, where there is one
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # git, where this is a checkout
        git = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = git(["git", "rev-parse", "HEAD"], check=True).stdout.strip()
        commit += "-dirty" if git(["git", "diff", "--quiet", "HEAD", "--", "*.py"]).returncode else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else name
    made = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__)
    made |= dict(dtype=str(dtype).removeprefix("torch."), device=name, commit=commit)
    return made | dict(threads=torch.get_num_threads(), processes=world_size())


def save(result: dict, folder: Path) -> None:
    """Rank 0 writes <folder>/<experiment>.json; ValueError for NaN, which is no JSON."""
    lines = []  # one for each key, and for each item of a list: readable, and made for git diff
    for key, value in result.items():
        items = [json.dumps(item, allow_nan=False) for item in (value if type(value) is list else [value])]
        text = "[\n  " + ",\n  ".join(items) + "\n ]" if type(value) is list else items[0]
        lines.append(f'"{key}": {text}')
    if rank() == 0:
        with atomic_path(folder / f"{result['experiment']}.json") as temporary:
            temporary.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def print_result(result: dict, columns: str) -> None:
    """Rank 0 prints rows (along layers or positions 0, powers of two and the last) and claims.

    Of the `columns`, in one string, those that a row has.
    """
    if rank():
        return
    rows = result["rows"]
    table = [[name for name in columns.split() if any(name in row for row in rows)]]
    for along in ("layer", "position"):
        last = max((row.get(along, 0) for row in rows), default=0)
        rows = [row for row in rows if (i := row.get(along, 0)) & (i - 1) == 0 or i == last]
    for row in rows:
        cells = ["n/a" if (cell := row.get(c, "")) is None else cell for c in table[0]]
        table.append([f"{cell:.4g}" if type(cell) is float else str(cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))
    for line in result["claims"]:
        paper = "" if line["paper"] is None else f", paper {line['paper']}"
        print(f"{line['verdict']}: {line['claim']} (measured {line['measured']}{paper})")
