"""reproduce/rivals.py: each of the four similarities against numpy, from its definition."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
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


@pytest.fixture(params=["llama_gqa", "llama_mqa_tied", "qwen3", "gpt2"])
def specs(request, tmp_path) -> list[checkpoint.Spec]:
    """Two random models of a kind, as folders."""
    pair = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        checkpoint.save(folder, random_model(KINDS[request.param], seed))
        pair.append(checkpoint.parse_spec(str(folder)))
    return pair


@pytest.fixture
def sources(specs) -> list:
    """Their sources."""
    return [spec.open() for spec in specs]


def std_profile(source, kind: str) -> np.ndarray:
    """Standard deviation of each layer's W_Q, W_K, W_V or W_O."""
    names = [
        f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in range(source.config.num_layers)
    ]
    weights = weights_of(source)
    return np.array([weights[name].std() for name in names])


def test_intrinsic(sources):
    a, b = sources
    correlations = [scipy.stats.pearsonr(std_profile(a, kind), std_profile(b, kind))[0] for kind in "qkvo"]
    # float32 standard deviations, which differ by a few per cent between the layers
    assert rivals.intrinsic(a, b) == pytest.approx(np.mean(correlations), abs=1e-4)


def test_intrinsic_of_another_depth():
    three = Newborn(CONFIG, 1)
    five = Newborn(replace(CONFIG, num_layers=5), 2)
    correlations = []
    for kind in "qkvo":
        every_second = std_profile(five, kind)[[0, 2, 4]]
        correlations.append(np.corrcoef(std_profile(three, kind), every_second)[0, 1])
    # float32 standard deviations that differ by one per cent between the layers
    assert rivals.intrinsic(three, five) == pytest.approx(np.mean(correlations), abs=1e-3)
    assert rivals.intrinsic(five, three) == pytest.approx(np.mean(correlations), abs=1e-3)


def test_pcs(sources):
    flat = []
    for source in sources:
        parts = [
            w.ravel()
            for name, w in weights_of(source).items()
            if "embed" not in name and "lm_head" not in name
        ]
        flat.append(np.concatenate(parts))
    x, y = flat
    cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    assert rivals.pcs(*sources) == pytest.approx(cosine, abs=1e-6)  # float32 products


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


def test_ics(sources):
    a, b = (invariant_maps(source) for source in sources)
    correlations = [np.corrcoef(x.ravel(), y.ravel())[0, 1] for x, y in zip(a, b)]
    assert rivals.ics(*sources) == pytest.approx(np.mean(correlations), abs=1e-5)  # float32 products


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


def test_reef_is_the_cka_of_block_outputs(specs, sources):
    a, b = (block_outputs(spec) for spec in specs)
    expected = np.mean([gram_cka(x, y) for x, y in zip(a, b)])
    assert rivals.reef(*sources, TOKENS, *CPU) == pytest.approx(expected, abs=1e-5)  # float32 states


def test_similarities_of_identical_models_and_of_strangers():
    a = Newborn(CONFIG, 1)
    same = rivals.similarities(a, a, TOKENS, *CPU)
    other = rivals.similarities(a, Newborn(CONFIG, 2), TOKENS, *CPU)
    for name in rivals.RIVALS:
        assert same[name] == pytest.approx(1, abs=1e-6)  # float32 products
        assert other[name] < 0.98
    assert abs(other["ics"]) < 0.05
    # Of the parameters only the gains, all 1, are shared; other products average out to 0.002.
    gains = 7 * 64
    squares = gains
    for name, shape in a.shapes.items():
        if "proj" in name:
            is_output = "o_proj" in name or "down_proj" in name
            squares += np.prod(shape) * 4e-4 / (6 if is_output else 1)
    assert other["pcs"] == pytest.approx(gains / squares, abs=0.01)


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Folders of a base, a child with other norms, and a stranger."""
    folder = tmp_path_factory.mktemp("family")
    for name, seed in (("base", 1), ("child", 1), ("stranger", 2)):
        model = init.newborn(CONFIG, seed)
        if name == "child":
            model.model.norm.weight.data *= 1.5
        checkpoint.save(folder / name, model)
    return folder


def test_rows_and_verdicts(family, tmp_path):
    models = [str(family / name) for name in ("base", "child", "stranger")]
    flags = ["--num-sequences", 30, "--sequence-length", 9, "--input-seed", 4, "--dtype", "float32"]
    done = run_here("reproduce.rivals", *models, *flags, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = read_json(tmp_path / "rivals.json")
    base, *suspects = [checkpoint.parse_spec(model).open() for model in models]
    tokens = random_tokens(4, range(30), 9, 300)
    for row, name, suspect in zip(result["rows"], models[1:], suspects):
        values = rivals.similarities(base, suspect, tokens, *CPU)
        assert row["base"] == models[0] and row["suspect"] == name
        assert {rival: row[rival] for rival in rivals.RIVALS} == values
        for rival in rivals.RIVALS:
            assert row[f"{rival}_verdict"] == ("kin" if values[rival] >= 0.8 else "stranger")
    child, stranger = result["rows"]
    assert {child[f"{rival}_verdict"] for rival in rivals.RIVALS} == {"kin"}
    assert stranger["ics_verdict"] == "stranger"


def test_mistakes(family, tmp_path):
    base = family / "base"
    nothing = init.newborn(CONFIG, 1)
    nothing.load_state_dict({name: 0 * weight for name, weight in nothing.state_dict().items()})
    checkpoint.save(tmp_path / "nothing", nothing)
    for words, expected in (
        ([base, tmp_path / "nothing"], "not finite"),
        ([base], "at least 2 models"),
        ([base, "tiny_llama@1"], "one width"),
        ([base, base, "--sequence-length", 65], "--sequence-length 65"),
    ):
        assert_refused(run_here("reproduce.rivals", *words, "--out", tmp_path / "new"), expected)
    assert not (tmp_path / "new" / "rivals.json").exists()
