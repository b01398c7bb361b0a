"""Whose neurons are these? Matches the neurons of two models, by weights alone (ours).

How neurons are matched is in `lineage/matching.py`, and what their views are in `lineage/views.py`. Models
that learnt to predict the same words come to share neurons near the head: `lineage/judge.py` weighs that.
"""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from lib.random import keyed_generator
from lib.runtime import progress
from lib.settings import UserError
from lineage.judge import FEWEST_TOKENS, HALF, Row, distinct, mark_neurons
from lineage.layout import BATCH
from lineage.matching import matched_units, mutual_neighbours
from lineage.views import Neurons, evenly_spaced, living, readings, token_rows

TOKENS, LEAST = 16, 2**14  # for each dimension, or in all, by which two models are compared
SMALLEST_EIGENVALUE = 1e-6  # of a table's Gram matrix, in units of their mean: smaller ones are raised
MAP_UNITS = 64  # of each layer of a base that the layer map counts
TRIED = 3  # layers, at most, where ways to read two models are tried
CERTAIN = 0.95  # of the most that a way can find: from here on no other one is tried
AS_CLOSE = 0.9  # of the largest share: of a base's layers with as much, the one at its depth is closest
EXCHANGED = {"gate": "up", "up": "gate"}


@dataclass
class Way:
    """A way to read two stacks that are compared, by tokens that both have."""

    base: Neurons
    suspect: Neurons
    basis: Tensor  # what leads from the base's views to the suspect's, (k, k)
    num_tokens: int  # that they share
    likeness: float | None  # of the tables in any basis: 1 of a copy, 0 of random ones
    how: tuple  # the arguments of `way_by`
    names: dict = field(default_factory=dict)  # the base's, of the suspect's views that are called otherwise

    def views(self, layer):
        """The views of a layer of the suspect, by the base's names."""
        return {self.names.get(name, name): view for name, view in self.suspect.views(layer).items()}


def way_by(stacks, read, tokens, directions):
    """The Way of two stacks by a Reading of each, and by the ids (n,) of shared tokens in each of them.

    Views of models wider than `directions` are seen in so many: random ones of the base's Q, and those of the
    suspect's Q that they lead to.
    """
    width = max(stack.width for stack in stacks)
    chosen = evenly_spaced(len(tokens[0]), max(LEAST, TOKENS * width))
    seen = [token_rows(s, r.table, ids[chosen]) for s, r, ids in zip(stacks, read, tokens)]
    roots = [root_of(rows) for rows in seen]
    basis = torch.linalg.solve_triangular(roots[0].T, products(*seen), upper=False)  # Q'Q, (d, e)
    basis = torch.linalg.solve_triangular(roots[1], basis, upper=True, left=False).float()
    likeness, (narrow, wide) = None, sorted(basis.shape)
    if len(chosen) >= FEWEST_TOKENS * wide:
        by_chance = wide / len(chosen)  # the mean of random tables: they share dimensions
        likeness = (basis.square().sum().item() / narrow - by_chance) / (1 - by_chance)
    first, second = (root.float() for root in roots)
    if len(first) > directions:
        numbers = keyed_generator("directions", len(first)).standard_normal((len(first), directions), "f4")
        shown = torch.linalg.qr(torch.from_numpy(numbers)).Q.T
        first, basis = shown @ first, shown @ basis
    if len(second) > directions:
        shown = torch.linalg.qr(basis.T).Q.T
        second, basis = shown @ second, basis @ shown.T
    neurons = [Neurons(*each) for each in zip(stacks, read, (first, second))]
    return Way(*neurons, basis, len(tokens[0]), likeness, (stacks, read, tokens))


def products(a: Tensor, b: Tensor) -> Tensor:
    """A'B of two tables of equal rows, (n, d) and (n, e), in float64."""
    return sum((rows_a.T @ rows_b).double() for rows_a, rows_b in zip(a.split(BATCH), b.split(BATCH)))


def root_of(rows: Tensor) -> Tensor:
    """R (d, d) float64, upper triangular, of the QR decomposition of a table's centred rows (n, d)."""
    gram = products(rows, rows)
    gram.diagonal().add_(SMALLEST_EIGENVALUE * gram.diagonal().mean())
    root, failure = torch.linalg.cholesky_ex(gram)
    if failure:
        raise UserError("an embedding matrix is not finite, or varies in too few directions")
    return root.T


def shared_tokens(counts, vocabularies):
    """Yield the ids (n,) of the tokens that two tables of so many rows share: by string, and by number."""
    ours, theirs = ({t: n for t, n in v.items() if n < count} for v, count in zip(vocabularies, counts))
    shared = [token for token in ours if token in theirs]
    ids = [torch.tensor([numbers[token] for token in shared]) for numbers in (ours, theirs)]
    if shared and not torch.equal(*ids):
        yield ids
    yield [torch.arange(min(counts))] * 2


def tables_to_read(base, suspect):
    """The tables of two stacks; where one has a lone one, which may be a head, their heads, too."""
    is_open = base.has_lone_table or suspect.has_lone_table
    return [[*dict.fromkeys(stack.tables + stack.heads * is_open)] for stack in (base, suspect)]


def likeliest_way(base, suspect, vocabularies, directions):
    """The Way to read two stacks that finds most in a few layers; the first that finds nearly all is taken.

    Tokens are shared by string or by number, whichever makes the tables more alike. A way that chance may
    have found is not taken: then the first is. If none can be compared it is None; and a UserError says why.
    """
    best, most, lack = None, HALF, ""
    ours, theirs = layers_to_read(base, suspect, TRIED)
    for read in itertools.product(*map(readings, (base, suspect), tables_to_read(base, suspect))):
        try:
            counts = [s.source.shapes[r.table][0] for s, r in zip((base, suspect), read)]
            shared = shared_tokens(counts, vocabularies)
            ways = [way_by((base, suspect), read, tokens, directions) for tokens in shared]
            likeliest = max(ways, key=lambda way: way.likeness or 0.0)
            for way in (likeliest, replace(likeliest, names=EXCHANGED)):
                columns = map_columns(way, ours, theirs)
                score = sum((shares * strengths).max().item() for _, shares, strengths in columns)
                best = best or way
                if score > most:
                    best, most = way, score
                if score >= CERTAIN * len(theirs):
                    return best, ""
        except UserError as error:  # a decoy's numbers, perhaps
            lack = str(error)
    return best, "" if best else lack


def layers_to_read(base, suspect, limit):
    """The layers of two stacks that are compared, up to `limit`; of a base of another depth all."""
    ours, theirs = ([n for n, mlps in enumerate(s.mlps, start=1) if mlps] for s in (base, suspect))
    places = evenly_spaced(len(ours), limit if len(ours) == len(theirs) else None)
    return [ours[place] for place in places], [theirs[place] for place in evenly_spaced(len(theirs), limit)]


def match_layers(way: Way, limit, units):
    """Rows of the suspect's layers, up to `limit` (None: all), with the base's closest; and the layer map."""
    ours, theirs = layers_to_read(way.base.stack, way.suspect.stack, limit)
    rows, shares = [], []
    for layer, column, _ in map_columns(way, ours, theirs):
        own_place = len(shares) * len(ours) // len(theirs)
        (close,) = np.nonzero(column.numpy() >= AS_CLOSE * column.max().item())
        closest = ours[close[abs(close - own_place).argmin()]]  # of those, the nearest to its own place
        rows.append(match_layer(way, closest, layer, units))
        shares.append(column.tolist())
    mark_neurons(rows)
    found = [(row.layer, row.closest) for row in rows if row.has_neurons_of_base]
    if distinct(found) == 1 and limit is not None:  # is it the only one?
        return match_layers(way, None, units)
    labels = [[f"layer {layer}" for layer in layers] for layers in (ours, theirs)]
    return rows, {"base": labels[0], "suspect": labels[1], "share": np.transpose(shares).tolist()}


def match_again(way: Way, rows, directions, units):
    """The Rows, of which those that are doubtful are seen in more directions."""
    if any(row.is_doubtful for row in rows):
        way = replace(way_by(*way.how, directions), names=way.names)
        rows = [match_layer(way, r.closest, r.layer, units) if r.is_doubtful else r for r in rows]
        mark_neurons(rows)
    return rows


def map_columns(way: Way, ours, theirs):
    """Yield for each of the suspect's layers in `theirs` its number, and its column of the layer map.

    What share of a few units of each of the base's layers in `ours` is matched in it, of those that could be,
    and their median strength: (layers,) each. The gate is compared where up and down do not settle it.
    """
    samples = []
    for layer in progress(ours, desc="the base's layers", leave=False):
        views = way.base.views(layer)
        samples.append({view: v[:, evenly_spaced(v.shape[1], MAP_UNITS)] for view, v in views.items()})
    for layer in progress(theirs, desc="the suspect's layers", leave=False):
        views = way.views(layer)
        shares, strengths = torch.zeros(2, len(ours))
        neighbours = [[] for _ in ours]
        for view in ("up", "down", "gate"):
            if shares.max() > HALF or view not in views:
                continue
            seen = way.basis @ views[view]  # (k, m)
            for place, sample in enumerate(samples):
                if view in sample:
                    neighbours[place].append(mutual_neighbours((sample[view].T @ seen).abs_()))
                    places, _, matched = matched_units(neighbours[place])
                    if len(places):
                        share_alive = min(1, living(views) / living(way.base.views(ours[place])))
                        could_match = living(sample) * share_alive
                        shares[place] = min(1, len(places) / could_match)
                        strengths[place] = matched.median()
        yield layer, shares, strengths


def match_layer(way: Way, base_layer, layer, units):
    """The Row of a layer of the suspect with one of the base: of the smaller one up to so many units.

    The null: how many neurons still match after the rows of one model's basis are permuted, so that nothing
    ties the two any more.
    """
    both = [way.base.views(base_layer), way.views(layer)]
    common = [view for view in both[0] if view in both[1]]
    both = [{view: views[view] for view in common} for views in both]
    counts = [next(iter(views.values())).shape[1] if views else 0 for views in both]
    smaller = int(living(both[0]) > living(both[1]))  # all of its units can be matched
    chosen = [evenly_spaced(n, units if place == smaller else None) for place, n in enumerate(counts)]
    ours, theirs = ({view: v[:, ids] for view, v in views.items()} for views, ids in zip(both, chosen))
    order = torch.from_numpy(keyed_generator("null of units").permutation(len(way.basis)))
    matched = []  # as they are, and by chance
    for basis in (way.basis, way.basis[order]):
        pairs = [mutual_neighbours((ours[view].T @ basis @ theirs[view]).abs_()) for view in common]
        matched.append(matched_units(pairs))
    (places, partners, strengths), (by_chance, _, _) = matched
    in_place = torch.tensor(chosen[0])[places] == torch.tensor(chosen[1])[partners]
    found = {"found": len(places), "units": min(living(ours), living(theirs)), "by_chance": len(by_chance)}
    found |= {"r": strengths.median().item() if len(places) else 0.0, "in_place": int(in_place.sum())}
    middle = way.base.stack.is_middle(base_layer) + way.suspect.stack.is_middle(layer)
    return Row(layer, closest=base_layer, num_middle=middle, **found)
