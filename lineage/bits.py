"""Which layers of two files are the same, bit for bit, whatever they are called? The surest evidence (ours).

    >>> from lib import checkpoint
    >>> from lineage.bits import Fingerprints, equal_layers
    >>> base = Fingerprints(checkpoint.parse_spec("tiny_llama@42").open())
    >>> equal_layers(base, base)
    {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}

A merge by layers keeps a model's numbers, but not its names, nor the embedding matrix that its units are seen
through. Matrices with fewer than 1,000 different numbers (masks, identities, constants) count for nothing:
unrelated models share them.
"""

import functools

import torch

from lineage import parts

BEGINNING = 64  # numbers of a matrix, by which equal ones are looked for


class Fingerprints:
    """The matrices of each layer of a checkpoint that count, by their beginnings: read once."""

    def __init__(self, source):
        self.source = source
        self.parts = parts.find(source)
        self.in_mlps = {name for mlp in self.parts.mlps for name in mlp.matrices.values()}
        shapes = [source.shapes[name] for names in self.parts.layers for name in names]
        self.shapes = {shape for shape in shapes if len(shape) > 1}
        self.layers = functools.cache(self.compute_layers)

    def compute_layers(self):
        """Each layer's matrices by their beginnings, by its number; of a layer whose MLPs count."""
        layers = {}
        for number, names in enumerate(self.parts.layers, start=1):
            found = {}
            missing = self.in_mlps.intersection(names)
            for name in names:
                weight = self.source.read(name)
                if weight.ndim > 1 and parts.is_varied(weight):
                    found[weight.shape, *weight.flatten()[:BEGINNING].tolist()] = name
                    missing.discard(name)
            if found and not missing:
                layers[number] = found
        return layers


def equal_layers(base: Fingerprints, suspect: Fingerprints):
    """The number of the base's layer for each of the suspect's all of whose matrices that count are its."""
    equal = {}
    if not base.shapes & suspect.shapes:
        return equal
    for number, matrices in suspect.layers().items():
        nearest = sorted(base.layers().items(), key=lambda layer: abs(layer[0] - number))
        for base_number, base_matrices in nearest:
            if number not in equal and matrices.keys() == base_matrices.keys():
                names = [(base_matrices[key], name) for key, name in matrices.items()]
                if all(have_equal_bits(base.source.read(a), suspect.source.read(b)) for a, b in names):
                    equal[number] = base_number
    return equal


def have_equal_bits(a, b):
    """Are two tensors equal, whatever the format of their numbers?"""
    return torch.equal(a.float(), b.float())
