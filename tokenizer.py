"""How does text become numbers, and numbers text?

    >>> from tokenizer import load_tokenizer
    >>> tokenizer = load_tokenizer("bpe:400", iter([open("tokenizer.py").read()]))
    >>> tokenizer.decode(tokenizer.encode(["def f(x):"])[0])
    'def f(x):'

SentencePiece, tiktoken and bytes behind one interface. What is trained here keeps every byte of a
text, but for U+2581, which is SentencePiece's blank.
"""

import functools
import io
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch

from common import UserError


@dataclass(frozen=True)
class Tokenizer:
    """Text to token numbers and back, whatever the library."""

    name: str
    vocab_size: int
    bos: int
    encode: Callable[[list[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    model: bytes | None = None  # the SentencePiece file


def load_tokenizer(name: str, texts: Iterator[str] = ()) -> Tokenizer:
    """bytes, tiktoken:gpt2, a SentencePiece file, or bpe:N trained on `texts`; UserError for all else."""
    threads = torch.get_num_threads()
    if name == "bytes":
        encode = functools.partial(map, lambda text: np.frombuffer(text.encode(), np.uint8))
        decode = lambda tokens: bytes(t for t in tokens if t < 256).decode(errors="replace")  # noqa: E731
        return Tokenizer(name, 257, 256, encode, decode)
    if name.startswith("tiktoken:"):
        try:
            import tiktoken

            coder = tiktoken.get_encoding(name.removeprefix("tiktoken:"))
        except ValueError as error:
            raise UserError(f"tokenizer {name}: {str(error).splitlines()[0]}") from None
        except Exception as error:  # its download raises whatever the network library does
            hint = "download it once elsewhere and set TIKTOKEN_CACHE_DIR to the folder of its cache"
            raise UserError(f"no {name} here ({type(error).__name__}): {hint}, or use bpe:N") from None
        encode = functools.partial(coder.encode_ordinary_batch, num_threads=threads)
        return Tokenizer(name, coder.n_vocab, coder.eot_token, encode, coder.decode)
    if name.startswith("bpe:"):
        model = train_bpe(name, texts)
    elif os.path.isfile(name):
        try:
            model = Path(name).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}") from None
    else:
        raise UserError(f"no tokenizer '{name}': expected bpe:N, a .model file, tiktoken:gpt2 or bytes")
    coder = sentence_piece(name, model)
    bos = coder.bos_id() if coder.bos_id() >= 0 else coder.eos_id()
    if bos < 0:
        raise UserError(f"{name} has neither BOS nor EOS to mark where documents begin")
    encode = functools.partial(coder.encode, num_threads=threads)
    return Tokenizer(name, coder.vocab_size(), bos, encode, coder.decode, model)


def sentence_piece(name: str, model: bytes) -> sentencepiece.SentencePieceProcessor:
    """The library's coder; UserError, with the `name`, for what is no model."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise UserError(f"{name} is no SentencePiece model") from None


BPE = dict(model_type="bpe", byte_fallback=True, split_digits=True, minloglevel=2)
BPE |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False)
BPE |= dict(num_threads=2)  # the file says how many there were, and should be the same on any machine
BPE |= dict(allow_whitespace_only_pieces=False)  # a run of spaces is a token for each, as in GPT-2


def pieces(texts: Iterator[str], longest: int = 4192) -> Iterator[str]:
    """The lines of texts; in pieces where one has more bytes than SentencePiece reads."""
    for line in (line for text in texts for line in text.splitlines() if line.strip()):
        step = len(line) if len(line.encode()) <= longest else longest // 4
        yield from (line[i : i + step] for i in range(0, len(line), step))


def train_bpe(name: str, texts: Iterator[str], sample: int = 400_000) -> bytes:
    """The SentencePiece file of `bpe:N`, N tokens, trained on a random `sample` of the lines of `texts`."""
    model, size, lines, generator = io.BytesIO(), name.removeprefix("bpe:"), [], random.Random(0)
    if not size.isdecimal():
        raise UserError(f"tokenizer '{name}': expected bpe:N, N the number of tokens")
    for i, line in enumerate(pieces(texts)):
        if i < sample:
            lines.append(line)
        elif (j := generator.randrange(i + 1)) < sample:  # a reservoir; SentencePiece's own is not repeatable
            lines[j] = line
    inputs = dict(sentence_iterator=iter(lines), vocab_size=int(size))
    try:
        sentencepiece.SentencePieceTrainer.train(**BPE, **inputs, model_writer=model)
    except (RuntimeError, OSError, ValueError, OverflowError) as error:
        reason = str(error).strip().splitlines()[-1].split("] ")[-1]
        raise UserError(f"cannot train {name} on this source: {reason}") from None
    return model.getvalue()


def token_text(file: Path) -> Callable[[int], str]:
    """What a token says, by a SentencePiece file."""
    coder = sentence_piece(str(file), file.read_bytes())
    return lambda token: coder.id_to_piece(token) if token < coder.vocab_size() else ""
