"""What a model reads while it is measured: a text, or random tokens."""

import functools
import math
from dataclasses import dataclass, replace
from os.path import isdir, isfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lib.random import keyed_generator, random_tokens
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import RunSettings, UserError, at_least
from sources.checkpoint import check_lengths, shortest_context, specs_of
from sources.data import TokenData, pieces, places_of, read
from sources.tokenizers import load_tokenizer


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
        self.specs = specs_of(settings.model, settings.seed)
        check_lengths(np.ravel(settings.sequence_length or ()), shortest_context(self.specs))
        super().__init__(name, paper, settings)

    def models(self):
        """Yield, for each model, columns that name it and its text, its Spec, and the model."""
        for spec in progress(self.specs, desc=self.name, unit=" models"):
            named = {"checkpoint": spec.label, "text": text_of(self.settings, spec)}
            yield named, spec, spec.load(self.device, self.dtype)

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
    return "docstrings" if settings.tokenizer or spec.tokenizer_file else "random tokens"


def bos_of(settings: TextSettings, spec):
    """The BOS in front of what a spec's model reads, or None; random tokens have none."""
    text = text_of(settings, spec)
    file = settings.tokenizer or spec.tokenizer_file
    if settings.bos == "never" or (file is None and not isdir(text)):
        return None
    tokenizer = load_tokenizer(str(file)) if file else TokenData(text).tokenizer
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
    text = text_of(settings, spec)
    if bos is not None and not isdir(text):
        tokens = read_tokens(replace(settings, bos="never"), spec, T - 1)
        return torch.cat((torch.full_like(tokens[:, :1], bos), tokens), dim=1)
    count = settings.num_sequences
    tokenizer = settings.tokenizer or spec.tokenizer_file
    if text == "random tokens":
        tokens = random_tokens(settings.input_seed, range(count), T, spec.config.vocab_size)
    elif isdir(text):
        data = TokenData(text, bos_first=bos is not None)  # in place of the first token, as in training
        check_tokenizer(spec, data)
        tokens, _ = data.held_out(count, T)
    elif tokenizer is None:
        raise UserError(f"{spec.label} has no known tokenizer: name one with --tokenizer")
    else:
        encoded = encode(text, str(tokenizer))
        windows = encoded[: len(encoded) // T * T].view(-1, T)  # (all, T)
        generator = keyed_generator("text", settings.input_seed, T)
        tokens = windows[generator.choice(len(windows), size=min(count, len(windows)), replace=False)]
    if len(tokens) < count:
        found = f"{text} has {len(tokens)} sequences of {T} tokens, not --num-sequences {count}"
        raise UserError(f"{found}: use a longer text or a shorter --sequence-length")
    if tokens.max() >= spec.config.vocab_size:
        said = f"the text has token {tokens.max()}, but {spec.label} has only {spec.config.vocab_size}"
        raise UserError(f"{said}: is this its --tokenizer?")
    return tokens.to(settings.device)


@functools.lru_cache
def encode(text, tokenizer):
    """The tokens, (n,) int64, of a text file, or of the beginning of a source of sources.data."""
    if isfile(text):
        documents, most = read(Path(text)), math.inf
    else:
        documents, most = pieces(places_of((text,))), 2**19  # characters
    content = ""
    for piece, begins in documents:
        if begins and content:
            content += "\n\n"
        if len(content) >= most:
            break
        content += piece
    (tokens,) = load_tokenizer(tokenizer).encode([content])
    return torch.tensor(tokens, dtype=torch.int64)


def check_tokenizer(spec, data) -> None:
    """UserError if a checkpoint has a tokenizer, and the data set was made with another."""
    path = spec.tokenizer_file
    if path is not None and load_tokenizer(str(path)).content != data.tokenizer.content:
        raise UserError(f"{data.folder} was made with another tokenizer than {path}")
