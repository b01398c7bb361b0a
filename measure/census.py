"""Whose hidden units are these? A census finds a model's units again in another, by weights alone (ours).

    >>> from lib import checkpoint
    >>> from measure.census import Units, unit_census
    >>> base = Units(checkpoint.parse_spec("tiny_llama@1000").open())
    >>> suspect = Units(checkpoint.parse_spec("runs/lineage/tiny_llama-1000").open())
    >>> ids = torch.arange(4096)
    >>> rows, layer_map = unit_census(base, suspect, (ids, ids))
    >>> rows[0]["found"], rows[0]["units"]
    (704, 704)
    >>> layer_map["share"][0][:2]
    [1.0, 0.0]

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

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from init import keyed_generator
from lib import parts
from lib.runtime import progress
from lib.settings import UserError

ROW_BATCH = 4096  # tokens whose embeddings are multiplied at once
FEW_UNITS = 128  # of each MLP of a base, that are looked for in each of a suspect, to find the closest
MOST_EXPERTS = 16  # of a layer, evenly spaced, that are read
STANDS_OUT = 0.1  # share of these from which on an MLP is the closest
AS_CLOSE = 0.9  # of the largest share: among such MLPs of a base the one in its place is the closest
FEWEST_UNITS = 8  # found, from which on a distance is worth a number
SMALLEST_EIGENVALUE = 1e-6  # of a token table's Gram matrix, in units of their mean: smaller ones are raised
RIDGE = 3.0  # of decorrelation: a third more units are found under noise of three std than with 0.03


# ---- what a unit reads and writes, by tokens ---------------------------------------------------------------


class Units:
    """The hidden units of a source's MLPs, as its tokens see them."""

    def __init__(self, source, name="the model"):
        self.source = source
        self.parts = parts.find(source)
        self.missing = f"no {self.parts.missing} found in {name}" if self.parts.missing else ""
        self.inputs_first = parts.stores_inputs_first(source)
        self.roots = {}  # by the table's name
        self.kept_views = {}  # by the MLP's number, for many suspects

    def root(self, table):
        """R (d, d) of the token table, or of the head: centred over tokens, it is Q R, as in a QR."""
        if table not in self.roots:
            self.roots[table] = root_of(self.source.read(table))
        return self.roots[table]

    @property
    def num_tokens(self):
        """The number of token ids that the model's tables have."""
        return min(self.source.shapes[name][0] for name in (self.parts.table, self.parts.head))

    @property
    def numbers(self):
        """The numbers of the layers that have MLPs, from 1."""
        return sorted({mlp.layer + 1 for mlp in self.parts.mlps})

    def chosen(self, layers):
        """The numbers of the MLPs in up to `layers` layers, evenly spaced; of many experts MOST_EXPERTS."""
        numbers = []
        for place in evenly_spaced(len(self.numbers), layers):
            there = [i for i, mlp in enumerate(self.parts.mlps) if mlp.layer + 1 == self.numbers[place]]
            numbers += [there[i] for i in evenly_spaced(len(there), MOST_EXPERTS)]
        return numbers

    def hidden_units(self, number, limit):
        """The numbers of up to `limit` hidden units of an MLP, evenly spaced."""
        name = self.parts.mlps[number].matrices["down"]
        *_, rows, columns = self.source.shapes[name]
        return evenly_spaced(rows * columns // self.source.width, limit)

    def kept(self, number, limit):
        """The views of an MLP, up to `limit` of its units, made once."""
        if number not in self.kept_views:
            self.kept_views[number] = self.views(number, limit)
        return self.kept_views[number]

    def views(self, number, limit=None):
        """The views of an MLP's units, by name: (d, m) float32, columns of norm 1, or 0 for a dead unit.

        Q of the view's table times a column is what the unit reads of, or writes to, each token, decorrelated
        from other units: what all share no longer drowns what is theirs. Up to `limit` units, evenly spaced.
        """
        mlp = self.parts.mlps[number]
        matrices = self.matrices(mlp)
        if len({len(rows) for rows in matrices.values()}) > 1:
            raise UserError(f"{mlp.label}: its matrices have different numbers of hidden units")
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

    def reads(self, number):
        """The rows (m, d) of an MLP's weights that its activation acts on: no sign can be flipped there."""
        matrices = self.matrices(self.parts.mlps[number])
        return matrices.get("gate", matrices["up"])

    def table_of(self, view):
        """The table that a view is seen through: the head for what is written, else the token table."""
        return self.parts.head if view == "down" else self.parts.table

    def matrices(self, mlp):
        """An MLP's matrices by view, (m, d) float32 each, with the gains of the norms around them."""
        rows = {}
        for role, name in mlp.matrices.items():
            weight = self.source.read(name)
            if mlp.expert is not None:
                weight = weight[mlp.expert]
            matrix = parts.residual_rows(weight, name, self.source.width, self.inputs_first).float()
            if role == "gate_up":
                rows["gate"], rows["up"] = matrix.chunk(2)
            else:
                rows[role] = matrix
        for view in rows:
            if view == "down":
                written = rows[view] * self.gain(mlp.norm_behind)
                rows[view] = self.through(self.parts.norm, written, writes=True)
            else:
                rows[view] = self.through(mlp.norm, rows[view])
        return rows

    def through(self, norm, rows, writes=False) -> Tensor:
        """Rows (m, d) as they act through a norm: times its gain, and without a mean if a norm takes it out.

        What is written meets the mean first, what reads meets the gain first.
        """
        if writes and self.takes_out_mean(norm):
            rows = rows - rows.mean(dim=1, keepdim=True)
        rows = rows * self.gain(norm)
        if not writes and self.takes_out_mean(norm):
            rows = rows - rows.mean(dim=1, keepdim=True)
        return rows

    def takes_out_mean(self, norm):
        """Is a norm a LayerNorm? Its bias tells, in most families."""
        if norm is None:
            return False
        has_bias = f"{norm.removesuffix('.weight')}.bias" in self.source.shapes
        return has_bias or self.source.family in parts.LAYERNORMS_WITHOUT_BIAS

    def gain(self, norm):
        """A norm's gain, (d,); 1 where there is no norm."""
        if norm is None:
            return 1.0
        gain = self.source.read(norm).float()
        return gain + 1 if self.source.family in parts.GAINS_FROM_ONE else gain


def evenly_spaced(count, limit):
    """Up to `limit` numbers of 0..count - 1, evenly spaced."""
    numbers = np.linspace(0, count - 1, min(count, limit)).round()
    return np.unique(numbers.astype(int)).tolist()


def some_units(views, limit):
    """Views (d, m) of up to `limit` units, evenly spaced."""
    return {view: columns[:, evenly_spaced(columns.shape[1], limit)] for view, columns in views.items()}


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


def bridges_between(base: Units, suspect: Units, tokens, order=None):
    """What leads from one model's views to another's: by view, correlations of their tables' Q, (d, e).

    `tokens` holds the ids of the tokens that both have, for each model (n,). `order` (n,), a permutation of
    them, breaks what ties the models and keeps what ties a model to itself: this pair's null.
    """
    ids_a, ids_b = tokens
    if order is not None:
        ids_b = ids_b[order]
    bridges = {}
    for view in ("up", "down"):
        table_a = base.table_of(view)
        table_b = suspect.table_of(view)
        products = cross_products(base.source.read(table_a), ids_a, suspect.source.read(table_b), ids_b)
        half = torch.linalg.solve_triangular(base.root(table_a).T, products.float(), upper=False)
        bridges[view] = torch.linalg.solve_triangular(suspect.root(table_b), half, upper=True, left=False)
    bridges["gate"] = bridges["up"]
    return bridges


def units_found(a, b, bridges):
    """How many of a base's units are found again in a suspect's MLP, of how many, and `expected` by chance.

    `a` and `b` are `Units.views`. Each view pairs units by one assignment; a unit is found if two views name
    the same partner. The count is that of the best two views. Dead units are left out. Returns the counts,
    and the places of the units found in `a` and in `b`.
    """
    partners = [partners_of(a[view], b[view], bridges[view]) for view in a.keys() & b.keys()]
    agreed = torch.zeros(0, dtype=torch.long)
    for x, y in itertools.combinations(partners, 2):
        places = ((x == y) & (x >= 0)).nonzero().flatten()
        if len(places) > len(agreed):
            agreed, partner = places, x[places]
    alive = [int(next(iter(views.values())).any(dim=0).sum()) for views in (a, b)]  # in all views alike
    fewer, more = sorted(alive)
    count = {"found": len(agreed), "units": fewer, "expected": fewer / max(1, more)}
    return count, (agreed, partner if len(agreed) else agreed)


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
        cosines.append((rows @ rows.T).fill_diagonal_(0).flatten())
    agreement = torch.cosine_similarity(*cosines, dim=0).clamp(0, 1).item()
    return 1 - agreement**0.5


def unit_census(base: Units, suspect: Units, tokens, limit=1024, layers=8, key=0):
    """How many units of a base are found again in each MLP of a suspect; and a map of their layers.

    Returns rows and a map. A row has `layer` and `number`, the suspect's, `base_layer` and `base_number`, the
    closest of the base, what `units_found` says of the two, their `distance`, and `by_chance`, the count
    where `key` permutes one model's tokens. The map has the `share` of units found for each MLP of the base
    (row) and of the suspect (column), by a few units. Up to `limit` units of an MLP are looked for, in up to
    `layers` layers; if the depths differ, in all of the base. `tokens` are as in `bridges_between`.
    """
    order = torch.from_numpy(keyed_generator("census", key).permutation(len(tokens[0])))
    bridges = bridges_between(base, suspect, tokens)
    null = bridges_between(base, suspect, tokens, order)
    has_same_depth = len(base.numbers) == len(suspect.numbers)
    ours = base.chosen(layers if has_same_depth else len(base.numbers))
    theirs = suspect.chosen(layers)
    rows = []
    shares = np.zeros((len(ours), len(theirs)))
    for column, number in enumerate(progress(theirs, desc="census", unit=" MLPs", leave=False)):
        views = suspect.views(number)
        for place, other in enumerate(ours):
            few = some_units(base.kept(other, limit), FEW_UNITS)
            count, _ = units_found(few, views, bridges)
            shares[place, column] = count["found"] / max(1, count["units"])
        closest = ours[closest_place(shares[:, column], column * len(ours) // len(theirs))]
        row = {"layer": suspect.parts.mlps[number].label, "number": suspect.parts.mlps[number].layer + 1}
        row |= {"base_layer": base.parts.mlps[closest].label}
        row |= {"base_number": base.parts.mlps[closest].layer + 1}
        count, pairs = units_found(base.kept(closest, limit), views, bridges)
        by_chance, _ = units_found(base.kept(closest, limit), views, null)
        row |= count | {"share": count["found"] / max(1, count["units"]), "by_chance": by_chance["found"]}
        chosen = torch.tensor(base.hidden_units(closest, limit))
        row["distance"] = distance(base.reads(closest)[chosen[pairs[0]]], suspect.reads(number)[pairs[1]])
        rows.append(row)
    layer_map = {"share": shares.tolist(), "base_layers": base.numbers, "suspect_layers": suspect.numbers}
    layer_map["base"] = [base.parts.mlps[number].label for number in ours]
    layer_map["suspect"] = [suspect.parts.mlps[number].label for number in theirs]
    return rows, layer_map


def closest_place(shares, own_place):
    """The place of the MLP with the largest share; of many that are close the one nearest to its own."""
    if shares.max() < STANDS_OUT:
        return own_place
    (close,) = np.nonzero(shares >= AS_CLOSE * shares.max())
    return int(min(close, key=lambda place: abs(place - own_place)))
