"""theory.py against Monte Carlo, quadrature by scipy, explicit matrices, and itself in its limits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import KINDS, random_model
from scipy.integrate import quad
from scipy.stats import norm

import init
import theory
from model import MLP, PRESETS, ModelConfig

PHI = {"gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh, "swiglu": F.silu}


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moment(f):
    """E f(z) by scipy's adaptive quadrature."""
    return quad(lambda z: f(z) * norm.pdf(z), -12, 12, points=[0.0], epsabs=1e-12)[0]


def scalar(phi):
    return lambda z: float(PHI[phi](torch.tensor(z, dtype=torch.float64)))


@pytest.mark.parametrize("phi", ["gelu", "relu", "tanh"])
@pytest.mark.parametrize("rho", [0.0, 0.3, -0.5, 0.9, 1.0])
def test_kernel_against_monte_carlo(phi, rho):
    kernel = theory.hermite_kernel(lambda z: PHI[phi](0.7 * z))
    a, v = normal(2, 1_000_000)
    b = rho * a + math.sqrt(1 - rho**2) * v
    products = PHI[phi](0.7 * a) * PHI[phi](0.7 * b)
    error = 5 * products.std() / 1000  # five standard errors of a million draws
    assert theory.evaluate(kernel, torch.tensor(rho)).item() == pytest.approx(
        products.mean().item(), abs=error.item()
    )


@pytest.mark.parametrize("phi", ["gelu", "relu", "tanh"])
@pytest.mark.parametrize("s", [0.01, 0.55, 2.0])
def test_kernel_ends_against_quadrature(phi, s):
    f, kernel = scalar(phi), theory.hermite_kernel(lambda z: PHI[phi](s * z))
    # the trapezoid's error at ReLU's kink is h^2/12 = 7e-6 of the expectation
    assert kernel[0] == pytest.approx(moment(lambda z: f(s * z)) ** 2, rel=3e-5, abs=1e-15)
    assert kernel.sum() == pytest.approx(moment(lambda z: f(s * z) ** 2), rel=3e-5)


def test_kernel_of_relu_is_the_arc_cosine_kernel():
    kernel, c = theory.hermite_kernel(torch.relu), theory.relu_recursion(30)
    for before, after in zip(c, c[1:]):
        value = theory.evaluate(kernel, torch.tensor(before, dtype=torch.float64)) / kernel.sum()
        # the tail beyond 64 terms, 1e-4 of E phi^2, is put at the last power: exact at rho = 0 and 1
        assert value.item() == pytest.approx(after, abs=2e-4)


@pytest.mark.parametrize("rho", [0.0, 0.35])
def test_swiglu_kernel_against_monte_carlo(rho):
    """k_0 is a finite-width effect: random inputs of d dimensions, random rows, nothing taken as Gaussian."""
    d, s, n = 24, 0.8, 1_000_000
    total, square = 0.0, 0.0
    for part in range(10):
        g, u, x, v = normal(4, n // 10, d, seed=part)
        y = rho * x + math.sqrt(1 - rho**2) * v
        g, u = s * g / math.sqrt(d), s * u / math.sqrt(d)
        products = F.silu((g * x).sum(1)) * (u * x).sum(1) * F.silu((g * y).sum(1)) * (u * y).sum(1)
        total, square = total + products.sum().item(), square + products.square().sum().item()
    value = theory.evaluate(theory.mlp_kernel("swiglu", s, d), torch.tensor(rho)).item()
    # five standard errors, and rows of random length: their squares vary by 2/d
    assert value == pytest.approx(total / n, abs=5 * math.sqrt(square) / n, rel=4 / d)


def test_one_block_cosine_in_its_limits():
    assert theory.one_block_cosine("relu", 3.0, 5) == pytest.approx(1 / math.pi, rel=3e-5)
    assert theory.one_block_cosine("tanh", 1.0, 5) == pytest.approx(0, abs=1e-12)
    assert theory.one_block_cosine("gelu", 1.0, 5) == pytest.approx(0.1871, abs=1e-4)
    small = 1e-3  # gelu(x) = x/2 + x^2/sqrt(2 pi) + ...: (E phi)^2 / E phi^2 = (s^2/sqrt(2 pi))^2 / (s^2/4)
    assert theory.one_block_cosine("gelu", small, 5) == pytest.approx(small**2 * 2 / math.pi, rel=1e-4)
    assert theory.one_block_cosine("gelu", 1e3, 5) == pytest.approx(1 / math.pi, rel=1e-3)  # a ReLU from afar
    f, d = scalar("swiglu"), 10_000
    expected = moment(lambda z: f(z) * z) ** 2 / moment(lambda z: f(z) ** 2)  # design: 0.703 / d
    assert theory.one_block_cosine("swiglu", 1.0, d) * d == pytest.approx(expected, rel=1e-3)
    assert expected == pytest.approx(0.703, abs=1e-3)


def test_relu_recursion():
    c = theory.relu_recursion(2000)
    assert c[:7] == pytest.approx([0, 0.3183, 0.4937, 0.6048, 0.6810, 0.7359, 0.7772], abs=5e-5)
    assert all(np.diff(c) > 0) and c[-1] < 1 and 1 - c[-1] < 1e-4


@pytest.mark.parametrize("T", [1, 2, 100])
def test_amplifier_against_monte_carlo(T):
    """Averages of T states that share one component of weight sqrt(c)."""
    c, d = 1 / math.pi, 400_000
    shared = normal(d) * math.sqrt(c)
    means = [shared + math.sqrt((1 - c) / T) * normal(d, seed=k) for k in (1, 2)]
    measured = F.cosine_similarity(*means, dim=0).item()
    assert theory.amplifier(c, T) == pytest.approx(measured, abs=5 / math.sqrt(d))
    assert theory.amplifier(c, 1) == pytest.approx(c) and theory.amplifier(c, 10**9) == pytest.approx(1)


def test_amplifier_has_the_values_of_table_3():
    c = 1 / math.pi
    assert [theory.amplifier(c, T) for T in (100, 128, 1024)] == pytest.approx(
        [0.979, 0.9835, 0.9979], abs=5e-5
    )


@pytest.mark.parametrize("T, L", [(1, 3), (2, 1), (7, 4), (33, 8)])
def test_averaging_stack_against_the_matrix_power(T, L):
    M = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]
    P = np.linalg.matrix_power(M, L)
    S = P @ P.T
    expected = (S / np.sqrt(np.outer(S.diagonal(), S.diagonal()))).mean()
    assert theory.averaging_stack(T, L)[-1] == pytest.approx(expected, rel=1e-10)


def test_averaging_limit_is_the_limit():
    rho = [(c - 1 / 10**9) / (1 - 1 / 10**9) for c in theory.averaging_limit(10**9, 3)]
    assert rho == pytest.approx([2 / 3, 8 / 9, 0.9383], abs=5e-5)
    deep = theory.averaging_limit(64, 200)  # no model is too deep for it
    assert np.isfinite(deep).all() and (np.diff(deep) >= -1e-12).all() and deep[-1] < 1 + 1e-9
    errors = [
        np.abs(np.subtract(theory.averaging_stack(T, 3), theory.averaging_limit(T, 3)))
        for T in (64, 512, 2048)
    ]
    assert (errors[0] > errors[1]).all() and (errors[1] > errors[2]).all() and errors[2].max() < 0.004
    assert theory.averaging_stack(512, 3)[-1] == pytest.approx(
        0.9447, abs=1e-3
    )  # while Proposition 5 has 0.9384


@pytest.mark.parametrize("s", [0.3, 0.8])
@pytest.mark.parametrize("i", [1, 2, 5, 40])
def test_attention_concentration_against_monte_carlo(s, i):
    weights = (s * normal(200_000, i)).softmax(1).square().sum(1)
    error = 5 * weights.std().item() / math.sqrt(200_000) + 1e-9
    assert theory.attention_concentration(i, s)[-1] == pytest.approx(weights.mean().item(), abs=error)


def test_attention_concentration_in_its_limits():
    i = torch.arange(1, 2001, dtype=torch.float64)
    torch.testing.assert_close(theory.attention_concentration(2000, 0.0), 1 / i, rtol=1e-6, atol=0)
    assert theory.attention_concentration(2000, 0.8)[-1] * 2000 == pytest.approx(math.exp(0.64), rel=5e-3)


def test_aggregated_std_starts_at_sigma_and_has_a_floor():
    config = PRESETS["gpt2_1b"]
    std = theory.aggregated_std(config, 1024)
    sigma = math.sqrt(2048 * 4e-4 * 4e-4 / (4e-4 + 1e-5))
    assert std[0] == pytest.approx(sigma, rel=1e-6)
    assert (std * torch.arange(1, 1025).sqrt() / sigma)[[15, -1]].tolist() == pytest.approx(
        [1.30, 1.41], abs=0.01
    )


@pytest.mark.parametrize("mlp", ["gelu", "relu", "swiglu"])
def test_mlp_only_recursion_is_a_scalar_one(mlp):
    """Without attention, positions never meet: two numbers per layer, in plain Python."""
    config = replace(PRESETS["nano_gpt2"], mlp=mlp, sublayers="mlp")
    kernel = theory.mlp_kernel(mlp, 0.02 * math.sqrt(768), 768).tolist()
    gain, S, R, expected = 3072 * 4e-4 / 24, 4e-4, 0.0, [0.0]
    for _ in range(12):
        rho = R / (S + 1e-5), S / (S + 1e-5)
        R += gain * sum(k * rho[0] ** n for n, k in enumerate(kernel))
        S += gain * sum(k * rho[1] ** n for n, k in enumerate(kernel))
        expected.append(R / S)
    for T in (1, 5):
        assert theory.kernel_recursion(config, T)[0] == pytest.approx(expected, rel=1e-9)


def test_recursion_without_mlp():
    config = replace(PRESETS["nano_gpt2"], sublayers="attention", norm_epsilon=0.0)
    inter, intra = theory.kernel_recursion(config, 40)
    assert inter == [0.0] * 13 and intra[0] == pytest.approx(1 / 40) and (np.diff(intra) > 0).all()
    narrow = replace(config, d_model=24)  # narrow: logits of variance 1e-4, attention uniform
    _, intra = theory.kernel_recursion(narrow, 40, residual=False)
    assert intra[1] == pytest.approx(theory.averaging_stack(40, 1)[0], abs=1e-4)


def test_recursion_at_the_designs_reference_values():
    config = PRESETS["nano_gpt2"]
    found = [theory.kernel_recursion(config, T)[0][-1] for T in (64, 256, 512)]
    assert found == pytest.approx(
        [0.333, 0.399, 0.425], abs=0.01
    )  # its prototype left epsilon and logits out
    mlp_only = theory.kernel_recursion(replace(config, sublayers="mlp"), 64)[0]
    assert mlp_only[-1] == pytest.approx(0.238, abs=0.005) and mlp_only[1] == pytest.approx(0.099, abs=0.005)
    for scheme in ("centered", "projected"):
        assert max(theory.kernel_recursion(config, 64, scheme=scheme)[0]) < 1e-12


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_hidden_moments_against_monte_carlo(mlp):
    d, n = 12, 400_000
    layer = MLP(ModelConfig(8, 8, 1, 2, d, 20, mlp=mlp)).double()
    for k, weight in enumerate(layer.parameters()):
        weight.data = normal(*weight.shape, seed=k) * 0.4
    mean, noise = normal(d, seed=7) * 0.5, normal(d, seed=8).square() * 0.5

    def hidden(x):
        act = layer.activation(x @ (layer.up_proj if layer.gate_proj is None else layer.gate_proj).weight.T)
        return act if layer.gate_proj is None else act * (x @ layer.up_proj.weight.T)

    with torch.no_grad():
        a, v = normal(n, d, seed=9), normal(n, d, seed=10)
        h = hidden(mean + a * noise.sqrt())
        expected, variance, slope = theory.hidden_moments(layer, mean, noise)
        error = 5 * h.std(0) / math.sqrt(n)
        assert ((expected - h.mean(0)).abs() < error).all()
        torch.testing.assert_close(variance, h.var(0), rtol=0.05, atol=0)  # heavy tails: a few per cent
        rho = 0.02  # first order in rho: the covariance of inputs that share a little
        b = rho * a + math.sqrt(1 - rho**2) * v
        products = (h - h.mean(0)) * (hidden(mean + b * noise.sqrt()) - h.mean(0))
        error = 5 * products.std(0) / math.sqrt(n) + 0.05 * rho * slope
        assert ((rho * slope - products.mean(0)).abs() < error).all()


def test_expected_gelu_in_closed_form():
    """E GELU(N(a, s^2)) = a Phi(a/sqrt(1+s^2)) + s^2/sqrt(1+s^2) phi(a/sqrt(1+s^2))."""
    layer = MLP(ModelConfig(8, 8, 1, 2, 4, 50, mlp="gelu")).double()
    layer.up_proj.weight.data = normal(50, 4)
    mean, noise = normal(4, seed=1), torch.full((4,), 0.3, dtype=torch.float64)
    with torch.no_grad():
        expected, *_ = theory.hidden_moments(layer, mean, noise)
        a, s2 = (layer.up_proj.weight @ mean).numpy(), 0.3 * layer.up_proj.weight.square().sum(1).numpy()
    root = np.sqrt(1 + s2)
    closed = a * norm.cdf(a / root) + s2 / root * norm.pdf(a / root)
    np.testing.assert_allclose(expected, closed, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["gpt2", "llama_gqa"])
def test_mean_field_against_the_model(kind):
    """On weights that are no newborn's, gains and biases too, where attention is not uniform."""
    model = random_model(KINDS[kind])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(0.35)  # attention closer to uniform than random_model has it
    direction, cosine = theory.mean_field(model, 24)
    with torch.inference_mode():
        tokens = torch.randint(97, (3000, 24), generator=torch.Generator().manual_seed(0))
        states = model.hidden(tokens, last_only=True).double()
    unit = states / states.norm(dim=1, keepdim=True)
    mean = unit.mean(0)
    assert torch.dot(direction, mean / mean.norm()) > 0.9
    assert cosine == pytest.approx(mean.square().sum().item(), abs=0.1)


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_llama"])
def test_projected_down_projections_pass_no_mean_output(name):
    model = init.newborn(name, 3)
    theory.project_out_mean_output(model)
    zero = torch.zeros(256, dtype=torch.float64)
    for before, block in zip(init.newborn(name, 3).model.layers, model.model.layers):
        expected, *_ = theory.hidden_moments(block.mlp, zero, zero + 1)
        weight = block.mlp.down_proj.weight.double()
        passed = (weight @ expected).norm() / (before.mlp.down_proj.weight.double() @ expected).norm()
        assert passed < 1e-5  # float32 weights
        assert weight.std().item() == pytest.approx(
            before.mlp.down_proj.weight.double().std().item(), rel=0.01
        )


def test_centering_does_not_cure_swiglu():
    """Its hidden units' means differ in sign, so a down row's sum says nothing about what passes."""
    plain, centered, projected = (
        theory.kernel_recursion(PRESETS["tiny_llama"], 8, scheme=scheme)[0][-1]
        for scheme in ("gpt2", "centered", "projected")
    )
    assert centered == plain > 0 == projected
    model = init.newborn("tiny_llama", 3)
    zero = torch.zeros(256, dtype=torch.float64)
    mean, *_ = theory.hidden_moments(model.model.layers[0].mlp, zero, zero + 1)
    assert abs(mean.mean()) < 0.2 * mean.std()  # 704 units: the standard error is 0.04
