"""Models of other families through the lens, against transformers on the same weights; what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from architectures import TINY, build, errors_of
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from transformers import DynamicCache, WhisperConfig

from hf import check as checks
from hf import loading
from hf.lens import Lens, shape_of
from lib.settings import UserError
from measure.attention import constants_at
from measure.units import observe, zero_units
from sources import checkpoint, saving

FAMILIES = "gpt2 gpt_neox gemma2 gemma3_text olmo2 phi3 qwen3 mixtral gpt_oss deepseek_v3".split()
WITHIN = 6  # positions, within the tiny models' window


def checked(model):
    """A model through the lens, compared with itself."""
    lens = Lens(model)
    checks.check(lens)
    return lens


@pytest.fixture(scope="module", params=FAMILIES)
def lens(request):
    lens = checked(build(request.param))
    assert not lens.lacks
    return lens


def test_heads_states_and_units_are_the_models_own(lens):
    """Beyond the window; float32's rounding is 1e-7."""
    errors = errors_of(lens)
    assert errors.keys() == {"heads", "states", "units"}
    assert max(errors.values()) < 1e-6


@torch.no_grad()
def test_loss_is_the_models_own(lens):
    tokens = lens.probe_tokens()
    logits = lens.model(input_ids=tokens).logits.double()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    states = lens.hidden(tokens)[:, :-1].flatten(0, 1)
    loss = lens.summed_loss(states, tokens[:, 1:].flatten()) / len(states)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@torch.no_grad()
def test_constants_are_a_cache_of_one_entry(lens):
    """Plain transformers, with the constants as what it read before: the same logits and weights."""
    if lens.model.config.model_type == "deepseek_v3":
        pytest.skip("its cache holds compressed keys, which a constant has not")
    tokens = lens.probe_tokens(WITHIN)
    generator = torch.Generator().manual_seed(1)
    constants, alphas = {}, []

    def draw(layer, heads, q, k, v, alpha):
        constants[layer] = [torch.randn(x.shape[1], x.shape[3], generator=generator) for x in (k, v)]

    lens.hidden(tokens, on_heads=draw)
    other = lens.with_constants(constants)

    def note(layer, heads, q, k, v, alpha):
        alphas.append(alpha((0, 1, 2, -1)))

    states = other.hidden(tokens, on_heads=note)
    cache = DynamicCache()
    for layer, constant in constants.items():
        cache.update(*[x[None, :, None].expand(len(tokens), -1, 1, -1) for x in constant], layer - 1)
    places = torch.arange(WITHIN)[None]
    truth = lens.model(input_ids=tokens, past_key_values=cache, position_ids=places, output_attentions=True)
    torch.testing.assert_close(lens.unembed(states), truth.logits, rtol=0, atol=1e-5)
    for alpha, weights in zip(alphas, truth.attentions):
        for p, queries in ((0, WITHIN), (1, WITHIN), (2, WITHIN - 1)):
            expected = weights[..., p].sum(-1) / queries
            torch.testing.assert_close(alpha[..., p], expected, rtol=0, atol=1e-6)
        learned = 1 - weights.sum((-1, -2)) / WITHIN  # what a learned sink gets
        torch.testing.assert_close(alpha[..., -1], learned, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "bamba"])
def test_constants_are_kept_in_a_file(model_type, tmp_path):
    """Of latent attention, whose keys are wider than values; of a hybrid's few layers."""
    lens = Lens(build(model_type))
    constants = constants_at(lens, lens.probe_tokens(WITHIN))
    assert [*constants] == lens.attending
    saving.save_constants(tmp_path / "cure.safetensors", constants, model="tiny")
    stored = load_file(tmp_path / "cure.safetensors")
    for layer, (key, value) in constants.items():
        assert torch.equal(stored[f"keys.{layer - 1}"], key[None, :, None])
        assert torch.equal(stored[f"values.{layer - 1}"], value[None, :, None])


def test_replaced_heads_reach_the_stream(lens):
    """A position that sees itself alone: its heads' outputs are its values."""
    tokens = lens.probe_tokens(WITHIN)

    def on_heads(layer, heads, q, k, v, alpha):
        heads = heads.clone()
        heads[:, :, 3] = v[:, :, 3].repeat_interleave(heads.shape[1] // v.shape[1], dim=1)
        return heads

    changed = lens.hidden(tokens, on_heads=on_heads)
    plain = lens.hidden(tokens)
    torch.testing.assert_close(changed[:, :3], plain[:, :3], rtol=0, atol=1e-5)
    assert (changed[:, 3:] - plain[:, 3:]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("gptj", "code of its own"), ("diffllama", "attends twice"), ("bert", "later token")],
)
def test_models_that_are_not_seen_are_refused(model_type, reason):
    model = build(model_type)
    if model_type == "bert":
        model.config.is_decoder = False
    with pytest.raises(UserError, match=reason):
        checked(model)


def test_parts_that_are_not_seen_are_named():
    for model_type, part in (("jetmoe", "units"), ("gemma3n_text", "states"), ("inkling_text", "constants")):
        assert checked(build(model_type)).lacks.keys() == {part}


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_builders_behind_a_norm(model_type):
    """Each unit of a layer alone at zero: what the stream loses at position 1 has the builders' order."""
    lens = checked(build(model_type))
    tokens = lens.probe_tokens()[:1]
    activity = replace(observe(lens, tokens), layer=2)
    state = activity.state[2]
    dimension = activity.dimension
    added = activity.contributions()[1]
    units, seen, lost = [], [], []
    norm = lens.model.model.layers[1].post_feedforward_layernorm
    norm.register_forward_hook(lambda norm, inputs, output: seen.append(output[0] / inputs[0][0]))  # (T, d)
    with lens.hidden_units(lambda layer, values: units.append(values[0])):
        lens.hidden(tokens)
    each = units[1] * lens.down(2)[dimension] * seen[0][:, [dimension]] * state[dimension].sign()  # (T, F)
    # float32 differences of a stream of 1
    torch.testing.assert_close(added, each[0], rtol=1e-3, atol=1e-5)
    for unit in range(len(added)):
        with lens.hidden_units(zero_units([(2, unit)])):
            states = {}
            lens.hidden(tokens, on_state=states.__setitem__)
        lost.append((state - states[2][0, 0])[dimension] * state[dimension].sign())
    assert torch.stack(lost).argmax() == added.argmax()
    assert spearmanr(torch.stack(lost), added).statistic > 0.98  # the norm of all others changes a little


@pytest.mark.parametrize("model_type, lacks", [("llama", ()), ("phi", ()), ("bert", {"units"})])
def test_units_as_many_as_the_stream_is_wide(model_type, lacks, monkeypatch):
    """What enters the maps that make them is no unit; where nothing tells these maps, none is seen."""
    monkeypatch.setitem(TINY["special"], model_type, {"intermediate_size": 64, "is_decoder": True})
    lens = checked(build(model_type))
    assert lens.lacks.keys() == set(lacks)
    if not lacks:
        assert {sum(bank.count for bank in banks) for banks in lens.banks.values()} == {64}
        assert not lens.normed_layers and errors_of(lens)["units"] < 1e-6


def test_heads_are_no_units():
    """Where a part of attention, here the indexer, asks for a mask, too."""
    lens = Lens(build("deepseek_v32"))
    assert [*lens.outputs] == lens.attending
    assert not {bank.module for banks in lens.banks.values() for bank in banks} & set(lens.outputs.values())


def test_sharp_attention_has_constants():
    """Scores in the thousands, where rounding of a key by 1e-7 changes weights by 1e-4."""
    model = build("llama")
    for block in model.model.layers:
        block.self_attn.q_proj.weight.data *= 1000
    assert not checked(model).lacks


def test_units_in_bfloat16_write_as_they_are():
    lens = checked(build("gpt_neox").bfloat16())
    assert not lens.lacks and not lens.normed_layers
    lens = checked(build("gemma2").bfloat16())
    assert lens.normed_layers == lens.attending


def test_more_positions_than_tables_have():
    """RoBERTa's positions begin behind that of padding: its last one or two have no row."""
    lens = Lens(build("roberta"))
    tokens = torch.full((1, lens.config.context_length), 9)
    with pytest.raises(UserError, match="positions are too many"):
        lens.hidden(tokens)
    assert shape_of(WhisperConfig(max_target_positions=77)).context_length == 77


@pytest.fixture
def folder(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_opens(folder):
    """Infinity is written as transformers writes it; a state.json does not make it ours."""
    changes = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "_attn_implementation": "some/kernel"}
    change_config(folder, **changes, limits=[0.0, {"__float__": "Infinity"}])
    assert loading.transformers_config(folder).limits == [0.0, torch.inf]
    for name in ("state.json", "tokenizer.json", "tokenizer.model"):
        (folder / name).write_text("{}")
    spec = checkpoint.find_model(str(folder))
    assert not spec.was_saved_here and spec.tokenizer_file.name == "tokenizer.json"  # as in transformers
    lens = loading.open_lens(folder)
    tokens = lens.probe_tokens()
    assert torch.equal(lens.hidden(tokens), Lens(build("llama")).hidden(tokens))
    assert loading.open_lens(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16


Q = "model.layers.0.self_attn.q_proj"
DAMAGES = {
    "with its head": lambda tensors: tensors.pop("lm_head.weight"),
    "missing": lambda tensors: tensors.pop(f"{Q}.weight"),
    "does not fit": lambda tensors: tensors.update({f"{Q}.bias": torch.ones(64)}),
    "size mismatch|mismatched": lambda tensors: tensors.update({f"{Q}.weight": torch.ones(64, 32)}),
    "not finite": lambda tensors: tensors[f"{Q}.weight"].fill_(torch.nan),
    "packed": lambda tensors: tensors.update({f"{Q}.qweight": torch.ones(64, 8, dtype=torch.int32)}),
}


@pytest.mark.parametrize("wrapped", ["_orig_mod.", "module.", "module._orig_mod."])
def test_compiled_and_parallel_models_open(wrapped, folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({f"{wrapped}{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    lens = loading.open_lens(folder)
    tokens = lens.probe_tokens()
    assert torch.equal(lens.hidden(tokens), Lens(build("llama")).hidden(tokens))


@pytest.mark.parametrize("reason", DAMAGES)
def test_damaged_weights_are_refused(folder, reason):
    tensors = load_file(folder / "model.safetensors")
    DAMAGES[reason](tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=reason):
        loading.open_lens(folder)


def test_other_kinds_are_refused(folder, monkeypatch):
    for changes in ({"model_type": "nonsense"}, {"model_type": "vit"}, {"is_encoder_decoder": True}):
        before = (folder / "config.json").read_text()
        change_config(folder, **changes)
        with pytest.raises(UserError, match="no decoder|no causal"):
            loading.open_lens(folder)
        (folder / "config.json").write_text(before)
    monkeypatch.setattr(loading, "memory_of", lambda device: 1000)
    with pytest.raises(UserError, match="GB in memory"):
        loading.open_lens(folder)
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(UserError, match="adapter"):
        loading.open_lens(folder)
