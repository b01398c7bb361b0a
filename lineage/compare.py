"""Are two models of one birth? Read both, match each layer, fill the table, judge it, say why. (ours)"""

import itertools
from dataclasses import dataclass

from lineage.evidence import diagonal_test, equal_layers, weight_correlations, why_bare
from lineage.layout import find_stacks
from lineage.match import likeliest_way, match_stacks
from lineage.settings import CompareSettings
from lineage.table import Match, Pair, fill, judge_models, judge_stacks, why_units_cannot_tell
from lineage.verdict import explain
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
    stacks = {stack: hidden_units(stack) for stack in find_stacks(source, name)}
    return Model(name, stacks, vocabulary, source.place is None)


def compare_models(base: Model, suspect: Model, settings: CompareSettings):
    """The row of two models (verdict, sentence, numbers), and for figures its `layers` and `layer_map`."""
    pairs = []
    for ours, theirs in itertools.product(base.stacks, suspect.stacks):
        correlations, namesakes = weight_correlations(ours, theirs)  # before units fill the memory
        tests = {}
        for kind, correlation in correlations.items():
            tests[kind] = diagonal_test(correlation, (kind, settings.permutation_seed), settings.permutations)
        equal = equal_layers(ours, theirs)
        bare = " and ".join(filter(None, (why_bare(ours), why_bare(theirs))))
        vocabularies = (base.vocabulary, suspect.vocabulary)
        units = (base.stacks[ours], suspect.stacks[theirs])
        way, lack = likeliest_way(*units, vocabularies, settings.units_per_layer)
        match = Match() if way is None else match_stacks(way, settings)
        pair = Pair(ours, theirs, match, tests, bare)
        fill(pair, equal, namesakes)
        pair.lack = why_units_cannot_tell(pair, "" if way else lack)
        pair.verdict, pair.reason = judge_stacks(pair)
        pairs.append(pair)
    return explain(base, suspect, pairs, *judge_models(pairs))
