"""Which layers of two models have the same neurons? By weights alone. (ours)

Two models are *aligned* by tokens that both have: what a neuron of one does to these is compared with what a
neuron of the other does (`lineage/views.py`, `lineage/matching.py`). Models that learnt to predict the same
words come to share neurons near the head: `lineage/judge.py` weighs that.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lib.random import keyed_generator
from lib.runtime import progress
from lib.settings import UserError
from lineage.judge import FEWEST_TOKENS, HALF, NeuronMatch, distinct, marked
from lineage.matching import matched_neurons, mutual_neighbours
from lineage.partners import expert_partners, router_rows
from lineage.views import BATCH, Neurons, evenly_spaced, living, readings, token_rows

TOKENS, LEAST = 4, 2**14  # for each dimension, or in all, by which two models are compared
SMALLEST_EIGENVALUE = 1e-6  # of a Gram matrix, in units of their mean: smaller ones are raised
MAP_NEURONS = 64  # of each layer of a base that the layer map counts
TRIED = 3  # layers, at most, where readings of two models are tried
CERTAIN = 0.95  # of the most that a reading can find: from here on no other one is tried
AS_CLOSE = 0.9  # of the largest share: of a base's layers with as much, the one at its depth is closest
EXCHANGED = {"gate": "up", "up": "gate", "down": "down"}


@dataclass(frozen=True)
class Alignment:
    """Two stacks, each by a Reading, and what leads from the views of one to those of the other."""

    base: Neurons
    suspect: Neurons
    basis: Tensor  # Q'Q, or what is left of it in some directions, (k, k)
    num_tokens: int  # that they share
    likeness: float | None  # overlap of the embeddings' subspaces: 1 of a copy in any basis, 0 of random ones
    how: tuple  # the arguments of `align_by`
    is_exchanged: bool = False  # is what is called gate in the suspect the base's up?

    def views(self, layer, experts=()):
        """The views of a layer of the suspect, by the base's names."""
        views = self.suspect.views(layer, experts)
        return {EXCHANGED[name]: view for name, view in views.items()} if self.is_exchanged else views

    def experts(self, base_layer, layer):
        """Which experts of two layers correspond, and how alike these are: 0 where no router tells."""
        ours, theirs = self.base.stack.layers[base_layer - 1], self.suspect.stack.layers[layer - 1]
        if not (ours.router and theirs.router):
            return expert_partners(ours, theirs)
        seen = router_rows(self.base.stack, ours) @ self.base.root.T @ self.basis
        seen_by_suspect = router_rows(self.suspect.stack, theirs) @ self.suspect.root.T
        return expert_partners(ours, theirs, [seen, seen_by_suspect])


def align_by(stacks, read, tokens, directions) -> Alignment:
    """The Alignment of two stacks by a Reading of each, and by the ids (n,) of shared tokens in each of them.

    Views of models wider than `directions` are seen in so many: random ones of the base's Q, and those of the
    suspect's Q that they lead to.
    """
    width = max(stack.width for stack in stacks)
    chosen = evenly_spaced(len(tokens[0]), max(LEAST, TOKENS * width))
    seen = [token_rows(stack, each.embedding, ids[chosen]) for stack, each, ids in zip(stacks, read, tokens)]
    basis = products(*seen)
    roots = [cholesky_factor(seen.pop(0)) for _ in stacks]  # these rows are the largest of all: none is kept
    # Q'Q of the two is R^-T E'E R^-1
    basis = torch.linalg.solve_triangular(roots[0].T, basis, upper=False)
    basis = torch.linalg.solve_triangular(roots[1], basis, upper=True, left=False).float()
    likeness, (narrow, wide) = None, sorted(basis.shape)
    if len(chosen) >= FEWEST_TOKENS * wide:
        by_chance = wide / len(chosen)  # the mean of random ones: they share dimensions
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
    return Alignment(*neurons, basis, len(tokens[0]), likeness, (stacks, read, tokens))


def products(a: Tensor, b: Tensor) -> Tensor:
    """A'B of two matrices of equal rows, (n, d) and (n, e), in float64."""
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    for rows_a, rows_b in zip(a.split(BATCH), b.split(BATCH)):
        total += rows_a.T @ rows_b
    return total


def cholesky_factor(rows: Tensor) -> Tensor:
    """R (d, d) float64, upper triangular, of the QR decomposition of centred rows (n, d)."""
    gram = products(rows, rows)
    gram.diagonal().add_(SMALLEST_EIGENVALUE * gram.diagonal().mean())
    root, failure = torch.linalg.cholesky_ex(gram)
    if failure:
        raise UserError("an embedding matrix is not finite, or varies in too few directions")
    return root.T


def shared_tokens(counts, vocabularies):
    """The ids (n,) of tokens that two embedding matrices of so many rows share: by string, and by number."""
    by_number = torch.arange(min(counts))
    ours, theirs = vocabularies
    shared = [t for t, number in ours.items() if number < counts[0] and theirs.get(t, counts[1]) < counts[1]]
    ids = [torch.tensor([numbers[token] for token in shared]) for numbers in vocabularies]
    if shared and not torch.equal(*ids):
        return [ids, [by_number, by_number]]
    return [[by_number, by_number]]


def embeddings_to_read(base, suspect):
    """The embedding matrices of two stacks; where one's lone one may be a head, their heads, too."""
    is_open = base.has_lone_embedding or suspect.has_lone_embedding
    return [[*dict.fromkeys(stack.embeddings + stack.lm_heads * is_open)] for stack in (base, suspect)]


def likeliest_alignment(base, suspect, vocabularies, directions, limit):
    """The Alignment of two stacks that finds most in a few layers; the first that finds nearly all is taken.

    Tokens are shared by string or by number, whichever makes the embeddings more alike. One that chance may
    have found is not taken: then the first is. If none can be compared it is None; and a UserError says why.
    """
    stacks = (base, suspect)
    best, most, lack = None, HALF, ""
    ours, theirs = layers_to_read(base, suspect, limit)
    tried = some_of_the_shallower(base, suspect, ours, theirs)
    choices = [readings(*each) for each in zip(stacks, embeddings_to_read(base, suspect))]
    for read in itertools.product(*choices):
        try:
            counts = [stack.source.shapes[each.embedding][0] for stack, each in zip(stacks, read)]
            shared = shared_tokens(counts, vocabularies)
            found = [align_by(stacks, read, tokens, directions) for tokens in shared]
            likeliest = max(found, key=lambda alignment: alignment.likeness or 0.0)
            for alignment in (likeliest, replace(likeliest, is_exchanged=True)):
                score = score_of(alignment, *tried)
                best = best or alignment
                if score > most:
                    best, most = alignment, score
                if score >= CERTAIN * min(map(len, tried)):
                    return best, ""
        except UserError as error:  # a decoy's numbers, perhaps
            lack = str(error)
    return best, "" if best else lack


def score_of(alignment, ours, theirs):
    """How much an Alignment finds: of each layer of the shallower stack the most in one of the other."""
    shares, strengths, _ = layer_map(alignment, ours, theirs)
    found = shares * strengths
    along = 0 if len(ours) >= len(theirs) else 1
    return found.amax(dim=along).sum().item()


def layers_to_read(base, suspect, limit):
    """The layers of two stacks that are compared: up to `limit` (None: all), but all of a deeper one."""
    numbers = [layers_with_mlps(base), layers_with_mlps(suspect)]
    fewest = min(map(len, numbers))
    return [some_of(layers, limit if len(layers) == fewest else None) for layers in numbers]


def layers_with_mlps(stack):
    """The numbers of its layers that have MLPs, from 1."""
    return [number for number, layer in enumerate(stack.layers, start=1) if layer.mlps]


def some_of(layers, limit):
    """Up to `limit` of some layers, evenly spaced; None: all."""
    return [layers[place] for place in evenly_spaced(len(layers), limit)]


def some_of_the_shallower(base, suspect, ours, theirs):
    """Of layers to read TRIED, of both stacks if they are of one depth; else all of the deeper stack's."""
    excess = len(layers_with_mlps(base)) - len(layers_with_mlps(suspect))
    if excess > 0:
        return ours, some_of(theirs, TRIED)
    if excess < 0:
        return some_of(ours, TRIED), theirs
    return some_of(ours, TRIED), some_of(theirs, TRIED)


def layer_map(alignment: Alignment, ours, theirs):
    """What share of a few neurons of each of the base's layers is matched in each of the suspect's.

    Returns these shares, of those that could be matched, and the matches' median strengths, (base's,
    suspect's layers) each; and by two layers the experts that were compared. Where routers tell which layer
    of the base is the closest, only that one is compared; the gate only where up and down do not settle it.
    """
    shares, strengths = torch.zeros(2, len(ours), len(theirs))
    experts = {}
    samples = {}
    for column, layer in enumerate(progress(theirs, desc="layers", leave=False)):
        places = range(len(ours))
        alike = {}
        for place in places:
            experts[ours[place], layer], alike[place] = alignment.experts(ours[place], layer)
        if max(alike.values()) > 0:
            places = [max(alike, key=alike.get)]
        neighbours = [[] for _ in ours]
        for view in ("up", "down", "gate"):
            if view == "gate" and shares[:, column].max() > HALF:
                break
            for place in places:
                chosen = experts[ours[place], layer]
                our_experts, their_experts = zip(*chosen) if chosen else ((), ())
                base_views = alignment.base.views(ours[place], our_experts)
                views = alignment.views(layer, their_experts)
                if view not in views or view not in base_views:
                    continue
                key = (place, view, *chosen)
                if key not in samples:  # the base's few neurons, led to the suspect's views
                    few = base_views[view][:, evenly_spaced(base_views[view].shape[1], MAP_NEURONS)]
                    samples[key] = few.T @ alignment.basis
                neighbours[place].append(mutual_neighbours((samples[key] @ views[view]).abs_()))
                matched, _, strength = matched_neurons(neighbours[place])
                if len(matched):
                    alive = samples[key].any(dim=1).sum().item()
                    could_match = alive * min(1, living(views) / living(base_views))
                    shares[place, column] = min(1, len(matched) / could_match)
                    strengths[place, column] = strength.median()
    return shares, strengths, experts


def match_layers(alignment: Alignment, limit, neurons):
    """NeuronMatches of the suspect's layers, up to `limit` (None: all), and the layer map."""
    ours, theirs = layers_to_read(alignment.base.stack, alignment.suspect.stack, limit)
    shares, _, experts = layer_map(alignment, ours, theirs)
    matches = []
    for column, layer in enumerate(theirs):
        own_place = column * len(ours) // len(theirs)
        share = shares[:, column].numpy()
        (close,) = np.nonzero(share >= AS_CLOSE * share.max())
        closest = ours[close[abs(close - own_place).argmin()]]  # of those, the nearest to its own place
        matches.append(match_layer(alignment, closest, layer, experts[closest, layer], neurons))
    matches = marked(matches)
    found = [(match.layer, match.closest) for match in matches if match.is_base]
    if distinct(found) == 1 and limit is not None:  # is it the only one?
        return match_layers(alignment, None, neurons)
    labels = [[f"layer {layer}" for layer in layers] for layers in (ours, theirs)]
    return matches, {"base": labels[0], "suspect": labels[1], "share": shares.tolist()}


def match_again(alignment: Alignment, matches, directions, neurons):
    """The NeuronMatches, of which those that are doubtful are seen in more directions."""
    if not any(match.is_doubtful for match in matches):
        return matches
    alignment = replace(align_by(*alignment.how, directions), is_exchanged=alignment.is_exchanged)
    again = []
    for match in matches:
        if match.is_doubtful:
            experts, _ = alignment.experts(match.closest, match.layer)
            match = match_layer(alignment, match.closest, match.layer, experts, neurons)
        again.append(match)
    return marked(again)


def match_layer(alignment: Alignment, base_layer, layer, experts, neurons) -> NeuronMatch:
    """What of a layer of the suspect is matched in one of the base: of the smaller one up to so many neurons.

    The null: how many neurons still match after the rows of one model's basis are permuted, so that nothing
    ties the two any more.
    """
    our_experts, their_experts = zip(*experts) if experts else ((), ())
    ours, theirs = alignment.base.views(base_layer, our_experts), alignment.views(layer, their_experts)
    common = [view for view in ours if view in theirs]
    # All neurons of the smaller layer can be matched: of these some are taken.
    sizes = [next(iter(views.values())).shape[1] if common else 0 for views in (ours, theirs)]
    limits = (None, neurons) if living(ours) > living(theirs) else (neurons, None)
    our_ids, their_ids = (evenly_spaced(size, limit) for size, limit in zip(sizes, limits))
    ours = {view: ours[view][:, our_ids] for view in common}
    theirs = {view: theirs[view][:, their_ids] for view in common}
    order = torch.from_numpy(keyed_generator("null of units").permutation(len(alignment.basis)))
    places, partners, strengths = matched_by(alignment.basis, ours, theirs)
    by_chance, _, _ = matched_by(alignment.basis[order], ours, theirs)
    in_place = torch.tensor(our_ids)[places] == torch.tensor(their_ids)[partners]
    return NeuronMatch(
        layer=layer,
        closest=base_layer,
        num_middle=alignment.base.stack.is_middle(base_layer) + alignment.suspect.stack.is_middle(layer),
        found=len(places),
        units=min(living(ours), living(theirs)),
        r=strengths.median().item() if len(places) else 0.0,
        by_chance=len(by_chance),
        in_place=int(in_place.sum()),
    )


def matched_by(basis, ours, theirs):
    """What `matched_neurons` finds in the views of two layers, {view: (k, m)}, of the same names."""
    neighbours = []
    for view, columns in ours.items():
        neighbours.append(mutual_neighbours((columns.T @ basis @ theirs[view]).abs_()))
    return matched_neurons(neighbours)
