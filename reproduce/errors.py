"""Measure how often each test calls unrelated models related (BB B.3.1, Figure 13; mostly ours).

    python -m reproduce.errors                      # all pairs of 45 newborns: half an hour

Newborns of different seeds are unrelated: a sound test calls 1 % of their pairs related at p <= 0.01.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.stats import binomtest, norm

from init import SCHEMES, newborn
from lib.figures import lines_of, new_figure, save_figure, unique
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, RunSettings, at_least, run_script
from lineage.compare import FEW as DIRECTIONS
from lineage.evidence import look
from lineage.judge import NO_EVIDENCE, Pair, judge
from lineage.layout import find_stacks
from lineage.match import match_layers, way_by
from lineage.views import readings
from model import PRESETS
from seedprint import PaperSettings, last_outputs, paper_test
from strangers.formats import Newborn

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
    """How often does each test call unrelated newborns related? (half an hour)"""
    experiment = Experiment("errors", "BB B.3.1, Figure 13", settings)
    rows = []
    births = list(itertools.product(settings.model, settings.schemes, INPUTS))
    for model, scheme, inputs in progress(births, desc="errors"):
        p_values = p_of_states(model, scheme, inputs, settings, experiment)
        rows += error_rates(p_values, {"inputs": inputs, "scheme": scheme, "model": model})
    for model in progress(settings.model, desc="errors of weights"):  # which no scheme changes, once scaled
        key = {"inputs": "weights", "scheme": settings.schemes[0], "model": model}
        newborns = [Newborn(PRESETS[model], seed) for seed in range(1, settings.num_births + 1)]
        for each in newborns:
            each.read = functools.partial(part_of, functools.cache(each.read))
        rows += error_rates(p_of_weights(newborns), key)
    result = experiment.save(rows)
    draw_rates(rows, experiment.folder / "errors.png")
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
        "t-test": [test["paper_t_p"] for test in tests],
        "U-test": [test["paper_u_p"] for test in tests],
        "closed form": [norm.sf(test["closed_form_z"]) for test in tests],
    }


def part_of(read, name, part=()):
    """A part of a tensor that is read whole, and kept."""
    return read(name)[part]


def p_of_weights(newborns):
    """The p-values of all pairs by coordinates; for neurons 0 if `compare` finds evidence, else 1."""
    stacks = [find_stacks(born)[0] for born in newborns]
    p = {"units": [], "weights": [], "embedding matrices": []}
    for pair in itertools.combinations(stacks, 2):
        ids = torch.arange(pair[0].source.config.vocab_size)
        way = way_by(pair, [readings(stack, stack.tables)[0] for stack in pair], (ids, ids), DIRECTIONS)
        rows, _ = match_layers(way, LAYERS, UNITS)
        found = Pair(*pair, matched=rows, num_tokens=len(ids))
        judge(found)
        p["units"].append(float(found.verdict == NO_EVIDENCE))
        tests, _ = look(*pair)
        for test, part in (("weights", "body"), ("embedding matrices", "embedding")):
            p[test].append(tests[part]["p"])
    return p


def error_rates(p_values, key):
    """A row per test: how often it rejects, of all pairs, with a 99 % interval (Wilson)."""
    rows = []
    for test, p in p_values.items():
        rejections = sum(value <= LEVEL for value in p)
        low, high = binomtest(rejections, len(p)).proportion_ci(0.99, method="wilson")
        row = {"test": test} | key | {"num_pairs": len(p), "rejections": rejections}
        rows.append(row | {"rate": rejections / len(p), "low": low, "high": high})
    return rows


def draw_rates(rows, path) -> None:
    """Draw the error rates: a line per test and input, a colour per model and scheme."""
    title = "How often does a test call unrelated newborns related?"
    figure, ((axes,),) = new_figure(title, width=7, height=5)
    points = []
    for row in rows:
        line = f"{row['test']}: {row['inputs']}".removesuffix(": weights")
        points.append(row | {"line": line, "birth": f"{row['model']}, scheme {row['scheme']}"})
    lines = unique(points, "line")
    for number, (birth, of_birth) in enumerate(lines_of(points, "birth")):
        heights = [lines.index(point["line"]) + 0.18 * number for point in of_birth]
        rate, *ends = 100 * np.array([[point["rate"], point["low"], point["high"]] for point in of_birth]).T
        axes.errorbar(rate, heights, xerr=abs(ends - rate), fmt="o", label=f"{birth}, 99 % interval")
    axes.axvline(100 * LEVEL, color="black", ls="--", label="what p = 0.01 promises")
    axes.set(xscale="symlog", xlim=(-0.1, 130), xticks=[0, 1, 10, 100], xlabel="% of pairs called related")
    axes.set_yticks(range(len(lines)), lines)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()
    save_figure(figure, path, axes)


COMMANDS = {"": Command(errors, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
