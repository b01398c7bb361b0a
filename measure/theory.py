"""What should we see? Predictions of the contraction at birth, without a free parameter (BB 4, A.1-A.3).

    >>> from measure import theory
    >>> [round(c, 4) for c in theory.relu_recursion(3)]  # BB Proposition 2
    [0.0, 0.3183, 0.4937, 0.6048]

Two ideas carry most of it. A random layer is wide, so a pre-activation is Gaussian: cosines go from layer to
layer by one scalar function, the activation's kernel. And attention at birth is close to uniform: position i
averages positions 1..i. Calibrations of attention are in none of the theories.
"""

import functools
import math

import torch
from torch import Tensor, nn

from init import STD, residual_std
from model import ACTIVATIONS, MLP, ModelConfig, Transformer, rope_frequencies


def gaussian_grid(points, device="cpu"):
    """Nodes z and weights w, (points,) float64: sum(w f(z)) is E f(z), z ~ N(0, 1), kinks at 0 included."""
    z = torch.linspace(-9, 9, points, dtype=torch.float64, device=device)
    return z, torch.exp(-z.square() / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)


# ---- one layer: the activation's kernel --------------------------------------------------------------------


def hermite_kernel(phi, terms=64) -> Tensor:
    """The k_n >= 0, (terms,), of E phi(a) phi(b) = sum_n k_n rho^n for normal a, b of correlation rho.

    k_n is the square of E phi(z) h_n(z), h_n the normalised Hermite polynomials; what is left of E phi(z)^2
    (for ReLU some 1e-4 of it) goes to the last term, so that sum(k) is exact.
    """
    z, weight = gaussian_grid(2001)
    value = phi(z)
    before = torch.zeros_like(z)
    h = torch.ones_like(z)  # h_0
    kernel = torch.zeros(terms, dtype=torch.float64)
    for n in range(terms):
        kernel[n] = (weight * value * h).sum().square()
        before, h = h, (z * h - math.sqrt(n) * before) / math.sqrt(n + 1)
    kernel[-1] += (weight * value.square()).sum() - kernel.sum()
    return kernel


def mlp_kernel(mlp, s, d) -> Tensor:
    """The hidden layer's k_n, (terms,): its units' mean product for inputs of cosine rho is sum k_n rho^n.

    `s` is the standard deviation of a pre-activation. k_0 > 0 is all of the contraction: orthogonal inputs
    get outputs of cosine k_0 / sum(k). SwiGLU's k_0 is 0 but for a finite width d: the cosine r of a unit's
    gate and up rows has E r^2 = 1/d, and given r, u = r g + sqrt(1 - r^2) v with v independent of the gate g.
    """

    def unit(z):
        return ACTIVATIONS[mlp](s * z)

    def aligned_unit(z):  # SwiGLU's, where up and gate are one
        return unit(z) * s * z

    kernel = hermite_kernel(unit)
    if mlp != "swiglu":
        return kernel
    aligned = hermite_kernel(aligned_unit)
    independent = kernel.roll(1)  # times rho: the powers move up by one
    return aligned / d + (1 - 1 / d) * s**2 * independent


def evaluate(kernel: Tensor, rho: Tensor) -> Tensor:
    """sum_n kernel[n] rho^n, by Horner's rule."""
    value = torch.zeros_like(rho)
    for k in kernel.flip(0):
        value = value * rho + k
    return value


def one_block_cosine(mlp, s, d):
    """Cosine of one MLP0 block's outputs for orthogonal inputs; GELU, s -> 0: s^2 2/pi; SwiGLU: ~ 1/d."""
    kernel = mlp_kernel(mlp, s, d)
    return float(kernel[0] / kernel.sum())


def relu_recursion(layers):
    """c_0 = 0, ..., c_layers: cosines along a stack of wide ReLU MLP0 blocks (BB Proposition 2)."""
    c = 0.0
    cosines = [c]
    for _ in range(layers):
        c = (math.sqrt(1 - c**2) + c * (math.pi - math.acos(c))) / math.pi
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


def averaging_stack(T, layers):
    """Mean cosine within a sequence after 1..layers of Attn0, with the diagonal: exact in T, for large d."""
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


def attention_concentration(T, s) -> Tensor:
    """E sum_j a_j^2 for softmax weights a over i = 1..T keys with logits N(0, s^2), (T,); uniform: 1/i.

    With w = e^logit, 1/(sum w)^2 is the integral of u e^(-u sum w) du, so that independent logits give
    i * integral of u E[w^2 e^(-uw)] E[e^(-uw)]^(i-1) du; for large i that is e^(s^2) / i.
    """
    z, weight = gaussian_grid(401)
    w = torch.exp(s * z)
    step = 0.05  # of ln u
    u = torch.arange(-30, 30, step, dtype=torch.float64).exp()
    decay = torch.exp(-torch.outer(u, w))
    others = (decay @ weight).clamp(max=1)  # E e^(-uw)
    own = decay @ (weight * w.square())  # E w^2 e^(-uw)
    i = torch.arange(1, T + 1, dtype=torch.float64)[:, None]
    return (i * u.square() * own * others ** (i - 1)).sum(1) * step  # u du = u^2 d(ln u)


def aggregated_std(config: ModelConfig, T) -> Tensor:
    """Standard deviation of aggregated values at positions 1..T of the first block, (T,) (BB Equation 2).

    With sigma^2 = 0.02^2 d that of a value and s^2 that of a logit, Var o_i is sigma^2 times
    E sum_j a_j^2 + (1 - 1/i) r_i s^2 / d, where Equation 2 has 1/i. The last term does not decay with i: keys
    and values come from one input, so that attention, however slight, selects values along W_V W_K^T q; RoPE
    turns that by a different angle for each key, which leaves the share r_i.
    """
    d = config.d_model
    i = torch.arange(1, T + 1, dtype=torch.float64)
    variance = d * STD**2 * STD**2 / (STD**2 + config.norm_epsilon)  # of values, queries and keys
    s = 1.0 if config.qk_norm else variance
    angle = torch.outer(i - 1, rope_frequencies(config).double())  # (T, Dh/2)
    kept = (angle.cos().cumsum(0).square() + angle.sin().cumsum(0).square()).mean(1) / i.square()
    concentration = attention_concentration(T, s) + (1 - 1 / i) * (s**2 * kept / d)
    return (variance * concentration).sqrt()


# ---- the whole newborn network -----------------------------------------------------------------------------


def covariance_updates(config: ModelConfig, scheme):
    """What a newborn's attention and MLP add to covariances, each a function of cosines C (..., T, T).

    Attention averages uniformly, and to first order in the variance of its logits is drawn to keys that are
    alike; the MLP applies its kernel. Projections multiply by fan-in times weight variance. Scheme `centered`
    passes no k_0 on but SwiGLU's, which is no mean that all hidden units share.
    """
    d = config.d_model
    logit_std = 1.0 if config.qk_norm else d * STD**2  # of q k^T / sqrt(Dh), for inputs of RMS 1
    logit_variance = math.expm1(logit_std**2)
    residual_variance = residual_std(config, scheme) ** 2
    attention_gain = d * STD**2 * config.num_heads * config.head_size * residual_variance
    mlp_gain = config.d_ff * residual_variance
    kernel = mlp_kernel(config.mlp, math.sqrt(d) * STD, d)
    if scheme == "centered" and config.mlp != "swiglu":
        kernel[0] = 0

    def attention(C):
        uniform = average(C)
        return attention_gain * (uniform + logit_variance * C * (average(C * C) - uniform * uniform))

    def mlp(C):
        return mlp_gain * evaluate(kernel, C)

    return {"full": (attention, mlp), "attention": (attention,), "mlp": (mlp,)}[config.sublayers]


@functools.cache
def kernel_recursion(config: ModelConfig, T, scheme="gpt2", residual=True):
    """Cosines before (0) and after each block: of two sequences' last states, and the mean within a sequence.

    In the limit of infinite width the newborn is two (T, T) matrices: S_ij, the covariance of positions i and
    j within a sequence, and R_ij, between two, for inputs N(0, 0.02^2). A norm divides both by sqrt(D_i D_j),
    D_i = S_ii + epsilon. Two finite-width terms are kept, without which their effects would be zero: SwiGLU's
    k_0, and the variance of attention's logits. `residual`: do sublayers add to their input?
    """
    stream = torch.zeros(2, T, T, dtype=torch.float64)  # S and R
    stream[0].fill_diagonal_(STD**2)
    inter = [0.0]
    intra = [1 / T]  # a position is like itself alone
    updates = covariance_updates(config, scheme)
    for _ in range(config.num_layers):
        for update in updates:
            output = update(stream / scales(stream[0], config.norm_epsilon))  # of cosines
            stream = stream + output if residual else output
        S, R = stream
        inter.append((R[-1, -1] / S[-1, -1]).item())
        intra.append((S / scales(S)).mean().item())
    return inter, intra


def hidden_moments(mlp: MLP, mean: Tensor, noise: Tensor):
    """E h, Var h and slope, (d_ff,) float64, of an MLP's hidden units h for inputs N(mean, diag(noise)).

    For two such inputs whose noise has correlation rho, Cov(h, h') is slope times rho, to first order.
    """
    z, weight = gaussian_grid(61, noise.device)  # of the gate's noise, in standard deviations
    up = mlp.up_proj.weight.double()  # (d_ff, d)
    gate = up if mlp.gate_proj is None else mlp.gate_proj.weight.double()
    s = (gate.square() @ noise).sqrt().clamp(min=1e-30)  # (d_ff,); a pruned gate has none
    act = mlp.activation((gate @ mean)[:, None] + s[:, None] * z)  # (d_ff, nodes)
    up_mean = torch.ones_like(act)  # h = act * u; u is 1 without a gate, and else normal, given z
    up_variance = torch.zeros_like(s)
    if mlp.gate_proj is not None:
        covariance = (gate * noise * up).sum(1) / s  # of u and z
        up_mean = (up @ mean)[:, None] + covariance[:, None] * z  # (d_ff, nodes)
        up_variance = up.square() @ noise - covariance.square()  # (d_ff,)
    h = act * up_mean  # its mean, given z
    square = act.square() * (up_mean.square() + up_variance[:, None])  # of its square
    expected = h @ weight
    variance = square @ weight - expected.square()
    slope = (h @ (weight * z)).square() + up_variance * (act @ weight).square()
    return expected, variance, slope


def normed(norm: nn.Module, mean: Tensor, K: Tensor):
    """Of states of mean (d,) and covariance K (T, T): normed mean m (d,), squared gains (d,), and K / D."""
    gain = norm.weight.double()
    has_mean = isinstance(norm, nn.LayerNorm)
    centre = mean - mean.mean() if has_mean else mean
    D = centre.square().mean() + K[-1, -1] + norm.eps
    m = centre * D.rsqrt() * gain
    if has_mean:
        m = m + norm.bias.double()
    return m, gain.square(), K / D


def attention_update(attention: nn.Module, m: Tensor, gains: Tensor, C: Tensor):
    """What attention adds to mean (d,) and covariance (T, T)."""
    config = attention.config
    output = attention.o_proj.weight.double()  # (d, H Dh)
    values = attention.v_proj.weight.double().view(config.kv_heads, config.head_size, -1)  # (G, Dh, d)
    values = values.repeat_interleave(config.num_heads // config.kv_heads, dim=0).flatten(0, 1)  # (H Dh, d)
    gain = (output.square() @ (values.square() @ gains)).mean()
    return output @ (values @ m), gain * average(C)


def mlp_update(mlp: MLP, m: Tensor, gains: Tensor, C: Tensor):
    """What an MLP adds to mean (d,) and covariance (T, T).

    Cov(h, h') is Var h at one position, and between two the slope times the cosine of their noise.
    """
    expected, variance, slope = hidden_moments(mlp, m, gains * C[-1, -1])
    down = mlp.down_proj.weight.double()  # (d, d_ff)
    power = down.square().mean(0)  # (d_ff,), of what a hidden unit adds to a dimension
    covariance = (power @ slope) * C / scales(C)
    covariance.diagonal().add_(power @ (variance - slope))
    return down @ expected, covariance


@torch.inference_mode()
def mean_field(model: Transformer, T):
    """The contraction direction from the weights, (d,) of norm 1, for T random tokens.

    A state is what all sequences share, a mean (d,), and Gaussian noise, whose covariance over positions,
    K (T, T), is that of each dimension. The three equations, with M for uniform attention:

        norm:       m = gain mean / sqrt(D)    C = K / D        D = mean square of mean, + K_TT + epsilon
        attention:  mean += W_O W_V m          K += |W_O W_V gain|^2 M C M^T
        MLP:        mean += W_down E h         K += |W_down|^2 Cov(h, h')   h = phi(W_up (m + gain noise))

    Neglected: early positions' own means, that attention is not quite uniform, and biases of q, k and v.
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
