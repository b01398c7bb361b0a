"""contraction.py: each experiment against a plain recomputation, and the command line as a user runs it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import KINDS, assert_refused, random_model, run_here, run_script

import checkpoint
import contraction
import findings
import init
import paper
import probe
import stats
from common import UserError
from contraction import EXPERIMENTS, Settings
from model import PRESETS, ModelConfig

CONTRACT = {
    "layers": "variant sequence_length layer mean_cosine std_cosine theory",
    "ablation": "variant sequence_length mean_cosine std_cosine cosine_log10_p ratio log10_p",
    "engage": "normed preactivation_std mean_cosine theory",
    "overlap": "seed top1_token direction_token direction_matches",
    "mlp": "stack layer mean_cosine theory",
    "amplify": "stack sequence_length mean_cosine theory",
    "intra": "stack sequence_length layer mean_cosine exact_theory limit_theory",
    "variance": "position std uniform_theory theory",
    "predict": "seed direction_cosine predicted_token direction_token top1_token predicted_cosine mean_cosine"
    " seconds",
    "cure": "init seed mean_cosine top1_count uniform_max_count log10_p",
    "width": "mlp d_model weight_std mean_cosine theory",
}
TINY = [
    "--model",
    "tiny_gpt2",
    "--seed",
    1,
    2,
    "--num-sequences",
    12,
    "--sequence-length",
    16,
    "--dtype",
    "float32",
]


def settings(name: str, **given) -> Settings:
    """An experiment's settings as `run` would fill them, on the CPU in float32."""
    given = {"model": ("tiny_gpt2",), "num_sequences": 10, "sequence_length": (16,)} | given
    given = {key: value for key, value in given.items() if key in EXPERIMENTS[name][2]}
    return replace(contraction.fill(name, Settings(**given), True), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """`all` at a tiny size: its output and its folder."""
    out = tmp_path_factory.mktemp("all")
    done = run_script("contraction.py", "all", *TINY, "--out", out)
    assert done.returncode == 0, done.stderr
    return done, out


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_keeps_the_contract(everything, name):
    done, out = everything
    saved = json.loads((out / f"{name}.json").read_text())
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert {"experiment", "paper", "settings", "environment", "rows", "claims"} <= saved.keys()
    assert saved["rows"] and saved["claims"] and saved["experiment"] == name
    for row in saved["rows"]:
        assert set(CONTRACT[name].split()) <= row.keys()
    for claim in saved["claims"]:
        assert claim.keys() == {"claim", "of", "paper", "measured", "holds", "verdict"}
        assert claim["of"] in paper.OWNERS and claim["verdict"] in findings.VERDICTS.values()
        assert claim["holds"] is (claim["verdict"] == "holds")
        assert claim["claim"] in done.stdout
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{n}.{x}" for n in EXPERIMENTS for x in ("json", "png")
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_claims_can_fail(everything, name):
    """Every claim is refuted by some rows: measured values of random size and sign."""
    rows, judge = json.loads((everything[1] / f"{name}.json").read_text())["rows"], getattr(findings, name)
    keys = "mean_cosine std log10_p direction_cosine seconds predicted_token down_std".split()
    refuted, generator = set(), np.random.default_rng(0)
    for _ in range(200):
        changed, size = [dict(row) for row in rows], 10 ** generator.uniform(-3, 3)
        for row in changed:
            for key in [key for key in keys if key in row]:
                row[key] = row[key] + size * generator.normal()
                row[key] = abs(row[key]) if name == "width" else row[key]
            if "direction_matches" in row:
                row["direction_matches"] = bool(generator.integers(2))
        refuted |= {i for i, claim in enumerate(judge(changed)) if not claim["holds"]}
    assert refuted == set(range(len(list(judge(rows)))))


def test_two_ranks_give_the_rows_of_one_process(tmp_path):
    """Of `predict`, which samples tokens, in batches that the ranks share unevenly."""
    words = ["predict", *map(str, TINY), "--batch-size", "4", "--out"]
    done = run_script("contraction.py", *words, tmp_path / "two", ranks=2)
    assert done.returncode == 0, done.stderr
    ((_, work),) = contraction.plan([*words, str(tmp_path / "one")])
    work()
    one, two = (json.loads((tmp_path / n / "predict.json").read_text()) for n in ("one", "two"))
    assert two["environment"]["processes"] == 2
    for ours, theirs in zip(one["rows"], two["rows"], strict=True):
        for key, value in ours.items():
            if key != "seconds":
                near = pytest.approx(value, rel=1e-5, abs=1e-9) if type(value) is float else value
                assert theirs[key] == near, key


@pytest.mark.parametrize(
    "words, expected",
    [
        (["layer"], ["layer", "layers"]),
        (["width", "--model", "nano_gpt2"], ["width", "--model"]),
        (["cure", "--init", "gpt2"], ["cure", "--init"]),
        (["mlp", "--sequence-length", "64"], ["mlp", "--sequence-length"]),
        (["layers", "--sequence-length", "1025"], ["1025", "1024"]),
        (["all", "--sequence-length", "1025"], ["1025", "1024"]),
        (["layers", "--num-sequences", "1"], ["--num-sequences", "2"]),
        (["layers", "--batch-size", "0"], ["--batch-size", "1"]),
        (["layers", "--model", "nano_gpt"], ["nano_gpt", "nano_gpt2"]),
        (["layers", "--seeds", "3"], ["--seeds", "--seed"]),
        (["layers", "mlp"], ["mlp"]),
    ],
)
def test_bad_inputs(words, expected, tmp_path):
    assert_refused(run_here("contraction.py", *words, "--out", tmp_path / "new"), *expected)
    assert not (tmp_path / "new").exists()


def test_defaults_fit_their_models():
    for name, (_, _, defaults) in EXPERIMENTS.items():
        contraction.fill(name, Settings(**defaults), strict=True)
    with pytest.raises(UserError, match="does not read"):
        contraction.fill("width", Settings(init="normal"), strict=True)
    assert contraction.fill("width", Settings(init="normal"), strict=False).init is None


def test_variants_share_their_weights():
    full = init.newborn("tiny_gpt2", 5)
    for kind in ("mlp", "attention"):
        part = init.variant(full, sublayers=kind)
        born = init.newborn(replace(PRESETS["tiny_gpt2"], sublayers=kind), 5).state_dict()
        assert part.state_dict().keys() == born.keys()
        for name, weight in part.state_dict().items():
            assert torch.equal(weight, born[name])
            assert weight.data_ptr() == full.state_dict()[name].data_ptr()


@pytest.mark.parametrize("kind", ["gpt2", "llama_gqa"])
@pytest.mark.parametrize("sublayers", ["full", "mlp", "attention"])
def test_layer_cosines_equal_a_plain_loop(kind, sublayers):
    model = init.variant(random_model(KINDS[kind]), sublayers=sublayers)
    found = probe.probe(model, 9, 14, 5, input_seed=3, gaussian=True)["layers"]
    x, layers = probe.gaussian_vectors(3, range(14), 9, 32), []
    with torch.no_grad():
        model.hidden(x, on_state=lambda layer, x: layers.append(x[:, -1].double()))
    for cosines, states in zip(found, layers, strict=True):
        pairs = [F.cosine_similarity(states[i], states[j], dim=0, eps=0) for i in range(14) for j in range(i)]
        # float32 states of a random model, computed in batches of another size
        assert cosines.mean_and_std() == pytest.approx((np.mean(pairs), np.std(pairs)), abs=2e-5)


def test_gaussian_vectors_depend_on_seed_and_index_alone():
    whole = probe.gaussian_vectors(1, range(6), 8, 5)
    assert torch.equal(whole[2:4], probe.gaussian_vectors(1, range(2, 4), 8, 5))
    assert torch.equal(whole[:, :3], probe.gaussian_vectors(1, range(6), 3, 5))
    assert not torch.equal(whole, probe.gaussian_vectors(2, range(6), 8, 5))
    many = probe.gaussian_vectors(0, range(200), 32, 64)
    assert many.std() == pytest.approx(0.02, rel=0.01) and abs(many.mean()) < 0.02 * 5 / math.sqrt(
        many.numel()
    )


def test_mlp0_is_two_products_and_an_activation():
    s = settings("mlp", seed=(4,), init="gpt2")
    rows, _ = contraction.mlp(s, "tiny_gpt2", 4)
    weights = init.newborn("tiny_gpt2", 4).state_dict()
    for stack, phi in (("mlp0_relu", torch.relu), ("mlp0_tanh", torch.tanh)):
        x = probe.gaussian_vectors(0, range(10), 1, 256)[:, 0]
        for row in [row for row in rows if row["stack"] == stack]:
            assert row["mean_cosine"] == pytest.approx(stats.pairwise_cosine(x)["mean_cosine"], abs=1e-6)
            if row["layer"] < 6:
                up, down = (
                    weights[f"model.layers.{row['layer']}.mlp.{n}_proj.weight"] for n in ("up", "down")
                )
                x = phi(x @ up.T) @ down.T


def test_attention_without_residual_is_what_the_block_adds():
    s = settings("intra", seed=(4,), init="gpt2")
    rows, _ = contraction.intra(s, "tiny_gpt2", 4)
    model = init.newborn(replace(PRESETS["tiny_gpt2"], sublayers="attention"), 4)
    x, states = s.vectors(16, 256), []
    with torch.no_grad():
        model.hidden(x, on_state=lambda layer, x: states.append(x))
    unit = F.normalize(states[1] - states[0], dim=2, eps=0)
    expected = (unit @ unit.transpose(1, 2)).mean().item()
    row = next(row for row in rows if row["stack"] == "attention" and row["layer"] == 1)
    assert row["mean_cosine"] == pytest.approx(expected, abs=1e-5)


def test_variance_against_explicit_attention():
    s = settings("variance", seed=(4,), init="gpt2", num_sequences=3)
    rows, _ = contraction.variance(s, "tiny_llama", 4)
    config = replace(PRESETS["tiny_llama"], num_layers=1)
    model = init.newborn(config, 4)
    x, block, heads = s.vectors(16, 256), model.model.layers[0], []
    with torch.no_grad():
        model.hidden(x, on_heads=lambda layer, h, q, k, v: heads.append((q, k, v)))
        q, k, v = heads[0]
        scores = q @ k.transpose(2, 3) / math.sqrt(32)
        scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf).softmax(3) @ v
    assert block.self_attn is not None
    expected = scores.square().mean(dim=(0, 1, 3)).sqrt()
    np.testing.assert_allclose([row["std"] for row in rows], expected, rtol=1e-5)


def test_theory_agrees_on_newborns_of_another_shape():
    """A preset that no bar was tuned on: eight seeds of tiny_gpt2 and its SwiGLU sister, both at T = 32."""
    s = settings("layers", num_sequences=48, sequence_length=(32,), seed=tuple(range(8)))
    rows = stats.over_seeds([row for seed in s.seed for row in contraction.layers(s, "tiny_gpt2", seed)[0]])
    for row in rows:  # seeds scatter by about 0.02 / sqrt(8) at d = 256; attention's pairs by 0.18 / 48
        assert row["mean_cosine"] == pytest.approx(row["theory"], abs=0.03), row
    rows = stats.over_seeds([row for seed in s.seed for row in contraction.layers(s, "tiny_llama", seed)[0]])
    full = [row for row in rows if row["variant"] == "full"][-1]
    assert full["mean_cosine"] == pytest.approx(full["theory"], abs=0.01) and full["theory"] > 0.002


def test_weights_foretell_a_tiny_newborn():
    s = settings("predict", seed=(1, 2), num_sequences=600, sequence_length=(32,))
    for seed in s.seed:
        row = contraction.predict(s, "tiny_gpt2", seed)[0][0]
        assert row["direction_cosine"] > 0.95 and row["seconds"] < 2
        assert row["mean_field_cosine"] == pytest.approx(row["mean_cosine"], abs=0.04)


def made(name: str, out, *models, sequences: int = 8) -> dict:
    """The JSON of an experiment with these models, short sequences on the CPU."""
    flags = ["--num-sequences", sequences, "--out", out, "--dtype", "float32"]
    flags += ["--sequence-length", 12] if "sequence_length" in EXPERIMENTS[name][2] else []
    done = run_here("contraction.py", name, "--model", *models, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads((out / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["layers", "mlp", "intra", "engage", "predict"])
def test_several_models_are_judged_and_drawn_one_by_one(name, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("figures.curves", lambda points, *_, **__: drawn.append(points))
    alone = [made(name, tmp_path / str(seed), f"tiny_gpt2@{seed}") for seed in (7, 8)]
    both = made(name, tmp_path, "tiny_gpt2@7", "tiny_gpt2@8")
    assert len(both["claims"]) == 2 * len(alone[0]["claims"])
    for seed, one in zip((7, 8), alone):
        own = [
            c["claim"].split(": ", 1)[1] for c in both["claims"] if c["claim"].startswith(f"tiny_gpt2@{seed}")
        ]
        assert own == [claim["claim"] for claim in one["claims"]]
    assert len(drawn[2]) == len(drawn[0]) + len(drawn[1])
    key = {"layers": "variant", "engage": "curve", "predict": "model"}.get(name, "stack")
    assert all("tiny_gpt2@" in point[key] for point in drawn[2])


def test_laws_are_of_newborns(tmp_path):
    """A checkpoint's rows have none, and no claim speaks of one; its own numbers are a newborn's here."""
    checkpoint.save(tmp_path / "saved", init.newborn("tiny_gpt2", 7))
    for name in ("layers", "mlp", "engage", "amplify", "intra", "variance", "predict"):
        born = made(name, tmp_path, "tiny_gpt2@7")
        saved = made(name, tmp_path, tmp_path / "saved")
        assert all(row[law] is None for row in saved["rows"] for law in contraction.LAWS if law in row), name
        assert not any("theory" in claim["claim"] for claim in saved["claims"])
        assert len(saved["claims"]) < len(born["claims"]) or name == "variance"


def test_what_an_experiment_cannot_read(tmp_path):
    for changes in (dict(sublayers="mlp"), dict(sublayers="attention"), dict(num_layers=1)):
        config = ModelConfig(**({"vocab_size": 97, "context_length": 64, "num_layers": 3, "num_heads": 2}
            | {"d_model": 16, "d_ff": 24} | changes))  # fmt: skip
        checkpoint.save(tmp_path / "odd", init.newborn(config, 1))
        for name in ("layers", "mlp", "overlap", "intra", "amplify"):
            refused = run_here("contraction.py", name, "--model", tmp_path / "odd", "--out", tmp_path / "new")
            assert_refused(refused, "two layers")
    checkpoint.save(tmp_path / "two", init.newborn(replace(config, num_layers=2), 1))
    assert made("layers", tmp_path, tmp_path / "two")["claims"]
    plans = contraction.plan(["--sequence-length", "512"])  # beyond the smallest preset's context
    assert len(plans) == len(EXPERIMENTS)


def test_a_pruned_gate_is_no_nan():
    model = init.newborn("tiny_llama", 1)
    model.model.layers[2].mlp.gate_proj.weight.data[3] = 0
    direction, cosine = contraction.theory.mean_field(model, 8)
    assert direction.isfinite().all() and math.isfinite(cosine)


def test_cure_at_a_tiny_size():
    s = settings("cure", seed=(1,), num_sequences=300)
    kinds = {row["init"]: row for row in contraction.cure(s, "tiny_gpt2", 1)[0]}
    assert list(kinds) == ["gpt2", "centered", "projected"]
    assert kinds["gpt2"]["mean_cosine"] > 0.05
    for init_ in ("centered", "projected"):
        assert abs(kinds[init_]["mean_cosine"]) < 0.01
        assert kinds[init_]["down_std"] == pytest.approx(kinds["gpt2"]["down_std"], rel=0.01)


@torch.inference_mode()
def test_width_scales_the_weights():
    rows, _ = contraction.width(settings("width", seed=(3,), num_sequences=50), None, 3)
    assert {(row["mlp"], row["d_model"]) for row in rows} == {
        (m, d) for m in ("gelu", "swiglu") for d in (128, 256, 512, 1024)
    }
    row = next(
        row for row in rows if row["mlp"] == "gelu" and row["d_model"] == 256 and row["weight_std"] != 0.02
    )
    config = ModelConfig(1, 1, 1, 1, 256, 1024, mlp="gelu", sublayers="mlp")
    up, down = (
        w.data * (256**-0.5 / 0.02)
        for w in init.newborn(config, 3, scheme="normal").model.layers[0].mlp.parameters()
    )
    states = F.gelu(probe.gaussian_vectors(0, range(50), 1, 256)[:, 0] / 0.02 @ up.T) @ down.T
    assert row["mean_cosine"] == pytest.approx(stats.pairwise_cosine(states)["mean_cosine"], abs=1e-5)
    assert row["weight_std"] == 1 / 16


def test_lengths_may_come_in_any_order():
    rows = []
    for T, faster in ((512, 0.0), (128, 0.1)):  # the longer one first
        for layer in range(1, 9):
            cosine = 1 - 0.9 ** (layer + 10 * faster)
            for stack in ("attn0", "attention"):
                row = dict(stack=stack, sequence_length=T, layer=layer, mean_cosine=cosine)
                rows.append(row | dict(limit_theory=cosine, exact_theory=cosine))
    swapped = [row | dict(sequence_length=640 - row["sequence_length"]) for row in rows]
    found, other = (
        [c["holds"] for c in findings.intra(part) if "shorter" in c["claim"]] for part in (rows, swapped)
    )
    assert found == [True] and other == [False]
