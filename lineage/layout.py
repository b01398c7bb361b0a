"""Which tensors of a checkpoint are its layers, and which of them may be the language model? (ours)

A *stack* is a run of tensors whose names differ in one number, the layer's, and what stands beside it. Stacks
that may be the language model are judged; others are named. A checkpoint has `shapes` by name, and reads
parts of tensors.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import NamedTuple

from lineage.layers import layer_of
from lineage.names import (
    ADDED,
    EMBEDDINGS,
    LAYER,
    NO_EMBEDDING,
    NUMBER,
    TURNS,
    end_of,
    is_along,
    is_called,
    is_embedding,
    is_lm_head,
    leads_from_images,
    size_of,
    words_of,
)
from lineage.stated import stated_counts, states_mlps
from weights.contents import packed_error

LATE, DEEP = 0.75, 8  # of a depth: its last quarter begins; layers: the first of as many is not in the middle
A_TENTH = 0.1  # of the numbers of a model's layers: what may be another model, or hide a child
MOST_EMBEDDINGS = 3  # that are tried


class Run(NamedTuple):
    """Tensors whose names differ in one number."""

    prefix: str  # what begins their names, up to that number
    width: int  # of the stream
    layers: list  # of each the full names of its tensors by the rest of their names
    count: int  # of numbers in their place, layers or not


class Outside(NamedTuple):
    """What stands beside a stack, outside all layers."""

    embeddings: list  # names of what may be its embedding matrix
    lm_heads: list  # the same of its head
    may_read_tokens: bool
    with_images: bool  # does a convolution, or a matrix of patches, lead to it?
    adapters: list


@dataclass(frozen=True, eq=False)
class Stack:
    """The layers of a model, or of a part of one."""

    model: str  # what it is called
    source: object  # the checkpoint
    prefix: str  # of the names of its tensors
    width: int  # of the stream
    layers: tuple  # lineage.layers.Layer each
    size: int  # numbers in its layers
    embeddings: list
    lm_heads: list
    unread: dict  # what was not looked at: its share of the layers' numbers
    may_have_mlps: bool  # even if none were found?
    may_read_tokens: bool
    may_be_model: bool = False  # the language model
    missing: tuple = ()  # phrases: what of it is said to be elsewhere

    @property
    def lack(self):
        """What was not found of all that neurons are looked for with; "" if nothing."""
        lacks = []
        if not 0 < len(self.embeddings) <= MOST_EMBEDDINGS:
            lacks.append("single embedding matrix")
        if not self.has_mlps:
            lacks.append("MLPs")
        return " and ".join(lacks)

    @property
    def has_mlps(self):
        return any(layer.mlps for layer in self.layers)

    @property
    def has_lone_embedding(self):
        """Has it one matrix of tokens, which no name tells from a head?"""
        is_named = any("emb" in name or is_called(name, EMBEDDINGS) for name in self.embeddings)
        return self.embeddings == self.lm_heads and not is_named

    @property
    def hides(self):
        """May a child hide in what was not looked at?"""
        return "changes of basis" in self.unread or sum(self.unread.values()) > A_TENTH

    def is_middle(self, layer):
        """Does a layer, from 1, stand before the last quarter, and in a deep stack behind the first?"""
        depth = len(self.layers)
        return (layer - 1) / depth < LATE and not (layer == 1 and depth >= DEEP)


def find_stacks(source, model=""):
    """The Stacks of a checkpoint, the larger first; UserError for packed weights alone.

    A stack is a candidate for the language model if
    1. it has MLPs, or no stack has,
    2. it has at least a tenth of the largest such stack's numbers, and
    3. an embedding matrix may feed it, or it is at least as large as the largest stack that one feeds.
    A single layer beside deeper stacks is a draft head, and no candidate by its embedding matrix.
    """
    shapes = source.shapes
    runs = runs_of(shapes)
    outside = dict(shapes)
    for run in runs:
        for names in run.layers:
            for full in names.values():
                del outside[full]
    if not runs:
        widths = [shape[1] for full, shape in outside.items() if is_embedding(full, shape)]
        runs = [Run("", max(widths, default=0), [], 0)]
    stated = stated_counts(source.place)
    stacks = []
    for run in runs:
        stacks.append(stack_of(source, model, run, outside_of(run, runs, outside, stated)))
    if source.packed and not any(stack.has_mlps for stack in stacks):
        raise packed_error(source.place, source.packed)
    stacks.sort(key=lambda stack: stack.size, reverse=True)
    possible = [stack for stack in stacks if stack.has_mlps] or stacks
    deepest = max(len(stack.layers) for stack in possible)
    reading = max((stack.size for stack in possible if stack.embeddings), default=0)
    most_layers = max(run.count for run in runs)
    found = []
    for stack in stacks:
        is_draft = len(stack.layers) == 1 < deepest
        reads = (stack.may_read_tokens and not is_draft) or stack.size >= reading
        is_large = stack.size >= A_TENTH * possible[0].size
        may_be_model = stack in possible and is_large and reads
        missing = missing_of(stack, stated, most_layers)
        found.append(replace(stack, may_be_model=may_be_model, missing=missing))
    return found


def stack_of(source, model, run, beside: Outside):
    """The Stack of a run of layers and what stands beside it."""
    layers = [layer_of(names, source.shapes, run.width) for names in run.layers]
    counts = Counter({"adapters": size_of(beside.adapters, source.shapes)})
    for full, count in source.packed.items():
        if full.startswith(run.prefix):
            counts["packed weights"] += count
    size = counts["packed weights"]
    is_known = False
    for layer in layers:
        size += layer.size
        counts.update(layer.unread)
        is_known = is_known or bool(layer.mlps) or any(layer.unread.values())
    turns = [full for full in source.shapes if full.endswith(TURNS)]
    counts["changes of basis"] = size_of(turns, source.shapes)
    unread = {what: count / max(1, size) for what, count in counts.items() if count}
    may_have_mlps = states_mlps(source.place) or is_known
    may_have_mlps = may_have_mlps and bool(beside.embeddings or not beside.with_images)
    found = (beside.embeddings, beside.lm_heads, unread, may_have_mlps, beside.may_read_tokens)
    return Stack(model, source, run.prefix, run.width, tuple(layers), size, *found)


def missing_of(stack, stated, most_layers):
    """Phrases: how many layers and tokens are here of those that are stated, as in a file of one rank."""
    tokens = max((stack.source.shapes[name][0] for name in stack.embeddings), default=0)
    missing = []
    for count, name in ((most_layers, "layers"), (tokens, "tokens")):
        if 0 < count < (stated[name] or 0):
            missing.append(f"{count:,} of {stated[name]:,} {name} are here")
    return tuple(missing)


def outside_of(run, runs, outside, stated) -> Outside:
    """A run's embedding matrices and heads among what stands outside all layers; and may it read tokens?"""
    fitting = [other for other in runs if other.width == run.width]
    adapters, heads, named, likely, large = [], [], [], [], []
    with_images, most = False, 0
    for full, shape in outside.items():
        nearest = closest(full, runs)
        if nearest == [run] and leads_from_images(full, shape, run.width):
            with_images = True
        if len(shape) > 1 and ADDED.search(full):
            adapters.append(full)
        if len(shape) != 2:
            continue
        if is_embedding(full, shape):
            most = max(most, shape[0])
        if run in nearest and run.width in shape and not is_lm_head(full):
            large.append(max(shape))
        if shape[1] == run.width and run in closest(full, fitting):
            if is_lm_head(full):
                heads.append(full)
            if is_embedding(full, shape):
                named.append(full)
            if is_lm_head(full) or not any(word in end_of(full) for word in NO_EMBEDDING):
                likely.append(full)
    # Where no name tells an embedding matrix, a large one is it; a draft's head has tokens of its own.
    if with_images:
        likely = []
    likely = [full for full in likely if outside[full][0] != stated["draft"]]
    half = max((outside[full][0] for full in likely), default=0) / 2
    likely = [full for full in likely if outside[full][0] >= half]
    embeddings = named or [full for full in likely if full not in heads] or likely  # a tied head
    # Whatever is as large as half of an embedding matrix may be one, however it is stored.
    is_large = max(large, default=0) * 2 >= most and bool(large)
    may_read_tokens = bool(embeddings) or (is_large and not with_images)
    return Outside(embeddings, heads or embeddings, may_read_tokens, with_images, adapters)


def runs_of(shapes):
    """Every Run of a checkpoint: the outermost number in a name that counts layers.

    Where some are called layers, a number before theirs counts models, or stages. If no number counts several
    layers, a number may stand for one, or all tensors may be one.
    """
    numbered = defaultdict(lambda: defaultdict(dict))
    others, widths = {}, Counter()
    for name in sorted(shapes):
        for number in NUMBER.finditer(name):
            rest = name[number.end() :].replace("/", ".")
            numbered[name[: number.start(1)]][int(number[1])][rest] = name
        if is_embedding(name, shapes[name]):
            widths[shapes[name][1]] += 1
        elif not is_lm_head(name):
            others[name] = name
    for least, groups in ((2, numbered), (1, numbered), (1, {"": {0: others}})):
        found = runs_among(groups, least, shapes, widths)
        if found:
            break
    return sorted(found, key=lambda run: run.prefix)


def runs_among(groups, least, shapes, widths):
    """The Runs of at least so many layers among tensors by prefix and number; none has what another has."""
    found, taken = [], set()
    for prefix in sorted(groups, key=lambda prefix: (len(prefix), prefix)):
        group = []  # the tensors of each number, in its order
        has_layers = False
        for _, names in sorted(groups[prefix].items()):
            if taken.isdisjoint(names.values()):
                group.append(names)
                has_layers = has_layers or any(map(LAYER.search, names))
        is_named = LAYER.search(f"{prefix}0.") is not None
        if has_layers and not is_named:
            continue
        width = width_of(shapes, group, widths)
        layers = [names for names in group if is_layer(shapes, names.values(), width)]
        if len(layers) >= least or (is_named and len(layers) == len(group) == 1):
            found.append(Run(prefix, width, layers, len(group)))
            for names in layers:
                taken.update(names.values())
    return found


def width_of(shapes, layers, named_widths):
    """The width of the stream of some layers: a named embedding matrix's, where one fits as many as any.

    Else the axis by which most read and write, and of most numbers. Of matrices those count whose two axes
    are both read and written, as lookup tables' are not.
    """
    linking = Counter()
    for names in layers:
        matrices = [shapes[name] for name in names.values() if len(shapes[name]) in (2, 3)]
        inner = {shape[-2] for shape in matrices} & {shape[-1] for shape in matrices}
        for shape in matrices:
            is_linking = inner.issuperset(shape[-2:])
            linking.update(dict.fromkeys(shape[-2:], is_linking * math.prod(shape)))
    counts = Counter()
    for names in layers:
        counts.update(size for size in linking if is_layer(shapes, names.values(), size))

    def likelihood(size):
        return counts[size], size in named_widths, linking[size], -size

    return max(linking, key=likelihood, default=0)


def is_layer(shapes, names, width):
    """Has a layer of such tensors a matrix that reads the stream, and another one that writes to it?"""
    axes = [shapes[name][-2:] for name in names if is_along(name, shapes[name], width)]
    outputs, inputs = zip(*axes) if axes else ((), ())
    return len(axes) > 1 and width in outputs and width in inputs


def closest(name, runs):
    """The runs that share with a tensor the longest beginning of their names, by words."""
    shared = [len(commonprefix([words_of(name), words_of(run.prefix)])) for run in runs]
    return [run for run, count in zip(runs, shared) if count == max(shared)]
