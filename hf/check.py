"""Does a Lens see what a model does? It is compared with the model as it is, in eager, on a few tokens."""

import contextlib
from functools import partial

import torch

from hf.lens import tensor_of
from lib.settings import UserError

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # of a share, and of the largest number


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
        with lens.hidden_units(lambda layer, units: units.clone()):
            copied = lens.hidden(tokens)
        if differ(lens, lens.unembed(copied), truth.logits):
            lens.lacks["units"] = "with its units put back it is another model"
        elif "states" not in lens.lacks:
            lens.normed_layers = normed_layers(lens, tokens[:, :1])
    try:
        check_constants(lens, tokens[:1, :2])
    except RuntimeError as error:
        lens.lacks["constants"] = f"its attention takes none: {error}".partition("\n")[0]
    lens.queries = usual


def differ(lens, seen, truth):
    """Do numbers differ by more than the tolerance, as a share of the largest?"""
    tolerance = TOLERANCE[lens.model.dtype]
    return seen.shape != truth.shape or not (seen - truth).abs().max() <= tolerance * truth.abs().max()


def check_attention(lens, tokens, weights) -> None:
    """UserError unless each layer's mean weights are those that it returns."""
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
        is_short = ((theirs > 0).sum(2) > seen).any()  # weights may underflow where a key is seen
        if is_short or not (alpha - theirs.sum(2, dtype=torch.float32) / seen).abs().max() <= tolerance:
            raise UserError(f"the attention of layer {layer} is not what it returns")
        if (1 - theirs.sum(3, dtype=torch.float32)).max() > tolerance:
            lens.has_learned_sink = True


def normed_layers(lens, tokens):
    """The layers whose stream does not lose just the units times their down weights, if these are at zero."""
    found, states, units = [], {}, {}

    def silence(layer, values):
        units[layer] = units.get(layer, 0) + values[:, 0]  # of all banks
        return torch.zeros_like(values)

    def restore(layer, block, inputs, output):
        before = states[layer]
        if layer in lens.banks:
            written = units[layer] @ lens.down(layer).t()
            lost = (before - tensor_of(output))[:, 0]
            rounding = torch.finfo(before.dtype).eps * before.abs().max()
            if not (lost - written).abs().max() <= 0.01 * written.abs().max() + rounding:
                found.append(layer)
        return before if isinstance(output, torch.Tensor) else (before, *output[1:])  # to the next block

    lens.hidden(tokens, on_state=states.__setitem__)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lens.hidden_units(silence))
        for layer, block in enumerate(lens.blocks, start=1):
            stack.enter_context(block.register_forward_hook(partial(restore, layer)))
        lens.hidden(tokens)
    return found


def check_constants(lens, tokens) -> None:
    """Note a lack of constants if one like position 1 does not receive what position 1 does."""
    constants, usual = {}, {}  # of a pass of as many positions: rounding elsewhere is huge in sharp scores

    def on_heads(layer, heads, q, k, v, alpha):
        constants[layer] = (k[0, :, 0], v[0, :, 0])
        usual[layer] = heads

    def received(layer, heads, q, k, v, alpha):
        first, constant = alpha((1, 0)).unbind(-1)
        if differ(lens, constant, first):
            lens.lacks["constants"] = f"in layer {layer} one like position 1 receives other weights"
        return usual[layer]  # so that later layers see what they usually do

    lens.hidden(tokens, on_heads=on_heads)
    lens.with_constants(constants).hidden(tokens, on_heads=received)
