"""Whose hidden units are these? Matches the units of two models, by weights alone (ours).

How units are matched is in `measure/matching.py`, and what their views are in `lineage/views.py`. Models that
learnt to predict the same words come to share units near the head: `lineage/table.py` weighs that.
"""

import itertools
from collections import defaultdict

import numpy as np
import torch

from lib.random import keyed_generator
from lib.runtime import progress
from lib.settings import UserError
from lineage.layout import TRIED
from lineage.table import BASE_R, DEEP, FEWEST_TOKENS, FEWEST_UNITS, HALF, Pair, Row, distinct, mark_units
from lineage.views import Units, basis_correlations, evenly_spaced, layers_to_read, living_units, seen_alike
from measure.matching import matched_units, mutual_neighbours

MAP_UNITS = 256  # of each MLP of a base that the layer map counts, at most: of DEEP layers; of more fewer,
TRIAL_UNITS = 64  # but so many at least; and by so many ways to read two models are tried
LARGE = 2**15  # width times MLPs, from which on DEEP layers are read, unless more are asked for
AS_CLOSE = 0.9  # of the largest share: of a base's layers with as much, the one at its depth is closest


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


def match_stacks(bases, suspects, vocabularies, units, layers, key):
    """The `match_models` of two stacks in the way to read them that finds most in a few layers.

    `bases` and `suspects` are Units by each Reading. Tokens are equal by string, if `vocabularies` tell, or
    by number. A way that chance may have found is not taken: then the likeliest is. UserErrors of ways are
    the Pair's `lack`, if no way can be compared; without units it is empty.
    """
    ways = []
    pair = Pair()
    for base, suspect in itertools.product(bases, suspects):
        have_heads = base.stack.has_head and suspect.stack.has_head
        if have_heads and any(units.reading.head == units.reading.table for units in (base, suspect)):
            continue  # a table is tried as its model's head where one of them has none
        for tokens in (ids_by_string(base, suspect, vocabularies), equal_ids(base, suspect)):
            try:
                ways += score_ways(*seen_alike(base, suspect, tokens), units) if tokens else []
            except UserError as error:  # a decoy's numbers, perhaps
                pair.lack = str(error)
    if not ways:
        return pair
    score, way = max(ways, key=lambda scored: scored[0])
    if score < HALF:
        _, way = ways[0]
    base, suspect, *_ = way
    for tried in [*bases, *suspects]:
        tried.views.cache_clear()
    if layers is None and any(each.width * len(each.mlps) > LARGE for each in (base, suspect)):
        layers = DEEP
    pair = match_models(*way, units, layers, key)
    found = [(row.layer, row.closest) for row in pair.with_units]
    is_partly_read = len({row.layer for row in pair.rows}) < len(suspect.stack.layers)
    if distinct(found) == 1 and is_partly_read:  # is it the only one?
        pair = match_models(*way, units, None, key)
    return pair


def score_ways(base, suspect, tokens, basis, units):
    """Yield (shares times strengths, over a few layers; the way): a suspect's gate may be called up."""
    is_gated = all(len(mlp.views) == 3 for mlp in base.mlps + suspect.mlps)
    ours, theirs = layers_to_read(base, suspect, TRIED)
    for each in [suspect, suspect.with_gate_as_up()] if is_gated else [suspect]:
        columns = map_columns(base, each, basis, ours, theirs, units, TRIAL_UNITS)
        score = sum((shares * strengths).max().item() for _, _, shares, strengths in columns)
        yield score, (base, each, tokens, basis)


def match_models(base: Units, suspect: Units, tokens, basis=None, units=1024, layers=None, key=0):
    """Which units of each MLP of a suspect are matched in the closest of a base: a Pair's rows, and its map.

    `tokens` are the ids (n,) of the tokens that both have, for each, `basis` their `basis_correlations`. Up
    to `units` units of an MLP are looked for, in up to `layers` layers (None: all). `key` permutes one
    model's tokens, which breaks what ties the two alone.
    """
    ids_a, ids_b = tokens
    basis = basis or basis_correlations(base, suspect, tokens)
    generator = keyed_generator("null of units", key)
    if base.directions or suspect.directions:  # whose order ties the two alone, as well
        order = torch.from_numpy(generator.permutation(len(basis["up"])))
        null = {view: leading[order] for view, leading in basis.items()}
    else:
        order = torch.from_numpy(generator.permutation(len(ids_b)))
        null = basis_correlations(base, suspect, (ids_a, ids_b[order]))
    ours, theirs = layers_to_read(base, suspect, layers)
    few = min(MAP_UNITS, max(TRIAL_UNITS, DEEP * MAP_UNITS // len(ours)))
    rows, shares = [], []
    for number, views, column, _ in map_columns(base, suspect, basis, ours, theirs, units, few):
        own_place = len(shares) * len(ours) // len(theirs)
        (close,) = np.nonzero(column.numpy() >= AS_CLOSE * column.max().item())
        closest = ours[close[abs(close - own_place).argmin()]]  # of those, the nearest to its own place
        rows.append(match_mlps(base, closest, suspect, number, views, basis, null, units))
        shares.append(column.tolist())
    mark_units(rows)
    layer_map = {
        "base": [base.mlps[number].label for number in ours],
        "suspect": [suspect.mlps[number].label for number in theirs],
        "share": np.transpose(shares).tolist(),
    }
    pair = Pair(rows, layer_map, num_tokens=len(ids_a))
    narrow, wide = sorted((base.width, suspect.width))
    if len(ids_a) >= FEWEST_TOKENS * wide:
        alike = basis["up"].square().sum().item() * (base.width / len(basis["up"])) / narrow
        by_chance = wide / len(ids_a)  # the mean of random tables: they share dimensions
        pair.table_likeness = (alike - by_chance) / (1 - by_chance)
    return pair


def map_columns(base: Units, suspect: Units, basis, ours, theirs, units, few):
    """Yield for each of the suspect's MLPs in `theirs` its number, views, and its column of the layer map.

    What share of `few` units of each of the base's MLPs in `ours` is matched in it, of those that could be,
    and their median strength: (MLPs,) each. The gate is compared where up and down do not settle it.
    """
    sizes, sampled, living = [], [], []  # of each MLP of the base: units shown; of them, and in all, living
    rows = defaultdict(list)
    for number in progress(ours, desc="units of the base's layers", leave=False):
        chosen, views, living_in_all = base.sample(number, units)
        shown = evenly_spaced(len(chosen), few)
        views = {view: columns[:, shown] for view, columns in views.items()}
        for view, columns in views.items():
            rows[view].append(columns.T)
        sizes.append(len(shown))
        sampled.append(living_units(views))
        living.append(living_in_all)
    whole = [view for view in ("up", "down", "gate") if len(rows[view]) == len(ours)]
    rows = {view: torch.cat(rows[view]) @ basis[view] for view in whole}  # (units, e) each
    for number in progress(theirs, desc="units of the suspect's layers", leave=False):
        views = suspect.views(number)
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


def match_mlps(base, base_number, suspect, number, views, basis, null, units):
    """The Row of an MLP of the suspect, of these `views`, with one of the base.

    The units of the smaller MLP are sampled, so that all of them can be matched.
    """
    base_mlp, mlp = base.mlps[base_number], suspect.mlps[number]
    chosen, base_views, base_living = base.sample(base_number, units)
    chosen_theirs = list(range(views["up"].shape[1]))
    if base_living > living_units(views):
        base_views = base.views(base_number)
        chosen = list(range(base_views["up"].shape[1]))
        chosen_theirs = evenly_spaced(len(chosen_theirs), units)
        views = {view: columns[:, chosen_theirs] for view, columns in views.items()}
    places, partners, strengths = matched_in(base_views, views, basis)
    by_chance, _, _ = matched_in(base_views, views, null)
    r = strengths.median().item() if len(places) else 0.0
    base_units = torch.tensor(chosen)[places]
    suspect_units = torch.tensor(chosen_theirs)[partners]
    far = None  # which gains would tell
    if base_mlp.knows_norm and mlp.knows_norm:
        # The gate, if both have one: signs of up can be flipped. If units that match well are far, it is up.
        for view in ("gate", "up"):
            if view in base_views and view in views and (far is None or far > r >= BASE_R):
                ours = base.rows(base_number, view)[base_units]
                theirs = suspect.rows(number, view)[suspect_units]
                far = distance(ours, theirs)
    return Row(
        layer=mlp.layer,
        label=mlp.label,
        closest=base_mlp.layer,
        base_label=base_mlp.label,
        num_middle=base.stack.is_middle(base_mlp.layer) + suspect.stack.is_middle(mlp.layer),
        found=len(places),
        units=min(living_units(base_views), living_units(views)),
        r=r,
        by_chance=len(by_chance),
        in_place=int((base_units == suspect_units).sum()),
        distance=far,
    )


def matched_in(base_views, views, basis):
    """The `matched_units` of some units of a base and of a suspect, by the views that both have."""
    neighbours = []
    for view in base_views:
        if view in views:
            correlations = base_views[view].T @ basis[view] @ views[view]  # (n, m)
            neighbours.append(mutual_neighbours(correlations.abs_()))
    return matched_units(neighbours)


def distance(rows_a, rows_b):
    """How far apart are matched units' weights, (n, d) and (n, e) each? From 0, equal, to 1, unrelated.

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
