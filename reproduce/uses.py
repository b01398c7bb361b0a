"""What is a constant that ends the sink good for: in 8 bits, and in front of a cache that forgets? (ours)

python -m reproduce.uses rounding               # the loss in 8 bits, with constants and without
python -m reproduce.uses streaming              # the loss of long texts, the newest 256 tokens cached
"""

import contextlib
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from lib.figures import curves
from lib.runtime import progress
from lib.settings import Command, UserError, at_least, run_script
from measure.attention import batches, check_seen, constants_at, with_constants
from measure.rounding import rounded_inputs, rounded_weights
from measure.units import alpha_and_loss
from sinks import Settings, measure_models, measured_and_others
from sources.inputs import bos_of

BIN = 32  # predictions whose mean loss is a point of `streaming`'s figure


@dataclass
class UseSettings(Settings):
    """The settings of `rounding`."""

    num_sequences: at_least(2) = 12  # sequences
    num_constants: at_least(1) = 16  # sequences of docstrings whose first tokens give the constants


@dataclass
class StreamingSettings(UseSettings):
    """The settings of `streaming`."""

    num_sequences: at_least(2) = 4  # sequences
    sequence_length: at_least(2) = 768  # tokens in a sequence; those behind the first window are predicted
    window: at_least(2) = 256  # tokens that the cache holds


def rounding(settings: UseSettings):
    """What does a constant save in 8 bits? A scale a tensor or a token, inputs or weights, too (minutes)"""
    experiment, lists = measure_models("rounding", "ours", settings, roundings)
    columns = ("checkpoint", "kind", "rounded", "scale", "loss", "loss_from_ninth")
    return experiment.save(**lists, columns=(*columns, "largest_state", "largest_input"))


@torch.inference_mode()
def roundings(settings: UseSettings, spec, model):
    """A row for each way of rounding, for the model as it is and with constants.

    Where a text begins with BOS, the constants are made of BOS: with them the text is read without it, too.
    """
    if not model.linears:
        raise UserError(f"{spec.label}: the inputs of stacked experts are not rounded")
    tokens, others = measured_and_others(settings, spec, settings.sequence_length)
    num_bos = 0 if bos_of(settings, spec) is None else 1
    transplanted = with_constants(model, constants_at(model, others))
    cases = {"unchanged": (model, tokens, num_bos), "transplanted": (transplanted, tokens, num_bos)}
    if num_bos:
        cases["transplanted, no BOS"] = (transplanted, tokens[:, 1:], 0)
    ways = [(None, None)]
    for parts in ("inputs", "inputs and weights"):
        ways += [(parts, "tensor"), (parts, "token")]
    rows = []
    for kind, (some, read, before) in progress(cases.items(), desc="rounding", unit=" cases", leave=False):
        sizes = largest_numbers(some, read)
        for parts, scale in ways:
            with contextlib.ExitStack() as stack:
                if parts is not None:
                    stack.enter_context(rounded_inputs(some, scale))
                if parts == "inputs and weights":
                    stack.enter_context(rounded_weights(some, scale))
                losses = alpha_and_loss(some, read, before=before)[2]
            rows.append({"kind": kind, "rounded": parts, "scale": scale} | losses | sizes)
    return {"rows": rows}


def largest_numbers(model, tokens):
    """The largest |number| of the stream, and of what enters the blocks' projections."""
    states, inputs = [], []

    def note(module, given):
        inputs.append(given[0].abs().amax())

    with contextlib.ExitStack() as stack:
        for module in model.linears:
            stack.enter_context(module.register_forward_pre_hook(note))
        for part in batches(tokens):
            model.hidden(part, on_state=lambda layer, x: states.append(x.abs().amax()))
    return {"largest_state": max(states).item(), "largest_input": max(inputs).item()}


def streaming(settings: StreamingSettings):
    """Can a constant stand in front of a cache that forgets? StreamingLLM's case (2309.17453; minutes)"""
    if settings.window >= settings.sequence_length:
        raise UserError(f"--window {settings.window}: expected less than --sequence-length")
    experiment, lists = measure_models("streaming", "ours", settings, streamings)
    result = experiment.save(**lists, columns=("checkpoint", "kind", "loss"))
    question = f"Does a constant in front keep a cache of {settings.window} tokens going?"
    keys = {"x": "predicted", "y": "loss", "series": "kind", "panel": "checkpoint"}
    labels = {"xlabel": "tokens read", "ylabel": f"loss of the last {BIN} tokens, nats"}
    curves(lists["points"], experiment.folder / "streaming.png", question, **keys, **labels)
    return result


@torch.inference_mode()
def streamings(settings: StreamingSettings, spec, model):
    """A row for each kind of context, and a point for each BIN predictions, all of the same tokens.

    Behind the first window each token is read alone, and the oldest leaves the cache, as in generation; but
    it is the text's token, whatever the model predicts.
    """
    if spec.is_ours:
        raise UserError(f"{spec.label}: model.py has no cache; only models of transformers are read so")
    check_seen(model, "constants")
    window = settings.window
    tokens, others = measured_and_others(settings, spec, settings.sequence_length)
    count = tokens.shape[1] - window + 1  # positions of an entry
    constants = entries_at(model, others[:, 0], count, is_mean=True)
    first_tokens = entries_at(model, tokens[:, 0], count)
    transplanted = with_constants(model, constants_at(model, others))
    rows, points = [], []
    cases = {
        "full context": lambda: model.hidden(tokens),
        "full context, constants": lambda: transplanted.hidden(tokens),
        "window": lambda: streamed(model, tokens, window),
        "window, constants": lambda: streamed(model, tokens, window, constants),
        "window, first token kept": lambda: streamed(model, tokens, window, first_tokens),
    }
    for kind, read in progress(cases.items(), desc="streaming", unit=" cases", leave=False):
        states = read()[:, window - 1 : -1]  # those that predict tokens behind the window
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
    """Final states (n, T, d) of tokens (n, T); a cache holds the newest `window`, and an entry in front.

    Positions are counted within the cache: the entry's is 0, the newest token's is at most `window`. Only
    distances count, so that here the tokens stay and the entry moves: `entries` has it at each position.
    """
    n, T = tokens.shape
    first = 0 if entries is None else 1  # position of the first token
    cache = DynamicCache()
    for number, pair in enumerate(entries or ()):
        cache.update(*[x[0].expand(n, -1, -1, -1) for x in pair], number)
    states = []
    for start in (0, *range(window, T)):
        part = tokens[:, start : start + 1] if start else tokens[:, :window]
        for number, layer in enumerate(cache.layers if start else ()):
            layer.keys, layer.values = layer.keys[:, :, 1 - window :], layer.values[:, :, 1 - window :]
            if entries is not None:
                key, value = [x[start + 1 - window].expand(n, -1, -1, -1) for x in entries[number]]
                layer.keys = torch.cat((key, layer.keys), dim=2)
                layer.values = torch.cat((value, layer.values), dim=2)
        places = torch.arange(start, start + part.shape[1], device=tokens.device) + first
        output = lens.trunk(input_ids=part, position_ids=places.expand(n, -1), past_key_values=cache)
        states.append(output.last_hidden_state)
    return torch.cat(states, dim=1)


def entries_at(lens, tokens, count, is_mean=False):
    """By layer the keys and the values of tokens (c,) at positions 0 to count - 1, (count, c, G, 1, D) each.

    They are what a cache of the model holds of a token that stands there alone, or their means, as c = 1.
    """
    places = torch.arange(count, device=tokens.device).repeat_interleave(len(tokens))
    cache = DynamicCache()
    lens.trunk(input_ids=tokens.repeat(count)[:, None], position_ids=places[:, None], past_key_values=cache)
    layers = []
    for layer in cache.layers:
        pair = [x.unflatten(0, (count, -1)) for x in (layer.keys, layer.values)]
        layers.append([x.mean(1, keepdim=True) if is_mean else x for x in pair])
    return layers


COMMANDS = {
    "rounding": Command(rounding, UseSettings()),
    "streaming": Command(streaming, StreamingSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
