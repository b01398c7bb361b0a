"""How much do heads attend to a position? And models that read constants before the text (BB 6.2, SO)."""

from collections import defaultdict

import torch
from safetensors.torch import save_file
from torch import Tensor

from init import variant
from lib.files import atomic_file
from lib.runtime import default_batch_size, progress
from lib.settings import UserError
from model import Transformer

TINY = 1e-12  # in a denominator, so that 0 / 0 is 0
EPSILON = 0.3  # a sink head has an alpha_1 above this (arXiv 2410.10781)


@torch.inference_mode()
def attention_to(model, tokens: Tensor, positions=(1,), on_heads=None, on_state=None):
    """alpha_k of tokens (B, T) at K positions, (B, L, H, K), and their final states (B, T, d).

    Position 0 is a key and value in front of the text: constants, or an explicit sink. -1 is a learned sink:
    the weight that a stranger's softmax gives to no key.
    """
    layers = []

    def watch(layer, heads, q, k, v, alpha):
        layers.append(alpha(positions))
        if on_heads is not None:
            return on_heads(layer, heads, q, k, v, alpha)

    states = model.hidden(tokens, on_heads=watch, on_state=on_state)
    return torch.stack(layers, dim=1), states


def ratio_of_first(vectors: Tensor) -> Tensor:
    """The norm at position 1 divided by the median norm elsewhere, of vectors (..., T, D)."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)
    return norms[..., 0] / norms[..., 1:].median(dim=-1).values.clamp(min=TINY)


def disparity(states: Tensor) -> Tensor:
    """max |h| / mean |h| over the dimensions of states (..., d) (SO)."""
    states = states.float().abs()
    return states.amax(-1) / states.mean(-1).clamp(min=TINY)


def sink_share(alpha: Tensor) -> Tensor:
    """The share of sink heads in each sequence, (n,), from alpha_1 (n, L, H). Its mean is the sink rate."""
    return (alpha > EPSILON).float().mean(dim=(1, 2))


def sink_statistics(model, tokens: Tensor, others=()):
    """For tokens (n, T): a row about sinks on position 1 and on any of `others`, and alpha_1 (n, L, H)."""
    alphas = [attention_to(model, part, (1, 0, -1, *others))[0] for part in batches(tokens)]
    alpha, constant, learned, *rest = torch.cat(alphas).cpu().unbind(-1)  # (n, L, H) each
    row = {
        "sink_rate": sink_share(alpha).mean().item(),
        "other_sink_rate": sink_share(torch.stack(rest).amax(0)).mean().item() if rest else None,
        "mean_alpha1": alpha.mean().item(),
        "constant_alpha": constant.mean().item(),
        "learned_sink_alpha": learned.mean().item(),
    }
    return row, alpha


def check_seen(model, *parts) -> None:
    """Raise UserError if a part of a model, such as "units", cannot be seen."""
    for part in parts:
        if part in model.lacks:
            raise UserError(f"its {part} cannot be seen: {model.lacks[part]}")


def batches(tokens: Tensor):
    """Batches of sequences (n, T) that fit in memory, with a progress bar."""
    parts = tokens.split(default_batch_size(tokens.device, tokens.shape[1]))
    return progress(parts, desc="sequences", unit=" batches", leave=False)


class Means:
    """Means over sequences that come in batches: for each name, one tensor per layer."""

    def __init__(self, num_sequences):
        self.num_sequences = num_sequences
        self.of = defaultdict(lambda: defaultdict(float))  # by name, by layer

    def add(self, name, layer, values: Tensor) -> None:
        """Add the values of a batch, (B, ...), or their sum, (1, ...)."""
        self.of[name][layer] += values.sum(0).cpu() / self.num_sequences

    def stack(self, name) -> Tensor:
        """The means of all layers, stacked: (layers, ...)."""
        return torch.stack(list(self.of[name].values()))

    def add_heads(self, layer, heads: Tensor, q, k, v, alpha) -> None:
        """An on_heads that adds the outputs of heads (B, H, T, Dh), for `std`."""
        self.add("heads", layer, heads.double())
        self.add("squared heads", layer, heads.double().square())

    def std(self, layer, dims=(0, 2)) -> Tensor:
        """Standard deviation of heads' outputs over sequences and `dims` of (H, T, Dh); by default (T,)."""
        mean = self.of["heads"][layer].mean(dims)
        square = self.of["squared heads"][layer].mean(dims)
        return (square - mean.square()).clamp(min=0).sqrt()


@torch.inference_mode()
def constants_at(model, tokens: Tensor, position=1):
    """The mean key and value, (G, Dh) each, of a position over sequences (n, T), by layer."""
    means = Means(len(tokens))

    def on_heads(layer, heads, q, k, v, alpha):
        means.add("key", layer, k[:, :, position - 1])
        means.add("value", layer, v[:, :, position - 1])

    for part in batches(tokens[:, :position]):
        model.hidden(part, on_heads=on_heads)
    return {layer: (key, means.of["value"][layer]) for layer, key in means.of["key"].items()}


def with_constants(model, constants):
    """A model of the same weights, in the same memory, with `constants` in front of what it reads.

    They are a key and a value, (G, Dh) each, by layer. UserError if the model takes none.
    """
    check_seen(model, "constants")
    if model.config.explicit_sink:
        raise UserError("the model has an explicit sink already")
    if not isinstance(model, Transformer):
        return model.with_constants(constants)
    other = variant(model, explicit_sink=True)
    for layer, block in enumerate(other.blocks, start=1):
        attends, like = block.self_attn, block.self_attn.k_proj.weight
        pair = [torch.nn.Parameter(x.flatten().to(like, copy=True)) for x in constants.get(layer, ())]
        attends.sink_key, attends.sink_value = pair or (None, None)
    return other


def save_constants(path, constants, **facts) -> None:
    """Write constants, (G, D) each by layer, as keys.N and values.N, (1, G, 1, D), with `facts` as metadata.

    So a key-value cache of `transformers` holds one token in layer N, counted from 0 (docs/sinks.md).
    """
    tensors = {}
    for layer, (key, value) in constants.items():
        tensors[f"keys.{layer - 1}"] = key[None, :, None].contiguous()
        tensors[f"values.{layer - 1}"] = value[None, :, None].contiguous()
    with atomic_file(path) as temporary:
        save_file(tensors, temporary, {name: str(fact) for name, fact in facts.items()})
