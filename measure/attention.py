"""Where does a model attend, and what singles a position out? (BB 6.2, SO)

>>> from lib import checkpoint, inputs
>>> from measure import attention
>>> model = checkpoint.load("tiny_llama@42")
>>> tokens = inputs.random_tokens(0, range(8), 64, 4096)
>>> attention.attention_to(model, tokens).shape  # alpha_1 of 8 sequences, 6 layers, 8 heads
torch.Size([8, 6, 8, 1])
"""

from collections import defaultdict
from dataclasses import replace

import torch
import torch.nn.functional as F
from scipy.stats import kendalltau
from torch import Tensor

from lib.runtime import default_batch_size, progress
from model import Transformer, causal_attention, in_front

EPSILON = 0.3  # a head with alpha_1 above this in a sequence is a sink head (Gu et al., arXiv 2410.10781)


def weights_on(q: Tensor, k: Tensor, positions: Tensor, sink_key=None) -> Tensor:
    """What the queries q (B, H, T, Dh) pay to the keys k (B, G, T, Dh) at K <= Dh positions: (B, H, T, K).

    `sink_key` (G Dh,) is a layer's explicit sink, if it has one, and its position is 0. Attention is linear
    in the values: given one-hot values it returns its weights. So the fused kernel finds them in O(T) memory
    (on CPUs it wants values as wide as the queries, hence Dh positions at a time).
    """
    keys = in_front(sink_key, k)
    first = k.shape[2] + 1 - keys.shape[2]  # the position of the first key: 1, or 0 with an explicit sink
    (there,) = torch.nonzero(positions >= first, as_tuple=True)
    values = torch.zeros_like(keys)
    values[:, :, positions[there] - first, there] = 1
    return causal_attention(q, keys, values)[..., : len(positions)]


def mean_attention(q: Tensor, k: Tensor, positions, sink_key=None) -> Tensor:
    """alpha (B, H, K): the mean over queries i >= p of the weight on p (BB 6.2.1; Gu et al. 2025)."""
    positions = torch.as_tensor(positions, device=k.device)
    parts = []
    for part in positions.split(k.shape[3]):
        parts.append(weights_on(q, k, part, sink_key).sum(2, dtype=torch.float32))
    queries = k.shape[2] + 1 - positions.clamp(min=1)  # those before p pay it nothing
    return torch.cat(parts, dim=2) / queries


def sink_key(model: Transformer, layer):
    """The key (G Dh,) of a layer's explicit sink; None for a model that has none."""
    return model.model.layers[layer - 1].self_attn.sink_key


@torch.inference_mode()
def attention_to(model: Transformer, tokens: Tensor, positions=(1,), on_heads=None, on_state=None) -> Tensor:
    """alpha_k, what queries i >= k pay to position k on average, of K positions k >= 1: (B, L, H, K).

    Position 0 is the constant of a model that has an explicit sink. Tokens are (B, T); ValueError for another
    position outside 1..T. `on_heads` and `on_state` are those of `Transformer.hidden`: weights are read
    before heads are replaced.
    """
    T = tokens.shape[1]
    least = 0 if model.config.explicit_sink else 1
    if min(positions) < least or max(positions) > T:
        raise ValueError(f"expected positions in {least} to {T}, not {tuple(positions)}")
    layers = []

    def watch(layer, heads, q, k, v):
        layers.append(mean_attention(q, k, positions, sink_key(model, layer)))
        if on_heads is not None:
            return on_heads(layer, heads, q, k, v)

    model.hidden(tokens, on_heads=watch, on_state=on_state)
    return torch.stack(layers, dim=1)


def uniform_alpha(T):
    """alpha_1 of uniform attention: the mean of 1/i over the queries i = 1..T."""
    return (1 / torch.arange(1, T + 1).double()).mean().item()


def sink_statistics(model: Transformer, tokens: Tensor, epsilon=EPSILON):
    """A row of what tells a sink at position 1 of sequences (n, T), or predicts it; and alpha_1, (n, L, H).

    `norm_ratio` is the norm of the stream at position 1 over the median of the other positions, in the mean
    of sequences and layers (`sinks.py anatomy` has each layer's); `value_ratio` that of each head's values.
    `constant_alpha` is what an explicit sink gets, in the mean of heads; 0 in a model without one.
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
        "sink_rate": sink_share(alpha, epsilon).mean().item(),
        "mean_alpha1": alpha.mean().item(),
        "max_alpha1": alpha.max().item(),
        "constant_alpha": constant[0].mean().item() if constant else 0.0,
        "norm_ratio": torch.cat(norms).mean().item(),
        "value_ratio": torch.cat(values).mean().item(),
    }
    return row, alpha


def ratio_of_first(vectors: Tensor) -> Tensor:
    """The norm at position 1 over the median norm at the others, of vectors (..., T, D); T > 1."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)
    return norms[..., 0] / norms[..., 1:].median(dim=-1).values


def batches(tokens: Tensor):
    """Sequences (n, T) in parts that fit in memory, with a bar."""
    parts = tokens.split(default_batch_size(tokens.device, tokens.shape[1]))
    return progress(parts, desc="sequences", unit=" batches", leave=False)


def sink_share(alpha: Tensor, epsilon=EPSILON) -> Tensor:
    """The share of sink heads in each sequence, (n,), of alpha (n, L, H); its mean is the sink rate."""
    return (alpha > epsilon).float().mean(dim=(1, 2))


class LayerMean:
    """The mean over sequences of what each layer shows of them, in batches that stream by."""

    def __init__(self, num_sequences):
        self.num_sequences = num_sequences
        self.means = defaultdict(float)  # by layer

    def add(self, layer, values: Tensor) -> None:
        """Add values (B, ...), one for each sequence; or their sum, (1, ...)."""
        self.means[layer] += values.sum(0).cpu() / self.num_sequences

    def stack(self) -> Tensor:
        """(layers, ...), the lowest layer first."""
        return torch.stack([self.means[layer] for layer in sorted(self.means)])


@torch.inference_mode()
def constants_at(model: Transformer, tokens: Tensor, position=1):
    """The keys and the values, (L, G Dh) each, that a position has in the mean over sequences (n, T)."""
    keys, values = LayerMean(len(tokens)), LayerMean(len(tokens))

    def on_heads(layer, heads, q, k, v):
        keys.add(layer, k[:, :, position - 1].flatten(1))
        values.add(layer, v[:, :, position - 1].flatten(1))

    for part in batches(tokens[:, :position]):  # later ones cannot change it
        model.hidden(part, on_heads=on_heads)
    return keys.stack(), values.stack()


def with_constants(model: Transformer, keys: Tensor, values: Tensor, layers=None) -> Transformer:
    """The same weights in the same memory, with keys and values (L, G Dh) as explicit sinks.

    Given `layers`, from 1, others have none: such a model is there to be measured, and cannot be saved.
    """
    with torch.device("meta"):
        other = Transformer(replace(model.config, explicit_sink=True))
    weights = model.state_dict()
    for layer, (key, value) in enumerate(zip(keys, values)):
        attention = f"model.layers.{layer}.self_attn"
        like = weights[f"{attention}.k_proj.weight"]
        for name, constant in (("sink_key", key), ("sink_value", value)):
            weights[f"{attention}.{name}"] = constant.to(like).clone()
    other.load_state_dict(weights, assign=True)
    for layer, block in enumerate(other.model.layers, start=1):
        if layers is not None and layer not in layers:
            block.self_attn.sink_key = block.self_attn.sink_value = None
    return other.eval()


class RunningStd:
    """The standard deviation of each layer's aggregated values over sequences that stream by."""

    def __init__(self, num_sequences):
        self.mean = LayerMean(num_sequences)  # (H, T, Dh)
        self.square = LayerMean(num_sequences)

    def on_heads(self, layer, heads, q, k, v) -> None:
        """Add heads (B, H, T, Dh), as `Transformer.hidden` shows them."""
        self.mean.add(layer, heads.double())
        self.square.add(layer, heads.double().square())

    def std(self, layer, axes=(0, 2)):
        """Standard deviation, pooled over sequences and `axes` of (H, T, Dh): (T,) for the default axes."""
        mean = self.mean.means[layer].mean(axes)
        square = self.square.means[layer].mean(axes)
        return (square - mean.square()).clamp(min=0).sqrt()


class Chain:
    """The links of SO's chain, by layer and position; its methods are callbacks of `Transformer.hidden`.

    What a head puts out is a mean of values, so that its `std` over sequences is largest at position 1, which
    averages one. W_O writes most strongly what varies most (`output_tau`). A few hidden units of an early
    MLP, the builders, answer to so large an output alone, and make the stream's `norm` large, in one
    dimension (`disparity`). The norm before attention leaves little else of the state: whatever the token,
    its key is the same (`key_alignment`), its value small (`value_norm`), and queries find it (`alpha`).
    """

    def __init__(self, model: Transformer, num_sequences):
        self.model = model
        self.heads = RunningStd(num_sequences)
        self.norm = LayerMean(num_sequences)  # of the stream after each layer, (T,)
        self.disparity = LayerMean(num_sequences)  # of it, (T,)
        self.norm_ratio = LayerMean(num_sequences)  # of it, as in `sink_statistics`
        self.state = LayerMean(num_sequences)  # of all positions, (d,) float64
        self.product = LayerMean(num_sequences)  # of their outer products, (d, d) float64
        self.value_norm = LayerMean(num_sequences)  # (T,)
        self.value_ratio = LayerMean(num_sequences)  # as in `sink_statistics`
        self.key = LayerMean(num_sequences)  # scaled to norm 1, (G, T, Dh)
        self.alpha = LayerMean(num_sequences)  # attention to each position, (T,)

    def on_state(self, layer, x) -> None:
        """Add the stream x (B, T, d) after a layer."""
        if layer > 0:  # 0 is the input
            flat = x.flatten(0, 1).double()  # (B T, d)
            self.norm.add(layer, x.float().norm(dim=2))
            self.norm_ratio.add(layer, ratio_of_first(x))
            self.disparity.add(layer, disparity(x))
            self.state.add(layer, x.double().mean(1))
            self.product.add(layer, (flat.T @ flat)[None] / x.shape[1])

    def on_heads(self, layer, heads, q, k, v) -> None:
        """Add heads (B, H, T, Dh), and the q, k, v that they came from."""
        self.heads.on_heads(layer, heads, q, k, v)
        self.value_norm.add(layer, v.float().norm(dim=3).mean(1))
        self.value_ratio.add(layer, ratio_of_first(v).mean(1))
        self.key.add(layer, F.normalize(k.float(), dim=3))
        positions = range(1, k.shape[2] + 1)
        self.alpha.add(layer, mean_attention(q, k, positions, sink_key(self.model, layer)).mean(1))

    def links(self) -> dict[str, Tensor]:
        """Each link, (L, T). `key_alignment` is the norm of the mean key: 1 if all keys are one (ours)."""
        return {
            "std": torch.stack([self.heads.std(layer) for layer in self.alpha.means]),
            "norm": self.norm.stack(),
            "disparity": self.disparity.stack(),
            "value_norm": self.value_norm.stack(),
            "key_alignment": self.key.stack().norm(dim=3).mean(1),
            "alpha": self.alpha.stack(),
        }


def replace_heads(model, k, changed, kind, factor):
    """An `on_heads` that replaces o_k, what heads put out at position k, in the `changed` layer, or in "all".

    `self_mask`: token k attends to itself alone, so that o_k is its own value. `amplify`, no calibration:
    mu + factor (o_k - mu), mu the mean of o_k over all sequences. `scale`: factor o_k. `none`: o_k as it is.
    """

    def on_heads(layer, heads, q, key, v):
        if changed not in ("all", layer):
            return None
        o_k = heads[:, :, k - 1 : k]  # (B, H, 1, Dh)
        if kind == "self_mask":
            own = v[:, :, k - 1 : k].repeat_interleave(heads.shape[1] // v.shape[1], dim=1)
            o_k = model.model.layers[layer - 1].self_attn.calibrate(own, k)  # as the last of k positions
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
    """Kendall's tau of the norms of W_O's columns (d, H Dh) with the std (H, Dh) of what they read.

    Above 0, what varies more is written more strongly (SO: 0.32 in the mean). None where nothing varies.
    """
    tau = kendalltau(weight.float().norm(dim=0).cpu().numpy(), std.flatten().numpy()).statistic
    return None if tau != tau else float(tau)


def effective_rank(mean: Tensor, product: Tensor):
    """How many directions states spread over, from 1 to d (ours; SO gives no formula).

    It is exp of the entropy of the singular values of the centred states, which are scaled to sum 1. Given
    are the mean of states, (d,), and of their outer products, (d, d), both float64.
    """
    values = torch.linalg.eigvalsh(product - torch.outer(mean, mean)).clamp(min=0).sqrt()
    return torch.special.entr(values / values.sum()).sum().exp().item()
