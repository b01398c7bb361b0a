"""Are two models of one birth, one initialisation, and of which seed? (BB 5 and 6.1; the exact test is ours)

    python seedprint.py compare BASE SUSPECT               # checkpoint folders, or newborns: nano_gpt2@42
    python seedprint.py paper BASE SUSPECT STRANGER        # the paper's own test, SeedPrint
    python seedprint.py matrix MODEL MODEL MODEL           # all pairs, and a family tree
    python seedprint.py identify SUSPECT --seeds 0-99999   # which seed of init.py?
    python seedprint.py persistence RUN                    # does the birth fade in training?

A base's hidden units are looked for in a suspect (`measure/census.py`), whatever the architecture, width and
basis, and coordinates are compared by an exact test (`measure/lineage.py`). Models are read one matrix at a
time: two of 7B parameters fit into a laptop's memory.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from scipy.spatial.distance import squareform

from init import SCHEMES
from lib.checkpoint import Newborn, check_lengths, final_states, parse_spec, shortest_context, steps
from lib.figures import curves, evidence, family_tree
from lib.inputs import random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import progress, rank
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from measure import lineage
from measure.verdict import compare_pair, read_model

VERDICT_COLUMNS = ("suspect", "verdict", "units_found", "units", "distance", "body_z", "embedding_z")
STRANGER_SEED = 2**31 - 1  # of the newborn that is `persistence`'s stranger, where --stranger names none

Models = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL ...", help_behavior_hint="")
]


@dataclass
class CompareSettings(RunSettings):
    """What `compare` can be told, and `matrix`."""

    models: Models = ()
    """BASE and SUSPECTs: checkpoint folders, or PRESET@SEED"""
    init: Literal[SCHEMES] = "gpt2"
    """how newborns are drawn"""
    input_seed: int = 0
    """seed of the random sequences and of the permutations"""
    num_sequences: at_least(1) = 16
    """random sequences; each of their positions is a row of states"""
    sequence_length: at_least(3) = 64
    """tokens in a sequence"""
    permutations: at_least(199) = 9999
    """relabellings; the smallest p is 1 / (1 + this)"""
    layers: at_least(1) | None = None
    """layers whose hidden units are looked for, evenly spaced; None: all, or 8 of large models"""
    units: at_least(2) = 1024
    """how many of them in each MLP of the base"""


@dataclass
class PaperSettings(RunSettings):
    """What the paper's test can be told."""

    models: Models = ()
    """BASE and SUSPECTs: checkpoint folders, or PRESET@SEED"""
    init: Literal[SCHEMES] = "gpt2"
    """how newborns are drawn"""
    input_seed: int = 0
    """seed of the random sequences"""
    inputs: Literal["tokens", "gaussian"] = "tokens"
    """what the models read; gaussian makes strangers look like kin"""
    paper_sequences: at_least(3) = 1000
    """random sequences; in the paper 10000"""
    paper_length: int = 64
    """tokens in each of them; in the paper 1024"""
    side: Literal["top", "bottom"] = "top"
    """dimensions of the largest, or of the smallest mean output"""
    top_k: at_least(1) | None = None
    """how many of them, in each model; None: half of the width"""
    softmax_temperature: at_least(1e-6, float) | None = None
    """of a softmax over the chosen columns; in the authors' code 10"""


@dataclass
class PersistenceSettings(PaperSettings):
    """What `persistence` can be told: what the paper's test can, and the exact test of states."""

    models: Models = ()
    """one run folder"""
    stranger: str | None = None
    """run of another birth; None: a newborn of another seed"""
    num_sequences: at_least(1) = 16
    """random sequences of the exact test; each of their positions is a row"""
    sequence_length: at_least(3) = 64
    """tokens in a sequence of the exact test"""
    permutations: at_least(199) = 9999
    """relabellings; the smallest p is 1 / (1 + this)"""


@dataclass
class IdentifySettings(RunSettings):
    """What `identify` can be told."""

    models: Models = ()
    """one model: a checkpoint folder, or PRESET@SEED"""
    seeds: str = "0-99999"
    """candidates, FIRST-LAST"""
    parameter: str = "model.layers.0.self_attn.v_proj.weight"
    """matrix to look for"""
    numbers: at_least(4) = 65_536
    """how many of its first numbers are drawn for each candidate"""


# ---- what is compared --------------------------------------------------------------------------------------


def several_models(names, scheme):
    """The models of a command line; UserError for fewer than two."""
    if len(names) < 2:
        raise UserError("expected at least 2 models: checkpoint folders, or PRESET@SEED")
    return [parse_spec(name, scheme) for name in names]


def comparable_models(names, scheme):
    """The same; UserError unless all are of our architecture and of one width."""
    specs = several_models(names, scheme)
    widths = {spec.name: spec.config.d_model for spec in specs}
    if len(set(widths.values())) > 1:
        raise UserError(f"only models of one width can be compared, not of {widths}")
    return specs


def common_vocabulary(specs):
    """The number of token ids that all models have."""
    return min(spec.config.vocab_size for spec in specs)


def last_outputs(source, vocab_size, settings: PaperSettings):
    """What the paper's test reads: final last-position states of random sequences, (n, d) on the CPU."""
    d = source.config.d_model
    T = settings.paper_length
    batch_size = max(1, 2**27 // (T * d))  # half a gigabyte of states
    parts = []
    for start in range(0, settings.paper_sequences, batch_size):
        indices = range(start, min(start + batch_size, settings.paper_sequences))
        if settings.inputs == "gaussian":
            inputs = random_vectors(settings.input_seed, indices, T, d)
        else:
            inputs = random_tokens(settings.input_seed, indices, T, vocab_size)
        states = final_states(source, inputs, settings.device, settings.torch_dtype, last_only=True)
        parts.append(states.cpu())
    return torch.cat(parts)


# ---- the verdict -------------------------------------------------------------------------------------------


def compare(settings: CompareSettings):
    """Is each suspect of one birth with the base? Seconds for tiny models, a minute for 135M parameters."""
    experiment, (base, *suspects), numbers = begin("compare", "BB 6.1", settings)
    rows, details = [], []
    for suspect in progress(suspects, desc="suspects"):
        row, detail = compare_pair(base, suspect, *numbers)
        rows.append({"base": base.name, "suspect": suspect.name} | row)
        details.append(detail)
    panels = []
    for row, detail in zip(rows, details):
        found = f" ({row['units_found']:,} of {row['units']:,} units)" if row["units"] else ""
        name = f"{row['suspect']}: {row['verdict']}{found}"
        panels.append((name, detail["layers"], detail["points"], detail["layer_map"]))
    question = "Which of the base's hidden units and coordinates has each suspect?"
    evidence(experiment.folder / "compare.png", panels, question)
    more = {key: [detail[key] for detail in details] for key in details[0]}
    result = experiment.save(rows, VERDICT_COLUMNS, **more)
    if rank() == 0:
        for row in rows:
            print(f"{row['suspect']}: {row['verdict']}: {row['sentence']}")
    return result


def begin(name, paper, settings: CompareSettings):
    """Begin `compare` or `matrix`: the experiment, its models, and what `compare_pair` is told."""
    specs = several_models(settings.models, settings.init)
    sources = [spec.open(any_architecture=True) for spec in specs]
    readable = [source for source in sources if source.config is not None]
    tokens = None
    if readable:
        check_lengths((settings.sequence_length,), shortest_context(readable))
        indices = range(settings.num_sequences)
        vocab_size = common_vocabulary(readable)
        tokens = random_tokens(settings.input_seed, indices, settings.sequence_length, vocab_size)
    experiment = Experiment(name, paper, settings)
    where = (experiment.device, experiment.dtype)
    models = [read_model(spec.name, source, tokens, *where) for spec, source in zip(specs, sources)]
    return experiment, models, (settings.input_seed, settings.permutations, settings.units, settings.layers)


def matrix(settings: CompareSettings):
    """Which of several models are kin? All pairs, a heat map and a family tree (BB Table 4)."""
    experiment, models, numbers = begin("matrix", "BB Table 4", settings)
    rows = []
    for a, b in progress(list(itertools.combinations(models, 2)), desc="matrix", unit=" pairs"):
        rows.append({"a": a.name, "b": b.name} | compare_pair(a, b, *numbers)[0])
    found = []
    for row in rows:
        by_share = row["units_share"] or row["body_matched"] or 0
        found.append(by_share if row["distance"] is None else 1 - row["distance"])
    names = [model.name for model in models]
    label = "closeness: 1 - distance of hidden units"
    closeness = squareform(found) + np.eye(len(names))
    family_tree(experiment.folder / "matrix.png", names, closeness, label, "Which models are kin?")
    return experiment.save(rows, ("a", "b", *VERDICT_COLUMNS))


# ---- the paper's test (BB 6.1.1, Algorithm 1) --------------------------------------------------------------


def paper(settings: PaperSettings):
    """What does SeedPrint, the paper's own test, say of each suspect? (BB 6.1) Writes paper_test.json."""
    specs = comparable_models(settings.models, settings.init)
    check_paper_settings(settings, specs)
    experiment = Experiment("paper_test", "BB 6.1, Algorithm 1", settings)
    vocab_size = common_vocabulary(specs)
    base_outputs = last_outputs(specs[0].open(), vocab_size, experiment.settings)
    rows = []
    for spec in progress(specs[1:], desc="paper", unit=" suspects"):
        outputs = last_outputs(spec.open(), vocab_size, experiment.settings)
        test = paper_test(base_outputs, outputs, settings)
        rows.append({"base": specs[0].name, "suspect": spec.name} | test)
    return experiment.save(rows)


def check_paper_settings(settings: PaperSettings, specs) -> None:
    """UserError for a length or a number of dimensions that the models do not have."""
    check_lengths((settings.paper_length,), shortest_context(specs), "--paper-length")
    lineage.check_top_k(settings.top_k, specs[0].config.d_model)


def paper_test(a, b, settings: PaperSettings):
    """The paper's test of two models' `last_outputs`."""
    return lineage.paper_test(a, b, settings.side, settings.top_k, settings.softmax_temperature)


# ---- which seed? -------------------------------------------------------------------------------------------


def identify(settings: IdentifySettings):
    """Which seed of init.py was the suspect born of? (ours) Writes identify.json with the best ten.

    `answer` is the seed, if its log10 p, corrected for the number of candidates, is -6 or less, and null
    otherwise: then only the closest candidate is printed. It knows births of init.py, in their basis.
    """
    if len(settings.models) != 1:
        raise UserError("identify expects one model: a checkpoint folder, or PRESET@SEED")
    candidates = parse_seeds(settings.seeds)
    source = parse_spec(settings.models[0]).open()
    parameter = settings.parameter
    if len(source.shapes.get(parameter, ())) != 2:
        raise UserError(f"--parameter {parameter}: expected a matrix, like {IdentifySettings.parameter}")
    experiment = Experiment("identify", "ours", settings)
    rows = lineage.closest_births(source, parameter, settings.numbers, candidates)
    is_certain = rows[0]["family_log10_p"] <= lineage.SAME_LOG10_P
    answer = rows[0]["seed"] if is_certain else None
    shown = rows if is_certain else rows[:1]
    result = experiment.save(rows, shown=shown, answer=answer, candidates=len(candidates))
    if rank() == 0:
        none = f"none of init.py's seeds {settings.seeds}, unless its basis was changed"
        said = f"seed {answer}" if is_certain else none
        print(f"{settings.models[0]}: {said}")
    return result


def parse_seeds(text):
    """The candidates of FIRST-LAST, or of one number; UserError for anything else."""
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
    candidates = range(0)
    if match:
        candidates = range(int(match[1]), int(match[2] or match[1]) + 1)
    if not 0 < len(candidates) <= 10**7:
        raise UserError(f"--seeds {text}: expected FIRST-LAST, as in 0-99999, ten million at most")
    return candidates


# ---- a life ------------------------------------------------------------------------------------------------


def persistence(settings: PersistenceSettings):
    """Does the birth fade in training? Every checkpoint of a run against it (BB Figures 11, 14).

    `mean_tau` and `std_tau` are of Kendall's tau over the birth's top dimensions. The stranger is the
    checkpoint of --stranger at the same step, else its last one. Writes persistence.json and .png.
    """
    folders = steps(settings.models[0]) if len(settings.models) == 1 else []
    if len(folders) < 2 or folders[0].name != "step_0000000":
        raise UserError("persistence expects one run folder with its birth, step_0000000, and a later step")
    specs = [parse_spec(str(folder)) for folder in folders]
    compared = specs[:1]
    stranger = Newborn(specs[0].config, STRANGER_SEED, scheme=settings.init)
    strangers = {}  # their specs by step
    if settings.stranger is not None:
        compared = comparable_models((str(folders[0]), settings.stranger), settings.init)
        stranger = compared[1].open()
        strangers = {folder.name: parse_spec(str(folder)) for folder in steps(settings.stranger)}
    check_lengths((settings.sequence_length,), shortest_context(compared))
    check_paper_settings(settings, compared)
    experiment = Experiment("persistence", "BB Figures 11 and 14", settings)
    settings = experiment.settings
    vocab_size = common_vocabulary(compared)

    def outputs_of(source):
        return last_outputs(source, vocab_size, settings).numpy()

    birth = specs[0].open()
    birth_outputs = outputs_of(birth)
    indices = range(settings.num_sequences)
    tokens = random_tokens(settings.input_seed, indices, settings.sequence_length, vocab_size)

    def fingerprint_of(source):
        states = final_states(source, tokens, settings.device, settings.torch_dtype)  # (n, T, d)
        return lineage.fingerprint(states.flatten(0, 1))

    birth_print = fingerprint_of(birth)
    top_k = settings.top_k or birth.config.d_model // 2
    chosen = lineage.top_dimensions(birth_outputs, settings.side, top_k)

    def taus_with_birth(outputs):
        return lineage.kendall(birth_outputs, outputs, chosen, settings.softmax_temperature)

    last_stranger_taus = taus_with_birth(outputs_of(stranger))
    rows = []
    for spec in progress(specs, desc="checkpoints"):
        step = spec.folder.name
        child = spec.open()
        outputs = outputs_of(child)
        taus = taus_with_birth(outputs)
        stranger_taus = last_stranger_taus
        if step in strangers:
            stranger_taus = taus_with_birth(outputs_of(strangers[step].open()))
        C = lineage.relation(birth_print, fingerprint_of(child))
        test = lineage.diagonal_test(C, ("relabel", settings.input_seed), settings.permutations)
        row = {"step": int(step.removeprefix("step_")), "mean_tau": taus.mean(), "std_tau": taus.std()}
        row |= {"stranger_mean_tau": stranger_taus.mean(), "stranger_std_tau": stranger_taus.std()}
        row |= {"relabel_z": test["z"], "relabel_log10_p": test["log10_p"], "permutation_p": test["p"]}
        rows.append(row | paper_test(birth_outputs, outputs, settings))
    draw_persistence(rows, experiment.folder / "persistence.png")
    columns = ("step", "mean_tau", "std_tau", "stranger_mean_tau", "stranger_std_tau", "relabel_z")
    return experiment.save(rows, (*columns, "paper_t_p", "paper_u_p"))


def draw_persistence(rows, path) -> None:
    """Kendall's tau with birth by step, beside a stranger's."""
    taus = []
    for row in rows[1:]:  # a logarithmic axis has no step 0
        for model, who in (("its own birth", ""), ("another birth", "stranger_")):
            tau = {"step": row["step"], "model": model, "zero": 0.0}
            taus.append(tau | {"tau": row[f"{who}mean_tau"], "std": row[f"{who}std_tau"]})
    curves(
        taus,
        path,
        "How long does a model rank inputs as at its birth? (shaded: std of dimensions)",
        x="step",
        y="tau",
        series="model",
        theories={"zero": "no relation"},
        band="std",
        log="x",
        ylabel="Kendall's tau with birth",
    )


COMMANDS = {
    "compare": Command(compare, CompareSettings()),
    "paper": Command(paper, PaperSettings()),
    "matrix": Command(matrix, CompareSettings()),
    "identify": Command(identify, IdentifySettings()),
    "persistence": Command(persistence, PersistenceSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
