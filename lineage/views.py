"""What does a neuron read and write, as the tokens see it? (ours)

A unit's gate, up and down weights each give a number for every token: what it reads of the embedding matrix,
and what it writes to the head. These are its three *views*; MLPs without a gate have two. A centred table of
V tokens is Q R, so that d numbers, R times a unit's weights, say all but Q, which all units share.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lib.random import keyed_generator
from lib.runtime import progress
from lib.settings import UserError
from lineage.layout import BATCH, WRITES, units_of

MOST_TOKENS = 2**16  # evenly spaced, that two models' tables are compared by
LONGEST_ROW = 10.0  # of a table, in units of the median: one token must not drown all others
MOST_EXPERTS = 16  # of a layer, evenly spaced, that are read
WIDE, DIRECTIONS = 1536, 1024  # units of models wider than that are seen in so many random directions
SMALLEST_EIGENVALUE = 1e-6  # of an embedding's Gram matrix, in units of their mean: smaller ones are raised
RIDGE = 3.0  # of decorrelation: half more units are found under noise of three std than with 0.03
NEGATIVE_GAINS = 0.01  # share of a model's gains: language models have 0.002 at most, less one they have 0.15
# Families that store gain - 1; in a .gguf file they do not
GAINS_FROM_ONE = set("gemma gemma2 gemma3 gemma3_text paligemma qwen3_next nemotron".split())


@dataclass(frozen=True)
class Reading:
    """How a stack is read, where its names leave a choice: all choices are tried (`lineage/match.py`)."""

    table: tuple  # the embedding matrix: its name, or the names of two whose product it is
    head: tuple
    from_one: bool  # gains are stored less one
    backward: bool  # of two matrices of an MLP without names the other one writes
    turned: bool  # square matrices of MLPs are stored the other way
    turns: int = 1  # in which gate and up lie in one matrix; 1: one above the other


def readings(stack):
    """Every Reading of a stack, the likeliest first; [] without an embedding matrix or MLPs."""
    if stack.missing:
        return []
    from_one = [bool(GAINS_FROM_ONE & set(stack.source.family.split()))]
    norms = {mlp.norm for mlp in stack.mlps if mlp.norm}
    gains = [stack.source.read(norm).float() for norm in norms]
    if gains and (torch.cat(gains) <= 0).float().mean() > NEGATIVE_GAINS:  # the family's name may be wrong
        from_one.append(not from_one[0])
    is_guess = any(len(mlp.views) == 2 and not mlp.is_named for mlp in stack.mlps)
    shapes = [stack.source.shapes[name] for mlp in stack.mlps for name in mlp.matrices.values()]
    is_square = any(shape[-1] == shape[-2] for shape in shapes)
    backward, turned = ((False, True)[: 1 + open] for open in (is_guess, is_square))
    heads = dict.fromkeys(stack.heads + stack.tables)
    choices = itertools.product(stack.tables, heads, from_one, backward, turned)
    return [Reading(*choice) for choice in choices]


def hidden_units(stack):
    """The Units of a stack by each Reading of it."""
    tables = {}
    return [Units(stack, reading, tables) for reading in readings(stack)]


class Units:
    """The neurons of a stack's MLPs, as its tokens see them, by one Reading."""

    def __init__(self, stack, reading=None, tables=None, directions=None):
        self.stack = stack
        self.reading = reading or readings(stack)[0]
        self.directions = directions or {}  # by view, (k, d): those of Q that are seen; {}: all
        self.width = stack.width
        self.mlps = stack.mlps
        table, head = self.reading.table, self.reading.head
        self.tables_of = {"gate": table, "up": table, "down": head}  # what each view is seen through
        self.num_tokens = min(stack.source.shapes[names[0]][0] for names in (table, head))
        self.layers = sorted({mlp.layer for mlp in self.mlps})  # that have MLPs
        self.tables = {} if tables is None else tables  # what `table` has read, for all readings of the stack
        self.samples = {}  # of a base, for many suspects

    def seen_in(self, rows):
        """The same units in the directions of Q that rows (k, d) by view span; no wide ones: in all."""
        if self.width <= WIDE:
            return self
        directions = {view: torch.linalg.qr(spanning.T).Q.T for view, spanning in rows.items()}
        return Units(self.stack, self.reading, self.tables, directions)

    @functools.cached_property
    def seen_in_few(self):
        """The same units in DIRECTIONS random directions."""
        numbers = keyed_generator("directions", self.width).standard_normal((DIRECTIONS, self.width), "f4")
        return self.seen_in(dict.fromkeys(self.tables_of, torch.from_numpy(numbers)))

    def table(self, view):
        """The table (V, d) that a view is seen through, clipped, and R (d, d) of its QR decomposition."""
        names = self.tables_of[view]
        if names not in self.tables:
            table, *projections = [self.stack.source.read(name) for name in names]
            for projection in projections:  # (d, e) or (e, d)
                turned = projection if projection.shape[0] == table.shape[1] else projection.T
                table = table.float() @ turned.float()
            table = clipped(table)
            self.tables[names] = (table, root_of(table))
        return self.tables[names]

    @functools.cached_property
    def roots(self):
        """What leads from rows to each view: R (d, d) of its table, or its `directions`, (k, d)."""
        roots = {view: self.table(view)[1] for view in self.tables_of}
        return {view: self.directions[view] @ roots[view] for view in self.directions} or roots

    def numbers(self, limit=None, layers=None):
        """The numbers of the MLPs in up to `limit` of some `layers`, evenly spaced; of few experts each."""
        numbers = []
        layers = [layer for layer in self.layers if layers is None or layer in layers]
        for place in evenly_spaced(len(layers), limit):
            there = [i for i, mlp in enumerate(self.mlps) if mlp.layer == layers[place]]
            numbers += [there[i] for i in evenly_spaced(len(there), MOST_EXPERTS)]
        return numbers

    def views(self, number):
        """The views of an MLP's units by name, (d, m) float32 each: columns of norm 1, or 0 for dead units.

        Q of a view's table times a column is what a unit reads of, or writes to, each token, decorrelated.
        """
        mlp = self.mlps[number]
        rows = {view: self.rows(number, view) for view in mlp.views}
        largest = {view: weights.norm(torch.inf, dim=1) for view, weights in rows.items()}  # (m,) each
        living = torch.stack(list(largest.values())).gt(0).all(dim=0)
        views = {}
        for view, weights in rows.items():
            columns = self.roots[view] @ weights.div_(largest[view].clamp(min=1e-30)[:, None]).T
            views[view] = decorrelated(columns * (living / columns.norm(dim=0).clamp(min=1e-30)))
        return views

    def sample(self, number, limit):
        """Up to `limit` of an MLP's units, evenly spaced: their numbers, views, and how many units live."""
        if (number, limit) not in self.samples:
            views = self.views(number)
            chosen = evenly_spaced(views["up"].shape[1], limit)
            shown = {view: columns[:, chosen] for view, columns in views.items()}
            self.samples[number, limit] = (chosen, shown, living_units(views))
        return self.samples[number, limit]

    def rows(self, number, view):
        """An MLP's units by what a view has of them, (m, d) float32, with the gains of the norms around."""
        mlp = self.mlps[number]
        role = view
        if self.reading.backward and len(mlp.views) == 2 and not mlp.is_named:
            role = {"up": "down", "down": "up"}[view]
        name = mlp.matrices.get(role, mlp.matrices.get("gate_up"))
        weight = self.stack.source.read(name)
        if mlp.expert is not None:
            weight = weight[mlp.expert]
        rows = residual_rows(self.stack, name, weight, self.reading.turned, view == "down").float()
        if role not in mlp.matrices:
            rows = rows[: 2 * units_of(self.stack.source.shapes[mlp.matrices["down"]], self.width)]
            size, rest = divmod(len(rows) // 2, self.reading.turns)  # of a turn; of other layers one row
            rows = rows.view(-1, 2, 1 if rest else size, self.width)[:, int(role == "up")].flatten(0, 1)
        if view == "down":  # what is written meets the mean first, what reads meets the gain first
            rows = self.without_mean(self.stack.norm, rows * self.gain(mlp.norm_behind))
            return rows * self.gain(self.stack.norm)
        return self.without_mean(mlp.norm, rows * self.gain(mlp.norm))

    def without_mean(self, norm, rows):
        """Rows (m, d) without what a LayerNorm takes out of them: its bias tells it."""
        if norm and f"{norm.removesuffix('.weight')}.bias" in self.stack.source.shapes:
            return rows - rows.mean(dim=1, keepdim=True)
        return rows

    def gain(self, norm):
        """A norm's gain, (d,); 1 where there is no norm."""
        return self.stack.source.read(norm).float() + self.reading.from_one if norm else 1.0


def in_turns(units, turns):
    """The same Units if gate and up take so many turns in one matrix."""
    return Units(units.stack, replace(units.reading, turns=turns), units.tables, units.directions)


def is_along(stack, name, shape, turned=False, writes=None):
    """Are the stored rows of a matrix along the stream? A writer's columns are.

    A square one is stored as (outputs, inputs), but those called kernels; or as is `turned`. Its name tells
    if it `writes`, where None is given.
    """
    if shape[-1] != stack.width or shape[-2] != stack.width:
        return shape[-1] == stack.width
    if writes is None:
        writes = WRITES.search(name.replace("/", ".")) is not None
    return writes == (name.endswith("kernel") != turned)


def residual_rows(stack, name, weight, turned=False, writes=None) -> Tensor:
    """A matrix of a stack, or several, as rows along the stream, (n, width): a writer's are its columns."""
    if not is_along(stack, name, weight.shape, turned, writes):
        weight = weight.transpose(-1, -2)
    return weight.reshape(-1, stack.width)


def whitener(table, ids, root):
    """W (d, d) that whitens a table: R^(-T), from all rows; where `ids` are some, corrected for these."""
    inverse = torch.linalg.solve_triangular(root.T, torch.eye(len(root)), upper=False)
    if len(ids) >= min(len(table), MOST_TOKENS):
        return inverse
    gram = inverse @ cross_products(table, ids, table, ids).float() @ inverse.T
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=SMALLEST_EIGENVALUE * values.mean().item())
    return (vectors * values.rsqrt()) @ vectors.T @ inverse


def evenly_spaced(count, limit=None):
    """Up to `limit` numbers of 0..count - 1, evenly spaced; None: all."""
    numbers = np.linspace(0, count - 1, min(count, limit or count)).round()
    return np.unique(numbers.astype(int)).tolist()


def living_units(views):
    """How many of an MLP's units are not dead."""
    return int(views["up"].any(dim=0).sum())


def decorrelated(columns: Tensor) -> Tensor:
    """(X X' + ridge)^(-1/2) X of X (d, m), whose columns have norm 1, scaled to it again.

    What all units share no longer drowns what is theirs. The symmetric root commutes with rotations.
    """
    values, vectors = torch.linalg.eigh(columns @ columns.T)
    root = (vectors * (values.clamp(min=0) + RIDGE).rsqrt()) @ vectors.T
    white = root @ columns
    return white / white.norm(dim=0).clamp(min=1e-30)


def clipped(table: Tensor) -> Tensor:
    """A table (V, d) whose longest rows are scaled, in place, to LONGEST_ROW times the median's length."""
    lengths = torch.linalg.vector_norm(table, dim=1).float()
    limit = LONGEST_ROW * lengths.median()
    (long,) = torch.nonzero(lengths > limit, as_tuple=True)
    if limit > 0:
        table[long] = (table[long].float() * (limit / lengths[long])[:, None]).to(table.dtype)
    return table


def root_of(table: Tensor) -> Tensor:
    """R (d, d), upper triangular, of the QR decomposition of a table (V, d), centred over its tokens."""
    ids = torch.tensor(evenly_spaced(len(table), MOST_TOKENS))
    gram = cross_products(table, ids, table, ids)
    gram.diagonal().add_(SMALLEST_EIGENVALUE * gram.diagonal().mean())
    root, failure = torch.linalg.cholesky_ex(gram)
    if failure:
        raise UserError("an embedding matrix is not finite, or varies in too few directions")
    return root.T.float()


def cross_products(a: Tensor, ids_a, b: Tensor, ids_b) -> Tensor:
    """A'B of some rows of two tables, by their ids (n,), centred over these: (d, e) float64."""
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    mean = torch.zeros(a.shape[1])
    for batch in ids_a.split(BATCH):
        mean += a[batch].float().sum(dim=0) / len(ids_a)
    batches = list(zip(ids_a.split(BATCH), ids_b.split(BATCH)))
    for batch_a, batch_b in progress(batches, desc="embedding matrices", leave=False):
        total += (a[batch_a].float() - mean).T @ b[batch_b].float()  # centring one of the two is enough
    return total
