"""What singles position 1 out, layer by layer? `sinks.py anatomy` follows the sinks paper's chain of causes.

1. A head averages values. At position 1 there is only one, so what it writes varies most there: `std`.
2. A few neurons answer to that, and fire at position 1 alone (measure/units.py).
3. They write into one dimension of the stream, which outgrows the others: `norm`, `disparity`.
4. Behind the next norm all first tokens then have nearly one key: `key_alignment`, the norm of the mean unit
   key, is 1 if all agree (ours). Their values are short: `value_norm`.
5. So queries find the position: `alpha`.
"""

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.figures import lines_of, new_figure, save_figure
from measure.attention import Means, batches
from measure.units import Activity, disparity, observe
from sources.inputs import TextExperiment, TextSettings, read_tokens

LINKS = {  # of the chain, by layer and position, and their titles in the figure
    "std": "std of aggregated values by position, layer 1",
    "norm": "norm of the stream",
    "disparity": "the stream's largest / mean |dimension|",
    "value_norm": "norm of values",
    "key_alignment": "alignment of keys (1: all alike)",
    "alpha": "attention to the position",
}
COLUMNS = ("disparity", "massive", "norm_ratio", "value_ratio", "key_alignment", "effective_rank")  # by layer
COLUMNS += ("output_tau", "alpha1")  # where a link has positions, that of position 1
LEAST_DISPARITY = 50  # a layer makes a dimension dominate if it doubles disparity to above this (ours)


@torch.inference_mode()
def anatomy(settings: TextSettings):
    """What singles position 1 out? SO's chain by layer, and the neurons behind it (half a minute)"""
    experiment = TextExperiment("anatomy", "SO", settings)
    rows, layers, neurons = [], [], []
    for named, spec, model in experiment.models():
        tokens = read_tokens(experiment.settings, spec, settings.sequence_length)
        activity = observe(model, tokens)
        found = chain(model, tokens)
        rows += [named | row for row in rows_by_position(found)]
        layers += [named | row for row in rows_by_layer(found, activity)]
        strongest = activity.builders(10) + activity.removers(5)[::-1]  # the strongest remover last
        neurons += [named | row for row in describe(activity, strongest)]
    for row in layers:
        if row["builders"]:
            print("{checkpoint}: {builders} build dimension {dimension} by layer {layer}".format(**row))
    columns = ("checkpoint", "layer", *COLUMNS)
    result = experiment.save(rows, columns, layers, layers=layers, builders=neurons)
    draw_chain(experiment.folder / "anatomy.png", rows)
    return result


@torch.inference_mode()
def chain(model, tokens: Tensor):
    """By layer, a dictionary of LINKS, by position (T,), and of COLUMNS, on average over tokens (n, T).

    Links of attention are missing in a layer that does not attend.
    """
    means = Means(len(tokens))
    positions = range(1, tokens.shape[1] + 1)

    def on_heads(layer, heads, q, k, v, alpha):
        add_heads(means, layer, heads)
        means.add(
            layer,
            value_norm=v.float().norm(dim=3).mean(1),  # (T,)
            value_ratio=ratio_of_first(v).mean(1),
            key=F.normalize(k.float(), dim=3),  # (G, T, Dh), each divided by its norm
            alpha=alpha(positions).mean(1),  # (T,)
        )

    def on_state(layer, x):
        if layer > 0:  # 0 is the input
            flat = x.flatten(0, 1).double()  # (B T, d)
            means.add(
                layer,
                norm=x.float().norm(dim=2),  # (T,)
                norm_ratio=ratio_of_first(x),
                disparity=disparity(x),  # (T,)
                massive=num_massive(x),
                mean=x.double().mean(1),  # over positions, (d,)
                product=(flat.T @ flat)[None] / x.shape[1],  # mean of h h^T, (d, d)
            )

    for part in batches(tokens):
        model.hidden(part, on_state=on_state, on_heads=on_heads)
    for layer, found in means.of.items():
        found["effective_rank"] = effective_rank(found["mean"], found["product"])
        if "heads" in found:
            found["std"] = std_of_heads(found)  # (T,)
            found["output_tau"] = output_tau(model.output_weight(layer), std_of_heads(found, 1))
            found["key_alignment"] = found["key"].norm(dim=2).mean(0)  # (T,)
            found["alpha1"] = found["alpha"]
    return means.of


def ratio_of_first(vectors: Tensor) -> Tensor:
    """The norm at position 1 divided by the median norm elsewhere, of vectors (..., T, D)."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)
    return norms[..., 0] / norms[..., 1:].median(dim=-1).values.clamp(min=1e-12)


def num_massive(x: Tensor) -> Tensor:
    """How many tokens of each sequence, (B,), have a massive activation in the stream (B, T, d).

    It is at least 100, and 1,000 times the median over tokens and dimensions (arXiv 2402.17762).
    """
    sizes = x.float().abs()
    least = sizes.flatten(1).median(1).values.mul(1000).clamp(min=100)  # (B,)
    return (sizes.amax(2) >= least[:, None]).sum(1).float()


def add_heads(means: Means, layer, heads: Tensor, *_) -> None:
    """Add the outputs of heads (B, H, T, Dh), for `std_of_heads`."""
    means.add(layer, heads=heads.double(), squared_heads=heads.double().square())


def std_of_heads(found, dims=(0, 2)) -> Tensor:
    """Standard deviation of heads' outputs over sequences and `dims` of (H, T, Dh); by default (T,)."""
    mean, square = found["heads"].mean(dims), found["squared_heads"].mean(dims)
    return (square - mean.square()).clamp(min=0).sqrt()


def output_tau(weight: Tensor, std: Tensor):
    """Kendall's tau between the column norms of W_O (d, H Dh) and the std (H, Dh) of its inputs, or None."""
    from scipy.stats import kendalltau

    if weight is not None:
        norms = weight.float().norm(dim=0).cpu().numpy()
        return torch.tensor(kendalltau(norms, std.flatten().numpy()).statistic)


def effective_rank(mean: Tensor, product: Tensor):
    """How many directions, of d, the centred states have: exp of the singular values' entropy (Roy, Vetterli
    2007).

    `mean` (d,) is the mean state and `product` (d, d) the mean outer product of states, both in float64.
    """
    values = torch.linalg.eigvalsh(product - torch.outer(mean, mean)).clamp(min=0).sqrt()
    return torch.special.entr(values / values.sum()).sum().exp()


def rows_by_position(found):
    """A row for each layer and position of a `chain`: LINKS."""
    for layer, links in found.items():
        for position in range(1, len(links["norm"]) + 1):
            yield {"layer": layer, "position": position} | numbers(links, LINKS, position)


def names_of(neurons):
    """Neurons as LAYER/UNIT."""
    return " ".join(f"{layer}/{unit}" for layer, unit in neurons)


def rows_by_layer(found, activity: Activity):
    """A row for each layer of a `chain`: COLUMNS, and builders where the layer makes a dimension dominate."""
    rows = []
    for layer, links in found.items():
        row = {"layer": layer} | numbers(links, COLUMNS) | {"dimension": None, "builders": None}
        if layer in jumps(activity):
            there = replace(activity, layer=layer)
            row |= {"dimension": there.dimension, "builders": names_of(there.builders(4))}
        rows.append(row)
    return rows


def numbers(links, names, position=1):
    """Some links of a layer at a position, by name; None where it has no such link, or it is not finite."""
    row = {}
    for name in names:
        link = links.get(name)
        number = math.nan if link is None else link.flatten()[position - 1].item()
        row[name] = number if math.isfinite(number) else None  # of a zero matrix, for one
    return row


def jumps(activity: Activity):
    """The layers that make a dimension dominate."""
    after = activity.disparity[1:]
    is_jump = (after >= 2 * activity.disparity[:-1]) & (after > LEAST_DISPARITY)
    return (1 + is_jump.nonzero().flatten()).tolist()


def describe(activity: Activity, neurons):
    """A row for each neuron. `down_share` is the dimension's share of its squared down weights."""
    dimension = activity.dimension
    builds = activity.contributions()
    rows = []
    for layer, unit in neurons:
        squares = activity.model.down(layer)[:, unit].float().square()
        row = {"layer": layer, "unit": unit, "dimension": dimension}
        row["first"] = activity.at_1[layer - 1, unit].abs().item()
        row["others"] = activity.elsewhere[layer - 1, unit].item()
        row["builds"] = builds[layer - 1, unit].item()
        row["down_share"] = (squares[dimension] / squares.sum().clamp(min=1e-12)).item()
        rows.append(row)
    return rows


def draw_chain(path, rows) -> None:
    """Draw the links of SO's chain, a colour per model, from rows by layer and position."""
    question = "What singles position 1 out, layer by layer? (dotted: median of the other positions)"
    figure, grid = new_figure(question, 2, 3, height=3)
    for axes, (key, title) in zip(grid.flat, LINKS.items()):
        axes.set_title(title, fontsize=10)
        scale = "linear" if key in ("key_alignment", "alpha") else "log"
        axes.set(xlabel="position" if key == "std" else "layer", yscale=scale)
        for label, points in lines_of(rows, "checkpoint"):
            link = np.array([point[key] for point in points], float)  # NaN in layers without attention
            link = link.reshape(points[-1]["layer"], -1)  # (L, T)
            if key == "std":
                first = np.isfinite(link).any(1).argmax()
                axes.loglog(range(1, link.shape[1] + 1), link[first], label=label)
                continue
            layers = range(1, len(link) + 1)
            (line,) = axes.plot(layers, link[:, 0], "o-", ms=3)
            axes.plot(layers, np.median(link[:, 1:], axis=1), ":", color=line.get_color())
    save_figure(figure, path, grid[0, 0])
