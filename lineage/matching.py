"""Match the neurons of two models by what they do to tokens (ours).

In one view, a neuron of the base and one of the suspect are *mutual neighbours* if each has its largest
|correlation| with the other. One view is not enough: half of the neurons of unrelated models have a mutual
neighbour, too. But another view then usually names another neuron, so a neuron is *matched* if two views
(`lineage/views.py`) agree. In each layer we use the pair of views that matches most. A child has nearly all
its neurons matched, an unrelated newborn on average fewer than one per layer. The null is measured: the same
count after what ties the two models is permuted (`by_chance` in lineage/align.py).
"""

import itertools

import torch
from torch import Tensor


def mutual_neighbours(correlations: Tensor):
    """Each neuron's mutual neighbour in one view, (n,), -1 for none, and its largest |correlation|, (n,).

    `correlations` (n, m) are the |correlations| of n neurons of one model with m of the other.
    """
    largest, neighbours = correlations.max(dim=1)
    largest_of_theirs = correlations.amax(dim=0)
    is_mutual = (largest_of_theirs[neighbours] == largest) & (largest > 0)
    return neighbours.where(is_mutual, -1), largest


def matched_neurons(views):
    """Matched neurons, their partners, and the smaller |correlation| of the two views, (k,) each.

    `views` holds `mutual_neighbours` of each view.
    """
    best = (torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0))
    for (partners, sizes), (others, other_sizes) in itertools.combinations(views, 2):
        (units,) = torch.nonzero((partners == others) & (partners >= 0), as_tuple=True)
        if len(units) > len(best[0]):
            best = (units, partners[units], torch.minimum(sizes, other_sizes)[units])
    return best
