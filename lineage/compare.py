"""Are two models of one birth? Look at bits, coordinates and neurons, and judge. (ours)

A row gives how many neurons (hidden units of an MLP) were matched, `units_found` of `units`, and their median
correlation `r`. `lineage/judge.py` has the rules for the verdict.
"""

import functools
import hashlib
import itertools
import sys
from dataclasses import dataclass, replace
from typing import Literal

from init import SCHEMES
from lib.results import HUB_COMMITS, Experiment
from lib.runtime import progress, rank
from lib.settings import Names, OutputSettings, UserError, at_least
from lineage.align import embeddings_to_read, layers_to_read, likeliest_alignment, match_again, match_layers
from lineage.bits import equal_layers, experts_by_layer, is_copy, same_numbers
from lineage.coordinates import compare_coordinates, embedding_pairs
from lineage.judge import INCONCLUSIVE, NO_EVIDENCE, SAME_BIRTH, VERDICTS, Evidence, findings_of
from lineage.layout import find_stacks
from lineage.partners import find_partners
from lineage.samples import sample_of, samples_of
from lineage.wording import COLUMNS, row_of
from sources.checkpoint import find_model
from weights.vocabulary import token_ids

VERDICT_COLUMNS = ("suspect", "verdict", "units_found", "units", "r", "distance", "body_z", "embedding_z")
FEW, MANY = 256, 1024  # directions that neurons are seen in: at first, and where these do not decide


@dataclass
class CompareSettings(OutputSettings):
    """The settings of `compare` and `matrix`."""

    models: Names = ()  # BASE and SUSPECTs: names on the Hub, folders, files, PRESET@SEED
    init: Literal[SCHEMES] = "gpt2"  # initialization of PRESET@SEED
    layers: at_least(1) = 8  # evenly spaced layers of the suspect whose neurons are matched
    units_per_layer: at_least(2) = 1024  # neurons to match in each layer
    neurons: bool = False  # match them even where bits and coordinates tell every layer
    status: bool = False  # exit with 10 for same birth, 11 for inconclusive, 12 for no evidence; else with 0


STATUS = {SAME_BIRTH: 10, INCONCLUSIVE: 11, NO_EVIDENCE: 12}  # of several suspects the least


class Model:
    """One side of a comparison: a checkpoint, and its stacks of layers."""

    def __init__(self, name, source):
        """Reading a vector raises UserError if it is not finite."""
        for parameter, shape in source.shapes.items():
            if len(shape) == 1:
                source.read(parameter)
        self.name = name
        self.source = source
        self.stacks = find_stacks(source, name)

    @functools.cached_property
    def vocabulary(self):
        """Tokens' numbers by their strings, if a tokenizer tells them."""
        return token_ids(self.source.place) if self.source.place else {}


def compare_models(base: Model, suspect: Model, settings: CompareSettings):
    """The row of two checkpoints (verdict, sentence, numbers), and for figures its `layers` and `layer_map`.

    Every stack of one that may be its language model is compared with every such stack of the other, and
    keeps its best verdict. If these differ, the answer is inconclusive. Other parts are compared by their
    bits, and named.
    """
    candidates = [[stack for stack in model.stacks if stack.may_be_model] for model in (base, suspect)]
    compared = []  # (Stack of the base, Stack of the suspect, row, details)
    for ours, theirs in itertools.product(*candidates):
        compared.append((ours, theirs, *compare_stacks(ours, theirs, base, suspect, settings)))
    compared.sort(key=lambda pair: VERDICTS.index(pair[2]["verdict"]))
    closest = {}  # by what is compared with what, the best pair of each candidate
    for stack in candidates[1] + candidates[0]:
        pair = next(pair for pair in compared if stack in pair[:2])
        closest[f"`{pair[1].prefix}*` and the base's `{pair[0].prefix}*`"] = pair
    names = [*closest]
    row, details = closest[names[0]][2:]
    row = dict(row)
    if len(names) > 1:
        row["sentence"] = f"its {names[0]}: {row['sentence']}"
    if len({pair[2]["verdict"] for pair in closest.values()}) > 1:
        said = [f"{name}: {pair[2]['verdict']}: {pair[2]['sentence']}" for name, pair in closest.items()]
        row |= {"verdict": INCONCLUSIVE, "sentence": f"its parts differ: {'; '.join(said)}"}
    for stack in suspect.stacks:
        if not stack.may_be_model:
            equal = [other.prefix for other in base.stacks if is_copy(stack, other)]
            how = f"begins bit for bit as the base's `{equal[0]}*`" if equal else "was not looked at"
            row["sentence"] += f"; its `{stack.prefix}*` {how}"
    return row, details


def compare_stacks(base_stack, suspect_stack, base, suspect, settings):
    """The row of two stacks, and details. Neurons are looked for where the rest leaves a layer open."""
    evidence = Evidence(base_stack, suspect_stack, bare=why_bare(base_stack, suspect_stack))
    fetch_first(base_stack, suspect_stack)
    partners = find_partners(base_stack, suspect_stack)
    fetch_samples(base_stack, suspect_stack, partners)
    coordinates = compare_coordinates(base_stack, suspect_stack, partners)
    equal, has_equal = equal_layers(base_stack, suspect_stack, partners)
    evidence = replace(evidence, coordinates=coordinates, equal=equal, has_equal=has_equal)
    is_told = all(layer.ground for layer in findings_of(evidence).layers)
    if settings.neurons or not (evidence.bare or is_told):
        evidence = with_neurons(evidence, (base.vocabulary, suspect.vocabulary), settings)
    return row_of(findings_of(evidence))


def why_bare(*stacks):
    """What models have in place of layers that could tell a birth; "" if they have some."""
    reasons = []
    for stack in stacks:
        if not stack.layers:
            first = ", ".join([*stack.source.shapes][:3]) or "nothing: is it an optimizer's state?"
            found = "an embedding matrix alone" if stack.embeddings else first
            reasons.append(f"{stack.model} has no layers, but {found}")
        elif not stack.embeddings and same_numbers(stack):
            reasons.append(f"all layers of {stack.model} have the same numbers, as a formula gives")
    return " and ".join(reasons)


def with_neurons(evidence: Evidence, vocabularies, settings) -> Evidence:
    """Evidence with neurons looked for: in few directions, and in many where these leave a doubt."""
    stacks = (evidence.base, evidence.suspect)
    fetch_neurons(*stacks, settings.layers)
    alignment, lack = likeliest_alignment(*stacks, vocabularies, FEW, settings.layers)
    if alignment is None:
        return replace(evidence, lack=lack)
    matches, layer_map = match_layers(alignment, settings.layers, settings.units_per_layer)
    more = {"layer_map": layer_map, "num_tokens": alignment.num_tokens, "likeness": alignment.likeness}
    evidence = replace(evidence, matches=matches, **more)
    if not findings_of(evidence).is_kin:
        evidence = replace(evidence, matches=match_again(alignment, matches, MANY, settings.units_per_layer))
    has_lone = [stack.has_lone_embedding for stack in stacks]
    if has_lone[0] != has_lone[1] and all(stack.lm_heads == stack.embeddings for stack in stacks):
        evidence = replace(evidence, lack="an embedding matrix is compared with what may be a head")
    return evidence


# ---- what is fetched together from the Hub -----------------------------------------------------------------


def fetch_first(*stacks):
    """Expect what tells which layers and experts correspond: the routers."""
    for stack in stacks:
        stack.source.expect((layer.router, ()) for layer in stack.layers if layer.router)


def fetch_samples(base, suspect, partners):
    """Expect the rows of matrices that bits and coordinates compare."""
    for side, stack in enumerate((base, suspect)):
        experts = experts_by_layer(partners, side)
        samples = []
        for number, layer in enumerate(stack.layers, start=1):
            samples += samples_of(layer, stack.source.shapes, stack.width, experts.get(number)).values()
        for names in embedding_pairs(base, suspect):
            samples.append(sample_of(names[side], stack.source.shapes[names[side]]))
        stack.source.expect((sample.name, part) for sample in samples for part in sample.parts)


def fetch_neurons(base, suspect, limit):
    """Expect the matrices of neurons, and embedding matrices."""
    stacks = (base, suspect)
    for stack, layers, names in zip(stacks, layers_to_read(*stacks, limit), embeddings_to_read(*stacks)):
        names = {*names}
        for layer in layers:
            for mlp in stack.layers[layer - 1].mlps:
                if mlp.number is None or mlp.index is not None:
                    names.update(mlp.matrices.values())
        stack.source.expect((name, ()) for name in names)


# ---- commands ----------------------------------------------------------------------------------------------


def compare(settings: CompareSettings):
    """Does each suspect share its initialization with the base? Takes 5 s for a pair of 135M parameters.

    A suspect that cannot be read gets the verdict `not read`; the others are compared; the exit status is 2.
    For every other verdict it is 0, unless --status asks for one by verdict.
    """
    base_name, *names = settings.models
    base = open_model(base_name, settings)
    experiment = Experiment("compare", "BB 6.1", settings)
    rows, details, unread, models = [], [], [], [base]
    for name in progress(names, desc="suspects"):
        try:
            suspect = open_model(name, settings)
            models.append(suspect)
            row, detail = compare_models(base, suspect, settings)
        except UserError as error:
            row = dict.fromkeys(COLUMNS.split()) | {"verdict": "not read", "sentence": str(error)}
            detail = {"layers": [], "layer_map": {}}
            unread.append(error)
        rows.append({"base": base_name, "suspect": name} | row)
        details.append(detail)
    if len(unread) == len(names):
        raise unread[0]
    more = {key: [detail[key] for detail in details] for key in ("layers", "layer_map")}
    result = experiment.save(rows, VERDICT_COLUMNS, models=[filed(model) for model in models], **more)
    if rank() == 0:
        for row in rows:
            print(f"{row['suspect']}: {row['verdict']}: {row['sentence']}")
    if unread:
        raise UserError(f"{len(unread)} of {len(names)} suspects not read: {unread[0]}")
    if settings.status:
        sys.exit(min(STATUS[row["verdict"]] for row in rows))
    return result


def filed(model: Model):
    """What a verdict rests on: a model's revision on the Hub, its files, and what was read of them.

    `sha256` is that of the tensors, or parts of tensors, that were read, in the order of reading, as they are
    stored (those in FP8 and of .gguf as float32); `bytes_read` is how many bytes these are.
    """
    source = model.source
    files = {path.name: path.stat().st_size for path in source.files}
    read = {"bytes_read": source.bytes_read, "sha256": source.digest.hexdigest()}
    return {"name": model.name, "revision": HUB_COMMITS.get(model.name), "files": files} | read


def matrix(settings: CompareSettings):
    """Which of several models share an initialization? All pairs, heat map, family tree (BB Table 4)."""
    from lineage.family import draw_family  # matplotlib takes half a second to import

    models = [open_model(name, settings) for name in settings.models]
    experiment = Experiment("matrix", "BB Table 4", settings)
    pairs = progress([*itertools.combinations(models, 2)], desc="matrix", unit=" pairs")
    rows = [{"a": a.name, "b": b.name} | compare_models(a, b, settings)[0] for a, b in pairs]
    result = experiment.save(rows, ("a", "b", *VERDICT_COLUMNS))
    draw_family(experiment.folder / "matrix.png", models, rows)
    return result


def open_model(name, settings: CompareSettings):
    """The Model that a name stands for, of any architecture; UserError if it cannot be read."""
    source = find_model(name, settings.init, weights_alone=True).weights
    source.digest = hashlib.sha256()
    source.expect((name, ()) for name, shape in source.shapes.items() if len(shape) == 1)
    return Model(name, source)
