"""Does a Lens see what a model does? It is compared with the model as it is, in eager, on a few tokens."""

import contextlib
import sys
from functools import partial

import torch
from transformers import AutoTokenizer

from lib.settings import UserError
from strangers.lens import Pass, tensor_of

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # of a share, and of the largest number


def note_bos(file, adds_bos) -> None:
    """Say so if the tokenizer of `transformers` does not put BOS in front where its configuration does."""
    with contextlib.suppress(Exception):  # a tokenizer that transformers does not read
        tokenizer = AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
        begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
        if begins != adds_bos:
            said = f"{file}: add_bos_token is {adds_bos}; transformers' own tokenizer does otherwise (--bos)"
            print(said, file=sys.stderr)


@torch.no_grad()
def check(lens, T=16) -> None:
    """UserError unless attention and logits are seen as they are; `lens.lacks` has what else is not."""
    tokens = lens.probe_tokens(T)
    truth = lens.model(input_ids=tokens, use_cache=False, output_attentions=True, return_dict=True)
    if not truth.logits.isfinite().all():
        raise UserError("its logits are not finite")
    usual, lens.queries = lens.queries, 5  # so that queries come in parts
    check_attention(lens, tokens, truth.get("attentions") or ())
    states = lens.hidden(tokens)
    if differ(lens, lens.unembed(states), truth.logits):
        raise UserError("its logits do not follow from its final states")
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % lens.config.vocab_size
    if differ(lens, lens.hidden(changed)[:, :-1], states[:, :-1]):
        raise UserError("a state depends on a later token")
    if "units" not in lens.lacks:
        with lens.hidden_units(lambda layer, units, first: units.clone()):
            copied = lens.hidden(tokens)
        if differ(lens, lens.unembed(copied), truth.logits):
            lens.lacks["units"] = "with its units put back it is another model"
        elif "states" not in lens.lacks:
            lens.normed_layers = normed_layers(lens, tokens[:, :1])
    try:
        check_constants(lens, tokens, truth.logits)
    except RuntimeError as error:
        lens.lacks["constants"] = f"its attention takes none: {error}".partition("\n")[0]
    lens.queries = usual


def differ(lens, seen, truth):
    """Do numbers differ by more than the tolerance, as a share of the largest?"""
    tolerance = TOLERANCE[lens.model.dtype]
    return seen.shape != truth.shape or not (seen - truth).abs().max() <= tolerance * truth.abs().max()


def check_attention(lens, tokens, weights) -> None:
    """UserError unless each layer's mean weights are those that it returns, and no query sees a later key."""
    B, T = tokens.shape
    alphas = {}

    def on_heads(layer, heads, q, k, v, alpha):
        alphas[layer] = alpha(range(1, T + 1)), alpha.seen  # (B, H, T), (1 or B, 1 or H, T)

    lens.hidden(tokens, on_heads=on_heads)
    if not alphas:
        raise UserError("its attention is code of its own, or it has none")
    if len(weights) == lens.config.num_layers:  # of layers of other kinds, too
        weights = [weights[layer - 1] for layer in alphas]
    if len(alphas) != len(weights):
        raise UserError(f"it attends in {len(alphas)} layers, and returns the weights of {len(weights)}")
    tolerance = TOLERANCE[lens.model.dtype]
    for (layer, (alpha, seen)), theirs in zip(alphas.items(), weights):
        if theirs.shape[2:] != (T, T):
            raise UserError(f"the weights of layer {layer} are {[*theirs.shape]}, of {T} positions")
        if theirs.triu(1).abs().max() > tolerance:
            raise UserError(f"in layer {layer} a query sees a later key")
        is_short = ((theirs > 0).sum(2) > seen).any()  # weights may underflow where a key is seen
        if is_short or not (alpha - theirs.sum(2, dtype=torch.float32) / seen).abs().max() <= tolerance:
            raise UserError(f"the attention of layer {layer} is not what it returns")
        if (1 - theirs.sum(3, dtype=torch.float32)).max() > tolerance:
            lens.has_learned_sink = True


def calls_of(lens, tokens):
    """By layer, the block of a pass and what it is called with."""
    calls = {}

    def note(block, inputs, named) -> None:
        calls[len(calls) + 1] = partial(block, *inputs, **named)

    with contextlib.ExitStack() as stack:
        for block in lens.blocks:
            stack.enter_context(block.register_forward_pre_hook(note, with_kwargs=True))
        lens.hidden(tokens)
    return calls


def called_again(lens, layer, call, shape, on_heads=None):
    """What a block returns that is called alone, as in a pass."""
    again = Pass(lens, shape, None, on_heads)
    again.layer = layer - 1
    with again.watching():
        return tensor_of(call())


def normed_layers(lens, tokens):
    """The layers whose stream does not lose just the units times their down weights, if these are at zero."""
    found = []
    units = {}

    def silence(layer, values, first):
        units[first] = values[:, 0]
        return torch.zeros_like(values)

    for layer, call in calls_of(lens, tokens).items():
        if layer in lens.banks:
            units.clear()
            before = called_again(lens, layer, call, tokens.shape)
            after = called_again(lens.ablated(silence), layer, call, tokens.shape)
            written = torch.cat([units[first] for first in sorted(units)], dim=1) @ lens.down(layer).t()
            lost = (before - after)[:, 0]
            rounding = torch.finfo(before.dtype).eps * before.abs().max()
            if not (lost - written).abs().max() <= 0.01 * written.abs().max() + rounding:
                found.append(layer)
    return found


def check_constants(lens, tokens, logits) -> None:
    """Note a lack of constants if hidden ones change logits, or one like position 1 receives otherwise."""
    constants = {}  # in a pass of as many positions: rounding elsewhere is huge in sharp scores

    def on_heads(layer, heads, q, k, v, alpha):
        constants[layer] = (k[0, :, 0], v[0, :, 0])

    def received(layer, heads, q, k, v, alpha):
        first, constant = alpha((1, 0)).unbind(-1)
        if differ(lens, constant, first):
            lens.lacks["constants"] = f"in layer {layer} one like position 1 receives other weights"

    two = tokens[:1, :2]
    lens.hidden(two, on_heads=on_heads)
    hidden = lens.with_constants(constants, are_hidden=True)
    if differ(lens, lens.unembed(hidden.hidden(tokens)), logits):
        lens.lacks["constants"] = "one that no query sees changes its logits"
    calls = calls_of(lens, two)
    for layer, constant in constants.items():
        called_again(lens.with_constants({layer: constant}), layer, calls[layer], (1, 2), received)
