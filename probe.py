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

import lib.interrupt  # noqa: F401 # isort: skip
import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure

from init import SCHEMES
from lib.checkpoint import check_lengths, chosen_models, shortest_context
from lib.data import load_tokenizer
from lib.figures import BLUE, VERMILION, between, name_figure, save_figure
from lib.inputs import random_tokens, random_vectors
from lib.results import Experiment
from lib.runtime import default_batch_size, progress, share, sum_over_ranks
from lib.settings import Command, RunSettings, at_least, run_script
from lib.speed import forward_flops, total_matmul_peak
from measure.cosines import CosineStatistics, binomial_log10_p, uniform_counts

NUM_SEQUENCES = {"cpu": 1000, "cuda": 10_000}  # by default
SEQUENCE_LENGTH = {"cpu": 64, "cuda": 1024}
RANKS = 20  # favourites shown in Figure 1a
BIASED_PERCENT = (2.5, 2.5, 5)  # that each row's axis reaches at least, so that no preference looks like none


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
    """sequences for each model and length (default: 1000; on CUDA 10000)"""
    sequence_length: tuple[int, ...] | None = None
    """tokens in a sequence (default: 64; on CUDA 1024)"""
    batch_size: at_least(1) | None = None
    """sequences in a forward pass (default: 2048 tokens' worth; on CUDA 65536)"""


def probe(settings: Settings):
    """Probe every model, seed and length; write probe.json and probe.png; return the JSON."""
    specs = chosen_models(settings.model, settings.seed, settings.embedding_seed, settings.init)
    context = shortest_context(specs)
    check_lengths(settings.sequence_length or (), context)
    experiment = Experiment("probe", "BB Table 1, Figures 1a and 10", settings)
    device, dtype = experiment.device, experiment.dtype
    num_sequences = settings.num_sequences or NUM_SEQUENCES[device.type]
    lengths = settings.sequence_length or (min(SEQUENCE_LENGTH[device.type], context),)
    peak = total_matmul_peak(device, dtype)  # FLOP/s of all ranks together
    rows, details = [], []
    for spec in specs:
        model = spec.load(device, dtype)
        for T in lengths:
            key = {"model": spec.name, "seed": spec.seed, "sequence_length": T}
            batch_size = settings.batch_size or default_batch_size(device, T)
            start = time.perf_counter()
            counts = count_predictions(model, T, num_sequences, batch_size, settings.input_seed)
            sequences_per_second = num_sequences / (time.perf_counter() - start)
            row = key | preference(model, counts)
            if spec.tokenizer_file:
                tokenizer = load_tokenizer(str(spec.tokenizer_file))
                row["top1_text"] = tokenizer.text(row["top1_token"])
                row["direction_text"] = tokenizer.text(row["direction_token"])
            rows.append(row)
            speed = {
                "batch_size": batch_size,
                "sequences_per_second": sequences_per_second,
                "mfu": sequences_per_second * forward_flops(model.config, T, last_only=True) / peak,
            }
            details.append(key | speed | figure_detail(model, counts))
    columns = ("model", "seed", "sequence_length", "num_sequences", "top1_token", "top1_count")
    columns += ("uniform_max_count", "ratio", "log10_p", "direction_token", "mean_cosine", "top1_text")
    return experiment.save(rows, columns, draw_probe, details=details)


@torch.inference_mode()
def count_predictions(model, T, num_sequences, batch_size=None, input_seed=0, vectors=False):
    """Feed random sequences of tokens, or of Gaussian `vectors` in place of embedded tokens; return totals.

    Returns `token_counts` (V,) and `dimension_counts` (d,), how often each token has the largest logit and
    each dimension the largest final state; `cosines`, CosineStatistics of the final states; and `layers`,
    CosineStatistics of the last position's stream before and after each block (an empty list for tokens).
    Under torchrun each rank takes a share of the batches, and all return the sums.
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
    batches = share(math.ceil(num_sequences / batch_size))
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
    with torch.inference_mode():
        direction_token = int(model.unembed(counts["cosines"].direction().float()).argmax())
    mean_cosine, std_cosine = counts["cosines"].mean_and_std()
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
        "mean_cosine": mean_cosine,
        "std_cosine": std_cosine,
        "dimension_ratio": int(dimension_counts.max()) / uniform_max_dimension,
    }


# ---- the figure --------------------------------------------------------------------------------------------


def figure_detail(model, counts):
    """What the figure shows that the row lacks: the 1,000 favourites, counts of dimensions, uniform draws."""
    token_counts = counts["token_counts"]
    dimension_counts = counts["dimension_counts"]
    n = int(token_counts.sum())
    favourites = token_counts.argsort(descending=True, stable=True)[:1000]
    favourites = favourites[token_counts[favourites] > 0]
    return {
        "tokens": favourites.tolist(),
        "token_counts": token_counts[favourites].tolist(),
        "uniform_counts": uniform_counts(n, model.config.vocab_size, RANKS).tolist(),
        "dimension_counts": dimension_counts.tolist(),
        "uniform_max_dimension_count": uniform_counts(n, len(dimension_counts), 1)[0],
    }


def draw_probe(result, folder) -> None:
    """probe.png: BB Figures 1a and 10, a column for each of up to three rows; dashed: uniform draws.

    From the top: how often each favourite is predicted, by rank; each predicted token, by number; how often
    each hidden dimension holds the largest final state. Of more rows than three, the favourites alone,
    of the first nine.
    """
    columns = list(zip(result["rows"], result["details"]))[:9]
    title = finding(result["rows"])
    if result["settings"]["init"] != "gpt2":
        title = f"Drawn by '{result['settings']['init']}': {title}"
    if len(columns) > 3:
        draw_favourites(columns, title, folder)
        return
    figure = Figure(figsize=(1.8 + 3.8 * len(columns), 8.5), layout="constrained")
    grid = figure.subplots(3, len(columns), squeeze=False, sharey="row")
    for (row, detail), (rank_axes, token_axes, dimension_axes) in zip(columns, grid.T):
        percent = 100 / row["num_sequences"]
        frequency = percent * np.array(detail["token_counts"])
        uniform = percent * np.array(detail["uniform_counts"])
        favourites(rank_axes, row, frequency, uniform)
        spikes(token_axes, detail["tokens"], frequency, uniform[0])
        token_axes.set_xlabel("token number")
        numbers = range(len(detail["dimension_counts"]))
        share_of_dimensions = percent * np.array(detail["dimension_counts"])
        spikes(dimension_axes, numbers, share_of_dimensions, percent * detail["uniform_max_dimension_count"])
        dimension_axes.set_xlabel("hidden dimension")
    for axes, headroom, least in zip(grid[:, 0], (1.5, 1.2, 1.2), BIASED_PERCENT):  # room for legend and text
        axes.set_ylim(top=headroom * max(least, axes.get_ylim()[1]))
    for axes in grid[:, 0]:
        axes.legend(loc="upper right", fontsize=9, frameon=False)
    grid[0, 0].set_ylabel("token is predicted,\n% of sequences")
    grid[1, 0].set_ylabel("token is predicted,\n% of sequences")
    grid[2, 0].set_ylabel("dimension is largest,\n% of sequences")
    name_figure(figure, title)
    save_figure(figure, folder / "probe.png")


def finding(rows):
    """The title of the figure: what share of sequences the favourite token takes."""
    biased = [row for row in rows if row["log10_p"] <= -2]  # p of 0.01
    if not biased:
        ratio = max(row["ratio"] for row in rows)
        text = f"No favourite is seen: the top token comes up at most {ratio:.1f} times as often"
        return text + " as the most frequent of uniform draws"
    lengths = sorted({row["sequence_length"] for row in biased})
    if len(lengths) > 1 and len({row["model"] for row in rows}) == 1:
        shares = []
        for T in (lengths[0], lengths[-1]):
            of_length = [row["top1_frequency"] for row in biased if row["sequence_length"] == T]
            shares.append(f"{100 * sum(of_length) / len(of_length):.2g} % of sequences of {T:,} tokens")
        text = f"The favourite token takes {shares[0]}, {shares[1]}"
    else:
        percent = between([100 * row["top1_frequency"] for row in biased], ".2g")
        ratio = between([row["ratio"] for row in biased], ".1f")
        text = f"The favourite token takes {percent} % of sequences, "
        text += f"{ratio} times as many as the most frequent of uniform draws"
    if len(biased) < len(rows):
        text += f"; {len(rows) - len(biased)} of {len(rows)} rows show no favourite"
    return text


def draw_favourites(columns, title, folder) -> None:
    """probe.png of many rows: the favourites of each by rank, three panels in a row."""
    figure = Figure(figsize=(13, 0.7 + 2.9 * math.ceil(len(columns) / 3)), layout="constrained")
    grid = figure.subplots(math.ceil(len(columns) / 3), 3, squeeze=False, sharey=True)
    for axes in grid.flatten()[len(columns) :]:
        axes.set_axis_off()
    for (row, detail), axes in zip(columns, grid.flatten()):
        percent = 100 / row["num_sequences"]
        frequency = percent * np.array(detail["token_counts"])
        favourites(axes, row, frequency, percent * np.array(detail["uniform_counts"]))
    first = grid[0, 0]
    first.set_ylim(top=1.5 * max(BIASED_PERCENT[0], first.get_ylim()[1]))
    first.legend(loc="upper right", fontsize=9, frameon=False)
    figure.supylabel("token is predicted, % of sequences", fontsize=10)
    name_figure(figure, title)
    save_figure(figure, folder / "probe.png")


def favourites(axes, row, frequency, uniform) -> None:
    """How often the favourites of a row are predicted, by rank, in % of sequences, beside uniform draws."""
    order = np.arange(1, RANKS + 1)
    axes.bar(order[: len(frequency)], frequency[:RANKS], color=BLUE, label="the model")
    axes.plot(order, uniform, "--", color=VERMILION, label="uniform draws")
    text = f"token {row['top1_token']}: {row['top1_count']} of {row['num_sequences']:,} sequences,\n"
    p = f"1e{row['log10_p']:.0f}" if row["log10_p"] < 0 else "1"
    text += f"{row['ratio']:.1f} x uniform, p = {p}"
    axes.text(0.96, 0.72, text, transform=axes.transAxes, ha="right", va="top", fontsize=9)
    axes.set(xlabel="rank of the predicted token", xticks=[1, 5, 10, 15, 20])
    name = row["model"]
    if row["seed"] is not None:
        name += f", seed {row['seed']}"
    axes.set_title(f"{name}, {row['sequence_length']} tokens", fontsize=10)


def spikes(axes, numbers, heights, level) -> None:
    """A line of some height at each number; dashed, the expected count of the most frequent uniform draw."""
    axes.vlines(numbers, 0, heights, color=BLUE, linewidth=1)
    axes.axhline(level, ls="--", color=VERMILION, lw=1.2, label="the most frequent of uniform draws")


COMMANDS = {"": Command(probe, Settings())}
FIGURES = {"probe": draw_probe}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
