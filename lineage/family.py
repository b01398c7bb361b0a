"""Who belongs to whom? The figures of `seedprint.py compare` and `matrix` (BB Table 4)"""

import numpy as np

from lib.figures import new_figure, save_figure, short_names
from lineage.judge import SAME_BIRTH


def draw_family(path, models, rows) -> None:
    """Draw models as a tree and a heat map. The rows are of all pairs, in `combinations`' order."""
    from scipy.cluster.hierarchy import dendrogram, linkage  # half a second to import
    from scipy.spatial.distance import squareform

    count = len(models)
    closeness = squareform([kinship(row) for row in rows]) + np.eye(count)
    closeness[[not model.stacks[0].layers for model in models]] = np.nan  # grey: nothing to compare
    size = (2.5 + 0.45 * count, 2 + 0.55 * count)
    figure, ((tree, heat),) = new_figure("Which models are of one birth?", 1, 2, *size, width_ratios=(1, 2))
    distances = squareform(1 - np.nan_to_num(closeness).clip(0, 1), checks=False)
    order = dendrogram(linkage(distances, "average"), ax=tree, orientation="left")["leaves"]
    tree.set(xlabel="distance", title="family tree", yticks=[])
    heat.set_facecolor("lightgrey")
    shown = closeness[np.ix_(order, order)]
    image = heat.imshow(shown, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower")
    labels = [short_names([model.name for model in models])[i] for i in order]
    heat.set_xticks(range(count), labels, rotation=40, ha="right", fontsize=8)
    heat.set_yticks(range(count), labels, fontsize=8)
    figure.colorbar(image, label="closeness: 1 - distance, or r of neurons")
    save_figure(figure, path)


def kinship(row):
    """How close two models are, by their matrices or else by their neurons; 0 unless of one birth."""
    if row["verdict"] != SAME_BIRTH:
        return 0.0  # strangers share neurons, too
    if row["distance"] is not None:
        return 1 - row["distance"]
    return 1.0 if row["r"] is None else row["r"]  # None: the bits are equal, the names are not


def lineage_figure(path, base, rows, details) -> None:
    """Draw the share of matched neurons in each suspect's layers, and which layers of the base they match."""
    title = f"Which of each suspect's layers are those of {short_names([base])[0]}?"
    figure, grid = new_figure(title, len(rows), 2, width=5.6, height=2.4)
    names = short_names([row["suspect"] for row in rows])
    for (units, layer_map), name, row, detail in zip(grid, names, rows, details):
        units.set_title(f"{name}: {row['verdict']}", loc="left", fontsize=10, fontweight="bold")
        keys = ("share", "r", "by_chance", "units")
        columns = [[layer[key] for layer in detail["layers"]] for key in keys]
        share, r, by_chance, count = np.array(columns, float)  # None, a gap, for a layer without neurons
        places = range(1, len(share) + 1)
        units.plot(places, 100 * share, "o-", label="matched")
        units.plot(places, 100 * r, ".:", label="strength r, in %")
        units.plot(places, 100 * by_chance / np.maximum(1, count), "x--", color="black", label="by chance")
        units.set(ylim=(-5, 105), xlabel="MLP of the suspect", ylabel="% of units")
        units.legend(frameon=False, fontsize=9)
        if detail["layer_map"]:
            shares = 100 * np.array(detail["layer_map"]["share"])
            extent = (0.5, shares.shape[1] + 0.5, 0.5, shares.shape[0] + 0.5)
            image = layer_map.imshow(shares, "cividis", vmin=0, vmax=100, origin="lower", extent=extent)
            layer_map.set(xlabel="MLP of the suspect", ylabel="MLP of the base", aspect="auto")
            figure.colorbar(image, ax=layer_map, label="% matched")
    save_figure(figure, path)
