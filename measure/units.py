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
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lib import kernels
from measure import attention
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

    `with hidden_units(model, replace_units(chosen)):` is a model with some units at zero.
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

    def left(self, states: Tensor):
        """The share of the sink's dimension that states (n, d) after `self.layer` keep."""
        dimension = self.dimension(self.layer)
        size = states[:, dimension].mean()
        return (size / self.state[self.layer, dimension]).item()

    def removers(self, count):
        """The strongest removers of `self.layer`'s dimension, in any layer."""
        return ranked(-self.contributions(self.layer), count)

    def strongest_elsewhere(self, count):
        """The units that write most at other positions: |activation| times the norm of the down column."""
        norms = torch.stack([down.float().norm(dim=0).cpu() for down in self.down])
        return ranked(self.elsewhere * norms, count)

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
def observe(model: Transformer, tokens: Tensor, chain=None) -> Activity:
    """The Activity of a model on tokens (n, T). A `measure.attention.Chain` can watch the same pass."""
    state, disparities, at_1, elsewhere = [attention.LayerMean(len(tokens)) for _ in range(4)]

    def on_state(layer, x):
        state.add(layer, x[:, 0].float())
        disparities.add(layer, attention.disparity(x[:, 0]))
        if chain is not None:
            chain.on_state(layer, x)

    def on_units(layer, units):
        at_1.add(layer, units[:, 0].float())
        elsewhere.add(layer, units[:, 1:].float().abs().mean(1))

    with hidden_units(model, on_units):
        for part in attention.batches(tokens):
            model.hidden(part, on_state=on_state, on_heads=None if chain is None else chain.on_heads)
    down = [block.mlp.down_proj.weight.detach() for block in model.model.layers]
    return Activity(down, state.stack(), disparities.stack(), at_1.stack(), elsewhere.stack())


def ranked(scores: Tensor, count):
    """The (layer, unit) of the largest scores (L, d_ff), the largest first."""
    order = scores.flatten().argsort(descending=True)[:count].tolist()
    return [(place // scores.shape[1] + 1, place % scores.shape[1]) for place in order]


def replace_units(units, means=None):
    """An `on_units` that sets units (layer, unit) to zero; or, only at position 1, to `means` (L, d_ff)."""
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


@torch.inference_mode()
def alpha_and_loss(model: Transformer, tokens: Tensor, on_state=None, before=0):
    """alpha_1 and alpha_0 (n, layers, H) of tokens (n, T), and mean losses in nats, by name.

    alpha_0 is the attention to an explicit sink; it is 0 if there is none. `before` tokens stand in front of
    the text; the first prediction is always that of the text's second token.
    """
    alphas = []
    totals = torch.zeros(len(PREDICTIONS), dtype=torch.float64)

    def on_heads(layer, heads, q, k, v):
        by_layer.append(attention.mean_attention(q, k, (1, 0), attention.sink_key(model, layer)).cpu())

    for part in attention.batches(tokens):
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


def ablate(model: Transformer, tokens: Tensor, seen, units, means=None):
    """alpha_1 (n, L, H), the loss, and the stream (n, d) at position 1 after layer `seen`.

    `units` and `means` are those of `replace_units`.
    """
    states = []

    def on_state(layer, x):
        if layer == seen:
            states.append(x[:, 0].float().cpu())

    with hidden_units(model, replace_units(units, means)):
        alpha, _, losses = alpha_and_loss(model, tokens, on_state)
    return alpha, losses["loss"], torch.cat(states)


def effects(model, tokens, builder, before):
    """A row about the sink of a model on tokens (n, T), and the stream's largest |number| by layer.

    `before` tokens are in front of the text: then position 1 is the first of them. Losses are of the text.
    """
    disparities = attention.LayerMean(len(tokens))
    largest = defaultdict(float)  # by layer

    def on_state(layer, x):
        if layer > 0:  # 0 is the input
            largest[layer] = max(largest[layer], x.abs().amax().item())
            disparities.add(layer, attention.disparity(x[:, 0]))

    with watch(model, builder) as activations:
        alpha, constant_alpha, losses = alpha_and_loss(model, tokens, on_state, before=before)
    row = {
        "sink_rate": attention.sink_share(alpha).mean().item(),
        "alpha1": alpha.mean().item(),
        "constant_alpha": constant_alpha.mean().item(),
        "builder_activation": torch.cat(activations).mean().item(),
        "disparity": disparities.stack().max().item(),
        "largest": max(largest.values()),
    }
    return row | losses, largest


def by_token(model, tokens, builder):
    """A row for each token of the text: the builder's |activation| if this token is the first."""
    found = tokens.unique()
    with watch(model, builder) as activations:
        for part in attention.batches(found[:, None]):
            model.hidden(part)
    sizes = torch.cat(activations).tolist()
    return [{"token": token, "builder_activation": size} for token, size in zip(found.tolist(), sizes)]


def names_of(units):
    """Hidden units, (layer, unit) each, as LAYER/UNIT."""
    return " ".join(f"{layer}/{unit}" for layer, unit in units)


def layer_rows(model, chain, activity):
    """A row for each layer: its links at position 1, and its builders if it makes a dimension dominate."""
    links = chain.links()
    rows = []
    for layer, block in enumerate(model.model.layers, start=1):
        at_1 = {name: link[layer - 1, 0].item() for name, link in links.items()}
        row = {
            "layer": layer,
            "std_ratio": at_1["std"] / links["std"][layer - 1, 1:].median().item(),
            "disparity": at_1["disparity"],
            "norm_ratio": chain.norm_ratio.means[layer].item(),
            "value_ratio": chain.value_ratio.means[layer].item(),
            "key_alignment": at_1["key_alignment"],
            "effective_rank": attention.effective_rank(chain.state.means[layer], chain.product.means[layer]),
            "output_tau": attention.output_tau(block.self_attn.o_proj.weight, chain.heads.std(layer, 1)),
            "alpha1": at_1["alpha"],
            "dimension": None,
            "builders": None,
        }
        if layer in activity.jumps():
            row["dimension"] = activity.dimension(layer)
            row["builders"] = names_of(activity.builders(layer, 4))
        rows.append(row)
    return rows
