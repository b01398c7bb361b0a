"""What does the SeedPrint that its authors released say, beside the test that the paper describes? (BB 6.1)

python -m reproduce.released BASE SUSPECT          # both tests, on the same outputs
"""

import numpy as np
import torch
from scipy.special import ndtr

from lib.settings import Command, run_script
from seedprint import PaperSettings, closed_form_z, compare_outputs, kendall, paper_test, top_dimensions


def released(settings: PaperSettings):
    """Does the authors' code call each suspect related to the base? `released_p`, beside the paper's test"""
    return compare_outputs(settings, lambda a, b: paper_test(a, b) | released_test(a, b))


def released_test(a, b):
    """What the authors' code does in place of `paper_test` (YnezT0311/SeedPrints, 42b4624).

    1. Take the dimensions with the lowest means in both models: 400 of each; a tenth of narrower ones (ours).
    2. Divide each model's states by 10, and apply a softmax over these dimensions to each input.
    3. For each dimension take Kendall's tau.
    4. p is twice the upper tail of their z; there is no null.
    """
    lowest = [top_dimensions(-rows)[: min(400, rows.shape[1] // 10)] for rows in (a, b)]
    chosen = np.intersect1d(*lowest)
    shares = [torch.tensor(rows[:, chosen] / 10).softmax(1).numpy() for rows in (a, b)]
    z = closed_form_z(kendall(*shares, range(len(chosen))), len(a))
    return {"released_k": len(chosen), "released_z": z, "released_p": min(1.0, 2 * ndtr(-z))}


COMMANDS = {"": Command(released, PaperSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
