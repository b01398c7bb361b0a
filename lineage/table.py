"""Which layers of a suspect are the base's, and what follows? One table, and a group-by (ours).

A row is a layer of the suspect, or an expert of one. Beside the rows of two stacks stands what no layer has
(`Pair`). A layer is the base's on the first of these *grounds* that holds:

    bits         a layer of the base has the same matrices, or its MLP has, bit for bit
    beginnings   these begin alike; no more was read
    neurons chance does not explain how many are matched, and share and r are those of BASE_SHARE and
                 BASE_R, or the share is HALF in the middle of both models; once two layers are, a late one
                 needs no strength
    coordinates  its own, or those of all layers if all rows are read, agree as chance does not; and its
                 matrices with those of one name, number by number, by ALIKE_R

What follows, `judge_stacks` and `judge_models` say. On what measurement each number rests:

    number                 why (results/robustness.json, unless another place is named)
    BASE_SHARE, BASE_R     language models that never met share up to 34 % of a layer, with an r below 0.26;
                           children have more than 0.28, and above 0.6 if they were not pruned to a tenth;
                           of fewer of a layer's experts it is not the base's
    HALF, LATE             before the last quarter of their depth such models share at most 11 %, children
                           under noise of twice their weights' std 99 %, however weakly (r = 0.18)
    DEEP                   the first layer of such models shares up to 10 %; of fewer it is a middle one
    UNRELATED_SHARE        what they share where none, one or both of two layers are in the middle
    ALIKE_R                unrelated models on a copied embedding matrix: no matrix above 0.035; children
                           under noise of twice their weights' std: 0.4 (docs/lineage.md)
    CHANCE_LOG10_P         of 990 pairs of newborns none passes (results/errors.json)
    UNDECIDED_P            of 990 such pairs 1 % have coordinates that agree so well
    FEWEST_UNITS           of 16 units half are 8, which chance finds once in 10^7 layers
    FEWEST_TOKENS          tables of fewer tokens than that are all alike, and so are units seen through them
    A_TENTH                noise of 0.3 std hides no child; a tenth of its layers can be a LoRA adapter's
    SAME_TABLE             copies are above 0.99 in any basis, trained children from there to 0.67, strangers
                           up to 0.61
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from scipy.special import gammainc

SAME_BIRTH = "same birth"
NO_EVIDENCE = "no evidence"
INCONCLUSIVE = "inconclusive"
PART_IN_COMMON = "part in common"
OF_ONE_STACK = (SAME_BIRTH, INCONCLUSIVE, NO_EVIDENCE)  # of the pairs of a stack the first of these counts,
OF_ALL_STACKS = (SAME_BIRTH, NO_EVIDENCE, INCONCLUSIVE)  # of all stacks of two models the last
BASE_SHARE, BASE_R = 0.2, 0.5  # of a layer's units that are matched, and how strongly
HALF = 0.5  # of a layer's units: more than chance or late layers of strangers share
LATE = 0.75  # of a stack's depth: here its last quarter begins
DEEP = 8  # layers: the first of as many is not in the middle; of large models so many are read
UNRELATED_SHARE = (HALF, BASE_SHARE, 0.1)  # by how many of two layers are in the middle
ALIKE_R = 0.1  # of each matrix of a layer with its namesake
CHANCE_LOG10_P = -6.0  # up to here nothing is chance's
UNDECIDED_P = 0.01  # of coordinates alone: up to here a common birth is not ruled out
FEWEST_UNITS = 16  # that live in a layer of both models, or are matched: of fewer nothing is said
FEWEST_TOKENS = 2  # for each dimension, that two models must share
A_TENTH = 0.1  # of the parameters of a model's layers: what may be another model, or hide a child
SAME_TABLE = 0.99  # how alike embedding matrices are, in any basis


@dataclass
class Row:
    """A layer of the suspect, or an expert of one, and its closest layers of the base, from 1; 0: none."""

    layer: int
    label: str  # for a reader: "layer 3, expert 5"
    ground: str = ""  # the first on which this layer is the base's; "" if none holds,
    base_layer: int = 0  # and the layer that it is
    closest: int = 0  # the base's layer that has most of its neurons,
    base_label: str = ""
    num_middle: int = 0  # of the two layers: in the middle of their stacks strangers share little
    found: int = 0  # units matched
    units: int = 0  # that could be: those read that live, in the MLP with fewer; 0: they were not looked for
    r: float | None = None  # the median strength of those matched, or the least correlation of its matrices
    by_chance: int = 0  # matched where one model's tokens are permuted: this pair's own null
    in_place: int = 0  # of those matched: they stand where they stood
    distance: float | None = None  # of what matched neurons read, or of its matrices: 0 of a copy
    is_beyond_chance: bool = False  # the count
    has_units_of_base: bool = False

    @property
    def share(self):
        return self.found / max(1, self.units)


@dataclass
class Match:
    """What two stacks have in common by their neurons, in the likeliest way to read them."""

    rows: list = field(default_factory=list)  # of the suspect's MLPs that were looked for
    layer_map: dict = field(default_factory=dict)  # `share`, by MLPs of the `base` and of the `suspect`
    num_tokens: int = 0  # that they share; 0: units were not looked for
    table_likeness: float | None = None  # in any basis: 1 of a copy; None: too few tokens


@dataclass(eq=False)
class Pair:
    """A stack of the base and one of the suspect: their rows, and what no layer has."""

    base: object  # the Stacks
    suspect: object
    match: Match = field(default_factory=Match)
    coordinates: dict = field(default_factory=dict)  # tests of the layers' ("body") and of the "embedding"
    namesakes: dict = field(default_factory=dict)  # by layer: the base's, strength and distance
    equal: dict = field(default_factory=dict)  # by layer, or MLP's label: the base's layer of the same bits
    has_equal: bool = False  # are any matrices of two layers equal?
    is_whole: bool = False  # were all rows compared, or few?
    bare: str = ""  # what models without layers have in their place
    rows: list = field(default_factory=list)
    lack: str = ""  # why neurons cannot tell; "" if they can
    verdict: str = ""
    reason: str = ""  # which of the rules below gave the verdict

    @property
    def is_told(self):
        """Is each layer of the suspect one of the base?"""
        return all(row.ground for row in self.rows)

    @property
    def with_units(self):
        """The rows whose neurons are the base's."""
        return [row for row in self.rows if row.has_units_of_base]

    def agrees(self, kind):
        """Do the coordinates of a kind of matrices agree, as chance does not?"""
        return kind in self.coordinates and self.coordinates[kind]["same"]


def beyond_chance(row, searches):
    """Does chance not explain a count, the best of `searches` layers of both?

    Unrelated models have a Poisson number of matched neurons, for each of three pairs of views. Its mean is
    below 1, or is what this pair's own null has, if that is larger: ties may make it so.
    """
    log_p = np.log(max(1e-300, gammainc(row.found, max(1, row.by_chance))))
    return (log_p + math.log(3 * max(1, searches) ** 2)) / math.log(10) <= CHANCE_LOG10_P


def mark_units(rows):
    """Mark the rows whose neurons are the base's."""
    searches = sum(row.closest > 0 for row in rows)
    for row in rows:
        is_strong = row.share >= BASE_SHARE and row.r >= BASE_R
        is_middle_one = row.share >= HALF and row.num_middle == 2
        row.is_beyond_chance = beyond_chance(row, searches)
        row.has_units_of_base = (is_strong or is_middle_one) and row.is_beyond_chance
    found = [(row.layer, row.closest) for row in rows if row.has_units_of_base]
    if distinct(found) > 1:
        for row in rows:
            row.has_units_of_base |= row.share >= HALF


def fill(pair):
    """Give a Pair its rows, with grounds: those that were matched, and those of all other layers."""
    matched = {row.layer for row in pair.match.rows}
    layers = range(1, len(pair.suspect.layers) + 1)
    others = [Row(layer, f"layer {layer}") for layer in layers if layer not in matched]
    pair.rows = sorted(pair.match.rows + others, key=lambda row: row.layer)
    for row in pair.rows:
        namesake, r, distance = pair.namesakes.get(row.layer, (0, 0.0, None))
        is_namesake = pair.agrees("body") and r >= ALIKE_R
        bits = "bits" if pair.is_whole else "beginnings"
        if row.layer in pair.equal:
            row.ground, row.base_layer = bits, pair.equal[row.layer]
        elif row.label in pair.equal:
            row.ground, row.base_layer = f"{bits} of MLPs", pair.equal[row.label]
        elif row.has_units_of_base:
            row.ground, row.base_layer = "neurons", row.closest
        elif is_namesake:
            row.ground, row.base_layer = "coordinates", namesake
        if is_namesake and namesake == row.base_layer and not row.closest:
            row.r, row.distance = r, distance
        if not all(getattr(stack.source, "is_scaled", True) for stack in (pair.base, pair.suspect)):
            row.distance = None


def why_units_cannot_tell(pair, lack):
    """Why neurons cannot tell two stacks apart; "" if they can. `lack`: why no way could be compared."""
    lacks = [lack] if lack else []
    for stack in (pair.base, pair.suspect):
        if stack.hides:
            lacks.append(f"not all of {stack.model} was looked at")
        if stack.missing:
            lacks.append(f"no {stack.missing} found in {stack.model}")
        elif stack.may_lack_table:
            lacks.append(f"no embedding matrix but what may be a head found in {stack.model}")
    rows, num_tokens = pair.match.rows, pair.match.num_tokens
    width = min(pair.base.width, pair.suspect.width)
    if not rows and not lacks:
        lacks.append("units cannot be seen through these embedding matrices")
    elif rows and num_tokens < FEWEST_TOKENS * width:
        lacks.append(f"they share {num_tokens:,} tokens, too few for a width of {width:,}")
    elif rows and max(row.units for row in rows) < FEWEST_UNITS:
        lacks.append(f"no layer has {FEWEST_UNITS} neurons that live in both models")
    elif rows and all(row.by_chance >= BASE_SHARE * row.units for row in rows):
        lacks.append("what units read and write is so alike that chance finds as many as a copy would have")
    return " and ".join(lacks)


def distinct(pairs):
    """How many layers some pairs of layers are: experts of one layer, and copies of one, count once."""
    return min(len({layer for layer, _ in pairs}), len({base_layer for _, base_layer in pairs}))


def layers_of_base(pair):
    """Which layers of the suspect are which of the base's? Of a layer's experts BASE_SHARE must be."""
    rows = defaultdict(list)
    for row in pair.rows:
        rows[row.layer].append(row)
    told = []
    for layer, experts in rows.items():
        found = [(layer, row.base_layer) for row in experts if row.ground]
        if len(found) >= BASE_SHARE * len(experts):
            told += found
    return told


def is_above_strangers(pair):
    """Is more matched in some layer than in layers of unrelated models that stand there?"""
    shared = [row for row in pair.match.rows if row.is_beyond_chance]
    return any(row.share >= UNRELATED_SHARE[row.num_middle] for row in shared)


def judge_stacks(pair):
    """The verdict of two stacks, and the rule that gave it."""
    depth = len({row.layer for row in pair.rows})
    layers = distinct(layers_of_base(pair))
    undecided = "body" not in pair.coordinates or pair.coordinates["body"]["p"] <= UNDECIDED_P
    if pair.bare:
        return INCONCLUSIVE, "bare"
    if layers and layers >= min(2, depth):
        return SAME_BIRTH, "layers"
    if any(row.ground for row in pair.rows):
        return INCONCLUSIVE, "one layer"
    if pair.agrees("body"):
        return INCONCLUSIVE, "coordinates"
    if pair.has_equal:
        return INCONCLUSIVE, "bits"
    if pair.lack:
        stacks = (pair.base, pair.suspect)
        may_hide = any(stack.hides for stack in stacks) or all(stack.may_have_units for stack in stacks)
        return (INCONCLUSIVE if undecided or may_hide else NO_EVIDENCE), "coordinates alone"
    return (INCONCLUSIVE, "between") if is_above_strangers(pair) else (NO_EVIDENCE, "units")


def judge_models(pairs):
    """The verdict of two models, and the pair of stacks that gave it.

    Each stack that may be the language model counts by the one of the other model that it is closest to (that
    reads tokens, too, or does not, if there is one). All must be kin, and none may hide a child.
    """
    bases = language_models([*dict.fromkeys(pair.base for pair in pairs)])
    suspects = language_models([*dict.fromkeys(pair.suspect for pair in pairs)])
    models = [pair for pair in pairs if pair.base in bases and pair.suspect in suspects]
    closest = []
    for stack in bases + suspects:
        own = [pair for pair in models if stack in (pair.base, pair.suspect)]
        alike = [pair for pair in own if bool(pair.base.tables) == bool(pair.suspect.tables)]
        closest.append(min(alike or own, key=lambda pair: OF_ONE_STACK.index(pair.verdict)))
    told = max(closest, key=lambda pair: OF_ALL_STACKS.index(pair.verdict))
    have_part = told.verdict != SAME_BIRTH and any(pair.verdict == SAME_BIRTH for pair in pairs)
    return PART_IN_COMMON if have_part else told.verdict, told


def language_models(stacks):
    """The stacks that may be the model: what may read tokens, is as the first, or as large; or any, where the
    first may be a text encoder, without a head.

    None is that has less than a tenth of the largest one's size, or no MLPs, if the first has some, or one
    layer beside several, as a draft head; or that no table leads to, if another stack has one.
    """
    first = stacks[0]
    least = A_TENTH * max(stack.size for stack in stacks)
    models = []
    for stack in stacks:
        is_like = stack.is_fed or stack.rank == first.rank
        is_draft = len(stack.layers) == 1 < len(first.layers)
        is_large = stack.size >= (first.size if first.has_head else least)
        may_have_mlps = stack.mlps or (stack.tables and stack.hides)
        is_whole = may_have_mlps or not first.mlps
        if is_whole and stack.size >= least and (is_large or (is_like and not is_draft)):
            models.append(stack)
    return models or [first]
