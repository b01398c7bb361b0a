"""Where does a model attend, and what singles a position out? (BB 6.2, SO)"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from scipy.stats import kendalltau
from torch import Tensor

from init import variant
from lib.runtime import default_batch_size, progress
from model import Transformer, causal_attention, with_sink

EPSILON = 0.3  # a head is a sink head of a sequence if its alpha_1 there is above this (arXiv 2410.10781)


def weights_on(q: Tensor, k: Tensor, positions: Tensor, sink_key=None) -> Tensor:
    """The weights of queries q (B, H, T, Dh) on keys k (B, G, T, Dh) at K <= Dh positions: (B, H, T, K).

    Attention returns a weighted mean of values. If the values are one-hot, this mean is the weights, and the
    fused kernel computes it in O(T) memory. The CPU's kernel needs values as wide as keys, hence K <= Dh.
    `sink_key` (G Dh,) is the key of an explicit sink, which has position 0.
    """
    keys = with_sink(sink_key, k)
    first = k.shape[2] + 1 - keys.shape[2]  # position of the first key: 1, or 0 with an explicit sink
    (there,) = torch.nonzero(positions >= first, as_tuple=True)
    places = positions[there] - first
    values = torch.zeros_like(keys)
    values[:, :, places, there] = 1
    return causal_attention(q, keys, values)[..., : len(positions)]


def mean_attention(q: Tensor, k: Tensor, positions, sink_key=None) -> Tensor:
    """alpha (B, H, K): the weight on position p, averaged over the queries i >= p (BB 6.2.1)."""
    positions = torch.as_tensor(positions, device=k.device)
    parts = []
    for part in positions.split(k.shape[3]):
        weights = weights_on(q, k, part, sink_key)
        parts.append(weights.sum(2, dtype=torch.float32))
    queries = k.shape[2] + 1 - positions.clamp(min=1)  # (K,) that see it; all see position 0
    return torch.cat(parts, dim=2) / queries


def sink_key(model: Transformer, layer):
    """The key (G Dh,) of a layer's explicit sink, or None."""
    return model.model.layers[layer - 1].self_attn.sink_key


@torch.inference_mode()
def attention_to(model: Transformer, tokens: Tensor, positions=(1,), on_heads=None, on_state=None) -> Tensor:
    """alpha of K positions in every head, (B, L, H, K)."""
    layers = []

    def watch(layer, heads, q, k, v):
        layers.append(mean_attention(q, k, positions, sink_key(model, layer)))
        if on_heads is not None:
            return on_heads(layer, heads, q, k, v)

    model.hidden(tokens, on_heads=watch, on_state=on_state)
    return torch.stack(layers, dim=1)


def uniform_alpha(T):
    """alpha_1 of uniform attention: the mean of 1/i over queries i = 1..T."""
    return (1 / torch.arange(1, T + 1).double()).mean().item()


def sink_statistics(model: Transformer, tokens: Tensor):
    """A row about the sink at position 1 of sequences (n, T), and alpha_1 (n, L, H).

    `norm_ratio` and `value_ratio` are `ratio_of_first` of the stream and of the heads' values, averaged over
    sequences and layers. `constant_alpha` is the attention to an explicit sink; it is 0 if there is none.
    """
    positions = (1, 0) if model.config.explicit_sink else (1,)
    alphas, norms, values = [], [], []

    def on_state(layer, x):
        if layer > 0:  # 0 is the input
            norms.append(ratio_of_first(x))

    def on_heads(layer, heads, q, k, v):
        values.append(ratio_of_first(v).mean(1))

    for part in batches(tokens):
        alphas.append(attention_to(model, part, positions, on_heads, on_state))
    alpha, *constant = torch.cat(alphas).cpu().unbind(-1)  # (n, L, H) each
    row = {
        "sink_rate": sink_share(alpha).mean().item(),
        "mean_alpha1": alpha.mean().item(),
        "max_alpha1": alpha.max().item(),
        "constant_alpha": constant[0].mean().item() if constant else 0.0,
        "norm_ratio": torch.cat(norms).mean().item(),
        "value_ratio": torch.cat(values).mean().item(),
    }
    return row, alpha


def ratio_of_first(vectors: Tensor) -> Tensor:
    """The norm at position 1 over the median norm of the other positions, of vectors (..., T, D)."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)
    return norms[..., 0] / norms[..., 1:].median(dim=-1).values


def batches(tokens: Tensor):
    """Split sequences (n, T) into parts that fit in memory, and show a progress bar."""
    parts = tokens.split(default_batch_size(tokens.device, tokens.shape[1]))
    return progress(parts, desc="sequences", unit=" batches", leave=False)


def sink_share(alpha: Tensor) -> Tensor:
    """Each sequence's share of sink heads, (n,), from alpha_1 (n, L, H). Its mean is the sink rate."""
    is_sink = alpha > EPSILON
    return is_sink.float().mean(dim=(1, 2))


class LayerMean:
    """The mean over sequences of something in each layer. The sequences come in batches."""

    def __init__(self, num_sequences):
        self.num_sequences = num_sequences
        self.means = defaultdict(float)  # by layer

    def add(self, layer, values: Tensor) -> None:
        """Add the values of a batch, (B, ...), or only their sum, (1, ...)."""
        self.means[layer] += values.sum(0).cpu() / self.num_sequences

    def stack(self) -> Tensor:
        """The means of all layers, (layers, ...)."""
        return torch.stack([self.means[layer] for layer in sorted(self.means)])


@torch.inference_mode()
def constants_at(model: Transformer, tokens: Tensor, position=1):
    """The mean key and the mean value of a position over sequences (n, T): (L, G, Dh) each."""
    keys = LayerMean(len(tokens))
    values = LayerMean(len(tokens))

    def on_heads(layer, heads, q, k, v):
        keys.add(layer, k[:, :, position - 1])
        values.add(layer, v[:, :, position - 1])

    for part in batches(tokens[:, :position]):
        model.hidden(part, on_heads=on_heads)
    return keys.stack(), values.stack()


def with_constants(model: Transformer, keys: Tensor, values: Tensor, layers=None) -> Transformer:
    """The same weights in the same memory, with explicit sinks in some layers, by default in all.

    Their keys and values are the constants `keys` and `values`, (L, G, Dh) each.
    """
    other = variant(model, explicit_sink=True)
    for layer, (block, key, value) in enumerate(zip(other.model.layers, keys, values), start=1):
        attention = block.self_attn
        attention.sink_key = attention.sink_value = None
        if layers is None or layer in layers:
            like = attention.k_proj.weight
            attention.sink_key = torch.nn.Parameter(key.flatten().to(like, copy=True))
            attention.sink_value = torch.nn.Parameter(value.flatten().to(like, copy=True))
    return other


class RunningStd:
    """The standard deviation of the heads' outputs, over sequences that come in batches, by layer."""

    def __init__(self, num_sequences):
        self.mean = LayerMean(num_sequences)  # (H, T, Dh)
        self.square = LayerMean(num_sequences)

    def on_heads(self, layer, heads, q, k, v) -> None:
        self.mean.add(layer, heads.double())
        self.square.add(layer, heads.double().square())

    def std(self, layer, dims=(0, 2)):
        """The std over sequences and over `dims` of (H, T, Dh): of each position, (T,), by default."""
        mean = self.mean.means[layer].mean(dims)
        square = self.square.means[layer].mean(dims)
        return (square - mean.square()).clamp(min=0).sqrt()


class Chain:
    """The links of SO's chain, by layer and position; `on_state` and `on_heads` go to `Transformer.hidden`.

    SO says (docs/sinks.md: what holds): a head's output is a mean of values. At position 1 it is one value,
    whose `std` over sequences, heads and dimensions is largest. W_O writes most strongly what varies most
    (`output_tau`; not so in the mean of a language model's layers), which wakes the builders at position 1
    alone: a few hidden units of one MLP. They make one dimension of the stream very large (`norm`,
    `disparity`). RMSNorm divides by the norm: all others get small. So the keys of first tokens are alike
    (`key_alignment`), their values small (`value_norm`), and queries find them (`alpha`).
    """

    def __init__(self, model: Transformer, num_sequences):
        self.model = model
        self.heads = RunningStd(num_sequences)
        self.norm = LayerMean(num_sequences)  # the stream's norm, (T,)
        self.disparity = LayerMean(num_sequences)  # the stream's disparity, (T,)
        self.norm_ratio = LayerMean(num_sequences)  # as in `sink_statistics`
        self.state = LayerMean(num_sequences)  # the stream, averaged over positions, (d,) float64
        self.product = LayerMean(num_sequences)  # the stream's outer products, likewise, (d, d) float64
        self.value_norm = LayerMean(num_sequences)  # (T,)
        self.value_ratio = LayerMean(num_sequences)  # as in `sink_statistics`
        self.key = LayerMean(num_sequences)  # keys divided by their norms, (G, T, Dh)
        self.alpha = LayerMean(num_sequences)  # (T,)

    def on_state(self, layer, x) -> None:
        if layer > 0:  # 0 is the input
            flat = x.flatten(0, 1).double()  # (B T, d)
            self.norm.add(layer, x.float().norm(dim=2))
            self.norm_ratio.add(layer, ratio_of_first(x))
            self.disparity.add(layer, disparity(x))
            self.state.add(layer, x.double().mean(1))
            self.product.add(layer, (flat.T @ flat)[None] / x.shape[1])

    def on_heads(self, layer, heads, q, k, v) -> None:
        self.heads.on_heads(layer, heads, q, k, v)
        self.value_norm.add(layer, v.float().norm(dim=3).mean(1))
        self.value_ratio.add(layer, ratio_of_first(v).mean(1))
        self.key.add(layer, F.normalize(k.float(), dim=3))
        positions = range(1, k.shape[2] + 1)
        self.alpha.add(layer, mean_attention(q, k, positions, sink_key(self.model, layer)).mean(1))

    def links(self) -> dict[str, Tensor]:
        """Each link, (L, T). `key_alignment` is the norm of the mean key; 1 if all keys agree (ours)."""
        return {
            "std": torch.stack([self.heads.std(layer) for layer in self.alpha.means]),
            "norm": self.norm.stack(),
            "disparity": self.disparity.stack(),
            "value_norm": self.value_norm.stack(),
            "key_alignment": self.key.stack().norm(dim=3).mean(1),
            "alpha": self.alpha.stack(),
        }


def replace_heads(model, k, changed, kind, factor):
    """An `on_heads` that replaces the heads' outputs o_k at position k, in the `changed` layer or in "all".

    With `self_mask` o_k becomes the value at k, as if k saw nothing else. With `amplify`, SO's, it becomes
    mu + factor (o_k - mu), where mu is the mean of o_k over sequences; with `scale` it becomes factor o_k.
    """

    def on_heads(layer, heads, q, key, v):
        if changed not in ("all", layer):
            return None
        o_k = heads[:, :, k - 1 : k]  # (B, H, 1, Dh)
        if kind == "self_mask":
            own = v[:, :, k - 1 : k].repeat_interleave(heads.shape[1] // v.shape[1], dim=1)
            o_k = model.model.layers[layer - 1].self_attn.calibrate(own, k)  # k is the last of k positions
        elif kind == "amplify":
            mean = o_k.mean(0, keepdim=True)
            o_k = mean + factor * (o_k - mean)
        elif kind == "scale":
            o_k = factor * o_k
        return torch.cat((heads[:, :, : k - 1], o_k, heads[:, :, k:]), dim=2)

    return on_heads


def disparity(states: Tensor) -> Tensor:
    """max |h| / mean |h| over dimensions, of states (..., d) (SO)."""
    states = states.float().abs()
    return states.amax(-1) / states.mean(-1)


def output_tau(weight: Tensor, std: Tensor):
    """Kendall's tau of the norms of W_O's columns (d, H Dh) with the std (H, Dh) of their inputs, or None."""
    norms = weight.float().norm(dim=0).cpu().numpy()
    tau = kendalltau(norms, std.flatten().numpy()).statistic
    return None if tau != tau else float(tau)


def effective_rank(mean: Tensor, product: Tensor):
    """How many directions the centred states spread over, from 1 to d (ours).

    It is exp of the entropy of their singular values, scaled to sum 1. `mean` (d,) is the mean state and
    `product` (d, d) the mean outer product of states, both in float64.
    """
    covariance = product - torch.outer(mean, mean)
    values = torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt()
    entropy = torch.special.entr(values / values.sum()).sum()
    return entropy.exp().item()
