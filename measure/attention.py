"""How much does a head attend to a position? Attention weights without T x T matrices.

    >>> from lib import checkpoint, inputs
    >>> from measure import attention
    >>> model = checkpoint.load("tiny_llama@42")
    >>> tokens = inputs.random_tokens(0, range(8), 64, 4096)
    >>> attention.attention_to(model, tokens).shape  # alpha_1 of 8 sequences, 6 layers, 8 heads
    torch.Size([8, 6, 8, 1])

alpha_k, of a head, is how much the queries i >= k attend to position k, on average; positions count from 1.
"""

import torch
from torch import Tensor

from lib.runtime import BATCH_TOKENS
from model import Transformer, causal_attention


def weights_on(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """What the queries q (B, H, T, Dh) pay to the keys k (B, G, T, Dh) at K <= Dh positions: (B, H, T, K).

    Attention is linear in the values: given one-hot values it returns its weights. So the fused kernel finds
    them in O(T) memory (on CPUs it wants values as wide as the queries, hence Dh positions at a time).
    """
    values = torch.zeros_like(k)
    values[:, :, positions - 1, torch.arange(len(positions))] = 1
    return causal_attention(q, k, values)[..., : len(positions)]


def mean_attention(q: Tensor, k: Tensor, positions) -> Tensor:
    """alpha (B, H, K): the mean over queries i >= p of the weight on p (BB 6.2.1; Gu et al. 2025)."""
    positions = torch.as_tensor(positions, device=k.device)
    parts = [weights_on(q, k, part).sum(2, dtype=torch.float32) for part in positions.split(k.shape[3])]
    queries = k.shape[2] + 1 - positions  # those before p pay it nothing
    return torch.cat(parts, dim=2) / queries


@torch.inference_mode()
def attention_to(model: Transformer, tokens: Tensor, positions=(1,), on_heads=None) -> Tensor:
    """alpha (B, L, H, K) of K positions, for every layer and head, on tokens (B, T).

    `on_heads` may replace heads as in `Transformer.hidden`: weights are read before it does. ValueError for
    a position outside 1..T, or a model without attention.
    """
    T = tokens.shape[1]
    if model.config.sublayers == "mlp" or not all(1 <= position <= T for position in positions):
        raise ValueError(f"no attention to positions {tuple(positions)} of {T}")
    layers = []

    def watch(layer, heads, q, k, v):
        layers.append(mean_attention(q, k, positions))
        if on_heads is not None:
            return on_heads(layer, heads, q, k, v)

    model.hidden(tokens, on_heads=watch)
    return torch.stack(layers, dim=1)


def first_attention(model: Transformer, tokens: Tensor) -> Tensor:
    """alpha_1 of sequences (n, T), whatever their number: (n, L, H) on the CPU."""
    return torch.cat([attention_to(model, part)[..., 0].cpu() for part in batches(tokens)])


def batches(tokens: Tensor):
    """Sequences (n, T) in parts that fit in memory."""
    return tokens.split(max(1, BATCH_TOKENS[tokens.device.type] // tokens.shape[1]))


def sink_share(alpha: Tensor, epsilon) -> Tensor:
    """The share of sink heads in each sequence, (n,), of alpha (n, L, H); its mean is the sink rate."""
    return (alpha > epsilon).float().mean(dim=(1, 2))


def uniform_alpha(T, position=1):
    """alpha_k of uniform attention: the mean of 1/i over the queries i = k..T."""
    return (1 / torch.arange(position, T + 1).double()).mean().item()


class SpreadByPosition:
    """Standard deviation at each position over sequences, heads and dimensions, of batches that stream by."""

    def __init__(self):
        self.count = 0
        self.sums = 0.0
        self.squares = 0.0

    def update(self, heads) -> None:
        """Add heads (B, H, T, Dh)."""
        heads = heads.double()
        self.count += heads.numel() // heads.shape[2]
        self.sums = self.sums + heads.sum((0, 1, 3)).cpu()  # (T,)
        self.squares = self.squares + heads.square().sum((0, 1, 3)).cpu()

    def std(self):
        """The standard deviation at positions 1..T."""
        variance = self.squares / self.count - (self.sums / self.count).square()
        return variance.clamp(min=0).sqrt().tolist()
