"""Predict the direction in which a newborn's states contract from its weights (BB Finding 2.2, ours)."""

import torch
from torch import nn

from measure.theory import average, gaussian_grid, knows, scales


@torch.inference_mode()
def mean_field(model, T):
    """The contraction direction, (d,) of norm 1, for sequences of T random tokens; None if unknown.

    A state is a mean (d,), which all sequences share, plus Gaussian noise e. K (T, T) is the covariance of
    e between positions, the same in every dimension.

        norm:       m = g mean / sqrt(P)      Q = K / P                  P = [mean^2] + K_TT + epsilon
        attention:  mean += W_O W_V m         K += [W_O^2 W_V^2 g^2] M Q M^T
        MLP:        mean += W_down E h        K += [W_down^2 Cov(h, h')]
                                              h = phi(W_up (m + g e / sqrt(P)))

    Squares are entry by entry, [] is a mean over the stream's dimensions, g are the norm's gains. Neglected:
    early positions have another mean and P, attention is uneven, and q, k and v may have biases.
    """
    if not knows(model.config):
        return None
    embedding = model.model.embed_tokens.weight
    mean = embedding.mean(0).double()
    K = torch.eye(T, dtype=torch.float64, device=embedding.device) * embedding.var().double()
    for block in model.model.layers:
        m, g, Q = normed(block.input_layernorm, mean, K)
        added, covariance = attention_update(block.self_attn, m, g, Q)
        mean = mean + added
        K = K + covariance
        m, g, Q = normed(block.post_attention_layernorm, mean, K)
        added, covariance = mlp_update(block.mlp, m, g, Q)
        mean = mean + added
        K = K + covariance
    m, _, _ = normed(model.model.norm, mean, K)
    return (m / m.norm()).cpu()


def normed(norm, mean, K):
    """m (d,), the gains g (d,), and Q (T, T), after a norm; LayerNorm also centers `mean` and adds a bias."""
    g = norm.weight.double()
    bias = 0.0
    if isinstance(norm, nn.LayerNorm):
        mean = mean - mean.mean()
        bias = norm.bias.double()
    P = mean.square().mean() + K[-1, -1] + norm.eps
    return g * mean / P.sqrt() + bias, g, K / P


def attention_update(attention, m, g, Q):
    """The terms that attention adds to mean (d,) and to K (T, T)."""
    config = attention.config
    W_O = attention.o_proj.weight.double()  # (d, H Dh)
    W_V = attention.v_proj.weight.double()  # (G Dh, d)
    W_V = W_V.view(config.kv_heads, config.head_size, -1)  # (G, Dh, d)
    W_V = W_V.repeat_interleave(config.num_heads // config.kv_heads, dim=0)  # (H, Dh, d)
    W_V = W_V.flatten(0, 1)  # (H Dh, d)
    power = W_O.square() @ (W_V.square() @ g.square())  # (d,)
    return W_O @ (W_V @ m), power.mean() * average(Q)


def mlp_update(mlp, m, g, Q):
    """The terms that an MLP adds to mean (d,) and to K (T, T).

    Cov(h, h') is Var h at one position; between two it is about `slope` times the cosine of their noise.
    """
    expected, variance, slope = hidden_moments(mlp, m, g.square() * Q[-1, -1])
    W_down = mlp.down_proj.weight.double()  # (d, d_ff)
    power = W_down.square().mean(0)  # (d_ff,)
    covariance = (power @ slope) * Q / scales(Q)
    covariance.diagonal().add_(power @ (variance - slope))
    return W_down @ expected, covariance


def hidden_moments(mlp, m, noise):
    """E h, Var h and slope, (d_ff,) float64, of neurons h for inputs x ~ N(m, diag(noise)), noise (d,).

    If the noise of two inputs has a small correlation rho, the neurons' covariance is slope * rho. A gated
    neuron h = phi(gate x) u is written with z ~ N(0, 1) and a normal variable `rest`, independent of z:

        gate x = gate m + s z                      s^2 = gate^2 noise
        u = up x = up m + (c / s) z + rest         c = gate noise up        Var rest = up^2 noise - (c / s)^2
        slope = (E h z)^2 + Var rest (E phi)^2

    Without a gate, `up` takes the place of `gate`, and u = 1.
    """
    z, weight = gaussian_grid(61, noise.device)
    up = mlp.up_proj.weight.double()  # (d_ff, d)
    gate = up if mlp.gate_proj is None else mlp.gate_proj.weight.double()
    s = (gate.square() @ noise).sqrt().clamp(min=1e-30)  # (d_ff,); 0 if a gate is pruned
    gate_x = (gate @ m)[:, None] + s[:, None] * z  # (d_ff, nodes)
    phi = mlp.activation(gate_x)
    u = torch.ones_like(phi)  # the mean of u for each z
    u_variance = torch.zeros_like(s)  # Var rest
    if mlp.gate_proj is not None:
        of_z = (gate * noise * up).sum(1) / s  # c / s, (d_ff,)
        u = (up @ m)[:, None] + of_z[:, None] * z
        u_variance = up.square() @ noise - of_z.square()
    h = phi * u  # the mean of h for each z
    square = phi.square() * (u.square() + u_variance[:, None])  # the mean of h^2 for each z
    expected = h @ weight
    variance = square @ weight - expected.square()
    slope_of_z = (h @ (weight * z)).square()
    slope_of_rest = u_variance * (phi @ weight).square()
    return expected, variance, slope_of_z + slope_of_rest
