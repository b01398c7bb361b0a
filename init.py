"""Initialization: a newborn's weights, each from its own random stream (BB Appendix B.1)

| parameters                            | scheme `gpt2`           | scheme `normal` (Hugging Face's) |
|---------------------------------------|-------------------------|----------------------------------|
| embeddings, head, q, k, v, gate, up   | N(0, 0.02^2)            | N(0, 0.02^2)                     |
| attention output, MLP down (L layers) | N(0, (0.02/sqrt(2L))^2) | N(0, 0.02^2)                     |
| biases of linear maps                 | 0                       | 0                                |
| what model.py makes NaN: a sink's key | N(0, 0.02^2)            | N(0, 0.02^2)                     |
| all others, as norm gains             | what model.py writes    | what model.py writes             |

Scheme `centered` (ours) draws as `gpt2` does, then subtracts each row's mean from the MLP down projections.
This cures GPT-2's preference: a mean output that all neurons share then adds nothing to the stream
(`contraction.py cure`). SwiGLU has no such mean. For your own scheme, add a name to `SCHEMES` and a line to
`birth_value`.

A draw depends on (seed, parameter name, shape) alone: each parameter has a numpy Philox generator of its own,
and is drawn on the CPU in float32, then scaled, moved and cast. So, with the pinned numpy, a seed gives the
same bits on any device and for any number of processes and threads.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

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


def birth_value(config: ModelConfig, name, shape, seed, embedding_seed=None, scheme="gpt2") -> Tensor:
    """The initial value of a drawn parameter or a bias, float32 on the CPU; ValueError for an unknown scheme.

    Embedding and head use `embedding_seed`, or `seed` if it is None. Models with the same embedding seed
    differ only in their blocks (BB B.2).
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


def births(config: ModelConfig, seed, embedding_seed=None, scheme="gpt2"):
    """By name, functions that return the initial value of each parameter; UserError if model.py draws one."""
    # Drawn here: linear maps and embeddings, which stay on meta, and what model.py makes NaN.
    with torch.random.fork_rng(devices=()), register_module_parameter_registration_hook(without_numbers):
        written, again = Transformer(config), Transformer(config)  # these differ where a constructor draws
    values = {}
    for (name, constant), other in zip(written.named_parameters(), again.parameters()):
        if constant.is_meta or constant.isnan().all():
            values[name] = partial(birth_value, config, name, constant.shape, seed, embedding_seed, scheme)
        elif torch.equal(constant, other):
            values[name] = constant.detach
        else:
            hint = "write a constant, or NaN for N(0, 0.02^2)"
            raise UserError(f"{name}: its constructor draws it, or writes nothing: {hint}")
    return values


def without_numbers(module, name, parameter):
    """The parameter of a linear map or an embedding, on meta; None, for no change, of another module."""
    if isinstance(module, nn.Linear | nn.Embedding) and parameter is not None:
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def newborn(model, seed, embedding_seed=None, scheme="gpt2", device="cpu", dtype=torch.float32):
    """An untrained model, from a preset's name or a ModelConfig, in eval mode; its blocks are in `dtype`."""
    config = PRESETS[model] if isinstance(model, str) else model
    values = births(config, seed, embedding_seed, scheme)
    with torch.device("meta"):
        built = Transformer(config)
    built = built.cast_blocks(dtype).to_empty(device=device).eval()

    def fill(named_parameter) -> None:
        name, parameter = named_parameter
        parameter.data.copy_(values[name]())

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy releases the GIL
        list(pool.map(fill, built.named_parameters()))  # list() waits and raises errors
    return built


def variant(model: Transformer, **changes) -> Transformer:
    """A model with the same weights and a changed configuration; new parameters stay on meta."""
    with torch.device("meta"):
        other = Transformer(replace(model.config, **changes))
    other.load_state_dict(model.state_dict(), strict=False, assign=True)
    return other.eval()
