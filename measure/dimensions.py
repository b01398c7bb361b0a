"""How many dimensions does the residual stream use, does one stand out, and what does attention write to?

>>> import torch
>>> from measure.dimensions import EffectiveRank
>>> rank = EffectiveRank()
>>> rank.update(torch.eye(8).repeat(1, 10, 1))  # eight states in as many directions, centred: seven are left
>>> round(rank.value(), 6)
7.0
"""

import torch
from scipy.stats import kendalltau
from torch import Tensor


class EffectiveRank:
    """How many directions states spread over, of batches that stream by (ours; SO gives no formula).

    It is exp of the entropy of the singular values of the centred states (n T, d), which are scaled to sum 1.
    """

    def __init__(self):
        self.count = 0
        self.total = 0.0
        self.products = 0.0

    def update(self, states: Tensor) -> None:
        """Add states (..., d)."""
        states = states.flatten(0, -2).double()
        self.count += len(states)
        self.total = self.total + states.sum(0)
        self.products = self.products + states.T @ states

    def value(self):
        """The effective rank, from 1 to d; 0 of states that are all equal."""
        centred = self.products - torch.outer(self.total, self.total) / self.count
        values = torch.linalg.eigvalsh(centred).clamp(min=0).sqrt()
        noise = 1e-7 * values.max()  # what is left of a difference of equal numbers
        shares = values[values > noise] / values.sum()
        return torch.special.entr(shares).sum().exp().item() if len(shares) else 0.0


def dominance_ratio(states: Tensor) -> Tensor:
    """max |h| / mean |h| over dimensions, of states (..., d): SO's dimension disparity."""
    states = states.float().abs()
    return states.amax(-1) / states.mean(-1)


def output_tau(weight: Tensor, std: Tensor):
    """Kendall's tau of the lengths of W_O's columns (d, H Dh) with the standard deviation of their input.

    It says how much the output projection keeps of what varies in the aggregated values, std (H Dh,): above
    0, what varies more is written more strongly (SO: 0.32 in the mean). None where nothing varies.
    """
    strengths = weight.float().norm(dim=0).cpu()
    tau = kendalltau(strengths.numpy(), std.numpy()).statistic
    return None if tau != tau else float(tau)
