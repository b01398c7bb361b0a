"""What do the tests of two models say together? A verdict, and a sentence with its reason.

    >>> from measure.verdict import verdict
    >>> row = {"number": 1, "base_number": 1, "base_layer": "layer 1", "found": 2, "units": 704}
    >>> verdict({}, [row | {"share": 2 / 704, "expected": 1, "by_chance": 0}])
    ('no evidence', 'at most 2 of 704 hidden units of a layer found again, as chance has it')

Hidden units decide, where there are any (`measure/census.py`): no change of basis or order hides them, and a
copied token table does not give them. Else coordinates of the blocks' weights do (`measure/lineage.py`). The
thresholds are ours.
"""

import math

from scipy import stats

from measure.lineage import SAME_LOG10_P

UNDECIDED_P = 0.01  # up to here a common birth is not ruled out
SAME_BIRTH = "same birth"
NO_EVIDENCE = "no evidence"
INCONCLUSIVE = "inconclusive"
KIN_SHARE = 0.2  # of a layer's hidden units found again: from here on it is the base's
STRANGERS_SHARE = 0.1  # of a layer's units: strangers that learn one text reach 0.062


def verdict(tests, rows, layer_map=None, missing=""):
    """The verdict, and its reason, of the tests by name that were made and of what a census returned.

    Without rows, `missing` says why units could not be looked for.
    """
    if rows:
        return verdict_of_units(tests, rows, layer_map)
    return verdict_of_coordinates(tests.get("body"), missing)


def verdict_of_units(tests, rows, layer_map):
    """The verdict where hidden units were looked for."""
    judged = judge_units(rows)
    if judged == SAME_BIRTH:
        return SAME_BIRTH, f"{found_again(rows)} found again{where(rows, layer_map)}"
    most = max(rows, key=lambda row: row["share"])
    count = f"at most {most['found']:,} of {most['units']:,} hidden units of a layer found again"
    if judged == INCONCLUSIVE:
        return INCONCLUSIVE, f"{count}: more than chance has it, fewer than a child of the base would have"
    agreeing = {kind for kind, test in tests.items() if test["same"]}
    if "body" in agreeing:
        return INCONCLUSIVE, (
            f"{effect(tests['body'])}, but {count}. Such are children whose token table or MLPs were drawn "
            "anew, and strangers trained on a copied table; an earlier checkpoint of the suspect would tell"
        )
    if "relabel" in agreeing and "embedding" not in agreeing:
        return INCONCLUSIVE, f"final states agree, but {count}: the suspect may have learnt the base's states"
    if beyond_chance(rows):
        count += ", more than chance has it, but no more than strangers come to share if they learn one text"
    else:
        count += ", as chance has it"
    if "embedding" in agreeing:
        count += "; the token table is the base's, but can be copied"
    return NO_EVIDENCE, count


def verdict_of_coordinates(body, missing):
    """The verdict where only the weights' coordinates could be compared."""
    if body is None:
        return INCONCLUSIVE, f"nothing to compare: no matrices of one name and shape, and {missing}"
    if body["same"]:
        return SAME_BIRTH, f"{effect(body)}; hidden units were not looked for: {missing}"
    if body["p"] <= UNDECIDED_P:
        return INCONCLUSIVE, f"{effect(body)}: too much for chance, too little for a child of the base"
    return NO_EVIDENCE, (
        f"coordinates of the blocks' weights do not agree (z = {body['z']:.1f}); a correlation of "
        f"{body['smallest_visible']:.1g} would have been seen"
    )


def effect(body):
    """How far the coordinates of the blocks' weights agree."""
    numbers = f"correlation {body['matched']:.2g}, z = {body['z']:.0f}"
    return f"coordinates of the blocks' weights agree ({numbers})"


# ---- units -------------------------------------------------------------------------------------------------


def judge_units(rows):
    """The verdict of a census: kin from KIN_SHARE of a layer's units on.

    There is no evidence if chance explains every count, or if none reaches STRANGERS_SHARE.
    """
    largest = max([row["share"] for row in beyond_chance(rows)], default=0)
    if largest >= KIN_SHARE:
        return SAME_BIRTH
    return INCONCLUSIVE if largest >= STRANGERS_SHARE else NO_EVIDENCE


def beyond_chance(rows):
    """The rows whose counts chance does not explain."""
    return [row for row in rows if chance_log10_p(row, len(rows)) <= SAME_LOG10_P]


def chance_log10_p(row, searches):
    """log10 of the chance that strangers have as many units as a row, or more, in the best of many counts.

    Each of three pairs of views counts a Poisson number of units, in each of `searches` layers of both. Its
    mean is the expected one, or the count of this pair's own null, if that is larger: ties may make it so.
    """
    log_p = stats.poisson.logsf(row["found"] - 1, max(row["expected"], row["by_chance"]))
    return min(0.0, (log_p + math.log(3 * searches**2)) / math.log(10))


def found_again(rows):
    """How many units were found, and in which layers."""
    found = [row for row in rows if row["share"] >= KIN_SHARE]
    least = min(found, key=lambda row: row["share"])
    is_least = all(row["share"] == least["share"] for row in found)
    count = f"{'' if is_least else 'at least '}{least['found']:,} of {least['units']:,} hidden units"
    layers = "every layer" if len(found) == len(rows) else f"{len(found)} of {len(rows)} layers"
    return f"{count} of {layers}"


def where(rows, layer_map):
    """Which layers of the base the units of the suspect's layers are from; "" if each is in its own place."""
    origins = {row["number"]: row["base_number"] for row in rows if row["share"] >= KIN_SHARE}
    has_same_depth = len(layer_map["base_layers"]) == len(layer_map["suspect_layers"])
    if has_same_depth and origins == {row["number"]: row["number"] for row in rows}:
        return ""
    runs = []  # of consecutive layers
    for number in origins.values():
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f", in layers {', '.join(spans)} of the base"
