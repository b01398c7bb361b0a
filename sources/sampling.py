"""Use a model: write text with it, one token after another, or take its loss."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tyro.conf import Positional

from lib import runtime
from lib.settings import UserError, at_least
from sources import checkpoint
from sources.data import TokenData, default_folder
from sources.inputs import check_tokenizer, encode


@dataclass
class SampleSettings:
    """The settings of `train.py sample`."""

    model: Positional[str] = "runs/default"  # a run, a folder, a .gguf file, smollm2, or a name of the Hub
    prompt: str = ""  # text to continue; BOS comes before it
    tokens: at_least(1) = 200  # largest number to write; EOS ends a text, too
    temperature: at_least(0, float) = 0.8  # divides the logits; 0: always the likeliest token
    top_k: at_least(1) | None = None  # draw only from this many likeliest tokens; None: all
    seed: int = 0  # seed of the draws
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where to compute; auto: cuda, then cpu


@torch.no_grad()
def generate(model, tokenizer, generator, prompt="", count=48, temperature=0.8, top_k=None, prefix=()):
    """The text, up to `count` tokens, that a model writes after its prefix (or BOS, or 0) and a prompt."""
    vocab_size = min(tokenizer.vocab_size, model.config.vocab_size)  # either may have more
    (prompt_tokens,) = tokenizer.encode([prompt])
    front = [*(prefix or (tokenizer.bos or 0,)), *prompt_tokens]
    tokens = torch.tensor([front], device=model.device)  # (1, T)
    cache, new = model.new_cache(), tokens
    for _ in runtime.progress(range(count), desc="writing", unit=" tokens", leave=False):
        if tokens.shape[1] > model.config.context_length:  # the text slides, so every position changes
            cache, new = None, tokens[:, -model.config.context_length :]
        state = model.hidden(new, last_only=True, cache=cache)  # (1, d)
        logits = model.unembed(state)[0, :vocab_size].float().cpu()
        likeliest = logits.topk(vocab_size if top_k is None else min(top_k, vocab_size))  # sorted
        choice = torch.tensor([0])
        if temperature > 0:
            choice = torch.multinomial((likeliest.values / temperature).softmax(0), 1, generator=generator)
        token = likeliest.indices[choice]  # (1,)
        if token.item() in tokenizer.ends:
            break
        new = token[None].to(model.device)
        tokens = torch.cat((tokens, new), dim=1)
    return tokenizer.decode(tokens[0, len(front) :].tolist())


def tokenizer_of(spec):
    """The Tokenizer of a model; UserError if there is none."""
    if spec.tokenizer is None:
        raise UserError(f"{spec.label} has no tokenizer that we can read")
    return spec.tokenizer


def sample(settings: SampleSettings) -> None:
    """Continue a prompt with a checkpoint."""
    spec = checkpoint.find_model(settings.model)
    tokenizer = tokenizer_of(spec)
    model = spec.model(runtime.choose_device(settings.device))
    generator = torch.Generator().manual_seed(settings.seed)
    options = (settings.prompt, settings.tokens, settings.temperature, settings.top_k, spec.prefix(tokenizer))
    print(settings.prompt + generate(model, tokenizer, generator, *options))


@dataclass
class EvalSettings:
    """The settings of `train.py eval`."""

    model: Positional[str] = "runs/default"  # a run, a folder, a .gguf file, smollm2, or a name of the Hub
    text: str | None = None  # text file, or the beginning of a source of sources.data, as one document
    data: str | None = None  # data set whose held-out split is read; None: the text, or the run's data set
    sequence_length: at_least(1) | None = (
        None  # tokens of a window; None: as the run, or the context, 1,024 at most
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where to compute; auto: cuda, then cpu


@torch.no_grad()
def evaluate(settings: EvalSettings):
    """Print and return the mean loss of a model over all windows of a text, or of held-out data."""
    spec = checkpoint.find_model(settings.model)
    tokenizer, run, context = tokenizer_of(spec), spec.run, spec.config.context_length
    T = settings.sequence_length or run.get("sequence_length") or min(1024, context)
    checkpoint.check_lengths((T,), context)
    place = settings.data or run.get("data") or (run and default_folder(run["source"], run["tokenizer"]))
    prefix = spec.prefix(tokenizer)
    if settings.text:
        place = settings.text
        tokens = encode(place, tokenizer)
        if tokenizer.bos is not None and not prefix:
            tokens = torch.cat((tokens.new_tensor([tokenizer.bos]), tokens))  # one document
    elif place:
        if not settings.data and not Path(place).exists():
            raise UserError(f"{place}, the data of {spec.label}, is missing here: name it with --data")
        data = TokenData(place)
        check_tokenizer(spec, data)
        tokens = torch.from_numpy(data.tokens["val"].astype("int64"))
    else:
        raise UserError(f"{spec.label} is no run with a data set: name a --text or --data")
    num_front = 0 if run else len(prefix)
    length = T + 1 - num_front  # of the text in a window
    if len(tokens) < length:
        raise UserError(f"{place} has {len(tokens)} tokens, not {length}: shorten --sequence-length")
    step = length if num_front else T  # each token is predicted once, as in training
    windows = tokens.unfold(0, length, step).clone()
    if run.get("bos_first"):
        windows[:, 0] = tokenizer.bos
    elif num_front:
        windows = torch.cat((tokens.new_tensor(prefix).expand(len(windows), -1), windows), dim=1)
    model = spec.model(runtime.choose_device(settings.device))
    loss, counted = 0.0, windows[:, max(1, num_front) :]  # the tokens that are predicted
    for part in windows.to(model.device).split(runtime.default_batch_size(model.device, T)):
        states = model.hidden(part[:, :-1])[:, max(0, num_front - 1) :].flatten(0, 1)
        targets = part[:, max(1, num_front) :].flatten()
        loss += model.summed_loss(states, targets).item() / counted.numel()
    num_bytes = sum(len(tokenizer.decode(window).encode()) for window in counted.tolist())
    bits = loss * counted.numel() / math.log(2) / max(1, num_bytes)
    front = f" behind {tokenizer.decode(list(prefix))!r}" if prefix else ""
    said = f"{spec.label} on {place}: {loss:.6f} nats/token, {bits:.4f} bits/byte over all {len(windows):,} "
    print(f"{said}windows of {T} tokens{front}")
    return {"loss": loss, "windows": len(windows), "bits_per_byte": bits}
