"""Random numbers that depend only on what they are for, not on earlier draws."""

import hashlib

import numpy as np


def keyed_generator(*key) -> np.random.Generator:
    """A numpy generator that depends on `key` alone: Philox, seeded with the key's 128-bit hash."""
    text = "/".join(map(str, key))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
