"""Why does a newborn prefer tokens? Its states contract: every mechanism of BB section 4, with its theory.

    python contraction.py                        # all of them, about ten minutes on 2 cores
    python contraction.py layers --seed 42       # Figures 2 and 7: which sublayer contracts, layer by layer
    torchrun --nproc-per-node 2 contraction.py overlap --seed {0..99} --num-sequences 2000

Inputs are Gaussian vectors like embeddings (BB 4.1), but tokens in `overlap`, `predict` and `cure`.
"""

import lib.interrupt  # noqa: F401 # isort: skip
import functools
import itertools
import math
import time
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal

import torch
import torch.nn.functional as F

from init import SCHEMES, STD, newborn, variant
from lib.checkpoint import check_lengths, chosen_models, shortest_context
from lib.figures import between, curves, name_models
from lib.inputs import random_vectors
from lib.results import Experiment, mean_over_seeds
from lib.runtime import progress
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from measure import theory
from measure.cosines import floored_cosine, pairwise_cosine, uniform_counts
from model import ACTIVATIONS, PRESETS, ModelConfig, rope_table
from probe import RANKS, count_predictions, preference

TEN_SEEDS = tuple(range(42, 52))
WIDTHS = (128, 256, 512, 1024)  # of `width`
PARTS = {"full": "the whole model", "mlp": "MLPs alone", "attention": "attention alone"}
BIASED = 0.45  # mean cosine that axes reach at least, so that no bias looks like none


@dataclass
class SeedSettings(RunSettings):
    """What every experiment can be told."""

    seed: tuple[int, ...] = tuple(range(42, 50))
    """seeds of the presets' weights"""
    input_seed: int = 0
    """seed of the random inputs"""
    num_sequences: at_least(2) = 300
    """random sequences, or vectors, for each seed and length"""


@dataclass
class BlockSettings(SeedSettings):
    """What an experiment on the blocks of a model can be told."""

    model: tuple[str, ...] = ("nano_gpt2",)
    """presets, PRESET@SEED, or checkpoint folders"""
    init: Literal[SCHEMES] = "gpt2"
    """how newborns are drawn"""


@dataclass
class PositionSettings(BlockSettings):
    """What an experiment on several positions can be told."""

    sequence_length: tuple[int, ...] = (64,)
    """positions in a sequence"""


@dataclass
class ProbeSettings(PositionSettings):
    """What an experiment on whole models can be told."""

    embedding_seed: int | None = None
    """seed of embedding and head (default: the seed)"""
    batch_size: at_least(1) | None = None
    """sequences in a forward pass (default: 2048 tokens' worth; on CUDA 65536)"""


# ---- how an experiment runs --------------------------------------------------------------------------------


EXPERIMENTS: dict[str, Command] = {}  # each enters itself
FIGURES = {}  # and what draws its result


def experiment(paper, defaults: BlockSettings, finding=None, averaged=(), columns=(), **figure):
    """Make an experiment of a function that samples one model.

    The function takes settings and a Spec, and returns rows, and points to draw (none: the rows). Rows that
    differ in their seed and in the `averaged` values only become one; `columns` are printed. `finding(rows)`
    is the figure's title, if there is one, and `figure` what else `curves` is told.
    """

    def register(sample):
        name = sample.__name__
        draw = functools.partial(draw_experiment, name, finding, figure)

        @functools.wraps(sample)
        def run(settings: BlockSettings):
            return run_experiment(sample, paper, settings, defaults, averaged, columns, draw)

        EXPERIMENTS[name] = Command(run, defaults)
        FIGURES[name] = draw
        return run

    return register


@torch.inference_mode()
def run_experiment(sample, paper, settings: BlockSettings, defaults, averaged, columns, draw):
    """Sample every model that the settings name; average, draw and save the rows."""
    name = sample.__name__
    embedding_seed = getattr(settings, "embedding_seed", None)
    specs = chosen_models(settings.model, settings.seed, embedding_seed, settings.init)
    record = Experiment(name, paper, fit_settings(settings, defaults, specs))
    rows, points = [], []
    for spec in progress(specs, desc=name, unit=" models"):
        new_rows, new_points = sample(record.settings, spec)
        key = {"model": spec.name}
        if spec.name not in {point["model"] for point in points}:  # of several seeds, the first is drawn
            points += [key | point for point in new_points]
        if not averaged:
            key["seed"] = spec.seed
        if not spec.is_newborn:
            new_rows = [without_theory(row) for row in new_rows]
        rows += [key | row for row in new_rows]
    if averaged:
        rows = mean_over_seeds(rows, averaged)
    return record.save(rows, columns, draw, points=points)


def draw_experiment(name, finding, figure, result, folder) -> None:
    """<name>.png: the points of a result, or its rows where it has none; its title says what was found."""
    series = figure["series"]
    names = figure.get("names", {})
    shown = result["points"] or result["rows"]
    if names:  # a series without a name is not drawn
        shown = [point for point in shown if point[series] in names]
    by_model = {}
    for row in result["rows"]:
        by_model.setdefault(row["model"], []).append(row)
    title = ""
    if finding:
        title = "; ".join(f"{model}: {finding(rows)}" for model, rows in by_model.items())
    curves(name_models(shown, series, names), folder / f"{name}.png", title=title, **figure)


def last_values(rows, key, value):
    """The value in the last row of each kind: of the last layer, the longest sequence, the largest model."""
    return {row[key]: row[value] for row in rows}


def fit_settings(settings: BlockSettings, defaults: BlockSettings, specs) -> BlockSettings:
    """The settings, with lengths that the models can read; in float32 where whole models are not read.

    UserError for a length of the user's own that is too long, and for models without attention or MLPs.
    """
    for spec in specs:
        if spec.config.sublayers != "full" or spec.config.num_layers < 2:
            raise UserError("expected models of attention and MLPs, and of two layers or more")
    if not isinstance(settings, ProbeSettings):
        settings = replace(settings, dtype="float32")
    if not isinstance(settings, PositionSettings):
        return settings
    context = shortest_context(specs)
    if settings.sequence_length != defaults.sequence_length:
        check_lengths(settings.sequence_length, context)
    lengths = tuple(T for T in settings.sequence_length if T <= context)
    return replace(settings, sequence_length=lengths or (context,))


def without_theory(row):
    """The row of a trained model: theory, which is of newborns, is null."""
    theories = ("theory", "exact_theory", "uniform_theory", "predicted_cosine")
    return row | {name: None for name in theories if name in row}


def load_blocks(settings: BlockSettings, spec, **changes):
    """A model with another configuration, in float32; a newborn comes without vocabulary.

    Its `block.mlp` alone is MLP0 (BB Definition 1).
    """
    if not spec.is_newborn:
        return variant(spec.load(settings.device), **changes)
    config = replace(spec.config, vocab_size=1, **changes)
    return newborn(config, spec.seed, scheme=spec.scheme, device=settings.device)


def gaussian_inputs(settings: SeedSettings, T, d):
    """Gaussian vectors in place of embeddings, (num_sequences, T, d)."""
    indices = range(settings.num_sequences)
    return random_vectors(settings.input_seed, indices, T, d).to(settings.device)


# ---- which sublayer contracts? (BB 4.1) --------------------------------------------------------------------


def ablated(settings: ProbeSettings, spec):
    """(key of a row, model, counts) of the full model, of its MLPs only and of its attention only."""
    model = spec.load(settings.device, settings.torch_dtype)
    for kind in ("full", "mlp", "attention"):
        part = variant(model, sublayers=kind)
        for T in settings.sequence_length:
            counts = count_predictions(
                part,
                T,
                settings.num_sequences,
                settings.batch_size,
                settings.input_seed,
                vectors=True,
            )
            yield {"variant": kind, "sequence_length": T}, part, counts


def contraction_of_parts(rows):
    """What `layers` found."""
    cosines = last_values(rows, "variant", "mean_cosine")
    text = f"after the last layer, unrelated sequences of {rows[-1]['sequence_length']} tokens have a mean "
    text += f"cosine of {cosines['full']:z.3f}; "
    return text + f"with MLPs alone {cosines['mlp']:z.3f}, with attention alone {cosines['attention']:z.3f}"


@experiment(
    "BB Figures 2, 7",
    ProbeSettings(num_sequences=24, sequence_length=(64, 512)),
    contraction_of_parts,
    averaged=("mean_cosine", "std_cosine"),
    x="layer",
    y="mean_cosine",
    series="variant",
    panel="sequence_length",
    theories={"theory": "kernel recursion"},
    band="std_cosine",
    band_label="std of pairs",
    names=PARTS,
    highest=BIASED,
)
def layers(settings: ProbeSettings, spec):
    """Which sublayer contracts, layer by layer? Cosine of two sequences' last positions (BB Figures 2, 7)"""
    rows = []
    for key, model, counts in ablated(settings, spec):
        law, _ = theory.kernel_recursion(model.config, key["sequence_length"], settings.init)
        for layer, statistics in enumerate(counts["layers"]):
            mean, std = statistics.mean_and_std()
            rows.append(key | {"layer": layer, "mean_cosine": mean, "std_cosine": std, "theory": law[layer]})
    return rows, []


def favourites_of_parts(rows):
    """What `ablation` found, of the seed that is drawn."""
    rows = [row for row in rows if row["seed"] == rows[0]["seed"]]
    ratios = last_values(rows, "variant", "ratio")
    text = (
        f"after {rows[-1]['sequence_length']:,} tokens the favourite comes up {ratios['full']:.1f} times as "
    )
    text += f"often as the most frequent of uniform draws; with MLPs alone {ratios['mlp']:.1f}, "
    return text + f"with attention alone {ratios['attention']:.1f} times"


@experiment(
    "BB Figure 3, Table 2",
    ProbeSettings(embedding_seed=0, seed=(42,), num_sequences=500),
    favourites_of_parts,
    columns=("model", "seed", "variant", "top1_token", "ratio", "log10_p", "mean_cosine", "cosine_log10_p"),
    x="rank",
    y="count",
    series="variant",
    panel="sequence_length",
    theories={"theory": "uniform draws"},
    ticks=(1, 5, 10, 15, 20),
    names=PARTS,
    lowest=0,
    xlabel="rank of the predicted token",
    ylabel="sequences that predict it",
)
def ablation(settings: ProbeSettings, spec):
    """Do MLPs alone, or attention alone, prefer tokens? (BB Figure 3, Table 2)"""
    rows, points = [], []
    for key, model, counts in ablated(settings, spec):
        row = key | preference(model, counts)
        row["cosine_log10_p"] = counts["cosines"].log10_p()
        rows.append(row)
        ranked = counts["token_counts"].sort(descending=True).values.tolist()
        uniform = uniform_counts(settings.num_sequences, model.config.vocab_size, RANKS).tolist()
        for rank, (count, law) in enumerate(zip(ranked, uniform), start=1):
            points.append(key | {"rank": rank, "count": count, "theory": law})
    return rows, points


# ---- the MLP's asymmetric activation (BB 4.2) --------------------------------------------------------------


def contraction_of_activations(rows):
    """What `mlp` found."""
    cosines = last_values(rows, "stack", "mean_cosine")
    text = f"bare MLPs contract to a cosine of {cosines['mlp0_relu']:z.2f} with ReLU, of "
    text += (
        f"{cosines['mlp0_tanh']:z.2f} with tanh; MLPs with norm and residual to {cosines['standard']:z.2f}"
    )
    return text


@experiment(
    "BB Figures 4, 5, Proposition 2",
    BlockSettings(seed=TEN_SEEDS),
    contraction_of_activations,
    averaged=("mean_cosine", "std_cosine"),
    x="layer",
    y="mean_cosine",
    series="stack",
    theories={"theory": "Proposition 2; kernel recursion"},
    names={
        "mlp0_relu": "bare, ReLU",
        "mlp0_tanh": "bare, tanh",
        "standard": "norm and residual",
        "standard_relu": "norm and residual, ReLU",
    },
)
def mlp(settings: BlockSettings, spec):
    """Does the activation's asymmetry contract stacks of MLPs? (BB Figures 4, 5, Proposition 2)"""
    standard = load_blocks(settings, spec, sublayers="mlp")
    relu = variant(standard, mlp="relu")
    tanh = variant(standard, mlp="tanh")
    depth = standard.config.num_layers
    x = gaussian_inputs(settings, 1, standard.config.d_model)  # (n, 1, d)
    rows = []
    for layer, (state, law) in enumerate(zip(mlp0_states(relu, x), theory.relu_recursion(depth))):
        key = {"stack": "mlp0_relu", "layer": layer, "theory": law}
        rows.append(key | pairwise_cosine(state))
        key = {"stack": "mlp0_relu_epsilon", "layer": layer, "theory": None}
        rows.append(key | floored_cosine(state, epsilon=1e-8))  # as torch's `cosine_similarity` has it
    rows += cosine_rows("mlp0_tanh", mlp0_states(tanh, x), [0.0] * (depth + 1))
    for stack, model in (("standard", standard), ("standard_relu", relu)):
        law, _ = theory.kernel_recursion(model.config, 1, settings.init)
        rows += cosine_rows(stack, stream_states(model, x), law)
    return rows, []


def mlp0_states(model, x):
    """States (n, d) before and after each MLP of a stack without norm and residual (BB Definition 1)."""
    states = [x[:, 0]]
    for block in model.model.layers:
        states.append(block.mlp(states[-1]))
    return states


def stream_states(model, x):
    """The residual stream of vectors (n, 1, d) before and after each block, (n, d) each."""
    states = []

    def on_state(layer, stream):
        states.append(stream[:, 0])

    model.hidden(x, on_state=on_state)
    return states


def cosine_rows(stack, states, law):
    """A row for each layer of a stack: the cosine of its states, and the theory's."""
    rows = []
    for layer, (state, cosine) in enumerate(zip(states, law)):
        rows.append({"stack": stack, "layer": layer, "theory": cosine} | pairwise_cosine(state))
    return rows


def spread_of_preactivations(rows):
    """What `engage` found."""
    stds = last_values(rows, "normed", "preactivation_std")
    cosines = last_values(rows, "normed", "mean_cosine")
    text = f"with the norm, pre-activations have a std of {stds[True]:.2f} and outputs a cosine of "
    return text + f"{cosines[True]:z.3f}; without it, {stds[False]:.3f} and {cosines[False]:z.4f}"


@experiment(
    "BB Figure 6",
    BlockSettings(seed=TEN_SEEDS),
    spread_of_preactivations,
    averaged=("mean_cosine", "std_cosine", "preactivation_std"),
    x="z",
    y="y",
    series="curve",
    panel="panel",
    panels_in_a_row=1,
    theories={"half": "half the input: no asymmetry"},
    style="-",
    share="x",
    xlabel="pre-activation",
    ylabel="",
)
def engage(settings: BlockSettings, spec):
    """Does LayerNorm spread pre-activations until the asymmetry tells? (BB Figure 6)"""
    model = load_blocks(settings, spec, sublayers="mlp", num_layers=1)
    config = model.config
    (block,) = model.model.layers
    x = gaussian_inputs(settings, 1, config.d_model)[:, 0]  # (n, d)
    gate = block.mlp.gate_proj or block.mlp.up_proj
    rows, points = [], []
    heights = {}  # of each curve to draw, over z
    for normed in (True, False):
        inputs = block.post_attention_layernorm(x) if normed else x
        preactivation = gate(inputs)  # (n, d_ff)
        expected_std = STD * inputs.square().sum(1).mean().sqrt().item()
        row = {
            "normed": normed,
            "theory": theory.one_block_cosine(config.mlp, expected_std, config.d_model),
            "preactivation_std": preactivation.std().item(),
        }
        rows.append(row | pairwise_cosine(block.mlp(inputs)))
        density = torch.histc(preactivation, 81, -2.025, 2.025)  # bins about the z
        heights["with the norm" if normed else "without it"] = density / density.max()
    z = torch.linspace(-2, 2, 81, dtype=torch.float64)
    for value, height in zip(z.tolist(), ACTIVATIONS[config.mlp](z).tolist()):
        key = {"panel": "the activation", "curve": config.mlp}
        points.append(key | {"z": value, "y": height, "half": value / 2})
    for curve, values in heights.items():
        for value, height in zip(z.tolist(), values.tolist()):
            key = {"panel": "density of pre-activations (largest = 1)", "curve": curve}
            points.append(key | {"z": value, "y": height, "half": None})
    return rows, points


# ---- attention amplifies (BB 4.3, 4.4) ---------------------------------------------------------------------


def amplification(rows):
    """What `amplify` found."""
    cosines = last_values(rows, "stack", "mean_cosine")
    text = (
        f"the cosine is {cosines['mlp0']:z.2f} after a ReLU MLP, {cosines['mlp0_mlp0']:z.2f} after a second "
    )
    return (
        text + f"one, {cosines['mlp0_attn0']:z.3f} in the mean over {rows[-1]['sequence_length']:,} positions"
    )


@experiment(
    "BB Table 3, Proposition 4",
    PositionSettings(seed=TEN_SEEDS, num_sequences=20, sequence_length=(100, 128, 1024)),
    amplification,
    averaged=("mean_cosine", "std_cosine"),
    x="sequence_length",
    y="mean_cosine",
    series="stack",
    theories={"theory": "Propositions 2 and 4"},
    log="x",
    ticks=(100, 128, 256, 512, 1024),
    xlabel="positions",
    names={"mlp0": "a ReLU MLP", "mlp0_mlp0": "two of them", "mlp0_attn0": "one, then mean over positions"},
    lowest=0,
)
def amplify(settings: PositionSettings, spec):
    """Does averaging amplify what a ReLU MLP began? (BB Table 3, Proposition 4)"""
    model = load_blocks(settings, spec, sublayers="mlp", mlp="relu", num_layers=2)
    first_mlp, second_mlp = (block.mlp for block in model.model.layers)
    _, once, twice = theory.relu_recursion(2)
    rows = []
    for T in settings.sequence_length:
        sequences = [first_mlp(x) for x in gaussian_inputs(settings, T, model.config.d_model)]  # (T, d) each
        last = torch.stack([x[-1] for x in sequences])  # (n, d)
        mean = torch.stack([x.mean(0) for x in sequences])
        stacks = {
            "mlp0": (last, once),
            "mlp0_mlp0": (second_mlp(last), twice),
            "mlp0_attn0": (mean, theory.amplifier(once, T)),
        }
        for stack, (states, law) in stacks.items():
            key = {"stack": stack, "sequence_length": T, "theory": law}
            rows.append(key | pairwise_cosine(states))
    return rows, []


def likeness_of_positions(rows):
    """What `intra` found."""
    cosines = last_values(rows, "stack", "mean_cosine")
    text = (
        f"without residual, positions of a sequence have a mean cosine of {cosines['attention']:.4f} after "
    )
    return text + f"{rows[-1]['layer']} layers of attention, with uniform weights {cosines['attn0']:.4f}"


@experiment(
    "BB Figure 8, Proposition 5",
    PositionSettings(num_sequences=4, sequence_length=(32, 128, 512)),
    likeness_of_positions,
    averaged=("mean_cosine",),
    x="layer",
    y="mean_cosine",
    series="stack",
    panel="sequence_length",
    theories={"exact_theory": "exact in T", "limit_theory": "Proposition 5: infinite T"},
    ylabel="mean cosine within a sequence",
    names={"attn0": "uniform weights", "attention": "attention"},
    lowest=0.5,
)
def intra(settings: PositionSettings, spec):
    """Does attention, without residual, make a sequence's positions alike? (BB Figure 8, Proposition 5)"""
    model = load_blocks(settings, spec, sublayers="attention")
    config = model.config
    rows = []
    for T in settings.sequence_length:
        x = gaussian_inputs(settings, T, config.d_model)  # (n, T, d)
        count = torch.arange(1, T + 1, device=settings.device)[:, None]  # (T, 1)
        rope = rope_table(config, x)
        _, attention_law = theory.kernel_recursion(config, T, settings.init, residual=False)
        laws = {"attn0": theory.averaging_stack(T, config.num_layers), "attention": attention_law[1:]}
        limits = theory.averaging_limit(T, config.num_layers)
        for stack, law in laws.items():
            state = x
            for layer, (block, exact, limit) in enumerate(zip(model.model.layers, law, limits), start=1):
                if stack == "attn0":
                    state = state.cumsum(1) / count
                else:
                    state = block.self_attn(block.input_layernorm(state), rope, False, None)
                unit = F.normalize(state.double(), dim=2, eps=0)
                row = {
                    "stack": stack,
                    "sequence_length": T,
                    "layer": layer,
                    "exact_theory": exact,
                    "limit_theory": limit,
                    "mean_cosine": unit.mean(1).square().sum(1).mean().item(),
                }
                rows.append(row)
    return rows, []


def shrinking(rows):
    """What `variance` found of a model."""
    last = rows[-1]["position"]
    ratio = rows[-1]["std"] / rows[0]["std"]
    text = f"values aggregated at position {last:,} vary {ratio:.3f} times as much as at position 1"
    return f"{text} (Equation 2: {last**-0.5:.3f})"


@experiment(
    "BB Figure 9, Equation 2",
    PositionSettings(model=("nano_gpt2", "gpt2_1b"), seed=(42,), num_sequences=32, sequence_length=(1024,)),
    shrinking,
    averaged=("std",),
    x="position",
    y="std",
    series="model",
    theories={"theory": "with the logits' variance", "uniform_theory": "Equation 2: uniform"},
    style="-",
    log="xy",
    ylabel="std of aggregated values",
)
def variance(settings: PositionSettings, spec):
    """Do the first block's aggregated values shrink along the positions? (BB Figure 9, Equation 2)"""
    model = load_blocks(settings, spec, sublayers="attention", num_layers=1)
    config = model.config
    T = max(settings.sequence_length)  # shorter sequences are the beginnings of the longest
    squares = []

    def on_heads(layer, heads, q, k, v):  # heads: (1, H, T, Dh)
        squares.append(heads.double().square().mean((0, 1, 3)))

    for i in range(settings.num_sequences):
        x = random_vectors(settings.input_seed, range(i, i + 1), T, config.d_model)
        model.hidden(x.to(settings.device), on_heads=on_heads)
    measured = torch.stack(squares).mean(0).sqrt().tolist()
    law = theory.aggregated_std(config, T).tolist()
    rows = []
    for i, (std, expected) in enumerate(zip(measured, law), start=1):
        uniform = law[0] / math.sqrt(i)
        rows.append({"position": i, "std": std, "uniform_theory": uniform, "theory": expected})
    return rows, []


# ---- from weights to favourite tokens, and the cure (Finding 2.2, and ours) --------------------------------


def on_tokens(settings: ProbeSettings, spec, scheme):
    """A newborn on random tokens beside what its weights alone foretell: rows by length, points to draw."""
    drawn_by = "gpt2" if scheme == "projected" else scheme
    model = replace(spec, scheme=drawn_by).load(settings.device, settings.torch_dtype)
    if scheme == "projected":
        theory.project_out_mean_output(model)
    squares = [block.mlp.down_proj.weight.float().square().mean().item() for block in model.model.layers]
    rows, points = [], []
    for T in settings.sequence_length:
        begun = time.perf_counter()
        foreseen, mean_field_cosine = theory.mean_field(model, T)
        seconds = time.perf_counter() - begun
        counts = count_predictions(model, T, settings.num_sequences, settings.batch_size, settings.input_seed)
        row = {"init": scheme, "sequence_length": T} | preference(model, counts)
        direction = F.normalize(counts["cosines"].direction().cpu(), dim=0)
        law, _ = theory.kernel_recursion(model.config, T, scheme)
        row |= {
            "direction_count": int(counts["token_counts"][row["direction_token"]]),
            "runner_up_count": int(counts["token_counts"].topk(2).values[1]),
            "direction_cosine": float(foreseen @ direction),
            "predicted_token": int(model.unembed(foreseen.to(settings.device, torch.float32)).argmax()),
            "mean_field_cosine": mean_field_cosine,
            "predicted_cosine": law[-1],
            "seconds": seconds,
            "down_std": math.sqrt(sum(squares) / len(squares)),
        }
        rows.append(row)
        for predicted, measured in zip(foreseen.tolist(), direction.tolist()):
            points.append({"predicted": predicted, "measured": measured})
    return rows, points


def matches(rows):
    """What `overlap` found."""
    count = sum(row["direction_matches"] for row in rows)
    return f"the most frequent token is that of the contraction direction in {count} of {len(rows)} rows"


@experiment(
    "BB Finding 2.2",
    ProbeSettings(embedding_seed=0, num_sequences=400),
    matches,
    columns=("model", "seed", "top1_token", "top1_count", "direction_token", "direction_count"),
    x="direction_count",
    y="top1_count",
    series="direction_matches",
    names={True: "the direction's token is the most frequent", False: "another token is"},
    theories={"direction_count": "equal counts"},
    style="o",
    xlabel="sequences that predict the direction's token",
    ylabel="sequences that predict the most frequent one",
)
def overlap(settings: ProbeSettings, spec):
    """Is the token of the contraction direction the most frequent one? (BB Finding 2.2)"""
    rows, _ = on_tokens(settings, spec, settings.init)
    return rows, []


def foresight(rows):
    """What `predict` found."""
    cosines = [row["direction_cosine"] for row in rows]
    text = "the direction that the weights foretell has a cosine with the measured one of "
    return text + f"{between(cosines, '.3f')} over {len(rows)} rows"


@experiment(
    "ours",
    ProbeSettings(embedding_seed=0, num_sequences=400),
    foresight,
    columns=("model", "seed", "direction_cosine", "predicted_token", "direction_token", "mean_cosine"),
    x="predicted",
    y="measured",
    series="model",
    theories={"predicted": "equal"},
    style=".",
    xlabel="unit direction predicted from the weights",
    ylabel="unit direction measured",
)
def predict(settings: ProbeSettings, spec):
    """Do the weights alone, without a forward pass, foretell the direction and its token? (ours)"""
    return on_tokens(settings, spec, settings.init)


def cured(rows):
    """What `cure` found."""
    texts = []
    for scheme, part in itertools.groupby(sorted(rows, key=itemgetter("init")), itemgetter("init")):
        cosines = [row["mean_cosine"] for row in part]
        texts.append(f"{scheme} {sum(cosines) / len(cosines):z.4f}")
    return f"mean cosine of unrelated sequences at birth, by how weights are drawn: {', '.join(texts)}"


@experiment(
    "ours",
    ProbeSettings(embedding_seed=0, num_sequences=120),
    cured,
    columns=("model", "seed", "init", "mean_cosine", "top1_token", "top1_count", "log10_p"),
    x="seed",
    y="mean_cosine",
    series="init",
    theories={"predicted_cosine": "kernel recursion"},
    style="o",
    highest=BIASED,
)
def cure(settings: ProbeSettings, spec):
    """Is a newborn unbiased whose down projections pass on nothing that all hidden units share? (ours)"""
    if not spec.is_newborn or settings.init != "gpt2":
        raise UserError("cure draws presets in three ways: give --model a preset, and no --init")
    rows = []
    for scheme in ("gpt2", "centered", "projected"):
        new_rows, _ = on_tokens(settings, spec, scheme)
        rows += new_rows
    return rows, []


@torch.inference_mode()
def width(settings: SeedSettings):
    """How does the contraction of one MLP0 block depend on its width? (ours)"""
    record = Experiment("width", "ours", replace(settings, dtype="float32"))
    rows = []
    for seed in progress(settings.seed, desc="width", unit=" seeds"):
        rows += sample_width(record.settings, seed)
    return record.save(mean_over_seeds(rows, ("mean_cosine", "std_cosine")), draw=draw_width)


def sample_width(settings: SeedSettings, seed):
    """One MLP0 block, GELU and SwiGLU, on unit-variance inputs, for four widths and two weight stds."""
    rows = []
    for kind, scaling, d in itertools.product(("gelu", "swiglu"), ("1/sqrt(d)", STD), WIDTHS):
        std = STD if scaling == STD else d**-0.5
        config = ModelConfig(1, 1, 1, 1, d_model=d, d_ff=4 * d, mlp=kind, sublayers="mlp")
        block = newborn(config, seed, scheme="normal", device=settings.device).model.layers[0].mlp
        for weight in block.parameters():
            weight.mul_(std / STD)
        row = {
            "mlp": kind,
            "d_model": d,
            "weight_std": std,
            "scaling": f"weight std {scaling}",
            "theory": theory.one_block_cosine(kind, std * math.sqrt(d), d),
        }
        inputs = gaussian_inputs(settings, 1, d)[:, 0] / STD  # (n, d)
        rows.append(row | pairwise_cosine(block(inputs)))
    return rows


def draw_width(result, folder) -> None:
    """width.png: cosine over width, a panel for each scaling of the weights."""
    texts = []
    for kind in ("gelu", "swiglu"):
        rows = [row for row in result["rows"] if (row["mlp"], row["scaling"]) == (kind, f"weight std {STD}")]
        texts.append(f"{kind} {rows[0]['mean_cosine']:.2g} and {rows[-1]['mean_cosine']:.2g}")
    title = (
        f"One block's cosine at widths {WIDTHS[0]} and {WIDTHS[-1]:,} (weight std {STD}): {', '.join(texts)}"
    )
    curves(
        result["rows"],
        folder / "width.png",
        title=title,
        x="d_model",
        y="mean_cosine",
        series="mlp",
        panel="scaling",
        theories={"theory": "quadrature"},
        log="xy",
        ticks=WIDTHS,
    )


# ---- the command line --------------------------------------------------------------------------------------


@dataclass
class AllSettings(RunSettings):
    """What `all` can be told; an experiment takes what it reads, and keeps its defaults for the rest."""

    model: tuple[str, ...] | None = None
    """presets, PRESET@SEED, or checkpoint folders"""
    seed: tuple[int, ...] | None = None
    """seeds of the presets' weights"""
    num_sequences: at_least(2) | None = None
    """random sequences, or vectors, for each seed and length"""
    sequence_length: tuple[int, ...] | None = None
    """positions in a sequence"""


def run_all(settings: AllSettings) -> None:
    """Run every experiment, one after the other."""
    if set(settings.model or ()) - set(PRESETS):
        raise UserError("`all` includes `cure`, which draws presets: name one experiment for other models")
    given = {name: value for name, value in vars(settings).items() if value is not None}
    for function, defaults in EXPERIMENTS.values():
        changes = {name: value for name, value in given.items() if hasattr(defaults, name)}
        function(replace(defaults, **changes))


FIGURES["width"] = draw_width
EXPERIMENTS["width"] = Command(width, SeedSettings(num_sequences=600))
RUN_ALL = Command(run_all, AllSettings())
COMMANDS = {**EXPERIMENTS, "all": RUN_ALL, "": RUN_ALL}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
