"""Which neurons build the sink, and what is the model without them? (ours, after the sinks paper)

>>> from sources import checkpoint, inputs
>>> from measure import units
>>> model = checkpoint.load("smollm2")
>>> tokens = inputs.random_tokens(0, range(8), 64, model.config.vocab_size)
>>> activity = units.observe(model, tokens)
>>> activity.builders(activity.layer, count=2)  # layers from 1, units from 0: 99 % of one dimension of 576
[(12, 1229), (12, 1487)]
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from measure.attention import Chain, Means, batches, check_seen, disparity

# The first prediction sees one token, so anything in front of the text helps it; the next seven see two to
# eight. Models with and without something in front are compared from the ninth prediction on.
PREDICTIONS = (slice(0, 1), slice(1, 8), slice(8, None))
SELECTIVITY = 20  # a *selective* builder contributes at least so many times what it does elsewhere,
LEAST_SHARE = 0.001  # and makes at least this share of the dimension (ours)
FEW = 16  # sequences that tell what a neuron contributes elsewhere, where a norm follows the MLP
LEAST_DISPARITY = 50  # a layer makes a dimension dominate if it doubles disparity to above this (ours)


@contextlib.contextmanager
def watch(model, unit, position=1):
    """A context whose list collects the |activations|, (B,), of a neuron (layer, unit) at a position."""
    activations = []

    def on_units(layer, units, first):
        if layer == unit[0] and 0 <= unit[1] - first < units.shape[-1]:
            activations.append(units[:, position - 1, unit[1] - first].float().abs().cpu())

    with model.hidden_units(on_units):
        yield activations


@dataclass
class Activity:
    """Mean activations of neurons, and the mean stream at position 1.

    The sink's dimension after a layer is the largest of that stream. A neuron contributes its activation
    times its down weight to that dimension, times the dimension's sign. Where a norm follows the MLP, these
    products are rescaled so that they sum to what the MLP adds to that dimension. *Builders* contribute most,
    *removers* subtract most (ours).
    """

    model: object
    tokens: Tensor  # that were read, (n, T)
    state: Tensor  # the stream at position 1, (L + 1, d), the input first
    disparity: Tensor  # of that stream, (L + 1,)
    at_1: dict[int, Tensor]  # by layer: activations at position 1, (d_ff,)
    elsewhere: dict[int, Tensor]  # |activations| at the other positions, (d_ff,)
    added: dict[int, Tensor]  # what an MLP adds to that stream, (d,), where a norm follows
    chain: Chain | None = None  # of the same pass

    @property
    def layer(self):
        """The layer after which disparity is largest."""
        return 1 + self.disparity[1:].argmax().item()

    def jumps(self):
        """The layers that make a dimension dominate."""
        after = self.disparity[1:]
        is_jump = (after >= 2 * self.disparity[:-1]) & (after > LEAST_DISPARITY)
        return (1 + is_jump.nonzero().flatten()).tolist()

    def dimension(self, layer):
        return self.state[layer].abs().argmax().item()

    def contributions(self, layer, last=None):
        """Each neuron's contribution, by layer (d_ff,), to the sink's dimension after a layer."""
        dimension = self.dimension(layer)
        sign = self.state[layer, dimension].sign()
        added = {}
        for its_layer, activations in self.at_1.items():
            if last is None or its_layer <= last:
                weights = self.model.down(its_layer)[dimension].float().cpu()
                added[its_layer] = activations * weights * sign
                if its_layer in self.added:
                    total = self.added[its_layer][dimension] * sign
                    added[its_layer] *= total / added[its_layer].sum()
        return added

    def builders(self, layer, count):
        """The strongest builders, at most `count`, of the dimension after a layer: (layer, unit) each."""
        added = self.contributions(layer, layer)
        positive = sum((some > 0).sum().item() for some in added.values())
        return ranked(added, max(1, min(count, positive)))

    def selective(self):
        """The selective builders, which build at position 1 alone, the strongest first."""
        needed = LEAST_SHARE * self.state[self.layer].abs().max()
        chosen, count = {}, 0
        for layer, added in self.contributions(self.layer, self.layer).items():
            is_selective = added >= needed
            if is_selective.any():
                is_selective &= added >= SELECTIVITY * self.contributions_elsewhere(layer)
            chosen[layer] = added * is_selective
            count += int(is_selective.sum())
        return ranked(chosen, count)

    @torch.inference_mode()
    def contributions_elsewhere(self, layer):
        """Mean |contribution| of a layer's neurons, (d_ff,), to `self.layer`'s dimension elsewhere."""
        dimension = self.dimension(self.layer)
        weights = self.model.down(layer)[dimension].float().cpu()
        if layer not in self.added:
            return self.elsewhere[layer] * weights.abs()
        total = 0
        for part in batches(self.tokens[:FEW]):
            state, _ = after_layer(self.model, layer, part)
            without, units = after_layer(self.model, layer, part, is_silent=True)
            written = (units @ weights)[:, 1:]  # (B, T - 1), before the norm
            scale = ((state - without)[:, 1:, dimension] / written).nan_to_num(0, 0, 0)  # what the norm does
            total += torch.einsum("btf,bt->f", units[:, 1:].abs(), scale.abs()) / written.shape[1]
        return total * weights.abs() / len(self.tokens[:FEW])

    def num_needed(self, layer, share):
        """The number of builders that make a share of the dimension after a layer."""
        added = torch.cat(list(self.contributions(layer, layer).values())).clamp(min=0)
        sums = added.sort(descending=True).values.cumsum(0)
        needed = share * self.state[layer].abs().max()
        return 1 + (sums < needed).sum().item()

    def removers(self, count):
        """The strongest removers of `self.layer`'s dimension, from all layers."""
        return ranked({layer: -added for layer, added in self.contributions(self.layer).items()}, count)

    def layer_rows(self):
        """The chain's row for each layer, with builders if the layer makes a dimension dominate."""
        rows = self.chain.by_layer()
        jumps = self.jumps()
        for row in rows:
            layer = row["layer"]
            row["dimension"] = self.dimension(layer) if layer in jumps else None
            row["builders"] = names_of(self.builders(layer, 4)) if layer in jumps else None
        return rows

    def describe(self, units):
        """A row for each (layer, unit). `down_share` is the dimension's share of its squared down weights."""
        dimension = self.dimension(self.layer)
        builds = self.contributions(self.layer)
        rows = []
        for layer, unit in units:
            squares = self.model.down(layer)[:, unit].float().square()
            row = {
                "layer": layer,
                "unit": unit,
                "first": self.at_1[layer][unit].abs().item(),
                "others": self.elsewhere[layer][unit].item(),
                "builds": builds[layer][unit].item(),
                "down_share": (squares[dimension] / squares.sum()).item(),
                "dimension": dimension,
            }
            rows.append(row)
        return rows


@torch.inference_mode()
def observe(model, tokens: Tensor, with_chain=False) -> Activity:
    """The Activity of a model on tokens (n, T); UserError if its states or neurons cannot be seen."""
    check_seen(model, "states", "units")
    means = Means(len(tokens))
    chain = Chain(model, len(tokens)) if with_chain else None

    def on_state(layer, x):
        means.add("state", layer, x[:, 0].float())
        means.add("disparity", layer, disparity(x[:, 0]))
        if chain is not None:
            chain.on_state(layer, x)

    def on_units(layer, units, first):
        means.add("at_1", (layer, first), units[:, 0].float())
        means.add("elsewhere", (layer, first), units[:, 1:].float().abs().mean(1))

    with model.hidden_units(on_units):
        for part in batches(tokens):
            model.hidden(part, on_state=on_state, on_heads=None if chain is None else chain.on_heads)
    units = {name: joined(means.of[name]) for name in ("at_1", "elsewhere")}
    states = means.stack("state")
    added = {}
    for layer in model.normed_layers:
        kept = Means(len(tokens))
        for part in batches(tokens[:, :1]):
            kept.add("state", layer, after_layer(model, layer, part, is_silent=True)[0][:, 0])
        added[layer] = states[layer] - kept.of["state"][layer]
    return Activity(model, tokens, states, means.stack("disparity"), **units, added=added, chain=chain)


def after_layer(model, layer, tokens, is_silent=False):
    """The stream (B, T, d) after a layer, its neurons ablated if `is_silent`, and these (B, T, d_ff)."""
    states, parts = {}, {}

    def on_units(at, units, first):
        if at == layer:
            parts[first] = units.float().cpu()
            return torch.zeros_like(units) if is_silent else None

    with model.hidden_units(on_units):
        model.hidden(tokens, on_state=lambda at, x: states.update({at: x}) if at == layer else None)
    return states[layer].float().cpu(), torch.cat([parts[first] for first in sorted(parts)], dim=-1)


def joined(parts):
    """The neurons of each layer, joined from parts whose keys are (layer, first unit)."""
    layers = {}
    for layer, first in sorted(parts):
        layers.setdefault(layer, []).append(parts[layer, first])
    return {layer: torch.cat(some) for layer, some in layers.items()}


def ranked(scores, count):
    """The (layer, unit) of the `count` largest scores, the largest first; `scores` are (d_ff,) by layer."""
    order = torch.cat(list(scores.values())).argsort(descending=True)[:count]
    layers = torch.cat([torch.full((len(some),), layer) for layer, some in scores.items()])
    units = torch.cat([torch.arange(len(some)) for some in scores.values()])
    return list(zip(layers[order].tolist(), units[order].tolist()))


def zero_units(units):
    """An `on_units` that ablates neurons, (layer, unit) each: it sets them to zero."""

    def on_units(layer, values, first):
        chosen = [unit - first for its_layer, unit in units if its_layer == layer]
        chosen = [unit for unit in chosen if 0 <= unit < values.shape[-1]]
        if not chosen:
            return None
        values = values.clone()  # (B, T, d_ff)
        values[..., chosen] = 0
        return values

    return on_units


@torch.inference_mode()
def alpha_and_loss(model, tokens: Tensor, on_state=None, before=0):
    """alpha_1 and alpha_0, (n, layers, H) each, of tokens (n, T), and mean losses in nats by name.

    alpha_0 is the attention to a constant or learned sink, 0 without one. The first `before` tokens precede
    the text. The first prediction is always that of the text's second token.
    """
    alphas = []
    totals = torch.zeros(len(PREDICTIONS), dtype=torch.float64)

    def on_heads(layer, heads, q, k, v, alpha):
        by_layer.append(alpha((1, 0)).cpu())

    for part in batches(tokens):
        by_layer = []
        states = model.hidden(part, on_heads=on_heads, on_state=on_state)[:, before:-1]
        targets = part[:, before + 1 :]
        for place, some in enumerate(PREDICTIONS):
            chosen = states[:, some].flatten(0, 1)
            totals[place] += model.summed_loss(chosen, targets[:, some].flatten()).item()
        alphas.append(torch.stack(by_layer, dim=1))  # (B, layers, H, 2)
    alpha_1, alpha_0 = torch.cat(alphas).unbind(-1)
    n, count = len(tokens), targets.shape[1]  # count: predictions of a sequence
    losses = {"loss": totals.sum().item() / (n * count), "loss_first": totals[0].item() / n}
    losses["loss_from_ninth"] = totals[2].item() / (n * (count - 8)) if count > 8 else None
    return alpha_1, alpha_0, losses


def by_token(model, tokens, builder):
    """A row for each token of the text: the builder's |activation| when this token comes first."""
    found = tokens.unique()
    with watch(model, builder) as activations:
        for part in batches(found[:, None]):
            model.hidden(part)
    sizes = torch.cat(activations).tolist()
    return [{"token": token, "builder_activation": size} for token, size in zip(found.tolist(), sizes)]


def names_of(units):
    """Neurons, (layer, unit) each, as LAYER/UNIT."""
    return " ".join(f"{layer}/{unit}" for layer, unit in units)
