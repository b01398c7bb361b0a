"""lib/: files are whole or as they were, results exact, work is shared, and figures show their points."""

import itertools
import json
import logging
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from matplotlib.figure import Figure

from lib import figures, files, results, runtime
from lib.settings import RunSettings, UserError


def test_what_is_no_regular_file_of_a_sane_size(tmp_path):
    """Refused before it is opened: opening a pipe would wait for ever, reading a device would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 30 * 2**30)  # which the disk does not hold
    reasons = dict.fromkeys(("pipe", "device", "folder"), "not a regular file")
    reasons |= {"nowhere": "missing", "gone": "missing"}
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            files.read_json(tmp_path / name)
    (tmp_path / "small").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to(tmp_path / "small")
    assert files.read_json(tmp_path / "link") == {"a": 1}


@pytest.mark.parametrize("text", ["", "[1]", "[" * 200_000])
def test_what_is_no_json_object(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match="a.json"):
        files.read_json(tmp_path / "a.json")


@pytest.mark.parametrize("error, told", [(RuntimeError(), RuntimeError), (OSError(28, "full"), UserError)])
def test_a_failure_leaves_the_old_file(error, told, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(told), files.atomic_file(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_folder(tmp_path):
    path = tmp_path / "run"
    for process in (os.getpid(), 2**22 + 1):  # killed: in containers numbers come again; none has this one
        left = tmp_path / f".run.{process}.tmp"
        left.mkdir()
        (left / "torn").touch()
    for name in ("old", "whole"):
        with files.atomic_folder(path) as new:
            (new / name).touch()
        with pytest.raises(RuntimeError), files.atomic_folder(path) as new:
            (new / "torn").touch()
            raise RuntimeError
        assert sorted(tmp_path.rglob("*")) == [path, path / name]
    live = tmp_path / f".run.{os.getppid()}.tmp"
    live.mkdir()
    with files.atomic_folder(path):
        pass
    assert live.exists()


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


def test_device_and_dtype(tmp_path, monkeypatch):
    def start(**settings):
        return runtime.start(RunSettings(out=str(tmp_path / "new" / "folder"), **settings))

    settings, *chosen = start(device="cpu", dtype="float32")
    assert chosen == [torch.device("cpu"), torch.float32]
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start()[1].type == "cpu"
    assert start(dtype=None)[2] == torch.float32  # a training's: bfloat16 on a GPU
    with pytest.raises(UserError, match="--device cpu"):
        start(device="cuda")
    monkeypatch.setattr(runtime, "choose_device", lambda name: torch.device("cuda"))
    assert start(dtype=None)[0].dtype == "bfloat16" and start()[0].dtype == "float32"


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runtime.choose_device("auto") == torch.device("cuda", 1)
    assert runtime.choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="more processes than GPUs"):
        runtime.choose_device("auto")


def test_unwritable_out(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere"), "null\0byte"):
        with pytest.raises(UserError, match=re.escape(repr(str(out)))):
            runtime.start(RunSettings(device="cpu", out=str(out)))


@pytest.mark.parametrize("count, world", [(0, 2), (2, 3), (7, 1), (64, 8)])
def test_shards_partition_the_range(monkeypatch, count, world):
    shards = []
    monkeypatch.setattr(runtime, "world_size", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(runtime, "rank", lambda rank=rank: rank)
        shards.append(runtime.shard(count))
    assert list(itertools.chain(*shards)) == list(range(count))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


NAMES = ("costs $1", "_100%_")
POINTS = [
    {"model": model, "layer": layer, "n": 10**layer, "c": c, "std": 0.1, "theory": None if layer == 1 else -c}
    for model, c in zip(NAMES, (0.5, 0.25))
    for layer in (0, 1, 2)
]


def lines(axes) -> list[list[tuple]]:
    pairs = [list(zip(line.get_xdata(), line.get_ydata())) for line in axes.get_lines()]
    return [line for line in pairs if line]


def test_a_line_for_each_series_and_each_theory(tmp_path, monkeypatch, caplog):
    """Names that mean something to matplotlib are drawn as they are, without a warning."""
    drawn = []
    save = Figure.savefig

    def note(figure, *words, **options):
        drawn.append(figure)
        save(figure, *words, **options)

    monkeypatch.setattr(Figure, "savefig", note)
    words = {"x": "layer", "y": "c", "series": "model", "theories": {"theory": "the theory"}}
    with caplog.at_level(logging.WARNING):
        figures.curves(POINTS, tmp_path / "x.png", "Why?", **words)
    assert not caplog.records
    (axes,) = drawn[0].axes
    first = [(0, 0.5), (1, 0.5), (2, 0.5)], [(0, -0.5), (2, -0.5)]  # theory is None at layer 1
    second = [(0, 0.25), (1, 0.25), (2, 0.25)], [(0, -0.25), (2, -0.25)]
    assert lines(axes) == [*first, *second]
    names = [text.get_text().strip() for text in drawn[0].legends[0].get_texts()]
    assert names == [*NAMES, "the theory"]


def test_paths_are_shown_by_their_last_part_unless_two_have_the_same():
    names = ["smollm2", "models/qwen2.5-q4_k_m.gguf", "/models/of/many/a/run"]
    assert figures.short_names(names) == ["smollm2", "qwen2.5-q4_k_m", "run"]
    names = [f"/models/{name}/final-checkpoint" for name in "ab"]
    assert figures.short_names(names) == names
