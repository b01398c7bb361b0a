"""How is a result drawn? What was measured in colour, theory dashed in black, from the points of the JSON."""

import itertools

import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from lib.runtime import atomic_file, rank

rcParams.update({"text.parse_math": False, "lines.markersize": 5, "lines.linewidth": 2.2})  # $ in names
BLUE = "#0072B2"  # this palette is safe for the colour-blind (Okabe and Ito)
VERMILION = "#D55E00"
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("--", ":", "-.")  # of the first, the second, the third theory
COSINE = "mean cosine between sequences"


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
    xlabel,
    ylabel,
    theories=None,
    panel="",
    band="",
    band_label="",
    log="",
    style="o-",
    ticks=(),
    share="xy",
    panels_in_a_row=3,
) -> None:
    """Draw `y` over `x`, a colour for each value of `series`, a panel for each value of `panel`.

    `theories` maps the keys that hold theories to their legends; a point may have None. `band` is the key of
    a half width to shade. `log` names the logarithmic axes and `share` those that panels have in common:
    "x", "y", "xy" or "".
    """
    table = pd.DataFrame(points)
    panels = list(table.groupby(panel, sort=False)) if panel else [("", table)]
    names = list(table[series].unique())
    columns = min(panels_in_a_row, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.0 + 4.0 * columns, 3.8 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex="x" in share, sharey="y" in share).flatten()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (value, part) in zip(grid, panels):
        for colour, name in zip(itertools.cycle(COLOURS), names):
            line = part[part[series] == name]
            label = str(name).replace("_", " ")
            axes.plot(line[x], line[y], style, color=colour, label=label)
            if band:
                low = line[y] - line[band]
                high = line[y] + line[band]
                axes.fill_between(line[x], low, high, color=colour, alpha=0.15, linewidth=0)
            for dash, key in zip(DASHES, theories or {}):
                law = line.dropna(subset=key).sort_values(x)
                axes.plot(law[x], law[key].astype(float), "k" + dash, linewidth=1.1, zorder=3)
        if panel:
            title = value if isinstance(value, str) else f"{panel} {value}".replace("_", " ")
            axes.set_title(title)
        style_axes(axes, table[x], log, ticks)
    if band:
        grid[0].fill_between([], [], color="grey", alpha=0.3, linewidth=0, label=band_label)
    for dash, legend in zip(DASHES, (theories or {}).values()):
        grid[0].plot([], [], "k" + dash, linewidth=1.1, label=legend)
    figure.supxlabel(xlabel, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
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
        axes.xaxis.get_major_locator().set_params(**({"integer": True} if whole_numbers else {"nbins": 6}))
    if ticks:
        shown = [tick for tick in ticks if values.min() <= tick <= values.max()]
        axes.set_xticks(shown, shown)
        axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


def name_models(points, series):
    """The points, their series named by model too where there are several models."""
    if series == "model" or len({point["model"] for point in points}) == 1:
        return points
    return [{**point, series: f"{point['model']}, {point[series]}"} for point in points]


def clipped(name, length=28):
    """The end of a long name."""
    return name if len(name) < length else "..." + name[3 - length :]


def save_figure(figure, path) -> None:
    """Rank 0 writes a matplotlib figure as a PNG, atomically."""
    if rank() == 0:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
