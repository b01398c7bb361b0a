"""Whose hidden units are these? A census finds a model's units again in another, by weights alone (ours).

    >>> from lib import checkpoint
    >>> from measure.census import Units, equal_ids, unit_census
    >>> base = Units(checkpoint.parse_spec("tiny_llama@1000").open())
    >>> suspect = Units(checkpoint.parse_spec("runs/lineage/tiny_llama-1000").open())
    >>> census = unit_census(base, suspect, equal_ids(base, suspect))
    >>> census.matches[0].found, census.matches[0].units
    (704, 704)

A thief can rotate the residual basis, reorder the hidden units of every MLP, flip their signs and rescale
them without changing what the model computes. What no such change alters is what a unit reads of the token
table and writes to the head: its gate, its up and its down weights each give a number for every token. These
are its three views. For each view, one assignment pairs the units of two models by the size of their
correlations.

If the models are strangers, what one view says of a unit's partner has nothing to do with what another says.
Then the number of units on which two views agree is the number of fixed points of a random permutation,
Poisson(1). If the models are kin, it is nearly all of them. MLPs without a gate have two views.

The closest relative is phi_MATCH (Zhu et al. 2025, arXiv 2502.12292), which pairs gated units by activations
on texts; MDIR (arXiv 2508.06309) and AWM (2510.06738) estimate the rotation first. The census cannot see a
unit that was split into several, nor new MLPs on copied attention.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from init import keyed_generator
from lib import parts
from lib.runtime import progress
from lib.settings import UserError

ROW_BATCH = 4096  # tokens, or units, whose products are made at once
FEW_UNITS = 128  # of each MLP of a base, that are looked for in each of a suspect, to find the closest
MOST_EXPERTS = 16  # of a layer, evenly spaced, that are read
STANDS_OUT = 0.25  # share of these from which on an MLP is the closest; unrelated ones share up to 0.16
AS_CLOSE = 0.9  # of the largest share: among such MLPs of a base the one in its place is the closest
FEWEST_UNITS = 8  # found, from which on a distance is worth a number
NEGATIVE_GAINS = 0.01  # share of a model's gains; more are a sign that they are stored less one
SMALLEST_EIGENVALUE = 1e-6  # of a token table's Gram matrix, in units of their mean: smaller ones are raised
RIDGE = 3.0  # of decorrelation: a third more units are found under noise of three std than with 0.03


# ---- what a unit reads and writes, by tokens ---------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What a checkpoint's names leave open: where there is a choice, all are tried."""

    table: str
    head: str
    interleaved: bool  # gate and up in one matrix: row by row, or one above the other
    from_one: bool  # gains are stored less one


def readings(source):
    """Every Reading of a source, the likeliest first; [] without a token table or MLPs."""
    found = parts.find(source)
    if found.missing:
        return []
    from_one = [bool(set(source.family.split()) & set(parts.GAINS_FROM_ONE))]
    norms = sorted({mlp.norm for mlp in found.mlps if mlp.norm})
    gains = torch.cat([torch.ones(1), *(source.read(norm).float() for norm in norms)])
    if (gains <= 0).float().mean() > NEGATIVE_GAINS:  # the family's name may be wrong
        from_one = [True, False]
    interleaved = [False]
    if any("gate_up" in mlp.matrices for mlp in found.mlps):
        interleaved = [False, True]
    choices = itertools.product(found.tables, found.heads, interleaved, from_one)
    return [Reading(*choice) for choice in choices]


class Units:
    """The hidden units of a source's MLPs, as its tokens see them."""

    def __init__(self, source, reading=None):
        self.source = source
        self.parts = parts.find(source)
        self.width = self.parts.width
        self.reading = reading or readings(source)[0]
        self.inputs_first = parts.stores_inputs_first(source)
        self.layers = sorted({mlp.layer for mlp in self.parts.mlps})  # that have MLPs, from 0
        self.roots = {}  # by the table's name
        self.kept = {}  # views of a base, for many suspects, by the MLP's number

    def root(self, table):
        """R (d, d) of the token table, or of the head: centred over tokens, it is Q R, as in a QR."""
        if table not in self.roots:
            self.roots[table] = root_of(self.source.read(table))
        return self.roots[table]

    def table_of(self, view):
        """The table that a view is seen through: the head for what is written, else the token table."""
        return self.reading.head if view == "down" else self.reading.table

    def chosen(self, limit):
        """The numbers of the MLPs in up to `limit` layers, evenly spaced; of many experts MOST_EXPERTS."""
        numbers = []
        for place in evenly_spaced(len(self.layers), limit):
            there = [i for i, mlp in enumerate(self.parts.mlps) if mlp.layer == self.layers[place]]
            numbers += [there[i] for i in evenly_spaced(len(there), MOST_EXPERTS)]
        return numbers

    def views(self, number, limit=None):
        """The views of an MLP's units, by name: (d, m) float32, columns of norm 1, or 0 for a dead unit.

        Q of the view's table times a column is what the unit reads of, or writes to, each token, decorrelated
        from other units: what all share no longer drowns what is theirs. Up to `limit` units, evenly spaced.
        """
        mlp = self.parts.mlps[number]
        matrices = {view: self.rows(number, view) for view in mlp.views}
        alive = torch.stack([rows.any(dim=1) for rows in matrices.values()]).all(dim=0)
        chosen = evenly_spaced(len(alive), limit or len(alive))
        values = {}
        for view, rows in matrices.items():
            columns = self.root(self.table_of(view)) @ rows.T
            if not columns.isfinite().all():
                raise UserError(f"{mlp.label}: its weights are not finite, or huge: check them for NaN")
            columns = columns / columns.norm(dim=0).clamp(min=1e-30) * alive
            values[view] = decorrelated(columns, chosen)
        return values

    def rows(self, number, view):
        """An MLP's units by what a view has of them, (m, d) float32, with the gains of the norms around."""
        mlp = self.parts.mlps[number]
        name = mlp.matrices.get(view, mlp.matrices.get("gate_up"))
        weight = self.source.read(name)
        if mlp.expert is not None:
            weight = weight[mlp.expert]
        rows = parts.residual_rows(weight, name, self.width, self.inputs_first).float()
        if view not in mlp.matrices:
            halves = (rows[0::2], rows[1::2]) if self.reading.interleaved else rows.chunk(2)
            rows = halves[view == "up"]
        if view == "down":  # what is written meets the mean first, what reads meets the gain first
            rows = self.without_mean(self.parts.norm, rows * self.gain(mlp.norm_behind))
            return rows * self.gain(self.parts.norm)
        return self.without_mean(mlp.norm, rows * self.gain(mlp.norm))

    def without_mean(self, norm, rows):
        """Rows (m, d) without what a LayerNorm takes out of them; its bias tells it, in most families."""
        has_bias = norm is not None and f"{norm.removesuffix('.weight')}.bias" in self.source.shapes
        if norm and (has_bias or self.source.family in parts.LAYERNORMS_WITHOUT_BIAS):
            return rows - rows.mean(dim=1, keepdim=True)
        return rows

    def gain(self, norm):
        """A norm's gain, (d,); 1 where there is no norm."""
        return self.source.read(norm).float() + self.reading.from_one if norm else 1.0


def evenly_spaced(count, limit):
    """Up to `limit` numbers of 0..count - 1, evenly spaced."""
    numbers = np.linspace(0, count - 1, min(count, limit)).round()
    return np.unique(numbers.astype(int)).tolist()


def decorrelated(columns: Tensor, chosen):
    """(X X' + ridge)^(-1/2) X of X (d, m), whose columns have norm 1, scaled to it again: `chosen` columns.

    The symmetric root commutes with rotations. The ridge is about the mean eigenvalue of X X', m / d.
    """
    gram = columns @ columns.T
    values, vectors = torch.linalg.eigh(gram)
    root = (vectors * (values.clamp(min=0) + RIDGE).rsqrt()) @ vectors.T
    white = root @ columns[:, chosen]
    return white / white.norm(dim=0).clamp(min=1e-30)


def root_of(table: Tensor) -> Tensor:
    """R (d, d), upper triangular, of a token table (V, d): the root of its Gram matrix by Cholesky."""
    ids = torch.arange(len(table))
    gram = cross_products(table, ids, table, ids)
    mean = gram.diagonal().mean()
    if not mean.isfinite():
        raise UserError("a token table is not finite: check it for NaN")
    if mean < 1e-30:
        raise UserError("nothing varies in a token table: there is nothing to compare")
    gram.diagonal().add_(SMALLEST_EIGENVALUE * mean)
    return torch.linalg.cholesky(gram).T.float()


def cross_products(a: Tensor, ids_a, b: Tensor, ids_b) -> Tensor:
    """A'B of some rows of token tables, by their ids (n,), centred over these: (d, e) float64."""
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    mean = torch.zeros(a.shape[1])
    for part in ids_a.split(ROW_BATCH):
        mean += a[part].float().sum(dim=0) / len(ids_a)
    for part_a, part_b in zip(ids_a.split(ROW_BATCH), ids_b.split(ROW_BATCH)):
        total += (a[part_a].float() - mean).T @ b[part_b].float()  # centring one of the two is enough
    return total


# ---- two models --------------------------------------------------------------------------------------------


@dataclass
class Match:
    """An MLP of a suspect, the closest of the base, and how many of its units are found again in it."""

    layer: str
    number: int  # of the suspect's layer, from 1
    base_layer: str
    base_number: int
    found: int
    units: int  # that live, in the model with fewer
    expected: float  # found in strangers
    by_chance: int  # found where one model's tokens are permuted: this pair's own null
    in_place: int  # of the units found: those that stand where they stood
    distance: float | None

    @property
    def share(self):
        """The share of units found."""
        return self.found / max(1, self.units)


@dataclass
class Census:
    """What `unit_census` finds: a Match for each MLP of the suspect that was read, and a map of layers."""

    matches: list
    layer_map: dict
    has_same_depth: bool
    num_tokens: int  # that the models share
    widths: tuple  # of base and suspect
    tables: float  # how alike the token tables are in any basis: 1, or about 0 of strangers


def equal_ids(base: Units, suspect: Units):
    """The ids (n,) of the tokens that two models share, in each of them, if one number is one token."""
    tables = [
        units.source.shapes[units.table_of(view)] for units in (base, suspect) for view in ("up", "down")
    ]
    ids = torch.arange(min(shape[0] for shape in tables))
    return ids, ids


def best_census(bases, suspects, vocabularies, limit, layers, key):
    """The `unit_census` that finds most, of all readings of two models and ways to tell equal tokens.

    `vocabularies` have the numbers of each model's tokens by their strings, if known. A Match's `by_chance`
    is the largest of all.
    """
    results = []
    for base, suspect in itertools.product(bases, suspects):
        pairings = [equal_ids(base, suspect)]
        ours, theirs = vocabularies
        count = len(pairings[0][0])
        shared = [token for token in ours if max(ours[token], theirs.get(token, count)) < count]
        numbers = [torch.tensor([vocabulary[token] for token in shared]) for vocabulary in vocabularies]
        if shared and not torch.equal(*numbers):
            pairings.append(numbers)
        try:
            results += [unit_census(base, suspect, tokens, limit, layers, key) for tokens in pairings]
        except UserError as error:  # a decoy's numbers, perhaps
            refusal = error
    if not results:
        raise refusal
    best = max(results, key=lambda census: sum(match.share for match in census.matches))
    for place, match in enumerate(best.matches):
        match.by_chance = max(census.matches[place].by_chance for census in results)
    return best


def unit_census(base: Units, suspect: Units, tokens, limit=1024, layers=8, key=0):
    """How many units of a base are found again in each MLP of a suspect; and a map of their layers.

    `tokens` are the ids (n,) of the tokens that both have, for each. Up to `limit` units of an MLP are looked
    for, in up to `layers` layers; if the depths differ, in all of the base. The map has the `share` of a few
    units whose largest correlations agree in two views, for each MLP of the base (row) and of the suspect
    (column). `key` permutes one model's tokens, which breaks what ties the two and nothing within each.
    """
    ids_a, ids_b = tokens
    order = torch.from_numpy(keyed_generator("census", key).permutation(len(ids_b)))
    bridges = bridges_between(base, suspect, tokens)
    null = bridges_between(base, suspect, (ids_a, ids_b[order]))
    has_same_depth = len(base.layers) == len(suspect.layers)
    ours = base.chosen(layers if has_same_depth else len(base.layers))
    theirs = suspect.chosen(layers)
    for number in ours:
        if number not in base.kept:
            base.kept[number] = base.views(number, limit)
    few = few_units([base.kept[number] for number in ours], bridges)
    alive = few["up"].any(dim=2)
    matches = []
    shares = np.zeros((len(ours), len(theirs)))
    for column, number in enumerate(progress(theirs, desc="census", unit=" MLPs", leave=False)):
        views = suspect.views(number)
        nearest = {view: nearest_units(few[view], views[view]) for view in ("up", "down")}
        share = share_agreed(nearest["up"], nearest["down"], alive)
        exchanged = False
        if share.max() < STANDS_OUT and "gate" in views:  # the head may be another, or gate and up each other
            by_inputs = share_agreed(nearest_units(few["gate"], views["gate"]), nearest["up"], alive)
            crossed = share_agreed(nearest_units(few["up"], views["gate"]), nearest["down"], alive)
            exchanged = bool(crossed.max() >= STANDS_OUT)
            if exchanged or by_inputs.max() >= STANDS_OUT:
                share = crossed if exchanged else by_inputs
        if exchanged:
            views["gate"], views["up"] = views["up"], views["gate"]
        shares[:, column] = share
        closest = ours[closest_place(share.numpy(), column * len(ours) // len(theirs))]
        kept = base.kept[closest]
        mlp, base_mlp = suspect.parts.mlps[number], base.parts.mlps[closest]
        places, partners = units_found(kept, views, bridges)
        units, more = sorted(int(each["up"].any(dim=0).sum()) for each in (kept, views))
        num_units = parts.units_of(base.source.shapes[base_mlp.matrices["down"]], base.width)
        places_in_base = torch.tensor(evenly_spaced(num_units, limit))[places]
        view = base_mlp.views[0] if base_mlp.views == mlp.views else "up"  # no sign can be flipped in a gate
        rows = suspect.rows(number, "up" if exchanged else view)
        match = Match(
            layer=mlp.label,
            number=mlp.layer + 1,
            base_layer=base_mlp.label,
            base_number=base_mlp.layer + 1,
            found=len(places),
            units=units,
            expected=units / max(1, more),
            by_chance=len(units_found(kept, views, null)[0]),
            in_place=int((places_in_base == partners).sum()),
            distance=distance(base.rows(closest, view)[places_in_base], rows[partners]),
        )
        matches.append(match)
    layer_map = {"share": shares.tolist(), "base": [base.parts.mlps[number].label for number in ours]}
    layer_map["suspect"] = [suspect.parts.mlps[number].label for number in theirs]
    widths = (base.width, suspect.width)
    alike = bridges["up"].square().sum().item() / min(widths)
    by_chance = min(0.999, max(widths) / len(ids_a))  # the mean of random tables: they share dimensions
    tables = (alike - by_chance) / (1 - by_chance)
    return Census(matches, layer_map, has_same_depth, len(ids_a), widths, tables)


def bridges_between(base: Units, suspect: Units, tokens):
    """What leads from one model's views to another's: by view, correlations of their tables' Q, (d, e)."""
    ids_a, ids_b = tokens
    bridges = {}
    for view in ("up", "down"):
        table_a = base.table_of(view)
        table_b = suspect.table_of(view)
        products = cross_products(base.source.read(table_a), ids_a, suspect.source.read(table_b), ids_b)
        half = torch.linalg.solve_triangular(base.root(table_a).T, products.float(), upper=False)
        bridges[view] = torch.linalg.solve_triangular(suspect.root(table_b), half, upper=True, left=False)
    bridges["gate"] = bridges["up"]
    return bridges


def few_units(mlps, bridges):
    """A few units of each of a base's MLPs by view, as a suspect sees them: (MLPs, few, e), some 0."""
    few = {}
    for view in ("gate", "up", "down"):
        few[view] = torch.zeros(len(mlps), FEW_UNITS, bridges[view].shape[1])
        for block, views in zip(few[view], mlps):
            if view not in views:
                continue
            columns = views[view][:, evenly_spaced(views[view].shape[1], FEW_UNITS)]
            block[: columns.shape[1]] = columns.T @ bridges[view]
    return few


def nearest_units(blocks, columns):
    """The places (MLPs, few) of a suspect's units, (e, m), that correlate most with a base's few."""
    parts_of_rows = blocks.flatten(0, 1).split(ROW_BATCH)
    places = torch.cat([(rows @ columns).abs_().argmax(dim=1) for rows in parts_of_rows])
    return places.view(blocks.shape[:2])


def share_agreed(places, others, alive):
    """The share (MLPs,) of the few units alive that have one nearest unit in two views."""
    agreed = (places == others) & alive
    return agreed.sum(dim=1) / alive.sum(dim=1).clamp(min=1)


def units_found(a, b, bridges):
    """Which units of a base are found again in a suspect's MLP: their places in `a`, and in `b`, as tensors.

    `a` and `b` are `Units.views`. Each view pairs units by one assignment; a unit is found if two views name
    the same partner. Those of the best two views count. Dead units are left out.
    """
    partners = [partners_of(a[view], b[view], bridges[view]) for view in a if view in b]
    best = places = torch.zeros(0, dtype=torch.long)
    for x, y in itertools.combinations(partners, 2):
        agreed = ((x == y) & (x >= 0)).nonzero().flatten()
        if len(agreed) > len(places):
            places, best = agreed, x[agreed]
    return places, best


def partners_of(columns_a, columns_b, bridge):
    """The place of the partner of each of A's units in one view, -1 for none: (m,) integers."""
    alive_a, alive_b = (columns.any(dim=0).nonzero().flatten() for columns in (columns_a, columns_b))
    correlations = columns_a[:, alive_a].T @ bridge @ columns_b[:, alive_b]  # (units of a, units of b)
    rows, columns = linear_sum_assignment(correlations.abs().numpy(), maximize=True)
    partner = torch.full((columns_a.shape[1],), -1)
    partner[alive_a[rows]] = alive_b[columns]
    return partner


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
    return 1 - agreement**0.5


def closest_place(shares, own_place):
    """The place of the MLP with the largest share; of many that are close the one nearest to its own."""
    if shares.max() < STANDS_OUT:
        return own_place
    (close,) = np.nonzero(shares >= AS_CLOSE * shares.max())
    return int(min(close, key=lambda place: abs(place - own_place)))
