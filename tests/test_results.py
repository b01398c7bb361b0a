"""lib/results.py: the JSON is exact and survives failures."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from lib import files, results
from lib.settings import RunSettings, UserError


def begun(folder: Path) -> results.Experiment:
    return results.Experiment("x", "BB Table 1", RunSettings(device="cpu", out=str(folder)))


def test_the_json_is_exact(tmp_path):
    rows = [
        {"name": "[1,  2]", "value": 0.1 + 0.2, "none": None, "seed": 123456},
        {"name": "}, {", "value": 1e-300, "none": None, "seed": None},
    ]
    returned = begun(tmp_path).save(rows, columns=("name", "absent"), details=[[1, 2], [3]])
    saved = json.loads((tmp_path / "x.json").read_text())
    assert saved == files.read_json(tmp_path / "x.json") == returned
    assert saved["rows"] == rows and saved["details"] == [[1, 2], [3]]
    assert saved["settings"].items() >= {"device": "cpu", "out": str(tmp_path)}.items()
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|None", str(saved["environment"]["commit"]))


def test_nan_is_no_json(tmp_path):
    begun(tmp_path).save([{"value": 1.0}])
    text = (tmp_path / "x.json").read_text()
    with pytest.raises(UserError, match="not finite"):
        begun(tmp_path).save([{"value": math.nan}])
    assert (tmp_path / "x.json").read_text() == text


def test_means_over_seeds():
    """Groups by all that was not measured, in order of appearance; numpy's mean and standard deviation."""
    values = np.random.default_rng(0).normal(size=(3, 2, 2))  # of 3 seeds and 2 layers: c and std
    samples = []
    for of_layers in values:
        for layer, (c, std) in zip((4, 2), of_layers):
            samples.append({"layer": layer, "c": c, "std": std})
    rows = results.mean_over_seeds(samples, ("c", "std"))
    for row, layer, group in zip(rows, (4, 2), values.swapaxes(0, 1), strict=True):
        c, std = group.mean(0)
        # sums of three numbers in another order
        expected = {"layer": layer, "c": c, "std": std, "seed_std": group[:, 0].std()}
        assert row == pytest.approx(expected, rel=1e-12)
