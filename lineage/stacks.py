"""Which tensors of a checkpoint are layers, and what feeds these? Found by structure, whatever names say.

A *stack* is a run of tensors whose names differ in one number, the layer's, and whose layers read and write
a stream of one width. An encoder and its decoder are two, even if one embedding matrix feeds both.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

NUMBER = re.compile(r"(?<!\d)(\d{1,9})[./_]")  # in a name, of a layer, an expert, a codebook
INNER = re.compile(r"(?:^|[._/])\d+(?=[._/])")  # of an expert, say
LAYERS = r"(?:^|[._/])(?:layers?|h|blocks?)[._/]?"  # what a single layer is called
BEFORE_LAYER, LAYER = re.compile(LAYERS + "$"), re.compile(LAYERS + r"\d{1,9}[._/]")
TABLE_NAMES = "embed_tokens|wte|word_embeddings?|embed_in|tok_embeddings|embeddings?|shared"
TABLE = re.compile(rf"(?:^|[./])(?:{TABLE_NAMES})[./]weight$")
HEAD = re.compile(r"(?:^|[./])(?:lm_heads?|embed_out|output)(?:\.\d+)?[./](?:weight|kernel)$")
NO_TABLE = re.compile(r"pos|wpe|type|patch|proj|score|class|pool|kernel$")  # in names, of no embedding matrix
# Masks are called attn.bias; unrelated models share rotary tables
NO_WEIGHTS = re.compile(r"(?:\.bias|attn\.masked_bias|scales?|inv_freq|freqs_cis|(?:cos|sin)(?:_cached)?)$")


@dataclass(eq=False)
class Stack:
    """A run of layers whose tensors' names differ in one number; and, by `find`, what stands beside it."""

    prefix: str  # what begins the names of its tensors, up to the number
    width: int  # of the stream
    layers: dict  # by number: the full names by what follows the number; {} if there are none
    kinds: set  # what its layers' matrices are called, those of all experts alike
    name: str = ""  # what begins its names, and no other stack's; "" where there are no others
    tables: list = field(default_factory=list)  # the names of the embedding matrices that feed it
    beside: dict = field(default_factory=dict)  # shapes by name of what is as close to it as to others
    has_other_input: bool = False  # does a convolution, or a projection, lead to it?
    may_read_tokens: bool = True  # or is there nothing beside it that may be an embedding matrix?


def find(source):
    """The Stacks of a checkpoint; without layers the only one has its embedding matrices, if any."""
    shapes = {name: shape for name, shape in source.shapes.items() if 0 not in shape}
    stacks = with_lists_joined(stacks_of(shapes))
    inside = {name for stack in stacks for names in stack.layers.values() for name in names.values()}
    outside = {name: shape for name, shape in shapes.items() if name not in inside}
    reach = {name: closest(name, stacks) for name in outside}
    for stack in stacks:
        stack.name = common_name(stack, stacks)
        stack.has_other_input = has_other_input(stack, outside, reach)
    feed(stacks, outside, reach)
    for stack in stacks:
        beside = [name for name in outside if name in stack.tables or stack in reach[name]]
        stack.beside = {name: outside[name] for name in beside}
        candidates = [name for name in beside if may_be_table(name, outside[name], stack.width)]
        stack.may_read_tokens = not stack.has_other_input or stack.tables + candidates != []
    tables = [name for name, shape in outside.items() if is_table(name, shape)]
    width = outside[tables[0]][1] if tables else 0
    return stacks or [Stack("", width, {}, set(), "", tables, outside)]


def stacks_of(shapes):
    """Every Stack of a checkpoint: the outermost number in a name that counts layers.

    A single layer is one if it is called so. Where layers are called so, a number before theirs counts more
    than layers: stages, or models.
    """
    numbered = defaultdict(lambda: defaultdict(dict))
    for name in sorted(shapes):
        for number in NUMBER.finditer(name):
            rest = name[number.end() :].replace("/", ".")
            numbered[name[: number.start(1)]][int(number[1])][rest] = name
    unnumbered = {size for name, shape in shapes.items() if not NUMBER.search(name) for size in shape}
    stacks, taken = [], set()
    for prefix in sorted(numbered, key=lambda prefix: (len(prefix), prefix)):
        runs = {n: names for n, names in numbered[prefix].items() if taken.isdisjoint(names.values())}
        is_named = BEFORE_LAYER.search(prefix) is not None
        if not is_named and any(LAYER.search(rest) for names in runs.values() for rest in names):
            continue
        width = width_of(shapes, runs, unnumbered)
        layers = {n: runs[n] for n in sorted(runs) if is_layer(shapes, runs[n].values(), width)}
        if len(layers) > 1 or (is_named and len(layers) == len(runs) == 1):
            inside = {name: rest for names in layers.values() for rest, name in names.items()}
            kinds = {INNER.sub("", rest) for name, rest in inside.items() if len(shapes[name]) > 1}
            stacks.append(Stack(prefix, width, layers, kinds))
            taken |= inside.keys()
    return sorted(stacks, key=lambda stack: stack.prefix)


def with_lists_joined(stacks):
    """Stacks of which lists of attention and of MLPs, side by side and of the same numbers, are one.

    An MLP has fewer than four matrices.
    """
    alike = defaultdict(list)
    for stack in stacks:
        parent = beginnings(stack.prefix.rstrip("._/"))[0]
        alike[parent, stack.width, tuple(stack.layers)].append(stack)
    joined = []
    for (parent, width, numbers), members in alike.items():
        if len(members) == 1 or min(len(stack.kinds) for stack in members) > 3:
            joined += members
            continue
        layers = {number: {} for number in numbers}
        for stack in members:
            start = stack.prefix.removeprefix(parent)
            for number, names in stack.layers.items():
                layers[number] |= {f"{start}{rest}": name for rest, name in names.items()}
        kinds = set().union(*(stack.kinds for stack in members))
        joined.append(Stack(parent, width, layers, kinds))
    return joined


def width_of(shapes, layers, unnumbered):
    """The width of the stream of some layers: the axis of the matrices that have most of their numbers."""
    sizes = Counter()
    for names in layers.values():
        for name in names.values():
            if len(shapes[name]) in (2, 3):
                sizes.update(dict.fromkeys(shapes[name][-2:], math.prod(shapes[name])))
    return max(sizes, key=lambda size: (sizes[size], size in unnumbered, -size), default=0)


def is_layer(shapes, names, width):
    """Has a layer of such tensors a matrix that reads the stream, and another one that writes to it?"""
    axes = [shapes[name][-2:] for name in names if is_matrix(name, shapes[name], width)]
    return len(axes) > 1 and width in {rows for rows, _ in axes} and width in {columns for _, columns in axes}


def is_matrix(name, shape, width):
    """Does a tensor have rows along the residual stream?"""
    return len(shape) in (2, 3) and width in shape[-2:] and not NO_WEIGHTS.search(name)


def is_table(name, shape):
    """Is a tensor an embedding matrix by its name?"""
    return len(shape) == 2 and TABLE.search(name) is not None


def may_be_table(name, shape, width):
    """Could a tensor be an embedding matrix by its shape, and does its name say nothing else?"""
    return len(shape) == 2 and shape[1] == width <= 2 * shape[0] and not NO_TABLE.search(name)


def beginnings(name):
    """What a name begins with, up to each of its separators, the longest first; at last nothing."""
    separators = "[./]" if re.search("[./]", name) else "_"
    return [name[: found.end()] for found in reversed([*re.finditer(separators, name)])] + [""]


def closest(name, stacks):
    """The stacks that share with a tensor the longest beginning of their names."""
    for start in beginnings(name):
        found = [stack for stack in stacks if stack.prefix.startswith(start)]
        if found:
            return found
    return []


def common_name(stack, stacks):
    """The shortest beginning of a stack's names that no other stack's has; "" where there is no other."""
    others = [other.prefix for other in stacks if other is not stack]
    for start in reversed(beginnings(stack.prefix)):
        if not any(prefix.startswith(start) for prefix in others):
            return start.rstrip("._/")
    return stack.prefix.rstrip("._/")


def has_other_input(stack, outside, reach):
    """Does something else than an embedding matrix lead to a stack: a convolution, or a projection?

    No projection does where a matrix beside it has rows that nothing reads: these may be tokens.
    """
    matrices = {name: shape for name, shape in outside.items() if len(shape) == 2}
    known = {stack.width} | {shape[1] for name, shape in matrices.items() if is_table(name, shape)}
    known |= {rows for rows, columns in matrices.values() if columns == stack.width}  # a head's, turned
    read = {shape[1] for name, shape in matrices.items() if not HEAD.search(name)}
    read |= {other.width for stacks in reach.values() for other in stacks}
    beside = [shape for name, shape in outside.items() if reach[name] == [stack] and stack.width in shape]
    if any(len(shape) > 2 and shape[0] > 1 for shape in beside):
        return True
    pairs = [shape for shape in beside if len(shape) == 2]
    if any(columns == stack.width <= 2 * rows and rows not in read for rows, columns in pairs):
        return False
    return any(rows == stack.width and columns not in known for rows, columns in pairs)


def feed(stacks, outside, reach):
    """Tell each stack the embedding matrices that feed it.

    Names tell an embedding matrix, or else its rows: of the matrices that lead to a stack which none feeds by
    name, those with the most. A head's matrix is the last choice: it may be tied.
    """
    matrices = [name for name, shape in outside.items() if len(shape) == 2]
    named = [name for name in matrices if is_table(name, outside[name])]
    heads = [name for name in matrices if HEAD.search(name)]
    others = [name for name in matrices if not NO_TABLE.search(name) and name not in named + heads]
    free = [stack for stack in stacks if not stack.has_other_input]
    for name in named:
        for stack in fed_by(name, outside, free) or fed_by(name, outside, stacks):
            stack.tables.append(name)
    for choices in (others, heads):
        choices = [name for name in choices if not any(stack.tables for stack in reach[name])]
        fitting = {name: fed_by(name, outside, free) for name in choices}
        for name, members in fitting.items():
            rivals = [other for other in fitting if not set(members).isdisjoint(fitting[other])]
            if rivals and outside[name][0] == max(outside[other][0] for other in rivals):
                for stack in members:
                    stack.tables.append(name)
    fed = [stack for stack in stacks if stack.tables]
    for stack in free:  # a decoder has all that the encoder has beside which the table stands
        if stack not in fed:
            encoders = [each for each in fed if each.width == stack.width and each.kinds <= stack.kinds]
            stack.tables = [*dict.fromkeys(name for each in encoders for name in each.tables)]


def fed_by(name, outside, stacks):
    """Those of some stacks whose stream a table leads to, narrow ones by a projection: the closest ones."""
    size = outside[name][1]
    fitting = [stack for stack in stacks if stack.width == size]
    if not fitting and is_table(name, outside[name]):
        shapes = {*outside.values()}
        fitting = [stack for stack in stacks if {(stack.width, size), (size, stack.width)} & shapes]
    return closest(name, fitting)
