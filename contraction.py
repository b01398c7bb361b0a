"""Why does a newborn prefer tokens? Its states contract: every mechanism of BB section 4, with its theory.

    python contraction.py                        # all of them, about ten minutes on 2 cores
    python contraction.py layers --seed 42       # Figures 2 and 7: which sublayer contracts, layer by layer
    torchrun --nproc-per-node 2 contraction.py overlap --seed {0..99} --num-sequences 2000

Inputs are Gaussian vectors like embeddings (BB 4.1), but tokens in `overlap`, `predict` and `cure`.
"""

import itertools
import math
import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from init import SCHEMES, STD, newborn, variant
from lib.checkpoint import check_lengths, chosen_models, shortest_context
from lib.figures import BLUE, COLOURS, curves, legend_below, new_figure, save_figure
from lib.inputs import random_vectors
from lib.results import Experiment, mean_over_seeds
from lib.runtime import progress
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from measure import theory
from measure.cosines import floored_cosine, pairwise_cosine, uniform_counts
from model import ACTIVATIONS, ModelConfig, rope_table
from probe import RANKS, count_predictions, preference

TEN_SEEDS = tuple(range(42, 52))
WIDTHS = (128, 256, 512, 1024)  # of `width`
THEORIES = {"theory", "exact_theory", "uniform_theory", "predicted_cosine"}  # columns that foretell newborns


@dataclass
class VectorSettings(RunSettings):
    """What `width` can be told."""

    seed: tuple[int, ...] = tuple(range(42, 50))
    """seeds of the weights"""
    input_seed: int = 0
    """seed of the random inputs"""
    num_sequences: at_least(2) = 300
    """random sequences, or vectors, for each seed and length"""


@dataclass
class Settings(VectorSettings):
    """What every other experiment can be told."""

    model: tuple[str, ...] = ("nano_gpt2",)
    """presets, PRESET@SEED, or checkpoint folders"""
    init: Literal[SCHEMES] = "gpt2"
    """how newborns are drawn"""
    embedding_seed: int | None = None
    """seed of embedding and head (default: the seed)"""
    sequence_length: tuple[int, ...] = (64,)
    """positions in a sequence; `mlp` and `engage` read single vectors"""


# ---- what the experiments share ----------------------------------------------------------------------------


def begin(name, paper, settings: Settings, in_float32=False):
    """An experiment begun, and the models that its settings name.

    Of the default lengths, those are taken that all models can read. UserError for one of the user's own that
    is too long, and for models without attention or MLPs.
    """
    specs = chosen_models(settings.model, settings.seed, settings.embedding_seed, settings.init)
    if any(spec.config.sublayers != "full" or spec.config.num_layers < 2 for spec in specs):
        raise UserError("expected models of attention and MLPs, and of two layers or more")
    context = shortest_context(specs)
    lengths = settings.sequence_length
    if lengths == COMMANDS[name].defaults.sequence_length:
        lengths = tuple(T for T in lengths if T <= context) or (context,)
    check_lengths(lengths, context)
    dtype = "float32" if in_float32 else settings.dtype
    return Experiment(name, paper, replace(settings, sequence_length=lengths, dtype=dtype)), specs


def finished(rows, specs, averaged=()):
    """The rows, without theory where the model is trained; means over seeds of the `averaged` columns."""
    trained = {spec.name for spec in specs if not spec.is_newborn}
    for row in rows:
        if row["model"] in trained:
            row.update(dict.fromkeys(THEORIES & row.keys()))
    return mean_over_seeds(rows, averaged) if averaged else rows


def draw(experiment, rows, question, x, series, theories, y="mean_cosine", **options) -> None:
    """<experiment>.png: `curves` of rows; where there are several models, their lines are named by them."""
    if series != "model" and len({row["model"] for row in rows}) > 1:
        rows = [row | {series: f"{row['model']}, {row[series]}"} for row in rows]
    path = experiment.folder / f"{experiment.name}.png"
    curves(rows, path, question, x=x, y=y, series=series, theories=theories, **options)


def load_blocks(settings: Settings, spec, **changes):
    """A model with another configuration, in float32; a newborn comes without vocabulary.

    Its `block.mlp` alone is MLP0 (BB Definition 1).
    """
    if not spec.is_newborn:
        return variant(spec.load(settings.device), **changes)
    config = replace(spec.config, vocab_size=1, **changes)
    return newborn(config, spec.seed, scheme=spec.scheme, device=settings.device)


def gaussian_inputs(settings: VectorSettings, T, d):
    """Gaussian vectors in place of embeddings, (num_sequences, T, d)."""
    return random_vectors(settings.input_seed, range(settings.num_sequences), T, d).to(settings.device)


# ---- which sublayer contracts? (BB 4.1) --------------------------------------------------------------------


def ablated(settings: Settings, spec):
    """(key of a row, model, counts) of the full model, of its MLPs only and of its attention only."""
    model = spec.load(settings.device, settings.torch_dtype)
    for kind in ("full", "mlp", "attention"):
        part = variant(model, sublayers=kind)
        for T in settings.sequence_length:
            counts = count_predictions(
                part, T, settings.num_sequences, input_seed=settings.input_seed, vectors=True
            )
            yield {"variant": kind, "sequence_length": T}, part, counts


@torch.inference_mode()
def layers(settings: Settings):
    """Which sublayer contracts, layer by layer? Cosine of two sequences' last positions (BB Figures 2, 7)"""
    experiment, specs = begin("layers", "BB Figures 2, 7", settings)
    rows = []
    for spec in progress(specs, desc="layers", unit=" models"):
        for key, model, counts in ablated(experiment.settings, spec):
            law, _ = theory.kernel_recursion(model.config, key["sequence_length"], settings.init)
            for layer, statistics in enumerate(counts["layers"]):
                mean, std = statistics.mean_and_std()
                row = {"model": spec.name} | key | {"layer": layer}
                rows.append(row | {"mean_cosine": mean, "std_cosine": std, "theory": law[layer]})
    rows = finished(rows, specs, averaged=("mean_cosine", "std_cosine"))
    question = "Which sublayer makes unrelated sequences alike? (shaded: std of pairs)"
    theories = {"theory": "kernel recursion"}
    draw(experiment, rows, question, "layer", "variant", theories, panel="sequence_length", band="std_cosine")
    return experiment.save(rows)


@torch.inference_mode()
def ablation(settings: Settings):
    """Do MLPs alone, or attention alone, prefer tokens? (BB Figure 3, Table 2)"""
    experiment, specs = begin("ablation", "BB Figure 3, Table 2", settings)
    rows, points = [], []
    for spec in progress(specs, desc="ablation", unit=" models"):
        for key, model, counts in ablated(experiment.settings, spec):
            row = {"model": spec.name, "seed": spec.seed} | key | preference(model, counts)
            rows.append(row | {"cosine_log10_p": counts["cosines"].log10_p()})
            if spec.seed != specs[0].seed:
                continue  # the first is drawn
            ranked = counts["token_counts"].sort(descending=True).values.tolist()
            uniform = uniform_counts(settings.num_sequences, model.config.vocab_size, RANKS).tolist()
            for rank, (count, law) in enumerate(zip(ranked, uniform), start=1):
                points.append({"model": spec.name} | key | {"rank": rank, "count": count, "theory": law})
    question = "Which sublayer gives a newborn its favourite token?"
    theories = {"theory": "uniform draws"}
    labels = {"xlabel": "rank of the predicted token", "ylabel": "sequences that predict it"}
    draw(
        experiment, points, question, "rank", "variant", theories, "count", panel="sequence_length", **labels
    )
    columns = ("model", "seed", "variant", "top1_token", "ratio", "log10_p", "mean_cosine", "cosine_log10_p")
    return experiment.save(finished(rows, specs), columns, points=points)


# ---- the MLP's asymmetric activation (BB 4.2) --------------------------------------------------------------


@torch.inference_mode()
def mlp(settings: Settings):
    """Does the activation's asymmetry contract stacks of MLPs? (BB Figures 4, 5, Proposition 2)"""
    experiment, specs = begin("mlp", "BB Figures 4, 5, Proposition 2", settings, in_float32=True)
    rows = []
    for spec in progress(specs, desc="mlp", unit=" models"):
        standard = load_blocks(experiment.settings, spec, sublayers="mlp")
        relu = variant(standard, mlp="relu")
        tanh = variant(standard, mlp="tanh")
        depth = standard.config.num_layers
        x = gaussian_inputs(experiment.settings, 1, standard.config.d_model)  # (n, 1, d)
        gelu_law, _ = theory.kernel_recursion(standard.config, 1, settings.init)
        relu_law, _ = theory.kernel_recursion(relu.config, 1, settings.init)
        stacks = {
            "mlp0_relu": (mlp0_states(relu, x), theory.relu_recursion(depth)),
            "mlp0_tanh": (mlp0_states(tanh, x), [0.0] * (depth + 1)),
            "standard": (stream_states(standard, x), gelu_law),
            "standard_relu": (stream_states(relu, x), relu_law),
        }
        for stack, (states, law) in stacks.items():
            for layer, (state, expected) in enumerate(zip(states, law)):
                key = {"model": spec.name, "stack": stack, "layer": layer, "theory": expected}
                rows.append(key | pairwise_cosine(state))
                if stack == "mlp0_relu":  # and as torch's `cosine_similarity` has it
                    key |= {"stack": "mlp0_relu_epsilon", "theory": None}
                    rows.append(key | floored_cosine(state, epsilon=1e-8))
    rows = finished(rows, specs, averaged=("mean_cosine", "std_cosine"))
    question = "Does an asymmetric activation contract stacks of MLPs? (mlp0: without norm and residual)"
    theories = {"theory": "Proposition 2; kernel recursion"}
    drawn = [row for row in rows if row["stack"] != "mlp0_relu_epsilon"]
    draw(experiment, drawn, question, "layer", "stack", theories)
    return experiment.save(rows)


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


@torch.inference_mode()
def engage(settings: Settings):
    """Does LayerNorm spread pre-activations until the asymmetry tells? (BB Figure 6)"""
    experiment, specs = begin("engage", "BB Figure 6", settings, in_float32=True)
    rows, densities = [], {}
    z = torch.linspace(-2, 2, 81, dtype=torch.float64)
    for spec in progress(specs, desc="engage", unit=" models"):
        model = load_blocks(experiment.settings, spec, sublayers="mlp", num_layers=1)
        config = model.config
        (block,) = model.model.layers
        x = gaussian_inputs(experiment.settings, 1, config.d_model)[:, 0]  # (n, d)
        gate = block.mlp.gate_proj or block.mlp.up_proj
        for normed in (True, False):
            inputs = block.post_attention_layernorm(x) if normed else x
            preactivation = gate(inputs)  # (n, d_ff)
            expected_std = STD * inputs.square().sum(1).mean().sqrt().item()
            row = {
                "model": spec.name,
                "normed": normed,
                "theory": theory.one_block_cosine(config.mlp, expected_std, config.d_model),
                "preactivation_std": preactivation.std().item(),
            }
            rows.append(row | pairwise_cosine(block.mlp(inputs)))
            density = torch.histc(preactivation, 81, -2.025, 2.025)  # bins about the z
            name = "with the norm" if normed else "without it"
            densities.setdefault(name, (density / density.max()).tolist())  # of the first model
    rows = finished(rows, specs, averaged=("mean_cosine", "std_cosine", "preactivation_std"))
    question = "Does the norm spread pre-activations to where the activation is asymmetric?"
    figure, ((above,), (below,)) = new_figure(question, rows=2, sharex=True)
    above.plot(z, ACTIVATIONS[config.mlp](z), color=BLUE, label=config.mlp)
    above.plot(z, z / 2, "k--", lw=1.1, label="half the input: no asymmetry")
    above.set_ylabel("activation")
    for (name, density), colour in zip(densities.items(), COLOURS[1:]):
        below.plot(z, density, color=colour, label=name)
    below.set(xlabel="pre-activation", ylabel="density (largest = 1)")
    above.legend(frameon=False)
    below.legend(frameon=False, loc="upper right")
    save_figure(figure, experiment.folder / "engage.png")
    return experiment.save(rows)


# ---- attention amplifies (BB 4.3, 4.4) ---------------------------------------------------------------------


@torch.inference_mode()
def amplify(settings: Settings):
    """Does averaging amplify what a ReLU MLP began? (BB Table 3, Proposition 4)"""
    experiment, specs = begin("amplify", "BB Table 3, Proposition 4", settings, in_float32=True)
    _, once, twice = theory.relu_recursion(2)
    rows = []
    for spec in progress(specs, desc="amplify", unit=" models"):
        model = load_blocks(experiment.settings, spec, sublayers="mlp", mlp="relu", num_layers=2)
        first_mlp, second_mlp = (block.mlp for block in model.model.layers)
        for T in experiment.settings.sequence_length:
            inputs = gaussian_inputs(experiment.settings, T, model.config.d_model)
            sequences = [first_mlp(x) for x in inputs]  # (T, d) each
            last = torch.stack([x[-1] for x in sequences])  # (n, d)
            mean = torch.stack([x.mean(0) for x in sequences])
            stacks = {
                "mlp0": (last, once),
                "mlp0_mlp0": (second_mlp(last), twice),
                "mlp0_attn0": (mean, theory.amplifier(once, T)),
            }
            for stack, (states, law) in stacks.items():
                key = {"model": spec.name, "stack": stack, "sequence_length": T, "theory": law}
                rows.append(key | pairwise_cosine(states))
    rows = finished(rows, specs, averaged=("mean_cosine", "std_cosine"))
    question = "Does averaging over positions amplify what a ReLU MLP began?"
    theories = {"theory": "Propositions 2 and 4"}
    draw(experiment, rows, question, "sequence_length", "stack", theories, log="x", ylim=(0, 1.05))
    return experiment.save(rows)


@torch.inference_mode()
def intra(settings: Settings):
    """Does attention, without residual, make a sequence's positions alike? (BB Figure 8, Proposition 5)"""
    experiment, specs = begin("intra", "BB Figure 8, Proposition 5", settings, in_float32=True)
    rows = []
    for spec in progress(specs, desc="intra", unit=" models"):
        model = load_blocks(experiment.settings, spec, sublayers="attention")
        config = model.config
        for T in experiment.settings.sequence_length:
            x = gaussian_inputs(experiment.settings, T, config.d_model)  # (n, T, d)
            count = torch.arange(1, T + 1, device=x.device)[:, None]  # (T, 1)
            rope = rope_table(config, x)
            _, attention_law = theory.kernel_recursion(config, T, settings.init, residual=False)
            laws = {"attn0": theory.averaging_stack(T, config.num_layers), "attention": attention_law[1:]}
            limits = theory.averaging_limit(T, config.num_layers)
            for stack, law in laws.items():
                state = x
                for layer, block in enumerate(model.model.layers):
                    if stack == "attn0":
                        state = state.cumsum(1) / count
                    else:
                        state = block.self_attn(block.input_layernorm(state), rope, False, None)
                    unit = F.normalize(state.double(), dim=2, eps=0)
                    row = {
                        "model": spec.name,
                        "stack": stack,
                        "sequence_length": T,
                        "layer": layer + 1,
                        "exact_theory": law[layer],
                        "limit_theory": limits[layer],
                        "mean_cosine": unit.mean(1).square().sum(1).mean().item(),
                    }
                    rows.append(row)
    rows = finished(rows, specs, averaged=("mean_cosine",))
    question = "Does attention without residual make a sequence's positions alike? (attn0: uniform weights)"
    theories = {"exact_theory": "exact in T", "limit_theory": "Proposition 5: infinite T"}
    label = "mean cosine within a sequence"
    draw(experiment, rows, question, "layer", "stack", theories, panel="sequence_length", ylabel=label)
    return experiment.save(rows)


@torch.inference_mode()
def variance(settings: Settings):
    """Do the first block's aggregated values shrink along the positions? (BB Figure 9, Equation 2)"""
    experiment, specs = begin("variance", "BB Figure 9, Equation 2", settings, in_float32=True)
    T = max(experiment.settings.sequence_length)  # shorter sequences are the beginnings of the longest
    rows = []
    for spec in progress(specs, desc="variance", unit=" models"):
        model = load_blocks(experiment.settings, spec, sublayers="attention", num_layers=1)
        squares = []

        def on_heads(layer, heads, q, k, v, squares=squares):  # heads: (1, H, T, Dh)
            squares.append(heads.double().square().mean((0, 1, 3)))

        for i in range(settings.num_sequences):
            x = random_vectors(settings.input_seed, range(i, i + 1), T, model.config.d_model)
            model.hidden(x.to(experiment.device), on_heads=on_heads)
        measured = torch.stack(squares).mean(0).sqrt().tolist()
        law = theory.aggregated_std(model.config, T).tolist()
        for i, (std, expected) in enumerate(zip(measured, law), start=1):
            uniform = law[0] / math.sqrt(i)
            row = {"model": spec.name, "position": i, "std": std}
            rows.append(row | {"uniform_theory": uniform, "theory": expected})
    rows = finished(rows, specs, averaged=("std",))
    question = "Do the values that attention aggregates shrink along the positions?"
    theories = {"theory": "with the logits' variance", "uniform_theory": "Equation 2: uniform"}
    label = "std of aggregated values"
    draw(experiment, rows, question, "position", "model", theories, "std", style="-", log="xy", ylabel=label)
    return experiment.save(rows)


# ---- from weights to favourite tokens, and the cure (Finding 2.2, and ours) --------------------------------


def on_tokens(settings: Settings, spec, scheme):
    """A newborn on random tokens: for each length a row, and the directions foretold and measured, (d,)."""
    drawn_by = "gpt2" if scheme == "projected" else scheme
    model = replace(spec, scheme=drawn_by).load(settings.device, settings.torch_dtype)
    if scheme == "projected":
        theory.project_out_mean_output(model)
    squares = [block.mlp.down_proj.weight.float().square().mean().item() for block in model.model.layers]
    for T in settings.sequence_length:
        begun = time.perf_counter()
        foreseen, mean_field_cosine = theory.mean_field(model, T)
        seconds = time.perf_counter() - begun
        counts = count_predictions(model, T, settings.num_sequences, input_seed=settings.input_seed)
        row = {"model": spec.name, "seed": spec.seed, "init": scheme, "sequence_length": T}
        row |= preference(model, counts)
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
        yield row, foreseen, direction


@torch.inference_mode()
def overlap(settings: Settings):
    """Is the token of the contraction direction the most frequent one? (BB Finding 2.2)"""
    experiment, specs = begin("overlap", "BB Finding 2.2", settings)
    rows = []
    for spec in progress(specs, desc="overlap", unit=" models"):
        rows += [row for row, _, _ in on_tokens(experiment.settings, spec, settings.init)]
    question = "Is the contraction direction's token the most frequent one?"
    theories = {"direction_count": "equal counts"}
    labels = {
        "xlabel": "sequences that predict the direction's token",
        "ylabel": "most frequent token's count",
    }
    draw(experiment, rows, question, "direction_count", "model", theories, "top1_count", style="o", **labels)
    columns = ("model", "seed", "top1_token", "top1_count", "direction_token", "direction_count")
    return experiment.save(finished(rows, specs), columns)


@torch.inference_mode()
def predict(settings: Settings):
    """Do the weights alone, without a forward pass, foretell the direction and its token? (ours)"""
    experiment, specs = begin("predict", "ours", settings)
    figure, ((axes,),) = new_figure("Do the weights alone foretell the direction? (dashed: equal)")
    rows = []
    for spec in progress(specs, desc="predict", unit=" models"):
        for row, foreseen, direction in on_tokens(experiment.settings, spec, settings.init):
            if spec.seed == specs[0].seed:  # the first is drawn
                axes.plot(foreseen, direction, ".", label=f"{spec.label}, {row['sequence_length']} tokens")
            rows.append(row)
    axes.axline((0, 0), slope=1, color="black", ls="--", lw=1.1)
    axes.set(xlabel="unit direction foretold, by dimension", ylabel="unit direction measured")
    legend_below(figure, axes)
    save_figure(figure, experiment.folder / "predict.png")
    columns = ("model", "seed", "direction_cosine", "predicted_token", "direction_token", "mean_cosine")
    return experiment.save(finished(rows, specs), columns)


@torch.inference_mode()
def cure(settings: Settings):
    """Is a newborn unbiased whose down projections pass on nothing that all hidden units share? (ours)"""
    experiment, specs = begin("cure", "ours", settings)
    if settings.init != "gpt2" or not all(spec.is_newborn for spec in specs):
        raise UserError("cure draws presets in three ways: give --model a preset, and no --init")
    rows = []
    for spec in progress(specs, desc="cure", unit=" models"):
        for scheme in ("gpt2", "centered", "projected"):
            rows += [row for row, _, _ in on_tokens(experiment.settings, spec, scheme)]
    question = "Does a birth without the MLPs' common mean output cure the contraction?"
    theories = {"predicted_cosine": "kernel recursion"}
    draw(experiment, rows, question, "seed", "init", theories, style="o")
    columns = ("model", "seed", "init", "mean_cosine", "top1_token", "top1_count", "log10_p")
    return experiment.save(rows, columns)


@torch.inference_mode()
def width(settings: VectorSettings):
    """How does the contraction of one MLP0 block depend on its width? (ours)"""
    experiment = Experiment("width", "ours", replace(settings, dtype="float32"))
    settings = experiment.settings
    rows = []
    choices = list(itertools.product(settings.seed, ("gelu", "swiglu"), ("1/sqrt(d)", STD), WIDTHS))
    for seed, kind, scaling, d in progress(choices, desc="width", unit=" blocks"):
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
    rows = mean_over_seeds(rows, ("mean_cosine", "std_cosine"))
    question = "How does one block's contraction depend on its width?"
    points = [row | {"model": "one block"} for row in rows]
    draw(experiment, points, question, "d_model", "mlp", {"theory": "quadrature"}, panel="scaling", log="xy")
    return experiment.save(rows)


# ---- the command line --------------------------------------------------------------------------------------


def run_all(settings: RunSettings) -> None:
    """Run every experiment, one after the other."""
    for function, defaults in EXPERIMENTS.values():
        function(replace(defaults, **vars(settings)))


EXPERIMENTS = {
    "layers": Command(layers, Settings(num_sequences=24, sequence_length=(64, 512))),
    "ablation": Command(ablation, Settings(seed=(42,), embedding_seed=0, num_sequences=500)),
    "mlp": Command(mlp, Settings(seed=TEN_SEEDS)),
    "engage": Command(engage, Settings(seed=TEN_SEEDS)),
    "amplify": Command(amplify, Settings(seed=TEN_SEEDS, num_sequences=20, sequence_length=(100, 128, 1024))),
    "intra": Command(intra, Settings(num_sequences=4, sequence_length=(32, 128, 512))),
    "variance": Command(
        variance,
        Settings(model=("nano_gpt2", "gpt2_1b"), seed=(42,), num_sequences=32, sequence_length=(1024,)),
    ),
    "overlap": Command(overlap, Settings(embedding_seed=0, num_sequences=400)),
    "predict": Command(predict, Settings(embedding_seed=0, num_sequences=400)),
    "cure": Command(cure, Settings(embedding_seed=0, num_sequences=120)),
    "width": Command(width, VectorSettings(num_sequences=600)),
}
COMMANDS = {**EXPERIMENTS, "all": Command(run_all, RunSettings())}
COMMANDS[""] = COMMANDS["all"]

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
