"""Which tensors of a checkpoint are its layers, and what is each of them? (ours)

A *stack* is a run of tensors whose names differ in one number, the layer's, and what stands beside it. Stacks
that may be the language model are judged; others are named. What a layer's matrices are, their shapes tell,
and names where shapes leave a choice. A checkpoint has `shapes` by name, and reads parts of tensors.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import NamedTuple

from torch import Tensor

from lineage.stated import stated_counts, states_mlps
from weights.contents import packed_error

NUMBER = re.compile(r"(?<!\d)(\d{1,9})[./_]")  # in a name: of a layer, or an expert
EXPERT = re.compile(r"([^.]+)\.(?:weight)?(\d+)$")  # whose number comes last
LAYER = re.compile(r"(?:^|[._/])(?:layers?|h|blocks?)[._/]?\d{1,9}[._/]")  # where layers are called so
# Masks are called attn.bias, and unrelated models share rotary tables
NO_WEIGHTS = re.compile(r"(?:\.bias|attn\.masked_bias|scales?|inv_freq|freqs_cis|(?:cos|sin)(?:_cached)?)$")
ATTENTION = re.compile(r"(?i)attn|attention|(?:^|\.)(?:[qkvo]_proj|[qkv]_lin|out_lin|to_(?:[qkv]+|out))\b")
ADDED = re.compile(r"(?i)(?:^|[._])(?:lora|vera|svd|dora|ia3|loha|lokr|hada)(?:[._]|$)")  # to a matrix
TABLES = set("embed_tokens wte word_embedding word_embeddings embed_in tok_embeddings shared".split())
TABLES |= {"embedding", "embeddings"}
HEADS = {"lm_head", "lm_heads", "embed_out", "output"}
NO_TABLES = ("pos", "wpe", "type", "patch", "proj", "score", "class", "pool", "kernel")  # in no table's name
WRITING = set("down_proj w2 wo Wo W_out c_proj fc2 fc_out lin2 dense_4h_to_h output.dense".split())  # MLPs'
WRITERS = WRITING | set("o_proj out_proj out_lin self_attention.dense attention.dense".split())
WRITERS |= {"SelfAttention.o", "EncDecAttention.o"}
TURNS = "_shortcut_Q"  # SliceGPT's changes of basis end so
PIECE, VARIED = 16, 60  # numbers side by side; how many such pieces must differ, as no mask's do
BATCH = 4096  # numbers, or rows, of a matrix that are looked at together
LATE, DEEP = 0.75, 8  # of a depth: its last quarter begins; layers: the first of as many is not in the middle
A_TENTH = 0.1  # of the numbers of a model's layers: what may be another model, or hide a child
MOST_TABLES = 3  # that are tried
UNGATED = {"up", "down"}  # the matrices of an MLP without a gate
OF_ATTENTION = 4  # matrices that a layer without an MLP has


class MLP(NamedTuple):
    """An MLP of a layer, or one of its experts: the names of its matrices by role."""

    matrices: dict  # gate, up, down, or gate_up and down, or up and down
    is_named: bool  # does a name, or a gate, tell which matrix writes? If not, this is a guess
    expert: int | None  # its number in a stack of experts


@dataclass(eq=False)
class Stack:
    """The layers of a model, or of a part of one: tensors whose names differ in one number."""

    prefix: str  # what begins their names, up to that number
    width: int  # of the stream
    layers: list  # of each the full names of its tensors by the rest of their names
    count: int = 0  # of numbers in their place, layers or not
    model: str = ""  # what it is called
    source: object = None  # the checkpoint
    size: int = 0  # numbers in its layers
    mlps: list = field(default_factory=list)  # of each layer its MLPs, or experts
    tables: list = field(default_factory=list)  # names of what may be its embedding matrix
    heads: list = field(default_factory=list)  # the same of its head
    matrices: dict = field(default_factory=dict)  # along the stream, by (layer, rest of name); None: tables
    unread: dict = field(default_factory=dict)  # what was not looked at: its share of the layers' numbers
    missing: list = field(default_factory=list)  # phrases: what of it is said to be elsewhere
    may_read_tokens: bool = False
    may_have_mlps: bool = False  # even if none were found?
    may_be_model: bool = False  # the language model

    @property
    def lack(self):
        """What was not found of all that neurons are looked for with; "" if nothing."""
        found = {"single embedding matrix": 0 < len(self.tables) <= MOST_TABLES, "MLPs": any(self.mlps)}
        return " and ".join(name for name in found if not found[name])

    @property
    def has_lone_table(self):
        """Has it one matrix of tokens, which no name tells from a head?"""
        return self.tables == self.heads and not any("emb" in n or is_called(n, TABLES) for n in self.tables)

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
    stacks = runs_of(shapes)
    inside = {full for stack in stacks for names in stack.layers for full in names.values()}
    outside = {full: shape for full, shape in shapes.items() if full not in inside}
    widths = [shape[1] for full, shape in outside.items() if is_table(full, shape)]
    stacks = stacks or [Stack("", max(widths, default=0), [])]
    for stack in stacks:
        stack.model, stack.source = model, source
        find_layers(stack)
        find_tables(stack, stacks, outside)
    if source.packed and not any(any(stack.mlps) for stack in stacks):
        raise packed_error(source.place, source.packed)
    stacks.sort(key=lambda stack: stack.size, reverse=True)
    possible = [stack for stack in stacks if any(stack.mlps)] or stacks
    stated = stated_counts(source.place)
    deepest = max(len(stack.layers) for stack in possible)
    reading = max((stack.size for stack in possible if stack.tables), default=0)
    for stack in possible:
        reads = stack.may_read_tokens and not len(stack.layers) == 1 < deepest
        stack.may_be_model = stack.size >= A_TENTH * possible[0].size and (reads or stack.size >= reading)
        rows = max((shapes[name][0] for name in stack.tables), default=0)
        for count, name in ((max(stack.count for stack in stacks), "layers"), (rows, "tokens")):
            if 0 < count < (stated[name] or 0):  # as in a file of one rank, or stage
                stack.missing.append(f"{count:,} of {stated[name]:,} {name} are here")
    return stacks


def find_layers(stack):
    """Find a Stack's MLPs and matrices, and what of its layers cannot be looked at."""
    source, shapes = stack.source, stack.source.shapes
    packed = sum(count for full, count in source.packed.items() if full.startswith(stack.prefix))
    sizes = {full: math.prod(shape) for full, shape in shapes.items()}
    stack.size = packed + sum(sizes[full] for names in stack.layers for full in names.values())
    stack.may_have_mlps = states_mlps(source.place)
    without, products = [], []
    added = {full for full, shape in shapes.items() if len(shape) > 1 and ADDED.search(full)}
    for layer, names in enumerate(stack.layers, start=1):
        for owner in {rest.removesuffix("weight") for rest in names if rest.endswith(".weight")}:
            own = (f"{owner}weight", f"{owner}bias")
            below = [rest for rest in names if rest.startswith(owner) and not rest.startswith(own)]
            added |= {names[rest] for rest in below if len(shapes[names[rest]]) > 1}  # it changes that matrix
        names = {rest: full for rest, full in names.items() if full not in added}
        kept = {EXPERT.sub(r"\2.\1", rest.replace(".base_layer", "")): full for rest, full in names.items()}
        mlps, others, is_product = mlps_of_layer(shapes, kept, stack.width)
        if not mlps:
            (products if is_product else without).extend(others)
        stack.layers[layer - 1] = kept
        stack.mlps.append(mlps)
        stack.may_have_mlps |= bool(others)
        along = {rest: full for rest, full in kept.items() if is_matrix(full, shapes[full], stack.width)}
        stack.matrices |= {(layer, rest): full for rest, full in along.items()}
    unread = {"layers without an MLP that can be read": without, "MLPs stored as products": products}
    unread |= {"changes of basis": [full for full in shapes if full.endswith(TURNS)], "adapters": added}
    counts = {what: sum(map(sizes.get, names)) for what, names in unread.items()} | {"packed weights": packed}
    stack.unread = {what: count / max(1, stack.size) for what, count in counts.items() if count}


def find_tables(stack, stacks, outside):
    """Find a Stack's tables and heads among what stands outside all layers; and may it read tokens?"""
    beside = {full: shape for full, shape in outside.items() if stack in closest(full, stacks)}
    own = [full for full in beside if closest(full, stacks) == [stack]]
    with_images = any(leads_from_images(full, outside[full], stack.width) for full in own)
    fitting = [other for other in stacks if other.width == stack.width]
    tall = [full for full, shape in outside.items() if len(shape) == 2 and shape[1] == stack.width]
    tall = [full for full in tall if stack in closest(full, fitting)]
    heads = [full for full in tall if is_head(full)]
    likely = [full for full in tall if full in heads or not any(word in end_of(full) for word in NO_TABLES)]
    half = max((outside[full][0] for full in likely), default=0) / 2
    likely = [full for full in likely if outside[full][0] >= half and not with_images]
    named = [full for full in tall if is_table(full, outside[full])]
    stack.tables = named or [full for full in likely if full not in heads] or likely  # a tied head
    stack.heads = heads or stack.tables
    stack.matrices |= {(None, end_of(full)): full for full in stack.tables + stack.heads}
    most = max((shape[0] for full, shape in outside.items() if is_table(full, shape)), default=0)
    large = [full for full, shape in beside.items() if len(shape) == 2 and stack.width in shape]
    large = [full for full in large if 2 * max(beside[full]) >= most and not is_head(full)]  # however stored
    stack.may_read_tokens = bool(stack.tables or (large and not with_images))
    stack.may_have_mlps &= bool(stack.tables or not with_images)


def runs_of(shapes):
    """Every run of a checkpoint, as a Stack: the outermost number in a name that counts layers.

    Where some are called layers, a number before theirs counts models, or stages. If no number counts several
    layers, a number may stand for one, or all tensors may be one.
    """
    numbered = defaultdict(lambda: defaultdict(dict))
    for name in sorted(shapes):
        for number in NUMBER.finditer(name):
            rest = name[number.end() :].replace("/", ".")
            numbered[name[: number.start(1)]][int(number[1])][rest] = name
    others = {name: name for name, shape in shapes.items() if not is_table(name, shape) and not is_head(name)}
    for least, groups in ((2, numbered), (1, numbered), (1, {"": {0: others}})):
        found, taken = [], set()
        for prefix in sorted(groups, key=lambda prefix: (len(prefix), prefix)):
            group = {n: names for n, names in groups[prefix].items() if taken.isdisjoint(names.values())}
            is_named = LAYER.search(f"{prefix}0.") is not None
            if not is_named and any(LAYER.search(rest) for names in group.values() for rest in names):
                continue
            width = width_of(shapes, group.values())
            layers = [group[n] for n in sorted(group) if is_layer(shapes, group[n].values(), width)]
            if len(layers) >= least or (is_named and len(layers) == len(group) == 1):
                found.append(Stack(prefix, width, layers, len(group)))
                taken |= {name for names in layers for name in names.values()}
        if found:
            break
    return sorted(found, key=lambda stack: stack.prefix)


def width_of(shapes, layers):
    """The width of the stream of some layers: the axis by which most read and write, and of most numbers.

    Of matrices those count whose two axes are both read and written, as lookup tables' are not.
    """
    linking = Counter()
    for names in layers:
        matrices = [shapes[name] for name in names.values() if len(shapes[name]) in (2, 3)]
        inner = {shape[-2] for shape in matrices} & {shape[-1] for shape in matrices}
        for shape in matrices:
            is_linking = inner.issuperset(shape[-2:])
            linking.update(dict.fromkeys(shape[-2:], is_linking * math.prod(shape)))
    counts = {size: sum(is_layer(shapes, names.values(), size) for names in layers) for size in linking}
    return max(linking, key=lambda size: (counts[size], linking[size], -size), default=0)


def is_layer(shapes, names, width):
    """Has a layer of such tensors a matrix that reads the stream, and another one that writes to it?"""
    axes = [shapes[name][-2:] for name in names if is_matrix(name, shapes[name], width)]
    return len(axes) > 1 and all(width in sizes for sizes in zip(*axes))


def is_matrix(name, shape, width):
    """Does a tensor have rows along the residual stream?"""
    return len(shape) in (2, 3) and width in shape[-2:] and not NO_WEIGHTS.search(name)


def closest(name, stacks):
    """The stacks that share with a tensor the longest beginning of their names, by words."""
    shared = [len(commonprefix([parts_of(name), parts_of(stack.prefix)])) for stack in stacks]
    return [stack for stack, count in zip(stacks, shared) if count == max(shared)]


def parts_of(name):
    """The parts of a name: model, layers, 0, ..."""
    return name.replace("/", ".").split(".")


def end_of(name):
    """The last two parts of a name."""
    return ".".join(parts_of(name)[-2:])


def is_called(name, names):
    """Are the last one or two parts of a name among these?"""
    words = parts_of(name.removesuffix(".weight").removesuffix("kernel").rstrip("./"))
    return words[-1] in names or ".".join(words[-2:]) in names


def is_table(name, shape):
    """Is a matrix called an embedding matrix?"""
    return len(shape) == 2 and name.endswith("weight") and is_called(name, TABLES)


def is_head(name):
    """Is a matrix called a head? Several are numbered."""
    return is_called(name.removesuffix(".weight").rstrip(".0123456789"), HEADS)


def leads_from_images(name, shape, width):
    """Is a tensor a convolution that leads to a stream, or a matrix of patches? No adapter's or head's is."""
    sizes = [size for size in shape if size > 1]  # of positions (1, T, d) two
    is_patch = len(sizes) == 2 and "patch" in name and sizes[0] == width
    is_other = ADDED.search(name) or ATTENTION.search(name)
    return not is_other and (is_patch or (len(sizes) > 2 and width in sizes))


def mlps_of_layer(shapes, names, width):
    """A layer's MLPs, the matrices that are not plainly attention's, and are its MLPs stored as products?

    `names` are full ones by their rest. {"mlp.up_proj.weight": (704, 256), "mlp.down_proj.weight": (256,
    704), ...} is one MLP of owner "mlp".
    """
    matrices = [rest for rest, name in names.items() if len(shapes[name]) > 1]
    others = [rest for rest in matrices if not ATTENTION.search(rest)]
    axes = {rest: shapes[names[rest]] for rest in others if len(shapes[names[rest]]) < 4}
    mlps, is_product = [], False
    for count in (2, 3):  # a plain MLP may stand beside a stack of experts
        along = {rest: shape for rest, shape in axes.items() if is_matrix(names[rest], shape, width)}
        for roles in mlps_by_shape({r: shape for r, shape in along.items() if len(shape) == count}, width):
            is_product |= is_rank(roles, axes, width)
            of_roles = {role: names[rest] for role, rest in roles.items()}
            experts = [None] if count == 2 else range(axes[roles["down"]][0])
            is_named = roles.keys() != UNGATED or is_called(roles["down"], WRITING)
            mlps += [MLP(of_roles, is_named, expert) for expert in experts]
    unknown = [names[rest] for rest in others or matrices[OF_ATTENTION:]]
    return [] if is_product else mlps, unknown, is_product


def is_rank(roles, axes, width):
    """Is an MLP's number of units the rank of matrices that are stored as products, U V?

    Then beside each matrix along the stream stands one of which it is the smaller size; or, if it is the
    width, a square one.
    """
    units = units_of(axes[roles["down"]], width)
    inner = [min(shape[-2:]) for shape in axes.values() if width not in shape[-2:]]
    owners = {owner_of(rest) for rest in roles.values()}
    beside = [axes[rest][-2:] for rest in axes.keys() - roles.values() if owner_of(rest) in owners]
    return inner.count(units) >= len(roles) or beside.count((width, width)) == len(roles)


def owner_of(rest):
    """What a matrix is part of, by its name: of mlp.up_proj.weight `mlp`."""
    return rest.removesuffix(".weight").removesuffix(".kernel").rpartition(".")[0]


def mlps_by_shape(shapes, width):
    """The matrices of each MLP by role: of those of one owner, or else of all together."""
    owners = defaultdict(dict)
    for rest, shape in shapes.items():
        owners[owner_of(rest)][rest] = shape
    found = [roles for members in owners.values() for roles in roles_by_shape(members, width)]
    found = found or roles_by_shape(shapes, width)
    whole = [roles for roles in found if len(roles) == len(owners[owner_of(roles["down"])])]
    found = whole or found  # two of an attention's may look like an MLP
    return [roles for roles in found if is_called(roles["down"], WRITING)] or found


def roles_by_shape(shapes, width):
    """The matrices of an MLP by role: one writes what one or two others read; a list of one, or of none.

    A name tells the one that writes, but where its shape is another's, and the third one's is not: of
    xFormers' w1, w2 and w3 the last writes.
    """
    reads, writes = defaultdict(list), defaultdict(list)  # by the number of units
    named = [rest for rest in shapes if is_called(rest, WRITING)]
    counts = Counter(shapes.values())
    if sorted(counts.values()) == [1, 2] and any(counts[shapes[rest]] == 2 for rest in named):
        named = []
    for rest, shape in shapes.items():
        if named or shape[-1] != shape[-2]:
            is_read = rest not in named if named else shape[-1] == width
            (reads if is_read else writes)[units_of(shape, width)].append(rest)
    if not named and sum(map(len, writes.values())) > sum(map(len, reads.values())):  # (inputs, outputs)
        reads, writes = writes, reads
    for units, down in writes.items():
        inputs = reads[units]
        names = {2: ("gate", "up"), 1: ("up",)}.get(len(inputs))
        if not inputs:  # both in one matrix, in which Mamba-2 has more below them
            inputs = [rest for size, rests in reads.items() if size >= 2 * units for rest in rests]
            names = ("gate_up",) if len(inputs) == 1 else None
        if names and len(down) == 1:
            return [dict(zip(names, inputs)) | {"down": down[0]}]
    return []


def units_of(shape, width):
    """The number of units that a matrix, or a stack, has a row or a column for."""
    return shape[-2] if shape[-1] == width else shape[-1]


def is_varied(weight: Tensor):
    """Do most pieces of a tensor differ, as no mask's, identity's or constant's do? Of some is judged.

    Single numbers would not tell: in eight bits, or by a scale, weights have few different ones.
    """
    numbers = weight.flatten()
    pieces = numbers[: len(numbers) // PIECE * PIECE].view(-1, PIECE)
    pieces = pieces[:: 1 + len(numbers) // (BATCH + 1)].float().numpy()
    return len({piece.tobytes() for piece in pieces}) > max(VARIED, len(pieces) / 2)
