"""What does `compare` cost for two models of 7B parameters, and what does it say? (ours; on Linux)

    python -m reproduce.large --models /tmp/large     # 27 GB of disk; an hour and more

A newborn of Llama-2-7B's shapes is written in bfloat16, and one after another a child with noise of 0.3 std,
the same disguised, and a stranger; a layer at a time is in memory. `seedprint.py compare` then reads two of
them. Rows add its seconds, and `own_gigabytes`: the most memory that it had beside the mapped files.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from init import keyed_generator
from lib.checkpoint import Newborn, config_json
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, OutputSettings, UserError, run_script
from lineage.disguise import axes_of
from model import ModelConfig

LLAMA_2_7B = ModelConfig(32_000, 4096, 32, 32, 4096, 11_008)
NOISE = 0.3  # of a child, in units of each matrix's standard deviation


@dataclass
class Settings(OutputSettings):
    """Where the models are written."""

    models: str = "large"  # new folder, which is removed in the end


def large(settings: Settings):
    """What does `compare` cost for two models of 7B parameters? Writes large.json"""
    experiment = Experiment("large", "", settings)
    folder = Path(settings.models)
    base = Newborn(LLAMA_2_7B, 0)
    stranger = Newborn(LLAMA_2_7B, 1)
    suspects = {"noised": (base, noised), "disguised": (base, disguised), "stranger": (stranger, noised)}
    write(folder / "base", base, lambda name, weight: weight)
    rows = []
    for name, (source, change) in suspects.items():
        write(folder / name, source, change)
        rows.append({"suspect": name} | compared(folder / "base", folder / name))
        shutil.rmtree(folder / name)
    shutil.rmtree(folder)
    return experiment.save(rows, ("suspect", "verdict", "seconds", "own_gigabytes"))


def write(folder, source, change):
    """A checkpoint folder in bfloat16, a file for each layer, of parameters that `change` has changed."""
    folder.mkdir(parents=True)
    files = defaultdict(list)  # parameters' names by the file's
    for name in source.shapes:
        files[".".join(name.split(".")[:3]) + ".safetensors"].append(name)
    for file, names in progress(files.items(), desc=folder.name, unit=" files"):
        weights = {name: change(name, source.read(name)).bfloat16().contiguous() for name in names}
        save_file(weights, folder / file)
    places = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config_json(source.config)))


def noised(name, weight):
    """A parameter with noise; gains, which are all 1, stay as they are."""
    if weight.ndim == 1:
        return weight
    noise = keyed_generator("noise", name).standard_normal(weight.shape, np.float32)
    return weight + NOISE * weight.std() * torch.from_numpy(noise)


def disguised(name, weight):
    """A noised parameter in another basis; its layer's units in another order, half with other signs."""
    weight = noised(name, weight)
    along = axes_of(name)
    if along[0] != "stream":
        weight = weight @ basis(weight.shape[1])
    elif weight.ndim == 2:
        weight = basis(len(weight)).T @ weight
    if "units" in along:
        axis = along.index("units")
        generator = keyed_generator("units", name.split(".")[2])
        order = torch.from_numpy(generator.permutation(weight.shape[axis]))
        signs = torch.from_numpy(generator.choice(np.float32([-1, 1]), len(order)))
        weight = weight.index_select(axis, order)
        if "gate" not in name:
            weight *= signs.unsqueeze(1 - axis)
    return weight


@functools.cache
def basis(d):
    """A random basis of the residual stream, (d, d)."""
    numbers = keyed_generator("basis").standard_normal((d, d), np.float32)
    return torch.linalg.qr(torch.from_numpy(numbers)).Q


def compared(base, suspect):
    """What `compare` says of two folders, in a process of its own: its row, seconds and gigabytes."""
    command = [sys.executable, "seedprint.py", "compare", str(base), str(suspect), "--out", str(suspect)]
    begun = time.perf_counter()
    process = subprocess.Popen(command)
    most = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        most = max([most, *map(int, re.findall(r"RssAnon:\s+(\d+) kB", status))])
        time.sleep(0.1)
    if process.returncode:
        raise UserError(f"compare ended with status {process.returncode}")
    seconds = round(time.perf_counter() - begun)
    (row,) = json.loads((suspect / "compare.json").read_text())["rows"]
    return row | {"seconds": seconds, "own_gigabytes": most * 1024 / 1e9}


COMMANDS = {"": Command(large, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
