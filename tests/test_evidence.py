"""lineage/evidence.py: of bits, what is equal, and how little is read of what is not."""

from dataclasses import replace

from conftest import KINDS

from lib.checkpoint import Newborn
from lineage.disguise import as_source, weights_of
from lineage.evidence import digests_of, equal_layers
from lineage.layout import find
from reproduce.changes import cut

CONFIG = replace(KINDS["llama_gqa"], d_model=64, d_ff=96)
BASE = Newborn(CONFIG, 1)


def test_layers_that_only_begin_alike():
    """One number of the largest matrix of the last layer differs."""
    weights = weights_of(BASE)
    weights["model.layers.2.mlp.down_proj.weight"][-1, -1] += 1
    nearly = as_source(weights, CONFIG)
    base, suspect = find(BASE), find(nearly)
    assert (
        digests_of(base, 8)[3] == digests_of(suspect, 8)[3] and digests_of(base)[3] != digests_of(suspect)[3]
    )
    assert equal_layers(base, suspect) == {1: 1, 2: 2}
    assert equal_layers(suspect, find(cut(nearly, [2, 0]))) == {1: 3, 2: 1}


def test_of_strangers_the_smallest_matrices_alone_are_read():
    read = set()
    source = as_source(weights_of(Newborn(CONFIG, 2)), CONFIG)
    base, suspect = find(BASE), find(source)
    weight_of = source.read
    source.read = lambda name: read.add(name) or weight_of(name)
    assert equal_layers(base, suspect) == {}
    matrices = {name for name in read if len(source.shapes[name]) == 2}
    layers = [f"model.layers.{layer}.self_attn." for layer in range(CONFIG.num_layers)]
    assert matrices == {f"{layer}{kind}_proj.weight" for layer in layers for kind in "kv"}
