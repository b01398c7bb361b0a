"""Do two models go back to one birth, and which seed was it? (BB 5 and 6.1; matching units is ours)

    python seedprint.py compare BASE SUSPECT               # ORG/NAME of the Hub, folders, files, nano_gpt2@42
    python seedprint.py matrix MODEL MODEL MODEL           # all pairs, and a family tree
    python seedprint.py identify SUSPECT --seeds 0 99999   # which seed of init.py?
    python seedprint.py paper BASE SUSPECT STRANGER        # SeedPrint, the paper's own test
    python seedprint.py persistence RUN                    # does the birth fade in training?

`compare` and `matrix` read weights alone, of any architecture, width, depth and vocabulary, one matrix at a
time: two models of 7B parameters fit into a laptop's memory. `measure/matching.py` shows how a hidden unit of
the base is matched with one of the suspect, `lineage/compare.py` how all layers are (lineage/verdict.py
calls it), and `lineage/table.py` judges. `identify` draws 65,536 numbers of one matrix for each seed: the
best one's seed is the answer if its p, times the number of seeds, is at most 10^-6. The columns of a row:

    units_share, r  the share of a layer's units that were matched, and the median |correlation| of these
    units_found     matched of `units`: of a child in the worst of the layers that are the base's, of others
                    in the best layer
    distance        how far matched units' input weights moved: 0 is a copy, 1 a stranger. Cosines between the
                    units of one model are correlated with those of the other; no rotation changes these
    body_r          the correlation of weights of one name, number by number, without the embedding matrix
    body_z          how many standard deviations body_r lies above what relabelled coordinates give
    embedding_z     the same of the embedding matrix

Each layer of the suspect is looked for in the base. A layer in the *middle* stands before the last quarter
of its model, and, if there are eight or more, behind the first one. If chance does not explain the count
(p at most 10^-6, corrected for all pairs of layers), the share of matched units decides:

    the base's      from 20 % where r is at least 0.5, or from 50 % if both layers are in the middle
    inconclusive    from 10 % if both are in the middle, from 20 % if one is, from 50 % if none is

Four language models that never met have an r below 0.26. Once two layers are the base's, 50 % suffice.
A layer is also the base's if all of its matrices are those of one layer of the base, bit for bit; or if all
coordinates agree (`body_z`), and each of its matrices correlates by at least 0.1 with its namesake. Verdicts:

    same birth      if two layers are two of the base's, or the only layer is
    part in common  if the models are not shown to be of one birth, but a part of one (a tower that reads
                    images, a text encoder, a draft head) is a part or all of the other
    inconclusive    if only one of several layers is the base's, or coordinates agree and no layer is; if more
                    units are matched than strangers share; or if a child could hide in what was not looked at
    no evidence     otherwise
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from init import SCHEMES
from lib.figures import lineage_figure
from lib.results import Experiment
from lib.runtime import progress, rank
from lib.settings import Command, OutputSettings, UserError, at_least, run_script
from lineage.births import IdentifySettings, identify
from lineage.family import draw_family
from lineage.outputs import Names, PaperSettings, PersistenceSettings, paper, persistence
from lineage.verdict import compare_pair, read_model, unread_row
from sources.checkpoint import parse_spec

VERDICT_COLUMNS = ("suspect", "verdict", "units_found", "units", "r", "distance", "body_z", "embedding_z")


@dataclass
class CompareSettings(OutputSettings):
    """What `compare` and `matrix` are asked."""

    models: Names = ()  # BASE and SUSPECTs: names of the Hub, folders, files, PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # how newborns are drawn
    permutation_seed: int = 0  # seed of the relabellings of coordinates, and of tokens
    permutations: at_least(199) = 9999  # relabellings
    layers: at_least(1) | None = None  # layers that are read, evenly spaced; None: all, or 8 of large models
    units_per_layer: at_least(2) = 1024  # hidden units that are looked for in each of them


def compare(settings: CompareSettings):
    """Is each suspect of one birth with the base? Seconds for tiny models, 20 for 135M parameters.

    A suspect that cannot be read does not stop the others. Its verdict is `not read`, and the script ends
    with status 2.
    """
    check_several(settings.models)
    base_name, *names = settings.models
    base = open_model(base_name, settings)
    experiment = Experiment("compare", "BB 6.1", settings)
    rows, details, unread = [], [], []
    for name in progress(names, desc="suspects"):
        try:
            row, detail = judged(base, open_model(name, settings), settings)
        except UserError as error:
            row, detail = unread_row(error), {"layers": [], "layer_map": {}}
            unread.append(error)
        rows.append({"base": base_name, "suspect": name} | row)
        details.append(detail)
    if len(unread) == len(names):
        raise unread[0]
    lineage_figure(experiment.folder / "compare.png", base.name, rows, details)
    more = {key: [detail[key] for detail in details] for key in ("layers", "layer_map")}
    result = experiment.save(rows, VERDICT_COLUMNS, **more)
    if rank() == 0:
        for row in rows:
            print(f"{row['suspect']}: {row['verdict']}: {row['sentence']}")
    if unread:
        raise UserError(f"{len(unread)} of {len(names)} suspects not read: {unread[0]}")
    return result


def matrix(settings: CompareSettings):
    """Which of several models are of one birth? All pairs, a heat map and a family tree (BB Table 4)."""
    check_several(settings.models)
    experiment = Experiment("matrix", "BB Table 4", settings)
    models = [open_model(name, settings) for name in settings.models]
    rows = []
    for a, b in progress(list(itertools.combinations(models, 2)), desc="matrix", unit=" pairs"):
        row, _ = judged(a, b, settings)
        rows.append({"a": a.name, "b": b.name} | row)
    draw_family(experiment.folder / "matrix.png", models, rows)
    return experiment.save(rows, ("a", "b", *VERDICT_COLUMNS))


def check_several(names) -> None:
    """UserError if there is nothing to compare."""
    if len(names) < 2:
        raise UserError("expected at least 2 models: checkpoint folders, or PRESET@SEED")


def judged(base, suspect, settings: CompareSettings):
    """The row of two models, and for the figure their layers' rows, and the layer map."""
    seed, permutations = settings.permutation_seed, settings.permutations
    return compare_pair(base, suspect, seed, permutations, settings.units_per_layer, settings.layers)


def open_model(name, settings: CompareSettings):
    """The Model of a name on the command line, of any architecture; UserError if it cannot be read."""
    return read_model(name, parse_spec(name, settings.init).open(any_architecture=True))


COMMANDS = {
    "compare": Command(compare, CompareSettings()),
    "paper": Command(paper, PaperSettings()),
    "matrix": Command(matrix, CompareSettings()),
    "identify": Command(identify, IdentifySettings()),
    "persistence": Command(persistence, PersistenceSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
