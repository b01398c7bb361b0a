"""Which layers of two files are equal, bit for bit, whatever they are called? The surest evidence (ours).

A merge by layers keeps numbers, but not names, nor the embedding matrix that units are seen through.
Matrices of fewer than 1,000 different numbers count for nothing: unrelated models share masks and constants.
"""

import hashlib
import math

from lib.runtime import progress
from lineage.parts import find, is_varied
from lineage.stacks import NO_WEIGHTS

FIRST = 4096  # numbers of a layer's smallest matrices, by which strangers are told apart


def layers_of(source, count=None):
    """By a layer's number, if its MLPs count, the SHA-256 of each matrix that counts.

    If there is a `count`, of the first numbers of the layer's smallest matrices that count, and of no others.
    """
    found = find(source)
    of_mlps = {name for mlp in found.mlps for name in mlp.matrices.values()}
    layers = {}
    for number, names in enumerate(progress(found.layers, desc="bits", leave=False), start=1):
        digests = {}
        largest = 0  # of the matrices that were read
        for size, name in sorted((math.prod(source.shapes[name]), name) for name in names):
            if count and digests and size > largest:
                break
            weight = source.read(name)
            if weight.ndim > 1 and is_varied(weight) and not NO_WEIGHTS.search(name):
                numbers = weight.flatten()[:count].float().numpy()  # in whatever format they are kept
                digests[name] = hashlib.sha256(numbers).hexdigest()
                largest = size
        if digests and (count or of_mlps.intersection(names) <= digests.keys()):
            layers[number] = sorted(digests.values())
    return layers


def are_constant(layers):
    """Do several layers all begin with the same numbers, as a formula gives? See below."""
    begun = [*layers(FIRST).values()]
    return len(begun) > 1 and begun.count(begun[0]) == len(begun)


def equal_layers(base, suspect, count=FIRST):
    """The number of the base's layer for each of the suspect's that has its matrices, and no others.

    `base(count)` and `suspect(count)` are the `layers_of` two checkpoints. All is read only of two in which
    some layers begin alike.
    """
    equal = {}
    base_layers = base(count)
    for number, digests in suspect(count).items():
        same = [base_number for base_number, others in base_layers.items() if others == digests]
        if same:
            equal[number] = min(same, key=lambda base_number: abs(base_number - number))
    return equal_layers(base, suspect, None) if equal and count else equal
