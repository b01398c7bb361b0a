"""reproduce/uses.py: caches that forget, and rounding, against plain loops."""

import pytest
import torch
import torch.nn.functional as F
from architectures import build
from conftest import KINDS, assert_refused, random_model, run_here
from test_sinks import given, saved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lib.random import random_tokens
from measure import attention
from reproduce import uses
from sinks import alpha_and_loss
from sources.checkpoint import parse_spec

WINDOW, T = 5, 14


@torch.no_grad()
def plain_loss(model, tokens, length, entries):
    """The loss behind the first WINDOW tokens (T,), one at a time, with a cache of the newest `length`.

    A cache has keys before their rotation, `entries` first, which stay: by layer a key and a value, (G, D).
    All are rotated by their places in the cache, each time.
    """
    layers = model.model.layers
    cached = [[] for _ in layers]
    losses = []
    for t, token in enumerate(tokens):
        x = model.model.embed_tokens(token)[None, None]
        for number, layer in enumerate(layers):
            attend = layer.self_attn
            h = layer.input_layernorm(x)
            maps = (attend.q_proj, attend.k_proj, attend.v_proj)
            q, k, v = [part(h).view(-1, attend.head_dim) for part in maps]
            cached[number].append((k, v))
            seen = entries.get(number + 1, []) + cached[number][-length:]
            keys, values = [torch.stack(some, dim=1)[None] for some in zip(*seen)]  # (1, G, places, D)
            cos, sin = model.model.rotary_emb(x, torch.arange(len(seen))[None])
            queries = q[None, :, None].expand(-1, -1, len(seen), -1)
            queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
            keys, values = [y.repeat_interleave(attend.num_key_value_groups, 1) for y in (keys, values)]
            weights = (queries[:, :, -1:] @ keys.transpose(2, 3) * attend.scaling).softmax(-1)
            x = x + attend.o_proj((weights @ values).view(1, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        if WINDOW <= t + 1 < len(tokens):
            logits = model.lm_head(model.model.norm(x))[0]
            losses.append(F.cross_entropy(logits, tokens[t + 1 : t + 2]).item())
    return sum(losses) / len(losses)


def test_a_cache_that_forgets_against_plain_loops(tmp_path):
    """As StreamingLLM has it: keys are cached as they are, and rotated by their places in the cache."""
    build("llama").save_pretrained(tmp_path / "model")
    spec = parse_spec(str(tmp_path / "model"))
    lens = spec.load()
    sizes = {"num_sequences": 3, "num_constants": 4, "sequence_length": T, "window": WINDOW}
    rows = uses.streamings(given(uses.StreamingSettings, **sizes), spec, lens)["rows"]
    measured, others = random_tokens(0, range(7), T, 256).split((3, 4))
    constants = attention.constants_at(lens, others)
    in_front = {layer: [pair] for layer, pair in constants.items()}
    expected = dict.fromkeys(("full context", "window", "window, constants", "window, first token kept"), 0)
    for tokens in measured:
        own = {layer: [pair] for layer, pair in attention.constants_at(lens, tokens[None]).items()}
        for kind, entries in zip(expected, ({}, {}, in_front, own)):
            length = T if kind == "full context" else WINDOW
            expected[kind] += plain_loss(lens.model, tokens, length, entries) / 3
    with torch.no_grad():
        logits = lens.unembed(attention.with_constants(lens, constants).hidden(measured))
    behind = logits[:, WINDOW - 1 : -1].transpose(1, 2)
    expected["full context, constants"] = F.cross_entropy(behind, measured[:, WINDOW:]).item()
    # float32 sums in another order
    assert {row["kind"]: row["loss"] for row in rows} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", ["tensor", "token"])
def test_rounded_weights_by_hand(scale):
    """255 levels, a step for a matrix or for each of its outputs, as the matrix was before and after."""
    model = random_model(KINDS["llama"])
    weight = model.model.layers[1].mlp.down_proj.weight
    plain = weight.clone()
    with uses.rounded_weights(model, scale):
        levels = weight.clone()
    assert torch.equal(weight, plain)
    largest = plain.abs().amax(1, keepdim=True) if scale == "token" else plain.abs().max()
    steps = levels / largest * 127
    assert (steps - steps.round()).abs().max() < 1e-3  # float32 divisions
    assert ((plain - levels).abs() <= 0.501 * largest / 127).all()


def test_rounding_has_a_row_for_each_way(tmp_path):
    model = random_model(KINDS["llama"])
    settings = given(uses.UseSettings, sequence_length=12, num_constants=4)
    rows = uses.roundings(settings, saved(model, tmp_path), model)["rows"]
    measured, others = random_tokens(0, range(11), 12, 97).split((7, 4))
    changed = attention.with_constants(model, attention.constants_at(model, others))
    with uses.rounded_inputs(changed, "token", 12), uses.rounded_weights(changed, "token"):
        loss = alpha_and_loss(changed, measured)[1]["loss"]
    assert [row["kind"] for row in rows] == 5 * ["unchanged"] + 5 * ["moved"]
    assert (rows[-1]["rounded"], rows[-1]["scale"], rows[-1]["loss"]) == ("inputs and weights", "token", loss)
    states = []
    with torch.inference_mode():
        model.hidden(measured, on_state=lambda layer, x: states.append(x.abs().max().item()))
    assert rows[0]["largest_state"] == max(states)


def test_mistakes(tmp_path):
    words = ("reproduce.uses", "streaming", "--model", "tiny_llama", "--out", tmp_path)
    assert_refused(run_here(*words, "--sequence-length", 256), "--window 256: expected less")
    few = ("--sequence-length", 24, "--window", 8)
    assert_refused(run_here(*words, *few), "no cache")
    build("gpt2").save_pretrained(tmp_path / "gpt2")
    assert_refused(run_here(*words, *few, "--model", tmp_path / "gpt2"), "more than distances")
