"""measure/attention.py: effective rank, dimension disparity, and what the output projection keeps."""

import numpy as np
import pytest
import scipy.stats
import torch

from measure.attention import EffectiveRank, dominance_ratio, output_tau


def test_effective_rank_is_the_entropy_of_singular_values():
    """By numpy's singular values of the centred matrix, of batches of any shape."""
    states = (
        torch.randn(4, 30, 12, generator=torch.Generator().manual_seed(0)) @ torch.randn(12, 12).tril() + 5
    )
    rank = EffectiveRank()
    for part in states.split((1, 3)):
        rank.update(part)
    matrix = states.flatten(0, 1).double().numpy()
    values = np.linalg.svd(matrix - matrix.mean(0), compute_uv=False)
    # squares are summed in float64: singular values keep half of its digits
    assert rank.value() == pytest.approx(np.exp(scipy.stats.entropy(values)), rel=1e-6)


@pytest.mark.parametrize("directions", [1, 3, 8])
def test_effective_rank_of_equal_directions(directions):
    """As many as there are, whatever their size and the mean."""
    states = torch.cat([torch.eye(8)[:directions], -torch.eye(8)[:directions]]) * 7 + 3
    rank = EffectiveRank()
    rank.update(states)
    assert rank.value() == pytest.approx(directions, rel=1e-6)


def test_effective_rank_of_one_state_is_nothing():
    rank = EffectiveRank()
    rank.update(torch.full((5, 4, 6), 1.7))
    assert rank.value() == 0


def test_dominance_ratio_by_hand():
    states = torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 0.0, -8.0, 0.0]])
    assert dominance_ratio(states).tolist() == [1, 4]


def test_output_tau_is_kendalls():
    weight = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    std = torch.rand(20, generator=torch.Generator().manual_seed(2))
    expected = scipy.stats.kendalltau(np.linalg.norm(weight, axis=0), std).statistic
    assert output_tau(weight, std) == pytest.approx(expected)
    strengths = weight.norm(dim=0)
    assert output_tau(weight, strengths) == pytest.approx(1) and output_tau(
        weight, -strengths
    ) == pytest.approx(-1)
    assert output_tau(weight, torch.zeros(20)) is None
