"""What children does a model have that compute something else? Noise, pruning, rounding, less of it.

Each of these changes a checkpoint of ours in memory; `lineage/disguise.py` has those that are not felt.
"""

from dataclasses import replace

import numpy as np
import torch

from init import keyed_generator
from lineage.disguise import as_source, select, weights_of


def of_matrices(source, change):
    """A checkpoint whose matrices are changed by `change(name, weight)`."""
    weights = weights_of(source)
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = change(name, weight)
    return as_source(weights, source.config)


def noised(source, size):
    """Every matrix with Gaussian noise of `size` times its standard deviation."""

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


def narrowed(source, share):
    """A share of a checkpoint's residual coordinates and of its hidden units, chosen at random; all heads."""
    old = source.config
    width, num_units = round(share * old.d_model), round(share * old.d_ff)
    generator = keyed_generator("narrowed", 0)
    stream = torch.from_numpy(generator.permutation(old.d_model)[:width])
    units = torch.from_numpy(generator.permutation(old.d_ff)[:num_units])
    weights = weights_of(source)
    select(weights, {"stream": stream, "units": units})
    return as_source(weights, replace(old, d_model=width, d_ff=num_units, head_dim=old.head_size))


def cut(source, layers):
    """The layers of a checkpoint with these numbers, from 0, in this order; one may come twice."""
    weights = {name: source.read(name) for name in source.shapes if "layers" not in name}
    for place, layer in enumerate(layers):
        for name in source.shapes:
            if name.startswith(f"model.layers.{layer}."):
                weights[name.replace(f".{layer}.", f".{place}.")] = source.read(name)
    return as_source(weights, replace(source.config, num_layers=len(layers)))
