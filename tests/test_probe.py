"""probe.py against exact arithmetic, a plain loop, and the same command run otherwise."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import KINDS, ROOT, assert_refused, random_model, run_here, run_script
from test_cosines import exact_log10_p

import init
import probe
from lib import checkpoint, data, inputs
from lib.settings import UserError
from model import PRESETS

CONTRACT = {
    "model",
    "seed",
    "sequence_length",
    "num_sequences",
    "top1_token",
    "top1_count",
    "top1_frequency",
    "uniform_max_count",
    "ratio",
    "log10_p",
    "direction_token",
    "direction_matches",
    "mean_cosine",
}


def saved(folder) -> dict:
    """What probe.json holds."""
    return json.loads((folder / "probe.json").read_text())


# ---- what is fed -------------------------------------------------------------------------------------------


def test_random_tokens_depend_on_seed_and_index_alone():
    whole = inputs.random_tokens(3, range(10), 50, 1000)
    assert whole.shape == (10, 50) and whole.dtype == torch.int64
    assert torch.equal(whole[4:7], inputs.random_tokens(3, range(4, 7), 50, 1000))
    assert torch.equal(whole[:, :20], inputs.random_tokens(3, range(10), 20, 1000))
    assert len(whole.unique(dim=0)) == 10
    assert not torch.equal(whole, inputs.random_tokens(4, range(10), 50, 1000))
    vectors = inputs.random_vectors(3, range(10), 6, 8)
    assert torch.equal(vectors[4:7, :5], inputs.random_vectors(3, range(4, 7), 5, 8))


# ---- what is counted ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt2", "llama_gqa"])
def by_hand(request):
    """A model, and what sixty sequences of nine tokens make of it, one at a time and without any shortcut."""
    model = random_model(KINDS[request.param])
    tokens, dimensions, units = [0] * 97, [0] * 32, []
    with torch.no_grad():
        for i in range(60):
            sequence = inputs.random_tokens(2, range(i, i + 1), 9, 97)
            tokens[int(model(sequence)[0, -1].argmax())] += 1
            state = model.hidden(sequence)[0, -1].double()
            dimensions[int(state.argmax())] += 1
            units.append((state / state.norm()).numpy())
    return model, tokens, dimensions, units


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_a_row_means_what_it_says(by_hand, batch_size):
    model, tokens, dimensions, units = by_hand
    counts = probe.count_predictions(model, 9, 60, batch_size, input_seed=2)
    assert counts["token_counts"].tolist() == tokens
    assert counts["dimension_counts"].tolist() == dimensions
    row = probe.preference(model, counts)
    cosines = [units[i] @ units[j] for i in range(60) for j in range(i)]
    assert row["mean_cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)  # float32 states
    assert row["std_cosine"] == pytest.approx(np.std(cosines), abs=1e-6)
    assert (row["num_sequences"], row["top1_count"]) == (60, max(tokens))
    assert row["top1_token"] == tokens.index(max(tokens))  # of equals the lowest
    assert row["top1_frequency"] == max(tokens) / 60
    assert row["log10_p"] == pytest.approx(exact_log10_p(max(tokens), 60, 97))
    draws = np.random.default_rng(0)
    largest = [np.bincount(draws.integers(97, size=60)).max() for _ in range(4000)]
    error = np.std(largest) * math.sqrt(1 / 4000 + 1 / 1000)  # ours simulates a thousand
    assert row["uniform_max_count"] == pytest.approx(np.mean(largest), abs=5 * error)
    assert row["ratio"] == row["top1_count"] / row["uniform_max_count"]
    weight = (model.lm_head or model.model.embed_tokens).weight.detach().double().numpy()
    assert row["direction_token"] == int((weight @ np.mean(units, axis=0)).argmax())
    assert row["direction_matches"] == (row["direction_token"] == row["top1_token"])
    largest = [np.bincount(draws.integers(32, size=60)).max() for _ in range(4000)]
    assert row["dimension_ratio"] == pytest.approx(max(dimensions) / np.mean(largest), rel=0.03)


def test_nan_weights_are_named():
    model = init.newborn("tiny_gpt2", 0)
    model.model.layers[2].mlp.down_proj.weight.data[0, 0] = math.nan
    counts = probe.count_predictions(model, 8, 4, 2)
    with pytest.raises(UserError, match="NaN"):
        probe.preference(model, counts)


# ---- the command -------------------------------------------------------------------------------------------

MODELS = ["--model", "backcopy", "--seed", 1, 2]
SIZES = ["--sequence-length", 16, 64, "--num-sequences", 90, "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The command line on tiny models: what it prints, its JSON, and the folder."""
    out = tmp_path_factory.mktemp("results")
    done = run_here("probe.py", *MODELS, *SIZES, "--out", out)
    assert done.returncode == 0, done.stderr
    return done, saved(out), out


def test_command_line(result):
    done, found, out = result
    assert sorted(path.name for path in out.iterdir()) == ["probe.json", "probe.png"]
    assert (out / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""  # no terminal, no progress bar
    assert found.keys() == {"experiment", "paper", "settings", "environment", "rows"}
    models = [(row["model"], row["seed"], row["sequence_length"]) for row in found["rows"]]
    assert models == [("backcopy", seed, T) for seed in (1, 2) for T in (16, 64)]
    assert len(done.stdout.splitlines()) == 6
    for row in found["rows"]:
        assert CONTRACT <= row.keys() and row["num_sequences"] == 90
        assert str(row["top1_token"]) in done.stdout


def test_two_processes_give_the_rows_of_one(result, tmp_path):
    """Of the shorter sequences there is one batch, so that one process has none."""
    _, found, _ = result
    done = run_script("probe.py", *MODELS, *SIZES, "--out", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    two = saved(tmp_path)
    assert two["environment"]["processes"] == 2
    assert len(done.stdout.splitlines()) == 6  # one rank prints
    for ours, theirs in zip(found["rows"], two["rows"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():  # sums in another order; threads may block a product otherwise
            assert theirs[key] == (pytest.approx(value, rel=1e-6) if type(value) is float else value), key


def test_a_folder_and_the_text_of_its_tokens(tmp_path):
    """A checkpoint's tokenizer says what its favourites mean; a folder without one has no such columns."""
    (tmp_path / "text.txt").write_text((ROOT / "probe.py").read_text())
    prepared = data.Settings(
        source=(str(tmp_path / "text.txt"),), tokenizer="bpe:400", out=str(tmp_path / "set")
    )
    tokens = data.TokenData(data.prepare(prepared))
    small = replace(PRESETS["backcopy"], vocab_size=402)  # of the last two the tokenizer knows nothing
    model = init.newborn(small, 3)
    checkpoint.save(tmp_path / "run" / "step_0000005", model, tokenizer=tokens.load_tokenizer())
    checkpoint.save(tmp_path / "plain", model)
    folders = [tmp_path / "run", tmp_path / "plain"]
    flags = ["--num-sequences", 20, "--sequence-length", 4, "--dtype", "float32", "--out", tmp_path]
    done = run_here("probe.py", "--model", *folders, *flags)
    assert done.returncode == 0, done.stderr
    named, plain = saved(tmp_path)["rows"]
    expected = probe.preference(model, probe.count_predictions(model, 4, 20))
    assert plain == {"model": str(folders[1]), "seed": None, "sequence_length": 4, **expected}
    texts = tokens.load_tokenizer().text
    assert named == plain | {
        "model": str(folders[0]),
        "top1_text": repr(texts(expected["top1_token"])),
    }
    assert texts(401) == "" and named["top1_text"] in done.stdout


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model", "nano_gpt3"], ["nano_gpt3", "nano_gpt2"]),
        (["--seeds", "3"], ["--seeds", "--seed"]),
        (["--model", "nano_llama", "nano_gpt2", "--sequence-length", "64", "2048"], ["2048", "1 to 1024"]),
        (["--num-sequences", "1"], ["num_sequences", ">= 2"]),
        (["--out", "probe.py"], ["--out", "probe.py"]),
    ],
)
def test_refusals(flags, words, tmp_path):
    out = [] if "--out" in flags else ["--out", tmp_path / "new"]
    assert_refused(run_here("probe.py", *flags, *out), *words)
    assert not (tmp_path / "new").exists()  # refused before anything was made


def test_importing_does_nothing(tmp_path):
    """No script draws a number, reads the command line or needs an optional package when it is imported."""
    script = tmp_path / "fresh.py"
    script.write_text(
        "import sys, torch\n"
        "before = torch.get_rng_state()\n"
        "import contraction, init, model, probe, seedprint, sinks, train\n"
        "print(torch.equal(before, torch.get_rng_state()))\n"
        "print({'datasets', 'transformers'} & sys.modules.keys() or 'nothing more')\n"
    )
    done = run_script(script, "--bad", env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.split("\n")[:2] == ["True", "nothing more"]
