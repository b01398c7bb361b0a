"""reproduce/rivals.py: each of the four similarities against numpy, from its definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import KINDS, assert_refused, random_model, run_here

import init
from lib import checkpoint
from lib.checkpoint import Newborn
from lib.files import read_json
from lib.inputs import random_tokens
from model import ModelConfig
from reproduce import rivals

CONFIG = ModelConfig(300, 64, 3, 4, 64, 96, num_kv_heads=2)
TOKENS = random_tokens(0, range(40), 12, 97)
CPU = ("cpu", torch.float32)


def weights_of(source) -> dict[str, np.ndarray]:
    """A source's tensors, float64."""
    return {name: source.read(name).double().numpy() for name in source.shapes}


@pytest.fixture(params=["llama_gqa", "qwen3", "gpt2"])
def specs(request, tmp_path) -> list[checkpoint.Spec]:
    """Two random models of a kind, as folders."""
    for seed in (1, 2):
        checkpoint.save(tmp_path / str(seed), random_model(KINDS[request.param], seed))
    return [checkpoint.parse_spec(str(tmp_path / str(seed))) for seed in (1, 2)]


def std_profile(source, kind: str) -> np.ndarray:
    """Standard deviation of each layer's W_Q, W_K, W_V or W_O."""
    weights = weights_of(source)
    layers = range(source.config.num_layers)
    return np.array([weights[f"model.layers.{layer}.self_attn.{kind}_proj.weight"].std() for layer in layers])


def test_intrinsic_of_two_depths():
    three = Newborn(CONFIG, 1)
    five = Newborn(replace(CONFIG, num_layers=5), 2)
    correlations = []
    for kind in "qkvo":
        every_second = std_profile(five, kind)[[0, 2, 4]]
        correlations.append(np.corrcoef(std_profile(three, kind), every_second)[0, 1])
    # float32 standard deviations that differ by one per cent between the layers
    assert rivals.intrinsic(three, five) == pytest.approx(np.mean(correlations), abs=1e-3)


def flat(source) -> np.ndarray:
    """All parameters in a row, but for token table and head."""
    weights = weights_of(source)
    parts = [w.ravel() for name, w in weights.items() if "embed" not in name and "lm_head" not in name]
    return np.concatenate(parts)


def invariant_maps(source) -> list[np.ndarray]:
    """X M X' of the last two layers' three invariant terms M, head by head, over the whole vocabulary."""
    config = source.config
    Dh = config.head_size
    weights = weights_of(source)
    X = weights["model.embed_tokens.weight"]
    maps = []
    for layer in (1, 2):
        prefix = f"model.layers.{layer}."
        q, k, v, o = (weights[f"{prefix}self_attn.{kind}_proj.weight"] for kind in "qkvo")
        scores = 0
        values = 0
        for head in range(config.num_heads):
            group = head * config.kv_heads // config.num_heads
            own = slice(head * Dh, (head + 1) * Dh)
            shared = slice(group * Dh, (group + 1) * Dh)
            scores = scores + q[own].T @ k[shared]
            values = values + v[shared].T @ o[:, own].T
        down = weights[f"{prefix}mlp.down_proj.weight"]
        hidden = weights[f"{prefix}mlp.up_proj.weight"].T @ down.T
        maps += [X @ term @ X.T for term in (scores, values, hidden)]
    return maps


def test_similarities_of_weights(specs):
    a, b = (spec.open() for spec in specs)
    x, y = flat(a), flat(b)
    cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    assert rivals.pcs(a, b) == pytest.approx(cosine, abs=1e-6)  # float32 products
    maps = zip(invariant_maps(a), invariant_maps(b))
    correlations = [np.corrcoef(x.ravel(), y.ravel())[0, 1] for x, y in maps]
    assert rivals.ics(a, b) == pytest.approx(np.mean(correlations), abs=1e-5)  # float32 products


def gram_cka(x: np.ndarray, y: np.ndarray) -> float:
    """CKA by centred Gram matrices: <K, L> / |K| |L|."""
    centring = np.eye(len(x)) - 1 / len(x)
    K = centring @ x @ x.T @ centring
    L = centring @ y @ y.T @ centring
    return (K * L).sum() / np.linalg.norm(K) / np.linalg.norm(L)


def block_outputs(spec: checkpoint.Spec) -> list[np.ndarray]:
    """Last-position states after each block, by the whole model."""
    outputs = []

    def keep(layer, x):
        outputs.append(x[:, -1].double().numpy())

    with torch.inference_mode():
        spec.load().hidden(TOKENS, on_state=keep)
    return outputs[1:]  # the first are the embeddings


def test_reef_is_the_cka_of_block_outputs(specs):
    a, b = (block_outputs(spec) for spec in specs)
    expected = np.mean([gram_cka(x, y) for x, y in zip(a, b)])
    sources = [spec.open() for spec in specs]
    assert rivals.reef(*sources, TOKENS, *CPU) == pytest.approx(expected, abs=1e-5)  # float32 states


# ---- the command -------------------------------------------------------------------------------------------


def test_rows_verdicts_and_mistakes(tmp_path):
    for name, seed in (("base", 1), ("child", 1), ("stranger", 2), ("nothing", 1)):
        model = init.newborn(CONFIG, seed)
        if name == "child":
            model.model.norm.weight.data *= 1.5
        if name == "nothing":
            model.load_state_dict({key: 0 * weight for key, weight in model.state_dict().items()})
        checkpoint.save(tmp_path / name, model)
    base = tmp_path / "base"
    flags = ["--num-sequences", 30, "--sequence-length", 9, "--dtype", "float32", "--out", tmp_path]
    done = run_here("reproduce.rivals", base, tmp_path / "child", tmp_path / "stranger", *flags)
    assert done.returncode == 0, done.stderr
    child, stranger = read_json(tmp_path / "rivals.json")["rows"]
    for rival in rivals.RIVALS:
        assert child[f"{rival}_verdict"] == "kin"
        assert stranger[f"{rival}_verdict"] == ("kin" if stranger[rival] >= 0.8 else "stranger")
    assert stranger["ics_verdict"] == "stranger"
    for other, expected in ((tmp_path / "nothing", "not finite"), ("tiny_llama@1", "one width")):
        assert_refused(run_here("reproduce.rivals", base, other, *flags), expected)
