"""Why does a newborn prefer tokens? Its states contract: every mechanism of BB section 4, with its theory.

    python contraction.py                        # all of them, three to eight minutes on 2 cores
    python contraction.py layers --seed 42       # Figures 2 and 7: which sublayer contracts, layer by layer
    torchrun --nproc-per-node 2 contraction.py predict --seed {0..99} --num-sequences 2000

Five are the story: `layers`, `mlp`, `amplify`, `predict`, `cure`; on a first reading leave out the others.
Inputs are Gaussian vectors of the embedding's standard deviation, 0.02 (BB 4.1), but of 1 in `width`, and
tokens in `predict` and `cure`. All seeds of a preset have one embedding matrix (BB B.2).

Most go one way. `Births.each` makes newborns; the loop adds rows for each, theory beside what was measured;
`finish` draws and saves them. `mean_over_seeds` makes one row of those that differ in `seed` and in what was
`measured` alone, and raises if their theories differ. `curves` draws one column over another: a colour for
each value of `series`, axes for each of `panel`, `theories` (columns, and how the legend calls them) dashed,
and a half width, the column `band`, shaded.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from init import SCHEMES, STD, newborn, variant
from lib.checkpoint import check_lengths, chosen_models, shortest_context
from lib.figures import curves
from lib.inputs import random_vectors
from lib.results import Experiment, mean_over_seeds
from lib.runtime import progress, rank
from lib.settings import Command, RunSettings, UserError, at_least, check_choice, run_script
from measure import attention, theory
from measure.cosines import floored_cosine, pairwise_cosine
from model import PRESETS, ModelConfig, rope_table
from probe import SHOWN, count_predictions, preference

WIDTHS = (128, 256, 512, 1024)  # of `width`
COSINES = ("mean_cosine", "std_cosine")  # columns that are measured


@dataclass
class WidthSettings(RunSettings):
    """What `width` is asked, and with more the other experiments."""

    seed: tuple[int, ...] = tuple(range(42, 50))  # seeds of the weights
    input_seed: int = 0  # seed of the random inputs
    num_sequences: at_least(2) = 300  # random sequences, or vectors, for each seed and length


@dataclass
class VectorSettings(WidthSettings):
    """What experiments at one length are asked."""

    model: tuple[str, ...] = ("nano_gpt2",)  # presets, or PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # how newborns are drawn; in `cure`, what is compared with gpt2


@dataclass
class Settings(VectorSettings):
    """What experiments at several lengths are asked."""

    sequence_length: tuple[int, ...] | None = None  # positions in a sequence; None: the experiment's own


# ---- what the experiments share ----------------------------------------------------------------------------


class Births(Experiment):
    """An experiment on newborns, with sequences of some lengths: the user's, or its own that all can read."""

    def __init__(self, name, paper, settings: VectorSettings, lengths=(64,)):
        for model in settings.model:  # newborns contract
            check_choice(model.partition("@")[0], PRESETS, "preset")
        self.specs = chosen_models(settings.model, settings.seed, 0, settings.init)
        context = shortest_context(self.specs)
        given = getattr(settings, "sequence_length", None) or ()
        check_lengths(given, context)
        self.lengths = given or [T for T in lengths if T <= context] or [context]
        super().__init__(name, paper, settings)
        self.rows = []
        self.unknown = []  # rows of newborns that measure/theory.py does not know

    def each(self, scheme=None, **changes):
        """For each newborn and length T: the first columns of the rows to be made of it, the model, and T.

        `changes` are made in the newborns' configurations (vocab_size=1: vectors are read, no tokens). Their
        `scheme` is --init unless another is named.
        """
        for spec in progress(self.specs, desc=self.name, unit=" models"):
            config = replace(spec.config, **changes)
            drawn = scheme or spec.scheme
            model = newborn(config, spec.seed, spec.embedding_seed, drawn, self.device, self.dtype)
            begun = len(self.rows)
            for T in self.lengths:
                yield {"model": spec.name, "seed": spec.seed}, model, T
            if not theory.knows(config, drawn):
                self.unknown += self.rows[begun:]

    def finish(self, question, x, series, theories, measured=COSINES, columns=(), **options):
        """Figure and JSON, of means over seeds if columns are `measured`; prints `columns`, () for all."""
        self.forget(theories)
        rows = mean_over_seeds(self.rows, measured, theories) if measured else self.rows
        plot(self, rows, question, x, series, theories, **options)
        return self.save(rows, columns)

    def forget(self, theories) -> None:
        """Set the columns of theories to None in rows of newborns that measure/theory.py does not know."""
        for row in self.unknown:
            row.update(dict.fromkeys(theories))
        if self.unknown and rank() == 0:
            names = ", ".join(dict.fromkeys(row["model"] for row in self.unknown))
            print(f"no theory is drawn of {names}: measure/theory.py knows no such init, norm or calibration")


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


def plot(experiment, rows, question, x, series, theories, y="mean_cosine", **options) -> None:
    """<experiment>.png: `curves` of rows; where there are several models, their lines are named by them."""
    if series != "model" and len({row.get("model") for row in rows}) > 1:
        rows = [row | {series: f"{row['model']}, {row[series]}"} for row in rows]
    path = experiment.folder / f"{experiment.name}.png"
    curves(rows, path, question, x=x, y=y, series=series, theories=theories, **options)


# ---- the story (BB 4) --------------------------------------------------------------------------------------


@torch.inference_mode()
def layers(settings: Settings):
    """Which sublayer contracts? Cosine of last positions, layer by layer (BB Figures 2, 7; a minute)"""
    births = Births("layers", "BB Figures 2, 7", settings, (64, 256))
    for key, model, T in births.each(vocab_size=1):
        for kind, part, counts in sublayers_apart(settings, model, T):
            predicted = theory.kernel_recursion(part.config, T, settings.init)
            for layer, statistics in enumerate(counts.layers):
                row = {"variant": kind, "sequence_length": T, "layer": layer, "theory": predicted[layer]}
                births.rows.append(key | row | statistics.summary())
    question = "Which sublayer makes unrelated sequences alike? (shaded: std of pairs)"
    theories = {"theory": "kernel recursion"}
    return births.finish(question, "layer", "variant", theories, panel="sequence_length", band="std_cosine")


def sublayers_apart(settings, model, T):
    """(kind, model, counts) of the full model, of its MLPs only and of its attention only."""
    for kind in ("full", "mlp", "attention"):
        part = variant(model, sublayers=kind)
        counts = count_predictions(part, T, settings.num_sequences, settings.input_seed, of_vectors=True)
        yield kind, part, counts


@torch.inference_mode()
def mlp(settings: VectorSettings):
    """Does the activation's asymmetry contract MLPs? (BB Figures 4, 5, Proposition 2; a quarter minute)"""
    births = Births("mlp", "BB Figures 4, 5, Proposition 2", settings)
    for key, model, T in births.each(vocab_size=1, sublayers="mlp"):
        x = gaussian_inputs(births, T, model.config.d_model)[:, 0]  # (n, d)
        for stack, functions, predicted in mlp_stacks(model, settings.init):
            for layer, state in enumerate(states_along(functions, x)):
                row = key | {"stack": stack, "layer": layer, "theory": predicted[layer]}
                births.rows.append(row | pairwise_cosine(state))
                if stack == "mlp0_relu":  # and as torch's `cosine_similarity` has it
                    row |= {"stack": "mlp0_relu_epsilon", "theory": None}
                    births.rows.append(row | floored_cosine(state, epsilon=1e-8))
    question = "Does an asymmetric activation contract stacks of MLPs? (mlp0: without norm and residual)"
    theories = {"theory": "Proposition 2; kernel recursion"}
    return births.finish(question, "layer", "stack", theories)


def mlp_stacks(standard, scheme):
    """Four stacks of MLPs: name, a function of states (n, d) for each layer, cosines predicted from 0 on."""
    relu = variant(standard, mlp="relu")
    tanh = variant(standard, mlp="tanh")
    L = standard.config.num_layers
    yield "mlp0_relu", [block.mlp for block in relu.model.layers], theory.relu_recursion(L, scheme)
    yield "mlp0_tanh", [block.mlp for block in tanh.model.layers], [0.0] * (L + 1)
    for stack, model in (("standard", standard), ("standard_relu", relu)):
        predicted = theory.kernel_recursion(model.config, 1, scheme)
        yield stack, model.model.layers, predicted  # blocks without attention, with norm and residual


@torch.inference_mode()
def amplify(settings: Settings):
    """Does averaging amplify what a ReLU MLP began? (BB Table 3, Proposition 4; a quarter minute)

    Not the calibration of train.py, nor the intervention of sinks.py, to which the papers give this name too.
    """
    births = Births("amplify", "BB Table 3, Proposition 4", settings, (100, 128, 1024))
    _, once, twice = theory.relu_recursion(2, settings.init)
    changes = {"vocab_size": 1, "sublayers": "mlp", "mlp": "relu", "num_layers": 2}
    for key, model, T in births.each(**changes):
        first_mlp, second_mlp = (block.mlp for block in model.model.layers)
        inputs = gaussian_inputs(births, T, model.config.d_model)
        states = torch.stack([first_mlp(x) for x in inputs])  # (n, T, d)
        stacks = [
            ("mlp0", states[:, -1], once),
            ("mlp0_mlp0", second_mlp(states[:, -1]), twice),
            ("mlp0_attn0", states.mean(1), theory.amplifier(once, T)),
        ]
        for stack, last, predicted in stacks:
            row = {"stack": stack, "sequence_length": T, "theory": predicted}
            births.rows.append(key | row | pairwise_cosine(last))
    question = "Does averaging over positions amplify what a ReLU MLP began?"
    theories = {"theory": "Propositions 2 and 4"}
    return births.finish(question, "sequence_length", "stack", theories, log="x", ylim=(0, 1.05))


@torch.inference_mode()
def predict(settings: Settings):
    """Is the direction's token the favourite? Do weights predict it? (BB Finding 2.2, ours; a minute)"""
    births = Births("predict", "BB Finding 2.2, and ours", settings)
    points = []
    for key, model, T in births.each():
        counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
        direction = F.normalize(counts.cosines.direction().cpu(), dim=0)  # (d,), as counted
        foreseen = theory.mean_field(model, T)  # (d,), from the weights
        row = key | {"sequence_length": T} | preference(model, counts)
        row["direction_count"] = int(counts.tokens[row["direction_token"]])
        row["predicted_token"] = int(model.unembed(foreseen.to(model.head_weight)).argmax())
        row["direction_cosine"] = float(foreseen @ direction)
        row["predicted_cosine"] = theory.kernel_recursion(model.config, T, settings.init)[-1]
        births.rows.append(row)
        for x, y in zip(foreseen.tolist(), direction.tolist()):
            points.append({"model": key["model"], "predicted": x, "measured": y})
    births.forget(("predicted_cosine",))
    question = "Do the weights alone predict the direction? (one point per dimension, of vectors of norm 1)"
    plot(births, points, question, "predicted", "model", {"predicted": "exactly"}, "measured", style=".")
    return births.save(births.rows, (*SHOWN, "predicted_token", "direction_cosine"))


@torch.inference_mode()
def cure(settings: Settings):
    """Is a newborn unbiased whose MLPs pass on nothing that all hidden units share? (ours; a minute)"""
    births = Births("cure", "ours", settings)
    for scheme in dict.fromkeys(("gpt2", settings.init)):
        for key, model, T in births.each(scheme):
            counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
            predicted = theory.kernel_recursion(model.config, T, scheme)[-1]
            key |= {"init": scheme, "sequence_length": T, "predicted_cosine": predicted}
            births.rows.append(key | preference(model, counts))
    question = "Does a birth without the MLPs' common mean output cure the contraction?"
    theories = {"predicted_cosine": "kernel recursion"}
    return births.finish(question, "seed", "init", theories, measured=(), columns=("init", *SHOWN), style="o")


# ---- more than the story needs -----------------------------------------------------------------------------


@torch.inference_mode()
def ablation(settings: Settings):
    """Do MLPs alone, or attention alone, prefer tokens? (BB Figure 3, Table 2; half a minute)"""
    births = Births("ablation", "BB Figure 3, Table 2", settings)
    for key, model, T in births.each():
        for kind, part, counts in sublayers_apart(settings, model, T):
            births.rows.append(key | {"variant": kind, "sequence_length": T} | preference(part, counts))
    question = "Which sublayer gives a newborn its favourite token?"
    options = {"y": "ratio", "style": "o", "ylabel": "its count / that of uniform draws' favourite"}
    return births.finish(question, "variant", "model", {}, (), ("variant", *SHOWN), **options)


@torch.inference_mode()
def engage(settings: VectorSettings):
    """Does LayerNorm spread pre-activations until the asymmetry tells? (BB Figure 6; seconds)"""
    births = Births("engage", "BB Figure 6", settings)
    for key, model, T in births.each(vocab_size=1, sublayers="mlp", num_layers=1):
        (block,) = model.model.layers
        gate = block.mlp.gate_proj or block.mlp.up_proj
        d = model.config.d_model
        x = gaussian_inputs(births, T, d)[:, 0]  # (n, d)
        for normed, inputs in ((True, block.post_attention_layernorm(x)), (False, x)):
            expected_std = STD * inputs.square().sum(1).mean().sqrt().item()
            row = key | {
                "normed": normed,
                "theory": theory.one_block_cosine(model.config.mlp, expected_std, d, settings.init),
                "preactivation_std": gate(inputs).float().std().item(),
            }
            births.rows.append(row | pairwise_cosine(block.mlp(inputs)))
    question = "Does the norm spread pre-activations to where the activation is asymmetric? (False: no norm)"
    theories = {"theory": "quadrature"}
    x = "preactivation_std"
    return births.finish(question, x, "normed", theories, (*COSINES, x), style="o", log="xy")


@torch.inference_mode()
def intra(settings: Settings):
    """Does attention make a sequence's positions alike? (BB Figure 8, Proposition 5; a quarter minute)

    As in BB, `mean_cosine` is here of all pairs of positions, each with itself, too.
    """
    births = Births("intra", "BB Figure 8, Proposition 5", settings, (32, 128, 512))
    for key, model, T in births.each(vocab_size=1, sublayers="attention"):
        x = gaussian_inputs(births, T, model.config.d_model)  # (n, T, d)
        limit = theory.averaging_limit(T, model.config.num_layers)
        for stack, functions, exact in attention_stacks(model, T, settings.init):
            for layer, state in enumerate(states_along(functions, x)[1:]):
                unit = F.normalize(state.double(), dim=2, eps=0)
                row = key | {"stack": stack, "sequence_length": T, "layer": layer + 1}
                row |= {"exact_theory": exact[layer], "limit_theory": limit[layer]}
                births.rows.append(row | {"mean_cosine": unit.mean(1).square().sum(1).mean().item()})
    question = "Does attention without residual make a sequence's positions alike? (attn0: uniform weights)"
    theories = {"exact_theory": "theory for this length", "limit_theory": "Proposition 5: infinite length"}
    options = {"panel": "sequence_length", "ylabel": "mean cosine within a sequence"}
    return births.finish(question, "layer", "stack", theories, ("mean_cosine",), **options)


def attention_stacks(model, T, scheme):
    """Two stacks: name, a function of states (n, T, d) for each layer, cosines predicted from layer 1 on."""
    L = model.config.num_layers
    yield "attn0", [attn0] * L, theory.averaging_stack(T, L)
    predicted = theory.intra_recursion(model.config, T, scheme, residual=False)[1:]
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
    if len(settings.sequence_length or ()) > 1:
        raise UserError("variance: name one --sequence-length; a shorter sequence begins a longer one")
    births = Births("variance", "BB Figure 9, Equation 2", settings, (1024,))
    changes = {"vocab_size": 1, "sublayers": "attention", "num_layers": 1}
    for key, model, T in births.each(**changes):
        spread = attention.RunningStd(settings.num_sequences)
        for x in gaussian_inputs(births, T, model.config.d_model).split(1):
            model.hidden(x, on_heads=spread.on_heads)
        predicted = theory.aggregated_std(model.config, T).tolist()
        for i, std in enumerate(spread.std(1).tolist(), start=1):
            row = key | {"position": i, "std": std, "uniform_theory": predicted[0] / math.sqrt(i)}
            births.rows.append(row | {"theory": predicted[i - 1]})
    question = "Do the values that attention aggregates shrink along the positions?"
    theories = {"theory": "with the logits' variance", "uniform_theory": "Equation 2: uniform"}
    options = {"y": "std", "ylabel": "std of aggregated values", "style": "-", "log": "xy"}
    return births.finish(question, "position", "model", theories, ("std",), **options)


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
            "seed": seed,
            "mlp": kind,
            "d_model": d,
            "weight_std": std,
            "scaling": f"weight std {scaling}",
            "theory": theory.one_block_cosine(kind, std * math.sqrt(d), d),
        }
        rows.append(row | pairwise_cosine(block.mlp(inputs)))
    theories = {"theory": "quadrature"}
    rows = mean_over_seeds(rows, COSINES, theories)
    question = "How does one block's contraction depend on its width?"
    plot(experiment, rows, question, "d_model", "mlp", theories, panel="scaling", log="xy")
    return experiment.save(rows)


def run_all(settings: RunSettings) -> None:
    """Run every experiment, one after the other (three to eight minutes)"""
    given = {name: value for name, value in vars(settings).items() if value != "auto"}
    for command in EXPERIMENTS.values():
        command.function(replace(command.defaults, **given))


TEN = tuple(range(42, 52))  # seeds
EXPERIMENTS = {
    "layers": Command(layers, Settings(num_sequences=24)),
    "mlp": Command(mlp, VectorSettings(seed=TEN, dtype="float32")),
    "amplify": Command(amplify, Settings(seed=TEN, num_sequences=20, dtype="float32")),
    "predict": Command(predict, Settings(num_sequences=400)),
    "cure": Command(cure, Settings(init="centered", num_sequences=120)),
    "ablation": Command(ablation, Settings(seed=(42,), num_sequences=500)),
    "engage": Command(engage, VectorSettings(seed=TEN, dtype="float32")),
    "intra": Command(intra, Settings(num_sequences=4, dtype="float32")),
    "variance": Command(
        variance, Settings(model=("nano_gpt2", "gpt2_1b"), seed=(42,), num_sequences=32, dtype="float32")
    ),
    "width": Command(width, WidthSettings(num_sequences=600, dtype="float32")),
}
COMMANDS = {**EXPERIMENTS, "": Command(run_all, RunSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
