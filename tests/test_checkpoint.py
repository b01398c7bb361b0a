"""sources/checkpoint.py: to transformers and back; names of models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from conftest import KINDS, random_model

import init
from lib.files import read_json
from lib.settings import UserError
from model import ModelConfig
from sources import checkpoint, llama, saving
from sources.checkpoint import find_model, find_models

TOKENS = torch.randint(97, (2, 50), generator=torch.Generator().manual_seed(1))
OURS = [KINDS["gpt2"], replace(KINDS["qwen2"], attn_calibration="headnorm")]  # nothing to transformers


def saved(folder: Path, config: ModelConfig) -> tuple[str, torch.nn.Module]:
    model = random_model(config)
    saving.save(folder, model)
    return str(folder), model


def edit_config(folder: str, **changes) -> None:
    """Make config.json a stranger's, without the mark of ours, and change it; None removes a key."""
    path = Path(folder) / "config.json"
    config = read_json(path) | {saving.MARK: None} | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def load_own(folder) -> torch.nn.Module:
    """A stranger's weights in our model, as `train.py --init-from` takes them."""
    spec = find_model(str(folder))
    assert not spec.was_saved_here
    return spec.transformer()


@pytest.mark.parametrize("config", OURS)
def test_what_is_ours_alone_is_loaded(config, tmp_path):
    folder, model = saved(tmp_path / "a", config)
    assert read_json(tmp_path / "a" / "config.json")["model_type"] == "bornbiased"
    again = checkpoint.load(folder)
    assert again.config == config and torch.equal(model(TOKENS), again(TOKENS))


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("gpt2")])
def test_to_transformers_and_back(tmp_path, name):
    folder, model = saved(tmp_path / "ours", KINDS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for tokens in (TOKENS, torch.randint(97, (2, 600))):  # of which attention is computed otherwise
        with torch.no_grad():
            # Float32 rounding through three blocks; the logits are of order 1 to 10.
            torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=5e-5)
    assert torch.equal(checkpoint.load(folder)(TOKENS), model(TOKENS))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="10kB")
    back = load_own(tmp_path / "theirs")
    for key, weight in back.state_dict().items():
        assert torch.equal(weight, model.state_dict()[key].bfloat16().float()), key


def test_the_old_spelling_of_rope(tmp_path):
    folder, model = saved(tmp_path / "a", replace(KINDS["llama"], rope_theta=5e4))
    edit_config(folder, rope_parameters=None, rope_theta=5e4)
    assert torch.equal(load_own(folder)(TOKENS), model(TOKENS))


def test_what_hugging_face_leaves_out(tmp_path):
    """Their defaults for missing keys: a key-value head for each head, epsilon 1e-6, theta 10,000, untied."""
    folder, model = saved(tmp_path / "a", replace(KINDS["llama"], norm_epsilon=1e-6))
    gone = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_parameters")
    edit_config(folder, **dict.fromkeys(gone))
    assert torch.equal(load_own(folder)(TOKENS), model(TOKENS))


def test_a_tied_matrix_under_either_name_or_both(tmp_path):
    folder, model = saved(tmp_path / "a", KINDS["llama_mqa_tied"])
    edit_config(folder)
    path = tmp_path / "a" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    head = weights["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(weights | {"lm_head.weight": head}, path)
    assert torch.equal(load_own(folder)(TOKENS), model(TOKENS))
    safetensors.torch.save_file(weights | {"lm_head.weight": head + 1}, path)
    with pytest.raises(UserError, match="lm_head.weight"):
        load_own(folder)
    del weights["model.embed_tokens.weight"]
    safetensors.torch.save_file(weights | {"lm_head.weight": head}, path)
    assert torch.equal(load_own(folder)(TOKENS), model(TOKENS))
    for model_type in ("mistral", "other"):  # transformers opens it
        edit_config(folder, model_type=model_type)
        assert "lm_head.weight" in find_model(folder).weights.shapes


DAMAGES = {
    "gpt_neox": {"model_type": "gpt_neox"},
    "too few": {"num_hidden_layers": 10**9},
    "context_length|max_position_embeddings": {"max_position_embeddings": None},
    r"Expected `int.*\$\.num_kv_heads": {"num_key_value_heads": "2"},
    "does not fit|unknown": {"hidden_size": 64},
}


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("word", DAMAGES)
def test_damaged_configurations(tmp_path, word, is_ours):
    folder, _ = saved(tmp_path / "a", KINDS["llama"])
    edit_config(folder, **DAMAGES[word], **{saving.MARK: is_ours or None})
    spec = find_model(folder)
    assert spec.was_saved_here == is_ours
    with pytest.raises(UserError, match=word):
        spec.model() if is_ours else spec.transformer()
    if word.startswith("context") and not is_ours:  # what compares weights needs none
        assert find_model(folder).weights.shapes


FULL, SLIDING = "full_attention", "sliding_attention"
NARROW = {"use_sliding_window": True, "sliding_window": 16}
WINDOWS = [  # what config.json says of windows in which no layer slides
    {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0},
    {"use_sliding_window": False, "layer_types": [FULL] * 3},
]


def logits_of_transformers(folder: str) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("changes", WINDOWS)
def test_windows_in_which_no_layer_slides(changes, tmp_path):
    folder, _ = saved(tmp_path / "a", KINDS["qwen2"])
    edit_config(folder, **changes)
    # Float32 rounding through three blocks; the logits are of order 1 to 10.
    torch.testing.assert_close(load_own(folder)(TOKENS), logits_of_transformers(folder), rtol=1e-4, atol=5e-5)


OTHERS = [  # what model.py does not compute, or nobody does
    {"is_causal": False},
    {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}},
    {"attention_bias": True},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    NARROW | {"layer_types": [FULL, "chunked_attention", FULL]},
    {"sliding_window": 16, "layer_types": [FULL, SLIDING, FULL]},
    NARROW | {"layer_types": [FULL] * 3},
    NARROW | {"max_window_layers": 2},
    {"layer_types": [[FULL]]},
    {"rope_parameters": [3]},
]


@pytest.mark.parametrize("changes", OTHERS)
def test_what_is_not_computed_is_refused_and_compared(changes, tmp_path):
    folder, _ = saved(tmp_path / "a", KINDS["qwen2"])
    edit_config(folder, **changes)
    with pytest.raises(UserError):
        load_own(folder)
    assert find_model(folder).weights.shapes


NEUTRAL = {  # keys of a configuration that change no logit: another value of theirs
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 3),
    **dict.fromkeys(("output_hidden_states", "output_attentions", "is_encoder_decoder"), True),
    "return_dict": True,
    "use_cache": False,
    "attention_dropout": 0.5,
    "chunk_size_feed_forward": 7,
    "initializer_range": 0.5,
    "pretraining_tp": 2,
    "problem_type": "regression",
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "architectures": ["X"],
    "dtype": "float32",
    "transformers_version": "4.31.0",
    "_name_or_path": "a/b",
}


def test_every_key_of_a_configuration_is_computed_neutral_or_refused(tmp_path):
    """A key that a new version of `transformers` brings fails here: what does it do to logits?"""
    known = {"model_type", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers"}
    known |= {"layer_types"} | set(saving.KEYS.values()) | llama.SUPPORTED.keys() | NEUTRAL.keys()
    for family in llama.FAMILIES:
        assert set(transformers.AutoConfig.for_model(family).to_dict()) <= known, family
    folder, model = saved(tmp_path / "a", KINDS["qwen2"])
    edit_config(folder, **NEUTRAL)
    assert torch.equal(load_own(folder)(TOKENS), model(TOKENS))
    # as above
    torch.testing.assert_close(logits_of_transformers(folder), model(TOKENS), rtol=1e-4, atol=5e-5)


def test_names_of_newborns():
    spec = find_model("tiny_llama@3:5", "centered")
    assert find_model("nano_llama@42").embedding_seed == 42
    assert find_model("nano_llama@42:0").embedding_seed == 0
    loaded, source = spec.model(), spec.weights
    for name, parameter in init.newborn("tiny_llama", 3, 5, "centered").named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
        assert torch.equal(parameter, source.read(name))


def test_a_run_means_its_newest_step(tmp_path):
    for step in (0, 3, 20):
        saved(tmp_path / "run" / f"step_{step:07}", KINDS["gpt2"])
    assert find_model(str(tmp_path / "run")).place == tmp_path / "run" / "step_0000020"


def test_models_that_flags_choose(tmp_path):
    """In a label is what differs from its default."""
    folder, _ = saved(tmp_path / "a", KINDS["llama"])
    names = ("tiny_gpt2", "tiny_llama@9", folder)
    specs = find_models(names, (1, 2), None)
    assert [spec.label for spec in specs] == ["tiny_gpt2@1", "tiny_gpt2@2", "tiny_llama@9", folder]
    specs = find_models(names, (1,), 0)
    assert [spec.label for spec in specs] == ["tiny_gpt2@1:0", "tiny_llama@9", folder]
    assert [spec.embedding_seed for spec in specs] == [0, 9, None]
    assert checkpoint.shortest_context(specs) == 256  # the presets'; the folder's is 700
    checkpoint.check_lengths((1, 256), 256)
    with pytest.raises(UserError, match="--sequence-length 257"):
        checkpoint.check_lengths((1, 257), 256)


def test_nan_is_named(tmp_path):
    model = init.newborn("tiny_llama", 1)
    model.lm_head.weight.data[7, 3] = torch.nan
    saving.save(tmp_path / "a", model)
    with pytest.raises(UserError, match="lm_head.weight is not finite"):
        checkpoint.load(tmp_path / "a")
