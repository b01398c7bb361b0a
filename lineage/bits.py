"""Which layers of two files are equal, bit for bit, whatever they are called? The surest evidence (ours).

    >>> from lib import checkpoint
    >>> from lineage.bits import equal_layers, layers_of
    >>> layers = layers_of(checkpoint.parse_spec("tiny_llama@42").open())
    >>> equal_layers(layers, layers)
    {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}

A merge by layers keeps numbers, but not names, nor the embedding matrix that units are seen through.
Matrices of fewer than 1,000 different numbers count for nothing: unrelated models share masks and constants.
"""

import functools
import hashlib
import math

from lib.runtime import progress
from lineage import parts

FIRST = 4096  # numbers of a matrix, by which layers are told apart before all are read


def layers_of(source):
    """A checkpoint's Layers, by their numbers."""
    found = parts.find(source)
    of_mlps = {name for mlp in found.mlps for name in mlp.matrices.values()}
    return {number: Layer(source, names, of_mlps) for number, names in enumerate(found.layers, start=1)}


class Layer:
    """A layer's matrices, by the SHA-256 of their numbers; most are read only if `beginning` is another's."""

    def __init__(self, source, names, of_mlps):
        self.source = source
        self.of_mlps = of_mlps.intersection(names)
        names = [name for name in names if not parts.NO_WEIGHTS.search(name)]
        self.sizes = {name: math.prod(source.shapes[name]) for name in names if len(source.shapes[name]) > 1}

    def digests(self, names, count=None):
        """By name, of those matrices that count, the SHA-256 of the first `count` numbers; None: of all."""
        found = {}
        for name in names:
            weight = self.source.read(name)
            if parts.is_varied(weight):
                numbers = weight.flatten()[:count].float().numpy()  # in whatever format they are kept
                found[name] = hashlib.sha256(numbers).hexdigest()
        return found

    @functools.cached_property
    def beginning(self):
        """The digests of the FIRST numbers of the smallest matrices that count."""
        for size in sorted(set(self.sizes.values())):
            found = self.digests([name for name in self.sizes if self.sizes[name] == size], FIRST)
            if found:
                return sorted(found.values())

    @functools.cached_property
    def whole(self):
        """The digests of all matrices that count; none if one of its MLPs' does not."""
        found = self.digests(self.sizes)
        return sorted(found.values()) if self.of_mlps <= found.keys() else []


def equal_layers(base, suspect):
    """The number of the base's layer for each of the suspect's that has its matrices, and no others."""
    equal = {}
    for number, layer in progress(suspect.items(), desc="bits", leave=False):
        alike = [other for other in base if base[other].beginning == layer.beginning]
        same = [other for other in alike if layer.whole and base[other].whole == layer.whole]
        if same:
            equal[number] = min(same, key=lambda base_number: abs(base_number - number))
    return equal
