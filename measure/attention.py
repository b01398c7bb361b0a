"""Where does a model attend, and what singles a position out? (BB 6.2, SO)"""

from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import kendalltau
from torch import Tensor

from init import variant
from lib.runtime import default_batch_size, progress
from model import Transformer, causal_attention, with_sink


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


def ratio_of_first(vectors: Tensor) -> Tensor:
    """The norm at position 1 over the median norm of the other positions, of vectors (..., T, D)."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)
    return norms[..., 0] / norms[..., 1:].median(dim=-1).values


def batches(tokens: Tensor):
    """Split sequences (n, T) into parts that fit in memory, and show a progress bar."""
    parts = tokens.split(default_batch_size(tokens.device, tokens.shape[1]))
    return progress(parts, desc="sequences", unit=" batches", leave=False)


class Means:
    """Means over sequences, which come in batches: of each name, something in each layer."""

    def __init__(self, num_sequences):
        self.num_sequences = num_sequences
        self.of = defaultdict(lambda: defaultdict(float))  # by name, by layer

    def add(self, name, layer, values: Tensor) -> None:
        """Add the values of a batch, (B, ...), or only their sum, (1, ...)."""
        self.of[name][layer] += values.sum(0).cpu() / self.num_sequences

    def stack(self, name) -> Tensor:
        """The means of all layers, (layers, ...)."""
        return torch.stack(list(self.of[name].values()))

    def add_heads(self, layer, heads: Tensor, q, k, v) -> None:
        """Add the heads' outputs (B, H, T, Dh), whose spread `std` tells; an `on_heads`."""
        self.add("heads", layer, heads.double())
        self.add("squared heads", layer, heads.double().square())

    def std(self, layer, dims=(0, 2)) -> Tensor:
        """The heads' std over sequences and over `dims` of (H, T, Dh): of each position, (T,), by default."""
        mean = self.of["heads"][layer].mean(dims)
        square = self.of["squared heads"][layer].mean(dims)
        return (square - mean.square()).clamp(min=0).sqrt()


@torch.inference_mode()
def constants_at(model: Transformer, tokens: Tensor, position=1):
    """The mean key and the mean value of a position over sequences (n, T): (L, G, Dh) each."""
    means = Means(len(tokens))

    def on_heads(layer, heads, q, k, v):
        means.add("key", layer, k[:, :, position - 1])
        means.add("value", layer, v[:, :, position - 1])

    for part in batches(tokens[:, :position]):
        model.hidden(part, on_heads=on_heads)
    return means.stack("key"), means.stack("value")


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


class Chain(Means):
    """The links of SO's chain, by layer and position; `on_state` and `on_heads` go to `Transformer.hidden`.

    SO says (docs/sinks.md: what holds): a head's output is a mean of values. At position 1 it is one value,
    whose `std` over sequences, heads and dimensions is largest. W_O writes most strongly what varies most
    (`output_tau`; not so in the mean of a language model's layers), which wakes the builders at position 1
    alone: a few hidden units of one MLP. They make one dimension of the stream very large (`norm`,
    `disparity`). RMSNorm divides by the norm: all others get small. So the keys of first tokens are alike
    (`key_alignment`), their values small (`value_norm`), and queries find them (`alpha`).
    """

    def __init__(self, model: Transformer, num_sequences):
        super().__init__(num_sequences)
        self.model = model

    def on_state(self, layer, x) -> None:
        if layer > 0:  # 0 is the input
            flat = x.flatten(0, 1).double()  # (B T, d)
            self.add("norm", layer, x.float().norm(dim=2))  # (T,)
            self.add("norm_ratio", layer, ratio_of_first(x))
            self.add("disparity", layer, disparity(x))  # (T,)
            self.add("state", layer, x.double().mean(1))  # averaged over positions, (d,)
            self.add("product", layer, (flat.T @ flat)[None] / x.shape[1])  # outer, likewise, (d, d)

    def on_heads(self, layer, heads, q, k, v) -> None:
        self.add_heads(layer, heads, q, k, v)
        self.add("value_norm", layer, v.float().norm(dim=3).mean(1))  # (T,)
        self.add("value_ratio", layer, ratio_of_first(v).mean(1))
        self.add("key", layer, F.normalize(k.float(), dim=3))  # (G, T, Dh), each divided by its norm
        alpha = mean_attention(q, k, range(1, k.shape[2] + 1), sink_key(self.model, layer))
        self.add("alpha", layer, alpha.mean(1))  # (T,)

    def links(self) -> dict[str, Tensor]:
        """Each link, (L, T). `key_alignment` is the norm of the mean key; 1 if all keys agree (ours)."""
        links = {name: self.stack(name) for name in ("norm", "disparity", "value_norm", "alpha")}
        links["std"] = torch.stack([self.std(layer) for layer in self.of["heads"]])
        links["key_alignment"] = self.stack("key").norm(dim=3).mean(1)
        return links

    def by_position(self):
        """A row for each layer and position: its links."""
        links = self.links()
        rows = []
        for layer, position in np.ndindex(links["std"].shape):
            values = {name: link[layer, position].item() for name, link in links.items()}
            rows.append({"layer": layer + 1, "position": position + 1} | values)
        return rows

    def by_layer(self):
        """A row for each layer: its links at position 1, and those that have no position."""
        links = self.links()
        rows = []
        for layer, block in enumerate(self.model.model.layers, start=1):
            at_1 = {name: link[layer - 1, 0].item() for name, link in links.items()}
            row = {
                "layer": layer,
                "std_ratio": at_1["std"] / links["std"][layer - 1, 1:].median().item(),
                "disparity": at_1["disparity"],
                "norm_ratio": self.of["norm_ratio"][layer].item(),
                "value_ratio": self.of["value_ratio"][layer].item(),
                "key_alignment": at_1["key_alignment"],
                "effective_rank": effective_rank(self.of["state"][layer], self.of["product"][layer]),
                "output_tau": output_tau(block.self_attn.o_proj.weight, self.std(layer, 1)),
                "alpha1": at_1["alpha"],
            }
            rows.append(row)
        return rows


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
