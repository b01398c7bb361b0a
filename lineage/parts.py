"""Which tensor of a checkpoint is what, and which of them are the model? By structure, names and shapes.

    >>> from lib import checkpoint
    >>> from lineage import parts
    >>> found = parts.find(checkpoint.parse_spec("tiny_llama@42").open())
    >>> found.tables, found.heads, len(found.mlps)
    ([('model.embed_tokens.weight',)], [('lm_head.weight',)], 6)

The model is the part that an embedding matrix feeds and a head reads; towers, talkers and draft heads are
other parts (`lineage/stacks.py`). Within a layer projects name the same things differently, so each kind of
matrix has a pattern here; where names say nothing, shapes do. A checkpoint has `shapes` by name, `family`,
`place` and `read(name)`.
"""

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lineage import stacks
from lineage.stacks import HEAD, beginnings, is_matrix

ATTENTION = re.compile(r"attn|attention|(?:^|\.)(?:[qkvo]_proj|[qkv]_lin|out_lin|to_[qkv])\b", re.IGNORECASE)
ADAPTER = re.compile(r"(?i)(?:^|[._])(?:lora|vera|svd|dora|ia3|loha|lokr|hada|adapters?)(?:[._]|$)")
GAIN = r"(?:\.weight|\.scale|\.w|_weight)$"
FINAL_NORM = re.compile(rf"(?:^|\.)(?:norm|ln_f|norm_f|ln_final|final_norm|final_layer_?norm){GAIN}")
SUFFIX = r"(?:\.weight|\.kernel)?$"
# An MLP's matrix that writes; those that read, and which of them is a gate, shapes and their order tell
DOWN_NAMES = "down_proj|w2|wo|Wo|c_proj|fc2|fc_out|lin2|dense_4h_to_h|output\\.dense"
DOWN = re.compile(rf"(?:^|\.)(?:{DOWN_NAMES}){SUFFIX}")
FACTOR = re.compile(r"[._]u_proj(?:\.weight)?$")  # of a matrix that is stored as a product, U V
PROJECTION = re.compile(r"(?:_proj|fc\w*|lin\d|[vw][\dio]\w*|W[io]|dense\w*)$")  # what one matrix is called
NORMS_IN_FRONT = (  # of an MLP: the first of these that the layer has; Falcon's and Phi's attention shares it
    "pre_feedforward_layernorm post_attention_layernorm post_self_attention_layer_norm norm_2 ln_?2 ln_mlp "
    "ffn_norm mlp_norm final_layer_norm attention.output.LayerNorm layer_norm input_layernorm ln_1"
).split()
# Matrices that write to the residual stream: its coordinates are their rows
WRITERS = DOWN_NAMES + "|o_proj|out_proj|out_lin|(?:self_attention|attention)\\.dense"
WRITERS += "|SelfAttention\\.o|EncDecAttention\\.o"
WRITES = re.compile(rf"(?:^|\.)(?:{WRITERS})(?:\.weight)?$")
VARIED = 1000  # different numbers, which no mask, identity or constant has,
SAMPLE = 2**13  # among so many of a matrix
MOST_EXPERTS = 256  # of a stack that are told apart
MOST_TABLES = 4  # that may be a model's embedding matrix
MOST_OF_ATTENTION = 4  # matrices that a layer without an MLP has


@dataclass(frozen=True)
class MLP:
    """One MLP, or one expert, and the names of its tensors."""

    layer: int  # from 0
    place: float  # of its layer: 0 for the first, below 1
    is_first: bool  # of eight layers or more
    label: str  # for a reader: "layer 3", "layer 3, expert 5"
    matrices: dict  # names by role: gate, up, down, or gate_up
    is_named: bool  # does a name tell which matrix writes? If not, of two matrices this is a guess
    expert: int | None  # its number in a stack of experts
    norm: str | None  # in front of it
    norm_behind: str | None
    knows_norm: bool = True  # or there is none

    @property
    def views(self):
        """What there is to see of a unit: its gate, where MLPs have them, its up and its down weights."""
        return ("gate", "up", "down") if self.matrices.keys() & {"gate", "gate_up"} else ("up", "down")


@dataclass(frozen=True)
class Part:
    """A model, or a part of one: what may be its embedding matrices and heads, its MLPs, and more."""

    name: str  # what begins the names of its layers, and of no others; "" where there are no others
    read: Callable  # -> a tensor, by its name
    place: object  # of the checkpoint
    family: str
    shapes: dict  # of its tensors
    width: int
    tables: list  # a matrix's name each, or the names of two whose product it is
    heads: list  # the tables, if tied
    may_read_tokens: bool  # or is it fed by what is no embedding matrix?
    norm: str | None
    mlps: list
    layers: list  # the names of each layer's tensors
    numbers: dict  # each layer's number, from 1, by that in its names
    matrices: dict  # names of those along the stream, by the number in them, None of a table, and the rest
    unknown: list  # matrices among which an MLP may be: neither tables nor plainly attention's
    unread: dict  # names of tensors in layers that were not looked at, by what they are

    @property
    def missing(self):
        """What was not found of all that units are looked for with; "" if nothing."""
        if len(self.tables) > MOST_TABLES:
            return "one embedding matrix"
        names = {"embedding matrix": self.tables, "MLPs": self.mlps}
        return " and ".join(name for name, found in names.items() if not found)

    @functools.cached_property
    def stores_inputs_first(self):
        """Are matrices stored as (inputs, outputs), as GPT-2's are, and nobody else's?"""
        shapes = [shape for name, shape in self.shapes.items() if name.endswith("attn.c_attn.weight")]
        return any(shape[0] == self.width and shape[-1] != self.width for shape in shapes)

    @property
    def has_head(self):
        """Has it a head of its own?"""
        return self.heads != self.tables

    @property
    def rank(self):
        """Which part of several is the model? What reads tokens, and of these what has a head."""
        return self.tables != [], self.has_head

    @property
    def size(self):
        """The number of parameters in its layers."""
        return sum(math.prod(self.shapes[name]) for names in self.layers for name in names)


def find(source):
    """The Part of a checkpoint that is the model; a Part is its own."""
    return source if isinstance(source, Part) else split(source)[0]


def split(source):
    """The Parts of a checkpoint: first what reads tokens, and of these what has a head; the larger first."""
    found = [part_of(source, stack) for stack in stacks.find(source)]
    return sorted(found, key=lambda part: (part.rank, part.size), reverse=True)


def part_of(source, stack):
    """The Part that a stack is, with what stands beside it."""
    beside = stack.beside
    shapes = dict(beside)
    width = stack.width
    tables, heads = tables_and_heads(beside, stack.tables, width)
    known = dict.fromkeys(name for table in tables + heads for name in table)  # in one order
    unknown = [name for name in beside if len(beside[name]) > 1 and name not in known]
    along = [name for name in known if is_matrix(name, shapes[name], width)]
    matrices = {(None, ".".join(name.split(".")[-2:])): name for name in along}
    adapters = [name for name in beside if ADAPTER.search(name) and len(beside[name]) > 1]
    without_mlp = []
    mlps, layers, numbers = [], [], {}
    for place, (number, names) in enumerate(stack.layers.items()):
        shapes |= {name: source.shapes[name] for name in names.values()}
        names = without_adapters(names, shapes, adapters)
        where = (place, place / len(stack.layers), place == 0 and len(stack.layers) >= 8)
        found, others = mlps_of_layer(source, names, width, where)
        mlps += found
        along = {rest: name for rest, name in names.items() if is_matrix(name, shapes[name], width)}
        matrices |= {(number, rest): name for rest, name in along.items()}
        layers.append([*names.values()])
        numbers[number] = len(layers)
        unknown += others
        without_mlp += [] if found else others
    gains = gains_of(dict(zip(beside, beside)), beside, width)
    norms = [name for name in gains if FINAL_NORM.search(name)] or (gains if len(gains) == 1 else [])
    unread = {"adapters": adapters, "layers without an MLP that can be read": without_mlp}
    of_source = (stack.name, source.read, source.place, source.family, shapes, width)
    of_stack = (tables, heads or tables, stack.may_read_tokens, next(iter(norms), None))
    return Part(*of_source, *of_stack, mlps, layers, numbers, matrices, unknown, unread)


def without_adapters(names, shapes, adapters):
    """A layer's full names by their rest without matrices that change its others, which join `adapters`."""
    owners = {rest.removesuffix("weight") for rest in names if rest.endswith(".weight")}
    kept = {}
    for rest, name in names.items():
        inner = [rest.removeprefix(start) for start in beginnings(rest) if start in owners]
        changes = ADAPTER.search(rest) or not all(each.startswith(("weight", "bias")) for each in inner)
        if changes and len(shapes[name]) > 1:
            adapters.append(name)
        else:
            kept[rest.replace(".base_layer", "")] = name
    return kept


def changes_of_basis(part):
    """Matrices that stretch nothing, and shrink little, outside of layers or in them, but for MLPs' own.

    SliceGPT's, say; of several in one tensor the first is looked at, of attention the last layer's. If an MLP
    has such matrices, too, as of an orthogonal birth, they tell nothing.
    """
    known = {name for mlp in part.mlps for name in mlp.matrices.values()}
    last_layer = [name for names in part.layers[-1:] for name in names if len(part.shapes[name]) > 1]
    turning = []
    for name in dict.fromkeys(part.unknown + last_layer):
        sides = part.shapes[name][-2:]
        is_square = max(sides) <= 2 * min(sides) and part.width in sides
        if name not in known and is_square and is_orthogonal(part.read(name)):
            turning.append(name)
    first = part.mlps[0].matrices.values() if turning and part.mlps else []
    return [] if any(is_orthogonal(part.read(name)) for name in first) else turning


def is_orthogonal(weight: Tensor):
    """Is a matrix, or the first of a stack, no identity, but near to one that only turns, (m, n)?"""
    weight = weight.reshape(-1, *weight.shape[-2:])[0].float()
    probe = torch.ones(weight.shape[1])
    for _ in range(8):  # of the power method: its length becomes the square of the largest factor
        probe = weight.T @ (weight @ (probe / probe.norm().clamp(min=1e-30)))
    return is_varied(weight) and probe.norm() <= 1.02 and weight.square().sum() >= min(weight.shape) / 2


def tables_and_heads(beside, named, width):
    """What may be a part's embedding matrices and heads, of shapes by name outside of layers.

    ELECTRA's, ALBERT's and OPT-350m's tables are narrower than the stream: a matrix leads to its width, and
    another one back to the head.
    """
    if not named:
        return [], []
    matrices = {name: shape for name, shape in beside.items() if len(shape) == 2}
    tables = [(name,) for name in named if matrices[name][1] == width]
    named_heads = [name for name, shape in matrices.items() if shape[1] == width and HEAD.search(name)]
    runs = {stacks.NUMBER.sub("", name): (name,) for name in reversed(named_heads)}
    heads = [*runs.values()]  # of those of codebooks one
    for table in named:
        size = matrices[table][1]
        if size != width:
            tables += [(table, name) for name, shape in matrices.items() if shape == (width, size)]
            heads += [(table, name) for name, shape in matrices.items() if shape == (size, width)]
    return tables, heads


def mlps_of_layer(source, names, width, where):
    """A layer's MLPs, and its matrices that are not plainly attention's. `names` are full ones by their rest.

    A layer with {"mlp.up_proj.weight": (704, 256), "mlp.down_proj.weight": (256, 704), ...} has one MLP, of
    owner "mlp" and with the roles {"up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight"}. `where` has
    what an MLP tells of its place.
    """
    shapes = {}
    for rest, name in names.items():
        if is_matrix(name, source.shapes[name], width) and not ATTENTION.search(rest):
            shapes[rest] = source.shapes[name]
    matrices = [name for name in names.values() if len(source.shapes[name]) > 1]
    unknown = [name for name in matrices if not ATTENTION.search(name)] or matrices[MOST_OF_ATTENTION:]
    if is_factored([rest for rest, name in names.items() if len(source.shapes[name]) == 2]):
        return [], unknown
    norms = norms_of_layer(source, names, width)
    mlps = []
    for axes in (2, 3):  # a plain MLP may stand beside a stack of experts
        alike = {rest: shape for rest, shape in shapes.items() if len(shape) == axes}
        for owner, roles in mlps_by_shape(alike, width).items():
            is_named = DOWN.search(roles["down"]) is not None
            of_roles = {role: names[rest] for role, rest in roles.items()}
            number = re.search(r"\.experts\.(\d+)$", f".{owner}")
            label = f"layer {where[0] + 1}" + (f", expert {int(number[1]) + 1}" if number else "")
            if axes == 2:
                mlps.append(MLP(*where, label, of_roles, is_named, None, *norms))
                continue
            for expert in range(min(shapes[roles["down"]][0], MOST_EXPERTS)):
                label = f"layer {where[0] + 1}, expert {expert + 1}"
                mlps.append(MLP(*where, label, of_roles, is_named, expert, *norms))
    return mlps, unknown


def is_factored(matrices):
    """Is a matrix stored as a product, up_proj.U and up_proj.V, or up_u_proj? Its inner size is no units'."""
    owners = Counter(rest.removesuffix(".weight").rpartition(".")[0] for rest in matrices)
    several = [owner for owner, count in owners.items() if count > 1 and not ATTENTION.search(owner)]
    return any(map(FACTOR.search, matrices)) or any(map(PROJECTION.search, several))


def units_of(shape, width):
    """The number of units that a matrix, or a stack, has a row or a column for."""
    return shape[-2] if shape[-1] == width else shape[-1]


def mlps_by_shape(shapes, width):
    """The matrices of each MLP by role, by their owner's name: of those of one owner, or else of all.

    Where names tell of some which matrix writes, no others count.
    """
    owners = defaultdict(dict)
    for rest, shape in shapes.items():
        owners[re.sub(SUFFIX, "", rest).rpartition(".")[0]][rest] = shape
    found = {owner: roles_by_shape(members, width) for owner, members in owners.items()}
    if not any(found.values()):
        found = {"": roles_by_shape(shapes, width)}
    found = {owner: roles for owner, roles in found.items() if roles}
    named = {owner: roles for owner, roles in found.items() if DOWN.search(roles["down"])}
    return named or found


def roles_by_shape(shapes, width):
    """The matrices of an MLP by role: one writes what one or two others read; {} if there is none."""
    reads, writes = defaultdict(list), defaultdict(list)
    named = [rest for rest in shapes if DOWN.search(rest)]
    for rest, shape in shapes.items():
        if named or shape[-1] != shape[-2]:
            is_read = rest not in named if named else shape[-1] == width
            kind = reads if is_read else writes
            kind[units_of(shape, width)].append(rest)
    if not named and sum(map(len, writes.values())) > sum(map(len, reads.values())):  # (inputs, outputs)
        reads, writes = writes, reads
    for units, down in writes.items():
        inputs = reads[units]
        names = {2: ("gate", "up"), 1: ("up",)}.get(len(inputs))
        if not inputs:  # both in one matrix, in which Mamba-2 has more below them
            inputs = [rest for size, rests in reads.items() if size >= 2 * units for rest in rests]
            names = ("gate_up",) if len(inputs) == 1 else None
        if names and len(down) == 1:
            return dict(zip(names, inputs)) | {"down": down[0]}
    return {}


def gains_of(names, shapes, width):
    """Of full names by their rests those of vectors along the stream that are no biases."""
    return {rest: name for rest, name in names.items() if shapes[name] == (width,) and rest[-4:] != "bias"}


def norms_of_layer(source, names, width):
    """The gains in front of a layer's MLP and behind it, and if these are known. OLMo 2 has none in front."""
    gains = gains_of(names, source.shapes, width)
    behind = gains.get("post_feedforward_layernorm.weight")  # Gemma 2 and 3, OLMo 2
    for norm in NORMS_IN_FRONT[: None if behind is None else 1]:
        rests = [rest for rest in gains if re.search(norm + GAIN, rest)]
        rests.sort(key=lambda rest: ATTENTION.search(rest) is None)
        if rests:
            return gains[rests[-1]], behind, True  # T5's feed-forward layer is a layer's last
    if behind is None and len(gains) == 1:
        return *gains.values(), None, True
    return None, behind, behind is not None or not gains


def is_varied(weight: Tensor):
    """Has a tensor as many different numbers as no mask, identity or constant has? Of some is judged."""
    numbers = weight.flatten()
    return len(numbers[:: 1 + len(numbers) // SAMPLE].unique()) >= VARIED


def residual_rows(part, name, weight) -> Tensor:
    """A matrix of a part, or a stack, as rows along the stream, (n, width): a writer's are its columns."""
    by_columns = weight.shape[-1] == part.width
    if by_columns and weight.shape[-2] == part.width:
        writes = WRITES.search(name) is not None
        by_columns = writes == part.stores_inputs_first
    if not by_columns:
        weight = weight.transpose(-1, -2)
    return weight.reshape(-1, part.width)
