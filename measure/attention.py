"""Where does a model attend, and what singles a position out? (BB 6.2, SO)

    >>> from lib import checkpoint, inputs
    >>> from measure import attention
    >>> model = checkpoint.load("tiny_llama@42")
    >>> tokens = inputs.random_tokens(0, range(8), 64, 4096)
    >>> attention.attention_to(model, tokens).shape  # alpha_1 of 8 sequences, 6 layers, 8 heads
    torch.Size([8, 6, 8, 1])

alpha_k, of a head, is how much the queries i >= k attend to position k, on average; positions count from 1. A
head whose alpha_1 in a sequence is above EPSILON is a sink head there.
"""

import contextlib
from collections import defaultdict
from functools import partial

import torch
import torch.nn.functional as F
from scipy.stats import kendalltau
from torch import Tensor

from lib.runtime import BATCH_TOKENS
from model import Transformer, causal_attention

EPSILON = 0.3  # Gu et al.

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
def states_and_attention(model: Transformer, tokens: Tensor, positions=(1,), on_heads=None, on_state=None):
    """Final-norm states (B, T, d), and alpha (B, L, H, K) of K positions, of tokens (B, T).

    `on_heads` and `on_state` are those of `Transformer.hidden`: weights are read before heads are replaced.
    ValueError for a position outside 1..T.
    """
    T = tokens.shape[1]
    if min(positions) < 1 or max(positions) > T:
        raise ValueError(f"expected positions in 1 to {T}, not {tuple(positions)}")
    layers = []

    def watch(layer, heads, q, k, v):
        layers.append(mean_attention(q, k, positions))
        if on_heads is not None:
            return on_heads(layer, heads, q, k, v)

    states = model.hidden(tokens, on_heads=watch, on_state=on_state)
    return states, torch.stack(layers, dim=1)


def attention_to(model: Transformer, tokens: Tensor, positions=(1,), on_heads=None, on_state=None) -> Tensor:
    """alpha (B, L, H, K) of K positions, for every layer and head, on tokens (B, T)."""
    return states_and_attention(model, tokens, positions, on_heads, on_state)[1]


def uniform_alpha(T):
    """alpha_1 of uniform attention: the mean of 1/i over the queries i = 1..T."""
    return (1 / torch.arange(1, T + 1).double()).mean().item()


# ---- sinks -------------------------------------------------------------------------------------------------


def sink_signs(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """What tells a sink at position 1 of sequences (n, T), or foretells it; on the CPU.

    `alpha1` (n, L, H); `norm_ratio` (n L,), the length of the stream after each layer at position 1 over the
    median length of the others; `value_ratio` (n L,), the same of the values that heads average.
    """
    alphas, norms, values = [], [], []

    def on_state(layer, x):
        if layer > 0:  # 0 is the input
            norms.append(ratio_of_first(x))

    def on_heads(layer, heads, q, k, v):
        values.append(ratio_of_first(v).mean(1))

    for part in batches(tokens):
        alphas.append(attention_to(model, part, on_heads=on_heads, on_state=on_state)[..., 0])
    signs = {"alpha1": alphas, "norm_ratio": norms, "value_ratio": values}
    return {name: torch.cat(parts).cpu() for name, parts in signs.items()}


def summary(signs: dict[str, Tensor], epsilon=EPSILON):
    """What `rate` and `train.py --track-sinks` report of `sink_signs`: means, and the largest alpha_1."""
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


def sink_share(alpha: Tensor, epsilon=EPSILON) -> Tensor:
    """The share of sink heads in each sequence, (n,), of alpha (n, L, H); its mean is the sink rate."""
    return (alpha > epsilon).float().mean(dim=(1, 2))


# ---- hidden units (SO's super neurons) ---------------------------------------------------------------------


@contextlib.contextmanager
def hidden_units(model: Transformer, on_units):
    """While this lasts, `on_units(layer, units)` sees the hidden units (B, T, d_ff) of each MLP.

    A returned tensor takes the units' place before the down projection.
    """

    def hook(layer, module, inputs):
        return on_units(layer, *inputs)

    with contextlib.ExitStack() as stack:
        for layer, block in enumerate(model.model.layers, start=1):
            stack.enter_context(block.mlp.down_proj.register_forward_pre_hook(partial(hook, layer)))
        yield


@contextlib.contextmanager
def unit_activity(model: Transformer, num_sequences):
    """Mean |activation| of all hidden units while this lasts, (L, d_ff): at position 1, and at the others."""
    first = torch.zeros(model.config.num_layers, model.config.d_ff)
    others = torch.zeros_like(first)

    def on_units(layer, units):
        size = units.float().abs()  # (B, T, d_ff)
        first[layer - 1] += size[:, 0].sum(0).cpu() / num_sequences
        others[layer - 1] += size[:, 1:].mean(1).sum(0).cpu() / num_sequences

    with hidden_units(model, on_units):
        yield first, others


def strongest_units(model: Transformer, activity: Tensor, count):
    """The (layer, unit) that write most, most first, by their mean |activation|, (L, d_ff).

    A unit writes its activation times the length of its down column (the ranking is ours).
    """
    lengths = [block.mlp.down_proj.weight.float().norm(dim=0).cpu() for block in model.model.layers]
    writes = activity * torch.stack(lengths)
    d_ff = model.config.d_ff
    return [(place // d_ff + 1, place % d_ff) for place in writes.flatten().topk(count).indices.tolist()]


def super_neurons(model: Transformer, first: Tensor, others: Tensor, count=10):
    """The hidden units that write most at position 1 (SO), most first, by their `unit_activity`.

    `down_share` is the share of the squared down column that its largest, at `dimension`, holds.
    """
    rows = []
    for layer, unit in strongest_units(model, first, count):
        column = model.model.layers[layer - 1].mlp.down_proj.weight[:, unit].float().cpu()
        squares = column.square()
        row = {
            "layer": layer,
            "neuron": unit,
            "first": first[layer - 1, unit].item(),
            "others": others[layer - 1, unit].item(),
            "writes": (first[layer - 1, unit] * column.norm()).item(),
            "down_share": (squares.max() / squares.sum()).item(),
            "dimension": squares.argmax().item(),
        }
        rows.append(row)
    return rows


# ---- what is changed, and what comes of it -----------------------------------------------------------------


def replace_values(model, k, layers, kind, factor):
    """An `on_heads` that replaces the aggregated values o_k (B, H, 1, Dh) of position k in some layers.

    `self_mask`: token k attends to itself alone, so that o_k is its own value. `amplify`:
    mu + factor (o_k - mu), mu the mean of o_k over all sequences, for each head and dimension. `scale`:
    factor o_k. `none`: o_k as it is.
    """

    def on_heads(layer, heads, q, key, v):
        if layer not in layers:
            return None
        values = heads[:, :, k - 1 : k]
        if kind == "self_mask":
            own = v[:, :, k - 1 : k].repeat_interleave(heads.shape[1] // v.shape[1], dim=1)
            values = model.model.layers[layer - 1].self_attn.calibrate(own, k)
        elif kind == "amplify":
            mean = values.mean(0, keepdim=True)
            values = mean + factor * (values - mean)
        elif kind == "scale":
            values = factor * values
        return torch.cat((heads[:, :, : k - 1], values, heads[:, :, k:]), dim=2)

    return on_heads


@torch.inference_mode()
def alpha_and_loss(model, tokens):
    """alpha_1 (n, L, H) on the CPU, and the mean loss in nats a token, of tokens (n, T)."""
    alphas, total = [], 0.0
    for part in batches(tokens):
        states, alpha = states_and_attention(model, part)
        logits = model.unembed(states[:, :-1])  # (B, T - 1, V)
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        alphas.append(alpha[..., 0].cpu())
    return torch.cat(alphas), total / tokens[:, 1:].numel()


# ---- the stream and the values -----------------------------------------------------------------------------


def dominance_ratio(states: Tensor) -> Tensor:
    """max |h| / mean |h| over dimensions, of states (..., d): SO's dimension disparity."""
    states = states.float().abs()
    return states.amax(-1) / states.mean(-1)


def output_tau(weight: Tensor, std: Tensor):
    """Kendall's tau of the lengths of W_O's columns (d, H Dh) with the std (H Dh,) of what they read.

    Above 0, what varies more is written more strongly (SO: 0.32 in the mean). None where nothing varies.
    """
    tau = kendalltau(weight.float().norm(dim=0).cpu().numpy(), std.numpy()).statistic
    return None if tau != tau else float(tau)


def effective_rank(mean: Tensor, product: Tensor):
    """How many directions states spread over, from 1 to d (ours; SO gives no formula).

    It is exp of the entropy of the singular values of the centred states, which are scaled to sum 1. Given
    are the mean of states, (d,), and of their outer products, (d, d), both float64.
    """
    values = torch.linalg.eigvalsh(product - torch.outer(mean, mean)).clamp(min=0).sqrt()
    return torch.special.entr(values / values.sum()).sum().exp().item()


class Spread:
    """The spread of each layer's aggregated values over sequences, of batches that stream by."""

    def __init__(self):
        self.counts = defaultdict(int)  # by layer
        self.sums = defaultdict(float)  # (H, T, Dh)
        self.squares = defaultdict(float)

    def on_heads(self, layer, heads, q, k, v) -> None:
        """Add heads (B, H, T, Dh), as `Transformer.hidden` shows them."""
        heads = heads.double()
        self.counts[layer] += len(heads)
        self.sums[layer] += heads.sum(0).cpu()
        self.squares[layer] += heads.square().sum(0).cpu()

    def std(self, layer, axes=(0, 2)):
        """Standard deviation about the mean, by position, (T,): sequences and `axes` of (H, T, Dh) pooled."""
        mean = (self.sums[layer] / self.counts[layer]).mean(axes)
        square = (self.squares[layer] / self.counts[layer]).mean(axes)
        return (square - mean.square()).clamp(min=0).sqrt()
