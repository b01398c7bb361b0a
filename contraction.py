"""Why does a newborn prefer tokens? Because its states contract (BB section 4).

    python contraction.py                        # all three: 11 to 16 minutes (all times: one thread)
    python contraction.py layers --seed 42       # Figures 2 and 7: which sublayer contracts, layer by layer
    torchrun --nproc-per-node 2 contraction.py predict --seed {0..99} --num-sequences 2000

`layers` shows that MLPs begin the contraction; it reads Gaussian vectors with the standard deviation of
embeddings, 0.02 (BB 4.1). `predict` carries the mean state through the weights (measure/mean_field.py).
`cure` initializes models that do not contract. Seven more experiments: reproduce/mechanisms.py.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from init import SCHEMES, newborn, variant
from lib.figures import curves
from lib.results import Experiment, mean_over_seeds
from lib.runtime import progress
from lib.settings import Command, RunSettings, at_least, check_choice, run_script, say
from measure import theory
from measure.mean_field import mean_field
from model import PRESETS
from probe import SHOWN, count_predictions, preference
from sources.checkpoint import check_lengths, shortest_context, specs_of

COSINES = ("mean_cosine", "std_cosine")  # measured columns


@dataclass
class NewbornSettings(RunSettings):
    """The settings of an experiment at one sequence length."""

    seed: tuple[int, ...] = tuple(range(42, 50))  # seeds of the weights
    input_seed: int = 0  # seed of the random inputs
    num_sequences: at_least(2) = 300  # random sequences, or vectors, for each seed and length
    model: tuple[str, ...] = ("nano_gpt2",)  # presets, or PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # how newborns are drawn; in `cure`, what is compared with gpt2


@dataclass
class LengthSettings(NewbornSettings):
    """The settings of an experiment at several sequence lengths."""

    sequence_length: tuple[int, ...] | None = None  # positions in a sequence; None: the experiment's own


class NewbornExperiment(Experiment):
    """An experiment on newborns: an Experiment that makes them and collects `rows`."""

    @classmethod
    def begin(cls, name, paper, settings: NewbornSettings, lengths=(64,)):
        """Begin with the user's sequence lengths, or else `lengths`; UserError for a trained model."""
        for model in settings.model:
            check_choice(model.partition("@")[0], PRESETS, "preset")
        specs = specs_of(settings.model, settings.seed, 0, settings.init)
        context = shortest_context(specs)
        given = getattr(settings, "sequence_length", None) or ()
        check_lengths(given, context)
        experiment = super().begin(name, paper, settings)
        experiment.specs = specs
        experiment.lengths = given or [T for T in lengths if T <= context] or [context]
        experiment.rows = []
        for unknown in {theory.unknown(spec.own_config, settings.init) for spec in specs} - {None}:
            say(f"columns of theory are empty: measure/theory.py does not know {unknown}")
        return experiment

    def newborns(self, scheme=None, **changes):
        """Yield (key, model, T) for each model and each length T; a row of results begins with the key.

        `scheme` replaces --init; `changes` replaces fields of the ModelConfig. Where inputs are vectors,
        vocab_size=1 saves memory.
        """
        for spec in progress(self.specs, desc=self.name, unit=" models"):
            config = replace(spec.own_config, **changes)
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
def layers(settings: LengthSettings):
    """Which sublayer contracts? Cosine of last positions, layer by layer (BB Figures 2, 7; five minutes)"""
    experiment = NewbornExperiment.begin("layers", "BB Figures 2, 7", settings, (64, 256))
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
def predict(settings: LengthSettings):
    """Is the mean direction's token the top-1? Do weights predict it? (BB Finding 2.2, ours; 3-7 minutes)"""
    experiment = NewbornExperiment.begin("predict", "BB Finding 2.2, and ours", settings)
    points = []
    for key, model, T in experiment.newborns():
        counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
        direction = F.normalize(counts.cosines.direction().cpu(), dim=0)  # (d,), as measured
        row = key | {"sequence_length": T} | preference(model, counts)
        row["direction_count"] = int(counts.tokens[row["direction_token"]])
        row |= {"predicted_token": None, "direction_cosine": None}
        prediction = mean_field(model, T)  # (d,); None if theory does not know the architecture
        if prediction is not None:
            row["predicted_token"] = int(model.unembed(prediction.to(model.head_weight)).argmax())
            row["direction_cosine"] = float(prediction @ direction)
            for x, y in zip(prediction.tolist(), direction.tolist()):
                points.append({"model": key["model"], "predicted": x, "measured": y})
        row["predicted_cosine"] = theory.kernel_recursion(model.config, T, settings.init)[-1]
        experiment.rows.append(row)
    question = "Do the weights alone predict the direction? (one point per dimension, of vectors of norm 1)"
    diagonal = {"predicted": "exactly"}  # draws the diagonal
    result = experiment.save(experiment.rows, (*SHOWN, "predicted_token", "direction_cosine"))
    plot(experiment, points, question, "predicted", "model", diagonal, "measured", style=".")
    return result


@torch.inference_mode()
def cure(settings: LengthSettings):
    """Is a newborn cured by removing the mean that all neurons share? (ours; 3 to 4 minutes)"""
    experiment = NewbornExperiment.begin("cure", "ours", settings)
    for scheme in dict.fromkeys(("gpt2", settings.init)):
        for key, model, T in experiment.newborns(scheme):
            counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
            prediction = theory.kernel_recursion(model.config, T, scheme)
            key |= {"init": scheme, "sequence_length": T, "predicted_cosine": prediction[-1]}
            experiment.rows.append(key | preference(model, counts))
    question = "Does removing the MLPs' mean output at initialization prevent contraction?"
    theories = {"predicted_cosine": "kernel recursion"}
    return experiment.finish(question, "seed", "init", theories, (), ("init", *SHOWN), style="o")


def run_all(settings: RunSettings) -> None:
    """Run every experiment with its own defaults (11 to 16 minutes)"""
    for command in EXPERIMENTS.values():
        command.function(replace(command.defaults, **vars(settings)))


EXPERIMENTS = {
    "layers": Command(layers, LengthSettings(num_sequences=24)),
    "predict": Command(predict, LengthSettings(num_sequences=400)),
    "cure": Command(cure, LengthSettings(init="centered", num_sequences=120)),
}
COMMANDS = {**EXPERIMENTS, "": Command(run_all, RunSettings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
