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

BY_POSITION = (0, 1, 3)  # the axes of heads (B, H, T, Dh) that `Spread` pools: (T,) are left
BY_DIMENSION = (0, 2)  # (H, Dh) are left


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


@torch.inference_mode()
def sink_signs(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """What tells a sink at position 1 of sequences (n, T), or foretells it; on the CPU.

    `alpha1` (n, L, H); `is_largest` (n, L, H), whether it is the largest of its head's alphas, as in uniform
    attention; `norm_ratio` (n, L), the length of the stream after each layer at position 1 over the median
    length of the others; `value_ratio` (n, L), the same of the values that heads average.
    """
    parts = [signs_of_batch(model, part) for part in batches(tokens)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def signs_of_batch(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """`sink_signs` of sequences that fit in memory."""
    positions = range(1, tokens.shape[1] + 1)
    layers = {"alpha1": [], "is_largest": [], "norm_ratio": [], "value_ratio": []}

    def on_heads(layer, heads, q, k, v):
        alpha = mean_attention(q, k, positions)
        layers["alpha1"].append(alpha[..., 0])
        layers["is_largest"].append(alpha.argmax(2) == 0)
        layers["value_ratio"].append(ratio_of_first(v).mean(1))

    def on_state(layer, x):
        if layer > 0:
            layers["norm_ratio"].append(ratio_of_first(x))

    model.hidden(tokens, on_state=on_state, on_heads=on_heads)
    return {name: torch.stack(values, dim=1).cpu() for name, values in layers.items()}


def summary(signs: dict[str, Tensor], epsilon=0.3):
    """The numbers that `rate` and `train.py --track-sinks` report of `sink_signs`.

    A head is a sink head of a sequence if its alpha_1 there is above epsilon (Gu et al.), and `sink_rate` is
    their mean share: so it is 0 exactly where `max_alpha1`, the largest of any head in any sequence, is not
    above epsilon. `first_share` is the share of heads that attend to no position more than to the first.
    """
    return {
        "sink_rate": sink_share(signs["alpha1"], epsilon).mean().item(),
        "mean_alpha1": signs["alpha1"].mean().item(),
        "max_alpha1": signs["alpha1"].max().item(),
        "first_share": signs["is_largest"].float().mean().item(),
        "norm_ratio": signs["norm_ratio"].mean().item(),
        "value_ratio": signs["value_ratio"].mean().item(),
    }


def ratio_of_first(vectors: Tensor) -> Tensor:
    """The length at position 1 over the median length at the others, of vectors (..., T, D); T > 1."""
    lengths = vectors.float().norm(dim=-1)
    return lengths[..., 0] / lengths[..., 1:].median(dim=-1).values


def batches(tokens: Tensor):
    """Sequences (n, T) in parts that fit in memory."""
    return tokens.split(max(1, BATCH_TOKENS[tokens.device.type] // tokens.shape[1]))


def sink_share(alpha: Tensor, epsilon) -> Tensor:
    """The share of sink heads in each sequence, (n,), of alpha (n, L, H); its mean is the sink rate."""
    return (alpha > epsilon).float().mean(dim=(1, 2))


def uniform_alpha(T, position=1):
    """alpha_k of uniform attention: the mean of 1/i over the queries i = k..T."""
    return (1 / torch.arange(position, T + 1).double()).mean().item()


class Spread:
    """Standard deviation of heads (B, H, T, Dh) over some of their axes, of batches that stream by."""

    def __init__(self, axes):
        self.axes = axes
        self.count = 0
        self.sums = 0.0
        self.squares = 0.0

    def update(self, heads) -> None:
        """Add heads (B, H, T, Dh)."""
        heads = heads.double()
        sums = heads.sum(self.axes).cpu()
        self.count += heads.numel() // sums.numel()
        self.sums = self.sums + sums
        self.squares = self.squares + heads.square().sum(self.axes).cpu()

    def std(self):
        """The standard deviation, a tensor of the axes that are left."""
        variance = self.squares / self.count - (self.sums / self.count).square()
        return variance.clamp(min=0).sqrt()
