"""Experiments on newborns: for each preset, seed and length a row, then a table and a figure."""

from dataclasses import dataclass, replace
from typing import Literal

from init import SCHEMES, newborn
from lib.figures import curves
from lib.results import Experiment, mean_over_seeds
from lib.runtime import progress
from lib.settings import RunSettings, at_least, check_choice
from model import PRESETS
from sources.checkpoint import check_lengths, find_models, shortest_context

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
        self.specs = find_models(settings.model, settings.seed, embedding_seed=0, scheme=settings.init)
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
