"""Where does a model's attention sink, why, and what moves or ends it? (BB 6.2; SO)

    python sinks.py                              # `rate`: of smollm2, a real language model, if it is there
    python sinks.py anatomy --model smollm2      # SO's chain by layer, and the hidden units that begin it
    python sinks.py intervene --model smollm2    # can position 10 be made a sink?
    python sinks.py silence --model smollm2      # which hidden units hold the sink up?
    python sinks.py first --model runs/backcopy --text data/backcopy-bytes      # a position, or a token?
    python sinks.py variance --model nano_gpt2   # Equation 2, in every layer of any model

alpha_k, of a head, is how much the queries i >= k attend to position k, on average; positions count from 1. A
head whose alpha_1 in a sequence is above --epsilon is a sink head there. A model with a tokenizer reads the
standard library's docstrings unless --text names another text, one without reads random tokens. What
summaries of SO leave undefined is called ours. Times are those of smollm2 on 2 cores.
"""

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from init import keyed_generator
from lib.checkpoint import check_lengths, chosen_models, default_model, shortest_context
from lib.figures import BLUE, curves, legend_below, new_figure, save_figure
from lib.inputs import TextSettings, read_tokens
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, UserError, at_least, run_script
from measure import attention
from measure.attention import EPSILON
from measure.cosines import interval

LENGTHS = (32, 64, 128, 256, 512)  # of `rate`, by default
FIRST_TOKENS = 24  # that `first` tries
AWAKE = 0.1  # of a super neuron's mean activation at position 1: from there on it is awake elsewhere (ours)
LINKS = {  # of SO's chain, in its order: a column of `anatomy`'s rows, and its name
    "std": "std of aggregated values",
    "length": "length of the stream",
    "dominance_ratio": "largest / mean |dimension| of it",
    "value_length": "length of values",
    "key_alignment": "alignment of keys (1: all alike)",
    "alpha": "attention to the position",
}


@dataclass
class Settings(TextSettings):
    """What every experiment of `sinks.py` can be told."""

    model: tuple[str, ...] = ()
    """presets, PRESET@SEED, checkpoints or smollm2 (default: smollm2, or a newborn where it is not there)"""
    seed: tuple[int, ...] = (42,)
    """seeds of the presets' weights"""
    sequence_length: at_least(2) = 64
    """tokens in a sequence (Gu et al.: 64)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """number format of the blocks"""


@dataclass
class RateSettings(Settings):
    """What `rate` can be told."""

    sequence_length: tuple[at_least(2), ...] | None = None
    """tokens in a sequence; None: 32 to 512, as far as the model goes"""
    epsilon: float = EPSILON
    """a head whose alpha_1 is above this, between 0 and 1, is a sink head (Gu et al.)"""


@dataclass
class InterveneSettings(Settings):
    """What `intervene` can be told."""

    position: at_least(1) = 10
    """k, the position to be made a sink, from 1 (SO: 10)"""
    factor: tuple[at_least(0, float), ...] = (32.0,)
    """lambda, by which the position's variation, or its values, are multiplied"""


@dataclass
class SilenceSettings(Settings):
    """What `silence` can be told."""

    units: at_least(1) = 3
    """how many of the hidden units that write most at position 1"""
    unit: tuple[str, ...] | None = None
    """hidden units to silence instead, LAYER/UNIT"""


# ---- the models --------------------------------------------------------------------------------------------


def measure_models(name, paper, settings: Settings, measure):
    """An experiment, and the lists of rows by name that `measure(settings, spec, model)` returns."""
    specs = chosen_models(settings.model or (default_model(),), settings.seed)
    lengths = settings.sequence_length or ()
    check_lengths((lengths,) if isinstance(lengths, int) else lengths, shortest_context(specs))
    experiment = Experiment(name, paper, settings)
    lists = defaultdict(list)
    for spec in progress(specs, desc=name, unit=" models"):
        model = spec.load(experiment.device, experiment.dtype)
        for key, rows in measure(experiment.settings, spec, model).items():
            lists[key] += [{"checkpoint": spec.label} | row for row in rows]
    return experiment, lists


def by_checkpoint(rows):
    """The rows of each checkpoint, by its label."""
    checkpoints = defaultdict(list)
    for row in rows:
        checkpoints[row["checkpoint"]].append(row)
    return checkpoints


# ---- where? (BB Figure 12) ---------------------------------------------------------------------------------


@torch.inference_mode()
def rate(settings: RateSettings):
    """Where does attention sink? Sink heads by length, alpha_1 of each head (BB Figure 12; three minutes)"""
    experiment, lists = measure_models("rate", "BB Figure 12", settings, sink_rates)
    T = lists["heads"][0]["sequence_length"]  # the first is drawn
    maps = [row for row in lists["heads"] if row["sequence_length"] == T]
    figure, (grid,) = new_figure("Where does attention sink on position 1?", 1, len(maps))
    for axes, row in zip(grid, maps):
        alpha = np.array(row["alpha1"]).T  # (H, L)
        extent = (0.5, alpha.shape[1] + 0.5, alpha.shape[0] + 0.5, 0.5)
        image = axes.imshow(alpha, cmap="cividis", vmin=0, vmax=1, aspect="auto", extent=extent)
        axes.set(xlabel="layer", ylabel="head", title=f"{row['checkpoint']}, {T} tokens")
        axes.locator_params(integer=True, min_n_ticks=1)
    figure.colorbar(image, ax=axes, label="attention to position 1")
    save_figure(figure, experiment.folder / "rate.png")
    columns = ("checkpoint", "sequence_length", "sink_rate", "low", "high", "mean_alpha1", "max_alpha1")
    return experiment.save(**lists, columns=(*columns, "uniform_alpha1", "norm_ratio", "value_ratio"))


def sink_rates(settings: RateSettings, spec, model):
    """A row for each length: `attention.summary`, the rate's 95 % interval; and alpha_1 of all heads."""
    context = model.config.context_length
    lengths = settings.sequence_length or [T for T in LENGTHS if T <= context] or [context]
    rows, heads = [], []
    for T in lengths:
        signs = attention.sink_signs(model, read_tokens(settings, spec, T))
        alpha = signs["alpha1"]  # (n, L, H)
        row = {"sequence_length": T, "epsilon": settings.epsilon}
        row |= attention.summary(signs, settings.epsilon)
        row |= interval(attention.sink_share(alpha, settings.epsilon), "sink_rate")
        rows.append(row | {"uniform_alpha1": attention.uniform_alpha(T)})
        heads.append({"sequence_length": T, "alpha1": alpha.mean(0).tolist()})
    return {"rows": rows, "heads": heads}


# ---- on a position, or on a token? (ours) ------------------------------------------------------------------


@torch.inference_mode()
def first(settings: Settings):
    """Do heads sink on position 1, or on a token that stands there? alpha_1 of each (ours; four minutes)"""
    if settings.first_token is not None:
        raise UserError("first tries many first tokens: leave out --first-token")
    experiment, lists = measure_models("first", "ours", settings, by_first_token)
    question = "Do heads sink on position 1, whatever token stands there? (a point a head)"
    labels = {"xlabel": "attention to position 1, mean of tokens", "ylabel": "least of the tokens"}
    keys = {"x": "alpha1", "y": "least", "series": "checkpoint"}
    curves(lists["rows"], experiment.folder / "first.png", question, **keys, style="o", **labels)
    return experiment.save(**lists)


def by_first_token(settings: Settings, spec, model):
    """A row for each head: its alpha_1 where each of some tokens of the text takes position 1 in turn.

    `sink_share` is the share of these tokens whose alpha_1 is above 0.3.
    """
    tokens = read_tokens(settings, spec, settings.sequence_length)
    there = tokens[:, 1:].unique().cpu()
    candidates = there[np.linspace(0, len(there) - 1, min(FIRST_TOKENS, len(there))).astype(int)]
    alphas = []
    for candidate in candidates:
        tokens[:, 0] = candidate
        alphas.append(attention.sink_signs(model, tokens)["alpha1"].mean(0))
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
                "sink_share": (alpha > EPSILON).float().mean().item(),
                "uniform_alpha1": attention.uniform_alpha(settings.sequence_length),
            }
            rows.append(row)
    return {"rows": rows}


# ---- why? (Equation 2; SO's chain) -------------------------------------------------------------------------


@torch.inference_mode()
def variance(settings: Settings):
    """How much do aggregated values vary at each position of each layer? (BB Figure 9; half a minute)"""
    experiment, lists = measure_models("sink_variance", "BB Figure 9", settings, value_spread)
    drawn = [row for row in lists["rows"] if row["layer"] in (1, 2, 4, 8, 16, 32)]
    question = "How much do aggregated values vary, position by position? (a colour a layer)"
    keys = {"x": "position", "y": "std", "series": "layer", "panel": "checkpoint"}
    labels = {"ylabel": "std of aggregated values"}
    curves(drawn, experiment.folder / "sink_variance.png", question, **keys, style="-", log="xy", **labels)
    return experiment.save(**lists)


def value_spread(settings: Settings, spec, model):
    """A row for each layer and position."""
    spread = attention.Spread()
    for part in attention.batches(read_tokens(settings, spec, settings.sequence_length)):
        model.hidden(part, on_heads=spread.on_heads)
    rows = []
    for layer in range(1, model.config.num_layers + 1):
        for position, std in enumerate(spread.std(layer).tolist(), start=1):
            rows.append({"layer": layer, "position": position, "std": std})
    return {"rows": rows}


def anatomy(settings: Settings):
    """Which links of SO's chain single out position 1? By layer, and super neurons (SO; a minute)"""
    experiment, lists = measure_models("anatomy", "SO", settings, dissect)
    question = "What singles position 1 out, layer by layer? (dotted: median of the other positions)"
    figure, grid = new_figure(question, 2, 3, height=3, sharex=True)
    for axes, (key, name) in zip(grid.flat, LINKS.items()):
        for label, rows in by_checkpoint(lists["rows"]).items():
            values = np.array([row[key] for row in rows]).reshape(-1, settings.sequence_length)  # (L, T)
            layers = range(1, len(values) + 1)
            (line,) = axes.plot(layers, values[:, 0], "o-", ms=3, label=f"{label}, position 1")
            axes.plot(layers, np.median(values[:, 1:], axis=1), ":", color=line.get_color())
        axes.set_title(name, fontsize=10)
    for axes in grid[0, 1:]:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    grid[1, 1].set_xlabel("layer")
    legend_below(figure, grid[0, 0])
    save_figure(figure, experiment.folder / "anatomy.png")
    columns = ("checkpoint", "layer", "disparity", "others_disparity", "norm_ratio", "value_ratio")
    columns += ("key_alignment", "effective_rank", "output_tau", "alpha1")
    return experiment.save(**lists, columns=columns, shown=lists["layers"])


@torch.inference_mode()
def dissect(settings: Settings, spec, model):
    """SO's chain: a row for each layer and position, a summary of each layer, and ten super neurons.

    `dominance_ratio` is max|h| / mean|h| of the stream after the layer, SO's dimension disparity, and
    `disparity` is that of position 1; `key_alignment`, ours, is the length of the mean of all sequences'
    keys, each scaled to length 1: 1 where they have collapsed into one.
    """
    T = settings.sequence_length
    tokens = read_tokens(settings, spec, T)
    means = defaultdict(float)  # over sequences, by (name, layer)
    spread = attention.Spread()

    def add(name, layer, values):
        means[name, layer] += values.sum(0).cpu() / len(tokens)

    def on_state(layer, x):
        flat = x.flatten(0, 1).double()  # (B T, d)
        add("state", layer, flat / T)
        add("product", layer, (flat.T @ flat / T)[None])
        add("length", layer, x.float().norm(dim=2))
        add("dominance_ratio", layer, attention.dominance_ratio(x))

    def on_heads(layer, heads, q, k, v):
        spread.on_heads(layer, heads, q, k, v)
        add("value_length", layer, v.float().norm(dim=3).mean(1))
        add("key", layer, F.normalize(k.float(), dim=3))  # (G, T, Dh)
        add("alpha", layer, attention.mean_attention(q, k, range(1, T + 1)).mean(1))

    with attention.unit_activity(model, len(tokens)) as activity:
        for part in attention.batches(tokens):
            model.hidden(part, on_state=on_state, on_heads=on_heads)
    rows, layers = [], []
    for layer, block in enumerate(model.model.layers, start=1):
        means["std", layer] = spread.std(layer)
        means["key_alignment", layer] = means["key", layer].norm(dim=2).mean(0)
        links = torch.stack([means[name, layer] for name in LINKS], dim=1)  # (T, links)
        for position, values in enumerate(links.tolist(), start=1):
            rows.append({"layer": layer, "position": position} | dict(zip(LINKS, values)))
        first = dict(zip(LINKS, links[0].tolist()))
        others = dict(zip(LINKS, np.median(links[1:], axis=0)))
        written = block.self_attn.o_proj.weight
        summary = {
            "layer": layer,
            "disparity": first["dominance_ratio"],
            "others_disparity": others["dominance_ratio"],
            "norm_ratio": first["length"] / others["length"],
            "value_ratio": first["value_length"] / others["value_length"],
            "key_alignment": first["key_alignment"],
            "effective_rank": attention.effective_rank(means["state", layer], means["product", layer]),
            "output_tau": attention.output_tau(written, spread.std(layer, 1).flatten()),
            "alpha1": first["alpha"],
        }
        layers.append(summary)
    neurons = attention.super_neurons(model, *activity)
    return {"rows": rows, "layers": layers, "super_neurons": neurons}


# ---- moved (SO's interventions) ----------------------------------------------------------------------------


@torch.inference_mode()
def intervene(settings: InterveneSettings):
    """Can a position be made a sink? SO's interventions, beside the super neuron (SO; two minutes)"""
    k = settings.position
    if k > settings.sequence_length:
        raise UserError(f"--position {k}: the sequence has {settings.sequence_length}")
    experiment, lists = measure_models("intervene", "SO", settings, every_intervention)
    (label, points), *_ = by_checkpoint(lists["points"]).items()  # the first model is drawn
    drawn = [point for point in points if point["factor"] in (None, max(settings.factor))]
    question = f"Where the super neuron wakes at position {k}, does it become a sink? ({label})"
    keys = {"x": "activation", "y": "alpha_k", "series": "intervention", "panel": "changed"}
    labels = {"xlabel": f"|activation| of the super neuron at {k}", "ylabel": f"attention to position {k}"}
    curves(drawn, experiment.folder / "intervene.png", question, **keys, style="o", log="x", **labels)
    columns = ("checkpoint", "changed", "intervention", "factor", "alpha_k", "low", "high", "woke")
    return experiment.save(**lists, columns=(*columns, "alpha_k_woke", "alpha_k_asleep"))


def every_intervention(settings: InterveneSettings, spec, model):
    """alpha_k after each intervention, in the layers that can tell; and a point for each sequence.

    Each is made in all layers at once (`changed` is "all"), then in layer 1. alpha_k is the mean over heads,
    and over the layers after that of the unit that writes most at position 1 (after layer 1, if none are).
    All sequences run at once, for mu.
    """
    k = settings.position
    L = model.config.num_layers
    tokens = read_tokens(settings, spec, settings.sequence_length)
    with attention.unit_activity(model, len(tokens)) as activity:
        model.hidden(tokens)
    (neuron,) = attention.super_neurons(model, *activity, count=1)
    seen_from = neuron["layer"] if neuron["layer"] < L else min(1, L - 1)
    places = {"all": range(1, L + 1), 1: (1,)}
    kinds = [("none", None), ("self_mask", None), *itertools.product(("amplify", "scale"), settings.factor)]
    cases = list(itertools.product(places.items(), kinds))
    rows, points = [], []
    for (place, layers), (kind, factor) in progress(cases, desc="intervene", unit=" cases", leave=False):
        on_heads = attention.replace_values(model, k, layers, kind, factor)
        alpha, activation = attended(model, tokens, k, neuron, on_heads)
        alpha = alpha[:, seen_from:].double().mean(1)  # (n,)
        is_awake = activation >= AWAKE * neuron["first"]
        key = {"position": k, "changed": place, "intervention": kind, "factor": factor}
        row = key | interval(alpha, "alpha_k") | {"woke": is_awake.float().mean().item()}
        for name, some in (("alpha_k_woke", alpha[is_awake]), ("alpha_k_asleep", alpha[~is_awake])):
            row[name] = some.mean().item() if len(some) else None
        rows.append(row)
        for size, value in zip(activation.tolist(), alpha.tolist()):
            points.append(key | {"activation": size, "alpha_k": value})
    return {"rows": rows, "points": points, "super_neurons": [neuron]}


def attended(model, tokens, k, neuron, on_heads):
    """Attention to position k in each layer, (n, L), and the neuron's |activation| there, (n,)."""
    activations = {}

    def on_units(layer, units):
        activations[layer] = units[:, k - 1].float().abs().cpu()  # (n, d_ff)

    with attention.hidden_units(model, on_units):
        alpha = attention.attention_to(model, tokens, (k,), on_heads)[..., 0].mean(2).cpu()
    return alpha, activations[neuron["layer"]][:, neuron["neuron"]]


# ---- ended (ours) ------------------------------------------------------------------------------------------


@torch.inference_mode()
def silence(settings: SilenceSettings):
    """Which hidden units hold the sink up? Those that write most are set to zero (ours; three minutes)"""
    for spec in chosen_models(settings.model or (default_model(),), settings.seed):
        named_units(settings, spec)
        if 2 * settings.units > spec.config.d_ff:
            raise UserError(f"--units {settings.units}: a layer of {spec.label} has {spec.config.d_ff}")
    experiment, lists = measure_models("silence", "ours", settings, every_silence)
    (label, rows), *_ = by_checkpoint(lists["rows"]).items()  # the first model is drawn
    question = f"Which hidden units hold the sink up? ({label}; dashed: none silenced)"
    figure, (grid,) = new_figure(question, 1, 2, 5, 1.2 + 0.24 * len(rows), sharey=True)
    names = [f"{row['kind']} {row['units']}"[:44] for row in rows]
    labels = {"sink_rate": "share of heads that sink on position 1", "loss": "loss, nats a token"}
    for axes, (key, label) in zip(grid, labels.items()):
        axes.barh(range(len(rows)), [row[key] for row in rows], color=BLUE)
        axes.set_yticks(range(len(rows)), names)
        axes.axvline(rows[0][key], color="black", ls="--", lw=1.1)
        axes.set_xlabel(label)
    grid[0].invert_yaxis()
    save_figure(figure, experiment.folder / "silence.png")
    columns = ("checkpoint", "kind", "units", "sink_rate", "low", "high", "mean_alpha1", "loss")
    return experiment.save(**lists, columns=columns)


def named_units(settings: SilenceSettings, spec):
    """Layer and unit of each LAYER/UNIT; UserError for one that the model does not have."""
    units = []
    for word in settings.unit or ():
        match = re.fullmatch(r"([1-9]\d{0,5})/(\d{1,9})", word)
        if not (match and int(match[1]) <= spec.config.num_layers and int(match[2]) < spec.config.d_ff):
            raise UserError(f"--unit {word}: expected LAYER/UNIT of {spec.label}, as in 12/1229")
        units.append((int(match[1]), int(match[2])))
    return units


def every_silence(settings: SilenceSettings, spec, model):
    """Sink rate, alpha_1 and loss (nats a token) with sets of hidden units at zero.

    `first`: those that write most at position 1, one after another; `alone`: each of the first four; `pair`:
    all their pairs. Controls: as many that write most `elsewhere`, and `random` ones of the same layers.
    """
    tokens = read_tokens(settings, spec, settings.sequence_length)
    measured = {}  # by the names of the silent units
    with attention.unit_activity(model, len(tokens)) as (at_first, at_others):
        measured[""] = attention.alpha_and_loss(model, tokens)
    units = named_units(settings, spec) or attention.strongest_units(model, at_first, settings.units)
    count = len(units)
    elsewhere = attention.strongest_units(model, at_others, 2 * count)
    generator = keyed_generator("silence", settings.input_seed)
    cases = [("none", [])]
    cases += [("first", units[:size]) for size in range(1, count + 1)]
    cases += [("alone", [unit]) for unit in units[:4]]
    cases += [("pair", pair) for pair in itertools.combinations(units[:4], 2)]
    cases.append(("elsewhere", [unit for unit in elsewhere if unit not in units][:count]))
    cases.append(("random", [(layer, int(generator.integers(model.config.d_ff))) for layer, _ in units]))
    rows = []
    for kind, silent in progress(cases, desc="silence", unit=" sets", leave=False):

        def at_zero(layer, units, silent=silent):
            numbers = [unit for place, unit in silent if place == layer]
            return units.index_fill(2, torch.tensor(numbers, device=units.device), 0) if numbers else None

        names = " ".join(f"{layer}/{unit}" for layer, unit in silent)
        if names not in measured:
            with attention.hidden_units(model, at_zero):
                measured[names] = attention.alpha_and_loss(model, tokens)
        alpha, loss = measured[names]
        row = {"kind": kind, "num_silenced": len(silent), "units": names}
        row |= interval(attention.sink_share(alpha), "sink_rate")
        rows.append(row | {"mean_alpha1": alpha.mean().item(), "loss": loss})
    return {"rows": rows}


COMMANDS = {
    "rate": Command(rate, RateSettings()),
    "first": Command(first, Settings()),
    "variance": Command(variance, Settings()),
    "anatomy": Command(anatomy, Settings()),
    "intervene": Command(intervene, InterveneSettings()),
    "silence": Command(silence, SilenceSettings()),
}
COMMANDS[""] = COMMANDS["rate"]

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
