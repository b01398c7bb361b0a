"""What should we see? Predictions of the contraction at birth, without a free parameter (BB 4, A.1-A.3).

    >>> from measure import theory
    >>> [round(c, 4) for c in theory.relu_recursion(3)]  # BB Proposition 2
    [0.0, 0.3183, 0.4937, 0.6048]

The theory rests on two ideas. A layer of random weights is wide, so its pre-activations are Gaussian, and one
scalar function, the activation's kernel, turns cosines before a layer into cosines after it. Attention at
birth is close to uniform, so position i averages positions 1..i. Each docstring gives the formulas, and the
code below it follows their order.
"""

import functools
import math

import torch
from numpy.polynomial.polynomial import polyval
from torch import nn

from init import STD, residual_std
from model import ACTIVATIONS, GATED

KNOWN_SCHEMES = ("gpt2", "normal", "centered")
KNOWN_NORMS = ("rmsnorm", "layernorm")


class Unknown(Exception):
    """Theory does not describe a newborn; the message names what it does not know."""


def check_scheme(scheme) -> None:
    """Raise Unknown for a scheme of `init.py` that theory does not describe."""
    if scheme not in KNOWN_SCHEMES:
        raise Unknown(f"--init {scheme}")


def check_known(config) -> None:
    """Raise Unknown for what theory does not describe: a norm, a calibration, biases, positions, ..."""
    if config.norm not in KNOWN_NORMS:
        raise Unknown(f"the norm {config.norm}")
    if config.attn_calibration != "none":
        raise Unknown(f"the calibration {config.attn_calibration}")
    if config.explicit_sink:
        raise Unknown("an explicit sink")
    if config.biases:
        raise Unknown("biases of all projections")
    if config.positions != "rope":
        raise Unknown(f"positions that are {config.positions}")


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
    """The k_n >= 0, (terms,), of E phi(a) phi(b) = sum_n k_n rho^n for normal a, b of correlation rho.

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
    """The k_n, (terms,), of an MLP: two Gaussian inputs of correlation rho give units of which the mean
    product is sum k_n rho^n.

    `s` is the standard deviation of a pre-activation. The outputs for orthogonal inputs have the cosine
    k_0 / sum(k), so k_0 > 0 makes states contract. The scheme `centered` removes k_0.

    A gated unit is phi(a) b: a is its gate row times an input, b its up row times that input, and a' belongs
    to the other input. The two rows have a small cosine r, with E r^2 = 1/d. So a part of b follows a:

        b = r a + sqrt(1 - r^2) c        c is independent of a
        sum k_n rho^n = (1/d) E phi(a) a phi(a') a' + (1 - 1/d) s^2 rho E phi(a) phi(a')

    Only the first term has a k_0, of order 1/d. `centered` does not remove it, because r differs in sign
    from unit to unit.
    """
    check_scheme(scheme)

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

    `lost` is 0, or for `centered` kappa(0) = 1/pi, the units' mean product for orthogonal inputs.
    """
    check_scheme(scheme)
    lost = 1 / math.pi if scheme == "centered" else 0.0
    c = 0.0
    cosines = [c]
    for _ in range(layers):
        angle = math.pi - math.acos(c)
        kappa = (math.sqrt(1 - c**2) + c * angle) / math.pi
        c = (kappa - lost) / (1 - lost)
        cosines.append(c)
    return cosines


def amplifier(c, T):
    """Cosine of two sequences' averages over T positions, where all states have the cosine c (BB Prop. 4)."""
    return c / (1 / T + (1 - 1 / T) * c)


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
    """S and R, (2, T, T), before and after each block, in the limit of infinite width.

    S_ij is the covariance of positions i and j of one sequence, R_ij that of position i of one sequence and
    position j of another. Each block turns these two matrices into the next two; `stream` holds both.

        start:      S = 0.02^2 I                R = 0
        norm:       C = S / sqrt(D_i D_j)       D_i = S_ii + epsilon
        attention:  S += g_a A(C)               A(C) = M C M^T + v C (M C^2 M^T - (M C M^T)^2)
        MLP:        S += g_m kappa(C)           kappa(C) = sum_n k_n C^n

    R takes the same three steps as S, but its D is that of S. Products with M, which is `average`, are matrix
    products; every other product and power is entry by entry. The gains g_a and g_m, and v = e^(t^2) - 1, are
    explained below. With residual=False a sublayer replaces the stream. Raises Unknown.
    """
    check_known(config)
    d = config.d_model
    residual_variance = residual_std(config, scheme) ** 2
    # The gain of a matrix is its fan-in times the variance of its weights. g_a is that of W_V times that of
    # W_O, and g_m is that of W_down.
    g_a = d * STD**2 * config.num_heads * config.head_size * residual_variance
    g_m = config.d_ff * residual_variance
    t = 1.0 if config.qk_norm else d * STD**2  # std of a logit: std(q) std(k), sqrt(d) 0.02 each
    v = math.expm1(t**2)
    k = mlp_kernel(config.mlp, math.sqrt(d) * STD, d, scheme)
    stream = torch.zeros(2, T, T, dtype=torch.float64)  # S and R
    stream[0].fill_diagonal_(STD**2)
    yield stream
    for _ in range(config.num_layers):
        if config.sublayers != "mlp":
            C = stream / scales(stream[0], config.norm_epsilon)
            # Query i pays key a the random weight w_ia: A_ij is the sum over a, b of E[w_ia w_jb] C_ab.
            # The logits of w_ia and w_jb are normal, with variance t^2 and covariance t^2 x, x = C_ij C_ab.
            # (RoPE is neglected; it makes the covariance smaller.)
            # Before weights are normalised, E[w_ia w_jb] is M_ia M_jb e^(t^2 x). For e^(t^2 x) the code has
            # 1 + v x, which is exact at x = 0 and x = 1. The sum is then M C M^T + v C (M C^2 M^T).
            # When the weights of each query are normalised to the sum 1, about v C (M C M^T)^2 is lost.
            uniform = average(C)  # M C M^T
            uneven = average(C * C) - uniform * uniform
            stream = residual * stream + g_a * (uniform + v * C * uneven)
        if config.sublayers != "attention":
            C = stream / scales(stream[0], config.norm_epsilon)
            kappa = torch.from_numpy(polyval(C.numpy(), k.numpy()))
            stream = residual * stream + g_m * kappa
        yield stream


@functools.cache
def kernel_recursion(config, T, scheme="gpt2"):
    """Cosine of two sequences' last states, R_TT / S_TT, before (0) and after each block."""
    return [(R[-1, -1] / S[-1, -1]).item() for S, R in covariances(config, T, scheme)]


@torch.inference_mode()
def mean_field(model, T):
    """The contraction direction from the weights, (d,) of norm 1, for sequences of T random tokens.

    A state is a mean (d,), which all sequences share, plus Gaussian noise e. K (T, T) is the covariance of
    e at two positions, the same in every dimension.

        norm:       m = g mean / sqrt(P)      C = K / P                  P = [mean^2] + K_TT + epsilon
        attention:  mean += W_O W_V m         K += [W_O^2 W_V^2 g^2] M C M^T
        MLP:        mean += W_down E h        K += [W_down^2 Cov(h, h')]
                                              h = phi(W_up (m + g e / sqrt(P)))

    Matrices are squared entry by entry, [] is a mean over the dimensions of the stream, and g are the gains
    of the norm. The formulas neglect that early positions have another mean and P, that attention is
    uneven, and biases of q, k and v. Raises Unknown.
    """
    check_known(model.config)
    embedding = model.model.embed_tokens.weight
    mean = embedding.mean(0).double()
    K = torch.eye(T, dtype=torch.float64, device=embedding.device) * embedding.var().double()
    for block in model.model.layers:
        m, g, C = normed(block.input_layernorm, mean, K)
        added, covariance = attention_update(block.self_attn, m, g, C)
        mean = mean + added
        K = K + covariance
        m, g, C = normed(block.post_attention_layernorm, mean, K)
        added, covariance = mlp_update(block.mlp, m, g, C)
        mean = mean + added
        K = K + covariance
    m, _, _ = normed(model.model.norm, mean, K)
    return (m / m.norm()).cpu()


def normed(norm, mean, K):
    """m (d,), the gains g (d,), and C (T, T). LayerNorm subtracts the mean of `mean` and adds a bias."""
    g = norm.weight.double()
    bias = 0.0
    if isinstance(norm, nn.LayerNorm):
        mean = mean - mean.mean()
        bias = norm.bias.double()
    P = mean.square().mean() + K[-1, -1] + norm.eps
    m = g * mean / P.sqrt() + bias
    return m, g, K / P


def attention_update(attention, m, g, C):
    """The terms that attention adds to mean (d,) and to K (T, T)."""
    config = attention.config
    W_O = attention.o_proj.weight.double()  # (d, H Dh)
    W_V = attention.v_proj.weight.double()  # (G Dh, d)
    W_V = W_V.view(config.kv_heads, config.head_size, -1)  # (G, Dh, d)
    W_V = W_V.repeat_interleave(config.num_heads // config.kv_heads, dim=0)  # (H, Dh, d)
    W_V = W_V.flatten(0, 1)  # (H Dh, d)
    power = W_O.square() @ (W_V.square() @ g.square())  # (d,)
    return W_O @ (W_V @ m), power.mean() * average(C)


def mlp_update(mlp, m, g, C):
    """The terms that an MLP adds to mean (d,) and to K (T, T).

    Cov(h, h') is Var h at one position, and at two positions about `slope` times the cosine of their noise.
    """
    expected, variance, slope = hidden_moments(mlp, m, g.square() * C[-1, -1])
    W_down = mlp.down_proj.weight.double()  # (d, d_ff)
    power = W_down.square().mean(0)  # (d_ff,)
    covariance = (power @ slope) * C / scales(C)
    covariance.diagonal().add_(power @ (variance - slope))
    return W_down @ expected, covariance


def hidden_moments(mlp, m, noise):
    """E h, Var h and slope, (d_ff,) float64, of hidden units h for inputs x ~ N(m, diag(noise)).

    `noise` has variances, (d,). Two inputs whose noise has a small correlation rho have hidden units of
    covariance slope * rho. A gated unit h = phi(gate x) u is written with z ~ N(0, 1) and a normal variable
    `rest` that is independent of z:

        gate x = gate m + s z                      s^2 = gate^2 noise
        u = up x = up m + (c / s) z + rest         c = gate noise up        Var rest = up^2 noise - (c / s)^2
        slope = (E h z)^2 + Var rest (E phi)^2

    Without a gate, `up` takes the place of `gate`, and u = 1.
    """
    z, weight = gaussian_grid(61, noise.device)
    up = mlp.up_proj.weight.double()  # (d_ff, d)
    gate = up if mlp.gate_proj is None else mlp.gate_proj.weight.double()
    s = (gate.square() @ noise).sqrt().clamp(min=1e-30)  # (d_ff,); s is 0 if a gate was pruned
    gate_x = (gate @ m)[:, None] + s[:, None] * z  # (d_ff, nodes)
    phi = mlp.activation(gate_x)
    u = torch.ones_like(phi)  # the mean of u for each z
    u_variance = torch.zeros_like(s)  # Var rest
    if mlp.gate_proj is not None:
        c = (gate * noise * up).sum(1)
        of_z = c / s  # (d_ff,)
        u = (up @ m)[:, None] + of_z[:, None] * z
        u_variance = up.square() @ noise - of_z.square()
    h = phi * u  # the mean of h for each z
    square = phi.square() * (u.square() + u_variance[:, None])  # the mean of h^2 for each z
    expected = h @ weight
    variance = square @ weight - expected.square()
    slope_of_z = (h @ (weight * z)).square()
    slope_of_rest = u_variance * (phi @ weight).square()
    return expected, variance, slope_of_z + slope_of_rest
