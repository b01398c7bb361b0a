"""What a model reads while it is measured: a text, or random tokens."""

import functools
import math
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lib.random import keyed_generator, random_tokens
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import RunSettings, UserError, at_least
from sources.checkpoint import check_lengths, find_models, load_tokenizer, shortest_context
from sources.data import TokenData, pieces, places_of, read

PART = 2**20  # characters of a text that are encoded at a time


@dataclass
class TextSettings(RunSettings):
    """Settings of a command whose models read a text."""

    model: tuple[str, ...] = ("smollm2",)  # names of the Hub, folders, files, presets, PRESET@SEED
    seed: tuple[int, ...] = (42,)  # seeds of presets' weights
    sequence_length: at_least(2) = 64  # tokens in a sequence (Gu et al.: 64)
    text: str | None = None  # text file, source or data set (sources.data); None: docstrings, or random
    tokenizer: str | None = None  # tokenizer of --text, as in python -m sources.data; None: the model's own
    bos: Literal["auto", "always", "never"] = "auto"  # put BOS in front; auto: as the model was trained
    input_seed: int = 0  # seed of random tokens, or of the windows of a text
    num_sequences: at_least(2) = 100  # sequences (Gu et al.: 100)


class TextExperiment(Experiment):
    """An Experiment on models that read a text."""

    def __init__(self, name, paper, settings: TextSettings):
        """UserError if a model cannot read as many tokens."""
        self.specs = find_models(settings.model, settings.seed)
        check_lengths(np.ravel(settings.sequence_length or ()), shortest_context(self.specs))
        super().__init__(name, paper, settings)

    def models(self):
        """Yield, for each model, columns that name it and its text, its Checkpoint, and the model."""
        for spec in progress(self.specs, desc=self.name, unit=" models"):
            named = {"checkpoint": spec.label, "text": text_of(self.settings, spec)}
            yield named, spec, spec.model(self.device, self.dtype)

    def rows(self, measure):
        """What measure(settings, spec, model) returns for each model, with the columns that name it."""
        rows = []
        for named, spec, model in self.models():
            rows += [named | row for row in measure(self.settings, spec, model)]
        return rows


def text_of(settings: TextSettings, spec):
    """The name of what `read_tokens` reads for a spec."""
    if settings.text is not None:
        return settings.text
    return "docstrings" if settings.tokenizer or spec.tokenizer else "random tokens"


def tokenizer_of(settings: TextSettings, spec):
    """The Tokenizer of what a spec's model reads: --tokenizer, or the model's own, or None."""
    return tokenizer_by_name(settings.tokenizer) if settings.tokenizer else spec.tokenizer


@functools.lru_cache
def tokenizer_by_name(name):
    """The tokenizer of --tokenizer, loaded once."""
    return load_tokenizer(name)


def prefix_of(settings: TextSettings, spec):
    """The tokens in front of what a spec's model reads, a tuple; random tokens have none."""
    text = text_of(settings, spec)
    if settings.bos == "never" or text == "random tokens":
        return ()
    tokenizer = tokenizer_of(settings, spec)
    if tokenizer is None and isdir(text):
        tokenizer = TokenData(text).tokenizer
    if tokenizer is None:
        return ()
    if settings.bos == "auto":
        return spec.prefix(tokenizer)
    if tokenizer.bos is None:
        raise UserError(f"--bos {settings.bos}: the tokenizer of {spec.label} has no BOS")
    return tokenizer.prefix or (tokenizer.bos,)


def read_tokens(settings: TextSettings, spec, T):
    """What a spec's model reads, (n, T) int64 on the device, with its prefix if the settings ask for it.

    The prefix is among the T tokens. UserError if the text is too short, or its tokens are not the model's.
    """
    text = text_of(settings, spec)
    prefix = prefix_of(settings, spec)
    count = settings.num_sequences
    length = T - len(prefix)  # of the text
    if length < 1:
        raise UserError(f"--sequence-length {T}: {len(prefix)} tokens stand in front of each text")
    if text == "random tokens":
        tokens = random_tokens(settings.input_seed, range(count), T, spec.config.vocab_size)
    elif isdir(text):
        data = TokenData(text, bos_first=bool(prefix))  # in place of the first token, as in training
        check_tokenizer(spec, data)
        tokens, _ = data.held_out(count, T)
    else:
        tokens = windows_of(settings, spec, text, length)
        front = torch.tensor(prefix, dtype=tokens.dtype).expand(len(tokens), -1)
        tokens = torch.cat((front, tokens), dim=1)
    if len(tokens) < count:
        found = f"{text} has {len(tokens)} sequences of {length} tokens, not --num-sequences {count}"
        raise UserError(f"{found}: use a longer text or a shorter --sequence-length")
    if tokens.max() >= spec.config.vocab_size:
        found = f"the text has token {tokens.max()}, but {spec.label} has only {spec.config.vocab_size}"
        raise UserError(f"{found}: is this its --tokenizer?")
    return tokens.to(settings.device)


def windows_of(settings: TextSettings, spec, text, T):
    """Disjoint windows of a text, --num-sequences at most, drawn by the input seed: (n, T)."""
    tokenizer = tokenizer_of(settings, spec)
    if tokenizer is None:
        raise UserError(f"{spec.label} has no known tokenizer: name one with --tokenizer")
    encoded = encode(text, tokenizer)
    windows = encoded[: len(encoded) // T * T].view(-1, T)  # (all, T)
    generator = keyed_generator("text", settings.input_seed, T)
    size = min(settings.num_sequences, len(windows))
    return windows[generator.choice(len(windows), size=size, replace=False)]


@functools.lru_cache
def encode(text, tokenizer):
    """The tokens, (n,) int64, of a text file, or of the beginning of a source of sources.data."""
    if isfile(text):
        documents, most = read(Path(text)), math.inf
    else:
        documents, most = pieces(places_of((text,))), 2**19  # characters
    parts, some = [], []  # a long text is encoded in parts, or it would take a hundred times its size
    count = begun = 0  # characters so far, and where the part in hand begins
    for piece, begins in documents:
        if begins and count:
            piece = "\n\n" + piece
        if count >= most:
            break
        some.append(piece)
        count += len(piece)
        if count - begun >= PART:
            parts.append(encoded(some, tokenizer))
            some, begun = [], count
    parts.append(encoded(some, tokenizer))
    return torch.cat(parts)


def encoded(pieces, tokenizer):
    """The tokens, (n,) int64, of pieces of one text."""
    (tokens,) = tokenizer.encode(["".join(pieces)])
    return torch.tensor(tokens, dtype=torch.int64)


def check_tokenizer(spec, data) -> None:
    """UserError if a checkpoint has a tokenizer, and the data set was made with another."""
    if spec.tokenizer is not None and not spec.tokenizer.does_as(data.tokenizer):
        raise UserError(f"{data.folder} was made with another tokenizer than {spec.tokenizer_file}")
