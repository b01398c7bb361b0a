"""Why does a newborn prefer tokens? Because its states contract (BB section 4).

    python contraction.py                        # both: 8 to 9 minutes (all times: one thread)
    python contraction.py layers --seed 42       # Figures 2 and 7: which sublayer contracts, layer by layer

`layers` shows that MLPs begin the contraction; it reads Gaussian vectors with the standard deviation of
embeddings, 0.02 (BB 4.1). `cure` tries models that do not contract. Seven more experiments:
reproduce/mechanisms.py.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from init import SCHEMES, newborn, variant
from lib.figures import curves
from lib.results import Experiment, mean_over_seeds
from lib.runtime import progress
from lib.settings import Command, RunSettings, at_least, check_choice, run_script
from measure import theory
from model import PRESETS
from probe import SHOWN, count_predictions, preference
from sources.checkpoint import check_lengths, shortest_context, specs_of

COSINES = ("mean_cosine", "std_cosine")  # measured columns


@dataclass
class NewbornSettings(RunSettings):
    """The settings of an experiment on newborns."""

    seed: tuple[int, ...] = tuple(range(42, 50))  # seeds of the weights
    input_seed: int = 0  # seed of the random inputs
    num_sequences: at_least(2) = 300  # random sequences, or vectors, for each seed and length
    model: tuple[str, ...] = ("nano_gpt2",)  # presets, or PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # how newborns are drawn; in `cure`, what is compared with gpt2
    sequence_length: tuple[int, ...] | None = None  # positions in a sequence; None: the experiment's own


class NewbornExperiment(Experiment):
    """An experiment on newborns: an Experiment that makes them and collects `rows`."""

    def __init__(self, name, paper, settings: NewbornSettings, lengths=(64,)):
        """Begin with the user's sequence lengths, or else `lengths`; UserError for a trained model."""
        for model in settings.model:
            check_choice(model.partition("@")[0], PRESETS, "preset")
        self.specs = specs_of(settings.model, settings.seed, embedding_seed=0, scheme=settings.init)
        context = shortest_context(self.specs)
        check_lengths(settings.sequence_length or (), context)
        self.lengths = settings.sequence_length or [T for T in lengths if T <= context] or [context]
        self.rows = []
        super().__init__(name, paper, settings)

    def newborns(self, scheme=None, **changes):
        """Yield (key, model, T) for each model and each length T; a row of results begins with the key.

        `scheme` replaces --init; `changes` replaces fields of the ModelConfig. Where inputs are vectors,
        vocab_size=1 saves memory.
        """
        for spec in progress(self.specs, desc=self.name, unit=" models"):
            config = replace(spec.config, **changes)
            drawn = scheme or spec.scheme
            model = newborn(config, spec.seed, spec.embedding_seed, drawn, self.device, self.dtype)
            for T in self.lengths:
                yield {"model": spec.name, "seed": spec.seed}, model, T

    def finish(self, question, x, series, theories, measured=COSINES, columns=(), **options):
        """Save the rows, print `columns` of them (default: all), and draw them.

        If `measured` names columns, these are averaged over rows that differ only in the seed.
        """
        rows = mean_over_seeds(self.rows, measured, theories) if measured else self.rows
        result = self.save(rows, columns)
        plot(self, rows, question, x, series, theories, **options)
        return result


def plot(experiment, rows, question, x, series, theories, y="mean_cosine", **options) -> None:
    """Draw column y over column x as <experiment>.png; other arguments are those of lib.figures.curves."""
    if series != "model" and len({row.get("model") for row in rows}) > 1:
        rows = [row | {series: f"{row['model']}, {row[series]}"} for row in rows]
    path = experiment.folder / f"{experiment.name}.png"
    curves(rows, path, question, x=x, y=y, series=series, theories=theories, **options)


@torch.inference_mode()
def layers(settings: NewbornSettings):
    """Which sublayer contracts? Cosine of last positions, layer by layer (BB Figures 2, 7; five minutes)"""
    experiment = NewbornExperiment("layers", "BB Figures 2, 7", settings, (64, 256))
    for key, model, T in experiment.newborns(vocab_size=1):
        for kind, part, counts in sublayers_apart(settings, model, T):
            prediction = theory.kernel_recursion(part.config, T, settings.init)
            for layer, statistics in enumerate(counts.layers):
                row = {"variant": kind, "sequence_length": T, "layer": layer, "theory": prediction[layer]}
                experiment.rows.append(key | row | statistics.summary())
    question = "Which sublayer makes unrelated sequences alike? (shaded: std of pairs)"
    options = {"panel": "sequence_length", "band": "std_cosine"}
    return experiment.finish(question, "layer", "variant", {"theory": "kernel recursion"}, **options)


def sublayers_apart(settings, model, T):
    """Yield (name, model, counts) for the full model, its MLPs only, and its attention only."""
    for kind in ("full", "mlp", "attention"):
        part = variant(model, sublayers=kind)
        counts = count_predictions(part, T, settings.num_sequences, settings.input_seed, gaussian=True)
        yield kind, part, counts


@torch.inference_mode()
def cure(settings: NewbornSettings):
    """Is a newborn cured by removing the mean that all neurons share? (ours; 3 to 4 minutes)"""
    experiment = NewbornExperiment("cure", "ours", settings)
    for scheme in dict.fromkeys(("gpt2", settings.init)):
        for key, model, T in experiment.newborns(scheme):
            counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
            prediction = theory.kernel_recursion(model.config, T, scheme)
            key |= {"init": scheme, "sequence_length": T, "predicted_cosine": prediction[-1]}
            experiment.rows.append(key | preference(model, counts))
    question = "Does removing the MLPs' mean output at initialization prevent contraction?"
    options = {"measured": (), "columns": ("init", *SHOWN), "style": "o"}
    return experiment.finish(question, "seed", "init", {"predicted_cosine": "kernel recursion"}, **options)


def run_all(settings: RunSettings) -> None:
    """Run every experiment with its own defaults (8 to 9 minutes)"""
    for command in EXPERIMENTS.values():
        command.function(replace(command.defaults, **vars(settings)))


EXPERIMENTS = {
    "layers": Command(layers, NewbornSettings(num_sequences=24)),
    "cure": Command(cure, NewbornSettings(init="centered", num_sequences=120)),
}
COMMANDS = {**EXPERIMENTS, "": Command(run_all, RunSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
