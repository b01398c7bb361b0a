"""lineage/bits.py, and lineage/coordinates.py against all permutations and scipy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import KINDS
from kin import judged

from lineage.bits import equal_layers
from lineage.coordinates import agreement, compare_coordinates, joint_test
from lineage.judge import NO_EVIDENCE, SAME_BIRTH
from lineage.layout import Stack, find_stacks
from lineage.partners import find_partners
from reproduce.disguise import as_source, disguised, newborn_source, weights_of
from reproduce.robustness import cut, noised

CONFIG = replace(KINDS["llama_gqa"], d_model=64, d_ff=96)
BASE = newborn_source(CONFIG, 1)


def find(source) -> Stack:
    return find_stacks(source)[0]


def equal_to_base(suspect):
    stacks = find(BASE), find(suspect)
    return equal_layers(*stacks, find_partners(*stacks))


def test_layers_that_begin_alike():
    weights = weights_of(BASE)
    weights["model.layers.2.mlp.down_proj.weight"][0, 0] += 1
    nearly = as_source(weights, CONFIG)
    for suspect, expected in (
        (BASE, {1: 1, 2: 2, 3: 3}),
        (nearly, {1: 1, 2: 2}),
        (cut(BASE, [2, 0]), {1: 3, 2: 1}),
    ):
        assert equal_to_base(suspect) == (expected, True)
    assert equal_to_base(newborn_source(CONFIG, 2)) == ({}, False)


def test_agreement_is_that_of_all_permutations():
    """Two matrices together, whose coordinates are relabelled alike: the std of the sum is bounded."""
    generator = np.random.default_rng(0)
    A = generator.standard_normal((2, 9, 6)) + 3
    B = 0.5 * A + generator.standard_normal((2, 9, 6))
    tests, sums = [], np.zeros(720)
    for a, b in zip(A, B):
        C = np.corrcoef(a.T, b.T)[:6, 6:]
        S = np.array([C[np.arange(6), order].mean() for order in itertools.permutations(range(6))])
        tests.append(agreement(torch.from_numpy(a), torch.from_numpy(b)))
        # float32 sums of 54 products
        assert tests[-1] == pytest.approx((np.trace(C) / 6, S.mean(), S.std()), abs=1e-6)
        sums += S
    joint = joint_test(tests, searches=10)
    assert 0 < joint.z <= (sums[0] - sums.mean()) / sums.std()
    assert joint.log10_p == pytest.approx(np.log10(10 * scipy.stats.norm.sf(joint.z)))


def test_a_look_tells_children_from_strangers():
    weights, other = weights_of(BASE), weights_of(newborn_source(CONFIG, 2))
    table = {name: weight for name, weight in weights.items() if "layers" not in name}
    attention = {name: weight for name, weight in weights.items() if "attn" in name}
    cases = {
        0.3: (noised(BASE, 0.3), [1, 2, 3]),
        1.0: (noised(BASE, 1.0), [1, 2, 3]),
        "bfloat16": (as_source({n: w.bfloat16() for n, w in weights.items()}, CONFIG), [1, 2, 3]),
        "a stranger": (as_source(other, CONFIG), []),
        "its table": (as_source(other | table, CONFIG), []),
        "its attention": (as_source(other | attention, CONFIG), []),
    }
    for case, (source, expected) in cases.items():
        stacks = find(BASE), find(source)
        found = compare_coordinates(*stacks, find_partners(*stacks))
        assert [layer for layer, each in found.layers.items() if each.is_base] == expected, case
        assert found.embedding.agrees == (case not in ("a stranger", "its attention"))
        if case in (0.3, 1.0):  # noise of so many std; some 20,000 numbers of a layer are read
            distances = [each.distance for each in found.layers.values()]
            assert distances == pytest.approx(3 * [1 - (1 + case**2) ** -0.5], abs=0.03)


# ---- births that are no Gaussian ---------------------------------------------------------------------------

SQUARE = replace(CONFIG, num_kv_heads=4, vocab_size=300)


def born(seed: int, change) -> dict:
    weights = weights_of(noised(newborn_source(SQUARE, seed), 0))
    return {name: change(name, weight) for name, weight in weights.items()}


def near_identity(name: str, weight):
    return weight + 3 * torch.eye(64) if "v_proj" in name or "o_proj" in name else weight


def without_writers(name: str, weight):
    return 0 * weight if "o_proj" in name or "down_proj" in name else weight


@pytest.mark.parametrize("change", [near_identity, without_writers])
def test_what_every_birth_has_is_no_kinship(change):
    base, stranger = (as_source(born(seed, change), SQUARE) for seed in (1, 2))
    answer, sentence = judged(base, stranger)
    assert answer == NO_EVIDENCE, sentence
    trained = born(1, change)
    for name, weight in trained.items():
        if weight.ndim > 1:  # whose writers, too, are no longer as they were
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
            trained[name] = weight + 0.01 * noise
    trained = as_source(trained, SQUARE)
    assert judged(base, trained)[0] == judged(trained, base)[0] == SAME_BIRTH
    assert judged(base, disguised(trained))[0] != NO_EVIDENCE
    assert judged(stranger, trained)[0] == NO_EVIDENCE
