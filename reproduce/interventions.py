"""What makes a sink, what ends it, and which constants take it over? Experiments beside those of sinks.py.

python -m reproduce.interventions ablate        # which neurons build the sink? --help has all five
"""

import itertools
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from lib.figures import curves
from lib.random import keyed_generator
from lib.results import interval
from lib.runtime import progress
from lib.settings import Command, UserError, at_least, run_script
from measure import attention, caveats
from measure.anatomy import describe, jumps, names_of
from measure.transplant import EARLY, Case, TransplantSettings, alpha_and_loss, cases_of, transplant
from measure.units import disparity, observe, ranked, zero_units
from model import Transformer
from sources.checkpoint import check_lengths
from sources.inputs import TextExperiment, TextSettings, prefix_of, read_tokens

MOST_BUILDERS = 64  # that `ablate` ablates
COPIES, NUM_CONSTANTS = (1, 4, 64), 16  # of `repeats`: equal tokens in front; windows that give constants
ELSEWHERE = 10  # where a BOS that is not first stands
ACTIVE = 0.1  # `intervene`: a builder fires at this share of its mean at position 1 (ours)


@dataclass
class InterveneSettings(TextSettings):
    """The settings of `intervene`."""

    position: at_least(1) = 10  # k, the position to make a sink, counted from 1 (SO: 10)
    factor: tuple[at_least(0, float), ...] = (32.0,)  # lambda, the factor of `amplify` and `scale`


@torch.inference_mode()
def intervene(settings: InterveneSettings):
    """Can a position be made a sink? SO's interventions, beside the strongest builder (three minutes)"""
    k = settings.position
    if k > settings.sequence_length:
        raise UserError(f"--position {k}: the sequence has {settings.sequence_length}")
    experiment = TextExperiment("intervene", "SO", settings)
    rows, points, builders = [], [], []
    for named, spec, model in experiment.models():
        tokens = read_tokens(experiment.settings, spec, settings.sequence_length)
        activity = observe(model, tokens)
        (builder,) = activity.builders(1)
        described = describe(activity, [builder])
        builders += [named | row for row in described]
        kinds = [("none", None), ("self_mask", None)]
        kinds += itertools.product(("amplify", "scale"), settings.factor)
        cases = list(itertools.product(("all", 1), kinds))
        for layers in layers_masked(builder[0], model.config.num_layers):
            cases.append((layers, ("self_mask", None)))
        for changed, (kind, factor) in progress(cases, desc="intervene", unit=" cases", leave=False):
            case = named | {"position": k, "changed": changed, "intervention": kind, "factor": factor}
            alpha, activation = intervened(model, tokens, builder, k, changed, kind, factor)  # (n,) each
            active = activation >= ACTIVE * described[0]["first"]
            row = case | interval(alpha, "alpha_k") | {"fires": active.float().mean().item()}
            row["builder_layer"] = builder[0]
            row["alpha_k_firing"] = alpha[active].mean().item() if active.any() else None
            row["alpha_k_off"] = None if active.all() else alpha[~active].mean().item()
            rows.append(row)
            for size, value in zip(activation.tolist(), alpha.tolist()) if changed in ("all", 1) else ():
                points.append(case | {"activation": size, "alpha_k": value})
    columns = ("checkpoint", "changed", "intervention", "factor", "alpha_k", "low", "high", "fires")
    columns += ("alpha_k_firing", "alpha_k_off")
    result = experiment.save(rows, columns, points=points, builders=builders)
    draw_masked(experiment.folder / "self_mask.png", rows, k)
    most = max(settings.factor)
    shown = []
    for point in points:
        if point["factor"] in (None, most):
            shown.append(point | {"changed in layer": point["changed"]})
    question = f"Where the first builder is active at position {k}, is that a sink? (a point per sequence; "
    question += f"a factor of {most:g} in all layers can break a model: attention rises anyhow)"
    keys = {"x": "activation", "y": "alpha_k", "series": "intervention", "panel": "changed in layer"}
    labels = {"xlabel": f"|activation| of the first builder at {k}", "ylabel": f"attention to position {k}"}
    curves(shown, experiment.folder / "intervene.png", question, **keys, style="o", log="x", **labels)
    return result


def layers_masked(last, num_layers):
    """Runs of layers, "1-3", in which position k sees only itself: up to and from each up to a builder's."""
    runs = [f"1-{layer}" for layer in range(2, last + 1)]
    return runs + [f"{layer}-{num_layers}" for layer in range(2, last + 2) if layer <= num_layers]


def is_changed(layer, changed):
    """Is a layer changed, if "all" are, or a run of them, or one?"""
    if isinstance(changed, str) and "-" in changed:
        first, last = map(int, changed.split("-"))
        return first <= layer <= last
    return changed in ("all", layer)


def draw_masked(path, rows, k) -> None:
    """Draw attention to position k by the last, or the first, layer in which it sees only itself."""
    masked = [row for row in rows if row["intervention"] == "self_mask"]
    in_all = {row["checkpoint"]: row["alpha_k"] for row in masked if row["changed"] == "all"}
    points = []
    for row in masked:
        if row["changed"] == "all":
            continue
        first, _, last = str(row["changed"]).partition("-")
        from_first = first == "1"
        point = {"layer": int(last or first) if from_first else int(first), "alpha_k": row["alpha_k"]}
        point["masked"] = "in layers 1 to this" if from_first else "in layers from this to the last"
        points.append(point | {"model": row["checkpoint"], "all": in_all[row["checkpoint"]]})
    question = f"How long must position {k} see only itself, to become a sink?"
    keys = {"x": "layer", "y": "alpha_k", "series": "masked", "panel": "model", "style": ".-"}
    theories = {"all": "in all layers"}
    labels = {"ylabel": f"attention to position {k}", "ylim": (0, None)}
    curves(points, path, question, **keys, theories=theories, **labels)


def intervened(model, tokens, builder, k, changed, kind, factor):
    """Attention to position k, and the builder's |activation| there, in each sequence: (n,) each.

    Attention is the mean over heads in the layers above the builder (above layer 1 if that is in the last).
    All sequences are one batch, because `amplify` needs their mean. Heads' outputs o_k at k are replaced in
    the `changed` layer, a run of them ("1-3"), or in "all". With `self_mask` o_k becomes the value at k, as
    if k saw itself alone. With `amplify`, SO's, it becomes mu + factor (o_k - mu), mu being the mean of o_k
    over sequences; with `scale` it becomes factor o_k.
    """
    alphas, activations = {}, []  # attention by layer that attends

    def on_units(layer, units):
        if layer == builder[0]:
            activations.append(units[:, k - 1, builder[1]].float().abs().cpu())

    def on_heads(layer, heads, q, key, v, alpha):
        alphas[layer] = alpha((k,)).cpu()[..., 0]  # (n, H)
        if kind == "none" or not is_changed(layer, changed):
            return None
        o_k = heads[:, :, k - 1 : k]  # (n, H, 1, Dh)
        if kind == "self_mask":
            own = v[:, :, k - 1 : k].repeat_interleave(heads.shape[1] // v.shape[1], dim=1)
            is_ours = isinstance(model, Transformer)
            o_k = model.blocks[layer - 1].self_attn.calibrate(own, k) if is_ours else own
        elif kind == "amplify":
            mean = o_k.mean(0, keepdim=True)
            o_k = mean + factor * (o_k - mean)
        elif kind == "scale":
            o_k = factor * o_k
        return torch.cat((heads[:, :, : k - 1], o_k, heads[:, :, k:]), dim=2)

    with model.hidden_units(on_units):
        model.hidden(tokens, on_heads=on_heads)
    skipped = builder[0] if builder[0] < model.config.num_layers else 1  # layers the builder cannot change
    above = [alpha.mean(1) for layer, alpha in alphas.items() if layer > skipped]
    if not above:
        raise UserError(
            f"no layer above layer {skipped}, of the first builder, attends: nothing can be measured"
        )
    return torch.stack(above, dim=1).double().mean(1), sum(activations)


@torch.inference_mode()
def ablate(settings: TextSettings):
    """Which neurons build the sink? Ablates 1, 2, 4, ... of them (ours; ten minutes)"""
    experiment = TextExperiment("ablate", "ours", settings)
    rows = experiment.rows(ablations)
    columns = ("checkpoint", "kind", "num_ablated", "left", "disparity", "sink_rate", "low", "high")
    result = experiment.save(rows, (*columns, "mean_alpha1", "loss", "units"))
    points = []
    for row in rows:
        who = "" if row["kind"] in ("none", "first") else ", controls"
        if row["kind"] not in ("alone", "constant"):
            points.append(row | {"model": row["checkpoint"] + who})
    question = "How far must one dimension fall before the sink goes?"
    keys = {"x": "disparity", "y": "sink_rate", "series": "model", "style": "o"}
    labels = {"xlabel": "largest / mean |dimension| at position 1", "ylabel": "share of heads that sink"}
    curves(points, experiment.folder / "ablate.png", question, **keys, log="x", **labels)
    return result


def ablations(settings: TextSettings, spec, model):
    """A row for the unchanged model, and for each set of neurons ablated or held constant.

    `left`, the share left of the sink's dimension, and `disparity` are of position 1 after `activity.layer`.
    """
    tokens = read_tokens(settings, spec, settings.sequence_length)
    activity = observe(model, tokens)
    builders = activity.builders(min(MOST_BUILDERS, num_needed(activity)))
    sets = sets_of_units(settings, activity, builders)
    num_bos = len(prefix_of(settings, spec))
    rows, states = [], []

    def on_state(layer, x):
        if layer == activity.layer:
            states.append(x[:, 0].float().cpu())

    def hold(layer, units):
        units = units.clone()  # (B, T, d_ff)
        for its_layer, unit in builders:
            if its_layer == layer:
                units[:, 0, unit] = activity.at_1[layer - 1, unit]
        return units

    for kind, neurons in progress(sets, desc="ablate", unit=" sets", leave=False):
        states.clear()
        with model.hidden_units(hold if kind == "constant" else zero_units(neurons)):
            alpha, losses = alpha_and_loss(model, tokens, (1,), num_bos, on_state)  # (n, L, H, 1)
        state = torch.cat(states)  # (n, d)
        left = state[:, activity.dimension].mean() / activity.state[activity.layer, activity.dimension]
        row = {"kind": kind, "num_ablated": len(neurons), "units": names_of(neurons)}
        row |= {"left": left.item(), "disparity": disparity(state).mean().item()}
        row |= interval(attention.sink_share(alpha[..., 0]), "sink_rate", 0, 1)
        rows.append(row | {"mean_alpha1": alpha.mean().item(), "loss": losses["loss"]})
    return rows


def num_needed(activity, share=0.99):
    """The number of builders that make a share of the sink's dimension."""
    added = activity.contributions()[: activity.layer].flatten().clamp(min=0)
    sums = added.sort(descending=True).values.cumsum(0)
    return 1 + (sums < share * activity.state[activity.layer].abs().max()).sum().item()


def sets_of_units(settings: TextSettings, activity, builders):
    """The kind and the neurons of each set that `ablate` changes.

    `first` has the first 1, 2, 4, ... builders; `alone` one of the next three; `constant` holds all at their
    mean. Three controls have as many neurons: the `removers`, which change the same dimension; those that
    write most `elsewhere`; and `random` ones of the builders' layers.
    """
    count = len(builders)
    sizes = [2**power for power in range(count.bit_length()) if 2**power < count] + [count]
    norms = []  # of neurons' down weights, by layer
    for layer in range(1, len(activity.state)):
        norms.append(activity.model.down(layer).float().norm(dim=0).cpu())  # (d_ff,)
    norms = pad_sequence(norms, batch_first=True)  # (L, d_ff)
    elsewhere = ranked(activity.elsewhere * norms, 2 * count)
    generator = keyed_generator("silence", settings.input_seed)  # results were drawn by this name
    drawn = []
    for layer, _ in builders:
        num_units = activity.model.down(layer).shape[1]
        others = [(layer, unit) for unit in range(num_units) if (layer, unit) not in builders + drawn]
        if others:
            drawn.append(others[generator.integers(len(others))])
    sets = [("first", builders[:size]) for size in sizes] + [("alone", [unit]) for unit in builders[1:4]]
    sets += [("constant", builders), ("removers", activity.removers(count))]
    sets += [("elsewhere", [unit for unit in elsewhere if unit not in builders][:count]), ("random", drawn)]
    return [("none", []), *[(kind, some) for kind, some in sets if some]]


@torch.inference_mode()
def bos(settings: TextSettings):
    """Does a model sink on BOS or on position 1? With BOS first, at position 10, or absent (ours; minutes)"""
    experiment = TextExperiment("bos", "ours", settings)
    rows = experiment.rows(with_and_without_bos)
    result = experiment.save(rows, ("checkpoint", "kind", "place", "layer", "alpha", "sink_rate"))
    question = "Does a model sink on BOS, or on position 1?"
    keys = {"x": "layer", "y": "alpha", "series": "kind", "panel": "checkpoint", "style": ".-"}
    label = "attention to BOS, constant or position 1"
    curves(rows, experiment.folder / "bos.png", question, **keys, ylabel=label)
    return result


def with_and_without_bos(settings: TextSettings, spec, model):
    """A row for each case and layer that attends: mean attention to a position, share of heads that sink."""
    if settings.sequence_length <= ELSEWHERE:
        raise UserError(f"--sequence-length: expected {ELSEWHERE + 1} at least")
    settings = replace(settings, bos="always")
    if not prefix_of(settings, spec):
        raise UserError(f"{spec.label}: expected a model with a tokenizer")
    first = read_tokens(settings, spec, settings.sequence_length)
    text = first[:, len(prefix_of(settings, spec)) :]
    within = text.clone()
    within[:, ELSEWHERE - 1] = first[0, 0]
    of_bos = attention.with_constants(model, attention.constants_at(model, first[:1, :1]))
    of_first = attention.with_constants(model, attention.constants_at(model, text))
    cases = {  # by kind: who reads what, and the position whose attention is measured; 0 is a constant
        "BOS first": (model, first, 1),
        "BOS's constants, no BOS": (of_bos, text, 0),
        "no BOS": (model, text, 1),
        "constants of first tokens": (of_first, text, 0),
        f"BOS at position {ELSEWHERE}": (model, within, ELSEWHERE),
    }
    rows = []
    for kind, (reader, tokens, place) in progress(cases.items(), desc="bos", unit=" cases", leave=False):
        parts = attention.batches(tokens)
        alphas = [attention.attention_to(reader, part, (place,))[0] for part in parts]  # (B, L, H, 1) each
        layers = attention.queries_that_see_the_first(reader, tokens.shape[1])
        for layer, alpha in zip(layers, torch.cat(alphas).unbind(1)):
            row = {"kind": kind, "place": place, "layer": layer, "alpha": alpha.mean().item()}
            rows.append(row | {"sink_rate": (alpha > attention.EPSILON).float().mean().item()})
    return rows


@torch.inference_mode()
def repeats(settings: TextSettings):
    """Do equal tokens in front blind the sink rate, and does a constant mend them? (ours; minutes)"""
    experiment = TextExperiment("repeats", "ours", settings)
    rows = experiment.rows(with_copies)
    columns = ("checkpoint", "kind", "copies", "sink_rate", "run_alpha", "run_sink_rate")
    return experiment.save(rows, (*columns, "loss", "added", "low", "high"))


def with_copies(settings: TextSettings, spec, model):
    """A row for each number of copies of a text's first token, alone, with constants, or random tokens.

    Losses are of the text's predictions from its ninth on, and what each case adds to those as it is.
    """
    n, T = settings.num_sequences, settings.sequence_length
    check_lengths((T,), model.config.context_length - max(COPIES) + 1)
    if T < EARLY + 2:
        raise UserError(f"--sequence-length {T}: expected {EARLY + 2} at least")
    windows = read_tokens(replace(settings, num_sequences=n + NUM_CONSTANTS), spec, T)
    tokens, others = windows.split((n, NUM_CONSTANTS))
    mended = attention.with_constants(model, attention.constants_at(model, others))
    drawn = others[:, len(prefix_of(settings, spec)) :].flatten()[: max(COPIES) - 1]
    cases = []  # what, who reads it, and what is in front
    for count in COPIES:
        copies = tokens[:, :1].expand(-1, count - 1)
        cases += [("copies", model, copies), ("copies and a constant", mended, copies)]
    cases.append(("random tokens", model, drawn.expand(n, -1)))
    rows, usual = [], None
    for kind, reader, front in progress(cases, desc="repeats", unit=" cases", leave=False):
        before = front.shape[1]
        read = torch.cat((front, tokens), dim=1)
        results = [alpha_and_loss(reader, window[None], (1,), before) for window in read]
        alpha1 = torch.cat([alpha[..., 0] for alpha, _ in results])  # (n, L, H)
        losses = np.array([loss["loss_from_ninth"] for _, loss in results])
        usual = losses if usual is None else usual
        row = {"kind": kind, "copies": before + 1, "loss": losses.mean()}
        row["sink_rate"] = attention.sink_share(alpha1).mean().item()
        row |= caveats.sink_on_run(reader, read, caveats.equal_at_first(read))
        rows.append(row | interval(losses - usual, "added"))
    return rows


def controlled_transplant(settings: TransplantSettings):
    """Does the sink move onto any constant? measure/transplant.py, with controls (ours; minutes)"""
    return transplant(settings, partial(cases_and_controls, settings.input_seed))


def cases_and_controls(seed, model, constants, activity, extra, prefix):
    """Cases and controls: other tokens in front, other builders, constants in some layers, wrong constants.

    If constants in layer 1 suffice, or in the layers up to the dimension's first jump, the chain breaks where
    it begins. If constants of position 2, of other heads or random ones suffice, any constant would do.
    """
    cases = cases_of(model, constants, activity, extra, prefix)
    tokens = extra.unique().tolist()
    for token in (tokens[len(tokens) // 4], tokens[3 * len(tokens) // 4]):
        cases.append(Case(f"token in front: {token}", model, (token,)))
    builders = activity.builders(num_needed(activity))
    if set(builders) != set(cases[1].ablated):
        cases.append(Case("builders of 99 % at zero", model, prefix, builders))

    def add(kind, constants, layers=None):
        some = {layer: pair for layer, pair in constants.items() if layers is None or layer in layers}
        cases.append(Case(kind, attention.with_constants(model, some)))

    jump = (jumps(activity) or [activity.layer])[0]
    add("moved, layer 1", constants, [1])
    add(f"moved, layers 1 to {jump}", constants, range(1, jump + 1))
    add(f"moved, from layer {jump + 1}", constants, range(jump + 1, model.config.num_layers + 1))
    add("constants of position 2", attention.constants_at(model, extra, position=2))
    if max(len(key) for key, _ in constants.values()) > 1:
        rolled = {layer: (key.roll(1, 0), value.roll(1, 0)) for layer, (key, value) in constants.items()}
        add("constants of other heads", rolled)
    add("drawn constants", drawn_like(constants, keyed_generator("transplant", seed)))
    return cases


def drawn_like(constants, generator):
    """Random constants, each vector as long as the one it replaces."""
    drawn = []
    for vectors in zip(*constants.values()):
        for vector in vectors:
            noise = torch.from_numpy(generator.standard_normal(vector.shape, np.float32))
            length = vector.float().norm(dim=-1, keepdim=True)
            drawn.append(noise / noise.norm(dim=-1, keepdim=True) * length)
    count = len(constants)
    return dict(zip(constants, zip(drawn[:count], drawn[count:])))


COMMANDS = {
    "intervene": Command(intervene, InterveneSettings()),
    "ablate": Command(ablate, TextSettings()),
    "bos": Command(bos, TextSettings()),
    "repeats": Command(repeats, TextSettings()),
    "transplant": Command(controlled_transplant, TransplantSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
