"""How fast is it, and in how much memory, beside transformers?

    python -m reproduce.bench                             # all of it, ten minutes on 2 cores
    python -m reproduce.bench --work forward --rounds 9

`forward` is the last position's final state of random sequences, `training` a step of train.py: forward and
backward pass in `dtype` with float32 weights, clipping, AdamW; `compiled` is the same with torch.compile.
transformers' model has the same shape, dtype and batch and, in training, the same loop. Both take turns, in
alternating order. Rows have the medians, in tokens a second, `ratio`, ours to theirs, and `lowest` and
`highest`, those of single turns; `our_peak` and `their_peak` are what a step takes beyond what lies in memory
before it, in GiB.
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.nn.functional as F

from init import newborn
from lib.checkpoint import config_json
from lib.folders import KEYS
from lib.results import Experiment
from lib.runtime import progress, seconds_of
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from model import PRESETS, ModelConfig

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
        if work == "forward":
            ours, theirs = forward_passes(name, tokens, dtype)
        else:
            ours, theirs = training_steps(name, tokens, dtype, is_compiled=work == "compiled")
        rows.append(row | take_turns(ours, theirs, B * T, settings.rounds))
    return experiment.save(rows)


def forward_passes(name, tokens, dtype):
    """Ours and theirs: the last position's final state of all tokens (B, T + 1) but the last, (B, d)."""
    ours = newborn(name, 0, device=tokens.device, dtype=dtype)
    theirs = transformers_model(PRESETS[name]).to(tokens.device, dtype).base_model
    tokens = tokens[:, :-1]

    @torch.inference_mode()
    def our_pass():
        return ours.hidden(tokens, last_only=True)

    @torch.inference_mode()
    def their_pass():
        return theirs(tokens, use_cache=False)[0][:, -1]

    return our_pass, their_pass


def training_steps(name, tokens, dtype, is_compiled):
    """Ours and theirs: a step of train.py's loop on windows (B, T + 1)."""
    ours = newborn(name, 0, device=tokens.device).train()
    theirs = transformers_model(PRESETS[name]).to(tokens.device).train()

    def their_loss(inputs, targets):
        logits = theirs(inputs, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    steps = []
    for model, loss in ((ours, ours), (theirs, their_loss)):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        loss = torch.compile(loss) if is_compiled else loss
        steps.append(partial(training_step, model, loss, optimizer, tokens, dtype))
    return steps


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
    """Tokens a second of two works on `num_tokens` tokens, which take turns, their ratio, and their peaks."""
    works = [ours, theirs]
    for work in works:
        work()  # the first call allocates, and compiles
    peaks = [peak_memory(work) for work in works]
    speeds = {ours: [], theirs: []}
    for _ in range(rounds):
        works.reverse()
        for work in works:
            speeds[work].append(num_tokens / seconds_of(work))
    ratios = [mine / other for mine, other in zip(speeds[ours], speeds[theirs])]
    row = {"ours": median(speeds[ours]), "transformers": median(speeds[theirs])}
    row |= {"ratio": row["ours"] / row["transformers"], "lowest": min(ratios), "highest": max(ratios)}
    return row | dict(zip(("our_peak", "their_peak"), peaks))


def resident_peak():
    """Bytes of memory that this process had at its peak (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def peak_memory(work):
    """GiB that a work takes at its peak, beyond what is there before it: on CUDA, and on Linux."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    forget_peak = Path("/proc/self/clear_refs")
    if not forget_peak.exists():
        return None
    forget_peak.write_text("5")
    before = resident_peak()
    work()
    return (resident_peak() - before) / 2**30


COMMANDS = {"": Command(bench, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
