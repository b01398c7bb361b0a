"""Predict a newborn's contraction from its configuration, without a free parameter (BB 4, A.1-A.3).

The theory rests on two ideas. Layers of random weights are wide, so their pre-activations are Gaussian, and
one scalar function, the activation's kernel, maps cosines before a layer to cosines after it. Initial
attention is nearly uniform, so position i averages positions 1..i: unrelated sequences stay unrelated, but
what they share grows. Each docstring gives the formulas; the code follows their order. The theory knows the
activations of model.py, and the norms and initializations below, but no calibration and no explicit sink.
"""

import functools
import math
from dataclasses import fields

import torch
from numpy.polynomial.polynomial import polyval

from init import STD, residual_std
from model import ACTIVATIONS, GATED

SCHEMES = ("gpt2", "normal", "centered")
# Fields that the formulas have; where another one is not at its default, nothing is known.
KNOWN = set("vocab_size context_length num_layers num_heads d_model d_ff num_kv_heads head_dim norm".split())
KNOWN |= set("norm_epsilon mlp qkv_bias rope_theta tie_embeddings sublayers".split())


def knows(config, scheme="gpt2"):
    """Whether theory can predict a newborn's states; where it cannot, its numbers are None."""
    is_plain = True
    for field in fields(config):
        if field.name not in KNOWN and getattr(config, field.name) != field.default:
            is_plain = False
    return is_plain and config.norm in ("rmsnorm", "layernorm") and scheme in SCHEMES


def gaussian_grid(points, device="cpu"):
    """Nodes z and weights w, (points,) float64, such that sum w f(z) = E f(z) for z ~ N(0, 1)."""
    z = torch.linspace(-9, 9, points, dtype=torch.float64, device=device)
    return z, torch.exp(-z.square() / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)


def hermite_kernel(phi, terms=64):
    """The k_n >= 0, (terms,), with E phi(a) phi(b) = sum_n k_n rho^n for normal a and b of correlation rho.

        k_n = (E phi(z) h_n(z))^2        h_0 = 1        h_{n+1} = (z h_n - sqrt(n) h_{n-1}) / sqrt(n + 1)

    The h_n are normalized Hermite polynomials. The last k_n takes all further terms (for ReLU about 2e-4 of
    the sum), so that sum(k) is exactly E phi(z)^2.
    """
    z, weight = gaussian_grid(2001)  # odd: one node is 0, where ReLU has its kink
    value = phi(z)
    before = torch.zeros_like(z)
    h = torch.ones_like(z)
    k = torch.zeros(terms, dtype=torch.float64)
    for n in range(terms):
        k[n] = (weight * value * h).sum().square()
        before, h = h, (z * h - math.sqrt(n) * before) / math.sqrt(n + 1)
    k[-1] += (weight * value.square()).sum() - k.sum()
    return k


def mlp_kernel(mlp, s, d, scheme="gpt2"):
    """An MLP's k_n, (terms,): sum k_n rho^n is the mean product of a neuron's values for two inputs.

    The inputs are Gaussian, of correlation rho; `s` is the standard deviation of a pre-activation. Orthogonal
    inputs leave with the cosine k_0 / sum(k), so k_0 > 0 makes states contract. `centered` removes k_0.

    A gated neuron is phi(a) b: a is its gate row times an input, b its up row times that input; a' is a for
    the other input. The two rows have a small cosine r, with E r^2 = 1/d. So a part of b follows a:

        b = r a + sqrt(1 - r^2) c        c is independent of a
        sum k_n rho^n = (1/d) E phi(a) a phi(a') a' + (1 - 1/d) s^2 rho E phi(a) phi(a')

    Only the first term has a k_0, of order 1/d. `centered` does not remove it: r differs in sign by neuron.
    """

    def neuron(z):
        return ACTIVATIONS[mlp](s * z)

    k = hermite_kernel(neuron)
    if mlp in GATED:
        aligned = hermite_kernel(lambda z: neuron(z) * s * z)  # of neurons whose up row is their gate row
        # The factor rho shifts each k_n by one power; the highest, negligible for SiLU, would fall off.
        independent = torch.cat((k.new_zeros(1), k[:-1]))
        return aligned / d + (1 - 1 / d) * s**2 * independent
    if scheme == "centered":
        k[0] = 0
    return k


def average(S):
    """M S M^T for covariances S (..., T, T) of positions, where M averages: M_ij = 1/i for j <= i, else 0."""
    i = torch.arange(1, S.shape[-1] + 1, dtype=S.dtype, device=S.device)
    return S.cumsum(-2).cumsum(-1) / i.outer(i)


def scales(S, epsilon=0.0):
    """sqrt(D_i D_j), (T, T), where D_i = S_ii + epsilon; S divided by it is a matrix of cosines."""
    D = S.diag() + epsilon
    return D.outer(D).sqrt()


def covariances(config, T, scheme="gpt2"):
    """Yield S and R, (2, T, T), before and after each block of a wide model (gated MLPs keep terms of 1/d).

    S_ij is the covariance of positions i and j in one sequence, R_ij that of position i in one sequence and
    position j in another. Each block turns these two matrices into the next two; `both` holds them.

        start:      S = 0.02^2 I                R = 0
        norm:       C = S / sqrt(D_i D_j)       D_i = S_ii + epsilon
        attention:  S += g_a A(C)               A(C) = M C M^T + v C (M C^2 M^T - (M C M^T)^2)
        MLP:        S += g_m kappa(C)           kappa(C) = sum_n k_n C^n

    R takes the same three steps, with the D of S. Products with M (see `average`) are matrix products; every
    other product and power is entry by entry. The gains g_a and g_m, and v = e^(t^2) - 1, come below.
    """
    d = config.d_model
    residual_variance = residual_std(config, scheme) ** 2
    # The gain of a matrix is its fan-in times its weights' variance: g_a is W_V's times W_O's, g_m W_down's.
    g_a = d * STD**2 * config.num_heads * config.head_size * residual_variance
    g_m = config.d_ff * residual_variance
    t = d * STD**2  # std of an attention logit: std(q) std(k), sqrt(d) 0.02 each
    v = math.expm1(t**2)
    k = mlp_kernel(config.mlp, math.sqrt(d) * STD, d, scheme)
    both = torch.zeros(2, T, T, dtype=torch.float64)  # S and R
    both[0].fill_diagonal_(STD**2)
    yield both
    for _ in range(config.num_layers):
        if config.sublayers != "mlp":
            C = both / scales(both[0], config.norm_epsilon)
            # Query i gives key a a random weight w_ia: A_ij is the sum over a, b of E[w_ia w_jb] C_ab.
            # Their logits are normal, with variance t^2 and covariance t^2 x, x = C_ij C_ab (neglecting
            # RoPE, which makes it smaller). Before the softmax divides, E[w_ia w_jb] = M_ia M_jb e^(t^2 x),
            # with means M. Replace e^(t^2 x) by 1 + v x, exact at x = 0 and x = 1: the sum is M C M^T +
            # v C (M C^2 M^T). Dividing each query's weights by their sum loses about v C (M C M^T)^2.
            uniform = average(C)  # M C M^T
            uneven = average(C * C) - uniform * uniform
            both = both + g_a * (uniform + v * C * uneven)
        if config.sublayers != "attention":
            C = both / scales(both[0], config.norm_epsilon)
            both = both + g_m * torch.from_numpy(polyval(C.numpy(), k.numpy()))
        yield both


@functools.cache
def kernel_recursion(config, T, scheme="gpt2"):
    """Cosines of two sequences' last states, R_TT / S_TT, before and after each block; or Nones."""
    if not knows(config, scheme):
        return [None] * (config.num_layers + 1)
    return [(R[-1, -1] / S[-1, -1]).item() for S, R in covariances(config, T, scheme)]
