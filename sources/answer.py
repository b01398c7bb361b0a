"""What does a model answer to some fixed tokens? So that a changed model.py is noticed.

A checkpoint keeps its answer: whoever loads it, and gets another one, is told. And config.json calls a model
a LLaMA or a Qwen2 only if `llama_answer`, a second forward pass, gives the model's own.
"""

import torch
import torch.nn.functional as F

LENGTH = 64  # tokens, or the whole context
TOLERANCE = 1e-3  # of the largest number of a state; another kernel changes it by less than 1e-5


def fixed_tokens(config):
    """The tokens, (1, T)."""
    return (torch.arange(min(LENGTH, config.context_length)) * 7919 % config.vocab_size)[None]


@torch.no_grad()
def answer_of(model):
    """The final state (d,) behind the fixed tokens, of a float32 model on the CPU."""
    return model.hidden(fixed_tokens(model.config))[0, -1]


def agree(answer, other):
    """Are two answers one, but for rounding?"""
    if answer.shape != other.shape:
        return False
    return bool((answer - other).abs().max() <= TOLERANCE * answer.abs().max().clamp(min=1))


@torch.no_grad()
def llama_answer(model):
    """The same of a LLaMA, or a Qwen2, of these weights, by its definition (Touvron et al. 2023)."""
    config, weights = model.config, dict(model.named_parameters())
    tokens = fixed_tokens(config)[0]
    T, H, G, Dh = len(tokens), config.num_heads, config.kv_heads, config.head_size

    def norm(x, name):
        mean_square = x.double().square().mean(-1, keepdim=True)
        return (x / (mean_square + config.norm_epsilon).sqrt()).float() * weights[f"{name}.weight"]

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    # A pair (i, i + Dh/2) of position t is one complex number, turned by t radians times its frequency.
    frequency = config.rope_theta ** (-torch.arange(0, Dh, 2) / Dh)
    turn = torch.polar(torch.ones(T, Dh // 2), torch.outer(torch.arange(T), frequency))

    def turned(x):  # (T, heads, Dh)
        pairs = torch.complex(*x.chunk(2, dim=-1)) * turn[:, None]
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        start = f"model.layers.{layer}."
        normed = norm(x, f"{start}input_layernorm")
        q = turned(linear(normed, f"{start}self_attn.q_proj").view(T, H, Dh))
        k = turned(linear(normed, f"{start}self_attn.k_proj").view(T, G, Dh)).repeat_interleave(H // G, 1)
        v = linear(normed, f"{start}self_attn.v_proj").view(T, G, Dh).repeat_interleave(H // G, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / Dh**0.5
        alpha = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        heads = torch.einsum("hqk,khd->qhd", alpha, v).flatten(1)
        x = x + linear(heads, f"{start}self_attn.o_proj")
        normed = norm(x, f"{start}post_attention_layernorm")
        gate = F.silu(linear(normed, f"{start}mlp.gate_proj"))
        x = x + linear(gate * linear(normed, f"{start}mlp.up_proj"), f"{start}mlp.down_proj")
    return norm(x, "model.norm")[-1]
