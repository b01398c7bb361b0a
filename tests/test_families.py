"""families.py, kinship.py: tables on runs that are known, intervals against scipy, losses by hand."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import assert_refused, run_here, run_script
from scipy.stats import ttest_1samp, ttest_rel

import checkpoint
import data
import families
import findings
import init
import kinship
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
    assert all(claim["holds"] for claim in families.judge_calibrations(rows_of(AS_PUBLISHED)))
    swapped = dict(zip(AS_PUBLISHED, reversed(AS_PUBLISHED.values())))
    held = [claim["claim"] for claim in families.judge_calibrations(rows_of(swapped)) if claim["holds"]]
    assert held == ["x: amplify is worse on WikiText-2 (Table 7)"]
    same = {kind: (0.0, 3.0) for kind in AS_PUBLISHED}
    assert not any(claim["holds"] for claim in families.judge_calibrations(rows_of(same, scatter=0)))
    rows = rows_of(AS_PUBLISHED)
    without = list(families.judge_calibrations([row | dict(text_loss=None) for row in rows]))
    assert not any("Table 7" in claim["claim"] for claim in without) and len(without) == 9
    lucky = [row | dict(sink_rate=0.3 if row["seed"] == 0 else row["sink_rate"]) for row in rows]
    found = {claim["claim"]: claim["holds"] for claim in families.judge_calibrations(lucky)}
    assert not found["x: attenuate keeps every sink rate below 0.01, where none has sinks (Figure 12)"]
    awake = [row | dict(elsewhere=0.8 + 0.01 * row["seed"], at_triggers=0.1) for row in rows]
    guo = lambda rows: [c["verdict"] for c in families.judge_calibrations(rows) if "Guo" in c["claim"]]  # noqa: E731
    assert guo(awake) == ["holds"]
    asleep = [row | dict(elsewhere=0.1 * row["seed"], at_triggers=0.15) for row in rows]
    assert guo(asleep) == ["open"]  # open: the interval has both answers
    assert guo([row | dict(elsewhere=0.1, at_triggers=0.2 + 0.01 * row["seed"]) for row in rows]) == [
        "does not hold"
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
    s, model = families.Settings(text=str(text), device="cpu"), checkpoint.load(str(tmp_path / "a"))
    found = families.text_loss(str(tmp_path / "a"), model, s, torch.float32)
    windows = reading.tokens(
        reading.Settings(text=str(text), num_sequences=256, device="cpu"), str(tmp_path / "a"), 33, 290
    )
    with torch.inference_mode():
        p = model(windows[:, :-1]).double().softmax(-1)
    chosen = p.gather(2, windows[:, 1:, None]).log()
    assert found == pytest.approx(-chosen.mean().item(), rel=1e-5)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert families.text_loss(str(tmp_path / "a"), model, s, torch.float32) == pytest.approx(
        math.log(290), rel=1e-6
    )
    assert families.text_loss("tiny_llama@1", model, replace(s, text=None), torch.float32) is None


def test_the_table_of_calibrations_from_births(run, tmp_path, monkeypatch):
    """All of `calibrations`, on runs that were saved at birth and never trained."""
    runs = {}
    for kind, seed in itertools.product(CHOICES["attn_calibration"], (1, 2)):
        out = tmp_path / f"backcopy-{kind}-{seed}"
        model = init.newborn(replace(PRESETS["backcopy"], attn_calibration=kind), seed)
        checkpoint.save(out / "step_0000000", model)
        lines = [dict(step=i, val_loss=5.0 - 0.1 * i - 0.01 * seed) for i in range(3)]
        lines[2]["tokens_per_second"] = 8192 / 4
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs["backcopy", kind, seed] = families.train.Settings(data=str(run / "set"), out=str(out))
    family = (lambda s: runs, *families.EXPERIMENTS["calibrations"][1:])
    monkeypatch.setitem(families.EXPERIMENTS, "calibrations", family)
    monkeypatch.setattr(families, "trained", lambda settings: settings.out)
    out = tmp_path / "out"
    result = families.run("calibrations", families.Settings(out=str(out), device="cpu", dtype="float32"))
    assert result["training_seconds"] == pytest.approx(8 * 4)
    assert [(row["calibration"], row["seed"]) for row in result["rows"]] == [key[1:] for key in runs]
    for row in result["rows"]:
        assert row["val_loss"] == pytest.approx(4.8 - 0.01 * row["seed"])
        assert row["mean_loss"] == pytest.approx(4.85 - 0.01 * row["seed"])
        assert row["sink_rate"] == 0 and row["mean_alpha1"] == pytest.approx(row["uniform_alpha1"], rel=0.02)
        # at birth both are 1 / position, the positions much the same
        assert row["at_triggers"] == pytest.approx(row["elsewhere"], rel=0.15)
    assert {point["sequence_length"] for point in result["lengths"]} == {32, 64, 128}
    assert {path.name for path in out.iterdir()} == {
        "calibrations.json", "calibrations.png", "calibrated_rate.png",
    }  # fmt: skip


def births(tmp_path, gains, seeds=3) -> dict:
    """Runs of which `centered` is better by `gains` at each of 20 steps, in a seed's own noise."""
    runs, generator = {}, np.random.default_rng(0)
    noise = generator.normal(size=(seeds, 20))
    for kind, seed in itertools.product(("gpt2", "centered"), range(seeds)):
        out = tmp_path / f"{kind}-{seed}"
        loss = 5 + noise[seed] - (gains[seed] if kind == "centered" else 0.0)
        checkpoint.save(out / "step_0000020", init.newborn("tiny_gpt2", seed, scheme=kind))
        lines = [dict(step=0, val_loss=8.0)]
        lines += [dict(step=i + 1, loss=x, tokens_per_second=1.0) for i, x in enumerate(loss)]
        lines[-1]["val_loss"] = loss[-1]
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs[kind, seed] = families.train.Settings(out=str(out))
    return runs


def test_births_are_judged_by_paired_differences(tmp_path):
    s = families.Settings(device="cpu", dtype="float32")
    gains = [0.10, 0.12, 0.11]
    found = families.every_birth(births(tmp_path, gains), s, torch.device("cpu"), torch.float32)
    points = [point for point in found["points"] if point["init"] == "difference"]
    assert [point["step"] for point in points] == [10, 20]
    expected = ttest_1samp([-gain for gain in gains], 0).confidence_interval(0.95)
    for point in points:  # the noise is the pair's own, and cancels
        assert point["loss"] == pytest.approx(-0.11)
        assert point["loss"] + point["error"] == pytest.approx(expected.high)
    faster, better, straighter = families.judge_births(found["rows"])
    assert faster["holds"] and better["holds"] and faster["measured"].startswith("-0.1100, -0.13")
    assert straighter["holds"]  # newborns here: the centered do not contract
    rows = [row | dict(val_loss=row["val_loss"] * (1 - 2 * (row["seed"] == 1))) for row in found["rows"]]
    assert not families.judge_births(rows)[1]["holds"]


def test_the_papers_sizes_are_the_configs():
    s = families.Settings(size="paper", runs="r")
    every = [run for _, (family, *_) in families.EXPERIMENTS.items() for run in family(s).values()]
    for run in every:
        large = run.model.startswith("nano_") and run.global_batch_size >= 128 and run.sequence_length >= 1024
        assert large or run.model == "backcopy"
    assert len({run.out for run in every}) == len(every) == 12 + (4 * 3 + 4 * 5) + 8
    small = families.Settings(size="smoke", runs="r")
    for family in (kinship.family, families.calibrated, families.newborns):
        assert {run.max_iters for run in family(small).values()} == {2}
    laptop = [
        run
        for family in (kinship.family, families.newborns)
        for run in family(replace(s, size="laptop")).values()
    ]
    assert sum(run.max_iters for run in laptop) == 2220 + 1200  # steps that the settings ask for


def test_pairs_are_the_papers_rows():
    first, second = {seed: f"r{seed}" for seed in kinship.SEEDS}, {1000: "c1000", 123: "c123"}
    rows = kinship.pairs(first, second)
    assert [row[0] for row in rows] == ["4a"] * 4 + ["4b"] * 4 + ["4c"] * 4 + ["5"] * 2
    assert ("4a", "r2000/step_0000000", "r42/step_0000000", False) in rows
    assert ("4b", "r42/step_0000000", "r42", True) in rows
    assert ("4c", "r2000/step_0000000", "r42", False) in rows
    assert rows[-2:] == [("5", "r1000", "c1000", True), ("5", "r1000", "c123", False)]


def test_a_table_of_lineage_is_judged_by_who_is_right():
    row = dict(table="4b, 8", verdict="same birth", relabelling_right=True, verdict_right=True)
    for name in kinship.METHODS[:6]:
        row |= {name: 0.5, f"{name}_right": name == "pcs", f"{name}_theirs": None}
    rows = [row | dict(pcs_theirs=0.58), row | dict(pcs=0.7, pcs_theirs=0.59)]
    found = {claim["claim"]: claim for claim in kinship.judge(rows)}
    pcs = found["Table 4b, 8: pcs is right on every pair"]
    assert pcs["holds"] and pcs["measured"] == "2 of 2, 0.5 to 0.7" and pcs["paper"] == "0.58 to 0.59"
    assert not found["Table 4b, 8: reef is right on every pair"]["holds"]
    assert found["Table 4b, 8: verdict is right on every pair"]["measured"] == "2 of 2"


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
    found = families.asleep_and_awake(model, tokens)
    assert found["at_triggers"] == pytest.approx(chosen[:, 2:][trigger[:, 2:]].mean().item(), rel=1e-4)
    assert found["elsewhere"] == pytest.approx(chosen[:, 2:][~trigger[:, 2:]].mean().item(), rel=1e-4)


def test_mistakes(tmp_path):
    assert_refused(run_script("families.py", "lineages", "--out", tmp_path), "lineage")
    assert_refused(run_here("families.py", "births", "--text", tmp_path / "missing.txt"), "missing.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):  # before hours of training
        families.run("births", families.Settings(out=str(tmp_path / "file")))
    ((s, _),) = families.plan(["births", "--runs", "./some//runs/"])
    assert s.runs == "some/runs"  # a part of each run's name


def test_a_run_that_was_stopped_stops_what_asked_for_it(tmp_path, monkeypatch):
    """A signal ends `train` early and without an error: the family must not be measured then."""

    def stopped(s):
        checkpoint.save(tmp_path / "run" / "step_0000003", init.newborn("backcopy", 1))

    monkeypatch.setattr(families.train, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        families.trained(families.train.Settings(out=str(tmp_path / "run"), max_iters=5, device="cpu"))


def test_a_run_of_other_settings_is_not_reused(tmp_path, monkeypatch):
    s = families.train.Settings(out=str(tmp_path / "run"), max_iters=5, device="cpu", dtype="float32")
    checkpoint.save(tmp_path / "run" / "step_0000005", init.newborn("backcopy", 1))
    known = json.loads(json.dumps(families.train.asdict(s)))
    (tmp_path / "run" / "settings.json").write_text(json.dumps(known))
    assert families.trained(s) == s.out
    assert families.trained(replace(s, keep="last")) == s.out  # as README's own commands leave a run
    for other in (dict(max_iters=6), dict(max_iters=4), dict(eval_every=7), dict(eval_sequences=3)):
        with pytest.raises(UserError, match="--runs"):
            families.trained(replace(s, **other))
    with pytest.raises(UserError, match="--learning-rate"):
        families.trained(replace(s, learning_rate=0.5))


def test_an_interval_with_both_answers_leaves_a_claim_open():
    assert [findings.above(*ends) for ends in ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1), (0.0, 1.0))] == [
        True, False, None, None,
    ]  # fmt: skip
    assert findings.above(0.51, 0.9, 0.5) and findings.above(0.4, 0.9, 0.5) is None
    said = [findings.claim("it is", None, 1, holds)["verdict"] for holds in (np.True_, np.False_, None)]
    assert said == list(findings.VERDICTS.values())
