"""What a model reads while it is measured: random tokens, random vectors, or text."""

import functools
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from os.path import isdir, isfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from init import STD
from lib.files import check_regular
from lib.random import keyed_generator
from lib.settings import RunSettings, UserError, at_least
from sources.data import TokenData, pieces, read
from sources.tokenizers import load_tokenizer, tell_spelled

LARGEST_TEXT = 2**26  # bytes of --text; a data set may be larger
SOURCE_CHARACTERS = 2**19  # that are read from a source of sources.data


def random_streams(kind, input_seed, indices):
    """Yield a generator for each sequence number, dependent only on (kind, input_seed, number)."""
    key = keyed_generator(kind, input_seed).bit_generator.state["state"]["key"]
    for index in indices:
        yield np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, index]))


def random_tokens(input_seed, indices, T, vocab_size):
    """Uniform random sequences number `indices`, (n, T) int64; a longer one begins with the shorter one."""
    streams = random_streams("tokens", input_seed, indices)
    tokens = [stream.integers(vocab_size, size=T) for stream in streams]
    return torch.from_numpy(np.stack(tokens))


def random_vectors(input_seed, indices, T, d):
    """Random vectors in place of embedded tokens, (n, T, d) float32, i.i.d. N(0, 0.02^2) (BB 4.1)."""
    streams = random_streams("vectors", input_seed, indices)
    vectors = [stream.standard_normal((T, d), np.float32) for stream in streams]
    return torch.from_numpy(np.stack(vectors)).mul_(STD)


@dataclass
class TextSettings(RunSettings):
    """Settings of a command whose models read a text."""

    text: str | None = None  # text file, source or data set (sources.data); None: docstrings, or random
    tokenizer: str | None = None  # tokenizer of --text, as in python -m sources.data; None: the model's own
    bos: Literal["auto", "always", "never"] = "auto"  # put BOS in front; auto: as the model was trained
    first_token: str | None = None  # token at position 1: its number, or bos; turns --bos off
    input_seed: int = 0  # seed of random tokens, or of the windows of a text
    num_sequences: at_least(2) = 100  # sequences (Gu et al.: 100)


def text_of(settings: TextSettings, spec):
    """The name of what `read_tokens` reads for a spec; stderr gets a line if it lacks a tokenizer or BOS."""
    file = settings.tokenizer or spec.tokenizer_file
    if settings.bos == "always" and file is not None:
        tokenizer = load_tokenizer(str(file))
        if tokenizer.bos == tokenizer.eos:
            print(f"{spec.label}: EOS, {tokenizer.eos}, stands in BOS's place", file=sys.stderr)
    if settings.text is not None:
        return settings.text
    if file is not None:
        return "docstrings"
    if not spec.is_newborn:
        hint = "it reads random tokens; name one with --tokenizer"
        print(f"{spec.label}: no known tokenizer: {hint}", file=sys.stderr)
    return "random tokens"


def bos_of(settings: TextSettings, spec):
    """The BOS in front of what a spec's model reads, or None; random tokens have none."""
    file = settings.tokenizer or spec.tokenizer_file
    if file is None or settings.bos == "never" or settings.first_token is not None:
        return None
    tokenizer = load_tokenizer(str(file))
    if settings.bos == "auto" and not spec.begins_with_bos(tokenizer):
        return None
    if tokenizer.bos is None:
        raise UserError(f"--bos {settings.bos}: {file} has no BOS")
    return tokenizer.bos


def read_tokens(settings: TextSettings, spec, T):
    """What a spec's model reads, (n, T) int64 on the device, with BOS in front if the settings ask for it.

    BOS is one of the T tokens. UserError if the text is too short, or its tokens are not the model's.
    """
    bos = bos_of(settings, spec)
    if bos is not None:
        tokens = read_tokens(replace(settings, bos="never"), spec, T - 1)
        return torch.cat((torch.full_like(tokens[:, :1], bos), tokens), dim=1)
    count = settings.num_sequences
    tokenizer = settings.tokenizer or spec.tokenizer_file
    text = settings.text or (tokenizer and "docstrings")
    if text is None:
        tokens = random_tokens(settings.input_seed, range(count), T, spec.config.vocab_size)
    elif isdir(text):
        data = TokenData(text)
        check_tokenizer(spec, data)
        tokenizer = data.tokenizer_file
        tokens, _ = data.held_out(count, T)
    elif tokenizer is None:
        raise UserError(f"{spec.label} has no known tokenizer: name one with --tokenizer")
    elif tokenizer == "bytes" and spec.config.vocab_size != load_tokenizer("bytes").vocab_size:
        raise UserError(f"{spec.label} has {spec.config.vocab_size} tokens, so they are not bytes")
    else:
        encoded = encode(text, str(tokenizer))
        windows = encoded[: len(encoded) // T * T].view(-1, T)  # (all, T)
        generator = keyed_generator("text", settings.input_seed, T)
        tokens = windows[generator.choice(len(windows), size=min(count, len(windows)), replace=False)]
    if len(tokens) < count:
        found = f"{text} has {len(tokens)} sequences of {T} tokens, not --num-sequences {count}"
        raise UserError(f"{found}: use a longer text or a shorter --sequence-length")
    if settings.first_token is not None:
        tokens[:, 0] = first_token(settings.first_token, tokenizer, spec)
    known = spec.config.vocab_size
    if tokens.max() >= known:
        said = f"the text has token {tokens.max()}, but {spec.label} has only {known}"
        raise UserError(f"{said}: is this its --tokenizer?")
    return tokens.to(settings.device)


def first_token(word, tokenizer, spec):
    """The token that --first-token names; UserError if it names none."""
    number = word
    if word == "bos" and tokenizer is not None:
        number = str(load_tokenizer(str(tokenizer)).bos)
    if not re.fullmatch(r"\d{1,9}", number) or int(number) >= spec.config.vocab_size:
        known = f"a number below {spec.config.vocab_size}, or bos where a tokenizer has it"
        raise UserError(f"--first-token {word}: expected {known}")
    return int(number)


@functools.lru_cache
def encode(text, tokenizer):
    """The tokens, (n,) int64, of a text file, or of the beginning of a source of sources.data."""
    if isfile(text):
        check_regular(Path(text), LARGEST_TEXT)
        documents, most = read(Path(text)), math.inf
    else:
        documents, most = pieces((text,)), SOURCE_CHARACTERS
    content = ""
    for piece, begins in documents:
        if begins and content:
            content += "\n\n"
        if len(content) >= most:
            break
        content += piece
    coder = load_tokenizer(tokenizer)
    tell_spelled(Counter(coder.spelled.findall(content)), text)
    (tokens,) = coder.encode([content])
    return torch.tensor(tokens, dtype=torch.int64)


def check_tokenizer(spec, data) -> None:
    """UserError if a checkpoint has a tokenizer, and the data set was made with another."""
    path = spec.tokenizer_file
    if path is None:
        return
    if load_tokenizer(str(path)).content != data.tokenizer_file.read_bytes():
        raise UserError(f"{data.folder} was made with another tokenizer than {path}")
