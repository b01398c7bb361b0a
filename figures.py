"""How is a result drawn? What was measured in colour, theory dashed in black, from the rows of the JSON."""

import itertools
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from common import atomic_path, rank
from stats import column, split

rcParams.update({"text.parse_math": False, "lines.markersize": 5, "lines.linewidth": 2.2})  # $ in names
BLUE, VERMILION = "#0072B2", "#D55E00"  # a colour-blind safe pair, and its palette (Okabe and Ito)
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("--", ":", "-.")  # of the first, the second, the third theory
COSINE = "mean cosine between sequences"
# experiment: x, y and series of its figure, the theories and their legends, and `curves`' other arguments
FIGURES = {
    "layers": ("layer", "mean_cosine", "variant", {"theory": "kernel recursion"}, ("layer", COSINE),
        dict(panel="sequence_length", band=("std_cosine", "std of pairs"))),
    "ablation": ("rank", "count", "variant", {"theory": "uniform draws"},
        ("rank of the predicted token", "sequences that predict it"),
        dict(panel="sequence_length", ticks=[1, 5, 10, 15, 20])),
    "overlap": ("direction_count", "top1_count", "model", {"direction_count": "equal counts"},
        ("count of the contraction direction's token", "count of the most frequent token"), dict(style="o")),
    "mlp": ("layer", "mean_cosine", "stack", {"theory": "Proposition 2; kernel recursion"},
        ("layer", COSINE), {}),
    "engage": ("z", "y", "curve", {"half": "half the input: no asymmetry"},
        ("pre-activation", "activation; share of the fullest bin"), dict(style="-")),
    "amplify": ("sequence_length", "mean_cosine", "stack", {"theory": "Propositions 2 and 4"},
        ("positions", COSINE), dict(log="x", ticks=[100, 128, 256, 512, 1024])),
    "intra": ("layer", "mean_cosine", "stack",
        {"exact_theory": "exact in T", "limit_theory": "Proposition 5: infinite T"},
        ("layer", "mean cosine within a sequence"), dict(panel="sequence_length")),
    "variance": ("position", "std", "model",
        {"theory": "with the logits' variance", "uniform_theory": "Equation 2: uniform"},
        ("position i", "std of aggregated values"), dict(style="-", log="xy")),
    "predict": ("predicted", "measured", "model", {"predicted": "equal"},
        ("unit direction predicted from the weights", "unit direction measured"), dict(style=".")),
    "cure": ("seed", "mean_cosine", "init", {"predicted_cosine": "kernel recursion"}, ("seed", COSINE),
        dict(style="o")),
    "width": ("d_model", "mean_cosine", "mlp", {"theory": "quadrature"}, ("width d", COSINE),
        dict(panel="scaling", log="xy", ticks=[128, 256, 512, 1024])),
    "compare": ("correlation", "share", "coordinates", {"theory": "mismatched, if rows were independent"},
        ("correlation of a coordinate of one model with one of the other", "% of pairs"),
        dict(panel="evidence", style="-", share="", across=2)),
    "calibrate": ("expected", "observed", "test", {"uniform": "a sound test"},
        ("-log10 p expected", "-log10 p of strangers"), dict(panel="panel", style=".-")),
    "calibrate_tau": ("tau", "share", "scheme", {"gaussian": "Gaussian of independent rows"},
        ("Kendall's tau of strangers", "% of dimensions"), dict(panel="panel", style="-")),
    "persistence": ("step", "tau", "model", {}, ("training step", "Kendall's tau with birth"),
        dict(band=("std", "std of dimensions"), log="x")),
    "persistence_p": ("step", "minus_log10_p", "test", {"level": "p = 0.01"},
        ("training step", "-log10 p against its birth"), dict(log="xy")),
    "rate": ("x", "y", "checkpoint", {"theory": "uniform attention"}, ("tokens in a sequence", ""),
        dict(panel="panel", share="x", log="x", ticks=[32, 64, 128, 256, 512])),
    "sink_variance": ("position", "std", "of", {"theory": "with the logits' variance"},
        ("position i", "std of aggregated values"), dict(style="-", log="xy")),
    "anatomy": ("x", "y", "of", {"theory": "uniform attention"}, ("position; rank of the neuron", ""),
        dict(panel="panel", share="", style="-", log="xy")),
    "intervene": ("x", "alpha", "series", {"theory": "uniform attention"},
        ("layer; factor", "mean attention to the position"),
        dict(panel="panel", band=("error", "95 % interval"), share="y")),
    "births": ("step", "loss", "init", {"zero": "no difference"}, ("training step", "nats a token"),
        dict(panel="panel", band=("error", "std of seeds; 95 % interval"), share="x")),
    "calibrations": ("step", "value", "calibration", {}, ("training step", "held-out loss, nats a token"),
        dict(panel="panel", band=("error", "std of seeds"), share="")),
    "calibrated_rate": ("sequence_length", "value", "calibration", {"theory": "uniform attention"},
        ("tokens in a sequence", ""), dict(panel="panel", band=("error", "std of seeds"), share="", across=2,
        log="x", ticks=[32, 64, 128, 256])),
}  # fmt: skip
OF_MODEL = {"model", "panel"}  # series and panels that name the model already


class PlainLogFormatter(LogFormatter):
    """Ticks between powers of ten where there is room, as 0.6, not 6e-01."""

    def __call__(self, x, pos=None):
        return f"{x:g}" if super().__call__(x, pos) else ""


def draw(name: str, points: list[dict], path: Path) -> None:
    """The figure of an experiment, as FIGURES has it; several models are told apart in its series."""
    *arguments, more = FIGURES[name]
    series = arguments[2]
    if len({point.get("model") for point in points}) > 1 and {series, more.get("panel")}.isdisjoint(OF_MODEL):
        points = [point | {series: f"{point['model']}, {point[series]}"} for point in points]
    curves(points, path, *arguments, **more)


def save_figure(figure: Figure, path: Path) -> None:
    """Rank 0 writes a matplotlib figure as a PNG, atomically."""
    if rank() == 0:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)


def curves(
    points: list[dict], path: Path, x: str, y: str, series: str, theory: dict, labels: tuple[str, str],
    panel="", band=("", ""), log="", style="o-", ticks=None, share="xy", across=3,
) -> None:  # fmt: skip
    """`y` over `x`, a colour for each value of `series`, a panel for each of `panel`, `across` in a row.

    `theory` maps the keys that hold theories to their legends; a point may have None. `band` is the
    key of a half width to shade, and its legend; `log` the axes in logarithms, "x", "y" or "xy"; `labels`
    those of x and y; `share` the axes that panels have in common.
    """
    panels, names = split(points, panel) if panel else {None: points}, split(points, series)
    across, down = min(across, len(panels)), -(-len(panels) // across)
    figure = Figure(figsize=(3.0 + 4.0 * across, 3.8 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex="x" in share, sharey="y" in share).flatten()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (value, part) in zip(grid, panels.items()):
        for colour, name in zip(itertools.cycle(COLOURS), names):
            line = [point for point in part if point[series] == name]
            xs, ys = column(line, x), column(line, y)
            axes.plot(xs, ys, style, color=colour, label=str(name).replace("_", " "))
            if band[0]:
                half = column(line, band[0])
                axes.fill_between(xs, ys - half, ys + half, color=colour, alpha=0.15, linewidth=0)
            for dash, key in zip(DASHES, theory):
                law = sorted((p[x], p[key]) for p in line if p.get(key) is not None)
                axes.plot([x for x, _ in law], [y for _, y in law], "k" + dash, linewidth=1.1, zorder=3)
        if band[0]:
            axes.fill_between([], [], color="grey", alpha=0.3, linewidth=0, label=band[1])
        for dash, legend in zip(DASHES, theory.values()):
            axes.plot([], [], "k" + dash, linewidth=1.1, label=legend)
        title = value if type(value) is str else f"{panel} {value}".replace("_", " ")
        axes.set(title=title if panel else "", **{f"{axis}scale": "log" for axis in log})
        for axis in log:  # ticks in plain text, since mathematics is off
            getattr(axes, f"{axis}axis").set_major_formatter("{x:g}")
            getattr(axes, f"{axis}axis").set_minor_formatter(PlainLogFormatter())
        if "x" not in log:
            whole = all(type(point[x]) is int for point in part)  # there is no seed or layer 42.2
            axes.xaxis.get_major_locator().set_params(**(dict(integer=True) if whole else dict(nbins=6)))
        if ticks:
            shown = [tick for tick in ticks if min(p[x] for p in points) <= tick <= max(p[x] for p in points)]
            axes.set_xticks(shown, shown)
            axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(labels[0], fontsize=10)
    figure.supylabel(labels[1], fontsize=10)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    save_figure(figure, path)
