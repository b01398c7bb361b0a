"""reproduce/baselines.py: each of the four similarities against numpy, from its definition."""

import numpy as np
import pytest
from conftest import KINDS, random_model

from model import Transformer
from reproduce import baselines
from sources.inputs import random_tokens

TOKENS = random_tokens(0, range(40), 12, 97)


@pytest.fixture(params=["llama_gqa", "qwen2", "gpt2"])
def models(request) -> list[Transformer]:
    return [random_model(KINDS[request.param], seed).requires_grad_(False) for seed in (1, 2)]


def weights_of(model) -> dict[str, np.ndarray]:
    return {name: weight.double().numpy() for name, weight in model.named_parameters()}


def test_intrinsic(models):
    correlations = []
    for kind in "qkvo":
        profiles = []
        for model in models:
            weights = [w for name, w in weights_of(model).items() if f".{kind}_proj.weight" in name]
            profiles.append([w.std() for w in weights])
        correlations.append(np.corrcoef(*profiles)[0, 1])
    # float32 standard deviations that differ by one per cent between the layers
    assert baselines.intrinsic(*models) == pytest.approx(np.mean(correlations), abs=1e-3)


def flat(model) -> np.ndarray:
    weights = weights_of(model)
    return np.concatenate([w.ravel() for n, w in weights.items() if "embed" not in n and "lm_head" not in n])


def invariant_maps(model) -> list[np.ndarray]:
    """X M X' of the last two layers' three invariant terms M, head by head, over the whole vocabulary."""
    config = model.config
    Dh = config.head_size
    weights = weights_of(model)
    X = weights["model.embed_tokens.weight"]
    maps = []
    for layer in (1, 2):
        prefix = f"model.layers.{layer}."
        q, k, v, o = (weights[f"{prefix}self_attn.{kind}_proj.weight"] for kind in "qkvo")
        scores = values = 0
        for head in range(config.num_heads):
            own = np.arange(Dh) + head * Dh
            shared = np.arange(Dh) + head * config.kv_heads // config.num_heads * Dh
            scores = scores + q[own].T @ k[shared]
            values = values + v[shared].T @ o[:, own].T
        hidden = weights[f"{prefix}mlp.up_proj.weight"].T @ weights[f"{prefix}mlp.down_proj.weight"].T
        maps += [X @ term @ X.T for term in (scores, values, hidden)]
    return maps


def test_similarities_of_weights(models):
    x, y = map(flat, models)
    cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    assert baselines.pcs(*models) == pytest.approx(cosine, abs=1e-6)  # float32 products
    maps = zip(*map(invariant_maps, models))
    correlations = [np.corrcoef(x.ravel(), y.ravel())[0, 1] for x, y in maps]
    assert baselines.ics(*models) == pytest.approx(np.mean(correlations), abs=1e-5)  # float32 products


def gram_cka(x: np.ndarray, y: np.ndarray) -> float:
    centring = np.eye(len(x)) - 1 / len(x)
    K = centring @ x @ x.T @ centring
    L = centring @ y @ y.T @ centring
    return (K * L).sum() / np.linalg.norm(K) / np.linalg.norm(L)


def block_outputs(model) -> list[np.ndarray]:
    """States after each block at the last position, where the last block computes all positions."""
    outputs = []
    model.hidden(TOKENS, on_state=lambda layer, x: outputs.append(x[:, -1].double().numpy()))
    return outputs[1:]  # the first are the embeddings


def test_reef_is_the_cka_of_block_outputs(models):
    ckas = [gram_cka(x, y) for x, y in zip(*map(block_outputs, models))]
    assert baselines.reef(*models, TOKENS) == pytest.approx(np.mean(ckas), abs=1e-5)  # float32 states
