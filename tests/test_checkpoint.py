"""checkpoint.py: to transformers and back, and what damaged, foreign and hostile folders get: one line."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from conftest import KINDS, ROOT, assert_refused, random_model, run_here, run_script
from corrupt_checkpoint import trial

import checkpoint
import init
from common import UserError
from model import PRESETS, ModelConfig

TOKENS = torch.randint(97, (2, 50), generator=torch.Generator().manual_seed(1))


def saved(folder: Path, config: ModelConfig) -> tuple[str, torch.nn.Module]:
    """A random model and its folder."""
    model = random_model(config)
    checkpoint.save(folder, model)
    return str(folder), model


def edit_config(folder: str, **changes) -> None:
    """Change config.json as a stranger's might be; None removes a key."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    (Path(folder) / "checksums.json").unlink(missing_ok=True)


def test_what_is_saved_is_loaded(kind, tmp_path):
    folder, model = saved(tmp_path / "a", KINDS[kind])
    again = checkpoint.load(folder)
    assert not again.training
    assert torch.equal(model(TOKENS), again(TOKENS))
    assert (
        checkpoint.load(folder, dtype=torch.bfloat16).model.layers[0].mlp.up_proj.weight.dtype
        == torch.bfloat16
    )


@pytest.mark.parametrize(
    "changes", [dict(attn_calibration="headnorm"), dict(sublayers="mlp"), dict(qk_norm=True)]
)
def test_what_transformers_cannot_say_is_ours(tmp_path, changes):
    config = replace(KINDS["qwen2"], **changes)  # a Qwen2 with query norms exists nowhere
    folder, model = saved(tmp_path / "a", config)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == "bornbiased"
    again = checkpoint.load(folder)
    assert again.config == config and torch.equal(model(TOKENS), again(TOKENS))


@pytest.mark.parametrize("name", [name for name in KINDS if name != "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_size", ["1GB", "20kB"])
def test_to_transformers_and_back(tmp_path, name, dtype, shard_size):
    folder, model = saved(tmp_path / "ours", KINDS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        # Float32 rounding through three blocks; the logits are of order 1 to 10.
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=5e-5)
    theirs.to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shard_size == "20kB")
    back = checkpoint.load(str(tmp_path / "theirs"))
    for key, weight in back.state_dict().items():
        assert torch.equal(weight, model.state_dict()[key].to(dtype).float()), key
    if dtype == torch.float32:
        assert torch.equal(back(TOKENS), model(TOKENS))


def test_old_and_new_spellings_of_rope(tmp_path):
    folder, model = saved(tmp_path / "a", KINDS["llama3"])
    new = json.loads((tmp_path / "a" / "config.json").read_text())["rope_parameters"]
    old = {key: value for key, value in new.items() if key != "rope_theta"}
    for scaling in (old, {"type": old["rope_type"]} | {k: v for k, v in old.items() if k != "rope_type"}):
        edit_config(folder, rope_parameters=None, rope_theta=new["rope_theta"], rope_scaling=scaling)
        assert checkpoint.read_config(tmp_path / "a").rope_scaling == model.config.rope_scaling
        assert torch.equal(checkpoint.load(folder)(TOKENS), model(TOKENS))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=5e-5)


def test_what_hugging_face_leaves_out(tmp_path):
    """Their defaults for missing keys: a key-value head for each head, epsilon 1e-6, theta 10,000, untied."""
    folder, model = saved(tmp_path / "a", replace(KINDS["llama"], norm_epsilon=1e-6))
    gone = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_parameters")
    edit_config(folder, **dict.fromkeys(gone))
    assert torch.equal(checkpoint.load(folder)(TOKENS), model(TOKENS))


def test_mistral_and_a_tied_head_stored_twice(tmp_path):
    folder, model = saved(tmp_path / "a", KINDS["llama_mqa_tied"])
    edit_config(folder, model_type="mistral")
    with pytest.raises(UserError, match="sliding-window"):  # transformers' default is a window of 4,096
        checkpoint.load(folder)
    config = json.loads((tmp_path / "a" / "config.json").read_text()) | {"sliding_window": None}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    weights = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(weights | {"lm_head.weight": head}, tmp_path / "a" / "model.safetensors")
    assert torch.equal(checkpoint.load(folder)(TOKENS), model(TOKENS))
    safetensors.torch.save_file(weights | {"lm_head.weight": head + 1}, tmp_path / "a" / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.weight"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"model_type": []}, "foreign"),
        ({"model_type": None}, "cannot read"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "biases"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "missing"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "part of the head"),
        ({"num_attention_heads": 2**39, "head_dim": 2**39}, "config.json"),
        ({"num_hidden_layers": 10**9}, "too few"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"num_key_value_heads": 2}, "k_proj"),
        ({"vocab_size": 98}, "98, 32"),
        ({"hidden_size": None}, "d_model"),
        ({"hidden_size": 2**39, "vocab_size": 2**39}, "memory"),
    ],
)
def test_foreign_and_wrong_configurations(tmp_path, changes, word):
    folder, _ = saved(tmp_path / "a", KINDS["llama"])
    edit_config(folder, **changes)
    with pytest.raises(UserError, match=word) as error:
        checkpoint.load(folder)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_hostile_index_and_integer_weights(tmp_path):
    folder, model = saved(tmp_path / "a", KINDS["llama"])
    outside = tmp_path / "outside.safetensors"
    shutil.copyfile(tmp_path / "a" / "model.safetensors", outside)
    for name in ("../outside.safetensors", str(outside), "model.bin", 7, "a" * 300 + ".safetensors"):
        index = {"weight_map": dict.fromkeys(model.state_dict(), name)}
        (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="weight_map|missing"):
            checkpoint.load(folder)
    (tmp_path / "a" / "model.safetensors.index.json").unlink()
    (tmp_path / "a" / "checksums.json").unlink()
    weights = {name: weight.to(torch.int8) for name, weight in model.state_dict().items()}
    safetensors.torch.save_file(weights, tmp_path / "a" / "model.safetensors")
    with pytest.raises(UserError, match="I8"):
        checkpoint.load(folder)


def test_twenty_damaged_folders(tmp_path):
    """The short version of tests/corrupt_checkpoint.py."""
    checkpoint.save(tmp_path / "source", random_model(KINDS["llama"]), {"step": 1})
    checkpoint.save(tmp_path / "other", random_model(KINDS["gpt2"]), {"step": 2})
    outcomes = [trial(tmp_path / "source", tmp_path / "other", seed) for seed in range(20)]
    assert sum(outcome.startswith("refused") for _, outcome in outcomes) >= 15


def test_specs(tmp_path):
    assert checkpoint.find("nano_llama@42") == ("nano_llama", 42, 42)
    assert checkpoint.find("nano_llama@42:7") == ("nano_llama", 42, 7)
    newborn = init.newborn("tiny_llama", 3, 5)
    for (name, a), b in zip(newborn.named_parameters(), checkpoint.load("tiny_llama@3:5").parameters()):
        assert torch.equal(a, b), name
    for step in (0, 3, 20):
        checkpoint.save(tmp_path / "run" / f"step_{step:07}", random_model(KINDS["llama"], step))
    assert checkpoint.find(str(tmp_path / "run")).name == "step_0000020"
    assert checkpoint.models(("tiny_gpt2", "tiny_gpt2@9", str(tmp_path / "run")), (1, 2)) == [
        ("tiny_gpt2", 1),
        ("tiny_gpt2", 2),
        ("tiny_gpt2@9", 9),
        (str(tmp_path / "run"), None),
    ]
    assert checkpoint.config_of("tiny_gpt2") == checkpoint.config_of("tiny_gpt2@1") == PRESETS["tiny_gpt2"]
    for spec, word in (
        ("nano_lama@3", "did you mean nano_llama"),
        ("nothing", "PRESET@SEED"),
        (str(tmp_path), "json"),
    ):
        with pytest.raises(UserError, match=word):
            checkpoint.load(spec)


def test_nan_and_a_damaged_tokenizer_are_named(tmp_path):
    model = init.newborn("tiny_llama", 1)
    model.lm_head.weight.data[7, 3] = float("nan")
    (tmp_path / "sp.model").write_bytes(b"not read here")
    checkpoint.save(tmp_path / "a", model, tokenizer=tmp_path / "sp.model")
    with pytest.raises(UserError, match="lm_head.weight is not finite"):
        checkpoint.load(tmp_path / "a")
    assert checkpoint.own_tokenizer(str(tmp_path / "a")) == tmp_path / "a" / "tokenizer.model"
    (tmp_path / "a" / "tokenizer.model").write_bytes(b"something else")
    with pytest.raises(UserError, match="corrupt.*tokenizer.model"):
        checkpoint.own_tokenizer(str(tmp_path / "a"))
    with pytest.raises(UserError, match="give it a seed, as in tiny_llama@42"):
        checkpoint.find("tiny_llama")


def test_saving_replaces_and_survives(tmp_path):
    """A second save takes the place of the first; a failed one, or one killed in between, leaves it alone."""
    first, second = random_model(KINDS["llama"], 1), random_model(KINDS["llama"], 2)
    checkpoint.save(tmp_path / "a", first)
    with pytest.raises(UserError, match="cannot write"):
        checkpoint.save(tmp_path / "a", second, tokenizer=tmp_path / "nothing")
    assert torch.equal(checkpoint.load(str(tmp_path / "a"))(TOKENS), first(TOKENS))
    (tmp_path / "a").rename(tmp_path / ".a.old.tmp")  # where a kill between the two renames leaves it
    with pytest.raises(UserError):
        checkpoint.save(tmp_path / "a", second, tokenizer=tmp_path / "nothing")
    assert torch.equal(checkpoint.load(str(tmp_path / "a"))(TOKENS), first(TOKENS))
    checkpoint.save(tmp_path / "a", second)
    assert torch.equal(checkpoint.load(str(tmp_path / "a"))(TOKENS), second(TOKENS))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_state_is_never_executed(tmp_path):
    checkpoint.save(tmp_path / "a", random_model(KINDS["llama"]), {"step": 3, "x": torch.ones(2)})
    state = checkpoint.load_state(tmp_path / "a")
    assert state["step"] == 3 and torch.equal(state["x"], torch.ones(2))
    (tmp_path / "a" / "checksums.json").unlink()
    torch.save({"step": Path("/")}, tmp_path / "a" / "state.pt")  # a pickled object of another class
    with pytest.raises(UserError, match="state.pt"):
        checkpoint.load_state(tmp_path / "a")


def test_scripts_take_folders_and_name_tokens(tmp_path):
    import sentencepiece

    lines = (ROOT / "README.md").read_text().splitlines()
    model = tmp_path / "m.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(model)[:-6],
        vocab_size=300,
        minloglevel=2,
        model_type="bpe",
    )
    config = replace(PRESETS["tiny_llama"], vocab_size=300)
    checkpoint.save(tmp_path / "a", init.newborn(config, 1), tokenizer=model)
    small = ["--num-sequences", 30, "--sequence-length", 8, "--out", tmp_path]
    result = run_script("probe.py", "--model", tmp_path / "a", "tiny_llama@4", *small)
    assert result.returncode == 0, result.stderr
    folder, newborn = json.loads((tmp_path / "probe.json").read_text())["rows"]
    coder = sentencepiece.SentencePieceProcessor(str(model))
    assert folder["top1_text"] == coder.id_to_piece(folder["top1_token"]) and folder["seed"] is None
    assert newborn["seed"] == 4 and "top1_text" not in newborn and "top1_text" in result.stdout
    result = run_script("contraction.py", "layers", "--model", tmp_path / "a", *small)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "layers.json").read_text())["rows"][0]["model"] == str(tmp_path / "a")
    assert_refused(run_here("contraction.py", "cure", "--model", tmp_path / "a"), "newborns", "preset")
    assert_refused(run_here("probe.py", "--model", tmp_path / "nothing"), "no model")


def test_full_disk_is_one_line(tmp_path):
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
    code += "import checkpoint, common, init\n"
    code += "folder = checkpoint.Path(sys.argv[1])\n"
    code += "common.run(lambda words: checkpoint.save(folder, init.newborn('tiny_llama', 1)))"
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert_refused(result, "cannot write", str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []
