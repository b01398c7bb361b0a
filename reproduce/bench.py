"""How fast is it, against the machine's limit and against transformers?

    python -m reproduce.bench                                       # all of it: fifteen minutes on 2 cores
    python -m reproduce.bench --work forward --model nano_llama --sequence-length 512 --rounds 9
    python -m reproduce.bench --work training

One table, in tokens a second. `forward` is the last position's final state of random sequences, `training` a
step of train.py: forward and backward pass in `dtype` with float32 weights, clipping, AdamW. transformers'
model has the same shape, dtype and batch and, in training, the same loop. Ours, theirs and the matrix product
that measures the device's peak take turns, in alternating order; medians count. `ratio` is ours to theirs,
`lowest` and `highest` are those of single turns. `share` is of that peak, in the products that the answer
needs: what is computed beyond is a loss. (What streaming a 7B folder costs: tests/streaming.py.)
"""

import lib.interrupt  # noqa: F401 # isort: skip
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pandas as pd
import torch

from init import newborn
from lib.checkpoint import check_lengths, config_json
from lib.folders import KEYS
from lib.results import Experiment
from lib.runtime import BATCH_TOKENS, progress
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from lib.speed import forward_flops, matmul_peak, seconds_of, training_flops
from model import PRESETS, ModelConfig
from train import loss_sum

TRAINED = {  # batch size, sequence length; on CUDA 32 x all
    "tiny_gpt2": (32, 256),
    "tiny_llama": (32, 256),
    "nano_gpt2": (4, 512),
    "nano_llama": (4, 512),
}
OURS = "ours"
THEIRS = "transformers"
COLUMNS = (
    "model",
    "work",
    "batch_size",
    "sequence_length",
    "dtype",
    OURS,
    THEIRS,
    "ratio",
    "lowest",
    "highest",
    "share",
    "peak_gflops",
)


@dataclass
class Settings(RunSettings):
    """What `python -m reproduce.bench` can be told; `--dtype auto` times both dtypes."""

    work: tuple[Literal["forward", "training"], ...] = ("forward", "training")
    """what to time"""
    model: tuple[Literal[tuple(PRESETS)], ...] = ("nano_gpt2", "nano_llama", "nano_qwen")
    """presets whose forward pass is timed"""
    sequence_length: tuple[int, ...] = (64, 512, 1024)
    """tokens in a sequence of a forward pass"""
    tokens: at_least(1) | None = None
    """in a batch of a forward pass (default: 2048; on CUDA 65536)"""
    rounds: at_least(1) = 5
    """measurements of each contestant; the median counts"""


def bench(settings: Settings):
    """Time forward passes and training steps. Writes bench.json."""
    if "forward" in settings.work:
        check_lengths(settings.sequence_length, min(PRESETS[name].context_length for name in settings.model))
    experiment = Experiment("bench", "", settings)
    dtypes = [torch.bfloat16, torch.float32]
    if settings.dtype != "auto":
        dtypes = [experiment.dtype]
    rows = []
    if "forward" in settings.work:
        for name, dtype in itertools.product(settings.model, dtypes):
            rows += forward_rows(name, settings, experiment.device, dtype)
    if "training" in settings.work:
        for name, dtype in itertools.product(TRAINED, dtypes):
            rows.append(training_row(name, settings, experiment.device, dtype))
    return experiment.save(rows, COLUMNS)


# ---- what is timed -----------------------------------------------------------------------------------------


@torch.inference_mode()
def forward_rows(name, settings: Settings, device, dtype):
    """Last-position states of random sequences: a row for each length."""
    config = PRESETS[name]
    ours = newborn(name, 0, device=device, dtype=dtype)
    theirs = transformers_model(config).to(device, dtype)
    num_tokens = settings.tokens or BATCH_TOKENS[device.type]
    rows = []
    for T in progress(settings.sequence_length, desc=name, unit=" lengths"):
        tokens = torch.randint(config.vocab_size, (max(1, num_tokens // T), T), device=device)
        works = {
            OURS: partial(ours.hidden, tokens, last_only=True),
            THEIRS: partial(last_states, theirs, tokens),
        }
        for work in works.values():
            work()  # the first call allocates
        flops = forward_flops(config, T, last_only=True) / T
        key = {"model": name, "work": "forward", "batch_size": len(tokens), "sequence_length": T}
        key["dtype"] = str(dtype).removeprefix("torch.")
        rows.append(key | take_turns(works, tokens.numel(), flops, settings.rounds, device, dtype))
    return rows


def last_states(model, tokens):
    """Final last-position states of a model of transformers, (n, d)."""
    return model(tokens, use_cache=False)[0][:, -1]


def training_row(name, settings: Settings, device, dtype):
    """Training steps of ours and of transformers' model in the same loop."""
    config = PRESETS[name]
    B, T = TRAINED[name]
    if device.type == "cuda":
        B, T = 32, config.context_length
    window = torch.randint(config.vocab_size, (B, T + 1), device=device)
    ours = newborn(name, 0, device=device).train()
    theirs = transformers_model(config, head=True).to(device).train()
    works = {
        OURS: training_work(ours, ours, window, dtype),
        THEIRS: training_work(theirs, partial(logits, theirs), window, dtype),
    }
    key = {"model": name, "work": "training", "batch_size": B, "sequence_length": T}
    key["dtype"] = str(dtype).removeprefix("torch.")
    return key | take_turns(works, B * T, training_flops(config, T), settings.rounds, device, dtype)


def training_work(model, forward, window, dtype):
    """A training step on a window (B, T + 1), after its first call, which allocates."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    work = partial(training_step, model, forward, optimizer, window, dtype)
    work()
    return work


def training_step(model, forward, optimizer, window, dtype):
    """A step of train.py's loop; `forward` maps tokens to the model's logits."""
    targets = window[:, 1:]
    loss = loss_sum(forward, window[:, :-1], targets, window.device, dtype) / targets.numel()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def logits(model, tokens):
    """Logits of a model of transformers, (B, T, V)."""
    return model(tokens, use_cache=False).logits


def transformers_model(config: ModelConfig, head=False):
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
        shape["model_type"] = "gpt_neox"
        shape["use_parallel_residual"] = False
        shape["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": 1.0,
        }
    kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
    theirs = transformers.AutoConfig.for_model(**shape)
    return kind.from_config(theirs, attn_implementation="sdpa").eval()


# ---- how it is timed ---------------------------------------------------------------------------------------


def take_turns(works, num_tokens, flops, rounds, device, dtype):
    """Tokens a second of `works`, ours and theirs, which take turns with each other and the matrix product.

    Each works on `num_tokens` tokens, of which one needs `flops`.
    """
    samples = []
    for turn in range(rounds):
        sample = {"peak": matmul_peak(device, dtype)}
        order = list(works)
        if turn % 2 == 0:
            order.reverse()
        for who in order:
            sample[who] = num_tokens / seconds_of(works[who])
        samples.append(sample)
    table = pd.DataFrame(samples)
    ours, theirs, peak = table[[OURS, THEIRS, "peak"]].median()
    ratios = table[OURS] / table[THEIRS]
    speed = {OURS: ours, THEIRS: theirs, "ratio": ours / theirs}
    speed |= {"lowest": ratios.min(), "highest": ratios.max()}
    return speed | {"share": ours * flops / peak, "peak_gflops": peak / 1e9}


COMMANDS = {"": Command(bench, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
