"""probe.py against exact arithmetic, a plain loop, and the same command run another way."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import KINDS, assert_refused, random_model, run_here, run_script

import common
import findings
import init
import probe
import stats
from common import UserError
from model import PRESETS

CONTRACT = {
    "model", "seed", "sequence_length", "num_sequences", "top1_token", "top1_count", "top1_frequency",
    "uniform_max_count", "ratio", "log10_p", "direction_token", "direction_matches", "mean_cosine",
}  # fmt: skip


def test_random_tokens_depend_on_seed_and_index_alone():
    whole = probe.random_tokens(3, range(10), 50, 1000)
    assert whole.shape == (10, 50) and whole.dtype == torch.int64
    assert torch.equal(whole[4:7], probe.random_tokens(3, range(4, 7), 50, 1000))
    assert torch.equal(whole[:, :20], probe.random_tokens(3, range(10), 20, 1000))
    assert len(whole.unique(dim=0)) == 10
    assert not torch.equal(whole, probe.random_tokens(4, range(10), 50, 1000))


def test_random_tokens_are_uniform():
    tokens = probe.random_tokens(0, range(2000), 50, 100).flatten()
    chi_square = ((tokens.bincount(minlength=100) - 1000.0) ** 2 / 1000).sum()
    assert 45 < chi_square < 170  # 99 degrees of freedom, p from 1e-6 to 1 - 1e-6
    wide = probe.random_tokens(0, range(2000), 50, 151_936)
    assert wide.min() < 50 and wide.max() > 151_886


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_counts_equal_a_plain_loop(name, batch_size):
    model, n, T = random_model(KINDS[name]), 60, 9
    measured = probe.probe(model, T, n, batch_size, input_seed=2)
    tokens, dimensions, units = [0] * 97, [0] * 32, []
    with torch.no_grad():
        for i in range(n):
            sequence = probe.random_tokens(2, range(i, i + 1), T, 97)
            tokens[int(model(sequence)[0, -1].argmax())] += 1
            state = model.hidden(sequence)[0, -1].double()
            dimensions[int(state.argmax())] += 1
            units.append((state / state.norm()).numpy())
    assert measured["token_counts"].tolist() == tokens
    assert measured["dimension_counts"].tolist() == dimensions
    row = probe.preference_row(model, measured, np.array([2.0]))
    cosines = [units[i] @ units[j] for i in range(n) for j in range(i)]
    assert row["mean_cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)  # float32 states
    assert row["top1_count"] == max(tokens) and row["top1_token"] == tokens.index(max(tokens))
    direction = np.mean(units, axis=0)
    weight = (model.lm_head or model.model.embed_tokens).weight.detach().double().numpy()
    assert row["direction_token"] == int((weight @ direction).argmax())
    assert row["direction_matches"] == (row["direction_token"] == row["top1_token"])


def test_a_newborn_prefers_and_an_attention_only_one_does_not():
    """BB Finding 1.1 and section 4.1, at a size for tests."""
    from dataclasses import replace

    rows = {}
    for sublayers in ("full", "attention"):
        model = init.newborn(replace(PRESETS["tiny_gpt2"], sublayers=sublayers), 42)
        measured = probe.probe(model, 64, 300, 32)
        rows[sublayers] = probe.preference_row(model, measured, stats.uniform_counts(300, 4096, 1))
    assert rows["full"]["mean_cosine"] > 0.05 > 0.02 > abs(rows["attention"]["mean_cosine"])
    assert rows["full"]["log10_p"] < -2 < rows["attention"]["log10_p"]


def test_figure_of_few_tokens(tmp_path):
    """Two sequences, one token: fewer favourites than the figure has ranks."""
    flags = ["--model", "tiny_gpt2", "--num-sequences", 2, "--sequence-length", 1, "--out", tmp_path]
    probe.run(common.parse_settings(probe.Settings, "", list(map(str, flags))))
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """One run of the command line on a tiny model: its output, its JSON and the folder."""
    out = tmp_path_factory.mktemp("results")
    flags = [
        "--model",
        "tiny_gpt2",
        "tiny_llama",
        "--seed",
        1,
        2,
        "--sequence-length",
        16,
        32,
        "--num-sequences",
        90,
    ]
    done = run_script("probe.py", *flags, "--batch-size", 7, "--out", out)
    assert done.returncode == 0, done.stderr
    return done, json.loads((out / "probe.json").read_text()), out, flags


def test_command_line(result):
    done, saved, out, _ = result
    assert sorted(path.name for path in out.iterdir()) == ["probe.json", "probe.png"]
    assert (out / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""  # no terminal, no progress bar
    assert {"experiment", "paper", "settings", "environment", "rows", "claims"} <= saved.keys()
    assert {"torch", "device", "dtype", "commit", "seconds"} <= saved["environment"].keys()
    assert len(saved["rows"]) == 8 and len(done.stdout.splitlines()) == 9 + len(saved["claims"])
    for row in saved["rows"]:
        assert CONTRACT <= row.keys() and row["num_sequences"] == 90
        assert row["top1_frequency"] == row["top1_count"] / 90
        assert row["ratio"] == pytest.approx(row["top1_count"] / row["uniform_max_count"])
        assert str(row["top1_token"]) in done.stdout
    for claim in saved["claims"]:
        assert claim.keys() == {"claim", "of", "paper", "measured", "holds", "verdict"}
        assert claim["holds"] is (claim["verdict"] == "holds")
    for row, detail in zip(saved["rows"], saved["details"]):
        assert (detail["tokens"][0], detail["token_counts"][0]) == (row["top1_token"], row["top1_count"])
        assert sum(detail["token_counts"]) == sum(detail["dimension_counts"]) == 90
        assert len(set(detail["tokens"])) == len(detail["token_counts"])
        assert detail["sequences_per_second"] > 0 and 0 < detail["mfu"] < 1


def test_two_ranks_give_the_rows_of_one_process(result, tmp_path):
    _, saved, _, flags = result
    done = run_script("probe.py", *flags, "--batch-size", 7, "--out", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "probe.json").read_text())
    assert two["environment"]["processes"] == 2
    assert len(done.stdout.splitlines()) == 9 + len(saved["claims"])  # one rank prints
    for ours, theirs in zip(saved["rows"], two["rows"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():  # sums in another order; threads may block a product otherwise
            assert theirs[key] == (pytest.approx(value, rel=1e-6) if type(value) is float else value), key
    for key in ("tokens", "token_counts", "dimension_counts"):
        assert [d[key] for d in two["details"]] == [d[key] for d in saved["details"]]


def test_more_ranks_than_batches(tmp_path):
    flags = ["--model", "tiny_gpt2", "--sequence-length", 8, "--num-sequences", 3, "--out", tmp_path]
    done = run_script("probe.py", *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "probe.json").read_text())["rows"][0]["num_sequences"] == 3


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model", "nano_gpt3"], ["nano_gpt3", "nano_gpt2"]),
        (["--seeds", "3"], ["--seeds", "--seed"]),
        (["--seed", "x"], ["--seed", "x"]),
        (["--init", "gpt"], ["gpt", "gpt2"]),
        (["--sequence-length", "1025"], ["1025", "1024"]),
        (["--sequence-length", "0"], ["0", "1 to 1024"]),
        (["--model", "nano_llama", "nano_gpt2", "--sequence-length", "64", "2048"], ["2048", "1024"]),
        (["--num-sequences", "1"], ["1", "at least 2"]),
        (["--batch-size", "0"], ["0", "at least 1"]),
        (["--out", "probe.py"], ["probe.py"]),
        (["--dtype", "float16"], ["float16", "bfloat16"]),
        (["nothing.py"], ["nothing.py"]),
        (["--seed", "42", "43", "42"], ["--seed", "42", "twice"]),
        (["--sequence-length", "8", "8"], ["--sequence-length", "8", "twice"]),
    ],
)
def test_bad_inputs(flags, words, tmp_path):
    out = [] if "--out" in flags else ["--out", tmp_path / "new"]
    assert_refused(run_here("probe.py", *flags, *out), *words)
    assert not (tmp_path / "new").exists()  # refused before anything was made


def test_nan_weights_are_named():
    model = init.newborn("tiny_gpt2", 0)
    model.model.layers[2].mlp.down_proj.weight.data[0, 0] = math.nan
    found = probe.probe(model, 8, 4, 2)
    with pytest.raises(UserError, match="NaN"):
        probe.preference_row(model, found, np.ones(1))


def test_memory_does_not_grow_with_the_number_of_sequences():
    """Peak resident memory of 80 x the sequences: within 5 %; were states kept, it would grow by 80 MB."""
    code = """
import resource, init, model, probe
config = model.ModelConfig(8, 4, 1, 8, 512, 8)
probe.probe(init.newborn(config, 0), 2, {n}, 250)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"""
    peaks = [int(run_script("-c", code.format(n=n)).stdout) for n in (500, 40_000)]
    assert peaks[1] < 1.05 * peaks[0], peaks


def rows_of(**columns) -> list[dict]:
    """Rows of a result from columns; what is not given is unremarkable."""
    n = len(next(iter(columns.values())))
    plain = {"model": "m", "seed": 1, "sequence_length": 64, "num_sequences": 10_000, "top1_token": 1}
    plain |= {
        "ratio": 20.0,
        "log10_p": -9.0,
        "top1_frequency": 0.1,
        "direction_matches": True,
        "dimension_ratio": 8,
    }
    return [plain | {name: values[i] for name, values in columns.items()} for i in range(n)]


@pytest.mark.parametrize(
    "columns, verdicts",
    [
        ({"log10_p": [-9, -2.1]}, {"1.1": True}),
        ({"log10_p": [-9, -1.9]}, {"1.1": False}),
        ({"ratio": [1, 1, 11]}, {"1a": False}),
        ({"ratio": [9, 11, 12]}, {"1a": True}),
        ({"sequence_length": [256, 64], "top1_frequency": [0.2, 0.1]}, {"1.2": True}),
        ({"sequence_length": [256, 64], "top1_frequency": [0.1, 0.2]}, {"1.2": False}),
        ({"seed": [1, 2], "top1_token": [5, 6]}, {"1.3": True}),
        ({"seed": [1, 2], "top1_token": [5, 5]}, {"1.3": False}),
        ({"dimension_ratio": [1.5, 2, 9]}, {"10": True}),
        ({"dimension_ratio": [1.5, 1.9, 9]}, {"10": False}),
        ({"direction_matches": [True] * 9}, {"2.2": True}),
        ({"direction_matches": [False] * 9}, {"2.2": False}),
        ({"seed": [1]}, {"1.2": None, "1.3": None}),  # one row cannot tell
    ],
)
def test_findings_are_computed(columns, verdicts):
    claims = list(findings.probe(rows_of(**columns)))
    for name, expected in verdicts.items():
        found = [c["holds"] for c in claims if f" {name})" in c["claim"]]
        assert found == ([] if expected is None else [expected]), claims


def test_the_papers_number_stands_only_beside_its_protocol():
    theirs = dict(model=["nano_gpt2"], num_sequences=[10_000])
    assert "58.5 x" in [c["paper"] for c in findings.probe(rows_of(**theirs))]
    assert {c["paper"] for c in findings.probe(rows_of(num_sequences=[10_000]))} == {None}
    assert {c["paper"] for c in findings.probe(rows_of(num_sequences=[1_000]))} == {None}


def test_importing_does_nothing():
    code = "import sys, torch; sys.argv = ['x', '--bad']; before = torch.get_rng_state(); "
    code += "import common, model, init, probe, bench; print(torch.equal(before, torch.get_rng_state()))"
    done = run_script("-c", code)
    assert done.stdout == "True\n" and done.stderr == ""
