"""Whose neurons are these? Matches the units of two models, by weights alone (ours).

How units are matched is in `lineage/matching.py`, and what their views are in `lineage/views.py`. Models that
learnt to predict the same words come to share units near the head: `lineage/table.py` weighs that.
"""

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lib.random import keyed_generator
from lib.runtime import progress
from lib.settings import UserError
from lineage.layout import TRIED
from lineage.matching import matched_units, mutual_neighbours
from lineage.table import BASE_R, DEEP, FEWEST_TOKENS, FEWEST_UNITS, HALF, Match, Row, distinct, mark_units
from lineage.views import MOST_TOKENS, Units, cross_products, evenly_spaced, in_turns, living_units, whitener

MAP_UNITS = 256  # of each MLP of a base that the layer map counts, at most: of DEEP layers; of more fewer,
TRIAL_UNITS = 64  # but so many at least; and by so many ways to read two models are tried
CERTAIN = 0.95  # of the most that a way can find: from here on no other one is tried
LARGE = 2**15  # width times MLPs, from which on DEEP layers are read, unless more are asked for
AS_CLOSE = 0.9  # of the largest share: of a base's layers with as much, the one at its depth is closest
EXCHANGED = {"gate": "up", "up": "gate", "down": "down"}


@dataclass
class Way:
    """A way to read two stacks that are compared."""

    base: Units
    suspect: Units
    tokens: tuple  # the ids (n,) of the tokens that both have, in each of them
    basis: dict  # what leads from the base's views to the suspect's, by view
    tried: dict = field(default_factory=dict)  # views of the suspect's MLPs that were tried, by number
    is_exchanged: bool = False  # the suspect's gates are called up

    def role(self, view):
        """What the suspect calls the weights of a view."""
        return EXCHANGED[view] if self.is_exchanged else view

    def views(self, number):
        """The views of an MLP of the suspect."""
        views = self.tried.get(number) or self.suspect.views(number)
        return {self.role(view): columns for view, columns in views.items()}


def equal_ids(base: Units, suspect: Units):
    """The ids (n,) of the tokens that two models share, in each of them, if one number is one token."""
    ids = torch.arange(min(base.num_tokens, suspect.num_tokens))
    return ids, ids


def ids_by_string(base: Units, suspect: Units, vocabularies):
    """The same if one string is one token, by each model's {string: id}; None where that tells no more."""
    ours, theirs = vocabularies
    known = [token for token, number in ours.items() if number < base.num_tokens]
    shared = [token for token in known if theirs.get(token, suspect.num_tokens) < suspect.num_tokens]
    ids = [torch.tensor([vocabulary[token] for token in shared]) for vocabulary in vocabularies]
    return None if not shared or torch.equal(*ids) else ids


def seen_alike(base, suspect, tokens):
    """Two models, wide ones seen in the same few directions of the base's Q; and their basis."""
    basis = basis_correlations(base, suspect, tokens)
    base = base.seen_in_few
    for view, directions in base.directions.items():
        basis[view] = directions @ basis[view]
    suspect = suspect.seen_in(basis)
    for view, directions in suspect.directions.items():
        basis[view] = basis[view] @ directions.T
    return base, suspect, basis


def basis_correlations(base: Units, suspect: Units, tokens):
    """What leads from one model's views to another's: by view, correlations of their tables' Q, (d, e)."""
    chosen = evenly_spaced(len(tokens[0]), MOST_TOKENS)
    ids_a, ids_b = (ids[chosen] for ids in tokens)
    basis = {}
    for view in ("up", "down"):
        names = (base.tables_of[view], suspect.tables_of[view])
        if view == "down" and names == (base.tables_of["up"], suspect.tables_of["up"]):
            basis[view] = basis["up"]  # both heads are tied
            continue
        (a, root_a), (b, root_b) = base.table(view), suspect.table(view)
        to_a, to_b = whitener(a, ids_a, root_a), whitener(b, ids_b, root_b)
        basis[view] = to_a @ cross_products(a, ids_a, b, ids_b).float() @ to_b.T
    basis["gate"] = basis["up"]
    return basis


def layers_to_read(base: Units, suspect: Units, limit, layers=None):
    """The numbers of the MLPs of each model that are compared: of a base of another depth all.

    Of the suspect those of some `layers` are, or of all, and of the base then those at the same places.
    """
    at_same_places = layers is None and len(base.layers) == len(suspect.layers)
    return base.numbers(limit if at_same_places else None), suspect.numbers(limit, layers)


def most_layers(base: Units, suspect: Units, settings):
    """In how many layers, at most, are neurons looked for? None: in all."""
    is_large = any(units.width * len(units.mlps) > LARGE for units in (base, suspect))
    return DEEP if is_large and settings.layers is None else settings.layers


def expect_units(base: Units, suspect: Units, settings, layers):
    """Fetch what shows the neurons of two models, where it is on the Hub: tables and MLPs."""
    numbers = layers_to_read(base, suspect, most_layers(base, suspect, settings), layers)
    for units, places in zip((base, suspect), numbers):
        names = {name for place in places for name in units.mlps[place].matrices.values()}
        names.update(itertools.chain(*units.stack.tables, *units.stack.heads))
        units.stack.source.expect((name, ()) for name in names)


def pairings(bases, suspects, vocabularies):
    """Yield the Units of a base and of a suspect, and the tokens that both have, by string or by number."""
    for base, suspect in itertools.product(bases, suspects):
        have_heads = base.stack.has_head and suspect.stack.has_head
        if have_heads and any(units.reading.head == units.reading.table for units in (base, suspect)):
            continue  # a table is tried as its model's head where one of them has none
        for tokens in (ids_by_string(base, suspect, vocabularies), equal_ids(base, suspect)):
            if tokens:
                yield base, suspect, tokens


def ways_to_read(base: Units, suspect: Units, tokens):
    """Yield the Ways to compare two models by these tokens: a suspect's gate may be called up."""
    base, suspect, basis = seen_alike(base, suspect, tokens)
    _, tried = layers_to_read(base, suspect, TRIED)
    way = Way(base, suspect, tokens, basis, {number: suspect.views(number) for number in tried})
    base_turns, turns = likeliest_turns(way)
    if (base_turns, turns) != (1, 1):
        base, suspect = in_turns(base, base_turns), in_turns(suspect, turns)
        way = Way(base, suspect, tokens, basis, {number: suspect.views(number) for number in tried})
    yield way
    if all(len(mlp.views) == 3 for mlp in base.mlps + suspect.mlps):
        yield replace(way, is_exchanged=True)


def likeliest_turns(way: Way):
    """In how many turns gate and up lie in one matrix of the base's MLPs, and of the suspect's; 1 if apart.

    Whosever they are, rows have partners in the other model, and so have units, by their down weights. Those
    turns are taken by which most rows have theirs in the partner of the unit that they are of.
    """
    votes = Counter()
    ours, theirs = layers_to_read(way.base, way.suspect, TRIED)
    if any("gate_up" in mlp.matrices for mlp in way.base.mlps + way.suspect.mlps):
        for base_number in ours:
            base_views = way.base.views(base_number)
            for number in theirs:
                views = way.views(number)
                if len(base_views) == len(views) == 3:
                    mlps = (way.base.mlps[base_number], way.suspect.mlps[number])
                    votes.update(votes_for_turns(way.basis, mlps, base_views, views))
    return max(votes, key=votes.get, default=(1, 1))


def votes_for_turns(basis, mlps, base_views, views):
    """Of how many rows of an MLP of a base does the partner belong to their unit's? By pair of turns."""
    counts = [each["down"].shape[1] for each in (base_views, views)]
    rows, their_rows = (torch.cat([each["gate"], each["up"]], dim=1) for each in (base_views, views))
    shown = torch.tensor(evenly_spaced(2 * counts[0], MAP_UNITS))
    partners = (rows[:, shown].T @ basis["up"] @ their_rows).abs_().argmax(dim=1)
    divisors = [[1], [1]]
    for mlp, count, turns in zip(mlps, counts, divisors):
        turns += [n for n in range(2, count + 1) if count % n == 0 and "gate_up" in mlp.matrices]
    votes = {}
    for base_turns in divisors[0]:
        down = base_views["down"][:, unit_of(shown, base_turns, counts[0])]
        owners = (down.T @ basis["down"] @ views["down"]).abs_().argmax(dim=1)
        for turns in divisors[1]:
            votes[base_turns, turns] = int((unit_of(partners, turns, counts[1]) == owners).sum())
    return votes


def unit_of(rows, turns, count):
    """The units, of so many, that rows of gate and up in one matrix are of."""
    size = count // turns
    return rows // (2 * size) * size + rows % size


def likeliest_way(bases, suspects, vocabularies, units):
    """The Way to read two models that finds most in a few layers; the first that finds nearly all is taken.

    `bases` and `suspects` are Units by each Reading. A way that chance may have found is not taken: then the
    likeliest is. If no way can be compared it is None; and the last UserError says why, else "".
    """
    first, best, most, lack = None, None, 0.0, ""
    for pairing in pairings(bases, suspects, vocabularies):
        try:
            for way in ways_to_read(*pairing):
                columns = map_columns(way, *layers_to_read(way.base, way.suspect, TRIED), units, TRIAL_UNITS)
                score = sum((shares * strengths).max().item() for _, _, shares, strengths in columns)
                first = first or way
                if score > max(most, HALF):
                    best, most = way, score
                if score >= CERTAIN * len(way.tried):
                    return best, lack
        except UserError as error:  # a decoy's numbers, perhaps
            lack = str(error)
    return best or first, lack


def match_stacks(way: Way, settings, layers=None):
    """Which units of each MLP of a suspect are matched in the closest of a base? The Match of two stacks.

    Those of the suspect's `layers` are looked for (None: of all), up to `settings.units_per_layer` of an MLP,
    in up to `settings.layers` layers (None: all, or DEEP of large models). If one of these alone is the
    base's, all layers are read.
    """
    limit = most_layers(way.base, way.suspect, settings)
    null = null_of(way, settings.permutation_seed)
    rows, layer_map = match_layers(way, null, limit, layers, settings.units_per_layer)
    found = [(row.layer, row.closest) for row in rows if row.has_units_of_base]
    if distinct(found) == 1 and limit is not None:  # is it the only one?
        rows, layer_map = match_layers(way, null, None, layers, settings.units_per_layer)
    return Match(rows, layer_map, len(way.tokens[0]), table_likeness(way))


def null_of(way: Way, key):
    """The basis of a Way with one model's tokens permuted by `key`, which breaks what ties the two alone."""
    generator = keyed_generator("null of units", key)
    if way.base.directions or way.suspect.directions:  # whose order ties the two alone, as well
        order = torch.from_numpy(generator.permutation(len(way.basis["up"])))
        return {view: leading[order] for view, leading in way.basis.items()}
    ids_a, ids_b = way.tokens
    order = torch.from_numpy(generator.permutation(len(ids_b)))
    return basis_correlations(way.base, way.suspect, (ids_a, ids_b[order]))


def table_likeness(way: Way):
    """How alike two embedding matrices are in any basis: 1, or about 0 of random ones; None of few tokens."""
    narrow, wide = sorted((way.base.width, way.suspect.width))
    num_tokens = len(way.tokens[0])
    if num_tokens < FEWEST_TOKENS * wide:
        return None
    basis = way.basis["up"]
    alike = basis.square().sum().item() * (way.base.width / len(basis)) / narrow
    by_chance = wide / num_tokens  # the mean of random tables: they share dimensions
    return (alike - by_chance) / (1 - by_chance)


def match_layers(way: Way, null, limit, layers, units):
    """The Rows of the suspect's MLPs in up to `limit` of some `layers` (None: all), and the layer map."""
    ours, theirs = layers_to_read(way.base, way.suspect, limit, layers)
    if not theirs:
        return [], {}
    few = min(MAP_UNITS, max(TRIAL_UNITS, DEEP * MAP_UNITS // len(ours)))
    rows, shares = [], []
    for number, views, column, _ in map_columns(way, ours, theirs, units, few):
        own_place = len(shares) * len(ours) // len(theirs)
        (close,) = np.nonzero(column.numpy() >= AS_CLOSE * column.max().item())
        closest = ours[close[abs(close - own_place).argmin()]]  # of those, the nearest to its own place
        rows.append(match_mlps(way, closest, number, views, null, units))
        shares.append(column.tolist())
    mark_units(rows)
    return rows, {
        "base": [way.base.mlps[number].label for number in ours],
        "suspect": [way.suspect.mlps[number].label for number in theirs],
        "share": np.transpose(shares).tolist(),
    }


def map_columns(way: Way, ours, theirs, units, few):
    """Yield for each of the suspect's MLPs in `theirs` its number, views, and its column of the layer map.

    What share of `few` units of each of the base's MLPs in `ours` is matched in it, of those that could be,
    and their median strength: (MLPs,) each. The gate is compared where up and down do not settle it.
    """
    sizes, sampled, living = [], [], []  # of each MLP of the base: units shown; of them, and in all, living
    rows = defaultdict(list)
    for number in progress(ours, desc="units of the base's layers", leave=False):
        chosen, views, living_in_all = way.base.sample(number, units)
        shown = evenly_spaced(len(chosen), few)
        views = {view: columns[:, shown] for view, columns in views.items()}
        for view, columns in views.items():
            rows[view].append(columns.T)
        sizes.append(len(shown))
        sampled.append(living_units(views))
        living.append(living_in_all)
    whole = [view for view in ("up", "down", "gate") if len(rows[view]) == len(ours)]
    rows = {view: torch.cat(rows[view]) @ way.basis[view] for view in whole}  # (units, e) each
    for number in progress(theirs, desc="units of the suspect's layers", leave=False):
        views = way.views(number)
        living_theirs = living_units(views)
        shares = torch.zeros(len(ours))
        strengths = torch.zeros(len(ours))
        neighbours = [[] for _ in ours]
        for view in rows:
            if shares.max() > HALF or view not in views:
                break
            correlations = (rows[view] @ views[view]).abs_()  # (units, m)
            for place, block in enumerate(correlations.split(sizes)):
                neighbours[place].append(mutual_neighbours(block))
                places, _, matched = matched_units(neighbours[place])
                could_match = sampled[place] * min(1, living_theirs / max(1, living[place]))
                if len(places):
                    shares[place] = min(1, len(places) / could_match)
                    strengths[place] = matched.median()
        yield number, views, shares, strengths


def match_mlps(way: Way, base_number, number, views, null, units):
    """The Row of an MLP of the suspect, of these `views`, with one of the base."""
    base_mlp, mlp = way.base.mlps[base_number], way.suspect.mlps[number]
    chosen, base_views, base_living = way.base.sample(base_number, units)
    chosen_theirs = list(range(views["up"].shape[1]))
    if base_living > living_units(views):  # units of the smaller MLP are sampled: all can be matched
        base_views = way.base.views(base_number)
        chosen = list(range(base_views["up"].shape[1]))
        chosen_theirs = evenly_spaced(len(chosen_theirs), units)
        views = {view: columns[:, chosen_theirs] for view, columns in views.items()}
    matched = []  # as they are, and by chance
    for basis in (way.basis, null):
        neighbours = []
        for view in [view for view in base_views if view in views]:
            correlations = base_views[view].T @ basis[view] @ views[view]  # (n, m)
            neighbours.append(mutual_neighbours(correlations.abs_()))
        matched.append(matched_units(neighbours))
    (places, partners, strengths), (by_chance, _, _) = matched
    r = strengths.median().item() if len(places) else 0.0
    base_units = torch.tensor(chosen)[places]
    suspect_units = torch.tensor(chosen_theirs)[partners]
    far = None  # which gains would tell
    if base_mlp.knows_norm and mlp.knows_norm:
        # The gate, if both have one: signs of up can be flipped. If units that match well are far, it is up.
        for view in ("gate", "up"):
            if view in base_views and view in views and (far is None or far > r >= BASE_R):
                ours = way.base.rows(base_number, view)[base_units]
                theirs = way.suspect.rows(number, way.role(view))[suspect_units]
                far = distance(ours, theirs)
    return Row(
        layer=mlp.layer,
        label=mlp.label,
        closest=base_mlp.layer,
        base_label=base_mlp.label,
        num_middle=way.base.stack.is_middle(base_mlp.layer) + way.suspect.stack.is_middle(mlp.layer),
        found=len(places),
        units=min(living_units(base_views), living_units(views)),
        r=r,
        by_chance=len(by_chance),
        in_place=int((base_units == suspect_units).sum()),
        distance=far,
    )


def distance(rows_a, rows_b):
    """How far apart are matched neurons' weights, (n, d) and (n, e) each? From 0, equal, to 1, unrelated.

    One minus the correlation of their numbers, in whatever basis: the cosines between units of one model are
    compared with those of the other, and these agree as much as the correlation's square. None for few units.
    """
    if len(rows_a) < FEWEST_UNITS:
        return None
    cosines = []
    for rows in (rows_a, rows_b):
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
        cosines.append((rows @ rows.T).fill_diagonal_(0).flatten().double())
    agreement = torch.cosine_similarity(*cosines, dim=0).clamp(0, 1).item()
    return round(1 - agreement**0.5, 9)  # what is smaller is rounding's
