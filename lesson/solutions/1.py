"""1. Which activation has no favourite? Write `activation`."""

from dataclasses import replace

import torch

from model import ACTIVATIONS, PRESETS


def activation(z):
    """What neurons make of their pre-activations: a tensor like z, each number by itself."""
    return torch.sin(z)  # odd, sin(-z) = -sin(z): its mean is 0 for any symmetric input


ACTIVATIONS["mine"] = activation
PRESETS["tiny_fair"] = replace(PRESETS["tiny_gpt2"], mlp="mine")
