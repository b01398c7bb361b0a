"""Which neurons build the sink, link by link? (SO's chain; contributions and removers are ours)"""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

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
SELECTIVITY = 20  # a *selective* builder is at least this many times as active as elsewhere,
LEAST_SHARE = 0.001  # and makes at least this share of the dimension (ours)
LEAST_DISPARITY = 50  # a layer makes a dimension dominate if it doubles disparity to above this (ours)


class Activity(Means):
    """Means over sequences (n, T) of what a model does at position 1, and of SO's chain if asked for.

    The chain, as the paper tells it: a head's output is a mean of values. At position 1 it is a single value,
    so its `std` over sequences, heads and dimensions is largest. W_O is said to amplify what varies most
    (`output_tau`). This makes the *builders*, a few neurons, fire at position 1 alone. They make one
    dimension of the stream huge (`norm`, `disparity`), and RMSNorm shrinks all others. So first tokens have
    one key (`key_alignment`) and short values (`value_norm`), and queries find them (`alpha`).

    The sink's dimension after a layer is the largest of the mean stream at position 1. A neuron contributes
    its activation times its down weight to that dimension, times the dimension's sign; where a norm follows
    the MLP, these products are rescaled to what the MLP adds. *Removers* subtract most (ours).
    """

    def __init__(self, model, tokens: Tensor):
        super().__init__(len(tokens))
        self.model = model

    def see_units(self, layer, units, offset) -> None:
        self.add("at_1", (layer, offset), units[:, 0].float())
        self.add("elsewhere", (layer, offset), units[:, 1:].float().abs().mean(1))

    def see_first(self, layer, x) -> None:
        self.add("state_1", layer, x[:, 0].float())
        self.add("disparity", layer, disparity(x))  # (T,)

    def see_stream(self, layer, x) -> None:
        self.see_first(layer, x)
        if layer > 0:  # 0 is the input
            flat = x.flatten(0, 1).double()  # (B T, d)
            sizes = x.float().abs()
            self.add("norm", layer, x.float().norm(dim=2))  # (T,)
            self.add("norm_ratio", layer, ratio_of_first(x))
            least = sizes.flatten(1).median(1).values.mul(1000).clamp(min=100)[:, None]  # arXiv 2402.17762
            self.add("massive", layer, (sizes.amax(2) >= least).sum(1).float())
            self.add("mean", layer, x.double().mean(1))  # over positions, (d,)
            self.add("product", layer, (flat.T @ flat)[None] / x.shape[1])  # mean of h h^T, (d, d)

    def see_heads(self, layer, heads, q, k, v, alpha) -> None:
        self.add_heads(layer, heads, q, k, v, alpha)
        self.add("value_norm", layer, v.float().norm(dim=3).mean(1))  # (T,)
        self.add("value_ratio", layer, ratio_of_first(v).mean(1))
        self.add("key", layer, F.normalize(k.float(), dim=3))  # (G, T, Dh), each divided by its norm
        self.add("alpha", layer, alpha(range(1, k.shape[2] + 1)).mean(1))  # (T,)

    def finish(self) -> None:
        """Join parts, and compute the links that are not means."""
        self.state = self.stack("state_1")  # the mean stream at position 1, (L + 1, d), the input first
        self.disparity = self.stack("disparity")[:, 0]  # of that stream, (L + 1,)
        self.at_1 = self.joined("at_1")  # by layer: activations at position 1, (d_ff,)
        self.elsewhere = self.joined("elsewhere")  # |activations| at the other positions
        for layer in self.of["heads"]:
            self.of["std"][layer] = std = self.std(layer)  # (T,)
            self.of["std_ratio"][layer] = std[0] / std[1:].median()
            self.of["alpha1"][layer] = self.of["alpha"][layer][0]
            self.of["key_alignment"][layer] = self.of["key"][layer].norm(dim=2).mean(0)  # (T,)
            self.of["output_tau"][layer] = output_tau(self.model.output_weight(layer), self.std(layer, 1))
        for layer, product in self.of["product"].items():
            self.of["effective_rank"][layer] = effective_rank(self.of["mean"][layer], product)

    def joined(self, name):
        """The neurons of each layer, joined from parts whose keys are (layer, number of the first)."""
        layers = {}
        for layer, offset in sorted(self.of[name]):
            layers.setdefault(layer, []).append(self.of[name][layer, offset])
        return {layer: torch.cat(some) for layer, some in layers.items()}

    def links(self, names, layer, position=1):
        """Numbers of a layer at a position, by name; None where a layer has no such link."""
        row = {}
        for name in names:
            found = self.of[name].get(layer)
            number = math.nan if found is None else found.flatten()[position - 1].item()
            row[name] = number if math.isfinite(number) else None  # of a zero matrix, for one
        return row

    def by_position(self):
        """A row of links for each layer and position."""
        rows = []
        for layer, norm in self.of["norm"].items():
            for position in range(1, len(norm) + 1):
                rows.append({"layer": layer, "position": position} | self.links(LINKS, layer, position))
        return rows

    def by_layer(self):
        """A row of links for each layer, with builders if the layer makes a dimension dominate."""
        rows = []
        for layer in self.of["norm"]:
            row = {"layer": layer} | self.links(COLUMNS, layer) | {"dimension": None, "builders": None}
            if layer in self.jumps():
                row |= {"dimension": self.dimension(layer), "builders": names_of(self.builders(layer, 4))}
            rows.append(row)
        return rows

    @property
    def layer(self):
        """The layer after which disparity at position 1 is largest."""
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
                if its_layer in self.of["silent"]:
                    total = (self.state[its_layer] - self.of["silent"][its_layer])[dimension] * sign
                    added[its_layer] *= total / added[its_layer].sum()
        return added

    def builders(self, layer, count):
        """The strongest builders, at most `count`, of the dimension after a layer: (layer, unit) each."""
        added = self.contributions(layer, layer)
        positive = sum((some > 0).sum().item() for some in added.values())
        return ranked(added, max(1, min(count, positive)))

    def removers(self, count):
        """The strongest removers of `self.layer`'s dimension, from all layers."""
        return ranked({layer: -added for layer, added in self.contributions(self.layer).items()}, count)

    def selective(self):
        """The selective builders, which build at position 1 alone, the strongest first."""
        dimension = self.dimension(self.layer)
        needed = LEAST_SHARE * self.state[self.layer, dimension].abs()
        chosen = self.contributions(self.layer, self.layer)
        for layer, added in chosen.items():
            is_quiet = self.at_1[layer].abs() < SELECTIVITY * self.elsewhere[layer]
            added[is_quiet | (added < needed)] = 0
        return ranked(chosen, sum((added > 0).sum().item() for added in chosen.values()))

    def describe(self, units):
        """A row for each (layer, unit). `down_share` is the dimension's share of its squared down weights."""
        dimension = self.dimension(self.layer)
        builds = self.contributions(self.layer)
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


@torch.inference_mode()
def observe(model, tokens: Tensor, with_chain=False) -> Activity:
    """The Activity of a model on tokens (n, T); UserError if its states or neurons cannot be seen."""
    check_seen(model, "states", "units")
    activity = Activity(model, tokens)
    on_state = activity.see_stream if with_chain else activity.see_first
    on_heads = activity.see_heads if with_chain else None
    with model.hidden_units(activity.see_units):
        for part in batches(tokens):
            model.hidden(part, on_state=on_state, on_heads=on_heads)
    activity.finish()
    for layer in model.normed_layers:
        with model.hidden_units(zero_units([(layer, unit) for unit in range(len(activity.at_1[layer]))])):
            for part in batches(tokens[:, :1]):
                states = {}
                model.hidden(part, on_state=states.__setitem__)
                activity.add("silent", layer, states[layer][:, 0].float())
    return activity


@torch.inference_mode()
def normed_disparity(model, tokens: Tensor):
    """The disparity at position 1, the largest of all layers, behind a block's first part, its norm (SO)."""
    means = Means(len(tokens))
    block_of = {part: block for block in model.blocks for part in block.children()}

    def note(part, inputs, output):
        block = block_of.get(part)
        if block in waiting and getattr(output, "ndim", 0) == 3:
            waiting.remove(block)
            means.add("disparity", block, disparity(output[:, 0]))

    with register_module_forward_hook(note):
        for some in batches(tokens):
            waiting = {*model.blocks}
            model.hidden(some)
    return means.stack("disparity").max().item()


def ranked(scores, count):
    """The (layer, unit) of the `count` largest scores, the largest first; `scores` are (d_ff,) by layer."""
    order = torch.cat(list(scores.values())).argsort(descending=True)[:count].tolist()
    names = [(layer, unit) for layer, some in scores.items() for unit in range(len(some))]
    return [names[place] for place in order]


def zero_units(units):
    """An `on_units` that ablates neurons, (layer, unit) each: it sets them to zero."""

    def on_units(layer, values, offset):
        last = offset + values.shape[-1]
        here = [unit - offset for its_layer, unit in units if its_layer == layer and offset <= unit < last]
        if here:
            return values.index_fill(-1, torch.tensor(here, device=values.device), 0)

    return on_units


@contextlib.contextmanager
def watch(model, unit):
    """A context whose list collects the |activations|, (B, T), of a neuron (layer, unit)."""
    activations = []

    def on_units(layer, units, offset):
        if layer == unit[0] and 0 <= unit[1] - offset < units.shape[-1]:
            activations.append(units[..., unit[1] - offset].float().abs().cpu())

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
