"""lib/figures.py: the curves that are drawn are the points that were given, theory beside them."""

import logging

from matplotlib.figure import Figure

from lib import figures
from lineage import family

NAMES = ("costs $1", "_100%_")
POINTS = [
    {"model": model, "layer": layer, "n": 10**layer, "c": c, "std": 0.1, "theory": None if layer == 1 else -c}
    for model, c in zip(NAMES, (0.5, 0.25))
    for layer in (0, 1, 2)
]


def lines(axes) -> list[list[tuple]]:
    pairs = [list(zip(line.get_xdata(), line.get_ydata())) for line in axes.get_lines()]
    return [line for line in pairs if line]


def test_a_line_for_each_series_and_each_theory(tmp_path, monkeypatch, caplog):
    """Names that mean something to matplotlib are drawn as they are, without a warning."""
    drawn = []
    save = Figure.savefig

    def note(figure, *words, **options):
        drawn.append(figure)
        save(figure, *words, **options)

    monkeypatch.setattr(Figure, "savefig", note)
    words = {"x": "layer", "y": "c", "series": "model", "theories": {"theory": "the theory"}}
    with caplog.at_level(logging.WARNING):
        figures.curves(POINTS, tmp_path / "x.png", "Why?", **words)
    assert not caplog.records
    (axes,) = drawn[0].axes
    first = [(0, 0.5), (1, 0.5), (2, 0.5)], [(0, -0.5), (2, -0.5)]  # theory is None at layer 1
    second = [(0, 0.25), (1, 0.25), (2, 0.25)], [(0, -0.25), (2, -0.25)]
    assert lines(axes) == [*first, *second]
    names = [text.get_text().strip() for text in drawn[0].legends[0].get_texts()]
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
