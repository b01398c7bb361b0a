"""What should we see? Predictions of the contraction at birth, without a free parameter (BB 4, A.1-A.3).

    >>> from measure import theory
    >>> [round(c, 4) for c in theory.relu_recursion(3)]  # BB Proposition 2
    [0.0, 0.3183, 0.4937, 0.6048]

The theory rests on two ideas. A layer of random weights is wide, so its pre-activations are Gaussian, and one
scalar function, the activation's kernel, turns cosines before a layer into cosines after it. Attention at
birth is close to uniform, so position i averages positions 1..i: unrelated sequences stay unrelated, but what
they share grows. Each docstring gives the formulas, and the code below it follows their order.
"""

import functools
import math

import torch
from numpy.polynomial.polynomial import polyval

from init import STD, residual_std
from model import ACTIVATIONS, GATED

KNOWN_SCHEMES = ("gpt2", "normal", "centered")


def unknown(config, scheme="gpt2"):
    """What of a newborn theory does not describe, in words; None if it describes it."""
    if scheme not in KNOWN_SCHEMES:
        return f"--init {scheme}"
    if config.norm not in ("rmsnorm", "layernorm"):
        return f"the norm {config.norm}"
    if config.attn_calibration != "none":
        return f"the calibration {config.attn_calibration}"
    if config.explicit_sink:
        return "explicit sinks"
    return None


def gaussian_grid(points, device="cpu"):
    """Nodes z and weights w, (points,) float64: the sum of w f(z) is E f(z) for z ~ N(0, 1).

    An odd number of points has a node at 0, where ReLU has its kink.
    """
    z = torch.linspace(-9, 9, points, dtype=torch.float64, device=device)
    step = z[1] - z[0]
    w = torch.exp(-z.square() / 2) * step / math.sqrt(2 * math.pi)
    return z, w


# ---- one layer: the activation's kernel --------------------------------------------------------------------


def hermite_kernel(phi, terms=64):
    """The k_n >= 0, (terms,), with E phi(a) phi(b) = sum_n k_n rho^n for normal a and b of correlation rho.

        k_n = (E phi(z) h_n(z))^2        h_0 = 1        h_{n+1} = (z h_n - sqrt(n) h_{n-1}) / sqrt(n + 1)

    The h_n are the normalised Hermite polynomials. What is cut off (for ReLU about 2e-4 of the sum) is added
    to the last k_n, so that sum(k) is exactly E phi(z)^2.
    """
    z, weight = gaussian_grid(2001)
    value = phi(z)
    before = torch.zeros_like(z)
    h = torch.ones_like(z)
    k = torch.zeros(terms, dtype=torch.float64)
    for n in range(terms):
        k[n] = (weight * value * h).sum().square()
        after = (z * h - math.sqrt(n) * before) / math.sqrt(n + 1)
        before = h
        h = after
    k[-1] += (weight * value.square()).sum() - k.sum()
    return k


def mlp_kernel(mlp, s, d, scheme="gpt2"):
    """The k_n, (terms,), of an MLP: for two Gaussian inputs of correlation rho, a hidden unit's two values
    have the mean product sum k_n rho^n.

    `s` is the standard deviation of a pre-activation. The outputs for orthogonal inputs have the cosine
    k_0 / sum(k), so k_0 > 0 makes states contract. The scheme `centered` removes k_0.

    A gated unit is phi(a) b: a is its gate row times an input, b its up row times that input, and a' belongs
    to the other input. The two rows have a small cosine r, with E r^2 = 1/d. So a part of b follows a:

        b = r a + sqrt(1 - r^2) c        c is independent of a
        sum k_n rho^n = (1/d) E phi(a) a phi(a') a' + (1 - 1/d) s^2 rho E phi(a) phi(a')

    Only the first term has a k_0, of order 1/d. `centered` does not remove it, because r differs in sign
    from unit to unit. None for a scheme that theory does not know.
    """
    if scheme not in KNOWN_SCHEMES:
        return None

    def unit(z):
        return ACTIVATIONS[mlp](s * z)

    def aligned_unit(z):  # the gated unit whose up row is its gate row
        return unit(z) * s * z

    k = hermite_kernel(unit)
    if mlp in GATED:
        aligned = hermite_kernel(aligned_unit)
        # The factor rho moves each k_n up by one power. The last is dropped: it is 0 for SiLU.
        independent = torch.cat((k.new_zeros(1), k[:-1]))
        return aligned / d + (1 - 1 / d) * s**2 * independent
    if scheme == "centered":
        k[0] = 0
    return k


def relu_recursion(layers, scheme="gpt2"):
    """Cosines along a stack of wide ReLU MLPs without norm and residual, the input's first (BB Prop. 2).

        c_0 = 0        c_{l+1} = (kappa(c_l) - lost) / (1 - lost)
        kappa(c) = (sqrt(1 - c^2) + c (pi - arccos c)) / pi

    kappa(1) = 1. `lost` is 0; for `centered` kappa(0) = 1/pi, units' mean product for orthogonal inputs.
    """
    if scheme not in KNOWN_SCHEMES:
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


# ---- averaging: what attention does ------------------------------------------------------------------------


def average(S):
    """M S M^T for covariances S (..., T, T) of positions. M averages: M_ij = 1/i for j <= i, else 0."""
    i = torch.arange(1, S.shape[-1] + 1, dtype=S.dtype, device=S.device)
    return S.cumsum(-2).cumsum(-1) / i.outer(i)


def scales(S, epsilon=0.0):
    """sqrt(D_i D_j), (T, T), where D_i = S_ii + epsilon. S divided by it is a matrix of cosines."""
    D = S.diag() + epsilon
    return D.outer(D).sqrt()


# ---- the whole newborn network -----------------------------------------------------------------------------


def covariances(config, T, scheme="gpt2", residual=True):
    """S and R, (2, T, T), before and after each block of a wide model (gated MLPs keep terms of 1/d).

    S_ij is the covariance of positions i and j of one sequence, R_ij that of position i of one sequence and
    position j of another. Each block turns these two matrices into the next two; `both` holds them.

        start:      S = 0.02^2 I                R = 0
        norm:       C = S / sqrt(D_i D_j)       D_i = S_ii + epsilon
        attention:  S += g_a A(C)               A(C) = M C M^T + v C (M C^2 M^T - (M C M^T)^2)
        MLP:        S += g_m kappa(C)           kappa(C) = sum_n k_n C^n

    R takes the same three steps as S, but its D is that of S. Products with M, which is `average`, are matrix
    products; every other product and power is entry by entry. The gains g_a and g_m, and v = e^(t^2) - 1, are
    explained below. With residual=False a sublayer replaces the stream. Not for what is `unknown`.
    """
    d = config.d_model
    residual_variance = residual_std(config, scheme) ** 2
    # The gain of a matrix is its fan-in times the variance of its weights. g_a is that of W_V times that of
    # W_O, and g_m is that of W_down.
    g_a = d * STD**2 * config.num_heads * config.head_size * residual_variance
    g_m = config.d_ff * residual_variance
    t = d * STD**2  # std of a logit: std(q) std(k), sqrt(d) 0.02 each
    v = math.expm1(t**2)
    k = mlp_kernel(config.mlp, math.sqrt(d) * STD, d, scheme)
    both = torch.zeros(2, T, T, dtype=torch.float64)  # S and R
    both[0].fill_diagonal_(STD**2)
    yield both
    for _ in range(config.num_layers):
        if config.sublayers != "mlp":
            C = both / scales(both[0], config.norm_epsilon)
            # Query i pays key a the random weight w_ia: A_ij is the sum over a, b of E[w_ia w_jb] C_ab.
            # The logits of w_ia and w_jb are normal, with variance t^2 and covariance t^2 x, x = C_ij C_ab.
            # (RoPE is neglected; it makes the covariance smaller.)
            # Weights not yet normalised, over their means, have E[w_ia w_jb] = M_ia M_jb e^(t^2 x). For
            # the power the code has 1 + v x, exact at 0 and 1. The sum is then M C M^T + v C (M C^2 M^T).
            # When each query's weights are normalised to the sum 1, about v C (M C M^T)^2 is lost.
            uniform = average(C)  # M C M^T
            uneven = average(C * C) - uniform * uniform
            both = residual * both + g_a * (uniform + v * C * uneven)
        if config.sublayers != "attention":
            C = both / scales(both[0], config.norm_epsilon)
            kappa = torch.from_numpy(polyval(C.numpy(), k.numpy()))
            both = residual * both + g_m * kappa
        yield both


@functools.cache
def kernel_recursion(config, T, scheme="gpt2"):
    """Cosine of two sequences' last states, R_TT / S_TT, before (0) and after each block; None if unknown."""
    if unknown(config, scheme):
        return [None] * (config.num_layers + 1)
    return [(R[-1, -1] / S[-1, -1]).item() for S, R in covariances(config, T, scheme)]
