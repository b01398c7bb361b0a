"""Where does the attention of any PyTorch module go? (ours)

    with watching() as seen:
        model(tokens)
    print(seen.sink_rate())

Each call of F.scaled_dot_product_attention is seen, and asked once more with one-hot values: it returns the
weights on some positions, whatever its mask, scale and grouping are, and no T x T matrix is stored. Queries
of zeros tell in the same way which queries see a position. A call is a layer where a module attends once a
layer. Models of this project attend in two halves of a text without gradients: `sinks.py` measures these.
"""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lib.settings import UserError
from measure.attention import EPSILON

ATTENTION = F.scaled_dot_product_attention
UNSEEN = (
    "no call of F.scaled_dot_product_attention was seen: a softmax by hand, an encoder's fast path and a "
)
UNSEEN += (
    "module under torch.compile make none. Call the module as it is, with attention through that function"
)


@dataclass
class Seen:
    """What was seen, call by call: in a language model, layer by layer."""

    positions: tuple  # counted from 1
    calls: list = field(default_factory=list)  # alpha (B, H, K) of each causal call
    others: list = field(default_factory=list)  # what the other calls are: cross attention, an encoder's

    def alpha(self) -> Tensor:
        """Mean attention to each position by call and head, (calls, H, K), over the queries that see it."""
        return torch.stack([alpha.mean(0) for alpha in self.calls])

    def sink_rate(self) -> float:
        """The share of heads that pay the first of the positions more than 0.3, over calls and sequences."""
        rates = [(alpha[..., 0] > EPSILON).float().mean() for alpha in self.calls]
        return torch.stack(rates).mean().item()

    def draw(self, path, title="Where does attention sink?") -> None:
        """Draw attention to the first position, head by head, as `sinks.py rate` does."""
        from measure.figures import draw_heads  # matplotlib takes half a second

        heads = self.alpha()[..., 0].tolist()
        row = {"checkpoint": "", "kind": "by call", "sequence_length": None}
        draw_heads(Path(path), title, [row | {"alpha1": heads}], "alpha1")


class Watcher(TorchFunctionMode):
    """Sees each call of attention, by whatever name a module has it."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen
        self.is_asking = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is ATTENTION:
            return self.attention(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        """The call itself; beside it, what its weights are."""
        more |= {"attn_mask": attn_mask, "is_causal": is_causal}
        if self.is_asking:
            return ATTENTION(query, key, value, dropout_p=dropout_p, **more)
        if dropout_p > 0:
            raise UserError("attention's dropout is on: call the module in eval mode")
        self.is_asking = True
        try:
            self.look(query.detach(), key.detach(), more)
            return ATTENTION(query, key, value, **more)
        finally:
            self.is_asking = False

    @torch.no_grad()
    def look(self, query, key, more):
        """Note alpha of a call, or what it is if no language model's."""
        Q, K = query.shape[-2], key.shape[-2]
        query, key = query.float(), key.float()
        if more["attn_mask"] is not None and more["attn_mask"].dtype != torch.bool:
            more = more | {"attn_mask": more["attn_mask"].float()}
        queries = 0 * query
        last = weights_of(queries, key, (K,), more)[..., 0]  # (B, H, Q): equal weights of what is seen
        if Q > 1 and (last[..., 0] > 0).any():
            kind = "cross attention" if Q != K else "attention to later positions"
            self.seen.others.append(f"{kind}: {Q} queries, {K} keys")
            return
        positions = self.seen.positions
        sums = weights_of(query, key, positions, more).sum(-2)
        counts = (weights_of(queries, key, positions, more) > 0).sum(-2)
        self.seen.calls.append((sums / counts.clamp(min=1)).cpu())


def weights_of(query, key, positions, more):
    """The weights (B, H, Q, n) that a call pays to n positions of its keys, at most D at a time."""
    K, D = key.shape[-2:]
    places = torch.arange(1, K + 1, device=key.device)
    parts = []
    for part in torch.tensor(positions, device=key.device).split(D):
        one_hot = (places[:, None] == part).to(key.dtype)  # (K, n)
        values = F.pad(one_hot, (0, D - len(part))).expand_as(key).contiguous()  # as wide as keys
        parts.append(ATTENTION(query, key, values, **more)[..., : len(part)])
    return torch.cat(parts, dim=-1)


@contextlib.contextmanager
def watching(positions=(1,)):
    """While open, attention of any module is seen: yields a Seen; UserError if no call was."""
    seen = Seen(tuple(positions))
    watcher = Watcher(seen)
    with patch.object(F, "scaled_dot_product_attention", watcher.attention), watcher:
        yield seen
    if not seen.calls and not seen.others:
        raise UserError(UNSEEN)
    if not seen.calls:
        raise UserError(f"no causal self-attention was seen, but {seen.others[0]}")
