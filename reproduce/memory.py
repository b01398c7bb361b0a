"""How much memory does a rank need to train a model?

    python -m reproduce.memory --dtype bfloat16                    # of configs/*.py: a minute, and no memory
    python -m reproduce.memory --model tiny_llama --micro-batch-size 16 --sequence-length 256 --measure

Two steps of train.py's loop run with fake tensors, which have a shape and no content, and all that is alive
is added up: weights, gradients, AdamW's two moments, and what the forward pass keeps for the backward pass.
`--measure` runs the same steps in a process of their own, and reads what they took. `torch.compile`, which
keeps less, is not counted, nor what the libraries take for themselves.
"""

import lib.interrupt  # noqa: F401 # isort: skip
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import train
from lib.checkpoint import check_lengths
from lib.results import Experiment
from lib.settings import Command, RunSettings, UserError, at_least, closest, read_config_file, run_script
from model import PRESETS, Transformer

GIB = 2**30  # bytes
CONFIGS = Path(train.__file__).with_name("configs")
PARTS = {
    "Parameter": "weights",
    "Gradient": "gradients",
    "Optstate": "moments",
}  # the tracker names, ours
MMAP_THRESHOLD = "65536"  # bytes: tensors from here on go back to the system when they are freed


@dataclass
class Settings(RunSettings):
    """What `python -m reproduce.memory` can be told."""

    model: tuple[str, ...] = ("nano_gpt2", "nano_llama", "nano_qwen", "llama_60m", "gpt2_1b")
    """presets"""
    micro_batch_size: at_least(1) | None = None
    """sequences in a forward pass (default: that of configs/<model>.py)"""
    sequence_length: at_least(1) | None = None
    """tokens in a sequence (default: that of configs/<model>.py)"""
    measure: bool = False
    """run the steps, too"""


def memory(settings: Settings):
    """Work out the peak of a training step for every model, and measure it. Writes memory.json."""
    shapes = [training_shape(name, settings) for name in settings.model]
    if settings.measure and not Path("/proc/self/status").exists():
        raise UserError("--measure reads /proc, which Linux alone has")
    experiment = Experiment("memory", "", settings)
    rows = []
    for name, (B, T) in zip(settings.model, shapes):
        row = {"model": name, "micro_batch_size": B, "sequence_length": T}
        row |= worked_out(name, B, T, experiment.dtype)
        if settings.measure:
            row["measured_gib"] = measured_apart(name, B, T, experiment.device, experiment.dtype) / GIB
            row["ratio"] = row["total_gib"] / row["measured_gib"]
        rows.append(row)
    return experiment.save(rows)


def training_shape(name, settings: Settings):
    """Sequences in a forward pass, and tokens in a sequence. UserError for a wrong name or length."""
    config = PRESETS[closest(name, PRESETS, "preset")]
    path = CONFIGS / f"{name}.py"
    defaults = train.Settings()
    if path.exists():
        defaults = read_config_file(str(path), defaults)
    elif None in (settings.micro_batch_size, settings.sequence_length):
        raise UserError(f"there is no configs/{name}.py: give --micro-batch-size and --sequence-length")
    B = settings.micro_batch_size or defaults.micro_batch_size
    T = settings.sequence_length or defaults.sequence_length
    check_lengths((T,), config.context_length)
    return B, T


def worked_out(name, B, T, dtype):
    """GiB at the peak of a step, and what is alive at that moment, from tensors without content."""
    tracker = MemTracker()
    with FakeTensorMode():
        model = Transformer(PRESETS[name]).train()
        optimizer = train.make_optimizer(model, train.Settings())
        tracker.track_external(model, optimizer)
        with tracker:
            train_a_little(model, optimizer, B, T, dtype, tracker.reset_mod_stats)
    (peak,) = tracker.get_tracker_snapshot("peak").values()  # of the one device: type of tensor -> bytes
    sizes = {getattr(kind, "value", kind): size for kind, size in peak.items()}
    total = sizes.pop("Total")
    row = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    row["total_gib"] = total / GIB
    for kind, part in PARTS.items():
        row[f"{part}_gib"] = sizes.pop(kind) / GIB
    row["activations_gib"] = sum(sizes.values()) / GIB
    return row


def train_a_little(model, optimizer, B, T, dtype, before_forward=lambda: None) -> None:
    """Two steps of train.py, each of two micro-batches (B, T); from the second on AdamW has its moments."""
    device = model.model.norm.weight.device
    for _ in range(2):
        for _ in range(2):  # the second one's activations are alive beside the first one's gradients
            before_forward()
            window = torch.zeros(B, T + 1, dtype=torch.int64, device=device)
            loss = train.loss_sum(model, window[:, :-1], window[:, 1:], device, dtype) / (B * T)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# ---- measured ----------------------------------------------------------------------------------------------


def measured_apart(name, B, T, device, dtype):
    """Bytes that two steps take at their peak, in a process that does nothing else."""
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = MMAP_THRESHOLD
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measured, args=(name, B, T, device, dtype, sender))
    try:
        process.start()
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        if before is not None:
            os.environ["MALLOC_MMAP_THRESHOLD_"] = before
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise UserError(f"the process that trained {name} died: too little memory for {B} x {T}?") from None
    finally:
        process.join()


def measured(name, B, T, device, dtype, sender) -> None:
    """Send the peak of two steps, in bytes above what the process had after two steps of a small model."""
    run_steps("matching", 1, 8, device, dtype)  # loads the libraries
    before = peak_bytes(device)
    run_steps(name, B, T, device, dtype)
    sender.send(peak_bytes(device) - before)


def run_steps(name, B, T, device, dtype) -> None:
    """Two training steps of a model whose weights are zero: memory does not depend on them."""
    with torch.device(device):
        model = Transformer(PRESETS[name]).train()
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = train.make_optimizer(model, train.Settings())
    train_a_little(model, optimizer, B, T, dtype)


def peak_bytes(device):
    """The most memory that this process has held: on CUDA of tensors, on a CPU (Linux) of everything."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])


COMMANDS = {"": Command(memory, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
