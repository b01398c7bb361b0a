"""How does text become tokens, and a step number a batch?

    python -m lib.data                                      # this Python's own source, a BPE of 4,096
        data/python-bpe_4096: 31,525,333 bytes in 1,762 documents
        15,677,735 training and 172,587 validation tokens of 4,096
    python -m lib.data docstrings --tokenizer data/python-bpe_4096/tokenizer.model
    python -m lib.data 'books/*.txt' more.jsonl --tokenizer tiktoken:gpt2 --out data/books

A source is `python` (the standard library, about 30 MB, no download), `docstrings` (the English in it),
`python+site`, `docstrings+site` (with the installed packages), `backcopy` (letters on which attention sinks
grow), a .txt or .jsonl file, or a glob of such. A tokenizer is bpe:N (trained here on the source),
a SentencePiece .model file, a tokenizer.json, a .gguf file or `smollm2` (a model's own), tiktoken:gpt2, or
bytes.

A data set is a folder: train.bin and val.bin (tokens, uint16 or uint32), meta.json, and tokenizer.model,
.json, or .txt with the name of one that needs no file. Every document begins with BOS, if the tokenizer has
one, and its hash alone decides whether it is held out. Where that leaves a split empty, as with a single
document, the last share of the tokens is held out.
"""

import ast
import contextlib
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import random
import re
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import sentencepiece
import tiktoken
import tokenizers
import torch
from tyro.conf import Positional

from init import keyed_generator
from lib import gguf_tokenizers
from lib.files import LARGEST_TOKENIZER, atomic_folder, check_regular, read_bytes, read_json, smollm2
from lib.folders import open_gguf
from lib.runtime import progress
from lib.settings import Command, UserError, from_values, run_script

PAGE = 2**16  # characters: a .txt file has no document marks, so it is cut, at line ends
TRIGGERS = "teo"  # the letters of `backcopy` after which the letter before them comes again


@dataclass
class Settings:
    """What data set to make, from what text."""

    source: Positional[tuple[str, ...]] = ("python",)
    """python, docstrings, either +site, backcopy, files, globs"""
    tokenizer: str = "bpe:4096"
    """bpe:N, a SentencePiece .model file, a tokenizer.json, a .gguf file, smollm2, tiktoken:gpt2, or bytes"""
    held_out: float = 0.01
    """share of the documents in the validation split"""
    out: str | None = None
    """folder to make; None: data/SOURCE-TOKENIZER"""


# ---- text --------------------------------------------------------------------------------------------------


def documents(source):
    """The documents of a source, in order, without empty ones; UserError, at once, if there are no files."""
    return filter(None, itertools.chain(*[texts_of(name) for name in source]))


def texts_of(name):
    """The texts of one name in a source."""
    if name == "backcopy":
        return backcopy()
    kind = name.removesuffix("+site")
    if kind in ("python", "docstrings"):
        codes = (file.read_text("utf-8", "replace") for file in python_files(name.endswith("+site")))
        return codes if kind == "python" else map(docstrings, codes)
    files = sorted(map(Path, glob.glob(name, recursive=True))) or [Path(name)]
    for file in files:
        if not os.path.isfile(file):
            raise UserError(f"no text in '{name}': expected a file, a glob, python, docstrings or backcopy")
        if file.suffix not in (".txt", ".jsonl"):
            raise UserError(f"cannot read {file}: expected .txt or .jsonl")
    return itertools.chain.from_iterable(map(read, files))


def python_files(with_installed):
    """This Python's own files, sorted; those of installed packages too, if wanted."""
    paths = sysconfig.get_paths()
    files = set(Path(paths["stdlib"]).rglob("*.py"))
    if with_installed:
        files.update(Path(paths["purelib"]).rglob("*.py"), Path(paths["platlib"]).rglob("*.py"))
        return sorted(files)
    installed = {"site-packages", "dist-packages"}
    return sorted(file for file in files if installed.isdisjoint(file.parts))


def read(file):
    """The documents of a file: of .txt pages with the rest of their last line, of JSON a line each."""
    check_regular(file)
    with file.open(encoding="utf-8", errors="replace") as lines:
        if file.suffix == ".txt":
            yield from iter(lambda: lines.read(PAGE) + lines.readline(PAGE), "")
            return
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)["text"] if line.strip() else ""
                yield text.encode("utf-8", "replace").decode()  # without lone surrogates
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise UserError(f'{file}:{number}: expected a JSON object with a "text"') from None


def docstrings(code):
    """The docstrings of Python code, separated by empty lines; empty for what does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange escapes in strangers' code
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners)]
    return "\n\n".join(filter(None, texts))


def backcopy(count=2**17, length=127):
    """Documents of lower-case letters: the Bigram-Backcopy task (Guo et al. 2024), always the same ones.

    A letter is drawn given the one before it; but after a trigger, the letter before the trigger comes again.
    A head that copies has nothing to do elsewhere: there it can sleep on BOS. Bigrams are random (ours).
    """
    generator = keyed_generator("backcopy")
    chain = generator.dirichlet(np.full(26, 0.3), size=26).cumsum(axis=1)  # P(next letter <= j | letter)
    triggers = [ord(letter) - ord("a") for letter in TRIGGERS]
    letters = np.zeros((length, count), np.uint8)
    letters[0] = generator.choice(np.setdiff1d(range(26), triggers), size=count)
    for i in range(1, length):
        before = letters[i - 1]
        drawn = (chain[before] < generator.random((count, 1))).sum(axis=1).clip(max=25)
        letters[i] = np.where(np.isin(before, triggers), letters[i - 2], drawn)  # letters[0] is no trigger
    for document in letters.T + ord("a"):
        yield document.tobytes().decode()


# ---- tokenizers --------------------------------------------------------------------------------------------


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
    """One of the names in this file's first lines, `bpe:N` trained on `texts`; UserError for all else.

    >>> tokenizer = load_tokenizer("bytes")
    >>> tokenizer.encode(["def f"])
    [[100, 101, 102, 32, 102]]
    """
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
    if path.suffix == ".gguf":
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


def json_tokenizer(name, content, bos=None):
    """The tokenizer of a tokenizer.json's bytes.

    `bos` is BOS, as text; None: what the tokenizer puts before a text, if anything.
    """
    with refusing(name):
        coder = tokenizers.Tokenizer.from_buffer(content)
        coder.no_truncation()
        coder.no_padding()
        begun = coder.encode("a")
        vocab_size = 1 + max(coder.get_vocab().values())
        if vocab_size > len(content):
            raise ValueError(f"it numbers tokens up to {vocab_size:,}")
    if bos is None and begun.special_tokens_mask[:1] == [1]:
        bos = begun.tokens[0]

    def encode(texts):
        with refusing(name):
            return [encoding.ids for encoding in coder.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(tokens):
        with refusing(name):
            return coder.decode(tokens, skip_special_tokens=False)

    bos = coder.token_to_id(bos) if bos is not None else None
    return Tokenizer(vocab_size, bos, encode, decode, "tokenizer.json", content)


@contextlib.contextmanager
def refusing(name):
    """UserError for whatever the tokenizers library raises: panics of its Rust are no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{name} is no tokenizer.json that can be used: {error}") from None


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
    with refusing(path):
        if values["tokenizer.ggml.model"] == "llama":
            return sentencepiece_tokenizer(path, gguf_tokenizers.sentencepiece_model(values))
        return json_tokenizer(path, *gguf_tokenizers.byte_level_tokenizer(values))


# What is trained here keeps every byte of a text, but for U+2581, which is SentencePiece's blank.
BPE = {
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": False,  # a run of spaces is a token for each, as in GPT-2
    "max_sentence_length": 2**20,  # bytes; what is longer is left out
    "num_threads": 2,  # the file says how many there were, and should be the same on any machine
    "minloglevel": 2,
}


def train_bpe(name, texts, sample=400_000):
    """The SentencePiece file of `bpe:N`, N tokens, trained on a random `sample` of the lines of `texts`.

    The sample is always the same one; SentencePiece's own is not repeatable.
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
        size = int(name.removeprefix("bpe:"))
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), vocab_size=size, model_writer=model, **BPE
        )
    except (RuntimeError, OSError, ValueError, OverflowError) as error:
        reason = str(error).split("] ")[-1] or "its N is too small, or the source empty"
        raise UserError(f"cannot train {name} (bpe:N, N tokens) on this source: {reason}") from None
    return model.getvalue()


# ---- files -------------------------------------------------------------------------------------------------


def default_folder(source, tokenizer):
    """Where a data set goes that was given no place: data/SOURCE-TOKENIZER."""
    name = re.sub("[:/]", "_", "-".join([*source, tokenizer]))
    if not re.fullmatch(r"[\w+.-]{1,200}", name):
        raise UserError(f"{name} is no name of a folder: give another by python -m lib.data --out")
    return Path("data") / name


def prepare(settings: Settings):
    """Tokenize a source into a folder, which appears complete or not at all; returns the folder.

    UserError if it exists, for what cannot be read, or no text.
    """
    out = Path(settings.out or default_folder(settings.source, settings.tokenizer))
    if os.path.exists(out):
        raise UserError(f"{out} exists: choose another --out, or remove it")
    if not 0 < settings.held_out < 1:
        raise UserError(f"--held-out {settings.held_out}: expected a number between 0 and 1")
    tokenizer = load_tokenizer(settings.tokenizer, documents(settings.source))
    texts = documents(settings.source)
    with atomic_folder(out) as folder:
        meta = {"source": settings.source, "tokenizer": settings.tokenizer}
        meta |= write_tokens(folder, texts, tokenizer, settings.held_out)
        tokenizer.save(folder)
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return out


def write_tokens(folder, texts, tokenizer, held_out):
    """Write train.bin and val.bin as the texts come; returns what meta.json says of them."""
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    fingerprint = hashlib.sha256(f"{tokenizer.vocab_size} {held_out}".encode() + tokenizer.content)
    size = 0  # bytes
    count = {"train": 0, "val": 0}  # documents
    paths = {split: folder / f"{split}.bin" for split in count}
    bar = progress(desc="tokenizing", unit="B", unit_scale=True)
    with bar, paths["train"].open("wb") as train, paths["val"].open("wb") as val:
        files = {"train": train, "val": val}
        while chunk := list(itertools.islice(texts, 32)):  # which a tokenizer's threads share
            for text, tokens in zip(chunk, tokenizer.encode(chunk)):
                raw = text.encode()
                digest = hashlib.sha256(raw).digest()
                is_held_out = int.from_bytes(digest[:8], "big") < held_out * 2**64
                split = "val" if is_held_out else "train"
                files[split].write(np.array([*begin, *tokens], dtype))
                count[split] += 1
                fingerprint.update(digest)
                size += len(raw)
                bar.update(len(raw))
    if 0 in count.values():  # a few documents: the last share of their tokens is held out
        tokens = np.concatenate([np.fromfile(path, dtype) for path in paths.values()])
        if len(tokens) < 2:
            raise UserError("no text: the source is empty")
        cut = max(1, int(len(tokens) * (1 - held_out)))
        paths["train"].write_bytes(tokens[:cut])
        paths["val"].write_bytes(tokens[cut:])
    return {
        "bytes": size,
        "documents": count,
        "tokens": {split: path.stat().st_size // dtype.itemsize for split, path in paths.items()},
        "tokenizer_file": tokenizer.file,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.name,
        "fingerprint": fingerprint.hexdigest(),
    }


# ---- batches -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meta:
    """What meta.json says of a data set."""

    source: tuple[str, ...]
    tokenizer: str  # as it was asked for
    bytes: int
    documents: dict[str, int]  # of each split, by their hashes
    tokens: dict[str, int]  # of each split
    tokenizer_file: Literal["tokenizer.model", "tokenizer.json", "tokenizer.txt"]
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    fingerprint: str  # a hash of all documents, and of how they became tokens


class TokenData:
    """A prepared folder, memory-mapped; UserError for a folder that is none.

    Its windows have T + 1 tokens, and begin T apart.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        path = self.folder / "meta.json"
        if not os.path.exists(path):
            raise UserError(f"no data set in {folder}: prepare one by python -m lib.data SOURCE --out FOLDER")
        self.meta = from_values(Meta, read_json(path), path)
        self.vocab_size = self.meta.vocab_size
        self.tokenizer_file = self.folder / self.meta.tokenizer_file
        check_regular(self.tokenizer_file)
        self.tokens = {split: self.open_split(split) for split in ("train", "val")}

    def open_split(self, split):
        """A split's tokens, memory-mapped; UserError unless there are as many as meta.json says."""
        path = self.folder / f"{split}.bin"
        check_regular(path)
        size = path.stat().st_size
        count = self.meta.tokens.get(split, 0)
        if count < 1 or size != count * np.dtype(self.meta.dtype).itemsize:
            raise UserError(f"{path} has {size} bytes, not {count} tokens: prepare the data set anew")
        return np.memmap(path, self.meta.dtype, "r")

    def load_tokenizer(self):
        """The tokenizer that made the data set; UserError if it has another number of tokens."""
        tokenizer = load_tokenizer(str(self.tokenizer_file))
        if tokenizer.vocab_size != self.vocab_size:
            sizes = f"{tokenizer.vocab_size} tokens, not the {self.vocab_size} of meta.json"
            raise UserError(f"the tokenizer of {self.folder} has {sizes}: prepare the data set anew")
        return tokenizer

    def num_windows(self, split, T):
        """How many windows a split has; UserError if none."""
        size = len(self.tokens[split])
        if size <= T:
            sizes = f"{size} tokens, not the {T + 1} of one window"
            raise UserError(f"the {split} split of {self.folder} has {sizes}: shorten the sequences")
        return (size - 1) // T

    def windows(self, split, numbers, T):
        """Windows as inputs and targets, (n, T) int64 each: the targets are one token ahead."""
        starts = T * np.array(numbers)[:, None]
        places = starts + np.arange(T + 1)  # (n, T + 1)
        window = torch.from_numpy(self.tokens[split][places].astype(np.int64))
        if window.max() >= self.vocab_size:
            raise UserError(f"{self.folder} holds a token {window.max()}: prepare the data set anew")
        return window[:, :-1], window[:, 1:]

    def batch(self, data_seed, sequences, T):
        """Training sequences, a function of (data_seed, their numbers, T): an epoch permutes all windows."""
        size = self.num_windows("train", T)
        numbers = [permutation(data_seed, i // size, T, size)[i % size] for i in sequences]
        return self.windows("train", numbers, T)

    def held_out(self, count, T):
        """Up to `count` validation windows, evenly spaced: always the same ones."""
        size = self.num_windows("val", T)
        numbers = np.linspace(0, size - 1, min(count, size)).astype(int)
        return self.windows("val", np.unique(numbers), T)


@functools.lru_cache(maxsize=2)  # a batch spans two epochs at most
def permutation(data_seed, epoch, T, size):
    """The order of an epoch's windows, (size,)."""
    return keyed_generator("epoch", data_seed, epoch, T).permutation(size)


def describe(settings: Settings) -> None:
    """Prepare a data set, and say what there is."""
    folder = prepare(settings)
    meta = TokenData(folder).meta
    print(f"{folder}: {meta.bytes:,} bytes in {sum(meta.documents.values()):,} documents")
    train, val = meta.tokens["train"], meta.tokens["val"]
    print(f"{train:,} training and {val:,} validation tokens of {meta.vocab_size:,}")


COMMANDS = {"": Command(describe, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
