"""reproduce/interventions.py against explicit attention and loops; every script on OpenAI's GPT-2."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import KINDS, random_model, run_here, save_byte_tokenizer
from hub_server import serving
from test_hub import point_to, repositories
from test_sinks import NEAR, about, alpha_of, contributions_of, disparity_of, explicit, given, observe, saved

from lib import runtime
from lib.files import read_json
from lib.random import random_tokens
from lib.results import interval
from lib.settings import UserError
from reproduce import interventions


@pytest.mark.parametrize("calibration", ["none", "amplify", "headnorm"])
def test_intervene_reports_what_explicit_attention_says(calibration, tmp_path):
    model = random_model(replace(KINDS["llama_gqa"], attn_calibration=calibration))
    with torch.no_grad():  # the first builder is one of layer 1, whatever is done there
        model.model.layers[0].mlp.down_proj.weight[:, 7] *= 1000
    words = {"sequence_length": 12, "position": 3, "factor": (0.1, 1.0, 5.0)}
    result = interventions.intervene(about(model, tmp_path, interventions.InterveneSettings, **words))
    (builder,) = result["builders"]
    assert (builder["layer"], builder["unit"]) == (1, 7)
    tokens = random_tokens(0, range(7), 12, 97)

    def replaced(layer, heads, q, k, v, alpha):
        if kind == "none" or (place == 1 and layer > 1) or (place == "2-3" and layer == 1):
            return None
        values = heads[:, :, 2]
        mean = values.mean(0) if kind == "amplify" else 0
        if kind == "self_mask":  # a token that sees itself alone has its own value
            alone = model.model.layers[layer - 1].self_attn.calibrate(v.repeat_interleave(2, dim=1), 12)
            changed = alone[:, :, 2]
        else:
            changed = mean + factor * (values - mean)
        return torch.cat((heads[:, :, :2], changed[:, :, None], heads[:, :, 3:]), dim=2)

    for number, row in enumerate(result["rows"]):
        place, kind, factor = row["changed"], row["intervention"], row["factor"]
        alpha = alpha_of(explicit(model, tokens, replaced), 3)[:, 1:].mean((1, 2))  # layers 2 and 3
        _, units = observe(model, tokens, replaced)
        activation = units[0, :, 2, 7].abs()
        active = activation >= 0.1 * builder["first"]
        expected = interval(alpha.numpy(), "alpha_k")
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=NEAR)
        assert row["fires"] == pytest.approx(active.double().mean().item())
        for key, chosen in (("alpha_k_firing", alpha[active]), ("alpha_k_off", alpha[~active])):
            assert row[key] == (pytest.approx(chosen.mean().item(), abs=NEAR) if len(chosen) else None)
        if place == "2-3":  # of which no points are drawn
            continue
        points = result["points"][7 * number : 7 * number + 7]
        assert [point["alpha_k"] for point in points] == pytest.approx(alpha.tolist(), abs=NEAR)
        # float32 states that two interventions have made large
        assert [point["activation"] for point in points] == pytest.approx(activation.tolist(), rel=1e-3)


def parse(words: str) -> list[tuple[int, int]]:
    return [tuple(map(int, word.split("/"))) for word in words.split()]


def test_ablation_is_a_model_without_these_units(tmp_path, monkeypatch):
    """Rates and loss are those of a model whose down columns are zero; `left` is of its stream."""
    model = random_model(KINDS["llama_gqa"], seed=12)  # its first builders are in layers 2 and 3
    settings = given(sequence_length=9)
    monkeypatch.setattr(interventions, "MOST_BUILDERS", 3)
    monkeypatch.setitem(runtime.BATCH_TOKENS, "cpu", 27)  # batches of 3, 3 and 1
    rows = interventions.ablations(settings, saved(model, tmp_path), model)
    tokens = random_tokens(0, range(7), 9, 97)
    stream, units = observe(model, tokens)
    largest = 1 + int(disparity_of(stream)[1:].argmax())
    dimension, builds = contributions_of(model, stream, units, largest)
    a, b, c, *_ = [unit for unit in builds if unit[0] <= largest]
    order = [[], [a], [a, b], [a, b, c], [b], [c], [a, b, c], list(builds)[:-4:-1]]
    assert [parse(row["units"]) for row in rows[:8]] == order
    assert [row["kind"] for row in rows[6:]] == ["constant", "removers", "elsewhere", "random"]
    for row in rows:
        poorer = random_model(KINDS["llama_gqa"], seed=12)
        if row["kind"] == "constant":
            for layer, unit in (a, b, c):
                hold(poorer, layer, unit, units[layer - 1, :, 0, unit].mean())
        else:
            for layer, unit in parse(row["units"]):
                poorer.model.layers[layer - 1].mlp.down_proj.weight.data[:, unit] = 0
        alpha = alpha_of(explicit(poorer, tokens), 1)  # (n, L, H)
        assert row["sink_rate"] == pytest.approx((alpha > 0.3).double().mean().item(), abs=NEAR)
        assert 0 <= row["low"] <= row["sink_rate"] <= row["high"] <= 1
        assert row["mean_alpha1"] == pytest.approx(alpha.mean().item(), abs=NEAR)
        with torch.inference_mode():
            logits = poorer(tokens)[:, :-1]
        loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:]).item()
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        changed, _ = observe(poorer, tokens)
        left = changed[largest, :, 0, dimension].mean() / stream[largest, :, 0, dimension].mean()
        assert row["left"] == pytest.approx(left.item(), rel=1e-4, abs=1e-5)
        assert row["disparity"] == pytest.approx(disparity_of(changed)[largest].item(), rel=1e-5)
    random = parse(rows[-1]["units"])
    assert len(set(random)) == 3 and not {a, b, c} & set(random)


def hold(model, layer: int, unit: int, value: torch.Tensor) -> None:
    def held(module, inputs):
        inputs[0][:, 0, unit] = value

    model.model.layers[layer - 1].mlp.down_proj.register_forward_pre_hook(held)


SIZES = {"vocab_size": 257, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}


def save_gpt2(folder: Path) -> None:
    """transformers' model of random weights, biases and norms, with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = ".ln_" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, 0.2)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder, "<|endoftext|>")


SCRIPTS = [  # what is asked, and the JSON that answers
    ("sinks rate", "rate"),
    ("reproduce.interventions bos", "bos"),
    ("reproduce.interventions intervene --position 3", "intervene"),
    ("reproduce.interventions ablate", "ablate"),
    ("probe", "probe"),
]


def test_every_script_on_what_the_hub_serves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_gpt2(tmp_path / "a")
    files, _ = repositories(tmp_path / "others")
    files["org/gpt2"] = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with serving(files) as server:
        point_to(server.url, monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        for words, name in SCRIPTS:
            length = ["--sequence-length", 16, "--num-sequences", 4, "--dtype", "float32"]
            done = run_here(*words.split(), "--model", "org/gpt2", *length)
            assert done.returncode == 0, done.stderr
            assert read_json(Path(f"out/{name}.json"))["rows"]
        for words in (["paper", "--paper-sequences", 20, "--paper-length", 9], ["compare"]):
            done = run_here("seedprint", *words, "org/gpt2", "org/gpt2")
            assert done.returncode == 0, done.stderr


@torch.inference_mode()
def test_a_value_left_out_by_brute_force():
    """Later queries' sums without position 1's value; the other weights as they are, or scaled up to 1."""
    from reproduce.hide import without_value

    model = random_model(KINDS["llama_gqa"])
    tokens = random_tokens(0, range(3), 10, 97)
    for kind in ("value left out", "left out, other weights scaled up"):

        def by_hand(layer, heads, q, k, v, alpha, kind=kind):
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
            scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
            weights = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf).softmax(-1)
            weights[:, :, 1:, 0] = 0
            if "scaled" in kind:
                weights /= weights.sum(-1, keepdim=True)
            return weights @ v

        found = model.hidden(tokens, on_heads=without_value(model, kind))
        torch.testing.assert_close(found, model.hidden(tokens, on_heads=by_hand), rtol=0, atol=1e-4)


@torch.inference_mode()
def test_a_profile_is_what_queries_pay():
    """Of our model and of a Lens: its mean is alpha_1, and later tokens change nothing."""
    from architectures import build
    from test_lens import checked

    from measure import attention, caveats

    for model in (random_model(KINDS["llama_gqa"]), checked(build("llama"))):
        tokens = random_tokens(0, range(3), 10, 90)
        profile = caveats.query_profile(model, tokens)
        alpha, _ = attention.attention_to(model, tokens, (1,))
        assert profile.mean().item() == pytest.approx(alpha.mean().item(), abs=1e-5) and profile[0] == 1
        shorter = caveats.query_profile(model, tokens[:, :6])
        torch.testing.assert_close(shorter, profile[:6], rtol=0, atol=1e-5)


@torch.no_grad()
def test_repeats_by_explicit_attention(tmp_path, monkeypatch):
    """What queries behind a run pay all of it, and the losses of the text alone."""
    monkeypatch.setattr(interventions, "COPIES", (1, 3))
    model = random_model(KINDS["llama_gqa"])
    result = interventions.repeats(about(model, tmp_path, sequence_length=12, num_sequences=4))
    tokens = random_tokens(0, range(20), 12, 97)[:4]
    own = [row for row in result["rows"] if row["kind"] == "copies"]
    for copies, row in zip((1, 3), own, strict=True):
        read = torch.cat((tokens[:, :1].expand(-1, copies - 1), tokens), dim=1)
        paid = torch.cat([explicit(model, window[None]) for window in read])[..., copies:, :copies]
        assert row["run_alpha"] == pytest.approx(paid.sum(-1).mean().item(), abs=NEAR)
        logits = model(read)[:, copies + 7 : -1].flatten(0, 1)  # from the ninth prediction on
        loss = F.cross_entropy(logits, read[:, copies + 8 :].flatten()).item()
        assert row["loss"] == pytest.approx(loss, abs=NEAR)
    assert own[0]["added"] == 0
    with pytest.raises(UserError, match="expected 10 at least"):
        interventions.repeats(about(model, tmp_path, sequence_length=9, num_sequences=4))
