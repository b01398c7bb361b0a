"""Do heads sink on position 1, or on the token that stands there? (ours)

`sinks.py first` asks it of models.
"""

import numpy as np
import torch

from lib.figures import curves
from lib.runtime import progress
from measure import attention

FIRST_TOKENS = 24  # so many tokens are tried


def first_token_rows(model, tokens):
    """A row for each head: mean, least, ... of its alpha_1 with each of FIRST_TOKENS tokens at position 1.

    The token in front of each sequence, of (n, T), is replaced by tokens of the text, in turn.
    """
    found = tokens[:, 1:].unique().cpu()
    places = np.linspace(0, len(found) - 1, min(FIRST_TOKENS, len(found)))
    candidates = found[places.astype(int)]
    alphas = []
    for candidate in progress(candidates, desc="first", unit=" tokens", leave=False):
        tokens[:, 0] = candidate
        alphas.append(attention.sink_statistics(model, tokens)[1].mean(0))
    alphas = torch.stack(alphas)  # (candidates, L, H)
    rows = []
    for layer, head in np.ndindex(alphas.shape[1:]):
        alpha = alphas[:, layer, head]
        row = {
            "layer": layer + 1,
            "head": head + 1,
            "alpha1": alpha.mean().item(),
            "least": alpha.min().item(),
            "least_token": candidates[alpha.argmin()].item(),
            "largest": alpha.max().item(),
            "token_share": (alpha > attention.EPSILON).float().mean().item(),
            "uniform_alpha1": attention.uniform_alpha(tokens.shape[1]),
        }
        rows.append(row)
    return rows


def draw_first_tokens(path, rows) -> None:
    """Draw the least attention to position 1 over its mean, a point for each head."""
    question = "Do heads sink on position 1, whatever token stands there? (one point per head)"
    labels = {"xlabel": "attention to position 1, mean of tokens", "ylabel": "least of the tokens"}
    curves(rows, path, question, x="alpha1", y="least", series="checkpoint", style="o", **labels)
