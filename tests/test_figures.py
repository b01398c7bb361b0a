"""lib/figures.py: the curves that are drawn are the points that were given, theory beside them."""

import logging

import pytest
from matplotlib.figure import Figure

from lib import figures
from lineage import family

NAMES = ("costs $1", "_100%_")
POINTS = [
    {"model": model, "layer": layer, "n": 10**layer, "c": c, "std": 0.1, "theory": None if layer == 1 else -c}
    for model, c in zip(NAMES, (0.5, 0.25))
    for layer in (0, 1, 2)
]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw curves of some points, and return the figure as it was written."""

    def draw(points, **keywords) -> Figure:
        caught = []
        save = Figure.savefig
        with monkeypatch.context() as patch:
            patch.setattr(
                Figure, "savefig", lambda figure, *a, **k: caught.append(figure) or save(figure, *a, **k)
            )
            keywords = {"x": "layer", "y": "c", "series": "model", **keywords}
            figures.curves(points, tmp_path / "x.png", "Why?", **keywords)
        return caught[0]

    return draw


def lines(axes) -> list[list[tuple]]:
    pairs = [list(zip(line.get_xdata(), line.get_ydata())) for line in axes.get_lines()]
    return [line for line in pairs if line]


def test_a_line_for_each_series_and_each_theory(drawn, caplog):
    """Names that mean something to matplotlib are drawn as they are, without a warning."""
    with caplog.at_level(logging.WARNING):
        figure = drawn(POINTS, theories={"theory": "the theory"})
    assert not caplog.records
    (axes,) = figure.axes
    first = [(0, 0.5), (1, 0.5), (2, 0.5)], [(0, -0.5), (2, -0.5)]  # theory is None at layer 1
    second = [(0, 0.25), (1, 0.25), (2, 0.25)], [(0, -0.25), (2, -0.25)]
    assert lines(axes) == [*first, *second]
    names = [text.get_text().strip() for text in figure.legends[0].get_texts()]
    assert names == [*NAMES, "the theory"]


def test_paths_are_shown_by_their_last_part_unless_two_have_the_same():
    names = ["smollm2", "models/qwen2.5-q4_k_m.gguf", "/models/of/many/a/run"]
    assert figures.short_names(names) == ["smollm2", "qwen2.5-q4_k_m", "run"]
    names = [f"/models/{name}/final-checkpoint" for name in "ab"]
    assert figures.short_names(names) == names


def test_a_layer_whose_units_were_not_looked_for_is_a_gap(tmp_path):
    layers = [{"share": None, "r": None, "by_chance": None, "units": None}]
    layers += [{"share": 0.5, "r": 0.9, "by_chance": 1, "units": 100}]
    row = {"suspect": "a", "verdict": "same birth"}
    for shown in (layers[:1], layers, []):
        family.lineage_figure(tmp_path / "x.png", "b", [row], [{"layers": shown, "layer_map": {}}])
        assert (tmp_path / "x.png").exists()
