"""How much does a head attend to a position? Attention weights without matrices, read and changed.

    >>> import attention, checkpoint, probe
    >>> model, tokens = checkpoint.load("tiny_llama@42"), probe.random_tokens(0, range(8), 64, 4096)
    >>> attention.attention_to(model, tokens).shape  # alpha_1 of 8 sequences, 6 layers, 8 heads
    torch.Size([8, 6, 8, 1])

alpha_k, of a head, is how much the queries i >= k attend to position k, on average; positions count from 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from data import TokenData
from model import Transformer, causal_attention
from probe import DEFAULTS


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
    return torch.cat(parts, dim=2) / (k.shape[2] + 1 - positions)  # queries before p pay it nothing


@torch.inference_mode()
def attention_to(model: Transformer, tokens: Tensor, positions=(1,), on_heads=None) -> Tensor:
    """alpha (B, L, H, K) of K positions, for every layer and head, on tokens (B, T).

    `on_heads` may replace heads as in `Transformer.hidden`: weights are read before it does. ValueError for
    a position outside 1..T, or a model without attention.
    """
    if not all(1 <= p <= tokens.shape[1] for p in positions) or model.config.sublayers == "mlp":
        raise ValueError(f"no attention to positions {tuple(positions)} of {tokens.shape[1]}")
    found = []

    def watch(layer, heads, q, k, v):
        found.append(mean_attention(q, k, positions))
        return None if on_heads is None else on_heads(layer, heads, q, k, v)

    model.hidden(tokens, on_heads=watch)
    return torch.stack(found, dim=1)


def batches(tokens: Tensor) -> tuple[Tensor, ...]:
    """Sequences (n, T) in parts that fit in memory."""
    return tokens.split(max(1, DEFAULTS[tokens.device.type][2] // tokens.shape[1]))


def first_attention(model: Transformer, tokens: Tensor) -> Tensor:
    """alpha_1, (n, L, H) on the CPU."""
    return torch.cat([attention_to(model, part)[..., 0].cpu() for part in batches(tokens)])


def sink_share(alpha: Tensor, epsilon: float) -> Tensor:
    """The share of sink heads in each sequence, (n,), of alpha (n, L, H); its mean is the sink rate."""
    return (alpha > epsilon).float().mean(dim=(1, 2))


def track(model: Transformer, data: TokenData, count: int, T: int) -> dict:
    """What `train.py --track-sinks` logs: raw alpha_1 and the sink rate at 0.3, on held-out windows of T."""
    tokens, _ = data.held_out(count, T)
    alpha = first_attention(model, tokens.to(model.model.norm.weight.device))
    rate, highest = sink_share(alpha, 0.3).mean().item(), alpha.mean(0).max().item()
    return dict(mean_alpha1=alpha.mean().item(), max_alpha1=highest, sink_rate=rate)


def moments(heads: Tensor) -> Tensor:
    """Number, sum and sum of squares of heads (B, H, T, Dh) at each position, (3, T) float64."""
    heads, over = heads.double(), (0, 1, 3)
    count = torch.full_like(heads[0, 0, :, 0], heads.numel() / heads.shape[2])
    return torch.stack([count, heads.sum(over), heads.square().sum(over)]).cpu()


def spread(sums: Tensor) -> list[float]:
    """Standard deviation at each position, over sequences, heads and dimensions, of summed `moments`."""
    count, total, squares = sums
    return (squares / count - (total / count).square()).clamp(min=0).sqrt().tolist()


def uniform_alpha(T: int, position: int = 1) -> float:
    """alpha_k of uniform attention: the mean of 1/i over the queries i = k..T."""
    return (1 / torch.arange(position, T + 1).double()).mean().item()


def replaced(kind: str, factor: float, model: Transformer, position: int, layers) -> Callable:
    """An `on_heads` that changes the aggregated values o_k of `position` k, in `layers`.

    `self_mask`: token k attends to itself alone, so that o_k is its own value; `amplify`: mu + factor
    (o_k - mu), mu the mean of o_k over all sequences, for each head and dimension; `scale`: factor o_k.
    """

    def on_heads(layer, heads, q, k, v):
        if kind == "none" or layer not in layers:
            return None
        at = slice(position - 1, position)
        chosen = heads[:, :, at]  # (B, H, 1, Dh)
        if kind == "self_mask":
            own = v[:, :, at].repeat_interleave(heads.shape[1] // v.shape[1], dim=1)
            chosen = model.model.layers[layer - 1].self_attn.calibrate(own, position)
        elif kind == "amplify":
            mean = chosen.mean(0, keepdim=True)
            chosen = mean + factor * (chosen - mean)
        else:  # "scale"
            chosen = factor * chosen
        return torch.cat([heads[:, :, : position - 1], chosen, heads[:, :, position:]], dim=2)

    return on_heads
