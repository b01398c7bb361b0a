"""Which tokens does an untrained model already prefer? (BB section 3, Table 1, Figures 1a and 10)

    python probe.py --seed 42 43                                # 1,000 sequences of 64 tokens for each seed
    python probe.py --model nano_llama --num-sequences 10000 --sequence-length 64 256 1024
    python probe.py --model runs/laptop /models/Llama-2-7b-hf nano_llama@7      # checkpoints, and PRESET@SEED
    torchrun --nproc-per-node 2 probe.py                        # the same rows, from two processes

Random sequences go in, the argmax of the last position's logits comes out. Were the newborn a blank slate, N
sequences would pick N random tokens; instead they agree. For each model, seed and length a row says on which
token and how often (`top1_*`), how often the luckiest token of N uniform draws would come up
(`uniform_max_count`), how improbable the count is (`log10_p`), how alike the final states are
(`mean_cosine`), and which token their mean direction alone foretells (`direction_token`, BB Finding 2.2).
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import common
from checkpoint import load, models, own_tokenizer, shared_context
from common import setting
from experiment import conduct
from figures import BLUE, VERMILION, save_figure
from init import SCHEMES, STD, keyed_generator
from model import Transformer, forward_flops
from stats import CosineStatistics, binomial_log10_p, uniform_counts
from tokenizer import token_text

COLUMNS = "model seed sequence_length num_sequences top1_token top1_count uniform_max_count ratio log10_p"
COLUMNS += " direction_token mean_cosine top1_text"
DEFAULTS = {"cpu": (1000, [64], 2048), "cuda": (10_000, [1024], 65_536)}  # sequences, lengths, batch's tokens
RANKS = 20  # favourites drawn in Figure 1a


def _default(i: int) -> str:
    return ", ".join(f"{device}: {values[i]}" for device, values in DEFAULTS.items())


@dataclass
class Settings(common.RunSettings):
    """What `probe.py` can be told."""

    model: tuple[str, ...] = setting(("nano_gpt2",), "presets, PRESET@SEED, or checkpoint folders")
    seed: tuple[int, ...] = setting((42,), "seeds of the presets' weights")
    embedding_seed: int = setting(0, "seed of embedding and head, the same for all seeds (BB B.2)")
    init: str = setting("gpt2", "how the weights are drawn", SCHEMES)
    input_seed: int = setting(0, "seed of the random sequences")
    num_sequences: int | None = setting(None, "sequences for each model and length; " + _default(0), least=2)
    sequence_length: tuple[int, ...] | None = setting(None, "tokens in a sequence; " + _default(1))
    batch_size: int | None = setting(None, "sequences in a forward pass; by tokens, " + _default(2), least=1)


def streams(kind: str, input_seed: int, indices: range):
    """A generator for each sequence number, a function of (kind, input_seed, number) alone: counter based."""
    key = keyed_generator(kind, input_seed).bit_generator.state["state"]["key"]
    return (np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, i])) for i in indices)


def random_tokens(input_seed: int, indices: range, T: int, vocab_size: int) -> torch.Tensor:
    """Sequences number `indices`, (n, T) int64, i.i.d. uniform over the vocabulary.

    Sequence i is the same in any batch and any process, and a shorter one is the beginning of a longer one.
    """
    tokens = [stream.integers(vocab_size, size=T) for stream in streams("tokens", input_seed, indices)]
    return torch.from_numpy(np.stack(tokens))


def gaussian_vectors(input_seed: int, indices: range, T: int, d: int) -> torch.Tensor:
    """The like of an embedded sequence without tokens, (n, T, d) float32 i.i.d. N(0, 0.02^2) (BB 4.1)."""
    vectors = [s.standard_normal((T, d), np.float32) for s in streams("vectors", input_seed, indices)]
    return torch.from_numpy(np.stack(vectors)).mul_(STD)


def default_batch(device: torch.device, T: int) -> int:
    """Sequences of T tokens in a forward pass; two at least, since states are compared within a batch."""
    return max(2, DEFAULTS[device.type][2] // T)


@torch.inference_mode()
def probe(
    model: Transformer, T: int, num_sequences: int, batch_size=None, input_seed=0, label="", gaussian=False
) -> dict:
    """Feed random sequences, of tokens or `gaussian` vectors, and keep what does not grow with their number.

    Returns `token_counts` (V,) and `dimension_counts` (d,), how often each token has the largest logit and
    each dimension the largest final state; `cosines`, CosineStatistics of the final states; and `layers`, of
    the last position's stream before and after each block, for `gaussian` inputs (otherwise empty).
    Under torchrun each rank takes a share of the batches, and all return the sums.
    """
    config, device = model.config, model.model.norm.weight.device
    batch_size = batch_size or default_batch(device, T)
    token_counts = torch.zeros(config.vocab_size, dtype=torch.int64, device=device)
    dimension_counts = torch.zeros(config.d_model, dtype=torch.int64, device=device)
    cosines = CosineStatistics(config.d_model, device)
    layers = [CosineStatistics(config.d_model, device) for _ in range(config.num_layers + 1) if gaussian]
    draw, width = (gaussian_vectors, config.d_model) if gaussian else (random_tokens, config.vocab_size)
    watch = (lambda layer, x: layers[layer].update(x[:, -1])) if gaussian else None
    mine = common.shard(-(-num_sequences // batch_size))  # whole batches: the same arithmetic for any share
    total = min(len(mine) * batch_size, num_sequences)
    with common.progress(total=total, desc=label, unit=" sequences") as bar:
        for i in mine:
            indices = range(i * batch_size, min((i + 1) * batch_size, num_sequences))
            inputs = draw(input_seed, indices, T, width).to(device)
            states = model.hidden(inputs, last_only=True, on_state=watch)  # (n, d)
            cosines.update(states)
            token_counts += model.unembed(states).argmax(dim=1).bincount(minlength=config.vocab_size)
            dimension_counts += states.argmax(dim=1).bincount(minlength=config.d_model)
            bar.update(len(indices))
    counts = common.sum_over_ranks(token_counts), common.sum_over_ranks(dimension_counts)
    result = {"token_counts": counts[0].cpu(), "dimension_counts": counts[1].cpu()}
    return result | {"cosines": cosines.reduce(), "layers": [layer.reduce() for layer in layers]}


def preference_row(model: Transformer, measured: dict, baseline: np.ndarray) -> dict:
    """The part of a row that `measured`, what `probe` returned, decides; ties go to the lower token."""
    counts, n = measured["token_counts"], int(measured["token_counts"].sum())
    dimensions = measured["dimension_counts"]
    token, top = int(counts.argmax()), int(counts.max())
    direction = measured["cosines"].direction().float()
    with torch.inference_mode():
        direction_token = int(model.unembed(direction).argmax())
    mean, std = measured["cosines"].mean_and_std()
    return {
        "num_sequences": n,
        "top1_token": token,
        "top1_count": top,
        "top1_frequency": top / n,
        "uniform_max_count": float(baseline[0]),
        "ratio": top / float(baseline[0]),
        "log10_p": binomial_log10_p(top, n, model.config.vocab_size),
        "direction_token": direction_token,
        "direction_matches": direction_token == token,
        "mean_cosine": mean,
        "std_cosine": std,
        "dimension_ratio": int(dimensions.max()) / float(uniform_counts(n, len(dimensions), 1)[0]),
    }


def figure_detail(measured: dict, baseline: np.ndarray) -> dict:
    """What the figure needs beyond a row: the 1,000 favourites, all dimensions, what uniform draws give."""
    counts, dimensions = measured["token_counts"], measured["dimension_counts"]
    top = counts.argsort(descending=True, stable=True)[:1000]
    top = top[counts[top] > 0]
    return {
        "tokens": top.tolist(),
        "token_counts": counts[top].tolist(),
        "uniform_counts": baseline.tolist(),
        "dimension_counts": dimensions.tolist(),
        "uniform_max_dimension_count": uniform_counts(int(counts.sum()), len(dimensions), 1)[0],
    }


def measure(settings: Settings, device: torch.device, dtype: torch.dtype) -> dict:
    """Probe every model, seed and length of `settings`: `rows`, and `details` for the figure."""
    num_sequences, lengths, _ = DEFAULTS[device.type]
    context = shared_context(settings.model)
    num_sequences = settings.num_sequences or num_sequences
    lengths = settings.sequence_length or [min(T, context) for T in lengths]
    peak, rows, details = common.known_peak(device, dtype), [], []
    for name, seed in models(settings.model, settings.seed):
        model = load(name, device, dtype, settings.init, (seed, settings.embedding_seed))
        text = token_text(file) if seed is None and (file := own_tokenizer(name)) else None
        for T in lengths:
            key = {"model": name, "seed": seed, "sequence_length": T}
            batch_size, begun = settings.batch_size or default_batch(device, T), time.perf_counter()
            label = f"{name} seed {seed} T={T}"
            measured = probe(model, T, num_sequences, batch_size, settings.input_seed, label)
            rate = num_sequences / (time.perf_counter() - begun)
            speed = {"batch_size": batch_size, "sequences_per_second": rate}
            speed["mfu"] = rate * forward_flops(model.config, T, last_only=True) / peak
            baseline = uniform_counts(num_sequences, model.config.vocab_size, RANKS)
            row = preference_row(model, measured, baseline)
            named = {f"{k}_text": text(row[f"{k}_token"]) for k in ("top1", "direction") if text}
            rows.append(key | row | named)
            details.append(key | speed | figure_detail(measured, baseline))
    return {"rows": rows, "details": details}


def run(settings: Settings) -> dict:
    """Make the experiment; write probe.json and probe.png; return the JSON."""
    paper = "BB Table 1, Figures 1a and 10"
    return conduct(settings, "probe", paper, measure, COLUMNS, plot=plot)


def plot(result: dict, folder: Path) -> None:
    """probe.png: BB Figures 1a and 10, a column for each of the first six rows; dashed: uniform draws.

    From the top: how often each favourite is predicted, by rank; each predicted token, by number; how often
    each hidden dimension holds the largest final state.
    """
    columns = list(zip(result["rows"], result["details"]))[:6]
    figure = Figure(figsize=(1.2 + 3.6 * len(columns), 7.5), layout="constrained")
    grid = figure.subplots(3, len(columns), squeeze=False, sharey="row")
    for (row, detail), (ranks, tokens, dimensions) in zip(columns, grid.T):
        percent = 100 / row["num_sequences"]
        counts = np.array(detail["token_counts"])
        uniform = percent * np.array(detail["uniform_counts"])
        order = np.arange(1, RANKS + 1)
        ranks.bar(order[: len(counts)], percent * counts[:RANKS], color=BLUE, label="the model")
        ranks.plot(order, uniform, "--", color=VERMILION, label="uniform draws")
        text = f"token {row['top1_token']}: {row['top1_count']} of {row['num_sequences']:,} sequences\n"
        text += f"{row['ratio']:.1f} x uniform, p = 1e{row['log10_p']:.0f}"
        ranks.text(0.96, 0.72, text, transform=ranks.transAxes, ha="right", va="top", fontsize=9)
        ranks.set(xlabel="rank of the predicted token", xticks=[1, 5, 10, 15, 20])
        of = row["model"] if row["seed"] is None else f"{row['model']}, seed {row['seed']}"
        ranks.set_title(f"{of}, {row['sequence_length']} tokens", fontsize=10)
        tokens.vlines(detail["tokens"], 0, percent * counts, color=BLUE, linewidth=1)
        tokens.axhline(
            uniform[0], ls="--", color=VERMILION, lw=1.2, label="the most frequent of uniform draws"
        )
        tokens.set_xlabel("token number")
        share = percent * np.array(detail["dimension_counts"])
        dimensions.vlines(np.arange(len(share)), 0, share, color=BLUE, linewidth=1)
        dimensions.axhline(percent * detail["uniform_max_dimension_count"], ls="--", color=VERMILION, lw=1.2)
        dimensions.set_xlabel("hidden dimension")
    for axes, room in zip(grid[:2, 0], (1.6, 1.2)):  # for words
        axes.set_ylim(top=room * axes.get_ylim()[1])
        axes.legend(loc="upper right", fontsize=9, frameon=False)
    for axes, label in zip(grid[:, 0], ("token is predicted", "token is predicted", "dimension is largest")):
        axes.set_ylabel(f"{label},\n% of sequences")
    save_figure(figure, folder / "probe.png")


def plan(words: list[str]) -> list:
    """The settings of a command line, and what to do."""
    settings = common.parse_settings(Settings, __doc__, words)
    shared_context(settings.model, settings.sequence_length)
    models(settings.model, settings.seed)
    return [(settings, partial(run, settings))]


if __name__ == "__main__":
    common.run(plan)
