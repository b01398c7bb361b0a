"""Where does a script compute, and with whom does it share the work?

Under `torchrun` the same command shares its work among processes; rank 0 prints and writes.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from lib.settings import RunSettings, UserError

BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}  # tokens in a forward pass

# ---- device ------------------------------------------------------------------------------------------------


def start(settings: RunSettings):
    """Begin an experiment: join torchrun's processes, make `out`, choose device and dtype.

    Returns the settings with device and dtype filled in, the torch.device and the torch.dtype. UserError for
    a device that is not there, or a folder that cannot be written.
    """
    device = choose_device(settings.device)
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=1))
    try:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=settings.out).close()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to the folder --out {settings.out!r}: {error}") from None
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" or bfloat16_is_fast() else "float32"
    settings = dataclasses.replace(settings, device=device.type, dtype=dtype)
    return settings, device, settings.torch_dtype


def choose_device(name):
    """The device of `--device`: each local rank has a GPU of its own."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
        raise UserError(f"more processes than GPUs: this machine has {torch.cuda.device_count()}")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def bfloat16_is_fast():
    """Does this CPU multiply bfloat16 matrices by instructions of their own?"""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def default_batch_size(device, sequence_length):
    """Sequences in a forward pass; two at least, since states are compared within a batch."""
    return max(2, BATCH_TOKENS[device.type] // sequence_length)


# ---- processes ---------------------------------------------------------------------------------------------


def rank():
    """The number of this process in its group; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """The number of processes in the group; 1 if this one is alone."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(count):
    """This rank's share of range(count): contiguous, every index in exactly one rank's share."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def sum_over_ranks(tensor):
    """The element-wise sum of all ranks' tensors, in place; alone, the tensor as it is."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def wait_for_all(device) -> None:
    """Return when every rank has come here."""
    sum_over_ranks(torch.zeros((), device=device))


def progress(*iterable, **keywords):
    """A tqdm bar on rank 0's stderr; silent where that is no terminal."""
    return tqdm(*iterable, disable=None if rank() == 0 else True, **keywords)


def warn(text) -> None:
    """Say something on stderr, once."""
    if rank() == 0:
        print(text, file=sys.stderr)


@contextlib.contextmanager
def listening_for_signals():
    """A list that SIGTERM and SIGINT append to, instead of ending the process."""
    received = []

    def note(number, frame) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
