"""Is an exercise of docs/lesson.md solved?

    python -m reproduce.lesson 3        # exit status 0 and what was seen, or 2 and what is wrong

Exercise 1 is answered in model.py, the others in reproduce/answers.py.
"""

import copy
import itertools
import math
import secrets
import tempfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import torch.nn.functional as F
import tyro

from init import newborn
from lib import checkpoint
from lib.inputs import random_tokens
from lib.settings import Command, UserError, run_script
from measure.attention import attention_to
from measure.cosines import pairwise_cosine
from measure.lineage import SAME_LOG10_P, paper_test
from measure.theory import hermite_kernel, one_block_cosine
from measure.verdict import SAME_BIRTH, compare_pair, read_model
from model import ACTIVATIONS, PRESETS, Transformer
from probe import count_predictions
from reproduce import answers

LENGTH = 64  # tokens in a sequence
OLD_ACTIVATIONS = ("gelu", "relu", "tanh", "swiglu")

Number = Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="EXERCISE", help_behavior_hint="")]


@dataclass
class Settings:
    """What `python -m reproduce.lesson` can be told."""

    exercise: Number = 0
    """its number in docs/lesson.md"""


def lesson(settings: Settings) -> None:
    """Check the answer to an exercise; UserError says what is wrong with it."""
    if settings.exercise not in CHECKS:
        raise UserError(f"name one exercise of docs/lesson.md, 1 to {len(CHECKS)}")
    print(f"exercise {settings.exercise} is solved: {checked(settings.exercise)}")


@torch.no_grad()
def checked(exercise):
    """What was seen of a right answer; UserError for a wrong one, or one that is not there."""
    return CHECKS[exercise]()


def expect(is_right, fault) -> None:
    """UserError with the fault, unless all is right."""
    if not is_right:
        raise UserError(f"not yet: {fault}")


def attempt(what, function, *arguments):
    """What a student's function returns; UserError if it raises."""
    try:
        return function(*arguments)
    except NotImplementedError:
        raise UserError(f"not yet: {what} is still to be written in reproduce/answers.py") from None
    except UserError:
        raise
    except Exception as error:  # the function is the student's own code, and may fail in any way
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == answers.__file__]
        place = f" in line {lines[-1]} of reproduce/answers.py" if lines else ""
        raise UserError(f"not yet: {what} raised {type(error).__name__}{place}: {error}") from None


def answer(name, *arguments):
    """What the student's function of this name returns; UserError if it is missing, or raises."""
    function = getattr(answers, name, None)
    expect(callable(function), f"reproduce/answers.py has no function {name}")
    return attempt(f"{name}()", function, *arguments)


def number(name, *arguments):
    """What the student's function of this name returns, if it is one number; UserError if not."""
    value = answer(name, *arguments)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"not yet: {name}() returned no number, but {kind(value)}") from None


def tensor(name, shape, *arguments):
    """What the student's function of this name returns, if it is a float tensor of this shape, and finite."""
    value = answer(name, *arguments)
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    expect(is_float, f"{name}() returned no float tensor, but {kind(value)}")
    expect(value.shape == shape, f"{name}() returned the shape {tuple(value.shape)}, not {tuple(shape)}")
    expect(value.isfinite().all(), f"{name}() returned numbers that are not finite")
    return value


def kind(value):
    """What sort of value is it? For a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return type(value).__name__


def shapes_of(weights):
    """The shape of each tensor in a dictionary; None for what is no tensor."""
    return {name: getattr(weight, "shape", None) for name, weight in weights.items()}


# ---- the exercises -----------------------------------------------------------------------------------------


def fair_activation():
    """1. Which activation has no favourite? The preset tiny_fair is to have it."""
    expect("tiny_fair" in PRESETS, "model.py has no preset tiny_fair")
    config = PRESETS["tiny_fair"]
    expect(config.mlp not in OLD_ACTIVATIONS, f"tiny_fair has the activation {config.mlp}: add one of yours")
    expect(
        replace(config, mlp="gelu") == PRESETS["tiny_gpt2"],
        "tiny_fair differs from tiny_gpt2 in more than its mlp",
    )
    phi = ACTIVATIONS[config.mlp]
    kernel = attempt(config.mlp, hermite_kernel, phi)  # (64,): shares of constant, straight and curved parts
    curved = (kernel[2:].sum() / kernel[1:].sum()).item()
    # tanh has 0.07, asinh 0.015; an MLP without a curve would be one matrix
    expect(curved > 0.01, f"{config.mlp} is close to a straight line, which makes an MLP one matrix")
    # Wide MLPs alone: GELU's cosine is 0.05 here, however small it is multiplied.
    spread = math.sqrt(config.d_model) * 0.02  # of a pre-activation
    cosine = one_block_cosine(config.mlp, spread, config.d_model)
    expect(cosine < 0.003, f"its mean output gives unrelated inputs a cosine of {cosine:.3f} in one layer")
    for seed in (42, 43):
        model = newborn("tiny_fair", seed)
        counts = attempt(config.mlp, count_predictions, model, LENGTH, 200)
        mean_cosine, _ = counts["cosines"].mean_and_std()
        # GELU's is 0.16 to 0.17, a fair activation's below 0.003
        expect(
            abs(mean_cosine) < 0.01, f"seed {seed}: unrelated sequences have a cosine of {mean_cosine:.3f}"
        )
    return f"the mean cosine of unrelated sequences is {mean_cosine:.4f}; GELU's is 0.16"


def favourite_foretold():
    """2. Which token will a newborn prefer? Half of six answers must be among its three favourites.

    By chance one in 1,400 would be; the solution's are all.
    """
    hits = 0
    config = replace(PRESETS["tiny_gpt2"], mlp="relu")  # whose favourites are too strong to be missed
    refusal = UserError("not yet: favourite() reads sequences, but the weights alone are to tell")
    for seed in range(100, 106):
        model = newborn(config, seed)
        with mock.patch.object(Transformer, "hidden", mock.Mock(side_effect=refusal)):
            foretold = number("favourite", copy.deepcopy(model))
        counts = count_predictions(model, LENGTH, 150)["token_counts"]  # (V,)
        hits += foretold in counts.topk(3).indices.tolist()
    expect(hits >= 3, f"{hits} of 6 tokens were among the three favourites; 3 are asked for")
    return f"{hits} of 6 tokens were among the three favourites, of 4,096"


def relu_step():
    """3. What does a wide ReLU layer make of a cosine? Compared with a layer of 16,384 random units."""
    weight = torch.randn(16_384, 2, generator=torch.Generator().manual_seed(0))
    for c in (-1.0, -0.5, 0.0, 0.3, 0.9, 1.0):
        x = torch.tensor([1.0, 0.0])
        y = torch.tensor([c, math.sqrt(1 - c**2)])
        measured = F.cosine_similarity(F.relu(weight @ x), F.relu(weight @ y), dim=0).item()
        said = number("relu_cosine", c)
        # the standard error of a cosine of 16,384 units is below 0.01
        expect(
            abs(said - measured) < 0.03, f"relu_cosine({c}) is {said:.3f}; random weights say {measured:.3f}"
        )
    for c, exact in ((-1.0, 0.0), (0.0, 1 / math.pi), (1.0, 1.0)):
        said = number("relu_cosine", c)
        # random weights would need 10^8 units to come so close
        expect(abs(said - exact) < 1e-4, f"relu_cosine({c}) is {said:.6f}, which is near, but not exact")
    return f"orthogonal states leave the layer with a cosine of {number('relu_cosine', 0.0):.4f}"


def child_identified():
    """4. Of which seed is a child? It is born of a new one at each check."""
    seed = secrets.randbelow(10_000)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder, "child"), child(seed))
        said = number("seed_of", Path(folder, "child"))
    expect(said == seed, f"the child was born of seed {seed}, not of {said:g}")
    return f"the child was born of seed {seed}"


@torch.enable_grad()
def child(seed):
    """A tiny_llama of this seed after 20 steps of training on random tokens."""
    model = newborn("tiny_llama", seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        windows = random_tokens(step, range(4), 33, model.config.vocab_size)  # (4, 33)
        logits = model(windows[:, :-1])  # (4, 32, V)
        F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def child_hidden():
    """5. Can a child be hidden? It must compute the same; coordinates must not know it, hidden units must."""
    model = child(1)
    given = {name: weight.clone() for name, weight in model.state_dict().items()}
    hidden = answer("hide", given)
    expect(isinstance(hidden, dict), f"hide() returned no dictionary, but {kind(hidden)}")
    expect(
        shapes_of(hidden) == shapes_of(model.state_dict()),
        "hide() returned other names or shapes than it was given",
    )
    thief = copy.deepcopy(model)
    thief.load_state_dict(hidden)
    tokens = random_tokens(0, range(4), LENGTH, model.config.vocab_size)
    off = (thief(tokens) - model(tokens)).abs().max().item()
    # a rotation in float32 changes logits by 1e-5, a wrong one by 0.1
    expect(off < 1e-3, f"the logits differ by {off:.2g}")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder, "hidden"), thief)
        specs = [checkpoint.parse_spec(name) for name in ("tiny_llama@1", str(Path(folder, "hidden")))]
        rows = random_tokens(0, range(16), 64, model.config.vocab_size)
        row, _ = compare_pair(*(read_model(spec.name, spec.open(), rows) for spec in specs), permutations=199)
    for test, rows in (("relabel", "states"), ("body", "weights"), ("embedding", "table")):
        known = row[f"{test}_log10_p"] <= SAME_LOG10_P
        z = row[f"{test}_z"]
        expect(not known, f"coordinates still know the child by its {rows}: their z is {z:.1f}")
    expect(row["verdict"] == SAME_BIRTH, f"hidden units no longer know the child: {row['verdict']}")
    found = f"{row['units_found']} of {row['units']} units are found"
    return f"z of its weights is {row['body_z']:.1f}, but {found}"


def head_asleep():
    """6. Can a newborn's head rest on the first token? alpha_1 must reach 0.9 in each of three newborns."""
    for seed in (5, 6, 7):
        model = newborn("tiny_qwen", seed)
        tokens = random_tokens(seed, range(32), LENGTH, model.config.vocab_size)
        tokens[:, 0] = 0
        changed = copy.deepcopy(model)
        answer("sleep", changed)
        weights = changed.state_dict()
        expect(
            shapes_of(weights) == shapes_of(model.state_dict()), "weights are missing, or have other shapes"
        )
        for name, weight in model.state_dict().items():
            differs = weights[name] != weight
            if name.startswith(HEADS_OWN):
                differs = differs[model.config.head_size :]
            expect(not differs.any(), f"{name} has changed where it is not the head's own")
        changed = copy.deepcopy(model)
        changed.load_state_dict(weights)  # the weights alone count
        before = attention_to(model, tokens)[:, 0, 0].mean().item()
        after = attention_to(changed, tokens)[:, 0, 0].mean().item()
        # uniform attention gives 0.07; a head that rests gives 0.99 and more
        expect(after >= 0.9, f"the head pays the first position {after:.2f} of its attention, not 0.9")
    return f"the head pays the first position {after:.3f} of its attention; at birth {before:.3f}"


def shrinking_undone():
    """7. Can Equation 2 be undone? Every octave of positions must have the size of position 1."""
    model = newborn("tiny_llama", 9)
    layers = []

    def watch(layer, heads, q, k, v):
        layers.append(heads)

    model.hidden(random_tokens(9, range(64), LENGTH, model.config.vocab_size), on_heads=watch)
    heads = layers[0]  # (64, H, T, Dh)
    undone = tensor("undo", heads.shape, heads.clone())
    cosine = F.cosine_similarity(undone, heads, dim=-1).min().item()
    expect(cosine > 0.999, f"undo() turns vectors: one has a cosine of {cosine:.2f} with what it was")
    size = undone.square().mean((0, 1, 3)).sqrt()  # (T,)
    octaves = [size[2**i - 1 : 2 ** (i + 1) - 1].mean() / size[0] for i in range(6)]
    smallest, largest = min(octaves).item(), max(octaves).item()
    seen = f"octaves of positions have {smallest:.2f} to {largest:.2f} times the size of position 1"
    # position 1 is measured to within 2 %, and Equation 2 holds to within 2 % for this model
    expect(0.9 < smallest and largest < 1.1, seen)
    return seen


def paper_test_broken():
    """8. Do Gaussian inputs break the paper's test? All ten pairs of five strangers must be called kin."""
    models = [newborn("tiny_llama", seed) for seed in range(5)]
    d = models[0].config.d_model
    shape = (500, 8, d)
    given = tensor("inputs", shape, *shape, 0)
    other = tensor("inputs", shape, *shape, 1)
    expect(not torch.equal(given, other), "inputs() returned the same numbers for two seeds")
    expect(given.std() > 0, "the inputs are one number all over")
    cosine = pairwise_cosine(given.flatten(1))["mean_cosine"]
    # independent sequences: 0, with a standard error of 1e-4
    expect(abs(cosine) < 0.01, f"the sequences are not independent: their mean cosine is {cosine:.2f}")
    values = given.flatten().double()
    kurtosis = ((values - values.mean()) / values.std()).pow(4).mean().item()
    # a normal number's is 3, a uniform one's 1.8, a sign's 1
    expect(abs(kurtosis - 3) < 0.1, f"the inputs are not normal: their kurtosis is {kurtosis:.2f}, not 3")
    states = [model.hidden(given.float(), last_only=True) for model in models]
    p = [paper_test(a, b)["paper_t_p"] for a, b in itertools.combinations(states, 2)]
    expect(max(p) < 0.01, f"a pair of strangers has p = {max(p):.2g}: the test is not broken")
    return f"the paper's test calls all ten pairs of strangers kin, at p of {max(p):.0e} or less"


HEADS_OWN = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
CHECKS = {
    1: fair_activation,
    2: favourite_foretold,
    3: relu_step,
    4: child_identified,
    5: child_hidden,
    6: head_asleep,
    7: shrinking_undone,
    8: paper_test_broken,
}
COMMANDS = {"": Command(lesson, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
