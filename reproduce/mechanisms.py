"""Test each mechanism of BB section 4 by itself: seven experiments beside those of contraction.py.

python -m reproduce.mechanisms ablation      # each takes up to a minute on 2 cores, predict 3 to 7 minutes
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from contraction import sublayers_apart
from init import STD, variant
from lib.random import random_vectors
from lib.settings import Command, run_script
from measure import theory
from measure.anatomy import add_heads, std_of_heads
from measure.attention import Means
from model import rope
from probe import SHOWN, CosineStatistics, count_predictions, preference
from reproduce.mean_field import mean_field
from sources.newborns import NewbornExperiment, NewbornSettings, plot


def gaussian_inputs(experiment, T, d):
    """Gaussian vectors with the standard deviation of embeddings, 0.02: (num_sequences, T, d)."""
    vectors = random_vectors(experiment.settings.input_seed, range(experiment.settings.num_sequences), T, d)
    return vectors.to(experiment.device, experiment.dtype)


def pairwise_cosine(states):
    """Mean and standard deviation of the cosine over all pairs of states (n, d), as columns."""
    return CosineStatistics(states.shape[1], states.device).update(states).summary()


@torch.inference_mode()
def mlp(settings: NewbornSettings):
    """Does an asymmetric activation contract states? (BB Figures 4, 5, Proposition 2; a minute)"""
    experiment = NewbornExperiment("mlp", "BB Figures 4, 5, Proposition 2", settings, (1,))
    for key, model, T in experiment.newborns(vocab_size=1, sublayers="mlp"):
        x = gaussian_inputs(experiment, T, model.config.d_model)[:, 0]  # (n, d)
        relu = variant(model, mlp="relu")
        tanh = variant(model, mlp="tanh")
        bare = relu_recursion(model.config.num_layers, settings.init)
        stacks = [  # `standard` blocks have a norm and a residual, but no attention
            ("mlp0_relu", [block.mlp for block in relu.model.layers], bare),
            ("mlp0_tanh", [block.mlp for block in tanh.model.layers], [0.0] * len(bare)),
            ("standard", model.model.layers, theory.kernel_recursion(model.config, 1, settings.init)),
            ("standard_relu", relu.model.layers, theory.kernel_recursion(relu.config, 1, settings.init)),
        ]
        for stack, functions, prediction in stacks:
            state = x
            for layer, function in enumerate([nn.Identity(), *functions]):
                state = function(state)
                row = key | {"stack": stack, "layer": layer, "theory": prediction[layer]}
                experiment.rows.append(row | pairwise_cosine(state))
    question = "Does an asymmetric activation contract stacks of MLPs? (mlp0: without norm and residual)"
    return experiment.finish(question, "layer", "stack", {"theory": "Proposition 2; kernel recursion"})


def relu_recursion(layers, scheme="gpt2"):
    """Cosines along a stack of wide ReLU MLPs without norm and residual, the input's first (BB Prop. 2).

        c_0 = 0        c_{l+1} = (kappa(c_l) - lost) / (1 - lost)
        kappa(c) = (sqrt(1 - c^2) + c (pi - arccos c)) / pi

    `lost` is 0; for `centered` it is kappa(0) = 1/pi, the neurons' mean product for orthogonal inputs.
    """
    if scheme not in theory.SCHEMES:
        return [None] * (layers + 1)
    lost = 1 / math.pi if scheme == "centered" else 0.0
    c = 0.0
    cosines = [c]
    for _ in range(layers):
        angle = math.pi - math.acos(c)
        kappa = (math.sqrt(1 - c**2) + c * angle) / math.pi
        c = (kappa - lost) / (1 - lost)
        cosines.append(c)
    return cosines


@torch.inference_mode()
def amplify(settings: NewbornSettings):
    """Does averaging amplify what a ReLU MLP began? (BB Table 3, Proposition 4; a minute)"""
    experiment = NewbornExperiment("amplify", "BB Table 3, Proposition 4", settings, (100, 128, 1024))
    changes = {"vocab_size": 1, "sublayers": "mlp", "mlp": "relu", "num_layers": 2}
    for key, model, T in experiment.newborns(**changes):
        first_mlp, second_mlp = (block.mlp for block in model.model.layers)
        inputs = gaussian_inputs(experiment, T, model.config.d_model)
        states = torch.stack([first_mlp(x) for x in inputs])  # (n, T, d)
        _, once, twice = relu_recursion(2, settings.init)
        averaged = None if once is None else once / (1 / T + (1 - 1 / T) * once)  # BB Proposition 4
        stacks = [
            ("mlp0", states[:, -1], once),
            ("mlp0_mlp0", second_mlp(states[:, -1]), twice),
            ("mlp0_attn0", states.mean(1), averaged),
        ]
        for stack, last, prediction in stacks:
            row = {"stack": stack, "sequence_length": T, "theory": prediction}
            experiment.rows.append(key | row | pairwise_cosine(last))
    question = "Does averaging over positions amplify what a ReLU MLP began?"
    theories = {"theory": "Propositions 2 and 4"}
    return experiment.finish(question, "sequence_length", "stack", theories, log="x", ylim=(0, 1.05))


@torch.inference_mode()
def ablation(settings: NewbornSettings):
    """Do MLPs alone, or attention alone, prefer tokens? (BB Figure 3, Table 2; half a minute)"""
    experiment = NewbornExperiment("ablation", "BB Figure 3, Table 2", settings)
    for key, model, T in experiment.newborns():
        for kind, part, counts in sublayers_apart(settings, model, T):
            experiment.rows.append(key | {"variant": kind, "sequence_length": T} | preference(part, counts))
    question = "Which sublayer gives a newborn its favourite token?"
    options = {"y": "ratio", "style": "o", "ylabel": "its count / that of uniform draws' favourite"}
    return experiment.finish(question, "variant", "model", {}, (), ("variant", *SHOWN), **options)


@torch.inference_mode()
def engage(settings: NewbornSettings):
    """Does LayerNorm spread pre-activations to where GELU is asymmetric? (BB Figure 6; seconds)"""
    experiment = NewbornExperiment("engage", "BB Figure 6", settings, (1,))
    for key, model, T in experiment.newborns(vocab_size=1, sublayers="mlp", num_layers=1):
        (block,) = model.model.layers
        gate = block.mlp.gate_proj or block.mlp.up_proj
        d = model.config.d_model
        x = gaussian_inputs(experiment, T, d)[:, 0]  # (n, d)
        for normed, inputs in ((True, block.post_attention_layernorm(x)), (False, x)):
            expected_std = STD * inputs.square().sum(1).mean().sqrt().item()
            cosine = None
            if settings.init in theory.SCHEMES:
                k = theory.mlp_kernel(model.config.mlp, expected_std, d, settings.init)
                cosine = float(k[0] / k.sum())
            row = key | {"normed": normed, "theory": cosine}
            row["preactivation_std"] = gate(inputs).float().std().item()
            experiment.rows.append(row | pairwise_cosine(block.mlp(inputs)))
    question = "Does the norm spread pre-activations to where the activation is asymmetric? (False: no norm)"
    theories = {"theory": "quadrature"}
    measured = ("mean_cosine", "std_cosine", "preactivation_std")
    return experiment.finish(question, "preactivation_std", "normed", theories, measured, style="o", log="xy")


@torch.inference_mode()
def intra(settings: NewbornSettings):
    """Does attention make a sequence's positions alike? (BB Figure 8, Proposition 5; a quarter minute)"""
    experiment = NewbornExperiment("intra", "BB Figure 8, Proposition 5", settings, (32, 128, 512))
    for key, model, T in experiment.newborns(vocab_size=1, sublayers="attention"):
        x = gaussian_inputs(experiment, T, model.config.d_model)  # (n, T, d)
        limit = averaging_limit(T, model.config.num_layers)
        counts = torch.arange(1, T + 1, device=x.device)[:, None]  # (T, 1)
        for stack in ("attn0", "attention"):
            state = x
            for layer, block in enumerate(model.model.layers):
                if stack == "attn0":  # uniform causal averaging (BB Definition 3)
                    state = state.cumsum(1) / counts
                else:
                    state = block.self_attn(block.input_layernorm(state), rope(model.config, state))
                unit = F.normalize(state.double(), dim=2, eps=0)
                row = key | {"stack": stack, "sequence_length": T, "layer": layer + 1}
                row["limit_theory"] = limit[layer]
                experiment.rows.append(row | {"mean_cosine": unit.mean(1).square().sum(1).mean().item()})
    question = "Does attention without residual make a sequence's positions alike? (attn0: uniform weights)"
    theories = {"limit_theory": "Proposition 5: infinite length"}
    options = {"panel": "sequence_length", "ylabel": "mean cosine within a sequence"}
    return experiment.finish(question, "layer", "stack", theories, ("mean_cosine",), **options)


def averaging_limit(T, layers):
    """Mean cosine within a sequence after each Attn0, over all pairs of positions (BB Proposition 5).

    It is 1/T + (1 - 1/T) rho_L, with rho_L the limit of infinite T.
    """
    cosines = []
    for L in range(1, layers + 1):
        rho = 0.0
        for k in range(L):
            rho += math.comb(L - 1, k) / math.comb(2 * L - 2, k) * (2 / 3) ** (k + 1)
        cosines.append(1 / T + (1 - 1 / T) * rho)
    return cosines


@torch.inference_mode()
def variance(settings: NewbornSettings):
    """Do the first block's aggregated values shrink along positions? (BB Figure 9, Equation 2; seconds)"""
    experiment = NewbornExperiment("variance", "BB Figure 9, Equation 2", settings, (1024,))
    for key, model, T in experiment.newborns(vocab_size=1, sublayers="attention", num_layers=1):
        means = Means(settings.num_sequences)
        for x in gaussian_inputs(experiment, T, model.config.d_model).split(1):
            model.hidden(x, on_heads=partial(add_heads, means))
        measured = std_of_heads(means.of[1]).tolist()
        theories = aggregated_std(model.config, T, settings.init)
        for i, (std, uniform, uneven) in enumerate(zip(measured, *theories), start=1):
            row = {"position": i, "std": std, "uniform_theory": uniform, "theory": uneven}
            experiment.rows.append(key | row)
    question = "Do the values that attention aggregates shrink along the positions?"
    theories = {"theory": "with the logits' variance", "uniform_theory": "Equation 2: uniform"}
    options = {"y": "std", "ylabel": "std of aggregated values", "style": "-", "log": "xy"}
    return experiment.finish(question, "position", "model", theories, ("std",), **options)


def aggregated_std(config, T, scheme):
    """Standard deviations of aggregated values at positions 1..T of the first block, by two theories.

    BB Equation 2 has uniform attention: E sum_j a_j^2 = 1/i. Logits of std t make it e^t^2 / (i - 1 + e^t^2)
    (ours: exact for i = 1, and in the limit of large i).
    """
    if not theory.knows(config, scheme):
        return [None] * T, [None] * T
    i = torch.arange(1, T + 1, dtype=torch.float64)
    variance = config.d_model * STD**2 * STD**2 / (STD**2 + config.norm_epsilon)  # of queries and keys, too
    weight = math.exp(variance**2)  # t is the std of q k^T / sqrt(Dh): that of q times that of k
    return [(variance * share).sqrt().tolist() for share in (1 / i, weight / (i - 1 + weight))]


@torch.inference_mode()
def predict(settings: NewbornSettings):
    """Is the mean direction's token the top-1? Do weights predict it? (BB Finding 2.2, ours; 3-7 minutes)"""
    experiment = NewbornExperiment("predict", "BB Finding 2.2, and ours", settings)
    points = []
    for key, model, T in experiment.newborns():
        counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
        direction = F.normalize(counts.cosines.direction().cpu(), dim=0)  # (d,), as measured
        row = key | {"sequence_length": T} | preference(model, counts)
        row["direction_count"] = int(counts.tokens[row["direction_token"]])
        prediction = mean_field(model, T)  # (d,)
        row |= {"predicted_token": None, "direction_cosine": None}
        if prediction is not None:
            row["predicted_token"] = int(model.unembed(prediction.to(model.head_weight)).argmax())
            row["direction_cosine"] = float(prediction @ direction)
            for x, y in zip(prediction.tolist(), direction.tolist()):
                points.append({"model": key["model"], "predicted": x, "measured": y})
        row["predicted_cosine"] = theory.kernel_recursion(model.config, T, settings.init)[-1]
        experiment.rows.append(row)
    question = "Do the weights alone predict the direction? (one point per dimension, of vectors of norm 1)"
    diagonal = {"predicted": "exactly"}  # draws the diagonal
    result = experiment.save(experiment.rows, (*SHOWN, "predicted_token", "direction_cosine"))
    if points:
        plot(experiment, points, question, "predicted", "model", diagonal, "measured", style=".")
    return result


TEN = tuple(range(42, 52))  # seeds
GPT2S = ("nano_gpt2", "gpt2_1b")
COMMANDS = {
    "ablation": Command(ablation, NewbornSettings(seed=(42,), num_sequences=500)),
    "amplify": Command(amplify, NewbornSettings(seed=TEN, num_sequences=20)),
    "engage": Command(engage, NewbornSettings(seed=TEN)),
    "intra": Command(intra, NewbornSettings(num_sequences=4)),
    "mlp": Command(mlp, NewbornSettings(seed=TEN)),
    "predict": Command(predict, NewbornSettings(num_sequences=400)),
    "variance": Command(variance, NewbornSettings(model=GPT2S, seed=(42,), num_sequences=32)),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
