"""Which hidden units build the sink, and what is the model without them? (ours, after SO)

>>> from sources import checkpoint, inputs
>>> from measure import units
>>> model = checkpoint.load("smollm2")
>>> tokens = inputs.random_tokens(0, range(8), 64, model.config.vocab_size)
>>> activity = units.observe(model, tokens)
>>> activity.builders(activity.layer, count=2)  # layer from 1, unit from 0: 99 % of one dimension of 576
[(12, 1229), (12, 1487)]
"""

import contextlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lib import kernels
from measure.attention import Chain, Means, batches, disparity, mean_attention, sink_key
from model import Transformer

# The first prediction has one token to go by, and gains from anything in front of the text; the next seven
# have two to eight. Losses of models with and without something in front are compared from the ninth on.
PREDICTIONS = (slice(0, 1), slice(1, 8), slice(8, None))
SELECTIVITY = 20  # a *selective* builder is at least so many times as active at position 1 as elsewhere,
LEAST_SHARE = 0.001  # and makes at least this share of the dimension (ours)
LEAST_DISPARITY = 50  # a layer makes a dimension dominate if it doubles disparity, to above this (ours)


@contextlib.contextmanager
def hidden_units(model: Transformer, on_units):
    """Within this context `on_units(layer, units)` sees, and may replace, each MLP's units (B, T, d_ff).

    `with hidden_units(model, zero_units(chosen)):` is a model with some units at zero.
    """

    def hook(layer, module, inputs):
        return on_units(layer, *inputs)

    with contextlib.ExitStack() as stack:
        for layer, block in enumerate(model.model.layers, start=1):
            stack.enter_context(block.mlp.down_proj.register_forward_pre_hook(partial(hook, layer)))
        yield


@contextlib.contextmanager
def watch(model: Transformer, unit, position=1):
    """Within this context a list collects the |activations|, (B,), of one (layer, unit) at a position."""
    activations = []

    def on_units(layer, units):
        if layer == unit[0]:
            activations.append(units[:, position - 1, unit[1]].float().abs().cpu())

    with hidden_units(model, on_units):
        yield activations


@dataclass
class Activity:
    """The hidden units, and the stream at position 1, averaged over sequences.

    The sink's dimension after a layer is that of the stream's largest |number| at position 1. A unit's
    contribution is its activation times its down weight to that dimension, times the sign there. *Builders*
    contribute most, *removers* take most away (ours).
    """

    down: list[Tensor]  # down projections, (d, d_ff) each
    state: Tensor  # stream at position 1, (L + 1, d), the input first
    disparity: Tensor  # disparity of that stream, (L + 1,)
    at_1: Tensor  # activations at position 1, (L, d_ff)
    elsewhere: Tensor  # |activations| at the other positions, (L, d_ff)
    chain: Chain | None = None  # the links of the same pass

    @property
    def layer(self):
        """The layer after which the disparity is largest."""
        return 1 + self.disparity[1:].argmax().item()

    def jumps(self):
        """The layers that make a dimension dominate."""
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
        """The strongest builders of the dimension after a layer, (layer, unit) each; at most `count`."""
        added = self.contributions(layer)[:layer]
        return ranked(added, max(1, min(count, (added > 0).sum().item())))

    def selective(self):
        """The builders of LEAST_SHARE or more that are active at position 1 alone, the strongest first."""
        added = self.contributions(self.layer)[: self.layer]
        needed = LEAST_SHARE * self.state[self.layer].abs().max()
        is_active_at_1 = self.at_1.abs() >= SELECTIVITY * self.elsewhere
        is_selective = is_active_at_1[: self.layer] & (added >= needed)
        return ranked(added * is_selective, int(is_selective.sum()))

    def num_needed(self, layer, share):
        """How many builders make a share of the dimension after a layer."""
        added = self.contributions(layer)[:layer].clamp(min=0)
        sums = added.flatten().sort(descending=True).values.cumsum(0)
        needed = share * self.state[layer].abs().max()
        return 1 + (sums < needed).sum().item()

    def removers(self, count):
        """The strongest removers of `self.layer`'s dimension, in any layer."""
        return ranked(-self.contributions(self.layer), count)

    def layer_rows(self):
        """A row for each layer: the chain's, and its builders if the layer makes a dimension dominate."""
        rows = self.chain.by_layer()
        jumps = self.jumps()
        for row in rows:
            layer = row["layer"]
            row["dimension"] = self.dimension(layer) if layer in jumps else None
            row["builders"] = names_of(self.builders(layer, 4)) if layer in jumps else None
        return rows

    def describe(self, units):
        """A row for each (layer, unit). `down_share` is the dimension's share of the squared down column."""
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
def observe(model: Transformer, tokens: Tensor, with_chain=False) -> Activity:
    """The Activity of a model on tokens (n, T)."""
    means = Means(len(tokens))
    chain = Chain(model, len(tokens)) if with_chain else None

    def on_state(layer, x):
        means.add("state", layer, x[:, 0].float())
        means.add("disparity", layer, disparity(x[:, 0]))
        if chain is not None:
            chain.on_state(layer, x)

    def on_units(layer, units):
        means.add("at_1", layer, units[:, 0].float())
        means.add("elsewhere", layer, units[:, 1:].float().abs().mean(1))

    with hidden_units(model, on_units):
        for part in batches(tokens):
            model.hidden(part, on_state=on_state, on_heads=None if chain is None else chain.on_heads)
    down = [block.mlp.down_proj.weight.detach() for block in model.model.layers]
    return Activity(down, **{name: means.stack(name) for name in means.of}, chain=chain)


def ranked(scores: Tensor, count):
    """The (layer, unit) of the largest scores (L, d_ff), the largest first."""
    order = scores.flatten().argsort(descending=True)[:count].tolist()
    return [(place // scores.shape[1] + 1, place % scores.shape[1]) for place in order]


def zero_units(units):
    """An `on_units` that sets hidden units, (layer, unit) each, to zero."""

    def on_units(layer, values):
        chosen = [unit for its_layer, unit in units if its_layer == layer]
        if not chosen:
            return None
        values = values.clone()  # (B, T, d_ff)
        values[..., chosen] = 0
        return values

    return on_units


@torch.inference_mode()
def alpha_and_loss(model: Transformer, tokens: Tensor, on_state=None, before=0):
    """alpha_1 and alpha_0 (n, layers, H) of tokens (n, T), and mean losses in nats, by name.

    alpha_0 is the attention to an explicit sink; it is 0 if there is none. `before` tokens stand in front of
    the text; the first prediction is always that of the text's second token.
    """
    alphas = []
    totals = torch.zeros(len(PREDICTIONS), dtype=torch.float64)

    def on_heads(layer, heads, q, k, v):
        by_layer.append(mean_attention(q, k, (1, 0), sink_key(model, layer)).cpu())

    for part in batches(tokens):
        by_layer = []
        states = model.hidden(part, on_heads=on_heads, on_state=on_state)[:, before:-1]
        targets = part[:, before + 1 :]
        for place, some in enumerate(PREDICTIONS):
            chosen = states[:, some].flatten(0, 1)
            total = kernels.summed_cross_entropy(chosen, model.head_weight, targets[:, some].flatten())
            totals[place] += total.item()
        alphas.append(torch.stack(by_layer, dim=1))  # (B, layers, H, 2)
    alpha_1, alpha_0 = torch.cat(alphas).unbind(-1)
    n, count = len(tokens), targets.shape[1]  # count: predictions of a sequence
    losses = {"loss": totals.sum().item() / (n * count), "loss_first": totals[0].item() / n}
    losses["loss_from_ninth"] = totals[2].item() / (n * (count - 8)) if count > 8 else None
    return alpha_1, alpha_0, losses


def by_token(model, tokens, builder):
    """A row for each token of the text: the builder's |activation| if this token is the first."""
    found = tokens.unique()
    with watch(model, builder) as activations:
        for part in batches(found[:, None]):
            model.hidden(part)
    sizes = torch.cat(activations).tolist()
    return [{"token": token, "builder_activation": size} for token, size in zip(found.tolist(), sizes)]


def names_of(units):
    """Hidden units, (layer, unit) each, as LAYER/UNIT."""
    return " ".join(f"{layer}/{unit}" for layer, unit in units)
