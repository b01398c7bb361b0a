"""How fast is it, beside transformers?

    python -m reproduce.bench                             # all of it, five minutes on 2 cores
    python -m reproduce.bench --work forward --rounds 9

`forward` is the last position's final state of random sequences, `training` a step of train.py: forward and
backward pass in `dtype` with float32 weights, clipping, AdamW. transformers' model has the same shape, dtype
and batch and, in training, the same loop. Both take turns, in alternating order. Rows have the medians, in
tokens a second, `ratio`, ours to theirs, and `lowest` and `highest`, those of single turns.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import pandas as pd
import torch

from init import newborn
from lib.checkpoint import config_json
from lib.folders import KEYS
from lib.results import Experiment
from lib.runtime import progress, seconds_of
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from model import PRESETS, ModelConfig
from train import loss_sum

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
)


@dataclass
class Settings(RunSettings):
    """What `python -m reproduce.bench` can be told."""

    work: tuple[Literal["forward", "training"], ...] = ("forward", "training")
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
        contestants = training_steps if work == "training" else forward_passes
        ours, theirs = contestants(name, tokens, dtype)
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


def training_steps(name, tokens, dtype):
    """Ours and theirs: a step of train.py's loop on windows (B, T + 1)."""
    ours = newborn(name, 0, device=tokens.device).train()
    theirs = transformers_model(PRESETS[name]).to(tokens.device).train()

    def their_logits(inputs):
        return theirs(inputs, use_cache=False).logits

    steps = []
    for model, forward in ((ours, ours), (theirs, their_logits)):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        steps.append(partial(training_step, model, forward, optimizer, tokens, dtype))
    return steps


def training_step(model, forward, optimizer, window, dtype):
    """The loss of a step; `forward` maps tokens to the model's logits."""
    targets = window[:, 1:]
    loss = loss_sum(forward, window[:, :-1], targets, window.device, dtype) / targets.numel()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


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
    works = [("ours", ours), ("transformers", theirs)]
    for _, work in works:
        work()  # the first call allocates
    turns = []
    for _ in range(rounds):
        works.reverse()
        turns.append({name: num_tokens / seconds_of(work) for name, work in works})
    speed = pd.DataFrame(turns)
    ours, theirs = speed[["ours", "transformers"]].median()
    ratios = speed["ours"] / speed["transformers"]
    row = {"ours": ours, "transformers": theirs, "ratio": ours / theirs}
    return row | {"lowest": ratios.min(), "highest": ratios.max()}


COMMANDS = {"": Command(bench, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
