"""measure/layers.py: of which layers a suspect was made, by hand and of models cut, grown and merged."""

from dataclasses import replace

import pytest
from altered import open_folder, save_perturbed
from conftest import run_here

import init
from lib import checkpoint
from lib.files import read_json
from lib.folders import shared_tokens
from measure.census import Units, unit_census
from measure.layers import makeup, merger
from model import ModelConfig
from reproduce import thief
from reproduce.thief import assembled, hidden, noised, upcycled

CONFIG = ModelConfig(300, 64, 6, 4, 64, 96, num_kv_heads=2)


def rows_of(origins, share=1.0, distance=0.1) -> list[dict]:
    """Rows of a census: for each layer of the suspect that of the base, or None; or several, of experts."""
    rows = []
    for number, origin in enumerate(origins, start=1):
        for one in origin if isinstance(origin, tuple) else (origin,):
            row = {"number": number, "base_number": one or number, "base_layer": f"layer {one or number}"}
            rows.append(row | {"share": share if one else 0.01, "distance": distance if one else None})
    return rows


@pytest.mark.parametrize(
    "origins, base_layers, said",
    [
        ([1, 2, 3], 3, ""),
        ([None, None], 2, ""),
        (
            [1, 2, 3, 4, 7, 8, 9, 10, 11, 12],
            12,
            "layers 1–4 and 7–12 of the base, in this order; 5 and 6 are gone",
        ),
        ([1, 3], 3, "layers 1 and 3 of the base, in this order; 2 is gone"),
        ([2], 5, "layer 2 of the base; 1 and 3–5 are gone"),
        (
            [1, 2, 3, 2, 3, 4],
            4,
            "layers 1–3 and 2–4 of the base, in this order; 2 and 3 are repeated",
        ),
        ([2, 1], 2, "layers 2 and 1 of the base, in this order"),
        (
            [1, None, 3],
            3,
            "layers 1 and 3 of the base, in this order; 2 is gone; the suspect's layer 2 came from elsewhere",
        ),
        ([(1, 1), (2, 2)], 2, "layers 1–2 of the base, each as 2 experts"),
    ],
)
def test_makeup(origins, base_layers, said):
    rows = rows_of(origins)
    assert makeup(rows, range(1, base_layers + 1), range(1, len(origins) + 1)) == said


def test_layers_that_were_not_looked_at_are_not_said_to_be_gone():
    rows = [row | {"number": 4 * row["number"]} for row in rows_of([2, 6])]
    said = makeup(rows, range(1, 13), range(1, 9))
    assert said == "layers 2 and 6 of the base, in this order (2 of 8 layers were looked at)"


def test_merger():
    a, b = rows_of([1, 2, 3, 4]), rows_of([1, 2, 3, 4])
    assert merger({"A": a, "B": b}) == ""  # as close to both: of the first
    for row, distance in zip(b, (0.2, 0.2, 0.05, 0.1005)):
        row["distance"] = distance
    assert merger({"A": a, "B": b}) == "layers 1–2 of A and layers 3–4 of B, in this order"
    assert merger({"A": a, "B": rows_of([None] * 4)}) == ""
    a, b = rows_of([1, None, None, 4]), rows_of([None, 5, 6, None])
    said = "layer 1 of A, layers 5–6 of B and layer 4 of A, in this order"
    assert merger({"A": a, "B": b}) == said


# ---- models ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base with gains and biases, its child, and a stranger."""
    folder = tmp_path_factory.mktemp("layers")
    base = save_perturbed(folder / "base", CONFIG)
    thief.save(folder / "child", noised(base, 0.3))
    save_perturbed(folder / "stranger", CONFIG, seed=2)
    return folder


def made_of(base, suspect) -> str:
    """The sentence about two sources."""
    a, b = Units(base), Units(suspect)
    rows, layer_map = unit_census(a, b, shared_tokens(base, suspect, 300), layers=99)
    return makeup(rows, layer_map["base_layers"], layer_map["suspect_layers"])


@pytest.mark.parametrize(
    "order, said",
    [
        ((0, 1, 4, 5), "layers 1–2 and 5–6 of the base, in this order; 3 and 4 are gone"),
        ((0, 1, 2, 3, 2, 3, 4, 5), "layers 1–4 and 3–6 of the base, in this order; 3 and 4 are repeated"),
    ],
)
def test_layers_removed_and_repeated(folders, order, said):
    child = open_folder(folders / "child")
    cut = assembled([(child, layer) for layer in order])
    assert made_of(open_folder(folders / "base"), hidden(cut)) == said


def test_an_upcycled_mixture(folders):
    child = hidden(open_folder(folders / "child"), ("rotate", "neurons"))
    said = made_of(open_folder(folders / "base"), upcycled(child, 4))
    assert said == "layers 1–6 of the base, each as 4 experts"


@pytest.mark.parametrize("other", ["child", "stranger"])
def test_a_merge_by_layers(folders, other, tmp_path):
    """Of a base and its child, where distance tells, and of strangers, on the tables of the first."""
    sources = [open_folder(folders / name) for name in ("base", other)]
    layers = [(sources[int(layer >= 3)], layer) for layer in range(6)]
    suspect = tmp_path / "merged"
    thief.save(suspect, hidden(assembled(layers)))
    words = ("compare", folders / "base", suspect, "--base", folders / other, "--out", tmp_path)
    done = run_here("seedprint", *words)
    assert done.returncode == 0, done.stderr
    said = f"layers 1–3 of {folders / 'base'} and layers 4–6 of {folders / other}, in this order"
    assert read_json(tmp_path / "compare.json")["merged"] == [said]
    assert said in done.stdout


def test_the_closest_relative(tmp_path):
    """Of two noised copies that with less noise; a distance is 1 minus the correlation of the weights."""
    config = replace(CONFIG, num_layers=2)
    base = init.newborn(config, 1)
    checkpoint.save(tmp_path / "base", base)
    source = open_folder(tmp_path / "base")
    suspects = {}
    for size in (1, 0.5):
        suspects[size] = tmp_path / f"noise-{size}"
        thief.save(suspects[size], noised(source, size))
    done = run_here("seedprint", "compare", tmp_path / "base", *suspects.values(), "--out", tmp_path)
    assert f"closest to {tmp_path / 'base'}: {suspects[0.5]}" in done.stdout
    for row, size in zip(read_json(tmp_path / "compare.json")["rows"], suspects):
        # of 96 units of 64 numbers each: 4,560 cosines, of which a few hundred are independent
        assert row["distance"] == pytest.approx(1 - (1 + size**2) ** -0.5, abs=0.05)
