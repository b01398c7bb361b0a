"""Which layers of two models begin bit for bit alike? (ours)

A merge by layers keeps *bits*, but not names, nor the embedding matrix that neurons are seen through.
"""

import hashlib
from collections import Counter

import torch

from lib.runtime import progress
from lineage.layers import MLP_ROLES
from lineage.samples import BATCH, is_varied, samples_of


def digests_of(stack, experts=None):
    """Of each layer the SHA-256 of the first numbers of its matrices, by what they do: of varied ones.

    `experts` has the numbers of those that are read, by layer from 1. Those of one role count together.
    """
    layers = []
    for number, layer in enumerate(progress(stack.layers, desc="bits", leave=False), start=1):
        first = {}  # of each role the first numbers
        chosen = (experts or {}).get(number)
        for (role, place), sample in samples_of(layer, stack.source.shapes, stack.width, chosen).items():
            key = (role, min(place, 0)) if sample.is_mlp else (role, place)
            first.setdefault(key, []).append(first_numbers(stack.source, sample.name, sample.parts[0]))
        digests = {}
        for key, begun in first.items():
            numbers = torch.cat(begun)
            if is_varied(numbers):
                digests[key] = hashlib.sha256(numbers.numpy()).hexdigest()  # in whatever format
        layers.append(digests)
    return layers


def first_numbers(source, name, part):
    """The first BATCH numbers of a part of a tensor, float32."""
    return source.read(name, part).flatten()[:BATCH].float()


def same_numbers(stack):
    """Do all layers of a stack have the same numbers, as a formula gives?"""
    begun = [sorted(digests.values()) for digests in digests_of(stack)]
    return len(begun) > 1 and bool(begun[0]) and begun.count(begun[0]) == len(begun)


def equal_layers(base, suspect, partners):
    """Which layer of the base has the same bits? {suspect's layer: base's}, from 1; and is any matrix equal?

    All matrices of the two layers, or all of their MLPs, begin with the same numbers. What stands in several
    layers of the base, as a formula gives it, tells nothing.
    """
    base_digests = digests_of(base, experts_by_layer(partners, 0))
    suspect_digests = digests_of(suspect, experts_by_layer(partners, 1))
    counts = Counter()
    for layer in base_digests:
        counts.update({*layer.values()})
    places = {}
    for number, layer in enumerate(base_digests, start=1):
        for digest in layer.values():
            if counts[digest] == 1:
                places[digest] = number
    equal, are_any = {}, False
    for number, digests in enumerate(suspect_digests, start=1):
        of_mlps = [digest for (role, _), digest in digests.items() if role in MLP_ROLES]
        for begun in (of_mlps, digests.values()):
            found = {places.get(digest) for digest in begun}
            are_any |= any(found)
            if any(found) and len(found) == 1:
                equal[number] = found.pop()
    return equal, are_any


def experts_by_layer(partners, side):
    """The numbers of the experts that are read in layers of the base (side 0), or of the suspect (1)."""
    experts = {}
    for number, partner in enumerate(partners, start=1):
        layer = number if side else partner.layer
        experts.setdefault(layer, [pair[side] for pair in partner.experts])
    return experts


def is_copy(stack, other):
    """Does every matrix of a stack's layers begin bit for bit as one of another stack's?"""
    own, others = set(), set()
    for digests in digests_of(stack):
        own.update(digests.values())
    for digests in digests_of(other):
        others.update(digests.values())
    return bool(own) and own <= others
