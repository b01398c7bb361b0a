"""How fast is it, against the machine's limit and against transformers?

    python -m reproduce.bench                                       # all of it: about ten minutes on 2 cores
    python -m reproduce.bench forward --model nano_llama --sequence-length 512 --rounds 9
    python -m reproduce.bench training

One table, in tokens a second. `forward` is the last position's final state of random sequences, `training` a
step of train.py: forward and backward pass in bfloat16 with float32 weights, clipping, AdamW. transformers'
model has the same shape, dtype and, in training, the same loop. In `forward`, each first picks its best batch
size. All take turns, in alternating order, as do the matrix products that measure the device's peak; medians
count. `share` is of that peak, in the products that the answer needs: what is computed beyond is a loss.
(What streaming a 7B folder costs: tests/streaming.py.)
"""

import dataclasses
import functools
import statistics
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from init import newborn
from lib.checkpoint import check_lengths, chosen_models, config_json, shortest_context
from lib.folders import KEYS
from lib.results import Experiment
from lib.runtime import matmul_peak, progress, seconds_of
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


# ---- contestants -------------------------------------------------------------------------------------------


def transformers_model(config: ModelConfig, head: bool = False) -> torch.nn.Module | None:
    """transformers' model of a preset's shape, random weights, SDPA; None if it is not installed.

    For the GPT-2 style it is GPT-NeoX without parallel residual: the one there with RoPE, LayerNorm and GELU.
    """
    try:
        import transformers
    except ImportError:
        return None
    shape = config_json(config)
    if config.mlp == "gelu":
        values = dataclasses.asdict(config)
        shape = {theirs: values[ours] for theirs, ours in KEYS.items()}
        shape["model_type"] = "gpt_neox"
        shape["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": 1.0,
        }
        shape["use_parallel_residual"] = False
    kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
    theirs = transformers.AutoConfig.for_model(**shape)
    return kind.from_config(theirs, attn_implementation="sdpa").eval()


def last_states(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Final states of transformers' model at the last position, (n, d)."""
    return model(tokens, use_cache=False)[0][:, -1]


def logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Logits of transformers' model, (n, T, V)."""
    return model(tokens, use_cache=False).logits


# ---- turns -------------------------------------------------------------------------------------------------


def take_turns(works: dict, dtypes: list, rounds: int, device: torch.device) -> tuple[dict, dict]:
    """Median seconds of each of `works`, and FLOP/s of the matrix product in each dtype, in turns."""
    seconds = {key: [] for key in works}
    peaks = {dtype: [] for dtype in dtypes}
    for turn in range(rounds):
        for dtype in dtypes:
            peaks[dtype].append(matmul_peak(device, dtype))
        order = list(works)
        if turn % 2 == 0:
            order.reverse()
        for key in order:
            seconds[key].append(seconds_of(works[key]))
    return medians(seconds), medians(peaks)


def medians(samples: dict) -> dict:
    """The median of each list."""
    return {key: statistics.median(values) for key, values in samples.items()}
