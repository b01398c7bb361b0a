"""Which parts of a model are its blocks, and which linear maps do neurons and heads enter? (for a Lens)

No architecture is known by its name: a pass over a few tokens is watched. Names of outputs and of a few kinds
of parameters, which transformers has in common, are.
"""

import contextlib
import inspect
import itertools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.pytorch_utils import Conv1D

from lib.settings import UserError

MIXING = {"attention_mask", "past_key_values", "past_key_value", "layer_past", "cache_params", "state"}


class Bank(NamedTuple):
    """Neurons that enter one linear map onto the stream, or those of stacked experts."""

    module: nn.Module
    first: int  # number of the first of them in the layer
    down: Tensor  # their weights on the stream, (d, F) or (E, F, d)

    @property
    def count(self):
        return self.down.shape[1] if self.down.ndim == 2 else self.down.shape[0] * self.down.shape[1]


def find_blocks(model, tokens):
    """The blocks that a pass calls, and the trunk: the part that hands final states to the head; its output.

    Blocks are the members of the longest list of modules that is in no other one, and their equals in other
    lists. The trunk is the outermost part that has them all.
    """
    returned = {}

    def note(module, inputs, output) -> None:
        returned[module] = output

    with register_module_forward_hook(note):
        model(input_ids=tokens, use_cache=False, return_dict=True)
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    called = []  # of each list that is in no other one, the blocks that were called
    for name, part in lists.items():
        if not name.startswith(tuple(f"{other}." for other in lists)):
            called.append([block for block in part if block in returned])
    kinds = set(map(type, max(called, key=len, default=())))
    blocks = [block for block in itertools.chain(*called) if type(block) in kinds]
    for part in model.modules():  # the outermost first
        is_trunk = part is not model and hasattr(returned.get(part), "last_hidden_state")
        if blocks and is_trunk and set(blocks) <= set(part.modules()):
            return blocks, part, returned[part]
    raise UserError("no list of blocks was found whose states a head reads")


def find_units(lens, tokens) -> None:
    """Fill in a Lens: the layers that attend; by layer its banks, and the map that its heads enter."""
    seen = []  # in order: a layer and its heads or its state; or a map, what enters and leaves it, its part

    def note(kind, part, module, inputs, output) -> None:
        seen.append((kind, module, inputs[0], output, part))

    with contextlib.ExitStack() as stack:
        for block in lens.blocks:
            mixing = {part for mixer in mixers_of(block) for part in mixer.modules()}
            for part in block.modules():
                for module in part.children():
                    if is_linear(module) or is_stacked(module):
                        hook = partial(note, "mixing" if module in mixing else "map", part)
                        stack.enter_context(module.register_forward_hook(hook))
        lens.hidden(
            tokens,
            on_state=lambda layer, x: seen.append(("state", layer, x, None, None)),
            on_heads=lambda at, heads, *_: seen.append(("heads", at, heads.transpose(1, 2), None, None)),
        )
    streams = {x.shape for kind, _, x, *_ in seen if kind == "state"}
    d = seen[-1][2].shape[-1]
    if len(streams) > 1 or len(seen[-1][2].shape) != 3:
        lens.lacks["states"] = f"the stream has several parts, {[*seen[-1][2].shape]}"
    attending = {inner for attention in lens.attentions for inner in attention.modules()}
    maps, heads = [], None
    for kind, what, x, output, part in seen:
        kind = "mixing" if what in attending else kind  # where inner parts ask for a mask, too
        if kind == "heads":
            if what in lens.attending:
                raise UserError(f"layer {what} attends twice")
            lens.attending.append(what)
            heads = x.flatten()
        elif kind == "mixing" and heads is not None and torch.equal(x.flatten(), heads):
            lens.outputs[lens.attending[-1]] = what
        elif kind == "map" and isinstance(output, Tensor) and output.shape[-1] == d:  # a router returns more
            maps.append((what, x, output, part))
        elif kind == "state":
            lens.config.num_layers = what
            add_banks(lens, what, maps, tokens.numel(), d)
            maps, heads = [], None
    if not lens.banks:
        lens.lacks["units"] = "no linear map onto the stream was seen outside attention"


def add_banks(lens, layer, maps, count, d) -> None:
    """Note the banks of a layer: those of its widest linear maps, and of stacked experts.

    If a layer has d neurons, its up and down projections have one shape. Then the last map that is called in
    a submodule is taken for the down projection; with several submodules we cannot tell, and give up.
    """
    widest = max([x.shape[-1] for module, x, *_ in maps if is_linear(module)], default=0)
    last = {part: module for module, x, _, part in maps if is_linear(module) and x.shape[-1] == widest}
    if widest == d and len(last) > 1:
        lens.lacks["units"] = f"which maps of layer {layer} make them, and which read them, is not told"
    first = 0
    for module, x, output, part in maps:
        if is_linear(module) and (x.shape[-1] < widest or (widest == d and module is not last[part])):
            continue
        bank = Bank(module, first, down_of(module))
        first += bank.count
        lens.banks.setdefault(layer, []).append(bank)
        if is_linear(module):
            expected = nn.functional.linear(x, bank.down, getattr(module, "bias", None))
            is_plain = (expected - output).abs().max() <= 0.01 * output.abs().max()
            if x.numel() != count * widest or not is_plain:
                lens.lacks["units"] = f"those of layer {layer} are not those of a plain map of all tokens"


def mixers_of(block):
    """The innermost parts of a block that mix positions: those that ask for a mask or a cache."""
    mixing = []
    for module in block.modules():
        asked = inspect.signature(module.forward).parameters
        if module is not block and MIXING & asked.keys():
            mixing = [*(outer for outer in mixing if module not in set(outer.modules())), module]
    return mixing


def is_linear(module):
    """Is it a linear map: nn.Linear, GPT-2's Conv1D or one of their kin?"""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def is_stacked(module):
    """Does it hold experts whose weights are stacked, and that ask an ExpertsInterface?"""
    return hasattr(module, "is_transposed") and module.down_proj.ndim == 3


def down_of(module):
    """The matrix (d, F) of a linear map onto the stream, or (E, F, d) of stacked experts."""
    if is_stacked(module):
        return module.down_proj if module.is_transposed else module.down_proj.transpose(1, 2)
    return module.weight.t() if isinstance(module, Conv1D) else module.weight
