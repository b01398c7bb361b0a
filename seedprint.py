"""Do two models go back to one birth, and which seed was it? (BB 5 and 6.1; matching units is ours)

    python seedprint.py compare BASE SUSPECT               # ORG/NAME of the Hub, folders, files, nano_gpt2@42
    python seedprint.py matrix MODEL MODEL MODEL           # all pairs, and a family tree
    python seedprint.py identify SUSPECT --seeds 0 99999   # which seed of init.py?
    python seedprint.py paper BASE SUSPECT STRANGER        # SeedPrint, the paper's own test
    python seedprint.py persistence RUN                    # does the birth fade in training?

SeedPrint: two models read the same random inputs. A model orders them by each dimension of its final states,
and Kendall's tau says how far the two agree on that order; two Gaussian matrices tell what chance gives.

`compare` and `matrix` read weights alone: `lineage/compare.py` shows how, `lineage/table.py` has the rules of
the verdict. In a row, `units_found` of `units` hidden units were matched, with a median |correlation| of r.
`distance` says how far these moved: 0 is a copy, 1 a stranger. `body_z` and `embedding_z` say how far the
coordinates of weights agree, in standard deviations of what relabelled ones give.
"""

import functools
import itertools
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from init import SCHEMES, newborn
from lib.figures import draw_persistence, lineage_figure
from lib.random import keyed_generator
from lib.results import Experiment
from lib.runtime import default_batch_size, progress, rank
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from lineage.births import identify
from lineage.compare import compare_models, read_model
from lineage.evidence import parts_looked_at
from lineage.family import draw_family
from lineage.settings import CompareSettings, IdentifySettings, Names
from lineage.verdict import unread_row
from sources.checkpoint import check_lengths, parse_spec, shortest_context, steps
from sources.inputs import random_tokens, random_vectors

VERDICT_COLUMNS = ("suspect", "verdict", "units_found", "units", "r", "distance", "body_z", "embedding_z")
NULLS = 10  # Gaussian pairs that the paper's test compares with
STRANGER_SEED = 2**31 - 1  # of the newborn that is `persistence`'s stranger, where --stranger names none


@dataclass
class PaperSettings(RunSettings):
    """The settings of `paper`."""

    models: Names = ()  # BASE and SUSPECTs: names of the Hub, folders, or PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # how newborns are drawn
    input_seed: int = 0  # seed of the random sequences
    inputs: Literal["tokens", "gaussian"] = "tokens"  # what is read; gaussian makes strangers look like kin
    paper_sequences: at_least(3) = 1000  # random sequences; in the paper 10000
    paper_length: int = 64  # tokens in each of them; in the paper 1024


@dataclass
class PersistenceSettings(PaperSettings):
    """The settings of `persistence`: those of `paper`, and a stranger."""

    models: Names = ()  # one run folder
    stranger: str | None = None  # run of another birth; None: a newborn of another seed


def compare(settings: CompareSettings):
    """Is each suspect of one birth with the base? Seconds for tiny models, 20 for 135M parameters.

    A suspect that cannot be read does not stop the others: it is `not read`, and the exit status is 2.
    """
    base_name, *names = check_several(settings.models)
    base = open_model(base_name, settings)
    experiment = Experiment.begin("compare", "BB 6.1", settings)
    rows, details, unread = [], [], []
    for name in progress(names, desc="suspects"):
        try:
            row, detail = compare_models(base, open_model(name, settings), settings)
        except UserError as error:
            row, detail = unread_row(error)
            unread.append(error)
        rows.append({"base": base_name, "suspect": name} | row)
        details.append(detail)
    if len(unread) == len(names):
        raise unread[0]
    more = {key: [detail[key] for detail in details] for key in ("layers", "layer_map")}
    result = experiment.save(rows, VERDICT_COLUMNS, **more)
    if rank() == 0:
        for row in rows:
            print(f"{row['suspect']}: {row['verdict']}: {row['sentence']}")
    lineage_figure(experiment.folder / "compare.png", base_name, rows, details)
    if unread:
        raise UserError(f"{len(unread)} of {len(names)} suspects not read: {unread[0]}")
    return result


def matrix(settings: CompareSettings):
    """Which of several models are of one birth? All pairs, a heat map and a family tree (BB Table 4)."""
    models = [open_model(name, settings) for name in check_several(settings.models)]
    experiment = Experiment.begin("matrix", "BB Table 4", settings)
    rows = []
    for a, b in progress(list(itertools.combinations(models, 2)), desc="matrix", unit=" pairs"):
        row, _ = compare_models(a, b, settings)
        rows.append({"a": a.name, "b": b.name} | row)
    result = experiment.save(rows, ("a", "b", *VERDICT_COLUMNS))
    draw_family(experiment.folder / "matrix.png", models, rows)
    return result


def check_several(names):
    """The names of models that are to be compared; UserError if there are fewer than two."""
    if len(names) < 2:
        raise UserError("expected at least 2 models: checkpoint folders, or PRESET@SEED")
    return names


def open_model(name, settings: CompareSettings):
    """The Model of a name on the command line, of any architecture; UserError if it cannot be read."""
    source = parse_spec(name, settings.init, in_parts=True).open(any_architecture=True)
    source.expect((name, part) for name, shape in source.shapes.items() for part in parts_looked_at(shape))
    return read_model(name, source)


def paper(settings: PaperSettings):
    """What does SeedPrint, the paper's own test, say of each suspect? (BB 6.1) Writes paper_test.json.

    For each dimension that is extreme in both models, Kendall's tau says whether both order the inputs alike.
    `paper_t_p` and `paper_u_p` are of the t-test and the U-test of these taus against Gaussian matrices'.
    """
    base, *suspects = specs = [parse_spec(name, settings.init) for name in check_several(settings.models)]
    check_comparable(specs, settings)
    experiment = Experiment.begin("paper_test", "BB 6.1, Algorithm 1", settings)
    vocab_size = min(spec.config.vocab_size for spec in specs)  # ids that all models have
    base_outputs = outputs_of(base, vocab_size, experiment)
    rows = []
    for spec in progress(suspects, desc="paper", unit=" suspects"):
        outputs = outputs_of(spec, vocab_size, experiment)
        rows.append({"base": base.name, "suspect": spec.name} | paper_test(base_outputs, outputs))
    return experiment.save(rows)


def persistence(settings: PersistenceSettings):
    """Does the birth fade in training? Every checkpoint of a run against it (BB Figures 11, 14).

    `mean_tau` and `std_tau` are over the half of dimensions with the largest mean outputs at birth. Of a run
    --stranger the checkpoint of the same step is read, else its last one. Writes persistence.json and .png.
    """
    folders = steps(settings.models[0]) if len(settings.models) == 1 else []
    if len(folders) < 2 or folders[0].name != "step_0000000":
        raise UserError("persistence expects one run folder with its birth, step_0000000, and a later step")
    specs = [parse_spec(str(folder)) for folder in folders]
    compared = specs[:1]
    strangers = {}  # their checkpoints by step
    if settings.stranger is not None:
        compared.append(parse_spec(settings.stranger))
        strangers = {folder.name: parse_spec(str(folder)) for folder in steps(settings.stranger)}
    check_comparable(compared, settings)
    experiment = Experiment.begin("persistence", "BB Figures 11 and 14", settings)
    vocab_size = min(spec.config.vocab_size for spec in compared)
    birth = outputs_of(specs[0], vocab_size, experiment)
    chosen = top_dimensions(birth)
    if settings.stranger is None:
        where = (experiment.device, experiment.dtype)
        model = newborn(specs[0].config, STRANGER_SEED, None, settings.init, *where)
        last_stranger = last_outputs(model, vocab_size, settings).numpy()
    else:
        last_stranger = outputs_of(compared[1], vocab_size, experiment)
    rows = []
    for spec in progress(specs, desc="checkpoints"):
        step = spec.folder.name
        outputs = outputs_of(spec, vocab_size, experiment)
        stranger = outputs_of(strangers[step], vocab_size, experiment) if step in strangers else last_stranger
        row = {"step": int(step.removeprefix("step_"))}
        for prefix, states in (("", outputs), ("stranger_", stranger)):
            taus = kendall(birth, states, chosen)
            row |= {f"{prefix}mean_tau": taus.mean(), f"{prefix}std_tau": taus.std()}
        test = paper_test(birth, outputs)
        rows.append(row | {"paper_t_p": test["paper_t_p"], "paper_u_p": test["paper_u_p"]})
    result = experiment.save(rows)
    draw_persistence(experiment.folder / "persistence.png", rows)
    return result


def check_comparable(specs, settings: PaperSettings) -> None:
    """UserError unless all models are of our architecture, of one width, and can read the inputs."""
    widths = {spec.name: spec.config.d_model for spec in specs}
    if len(set(widths.values())) > 1:
        raise UserError(f"only models of one width can be compared, not of {widths}")
    check_lengths((settings.paper_length,), shortest_context(specs), "--paper-length")


def outputs_of(spec, vocab_size, experiment):
    """`last_outputs` of a checkpoint, an array; UserError, which names it, unless they are finite."""
    model = spec.load(experiment.device, experiment.dtype)
    outputs = last_outputs(model, vocab_size, experiment.settings)
    if not outputs.isfinite().all():
        raise UserError(f"{spec.name}: its states are not finite: check its weights for huge numbers")
    return outputs.numpy()


@torch.inference_mode()
def last_outputs(model, vocab_size, settings: PaperSettings):
    """What the paper's test reads: last-position states of random sequences, (n, d) on the CPU."""
    device = model.device
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


def paper_test(a, b):
    """The paper's test of two models' last-position states on the same inputs, (n, d) of float32 each.

    The `paper_k` identity dimensions are among the half with the largest mean outputs in both models. Their
    taus are compared with those of NULLS Gaussian pairs: p of the one-sided t- and U-tests, averaged.
    `closed_form_z` is their mean over the error that k independent dimensions would have.
    """
    from scipy import stats  # which takes a second that `compare` need not

    taus = identity_taus(np.asarray(a), np.asarray(b))
    n, d = a.shape
    k = len(taus)
    mean_tau = taus.mean() if k else 0.0
    std = (2 * (2 * n + 5) / (9 * n * (n - 1))) ** 0.5  # of Kendall's tau between independent columns
    p_values = []  # of the t-test and the U-test
    for trial in range(NULLS):
        null = null_taus(n, d, trial)
        if min(k, len(null)) < 2:  # too few dimensions to say anything
            p_values.append((1.0, 1.0))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # identical models: all taus are 1
            t_test = stats.ttest_ind(taus, null, alternative="greater")
        u_test = stats.mannwhitneyu(taus, null, alternative="greater")
        p_values.append((t_test.pvalue, u_test.pvalue))
    t_p, u_p = np.nan_to_num(np.mean(p_values, axis=0), nan=1.0).tolist()
    return {
        "paper_k": k,
        "paper_mean_tau": mean_tau,
        "paper_t_p": t_p,
        "paper_u_p": u_p,
        "closed_form_z": mean_tau / (std / max(1, k) ** 0.5),
    }


@functools.lru_cache(maxsize=512)
def null_taus(n, d, trial):
    """The identity dimensions' taus of two Gaussian matrices (n, d): the paper's null."""
    return identity_taus(*keyed_generator("paper null", n, d, trial).standard_normal((2, n, d), np.float32))


def identity_taus(a, b):
    """Kendall's tau of arrays (n, d) on the dimensions that are among the top ones of both."""
    return kendall(a, b, np.intersect1d(top_dimensions(a), top_dimensions(b)))


def top_dimensions(rows):
    """The half of the dimensions with the largest mean outputs, of (n, d)."""
    mean = rows.mean(axis=0, dtype=np.float64)
    return np.argsort(-mean, kind="stable")[: rows.shape[1] // 2]


def kendall(a, b, chosen):
    """Kendall's tau-b of a's and b's columns j, (n, d) each, for j in `chosen`; 0 for a constant column."""
    from scipy import stats

    columns = zip(a.T[chosen].astype(np.float64), b.T[chosen].astype(np.float64))
    taus = [stats.kendalltau(x, y, method="asymptotic").statistic for x, y in columns]
    return np.nan_to_num(np.array(taus, dtype=float))


COMMANDS = {
    "compare": Command(compare, CompareSettings()),
    "paper": Command(paper, PaperSettings()),
    "matrix": Command(matrix, CompareSettings()),
    "identify": Command(identify, IdentifySettings()),
    "persistence": Command(persistence, PersistenceSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
