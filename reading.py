"""What does a model read while it is measured? Held-out text of a data set, a text file, or random tokens.

>>> import reading
>>> s = reading.Settings(text="README.md", tokenizer="bytes", device="cpu")
>>> reading.tokens(s, "tiny_llama@42", 64, 4096).shape
torch.Size([100, 64])
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import common
from checkpoint import check_tokenizer, own_tokenizer
from common import UserError, setting
from data import TokenData
from init import keyed_generator
from probe import random_tokens
from tokenizer import load_tokenizer


@dataclass
class Settings(common.RunSettings):
    """What a script that measures on text can be told of it."""

    data: str | None = setting(None, "prepared data set to read held-out text from")
    text: str | None = setting(None, "text file to read")
    tokenizer: str | None = setting(None, "of --text: bytes or a .model file (default: the checkpoint's own)")
    bos: bool = setting(False, "put the tokenizer's BOS at the first position")
    input_seed: int = setting(0, "seed of random tokens, or of the places in --text")
    num_sequences: int = setting(100, "sequences (Gu et al.: 100)", least=2)


def check(s: Settings) -> None:
    """UserError for settings that do not fit each other."""
    if s.data and s.text:
        raise UserError("give --data or --text, not both")
    if (s.data and s.tokenizer) or (s.tokenizer and not (s.text or s.bos)):
        raise UserError("--data has a tokenizer of its own; --tokenizer is for --text, and for --bos")


open_data = functools.lru_cache(TokenData)  # its checksums are compared once


@functools.lru_cache
def encoded(file: str, tokenizer: str) -> Tensor:
    """A text file's tokens, (n,); UserError if it cannot be read."""
    try:
        text = Path(file).read_text("utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    return torch.tensor(next(iter(load_tokenizer(tokenizer).encode([text]))), dtype=torch.int64)


def tokens(s: Settings, spec: str, T: int, vocab: int) -> Tensor:
    """What the model of a spec reads: (n, T) tokens. UserError for text that is not there, or not its own."""
    n, own = s.num_sequences, own_tokenizer(spec)
    name = s.tokenizer or (str(own) if own else None)
    if s.data:
        data = open_data(s.data)
        name = str(data.tokenizer_file or data.tokenizer)
        check_tokenizer(spec, data)
        read, _ = data.held_out(n, T)
    elif name is None and (s.text or s.bos):
        raise UserError(f"{spec} has no tokenizer.model beside it: name one by --tokenizer, or bytes")
    elif s.text:
        text, generator = encoded(s.text, name), keyed_generator("text", s.input_seed, T)
        windows = len(text) // T
        places = generator.choice(windows, size=min(n, windows), replace=False)
        read = text[: windows * T].view(windows, T)[places]
    else:
        read = random_tokens(s.input_seed, range(n), T, vocab)
    if len(read) < n:
        raise UserError(f"{s.data or s.text}: {len(read)} sequences of {T} tokens; lower --num-sequences {n}")
    if s.bos:
        read = torch.cat([torch.full_like(read[:, :1], load_tokenizer(name).bos), read[:, 1:]], dim=1)
    if read.max() >= vocab:
        raise UserError(f"the text has token {int(read.max())}, but {spec} knows {vocab}: which tokenizer?")
    return read.to(s.device)
