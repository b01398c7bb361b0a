"""sinks.py and attention.py against explicit softmax attention, brute force, closed forms and a process."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import KINDS, ROOT, SMALL, assert_refused, random_model, run_here, run_script
from scipy.stats import ttest_1samp

import attention
import checkpoint
import data
import findings
import init
import reading
import sinks
import theory
import train
from common import UserError
from model import CHOICES, PRESETS, ModelConfig
from probe import random_tokens


def explicit(model, tokens, on_heads=None):
    """Every layer's attention matrix, (B, L, H, T, T) float64, by softmax of q k' / sqrt(Dh) as written."""
    matrices, T = [], tokens.shape[1]

    def watch(layer, heads, q, k, v):
        q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)
        matrices.append(scores.softmax(-1))
        return None if on_heads is None else on_heads(layer, heads, q, k, v)

    with torch.inference_mode():
        model.hidden(tokens, on_heads=watch)
    return torch.stack(matrices, dim=1)


def brute_alpha(matrices, k):
    """BB 6.2.1, literally: the mean of A[i, k] over i = k..T, one number at a time."""
    T = matrices.shape[-1]
    return sum(matrices[..., i, k - 1] for i in range(k - 1, T)) / (T - k + 1)


def t_interval(values):
    """scipy's 95 % interval of a mean."""
    found = ttest_1samp(np.asarray(values, np.float64), 0).confidence_interval(0.95)
    return found.low, found.high


# ---- attention weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", CHOICES["attn_calibration"])
@pytest.mark.parametrize("T", [1, 2, 9, 33])
def test_scores_equal_explicit_attention(kind, calibration, T):
    model = random_model(replace(KINDS[kind], attn_calibration=calibration))
    tokens, positions = random_tokens(1, range(3), T, 97), range(1, T + 1)
    alpha, matrices = attention.attention_to(model, tokens, positions), explicit(model, tokens)
    assert alpha.shape == (3, 3, 4, T)
    for k in positions:  # 1e-6: the bar, some ten roundings of float32
        torch.testing.assert_close(alpha[..., k - 1].double(), brute_alpha(matrices, k), atol=1e-6, rtol=0)


def test_long_sequences_take_the_other_kernel_path():
    model, tokens = random_model(KINDS["llama_gqa"]), random_tokens(0, range(1), 600, 97)
    alpha, matrices = attention.attention_to(model, tokens, (1, 300, 600)), explicit(model, tokens)
    for i, k in enumerate((1, 300, 600)):
        torch.testing.assert_close(alpha[..., i].double(), brute_alpha(matrices, k), atol=1e-6, rtol=0)


def test_weights_of_each_query():
    model, tokens, seen = random_model(KINDS["qwen3"]), random_tokens(0, range(2), 21, 97), []
    matrices = explicit(model, tokens)
    model.hidden(
        tokens,
        on_heads=lambda layer, heads, q, k, v: seen.append(
            attention.weights_on(q, k, torch.tensor([21, 3, 3]))
        ),
    )
    for column, k in enumerate((21, 3, 3)):  # any order, and repeated
        weights = torch.stack(seen, 1)[..., column].double()
        torch.testing.assert_close(weights, matrices[..., k - 1], atol=1e-6, rtol=0)


def test_uniform_attention_is_the_mean_of_1_over_i():
    model = init.newborn("tiny_llama", 0)
    for block in model.model.layers:
        block.self_attn.k_proj.weight.data.zero_()
    tokens = random_tokens(0, range(2), 50, 4096)
    alpha = attention.attention_to(model, tokens, range(1, 51))
    for k in range(1, 51):
        law = np.mean([1 / i for i in range(k, 51)])
        assert attention.uniform_alpha(50, k) == pytest.approx(law, rel=1e-12)
        assert (alpha[..., k - 1] - law).abs().max() < 1e-6


def test_positions_that_are_not_there():
    model, tokens = random_model(KINDS["llama"]), random_tokens(0, range(2), 8, 97)
    for position in (0, 9, -1):
        with pytest.raises(ValueError, match="8"):
            sinks.attention_to(model, tokens, (position,))
    with pytest.raises(ValueError):
        sinks.attention_to(init.newborn(replace(KINDS["llama"], sublayers="mlp"), 0), tokens)


MEMORY = """
import resource, sys, time, torch
sys.path.insert(0, {root!r})
import attention, init
from model import ModelConfig
torch.set_num_threads(2)
model = init.newborn(ModelConfig(97, 16384, 2, 2, 128, 256), 0)
tokens = torch.randint(97, (1, 16384))
with torch.inference_mode():
    times = dict(plain=[], alpha=[])
    model.hidden(tokens)
    plain = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in times:
        work = model.hidden if name == "plain" else lambda tokens: attention.attention_to(model, tokens)
        begun = time.perf_counter()
        work(tokens)
        times[name].append(time.perf_counter() - begun)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(1024 * (peak - plain), min(times["alpha"]) / min(times["plain"]))
"""


def test_memory_is_linear_and_time_is_bounded():
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(root=str(ROOT))], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    extra, ratio = map(float, done.stdout.split())
    assert extra < 16384**2 * 4 / 10  # a tenth of one head's explicit float32 matrix
    assert ratio < 3.5  # the bar is 2.5, on a quiet machine; tests run beside each other


# ---- rate --------------------------------------------------------------------------------------------------


def settings(kind=sinks.Settings, **given):
    return kind(**dict(device="cpu", dtype="float32", num_sequences=7) | given)


def test_sink_rate_is_gu_et_als():
    model, s = (
        random_model(KINDS["llama"]),
        settings(sinks.Rate, sequence_length=(6, 20), epsilon=0.25, num_sequences=9),
    )
    found = sinks.rate(s, "tiny_llama@1", model)
    for row, by_head, T in zip(found["rows"], found["heads"], (6, 20)):
        tokens, shares = random_tokens(0, range(9), T, 97), []
        for sequence in tokens:  # a sequence at a time: the share of heads above the threshold
            A = explicit(model, sequence[None])[0]
            above = [A[layer, head, :, 0].mean() > 0.25 for layer in range(3) for head in range(4)]
            shares.append(sum(map(float, above)) / len(above))
        assert 0 < np.mean(shares) < 1
        assert row["sink_rate"] == pytest.approx(np.mean(shares), abs=1e-6)
        low, high = t_interval(shares)
        assert (row["low"], row["high"]) == pytest.approx((low, high), abs=1e-6)
        heads = explicit(model, tokens)[..., 0].mean(-1).mean(0)
        assert row["mean_alpha1"] == pytest.approx(heads.mean().item(), abs=1e-6)
        assert row["max_alpha1"] == pytest.approx(heads.max().item(), abs=1e-6)
        np.testing.assert_allclose(by_head["alpha1"], heads, atol=1e-6)


def test_batches_do_not_matter(monkeypatch):
    model, tokens = random_model(KINDS["gpt2"]), random_tokens(0, range(5), 12, 97)
    whole = attention.first_attention(model, tokens)
    monkeypatch.setitem(attention.DEFAULTS, "cpu", (0, [0], 24))
    torch.testing.assert_close(attention.first_attention(model, tokens), whole, atol=1e-6, rtol=0)


def test_a_planted_sink_is_found():
    model = init.newborn("tiny_llama", 3)
    attn = model.model.layers[2].self_attn
    with torch.no_grad():  # head 5 of layer 3: a key along every query, at the one token that is always first
        attn.q_proj.weight[4 * 32 : 5 * 32].zero_()
        attn.q_proj.bias = torch.nn.Parameter(torch.zeros(256))
        attn.q_proj.bias[4 * 32 + 15] = 40.0  # the slowest pair of RoPE
        model.model.embed_tokens.weight[7] = 0.0
        model.model.embed_tokens.weight[7, 0] = 50.0
        attn.k_proj.weight[4 * 32 + 15] = 0.0
        attn.k_proj.weight[4 * 32 + 15, 0] = 1.0
    tokens = torch.cat([torch.full((4, 1), 7), random_tokens(0, range(4), 31, 4096)], 1)
    alpha = attention.first_attention(model, tokens)
    assert alpha[:, 2, 4].min() > 0.9
    assert attention.sink_share(alpha, 0.3).tolist() == [pytest.approx(1 / 48)] * 4


# ---- Equation 2 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", CHOICES["attn_calibration"])
def test_aggregated_values_follow_the_theory(calibration):
    config = replace(PRESETS["nano_llama"], num_layers=1, vocab_size=500, attn_calibration=calibration)
    model = init.newborn(config, 5, scheme="normal")
    law, sums = theory.aggregated_std(config, 96, tokens=True), 0.0

    def watch(layer, heads, q, k, v):
        nonlocal sums
        sums = sums + attention.moments(heads)

    with torch.inference_mode():
        for part in random_tokens(0, range(128), 96, 500).split(16):
            model.hidden(part, on_heads=watch)
    off = (torch.tensor(attention.spread(sums)).double() / law - 1).abs()
    assert off[15:].max() < 0.03  # the bar
    if calibration in (
        "amplify",
        "attenuate",
    ):  # flat, to the correction: 1/i of a sum of squares is not exact
        scale = 1 if calibration == "amplify" else 2048**-0.5
        uncalibrated = theory.aggregated_std(replace(config, attn_calibration="none"), 96, tokens=True)
        torch.testing.assert_close(law, uncalibrated * torch.arange(1, 97).sqrt() * scale, check_dtype=False)
    if calibration == "headnorm":
        assert off.max() < 0.01 and (law - 1).abs().max() < 1e-12


def test_variance_is_the_pooled_one(tmp_path):
    s = settings(sequence_length=10, model=("tiny_gpt2@3",))
    model, heads = checkpoint.load("tiny_gpt2@3"), []
    rows = sinks.variance(s, "tiny_gpt2@3", model)["rows"]
    model.hidden(random_tokens(0, range(7), 10, 4096), on_heads=lambda layer, h, q, k, v: heads.append(h))
    for row in rows:
        std = heads[row["layer"] - 1][:, :, row["position"] - 1].detach().numpy().astype(np.float64).std()
        assert row["std"] == pytest.approx(std, rel=1e-5)
        assert (row["theory"] is None) == (row["layer"] > 1)


@pytest.mark.parametrize("calibration", CHOICES["attn_calibration"])
def test_newborns_can_be_calibrated(calibration, tmp_path):
    s = settings(model=("tiny_llama@3",), sequence_length=32, attn_calibration=calibration, out=str(tmp_path))
    found = sinks.run("variance", replace(s, num_sequences=60))
    rows = [row for row in found["rows"] if row["layer"] == 1 and row["position"] >= 16]
    assert max(abs(row["std"] / row["theory"] - 1) for row in rows) < 0.06  # d = 256, 60 sequences


# ---- anatomy -----------------------------------------------------------------------------------------------


def test_anatomy_against_a_plain_recomputation(kind):
    model, s = random_model(KINDS[kind]), settings(sequence_length=11)
    found = sinks.anatomy(s, "tiny_llama@1", model)
    rows, strongest = found["rows"], found["super_neurons"]
    tokens, states, keys = random_tokens(0, range(7), 11, 97), {}, []
    alpha = explicit(model, tokens)
    units = {}
    for layer, block in enumerate(model.model.layers, start=1):
        block.mlp.down_proj.register_forward_hook(
            lambda module, inputs, output, layer=layer: units.__setitem__(layer, inputs[0].abs())
        )
    with torch.inference_mode():
        model.hidden(
            tokens,
            on_state=lambda layer, x: states.__setitem__(layer, x.abs()),
            on_heads=lambda layer, heads, q, k, v: keys.append(F.normalize(k, dim=3)),
        )
    assert len(rows) == 3 * 11
    for row in rows:
        layer, p = row["layer"], row["position"] - 1
        h = states[layer][:, p]
        assert row["dominance_ratio"] == pytest.approx((h.max(1).values / h.mean(1)).mean().item(), rel=1e-4)
        assert row["alpha"] == pytest.approx(brute_alpha(alpha, p + 1)[:, layer - 1].mean().item(), abs=1e-6)
        aligned = keys[layer - 1][:, :, p].mean(0).norm(dim=1).mean().item()
        assert row["key_alignment"] == pytest.approx(aligned, rel=1e-4)
    ratios = {i: u.mean(0)[0] / u.mean(0)[1:].mean(0) for i, u in units.items()}
    ranked = sorted(((r.item(), i, n) for i, rs in ratios.items() for n, r in enumerate(rs)), reverse=True)[
        :10
    ]
    assert [(n["layer"], n["neuron"]) for n in strongest] == [(i, n) for _, i, n in ranked]
    best = strongest[0]
    mlp = model.model.layers[best["layer"] - 1].mlp
    column = mlp.down_proj.weight[:, best["neuron"]].square()
    assert best["down_share"] == pytest.approx((column.max() / column.sum()).item(), rel=1e-5)
    assert best["dimension"] == column.argmax()
    assert best["up_norm"] == pytest.approx(mlp.up_proj.weight[best["neuron"]].norm().item(), rel=1e-5)


def test_hooks_are_removed_and_a_planted_super_neuron_is_named():
    model = init.newborn("tiny_llama", 4)
    with torch.no_grad():  # layer 2's unit 99 answers to the coordinate that the first token alone has
        model.model.embed_tokens.weight[:, 11] = 0
        model.model.embed_tokens.weight[7, 11] = 1.0
        model.model.layers[1].mlp.gate_proj.weight[99] = 0
        model.model.layers[1].mlp.gate_proj.weight[99, 11] = 1.0
        model.model.layers[1].mlp.down_proj.weight[:, 99] = 0
        model.model.layers[1].mlp.down_proj.weight[200, 99] = 1.0
    tokens = torch.cat([torch.full((3, 1), 7), random_tokens(0, range(3), 15, 4096)], 1)
    tokens[:, 1:][tokens[:, 1:] == 7] = 8
    original, reading.tokens = reading.tokens, lambda *_: tokens
    try:
        best = sinks.anatomy(settings(sequence_length=16), "tiny_llama@4", model)["super_neurons"][0]
    finally:
        reading.tokens = original
    assert (best["layer"], best["neuron"], best["dimension"]) == (2, 99, 200)
    assert best["down_share"] == pytest.approx(1.0)
    assert not any(module._forward_pre_hooks for module in model.modules())


# ---- interventions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", CHOICES["attn_calibration"])
@pytest.mark.parametrize("position", [1, 4, 9])
def test_the_mask_makes_a_token_see_only_itself(kind, calibration, position):
    """Heads, layer by layer, are those of attention whose row k is one-hot: by explicit matrices."""
    model, found = random_model(replace(KINDS[kind], attn_calibration=calibration)), []
    tokens = random_tokens(2, range(3), 9, 97)
    change = attention.replaced("self_mask", None, model, position, (2,))

    def watch(layer, heads, q, k, v):
        A = q.double() @ k.double().repeat_interleave(4 // k.shape[1], 1).transpose(2, 3) / q.shape[3] ** 0.5
        A = A.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -math.inf)
        if layer == 2:
            A[:, :, position - 1, : position - 1] = -math.inf  # the mask itself
        expected = A.softmax(-1) @ v.double().repeat_interleave(4 // k.shape[1], 1)
        expected = model.model.layers[layer - 1].self_attn.calibrate(expected.float(), 9)
        changed = change(layer, heads, q, k, v)
        found.append((heads if changed is None else changed) - expected)
        return changed

    with torch.inference_mode():
        model.hidden(tokens, on_heads=watch)
    assert torch.stack(found).abs().max() < 2e-5  # values of order 3, some ten roundings of float32


def test_amplification_leaves_the_mean_and_scales_the_rest():
    model = random_model(KINDS["llama"])
    heads, v = torch.randn(50, 4, 9, 8, dtype=torch.float64) + 3, None
    for factor in (0.0, 0.5, 1.0, 8.0):
        changed = attention.replaced("amplify", factor, model, 5, (1,))(1, heads, v, v, v)
        torch.testing.assert_close(changed[:, :, 4].mean(0), heads[:, :, 4].mean(0))
        torch.testing.assert_close(changed[:, :, 4].std(0), factor * heads[:, :, 4].std(0))
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert torch.equal(changed[:, :, others], heads[:, :, others])
        scaled = attention.replaced("scale", factor, model, 5, (1,))(1, heads, v, v, v)
        torch.testing.assert_close(scaled[:, :, 4], factor * heads[:, :, 4])
    assert attention.replaced("amplify", 2.0, model, 5, (2,))(1, heads, v, v, v) is None


def test_intervene_reports_what_explicit_attention_says():
    model = random_model(KINDS["llama_gqa"])
    s = settings(sinks.Intervene, sequence_length=12, position=3, layers=(2,), factor=(0.0, 1.0, 5.0))
    found = sinks.intervene(s, "tiny_llama@1", model)
    rows = found["rows"]
    tokens = random_tokens(0, range(7), 12, 97)
    for row in rows:
        change = attention.replaced(row["intervention"], row["factor"], model, 3, (2,))
        values = brute_alpha(explicit(model, tokens, change), 3)[:, row["layer"] - 1].mean(1)
        assert row["alpha_k"] == pytest.approx(values.mean().item(), abs=1e-6)
        assert (row["low"], row["high"]) == pytest.approx(t_interval(values), abs=1e-6)
    by = {(r["intervention"], r["factor"], r["layer"]): r["alpha_k"] for r in rows}
    for kind, layer in itertools.product(("amplify", "scale"), (1, 2, 3)):
        assert by[kind, 1.0, layer] == pytest.approx(by["none", None, layer], abs=1e-6)  # factor 1: as it was
    for kind, factor in (("self_mask", None), ("amplify", 5.0), ("scale", 0.0)):
        assert [by[kind, factor, i] == by["none", None, i] for i in (1, 2, 3)] == [True, True, False]
    for row in found["summary"]:  # layer 3 alone comes after
        assert row["alpha_k"] == pytest.approx(by[row["intervention"], row["factor"], 3], abs=1e-6)
        assert row["shift"] == pytest.approx(row["alpha_k"] - by["none", None, 3], abs=1e-6)


# ---- the command line --------------------------------------------------------------------------------------

CONTRACT = {
    "rate": ("rate", "checkpoint sequence_length sink_rate mean_alpha1 max_alpha1 uniform_alpha1"),
    "variance": ("sink_variance", "checkpoint layer position std"),
    "anatomy": ("anatomy", "checkpoint layer position std dominance_ratio alpha"),
    "intervene": ("intervene", "checkpoint layer position intervention factor alpha_k low high"),
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A checkpoint with its tokenizer, a text and a data set made of it."""
    folder = tmp_path_factory.mktemp("sinks")
    text = folder / "text.txt"
    whole = "\n".join(path.read_text() for path in sorted(ROOT.glob("*.py")))
    text.write_text(whole)
    parts = [whole[i : i + 2000] for i in range(0, len(whole), 2000)]
    pieces = folder / "pieces.jsonl"
    pieces.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    wanted = data.Settings(source=(str(pieces),), tokenizer="bpe:500", held_out=0.3, out=str(folder / "data"))
    data.prepare(wanted)
    model = init.newborn(ModelConfig(500, 64, 2, 2, 32, 48), 0)
    checkpoint.save(folder / "model", model, tokenizer=folder / "data" / "tokenizer.model")
    return folder


@pytest.mark.parametrize("name", CONTRACT)
def test_contract_of_each_experiment(name, run_folder, tmp_path):
    file, keys = CONTRACT[name]
    model, out, tokenizer = run_folder / "model", tmp_path / "out", run_folder / "data" / "tokenizer.model"
    text = ["--data", run_folder / "data", "--bos"]
    if name in ("variance", "intervene"):
        text = ["--text", run_folder / "text.txt", "--bos", "--tokenizer", tokenizer]
    more = ["--sequence-length", 20, "--num-sequences", 4, "--out", out]
    done = run_script("sinks.py", name, "--model", model, "tiny_llama@5", *text, *more)
    assert done.returncode == 0, done.stderr
    result = json.loads((out / f"{file}.json").read_text())
    assert {row["checkpoint"] for row in result["rows"]} == {str(model), "tiny_llama@5"}
    assert set(keys.split()) <= set(result["rows"][0])
    assert result["claims"] == list(getattr(findings, file)(result.get("summary", result["rows"])))
    pictures = {path.name for path in out.glob("*.png")}
    if name == "rate":
        assert pictures == {"rate.png", "rate_heads.png"}
    else:
        assert len(pictures) == 2 and f"{file}_tiny_llama_5.png" in pictures
    assert ("super_neurons" in result) == (name == "anatomy") and ("heads" in result) == (name == "rate")
    assert all(not isinstance(value, list | dict) for row in result["rows"] for value in row.values())


def test_text_and_data_are_what_the_model_reads(run_folder):
    spec, s = str(run_folder / "model"), settings(text=str(run_folder / "text.txt"), sequence_length=16)
    tokens = reading.tokens(s, spec, 16, 500)
    from tokenizer import load_tokenizer

    coder = load_tokenizer(str(run_folder / "data" / "tokenizer.model"))
    text = (run_folder / "text.txt").read_text()
    assert all(coder.decode(row.tolist()) in text for row in tokens)
    assert torch.equal(tokens, reading.tokens(s, spec, 16, 500))
    begun = reading.tokens(replace(s, bos=True), spec, 16, 500)
    assert (begun[:, 0] == coder.bos).all() and torch.equal(begun[:, 1:], tokens[:, 1:])
    held = reading.tokens(replace(s, text=None, data=str(run_folder / "data")), spec, 16, 500)
    stored = data.TokenData(run_folder / "data")
    assert torch.equal(held, stored.held_out(7, 16)[0])


def test_bfloat16_is_close():
    model, tokens = checkpoint.load("tiny_llama@1"), random_tokens(0, range(4), 32, 4096)
    rounded = checkpoint.load("tiny_llama@1", dtype=torch.bfloat16)
    difference = attention.first_attention(model, tokens) - attention.first_attention(rounded, tokens)
    assert difference.abs().max() < 0.01  # a bfloat16 weight is off by up to 2^-9 of itself


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["rates"], ["rate"]),
        (["rate", "extra"], ["extra"]),
        (["rate", "--epsilon", "nan"], ["--epsilon"]),
        (["rate", "--attn-calibration", "attenuated"], ["attenuate"]),
        (["rate", "--sequence-length", 1000], ["--sequence-length 1000", "256"]),
        (["rate", "--num-sequences", 1], ["--num-sequences"]),
        (["rate", "--data", "a", "--text", "b"], ["--data", "--text"]),
        (["rate", "--tokenizer", "bytes"], ["--tokenizer", "--text"]),
        (["rate", "--model", "tiny_llama", "tiny_llama@42"], ["twice"]),
        (["rate", "--text", ".", "--tokenizer", "bytes"], ["cannot read ."]),
        (["rate", "--text", "pyproject.toml", "--tokenizer", "bytes", "--sequence-length", 256], ["lower"]),
        (["rate", "--text", "missing.txt", "--tokenizer", "bytes"], ["missing.txt"]),
        (["rate", "--text", "README.md"], ["tiny_llama", "--tokenizer"]),
        (["rate", "--data", "missing"], ["missing", "data.py"]),
        (["anatomy", "--model", "missing"], ["missing"]),
        (["intervene", "--position", 0], ["--position 0"]),
        (["intervene", "--position", 65], ["--position 65", "64"]),
        (["intervene", "--layers", 6], ["--layers", "at most 5"]),
        (["intervene", "--layers", 0], ["--layers", "at most 5"]),
        (["intervene", "--factor", "inf"], ["--factor"]),
        (["intervene", "--factor", "nan"], ["--factor"]),
        (["variance", "--epsilon", 0.2], ["--epsilon"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_mistakes_are_refused(arguments, words, tmp_path):
    with pytest.raises(UserError) as refusal:
        for _, work in sinks.plan([*map(str, arguments), "--out", str(tmp_path)]):
            work()
    for word in words:
        assert word in str(refusal.value)


def test_a_mistake_is_one_line_and_status_2(tmp_path):
    assert_refused(run_here("sinks.py", "intervene", "--position", 65, "--out", tmp_path), "--position 65")


def refused(match: str, **given):
    """A UserError of `rate` with a model of two layers and these settings."""
    with pytest.raises(UserError, match=match):
        sinks.run("rate", settings(sinks.Rate, **given))


def test_weights_of_nan_and_foreign_tokens_are_refused(tmp_path, run_folder):
    model, out = init.newborn(ModelConfig(**SMALL), 0), str(tmp_path)
    model.model.layers[1].self_attn.k_proj.weight.data[3, 3] = math.nan
    checkpoint.save(tmp_path / "nan", model)
    refused("k_proj.weight is not finite", model=(f"{tmp_path}/nan",), out=out)
    model.model.layers[1].self_attn.k_proj.weight.data[3, 3] = 0.0
    checkpoint.save(tmp_path / "small", model)
    tokenizer = str(run_folder / "data" / "tokenizer.model")
    text = dict(text=str(run_folder / "text.txt"), tokenizer=tokenizer)
    refused("knows 97", model=(f"{tmp_path}/small",), out=out, **text)
    source = (str(run_folder / "pieces.jsonl"),)
    data.prepare(data.Settings(source=source, tokenizer="bytes", held_out=0.3, out=str(tmp_path / "b")))
    refused("another tokenizer", model=(str(run_folder / "model"),), data=str(tmp_path / "b"), out=out)


# ---- what is claimed ---------------------------------------------------------------------------------------


def verdicts(claims):
    return [claim["holds"] for claim in claims]


def test_claims_of_rate():
    def row(T, sink, alpha, error=0.01):
        uniform = attention.uniform_alpha(T)
        return dict(checkpoint="m", sequence_length=T, epsilon=0.3, uniform_alpha1=uniform, sink_rate=sink,
            low=sink - error, mean_alpha1=alpha, alpha1_low=alpha - error)  # fmt: skip

    assert verdicts(findings.rate([row(64, 0.5, 0.4), row(128, 0.2, 0.4)])) == [True, True]
    assert verdicts(findings.rate([row(64, 0.5, 0.4), row(128, 0.005, 0.04)])) == [False, False]
    assert not list(findings.rate([row(8, 1.0, attention.uniform_alpha(8))]))  # uniform attention sinks there
    at_birth = row(64, 0.0, attention.uniform_alpha(64))
    assert verdicts(findings.rate([at_birth])) == [False, False]


def test_claims_of_variance():
    def rows(stds, theory=None):
        return [
            dict(checkpoint="m", layer=1, position=i, std=std, theory=theory and theory[i - 1])
            for i, std in enumerate(stds, start=1)
        ]

    falling = [i**-0.5 for i in range(1, 33)]
    assert verdicts(findings.sink_variance(rows(falling, falling))) == [True, True]
    assert verdicts(findings.sink_variance(rows(falling, [1.05 * std for std in falling]))) == [False, True]
    assert verdicts(findings.sink_variance(rows([1.0] * 32))) == [False]
    assert verdicts(findings.sink_variance(rows([1.0, 3.0, *falling[2:]]))) == [False]  # not the first
    assert not list(findings.sink_variance(rows(falling[:8])))


def test_claims_of_anatomy():
    def rows(first, layers=3, **more):
        found = []
        for layer, position in itertools.product(range(1, layers + 1), range(1, 65)):
            uniform = attention.uniform_alpha(64, position)
            row = dict(checkpoint="m", layer=layer, position=position, uniform_alpha=uniform, alpha=uniform)
            row |= dict(std=1.0, dominance_ratio=4.0, key_alignment=0.3)
            if position == 1:
                row |= {key: row[key] * first for key in ("alpha", "std", "dominance_ratio")} | more
            found.append(row)
        return found

    assert verdicts(findings.anatomy(rows(1.0))) == [False] * 4  # uniform attention is no sink
    assert verdicts(findings.anatomy(rows(5.0, key_alignment=0.9))) == [True] * 4
    one_layer = [*findings.anatomy(rows(5.0, layers=1, key_alignment=1.0))]  # one token for all: no collapse
    assert len(one_layer) == 3 and not any("key" in claim["claim"] for claim in one_layer)


def test_claims_of_interventions():
    def summary(
        mask=0.02, amplify=(0.02, 0.03, 0.06), scale=(0.02, 0.02, 0.02), factors=(1.0, 2.0, 4.0), k=5
    ):
        def row(kind, factor, alpha):
            shift = alpha - 0.02
            return dict(checkpoint="m", position=k, intervention=kind, factor=factor, alpha_k=alpha,
                shift=shift, shift_low=shift - 0.001, shift_high=shift + 0.001)  # fmt: skip

        found = [row("none", None, 0.02), row("self_mask", None, mask)]
        found += [row("amplify", factor, alpha) for factor, alpha in zip(factors, amplify)]
        for factor, alpha, amplified in zip(factors, scale, amplify):
            more = amplified - alpha
            found.append(
                row("scale", factor, alpha)
                | dict(amplify_more_low=more - 0.001, amplify_more_high=more + 0.001)
            )
        return list(findings.intervene(found))

    assert verdicts(summary(mask=0.05)) == [True] * 4
    assert verdicts(summary()) == [True, False, True, True]
    assert verdicts(summary(0.05, amplify=(0.02, 0.06, 0.05))) == [True, True, False, True]
    assert verdicts(summary(0.05, scale=(0.02, 0.03, 0.09))) == [True, True, True, False]
    assert len(summary(k=1)) == 3  # the first position attends to itself alone anyway
    assert len(summary(amplify=(0.06,), scale=(0.02,), factors=(4.0,))) == 3  # one factor: nothing rises
    assert not list(findings.intervene([]))


# ---- growing them ------------------------------------------------------------------------------------------


def test_training_tracks_sinks(run_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny_llama", ModelConfig(500, 64, 2, 2, 32, 48))
    s = train.Settings(
        data=str(run_folder / "data"), out=str(tmp_path / "run"), sequence_length=32, global_batch_size=4,
        micro_batch_size=4, max_iters=3, warmup_iters=1, eval_every=2, eval_sequences=5, track_sinks=True,
        device="cpu", dtype="float32",
    )  # fmt: skip
    train.train(s)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    tracked = {line["step"]: line for line in lines if "mean_alpha1" in line}
    assert list(tracked) == [0, 2, 3]
    stored = data.TokenData(run_folder / "data")
    tokens, _ = stored.held_out(5, 32)
    alpha = explicit(checkpoint.load(str(tmp_path / "run")), tokens)[..., 0].mean(-1)
    assert tracked[3]["mean_alpha1"] == pytest.approx(alpha.mean().item(), abs=1e-6)
    assert tracked[3]["max_alpha1"] == pytest.approx(alpha.mean(0).max().item(), abs=1e-6)
    assert tracked[3]["sink_rate"] == pytest.approx((alpha > 0.3).double().mean().item(), abs=1e-6)


def test_backcopy_copies():
    documents = list(itertools.islice(data.backcopy(), 3000))
    assert documents[:5] == list(itertools.islice(data.backcopy(), 5))
    assert {len(text) for text in documents} == {127}
    text, follow = "".join(documents), np.zeros((26, 26))
    assert set(text) == set("abcdefghijklmnopqrstuvwxyz")
    for document in documents:
        assert document[0] not in data.TRIGGERS
        for before, letter, after in zip(document, document[1:], document[2:]):
            if letter in data.TRIGGERS:
                assert after == before
            else:
                follow[ord(letter) - 97, ord(after) - 97] += 1
    share = sum(text.count(letter) for letter in data.TRIGGERS) / len(text)
    assert 0.05 < share < 0.25  # often enough to be learnt, seldom enough to sleep
    halves = np.zeros((2, 26, 26))  # the rest is a chain: the same bigrams in both halves of the documents
    for i, document in enumerate(documents):
        for letter, after in zip(document[5:], document[6:]):
            halves[i % 2, ord(letter) - 97, ord(after) - 97] += letter not in data.TRIGGERS
    rates = halves / halves.sum(2, keepdims=True).clip(min=1)
    assert np.abs(rates[0] - rates[1]).max() < 0.1  # of some 2,000 letters: 5 standard errors at most


def test_backcopy_wants_bytes_and_aligns_with_windows(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--tokenizer bytes"):
        data.prepare(data.Settings(source=("backcopy",), out=str(tmp_path / "x")))
    monkeypatch.setattr(data, "backcopy", lambda original=data.backcopy: original(count=400))
    folder = data.prepare(data.Settings(source=("backcopy",), tokenizer="bytes", out=str(tmp_path / "set")))
    tokens, targets = data.TokenData(folder).windows("train", range(5), 128)
    assert (
        (tokens[:, 0] == 256).all()
        and (tokens[:, 1:] < 123).all()
        and (targets[:, :-1] == tokens[:, 1:]).all()
    )
