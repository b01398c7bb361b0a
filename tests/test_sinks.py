"""measure/ and sinks.py against T x T matrices, plain loops and transformers."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import KINDS, ROOT, assert_refused, random_model, run_here
from scipy.stats import entropy, kendalltau
from torch.utils._python_dispatch import TorchDispatchMode

import init
import sinks
from lib import runtime
from lib.files import read_json
from lib.random import random_tokens
from lib.results import interval
from measure import anatomy as anatomy_module
from measure import attention
from measure import units as units_module
from model import ModelConfig, Transformer
from reproduce.interventions import num_needed
from sources import data, saving
from sources.checkpoint import Checkpoint, find_model
from sources.inputs import TextSettings, read_tokens


def explicit(model, tokens: torch.Tensor, on_heads=None) -> torch.Tensor:
    """Every layer's attention matrix, (B, L, H, T, T) float64: softmax of q k' / sqrt(Dh) as written.

    An explicit sink's key is a column more, in front.
    """
    T = tokens.shape[1]
    matrices = []

    def watch(layer, heads, q, k, v, alpha):
        key = model.blocks[layer - 1].self_attn.sink_key
        if key is not None:
            k = torch.cat((key.view(1, k.shape[1], 1, -1).expand(len(k), -1, -1, -1), k), dim=2)
        future = torch.ones(T, k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - T)
        k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q.double() @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        matrices.append(scores.masked_fill(future, -math.inf).softmax(-1))
        if on_heads is not None:
            return on_heads(layer, heads, q, k, v, alpha)

    with torch.inference_mode():
        model.hidden(tokens, on_heads=watch)
    return torch.stack(matrices, dim=1)


def alpha_of(matrices: torch.Tensor, position: int) -> torch.Tensor:
    """BB 6.2.1, literally: the mean of A[i, k] over i = k..T, one number at a time."""
    T = matrices.shape[-1]
    total = sum(matrices[..., i - 1, position - 1] for i in range(position, T + 1))
    return total / (T - position + 1)


CONFIGS = KINDS | {"explicit_sink": replace(KINDS["llama_gqa"], explicit_sink=True)}


# The long ones take the other path of the kernel.
@pytest.mark.parametrize(
    "name, T", [*[(name, 33) for name in CONFIGS], ("llama", 520), ("explicit_sink", 520)]
)
def test_attention_of_every_kind_by_matrices(name, T):
    model = random_model(CONFIGS[name])
    tokens = random_tokens(1, range(2), T, 97)
    positions = range(1, T + 1) if T == 33 else (1, 300, 520)
    matrices = explicit(model, tokens)
    expected = torch.stack([alpha_of(matrices[..., -T:], k) for k in positions], dim=-1)
    alpha, _ = attention.attention_to(model, tokens, positions)
    # some ten roundings of float32 numbers up to 1
    torch.testing.assert_close(alpha.double(), expected, atol=1e-6, rtol=0)
    row, _ = attention.sink_statistics(model, tokens)
    constant = matrices[..., 0].mean().item() if model.config.explicit_sink else 0
    assert row["constant_alpha"] == pytest.approx(constant, rel=1e-5)
    links = anatomy_module.chain(model, tokens)
    alpha_of_all = torch.stack([link["alpha"] for link in links.values()])  # (L, T)
    chosen = alpha_of_all[:, [k - 1 for k in positions]]
    torch.testing.assert_close(chosen.double(), expected.mean((0, 2)), atol=1e-6, rtol=0)


class Largest(TorchDispatchMode):
    """Watch how many numbers the largest tensor has that torch makes."""

    size = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_no_matrix_of_all_pairs_of_positions_is_made():
    T = 2048  # the largest tensors are the MLPs' neurons
    model = random_model(replace(KINDS["llama"], context_length=T))
    with Largest() as largest:
        attention.attention_to(model, torch.zeros(1, T, dtype=torch.long))
    assert 48 * T <= largest.size < T * T / 10


NEAR = 1e-6  # of means of attention weights: float32 roundings of numbers up to 1


def saved(model: Transformer, folder) -> Checkpoint:
    saving.save(folder / "model", model)
    return find_model(str(folder / "model"))


def given(kind=TextSettings, **values):
    return kind(**{"device": "cpu", "dtype": "float32", "num_sequences": 7, **values})


def about(model: Transformer, folder, kind=TextSettings, **values):
    """Settings that read this model from a folder, and write beside it."""
    return given(kind, model=(saved(model, folder).name,), out=str(folder / "out"), **values)


def ratio(norms: torch.Tensor) -> float:
    """The norm at position 1 over the median of others, (..., T), in the mean of layers, sequences, heads."""
    return (norms[..., 0] / norms[..., 1:].median(-1).values).mean().item()


@pytest.mark.parametrize("kind", ["gpt2", "llama_gqa"])
def test_sink_rate_is_gu_et_als(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(runtime.BATCH_TOKENS, "cpu", 40)  # batches of 4, and of 2
    model = random_model(KINDS[kind])
    result = sinks.rate(about(model, tmp_path, sinks.RateSettings, sequence_length=(10, 20), num_sequences=9))
    for row, by_head, T in zip(result["rows"], result["heads"], (10, 20), strict=True):
        tokens = random_tokens(0, range(9), T, 97)
        alpha, *others = [alpha_of(explicit(model, tokens), k) for k in range(1, T // 2 + 1)]  # (n, L, H)
        shares = (alpha > 0.3).double().mean((1, 2))
        is_other_sink = (torch.stack(others) > 0.3).any(0)
        expected = interval(shares.numpy(), "sink_rate", 0, 1)
        expected |= {"mean_alpha1": alpha.mean().item()}
        expected["other_sink_rate"] = is_other_sink.double().mean().item()
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=NEAR)
        assert row["uniform_alpha1"] == pytest.approx(sum(1 / i for i in range(1, T + 1)) / T, rel=1e-9)
        np.testing.assert_allclose(by_head["alpha1"], alpha.mean(0), atol=NEAR)


def observe(model: Transformer, tokens: torch.Tensor, on_heads=None):
    """The stream (L + 1, n, T, d), the input first, and the neurons (L, n, T, d_ff)."""
    states, units = [], []
    handles = []
    for block in model.model.layers:
        hook = block.mlp.down_proj.register_forward_pre_hook(lambda module, inputs: units.append(inputs[0]))
        handles.append(hook)
    with torch.inference_mode():
        model.hidden(tokens, on_state=lambda layer, x: states.append(x), on_heads=on_heads)
    for handle in handles:
        handle.remove()
    return torch.stack(states), torch.stack(units)


def disparity_of(stream: torch.Tensor) -> torch.Tensor:
    """Disparity at position 1 after each layer, (L + 1,), of a stream (L + 1, n, T, d)."""
    size = stream[:, :, 0].abs()
    return (size.amax(2) / size.mean(2)).mean(1)


def massive(sizes: torch.Tensor) -> float:
    """The mean number of a sequence's tokens with a massive activation, of |x| (n, T, d) (2402.17762)."""
    count = 0
    for sequence in sizes:
        least = max(100, 1000 * sequence.median().item())
        count += sum(token.max().item() >= least for token in sequence)
    return count / len(sizes)


def contributions_of(model: Transformer, stream: torch.Tensor, units: torch.Tensor, layer: int):
    """The dimension after a layer, and what every unit contributes to it, by (layer, unit), largest first."""
    state = stream[layer, :, 0].mean(0)  # (d,)
    dimension = int(state.abs().argmax())
    builds = {}
    for place, block in enumerate(model.model.layers):
        weights = block.mlp.down_proj.weight[dimension].detach()
        values = units[place, :, 0].mean(0) * weights * state[dimension].sign()  # (d_ff,)
        builds |= {(place + 1, unit): value for unit, value in enumerate(values.tolist())}
    return dimension, dict(sorted(builds.items(), key=lambda item: -item[1]))


@pytest.mark.parametrize("kind", ["gpt2", "llama_gqa"])
def test_anatomy_against_a_plain_recomputation(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(anatomy_module, "LEAST_DISPARITY", 2)
    model = random_model(KINDS[kind])
    with torch.no_grad():  # disparity jumps in layer 2
        model.model.layers[1].mlp.down_proj.weight[5] *= 300
    anatomy = anatomy_module.anatomy(about(model, tmp_path, sequence_length=11))
    tokens = random_tokens(0, range(7), 11, 97)
    seen = []
    stream, units = observe(
        model, tokens, lambda layer, heads, q, k, v, _: seen.append((heads.double(), k, v))
    )
    heads, keys, values = (torch.stack(tensors) for tensors in zip(*seen))  # (L, n, H or G, T, Dh)
    matrices = explicit(model, tokens)
    after = stream[1:]
    expected = {
        "std": heads.std((1, 2, 4), correction=0),  # (L, T), as all of these
        "norm": after.norm(dim=3).mean(1),
        "disparity": (after.abs().amax(3) / after.abs().mean(3)).mean(1),
        "value_norm": values.norm(dim=4).mean((1, 2)),
        "key_alignment": F.normalize(keys, dim=4).mean(1).norm(dim=3).mean(1),
        "alpha": torch.stack([alpha_of(matrices, position).mean((0, 2)) for position in range(1, 12)], 1),
    }
    for key in expected:
        # float32 numbers, summed in another order
        near = pytest.approx(expected[key].flatten().tolist(), rel=1e-4, abs=NEAR)
        assert [row[key] for row in anatomy["rows"]] == near
    disparity = disparity_of(stream)

    for row in anatomy["layers"]:
        place = row["layer"] - 1
        first = {key: numbers[place, 0].item() for key, numbers in expected.items()}
        matrix = after[place].flatten(0, 1).double()
        written = model.model.layers[place].self_attn.o_proj.weight.detach().norm(dim=0)
        law = {
            "layer": row["layer"],
            "disparity": first["disparity"],
            "massive": massive(after[place].abs()),
            "norm_ratio": ratio(after[place].norm(dim=2)),
            "value_ratio": ratio(values[place].norm(dim=3)),
            "key_alignment": first["key_alignment"],
            "effective_rank": math.exp(entropy(torch.linalg.svdvals(matrix - matrix.mean(0)))),
            "output_tau": kendalltau(written, heads[place].std((0, 2), correction=0).flatten()).statistic,
            "alpha1": first["alpha"],
        }
        jump = (None, None)  # but in layer 2
        if disparity[row["layer"]] >= max(2, 2 * disparity[place]):
            dimension, builds = contributions_of(model, stream, units, row["layer"])
            below = [unit for unit in builds if unit[0] <= row["layer"]][:4]
            jump = (dimension, " ".join(f"{layer}/{unit}" for layer, unit in below))
        assert (row["dimension"], row["builders"]) == jump
        assert {name: row[name] for name in law} == pytest.approx(law, rel=1e-4)
    largest = 1 + int(disparity[1:].argmax())
    dimension, builds = contributions_of(model, stream, units, largest)
    ranking = [unit for unit in builds if unit[0] <= largest][:10] + list(builds)[-5:]
    assert [(row["layer"], row["unit"]) for row in anatomy["builders"]] == ranking
    for row in anatomy["builders"]:
        column = model.model.layers[row["layer"] - 1].mlp.down_proj.weight[:, row["unit"]].square()
        activity = units[row["layer"] - 1, :, :, row["unit"]]
        law = {
            "layer": row["layer"],
            "unit": row["unit"],
            "first": activity[:, 0].mean().abs().item(),
            "others": activity[:, 1:].abs().mean().item(),
            "builds": builds[row["layer"], row["unit"]],
            "down_share": (column[dimension] / column.sum()).item(),
            "dimension": dimension,
        }
        assert {name: row[name] for name in law} == pytest.approx(law, rel=1e-4)


def test_enough_builders_make_the_share():
    model = random_model(KINDS["llama"])
    activity = replace(units_module.observe(model, random_tokens(0, range(7), 9, 97)), layer=2)
    added = activity.contributions()[:2].flatten().tolist()
    size = activity.state[2].abs().max().item()
    count = num_needed(activity, share=0.5)
    added.sort(reverse=True)
    assert sum(added[: count - 1]) < 0.5 * size <= sum(added[:count])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    file = folder / "text.txt"
    file.write_text("\n".join(path.read_text() for path in sorted(ROOT.glob("*.py"))))
    out = str(folder / "data")
    data.prepare(data.Settings(source=(str(file),), tokenizer="bpe:500", held_out=0.3, out=out))
    model = init.newborn(ModelConfig(500, 64, 2, 2, 32, 48), 0)
    saving.save(folder / "model", model, tokenizer=data.TokenData(out).tokenizer)
    tokenizer = f"{out}/tokenizer.model"
    return SimpleNamespace(file=str(file), data=out, model=str(folder / "model"), tokenizer=tokenizer)


def test_what_a_model_reads(text):
    spec = find_model(text.model)
    settings = given(TextSettings, text=text.file, num_sequences=50)
    tokens = read_tokens(settings, spec, 16)
    tokenizer = data.load_tokenizer(text.tokenizer)
    whole = Path(text.file).read_text()
    assert all(tokenizer.decode(row.tolist()) in whole for row in tokens)
    held_out = read_tokens(given(TextSettings, text=text.data, num_sequences=7), spec, 16)
    assert torch.equal(held_out, data.TokenData(text.data).held_out(7, 16)[0])


def test_commands_read_a_text(text, tmp_path):
    """Each row says what was read; a data set has BOS first where it is asked for."""
    words = ("--model", text.model, "text_sink@5", "--num-sequences", 2, "--sequence-length", 20)
    words += ("--bos", "always", "--out", tmp_path)
    file = ("--text", text.file, "--tokenizer", text.tokenizer)
    for script, name, read in (
        ("sinks", "anatomy", ("--text", text.data)),
        ("sinks", "transplant", ("--num-constants", 4, "--text", text.data)),
        ("reproduce.interventions", "intervene", file),
    ):
        done = run_here(script, name, *words, *read)
        assert done.returncode == 0, done.stderr
        rows = read_json(tmp_path / f"{name}.json")["rows"]
        assert {row["checkpoint"] for row in rows} == {text.model, "text_sink@5"}
        assert {row["text"] for row in rows} == {text.file if read is file else text.data}


def test_bos(text, tmp_path):
    words = ("--model", text.model, "--num-sequences", 2, "--sequence-length", 20, "--out", tmp_path)
    done = run_here("reproduce.interventions", "bos", *words)
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "bos.json")["rows"]
    assert {"no BOS", "constants of first tokens", "BOS at position 10"} <= {row["kind"] for row in rows}


def test_mistakes(text, tmp_path):
    """Too short a text; one that a model has no tokenizer for, or another one; too late a position."""
    out = str(tmp_path / "bytes")
    data.prepare(data.Settings(source=(text.file,), tokenizer="bytes", held_out=0.3, out=out))
    for words, expected in (
        (["sinks", "--model", "backcopy", "--text", "pyproject.toml", "--tokenizer", "bytes"], "sequences"),
        (["sinks", "rate", "--model", "tiny_llama", "--text", "README.md"], "--tokenizer"),
        (["sinks", "rate", "--model", text.model, "--text", out], "another tokenizer"),
        (["reproduce.interventions", "intervene", "--model", "tiny_llama", "--position", 65], "64"),
    ):
        assert_refused(run_here(*words, "--out", tmp_path / "out"), expected)
    assert not list(tmp_path.glob("out/*"))
