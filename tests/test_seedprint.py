"""seedprint.py: who is kin, of which seed, and for how long, by hand and from the command line."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import scipy.stats
import torch
from conftest import assert_refused, random_model, run_here

import init
from lib.files import read_json
from lib.random import random_tokens, random_vectors
from lineage import births
from lineage.family import kinship
from model import ModelConfig
from reproduce import disguise
from reproduce.disguise import newborn_source
from reproduce.released import released_test
from reproduce.robustness import noised
from seedprint import kendall, paper_test
from sources import checkpoint, saving

CONFIG = ModelConfig(300, 64, 3, 4, 64, 96, num_kv_heads=2)
OUTPUTS = ["--paper-sequences", 40, "--paper-length", 9, "--device", "cpu", "--dtype", "float32"]


def run(*words, out: Path, script="seedprint") -> tuple[dict, str]:
    done = run_here(script, *words, "--out", out)
    assert done.returncode == 0, done.stderr
    name = {"paper": "paper_test"}.get(words[0], words[0])
    return read_json(out / f"{name}.json"), done.stdout


def save_child(folder: Path, size: float, seed: int = 1) -> None:
    disguise.save(folder, noised(newborn_source(CONFIG, seed), size))


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Folders of a base, of its kin, and of strangers, one of which has the base's tables."""
    root = tmp_path_factory.mktemp("family")
    save_child(root / "base", 0)
    save_child(root / "child", 0.5)
    for way in ("rotate", "neurons"):
        disguise.save(root / way, disguise.disguised(newborn_source(CONFIG, 1), (way,)))
    save_child(root / "stranger", 0, seed=2)
    saving.save(root / "transplanted", init.newborn(CONFIG, 2, embedding_seed=1))
    other = replace(CONFIG, num_layers=2, d_ff=80, norm="layernorm", mlp="gelu", tie_embeddings=True)
    saving.save(root / "other", random_model(other))
    saving.save(root / "narrow", init.newborn(replace(CONFIG, d_model=32), 1))
    saving.save(root / "mlp", init.newborn(replace(CONFIG, sublayers="mlp"), 1))
    saving.save(root / "short", init.newborn(replace(CONFIG, context_length=40), 1))
    return root


NAMES = ["base", "child", "rotate", "neurons", "stranger", "transplanted", "other"]


@pytest.fixture(scope="module")
def compared(family, tmp_path_factory):
    words = ["compare", family / "base", *(family / name for name in NAMES), "--neurons"]
    return run(*words, out=tmp_path_factory.mktemp("compared"))


def test_compare_knows_kin_from_strangers(compared):
    result, text = compared
    rows = {Path(row["suspect"]).name: row for row in result["rows"]}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == dict.fromkeys(NAMES[:4], "same birth") | dict.fromkeys(NAMES[4:], "no evidence")
    for name in NAMES[:4]:
        assert (rows[name]["units_found"], rows[name]["units"]) == (96, 96)
    assert rows["child"]["body_z"] > 30
    assert rows["base"]["body_r"] == pytest.approx(1, abs=1e-5)  # float32 products
    for name in ("rotate", *NAMES[4:]):
        assert abs(rows[name]["body_z"]) < 4.5  # 6e-6 of normal ones are beyond
    assert rows["transplanted"]["embedding_z"] > 30
    assert "; the base's embedding matrix" in rows["transplanted"]["sentence"]
    for row in result["rows"]:
        assert f"{row['suspect']}: {row['verdict']}: {row['sentence']}" in text
    maps = [np.array(layers["share"]) for layers in result["layer_map"]]
    np.testing.assert_array_equal(maps[1] > 0.5, np.eye(3) > 0)
    assert maps[NAMES.index("other")].shape == (3, 2)


def test_a_suspect_that_cannot_be_read_costs_the_others_nothing(family, tmp_path):
    disguise.save(tmp_path / "cut", newborn_source(CONFIG, 1))
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:9000])
    names = [family / "base", tmp_path / "cut", family / "child", tmp_path / "nothing", family / "stranger"]
    done = run_here("seedprint", "compare", *names, "--out", tmp_path / "a")
    assert_refused(done, "2 of 4 suspects not read", "bytes, expected")
    rows = read_json(tmp_path / "a" / "compare.json")["rows"]
    assert [row["verdict"] for row in rows] == ["not read", "same birth", "not read", "no evidence"]
    assert rows[0].keys() == rows[1].keys() and "bytes, expected" in rows[0]["sentence"]
    told = {key for key, value in rows[2].items() if value is not None}
    assert told == {"base", "suspect", "verdict", "sentence"}
    for words in (["compare", *names[1:3]], ["matrix", *names]):
        assert_refused(run_here("seedprint", *words, "--out", tmp_path / "b"), "bytes, expected")
        assert not list(tmp_path.glob("b/*"))


def test_matrix(family, compared, tmp_path):
    folders = [str(family / name) for name in ("base", "stranger", "child", "other")]
    result, _ = run("matrix", *folders, "--neurons", out=tmp_path)
    pairs = {(row.pop("a"), row.pop("b")): row for row in result["rows"]}
    assert list(pairs) == list(itertools.combinations(folders, 2))
    kin = [pair for pair, row in pairs.items() if row["verdict"] == "same birth"]
    assert kin == [(folders[0], folders[2])]
    for row in compared[0]["rows"]:  # of the same pair the same
        pair = row["base"], row["suspect"]
        assert pair not in pairs or pairs[pair].items() <= row.items()


def test_matrix_of_what_has_no_layers(family, tmp_path):
    """Its rows are inconclusive, its closeness is none; equal layers without a distance are close."""
    weights = disguise.weights_of(newborn_source(CONFIG, 1))
    table = {"embed_tokens.weight": weights["model.embed_tokens.weight"]}
    layers = {name.replace("model.layers.", "cells."): w for name, w in weights.items() if "layers" in name}
    for name, tensors in (("table", table), ("layers", layers)):
        safetensors.torch.save_file(tensors, tmp_path / f"{name}.safetensors")
    names = [family / "base", tmp_path / "table.safetensors", tmp_path / "layers.safetensors"]
    result, _ = run("matrix", *names, out=tmp_path)
    assert [row["verdict"] for row in result["rows"]] == ["inconclusive", "same birth", "inconclusive"]
    row = {"verdict": "same birth", "distance": None, "r": None}
    assert kinship(row) == 1 and kinship(row | {"verdict": "inconclusive"}) == 0
    assert kinship(row | {"r": 0.7}) == 0.7 and kinship(row | {"distance": 0.1, "r": 0.7}) == 0.9


def last_states(folder: Path, inputs: torch.Tensor) -> np.ndarray:
    with torch.inference_mode():
        return checkpoint.load(folder).hidden(inputs, last_only=True).double().numpy()


@pytest.mark.parametrize(
    "inputs, draw, size", [("tokens", random_tokens, 300), ("gaussian", random_vectors, 64)]
)
def test_paper_test_by_whole_forward_passes(inputs, draw, size, family, tmp_path):
    folders = [family / name for name in ("base", "child", "stranger")]
    words = (*folders, *OUTPUTS, "--inputs", inputs, "--input-seed", 5)
    rows = run("paper", *words, out=tmp_path / "paper")[0]["rows"]
    done = run_here("reproduce.released", *words, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    both = read_json(tmp_path / "paper_test.json")["rows"]
    assert [row | both[i] for i, row in enumerate(rows)] == both  # released adds columns
    rows = both
    given = draw(5, range(40), 9, size)
    base, *suspects = (last_states(folder, given) for folder in folders)
    for row, suspect in zip(rows, suspects, strict=True):
        expected = paper_test(base, suspect)
        assert row["paper_k"] == expected["paper_k"]
        # two ranks are swapped
        assert row["paper_mean_tau"] == pytest.approx(expected["paper_mean_tau"], abs=2e-3)
        assert row["released_k"] == released_test(base, suspect)["released_k"]


def test_identify_names_the_seed(tmp_path):
    numbers = 32 * 64  # of one matrix, all
    save_child(tmp_path / "a", 2.0, seed=1234)
    result, text = run("identify", tmp_path / "a", "--seeds", 1000, 2000, out=tmp_path)
    best, *others = rows = result["rows"]
    assert result["answer"] == best["seed"] == 1234 and "seed 1234" in text
    # 1 / sqrt(1 + 2^2), with an error of 1 / sqrt(numbers)
    assert best["cosine"] == pytest.approx(5**-0.5, abs=4 * numbers**-0.5)
    for row in rows:
        assert row["z"] == pytest.approx(row["cosine"] * numbers**0.5, rel=1e-9)
        t = row["cosine"] * ((numbers - 1) / (1 - row["cosine"] ** 2)) ** 0.5
        log10_p = scipy.stats.t.logsf(t, numbers - 1) / np.log(10)
        expected = min(0, max(-300, log10_p) + np.log10(1001))
        assert row["family_log10_p"] == pytest.approx(expected, rel=1e-9)
    assert others[0]["family_log10_p"] > -6


def test_identify_knows_none(tmp_path):
    save_child(tmp_path / "a", 0, seed=5000)
    result, text = run("identify", tmp_path / "a", "--seeds", 0, 1500, out=tmp_path)
    assert result["answer"] is None and "none of init.py's seeds 0 to 1500" in text
    assert result["rows"][0]["family_log10_p"] > -6


STEPS = {0: 0.0, 1: 0.1, 20: 0.5}  # noise of each


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, seed, steps in (("a", 1, STEPS), ("b", 2, {0: 0.0, 15: 3.0}), ("one", 1, {0: 0.0})):
        for step, size in steps.items():
            save_child(root / name / f"step_{step:07}", size, seed)
    return root


def test_persistence(runs, tmp_path):
    tokens = random_tokens(0, range(40), 9, 300)
    birth = last_states(runs / "a" / "step_0000000", tokens)
    chosen = (-birth.mean(0)).argsort()[:32]
    words = ("persistence", runs / "a", "--stranger", runs / "b", *OUTPUTS)
    result, _ = run(*words, out=tmp_path, script="reproduce.lineage")
    rows = {row["step"]: row for row in result["rows"]}
    assert list(rows) == list(STEPS)
    for step, row in rows.items():
        folders = {"": runs / "a" / f"step_{step:07}"}
        folders["stranger_"] = runs / "b" / f"step_{0 if step == 0 else 15:07}"
        for prefix, folder in folders.items():
            outputs = last_states(folder, tokens)
            taus = kendall(birth, outputs, chosen)
            # two of 40 ranks may be swapped by rounding
            assert row[f"{prefix}mean_tau"] == pytest.approx(taus.mean(), abs=2e-3)
            assert row[f"{prefix}std_tau"] == pytest.approx(taus.std(), abs=2e-3)
        assert abs(row["stranger_mean_tau"]) < 0.2
    taus = [row["mean_tau"] for row in rows.values()]
    assert taus[0] == pytest.approx(1, abs=1e-12) and 1 > taus[1] > taus[2] > 0.1
    pair = [runs / "a" / f"step_{step:07}" for step in (0, 20)]
    (paper,) = run("paper", *pair, *OUTPUTS, out=tmp_path)[0]["rows"]
    assert all(rows[20][key] == paper[key] for key in ("paper_t_p", "paper_u_p"))


def test_mistakes(family, runs, tmp_path):
    base, narrow = family / "base", family / "narrow"
    model = init.newborn(CONFIG, 1)
    model.get_parameter(births.IDENTIFIED).data.zero_()
    saving.save(tmp_path / "zero", model)
    persistence = ("reproduce.lineage", "persistence")
    for script, command, words, expected in (
        ("seedprint", "compare", ["tiny_llama@1"], "at least 2"),
        ("seedprint", "paper", ["tiny_llama@1", "tiny_llama@2", "--paper-length", 257], "--paper-length 257"),
        ("seedprint", "paper", [base, narrow], "width"),
        ("seedprint", "paper", [base, family / "short"], "--paper-length 64"),
        ("seedprint", "identify", ["tiny_llama@1", "tiny_llama@2"], "tiny_llama@2"),
        ("seedprint", "identify", ["tiny_llama@1", "--seeds", 5, 3], "--seeds 5 3"),
        ("seedprint", "identify", [family / "mlp"], "v_proj"),
        ("seedprint", "identify", [tmp_path / "zero"], "it shows no seed"),
        (*persistence, [runs / "a", *OUTPUTS, "--stranger", narrow], "width"),
        (*persistence, [runs / "one"], "step_0000000"),
        (*persistence, ["nothing/here"], "step_0000000"),
    ):
        assert_refused(run_here(script, command, *words, "--out", tmp_path / "out"), expected)
        assert not list(tmp_path.glob("out/*.json"))


def test_units_of_two_widths_can_be_compared(family, tmp_path):
    (row,) = run("matrix", family / "base", family / "narrow", out=tmp_path)[0]["rows"]
    assert row["verdict"] == "no evidence" and row["body_z"] is None


def test_a_figure_that_fails_costs_no_result(family, tmp_path, monkeypatch):
    monkeypatch.setattr("lineage.family.draw_family", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("matrix", family / "base", family / "child", out=tmp_path)
    assert read_json(tmp_path / "matrix.json")["rows"][0]["verdict"] == "same birth"
