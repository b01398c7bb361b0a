"""Are two models of one birth? Read both, match each layer, fill the table, judge it. (ours)

>>> from sources import checkpoint
>>> from lineage.compare import compare, read_model
>>> names = ("tiny_llama@1", "tiny_llama@2")
>>> models = [read_model(name, checkpoint.parse_spec(name).open()) for name in names]
>>> verdict, pair, pairs = compare(*models)
>>> verdict, [row.found for row in pair.rows]  # of 704 units each
('no evidence', [0, 1, 2, 1, 1, 1])
"""

import itertools
from dataclasses import dataclass

from lineage.evidence import diagonal_test, equal_layers, nothing_in, weight_correlations
from lineage.layout import find_stacks
from lineage.match import match_stacks
from lineage.table import fill, judge_models, judge_stacks, look_for_gaps
from lineage.views import hidden_units
from sources.formats import token_ids


@dataclass
class Model:
    """What is read of a model before it is compared, by `read_model`."""

    name: str
    stacks: dict  # of each Stack (a run of layers): hidden Units by Reading (which matrix is what)
    vocabulary: dict  # tokens' numbers by their strings, if a tokenizer tells them
    is_newborn: bool


def read_model(name, source):
    """The Model of a checkpoint. Reading a vector raises UserError if it is not finite."""
    for parameter, shape in source.shapes.items():
        if len(shape) == 1:
            source.read(parameter)
    vocabulary = {} if source.place is None else token_ids(source.place)  # newborns have no place on the disk
    stacks = {stack: hidden_units(stack) for stack in find_stacks(source)}
    return Model(name, stacks, vocabulary, source.place is None)


def compare(base: Model, suspect: Model, seed=0, permutations=9999, units=1024, layers=None):
    """The verdict of two models, the Pair of stacks (a table of layers) that gave it, and all Pairs."""
    pairs = []
    for ours, theirs in itertools.product(base.stacks, suspect.stacks):
        correlations, namesakes = weight_correlations(ours, theirs)  # before units fill the memory
        tests = {kind: diagonal_test(C, (kind, seed), permutations) for kind, C in correlations.items()}
        equal = equal_layers(ours, theirs)
        bare = [nothing_in(ours, base.name), nothing_in(theirs, suspect.name)]
        vocabularies = (base.vocabulary, suspect.vocabulary)
        pair = match_stacks(base.stacks[ours], suspect.stacks[theirs], vocabularies, units, layers, seed)
        pair.base, pair.suspect, pair.coordinates = ours, theirs, tests
        fill(pair, equal, namesakes)
        pair.bare = " and ".join(filter(None, bare))  # why their layers could tell nothing, if so
        look_for_gaps(pair, base.name, suspect.name)
        pair.verdict, pair.reason = judge_stacks(pair)
        pairs.append(pair)
    return judge_models(pairs)
