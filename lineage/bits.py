"""Which layers of two models begin bit for bit alike? (ours)

A merge by layers keeps *bits*, but not names, nor the embedding matrix that neurons are seen through.
"""

import hashlib
from collections import Counter

import torch

from lib.runtime import progress
from lineage.names import NO_WEIGHTS, expert_key
from lineage.samples import BATCH, is_varied
from lineage.views import MOST_EXPERTS, evenly_spaced


def digests_of(stack, chosen=None):
    """Of each layer the SHA-256 of the first numbers of its matrices, by name: those of varied ones.

    `chosen` has the numbers of the experts that are read, by layer from 1; of others they are evenly spaced.
    """
    layers = []
    for number, layer in enumerate(progress(stack.layers, desc="bits", leave=False), start=1):
        experts = sorted(layer.experts)
        evenly = [experts[place] for place in evenly_spaced(len(experts), MOST_EXPERTS)]
        experts = (chosen or {}).get(number) or evenly
        digests = {}
        for name in names_read(layer, stack.source.shapes, experts):
            begun = first_numbers(stack.source, name, experts if is_stacked(layer, name) else None)
            if is_varied(begun):
                digests[name] = hashlib.sha256(begun.numpy()).hexdigest()  # in whatever format
        layers.append(digests)
    return layers


def is_stacked(layer, name):
    """Does a tensor stack a layer's experts?"""
    return any(mlp.index is not None and name in mlp.matrices.values() for mlp in layer.mlps)


def names_read(layer, shapes, experts):
    """The names of a layer's matrices that are read: of many that differ in one number some experts'."""
    families = {}
    for rest, full in layer.names.items():
        if len(shapes[full]) > 1 and not NO_WEIGHTS.search(full):
            key, number = expert_key(rest)
            families.setdefault(key, {})[number] = full
    names = []
    for members in families.values():
        if len(members) > MOST_EXPERTS and not members.keys() >= {*experts}:
            numbers = list(members)
            names += [members[numbers[place]] for place in evenly_spaced(len(numbers), MOST_EXPERTS)]
        elif members.keys() >= {*layer.experts} and len(layer.experts) > 1:
            names += [members[number] for number in members if number in experts]
        else:
            names += members.values()
    return names


def first_numbers(source, name, experts=None):
    """The first BATCH numbers of a tensor, or of each of some of those that it stacks, float32."""
    shape = source.shapes[name]
    first = slice(0, -(-BATCH // shape[-1]))
    parts = [(first,)]
    if len(shape) > 2:
        stacked = experts or evenly_spaced(shape[0], MOST_EXPERTS)
        parts = [(number, *[0] * (len(shape) - 3), first) for number in stacked]
    return torch.cat([source.read(name, part).flatten()[:BATCH] for part in parts]).float()


def same_numbers(stack):
    """Do all layers of a stack have the same numbers, as a formula gives?"""
    begun = [sorted(digests.values()) for digests in digests_of(stack)]
    return len(begun) > 1 and bool(begun[0]) and begun.count(begun[0]) == len(begun)


def equal_layers(base, suspect, partners):
    """Which layer of the base has the same bits? {suspect's layer: base's}, from 1; and is any matrix equal?

    All matrices of the two layers, or all of their MLPs, begin with the same numbers. What stands in several
    layers of the base, as a formula gives it, tells nothing.
    """
    ours, theirs = {}, {}
    for number, partner in enumerate(partners, start=1):
        theirs[number] = [expert for _, expert in partner.experts if expert is not None]
        ours.setdefault(partner.layer, [expert for expert, _ in partner.experts if expert is not None])
    base_digests, suspect_digests = digests_of(base, ours), digests_of(suspect, theirs)
    counts = Counter(digest for layer in base_digests for digest in {*layer.values()})
    places = {}
    for number, layer in enumerate(base_digests, start=1):
        places |= {digest: number for digest in layer.values() if counts[digest] == 1}
    equal, are_any = {}, False
    for number, digests in enumerate(suspect_digests, start=1):
        mlps = set()
        for mlp in suspect.layers[number - 1].mlps:
            if mlp.number is None or mlp.index is not None or mlp.number in theirs[number]:
                mlps.update(mlp.matrices.values())
        for names in (mlps, digests.keys()):
            found = {places.get(digests.get(name)) for name in names}
            are_any |= any(found)
            if any(found) and len(found) == 1:
                equal[number] = found.pop()
    return equal, are_any


def is_copy(stack, other):
    """Does every matrix of a stack's layers begin bit for bit as one of another stack's?"""
    own, others = ({d for layer in digests_of(each) for d in layer.values()} for each in (stack, other))
    return bool(own) and own <= others
