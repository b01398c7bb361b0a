"""Where does attention sink, why, and can it be moved or removed? (BB 6.2; SO)

    python sinks.py --model runs/laptop tiny_llama@42 --data data/python-bpe_4096    # `rate`: how many heads?
    python sinks.py variance --model nano_gpt2              # Equation 2, in every layer of any checkpoint
    python sinks.py anatomy --model runs/backcopy           # from variance to super neurons to sinks
    python sinks.py intervene --model runs/backcopy --position 5           # a sink made to order?

alpha_k, of a head, is how much the queries i >= k attend to position k, on average; positions count from 1. A
head with alpha_k above --epsilon is a sink head at k. Text comes from a prepared data set (--data) or a file
(--text); without either, tokens are random. SO's formulas are not in its abstract: what we had to define
ourselves is called ours.
"""

import itertools
import math
import time
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
import findings
import theory
from attention import interval
from checkpoint import config_of, find, models, obtain, shared_context
from common import UserError, setting
from data import TokenData, documents, sources
from evidence import some
from figures import draw, save_figure
from init import SCHEMES, keyed_generator
from model import MLP, PRESETS, Transformer
from probe import random_tokens
from tokenizer import load_tokenizer

# ---- what is read ------------------------------------------------------------------------------------------


@dataclass
class Settings(common.RunSettings):
    """What every experiment of `sinks.py` can be told."""

    model: tuple[str, ...] = setting(("tiny_llama",), "presets, PRESET@SEED, runs or checkpoint folders")
    seed: tuple[int, ...] = setting((42,), "seeds of the presets' weights")
    init: str = setting("gpt2", "how newborns are drawn", SCHEMES)
    data: str | None = setting(None, "prepared data set to read held-out text from")
    text: str | None = setting(None, "file to read, .txt or .jsonl, or another source of data.py")
    tokenizer: str | None = setting(None, "of --text: bytes or a .model file (default: the checkpoint's own)")
    bos: bool = setting(False, "put the tokenizer's BOS at the first position")
    input_seed: int = setting(0, "seed of random tokens, or of the places in --text")
    num_sequences: int = setting(100, "sequences (Gu et al.: 100)")
    sequence_length: int = setting(64, "tokens in a sequence (Gu et al.: 64)")


@dataclass
class Rate(Settings):
    """What `sinks.py rate` can be told."""

    sequence_length: tuple[int, ...] | None = setting(None, "tokens in a sequence (default: 32 to 512)")
    epsilon: float = setting(0.3, "a head with alpha_1 above this is a sink head (Gu et al.)")


@dataclass
class Intervene(Settings):
    """What `sinks.py intervene` can be told."""

    position: int = setting(5, "k, the position to be made a sink, from 1")
    layers: tuple[int, ...] | None = setting(None, "layers to intervene in, from 1 (default: all)")
    factor: tuple[float, ...] = setting((0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), "lambda of the two sweeps")


def read_text(s: Settings, spec: str, T: int, vocab: int) -> Tensor:
    """What a model reads: (n, T) tokens on the device. UserError for text it cannot read."""
    beside, tokenizer = find(spec), None
    if s.data:
        data = TokenData(s.data)
        tokens, _ = data.windows("val", data.held_out(s.num_sequences, T), T)
        tokenizer = data.load_tokenizer() if s.bos else None
    else:
        tokens = random_tokens(s.input_seed, range(s.num_sequences), T, vocab)
        if s.text or s.bos:
            own = beside / "tokenizer.model" if isinstance(beside, Path) else None
            if not s.tokenizer and not (own and own.is_file()):
                raise UserError(f"{spec} has no tokenizer.model beside it: name one by --tokenizer")
            tokenizer = load_tokenizer(s.tokenizer or str(own))
    if s.text:
        text = "".join(text for file in sources((s.text,)) for text in documents(file, "text", False))
        stream = torch.tensor(next(iter(tokenizer.encode([text]))), dtype=torch.int64)
        if len(stream) < T:
            raise UserError(f"{s.text} has {len(stream)} tokens, too few for a sequence of {T}")
        places = keyed_generator("text", s.input_seed, T).integers(len(stream) - T + 1, size=s.num_sequences)
        tokens = stream.unfold(0, T, 1)[places]
    if s.bos:
        tokens = torch.cat([torch.full_like(tokens[:, :1], tokenizer.bos), tokens[:, 1:]], dim=1)
    if tokens.max() >= vocab:
        raise UserError(f"the text has token {int(tokens.max())}, but {spec} knows {vocab}: which tokenizer?")
    return tokens.to(s.device)


# ---- how much? (BB Figure 12) ------------------------------------------------------------------------------


def rate(s: Rate, spec: str, model: Transformer):
    """Figure 12: the share of sink heads by length, thresholded in each sequence, then averaged."""
    rows, points, context = [], [], model.config.context_length
    for T in s.sequence_length or [T for T in (32, 64, 128, 256, 512) if T <= context] or [context]:
        tokens, row = read_text(s, spec, T, model.config.vocab_size), dict(sequence_length=T)
        alpha, uniform = attention.first_attention(model, tokens), attention.uniform_alpha(T)
        row |= interval(attention.sink_share(alpha, s.epsilon), "sink_rate")
        row |= interval(alpha.mean(dim=(1, 2)), "mean_alpha1", "alpha1_low", "alpha1_high")
        row |= dict(max_alpha1=alpha.mean(0).max().item(), uniform_alpha1=uniform, num_sequences=len(tokens))
        row["heads"] = alpha.mean(0).tolist()
        rows.append(row)
        for panel, y, law in (("sink rate", "sink_rate", None), ("mean alpha_1", "mean_alpha1", uniform)):
            points.append(dict(checkpoint=spec, x=T, y=row[y], theory=law, panel=panel))
    return rows, points, {}


def plot_heads(rows: list[dict], path: Path) -> None:
    """alpha_1 of every layer and head, at the greatest length of each checkpoint."""
    last = list({row["checkpoint"]: row for row in rows}.values())
    figure = Figure(figsize=(1.5 + 3.2 * len(last), 3.4), layout="constrained")
    panels = figure.subplots(1, len(last), squeeze=False)[0]
    for axes, row in zip(panels, last):
        heads = torch.tensor(row["heads"])  # (L, H)
        edges = (0.5, heads.shape[1] + 0.5, heads.shape[0] + 0.5, 0.5)
        image = axes.imshow(heads, cmap="cividis", vmin=0, vmax=1, aspect="auto", extent=edges)
        axes.set(xlabel="head", ylabel="layer", xticks=range(1, len(heads[0]) + 1, 1 + len(heads[0]) // 9))
        axes.set_title(f"{row['checkpoint'][-28:]}, T = {row['sequence_length']}", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="alpha_1")
    save_figure(figure, path)


# ---- why? (Equation 2; SO's chain) -------------------------------------------------------------------------


def variance(s: Settings, spec: str, model: Transformer):
    """Figure 9 in every layer: std of aggregated values, calibrated, just before the output projection.

    `theory` is `theory.aggregated_std`'s, for the first layer of a newborn drawn with the std it assumes.
    """
    sums, rows, T = defaultdict(float), [], s.sequence_length

    def watch(layer, heads, q, k, v):
        sums[layer] += attention.moments(heads)

    for part in attention.batches(read_text(s, spec, T, model.config.vocab_size)):
        model.hidden(part, on_heads=watch)
    born = not isinstance(find(spec), Path) and not (s.text or s.data or s.bos)
    law = theory.aggregated_std(model.config, T, tokens=True).tolist() if born else [None] * T
    for layer, total in sums.items():
        for i, std in enumerate(attention.spread(total)):
            rows.append(dict(layer=layer, position=i + 1, std=std, theory=law[i] if layer == 1 else None))
    shown = [1 + layer for layer in some(model.config.num_layers, 4)]
    return rows, [row for row in rows if row["layer"] in shown], {}


def anatomy(s: Settings, spec: str, model: Transformer):
    """SO's chain, link by link and position by position; `super_neurons` has the ten strongest.

    A super neuron's `ratio` is its mean |activation| at the first position over that at the others (ours);
    `dominance_ratio` is max|h| / mean|h| of the stream after the layer; `key_alignment`, ours, is the length
    of the mean of all sequences' keys, each scaled to length 1: 1 where they have collapsed into one.
    """
    T, sums, rows, points, neurons = s.sequence_length, defaultdict(float), [], [], []
    tokens, config = read_text(s, spec, T, model.config.vocab_size), model.config
    blocks, n = dict(enumerate(model.model.layers, start=1)), len(tokens)

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
    try:
        for part in attention.batches(tokens):
            model.hidden(part, on_state=on_state, on_heads=on_heads)
    finally:
        for handle in handles:
            handle.remove()
    for layer, block in blocks.items():
        alpha, keys = sums["alpha", layer], sums["keys", layer].norm(dim=2).mean(0).cpu()
        columns = (
            attention.spread(sums["std", layer]),
            sums["dominance", layer].tolist(),
            keys.tolist(),
            alpha.tolist(),
        )
        for i, values in enumerate(zip(*columns), start=1):
            rows.append(dict(layer=layer, position=i) | dict(zip(LINKS, values)))
        neurons += super_neurons(layer, block.mlp, sums["units", layer]) if block.mlp and T > 1 else []
    neurons.sort(key=lambda neuron: -neuron["ratio"])
    shown = [1 + layer for layer in some(config.num_layers, 4)]
    for (key, title), row in itertools.product(LINKS.items(), rows):
        if row["layer"] in shown:
            law = attention.uniform_alpha(T, row["position"]) if key == "alpha" else None
            points.append(dict(panel=title, layer=row["layer"], x=row["position"], y=row[key], theory=law))
    for layer in shown:
        ranked = [neuron["ratio"] for neuron in neurons if neuron["layer"] == layer][:T]
        key = dict(panel="neurons by rank: activation at 1 / elsewhere", layer=layer, theory=None)
        points += [key | dict(x=i, y=ratio) for i, ratio in enumerate(ranked, start=1)]
    return rows, points, dict(super_neurons=[dict(checkpoint=spec) | neuron for neuron in neurons[:10]])


def super_neurons(layer: int, mlp: MLP, activation: Tensor) -> list[dict]:
    """Every hidden unit of a layer, by its mean |activation| (T, d_ff): how much position 1 stands out.

    `down_share` is the share of the unit's squared output weights that its largest, at `dimension`, holds.
    """
    first, others = activation[0], activation[1:].mean(0)
    gate, down = mlp.gate_proj or mlp.up_proj, mlp.down_proj.weight.float().square().cpu()  # (d, d_ff)
    largest, dimension = down.max(dim=0)
    columns = dict(
        neuron=torch.arange(len(first)), ratio=first / others.clamp(min=1e-30), first=first, others=others,
        gate_norm=gate.weight.float().norm(dim=1), up_norm=mlp.up_proj.weight.float().norm(dim=1),
        down_norm=down.sum(0).sqrt(), down_share=largest / down.sum(0), dimension=dimension,
    )  # fmt: skip
    values = zip(*(column.tolist() for column in columns.values()))
    return [dict(layer=layer) | dict(zip(columns, row)) for row in values]


# ---- moved (SO's interventions) ----------------------------------------------------------------------------


def intervene(s: Intervene, spec: str, model: Transformer):
    """SO's two interventions and their control: alpha_k by layer, before and after.

    Weights are read before o_k is replaced, so that a layer sees what was done in those before it, and the
    weight that the mask forces token k to give itself does not count. All sequences run at once, for mu.
    """
    T, k, L = s.sequence_length, s.position, model.config.num_layers
    layers, tokens = s.layers or tuple(range(1, L + 1)), read_text(s, spec, T, model.config.vocab_size)
    sweeps = itertools.product(("amplify", "scale"), s.factor)
    rows, points, summary, base, uniform = [], [], [], None, attention.uniform_alpha(T, k)
    for kind, factor in [("none", None), ("self_mask", None), *sweeps]:
        change = attention.replaced(kind, factor, model, k, layers)
        alpha = attention.attention_to(model, tokens, (k,), change)[..., 0].mean(2).cpu()  # (n, L)
        base, key = alpha if base is None else base, dict(intervention=kind, factor=factor)
        for layer, values in enumerate(alpha.unbind(1), start=1):
            row = dict(layer=layer, position=k) | key | interval(values, "alpha_k")
            rows.append(row)
            if factor in (None, max(s.factor)):
                series = kind if factor is None else f"{kind}, factor {factor:g}"
                point = dict(panel="by layer", series=series, x=layer, alpha=row["alpha_k"], theory=uniform)
                points.append(point | dict(error=row["high"] - row["alpha_k"]))
        if min(layers) < L:  # what the layers that can tell say, in the mean
            later, shift = (values[:, min(layers) :].mean(1) for values in (alpha, alpha - base))
            row = dict(checkpoint=spec, position=k) | key | interval(later, "alpha_k")
            summary.append(row | interval(shift, "shift", "shift_low", "shift_high"))
            if factor is not None:
                point = dict(panel="by factor, mean of later layers", series=kind, x=factor, theory=uniform)
                points.append(point | dict(alpha=row["alpha_k"], error=row["high"] - row["alpha_k"]))
    return rows, points, dict(summary=summary)


# ---- the experiments ---------------------------------------------------------------------------------------

attention_to = attention.attention_to
LINKS = {  # of the chain that `anatomy` follows, with their titles
    "std": "std of aggregated values",
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
    lengths = s.sequence_length if isinstance(s.sequence_length, tuple) else (s.sequence_length,)
    shared_context(s.model, () if s.sequence_length is None else lengths)
    if s.num_sequences < 2 or (s.data and s.text):
        raise UserError("expected at least 2 for --num-sequences, and one of --data and --text")
    if any(config_of(spec).sublayers == "mlp" for spec in s.model):
        raise UserError("a model without attention has no sinks")
    if isinstance(s, Rate) and not 0 < s.epsilon < 1:
        raise UserError(f"--epsilon {s.epsilon}: expected a number between 0 and 1")
    if isinstance(s, Intervene):
        layers = min(config_of(spec).num_layers for spec in s.model)
        if not 1 <= s.position <= s.sequence_length:
            raise UserError(
                f"--position {s.position}: expected 1 to {s.sequence_length}, the sequence's length"
            )
        if not all(1 <= layer <= layers for layer in s.layers or ()):
            raise UserError(f"--layers {' '.join(map(str, s.layers))}: expected 1 to {layers}")
        if not all(map(math.isfinite, s.factor)):
            raise UserError("--factor: expected finite numbers")


@torch.inference_mode()
def run(name: str, s: Settings) -> dict:
    """Make an experiment with every checkpoint, judge it, write JSON and figure; returns the JSON."""
    sample, _, experiment, paper, columns = EXPERIMENTS[name]
    check(s)
    device, dtype = common.start(s)
    s, started = replace(s, device=str(device), dtype=str(dtype).removeprefix("torch.")), time.perf_counter()
    rows, drawn, more = [], {}, {}
    for spec, seed in common.progress(models(s.model, s.seed), desc=name, unit=" checkpoints"):
        label = f"{spec}@{seed}" if spec in PRESETS else spec
        model = obtain(spec, seed, None, s.init, device, dtype)
        if not all(weight.isfinite().all() for weight in model.parameters()):
            raise UserError(f"{label}: a weight is not finite")
        found, points, extra = sample(s, label, model)
        rows += [dict(checkpoint=label) | row for row in found]
        drawn[label] = [dict(checkpoint=label) | point for point in points]
        for key, items in extra.items():
            more[key] = more.get(key, []) + items
    claims = getattr(findings, experiment)(more.get("summary", rows))
    more["environment"] = common.environment(device, dtype, started)
    result = common.report(s, experiment, paper, rows, claims, columns, **more)
    out = Path(s.out)
    if name == "rate":
        drawn = {"": [point for points in drawn.values() for point in points]}  # in one figure
        plot_heads(rows, out / "rate_heads.png")
    for i, points in enumerate(drawn.values(), start=1):
        draw(experiment, points, out / (f"{experiment}_{i}.png" if len(drawn) > 1 else f"{experiment}.png"))
    return result


def main() -> None:
    """Parse the command line and make the experiment."""
    name, arguments = common.subcommand(EXPERIMENTS, "rate", "subcommand")
    run(name, common.parse_settings(EXPERIMENTS[name][1], __doc__, arguments))


if __name__ == "__main__":
    common.run(main)
