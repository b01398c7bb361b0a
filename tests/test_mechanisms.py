"""reproduce/mechanisms.py: rows against a plain recomputation, theory against matrices, and its limits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import normal
from test_contraction import CONFIG, COUNT, LENGTH, SEEDS, assert_cosines, newborns, select, vectors

from lib.files import read_json
from measure import theory
from model import Transformer, rope
from reproduce import mechanisms


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("all")
    for command in mechanisms.COMMANDS.values():
        small = {"device": "cpu", "dtype": "float32", "out": str(out), "seed": SEEDS, "num_sequences": COUNT}
        small["model"] = ("tiny_gpt2",)
        if hasattr(command.defaults, "sequence_length"):
            small["sequence_length"] = (LENGTH,)
        command.function(replace(command.defaults, **small))
    return {name: read_json(out / f"{name}.json") for name in mechanisms.COMMANDS}


def mlp_weights(model: Transformer, layer: int) -> list[torch.Tensor]:
    return [weight.detach().double() for weight in model.model.layers[layer].mlp.parameters()]


def mlp_stack(model: Transformer, x: torch.Tensor, phi, has_norm_and_residual: bool) -> list[torch.Tensor]:
    """States (n, d) before and after each MLP: two products and an activation, as written."""
    states = [x.double()]
    for layer in range(model.config.num_layers):
        up, down = mlp_weights(model, layer)
        x = states[-1]
        if has_norm_and_residual:
            normed = F.layer_norm(x, (x.shape[1],), eps=model.config.norm_epsilon)
            states.append(x + phi(normed @ up.T) @ down.T)
        else:
            states.append(phi(x @ up.T) @ down.T)
    return states


PHI = {"mlp0_relu": torch.relu, "mlp0_tanh": torch.tanh, "standard": F.gelu, "standard_relu": torch.relu}


@pytest.mark.parametrize("stack", PHI)
def test_mlp(stack, results):
    x = vectors(1)[:, 0]
    stacks = [mlp_stack(model, x, PHI[stack], stack.startswith("standard")) for model in newborns()]
    mlp = "relu" if stack == "standard_relu" else "gelu"
    theories = {"mlp0_relu": mechanisms.relu_recursion(6), "mlp0_tanh": [0.0] * 7}
    recursion = theory.kernel_recursion(replace(CONFIG, sublayers="mlp", mlp=mlp), 1)
    rows = select(results["mlp"]["rows"], stack=stack)
    for row, *states, expected in zip(rows, *stacks, theories.get(stack, recursion), strict=True):
        assert_cosines(row, states, dict(abs=1e-5))  # float32 states that shrink by a hundred in each MLP0
        assert row["theory"] == expected


def test_amplify(results):
    x = vectors(LENGTH)  # (n, T, d)
    stacks = {"mlp0": [], "mlp0_mlp0": [], "mlp0_attn0": []}
    for model in newborns():
        _, first, second, *_ = mlp_stack(model, x.flatten(0, 1), torch.relu, False)
        first = first.view(x.shape)
        stacks["mlp0"].append(first[:, -1])
        stacks["mlp0_mlp0"].append(second.view(x.shape)[:, -1])
        stacks["mlp0_attn0"].append(first.mean(1))
    c = 1 / math.pi
    theories = {"mlp0": c, "mlp0_mlp0": mechanisms.relu_recursion(2)[2]}
    theories["mlp0_attn0"] = c / (1 / LENGTH + (1 - 1 / LENGTH) * c)  # BB Proposition 4
    for stack, states in stacks.items():
        (row,) = select(results["amplify"]["rows"], stack=stack)
        assert_cosines(row, states, dict(abs=1e-5))
        assert row["theory"] == pytest.approx(theories[stack], rel=1e-12)


@pytest.mark.parametrize("normed", [True, False])
def test_engage(normed, results):
    x = vectors(1)[:, 0].double()
    states, spreads = [], []
    for model in newborns():
        inputs = F.layer_norm(x, (256,), eps=CONFIG.norm_epsilon) if normed else x
        up, down = mlp_weights(model, 0)
        spreads.append((inputs @ up.T).std().item())
        # one block has the output's std of one layer: a scale, which no cosine sees
        states.append(F.gelu(inputs @ up.T) @ down.T)
    (row,) = select(results["engage"]["rows"], normed=normed)
    assert_cosines(row, states)
    assert row["preactivation_std"] == pytest.approx(np.mean(spreads), rel=1e-5)
    expected_std = 0.02 * inputs.square().sum(1).mean().sqrt().item()
    z = expected_std * torch.randn(10**6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shared = F.gelu(z).mean().square() / F.gelu(z).square().mean()  # of two inputs with nothing in common
    assert row["theory"] == pytest.approx(shared.item(), rel=0.02, abs=1e-4)


@pytest.mark.parametrize("stack", ["attn0", "attention"])
def test_intra(stack, results):
    """A layer of attention without residual is what its block adds to its input."""
    means = []
    for model in newborns(sublayers="attention"):
        state = vectors(LENGTH)
        for block in model.model.layers:
            if stack == "attn0":
                state = torch.stack([state[:, :i].mean(1) for i in range(1, LENGTH + 1)], dim=1)
            else:
                with torch.inference_mode():
                    state = block(state, rope(model.config, state), False, None) - state
            unit = F.normalize(state.double(), dim=2, eps=0)
            means.append((unit @ unit.transpose(1, 2)).mean().item())  # all pairs, itself too
    means = np.reshape(means, (len(SEEDS), 6)).mean(0)
    rows = select(results["intra"]["rows"], stack=stack)
    # what a block adds is a difference of numbers some times larger
    assert [row["mean_cosine"] for row in rows] == pytest.approx(means, abs=1e-5)
    assert [row["limit_theory"] for row in rows] == mechanisms.averaging_limit(LENGTH, 6)


def test_averaging_limit_is_the_limit():
    T = 10**9
    rho = [(cosine - 1 / T) / (1 - 1 / T) for cosine in mechanisms.averaging_limit(T, 3)]
    assert rho == pytest.approx([2 / 3, 8 / 9, 0.9383], abs=5e-5)
    M = np.tril(np.ones((1024, 1024))) / np.arange(1, 1025)[:, None]
    P = np.linalg.matrix_power(M, 3)
    S = P @ P.T
    explicit = (S / np.sqrt(np.outer(S.diagonal(), S.diagonal()))).mean()
    assert mechanisms.averaging_limit(1024, 3)[-1] == pytest.approx(explicit, abs=0.006)


def test_variance(results):
    """Aggregated values by explicit attention matrices; their std is about their mean."""
    mask = torch.ones(LENGTH, LENGTH).tril().log()  # 0, and -inf for the future
    values = []

    def on_heads(layer, heads, q, k, v, alpha):
        weights = (mask + q.double() @ k.double().mT / q.shape[3] ** 0.5).softmax(3)
        values.append((weights @ v.double()).std(dim=(0, 1, 3), correction=0))  # (T,)

    for model in newborns(num_layers=1):
        with torch.inference_mode():
            model.hidden(vectors(LENGTH), on_heads=on_heads)
    rows = results["variance"]["rows"]
    assert [row["std"] for row in rows] == pytest.approx(torch.stack(values).mean(0).tolist(), rel=1e-5)
    first = (256 * 0.02**4 / (0.02**2 + CONFIG.norm_epsilon)) ** 0.5
    uniform = [first / position**0.5 for position in range(1, LENGTH + 1)]  # BB Equation 2
    assert [row["uniform_theory"] for row in rows] == pytest.approx(uniform, rel=1e-12)


@pytest.mark.parametrize("d", [256, 1600])
def test_uneven_weights(d):
    """The mean of sum_j a_j^2 of a softmax of Gaussian logits, drawn: within a tenth at any length."""
    t = 0.02**2 * d  # std of a logit
    config = replace(CONFIG, d_model=d)
    uniform, theory = (torch.tensor(std) for std in mechanisms.aggregated_std(config, 64, "gpt2"))
    for T in (1, 2, 8, 64):
        drawn = (t * normal(20_000, T)).softmax(1).square().sum(1).mean()
        ours = (theory / uniform)[T - 1].square() / T
        assert ours == pytest.approx(drawn.item(), rel=0.1)


def test_relu_recursion():
    cosines = mechanisms.relu_recursion(2000)
    assert cosines[:4] == pytest.approx([0, 0.3183, 0.4937, 0.6048], abs=5e-5)
    assert 1 - 1e-4 < cosines[-1] < 1
    assert mechanisms.relu_recursion(3, "centered") == [0, 0, 0, 0]
