"""How fast could it be? The FLOPs that an answer needs, and the machine's own limit: MFU is their ratio."""

import functools
import time
from statistics import median

import torch

from lib.runtime import sum_over_ranks


def forward_flops(config, T, last_only=False):
    """FLOPs of the matrix products one sequence of T tokens needs for `hidden`: two per multiply-add.

    Masked attention is not counted, though kernels may compute it, nor are norms, activations and softmax.
    """
    d = config.d_model
    Dh = config.head_size
    per_query, per_key, per_pair = 0, 0, 0
    if config.sublayers != "mlp":
        per_query += 4 * d * config.num_heads * Dh  # W_Q and W_O
        per_key += 4 * d * config.kv_heads * Dh  # W_K and W_V
        per_pair += 4 * config.num_heads * Dh  # a query's score of a key, and the value it weighs
    if config.sublayers != "attention":
        matrices = 3 if config.mlp == "swiglu" else 2
        per_query += 2 * matrices * d * config.d_ff
    if last_only and config.sublayers == "mlp":
        T = 1
    full_layer = (per_query + per_key) * T + per_pair * T * (T + 1) // 2
    last_layer = full_layer
    if last_only:
        last_layer = per_query + (per_key + per_pair) * T
    return (config.num_layers - 1) * full_layer + last_layer


def training_flops(config, T):
    """FLOPs of a token of a training step, with logits: a backward pass costs two forward ones."""
    forward = forward_flops(config, T) / T + 2 * config.d_model * config.vocab_size
    return 3 * forward


def seconds_of(work, *arguments):
    """Seconds that `work(*arguments)` takes; reading a number of its tensor waits for the device."""
    begun = time.perf_counter()
    work(*arguments).flatten()[0].item()
    return time.perf_counter() - begun


def matmul_peak(device, dtype):
    """FLOP/s of a large square matrix product, median of 9: the limit that MFU refers to."""
    size = 8192 if device.type == "cuda" else 2048
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    times = [seconds_of(torch.nn.functional.linear, a, b) for _ in range(10)]
    return 2 * size**3 / median(times[1:])  # the first one allocates


@functools.cache
def total_matmul_peak(device, dtype):
    """`matmul_peak` of all ranks together, measured once in a process."""
    return sum_over_ranks(torch.tensor(matmul_peak(device, dtype), device=device)).item()
