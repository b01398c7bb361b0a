"""OpenAI's GPT-2: its logits are transformers', before and after a training; every script reads it."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from conftest import assert_refused, run_here
from hub_server import serving
from test_hub import point_to, repositories

from lib.files import read_json
from lib.settings import UserError
from model import Transformer
from sources import checkpoint, formats
from sources.checkpoint import parse_spec

V = 257  # bytes, and <|endoftext|>
TOKENS = torch.randint(V, (2, 60), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": V, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
ENDS = {"bos_token_id": 256, "eos_token_id": 256}


def gpt2(folder: Path, **changes) -> transformers.GPT2LMHeadModel:
    """transformers' model of random weights, biases and norms, and its folder, with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES | ENDS | changes)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = ".ln_" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, 0.2)
    model.save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    coder = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    coder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = tokenizers.decoders.ByteLevel()
    coder.add_special_tokens(["<|endoftext|>"])
    coder.save(str(folder / "tokenizer.json"))
    return model


def logits_of(model) -> torch.Tensor:
    """What a model, ours or theirs, makes of TOKENS."""
    with torch.no_grad():
        logits = model(TOKENS)
    return logits if isinstance(logits, torch.Tensor) else logits.logits


def in_their_words(model: Transformer) -> dict:
    """Our parameters as transformers' GPT-2 has them: matrices (inputs, outputs), q, k and v side by side."""
    ours = model.state_dict()
    theirs = {"wte.weight": ours["model.embed_tokens.weight"]}
    theirs["wpe.weight"] = ours["model.embed_positions.weight"]
    for kind in ("weight", "bias"):
        theirs[f"ln_f.{kind}"] = ours[f"model.norm.{kind}"]
        for i in range(model.config.num_layers):
            here, there = f"model.layers.{i}.", f"h.{i}."
            theirs[f"{there}ln_1.{kind}"] = ours[f"{here}input_layernorm.{kind}"]
            theirs[f"{there}ln_2.{kind}"] = ours[f"{here}post_attention_layernorm.{kind}"]
            packed = torch.cat([ours[f"{here}self_attn.{letter}_proj.{kind}"] for letter in "qkv"])
            theirs[f"{there}attn.c_attn.{kind}"] = packed.t()
            theirs[f"{there}attn.c_proj.{kind}"] = ours[f"{here}self_attn.o_proj.{kind}"].t()
            theirs[f"{there}mlp.c_fc.{kind}"] = ours[f"{here}mlp.up_proj.{kind}"].t()
            theirs[f"{there}mlp.c_proj.{kind}"] = ours[f"{here}mlp.down_proj.{kind}"].t()
    theirs = {f"transformer.{name}": weight for name, weight in theirs.items()}
    return theirs | {"lm_head.weight": ours["model.embed_tokens.weight"]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_layer": 12},
        {"n_inner": 100, "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 0.01},
        {"activation_function": "gelu"},
        {"activation_function": "relu", "tie_word_embeddings": False},
    ],
)
def test_logits_before_and_after_a_training(changes, tmp_path, quick_training):
    theirs = gpt2(tmp_path / "a", **changes)
    ours = checkpoint.load(tmp_path / "a")
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=1e-4)
    if changes:
        return
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    words = [tmp_path / "text.txt", "--tokenizer", tmp_path / "a/tokenizer.json", "--held-out", 0.1]
    done = run_here("sources.data", *words, "--out", tmp_path / "data")
    assert done.returncode == 0, done.stderr
    words = ["--init-from", tmp_path / "a", "--data", tmp_path / "data", "--out", tmp_path / "run"]
    words += ["--sequence-length", 64, "--global-batch-size", 4, "--max-iters", 10, "--no-compile"]
    words += ["--dtype", "float32", "--eval-every", 10, "--eval-sequences", 2, "--warmup-iters", 1]
    for more in ([], ["--resume", "--max-iters", 12]):
        done = run_here("train", *words, *more)
        assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "run/step_0000010/config.json")["model_type"] == "bornbiased"
    for step in ("run/step_0000010", "run"):
        child = checkpoint.load(tmp_path / step)
        before = logits_of(theirs)
        theirs.load_state_dict(in_their_words(child))
        assert (before - logits_of(theirs)).abs().max() > 0.01
        torch.testing.assert_close(logits_of(child), logits_of(theirs), rtol=0, atol=1e-4)
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
    safetensors.torch.save_file(tensors | {"h.0.attn.c_new.weight": torch.ones(3, 3)}, path)
    with pytest.raises(UserError, match="layers.0.attn.c_new.weight is unknown"):
        checkpoint.load(tmp_path / "a")


def test_a_file_as_nanogpt_saves_it_has_a_folders_tensors(tmp_path):
    gpt2(tmp_path / "a")
    stored = safetensors.torch.load_file(tmp_path / "a/model.safetensors")
    saved = {}
    for name, tensor in stored.items():
        is_turned = ".c_" in name and tensor.ndim == 2
        saved[f"_orig_mod.{name}"] = tensor.T.contiguous() if is_turned else tensor
    torch.save({"model": saved}, tmp_path / "ckpt.pt")
    folder, file = (formats.open_checkpoint(tmp_path / name, True) for name in ("a", "ckpt.pt"))
    assert folder.shapes == file.shapes
    assert all(torch.equal(folder.read(name), file.read(name)) for name in folder.shapes)


REFUSED = [
    ({"activation_function": "quick_gelu"}, "gelu_pytorch_tanh, not 'quick_gelu'"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not supported"),
    ({"scale_attn_weights": False}, "scale_attn_weights False is not supported"),
    ({"add_cross_attention": True}, "add_cross_attention True is not supported"),
    ({"n_positions": 128}, r"embed_positions.weight is \(64, 32\), expected \(128, 32\) by config.json"),
    ({"n_embd": None}, "cannot read .*a: TypeError"),
    (
        {"model_type": "opt"},
        "'opt'; `sinks.py` and all that runs a model read llama, .*, gpt2. `seedprint.py",
    ),
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


SCRIPTS = [  # what is asked, and the JSON that answers
    ("sinks rate", "rate"),
    ("reproduce.interventions first", "first"),
    ("sinks anatomy", "anatomy"),
    ("reproduce.interventions intervene --position 3", "intervene"),
    ("reproduce.interventions silence --num-builders 2", "silence"),
    ("sinks transplant --num-constants 4 --save saved", "transplant"),
    ("probe", "probe"),
]


def test_every_script_on_what_the_hub_serves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sources.inputs.SOURCE_CHARACTERS", 20_000)
    gpt2(tmp_path / "a")
    files, _ = repositories(tmp_path / "others")
    files["org/gpt2"] = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with serving(files) as server:
        point_to(server.url, monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        for words, name in SCRIPTS:
            length = ["--sequence-length", 16, "--num-sequences", 12, "--dtype", "float32"]
            done = run_here(*words.split(), "--model", "org/gpt2", *length)
            assert done.returncode == 0, done.stderr
            assert read_json(Path(f"out/{name}.json"))["rows"]
        few = {"paper": ["--paper-sequences", 20, "--paper-length", 9], "compare": ["--permutations", 199]}
        for command, words in few.items():
            done = run_here("seedprint", command, "org/gpt2", "saved", *words)
            assert done.returncode == 0, done.stderr
        too_long = run_here("sinks", "rate", "--model", "org/gpt2", "--sequence-length", 65)
        assert_refused(too_long, "--sequence-length 65: expected 1 to 64")
    assert checkpoint.load("saved").config.explicit_sink
    with pytest.raises(ValueError, match="65 positions exceed the context of 64"):
        checkpoint.load("saved")(torch.zeros(1, 65, dtype=torch.long))
