"""Fools a comparison of weights, as a thief could: the same function in another basis or another order.

    python tests/evade.py rotate|permute|neurons IN_FOLDER OUT_FOLDER [--seed N]

`permute` relabels the residual coordinates, `rotate` turns them by a random orthogonal matrix (after every
gain went into the matrices that read it), `neurons` shuffles each layer's hidden units and heads. The logits
stay as they were, to rounding. The child is float32, whatever the base's type.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import checkpoint  # noqa: E402
from model import Transformer  # noqa: E402

READERS = {  # which matrices read a norm's output
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
WRITERS = ("o_proj.weight", "down_proj.weight")
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def shuffled(generator: np.random.Generator, n: int) -> np.ndarray:
    """A random order of n things in which none, if there are more than one, stays where it was."""
    order = generator.permutation(n)
    while n > 1 and (order == np.arange(n)).any():
        order = generator.permutation(n)
    return order


def permute(weights: dict, config, generator: np.random.Generator):
    """The residual coordinates in a random order."""
    order = torch.from_numpy(shuffled(generator, config.d_model))
    for name, weight in weights.items():
        if name.endswith(WRITERS):
            weights[name] = weight[order]
        elif name.endswith("norm.weight") and "self_attn" not in name or weight.ndim == 2:
            weights[name] = weight[..., order]
    return config


def rotate(weights: dict, config, generator: np.random.Generator):
    """The residual stream turned by a random orthogonal matrix; a tied head is untied, its gain went in."""
    weights.setdefault(TABLES[1], weights[TABLES[0]])
    gains = [("model.norm", [TABLES[1]])]
    for layer in range(config.num_layers):
        start = f"model.layers.{layer}."
        gains += [(start + norm, [f"{start}{n}.weight" for n in names]) for norm, names in READERS.items()]
    for norm, names in gains:
        for name in names:
            weights[name] = weights[name] * weights[f"{norm}.weight"]
        weights[f"{norm}.weight"] = torch.ones_like(weights[f"{norm}.weight"])
    Q, R = np.linalg.qr(generator.standard_normal((config.d_model,) * 2))
    Q = torch.from_numpy(Q * np.sign(np.diag(R)))  # uniform over all rotations only with these signs
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = Q.T @ weight if name.endswith(WRITERS) else weight @ Q
    return replace(config, tie_embeddings=False)


def neurons(weights: dict, config, generator: np.random.Generator):
    """Each layer's hidden units in a random order, its key-value heads, and the queries of each of them."""
    G, Dh = config.kv_heads, config.head_size
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}."
        order = torch.from_numpy(shuffled(generator, config.d_ff))
        groups, each = shuffled(generator, G), config.num_heads // G
        heads = np.concatenate([group * each + shuffled(generator, each) for group in groups])
        for kind, axis in (("gate", 0), ("up", 0), ("down", 1)):
            key = f"{name}mlp.{kind}_proj.weight"
            weights[key] = weights[key].index_select(axis, order)
        for kind, chosen in (("q", heads), ("k", groups), ("v", groups), ("o", heads)):
            rows = torch.from_numpy((chosen[:, None] * Dh + np.arange(Dh)).flatten())
            for key in (f"{name}self_attn.{kind}_proj.weight", f"{name}self_attn.{kind}_proj.bias"):
                if key in weights:
                    weights[key] = weights[key].index_select(int(kind == "o"), rows)
    return config


WAYS = {"rotate": rotate, "permute": permute, "neurons": neurons}


def evade(way: str, base: str | Path, child: str | Path, seed: int = 0) -> None:
    """Write the folder `child`, which computes what the folder `base` does; computed in float64."""
    source = checkpoint.tensors(str(base))
    weights = {name: source.read(name).double() for name in source.shapes}
    model = Transformer(WAYS[way](weights, source.config, np.random.default_rng(seed)))
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
