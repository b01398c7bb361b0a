"""Which neurons build the sink? They make one dimension of the stream explode at position 1 (SO).

After a layer, averaged over sequences, the stream at position 1 is largest in a dimension D, with sign s.

    contribution of a neuron   s * its activation at position 1 * its down weight to D (our definition)
    builders, removers         contribute most, in layers up to that one; subtract most, in any layer
    selective builder          20 times as active as elsewhere, and makes 0.1 % of the dimension at least

A neuron is (layer, unit): layers count from 1, units from 0.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from measure.attention import Means, batches, check_seen

SELECTIVITY, LEAST_SHARE = 20, 0.001  # of a selective builder (ours)
by_layer = partial(pad_sequence, batch_first=True)  # (L, d_ff): zeros where a layer has fewer neurons


def disparity(states: Tensor) -> Tensor:
    """max |h| / mean |h| over the dimensions of states (..., d) (SO)."""
    sizes = states.float().abs()
    return sizes.amax(-1) / sizes.mean(-1).clamp(min=1e-12)


@dataclass
class Activity:
    """What a model does at position 1, on average over sequences; `observe` measures it."""

    model: object  # for its down weights
    layer: int  # after which the dimension is looked for: where disparity is largest
    state: Tensor  # the stream at position 1, (L + 1, d), the input first
    disparity: Tensor  # of the stream at position 1, (L + 1,)
    at_1: Tensor  # neurons' activations at position 1, (L, d_ff)
    elsewhere: Tensor  # their |activations| at the other positions, (L, d_ff)
    # By layer with a norm behind its MLP, as Gemma's, of each sequence: neurons at position 1, (n, d_ff), and
    # what the MLP adds to the state, (n, d)
    normed: dict

    @property
    def dimension(self):
        """The largest dimension of the stream at position 1 after `layer`."""
        return self.state[self.layer].abs().argmax().item()

    def contributions(self):
        """What each neuron contributes to the dimension, (L, d_ff)."""
        dimension = self.dimension
        sign = self.state[self.layer, dimension].sign()
        layers = range(1, len(self.state))
        down = by_layer([self.model.down(layer)[dimension].float().cpu() for layer in layers])
        products = self.at_1 * down * sign
        for layer, (units, added) in self.normed.items():
            each = units * down[layer - 1][: units.shape[1]] * sign  # (n, d_ff)
            sums = each.sum(1, keepdim=True)
            # A norm scales all products of a sequence alike, each sequence's by a factor of its own.
            scale = added[:, dimension, None] * sign / sums.where(sums.abs() > 1e-12, 1)
            products[layer - 1, : units.shape[1]] = (each * scale).mean(0)
        return products

    def builders(self, count):
        """The strongest builders, at most `count`, the strongest first."""
        found = self.contributions()[: self.layer]
        positive = (found > 0).sum().item()
        return ranked(found, max(1, min(count, positive)))

    def removers(self, count):
        """The strongest removers, from all layers."""
        return ranked(-self.contributions(), count)

    def selective(self):
        """The selective builders, the strongest first."""
        found = self.contributions()[: self.layer]
        makes_much = found >= LEAST_SHARE * self.state[self.layer, self.dimension].abs()
        is_louder = self.at_1.abs() >= SELECTIVITY * self.elsewhere
        is_selective = makes_much & is_louder[: self.layer]
        return ranked(found.where(is_selective, 0), is_selective.sum())


def ranked(scores: Tensor, count):
    """The neurons of the `count` largest scores (L, d_ff), the largest first."""
    order = scores.flatten().argsort(descending=True)[:count].tolist()
    return [(1 + place // scores.shape[1], place % scores.shape[1]) for place in order]


@torch.inference_mode()
def observe(model, tokens: Tensor) -> Activity:
    """The Activity of a model on tokens (n, T); UserError if its states or neurons cannot be seen."""
    check_seen(model, "states", "units")
    means = Means(len(tokens))
    now = {}  # of the batch at work, neurons of layers with a norm behind their MLPs
    normed = {layer: ([], []) for layer in getattr(model, "normed_layers", ())}  # a Lens

    def on_units(layer, units):  # (B, T, d_ff)
        if layer in normed:  # of several parts of an MLP one after another
            now[layer] = now.get(layer, 0) + units[:, 0].float().cpu()
        means.add(layer, at_1=units[:, 0].float(), elsewhere=units[:, 1:].float().abs().mean(1))

    def on_state(layer, x):  # (B, T, d)
        if layer in normed:
            normed[layer][1].append(x[:, 0].float().cpu())
        means.add(layer, state=x[:, 0].float(), disparity=disparity(x[:, 0]))

    with model.hidden_units(on_units):
        for part in batches(tokens):
            model.hidden(part, on_state=on_state)
            for layer in normed:
                normed[layer][0].append(now.pop(layer))
    state, sizes = means.stack("state"), means.stack("disparity")  # (L + 1, d) and (L + 1,)
    layers, none = range(1, len(state)), torch.zeros(0)  # a layer of others' models may have none
    at_1 = by_layer([means.of[layer].get("at_1", none) for layer in layers])
    elsewhere = by_layer([means.of[layer].get("elsewhere", none) for layer in layers])
    for layer, (units, states) in normed.items():
        normed[layer] = (torch.cat(units), torch.cat(states) - model.without_units(layer, tokens[:, :1]))
    return Activity(model, 1 + sizes[1:].argmax().item(), state, sizes, at_1, elsewhere, normed)


def zero_units(neurons):
    """An `on_units` that ablates neurons: it sets them to zero."""

    def on_units(layer, units):
        here = [unit for its_layer, unit in neurons if its_layer == layer]
        if here:
            return units.index_fill(-1, torch.tensor(here, device=units.device), 0)

    return on_units
