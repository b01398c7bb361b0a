"""How often does each test call strangers kin, and what does each cost? (BB B.3.1, Figure 13; mostly ours)

    python -m reproduce.errors --model tiny_llama --num-births 200
    python -m reproduce.errors cost BASE CHILD

Newborns of different seeds are strangers by construction, so every rejection is an error. A test is sound if
its p is uniform; a sound test rejects 1 % at p <= 0.01. Much hangs on what the models read (tokens through a
token table of their own, through one that all share, or Gaussian vectors), and on how they are drawn.
"""

import lib.interrupt  # noqa: F401 # isort: skip
import itertools
import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy.stats import kstest, norm

from init import SCHEMES, keyed_generator
from lib.checkpoint import Newborn, check_lengths, chosen_models, final_states, shortest_context
from lib.figures import curves
from lib.inputs import random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from measure.comparison import state_fingerprint
from measure.cosines import wilson
from measure.lineage import (
    SAME_LOG10_P,
    diagonal_test,
    fingerprint,
    identity_taus,
    judge_taus,
    kendall_std,
    null_taus,
    paper_test,
    relation,
    weight_correlations,
)
from model import PRESETS
from seedprint import (
    CompareSettings,
    PairSettings,
    PaperSettings,
    common_vocabulary,
    comparable_models,
    last_outputs,
)

LEVEL = 0.01  # from here on down, a test calls two models kin
PAPER_TESTS = ("t-test", "U-test", "closed form")
PAPER_KEYS = {"t-test": "paper_t_p", "U-test": "paper_u_p"}
OWN_TABLE = "own embedding"
SHARED_TABLE = "shared embedding"
VECTORS = "gaussian"
STATE_INPUTS = (OWN_TABLE, SHARED_TABLE, VECTORS)
WEIGHTS = "weights"  # as if an input: what the tests of weights read
COLUMNS = ("test", "inputs", "scheme", "model", "num_pairs", "rejections", "rate", "low", "high", "ks_p")
AUTHORS_TOKENS = 10_000 * 1024  # that the paper's test reads (BB B.2, 5)


@dataclass
class RateSettings(RunSettings):
    """What `rates` can be told."""

    model: tuple[Literal[tuple(PRESETS)], ...] = ("tiny_gpt2", "tiny_llama")
    """presets to be born"""
    schemes: tuple[Literal[SCHEMES], ...] = ("gpt2", "normal")
    """how they are drawn"""
    first_seed: at_least(0) = 1
    """seed of the first birth; the others follow"""
    num_births: at_least(14) = 200
    """newborns of the exact tests; each is compared with the next six, its weights with the next one"""
    num_sequences: at_least(1) = 16
    """random sequences of the exact test; each of their positions is a row"""
    sequence_length: int = 64
    """tokens in each of them"""
    permutations: at_least(99) = 999
    """relabellings; the smallest p is 1 / (1 + this)"""
    paper_births: at_least(3) = 12
    """newborns of the paper's test, which takes longer; all pairs"""
    paper_sequences: at_least(3) = 1000
    """random sequences of the paper's test; in the paper 10000"""
    paper_length: int = 64
    """tokens in each of them; in the paper 1024"""
    input_seed: int = 0
    """seed of the random sequences and of the permutations"""


@dataclass
class CostSettings(PairSettings):
    """What `cost` can be told."""

    sequence_length: int = 64
    """tokens in a sequence"""
    permutations: at_least(199) = 9999
    """relabellings; the smallest p is 1 / (1 + this)"""


# ---- error rates -------------------------------------------------------------------------------------------


def rates(settings: RateSettings):
    """How often does each test call strangers kin? Writes errors.json, errors.png and errors_tau.png."""
    specs = chosen_models(settings.model, (settings.first_seed,))
    check_lengths((settings.sequence_length,), shortest_context(specs))
    check_lengths((settings.paper_length,), shortest_context(specs), "--paper-length")
    experiment = Experiment("errors", "BB B.3.1, Figure 13", settings)
    settings = experiment.settings
    choices = list(itertools.product(settings.model, settings.schemes, STATE_INPUTS))
    for model in settings.model:  # once scaled, weights know no scheme
        choices.append((model, settings.schemes[0], WEIGHTS))
    rows, points, taus = [], [], []
    for model, scheme, inputs in progress(choices, desc="errors", unit=" settings"):
        key = {"inputs": inputs, "scheme": scheme, "model": model}
        panel = key | {"panel": f"{model}, {inputs}"}
        is_drawn = scheme == settings.schemes[0] and inputs != WEIGHTS
        newborns = strangers(model, scheme, inputs, settings)
        if inputs == WEIGHTS:
            p_values = weights_p(newborns, settings)
        else:
            paper_values, pooled = paper_p(newborns, inputs, settings)
            p_values = {"relabelling": relabelling_p(newborns, inputs, settings)} | paper_values
            if is_drawn:
                taus += tau_histogram(pooled, settings.paper_sequences, panel)
        for test, p in p_values.items():
            rows.append({"test": test} | key | error_rate(test, p, settings.paper_births))
            if is_drawn:
                points += quantiles(p, panel | {"test": test})
    return experiment.save(rows, COLUMNS, draw_errors, points=points, taus=taus)


def strangers(model, scheme, inputs, settings: RateSettings):
    """Newborns of different seeds, with token tables of their own or one for all."""
    embedding_seed = 0 if inputs == SHARED_TABLE else None
    newborns = []
    for birth in range(max(settings.num_births, settings.paper_births)):
        newborns.append(Newborn(PRESETS[model], settings.first_seed + birth, embedding_seed, scheme))
    return newborns


def relabelling_p(newborns, inputs, settings: RateSettings):
    """The p of the exact test of states, for each newborn and the six that follow it."""
    config = newborns[0].config
    drawn = (settings.input_seed, range(settings.num_sequences), settings.sequence_length)
    if inputs == VECTORS:
        given = random_vectors(*drawn, config.d_model)
    else:
        given = random_tokens(*drawn, config.vocab_size)
    count = settings.num_births
    if inputs != OWN_TABLE:  # where the test does not hold, fewer show it
        count = max(14, count // 4)
    prints = []
    for newborn in newborns[:count]:
        states = final_states(newborn, given, settings.device, settings.torch_dtype)
        prints.append(fingerprint(states.flatten(0, 1)))
    p = []
    for i, ahead in itertools.product(range(count), range(1, 7)):
        j = (i + ahead) % count
        C = relation(prints[i], prints[j])
        p.append(diagonal_test(C, (settings.input_seed, i, j), settings.permutations)["p"])
    return np.array(p)


def weights_p(newborns, settings: RateSettings):
    """The p of the exact test of weights, for each newborn and the next."""
    p = []
    for i in range(settings.num_births):
        a = newborns[i]
        b = newborns[(i + 1) % settings.num_births]
        key = (settings.input_seed, i)
        correlations, _ = weight_correlations(a, b)
        p.append(diagonal_test(correlations["body"], key, settings.permutations)["p"])
    return {"weights": np.array(p)}


def paper_p(newborns, inputs, settings: RateSettings):
    """The p of the paper's tests, for all pairs of newborns; and the taus of all pairs."""
    config = newborns[0].config
    n = settings.paper_sequences
    reading = PaperSettings(
        inputs="gaussian" if inputs == VECTORS else "tokens",
        paper_sequences=n,
        paper_length=settings.paper_length,
        input_seed=settings.input_seed,
        device=settings.device,
        dtype=settings.dtype,
    )
    outputs = []
    for newborn in newborns[: settings.paper_births]:
        outputs.append(last_outputs(newborn, config.vocab_size, reading).numpy())
    top_k = config.d_model // 2
    p, pooled = [], []
    for a, b in itertools.combinations(outputs, 2):
        taus = identity_taus(a, b, "top", top_k)
        test = judge_taus(taus, n, config.d_model, "top", top_k, temperature=None)
        p.append((test["paper_t_p"], test["paper_u_p"], norm.sf(test["closed_form_z"])))
        pooled.append(taus)
    return dict(zip(PAPER_TESTS, np.transpose(p))), np.concatenate(pooled)


def error_rate(test, p, paper_births):
    """How often p (pairs,) rejects, the rate's 99 % interval, and the p of a test that p is uniform."""
    rejected = p <= LEVEL
    rejections = int(rejected.sum())
    if test in PAPER_TESTS:
        low, high = interval_over_births(rejected, paper_births)
    else:
        low, high = wilson(rejections, len(p), 0.99)
    return {
        "num_pairs": len(p),
        "rejections": rejections,
        "low": low,
        "high": high,
        "rate": rejections / len(p),
        "ks_p": kstest(p, "uniform").pvalue,
    }


def interval_over_births(rejected, births, resamples=2000):
    """99 % interval of the rate of `rejected`, (pairs,), over all pairs of births, which are resampled.

    Pairs that share a birth are not independent, so they cannot be resampled. Where all pairs agree, the
    births say nothing of the spread, and the interval is Wilson's for as many pairs as are disjoint.
    """
    if rejected.all() or not rejected.any():
        disjoint = births // 2
        return wilson(int(rejected[0]) * disjoint, disjoint, 0.99)
    generator = keyed_generator("births", births)
    counts = generator.multinomial(births, np.full(births, 1 / births), resamples)  # (resamples, births)
    first, second = np.triu_indices(births, 1)
    weights = counts[:, first] * counts[:, second]  # (resamples, pairs)
    weights = weights[weights.sum(axis=1) > 0]
    low, high = np.quantile(weights @ rejected / weights.sum(axis=1), (0.005, 0.995))
    return low, high


def quantiles(p, key):
    """Sorted p beside what a uniform distribution gives, both as -log10, thinned to 60 points."""
    order = np.unique(np.geomspace(1, len(p), 60).round().astype(int)) - 1
    uniform = -np.log10((order + 0.5) / len(p))
    observed = -np.log10(np.sort(p)[order].clip(min=1e-12))
    points = pd.DataFrame({"expected": uniform, "observed": observed, "uniform": uniform})
    return points.assign(**key).to_dict("records")


def tau_histogram(taus, n, key):
    """Shares of strangers' taus over n inputs, in %, beside the Gaussian of independent rows (Figure 13)."""
    edges = np.linspace(-0.3, 0.3, 61)
    share = 100 * np.histogram(np.clip(taus, -0.3, 0.3), edges)[0] / max(1, len(taus))
    law = 100 * np.diff(norm.cdf(edges, scale=kendall_std(n)))
    bins = pd.DataFrame({"tau": (edges[1:] + edges[:-1]) / 2, "share": share, "gaussian": law})
    return bins.assign(**key).to_dict("records")


def draw_errors(result, folder) -> None:
    """errors.png: p against what it should be; errors_tau.png: Kendall's tau of strangers (Figure 13)."""
    curves(
        result["points"],
        folder / "errors.png",
        x="expected",
        y="observed",
        series="test",
        panel="panel",
        theories={"uniform": "a sound test"},
        style=".-",
        xlabel="-log10 p expected",
        ylabel="-log10 p of strangers",
    )
    curves(
        result["taus"],
        folder / "errors_tau.png",
        x="tau",
        y="share",
        series="scheme",
        panel="panel",
        theories={"gaussian": "Gaussian of independent rows"},
        style="-",
        xlabel="Kendall's tau of strangers",
        ylabel="% of dimensions",
    )


# ---- cost --------------------------------------------------------------------------------------------------


def cost(settings: CostSettings):
    """How many tokens, and seconds, until each test says p < 1e-6 of two kin? Writes cost.json.

    UserError unless there are two models, of one birth as far as their weights tell.
    """
    if len(settings.models) != 2:
        raise UserError("cost expects two models of one birth")
    specs = comparable_models(settings.models, settings.init)
    T = settings.sequence_length
    check_lengths((T,), shortest_context(specs))
    experiment = Experiment("cost", "BB 5, 6.1", settings)
    pair = [spec.open() for spec in specs]
    settings = experiment.settings
    vocab_size = common_vocabulary(specs)
    begun = time.perf_counter()
    correlations, _ = weight_correlations(*pair)
    log10_p = coordinates_log10_p(correlations["body"], settings) if "body" in correlations else 0.0
    if log10_p > SAME_LOG10_P:  # a million rows would not show it either
        raise UserError("cost expects two models of one birth, but their weights do not agree")
    rows = [{"test": "weights", "tokens": 0, "seconds": time.perf_counter() - begun, "log10_p": log10_p}]
    for test in progress(("relabelling", *PAPER_TESTS), desc="cost"):
        fewest = math.ceil(3 / T) if test == "relabelling" else 4  # sequences that give it enough rows
        for doublings in range(15):
            n = fewest * 2**doublings
            null_taus.cache_clear()
            begun = time.perf_counter()
            log10_p = states_log10_p(test, pair, n, vocab_size, settings)
            seconds = time.perf_counter() - begun
            if log10_p <= SAME_LOG10_P:
                break
        rows.append({"test": test, "tokens": n * T, "seconds": seconds, "log10_p": log10_p})
    for row in rows:
        row["reached"] = row["log10_p"] <= SAME_LOG10_P
        has_read = row["reached"] and row["tokens"] > 0
        row["times_fewer_tokens"] = AUTHORS_TOKENS / row["tokens"] if has_read else None
    return experiment.save(rows)


def states_log10_p(test, pair, n, vocab_size, settings: CostSettings):
    """log10 p of a test of states, where the pair of sources read n random sequences."""
    T = settings.sequence_length
    common = {"input_seed": settings.input_seed, "device": settings.device, "dtype": settings.dtype}
    if test == "relabelling":
        reading = CompareSettings(num_sequences=n, sequence_length=T, **common)
        a, b = [state_fingerprint(source, vocab_size, reading) for source in pair]
        return coordinates_log10_p(relation(a, b), settings)
    reading = PaperSettings(paper_sequences=n, paper_length=T, **common)
    a, b = [last_outputs(source, vocab_size, reading) for source in pair]
    result = paper_test(a, b)
    if test == "closed form":
        return norm.logsf(result["closed_form_z"]) / math.log(10)
    return math.log(max(result[PAPER_KEYS[test]], 1e-300)) / math.log(10)


def coordinates_log10_p(C, settings: CostSettings):
    """log10 p of the exact test of coordinates whose correlations are C, (d, d)."""
    return diagonal_test(C, (settings.input_seed,), settings.permutations)["log10_p"]


COMMANDS = {"rates": Command(rates, RateSettings()), "cost": Command(cost, CostSettings())}
COMMANDS[""] = COMMANDS["rates"]

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
