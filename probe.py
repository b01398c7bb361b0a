"""Find the tokens that an untrained model already prefers (BB section 3, Table 1, Figures 1a and 10)

    python probe.py --seed 42 43                                # 1,000 sequences of 64 tokens on a CPU
    python probe.py --model nano_llama --num-sequences 10000 --sequence-length 64 256 1024
    python probe.py --model runs/laptop /models/Llama-2-7b-hf nano_llama@7      # checkpoints, and PRESET@SEED

The model reads random sequences, and predicts the token with the largest logit after the last position.
Each model, seed and length gives one row; `preference` computes its columns.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.special import logsumexp
from scipy.stats import binom

from init import SCHEMES
from lib.figures import draw_preferences
from lib.random import keyed_generator, random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import default_batch_size, progress, shard, sum_over_ranks
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from sources.checkpoint import check_lengths, find_models, shortest_context

TOP = 20  # how many of the most frequent tokens Figure 1a shows
SHOWN = ("model", "seed", "sequence_length", "num_sequences", "top1_token", "top1_count", "uniform_max_count")
SHOWN += ("ratio", "log10_p", "direction_token", "mean_cosine", "top1_text")  # columns that are printed


@dataclass
class Settings(RunSettings):
    """The settings of `probe`. RunSettings adds --out, --device and --dtype."""

    model: tuple[str, ...] = ("nano_gpt2",)  # presets, PRESET@SEED, folders, names of the Hub
    seed: tuple[int, ...] = (42,)  # seeds of the presets' weights
    embedding_seed: int = 0  # seed of the presets' embedding and head, the same for all seeds (BB B.2)
    init: Literal[SCHEMES] = "gpt2"  # how newborns are drawn
    input_seed: int = 0  # seed of the random sequences
    num_sequences: at_least(2) = 1000  # for each model and length (BB: 10000)
    sequence_length: tuple[int, ...] = (64,)  # tokens in a sequence (BB: 1024)


def probe(settings: Settings):
    """Which tokens do untrained models prefer? One thread takes 3 minutes per seed, 1 in bfloat16."""
    # A Checkpoint has a name, seed and config, and makes the model. A preset gives one for each seed.
    specs = find_models(settings.model, settings.seed, settings.embedding_seed, settings.init)
    check_lengths(settings.sequence_length, shortest_context(specs))
    # An Experiment joins torchrun's processes, chooses the device, and makes the folder --out. `save` writes
    # the rows to <name>.json and prints some columns.
    experiment = Experiment("probe", "BB Table 1, Figures 1a and 10", settings)
    n = settings.num_sequences
    rows, tokens, dimensions = [], [], []
    for spec in specs:
        model = spec.model(experiment.device, experiment.dtype)
        for T in settings.sequence_length:
            counts = count_predictions(model, T, n, settings.input_seed)
            row = {"model": spec.name, "seed": spec.seed, "sequence_length": T} | preference(model, counts)
            if spec.tokenizer:
                row["top1_text"] = repr(spec.tokenizer.text(row["top1_token"]))
            rows.append(row)
            tokens.append((counts.tokens, uniform_counts(n, model.config.vocab_size, TOP)))
            dimensions.append((counts.dimensions, uniform_counts(n, model.config.d_model, TOP)))
    result = experiment.save(rows, SHOWN)
    draw_preferences(experiment.folder / "probe.png", rows, tokens, dimensions)
    return result


class Counts:
    """How often each token is predicted and each dimension is the largest, and cosines between states."""

    def __init__(self, config, device, with_layers=False):
        d = config.d_model
        num_states = config.num_layers + 1 if with_layers else 0
        self.tokens = torch.zeros(config.vocab_size, dtype=torch.int64, device=device)  # (V,)
        self.dimensions = torch.zeros(d, dtype=torch.int64, device=device)
        self.cosines = CosineStatistics(d, device)  # of final states
        self.layers = [CosineStatistics(d, device) for _ in range(num_states)]  # of the stream; 0: the input

    def update(self, model, inputs) -> None:
        """Count the last positions of n sequences: tokens (n, T) or vectors (n, T, d)."""
        states = model.hidden(inputs, last_only=True, on_state=self.on_state)  # (n, d)
        self.cosines.update(states)
        self.tokens += model.unembed(states).argmax(dim=1).bincount(minlength=len(self.tokens))
        self.dimensions += states.argmax(dim=1).bincount(minlength=len(self.dimensions))

    def on_state(self, layer, x) -> None:
        """Add the last positions of the stream x (n, T, d) to a layer's cosines; `hidden` calls this."""
        if self.layers:
            self.layers[layer].update(x[:, -1])

    def reduce(self) -> "Counts":
        """Sum over the ranks; counts go to the CPU."""
        self.tokens = sum_over_ranks(self.tokens).cpu()
        self.dimensions = sum_over_ranks(self.dimensions).cpu()
        for statistics in (self.cosines, *self.layers):
            statistics.reduce()
        return self


@torch.inference_mode()
def count_predictions(model, T, num_sequences, input_seed=0, gaussian=False) -> Counts:
    """Counts of what a model predicts after random sequences of T tokens; torchrun's ranks share the work.

    With `gaussian`, Gaussian vectors replace the embedded tokens, and cosines are also taken at every layer
    (BB 4.1).
    """
    device = model.device
    counts = Counts(model.config, device, with_layers=gaussian)
    batch_size = default_batch_size(device, T)
    batches = shard(math.ceil(num_sequences / batch_size))
    for batch in progress(batches, desc=f"{T} tokens", unit=" sequences", unit_scale=batch_size):
        # Sequence i is drawn from input_seed and i alone, so it is the same in any batch and on any rank.
        indices = range(batch * batch_size, min((batch + 1) * batch_size, num_sequences))
        if gaussian:
            inputs = random_vectors(input_seed, indices, T, model.config.d_model)
        else:
            inputs = random_tokens(input_seed, indices, T, model.config.vocab_size)
        counts.update(model, inputs.to(device))
    return counts.reduce()


@torch.inference_mode()
def preference(model, counts: Counts):
    """A dictionary of columns that say which tokens a model prefers."""
    n = int(counts.tokens.sum())
    vocab_size = model.config.vocab_size
    top1_token = int(counts.tokens.argmax())  # if counts are equal, the lowest token
    top1_count = int(counts.tokens.max())
    uniform_max_count = uniform_counts(n, vocab_size, TOP)[0]
    uniform_max_dimension = uniform_counts(n, model.config.d_model, TOP)[0]
    direction_token = int(model.unembed(counts.cosines.direction().float()).argmax())
    return {
        "num_sequences": n,
        "top1_token": top1_token,
        "top1_count": top1_count,
        "uniform_max_count": uniform_max_count,  # the count of the luckiest token in uniform draws
        "ratio": top1_count / uniform_max_count,
        "log10_p": binomial_log10_p(top1_count, n, vocab_size),
        "direction_token": direction_token,  # what the mean direction of the final states predicts
        "direction_matches": direction_token == top1_token,
        **counts.cosines.summary(),  # mean_cosine and std_cosine
        "dimension_ratio": int(counts.dimensions.max()) / uniform_max_dimension,  # BB Figure 10, like `ratio`
    }


class CosineStatistics:
    """Mean and standard deviation of the cosine over all pairs of n states, in O(d^2) memory for any n.

    Let u_i be state i divided by its norm. Over ordered pairs i != j, the cosines u_i u_j sum to
    |sum u|^2 - n, and their squares to |sum u u^T|^2 - n (Frobenius norm).
    """

    def __init__(self, d, device="cpu"):
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.sum = torch.zeros(d, dtype=torch.float64, device=device)
        self.outer = torch.zeros(d, d, dtype=torch.float64, device=device)

    def update(self, states) -> "CosineStatistics":
        """Add states (n, d)."""
        unit = states.double() / states.double().norm(dim=1, keepdim=True)
        self.count += len(unit)
        self.sum += unit.sum(dim=0)
        self.outer.addmm_(unit.T, unit)
        return self

    def reduce(self) -> None:
        """Sum over the ranks, in place."""
        for tensor in (self.count, self.sum, self.outer):
            sum_over_ranks(tensor)

    def direction(self):
        """The contraction direction, (d,) float64: the mean of the unit vectors (BB section 4)."""
        return self.sum / self.count

    def summary(self):
        """Mean and standard deviation over all pairs, as columns; UserError for a zero or infinite state."""
        if not self.sum.isfinite().all():
            raise UserError("the model's states are zero or not finite: check its weights for NaN")
        n = self.count.item()  # 2 at least
        pairs = n * (n - 1)
        mean = (self.sum.square().sum().item() - n) / pairs
        mean_square = (self.outer.square().sum().item() - n) / pairs
        return {"mean_cosine": mean, "std_cosine": max(0.0, mean_square - mean**2) ** 0.5}


def binomial_log10_p(count, n, num_choices):
    """log10 of a bound on the probability that any of V = num_choices tokens has at least `count` of n draws.

    Bonferroni's bound is min(1, V P[Binomial(n, 1/V) >= count]). A log10, because the bound itself may be too
    small for a float (BB B.2 prints 0.00).
    """
    log_tail = logsumexp(binom.logpmf(np.arange(count, n + 1), n, 1 / num_choices))
    return min(0.0, (math.log(num_choices) + log_tail) / math.log(10))


@functools.cache
def uniform_counts(n, num_choices, places, repetitions=1000):
    """Mean counts of the most frequent of n uniform draws, the second, ..., by simulation: (places,).

    The first is the baseline of BB Figure 1a. Its standard error is below 1 % for 1,000 draws of 50,257.
    """
    generator = keyed_generator("uniform", n, num_choices)
    total = np.zeros(places)
    for _ in range(repetitions):
        _, counts = np.unique(generator.integers(num_choices, size=n), return_counts=True)
        counts = np.sort(counts)[::-1][:places]
        total[: len(counts)] += counts
    return total / repetitions


# `run_script` turns each setting into a flag, and its comment into the flag's help. A misspelt flag or any
# UserError ends the script with status 2 and a message.
COMMANDS = {"": Command(probe, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
