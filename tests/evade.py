"""How could a thief fool a comparison of weights? The same function, in another basis or another order.

    python tests/evade.py rotate|permute|neurons|signs IN_FOLDER OUT_FOLDER [--seed N]

`permute` relabels the residual coordinates, `rotate` turns them by a random orthogonal matrix (after every
gain went into the matrices that read it), `neurons` shuffles each layer's hidden units and heads, `signs`
flips the sign of half of the units of gated MLPs and rescales them a little. The logits stay as they were, to
rounding. The child is float32, whatever the base's type.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.linalg
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from lib import checkpoint  # noqa: E402
from model import ModelConfig, Transformer  # noqa: E402

READERS = {  # which matrices read a norm's output
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
WRITERS = ("o_proj.weight", "down_proj.weight")
TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def shuffled(generator: np.random.Generator, n: int) -> np.ndarray:
    """A random order of n things in which none, if there are more than one, stays where it was."""
    order = generator.permutation(n)
    while n > 1 and (order == np.arange(n)).any():
        order = generator.permutation(n)
    return order


def permute(weights: dict, config: ModelConfig, generator: np.random.Generator) -> ModelConfig:
    """Put the residual coordinates in a random order."""
    order = torch.from_numpy(shuffled(generator, config.d_model))
    for name, weight in weights.items():
        is_gain = name.endswith(("norm.weight", "norm.bias")) and "self_attn" not in name
        if name.endswith(WRITERS):
            weights[name] = weight[order]
        elif is_gain or weight.ndim == 2:
            weights[name] = weight[..., order]
    return config


def rotation(config: ModelConfig, generator: np.random.Generator) -> torch.Tensor:
    """A random orthogonal matrix; one that leaves a LayerNorm's mean where it is."""
    d = config.d_model
    fixed = 1 if config.norm == "layernorm" else 0
    Q, R = np.linalg.qr(generator.standard_normal((d - fixed, d - fixed)))
    Q = Q * np.sign(np.diag(R))  # uniform over all rotations only with these signs
    if fixed:
        basis, _ = np.linalg.qr(np.column_stack([np.ones(d), generator.standard_normal((d, d - 1))]))
        Q = basis @ scipy.linalg.block_diag(1.0, Q) @ basis.T
    return torch.from_numpy(Q)


def rotate(weights: dict, config: ModelConfig, generator: np.random.Generator) -> ModelConfig:
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


def neurons(weights: dict, config: ModelConfig, generator: np.random.Generator) -> ModelConfig:
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


def signs(weights: dict, config: ModelConfig, generator: np.random.Generator) -> ModelConfig:
    """Flip the sign of half of the units, up and down alike, and rescale them all."""
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.mlp."
        scale = generator.uniform(0.8, 1.25, config.d_ff) * generator.choice((-1, 1), config.d_ff)
        scale = torch.from_numpy(scale)
        weights[f"{prefix}up_proj.weight"] = weights[f"{prefix}up_proj.weight"] * scale[:, None]
        weights[f"{prefix}down_proj.weight"] = weights[f"{prefix}down_proj.weight"] / scale
    return config


WAYS = {"rotate": rotate, "permute": permute, "neurons": neurons, "signs": signs}


def evade(way: str, base: str | Path, child: str | Path, seed: int = 0) -> None:
    """Write the folder `child`, which computes what the folder `base` does; computed in float64."""
    source = checkpoint.parse_spec(str(base)).open()
    weights = {name: source.read(name).double() for name in source.shapes}
    config = WAYS[way](weights, source.config, np.random.default_rng(seed))
    model = Transformer(config)
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    checkpoint.save(Path(child), model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("base", metavar="IN_FOLDER")
    parser.add_argument("child", metavar="OUT_FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    evade(given.way, given.base, given.child, given.seed)
