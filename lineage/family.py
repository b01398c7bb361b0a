"""Who belongs to whom? The figure of `seedprint.py matrix` (BB Table 4)"""

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
    labels = np.array(short_names([model.name for model in models]))[order]
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
