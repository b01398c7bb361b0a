"""contraction.py: each experiment's rows against a plain recomputation, and its command line."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_refused, run_here

import contraction
import init
from contraction import EXPERIMENTS
from lib.files import read_json
from lib.inputs import random_tokens, random_vectors
from lib.settings import RunSettings
from measure import theory
from measure.cosines import uniform_counts
from model import PRESETS, ModelConfig, Transformer, rope_table

SEEDS = (1, 2)
COUNT = 4  # sequences of each seed
LENGTH = 8
CONFIG = PRESETS["tiny_gpt2"]
# A cosine of float32 states of width 256, products summed in another order; float32 sums of some thousands.
NEAR = dict(rel=1e-5, abs=2e-6)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every experiment's result, as `python contraction.py` alone makes them, small."""
    out = tmp_path_factory.mktemp("all")
    commands = {}
    for name, command in EXPERIMENTS.items():
        small = replace(command.defaults, seed=SEEDS, num_sequences=COUNT)
        if name != "width":
            small = replace(small, model=("tiny_gpt2",))
        if hasattr(small, "sequence_length"):
            small = replace(small, sequence_length=(LENGTH,))
        commands[name] = command._replace(defaults=small)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contraction, "EXPERIMENTS", commands)
        contraction.run_all(RunSettings(dtype="float32", out=str(out)))
    return {name: read_json(out / f"{name}.json") for name in EXPERIMENTS}


def select(rows: list[dict], **values) -> list[dict]:
    """The rows that have these values, of which there is one at least."""
    chosen = [row for row in rows if row.items() >= values.items()]
    assert chosen, values
    return chosen


def vectors(T: int, d: int = 256) -> torch.Tensor:
    """What stands in for embedded tokens, (COUNT, T, d)."""
    return random_vectors(0, range(COUNT), T, d)


def pair_cosines(states: torch.Tensor) -> list[float]:
    """The cosine of every pair of states (n, d)."""
    states = states.double()
    pairs = [(i, j) for i in range(len(states)) for j in range(i)]
    return [F.cosine_similarity(states[i], states[j], dim=0, eps=0).item() for i, j in pairs]


def assert_cosines(row: dict, states_of_seeds: list[torch.Tensor], near: dict = NEAR) -> None:
    """A row's cosines are the means over the seeds of the mean and of the std over pairs of states."""
    cosines = [pair_cosines(states) for states in states_of_seeds]
    means = [np.mean(values) for values in cosines]
    assert row["mean_cosine"] == pytest.approx(np.mean(means), **near)
    assert row["std_cosine"] == pytest.approx(np.mean([np.std(values) for values in cosines]), **near)
    assert row["seed_std"] == pytest.approx(np.std(means), **near)


def newborns(**changes) -> list[Transformer]:
    """The newborn of every seed, with another configuration."""
    return [init.newborn(replace(CONFIG, **changes), seed) for seed in SEEDS]


# ---- which sublayer contracts? -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "mlp", "attention"])
def test_layers(kind, results):
    """As newborns without the other sublayer would have them: ablating leaves all weights as they are."""
    streams = []
    for model in newborns(sublayers=kind):
        states = []
        with torch.inference_mode():
            model.hidden(vectors(LENGTH), on_state=lambda layer, x, states=states: states.append(x[:, -1]))
        streams.append(states)
    theories = theory.kernel_recursion(model.config, LENGTH)
    rows = select(results["layers"]["rows"], variant=kind)
    for row, *states, expected in zip(rows, *streams, theories, strict=True):
        assert_cosines(row, states)
        assert row["theory"] == expected


# ---- the MLP's activation ----------------------------------------------------------------------------------


def mlp_weights(model: Transformer, layer: int) -> list[torch.Tensor]:
    """The two matrices of a plain MLP, in float64."""
    return [weight.detach().double() for weight in model.model.layers[layer].mlp.parameters()]


def mlp_stack(model: Transformer, x: torch.Tensor, phi, has_norm_and_residual: bool) -> list[torch.Tensor]:
    """States (n, d) before and after each MLP: two products and an activation, as written."""
    states = [x.double()]
    for layer in range(model.config.num_layers):
        up, down = mlp_weights(model, layer)
        x = states[-1]
        if has_norm_and_residual:
            normed = F.layer_norm(x, (x.shape[1],), eps=model.config.norm_epsilon)
            states.append(x + phi(normed @ up.T) @ down.T)
        else:
            states.append(phi(x @ up.T) @ down.T)
    return states


PHI = {"mlp0_relu": torch.relu, "mlp0_tanh": torch.tanh, "standard": F.gelu, "standard_relu": torch.relu}


@pytest.mark.parametrize("stack", PHI)
def test_mlp(stack, results):
    x = vectors(1)[:, 0]
    stacks = [mlp_stack(model, x, PHI[stack], stack.startswith("standard")) for model in newborns()]
    mlp = "relu" if stack == "standard_relu" else "gelu"
    theories = {"mlp0_relu": theory.relu_recursion(6), "mlp0_tanh": [0.0] * 7}
    recursion = theory.kernel_recursion(replace(CONFIG, sublayers="mlp", mlp=mlp), 1)
    rows = select(results["mlp"]["rows"], stack=stack)
    for row, *states, expected in zip(rows, *stacks, theories.get(stack, recursion), strict=True):
        assert_cosines(row, states, dict(abs=1e-5))  # float32 states that shrink by a hundred in each MLP0
        assert row["theory"] == expected


@pytest.mark.parametrize("normed", [True, False])
def test_engage(normed, results):
    x = vectors(1)[:, 0].double()
    states, spreads = [], []
    for model in newborns():
        inputs = F.layer_norm(x, (256,), eps=CONFIG.norm_epsilon) if normed else x
        up, down = mlp_weights(model, 0)
        spreads.append((inputs @ up.T).std().item())
        # one block has the output's std of one layer: a scale, which no cosine sees
        states.append(F.gelu(inputs @ up.T) @ down.T)
    (row,) = select(results["engage"]["rows"], normed=normed)
    assert_cosines(row, states)
    assert row["preactivation_std"] == pytest.approx(np.mean(spreads), rel=1e-5)
    expected_std = 0.02 * inputs.square().sum(1).mean().sqrt().item()
    assert row["theory"] == pytest.approx(theory.one_block_cosine("gelu", expected_std, 256), rel=1e-4)


# ---- attention amplifies -----------------------------------------------------------------------------------


def test_amplify(results):
    x = vectors(LENGTH)  # (n, T, d)
    stacks = {"mlp0": [], "mlp0_mlp0": [], "mlp0_attn0": []}
    for model in newborns():
        _, first, second, *_ = mlp_stack(model, x.flatten(0, 1), torch.relu, False)
        first = first.view(x.shape)
        stacks["mlp0"].append(first[:, -1])
        stacks["mlp0_mlp0"].append(second.view(x.shape)[:, -1])
        stacks["mlp0_attn0"].append(first.mean(1))
    c = 1 / math.pi
    theories = {"mlp0": c, "mlp0_mlp0": theory.relu_recursion(2)[2]}
    theories["mlp0_attn0"] = c / (1 / LENGTH + (1 - 1 / LENGTH) * c)  # BB Proposition 4
    for stack, states in stacks.items():
        (row,) = select(results["amplify"]["rows"], stack=stack)
        assert_cosines(row, states, dict(abs=1e-5))
        assert row["theory"] == pytest.approx(theories[stack], rel=1e-12)


@pytest.mark.parametrize("stack", ["attn0", "attention"])
def test_intra(stack, results):
    """A layer of attention without residual is what its block adds to its input."""
    means = []
    for model in newborns(sublayers="attention"):
        state = vectors(LENGTH)
        for block in model.model.layers:
            if stack == "attn0":
                state = torch.stack([state[:, :i].mean(1) for i in range(1, LENGTH + 1)], dim=1)
            else:
                with torch.inference_mode():
                    state = block(state, rope_table(CONFIG, state), False, None) - state
            unit = F.normalize(state.double(), dim=2, eps=0)
            means.append((unit @ unit.transpose(1, 2)).mean().item())  # all pairs, itself too
    means = np.reshape(means, (len(SEEDS), 6)).mean(0)
    exact = theory.averaging_stack(LENGTH, 6)
    if stack == "attention":
        _, *exact = theory.intra_recursion(model.config, LENGTH, residual=False)
    rows = select(results["intra"]["rows"], stack=stack)
    # what a block adds is a difference of numbers some times larger
    assert [row["mean_cosine"] for row in rows] == pytest.approx(means, abs=1e-5)
    assert [row["exact_theory"] for row in rows] == exact
    assert [row["limit_theory"] for row in rows] == theory.averaging_limit(LENGTH, 6)


def test_variance(results):
    """Aggregated values by explicit attention matrices; their std is about their mean."""
    mask = torch.ones(LENGTH, LENGTH).tril().log()  # 0, and -inf for the future
    values = []

    def on_heads(layer, heads, q, k, v):
        weights = (mask + q.double() @ k.double().mT / q.shape[3] ** 0.5).softmax(3)
        values.append((weights @ v.double()).std(dim=(0, 1, 3), correction=0))  # (T,)

    for model in newborns(num_layers=1):
        with torch.inference_mode():
            model.hidden(vectors(LENGTH), on_heads=on_heads)
    rows = results["variance"]["rows"]
    assert [row["std"] for row in rows] == pytest.approx(torch.stack(values).mean(0).tolist(), rel=1e-5)
    expected = theory.aggregated_std(CONFIG, LENGTH).tolist()
    assert [row["theory"] for row in rows] == expected
    uniform = [expected[0] / position**0.5 for position in range(1, LENGTH + 1)]  # BB Equation 2
    assert [row["uniform_theory"] for row in rows] == pytest.approx(uniform, rel=1e-12)


# ---- from weights to tokens --------------------------------------------------------------------------------


PREDICTIONS = [("ablation", kind) for kind in ("full", "mlp", "attention")]
PREDICTIONS += [("cure", kind) for kind in ("gpt2", "centered")]
PREDICTIONS += [("predict", "gpt2")]


@pytest.mark.parametrize("name, kind", PREDICTIONS)
def test_predictions(name, kind, results):
    """What rows say of final states: of models without a sublayer on vectors, of other births on tokens."""
    rows = results[name]["rows"]
    for seed in SEEDS:
        if name == "ablation":
            (row,) = select(rows, seed=seed, variant=kind)
            model = init.newborn(replace(CONFIG, sublayers=kind), seed, embedding_seed=0)
            inputs = vectors(LENGTH)
        else:
            (row,) = select(rows, seed=seed, **({"init": kind} if name == "cure" else {}))
            model = init.newborn(CONFIG, seed, embedding_seed=0, scheme=kind)
            inputs = random_tokens(0, range(COUNT), LENGTH, CONFIG.vocab_size)
        head = model.head_weight.detach().double()
        with torch.inference_mode():
            states = model.hidden(inputs)[:, -1].double()
        tokens = (states @ head.T).argmax(1).tolist()
        direction = F.normalize(states, dim=1).mean(0)
        assert row["mean_cosine"] == pytest.approx(np.mean(pair_cosines(states)), **NEAR)
        largest = max(map(tokens.count, tokens))
        if name == "ablation":
            assert row["ratio"] == largest / uniform_counts(COUNT, CONFIG.vocab_size, 1)[0]
            continue
        assert row["top1_count"] == largest
        assert row["predicted_cosine"] == theory.kernel_recursion(CONFIG, LENGTH, kind)[-1]
        if name == "predict":
            assert tokens.count(row["top1_token"]) == largest
            assert row["direction_token"] == (head @ direction).argmax()
            assert row["direction_count"] == tokens.count(row["direction_token"])
            foreseen = theory.mean_field(model, LENGTH)
            cosine = F.cosine_similarity(foreseen, direction, dim=0).item()
            assert row["direction_cosine"] == pytest.approx(cosine, abs=1e-6)  # float32 states
            assert row["predicted_token"] == (head @ foreseen).argmax()


def test_width(results):
    """One block from its weights, and the weights' scale."""
    rows = results["width"]["rows"]
    for mlp, d, std in (("gelu", 256, 1 / 16), ("swiglu", 128, 0.02)):
        config = ModelConfig(1, 1, 1, 1, d, 4 * d, mlp=mlp, sublayers="mlp")
        x = vectors(1, d)[:, 0].double() / 0.02
        states = []
        for seed in SEEDS:
            model = init.newborn(config, seed, scheme="normal")
            *gate, up, down = (weight * std / 0.02 for weight in mlp_weights(model, 0))
            hidden = F.silu(x @ gate[0].T) * (x @ up.T) if gate else F.gelu(x @ up.T)
            states.append(hidden @ down.T)
        (row,) = select(rows, mlp=mlp, d_model=d, weight_std=std)
        assert_cosines(row, states, dict(abs=1e-5))
        assert row["theory"] == theory.one_block_cosine(mlp, std * math.sqrt(d), d)


# ---- theory on newborns that no bar was tuned on -----------------------------------------------------------


def test_kernel_recursion_against_newborns(tmp_path):
    given = {"model": ("tiny_gpt2", "tiny_llama"), "seed": tuple(range(4)), "num_sequences": 32}
    given |= {"sequence_length": (16,), "dtype": "float32", "out": str(tmp_path)}
    contraction.layers(contraction.Settings(**given))
    rows = read_json(tmp_path / "layers.json")["rows"]
    for row in rows:
        # 496 pairs of 32 sequences, the same for all seeds, leave 0.006; width 256 is not yet large. The
        # worst of the 42 rows is off by 0.009.
        assert row["mean_cosine"] == pytest.approx(row["theory"], abs=0.015), row
    (last,) = select(rows, model="tiny_gpt2", variant="full", layer=6)
    assert last["mean_cosine"] > 0.07  # the bars are smaller than what they are laid at


def test_what_theory_does_not_know_is_null(tmp_path, monkeypatch):
    """Of a scheme of one's own, here `normal`: the JSON says null, one line says why, curves are drawn.

    `cure` has gpt2's newborns beside, whose theory stays.
    """
    monkeypatch.setattr(theory, "KNOWN_SCHEMES", ("gpt2",))
    words = ["--model", "tiny_gpt2", "--seed", 1, 2, "--num-sequences", 4, "--init", "normal"]
    for name, column in (("mlp", "theory"), ("predict", "predicted_cosine"), ("cure", "predicted_cosine")):
        done = run_here("contraction", name, *words, "--out", tmp_path)
        assert done.returncode == 0, done.stderr
        assert "no theory is drawn of tiny_gpt2" in done.stdout
        rows = read_json(tmp_path / f"{name}.json")["rows"]
        assert all((row[column] is None) == (row.get("init") != "gpt2") for row in rows)
        assert (tmp_path / f"{name}.png").exists()


# ---- the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, expected",
    [
        (["layers", "--sequence-length", 1025], ["--sequence-length 1025", "1024"]),
        (["layers", "--model", "tests"], ["unknown preset 'tests': choose from nano_gpt2"]),
        (["mlp", "--sequence-length", 8], ["--sequence-length"]),
        (["variance", "--sequence-length", 8, 16], ["name one --sequence-length"]),
    ],
)
def test_mistakes(words, expected, tmp_path):
    assert_refused(run_here("contraction", *words, "--out", tmp_path), *expected)
    assert not list(tmp_path.iterdir())
