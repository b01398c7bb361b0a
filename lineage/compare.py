"""Are two models of one birth? Read both, match each layer, fill the table, judge it, say why. (ours)"""

import functools
import itertools
from dataclasses import dataclass

from lineage.evidence import diagonal_test, equal_parts, look, weight_correlations, why_bare
from lineage.layout import find_stacks
from lineage.match import expect_units, likeliest_way, match_stacks
from lineage.settings import CompareSettings
from lineage.table import Pair, fill, judge_models, judge_stacks, language_models, why_units_cannot_tell
from lineage.verdict import explain
from lineage.views import hidden_units
from sources.formats import token_ids


@dataclass
class Model:
    """One side of a comparison, made by `read_model`. Slow parts are read on first use and cached."""

    name: str
    source: object  # the checkpoint
    stacks: list  # runs of layers

    @property
    def is_newborn(self):
        """Is it on no disk?"""
        return self.source.place is None

    @functools.cached_property
    def vocabulary(self):
        """Tokens' numbers by their strings, if a tokenizer tells them."""
        return {} if self.is_newborn else token_ids(self.source.place)

    @functools.cached_property
    def units(self):
        """Of each stack its hidden Units by Reading (which matrix is what)."""
        return {stack: hidden_units(stack) for stack in self.stacks}


def read_model(name, source):
    """The Model of a checkpoint. Reading a vector raises UserError if it is not finite."""
    for parameter, shape in source.shapes.items():
        if len(shape) == 1:
            source.read(parameter)
    return Model(name, source, find_stacks(source, name))


def compare_models(base: Model, suspect: Model, settings: CompareSettings):
    """The row of two models (verdict, sentence, numbers), and for figures its `layers` and `layer_map`.

    Bits and coordinates of a few rows come first. If these settle every layer of every possible language
    model, nothing more is read. Otherwise neurons are matched in the layers not yet settled.
    """
    pairs = [Pair(*stacks) for stacks in itertools.product(base.stacks, suspect.stacks)]
    for pair in pairs:
        compare_weights(pair, settings, settings.thorough)
    told = {stack for pair in pairs if pair.is_told for stack in (pair.base, pair.suspect)}
    is_enough = told.issuperset(language_models(base.stacks) + language_models(suspect.stacks))
    for pair in pairs:
        if settings.thorough or not (is_enough or told.issuperset((pair.base, pair.suspect))):
            compare_units(pair, base, suspect, settings)
        elif not pair.is_told:
            pair.lack = "neurons were not looked for"
        pair.verdict, pair.reason = judge_stacks(pair)
    return explain(base, suspect, pairs, *judge_models(pairs))


def compare_weights(pair, settings, is_thorough):
    """Compare bits and coordinates of two stacks: of few rows, or of all."""
    stacks = (pair.base, pair.suspect)
    if is_thorough:
        correlations, pair.namesakes = weight_correlations(*stacks)
        for kind, correlation in correlations.items():
            key = (kind, settings.permutation_seed)
            pair.coordinates[kind] = diagonal_test(correlation, key, settings.permutations)
    else:
        pair.coordinates, pair.namesakes = look(*stacks)
    pair.equal, pair.has_equal = equal_parts(*stacks, is_thorough)
    pair.is_whole = is_thorough
    pair.bare = " and ".join(filter(None, map(why_bare, stacks)))
    fill(pair)


def compare_units(pair, base, suspect, settings):
    """Look for neurons of layers without a ground; compare all rows where no units can tell."""
    layers = [row.layer for row in pair.rows if not row.ground]
    if settings.thorough or len(layers) == len(pair.rows):
        layers = None
    units = (base.units[pair.base], suspect.units[pair.suspect])
    if all(units):
        expect_units(units[0][0], units[1][0], settings, layers)
    vocabularies = (base.vocabulary, suspect.vocabulary)
    way, lack = likeliest_way(*units, vocabularies, settings.units_per_layer)
    if way is not None:
        pair.match = match_stacks(way, settings, layers)
    fill(pair)
    pair.lack = why_units_cannot_tell(pair, "" if way else lack)
    if pair.lack and not pair.is_whole:
        compare_weights(pair, settings, True)
