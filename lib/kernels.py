"""How does a CPU want attention and rotation computed?

The functions give what `model.causal_attention` and `model.rotate` say, faster on CPUs; a test holds both
against each other. This file imports nothing of ours.
"""

import torch
import torch.nn.functional as F


def rotate(x, cos, sin):
    """Turn each pair (i, i + Dh/2) of x (B, T, H, Dh) by its angle; cos and sin are (T, 1, Dh/2)."""
    half = x.shape[-1] // 2
    cosines = torch.cat((cos, cos), dim=-1)  # (T, 1, Dh)
    turned = x * cosines
    if x.requires_grad:  # writing to halves in place would cost the backward pass dearly
        sines = torch.cat((-sin, sin), dim=-1)
        swapped = x.roll(half, dims=-1)
        return torch.addcmul(turned, swapped, sines)
    left, right = x.chunk(2, dim=-1)  # (B, T, H, Dh/2) each
    turned_left, turned_right = turned.chunk(2, dim=-1)
    turned_left.addcmul_(right, sin, value=-1)  # left cos - right sin
    turned_right.addcmul_(left, sin)  # right cos + left sin
    return turned


def causal_attention(q, k, v):
    """Causal attention of q (B, H, T, Dh) on k and v (B, G, T, Dh), by the quickest way on a CPU."""
    T = k.shape[2]
    grouped = k.shape[1] < q.shape[1]
    if q.shape[2] == 1:  # the last position's query sees every key
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    if T <= 512 and q.requires_grad and q.dtype is torch.bfloat16:
        return blockwise_attention(q, k, v)
    if T <= 512 and not q.requires_grad:
        return halved_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def blockwise_attention(q, k, v):
    """Causal attention as it is defined, 128 queries at a time; scores are of q's type.

    For training in bfloat16: the fused kernel's backward pass takes twice the time.
    """
    B, H, T, Dh = q.shape
    k = k.repeat_interleave(H // k.shape[1], dim=1)  # (B, H, T, Dh)
    v = v.repeat_interleave(H // v.shape[1], dim=1)  # (B, H, T, Dh)
    q = q.flatten(0, 1)  # (B H, T, Dh)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    blocks = []
    for start in range(0, T, 128):
        end = min(start + 128, T)
        block = q[:, start:end]
        keys = k[:, :end].transpose(1, 2)  # (B H, Dh, end)
        values = v[:, :end]
        future = torch.full((end - start, end), -torch.inf, dtype=q.dtype).triu(1 + start)  # (block, end)
        scores = torch.baddbmm(future, block, keys, alpha=Dh**-0.5)
        blocks.append(scores.softmax(-1) @ values)  # (B H, block, Dh)
    return torch.cat(blocks, dim=1).view(B, H, T, Dh)


def halved_attention(q, k, v):
    """Causal attention of the first half of the queries, and of the second half.

    The fused kernel skips masked keys in blocks of 512 only; two halves spare a quarter of the square.
    """
    T = k.shape[2]
    half = T // 2
    grouped = k.shape[1] < q.shape[1]
    early = F.scaled_dot_product_attention(
        q[:, :, :half],
        k[:, :, :half],
        v[:, :, :half],
        is_causal=True,
        enable_gqa=grouped,
    )
    late_queries = q[:, :, half:]
    mask = torch.ones(T - half, T, dtype=torch.bool).tril(half)  # (T - half, T)
    late = F.scaled_dot_product_attention(late_queries, k, v, attn_mask=mask, enable_gqa=grouped)
    heads = torch.cat((early.transpose(1, 2), late.transpose(1, 2)), dim=1)  # (B, T, H, Dh)
    return heads.transpose(1, 2)
