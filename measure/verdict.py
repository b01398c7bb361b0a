"""What do all tests say of two models? A verdict, and a sentence with its reason.

    >>> from lib import checkpoint
    >>> from measure.verdict import compare_pair, read_model
    >>> sources = [checkpoint.parse_spec(name).open() for name in ("tiny_llama@1", "tiny_llama@2")]
    >>> models = [read_model("one", sources[0]), read_model("other", sources[1])]
    >>> compare_pair(*models)[0]["sentence"]
    'at most 4 of 704 hidden units of a layer found again, as chance has it; its token table is another'

Hidden units decide, where there are any (`measure/census.py`): no change of basis or order hides them, and a
copied token table does not give them. Where a model has none, coordinates of the blocks' weights do
(`measure/lineage.py`). "No evidence" is a claim, too: it is made where a child would have been seen. The
thresholds are ours.
"""

import math
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from scipy import stats

from lib import parts
from lib.checkpoint import final_states
from lib.folders import token_ids
from measure import lineage
from measure.census import Units, best_census, readings
from measure.lineage import SAME_LOG10_P

UNDECIDED_P = 0.01  # up to here a common birth is not ruled out
SAME_BIRTH = "same birth"
NO_EVIDENCE = "no evidence"
INCONCLUSIVE = "inconclusive"
KIN_SHARE = 0.2  # of a layer's hidden units found again: from here on it is the base's
STRANGERS_SHARE = 0.1  # of a layer's units: strangers that learn one text reach 0.062
FEWEST_UNITS = 16  # that live in a layer of both models: fewer cannot tell kin from strangers
TOKENS_A_DIMENSION = 2  # that two models must share: views of fewer tokens are all alike
COPY = 1e-3  # up to here a distance is that of rounding, or of little training
SAME_TABLE, CHANGED_TABLE = 0.99, 0.5  # how alike token tables are, in any basis
WIDE = 2048  # wider models are large: a census takes half a minute a layer, or more,
MANY = 64  # and so are models with more MLPs, or experts
LAYERS_OF_LARGE_MODELS = 8  # that are looked at


@dataclass
class Model:
    """A model as it is compared: name, source of weights, and final states, if it is ours."""

    name: str
    source: object
    units: list  # its hidden units, by each reading of its weights
    vocabulary: dict  # tokens' numbers by their strings, if a tokenizer tells them
    states: torch.Tensor | None


def read_model(name, source, tokens=None, device="cpu", dtype=torch.float32):
    """The Model of a source; its final states, of tokens (n, T), only if `model.py` is it."""
    states = None
    if source.config is not None and tokens is not None:
        states = lineage.fingerprint(final_states(source, tokens, device, dtype).flatten(0, 1))
    units = [Units(source, reading) for reading in readings(source)]
    place = getattr(source, "place", None)  # a newborn has none
    return Model(name, source, units, {} if place is None else token_ids(place), states)


def compare_pair(base: Model, suspect: Model, seed=0, permutations=9999, units=1024, layers=None):
    """A pair's row, and what is behind it: the census, its map of layers, and correlations.

    Up to `units` hidden units are looked for in each of up to `layers` layers (None: in all, or in a few of
    large models); `seed` is of the permutations. What cannot be had of two models is null in the row.
    """
    correlations = lineage.weight_correlations(base.source, suspect.source)
    if base.states is not None and suspect.states is not None and base.source.width == suspect.source.width:
        correlations["relabel"] = lineage.relation(base.states, suspect.states)
    tests = {kind: lineage.diagonal_test(C, (kind, seed), permutations) for kind, C in correlations.items()}
    census = None
    if base.units and suspect.units:
        readers = (base.units[0], suspect.units[0])
        is_large = any(reader.width > WIDE or len(reader.parts.mlps) > MANY for reader in readers)
        usual = LAYERS_OF_LARGE_MODELS if is_large else max(len(reader.layers) for reader in readers)
        vocabularies = (base.vocabulary, suspect.vocabulary)
        census = best_census(base.units, suspect.units, vocabularies, units, layers or usual, seed)
    answer, sentence = verdict(tests, census, *power(base, suspect, census))
    row = {"verdict": answer, "sentence": sentence, "units": None, "units_found": None, "units_share": None}
    detail = {"layers": [], "layer_map": {}, "points": []}
    if census:
        told = told_match(answer, census.matches)
        row |= {"units": told.units, "units_found": told.found, "units_share": told.share}
        detail["layers"] = [asdict(match) | {"share": match.share} for match in census.matches]
        detail["layer_map"] = census.layer_map
    row["distance"] = mean_distance(census) if answer == SAME_BIRTH else None
    row["num_rows"] = len(base.states) if "relabel" in tests else None
    for kind, prefix in (("relabel", ""), ("body", "body_"), ("embedding", "embedding_")):
        test = tests.get(kind, {})
        for name in ("matched", "mismatched", "smallest_visible"):
            row[prefix + name] = test.get(name)
        for name in ("z", "log10_p", "p"):
            row[f"{kind}_{name}"] = test.get(name)
    row["permutation_p"] = row["relabel_p"]
    if "body" in correlations:
        detail["points"] = lineage.histogram(correlations["body"])
    return row, detail


def power(base: Model, suspect: Model, census):
    """Could a child have been seen? Here, and nowhere else, it is decided what "no evidence" takes.

    Returns what hidden units lacked ("" if nothing), whether both models have MLPs or matrices that may be
    some, and on what equal tokens rest.
    """
    lacks = []
    has_mlps = True
    for model in (base, suspect):
        found = parts.find(model.source)
        has_mlps = has_mlps and bool(found.mlps or found.unknown)
        if found.missing:
            lacks.append(f"no {found.missing} found in {model.name}")
    if census and census.num_tokens < TOKENS_A_DIMENSION * min(census.widths):
        lacks.append(
            f"they share {census.num_tokens:,} tokens, too few for a width of {min(census.widths):,}"
        )
    elif census and max(match.units for match in census.matches) < FEWEST_UNITS:
        lacks.append(f"no layer has {FEWEST_UNITS} hidden units that live in both models")
    elif census and not beyond_chance([replace(match, found=match.units) for match in census.matches]):
        lacks.append("what units read and write is so alike that chance finds as many as a copy would have")
    proviso = ""
    if base.vocabulary and suspect.vocabulary:
        proviso = ", if their tokenizers tell the truth"
    elif any(getattr(model.source, "place", None) for model in (base, suspect)):  # not both are newborns
        proviso = ", if their token numbers mean the same"
    return " and ".join(lacks), has_mlps, proviso


def verdict(tests, census, lack="", has_mlps=True, proviso=""):
    """The verdict, and its reason, of the tests by name that were made, a Census, if any, and its `power`."""
    if census and judge_units(census.matches) == SAME_BIRTH:
        return SAME_BIRTH, "; ".join([found_again(census), *changes(tests, census)])
    if lack:
        are_dead = census is None or all(match.units == 0 for match in census.matches)
        return verdict_of_coordinates(tests.get("body"), lack, has_mlps, are_dead)
    told = told_match(NO_EVIDENCE, census.matches)
    count = f"at most {told.found:,} of {told.units:,} hidden units of a layer found again"
    table = f"its token table is {table_of(tests, census)}"
    if judge_units(census.matches) == INCONCLUSIVE:
        return INCONCLUSIVE, (
            f"{count}: more than chance has it, fewer than a child of the base would have; {table}; "
            "a common ancestor, or an earlier checkpoint of the suspect, would tell"
        )
    agreeing = {kind for kind, test in tests.items() if test["same"]}
    if "body" in agreeing:
        return INCONCLUSIVE, (
            f"{effect(tests['body'])}, but {count}; {table}. Such are children whose token table or MLPs "
            "were drawn anew, and strangers trained on a copied table; an earlier checkpoint would tell"
        )
    if "relabel" in agreeing and "embedding" not in agreeing:
        return INCONCLUSIVE, (
            f"final states agree, but {count}; {table}: the suspect may have learnt the base's states; "
            "an earlier checkpoint of it would tell"
        )
    if beyond_chance(census.matches):
        count += ", more than chance has it, but no more than strangers come to share if they learn one text"
    else:
        count += ", as chance has it"
    copied = "" if table.endswith("another") else ", which can be copied"
    return NO_EVIDENCE, f"{count}{proviso}; {table}{copied}"


def verdict_of_coordinates(body, lack, has_mlps, are_dead):
    """The verdict where hidden units cannot tell: they are missing, or `are_dead`, or were not looked for."""
    if body is None:
        return INCONCLUSIVE, f"nothing to compare: no matrices of one name and shape, and {lack}"
    if body["same"] and are_dead:
        return SAME_BIRTH, f"{effect(body)}; hidden units were not looked for: {lack}"
    if body["same"] or body["p"] <= UNDECIDED_P:
        return INCONCLUSIVE, f"{effect(body)}, but hidden units do not say the same: {lack}"
    nothing = f"coordinates of the blocks' weights do not agree (z = {body['z']:.1f})"
    if has_mlps:
        return INCONCLUSIVE, f"{nothing}, but a changed basis would hide a child, and {lack}"
    return NO_EVIDENCE, (
        f"{nothing}; a correlation of {body['smallest_visible']:.1g} would have been seen, a child whose "
        f"basis was changed would not: {lack}"
    )


# ---- units -------------------------------------------------------------------------------------------------


def judge_units(matches):
    """The verdict of a census: kin from KIN_SHARE of a layer's units on.

    There is no evidence if chance explains every count, or if none reaches STRANGERS_SHARE.
    """
    largest = max([match.share for match in beyond_chance(matches)], default=0)
    if largest >= KIN_SHARE:
        return SAME_BIRTH
    return INCONCLUSIVE if largest >= STRANGERS_SHARE else NO_EVIDENCE


def beyond_chance(matches):
    """The matches whose counts chance does not explain."""
    return [match for match in matches if chance_log10_p(match, len(matches)) <= SAME_LOG10_P]


def chance_log10_p(match, searches):
    """log10 of the chance that strangers have as many units as a match, or more, in the best of many counts.

    Each of three pairs of views counts a Poisson number of units, in each of `searches` layers of both. Its
    mean is the expected one, or the count of this pair's own null, if that is larger: ties may make it so.
    """
    log_p = stats.poisson.logsf(match.found - 1, max(match.expected, match.by_chance))
    return min(0.0, (log_p + math.log(3 * searches**2)) / math.log(10))


def told_match(answer, matches):
    """The match that the row and the sentence tell: the least of those found again, else the largest."""
    if answer != SAME_BIRTH:
        return max(matches, key=lambda match: match.share)
    found = [match for match in matches if match.share >= KIN_SHARE]
    return min(found or matches, key=lambda match: match.share)


# ---- sentences ---------------------------------------------------------------------------------------------


def effect(body):
    """How far the coordinates of the blocks' weights agree."""
    numbers = f"correlation {body['matched']:.2g}, z = {body['z']:.0f}"
    return f"coordinates of the blocks' weights agree ({numbers})"


def found_again(census):
    """How many units were found, and in which layers; of the base's, unless each is in its own place."""
    matches = census.matches
    found = [match for match in matches if match.share >= KIN_SHARE]
    least = told_match(SAME_BIRTH, matches)
    is_least = all(match.share == least.share for match in found)
    layers = "every layer" if len(found) == len(matches) else f"{len(found)} of {len(matches)} layers"
    sentence = (
        f"{'' if is_least else 'at least '}{least.found:,} of {least.units:,} hidden units of {layers} "
    )
    sentence += "found again"
    origins = {match.number: match.base_number for match in found}
    if census.has_same_depth and all(match.number == match.base_number for match in found):
        return sentence
    runs = []  # of consecutive layers
    for number in origins.values():
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    plural = "s" if len(origins) > 1 else ""
    return f"{sentence}, in layer{plural} {', '.join(spans)} of the base"


def changes(tests, census):
    """What was done to a suspect whose units were found again."""
    found = [match for match in census.matches if match.share >= KIN_SHARE]
    body, embedding = tests.get("body"), tests.get("embedding")
    if census.widths[0] != census.widths[1]:
        yield "its width is {1:,}, not {0:,}".format(*census.widths)
    if embedding and not embedding["same"] and not (body and body["same"]):
        yield "its residual basis was changed"
    elif body and body["same"] and len(found) < len(census.matches):
        yield effect(body)
    if sum(match.in_place for match in found) < 0.5 * sum(match.found for match in found):
        yield "its hidden units stand in another order"
    far = mean_distance(census)
    if far is not None and far > COPY:
        yield f"its weights are at a distance of {far:.2g}, by training, merging, noise or rounding"
    elif far is not None:
        yield f"its weights are the base's, to {far:.1g}"
    yield "its token table is the base's" + ("" if census.tables > SAME_TABLE else ", changed")


def mean_distance(census):
    """The mean distance of the units found again; None where few were."""
    distances = [match.distance for match in census.matches if match.distance is not None] if census else []
    return float(np.mean(distances)) if distances else None


def table_of(tests, census):
    """Is the suspect's token table the base's, in whatever basis, or its coordinates?"""
    if census.tables > SAME_TABLE:
        return "the base's"
    has_same_coordinates = "embedding" in tests and tests["embedding"]["same"]
    return "the base's, changed" if has_same_coordinates or census.tables > CHANGED_TABLE else "another"
