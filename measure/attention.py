"""Where does a model attend, and what singles a position out? (BB 6.2, SO)

    >>> from lib import checkpoint, inputs
    >>> from measure import attention
    >>> model = checkpoint.load("tiny_llama@42")
    >>> tokens = inputs.random_tokens(0, range(8), 64, 4096)
    >>> attention.attention_to(model, tokens).shape  # alpha_1 of 8 sequences, 6 layers, 8 heads
    torch.Size([8, 6, 8, 1])

alpha_k, of a head, is how much the queries i >= k attend to position k, on average; positions count from 1.
"""

import contextlib
from functools import partial

import torch
import torch.nn.functional as F
from scipy.stats import kendalltau
from torch import Tensor

from lib.runtime import BATCH_TOKENS
from model import Transformer, causal_attention

BY_POSITION = (0, 1, 3)  # the axes of heads (B, H, T, Dh) that `Spread` pools: (T,) are left
BY_DIMENSION = (0, 2)  # (H, Dh) are left


# ---- attention without T x T matrices ----------------------------------------------------------------------


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


def uniform_alpha(T, position=1):
    """alpha_k of uniform attention: the mean of 1/i over the queries i = k..T."""
    return (1 / torch.arange(position, T + 1).double()).mean().item()


# ---- sinks -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def sink_signs(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """What tells a sink at position 1 of sequences (n, T), or foretells it; on the CPU.

    `alpha1` (n, L, H); `norm_ratio` (n, L), the length of the stream after each layer at position 1 over the
    median length of the others; `value_ratio` (n, L), the same of the values that heads average.
    """
    parts = {"alpha1": [], "norm_ratio": [], "value_ratio": []}
    for part in batches(tokens):
        layers = {name: [] for name in parts}

        def on_heads(layer, heads, q, k, v, layers=layers):
            layers["alpha1"].append(mean_attention(q, k, (1,))[..., 0])
            layers["value_ratio"].append(ratio_of_first(v).mean(1))

        def on_state(layer, x, layers=layers):
            if layer > 0:
                layers["norm_ratio"].append(ratio_of_first(x))

        model.hidden(part, on_state=on_state, on_heads=on_heads)
        for name, values in layers.items():
            parts[name].append(torch.stack(values, dim=1).cpu())
    return {name: torch.cat(values) for name, values in parts.items()}


def summary(signs: dict[str, Tensor], epsilon=0.3):
    """The numbers that `rate` and `train.py --track-sinks` report of `sink_signs`.

    A head is a sink head of a sequence if its alpha_1 there is above epsilon (Gu et al.), and `sink_rate` is
    their mean share: so it is 0 exactly where `max_alpha1`, the largest of any head in any sequence, is not
    above epsilon.
    """
    return {
        "sink_rate": sink_share(signs["alpha1"], epsilon).mean().item(),
        "mean_alpha1": signs["alpha1"].mean().item(),
        "max_alpha1": signs["alpha1"].max().item(),
        "norm_ratio": signs["norm_ratio"].mean().item(),
        "value_ratio": signs["value_ratio"].mean().item(),
    }


def ratio_of_first(vectors: Tensor) -> Tensor:
    """The length at position 1 over the median length at the others, of vectors (..., T, D); T > 1."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)
    return lengths[..., 0] / lengths[..., 1:].median(dim=-1).values


def batches(tokens: Tensor):
    """Sequences (n, T) in parts that fit in memory."""
    return tokens.split(max(1, BATCH_TOKENS[tokens.device.type] // tokens.shape[1]))


def sink_share(alpha: Tensor, epsilon) -> Tensor:
    """The share of sink heads in each sequence, (n,), of alpha (n, L, H); its mean is the sink rate."""
    return (alpha > epsilon).float().mean(dim=(1, 2))


# ---- hidden units (SO's super neurons) ---------------------------------------------------------------------


@contextlib.contextmanager
def hidden_units(model: Transformer, on_units):
    """While this lasts, `on_units(layer, units)` sees the hidden units (B, T, d_ff) of each MLP.

    A returned tensor takes the units' place before the down projection.
    """

    def hook(layer, module, inputs):
        replaced = on_units(layer, inputs[0])
        return None if replaced is None else (replaced,)

    handles = []
    for layer, block in enumerate(model.model.layers, start=1):
        if block.mlp is not None:
            handles.append(block.mlp.down_proj.register_forward_pre_hook(partial(hook, layer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class UnitActivity:
    """Mean |activation| of all hidden units, (L, d_ff): `first` at position 1, `others` at the others.

    `at_position` has their |activation| at one position in the sequences last seen, (B, d_ff) by layer.
    """

    def __init__(self, model: Transformer, num_sequences, position=1):
        self.num_sequences = num_sequences
        self.position = position
        self.first = torch.zeros(model.config.num_layers, model.config.d_ff)
        self.others = torch.zeros_like(self.first)
        self.at_position = {}

    def on_units(self, layer, units) -> None:
        """Add the hidden units (B, T, d_ff) of a layer."""
        size = units.float().abs()
        self.first[layer - 1] += size[:, 0].sum(0).cpu() / self.num_sequences
        self.others[layer - 1] += size[:, 1:].mean(1).sum(0).cpu() / self.num_sequences
        self.at_position[layer] = size[:, self.position - 1].cpu()


def super_neurons(model: Transformer, first: Tensor, others: Tensor, count=10):
    """The hidden units that write most at position 1 (SO; the ranking is ours), most first.

    A unit writes its mean |activation| there times its down column's norm; `first` and `others` are a
    UnitActivity's. `down_share` is the share of the squared column that its largest, at `dimension`, holds.
    """
    if model.config.sublayers == "attention":
        return []
    columns = torch.stack([block.mlp.down_proj.weight.float().cpu() for block in model.model.layers])
    writes = first * columns.norm(dim=1)  # (L, d_ff) of columns (L, d, d_ff)
    neurons = []
    for place in writes.flatten().topk(count).indices.tolist():
        layer, neuron = divmod(place, model.config.d_ff)
        squares = columns[layer, :, neuron].square()
        row = {
            "layer": layer + 1,
            "neuron": neuron,
            "first": first[layer, neuron].item(),
            "others": others[layer, neuron].item(),
            "writes": writes[layer, neuron].item(),
            "down_share": (squares.max() / squares.sum().clamp(min=1e-30)).item(),
            "dimension": squares.argmax().item(),
        }
        neurons.append(row)
    return neurons


# ---- what is changed, and what comes of it -----------------------------------------------------------------


def replace_values(model, k, layers, kind, factor, layer, heads, q, key, v):
    """An `on_heads` that replaces the aggregated values o_k (B, H, 1, Dh) of position k in some layers.

    `self_mask`: token k attends to itself alone, so that o_k is its own value; `amplify`: mu + factor
    (o_k - mu), mu the mean of o_k over all sequences, for each head and dimension; `scale`: factor o_k.
    """
    if layer not in layers:
        return None
    values = heads[:, :, k - 1 : k]
    if kind == "self_mask":
        own = v[:, :, k - 1 : k].repeat_interleave(heads.shape[1] // v.shape[1], dim=1)
        values = model.model.layers[layer - 1].self_attn.calibrate(own, k)
    elif kind == "amplify":
        mean = values.mean(0, keepdim=True)
        values = mean + factor * (values - mean)
    else:
        values = factor * values
    return torch.cat((heads[:, :, : k - 1], values, heads[:, :, k:]), dim=2)


def silenced(silent, layer, units):
    """The hidden units (B, T, d_ff) of a layer, those that are `silent`, as (layer, unit), at zero."""
    numbers = [unit for place, unit in silent if place == layer]
    return units.index_fill(2, torch.tensor(numbers, device=units.device), 0) if numbers else None


def alpha_and_loss(model, tokens):
    """alpha_1 (n, L, H) on the CPU, and the mean loss in nats a token, of tokens (n, T)."""
    alphas, total = [], 0.0
    for part in batches(tokens):
        layers = []

        def on_heads(layer, heads, q, k, v, layers=layers):
            layers.append(mean_attention(q, k, (1,))[..., 0])

        states = model.hidden(part, on_heads=on_heads)
        logits = model.unembed(states[:, :-1])  # (B, T - 1, V)
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        alphas.append(torch.stack(layers, dim=1).cpu())
    return torch.cat(alphas), total / tokens[:, 1:].numel()


# ---- the stream and the values -----------------------------------------------------------------------------


def dominance_ratio(states: Tensor) -> Tensor:
    """max |h| / mean |h| over dimensions, of states (..., d): SO's dimension disparity."""
    states = states.float().abs()
    return states.amax(-1) / states.mean(-1)


def output_tau(weight: Tensor, std: Tensor):
    """Kendall's tau of the lengths of W_O's columns (d, H Dh) with the standard deviation of their input.

    It says how much the output projection keeps of what varies in the aggregated values, std (H Dh,): above
    0, what varies more is written more strongly (SO: 0.32 in the mean). None where nothing varies.
    """
    strengths = weight.float().norm(dim=0).cpu()
    tau = kendalltau(strengths.numpy(), std.numpy()).statistic
    return None if tau != tau else float(tau)


class EffectiveRank:
    """How many directions states spread over, of batches that stream by (ours; SO gives no formula).

    It is exp of the entropy of the singular values of the centred states (n T, d), which are scaled to sum 1.
    """

    def __init__(self):
        self.count = 0
        self.total = 0.0
        self.products = 0.0

    def update(self, states: Tensor) -> None:
        """Add states (..., d)."""
        states = states.flatten(0, -2).double()
        self.count += len(states)
        self.total = self.total + states.sum(0)
        self.products = self.products + states.T @ states

    def value(self):
        """The effective rank, from 1 to d; 0 of states that are all equal."""
        centred = self.products - torch.outer(self.total, self.total) / self.count
        values = torch.linalg.eigvalsh(centred).clamp(min=0).sqrt()
        noise = 1e-7 * values.max()  # what is left of a difference of equal numbers
        shares = values[values > noise] / values.sum()
        return torch.special.entr(shares).sum().exp().item() if len(shares) else 0.0


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
