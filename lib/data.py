"""How does text become tokens, and a step number a batch?

    python -m lib.data                                      # this Python's own source, a BPE of 4,096
        data/python-bpe_4096: 31,525,333 bytes in 1,762 documents
        15,702,174 training and 148,148 validation tokens of 4,096
    python -m lib.data docstrings --tokenizer data/python-bpe_4096/tokenizer.model
    python -m lib.data 'books/*.txt' more.jsonl --tokenizer tiktoken:gpt2 --out data/books

A source is `python` (the standard library, about 30 MB, no download), `docstrings` (the English in it),
`backcopy` (letters on which attention sinks grow), a .txt or .jsonl file, or a glob of such. Tokenizers are
those of lib/tokenizers.py.

A data set is a folder: train.bin and val.bin (tokens, uint16 or uint32), meta.json, and tokenizer.model,
.json, or .txt with the name of one that needs no file. Every document begins with BOS, if the tokenizer has
one. The last hundredth of the tokens is held out, from a document's beginning where one is near.
"""

import ast
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tyro.conf import Positional

from init import keyed_generator
from lib.files import atomic_folder, check_regular, check_text, read_json
from lib.runtime import progress
from lib.settings import Command, UserError, from_values, run_script
from lib.tokenizers import load_tokenizer

PAGE = 2**16  # characters: a .txt file has no document marks, so it is cut, at line ends
TRIGGERS = "teo"  # the letters of `backcopy` after which the letter before them comes again


@dataclass
class Settings:
    source: Positional[tuple[str, ...]] = ("python",)  # python, docstrings, backcopy, files, globs
    tokenizer: str = "bpe:4096"  # bpe:N, .model, tokenizer.json or .gguf file, smollm2, tiktoken:gpt2, bytes
    held_out: float = 0.01  # share of the tokens in the validation split
    out: str | None = None  # folder to make; None: data/SOURCE-TOKENIZER


# ---- text --------------------------------------------------------------------------------------------------


def documents(source):
    """The documents of a source, in order, without empty ones; UserError, at once, if there are no files."""
    return filter(None, itertools.chain(*[texts_of(name) for name in source]))


def texts_of(name):
    """The texts of one name in a source."""
    if name == "backcopy":
        return backcopy()
    if name in ("python", "docstrings"):
        codes = (file.read_text("utf-8", "replace") for file in python_files())
        return codes if name == "python" else map(docstrings, codes)
    files = sorted(map(Path, glob.glob(name, recursive=True))) or [Path(name)]
    for file in files:
        if not os.path.isfile(file):
            raise UserError(f"no text in '{name}': expected a file, a glob, python, docstrings or backcopy")
        if file.suffix not in (".txt", ".jsonl"):
            raise UserError(f"cannot read {file}: expected .txt or .jsonl")
    return itertools.chain.from_iterable(map(read, files))


def python_files():
    """The files of this Python's standard library, sorted, without installed packages."""
    files = Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
    return sorted(file for file in files if not {"site-packages", "dist-packages"} & set(file.parts))


def read(file):
    """The documents of a file: of .txt pages with the rest of their last line, of JSON a line each."""
    check_regular(file)
    with file.open("rb") as content:
        check_text(file, content.read(4096))
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


# ---- files -------------------------------------------------------------------------------------------------


def default_folder(source, tokenizer):
    """Where a data set goes that was given no place: data/SOURCE-TOKENIZER."""
    name = re.sub("[:/]", "_", "-".join([*source, tokenizer]))
    if not re.fullmatch(r"[\w+.-]{1,200}", name):
        raise UserError(f"{name} is no name of a folder: give another by python -m lib.data --out")
    return Path("data") / name


def prepare(settings: Settings):
    """Tokenize a source into a folder, which appears complete or not at all, and say what there is.

    Returns the folder. UserError if it exists, for what cannot be read, or no text.
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
    print(f"{out}: {meta['bytes']:,} bytes in {meta['documents']:,} documents")
    sizes = meta["tokens"]
    print(f"{sizes['train']:,} training and {sizes['val']:,} validation tokens of {meta['vocab_size']:,}")
    return out


def write_tokens(folder, texts, tokenizer, held_out):
    """Write train.bin as the texts come, and move its end to val.bin; returns what meta.json says of them."""
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    fingerprint = hashlib.sha256(f"{tokenizer.vocab_size} {held_out}".encode() + tokenizer.content)
    num_bytes = 0
    num_documents = 0
    bar = progress(desc="tokenizing", unit="B", unit_scale=True)
    with bar, (folder / "train.bin").open("w+b") as train:
        while chunk := list(itertools.islice(texts, 32)):  # which a tokenizer's threads share
            for text, tokens in zip(chunk, tokenizer.encode(chunk)):
                document = np.array([*begin, *tokens], dtype).tobytes()
                train.write(document)
                fingerprint.update(document)
                size = len(text.encode())
                bar.update(size)
                num_bytes += size
                num_documents += 1
        num_tokens = train.tell() // dtype.itemsize
        if num_tokens < 2:
            raise UserError("no text: the source is empty")
        train.seek(max(1, int(num_tokens * (1 - held_out))) * dtype.itemsize)
        held = np.frombuffer(train.read(), dtype)
        beginnings = np.flatnonzero(np.isin(held[: len(held) // 2], begin))
        if len(beginnings) > 0:
            held = held[beginnings[0] :]
        num_train = num_tokens - len(held)
        train.truncate(num_train * dtype.itemsize)
    held.tofile(folder / "val.bin")
    return {
        "bytes": num_bytes,
        "documents": num_documents,
        "tokens": {"train": num_train, "val": len(held)},
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
    documents: int
    tokens: dict[str, int]  # of each split
    tokenizer_file: Literal["tokenizer.model", "tokenizer.json", "tokenizer.txt"]
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    fingerprint: str  # a hash of all tokens, of the tokenizer, and of what is held out


class TokenData:
    """A prepared folder, memory-mapped; UserError for a folder that is none.

    Its windows have T + 1 tokens, and begin T apart.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        path = self.folder / "meta.json"
        if not os.path.exists(path):
            raise UserError(f"no data set in {folder}: prepare one by python -m lib.data SOURCE --out FOLDER")
        self.meta = from_values(Meta, read_json(path), f"{path}, to be prepared anew")
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
            hint = "shorten the sequences, or prepare it anew with more text or another --held-out"
            raise UserError(f"the {split} split of {self.folder} has {sizes}: {hint}")
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


COMMANDS = {"": Command(prepare, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
