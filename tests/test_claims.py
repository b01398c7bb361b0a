"""Are claims judged rightly? Rows made by hand for every verdict; then committed results, whole and cut."""

import functools
import json

import numpy as np
import pytest
from conftest import ROOT

import train
from lib.settings import read_config_file
from model import PRESETS
from reproduce import claims
from reproduce.claims import CLAIMS

HOLDS, FAILS, OPEN, NONE = "holds", "does not hold", "open", ""


def rows_of(table: dict) -> list[dict]:
    """The rows of a table of columns; a single value is every row's."""
    length = max(np.size(values) for values in table.values())
    columns = {name: np.resize(np.array(values, object), length).tolist() for name, values in table.items()}
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def verdict_of(judge, table, *arguments) -> str:
    """What a judge's cases come to."""
    return claims.verdict(judge(rows_of(table), *arguments)[1])


def test_one_rule_for_every_verdict():
    assert claims.verdict([True, np.True_]) == HOLDS
    assert claims.verdict([True, None, np.False_]) == FAILS
    assert claims.verdict([True, None]) == OPEN
    assert claims.verdict([]) == NONE
    ends = [(0.1, 0.2), (-0.2, -0.1), (-0.1, 0.2), (0.0, 0.0), (float("nan"), float("nan"))]
    assert [claims.above(*interval) for interval in ends] == [True, False, None, None, None]


def probed(log10_p, num_sequences):
    """A newborn's row: its favourite came up nine times where three were expected."""
    row = dict(num_sequences=[num_sequences], top1_count=[9], uniform_max_count=[3.0], ratio=[3.0])
    return row | dict(log10_p=[log10_p])


def by_length(*counts):
    """How often each length's favourite came up in 500 sequences."""
    return dict(sequence_length=[16, 64][: len(counts)], top1_count=list(counts), num_sequences=500)


def by_variant(*full):
    """Cosines of the full model at as many layers, beside those of MLP only."""
    number = len(full)
    variant = ["full"] * number + ["mlp"] * number
    mlp = [0.1, 0.11, 0.12][:number]
    return dict(layer=[1, 2, 3][:number] * 2, variant=variant, mean_cosine=[*full, *mlp])


def calibrated(*first):
    """Losses of the runs of two calibrations, of one seed each."""
    seeds = list(range(len(first)))
    rows = dict(seed=seeds * 2, calibration=["amplify"] * len(seeds) + ["none"] * len(seeds))
    return rows | dict(loss=[*first, *[2.0, 2.1, 2.05][: len(seeds)]])


def by_position(*first):
    """Ratios of two layers at the first position, beside those at two others."""
    return dict(layer=[1, 2] * 3, position=[1, 1, 2, 2, 3, 3], ratio=[*first, 3.5, 4.5, 3.0, 4.2])


@pytest.mark.parametrize(
    ("judge", "rows", "arguments", "expected"),
    [
        (claims.preference, probed(-5.0, 100), (), HOLDS),
        (claims.preference, probed(0.0, 1000), (), OPEN),  # fewer sequences than the paper's
        (claims.preference, probed(0.0, 10_000), (), FAILS),
        (claims.grows_with_length, by_length(5, 60), (), HOLDS),
        (claims.grows_with_length, by_length(60, 5), (), FAILS),
        (claims.grows_with_length, by_length(5, 7), (), OPEN),
        (claims.own_favourites, dict(top1_token=[1, 2], log10_p=-5.0), (), HOLDS),
        (claims.own_favourites, dict(top1_token=[1, 1], log10_p=-5.0), (), FAILS),
        (claims.own_favourites, dict(top1_token=[1, 1], log10_p=0.0), (), OPEN),
        (claims.own_favourites, dict(top1_token=[1], log10_p=-5.0), (), OPEN),
        (claims.same_token, dict(model="nano_gpt2", a=[1] * 8, b=[1] * 3 + [2] * 5), ("a", "b"), HOLDS),
        (claims.same_token, dict(model="nano_gpt2", a=[1] * 8, b=2), ("a", "b"), OPEN),
        (claims.same_token, dict(model="tiny_gpt2", a=[1] * 90_000, b=2), ("a", "b"), FAILS),
        (claims.widening, by_variant(0.1, 0.2, 0.4), (), HOLDS),  # layer 1 does not count
        (claims.widening, by_variant(0.1, 0.1, 0.1), (), FAILS),
        (claims.widening, by_variant(0.0, 0.1, 0.4), (), FAILS),
        (claims.lower, calibrated(1.0, 1.1, 1.0), ("amplify", "none", "loss"), HOLDS),
        (claims.lower, calibrated(3.0, 3.1, 3.0), ("amplify", "none", "loss"), FAILS),
        (claims.lower, calibrated(1.0, 3.0, 2.1), ("amplify", "none", "loss"), OPEN),
        (claims.lower, calibrated(None, None, None), ("amplify", "none", "loss"), OPEN),
        (claims.lower, calibrated(1.0), ("amplify", "none", "loss"), OPEN),
        (claims.above_zero, dict(tau=[0.5, 0.6]), ("tau",), OPEN),  # Student's interval of two is wide
        (claims.above_zero, dict(tau=[0.5, 0.51, 0.52]), ("tau",), HOLDS),
        (claims.right_answers, dict(kin=[False, True], paper_t_p=[0.5, 1e-9], paper_u_p=0.005), (), FAILS),
        (claims.right_answers, dict(kin=[False, True], paper_t_p=[0.5, 1e-9], paper_u_p=[0.2, 0]), (), HOLDS),
        (claims.right_answers, dict(paper_t_p=[1e-9], paper_u_p=[1e-3]), (), HOLDS),  # checkpoints: all kin
        (claims.right_answers, dict(paper_t_p=[1e-9], paper_u_p=[0.3]), (), FAILS),
        (claims.missed_kin, dict(pcs=[0.5], ics=[0.2]), ("pcs", "ics"), HOLDS),
        (claims.missed_kin, dict(pcs=[0.9], ics=[0.2]), ("pcs", "ics"), FAILS),
        (claims.shifted_upward, dict(mean_tau=[0.02, 0.03], stranger_mean_tau=0.01), (), HOLDS),
        (claims.shifted_upward, dict(mean_tau=[0.0, 0.0], stranger_mean_tau=0.01), (), FAILS),
        (claims.shifted_upward, dict(mean_tau=[0.02, 0.0], stranger_mean_tau=0.01), (), FAILS),
        (claims.false_alarms, dict(rate=[0.005], low=[0.0], high=[0.009]), (), HOLDS),
        (claims.false_alarms, dict(rate=[0.005], low=[0.02], high=[0.05]), (), FAILS),
        (claims.false_alarms, dict(rate=[0.005], low=[0.0], high=[0.5]), (), OPEN),
        (claims.sink_heads, dict(checkpoint=["runs/a"], sink_rate=0.2, low=0.1, high=0.3), (), HOLDS),
        (claims.sink_heads, dict(checkpoint=["runs/a"], sink_rate=0.2, low=-0.1, high=0.3), (), OPEN),
        (claims.no_sinks, dict(sink_rate=[0.0, 0.0]), (), HOLDS),
        (claims.no_sinks, dict(sink_rate=[0.5, 0.4]), (), FAILS),
        (claims.no_sinks, dict(sink_rate=[0.5, 0.0]), (), FAILS),
        (claims.first_stands_out, by_position(9.0, 3.0), ("ratio",), HOLDS),
        (claims.first_stands_out, by_position(3.0, 4.0), ("ratio",), FAILS),
    ],
)
def test_judges(judge, rows, arguments, expected):
    assert verdict_of(judge, rows, *arguments) == expected


@pytest.mark.parametrize(
    ("full", "expected"),
    [([0.1, 0.5], HOLDS), ([0.01, 0.02], FAILS), ([0.1, 0.02], FAILS), ([-0.1, -0.5], HOLDS)],
)
def test_ordered_by_size_whatever_the_order_of_rows(full, expected):
    rows = rows_of(dict(seed=[1, 2] * 2, variant=["mlp"] * 2 + ["full"] * 2, value=[0.05, 0.05, *full]))
    arguments = ("value", "seed", "variant", "full", "mlp")
    assert claims.verdict(claims.ordered(rows, *arguments)[1]) == expected
    assert claims.verdict(claims.ordered(rows[::-1], *arguments)[1]) == expected
    assert claims.ordered(rows[:3], "value", "seed", "variant", "attention", "mlp") == ("not run here", [])


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ([1, 0.7, 0.75, 0.5, 0.4, 0.4, 0.4], HOLDS),
        ([1, 1, 1, 1, 1, 1, 1.1], FAILS),
        ([1, 0.7, 0.75, 0.8], HOLDS),  # the octave of position 4 is not full
        ([1, 0.7], NONE),
    ],
)
def test_decay_by_full_octaves(std, expected):
    rows = rows_of(dict(position=list(range(1, len(std) + 1)), std=std))
    assert claims.verdict(claims.decay(rows)[1]) == expected
    assert claims.verdict(claims.decay(rows[::-1])[1]) == expected


@pytest.mark.parametrize(
    ("theory", "seeds", "expected"), [(0.31, 10, HOLDS), (0.4, 10, FAILS), (0.4, 2, HOLDS), (0.31, 1, OPEN)]
)
def test_law_within_the_interval_of_seeds(theory, seeds, expected):
    row = dict(stack="mlp0", mean_cosine=0.3, seed_std=0.02 * (seeds > 1), theory=theory)
    result = dict(rows=[row], settings=dict(seed=list(range(seeds))))
    assert claims.read_rows(claims.within, ("theory",), result)[1] == expected


def test_rows_are_chosen_and_judged_apart():
    rows = [
        dict(stack=stack, layer=n, cosine=sign * n) for stack, sign in (("a", 1), ("b", -1)) for n in range(4)
    ]
    result = dict(rows=[], summary=rows, settings={})
    columns = ("cosine", "layer")
    read = functools.partial(claims.read_rows, claims.rises, columns, result, part="summary", apart="stack")
    text, judged = read()
    assert judged == FAILS and "stack b: -1 to -3 at layer 1 to 3" in text  # layer 0 is the input
    assert read(stack="a", layer=[1, 3]) == ("1 to 3 at layer 1 to 3", HOLDS)
    assert read(stack="c") == ("not run here", NONE)


def test_every_item_is_named_once():
    items = " ".join(claim.item for claim in CLAIMS)
    assert len({claim.item for claim in CLAIMS}) == len(CLAIMS)
    for name in [*(f"Table {n}" for n in ("1a", "1b", "1c", 2, 3, "4a", "4b", "4c", *range(5, 13))), "7-14"]:
        assert name in items
    for name in [*(f"Figure {n}" for n in ("1a", "1b", *range(2, 15))), "Equation 2", "Proposition 2"]:
        assert name in items


def test_the_papers_own_model():
    """BB Tables 13 and 14: what `nano_llama` and its config file say."""
    preset = PRESETS["nano_llama"]
    sizes = (preset.d_model, preset.d_ff, preset.num_layers, preset.num_heads, preset.head_size)
    assert sizes == (768, 2048, 12, 12, 64)
    assert (preset.vocab_size, preset.context_length) == (32_000, 2048)
    assert (preset.norm, preset.mlp) == ("rmsnorm", "swiglu")
    run = read_config_file(str(ROOT / "configs/nano_llama.py"), train.Settings())
    assert (run.warmup_iters, run.max_iters, run.global_batch_size) == (2000, 200_000, 128)
    assert (run.micro_batch_size, run.weight_decay, run.grad_clip) == (32, 0.1, 1.0)


def test_committed_results():
    """Every claim says something of its result."""
    for claim in CLAIMS:
        if claim.result is None:
            continue
        result = json.loads((ROOT / f"results/{claim.result}.json").read_text())
        text, judged = claim.read(result)
        assert text != "not run here", claim.item
        assert judged in (HOLDS, FAILS, OPEN, NONE)
