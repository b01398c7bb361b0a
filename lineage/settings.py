"""The settings of seedprint.py's `compare`, `matrix` and `identify`."""

from dataclasses import dataclass
from typing import Literal

from init import SCHEMES
from lib.settings import Names, OutputSettings, at_least


@dataclass
class CompareSettings(OutputSettings):
    """The settings of `compare` and `matrix`."""

    models: Names = ()  # BASE and SUSPECTs: names on the Hub, folders, files, PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # initialization of PRESET@SEED
    permutation_seed: int = 0  # seed of the permutations of coordinates and tokens
    permutations: at_least(199) = 9999  # permutations of coordinates
    layers: at_least(1) | None = None  # evenly spaced layers to read; None: all, or 8 of large models
    thorough: bool = False  # match the neurons of every layer, and compare all rows of all matrices
    units_per_layer: at_least(2) = 1024  # neurons to match in each layer


@dataclass
class IdentifySettings(OutputSettings):
    """The settings of `identify`."""

    models: Names = ()  # one model: a checkpoint folder, or PRESET@SEED
    seeds: tuple[int, int] = (0, 99_999)  # the first and the last candidate
