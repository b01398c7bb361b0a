"""What `compare`, `matrix` and `identify` of seedprint.py are asked."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from init import SCHEMES
from lib.settings import OutputSettings, at_least

Names = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL ...", help_behavior_hint="")
]


@dataclass
class CompareSettings(OutputSettings):
    """What `compare` and `matrix` are asked."""

    models: Names = ()  # BASE and SUSPECTs: names of the Hub, folders, files, PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # how newborns are drawn
    permutation_seed: int = 0  # seed of the relabellings of coordinates, and of tokens
    permutations: at_least(199) = 9999  # relabellings
    layers: at_least(1) | None = None  # layers that are read, evenly spaced; None: all, or 8 of large models
    units_per_layer: at_least(2) = 1024  # hidden units that are looked for in each of them


@dataclass
class IdentifySettings(OutputSettings):
    """What `identify` is asked."""

    models: Names = ()  # one model: a checkpoint folder, or PRESET@SEED
    seeds: tuple[int, int] = (0, 99_999)  # the first and the last candidate
