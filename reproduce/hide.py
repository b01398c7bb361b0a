"""Can a sink be hidden? Queries that may not see the first tokens (ours, after arXiv 2609.08574)

    python -m reproduce.hide                        # of smollm2: two minutes of a thread

The first k positions are hidden from all later queries, so the next position sees only itself, as position 1
did; or from all but the next k, so no later position does. Each case comes again with constants in front, the
mean key and value of position 1 over other windows. A head sinks on a position that gets more than 0.3 of the
attention of the second half's queries. Losses are of the predictions made from position 65 on.
"""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

from lib.figures import BLUE, new_figure, save_figure, short_names, unique
from lib.results import interval
from lib.settings import Command, UserError, at_least, run_script
from measure.anatomy import names_of
from measure.attention import EPSILON, Means, attention_to, batches, constants_at, with_constants
from measure.units import disparity, observe
from model import Transformer, weights_on
from sources.inputs import TextExperiment, TextSettings, read_tokens

HIDDEN, SHOWN, FROM = (1, 2, 4), 8, 64  # positions that are hidden, and told of; predictions left out
LEAK = 1e-3  # of later states, that a hidden token may change, by rounding


@dataclass
class HideSettings(TextSettings):
    """The settings of `hide`."""

    num_sequences: at_least(2) = 8  # sequences
    sequence_length: at_least(FROM + 2) = 256  # tokens in a sequence
    num_constants: at_least(0) = 16  # extra sequences, whose first position gives the constants


def hide(settings: HideSettings):
    """Can a sink be hidden? The first positions, hidden from all later ones or from most (minutes)"""
    experiment = TextExperiment("hide", "ours", settings)
    rows = experiment.rows(every_case)
    columns = ("checkpoint", "kind", "hidden", "constants", "sink_rates", "any_token", "constant")
    draw_hidden(experiment.folder / "hide.png", rows)
    return experiment.save(rows, (*columns, "loss", "added", "low", "high"))


@torch.inference_mode()
def every_case(settings: HideSettings, spec, model):
    """A row for each case: rates, disparity and the first builder's activation by position, and losses."""
    T, n, c = settings.sequence_length, settings.num_sequences, settings.num_constants
    tokens, others = read_tokens(replace(settings, num_sequences=n + c), spec, T).split((n, c))
    activity = observe(model, tokens)
    (builder,) = activity.builders(1)
    query = torch.arange(T, device=tokens.device)[:, None]
    cases = [("as it is", 0, query < 0)]
    cases += [("hidden", k, (query.T < k) & (query > query.T)) for k in HIDDEN]
    cases += [("hidden from all but the next", k, (query.T < k) & (query >= 2 * k)) for k in HIDDEN]
    readers = [model, with_constants(model, constants_at(model, others))] if c else [model]
    check_that_hiding_hides(model, tokens[:1])
    rows, usual = [], None
    for reader, (kind, k, hides) in product(readers, cases):
        row, losses = measured(reader, tokens, hides.expand(T, T), builder)
        usual = losses if usual is None else usual
        key = {"kind": kind, "hidden": k, "constants": reader is not model}
        rows.append(key | row | interval(losses - usual, "added"))
    return rows


def check_that_hiding_hides(model, tokens):
    """UserError if a token (1, T) that is hidden from all others changes what these become."""
    T = tokens.shape[1]
    hides = torch.zeros(T, T, dtype=torch.bool, device=tokens.device)
    hides[1:, 0] = True
    others = tokens.clone()
    others[:, 0] = (others[:, 0] + 1) % model.config.vocab_size
    states, changed = [late_attention(model, each, hides, None)[1][:, 1:] for each in (tokens, others)]
    share = ((states - changed).norm() / states.norm()).item()
    if share > LEAK:
        hint = "other layers than attention, as state-space ones, carry it"
        raise UserError(f"hide: a hidden first token still changes later states by {share:.0%}: {hint}")


def measured(model, tokens, hides, builder):
    """A row about a model that reads tokens (n, T) without the weights `hides` (T, T), and losses (n,)."""
    means = Means(len(tokens))
    alphas, losses = [], []

    def on_state(layer, x):
        means.add(layer, disparity=disparity(x[:, :SHOWN]))

    def on_units(layer, units):
        if layer == builder[0]:
            means.add(layer, builder=units[..., builder[1]].float().abs()[:, :SHOWN])

    with model.hidden_units(on_units):
        for part in batches(tokens):
            alpha, states = late_attention(model, part, hides, on_state)
            alphas.append(alpha.cpu())
            for some, wanted in zip(states[:, FROM:-1], part[:, FROM + 1 :]):
                losses.append(model.summed_loss(some, wanted).item() / len(wanted))
    sinks = torch.cat(alphas) > EPSILON
    constant, *rates = [round(rate, 4) for rate in sinks.float().mean((0, 1, 2)).tolist()]
    row = {"sink_rates": rates[:SHOWN], "constant": constant, "builder": names_of([builder])}
    row["any_token"] = sinks[..., 1:].any(-1).float().mean().item()
    row["disparities"] = means.stack("disparity").amax(0).tolist()
    row["activations"] = means.of[builder[0]]["builder"].tolist()
    return row | {"loss": np.mean(losses).item()}, np.array(losses)


def late_attention(model, tokens, hides, on_state):
    """The late queries' attention to 0, the constant, to T / 2, (B, L, H, 1 + T / 2), and final states."""
    T = tokens.shape[1]
    if not isinstance(model, Transformer):
        return attention_to(model.hiding(hides, T // 2), tokens, range(T // 2 + 1), on_state=on_state)
    by_layer = []
    positions = torch.arange(T // 2 + 1, device=tokens.device)

    def on_heads(layer, heads, q, k, v, alpha):
        attention = model.blocks[layer - 1].self_attn
        keys, values = attention.with_front(k, v)
        hidden = F.pad(hides, (keys.shape[2] - T, 0))  # what stands in front is seen
        weights = weights_on(attention, q, k, positions, hidden)
        by_layer.append(torch.cat([part[:, :, T // 2 :].float().mean(2) for part in weights], dim=2))
        hidden_weights = list(weights_on(attention, q, k, positions[1 : 1 + max(HIDDEN)], hidden))
        if (torch.cat(hidden_weights, dim=3) * hides[:, : max(HIDDEN)]).any():
            raise UserError(f"hide: {type(attention).__name__}.attend does not hide what it is told to hide")
        return attention.calibrate(attention.attend(q, keys, values, hidden), T)

    states = model.hidden(tokens, on_state=on_state, on_heads=on_heads)
    if not hides.any() and not torch.allclose(states, model.hidden(tokens), rtol=0.01, atol=0.01):
        raise UserError("hide: hiding nothing changes this model's states: its attention is not attend alone")
    return torch.stack(by_layer, dim=1), states


def draw_hidden(path, rows) -> None:
    """Draw where heads sink and what that costs: a line for each case, a pair of panels for each model."""
    question = "Can a sink be hidden? Where heads sink if the first tokens are hidden, and what that costs"
    names = unique(rows, "checkpoint")
    figure, grid = new_figure(question, len(names), 2, width=5.4, height=2.8)
    for label, name, (where, cost) in zip(short_names(names), names, grid):
        cases = [row for row in rows if row["checkpoint"] == name and row["hidden"] < 4]
        shares = np.array([[row["constant"], *row["sink_rates"]] for row in cases])
        for row, case in zip(shares, cases):
            row[1 : 1 + case["hidden"]] = np.nan  # grey
        where.imshow(shares, cmap="cividis", vmin=0, vmax=0.6, aspect="auto")
        where.set_facecolor("lightgrey")
        for (y, x), share in np.ndenumerate(shares):
            text = "hidden" if np.isnan(share) else f"{100 * share:.0f}"
            colour = "white" if share < 0.35 else "black"
            where.text(x, y, text, ha="center", va="center", color=colour, size=8)
        where.set_xticks(range(1 + SHOWN), ["constant", *range(1, 1 + SHOWN)])
        where.set_yticks(range(len(cases)), map(words_of, cases))
        where.set(xlabel="position", title=f"{label}\n% of heads that sink there")
        added = np.array([[row["added"], row["low"], row["high"]] for row in cases]).T
        cost.barh(range(len(cases)), added[0], xerr=abs(added[1:] - added[0]), color=BLUE)
        cost.axvline(0, color="black", ls="--", lw=1)
        cost.set(ylim=where.get_ylim(), yticks=[], xlabel="nats", title="added loss, with 95 % interval")
    save_figure(figure, path)


def words_of(row):
    """What is hidden in a case."""
    what = ("nothing", "1", "1 and 2")[row["hidden"]]
    but = ("", ", except from 2", ", except from 3 and 4")[row["hidden"] * row["kind"].endswith("next")]
    return what + " hidden" + but + " + a constant" * row["constants"]


def value(settings: HideSettings):
    """What is the sink's value worth? It is left out of later queries' sums (minutes)"""
    experiment = TextExperiment("value", "ours", settings)
    rows = experiment.rows(value_cases)
    return experiment.save(rows, ("checkpoint", "kind", "loss", "added", "low", "high"))


@torch.inference_mode()
def value_cases(settings: HideSettings, spec, _):
    """A row for each case: losses of the predictions from position 65 on, and what is added to them."""
    model = spec.transformer(settings.device)
    tokens = read_tokens(settings, spec, settings.sequence_length)
    rows, usual = [], None
    for kind in ("as it is", "value left out", "left out, other weights scaled up"):
        losses = []
        for part in batches(tokens):
            states = model.hidden(part, on_heads=None if kind == "as it is" else without_value(model, kind))
            for some, wanted in zip(states[:, FROM:-1], part[:, FROM + 1 :]):
                losses.append(model.summed_loss(some, wanted).item() / len(wanted))
        losses = np.array(losses)
        usual = losses if usual is None else usual
        rows.append({"kind": kind, "loss": losses.mean()} | interval(losses - usual, "added"))
    return rows


def without_value(model, kind):
    """An `on_heads` without w_1 v_1 in later queries' sums; scaled up, these are divided by 1 - w_1."""

    def on_heads(layer, heads, q, k, v, alpha):
        attention = model.blocks[layer - 1].self_attn
        (weights,) = weights_on(attention, q, k, torch.ones(1, dtype=torch.long, device=q.device))
        later = weights.clone()  # (B, H, T, 1)
        later[:, :, 0] = 0  # position 1 sees nothing else
        first = v[:, :, :1].repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, 1, Dh)
        left = heads - later * first
        return left / (1 - later).clamp(min=1e-6) if "scaled" in kind else left

    return on_heads


COMMANDS = {
    "": Command(hide, HideSettings()),
    "value": Command(value, HideSettings(model=("smollm2",), num_sequences=8)),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
