"""What does SeedPrint, the paper's own test, say of two models, and does a birth fade? (BB 5, 6.1)

    python seedprint.py paper BASE SUSPECT STRANGER        # the test
    python seedprint.py persistence RUN                    # each checkpoint of a run against its birth

Both models read the same random inputs. A model orders them by each dimension of its final states, and
Kendall's tau says how far two models agree on that order.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from init import SCHEMES, newborn
from lib.checkpoint import check_lengths, parse_spec, shortest_context, steps
from lib.figures import draw_persistence
from lib.inputs import random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import default_batch_size, progress
from lib.settings import RunSettings, UserError, at_least
from lineage import kendall

STRANGER_SEED = 2**31 - 1  # of the newborn that is `persistence`'s stranger, where --stranger names none

Names = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL ...", help_behavior_hint="")
]


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


def check_several(names) -> None:
    """UserError if there is nothing to compare."""
    if len(names) < 2:
        raise UserError("expected at least 2 models: checkpoint folders, or PRESET@SEED")


def paper(settings: PaperSettings):
    """What does SeedPrint, the paper's own test, say of each suspect? (BB 6.1) Writes paper_test.json.

    For each dimension that is extreme in both models, Kendall's tau says whether both order the inputs alike.
    `paper_t_p` and `paper_u_p` are of the t-test and the U-test of these taus against Gaussian matrices'.
    """
    check_several(settings.models)
    specs = [parse_spec(name, settings.init) for name in settings.models]
    check_comparable(specs, settings)
    experiment = Experiment("paper_test", "BB 6.1, Algorithm 1", settings)
    vocab_size = min(spec.config.vocab_size for spec in specs)  # ids that all models have
    base_outputs = outputs_of(specs[0], vocab_size, experiment)
    rows = []
    for spec in progress(specs[1:], desc="paper", unit=" suspects"):
        outputs = outputs_of(spec, vocab_size, experiment)
        test = kendall.paper_test(base_outputs, outputs)
        rows.append({"base": specs[0].name, "suspect": spec.name} | test)
    return experiment.save(rows)


def check_comparable(specs, settings: PaperSettings) -> None:
    """UserError unless all models are of our architecture, of one width, and can read the inputs."""
    widths = {spec.name: spec.config.d_model for spec in specs}
    if len(set(widths.values())) > 1:
        raise UserError(f"only models of one width can be compared, not of {widths}")
    check_lengths((settings.paper_length,), shortest_context(specs), "--paper-length")


def outputs_of(spec, vocab_size, experiment):
    """`last_outputs` of a checkpoint; UserError, which names it, unless they are finite."""
    model = spec.load(experiment.device, experiment.dtype)
    outputs = last_outputs(model, vocab_size, experiment.settings)
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


def persistence(settings: PersistenceSettings):
    """Does the birth fade in training? Every checkpoint of a run against it (BB Figures 11, 14).

    For each dimension, Kendall's tau compares how birth and step order the inputs. `mean_tau` and `std_tau`
    are over the half of dimensions whose mean output is largest at birth. The stranger is the checkpoint of
    --stranger at the same step, else its last one. Writes persistence.json and .png.
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
    vocab_size = min(spec.config.vocab_size for spec in compared)
    birth_outputs = outputs_of(specs[0], vocab_size, experiment)
    chosen = kendall.top_dimensions(birth_outputs.numpy())

    def taus_with_birth(outputs):
        return kendall.kendall(birth_outputs.numpy(), outputs.numpy(), chosen)

    if settings.stranger is None:
        where = (experiment.device, experiment.dtype)
        stranger = newborn(specs[0].config, STRANGER_SEED, None, settings.init, *where)
        stranger_outputs = last_outputs(stranger, vocab_size, settings)
    else:
        stranger_outputs = outputs_of(compared[1], vocab_size, experiment)
    stranger_taus = taus_with_birth(stranger_outputs)
    rows = []
    for spec in progress(specs, desc="checkpoints"):
        step = spec.folder.name
        outputs = outputs_of(spec, vocab_size, experiment)
        taus = taus_with_birth(outputs)
        beside = stranger_taus
        if step in strangers:
            beside = taus_with_birth(outputs_of(strangers[step], vocab_size, experiment))
        row = {"step": int(step.removeprefix("step_")), "mean_tau": taus.mean(), "std_tau": taus.std()}
        row |= {"stranger_mean_tau": beside.mean(), "stranger_std_tau": beside.std()}
        test = kendall.paper_test(birth_outputs, outputs)
        rows.append(row | {"paper_t_p": test["paper_t_p"], "paper_u_p": test["paper_u_p"]})
    draw_persistence(experiment.folder / "persistence.png", rows)
    return experiment.save(rows)
