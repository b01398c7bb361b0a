"""Where does a model's attention sink, why, and what moves the sink? (the paper: BB 6.2; the sinks paper: SO)

    python sinks.py                               # `rate`: how many heads of smollm2 sink?
    python sinks.py anatomy                       # what singles position 1 out, layer by layer?
    python sinks.py transplant                    # does the sink move onto a constant key and value?

Positions count from 1. A head's alpha_k is its attention to position k, averaged over the queries that see
it. A head is a *sink head* of a sequence if its alpha_1 is above 0.3. The *sink rate* is the mean share of
sink heads; `other_sink_rate` is the same for heads whose alpha_k exceeds 0.3 for some k from 2 to T/2.

A model with a tokenizer reads docstrings of Python's standard library, or --text; others read random tokens.
`low` and `high` bound Student's 95 % interval over sequences. measure/anatomy.py follows the sinks paper's
chain of causes, measure/transplant.py moves the sink; more experiments: reproduce/interventions.py.
"""

from dataclasses import dataclass

import torch

from lib.figures import curves
from lib.results import interval
from lib.settings import Command, at_least, run_script, say
from measure import attention, caveats
from measure.anatomy import anatomy
from measure.figures import draw_heads
from measure.transplant import TransplantSettings, transplant
from sources.inputs import TextExperiment, TextSettings, read_tokens

PROFILED = 1024  # tokens whose queries are drawn, of one text or of several
LENGTHS = (32, 64, 128, 256, 512)  # of sequences, for `rate`


@dataclass
class RateSettings(TextSettings):
    """The settings of `rate`."""

    # tokens in a sequence, 10 at least, since fewer sink by uniform attention; None: 32 to 512 that fit
    sequence_length: tuple[at_least(10), ...] | None = None


@torch.inference_mode()
def rate(settings: RateSettings):
    """Where does attention sink? The sink rate by length, and alpha_1 of each head (BB Figure 12; minutes)"""
    # `models` yields each --model, after columns that name it, and its Checkpoint.
    experiment = TextExperiment("rate", "BB Figure 12", settings)
    rows, heads, points = [], [], []
    for named, spec, model in experiment.models():
        context = model.config.context_length
        lengths = settings.sequence_length or [T for T in LENGTHS if T <= context] or [context]
        tokens = read_tokens(experiment.settings, spec, max(lengths))  # (n, T)
        found = by_length(model, tokens, lengths)
        seen = attention.queries_that_see_the_first(model, tokens.shape[1])  # by layer
        # A row, and a map of heads, for each length
        for T, (row, alpha) in found.items():  # alpha (n, L, H)
            row |= interval(attention.sink_share(alpha), "sink_rate", 0, 1)
            row |= caveats.beside(model, tokens[:, :T], [min(T, queries) for queries in seen.values()])
            key = named | {"sequence_length": T}
            rows.append(key | row)
            heads.append(key | {"layers": [*seen], "alpha1": alpha.mean(0).tolist()})
        # What each query pays position 1, of some texts
        some = tokens[: max(1, PROFILED // tokens.shape[1]), :PROFILED]
        profile = caveats.query_profile(model, some).tolist()
        for query, weight in enumerate(profile, start=1):
            point = {"query": query, "attention to position 1": weight, "uniform": 1 / query}
            points.append({"model": spec.label} | point)
    columns = ("checkpoint", "sequence_length", "sink_rate", "low", "high", "other_sink_rate")
    columns += ("mean_alpha1", "uniform_alpha1", "windowed_layers")
    if any("longest_run" in row for row in rows):
        say("texts begin with equal tokens (does tokenizer and template add a BOS each?): see run_sink_rate")
        columns += ("longest_run", "run_alpha", "run_sink_rate")
    if any(row["learned_sink_alpha"] for row in rows):
        columns += ("learned_sink_alpha",)
    result = experiment.save(rows, columns, heads=heads)
    title = "Where does attention sink on position 1?"
    draw_heads(experiment.folder / "rate.png", title, heads, "alpha1")
    question = "What does a query pay position 1? The rate at T tokens is of all queries up to T"
    keys = {"x": "query", "y": "attention to position 1", "series": "model", "style": "-", "log": "x"}
    theories = {"uniform": "uniform attention"}
    curves(points, experiment.folder / "profile.png", question, **keys, theories=theories)
    return result


def by_length(model, tokens, lengths):
    """Rows and alpha_1 by length: by one pass over the longest, or one for each where that matters."""
    found = attention.sinks_by_length(model, tokens, tuple(lengths), with_others=True)
    if len(lengths) == 1 or caveats.is_same_alone(model, tokens, found):
        return found
    say("attention depends on how many tokens follow: each length is read anew")
    return {T: attention.sink_statistics(model, tokens[:, :T], with_others=True) for T in lengths}


COMMANDS = {
    "rate": Command(rate, RateSettings()),
    "anatomy": Command(anatomy, TextSettings()),
    "transplant": Command(transplant, TransplantSettings()),
}
COMMANDS[""] = COMMANDS["rate"]

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
