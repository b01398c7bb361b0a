"""lib/figures.py: the curves that are drawn are the points that were given, theory beside them."""

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
            keywords = {"x": "layer", "y": "c", "series": "model", **keywords}
            figures.curves(POINTS, tmp_path / "x.png", "Why?", **keywords)
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
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["costs $1 and $2", "b c", "the theory"]
