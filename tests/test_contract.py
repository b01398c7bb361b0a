"""What every command relies on, of every preset: a fork's own, too (docs/house.md).

Each preset is made small, with strong random weights, so that attention is uneven. Each test is a sentence
about such a model that some measure takes for granted; where it is false, numbers are wrong in silence.
"""

from dataclasses import replace

import pytest
import torch
import transformers

from init import newborn, variant, without_numbers
from lib.settings import UserError
from measure import theory
from measure.attention import attention_to, model_lacks, with_constants
from model import PRESETS, Transformer
from reproduce.hide import late_attention
from sources import checkpoint, saving
from sources.sampling import generate

T, V = 24, 97


def small(config):
    """The same architecture, of 2 layers and d = 64."""
    heads = min(4, config.num_heads)
    fewer = {
        "num_layers": 2,
        "d_model": 64,
        "d_ff": 96,
        "num_heads": heads,
        "head_dim": 16,
        "num_kv_heads": None,
    }
    if config.num_kv_heads is not None:
        fewer["num_kv_heads"] = max(1, heads // 2)
    return replace(config, vocab_size=V, context_length=max(T, 32), **fewer)


@pytest.fixture(scope="module", params=PRESETS)
def model(request) -> Transformer:
    """A newborn whose matrices are large."""
    strong = newborn(small(PRESETS[request.param]), 1)
    generator = torch.Generator().manual_seed(0)
    for parameter in strong.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.3 * noise if parameter.ndim > 1 else parameter.data + 0.2 * noise)
    return strong


TOKENS = torch.randint(V, (3, T), generator=torch.Generator().manual_seed(1))


def assert_same(found, expected, tolerance=1e-4):
    """But for float32 sums of some hundred terms, in another order."""
    size = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * size)


@torch.no_grad()
def test_a_state_depends_on_no_later_token(model):
    states = model.hidden(TOKENS)
    for length in (1, 7, T - 1):
        assert_same(model.hidden(TOKENS[:, :length]), states[:, :length])


@torch.no_grad()
def test_the_last_state_alone_is_the_last_state(model):
    assert_same(model.hidden(TOKENS, last_only=True), model.hidden(TOKENS)[:, -1])


@torch.no_grad()
def test_a_cache_changes_nothing(model):
    cache = model.new_cache()
    states = [model.hidden(TOKENS[:1, :10], cache=cache)]
    for place in range(10, T):
        states.append(model.hidden(TOKENS[:1, place : place + 1], cache=cache))
    assert_same(torch.cat(states, dim=1), model.hidden(TOKENS[:1]))


@torch.no_grad()
def test_alpha_times_values_is_what_heads_return(model):
    """Summed over queries: the weights at all positions, and at what stands in front, times the values."""
    sums = []

    def on_heads(layer, heads, q, k, v, alpha):
        own = model.blocks[layer - 1].self_attn
        keys, values = own.with_front(k, v)
        places = range(1 + T - keys.shape[2], T + 1)
        weights = alpha(places)  # (B, H, keys), means over the queries that see a key,
        counts = own.seen[(T, T, len(own.front()), (T,), *places)][0]  # of which there are so many
        values_of_heads = values.repeat_interleave(q.shape[1] // k.shape[1], 1)
        totals = torch.einsum("bht,bhtd->bhd", weights * counts, values_of_heads)
        sums.append((totals, own.attend(q, keys, values).sum(2)))

    model.hidden(TOKENS, on_heads=on_heads)
    for totals, heads in sums:
        assert_same(totals, heads)


@torch.no_grad()
def test_what_measures_see_of_heads_is_what_is_written(model):
    """`on_heads` may return the heads as they are, and nothing changes."""
    same = model.hidden(TOKENS, on_heads=lambda layer, heads, *_: heads.clone())
    assert_same(same, model.hidden(TOKENS))
    zero = model.hidden(TOKENS, on_heads=lambda layer, heads, *_: 0 * heads)
    if model.blocks[0].self_attn is not None:
        assert (zero - model.hidden(TOKENS)).abs().max() > 1e-2


@torch.no_grad()
def test_hiding_hides_and_hiding_nothing_changes_nothing(model):
    if model.blocks[0].self_attn is None:
        return
    nothing = torch.zeros(T, T, dtype=torch.bool)
    _, states = late_attention(model, TOKENS, nothing, None)
    assert_same(states, model.hidden(TOKENS), 1e-3)
    first = nothing.clone()
    first[1:, 0] = True
    _, states = late_attention(model, TOKENS, first, None)
    others = TOKENS.clone()
    others[:, 0] = (others[:, 0] + 1) % V
    _, changed = late_attention(model, others, first, None)
    assert_same(changed[:, 1:], states[:, 1:])  # nobody sees the first token


@torch.no_grad()
def test_constants_stand_behind_what_stands_in_front(model):
    """A constant is put behind what stood in front, which stays."""
    if model.blocks[0].self_attn is None:
        return
    config = model.config
    nothing = torch.zeros(config.kv_heads, config.head_size)
    layers = range(1, config.num_layers + 1)
    before = [len(block.self_attn.front()) for block in model.blocks]
    moved = with_constants(model, {layer: (nothing, nothing + 1) for layer in layers})
    assert [len(block.self_attn.front()) for block in moved.blocks] == [count + 1 for count in before]
    alphas = [attention_to(each, TOKENS, range(1 - before[0], T + 1))[0] for each in (model, moved)]
    assert alphas[0].shape == alphas[1].shape
    again = with_constants(moved, {layer: (nothing, nothing) for layer in layers})
    assert len(again.blocks[0].self_attn.front()) == before[0] + 2


def test_neurons_are_seen_or_refused(model):
    if "units" in model_lacks(model):
        return
    seen = []
    with torch.no_grad(), model.hidden_units(lambda layer, units: seen.append((layer, units))):
        model.hidden(TOKENS)
    for layer, units in seen:
        assert model.down(layer).shape == (model.config.d_model, units.shape[2])


def test_buffers_are_what_constructors_write(model):
    written = dict(Transformer(model.config).named_buffers())
    for other in (newborn(model.config, 1), variant(model), without_numbers(model.config)):
        buffers = dict(other.named_buffers())
        assert buffers.keys() == written.keys()
        for name, buffer in buffers.items():
            assert torch.equal(buffer, written[name]), name


@torch.no_grad()
def test_theory_knows_what_it_predicts(model):
    """Of newborns: the mean cosine of last states of unrelated sequences, or None."""
    config = replace(model.config, d_model=128, d_ff=256, context_length=64)
    predicted = theory.kernel_recursion(config, 48)[-1]
    if predicted is None:
        return
    cosines = []
    for seed in range(4):
        vectors = 0.02 * torch.randn(24, 48, 128, generator=torch.Generator().manual_seed(seed))
        streams = {}
        newborn(config, seed).hidden(vectors, on_state=streams.__setitem__)
        states = torch.nn.functional.normalize(streams[config.num_layers][:, -1], dim=1)
        pairs = states @ states.T
        cosines.append((pairs.sum() - 24) / (24 * 23))
    assert torch.stack(cosines).mean().item() == pytest.approx(predicted, abs=0.06)  # 4 seeds, width 128


@torch.no_grad()
def test_a_saved_model_is_read_as_it_is(model, tmp_path, capsys):
    """By us; and by transformers, if config.json says that these can."""
    saving.save(tmp_path / "a", model)
    logits = model(TOKENS)
    assert_same(checkpoint.load(str(tmp_path / "a"))(TOKENS), logits)
    assert "has changed" not in capsys.readouterr().err
    config = saving.read_json(tmp_path / "a" / "config.json")
    if config["model_type"] != saving.MARK:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
        assert_same(theirs(TOKENS).logits, logits)


# ---- mistakes that a fork makes ----------------------------------------------------------------------------


def test_a_changed_forward_pass_is_no_llama_and_is_told(tmp_path, monkeypatch, capsys):
    config = small(PRESETS["tiny_llama"])
    saving.save(tmp_path / "a", newborn(config, 1))
    assert saving.read_json(tmp_path / "a" / "config.json")["model_type"] == "llama"
    monkeypatch.setattr("model.Attention.calibrate", lambda self, heads, T: 1.5 * heads)
    checkpoint.load(str(tmp_path / "a"))
    assert "model.py has changed since" in capsys.readouterr().err
    saving.save(tmp_path / "b", newborn(config, 1))
    assert saving.read_json(tmp_path / "b" / "config.json")["model_type"] == saving.MARK


def test_an_attention_that_hides_nothing_is_refused(monkeypatch):
    from model import causal_attention

    monkeypatch.setattr("model.Attention.attend", lambda self, q, k, v, hides=None: causal_attention(q, k, v))
    first = torch.zeros(T, T, dtype=torch.bool)
    first[1:, 0] = True
    with pytest.raises(UserError, match="does not hide"):
        late_attention(newborn(small(PRESETS["tiny_llama"]), 1), TOKENS, first, None)


@pytest.mark.parametrize("name", ["sigmoid", "window"])
def test_alpha_follows_another_attention(name, monkeypatch):
    """Each head's mean weight on each position, by brute force."""

    def weights_of(q, k):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
        sees = torch.ones(scores.shape[2:]).tril().bool()
        if name == "window":
            sees &= ~torch.ones_like(sees).tril(-8)
            return scores.masked_fill(~sees, -torch.inf).softmax(-1), sees
        return torch.sigmoid(scores).masked_fill(~sees, 0), sees

    def attend(self, q, k, v, hides=None):
        return weights_of(q, k)[0] @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    monkeypatch.setattr("model.Attention.attend", attend)
    expected = []

    def on_heads(layer, heads, q, k, v, alpha):
        weights, sees = weights_of(q, k)
        expected.append(weights.sum(2) / sees.sum(0))

    tested = newborn(small(PRESETS["tiny_llama"]), 1)
    with torch.no_grad():
        tested.hidden(TOKENS, on_heads=on_heads)
        alpha, _ = attention_to(tested, TOKENS, range(1, T + 1))
    assert_same(alpha, torch.stack(expected, dim=1))


def test_greedy_text_is_that_without_a_cache(model):
    """Beyond the context, too, where the text slides."""

    class Letters:
        vocab_size, bos, ends = V, 0, ()

        def encode(self, texts):
            return [[ord(letter) % V for letter in text] for text in texts]

        def decode(self, tokens):
            return tokens

    written = generate(model, Letters(), None, "prompt", 40, temperature=0)
    tokens = [0, *Letters().encode(["prompt"])[0]]
    for _ in range(40):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[-model.config.context_length :]]))[0, -1]
        tokens.append(logits.argmax().item())
    assert written == tokens[7:]
