"""Models with gains and biases of all kinds, as folders, and sources that are changed as they are read."""

from pathlib import Path

import torch

import init
from lib import checkpoint, folders
from model import ModelConfig


def open_folder(folder: Path) -> folders.Weights:
    """The source of a checkpoint folder."""
    return checkpoint.parse_spec(str(folder)).open()


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
        return self.change(name, self.source.read(name))
