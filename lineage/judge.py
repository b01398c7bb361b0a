"""Which layers of a suspect are the base's, what follows, and what is said? (ours)

A row is a layer of the suspect. It is the base's on the first of these *grounds* that holds:

    bits         its matrices, or all of its MLPs', begin bit for bit as those of one layer of the base
    neurons      chance does not explain how many are matched, and share and r are those of BASE_SHARE and
                 BASE_R, or the share is HALF in the middle of both models; once two layers are, a late one
                 needs no strength
    coordinates  its own agree as chance does not; and its matrices with those of one name by ALIKE_R

Two layers, or the only one of a model, are a common birth.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from scipy.special import gammainc

SAME_BIRTH = "same birth"
NO_EVIDENCE = "no evidence"
INCONCLUSIVE = "inconclusive"
VERDICTS = (SAME_BIRTH, INCONCLUSIVE, NO_EVIDENCE)  # of several pairs of a stack the first of these counts
# On which measurement each number rests: results/robustness.json, unless another place is named. Models that
# never met share up to 36 % of a layer (r below 0.32), before the last quarter of their depth 5 %; children
# have at least 93 %, and r above 0.65 if not pruned to a tenth, or 0.12 under noise of twice their std.
BASE_SHARE, BASE_R = 0.2, 0.5  # of a layer's neurons that are matched, and how strongly
HALF = 0.5  # of a layer's neurons: more than chance or late layers of strangers share
UNRELATED_SHARE = (HALF, BASE_SHARE, 0.1)  # by how many of two layers are in the middle
DOUBTFUL = 0.25  # of that share: from here on a second look is worth its time
ALIKE_R = 0.1  # of each matrix of a layer with its namesake: strangers on a copied table have 0.035 at most
CHANCE_LOG10_P = -6.0  # up to here nothing is chance's: no pair of 990 newborns passes (results/errors.json)
UNDECIDED_P = 0.01  # of coordinates alone, which no such pair has: a common birth is not ruled out
FEWEST_NEURONS = 16  # that live in a layer of both models: chance finds half of so many once in 10^7 layers
FEWEST_TOKENS = 2  # for each dimension, that two models must share: tables of fewer are all alike
SAME_TABLE = 0.99  # how alike copies are in any basis; trained children down to 0.67, strangers up to 0.61
COLUMNS = "verdict sentence units units_found units_share r layer base_layer distance body_r body_z "
COLUMNS += "body_log10_p embedding_z table_likeness"  # of a row
COPIED = "a part may have been copied"
REMEDY = "an earlier checkpoint of the suspect, or a common ancestor, would tell"


@dataclass
class Row:
    """A layer of the suspect, from 1."""

    layer: int
    ground: str = ""  # the first on which this layer is the base's; "" if none holds,
    base_layer: int | None = None  # and the layer that it is
    closest: int | None = None  # the base's layer that has most of its neurons; None: none were looked for
    num_middle: int = 0  # of the two layers: in the middle of their models strangers share little
    found: int | None = None  # neurons matched
    units: int | None = None  # that could be: those read that live, in the layer with fewer
    r: float | None = None  # the median strength of those matched, or the least correlation of its matrices
    by_chance: int | None = None  # matched after the basis is permuted: this pair's own null
    in_place: int = 0  # of those matched: they stand where they stood
    distance: float | None = None  # of its matrices from their namesakes: 0 of a copy
    is_beyond_chance: bool = False  # the count
    has_neurons_of_base: bool = False

    @property
    def share(self):
        return None if self.found is None else self.found / max(1, self.units)

    @property
    def is_doubtful(self):
        """Is more matched than chance explains, though not as of the base, and a fair part of what tells?"""
        is_much = self.share >= DOUBTFUL * UNRELATED_SHARE[self.num_middle]
        return self.is_beyond_chance and is_much and not self.has_neurons_of_base


@dataclass(eq=False)
class Pair:
    """Two stacks: the suspect's layers, and what no layer has."""

    base: object  # lineage.layout.Stack
    suspect: object
    matched: list = field(default_factory=list)  # rows of layers whose neurons were looked for
    layer_map: dict = field(default_factory=dict)  # `share`, by layers of the `base` and of the `suspect`
    num_tokens: int = 0  # that they share
    likeness: float | None = None  # of the tables, in any basis: 1 of a copy; None: too few tokens
    coordinates: dict = field(default_factory=dict)  # tests of the layers' ("body") and of the "embedding"
    alike: dict = field(default_factory=dict)  # by layer whose own agree: least correlation, and distance
    equal: dict = field(default_factory=dict)  # by layer: the base's layer of the same bits
    has_equal: bool = False  # are any matrices of two layers equal?
    bare: str = ""  # what models without layers have in their place
    lack: str = ""  # why no way to read them could be compared
    verdict: str = ""
    sentence: str = ""

    @property
    def rows(self):
        """A row for each layer of the suspect, with its ground."""
        rows = {layer: Row(layer) for layer in range(1, len(self.suspect.layers) + 1)}
        rows |= {row.layer: row for row in self.matched}
        is_scaled = self.base.source.is_scaled and self.suspect.source.is_scaled
        for layer, row in rows.items():
            r, distance = self.alike.get(layer, (0.0, None))
            places = {"bits": self.equal.get(layer), "neurons": row.has_neurons_of_base and row.closest}
            places["coordinates"] = r >= ALIKE_R and layer
            row.ground = next((ground for ground, place in places.items() if place), "")
            row.base_layer = places.get(row.ground, row.closest)
            if row.ground and places["coordinates"] == row.base_layer:
                row.r = row.r if row.closest else r
                row.distance = distance if is_scaled else None
        return [*rows.values()]

    @property
    def with_neurons(self):
        """The rows whose neurons are the base's."""
        return [row for row in self.matched if row.has_neurons_of_base]

    @property
    def is_kin(self):
        """Are two layers the base's, or the only one of a model?"""
        told = [(row.layer, row.base_layer) for row in self.rows if row.ground]
        fewest = min(2, len(self.base.layers), len(self.suspect.layers))
        return 0 < fewest <= distinct(told)

    @property
    def is_above_strangers(self):
        """Is more matched in some layer than in layers of unrelated models that stand there?"""
        found = [row for row in self.matched if row.is_beyond_chance]
        return any(row.share >= UNRELATED_SHARE[row.num_middle] for row in found)

    @property
    def decisive_row(self):
        """The row that counts: the least that is the base's, by neurons if any are, else one with most."""
        if self.with_neurons:
            return min(self.with_neurons, key=lambda row: row.share)
        most = max(self.matched, key=lambda row: row.share, default=None)
        alike = [row for row in self.rows if row.ground and row.r is not None]
        return min(alike, key=lambda row: row.r, default=most)

    @property
    def distance(self):
        """The mean of layers that are the base's; None where coordinates do not tell it."""
        distances = [row.distance for row in self.rows if row.ground and row.distance is not None]
        return float(np.mean(distances)) if distances else None

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


def mark_neurons(rows):
    """Mark the rows whose neurons are the base's."""
    for row in rows:
        is_strong = row.share >= BASE_SHARE and row.r >= BASE_R
        is_middle_one = row.share >= HALF and row.num_middle == 2
        row.is_beyond_chance = beyond_chance(row, len(rows))
        row.has_neurons_of_base = (is_strong or is_middle_one) and row.is_beyond_chance
    if distinct([(row.layer, row.closest) for row in rows if row.has_neurons_of_base]) > 1:
        for row in rows:
            row.has_neurons_of_base |= row.share >= HALF and row.is_beyond_chance


def distinct(pairs):
    """How many layers some pairs of layers are: copies of one count once."""
    return min(len({layer for layer, _ in pairs}), len({base_layer for _, base_layer in pairs}))


def judge(pair):
    """Give a Pair its verdict and its sentence: of these rules the first that holds."""
    body, lack, found = pair.coordinates.get("body"), why_neurons_cannot_tell(pair), found_phrase(pair)
    stacks = (pair.base, pair.suspect)
    missing = "; ".join(f"of {stack.model} {missed}" for stack in stacks for missed in stack.missing)
    may_hide = any(stack.hides for stack in stacks) or all(stack.may_have_mlps for stack in stacks)
    undecided = may_hide or missing or body is None or body["p"] <= UNDECIDED_P
    neurons, coordinates, table = neurons_phrase(pair, lack), coordinates_phrase(body), table_phrase(pair)
    few = "more than unrelated models share there, but fewer, or more weakly, than a child"
    begin = "matrices begin bit for bit as the base's, but no whole MLP or layer"
    hidden = f"{coordinates}, but a changed basis would hide a child, and {lack}"
    some = f"{coordinates}, but not in every kind of matrix of two layers: {COPIED}; {neurons}"
    rules = [  # whether it holds, the verdict, and what is said
        (pair.bare, INCONCLUSIVE, [f"nothing to compare: {pair.bare}", table]),
        (pair.is_kin, SAME_BIRTH, [found, *changes(pair), table]),
        (found, INCONCLUSIVE, [f"{found}, but no other layer's: {COPIED}", table, REMEDY]),
        (pair.agrees("body"), INCONCLUSIVE, [some, table, REMEDY]),
        (pair.has_equal, INCONCLUSIVE, [f"{begin}: {COPIED}", neurons, table, REMEDY]),
        (lack, INCONCLUSIVE if undecided else NO_EVIDENCE, [hidden, missing]),
        (pair.is_above_strangers, INCONCLUSIVE, [f"{neurons}: {few}", table, REMEDY]),
        (missing, INCONCLUSIVE, [f"{neurons}, but a part is not the model: {missing}", table]),
        (True, NO_EVIDENCE, [f"{neurons}, if their tokens mean the same", table]),
    ]
    pair.verdict, said = next((verdict, said) for holds, verdict, said in rules if holds)
    for stack in stacks:
        unread = ", ".join(f"{what} ({share:.0%} of its layers)" for what, share in stack.unread.items())
        said.append(f"not looked at in {stack.model}: {unread}" if unread else "")
    pair.sentence = "; ".join(filter(None, said))


def row_of(pair):
    """The row of two models: verdict, sentence, and numbers; of neurons those of the layer that counts."""
    body, table = (pair.coordinates.get(kind, {}) for kind in ("body", "embedding"))
    layer = pair.decisive_row or Row(None)
    row = dict.fromkeys(COLUMNS.split()) | {"verdict": pair.verdict, "sentence": pair.sentence}
    row |= {"units": layer.units, "units_found": layer.found, "units_share": layer.share, "r": layer.r}
    row |= {"layer": layer.layer, "base_layer": layer.base_layer, "distance": pair.distance}
    row |= {"body_r": body.get("matched"), "body_z": body.get("z"), "body_log10_p": body.get("log10_p")}
    row |= {"embedding_z": table.get("z"), "table_likeness": pair.likeness}
    shown = "layer base_layer ground r distance found units share by_chance".split()
    layers = [{key: getattr(each, key) for key in shown} for each in pair.rows if each.base_layer]
    return row, {"layers": layers, "layer_map": pair.layer_map}


def why_neurons_cannot_tell(pair):
    """Why neurons cannot tell two stacks apart; "" if they can."""
    lacks, rows = [pair.lack], pair.matched
    for stack in (pair.base, pair.suspect):
        lacks.append(f"not all of {stack.model} was looked at" if stack.hides else "")
        lacks.append(f"no {stack.lack} found in {stack.model}" if stack.lack else "")
    width = min(pair.base.width, pair.suspect.width)
    if rows and pair.num_tokens < FEWEST_TOKENS * width:
        lacks.append(f"they share {pair.num_tokens:,} tokens, too few for a width of {width:,}")
    elif rows and max(row.units for row in rows) < FEWEST_NEURONS:
        lacks.append(f"no layer has {FEWEST_NEURONS} neurons that live in both models")
    elif rows and all(row.by_chance >= BASE_SHARE * row.units for row in rows):
        lacks.append("what neurons read and write is so alike that chance finds as many as a copy would have")
    return " and ".join(filter(None, lacks))


def layers_phrase(numbers):
    """Layers by their numbers: "layers 1-3", "layers 3, 5"."""
    numbers = sorted({*numbers})
    is_run = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
    shown = f"{numbers[0]}-{numbers[-1]}" if is_run else ", ".join(map(str, numbers))
    return f"layer{'s' if len(numbers) != 1 else ''} {shown}"


def found_phrase(pair):
    """What is the base's, for each ground; "" if nothing is."""
    phrases = []
    for ground in ("bits", "neurons", "coordinates"):
        rows = [row for row in pair.rows if row.ground == ground]
        layers = layers_phrase(row.layer for row in rows)
        origins = layers_phrase(row.base_layer for row in rows)
        if ground == "bits" and rows:
            phrases.append(f"matrices of {layers} begin bit for bit as those of the base's {origins}")
        elif ground == "neurons" and rows:
            least = pair.decisive_row
            weakly = f", weakly (r = {least.r:.2f})" if least.r < BASE_R else ""
            phrase = f"at least {least.found:,} of {least.units:,} neurons of {len(rows)} of the "
            phrase += f"{len(pair.matched)} layers read were matched{weakly}"
            phrases.append(phrase if layers == origins else f"{phrase}, in {origins} of the base")
        elif rows:
            phrases.append(f"{coordinates_phrase(pair.coordinates['body'])} in all matrices of {layers}")
    return "; ".join(phrases)


def neurons_phrase(pair, lack):
    """How many neurons were matched of a suspect that is not seen to be a child, and what that means."""
    if lack or not pair.matched:
        return lack or "neurons were not looked for"
    most = max(pair.matched, key=lambda row: row.share)
    phrase = f"at most {most.found:,} of {most.units:,} neurons of a layer were matched"
    if len(pair.matched) < len(pair.suspect.layers):
        phrase += f" ({len(pair.matched)} of {len(pair.suspect.layers)} layers were read)"
    if not most.is_beyond_chance:
        return f"{phrase}, as by chance"
    phrase += f" ({most.share:.0%} of layer {most.layer}, r = {most.r:.2f})"
    return phrase + ("" if pair.is_above_strangers else ", as of unrelated models that learnt the same words")


def changes(pair):
    """What was done to a suspect whose layers are the base's."""
    rows = pair.with_neurons
    if rows and pair.suspect.width != pair.base.width:
        yield f"its width is {pair.suspect.width:,}, not {pair.base.width:,}"
    if rows and "embedding" in pair.coordinates and not pair.agrees("embedding") and not pair.agrees("body"):
        yield "its residual basis was changed"
    if sum(row.in_place for row in rows) < sum(row.found for row in rows) / 2:
        yield "its neurons stand in another order"
    if pair.distance:
        yield f"its matrices are at distance {pair.distance:.2g}, by training, merging, noise or rounding"


def coordinates_phrase(body):
    """How far the coordinates of the layers' weights agree, by the test that says most."""
    if body is None:
        return "no layers' matrices of one name and shape"
    agree = "agree" if body["same"] else "do not agree"
    numbers = f"r = {body['matched']:.2g}, z = {body['z']:.1f}, log10 p = {body['log10_p']:.1f}"
    return f"coordinates of the layers' weights {agree} ({numbers})"


def table_phrase(pair):
    """Is the suspect's embedding matrix the base's, in whatever basis?"""
    likeness = pair.likeness
    if likeness is None and pair.agrees("embedding"):
        likeness = pair.coordinates["embedding"]["matched"]
    if likeness is not None and likeness > SAME_TABLE:
        return "the base's embedding matrix"
    if likeness is not None and (pair.agrees("embedding") or pair.with_neurons):
        return "the base's embedding matrix, changed"  # neurons are matched as the base's alone shows them
    if likeness is None or likeness > HALF or pair.equal or pair.alike:
        return "embedding matrices that were not seen to agree"
    return "a different embedding matrix"
