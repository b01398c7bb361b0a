"""Check the exercises of lesson/README.md.

    python -m lesson.check          # all; exit status 0 if all are solved, 1 if not
    python -m lesson.check 3        # one

Answers go into lesson/answers/1.py to 8.py: a function each, whose docstring says what is given and wanted.
"""

import copy
import itertools
import math
import runpy
import secrets
import sys
import tempfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from init import newborn
from lib.files import read_json
from lib.settings import Command, UserError, run_script
from measure.attention import attention_to
from measure.theory import hermite_kernel
from measure.units import zero_units
from model import PRESETS
from reproduce.mechanisms import pairwise_cosine
from sources import checkpoint
from sources.inputs import TextSettings, random_tokens, read_tokens

ANSWERS = Path(__file__).with_name("answers")
LENGTH = 64  # tokens in a sequence
VOCABULARY = 4096  # of every tiny preset


@dataclass
class Settings:
    """Which exercises to check."""

    exercise: tyro.conf.Positional[Literal[*range(9)]] = 0  # its number in lesson/README.md; 0: all


def check_answers(settings: Settings) -> None:
    """Print a line for each exercise; exit with status 0 if all are solved."""
    print("a check takes some seconds, that of 7 half a minute")
    faults = 0
    for exercise in [settings.exercise] if settings.exercise else CHECKS:
        is_solved, seen = grade(exercise)
        print(exercise, "solved " if is_solved else "not yet", seen, sep="  ", flush=True)
        faults += not is_solved
    sys.exit(faults > 0)


def grade(exercise):
    """Whether an exercise is solved, and what was found, in one sentence."""
    path = str(ANSWERS / f"{exercise}.py")
    place = f"lesson/answers/{exercise}.py"
    name, check = CHECKS[exercise]
    try:
        with torch.no_grad():
            function = runpy.run_path(path).get(name)
            expect(callable(function), f"{place} has no function {name}")
            return True, check(function)
    except UserError as error:
        return False, str(error)
    except NotImplementedError:
        return False, f"{name} is still to be written in {place}"
    except (Exception, SystemExit) as error:  # the student's own code may fail in any way
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f", line {frame.lineno}" for frame in frames if frame.filename == path]
        first_line = str(error).partition("\n")[0]
        return False, f"{place}{''.join(lines[-1:])}: {type(error).__name__} {first_line}"


def expect(is_right, fault) -> None:
    """UserError with the fault, unless it is right."""
    if not is_right:
        raise UserError(fault)


def expect_tensor(value, shape) -> None:
    """UserError unless a student's function returned a finite float tensor of this shape."""
    is_right = isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shape
    expect(is_right, f"it has to be a float tensor of shape {tuple(shape)}")
    expect(value.isfinite().all(), "not all of the numbers are finite")


@torch.enable_grad()
def trained_child(seed):
    """A tiny_llama of this seed after 20 steps of training on random tokens."""
    model = newborn("tiny_llama", seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        windows = random_tokens(step, range(4), 33, VOCABULARY)  # (4, 33)
        loss = model(windows[:, :-1], windows[:, 1:]) / (4 * 32)  # the mean of a sum
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def fair_activation(activation):
    """1. An activation without a favourite: unrelated inputs must leave one layer, and all, with cosine 0."""
    z = torch.linspace(-3, 3, 61)
    expect_tensor(activation(z), z.shape)
    expect(not torch.allclose(activation(z), z.tanh(), atol=1e-3), "tanh is there already")
    kernel = hermite_kernel(activation)  # (64,): its constant, straight and curved parts
    curved = kernel[2:].sum() / kernel[1:].sum()  # tanh has 0.07, asinh 0.015
    expect(curved > 0.01, "it is close to a straight line, which makes an MLP one matrix")
    s = math.sqrt(PRESETS["tiny_fair"].d_model) * 0.02  # std of a pre-activation
    kernel = hermite_kernel(lambda z: activation(s * z))
    cosine = kernel[0] / kernel.sum()  # GELU's is 0.05, however small it is multiplied
    expect(cosine < 0.003, f"its mean output gives unrelated inputs a cosine of {cosine:.3f} in one layer")
    model = newborn("tiny_fair", 42)
    states = model.hidden(random_tokens(0, range(200), LENGTH, VOCABULARY), last_only=True)
    mean_cosine = pairwise_cosine(states)["mean_cosine"]
    return f"the mean cosine of unrelated sequences is {mean_cosine:.4f}; GELU's is 0.16"


def shared_part(shared):
    """2. What all states share: each row must have a cosine of 0.9 with the mean of 150 sequences."""
    model = newborn(replace(PRESETS["tiny_gpt2"], mlp="relu"), 100)
    tokens = random_tokens(0, range(150), LENGTH, VOCABULARY)
    means = []
    states = model.hidden(tokens, last_only=True, on_state=lambda layer, x: means.append(x[:, -1].mean(0)))
    model.hidden = None  # only the weights may be used
    predicted = shared(model)
    expect_tensor(predicted, (model.config.num_layers, model.config.d_model))
    cosine, layer = F.cosine_similarity(predicted, torch.stack(means[1:]), dim=1).min(0)
    # 0.95 with all of the formula; 0.70 without its attention, 0.62 without the noise
    expect(cosine > 0.9, f"after block {layer + 1} its cosine with the mean is {cosine:.2f}, not above 0.9")
    token = model.unembed(model.model.norm(predicted[-1])).argmax()
    counts = model.unembed(states).argmax(1).bincount(minlength=VOCABULARY)
    seen = f"token {token} was predicted {counts[token]} times of 150, the most frequent one {counts.max()}"
    return f"its cosines with what sequences share are {cosine:.2f} and more; {seen}"


def relu_step(relu_cosine):
    """3. A cosine after a wide ReLU layer: for twelve layers, and for opposite inputs."""
    cosines = [-1.0, 0.0]  # a layer makes the second of the first, which are opposite, and so on
    for _ in range(12):
        c = cosines[-1]
        cosines.append((math.sqrt(1 - c * c) + c * math.acos(-c)) / math.pi)
    for c, exact in itertools.pairwise(cosines):
        said = float(relu_cosine(c))
        expect(abs(said - exact) < 1e-6, f"relu_cosine({c:.4f}) is {said:.7f}; a wide layer has {exact:.7f}")
    return f"after 12 layers orthogonal states have a cosine of {exact:.4f}"


def child_identified(seed_of):
    """4. A child's seed, which is new at each check."""
    seed = secrets.randbelow(10_000)
    model = trained_child(seed)
    for parameter in model.parameters():
        parameter += 0.035 * torch.randn_like(parameter)  # initial std 0.02: the cosine is 0.5 now
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder, "child"), model)
        said = int(seed_of(Path(folder, "child")))
    expect(said == seed, f"the child was born of seed {seed}, not of {said}")
    return f"the child was born of seed {seed}"


def child_hidden(hide):
    """5. A disguised child: it must compute the same, with nearly every coordinate elsewhere."""
    model = trained_child(1)
    disguised = copy.deepcopy(model)
    hidden = hide(copy.deepcopy(model.state_dict()))
    disguised.load_state_dict(hidden)
    tokens = random_tokens(0, range(4), LENGTH, VOCABULARY)
    off = (disguised(tokens) - model(tokens)).abs().max()
    expect(off < 1e-3, f"the logits differ by {off:.2g}")  # a rotation: by 1e-5 in float32, a wrong one: 0.1
    E = model.model.embed_tokens.weight  # (V, d)
    cosines = F.cosine_similarity(E, disguised.model.embed_tokens.weight, dim=0).abs()  # (d,)
    here = int((cosines > 0.5).sum())
    said = f"{here} of {len(cosines)} coordinates are where they were"
    expect(here < 10, said)  # a random order leaves one in its place, on average
    return f"the logits differ by {off:.0e}, and {said}"


def head_at_rest(sleep):
    """6. A head that rests on the first token: alpha_1 must reach 0.9 in each of three newborns."""
    for seed in (5, 6, 7):
        model = newborn("tiny_qwen", seed)
        changed = copy.deepcopy(model)
        sleep(changed)
        weights = changed.state_dict()
        for name, weight in model.state_dict().items():
            differs = weights[name] != weight
            if name.startswith(("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")):
                differs = differs[model.config.head_size :]
            expect(not differs.any(), f"{name} has changed where it is not the head's own")
        tokens = random_tokens(seed, range(32), LENGTH, VOCABULARY)
        tokens[:, 0] = 0
        alpha = attention_to(changed, tokens)[:, 0, 0].mean().item()  # of a head that rests 0.99 and more
        said = f"the head pays the first position {alpha:.2f} of its attention"
        expect(alpha >= 0.9, f"{said}, not 0.9")
    return f"{said}; a newborn's, 0.07"


def sink_replaced(stand_in):
    """7. One vector in place of the sink's two neurons: nine tenths of the loss must come back."""
    spec = checkpoint.parse_spec("smollm2")
    given, fresh = read_tokens(TextSettings(num_sequences=40, device="cpu"), spec, LENGTH).chunk(2)
    units = [(12, 1229), (12, 1487)]  # that build the massive activation (docs/sinks.md)
    return units_replaced(stand_in, spec.load(), units, given, fresh)


def units_replaced(stand_in, model, units, given, fresh):
    """How much of the loss the student's vector brings back, with a layer's neurons ablated."""
    silent = model.ablated(zero_units(units))
    whole = losses(model, fresh)
    rise = losses(silent, fresh) - whole
    vector = stand_in(model, silent, given)
    expect_tensor(vector, (model.config.d_model,))

    def add(block, inputs, output):
        stream = output if isinstance(output, torch.Tensor) else output[0]
        stream[:, 0] += vector

    with model.blocks[units[0][0] - 1].register_forward_hook(add):
        left = (losses(silent, fresh) - whole).mean()
    octaves = ", ".join(f"{rise[n - 1 : 2 * n - 1].mean():.1f}" for n in (1, 2, 4, 8, 16, 32))
    said = f"the loss rises by {abs(left):.2f} nats with your vector, without by {rise.mean():.2f}"
    said += f" (at positions 1, 2-3, 4-7, 8-15, 16-31 and 32-63 by {octaves})"
    expect(left < 0.1 * rise.mean(), said)
    return said


def losses(model, tokens):
    """The mean loss at each position of tokens (n, T), in nats: (T - 1,)."""
    logits = model.unembed(model.hidden(tokens)[:, :-1])  # (n, T - 1, V)
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(0)


def child_told(is_child):
    """8. A child's shares: all measured pairs, and five maps made from them."""
    table = read_json(Path(__file__).parents[1] / "results" / "robustness.json")
    maps, strangers = [], []
    for row, layers in zip(table["rows"], table["layers"]):
        shares = [layer["share"] for layer in layers]
        maps.append((f"{row['suspect']} against {row['base']}", shares, row["kind"].startswith("child")))
        if row["kind"] == "never met":
            strangers.append(shares)
    most = np.max(strangers, axis=0)  # (12,): the largest share at each depth
    for num_layers in (12, 30):
        depths = np.linspace(0, len(most) - 1, num_layers)
        shares = np.interp(depths, range(len(most)), 2 * most).clip(max=1).tolist()
        maps.append((f"a stranger of {num_layers} layers that shares twice as much", shares, False))
    for start in (8, 13, 20):  # where the two layers of the base begin
        merge = list(shares)
        merge[start : start + 2], merge[-2:] = shares[-2:], shares[start : start + 2]
        maps.append((f"a merge with the base's layers {start + 1} and {start + 2}", merge, True))
    for name, shares, is_related in maps:
        quarters = ", ".join(f"{100 * max(quarter):.0f}" for quarter in np.array_split(shares, 4))
        said = f"{name} is {'a' if is_related else 'no'} child"
        fault = f"{said}; at most {quarters} % of a layer are matched in the quarters of its depth"
        expect(is_child(list(shares)) == is_related, fault)
    return f"{len(maps)} maps are judged correctly"


CHECKS = {  # the function in answers/N.py, and its check
    1: ("activation", fair_activation),
    2: ("shared", shared_part),
    3: ("relu_cosine", relu_step),
    4: ("seed_of", child_identified),
    5: ("hide", child_hidden),
    6: ("sleep", head_at_rest),
    7: ("stand_in", sink_replaced),
    8: ("is_child", child_told),
}
COMMANDS = {"": Command(check_answers, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
