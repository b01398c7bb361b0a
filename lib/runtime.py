"""Devices, and work shared between torchrun's processes, of which rank 0 prints and writes."""

import dataclasses
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # import before a group exists, or its functions' defaults keep it alive
from tqdm import tqdm

from lib.settings import RunSettings, UserError, rank

BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}  # tokens in a forward pass
PATIENCE = timedelta(days=1)  # how long ranks wait for each other, while one prepares data


def start(settings: RunSettings):
    """Join torchrun's processes, make `out`; returns the full settings, the torch.device and torch.dtype."""
    device = choose_device(getattr(settings, "device", "cpu"))
    try:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to the folder --out {settings.out!r}: {error}") from None
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        # init_process_group alone, restarted by torchrun, would take the address of a rank that has ended.
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


def gathered(value=None):
    """The list of each rank's value; waits for all ranks."""
    values = [value] * world_size()
    if dist.is_initialized():
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise UserError(f"another process has ended: {error}") from None
    return values


def progress(*iterable, **keywords):
    """A tqdm bar on rank 0's stderr, if that is a terminal."""
    return tqdm(*iterable, disable=None if rank() == 0 else True, **keywords)
