"""Which hidden units build the sink, and what is the model without them? (ours, after SO)

    >>> from lib import checkpoint, inputs
    >>> from measure import units
    >>> model = checkpoint.load("smollm2")
    >>> tokens = inputs.random_tokens(0, range(8), 64, model.config.vocab_size)
    >>> activity = units.observe(model, tokens)
    >>> activity.builders(activity.layer, count=2)  # these two make 99 % of one dimension of 576
    [(12, 1229), (12, 1487)]

Layers count from 1, units and dimensions from 0.
"""

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lib import kernels
from measure.attention import LayerMean, batches, disparity, mean_attention, sink_key
from model import Transformer

PREDICTIONS = (slice(0, 1), slice(1, 8), slice(8, None))  # the first, those to the eighth, those after it
SELECTIVITY = 20
LEAST_SHARE = 0.001
LEAST_DISPARITY = 50  # a dimension dominates from where disparity doubles and passes this (ours)


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


@dataclass
class Activity:
    """The hidden units, and the stream at position 1, in the mean over sequences.

    The sink's dimension after a layer is the largest of the mean stream there. A unit contributes its mean
    activation times its down weight on that dimension, times the dimension's sign. The *builders* are those
    that contribute most, the *removers* those that take most away (ours).
    """

    down: list[Tensor]  # weights of the down projections, (d, d_ff) each
    state: Tensor  # (L + 1, d) at position 1; the input's comes first
    disparity: Tensor  # (L + 1,), of that stream
    at_1: Tensor  # (L, d_ff) activations at position 1
    elsewhere: Tensor  # (L, d_ff) |activations| at the other positions

    @property
    def layer(self):
        """The layer after which the disparity is largest."""
        return 1 + self.disparity[1:].argmax().item()

    def jumps(self):
        """The layers that make a dimension dominate: disparity at least doubles there, and passes 50."""
        after = self.disparity[1:]
        is_jump = (after >= 2 * self.disparity[:-1]) & (after > LEAST_DISPARITY)
        return (1 + is_jump.nonzero().flatten()).tolist()

    def dimension(self, layer):
        return self.state[layer].abs().argmax().item()

    def contributions(self, layer) -> Tensor:
        """What each unit contributes, (L, d_ff), to the sink's dimension after a layer."""
        dimension = self.dimension(layer)
        weights = torch.stack([down[dimension].float().cpu() for down in self.down])
        return self.at_1 * weights * self.state[layer, dimension].sign()

    def builders(self, layer, count):
        """The (layer, unit) that build most of the dimension after a layer, most first; at most `count`."""
        added = self.contributions(layer)[:layer]
        return ranked(added, max(1, min(count, (added > 0).sum().item())))

    def selective(self):
        """The builders that are active at position 1 alone, most first (ours).

        There they are SELECTIVITY times as active as elsewhere, and each makes LEAST_SHARE of the dimension.
        """
        added = self.contributions(self.layer)[: self.layer]
        needed = LEAST_SHARE * self.state[self.layer].abs().max()
        is_selective = self.at_1.abs()[: self.layer] >= SELECTIVITY * self.elsewhere[: self.layer]
        count = int((is_selective & (added >= needed)).sum())
        return ranked(added * is_selective, count)

    def num_needed(self, layer, share):
        """How many builders make a share of the dimension after a layer."""
        added = self.contributions(layer)[:layer].clamp(min=0)  # of those that take away, nothing
        sums = added.flatten().sort(descending=True).values.cumsum(0)
        return 1 + (sums < share * self.state[layer].abs().max()).sum().item()

    def left(self, states: Tensor):
        """The share of the sink's dimension in states (n, d) at position 1, after `self.layer`."""
        dimension = self.dimension(self.layer)
        return (states[:, dimension].mean() / self.state[self.layer, dimension]).item()

    def removers(self, count):
        """The (layer, unit) that take most of `self.layer`'s dimension away, most first."""
        return ranked(-self.contributions(self.layer), count)

    def strongest_elsewhere(self, count):
        """The (layer, unit) that write most at other positions: |activation| times the norm of its column."""
        norms = torch.stack([down.float().norm(dim=0).cpu() for down in self.down])
        return ranked(self.elsewhere * norms, count)

    def describe(self, units):
        """A row for each (layer, unit); `down_share` is what `dimension` holds of its squared down column."""
        dimension = self.dimension(self.layer)
        builds = self.contributions(self.layer)
        rows = []
        for layer, unit in units:
            squares = self.down[layer - 1][:, unit].float().square()
            row = {
                "layer": layer,
                "unit": unit,
                "first": self.at_1[layer - 1, unit].abs().item(),
                "others": self.elsewhere[layer - 1, unit].item(),
                "builds": builds[layer - 1, unit].item(),
                "down_share": (squares[dimension] / squares.sum()).item(),
                "dimension": dimension,
            }
            rows.append(row)
        return rows


@torch.inference_mode()
def observe(model: Transformer, tokens: Tensor, chain=None) -> Activity:
    """The Activity of a model that reads tokens (n, T); a Chain of measure/attention.py may watch, too."""
    state, disparities, at_1, elsewhere = [LayerMean(len(tokens)) for _ in range(4)]

    def on_state(layer, x):
        state.add(layer, x[:, 0].float())
        disparities.add(layer, disparity(x[:, 0]))
        if chain is not None:
            chain.on_state(layer, x)

    def on_units(layer, units):
        at_1.add(layer, units[:, 0].float())
        elsewhere.add(layer, units[:, 1:].float().abs().mean(1))

    with hidden_units(model, on_units):
        for part in batches(tokens):
            model.hidden(part, on_state=on_state, on_heads=None if chain is None else chain.on_heads)
    down = [block.mlp.down_proj.weight.detach() for block in model.model.layers]
    return Activity(down, state.stack(), disparities.stack(), at_1.stack(), elsewhere.stack())


def ranked(scores: Tensor, count):
    """The (layer, unit) of the largest of scores (L, d_ff), largest first."""
    order = scores.flatten().argsort(descending=True)[:count].tolist()
    return [(place // scores.shape[1] + 1, place % scores.shape[1]) for place in order]


def replace_units(units, means=None):
    """An `on_units` that sets some (layer, unit) to zero; given means (L, d_ff), to these at position 1."""
    numbers = defaultdict(list)
    for layer, unit in units:
        numbers[layer].append(unit)

    def on_units(layer, values):
        if layer not in numbers:
            return None
        values = values.clone()  # (B, T, d_ff)
        if means is None:
            values[..., numbers[layer]] = 0
        else:
            values[:, 0, numbers[layer]] = means[layer - 1, numbers[layer]].to(values)
        return values

    return on_units


@contextlib.contextmanager
def rounded_inputs(model: Transformer, scale):
    """While this lasts, what each projection of the blocks reads is rounded to 8 bits (255 levels).

    One scale serves a `token`, or a sequence's whole `tensor`: its largest |number| is 127.
    """
    axes = {"token": (2,), "tensor": (1, 2)}[scale]

    def hook(module, inputs):
        (x,) = inputs  # (B, T, d)
        step = x.abs().amax(axes, keepdim=True).clamp(min=1e-30) / 127
        return (x / step).round() * step

    with contextlib.ExitStack() as stack:
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                stack.enter_context(module.register_forward_pre_hook(hook))
        yield


@torch.inference_mode()
def alpha_and_loss(model: Transformer, tokens: Tensor, on_state, streams=None, start=1, before=0):
    """What queries pay to position 1, and the losses in nats/token, of tokens (n, T).

    Returns alpha_1 (n, layers, H), what an explicit sink gets, alike (0 without one), and a dictionary: the
    mean `loss`, that of the first prediction, and of those from the ninth on (None where there are none). The
    first `before` tokens are in front of the text: predictions of them, and of the token that follows, do not
    count. If `start` is above 1, `streams` (B, T, d) in front of that layer, one a batch, take the tokens'
    place.
    """
    alphas = defaultdict(list)
    totals = torch.zeros(len(PREDICTIONS), dtype=torch.float64)

    def on_heads(layer, heads, q, k, v):
        alphas[layer].append(mean_attention(q, k, (1, 0), sink_key(model, layer)).cpu())

    for number, part in enumerate(batches(tokens)):
        inputs = streams[number] if start > 1 else part
        states = model.hidden(inputs, on_heads=on_heads, on_state=on_state, start=start)
        states = states[:, before:-1]
        targets = part[:, before + 1 :]
        for place, some in enumerate(PREDICTIONS):
            chosen = (states[:, some].flatten(0, 1), model.head_weight, targets[:, some].flatten())
            totals[place] += kernels.summed_cross_entropy(*chosen).item()
    alpha_1, alpha_0 = torch.stack([torch.cat(parts) for parts in alphas.values()], dim=1).unbind(-1)
    n = len(tokens)
    count = tokens.shape[1] - before - 1  # predictions of a sequence
    losses = {"loss": totals.sum().item() / (n * count), "loss_first": totals[0].item() / n}
    losses["loss_from_ninth"] = totals[2].item() / (n * (count - 8)) if count > 8 else None
    return alpha_1, alpha_0, losses


def ablate(model: Transformer, tokens: Tensor, seen, cases):
    """alpha_1 (n, L, H), loss, and the stream at position 1 after layer `seen`, (n, d): as is, and by case.

    A case is an `on_units`, and the first layer that it changes: what lies below runs once.
    """
    streams = {start: [] for _, start in cases if start > 1}  # (B, T, d) of each batch, in front of a layer
    at_1 = []

    def see(layer, x):
        if layer == seen:
            at_1.append(x[:, 0].float().cpu())

    def see_and_keep(layer, x):
        see(layer, x)
        if layer + 1 in streams:
            streams[layer + 1].append(x)

    whole, _, losses = alpha_and_loss(model, tokens, see_and_keep)
    state = torch.cat(at_1)
    yield whole, losses["loss"], state
    for on_units, start in cases:
        at_1.clear()
        with hidden_units(model, on_units):
            alpha, _, losses = alpha_and_loss(model, tokens, see, streams.get(start), start)
        changed = torch.cat(at_1) if start <= seen else state
        yield torch.cat((whole[:, : start - 1], alpha), dim=1), losses["loss"], changed
