"""Which hidden units of one model are those of another? (ours)

A hidden unit is known by what it does to tokens. Let E_t be the embedding of token t, U_t the row of the head
that scores t, and W the unit's weights. A unit with a gate has three *views*, vectors over all common tokens:

    gate_t = W_gate E_t        up_t = W_up E_t        output_t = U_t W_down

The gain of the norm before a matrix counts as part of the matrix: W_gate, W_up and U have absorbed it. A unit
without a gate has two views. Rotating the residual stream rotates E and U, too, and changes no view.
Shuffling units only renames them. Flipping a unit's signs only flips signs of its views.

In one view, a unit of the base and one of the suspect are *mutual neighbours* if each has its largest
|correlation| with the other. One view is not enough: in unrelated models half of the units have a mutual
neighbour, too. But another view then usually names another unit, so a unit is *matched* if two views name one
neighbour. For a whole layer one pair of views counts: the pair that matches most. Nearly all units of a child
are matched, and on average fewer than one in a layer of an unrelated newborn. The null is measured: the same
count after the tokens of one model have been permuted (`by_chance` in lineage/match.py).
"""

import itertools

import torch
from torch import Tensor


def mutual_neighbours(correlations: Tensor):
    """Each unit's mutual neighbour in one view, (n,), or -1 for none; and its largest |correlation|, (n,).

    `correlations` (n, m) are the |correlations| of n units of one model with m of the other.
    """
    largest, neighbours = correlations.max(dim=1)
    largest_of_theirs = correlations.amax(dim=0)
    is_mutual = (largest_of_theirs[neighbours] == largest) & (largest > 0)
    return neighbours.where(is_mutual, -1), largest


def matched_units(views):
    """The matched units' numbers, their partners' numbers, and the smaller |correlation| of two views: (k,).

    `views` has the `mutual_neighbours` of each view.
    """
    best = (torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0))
    for (partners, sizes), (others, other_sizes) in itertools.combinations(views, 2):
        (units,) = torch.nonzero((partners == others) & (partners >= 0), as_tuple=True)
        if len(units) > len(best[0]):
            best = (units, partners[units], torch.minimum(sizes, other_sizes)[units])
    return best
