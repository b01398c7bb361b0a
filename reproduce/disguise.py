"""What can be done to a checkpoint, so that it still computes what it did, or nearly, and looks like another?

    python -m reproduce.disguise runs/default --transforms rotate neurons signs --out disguised

`rotate` turns the residual stream by a random orthogonal matrix, after every gain went into the matrices
that read it; `neurons` shuffles each layer's neurons and heads; `signs` flips the sign of half of the
units of gated MLPs (others stay as they are) and rescales them a little. The logits stay as they were, to
rounding.
"""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.linalg import null_space
from scipy.stats import ortho_group
from tyro.conf import Positional

from lib.random import keyed_generator
from lib.settings import Command, OutputSettings, UserError, run_script
from model import GATED, Transformer
from sources import saving
from sources.checkpoint import find_model, newborn_weights
from weights.contents import Weights
from weights.gguf_config import HEAD, TOKEN_TABLE
from weights.storage import in_memory

AXES = {  # what a matrix has along its rows and columns; a bias has the first of them
    "embed_tokens": ("tokens", "stream"),
    "q_proj": ("queries", "stream"),
    "k_proj": ("keys", "stream"),
    "v_proj": ("keys", "stream"),
    "o_proj": ("stream", "queries"),
    "gate_proj": ("units", "stream"),
    "up_proj": ("units", "stream"),
    "down_proj": ("stream", "units"),
    "lm_head": ("tokens", "stream"),
}


@dataclass
class Settings(OutputSettings):
    """What is to be disguised, and how."""

    model: Positional[str] = ""  # of this project's architecture: a folder, a name, or PRESET@SEED
    transforms: tuple[Literal["rotate", "neurons", "signs"], ...] = ("rotate", "neurons", "signs")  # in order
    out: str = "disguised"  # checkpoint folder to be written


def shuffled(generator, n):
    """A random order of n things in which none, if there are more than one, stays where it was."""
    order = generator.permutation(n)
    while n > 1 and (order == np.arange(n)).any():
        order = generator.permutation(n)
    return torch.from_numpy(order)


def axes_of(name):
    """What a parameter has along its axes; a norm of the residual stream has its coordinates."""
    return AXES.get(name.split(".")[-2], ("stream",))


def select(weights, orders, prefix="") -> None:
    """Keep of each axis in `orders` what they list, in this order, in the parameters of this prefix."""
    for name, weight in weights.items():
        if name.startswith(prefix):
            for axis, what in enumerate(axes_of(name)[: weight.ndim]):
                if what in orders:
                    weight = weight.index_select(axis, orders[what])
            weights[name] = weight


def rotate(weights, config, generator):
    """Turn the residual stream by a random orthogonal matrix; a tied head is untied, its gain went in."""
    weights.setdefault(HEAD, weights[TOKEN_TABLE])
    d = config.d_model
    if config.norm == "rmsnorm":
        Q = ortho_group.rvs(d, random_state=generator)
    else:  # a LayerNorm's mean stays where it is
        basis = null_space(np.ones((1, d)))  # (d, d - 1): of all vectors of mean 0
        Q = basis @ ortho_group.rvs(d - 1, random_state=generator) @ basis.T + 1 / d
    Q = torch.from_numpy(Q)
    for name, weight in weights.items():
        if weight.ndim == 2 and axes_of(name)[0] == "stream":
            weights[name] = Q.T @ weight
        elif weight.ndim == 2:
            weights[name] = weight * gain_before(weights, name) @ Q
    for name, weight in weights.items():
        if name.endswith("norm.weight") and axes_of(name) == ("stream",):
            bias = name.replace("weight", "bias")
            if bias in weights:
                weights[bias] = weights[bias] / weight @ Q
            weights[name] = torch.ones_like(weight)
    return replace(config, tie_embeddings=False)


def gain_before(weights, name):
    """The gain of the norm whose output a matrix reads; 1 for the table, which reads none."""
    if name == TOKEN_TABLE:
        return 1
    if name == HEAD:
        return weights["model.norm.weight"]
    layer = ".".join(name.split(".")[:3])
    norm = "input_layernorm" if "self_attn" in name else "post_attention_layernorm"
    return weights[f"{layer}.{norm}.weight"]


def neurons(weights, config, generator):
    """Shuffle each layer's neurons, its key-value heads, and the queries of each of them."""
    queries = config.num_heads // config.kv_heads  # of one key-value head
    within = torch.arange(config.head_size)
    for layer in range(config.num_layers):
        units = shuffled(generator, config.d_ff)
        groups = shuffled(generator, config.kv_heads)
        heads = torch.cat([group * queries + shuffled(generator, queries) for group in groups])
        rows = [(chosen[:, None] * config.head_size + within).flatten() for chosen in (heads, groups)]
        select(weights, {"units": units, "queries": rows[0], "keys": rows[1]}, f"model.layers.{layer}.")
    return config


def signs(weights, config, generator):
    """Flip the sign of half of the units, up and down alike, and rescale them all; nothing without a gate."""
    if config.mlp not in GATED:
        return config
    for layer in range(config.num_layers):
        mlp = f"model.layers.{layer}.mlp."
        scale = generator.uniform(0.8, 1.25, config.d_ff) * generator.choice((-1, 1), config.d_ff)
        scale = torch.from_numpy(scale)
        weights[f"{mlp}up_proj.weight"] = weights[f"{mlp}up_proj.weight"] * scale[:, None]
        weights[f"{mlp}down_proj.weight"] = weights[f"{mlp}down_proj.weight"] / scale
    return config


TRANSFORMS = {"rotate": rotate, "neurons": neurons, "signs": signs}


def disguised(source, transforms=tuple(TRANSFORMS)):
    """A checkpoint that computes what one of ours does, after several transforms, in float64."""
    weights = {name: weight.double() for name, weight in weights_of(source).items()}
    config = source.config
    for name in transforms:
        config = TRANSFORMS[name](weights, config, keyed_generator("thief", name, 0))
    return as_source({name: weight.float() for name, weight in weights.items()}, config)


def weights_of(source):
    """All tensors of a checkpoint, by name."""
    return {name: source.read(name) for name in source.shapes}


class OwnWeights(Weights):
    """The Weights of a Transformer, and its ModelConfig."""

    def __init__(self, tensors, config):
        super().__init__(tensors)
        self.config = config


def as_source(weights, config) -> OwnWeights:
    """Weights by name as a checkpoint of ours, in memory."""
    return OwnWeights({name: in_memory(weight) for name, weight in weights.items()}, config)


def newborn_source(config, seed, *options) -> OwnWeights:
    """A newborn as a checkpoint of ours, drawn as it is read."""
    return OwnWeights(newborn_weights(config, seed, *options).tensors, config)


def own_source(spec) -> OwnWeights:
    """A checkpoint that model.py can be, in memory."""
    return as_source(spec.transformer().state_dict(), spec.transformer_config)


def save(folder, source, tokenizer=None) -> None:
    """Write a checkpoint of ours as a folder."""
    model = Transformer(source.config)
    model.load_state_dict(weights_of(source))
    saving.save(Path(folder), model, tokenizer)


def disguise(settings: Settings) -> None:
    """A copy of a model that computes the same and looks like another, in a new folder (seconds)"""
    if Path(settings.out).exists():
        raise UserError(f"'{settings.out}' is there already: give another --out")
    spec = find_model(settings.model)
    save(settings.out, disguised(own_source(spec), settings.transforms), spec.tokenizer)
    print(f"{settings.out} computes what {spec.label} does, disguised; compare them:")
    print(shlex.join(["python", "seedprint.py", "compare", spec.label, settings.out]))


COMMANDS = {"": Command(disguise, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
