"""Where does a model's attention sink, why, and what makes or ends a sink? (BB 6.2; SO)

    python sinks.py                               # `rate`: how many heads of smollm2 sink?
    python sinks.py first                         # what do tokens wake that come first? (measure/first.py)
    python sinks.py anatomy                       # what singles position 1 out, layer by layer?
    python sinks.py intervene                     # can position 10 be made a sink?
    python sinks.py silence --model smollm2 M.gguf         # which hidden units build the sinks of two models?
    python sinks.py transplant                    # does a constant key and value end the sink?

Positions count from 1. A head's alpha_k is its weight on position k, averaged over the queries i >= k. A head
is a sink head of a sequence if its alpha_1 is above 0.3. The sink rate is the share of sink heads, averaged
over sequences. A hidden unit is named LAYER/UNIT: layers count from 1, units from 0. *Builders* are the units
that make one dimension large at position 1 (SO: super neurons), and *removers* take it away again.

Each subcommand gives `measure_models` a function that returns one model's lists of rows, by name. The list
`rows` is printed (`anatomy`: `layers`), and the JSON holds all. A model with a tokenizer reads docstrings of
Python's standard library, or --text; another reads random tokens. `low` and `high`, where given, are the ends
of Student's 95 % interval over sequences. Times are of smollm2 on one thread.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lib import figures
from lib.random import keyed_generator
from lib.results import Experiment, interval
from lib.runtime import progress
from lib.settings import Command, UserError, at_least, run_script
from measure import attention
from measure.first import draw_first_tokens, first_token_rows
from measure.rounding import rounded_losses
from measure.units import (
    ablate,
    by_token,
    effects,
    hidden_units,
    layer_rows,
    names_of,
    observe,
    replace_units,
    watch,
)
from sources.checkpoint import check_lengths, chosen_models, save, shortest_context
from sources.inputs import TextSettings, read_tokens, text_of
from sources.tokenizers import load_tokenizer

LISTED = 10  # `anatomy` lists this many builders, and half as many removers
ACTIVE = 0.1  # `intervene`: a builder wakes at this share of its mean at position 1 (ours)
CHAINED = ("unchanged", "transplanted")  # `transplant` measures SO's chain in these cases


@dataclass
class Settings(TextSettings):
    """The settings of `first` and `anatomy`."""

    model: tuple[str, ...] = ("smollm2",)  # names of the Hub, folders, files, presets, PRESET@SEED
    seed: tuple[int, ...] = (42,)  # seeds of the presets' weights
    sequence_length: at_least(2) = 64  # tokens in a sequence (Gu et al.: 64)
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"  # number format of the blocks


@dataclass
class RateSettings(Settings):
    """The settings of `rate`."""

    sequence_length: tuple[at_least(2), ...] | None = None  # tokens in a sequence; None: 32 to 512, what fits


@dataclass
class InterveneSettings(Settings):
    """The settings of `intervene`."""

    position: at_least(1) = 10  # k, the position to be made a sink, from 1 (SO: 10)
    factor: tuple[at_least(0, float), ...] = (32.0,)  # lambda, the factor of `amplify` and of `scale`


@dataclass
class SilenceSettings(Settings):
    """The settings of `silence`."""

    num_builders: at_least(1) | None = None  # builders at zero; None: 99 % of the dimension, 64 at most


@dataclass
class TransplantSettings(Settings):
    """The settings of `transplant`."""

    sequence_length: tuple[at_least(2), ...] = (64,)  # tokens in a sequence
    num_sequences: at_least(2) = 32  # sequences, for T up to 64; for longer ones fewer, down to 4
    num_constants: at_least(1) = 16  # sequences of docstrings whose first tokens give the constants
    controls: bool = True  # also measure other tokens in front, other builders, and other constants
    save: str | None = None  # new folder for the model with its constants


def measure_models(name, paper, settings: Settings, measure):
    """An experiment, and the lists of rows that `measure(settings, spec, model)` returns for its models."""
    specs = chosen_models(settings.model, settings.seed)
    check_lengths(np.ravel(settings.sequence_length or ()), shortest_context(specs))
    texts = [text_of(settings, spec) for spec in specs]
    if len(set(texts)) > 1:
        raise UserError(f"{specs[0].label} and others would read different texts: name --text, --tokenizer")
    experiment = Experiment(name, paper, settings)
    lists = defaultdict(list)
    for spec in progress(specs, desc=name, unit=" models"):
        model = spec.load(experiment.device, experiment.dtype)
        for key, rows in measure(experiment.settings, spec, model).items():
            lists[key] += [{"checkpoint": spec.label} | row for row in rows]
        del model  # the next one needs its memory
    lists["rows"] = [row | {"text": texts[0]} for row in lists["rows"]]
    return experiment, lists


@torch.inference_mode()
def rate(settings: RateSettings):
    """Where does attention sink? Sink heads by length, alpha_1 of each head (BB Figure 12; minutes)"""
    experiment, lists = measure_models("rate", "BB Figure 12", settings, sink_rates)
    figures.draw_alpha1(experiment.folder / "rate.png", lists["heads"])
    columns = ("checkpoint", "sequence_length", "sink_rate", "low", "high", "mean_alpha1", "max_alpha1")
    return experiment.save(**lists, columns=(*columns, "uniform_alpha1", "norm_ratio", "value_ratio"))


def sink_rates(settings: RateSettings, spec, model):
    """A row for each length, and the mean alpha_1 of each head."""
    context = model.config.context_length
    lengths = settings.sequence_length or [T for T in (32, 64, 128, 256, 512) if T <= context] or [context]
    rows, heads = [], []
    for T in progress(lengths, desc="rate", unit=" lengths", leave=False):
        tokens = read_tokens(settings, spec, T)
        row, alpha = attention.sink_statistics(model, tokens)  # alpha (n, L, H)
        row |= {"sequence_length": T, "epsilon": attention.EPSILON}
        row |= interval(attention.sink_share(alpha), "sink_rate", 0, 1)
        rows.append(row | {"uniform_alpha1": attention.uniform_alpha(T)})
        heads.append({"sequence_length": T, "alpha1": alpha.mean(0).tolist()})
    return {"rows": rows, "heads": heads}


@torch.inference_mode()
def first(settings: Settings):
    """Do heads sink on position 1, or on a token that stands there? (ours; 12 minutes)"""
    if settings.first_token is not None:
        raise UserError("first tries many first tokens: leave out --first-token")
    experiment, lists = measure_models("first", "ours", settings, by_first_token)
    draw_first_tokens(experiment.folder / "first.png", lists["rows"])
    return experiment.save(**lists)


def by_first_token(settings: Settings, spec, model):
    """The rows of measure/first.py."""
    return {"rows": first_token_rows(model, read_tokens(settings, spec, settings.sequence_length))}


def anatomy(settings: Settings):
    """Which links of SO's chain single out position 1? By layer, and builders (SO; half a minute)"""
    experiment, lists = measure_models("anatomy", "SO", settings, dissect)
    figures.draw_chain(experiment.folder / "anatomy.png", lists["rows"])
    for row in lists["layers"]:
        if row["builders"]:
            print("{checkpoint}: {builders} build dimension {dimension} by layer {layer}".format(**row))
    columns = ("checkpoint", "layer", "disparity", "norm_ratio", "value_ratio", "key_alignment")
    columns += ("effective_rank", "output_tau", "alpha1")
    return experiment.save(**lists, columns=columns, shown=lists["layers"])


@torch.inference_mode()
def dissect(settings: Settings, spec, model):
    """SO's chain: a row for each layer and position, a row for each layer, builders and removers."""
    tokens = read_tokens(settings, spec, settings.sequence_length)
    chain = attention.Chain(model, len(tokens))
    activity = observe(model, tokens, chain)
    links = chain.links()  # (L, T) each
    rows = []
    for layer, position in np.ndindex(links["std"].shape):
        values = {name: link[layer, position].item() for name, link in links.items()}
        rows.append({"layer": layer + 1, "position": position + 1} | values)
    units = activity.builders(activity.layer, LISTED)
    units += reversed(activity.removers(LISTED // 2))  # the strongest remover is last
    return {"rows": rows, "layers": layer_rows(model, chain, activity), "builders": activity.describe(units)}


@torch.inference_mode()
def intervene(settings: InterveneSettings):
    """Can a position be made a sink? SO's interventions, beside the first builder (SO; three minutes)"""
    k = settings.position
    if k > settings.sequence_length:
        raise UserError(f"--position {k}: the sequence has {settings.sequence_length}")
    experiment, lists = measure_models("intervene", "SO", settings, every_intervention)
    figures.draw_interventions(experiment.folder / "intervene.png", lists["points"], k, max(settings.factor))
    columns = ("checkpoint", "changed", "intervention", "factor", "alpha_k", "low", "high", "woke")
    return experiment.save(**lists, columns=(*columns, "alpha_k_woke", "alpha_k_asleep"))


def every_intervention(settings: InterveneSettings, spec, model):
    """A row for each intervention, in all layers and in layer 1 alone; and a point for each sequence.

    alpha_k is the mean over heads, in the layers above the strongest builder's (above layer 1, if
    that is in the last). `woke` is the share of sequences in which that builder is active at position k.
    `amplify` needs the mean of all sequences, so there are no batches.
    """
    k = settings.position
    tokens = read_tokens(settings, spec, settings.sequence_length)
    activity = observe(model, tokens)
    builder = activity.builders(activity.layer, 1)[0]
    described = activity.describe([builder])
    skipped = builder[0] if builder[0] < model.config.num_layers else 1  # layers the builder cannot change
    kinds = [("none", None), ("self_mask", None), *itertools.product(("amplify", "scale"), settings.factor)]
    cases = list(itertools.product(("all", 1), kinds))
    rows, points = [], []
    for changed, (kind, factor) in progress(cases, desc="intervene", unit=" cases", leave=False):
        on_heads = attention.replace_heads(model, k, changed, kind, factor)
        with watch(model, builder, k) as activations:
            alpha = attention.attention_to(model, tokens, (k,), on_heads).cpu()  # (n, L, H, 1)
        alpha = alpha[..., 0].mean(2)[:, skipped:].double().mean(1)  # (n,)
        active = activations[0] >= ACTIVE * described[0]["first"]  # (n,)
        case = {"position": k, "changed": changed, "intervention": kind, "factor": factor}
        row = case | interval(alpha, "alpha_k") | {"woke": active.float().mean().item()}
        row["alpha_k_woke"] = alpha[active].mean().item() if active.any() else None
        row["alpha_k_asleep"] = None if active.all() else alpha[~active].mean().item()
        rows.append(row)
        for size, value in zip(activations[0].tolist(), alpha.tolist()):
            points.append(case | {"activation": size, "alpha_k": value})
    return {"rows": rows, "points": points, "builders": described}


@torch.inference_mode()
def silence(settings: SilenceSettings):
    """Which hidden units build the sink? 1, 2, 4, ... of them are set to zero (ours; ten minutes)"""
    experiment, lists = measure_models("silence", "ours", settings, every_silence)
    figures.draw_silence(experiment.folder / "silence.png", lists["rows"])
    columns = ("checkpoint", "kind", "num_silenced", "left", "disparity", "sink_rate", "low", "high")
    return experiment.save(**lists, columns=(*columns, "mean_alpha1", "loss", "units"))


def every_silence(settings: SilenceSettings, spec, model):
    """A row for the model as it is, and for each set of hidden units at zero, or held constant.

    `left` is what remains of the sink's dimension at position 1 after `activity.layer`, as a share of the
    unchanged model's. `disparity` is measured there, too.
    """
    tokens = read_tokens(settings, spec, settings.sequence_length)
    activity = observe(model, tokens)
    count = settings.num_builders or min(64, activity.num_needed(activity.layer, share=0.99))
    units = activity.builders(activity.layer, count)
    sets = sets_of_units(settings, activity, units)
    rows = []
    for kind, units in progress(sets, desc="silence", unit=" sets", leave=False):
        means = activity.at_1 if kind == "constant" else None
        alpha, loss, state = ablate(model, tokens, activity.layer, units, means)
        row = {"kind": kind, "num_silenced": len(units), "units": names_of(units)}
        row |= {"left": activity.left(state), "disparity": attention.disparity(state).mean().item()}
        row |= interval(attention.sink_share(alpha), "sink_rate", 0, 1)
        rows.append(row | {"mean_alpha1": alpha.mean().item(), "loss": loss})
    return {"rows": rows}


def sets_of_units(settings: SilenceSettings, activity, units):
    """The kind and the units of each set that `silence` changes.

    `none` is empty. `first` has the first 1, 2, 4, ... builders; `alone` the second, the third or the fourth.
    `constant` holds all at their mean at position 1, only there. Three controls have as many units: the
    `removers`, which change the same dimension; those that write most `elsewhere`; and `random` ones of the
    builders' layers.
    """
    count = len(units)
    sizes = [2**power for power in range(count.bit_length()) if 2**power < count] + [count]
    sets = [("none", [])]
    sets += [("first", units[:size]) for size in sizes]
    sets += [("alone", [unit]) for unit in units[1:4]]
    sets.append(("constant", units))
    sets.append(("removers", activity.removers(count)))
    elsewhere = activity.strongest_elsewhere(2 * count)
    sets.append(("elsewhere", [unit for unit in elsewhere if unit not in units][:count]))
    generator = keyed_generator("silence", settings.input_seed)
    d_ff = activity.at_1.shape[1]
    drawn = []
    for layer, _ in units:
        others = [(layer, unit) for unit in range(d_ff) if (layer, unit) not in units + drawn]
        if others:
            drawn.append(others[generator.integers(len(others))])
    sets.append(("random", drawn))
    return [(kind, some) for kind, some in sets if some or kind == "none"]


def transplant(settings: TransplantSettings):
    """Does a constant end the sink? Heads get position 1's mean key and value (ours; minutes)"""
    if settings.save and (len(settings.model) > 1 or Path(settings.save).exists()):
        raise UserError(f"--save {settings.save}: expected a new folder, and one model")
    experiment, lists = measure_models("transplant", "ours, after SO", settings, transplants)
    figures.draw_transplants(experiment.folder / "transplant.png", lists["rows"], lists["layers"])
    columns = ("checkpoint", "kind", "sequence_length", "sink_rate", "alpha1", "constant_alpha")
    columns += ("builder_activation", "disparity", "largest", "loss", "loss_from_ninth", "loss_8bit_tensor")
    return experiment.save(**lists, columns=columns)


@torch.inference_mode()
def transplants(settings: TransplantSettings, spec, model):
    """A row for each length and case, `layers` for the figure; and for CHAINED `chain` and `first_tokens`."""
    if spec.config.explicit_sink:
        raise UserError(f"{spec.label} has an explicit sink already")
    check_lengths(settings.sequence_length, spec.config.context_length - 1)  # and a token in front
    if spec.config.positions == "learned":
        print(f"{spec.label} has learned positions: its constants stand for a token and for position 1")
    lists = defaultdict(list)
    for T in settings.sequence_length:
        tokens, others = measured_and_others(settings, spec, T)
        activity = observe(model, tokens)
        builder = activity.builders(activity.layer, 1)[0]
        cases = transplant_cases(model, activity, others)
        in_8_bits = [kind for kind, *_ in cases]  # inputs in 8 bits, too: a huge number coarsens all
        if settings.controls:
            cases += control_cases(settings, model, activity, others)
        for kind, changed, units, prefix in progress(cases, desc="transplant", unit=" cases", leave=False):
            key = {"kind": kind, "sequence_length": T}
            before = len(prefix)  # tokens in front of the text
            prefix = tokens.new_tensor(prefix).expand(len(tokens), -1)  # (n, 0) or (n, 1)
            reading = torch.cat((prefix, tokens), dim=1)
            with hidden_units(changed, replace_units(units)):
                row, largest = effects(changed, reading, builder, before)
                if kind in in_8_bits:
                    row |= rounded_losses(changed, reading, before)
                if kind in CHAINED:
                    chain = attention.Chain(changed, len(tokens))
                    links = layer_rows(changed, chain, observe(changed, tokens, chain))
                    lists["chain"] += [key | link for link in links]
                    lists["first_tokens"] += [key | token for token in by_token(changed, tokens, builder)]
            lists["rows"].append(key | row)
            lists["layers"] += [key | {"layer": layer, "largest": size} for layer, size in largest.items()]
            if kind == "transplanted" and settings.save and T == settings.sequence_length[0]:
                tokenizer = load_tokenizer(str(spec.tokenizer_file)) if spec.tokenizer_file else None
                save(Path(settings.save), changed, tokenizer=tokenizer)
    return lists


def measured_and_others(settings: TransplantSettings, spec, T):
    """Sequences to measure, (n, T), and others, (c, T), of docstrings or random tokens, for the constants."""
    n = min(settings.num_sequences, max(4, 64 * settings.num_sequences // T))
    c = settings.num_constants
    text = spec.tokenizer_file and "docstrings"
    if text in (settings.text, text_of(settings, spec)):  # one text: take disjoint windows of it
        return read_tokens(replace(settings, num_sequences=n + c), spec, T).split((n, c))
    measured = read_tokens(replace(settings, num_sequences=n), spec, T)
    return measured, read_tokens(replace(settings, num_sequences=c, text=text), spec, T)


def transplant_cases(model, activity, others):
    """Each case's kind, its model, the hidden units at zero, and the tokens in front of the text.

    The builders at zero are `Activity.selective`, chosen on the windows that are measured. Like constants, a
    token in front gives the text's first one something to attend to: losses are best compared with that case.
    """
    transplanted = attention.with_constants(model, *attention.constants_at(model, others))
    units = activity.selective()
    tokens = others.unique().tolist()
    return [
        ("unchanged", model, [], []),
        ("builders at zero", model, units, []),
        ("transplanted", transplanted, [], []),
        ("transplanted, builders at zero", transplanted, units, []),
        ("token in front", model, [], [tokens[len(tokens) // 2]]),
    ]


def control_cases(settings: TransplantSettings, model, activity, others):
    """More cases: other tokens in front, other builders, constants in some layers, and wrong constants.

    If constants of layer 1 suffice, or of the layers up to the dimension's first jump, the chain breaks where
    it begins. If those of position 2, of other heads or drawn ones suffice, any constant would do.
    """
    tokens = others.unique().tolist()
    cases = []
    count = len(tokens)
    for token in (tokens[count // 4], tokens[3 * count // 4]):
        cases.append((f"token in front: {token}", model, [], [token]))
    builders = activity.builders(activity.layer, activity.num_needed(activity.layer, share=0.99))
    if set(builders) != set(activity.selective()):
        cases.append(("builders of 99 % at zero", model, builders, []))
    keys, values = attention.constants_at(model, others)
    L, G, _ = keys.shape
    every = range(1, L + 1)
    jump = (activity.jumps() or [activity.layer])[0]
    generator = keyed_generator("transplant", settings.input_seed)
    constants = [
        ("transplanted, layer 1", keys, values, [1]),
        (f"transplanted, layers 1 to {jump}", keys, values, every[:jump]),
        (f"transplanted, from layer {jump + 1}", keys, values, every[jump:]),
        ("constants of position 2", *attention.constants_at(model, others, position=2), every),
    ]
    if G > 1:
        constants.append(("constants of other heads", keys.roll(1, 1), values.roll(1, 1), every))
    drawn_keys = drawn_like(keys, generator)
    drawn_values = drawn_like(values, generator)
    constants.append(("drawn constants", drawn_keys, drawn_values, every))
    for kind, some_keys, some_values, layers in constants:
        cases.append((kind, attention.with_constants(model, some_keys, some_values, layers), [], []))
    return cases


def drawn_like(vectors, generator):
    """Random vectors, (L, G, Dh), each as long as the one in its place."""
    drawn = torch.from_numpy(generator.standard_normal(vectors.shape, np.float32))
    return drawn / drawn.norm(dim=-1, keepdim=True) * vectors.norm(dim=-1, keepdim=True)


COMMANDS = {
    "rate": Command(rate, RateSettings()),
    "first": Command(first, Settings()),
    "anatomy": Command(anatomy, Settings()),
    "intervene": Command(intervene, InterveneSettings()),
    "transplant": Command(transplant, TransplantSettings()),
    "silence": Command(silence, SilenceSettings()),
}
COMMANDS[""] = COMMANDS["rate"]

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
