"""Who belongs to whom? The figures of `seedprint.py compare` and `matrix` (BB Table 4)"""

import sys

import numpy as np

from lib.figures import new_figure, save_figure, short_names
from lib.runtime import rank
from lineage.table import PART_IN_COMMON, SAME_BIRTH


def draw_family(path, models, rows) -> None:
    """Draw models as a tree and a heat map. The rows are of all pairs, in `combinations`' order."""
    from scipy.spatial.distance import squareform  # which takes a while that `compare` need not

    names = [model.name for model in models]
    bare = [model.name for model in models if not model.stacks[0].layers]
    if bare and rank() == 0:
        print(f"left out of the tree, without layers: {', '.join(bare)}", file=sys.stderr)
    closeness = squareform([kinship(row) for row in rows]) + np.eye(len(names))
    have_part = squareform([row["verdict"] == PART_IN_COMMON for row in rows])
    label = "closeness: 1 - distance (o: a part in common)"
    family_tree(path, names, closeness, label, bare, have_part)


def kinship(row):
    """How close two models are: 0 unless of one birth, since strangers share units and parts, too."""
    if row["verdict"] != SAME_BIRTH:
        return 0.0
    if row["distance"] is not None:
        return 1 - row["distance"]
    return 1.0 if row["body_r"] is None else row["body_r"]  # None: the bits are equal, the names are not


def family_tree(path, names, closeness, label, left_out, marked) -> None:
    """Draw models as a tree and a heat map of `closeness` (n, n); `marked` pairs (n, n) get a circle."""
    from scipy.cluster.hierarchy import dendrogram, linkage  # half a second to import
    from scipy.spatial.distance import squareform

    count = len(names)
    size = (2.5 + 0.45 * count, 2 + 0.55 * count)
    figure, ((tree, heat),) = new_figure("Which models are of one birth?", 1, 2, *size, width_ratios=(1, 2))
    order = [i for i in range(count) if names[i] not in left_out]
    if len(order) > 1:
        distances = squareform(1 - np.clip(closeness[np.ix_(order, order)], 0, 1), checks=False)
        leaves = dendrogram(linkage(distances, "average"), ax=tree, orientation="left")["leaves"]
        order = [order[leaf] for leaf in leaves]
    tree.set(xlabel="distance", title="family tree", yticks=[], ylim=(0, 10 * count))
    shown = np.full((count, count), np.nan)
    shown[: len(order), : len(order)] = closeness[np.ix_(order, order)]
    order += [i for i in range(count) if i not in order]
    heat.set_facecolor("lightgrey")
    image = heat.imshow(shown, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower")
    heat.scatter(*np.nonzero(marked[np.ix_(order, order)]), edgecolors="white", facecolors="none")
    labels = [short_names(names)[i] for i in order]
    heat.set_xticks(range(count), labels, rotation=40, ha="right", fontsize=8)
    heat.set_yticks(range(count), labels, fontsize=8)
    figure.colorbar(image, label=label)
    save_figure(figure, path)


def lineage_figure(path, base, rows, details) -> None:
    """Draw the share of matched neurons in each suspect's layers, and which layers of the base they match."""
    title = f"Which of each suspect's layers are those of {short_names([base])[0]}?"
    figure, grid = new_figure(title, len(rows), 2, width=5.6, height=2.4)
    names = short_names([row["suspect"] for row in rows])
    for (units, layer_map), name, row, detail in zip(grid, names, rows, details):
        units.set_title(f"{name}: {row['verdict']}", loc="left", fontsize=10, fontweight="bold")
        keys = ("share", "r", "by_chance", "units")
        columns = [[layer[key] for layer in detail["layers"]] for key in keys]
        share, r, by_chance, num_units = np.array(columns, float)  # None, a gap, for a layer without neurons
        places = range(1, len(share) + 1)
        units.plot(places, 100 * share, "o-", label="matched")
        units.plot(places, 100 * r, ".:", label="strength r, in %")
        chance = 100 * by_chance / np.maximum(1, num_units)
        units.plot(places, chance, "x--", color="black", label="by chance: tokens permuted")
        units.set(ylim=(-5, 105), xlabel="MLP of the suspect", ylabel="% of units")
        units.legend(frameon=False, fontsize=9)
        if detail["layer_map"]:
            shares = 100 * np.array(detail["layer_map"]["share"])
            extent = (0.5, shares.shape[1] + 0.5, 0.5, shares.shape[0] + 0.5)
            image = layer_map.imshow(shares, "cividis", vmin=0, vmax=100, origin="lower", extent=extent)
            layer_map.set(xlabel="MLP of the suspect", ylabel="MLP of the base", aspect="auto")
            figure.colorbar(image, ax=layer_map, label="% matched")
    save_figure(figure, path)
