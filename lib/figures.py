"""How is a result drawn? What was measured in colour, theory dashed in black, from the points of the JSON."""

import itertools
import math
import textwrap
from operator import itemgetter

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import Locator
from scipy.cluster.hierarchy import dendrogram, linkage
from scipy.spatial.distance import squareform

from lib.files import atomic_file
from lib.runtime import rank

rcParams.update({"text.parse_math": False, "lines.markersize": 5, "lines.linewidth": 2.2})  # $ in names
BLUE = "#0072B2"  # this palette is safe for the colour-blind (Okabe and Ito)
VERMILION = "#D55E00"
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^v<>"
LABEL_HEIGHT = 0.062  # of a line's name, as a share of its panel's
DASHES = ("--", ":", "-.")  # of the first, the second, the third theory
LABELS = {  # of axes that several figures have; of any other the key of its values
    "mean_cosine": "mean cosine between sequences",
    "sequence_length": "tokens in a sequence",
    "step": "training step",
    "position": "position i",
    "d_model": "width d",
}


class PlainLogLocator(Locator):
    """Ticks of a logarithmic axis at powers of ten, and between them where these are few."""

    def __call__(self):
        """The places of the ticks in what the axis shows."""
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, low, high):
        """The places of the ticks between two positive numbers."""
        decades = math.log10(high / low)
        steps = (1,)
        if decades < 2.5:
            steps = (1, 2, 5)
        if decades < 0.8:
            steps = (1, 1.5, 2, 3, 4, 5, 6, 8)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps]
        return [tick for tick in ticks if low <= tick <= high]


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
    names=None,
    theories=None,
    panel="",
    band="",
    band_label="",
    band_limits=(None, None),
    log="",
    style="o-",
    ticks=(),
    share="xy",
    marked=None,
    lowest=None,
    highest=None,
    panels_in_a_row=3,
) -> None:
    """Draw `y` over `x`, a colour for each value of `series`, a panel for each value of `panel`.

    Lines are named at their ends, by `names` or as they are called. `theories` maps the keys that hold
    theories to their legends; a point may have None. `band` is the key of a half width to shade, within
    `band_limits`. `log` names the logarithmic axes and `share` those that panels have in common: "x", "y",
    "xy" or "". The points at x = `marked` get a large marker. The y-axes begin at `lowest` and end at
    `highest`, or reach farther where points do. An axis without a label is named by LABELS.
    """
    table = pd.DataFrame(points)
    panels = list(table.groupby(panel, sort=False)) if panel else [("", table)]
    names = names or {}
    order = [name for name in names if name in set(table[series])]  # the same colours whatever comes first
    order += [name for name in table[series].unique() if name not in names]
    colours = dict(zip(order, itertools.cycle(COLOURS)))
    labels = {name: names.get(name, str(name)) for name in order}
    figure, grid = panel_grid(len(panels), panels_in_a_row, share)
    for axes, (value, part) in zip(grid.flatten(), panels):
        for marker, (name, colour) in zip(itertools.cycle(MARKERS), colours.items()):
            line = part[part[series] == name].sort_values(x, kind="stable")
            draw_series(axes, line[x], line[y], style, marker, colour, labels[name])
            if marked is not None:
                at_mark = line[line[x] == marked]
                axes.plot(at_mark[x], at_mark[y], "o", color=colour, markersize=9)
            if band:
                low = (line[y] - line[band]).clip(*band_limits)
                high = (line[y] + line[band]).clip(*band_limits)
                axes.fill_between(line[x], low, high, color=colour, alpha=0.15, linewidth=0)
            for dash, key in zip(DASHES, theories or {}):
                law = (part if key == x else line).dropna(subset=key).sort_values(x)
                draw_law(axes, law[x], law[key].astype(float), dash)
        if panel:
            axes.set_title(panel_heading(panel, value), fontsize=11)
        style_axes(axes, table[x] if "x" in share else part[x], table[y], log, ticks)
    for axes in grid.flatten():
        if lowest is not None:
            axes.set_ylim(bottom=min(lowest, table[y].min()))
        if highest is not None:
            axes.set_ylim(top=max(highest, axes.get_ylim()[1]))
    # names of lines, legend of the rest, title and axes
    keys = []
    if "-" in style:
        for row in grid:
            label_lines(row, labels.values())
    elif len(colours) > 1:
        keys += grid[0, 0].get_legend_handles_labels()[0]
    if band:
        keys.append(Patch(color="grey", alpha=0.3, linewidth=0, label=band_label))
    for dash, legend in zip(DASHES, (theories or {}).values()):
        keys.append(Line2D([], [], color="black", linestyle=dash, linewidth=1.1, label=legend))
    if marked is not None:
        mark = f"{x} {marked}"
        keys.append(Line2D([], [], color="grey", marker="o", markersize=9, linestyle="", label=mark))
    if keys:
        figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    name_figure(figure, title)
    name_axes(grid, len(panels), xlabel or LABELS.get(x, x), LABELS.get(y, y) if ylabel is None else ylabel)
    save_figure(figure, path)


def panel_grid(count, in_a_row, share):
    """A figure, and its grid of axes (rows, columns), of which the first `count` are used."""
    columns = min(in_a_row, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(2.6 + 4.0 * columns, 0.7 + 3.7 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex="x" in share, sharey="y" in share)
    for axes in grid.flatten()[count:]:
        axes.set_axis_off()
    return figure, grid


def draw_series(axes, x, y, style, marker, colour, label) -> None:
    """Draw a series; points are hollow and of several shapes, so that those of one place are seen."""
    if style == "o":
        axes.plot(x, y, marker, markerfacecolor="none", markersize=7, color=colour, label=label)
    else:
        axes.plot(x, y, style, color=colour, label=label)


def name_axes(grid, count, xlabel, ylabel) -> None:
    """Name the x-axis of the lowest panel of each column, and the y-axis of the first of each row."""
    columns = grid.shape[1]
    for axes in grid.flatten()[max(0, count - columns) : count]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(xlabel)
    for axes in grid[:, 0]:
        axes.set_ylabel(textwrap.fill(ylabel, 36))


def draw_law(axes, x, y, dash) -> None:
    """Draw a theory, unless it is there already: two dashed lines would look like a solid one."""
    known = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    if (list(x), list(y)) in known:
        return
    marker = {"marker": "_", "markersize": 18} if len(x) == 1 else {}  # a point has no line
    axes.plot(x, y, color="black", linestyle=dash, linewidth=1.1, zorder=3, **marker)


def name_figure(figure, title) -> None:
    """Write the title of a figure, in as many lines as its width asks for."""
    width = figure.get_size_inches()[0]
    figure.suptitle(textwrap.fill(title, round(11 * width)), fontsize=12)


def panel_heading(panel, value):
    """What stands above a panel."""
    if isinstance(value, str):
        return "\n".join(textwrap.fill(line, 50) for line in value.split("\n"))
    if panel == "sequence_length":
        return f"{value} tokens"
    return f"{panel} {value}".replace("_", " ")


def label_lines(row, names) -> None:
    """Name the lines of a row of panels at their right ends: each once, in the last panel that has it."""
    missing = list(names)
    for axes in reversed(row):
        axes.get_ylim()  # makes the limits be what is drawn
        ends = []  # (height, 0 to 1, line)
        for line in axes.get_lines():
            heights = line.get_ydata()
            if line.get_label() in missing and len(heights):
                place = axes.transData.transform((line.get_xdata()[-1], heights[-1]))
                ends.append((axes.transAxes.inverted().transform(place)[1], line))
                missing.remove(line.get_label())
        ends.sort(key=itemgetter(0))
        for height, (_, line) in zip(spread_out([end[0] for end in ends], LABEL_HEIGHT), ends):
            text = clipped(line.get_label(), 30)
            style = {"color": line.get_color(), "fontsize": 9, "va": "center"}
            axes.text(1.02, height, text, transform=axes.transAxes, **style)


def spread_out(heights, gap):
    """Ascending heights between 0 and 1, moved as little as needed to be `gap` apart."""
    heights = [min(max(height, 0), 1) for height in heights]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    if heights and heights[-1] > 1:
        heights[-1] = 1
        for i in reversed(range(len(heights) - 1)):
            heights[i] = min(heights[i], heights[i + 1] - gap)
    return heights


def evidence(path, panels, title) -> None:
    """Draw what tells kin from strangers, a row for each (name, layers, points, layer_map) of `panels`.

    `layers` are the rows of a census, `layer_map` is its map, and `points` have the `share` of `coordinates`
    at each `correlation`.
    """
    figure = Figure(figsize=(14, 1.2 + 2.7 * len(panels)), layout="constrained")
    name_figure(figure, title)
    grid = figure.subplots(len(panels), 3, squeeze=False)
    for axes in grid[1:, 2]:
        axes.sharey(grid[0, 2])
    for (units, heat, coordinates), (name, layers, points, layer_map) in zip(grid, panels):
        draw_units(units, layers)
        units.set_title(name, loc="left", fontweight="bold")
        draw_layer_map(figure, heat, layer_map)
        for kind, colour in (("matched", BLUE), ("mismatched", VERMILION)):
            line = [point for point in points if point["coordinates"] == kind and point["share"] > 0]
            x = [point["correlation"] for point in line]
            coordinates.plot(x, [point["share"] for point in line], ".-", color=colour, alpha=0.8, label=kind)
        coordinates.set(xlim=(-1, 1), xlabel="correlation of two coordinates", ylabel="% of coordinates")
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


def error_bars(path, bars, title, xlabel, level, level_label) -> None:
    """Draw the `rate` of each of `bars`, in %, from `low` to `high`; dashed a `level` to compare with.

    A panel for each `panel`, a row for each `label`, a colour for each `series` of the bars.
    """
    table = pd.DataFrame(bars)
    panels = list(table.groupby("panel", sort=False))
    labels = list(table["label"].unique())[::-1]  # the first one at the top
    names = table["series"].unique()
    figure = Figure(figsize=(2 + 3.6 * len(panels), 1.8 + 0.42 * len(labels)), layout="constrained")
    name_figure(figure, title)
    grid = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (panel, part) in zip(grid, panels):
        axes.axvline(level, color="black", linestyle="--", linewidth=1.1, label=level_label)
        for i, (name, colour) in enumerate(zip(names, COLOURS)):
            line = part[part["series"] == name]
            heights = line["label"].map(labels.index) + 0.2 * ((len(names) - 1) / 2 - i)
            reach = (line["rate"] - line["low"], line["high"] - line["rate"])
            axes.errorbar(
                line["rate"], heights, xerr=reach, fmt=MARKERS[i], color=colour, capsize=3, label=name
            )
        for place, label in enumerate(labels):
            if label not in part["label"].to_numpy():
                center = {"transform": axes.get_yaxis_transform(), "ha": "center", "va": "center"}
                axes.text(0.5, place, "does not apply", fontsize=9, color="grey", **center)
        axes.set_title(panel, fontsize=11)
        axes.set_yticks(range(len(labels)), labels)
        axes.spines[["top", "right"]].set_visible(False)
    grid[len(grid) // 2].set_xlabel(xlabel)
    figure.legend(
        *grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
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
    figure = Figure(figsize=(4.6 * columns, 0.5 + 4.2 * rows), layout="constrained")
    name_figure(figure, "Which layers share hidden units shows how a suspect was made")
    for axes, (row, layer_map) in zip(figure.subplots(rows, columns, squeeze=False).flatten(), panels):
        draw_layer_map(figure, axes, layer_map)
        axes.set_title(f"{row['recipe']}:\n{textwrap.fill(row['sentence'], 48)}", fontsize=10, loc="left")
        axes.set_ylabel(f"layer of the {row['base']}")
    save_figure(figure, path)


def strengths(path, rows, title, certain_z, certain_label, same_birth) -> None:
    """Draw what tests find of a changed child, a column for each `change`: units found above, z below.

    `certain_z` is the z of a p that `certain_label` says. Units of a child with another verdict than
    `same_birth` are hollow.
    """
    changes = list(pd.DataFrame(rows).groupby("change", sort=False))
    widths = [2 + len(part) for _, part in changes]
    figure = Figure(figsize=(0.33 * sum(widths), 6), layout="constrained")
    grid = figure.subplots(2, len(changes), sharex="col", sharey="row", width_ratios=widths, squeeze=False)
    lines = {"body_z": "weights", "relabel_z": "states", "closed_form_z": "the paper's closed form"}
    for above, below, (change, part) in zip(*grid, changes):
        places = range(len(part))
        has_order = not part["strength"].map(type).eq(str).any()
        style = "o-" if has_order else "o"
        share = 100 * part["units_share"].astype(float)
        above.plot(places, share, style, color=BLUE, label="hidden units")
        is_lost = (part["verdict"] != same_birth).to_numpy()
        above.plot(np.arange(len(part))[is_lost], share[is_lost], "o", color="white", mec=BLUE, label="lost")
        for colour, (key, label) in zip(COLOURS[1:], lines.items()):
            below.plot(places, part[key].astype(float), style, color=colour, label=label)
        if part[list(lines)].isna().all(axis=None):
            below.text(0.5, 0.5, "no common\ncoordinates", transform=below.transAxes, ha="center", fontsize=9)
        below.axhline(certain_z, color="k", linestyle="--", linewidth=1.1, label=certain_label)
        below.set_yscale("symlog", linthresh=5)
        below.yaxis.set_major_formatter("{x:g}")
        texts = [text if isinstance(text, str) else f"{text:g}" for text in part["strength"]]
        below.set_xticks(places, texts, rotation=90)
        below.set_xlabel(change)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
    name_figure(figure, title)
    grid[0, 0].set(ylim=(-4, 104), ylabel="% of hidden units found")
    grid[1, 0].set_ylabel("z of coordinates")
    for axes in grid[:, -1]:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    save_figure(figure, path)


def family_tree(path, names, closeness, label, title) -> None:
    """Draw items as a tree and a heat map, by `closeness` (n, n), 0 to 1."""
    count = len(names)
    figure = Figure(figsize=(5 + 0.9 * count, 2.6 + 0.55 * count), layout="constrained")
    name_figure(figure, title)
    tree, heat = figure.subplots(1, 2, width_ratios=(1, 2))
    distances = squareform(1 - np.clip(closeness, 0, 1), checks=False)
    style = {"orientation": "left", "no_labels": True, "color_threshold": 0, "above_threshold_color": "black"}
    order = dendrogram(linkage(distances, "average"), ax=tree, **style)["leaves"]
    tree.set(xlabel="distance", title="family tree")
    tree.set_yticks([])
    tree.spines[["top", "right", "left"]].set_visible(False)
    closeness = closeness[np.ix_(order, order)]
    image = heat.imshow(closeness, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower")
    labels = [clipped(names[i]) for i in order]
    heat.set_xticks(range(count), labels, rotation=40, ha="right", fontsize=8)
    heat.set_yticks(range(count), labels, fontsize=8)
    for y, x in itertools.permutations(range(count), 2):
        colour = "black" if closeness[y, x] > 0.6 else "white"
        heat.text(x, y, f"{closeness[y, x]:.2f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, label=label)
    save_figure(figure, path)


def style_axes(axes, values, heights, log, ticks) -> None:
    """Scales, plain ticks and spines of one panel, whose `values` lie along x and `heights` along y."""
    for axis in log:
        axes.set(**{f"{axis}scale": "log"})
        ticker = axes.xaxis if axis == "x" else axes.yaxis
        ticker.set_major_locator(PlainLogLocator())
        ticker.set_major_formatter("{x:g}")
        ticker.set_minor_formatter("")
    if "x" not in log:
        whole_numbers = pd.api.types.is_integer_dtype(values)  # there is no seed or layer 42.2
        axes.locator_params(axis="x", integer=whole_numbers, nbins=7)
    if "y" not in log and pd.api.types.is_integer_dtype(heights):
        axes.locator_params(axis="y", integer=True)
    if ticks:
        shown = [tick for tick in ticks if values.min() <= tick <= values.max()] or sorted(set(values))
        axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
        axes.xaxis.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


def name_models(points, series, names):
    """The points; where there are several models, their series have names of model and series."""
    if series == "model" or len({point["model"] for point in points}) == 1:
        return points
    named = []
    for point in points:
        name = names.get(point[series], point[series])
        named.append(point | {series: f"{point['model']}, {name}"})
    return named


def between(values, form):
    """The least and the largest of some numbers as text: "0.81 to 0.90", or "0.81" if these read the same."""
    low = format(min(values), form)
    high = format(max(values), form)
    return low if low == high else f"{low} to {high}"


def clipped(name, length=28):
    """The end of a long name."""
    return name if len(name) <= length else "..." + name[3 - length :]


def save_figure(figure, path) -> None:
    """Rank 0 writes a matplotlib figure as a PNG, atomically."""
    if rank() == 0:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
