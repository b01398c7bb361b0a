"""Which answers does docs/lesson.md ask for? A function for each exercise but the first: model.py has that.

Write your own code in place of a `raise`, then ask for a check:

    python -m reproduce.lesson 3

Checks call these functions under torch.no_grad(). docs/solutions has a patch for each exercise.
"""

# ruff: noqa: F401 - the imports wait for the answers
import math

import torch

from init import draw
from lib.folders import Weights
from measure.theory import mean_field


def favourite(model):
    """2. The token that a newborn predicts most often after 64 random tokens, found without reading any.

    `model` is a Transformer, a newborn `tiny_gpt2` with ReLU. Return the number of a token, from 0 to 4095.
    The weights alone must tell: `model(tokens)` and `model.hidden(tokens)` are refused.
    """
    raise NotImplementedError("favourite")


def relu_cosine(c):
    """3. The cosine of relu(W x) and relu(W y) for a random matrix W of very many rows.

    `c` is the cosine of the vectors x and y, a number from -1 to 1. Return a number from 0 to 1.
    """
    raise NotImplementedError("relu_cosine")


def seed_of(folder):
    """4. The seed of which a child was born.

    `folder` is the Path of a checkpoint: a `tiny_llama`, born of a seed from 0 to 9999 and trained for a few
    steps. Return the seed, a whole number.
    """
    raise NotImplementedError("seed_of")


def hide(weights):
    """5. The weights of a model that computes the same, but has every coordinate of its stream elsewhere.

    `weights` is the state of a `tiny_llama`, a dictionary from the names of parameters to tensors. Their last
    axis is the stream's; of `o_proj` and `down_proj`, which write to the stream, it is the first. Return a
    dictionary of the same names and shapes.
    """
    raise NotImplementedError("hide")


def sleep(model):
    """6. Make the first head of the first layer rest on token 0 where a sequence begins with it.

    `model` is a Transformer, a newborn `tiny_qwen` with 8 heads of 32 dimensions. Change it in place, but in
    the head's own rows alone, 0 to 31, of the weights and biases of `q_proj` and `k_proj` in layer 1. Return
    nothing.
    """
    raise NotImplementedError("sleep")


def undo(heads):
    """7. Aggregated values rescaled, so that they have one size at all positions.

    `heads` (B, H, T, Dh) are those of a newborn's first layer: B sequences, H heads, T positions, Dh
    dimensions. Return a tensor of this shape: each vector of Dh numbers times some positive number.
    """
    raise NotImplementedError("undo")


def inputs(num_sequences, T, d, seed):
    """8. Random inputs on which the paper's test calls strangers kin.

    Return a float tensor (num_sequences, T, d) of independent normal numbers, a vector of width d in place of
    each embedded token. Another seed gives other numbers.
    """
    raise NotImplementedError("inputs")
