"""measure/watch.py: attention of any module, against weights by brute force."""

import math

import pytest
import torch
import torch.nn.functional as F
from architectures import build
from test_lens import checked
from torch import nn

from lib.settings import UserError
from measure.attention import attention_to
from measure.watch import watching

T, D, H = 24, 64, 4


class Plain(nn.Module):
    """As nanoGPT's: one matrix for q, k and v, attention by the library's function."""

    def __init__(self, groups=H, window=None, scale=None, additive=False):
        super().__init__()
        self.groups, self.window, self.scale, self.additive = groups, window, scale, additive
        self.qkv = nn.Linear(D, D + 2 * groups * D // H)
        self.out = nn.Linear(D, D)
        self.weights = None  # by brute force

    def forward(self, x):
        sizes = [D, self.groups * D // H, self.groups * D // H]
        q, k, v = [
            part.unflatten(2, (-1, D // H)).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=2)
        ]
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        sees = (i >= j) & (i - j < (self.window or 10**6))
        scores = q @ k.repeat_interleave(H // self.groups, 1).transpose(2, 3)
        scores = scores * (self.scale or 1 / math.sqrt(D // H))
        self.weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        mask = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf) if self.additive else sees
        options = {"attn_mask": mask} if self.window or self.additive else {"is_causal": True}
        options |= {"scale": self.scale, "enable_gqa": self.groups < H}
        heads = F.scaled_dot_product_attention(q, k, v, **options)
        return self.out(heads.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Two layers; in parallel blocks beside an MLP."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Plain(**options) for _ in range(2))
        self.mlp = nn.Linear(D, D)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(3 * F.layer_norm(x, (D,))) + self.mlp(x).relu()
        return x


X = torch.randn(3, T, D, generator=torch.Generator().manual_seed(1))
KINDS = {
    "plain": {},
    "grouped": {"groups": 2},
    "windowed": {"window": 8},
    "scaled": {"scale": 0.7},
    "additive": {"additive": True, "groups": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_alpha_by_brute_force(kind):
    model = Stack(**KINDS[kind])
    expected_output = model(X)
    with watching((1, 2, T // 2, T)) as seen:
        output = model(X)
    assert torch.equal(output, expected_output)
    for layer, alpha in zip(model.layers, seen.calls):
        weights = layer.weights
        for place, position in enumerate((1, 2, T // 2, T)):
            column = weights[..., position - 1]
            queries = (column > 0).sum(-1)
            torch.testing.assert_close(alpha[..., place], column.sum(-1) / queries, rtol=0, atol=1e-5)
    rate = torch.stack([alpha[..., 0] > 0.3 for alpha in seen.calls]).float().mean()
    assert seen.sink_rate() == pytest.approx(rate.item()) and seen.alpha().shape == (2, H, 4)


def test_half_precision_and_few_queries():
    q, k = (torch.randn(2, H, n, 16, generator=torch.Generator().manual_seed(n)) for n in (5, 9))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
        with watching((1, 9)) as seen:
            F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), k.to(dtype), attn_mask=mask)
        scores = (q @ k.transpose(2, 3) / 4).masked_fill(~mask, -torch.inf).softmax(-1)
        expected = torch.stack((scores[..., 0].mean(-1), scores[..., 4, 8]), dim=-1)
        torch.testing.assert_close(seen.calls[0], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "mistral"])
def test_transformers_models_in_sdpa_beside_the_lens(family):
    lens = checked(build(family))
    tokens = lens.probe_tokens(T)
    alpha, _ = attention_to(lens, tokens, (1, 5))
    model = build(family).eval()
    model.load_state_dict(lens.model.state_dict())
    if family == "gemma2":  # whose soft cap of logits is its own function's
        return
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), watching((1, 5)) as seen:
        model(tokens)
    torch.testing.assert_close(torch.stack(seen.calls, dim=1), alpha.cpu(), rtol=0, atol=1e-5)


def test_what_is_no_language_model_is_told(tmp_path):
    attention = nn.MultiheadAttention(D, H, batch_first=True)
    with pytest.raises(UserError, match="attention to later positions: 24 queries, 24 keys"):
        with watching():
            attention(X, X, X, need_weights=False)
    with pytest.raises(UserError, match="cross attention: 7 queries, 24 keys"):
        with watching():
            attention(X[:, :7], X, X, need_weights=False)
    layer = nn.TransformerEncoderLayer(D, H, batch_first=True).eval()
    with torch.no_grad(), pytest.raises(UserError, match="no call of F|attention to later positions"):
        with watching():
            layer(X)
    with pytest.raises(UserError, match="no call of F.scaled_dot_product_attention was seen"), watching():
        (X @ X.transpose(1, 2)).softmax(-1)
    q = X.unflatten(2, (H, -1)).transpose(1, 2)
    with pytest.raises(UserError, match="dropout is on"), watching():
        F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.1)
    with watching() as seen:
        Stack()(X)
    seen.draw(str(tmp_path / "heads.png"))  # as README does
    assert (tmp_path / "heads.png").exists()


def test_under_compile_it_works_or_is_refused():
    model = Stack()
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    try:
        with watching() as seen:
            compiled(X)
    except UserError as error:
        assert "torch.compile" in str(error)
    else:
        torch.testing.assert_close(seen.calls[0][..., 0], model.layers[0].weights[..., 0].mean(-1))


def test_memory_does_not_grow_with_the_square():
    """8,192 tokens: one matrix of weights alone would take 0.27 GB a head."""
    import resource

    q = torch.randn(1, 2, 8192, 16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad(), watching():
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # kB
