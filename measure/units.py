"""Which neurons build the sink? What singles position 1 out, link by link? (SO; contributions are ours)"""

import contextlib
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from measure.attention import TINY, Means, batches, check_seen, disparity, ratio_of_first

LINKS = {  # SO's chain from averaging to the sink, by layer and position
    "std": "std of aggregated values by position, layer 1",
    "norm": "norm of the stream",
    "disparity": "the stream's largest / mean |dimension|",
    "value_norm": "norm of values",
    "key_alignment": "alignment of keys (1: all alike)",
    "alpha": "attention to the position",
}
COLUMNS = ("std_ratio", "disparity", "massive", "norm_ratio", "value_ratio", "key_alignment")  # by layer
COLUMNS += ("effective_rank", "output_tau", "alpha1")
SELECTIVITY = 20  # a selective builder is at least this many times as active as elsewhere,
LEAST_SHARE = 0.001  # and makes at least this share of the dimension (ours)
LEAST_DISPARITY = 50  # a layer makes a dimension dominate if it doubles disparity to above this (ours)


@dataclass
class Activity:
    """What a model does at position 1, on average over sequences; `observe` measures it.

    The *dimension* after a layer is the largest of the mean stream at position 1. A neuron *contributes* to
    it its activation at position 1 times its down weight to that dimension, times the dimension's sign; where
    a norm follows the MLP, the products are rescaled to what the MLP adds. *Builders* contribute most,
    *removers* subtract most. A builder that is much less active at other positions is *selective*.
    """

    model: object  # for its down weights
    state: Tensor  # the mean stream at position 1, (L + 1, d), the input first
    disparity: Tensor  # of the stream at position 1, (L + 1,)
    at_1: dict  # by layer: activations at position 1, (d_ff,)
    elsewhere: dict  # by layer: |activations| at the other positions, (d_ff,)
    mlp_output: dict  # by layer with a norm behind its MLP: what that adds to the mean stream there, (d,)

    @property
    def peak(self):
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
        """Each neuron's contribution, (d_ff,) by layer up to `last`, to the dimension after a layer."""
        dimension = self.dimension(layer)
        sign = self.state[layer, dimension].sign()
        found = {}
        for its_layer, activations in self.at_1.items():
            if last is None or its_layer <= last:
                products = activations * self.model.down(its_layer)[dimension].float().cpu() * sign
                if its_layer in self.mlp_output:  # the norm scales all products alike
                    products *= self.mlp_output[its_layer][dimension] * sign / products.sum()
                found[its_layer] = products
        return found

    def builders(self, layer, count):
        """The strongest builders, at most `count`, of the dimension after a layer: (layer, unit) each."""
        contributions = self.contributions(layer, layer)
        positive = sum((some > 0).sum().item() for some in contributions.values())
        return ranked(contributions, max(1, min(count, positive)))

    def removers(self, count):
        """The strongest removers of the peak's dimension, from all layers."""
        return ranked({layer: -some for layer, some in self.contributions(self.peak).items()}, count)

    def selective(self):
        """The selective builders of the peak's dimension, the strongest first."""
        needed = LEAST_SHARE * self.state[self.peak, self.dimension(self.peak)].abs()
        chosen = {}
        for layer, some in self.contributions(self.peak, self.peak).items():
            is_loud = self.at_1[layer].abs() >= SELECTIVITY * self.elsewhere[layer]
            chosen[layer] = some.where(is_loud & (some >= needed), 0)
        return ranked(chosen, sum((some > 0).sum().item() for some in chosen.values()))

    def describe(self, units):
        """A row for each (layer, unit). `down_share` is the dimension's share of its squared down weights."""
        dimension = self.dimension(self.peak)
        builds = self.contributions(self.peak)
        rows = []
        for layer, unit in units:
            squares = self.model.down(layer)[:, unit].float().square()
            row = {"layer": layer, "unit": unit, "dimension": dimension}
            row["first"] = self.at_1[layer][unit].abs().item()
            row["others"] = self.elsewhere[layer][unit].item()
            row["builds"] = builds[layer][unit].item()
            row["down_share"] = (squares[dimension] / squares.sum().clamp(min=TINY)).item()
            rows.append(row)
        return rows


class Chain(Means):
    """The means over sequences from which SO's links are computed; `observe` fills them in."""

    def on_state(self, layer, x) -> None:
        if layer > 0:  # 0 is the input
            flat = x.flatten(0, 1).double()  # (B T, d)
            sizes = x.float().abs()
            self.add("norm", layer, x.float().norm(dim=2))  # (T,)
            self.add("norm_ratio", layer, ratio_of_first(x))
            self.add("disparity", layer, disparity(x))  # (T,)
            least = sizes.flatten(1).median(1).values.mul(1000).clamp(min=100)[:, None]  # arXiv 2402.17762
            self.add("massive", layer, (sizes.amax(2) >= least).sum(1).float())
            self.add("mean", layer, x.double().mean(1))  # over positions, (d,)
            self.add("product", layer, (flat.T @ flat)[None] / x.shape[1])  # mean of h h^T, (d, d)

    def on_heads(self, layer, heads, q, k, v, alpha) -> None:
        self.add_heads(layer, heads, q, k, v, alpha)
        self.add("value_norm", layer, v.float().norm(dim=3).mean(1))  # (T,)
        self.add("value_ratio", layer, ratio_of_first(v).mean(1))
        self.add("key", layer, F.normalize(k.float(), dim=3))  # (G, T, Dh), each divided by its norm
        self.add("alpha", layer, alpha(range(1, k.shape[2] + 1)).mean(1))  # (T,)

    def links(self, model):
        """LINKS and COLUMNS by name and layer: by position, (T,), or a number."""
        links = defaultdict(dict, self.of)
        for layer in self.of["heads"]:
            links["std"][layer] = std = self.std(layer)
            links["std_ratio"][layer] = std[0] / std[1:].median()
            links["key_alignment"][layer] = self.of["key"][layer].norm(dim=2).mean(0)
            links["output_tau"][layer] = output_tau(model.output_weight(layer), self.std(layer, 1))
        for layer, product in self.of["product"].items():
            links["effective_rank"][layer] = effective_rank(self.of["mean"][layer], product)
        return links | {"alpha1": self.of["alpha"]}

    def rows(self, activity: Activity):
        """A row for each layer and position; and for each layer, with builders if a dimension dominates."""
        links = self.links(activity.model)
        positions, layers = [], []
        for layer, norm in links["norm"].items():
            for position in range(1, len(norm) + 1):
                key = {"layer": layer, "position": position}
                positions.append(key | numbers(links, LINKS, layer, position))
            row = {"layer": layer} | numbers(links, COLUMNS, layer) | {"dimension": None, "builders": None}
            if layer in activity.jumps():
                row["dimension"] = activity.dimension(layer)
                row["builders"] = names_of(activity.builders(layer, 4))
            layers.append(row)
        return positions, layers


def numbers(links, names, layer, position=1):
    """Some links of a layer at a position, by name; None where it has no such link, as without attention."""
    row = {}
    for name in names:
        found = links[name].get(layer)
        number = math.nan if found is None else found.flatten()[position - 1].item()
        row[name] = number if math.isfinite(number) else None  # of a zero matrix, for one
    return row


@torch.inference_mode()
def observe(model, tokens: Tensor, chain: Chain | None = None) -> Activity:
    """The Activity of a model on tokens (n, T); UserError if its states or neurons cannot be seen."""
    check_seen(model, "states", "units")
    means = Means(len(tokens))

    def on_units(layer, units, first):
        means.add("at_1", (layer, first), units[:, 0].float())
        means.add("elsewhere", (layer, first), units[:, 1:].float().abs().mean(1))

    def on_state(layer, x):
        means.add("state", layer, x[:, 0].float())
        means.add("disparity", layer, disparity(x[:, 0]))
        if chain is not None:
            chain.on_state(layer, x)

    with model.hidden_units(on_units):
        for part in batches(tokens):
            model.hidden(part, on_state=on_state, on_heads=None if chain is None else chain.on_heads)
    state = means.stack("state")
    at_1, elsewhere = (joined(means.of[name]) for name in ("at_1", "elsewhere"))
    mlp_output = {}
    for layer in model.normed_layers:
        with model.hidden_units(zero_units([(layer, unit) for unit in range(len(at_1[layer]))])):
            for part in batches(tokens[:, :1]):  # position 1 sees no other
                states = {}
                model.hidden(part, on_state=states.__setitem__)
                means.add("silent", layer, states[layer][:, 0].float())
        mlp_output[layer] = state[layer] - means.of["silent"][layer]
    return Activity(model, state, means.stack("disparity"), at_1, elsewhere, mlp_output)


def joined(parts):
    """The neurons of each layer, (d_ff,), of parts by (layer, number of the first neuron)."""
    layers = defaultdict(list)
    for layer, first in sorted(parts):
        layers[layer].append(parts[layer, first])
    return {layer: torch.cat(some) for layer, some in layers.items()}


@torch.inference_mode()
def normed_disparity(model, tokens: Tensor):
    """The largest disparity of all layers at position 1, behind a block's norm, which it calls first (SO)."""
    means = Means(len(tokens))
    called = set()  # layers, in a pass

    def on_part(layer, part, inputs, output):
        if layer not in called and getattr(output, "ndim", 0) == 3:
            called.add(layer)
            means.add("disparity", layer, disparity(output[:, 0]))

    with contextlib.ExitStack() as stack:
        for layer, block in enumerate(model.blocks, start=1):
            for part in block.children():
                stack.enter_context(part.register_forward_hook(partial(on_part, layer)))
        for some in batches(tokens):
            called.clear()
            model.hidden(some)
    return means.stack("disparity").max().item()


def ranked(scores, count):
    """The (layer, unit) of the `count` largest scores, the largest first; `scores` are (d_ff,) by layer."""
    order = torch.cat(list(scores.values())).argsort(descending=True)[:count].tolist()
    names = [(layer, unit) for layer, some in scores.items() for unit in range(len(some))]
    return [names[place] for place in order]


def zero_units(units):
    """An `on_units` that ablates neurons, (layer, unit) each: it sets them to zero."""

    def on_units(layer, values, first):
        last = first + values.shape[-1]
        here = [unit - first for its_layer, unit in units if its_layer == layer and first <= unit < last]
        if here:
            return values.index_fill(-1, torch.tensor(here, device=values.device), 0)

    return on_units


@contextlib.contextmanager
def watch(model, unit):
    """A context whose list collects the |activations|, (B, T), of a neuron (layer, unit)."""
    activations = []

    def on_units(layer, units, first):
        if layer == unit[0] and 0 <= unit[1] - first < units.shape[-1]:
            activations.append(units[..., unit[1] - first].float().abs().cpu())

    with model.hidden_units(on_units):
        yield activations


def output_tau(weight: Tensor, std: Tensor):
    """Kendall's tau between the column norms of W_O (d, H Dh) and the std (H, Dh) of its inputs, or None."""
    from scipy.stats import kendalltau

    if weight is not None:
        norms = weight.float().norm(dim=0).cpu().numpy()
        return torch.tensor(kendalltau(norms, std.flatten().numpy()).statistic)


def effective_rank(mean: Tensor, product: Tensor):
    """How many directions, of d, the centred states have: exp of the entropy of their singular values (ours).

    `mean` (d,) is the mean state and `product` (d, d) the mean outer product of states, both in float64.
    """
    values = torch.linalg.eigvalsh(product - torch.outer(mean, mean)).clamp(min=0).sqrt()
    return torch.special.entr(values / values.sum()).sum().exp()


def names_of(units):
    """Neurons, (layer, unit) each, as LAYER/UNIT."""
    return " ".join(f"{layer}/{unit}" for layer, unit in units)
