"""Are claims judged rightly? Rows made by hand for every verdict; then the committed results."""

import functools

import numpy as np
import pytest
from conftest import ROOT

from lib.files import read_json
from reproduce import claims
from reproduce.claims import CLAIMS

HOLDS, FAILS, OPEN, NONE = "holds", "does not hold", "open", ""


def rows_of(table: dict) -> list[dict]:
    """The rows of a table of columns; a single value is every row's."""
    length = max(np.size(values) for values in table.values())
    columns = {name: np.resize(np.array(values, object), length).tolist() for name, values in table.items()}
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def test_one_rule_for_every_verdict():
    assert claims.verdict([True, np.True_]) == HOLDS
    assert claims.verdict([True, None, np.False_]) == FAILS
    assert claims.verdict([True, None]) == OPEN
    assert claims.verdict([]) == NONE
    ends = [(0.1, 0.2), (-0.2, -0.1), (-0.1, 0.2), (0.0, 0.0), (float("nan"), float("nan"))]
    assert [claims.above(*interval) for interval in ends] == [True, False, None, None, None]


def probed(log10_p, num_sequences):
    return dict(num_sequences=[num_sequences], ratio=3.0, log10_p=log10_p)


def by_length(*counts):
    return dict(sequence_length=[16, 64], top1_count=counts, num_sequences=500)


def by_variant(*full):
    return dict(layer=[1, 2, 3] * 2, variant=["full"] * 3 + ["mlp"] * 3, mean_cosine=[*full, 0.1, 0.11, 0.12])


def by_size(*full):
    return dict(seed=[1, 2] * 2, variant=["mlp"] * 2 + ["full"] * 2, value=[0.05, 0.05, *full])


def calibrated(*first):
    """Losses of the runs of two calibrations, of one seed each."""
    names = ["amplify"] * len(first) + ["none"] * len(first)
    return dict(
        seed=[*range(len(first))] * 2, calibration=names, loss=[*first, *[2.0, 2.1, 2.05][: len(first)]]
    )


def by_octave(*std):
    return dict(position=range(1, len(std) + 1), std=std)


def by_position(*first):
    """Ratios of two layers at the first position, beside those at two others."""
    return dict(layer=[1, 2] * 3, position=[1, 1, 2, 2, 3, 3], ratio=[*first, 3.5, 4.5, 3.0, 4.2])


def by_seeds(theory, seeds):
    return dict(mean_cosine=0.3, seed_std=0.02 * (seeds > 1), theory=[theory], num_seeds=seeds)


BY_SIZE = ("value", "seed", "variant", "full", "mlp")
LOWER = ("amplify", "none", "loss")
JUDGED = [
    (claims.preference, probed(-5.0, 100), (), HOLDS),
    (claims.preference, probed(0.0, 1000), (), OPEN),  # fewer sequences than the paper's
    (claims.preference, probed(0.0, 10_000), (), FAILS),
    (claims.grows_with_length, by_length(60, 5), (), FAILS),
    (claims.own_favourites, dict(top1_token=[1, 2], log10_p=-5.0), (), HOLDS),
    (claims.own_favourites, dict(top1_token=[1, 1], log10_p=0.0), (), OPEN),
    (claims.own_favourites, dict(top1_token=[1], log10_p=-5.0), (), OPEN),
    (claims.same_token, dict(model="nano_gpt2", a=[1] * 8, b=[1] * 3 + [2] * 5), ("a", "b"), HOLDS),
    (claims.same_token, dict(model="tiny_gpt2", a=[1] * 90_000, b=2), ("a", "b"), FAILS),
    (claims.widening, by_variant(0.1, 0.2, 0.4), (), HOLDS),  # layer 1 does not count
    (claims.widening, by_variant(0.0, 0.1, 0.4), (), FAILS),
    (claims.ordered, by_size(-0.1, -0.5), BY_SIZE, HOLDS),
    (claims.ordered, by_size(0.1, 0.02), BY_SIZE, FAILS),
    (claims.within, by_seeds(0.4, 10), ("theory",), FAILS),
    (claims.within, by_seeds(0.4, 2), ("theory",), HOLDS),  # Student's interval of two is wide
    (claims.within, by_seeds(0.31, 1), ("theory",), OPEN),
    (claims.decay, by_octave(1, 1, 1, 1, 1, 1, 1.1), (), FAILS),
    (claims.decay, by_octave(1, 0.7, 0.75, 0.8), (), HOLDS),  # the octave of position 4 is not full
    (claims.lower, calibrated(3.0, 3.1, 3.0), LOWER, FAILS),
    (claims.lower, calibrated(None, None, None), LOWER, OPEN),
    (claims.lower, calibrated(1.0), LOWER, OPEN),
    (claims.above_zero, dict(tau=[0.5, 0.51, 0.52]), ("tau",), HOLDS),
    (claims.right_answers, dict(kin=[False, True], paper_t_p=[0.5, 1e-9], paper_u_p=0.005), (), FAILS),
    (claims.right_answers, dict(kin=[False, True], paper_t_p=[0.5, 1e-9], paper_u_p=[0.2, 0]), (), HOLDS),
    (claims.right_answers, dict(paper_t_p=[1e-9], paper_u_p=[1e-3]), (), HOLDS),  # checkpoints: all kin
    (claims.missed_kin, dict(pcs=[0.9], ics=[0.2]), ("pcs", "ics"), FAILS),
    (claims.shifted_upward, dict(mean_tau=[0.02, 0.0], stranger_mean_tau=0.01), (), FAILS),
    (claims.false_alarms, dict(rate=[0.005], low=[0.02], high=[0.05]), (), FAILS),
    (claims.sink_heads, dict(checkpoint=["runs/a"], sink_rate=0.2, low=-0.1, high=0.3), (), OPEN),
    (claims.no_sinks, dict(sink_rate=[0.5, 0.0]), (), FAILS),
    (claims.first_stands_out, by_position(3.0, 4.0), ("ratio",), FAILS),
]


@pytest.mark.parametrize(("judge", "table", "arguments", "expected"), JUDGED)
def test_judges(judge, table, arguments, expected):
    """In whatever order rows come."""
    rows = rows_of(table)
    for ordered in (rows, rows[::-1]):
        assert claims.verdict(judge(ordered, *arguments)[1]) == expected


def test_rows_are_chosen_and_judged_apart():
    rows = []
    for stack, sign in (("a", 1), ("b", -1)):
        rows += [dict(stack=stack, layer=n, cosine=sign * n) for n in range(4)]
    result = dict(rows=[], summary=rows, settings={})
    columns = ("cosine", "layer")
    read = functools.partial(claims.read_rows, claims.rises, columns, result, part="summary", apart="stack")
    text, judged = read()
    assert judged == FAILS and "stack b: -1 to -3 at layer 1 to 3" in text  # layer 0 is the input
    assert read(stack="a", layer=[1, 3]) == ("1 to 3 at layer 1 to 3", HOLDS)
    assert read(stack="c") == ("not run here", NONE)
    by_settings = dict(rows=rows_of(by_seeds(0.4, 2)), settings=dict(seed=[1, 2]))
    del by_settings["rows"][0]["num_seeds"]  # known by the settings
    assert claims.read_rows(claims.within, ("theory",), by_settings)[1] == HOLDS


def test_committed_results():
    """Every claim says something of its result."""
    for claim in CLAIMS:
        if claim.result is not None:
            text, judged = claim.read(read_json(ROOT / f"results/{claim.result}.json"))
            assert text != "not run here" and judged in (HOLDS, FAILS, OPEN, NONE), claim.item
