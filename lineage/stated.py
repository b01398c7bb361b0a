"""What do files beside the weights say of the whole model? A file of weights may be a part of it."""

import json
import re

from weights.files import read_config
from weights.vocabulary import token_ids

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # in a config.json
COUNTS = dict.fromkeys(LAYERS, "layers") | {"vocab_size": "tokens", "draft_vocab_size": "draft"}
MLP_SIZE = re.compile(r'"\w*(intermediate_size|ffn|n_inner|d_ff)\w*": [1-9]')


def stated_counts(place):
    """How many "layers" and "tokens" the whole model has, as its files say; None if they do not.

    "draft" is the size of a vocabulary that a draft's head has of its own.
    """
    counts = {"layers": None, "tokens": None, "draft": None}
    if place is None:  # not on the disk
        return counts
    config = read_config(place) or {}
    for level in (config, config.get("text_config")):
        for key, value in level.items() if isinstance(level, dict) else ():
            if key in COUNTS and type(value) is int and value > 0:
                counts[COUNTS[key]] = counts[COUNTS[key]] or value
    if counts["tokens"] is None:
        counts["tokens"] = len(token_ids(place)) or None
    return counts


def states_mlps(place):
    """Does config.json give the size of MLPs?"""
    return place is not None and MLP_SIZE.search(json.dumps(read_config(place))) is not None
