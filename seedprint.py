"""Do two models share an initialization, and which seed was it? (BB 5 and 6.1; matching neurons is ours)

    python seedprint.py compare BASE SUSPECT               # ORG/NAME of the Hub, folders, files, nano_gpt2@42
    python seedprint.py matrix MODEL MODEL MODEL           # all pairs, and a family tree
    python seedprint.py identify SUSPECT --seeds 0 99999   # which seed of init.py?
    python seedprint.py paper BASE SUSPECT                 # SeedPrint, the paper's test

SeedPrint gives two models the same random inputs. Each dimension of the final states ranks the inputs;
Kendall's tau says how well the two models' rankings agree; pairs of Gaussian matrices show what chance gives.
The other commands, in lineage/, run no model: they read weights and, where there are some, tokenizers'
strings and the counts in config.json.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from init import SCHEMES
from lib.random import keyed_generator, random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import default_batch_size, progress
from lib.settings import Command, Names, RunSettings, UserError, at_least, run_script
from lineage.births import IdentifySettings, identify
from lineage.compare import CompareSettings, compare, matrix
from sources.checkpoint import check_lengths, find_model, shortest_context

NULLS = 10  # Gaussian pairs that the paper's test compares with


@dataclass
class PaperSettings(RunSettings):
    """The settings of `paper`."""

    models: Names = ()  # BASE and SUSPECTs: names on the Hub, folders, or PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # initialization of PRESET@SEED
    input_seed: int = 0  # seed of the random sequences
    inputs: Literal["tokens", "gaussian"] = "tokens"  # gaussian makes unrelated models look related
    paper_sequences: at_least(3) = 1000  # random sequences; the paper has 10000
    paper_length: int = 64  # tokens in each of them; the paper has 1024


def paper(settings: PaperSettings):
    """Does SeedPrint, the paper's test, call each suspect related to the base? (BB 6.1)

    For each dimension that is large in both models, Kendall's tau says how similarly they rank the inputs.
    `paper_t_p` and `paper_u_p` are p-values of a t-test and a U-test against Gaussian matrices' taus.
    """
    return compare_outputs(settings, paper_test)


def compare_outputs(settings: PaperSettings, test):
    """Save a row for each suspect: what `test` says of the base's final states and its own."""
    base, *suspects = specs = [find_model(name, settings.init) for name in settings.models]
    widths = {spec.name: spec.config.d_model for spec in specs}
    if len(set(widths.values())) > 1:
        raise UserError(f"SeedPrint compares models of one width; these have {widths}")
    check_lengths((settings.paper_length,), shortest_context(specs), "--paper-length")
    experiment = Experiment("paper_test", "BB 6.1, Algorithm 1", settings)
    vocab_size = min(spec.config.vocab_size for spec in specs)  # ids that all models have
    base_outputs = outputs_of(base, vocab_size, experiment)
    rows = []
    for spec in progress(suspects, desc="paper", unit=" suspects"):
        outputs = outputs_of(spec, vocab_size, experiment)
        rows.append({"base": base.name, "suspect": spec.name} | test(base_outputs, outputs))
    return experiment.save(rows)


def outputs_of(spec, vocab_size, experiment):
    """A checkpoint's `last_outputs` as an array; UserError if they are not finite."""
    outputs = last_outputs(spec.model(experiment.device, experiment.dtype), vocab_size, experiment.settings)
    if not outputs.isfinite().all():
        raise UserError(f"{spec.name}: its states are not finite: are its weights huge?")
    return outputs.numpy()


@torch.inference_mode()
def last_outputs(model, vocab_size, settings: PaperSettings):
    """The final states at the last position of n random sequences, (n, d) on the CPU."""
    T = settings.paper_length
    batch_size = default_batch_size(model.device, T)
    outputs = []
    for start in range(0, settings.paper_sequences, batch_size):
        indices = range(start, min(start + batch_size, settings.paper_sequences))
        if settings.inputs == "gaussian":
            inputs = random_vectors(settings.input_seed, indices, T, model.config.d_model)
        else:
            inputs = random_tokens(settings.input_seed, indices, T, vocab_size)
        outputs.append(model.hidden(inputs.to(model.device), last_only=True).cpu())
    return torch.cat(outputs)


def paper_test(a, b):
    """The paper's test of two models' final states on the same inputs, (n, d) of float32 each.

    The identity dimensions (`paper_k` of them) have means in the upper half in both models. One-sided
    t- and U-tests compare their taus with those of NULLS Gaussian pairs; the p-values are averaged.
    """
    taus = identity_taus(np.asarray(a), np.asarray(b))
    n, d = a.shape
    k = len(taus)
    t_p, u_p = np.mean([p_values(taus, null_taus(n, d, trial)) for trial in range(NULLS)], axis=0).tolist()
    found = {"paper_k": k, "paper_mean_tau": taus.mean() if k else 0.0, "paper_t_p": t_p, "paper_u_p": u_p}
    return found | {"closed_form_z": closed_form_z(taus, n)}


def p_values(taus, null):
    """The p-values of a t-test and a U-test that taus are above a null's; 1 for fewer than two taus."""
    from scipy import stats  # takes a second to import, so not for `compare`

    if min(len(taus), len(null)) < 2:
        return 1.0, 1.0
    with warnings.catch_warnings(action="ignore"):  # identical models: all taus are 1
        t_test = stats.ttest_ind(taus, null, alternative="greater")
    u_test = stats.mannwhitneyu(taus, null, alternative="greater")
    return np.nan_to_num(t_test.pvalue, nan=1.0), u_test.pvalue


def closed_form_z(taus, n):
    """The mean of k taus of n inputs, divided by the standard error of k independent dimensions."""
    variance = 2 * (2 * n + 5) / (9 * n * (n - 1))  # of one tau between unrelated rankings (Kendall 1938)
    return taus.sum() / (max(1, len(taus)) * variance) ** 0.5


@functools.cache
def null_taus(n, d, trial):
    """The taus of two Gaussian matrices (n, d) on their identity dimensions: the paper's null."""
    return identity_taus(*keyed_generator("paper null", n, d, trial).standard_normal((2, n, d), np.float32))


def identity_taus(a, b):
    """Kendall's taus of two arrays (n, d) on the dimensions that are large in both."""
    return kendall(a, b, np.intersect1d(top_dimensions(a), top_dimensions(b)))


def top_dimensions(rows):
    """The half of the d dimensions with the largest means over rows (n, d)."""
    return np.argsort(-rows.mean(axis=0, dtype=np.float64), kind="stable")[: rows.shape[1] // 2]


def kendall(a, b, chosen):
    """Kendall's tau-b between the `chosen` columns of a and of b, (n, d) each; 0 where one is constant."""
    from scipy import stats

    columns = zip(a.T[chosen].astype(np.float64), b.T[chosen].astype(np.float64))
    taus = [stats.kendalltau(x, y, method="asymptotic").statistic for x, y in columns]
    return np.nan_to_num(np.array(taus, dtype=float))


COMMANDS = {
    "compare": Command(compare, CompareSettings()),
    "paper": Command(paper, PaperSettings()),
    "matrix": Command(matrix, CompareSettings()),
    "identify": Command(identify, IdentifySettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
