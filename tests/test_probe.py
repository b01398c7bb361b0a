"""probe.py against exact arithmetic, a plain loop, and the same command run otherwise."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import KINDS, ROOT, random_model, run_here
from test_cosines import exact_log10_p

import init
import probe
import probe as cosines
from lib import runtime
from lib.files import read_json
from lib.random import random_tokens, random_vectors
from model import PRESETS
from sources import checkpoint
from sources.tokenizers import load_tokenizer


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
        "top1_frequency": top / 60,
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
        for module in (probe, cosines):
            monkeypatch.setattr(module, "sum_over_ranks", sum_over_ranks)
        counts = probe.count_predictions(model, T, 90)
    assert not sent
    assert probe.preference(model, counts) == pytest.approx(expected, rel=1e-6)  # sums in another order


def test_a_folder_and_the_text_of_its_tokens(tmp_path):
    """A checkpoint's tokenizer says what its favourites mean; a folder without one has no such columns."""
    tokenizer = load_tokenizer("bpe:400", [(ROOT / "probe.py").read_text()])
    small = replace(PRESETS["backcopy"], vocab_size=402)  # of the last two the tokenizer knows nothing
    model = init.newborn(small, 3)
    checkpoint.save(tmp_path / "run" / "step_0000005", model, tokenizer=tokenizer)
    checkpoint.save(tmp_path / "plain", model)
    folders = [tmp_path / "run", tmp_path / "plain"]
    flags = ["--num-sequences", 20, "--sequence-length", 4, "--device", "cpu", "--dtype", "float32"]
    done = run_here("probe.py", "--model", *folders, *flags, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    named, plain = read_json(tmp_path / "probe.json")["rows"]
    expected = probe.preference(model, probe.count_predictions(model, 4, 20))
    assert plain == {"model": str(folders[1]), "seed": None, "sequence_length": 4, **expected}
    text = repr(tokenizer.text(expected["top1_token"]))
    assert named == plain | {"model": str(folders[0]), "top1_text": text}
