"""Fast attention and rotation on a CPU, and a loss in little memory."""

import functools

import torch
import torch.nn.functional as F

CHUNK = 512  # positions whose logits are held at once (66 MB at V = 32,000), or a 32nd of the batch
FUSED_ON = {"cuda"}  # devices where a compiled model's loss is fused under autocast
FUSED_CHUNK = 8192  # positions then: 524 MB of logits in bfloat16, and as much for their gradient
compiled = functools.cache(functools.partial(torch.compile, dynamic=False))  # once for each shape of tensors


def rotate(x, cos, sin):
    """Rotate each pair (i, i + Dh/2) of x (B, T, H, Dh) by its angle; cos and sin are (T, 1, Dh/2)."""
    turned = x * torch.cat((cos, cos), dim=-1)
    if x.requires_grad:  # in-place writes would slow the backward pass
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        return torch.addcmul(turned, swapped, torch.cat((-sin, sin), dim=-1))
    left, right = x.chunk(2, dim=-1)  # (B, T, H, Dh/2) each
    turned_left, turned_right = turned.chunk(2, dim=-1)
    turned_left.addcmul_(right, sin, value=-1)  # left cos - right sin
    turned_right.addcmul_(left, sin)  # right cos + left sin
    return turned


def causal_attention(q, k, v):
    """Causal attention of q (B, H, T, Dh) on k and v (B, G, T, Dh), the fastest way on a CPU."""
    T = q.shape[2]
    attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=k.shape[1] < q.shape[1])
    if T == 1 or T > 512 or q.requires_grad:
        return attend(q, k, v, is_causal=T > 1)  # a single query is the last: it sees every key
    half = T // 2  # in two halves, since the fused kernel skips masked keys in blocks of 512 only
    early = attend(*[x[:, :, :half] for x in (q, k, v)], is_causal=True)
    mask = torch.ones(T - half, T, dtype=torch.bool).tril(half)  # (T - half, T)
    late = attend(q[:, :, half:], k, v, attn_mask=mask)
    return torch.cat((early.transpose(1, 2), late.transpose(1, 2)), dim=1).transpose(1, 2)


def summed_cross_entropy(states, head, targets):
    """The summed cross-entropy, in nats, of targets (n,) given states (n, d) and a head (V, d)."""
    device = states.device.type
    is_fused = device in FUSED_ON and torch.is_autocast_enabled(device) and torch.compiler.is_compiling()
    loss = torch.compiler.disable(CrossEntropy.apply)  # else it unrolls the loop, a second a turn
    return loss(states, head, targets, torch.is_grad_enabled(), is_fused)


class CrossEntropy(torch.autograd.Function):
    """F.cross_entropy(F.linear(states, head).float(), targets, reduction="sum"), in less memory.

    PyTorch's holds the (n, V) logits three times. Here the forward pass computes loss and gradients chunk by
    chunk, and drops the logits; the backward pass only multiplies by the incoming gradient. Products are in
    autocast's dtype, sums in float32 at least.
    """

    @staticmethod
    def forward(ctx, states, head, targets, with_gradients, is_fused):
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
        V = len(head)
        weight = head.to(dtype)
        size = max(CHUNK, len(states) // 32)
        chunk_loss = plain_chunk
        if is_fused:  # 50,257 rows take a GPU 1.5 times as long as 50,304
            weight = F.pad(weight, (0, 0, 0, -V % 64))  # (W, d)
            size = FUSED_CHUNK
            chunk_loss = compiled(fused_chunk)
        loss = states.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
        d_states = torch.empty_like(states) if with_gradients else None
        d_head = torch.zeros_like(head) if with_gradients else None  # 467 MB at V = 152,000, d = 768
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            x = states[part].to(dtype)
            part_loss, d_logits = chunk_loss(F.linear(x, weight), targets[part], V)
            loss += part_loss
            if with_gradients:
                d_states[part] = d_logits @ weight
                d_head += (d_logits.T @ x)[:V]
        ctx.save_for_backward(d_states, d_head)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        d_states, d_head = ctx.saved_tensors
        return d_loss * d_states, d_loss * d_head, None, None, None


def plain_chunk(logits, targets, V):
    """The summed loss of logits (n, V), and its gradient (n, V) in their dtype."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    p = exact.softmax(1)
    log_sum = exact.amax(1) - p.amax(1).log()  # log-sum-exp: the largest p is never 0
    is_counted = targets >= 0  # -100 means no target, as in torch
    wanted = (torch.arange(len(logits), device=logits.device), targets * is_counted)
    loss = torch.where(is_counted, log_sum - exact[wanted], 0).sum()
    p[wanted] -= 1
    p[~is_counted] = 0
    return loss, p.to(logits.dtype)


def fused_chunk(logits, targets, V):
    """The same for logits (n, W), the first V of them tokens', in operations that a compiler fuses."""
    token = torch.arange(logits.shape[1], device=logits.device)  # (W,)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    exact = torch.where(token < V, exact, -torch.inf)
    log_sum = exact.logsumexp(1, keepdim=True)  # (n, 1)
    targets = targets[:, None]
    is_counted = targets >= 0  # (n, 1)
    loss = torch.where(is_counted, log_sum - exact.gather(1, targets * is_counted), 0).sum()
    is_target = token == targets  # (n, W)
    d_logits = (exact - log_sum).exp() - is_target.to(exact.dtype)
    return loss, torch.where(is_counted, d_logits, 0).to(logits.dtype)
