"""Are two models of one birth, one initialisation, and of which seed? (BB 5 and 6.1; matching units is ours)

    python seedprint.py compare BASE SUSPECT               # ORG/NAME of the Hub, folders, files, nano_gpt2@42
    python seedprint.py paper BASE SUSPECT STRANGER        # the paper's own test, SeedPrint
    python seedprint.py matrix MODEL MODEL MODEL           # all pairs, and a family tree
    python seedprint.py identify SUSPECT --seeds 0 99999   # which seed of init.py?
    python seedprint.py persistence RUN                    # does the birth fade in training?

`compare` and `matrix` read weights alone, one matrix at a time: two models of 7B parameters fit into a
laptop's memory. What they ask of each pair is `lineage.verdict.compare_pair(base, suspect)`:

    it takes    two models of `read_model(name, source)`, of any architecture, width, depth and vocabulary
    it returns  a row: `verdict` (same birth, part in common, no evidence, inconclusive), `sentence`, numbers;
                and for the figure `layers`, a row for each layer of the suspect, and the `layer_map`

A hidden unit is known by what it does to tokens. With E_t token t's embedding, U_t its row of the head, and W
the unit's weights, its three views are the vectors over tokens t

    gate_t = W_gate E_t        up_t = W_up E_t        output_t = U_t W_down

which stay as they are if the stream is rotated, or units are shuffled. A unit of the base and one of the
suspect match if each has its largest |correlation| with the other in two views, or in both without a gate.

    share, r        how many of a layer's units match, and the median of their |correlations|
    units_found     that number in the layer shown: of those that are the base's, as below, the one with the
                    least share; if none is, the one with the largest
    distance        1 minus the correlation of what matched units read, in any basis: 1 - sqrt(cos(G, G')),
                    G and G' the cosines between these units in the base, and in the suspect
    body_r, body_z  correlation of weights of one name, number by number, the embedding matrix aside; how far
                    it is beyond those with coordinates relabelled (embedding_z: of the embedding matrix)

A layer of the suspect is the base's (the thresholds stand at the top of lineage/verdict.py) by one of these:

    bits            all of its matrices, whatever they are called, are those of one layer of the base
    hidden units    a share of at least 20 % with an r of 0.5 (unrelated models reach 0.26); or of 50 %, with
                    any r, in the middle of both models: after the first layer, before the last quarter
    coordinates     each of its matrices correlates by at least 0.1 with that of its name, number by number

    same birth      two layers are the base's, or the only one
    part in common  not so of the language models, but of a part of the one (a tower that reads images, a text
                    encoder, a draft head) and a part of the other, or all of it: `part` and `base_part`
    inconclusive    one layer of several is; or none, but a share reaches 10 % (both layers in the middle of
                    their models), 20 % (one), 50 % (neither); coordinates agree; or a child could not be seen
    no evidence     otherwise (on a first reading leave out `paper` and `persistence`, below)
"""

import itertools
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from scipy.spatial.distance import squareform

from init import SCHEMES, newborn
from lib.checkpoint import check_lengths, parse_spec, shortest_context, steps
from lib.figures import draw_persistence, family_tree, lineage_figure
from lib.inputs import random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import default_batch_size, progress, rank
from lib.settings import Command, OutputSettings, RunSettings, UserError, at_least, run_script
from lineage import coordinates
from lineage.verdict import PART_IN_COMMON, SAME_BIRTH, compare_pair, read_model, unread_row
from measure import births, kendall

VERDICT_COLUMNS = ("suspect", "verdict", "units_found", "units", "r", "distance", "body_z", "embedding_z")
STRANGER_SEED = 2**31 - 1  # of the newborn that is `persistence`'s stranger, where --stranger names none
IDENTIFIED = "model.layers.0.self_attn.v_proj.weight"  # the matrix whose birth `identify` looks for
NUMBERS = 65_536  # of its first numbers, that are drawn for each candidate
MOST_SEEDS = 10**7

Names = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL ...", help_behavior_hint="")
]


@dataclass
class CompareSettings(OutputSettings):
    """What `compare` and `matrix` are asked."""

    models: Names = ()  # BASE and SUSPECTs: names of the Hub, folders, files, PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # how newborns are drawn
    permutation_seed: int = 0  # seed of the relabellings of coordinates, and of tokens
    permutations: at_least(199) = 9999  # relabellings; the smallest p is 1 / (1 + this)
    layers: at_least(1) | None = None  # layers that are read, evenly spaced; None: all, or 8 of large models
    units_per_layer: at_least(2) = 1024  # hidden units that are looked for in each of them


@dataclass
class PaperSettings(RunSettings):
    """What `paper` is asked."""

    models: Names = ()  # BASE and SUSPECTs: names of the Hub, folders, or PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # how newborns are drawn
    input_seed: int = 0  # seed of the random sequences
    inputs: Literal["tokens", "gaussian"] = "tokens"  # what is read; gaussian makes strangers look like kin
    paper_sequences: at_least(3) = 1000  # random sequences; in the paper 10000
    paper_length: int = 64  # tokens in each of them; in the paper 1024


@dataclass
class PersistenceSettings(PaperSettings):
    """What `persistence` is asked, `paper`'s test with it."""

    models: Names = ()  # one run folder
    stranger: str | None = None  # run of another birth; None: a newborn of another seed


@dataclass
class IdentifySettings(OutputSettings):
    """What `identify` is asked."""

    models: Names = ()  # one model: a checkpoint folder, or PRESET@SEED
    seeds: tuple[int, int] = (0, 99_999)  # the first and the last candidate


def compare(settings: CompareSettings):
    """Is each suspect of one birth with the base? Seconds for tiny models, 15 for 135M parameters.

    A suspect that cannot be read costs the others nothing: its verdict is `not read`, the exit status 2.
    """
    check_several(settings.models)
    base_name, *names = settings.models
    base = open_model(base_name, settings)
    experiment = Experiment("compare", "BB 6.1", settings)
    numbers = (settings.permutation_seed, settings.permutations, settings.units_per_layer, settings.layers)
    rows, details, unread = [], [], []
    for name in progress(names, desc="suspects"):
        try:
            row, detail = compare_pair(base, open_model(name, settings), *numbers)
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
    numbers = (settings.permutation_seed, settings.permutations, settings.units_per_layer, settings.layers)
    rows, closeness = [], []
    for a, b in progress(list(itertools.combinations(models, 2)), desc="matrix", unit=" pairs"):
        row, _ = compare_pair(a, b, *numbers)
        rows.append({"a": a.name, "b": b.name} | row)
        closeness.append(kinship(row))
    names = [model.name for model in models]
    bare = [model.name for model in models if not model.readings[0].part.layers]
    if bare and rank() == 0:
        print(f"left out of the tree, without layers: {', '.join(bare)}", file=sys.stderr)
    label = "closeness: 1 - distance if of one birth, else 0 (o: a part in common)"
    closeness = squareform(closeness) + np.eye(len(names))
    have_part = squareform([row["verdict"] == PART_IN_COMMON for row in rows])
    family_tree(experiment.folder / "matrix.png", names, closeness, label, bare, have_part)
    return experiment.save(rows, ("a", "b", *VERDICT_COLUMNS))


def kinship(row):
    """How close two models are: 0 unless they are of one birth, as unrelated ones share units, and parts."""
    if row["verdict"] != SAME_BIRTH:
        return 0.0
    if row["distance"] is not None:
        return 1 - row["distance"]
    return 1.0 if row["body_r"] is None else row["body_r"]  # equal bits under other names


def check_several(names) -> None:
    """UserError if there is nothing to compare."""
    if len(names) < 2:
        raise UserError("expected at least 2 models: checkpoint folders, or PRESET@SEED")


def open_model(name, settings: CompareSettings):
    """The Model of a name on the command line, of any architecture; UserError if it cannot be read."""
    return read_model(name, parse_spec(name, settings.init).open(any_architecture=True))


def paper(settings: PaperSettings):
    """What does SeedPrint, the paper's own test, say of each suspect? (BB 6.1) Writes paper_test.json.

    Both models read the same inputs. Of dimensions that are extreme in both, Kendall's tau says whether they
    order the inputs alike; t-test and U-test (p-values `paper_t_p` and `paper_u_p`) compare these taus with
    those of Gaussian matrices.
    """
    check_several(settings.models)
    specs = [parse_spec(name, settings.init) for name in settings.models]
    check_comparable(specs, settings)
    experiment = Experiment("paper_test", "BB 6.1, Algorithm 1", settings)
    vocab_size = min(spec.config.vocab_size for spec in specs)  # ids that all models have
    where = (experiment.device, experiment.dtype)
    base_outputs = outputs_of(specs[0], where, vocab_size, settings)
    rows = []
    for spec in progress(specs[1:], desc="paper", unit=" suspects"):
        outputs = outputs_of(spec, where, vocab_size, settings)
        test = kendall.paper_test(base_outputs, outputs)
        rows.append({"base": specs[0].name, "suspect": spec.name} | test)
    return experiment.save(rows)


def check_comparable(specs, settings: PaperSettings) -> None:
    """UserError unless all models are of our architecture, of one width, and can read the inputs."""
    widths = {spec.name: spec.config.d_model for spec in specs}
    if len(set(widths.values())) > 1:
        raise UserError(f"only models of one width can be compared, not of {widths}")
    check_lengths((settings.paper_length,), shortest_context(specs), "--paper-length")


def outputs_of(spec, where, vocab_size, settings: PaperSettings):
    """`last_outputs` of a checkpoint; UserError, which names it, unless they are finite."""
    outputs = last_outputs(spec.load(*where), vocab_size, settings)
    if not outputs.isfinite().all():
        raise UserError(f"{spec.name}: its states are not finite: check its weights for huge numbers")
    return outputs


@torch.inference_mode()
def last_outputs(model, vocab_size, settings: PaperSettings):
    """What the paper's test reads: last-position states of random sequences, (n, d) on the CPU."""
    device = next(model.parameters()).device
    T = settings.paper_length
    batch_size = default_batch_size(device, T)
    outputs = []
    for start in range(0, settings.paper_sequences, batch_size):
        indices = range(start, min(start + batch_size, settings.paper_sequences))
        if settings.inputs == "gaussian":
            inputs = random_vectors(settings.input_seed, indices, T, model.config.d_model)
        else:
            inputs = random_tokens(settings.input_seed, indices, T, vocab_size)
        outputs.append(model.hidden(inputs.to(device), last_only=True).cpu())
    return torch.cat(outputs)


def identify(settings: IdentifySettings):
    """Which seed of init.py was the suspect born of? (ours) Writes identify.json with the best ten.

    `answer` is the seed, if its log10 p, corrected for the number of candidates (`family_log10_p`), is -6 or
    less, and null otherwise: then only the closest candidate is printed. A changed basis hides a birth.
    """
    if len(settings.models) != 1:
        raise UserError("identify expects one model: a checkpoint folder, or PRESET@SEED")
    first, last = settings.seeds
    if not 0 <= first <= last < first + MOST_SEEDS:
        raise UserError(f"--seeds {first} {last}: expected FIRST LAST, {MOST_SEEDS:,} candidates at most")
    source = parse_spec(settings.models[0]).open()
    if IDENTIFIED not in source.shapes:
        raise UserError(f"{settings.models[0]} has no {IDENTIFIED}, by which a birth is known")
    experiment = Experiment("identify", "ours", settings)
    candidates = range(first, last + 1)
    rows = births.closest_births(source, IDENTIFIED, NUMBERS, candidates)
    is_certain = rows[0]["family_log10_p"] <= coordinates.SAME_LOG10_P
    answer = rows[0]["seed"] if is_certain else None
    shown = rows if is_certain else rows[:1]
    result = experiment.save(rows, shown=shown, answer=answer, candidates=len(candidates))
    if rank() == 0:
        none = f"none of init.py's seeds {first} to {last}, unless its basis was changed"
        print(f"{settings.models[0]}: {f'seed {answer}' if is_certain else none}")
    return result


def persistence(settings: PersistenceSettings):
    """Does the birth fade in training? Every checkpoint of a run against it (BB Figures 11, 14).

    `mean_tau` and `std_tau` are of Kendall's tau of how birth and step order the inputs by a dimension, over
    the half of dimensions whose mean output is largest at birth. The stranger is the checkpoint of --stranger
    at the same step, else its last one. Writes persistence.json and .png.
    """
    folders = steps(settings.models[0]) if len(settings.models) == 1 else []
    if len(folders) < 2 or folders[0].name != "step_0000000":
        raise UserError("persistence expects one run folder with its birth, step_0000000, and a later step")
    specs = [parse_spec(str(folder)) for folder in folders]
    compared = specs[:1]
    strangers = {}  # their checkpoints by step
    if settings.stranger is not None:
        compared = [specs[0], parse_spec(settings.stranger)]
        strangers = {folder.name: parse_spec(str(folder)) for folder in steps(settings.stranger)}
    check_comparable(compared, settings)
    experiment = Experiment("persistence", "BB Figures 11 and 14", settings)
    where = (experiment.device, experiment.dtype)
    vocab_size = min(spec.config.vocab_size for spec in compared)
    birth_outputs = outputs_of(specs[0], where, vocab_size, settings)
    chosen = kendall.top_dimensions(birth_outputs.numpy())

    def taus_with_birth(outputs):
        return kendall.kendall(birth_outputs.numpy(), outputs.numpy(), chosen)

    if settings.stranger is None:
        stranger = newborn(specs[0].config, STRANGER_SEED, None, settings.init, *where)
        stranger_outputs = last_outputs(stranger, vocab_size, settings)
    else:
        stranger_outputs = outputs_of(compared[1], where, vocab_size, settings)
    stranger_taus = taus_with_birth(stranger_outputs)
    rows = []
    for spec in progress(specs, desc="checkpoints"):
        step = spec.folder.name
        outputs = outputs_of(spec, where, vocab_size, settings)
        taus = taus_with_birth(outputs)
        beside = stranger_taus
        if step in strangers:
            beside = taus_with_birth(outputs_of(strangers[step], where, vocab_size, settings))
        row = {"step": int(step.removeprefix("step_")), "mean_tau": taus.mean(), "std_tau": taus.std()}
        row |= {"stranger_mean_tau": beside.mean(), "stranger_std_tau": beside.std()}
        test = kendall.paper_test(birth_outputs, outputs)
        rows.append(row | {"paper_t_p": test["paper_t_p"], "paper_u_p": test["paper_u_p"]})
    draw_persistence(experiment.folder / "persistence.png", rows)
    return experiment.save(rows)


COMMANDS = {
    "compare": Command(compare, CompareSettings(), renamed={"--units": "--units-per-layer"}),
    "paper": Command(paper, PaperSettings()),
    "matrix": Command(matrix, CompareSettings(), renamed={"--units": "--units-per-layer"}),
    "identify": Command(identify, IdentifySettings()),
    "persistence": Command(persistence, PersistenceSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
