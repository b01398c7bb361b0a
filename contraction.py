"""Why does a newborn prefer tokens? Its states contract, by the mechanisms of BB section 4.

    python contraction.py                        # all three: 11-16 minutes on one thread, as all times below
    python contraction.py layers --seed 42       # Figures 2 and 7: which sublayer contracts, layer by layer
    torchrun --nproc-per-node 2 contraction.py predict --seed {0..99} --num-sequences 2000

`layers` shows that MLPs begin the contraction; its models read Gaussian vectors with the standard deviation
of embeddings, 0.02 (BB 4.1). `predict` follows the mean state through the weights (measure/mean_field.py).
`cure` draws newborns that do not contract. Seeds of a preset share one embedding (BB B.2), PRESET@SEED not.

In every experiment `Births.each` makes the newborns, the loop appends rows that hold theory beside what was
measured, and `finish` draws and saves them (`predict`: `plot`, `save`). Seven more: reproduce/mechanisms.py.
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
from sources.checkpoint import check_lengths, chosen_models, shortest_context

COSINES = ("mean_cosine", "std_cosine")  # columns that are measured


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


class Births(Experiment):
    """An experiment on newborns, for each sequence length that the user named, or else for `lengths`."""

    @classmethod
    def begin(cls, name, paper, settings: NewbornSettings, lengths=(64,)):
        """Refuse what is no newborn, or too long, before an experiment begins."""
        for model in settings.model:  # no trained models
            check_choice(model.partition("@")[0], PRESETS, "preset")
        specs = chosen_models(settings.model, settings.seed, 0, settings.init)
        context = shortest_context(specs)
        given = getattr(settings, "sequence_length", None) or ()
        check_lengths(given, context)
        births = super().begin(name, paper, settings)
        births.specs = specs
        births.lengths = given or [T for T in lengths if T <= context] or [context]
        births.rows = []
        for unknown in {theory.unknown(spec.own_config, settings.init) for spec in specs} - {None}:
            say(f"columns of theory are empty: measure/theory.py does not know {unknown}")
        return births

    def each(self, scheme=None, **changes):
        """Yield (key, model, T) for each newborn model and each length T; the key begins a row of results.

        `changes` are made in each newborn's configuration: vocab_size=1 makes the embedding small where the
        inputs are vectors. `scheme` replaces --init.
        """
        for spec in progress(self.specs, desc=self.name, unit=" models"):
            config = replace(spec.own_config, **changes)
            drawn = scheme or spec.scheme
            model = newborn(config, spec.seed, spec.embedding_seed, drawn, self.device, self.dtype)
            for T in self.lengths:
                yield {"model": spec.name, "seed": spec.seed}, model, T

    def finish(self, question, x, series, theories, measured=COSINES, columns=(), **options):
        """Save the rows, print their `columns`, by default all, and draw them.

        Rows of all seeds become one, with the means of the columns `measured`, if any are named.
        """
        rows = mean_over_seeds(self.rows, measured, theories) if measured else self.rows
        result = self.save(rows, columns)
        plot(self, rows, question, x, series, theories, **options)
        return result


def plot(experiment, rows, question, x, series, theories, y="mean_cosine", **options) -> None:
    """Draw column y over column x as <experiment>.png, with a colour for each value of the column `series`.

    `theories` maps columns, drawn dashed, to their names in the legend. Options are those of `curves`: a
    column `panel` gets axes for each of its values, and a column `band` is shaded above and below y.
    """
    if series != "model" and len({row.get("model") for row in rows}) > 1:
        rows = [row | {series: f"{row['model']}, {row[series]}"} for row in rows]
    path = experiment.folder / f"{experiment.name}.png"
    curves(rows, path, question, x=x, y=y, series=series, theories=theories, **options)


@torch.inference_mode()
def layers(settings: LengthSettings):
    """Which sublayer contracts? Cosine of last positions, layer by layer (BB Figures 2, 7; five minutes)"""
    births = Births.begin("layers", "BB Figures 2, 7", settings, (64, 256))
    for key, model, T in births.each(vocab_size=1):
        for kind, part, counts in sublayers_apart(settings, model, T):
            prediction = theory.kernel_recursion(part.config, T, settings.init)
            for layer, statistics in enumerate(counts.layers):
                row = {"variant": kind, "sequence_length": T, "layer": layer, "theory": prediction[layer]}
                births.rows.append(key | row | statistics.summary())
    question = "Which sublayer makes unrelated sequences alike? (shaded: std of pairs)"
    theories = {"theory": "kernel recursion"}
    return births.finish(question, "layer", "variant", theories, panel="sequence_length", band="std_cosine")


def sublayers_apart(settings, model, T):
    """Yield a name, a model and its counts: of the full model, of its MLPs only and of its attention only."""
    for kind in ("full", "mlp", "attention"):
        part = variant(model, sublayers=kind)
        counts = count_predictions(part, T, settings.num_sequences, settings.input_seed, of_vectors=True)
        yield kind, part, counts


@torch.inference_mode()
def predict(settings: LengthSettings):
    """Is the direction's token the favourite? Do weights predict it? (BB Finding 2.2, ours; 3-7 minutes)"""
    births = Births.begin("predict", "BB Finding 2.2, and ours", settings)
    points = []
    for key, model, T in births.each():
        counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
        direction = F.normalize(counts.cosines.direction().cpu(), dim=0)  # (d,), as measured
        row = key | {"sequence_length": T} | preference(model, counts)
        row["direction_count"] = int(counts.tokens[row["direction_token"]])
        row |= {"predicted_token": None, "direction_cosine": None}
        prediction = mean_field(model, T)  # (d,), from the weights; None if theory does not know them
        if prediction is not None:
            row["predicted_token"] = int(model.unembed(prediction.to(model.head_weight)).argmax())
            row["direction_cosine"] = float(prediction @ direction)
            for x, y in zip(prediction.tolist(), direction.tolist()):
                points.append({"model": key["model"], "predicted": x, "measured": y})
        row["predicted_cosine"] = theory.kernel_recursion(model.config, T, settings.init)[-1]
        births.rows.append(row)
    question = "Do the weights alone predict the direction? (one point per dimension, of vectors of norm 1)"
    diagonal = {"predicted": "exactly"}  # the column over itself
    result = births.save(births.rows, (*SHOWN, "predicted_token", "direction_cosine"))
    plot(births, points, question, "predicted", "model", diagonal, "measured", style=".")
    return result


@torch.inference_mode()
def cure(settings: LengthSettings):
    """Does removing the mean that all hidden units share cure a newborn? (ours; 3 to 4 minutes)"""
    births = Births.begin("cure", "ours", settings)
    for scheme in dict.fromkeys(("gpt2", settings.init)):
        for key, model, T in births.each(scheme):
            counts = count_predictions(model, T, settings.num_sequences, settings.input_seed)
            prediction = theory.kernel_recursion(model.config, T, scheme)
            key |= {"init": scheme, "sequence_length": T, "predicted_cosine": prediction[-1]}
            births.rows.append(key | preference(model, counts))
    question = "Does a birth without the MLPs' common mean output cure the contraction?"
    theories = {"predicted_cosine": "kernel recursion"}
    return births.finish(question, "seed", "init", theories, measured=(), columns=("init", *SHOWN), style="o")


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
