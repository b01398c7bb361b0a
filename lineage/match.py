"""Whose hidden units are these? Matches the units of two models, by weights alone (ours).

    >>> from lib import checkpoint
    >>> from lineage.match import equal_ids, match_models
    >>> from lineage.views import Units
    >>> base = Units(checkpoint.parse_spec("tiny_llama@1000").open())
    >>> suspect = Units(checkpoint.parse_spec("runs/lineage/tiny_llama-1000").open())
    >>> match = match_models(base, suspect, equal_ids(base, suspect)).matches[0]
    >>> match.found, match.units
    (704, 704)

How units are matched is in `measure/matching.py`, and what their views are in `lineage/views.py`. Models that
learnt to predict the same words come to share units near the head: `lineage/verdict.py` weighs that.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from init import keyed_generator
from lib.runtime import progress
from lib.settings import UserError
from lineage.parts import MLP
from lineage.views import MOST_TOKENS, SMALLEST_EIGENVALUE, Units, cross_products, evenly_spaced, living_units
from measure.matching import matched_units, mutual_neighbours

MAP_UNITS = 256  # of each MLP of a base that the layer map counts, at most
LARGEST_MAP = 2048  # units in all, of deep models, of whose MLPs it counts fewer, but TRIAL_UNITS at least
TRIAL_LAYERS, TRIAL_UNITS = 3, 64  # of a suspect and a base, by which ways to read them are tried
CERTAIN = 0.95  # share times strength in each of them, from which on no other way is tried
SETTLED = 0.5  # share of units matched in some layer, from which on it is no chance
CLEARLY_MORE = 2  # times what the likeliest way finds must be found by another one to be taken
AS_CLOSE = 0.9  # of the largest share: of a base's layers with as much, the one at its depth is closest
FEWEST_UNITS = 8  # matched, from which on a distance is worth a number
TOO_ALIKE = 0.5  # from here on unrelated tables of so few tokens are too alike to tell


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


@dataclass
class Match:
    """An MLP of a suspect, the closest of the base, and how many units of one are matched in the other."""

    mlp: MLP
    base_mlp: MLP
    found: int
    units: int  # that could be: those read that live, in the MLP with fewer
    r: float  # the median strength of those matched
    by_chance: int  # matched where one model's tokens are permuted: this pair's own null
    in_place: int  # of those matched: they stand where they stood
    distance: float | None

    @property
    def share(self):
        return self.found / max(1, self.units)


@dataclass
class ModelMatch:
    """A Match for each MLP of the suspect that was read, and a map of all pairs of layers."""

    matches: list
    layer_map: dict  # `share`, by MLPs of the `base` (rows) and of the `suspect` (columns)
    depth: int  # layers of the suspect that have MLPs, read or not
    has_same_depth: bool
    num_tokens: int  # that the models share
    widths: tuple  # of base and suspect
    table_likeness: float | None  # of embedding matrices, in any basis: 1, or about 0; None of few tokens


def equal_ids(base: Units, suspect: Units):
    """The ids (n,) of the tokens that two models share, in each of them, if one number is one token."""
    ids = torch.arange(min(base.num_tokens, suspect.num_tokens))
    return ids, ids


def ids_by_string(base: Units, suspect: Units, vocabularies):
    """The same if one string is one token, by each model's {string: id}; None where that tells no more."""
    ours, theirs = vocabularies
    shared = [token for token in ours if token in theirs and ours[token] < base.num_tokens]
    shared = [token for token in shared if theirs[token] < suspect.num_tokens]
    ids = [torch.tensor([vocabulary[token] for token in shared]) for vocabulary in vocabularies]
    return None if not shared or torch.equal(*ids) else ids


def best_match(bases, suspects, vocabularies, units, layers, key):
    """The `match_models` of two models in the way to read them that finds most in a few layers.

    `bases` and `suspects` are Units by every LayoutHypothesis. Tokens are equal by number, or by string, if
    `vocabularies` tell; and a suspect's gate may be called up. UserError if no way can be compared.
    """
    ways = []
    refusal = None
    for base, suspect in itertools.product(bases, suspects):
        have_heads = base.part.has_head and suspect.part.has_head
        if have_heads and any(units.layout.head == units.layout.table for units in (base, suspect)):
            continue  # a table is tried as its model's head where one of them has none
        if any(score >= CERTAIN * TRIAL_LAYERS for score, *_ in ways):
            break
        pairings = [equal_ids(base, suspect), ids_by_string(base, suspect, vocabularies)]
        for tokens in filter(None, pairings):
            try:
                ways += score_ways(*seen_alike(base, suspect, tokens), units)
            except UserError as error:  # a decoy's numbers, perhaps
                refusal = error
    if not ways:
        raise refusal
    score, *way = max(ways, key=lambda way: way[0])
    if score < SETTLED and score < CLEARLY_MORE * ways[0][0]:  # chance may have found it
        _, *way = ways[0]
    return match_models(*way, units, layers, key)


def seen_alike(base, suspect, tokens):
    """Two models, wide ones seen in the same few directions of the base's Q; their `tokens`; their basis."""
    basis = basis_correlations(base, suspect, tokens)
    base = base.seen_in_few
    for view, directions in base.directions.items():
        basis[view] = directions @ basis[view]
    suspect = suspect.seen_in(basis)
    for view, directions in suspect.directions.items():
        basis[view] = basis[view] @ directions.T
    return base, suspect, tokens, basis


def score_ways(base, suspect, tokens, basis, units):
    """Yield (score, base, suspect, tokens, basis, exchanged): shares times strengths, over a few layers."""
    is_gated = all(len(mlp.views) == 3 for mlp in base.mlps + suspect.mlps)
    for exchanged in (False, True) if is_gated else (False,):
        numbers = layers_to_read(base, suspect, TRIAL_LAYERS)
        columns = map_columns(base, suspect, basis, *numbers, units, TRIAL_UNITS, exchanged)
        score = sum((share * r).max().item() for _, _, share, r in columns)
        yield score, base, suspect, tokens, basis, exchanged


def match_models(
    base: Units, suspect: Units, tokens, basis=None, exchanged=False, units=1024, layers=None, key=0
):
    """Which units of each MLP of a suspect are matched in the closest of a base, and the map: a ModelMatch.

    `tokens` are the ids (n,) of the tokens that both have, for each, `basis` their `basis_correlations`. Up
    to `units` units of an MLP are looked for, in up to `layers` layers (None: all). `key` permutes one
    model's tokens, which breaks what ties the two alone. If `exchanged`, the suspect's gates are called up.
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
    few = min(MAP_UNITS, max(TRIAL_UNITS, LARGEST_MAP // len(ours)))
    columns = map_columns(base, suspect, basis, ours, theirs, units, few, exchanged)
    matches, shares = [], []
    for number, views, share, _ in columns:
        own_place = len(shares) * len(ours) // len(theirs)
        (close,) = np.nonzero(share.numpy() >= AS_CLOSE * share.max().item())
        closest = ours[close[abs(close - own_place).argmin()]]  # of those, the nearest to its own place
        matches.append(match_mlps(base, closest, suspect, number, views, basis, null, units, exchanged))
        shares.append(share.tolist())
    layer_map = {"base": [base.mlps[number].label for number in ours]}
    layer_map["suspect"] = [suspect.mlps[number].label for number in theirs]
    layer_map["share"] = np.transpose(shares).tolist()
    widths = (base.width, suspect.width)
    alike = basis["up"].square().sum().item() * (base.width / len(basis["up"])) / min(widths)
    by_chance = max(widths) / len(ids_a)  # the mean of random tables: they share dimensions
    return ModelMatch(
        matches=matches,
        layer_map=layer_map,
        depth=len(suspect.layers),
        has_same_depth=len(base.layers) == len(suspect.layers),
        num_tokens=len(ids_a),
        widths=widths,
        table_likeness=(alike - by_chance) / (1 - by_chance) if by_chance <= TOO_ALIKE else None,
    )


def layers_to_read(base: Units, suspect: Units, limit):
    """The numbers of the MLPs of each model that are compared: of a base of another depth all."""
    has_same_depth = len(base.layers) == len(suspect.layers)
    return base.numbers(limit if has_same_depth else None), suspect.numbers(limit)


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
        a, b = base.tables.read(names[0]), suspect.tables.read(names[1])
        to_a = whitener(a, ids_a, base.tables.root(names[0]))
        to_b = whitener(b, ids_b, suspect.tables.root(names[1]))
        basis[view] = to_a @ cross_products(a, ids_a, b, ids_b).float() @ to_b.T
    basis["gate"] = basis["up"]
    return basis


def whitener(table, ids, root):
    """W (d, d) that whitens a table: R^(-T), from all rows; where `ids` are some, corrected for these."""
    inverse = torch.linalg.solve_triangular(root.T, torch.eye(len(root)), upper=False)
    if len(ids) >= min(len(table), MOST_TOKENS):
        return inverse
    gram = inverse @ cross_products(table, ids, table, ids).float() @ inverse.T
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=SMALLEST_EIGENVALUE * values.mean().item())
    return (vectors * values.rsqrt()) @ vectors.T @ inverse


def map_columns(base: Units, suspect: Units, basis, ours, theirs, units, few, exchanged):
    """Yield for each of the suspect's MLPs in `theirs` its number, views, and its column of the layer map.

    What share of `few` units of each of the base's MLPs in `ours` is matched in it, of those that could be,
    and their median strength: (MLPs,) each. The gate is compared where up and down do not settle it.
    """
    sizes = []  # how many units of each of the base's MLPs are shown,
    sampled = []  # how many of them live,
    living = []  # and how many live in all
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
        if exchanged:
            views = {"gate": views["up"], "up": views["gate"], "down": views["down"]}
        living_theirs = living_units(views)
        shares = torch.zeros(len(ours))
        strengths = torch.zeros(len(ours))
        neighbours = [[] for _ in ours]
        for view in [view for view in rows if view in views]:
            if shares.max() > SETTLED:
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


def correlations_of(base_views, views, basis):
    """|Correlations| of a base's units with a suspect's in the views that both have: (n, m) by view."""
    common = [view for view in base_views if view in views]
    return {view: (base_views[view].T @ basis[view] @ views[view]).abs_() for view in common}


def match_mlps(base, base_number, suspect, number, views, basis, null, units, exchanged):
    """The Match of an MLP of the suspect, of these `views`, with one of the base.

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
    found = correlations_of(base_views, views, basis)
    places, partners, strengths = matched_units([mutual_neighbours(sizes) for sizes in found.values()])
    found = correlations_of(base_views, views, null)
    by_chance, _, _ = matched_units([mutual_neighbours(sizes) for sizes in found.values()])
    base_units = torch.tensor(chosen)[places]
    suspect_units = torch.tensor(chosen_theirs)[partners]
    # The gate, if both have one: signs of up can be flipped.
    view = base_mlp.views[0] if base_mlp.views == mlp.views else "up"
    theirs = suspect.rows(number, "up" if exchanged else view)[suspect_units]
    far = None  # which gains would tell
    if base_mlp.knows_norm and mlp.knows_norm:
        far = distance(base.rows(base_number, view)[base_units], theirs)
    return Match(
        mlp=mlp,
        base_mlp=base_mlp,
        found=len(places),
        units=min(living_units(base_views), living_units(views)),
        r=strengths.median().item() if len(places) else 0.0,
        by_chance=len(by_chance),
        in_place=int((base_units == suspect_units).sum()),
        distance=far,
    )
