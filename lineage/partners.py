"""Which layers, and which experts, of two models correspond? (ours)

Layers by what a few rows of one of their matrices have in common, wherever they stand. Experts by their rows
of the routers, which choose them: whoever puts experts in another order, leaves some out, or trains them on,
keeps these.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from lineage.samples import is_varied, read_sample, samples_of
from lineage.views import MOST_EXPERTS, evenly_spaced

ALIKE_R = 0.1  # of each matrix of a layer with its partner: strangers on a copied table have 0.035 at most
ROUTER_R = 0.3  # of the rows of routers: strangers' partners have 0.11


class Partner(NamedTuple):
    """What of the base corresponds to a layer of the suspect."""

    layer: int | None  # the base's layer, from 1
    experts: list  # (the base's number, the suspect's) of those that are read
    is_found: bool  # by what they have in common; else it is the layer at the same place


def find_partners(base, suspect):
    """The Partner of each of the suspect's layers (Stacks of one width)."""
    likeness = likeness_of_layers(base, suspect)
    partners = []
    for place, layer in enumerate(suspect.layers):
        ours, is_found = place, False
        if likeness is not None and likeness[:, place].max() >= ALIKE_R:
            ours, is_found = int(likeness[:, place].argmax()), True
        if ours >= len(base.layers):
            partners.append(Partner(None, [], False))
            continue
        routers = None
        if base.layers[ours].router and layer.router:
            routers = [router_rows(base, base.layers[ours]), router_rows(suspect, layer)]
        experts, _ = expert_partners(base.layers[ours], layer, routers)
        partners.append(Partner(ours + 1, experts, is_found))
    return partners


def likeness_of_layers(base, suspect):
    """How alike (base's, suspect's) layers are, by correlations of one matrix; None if none is in both."""
    rows = [fingerprints(stack) for stack in (base, suspect)]
    counts = {key: min(len(rows[0][key]), len(rows[1][key])) for key in rows[0] if key in rows[1]}
    if not counts:
        return None
    best = max(counts, key=counts.get)
    vectors = []  # of each stack by layer
    for stack, samples in zip((base, suspect), rows):
        vectors.append({})
        for place, sample in samples[best].items():
            read = read_sample(stack.source, sample)
            if is_varied(read):
                centred = read - read.mean(0)
                vectors[-1][place] = centred.flatten() / centred.norm()
    likeness = torch.zeros(len(base.layers), len(suspect.layers))
    for ours, vector in vectors[0].items():
        for theirs, other in vectors[1].items():
            likeness[ours, theirs] = torch.dot(vector, other)
    return likeness


def fingerprints(stack):
    """Samples that layers can be known by, {(role or name, number, shape): {layer's place: Sample}}."""
    found = {}
    for place, layer in enumerate(stack.layers):
        # of experts there is an order only if no router tells another one
        experts = [] if layer.router else None
        for key, sample in samples_of(layer, stack.source.shapes, stack.width, experts).items():
            if stack.width in sample.shape[-2:]:
                found.setdefault((*key, sample.shape), {})[place] = sample
    return found


def router_rows(stack, layer) -> Tensor:
    """What a layer's router weighs for each expert, (experts, d) float32."""
    rows = stack.source.read(layer.router).float()
    return rows if rows.shape[1] == stack.width else rows.T


def expert_partners(base, suspect, routers=None):
    """Which experts of two layers are compared, [(base's number, suspect's)], and how alike they are.

    `routers` are their rows, (experts, k) each, in coordinates that both share: partners are each other's
    nearest, and the nearest of these are taken. Where these do not tell, experts are evenly spaced in each;
    None stands for one that is lacking.
    """
    numbers = [sorted(layer.experts) for layer in (base, suspect)]
    chosen = [[each[place] for place in evenly_spaced(len(each), MOST_EXPERTS)] for each in numbers]
    if routers is None or any(len(rows) != len(each) for rows, each in zip(routers, numbers)):
        return [*itertools.zip_longest(*chosen)], 0.0
    units = []
    for rows in routers:
        centred = rows - rows.mean(0)
        units.append(centred / centred.norm(dim=1, keepdim=True).clamp(min=1e-30))
    cosines = units[0] @ units[1].T
    strengths, nearest = cosines.max(dim=1)
    is_mutual = cosines.max(dim=0).indices[nearest] == torch.arange(len(nearest))
    (places,) = torch.nonzero(is_mutual, as_tuple=True)
    order = places[strengths[places].argsort(descending=True, stable=True)][:MOST_EXPERTS]
    likeness = float(strengths[order].mean())
    if likeness < ROUTER_R:
        return [*itertools.zip_longest(*chosen)], 0.0
    pairs = [(numbers[0][place], numbers[1][int(nearest[place])]) for place in order.tolist()]
    return sorted(pairs), likeness
