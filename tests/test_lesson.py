"""Every exercise of lesson/README.md: a stub and wrong answers are refused, the solution passes."""

import inspect
import runpy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run_script
from transformers import LlamaConfig, LlamaForCausalLM

import model
from hf.lens import Lens
from lesson import check

CHECKS = {int(name.split("_")[1]): f for name, f in vars(check).items() if name.startswith("test_")}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """An untrained child, a small model for SmolLM2, and tables as before answer 1 wrote into them."""
    monkeypatch.setattr(check, "trained_child", lambda seed: check.newborn("tiny_llama", seed))
    monkeypatch.setitem(model.ACTIVATIONS, "mine", F.relu)
    monkeypatch.setitem(model.PRESETS, "tiny_fair", replace(model.PRESETS["tiny_gpt2"], mlp="mine"))
    spec = SimpleNamespace(model=sinking_model)
    find = check.checkpoint.find_model
    monkeypatch.setattr(
        check.checkpoint, "find_model", lambda name: spec if name == "smollm2" else find(name)
    )
    tokens = check.random_tokens(0, range(8), check.LENGTH, 97).clamp(min=1)
    tokens[:, 0] = 0
    monkeypatch.setattr(check, "read_tokens", lambda *_: tokens)


@torch.no_grad()
def sinking_model() -> Lens:
    """A small model for SmolLM2: exercise 7's neurons fire for token 0 alone, which a dimension tells."""
    torch.manual_seed(3)  # a loss that rises without the neurons
    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 13, "num_attention_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=1488)).eval()
    theirs.lm_head.weight *= 50
    token_0 = torch.eye(32)[0]
    theirs.model.embed_tokens.weight *= 50
    theirs.model.embed_tokens.weight[:, 0] = 0
    theirs.model.embed_tokens.weight[0] = token_0
    for layer in theirs.model.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
    mlp, units = theirs.model.layers[11].mlp, [1229, 1487]
    mlp.gate_proj.weight[units] = mlp.up_proj.weight[units] = token_0
    mlp.down_proj.weight[1:, units] = torch.randn(31, 2)
    return Lens(theirs)


@torch.no_grad()
def graded(exercise: int, function, place) -> None:
    CHECKS[exercise](function, *[place][: len(inspect.signature(CHECKS[exercise]).parameters) - 1])


@pytest.mark.parametrize("exercise", CHECKS)
def test_a_solution_passes(exercise, tmp_path):
    found = runpy.run_path(str(ROOT / f"lesson/solutions/{exercise}.py"))
    graded(exercise, found[check.NAMES[exercise - 1]], tmp_path)


def test_the_command():
    done = run_script("-m", "lesson.check", 3)
    assert done.returncode == 1 and "lesson/answers/3.py:9: NotImplementedError" in done.stdout, done.stdout


def without_noise(model):
    mean = model.model.embed_tokens.weight.mean(0)
    means = []
    for block in model.model.layers:
        mean = mean + block.self_attn.o_proj(block.self_attn.v_proj(block.input_layernorm(mean)))
        mean = mean + block.mlp(block.post_attention_layernorm(mean))
        means.append(mean)
    return torch.stack(means)


WRONG = [
    (1, F.relu, "a cosine of 0.318"),
    (2, without_noise, "not above 0.9"),
    (3, lambda c: (1 + c) / 2, "a wide layer has 0.318"),
    (4, lambda folder: -1, "not of -1"),
    (5, lambda weights: weights, "256 of 256 coordinates are where they were"),
    (5, lambda weights: {name: w.roll(1) for name, w in weights.items()}, "logits differ"),
    (6, lambda model: None, "0.07 of its attention"),
    (6, lambda model: model.model.embed_tokens.weight[0].mul_(100), "weight has changed"),
    (7, lambda model, silent, tokens: torch.zeros(32), "nats with your vector"),
    (8, lambda shares: max(shares) > 0.1, "gemma-3-270m-q4_k_m.gguf against smollm2 is no child"),
]


@pytest.mark.parametrize("exercise, function, words", WRONG, ids=[case[2] for case in WRONG])
def test_wrong_answers(exercise, function, words, tmp_path):
    with pytest.raises(AssertionError, match=words):
        graded(exercise, function, tmp_path)
