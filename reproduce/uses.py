"""What is a constant that takes the sink over good for? 8 bits, and a cache that forgets (ours)

python -m reproduce.uses rounding               # the loss in 8 bits, with constants and without
python -m reproduce.uses streaming              # the loss of long texts with a cache of 256 tokens
"""

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

from lib.figures import curves
from lib.runtime import progress
from lib.settings import Command, UserError, at_least, run_script
from measure.attention import batches, check_seen, constants_at, with_constants
from sinks import Settings, alpha_and_loss, measure_models, split_windows
from sources.inputs import bos_of
from strangers.parts import is_linear

BIN = 32  # predictions in a point of `streaming`'s figure


@dataclass
class UseSettings(Settings):
    """The settings of `rounding`."""

    num_sequences: at_least(2) = 12  # sequences
    num_constants: at_least(1) = 16  # sequences of docstrings whose first position gives the constants


@dataclass
class StreamingSettings(UseSettings):
    """The settings of `streaming`."""

    num_sequences: at_least(2) = 4  # sequences
    sequence_length: at_least(2) = 768  # tokens in a sequence; those after the first window are predicted
    window: at_least(2) = 256  # tokens that the cache holds


def rounding(settings: UseSettings):
    """What does a constant save in 8 bits? One scale per tensor or token, weights too (minutes)"""
    experiment, lists = measure_models("rounding", "ours", settings, roundings)
    columns = ("checkpoint", "kind", "rounded", "scale", "loss", "loss_from_ninth")
    return experiment.save(**lists, columns=(*columns, "largest_state", "largest_input"))


@torch.inference_mode()
def roundings(settings: UseSettings, spec, model):
    """A row for each way of rounding, for the unchanged model and with constants.

    Where a text begins with BOS, the constants are BOS's, and the text is read without BOS as well.
    """
    if not linears_of(model):
        raise UserError(f"{spec.label}: the inputs of stacked experts are not rounded")
    tokens, others = split_windows(settings, spec, settings.sequence_length)
    num_bos = 0 if bos_of(settings, spec) is None else 1
    moved = with_constants(model, constants_at(model, others))
    cases = {"unchanged": (model, tokens, num_bos), "moved": (moved, tokens, num_bos)}
    if num_bos:
        cases["moved, no BOS"] = (moved, tokens[:, 1:], 0)
    ways = [(None, None)]
    for parts in ("inputs", "inputs and weights"):
        ways += [(parts, "tensor"), (parts, "token")]
    rows = []
    for kind, (some, read, before) in progress(cases.items(), desc="rounding", unit=" cases", leave=False):
        sizes = largest_numbers(some, read)
        for parts, scale in ways:
            with contextlib.ExitStack() as stack:
                if parts is not None:
                    stack.enter_context(rounded_inputs(some, scale, read.shape[1]))
                if parts == "inputs and weights":
                    stack.enter_context(rounded_weights(some, scale))
                _, losses = alpha_and_loss(some, read, before=before)
            rows.append({"kind": kind, "rounded": parts, "scale": scale} | losses | sizes)
    return {"rows": rows}


def linears_of(model):
    """The linear maps of a model's blocks; none if some weights are of another kind, as stacked experts."""
    modules = [module for block in model.blocks for module in block.modules()]
    if any(weight.ndim > 2 for block in model.blocks for weight in block.parameters()):
        return []
    return [module for module in modules if is_linear(module)]


@contextlib.contextmanager
def rounded_inputs(model, scale, T):
    """A context in which the blocks' projections read inputs rounded to 8 bits: -127 to 127 times a step.

    With `token` each position has its own step; with `tensor` a sequence of T tokens shares one.
    """
    dims = {"token": (2,), "tensor": (1, 2)}[scale]

    def hook(module, inputs):
        (x,) = inputs  # (B, T, d), or (B T, d)
        return rounded(x.reshape(-1, T, x.shape[-1]), dims).view(x.shape)

    with contextlib.ExitStack() as stack:
        for module in linears_of(model):
            stack.enter_context(module.register_forward_pre_hook(hook))
        yield


@contextlib.contextmanager
def rounded_weights(model, scale):
    """A context in which the blocks' projections have weights rounded to 8 bits.

    With `token` each output of a matrix has its own step; with `tensor` the matrix shares one.
    """
    usual = {module: module.weight.data for module in linears_of(model)}
    try:
        for module, weight in usual.items():
            inputs = 1 if isinstance(module, nn.Linear) else 0  # a Conv1D's matrix is (in, out)
            module.weight.data = rounded(weight, {"token": inputs, "tensor": (0, 1)}[scale])
        yield
    finally:
        for module, weight in usual.items():
            module.weight.data = weight


def rounded(x, dims):
    """x, rounded to -127 to 127 times a step, which is shared along `dims`."""
    step = x.abs().amax(dims, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step


def largest_numbers(model, tokens):
    """The largest |number| of the stream and of the inputs of the blocks' projections."""
    states, inputs = [], []

    def note(module, given):
        inputs.append(given[0].abs().amax())

    with contextlib.ExitStack() as stack:
        for module in linears_of(model):
            stack.enter_context(module.register_forward_pre_hook(note))
        for part in batches(tokens):
            model.hidden(part, on_state=lambda layer, x: states.append(x.abs().amax()))
    return {"largest_state": max(states).item(), "largest_input": max(inputs).item()}


def streaming(settings: StreamingSettings):
    """What does a constant save in a cache that forgets? StreamingLLM's case (2309.17453; minutes)"""
    if settings.window >= settings.sequence_length:
        raise UserError(f"--window {settings.window}: expected less than --sequence-length")
    experiment, lists = measure_models("streaming", "ours", settings, streamings)
    result = experiment.save(**lists, columns=("checkpoint", "kind", "loss"))
    full = {}
    for point in lists["points"]:
        if point["kind"] == "full context":
            full[point["checkpoint"], point["predicted"]] = point["loss"]
    shown = []
    for point in lists["points"]:
        if point["kind"] in ("window", "window, constants"):
            cost = point["loss"] - full[point["checkpoint"], point["predicted"]]
            shown.append(point | {"cost": cost, "zero": 0})
    question = f"Does a constant in front keep a cache of {settings.window} tokens going?"
    keys = {"x": "predicted", "y": "cost", "series": "kind", "panel": "checkpoint"}
    labels = {"xlabel": "tokens read", "ylabel": "loss minus that of the full context, nats"}
    path = experiment.folder / "streaming.png"
    curves(shown, path, question, **keys, theories={"zero": "full context"}, **labels)
    return result


@torch.inference_mode()
def streamings(settings: StreamingSettings, spec, model):
    """A row for each kind of context, and a point for each BIN predictions.

    All predict the same tokens: those of the text after the first window.
    """
    if spec.is_ours:
        raise UserError(f"{spec.label}: model.py has no cache; only models of transformers are read so")
    check_seen(model, "constants")
    window = settings.window
    tokens, others = split_windows(settings, spec, settings.sequence_length)
    count = tokens.shape[1] - window + 1  # positions of an entry
    constants = entries_at(model, others[:, 0], count, is_mean=True)
    first_tokens = entries_at(model, tokens[:, 0], count)
    values = constants[-1][1]
    if (values - values[:, :, :1]).abs().max() > 0.001 * values.abs().max():
        raise UserError(f"{spec.label}: its positions are more than distances: they change a token's values")
    moved = with_constants(model, constants_at(model, others))
    rows, points = [], []
    cases = {
        "full context": lambda: model.hidden(tokens),
        "full context, constants": lambda: moved.hidden(tokens),
        "window": lambda: streamed(model, tokens, window),
        "window, constants": lambda: streamed(model, tokens, window, constants),
        "window, first token kept": lambda: streamed(model, tokens, window, first_tokens),
    }
    for kind, read in progress(cases.items(), desc="streaming", unit=" cases", leave=False):
        states = read()[:, window - 1 : -1]  # those that predict tokens after the window
        total = 0
        for start in range(0, states.shape[1], BIN):
            some = states[:, start : start + BIN]
            wanted = tokens[:, window + start :][:, :BIN]
            summed = model.summed_loss(some.flatten(0, 1), wanted.flatten()).item()
            points.append({"kind": kind, "predicted": window + start, "loss": summed / wanted.numel()})
            total += summed
        rows.append({"kind": kind, "loss": total / states[..., 0].numel()})
    return {"rows": rows, "points": points}


def streamed(lens, tokens, window, entries=None):
    """Final states (n, T, d) of tokens (n, T), each of which sees the newest `window` of them and an entry.

    Generation sees the same if its cache holds the newest tokens and counts positions within the cache: the
    entry is at 0, the newest token at most at `window`. Only distances count, so here the tokens keep their
    positions, and each sees the entry at another one: `entries` has it at all of them, as `entries_at`.
    """
    n, T = tokens.shape
    place = torch.arange(T, device=tokens.device)
    behind = place[:, None] - place  # how far a query is behind a token
    sees = (behind >= 0) & (behind < window)  # (T, T)
    cache = DynamicCache()
    if entries is not None:
        place = place + 1
        for layer, pair in enumerate(entries):
            cache.update(*[x.expand(n, -1, -1, -1) for x in pair], layer)
        one_entry = F.one_hot((place - window).clamp(min=0), cache.get_seq_length()) > 0
        sees = torch.cat((one_entry, sees), dim=1)
    mask = torch.zeros(sees.shape, dtype=lens.model.dtype, device=tokens.device)
    mask = mask.masked_fill(~sees, torch.finfo(mask.dtype).min).expand(n, 1, -1, -1)
    places = place.expand(n, -1)
    output = lens.trunk(input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=cache)
    return output.last_hidden_state


def entries_at(lens, tokens, count, is_mean=False):
    """Keys and values, (c, G, count, D) each by layer, of tokens (c,) at positions 0 to count - 1.

    They are what a cache holds of a token that stands there alone; with `is_mean`, their means, as c = 1.
    """
    places = torch.arange(count, device=tokens.device).repeat(len(tokens))[:, None]
    cache = DynamicCache()
    alone = tokens.repeat_interleave(count)[:, None]
    lens.trunk(input_ids=alone, position_ids=places, past_key_values=cache)
    layers = []
    for layer in cache.layers:
        flat = [x.squeeze(2).unflatten(0, (-1, count)) for x in (layer.keys, layer.values)]
        pair = [x.transpose(1, 2) for x in flat]  # (c, G, count, D) each
        layers.append([x.mean(0, keepdim=True) if is_mean else x for x in pair])
    return layers


COMMANDS = {
    "rounding": Command(rounding, UseSettings()),
    "streaming": Command(streaming, StreamingSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
