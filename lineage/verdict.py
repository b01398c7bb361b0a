"""What does the evidence say of two models? A verdict, and a sentence with its reason.

    >>> from lib import checkpoint
    >>> from lineage.verdict import compare_pair, read_model
    >>> sources = [checkpoint.parse_spec(name).open() for name in ("tiny_llama@1", "tiny_llama@2")]
    >>> models = [read_model("one", sources[0]), read_model("other", sources[1])]
    >>> compare_pair(*models)[0]["sentence"]
    'at most 2 of 704 hidden units of a layer were matched, as by chance; a different embedding matrix'

The thresholds are ours, and rest on the real models and children of `reproduce/robustness.py`.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from scipy import stats

from lib.formats import token_ids
from lib.settings import UserError
from lineage import coordinates, parts, stacks
from lineage.bits import are_constant, equal_layers, layers_of
from lineage.match import ModelMatch, best_match
from lineage.views import hidden_units

SAME_BIRTH = "same birth"
NO_EVIDENCE = "no evidence"
INCONCLUSIVE = "inconclusive"
PART_IN_COMMON = "part in common"
VERDICTS = (SAME_BIRTH, PART_IN_COMMON, INCONCLUSIVE, NO_EVIDENCE)  # what says most comes first
REMEDY = "an earlier checkpoint of the suspect, or a common ancestor, would tell"
BASE_SHARE = 0.2  # of a layer's units that are matched, from which on it is the base's anywhere, if
BASE_R = 0.5  # they are matched as strongly as this
MIDDLE_SHARE = 0.5  # the same in the middle of both models, however weakly
LATE = 0.75  # of a stack's depth: the last quarter, in which unrelated models share units
UNRELATED_SHARE = {2: 0.1, 1: 0.2, 0: 0.5}  # from here on undecided, by how many of the two layers are middle
ALIKE_R = 0.1  # correlation with the base's of each of a layer's matrices, from which on it is the base's
FEWEST_UNITS = 16  # that live in a layer of both models: fewer cannot tell
TOKENS_A_DIMENSION = 2  # that two models must share: views of fewer tokens are all alike
CHANCE_LOG10_P = -6.0  # up to here a count is not chance's
UNDECIDED_P = 0.01  # of coordinates alone: up to here a common birth is not ruled out
BESIDE_HEADLESS = 0.1  # of a part that reads tokens without a head: the size of another that may be the model
UNREAD = 0.1  # share of the layers' parameters, from which on what was not looked at may be a child's
TOLD = 0.005  # and from which on it is named
COPY = 1e-3  # up to here a distance is that of rounding, or of little training
ROUNDING = 1e-6  # and up to here of a change of basis, which computes the same
SAME_TABLE, CHANGED_TABLE = 0.99, 0.75  # how alike embedding matrices are, in any basis (0.61: strangers)
WIDE = 1024  # wider models take seconds a layer: fewer are read,
MANY = 64  # as of models with more MLPs, or experts
LAYERS_OF_LARGE_MODELS = 8


def judge(facts):
    """The verdict of two models and its reason: layers that are the base's by any evidence, or a doubt."""
    layers = facts.layers_of_base
    found = [bits_phrase(facts), matched_phrase(facts), alike_phrase(facts)]
    evidence = "; ".join(filter(None, found))
    table = table_phrase(facts)
    if facts.bare:
        return INCONCLUSIVE, f"nothing to compare: {facts.bare}; {table}"
    if len(layers) >= (1 if facts.depth == 1 else 2):
        return SAME_BIRTH, "; ".join([evidence, *changes(facts), table])
    if layers:
        copied = "but no other layer's: one layer may have been copied"
        return INCONCLUSIVE, f"{evidence}, {copied}; {table}; {REMEDY}"
    units = facts.lack or units_phrase(facts)
    body = coordinates_phrase(facts.body) if facts.body else "no layers' matrices of one name and shape"
    if facts.body_agrees:
        few = "but not in every kind of matrix of two layers: a part may have been copied"
        return INCONCLUSIVE, f"{body}, {few}; {units}; {table}; {REMEDY}"
    if facts.lack and (facts.may_hide or facts.body is None or facts.body["p"] <= UNDECIDED_P):
        return INCONCLUSIVE, f"{body}, but a changed basis would hide a child, and {units}"
    if facts.lack:
        return NO_EVIDENCE, f"{body}; a child whose basis was changed would not be seen: {units}"
    if facts.is_between:
        between = "more than unrelated models share there, but fewer, or more weakly, than a child"
        return INCONCLUSIVE, f"{units}: {between}; {table}; {REMEDY}"
    return NO_EVIDENCE, f"{units}{facts.proviso}; {table}"


@dataclass(frozen=True, eq=False)
class Reading:
    """What is read of a part of a model, once, and what of it cannot be seen."""

    part: parts.Part
    units: list  # its Units, by each LayoutHypothesis
    layers: Callable  # -> digests of each layer's matrices, by which equal ones are found
    unread: list  # what in its layers was not looked at, with its share of them
    lacks: list  # what there is not, that hidden units are seen with
    hides: bool  # may a child hide in what was not looked at?
    may_have_units: bool  # that were not found
    bare: str  # what it has in place of layers, if it has none


@dataclass
class Model:
    """What is read of a model before it is compared, by `read_model`."""

    name: str
    source: object
    readings: list  # of its parts; what reads tokens and has a head comes first
    vocabulary: dict  # tokens' numbers by their strings, if a tokenizer tells them


@dataclass
class Facts:
    """What was measured of two models."""

    match: ModelMatch | None  # of hidden units
    body: dict | None = None  # the test of the blocks' coordinates
    embedding: dict | None = None  # and of the embedding matrices'
    layer_r: dict = field(default_factory=dict)  # least correlation of the matrices of two layers, by numbers
    equal: dict = field(default_factory=dict)  # layers that are the base's, bit for bit, and its
    depth: int = 2  # layers of the suspect
    lack: str = ""  # why hidden units cannot tell; "" if they can
    may_hide: bool = True  # may there be hidden units that were not found?
    proviso: str = ""  # that the two models number tokens alike, if that is assumed
    unread: str = ""  # what was not looked at
    bare: str = ""  # what a model without layers has in their place
    have_tables: bool = True  # have both models an embedding matrix?

    @property
    def matches(self):
        """A Match for each MLP of the suspect that was read."""
        return self.match.matches if self.match else []

    @property
    def base_matches(self):
        """Those whose layer is the base's; once there are two, late ones need no strength."""
        found = [match for match in self.matches if is_of_base(match, len(self.matches))]
        if len(distinct(places(found))) > 1:
            found = [match for match in self.matches if match in found or match.share >= MIDDLE_SHARE]
        return found

    @property
    def alike(self):
        """The layers that have the base's numbers, in their own coordinates, and its."""
        return dict(pair for pair, r in self.layer_r.items() if self.body_agrees and r >= ALIKE_R)

    @property
    def layers_of_base(self):
        """The layers that are the base's, by any evidence."""
        return distinct({*self.equal.items(), *self.alike.items(), *places(self.base_matches)})

    @property
    def body_agrees(self):
        return self.body is not None and self.body["same"]

    @property
    def is_between(self):
        """Is more matched in some layer than in layers of unrelated models that stand there?"""
        shared = [match for match in self.matches if beyond_chance(match, len(self.matches))]
        return any(match.share >= UNRELATED_SHARE[middle_layers(match)] for match in shared)

    @property
    def reported_match(self):
        """The match of row and sentence: the least of those that are the base's, else the largest."""
        if self.base_matches:
            return min(self.base_matches, key=lambda match: match.share)
        return max(self.matches, key=lambda match: match.share, default=None)


def read_model(name, source):
    """The Model of a checkpoint; UserError for a vector, read or not by the tests, that is not finite."""
    for parameter, shape in source.shapes.items():
        if len(shape) == 1:
            source.read(parameter)
    vocabulary = {} if source.place is None else token_ids(source.place)  # newborns have no place on the disk
    found = parts.split(source)
    turning = {matrix: source.shapes[matrix] for part in found for matrix in parts.changes_of_basis(part)}
    return Model(name, source, [read_part(name, source, part, turning) for part in found], vocabulary)


def read_part(name, source, part, turning):
    """The Reading of a part of a model of this name, whose changes of basis are `turning`, shapes by name."""
    turned = "changes of basis"
    unread = part.unread | {turned: [each for each in turning if part.width in turning[each][-2:]]}
    counts = {what: sum(math.prod(source.shapes[n]) for n in names) for what, names in unread.items()}
    shares = {what: count / part.size for what, count in counts.items() if part.size}
    told = [f"{what} ({share:.0%} of {name}'s layers)" for what, share in shares.items() if share >= TOLD]
    hides = counts[turned] > 0 or sum(counts.values()) > UNREAD * part.size
    lacks = [f"not all of {name} was looked at"] if hides else []
    if part.missing:
        lacks.append(f"no {part.missing} found in {name}")
    elif stacks.HEAD.search(part.tables[0][0]):  # which is the embedding matrix only if the two are tied
        lacks.append(f"no embedding matrix but a head found in {name}")
    are_named = getattr(source, "names_mlps", False)  # by config.json
    may_have_units = bool(part.mlps or part.unknown or are_named) and part.may_read_tokens
    digests = functools.cache(partial(layers_of, part))
    bare = ""
    if not part.tables and are_constant(digests):
        bare = f"all layers of {name} have the same numbers, as a formula gives"
    if not part.layers:
        what = f": its tensors are called {', '.join([*part.shapes][:3])}"
        if part.tables:
            what = ", but an embedding matrix alone"
        elif not part.shapes:
            what = ", and no weights: is it an optimizer's state, or a schedule?"
        bare = f"{name} has no layers{what}"
    return Reading(part, hidden_units(part), digests, told, lacks, hides, may_have_units, bare)


def compare_pair(base: Model, suspect: Model, seed=0, permutations=9999, units=1024, layers=None):
    """The row of a pair (verdict, sentence, their numbers), and for figures its `layers` and `layer_map`.

    Up to `units` hidden units are looked for in each of up to `layers` layers (None: in all, or in some of
    large models); `seed` is of the permutations. What cannot be had of two models is null in the row.
    """
    findings = {}
    for pair in itertools.product(base.readings, suspect.readings):
        findings[pair] = gather(base, suspect, *pair, seed, permutations, units, layers)
    candidates = language_models(base) + language_models(suspect)
    models = [pair for pair in findings if pair[0] in candidates and pair[1] in candidates]

    doubts = {pair: VERDICTS.index(judge(facts)[0]) for pair, facts in findings.items()}
    closest = []  # pair of each candidate, of which both read tokens, or neither, if there is one
    for candidate in candidates:
        pairs = [pair for pair in models if candidate in pair]
        alike = [(a, b) for a, b in pairs if bool(a.part.tables) == bool(b.part.tables)]
        closest.append(min(alike or pairs, key=doubts.get))
    pair = max(closest, key=doubts.get)  # all must be kin to be of one birth
    facts = findings[pair]
    row = row_of(facts)
    row |= told_of_parts(row, pair, models, findings)
    layer_map = facts.match.layer_map if facts.match else {}
    return row, {"layers": layer_rows(facts), "layer_map": layer_map}


def language_models(model: Model):
    """The parts that may be the model: like the first they read tokens and have a head, or are as large.

    A first part without a head may be a text encoder. Then smaller parts may be the model, too.
    """
    first = model.readings[0].part
    least = first.size if first.has_head else BESIDE_HEADLESS * first.size
    return [each for each in model.readings if each.part.rank == first.rank or each.part.size >= least]


def told_of_parts(row, chosen, models, findings):
    """What a row says of two models with parts, of which `models` are the pairs judged as models."""
    verdict, sentence = row["verdict"], row["sentence"]
    common = [pair for pair, facts in findings.items() if judge(facts)[0] == SAME_BIRTH]
    if len(models) > 1:
        sentence = f"its {title(chosen[1])} and the base's {title(chosen[0])}: {sentence}"
    kin = [theirs for _, theirs in common]
    strange = dict.fromkeys(title(theirs) for _, theirs in findings if theirs not in kin)
    others = dict.fromkeys(title(theirs) for _, theirs in models if theirs != chosen[1])
    if verdict == SAME_BIRTH and others:
        sentence += f"; of one birth, too: its {' and '.join(others)}"
    if verdict == SAME_BIRTH and strange:
        sentence += f"; not seen to be the base's: its {' and '.join(strange)}"
    if verdict == SAME_BIRTH or not common:
        return {"sentence": sentence}
    ours, theirs = max(common, key=lambda pair: pair[1].part.size)
    facts = findings[ours, theirs]
    how = matched_phrase(facts) or alike_phrase(facts) or bits_phrase(facts)
    if len(facts.equal) == facts.depth:
        how = "bit for bit"
    first, *_ = findings.values()
    own = f"{verdict} ({sentence})" if first.have_tables else "not both have one"
    told = f"its {title(theirs)} is the base's {title(ours)}, {how}; the language models: {own}"
    names = {"part": theirs.part.name, "base_part": ours.part.name}
    return {"verdict": PART_IN_COMMON, "sentence": told} | names


def title(reading):
    """A part for a reader: its name, and how many layers it has."""
    depth = len(reading.part.layers)
    return f"`{reading.part.name or '*'}` ({depth} layer{'s' if depth != 1 else ''})"


def gather(base: Model, suspect: Model, base_reading, reading, seed, permutations, units, layers):
    """The Facts of two parts of two models."""
    pair = (base_reading.part, reading.part)
    correlations, layer_r = coordinates.weight_correlations(*pair)
    tests = {}
    for kind, C in correlations.items():
        tests[kind] = coordinates.diagonal_test(C, (kind, seed), permutations)
    match = None
    hypotheses = (base_reading.units, reading.units)
    vocabularies = (base.vocabulary, suspect.vocabulary)
    if all(hypotheses):
        is_large = any(part.width > WIDE or len(part.mlps) > MANY for part in pair)
        limit = layers or (LAYERS_OF_LARGE_MODELS if is_large else None)
        try:
            match = best_match(*hypotheses, vocabularies, units, limit, seed)
        except UserError:  # the numbers of a part's embedding matrix, perhaps: the rest may tell
            if (base_reading, reading) == (base.readings[0], suspect.readings[0]):
                raise
    facts = Facts(match, tests.get("body"), tests.get("embedding"), layer_r)
    facts.equal = equal_layers(base_reading.layers, reading.layers)
    facts.depth = len(reading.part.layers)
    facts.have_tables = all(part.tables for part in pair)
    facts.bare = " and ".join(filter(None, (base_reading.bare, reading.bare)))
    facts.unread = " and ".join(base_reading.unread + reading.unread)
    lacks = base_reading.lacks + reading.lacks
    facts.lack = " and ".join(lacks + lacks_of_match(match, not lacks))
    may_have_units = base_reading.may_have_units and reading.may_have_units
    facts.may_hide = may_have_units or base_reading.hides or reading.hides
    if base.vocabulary and suspect.vocabulary:
        facts.proviso = ", if their tokenizers tell the truth"
    elif base.source.place or suspect.source.place:  # not both are newborns
        facts.proviso = ", if their token numbers mean the same"
    is_one = len(distinct(places(facts.base_matches))) == 1
    if is_one and match.depth > len({each.mlp.layer for each in facts.matches}):  # is it the only one?
        facts.match = best_match(*hypotheses, vocabularies, units, None, seed)
    return facts


def lacks_of_match(match, is_expected):
    """What a ModelMatch lacks to show a child; it may be None, which is told if one `is_expected`."""
    if match is None:
        return ["units cannot be seen through these embedding matrices"] if is_expected else []
    if match.num_tokens < TOKENS_A_DIMENSION * min(match.widths):
        width = f"{min(match.widths):,}"
        return [f"they share {match.num_tokens:,} tokens, too few for a width of {width}"]
    if max(each.units for each in match.matches) < FEWEST_UNITS:
        return [f"no layer has {FEWEST_UNITS} hidden units that live in both models"]
    if all(each.by_chance >= BASE_SHARE * each.units for each in match.matches):
        return ["what units read and write is so alike that chance finds as many as a copy would have"]
    return []


def is_of_base(match, searches):
    """Is a layer of the suspect one of the base's? By its share, and by its strength or its place."""
    if not beyond_chance(match, searches):
        return False
    is_strong = match.share >= BASE_SHARE and match.r >= BASE_R
    return is_strong or (match.share >= MIDDLE_SHARE and middle_layers(match) == 2)


def places(matches):
    """The numbers of the suspect's layer and the base's, from 1, of some matches."""
    return [(match.mlp.layer + 1, match.base_mlp.layer + 1) for match in matches]


def distinct(pairs):
    """Which layers some pairs of layers are: experts of one layer, and copies of one, count once."""
    return min({layer for layer, _ in pairs}, {base_layer for _, base_layer in pairs}, key=len)


def middle_layers(match):
    """How many of a match's two layers stand in the middle of their model, where strangers share little."""
    return sum(not mlp.is_first and mlp.place < LATE for mlp in (match.mlp, match.base_mlp))


def beyond_chance(match, searches):
    """Does chance not explain a count, the best of `searches` layers of both?

    Unrelated models have a Poisson number of matched units, for each of three pairs of views. Its mean is
    below 1, or is what this pair's own null has, if that is larger: ties may make it so.
    """
    log_p = stats.poisson.logsf(match.found - 1, max(1, match.by_chance))
    return (log_p + math.log(3 * searches**2)) / math.log(10) <= CHANCE_LOG10_P


def row_of(facts: Facts):
    """The row of two models: the verdict, its sentence, and the numbers."""
    verdict, sentence = judge(facts)
    if facts.unread:
        sentence += f"; not looked at: {facts.unread}"
    match = facts.reported_match
    body = facts.body or {}
    return {
        "verdict": verdict,
        "sentence": sentence,
        "units": match and match.units,
        "units_found": match and match.found,
        "units_share": match and match.share,
        "r": match and match.r,
        "layer": match and match.mlp.layer + 1,
        "base_layer": match and match.base_mlp.layer + 1,
        "distance": mean_distance(facts.base_matches),
        "body_r": body.get("matched"),
        "body_z": body.get("z"),
        "body_log10_p": body.get("log10_p"),
        "embedding_z": facts.embedding and facts.embedding["z"],
        "table_likeness": facts.match and facts.match.table_likeness,
        "part": None,
        "base_part": None,
    }


def unread_row(error):
    """The row of a suspect that cannot be read: why not, and nothing else."""
    columns = row_of(Facts(None, lack="nothing"))
    return dict.fromkeys(columns) | {"verdict": "not read", "sentence": str(error)}


def layer_rows(facts: Facts):
    """A row for each MLP of the suspect that was looked for."""
    of_base = facts.base_matches
    rows = []
    for match in facts.matches:
        row = {"layer": match.mlp.label, "base_layer": match.base_mlp.label, "found": match.found}
        row |= {"units": match.units, "share": match.share, "r": match.r, "by_chance": match.by_chance}
        rows.append(row | {"distance": match.distance, "is_base": match in of_base})
    return rows


def mean_distance(matches):
    """The mean distance of matched units; None where few were."""
    distances = [match.distance for match in matches if match.distance is not None]
    return float(np.mean(distances)) if distances else None


def bits_phrase(facts: Facts):
    """Which layers are the base's, bit for bit."""
    if not facts.equal:
        return ""
    layers, base_layers = layers_phrase(list(facts.equal)), layers_phrase(list(facts.equal.values()))
    return f"{layers} {'is' if len(facts.equal) == 1 else 'are'} bit for bit the base's {base_layers}"


def matched_phrase(facts: Facts):
    """How many units were matched, and in which layers; of the base's, unless each is in its own place."""
    found, searched = facts.base_matches, facts.matches
    if not found:
        return ""
    least = facts.reported_match
    count, total = (len({match.mlp.layer for match in matches}) for matches in (found, searched))
    layers = "every layer" if len(found) == len(searched) else f"{count} of {total} layers"
    if any(match.units != least.units for match in found):
        here = f"{least.found:,} of {least.units:,} of layer {least.mlp.layer + 1}"
        share = "all" if least.share == 1 else f"at least {least.share:.0%} of the"
        sentence = f"{share} hidden units of {layers} were matched ({here})"
    else:
        sentence = f"{least.found:,} of {least.units:,} hidden units of {layers} were matched"
        if any(match.share != least.share for match in found):
            sentence = f"at least {sentence}"
    if least.r < BASE_R:
        sentence += f", weakly (r = {least.r:.2f})"
    origins = {match.mlp.layer: match.base_mlp.layer for match in found}
    are_in_place = facts.match.has_same_depth and all(here == there for here, there in origins.items())
    if are_in_place and len(origins) > 1:
        return sentence
    return f"{sentence}, in {layers_phrase([layer + 1 for layer in origins.values()])} of the base"


def alike_phrase(facts: Facts):
    """Which layers have the base's numbers, in their own coordinates; told where nothing else shows them."""
    alike = facts.alike
    if alike.keys() <= facts.equal.keys() | {layer for layer, _ in places(facts.base_matches)}:
        return ""
    return f"{coordinates_phrase(facts.body)} in every kind of matrix of {layers_phrase(list(alike))}"


def layers_phrase(numbers):
    """Layers by their numbers: "layers 1-3, 5"."""
    runs = []  # of consecutive ones
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' if len(numbers) != 1 else ''} {', '.join(spans)}"


def units_phrase(facts: Facts):
    """How many units were matched of a suspect that is not seen to be a child, and what that means."""
    largest = facts.reported_match
    count = f"{largest.found:,} of {largest.units:,}"
    if not beyond_chance(largest, len(facts.matches)):
        return f"at most {count} hidden units of a layer were matched, as by chance"
    here = f"{largest.share:.0%} of layer {largest.mlp.layer + 1}, r = {largest.r:.2f}"
    shares = [match.share for match in facts.matches if middle_layers(match) > 0]
    if middle_layers(largest) > 0 or not shares:
        return f"at most {count} hidden units of a layer were matched ({here}), more than by chance"
    which = "the first layers agree" if largest.mlp.is_first else "late layers agree"
    likewise = "" if facts.is_between else ", as those of unrelated models do that learnt the same words"
    return f"{which} ({here}){likewise}; in the middle at most {max(shares):.0%}"


def changes(facts: Facts):
    """What was done to a suspect whose units were matched."""
    found, match = facts.base_matches, facts.match
    if not found:
        return
    if match.widths[0] != match.widths[1]:
        yield "its width is {1:,}, not {0:,}".format(*match.widths)
    if facts.embedding and not facts.embedding["same"] and not facts.body_agrees:
        yield "its residual basis was changed"
    if sum(match.in_place for match in found) < 0.5 * sum(match.found for match in found):
        yield "its hidden units stand in another order"
    far = mean_distance(found)
    if far is not None and far > COPY:
        yield f"what matched units read is at distance {far:.2g}, by training, merging, noise or rounding"
    elif far is not None:
        nearness = f"to {far:.1g}" if far > ROUNDING else "up to rounding"
        yield f"what matched units read is the base's, {nearness}"


def coordinates_phrase(body):
    """How far the coordinates of the blocks' weights agree."""
    if body["same"]:
        numbers = f"correlation {body['matched']:.2g}, z = {body['z']:.0f}"
        return f"coordinates of the blocks' weights agree ({numbers})"
    return f"coordinates of the blocks' weights do not agree (z = {body['z']:.1f})"


def table_phrase(facts: Facts):
    """Is the suspect's embedding matrix the base's, in whatever basis?"""
    if not facts.have_tables:
        return "not both have an embedding matrix"
    likeness = facts.match.table_likeness if facts.match else None
    has_same_coordinates = facts.embedding is not None and facts.embedding["same"]
    if likeness is None and has_same_coordinates:
        likeness = facts.embedding["matched"]
    if likeness is None and facts.match:
        return "too few shared tokens to compare embedding matrices"
    likeness = likeness or 0.0
    if likeness > SAME_TABLE:
        return "the base's embedding matrix"
    # Units are matched as the base's matrix alone shows them.
    if has_same_coordinates or facts.base_matches or likeness > CHANGED_TABLE:
        return "the base's embedding matrix, changed"
    if facts.layers_of_base or facts.match is None:
        return "embedding matrices that were not seen to agree"
    return "a different embedding matrix"
