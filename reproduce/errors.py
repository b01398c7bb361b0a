"""How often does each test call strangers kin? (BB B.3.1, Figure 13; mostly ours)

    python -m reproduce.errors                    # all pairs of 45 newborns: half an hour
    python -m reproduce.errors trained RUN RUN    # which hidden units do trained strangers share?

Newborns of different seeds are strangers by construction, so every rejection is an error. A test is sound if
its p is uniform; a sound test rejects 1 % at p <= 0.01. Much hangs on what the models read (tokens through a
token table of their own, through one that all share, or Gaussian vectors), and on how they are drawn.
"""

import lib.interrupt  # noqa: F401 # isort: skip
import functools
import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy.stats import kstest, norm

from init import SCHEMES, keyed_generator
from lib.checkpoint import Newborn, check_lengths, chosen_models, final_states, shortest_context
from lib.figures import between, curves, error_bars
from lib.inputs import random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, RunSettings, at_least, run_script
from measure.census import Units, unit_census
from measure.comparison import tokens_of
from measure.cosines import wilson
from measure.lineage import (
    diagonal_test,
    fingerprint,
    identity_taus,
    judge_taus,
    kendall_std,
    relation,
    weight_correlations,
)
from measure.verdict import NO_EVIDENCE, judge_units
from model import PRESETS
from reproduce.thief import hidden
from seedprint import PairSettings, PaperSettings, comparable_models, last_outputs

LEVEL = 0.01  # from here on down, a test calls two models kin
PAPER_TESTS = ("t-test", "U-test", "closed form")
OWN_TABLE = "own embedding"
SHARED_TABLE = "shared embedding"
VECTORS = "gaussian"
STATE_INPUTS = (OWN_TABLE, SHARED_TABLE, VECTORS)
WEIGHTS = "weights"  # as if an input: what the tests of weights read
GIVEN = {  # what strangers share, in a figure
    OWN_TABLE: "nothing shared",
    WEIGHTS: "nothing shared",
    SHARED_TABLE: "one token table",
    VECTORS: "Gaussian vectors",
}
NAMES = {  # of the tests, in a figure
    "units": "hidden units",
    "weights": "weights",
    "token tables": "token tables",
    "relabelling": "states",
    "t-test": "paper's t-test",
    "U-test": "paper's U-test",
    "closed form": "its closed form",
}
COLUMNS = ("test", "inputs", "scheme", "model", "num_pairs", "rejections", "rate", "low", "high", "ks_p")


@dataclass
class RateSettings(RunSettings):
    """What `rates` can be told."""

    model: tuple[Literal[tuple(PRESETS)], ...] = ("tiny_gpt2", "tiny_llama")
    """presets to be born"""
    schemes: tuple[Literal[SCHEMES], ...] = ("gpt2", "normal")
    """how they are drawn"""
    first_seed: at_least(0) = 1
    """seed of the first birth; the others follow"""
    num_births: at_least(3) = 45
    """newborns with token tables of their own; all pairs are compared"""
    trap_births: at_least(3) = 12
    """newborns that read one table, or Gaussian vectors, where fewer show what happens; all pairs"""
    num_sequences: at_least(1) = 16
    """random sequences of the exact test; each of their positions is a row"""
    sequence_length: int = 64
    """tokens in each of them"""
    permutations: at_least(99) = 999
    """relabellings; the smallest p is 1 / (1 + this)"""
    paper_sequences: at_least(3) = 1000
    """random sequences of the paper's test; in the paper 10000"""
    paper_length: int = 64
    """tokens in each of them; in the paper 1024"""
    layers: at_least(1) = 2
    """layers whose hidden units are looked for"""
    units: at_least(2) = 256
    """how many of them in each MLP"""
    input_seed: int = 0
    """seed of the random sequences and of the permutations"""


@dataclass
class TrainedSettings(PairSettings):
    """What `trained` can be told."""

    layers: at_least(1) = 99
    """layers whose hidden units are looked for, evenly spaced"""
    units: at_least(2) = 1024
    """how many of them in each MLP"""


# ---- newborns ----------------------------------------------------------------------------------------------


def rates(settings: RateSettings):
    """How often does each test call newborn strangers kin? Writes errors.json, errors.png, errors_tau.png."""
    specs = chosen_models(settings.model, (settings.first_seed,))
    check_lengths((settings.sequence_length,), shortest_context(specs))
    check_lengths((settings.paper_length,), shortest_context(specs), "--paper-length")
    experiment = Experiment("errors", "BB B.3.1, Figure 13", settings)
    settings = experiment.settings
    choices = list(itertools.product(settings.model, settings.schemes, STATE_INPUTS))
    for model in settings.model:  # once scaled, weights know no scheme
        choices.append((model, settings.schemes[0], WEIGHTS))
    rows, taus = [], []
    for model, scheme, inputs in progress(choices, desc="errors", unit=" settings"):
        key = {"inputs": inputs, "scheme": scheme, "model": model}
        newborns = strangers(model, scheme, inputs, settings)
        if inputs == WEIGHTS:
            p_values = weights_p(newborns, settings)
            rows.append({"test": "units"} | key | units_rate(newborns, settings))
        else:
            paper_values, pooled = paper_p(newborns, inputs, settings)
            p_values = {"relabelling": relabelling_p(newborns, inputs, settings)} | paper_values
            if scheme == settings.schemes[0]:  # the one that is drawn
                panel = key | {"panel": f"{model}, {inputs}"}
                taus += tau_histogram(pooled, settings.paper_sequences, panel)
        for test, p in p_values.items():
            rows.append({"test": test} | key | error_rate(test, p, len(newborns)))
    return experiment.save(rows, COLUMNS, draw_errors, taus=taus)


def strangers(model, scheme, inputs, settings: RateSettings):
    """Newborns of different seeds, with token tables of their own or one for all."""
    is_trap = inputs in (SHARED_TABLE, VECTORS)
    embedding_seed = 0 if inputs == SHARED_TABLE else None
    newborns = []
    for birth in range(settings.trap_births if is_trap else settings.num_births):
        newborns.append(Newborn(PRESETS[model], settings.first_seed + birth, embedding_seed, scheme))
    return newborns


def relabelling_p(newborns, inputs, settings: RateSettings):
    """The p of the exact test of states, for all pairs of newborns."""
    config = newborns[0].config
    drawn = (settings.input_seed, range(settings.num_sequences), settings.sequence_length)
    if inputs == VECTORS:
        given = random_vectors(*drawn, config.d_model)
    else:
        given = random_tokens(*drawn, config.vocab_size)
    prints = []
    for newborn in newborns:
        states = final_states(newborn, given, settings.device, settings.torch_dtype)
        prints.append(fingerprint(states.flatten(0, 1)))
    p = []
    for i, j in itertools.combinations(range(len(newborns)), 2):
        C = relation(prints[i], prints[j])
        p.append(diagonal_test(C, (settings.input_seed, i, j), settings.permutations)["p"])
    return np.array(p)


class Kept:
    """A newborn whose tensors are drawn once and kept, for many comparisons."""

    def __init__(self, newborn):
        self.newborn = newborn
        self.config = newborn.config
        self.place = None
        self.width = newborn.width
        self.family = newborn.family
        self.shapes = newborn.shapes
        self.tensors = {}

    def read(self, name):
        """One tensor."""
        if name not in self.tensors:
            self.tensors[name] = self.newborn.read(name)
        return self.tensors[name]


def weights_p(newborns, settings: RateSettings):
    """The p of the exact tests of the blocks' weights and of token tables, for all pairs of newborns."""
    p = {"weights": [], "token tables": []}
    kept = [Kept(newborn) for newborn in newborns]
    for i, j in itertools.combinations(range(len(kept)), 2):
        correlations, _ = weight_correlations(kept[i], kept[j])
        for test, part in (("weights", "body"), ("token tables", "embedding")):
            C = correlations[part]
            p[test].append(diagonal_test(C, (settings.input_seed, i, j), settings.permutations)["p"])
    return {test: np.array(values) for test, values in p.items()}


def units_rate(newborns, settings: RateSettings):
    """How often a census finds evidence between newborns, and the largest share of units found."""
    models = [Units(Kept(newborn)) for newborn in newborns]
    for model in models:
        model.views = functools.cache(model.views)  # each model is a suspect many times
    rejected, shares = [], []
    for i, j in itertools.combinations(range(len(models)), 2):
        tokens = tokens_of(models[i], models[j])
        layers, _ = unit_census(models[i], models[j], tokens, settings.units, settings.layers, (i, j))
        rejected.append(judge_units(layers) != NO_EVIDENCE)
        shares += [layer["share"] for layer in layers]
    low, high = wilson(sum(rejected), len(rejected), 0.99)
    row = {"num_pairs": len(rejected), "rejections": sum(rejected), "low": low, "high": high}
    return row | {"rate": sum(rejected) / len(rejected), "largest_share": max(shares)}


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
    outputs = [last_outputs(newborn, config.vocab_size, reading).numpy() for newborn in newborns]
    top_k = config.d_model // 2
    p, pooled = [], []
    for a, b in itertools.combinations(outputs, 2):
        taus = identity_taus(a, b, "top", top_k)
        test = judge_taus(taus, n, config.d_model, "top", top_k, temperature=None)
        p.append((test["paper_t_p"], test["paper_u_p"], norm.sf(test["closed_form_z"])))
        pooled.append(taus)
    return dict(zip(PAPER_TESTS, np.transpose(p))), np.concatenate(pooled)


def error_rate(test, p, births):
    """How often p of all pairs of births rejects, the rate's 99 % interval, and the p of a uniform p.

    Renumbered coordinates make the p of pairs that share a birth independent, so Wilson's interval holds for
    the exact tests; for the paper's, births are resampled.
    """
    rejected = p <= LEVEL
    rejections = int(rejected.sum())
    if test in PAPER_TESTS:
        low, high = interval_over_births(rejected, births)
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


def tau_histogram(taus, n, key):
    """Shares of strangers' taus over n inputs, in %, beside the Gaussian of independent rows (Figure 13)."""
    edges = np.linspace(-0.3, 0.3, 61)
    share = 100 * np.histogram(np.clip(taus, -0.3, 0.3), edges)[0] / max(1, len(taus))
    law = 100 * np.diff(norm.cdf(edges, scale=kendall_std(n)))
    bins = pd.DataFrame({"tau": (edges[1:] + edges[:-1]) / 2, "share": share, "gaussian": law})
    return bins.assign(**key).to_dict("records")


def draw_errors(result, folder) -> None:
    """errors.png: how often strangers are called kin; errors_tau.png: Kendall's tau of strangers (Figure 13).

    Of the schemes, the first is drawn.
    """
    scheme = result["settings"]["schemes"][0]
    bars = []
    for row in result["rows"]:
        if row["scheme"] == scheme:
            bar = {"label": NAMES[row["test"]], "panel": GIVEN[row["inputs"]], "series": row["model"]}
            bars.append(bar | {key: 100 * row[key] for key in ("rate", "low", "high")})
    rates_of = pd.DataFrame(bars).groupby("panel", sort=False)["rate"]
    texts = [f"{between(rate, '.3g')} % ({given})" for given, rate in rates_of]
    error_bars(
        folder / "errors.png",
        bars,
        title=f"How many strangers are called kin? {'; '.join(texts)}",
        xlabel="% of pairs of strangers called kin, with 99 % intervals",
        level=100 * LEVEL,
        level_label=f"what p = {LEVEL} promises",
    )
    taus = pd.DataFrame(result["taus"])
    taus["part"] = taus["tau"] * taus["share"] / 100
    taus["mean"] = taus.groupby("panel")["part"].transform("sum")
    given = taus["inputs"].map(GIVEN)
    taus["panel"] = taus["model"] + ", " + given + taus["mean"].map(": mean {:z.2f}".format)
    texts = [
        f"{between(mean, 'z.2f')} ({shared})" for shared, mean in taus.groupby(given, sort=False)["mean"]
    ]
    curves(
        taus,
        folder / "errors_tau.png",
        x="tau",
        y="share",
        series="scheme",
        names={scheme: "strangers"},
        title=f"Do strangers rank inputs alike? Mean of Kendall's tau: {'; '.join(texts)}",
        panel="panel",
        theories={"gaussian": "Gaussian of independent rows"},
        style="-",
        xlabel="Kendall's tau between two strangers",
        ylabel="% of dimensions",
    )


# ---- trained strangers -------------------------------------------------------------------------------------


def trained(settings: TrainedSettings):
    """How many hidden units do trained strangers share, plain and hidden, all pairs? Writes trained.json.

    The models must be strangers: nothing here can know.
    """
    specs = comparable_models(settings.models, settings.init)
    experiment = Experiment("trained", "", settings)
    models = [Units(spec.open(), spec.name) for spec in specs]
    stolen = [Units(hidden(model.source), spec.name) for model, spec in zip(models, specs)]
    rows = []
    for i, j in progress(list(itertools.combinations(range(len(models)), 2)), desc="trained", unit=" pairs"):
        for is_hidden, suspect in ((False, models[j]), (True, stolen[j])):
            tokens = tokens_of(models[i], suspect)
            layers, _ = unit_census(models[i], suspect, tokens, settings.units, settings.layers)
            pair = {
                "a": specs[i].name,
                "b": specs[j].name,
                "hidden": is_hidden,
                "verdict": judge_units(layers),
            }
            for layer in layers:
                counts = {key: layer[key] for key in ("number", "found", "units", "share", "by_chance")}
                rows.append(pair | counts)
    largest = sorted(rows, key=lambda row: -row["share"])[:5]
    return experiment.save(rows, shown=largest)


COMMANDS = {"rates": Command(rates, RateSettings()), "trained": Command(trained, TrainedSettings())}
COMMANDS[""] = COMMANDS["rates"]
FIGURES = {"errors": draw_errors}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
