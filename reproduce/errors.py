"""How often does each test call strangers kin? (BB B.3.1, Figure 13; mostly ours)

    python -m reproduce.errors                      # all pairs of 45 newborns: 50 minutes
    python -m reproduce.errors --num-births 5       # all pairs of 5

Newborns of different seeds are strangers by construction, so every rejection is an error. A test is sound if
its p is uniform; a sound test rejects 1 % at p <= 0.01. Much hangs on what the models read (tokens through a
token table of their own, through one that all share, or Gaussian vectors), and on how they are drawn.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import norm

from init import SCHEMES, keyed_generator
from lib.checkpoint import Newborn, final_states
from lib.figures import COLOURS, legend_below, new_figure, save_figure
from lib.inputs import random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, RunSettings, at_least, run_script
from measure import lineage
from measure.census import Units, equal_ids, unit_census
from measure.cosines import wilson
from measure.verdict import NO_EVIDENCE, judge_units
from model import PRESETS
from seedprint import PaperSettings, last_outputs, paper_test

LEVEL = 0.01  # from here on down, a test calls two models kin
PAPER_TESTS = ("t-test", "U-test", "closed form")
INPUTS = {"own embedding": "tokens", "shared embedding": "tokens", "gaussian": "gaussian"}  # what is read
PARTS = ("body", "embedding")  # of a model's weights
SEQUENCES, LENGTH = 16, 64  # of random tokens that the exact test reads; each position is a row
PERMUTATIONS = 999  # of the exact test; the smallest p is 1 / (1 + this)
FEW = 12  # births where strangers share what they read, and few show what happens
LAYERS, UNITS = 2, 256  # whose hidden units are looked for, and how many in each


@dataclass
class Settings(RunSettings):
    """What it can be told."""

    model: tuple[Literal[tuple(PRESETS)], ...] = ("tiny_gpt2", "tiny_llama")
    """presets to be born"""
    schemes: tuple[Literal[SCHEMES], ...] = ("gpt2", "normal")
    """how they are drawn"""
    num_births: at_least(3) = 45
    """newborns with token tables of their own; all pairs are compared"""
    paper_sequences: at_least(3) = 1000
    """random sequences of 64 tokens of the paper's test; in the paper 10000 of 1024"""


def errors(settings: Settings):
    """How often does each test call newborn strangers kin? Writes errors.json and errors.png."""
    experiment = Experiment("errors", "BB B.3.1, Figure 13", settings)
    settings = experiment.settings
    choices = list(itertools.product(settings.model, settings.schemes, INPUTS))
    for model in settings.model:  # once scaled, weights know no scheme
        choices.append((model, settings.schemes[0], "weights"))
    rows = []
    for model, scheme, inputs in progress(choices, desc="errors", unit=" settings"):
        key = {"inputs": inputs, "scheme": scheme, "model": model}
        newborns = strangers(model, scheme, inputs, settings.num_births)
        if inputs == "weights":
            rejected, largest_share = units_found(newborns)
            rate = error_rate("units", rejected, len(newborns))
            rows.append({"test": "units"} | key | rate | {"largest_share": largest_share})
            p_values = p_of_weights(newborns)
        else:
            p_values = p_of_states(newborns, inputs, settings)
        for test, p in p_values.items():
            rows.append({"test": test} | key | error_rate(test, p <= LEVEL, len(newborns)))
    draw_rates(rows, experiment.folder / "errors.png")
    return experiment.save(rows)


def strangers(model, scheme, inputs, count):
    """Newborns of seeds 1, 2, ..., with token tables of their own or one for all; drawn once and kept."""
    if inputs in ("shared embedding", "gaussian"):
        count = min(FEW, count)
    embedding_seed = 0 if inputs == "shared embedding" else None
    newborns = [Newborn(PRESETS[model], seed, embedding_seed, scheme) for seed in range(1, count + 1)]
    for newborn in newborns:
        newborn.read = functools.cache(newborn.read)
    return newborns


def p_of_states(newborns, inputs, settings: Settings):
    """The p of each test that reads states, (pairs,): of all pairs of newborns."""
    config = newborns[0].config
    given = random_tokens(0, range(SEQUENCES), LENGTH, config.vocab_size)
    if inputs == "gaussian":
        given = random_vectors(0, range(SEQUENCES), LENGTH, config.d_model)
    reading = PaperSettings(
        settings.device, settings.dtype, inputs=INPUTS[inputs], paper_sequences=settings.paper_sequences
    )
    prints, outputs = [], []
    for newborn in newborns:
        states = final_states(newborn, given, settings.device, settings.torch_dtype)
        prints.append(lineage.fingerprint(states.flatten(0, 1)))
        outputs.append(last_outputs(newborn, config.vocab_size, reading))
    p = []
    for i, j in itertools.combinations(range(len(newborns)), 2):
        exact = lineage.diagonal_test(lineage.relation(prints[i], prints[j]), (0, i, j), PERMUTATIONS)
        test = paper_test(outputs[i], outputs[j], reading)
        p.append((exact["p"], test["paper_t_p"], test["paper_u_p"], norm.sf(test["closed_form_z"])))
    return dict(zip(("relabelling", *PAPER_TESTS), np.transpose(p)))


def p_of_weights(newborns):
    """The p of the exact tests of the blocks' weights and of token tables, (pairs,): of all pairs."""
    p = []
    for (i, a), (j, b) in itertools.combinations(enumerate(newborns), 2):
        correlations = lineage.weight_correlations(a, b)
        tests = [lineage.diagonal_test(correlations[part], (0, i, j), PERMUTATIONS) for part in PARTS]
        p.append([test["p"] for test in tests])
    return dict(zip(("weights", "token tables"), np.transpose(p)))


def units_found(newborns):
    """For which pairs of newborns a census finds evidence, and the largest share of a layer's units found."""
    models = [Units(newborn) for newborn in newborns]
    for model in models:
        model.views = functools.cache(model.views)  # each model is a suspect many times
    rejected, shares = [], []
    for (i, a), (j, b) in itertools.combinations(enumerate(models), 2):
        census = unit_census(a, b, equal_ids(a, b), UNITS, LAYERS, (i, j))
        rejected.append(judge_units(census.matches) != NO_EVIDENCE)
        shares += [match.share for match in census.matches]
    return np.array(rejected), max(shares)


def error_rate(test, rejected, births):
    """How often a test rejects, of all pairs of births, and the rate's 99 % interval.

    Renumbered coordinates make the p of pairs that share a birth independent, so Wilson's interval holds for
    the exact tests; for the paper's, births are resampled.
    """
    rejections, number = int(rejected.sum()), len(rejected)
    low, high = wilson(rejections, number, 0.99)
    if test in PAPER_TESTS:
        low, high = interval_over_births(rejected, births)
    count = {"num_pairs": number, "rejections": rejections, "rate": rejections / number}
    return count | {"low": low, "high": high}


def interval_over_births(rejected, births):
    """99 % interval of the rate of `rejected`, (pairs,), over all pairs of births, which are resampled.

    Pairs that share a birth are not independent, so they cannot be resampled. Where all pairs agree, the
    births say nothing of the spread, and the interval is Wilson's for as many pairs as are disjoint.
    """
    if len(set(rejected)) == 1:
        disjoint = births // 2
        return wilson(int(rejected[0]) * disjoint, disjoint, 0.99)
    generator = keyed_generator("births", births)
    counts = generator.multinomial(births, np.full(births, 1 / births), 2000)  # (2000, births)
    first, second = np.triu_indices(births, 1)
    weights = counts[:, first] * counts[:, second]  # (2000, pairs)
    weights = weights[weights.sum(axis=1) > 0]
    low, high = np.quantile(weights @ rejected / weights.sum(axis=1), (0.005, 0.995))
    return low, high


def draw_rates(rows, path) -> None:
    """How often strangers are called kin: a line for each test and what it reads, a colour for each birth."""
    title = "How often does a test call unrelated newborns kin? (99 % intervals)"
    figure, grid = new_figure(title, width=7, height=5.6)
    axes = grid[0, 0]
    lines, births = {}, {}  # their numbers
    for row in rows:
        birth = f"{row['model']}, scheme {row['scheme']}"
        label = None if birth in births else birth
        number = births.setdefault(birth, len(births))
        height = lines.setdefault(f"{row['inputs']}: {row['test']}", len(lines)) + 0.18 * number
        axes.plot([100 * row["low"], 100 * row["high"]], [height, height], color=COLOURS[number])
        axes.plot(100 * row["rate"], height, "o", color=COLOURS[number], label=label)
    axes.set_yticks(range(len(lines)), lines)
    axes.axvline(100 * LEVEL, color="black", ls="--", label="what p = 0.01 promises")
    axes.set(xscale="symlog", xlim=(-0.1, 130), xticks=[0, 1, 10, 100], xlabel="% of pairs called kin")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()
    legend_below(figure, axes)
    save_figure(figure, path)


COMMANDS = {"": Command(errors, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
