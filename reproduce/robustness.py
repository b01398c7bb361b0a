"""What does `compare` say of a real model's children, however changed, and of models that never met? (ours)

    python -m reproduce.robustness                                     # smollm2 and its children: an hour
    python -m reproduce.robustness smollm2 A.gguf B.gguf C.gguf        # and other language models, all pairs

`lineage/disguise.py` changes the children. The thresholds of `lineage/verdict.py` rest on this table;
`python -m reproduce.errors` has how often newborns of other seeds are called related.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from init import newborn
from lib.checkpoint import Newborn, parse_spec
from lib.figures import BLUE, COLOURS, VERMILION, legend_below, new_figure, save_figure
from lib.files import sha256
from lib.inputs import TextSettings, read_tokens
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, OutputSettings, UserError, at_least, run_script
from lineage.disguise import as_source, cut, disguised, narrowed, noised, pruned, rounded, weights_of
from lineage.verdict import compare_pair, read_model
from seedprint import STRANGER_SEED

LAYERS = {"never met": 12}  # that are read, evenly spaced; of all others all
PEAK = 3e-3  # learning rate of the child that is trained hard: ten times what fine-tuning takes
COLUMNS = ("base", "suspect", "kind", "verdict", "units_found", "units", "r", "distance", "body_z")
KINDS = {  # and their colours
    "child": BLUE,
    "child, trained hard": COLOURS[5],
    "never met": VERMILION,
    "newborn": COLOURS[4],
    "distilled": COLOURS[2],
}
TABLE = "model.embed_tokens.weight"


@dataclass
class Settings(OutputSettings):
    """Options of `robustness`."""

    models: tyro.conf.Positional[tuple[str, ...]] = ("smollm2",)  # BASE, and models that it never met
    text: str = "python"  # what children learn; random tokens where BASE has no tokenizer
    steps: at_least(1) = 300  # of training the hard child, of a sequence of 128 tokens each


def robustness(settings: Settings):
    """What does `compare` say of a model's children, and of models that never met? Writes robustness.json"""
    if not settings.models:
        raise UserError("expected a model: a checkpoint folder, a .gguf file, or PRESET@SEED")
    specs = [parse_spec(name) for name in settings.models]
    experiment = Experiment("robustness", "", settings)
    models = [read_model(Path(spec.name).name, spec.open(any_architecture=True)) for spec in specs]
    rows, details = [], []

    def compare(base, suspect, kind):
        row, detail = compare_pair(base, suspect, layers=LAYERS.get(kind, 2**16))
        rows.append({"base": base.name, "suspect": suspect.name, "kind": kind} | row)
        details.append(detail)

    for name, kind, source in progress(relatives(specs[0], settings), desc="robustness", unit=" suspects"):
        compare(models[0], read_model(name, source), kind)
    pairs = list(itertools.combinations(models, 2))
    pairs += [pair[::-1] for pair in pairs[-1:]]  # of one pair both orders
    for base, suspect in progress(pairs, desc="robustness", unit=" pairs"):
        compare(base, suspect, "never met")
    draw_robustness(rows, details, experiment.folder / "robustness.png")
    files = {
        Path(spec.name).name: sha256(spec.folder) for spec in specs if spec.folder and spec.folder.is_file()
    }
    more = {key: [detail[key] for detail in details] for key in ("layers", "layer_map")}
    return experiment.save(rows, COLUMNS, sha256=files, **more)


def relatives(spec, settings: Settings):
    """(name, kind, checkpoint) of a model's children, one after another, and of newborns beside it."""
    source = spec.open()
    config = source.config
    text = settings.text if spec.tokenizer_file else None  # else random tokens
    reading = TextSettings(text=text, num_sequences=settings.steps, device="cpu")
    tokens = read_tokens(reading, spec, 128)
    yield "itself", "child", source
    child = trained(spec.load(), tokens[:20], constant(5e-4))
    yield "trained", "child", child
    yield "trained, disguised", "child", disguised(child)
    yield (
        "trained hard",
        "child, trained hard",
        trained(spec.load(), tokens, rising_and_falling(PEAK, settings.steps)),
    )
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
    stranger = Newborn(config, STRANGER_SEED)
    yield "newborn", "newborn", stranger
    stranger = as_source(weights_of(stranger) | {TABLE: source.read(TABLE)}, config)
    yield "newborn, the base's embedding", "newborn", stranger
    model = newborn(config, STRANGER_SEED)
    model.model.embed_tokens.weight.data.copy_(source.read(TABLE))
    yield "the same, trained", "newborn", trained(model, tokens[: settings.steps // 2], constant(5e-4))
    small = replace(config, num_layers=6, d_model=192, num_heads=3, num_kv_heads=3, head_dim=64, d_ff=512)
    student = newborn(small, STRANGER_SEED)
    yield "distilled from its outputs", "distilled", trained(student, tokens, constant(1e-3), spec.load())


def constant(learning_rate):
    """The same learning rate at each step."""
    return lambda step: learning_rate


def rising_and_falling(peak, steps):
    """A learning rate that rises for a tenth of the steps, and then falls to 0, linearly."""
    return lambda step: peak * min(10 * (step + 1) / steps, (steps - step) / (0.9 * steps))


def trained(model, tokens, learning_rate, teacher=None):
    """A checkpoint of a model after AdamW on tokens (n, T), a sequence a step; prints its loss, in nats.

    With a `teacher`, it learns the teacher's probabilities in place of the next token.
    """
    model = model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    losses = []
    for step, batch in enumerate(progress(tokens.split(1), desc="training", leave=False)):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        targets = batch[:, 1:].flatten()
        if teacher is not None:
            with torch.no_grad():
                targets = teacher(batch[:, :-1]).flatten(0, 1).softmax(-1)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    few = max(1, len(losses) // 10)
    ends = [np.mean(losses[:few]), max(losses), np.mean(losses[-few:])]
    print(
        "loss: {:.2f} in the first tenth of {} steps, at most {:.2f}, {:.2f} in the last".format(
            ends[0], len(losses), *ends[1:]
        )
    )
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return as_source(weights, model.config)


def draw_robustness(rows, details, path) -> None:
    """The share of each layer's units that are matched, by relative depth: a line per suspect."""
    title = "How much of each layer is another model's?"
    figure, grid = new_figure(title, width=7.4, height=4.2)
    axes = grid[0, 0]
    named = set()
    for row, detail in zip(rows, details):
        layers = detail["layers"]
        depths = (np.arange(len(layers)) + 0.5) / max(1, len(layers))
        label = None if row["kind"] in named else row["kind"]
        named.add(row["kind"])
        colour = KINDS[row["kind"]]
        axes.plot(
            depths, [100 * layer["share"] for layer in layers], ".-", color=colour, alpha=0.7, label=label
        )
    axes.set(
        xlabel="relative depth of the layer: 0 input, 1 output",
        ylabel="% of hidden units matched",
        ylim=(-3, 103),
    )
    legend_below(figure, axes)
    save_figure(figure, path)


COMMANDS = {"": Command(robustness, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
