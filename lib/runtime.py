"""Devices, and work shared between processes.

Under `torchrun` the same command shares its work among processes; rank 0 prints and writes.
"""

import contextlib
import dataclasses
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from lib.settings import RunSettings, UserError, rank

BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}  # tokens in a forward pass
PATIENCE = timedelta(days=1)  # how long ranks wait for each other, while one prepares data


def start(settings: RunSettings):
    """Join torchrun's processes, choose device and dtype, and make the folder `out`.

    Returns the settings with device and dtype filled in, the torch.device and the torch.dtype.
    """
    device = choose_device(getattr(settings, "device", "cpu"))
    try:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to the folder --out {settings.out!r}: {error}") from None
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        store, number, size = next(dist.rendezvous("env://", timeout=PATIENCE))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # several machines count restarts separately
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        options = {"timeout": PATIENCE, "store": store, "rank": number, "world_size": size}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    if not isinstance(settings, RunSettings):  # no model is run
        return settings, device, torch.float32
    dtype = settings.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    settings = dataclasses.replace(settings, device=device.type, dtype=dtype)
    return settings, device, getattr(torch, dtype)


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


@contextlib.contextmanager
def first_process_first():
    """A context that rank 0 leaves before the others enter it."""
    if rank() > 0:
        gathered()
    yield
    if rank() == 0:
        gathered()


def gathered(value=None):
    """The list of each rank's value; waits for all ranks."""
    values = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def check_agreement(facts) -> None:
    """UserError unless all ranks have the same `facts`, a dictionary."""
    first, *others = gathered(facts)
    for number, theirs in enumerate(others, start=1):
        for name in first:
            if theirs[name] != first[name]:
                differ = f"rank 0 has {name} {first[name]}, rank {number} {theirs[name]}"
                raise UserError(f"{differ}: give all machines the same code, data, settings and run folder")


def progress(*iterable, **keywords):
    """A tqdm bar on rank 0's stderr, if that is a terminal."""
    return tqdm(*iterable, disable=None if rank() == 0 else True, **keywords)


@contextlib.contextmanager
def listening_for_signals():
    """A context whose list collects SIGTERM, SIGINT and SIGUSR1, which then do not end the process."""
    received = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
