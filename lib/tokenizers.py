"""How does text become token numbers, and back?

    >>> from lib.tokenizers import load_tokenizer
    >>> load_tokenizer("bytes").encode(["def f"])
    [[100, 101, 102, 32, 102]]

A tokenizer is bpe:N (N tokens, trained here on a text), a SentencePiece .model file, a tokenizer.json, a
.gguf file or `smollm2` (a model's own), tiktoken:gpt2, or bytes.
"""

import contextlib
import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import tiktoken
import tokenizers

from lib import gguf_tokenizers
from lib.files import LARGEST_TOKENIZER, read_bytes, read_json, smollm2
from lib.formats import is_gguf, open_gguf
from lib.settings import UserError


@dataclass(frozen=True)
class Tokenizer:
    """Text to token numbers and back, whatever the library."""

    vocab_size: int
    bos: int | None  # begins a document
    encode: Callable  # list of texts -> list of lists of token numbers
    decode: Callable  # list of token numbers -> text
    file: str  # that it is kept in
    content: bytes  # of the file
    piece: Callable | None = None  # token number -> what it says, where decoding one alone loses its blank

    def text(self, token):
        """What a token says; "" for one that the tokenizer has not."""
        if token >= self.vocab_size:
            return ""
        return self.piece(token) if self.piece else self.decode([token])

    def save(self, folder) -> None:
        """Write its file, and beside a tokenizer.json what `transformers` wants to know."""
        (folder / self.file).write_bytes(self.content)
        if self.file == "tokenizer.json":
            config = {"tokenizer_class": "PreTrainedTokenizerFast"}
            if self.bos is not None:
                config["bos_token"] = self.text(self.bos)
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load_tokenizer(name, texts=()):
    """The tokenizer of a name, `bpe:N` trained on `texts`; UserError for what is none."""
    if Path(name).name == "tokenizer.txt":
        name = read_bytes(Path(name)).decode(errors="replace")
    if name == "bytes":
        return bytes_tokenizer()
    if name.startswith("tiktoken:"):
        return tiktoken_tokenizer(name)
    if name.startswith("bpe:"):
        return sentencepiece_tokenizer(name, train_bpe(name, texts))
    path = smollm2() if name == "smollm2" else Path(name)
    if not os.path.isfile(path):
        expected = "bpe:N, a .model, tokenizer.json or .gguf file, smollm2, tiktoken:gpt2 or bytes"
        raise UserError(f"no tokenizer '{name}': expected {expected}")
    if is_gguf(path):
        return gguf_tokenizer(path)
    content = read_bytes(path, LARGEST_TOKENIZER)
    if path.suffix == ".json":
        return json_tokenizer(name, content, bos_beside(path))
    return sentencepiece_tokenizer(name, content)


def bytes_tokenizer():
    """The UTF-8 bytes of a text, and BOS, 256."""

    def encode(texts):
        return [list(text.encode()) for text in texts]

    def decode(tokens):
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    return Tokenizer(257, 256, encode, decode, "tokenizer.txt", b"bytes")


def tiktoken_tokenizer(name):
    """One of tiktoken's, which it downloads once."""
    try:
        coder = tiktoken.get_encoding(name.removeprefix("tiktoken:"))
    except Exception as error:  # its download raises whatever the network library does
        hint = "download it once elsewhere and set TIKTOKEN_CACHE_DIR to the folder of its cache"
        raise UserError(f"no {name} here: {hint}, or use bpe:N ({error!r})") from None
    encode = coder.encode_ordinary_batch
    return Tokenizer(coder.n_vocab, coder.eot_token, encode, coder.decode, "tokenizer.txt", name.encode())


# ---- tokenizer.json and .gguf ------------------------------------------------------------------------------


def json_tokenizer(name, content, bos=None):
    """The tokenizer of a tokenizer.json's bytes.

    `bos` is BOS, as text; None: what the tokenizer puts before a text, if anything.
    """
    with as_user_error(name):
        coder = tokenizers.Tokenizer.from_buffer(content)
        coder.no_truncation()
        coder.no_padding()
        encoding = coder.encode("a")
        vocab_size = 1 + max(coder.get_vocab().values())
        if vocab_size > len(content):
            raise ValueError(f"it numbers tokens up to {vocab_size:,}")
    if bos is None and encoding.special_tokens_mask[:1] == [1]:
        bos = encoding.tokens[0]

    def encode(texts):
        with as_user_error(name):
            return [encoding.ids for encoding in coder.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(tokens):
        with as_user_error(name):
            return coder.decode(tokens, skip_special_tokens=False)

    bos = coder.token_to_id(bos) if bos is not None else None
    return Tokenizer(vocab_size, bos, encode, decode, "tokenizer.json", content)


@contextlib.contextmanager
def as_user_error(name):
    """UserError for whatever the tokenizers library raises: panics of its Rust are no Exception."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{name} has no tokenizer that can be used: {reason}; give another one") from None


def bos_beside(path):
    """BOS, as text, by tokenizer_config.json beside a tokenizer.json; None if it has none."""
    config = path.with_name("tokenizer_config.json")
    token = read_json(config).get("bos_token") if config.exists() else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def gguf_tokenizer(path):
    """The tokenizer of a .gguf file; UserError for a kind that is not known here."""
    values = open_gguf(path).values
    if not gguf_tokenizers.is_known(values):
        raise UserError(f"{path}: its kind of tokenizer is not known here; give another by --tokenizer")
    with as_user_error(path):
        if values["tokenizer.ggml.model"] == "llama":
            return sentencepiece_tokenizer(path, gguf_tokenizers.sentencepiece_model(values))
        return json_tokenizer(path, *gguf_tokenizers.byte_level_tokenizer(values))


# ---- SentencePiece -----------------------------------------------------------------------------------------


def sentencepiece_tokenizer(name, model):
    """The tokenizer of a SentencePiece file's bytes; what has no BOS begins documents with EOS, if any."""
    try:
        coder = sentencepiece.SentencePieceProcessor(model_proto=model)
        coder.id_to_piece(list(range(coder.vocab_size())))
    except (RuntimeError, UnicodeDecodeError):
        raise UserError(f"{name} is no SentencePiece model") from None
    bos = next((token for token in (coder.bos_id(), coder.eos_id()) if token != -1), None)
    size = coder.vocab_size()
    return Tokenizer(size, bos, coder.encode, coder.decode, "tokenizer.model", model, coder.id_to_piece)


def train_bpe(name, texts, sample=400_000):
    """The SentencePiece file of `bpe:N`, N tokens, trained on a random `sample` of the lines of `texts`.

    The sample is always the same one; SentencePiece's own is not repeatable. What is trained keeps every
    byte of a text, but for U+2581, which is SentencePiece's blank.
    """
    generator = random.Random(0)
    lines = []
    all_lines = (line for text in texts for line in text.splitlines() if line.strip())
    for i, line in enumerate(all_lines):
        if i < sample:
            lines.append(line)
        elif (place := generator.randrange(i + 1)) < sample:
            lines[place] = line
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=int(name.removeprefix("bpe:")),
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=False,  # a run of spaces is a token for each, as in GPT-2
            max_sentence_length=2**20,  # bytes; what is longer is left out
            num_threads=2,  # the file says how many there were, and should be the same on any machine
            minloglevel=2,
        )
    except (RuntimeError, OSError, ValueError, OverflowError) as error:
        reason = str(error).split("] ")[-1] or "its N is too small, or the source empty"
        raise UserError(f"cannot train {name} (bpe:N, N tokens) on this source: {reason}") from None
    return model.getvalue()
