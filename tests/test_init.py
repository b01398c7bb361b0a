"""init.py: every parameter filled as the table says, by nothing but (seed, name, shape)."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from conftest import KINDS
from scipy.stats import kstest
from torch.testing import assert_close

import init
from lib.random import keyed_generator
from model import PRESETS, ModelConfig

WIDE = ModelConfig(512, 64, 4, 4, 128, 384, qkv_bias=True, attn_calibration="headnorm")


@pytest.mark.parametrize("scheme", ["gpt2", "normal"])
@pytest.mark.parametrize("config", [WIDE, PRESETS["tiny_gpt2"]], ids=["wide", "gpt2"])
def test_table(scheme, config):
    model = init.newborn(config, 5, scheme=scheme)
    for name, parameter in model.named_parameters():
        values = parameter.detach().double()
        assert values.isfinite().all(), name
        if name.endswith("bias"):
            assert (values == 0).all(), name
        elif "norm" in name:
            assert (values == 1).all(), name
        else:
            residual = "o_proj" in name or "down_proj" in name
            std = 0.02 / math.sqrt(2 * config.num_layers) if residual and scheme == "gpt2" else 0.02
            n = values.numel()
            # Five standard errors: of the mean, std/sqrt(n); of the standard deviation, std/sqrt(2n).
            assert abs(values.mean()) < 5 * std / math.sqrt(n), name
            assert abs(values.std() - std) < 5 * std / math.sqrt(2 * n), name
            assert kstest((values / std).flatten()[:20_000].numpy(), "norm").pvalue > 1e-4, name


def test_no_ambient_generator_plays_a_part():
    expected = init.newborn("tiny_llama", 42).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert_close(init.newborn("tiny_llama", 42).state_dict(), expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)  # nor is it advanced


def test_these_bits_forever():
    """A change here changes every newborn model that anybody has named by its seed.

    A million draws reach all branches of numpy's ziggurat.
    """
    weight = init.draw_weight(42, "model.layers.0.self_attn.q_proj.weight", (1000, 1000), 1.0)
    assert weight.dtype == torch.float32
    found = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    assert found == "27e17a0747fdcb879fd20cd8a559ddd2f21bddc713ad0faeb85fe502e081135b"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_bits_on_a_gpu():
    born = init.newborn("tiny_llama", 42, device="cuda").cpu().state_dict()
    assert_close(born, init.newborn("tiny_llama", 42).state_dict(), rtol=0, atol=0)


def test_keyed_generator():
    """torch.Generator would give seeds that agree in 32 bits the same weights."""

    def draw(*key):
        return tuple(keyed_generator(*key).integers(2**62, size=3))

    assert draw(1, "a") == draw(1, "a")
    keys = [(1, "a"), (1, "b"), (1,), (1, "a", 0), (2**32 + 1, "a"), (-1, "a")]
    assert len({draw(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize("change", [{"num_layers": 7}, {"sublayers": "attention"}], ids=str)
def test_a_changed_architecture_keeps_all_other_draws(change):
    config = replace(PRESETS["tiny_gpt2"], **change)
    before = init.newborn("tiny_gpt2", 9).state_dict()
    after = init.newborn(config, 9).state_dict()
    shared = before.keys() & after.keys()
    assert len(shared) >= 10
    for name in shared:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            rescaled = after[name] * math.sqrt(config.num_layers / 6)  # 0.02 / sqrt(2L)
            assert_close(before[name], rescaled, rtol=1e-6, atol=0)
        else:
            assert torch.equal(before[name], after[name])


def test_embedding_seed_fixes_embedding_and_head_and_nothing_else():
    def state(seed, embedding_seed):
        return init.newborn("tiny_llama", seed, embedding_seed).state_dict()

    a, b, c = state(1, 0), state(2, 0), state(1, None)
    for name in a:
        drawn = a[name].dim() == 2
        if "embed_tokens" in name or "lm_head" in name:
            assert torch.equal(a[name], b[name]) and not torch.equal(a[name], c[name])
        else:
            assert torch.equal(a[name], b[name]) != drawn and torch.equal(a[name], c[name])
    assert not torch.equal(a["model.embed_tokens.weight"], a["lm_head.weight"])
    assert torch.equal(c["lm_head.weight"], state(3, 1)["lm_head.weight"])  # by default, the seed itself


def test_bfloat16_is_the_rounded_float32():
    exact = init.newborn(KINDS["qwen2"], 4).state_dict()
    rounded = init.newborn(KINDS["qwen2"], 4, dtype=torch.bfloat16).state_dict()
    for name, tensor in rounded.items():
        assert torch.equal(tensor, exact[name].to(tensor.dtype))
        assert (tensor.dtype == torch.bfloat16) == (".layers." in name)


def test_centered_is_gpt2_but_for_the_means_of_down_rows():
    plain = init.newborn("tiny_gpt2", 6).state_dict()
    centered = init.newborn("tiny_gpt2", 6, scheme="centered").state_dict()
    for key, weight in plain.items():
        if key.endswith("down_proj.weight"):
            expected = weight.double() - weight.double().mean(dim=1, keepdim=True)
            assert_close(centered[key].double(), expected, rtol=0, atol=1e-9)
        else:
            assert torch.equal(weight, centered[key])
