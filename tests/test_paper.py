"""paper.py: its tables on runs that are known, its intervals against scipy, its losses by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import assert_refused, run_script
from scipy.stats import ttest_rel

import checkpoint
import data
import init
import paper
import reading
from common import UserError
from model import CHOICES, PRESETS
from stats import interval


def rows_of(kinds: dict, config="x", seeds=4, text=True, scatter=1e-3) -> list[dict]:
    """Runs whose sink rate, raw alpha and losses are what `kinds` says, plus a seed's own number."""
    generator, rows = np.random.default_rng(0), []
    own = generator.normal(size=seeds)
    for kind, (sink, loss) in kinds.items():
        for seed in range(seeds):
            noise = scatter * generator.normal()
            row = dict(config=config, calibration=kind, seed=seed, sink_rate=sink, mean_alpha1=sink / 2)
            row |= dict(val_loss=loss + own[seed] + noise, mean_loss=loss + own[seed] + noise)
            rows.append(row | dict(text_loss=loss + own[seed] + noise if text else None))
    return rows


AS_PUBLISHED = {"none": (0.3, 3.0), "amplify": (0.1, 3.1), "attenuate": (0.001, 2.9), "headnorm": (0.0, 2.8)}


def test_the_papers_orderings_are_judged_on_paired_runs():
    assert all(claim["holds"] for claim in paper.judge_calibrations(rows_of(AS_PUBLISHED)))
    swapped = dict(zip(AS_PUBLISHED, reversed(AS_PUBLISHED.values())))
    held = [claim["claim"] for claim in paper.judge_calibrations(rows_of(swapped)) if claim["holds"]]
    assert held == ["x: amplify is worse on WikiText-2 (Table 7)"]
    same = {kind: (0.0, 3.0) for kind in AS_PUBLISHED}
    assert not any(claim["holds"] for claim in paper.judge_calibrations(rows_of(same, scatter=0)))
    rows = rows_of(AS_PUBLISHED)
    without = paper.judge_calibrations([row | dict(text_loss=None) for row in rows])
    assert not any("Table 7" in claim["claim"] for claim in without) and len(without) == 7
    lucky = [row | dict(sink_rate=0.3 if row["seed"] == 0 else row["sink_rate"]) for row in rows]
    found = {claim["claim"]: claim["holds"] for claim in paper.judge_calibrations(lucky)}
    assert not found["x: attenuate keeps every sink rate below 0.01, where none has sinks (Figure 12)"]
    awake = [row | dict(elsewhere=0.8 + 0.01 * row["seed"], at_triggers=0.1) for row in rows]
    assert [claim["holds"] for claim in paper.judge_calibrations(awake) if "Guo" in claim["claim"]] == [True]
    asleep = [row | dict(elsewhere=0.1 * row["seed"], at_triggers=0.15) for row in rows]
    assert [claim["holds"] for claim in paper.judge_calibrations(asleep) if "Guo" in claim["claim"]] == [
        False
    ]


def test_intervals_are_scipys():
    a, b = np.random.default_rng(0).normal(size=(2, 5))
    expected = ttest_rel(a, b).confidence_interval(0.95)
    found = interval(a - b, "x", "below", "above")
    assert found == pytest.approx(dict(x=np.mean(a - b), below=expected.low, above=expected.high))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A checkpoint of the tiny task with a data set of its own."""
    folder = tmp_path_factory.mktemp("paper")
    original, data.backcopy = data.backcopy, lambda: original(count=20_000)
    try:
        data.prepare(data.Settings(source=("backcopy",), tokenizer="bytes", out=str(folder / "set")))
    finally:
        data.backcopy = original
    return folder


def test_text_loss_is_the_cross_entropy(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i}: {i * i} and {'x' * (i % 7)}" for i in range(3000)))
    tokens = data.prepare(
        data.Settings(source=(str(text),), tokenizer="bpe:290", held_out=0.5, out=str(tmp_path / "d"))
    )
    config = replace(PRESETS["tiny_llama"], vocab_size=290, context_length=32, num_layers=1)
    checkpoint.save(tmp_path / "a", init.newborn(config, 1), tokenizer=tokens / "tokenizer.model")
    s, model = paper.Settings(text=str(text), device="cpu"), checkpoint.load(str(tmp_path / "a"))
    found = paper.text_loss(str(tmp_path / "a"), model, s, torch.float32)
    windows = reading.tokens(
        reading.Settings(text=str(text), num_sequences=128, device="cpu"), str(tmp_path / "a"), 33, 290
    )
    with torch.inference_mode():
        p = model(windows[:, :-1]).double().softmax(-1)
    chosen = p.gather(2, windows[:, 1:, None]).log()
    assert found == pytest.approx(-chosen.mean().item(), rel=1e-5)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert paper.text_loss(str(tmp_path / "a"), model, s, torch.float32) == pytest.approx(
        math.log(290), rel=1e-6
    )
    assert paper.text_loss("tiny_llama@1", model, replace(s, text=None), torch.float32) is None


def test_the_table_of_calibrations_from_births(run, tmp_path, monkeypatch):
    """All of `calibrations`, on runs that were saved at birth and never trained."""

    def born(config, kind, seed, s):
        out = tmp_path / f"{config}-{kind}-{seed}"
        model = init.newborn(replace(PRESETS["backcopy"], attn_calibration=kind), seed)
        checkpoint.save(out / "step_0000000", model)
        lines = [dict(step=i, val_loss=5.0 - 0.1 * i - 0.01 * seed) for i in range(3)]
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(out), data.TokenData(run / "set")

    monkeypatch.setattr(paper, "CALIBRATED", {"backcopy": (1, 2)})
    monkeypatch.setattr(paper, "calibrated_run", born)
    result = paper.calibrations(paper.Settings(out=str(tmp_path / "out"), device="cpu", dtype="float32"))
    assert [(row["calibration"], row["seed"]) for row in result["rows"]] == [
        (kind, seed) for kind in CHOICES["attn_calibration"] for seed in (1, 2)
    ]
    for row in result["rows"]:
        assert row["val_loss"] == pytest.approx(4.8 - 0.01 * row["seed"])
        assert row["mean_loss"] == pytest.approx(4.85 - 0.01 * row["seed"])
        assert row["sink_rate"] == 0 and row["mean_alpha1"] == pytest.approx(row["uniform_alpha1"], rel=0.02)
        # at birth both are 1 / position, the positions much the same
        assert row["at_triggers"] == pytest.approx(row["elsewhere"], rel=0.15)
    assert {point["sequence_length"] for point in result["lengths"]} == {32, 64, 128}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "calibrations.json", "calibrations.png", "calibrated_rate.png",
    }  # fmt: skip


def test_asleep_and_awake_against_explicit_attention():
    model, tokens = init.newborn("backcopy", 3), torch.randint(97, 123, (5, 40))
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.weight.mul_(5)
            block.self_attn.k_proj.weight.mul_(5)
    heads = []

    def watch(layer, o, q, k, v):
        scores = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(
            ~torch.ones(40, 40).tril().bool(), -math.inf
        )
        heads.append(scores.softmax(-1)[:, 0, :, 0])

    with torch.inference_mode():
        model.hidden(tokens, on_heads=watch)
    chosen = max(heads, key=lambda weights: weights[:, 2:].mean())
    trigger = torch.tensor([[chr(t) in data.TRIGGERS for t in row] for row in tokens.tolist()])
    found = paper.asleep_and_awake(model, tokens)
    assert found["at_triggers"] == pytest.approx(chosen[:, 2:][trigger[:, 2:]].mean().item(), rel=1e-4)
    assert found["elsewhere"] == pytest.approx(chosen[:, 2:][~trigger[:, 2:]].mean().item(), rel=1e-4)


def test_mistakes(tmp_path):
    assert_refused(run_script("paper.py", "--only", "lineages", "--out", tmp_path), "lineage")
    with pytest.raises(UserError, match="missing.txt"):
        paper.calibrations(paper.Settings(text=str(tmp_path / "missing.txt"), out=str(tmp_path)))


def test_a_run_of_other_settings_is_not_reused(tmp_path, monkeypatch):
    s = paper.train.Settings(out=str(tmp_path / "run"), max_iters=5, device="cpu", dtype="float32")
    checkpoint.save(tmp_path / "run" / "step_0000005", init.newborn("backcopy", 1))
    known = json.loads(json.dumps(paper.train.asdict(s)))
    (tmp_path / "run" / "settings.json").write_text(json.dumps(known))
    assert paper.trained(s) == s.out
    with pytest.raises(UserError, match="--learning-rate"):
        paper.trained(replace(s, learning_rate=0.5))
