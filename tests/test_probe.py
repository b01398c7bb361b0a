"""probe.py against exact arithmetic, scipy, plain loops, and the same command run otherwise."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import KINDS, ROOT, normal, random_model, run_here

import init
import probe
from lib import runtime
from lib.files import read_json
from lib.random import random_tokens, random_vectors
from lib.settings import UserError
from model import PRESETS
from probe import CosineStatistics
from reproduce.mechanisms import pairwise_cosine
from sources import saving
from sources.checkpoint import load_tokenizer


def statistics_of(states: torch.Tensor, batch_size: int = 1000) -> CosineStatistics:
    statistics = CosineStatistics(states.shape[1])
    for batch in states.split(batch_size):
        statistics.update(batch)
    return statistics


@pytest.mark.parametrize("n, d, shift", [(2, 5, 0.0), (150, 16, 3.0), (30, 3, 100.0)])
def test_cosine_statistics_equal_a_loop_over_pairs(n, d, shift):
    states = normal(n, d, seed=n).float() + shift
    statistics = statistics_of(states, batch_size=11)
    pairs = []
    for a, b in itertools.combinations(states.double().numpy(), 2):
        pairs.append(np.dot(a, b) / math.sqrt(np.dot(a, a) * np.dot(b, b)))
    row = statistics.summary()
    assert row["mean_cosine"] == pytest.approx(np.mean(pairs), abs=1e-12)  # float64 sums of numbers up to 1
    assert row["std_cosine"] == pytest.approx(np.std(pairs), abs=1e-6)  # a difference's root: half the digits
    torch.testing.assert_close(statistics.direction(), F.normalize(states.double()).mean(0))
    # batches are sums in another order, of which the std keeps half the digits
    assert pairwise_cosine(states) == pytest.approx(row, abs=1e-6)


def test_lengths_play_no_part():
    states = torch.tensor([[1e-30, 0.0], [-1e30, 0.0]])
    # float64, and a standard deviation that is the root of a difference
    assert statistics_of(states).summary() == pytest.approx({"mean_cosine": -1, "std_cosine": 0}, abs=1e-7)
    for seed in range(9):  # of equal states that difference is rounding, of either sign
        assert statistics_of(normal(1, 7, seed=seed).expand(5, 7)).summary()["std_cosine"] < 1e-7


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_cosine_statistics_refuse_states_without_direction(bad):
    statistics = statistics_of(torch.tensor([[1.0, 2.0, 3.0], [bad, bad, bad]]))
    with pytest.raises(UserError, match="zero or not finite"):
        statistics.summary()


def exact_log10_p(count: int, n: int, V: int) -> float:
    """log10 of V P[Binomial(n, 1/V) >= count] in integers; math.log10 takes integers of any size."""
    tail = sum(math.comb(n, j) * (V - 1) ** (n - j) for j in range(count, n + 1))
    return min(0.0, math.log10(tail * V) - n * math.log10(V))


# Of the last two p is below 1e-308.
COUNTS = [(1, 10, 5), (2, 2, 32000), (33, 1000, 50257), (1000, 1000, 50257), (400, 2000, 97)]


@pytest.mark.parametrize("count, n, V", COUNTS)
def test_binomial_tail_against_exact_integers(count, n, V):
    # log-gammas of about n log n, good to 1e-16 relative, bound the error
    expected = pytest.approx(exact_log10_p(count, n, V), rel=1e-9, abs=1e-9)
    assert probe.binomial_log10_p(count, n, V) == expected


@pytest.mark.parametrize("n, V", [(2, 5), (5, 7)])
def test_uniform_baseline_by_all_outcomes(n, V):
    outcomes = itertools.product(range(V), repeat=n)
    counts = [np.sort(np.bincount(outcome, minlength=max(n, V)))[::-1][:n] for outcome in outcomes]
    # A count's standard deviation is below 1.2 here: five standard errors of 4,000 draws.
    expected = pytest.approx(np.mean(counts, axis=0), abs=5 * 1.2 / math.sqrt(4000))
    assert probe.uniform_counts(n, V, n, repetitions=4000) == expected


def test_random_inputs_depend_on_seed_and_index_alone():
    whole = random_tokens(3, range(10), 50, 1000)
    assert torch.equal(whole[4:7, :20], random_tokens(3, range(4, 7), 20, 1000))
    assert len(torch.cat((whole, random_tokens(4, range(10), 50, 1000))).unique(dim=0)) == 20
    vectors = random_vectors(3, range(10), 6, 8)
    assert torch.equal(vectors[4:7, :5], random_vectors(3, range(4, 7), 5, 8))


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_a_row_means_what_it_says(name, monkeypatch):
    """Against sixty sequences of nine tokens, one at a time and without any shortcut."""
    model = random_model(KINDS[name])
    tokens, dimensions, units = [0] * 97, [0] * 32, []
    with torch.no_grad():
        for i in range(60):
            sequence = random_tokens(2, range(i, i + 1), 9, 97)
            tokens[int(model(sequence)[0, -1].argmax())] += 1
            state = model.hidden(sequence)[0, -1].double()
            dimensions[int(state.argmax())] += 1
            units.append((state / state.norm()).numpy())
    for batch_size in (1, 7, 64):
        monkeypatch.setattr(probe, "default_batch_size", lambda device, T, size=batch_size: size)
        counts = probe.count_predictions(model, 9, 60, input_seed=2)
        assert counts.tokens.tolist() == tokens
        assert counts.dimensions.tolist() == dimensions
    row = probe.preference(model, counts)
    cosines = [units[i] @ units[j] for i in range(60) for j in range(i)]
    draws = np.random.default_rng(0)
    largest = [np.bincount(draws.integers(97, size=60)).max() for _ in range(4000)]
    error = 5 * np.std(largest) * math.sqrt(1 / 4000 + 1 / 1000)  # ours simulates a thousand
    of_dimension = np.mean([np.bincount(draws.integers(32, size=60)).max() for _ in range(4000)])
    weight = model.head_weight.detach().double().numpy()
    direction_token = int((weight @ np.mean(units, axis=0)).argmax())
    top = max(tokens)
    expected = {
        "num_sequences": 60,
        "top1_token": tokens.index(top),  # of equals the lowest
        "top1_count": top,
        "uniform_max_count": pytest.approx(np.mean(largest), abs=error),
        "ratio": top / row["uniform_max_count"],
        "log10_p": pytest.approx(exact_log10_p(top, 60, 97)),
        "direction_token": direction_token,
        "direction_matches": direction_token == tokens.index(top),
        "mean_cosine": pytest.approx(np.mean(cosines), abs=1e-6),  # float32 states
        "std_cosine": pytest.approx(np.std(cosines), abs=1e-6),
        "dimension_ratio": pytest.approx(max(dimensions) / of_dimension, rel=0.03),
    }
    assert row == expected


@pytest.mark.parametrize("T", [16, 64])
def test_two_ranks_count_what_one_does(T, monkeypatch):
    """Of the shorter sequences there is one batch, so that one rank has none. Sums are made in place."""
    model = random_model(KINDS["gpt2"])
    expected = probe.preference(model, probe.count_predictions(model, T, 90))
    sent = []

    def send(tensor):
        sent.append(tensor.clone())
        return tensor

    def receive(tensor):
        return tensor.add_(sent.pop(0))

    monkeypatch.setattr(runtime, "world_size", lambda: 2)
    for rank, sum_over_ranks in ((1, send), (0, receive)):
        monkeypatch.setattr(runtime, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(probe, "sum_over_ranks", sum_over_ranks)
        counts = probe.count_predictions(model, T, 90)
    assert not sent
    assert probe.preference(model, counts) == pytest.approx(expected, rel=1e-6)  # sums in another order


def test_a_folder_and_the_text_of_its_tokens(tmp_path):
    """A checkpoint's tokenizer says what its favourites mean; a folder without one has no such columns."""
    tokenizer = load_tokenizer("bpe:400", [(ROOT / "probe.py").read_text()])
    small = replace(PRESETS["backcopy"], vocab_size=402)  # of the last two the tokenizer knows nothing
    model = init.newborn(small, 3)
    saving.save(tmp_path / "run" / "step_0000005", model, tokenizer=tokenizer)
    saving.save(tmp_path / "plain", model)
    folders = [tmp_path / "run", tmp_path / "plain"]
    flags = ["--num-sequences", 20, "--sequence-length", 4, "--device", "cpu", "--dtype", "float32"]
    done = run_here("probe.py", "--model", *folders, *flags, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    named, plain = read_json(tmp_path / "probe.json")["rows"]
    expected = probe.preference(model, probe.count_predictions(model, 4, 20))
    assert plain == {"model": str(folders[1]), "seed": None, "sequence_length": 4, **expected}
    text = repr(tokenizer.text(expected["top1_token"]))
    assert named == plain | {"model": str(folders[0]), "top1_text": text}
