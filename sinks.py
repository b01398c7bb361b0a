"""Where does attention sink, why, and can it be moved or removed? (BB 6.2; SO)

    python sinks.py --model runs/laptop tiny_llama@42 --data data/python-bpe_4096    # `rate`: how many heads?
    python sinks.py variance --model nano_gpt2              # Equation 2, in every layer of any checkpoint
    python sinks.py anatomy --model runs/backcopy --data data/backcopy-bytes --bos      # the chain of SO
    python sinks.py intervene --model runs/laptop --data data/python-bpe_4096 --position 5

alpha_k, of a head, is how much the queries i >= k attend to position k, on average; positions count from 1. A
head with alpha_k above --epsilon is a sink head at k. Text comes from a prepared data set (--data) or a file
(--text); without either, tokens are random. SO's formulas are not in its abstract: what we had to define
ourselves is called ours.
"""

import itertools
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import attention
import common
import reading
import theory
from checkpoint import config_of, find, load, models, shared_context
from common import UserError, setting
from evidence import some
from experiment import conduct
from figures import draw, save_figure
from init import SCHEMES, newborn
from model import CHOICES, MLP, PRESETS, Transformer
from stats import interval, split


@dataclass
class Settings(reading.Settings):
    """What every experiment of `sinks.py` can be told."""

    model: tuple[str, ...] = setting(("tiny_llama",), "presets, PRESET@SEED, runs or checkpoint folders")
    seed: tuple[int, ...] = setting((42,), "seeds of the presets' weights")
    init: str = setting("gpt2", "how newborns are drawn", SCHEMES)
    attn_calibration: str = setting("none", "of newborns' heads (BB 6.2)", CHOICES["attn_calibration"])
    sequence_length: int = setting(64, "tokens in a sequence (Gu et al.: 64)", least=2)


@dataclass
class Rate(Settings):
    """What `sinks.py rate` can be told."""

    sequence_length: tuple[int, ...] | None = setting(None, "tokens a sequence (default: 32 to 512)", least=2)
    epsilon: float = setting(0.3, "a head with alpha_1 above this is a sink head (Gu et al.)")


@dataclass
class Intervene(Settings):
    """What `sinks.py intervene` can be told."""

    position: int = setting(5, "k, the position to be made a sink, from 1", least=1)
    layers: tuple[int, ...] | None = setting(None, "layers to intervene in, from 1 (default: all)")
    factor: tuple[float, ...] = setting((0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), "lambda of each sweep", least=0)


# ---- how much? (BB Figure 12) ------------------------------------------------------------------------------


def rate(s: Rate, spec: str, model: Transformer) -> dict:
    """Figure 12: the share of sink heads by length, thresholded in each sequence, then averaged."""
    rows, points, heads, context = [], [], [], model.config.context_length
    for T in s.sequence_length or [T for T in (32, 64, 128, 256, 512) if T <= context] or [context]:
        tokens, row = reading.tokens(s, spec, T, model.config.vocab_size), dict(sequence_length=T)
        alpha, uniform = attention.first_attention(model, tokens), attention.uniform_alpha(T)
        row |= dict(epsilon=s.epsilon) | interval(attention.sink_share(alpha, s.epsilon), "sink_rate")
        row |= interval(alpha.mean(dim=(1, 2)), "mean_alpha1", "alpha1_low", "alpha1_high")
        rows.append(row | dict(max_alpha1=alpha.mean(0).max().item(), uniform_alpha1=uniform))
        heads.append(dict(sequence_length=T, alpha1=alpha.mean(0).tolist()))
        for panel, y, law in (("sink rate", "sink_rate", None), ("mean alpha_1", "mean_alpha1", uniform)):
            points.append(dict(x=T, y=rows[-1][y], theory=law, panel=panel))
    return dict(rows=rows, points=points, heads=heads)


def plot_heads(heads: list[dict], path: Path) -> None:
    """alpha_1 of every layer and head, at the greatest length of each checkpoint."""
    last = list({found["checkpoint"]: found for found in heads}.values())
    figure = Figure(figsize=(1.5 + 3.2 * len(last), 3.4), layout="constrained")
    panels = figure.subplots(1, len(last), squeeze=False)[0]
    for axes, found in zip(panels, last):
        alpha = torch.tensor(found["alpha1"]).numpy()  # (L, H)
        L, H = alpha.shape
        edges = (0.5, H + 0.5, L + 0.5, 0.5)
        image = axes.imshow(alpha, cmap="cividis", vmin=0, vmax=1, aspect="auto", extent=edges)
        axes.set(xlabel="head", xticks=range(1, H + 1, 1 + H // 9))
        axes.set(ylabel="layer", yticks=range(1, L + 1, 1 + L // 9))
        axes.set_title(f"{found['checkpoint'][-26:]}, T = {found['sequence_length']}", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="alpha_1")
    save_figure(figure, path)


# ---- why? (Equation 2; SO's chain) -------------------------------------------------------------------------


def variance(s: Settings, spec: str, model: Transformer) -> dict:
    """Figure 9 in every layer: std of aggregated values, calibrated, just before the output projection.

    `theory` is `theory.aggregated_std`'s, for the first layer of a newborn drawn with the std it assumes.
    """
    sums, rows, T = defaultdict(float), [], s.sequence_length

    def watch(layer, heads, q, k, v):
        sums[layer] += attention.moments(heads)

    for part in attention.batches(reading.tokens(s, spec, T, model.config.vocab_size)):
        model.hidden(part, on_heads=watch)
    lawful = not isinstance(find(spec), Path) and not (s.text or s.data or s.bos)
    law = theory.aggregated_std(model.config, T, tokens=True).tolist() if lawful else [None] * T
    for layer, total in sums.items():
        for i, std in enumerate(attention.spread(total)):
            rows.append(dict(layer=layer, position=i + 1, std=std, theory=law[i] if layer == 1 else None))
    shown = [1 + layer for layer in some(model.config.num_layers, 4)]
    points = [row | dict(of=f"layer {row['layer']}") for row in rows if row["layer"] in shown]
    return dict(rows=rows, points=points)


def anatomy(s: Settings, spec: str, model: Transformer) -> dict:
    """SO's chain, link by link and position by position; `super_neurons` has the ten strongest.

    A super neuron's `ratio` is its mean |activation| at the first position over that at the others (ours);
    `dominance_ratio` is max|h| / mean|h| of the stream after the layer; `key_alignment`, ours, is the length
    of the mean of all sequences' keys, each scaled to length 1: 1 where they have collapsed into one.
    """
    T, sums, rows, points, neurons = s.sequence_length, defaultdict(float), [], [], []
    tokens, config = reading.tokens(s, spec, T, model.config.vocab_size), model.config
    blocks, n = dict(enumerate(model.model.layers, start=1)), len(tokens)
    shown, uniform = some(config.num_layers, 4), [attention.uniform_alpha(T, i) for i in range(1, T + 1)]

    def on_state(layer, x):
        x = x.float().abs()
        sums["dominance", layer] += (x.amax(2) / x.mean(2)).sum(0).cpu() / n

    def on_heads(layer, heads, q, k, v):
        sums["std", layer] += attention.moments(heads)
        sums["keys", layer] += F.normalize(k.float(), dim=3).sum(0) / n
        sums["alpha", layer] += attention.mean_attention(q, k, range(1, T + 1)).mean(1).sum(0).cpu() / n

    def on_units(layer, module, inputs):
        sums["units", layer] += inputs[0].float().abs().sum(0).cpu() / n  # (T, d_ff)

    downs = {layer: block.mlp.down_proj for layer, block in blocks.items() if block.mlp}
    handles = [down.register_forward_pre_hook(partial(on_units, layer)) for layer, down in downs.items()]
    for part in attention.batches(tokens):
        model.hidden(part, on_state=on_state, on_heads=on_heads)
    for handle in handles:
        handle.remove()
    for layer, block in blocks.items():
        ranked = super_neurons(layer, block.mlp, sums["units", layer]) if block.mlp else []
        columns = dict(std=attention.spread(sums["std", layer]), alpha=sums["alpha", layer].tolist())
        columns |= dict(dominance_ratio=sums["dominance", layer].tolist(), uniform_alpha=uniform)
        columns["key_alignment"] = sums["keys", layer].norm(dim=2).mean(0).tolist()
        rows += [dict(layer=layer, position=i + 1) | {k: v[i] for k, v in columns.items()} for i in range(T)]
        neurons, columns["super_neurons"] = neurons + ranked, [neuron["ratio"] for neuron in ranked[:T]]
        for name, title in LINKS.items() if layer - 1 in shown else ():
            for i, y in enumerate(columns[name], start=1):
                law = uniform[i - 1] if name == "alpha" else None
                points.append(dict(panel=title, of=f"layer {layer}", x=i, y=y, theory=law))
    neurons.sort(key=lambda neuron: -neuron["ratio"])
    return dict(rows=rows, points=points, super_neurons=neurons[:10])


def super_neurons(layer: int, mlp: MLP, activation: Tensor) -> list[dict]:
    """Every hidden unit of a layer, by its mean |activation| (T, d_ff): how much position 1 stands out.

    `down_share` is the share of the unit's squared output weights that its largest, at `dimension`, holds.
    """
    first, others = activation[0], activation[1:].mean(0).clamp(min=1e-3 * activation.mean())  # none is dead
    gate, down = mlp.gate_proj or mlp.up_proj, mlp.down_proj.weight.float().square().cpu()  # (d, d_ff)
    largest, dimension = down.max(dim=0)
    columns = dict(
        neuron=torch.arange(len(first)), ratio=first / others, first=first, others=others,
        gate_norm=gate.weight.float().norm(dim=1), up_norm=mlp.up_proj.weight.float().norm(dim=1),
        down_norm=down.sum(0).sqrt(), down_share=largest / down.sum(0).clamp(min=1e-30), dimension=dimension,
    )  # fmt: skip
    rows = [dict(zip(columns, row)) for row in zip(*(column.tolist() for column in columns.values()))]
    return sorted((dict(layer=layer) | row for row in rows), key=lambda row: -row["ratio"])


# ---- moved (SO's interventions) ----------------------------------------------------------------------------


def intervene(s: Intervene, spec: str, model: Transformer) -> dict:
    """SO's two interventions and their control: alpha_k by layer, before and after.

    Weights are read before o_k is replaced, so that a layer sees what was done in those before it, and the
    weight that the mask forces token k to give itself does not count. All sequences run at once, for mu.
    """
    T, k, L = s.sequence_length, s.position, model.config.num_layers
    layers, tokens = s.layers or tuple(range(1, L + 1)), reading.tokens(s, spec, T, model.config.vocab_size)
    sweeps = itertools.product(("amplify", "scale"), s.factor)
    rows, points, summary, found, uniform = [], [], [], {}, attention.uniform_alpha(T, k)
    for kind, factor in [("none", None), ("self_mask", None), *sweeps]:
        change = attention.replaced(kind, factor, model, k, layers)
        alpha = attention.attention_to(model, tokens, (k,), change)[..., 0].mean(2).cpu()  # (n, L)
        if not alpha.isfinite().all():
            raise UserError(f"{kind} by {factor} leaves no finite number: choose a smaller --factor")
        key, found[kind, factor] = dict(intervention=kind, factor=factor), alpha
        for layer, values in enumerate(alpha.unbind(1), start=1):
            row = dict(layer=layer, position=k) | key | interval(values, "alpha_k")
            rows.append(row)
            if factor in (None, max(s.factor)):
                panel = f"by layer; factor {max(s.factor):g}"
                point = dict(panel=panel, series=kind, x=layer, alpha=row["alpha_k"], theory=uniform)
                points.append(point | dict(error=row["high"] - row["alpha_k"]))
        base, later = found["none", None], slice(min(layers), L)  # the layers that can tell, in the mean
        row = dict(position=k) | key | interval(alpha[:, later].mean(1), "alpha_k")
        row |= interval((alpha - base)[:, later].mean(1), "shift", "shift_low", "shift_high")
        if kind == "scale":  # and how much more its equal in variance does
            more = (found["amplify", factor] - alpha)[:, later].mean(1)
            row |= interval(more, "amplify_more", "amplify_more_low", "amplify_more_high")
        summary.append(row)
        if factor is not None:
            point = dict(panel="by factor, mean of later layers", series=kind, x=factor, theory=uniform)
            points.append(point | dict(alpha=row["alpha_k"], error=row["high"] - row["alpha_k"]))
    return dict(rows=rows, points=points, summary=summary)


# ---- the experiments ---------------------------------------------------------------------------------------

attention_to = attention.attention_to  # a name that others build on
LINKS = {  # of the chain that `anatomy` follows, with their titles
    "std": "std of aggregated values",
    "super_neurons": "neurons by rank: activation at 1 / elsewhere",
    "dominance_ratio": "dominance ratio of the stream",
    "key_alignment": "alignment of keys over sequences",
    "alpha": "alpha: mean attention to position",
}
EXPERIMENTS = {  # name of the subcommand: its function, settings, file, source and printed columns
    "rate": (rate, Rate, "rate", "BB Figure 12",
        "checkpoint sequence_length sink_rate mean_alpha1 max_alpha1 uniform_alpha1"),
    "variance": (variance, Settings, "sink_variance", "BB Figure 9", "checkpoint layer position std theory"),
    "anatomy": (anatomy, Settings, "anatomy", "SO",
        "checkpoint layer position std dominance_ratio key_alignment alpha"),
    "intervene": (intervene, Intervene, "intervene", "SO",
        "checkpoint layer position intervention factor alpha_k low high"),
}  # fmt: skip


def check(s: Settings) -> None:
    """UserError for settings that do not fit the models, or each other."""
    several = isinstance(s.sequence_length, tuple | None)
    shared_context(s.model, s.sequence_length if several else (s.sequence_length,))
    reading.check(s)
    for spec in s.model:
        if config_of(spec).sublayers == "mlp":
            raise UserError(f"{spec} has no attention, so no sinks")
        if s.attn_calibration != "none" and spec not in PRESETS and isinstance(find(spec), Path):
            raise UserError(f"--attn-calibration is for newborns: {spec} has its own")
    if isinstance(s, Rate) and not 0 < s.epsilon < 1:
        raise UserError(f"--epsilon {s.epsilon}: expected a number between 0 and 1")
    if isinstance(s, Intervene):
        last = min(config_of(spec).num_layers for spec in s.model) - 1
        if s.position > s.sequence_length:
            raise UserError(f"--position {s.position}: the sequence has {s.sequence_length}")
        if last < 1 or not all(1 <= layer <= last for layer in s.layers or ()):
            raise UserError(f"--layers: only a layer after them can tell, so at most {last} for these models")


@torch.inference_mode()
def run(name: str, settings: Settings) -> dict:
    """Make an experiment with every checkpoint; write JSON and figures; returns the JSON."""
    check(settings)
    sample, _, experiment, paper, columns = EXPERIMENTS[name]
    pairs = models(settings.model, settings.seed)
    chosen = {f"{spec}@{seed}" if spec in PRESETS else spec: seed for spec, seed in pairs}
    if len(chosen) < len(pairs):
        raise UserError("a model is named twice")

    def measure(s: Settings, device, dtype) -> dict:
        found = defaultdict(list)
        for label, seed in common.progress(chosen.items(), desc=name, unit=" checkpoints"):
            if seed is None:
                model = load(label, device, dtype)
            else:
                config = replace(config_of(label), attn_calibration=s.attn_calibration)
                model = newborn(config, *find(label)[1:], s.init, device, dtype)
            for key, items in sample(s, label, model).items():
                found[key] += [dict(checkpoint=label) | item for item in items]
        return dict(found)

    def plot(result: dict, folder: Path) -> None:
        if name == "rate":  # all in one figure
            draw("rate", result["points"], folder / "rate.png")
            return plot_heads(result["heads"], folder / "rate_heads.png")
        for label, points in split(result["points"], "checkpoint").items():
            which = "_" + re.sub(r"[^\w.-]+", "_", label).strip("_") if len(chosen) > 1 else ""
            draw(experiment, points, folder / f"{experiment}{which}.png")

    result = conduct(settings, experiment, paper, measure, columns, plot=plot)
    unread = not (settings.data or settings.text) and any(isinstance(find(spec), Path) for spec in chosen)
    if unread and common.rank() == 0:
        print("random tokens were read, as none is trained on: --data or --text names text", file=sys.stderr)
    return result


def plan(words: list[str]) -> list:
    """The settings of a command line, and what to do."""
    name, words = common.subcommand(words, EXPERIMENTS, "rate", "subcommand")
    settings = common.parse_settings(EXPERIMENTS[name][1], __doc__, words)
    return [(settings, partial(run, name, settings))]


if __name__ == "__main__":
    common.run(plan)
