"""Are two models of one birth? Look at bits, coordinates and neurons, and judge. (ours)

A row gives how many neurons (hidden units of an MLP) were matched, `units_found` of `units`, and their median
correlation `r`. `lineage/judge.py` has the rules for the verdict.
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
from lineage.judge import COLUMNS, INCONCLUSIVE, VERDICTS, Pair, judge, row_of
from lineage.layout import find_stacks
from lineage.match import layers_to_read, likeliest_way, match_again, match_layers, tables_to_read
from sources.checkpoint import find_model
from weights.vocabulary import token_ids

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
        self.stacks = find_stacks(source, name)

    @functools.cached_property
    def vocabulary(self):
        """Tokens' numbers by their strings, if a tokenizer tells them."""
        return token_ids(self.source.place) if self.source.place else {}


def compare_models(base: Model, suspect: Model, settings: CompareSettings):
    """The row of two checkpoints (verdict, sentence, numbers), and for figures its `layers` and `layer_map`.

    Every stack of one that may be its language model is compared with every such stack of the other, and
    keeps its best verdict. If these differ, the answer is inconclusive. Other parts are compared by their
    bits, and named.
    """
    models = [[stack for stack in model.stacks if stack.may_be_model] for model in (base, suspect)]
    pairs = [compare_stacks(*stacks, base, suspect, settings) for stacks in itertools.product(*models)]
    pairs.sort(key=lambda pair: VERDICTS.index(pair.verdict))
    closest = [next(p for p in pairs if stack in (p.base, p.suspect)) for stack in models[1] + models[0]]
    row, details = row_of(closest[0])
    parts = {f"`{pair.suspect.prefix}*` and the base's `{pair.base.prefix}*`": pair for pair in closest}
    if len(parts) > 1:
        row["sentence"] = f"its {[*parts][0]}: {row['sentence']}"
    if len({pair.verdict for pair in closest}) > 1:
        said = [f"{parts_of}: {pair.verdict}: {pair.sentence}" for parts_of, pair in parts.items()]
        row |= {"verdict": INCONCLUSIVE, "sentence": f"its parts differ: {'; '.join(said)}"}
    for stack in [stack for stack in suspect.stacks if not stack.may_be_model]:
        equal = [other.prefix for other in base.stacks if is_copy(stack, other)]
        how = f"begins bit for bit as the base's `{equal[0]}*`" if equal else "was not looked at"
        row["sentence"] += f"; its `{stack.prefix}*` {how}"
    return row, details


def compare_stacks(base_stack, suspect_stack, base, suspect, settings):
    """The judged Pair of two stacks. Neurons are looked for where bits and coordinates leave a layer open."""
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
        names = {name for layer in layers for mlp in stack.mlps[layer - 1] for name in mlp.matrices.values()}
        stack.source.expect((name, ()) for name in names.union(tables))
    way, lack = likeliest_way(*stacks, vocabularies, FEW)
    if way is None:
        pair.lack = lack
        return
    pair.matched, pair.layer_map = match_layers(way, settings.layers, settings.units_per_layer)
    pair.num_tokens, pair.likeness = way.num_tokens, way.likeness
    if not pair.is_kin:
        pair.matched = match_again(way, pair.matched, MANY, settings.units_per_layer)
    if pair.base.has_lone_table != pair.suspect.has_lone_table and all(s.heads == s.tables for s in stacks):
        pair.lack = "an embedding matrix is compared with what may be a head"


def compare(settings: CompareSettings):
    """Does each suspect share its initialization with the base? Takes 5 s for a pair of 135M parameters.

    A suspect that cannot be read gets the verdict `not read`; the others are compared; the exit status is 2.
    """
    base_name, *names = settings.models
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
    if unread:
        raise UserError(f"{len(unread)} of {len(names)} suspects not read: {unread[0]}")
    return result


def matrix(settings: CompareSettings):
    """Which of several models share an initialization? All pairs, heat map, family tree (BB Table 4)."""
    from lineage.family import draw_family  # matplotlib takes half a second to import

    models = [open_model(name, settings) for name in settings.models]
    experiment = Experiment("matrix", "BB Table 4", settings)
    pairs = progress([*itertools.combinations(models, 2)], desc="matrix", unit=" pairs")
    rows = [{"a": a.name, "b": b.name} | compare_models(a, b, settings)[0] for a, b in pairs]
    result = experiment.save(rows, ("a", "b", *VERDICT_COLUMNS))
    draw_family(experiment.folder / "matrix.png", models, rows)
    return result


def open_model(name, settings: CompareSettings):
    """The Model that a name stands for, of any architecture; UserError if it cannot be read."""
    source = find_model(name, settings.init, weights_alone=True).weights
    source.expect((name, part) for name, shape in source.shapes.items() for part in parts_looked_at(shape))
    return Model(name, source)
