"""measure/verdict.py: every combination of evidence, and the sentences that a user reads."""

import itertools

import pytest
import scipy.stats

from measure.verdict import INCONCLUSIVE, NO_EVIDENCE, SAME_BIRTH, chance_log10_p, verdict

TESTS = ("body", "embedding", "relabel")
OUTCOMES = {
    "same": {"same": True, "p": 1e-4, "z": 250.0, "matched": 0.7, "smallest_visible": 0.004},
    "between": {"same": False, "p": 1e-3, "z": 3.1, "matched": 0.002, "smallest_visible": 0.004},
    "nothing": {"same": False, "p": 0.5, "z": 0.1, "matched": 0.0, "smallest_visible": 0.004},
}
STRENGTH = {NO_EVIDENCE: 0, INCONCLUSIVE: 1, SAME_BIRTH: 2}


def census(*counts, units: int = 704, base_layers=None) -> list[dict]:
    """Rows of layers in which so many units were found."""
    rows = []
    for number, count in enumerate(counts, start=1):
        base_layer = base_layers[number - 1] if base_layers else number
        row = {"number": number, "base_number": base_layer, "base_layer": "", "expected": 1.0}
        rows.append(row | {"found": count, "units": units, "share": count / units, "by_chance": 1})
    return rows


LAYERS = {"base_layers": range(1, 4), "suspect_layers": range(1, 4)}
CENSUSES = {
    "none": [],
    "nothing": census(1, 4, 0),
    "learnt": census(44, 4, 0),
    "some": census(1, 100, 2),
    "kin": census(704, 3, 690),
}


def answer(units: str, outcomes: dict) -> str:
    """The verdict alone; a test of None was not made."""
    tests = {name: OUTCOMES[outcome] for name, outcome in outcomes.items() if outcome}
    judged, sentence = verdict(tests, CENSUSES[units], LAYERS, "no MLPs found in B")
    assert sentence and "\n" not in sentence
    return judged


def combinations():
    """What the three tests of coordinates may say together; each may be missing."""
    for outcomes in itertools.product([None, *OUTCOMES], repeat=3):
        yield dict(zip(TESTS, outcomes))


def test_units_decide_wherever_they_were_looked_for():
    for outcomes in combinations():
        assert answer("kin", outcomes) == SAME_BIRTH
        assert answer("some", outcomes) == INCONCLUSIVE
        tied = outcomes["relabel"] == "same" and outcomes["embedding"] != "same"
        disagrees = outcomes["body"] == "same" or tied
        for units in ("nothing", "learnt"):
            assert answer(units, outcomes) == (INCONCLUSIVE if disagrees else NO_EVIDENCE), outcomes


def test_coordinates_of_weights_decide_elsewhere():
    expected = {None: INCONCLUSIVE, "same": SAME_BIRTH, "between": INCONCLUSIVE, "nothing": NO_EVIDENCE}
    for outcomes in combinations():
        assert answer("none", outcomes) == expected[outcomes["body"]], outcomes


@pytest.mark.parametrize("units", CENSUSES)
def test_more_likeness_of_blocks_never_weakens_a_verdict(units):
    for outcomes in combinations():
        words = ("nothing", "between", "same")
        strengths = [STRENGTH[answer(units, outcomes | {"body": word})] for word in words]
        assert strengths == sorted(strengths), outcomes


@pytest.mark.parametrize(
    "rows, tests, said",
    [
        (census(704, 704), {}, "704 of 704 hidden units of every layer found again"),
        (census(704, 698), {}, "at least 698 of 704 hidden units of every layer found again"),
        (census(704, 3), {}, "704 of 704 hidden units of 1 of 2 layers found again"),
        (
            census(704, 704, base_layers=(1, 4)),
            {},
            "every layer found again, in layers 1, 4 of the base",
        ),
        (census(2, 1), {}, "at most 2 of 704 hidden units of a layer found again, as chance has it"),
        (census(2, 1), {"embedding": "same"}, "can be copied"),
        (census(25, 1), {}, "at most 25 of 704 hidden units of a layer found again, more than chance has it"),
        (census(2, 1), {"body": "same"}, "an earlier checkpoint of the suspect would tell"),
        (census(2, 40), {}, "at most 40 of 704"),
        ([], {"body": "same"}, "correlation 0.7, z = 250"),
        ([], {"body": "nothing"}, "a correlation of 0.004 would have been seen"),
        ([], {}, "no MLPs found in B"),
    ],
)
def test_sentences(rows, tests, said):
    depth = rows[-1]["base_number"] if rows else 0
    layer_map = {"base_layers": range(1, depth + 1), "suspect_layers": range(1, len(rows) + 1)}
    outcomes = {name: OUTCOMES[word] for name, word in tests.items()}
    _, sentence = verdict(outcomes, rows, layer_map, "no MLPs found in B")
    assert said in sentence


def test_chance_is_poisson_over_all_counts():
    row = census(7)[0]
    expected = scipy.stats.poisson.sf(6, 1) * 3 * 4**2  # three pairs of views, four layers with four
    assert 10 ** chance_log10_p(row, 4) == pytest.approx(expected, rel=1e-9)
    assert chance_log10_p(census(0)[0], 4) == 0
    assert chance_log10_p(row | {"by_chance": 704}, 4) == 0  # ties explain it
    # A small MLP's few units are no birth: 7 of 32 are 22 %, but chance has them once in 250 comparisons
    assert verdict({}, census(7, 1, 0, 2, units=32))[0] == NO_EVIDENCE
