"""Are claims judged rightly? Rows made by hand for every verdict; then committed results, whole and cut."""

import functools
import json
from pathlib import Path

import pandas as pd
import pytest

from reproduce import claims
from reproduce.claims import CLAIMS, FAILS, HOLDS, NONE, OPEN

RESULTS = Path(__file__).parent.parent / "results"
NAN = float("nan")


def verdict(judge, rows: dict, *arguments) -> str:
    """The verdict of a judge on rows that are given by column."""
    return judge(pd.DataFrame(rows), *arguments).verdict


@functools.cache
def read(name: str) -> dict:
    """A committed result; empty where it is not there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def reading(by, judge, *arguments, part="rows", **where) -> claims.Claim:
    """A claim whose words do not matter."""
    return claims.Claim("", "", by=by, judge=judge, arguments=arguments, part=part, where=where)


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        (claims.above(0.1, 0.2), HOLDS),
        (claims.above(-0.2, -0.1), FAILS),
        (claims.above(-0.1, 0.2), OPEN),
        (claims.above(0.0, 0.0), OPEN),
        (claims.above(NAN, NAN), OPEN),
        (claims.rising([1, 2, 3]), HOLDS),
        (claims.rising([3, 1, 2]), FAILS),
        (claims.rising([1, 3, 2]), OPEN),
        (claims.rising([1]), OPEN),
        (claims.agreed([True, True]), HOLDS),
        (claims.agreed([False]), FAILS),
        (claims.agreed([True, False]), OPEN),
        (claims.agreed([]), OPEN),
        (claims.all_hold([HOLDS, NONE, HOLDS]), HOLDS),
        (claims.all_hold([HOLDS, OPEN, FAILS]), FAILS),
        (claims.all_hold([HOLDS, OPEN]), OPEN),
        (claims.all_hold([NONE]), NONE),
    ],
)
def test_verdicts(judged, expected):
    assert judged == expected


@pytest.mark.parametrize(
    ("log10_p", "num_sequences", "expected"),
    [(-5.0, 100, HOLDS), (0.0, 1000, OPEN), (0.0, 10_000, FAILS)],
)
def test_no_preference_fails_only_at_the_papers_size(log10_p, num_sequences, expected):
    row = dict(num_sequences=[num_sequences], top1_count=[9], uniform_max_count=[3.0], ratio=[3.0])
    assert verdict(claims.preference, row | dict(log10_p=[log10_p])) == expected


@pytest.mark.parametrize(
    ("counts", "expected"), [((5, 60), HOLDS), ((60, 5), FAILS), ((5, 7), OPEN), ((5,), OPEN)]
)
def test_preference_by_length(counts, expected):
    rows = dict(sequence_length=[16, 64][: len(counts)], top1_count=counts, num_sequences=500)
    assert verdict(claims.grows_with_length, rows) == expected


@pytest.mark.parametrize(
    ("tokens", "log10_p", "expected"),
    [([1, 2], -5.0, HOLDS), ([1, 1], -5.0, FAILS), ([1, 1], 0.0, OPEN), ([1], -5.0, OPEN)],
)
def test_own_favourites(tokens, log10_p, expected):
    assert verdict(claims.own_favourites, dict(top1_token=tokens, log10_p=log10_p)) == expected


@pytest.mark.parametrize(("hits", "expected"), [(3, HOLDS), (0, OPEN)])
def test_same_token_is_compared_with_chance(hits, expected):
    rows = dict(first=[1] * 8, second=[1] * hits + [2] * (8 - hits))
    assert verdict(claims.same_token, rows, "first", "second") == expected
    assert verdict(claims.same_token, dict(first=[1] * 9000, second=2), "first", "second") == FAILS


@pytest.mark.parametrize(
    ("full", "expected"),
    [([0.1, 0.5], HOLDS), ([0.01, 0.02], FAILS), ([0.1, 0.02], OPEN), ([-0.1, -0.5], HOLDS)],
)
def test_ordered_by_size_whatever_the_order_of_rows(full, expected):
    rows = pd.DataFrame(dict(seed=[1, 2] * 2, variant=["mlp"] * 2 + ["full"] * 2, value=[0.05, 0.05, *full]))
    arguments = ("value", "seed", "variant", "full", "mlp")
    assert claims.ordered(rows, *arguments).verdict == expected
    assert claims.ordered(rows[::-1], *arguments).verdict == expected


def test_ordered_without_names_takes_them_sorted():
    rows = dict(layer=[1, 1], sequence_length=[512, 32], value=[0.6, 0.7])
    assert verdict(claims.ordered, rows, "value", "layer", "sequence_length") == HOLDS
    one = dict(layer=[1], sequence_length=[32], value=[0.7])
    assert verdict(claims.ordered, one, "value", "layer", "sequence_length") == OPEN


@pytest.mark.parametrize(
    ("full", "expected"), [([0.1, 0.2, 0.4], HOLDS), ([0.1, 0.1, 0.1], FAILS), ([0.0, 0.1, 0.4], OPEN)]
)
def test_widening_leaves_layer_1_out(full, expected):
    rows = dict(layer=[1, 2, 3] * 2, variant=["full"] * 3 + ["mlp"] * 3, mean_cosine=[*full, 0.1, 0.11, 0.12])
    assert verdict(claims.widening, rows) == expected


@pytest.mark.parametrize(
    ("std", "expected"),
    [([1, 0.7, 0.75, 0.5, 0.4], HOLDS), ([1, 1, 1, 1, 1.1], FAILS), ([1, 0.5, 0.5, 0.6, 0.7], OPEN)],
)
def test_decay_by_octaves(std, expected):
    rows = pd.DataFrame(dict(position=[1, 2, 3, 4, 5], std=std))
    assert claims.decay(rows).verdict == expected
    assert claims.decay(rows[::-1]).verdict == expected


@pytest.mark.parametrize(
    ("theory", "seeds", "expected"), [(0.31, 10, HOLDS), (0.4, 10, FAILS), (0.4, 2, HOLDS), (0.31, 1, OPEN)]
)
def test_law_within_the_interval_of_seeds(theory, seeds, expected):
    row = dict(stack="mlp0", mean_cosine=0.3, seed_std=0.02 * (seeds > 1), theory=theory)
    result = dict(rows=[row], settings=dict(seed=list(range(seeds))))
    assert reading("stack", claims.within, "theory").measure(result).verdict == expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ([1.0, 1.1, 1.0], HOLDS),
        ([3.0, 3.1, 3.0], FAILS),
        ([1.0, 3.0, 2.1], OPEN),
        ([None] * 3, OPEN),
        ([1.0], OPEN),
    ],
)
def test_lower_by_paired_differences(first, expected):
    seeds = list(range(len(first)))
    rows = dict(seed=seeds * 2, calibration=["amplify"] * len(seeds) + ["none"] * len(seeds))
    rows["loss"] = [*first, *[2.0, 2.1, 2.05][: len(seeds)]]
    assert verdict(claims.lower, rows, "amplify", "none", "loss") == expected


def test_lower_in_runs_with_one_kind_only():
    rows = dict(seed=[1, 2], calibration=["none"] * 2, loss=[2.0, 2.1])
    assert verdict(claims.lower, rows, "amplify", "none", "loss") == OPEN


@pytest.mark.parametrize(
    ("p", "expected"), [([0.5, 1e-9], HOLDS), ([0.001, 1e-9], FAILS), ([0.5, 0.02], FAILS)]
)
def test_right_answers_of_strangers_and_kin(p, expected):
    assert verdict(claims.right_answers, dict(kin=[False, True], paper_t_p=p, paper_u_p=p)) == expected


def test_right_answers_of_checkpoints_are_of_kin():
    assert verdict(claims.right_answers, dict(paper_t_p=[1e-9], paper_u_p=[1e-3])) == HOLDS
    assert verdict(claims.right_answers, dict(paper_t_p=[1e-9], paper_u_p=[0.3])) == FAILS


def test_missed_kin():
    rows = dict(intrinsic=[0.1], reef=[0.3], pcs=[0.5], ics=[0.2])
    assert verdict(claims.missed_kin, rows, 0.8, *rows) == HOLDS
    assert verdict(claims.missed_kin, rows | dict(pcs=[0.9]), 0.8, *rows) == FAILS


@pytest.mark.parametrize(
    ("taus", "expected"), [([0.02, 0.03], HOLDS), ([0.0, 0.0], FAILS), ([0.02, 0.0], OPEN)]
)
def test_upward_shift(taus, expected):
    rows = dict(mean_tau=taus, stranger_mean_tau=[0.01, 0.01])
    assert verdict(claims.shifted_upward, rows) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.0, 0.009, HOLDS), (0.02, 0.05, FAILS), (0.0, 0.5, OPEN)]
)
def test_false_alarms(low, high, expected):
    assert verdict(claims.false_alarms, dict(rate=[0.005], low=[low], high=[high])) == expected


@pytest.mark.parametrize(
    ("checkpoint", "low", "expected"),
    [("runs/a", 0.1, HOLDS), ("runs/a", -0.1, OPEN), ("tiny_llama@42", 0.1, NONE)],
)
def test_sinks_are_claimed_of_trained_models(checkpoint, low, expected):
    rows = dict(checkpoint=[checkpoint], sink_rate=[0.2], low=[low], high=[0.3])
    assert verdict(claims.sink_heads, rows) == expected


def test_no_sinks():
    assert verdict(claims.no_sinks, dict(sink_rate=[0.0, 0.0])) == HOLDS
    assert verdict(claims.no_sinks, dict(sink_rate=[0.5, 0.4])) == FAILS
    assert verdict(claims.no_sinks, dict(sink_rate=[0.5, 0.0])) == OPEN


@pytest.mark.parametrize(("first", "expected"), [([9.0, 3.0], HOLDS), ([3.0, 4.0], FAILS)])
def test_first_position_stands_out_in_some_layer(first, expected):
    rows = dict(layer=[1, 2] * 3, position=[1, 1, 2, 2, 3, 3], ratio=[*first, 3.5, 4.5, 3.0, 4.2])
    assert verdict(claims.first_stands_out, rows, "ratio") == expected


def test_each_chooses_rows_and_judges_groups_apart():
    rows = [
        dict(stack=stack, layer=n, cosine=sign * n) for stack, sign in (("a", 1), ("b", -1)) for n in range(4)
    ]
    rising = reading("stack", claims.rises, "cosine", "layer").measure
    assert rising(dict(rows=rows)).verdict == FAILS
    assert "stack b: -1 to -3 at layer 1 to 3" in rising(dict(rows=rows)).measured  # layer 0 is the input
    one = reading("stack", claims.rises, "cosine", "layer", stack="a", layer=[1, 3]).measure
    assert one(dict(rows=rows)) == ("1 to 3 at layer 1 to 3", HOLDS)
    assert reading("", claims.rises, "cosine", "layer", stack="c").measure(dict(rows=rows)).verdict == NONE
    summary = reading("", claims.rises, "cosine", "layer", part="summary", stack="a").measure
    assert summary(dict(rows=[], summary=rows)).verdict == HOLDS


def test_entries():
    """An item is named once; what is not run has a command, what is run a function and no command."""
    assert len({claim.item for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.item and claim.says
        assert (claim.result is None) == (claim.judge is None) == bool(claim.command)
        assert not claim.figure or (RESULTS / claim.figure).suffix == ".png"


def test_every_table_and_figure_has_an_entry():
    items = " ".join(claim.item for claim in CLAIMS).replace("Figures 2, 7", "")
    for name in [*(f"Table {n}" for n in ("1a", "1b", "1c", 2, 3, "4a", "4b", "4c", *range(5, 15)))]:
        assert name in items
    for name in [*(f"Figure {n}" for n in ("1a", "1b", *range(2, 15))), "Equation 2", "Footnote 5"]:
        assert name in items
    for name in ("Proposition 2", "Proposition 4", "Proposition 5", "SO: self-mask", "SO: head-wise RMSNorm"):
        assert name in items


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.result], ids=lambda claim: claim.item)
def test_committed_result(claim):
    """Every claim says something of its result, and of what one seed and the least length leave of it."""
    result = read(claim.result)
    if not result:
        pytest.skip(f"results/{claim.result}.json is not there")
    finding = claim.measure(result)
    assert finding.measured
    assert finding.verdict in (HOLDS, FAILS, OPEN, NONE)
    if claim.item.startswith("ours"):
        assert finding.verdict == NONE
    cut = result["rows"]
    for column in ("seed", "sequence_length"):
        if column in cut[0]:
            least = min(row[column] for row in cut)
            cut = [row for row in cut if row[column] == least]
    settings = result["settings"] | dict(seed=[0])
    assert claim.measure(result | dict(rows=cut, settings=settings)).measured
