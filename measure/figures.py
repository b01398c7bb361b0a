"""Draw what sinks.py measures."""

import numpy as np

from lib.figures import column, curves, new_figure, save_figure, short_names


def draw_heads(path, title, rows, key, columns=None) -> None:
    """Draw the attention row[key], (L, H), in a panel for each row of the first length."""
    rows = [row for row in rows if row["sequence_length"] == rows[0]["sequence_length"]]
    names = short_names(column(rows, "checkpoint"))
    columns = columns or len(rows)
    figure, grid = new_figure(title, len(rows) // columns, columns, height=3)
    for axes, name, row in zip(grid.flat, names, rows):
        alpha = np.array(row[key]).T
        what = row.get("kind", f"{row['sequence_length']} tokens")
        extent = (0.5, alpha.shape[1] + 0.5, alpha.shape[0] + 0.5, 0.5)
        image = axes.imshow(alpha, cmap="cividis", vmin=0, vmax=1, aspect="auto", extent=extent)
        axes.set(xlabel="attention layer", ylabel="head", title=f"{name}\n{what}")
        axes.title.set_fontsize(10)
        axes.locator_params(integer=True, min_n_ticks=1)
    figure.colorbar(image, ax=grid, label="mean attention")
    save_figure(figure, path)


def draw_transplants(path, rows, layers) -> None:
    """Draw the largest activation of the stream by layer, a panel per model, with and without constants."""
    layers = [layer for layer in layers if layer["sequence_length"] == rows[0]["sequence_length"]]
    points = [layer for layer in layers if layer["kind"] in ("unchanged", "moved", "moved, builders at zero")]
    question = "Is anything massive left where the sink moves onto a constant?"
    keys = {"x": "layer", "y": "largest", "series": "kind", "panel": "checkpoint", "style": ".-"}
    curves(points, path, question, **keys, log="y", ylabel="largest |number| of the stream")
