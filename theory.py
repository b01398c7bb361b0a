"""What should we see? Every law of the contraction at birth, without a free parameter (BB 4, A.1-A.3).

    >>> import theory
    >>> [round(c, 4) for c in theory.relu_recursion(3)]  # BB Proposition 2
    [0.0, 0.3183, 0.4937, 0.6048]

Two ideas carry most of it. A random layer is wide, so a pre-activation is Gaussian: cosines go from layer to
layer by one scalar function, the activation's kernel. And attention at birth is close to uniform: position i
averages positions 1..i. Where a law is asymptotic (in width, length or both), its docstring says in what.
"""

import math

import torch
from torch import Tensor

from init import STD, residual_std
from model import ACTIVATIONS, MLP, ModelConfig, Transformer, rope_frequencies


def gaussian_grid(points: int, reach: float = 9.0) -> tuple[Tensor, Tensor]:
    """Nodes z and weights w, (points,) float64: sum(w f(z)) is E f(z), z ~ N(0, 1), kinks at 0 included."""
    z = torch.linspace(-reach, reach, points, dtype=torch.float64)
    return z, torch.exp(-z.square() / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)


# ---- one layer: the activation's kernel --------------------------------------------------------------------


def hermite_kernel(phi, terms: int = 64) -> Tensor:
    """The k_n >= 0, (terms,), of E phi(a) phi(b) = sum_n k_n rho^n for normal a, b of correlation rho.

    k_n is the square of E phi(z) h_n(z), h_n the normalised Hermite polynomials; what is left of E phi(z)^2
    (for ReLU some 1e-4 of it) goes to the last term, so that sum(k) is exact.
    """
    z, weight = gaussian_grid(2001)
    value, before, now = phi(z), torch.zeros_like(z), torch.ones_like(z)
    k = torch.zeros(terms, dtype=torch.float64)
    for n in range(terms):
        k[n] = (weight * value * now).sum().square()
        before, now = now, (z * now - math.sqrt(n) * before) / math.sqrt(n + 1)
    k[-1] += (weight * value.square()).sum() - k.sum()
    return k


def mlp_kernel(mlp: str, s: float, d: int) -> Tensor:
    """The hidden layer's k_n, (terms,): its units' mean product for inputs of cosine rho is sum k_n rho^n.

    `s` is the standard deviation of a pre-activation. k_0 > 0 is all of the contraction: orthogonal inputs
    get outputs of cosine k_0 / sum(k). SwiGLU's k_0 is 0 but for a finite width d: the cosine r of a unit's
    gate and up rows has E r^2 = 1/d, and given r, u = r g + sqrt(1 - r^2) v with v independent of the gate g.
    """
    phi = ACTIVATIONS[mlp]
    kernel = hermite_kernel(lambda z: phi(s * z))
    if mlp != "swiglu":
        return kernel
    aligned = hermite_kernel(lambda z: phi(s * z) * s * z)
    return aligned / d + (1 - 1 / d) * s**2 * kernel.roll(1)  # times rho: the powers move up by one


def evaluate(kernel: Tensor, rho: Tensor) -> Tensor:
    """sum_n kernel[n] rho^n, by Horner's rule."""
    value = torch.zeros_like(rho)
    for k in kernel.flip(0):
        value = value * rho + k
    return value


def one_block_cosine(mlp: str, s: float, d: int) -> float:
    """Cosine of one MLP0 block's outputs for orthogonal inputs; GELU, s -> 0: s^2 2/pi; SwiGLU: ~ 1/d."""
    kernel = mlp_kernel(mlp, s, d)
    return float(kernel[0] / kernel.sum())


def relu_recursion(layers: int) -> list[float]:
    """c_0 = 0, ..., c_layers: cosines along a stack of wide ReLU MLP0 blocks (BB Proposition 2)."""
    c = [0.0]
    for _ in range(layers):
        c.append((math.sqrt(1 - c[-1] ** 2) + c[-1] * (math.pi - math.acos(c[-1]))) / math.pi)
    return c


def amplifier(c: float, T: int) -> float:
    """Cosine after averaging T positions whose cosines, within and between sequences, are c (BB Prop. 4)."""
    return c / (1 / T + (1 - 1 / T) * c)


# ---- averaging: what attention does ------------------------------------------------------------------------


def average(S: Tensor) -> Tensor:
    """M S M^T for a covariance S (T, T) of positions, M_ij = 1/i for j <= i: uniform causal averaging."""
    i = torch.arange(1, len(S) + 1, dtype=S.dtype, device=S.device)
    return S.cumsum(0).cumsum(1) / torch.outer(i, i)


def averaging_stack(T: int, layers: int) -> list[float]:
    """Mean cosine within a sequence after 1..layers of Attn0, diagonal included: exact in T, for wide states.

    The covariance of positions starts as I, and each layer makes it M S M^T.
    """
    S, cosines = torch.eye(T, dtype=torch.float64), []
    for _ in range(layers):
        S = average(S)
        cosines.append((S / S.diag().outer(S.diag()).sqrt()).mean().item())
    return cosines


def averaging_limit(T: int, layers: int) -> list[float]:
    """The same by BB Proposition 5, 1/T + (1 - 1/T) rho_L: its rho_L is the limit of infinite T."""
    cosines = []
    for L in range(1, layers + 1):
        terms = (math.comb(L - 1, k) / math.comb(2 * L - 2, k) * (2 / 3) ** (k + 1) for k in range(L))
        cosines.append(1 / T + (1 - 1 / T) * sum(terms))
    return cosines


def attention_concentration(T: int, s: float) -> Tensor:
    """E sum_j a_j^2 for softmax weights a over i = 1..T keys with logits N(0, s^2), (T,); uniform: 1/i.

    With w = e^logit, 1/(sum w)^2 is the integral of u e^(-u sum w) du, so that independent logits give
    i * integral of u E[w^2 e^(-uw)] E[e^(-uw)]^(i-1) du: exact for every i, and e^(s^2) / i for large ones.
    """
    z, weight = gaussian_grid(401)
    w = torch.exp(s * z)
    u = torch.arange(-30, 30, 0.05, dtype=torch.float64).exp()
    decay = torch.exp(-torch.outer(u, w))
    first, second = (decay @ weight).clamp(max=1), decay @ (weight * w.square())
    i = torch.arange(1, T + 1, dtype=torch.float64)[:, None]
    return (i * u.square() * second * first ** (i - 1)).sum(1) * 0.05  # u du = u^2 d(ln u)


def aggregated_std(config: ModelConfig, T: int, tokens: bool = False) -> Tensor:
    """Standard deviation of aggregated values at positions 1..T of the first block, (T,) (BB Equation 2).

    With sigma^2 = 0.02^2 d that of a value and s^2 that of a logit, Var o_i is sigma^2 times
    E sum_j a_j^2 + (1 - 1/i) r_i s^2 / d, where Equation 2 has 1/i. The last term does not decay with i: keys
    and values come from one input, so that attention, however slight, selects values along W_V W_K^T q; RoPE
    turns that by a different angle for each key, which leaves the share r_i. Random `tokens` instead of
    vectors add (1 - 1/i) / V: so often two positions have one token. Calibrations (BB 6.2) are included.
    """
    d, i = config.d_model, torch.arange(1, T + 1, dtype=torch.float64)
    variance = d * STD**2 * STD**2 / (STD**2 + config.norm_epsilon)  # of values, queries and keys
    s = 1.0 if config.qk_norm else variance
    angle = torch.outer(i - 1, rope_frequencies(config).double())  # (T, Dh/2)
    kept = (angle.cos().cumsum(0).square() + angle.sin().cumsum(0).square()).mean(1) / i.square()
    shared = (1 - 1 / i) * (s**2 * kept / d + tokens / config.vocab_size)
    std = (variance * (attention_concentration(T, s) + shared)).sqrt()
    scale = {
        "none": 1,
        "amplify": i.sqrt(),
        "attenuate": (i / config.context_length).sqrt(),
        "headnorm": 1 / std,
    }
    return std * scale[config.attn_calibration]


# ---- the whole newborn network -----------------------------------------------------------------------------


def kernel_recursion(config: ModelConfig, T: int, scheme="gpt2", residual=True) -> tuple[list, list]:
    """Cosines before (0) and after each block: of two sequences' last states, and the mean within a sequence.

    In the limit of infinite width the newborn is two (T, T) matrices: S_ij, the covariance of positions i and
    j within a sequence, and R_ij, between two. A norm scales by D_i = S_ii + epsilon; attention averages; the
    MLP applies its kernel; projections multiply by fan-in times weight variance. Inputs are N(0, 0.02^2).
    Two finite-width terms are kept, without which their effects would be zero: SwiGLU's k_0, and the variance
    of the attention's logits, to first order. Scheme `centered` does not pass k_0 on where it is a mean that
    all hidden units share, as SwiGLU's is not; `projected` never. `residual`: do sublayers add to an input?
    Calibrations are not in it.
    """
    d, residual_variance, steps, inter, intra = config.d_model, residual_std(config, scheme) ** 2, [], [], []
    kernel = mlp_kernel(config.mlp, math.sqrt(d) * STD, d)
    kernel[0] *= not (scheme == "projected" or (scheme == "centered" and config.mlp != "swiglu"))
    logit_variance = math.expm1((d * STD**2) ** 2)

    def attend(S: Tensor) -> Tensor:
        uniform = average(S)  # keys that are more alike than most draw like attention
        return uniform + logit_variance * S * (average(S * S) - uniform * uniform)

    if config.sublayers != "mlp":
        steps.append((d * STD**2 * config.num_heads * config.head_size * residual_variance, attend))
    if config.sublayers != "attention":
        steps.append((config.d_ff * residual_variance, lambda rho: evaluate(kernel, rho)))
    S, R = torch.eye(T, dtype=torch.float64) * STD**2, torch.zeros(T, T, dtype=torch.float64)
    for layer in range(config.num_layers + 1):
        for gain, sublayer in steps if layer else ():
            D = S.diag() + config.norm_epsilon
            scale = D.outer(D).sqrt()
            S, R = residual * S + gain * sublayer(S / scale), residual * R + gain * sublayer(R / scale)
        inter.append((R[-1, -1] / S[-1, -1]).item())
        intra.append((S / S.diag().outer(S.diag()).sqrt()).mean().item())
    return inter, intra


def hidden_moments(mlp: MLP, mean: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E h, Var h and slope, (d_ff,) float64, of an MLP's hidden units h for inputs N(mean, diag(noise)).

    For two such inputs whose noise has correlation rho, Cov(h, h') is slope times rho, to first order.
    """
    z, weight = (t.to(noise.device) for t in gaussian_grid(61))
    up = mlp.up_proj.weight.double()
    gate = up if mlp.gate_proj is None else mlp.gate_proj.weight.double()
    s = (gate.square() @ noise).sqrt().clamp(min=1e-30)  # a pruned gate has none
    h = act = mlp.activation((gate @ mean)[:, None] + s[:, None] * z)  # (d_ff, nodes)
    square, rest = h.square(), torch.zeros_like(s)
    if mlp.gate_proj is not None:  # given the gate, up's mean moves with it, and the rest of it is free
        along = (gate * noise * up).sum(1) / s
        other, rest = (up @ mean)[:, None] + along[:, None] * z, up.square() @ noise - along.square()
        h, square = h * other, square * (other.square() + rest[:, None])
    expected = h @ weight
    slope = (h @ (weight * z)).square() + rest * (act @ weight).square()
    return expected, square @ weight - expected.square(), slope


@torch.inference_mode()
def mean_field(model: Transformer, T: int) -> tuple[Tensor, float]:
    """From the weights: contraction direction, (d,) of unit length, and mean cosine, for T random tokens.

    Carries through the layers what all sequences share, a mean vector, and the covariance K (T, T) over
    positions of what they do not. Attention adds W_O W_V of the normed mean, and averages K; the MLP adds
    W_down E h, each pre-activation Gaussian about its mean. Neglected: that early positions have means of
    their own, that attention is not quite uniform, biases of q, k and v, and calibrations.
    """
    config, embedding = model.config, model.model.embed_tokens.weight
    mean = embedding.mean(0).double()
    K = torch.eye(T, dtype=torch.float64, device=embedding.device) * embedding.var().double()

    def normed(norm) -> tuple[Tensor, Tensor, Tensor]:
        """The normed mean, the gains' squares (d,), and K before the gains; all positions like the last."""
        centre = mean - mean.mean() if config.norm == "layernorm" else mean
        D, gain = centre.square().mean() + K[-1, -1] + config.norm_epsilon, norm.weight.double()
        bias = norm.bias.double() if config.norm == "layernorm" else 0
        return centre * D.rsqrt() * gain + bias, gain.square(), K / D

    for block in model.model.layers:
        if block.self_attn is not None:
            m, gains, k = normed(block.input_layernorm)
            output = block.self_attn.o_proj.weight.double()
            values = block.self_attn.v_proj.weight.double().view(config.kv_heads, config.head_size, -1)
            values = values.repeat_interleave(config.num_heads // config.kv_heads, dim=0).flatten(0, 1)
            mean = mean + output @ (values @ m)
            K = K + (output.square() @ (values.square() @ gains)).mean() * average(k)
        if block.mlp is not None:
            m, gains, k = normed(block.post_attention_layernorm)
            expected, variance, slope = hidden_moments(block.mlp, m, gains * k[-1, -1])
            down = block.mlp.down_proj.weight.double()
            power = down.square().mean(0)  # of what a hidden unit adds to a dimension
            mean = mean + down @ expected
            K = K + (power @ slope) * k / k.diag().outer(k.diag()).sqrt()
            K.diagonal().add_(power @ (variance - slope))
    m, gains, k = normed(model.model.norm)
    return (m / m.norm()).cpu(), (m.square().sum() / (m.square().sum() + gains.sum() * k[-1, -1])).item()


@torch.inference_mode()
def project_out_mean_output(model: Transformer) -> None:
    """Make every down projection blind to its hidden units' mean output for unit-variance noise, in place."""
    for block in model.model.layers:
        zero = torch.zeros_like(block.post_attention_layernorm.weight, dtype=torch.float64)
        expected, *_ = hidden_moments(block.mlp, zero, zero + 1)
        u, down = expected / expected.norm(), block.mlp.down_proj.weight
        down.copy_(down.double() - torch.outer(down.double() @ u, u))
