"""Which layers of a suspect are the base's, and what follows? (ours)

A layer is the base's on the first of these *grounds* that holds:

    bits         its matrices, or all of its MLPs', begin bit for bit as those of one layer of the base
    neurons      chance does not explain how many are matched, and share and r are those of BASE_SHARE and
                 BASE_R, or the share is HALF in the middle of both models; once two layers are, a late one
                 needs no strength
    coordinates  its own agree as chance does not; and each of its matrices with its partner by ALIKE_R

Two layers, or the only one of a model, are a common birth. What is said is in `lineage/wording.py`.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import gammainc

from lineage.coordinates import CHANCE_LOG10_P, Coordinates

SAME_BIRTH = "same birth"
NO_EVIDENCE = "no evidence"
INCONCLUSIVE = "inconclusive"
VERDICTS = (SAME_BIRTH, INCONCLUSIVE, NO_EVIDENCE)  # of several pairs of a stack the first of these counts
# On which measurement each number rests: results/robustness.json, unless another place is named. Models that
# never met share up to 35 % of a layer (r below 0.32), before the last quarter of their depth 5 %; children
# have at least 93 %, and r above 0.65 if not pruned to a tenth.
BASE_SHARE, BASE_R = 0.2, 0.5  # of a layer's neurons that are matched, and how strongly
HALF = 0.5  # of a layer's neurons: more than chance or late layers of strangers share
UNRELATED_SHARE = (HALF, BASE_SHARE, 0.1)  # by how many of two layers are in the middle
DOUBTFUL = 0.25  # of that share: from here on a second look is worth its time
UNDECIDED_P = 0.01  # of coordinates alone, which no such pair has: a common birth is not ruled out
FEWEST_NEURONS = 16  # that live in a layer of both models: chance finds half of so many once in 10^7 layers
FEWEST_TOKENS = 2  # for each dimension, that two models must share: embeddings of fewer are all alike


@dataclass(frozen=True)
class NeuronMatch:
    """How many neurons of a layer of the suspect, from 1, are matched in the base's layer that has most."""

    layer: int
    closest: int  # the base's layer
    num_middle: int  # of the two layers: in the middle of their models strangers share little
    found: int  # neurons matched
    units: int  # that could be: those read that live, in the layer with fewer
    r: float  # the median strength of those matched
    by_chance: int  # matched after the basis is permuted: this pair's own null
    in_place: int = 0  # of those matched: they stand where they stood
    is_beyond_chance: bool = False  # the count
    is_base: bool = False  # are these the base's neurons?

    @property
    def share(self):
        return self.found / max(1, self.units)

    @property
    def is_doubtful(self):
        """Is more matched than chance explains, though not as of the base, and a fair part of what tells?"""
        is_much = self.share >= DOUBTFUL * UNRELATED_SHARE[self.num_middle]
        return self.is_beyond_chance and is_much and not self.is_base

    @property
    def is_above_strangers(self):
        """Is more matched than in layers of unrelated models that stand there?"""
        return self.is_beyond_chance and self.share >= UNRELATED_SHARE[self.num_middle]


@dataclass(frozen=True)
class Evidence:
    """All that is found of two stacks."""

    base: object  # lineage.layout.Stack
    suspect: object
    coordinates: Coordinates = Coordinates()
    equal: dict = field(default_factory=dict)  # by the suspect's layer: the base's layer of the same bits
    has_equal: bool = False  # are any matrices of two layers equal?
    matches: tuple = ()  # NeuronMatches of layers whose neurons were looked for
    layer_map: dict = field(default_factory=dict)  # `share`, by layers of the `base` and of the `suspect`
    num_tokens: int = 0  # that they share
    likeness: float | None = None  # of the embeddings, in any basis: 1 of a copy; None: too few tokens
    bare: str = ""  # what models without layers have in their place
    lack: str = ""  # why no alignment of them could be compared


@dataclass(frozen=True)
class LayerEvidence:
    """A layer of the suspect, from 1."""

    layer: int
    ground: str = ""  # the first on which this layer is the base's; "" if none holds,
    base_layer: int | None = None  # and the layer that it is
    r: float | None = None  # the median strength of matches, or the least correlation of its matrices
    distance: float | None = None  # of its matrices from their partners: 0 of a copy
    match: NeuronMatch | None = None


@dataclass(frozen=True)
class Findings:
    """What follows for each layer, and for the two stacks."""

    evidence: Evidence
    layers: list  # LayerEvidence of each of the suspect's
    is_kin: bool  # are two layers the base's, or the only one of a model?
    lack: str  # why neurons cannot tell the two apart; "" if they can

    def on(self, ground):
        """The layers that are the base's on a ground."""
        return [layer for layer in self.layers if layer.ground == ground]

    @property
    def has_base(self):
        return any(layer.ground for layer in self.layers)

    @property
    def with_neurons(self):
        """The matches whose neurons are the base's."""
        return [match for match in self.evidence.matches if match.is_base]

    @property
    def is_above_strangers(self):
        return any(match.is_above_strangers for match in self.evidence.matches)

    @property
    def distance(self):
        """The mean of layers that are the base's; None where coordinates do not tell it."""
        distances = [each.distance for each in self.layers if each.ground and each.distance is not None]
        return float(np.mean(distances)) if distances else None

    @property
    def most_matched(self):
        """The match of most neurons; None if none were looked for."""
        return max(self.evidence.matches, key=lambda match: match.share, default=None)

    @property
    def decisive(self):
        """The layer that counts: the least that is the base's, by neurons if any are, else one with most."""
        if self.with_neurons:
            least = min(self.with_neurons, key=lambda match: match.share)
            return self.layers[least.layer - 1]
        alike = [each for each in self.layers if each.ground and each.r is not None]
        if alike:
            return min(alike, key=lambda each: each.r)
        return self.layers[self.most_matched.layer - 1] if self.most_matched else None


def chance_log10_p(match, searches):
    """log10 p of a count, the best of `searches` layers of both.

    Unrelated models have a Poisson number of matched neurons, for each of three pairs of views. Its mean is
    below 1, or is what this pair's own null has, if that is larger: ties may make it so.
    """
    log_p = math.log(max(1e-300, gammainc(match.found, max(1, match.by_chance))))
    return (log_p + math.log(3 * max(1, searches) ** 2)) / math.log(10)


def marked(matches):
    """The NeuronMatches of a pair, each with whether chance explains it, and whether it is the base's."""
    found = []
    for match in matches:
        is_beyond_chance = match.found > 0 and chance_log10_p(match, len(matches)) <= CHANCE_LOG10_P
        is_strong = match.share >= BASE_SHARE and match.r >= BASE_R
        is_middle_one = match.share >= HALF and match.num_middle == 2
        is_base = is_beyond_chance and (is_strong or is_middle_one)
        found.append(replace(match, is_beyond_chance=is_beyond_chance, is_base=is_base))
    if distinct([(match.layer, match.closest) for match in found if match.is_base]) < 2:
        return tuple(found)
    late = []  # needs no strength now
    for match in found:
        is_late = match.is_beyond_chance and match.share >= HALF
        late.append(replace(match, is_base=match.is_base or is_late))
    return tuple(late)


def distinct(pairs):
    """How many layers some pairs of layers are: copies of one count once."""
    return min(len({layer for layer, _ in pairs}), len({base_layer for _, base_layer in pairs}))


def findings_of(evidence: Evidence) -> Findings:
    """What the evidence says of each layer of the suspect, and of the two stacks."""
    matches = {match.layer: match for match in evidence.matches}
    alike_layers = evidence.coordinates.layers or {}
    is_scaled = evidence.base.source.is_scaled and evidence.suspect.source.is_scaled
    layers = []
    for number in range(1, len(evidence.suspect.layers) + 1):
        match, alike = matches.get(number), alike_layers.get(number)
        ground, base_layer = "", match.closest if match else None
        if number in evidence.equal:
            ground, base_layer = "bits", evidence.equal[number]
        elif match and match.is_base:
            ground = "neurons"
        elif alike and alike.is_base:
            ground, base_layer = "coordinates", alike.base_layer
        r, distance = match.r if match else None, None
        if ground and alike and alike.is_base and alike.base_layer == base_layer:
            r = match.r if match else alike.least_r
            distance = alike.distance if is_scaled else None
        layers.append(LayerEvidence(number, ground, base_layer, r, distance, match))
    told = [(layer.layer, layer.base_layer) for layer in layers if layer.ground]
    fewest = min(2, len(evidence.base.layers), len(evidence.suspect.layers))
    return Findings(evidence, layers, 0 < fewest <= distinct(told), why_neurons_cannot_tell(evidence))


def why_neurons_cannot_tell(evidence):
    """Why neurons cannot tell two stacks apart; "" if they can."""
    lacks, matches = [evidence.lack], evidence.matches
    for stack in (evidence.base, evidence.suspect):
        lacks.append(f"not all of {stack.model} was looked at" if stack.hides else "")
        lacks.append(f"no {stack.lack} found in {stack.model}" if stack.lack else "")
    width = min(evidence.base.width, evidence.suspect.width)
    if matches and evidence.num_tokens < FEWEST_TOKENS * width:
        lacks.append(f"they share {evidence.num_tokens:,} tokens, too few for a width of {width:,}")
    elif matches and max(match.units for match in matches) < FEWEST_NEURONS:
        lacks.append(f"no layer has {FEWEST_NEURONS} neurons that live in both models")
    elif matches and all(match.by_chance >= BASE_SHARE * match.units for match in matches):
        lacks.append("what neurons read and write is so alike that chance finds as many as a copy would have")
    return " and ".join(filter(None, lacks))


def rule_of(findings: Findings):
    """The verdict, and the name of the rule that gives it: of these the first that holds."""
    evidence = findings.evidence
    body = evidence.coordinates.body
    stacks = (evidence.base, evidence.suspect)
    is_part = any(stack.missing for stack in stacks)
    if evidence.bare:
        return INCONCLUSIVE, "bare"
    if findings.is_kin:
        return SAME_BIRTH, "kin"
    if findings.has_base:
        return INCONCLUSIVE, "one layer"
    if body and body.agrees:
        return INCONCLUSIVE, "some coordinates"
    if evidence.has_equal:
        return INCONCLUSIVE, "some bits"
    if findings.lack:
        may_hide = any(stack.hides for stack in stacks) or all(stack.may_have_mlps for stack in stacks)
        is_undecided = may_hide or is_part or body is None or body.p <= UNDECIDED_P
        return INCONCLUSIVE if is_undecided else NO_EVIDENCE, "no neurons"
    if findings.is_above_strangers:
        return INCONCLUSIVE, "too many neurons"
    if is_part:
        return INCONCLUSIVE, "part"
    return NO_EVIDENCE, "none"
