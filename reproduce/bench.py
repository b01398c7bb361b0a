"""How fast is it, against the machine's limit and against transformers?

    python -m reproduce.bench                                       # all of it: about ten minutes on 2 cores
    python -m reproduce.bench forward --model nano_llama --sequence-length 512 --rounds 9
    python -m reproduce.bench training

One table, in tokens a second. `forward` is the last position's final state of random sequences, `training` a
step of train.py: forward and backward pass in bfloat16 with float32 weights, clipping, AdamW. transformers'
model has the same shape, dtype and, in training, the same loop. In `forward`, each first picks its best batch
size. Ours, theirs and the matrix product that measures the device's peak take turns, in alternating order;
medians count. `share` is of that peak, in the products that the answer needs: what is computed beyond is a
loss. (What streaming a 7B folder costs: tests/streaming.py.)
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pandas as pd
import torch

from init import newborn
from lib.checkpoint import check_lengths, chosen_models, config_json, shortest_context
from lib.folders import KEYS
from lib.results import Experiment
from lib.runtime import BATCH_TOKENS, matmul_peak, progress, seconds_of
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from model import PRESETS, ModelConfig, forward_flops, training_flops
from train import loss_sum

TRAINED = {"tiny_llama": (32, 256), "nano_llama": (4, 512)}  # batch size, sequence length; on CUDA 32 x all
OURS = "ours"
THEIRS = "transformers"
COLUMNS = ("model", "work", "sequence_length", "dtype", OURS, THEIRS, "ratio", "share", "peak_gflops")


@dataclass
class TrainingSettings(RunSettings):
    """What `training` can be told."""

    rounds: int = at_least(1, 3)
    """measurements of each contestant; the median counts"""


@dataclass
class ForwardSettings(TrainingSettings):
    """What `forward` and `all` can be told; `--dtype auto` times both."""

    model: tuple[Literal[tuple(PRESETS)], ...] = ("nano_gpt2", "nano_llama", "nano_qwen")
    """presets whose forward pass is timed"""
    sequence_length: tuple[int, ...] = (64, 512, 1024)
    """tokens in a sequence"""
    tokens: int | None = at_least(1, None)
    """in the largest of three batches (default: 2048; on CUDA 65536)"""


def bench(settings: ForwardSettings, with_training=True):
    """Time forward passes and training steps. Writes bench.json."""
    context = shortest_context(chosen_models(settings.model, (0,)))
    check_lengths(settings.sequence_length, context)
    experiment = Experiment("bench", "", settings)
    dtypes = [torch.bfloat16, torch.float32]
    if settings.dtype != "auto":
        dtypes = [experiment.dtype]
    rows = []
    for name, dtype in itertools.product(settings.model, dtypes):
        rows += forward_rows(name, settings, experiment.device, dtype)
    if with_training:
        rows += training_rows(settings, experiment.device)
    return experiment.save(rows, COLUMNS)


def forward(settings: ForwardSettings):
    """Time forward passes only. Writes bench.json."""
    return bench(settings, with_training=False)


def training(settings: TrainingSettings):
    """Time training steps only. Writes bench.json."""
    if settings.dtype == "float32":
        raise UserError("training is timed in bfloat16, as train.py's products are: without --dtype float32")
    experiment = Experiment("bench", "", settings)
    return experiment.save(training_rows(settings, experiment.device), COLUMNS)


# ---- what is timed -----------------------------------------------------------------------------------------


@torch.inference_mode()
def forward_rows(name, settings: ForwardSettings, device, dtype):
    """Last-position states of random sequences: a row for each length."""
    config = PRESETS[name]
    ours = newborn(name, 0, device=device, dtype=dtype)
    passes = {OURS: partial(ours.hidden, last_only=True)}
    theirs = transformers_model(config)
    if theirs is not None:
        passes[THEIRS] = partial(last_states, theirs.to(device, dtype))
    most_tokens = settings.tokens or BATCH_TOKENS[device.type]
    rows = []
    for T in progress(settings.sequence_length, desc=name, unit=" lengths"):
        tokens = torch.randint(config.vocab_size, (max(1, most_tokens // T), T), device=device)
        flops = forward_flops(config, T, last_only=True) / T
        works, sizes = {}, {}
        for who, work in passes.items():
            batch = best_batch(work, tokens)
            works[who] = (partial(work, batch), batch.numel())
            sizes[f"batch_size_{who}"] = len(batch)
        key = {"model": name, "work": "forward", "sequence_length": T}
        key["dtype"] = str(dtype).removeprefix("torch.")
        rows.append(key | take_turns(works, flops, settings.rounds, device, dtype) | sizes)
    return rows


def last_states(model, tokens):
    """Final last-position states of a model of transformers, (n, d)."""
    return model(tokens, use_cache=False)[0][:, -1]


def best_batch(work, tokens):
    """The first of the tokens (n, T), n, n/2 or n/4: where `work` takes least time for a sequence."""
    work(tokens[:1])  # the first call allocates
    seconds = {}
    for part in (4, 2, 1):
        size = max(1, len(tokens) // part)
        seconds[size] = min(seconds_of(work, tokens[:size]), seconds_of(work, tokens[:size])) / size
    return tokens[: min(seconds, key=seconds.get)]


def training_rows(settings: TrainingSettings, device):
    """Training steps of ours and of transformers' model in the same loop: a row for each preset."""
    rows = []
    for name, (B, T) in TRAINED.items():
        config = PRESETS[name]
        if device.type == "cuda":
            B, T = 32, config.context_length
        window = torch.randint(config.vocab_size, (B, T + 1), device=device)
        ours = newborn(name, 0, device=device).train()
        works = {OURS: (training_work(ours, ours, window), B * T)}
        theirs = transformers_model(config, head=True)
        if theirs is not None:
            theirs = theirs.to(device).train()
            works[THEIRS] = (training_work(theirs, partial(logits, theirs), window), B * T)
        flops = training_flops(config, T)
        key = {"model": name, "work": f"training, {B} sequences", "sequence_length": T, "dtype": "bfloat16"}
        rows.append(key | take_turns(works, flops, settings.rounds, device, torch.bfloat16))
    return rows


def training_work(model, forward, window):
    """A training step on a window (B, T + 1), after its first call, which allocates."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    work = partial(training_step, model, forward, optimizer, window)
    work()
    return work


def training_step(model, forward, optimizer, window):
    """A step of train.py's loop; `forward` maps tokens to the model's logits."""
    targets = window[:, 1:]
    loss = loss_sum(forward, window[:, :-1], targets, window.device, torch.bfloat16) / targets.numel()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def logits(model, tokens):
    """Logits of a model of transformers, (B, T, V)."""
    return model(tokens, use_cache=False).logits


def transformers_model(config: ModelConfig, head=False):
    """transformers' model of a preset's shape, random weights, SDPA; None if it is not installed.

    For the GPT-2 style it is GPT-NeoX without parallel residual: the one there with RoPE, LayerNorm and GELU.
    """
    try:
        import transformers
    except ImportError:
        return None
    shape = config_json(config)
    if config.mlp == "gelu":
        shape = {theirs: getattr(config, ours) for theirs, ours in KEYS.items()}
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


def take_turns(works, flops, rounds, device, dtype):
    """Tokens a second of `works`, which take turns with each other and with the matrix product.

    `works` maps ours, and theirs if installed, to (what it does, of how many tokens). A token needs `flops`.
    """
    samples = []
    for turn in range(rounds):
        sample = {"peak": matmul_peak(device, dtype)}
        order = list(works)
        if turn % 2 == 0:
            order.reverse()
        for who in order:
            work, tokens = works[who]
            sample[who] = tokens / seconds_of(work)
        samples.append(sample)
    medians = pd.DataFrame(samples).median()
    columns = {OURS: medians[OURS], THEIRS: None, "ratio": None}
    if THEIRS in works:
        columns |= {THEIRS: medians[THEIRS], "ratio": medians[OURS] / medians[THEIRS]}
    columns["share"] = medians[OURS] * flops / medians["peak"]
    columns["peak_gflops"] = medians["peak"] / 1e9
    return columns


COMMANDS = {
    "all": Command(bench, ForwardSettings()),
    "forward": Command(forward, ForwardSettings()),
    "training": Command(training, TrainingSettings()),
}


def main() -> None:
    """Do what the command line asks."""
    run_script(COMMANDS, __doc__, default="all")


if __name__ == "__main__":
    main()
