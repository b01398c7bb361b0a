"""Measure how often each test calls unrelated models related (BB B.3.1, Figure 13; mostly ours).

    python -m reproduce.errors                      # all pairs of 45 newborns: an hour of one core

Newborns of different seeds are unrelated: a sound test calls 1 % of their pairs related at p <= 0.01.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.stats import binomtest, norm

from init import SCHEMES, newborn
from lib.figures import column, curves
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, RunSettings, at_least, run_script
from lineage.align import align_by, match_layers
from lineage.compare import FEW as DIRECTIONS
from lineage.coordinates import compare_coordinates
from lineage.judge import NO_EVIDENCE, Evidence, findings_of, rule_of
from lineage.layout import find_stacks
from lineage.partners import find_partners
from lineage.views import readings
from model import PRESETS
from reproduce.disguise import as_source, weights_of
from seedprint import PaperSettings, last_outputs, paper_test
from sources.checkpoint import newborn_weights

INPUTS = ("own embedding", "shared embedding", "gaussian")  # tokens with one embedding each, or one for all
LEVEL = 0.01  # a test calls two models related if p is at most this
FEW = 12  # newborns, enough where unrelated models read the same
LAYERS, UNITS = 2, 256  # layers to match, and neurons in each


@dataclass
class Settings(RunSettings):
    """Which newborns to test."""

    model: tuple[Literal[tuple(PRESETS)], ...] = ("tiny_gpt2", "tiny_llama")  # presets
    schemes: tuple[Literal[SCHEMES], ...] = ("gpt2", "normal")  # how they are drawn
    num_births: at_least(3) = 45  # newborns with their own embedding; all pairs are compared
    paper_sequences: at_least(3) = 1000  # random sequences of 64 tokens; BB: 10000 of 1024


def errors(settings: Settings):
    """How often does each test call unrelated newborns related? (an hour of one core)"""
    experiment = Experiment("errors", "BB B.3.1, Figure 13", settings)
    rows = []
    births = list(itertools.product(settings.model, settings.schemes, INPUTS))
    for model, scheme, inputs in progress(births, desc="errors"):
        p_values = p_of_states(model, scheme, inputs, settings, experiment)
        rows += error_rates(p_values, {"inputs": inputs, "scheme": scheme, "model": model})
    for model in progress(settings.model, desc="errors of weights"):  # which no scheme changes, once scaled
        key = {"inputs": "weights", "scheme": settings.schemes[0], "model": model}
        config = PRESETS[model]
        births = [newborn_weights(config, seed) for seed in range(1, settings.num_births + 1)]
        newborns = [as_source(weights_of(born), config) for born in births]  # each is read often
        rows += error_rates(p_of_weights(newborns), key)
    result = experiment.save(rows)
    draw_errors(experiment.folder / "errors.png", rows)
    return result


def p_of_states(model, scheme, inputs, settings: Settings, experiment):
    """The p-values of all pairs of newborns, by each form of the paper's test."""
    count = settings.num_births if inputs == "own embedding" else min(FEW, settings.num_births)
    embedding_seed = 0 if inputs == "shared embedding" else None
    kind = "gaussian" if inputs == "gaussian" else "tokens"
    reading = PaperSettings(inputs=kind, paper_sequences=settings.paper_sequences)
    outputs = []
    for seed in range(1, count + 1):
        born = newborn(model, seed, embedding_seed, scheme, experiment.device, experiment.dtype)
        outputs.append(last_outputs(born, born.config.vocab_size, reading))
    tests = [paper_test(a, b) for a, b in itertools.combinations(outputs, 2)]
    return {
        "t-test": column(tests, "paper_t_p"),
        "U-test": column(tests, "paper_u_p"),
        "closed form": norm.sf(column(tests, "closed_form_z")),
    }


def p_of_weights(newborns):
    """The p-values of all pairs by coordinates; for neurons 0 if `compare` finds evidence, else 1."""
    stacks = [find_stacks(born)[0] for born in newborns]
    p = {"units": [], "weights": [], "embedding matrices": []}
    for pair in itertools.combinations(stacks, 2):
        ids = torch.arange(pair[0].source.config.vocab_size)
        likeliest = [readings(stack, stack.embeddings)[0] for stack in pair]
        matches, _ = match_layers(align_by(pair, likeliest, (ids, ids), DIRECTIONS), LAYERS, UNITS)
        verdict, _ = rule_of(findings_of(Evidence(*pair, matches=matches, num_tokens=len(ids))))
        p["units"].append(float(verdict == NO_EVIDENCE))
        coordinates = compare_coordinates(*pair, find_partners(*pair))
        p["weights"].append(coordinates.body.p)
        p["embedding matrices"].append(coordinates.embedding.p)
    return p


def draw_errors(path, rows) -> None:
    """Draw how often each test calls unrelated newborns related: a dot for each way to draw them."""
    points = []
    for row in rows:
        test = {"units": "neurons", "weights": "coordinates"}.get(row["test"], row["test"])
        line = f"{test}: {row['inputs']}".removesuffix(": weights")
        birth = f"{row['model']}, scheme {row['scheme']}"
        points.append({"birth": birth, "test": line, "percent": 100 * row["rate"]})
    question = "How often does a test call unrelated newborns related? (p = 0.01 promises 1 %)"
    keys = {"x": "percent", "y": "test", "series": "birth", "style": "o", "xscale": "symlog"}
    labels = {"xticks": (0, 1, 10, 100), "xlabel": "% of pairs called related"}
    curves(points, path, question, **keys, **labels)


def error_rates(p_values, key):
    """A row per test: how often it rejects, of all pairs, with a 99 % interval (Wilson)."""
    rows = []
    for test, p in p_values.items():
        rejections = sum(value <= LEVEL for value in p)
        low, high = binomtest(rejections, len(p)).proportion_ci(0.99, method="wilson")
        row = {"test": test} | key | {"num_pairs": len(p), "rejections": rejections}
        rows.append(row | {"rate": rejections / len(p), "low": low, "high": high})
    return rows


COMMANDS = {"": Command(errors, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
