"""Why does a newborn prefer tokens? Because its states contract (BB section 4).

States contract if the cosine between those of unrelated inputs grows with depth. Final states then have much
in common, and so have predictions. An MLP adds what its neurons put out on average, which is the same for all
inputs, so it brings states together. measure/theory.py predicts these cosines layer by layer.

    python contraction.py                        # both: 8 to 9 minutes (all times: one thread)
    python contraction.py layers --seed 42       # Figures 2 and 7: which sublayer contracts, layer by layer

`layers` shows that MLPs begin the contraction; it reads Gaussian vectors with the standard deviation of
embeddings, 0.02 (BB 4.1). `cure` tries models that do not contract. Seven more experiments:
reproduce/mechanisms.py.
"""

from dataclasses import replace

import torch

from init import variant
from lib.settings import Command, RunSettings, run_script
from measure import theory
from probe import SHOWN, count_predictions, preference
from sources.newborns import NewbornExperiment, NewbornSettings


@torch.inference_mode()
def layers(settings: NewbornSettings):
    """Which sublayer contracts? Cosine of last positions, layer by layer (BB Figures 2, 7; five minutes)"""
    # A NewbornExperiment is an Experiment that makes newborns: `newborns` yields each model and length, after
    # the columns that name it. `finish` saves and draws its rows, as means over seeds.
    experiment = NewbornExperiment("layers", "BB Figures 2, 7", settings, (64, 256))
    for key, model, T in experiment.newborns(vocab_size=1):  # inputs are vectors: no embedding is needed
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
