"""How is a sink born? Its links along training, and its builders in the newborn. (ours)

    python -m reproduce.birth                                   # from results/text/birth_*.jsonl: seconds
    python -m reproduce.birth runs/text/none-42 --out mine      # every kept step of a run: half a minute

A sink's end is known: at the last step a run has sink heads, a dimension that dominates at position 1, and
builders, hidden units that make nearly all of it (`sinks.py silence`). Each earlier step is asked for the
same heads, dimension and units. All is of 64 held-out tokens, the first of them BOS if the run trained so.
"""

from pathlib import Path

import numpy as np
import torch

from init import keyed_generator
from lib import checkpoint, runtime
from lib.figures import curves
from lib.inputs import read_tokens
from lib.results import Experiment
from lib.settings import Command, run_script
from measure import attention
from measure.units import observe
from reproduce.text import NotedSettings, noted, reading_of

DRAWS = 9999  # random sets of units, beside the builders
LARGEST_SHARE = 0.99  # of the dimension, that the builders make together,
MOST_BUILDERS = 8  # unless that takes more of them
LINKS = {  # of a row, as the figure calls them
    "builders": "builders: activation at position 1",
    "dimension": "their dimension at position 1",
    "norm_ratio": "norm of the stream there, to others'",
    "value_ratio": "norm of the values there, to others'",
    "key_alignment": "alignment of other keys, sink layers",
    "alpha1": "attention of the sink heads",
}


@torch.inference_mode()
def measure(run):
    """A name for a run, and its rows: its builders, then the links of each kept step."""
    steps = checkpoint.steps(run.out)
    tokens = read_tokens(reading_of(run), checkpoint.parse_spec(run.out), 64)  # (n, 64)
    end = checkpoint.load(steps[-1])
    activity = observe(end, tokens)
    layer = activity.layer
    builders = activity.builders(layer, min(MOST_BUILDERS, activity.num_needed(layer, LARGEST_SHARE)))
    alpha = attention.attention_to(end, tokens)[..., 0].mean(0)  # (L, H)
    is_sink = alpha >= alpha.max().clamp(max=attention.EPSILON)  # the largest at least
    heads = [(place + 1, head) for place, head in is_sink.nonzero().tolist()]  # layers from 1
    sink = {"layer": layer, "dimension": activity.dimension(layer), "heads": heads}
    named = {"run": Path(run.out).name}
    rows = [named | sink | {"builders": specials(checkpoint.load(steps[0]), tokens, sink, builders)}]
    for step in runtime.progress(steps, desc=run.out, unit=" steps"):
        links = links_of(checkpoint.load(step), tokens, sink, builders)
        rows.append(named | {"step": int(step.name.removeprefix("step_"))} | links)
    return f"birth_{named['run']}", rows


def links_of(model, tokens, sink, builders):
    """What a step's model has of the later sink: a number for each of LINKS, and for builders elsewhere."""
    chain = attention.Chain(model, len(tokens))
    activity = observe(model, tokens, chain)
    links = chain.links()  # (L, T) each
    layer = sink["layer"]
    layers, units = np.array(builders).T  # layers from 1
    sink_layers, heads = np.array(sink["heads"]).T
    found, alpha = attention.sink_statistics(model, tokens)  # alpha (n, L, H)
    return {
        "builders": activity.at_1[layers - 1, units].abs().mean().item(),
        "builders_elsewhere": activity.elsewhere[layers - 1, units].mean().item(),
        "dimension": activity.state[layer, sink["dimension"]].abs().item(),
        "disparity": activity.disparity[layer].item(),
        "norm_ratio": found["norm_ratio"],
        "value_ratio": found["value_ratio"],
        "key_alignment": links["key_alignment"][np.unique(sink_layers) - 1, 1:].mean().item(),
        "alpha1": alpha[:, sink_layers - 1, heads].mean().item(),
        "sink_rate": found["sink_rate"],
    }


def specials(newborn, tokens, sink, builders):
    """Were the builders special at birth? A row each: its percentiles among the hidden units of its layer.

    `p` is that of the builders' mean percentile, of both, against as many random units of the same layers.
    """
    activity = observe(newborn, tokens)
    activation = percentiles(activity.at_1.abs() - activity.elsewhere)  # (L, d_ff)
    weight = percentiles(torch.stack([down[sink["dimension"]].abs() for down in activity.down]))
    both = activation + weight
    layers, units = np.array(builders).T
    found = both[layers - 1, units].mean()
    generator = keyed_generator("random units", *[number for builder in builders for number in builder])
    others = generator.integers(both.shape[1], size=(DRAWS, len(builders)))
    drawn = both[layers - 1, others].mean(1)  # (DRAWS,)
    reached = int((drawn >= found).sum())
    p = (1 + reached) / (1 + DRAWS)
    rows = []
    for layer, unit in builders:
        row = {"layer": layer, "unit": unit, "percentile_activation": activation[layer - 1, unit]}
        rows.append(row | {"percentile_weight": weight[layer - 1, unit], "p": p})
    return rows


def percentiles(scores):
    """Each unit's percentile in its layer, of scores (L, d_ff)."""
    ranks = scores.argsort(dim=1).argsort(dim=1).double()
    return 100 * (ranks / (scores.shape[1] - 1)).numpy()


def birth(settings: NotedSettings):
    """How is a sink born? Which link comes first, and were its builders special at birth? (ours)"""
    experiment = Experiment("birth", "ours", settings)
    rows, points, builders, order = [], [], [], []
    for sink, *steps in noted(settings, "birth_*.jsonl", measure):
        key = {"run": sink["run"]}
        builders += [key | {"dimension": sink["dimension"]} | row for row in sink["builders"]]
        order.append(key | {link: half_way(steps, link) for link in LINKS})
        for step in steps:
            place = max(0.5, step["step"])  # birth, on a logarithmic axis
            for link, value in step.items():
                if link not in ("run", "step"):
                    rows.append(key | {"step": step["step"], "link": link, "value": value})
                if link in LINKS:
                    points.append(key | {"link": LINKS[link], "step": place, "size": value / steps[-1][link]})
    question = "How is a sink born? (each link over its value at the last step)"
    keys = {"x": "step", "y": "size", "series": "link", "panel": "run", "style": ".-"}
    options = {"xlabel": "step (birth at the left)", "ylabel": "times its last value", "ylim": (0, 2)}
    curves(points, experiment.folder / "birth.png", question, **keys, log="x", **options)
    return experiment.save(rows, shown=builders, builders=builders, half_way=order)


def half_way(steps, link):
    """The step from which a link stays beyond half of its way from birth; None if it ended where it began."""
    first, last = steps[0][link], steps[-1][link]
    found = None
    for step in reversed(steps):
        if abs(step[link] - last) >= abs(step[link] - first):
            break
        found = step["step"]
    return found


COMMANDS = {"": Command(birth, NotedSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
