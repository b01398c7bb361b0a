"""Which tensor of a checkpoint is what? Found by names and shapes, whatever the architecture.

    >>> from lib import checkpoint
    >>> from lineage import parts
    >>> found = parts.find(checkpoint.parse_spec("tiny_llama@42").open())
    >>> found.tables, found.heads, len(found.mlps)
    ([('model.embed_tokens.weight',)], [('lm_head.weight',)], 6)

Projects name the same things differently, so each kind of thing has a pattern here; where names say nothing,
shapes do. A checkpoint has `shapes` by name, `width` (d, of the stream), `family` and `read(name)`.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from torch import Tensor

from lib.formats import TABLE

# What comes first in a name; T5's has two
LAYER = re.compile(r"(?:^|[._])(?:layers?|h|blocks?)[._]?(\d{1,9})\.")
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
WRAPPERS = "model|transformer|gpt_neox|backbone|bert|language_model|base_model|module|_orig_mod"
PREFIX = re.compile(rf"^(?:(?:{WRAPPERS})\.)+")
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.weight$")
GAIN = r"(?:\.weight|\.scale|\.w|_weight)$"
FINAL_NORM = re.compile(rf"(?:^|\.)(?:norm|ln_f|norm_f|ln_final|final_norm|final_layer_?norm){GAIN}")
ROLES = {  # of an MLP's matrices
    "gate_up": "gate_up_proj|Wi",  # both in one
    "gate": "gate_proj|w1|wi_0",
    "up": "up_proj|w3|v1|wi_1|wi|c_fc|fc1|fc_in|lin1|dense_h_to_4h|intermediate\\.dense",
    "down": "down_proj|w2|wo|Wo|c_proj|fc2|fc_out|lin2|dense_4h_to_h|output\\.dense",
}
SUFFIX = r"(?:\.weight|\.kernel)?$"
MLP_MATRIX = {role: re.compile(rf"^(?:(.*)\.)?(?:{names}){SUFFIX}") for role, names in ROLES.items()}
NORMS_IN_FRONT = (  # of an MLP: the first of these that the layer has; Falcon's and Phi's attention shares it
    "pre_feedforward_layernorm post_attention_layernorm norm_2 ln_?2 ln_mlp ffn_norm mlp_norm "
    "final_layer_norm attention.output.LayerNorm layer_norm input_layernorm ln_1"
).split()
NORM_BEHIND = "post_feedforward_layernorm"  # Gemma 2 and 3, OLMo 2
# Matrices that write to the residual stream: its coordinates are their rows
WRITERS = ROLES["down"] + "|o_proj|out_proj|out_lin|(?:self_attention|attention)\\.dense"
WRITERS += "|SelfAttention\\.o|EncDecAttention\\.o"
WRITES = re.compile(rf"(?:^|\.)(?:{WRITERS})(?:\.weight)?$")
# Masks are called attn.bias; unrelated models share rotary tables
NO_WEIGHTS = re.compile(r"(?:\.bias|attn\.masked_bias|scales?|inv_freq|freqs_cis|(?:cos|sin)(?:_cached)?)$")
LATE = 0.75  # of a stack's depth: the last quarter, in which unrelated models share units
VARIED = 1000  # different numbers, which no mask, identity or constant has,
SAMPLE = 2**13  # among so many of a matrix
MOST_EXPERTS = 256  # of a stack that are told apart
MOST_TABLES = 4  # that may be a model's embedding matrix
MOST_OF_ATTENTION = 4  # matrices that a layer without an MLP has
FACTOR = re.compile(r"[._]u_proj(?:\.weight)?$")  # of a matrix that is stored as a product, U V


@dataclass(frozen=True)
class MLP:
    """One MLP, or one expert, and the names of its tensors."""

    layer: int  # counted through the model, from 0
    place: float  # in its own stack of layers, an encoder or a decoder: 0 for the first, below 1
    is_first: bool  # of a stack of eight layers or more
    label: str  # for a reader: "layer 3", "layer 3, expert 5"
    matrices: dict  # names by role: gate, up, down, or gate_up
    is_named: bool  # do names tell the roles? If not, which of two matrices writes is a guess
    expert: int | None  # its number in a stack of experts
    norm: str | None  # in front of it
    norm_behind: str | None

    @property
    def views(self):
        """What there is to see of a unit: its gate, where MLPs have them, its up and its down weights."""
        return ("gate", "up", "down") if self.matrices.keys() & {"gate", "gate_up"} else ("up", "down")

    @property
    def is_middle(self):
        """Is it where unrelated models share little: before the last quarter, and not `is_first`?"""
        return not self.is_first and self.place < LATE


@dataclass(frozen=True)
class Parts:
    """What may be a model's embedding matrices and heads, its final norm, its MLPs, and more."""

    width: int
    tables: list  # a matrix's name each, or the names of two whose product it is
    heads: list  # the tables, if tied
    norm: str | None
    mlps: list
    layers: list  # the names of each layer's tensors
    unknown: list  # matrices among which an MLP may be: neither tables nor plainly attention's

    @property
    def missing(self):
        """What was not found of all that units are looked for with; "" if nothing."""
        if len(self.tables) > MOST_TABLES:
            return "one embedding matrix"
        names = {"embedding matrix": self.tables, "MLPs": self.mlps}
        return " and ".join(name for name, found in names.items() if not found)


def find(source):
    """The Parts of a checkpoint. Of the widths of config.json and a table, that of most layers is right."""
    outside = {}
    sizes = Counter()  # along which axes of layers' matrices
    layers = defaultdict(dict)  # full names by the rest of a name, by stack and number
    for name in sorted(name for name, shape in source.shapes.items() if 0 not in shape):
        match = LAYER.search(name)
        if match is None:
            outside[name] = source.shapes[name]
        else:
            layers[name[: match.start(1)], int(match[1])][name[match.end() :]] = name
            sizes.update(set(source.shapes[name][-2:]))
    matrices = {name: shape for name, shape in outside.items() if len(shape) == 2}
    named = [name for name in matrices if TABLE.search(name)]
    width = source.width
    if named and all(width not in matrices[name] for name in named):
        width = max(matrices[named[0]][1], width, key=lambda size: sizes[size])
    tables, heads = tables_and_heads(matrices, named, width)
    norms = [name for name, shape in outside.items() if shape == (width,) and FINAL_NORM.search(name)]
    known = {name for table in tables + heads for name in table}
    unknown = [name for name in outside if len(outside[name]) > 1 and name not in known]
    mlps = []
    depths = Counter(stack for stack, _ in layers)
    places = Counter()
    for layer, (stack, number) in enumerate(sorted(layers)):  # a decoder's come before its encoder's
        depth = depths[stack]
        place = places[stack] / depth
        is_first = place == 0 and depth >= 8
        found, others = mlps_of_layer(source, layers[stack, number], width)
        mlps += [MLP(layer, place, is_first, f"layer {layer + 1}{label}", *rest) for label, *rest in found]
        unknown += others
        places[stack] += 1
    names = [list(layers[key].values()) for key in sorted(layers)]
    return Parts(width, tables, heads or tables, next(iter(norms), None), mlps, names, unknown)


def tables_and_heads(matrices, named, width):
    """What may be a model's embedding matrices and heads, of its `matrices` outside of layers, by name.

    `named` are embedding matrices by name. ELECTRA's, ALBERT's and OPT-350m's are narrower than the stream:
    a matrix leads to its width, and another one back to the head.
    """
    fitting = [name for name, shape in matrices.items() if shape[1] == width]
    heads = [(name,) for name in fitting if HEAD.search(name)]
    tables = [(name,) for name in named if name in fitting]
    for table in named:
        size = matrices[table][1]
        if size != width:
            tables += [(table, name) for name, shape in matrices.items() if shape == (width, size)]
            heads += [(table, name) for name, shape in matrices.items() if shape == (size, width)]
    if not named:  # those with the most rows, of whatever name
        most = max([matrices[name][0] for name in fitting], default=0)
        tables = [(name,) for name in fitting if matrices[name][0] == most and (name,) not in heads]
        tables = tables or heads  # a tied matrix under the head's name
    return tables, heads


def mlps_of_layer(source, names, width):
    """A layer's MLPs, and its matrices that are not plainly attention's. `names` are full ones by their rest.

    A layer with {"mlp.up_proj.weight": (704, 256), "mlp.down_proj.weight": (256, 704), ...} has one MLP, of
    owner "mlp" and with the roles {"up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight"}. An MLP comes
    as its label behind the layer's number, names by role, whether names told, its number in a stack, norms.
    """
    shapes = {}
    for rest, name in names.items():
        if is_matrix(name, source.shapes[name], width) and not ATTENTION.search(rest):
            shapes[rest] = source.shapes[name]
    matrices = [name for name in names.values() if len(source.shapes[name]) > 1]
    unknown = [name for name in matrices if not ATTENTION.search(name)] or matrices[MOST_OF_ATTENTION:]
    if is_factored(rest for rest, name in names.items() if len(source.shapes[name]) == 2):
        return [], unknown
    norms = norms_of_layer(source, names, width)
    mlps = []
    named = named_mlps(shapes, width)
    for owner, roles in (named or mlps_by_shape(shapes, width)).items():
        of_roles = {role: names[rest] for role, rest in roles.items()}
        shape = shapes[roles["down"]]
        number = re.search(r"\.experts\.(\d+)$", f".{owner}")
        if len(shape) == 3:
            for expert in range(min(shape[0], MOST_EXPERTS)):
                mlps.append((f", expert {expert + 1}", of_roles, bool(named), expert, *norms))
        else:
            label = f", expert {int(number[1]) + 1}" if number else ""
            mlps.append((label, of_roles, bool(named), None, *norms))
    return mlps, unknown


def is_factored(matrices):
    """Is a matrix stored as a product, up_proj.U and up_proj.V, or up_u_proj? Its inner size is no units'."""
    owners = Counter()
    for rest in matrices:
        if FACTOR.search(rest):
            return True
        owners[rest.removesuffix(".weight").rpartition(".")[0]] += 1
    several = [owner for owner, count in owners.items() if count > 1]
    return any(pattern.match(owner) for owner in several for pattern in MLP_MATRIX.values())


def units_of(shape, width):
    """The number of units that a matrix, or a stack, has a row or a column for."""
    return shape[-2] if shape[-1] == width else shape[-1]


def named_mlps(shapes, width):
    """The matrices of each MLP by role, by the name of their owner, where the rest of their names tells."""
    owners = defaultdict(dict)
    for rest in shapes:
        for role, pattern in MLP_MATRIX.items():
            match = pattern.match(rest)
            if match:
                owners[match[1] or ""].setdefault(role, []).append(rest)
    found = {}
    for owner, choices in owners.items():
        roles = {role: rests[0] for role, rests in choices.items() if len(rests) == 1}
        if "down" not in roles or len(roles) < max(2, len(choices)):
            continue
        if "gate" in roles and "up" not in roles:  # w1 and w2, without a w3
            roles["up"] = roles.pop("gate")
        units = {role: units_of(shapes[rest], width) for role, rest in roles.items()}
        if len(roles) == 2 and units.get("up") == 2 * units["down"]:
            roles["gate_up"] = roles.pop("up")
        if set(units.values()) <= {units["down"], 2 * units["down"]}:
            found[owner] = roles
    return found


def mlps_by_shape(shapes, width):
    """The same where names tell nothing: one matrix writes what one or two others read."""
    reads, writes = defaultdict(list), defaultdict(list)
    for rest, shape in shapes.items():
        if shape[-1] != shape[-2]:
            kind = reads if shape[-1] == width else writes
            kind[units_of(shape, width)].append(rest)
    if sum(map(len, writes.values())) > sum(map(len, reads.values())):  # matrices are (inputs, outputs)
        reads, writes = writes, reads
    for units, down in writes.items():
        inputs = reads[units]
        names = {2: ("gate", "up"), 1: ("up",)}.get(len(inputs))
        if not inputs:  # both in one matrix, in which Mamba-2 has more below them
            inputs = [rest for size, rests in reads.items() if size >= 2 * units for rest in rests]
            names = ("gate_up",) if len(inputs) == 1 else None
        if names and len(down) == 1:
            return {"": dict(zip(names, inputs)) | {"down": down[0]}}
    return {}


def norms_of_layer(source, names, width):
    """The names of the gains in front of a layer's MLP and behind it; OLMo 2 has none in front."""
    gains = {rest: name for rest, name in names.items() if source.shapes[name] == (width,)}
    behind = gains.get(f"{NORM_BEHIND}.weight")
    for norm in NORMS_IN_FRONT[: None if behind is None else 1]:
        rests = [rest for rest in gains if re.search(norm + GAIN, rest)]
        rests.sort(key=lambda rest: ATTENTION.search(rest) is None)
        if rests:
            return gains[rests[-1]], behind  # T5's feed-forward layer is a layer's last
    return None, behind


def is_matrix(name, shape, width):
    """Does a tensor have rows along the residual stream?"""
    return len(shape) in (2, 3) and width in shape[-2:] and 0 not in shape and not NO_WEIGHTS.search(name)


def layer_numbers(source):
    """Each layer's number, counted through the model from 1, by what begins its names, without wrappers."""
    numbers = {}
    for number, names in enumerate(find(source).layers, start=1):
        name = PREFIX.sub("", names[0])
        numbers[name[: LAYER.search(name).end()]] = number
    return numbers


def is_varied(weight: Tensor):
    """Has a tensor as many different numbers as no mask, identity or constant has? Of some is judged."""
    numbers = weight.flatten()
    return len(numbers[:: 1 + len(numbers) // SAMPLE].unique()) >= VARIED


def stores_inputs_first(source):
    """Are matrices stored as (inputs, outputs), as GPT-2's are, and nobody else's?"""
    d = source.width
    shapes = [shape for name, shape in source.shapes.items() if name.endswith("attn.c_attn.weight")]
    return any(shape[0] == d and shape[-1] != d for shape in shapes)


def residual_rows(weight: Tensor, name, width, inputs_first=False) -> Tensor:
    """A matrix, or a stack, as rows along the residual stream, (n, width): a writer's are its columns."""
    by_columns = weight.shape[-1] == width
    if by_columns and weight.shape[-2] == width:
        writes = WRITES.search(name) is not None
        by_columns = writes == inputs_first
    if not by_columns:
        weight = weight.transpose(-1, -2)
    return weight.reshape(-1, width)
