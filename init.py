"""Initialization: a newborn's weights, each from its own random stream (BB Appendix B.1)

| parameters                            | scheme `gpt2`           | scheme `normal` (Hugging Face's) |
|---------------------------------------|-------------------------|----------------------------------|
| embeddings, head, q, k, v, gate, up   | N(0, 0.02^2)            | N(0, 0.02^2)                     |
| attention output, MLP down (L layers) | N(0, (0.02/sqrt(2L))^2) | N(0, 0.02^2)                     |
| biases of linear maps                 | 0                       | 0                                |
| an explicit sink's key                | N(0, 0.02^2)            | N(0, 0.02^2)                     |
| all others, as norm gains             | what model.py writes    | what model.py writes             |

Scheme `centered` (ours) draws as `gpt2` does, then subtracts each row's mean from the MLP down projections W,
so that W 1 = 0: what all neurons share, GELU's mean output, then adds nothing to the stream. This cures
GPT-2's preference (`contraction.py cure`); SwiGLU has no such mean. For a scheme of your own, add a name to
`SCHEMES` and a line to `initial_value`.

A draw depends on (seed, parameter name, shape) alone: each parameter has a numpy Philox generator of its own,
and is drawn on the CPU in float32, then scaled, moved and cast. So, with the pinned numpy, a seed gives the
same bits on any device and for any number of processes and threads.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lib.random import keyed_generator
from lib.settings import UserError
from model import PRESETS, ModelConfig, Transformer

SCHEMES = ("gpt2", "normal", "centered")
STD = 0.02


def draw_weight(seed, name, shape, std, count=None) -> Tensor:
    """Draw the initial weight `name`, or its first `count` numbers, from N(0, std^2): float32, on the CPU."""
    generator = keyed_generator(seed, name, *shape)
    return torch.from_numpy(generator.standard_normal(count or tuple(shape), dtype=np.float32)).mul_(std)


def residual_std(config: ModelConfig, scheme):
    """Standard deviation of the attention output and MLP down projections."""
    if scheme == "normal":
        return STD
    return STD / math.sqrt(2 * config.num_layers)


def initial_value(config: ModelConfig, name, shape, seed, embedding_seed=None, scheme="gpt2") -> Tensor:
    """The initial value of a parameter that model.py leaves without numbers, float32 on the CPU.

    Embedding and head use `embedding_seed`, or `seed` if it is None. Models with the same embedding seed
    differ only in their blocks (BB B.2). ValueError for an unknown scheme.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"init scheme must be one of {', '.join(SCHEMES)}, not {scheme!r}")
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.startswith(("model.embed_tokens", "lm_head")):
        return draw_weight(seed if embedding_seed is None else embedding_seed, name, shape, STD)
    if not name.endswith(("o_proj.weight", "down_proj.weight")):
        return draw_weight(seed, name, shape, STD)
    weight = draw_weight(seed, name, shape, residual_std(config, scheme))
    if scheme == "centered" and name.endswith("down_proj.weight"):
        weight -= weight.mean(dim=1, keepdim=True)
    return weight


def without_numbers(config: ModelConfig) -> Transformer:
    """A Transformer whose linear maps, embeddings and sinks' keys hold no numbers (device meta).

    All else is as its constructor writes it: gains of 1, a mask. UserError if a constructor draws.
    """

    def on_meta(module, name, parameter):  # torch calls this as a module gets a parameter
        is_drawn = isinstance(module, nn.Linear | nn.Embedding) or name == "sink_key"
        if is_drawn and parameter is not None:
            return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    before = torch.get_rng_state()
    with register_module_parameter_registration_hook(on_meta):
        model = Transformer(config)
    if not torch.equal(before, torch.get_rng_state()):
        hint = 'write a constant, or torch.empty(..., device="meta") for N(0, 0.02^2)'
        raise UserError(f"a constructor in model.py draws numbers, which no seed would give again: {hint}")
    for name in model.state_dict().keys() - dict(model.named_parameters()).keys():
        hint = "register it with persistent=False, or make it a frozen parameter"
        raise UserError(f"{name} is a buffer, but a checkpoint has parameters alone: {hint}")
    return model


def newborn(model, seed, embedding_seed=None, scheme="gpt2", device="cpu", dtype=torch.float32):
    """An untrained model, from a preset's name or a ModelConfig, in eval mode; its blocks are in `dtype`."""
    config = PRESETS[model] if isinstance(model, str) else model
    built = without_numbers(config).cast_blocks(dtype)
    drawn = {name: parameter for name, parameter in built.named_parameters() if parameter.is_meta}

    def draw(name):
        value = initial_value(config, name, drawn[name].shape, seed, embedding_seed, scheme)
        return value.to(device, drawn[name].dtype, copy=True)  # into torch's own memory, which is aligned

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy releases the GIL
        weights = dict(zip(drawn, pool.map(draw, drawn)))
    built.load_state_dict(weights, strict=False, assign=True)
    return built.to(device).eval()


def variant(model: Transformer, **changes) -> Transformer:
    """A model with the same weights, in the same memory, and a changed configuration."""
    other = without_numbers(replace(model.config, **changes))
    other.load_state_dict(model.state_dict(), strict=False, assign=True)
    return other.to(model.device).eval()
