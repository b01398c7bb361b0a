"""What do all tests say of two models?

    >>> from lib import checkpoint
    >>> from measure.comparison import compare_pair, read_model
    >>> from seedprint import CompareSettings
    >>> models = [read_model(spec, checkpoint.parse_spec(spec).open(), 4096, CompareSettings())
    ...           for spec in ("tiny_llama@1", "tiny_llama@2")]
    >>> compare_pair(*models, CompareSettings())[0]["verdict"]
    'no evidence'

`settings` are those of `seedprint.py compare`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from lib.checkpoint import final_states
from lib.folders import shared_tokens
from lib.inputs import random_tokens
from lib.settings import UserError
from measure import lineage
from measure.census import Units, unit_census
from measure.verdict import SAME_BIRTH, verdict

WIDE = 2048  # wider models are large: a census takes half a minute a layer, or more,
MANY = 64  # and so are models with more MLPs, or experts
LAYERS_OF_LARGE_MODELS = 8  # that are looked at


@dataclass
class Model:
    """A model as it is compared: name, source of weights, hidden units, and final states, if it is ours."""

    name: str
    source: object
    units: Units
    states: torch.Tensor | None


def read_model(name, source, vocab_size, settings):
    """The Model of a source; its final states, of tokens below `vocab_size`, only if `model.py` is it."""
    states = None if source.config is None else state_fingerprint(source, vocab_size, settings)
    return Model(name, source, Units(source, name), states)


def usual_layers(base: Model, suspect: Model):
    """How many layers are looked at, if nobody says so: all, or LAYERS_OF_LARGE_MODELS."""
    for model in (base, suspect):
        if model.source.width > WIDE or len(model.units.parts.mlps) > MANY:
            return LAYERS_OF_LARGE_MODELS
    return max(len(base.units.numbers), len(suspect.units.numbers))


def state_fingerprint(source, vocab_size, settings):
    """A model's fingerprint, (n T, d): a row for each position of each random sequence."""
    indices = range(settings.num_sequences)
    tokens = random_tokens(settings.input_seed, indices, settings.sequence_length, vocab_size)
    if tokens.numel() < 3:
        raise UserError("fewer than three rows have no ranks to compare: raise --num-sequences")
    states = final_states(source, tokens, settings.device, settings.torch_dtype)  # (n, T, d)
    return lineage.fingerprint(states.flatten(0, 1))


def compare_pair(base: Model, suspect: Model, settings):
    """A pair's row, and what is behind it: the census, its map of layers, correlations, matrices left out.

    What cannot be had of two models is null in the row.
    """
    correlations, skipped = lineage.weight_correlations(base.source, suspect.source)
    have_states = base.states is not None and suspect.states is not None
    if have_states and base.source.width == suspect.source.width:
        correlations["relabel"] = lineage.relation(base.states, suspect.states)
    tests = {}
    for kind, C in correlations.items():
        tests[kind] = lineage.diagonal_test(C, (kind, settings.input_seed), settings.permutations)
    missing = base.units.missing or suspect.units.missing
    layers, layer_map = [], {}
    if not missing:
        limits = (settings.units, settings.layers or usual_layers(base, suspect))
        tokens = tokens_of(base.units, suspect.units)
        layers, layer_map = unit_census(base.units, suspect.units, tokens, *limits, settings.input_seed)
    answer, sentence = verdict(tests, layers, layer_map, missing)
    least = min(layers, key=lambda layer: layer["share"], default={})
    row = {"verdict": answer, "sentence": sentence, "units": least.get("units")}
    row |= {"units_found": least.get("found"), "units_share": least.get("share")}
    distances = [layer["distance"] for layer in layers if layer["distance"] is not None]
    row["distance"] = float(np.mean(distances)) if answer == SAME_BIRTH and distances else None
    row["num_rows"] = len(base.states) if "relabel" in tests else None
    for kind, prefix in (("relabel", ""), ("body", "body_"), ("embedding", "embedding_")):
        test = tests.get(kind, {})
        for name in ("matched", "mismatched", "smallest_visible"):
            row[prefix + name] = test.get(name)
        for name in ("z", "log10_p", "p"):
            row[f"{kind}_{name}"] = test.get(name)
    row["permutation_p"] = row["relabel_p"]
    points = lineage.histogram(correlations["body"]) if "body" in correlations else []
    return row, {"layers": layers, "layer_map": layer_map, "points": points, "skipped": skipped}


def tokens_of(base: Units, suspect: Units):
    """The ids of the tokens that two models share, in each of them."""
    return shared_tokens(base.source, suspect.source, min(base.num_tokens, suspect.num_tokens))
