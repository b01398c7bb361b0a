"""Where does a model attend, and what singles a position out? (BB 6.2, SO)"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from scipy.stats import kendalltau
from torch import Tensor

from init import variant
from lib.runtime import default_batch_size, progress
from lib.settings import UserError
from model import Transformer


@torch.inference_mode()
def attention_to(model, tokens: Tensor, positions=(1,), on_heads=None, on_state=None) -> Tensor:
    """alpha_k of every head, (B, L, H, K), for tokens (B, T) and K positions; position 0 is a constant."""
    layers = []

    def watch(layer, heads, q, k, v, alpha):
        layers.append(alpha(positions))
        if on_heads is not None:
            return on_heads(layer, heads, q, k, v, alpha)

    model.hidden(tokens, on_heads=watch, on_state=on_state)
    return torch.stack(layers, dim=1)


def check_seen(model, *parts) -> None:
    """Raise UserError if a part of a model, such as "units", cannot be seen."""
    for part in parts:
        if part in model.lacks:
            raise UserError(f"its {part} cannot be seen: {model.lacks[part]}")


def uniform_alpha(T):
    """alpha_1 of uniform attention to T tokens: the mean of 1/i over queries i = 1..T."""
    return (1 / torch.arange(1, T + 1).double()).mean().item()


def ratio_of_first(vectors: Tensor) -> Tensor:
    """The norm at position 1 divided by the median norm elsewhere, of vectors (..., T, D)."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)
    return norms[..., 0] / norms[..., 1:].median(dim=-1).values


def batches(tokens: Tensor):
    """Parts of sequences (n, T) that fit in memory, with a progress bar."""
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
        """Add the heads' outputs (B, H, T, Dh) for `std`; an `on_heads`."""
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


def with_constants(model, constants, layers=None):
    """A model of the same weights, in the same memory, with constants in some layers, by default in all.

    `constants` are a key and a value, (G, Dh) each, by layer. UserError if the model takes none.
    """
    check_seen(model, "constants")
    if model.config.explicit_sink:
        raise UserError("the model has an explicit sink, or --constants, already")
    constants = {layer: pair for layer, pair in constants.items() if layers is None or layer in layers}
    if not isinstance(model, Transformer):
        return model.with_constants(constants)
    other = variant(model, explicit_sink=True)
    for layer, block in enumerate(other.blocks, start=1):
        attention = block.self_attn
        attention.sink_key = attention.sink_value = None
        if layer in constants:
            like = attention.k_proj.weight
            pair = [torch.nn.Parameter(x.flatten().to(like, copy=True)) for x in constants[layer]]
            attention.sink_key, attention.sink_value = pair
    return other


class Chain(Means):
    """The sinks paper's chain, by layer and position; `on_state` and `on_heads` go to `Transformer.hidden`.

    The chain, as the paper tells it (docs/sinks.md says what holds): a head's output is a mean of values. At
    position 1 it is a single value, so its `std` over sequences, heads and dimensions is largest. W_O is said
    to amplify what varies most (`output_tau`; in the models measured it does not, on average). This makes the
    builders, a few neurons, fire at position 1 alone. They make one dimension of the stream huge (`norm`,
    `disparity`), and RMSNorm shrinks all others. So first tokens have one key (`key_alignment`) and short
    values (`value_norm`), and queries find them (`alpha`).
    """

    def __init__(self, model, num_sequences):
        super().__init__(num_sequences)
        self.model = model

    def on_state(self, layer, x) -> None:
        if layer > 0:  # 0 is the input
            flat = x.flatten(0, 1).double()  # (B T, d)
            self.add("norm", layer, x.float().norm(dim=2))  # (T,)
            self.add("norm_ratio", layer, ratio_of_first(x))
            self.add("disparity", layer, disparity(x))  # (T,)
            self.add("state", layer, x.double().mean(1))  # averaged over positions, (d,)
            self.add("product", layer, (flat.T @ flat)[None] / x.shape[1])  # mean of h h^T, (d, d)

    def on_heads(self, layer, heads, q, k, v, alpha) -> None:
        self.add_heads(layer, heads, q, k, v, alpha)
        self.add("value_norm", layer, v.float().norm(dim=3).mean(1))  # (T,)
        self.add("value_ratio", layer, ratio_of_first(v).mean(1))
        self.add("key", layer, F.normalize(k.float(), dim=3))  # (G, T, Dh), each divided by its norm
        self.add("alpha", layer, alpha(range(1, k.shape[2] + 1)).mean(1))  # (T,)

    def links(self, layer):
        """The links of a layer by name, (T,) each; those of heads are None in a layer without attention.

        `key_alignment` is the norm of the mean unit key: 1 if all keys agree (ours).
        """
        links = {name: self.of[name][layer] for name in ("norm", "disparity")}
        attends = layer in self.of["alpha"]
        links |= {name: self.of[name][layer] if attends else None for name in ("value_norm", "alpha")}
        links["std"] = self.std(layer) if attends else None
        links["key_alignment"] = self.of["key"][layer].norm(dim=2).mean(0) if attends else None
        return links

    def by_position(self):
        """A row of links for each layer and position."""
        rows = []
        for layer, norms in self.of["norm"].items():
            links = self.links(layer)
            for place in range(len(norms)):
                values = {name: None if link is None else link[place].item() for name, link in links.items()}
                rows.append({"layer": layer, "position": place + 1} | values)
        return rows

    def by_layer(self):
        """A row for each layer: the links at position 1, and those without a position."""
        rows = []
        for layer in self.of["norm"]:
            links = self.links(layer)
            at_1 = {name: None if link is None else link[0].item() for name, link in links.items()}
            row = {
                "layer": layer,
                "std_ratio": None,
                "disparity": at_1["disparity"],
                "norm_ratio": self.of["norm_ratio"][layer].item(),
                "value_ratio": None,
                "key_alignment": at_1["key_alignment"],
                "effective_rank": effective_rank(self.of["state"][layer], self.of["product"][layer]),
                "output_tau": None,
                "alpha1": at_1["alpha"],
            }
            if links["std"] is not None:
                row["std_ratio"] = at_1["std"] / links["std"][1:].median().item()
                row["value_ratio"] = self.of["value_ratio"][layer].item()
                row["output_tau"] = output_tau(self.model.output_weight(layer), self.std(layer, 1))
            rows.append(row)
        return rows


def disparity(states: Tensor) -> Tensor:
    """max |h| / mean |h| over the dimensions of states (..., d) (SO)."""
    states = states.float().abs()
    return states.amax(-1) / states.mean(-1)


def output_tau(weight: Tensor, std: Tensor):
    """Kendall's tau between the column norms of W_O (d, H Dh) and the std (H, Dh) of its inputs, or None."""
    if weight is None:
        return None
    norms = weight.float().norm(dim=0).cpu().numpy()
    tau = kendalltau(norms, std.flatten().numpy()).statistic
    return None if tau != tau else float(tau)


def effective_rank(mean: Tensor, product: Tensor):
    """The effective number of directions of the centred states, from 1 to d (ours).

    It is exp of the entropy of their singular values, scaled to sum to 1. `mean` (d,) is the mean state and
    `product` (d, d) the mean outer product of states, both in float64.
    """
    covariance = product - torch.outer(mean, mean)
    values = torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt()
    entropy = torch.special.entr(values / values.sum()).sum()
    return entropy.exp().item()
