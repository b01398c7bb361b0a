"""What do the heads, the neurons and the stream of somebody else's language model do?

`transformers` runs the model by its own code. A Lens looks through three openings that do not depend on
the architecture, and gives measures what `model.Transformer` gives them:

- attention: each layer gets its attention function from AttentionInterface. `Pass.attend` intercepts that
  call, runs the layer's own function on a few hundred queries at a time, and keeps only the column sums of
  its weights. So windows, soft caps, biases and learned sinks are the model's own.
- neurons: what enters a layer's widest linear maps onto the stream, outside the parts that mix
  positions. Stacked experts ask an ExpertsInterface.
- the stream: what enters the first block, and what each block returns.

hf/parts.py finds these in a model. hf/check.py compares what a Lens sees with what the model
computes: trust no number before that. Layers count from 1, as blocks are called. Where heads are seen, layers
without attention are left out.

Shapes: B sequences, T positions, d width, H heads, G key-value heads, D head size, F neurons, E experts.
"""

import contextlib
import copy
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import DynamicCache
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import AttentionInterface

from hf.parts import down_of, find_blocks, find_units, is_linear
from lib.settings import UserError

WEIGHTS = 2**23  # of attention in memory at a time, or those of 64 queries
POSITIONS = 512  # whose logits are in memory at a time


@dataclass
class Shape:
    """The fields of `model.ModelConfig` that measures use."""

    vocab_size: int
    context_length: int
    d_model: int = 0  # of the final states
    num_layers: int = 0
    explicit_sink: bool = False


def shape_of(config):
    """The Shape of a configuration of `transformers`."""
    text = config.get_text_config(decoder=True)
    found = [getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    context = next(filter(None, found), 2048)  # if it names no length
    return Shape(text.vocab_size, context, getattr(text, "hidden_size", 0))


class Lens:
    """A language model of `transformers`, in eval mode and with attention "eager", as measures see it.

    `lacks` maps what cannot be seen, of "states", "units" and "constants", to the reason.
    """

    def __init__(self, model):
        self.model = model
        self.queries = 128  # whose weights are in memory at a time, at most: more see keys that are masked
        self.constants = {}  # by layer: a key and a value, (G, D) each, in front of position 1
        self.hides = None  # the keys that queries do not see, (T, T), beside those that a layer hides
        self.since = 0  # queries before this one do not count in alpha
        self.lengths = ()  # at which alpha is asked for, in order
        self.seen = {}  # by number of queries, and layer: how many of them see position 1
        self.has_learned_sink = False
        self.lacks = {}
        self.normed_layers = []  # whose units do not write to the stream as they are
        self.attending = []  # layers
        self.attentions = set()  # modules that ask for the function that attends
        self.banks = {}  # by layer: the hf.parts.Banks of its neurons
        self.unit_watchers = []
        self.outputs = {}  # by layer: the linear map that its heads enter
        self.config = shape_of(model.config)
        tokens = self.probe_tokens()
        with torch.no_grad():
            self.blocks, self.trunk, final = find_blocks(model, tokens)
            self.final_kind = type(final)
            self.config.d_model = final.last_hidden_state.shape[-1]
            find_units(self, tokens)

    @property
    def device(self):
        return next(self.model.parameters()).device

    def probe_tokens(self, T=16):
        """A few tokens, (2, T), the same each time."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.config.vocab_size, (2, T), generator=generator).to(self.device)

    def new_cache(self):
        """An empty cache of keys and values for `hidden`; None where a model keeps another state."""
        is_plain = self.model._supports_default_dynamic_cache() and not self.model._is_stateful
        return DynamicCache(config=self.model.config) if is_plain else None

    @torch.no_grad()
    def hidden(self, inputs: Tensor, last_only=False, on_state=None, on_heads=None, cache=None) -> Tensor:
        """Final states, (B, T, d), of tokens (B, T) or of embeddings (B, T, d), as `Transformer.hidden`.

        With a `cache` nothing is watched: the model runs as it is.
        """
        T = inputs.shape[1]
        if cache is not None:
            given = {"input_ids": inputs, "past_key_values": cache, "use_cache": True, "return_dict": True}
            return self.trunk(**given).last_hidden_state[:, -1 if last_only else slice(None)]
        if T > self.config.context_length:
            raise ValueError(f"{T} positions exceed the context of {self.config.context_length}")
        name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        on_state = None if "states" in self.lacks else on_state
        with Pass(self, inputs.shape[:2], on_state, on_heads).watching():
            try:
                states = self.trunk(**{name: inputs}, use_cache=False, return_dict=True).last_hidden_state
            except (IndexError, RuntimeError) as error:
                if "index" not in str(error):
                    raise
                rows = self.model.get_input_embeddings().weight.shape[0]
                if name == "input_ids" and inputs.max() >= rows:
                    raise UserError(
                        f"token {inputs.max()} has no row in an embedding matrix of {rows:,}"
                    ) from None
                raise UserError(f"{T} positions are too many for its tables: {error}") from None
        return states[:, -1] if last_only else states

    @torch.no_grad()
    def unembed(self, states: Tensor) -> Tensor:
        """Logits (..., V) of final states (..., d): the head, and what the model does after it."""
        flat = states.reshape(1, -1, states.shape[-1])
        given = self.final_kind(last_hidden_state=flat)
        tokens = torch.zeros(flat.shape[:2], dtype=torch.int64, device=flat.device)
        with patch.object(self.trunk, "forward", lambda *_, **__: given):
            logits = self.model(input_ids=tokens, use_cache=False, return_dict=True).logits
        return logits.view(*states.shape[:-1], logits.shape[-1])  # of no states, too

    def summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """The summed loss in nats of targets (n,) after final states (n, d)."""
        total = torch.zeros((), dtype=torch.float64)
        for some, wanted in zip(states.split(POSITIONS), targets.split(POSITIONS)):
            logits = self.unembed(some).float()
            losses = logits.logsumexp(-1) - logits.gather(1, wanted[:, None])[:, 0]
            total += losses.sum(dtype=torch.float64).cpu()
        return total

    def hidden_units(self, on_units):
        """While open, `on_units(layer, units)` may replace units (B, T, F) of a bank; all others are 0."""
        return patch.object(self, "unit_watchers", [*self.unit_watchers, on_units])

    def without_units(self, layer, tokens: Tensor) -> Tensor:
        """The states at position 1, (n, d), after a layer whose units are all at zero, on tokens (n, T)."""
        states = {}
        with self.hidden_units(lambda at, units: torch.zeros_like(units) if at == layer else None):
            self.hidden(tokens, on_state=states.__setitem__)
        return states[layer][:, 0].float().cpu()

    def down(self, layer):
        """The weights (d, F) of a layer's neurons on the stream."""
        downs = [bank.down for bank in self.banks.get(layer, ())] or [torch.zeros(self.config.d_model, 0)]
        return torch.cat([down.flatten(0, 1).t() if down.ndim == 3 else down for down in downs], 1).detach()

    def output_weight(self, layer):
        """The weight (d, H D) of a layer's heads on the stream; None where no plain map follows them."""
        return down_of(self.outputs[layer]).detach() if layer in self.outputs else None

    def with_constants(self, constants) -> "Lens":
        """The same model with a key and a value, (G, D) each, in front of position 1 in some layers."""
        other = copy.copy(self)
        other.config = replace(self.config, explicit_sink=True)
        other.constants = constants
        return other

    def measured_at(self, lengths) -> "Lens":
        """The same model, whose alpha can be asked for at these lengths."""
        other = copy.copy(self)
        other.lengths = tuple(sorted(lengths))
        return other

    def hiding(self, hides, since=0) -> "Lens":
        """The same model without the weights `hides` (T, T); its alpha counts the queries from `since` on."""
        other = copy.copy(self)
        other.hides, other.since, other.seen = hides, since, {}
        return other


class Pass:
    """One pass through a model: which layer is at work, and who sees what of it."""

    def __init__(self, lens, shape, on_state, on_heads):
        self.lens = lens
        self.shape = shape  # (B, T)
        self.on_state = on_state
        self.on_heads = on_heads
        self.layer = 0  # in front of the first block
        self.is_inside = False  # of a block

    @contextlib.contextmanager
    def watching(self):
        """Within this context the model's parts report to this pass."""
        with contextlib.ExitStack() as stack:
            for block in self.lens.blocks:
                stack.enter_context(block.register_forward_pre_hook(self.enter, with_kwargs=True))
                stack.enter_context(block.register_forward_hook(self.leave))
            if self.lens.unit_watchers:
                modules = {bank.module for banks in self.lens.banks.values() for bank in banks}
                for module in filter(is_linear, modules):
                    stack.enter_context(module.register_forward_pre_hook(self.see_units))
                stack.enter_context(standing_between(ExpertsInterface, self.route))
            stack.enter_context(standing_between(AttentionInterface, self.attend))
            ALL_MASK_ATTENTION_FUNCTIONS["eager"] = Mask
            stack.callback(ALL_MASK_ATTENTION_FUNCTIONS.pop, "eager")
            yield

    def enter(self, block, inputs, named) -> None:
        self.layer += 1
        self.is_inside = True
        if self.layer == 1 and self.on_state is not None:
            self.on_state(0, inputs[0] if inputs else named["hidden_states"])

    def leave(self, block, inputs, output) -> None:
        self.is_inside = False
        if self.on_state is not None:
            self.on_state(self.layer, tensor_of(output))

    def attend(self, own, module, q, k, v, attention_mask=None, *more, **settings):
        """A layer's attention: what its own function returns, or what `on_heads` makes of it."""
        if not self.is_inside:
            return own(module, q, k, v, attention_mask, *more, **settings)
        self.lens.attentions.add(module)
        B, H, T, _ = q.shape
        constant = self.lens.constants.get(self.layer)
        given = [x for x in (*more, *settings.values()) if isinstance(x, Tensor) and x.ndim > 1]
        is_whole = any(x.is_floating_point() for x in given)  # a bias may be of all queries and keys
        alpha, outputs, rows = Alpha(self.lens, q), [], slice(0, 0)
        while rows.stop < T:
            most = min(self.lens.queries, max(64, WEIGHTS // (B * H * min(T, rows.stop + self.lens.queries))))
            rows = slice(rows.stop, T if is_whole else min(T, rows.stop + most))
            mask = self.mask_of(attention_mask, q, rows)  # (1 or B, 1 or H, queries, T at most)
            sees = mask > torch.finfo(mask.dtype).min / 2
            there = sees.flatten(0, 2).any(0).nonzero()
            some = slice(0, T) if is_whole else slice(there[0].item(), there[-1].item() + 1)
            keys, values, mask = k[:, :, some], v[:, :, some], mask[..., some]
            if constant is not None:
                keys, values = with_first(constant[0], keys), with_first(constant[1], values)
                mask = F.pad(mask, (1, 0))
            output, weights = own(module, q[:, :, rows], keys, values, mask, *more, **settings)
            outputs.append(output)
            if self.on_heads is not None:
                alpha.add(rows, some, weights, sees)
        heads = torch.cat(outputs, dim=1)  # (B, T, H, D)
        if self.on_heads is not None:
            self.lens.seen[T, self.layer] = int(alpha.seen[..., 0].min())
            changed = self.on_heads(self.layer, heads.transpose(1, 2), q, k, v, alpha)
            heads = heads if changed is None else changed.transpose(1, 2).contiguous()
        return heads, weights if len(outputs) == 1 else None

    def mask_of(self, mask, q, rows):
        """The mask of some queries, (1 or B, 1 or H, queries, T at most): 0 where a key is seen."""
        if isinstance(mask, Mask):
            mask = mask.rows(rows.start, rows.stop)
        elif mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, rows]
        if mask is None:
            mask = q.new_zeros(1, 1, 1, q.shape[2])
        if self.lens.hides is not None:
            mask = mask.masked_fill(self.lens.hides[rows, : mask.shape[-1]], torch.finfo(mask.dtype).min)
        return mask.expand(-1, -1, rows.stop - rows.start, -1)

    def bank_of(self, module):
        """The bank of the layer at work that a module serves, or None."""
        banks = self.lens.banks.get(self.layer, ()) if self.is_inside else ()
        return next((bank for bank in banks if bank.module is module), None)

    def replaced(self, bank, units):
        """A bank's units, (B T, F) or (B, T, F), or what those who watch make of them."""
        behind = sum(other.count for other in self.lens.banks[self.layer] if other.first > bank.first)
        for on_units in self.lens.unit_watchers:
            changed = on_units(self.layer, F.pad(units.reshape(*self.shape, -1), (bank.first, behind)))
            if changed is not None:
                units = changed[..., bank.first : bank.first + bank.count].reshape(units.shape)
        return units

    def see_units(self, module, inputs):
        bank = self.bank_of(module)
        if bank is not None:
            return (self.replaced(bank, inputs[0]), *inputs[1:])

    def route(self, own, module, x, chosen, shares):
        """What stacked experts make of x (B T, d), by their own weights and activation."""
        bank = self.bank_of(module)
        if bank is None:
            return own(module, x, chosen, shares)
        read = module.gate_up_proj if module.has_gate else module.up_proj
        read = read if module.is_transposed else read.transpose(1, 2)  # (E, d, F or 2 F)
        units = x.new_zeros(len(x), *bank.down.shape[:2])  # (B T, E, F)
        places = [(expert, *torch.where(chosen == expert)) for expert in range(units.shape[1])]
        for expert, rows, _ in places:
            inner = x[rows] @ read[expert]
            if module.has_bias:
                inner = inner + (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert]
            units[rows, expert] = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        units = self.replaced(bank, units.flatten(1)).view(units.shape)
        total = torch.zeros_like(x)
        for expert, rows, slots in places:
            out = units[rows, expert] @ bank.down[expert]
            if module.has_bias:
                out = out + module.down_proj_bias[expert]
            if module.has_post_expert_norm:
                out = module.post_expert_norm(out)
            total.index_add_(0, rows, (out * shares[rows, slots, None]).to(total.dtype))
        return total


def standing_between(interface, function):
    """A context in which whoever asks an interface gets `function`, which is handed their own one first."""
    return patch.object(interface, "get_interface", lambda self, name, own: partial(function, own))


class Mask(Tensor):
    """The mask that `eager_mask` makes, not made yet: `rows` makes some of it; who changes it, all."""

    def __new__(cls, **given):
        shape = (given["batch_size"], 1, given["q_length"], given["kv_length"])
        mask = torch.empty((), dtype=given["dtype"], device=given["device"]).expand(shape).as_subclass(cls)
        mask.given = given
        return mask

    @classmethod
    def __torch_function__(cls, function, types, inputs=(), named=None):
        if function.__name__ != "__get__":  # of its shape, dtype or device
            inputs, named = tree_map_only(Mask, Mask.rows, (inputs, named))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*inputs, **(named or {}))

    def rows(self, start=0, stop=None):
        first, stop = self.given.get("q_offset", 0), stop or self.given["q_length"]
        here = {"q_length": stop - start, "q_offset": first + start, "kv_length": first + stop}
        return eager_mask(**self.given | here)


def tensor_of(output):
    """The stream that a block returns, alone or before other things."""
    return output if isinstance(output, Tensor) else output[0]


def with_first(constant, x):
    """Put a constant (G, D) in front of keys or values x (B, G, T, D)."""
    return torch.cat((constant.to(x)[None, :, None].expand(len(x), -1, -1, -1), x), dim=2)


class Alpha:
    """Sums of a layer's weights over the queries from `lens.since` on, and how many see a position."""

    def __init__(self, lens, q):
        (B, H, self.T, _), self.lens = q.shape, lens
        self.sums = q.new_zeros(B, H, 1 + self.T, dtype=torch.float32)  # 0: a constant
        self.seen = q.new_zeros(1, 1, self.T, dtype=torch.int64)
        self.kept = {}  # both, by length, as of the first queries
        self.first = q.new_zeros(self.T, dtype=torch.float32)  # what a query pays position 1, on average

    def add(self, rows, keys, weights, sees) -> None:
        """Add the weights of some queries, (B, H, queries, keys or 1 + keys), and who sees which key."""
        if keys.start == 0:
            self.first[rows] = weights[..., -keys.stop].float().mean((0, 1))
        done = max(0, self.lens.since - rows.start)
        for length in self.lens.lengths:
            if rows.start < length <= rows.stop:  # what it was when this length was reached
                end = length - rows.start
                self.add_part(keys, weights[:, :, done:end], sees[:, :, done:end])
                self.kept[length] = (self.sums.clone(), self.seen.clone())
                done = end
        self.add_part(keys, weights[:, :, done:], sees[:, :, done:])

    def add_part(self, keys, weights, sees) -> None:
        sums, seen = weights.sum(2, dtype=torch.float32), sees.sum(2)
        self.sums[..., 1 + keys.start : 1 + keys.stop] += sums[..., keys.start - keys.stop :]
        self.sums[..., 0] += sums[..., : keys.start - keys.stop].sum(-1)
        self.seen = self.seen + F.pad(seen, (0, self.T - seen.shape[-1]))

    def __call__(self, positions, lengths=None):
        """alpha (B, H, K): the weight on a position, averaged over the queries that see it; 0 if none does.

        Position 0 is a constant, which all see; -1 is a learned sink, whose share is what all others leave.
        With `lengths` over the first so many queries each, (lengths, B, H, K).
        """
        if lengths is None:
            return self.mean(positions, self.sums, self.seen, self.T - self.lens.since)
        return torch.stack([self.mean(positions, *self.kept[length], length) for length in lengths])

    def mean(self, positions, sums, seen, count):
        left = (1 - sums.sum(-1, keepdim=True) / count) * self.lens.has_learned_sink
        alpha = sums / F.pad(seen, (1, 0), value=count).clamp(min=1)
        return torch.cat((left, alpha), dim=-1)[..., [1 + position for position in positions]]
