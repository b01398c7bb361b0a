"""What do the heads, the hidden units and the stream of a stranger's language model do?

`transformers` runs the model by its own code. A Lens looks through three openings that do not depend on
names, and gives measures what `model.Transformer` gives them:

- attention: a layer asks an AttentionInterface for the function that attends, and hands it its own.
  `Pass.attend` stands between: it sees queries, keys, values and mask, and calls the layer's own function, so
  that windows, soft caps, biases and learned sinks stay as they are.
- hidden units: what enters a layer's widest linear maps onto the stream, outside the parts that mix
  positions; they are found by watching one pass. Stacked experts ask an ExpertsInterface.
- the stream: what enters the first block, and what each block returns.

>>> lens = Lens(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval())
>>> check(lens)  # sources/check.py: before that, believe no number
>>> states = lens.hidden(tokens, on_state=print)

Layers count from 1, as blocks are called. Where heads are seen, layers without attention are left out.
Shapes: B sequences, T positions, d width, H heads, G key-value heads, D head size, F hidden units, E experts.
"""

import contextlib
import copy
import inspect
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from lib.settings import UserError

QUERIES = 256  # whose weights are in memory at a time
POSITIONS = 512  # whose logits are
UNKNOWN_CONTEXT = 2048  # positions of a model that does not say how many it can read
MIXING = {"attention_mask", "past_key_values", "past_key_value", "layer_past", "cache_params", "state"}


@dataclass
class Shape:
    """What `model.ModelConfig` says of a model, as far as measures ask."""

    vocab_size: int
    context_length: int
    num_layers: int = 0
    d_model: int = 0  # of the final states
    explicit_sink: bool = False


@dataclass
class Bank:
    """Hidden units that enter one linear map onto the stream, or that of stacked experts."""

    module: nn.Module
    first: int  # number of the first of them in the layer
    down: Tensor  # their weights on the stream, (d, F) or (E, F, d)

    @property
    def count(self):
        return self.down[0].numel() if self.down.ndim == 2 else self.down[..., 0].numel()


class Lens:
    """A language model of `transformers`, in eval mode and with attention "eager", as measures see it.

    `lacks` says by name what cannot be seen, and why: of "states", "units", "constants".
    """

    def __init__(self, model):
        self.model = model
        self.queries = QUERIES
        self.constants = {}  # by layer: a key and a value, (G, D) each, in front of position 1
        self.are_constants_hidden = False  # from all queries
        self.has_learned_sink = False
        self.lacks = {}
        self.banks = defaultdict(list)  # by layer
        self.outputs = {}  # by layer: the linear map from its heads' outputs onto the stream
        text = model.config.get_text_config(decoder=True)
        context = getattr(text, "max_position_embeddings", None) or UNKNOWN_CONTEXT
        self.config = Shape(text.vocab_size, context)
        self.blocks, self.trunk, final = self.find_blocks()
        self.final_kind = type(final)
        self.config.d_model = final.last_hidden_state.shape[-1]
        self.find_parts()

    @property
    def device(self):
        return next(self.model.parameters()).device

    @torch.no_grad()
    def hidden(self, inputs: Tensor, last_only=False, on_state=None, on_heads=None, on_units=None) -> Tensor:
        """Final states, (B, T, d), of tokens (B, T) or of embeddings (B, T, d), as `Transformer.hidden`.

        `on_heads` and `on_units` may return what takes the place of the heads' outputs, or of the units.
        """
        T = inputs.shape[1]
        if T > self.config.context_length:
            raise ValueError(f"{T} positions exceed the context of {self.config.context_length}")
        with Pass(self, inputs.shape[:2], on_state, on_heads, on_units).watching():
            states = self.run(inputs).last_hidden_state
        return states[:, -1] if last_only else states

    def run(self, inputs, **options):
        """The output of all but the head."""
        name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        return self.trunk(**{name: inputs}, use_cache=False, return_dict=True, **options)

    @torch.no_grad()
    def unembed(self, states: Tensor) -> Tensor:
        """Logits (..., V) of final states (..., d): the head, and what the model does after it."""
        flat = states.reshape(1, -1, states.shape[-1])
        given = self.final_kind(last_hidden_state=flat)
        self.trunk.forward = lambda *_, **__: given  # in place of its own, which the class has
        try:
            tokens = torch.zeros(flat.shape[:2], dtype=torch.int64, device=flat.device)
            logits = self.model(input_ids=tokens, use_cache=False, return_dict=True).logits
        finally:
            del self.trunk.forward
        return logits.view(*states.shape[:-1], -1)

    def summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """The summed loss in nats of targets (n,) after final states (n, d)."""
        total = torch.zeros((), dtype=torch.float64)
        for some, wanted in zip(states.split(POSITIONS), targets.split(POSITIONS)):
            logits = self.unembed(some).float()
            losses = logits.logsumexp(-1) - logits.gather(1, wanted[:, None])[:, 0]
            total += losses.sum(dtype=torch.float64).cpu()
        return total

    def down(self, layer):
        """The weights (d, F) of a layer's hidden units on the stream; None without such units."""
        downs = [bank.down.flatten(0, 1).t() if bank.down.ndim == 3 else bank.down for bank in self.banks[layer]]
        return torch.cat(downs, dim=1).detach() if downs else None

    def output_weight(self, layer):
        """The weight (d, H D) of a layer's heads on the stream; None where nothing plain follows them."""
        return down_of(self.outputs[layer]).detach() if layer in self.outputs else None

    def with_constants(self, constants, are_hidden=False) -> "Lens":
        """The same model with a key and a value, (G, D) each, in front of position 1 in some layers."""
        other = copy.copy(self)
        other.constants = constants
        other.are_constants_hidden = are_hidden
        return other

    def probe_tokens(self, T=16):
        """A few tokens, (2, T), the same each time."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.config.vocab_size, (2, T), generator=generator).to(self.device)

    @torch.no_grad()
    def find_blocks(self):
        """The blocks that a pass calls, and the trunk: what hands their states to the head, and its output.

        Blocks are the members of the longest list of modules that is in no other one, and their equals in
        other lists. The trunk is the outermost part that has them all and returns final states.
        """
        returned = {}
        with contextlib.ExitStack() as stack:
            for module in self.model.modules():
                hook = lambda module, inputs, output: returned.update({module: output})
                stack.enter_context(module.register_forward_hook(hook))
            self.model(input_ids=self.probe_tokens(), use_cache=False, return_dict=True)
        lists = {name: list for name, list in self.model.named_modules() if isinstance(list, nn.ModuleList)}
        outer = [lists[name] for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        called = [[block for block in blocks if block in returned] for blocks in outer]
        kinds = {type(block) for block in max(called, key=len, default=())}
        blocks = [block for some in called for block in some if type(block) in kinds]
        for part in self.model.modules():  # the outermost first
            is_trunk = part is not self.model and hasattr(returned.get(part), "last_hidden_state")
            if blocks and is_trunk and set(blocks) <= set(part.modules()):
                return blocks, part, returned[part]
        raise UserError("no list of blocks was found whose states a head reads")

    @torch.no_grad()
    def find_parts(self) -> None:
        """Watch a pass: which layers attend, and which linear maps do hidden units and heads enter?"""
        tokens = self.probe_tokens()
        heads, streams = {}, []
        maps = defaultdict(list)  # by layer: (module, input, output), outside what mixes positions
        experts = defaultdict(list)  # by layer

        def on_heads(layer, outputs, q, k, v, alpha):
            if layer in heads:
                raise UserError(f"layer {layer} attends twice")
            heads[layer] = outputs.transpose(1, 2).flatten()

        def see_map(is_mixing, module, inputs, output):
            layer = watched.layer
            if not is_mixing and isinstance(output, Tensor):  # a router returns more
                maps[layer].append((module, inputs[0], output))
            elif layer in heads and torch.equal(inputs[0].flatten(), heads[layer]):
                self.outputs[layer] = module

        def see_experts(own, module, *inputs):
            experts[watched.layer].append(module)
            return own(module, *inputs)

        watched = Pass(self, tokens.shape, lambda layer, x: streams.append(x.shape), on_heads)
        with contextlib.ExitStack() as stack:
            for block in self.blocks:
                mixing = {part for mixer in mixers_of(block) for part in mixer.modules()}
                for module in filter(is_linear, block.modules()):
                    hook = partial(see_map, module in mixing)
                    stack.enter_context(module.register_forward_hook(hook))
            stack.enter_context(watched.watching())
            stack.enter_context(standing_between(ExpertsInterface, see_experts))
            self.run(tokens)
        self.attending = list(heads)  # layers
        self.config.num_layers = watched.layer
        if len(set(streams)) > 1 or len(streams[0]) != 3:
            self.lacks["states"] = f"the stream has several parts, {[*streams[-1]]}"
        for layer in range(1, watched.layer + 1):
            onto = [some for some in maps[layer] if some[2].shape[-1] == streams[-1][-1]]
            widest = max([x.shape[-1] for _, x, _ in onto], default=0)
            for module, x, output in onto:
                if x.shape[-1] == widest:
                    self.check_map(layer, module, x, output, tokens.numel())
                    self.add_bank(layer, module, down_of(module))
            for module in experts[layer]:
                self.add_bank(layer, module, write_of(module))
        if not self.banks:
            self.lacks["units"] = "no linear map onto the stream was seen outside attention"

    def add_bank(self, layer, module, down) -> None:
        first = sum(bank.count for bank in self.banks[layer])
        self.banks[layer].append(Bank(module, first, down))

    def check_map(self, layer, module, x, output, count) -> None:
        """Note a lack of units unless a map's output is the units times its weights, for all tokens."""
        expected = x @ down_of(module).t()
        if getattr(module, "bias", None) is not None:
            expected = expected + module.bias
        if x.numel() != count * x.shape[-1]:
            self.lacks["units"] = f"layer {layer} has experts of a kind of its own"
        elif (expected - output).abs().max() > 0.01 * output.abs().max():
            self.lacks["units"] = f"the down projection of layer {layer} is no plain linear map"


class Pass:
    """One pass through a model: which layer is at work, and who sees what of it."""

    def __init__(self, lens, shape, on_state=None, on_heads=None, on_units=None):
        self.lens = lens
        self.shape = shape  # (B, T)
        self.on_state = on_state
        self.on_heads = on_heads
        self.on_units = on_units
        self.layer = 0  # in front of the first block
        self.is_inside = False  # of a block

    @contextlib.contextmanager
    def watching(self):
        """Within this context the model's parts report to this pass."""
        with contextlib.ExitStack() as stack:
            for block in self.lens.blocks:
                stack.enter_context(block.register_forward_pre_hook(self.enter, with_kwargs=True))
                stack.enter_context(block.register_forward_hook(self.leave))
            if self.on_units is not None:
                modules = {bank.module for banks in self.lens.banks.values() for bank in banks}
                for module in filter(is_linear, modules):
                    stack.enter_context(module.register_forward_pre_hook(self.see_units))
                stack.enter_context(standing_between(ExpertsInterface, self.route))
            stack.enter_context(standing_between(AttentionInterface, self.attend))
            yield

    def enter(self, block, inputs, named) -> None:
        self.layer += 1
        self.is_inside = True
        if self.layer == 1 and self.on_state is not None:
            self.on_state(0, inputs[0] if inputs else named["hidden_states"])

    def leave(self, block, inputs, output) -> None:
        self.is_inside = False
        if self.on_state is not None:
            self.on_state(self.layer, output if isinstance(output, Tensor) else output[0])

    def attend(self, own, module, q, k, v, attention_mask=None, *more, **settings):
        """A layer's attention: what its own function returns, or what `on_heads` makes of it."""
        if not self.is_inside:
            return own(module, q, k, v, attention_mask, *more, **settings)
        T = q.shape[2]
        keys, values, mask = k, v, attention_mask
        if self.layer in self.lens.constants:
            key, value = self.lens.constants[self.layer]
            keys, values = with_first(key, k), with_first(value, v)
            if mask is not None:
                seen = mask.new_zeros(()) if mask.is_floating_point() else mask.new_ones(())
                hidden = mask.new_full((), torch.finfo(mask.dtype).min) if mask.is_floating_point() else ~seen
                mask = F.pad(mask, (1, 0), value=(hidden if self.lens.are_constants_hidden else seen).item())
        has_tensors = any(isinstance(x, Tensor) and x.ndim > 1 for x in (*more, *settings.values()))
        step = T if has_tensors else self.lens.queries  # a tensor may be of all queries
        outputs, received = [], 0
        for start in range(0, T, step):
            rows = slice(start, start + step)
            part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
            output, weights = own(module, q[:, :, rows], keys, values, part, *more, **settings)
            outputs.append(output)
            received = received + weights.sum(2, dtype=torch.float32)  # (B, H, T or 1 + T)
        heads = torch.cat(outputs, dim=1)  # (B, T, H, D)
        if self.on_heads is not None:
            alpha = partial(mean_weights, received, T, self.lens.has_learned_sink)
            changed = self.on_heads(self.layer, heads.transpose(1, 2), q, k, v, alpha)
            heads = heads if changed is None else changed.transpose(1, 2).contiguous()
        return heads, weights if len(outputs) == 1 else None

    def replaced(self, bank, units):
        """A bank's units, (B T, F) or (B, T, F), or what `on_units` makes of them."""
        changed = self.on_units(self.layer, units.reshape(*self.shape, -1), bank.first)
        return units if changed is None else changed.reshape(units.shape)

    def bank_of(self, module):
        """The bank of the layer at work that a module serves, or None."""
        banks = self.lens.banks[self.layer] if self.is_inside else ()
        return next((bank for bank in banks if bank.module is module), None)

    def see_units(self, module, inputs):
        bank = self.bank_of(module)
        if bank is not None:
            return (self.replaced(bank, inputs[0]), *inputs[1:])

    def route(self, own, module, x, chosen, shares):
        """What stacked experts make of x (B T, d), by their own weights and activation: a sum for each token."""
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


@contextlib.contextmanager
def standing_between(interface, function):
    """Within this context whoever asks an interface gets `function`, which is handed their own one first."""
    usual = interface.get_interface
    interface.get_interface = lambda self, name, own: partial(function, own)
    try:
        yield
    finally:
        interface.get_interface = usual


def mixers_of(block):
    """The innermost parts of a block that mix positions: those that ask for a mask or a cache."""
    mixing = []
    for module in block.modules():
        asked = inspect.signature(module.forward).parameters
        if module is not block and MIXING & asked.keys():
            mixing = [outer for outer in mixing if module not in set(outer.modules())]
            mixing.append(module)
    return mixing


def is_linear(module):
    """Is it a linear map: nn.Linear, GPT-2's Conv1D or one of their kin?"""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def down_of(module):
    """The matrix (outputs, inputs) of a linear map."""
    return module.weight.t() if isinstance(module, Conv1D) else module.weight


def write_of(experts):
    """The down weights (E, F, d) of stacked experts."""
    return experts.down_proj if experts.is_transposed else experts.down_proj.transpose(1, 2)


def with_first(constant, x):
    """Put a constant (G, D) in front of keys or values x (B, G, T, D)."""
    return torch.cat((constant.to(x)[None, :, None].expand(len(x), -1, -1, -1), x), dim=2)


def mean_weights(received, T, has_learned_sink, positions):
    """alpha (B, H, K): the weight on position p, averaged over the queries i >= p; on 0 over all of them.

    `received` (B, H, T or 1 + T) are sums over the queries. On position 0 are a constant, and a learned sink,
    whose share is what the others leave.
    """
    columns = []
    for p in torch.as_tensor(positions).tolist():
        if p > 0:
            columns.append(received[..., p - 1 - T] / (T + 1 - p))
        elif has_learned_sink:
            columns.append(1 - received[..., -T:].sum(-1) / T)
        else:
            columns.append(received[..., :-T].sum(-1) / T)
    return torch.stack(columns, dim=-1)
