"""How is a sink rate to be read? What one number does not tell, or tells wrongly (ours).

A rate at T tokens is of all queries up to T. With rotary positions equal tokens in front are one token
exactly, so a rate on position 1 is blind to them. And where RoPE is scaled by the length of a text, a query's
attention depends on how many tokens follow.
"""

import numpy as np
import torch
from torch import Tensor

from measure import attention
from model import Transformer, weights_on


def beside(model, tokens, seen):
    """Columns that tell how to read a sink rate on tokens (n, T), given how many queries see position 1.

    `uniform_alpha1` is alpha_1 if attention were uniform: query i would pay position 1 the weight 1 / i.
    """
    uniform = [(1 / np.arange(1, queries + 1)).mean() for queries in seen]  # by layer
    row = {"uniform_alpha1": np.mean(uniform) if is_softmax(model) else None}
    row["windowed_layers"] = np.mean([queries < tokens.shape[1] for queries in seen])
    counts = equal_at_first(tokens)
    if (counts > 1).float().mean() > 0.5:  # some texts begin so by themselves
        row["longest_run"] = int(counts.max())
        row |= sink_on_run(model, tokens, counts)
    return row


@torch.inference_mode()
def query_profile(model, tokens: Tensor) -> Tensor:
    """What the query at each place pays position 1, (T,), on average over heads and tokens (n, T)."""
    profiles = []

    def on_heads(layer, heads, q, k, v, alpha):
        if isinstance(model, Transformer):
            own = model.blocks[layer - 1].self_attn
            (weights,) = weights_on(own, q, k, torch.ones(1, dtype=torch.long, device=q.device))
            profiles.append(weights.float().mean((0, 1))[:, 0].cpu())
        else:
            alpha(())  # all queries are counted
            profiles.append(alpha.first.cpu())

    model.hidden(tokens, on_heads=on_heads)
    return torch.stack(profiles).mean(0)


def equal_at_first(tokens: Tensor) -> Tensor:
    """How many equal tokens each sequence (n, T) begins with, (n,)."""
    return (tokens == tokens[:, :1]).int().cumprod(dim=1).sum(dim=1)


@torch.inference_mode()
def sink_on_run(model, tokens: Tensor, counts: Tensor):
    """What queries pay the run of equal tokens that a sequence (n, T) begins with, and the sink rate on it.

    With rotary positions equal tokens in front are one token exactly, so a rate on position 1 is blind. The
    weights on a run's c tokens are summed, and averaged over the queries behind it that see position 1.
    """
    T = tokens.shape[1]
    found = []
    for count in counts.unique().tolist():
        c = min(count, T - 1)
        positions = torch.arange(1, c + 1)
        for part in attention.batches(tokens[counts == count]):
            # means (2, B, L, H, c); seen (L, 1, 1)
            means, _ = attention.attention_to(model, part, positions.tolist(), lengths=(c, T))
            seen = torch.tensor([*attention.queries_that_see_the_first(model, T).values()])[:, None, None]
            paid = []  # by the first c queries, and by all: means times numbers of queries
            for mean, length in zip(means.cpu(), (c, T)):
                paid.append((mean * (length + 1 - positions).minimum(seen)).sum(-1))  # (B, L, H)
            found.append((paid[1] - paid[0]) / (seen[..., 0] - c).clamp(min=1))
    summed = torch.cat(found)
    return {"run_alpha": summed.mean().item(), "run_sink_rate": attention.sink_share(summed).mean().item()}


def is_same_alone(model, tokens: Tensor, found):
    """Does a query pay position 1 the same, however many tokens follow? By the shortest length `found`.

    It does not where RoPE is scaled by the length of a text.
    """
    short = min(found)
    _, alone = attention.sink_statistics(model, tokens[:1, :short])
    _, within = found[short]
    return torch.allclose(alone, within[:1], atol=1e-3)


def is_softmax(model):
    """Is attention a softmax over the positions of the text alone? Asked of a Transformer by equal keys."""
    if not isinstance(model, Transformer):
        return True
    for block in model.blocks:
        if block.self_attn is not None:
            shape = (1, model.config.num_heads, 4, model.config.head_size)
            ones = block.self_attn.q_proj.weight.new_ones(shape)
            k = ones[:, : model.config.kv_heads]
            heads = block.self_attn.attend(ones, *block.self_attn.with_front(k, k))
            if block.self_attn.front() or not torch.allclose(heads, ones, atol=1e-2):
                return False
    return True
