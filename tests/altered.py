"""Models that were changed, for tests: sources whose tensors are changed as they are read, and folders."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from evade import evade

import init
from lib import checkpoint, folders
from model import ModelConfig, Transformer


class Altered:
    """A source whose tensors are changed as they are read, by `change(name, weight)`."""

    def __init__(self, source, change):
        self.source = source
        self.change = change
        self.config = source.config
        self.place = None
        self.width = source.width
        self.family = source.family
        self.shapes = source.shapes

    def read(self, name: str) -> torch.Tensor:
        """One tensor, changed."""
        weight = self.source.read(name) if name in self.source.shapes else None
        return self.change(name, weight)


def of_matrices(source, change) -> Altered:
    """A source whose matrices are changed by `change(weight)`."""
    return Altered(source, lambda _, weight: change(weight) if weight.ndim == 2 else weight)


def assembled(folder: Path, layers) -> folders.Weights:
    """A folder, and its source, of (source, layer's number) pairs; its tables are the first source's."""
    first = layers[0][0]
    model = Transformer(replace(first.config, num_layers=len(layers)))
    weights = {}
    for name in model.state_dict():
        words = name.split(".")
        source = first
        if "layers" in words:
            source, number = layers[int(words[2])]
            words[2] = str(number)
        weights[name] = source.read(".".join(words))
    model.load_state_dict(weights)
    checkpoint.save(folder, model)
    return open_folder(folder)


def upcycled(source, experts: int) -> Altered:
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
        order = init.keyed_generator("units", key).permutation(weight.shape[axis])
        weight = weight.index_select(axis, torch.from_numpy(order))
        noise = init.keyed_generator("noise", name).standard_normal(weight.shape, np.float32)
        return weight + 0.1 * weight.std() * torch.from_numpy(noise)

    mixture = Altered(source, change)
    mixture.shapes = {name: source.shapes[ours] for name, ours in names.items()}
    return mixture


def noised(source, size: float) -> Altered:
    """Every matrix with Gaussian noise of `size` times its standard deviation, the same at each reading."""

    def change(name, weight):
        if weight.ndim != 2:
            return weight
        noise = init.keyed_generator("noise", name).standard_normal(weight.shape, np.float32)
        return weight + size * weight.std() * torch.from_numpy(noise)

    return Altered(source, change)


def pruned(weight: torch.Tensor, share: float = 0.9) -> torch.Tensor:
    """A matrix without its smallest numbers, a share of all."""
    return weight.where(weight.abs() > weight.abs().flatten().kthvalue(int(share * weight.numel())).values, 0)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A matrix rounded to 4 bits: 15 levels, with one scale."""
    scale = weight.abs().max() / 7
    return (weight / scale).round() * scale


def open_folder(folder: Path) -> folders.Weights:
    """The source of a checkpoint folder."""
    return checkpoint.parse_spec(str(folder)).open()


def hidden(base: Path, child: Path, ways=("rotate", "neurons", "signs")) -> folders.Weights:
    """The source of a child of a base folder that computes the same and hides it in several ways."""
    for number, way in enumerate(ways):
        step = child.with_name(f"{child.name}-{number}")
        evade(way, base, step, seed=number)
        base = step
    return open_folder(base)


def save_perturbed(folder: Path, config: ModelConfig, seed: int = 1) -> folders.Weights:
    """A newborn whose gains and biases are no longer 1 and 0, as a folder and its source."""
    model = init.newborn(config, seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    checkpoint.save(folder, model)
    return open_folder(folder)
