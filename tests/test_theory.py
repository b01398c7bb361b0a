"""measure/theory.py against Monte Carlo, quadrature, explicit matrices, and itself in its limits."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import KINDS, normal, random_model
from numpy.polynomial.polynomial import polyval

import init
from lib.random import random_vectors
from measure import theory
from model import MLP, PRESETS, Attention, ModelConfig, rope
from reproduce import mean_field


@pytest.mark.parametrize("phi", [F.gelu, torch.tanh])
@pytest.mark.parametrize("rho", [0.3, -0.5, 1.0])
def test_kernel_against_gauss_hermite_in_two_dimensions(phi, rho):
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(120))
    weights = weights / weights.sum()
    a = nodes[:, None]
    b = rho * a + math.sqrt(1 - rho**2) * nodes
    expected = weights @ (phi(a) * phi(b)) @ weights
    value = polyval(rho, theory.hermite_kernel(phi).numpy())
    # Both are smooth: 1e-9 is what 120 nodes leave of tanh, whose poles are near the real line.
    assert value == pytest.approx(expected.item(), abs=1e-8)


@pytest.mark.parametrize("phi, rho", [(F.silu, 0.35), (F.relu, 0.0)])
def test_gated_kernel_against_monte_carlo(phi, rho, monkeypatch):
    """k_0 is a finite-width effect: random inputs of d dimensions, random rows, nothing taken as Gaussian."""
    monkeypatch.setitem(theory.ACTIVATIONS, "swiglu", phi)
    d, s, draws = 24, 0.8, 100_000
    products = []
    for part in range(10):
        gate, up, x, noise = normal(4, draws // 10, d, seed=part)
        y = rho * x + math.sqrt(1 - rho**2) * noise
        gate = s * gate / math.sqrt(d)
        up = s * up / math.sqrt(d)
        unit_x = phi((gate * x).sum(1)) * (up * x).sum(1)
        unit_y = phi((gate * y).sum(1)) * (up * y).sum(1)
        products.append(unit_x * unit_y)
    products = torch.cat(products)
    value = polyval(rho, theory.mlp_kernel("swiglu", s, d).numpy())
    # five standard errors, and rows of random length: their squares vary by 2/d
    error = 5 * products.std().item() / math.sqrt(draws)
    assert value == pytest.approx(products.mean().item(), abs=error, rel=4 / d)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_mlp_only_recursion_is_a_scalar_one(mlp):
    config = replace(PRESETS["nano_gpt2"], mlp=mlp, sublayers="mlp")
    kernel = theory.mlp_kernel(mlp, 0.02 * math.sqrt(768), 768).tolist()
    gain = 3072 * 4e-4 / 24  # fan-in times the variance of a residual weight
    variance, covariance = 4e-4, 0.0
    expected = [0.0]
    for _ in range(12):
        D = variance + 1e-5
        covariance += gain * sum(k * (covariance / D) ** n for n, k in enumerate(kernel))
        variance += gain * sum(k * (variance / D) ** n for n, k in enumerate(kernel))
        expected.append(covariance / variance)
    assert theory.kernel_recursion(config, 5) == pytest.approx(expected, rel=1e-9)  # float64


def test_centering_cures_gelu_and_not_swiglu():
    last = {}
    for name, scheme in itertools.product(("tiny_gpt2", "tiny_llama"), ("gpt2", "centered")):
        last[name, scheme] = theory.kernel_recursion(PRESETS[name], 8, scheme)[-1]
    assert last["tiny_gpt2", "centered"] == pytest.approx(0, abs=1e-12)  # float64
    assert last["tiny_llama", "centered"] == last["tiny_llama", "gpt2"] > 0


def test_recursion_within_a_sequence_against_newborns():
    config = PRESETS["tiny_gpt2"]
    cosines = []

    def on_state(layer, x):
        unit = F.normalize(x.double(), dim=2)
        cosines.append(unit.mean(1).square().sum(1).mean().item())  # of all pairs of positions

    for seed in range(3):
        with torch.inference_mode():
            init.newborn(config, seed).hidden(random_vectors(0, range(8), 64, 256), on_state=on_state)
    intra = [(S / theory.scales(S)).mean().item() for S, _ in theory.covariances(config, 64)]
    # Width 256 and the first order in the logits' variance leave 0.011; without that order it is 0.028.
    assert intra == pytest.approx(np.reshape(cosines, (3, 7)).mean(0).tolist(), abs=0.015)


UPDATES = [(Attention, "gelu"), (MLP, "gelu"), (MLP, "swiglu")]


@pytest.mark.parametrize("kind, mlp", UPDATES)
def test_mean_field_updates_against_monte_carlo(kind, mlp):
    """What a sublayer adds to the mean, and to the covariance of noise that positions share in part."""
    update = mean_field.attention_update if kind is Attention else mean_field.mlp_update
    config = ModelConfig(8, 5, 1, 4, 48, 96, num_kv_heads=2, mlp=mlp)
    layer = kind(config).double()
    for k, (name, weight) in enumerate(layer.named_parameters()):
        weight.data = normal(*weight.shape, seed=k) * (0 if "q_proj" in name else 0.3)  # uniform attention
    mean, gains = normal(2, 48, seed=7) * 0.5
    C = 0.5 * torch.eye(5, dtype=torch.float64) + 0.1
    x = mean + gains * (torch.linalg.cholesky(C) @ normal(4000, 5, 48, seed=8))
    with torch.no_grad():
        expected, covariance = update(layer, mean, gains, C)
        y = layer(x, rope(config, x)) if kind is Attention else layer(x)
    assert ((y[:, -1].mean(0) - expected).abs() < 5 * y[:, -1].std(0) / 4000**0.5).all()  # standard errors
    found = torch.stack([torch.cov(y[:, :, j].T) for j in range(48)]).mean(0)
    torch.testing.assert_close(found, covariance, rtol=0.1, atol=0)  # 48 dimensions: 5 % were measured


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_mean_field_against_the_model(name):
    """On weights that are no newborn's, gains and biases too, where attention is not uniform."""
    model = random_model(KINDS[name])
    for parameter_name, parameter in model.named_parameters():
        if "proj" in parameter_name:
            parameter.data *= 0.35  # attention closer to uniform than random_model has it
    direction = mean_field.mean_field(model, 24)
    with torch.inference_mode():
        tokens = torch.randint(97, (3000, 24), generator=torch.Generator().manual_seed(0))
        mean = F.normalize(model.hidden(tokens, last_only=True).double()).mean(0)
    # what the theory neglects is not small here; chance would give 0 +- 0.18
    assert torch.dot(direction, mean / mean.norm()) > 0.9
