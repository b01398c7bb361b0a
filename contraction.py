"""Why does a newborn prefer tokens? Its states contract: every mechanism of BB section 4, with its theory.

    python contraction.py                        # all of them, three to eight minutes on 2 cores
    python contraction.py layers --seed 42       # Figures 2 and 7: which sublayer contracts, layer by layer
    torchrun --nproc-per-node 2 contraction.py predict --seed {0..99} --num-sequences 2000

Inputs are Gaussian vectors like embeddings (BB 4.1), but tokens in `predict` and `cure`. All seeds of a
preset have one embedding matrix (BB B.2).
"""

import itertools
import math
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from init import STD, newborn, variant
from lib.checkpoint import check_lengths, chosen_models, shortest_context
from lib.figures import curves
from lib.inputs import random_vectors
from lib.results import Experiment, mean_over_seeds
from lib.runtime import progress
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from measure import attention, theory
from measure.cosines import floored_cosine, pairwise_cosine
from model import ModelConfig, rope_table
from probe import SHOWN, count_predictions, preference

WIDTHS = (128, 256, 512, 1024)  # of `width`
COSINES = ("mean_cosine", "std_cosine")  # columns of which rows have the mean over seeds


@dataclass
class WidthSettings(RunSettings):
    seed: tuple[int, ...] = tuple(range(42, 50))  # seeds of the weights
    input_seed: int = 0  # seed of the random inputs
    num_sequences: at_least(2) = 300  # random sequences, or vectors, for each seed and length


@dataclass
class Settings(WidthSettings):
    model: tuple[str, ...] = ("nano_gpt2",)  # presets, or PRESET@SEED
    sequence_length: tuple[int, ...] | None = None  # positions in a sequence; None: the experiment's own


# ---- what the experiments share ----------------------------------------------------------------------------


def begin(name, paper, settings: Settings, lengths=(64,)):
    """An experiment begun, its models, and the lengths of their sequences: of `lengths`, what all can read.

    UserError for a length of the user's own that is too long, and for models that are no newborns.
    """
    specs = chosen_models(settings.model, settings.seed, embedding_seed=0)
    if not all(spec.is_newborn for spec in specs):
        raise UserError("newborns contract: give --model a preset, or PRESET@SEED")
    context = shortest_context(specs)
    check_lengths(settings.sequence_length or (), context)
    lengths = settings.sequence_length or [T for T in lengths if T <= context] or [context]
    experiment = Experiment(name, paper, settings)
    return experiment, progress(specs, desc=name, unit=" models"), lengths


def plot(experiment, rows, question, x, series, theories, y="mean_cosine", **options) -> None:
    """<experiment>.png: `curves` of rows; where there are several models, their lines are named by them."""
    if series != "model" and len({row.get("model") for row in rows}) > 1:
        rows = [row | {series: f"{row['model']}, {row[series]}"} for row in rows]
    path = experiment.folder / f"{experiment.name}.png"
    curves(rows, path, question, x=x, y=y, series=series, theories=theories, **options)


def newborn_blocks(experiment, spec, **changes):
    """A newborn in another configuration, without vocabulary; a `block.mlp` is MLP0 (BB Definition 1)."""
    config = replace(spec.config, vocab_size=1, **changes)
    return newborn(config, spec.seed, device=experiment.device, dtype=experiment.dtype)


def gaussian_inputs(experiment, T, d):
    """Gaussian vectors in place of embeddings, (num_sequences, T, d)."""
    settings = experiment.settings
    vectors = random_vectors(settings.input_seed, range(settings.num_sequences), T, d)
    return vectors.to(experiment.device, experiment.dtype)


def states_along(functions, x):
    """x, and what each function makes of the state before."""
    states = [x]
    for function in functions:
        states.append(function(states[-1]))
    return states


# ---- which sublayer contracts? (BB 4.1) --------------------------------------------------------------------


@torch.inference_mode()
def layers(settings: Settings):
    """Which sublayer contracts? Cosine of last positions, layer by layer (BB Figures 2, 7; a minute)"""
    experiment, specs, lengths = begin("layers", "BB Figures 2, 7", settings, (64, 256))
    rows = []
    for spec in specs:
        model = newborn_blocks(experiment, spec)
        for key, part, counts in sublayers_apart(experiment, model, lengths):
            predicted, _ = theory.kernel_recursion(part.config, key["sequence_length"])
            for layer, statistics in enumerate(counts.layers):
                key |= {"layer": layer, "theory": predicted[layer]}
                rows.append({"model": spec.name} | key | statistics.summary())
    rows = mean_over_seeds(rows, COSINES)
    question = "Which sublayer makes unrelated sequences alike? (shaded: std of pairs)"
    theories = {"theory": "kernel recursion"}
    plot(experiment, rows, question, "layer", "variant", theories, panel="sequence_length", band="std_cosine")
    return experiment.save(rows)


def sublayers_apart(experiment, model, lengths):
    """(key of a row, model, counts) of the full model, of its MLPs only and of its attention only."""
    settings = experiment.settings
    for kind, T in itertools.product(("full", "mlp", "attention"), lengths):
        part = variant(model, sublayers=kind)
        counts = count_predictions(part, T, settings.num_sequences, settings.input_seed, vectors=True)
        yield {"variant": kind, "sequence_length": T}, part, counts


@torch.inference_mode()
def ablation(settings: Settings):
    """Do MLPs alone, or attention alone, prefer tokens? (BB Figure 3, Table 2; half a minute)"""
    experiment, specs, lengths = begin("ablation", "BB Figure 3, Table 2", settings)
    rows = []
    for spec in specs:
        model = spec.load(experiment.device, experiment.dtype)
        for key, part, counts in sublayers_apart(experiment, model, lengths):
            rows.append({"model": spec.name, "seed": spec.seed} | key | preference(part, counts))
    question = "Which sublayer gives a newborn its favourite token?"
    label = "its count / that of uniform draws' favourite"
    plot(experiment, rows, question, "variant", "model", {}, "ratio", style="o", ylabel=label)
    return experiment.save(rows, ("variant", *SHOWN))


# ---- the MLP's asymmetric activation (BB 4.2) --------------------------------------------------------------


@torch.inference_mode()
def mlp(settings: Settings):
    """Does the activation's asymmetry contract MLPs? (BB Figures 4, 5, Proposition 2; a quarter minute)"""
    experiment, specs, _ = begin("mlp", "BB Figures 4, 5, Proposition 2", settings)
    rows = []
    for spec in specs:
        x = gaussian_inputs(experiment, 1, spec.config.d_model)[:, 0]  # (n, d)
        for stack, functions, predicted in mlp_stacks(newborn_blocks(experiment, spec, sublayers="mlp")):
            for layer, state in enumerate(states_along(functions, x)):
                row = {"model": spec.name, "stack": stack, "layer": layer, "theory": predicted[layer]}
                rows.append(row | pairwise_cosine(state))
                if stack == "mlp0_relu":  # and as torch's `cosine_similarity` has it
                    row |= {"stack": "mlp0_relu_epsilon", "theory": None}
                    rows.append(row | floored_cosine(state, epsilon=1e-8))
    rows = mean_over_seeds(rows, COSINES)
    question = "Does an asymmetric activation contract stacks of MLPs? (mlp0: without norm and residual)"
    plot(experiment, rows, question, "layer", "stack", {"theory": "Proposition 2; kernel recursion"})
    return experiment.save(rows)


def mlp_stacks(standard):
    """Four stacks of MLPs: name, a function of states (n, d) for each layer, cosines predicted from 0 on."""
    relu = variant(standard, mlp="relu")
    tanh = variant(standard, mlp="tanh")
    L = standard.config.num_layers
    yield "mlp0_relu", [block.mlp for block in relu.model.layers], theory.relu_recursion(L)
    yield "mlp0_tanh", [block.mlp for block in tanh.model.layers], [0.0] * (L + 1)
    for stack, model in (("standard", standard), ("standard_relu", relu)):
        predicted, _ = theory.kernel_recursion(model.config, 1)
        yield stack, model.model.layers, predicted  # blocks without attention, with norm and residual


@torch.inference_mode()
def engage(settings: Settings):
    """Does LayerNorm spread pre-activations until the asymmetry tells? (BB Figure 6; seconds)"""
    experiment, specs, _ = begin("engage", "BB Figure 6", settings)
    rows = []
    for spec in specs:
        model = newborn_blocks(experiment, spec, sublayers="mlp", num_layers=1)
        (block,) = model.model.layers
        gate = block.mlp.gate_proj or block.mlp.up_proj
        d = model.config.d_model
        x = gaussian_inputs(experiment, 1, d)[:, 0]  # (n, d)
        for normed, inputs in ((True, block.post_attention_layernorm(x)), (False, x)):
            expected_std = STD * inputs.square().sum(1).mean().sqrt().item()
            row = {
                "model": spec.name,
                "normed": normed,
                "theory": theory.one_block_cosine(model.config.mlp, expected_std, d),
                "preactivation_std": gate(inputs).float().std().item(),
            }
            rows.append(row | pairwise_cosine(block.mlp(inputs)))
    rows = mean_over_seeds(rows, (*COSINES, "preactivation_std"))
    question = "Does the norm spread pre-activations to where the activation is asymmetric? (False: no norm)"
    theories = {"theory": "quadrature"}
    plot(experiment, rows, question, "preactivation_std", "normed", theories, style="o", log="xy")
    return experiment.save(rows)


# ---- attention amplifies (BB 4.3, 4.4) ---------------------------------------------------------------------


@torch.inference_mode()
def amplify(settings: Settings):
    """Does averaging amplify what a ReLU MLP began? (BB Table 3, Proposition 4; a quarter minute)"""
    experiment, specs, lengths = begin("amplify", "BB Table 3, Proposition 4", settings, (100, 128, 1024))
    rows = []
    _, once, twice = theory.relu_recursion(2)
    for spec in specs:
        model = newborn_blocks(experiment, spec, sublayers="mlp", mlp="relu", num_layers=2)
        first_mlp, second_mlp = (block.mlp for block in model.model.layers)
        for T in lengths:
            inputs = gaussian_inputs(experiment, T, model.config.d_model)
            states = torch.stack([first_mlp(x) for x in inputs])  # (n, T, d)
            stacks = [
                ("mlp0", states[:, -1], once),
                ("mlp0_mlp0", second_mlp(states[:, -1]), twice),
                ("mlp0_attn0", states.mean(1), theory.amplifier(once, T)),
            ]
            for stack, last, predicted in stacks:
                key = {"model": spec.name, "stack": stack, "sequence_length": T, "theory": predicted}
                rows.append(key | pairwise_cosine(last))
    rows = mean_over_seeds(rows, COSINES)
    question = "Does averaging over positions amplify what a ReLU MLP began?"
    theories = {"theory": "Propositions 2 and 4"}
    plot(experiment, rows, question, "sequence_length", "stack", theories, log="x", ylim=(0, 1.05))
    return experiment.save(rows)


@torch.inference_mode()
def intra(settings: Settings):
    """Does attention make a sequence's positions alike? (BB Figure 8, Proposition 5; a quarter minute)"""
    experiment, specs, lengths = begin("intra", "BB Figure 8, Proposition 5", settings, (32, 128, 512))
    rows = []
    for spec in specs:
        model = newborn_blocks(experiment, spec, sublayers="attention")
        for T in lengths:
            x = gaussian_inputs(experiment, T, model.config.d_model)  # (n, T, d)
            limit = theory.averaging_limit(T, model.config.num_layers)
            for stack, functions, exact in attention_stacks(model, T):
                for layer, state in enumerate(states_along(functions, x)[1:]):
                    unit = F.normalize(state.double(), dim=2, eps=0)
                    key = {"model": spec.name, "stack": stack, "sequence_length": T, "layer": layer + 1}
                    key |= {"exact_theory": exact[layer], "limit_theory": limit[layer]}
                    rows.append(key | {"mean_cosine": unit.mean(1).square().sum(1).mean().item()})
    rows = mean_over_seeds(rows, ("mean_cosine",))
    question = "Does attention without residual make a sequence's positions alike? (attn0: uniform weights)"
    theories = {"exact_theory": "theory for this length", "limit_theory": "Proposition 5: infinite length"}
    label = "mean cosine within a sequence"
    plot(experiment, rows, question, "layer", "stack", theories, panel="sequence_length", ylabel=label)
    return experiment.save(rows)


def attention_stacks(model, T):
    """Two stacks: name, a function of states (n, T, d) for each layer, cosines predicted from layer 1 on."""
    L = model.config.num_layers
    yield "attn0", [attn0] * L, theory.averaging_stack(T, L)
    _, (_, *predicted) = theory.kernel_recursion(model.config, T, residual=False)
    yield "attention", [partial(attend, block) for block in model.model.layers], predicted


def attn0(x):
    """Uniform causal averaging of states (n, T, d) (BB Definition 3)."""
    count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]  # (T, 1)
    return x.cumsum(1) / count


def attend(block, x):
    """What a block's attention adds to states (n, T, d)."""
    return block.self_attn(block.input_layernorm(x), rope_table(block.self_attn.config, x))


@torch.inference_mode()
def variance(settings: Settings):
    """Do the first block's aggregated values shrink along positions? (BB Figure 9, Equation 2; seconds)"""
    experiment, specs, lengths = begin("variance", "BB Figure 9, Equation 2", settings, (1024,))
    T = max(lengths)  # shorter sequences are the beginnings of the longest
    rows = []
    for spec in specs:
        model = newborn_blocks(experiment, spec, sublayers="attention", num_layers=1)
        spread = attention.RunningStd()
        for x in gaussian_inputs(experiment, T, model.config.d_model).split(1):
            model.hidden(x, on_heads=spread.on_heads)
        predicted = theory.aggregated_std(model.config, T).tolist()
        for i, std in enumerate(spread.std(1).tolist(), start=1):
            row = {"model": spec.name, "position": i, "std": std}
            rows.append(row | {"uniform_theory": predicted[0] / math.sqrt(i), "theory": predicted[i - 1]})
    rows = mean_over_seeds(rows, ("std",))
    question = "Do the values that attention aggregates shrink along the positions?"
    theories = {"theory": "with the logits' variance", "uniform_theory": "Equation 2: uniform"}
    label = "std of aggregated values"
    plot(experiment, rows, question, "position", "model", theories, "std", style="-", log="xy", ylabel=label)
    return experiment.save(rows)


# ---- from weights to favourite tokens, and the cure (Finding 2.2, and ours) --------------------------------


@torch.inference_mode()
def predict(settings: Settings):
    """Is the direction's token the favourite? Do weights predict it? (BB Finding 2.2, ours; a minute)"""
    experiment, specs, lengths = begin("predict", "BB Finding 2.2, and ours", settings)
    rows, points = [], []
    for spec in specs:
        model = spec.load(experiment.device, experiment.dtype)
        for T in lengths:
            counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
            row, predicted, direction = predict_direction(model, T, counts)
            rows.append({"model": spec.name, "seed": spec.seed, "sequence_length": T} | row)
            pairs = zip(predicted.tolist(), direction.tolist())
            points += [{"model": spec.name, "predicted": x, "measured": y} for x, y in pairs]
    question = "Do the weights alone predict the direction? (one point per dimension, of vectors of norm 1)"
    plot(experiment, points, question, "predicted", "model", {"predicted": "exactly"}, "measured", style=".")
    return experiment.save(rows, (*SHOWN, "predicted_token", "direction_cosine"))


def predict_direction(model, T, counts):
    """Columns of a row; and the contraction direction, (d,) of norm 1, from the weights and as counted."""
    direction = F.normalize(counts.cosines.direction().cpu(), dim=0)
    row = preference(model, counts)
    begun = time.perf_counter()
    predicted = theory.mean_field(model, T)
    row["seconds"] = time.perf_counter() - begun
    row["direction_count"] = int(counts.tokens[row["direction_token"]])
    row["predicted_token"] = int(model.unembed(predicted.to(model.head_weight)).argmax())
    row["direction_cosine"] = float(predicted @ direction)
    row["predicted_cosine"] = theory.kernel_recursion(model.config, T)[0][-1]
    return row, predicted, direction


@torch.inference_mode()
def cure(settings: Settings):
    """Is a newborn unbiased whose MLPs pass on nothing that all hidden units share? (ours; a minute)"""
    experiment, specs, lengths = begin("cure", "ours", settings)
    rows = []
    for spec in specs:
        for scheme in ("gpt2", "centered"):
            model = replace(spec, scheme=scheme).load(experiment.device, experiment.dtype)
            for T in lengths:
                counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
                predicted, _ = theory.kernel_recursion(spec.config, T, scheme)
                key = {"model": spec.name, "seed": spec.seed, "init": scheme, "sequence_length": T}
                key |= {"predicted_cosine": predicted[-1]}
                rows.append(key | preference(model, counts))
    question = "Does a birth without the MLPs' common mean output cure the contraction?"
    plot(experiment, rows, question, "seed", "init", {"predicted_cosine": "kernel recursion"}, style="o")
    return experiment.save(rows, ("init", *SHOWN))


@torch.inference_mode()
def width(settings: WidthSettings):
    """How does the contraction of one MLP0 block depend on its width? (ours; seconds)"""
    experiment = Experiment("width", "ours", settings)
    rows = []
    choices = itertools.product(settings.seed, ("gelu", "swiglu"), ("1/sqrt(d)", "0.02"), WIDTHS)
    for seed, kind, scaling, d in progress(list(choices), desc="width", unit=" blocks"):
        std = {"1/sqrt(d)": d**-0.5, "0.02": STD}[scaling]
        config = ModelConfig(1, 1, 1, 1, d_model=d, d_ff=4 * d, mlp=kind, sublayers="mlp")
        model = newborn(config, seed, None, "normal", experiment.device, experiment.dtype)
        (block,) = model.model.layers
        for weight in block.mlp.parameters():
            weight.mul_(std / STD)
        inputs = gaussian_inputs(experiment, 1, d)[:, 0] / STD  # (n, d)
        row = {
            "mlp": kind,
            "d_model": d,
            "weight_std": std,
            "scaling": f"weight std {scaling}",
            "theory": theory.one_block_cosine(kind, std * math.sqrt(d), d),
        }
        rows.append(row | pairwise_cosine(block.mlp(inputs)))
    rows = mean_over_seeds(rows, COSINES)
    question = "How does one block's contraction depend on its width?"
    plot(experiment, rows, question, "d_model", "mlp", {"theory": "quadrature"}, panel="scaling", log="xy")
    return experiment.save(rows)


# ---- the command line --------------------------------------------------------------------------------------


def run_all(settings: RunSettings) -> None:
    """Run every experiment, one after the other (three to eight minutes)"""
    given = {name: value for name, value in vars(settings).items() if value != "auto"}
    for command in EXPERIMENTS.values():
        command.function(replace(command.defaults, **given))


BLOCKS = Settings(seed=tuple(range(42, 52)), dtype="float32")
EXPERIMENTS = {
    "layers": Command(layers, Settings(num_sequences=24)),
    "ablation": Command(ablation, Settings(seed=(42,), num_sequences=500)),
    "mlp": Command(mlp, BLOCKS),
    "engage": Command(engage, BLOCKS),
    "amplify": Command(amplify, replace(BLOCKS, num_sequences=20)),
    "intra": Command(intra, Settings(num_sequences=4, dtype="float32")),
    "variance": Command(
        variance, replace(BLOCKS, model=("nano_gpt2", "gpt2_1b"), seed=(42,), num_sequences=32)
    ),
    "predict": Command(predict, Settings(num_sequences=400)),
    "cure": Command(cure, Settings(num_sequences=120)),
    "width": Command(width, WidthSettings(num_sequences=600, dtype="float32")),
}
COMMANDS = {**EXPERIMENTS, "": Command(run_all, RunSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
