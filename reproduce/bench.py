"""How fast is it, and in how much memory, beside transformers?

    python -m reproduce.bench                             # all of it, a quarter of an hour on 2 cores
    python -m reproduce.bench --work forward --rounds 9

`forward` is the last position's final state of random sequences, `training` a step of train.py: forward and
backward pass in `dtype` with float32 weights, clipping, AdamW; `compiled` is the same with torch.compile.
transformers' model has the same shape, dtype and batch and, in training, the same loop. Both take turns, in
alternating order. Rows have the medians, in tokens a second, `ratio`, ours to theirs, and `lowest` and
`highest`, those of single turns; `our_peak` and `their_peak` are the memory of a process that does nothing
else, in GiB.
"""

import multiprocessing
import re
import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.nn.functional as F

from init import newborn
from lib.checkpoint import config_json
from lib.formats import KEYS
from lib.results import Experiment
from lib.runtime import progress, seconds_of
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from model import PRESETS, ModelConfig, Transformer

CASES = (  # work, preset, sequences in a batch (on CUDA 32 times as many), tokens in a sequence
    ("forward", "nano_gpt2", 32, 64),
    ("forward", "nano_gpt2", 4, 512),
    ("forward", "nano_gpt2", 2, 1024),
    ("forward", "nano_llama", 32, 64),
    ("forward", "nano_llama", 4, 512),
    ("forward", "nano_llama", 2, 1024),
    ("training", "tiny_gpt2", 32, 256),
    ("training", "tiny_llama", 32, 256),
    ("training", "nano_gpt2", 4, 512),
    ("training", "nano_llama", 4, 512),
    ("compiled", "tiny_gpt2", 32, 256),
    ("compiled", "tiny_llama", 32, 256),
)


@dataclass
class Settings(RunSettings):
    """What `python -m reproduce.bench` can be told."""

    work: tuple[Literal["forward", "training", "compiled"], ...] = ("forward", "training", "compiled")
    """what to time"""
    rounds: at_least(1) = 5
    """turns of each; the median counts"""


def bench(settings: Settings):
    """Time forward passes and training steps. Writes bench.json."""
    experiment = Experiment("bench", "", settings)
    device, dtype = experiment.device, experiment.dtype
    rows = []
    cases = [case for case in CASES if case[0] in settings.work]
    for work, name, B, T in progress(cases, desc="bench", unit=" cases"):
        if device.type == "cuda":
            B *= 32
        tokens = torch.randint(PRESETS[name].vocab_size, (B, T + 1), device=device)
        row = {"model": name, "work": work, "batch_size": B, "sequence_length": T}
        row["dtype"] = str(dtype).removeprefix("torch.")
        makers = [partial(make_work, whose, work, name, tokens, dtype) for whose in ("ours", "transformers")]
        row |= take_turns(makers[0](), makers[1](), B * T, settings.rounds)
        row |= dict(zip(("our_peak", "their_peak"), map(peak_memory, makers)))
        rows.append(row)
    return experiment.save(rows)


def make_work(whose, work, name, tokens, dtype):
    """A function to time: a forward pass, or a training step, on windows (B, T + 1)."""
    if whose == "ours":
        model = newborn(name, 0, device=tokens.device)
    else:
        model = transformers_model(PRESETS[name]).to(tokens.device)
    if work == "forward":
        model = model.cast_blocks(dtype) if whose == "ours" else model.to(dtype).base_model
        return partial(forward_pass, model, tokens[:, :-1])
    loss = model if whose == "ours" else partial(their_loss, model)
    if work == "compiled":
        loss = torch.compile(loss)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return partial(training_step, model.train(), loss, optimizer, tokens, dtype)


@torch.inference_mode()
def forward_pass(model, tokens):
    """The last position's final state of tokens (B, T), (B, d)."""
    if isinstance(model, Transformer):
        return model.hidden(tokens, last_only=True)
    return model(tokens, use_cache=False)[0][:, -1]


def their_loss(model, inputs, targets):
    """What our model gives for inputs and targets, of one of transformers'."""
    logits = model(inputs, use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def training_step(model, loss, optimizer, window, dtype):
    """A step on windows (B, T + 1), and its loss; `loss` maps inputs and targets to their summed loss."""
    inputs, targets = window[:, :-1], window[:, 1:]
    with torch.autocast(window.device.type, dtype, enabled=dtype is torch.bfloat16):
        total = loss(inputs, targets)
    (total / targets.numel()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total.detach() / targets.numel()


def transformers_model(config: ModelConfig):
    """transformers' model of a preset's shape, random weights, SDPA; UserError if it is not installed.

    For the GPT-2 style it is GPT-NeoX without parallel residual: the one there with RoPE, LayerNorm and GELU.
    """
    try:
        import transformers
    except ImportError:
        raise UserError("transformers is not installed: pip install -r requirements-dev.txt") from None
    shape = config_json(config)
    if config.mlp == "gelu":
        shape = {theirs: getattr(config, ours) for ours, theirs in KEYS.items()}
        shape |= {"model_type": "gpt_neox", "use_parallel_residual": False}
        rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0}
        shape["rope_parameters"] = rope
    theirs = transformers.AutoConfig.for_model(**shape)
    return transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa").eval()


def take_turns(ours, theirs, num_tokens, rounds):
    """Tokens a second of two works on `num_tokens` tokens, which take turns, and their ratio."""
    works = [ours, theirs]
    for work in works:
        work()  # the first call allocates, and compiles
    speeds = {ours: [], theirs: []}
    for _ in range(rounds):
        works.reverse()
        for work in works:
            speeds[work].append(num_tokens / seconds_of(work))
    row = {"ours": median(speeds[ours]), "transformers": median(speeds[theirs])}
    ratios = [mine / other for mine, other in zip(speeds[ours], speeds[theirs])]
    ratio = row["ours"] / row["transformers"]
    return row | {"ratio": ratio, "lowest": min(ratios), "highest": max(ratios)}


def peak_memory(maker):
    """GiB that a process of its own takes at its peak, in which a work is made and done twice."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(do_twice, maker).result()


def do_twice(maker):
    """Make a work and do it twice; returns this process's peak, in GiB: on CUDA, of the device's memory."""
    work = maker()
    work()
    work()
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status")
    if status.exists():  # of this program; what getrusage has on Linux is also of the one that started it
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # macOS


COMMANDS = {"": Command(bench, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
