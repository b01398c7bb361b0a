"""model.py against brute force, init.py against its table, lib/kernels.py against the textbook."""

import hashlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import KINDS, SMALL, random_model
from scipy.stats import kstest
from torch.testing import assert_close

import init
import model as textbook
from lib import kernels
from lib.random import keyed_generator
from model import PRESETS, ModelConfig, Transformer

TOKENS = torch.randint(97, (2, 60), generator=torch.Generator().manual_seed(1))


CHANGES = [{"sublayers": kind} for kind in ("attention", "mlp")]
CHANGES += [{"attn_calibration": kind} for kind in ("amplify", "attenuate", "headnorm")]
CHANGES += [{"explicit_sink": True}]
SHORTCUTS = [(name, T, {}) for name in KINDS for T in (60, 600)]
SHORTCUTS += [("llama_gqa", 60, change) for change in CHANGES]


@pytest.mark.parametrize("name, T, change", SHORTCUTS)
def test_last_position_shortcut(name, T, change):
    model = random_model(replace(KINDS[name], **change))
    tokens = torch.randint(97, (2, T))
    with torch.no_grad():
        full, last = model.hidden(tokens)[:, -1], model.hidden(tokens, last_only=True)
        torch.testing.assert_close(last, full, rtol=1e-4, atol=1e-5)  # another order of float32 sums
        torch.testing.assert_close(model(tokens)[:, -1], model.unembed(last), rtol=1e-4, atol=5e-5)


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(Dh)) v of one head after another; a query sees the keys up to its own position."""
    heads = []
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, group].transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, queries, T)
        future = torch.ones_like(scores).triu(1 + k.shape[2] - q.shape[2]) > 0
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, group])
    return torch.stack(heads, dim=1)


def test_explicit_sink_in_bfloat16_and_in_training():
    """It is learnt; without it the weights compute what they did."""
    config = KINDS["llama_gqa"]
    plain = init.newborn(config, 1)
    model = init.newborn(replace(config, explicit_sink=True), 1)
    with torch.no_grad():
        assert torch.equal(init.variant(model, explicit_sink=False)(TOKENS), plain(TOKENS))
    exact = model(TOKENS, TOKENS.roll(-1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(TOKENS, TOKENS.roll(-1, 1))
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)  # 8 bits of mantissa
    loss.backward()
    for block in model.model.layers:
        for vector in (block.self_attn.sink_key, block.self_attn.sink_value):
            assert vector.ndim == 1 and vector.grad.abs().sum() > 0  # without weight decay


@pytest.mark.parametrize("calibration", ["none", "amplify", "attenuate", "headnorm"])
def test_calibration_by_its_formula(calibration):
    model = random_model(replace(KINDS["llama_gqa"], attn_calibration=calibration))
    seen = []
    with torch.no_grad():
        model.hidden(TOKENS, on_heads=lambda layer, *tensors: seen.append(tensors))
    position = torch.arange(1, 61)[:, None]
    for block, (heads, q, k, v, _) in zip(model.model.layers, seen, strict=True):
        expected = softmax_attention(q, k, v)  # (2, H, 60, Dh)
        if calibration == "amplify":
            expected = expected * position.sqrt()
        if calibration == "attenuate":
            expected = expected * (position / 700).sqrt()
        if calibration == "headnorm":
            mean_square = expected.square().mean(3, keepdim=True)
            expected = block.self_attn.head_norm.weight * expected / (mean_square + 1e-6).sqrt()
        torch.testing.assert_close(heads, expected, rtol=1e-4, atol=1e-5)


def test_observation_changes_nothing_and_sees_everything(kind):
    model, states = random_model(KINDS[kind]), []
    with torch.no_grad():
        plain = model.hidden(TOKENS)
        watched = model.hidden(TOKENS, on_state=lambda layer, x: states.append((layer, x)))
        torch.testing.assert_close(watched, plain)
        assert [layer for layer, _ in states] == [0, 1, 2, 3]
        torch.testing.assert_close(model.model.norm(states[-1][1]), plain)
        torch.testing.assert_close(model.hidden(states[0][1]), plain)  # embeddings in place of tokens


def test_replaced_heads_and_ablated_sublayers():
    model = random_model(KINDS["llama_gqa"])
    mlp, attention = (init.variant(model, sublayers=kind) for kind in ("mlp", "attention"))
    with torch.no_grad():
        muted = model.hidden(TOKENS, on_heads=lambda layer, heads, *_: torch.zeros_like(heads))
        torch.testing.assert_close(muted, mlp.hidden(TOKENS))  # torch's bound for float32, 1.3e-6
        for block in model.model.layers:
            block.mlp.down_proj.weight.zero_()
        torch.testing.assert_close(model.hidden(TOKENS), attention.hidden(TOKENS))


def test_gradients_are_right(kind):
    model = random_model(KINDS[kind]).double()
    embeddings = torch.randn(1, 3, 32, dtype=torch.float64, requires_grad=True)

    def states(*inputs):  # which gradcheck changes in place, weights too
        return model.hidden(embeddings)

    weights = [*model.model.layers.parameters(), *model.model.norm.parameters()]
    assert torch.autograd.gradcheck(states, (embeddings, *weights), fast_mode=True)


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on no CPU, so that model.py's own lines are run."""

    device = SimpleNamespace(type="elsewhere")


# One query; blocks of 128 queries, the last one partial; both sides of the fused kernel's 512.
@pytest.mark.parametrize("T", [1, 129, 512, 513])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("is_last", [False, True], ids=["all", "last"])
def test_attention_is_the_textbooks(T, groups, dtype, is_last):
    """Results and gradients against the formula in float64; of model.py's own lines results alone."""
    generator = torch.Generator().manual_seed(T)
    shapes = ((2, 4, 1 if is_last else T, 16), (2, groups, T, 16), (2, groups, T, 16))  # of q, k, v
    plain = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    exact = [tensor.double().requires_grad_() for tensor in plain]
    trained = [tensor.clone().requires_grad_() for tensor in plain]
    wanted = softmax_attention(*exact)
    weight = torch.randn(wanted.shape, generator=generator).to(dtype)
    wanted.backward(weight.double())
    result = kernels.causal_attention(*trained)
    result.backward(weight)
    elsewhere = textbook.causal_attention(*[tensor.as_subclass(Elsewhere) for tensor in plain])
    results = (result, kernels.causal_attention(*plain), elsewhere.as_subclass(torch.Tensor))
    pairs = [(ours, wanted) for ours in results]
    pairs += [(ours.grad, theirs.grad) for ours, theirs in zip(trained, exact)]
    # float32 keeps 24 bits, 6e-8 each, and sums up to 600 terms; bfloat16 keeps 8 bits, 0.004 each, and the
    # kernels' errors are 0.002 to 0.005. At T = 1 the gradients of q and k are 0, and ours are rounding.
    tolerance = 2e-6 if dtype is torch.float32 else 0.01
    for ours, theirs in pairs:
        assert ours.dtype is dtype and ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= tolerance * max(theirs.norm(), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rotation_is_the_textbooks(dtype):
    """Each pair (i, i + Dh/2) as a complex number, turned by multiplying with exp(i angle); and gradients."""
    config = KINDS["llama"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 600, 3, config.head_size, generator=generator).to(dtype)
    cos, sin = textbook.rope(config, x[:, :, 0])
    exact = x.double().requires_grad_()
    turned = torch.complex(*exact.chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())
    wanted = torch.cat((turned.real, turned.imag), dim=-1)
    weight = torch.randn(x.shape, generator=generator).to(dtype)
    wanted.backward(weight.double())
    trained = x.clone().requires_grad_()
    result = kernels.rotate(trained, cos, sin)
    result.backward(weight)
    before = x.clone()
    # Two roundings of numbers up to 4: 2^-24 each in float32, 2^-9 in bfloat16.
    tolerance = 1e-6 if dtype is torch.float32 else 0.04
    elsewhere = textbook.rotate(x.as_subclass(Elsewhere), cos, sin).as_subclass(torch.Tensor)
    for ours in (kernels.rotate(x, cos, sin), result, elsewhere):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours.double(), wanted.detach(), rtol=0, atol=tolerance)
    torch.testing.assert_close(trained.grad.double(), exact.grad, rtol=0, atol=tolerance)
    assert torch.equal(x, before)  # the work in place is in place of a copy


def test_what_stays_wide_in_bfloat16():
    """Angles and mean squares are rounded once, at the end; under autocast the stream alone is bfloat16."""
    x = torch.randn(2, 600, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    model = init.newborn(KINDS["llama"], 0, dtype=torch.bfloat16)
    assert torch.equal(
        textbook.rope(model.config, x)[0], textbook.rope(model.config, x.double())[0].bfloat16()
    )
    norm = model.model.norm
    expected = x * (x.double().square().mean(2, keepdim=True) + 1e-5).rsqrt().bfloat16()
    assert (norm(x) != expected).any(2).sum() <= 3  # of 1,200 roots, those that float32 has at a tie
    dtypes = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = random_model(KINDS["llama"]).hidden(TOKENS, on_state=lambda layer, x: dtypes.append(x.dtype))
    assert dtypes == [torch.bfloat16] * 4 and states.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_states_on_a_gpu(kind):
    model = random_model(KINDS[kind])
    with torch.no_grad():
        here = model.hidden(TOKENS)
        there = model.cuda().hidden(TOKENS.cuda()).cpu()
    torch.testing.assert_close(there, here, rtol=1e-4, atol=5e-5)  # other orders of float32 sums


def test_impossible_configurations():
    for wrong in ({"mlp": "gelo"}, {"num_kv_heads": 3}, {"head_dim": 7}, {"num_heads": 0}):
        with pytest.raises(ValueError):
            ModelConfig(**SMALL | wrong)


def test_presets_are_the_papers():
    """All parameters, and those of the blocks, which BB's "1.2B" and Gu et al.'s 60M count alone."""
    sizes = {"nano_gpt2": (124e6, 85e6), "nano_llama": (134e6, 85e6), "nano_qwen": (347e6, 113e6)}
    sizes |= {"gpt2_1b": (1.31e9, 1.21e9), "llama_60m": (108e6, 59e6)}
    for name, (size, of_blocks) in sizes.items():
        with torch.device("meta"):
            model = Transformer(PRESETS[name])
        assert model.config.head_size == (96 if name == "llama_60m" else 64)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.005)
        assert sum(p.numel() for p in model.model.layers.parameters()) == pytest.approx(of_blocks, rel=0.005)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("V, size, is_tied", [(97, 1000, False), (97, 50, True), (128, 50, False)])
def test_loss_in_chunks_is_the_plain_one(monkeypatch, is_fused, V, size, is_tied):
    """Value and gradients; what is fused a GPU compiles, and here it runs uncompiled."""
    monkeypatch.setattr(kernels, "CHUNK", size)
    monkeypatch.setattr(kernels, "FUSED_CHUNK", size)
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    model = random_model(replace(KINDS["gpt2"], vocab_size=V, tie_embeddings=is_tied)).double()
    targets = TOKENS.flip(1)
    targets[:, 3:6] = -100  # which torch does not count

    def gradients(loss):
        model.zero_grad()
        (loss / 3).backward()
        return [loss.detach()] + [parameter.grad.clone() for parameter in model.parameters()]

    def in_chunks(with_gradients=True):
        states = model.hidden(TOKENS).flatten(0, 1)
        words = (states, model.head_weight, targets.flatten(), with_gradients, is_fused)
        return kernels.CrossEntropy.apply(*words)

    wanted = gradients(F.cross_entropy(model(TOKENS).mT, targets, reduction="sum"))
    for ours, exact in zip(gradients(in_chunks()), wanted, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(with_gradients=False), wanted[0], atol=1e-12, rtol=1e-12)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        rough = gradients(in_chunks())
    assert rough[0].dtype == torch.float32
    for ours, exact in zip(rough, wanted, strict=True):
        assert (ours - exact).norm() <= 0.05 * exact.norm()  # 8 bits, through three blocks and back


def test_a_compiled_model(monkeypatch):
    """The same numbers: logits without a break in the graph, the loss with one, fused under autocast."""
    calls = []
    apply = kernels.CrossEntropy.apply

    def watched(*words):
        calls.append(words[3:])
        return apply(*words)

    monkeypatch.setattr(kernels.CrossEntropy, "apply", watched)
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    monkeypatch.setattr(kernels, "FUSED_ON", {"cpu"})
    model = random_model(replace(KINDS["llama_gqa"], num_layers=1)).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with_loss = torch.compile(model, backend="eager")
    results = []
    for forward, loss in ((model, model), (compiled, with_loss)):
        model.zero_grad()
        logits = forward(TOKENS)
        (logits.square().mean() + loss(TOKENS, TOKENS)).backward()
        results.append([logits.detach()] + [parameter.grad.clone() for parameter in model.parameters()])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS, TOKENS)
        with_loss(TOKENS, TOKENS)
    assert calls == [(True, False)] * 3 + [(True, True)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("V", [97, 50_257])
def test_compiled_loss_on_a_gpu(V):
    """Loss and gradients of a compiled model under autocast, beside those of the same model in float32."""
    model = random_model(replace(KINDS["gpt2"], vocab_size=V)).cuda()
    tokens = TOKENS.cuda()
    compiled = torch.compile(model)
    results = []
    for run, is_rough in ((model, False), (compiled, True)):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=is_rough):
            loss = run(tokens, tokens)
        loss.backward()
        results.append([loss.detach()] + [parameter.grad.clone() for parameter in model.parameters()])
    for exact, rough in zip(*results, strict=True):
        assert (rough - exact).norm() <= 0.1 * exact.norm()  # 8 bits, through three blocks and back


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
    """Of every newborn that anybody has named: a million draws reach all branches of numpy's ziggurat."""
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
