"""Attention where windows end, learned sinks and long texts: alpha against each model's own eager weights."""

from dataclasses import replace

import pytest
import torch
from architectures import build
from conftest import KINDS, random_model, run_here
from test_lens import TINY, checked

import sinks
from hf import lens as lenses
from lib.files import read_json
from lib.random import random_tokens
from measure import attention, caveats
from reproduce import hide

FAMILIES = "gemma2 gemma3_text gpt_oss mimo_v2_flash llama4_text mistral phi3 cohere2 olmo3 qwen3".split()
LONGEST = 300
WINDOW = 8


@pytest.fixture(scope="module", params=FAMILIES)
def lens(request):
    """A tiny model of a family that has windows, chunks or learned sinks, and reads long texts."""
    with pytest.MonkeyPatch.context() as patch:
        special = TINY["special"].get(request.param, {}) | {"max_position_embeddings": 512}
        special |= {"attention_chunk_size": WINDOW} if request.param == "llama4_text" else {}
        patch.setitem(TINY["special"], request.param, special)
        return checked(build(request.param))


def eager_weights(lens, tokens, mask=None):
    """By layer, the weights (B, H, T, T) that transformers' own eager attention returns."""
    output = lens.model(input_ids=tokens, attention_mask=mask, output_attentions=True, use_cache=False)
    return [some.double() for some in output.attentions]


def sees_of(lens, T):
    """By layer, which keys a query sees, (T, T), as the configuration tells."""
    config = lens.model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * 99
    i, j = torch.arange(T)[:, None], torch.arange(T)
    windows = {
        "full_attention": i >= j,
        "sliding_attention": (i >= j) & (i - j < (getattr(config, "sliding_window", None) or T)),
        "chunked_attention": (i >= j) & (i // WINDOW == j // WINDOW),
    }
    return [windows[kind] for kind in kinds[: lens.config.num_layers]]


@torch.no_grad()
@pytest.mark.parametrize("T", [24, LONGEST])
def test_alpha_is_the_mean_over_queries_that_see(lens, T, monkeypatch):
    monkeypatch.setattr(lenses, "WEIGHTS", 4000)  # few queries at a time
    tokens = lens.probe_tokens(T)
    alpha, _ = attention.attention_to(lens, tokens, range(1, T + 1))  # (B, L, H, T)
    for seen, weights, sees in zip(alpha.unbind(1), eager_weights(lens, tokens), sees_of(lens, T)):
        for p in (1, 2, 7, 9, T // 2, T):
            queries = sees[:, p - 1].nonzero()[:, 0].tolist()
            expected = sum(weights[:, :, i, p - 1] for i in queries) / len(queries)
            torch.testing.assert_close(seen[..., p - 1].double(), expected, rtol=0, atol=1e-6)
    assert [*attention.queries_that_see_the_first(lens, T).values()] == [
        sees[:, 0].sum() for sees in sees_of(lens, T)
    ]
    for sees in sees_of(lens, T):  # the first queries, which see all before themselves: sinks.py relies on it
        first = sees[sees[:, 0]]
        assert torch.equal(first.sum(1), torch.arange(1, len(first) + 1))


@torch.no_grad()
def test_hidden_weights_are_a_mask_of_transformers(lens):
    """Its own eager attention, given a 4-D mask: logits, and alpha of the later half of the queries."""
    T = WINDOW  # a 4-D mask takes the place of windows
    tokens = lens.probe_tokens(T)
    query, key = torch.arange(T)[:, None], torch.arange(T)
    hides = (key < 2) & (query > key)
    mask = torch.zeros(1, 1, T, T).masked_fill((query < key) | hides, torch.finfo(torch.float32).min)
    other = lens.hiding(hides, T // 2)
    truth = lens.model(input_ids=tokens, attention_mask=mask.expand(2, 1, T, T), use_cache=False).logits
    torch.testing.assert_close(other.unembed(other.hidden(tokens)), truth, rtol=0, atol=1e-5)
    alpha, _ = attention.attention_to(other, tokens, range(1, T // 2 + 1))
    weights = torch.stack(eager_weights(lens, tokens, mask.expand(2, 1, T, T)), 1)
    expected = weights[..., T // 2 :, : T // 2].mean(3).float()
    torch.testing.assert_close(alpha, expected, rtol=0, atol=1e-6)
    assert (alpha[..., :2] == 0).all()


def test_a_mask_is_made_for_some_queries(lens, monkeypatch):
    """No mask of all pairs of positions, unless a model changes it."""
    made = []

    def note(**given):
        made.append(given["q_length"])
        return usual(**given)

    usual = lenses.eager_mask
    monkeypatch.setattr(lenses, "eager_mask", note)
    monkeypatch.setattr(lenses, "WEIGHTS", 4000)
    lens.hidden(lens.probe_tokens(LONGEST))
    assert made and max(made) <= 64


@torch.no_grad()
def test_a_constant_and_a_learned_sink_are_two():
    lens = checked(build("gpt_oss"))
    tokens = lens.probe_tokens(6)
    moved = attention.with_constants(lens, attention.constants_at(lens, tokens))
    alpha, _ = attention.attention_to(moved, tokens, (*range(1, 7), 0, -1))
    queries = torch.tensor([6, 5, 4, 3, 2, 1, 6, 6])
    shares = (alpha * queries / 6).sum(-1)
    torch.testing.assert_close(shares, torch.ones_like(shares), rtol=0, atol=1e-5)
    assert (alpha[..., -2:] > 0.01).all()
    row, _ = attention.sink_statistics(lens, tokens)
    assert row["constant_alpha"] == 0 and row["learned_sink_alpha"] > 0.01


def test_hide_of_our_own_is_explicit_attention(monkeypatch):
    """`late_attention` of our model: with nothing hidden the same states; hidden positions get nothing."""
    model = random_model(KINDS["llama_gqa"])
    T = 40
    tokens = random_tokens(0, range(2), T, 97)
    for reader in (model, attention.with_constants(model, attention.constants_at(model, tokens))):
        with torch.inference_mode():
            late, states = hide.late_attention(reader, tokens, torch.zeros(T, T).bool(), None)
            torch.testing.assert_close(states, reader.hidden(tokens), rtol=1e-4, atol=1e-4)
            alpha, _ = attention.attention_to(reader, tokens, (0, 1))
        assert late.shape == (2, 3, 4, T // 2 + 1)
        assert ((late[..., 0] > 0) == (alpha[..., 0] > 0)).all()
        hides = torch.zeros(T, T).bool()
        hides[1:, 0] = True
        with torch.inference_mode():
            hidden, _ = hide.late_attention(reader, tokens, hides, None)
        assert (hidden[..., 1] == 0).all()


@torch.no_grad()
def test_one_pass_tells_every_length(lens, monkeypatch):
    """A length's row is that of its first tokens alone: families with windows, chunks and learned sinks."""
    monkeypatch.setattr(lenses, "WEIGHTS", 4000)  # few queries at a time
    tokens = lens.probe_tokens(96)
    lengths = (24, 50, 96)
    found = attention.sinks_by_length(lens, tokens, lengths, with_others=True)
    assert caveats.is_same_alone(lens, tokens, found)
    for T, (row, alpha) in found.items():
        alone, expected = attention.sink_statistics(lens, tokens[:, :T], with_others=True)
        torch.testing.assert_close(alpha, expected, rtol=0, atol=1e-5)
        assert row == pytest.approx(alone, abs=1e-5)


def test_a_run_of_equal_tokens_counts_as_one():
    """The summed attention to it, by explicit weights; a run ends at the first other token."""
    lens = checked(build("llama"))
    tokens = lens.probe_tokens(20)
    tokens[0, :3] = tokens[0, 3] + 1
    counts = caveats.equal_at_first(tokens)
    assert counts.tolist()[0] == 3 and counts[1] == 1 + int(tokens[1, 0] == tokens[1, 1])
    found = caveats.sink_on_run(lens, tokens, counts)
    with torch.no_grad():
        by_layer = lens.model(tokens, output_attentions=True).attentions
    summed = []
    for weights, count in zip(torch.stack(by_layer, dim=1), counts.tolist()):  # (L, H, T, T) each
        summed.append(weights[:, :, count:, :count].sum(-1).mean(-1))
    summed = torch.stack(summed)
    assert found["run_alpha"] == pytest.approx(summed.mean().item(), abs=1e-6)
    assert found["run_sink_rate"] == pytest.approx((summed > 0.3).float().mean().item())


def test_a_row_says_what_it_is_beside_where_texts_begin_with_a_run(tmp_path, monkeypatch):
    """At every length, though runs are measured between two of them."""
    build("llama").save_pretrained(tmp_path / "model")
    tokens = checked(build("llama")).probe_tokens(40)
    tokens[:, 1] = tokens[:, 0]
    monkeypatch.setattr(sinks, "read_tokens", lambda *_: tokens)
    settings = sinks.RateSettings(model=(str(tmp_path / "model"),), out=str(tmp_path), device="cpu")
    result = sinks.rate(replace(settings, sequence_length=(10, 20, 40)))
    for row in result["rows"]:
        T = row["sequence_length"]
        assert row["uniform_alpha1"] == pytest.approx(sum(1 / i for i in range(1, T + 1)) / T)
        assert row["windowed_layers"] == 0 and row["longest_run"] >= 2
        assert (
            row["run_alpha"] > row["mean_alpha1"] - 1 / T
        )  # of two tokens, but not of the first two queries


TEN = "qwen3_next jamba bamba lfm2 granitemoehybrid gemma3_text gpt_oss deepseek_v3 gpt2 mixtral".split()


@pytest.mark.parametrize("model_type", TEN)
def test_every_command_of_ten_families(model_type, tmp_path):
    """Five of them are hybrids, whose layers do not all attend."""
    build(model_type).save_pretrained(tmp_path / "model")
    words = ["--model", tmp_path / "model", "--num-sequences", 4, "--sequence-length", 12, "--out", tmp_path]
    for name in filter(None, sinks.COMMANDS):
        done = run_here("sinks", name, *words)
        assert done.returncode == 0, done.stderr
    (heads,) = read_json(tmp_path / "rate.json")["heads"]
    assert len(heads["layers"]) == len(heads["alpha1"])


@torch.no_grad()
def test_anatomy_of_zeros(tmp_path):
    """Zero rows of the table and zero matrices make no 0 / 0."""
    model = build("llama")
    model.model.embed_tokens.weight[::2] = 0
    model.model.layers[1].self_attn.v_proj.weight.zero_()
    model.model.layers[2].mlp.down_proj.weight.zero_()
    model.save_pretrained(tmp_path / "model")
    words = ["--model", tmp_path / "model", "--num-sequences", 4, "--sequence-length", 12, "--out", tmp_path]
    for name in ("anatomy", "rate", "transplant"):
        done = run_here("sinks", name, *words)
        assert done.returncode == 0, done.stderr
