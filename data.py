"""How does text become token shards, and a step number a batch?

    python data.py                                        # this Python's own source, a BPE of 4,096
    python data.py docstrings --tokenizer data/python-bpe_4096/tokenizer.model
    python data.py 'books/*.txt' more.jsonl.gz --tokenizer tiktoken:gpt2 --out data/books
    python data.py hf:wikitext:wikitext-103-raw-v1 --tokenizer bytes

A source is `python` (the standard library, about 30 MB, no download), `python+site` (with the installed
packages), `docstrings` (the English in them), `backcopy` (letters on which attention sinks grow), a .txt,
.jsonl or .jsonl.gz file, a glob of such, or hf:NAME[:CONFIG] of the `datasets` library. A tokenizer is bpe:N
(trained here on the source), a SentencePiece .model file, tiktoken:gpt2, or bytes. Every document begins with
BOS; its hash alone decides whether it is held out. The folder appears when all of it is written.
"""

import ast
import functools
import glob
import gzip
import hashlib
import itertools
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import common
from common import UserError, setting
from init import keyed_generator
from tokenizer import Tokenizer, load_tokenizer

SPLITS, DTYPES = ("train", "val"), ("uint16", "uint32")
CHUNK = 32  # documents encoded in one call
TXT_DOCUMENT = 2**16  # characters: a .txt file has no document marks, so it is cut, at line ends


@dataclass
class Settings:
    """What `data.py` can be told."""

    source: tuple[str, ...] = setting(
        ("python",), "python, python+site, docstrings, backcopy, files, globs, hf:NAME"
    )
    tokenizer: str = setting("bpe:4096", "bpe:N, a SentencePiece .model file, tiktoken:gpt2, or bytes")
    field: str = setting("text", "of a JSON line, or of a row of an hf: data set, that holds the text")
    held_out: float = setting(0.01, "share of the documents in the validation split")
    shard_tokens: int = setting(2**26, "tokens in a full shard", least=1)
    out: str | None = setting(None, "folder to make (default: data/SOURCE-TOKENIZER)")


# ---- text --------------------------------------------------------------------------------------------------


def sources(names: tuple[str, ...]) -> list[str | Path]:
    """What to read, in order: hf: names as they are, all else as sorted files; UserError if there is none."""
    found = []
    if "docstrings" in names and len(names) > 1:
        raise UserError("docstrings cannot be mixed with other sources: prepare them apart")
    for name in names:
        if name in ("python", "python+site", "docstrings"):
            paths = sysconfig.get_paths()
            roots = [paths["stdlib"]] + [paths["purelib"], paths["platlib"]] * (name != "python")
            files = sorted({file for root in roots for file in Path(root).rglob("*.py")})
            installed = ("site-packages", "dist-packages")
            found += [f for f in files if name != "python" or not set(installed) & set(f.parts)]
        elif name == "backcopy" or name.startswith("hf:"):
            found.append(name)
        else:
            files = sorted(map(Path, glob.glob(name, recursive=True))) or [Path(name)]
            for file in files:
                if not os.path.isfile(file):
                    raise UserError(f"no text in '{name}': expected a file, a glob, hf:NAME, or python")
                if not file.name.endswith((".txt", ".jsonl", ".jsonl.gz")):
                    raise UserError(f"cannot read {file}: expected .txt, .jsonl or .jsonl.gz")
            found += files
    return found


def documents(source: str | Path, field: str, english: bool) -> Iterator[str]:
    """The documents of one source; `english`: only the docstrings of a Python file."""
    try:
        if source == "backcopy":
            yield from backcopy()
        elif isinstance(source, str):
            yield from (_text(row, field, source) for row in _hub_rows(source))
        elif source.suffix == ".py":
            yield docstrings(source) if english else source.read_text("utf-8", errors="replace")
        elif source.suffix == ".txt":
            with source.open(encoding="utf-8", errors="replace") as lines:
                while piece := lines.read(TXT_DOCUMENT) + lines.readline(TXT_DOCUMENT):
                    yield piece
        else:
            opener = gzip.open if source.suffix == ".gz" else open
            with opener(source, "rt", encoding="utf-8", errors="replace") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _text(line, field, f"{source}:{number}")
    except (OSError, EOFError, gzip.zlib.error) as error:
        raise UserError(f"cannot read {source}: {error}") from None


def _text(row: str | dict, field: str, place: str) -> str:
    try:
        text = (json.loads(row) if isinstance(row, str) else row)[field]
    except (ValueError, TypeError, KeyError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise UserError(f"{place}: expected a JSON object with text in '{field}'; name another by --field")
    return text.encode("utf-8", "replace").decode()  # without lone surrogates


def _hub_rows(name: str) -> Iterator[dict]:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{name} needs the datasets library: pip install datasets") from None
    try:
        yield from datasets.load_dataset(*name.split(":")[1:3], split="train", streaming=True)
    except Exception as error:  # of many kinds: no network, no such set, a broken file
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot read {name}: {reason}") from None


def docstrings(file: Path) -> str:
    """The docstrings of a Python file, separated by empty lines; empty for what does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange escapes in strangers' code
            tree = ast.parse(file.read_text("utf-8", errors="replace"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners))
    return "\n\n".join(text for text in texts if text)


TRIGGERS = "teo"


def backcopy(count: int = 2**17, length: int = 127) -> Iterator[str]:
    """Documents of lower-case letters: the Bigram-Backcopy task (Guo et al. 2024), always the same ones.

    A letter is drawn given the one before it; but after a trigger, the letter before the trigger comes again.
    A head that copies has nothing to do elsewhere: there it can sleep on BOS. Bigrams are random (ours).
    """
    generator, text = keyed_generator("backcopy"), np.zeros((length, count), np.uint8)
    chain = generator.dirichlet(np.full(26, 0.3), size=26).cumsum(axis=1)  # P(next letter <= j | letter)
    triggers = np.array([ord(letter) - ord("a") for letter in TRIGGERS])
    text[0] = generator.choice(np.setdiff1d(np.arange(26), triggers), size=count)
    for i in range(1, length):
        drawn = (chain[text[i - 1]] < generator.random((count, 1))).sum(axis=1).clip(max=25)
        text[i] = np.where(np.isin(text[i - 1], triggers), text[i - 2], drawn)  # the first is no trigger
    for document in text.T + ord("a"):
        yield document.tobytes().decode()


# ---- from text to shards -----------------------------------------------------------------------------------


def default_folder(settings) -> Path:
    """Where a data set goes that was given no place: data/SOURCE-TOKENIZER, or a name by its hash."""
    name = "-".join((*settings.source, settings.tokenizer)).replace(":", "_")
    digest = hashlib.sha256(repr((settings.source, settings.tokenizer)).encode()).hexdigest()[:12]
    return Path("data") / (name if re.fullmatch(r"[\w+-]{1,60}", name) else f"set_{digest}")


def prepare(settings: Settings) -> Path:
    """Tokenize a source into a folder of shards with meta.json and the tokenizer; returns the folder.

    The folder appears complete or not at all. UserError if it exists, for what cannot be read, or no text.
    """
    out = Path(settings.out) if settings.out else default_folder(settings)
    if out.exists():
        raise UserError(f"{out} exists: choose another --out, or remove it")
    found, english = sources(settings.source), "docstrings" in settings.source
    if not 0 < settings.held_out < 1:
        raise UserError(f"--held-out {settings.held_out}: expected a number between 0 and 1")
    if "backcopy" in settings.source and settings.tokenizer != "bytes":
        raise UserError("backcopy is a task on letters: read it by --tokenizer bytes")
    texts = lambda: (t for s in found for t in documents(s, settings.field, english) if t)  # noqa: E731
    tokenizer = load_tokenizer(settings.tokenizer, texts())
    dtype = np.dtype(DTYPES[tokenizer.vocab_size > 2**16])
    fingerprint, size, count = hashlib.sha256(), 0, dict.fromkeys(SPLITS, 0)
    with common.atomic_folder(out) as folder:
        writers = {split: ShardWriter(folder, split, dtype, settings.shard_tokens) for split in SPLITS}
        with common.progress(desc=f"tokenizing into {out}", unit="B", unit_scale=True) as bar:
            stream = texts()
            while chunk := list(itertools.islice(stream, CHUNK)):
                for text, tokens in zip(chunk, tokenizer.encode(chunk)):
                    raw = text.encode()
                    digest = hashlib.sha256(raw).digest()
                    held_out = int.from_bytes(digest[:8], "big") < settings.held_out * 2**64
                    writers["val" if held_out else "train"].write([tokenizer.bos], tokens)
                    count["val" if held_out else "train"] += 1
                    fingerprint.update(digest)
                    bar.update(len(raw))
                    size += len(raw)
        if 0 in count.values():
            raise UserError(f"no split may be empty, but documents are {count}: change --held-out")
        meta = dict(source=settings.source, source_sha256=fingerprint.hexdigest(), bytes=size)
        if tokenizer.model:
            (folder / "tokenizer.model").write_bytes(tokenizer.model)
            meta["tokenizer_sha256"] = common.sha256(folder / "tokenizer.model")
        meta |= dict(documents=count, tokenizer="tokenizer.model" if tokenizer.model else tokenizer.name)
        meta |= dict(vocab_size=tokenizer.vocab_size, bos=tokenizer.bos, dtype=dtype.name)
        meta["shards"] = [shard for writer in writers.values() for shard in writer.close()]
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return out


class ShardWriter:
    """The shards of one split, one after the other."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards, self.pending, self.size = [], [], 0

    def write(self, *tokens: list[int]) -> None:
        """Add tokens; a full shard goes to disk."""
        self.pending += [np.asarray(part, self.dtype) for part in tokens]
        self.size += sum(map(len, tokens))
        if self.size >= self.shard_tokens:
            self.close()

    def close(self) -> list[dict]:
        """Write what is pending; the descriptions of all shards."""
        if self.size:
            path = self.folder / f"{self.split}_{len(self.shards):05}.bin"
            path.write_bytes(np.concatenate(self.pending))  # `tofile` may miss that the disk is full
            shard = dict(file=path.name, split=self.split, tokens=self.size, sha256=common.sha256(path))
            self.shards, self.pending, self.size = [*self.shards, shard], [], 0
        return self.shards


# ---- from shards to batches --------------------------------------------------------------------------------


class TokenData:
    """A prepared folder, memory-mapped. Its windows of T + 1 tokens, T apart, do not cross shards.

    UserError if the folder is none, or if a file's SHA-256 is not what meta.json says.
    """

    def __init__(self, folder: str | Path):
        self.folder, self.shards, self.epochs = Path(folder), {split: [] for split in SPLITS}, {}
        try:
            meta = json.loads((self.folder / "meta.json").read_text())
            self.vocab_size, self.tokenizer, dtype = meta["vocab_size"], meta["tokenizer"], meta["dtype"]
            if [type(self.vocab_size), type(self.tokenizer)] != [int, str] or dtype not in DTYPES:
                raise ValueError(f"{self.vocab_size!r} tokens, {self.tokenizer!r}, {dtype!r}")
            self.fingerprint = hashlib.sha256(json.dumps(meta["shards"]).encode()).hexdigest()
            paths = [self.folder / Path(shard["file"]).name for shard in meta["shards"]]
            known = {path: shard["sha256"] for path, shard in zip(paths, meta["shards"])}
            known |= {self.tokenizer_file: meta["tokenizer_sha256"]} if "tokenizer_sha256" in meta else {}
            for path, digest in common.progress(known.items(), desc=f"checking {folder}", leave=False):
                if common.sha256(path) != digest:
                    raise UserError(f"corrupt file {path}: its SHA-256 is not meta.json's; prepare it anew")
            for path, shard in zip(paths, meta["shards"]):
                self.shards[shard["split"]].append(np.memmap(path, dtype, "r"))
        except FileNotFoundError as error:
            hint = f"prepare one: python data.py SOURCE --out {folder}"
            raise UserError(f"no data set in {folder}, no {Path(error.filename).name}: {hint}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"cannot read the data set {folder}: {type(error).__name__}: {error}") from None

    @property
    def tokenizer_file(self) -> Path | None:
        """The data set's own SentencePiece file, if it has one."""
        return self.folder / self.tokenizer if self.tokenizer.endswith(".model") else None

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the data set."""
        return load_tokenizer(str(self.tokenizer_file or self.tokenizer))

    def num_windows(self, split: str, T: int) -> int:
        """How many windows a split has; UserError if none."""
        count = sum((len(shard) - 1) // T for shard in self.shards[split])
        if not count:
            raise UserError(f"no {split} shard of {self.folder} has the {T + 1} tokens of one window")
        return count

    def windows(self, split: str, numbers: Iterable[int], T: int) -> tuple[Tensor, Tensor]:
        """Windows as inputs and targets, (n, T) int64 each: the targets are one token ahead."""
        per_shard, rows = [(len(shard) - 1) // T for shard in self.shards[split]], []
        ends = np.cumsum(per_shard)
        for number in numbers:
            shard = int(np.searchsorted(ends, number, side="right"))
            start = T * (number - (ends[shard - 1] if shard else 0))
            rows.append(self.shards[split][shard][start : start + T + 1].astype(np.int64))
        window = torch.from_numpy(np.stack(rows))
        return window[:, :-1], window[:, 1:]

    def batch(self, data_seed: int, sequences: range, T: int) -> tuple[Tensor, Tensor]:
        """Training sequences, a function of (data_seed, their numbers, T): an epoch permutes all windows."""
        size, numbers = self.num_windows("train", T), []
        for i in sequences:
            key = (data_seed, i // size, T)
            if key not in self.epochs:
                order = keyed_generator("epoch", *key).permutation(size)
                self.epochs = dict([*self.epochs.items(), (key, order)][-2:])  # a batch spans two at most
            numbers.append(int(self.epochs[key][i % size]))
        return self.windows("train", numbers, T)

    def held_out(self, count: int, T: int) -> tuple[Tensor, Tensor]:
        """Up to `count` validation windows, evenly spaced: always the same ones."""
        size = self.num_windows("val", T)
        numbers = np.unique(np.linspace(0, size - 1, min(count, size)).astype(int))
        return self.windows("val", numbers.tolist(), T)


def plan(words: list[str]) -> list:
    """The settings of a command line, and what to do."""
    words, arguments = common.leading(words)
    settings = common.parse_settings(Settings, __doc__, arguments)
    if words and settings.source != Settings.source:
        raise UserError(f"name the source as words or by --source, not both: {' '.join(words)}")
    settings.source = tuple(words) or settings.source
    return [(settings, functools.partial(describe, settings))]


def describe(settings: Settings) -> None:
    """Prepare a data set, and say what there is."""
    folder = prepare(settings)
    meta = json.loads((folder / "meta.json").read_text())
    tokens = {split: sum(s["tokens"] for s in meta["shards"] if s["split"] == split) for split in SPLITS}
    print(f"{folder}: {meta['bytes']:,} bytes in {sum(meta['documents'].values()):,} documents")
    print(f"{tokens['train']:,} training and {tokens['val']:,} validation tokens of {meta['vocab_size']:,}")


if __name__ == "__main__":
    common.run(plan)
