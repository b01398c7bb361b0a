"""Who belongs to whom? The family tree of `seedprint.py matrix` (BB Table 4)"""

import sys

import numpy as np

from lib.figures import family_tree
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
