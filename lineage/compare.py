"""Are two models of one birth? Read both, match each layer, fill the table, judge it, say why. (ours)

A neuron is a hidden unit of an MLP. A row gives how many were matched (`units_found` of `units`), the median
correlation of the matches (`r`), and how far they moved (`distance`: 0 for a copy, 1 for an unrelated model).
`body_z` and `embedding_z` are z-scores: how much better the weights' coordinates agree than if permuted.
`lineage/table.py` has the rules for the verdict.
"""

import functools
import itertools
from dataclasses import dataclass

from lib.results import Experiment
from lib.runtime import progress, rank
from lib.settings import UserError
from lineage.evidence import diagonal_test, equal_parts, look, parts_looked_at, weight_correlations, why_bare
from lineage.family import draw_family, lineage_figure
from lineage.layout import find_stacks
from lineage.match import expect_units, likeliest_way, match_stacks
from lineage.settings import CompareSettings
from lineage.table import Pair, fill, judge_models, judge_stacks, language_models, why_units_cannot_tell
from lineage.verdict import explain, unread_row
from lineage.views import hidden_units
from sources.checkpoint import check_several, parse_spec
from strangers.formats import open_spec, token_ids

VERDICT_COLUMNS = ("suspect", "verdict", "units_found", "units", "r", "distance", "body_z", "embedding_z")


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


def compare(settings: CompareSettings):
    """Does each suspect share its initialization with the base? Takes 20 s for a pair of 135M parameters.

    A suspect that cannot be read gets the verdict `not read`; the others are compared; the exit status is 2.
    """
    base_name, *names = check_several(settings.models)
    base = open_model(base_name, settings)
    experiment = Experiment("compare", "BB 6.1", settings)
    rows, details, unread = [], [], []
    for name in progress(names, desc="suspects"):
        try:
            row, detail = compare_models(base, open_model(name, settings), settings)
        except UserError as error:
            row, detail = unread_row(error)
            unread.append(error)
        rows.append({"base": base_name, "suspect": name} | row)
        details.append(detail)
    if len(unread) == len(names):
        raise unread[0]
    more = {key: [detail[key] for detail in details] for key in ("layers", "layer_map")}
    result = experiment.save(rows, VERDICT_COLUMNS, **more)
    if rank() == 0:
        for row in rows:
            print(f"{row['suspect']}: {row['verdict']}: {row['sentence']}")
    lineage_figure(experiment.folder / "compare.png", base_name, rows, details)
    if unread:
        raise UserError(f"{len(unread)} of {len(names)} suspects not read: {unread[0]}")
    return result


def matrix(settings: CompareSettings):
    """Which of several models share an initialization? All pairs, heat map, family tree (BB Table 4)."""
    models = [open_model(name, settings) for name in check_several(settings.models)]
    experiment = Experiment("matrix", "BB Table 4", settings)
    rows = []
    for a, b in progress(list(itertools.combinations(models, 2)), desc="matrix", unit=" pairs"):
        row, _ = compare_models(a, b, settings)
        rows.append({"a": a.name, "b": b.name} | row)
    result = experiment.save(rows, ("a", "b", *VERDICT_COLUMNS))
    draw_family(experiment.folder / "matrix.png", models, rows)
    return result


def open_model(name, settings: CompareSettings):
    """The Model that a name stands for, of any architecture; UserError if it cannot be read."""
    source = open_spec(parse_spec(name, settings.init, in_parts=True), any_architecture=True)
    source.expect((name, part) for name, shape in source.shapes.items() for part in parts_looked_at(shape))
    return read_model(name, source)
