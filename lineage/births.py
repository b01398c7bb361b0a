"""Which seed of init.py initialized a model? (ours)

The beginning of one of its matrices is compared with what each seed draws there.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from scipy.special import stdtr

from init import STD, draw_weight
from lib.results import Experiment
from lib.runtime import progress, rank
from lib.settings import OutputSettings, UserError
from lineage.coordinates import CHANCE_LOG10_P
from sources.checkpoint import find_model

IDENTIFIED = "model.layers.0.self_attn.v_proj.weight"  # the matrix that `identify` draws for each candidate,
FIRST_NUMBERS = 65_536  # up to this many numbers


@dataclass
class IdentifySettings(OutputSettings):
    """The settings of `identify`."""

    suspect: tyro.conf.Positional[str] = tyro.MISSING  # a checkpoint folder, or PRESET@SEED
    seeds: tuple[int, int] = (0, 99_999)  # the first and the last candidate


def identify(settings: IdentifySettings):
    """Which seed of init.py initialized the suspect? (ours) Writes identify.json with the best ten.

    `answer` is the best seed if its log10 p, corrected for all candidates (`family_log10_p`), is at most -6;
    else it is null, and only the closest candidate is printed. A changed basis hides the seed.
    """
    first, last = settings.seeds
    if not 0 <= first <= last:
        raise UserError(f"--seeds {first} {last}: expected FIRST LAST")
    source = find_model(settings.suspect, weights_alone=True).weights
    if IDENTIFIED not in source.shapes:
        raise UserError(f"{settings.suspect} has no {IDENTIFIED}, which shows the seed")
    experiment = Experiment("identify", "ours", settings)
    candidates = range(first, last + 1)
    rows = closest_births(source, candidates)
    answer, shown = None, rows[:1]
    said = f"none of init.py's seeds {first} to {last}, unless its basis was changed"
    if rows[0]["family_log10_p"] <= CHANCE_LOG10_P:
        answer, shown = rows[0]["seed"], rows
        said = f"seed {answer}"
    result = experiment.save(rows, shown=shown, answer=answer, candidates=len(candidates))
    if rank() == 0:
        print(f"{settings.suspect}: {said}")
    return result


def closest_births(source, seeds):
    """Returns rows for the ten seeds whose IDENTIFIED is closest to a checkpoint's, by FIRST_NUMBERS.

    Initial weights are Gaussian, so their cosine with fixed numbers has a Student's t distribution.
    `family_log10_p` is corrected for the number of seeds (Bonferroni).
    """
    first_rows = slice(0, -(-FIRST_NUMBERS // source.shapes[IDENTIFIED][-1]))
    numbers = source.read(IDENTIFIED, (first_rows,)).flatten()[:FIRST_NUMBERS].double().numpy()
    if not numbers.any():
        raise UserError(f"{source.place}: {IDENTIFIED} is zero: it shows no seed")
    unit = (numbers / np.linalg.norm(numbers)).astype(np.float32)
    m = len(unit)

    def cosine_of(seed):
        birth = draw_weight(seed, IDENTIFIED, source.shapes[IDENTIFIED], STD, m).numpy()
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
        log10_p = math.log10(max(1e-300, stdtr(m - 1, -t)))  # scipy has no numbers below
        family_log10_p = min(0.0, log10_p + math.log10(len(seeds)))
        rows.append({"seed": seed, "cosine": cosine, "z": cosine * m**0.5, "family_log10_p": family_log10_p})
    return rows
