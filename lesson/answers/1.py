"""1. Which activation has no favourite? Write `activation`."""

from dataclasses import replace

from model import ACTIVATIONS, PRESETS


def activation(z):
    """What neurons make of their pre-activations: a tensor like z, each number by itself."""
    raise NotImplementedError


ACTIVATIONS["mine"] = activation
PRESETS["tiny_fair"] = replace(PRESETS["tiny_gpt2"], mlp="mine")
