"""sinks.py transplant: constants, their effects, and the saved model, by plain loops and transformers."""

import re
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from architectures import build
from conftest import KINDS, ROOT, assert_refused, random_model, run_here, save_byte_tokenizer
from safetensors import safe_open
from test_sinks import NEAR, about, alpha_of, explicit

from lib.random import random_tokens
from measure import attention
from measure import transplant as transplanting
from measure.transplant import Case, TransplantSettings, alpha_and_loss, effects, transplant
from measure.units import Activity, observe
from reproduce.interventions import cases_and_controls, num_needed
from sources import checkpoint, saving

SETTINGS = {"num_sequences": 5, "num_constants": 3}


@pytest.mark.parametrize("kind", ["gpt2", "llama_gqa"])
def test_constants_are_the_means_of_a_position(kind):
    model = random_model(KINDS[kind])
    tokens = random_tokens(0, range(6), 9, 97)
    seen = []
    with torch.inference_mode():
        model.hidden(tokens, on_heads=lambda layer, heads, q, k, v, alpha: seen.append((k, v)))
    for position in (1, 4):
        constants = attention.constants_at(model, tokens, position)
        for (key, value), (k, v) in zip(constants.values(), seen, strict=True):
            # float32 means of six numbers
            torch.testing.assert_close(key, k[:, :, position - 1].mean(0), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(value, v[:, :, position - 1].mean(0), rtol=1e-5, atol=1e-6)


def test_constants_in_some_layers():
    model = random_model(KINDS["llama"])
    tokens = random_tokens(0, range(2), 12, 97)
    constants = attention.constants_at(model, tokens)
    changed = attention.with_constants(model, {2: constants[2]})
    seen, seen_there = {}, {}
    with torch.inference_mode():
        model.hidden(tokens, on_state=seen.__setitem__)
        changed.hidden(tokens, on_state=seen_there.__setitem__)
    assert torch.equal(seen[1], seen_there[1]) and not torch.equal(seen[2], seen_there[2])
    alpha, _ = attention.attention_to(changed, tokens, (0,))
    assert (alpha[:, [0, 2]] == 0).all() and (alpha[:, 1] > 0).all()


def test_effects_against_a_plain_recomputation():
    """Losses by whole logits, a token in front or none; the stream's largest numbers; the unit watched."""
    model = random_model(KINDS["llama_gqa"])
    tokens = random_tokens(0, range(5), 14, 97)
    tokens[:, 0] = 3
    builder = (2, 7)
    states, units = [], {}
    with torch.inference_mode(), model.hidden_units(lambda layer, u: units.update({layer: u})):
        whole = model(tokens)
        model.hidden(tokens, on_state=lambda layer, x: states.append(x.numpy()))
    for before, case in enumerate((Case("", model), Case("", model, (3,)))):
        row, largest, _ = effects(case, tokens[:, before:], builder)
        logits = whole[:, before:-1].flatten(0, 1)
        losses = F.cross_entropy(logits, tokens[:, before + 1 :].flatten(), reduction="none").view(5, -1)
        assert losses.shape[1] == 13 - before
        # float32 sums in another order
        assert row["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert row["loss_from_ninth"] == pytest.approx(losses[:, 8:].mean().item(), rel=1e-5)
        assert largest == pytest.approx({layer: abs(states[layer]).max() for layer in (1, 2, 3)})
        assert row["largest"] == max(largest.values())
        assert row["builder_activation"] == pytest.approx(units[2][:, 0, 7].abs().mean().item(), rel=1e-5)
        assert row["constant_alpha"] == 0
    short, *_ = effects(Case("", model), tokens[:, :8], builder)
    assert short["loss_from_ninth"] is None


def test_selective_builders():
    """Active at position 1 alone, and each a thousandth of the dimension; not in later layers."""
    down = torch.tensor([[1.0, 1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])  # (d, d_ff)
    state = torch.tensor([[0.0, 0.0], [-100.0, 1.0], [-10.0, 1.0]])
    disparity = torch.tensor([1.0, 60.0, 20.0])  # largest after layer 1
    at_1 = torch.tensor([[-50.0, -40.0, 10.0, -0.09], [-50.0, 0.0, 0.0, 0.0]])  # (L, d_ff)
    elsewhere = torch.tensor([[2.6, 2.0, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0]])
    activity = Activity(SimpleNamespace(down=lambda layer: down), 1, state, disparity, at_1, elsewhere, {})
    assert activity.builders(4) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert activity.selective() == [(1, 1), (1, 2)]  # 1/0 is but 19 times as active, 1/3 makes too little


def test_rows_are_what_their_kinds_say(tmp_path):
    model = random_model(KINDS["llama_gqa"])
    settings = about(model, tmp_path, TransplantSettings, **SETTINGS, sequence_length=(12, 20))
    result = transplant(settings, partial(cases_and_controls, 0))
    rows = {(row["kind"], row["sequence_length"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    both = random_tokens(0, range(8), 12, 97)
    tokens, others = both[:5], both[5:]
    activity = observe(model, tokens)
    (builder,) = activity.builders(1)
    means = attention.constants_at(model, others)
    changed = attention.with_constants(model, means)
    turned = {layer: [x[[1, 0]] for x in pair] for layer, pair in means.items()}
    other_heads = attention.with_constants(model, turned)
    models = {"moved": changed, "unchanged": model, "constants of other heads": other_heads}
    for kind, measured in models.items():
        expected, *_ = effects(Case("", measured), tokens, builder)
        assert rows[kind, 12].items() >= expected.items()
    case = Case("", model, ablated=activity.builders(num_needed(activity, 0.99)))
    expected, *_ = effects(case, tokens, builder)
    assert rows["builders of 99 % at zero", 12].items() >= expected.items()
    front = [row for (kind, T), row in rows.items() if kind.startswith("token in front") and T == 12]
    assert len(front) == 3 and all(row["constant_alpha"] == 0 for row in front)


def test_a_model_that_begins_with_bos(tmp_path, monkeypatch):
    """Each case put together by hand; losses are of the same text."""
    model = random_model(KINDS["llama_gqa"])
    both = random_tokens(0, range(8), 15, 97)
    both[:, 0] = bos = 3
    tokens, others = both[:5], both[5:]
    text = tokens[:, 1:]
    monkeypatch.setattr(transplanting, "prefix_of", lambda settings, spec: (bos,))
    monkeypatch.setattr(transplanting, "split_windows", lambda settings, spec, T: (tokens, others))
    result = transplant(about(model, tmp_path, TransplantSettings, **SETTINGS, sequence_length=(15,)))
    rows = {row["kind"]: row for row in result["rows"]}
    activity = observe(model, tokens)
    (builder,) = activity.builders(1)
    of_bos = attention.with_constants(model, attention.constants_at(model, tokens))
    for case in (Case("unchanged", model, (bos,)), Case("moved", of_bos)):
        expected, *_ = effects(case, text, builder)
        assert {name: rows[case.kind][name] for name in expected} == pytest.approx(
            expected, rel=1e-5
        )  # float32
    first = alpha_of(explicit(model, tokens), 1)
    as_it_is, _, to_constant = [torch.tensor(heads["alpha"]) for heads in result["heads"]]  # (L, H) each
    torch.testing.assert_close(as_it_is, first.mean(0).float(), atol=NEAR, rtol=0)
    assert to_constant.mean() == pytest.approx(rows["moved"]["constant_alpha"], abs=NEAR)


def test_constants_are_kept_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = random_model(KINDS["llama_gqa"])
    saving.save(Path("model"), model)
    words = ("--model", "model", "--sequence-length", "12", "--num-sequences", "5", "--device", "cpu")
    done = run_here("sinks", "transplant", *words, "--save", "cure.safetensors", "--out", "out")
    assert done.returncode == 0, done.stderr
    tokens, others = random_tokens(0, range(21), 12, 97).split((5, 16))
    measured = attention.constants_at(model, others)
    with safe_open("cure.safetensors", "pt") as file:
        assert file.metadata()["text"] == "random tokens"
        for layer, (key, value) in measured.items():
            assert torch.equal(file.get_tensor(f"keys.{layer - 1}"), key[None, :, None])
            assert torch.equal(file.get_tensor(f"values.{layer - 1}"), value[None, :, None])
    save = ("--save", "cure.safetensors", "--out", "out")
    assert_refused(run_here("sinks", "transplant", *words, *save), "expected a new file")


@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text", "gpt_neox"])
def test_lines_of_the_docs_use_the_file(model_type, tmp_path, monkeypatch):
    """docs/sinks.md's lines, as they stand: plain transformers has our attention and loss, and writes on."""
    monkeypatch.chdir(tmp_path)
    theirs = build(model_type)
    theirs.config.sliding_window = 64  # more than is read
    theirs.save_pretrained("model")
    save_byte_tokenizer(Path("model"))
    transformers.PreTrainedTokenizerFast(tokenizer_file="model/tokenizer.json").save_pretrained("model")
    words = ("--model", "model", "--sequence-length", "16", "--num-sequences", "4", "--num-constants", "4")
    done = run_here("sinks", "transplant", *words, "--save", "cure.safetensors", "--out", "out")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/sinks.md").read_text()
    (lines,) = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    Path("lines.py").write_text(lines)
    found = runpy.run_path("lines.py")
    tokens, output, written = found["tokens"], found["output"], found["written"]
    assert tokens.shape == (1, 40) and written.shape == (1, 60)  # bytes
    lens = checkpoint.load("model")
    with safe_open("cure.safetensors", "pt") as file:
        pairs = [
            [file.get_tensor(f"{part}.{i}")[0, :, 0] for part in ("keys", "values")]
            for i in range(len(lens.blocks))
        ]
    lens = attention.with_constants(lens, dict(enumerate(pairs, start=1)))
    alpha, _ = attention.attention_to(lens, tokens, (0, 2))
    weights = torch.stack(output.attentions, dim=1).sum(3)  # (1, L, H, 1 + T)
    expected = weights[..., [0, 2]] / torch.tensor([40, 39])  # queries that see them
    torch.testing.assert_close(alpha, expected, rtol=0, atol=1e-5)  # float32 sums in another order
    assert output.loss.item() == pytest.approx(alpha_and_loss(lens, tokens)[1]["loss"], rel=1e-5)
    for _ in range(20):
        following = lens.unembed(lens.hidden(tokens, last_only=True)).argmax(1)
        tokens = torch.cat((tokens, following[None]), dim=1)
    assert torch.equal(tokens, written)
