"""What does a model read while it is measured? Random tokens, random vectors, text."""

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

LARGEST_TEXT = 2**26  # bytes of --text; a data set may have any number
SOURCE_CHARACTERS = 2**19  # read of a source of sources.data


def random_streams(kind, input_seed, indices):
    """A generator for each sequence number, a function of (kind, input_seed, number) alone."""
    key = keyed_generator(kind, input_seed).bit_generator.state["state"]["key"]
    for index in indices:
        yield np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, index]))


def random_tokens(input_seed, indices, T, vocab_size):
    """Sequences number `indices`, (n, T) int64, i.i.d. uniform; a shorter one is how a longer one begins."""
    streams = random_streams("tokens", input_seed, indices)
    tokens = [stream.integers(vocab_size, size=T) for stream in streams]
    return torch.from_numpy(np.stack(tokens))


def random_vectors(input_seed, indices, T, d):
    """Vectors in place of embedded tokens, (n, T, d) float32 i.i.d. N(0, 0.02^2) (BB 4.1)."""
    streams = random_streams("vectors", input_seed, indices)
    vectors = [stream.standard_normal((T, d), np.float32) for stream in streams]
    return torch.from_numpy(np.stack(vectors)).mul_(STD)


@dataclass
class TextSettings(RunSettings):
    """What a command is asked whose models read a text."""

    text: str | None = None  # text file, source or data set, as sources.data; None: docstrings, or random
    tokenizer: str | None = None  # tokenizer of --text, as in python -m sources.data; None: the model's own
    bos: Literal["auto", "always", "never"] = "auto"  # put BOS in front; auto: as the model was trained
    first_token: str | None = None  # put this token at position 1: its number, or bos; turns --bos off
    input_seed: int = 0  # seed of random tokens, and of the places in a text
    num_sequences: at_least(2) = 100  # sequences (Gu et al.: 100)


def text_of(settings: TextSettings, spec):
    """What `read_tokens` reads for a spec, in a word; stderr is told if it has no tokenizer or BOS."""
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
        hint = "it reads random tokens; --tokenizer names one"
        print(f"{spec.label}: no tokenizer that is known here: {hint}", file=sys.stderr)
    return "random tokens"


def bos_of(settings: TextSettings, spec):
    """The BOS that stands in front of what the model of a spec reads, or None. Random tokens have none."""
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
    """What the model of a spec reads, (n, T) int64 on the device, with its BOS; UserError for too few.

    T tokens with BOS have the text of T - 1 without.
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
        raise UserError(f"{spec.label} has no tokenizer that is known here: name one by --tokenizer")
    elif tokenizer == "bytes" and spec.config.vocab_size != load_tokenizer("bytes").vocab_size:
        raise UserError(f"{spec.label} knows {spec.config.vocab_size} tokens, and they are not bytes")
    else:
        encoded = encode(text, str(tokenizer))
        windows = encoded[: len(encoded) // T * T].view(-1, T)  # (all, T)
        generator = keyed_generator("text", settings.input_seed, T)
        tokens = windows[generator.choice(len(windows), size=min(count, len(windows)), replace=False)]
    if len(tokens) < count:
        found = f"{text} has {len(tokens)} sequences of {T} tokens, not --num-sequences {count}"
        raise UserError(f"{found}: name a longer text, or a shorter --sequence-length")
    if settings.first_token is not None:
        tokens[:, 0] = first_token(settings.first_token, tokenizer, spec)
    known = spec.config.vocab_size
    if tokens.max() >= known:
        said = f"the text has token {tokens.max()}, but {spec.label} knows {known}"
        raise UserError(f"{said}: which tokenizer?")
    return tokens.to(settings.device)


def first_token(word, tokenizer, spec):
    """The number that --first-token means; UserError for a word that is none, or a tokenizer without BOS."""
    number = word
    if word == "bos" and tokenizer is not None:
        number = str(load_tokenizer(str(tokenizer)).bos)
    if not re.fullmatch(r"\d{1,9}", number) or int(number) >= spec.config.vocab_size:
        known = f"a number below {spec.config.vocab_size}, or bos where a tokenizer has it"
        raise UserError(f"--first-token {word}: expected {known}")
    return int(number)


@functools.lru_cache
def encode(text, tokenizer):
    """The tokens of a text file, or of the beginning of a source of sources.data: (n,) int64."""
    if isfile(text):
        check_regular(Path(text), LARGEST_TEXT)
        documents, most = read(Path(text)), math.inf
    else:
        documents, most = pieces((text,)), SOURCE_CHARACTERS
    content = ""
    for piece, begins in documents:
        is_full = len(content) >= most
        if begins and content:
            content += "\n\n"
        if is_full:
            break
        content += piece
    coder = load_tokenizer(tokenizer)
    tell_spelled(Counter(coder.spelled.findall(content)), text)
    (tokens,) = coder.encode([content])
    return torch.tensor(tokens, dtype=torch.int64)


def check_tokenizer(spec, data) -> None:
    """UserError where a checkpoint has a tokenizer, and the data set was made by another one."""
    path = spec.tokenizer_file
    if path is None:
        return
    if load_tokenizer(str(path)).content != data.tokenizer_file.read_bytes():
        raise UserError(f"{data.folder} was made by another tokenizer than {path}")
