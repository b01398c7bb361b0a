"""Where does a model's attention sink, why, and what moves or ends it? (BB 6.2; SO)

    python sinks.py                              # `rate`: of smollm2, a real language model
    python sinks.py anatomy --model smollm2      # SO's chain by layer, and the hidden units that build it
    python sinks.py intervene --model smollm2    # can position 10 be made a sink?
    python sinks.py silence --model smollm2 M.gguf                # which hidden units build it? two models
    python sinks.py first --model runs/backcopy --text data/backcopy-bytes      # a position, or a token?

alpha_k, of a head, is how much the queries i >= k attend to position k, on average; positions count from 1. A
head whose alpha_1 in a sequence is above --epsilon is a sink head there; the sink rate is the share of heads
that are, in the mean of sequences. Hidden units of MLPs are named LAYER/UNIT, from 1 and from 0. The units
that make most of one dimension at position 1 are its *builders* (SO: *super neurons*), those that take most
of it away its *removers*. What summaries of SO leave undefined is called ours.

Each subcommand gives `measure_models` a function of settings, a Spec and its model, which returns lists of
rows by name; `rows` are printed, and all lists are in the JSON. A model with a tokenizer reads the standard
library's docstrings, one without random tokens: `read_tokens` draws --num-sequences windows of the text, or
takes a data set's held-out ones; --first-token begins each (flags of TextSettings). `interval` is Student's,
over sequences. On a first reading leave out `first` and `intervene`.
"""

import contextlib
import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from os.path import lexists
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta

from init import keyed_generator
from lib import figures
from lib.checkpoint import check_lengths, chosen_models, save, shortest_context
from lib.files import sha256
from lib.inputs import TextSettings, read_tokens, text_of
from lib.results import Experiment, interval
from lib.runtime import progress
from lib.settings import Command, UserError, at_least, run_script
from lib.tokenizers import load_tokenizer
from measure import attention
from measure.units import ablate, alpha_and_loss, hidden_units, observe, replace_units, rounded_inputs

FIRST_TOKENS = 24  # that `first` tries
CHAINED = ("unchanged", "transplanted")  # cases of `transplant` whose chain is measured, too
ROUNDED = (*CHAINED, "builders at zero", "transplanted, builders at zero", "token in front")  # and in 8 bits
ACTIVE = 0.1  # from this share of its mean activation at position 1 on, a builder counts as active (ours)
LISTED = 10  # builders that `anatomy` lists, and half as many removers


@dataclass
class Settings(TextSettings):
    """What `first` and `anatomy` are asked, and with more the other subcommands."""

    model: tuple[str, ...] = ("smollm2",)  # names of the Hub, folders, files, presets, PRESET@SEED
    seed: tuple[int, ...] = (42,)  # seeds of the presets' weights
    sequence_length: at_least(2) = 64  # tokens in a sequence (Gu et al.: 64)
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"  # number format of the blocks


@dataclass
class RateSettings(Settings):
    """What `rate` is asked."""

    sequence_length: tuple[at_least(2), ...] | None = None  # tokens in a sequence; None: 32 to 512, what fits
    epsilon: Annotated[float, Meta(ge=0, le=1)] = attention.EPSILON  # alpha_1 of a sink head is above this


@dataclass
class InterveneSettings(Settings):
    """What `intervene` is asked."""

    position: at_least(1) = 10  # k, the position to be made a sink, from 1 (SO: 10)
    factor: tuple[at_least(0, float), ...] = (32.0,)  # lambda, which multiplies the variation, or the values


@dataclass
class SilenceSettings(Settings):
    """What `silence` is asked."""

    num_builders: at_least(1) | None = None  # to set to zero; None: 99 % of the dimension, 64 at most
    hidden_units: tuple[str, ...] | None = None  # LAYER/UNIT, to set to zero in place of builders


@dataclass
class TransplantSettings(Settings):
    """What `transplant` is asked."""

    sequence_length: tuple[at_least(2), ...] = (64,)  # tokens in a sequence
    num_sequences: at_least(2) = (
        32  # of up to 64 tokens; of longer ones fewer, as many tokens, but 4 at least
    )
    constants_text: str | None = None  # its sequences' first tokens give the constants; None: docstrings
    num_constants: at_least(1) = 16  # such sequences; of the text that is measured, others than are measured
    controls: bool = True  # also constants in some layers, wrong ones, and two tokens more in front
    save: str | None = None  # new folder for the model with its constants


def measure_models(name, paper, settings: Settings, measure):
    """An experiment, and the lists of rows by name that `measure(settings, spec, model)` returns."""
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
        del model  # before the next one comes
        if spec.folder is not None and spec.folder.is_file():
            source = {"checkpoint": spec.label, "file": spec.folder.name, "sha256": sha256(spec.folder)}
            lists["sources"].append(source)
    lists["rows"] = [row | {"text": texts[0]} for row in lists["rows"]]
    return experiment, lists


def names_of(units):
    """(layer, unit) each, as LAYER/UNIT."""
    return " ".join(f"{layer}/{unit}" for layer, unit in units)


@torch.inference_mode()
def rate(settings: RateSettings):
    """Where does attention sink? Sink heads by length, alpha_1 of each head (BB Figure 12; three minutes)"""
    experiment, lists = measure_models("rate", "BB Figure 12", settings, sink_rates)
    figures.draw_alpha1(experiment.folder / "rate.png", lists["heads"])
    columns = ("checkpoint", "sequence_length", "sink_rate", "low", "high", "mean_alpha1", "max_alpha1")
    return experiment.save(**lists, columns=(*columns, "uniform_alpha1", "norm_ratio", "value_ratio"))


def sink_rates(settings: RateSettings, spec, model):
    """A row for each length, with the rate's 95 % interval; and alpha_1 of all heads."""
    context = model.config.context_length
    lengths = settings.sequence_length or [T for T in (32, 64, 128, 256, 512) if T <= context] or [context]
    rows, heads = [], []
    for T in progress(lengths, desc="rate", unit=" lengths", leave=False):
        tokens = read_tokens(settings, spec, T)
        row, alpha = attention.sink_statistics(model, tokens, settings.epsilon)  # alpha (n, L, H)
        row |= {"sequence_length": T, "epsilon": settings.epsilon}
        row |= interval(attention.sink_share(alpha, settings.epsilon), "sink_rate", 0, 1)
        rows.append(row | {"uniform_alpha1": attention.uniform_alpha(T)})
        heads.append({"sequence_length": T, "alpha1": alpha.mean(0).tolist()})
    return {"rows": rows, "heads": heads}


@torch.inference_mode()
def first(settings: Settings):
    """Do heads sink on position 1, or on a token that stands there? alpha_1 of each (ours; four minutes)"""
    if settings.first_token is not None:
        raise UserError("first tries many first tokens: leave out --first-token")
    experiment, lists = measure_models("first", "ours", settings, by_first_token)
    question = "Do heads sink on position 1, whatever token stands there? (one point per head)"
    labels = {"xlabel": "attention to position 1, mean of tokens", "ylabel": "least of the tokens"}
    keys = {"x": "alpha1", "y": "least", "series": "checkpoint"}
    figures.curves(lists["rows"], experiment.folder / "first.png", question, **keys, style="o", **labels)
    return experiment.save(**lists)


def by_first_token(settings: Settings, spec, model):
    """A row for each head: its alpha_1 where each of some tokens of the text takes position 1 in turn."""
    tokens = read_tokens(settings, spec, settings.sequence_length)
    there = tokens[:, 1:].unique().cpu()
    places = np.linspace(0, len(there) - 1, min(FIRST_TOKENS, len(there)))
    candidates = there[places.astype(int)]
    alphas = []
    for candidate in progress(candidates, desc="first", unit=" tokens", leave=False):
        tokens[:, 0] = candidate
        alphas.append(attention.sink_statistics(model, tokens)[1].mean(0))
    alphas = torch.stack(alphas)  # (tokens, L, H)
    rows = []
    for layer, by_head in enumerate(alphas.unbind(1), start=1):
        for head, alpha in enumerate(by_head.unbind(1), start=1):
            row = {
                "layer": layer,
                "head": head,
                "alpha1": alpha.mean().item(),
                "least": alpha.min().item(),
                "least_token": int(candidates[alpha.argmin()]),
                "largest": alpha.max().item(),
                "token_share": (alpha > attention.EPSILON).float().mean().item(),
                "uniform_alpha1": attention.uniform_alpha(settings.sequence_length),
            }
            rows.append(row)
    return {"rows": rows}


def anatomy(settings: Settings):
    """Which links of SO's chain single out position 1? By layer, and builders (SO; a minute)"""
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
    """SO's chain: a row for each layer and position, a summary of each layer, builders and removers."""
    tokens = read_tokens(settings, spec, settings.sequence_length)
    chain = attention.Chain(model, len(tokens))
    activity = observe(model, tokens, chain)
    links = chain.links()  # (L, T) each
    rows, layers = [], summaries(model, chain, activity)
    for layer in range(1, len(layers) + 1):
        for position in range(1, settings.sequence_length + 1):
            values = {name: link[layer - 1, position - 1].item() for name, link in links.items()}
            rows.append({"layer": layer, "position": position} | values)
    units = activity.builders(activity.layer, LISTED)
    units += reversed(activity.removers(LISTED // 2))
    return {"rows": rows, "layers": layers, "builders": activity.describe(units)}


def summaries(model, chain, activity):
    """A row for each layer, by what a Chain and an Activity have observed."""
    links = chain.links()
    blocks = enumerate(model.model.layers, start=1)
    return [summarise(layer, block, chain, activity, links) for layer, block in blocks]


def summarise(layer, block, chain, activity, links):
    """A layer's links at position 1; `norm_ratio` and `value_ratio` as in `attention.sink_statistics`.

    `std_ratio` is the std of aggregated values at position 1 over the median of the other positions.
    """
    at_1 = {name: link[layer - 1, 0].item() for name, link in links.items()}
    row = {
        "layer": layer,
        "std_ratio": at_1["std"] / links["std"][layer - 1, 1:].median().item(),
        "disparity": at_1["disparity"],
        "norm_ratio": chain.norm_ratio.means[layer].item(),
        "value_ratio": chain.value_ratio.means[layer].item(),
        "key_alignment": at_1["key_alignment"],
        "effective_rank": attention.effective_rank(chain.state.means[layer], chain.product.means[layer]),
        "output_tau": attention.output_tau(block.self_attn.o_proj.weight, chain.heads.std(layer, axes=1)),
        "alpha1": at_1["alpha"],
        "dimension": None,
        "builders": None,
    }
    if layer in activity.jumps():
        row["dimension"] = activity.dimension(layer)
        row["builders"] = names_of(activity.builders(layer, 4))
    return row


@torch.inference_mode()
def intervene(settings: InterveneSettings):
    """Can a position be made a sink? SO's interventions, beside the first builder (SO; two minutes)"""
    k = settings.position
    if k > settings.sequence_length:
        raise UserError(f"--position {k}: the sequence has {settings.sequence_length}")
    experiment, lists = measure_models("intervene", "SO", settings, every_intervention)
    figures.draw_interventions(experiment.folder / "intervene.png", lists["points"], k, max(settings.factor))
    columns = ("checkpoint", "changed", "intervention", "factor", "alpha_k", "low", "high", "woke")
    return experiment.save(**lists, columns=(*columns, "alpha_k_woke", "alpha_k_asleep"))


def every_intervention(settings: InterveneSettings, spec, model):
    """alpha_k after each intervention, in the layers that can tell; and a point for each sequence.

    Each is made in all layers (`changed`: "all"), then in layer 1, of all sequences, for `amplify`'s mean.
    """
    if spec.config.num_layers == 1:
        raise UserError(f"{spec.label} has one layer: no other one can tell what was changed in it")
    tokens = read_tokens(settings, spec, settings.sequence_length)
    activity = observe(model, tokens)
    builders = activity.describe(activity.builders(activity.layer, 1))
    kinds = [("none", None), ("self_mask", None), *itertools.product(("amplify", "scale"), settings.factor)]
    cases = list(itertools.product(("all", 1), kinds))
    rows, points = [], []
    for changed, (kind, factor) in progress(cases, desc="intervene", unit=" cases", leave=False):
        on_heads = attention.replace_heads(model, settings.position, changed, kind, factor)
        alpha, activation = attended(model, tokens, settings.position, builders[0], on_heads)
        case = {"position": settings.position, "changed": changed, "intervention": kind, "factor": factor}
        rows.append(case | alpha_row(alpha, activation >= ACTIVE * builders[0]["first"]))
        for size, value in zip(activation.tolist(), alpha.tolist()):
            points.append(case | {"activation": size, "alpha_k": value})
    return {"rows": rows, "points": points, "builders": builders}


def attended(model, tokens, k, builder, on_heads):
    """alpha_k of each sequence, (n,), and the builder's |activation| at position k, (n,).

    alpha_k is the mean over heads, and over the layers after the builder's (after layer 1, if none are).
    """
    activations = {}

    def on_units(layer, units):
        activations[layer] = units[:, k - 1].float().abs().cpu()  # (n, d_ff)

    with hidden_units(model, on_units):
        alpha = attention.attention_to(model, tokens, (k,), on_heads)[..., 0].mean(2).cpu()  # (n, L)
    L = model.config.num_layers
    seen_from = builder["layer"] if builder["layer"] < L else 1
    return alpha[:, seen_from:].double().mean(1), activations[builder["layer"]][:, builder["unit"]]


def alpha_row(alpha, is_active):
    """alpha_k (n,) in all sequences, and in those where the first builder is active or inactive, (n,)."""
    row = interval(alpha, "alpha_k") | {"woke": is_active.float().mean().item()}
    for name, some in (("alpha_k_woke", alpha[is_active]), ("alpha_k_asleep", alpha[~is_active])):
        row[name] = some.mean().item() if len(some) else None
    return row


@torch.inference_mode()
def silence(settings: SilenceSettings):
    """Which hidden units build the sink? 1, 2, 4, ... of them are set to zero (ours; three minutes)"""
    if settings.hidden_units and settings.num_builders:
        raise UserError("--num-builders takes builders, --hidden-units others: leave one of them out")
    experiment, lists = measure_models("silence", "ours", settings, every_silence)
    figures.draw_silence(experiment.folder / "silence.png", lists["rows"])
    columns = ("checkpoint", "kind", "num_silenced", "left", "disparity", "sink_rate", "low", "high")
    return experiment.save(**lists, columns=(*columns, "mean_alpha1", "loss", "units"))


def named_units(settings: SilenceSettings, spec):
    """Layer and unit of each LAYER/UNIT; UserError for one that the model does not have."""
    units = []
    for word in settings.hidden_units or ():
        match = re.fullmatch(r"([1-9]\d{0,5})/(\d{1,9})", word)
        if not (match and int(match[1]) <= spec.config.num_layers and int(match[2]) < spec.config.d_ff):
            raise UserError(f"--hidden-units {word}: expected LAYER/UNIT of {spec.label}, as in 12/1229")
        units.append((int(match[1]), int(match[2])))
    return list(dict.fromkeys(units))  # each once


def every_silence(settings: SilenceSettings, spec, model):
    """Sink rate, alpha_1 and loss (nats/token) with sets of hidden units at zero, or held constant.

    `left`: the share left of the sink's dimension at position 1 after `activity.layer`; `disparity`: there.
    """
    tokens = read_tokens(settings, spec, settings.sequence_length)
    activity = observe(model, tokens)
    count = settings.num_builders or min(64, activity.num_needed(activity.layer, share=0.99))
    units = named_units(settings, spec) or activity.builders(activity.layer, count)
    sets = sets_of_units(settings, activity, units)
    cases = []
    for kind, units in sets:
        on_units = replace_units(units, activity.at_1 if kind == "constant" else None)
        cases.append((on_units, min(layer for layer, _ in units)))
    results = ablate(model, tokens, activity.layer, cases)
    sets = progress([("none", []), *sets], desc="silence", unit=" sets", leave=False)
    return {"rows": [silence_row(*named, activity, *result) for named, result in zip(sets, results)]}


def sets_of_units(settings: SilenceSettings, activity, units):
    """The kinds and sets of units that `silence` changes, one after another.

    `first`: builders from the first on, 1, 2, 4, ...; `alone`: the second to fourth; `constant`: all, held at
    position 1 at their mean over sequences. Controls, as many: `removers`, which take most of the dimension
    away; those that write most `elsewhere`; `random` ones of the same layers.
    """
    count = len(units)
    sizes = [2**power for power in range(count.bit_length()) if 2**power < count] + [count]
    sets = [("first", units[:size]) for size in sizes]
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
    return [(kind, some) for kind, some in sets if some]


def silence_row(kind, units, activity, alpha, loss, state):
    """A row of `silence`, of alpha_1 (n, L, H) and the stream at position 1, (n, d)."""
    row = {"kind": kind, "num_silenced": len(units), "units": names_of(units)}
    row |= {"left": activity.left(state), "disparity": attention.disparity(state).mean().item()}
    row |= interval(attention.sink_share(alpha), "sink_rate", 0, 1)
    return row | {"mean_alpha1": alpha.mean().item(), "loss": loss}


def transplant(settings: TransplantSettings):
    """Does a constant end the sink? Heads get position 1's mean key and value (ours; two minutes)"""
    if settings.save and (len(settings.model) > 1 or lexists(settings.save)):
        raise UserError(f"--save {settings.save}: expected a new folder, and one model")
    experiment, lists = measure_models("transplant", "ours, after SO", settings, transplants)
    figures.draw_transplants(experiment.folder / "transplant.png", lists["rows"], lists["layers"])
    columns = ("checkpoint", "kind", "sequence_length", "sink_rate", "alpha1", "constant_alpha")
    columns += ("builder_activation", "disparity", "largest", "loss", "loss_from_ninth", "loss_8bit_tensor")
    return experiment.save(**lists, columns=columns)


@torch.inference_mode()
def transplants(settings: TransplantSettings, spec, model):
    """A row for each length and case, and the lists that figure and docs read."""
    if spec.config.explicit_sink:
        raise UserError(f"{spec.label} has an explicit sink already")
    lists = defaultdict(list)
    for T in settings.sequence_length:
        count = settings.num_sequences
        if T > 64:
            count = max(4, 64 * count // T)
        tokens, others = measured_and_others(replace(settings, num_sequences=count), spec, T)
        activity = observe(model, tokens)
        builder = activity.builders(activity.layer, 1)[0]
        cases = transplant_cases(settings, model, activity, others)
        for kind, changed, units, in_front in progress(cases, desc="transplant", unit=" cases", leave=False):
            reading = torch.cat((in_front.expand(len(tokens), -1), tokens), dim=1)
            before = in_front.shape[1]
            key = {"kind": kind, "sequence_length": T}
            with hidden_units(changed, replace_units(units)):
                row, largest = effects(changed, reading, builder, before)
                if kind in ROUNDED:
                    row |= rounded_losses(changed, reading, before)
                if kind in CHAINED:
                    chain = attention.Chain(changed, len(tokens))
                    activity = observe(changed, tokens, chain)
                    lists["chain"] += [key | link for link in summaries(changed, chain, activity)]
                    lists["first_tokens"] += [key | token for token in by_token(changed, tokens, builder)]
            lists["rows"].append(key | row)
            lists["layers"] += [key | {"layer": layer, "largest": size} for layer, size in largest.items()]
            if kind == "transplanted" and settings.save and T == settings.sequence_length[0]:
                tokenizer = load_tokenizer(str(spec.tokenizer_file)) if spec.tokenizer_file else None
                save(Path(settings.save), changed, tokenizer=tokenizer)
    return lists


def measured_and_others(settings: TransplantSettings, spec, T):
    """Sequences to measure, (n, T), and others, (c, T), whose first tokens give the constants."""
    count = settings.num_constants
    text = settings.constants_text or (spec.tokenizer_file and "docstrings")
    if text == text_of(settings, spec) or text == settings.text:
        both = replace(settings, num_sequences=settings.num_sequences + count)
        return read_tokens(both, spec, T).split((settings.num_sequences, count))
    others = replace(settings, text=text, num_sequences=count)
    return read_tokens(settings, spec, T), read_tokens(others, spec, T)


def transplant_cases(settings: TransplantSettings, model, activity, others):
    """The (kind, model, hidden units at zero, tokens in front of the text) that `transplant` measures."""
    keys, values = attention.constants_at(model, others)
    whole = attention.with_constants(model, keys, values)
    units = activity.selective()
    nothing = others[:1, :0]  # (1, 0)
    tokens = others.unique()
    ordinary = tokens[[len(tokens) // 2, len(tokens) // 4, 3 * len(tokens) // 4]]
    cases = [
        ("unchanged", model, [], nothing),
        ("builders at zero", model, units, nothing),
        ("transplanted", whole, [], nothing),
        ("transplanted, builders at zero", whole, units, nothing),
        ("token in front", model, [], ordinary[None, :1]),
    ]
    if not settings.controls:
        return cases
    for token in ordinary[1:]:
        cases.append((f"token in front: {token}", model, [], token.view(1, 1)))
    builders = activity.builders(activity.layer, activity.num_needed(activity.layer, share=0.99))
    if set(builders) != set(units):
        cases.append(("builders of 99 % at zero", model, builders, nothing))
    L = model.config.num_layers
    jump = (activity.jumps() or [activity.layer])[0]
    some_layers = {"layer 1": [1], f"layers 1 to {jump}": range(1, jump + 1)}
    some_layers[f"from layer {jump + 1}"] = range(jump + 1, L + 1)
    for name, layers in some_layers.items():
        partly = attention.with_constants(model, keys, values, layers)
        cases.append((f"transplanted, {name}", partly, [], nothing))
    wrong = {"constants of position 2": attention.constants_at(model, others, position=2)}
    G = model.config.kv_heads
    if G > 1:  # each head has its neighbour's
        wrong["constants of other heads"] = [x.view(L, G, -1).roll(1, 1).flatten(1) for x in (keys, values)]
    generator = keyed_generator("transplant", settings.input_seed)
    wrong["drawn constants"] = [drawn_like(x.view(L, G, -1), generator).flatten(1) for x in (keys, values)]
    for kind, constants in wrong.items():
        cases.append((kind, attention.with_constants(model, *constants), [], nothing))
    return cases


def drawn_like(vectors, generator):
    """Random vectors as long as these, (..., Dh)."""
    drawn = torch.from_numpy(generator.standard_normal(vectors.shape, np.float32))
    return drawn / drawn.norm(dim=-1, keepdim=True) * vectors.norm(dim=-1, keepdim=True)


def effects(model, tokens, builder, before):
    """A case's row for tokens (n, T), the first `before` of them in front of the text; `largest` by layer.

    `disparity` is the largest of all layers', at position 1; `largest` the largest |number| of the stream
    after a layer, at any position.
    """
    disparities = attention.LayerMean(len(tokens))
    largest = defaultdict(float)  # by layer

    def on_state(layer, x):
        if layer > 0:  # 0 is the input
            largest[layer] = max(largest[layer], x.abs().amax().item())
            disparities.add(layer, attention.disparity(x[:, 0]))

    with builder_activation(model, builder) as activations:
        alpha, constant_alpha, losses = alpha_and_loss(model, tokens, on_state, before=before)
    row = {
        "sink_rate": attention.sink_share(alpha).mean().item(),
        "alpha1": alpha.mean().item(),
        "constant_alpha": constant_alpha.mean().item(),
        "builder_activation": torch.cat(activations).mean().item(),
        "disparity": disparities.stack().max().item(),
        "largest": max(largest.values()),
    }
    return row | losses, largest


@contextlib.contextmanager
def builder_activation(model, builder):
    """While this lasts, a list takes in the |activation| of a (layer, unit) at position 1, (B,) each time."""
    activations = []

    def on_units(layer, units):
        if layer == builder[0]:
            activations.append(units[:, 0, builder[1]].float().abs().cpu())

    with hidden_units(model, on_units):
        yield activations


def by_token(model, tokens, builder):
    """The first builder's |activation| at position 1, a row for each token of a text that may stand there."""
    found = tokens.unique()
    with builder_activation(model, builder) as activations:
        for part in attention.batches(found[:, None]):  # position 1 sees no later one
            model.hidden(part)
    sizes = torch.cat(activations).tolist()
    return [{"token": token, "builder_activation": size} for token, size in zip(found.tolist(), sizes)]


def rounded_losses(model, tokens, before):
    """The loss with all projections' inputs in 8 bits, by what has a scale of its own."""
    losses = {}
    for scale in ("tensor", "token"):
        with rounded_inputs(model, scale):
            losses[f"loss_8bit_{scale}"] = alpha_and_loss(model, tokens, None, before=before)[2]["loss"]
    return losses


RENAMED = {"--units": "--num-builders", "--unit": "--hidden-units"}
COMMANDS = {
    "rate": Command(rate, RateSettings()),
    "first": Command(first, Settings()),
    "anatomy": Command(anatomy, Settings()),
    "intervene": Command(intervene, InterveneSettings()),
    "transplant": Command(transplant, TransplantSettings()),
    "silence": Command(silence, SilenceSettings(), renamed=RENAMED),
}
COMMANDS[""] = COMMANDS["rate"]

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
