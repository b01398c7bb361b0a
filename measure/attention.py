"""How much do heads attend to a position? And models that read constants before the text (BB 6.2, SO)."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from init import variant
from lib.runtime import default_batch_size, progress
from lib.settings import UserError
from model import Transformer, weights_on

EPSILON = 0.3  # a sink head has an alpha_1 above this (arXiv 2410.10781)
CONSTANT, LEARNED = 0, -1  # places that are no position of the text


def batches(tokens: Tensor):
    """Batches of sequences (n, T) that fit in memory, with a progress bar."""
    parts = tokens.split(default_batch_size(tokens.device, tokens.shape[1]))
    return progress(parts, desc="sequences", unit=" batches", leave=False)


@torch.inference_mode()
def attention_to(model, tokens: Tensor, positions=(1,), on_state=None, lengths=None):
    """alpha_k of a batch of tokens (B, T) at K positions, (B, L, H, K), and their final states (B, T, d).

    With `lengths` it is averaged over the first so many queries each: (lengths, B, L, H, K).

    CONSTANT is the last key and value in front of the text: constants, or an explicit sink. LEARNED is what
    stands before that, and what the softmax of others' models gives to no key.
    """
    layers = []

    def on_heads(layer, heads, q, k, v, alpha):
        layers.append(alpha(positions, lengths))  # (B, H, K)

    if lengths is not None and not isinstance(model, Transformer):
        model = model.measured_at(lengths)
    states = model.hidden(tokens, on_state=on_state, on_heads=on_heads)
    return torch.stack(layers, dim=-3), states


def sink_share(alpha: Tensor) -> Tensor:
    """The share of sink heads in each sequence, (n,), from alpha_1 (n, L, H). Its mean is the sink rate."""
    return (alpha > EPSILON).float().mean(dim=(1, 2))


def sink_statistics(model, tokens: Tensor, with_others=False):
    """For tokens (n, T): a row about sinks on position 1, and on others if asked, and alpha_1 (n, L, H)."""
    return sinks_by_length(model, tokens, (tokens.shape[1],), with_others)[tokens.shape[1]]


def sinks_by_length(model, tokens: Tensor, lengths, with_others=False):
    """For tokens (n, T) by length: a row about sinks on position 1, and alpha_1 (n, L, H).

    Of a causal model one pass tells all lengths: those are its first queries. `with_others` counts sinks on
    other positions, too, those of the first half of a length.
    """
    others = range(2, max(2, max(lengths) // 2) + 1) if with_others else ()
    firsts, largest = [], []
    for part in batches(tokens):
        alpha, _ = attention_to(model, part, (1, CONSTANT, LEARNED, *others), lengths=lengths)
        firsts.append(alpha[..., :3].cpu())
        if with_others:
            halves = [each[..., 3 : max(4, 2 + length // 2)] for each, length in zip(alpha, lengths)]
            largest.append(torch.stack([half.amax(-1).cpu() for half in halves]))
    found = {}
    for place, length in enumerate(lengths):
        alpha1, constant, learned = torch.cat([first[place] for first in firsts]).unbind(-1)  # (n, L, H) each
        row = {"sink_rate": sink_share(alpha1).mean().item(), "other_sink_rate": None}
        if with_others:
            other = torch.cat([most[place] for most in largest])
            row["other_sink_rate"] = sink_share(other).mean().item()
        row["mean_alpha1"] = alpha1.mean().item()
        row["constant_alpha"] = constant.mean().item()
        row["learned_sink_alpha"] = learned.mean().item()
        found[length] = (row, alpha1)
    return found


class Means:
    """Means over n sequences that come in batches.

    `means.add(3, key=k)` adds a batch's k (B, ...) of layer 3. After all batches `means.of[3]["key"]` is the
    mean (...).
    """

    def __init__(self, n):
        self.n = n
        self.of = defaultdict(lambda: defaultdict(float))

    def add(self, layer, **values: Tensor) -> None:
        """Add the values of a batch, (B, ...) each, or their sum, (1, ...)."""
        for name, value in values.items():
            self.of[layer][name] += value.sum(0).cpu() / self.n

    def stack(self, name) -> Tensor:
        """The means of one name in all layers that have it: (layers, ...)."""
        return torch.stack([means[name] for means in self.of.values() if name in means])


def check_seen(model, *parts) -> None:
    """Raise UserError if a part of a model, such as "units", cannot be seen."""
    lacks = model_lacks(model) if isinstance(model, Transformer) else model.lacks
    for part in parts:
        if part in lacks:
            raise UserError(f"its {part} cannot be seen: {lacks[part]}")


def model_lacks(model: Transformer):
    """What cannot be seen of a Transformer, by the reason: the neurons of an MLP that a fork made another."""
    for layer, block in enumerate(model.blocks, start=1):
        if not isinstance(getattr(block.mlp, "down_proj", None), nn.Linear):
            return {"units": f"layer {layer} has no matrix mlp.down_proj, but {type(block.mlp).__name__}"}
    return {}


def queries_that_see_the_first(model, T):
    """By layer, how many of T queries see position 1, which windows hide; of a Lens that has read T."""
    if not isinstance(model, Transformer):
        return {layer: seen for (queries, layer), seen in model.seen.items() if queries == T}
    seen = {}
    for layer, block in enumerate(model.blocks, start=1):
        if block.self_attn is not None:
            q = block.self_attn.q_proj.weight.new_zeros(1, model.config.num_heads, T, model.config.head_size)
            k = q[:, : model.config.kv_heads]
            (weights,) = weights_on(block.self_attn, q, k, torch.ones(1, dtype=torch.long, device=q.device))
            seen[layer] = int((weights > 0).sum(2).min())
    return seen


@torch.inference_mode()
def constants_at(model, tokens: Tensor, position=1):
    """The mean key, rotated, and value, (G, Dh) each, of a position over sequences (n, T), by layer."""
    means = Means(len(tokens))

    def on_heads(layer, heads, q, k, v, alpha):
        means.add(layer, key=k[:, :, position - 1], value=v[:, :, position - 1])

    for part in batches(tokens[:, :position]):  # it sees no later ones
        model.hidden(part, on_heads=on_heads)
    return {layer: (found["key"], found["value"]) for layer, found in means.of.items()}


def with_constants(model, constants):
    """A model of the same weights, in the same memory, with `constants` in front of what it reads.

    They are a key and a value, (G, Dh) each, by layer, behind what stands in front already. UserError if the
    model takes none.
    """
    check_seen(model, "constants")
    if not isinstance(model, Transformer):
        return model.with_constants(constants)
    other = variant(model)
    for layer, (key, value) in constants.items():
        attention = other.blocks[layer - 1].self_attn
        like = attention.k_proj.weight  # in its dtype and on its device
        pair = (key.flatten().to(like, copy=True), value.flatten().to(like, copy=True))
        attention.constants = [*model.blocks[layer - 1].self_attn.constants, pair]
    return other
