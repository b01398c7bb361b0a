"""Draw results: measurements in colour, theory dashed in black, the question as title."""

import math
import textwrap

import numpy as np
from matplotlib import cycler, rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from lib.files import atomic_file
from lib.runtime import rank

BLUE = "#0072B2"  # a palette for the colour-blind (Okabe and Ito)
VERMILION = "#D55E00"
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.prop_cycle": cycler(color=COLOURS)}
DASHES = ("--", ":")  # of the first theory, and the second


def new_figure(title, rows=1, columns=1, width=4.6, height=3.8, **sharing):
    """A figure with a title, and a (rows, columns) grid of axes of `width` by `height` inches."""
    rcParams.update(STYLE)
    figure = Figure(figsize=(width * columns + 0.8, height * rows + 0.6), layout="constrained")
    figure.suptitle(textwrap.fill(title, round(11 * width * columns)), fontsize=12)
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing)


def save_figure(figure, path, legend=None) -> None:
    """Write a figure as a PNG, atomically, on rank 0; below it the legend of the axes `legend`."""
    if rank() > 0:
        return
    if legend is not None:
        handles, labels = legend.get_legend_handles_labels()
        longest = max(map(len, labels), default=0)
        columns = max(1, min(3, int(13 * figure.get_figwidth() / (longest + 6))))  # 13 letters an inch
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        if axis.get_scale() == "log":  # plain numbers, not powers of ten
            low, high = axis.get_view_interval()
            subs = (1, 2, 5) if high < 1e5 * low else (1,)  # matplotlib drops all if there are many
            axis.set(major_locator=LogLocator(subs=subs), major_formatter="{x:g}", minor_formatter="")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def short_names(names):
    """Short names for the models of a figure: the last part of a path, unless two are equal."""
    shown = [str(name).split("/")[-1].removesuffix(".gguf") for name in names]
    return shown if len(set(shown)) == len(set(names)) else names


def curves(points, path, title, *, x, y, series, panel="", theories=(), band="", log="", style="o-", **more):
    """Draw `y` over `x`: a colour for each value of `series`, a panel for each value of `panel`.

    `theories` maps keys, drawn dashed, to their legends; a point may have None. `band` is the key of a half
    width to shade. `log` names the logarithmic axes; `more` are keywords of matplotlib's `Axes.set`.
    """
    panels = unique(points, panel) if panel else [None]
    columns = min(3, len(panels))
    figure, grid = new_figure(title, math.ceil(len(panels) / columns), columns, sharex=True, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for value, name, axes in zip(panels, short_names(panels), grid.flat):
        if panel:
            axes.set_title(f"{panel.replace('_', ' ')}: {name}", fontsize=10)
        for label, line in lines_of(points, series):
            line = [point for point in line if not panel or point[panel] == value]
            places = column(line, x)
            heights = np.array(column(line, y))
            (curve,) = axes.plot(places, heights, style, label=label)
            if band:
                width = np.array(column(line, band))
                ends = (heights - width, heights + width)
                axes.fill_between(places, *ends, color=curve.get_color(), alpha=0.15, lw=0)
            for key, dash in zip(theories, DASHES):
                theory = sorted((point[x], point[key]) for point in line if point[key] is not None)
                if theory:
                    marker = "_" if len(theory) == 1 else ""  # a point has no line
                    axes.plot(*zip(*theory), color="black", ls=dash, lw=1.1, marker=marker, ms=18, zorder=3)
        for name, key in (("x", x), ("y", y)):
            if name in log and max(column(points, key)) > 0:
                axes.set(**{f"{name}scale": "log"})
        if x in ("layer", "step") and "x" not in log:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
        axes.set(**more)
        axes.label_outer()
    for key, dash in zip(theories, DASHES):
        grid[0, 0].plot([], [], color="black", ls=dash, lw=1.1, label=theories[key])
    save_figure(figure, path, grid[0, 0])


def lines_of(points, series):
    """Yield a label and the points for each value of the key `series`."""
    names = unique(points, series)
    for name, label in zip(names, short_names(names)):
        yield f" {label}", [point for point in points if point[series] == name]  # " ": matplotlib hides _name


def unique(points, key):
    """The distinct values of a key, in the points' order."""
    return list(dict.fromkeys(column(points, key)))


def column(points, key):
    """The values of a key."""
    return [point[key] for point in points]


def draw_preferences(path, rows, tokens, dimensions) -> None:
    """Draw BB Figures 1a and 10, a column for each of the first six rows, beside uniform draws."""
    question = "Which tokens does a newborn predict, and which dimensions lead? (dashed: uniform draws)"
    figure, grid = new_figure(question, 3, min(6, len(rows)), width=3.6, height=2.7, sharey="row")
    names = short_names(column(rows, "model"))
    for name, row, of_tokens, of_dimensions, panels in zip(names, rows, tokens, dimensions, grid.T):
        by_rank, by_token, by_dimension = panels
        by_rank.set_title(f"{name}\nseed {row['seed']}, {row['sequence_length']} tokens", fontsize=10)
        percent = 100 / row["num_sequences"]
        counts, uniform = of_tokens
        largest = counts.sort(descending=True).values[: len(uniform)].numpy()
        by_rank.bar(range(1, len(largest) + 1), percent * largest, color=BLUE)
        by_rank.plot(range(1, len(largest) + 1), percent * uniform[: len(largest)], "--", color=VERMILION)
        by_rank.set_xlabel("rank of the predicted token")
        kinds = ((by_token, of_tokens, "token number"), (by_dimension, of_dimensions, "hidden dimension"))
        for axes, (counts, uniform), label in kinds:  # all counts, and the largest of uniform draws
            numbers = counts.nonzero()[:, 0].numpy()
            axes.vlines(numbers, 0, percent * counts.numpy()[numbers], color=BLUE, lw=1)
            axes.axhline(percent * uniform[0], ls="--", color=VERMILION)
            axes.set(xlabel=label, xlim=(0, len(counts)), ylim=(0, None))
    for axes in grid[:, 0]:
        axes.set_ylabel("% of sequences")
    save_figure(figure, path)
