"""Which tokens does an untrained model already prefer? (BB section 3, Table 1, Figures 1a and 10)

    python probe.py --seed 42 43                                # 1,000 sequences of 64 tokens for each seed
    python probe.py --model nano_llama --num-sequences 10000 --sequence-length 64 256 1024
    python probe.py --model runs/laptop /models/Llama-2-7b-hf nano_llama@7      # checkpoints, and PRESET@SEED
    torchrun --nproc-per-node 2 probe.py                        # the same rows, from two processes

Random sequences go in, the argmax of the last position's logits comes out. If the newborn had no preference,
N sequences would give N random tokens; instead they agree. For each model, seed and length a row says on
which token and how often (`top1_*`), how often the most frequent of N uniform draws would come up
(`uniform_max_count`), how improbable the count is (`log10_p`), how alike the final states are
(`mean_cosine`), and the token that their mean direction would predict (`direction_token`, BB Finding 2.2).
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from init import SCHEMES
from lib.checkpoint import check_lengths, chosen_models, shortest_context
from lib.figures import BLUE, VERMILION, new_figure, save_figure
from lib.inputs import random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import default_batch_size, progress, shard, sum_over_ranks
from lib.settings import Command, RunSettings, at_least, run_script
from lib.tokenizers import load_tokenizer
from measure.cosines import CosineStatistics, binomial_log10_p, uniform_counts

NUM_SEQUENCES = {"cpu": 1000, "cuda": 10_000}  # by default
SEQUENCE_LENGTH = {"cpu": 64, "cuda": 1024}
RANKS = 20  # favourites shown in Figure 1a


@dataclass
class Settings(RunSettings):
    """What `probe.py` can be told."""

    model: tuple[str, ...] = ("nano_gpt2",)
    """presets, PRESET@SEED, or checkpoint folders"""
    seed: tuple[int, ...] = (42,)
    """seeds of the presets' weights"""
    embedding_seed: int = 0
    """seed of embedding and head, the same for all seeds (BB B.2)"""
    init: Literal[SCHEMES] = "gpt2"
    """how newborns are drawn"""
    input_seed: int = 0
    """seed of the random sequences"""
    num_sequences: at_least(2) | None = None
    """sequences for each model and length; None: 1000, on CUDA 10000"""
    sequence_length: tuple[int, ...] | None = None
    """tokens in a sequence; None: 64, on CUDA 1024"""
    batch_size: at_least(1) | None = None
    """sequences in a forward pass; None: 2048 tokens' worth, on CUDA 65536"""


def probe(settings: Settings):
    """Which tokens do untrained models prefer? By default a minute for each two seeds, on 2 cores."""
    specs = chosen_models(settings.model, settings.seed, settings.embedding_seed, settings.init)
    context = shortest_context(specs)
    check_lengths(settings.sequence_length or (), context)
    experiment = Experiment("probe", "BB Table 1, Figures 1a and 10", settings)
    device, dtype = experiment.device, experiment.dtype
    num_sequences = settings.num_sequences or NUM_SEQUENCES[device.type]
    lengths = settings.sequence_length or (min(SEQUENCE_LENGTH[device.type], context),)
    rows, totals = [], []
    for spec in specs:
        model = spec.load(device, dtype)
        for T in lengths:
            key = {"model": spec.name, "seed": spec.seed, "sequence_length": T}
            counts = count_predictions(model, T, num_sequences, settings.batch_size, settings.input_seed)
            row = key | preference(model, counts)
            if spec.tokenizer_file:
                tokenizer = load_tokenizer(str(spec.tokenizer_file))
                row["top1_text"] = repr(tokenizer.text(row["top1_token"]))
            rows.append(row)
            totals.append(counts)
    columns = ("model", "seed", "sequence_length", "num_sequences", "top1_token", "top1_count")
    columns += ("uniform_max_count", "ratio", "log10_p", "direction_token", "mean_cosine", "top1_text")
    draw_probe(rows, totals, experiment.folder / "probe.png")
    return experiment.save(rows, columns)


@torch.inference_mode()
def count_predictions(model, T, num_sequences, batch_size=None, input_seed=0, vectors=False):
    """Feed random sequences of tokens, or of Gaussian `vectors` in place of embedded tokens; return totals.

    Returns `token_counts` (V,) and `dimension_counts` (d,), how often each token has the largest logit and
    each dimension the largest final state; `cosines`, CosineStatistics of the final states; and `layers`,
    CosineStatistics of the last position's stream before and after each block (an empty list for tokens).
    Under torchrun each rank takes a shard of the batches, and all return the sums.
    """
    config = model.config
    device = model.model.norm.weight.device
    batch_size = batch_size or default_batch_size(device, T)
    token_counts = torch.zeros(config.vocab_size, dtype=torch.int64, device=device)
    dimension_counts = torch.zeros(config.d_model, dtype=torch.int64, device=device)
    cosines = CosineStatistics(config.d_model, device)
    layers = []
    if vectors:
        layers = [CosineStatistics(config.d_model, device) for _ in range(config.num_layers + 1)]

    def on_state(layer, x):
        if vectors:
            layers[layer].update(x[:, -1])

    # whole batches: the same results for any number of ranks
    batches = shard(math.ceil(num_sequences / batch_size))
    total = min(len(batches) * batch_size, num_sequences)
    with progress(total=total, desc=f"{T} tokens", unit=" sequences") as bar:
        for batch in batches:
            indices = range(batch * batch_size, min((batch + 1) * batch_size, num_sequences))
            if vectors:
                inputs = random_vectors(input_seed, indices, T, config.d_model)  # (n, T, d)
            else:
                inputs = random_tokens(input_seed, indices, T, config.vocab_size)  # (n, T)
            states = model.hidden(inputs.to(device), last_only=True, on_state=on_state)  # (n, d)
            cosines.update(states)
            predicted = model.unembed(states).argmax(dim=1)
            token_counts += predicted.bincount(minlength=config.vocab_size)
            dimension_counts += states.argmax(dim=1).bincount(minlength=config.d_model)
            bar.update(len(indices))
    return {
        "token_counts": sum_over_ranks(token_counts).cpu(),
        "dimension_counts": sum_over_ranks(dimension_counts).cpu(),
        "cosines": cosines.reduce(),
        "layers": [layer.reduce() for layer in layers],
    }


@torch.inference_mode()
def preference(model, counts):
    """The columns computed from the counts; of two equal counts, the lower token's wins."""
    token_counts = counts["token_counts"]
    dimension_counts = counts["dimension_counts"]
    n = int(token_counts.sum())
    vocab_size = model.config.vocab_size
    top1_token = int(token_counts.argmax())
    top1_count = int(token_counts.max())
    uniform_max_count = uniform_counts(n, vocab_size, RANKS)[0]  # of the most frequent
    uniform_max_dimension = uniform_counts(n, len(dimension_counts), 1)[0]
    direction_token = int(model.unembed(counts["cosines"].direction().float()).argmax())
    return {
        "num_sequences": n,
        "top1_token": top1_token,
        "top1_count": top1_count,
        "top1_frequency": top1_count / n,
        "uniform_max_count": uniform_max_count,
        "ratio": top1_count / uniform_max_count,
        "log10_p": binomial_log10_p(top1_count, n, vocab_size),
        "direction_token": direction_token,
        "direction_matches": direction_token == top1_token,
        **counts["cosines"].summary(),
        "dimension_ratio": int(dimension_counts.max()) / uniform_max_dimension,
    }


# ---- the figure --------------------------------------------------------------------------------------------


def draw_probe(rows, totals, path) -> None:
    """BB Figures 1a and 10, a column for each of six rows: tokens by rank, by number; dimensions."""
    question = "Which tokens does a newborn predict, and which dimensions lead? (dashed: uniform draws)"
    figure, grid = new_figure(question, 3, min(6, len(rows)), width=3.6, height=2.7, sharey="row")
    for row, counts, (ranks, tokens, dimensions) in zip(rows, totals, grid.T):
        num_ranks = min(RANKS, len(counts["token_counts"]))
        n = row["num_sequences"]
        by_token = 100 / n * counts["token_counts"].numpy()  # % of sequences
        by_dimension = 100 / n * counts["dimension_counts"].numpy()
        uniform = 100 / n * uniform_counts(n, len(by_token), num_ranks)
        places = range(1, num_ranks + 1)
        ranks.bar(places, np.sort(by_token)[::-1][:num_ranks], color=BLUE)
        ranks.plot(places, uniform, "--", color=VERMILION)
        p = f"1e{row['log10_p']:.0f}" if row["log10_p"] < 0 else "1"
        text = f"token {row['top1_token']}: {row['ratio']:.1f} x uniform\np = {p}"
        ranks.text(0.96, 0.94, text, transform=ranks.transAxes, ha="right", va="top", fontsize=9)
        ranks.set_title(f"{row['model']}, seed {row['seed']}, {row['sequence_length']} tokens", fontsize=10)
        ranks.set(xlabel="rank of the predicted token", xticks=[1, 5, 10, 15, 20])
        predicted = by_token.nonzero()[0]
        tokens.vlines(predicted, 0, by_token[predicted], color=BLUE, lw=1)
        tokens.axhline(uniform[0], ls="--", color=VERMILION)
        tokens.set_xlabel("token number")
        dimensions.vlines(range(len(by_dimension)), 0, by_dimension, color=BLUE, lw=1)
        of_dimension = 100 / n * uniform_counts(n, len(by_dimension), 1)[0]
        dimensions.axhline(of_dimension, ls="--", color=VERMILION)
        dimensions.set_xlabel("hidden dimension")
    for axes, what in zip(grid[:, 0], ("token is predicted", "token is predicted", "dimension is largest")):
        axes.set_ylim(0, max(2.5, 1.1 * axes.get_ylim()[1]))  # no preference is to look like none
        axes.set_ylabel(f"{what},\n% of sequences")
    save_figure(figure, path)


COMMANDS = {"": Command(probe, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
