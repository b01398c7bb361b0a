"""Draw what sinks.py measures."""

import numpy as np

from lib.figures import curves, lines_of, new_figure, save_figure, short_names
from measure.units import LINKS


def draw_heads(path, title, rows, key, columns=None) -> None:
    """Draw the attention row[key], (L, H), in a panel for each row of the first length."""
    rows = [row for row in rows if row["sequence_length"] == rows[0]["sequence_length"]]
    names = short_names([row["checkpoint"] for row in rows])
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


def draw_chain(path, rows) -> None:
    """Draw the links of SO's chain, a colour per model, from rows by layer and position."""
    question = "What singles position 1 out, layer by layer? (dotted: median of the other positions)"
    figure, grid = new_figure(question, 2, 3, height=3)
    for axes, (key, title) in zip(grid.flat, LINKS.items()):
        axes.set_title(title, fontsize=10)
        scale = "linear" if key in ("key_alignment", "alpha") else "log"
        axes.set(xlabel="position" if key == "std" else "layer", yscale=scale)
        for label, points in lines_of(rows, "checkpoint"):
            link = np.array([point[key] for point in points], float)  # NaN in layers without attention
            link = link.reshape(points[-1]["layer"], -1)  # (L, T)
            if key == "std":
                first = np.isfinite(link).any(1).argmax()
                axes.loglog(range(1, link.shape[1] + 1), link[first], label=label)
                continue
            layers = range(1, len(link) + 1)
            (line,) = axes.plot(layers, link[:, 0], "o-", ms=3)
            axes.plot(layers, np.median(link[:, 1:], axis=1), ":", color=line.get_color())
    save_figure(figure, path, grid[0, 0])


def draw_transplants(path, rows, layers) -> None:
    """Draw the largest activation of the stream by layer, a panel per model, with and without constants."""
    layers = [layer for layer in layers if layer["sequence_length"] == rows[0]["sequence_length"]]
    points = [layer for layer in layers if layer["kind"] in ("unchanged", "moved", "moved, builders at zero")]
    question = "Is anything massive left where the sink moves onto a constant?"
    keys = {"x": "layer", "y": "largest", "series": "kind", "panel": "checkpoint", "style": ".-"}
    curves(points, path, question, **keys, log="y", ylabel="largest |number| of the stream")
