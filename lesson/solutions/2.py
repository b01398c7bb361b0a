"""2. What do all states of a newborn share? Write `shared`."""

import torch


def shared(model):
    """The part of the stream that all sequences share, after each block: a float tensor (L, d).

    `model` is a Transformer, a newborn `tiny_gpt2` with ReLU: L = 6, d = 256. Its `model.model.embed_tokens`
    has the embeddings, and each `block` of `model.model.layers` has `input_layernorm`, `self_attn.v_proj`,
    `self_attn.o_proj`, `post_attention_layernorm` and `mlp`, which may all be called on vectors (..., d) of
    your own. No tokens can be read: `model.hidden` is None here.
    """
    mean = model.model.embed_tokens.weight.mean(0)  # (d,)
    generator = torch.Generator().manual_seed(0)
    noise = 0.02 * torch.randn(2000, len(mean), generator=generator)  # embeddings vary as much
    means = []
    for block in model.model.layers:
        normed = block.input_layernorm(mean + noise).mean(0)
        mean = mean + block.self_attn.o_proj(block.self_attn.v_proj(normed))
        mean = mean + block.mlp(block.post_attention_layernorm(mean + noise)).mean(0)
        means.append(mean)
    return torch.stack(means)
