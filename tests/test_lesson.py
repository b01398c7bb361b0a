"""Every exercise of docs/lesson.md: its check refuses a blank page and wrong answers; its patch passes."""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_refused, run_here

import model
from lib.settings import UserError
from reproduce import answers, lesson

SOLUTIONS = ROOT / "docs" / "solutions"
CHECK_ALL = """
from reproduce import lesson
for exercise in lesson.CHECKS:
    print(exercise, lesson.checked(exercise))
"""


def apply(patch, folder, *flags):
    """`git apply` in a folder, whether a repository is around it or not."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", *flags, patch], cwd=folder, env=environment, check=True)


def test_solutions_solve_their_exercises(tmp_path):
    """Each patch applies alone and beside the others, and every check passes with all of them."""
    house = tmp_path / "house"
    house.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, house)
    for name in ("lib", "measure", "reproduce"):
        shutil.copytree(ROOT / name, house / name, ignore=shutil.ignore_patterns("__pycache__"))
    patches = sorted(SOLUTIONS.iterdir())
    assert [path.name for path in patches] == [f"{exercise}.patch" for exercise in lesson.CHECKS]
    for patch in patches:
        apply(patch, house, "--check")
        assert len(patch.read_text().splitlines()) < 20
    for patch in patches:
        apply(patch, house)
    command = [sys.executable, "-c", CHECK_ALL]
    result = subprocess.run(command, cwd=house, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == len(lesson.CHECKS)


@pytest.fixture
def quick_child(monkeypatch):
    """A child that is not trained."""
    monkeypatch.setattr(lesson, "child", lambda seed: lesson.newborn("tiny_llama", seed))


@pytest.mark.parametrize("exercise", lesson.CHECKS)
def test_a_blank_page_is_refused(exercise, quick_child):
    words = ("tiny_fair",) if exercise == 1 else ("is still to be written in reproduce/answers.py",)
    assert_refused(run_here("reproduce.lesson", exercise), "not yet: ", *words)


@pytest.mark.parametrize("words", [(), ("9",), ("0",)])
def test_other_exercises_are_refused(words):
    assert_refused(run_here("reproduce.lesson", *words), "name one exercise of docs/lesson.md, 1 to 8")


def refusal(monkeypatch, exercise, name, function):
    """What a check says of a wrong answer."""
    monkeypatch.setattr(answers, name, function)
    with pytest.raises(UserError, match="^not yet: ") as caught:
        lesson.checked(exercise)
    return str(caught.value)


ACTIVATIONS = {  # wrong ones, and what is said of them
    "relu": (F.relu, "add one of yours"),
    "identity": (lambda x: x, "close to a straight line"),
    "weak": (lambda x: 1e-3 * F.gelu(x), "a cosine of 0.05"),
    "elu": (F.elu, "a cosine of 0.006"),
    "zero": (torch.zeros_like, "close to a straight line"),
    "short": (lambda x: x[:3], "short raised RuntimeError"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_unfair_activations(name, monkeypatch):
    function, words = ACTIVATIONS[name]
    monkeypatch.setitem(model.ACTIVATIONS, name, function)
    monkeypatch.setitem(model.CHOICES, "mlp", tuple(model.ACTIVATIONS))
    monkeypatch.setitem(model.PRESETS, "tiny_fair", replace(model.PRESETS["tiny_gpt2"], mlp=name))
    with pytest.raises(UserError, match=words):
        lesson.checked(1)


def test_favourites_are_not_read(monkeypatch):
    def by_reading(model):
        return model(torch.zeros(1, 64, dtype=torch.int64))[0, -1].argmax()

    assert "the weights alone are to tell" in refusal(monkeypatch, 2, "favourite", by_reading)


COSINES = {
    "sampled": lambda c: F.cosine_similarity(*sampled_units(c), dim=0),
    "taylor": lambda c: 1 / math.pi + c / 2 + c**2 / (2 * math.pi),
    "linear": lambda c: (1 + c) / 2,
    "blank": lambda c: None,
    "broken": lambda c: math.sqrt(-1 - c**2),
}


def sampled_units(c):
    """A million random ReLU units of two vectors of cosine c."""
    weight = torch.randn(2, 1_000_000, generator=torch.Generator().manual_seed(1))
    return F.relu(weight[0]), F.relu(c * weight[0] + math.sqrt(1 - c**2) * weight[1])


@pytest.mark.parametrize("name", COSINES)
def test_wrong_cosines(name, monkeypatch):
    said = refusal(monkeypatch, 3, "relu_cosine", COSINES[name])
    words = {"blank": "no number, but NoneType", "broken": "raised ValueError"}
    assert words.get(name, "relu_cosine(") in said


def test_wrong_seed(monkeypatch, quick_child):
    assert "not of -1" in refusal(monkeypatch, 4, "seed_of", lambda folder: -1)


def only_units_moved(weights):
    """A thief who reorders hidden units alone."""
    changed = dict(weights)
    order = torch.arange(704).roll(1)
    for name, weight in weights.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            changed[name] = weight[order]
        elif name.endswith("down_proj.weight"):
            changed[name] = weight[:, order]
    return changed


HIDDEN = {
    "nothing": (lambda weights: None, "no dictionary, but NoneType"),
    "names": (lambda weights: {}, "other names or shapes"),
    "noise": (lambda weights: {name: weight.roll(1) for name, weight in weights.items()}, "logits differ"),
    "units": (only_units_moved, "coordinates still know the child"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_children_that_are_not_hidden(name, monkeypatch, quick_child):
    function, words = HIDDEN[name]
    assert words in refusal(monkeypatch, 5, "hide", function)


def louder(model):
    """Token 0 itself is changed, which all heads see."""
    model.model.embed_tokens.weight[0] *= 100


def test_heads_that_do_not_sleep(monkeypatch):
    assert "0.07 of its attention" in refusal(monkeypatch, 6, "sleep", lambda model: None)
    assert "embed_tokens.weight has changed" in refusal(monkeypatch, 6, "sleep", louder)
    assert "weights are missing" in refusal(monkeypatch, 6, "sleep", without_queries)


def without_queries(model):
    """The first layer has none."""
    model.model.layers[0].self_attn.q_proj = None


UNDONE = {
    "nothing": (lambda heads: heads, "0.1"),
    "ones": (torch.ones_like, "turns vectors"),
    "from 0": (lambda heads: heads * torch.arange(heads.shape[2]).sqrt()[:, None], "turns vectors"),
    "squared": (lambda heads: heads * torch.arange(1, heads.shape[2] + 1)[:, None], "1.00 to 6."),
    "integers": (lambda heads: heads.int(), "no float tensor, but a tensor of torch.int32"),
    "short": (lambda heads: heads[:, :, 1:], "returned the shape"),
    "infinite": (lambda heads: heads / 0, "not finite"),
}


@pytest.mark.parametrize("name", UNDONE)
def test_shrinking_that_is_not_undone(name, monkeypatch):
    function, words = UNDONE[name]
    assert words in refusal(monkeypatch, 7, "undo", function)


def test_head_norm_undoes_it_too(monkeypatch):
    monkeypatch.setattr(answers, "undo", lambda heads: F.rms_norm(heads, heads.shape[-1:]))
    assert "1.00 to 1.00" in lesson.checked(7)


def normal(n, T, d, seed):
    """Normal numbers."""
    return torch.randn(n, T, d, generator=torch.Generator().manual_seed(seed))


def uniform(n, T, d, seed):
    """Numbers from -1/2 to 1/2."""
    return torch.rand(n, T, d, generator=torch.Generator().manual_seed(seed)) - 0.5


INPUTS = {
    "tokens": (lambda n, T, d, seed: torch.zeros(n, T, d, dtype=torch.int64), "no float tensor"),
    "one seed": (lambda n, T, d, seed: normal(n, T, d, 0), "for two seeds"),
    "one sequence": (lambda n, T, d, seed: normal(1, T, d, seed).expand(n, T, d), "not independent"),
    "faint": (lambda n, T, d, seed: 0.001 * normal(n, T, d, seed), "the test is not broken"),
    "uniform": (lambda n, T, d, seed: uniform(n, T, d, seed), "kurtosis is 1.8"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_break_nothing(name, monkeypatch):
    function, words = INPUTS[name]
    assert words in refusal(monkeypatch, 8, "inputs", function)
