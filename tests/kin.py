"""A base, its children and a stranger, changes of their tensors, and what is said of two of them."""

import functools
import json

import safetensors.torch
import torch

from lineage.compare import CompareSettings, Model, compare_models
from model import ModelConfig
from reproduce.disguise import as_source, disguised, newborn_source, weights_of
from reproduce.robustness import noised
from sources import checkpoint
from weights.contents import Weights
from weights.gguf_config import HEAD, TOKEN_TABLE

CONFIG = ModelConfig(300, 64, 3, 4, 64, 96, num_kv_heads=2)
BASE = noised(newborn_source(CONFIG, 1), 0)  # in memory
NOISED = noised(BASE, 0.5)
CHILD = disguised(BASE)
STRANGER = noised(newborn_source(CONFIG, 2), 0)
RAW = {"model_type": "foreign", "hidden_size": 64}
TABLES = (TOKEN_TABLE, HEAD)
LAYER = "model.layers."


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8


def with_noise(weights: dict, size=0.3) -> dict:
    others = dict(weights)
    for name, weight in weights.items():
        if weight.ndim > 1:
            others[name] = weight + 8 * size * weight.std() * drawn(len(name), *weight.shape)
    return others


def changed(weights: dict, change) -> dict:
    """Tensors by `change`: a function of them, or parts of names by what they become; "" is left out."""
    if callable(change):
        return change(weights)
    others = {}
    for name, weight in weights.items():
        for old, new in change.items():
            name = name.replace(old, new) if new or old not in name else ""
        others[name] = weight
    others.pop("", None)
    return others


@functools.cache
def born(config: ModelConfig, who: str) -> dict:
    """Tensors of a base, of its noised child, of a "turned" one (and noised and disguised), or a stranger."""
    source = noised(newborn_source(config, 2 if who == "stranger" else 1), 0)
    if who == "noised":
        source = noised(source, 0.5)
    elif who == "turned":
        source = noised(disguised(source), 0.3)
    return weights_of(source)


def folder_with(place, weights: dict, raw=RAW) -> Weights:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(raw))
    weights = {name: weight.contiguous().clone() for name, weight in weights.items()}
    safetensors.torch.save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return checkpoint.find_model(str(place)).weights


def row_by_both(base, suspect) -> dict:
    """The row of two checkpoints, or of their tensors; neurons do not change the verdict of single models."""
    sources = [as_source(each, CONFIG) if isinstance(each, dict) else each for each in (base, suspect)]
    models = [Model(name, source) for name, source in zip("AB", sources)]
    glance, details = compare_models(*models, CompareSettings())
    json.dumps([glance, details], allow_nan=False)
    if glance["units"] is not None:
        return glance
    row, details = compare_models(*models, CompareSettings(neurons=True))
    json.dumps([row, details], allow_nan=False)
    has_several = any(sum(stack.may_be_model for stack in model.stacks) > 1 for model in models)
    assert has_several or row["verdict"] == glance["verdict"], (row["sentence"], glance["sentence"])
    return row


def judged(base, suspect) -> tuple[str, str]:
    row = row_by_both(base, suspect)
    return row["verdict"], row["sentence"]
