"""lib/figures.py: the curves that are drawn are the points that were given, theory beside them."""

import math

import pytest
from matplotlib.figure import Figure

from lib import figures

POINTS = [
    {"model": model, "layer": layer, "n": 10**layer, "c": c, "std": 0.1, "theory": None if layer == 1 else -c}
    for model, c in (("costs $1 and $2", 0.5), ("b_c", 0.25))
    for layer in (0, 1, 2)
]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw curves of POINTS, and return the figure in place of writing it."""

    def draw(**keywords) -> Figure:
        caught = []
        with monkeypatch.context() as patch:
            patch.setattr(figures, "save_figure", lambda figure, path: caught.append(figure))
            labels = {"series": "model", "xlabel": "x", "ylabel": "y"}
            figures.curves(POINTS, tmp_path / "x.png", **{"x": "layer", "y": "c", **labels, **keywords})
        caught[0].draw_without_rendering()
        return caught[0]

    return draw


def lines(axes) -> list[list[tuple]]:
    """The points of each line that has any."""
    pairs = [list(zip(line.get_xdata(), line.get_ydata())) for line in axes.get_lines()]
    return [line for line in pairs if line]


def test_a_line_for_each_series_and_each_theory(drawn):
    figure = drawn(theories={"theory": "the theory"})
    (axes,) = figure.axes
    first = [(0, 0.5), (1, 0.5), (2, 0.5)], [(0, -0.5), (2, -0.5)]  # theory is None at layer 1
    second = [(0, 0.25), (1, 0.25), (2, 0.25)], [(0, -0.25), (2, -0.25)]
    assert lines(axes) == [*first, *second]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["the theory"]


def test_lines_are_named_at_their_ends(drawn):
    figure = drawn(names={"b_c": "another"})
    texts = {text.get_text(): text for text in figure.axes[0].texts}
    assert set(texts) == {"costs $1 and $2", "another"}
    assert texts["another"].get_color() != texts["costs $1 and $2"].get_color()
    to_panel = figure.axes[0].transAxes.inverted()
    for name, height in (("costs $1 and $2", 0.5), ("another", 0.25)):
        end = to_panel.transform(figure.axes[0].transData.transform((2, height)))
        assert texts[name].get_position()[1] == pytest.approx(end[1])


def test_of_panels_in_a_row_the_last_is_labelled(drawn):
    figure = drawn(panel="n", series="model", panels_in_a_row=3)
    assert [len(axes.texts) for axes in figure.axes] == [0, 0, 2]


def test_points_without_lines_have_a_legend(drawn):
    figure = drawn(style="o")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["costs $1 and $2", "b_c"]
    assert len(figure.axes[0].texts) == 0


@pytest.mark.parametrize(
    "heights, moved",
    [
        ([0.1, 0.5], [0.1, 0.5]),
        ([0.5, 0.5, 0.5], [0.5, 0.6, 0.7]),
        ([0.9, 0.95, 1.2], [0.8, 0.9, 1.0]),
        ([-0.3, 0.05], [0.0, 0.1]),
        ([], []),
    ],
)
def test_names_are_spread_out(heights, moved):
    assert figures.spread_out(heights, 0.1) == pytest.approx(moved)


def test_the_axes_reach_as_far_as_is_asked(drawn):
    low, high = drawn(lowest=0, highest=2).axes[0].get_ylim()
    assert (low, high) == (0, 2)
    assert drawn(highest=0.3).axes[0].get_ylim()[1] > 0.5  # the points are higher


@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (0.9, 1100, [1, 10, 100, 1000]),
        (0.015, 0.6, [0.02, 0.05, 0.1, 0.2, 0.5]),
        (90, 250, [100, 150, 200]),
        (0.004, 0.006, [0.004, 0.005, 0.006]),
    ],
)
def test_ticks_of_logarithmic_axes(low, high, ticks):
    assert figures.PlainLogLocator().tick_values(low, high) == pytest.approx(ticks)


def test_numbers_that_read_the_same():
    assert figures.between([0.82, 0.9, 0.81], ".2f") == "0.81 to 0.90"
    assert figures.between([0.812, 0.809], ".2f") == "0.81"


def test_a_panel_for_each_value(drawn):
    figure = drawn(panel="n", panels_in_a_row=2, series="model")
    assert [axes.get_title() for axes in figure.axes] == ["n 1", "n 10", "n 100", ""]
    assert lines(figure.axes[1]) == [[(1, 0.5)], [(1, 0.25)]]
    assert not figure.axes[3].axison


def test_a_band_is_as_wide_as_its_key_says(drawn):
    figure = drawn(band="std", band_label="spread")
    heights = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.4, 0.6))
    assert "spread" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_ticks_of_logarithmic_axes_are_plain_text(drawn):
    figure = drawn(x="n", y="n", log="xy")
    (axes,) = figure.axes
    ticks = axes.get_xticklabels(which="both") + axes.get_yticklabels(which="both")
    shown = {tick.get_text() for tick in ticks}
    assert {"1", "10", "100"} <= shown
    assert not any("$" in text or "e" in text for text in shown), shown


def test_there_is_no_layer_one_and_a_half(drawn):
    ticks = drawn().axes[0].get_xticks()
    assert all(math.isclose(tick, round(tick)) for tick in ticks)
    named = drawn(x="n", ticks=(1, 10, 1000)).axes[0]
    assert [tick.get_text() for tick in named.get_xticklabels()] == ["1", "10"]  # 1000 is beyond the points


def test_a_figure_is_a_whole_png(tmp_path):
    path = tmp_path / "x.png"
    figures.curves(POINTS, path, x="layer", y="c", series="model", xlabel="x", ylabel="y")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and b"IEND" in content[-12:]
    assert list(tmp_path.iterdir()) == [path]


def test_names():
    assert figures.name_models(POINTS[:3], "layer", {}) == POINTS[:3]
    named = figures.name_models(POINTS, "layer", {2: "two"})
    assert [point["layer"] for point in named[2:4]] == ["costs $1 and $2, two", "b_c, 0"]
    assert figures.clipped("short") == "short"
    assert figures.clipped("a/long/path/to/some/checkpoint", 12) == "...heckpoint"
