"""Who says rightly who is kin? Every method on children, continued children and strangers (BB 6.1, B.3).

    python -m reproduce.family                  # BB Tables 4a-c, 5, 8-12: trains 12 models, 90 minutes
    python -m reproduce.family --scale smoke    # does it work?
    python -m reproduce.family real             # ours: SmolLM2-135M and its children, 10 minutes

Two models are kin if their weights go back to one birth, strangers if not. Here strangers saw the same text
in the same order; kin are a newborn and its child, and a child after a second corpus. Each run is made once.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lib.checkpoint import Newborn, parse_spec
from lib.data import TokenData, default_folder
from lib.inputs import TextSettings, random_tokens, read_tokens
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, RunSettings, at_least, run_script
from measure.verdict import compare_pair, read_model
from reproduce.rivals import RIVALS, similarities
from reproduce.siblings import BASE, CONTINUED, Settings, begin, lineage_runs
from reproduce.thief import as_source, cut, hidden, narrowed, noised, pruned, rounded, weights_of
from seedprint import (
    STRANGER_SEED,
    CompareSettings,
    PaperSettings,
    last_outputs,
    paper_test,
)

TABLES = {  # newborns; newborns and their children; and children of others; children after a second corpus
    "llama": ("4a", "4b, 8", "4c", "5"),
    "qwen": ("9", "10", "11", "12"),
}
COLUMNS = ("table", "base", "suspect", "kin", "paper_t_p", "paper_u_p", *RIVALS)
COLUMNS += ("relabel_z", "body_z", "verdict")


def lineage(settings: Settings):
    """What does every method say of each pair in the papers' tables? Writes lineage.json."""
    runs = lineage_runs(settings)
    experiment = begin("lineage", "BB Tables 4, 5, 8-12", settings, runs)
    text = runs["llama", BASE, 1]
    data = TokenData(default_folder(text.source, text.tokenizer))
    pairs = table_pairs("llama", runs) + table_pairs("qwen", runs)
    rows = compare_all(pairs, data, experiment)
    return experiment.save(rows, COLUMNS)


def table_pairs(style, runs):
    """(table, base, suspect, whether they are kin) of every row of a style's tables."""
    newborns, children, others, continued = TABLES[style]
    seeds = [seed for name, seed, corpus in runs if (name, corpus) == (style, 1)]
    child = {seed: runs[style, seed, 1].out for seed in seeds}
    birth = {seed: f"{child[seed]}/step_0000000" for seed in seeds}
    strangers = list(zip(seeds, seeds[1:] + seeds[:1]))  # each seed and the next
    pairs = [(newborns, birth[seed], birth[other], False) for seed, other in strangers]
    pairs += [(children, birth[seed], child[seed], True) for seed in seeds]
    pairs += [(others, birth[seed], child[other], False) for seed, other in strangers]
    pairs += [(continued, child[BASE], runs[style, seed, 2].out, seed == BASE) for seed in CONTINUED]
    return pairs


def compare_all(pairs, data, experiment):
    """What every method says of each pair, a row; REEF reads the data set's held-out text."""
    settings = experiment.settings
    where = {"device": settings.device, "dtype": settings.dtype}
    ours = CompareSettings(**where)
    theirs = PaperSettings(**where)
    if settings.scale == "smoke":
        ours = CompareSettings(sequence_length=8, permutations=199, layers=2, units=64, **where)
        theirs = PaperSettings(paper_sequences=20, paper_length=8, **where)
    text, _ = data.held_out(200, ours.sequence_length)

    @functools.cache
    def read(folder):
        """A model as `compare` reads it, and what the paper's test reads."""
        source = parse_spec(folder).open()
        vocab_size = source.config.vocab_size
        tokens = random_tokens(0, range(ours.num_sequences), ours.sequence_length, vocab_size)
        model = read_model(folder, source, tokens, experiment.device, experiment.dtype)
        return model, last_outputs(source, vocab_size, theirs)

    rows = []
    for table, base, suspect, kin in progress(pairs, desc="lineage", unit=" pairs"):
        a, outputs_a = read(base)
        b, outputs_b = read(suspect)
        row, _ = compare_pair(a, b, 0, ours.permutations, ours.units, ours.layers)
        row |= paper_test(outputs_a, outputs_b, theirs)
        row |= similarities(a.source, b.source, text, experiment.device, experiment.dtype)
        rows.append({"table": table, "base": base, "suspect": suspect, "kin": kin} | row)
    return rows


# ---- a real model ------------------------------------------------------------------------------------------


@dataclass
class RealSettings(RunSettings):
    """What `real` can be told."""

    base: str = "smollm2"
    """a model of this project's architecture: a checkpoint folder, a .gguf file, or PRESET@SEED"""
    text: str | None = "python"
    """what its child learns, as in sinks.py: the standard library's source"""
    steps: at_least(1) = 20
    """of the child's training, of two sequences of 128 tokens each"""


def real(settings: RealSettings):
    """What does `compare` say of a real model's children, hidden and damaged, and of strangers? (ours)"""
    experiment = Experiment("real", "", settings)
    spec = parse_spec(settings.base)
    base = read_model(spec.name, spec.open())
    rows = []
    for name, kin, source in progress(relatives(spec, experiment.settings), desc="real", unit=" suspects"):
        row, detail = compare_pair(base, read_model(name, source))
        origins = [match["base_number"] for match in detail["layers"]]
        rows.append({"base": base.name, "suspect": name, "kin": kin} | row | {"base_layers": origins})
    return experiment.save(rows, ("suspect", "kin", "verdict", "units_found", "units", "distance", "body_z"))


def relatives(spec, settings: RealSettings):
    """(name, whether it is kin, source) of a model's children, one after another, and of strangers."""
    source = spec.open()
    yield "itself", True, spec.open()
    child = trained_child(spec, settings)
    yield "trained", True, child
    yield "trained, hidden", True, hidden(child)
    child = hidden(source)
    yield "hidden", True, child
    yield "hidden, noise of 0.3 std", True, noised(child, 0.3)
    yield "hidden, 50 % pruned", True, pruned(child, 0.5)
    yield "hidden, 90 % pruned", True, pruned(child, 0.9)
    yield "hidden, 4 bits", True, rounded(child, 4)
    layers = [layer for layer in range(source.config.num_layers) if layer % 5 != 2]
    yield f"hidden, cut to {len(layers)} layers", True, cut(child, layers)
    yield "hidden, 3/4 of the width", True, narrowed(child, 0.75)
    stranger = Newborn(source.config, STRANGER_SEED)
    yield "newborn", False, stranger
    weights = weights_of(stranger)
    weights["model.embed_tokens.weight"] = source.read("model.embed_tokens.weight")
    yield "newborn, the base's token table", False, as_source(weights, source.config)


def trained_child(spec, settings: RealSettings):
    """A source of a model after some steps of AdamW at a constant learning rate of 5e-4."""
    reading = TextSettings(text=settings.text, num_sequences=2 * settings.steps, device=settings.device)
    tokens = read_tokens(reading, spec, 128)
    model = spec.load(settings.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for batch in progress(tokens.split(2), desc="training", leave=False):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return as_source(weights, model.config)


COMMANDS = {"": Command(lineage, Settings()), "real": Command(real, RealSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
