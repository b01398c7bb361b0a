"""How are attention and rotation computed quickly on a CPU, and a loss in little memory?

The functions give what `model.causal_attention`, `model.rotate` and torch's cross-entropy say, in tests too.
"""

import torch
import torch.nn.functional as F

CHUNK = 512  # positions whose logits exist at a time: 66 MB at V = 32,000; in large batches a 32nd of them


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
    """Causal attention as defined, 128 queries at a time: the fused backward pass takes twice as long."""
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
    """Causal attention in two halves, since the fused kernel skips masked keys in blocks of 512 only."""
    T = k.shape[2]
    half = T // 2
    grouped = k.shape[1] < q.shape[1]
    first = [x[:, :, :half] for x in (q, k, v)]
    early = F.scaled_dot_product_attention(*first, is_causal=True, enable_gqa=grouped)
    late_queries = q[:, :, half:]
    mask = torch.ones(T - half, T, dtype=torch.bool).tril(half)  # (T - half, T)
    late = F.scaled_dot_product_attention(late_queries, k, v, attn_mask=mask, enable_gqa=grouped)
    heads = torch.cat((early.transpose(1, 2), late.transpose(1, 2)), dim=1)  # (B, T, H, Dh)
    return heads.transpose(1, 2)


def summed_cross_entropy(states, head, targets):
    """The summed loss, in nats, of targets (n,) under the logits of states (n, d) and a head (V, d)."""
    loss = torch.compiler.disable(CrossEntropy.apply)  # which would unroll its loop, in a second a turn
    return loss(states, head, targets, torch.is_grad_enabled())


class CrossEntropy(torch.autograd.Function):
    """F.cross_entropy(F.linear(states, head).float(), targets, reduction="sum"), in nats, in less memory.

    States are (n, d), the head (V, d), targets (n,). That line holds n V logits three times over; here CHUNK
    positions' logits serve the loss and both gradients, and are forgotten. The backward pass only scales the
    gradients. Products are in autocast's dtype, sums in float32 at least.
    """

    @staticmethod
    def forward(ctx, states, head, targets, with_gradients):
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
        exact = torch.promote_types(dtype, torch.float32)
        weight = head.to(dtype)
        loss = states.new_zeros((), dtype=exact)
        d_states = torch.empty_like(states) if with_gradients else None
        d_head = torch.zeros_like(head) if with_gradients else None  # 467 MB at V = 152,000, d = 768
        size = max(CHUNK, len(states) // 32)
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            x = states[part].to(dtype)
            logits = F.linear(x, weight).to(exact)  # (size, V)
            p = logits.softmax(1)
            log_sum = logits.amax(1) - p.amax(1).log()  # log-sum-exp: the largest p is never 0
            wanted = (torch.arange(len(x), device=x.device), targets[part])
            loss += (log_sum - logits[wanted]).sum()
            if with_gradients:
                p[wanted] -= 1
                d_logits = p.to(dtype)
                d_states[part] = d_logits @ weight
                d_head += d_logits.T @ x
        ctx.save_for_backward(d_states, d_head)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        d_states, d_head = ctx.saved_tensors
        return d_loss * d_states, d_loss * d_head, None, None
