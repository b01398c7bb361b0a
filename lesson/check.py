"""Check the exercises of lesson/README.md.

    python -m lesson.check          # all, by pytest
    python -m lesson.check 3        # one

Answers go into lesson/answers/1.py to 8.py: a function each, whose docstring says what is given and wanted.
"""

import copy
import itertools
import math
import os
import runpy
import secrets
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from init import newborn
from lib.files import read_json
from measure.attention import attention_to
from measure.theory import hermite_kernel
from measure.units import zero_units
from model import PRESETS
from reproduce.mechanisms import pairwise_cosine
from sources import checkpoint, saving
from sources.inputs import TextSettings, random_tokens, read_tokens

HERE = Path(__file__).parent
NAMES = ("activation", "shared", "relu_cosine", "seed_of", "hide", "sleep", "stand_in", "is_child")
LENGTH = 64  # tokens in a sequence
VOCABULARY = 4096  # of every tiny preset


@pytest.fixture
def answer(request):
    """The student's function, one of NAMES; a check's name begins with its number."""
    number = int(request.function.__name__.split("_")[1])
    path = HERE / os.environ.get("ANSWERS", "answers") / f"{number}.py"
    with torch.no_grad():
        yield runpy.run_path(str(path))[NAMES[number - 1]]


def assert_tensor(value, shape) -> None:
    """A student's function returned a finite float tensor of this shape."""
    is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shape
    assert is_tensor, f"it has to be a float tensor of shape {tuple(shape)}"
    assert value.isfinite().all(), "not all of the numbers are finite"


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


def test_1_fair_activation(answer):
    """1. An activation without a favourite: unrelated inputs must leave one layer, and all, with cosine 0."""
    z = torch.linspace(-3, 3, 61)
    assert_tensor(answer(z), z.shape)
    assert not torch.allclose(answer(z), z.tanh(), atol=1e-3), "tanh is there already"
    kernel = hermite_kernel(answer)  # (64,): its constant, straight and curved parts
    curved = kernel[2:].sum() / kernel[1:].sum()  # tanh has 0.07, asinh 0.015
    assert curved > 0.01, "it is close to a straight line, which makes an MLP one matrix"
    s = math.sqrt(PRESETS["tiny_fair"].d_model) * 0.02  # std of a pre-activation
    kernel = hermite_kernel(lambda z: answer(s * z))
    cosine = kernel[0] / kernel.sum()  # GELU's is 0.05, however small it is multiplied
    assert cosine < 0.003, f"its mean output gives unrelated inputs a cosine of {cosine:.3f} in one layer"
    model = newborn("tiny_fair", 42)
    states = model.hidden(random_tokens(0, range(200), LENGTH, VOCABULARY), last_only=True)
    mean_cosine = pairwise_cosine(states)["mean_cosine"]
    print(f"the mean cosine of unrelated sequences is {mean_cosine:.4f}; GELU's is 0.16")


def test_2_shared_part(answer):
    """2. What all states share: each row must have a cosine of 0.9 with the mean of 150 sequences."""
    model = newborn(replace(PRESETS["tiny_gpt2"], mlp="relu"), 100)
    tokens = random_tokens(0, range(150), LENGTH, VOCABULARY)
    means = []
    states = model.hidden(tokens, last_only=True, on_state=lambda layer, x: means.append(x[:, -1].mean(0)))
    model.hidden = None  # only the weights may be used
    predicted = answer(model)
    assert_tensor(predicted, (model.config.num_layers, model.config.d_model))
    cosine, layer = F.cosine_similarity(predicted, torch.stack(means[1:]), dim=1).min(0)
    # 0.95 with all of the formula; 0.70 without its attention, 0.62 without the noise
    assert cosine > 0.9, f"after block {layer + 1} its cosine with the mean is {cosine:.2f}, not above 0.9"
    token = model.unembed(model.model.norm(predicted[-1])).argmax()
    counts = model.unembed(states).argmax(1).bincount(minlength=VOCABULARY)
    seen = f"token {token} was predicted {counts[token]} times of 150, the most frequent one {counts.max()}"
    print(f"its cosines with what sequences share are {cosine:.2f} and more; {seen}")


def test_3_relu_step(answer):
    """3. A cosine after a wide ReLU layer: for twelve layers, and for opposite inputs."""
    cosines = [-1.0, 0.0]  # a layer makes the second of the first, which are opposite, and so on
    for _ in range(12):
        c = cosines[-1]
        cosines.append((math.sqrt(1 - c * c) + c * math.acos(-c)) / math.pi)
    for c, exact in itertools.pairwise(cosines):
        said = float(answer(c))
        assert abs(said - exact) < 1e-6, f"relu_cosine({c:.4f}) is {said:.7f}; a wide layer has {exact:.7f}"
    print(f"after 12 layers orthogonal states have a cosine of {exact:.4f}")


def test_4_child_identified(answer, tmp_path):
    """4. A child's seed, which is new at each check."""
    seed = secrets.randbelow(10_000)
    model = trained_child(seed)
    for parameter in model.parameters():
        parameter += 0.035 * torch.randn_like(parameter)  # initial std 0.02: the cosine is 0.5 now
    saving.save(tmp_path, model)
    said = int(answer(tmp_path))
    assert said == seed, f"the child was born of seed {seed}, not of {said}"
    print(f"the child was born of seed {seed}")


def test_5_child_hidden(answer):
    """5. A disguised child: it must compute the same, with nearly every coordinate elsewhere."""
    model = trained_child(1)
    disguised = copy.deepcopy(model)
    hidden = answer(copy.deepcopy(model.state_dict()))
    disguised.load_state_dict(hidden)
    tokens = random_tokens(0, range(4), LENGTH, VOCABULARY)
    off = (disguised(tokens) - model(tokens)).abs().max()
    assert off < 1e-3, f"the logits differ by {off:.2g}"  # a rotation: by 1e-5 in float32, a wrong one: 0.1
    E = model.model.embed_tokens.weight  # (V, d)
    cosines = F.cosine_similarity(E, disguised.model.embed_tokens.weight, dim=0).abs()  # (d,)
    here = int((cosines > 0.5).sum())
    said = f"{here} of {len(cosines)} coordinates are where they were"
    assert here < 10, said  # a random order leaves one in its place, on average
    print(f"the logits differ by {off:.0e}, and {said}")


def test_6_head_at_rest(answer):
    """6. A head that rests on the first token: alpha_1 must reach 0.9 in each of three newborns."""
    for seed in (5, 6, 7):
        model = newborn("tiny_qwen", seed)
        changed = copy.deepcopy(model)
        answer(changed)
        weights = changed.state_dict()
        for name, weight in model.state_dict().items():
            differs = weights[name] != weight
            if name.startswith(("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")):
                differs = differs[model.config.head_size :]
            assert not differs.any(), f"{name} has changed where it is not the head's own"
        tokens = random_tokens(seed, range(32), LENGTH, VOCABULARY)
        tokens[:, 0] = 0
        alpha = attention_to(changed, tokens)[0][:, 0, 0].mean().item()  # of a head that rests 0.99 and more
        said = f"the head pays the first position {alpha:.2f} of its attention"
        assert alpha >= 0.9, f"{said}, not 0.9"
    print(f"{said}; a newborn's, 0.07")


def test_7_sink_replaced(answer):
    """7. One vector in place of the sink's two neurons: nine tenths of the loss must come back."""
    spec = checkpoint.find_model("smollm2")
    given, fresh = read_tokens(TextSettings(num_sequences=40, device="cpu"), spec, LENGTH).chunk(2)
    model = spec.model()
    silent = copy.copy(model)
    silent.unit_watchers = [zero_units([(12, 1229), (12, 1487)])]  # they build the sink (docs/sinks.md)
    whole = losses(model, fresh)
    rise = losses(silent, fresh) - whole
    vector = answer(model, silent, given)
    assert_tensor(vector, (model.config.d_model,))

    def add(block, inputs, output):
        stream = output if isinstance(output, torch.Tensor) else output[0]
        stream[:, 0] += vector

    with model.blocks[11].register_forward_hook(add):
        left = (losses(silent, fresh) - whole).mean()
    octaves = ", ".join(f"{rise[n - 1 : 2 * n - 1].mean():.1f}" for n in (1, 2, 4, 8, 16, 32))
    said = f"the loss rises by {abs(left):.2f} nats with your vector, without by {rise.mean():.2f}"
    said += f" (at positions 1, 2-3, 4-7, 8-15, 16-31 and 32-63 by {octaves})"
    assert left < 0.1 * rise.mean(), said
    print(said)


def losses(model, tokens):
    """The mean loss at each position of tokens (n, T), in nats: (T - 1,)."""
    logits = model.unembed(model.hidden(tokens)[:, :-1])  # (n, T - 1, V)
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(0)


def test_8_child_told(answer):
    """8. A child's shares: all measured pairs, and five maps made from them."""
    table = read_json(Path(__file__).parents[1] / "results" / "robustness.json")
    maps, strangers = [], []
    for row, layers in zip(table["rows"], table["layers"]):
        shares = [layer["share"] for layer in layers]
        maps.append((f"{row['suspect']} against {row['base']}", shares, row["kind"].startswith("child")))
        if row["kind"] == "never met":
            depths = np.linspace(0, len(shares) - 1, 12)
            strangers.append(np.interp(depths, range(len(shares)), shares))
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
        assert answer(list(shares)) == is_related, fault
    print(f"{len(maps)} maps are judged correctly")


if __name__ == "__main__":  # no source of a check is shown, which might tell the answer
    only = ["-k", f"test_{sys.argv[1]}_"] if sys.argv[1:] else []
    sys.exit(pytest.main([__file__, "-qs", "--tb=line", "-p", "no:cacheprovider", *only]))
