"""What should we see? Predictions of the contraction at birth, without a free parameter (BB 4, A.1-A.3).

    >>> from measure import theory
    >>> [round(c, 4) for c in theory.relu_recursion(3)]  # BB Proposition 2
    [0.0, 0.3183, 0.4937, 0.6048]

Two ideas carry most of it. A random layer is wide, so a pre-activation is Gaussian: cosines go from layer to
layer by one scalar function, the activation's kernel. And attention at birth is close to uniform: position i
averages positions 1..i. Each recursion begins with its formulas; the code below has their order and letters.
On a first reading leave out the last section, with the experiments that contraction.py leaves out.
"""

import functools
import math

import torch
from numpy.polynomial.polynomial import polyval
from torch import Tensor, nn

from init import STD, residual_std
from model import ACTIVATIONS, GATED, MLP, ModelConfig, Transformer, rope_frequencies

KNOWN_SCHEMES = ("gpt2", "normal", "centered")
KNOWN_NORMS = ("rmsnorm", "layernorm")


def knows(config: ModelConfig, scheme="gpt2"):
    """Is there theory of such newborns? Of any activation; of no other scheme or norm, and no calibration."""
    return scheme in KNOWN_SCHEMES and config.norm in KNOWN_NORMS and config.attn_calibration == "none"


def gaussian_grid(points, device="cpu"):
    """Nodes z and weights w, (points,) float64: sum(w f(z)) is E f(z), z ~ N(0, 1), kinks at 0 included."""
    z = torch.linspace(-9, 9, points, dtype=torch.float64, device=device)
    return z, torch.exp(-z.square() / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)


# ---- one layer: the activation's kernel --------------------------------------------------------------------


def hermite_kernel(phi, terms=64) -> Tensor:
    """The k_n >= 0, (terms,), of E phi(a) phi(b) = sum_n k_n rho^n for normal a, b of correlation rho.

        k_n = (E phi(z) h_n(z))^2        h_0 = 1        h_{n+1} = (z h_n - sqrt(n) h_{n-1}) / sqrt(n + 1)

    The h_n are the normalised Hermite polynomials. What is left of E phi(z)^2 (for ReLU some 1e-4 of it) goes
    to the last term, so that sum(k) is exact.
    """
    z, weight = gaussian_grid(2001)
    value = phi(z)
    before = torch.zeros_like(z)
    h = torch.ones_like(z)
    k = torch.zeros(terms, dtype=torch.float64)
    for n in range(terms):
        k[n] = (weight * value * h).sum().square()
        before, h = h, (z * h - math.sqrt(n) * before) / math.sqrt(n + 1)
    k[-1] += (weight * value.square()).sum() - k.sum()
    return k


def mlp_kernel(mlp, s, d, scheme="gpt2") -> Tensor:
    """The hidden layer's k_n, (terms,): its units' mean product for inputs of cosine rho is sum k_n rho^n.

    `s` is the standard deviation of a pre-activation. k_0 > 0 is all of the contraction: orthogonal inputs
    get outputs of cosine k_0 / sum(k). Scheme `centered` lets no k_0 through. A gated unit is phi(g) u:

        u = r g + sqrt(1 - r^2) v      v independent of g, and r the cosine of gate and up rows: E r^2 = 1/d
        sum k_n rho^n = (1/d) E phi(g) g phi(g') g' + (1 - 1/d) s^2 rho E phi(g) phi(g')

    so that its k_0 is of order 1/d. Units' mean outputs differ in sign, so that `centered` leaves k_0.
    """

    def unit(z):
        return ACTIVATIONS[mlp](s * z)

    def aligned_unit(z):  # a gated one, where up and gate are one
        return unit(z) * s * z

    k = hermite_kernel(unit)
    if mlp in GATED:
        independent = torch.cat((k.new_zeros(1), k[:-1]))  # times rho: the powers move up by one
        return hermite_kernel(aligned_unit) / d + (1 - 1 / d) * s**2 * independent
    if scheme == "centered":
        k[0] = 0
    return k


def relu_recursion(layers, scheme="gpt2"):
    """Cosines along a stack of wide ReLU MLP0 blocks (BB Proposition 2), before and after each.

    c_0 = 0        c_{l+1} = (kappa(c_l) - lost) / (1 - lost)
    kappa(c) = (sqrt(1 - c^2) + c (pi - arccos c)) / pi

    `centered` loses what orthogonal inputs' outputs share, kappa(0) = 1/pi; other schemes lose nothing.
    """
    lost = 1 / math.pi if scheme == "centered" else 0.0
    c = 0.0
    cosines = [c]
    for _ in range(layers):
        kappa = (math.sqrt(1 - c**2) + c * (math.pi - math.acos(c))) / math.pi
        c = (kappa - lost) / (1 - lost)
        cosines.append(c)
    return cosines


def amplifier(c, T):
    """Cosine after averaging T positions whose cosines, within and between sequences, are c (BB Prop. 4)."""
    return c / (1 / T + (1 - 1 / T) * c)


# ---- averaging: what attention does ------------------------------------------------------------------------


def average(S: Tensor) -> Tensor:
    """M S M^T for covariances S (..., T, T) of positions, M_ij = 1/i for j <= i: uniform causal averaging."""
    i = torch.arange(1, S.shape[-1] + 1, dtype=S.dtype, device=S.device)
    return S.cumsum(-2).cumsum(-1) / i.outer(i)


def scales(S: Tensor, epsilon=0.0) -> Tensor:
    """sqrt(D_i D_j), (T, T), D_i = S_ii + epsilon: S divided by it is a matrix of cosines."""
    D = S.diag() + epsilon
    return D.outer(D).sqrt()


# ---- the whole newborn network -----------------------------------------------------------------------------


def covariances(config: ModelConfig, T, scheme="gpt2", residual=True):
    """S and R, (2, T, T), before and after each block, in the limit of infinite width: all that a newborn is.

    S_ij is the covariance of positions i and j within a sequence, R_ij between two; `stream` holds both.

        start:      S = 0.02^2 I                R = 0
        norm:       C = S / sqrt(D_i D_j)       D_i = S_ii + epsilon
        attention:  S += g_a A(C)               A(C) = M C M^T + v C (M C^2 M^T - (M C M^T)^2)
        MLP:        S += g_m kappa(C)           kappa(C) = sum_n k_n C^n

    The last three do to R what they do to S, with the same D. Products are of entries, but for M. A_ij is the
    sum over keys a, b of E[w_ia w_jb] C_ab. Logits of i on a and of j on b, of variance t^2, have covariance
    t^2 C_ij C_ab, so that weights not yet made to sum to 1 have E[w w] = e^(t^2 C_ij C_ab) M_ia M_jb, or
    about (1 + v C_ij C_ab) M_ia M_jb, v = e^(t^2) - 1, exactly for C_ij C_ab = 0 and 1. Times C_ab, they sum
    to M C M^T + v C_ij M C^2 M^T; that weights sum to 1 takes (M C M^T)^2 away. Without `residual`, as in
    `intra`, sublayers replace their input.
    """
    d = config.d_model
    residual_variance = residual_std(config, scheme) ** 2
    g_a = d * STD**2 * config.num_heads * config.head_size * residual_variance  # fan-ins times variances
    g_m = config.d_ff * residual_variance
    t = 1.0 if config.qk_norm else d * STD**2  # std of a logit, q's times k's: sqrt(d) 0.02 each
    v = math.expm1(t**2)
    k = mlp_kernel(config.mlp, math.sqrt(d) * STD, d, scheme)
    stream = torch.zeros(2, T, T, dtype=torch.float64)  # S and R
    stream[0].fill_diagonal_(STD**2)
    yield stream
    for _ in range(config.num_layers):
        if config.sublayers != "mlp":
            C = stream / scales(stream[0], config.norm_epsilon)
            uniform = average(C)  # M C M^T
            A = uniform + v * C * (average(C * C) - uniform * uniform)
            stream = residual * stream + g_a * A
        if config.sublayers != "attention":
            C = stream / scales(stream[0], config.norm_epsilon)
            stream = residual * stream + g_m * torch.from_numpy(polyval(C.numpy(), k.numpy()))
        yield stream


@functools.cache
def kernel_recursion(config: ModelConfig, T, scheme="gpt2"):
    """Cosine of two sequences' last states, R_TT / S_TT, before (0) and after each block."""
    return [(R[-1, -1] / S[-1, -1]).item() for S, R in covariances(config, T, scheme)]


@torch.inference_mode()
def mean_field(model: Transformer, T):
    """The contraction direction from the weights, (d,) of norm 1, for T random tokens.

    A state is what all sequences share, a mean (d,), and Gaussian noise, whose covariance over positions,
    K (T, T), is that of each dimension.

        norm:       m = g mean / sqrt(P)      C = K / P        P = mean square of mean, + K_TT + epsilon
        attention:  mean += W_O W_V m         K += [W_O^2 W_V^2 g^2] M C M^T
        MLP:        mean += W_down E h        K += [W_down^2 Cov(h, h')]         h = phi(W_up (m + g noise))

    Squares are of entries, [] is a mean over the stream's dimensions, g are the norm's gains, and P is the
    last position's for all. Neglected: early positions' own means, that attention is not quite uniform,
    biases of q, k and v, and calibrations.
    """
    embedding = model.model.embed_tokens.weight
    mean = embedding.mean(0).double()
    K = torch.eye(T, dtype=torch.float64, device=embedding.device) * embedding.var().double()
    for block in model.model.layers:
        added, covariance = attention_update(block.self_attn, *normed(block.input_layernorm, mean, K))
        mean = mean + added
        K = K + covariance
        added, covariance = mlp_update(block.mlp, *normed(block.post_attention_layernorm, mean, K))
        mean = mean + added
        K = K + covariance
    m, _, _ = normed(model.model.norm, mean, K)
    return (m / m.norm()).cpu()


def normed(norm: nn.Module, mean: Tensor, K: Tensor):
    """m (d,), the gains g (d,), and C (T, T); LayerNorm takes the mean's mean out, and adds its bias to m."""
    g = norm.weight.double()
    has_mean = isinstance(norm, nn.LayerNorm)
    mean = mean - mean.mean() if has_mean else mean
    P = mean.square().mean() + K[-1, -1] + norm.eps
    m = g * mean / P.sqrt()
    if has_mean:
        m = m + norm.bias.double()
    return m, g, K / P


def attention_update(attention: nn.Module, m: Tensor, g: Tensor, C: Tensor):
    """What attention adds to mean (d,) and K (T, T)."""
    config = attention.config
    W_O = attention.o_proj.weight.double()  # (d, H Dh)
    W_V = attention.v_proj.weight.double().view(config.kv_heads, config.head_size, -1)  # (G, Dh, d)
    W_V = W_V.repeat_interleave(config.num_heads // config.kv_heads, dim=0).flatten(0, 1)  # (H Dh, d)
    power = (W_O.square() @ (W_V.square() @ g.square())).mean()  # in the mean of the dimensions
    return W_O @ (W_V @ m), power * average(C)


def mlp_update(mlp: MLP, m: Tensor, g: Tensor, C: Tensor):
    """What an MLP adds to mean (d,) and K (T, T).

    Cov(h, h') is Var h at one position, and between two the slope times the cosine of their noise.
    """
    expected, variance, slope = hidden_moments(mlp, m, g.square() * C[-1, -1])
    W_down = mlp.down_proj.weight.double()  # (d, d_ff)
    power = W_down.square().mean(0)  # (d_ff,), of what a hidden unit adds to a dimension
    covariance = (power @ slope) * C / scales(C)
    covariance.diagonal().add_(power @ (variance - slope))
    return W_down @ expected, covariance


def hidden_moments(mlp: MLP, m: Tensor, noise: Tensor):
    """E h, Var h and slope, (d_ff,) float64, of hidden units h for inputs N(m, diag(noise)).

    For two such inputs whose noise has correlation rho, Cov(h, h') is slope times rho, to first order: slope
    sums (E[h x])^2 over the normal variables x in h, z and what z leaves open of u.

        h = phi(gate m + s z) u        s^2 = gate^2 noise        z ~ N(0, 1)
        given z, u is normal: mean up m + (c / s) z, variance up^2 noise - (c / s)^2
        c = gate noise up, the covariance of the two sums

    Without a gate, up is it, and u = 1.
    """
    z, weight = gaussian_grid(61, noise.device)
    up = mlp.up_proj.weight.double()  # (d_ff, d)
    gate = up if mlp.gate_proj is None else mlp.gate_proj.weight.double()
    s = (gate.square() @ noise).sqrt().clamp(min=1e-30)  # (d_ff,); a pruned gate has none
    phi = mlp.activation((gate @ m)[:, None] + s[:, None] * z)  # (d_ff, nodes)
    u = torch.ones_like(phi)  # its mean, given z
    u_variance = torch.zeros_like(s)
    if mlp.gate_proj is not None:
        c = (gate * noise * up).sum(1)
        u = (up @ m)[:, None] + (c / s)[:, None] * z  # (d_ff, nodes)
        u_variance = up.square() @ noise - (c / s).square()  # (d_ff,)
    h = phi * u  # its mean, given z
    square = phi.square() * (u.square() + u_variance[:, None])  # of its square
    expected = h @ weight
    variance = square @ weight - expected.square()
    slope = (h @ (weight * z)).square() + u_variance * (phi @ weight).square()
    return expected, variance, slope


# ---- more than the story needs -----------------------------------------------------------------------------


def one_block_cosine(mlp, s, d, scheme="gpt2"):
    """Cosine of one MLP0 block's outputs for orthogonal inputs; GELU, s -> 0: s^2 2/pi; SwiGLU: ~ 1/d."""
    k = mlp_kernel(mlp, s, d, scheme)
    return float(k[0] / k.sum())


def averaging_stack(T, layers):
    """Mean cosine within a sequence, the diagonal included, after 1..layers of Attn0, exact in T for large d.

    S = I        S <- M S M^T        the mean of S_ij / sqrt(S_ii S_jj)
    """
    S = torch.eye(T, dtype=torch.float64)
    cosines = []
    for _ in range(layers):
        S = average(S)
        cosines.append((S / scales(S)).mean().item())
    return cosines


def averaging_limit(T, layers):
    """The same by BB Proposition 5: 1/T + (1 - 1/T) rho_L, rho_L the limit of infinite T."""
    cosines = []
    for L in range(1, layers + 1):
        rho = 0.0
        for k in range(L):
            rho += math.comb(L - 1, k) / math.comb(2 * L - 2, k) * (2 / 3) ** (k + 1)
        cosines.append(1 / T + (1 - 1 / T) * rho)
    return cosines


def attention_concentration(T, t) -> Tensor:
    """E sum_j a_j^2 for softmax weights a over i = 1..T keys with logits N(0, t^2), (T,); uniform: 1/i.

    With w = e^logit, 1/(sum w)^2 is the integral of u e^(-u sum w) du, so that independent logits give
    i * integral of u E[w^2 e^(-uw)] E[e^(-uw)]^(i-1) du; for large i that is e^(t^2) / i.
    """
    z, weight = gaussian_grid(401)
    w = torch.exp(t * z)
    step = 0.05  # of ln u
    u = torch.arange(-30, 30, step, dtype=torch.float64).exp()
    decay = torch.exp(-torch.outer(u, w))
    others = (decay @ weight).clamp(max=1)  # E e^(-uw)
    own = decay @ (weight * w.square())  # E w^2 e^(-uw)
    i = torch.arange(1, T + 1, dtype=torch.float64)[:, None]
    return (i * u.square() * own * others ** (i - 1)).sum(1) * step  # u du = u^2 d(ln u)


def aggregated_std(config: ModelConfig, T) -> Tensor:
    """Standard deviation of aggregated values at positions 1..T of the first block, (T,) (BB Equation 2).

    With t^2 the variance of a logit, Var o_i is that of a value, 0.02^2 d, times
    E sum_j a_j^2 + (1 - 1/i) kept_i t^2 / d, where Equation 2 has 1/i. The last term does not decay with i:
    keys and values come from one input, so that attention, however slight, selects values along W_V W_K^T q;
    RoPE turns that by a different angle for each key, which leaves the share kept_i.
    """
    d = config.d_model
    i = torch.arange(1, T + 1, dtype=torch.float64)
    variance = d * STD**2 * STD**2 / (STD**2 + config.norm_epsilon)  # of values, queries and keys
    t = 1.0 if config.qk_norm else variance  # q k^T / sqrt(Dh) has the std of q times that of k
    angle = torch.outer(i - 1, rope_frequencies(config).double())  # (T, Dh/2)
    kept = (angle.cos().cumsum(0).square() + angle.sin().cumsum(0).square()).mean(1) / i.square()
    concentration = attention_concentration(T, t) + (1 - 1 / i) * (t**2 * kept / d)
    return (variance * concentration).sqrt()


@functools.cache
def intra_recursion(config: ModelConfig, T, scheme="gpt2", residual=True):
    """Mean cosine within a sequence, the diagonal included, before (0) and after each block."""
    return [(S / scales(S)).mean().item() for S, _ in covariances(config, T, scheme, residual)]
