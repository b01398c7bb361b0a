"""Where does attention sink, why, and can it be moved or removed? (BB 6.2; SO)

    python sinks.py --model runs/laptop tiny_llama@42 --data data/python-bpe_4096    # `rate`: how many heads?
    python sinks.py variance --model nano_gpt2              # Equation 2, in every layer of any checkpoint
    python sinks.py anatomy --model runs/backcopy --data data/backcopy-bytes --bos      # the chain of SO
    python sinks.py first --model runs/matching --data data/matching-bytes      # a position, or a token?
    python sinks.py intervene --model runs/laptop --data data/python-bpe_4096 --position 10

alpha_k, of a head, is how much the queries i >= k attend to position k, on average; positions count from 1. A
head whose alpha_1 in a sequence is above --epsilon is a sink head there. Text comes from a prepared data set
(--data) or a file (--text); else tokens are random. What summaries of SO leave undefined is called ours.
"""

import lib.interrupt  # noqa: F401 # isort: skip
import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Literal, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F

from init import SCHEMES, newborn
from lib.checkpoint import check_lengths, chosen_models, shortest_context
from lib.figures import between, curves
from lib.inputs import TextSettings, check_text_settings, read_tokens
from lib.results import Experiment
from lib.runs import trained_length
from lib.runtime import progress, warn
from lib.settings import Command, UserError, at_least, run_script
from measure import attention, theory
from measure.census import evenly_spaced
from measure.cosines import interval
from measure.dimensions import EffectiveRank, dominance_ratio, output_tau
from measure.neurons import super_neurons
from model import CHOICES

EPSILON = 0.3  # a head whose alpha is above it is a sink head (Gu et al.)
LEAST_ALPHA = 5e-4  # where the axis of intervene.png begins
LENGTHS = (32, 64, 128, 256, 512)  # of `rate`, by default


@dataclass
class Settings(TextSettings):
    """What every experiment of `sinks.py` can be told."""

    model: tuple[str, ...] = ("tiny_llama",)
    """presets, PRESET@SEED, runs or checkpoint folders"""
    seed: tuple[int, ...] = (42,)
    """seeds of the presets' weights"""
    init: Literal[SCHEMES] = "gpt2"
    """how newborns are drawn"""
    attn_calibration: Literal[CHOICES["attn_calibration"]] = "none"
    """scaling of newborns' aggregated heads (BB 6.2)"""


@dataclass
class RateSettings(Settings):
    """What `rate` can be told."""

    sequence_length: tuple[at_least(2), ...] | None = None
    """tokens in a sequence (default: 32 to 512, as far as the model goes)"""
    epsilon: float = EPSILON
    """a head whose alpha_1 is above this, between 0 and 1, is a sink head (Gu et al.)"""


@dataclass
class LengthSettings(Settings):
    """What `variance` and `anatomy` can be told."""

    sequence_length: at_least(2) = 64
    """tokens in a sequence (Gu et al.: 64)"""


@dataclass
class FirstSettings(LengthSettings):
    """What `first` can be told."""

    num_tokens: at_least(2) = 64
    """first tokens to try, of those that the sequences hold"""


@dataclass
class InterveneSettings(LengthSettings):
    """What `intervene` can be told."""

    position: at_least(1) = 10
    """k, the position to be made a sink, from 1 (SO: 10)"""
    layers: tuple[int, ...] | None = None
    """layers to intervene in, one at a time and all at once, from 1 (default: all but the last)"""
    factor: tuple[at_least(1e-3, float), ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    """lambda, by which the position's variation, or its values, are multiplied"""


# ---- the models --------------------------------------------------------------------------------------------


def attending_models(settings: Settings):
    """The models of the command line; UserError for settings that do not fit them, or each other."""
    specs = chosen_models(settings.model, settings.seed, scheme=settings.init)
    check_text_settings(settings)
    lengths = settings.sequence_length
    if isinstance(lengths, int):
        lengths = (lengths,)
    check_lengths(lengths or (), shortest_context(specs))
    for spec in specs:
        if spec.config.sublayers == "mlp":
            raise UserError(f"{spec.label} has no attention, so no sinks")
        if settings.attn_calibration != "none" and not spec.is_newborn:
            raise UserError(f"--attn-calibration is for newborns: {spec.label} has its own")
    trained = [spec for spec in specs if not spec.is_newborn]
    if trained and not (settings.data or settings.text):
        warn("reading random tokens, as none is trained on: --data or --text names text")
    for spec in trained:
        longest = min(max(lengths or LENGTHS), spec.config.context_length)
        known = trained_length(spec.folder)
        if known is not None and longest > known:
            warn(f"{spec.label} was trained on sequences of {known} tokens: longer ones are new to it")
    return specs


def load_model(settings: Settings, spec):
    """A model on the settings' device, in their dtype; a newborn with their calibration."""
    dtype = settings.torch_dtype
    if not spec.is_newborn:
        return spec.load(settings.device, dtype)
    config = replace(spec.config, attn_calibration=settings.attn_calibration)
    return newborn(config, spec.seed, spec.embedding_seed, settings.init, settings.device, dtype)


def measure_models(name, paper, settings: Settings, measure):
    """Begin an experiment and measure every model: `measure(settings, spec, model)` returns lists by name.

    Returns the experiment, and the lists of dictionaries for all models, the model's name in each.
    """
    specs = attending_models(settings)
    experiment = Experiment(name, paper, settings)
    lists = defaultdict(list)
    for spec in progress(specs, desc=name, unit=" checkpoints"):
        model = load_model(experiment.settings, spec)
        for key, rows in measure(experiment.settings, spec, model).items():
            lists[key] += [{"checkpoint": spec.label} | row for row in rows]
    return experiment, lists


# ---- how much? (BB Figure 12) ------------------------------------------------------------------------------


@torch.inference_mode()
def rate(settings: RateSettings):
    """Which share of heads are sink heads, by length? (BB Figure 12)"""
    if not 0 < settings.epsilon < 1:
        raise UserError(f"--epsilon {settings.epsilon}: expected a number between 0 and 1")
    experiment, lists = measure_models("rate", "BB Figure 12", settings, sink_rates)
    columns = ("checkpoint", "sequence_length", "epsilon", "sink_rate", "mean_alpha1", "max_alpha1")
    columns += ("uniform_alpha1", "first_share", "norm_ratio", "value_ratio")
    return experiment.save(**lists, columns=columns, draw=draw_rate)


def sink_rates(settings: RateSettings, spec, model):
    """A row for each length: `attention.summary`, with 95 % intervals; and alpha_1 of all heads."""
    context = model.config.context_length
    lengths = settings.sequence_length or [T for T in LENGTHS if T <= context] or [context]
    rows, heads = [], []
    for T in lengths:
        signs = attention.sink_signs(model, read_tokens(settings, spec, T))
        alpha = signs["alpha1"]  # (n, L, H)
        row = {"sequence_length": T, "epsilon": settings.epsilon}
        row |= attention.summary(signs, settings.epsilon)
        row |= interval(attention.sink_share(alpha, settings.epsilon), "sink_rate")
        row |= interval(alpha.mean(dim=(1, 2)), "mean_alpha1", "alpha1_low", "alpha1_high")
        row["uniform_alpha1"] = attention.uniform_alpha(T)
        rows.append(row)
        heads.append({"sequence_length": T, "alpha1": alpha.mean(0).tolist()})
    return {"rows": rows, "heads": heads}


def first_words(settings):
    """What stands first in the sequences, as text."""
    if settings["bos"]:
        return "BOS first"
    if settings["first_token"] is not None:
        return f"token {settings['first_token']} first"
    return "any token first"


def draw_rate(result, folder) -> None:
    """rate.png: sink rate and alpha_1 by length."""
    epsilon = result["settings"]["epsilon"]
    texts = []
    for label, rows in by_checkpoint(result["rows"]).items():
        rates = between([100 * row["sink_rate"] for row in rows], ".0f")
        texts.append(f"{rates} % of {label}'s")
    points = []
    for row in result["rows"]:
        point = {"checkpoint": row["checkpoint"], "sequence_length": row["sequence_length"]}
        heads = {
            "panel": "share of heads that sink on position 1",
            "value": row["sink_rate"],
            "uniform": None,
        }
        alpha = {"panel": "alpha_1: attention to position 1, mean of heads", "value": row["mean_alpha1"]}
        points += [point | heads, point | alpha | {"uniform": row["uniform_alpha1"]}]
    curves(
        points,
        folder / "rate.png",
        x="sequence_length",
        y="value",
        series="checkpoint",
        title=f"How many heads sink on position 1 (alpha_1 > {epsilon}; {first_words(result['settings'])})? "
        + ", ".join(texts),
        panel="panel",
        theories={"uniform": "uniform attention"},
        share="x",
        lowest=0,
        highest=EPSILON,
        log="x",
        ticks=sorted({row["sequence_length"] for row in result["rows"]}),
        ylabel="",
    )


# ---- on a position, or on a token? (ours) -----------------------------------------------------------------


@torch.inference_mode()
def first(settings: FirstSettings):
    """Do heads sink on the first position, or on a token that stands there? alpha_1 of each token (ours)"""
    if settings.bos or settings.first_token is not None:
        raise UserError("first tries many first tokens: leave out --bos and --first-token")
    experiment, lists = measure_models("first", "ours", settings, by_first_token)
    columns = ("checkpoint", "layer", "head", "alpha1", "least", "least_token", "largest", "sink_share")
    columns += ("uniform_alpha1",)
    return experiment.save(**lists, columns=columns, draw=draw_first)


def by_first_token(settings: FirstSettings, spec, model):
    """A row for each head: alpha_1 in the mean of first tokens, and of those with the least and the most.

    Each of the tokens takes the first position of all sequences in turn; `points` have alpha_1 of each, and
    `sink_share` is the share of them whose alpha_1 is above 0.3.
    """
    T = settings.sequence_length
    tokens = read_tokens(settings, spec, T).clone()
    candidates = tokens[:, 1:].unique().cpu()
    candidates = candidates[evenly_spaced(len(candidates), settings.num_tokens)]
    alphas = []
    for candidate in candidates:
        tokens[:, 0] = candidate
        parts = [attention.attention_to(model, part)[..., 0].cpu() for part in attention.batches(tokens)]
        alphas.append(torch.cat(parts).mean(0))
    alphas = torch.stack(alphas)  # (tokens, L, H)
    uniform = attention.uniform_alpha(T)
    rows, points = [], []
    for layer, head in itertools.product(range(alphas.shape[1]), range(alphas.shape[2])):
        alpha = alphas[:, layer, head]
        key = {"layer": layer + 1, "head": head + 1, "uniform_alpha1": uniform}
        least = int(alpha.argmin())
        row = {"alpha1": alpha.mean().item(), "least": alpha[least].item(), "largest": alpha.max().item()}
        row |= {"least_token": int(candidates[least]), "sink_share": (alpha > EPSILON).float().mean().item()}
        rows.append(key | row)
        for token, value in zip(candidates.tolist(), alpha.tolist()):
            points.append(key | {"first_token": token, "alpha1": value})
    return {"rows": rows, "points": points}


def draw_first(result, folder) -> None:
    """first.png: alpha_1 by first token, of the four heads of each checkpoint that pay it most."""
    rows = sorted(result["rows"], key=itemgetter("alpha1"), reverse=True)
    drawn, texts = {}, {}  # of each checkpoint: its four heads, and what is found
    for label, heads in by_checkpoint(rows).items():
        drawn[label] = [(row["layer"], row["head"]) for row in heads[:4]]
        top = heads[0]
        text = f"layer {top['layer']}, head {top['head']} sinks on {top['sink_share']:.0%} of tokens, "
        text += f"alpha_1 {top['least']:.2f} to {top['largest']:.2f}"
        if max(row["sink_share"] for row in heads) == 0:
            largest = max(row["largest"] for row in heads)
            text = f"no head sinks on any token of the text, alpha_1 is {largest:.2f} at most"
        texts[label] = f"{label}: {text}"
    points = []
    for point in result["points"]:
        head = (point["layer"], point["head"])
        if head in drawn[point["checkpoint"]]:
            name = f"layer {head[0]}, head {head[1]}"
            points.append(point | {"head": name, "sink": EPSILON, "panel": texts[point["checkpoint"]]})
    curves(
        points,
        folder / "first.png",
        x="first_token",
        y="alpha1",
        series="head",
        title="Do heads sink on position 1, whatever token stands there?",
        panel="panel",
        theories={"uniform_alpha1": "uniform attention", "sink": f"a sink: {EPSILON}"},
        share="",
        style="o",
        lowest=0,
        highest=1,
        xlabel="number of the token that stands first",
        ylabel="alpha_1, mean of sequences",
    )


# ---- why? (Equation 2; SO's chain) -------------------------------------------------------------------------


@torch.inference_mode()
def variance(settings: LengthSettings):
    """How much do aggregated values vary at each position of each layer? (BB Figure 9 on any checkpoint)"""
    experiment, lists = measure_models("sink_variance", "BB Figure 9", settings, value_spread)
    columns = ("checkpoint", "layer", "position", "std", "theory")
    return experiment.save(**lists, columns=columns, draw=draw_variance)


def value_spread(settings: LengthSettings, spec, model):
    """Std of aggregated values, calibrated, just before the output projection: a row a layer and position.

    `theory` is `theory.aggregated_std`'s, for the first layer of a newborn on random tokens.
    """
    T = settings.sequence_length
    spreads = defaultdict(partial(attention.Spread, attention.BY_POSITION))

    def on_heads(layer, heads, q, k, v):
        spreads[layer].update(heads)

    for part in attention.batches(read_tokens(settings, spec, T)):
        model.hidden(part, on_heads=on_heads)
    laws = {}  # by layer
    has_wishes = settings.text or settings.data or settings.bos or settings.first_token is not None
    if spec.is_newborn and not has_wishes:
        laws[1] = theory.aggregated_std(model.config, T, tokens=True).tolist()
    rows = []
    for layer, spread in spreads.items():
        law = laws.get(layer, [None] * T)
        for position, (std, expected) in enumerate(zip(spread.std().tolist(), law), start=1):
            rows.append({"layer": layer, "position": position, "std": std, "theory": expected})
    return {"rows": rows}


def drawn_rows(rows):
    """The rows of four layers of a checkpoint, evenly spaced, with a `series`."""
    depth = max(row["layer"] for row in rows)
    layers = [1 + layer for layer in evenly_spaced(depth, 4)]
    return [row | {"series": f"layer {row['layer']}"} for row in rows if row["layer"] in layers]


def draw_variance(result, folder) -> None:
    """sink_variance.png, one for each checkpoint: standard deviation by position, for four layers."""
    draw_each(
        result,
        result["rows"],
        folder,
        drawn_rows,
        x="position",
        y="std",
        series="series",
        title_of=spread_of_layers,
        theories={"theory": "with the logits' variance"},
        style="-",
        log="xy",
        ylabel="std of aggregated values",
    )


def spread_of_layers(rows):
    """What `variance` found of a checkpoint."""
    last = max(row["position"] for row in rows)
    std = {(row["layer"], row["position"]): row["std"] for row in rows}
    depth = max(row["layer"] for row in rows)
    text = (
        f"{rows[0]['checkpoint']}: position {last:,}'s aggregated values vary {std[1, last] / std[1, 1]:.2f} "
    )
    text += f"times as much as position 1's in layer 1, {std[depth, last] / std[depth, 1]:.2f} times in "
    return text + f"layer {depth}"


def anatomy(settings: LengthSettings):
    """Which links of SO's chain single out the first position? Layer by layer, and super neurons (SO)."""
    experiment, lists = measure_models("anatomy", "SO", settings, dissect)
    columns = ("checkpoint", "layer", "disparity", "others_disparity", "effective_rank", "output_tau")
    columns += ("norm_ratio", "value_ratio", "alpha1")
    return experiment.save(**lists, columns=columns, shown=lists["layers"], draw=draw_anatomy)


@torch.inference_mode()
def dissect(settings: LengthSettings, spec, model):
    """SO's chain: a row for each layer and position, a summary of each layer, and ten super neurons.

    `dominance_ratio` is max|h| / mean|h| of the stream after the layer, SO's dimension disparity, and
    `disparity` is that of position 1; `key_alignment`, ours, is the length of the mean of all sequences'
    keys, each scaled to length 1: 1 where they have collapsed into one. A super neuron's `ratio` is its mean
    |activation| at the first position over that at the others (ours).
    """
    T = settings.sequence_length
    tokens = read_tokens(settings, spec, T)
    n = len(tokens)
    positions = range(1, T + 1)
    spreads = defaultdict(partial(attention.Spread, attention.BY_POSITION))
    inputs_of_output = defaultdict(partial(attention.Spread, attention.BY_DIMENSION))
    ranks = defaultdict(EffectiveRank)
    # means over sequences, by layer
    lengths = defaultdict(float)  # of states, (T,)
    dominance = defaultdict(float)  # (T,)
    value_lengths = defaultdict(float)  # (T,)
    keys = defaultdict(float)  # (G, T, Dh)
    alpha = defaultdict(float)  # (T,)
    activations = defaultdict(float)  # (T, d_ff)

    def on_state(layer, x):
        ranks[layer].update(x)
        dominance[layer] += dominance_ratio(x).sum(0).cpu() / n
        lengths[layer] += x.float().norm(dim=2).sum(0).cpu() / n

    def on_heads(layer, heads, q, k, v):
        spreads[layer].update(heads)
        inputs_of_output[layer].update(heads)
        value_lengths[layer] += v.float().norm(dim=3).mean(1).sum(0).cpu() / n
        keys[layer] += F.normalize(k.float(), dim=3).sum(0) / n
        alpha[layer] += attention.mean_attention(q, k, positions).mean(1).sum(0).cpu() / n

    def on_hidden_units(layer, module, inputs):
        activations[layer] += inputs[0].float().abs().sum(0).cpu() / n

    handles = []
    for layer, block in enumerate(model.model.layers, start=1):
        if block.mlp is not None:
            handles.append(block.mlp.down_proj.register_forward_pre_hook(partial(on_hidden_units, layer)))
    for part in attention.batches(tokens):
        model.hidden(part, on_state=on_state, on_heads=on_heads)
    for handle in handles:
        handle.remove()
    rows, layers, neurons = [], [], []
    for layer, spread in spreads.items():
        table = pd.DataFrame(
            {
                "layer": layer,
                "position": positions,
                "std": spread.std().tolist(),
                "alpha": alpha[layer].tolist(),
                "dominance_ratio": dominance[layer].tolist(),
                "uniform_alpha": [attention.uniform_alpha(T, position) for position in positions],
                "key_alignment": keys[layer].norm(dim=2).mean(0).tolist(),
                "length": lengths[layer].tolist(),
                "value_length": value_lengths[layer].tolist(),
            }
        )
        rows += table.to_dict("records")
        output = model.model.layers[layer - 1].self_attn.o_proj.weight
        first = table.iloc[0]
        others = table.iloc[1:].median()
        layers.append(
            {
                "layer": layer,
                "disparity": first["dominance_ratio"],
                "others_disparity": others["dominance_ratio"],
                "effective_rank": ranks[layer].value(),
                "output_tau": output_tau(output, inputs_of_output[layer].std().flatten()),
                "norm_ratio": first["length"] / others["length"],
                "value_ratio": first["value_length"] / others["value_length"],
                "alpha1": first["alpha"],
            }
        )
    for layer, activation in activations.items():
        neurons += super_neurons(layer, model.model.layers[layer - 1].mlp, activation)
    neurons.sort(key=itemgetter("ratio"), reverse=True)
    return {"rows": rows, "layers": layers, "super_neurons": neurons[:10]}


class Link(NamedTuple):
    """A link of SO's chain, as `anatomy` draws it."""

    name: str  # of the figure
    question: str  # its title
    label: str  # of the y-axis
    highest: float | None = None  # the y-axis reaches at least so far
    log: str = "x"  # logarithmic axes
    compared_with: str = "median of others"  # what position 1 is divided by


LINKS = {
    "std": Link("variance", "How much do a head's values vary at position 1?", "std of aggregated values"),
    "length": Link("norms", "How long is the stream at position 1?", "length of the stream after the layer"),
    "dominance_ratio": Link(
        "disparity",
        "How much does one dimension dominate at position 1?",
        "largest / mean |dimension| of the stream",
        highest=7,
    ),
    "key_alignment": Link(
        "keys",
        "How alike are position 1's keys in all sequences?",
        "alignment of keys (1: all the same)",
        highest=1,
    ),
    "alpha": Link(
        "attention",
        "How much attention does position 1 get?",
        "mean attention that position i gets",
        highest=1,
        log="xy",
        compared_with="uniform",
    ),
}


def draw_anatomy(result, folder) -> None:
    """anatomy_LINK.png for each link of the chain, by position, for four layers; a panel a checkpoint."""
    checkpoints = by_checkpoint(result["rows"])
    for key, link in LINKS.items():
        points = []
        for label, rows in checkpoints.items():
            drawn = drawn_rows(rows)
            ratios = [f"layer {layer} {ratio:.2f}" for layer, ratio in first_to_others(drawn, key).items()]
            panel = f"{label}: position 1 / {link.compared_with}\n{', '.join(ratios)}"
            points += [row | {"panel": panel} for row in drawn]
        curves(
            points,
            folder / f"anatomy_{link.name}.png",
            x="position",
            y=key,
            series="series",
            title=f"{link.question} ({first_words(result['settings'])})",
            panel="panel",
            theories={"uniform_alpha": "uniform attention"} if key == "alpha" else None,
            share="x",
            style="-",
            marked=1,
            log=link.log,
            lowest=None if "y" in link.log else 0,
            highest=link.highest,
            ylabel=link.label,
        )


def first_to_others(rows, key):
    """A link at position 1, over its median at the others, of each layer; attention over what is uniform."""
    table = pd.DataFrame(rows).pivot(index="position", columns="layer", values=key)
    if key == "alpha":
        return table.loc[1] / rows[0]["uniform_alpha"]
    return table.loc[1] / table.drop(1).median()


# ---- moved (SO's interventions) ----------------------------------------------------------------------------


@torch.inference_mode()
def intervene(settings: InterveneSettings):
    """Can a position be made a sink? SO's two interventions and their control; alpha_k by layer (SO)."""
    if settings.position > settings.sequence_length:
        raise UserError(f"--position {settings.position}: the sequence has {settings.sequence_length}")
    experiment, lists = measure_models("intervene", "SO", settings, every_intervention)
    columns = ("checkpoint", "changed", "intervention", "factor", "alpha_k", "low", "high", "shift")
    return experiment.save(**lists, columns=columns, shown=lists["summary"], draw=draw_intervene)


def every_intervention(settings: InterveneSettings, spec, model):
    """alpha_k before and after each intervention: rows by layer, and a summary of the layers that can tell.

    Each is made in all layers at once (`changed` is "all"), then in one at a time. Weights are read before
    o_k is replaced, so that a layer sees what was done in those before it, and the weight that the mask
    forces token k to give itself does not count. All sequences run at once, for mu.
    """
    k = settings.position
    L = model.config.num_layers
    chosen = tuple(settings.layers or range(1, L))
    if L < 2 or min(chosen) < 1 or max(chosen) >= L:
        raise UserError(f"--layers: only a layer after them can tell, so 1 to {L - 1} for {spec.label}")
    tokens = read_tokens(settings, spec, settings.sequence_length)
    kinds = [("self_mask", None)]
    kinds += [(kind, factor) for kind in ("amplify", "scale") for factor in settings.factor]
    places = {str(layer): (layer,) for layer in chosen}
    if len(chosen) > 1:
        places = {"all": chosen} | places
    before = attention.attention_to(model, tokens, (k,))[..., 0].mean(2).cpu()  # (n, L)
    rows, summary = [], []
    for changed, layers in places.items():
        later = {}  # alpha_k of each case, (n,): the mean of the layers that can tell
        for kind, factor in [("none", None), *kinds]:
            alpha = before
            if kind != "none":
                on_heads = partial(replace_values, kind, factor, model, k, layers)
                alpha = attention.attention_to(model, tokens, (k,), on_heads)[..., 0].mean(2).cpu()
            if not alpha.isfinite().all():
                raise UserError(f"{kind} by {factor} leaves no finite number: choose a smaller --factor")
            mean = alpha[:, min(layers) :].double().mean(1)  # layers after the first one changed
            later[kind, factor] = mean
            key = {"position": k, "changed": changed, "intervention": kind, "factor": factor}
            for layer, values in enumerate(alpha.T, start=1):
                rows.append({"layer": layer} | key | interval(values, "alpha_k"))
            row = key | interval(mean, "alpha_k")
            row |= interval(mean - later["none", None], "shift", "shift_low", "shift_high")
            if kind == "scale":  # and how much more its equal in variance does
                more = later["amplify", factor] - mean
                row |= interval(more, "amplify_more", "amplify_more_low", "amplify_more_high")
            summary.append(row)
    return {"rows": rows, "summary": summary}


def replace_values(kind, factor, model, position, layers, layer, heads, q, k, v):
    """An `on_heads` that changes the aggregated values o_k (B, H, 1, Dh) of a position in some `layers`.

    `self_mask`: token k attends to itself alone, so that o_k is its own value; `amplify`: mu + factor
    (o_k - mu), mu the mean of o_k over all sequences, for each head and dimension; `scale`: factor o_k.
    """
    if layer not in layers:
        return None
    place = slice(position - 1, position)
    values = heads[:, :, place]
    if kind == "self_mask":
        own = v[:, :, place].repeat_interleave(heads.shape[1] // v.shape[1], dim=1)
        values = model.model.layers[layer - 1].self_attn.calibrate(own, position)
    elif kind == "amplify":
        mean = values.mean(0, keepdim=True)
        values = mean + factor * (values - mean)
    elif kind == "scale":
        values = factor * values
    replaced = heads.clone()
    replaced[:, :, place] = values
    return replaced


def draw_intervene(result, folder) -> None:
    """intervene.png, one for each checkpoint: alpha_k by factor, in the mean of the later layers."""
    settings = result["settings"]
    k = settings["position"]
    uniform = attention.uniform_alpha(settings["sequence_length"], k)

    def points_of(rows):
        points = []
        for row in rows:
            factors = [row["factor"]]
            if row["factor"] is None:  # a level line: the same at every factor
                factors = settings["factor"]
            panel = "in all layers" if row["changed"] == "all" else f"in layer {row['changed']}"
            name = row["intervention"].replace("none", "unchanged").replace("_", " ")
            point = {"intervention": name, "alpha_k": row["alpha_k"], "error": row["high"] - row["alpha_k"]}
            point |= {"panel": f"changed {panel}", "uniform": uniform, "sink": EPSILON}
            points += [point | {"factor": factor} for factor in factors]
        return points

    def title_of(rows):
        most = max((row for row in rows if row["intervention"] != "none"), key=itemgetter("alpha_k"))
        before = next(row for row in rows if row["changed"] == most["changed"])
        change = most["intervention"].replace("_", " ")
        if most["factor"] is not None:
            change += f" by {most['factor']:g}"
        where = "all layers" if most["changed"] == "all" else f"layer {most['changed']}"
        text = f"{rows[0]['checkpoint']} ({first_words(settings)}): position {k} gets at most "
        text += f"{most['alpha_k']:.2g} of the attention ({change} in {where}), "
        return text + f"unchanged {before['alpha_k']:.2g}; a sink gets {EPSILON}"

    draw_each(
        result,
        result["summary"],
        folder,
        points_of,
        title_of,
        x="factor",
        y="alpha_k",
        series="intervention",
        panel="panel",
        theories={"uniform": "uniform attention", "sink": f"a sink: {EPSILON}"},
        band="error",
        band_label="95 % interval",
        band_limits=(LEAST_ALPHA, 1),
        style="-",
        log="xy",
        ticks=settings["factor"],
        lowest=LEAST_ALPHA,
        highest=0.5,
        xlabel=f"factor on the values that position {k} aggregates",
        ylabel=f"attention that position {k} gets in later layers",
    )


# ---- figures -----------------------------------------------------------------------------------------------


def by_checkpoint(rows):
    """The rows of each checkpoint, by its label."""
    checkpoints = defaultdict(list)
    for row in rows:
        checkpoints[row["checkpoint"]].append(row)
    return checkpoints


def draw_each(result, rows, folder, points_of, title_of, **figure) -> None:
    """Draw points and a title that functions make of each checkpoint's rows.

    Its name is in the PNG's, if there are several.
    """
    checkpoints = by_checkpoint(rows)
    for label, its_rows in checkpoints.items():
        name = result["experiment"]
        if len(checkpoints) > 1:
            name += "_" + re.sub(r"[^\w.-]+", "_", label).strip("_")
        curves(points_of(its_rows), folder / f"{name}.png", title=title_of(its_rows), **figure)


COMMANDS = {
    "rate": Command(rate, RateSettings()),
    "first": Command(first, FirstSettings()),
    "variance": Command(variance, LengthSettings()),
    "anatomy": Command(anatomy, LengthSettings()),
    "intervene": Command(intervene, InterveneSettings()),
}
COMMANDS[""] = COMMANDS["rate"]
FIGURES = {
    "rate": draw_rate,
    "first": draw_first,
    "sink_variance": draw_variance,
    "anatomy": draw_anatomy,
    "intervene": draw_intervene,
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
