"""lib/results.py: the JSON is exact and survives failures."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

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
    """Groups in order of appearance, which no theory's last bit splits; numpy's mean and std."""
    values = np.random.default_rng(0).normal(size=(3, 2, 2))  # of 3 seeds and 2 layers: c and std
    samples = []
    for seed, of_layers in enumerate(values):
        for scale, (c, std) in zip((0.2, 0.1), of_layers):  # a setting that is a float
            theory = math.nextafter(0.1, seed)
            samples.append({"scale": scale, "seed": seed, "c": c, "std": std, "theory": theory, "no": None})
    rows = results.mean_over_seeds(samples, ("c", "std"), ("theory", "no"))
    for row, scale, group in zip(rows, (0.2, 0.1), values.swapaxes(0, 1), strict=True):
        c, std = group.mean(0)
        # sums of three numbers in another order
        expected = {"scale": scale, "c": c, "std": std, "theory": 0.1, "seed_std": group[:, 0].std()}
        assert row.pop("no", 1) is None and row == pytest.approx(expected, rel=1e-12)


def test_interval_against_scipy_and_within_a_rates_bounds():
    values = [0.0, 0.0, 0.1, 0.2, 1.0]
    low, high = scipy.stats.t.interval(0.95, 4, loc=0.26, scale=scipy.stats.sem(values))
    assert results.interval(values) == pytest.approx({"mean": 0.26, "low": low, "high": high})
    assert results.interval(values, "rate", 0, 1) == pytest.approx({"rate": 0.26, "low": 0, "high": high})
