"""Devices, and work shared between processes.

Under `torchrun` the same command shares its work among processes; rank 0 prints and writes.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # import before a group exists, or its functions' defaults keep it alive
from tqdm import tqdm

from lib.settings import RunSettings, UserError, meet, mistake_in, raise_first

BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}  # tokens in a forward pass
PATIENCE = float(os.environ.get("BORNBIASED_PATIENCE", 86_400))  # seconds that ranks wait for each other


def start(settings: RunSettings):
    """Join torchrun's processes, choose device and dtype, and make the folder `out`; UserError on failure.

    Returns the settings with device and dtype filled in, the torch.device and the torch.dtype.
    """
    device = choose_device(getattr(settings, "device", "cpu"))
    try:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=settings.out).close()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to the folder --out {settings.out!r}: {error}") from None
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        store, rank, size = meet()
        options = {"timeout": timedelta(seconds=PATIENCE), "store": store, "rank": rank, "world_size": size}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    if not isinstance(settings, RunSettings):  # no model is run
        return settings, device, torch.float32
    dtype = settings.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    settings = dataclasses.replace(settings, device=device.type, dtype=dtype)
    return settings, device, getattr(torch, dtype)


def gathered(value=None):
    """The list of each rank's value; waits for all ranks."""
    values = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def together(work, *arguments):
    """What `work(*arguments)` returns on this rank; UserError on all ranks if any makes a mistake."""
    result, mistake = None, ""
    try:
        result = work(*arguments)
    except Exception as error:
        mistake = mistake_in(error)
        if not mistake:
            raise
    raise_first(gathered(mistake))
    return result


def check_agreement(facts) -> None:
    """UserError unless all ranks have the same `facts`, a dictionary."""
    first, *others = gathered(facts)
    for number, theirs in enumerate(others, start=1):
        for name in first:
            if theirs[name] != first[name]:
                differ = f"rank 0 has {name} {first[name]}, rank {number} {theirs[name]}"
                raise UserError(f"{differ}: give all machines the same code, data, settings and run folder")


def choose_device(name):
    """The torch.device of `--device`: each local rank has its own GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
        raise UserError(f"more processes than GPUs: this machine has {torch.cuda.device_count()}")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def default_batch_size(device, sequence_length):
    """Sequences per forward pass, at least one."""
    return max(1, BATCH_TOKENS[device.type] // sequence_length)


def rank():
    """This process's number; 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """The number of processes; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def shard(count):
    """This rank's contiguous part of range(count)."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def sum_over_ranks(tensor):
    """Sum a tensor over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def progress(*iterable, **keywords):
    """A tqdm bar on rank 0's stderr, if that is a terminal."""
    return tqdm(*iterable, disable=None if rank() == 0 else True, **keywords)


@contextlib.contextmanager
def listening_for_signals():
    """A context whose list collects SIGTERM, SIGINT and SIGUSR1, which then do not end the process."""
    received = []
    before = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        before[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def seconds_of(work, *arguments):
    """Seconds that `work(*arguments)` takes; reading one number of its tensor waits for the device."""
    begun = time.perf_counter()
    work(*arguments).flatten()[0].item()
    return time.perf_counter() - begun


@functools.cache
def matmul_peak(device, dtype):
    """FLOP/s of large matrix products on all ranks together, best of ten: an MFU of 1."""
    size = 8192 if device.type == "cuda" else 2048
    matrix = torch.randn(size, size, device=device).to(dtype)
    seconds = min(seconds_of(torch.nn.functional.linear, matrix, matrix) for _ in range(10))
    return world_size() * 2 * size**3 / seconds
