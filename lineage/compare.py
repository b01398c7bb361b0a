"""Are two models of one birth? Look at bits, coordinates and neurons, and judge. (ours)

A neuron is a hidden unit of an MLP. A row gives how many were matched (`units_found` of `units`), and the
median correlation of the matches (`r`); or how far matrices moved (`distance`: 0 of a copy, 1 of an unrelated
model), where coordinates tell it. `body_z` and `embedding_z` are z-scores: how much better the weights'
coordinates agree than if permuted. `lineage/judge.py` has the rules for the verdict.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Literal

from init import SCHEMES
from lib.results import Experiment
from lib.runtime import progress, rank
from lib.settings import Names, OutputSettings, UserError, at_least
from lineage.evidence import equal_layers, is_copy, look, parts_looked_at, why_bare
from lineage.family import draw_family, lineage_figure
from lineage.judge import COLUMNS, INCONCLUSIVE, VERDICTS, Pair, judge, row_of
from lineage.layout import find_stacks
from lineage.match import layers_to_read, likeliest_way, match_again, match_layers, tables_to_read
from sources.checkpoint import check_several, parse_spec
from strangers.formats import open_spec, token_ids

VERDICT_COLUMNS = ("suspect", "verdict", "units_found", "units", "r", "distance", "body_z", "embedding_z")
FEW, MANY = 256, 1024  # directions that neurons are seen in: at first, and where these do not decide


@dataclass
class CompareSettings(OutputSettings):
    """The settings of `compare` and `matrix`."""

    models: Names = ()  # BASE and SUSPECTs: names on the Hub, folders, files, PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # initialization of PRESET@SEED
    layers: at_least(1) = 8  # evenly spaced layers of the suspect whose neurons are matched
    units_per_layer: at_least(2) = 1024  # neurons to match in each layer
    neurons: bool = False  # match them even where bits and coordinates tell every layer


class Model:
    """One side of a comparison: a checkpoint, and its stacks of layers."""

    def __init__(self, name, source):
        """Reading a vector raises UserError if it is not finite."""
        for parameter, shape in source.shapes.items():
            if len(shape) == 1:
                source.read(parameter)
        self.name = name
        self.source = source
        stacks = find_stacks(source, name)
        self.stacks = [stack for stack in stacks if stack.may_be_model]
        self.others = [stack for stack in stacks if not stack.may_be_model]

    @functools.cached_property
    def vocabulary(self):
        """Tokens' numbers by their strings, if a tokenizer tells them."""
        return token_ids(self.source.place) if self.source.place else {}


def compare_models(base: Model, suspect: Model, settings: CompareSettings):
    """The row of two checkpoints (verdict, sentence, numbers), and for figures its `layers` and `layer_map`.

    Each stack that may be the language model counts by the one of the other checkpoint that it is closest to.
    Where these disagree, nothing is concluded. Other parts are compared by their bits, and named.
    """
    stacks = itertools.product(base.stacks, suspect.stacks)
    pairs = [compare_stacks(*both, base, suspect, settings) for both in stacks]
    closest = []
    for stack in suspect.stacks + base.stacks:
        own = [pair for pair in pairs if stack in (pair.base, pair.suspect)]
        closest.append(min(own, key=lambda pair: VERDICTS.index(pair.verdict)))
    row, details = row_of(closest[0])
    if len({pair.verdict for pair in closest}) > 1:
        parts = {f"`{pair.suspect.part}` and the base's `{pair.base.part}`": pair for pair in closest}
        said = [f"{parts_of}: {pair.verdict}: {pair.sentence}" for parts_of, pair in parts.items()]
        row |= {"verdict": INCONCLUSIVE, "sentence": f"its parts differ: {'; '.join(said)}"}
    for stack in suspect.others:
        equal = [other.part for other in base.stacks + base.others if is_copy(stack, other)]
        how = f"begins bit for bit as the base's `{equal[0]}`" if equal else "was not looked at"
        row["sentence"] += f"; its `{stack.part}` {how}"
    return row, details


def compare_stacks(base_stack, suspect_stack, base, suspect, settings):
    """The judged Pair of two stacks.

    Bits and coordinates of a few rows come first. If these settle every layer, nothing more is read.
    Otherwise neurons are matched, at first in few directions.
    """
    pair = Pair(base_stack, suspect_stack)
    pair.bare = " and ".join(filter(None, map(why_bare, (base_stack, suspect_stack))))
    pair.coordinates, pair.alike = look(base_stack, suspect_stack)
    pair.equal, pair.has_equal = equal_layers(base_stack, suspect_stack)
    if settings.neurons or not (pair.bare or all(row.ground for row in pair.rows)):
        compare_neurons(pair, (base.vocabulary, suspect.vocabulary), settings)
    judge(pair)
    return pair


def compare_neurons(pair, vocabularies, settings):
    """Look for neurons: in few directions, and in many where these leave a doubt."""
    stacks = (pair.base, pair.suspect)
    shown = layers_to_read(*stacks, settings.layers)
    for stack, layers, tables in zip(stacks, shown, tables_to_read(*stacks)):
        mlps = itertools.chain(*(stack.mlps[layer - 1] for layer in layers))
        names = {name for mlp in mlps for name in mlp.matrices.values()}
        stack.source.expect((name, ()) for name in names.union(tables))
    way, lack = likeliest_way(*stacks, vocabularies, FEW)
    if way is None:
        pair.lack = lack
        return
    pair.matched, pair.layer_map = match_layers(way, settings.layers, settings.units_per_layer)
    pair.num_tokens, pair.likeness = way.num_tokens, way.likeness
    if not pair.is_kin:
        pair.matched = match_again(way, pair.matched, MANY, settings.units_per_layer)
    is_lone = [stack.has_lone_table for stack in stacks]
    if is_lone[0] != is_lone[1] and all(stack.heads == stack.tables for stack in stacks):
        pair.lack = "an embedding matrix is compared with what may be a head"


def compare(settings: CompareSettings):
    """Does each suspect share its initialization with the base? Takes 5 s for a pair of 135M parameters.

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
            row = dict.fromkeys(COLUMNS.split()) | {"verdict": "not read", "sentence": str(error)}
            detail = {"layers": [], "layer_map": {}}
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
    return Model(name, source)
