"""lineage/align.py by hand, and on children that were changed, disguised, cut and grown, and on strangers."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import assert_refused, run_here, run_script

import init
from lib.random import random_tokens
from lineage import align, matching
from lineage.judge import NeuronMatch
from lineage.layout import find_stacks
from lineage.views import RIDGE, readings
from model import ModelConfig
from reproduce import disguise
from reproduce.disguise import OwnWeights, disguised, newborn_source, own_source
from reproduce.robustness import cut, noised, of_matrices
from sources import checkpoint, saving
from sources.checkpoint import find_model
from weights.vocabulary import token_ids

GATED = ModelConfig(300, 64, 3, 4, 64, 96, num_kv_heads=2)  # of most models that are compared here
PLAIN = replace(GATED, norm="layernorm", mlp="gelu", tie_embeddings=True, d_ff=160)


def save_perturbed(folder: Path, config: ModelConfig) -> OwnWeights:
    """A newborn whose gains and biases are no longer 1 and 0, as a folder and its source."""
    model = init.newborn(config, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    saving.save(folder, model)
    return own_source(find_model(str(folder)))


def aligned(a, b, directions=1024) -> align.Alignment:
    vocabularies = [token_ids(source.place) if source.place else {} for source in (a, b)]
    stacks = [find_stacks(source)[0] for source in (a, b)]
    return align.likeliest_alignment(*stacks, vocabularies, directions, 8)[0]


def found(a, b, units=1024, layers=None) -> list[NeuronMatch]:
    return align.match_layers(aligned(a, b), layers, units)[0]


def views_by_hand(source, layer: int) -> dict[str, np.ndarray]:
    """What each unit reads of, and writes to, every token: (V, m), decorrelated in that space, float64."""
    table = source.read("model.embed_tokens.weight").double().numpy()
    values = {}
    for view in ("gate", "up", "down"):
        name = f"model.layers.{layer}.mlp.{view}_proj.weight"
        if name in source.shapes:
            weight = source.read(name).double().numpy()
            columns = table @ (weight if view == "down" else weight.T)
            columns = columns - columns.mean(axis=0)
            columns /= np.linalg.norm(columns, axis=0)
            eigenvalues, vectors = np.linalg.eigh(columns.T @ columns)
            white = columns @ vectors @ np.diag((eigenvalues.clip(min=0) + RIDGE) ** -0.5) @ vectors.T
            values[view] = white / np.linalg.norm(white, axis=0)
    return values


@pytest.mark.parametrize("config", [GATED, PLAIN], ids=["gated", "plain"])
def test_correlations_against_all_tokens(config, tmp_path):
    """Views of d numbers, and correlations of the tables' bases, give the correlations over all V tokens."""
    a = save_perturbed(tmp_path / "a", config)
    b = noised(a, 0.5)
    way = aligned(a, b)
    by_hand = (views_by_hand(a, 1), views_by_hand(b, 1))
    assert way.base.views(2).keys() == by_hand[0].keys()
    for view, columns in way.base.views(2).items():
        correlations = (columns.T @ way.basis @ way.views(2)[view]).abs()
        # float32: rounding of some hundred products, and of solves whose condition is a table's, below 10
        np.testing.assert_allclose(correlations, abs(by_hand[0][view].T @ by_hand[1][view]), atol=2e-4)


def test_wide_models_are_seen_in_few_directions():
    """A copy is one to rounding, in whatever basis; a child and a stranger are what all directions say."""
    base = newborn_source(ModelConfig(1200, 64, 1, 4, 256, 400), 1)
    suspects = {
        "copy": disguised(base),
        "child": noised(disguised(base), 0.5),
        "stranger": newborn_source(base.config, 2),
    }
    for name, source in suspects.items():
        for pair in ((base, source), (source, base)):
            ways = [aligned(*pair, directions) for directions in (96, 256)]
            assert ways[0].likeness == ways[1].likeness
            (few,), (full,) = (align.match_layers(way, None, 1024)[0] for way in ways)
            assert few.units == full.units and few.by_chance < 8, name
            if name == "stranger":
                assert max(few.found, full.found) < 8, few
            else:
                assert few.found == full.found == few.units, (name, few, full)
                # of a copy all is rounding's; else the ridge weighs more where there are fewer directions
                assert few.r == pytest.approx(full.r, abs=1e-4 if name == "copy" else 0.15), name


def test_matched_units_by_brute_force():
    """Partners are each other's nearest in two views; of pairs of views the one with most of them counts."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        correlations = {
            view: torch.rand(5, 7, generator=generator) * 2 - 1 for view in ("gate", "up", "down")
        }
        partners = {}
        for view, values in correlations.items():
            sizes = values.abs()
            partners[view] = {
                (i, j) for i in range(5) for j in range(7) if sizes[i, j] == max(*sizes[i], *sizes[:, j])
            }
        pairs = list(itertools.combinations(partners, 2))
        counts = [len(partners[x] & partners[y]) for x, y in pairs]
        neighbours = [matching.mutual_neighbours(values.abs()) for values in correlations.values()]
        places, theirs, strengths = matching.matched_neurons(neighbours)
        assert len(places) == max(counts)
        best = [pair for pair, count in zip(pairs, counts) if count == len(places)]
        got = set(zip(places.tolist(), theirs.tolist()))
        (x, y) = next(pair for pair in best if partners[pair[0]] & partners[pair[1]] == got)
        for i, j, strength in zip(places, theirs, strengths):
            assert strength == min(correlations[x][i, j].abs(), correlations[y][i, j].abs())


def test_dead_units_are_in_no_count():
    dead = torch.arange(0, 96, 2)

    def change(name, weight):
        return weight.index_fill(0, dead, 0.0) if "up_proj" in name else weight

    a, b = (of_matrices(newborn_source(GATED, seed), change) for seed in (1, 2))
    for row in found(a, b):
        assert row.units == 48 and row.found <= 8
    for row in found(a, a):
        assert (row.found, row.units) == (48, 48)


def test_nan_in_a_token_table_is_told():
    def change(name, weight):
        return weight.index_fill(0, torch.tensor([3]), torch.nan) if "embed" in name else weight

    stacks = [
        find_stacks(s)[0] for s in (newborn_source(GATED, 1), of_matrices(newborn_source(GATED, 1), change))
    ]
    way, lack = align.likeliest_alignment(*stacks, ({}, {}), 1024, 8)
    assert way is None and "not finite" in lack


KINDS = {"gated": GATED, "plain": PLAIN}
KINDS["tied_qwen2"] = replace(GATED, tie_embeddings=True, qkv_bias=True)


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_disguised_models_keep_the_logits(config, tmp_path):
    base = save_perturbed(tmp_path / "a", config)
    tokens = random_tokens(1, range(3), 20, 300)
    with torch.inference_mode():
        expected = checkpoint.load(str(tmp_path / "a"))(tokens)
        for transform in disguise.TRANSFORMS:
            disguise.save(tmp_path / transform, disguised(base, (transform,)))
            logits = checkpoint.load(str(tmp_path / transform))(tokens)
            # float32 rounding of the weights and of sums of 64 to 160 terms; the logits are of order 0.2
            torch.testing.assert_close(logits, expected, rtol=0, atol=3e-6)
            assert all(
                row.share == 1 for row in found(base, own_source(find_model(str(tmp_path / transform))))
            )


def test_disguise_as_a_script(tmp_path):
    base = save_perturbed(tmp_path / "a", GATED)
    words = [tmp_path / "a", "--transforms", "neurons", "signs", "--out", tmp_path / "b"]
    done = run_here("reproduce.disguise", *words)
    assert done.returncode == 0, done.stderr
    assert all(row.share == 1 for row in found(base, own_source(find_model(str(tmp_path / "b")))))
    assert_refused(run_here("reproduce.disguise", *words), "is there already")


def test_layers_removed_and_repeated():
    base = newborn_source(replace(GATED, num_layers=4), 1)
    rows = found(base, cut(base, (0, 2, 2, 3)))
    assert [(row.closest, row.share) for row in rows] == [(1, 1), (3, 1), (3, 1), (4, 1)]


def test_fewer_units_and_layers_are_read_where_asked():
    base = newborn_source(GATED, 1)
    rows = found(base, noised(base, 0.5), units=20, layers=2)
    assert [(row.layer, row.found, row.units) for row in rows] == [(1, 20, 20), (3, 20, 20)]


def test_counts_of_newborn_strangers():
    """Nearest neighbours in two views agree by chance: below one unit a layer, as for random permutations."""
    config = replace(GATED, num_layers=1, vocab_size=1024, d_model=128, d_ff=352)
    stacks = [find_stacks(newborn_source(config, seed))[0] for seed in range(9)]
    ids = torch.arange(config.vocab_size)
    counts = []
    for pair in itertools.combinations(stacks, 2):
        read = [readings(stack, stack.embeddings)[0] for stack in pair]
        ((row,), _) = align.match_layers(align.align_by(pair, read, (ids, ids), 1024), None, 1024)
        counts += [row.found, row.by_chance]
    # Of three pairs of views the best: the mean of the largest of three Poisson numbers of mean 0.25 is 0.65
    assert np.mean(counts) < 1 and max(counts) <= 8


MEMORY = """
import pathlib, resource, sys
import torch
from lineage.compare import CompareSettings, Model, compare_models
from sources import checkpoint

torch.set_num_threads(1)
torch.ones(8, 8) @ torch.ones(8, 8)  # a library's first product allocates
_, said = pathlib.Path("/proc/self/status").read_text().split("VmData:")
most = 1024 * int(said.split()[0]) + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
models = [Model("", checkpoint.find_model(sys.argv[1]).weights) for _ in range(2)]
row, _ = compare_models(*models, CompareSettings(layers=4, neurons=True))
print(row["verdict"])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmData is Linux's")
def test_one_block_at_a_time_is_in_memory(tmp_path):
    """Two models of 0.18 GB each in float32 are compared in a fraction of it; pages of files not counted."""
    model = init.newborn(ModelConfig(2000, 64, 24, 4, 256, 2048), 1)
    saving.save(tmp_path / "a", model)
    half = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    safetensors.torch.save_file(half, tmp_path / "a" / "model.safetensors")
    size = 4 * sum(weight.numel() for weight in half.values())
    # Of two models, each as large: 1,024 units of each of the base's layers are kept, 0.43, and the views of
    # three layers of each, 0.24. Both models at once would be 2.
    process = run_script("-c", MEMORY, tmp_path / "a", int(1.1 * size))
    assert process.stdout == "same birth\n", process.stderr
