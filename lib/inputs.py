"""What does a model read while it is measured? Random tokens, random vectors, held-out text.

>>> from lib import inputs
>>> inputs.random_tokens(0, range(2), 5, 50257).shape
torch.Size([2, 5])
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from init import STD, keyed_generator
from lib.data import TokenData, load_tokenizer
from lib.files import check_sum, read_bytes
from lib.settings import RunSettings, UserError, at_least

LARGEST_TEXT = 2**26  # bytes of --text; a data set may have any number

# ---- random inputs -----------------------------------------------------------------------------------------


def random_streams(kind, input_seed, indices):
    """A generator for each sequence number, a function of (kind, input_seed, number) alone: counter based."""
    key = keyed_generator(kind, input_seed).bit_generator.state["state"]["key"]
    for index in indices:
        yield np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, index]))


def random_tokens(input_seed, indices, T, vocab_size):
    """Sequences number `indices`, (n, T) int64, i.i.d. uniform over the vocabulary.

    Sequence i is the same in any batch and any process, and a shorter one is the beginning of a longer one.
    """
    streams = random_streams("tokens", input_seed, indices)
    tokens = [stream.integers(vocab_size, size=T) for stream in streams]
    return torch.from_numpy(np.stack(tokens))


def random_vectors(input_seed, indices, T, d):
    """Vectors in place of embedded tokens, (n, T, d) float32 i.i.d. N(0, 0.02^2) (BB 4.1)."""
    streams = random_streams("vectors", input_seed, indices)
    vectors = [stream.standard_normal((T, d), np.float32) for stream in streams]
    return torch.from_numpy(np.stack(vectors)).mul_(STD)


# ---- text --------------------------------------------------------------------------------------------------


@dataclass
class TextSettings(RunSettings):
    """What a script that measures on text can be told of it; random tokens are read where none is named."""

    data: str | None = None
    """folder of a prepared data set, whose held-out text is read"""
    text: str | None = None
    """text file to read"""
    tokenizer: str | None = None
    """tokenizer of --text, as in python -m lib.data (default: the model's own)"""
    bos: bool = False
    """put the tokenizer's BOS at the first position"""
    first_token: at_least(0) | None = None
    """put this token there, whatever was there: does it matter which it is?"""
    input_seed: int = 0
    """seed of random tokens, or of the places in --text"""
    num_sequences: at_least(2) = 100
    """sequences (Gu et al.: 100)"""


def check_text_settings(settings: TextSettings) -> None:
    """UserError for settings that do not fit each other."""
    if settings.data and settings.text:
        raise UserError("give --data or --text, not both")
    needs_tokenizer = settings.text or settings.bos
    if settings.tokenizer and (settings.data or not needs_tokenizer):
        raise UserError("--data has a tokenizer of its own; --tokenizer is for --text, and for --bos")
    if settings.bos and settings.first_token is not None:
        raise UserError("give --bos or --first-token, not both")


def read_tokens(settings: TextSettings, spec, T):
    """What the model of a spec reads, (n, T) int64 on the settings' device.

    UserError for text that is not there, is too short, or was cut by another tokenizer than the model's.
    """
    count = settings.num_sequences
    vocab_size = spec.config.vocab_size
    tokenizer = settings.tokenizer or spec.tokenizer_file
    if settings.data:
        data = open_data(settings.data)
        check_tokenizer(spec, data)
        tokenizer = data.tokenizer_file or data.tokenizer
        tokens, _ = data.held_out(count, T)
    elif tokenizer is None and (settings.text or settings.bos):
        raise UserError(f"{spec.label} has no tokenizer that is known here: name one by --tokenizer")
    elif tokenizer == "bytes" and vocab_size != load_tokenizer("bytes").vocab_size:
        raise UserError(f"{spec.label} knows {vocab_size} tokens, which are not bytes: another --tokenizer")
    elif settings.text:
        tokens = random_windows(encode_file(settings.text, str(tokenizer)), count, T, settings.input_seed)
    else:
        tokens = random_tokens(settings.input_seed, range(count), T, vocab_size)
    if len(tokens) < count:
        place = settings.data or settings.text
        raise UserError(f"{place} has {len(tokens)} sequences of {T} tokens: lower --num-sequences {count}")
    first = settings.first_token
    if settings.bos:
        first = load_tokenizer(str(tokenizer)).bos
        if first is None:
            raise UserError(f"{tokenizer} has no BOS: name a token by --first-token")
    if first is not None:
        tokens = tokens.clone()
        tokens[:, 0] = first
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise UserError(
            f"the text has token {largest}, but {spec.label} knows {vocab_size}: which tokenizer?"
        )
    return tokens.to(settings.device)


open_data = functools.lru_cache(TokenData)


@functools.lru_cache
def encode_file(path, tokenizer):
    """A text file's tokens, (n,) int64; UserError if it cannot be read."""
    text = read_bytes(Path(path), LARGEST_TEXT).decode(errors="replace")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    (tokens,) = load_tokenizer(tokenizer).encode([text])
    return torch.tensor(tokens, dtype=torch.int64)


def random_windows(text, count, T, seed):
    """Up to `count` of a text's windows of T tokens, drawn without replacement, (n, T)."""
    total = len(text) // T
    places = keyed_generator("text", seed, T).choice(total, size=min(count, total), replace=False)
    return text[: total * T].view(total, T)[places]


def check_tokenizer(spec, data) -> None:
    """UserError where a checkpoint has a tokenizer, and the data set was made by another one."""
    path = spec.tokenizer_file
    if path is None and not spec.is_newborn and (spec.folder / "tokenizer.txt").is_file():
        path = spec.folder / "tokenizer.txt"
        check_sum(path)
    if path is None:
        return
    own = load_tokenizer(str(path)).content if path.suffix == ".gguf" else path.read_bytes()
    if own != (data.load_tokenizer().content or data.tokenizer.encode()):
        raise UserError(f"{data.folder} was made by another tokenizer than {path}")
