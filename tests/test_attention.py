"""measure/attention.py against T x T matrices, transformers, and what it makes."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import KINDS, random_model
from torch.utils._python_dispatch import TorchDispatchMode

from measure import attention, units
from measure.attention import sink_statistics
from sources.inputs import random_tokens


def explicit(model, tokens: torch.Tensor, on_heads=None) -> torch.Tensor:
    """Every layer's attention matrix, (B, L, H, T, T) float64: softmax of q k' / sqrt(Dh) as written.

    An explicit sink's key is a column more, in front.
    """
    T = tokens.shape[1]
    matrices = []

    def watch(layer, heads, q, k, v, alpha):
        key = model.blocks[layer - 1].self_attn.sink_key
        if key is not None:
            k = torch.cat((key.view(1, k.shape[1], 1, -1).expand(len(k), -1, -1, -1), k), dim=2)
        future = torch.ones(T, k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - T)
        k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q.double() @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        matrices.append(scores.masked_fill(future, -math.inf).softmax(-1))
        if on_heads is not None:
            return on_heads(layer, heads, q, k, v, alpha)

    with torch.inference_mode():
        model.hidden(tokens, on_heads=watch)
    return torch.stack(matrices, dim=1)


def mean_of_queries(matrices: torch.Tensor, position: int) -> torch.Tensor:
    """BB 6.2.1, literally: the mean of A[i, k] over i = k..T, one number at a time."""
    T = matrices.shape[-1]
    total = sum(matrices[..., i - 1, position - 1] for i in range(position, T + 1))
    return total / (T - position + 1)


CONFIGS = KINDS | {"explicit_sink": replace(KINDS["llama_gqa"], explicit_sink=True)}


# The long ones take the other path of the kernel.
@pytest.mark.parametrize(
    "name, T", [*[(name, 33) for name in CONFIGS], ("llama", 520), ("explicit_sink", 520)]
)
def test_attention_of_every_kind_by_matrices(name, T):
    model = random_model(CONFIGS[name])
    tokens = random_tokens(1, range(2), T, 97)
    positions = range(1, T + 1) if T == 33 else (1, 300, 520)
    matrices = explicit(model, tokens)
    expected = torch.stack([mean_of_queries(matrices[..., -T:], k) for k in positions], dim=-1)
    alpha, _ = attention.attention_to(model, tokens, positions)
    # some ten roundings of float32 numbers up to 1
    torch.testing.assert_close(alpha.double(), expected, atol=1e-6, rtol=0)
    row, _ = sink_statistics(model, tokens)
    constant = matrices[..., 0].mean().item() if model.config.explicit_sink else 0
    assert row["constant_alpha"] == pytest.approx(constant, rel=1e-5)
    chain = units.Chain(len(tokens))
    units.observe(model, tokens, chain)
    alpha_of_all = chain.stack("alpha")[:, [k - 1 for k in positions]]  # (L, K)
    torch.testing.assert_close(alpha_of_all.double(), expected.mean((0, 2)), atol=1e-6, rtol=0)


class Largest(TorchDispatchMode):
    """Watch how many numbers the largest tensor has that torch makes."""

    size = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_no_matrix_of_all_pairs_of_positions_is_made():
    T = 2048  # the largest tensors are the MLPs' neurons
    model = random_model(replace(KINDS["llama"], context_length=T))
    with Largest() as largest:
        attention.attention_to(model, torch.zeros(1, T, dtype=torch.long))
    assert 48 * T <= largest.size < T * T / 10
