"""seedprint.py as a user runs it: every subcommand at a tiny size, and what mistakes get: one line."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import assert_refused, random_model, run_here, run_script
from evade import evade

import baselines
import checkpoint
import data
import findings
import init
import seedprint
from baselines import kendall, last_positions, top_dimensions
from checkpoint import Newborn
from model import PRESETS, ModelConfig

CONFIG = ModelConfig(300, 64, 3, 4, 64, 96, num_kv_heads=2)
ENVELOPE = {"experiment", "paper", "settings", "environment", "rows", "claims"}
COMPARE = "base suspect verdict num_rows matched mismatched smallest_visible relabel_z relabel_log10_p"
COMPARE += (
    " permutation_p body_z body_matched embedding_z embedding_matched basis_free basis_free_z basis_free_p"
)
PAPER = "paper_k paper_mean_tau paper_t_p paper_u_p closed_form_z"
MATRIX = "a b relabel_z body_z verdict"
PERSISTENCE = "step mean_tau std_tau stranger_mean_tau stranger_std_tau relabel_z paper_t_p paper_u_p"
TINY = ["--num-sequences", 3, "--sequence-length", 16, "--permutations", 199, "--dtype", "float32"]
SHORT = ["--paper-sequences", 40, "--paper-length", 9]


script = functools.partial(run_here, "seedprint.py")


def is_png(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def rows_of(path) -> list[dict]:
    result = json.loads(path.read_text())
    assert ENVELOPE <= result.keys() and result["experiment"] == path.stem and result["claims"]
    return result["rows"]


def noised(model, size: float, seed: int = 0):
    """Noise of `size` times each matrix's standard deviation, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += size * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Folders of a base, of a noised child, and of two strangers, one of them another architecture."""
    root = tmp_path_factory.mktemp("family")
    checkpoint.save(root / "base", init.newborn(CONFIG, 1))
    checkpoint.save(root / "child", noised(init.newborn(CONFIG, 1), 0.5))
    checkpoint.save(root / "stranger", init.newborn(CONFIG, 2))
    other = replace(CONFIG, num_layers=2, d_ff=80, norm="layernorm", mlp="gelu", tie_embeddings=True)
    checkpoint.save(root / "other", random_model(other))
    return root


# ---- compare -----------------------------------------------------------------------------------------------


def test_compare_two_newborns_twice(tmp_path):
    words = ["compare", "tiny_llama@1", "tiny_llama@2", *TINY, *SHORT, "--paper-test"]
    done = run_script("seedprint.py", *words, "--out", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    (row,) = rows = rows_of(tmp_path / "one" / "compare.json")
    assert set(f"{COMPARE} {PAPER}".split()) <= row.keys() and "reef" not in row
    assert is_png(tmp_path / "one" / "compare.png")
    assert row["verdict"] == "no evidence" and f"{row['suspect']}: no evidence (" in done.stdout
    assert (row["base"], row["suspect"], row["num_rows"]) == ("tiny_llama@1", "tiny_llama@2", 48)
    assert not json.loads((tmp_path / "one" / "compare.json").read_text())["claims"][0]["holds"]
    again = script(*words, "--out", tmp_path / "two")
    assert again.returncode == 0, again.stderr
    assert rows_of(tmp_path / "two" / "compare.json") == rows  # bit for bit, in another process


def test_compare_a_family(family, tmp_path):
    folders = [family / name for name in ("base", "child", "stranger", "other", "base")]
    for way in ("rotate", "permute", "neurons"):
        evade(way, family / "base", tmp_path / way)
        folders.append(tmp_path / way)
    done = script("compare", *folders, *TINY, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["suspect"].split("/")[-1]: row for row in rows_of(tmp_path / "compare.json")}
    verdicts = {name: row["verdict"].split(":")[0] for name, row in rows.items()}
    unsure = verdicts.pop("neurons")  # for its table may be transplanted
    assert unsure in ("same birth", "inconclusive")
    kin = dict.fromkeys(("child", "base", "rotate", "permute"), "same birth")
    assert verdicts == kin | dict(stranger="no evidence", other="no evidence")
    assert all(rows[name]["body_z"] > 30 for name in ("base", "child"))
    assert rows["base"]["relabel_z"] > 30 and rows["base"]["body_matched"] == pytest.approx(1, abs=1e-5)
    assert rows["child"]["basis_free_z"] > 10 and rows["rotate"]["basis_free_z"] > 10
    assert rows["other"]["basis_free_z"] is None  # of another width of the MLP
    assert abs(rows["rotate"]["body_z"]) < 4.5 and abs(rows["permute"]["body_z"]) < 4.5
    for row in rows.values():
        assert f"{row['suspect']}: {row['verdict']} ({row['rests_on']})" in done.stdout
    assert is_png(tmp_path / "compare.png")


def test_baselines_on_demand(family, tmp_path):
    words = ["compare", family / "base", family / "base", family / "stranger", *TINY, "--baselines"]
    for name in ("one", "two"):
        assert script(*words, "--out", tmp_path / name).returncode == 0
    same, other = rows_of(tmp_path / "one" / "compare.json")
    assert [same, other] == rows_of(tmp_path / "two" / "compare.json")
    for key in ("intrinsic", "reef", "pcs", "ics"):
        assert same[key] == pytest.approx(1, abs=1e-6) and other[key] < 0.98  # float32 products


def test_basis_free_on_demand(family, tmp_path):
    words = ["compare", family / "base", family / "child", *TINY, "--out", tmp_path]
    assert script(*words, "--basis-free", "--neuron-permutations", 49, "--neuron-layers", 1).returncode == 0
    (row,) = rows_of(tmp_path / "compare.json")
    assert row["basis_free_z"] > 10 and row["any_order_z"] > 10 and row["basis_free_p"] == 1 / 50


def test_compare_reads_the_inputs_it_is_told(family, tmp_path):
    seen, words = [], ["compare", family / "base", family / "child", *TINY, "--out", tmp_path]
    plain = ["--paper-test", *SHORT]
    paper = plain, [*plain, "--inputs", "gaussian"], [*plain, "--side", "bottom"]
    for more in ([], paper[0], ["--input-seed", 1], *paper[1:], [*paper[0], "--softmax-temperature", 10]):
        assert script(*words, *more).returncode == 0
        seen.append(rows_of(tmp_path / "compare.json")[0])
    assert not set(PAPER.split()) & seen[0].keys() and seen[0].items() <= seen[1].items()
    assert seen[2]["relabel_z"] != seen[0]["relabel_z"] and seen[2]["body_z"] == seen[0]["body_z"]
    assert len({seen[i]["paper_mean_tau"] for i in (1, 3, 4, 5)}) == 4
    tokens = last_positions(
        checkpoint.tensors(family / "base"), 40, 9, "tokens", 0, 300, "cpu", torch.float32
    )
    child = last_positions(
        checkpoint.tensors(family / "child"), 40, 9, "tokens", 0, 300, "cpu", torch.float32
    )
    both = set(tokens.mean(0).argsort()[32:].tolist()) & set(child.mean(0).argsort()[32:].tolist())
    taus = [scipy.stats.kendalltau(tokens[:, j], child[:, j]).statistic for j in both]
    assert seen[1]["paper_k"] == len(both)
    assert seen[1]["paper_mean_tau"] == pytest.approx(np.mean(taus), rel=1e-6)


# ---- matrix ------------------------------------------------------------------------------------------------


def test_matrix(family, tmp_path):
    folders = [str(family / name) for name in ("base", "stranger", "child", "other")]
    done = script("matrix", *folders, *TINY, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "matrix.json")
    assert all(set(MATRIX.split()) <= row.keys() for row in rows) and is_png(tmp_path / "matrix.png")
    kin = {(row["a"], row["b"]) for row in rows if row["verdict"] == "same birth"}
    assert len(rows) == 6 and kin == {(folders[0], folders[2])}
    done = script("compare", folders[0], folders[2], *TINY, "--out", tmp_path)
    (pair,) = rows_of(tmp_path / "compare.json")
    (row,) = (row for row in rows if row["verdict"] == "same birth")
    assert all(pair[key] == row[key] for key in ("relabel_z", "body_z", "embedding_z", "matched"))
    assert script("matrix", *folders[:2], *TINY, "--out", tmp_path).returncode == 0  # a tree of two


# ---- identify ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shape", [("a.weight", (40, 30)), ("model.layers.0.self_attn.v_proj.weight", (256, 64))]
)
def test_a_draw_begins_alike(name, shape):
    whole = init.draw(7, name, shape, 0.02)
    for first in (1, 2, 29, 31, 1000, 1200):
        assert torch.equal(init.draw(7, name, shape, 0.02, first=first), whole.flatten()[:first])


def test_identify_names_the_seed(tmp_path):
    checkpoint.save(tmp_path / "a", noised(init.newborn(CONFIG, 1234), 2.0))
    for more in ([], ["--numbers", 300], ["--parameter", "model.layers.1.mlp.down_proj.weight"]):
        done = script("identify", tmp_path / "a", "--seeds", "0-2000", *more, "--out", tmp_path)
        assert done.returncode == 0, done.stderr
        rows = rows_of(tmp_path / "identify.json")
        assert rows[0]["seed"] == 1234 and rows[0]["family_log10_p"] < -6 and "seed 1234" in done.stdout
        assert len(rows) == 10 and json.loads((tmp_path / "identify.json").read_text())["candidates"] == 2001
        numbers = 300 if more[:1] == ["--numbers"] else 2048 if not more else 6144
        # 1 / sqrt(1 + 2^2), with an error of 1 / sqrt(numbers)
        assert rows[0]["cosine"] == pytest.approx(5**-0.5, abs=4 * numbers**-0.5)
        assert rows[0]["z"] == pytest.approx(rows[0]["cosine"] * numbers**0.5, rel=1e-9)
        t = rows[0]["cosine"] * ((numbers - 1) / (1 - rows[0]["cosine"] ** 2)) ** 0.5
        if numbers == 300:  # scipy's p of the others is 0
            expected = np.log10(2001 * scipy.stats.t.sf(t, 299))
            assert rows[0]["family_log10_p"] == pytest.approx(expected, rel=1e-9)
        assert [row["cosine"] for row in rows] == sorted((row["cosine"] for row in rows), reverse=True)


def test_identify_knows_none(tmp_path):
    checkpoint.save(tmp_path / "a", init.newborn(CONFIG, 5000))
    done = script("identify", tmp_path / "a", "--seeds", "0-1500", "--out", tmp_path)
    assert done.returncode == 0 and "none" in done.stdout, done.stderr
    assert rows_of(tmp_path / "identify.json")[0]["family_log10_p"] > -6
    done = script("identify", tmp_path / "a", "--seeds", "5000", "--out", tmp_path)
    (row,) = rows_of(tmp_path / "identify.json")
    # the draw itself: float32 products
    assert (
        row["seed"] == 5000 and row["cosine"] == pytest.approx(1, abs=1e-6) and row["family_log10_p"] < -1000
    )
    done = script("identify", tmp_path / "a", "--seeds", "5001-5001", "--out", tmp_path)
    assert done.returncode == 0 and "none" in done.stdout
    (row,) = rows_of(tmp_path / "identify.json")
    w, m = (init.draw(seed, "model.layers.0.self_attn.v_proj.weight", (32, 64), 1).double().numpy().ravel()
            for seed in (5000, 5001)), 2048  # fmt: skip
    t = scipy.stats.pearsonr(*w).statistic  # nearly the cosine: the means are 0 but for 1 / sqrt(2048)
    assert row["cosine"] == pytest.approx(t, abs=0.01)
    t = row["cosine"] * ((m - 1) / (1 - row["cosine"] ** 2)) ** 0.5
    assert row["family_log10_p"] == pytest.approx(np.log10(scipy.stats.t.sf(t, m - 1)), abs=1e-6)


def test_z_of_wrong_seeds_is_normal(monkeypatch, tmp_path):
    """Of every candidate, not of the ten best: the JSON's rows are those of one seed at a time."""
    weight = init.draw(10**6, "model.layers.0.self_attn.v_proj.weight", (32, 64), 0.02)
    z = []
    for seed in range(1500):
        other = init.draw(seed, "model.layers.0.self_attn.v_proj.weight", (32, 64), 0.02)
        z.append(float(torch.cosine_similarity(weight.flatten(), other.flatten(), dim=0)) * 2048**0.5)
    assert scipy.stats.kstest(z, "norm").pvalue > 0.001
    checkpoint.save(tmp_path / "a", init.newborn(CONFIG, 10**6))
    assert script("identify", tmp_path / "a", "--seeds", "0-1499", "--out", tmp_path).returncode == 0
    found = [row["z"] for row in rows_of(tmp_path / "identify.json")]
    np.testing.assert_allclose(found, sorted(z)[:-11:-1], atol=1e-4)  # float32 sums of 2,048 products


# ---- persistence -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of three checkpoints, each a little further from its birth."""
    root = tmp_path_factory.mktemp("runs")
    for run, seed in (("a", 1), ("b", 2)):
        for step, size in ((0, 0.0), (1, 0.1), (20, 0.5)):
            checkpoint.save(root / run / f"step_{step:07d}", noised(init.newborn(CONFIG, seed), size, seed))
    return root


def test_persistence(runs, tmp_path):
    found = {}
    for name, more in (("newborn", []), ("run", ["--stranger", runs / "b"])):
        done = script("persistence", runs / "a", *TINY, *SHORT, *more, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        found[name] = rows_of(tmp_path / name / "persistence.json")
        assert all(is_png(tmp_path / name / f"persistence{end}.png") for end in ("", "_p"))
    for rows in found.values():
        assert all(set(PERSISTENCE.split()) <= row.keys() for row in rows)
        assert [row["step"] for row in rows] == [0, 1, 20]
        taus = [row["mean_tau"] for row in rows]
        assert taus[0] == pytest.approx(1, abs=1e-12) and 1 > taus[1] > taus[2] > 0.1
        assert all(row["relabel_z"] > 10 and abs(row["stranger_mean_tau"]) < 0.2 for row in rows)
    at = (40, 9, "tokens", 0, 300, "cpu", torch.float32)
    birth = last_positions(Newborn(CONFIG, 1), *at).numpy()
    chosen = top_dimensions(birth, "top", 32)
    for row in found["run"]:
        for run, prefix in (("a", ""), ("b", "stranger_")):
            source = checkpoint.tensors(runs / run / f"step_{row['step']:07d}")
            tau = kendall(birth, last_positions(source, *at).numpy(), chosen)
            assert (row[f"{prefix}mean_tau"], row[f"{prefix}std_tau"]) == pytest.approx(
                (tau.mean(), tau.std())
            )
    tau = kendall(birth, last_positions(Newborn(CONFIG, seedprint.STRANGER), *at).numpy(), chosen)
    assert {row["stranger_mean_tau"] for row in found["newborn"]} == {float(tau.mean())}


def test_a_stranger_of_other_steps_stays_the_newest(runs, tmp_path):
    """Its birth is compared with the birth only; where it has no such step, its last checkpoint stands."""
    for step, size in ((0, 0.0), (15, 3.0)):
        checkpoint.save(tmp_path / f"b/step_{step:07d}", noised(init.newborn(CONFIG, 2), size, 2))
    words = ["persistence", runs / "a", "--stranger", tmp_path / "b", *TINY, *SHORT, "--out", tmp_path]
    assert script(*words).returncode == 0
    found = {row["step"]: row["stranger_mean_tau"] for row in rows_of(tmp_path / "persistence.json")}
    at = (40, 9, "tokens", 0, 300, "cpu", torch.float32)
    birth = last_positions(Newborn(CONFIG, 1), *at).numpy()
    chosen = top_dimensions(birth, "top", 32)
    for step, strangers in ((0, 0), (1, 15), (20, 15)):
        source = checkpoint.tensors(tmp_path / f"b/step_{strangers:07d}")
        assert found[step] == kendall(birth, last_positions(source, *at).numpy(), chosen).mean()


# ---- cost --------------------------------------------------------------------------------------------------


def test_cost(family, tmp_path):
    done = script("cost", family / "base", family / "child", *TINY, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["test"]: row for row in rows_of(tmp_path / "cost.json")}
    assert rows.keys() == {
        "weights",
        "relabelling",
        "relabelling, plain ranks",
        "closed form",
        "t-test",
        "U-test",
    }
    assert all(row["log10_p"] <= -6 and row["tokens"] % 16 == 0 for row in rows.values())
    assert rows["weights"]["tokens"] == 0 and rows["relabelling"]["tokens"] <= rows["t-test"]["tokens"]
    assert_refused(script("cost", family / "base", "--out", tmp_path / "new"), "two models")
    strangers = ["cost", family / "base", family / "stranger", *TINY, "--out", tmp_path / "new"]
    assert_refused(script(*strangers), "of one birth")


# ---- claims ------------------------------------------------------------------------------------------------


def test_claims_can_fail():
    pair = dict(base="a", suspect="b", relabel_z=99.0, body_z=99.0, body_matched=1.0, basis_free_z=None)
    said = {"same birth": True, "no evidence": False, "inconclusive: use more rows": None}
    for verdict, holds in said.items():
        (claim,) = findings.compare([pair | dict(verdict=verdict)])
        assert claim["verdict"] == findings.VERDICTS[holds]
    kin, other = pair | dict(verdict="same birth"), pair | dict(verdict="no evidence", body_z=1.0)
    assert next(findings.matrix([kin, other]))["holds"]
    assert not next(findings.matrix([kin | dict(body_z=9.0), other]))["holds"]
    assert not next(findings.matrix([kin, other | dict(body_z=20.0)]))["holds"]
    for p, found in ((-6.5, True), (-5.5, False)):
        assert next(findings.identify([dict(seed=5, family_log10_p=p)]))["holds"] is found
    row = dict(step=1, mean_tau=0.5, stranger_mean_tau=0.1, paper_t_p=1e-3, paper_u_p=1e-3, relabel_z=9.0)
    birth = row | dict(step=0, stranger_mean_tau=0.6)  # not judged
    assert all(claim["holds"] for claim in findings.persistence([birth, row]))
    for i, worse in enumerate((dict(mean_tau=0.0), dict(paper_u_p=0.02), dict(relabel_z=4.0))):
        holds = [claim["holds"] for claim in findings.persistence([birth, row, row | worse])]
        assert holds == [j != i for j in range(3)]


# ---- mistakes ----------------------------------------------------------------------------------------------

PAIR = ["tiny_llama@1", "tiny_llama@2"]


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], ["subcommand", "compare"]),
        (["compar", *PAIR], ["compar", "compare"]),
        (["compare"], ["at least 2"]),
        (["compare", "tiny_llama@1"], ["at least 2 models"]),
        (["compare", "tiny_llama@1", "nothing/here"], ["nothing/here"]),
        (["compare", "tiny_llama@1", "tiny_lama@2"], ["tiny_llama"]),
        (["compare", "tiny_llama", "tiny_llama@2"], ["tiny_llama"]),
        (["compare", *PAIR, "--permutations", 198], ["--permutations 198", "199"]),
        (["compare", *PAIR, "--neuron-permutations", 18], ["--neuron-permutations 18", "19"]),
        (["compare", *PAIR, "--num-sequences", 0], ["--num-sequences 0", "1"]),
        (["compare", *PAIR, "--sequence-length", 0], ["--sequence-length 0", "256"]),
        (["compare", *PAIR, "--sequence-length", 257], ["257", "256"]),
        (["compare", *PAIR, "--paper-test", "--paper-length", 257], ["257", "256"]),
        (["compare", *PAIR, "--num-sequences", 1, "--sequence-length", 2], ["--num-sequences"]),
        (["compare", *PAIR, "--seeds", "0-5"], ["--seeds"]),
        (["compare", *PAIR, "--num-births", 20], ["--num-births"]),
        (["compare", *PAIR, "--paper-tset"], ["--paper-tset", "--paper-test"]),
        (["compare", *PAIR, "--init", "gpt3"], ["gpt3", "gpt2"]),
        (["compare", *PAIR, "--inputs", "text"], ["text", "gaussian"]),
        (["compare", *PAIR, "--top-k", 300, "--paper-test", *TINY, *SHORT], ["--top-k 300", "256"]),
        (["compare", *PAIR, "--softmax-temperature", 0, "--paper-test"], ["--softmax-temperature"]),
        (["compare", *PAIR, "--paper-sequences", 1, "--paper-test"], ["--paper-sequences 1"]),
        (["compare", *PAIR, "--side", "bottom"], ["--side is for --paper-test"]),
        (["compare", *PAIR, "--data", "x", "--paper-test"], ["--data is for --baselines"]),
        (["compare", *PAIR, "--neuron-layers", 0], ["--neuron-layers 0"]),
        (["compare", *PAIR, "--baselines", "--data", "no/such"], ["no/such"]),
        (["matrix", "tiny_llama@1"], ["at least 2 models"]),
        (["matrix", *PAIR, "--paper-test"], ["--paper-test"]),
        (["identify"], ["one model"]),
        (["identify", *PAIR], ["one model"]),
        (["identify", "tiny_llama@1", "--seeds", "5-3"], ["5-3", "0-99999"]),
        (["identify", "tiny_llama@1", "--seeds", "x"], ["--seeds x"]),
        (["identify", "tiny_llama@1", "--seeds=-3"], ["--seeds -3"]),
        (["identify", "tiny_llama@1", "--parameter", "nothing"], ["nothing", "v_proj"]),
        (["identify", "tiny_llama@1", "--parameter", "model.norm.weight"], ["model.norm.weight", "v_proj"]),
        (["identify", "tiny_llama@1", "--numbers", 3], ["--numbers", "4"]),
        (["identify", "tiny_llama@1", "--num-sequences", 3], ["--num-sequences"]),
        (["persistence", "tiny_llama@1"], ["its birth"]),
        (["persistence", "nothing/here"], ["its birth"]),
        (["persistence"], ["one run folder"]),
    ],
    ids=lambda value: " ".join(map(str, value))[-40:] if type(value) is list else None,
)  # fmt: skip
def test_bad_inputs(words, expected, tmp_path):
    assert_refused(script(*words, "--out", tmp_path / "new"), *expected)
    assert not list((tmp_path / "new").glob("*"))


def test_bad_folders(family, runs, tmp_path):
    checkpoint.save(tmp_path / "wide", init.newborn(replace(CONFIG, d_model=32), 1))
    words = ["compare", family / "base", tmp_path / "wide", *TINY, "--out", tmp_path]
    assert_refused(script(*words), "64", "32", "width")
    assert_refused(script("matrix", *words[1:]), "64", "32", "width")
    assert_refused(script(*words, "--stranger", runs / "b"), "--stranger")
    checkpoint.save(tmp_path / "cut", init.newborn(CONFIG, 1))
    whole = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"{i} is a number\n" * 500)
    source, out = (str(tmp_path / "*.txt"),), str(tmp_path / "data")
    many = data.Settings(source=source, tokenizer="bytes", held_out=0.5, out=out)
    checkpoint.save(tmp_path / "few", init.newborn(replace(CONFIG, vocab_size=200), 1))
    few = ["compare", tmp_path / "few", tmp_path / "few", "--baselines", "--data", data.prepare(many)]
    assert_refused(script(*few, "--out", tmp_path), "257 tokens", "200")
    words[2] = tmp_path / "cut"
    assert_refused(script(*words), "corrupt", "model.safetensors")
    (tmp_path / "cut" / "checksums.json").unlink()
    assert_refused(script(*words), "cannot read", "model.safetensors")
    for line in (words, ["identify", tmp_path / "cut", "--out", tmp_path]):
        assert_refused(script(*line), "model.safetensors")
    words[2] = tmp_path / "nan"
    model = init.newborn(CONFIG, 1)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
    checkpoint.save(tmp_path / "nan", model)
    assert_refused(script(*words), "not finite")
    (tmp_path / "empty").mkdir()
    assert_refused(script("persistence", tmp_path / "empty"), "its birth")
    checkpoint.save(tmp_path / "one" / "step_0000000", init.newborn(CONFIG, 1))
    assert_refused(script("persistence", tmp_path / "one"), "its birth")
    assert_refused(script("persistence", runs / "a", "--stranger", tmp_path / "wide", *TINY, *SHORT), "width")
    assert_refused(
        script("persistence", runs / "a", "--stranger", tmp_path / "no", *TINY, *SHORT), "no model"
    )
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".json", ".png")]


def test_an_unequal_pair_shares_the_shorter_context(family, tmp_path):
    checkpoint.save(tmp_path / "short", init.newborn(replace(CONFIG, context_length=70), 1))
    words = ["compare", family / "base", tmp_path / "short", "--out", tmp_path, *TINY[4:]]
    assert_refused(script(*words, "--sequence-length", 65), "64")
    assert baselines.Inputs().sequence_length == 64 and PRESETS["tiny_llama"].context_length == 256
    assert script(*words, "--sequence-length", 20, "--num-sequences", 3).returncode == 0
    assert rows_of(tmp_path / "compare.json")[0]["verdict"] == "same birth"


# ---- faults that were --------------------------------------------------------------------------------------


def test_identify_refuses_nan(tmp_path):
    model = init.newborn(CONFIG, 1)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = torch.nan
    checkpoint.save(tmp_path / "a", model)
    assert_refused(script("identify", tmp_path / "a", "--seeds", "0-20", "--out", tmp_path), "not finite")


def test_a_context_shorter_than_the_papers(tmp_path):
    for seed in (1, 2):
        checkpoint.save(tmp_path / str(seed), init.newborn(replace(CONFIG, context_length=32), seed))
    done = script("compare", tmp_path / "1", tmp_path / "2", *TINY, "--out", tmp_path)
    assert done.returncode == 0, done.stderr


def test_cost_without_a_matrix_in_common(family, tmp_path):
    checkpoint.save(tmp_path / "a", init.newborn(replace(CONFIG, head_dim=20, d_ff=80), 1))
    assert script("cost", family / "base", tmp_path / "a", *TINY, "--out", tmp_path).returncode == 0
    assert "weights" not in {row["test"] for row in rows_of(tmp_path / "cost.json")}
