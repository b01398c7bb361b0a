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

    Given is a Transformer: a newborn `tiny_gpt2` with ReLU. Wanted is the number of a token, from 0 to 4095.
    The weights alone must tell: `model(tokens)` and `model.hidden(tokens)` are refused.
    """
    raise NotImplementedError("favourite")


def relu_cosine(c):
    """3. The cosine of relu(W x) and relu(W y) for a random matrix W of very many rows.

    Given is c, the cosine of the vectors x and y, a number from -1 to 1. Wanted is a number from 0 to 1.
    """
    raise NotImplementedError("relu_cosine")


def seed_of(folder):
    """4. The seed of which a child was born.

    Given is the Path of a checkpoint folder: a `tiny_llama`, born of a seed from 0 to 9999 and trained for a
    few steps. Wanted is the seed, a whole number.
    """
    raise NotImplementedError("seed_of")


def hide(weights):
    """5. The weights of a model that computes the same, but has every coordinate of its stream elsewhere.

    Given is the state of a `tiny_llama`: a dictionary from the names of parameters to tensors. The last axis
    is the stream's; of `o_proj` and `down_proj`, which write to it, the first is. Wanted is a dictionary of
    the same names and shapes.
    """
    raise NotImplementedError("hide")


def sleep(model):
    """6. Make the first head of the first layer rest on token 0 where a sequence begins with it.

    Given is a Transformer, a newborn `tiny_qwen` with 8 heads of 32 dimensions; it is to be changed in place,
    but only in the head's own rows, 0 to 31, of the weights and biases of `q_proj` and `k_proj` in layer 1.
    Nothing is returned.
    """
    raise NotImplementedError("sleep")


def undo(heads):
    """7. Aggregated values rescaled, so that they have one size at all positions.

    Given are the heads (B, H, T, Dh) of a newborn's first layer: B sequences, H heads, T positions, Dh
    dimensions. Wanted is a tensor of this shape: each vector of Dh numbers times some positive number.
    """
    raise NotImplementedError("undo")


def inputs(num_sequences, T, d, seed):
    """8. Random inputs on which the paper's test calls strangers kin.

    Given are three sizes and a seed. Wanted is a float tensor (num_sequences, T, d) of independent normal
    numbers, a vector of width d in place of each embedded token; other seeds give other numbers.
    """
    raise NotImplementedError("inputs")
