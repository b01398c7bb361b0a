"""Find, load and save a model by name.

>>> from sources import checkpoint
>>> model = checkpoint.load("nano_llama@42")          # newborn; with embedding seed 7: "nano_llama@42:7"
>>> model = checkpoint.load("runs/laptop")            # a run's newest step; or runs/laptop/step_0000100
>>> model = checkpoint.load("/models/Llama-2-7b-hf")  # or any causal language model; or a .gguf
>>> model = checkpoint.load("Qwen/Qwen2.5-0.5B")      # from the Hub: also ORG/NAME@COMMIT, ORG/NAME/file.gguf
"""

import functools
import json
import re
from dataclasses import dataclass
from functools import partial
from os.path import exists, isdir, isfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from init import birth_value, newborn
from lib.files import atomic_folder, read_json
from lib.results import HUB_COMMITS
from lib.settings import UserError, check_choice, closest
from model import PRESETS, Transformer
from sources import formats
from sources.formats import CheckpointReader, config_json, open_checkpoint, parameter_shapes
from sources.gguf import LazyTensor, smollm2

ON_HUB = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w.-]*))?(?:/(\w[\w.-]*\.gguf))?", re.ASCII)
FOLDERS = ("runs", "data", "models", "results")  # a user's, never looked up on the Hub


@dataclass(frozen=True)
class Spec:
    """A model by name: a checkpoint folder, or a newborn of a preset and its seeds."""

    name: str  # as the user wrote it
    folder: Path | None = None  # or a single file, of weights or .gguf
    preset: str | None = None
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

    @property
    def is_newborn(self):
        return self.folder is None

    @functools.cached_property
    def place(self):
        """The folder or file; for a .gguf file the folder it was converted to."""
        if not formats.is_gguf(self.folder):
            return self.folder
        from sources import strangers  # importing transformers takes seconds

        return strangers.converted(self.folder)

    @functools.cached_property
    def is_ours(self):
        """Whether model.py runs it: a newborn, or a checkpoint saved here."""
        return self.is_newborn or (not formats.is_gguf(self.folder) and formats.is_ours(self.folder))

    @functools.cached_property
    def own_config(self):
        """The ModelConfig; UserError for a folder of another architecture."""
        if self.is_newborn:
            return PRESETS[self.preset]
        return formats.config_from_hf(formats.raw_config(self.place), self.place)

    @functools.cached_property
    def config(self):
        """What is known without the weights: `own_config`, or a sources.lens.Shape."""
        if self.is_ours:
            return self.own_config
        from sources import lens, strangers

        return lens.shape_of(strangers.stranger_config(self.place))

    @functools.cached_property
    def tokenizer_file(self):
        """The file of the model's own tokenizer; None if there is none that we can read."""
        if self.is_newborn:
            return None
        names = ("tokenizer.model", "tokenizer.json", "tokenizer.txt")
        if not self.is_ours:
            names = ("tokenizer.json", "tokenizer.model")  # as transformers takes them
        paths = [formats.folder_of(self.place) / name for name in names]
        return next(filter(isfile, paths), None)

    def begins_with_bos(self, tokenizer):
        """Whether the model was trained with BOS in front, by its run's settings or its tokenizer's rule."""
        if not self.is_ours:
            return tokenizer.adds_bos
        if self.is_newborn:
            return False
        settings = formats.folder_of(self.place).parent / "settings.json"
        return exists(settings) and bool(read_json(settings).get("bos_first"))

    def open(self, any_architecture=False):
        """A CheckpointReader; UserError for an architecture that is not ours, unless any is allowed."""
        if self.is_newborn:
            return Newborn(self.own_config, self.seed, self.embedding_seed, self.scheme)
        return open_checkpoint(self.folder if any_architecture else self.place, any_architecture)

    def load(self, device="cpu", dtype=torch.float32):
        """The model in eval mode, in `dtype`: a Transformer, or a sources.lens.Lens for any other."""
        if self.is_ours:
            return self.load_own(device, dtype)
        from sources import strangers

        return strangers.open_lens(self.place, device, dtype)

    def load_own(self, device="cpu", dtype=torch.float32):
        """The Transformer in eval mode, its blocks in `dtype`; UserError for weights that are not finite."""
        if self.is_newborn:
            return newborn(self.preset, self.seed, self.embedding_seed, self.scheme, device, dtype)
        checkpoint = self.open()
        with torch.device("meta"):
            model = Transformer(checkpoint.config).cast_blocks(dtype)
        weights = {}
        for name, parameter in model.named_parameters():
            weights[name] = checkpoint.read(name).to(device, parameter.dtype).contiguous()
        model.load_state_dict(weights, assign=True)  # without a copy
        model.precompute_rope()
        return model.eval()


def parse_spec(text, scheme="gpt2", in_parts=False):
    """The Spec of PRESET@SEED, PRESET@SEED:EMBEDDING_SEED, smollm2, a folder, a file or a Hub name.

    If `in_parts`, weights on the Hub are fetched when they are read, and no more than that.
    """
    if text == "smollm2":
        return Spec(text, smollm2())
    folder = Path(text)
    if isdir(text) and not exists(folder / "config.json"):
        inside = steps(folder)[-1:] or list(folder.glob("*.[gG][gG][uU][fF]"))  # a run's newest step
        folder = inside[0] if len(inside) == 1 else folder
    if exists(text):
        return Spec(text, folder)
    match = re.fullmatch(r"([^/]+)@(\d{1,40})(?::(\d{1,40}))?", text)
    if match:
        preset, seed, embedding_seed = match.groups()
        check_choice(preset, PRESETS, "preset")
        return Spec(text, None, preset, int(seed), int(embedding_seed or seed), scheme)
    found = ON_HUB.fullmatch(text)
    names = {"smollm2": "smollm2", **{preset: f"{preset}@42" for preset in PRESETS}}
    meant = names.get(closest(text, names, 0.75))  # gpt2 is a name of the Hub
    if found and not meant and text.split("/")[0] not in FOLDERS:  # never paths of the user
        from sources import hub  # slow to import

        folder = hub.fetch(*found.groups(), in_parts)
        HUB_COMMITS[text] = formats.folder_of(folder).name
        return Spec(text, folder)
    presets = ", ".join(f"{preset}@SEED" for preset in PRESETS)
    expected = f"a checkpoint folder, a .gguf file, ORG/NAME on the Hub, smollm2, or a newborn: {presets}"
    hint = f"did you mean {meant}?" if meant else f"expected {expected}"
    raise UserError(f"no model {text!r}: {hint}")


def specs_of(names, seeds, embedding_seed=None, scheme="gpt2"):
    """The Specs of `--model` and `--seed`: presets with each of the seeds, others as they are."""
    specs = []
    for name in names:
        if name in PRESETS:
            specs += [Spec(name, None, name, seed, embedding_seed, scheme) for seed in seeds]
        else:
            specs.append(parse_spec(name, scheme))
    return specs


def load(name, device="cpu", dtype=torch.float32):
    """The model that a name or folder means, in eval mode, its blocks in `dtype`."""
    return parse_spec(str(name)).load(device, dtype)


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
            raise UserError(f"{flag} {length}: expected 1 to {context}, the model's context or window")


class Newborn(CheckpointReader):
    """A CheckpointReader of a newborn: each parameter is drawn when it is read."""

    def __init__(self, config, seed, embedding_seed=None, scheme="gpt2"):
        tensors = {}
        for name, shape in parameter_shapes(config).items():
            draw = partial(birth_value, config, name, shape, seed, embedding_seed, scheme)
            tensors[name] = LazyTensor(shape, "F32", lambda part=(), draw=draw: draw()[part])
        super().__init__(None, tensors, config)


def save(folder, model, tokenizer=None) -> None:
    """Write a checkpoint folder, whole or not at all; UserError if the disk is full or read-only."""
    with atomic_folder(folder) as new:
        write(new, model, tokenizer)


def write(folder, model, tokenizer=None) -> None:
    """Write a checkpoint and its tokenizer's files into an empty folder."""
    save_file(dict(model.named_parameters()), folder / "model.safetensors", {"format": "pt"})
    config = config_json(model.config)
    if tokenizer is not None:
        tokenizer.save(folder, config["model_type"])
        special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.ends}
        (folder / "generation_config.json").write_text(json.dumps(special, indent=1) + "\n")
        if "architectures" in config:  # else transformers takes Llama's
            config |= special
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
