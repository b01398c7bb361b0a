"""Where does a model's attention sink, why, and what moves the sink? (the paper: BB 6.2; the sinks paper: SO)

    python sinks.py                               # `rate`: how many heads of smollm2 sink?
    python sinks.py anatomy                       # what singles position 1 out, layer by layer?
    python sinks.py transplant                    # does the sink move onto a constant key and value?

Positions count from 1. A head's alpha_k is its attention to position k, averaged over the queries that see
it. A head is a *sink head* of a sequence if its alpha_1 is above 0.3. The *sink rate* is the mean share of
sink heads; `other_sink_rate` is the same for heads whose alpha_k exceeds 0.3 for some k from 2 to T/2.
Neurons are named LAYER/UNIT: layers count from 1, units from 0.

A model with a tokenizer reads docstrings of Python's standard library, or --text; others read random tokens.
`low` and `high` bound Student's 95 % interval over sequences. More experiments: reproduce/interventions.py.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from lib.random import random_tokens
from lib.results import Experiment, interval
from lib.runtime import progress
from lib.settings import Command, UserError, at_least, run_script
from measure import attention
from measure.figures import draw_chain, draw_heads, draw_transplants
from measure.units import COLUMNS, Chain, normed_disparity, observe, watch, zero_units
from model import Transformer
from sources.checkpoint import check_lengths, shortest_context, specs_of
from sources.inputs import TextSettings, bos_of, read_tokens, text_of

EARLY = 8  # predictions that see few tokens, so that anything in front of the text helps them
MAPS = {  # what is drawn by head of a case of `transplant`: attention to position 1, then to the constant
    "unchanged": ("as it is, to position 1",),
    "moved": ("with constants, to position 1", "with constants, to the constant"),
}


@dataclass
class Settings(TextSettings):
    """The settings of `anatomy`."""

    model: tuple[str, ...] = ("smollm2",)  # names of the Hub, folders, files, presets, PRESET@SEED
    seed: tuple[int, ...] = (42,)  # seeds of presets' weights
    sequence_length: at_least(2) = 64  # tokens in a sequence (Gu et al.: 64)


@dataclass
class RateSettings(Settings):
    """The settings of `rate`."""

    # tokens in a sequence, 10 at least, since fewer sink by uniform attention; None: 32 to 512 that fit
    sequence_length: tuple[at_least(10), ...] | None = None


@dataclass
class TransplantSettings(Settings):
    """The settings of `transplant`."""

    sequence_length: tuple[at_least(5), ...] = (64,)  # tokens in a sequence
    num_sequences: at_least(2) = 32  # sequences; fewer, down to 4, if they are longer than 64 tokens
    num_constants: at_least(1) = 16  # extra sequences, whose first position gives the constants
    save: str | None = None  # new .safetensors file for the constants


@torch.inference_mode()
def measure_models(name, paper, settings: Settings, measure, *more):
    """A new Experiment, and the rows that `measure` returns for all models, lists by name."""
    specs = specs_of(settings.model, settings.seed)
    check_lengths(np.ravel(settings.sequence_length or ()), shortest_context(specs))
    experiment = Experiment(name, paper, settings)
    lists = defaultdict(list)
    for spec in progress(specs, desc=name, unit=" models"):
        named = {"checkpoint": spec.label, "text": text_of(settings, spec)}
        model = spec.load(experiment.device, experiment.dtype)
        for key, rows in measure(experiment.settings, spec, model, *more).items():
            lists[key] += [named | row for row in rows]
    return experiment, lists


def rate(settings: RateSettings):
    """Where does attention sink? The sink rate by length, and alpha_1 of each head (BB Figure 12; minutes)"""
    experiment, lists = measure_models("rate", "BB Figure 12", settings, sink_rates)
    columns = ("checkpoint", "sequence_length", "sink_rate", "low", "high", "other_sink_rate")
    columns += ("mean_alpha1", "uniform_alpha1", "windowed_layers")
    result = experiment.save(**lists, columns=columns)
    title = "Where does attention sink on position 1?"
    draw_heads(experiment.folder / "rate.png", title, lists["heads"], "alpha1")
    return result


def sink_rates(settings: RateSettings, spec, model):
    """A row for each length, and alpha_1 of each head."""
    context = model.config.context_length
    lengths = settings.sequence_length or [T for T in (32, 64, 128, 256, 512) if T <= context] or [context]
    rows, heads = [], []
    for T in progress(lengths, desc="rate", unit=" lengths", leave=False):
        tokens = read_tokens(settings, spec, T)
        row, alpha = attention.sink_statistics(model, tokens, range(2, T // 2 + 1))  # alpha (n, L, H)
        seen = model.seen or dict.fromkeys(range(1, alpha.shape[1] + 1), T)  # a Lens has just counted them
        uniform = [(1 / np.arange(1, count + 1)).mean() for count in seen.values()]  # query i would pay 1 / i
        row |= {"sequence_length": T, "epsilon": attention.EPSILON, "uniform_alpha1": np.mean(uniform)}
        row["windowed_layers"] = np.less([*seen.values()], T).mean()  # share: not all see position 1 there
        rows.append(row | interval(attention.sink_share(alpha), "sink_rate", 0, 1))
        heads.append({"sequence_length": T, "layers": [*seen], "alpha1": alpha.mean(0).tolist()})
    return {"rows": rows, "heads": heads}


def anatomy(settings: Settings):
    """What singles position 1 out? SO's chain by layer, and the neurons behind it (half a minute)"""
    experiment, lists = measure_models("anatomy", "SO", settings, anatomy_rows)
    for row in lists["models"]:
        said = "{checkpoint}: disparity {disparity:.4g}; {normed_random:.4g} behind a norm, on random tokens;"
        print((said + " {massive:.2g} tokens of a sequence have a massive activation").format(**row))
    for row in lists["layers"]:
        if row["builders"]:
            print("{checkpoint}: {builders} build dimension {dimension} by layer {layer}".format(**row))
    result = experiment.save(**lists, columns=("checkpoint", "layer", *COLUMNS), shown=lists["layers"])
    draw_chain(experiment.folder / "anatomy.png", lists["rows"])
    return result


def anatomy_rows(settings: Settings, spec, model):
    """A row for each layer and position, for each layer, for each builder and remover, and for the model."""
    tokens = read_tokens(settings, spec, settings.sequence_length)
    chain = Chain(len(tokens))
    activity = observe(model, tokens, chain)
    units = activity.builders(activity.peak, 10) + activity.removers(5)[::-1]  # strongest remover last
    rows, layers = chain.rows(activity)
    random = random_tokens(settings.input_seed, range(len(tokens)), tokens.shape[1], model.config.vocab_size)
    about = {"disparity": activity.disparity.max().item(), "massive": max(row["massive"] for row in layers)}
    about["normed_random"] = normed_disparity(model, random.to(tokens.device))
    return {"rows": rows, "layers": layers, "builders": activity.describe(units), "models": [about]}


@dataclass
class Case:
    """A model that reads the text, and what is changed in it."""

    kind: str
    model: Transformer
    front: int | None = None  # a token in front of the text
    at_zero: list = field(default_factory=list)  # ablated neurons, (layer, unit) each


def transplant_cases(model, moved, activity, others, bos):
    """The model as it is (BOS first if it was trained so), with constants, and with a token in front.

    Anything in front gives the text's first token something to attend to, so losses with constants are best
    compared with those with a token in front, an arbitrary one.
    """
    units = activity.selective()
    tokens = others.unique().tolist()
    return [
        Case("unchanged", model, bos),
        Case("builders at zero", model, bos, units),
        Case("moved", moved),
        Case("moved, builders at zero", moved, None, units),
        Case("token in front", model, tokens[len(tokens) // 2]),
    ]


def transplant(settings: TransplantSettings, cases_of=transplant_cases):
    """Does the sink move onto a constant? Each head gets position 1's mean key and value (ours; minutes)"""
    if settings.save and (len(settings.model) > 1 or Path(settings.save).exists()):
        raise UserError(f"--save {settings.save}: expected a new file, and one model")
    experiment, lists = measure_models("transplant", "ours, after SO", settings, transplants, cases_of)
    columns = ("checkpoint", "kind", "sequence_length", "sink_rate", "other_sink_rate", "alpha1")
    columns += ("constant_alpha", "builder_activation", "disparity", "largest", "loss", "loss_from_ninth")
    result = experiment.save(**lists, columns=columns)
    draw_transplants(experiment.folder / "transplant.png", lists["rows"], lists["layers"])
    title = "Does attention move from position 1 to a constant in front of it?"
    draw_heads(experiment.folder / "transplant_heads.png", title, lists["heads"], "alpha", 3)
    return result


def transplants(settings: TransplantSettings, spec, model, cases_of=transplant_cases):
    """Rows for each length and case, also by layer, and attention by head to position 1 and the constant."""
    check_lengths(settings.sequence_length, spec.config.context_length - 1)  # 1 less, for a token in front
    bos = bos_of(settings, spec)
    lists = defaultdict(list)
    for T in settings.sequence_length:
        tokens, constant_windows = split_windows(settings, spec, T)
        constants = attention.constants_at(model, constant_windows)
        if settings.save and T == settings.sequence_length[0]:
            facts = {"model": spec.label, "position": 1, "bos": bos, "text": text_of(settings, spec)}
            attention.save_constants(Path(settings.save), constants, **facts)
        moved = attention.with_constants(model, constants)
        activity = observe(model, tokens)
        builder = activity.builders(activity.peak, 1)[0]
        text = tokens if bos is None else tokens[:, 1:]
        cases = cases_of(model, moved, activity, constant_windows, bos)
        for case in progress(cases, desc="transplant", unit=" cases", leave=False):
            key = {"kind": case.kind, "sequence_length": T}
            row, largest, by_head = effects(case, text, builder)
            lists["rows"].append(key | row)
            lists["layers"] += [key | {"layer": layer, "largest": size} for layer, size in largest.items()]
            for kind, alpha in zip(MAPS.get(case.kind, ()), by_head.unbind(-1)):  # alpha (L, H)
                lists["heads"].append({"kind": kind, "sequence_length": T, "alpha": alpha.tolist()})
    return lists


def split_windows(settings: TransplantSettings, spec, T):
    """Disjoint windows of the text: (n, T) to measure, and (c, T) for the constants."""
    n = min(settings.num_sequences, max(4, 64 * settings.num_sequences // T))
    c = settings.num_constants
    return read_tokens(replace(settings, num_sequences=n + c), spec, T).split((n, c))


def effects(case: Case, text: torch.Tensor, builder):
    """A row about a case's sink on a text (n, T); the stream's largest |number| by layer; alpha by head.

    Position 1 is that of the token in front, if there is one; losses are of the text alone.
    """
    before = 0 if case.front is None else 1
    tokens = F.pad(text, (before, 0), value=case.front)
    means = attention.Means(len(tokens))
    largest = defaultdict(float)  # by layer

    def on_state(layer, x):
        if layer > 0:  # 0 is the input
            largest[layer] = max(largest[layer], x.abs().amax().item())
            means.add("disparity", layer, attention.disparity(x[:, 0]))

    other_positions = range(2, tokens.shape[1] // 2 + 1)
    with case.model.hidden_units(zero_units(case.at_zero)), watch(case.model, builder) as activations:
        alphas, losses = alpha_and_loss(case.model, tokens, on_state, before, other_positions)
    by_head = alphas[..., :2].mean(0)  # alpha_1 and alpha_0, (L, H, 2)
    row = {
        "sink_rate": attention.sink_share(alphas[..., 0]).mean().item(),
        "other_sink_rate": attention.sink_share(alphas[..., 3:].amax(-1)).mean().item(),
        "alpha1": by_head[..., 0].mean().item(),
        "constant_alpha": by_head[..., 1].mean().item(),
        "learned_sink_alpha": alphas[..., 2].mean().item(),
        "builder_activation": torch.cat(activations)[:, 0].mean().item(),
        "disparity": means.stack("disparity").max().item(),
        "largest": max(largest.values()),
    }
    return row | losses, largest, by_head


@torch.inference_mode()
def alpha_and_loss(model, tokens: torch.Tensor, on_state=None, before=0, others=()):
    """alpha_1, alpha_0, alpha_-1 and K others, (n, L, H, 3 + K), of tokens (n, T); mean losses in nats.

    The first `before` tokens precede the text, whose second token is always the first that is predicted.
    """
    alphas = []
    totals = np.zeros(2)  # of early predictions, and of the others
    for part in attention.batches(tokens):
        alpha, states = attention.attention_to(model, part, (1, 0, -1, *others), on_state=on_state)
        alphas.append(alpha.cpu())
        states, targets = states[:, before:-1], part[:, before + 1 :]
        for place, some in enumerate((slice(EARLY), slice(EARLY, None))):
            chosen = states[:, some].flatten(0, 1)
            totals[place] += model.summed_loss(chosen, targets[:, some].flatten()).item()
    n, count = len(tokens), targets.shape[1]  # count: predictions of a sequence
    later = totals[1] / (n * (count - EARLY)) if count > EARLY else None
    return torch.cat(alphas), {"loss": totals.sum() / (n * count), "loss_from_ninth": later}


COMMANDS = {
    "rate": Command(rate, RateSettings()),
    "anatomy": Command(anatomy, Settings()),
    "transplant": Command(transplant, TransplantSettings()),
}
COMMANDS[""] = COMMANDS["rate"]

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
