"""Random numbers that depend only on what they are for, not on earlier draws."""

import hashlib

import numpy as np
import torch


def keyed_generator(*key) -> np.random.Generator:
    """A numpy generator that depends on `key` alone: Philox, seeded with the key's 128-bit hash."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def sequence_generators(kind, input_seed, indices):
    """Yield a generator for each sequence number, dependent only on (kind, input_seed, number)."""
    key = keyed_generator(kind, input_seed).bit_generator.state["state"]["key"]
    for index in indices:
        yield np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, index]))


def random_tokens(input_seed, indices, T, vocab_size):
    """Uniform random sequences number `indices`, (n, T) int64; a longer one begins with the shorter one."""
    generators = sequence_generators("tokens", input_seed, indices)
    tokens = [generator.integers(vocab_size, size=T) for generator in generators]
    return torch.from_numpy(np.stack(tokens))


def random_vectors(input_seed, indices, T, d, std=0.02):
    """Random vectors in place of embedded tokens, (n, T, d) float32, i.i.d. N(0, std^2) (BB 4.1)."""
    generators = sequence_generators("vectors", input_seed, indices)
    vectors = [generator.standard_normal((T, d), np.float32) for generator in generators]
    return torch.from_numpy(np.stack(vectors)).mul_(std)
