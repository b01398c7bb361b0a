"""How is a result drawn? What was measured in colour, theory dashed in black, from the points of the JSON."""

import itertools
import textwrap

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from scipy.cluster.hierarchy import dendrogram, linkage
from scipy.spatial.distance import squareform

from lib.files import atomic_file
from lib.runtime import rank

rcParams.update({"text.parse_math": False, "lines.markersize": 5, "lines.linewidth": 2.2})  # $ in names
BLUE = "#0072B2"  # this palette is safe for the colour-blind (Okabe and Ito)
VERMILION = "#D55E00"
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("--", ":", "-.")  # of the first, the second, the third theory
LABELS = {  # of axes that several figures have; of any other the key of its values
    "mean_cosine": "mean cosine between sequences",
    "sequence_length": "tokens in a sequence",
    "step": "training step",
    "position": "position i",
    "d_model": "width d",
}


class PlainLogFormatter(LogFormatter):
    """Ticks between powers of ten where there is room, as 0.6, not 6e-01."""

    def __call__(self, x, pos=None):
        """The text of a tick."""
        return f"{x:g}" if super().__call__(x, pos) else ""


def curves(
    points,
    path,
    *,
    x,
    y,
    series,
    title="",
    xlabel=None,
    ylabel=None,
    theories=None,
    panel="",
    band="",
    band_label="",
    log="",
    style="o-",
    ticks=(),
    share="xy",
    marked=None,
    lowest=None,
    panels_in_a_row=3,
) -> None:
    """Draw `y` over `x`, a colour for each value of `series`, a panel for each value of `panel`.

    `theories` maps the keys that hold theories to their legends; a point may have None. `band` is the key of
    a half width to shade. `log` names the logarithmic axes and `share` those that panels have in common:
    "x", "y", "xy" or "". The points at x = `marked` get a large marker, and the y-axes begin at `lowest`. An
    axis without a label is named by LABELS.
    """
    table = pd.DataFrame(points)
    panels = list(table.groupby(panel, sort=False)) if panel else [("", table)]
    names = list(table[series].unique())
    columns = min(panels_in_a_row, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.0 + 4.0 * columns, 3.8 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex="x" in share, sharey="y" in share).flatten()
    for place in range(len(panels), len(grid)):
        grid[place].set_axis_off()
        grid[place - columns].tick_params(labelbottom=True)  # the lowest of its column now
    for axes, (value, part) in zip(grid, panels):
        for colour, name in zip(itertools.cycle(COLOURS), names):
            line = part[part[series] == name]
            label = str(name).replace("_", " ")
            axes.plot(line[x], line[y], style, color=colour, label=label)
            at_mark = line[line[x] == marked]
            axes.plot(at_mark[x], at_mark[y], "o", color=colour, markersize=9)
            if band:
                low = line[y] - line[band]
                high = line[y] + line[band]
                axes.fill_between(line[x], low, high, color=colour, alpha=0.15, linewidth=0)
            for dash, key in zip(DASHES, theories or {}):
                law = line.dropna(subset=key).sort_values(x)
                axes.plot(law[x], law[key].astype(float), "k" + dash, linewidth=1.1, zorder=3)
        if panel:
            heading = value if isinstance(value, str) else f"{panel} {value}".replace("_", " ")
            axes.set_title(heading)
        style_axes(axes, table[x], log, ticks)
    if lowest is not None:
        for axes in grid:
            axes.set_ylim(bottom=lowest)
    if band:
        grid[0].fill_between([], [], color="grey", alpha=0.3, linewidth=0, label=band_label)
    for dash, legend in zip(DASHES, (theories or {}).values()):
        grid[0].plot([], [], "k" + dash, linewidth=1.1, label=legend)
    if marked is not None:
        grid[0].plot([], [], "o", color="grey", markersize=9, label=f"{LABELS.get(x, x).split()[0]} {marked}")
    if title:
        figure.suptitle(title, fontsize=12)
    figure.supxlabel(LABELS.get(x, x) if xlabel is None else xlabel, fontsize=10)
    figure.supylabel(LABELS.get(y, y) if ylabel is None else ylabel, fontsize=10)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside center right", frameon=False, fontsize=9)
    save_figure(figure, path)


def evidence(path, panels) -> None:
    """Draw what tells kin from strangers, a row for each (title, layers, points, layer_map) of `panels`.

    `layers` are the rows of a census, `layer_map` is its map, and `points` have the `share` of `coordinates`
    at each `correlation`.
    """
    figure = Figure(figsize=(14, 0.8 + 2.6 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 3, squeeze=False)
    for axes in grid[1:, 2]:
        axes.sharey(grid[0, 2])
    for (units, heat, coordinates), (title, layers, points, layer_map) in zip(grid, panels):
        draw_units(units, layers)
        units.set_title(title, loc="left")
        draw_layer_map(figure, heat, layer_map)
        heat.set_title("layers")
        coordinates.set_title("coordinates of weights")
        for kind, colour in (("matched", BLUE), ("mismatched", VERMILION)):
            line = [point for point in points if point["coordinates"] == kind and point["share"] > 0]
            x = [point["correlation"] for point in line]
            coordinates.plot(x, [point["share"] for point in line], ".-", color=colour, alpha=0.8, label=kind)
        coordinates.set(xlim=(-1, 1), xlabel="correlation", ylabel="% of coordinates")
        coordinates.set_xticks((-1, -0.5, 0, 0.5, 1))
        for axes, values, what in (
            (units, layers, "hidden units"),
            (heat, layers, "layers"),
            (coordinates, points, "coordinates"),
        ):
            axes.spines[["top", "right"]].set_visible(False)
            if not values:
                axes.text(0.5, 0.5, f"no {what} to compare", transform=axes.transAxes, ha="center")
    for axes in (grid[0, 0], grid[0, 2]):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def draw_units(axes, layers) -> None:
    """What share of each MLP's units was found, beside what chance gives."""
    numbers = range(1, len(layers) + 1)
    shares = {"found": [], "by_chance": [], "expected": []}
    for layer in layers:
        for key, share in shares.items():
            share.append(100 * layer[key] / max(1, layer["units"]))
    axes.plot(numbers, shares["found"], "o", color=BLUE, label="found again", zorder=4)
    axes.plot(numbers, shares["by_chance"], "x", color=VERMILION, label="tokens permuted", zorder=4)
    axes.plot(numbers, shares["expected"], "k--", linewidth=1.1, label="strangers expected")
    axes.set(ylim=(-5, 105), xlabel="MLP of the suspect", ylabel="% of units found again")
    axes.locator_params(axis="x", integer=True)


def draw_layer_map(figure, axes, layer_map) -> None:
    """What share of units is found, for each MLP of the base and of the suspect."""
    if not layer_map:
        return
    shares = 100 * np.array(layer_map["share"])
    image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=100, aspect="auto", origin="lower")
    for axis, names in ((axes.xaxis, layer_map["suspect"]), (axes.yaxis, layer_map["base"])):
        names = [name.replace("layer ", "").replace(", expert ", ".") for name in names]
        every = -(-len(names) // 12)  # more do not fit
        axis.set_ticks(range(0, len(names), every), names[::every])
    axes.set(xlabel="layer of the suspect", ylabel="layer of the base")
    figure.colorbar(image, ax=axes, label="% found again")


def layer_maps(path, panels) -> None:
    """Draw a heat map of layers for each (row, layer_map) of `panels`, with the row's sentence above it."""
    columns = 3
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 4.2 * rows), layout="constrained")
    for axes, (row, layer_map) in zip(figure.subplots(rows, columns, squeeze=False).flatten(), panels):
        draw_layer_map(figure, axes, layer_map)
        axes.set_title(f"{row['recipe']}:\n{textwrap.fill(row['sentence'], 48)}", fontsize=10, loc="left")
        axes.set_ylabel(f"layer of the {row['base']}")
    save_figure(figure, path)


def strengths(path, rows) -> None:
    """Draw what tests find of a changed child, a column for each `change`: units found above, z below."""
    changes = list(pd.DataFrame(rows).groupby("change", sort=False))
    widths = [2 + len(part) for _, part in changes]
    figure = Figure(figsize=(0.33 * sum(widths), 6), layout="constrained")
    grid = figure.subplots(2, len(changes), sharex="col", sharey="row", width_ratios=widths, squeeze=False)
    lines = {"body_z": "weights", "relabel_z": "states", "closed_form_z": "the paper's closed form"}
    for above, below, (change, part) in zip(*grid, changes):
        places = range(len(part))
        has_order = not part["strength"].map(type).eq(str).any()
        style = "o-" if has_order else "o"
        above.plot(places, 100 * part["units_share"].astype(float), style, color=BLUE, label="hidden units")
        above.axhline(20, color="k", linestyle="--", linewidth=1.1, label="kin from here on")
        for colour, (key, label) in zip(COLOURS[1:], lines.items()):
            below.plot(places, part[key].astype(float), style, color=colour, label=label)
        if part[list(lines)].isna().all(axis=None):
            below.text(0.5, 0.5, "no common\ncoordinates", transform=below.transAxes, ha="center", fontsize=9)
        below.axhline(4.75, color="k", linestyle="--", linewidth=1.1, label="p = 1e-6")
        below.set_yscale("symlog", linthresh=5)
        below.yaxis.set_major_formatter("{x:g}")
        texts = [text if isinstance(text, str) else f"{text:g}" for text in part["strength"]]
        below.set_xticks(places, texts, rotation=90)
        below.set_xlabel(change)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Which test still recognises a child that was changed?")
    grid[0, 0].set(ylim=(-4, 104), ylabel="% of hidden units found")
    grid[1, 0].set_ylabel("z of coordinates")
    for axes in grid[:, -1]:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    save_figure(figure, path)


def family_tree(path, names, closeness, numbers, label, title) -> None:
    """Draw items as a tree and a heat map, by `closeness` (n, n), 0 to 1; `numbers` (n, n) are written in."""
    count = len(names)
    figure = Figure(figsize=(4 + 0.9 * count, 2.2 + 0.55 * count), layout="constrained")
    tree, heat = figure.subplots(1, 2, width_ratios=(1, 2))
    distances = squareform(1 - np.clip(closeness, 0, 1), checks=False)
    style = {"orientation": "left", "no_labels": True, "color_threshold": 0, "above_threshold_color": "black"}
    order = dendrogram(linkage(distances, "average"), ax=tree, **style)["leaves"]
    tree.set(xlabel="distance", title="family tree")
    tree.spines[["top", "right", "left"]].set_visible(False)
    closeness = closeness[np.ix_(order, order)]
    numbers = numbers[np.ix_(order, order)]
    image = heat.imshow(closeness, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower")
    labels = [clipped(names[i]) for i in order]
    heat.set_xticks(range(count), labels, rotation=40, ha="right", fontsize=8)
    heat.set_yticks(range(count), labels, fontsize=8)
    heat.set_title(title)
    for y, x in itertools.permutations(range(count), 2):
        colour = "black" if closeness[y, x] > 0.6 else "white"
        heat.text(x, y, f"{numbers[y, x]:.1f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, label=label)
    save_figure(figure, path)


def style_axes(axes, values, log, ticks) -> None:
    """Scales, plain ticks and spines of one panel, whose `values` lie along x."""
    for axis in log:
        axes.set(**{f"{axis}scale": "log"})
        ticker = axes.xaxis if axis == "x" else axes.yaxis
        ticker.set_major_formatter("{x:g}")
        ticker.set_minor_formatter(PlainLogFormatter())
    if "x" not in log:
        whole_numbers = pd.api.types.is_integer_dtype(values)  # there is no seed or layer 42.2
        axes.locator_params(axis="x", integer=whole_numbers, nbins=7)
    if ticks:
        shown = [tick for tick in ticks if values.min() <= tick <= values.max()]
        axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
        axes.xaxis.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


def name_models(points, series):
    """The points, their series named by model too where there are several models."""
    if series == "model" or len({point["model"] for point in points}) == 1:
        return points
    return [{**point, series: f"{point['model']}, {point[series]}"} for point in points]


def clipped(name, length=28):
    """The end of a long name."""
    return name if len(name) <= length else "..." + name[3 - length :]


def save_figure(figure, path) -> None:
    """Rank 0 writes a matplotlib figure as a PNG, atomically."""
    if rank() == 0:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
