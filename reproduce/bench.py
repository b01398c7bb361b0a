"""Measure our speed beside transformers.

    python -m reproduce.bench                         # two to five minutes on 2 cores
    python -m reproduce.bench --device cuda --dtype bfloat16           # compiled, alone on a GPU

Both do steps of training on random sequences, in turns: ours as train.py does them, and a transformers model
of the same shape (there is no GPT-2 with RoPE). Medians, in tokens/s.
"""

import time
from statistics import median

import torch
import torch.nn.functional as F

import train
from init import newborn
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, RunSettings, run_script
from model import PRESETS, ModelConfig
from sources.checkpoint import config_json

CASES = (("tiny_llama", 32, 256), ("nano_llama", 4, 512))  # preset, sequences in a batch, tokens in each
GPU_CASES = (("llama_60m", 32, 2048), ("nano_gpt2", 32, 1024))
ROUNDS = 5  # steps of each; the median counts


def bench(settings: RunSettings):
    """How many tokens/s do we and transformers train on?"""
    experiment = Experiment("bench", "", settings)
    rows = []
    cases = GPU_CASES if experiment.device.type == "cuda" else CASES
    for name, B, T in progress(cases, desc="bench", unit=" cases"):
        tokens = torch.randint(PRESETS[name].vocab_size, (B, T + 1), device=experiment.device)
        steps = training_steps(name, tokens, experiment.dtype)
        for step in steps:
            step()  # the first call allocates
        turns = [[seconds_of(step) for step in steps] for _ in range(ROUNDS)]
        ours, *theirs = [B * T / median(seconds) for seconds in zip(*turns)]
        row = {"model": name, "batch_size": B, "sequence_length": T, "ours": ours}
        if theirs:
            row |= {"transformers": theirs[0], "ratio": ours / theirs[0]}
        rows.append(row)
    return experiment.save(rows)


def seconds_of(step):
    """Seconds that a step takes; reading its loss waits for the device."""
    begun = time.perf_counter()
    step().item()
    return time.perf_counter() - begun


def training_steps(name, tokens, dtype):
    """Functions, ours and for a LLaMA theirs: a step on windows (B, T + 1), which returns the mean loss."""
    ours = newborn(name, 0, device=tokens.device)
    steps = [training_step(ours, ours, tokens, dtype)]
    if PRESETS[name].norm == "layernorm":
        return steps
    theirs = transformers_model(PRESETS[name]).to(tokens.device)

    def their_loss(inputs, targets):
        logits = theirs(inputs, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    return [*steps, training_step(theirs, their_loss, tokens, dtype)]


def training_step(model, summed_loss, tokens, dtype):
    """A function that does a step; `summed_loss` takes inputs and targets, (B, T) each."""
    if tokens.device.type == "cuda":
        model.compile()
    optimizer = train.make_optimizer(model.train(), train.Settings())

    def step():
        loss = train.loss_sum(summed_loss, tokens[:, :-1], tokens[:, 1:], tokens.device, dtype)
        loss = loss / tokens[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def transformers_model(config: ModelConfig):
    """A LLaMA of `transformers`, with random weights and SDPA (requirements-dev.txt)."""
    import transformers

    theirs = transformers.AutoConfig.for_model(**config_json(config))
    return transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa").eval()


COMMANDS = {"": Command(bench, RunSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
