"""OpenAI's GPT-2: its logits are transformers'; it is trained on, and scripts read it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from conftest import assert_refused, run_here
from kill_training import SMALL, prepare

import train
from lib import checkpoint, formats
from lib.checkpoint import parse_spec
from lib.files import read_json
from lib.settings import UserError

V = 257  # bytes, and BOS
TOKENS = torch.randint(V, (2, 60), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": V, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
ENDS = {"bos_token_id": 256, "eos_token_id": 256}


def gpt2(folder: Path, **changes) -> transformers.GPT2LMHeadModel:
    """transformers' model of random weights, biases and norms, and its folder."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES | ENDS | changes)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = ".ln_" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer.txt").write_text("bytes")
    return model


def logits_of(model) -> torch.Tensor:
    """What a model, ours or theirs, makes of TOKENS."""
    with torch.no_grad():
        logits = model(TOKENS)
    return logits if isinstance(logits, torch.Tensor) else logits.logits


CHANGES = [
    {},
    {"n_layer": 12},
    {"n_inner": 100, "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 0.01},
    {"activation_function": "gelu"},
    {"activation_function": "relu", "tie_word_embeddings": False},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_logits(changes, tmp_path):
    theirs = gpt2(tmp_path / "a", **changes)
    ours = checkpoint.load(tmp_path / "a")
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=1e-4)


def test_every_parameter_is_trained_on(tmp_path, quick_training):
    """A run that is resumed; its child is sampled, and compared with its parent."""
    gpt2(tmp_path / "a")
    changes = {"init_from": str(tmp_path / "a"), "data": str(prepare(tmp_path)), "out": str(tmp_path / "run")}
    settings = train.Settings(**SMALL | changes)
    train.train(settings)
    train.train(replace(settings, resume=True, max_iters=9))
    child = checkpoint.load(tmp_path / "run")
    for name, parameter in checkpoint.load(tmp_path / "a").named_parameters():
        assert not torch.equal(parameter, child.get_parameter(name)), name
    assert run_here("train", "sample", tmp_path / "run", "--tokens", 80).returncode == 0  # beyond the context
    words = [tmp_path / "a", tmp_path / "run", "--permutations", 199, "--out", tmp_path]
    assert run_here("seedprint", "compare", *words).returncode == 0
    (row,) = read_json(tmp_path / "compare.json")["rows"]
    assert row["verdict"] == "same birth" and row["body_z"] > 9, row


def test_names_without_a_prefix_and_masks(tmp_path):
    """As openai-community/gpt2 stores them, and older files their masks, as numbers or not."""
    gpt2(tmp_path / "a")
    expected = logits_of(checkpoint.load(tmp_path / "a"))
    path = tmp_path / "a/model.safetensors"
    stored = safetensors.torch.load_file(path)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    for layer, kind in enumerate((torch.float32, torch.uint8)):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril().to(kind)
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    safetensors.torch.save_file(tensors, path)
    assert torch.equal(logits_of(checkpoint.load(tmp_path / "a")), expected)


REFUSED = [
    ({"activation_function": "quick_gelu"}, "gelu_pytorch_tanh, not 'quick_gelu'"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not supported"),
    ({"n_positions": 128}, r"embed_positions.weight is \(64, 32\), expected \(128, 32\) by config.json"),
    ({"n_embd": None}, "cannot read .*a: TypeError"),
    ({"model_type": "opt"}, "'opt'; .* read llama, .*, gpt2"),
]


@pytest.mark.parametrize("changes, said", REFUSED)
def test_what_is_refused(changes, said, tmp_path):
    gpt2(tmp_path / "a")
    path = tmp_path / "a/config.json"
    path.write_text(json.dumps(read_json(path) | changes))
    with pytest.raises(UserError, match=said):
        checkpoint.load(tmp_path / "a")
    assert parse_spec(str(tmp_path / "a")).open(any_architecture=True).config is None


def test_every_key_of_its_configuration():
    """A key that a new version of `transformers` brings fails here, as in test_checkpoint.py."""
    neutral = set("attn_pdrop embd_pdrop resid_pdrop reorder_and_upcast_attn".split())
    keys = set(transformers.GPT2Config().to_dict()) - set(transformers.LlamaConfig().to_dict()) - neutral
    keys -= set(formats.GPT2_KEYS.values()) | formats.PLAIN.keys()
    assert {key for key in keys if not key.startswith("summary_")} == set()


def test_scripts_read_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpt2(tmp_path / "a")
    length = ["--sequence-length", 16, "--num-sequences", 12, "--dtype", "float32"]
    for words in ("sinks transplant --num-constants 4 --no-controls --save saved", "sinks silence", "probe"):
        done = run_here(*words.split(), "--model", "a", *length)
        assert done.returncode == 0, done.stderr
        is_transplant = "transplant" in words
        assert ("stand for a token and for position 1" in done.stdout) == is_transplant
    words = ["--paper-sequences", 20, "--paper-length", 9]
    done = run_here("seedprint", "paper", "a", "saved", *words)
    assert done.returncode == 0, done.stderr
    too_long = run_here("sinks", "rate", "--model", "a", "--sequence-length", 65)
    assert_refused(too_long, "--sequence-length 65: expected 1 to 64")
    assert checkpoint.load("saved").config.explicit_sink
    with pytest.raises(ValueError, match="65 positions exceed the context of 64"):
        checkpoint.load("saved")(torch.zeros(1, 65, dtype=torch.long))
