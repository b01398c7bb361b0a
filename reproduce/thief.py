"""What can be done to a checkpoint, so that it still computes what it did, or nearly, and looks like another?

    python -m reproduce.thief runs/default --ways rotate neurons signs --out stolen
    python seedprint.py compare tiny_llama@42 stolen

`rotate` turns the residual stream by a random orthogonal matrix, after every gain went into the matrices that
read it; `permute` relabels its coordinates; `neurons` shuffles each layer's hidden units and heads; `signs`
flips the sign of half of the units of gated MLPs and rescales them a little. The logits stay as they were, to
rounding. What follows them here changes the function, too: noise, pruning, rounding, fewer coordinates, other
layers, copies as experts.
"""

import lib.interrupt  # noqa: F401 # isort: skip
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import scipy.linalg
import torch

from init import keyed_generator
from lib import checkpoint
from lib.checkpoint import Newborn, parse_spec
from lib.data import load_tokenizer
from lib.settings import Command, RunSettings, UserError, run_script
from model import ModelConfig, Transformer
from seedprint import Models

READERS = {  # which matrices read a norm's output
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
WRITERS = ("o_proj.weight", "down_proj.weight")
TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass
class Settings(RunSettings):
    """What it can be told."""

    models: Models = ()
    """one model of this project's architecture: a checkpoint folder, or PRESET@SEED"""
    ways: tuple[Literal["rotate", "permute", "neurons", "signs"], ...] | None = None
    """how it is hidden, one after another (default: rotate, neurons, and signs where MLPs have gates)"""
    seed: int = 0
    """of rotations and orders"""
    out: str = "stolen"
    """checkpoint folder to be written"""


# ---- the same function -------------------------------------------------------------------------------------


def shuffled(generator, n):
    """A random order of n things in which none, if there are more than one, stays where it was."""
    order = generator.permutation(n)
    while n > 1 and (order == np.arange(n)).any():
        order = generator.permutation(n)
    return order


def permute(weights, config: ModelConfig, generator):
    """Put the residual coordinates in a random order."""
    order = torch.from_numpy(shuffled(generator, config.d_model))
    for name, weight in weights.items():
        is_gain = name.endswith(("norm.weight", "norm.bias")) and "self_attn" not in name
        if name.endswith(WRITERS):
            weights[name] = weight[order]
        elif is_gain or weight.ndim == 2:
            weights[name] = weight[..., order]
    return config


def rotation(config: ModelConfig, generator):
    """A random orthogonal matrix; one that leaves a LayerNorm's mean where it is."""
    d = config.d_model
    fixed = 1 if config.norm == "layernorm" else 0
    Q, R = np.linalg.qr(generator.standard_normal((d - fixed, d - fixed)))
    Q = Q * np.sign(np.diag(R))  # uniform over all rotations only with these signs
    if fixed:
        basis, _ = np.linalg.qr(np.column_stack([np.ones(d), generator.standard_normal((d, d - 1))]))
        Q = basis @ scipy.linalg.block_diag(1.0, Q) @ basis.T
    return torch.from_numpy(Q)


def rotate(weights, config: ModelConfig, generator):
    """Turn the residual stream by a random orthogonal matrix; a tied head is untied, its gain went in."""
    weights.setdefault(HEAD, weights[TABLE])
    readers = {"model.norm": [HEAD]}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for norm, names in READERS.items():
            there = [f"{prefix}{name}.weight" for name in names]
            readers[prefix + norm] = [name for name in there if name in weights]
    Q = rotation(config, generator)
    for norm, names in readers.items():
        gain = weights[f"{norm}.weight"]
        for name in names:
            weights[name] = weights[name] * gain
        weights[f"{norm}.weight"] = torch.ones_like(gain)
        if f"{norm}.bias" in weights:
            weights[f"{norm}.bias"] = weights[f"{norm}.bias"] / gain @ Q
    for name, weight in weights.items():
        if name.endswith(WRITERS):
            weights[name] = Q.T @ weight
        elif weight.ndim == 2:
            weights[name] = weight @ Q
    return replace(config, tie_embeddings=False)


def neurons(weights, config: ModelConfig, generator):
    """Shuffle each layer's hidden units, its key-value heads, and the queries of each of them."""
    G = config.kv_heads
    Dh = config.head_size
    queries = config.num_heads // G  # of one key-value head
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        order = torch.from_numpy(shuffled(generator, config.d_ff))
        for kind, axis in (("gate", 0), ("up", 0), ("down", 1)):
            name = f"{prefix}mlp.{kind}_proj.weight"
            if name in weights:
                weights[name] = weights[name].index_select(axis, order)
        groups = shuffled(generator, G)
        heads = np.concatenate([group * queries + shuffled(generator, queries) for group in groups])
        for kind, chosen in (("q", heads), ("k", groups), ("v", groups), ("o", heads)):
            rows = torch.from_numpy((chosen[:, None] * Dh + np.arange(Dh)).flatten())
            for name in (f"{prefix}self_attn.{kind}_proj.weight", f"{prefix}self_attn.{kind}_proj.bias"):
                if name in weights:
                    weights[name] = weights[name].index_select(int(kind == "o"), rows)
    return config


def signs(weights, config: ModelConfig, generator):
    """Flip the sign of half of the units, up and down alike, and rescale them all."""
    if config.mlp != "swiglu":
        raise UserError("signs: only where an MLP has a gate can its other units' signs be flipped")
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.mlp."
        scale = generator.uniform(0.8, 1.25, config.d_ff) * generator.choice((-1, 1), config.d_ff)
        scale = torch.from_numpy(scale)
        weights[f"{prefix}up_proj.weight"] = weights[f"{prefix}up_proj.weight"] * scale[:, None]
        weights[f"{prefix}down_proj.weight"] = weights[f"{prefix}down_proj.weight"] / scale
    return config


WAYS = {"rotate": rotate, "permute": permute, "neurons": neurons, "signs": signs}


def fitting_ways(config):
    """All ways of hiding a model that go together."""
    return ("rotate", "neurons", "signs") if config.mlp == "swiglu" else ("rotate", "neurons")


def hidden(source, ways=None, seed=0):
    """A source that computes what a source of ours does, hidden in several ways, one after another.

    In float64; its tensors are float32. None: in all ways that go together. UserError where one does not fit.
    """
    weights = {name: source.read(name).double() for name in source.shapes}
    config = source.config
    for way in ways or fitting_ways(config):
        config = WAYS[way](weights, config, keyed_generator("thief", way, seed))
    return Altered(source, lambda name, _: weights[name].float(), config)


# ---- another function --------------------------------------------------------------------------------------


class Altered:
    """A source whose tensors are changed as they are read, by `change(name, weight)`.

    With another `config`, or other `shapes`, the weight is None where the source has none of this name.
    """

    def __init__(self, source, change, config=None, shapes=None):
        self.source = source
        self.change = change
        self.config = config or source.config
        self.place = None
        self.width = config.d_model if config else source.width
        self.family = source.family
        self.shapes = shapes or (Newborn(config, 0).shapes if config else source.shapes)

    def read(self, name):
        """One tensor, changed."""
        weight = self.source.read(name) if name in self.source.shapes else None
        return self.change(name, weight)


def of_matrices(source, change):
    """A source whose matrices are changed by `change(name, weight)`."""
    return Altered(source, lambda name, weight: change(name, weight) if weight.ndim == 2 else weight)


def noised(source, size):
    """Every matrix with Gaussian noise of `size` times its standard deviation, the same at each reading."""

    def change(name, weight):
        noise = keyed_generator("noise", name).standard_normal(weight.shape, np.float32)
        return weight + size * weight.std() * torch.from_numpy(noise)

    return of_matrices(source, change)


def pruned(source, share):
    """Every matrix without its smallest numbers, a share of all."""

    def change(_, weight):
        size = weight.abs()
        least = size.flatten().kthvalue(max(1, int(share * weight.numel()))).values
        return weight.where(size > least, 0)

    return of_matrices(source, change)


def rounded(source, bits):
    """Every matrix rounded to 2**bits - 1 levels, evenly spaced up to its largest number."""

    def change(_, weight):
        step = weight.abs().max() / (2 ** (bits - 1) - 1)
        return (weight / step).round() * step

    return of_matrices(source, change)


def narrowed(source, share, seed=0):
    """A share of a source's residual coordinates and of its hidden units, chosen at random; all heads."""
    old = source.config
    new = replace(
        old, d_model=round(share * old.d_model), d_ff=round(share * old.d_ff), head_dim=old.head_size
    )
    generator = keyed_generator("narrowed", seed)
    kept = {}
    for size, number in ((old.d_model, new.d_model), (old.d_ff, new.d_ff)):
        kept[size] = torch.from_numpy(generator.permutation(size)[:number])

    def change(name, weight):
        for axis, size in enumerate(weight.shape):
            is_heads = "self_attn" in name and axis == int("o_proj" in name)
            if size in kept and not is_heads:
                weight = weight.index_select(axis, kept[size])
        return weight

    return Altered(source, change, new)


def assembled(layers):
    """A source of layers of others, (source, number from 0) each; its tables are the first one's.

    So layers are removed or repeated, or models merged.
    """
    first = layers[0][0]

    def change(name, _):
        words = name.split(".")
        if "layers" not in words:
            return first.read(name)
        source, number = layers[int(words[2])]
        words[2] = str(number)
        return source.read(".".join(words))

    return Altered(first, change, replace(first.config, num_layers=len(layers)))


def upcycled(source, experts):
    """A gated model with several copies of each MLP in place of it, their units shuffled; and some noise."""
    names = {}  # of our tensor, by the name of the expert's
    for name in source.shapes:
        expert_names = [name.replace("mlp.", f"mlp.experts.{expert}.") for expert in range(experts)]
        names |= dict.fromkeys(expert_names if "mlp." in name else [name], name)

    def change(name, _):
        weight = source.read(names[name])
        if "experts" not in name:
            return weight
        key = name.rsplit(".", 2)[0]  # of the layer and the expert: all of its matrices are shuffled alike
        axis = int("down_proj" in name)
        order = keyed_generator("units", key).permutation(weight.shape[axis])
        weight = weight.index_select(axis, torch.from_numpy(order))
        noise = keyed_generator("noise", name).standard_normal(weight.shape, np.float32)
        return weight + 0.1 * weight.std() * torch.from_numpy(noise)

    mixture = Altered(source, change, shapes={name: source.shapes[ours] for name, ours in names.items()})
    mixture.config = None  # none of ours: it has no states to compare
    return mixture


# ---- folders -----------------------------------------------------------------------------------------------


def save(folder, source, tokenizer=None) -> None:
    """Write a source of ours as a checkpoint folder."""
    model = Transformer(source.config)
    model.load_state_dict({name: source.read(name) for name in source.shapes})
    checkpoint.save(Path(folder), model, tokenizer=tokenizer)


def hide(settings: Settings) -> None:
    """Write a copy of a model that computes the same and looks like another; UserError if <out> is there."""
    if len(settings.models) != 1:
        raise UserError("expected one model to hide: a checkpoint folder, or PRESET@SEED")
    spec = parse_spec(settings.models[0])
    source = spec.open()
    if os.path.lexists(settings.out):
        raise UserError(f"'{settings.out}' is there already: give another --out")
    ways = settings.ways or fitting_ways(source.config)
    tokenizer = load_tokenizer(str(spec.tokenizer_file)) if spec.tokenizer_file else None
    save(settings.out, hidden(source, ways, settings.seed), tokenizer)
    print(f"{settings.out} computes what {spec.label} does, hidden by {', '.join(ways)}; compare them:")
    print(f"python seedprint.py compare {spec.label} {settings.out}")


COMMANDS = {"": Command(hide, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
