"""Save and read constants: a key and a value for each key-value head of each layer.

A file has `keys.N` and `values.N`, (1, G, 1, D) each: what a key-value cache of `transformers` holds of one
token in layer N, counted from 0. Keys are rotated for position 1 if the model rotates any. Layers without
attention have none. docs/sinks.md has the lines that put them into a cache.
"""

import torch
from safetensors.torch import save_file

from lib.files import atomic_file
from lib.settings import UserError
from measure.attention import constants_at
from sources.formats import open_tensors


def save_constants(path, constants, **facts) -> None:
    """Write constants, (G, D) each by layer, with `facts` as metadata, whole or not at all."""
    with atomic_file(path) as temporary:
        save_file(named(constants), temporary, {name: str(fact) for name, fact in facts.items()})


def read_constants(path, model):
    """The constants of a file, (G, D) each by layer; UserError if the model's have other shapes."""
    found = {name: tensor.read() for name, tensor in open_tensors([path]).items()}
    constants = constants_at(model, torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    expected = named(constants)
    for name in sorted(found.keys() | expected.keys()):
        shapes = [list(tensors[name].shape) if name in tensors else "none" for tensors in (found, expected)]
        if shapes[0] != shapes[1]:
            raise UserError(f"{path} is of another model: {name} is {shapes[0]}, expected {shapes[1]}")
        if not found[name].isfinite().all():
            raise UserError(f"{path}: {name} is not finite")
    for layer in constants:
        constants[layer] = [found[f"{part}.{layer - 1}"][0, :, 0] for part in ("keys", "values")]
    return constants


def named(constants):
    """Constants, (G, D) each by layer, as tensors (1, G, 1, D) by their names in a file."""
    tensors = {}
    for layer, (key, value) in constants.items():
        tensors[f"keys.{layer - 1}"] = key[None, :, None].contiguous()
        tensors[f"values.{layer - 1}"] = value[None, :, None].contiguous()
    return tensors
