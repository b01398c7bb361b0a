"""Which seed of init.py was a matrix born of? (ours)

>>> from lib import checkpoint
>>> source = checkpoint.parse_spec("nano_llama@7").open()
>>> closest_births(source, "model.layers.0.self_attn.v_proj.weight", 1000, range(9))[0]["seed"]
7
"""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from scipy import stats

from init import STD, draw_weight
from lib.runtime import progress
from lib.settings import UserError


def closest_births(source, parameter, count, seeds):
    """The ten of some seeds whose births of a matrix are closest to a source's, by its first `count` numbers.

    A newborn's numbers are Gaussian, so that their cosine with any fixed numbers has Student's law, and the
    search among all seeds costs their number (Bonferroni): `family_log10_p`.
    """
    shape = source.shapes[parameter]
    numbers = source.read(parameter).flatten()[:count].double().numpy()
    if not numbers.any():
        raise UserError(f"{source.place}: {parameter} is zero: it tells no birth")
    unit = (numbers / np.linalg.norm(numbers)).astype(np.float32)
    m = len(unit)

    def cosine_of(seed):
        birth = draw_weight(seed, parameter, shape, STD, m).numpy()
        return float(birth @ unit) / float(np.linalg.norm(birth))

    best = []
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy draws outside the interpreter lock
        for start in progress(range(0, len(seeds), 256), desc="seeds", unit=" x 256"):
            part = seeds[start : start + 256]
            best += zip(pool.map(cosine_of, part), part)
            best = sorted(best, reverse=True)[:10]
    rows = []
    for cosine, seed in best:
        t = cosine * ((m - 1) / max(1 - cosine**2, 1e-300)) ** 0.5
        log10_p = max(-300.0, stats.t.logsf(t, m - 1) / math.log(10))  # scipy has no numbers below
        family_log10_p = min(0.0, log10_p + math.log10(len(seeds)))
        rows.append({"seed": seed, "cosine": cosine, "z": cosine * m**0.5, "family_log10_p": family_log10_p})
    return rows
