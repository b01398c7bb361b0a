"""Which layers of two files are equal, bit for bit, whatever they are called? The surest evidence (ours).

    >>> from lib import checkpoint
    >>> from lineage.bits import equal_layers, layers_of
    >>> layers = layers_of(checkpoint.parse_spec("tiny_llama@42").open())
    >>> equal_layers(layers, layers)
    {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}

A merge by layers keeps numbers, but not names, nor the embedding matrix that units are seen through.
Matrices of fewer than 1,000 different numbers count for nothing: unrelated models share masks and constants.
"""

import hashlib

from lineage import parts, stacks


def layers_of(source):
    """By a layer's number, if its MLPs count, the SHA-256 of each matrix that counts."""
    found = parts.find(source)
    of_mlps = {name for mlp in found.mlps for name in mlp.matrices.values()}
    layers = {}
    for number, names in enumerate(found.layers, start=1):
        digests = {}
        for name in names:
            weight = source.read(name)
            if weight.ndim > 1 and parts.is_varied(weight) and not stacks.NO_WEIGHTS.search(name):
                numbers = weight.float().contiguous().numpy()  # in whatever format they are kept
                digests[name] = hashlib.sha256(numbers).hexdigest()
        if digests and of_mlps.intersection(names) <= digests.keys():
            layers[number] = sorted(digests.values())
    return layers


def equal_layers(base, suspect):
    """The number of the base's layer for each of the suspect's that has its matrices, and no others."""
    equal = {}
    for number, digests in suspect.items():
        same = [base_number for base_number, others in base.items() if others == digests]
        if same:
            equal[number] = min(same, key=lambda base_number: abs(base_number - number))
    return equal
