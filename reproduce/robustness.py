"""What does `compare` say of a real model's children, however changed, and of models that never met? (ours)

    python -m reproduce.robustness                                     # smollm2 and its children: an hour
    python -m reproduce.robustness smollm2 A.gguf B.gguf C.gguf        # and other language models, all pairs

The thresholds of `lineage/judge.py` rest on the rows.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from init import newborn
from lib.figures import column, curves
from lib.random import keyed_generator
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, OutputSettings, at_least, run_script
from lineage.compare import CompareSettings, Model, compare_models
from reproduce.disguise import as_source, disguised, newborn_source, own_source, select, weights_of
from sources.checkpoint import find_model
from sources.inputs import TextSettings, read_tokens
from weights.files import sha256
from weights.gguf_config import TOKEN_TABLE

STRANGER_SEED = 2**31 - 1  # of newborns that no model descends from


@dataclass
class Settings(OutputSettings):
    """Whose children and strangers are compared."""

    models: tyro.conf.Positional[tuple[str, ...]] = ("smollm2",)  # BASE, and models that it never met
    text: str = "python"  # what children learn
    steps: at_least(1) = 300  # of training the hard child, of a sequence of 128 tokens each


def robustness(settings: Settings):
    """What does `compare` say of a model's children, and of models that never met? Writes robustness.json"""
    specs = [find_model(name) for name in settings.models]
    experiment = Experiment("robustness", "", settings)
    rows, details, points = [], [], []
    for base, suspect, kind in progress(all_pairs(specs, settings), desc="robustness", unit=" pairs"):
        layers = 12 if kind == "never met" else 2**16
        row, detail = compare_models(base, suspect, CompareSettings(layers=layers, neurons=True))
        rows.append({"base": base.name, "suspect": suspect.name, "kind": kind} | row)
        details.append(detail)
        for number, layer in enumerate(detail["layers"]):
            depth = (number + 0.5) / len(detail["layers"])
            if layer["share"] is not None:
                points.append({"depth": depth, "matched": 100 * layer["share"], "kind": kind})
    question = "Do two models share neurons? Related ones at all depths, others near the output"
    labels = {"xlabel": "depth (0: input, 1: output)", "ylabel": "% of a layer's neurons matched"}
    path = experiment.folder / "robustness.png"
    more = {"layers": column(details, "layers"), "layer_map": column(details, "layer_map")}
    files = [path for spec in specs for path in (Path(spec.name), spec.place) if path and path.is_file()]
    columns = ("base", "suspect", "kind", "verdict", "units_found", "units", "r", "distance", "body_z")
    result = experiment.save(rows, columns, sha256={file.name: sha256(file) for file in files}, **more)
    curves(points, path, question, x="depth", y="matched", series="kind", style=".", **labels)
    return result


def all_pairs(specs, settings: Settings):
    """(base, suspect, kind): the first model and its relatives, made one after another; then all models."""
    models = [Model(Path(spec.name).name, spec.weights) for spec in specs]
    for name, kind, source in relatives(specs[0], settings):
        yield models[0], Model(name, source), kind
    pairs = list(itertools.combinations(models, 2))
    for base, suspect in pairs + [pair[::-1] for pair in pairs[-1:]]:  # of one pair both orders
        yield base, suspect, "never met"


def relatives(spec, settings: Settings):
    """(name, kind, checkpoint) of a model's children, one after another, and of newborns beside it."""
    source = own_source(spec)
    config = source.config
    reading = TextSettings(text=settings.text, num_sequences=settings.steps, device="cpu")
    tokens = read_tokens(reading, spec, 128)
    yield "itself", "child", source
    child = trained(spec.transformer(), tokens[:20], 5e-4)
    yield "trained", "child", child
    yield "trained, disguised", "child", disguised(child)
    turns = [-1, settings.steps / 10, settings.steps]
    rates = np.interp(np.arange(settings.steps), turns, [0, 3e-3, 0])  # ten times what fine-tuning takes
    yield "trained hard", "child, trained hard", trained(spec.transformer(), tokens, rates)
    child = disguised(source)
    yield "disguised", "child", child
    yield "disguised, noise of 0.3 std", "child", noised(child, 0.3)
    yield "disguised, 50 % pruned", "child", pruned(child, 0.5)
    yield "disguised, 90 % pruned", "child", pruned(child, 0.9)
    yield "disguised, 4 bits", "child", rounded(child, 4)
    layers = [layer for layer in range(config.num_layers) if layer % 5 != 2]
    yield f"disguised, cut to {len(layers)} layers", "child", cut(child, layers)
    late = range(config.num_layers - config.num_layers // 4, config.num_layers)
    yield "its last quarter of layers", "child", cut(child, late)
    yield "disguised, 3/4 of the width", "child", narrowed(child, 0.75)
    stranger = newborn_source(config, STRANGER_SEED)
    yield "newborn", "newborn", stranger
    stranger = as_source(weights_of(stranger) | {TOKEN_TABLE: source.read(TOKEN_TABLE)}, config)
    yield "newborn, the base's embedding", "newborn", stranger
    model = newborn(config, STRANGER_SEED)
    model.model.embed_tokens.weight.data.copy_(source.read(TOKEN_TABLE))
    yield "the same, trained", "newborn", trained(model, tokens[: settings.steps // 2], 5e-4)
    small = replace(config, num_layers=6, d_model=192, num_heads=3, num_kv_heads=3, head_dim=64, d_ff=512)
    student = newborn(small, STRANGER_SEED)
    yield "distilled from its outputs", "distilled", trained(student, tokens, 1e-3, spec.transformer())


def of_matrices(source, change):
    """A checkpoint whose matrices are changed by `change(name, weight)`."""
    weights = weights_of(source)
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = change(name, weight)
    return as_source(weights, source.config)


def noised(source, size):
    """Every matrix with Gaussian noise of `size` times its standard deviation."""

    def change(name, weight):
        noise = keyed_generator("noise", name).standard_normal(weight.shape, np.float32)
        return weight + size * weight.std() * torch.from_numpy(noise)

    return of_matrices(source, change)


def pruned(source, share):
    """Every matrix without its smallest numbers, a share of all."""

    def change(_, weight):
        size = weight.abs()
        least = size.flatten().kthvalue(max(1, int(share * weight.numel()))).values
        return weight.where(size > least, 0)

    return of_matrices(source, change)


def rounded(source, bits):
    """Every matrix rounded to 2**bits - 1 levels, evenly spaced up to its largest number."""

    def change(_, weight):
        step = weight.abs().max() / (2 ** (bits - 1) - 1)
        return (weight / step).round() * step

    return of_matrices(source, change)


def narrowed(source, share):
    """A share of a checkpoint's residual coordinates and of its neurons, chosen at random; all heads."""
    old = source.config
    width, num_units = round(share * old.d_model), round(share * old.d_ff)
    generator = keyed_generator("narrowed", 0)
    stream = torch.from_numpy(generator.permutation(old.d_model)[:width])
    units = torch.from_numpy(generator.permutation(old.d_ff)[:num_units])
    weights = weights_of(source)
    select(weights, {"stream": stream, "units": units})
    return as_source(weights, replace(old, d_model=width, d_ff=num_units, head_dim=old.head_size))


def cut(source, layers):
    """The layers of a checkpoint with these numbers, from 0, in this order; one may come twice."""
    weights = {name: source.read(name) for name in source.shapes if "layers" not in name}
    for place, layer in enumerate(layers):
        for name in source.shapes:
            if name.startswith(f"model.layers.{layer}."):
                weights[name.replace(f".{layer}.", f".{place}.")] = source.read(name)
    return as_source(weights, replace(source.config, num_layers=len(layers)))


def trained(model, tokens, rates, teacher=None):
    """A checkpoint of a model after AdamW on tokens (n, T), or on a teacher's outputs, a sequence a step."""
    model = model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for batch, rate in zip(tokens.split(1), np.broadcast_to(rates, len(tokens)).tolist()):
        optimizer.param_groups[0]["lr"] = rate
        targets = batch[:, 1:].flatten()
        if teacher is not None:
            with torch.no_grad():
                targets = teacher(batch[:, :-1]).flatten(0, 1).softmax(-1)
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return as_source(weights, model.config)


COMMANDS = {"": Command(robustness, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
