"""8. Which inputs deceive a test? Write `inputs`."""

import torch


def inputs(num_sequences, T, d):
    """Random inputs on which the paper's test calls unrelated models related: (num_sequences, T, d), float.

    It has a vector of width d in place of each embedded token, and its sequences are independent.
    """
    return 0.02 * torch.randn(num_sequences, T, d)  # of an embedding's size
