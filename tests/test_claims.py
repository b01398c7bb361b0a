"""Are claims judged rightly? Rows made by hand for every verdict."""

import numpy as np
import pytest

from reproduce import claims

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
    assert [claims.below(*interval) for interval in ends] == [False, True, None, None, None]


def calibrated(*first):
    """Losses of the runs of two calibrations, of one seed each."""
    names = ["amplify"] * len(first) + ["none"] * len(first)
    losses = [*first, 2.0, 2.1, 2.05][: 2 * len(first)]
    return dict(config="c", seed=[*range(len(first))] * 2, calibration=names, loss=losses)


def by_seeds(theory, seeds):
    return dict(mean_cosine=0.3, seed_std=0.02 * (seeds > 1), theory=[theory], num_seeds=seeds)


PROBED = dict(ratio=3.0, log10_p=0.0)
LENGTHS = dict(sequence_length=[16, 64], top1_count=[60, 5], num_sequences=500)
VARIANTS = dict(variant=["full"] * 3 + ["mlp"] * 3, mean_cosine=[0.0, 0.1, 0.4, 0.1, 0.11, 0.12])
SIZES = dict(variant=["mlp"] * 2 + ["full"] * 2, value=[0.05, 0.05, 0.1, 0.02])
POSITIONS = dict(layer=[1, 2] * 3, position=[1, 1, 2, 2, 3, 3], ratio=[3.0, 4.0, 3.5, 4.5, 3.0, 4.2])
JUDGED = [
    (claims.beyond_chance, PROBED | dict(num_sequences=[1000]), (), OPEN),  # fewer sequences than the paper's
    (claims.beyond_chance, PROBED | dict(num_sequences=[10_000]), (), FAILS),
    (claims.grows_with_length, LENGTHS, (), FAILS),
    (claims.own_favourites, dict(top1_token=[1, 1], log10_p=0.0), (), OPEN),
    (claims.more_often, dict(hit=[True] * 3 + [False] * 5), ("hit", 2e-5), HOLDS),
    (claims.more_often, dict(hit=[False] * 90_000), ("hit", 2e-4), FAILS),
    (claims.widening, VARIANTS, (), FAILS),
    (claims.ordered, SIZES, ("value", "variant", "full", "mlp"), FAILS),
    (claims.within, by_seeds(0.4, 10), (), FAILS),
    (claims.within, by_seeds(0.4, 2), (), HOLDS),  # Student's interval of two is wide
    (claims.within, by_seeds(0.31, 1), (), OPEN),
    (claims.decay, dict(std=[1, 1, 1, 1, 1, 1, 1.1]), (), FAILS),
    (claims.decay, dict(std=[1, 0.7, 0.75, 0.8]), (), HOLDS),  # the octave of position 4 is not full
    (claims.than_none, calibrated(3.0, 3.1, 3.0), ("amplify", "loss", claims.below), FAILS),
    (claims.than_none, calibrated(1.0), ("amplify", "loss", claims.below), OPEN),
    (claims.right_answers, dict(kin=[False, True], paper_t_p=[0.5, 1e-9], paper_u_p=0.005), (), FAILS),
    (claims.right_answers, dict(kin=[False, True], paper_t_p=[0.5, 1e-9], paper_u_p=[0.2, 0]), (), HOLDS),
    (claims.at_most, dict(pcs=[0.9], ics=0.2), (0.8, "pcs", "ics"), FAILS),
    (claims.by_interval, dict(rate=[0.02], low=0.02, high=0.05), ("rate", claims.below, 0.01), FAILS),
    (claims.by_interval, dict(rate=[0.2], low=-0.1, high=0.3), ("rate", claims.above), OPEN),
    (claims.first_stands_out, POSITIONS, ("ratio",), FAILS),
]


@pytest.mark.parametrize(("judge", "table", "arguments", "expected"), JUDGED)
def test_judges(judge, table, arguments, expected):
    assert claims.verdict(judge(rows_of(table), *arguments)[1]) == expected


def test_rows_are_selected_and_judged_apart():
    stacks = []
    for stack, sign in (("a", 1), ("b", -1)):
        stacks += [dict(stack=stack, layer=n, mean_cosine=sign * n) for n in range(4)]
    result = dict(rows=[], summary=stacks, settings=dict(seed=[1, 2]))
    both = claims.Claim("item", "says", "", "name", claims.rises, part="summary", apart="stack")
    text, verdict = both.read(result)
    assert verdict == FAILS and "stack b: -1 to -3 at layer 1 to 3" in text  # 0 is the input
    one = claims.Claim("item", "says", "", "name", claims.rises, part="summary", stack="a", layer=[1, 3])
    assert one.read(result) == ("1 to 3 at layer 1 to 3", HOLDS)
    assert claims.rows_where(result, "summary")[0]["num_seeds"] == 2  # known by the settings
    lacking = claims.Claim("item", "says", "", "name", claims.rises, stack="a")
    assert lacking.read(result) == ("not run here", NONE)
