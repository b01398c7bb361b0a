"""Turn text into tokens, and a step number into a batch.

    python -m sources.data                                      # this Python's own source, a BPE of 4,096
    python -m sources.data docstrings --tokenizer data/python-bpe_4096/tokenizer.model
    python -m sources.data 'books/*.txt' more.jsonl --tokenizer tiktoken:gpt2 --out data/books

A source is a file, a folder (all text in it) or a glob; `python` (the standard library, about 30 MB, no
download), `docstrings` (the English in it), `packages` (the Python code of six packages installed with this
project, 100 MB), or `backcopy` (letters on which attention sinks grow). TEXT lists the endings of text files,
in UTF-8. A file is a document; in .jsonl each line's "text" is.

A data set is a folder: train.bin and val.bin (tokens, uint16 or uint32), meta.json, and tokenizer.model,
.json, or .txt (the name of one that needs no file). Every document begins with BOS, or else with EOS, if the
tokenizer has one of them.
"""

import ast
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import re
import sysconfig
import warnings
from array import array
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tyro.conf import Positional

from lib.files import ROOT, atomic_folder, check_regular, read_json
from lib.random import keyed_generator
from lib.runtime import gathered, progress
from lib.settings import Command, UserError, from_values, rank, run_script, say
from sources.checkpoint import load_tokenizer
from sources.tokenizers import read_tokenizer

PAGE = 2**16  # characters; longer documents are read in pieces, cut at line ends
TEXT = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".jsonl")  # endings of text
TEXT += (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".js", ".ts", ".java", ".go", ".rs", ".sh")
TABLES = (".jsonl.gz", ".parquet", ".csv")  # endings of what `datasets` converts
NAMES = ("python", "docstrings", "packages", "backcopy")  # sources that are not files
TRIGGERS = "teo"  # letters of `backcopy` after which the letter before them is repeated
PACKAGES = ("torch", "scipy", "sympy", "networkx", "matplotlib", "numpy")  # of the source `packages`


@dataclass
class Settings:
    """How to make a data set."""

    source: Positional[tuple[str, ...]] = ("python",)  # files, folders, globs, or a name as above
    tokenizer: str = "bpe:4096"  # bpe:N, .model, tokenizer.json or .gguf file, smollm2, tiktoken:gpt2, bytes
    held_out: float = 0.01  # share of the tokens in the validation split
    out: str | None = None  # folder to make; None: data/SOURCE-TOKENIZER


def places_of(source):
    """The places a source is read from, each once: NAMES, and files; UserError if a name means no text."""
    named = []
    for name in source:
        found = [name] if name in NAMES else text_files(name)
        if not found:
            expected = f"expected {', '.join(TEXT)}, folders or globs of these, {', '.join(NAMES)}"
            if any(str(file).endswith(TABLES) for file in Path(name).rglob("*")):
                code = f"load_dataset({name!r}, split='train').to_json('text.jsonl')"
                expected = f'convert its "text": python -c "from datasets import load_dataset; {code}"'
            raise UserError(f"no text in '{name}': {expected}")
        named += found
    return list({os.path.realpath(place): place for place in named}.values())


def pieces(places):
    """The pieces of places, in order: (text, not empty; whether it begins a document)."""
    for place in places:
        for text, begins in pieces_of(place):
            if text:
                yield text, begins


def pieces_of(name):
    """The pieces of one place, a file or one of NAMES: (text, whether a document begins) each."""
    if name == "backcopy":
        return ((text, True) for text in backcopy())
    if name not in NAMES:
        return read(name)
    if name == "packages":
        files = package_files()
    else:  # the standard library, without packages installed in its folder
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
        files = [file for file in files if not {"site-packages", "dist-packages"} & set(file.parts)]
    return python_texts(name, files)


def python_texts(name, files):
    """Yield the code in Python files, or the docstrings in it, each a document."""
    for file in files:
        code = file.read_text("utf-8-sig", "replace")
        yield (docstrings(code) if name == "docstrings" else code), True


def text_files(name):
    """The text files of a name: a file, those of a glob, and those in folders that are not hidden."""
    files = []
    for path in sorted(map(Path, glob.glob(name, recursive=True))) or [Path(name)]:
        files += files_below(path) if path.is_dir() else [path]
    return [file for file in files if file.suffix.lower() in TEXT]


def files_below(folder):
    """The files in a folder and in those below it, sorted; links are followed, each place is read once."""
    files, seen = [], {}
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            say(f"{place} is {seen[real]}, which is read already")
            folders.clear()
            continue
        seen[real] = place
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file())


def package_files():
    """The .py files of PACKAGES, except long ones and builds' own, in an order of their names alone."""
    files = {}
    for package in PACKAGES:
        folder = Path(find_spec(package).submodule_search_locations[0])
        for file in folder.rglob("*.py"):
            if file.name not in ("version.py", "__config__.py") and file.stat().st_size <= 200_000:  # bytes
                files[file.relative_to(folder.parent).as_posix()] = file
    shuffled = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    return list(map(files.get, shuffled))


def read(file):
    """Yield the pieces of a text file, each to the end of a line; UserError if it cannot be read."""
    check_regular(file)
    try:
        with file.open(encoding="utf-8-sig") as opened:
            documents = json_lines(file, opened) if file.suffix.lower() == ".jsonl" else [opened]
            for document in documents:
                begins = True
                while text := document.read(PAGE) + document.readline(PAGE):
                    yield text, begins
                    begins = False
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text: convert it") from None


def json_lines(file, lines):
    """Yield a .jsonl file's documents, one a line, as open files."""
    for number, line in enumerate(lines, start=1):
        try:
            text = json.loads(line)["text"] if line.strip() else ""
            text = text.encode("utf-8", "replace").decode()  # without lone surrogates
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(f'{file}:{number}: expected a JSON object with a "text"') from None
        yield io.StringIO(text)


def docstrings(code):
    """The docstrings of Python code, separated by empty lines; "" if it does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes in others' code
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners)]
    return "\n\n".join(filter(None, texts))


def backcopy(count=2**17, length=127):
    """Yield documents of lower-case letters: the Bigram-Backcopy task (Guo et al. 2024), random bigrams."""
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


def default_folder(source, tokenizer):
    """The default folder of a data set: data/SOURCE-TOKENIZER."""
    words = "-".join([*source, tokenizer])
    name = re.sub("[:/]", "_", words)
    if not re.fullmatch(r"[\w+-][\w+.-]{0,60}", name):
        digest = hashlib.sha256(words.encode()).hexdigest()[:8]  # two globs may differ only in a star
        name = re.sub(r"[^\w+.-]+", "_", name)[:60].strip("._") + f"-{digest}"
    return Path("data") / name


def stamps_of(source):
    """The size in bytes and the time of change, in ns, of each file of a source that is there."""
    stamps = {}
    for name in source:
        for file in text_files(name) if name not in NAMES else ():
            if file.exists():
                stamps[str(file)] = [file.stat().st_size, file.stat().st_mtime_ns]
    return stamps


def open_data(settings, is_new):
    """The data set of a run; the default one is made if missing. A new run's source may not have changed."""
    folder = Path(settings.data or default_folder(settings.source, settings.tokenizer))
    if rank() > 0:
        gathered()  # waits for the first process
    if settings.data is None and not folder.exists():
        say(f"preparing {folder}, once")
        prepare(Settings(source=settings.source, tokenizer=settings.tokenizer))
    if rank() == 0:
        gathered()
    tokens = TokenData(folder, settings.bos_first)
    if is_new and settings.data is None and tokens.meta.files != stamps_of(settings.source):
        ways = f"remove it to prepare it anew, or read it as it is with --data {folder}"
        raise UserError(f"{folder} was made before its source, {' '.join(settings.source)}, changed: {ways}")
    count = tokens.num_windows("train", settings.sequence_length)
    held_out = tokens.num_windows("val", settings.sequence_length)
    epochs = settings.max_iters * settings.global_batch_size / count
    say(f"{folder}: {tokens.meta.tokens['train']:,} training tokens, {tokens.meta.fingerprint[:12]}")
    say(f"{settings.max_iters:,} steps are {epochs:.3g} epochs")
    if held_out < settings.eval_sequences:
        say(f"an evaluation reads {held_out} sequences, not {settings.eval_sequences}: no more are held out")
    return tokens


def prepare(settings: Settings):
    """Tokenize a source into a folder, which appears complete or not at all, and print its size."""
    settings = from_values(Settings, vars(settings), "settings")
    out = Path(settings.out or default_folder(settings.source, settings.tokenizer))
    if out.exists():
        raise UserError(f"{out} exists: choose another --out, or remove it")
    if not 0 < settings.held_out < 1:
        raise UserError(f"--held-out {settings.held_out}: expected a number between 0 and 1")
    places = places_of(settings.source)
    tokenizer = load_tokenizer(settings.tokenizer, (text for text, _ in pieces(places)))
    if tokenizer.bos is None:
        print(f"{settings.tokenizer} has neither BOS nor EOS: nothing separates documents")
    with atomic_folder(out) as folder:
        meta = {"source": settings.source, "tokenizer": settings.tokenizer}
        meta["files"] = stamps_of(settings.source)  # before they are read
        meta |= write_tokens(folder, pieces(places), tokenizer, settings.held_out)
        tokenizer.save(folder)
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    print(f"{out}: {meta['bytes']:,} bytes in {meta['documents']:,} documents, {meta['held_out']} held out")
    train, val = meta["tokens"].values()
    print(f"{train:,} training and {val:,} validation tokens of {meta['vocab_size']:,}")
    return out


def write_tokens(folder, source, tokenizer, share):
    """Write a source's tokens to train.bin and val.bin; returns what meta.json says of them."""
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    fingerprint = hashlib.sha256(f"{tokenizer.vocab_size} {share}".encode() + tokenizer.content)
    starts = array("Q")  # of documents, in tokens
    num_bytes = 0
    num_tokens = 0
    bar = progress(desc="tokenizing", unit="B", unit_scale=True)
    with bar, (folder / "all.bin").open("wb") as file:
        while some := list(itertools.islice(source, 32)):  # a tokenizer's threads share them
            for (text, begins), tokens in zip(some, tokenizer.encode([text for text, _ in some])):
                if begins:
                    starts.append(num_tokens)
                    tokens = [*begin, *tokens]
                written = np.array(tokens, dtype).tobytes()
                file.write(written)
                fingerprint.update(written)
                size = len(text.encode())
                bar.update(size)
                num_bytes += size
                num_tokens += len(tokens)
    if num_tokens < 2:
        raise UserError("no text: the source is empty")
    held_out, spans = held_out_spans(np.array(starts, np.int64), num_tokens, share)
    fingerprint.update(spans.tobytes())
    parts = np.split(np.memmap(folder / "all.bin", dtype, "r"), spans.flatten())  # train, val, train, ...
    sizes = {}
    for split, of_split in (("train", parts[0::2]), ("val", parts[1::2])):
        with (folder / f"{split}.bin").open("wb") as file:
            for part in of_split:
                part.tofile(file)
        sizes[split] = sum(map(len, of_split))
    (folder / "all.bin").unlink()
    meta = {"bytes": num_bytes, "documents": len(starts), "tokens": sizes, "held_out": held_out}
    meta |= {"tokenizer_file": tokenizer.file, "vocab_size": tokenizer.vocab_size, "dtype": dtype.name}
    return meta | {"fingerprint": fingerprint.hexdigest()}


def held_out_spans(starts, num_tokens, share):
    """What to hold out, in words, and as spans of tokens, (n, 2), given the documents' starts, (n,)."""
    # Whole documents, evenly spaced, if they make at least half of the share; else (one book) windows.
    budget = max(1, int(share * num_tokens))  # tokens
    spans = np.stack([starts, np.append(starts[1:], num_tokens)], axis=1)
    for count in range(int(share * len(spans)), 0, -1):
        chosen = spans[((np.arange(count) + 0.5) * len(spans) / count).astype(int)]
        if budget / 2 <= np.diff(chosen).sum() <= budget:
            return f"{count:,} of them", chosen
    count = max(1, budget // 1024)  # windows of up to 2,047 tokens
    size = budget // count
    margin = (num_tokens // count - size) // 2
    starts = np.arange(count) * num_tokens // count + margin
    words = f"{count:,} windows of them" if count > 1 else "a window of them"
    return words, np.stack([starts, starts + size], axis=1)


@dataclass(frozen=True)
class Meta:
    """The contents of meta.json."""

    source: tuple[str, ...]
    files: dict[str, list[int]]  # of the source: size and time of each
    tokenizer: str  # as requested
    bytes: int
    documents: int
    tokens: dict[str, int]  # of each split
    tokenizer_file: Literal["tokenizer.model", "tokenizer.json", "tokenizer.txt"]
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    fingerprint: str  # a hash of all tokens, the tokenizer and the held-out spans
    held_out: str  # in words


class TokenData:
    """A prepared data set, memory-mapped; with `bos_first`, BOS replaces the first token of every window."""

    def __init__(self, folder, bos_first=False):
        self.folder = Path(folder)
        path = self.folder / "meta.json"
        if not path.exists():
            made = f"in {ROOT}, python -m sources.data SOURCE --out {self.folder.absolute()} makes one"
            raise UserError(f"no data set in {folder}: {made}")
        self.meta = from_values(Meta, read_json(path), f"{path}, to be prepared anew")
        self.vocab_size = self.meta.vocab_size
        self.tokens = {}  # of each split, memory-mapped
        for split in ("train", "val"):
            path = self.folder / f"{split}.bin"
            check_regular(path)
            size, count = path.stat().st_size, self.meta.tokens.get(split, 0)
            if count < 1 or size != count * np.dtype(self.meta.dtype).itemsize:
                raise UserError(f"{path} has {size} bytes, not {count} tokens: prepare the data set anew")
            self.tokens[split] = np.memmap(path, self.meta.dtype, "r")
        self.tokenizer = read_tokenizer(self.folder / self.meta.tokenizer_file)  # that made the data set
        self.first_token = self.tokenizer.bos if bos_first else None  # of every window; None: its own
        if bos_first and self.first_token is None:
            raise UserError(f"--bos-first: the tokenizer of {folder} has no BOS")

    def num_windows(self, split, T):
        """The number of windows in a split; UserError if 0."""
        size = len(self.tokens[split])
        if size <= T:
            sizes = f"{size} tokens, not the {T + 1} of one window: give more text, or shorten the sequences"
            raise UserError(f"the {split} split of {self.folder} has {sizes}")
        return (size - 1) // T

    def windows(self, split, numbers, T):
        """Windows, T apart, as inputs and targets, (n, T) int64 each; targets are one token ahead."""
        places = T * np.array(numbers)[:, None] + np.arange(T + 1)  # (n, T + 1)
        window = torch.from_numpy(self.tokens[split][places].astype(np.int64))
        if window.max() >= self.vocab_size:
            raise UserError(f"{self.folder} holds a token {window.max()}: prepare the data set anew")
        if self.first_token is not None:
            window[:, 0] = self.first_token
        return window[:, :-1], window[:, 1:]

    def batch(self, data_seed, sequences, T):
        """Training windows, a function of (data_seed, sequence numbers, T); each epoch permutes all."""
        size = self.num_windows("train", T)
        numbers = [permutation(data_seed, i // size, T, size)[i % size] for i in sequences]
        return self.windows("train", numbers, T)

    def held_out(self, count, T):
        """Up to `count` validation windows, evenly spaced, always the same."""
        size = self.num_windows("val", T)
        return self.windows("val", np.linspace(0, size - 1, min(count, size)).astype(int), T)


@functools.lru_cache(maxsize=2)  # of a large data set a batch spans at most two epochs
def permutation(data_seed, epoch, T, size):
    """The order of an epoch's windows, (size,)."""
    return keyed_generator("epoch", data_seed, epoch, T).permutation(size)


COMMANDS = {"": Command(prepare, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
