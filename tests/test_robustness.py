"""reproduce/robustness.py: the whole table, of models of five tiny layers."""

import hashlib
from dataclasses import replace
from pathlib import Path

from conftest import ROOT, run_here

from init import newborn
from lib.files import read_json
from lineage.judge import NO_EVIDENCE, SAME_BIRTH
from model import ModelConfig
from sources import saving
from sources.data import load_tokenizer

CONFIG = ModelConfig(400, 128, 5, 2, 32, 48)
TEXT = str(ROOT / "model.py")


def test_children_are_found_and_strangers_are_not(tmp_path):
    """Of a base with a tokenizer, and the single file of a wider model that it never met."""
    tokenizer = load_tokenizer("bpe:400", [Path(TEXT).read_text()])
    saving.save(tmp_path / "base", newborn(CONFIG, 1), tokenizer=tokenizer)
    saving.save(tmp_path / "other", newborn(replace(CONFIG, d_model=48, num_layers=3), 2))
    models = [tmp_path / "base", tmp_path / "other" / "model.safetensors"]
    done = run_here("reproduce.robustness", *models, "--text", TEXT, "--steps", 15, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = read_json(tmp_path / "robustness.json")
    rows = {(row["base"], row["suspect"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == len(result["layers"]) == len(result["layer_map"]) == 18
    for (base, suspect), row in rows.items():
        answer = NO_EVIDENCE
        if row["kind"].startswith("child"):
            answer = SAME_BIRTH
        elif suspect == "the same, trained":  # on the base's embedding matrix, whose coordinates it learns
            continue
        assert row["verdict"] == answer, (base, suspect)
        assert ("model.safetensors" in (base, suspect)) == (row["kind"] == "never met")
    assert rows["base", "itself"]["distance"] < 1e-6
    assert 0.01 < rows["base", "trained"]["distance"] < rows["base", "trained hard"]["distance"]
    found = result["layers"][list(rows).index(("base", "disguised, cut to 4 layers"))]
    assert [layer["base_layer"] for layer in found] == [1, 2, 4, 5]
    assert result["sha256"] == {"model.safetensors": hashlib.sha256(models[1].read_bytes()).hexdigest()}
