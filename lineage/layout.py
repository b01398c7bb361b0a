"""Which tensors of a checkpoint are layers, what is each of them, and what feeds them? (ours)

A *stack* is a run of tensors whose names differ in one number, the layer's, and whose layers read and write
a stream of one width. An encoder and its decoder are two, even if one embedding matrix feeds both. Stacks are
found by structure. What a layer's matrices are, their names tell, or else their shapes: each kind has one
pattern here. A checkpoint has `shapes` by name, `family`, `place` and `read(name)`.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from lib.settings import UserError
from lineage.table import A_TENTH, DEEP, LATE
from strangers.formats import packed_error

NUMBER = re.compile(r"(?<!\d)(\d{1,9})[./_]")  # in a name: of a layer, an expert, a codebook
LAYERS = r"(?:^|[._/])(?:layers?|h|blocks?)[._/]?"  # what a single layer is called
BEFORE_LAYER, LAYER = re.compile(LAYERS + "$"), re.compile(LAYERS + r"\d{1,9}[._/]")
TABLE_NAMES = "embed_tokens|wte|word_embeddings?|embed_in|tok_embeddings|embeddings?|shared"
TABLE = re.compile(rf"(?:^|[./])(?:{TABLE_NAMES})[./]weight$")
HEAD = re.compile(r"(?:^|[./])(?:lm_heads?|embed_out|output)(?:\.\d+)?[./](?:weight|kernel)$")
NO_TABLE = re.compile(r"pos|wpe|type|patch|proj|score|class|pool|kernel$")  # in names of no embedding matrix
# Masks are called attn.bias, and unrelated models share rotary tables
NO_WEIGHTS = re.compile(r"(?:\.bias|attn\.masked_bias|scales?|inv_freq|freqs_cis|(?:cos|sin)(?:_cached)?)$")
ATTENTION = re.compile(r"(?i)attn|attention|(?:^|\.)(?:[qkvo]_proj|[qkv]_lin|out_lin|to_(?:[qkv]+|out))\b")
FACTORS = re.compile(r"(?i)(?:^|[._])(?:lora|vera|svd|dora|ia3|loha|lokr|hada)(?:[._]|$)")  # of what is added
ADAPTER = re.compile(rf"{FACTORS.pattern}|(?i:(?:^|[._])adapters?(?:[._]|$))")  # in a layer
TURNS = re.compile(r"_shortcut_Q$")  # SliceGPT's: from the basis of one matrix to that of the next
GAIN = r"(?:\.weight|\.scale|\.w|_weight)$"
FINAL_NORM = re.compile(rf"(?:^|\.)(?:norm|ln_f|norm_f|ln_final|final_norm|final_layer_?norm){GAIN}")
NORM = re.compile(r"(?i)norm|(?:^|[._])ln")
MOSTLY = 0.8  # of the values of a gain have one sign, less the others
SUFFIX = r"(?:\.weight|\.kernel)?$"
# An MLP's matrix that writes; those that read, and which of them is a gate, shapes and their order tell
DOWN_NAMES = "down_proj|w2|wo|Wo|W_out|c_proj|fc2|fc_out|lin2|dense_4h_to_h|output\\.dense"
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
WRITES = re.compile(rf"(?:^|\.)(?:{WRITERS}){SUFFIX}")
PIECE, VARIED = 16, 60  # numbers side by side; how many such pieces must differ, as no mask's do
BATCH = 4096  # numbers, or rows, of a matrix that are looked at together
OF_ATTENTION = 4  # matrices that a layer without an MLP has
BASES, PACKED = "changes of basis", "packed weights"  # what was not looked at
WITHOUT_MLP = "layers without an MLP that can be read"
TRIED = 3  # layers, or embedding matrices, at most, where ways to read two models are tried


@dataclass(frozen=True)
class MLP:
    """One MLP, or one expert, and the names of its tensors."""

    layer: int  # from 1
    label: str  # for a reader: "layer 3", "layer 3, expert 5"
    matrices: dict  # names by role: gate, up, down, or gate_up
    is_named: bool  # does a name tell which matrix writes? If not, of two matrices this is a guess
    expert: int | None  # its number in a stack of experts
    norm: str | None  # in front of it
    norm_behind: str | None
    knows_norm: bool  # or there is none

    @property
    def views(self):
        """What there is to see of a unit: its gate, where MLPs have them, its up and its down weights."""
        return ("gate", "up", "down") if self.matrices.keys() & {"gate", "gate_up"} else ("up", "down")


@dataclass(frozen=True, eq=False)
class Run:
    """Tensors whose names differ in one number: the layers of a stack."""

    prefix: str  # what begins their names, up to that number
    width: int  # of the stream
    layers: dict  # by that number: full names by what follows it


@dataclass(frozen=True, eq=False)
class Stack(Run):
    """A run of layers without their adapters, and what stands beside it: a model, or a part of one."""

    source: object = None  # the checkpoint
    model: str = ""  # what it is called
    name: str = ""  # what begins the stack's names, and no other stack's; "" where there are no others
    size: int = 0  # parameters in its layers
    is_fed: bool = False  # does a table of tokens lead to it, or may one?
    tables: list = field(default_factory=list)  # that may be its embedding matrix: a name each, or two names
    heads: list = field(default_factory=list)  # the tables, if tied
    norm: str | None = None  # in front of the head
    mlps: list = field(default_factory=list)
    matrices: dict = field(default_factory=dict)  # along the stream, by (layer's number, rest of name)
    unread: dict = field(default_factory=dict)  # what was not looked at, with its share of the layers
    may_have_units: bool = False  # even if none were found?

    def is_middle(self, layer):
        """Does a layer stand before its last quarter, and in a deep stack behind the first layer?"""
        depth = len(self.layers)
        return (layer - 1) / depth < LATE and not (layer == 1 and depth >= DEEP)

    @property
    def missing(self):
        """What was not found of all that units are looked for with; "" if nothing."""
        if len(self.tables) > TRIED:
            return "one embedding matrix"
        names = {"embedding matrix": self.tables, "MLPs": self.mlps}
        return " and ".join(name for name, found in names.items() if not found)

    @property
    def has_head(self):
        """Has it a head of its own?"""
        return self.heads != self.tables

    @property
    def rank(self):
        """Which stack of several is the model? What reads tokens, has a head of its own, and MLPs."""
        return bool(self.tables), self.has_head, bool(self.mlps)

    @property
    def may_lack_table(self):
        """May the only matrix of tokens be a head, whose table was not found?"""
        if len(self.tables) != 1 or self.has_head:
            return False
        name = self.tables[0][0]
        return not TABLE.search(name) and "emb" not in end_of(name)

    @property
    def hides(self):
        """May a child hide in what was not looked at?"""
        return self.unread.get(BASES, 0) > 0 or sum(self.unread.values()) > A_TENTH


def find_stacks(source, model=""):
    """The Stacks of a checkpoint: first what reads tokens, and of these what has a head; the larger first."""
    shapes = source.shapes
    runs = runs_of(shapes)
    inside = {name for run in runs for names in run.layers.values() for name in names.values()}
    outside = {name: shape for name, shape in shapes.items() if name not in inside}
    if not runs:
        widths = [shape[1] for name, shape in outside.items() if len(shape) == 2 and TABLE.search(name)]
        runs = [Run("", max(widths, default=0), {})]
    reach = {name: closest(name, runs) for name in outside}
    with_images = [run for run in runs if reads_images(run, outside, reach)]
    tables = tables_of(runs, with_images, shapes, outside, reach)
    stacks = []
    for run in runs:
        beside = [name for name in outside if name in tables[run] or run in reach[name]]
        is_fed = bool(tables[run]) or (run not in with_images and may_be_fed(run, tables, outside, reach))
        naming = {"model": model, "name": common_name(run, runs), "is_fed": is_fed}
        stacks.append(stack_of(source, run, tables[run], beside, run in with_images, naming))
    if not any(stack.mlps for stack in stacks):
        if any(stack.unread[PACKED] for stack in stacks):
            raise packed_error(source.place, source.packed)
        if all(stack.unread["adapters"] > 1 for stack in stacks):
            raise UserError(f"{source.place} is an adapter: merge it into its base, and save that")
    return sorted(stacks, key=lambda stack: (stack.rank, stack.size), reverse=True)


def stack_of(source, run, named, beside, with_images, naming):
    """The Stack of a Run: `named` may be its embedding matrices, and the names `beside` are its own, too."""
    shapes, width = source.shapes, run.width
    tables, heads = tables_and_heads(named, beside, shapes, width)
    known = dict.fromkeys(name for names in tables + heads for name in names)  # in one order
    matrices = {(None, end_of(name)): name for name in known if is_matrix(name, shapes[name], width)}
    unknown = [name for name in beside if len(shapes[name]) > 1 and name not in known]
    adapters = [name for name in beside if FACTORS.search(name) and len(shapes[name]) > 1]
    layers, mlps, without_mlp = {}, [], []
    for layer, (number, tensors) in enumerate(run.layers.items(), start=1):
        layers[number], changes = without_adapters(tensors, shapes)
        found, others = mlps_of_layer(source, layers[number], width, layer)
        adapters += changes
        mlps += found
        unknown += others
        without_mlp += [] if found else others
        for rest, name in layers[number].items():
            if is_matrix(name, shapes[name], width):
                matrices[number, rest] = name

    def size_of(names):
        return sum(math.prod(shapes[name]) for name in names)

    packed = getattr(source, "packed", {})  # how many numbers each, about, as of 4 bits
    num_packed = sum(count for name, count in packed.items() if name.startswith(run.prefix))
    size = num_packed + sum(size_of(tensors.values()) for tensors in layers.values())
    unread = {"adapters": size_of(adapters), WITHOUT_MLP: size_of(without_mlp)}
    unread |= {BASES: size_of(filter(TURNS.search, shapes)), PACKED: num_packed}
    tall = [name for name in beside if shapes[name][1:] == (width,) and 2 * shapes[name][0] >= width]
    may_read_tokens = not with_images or named or any(not NO_TABLE.search(end_of(name)) for name in tall)
    gains = gains_of({name: name for name in beside}, source, width)
    norms = [name for name in gains if FINAL_NORM.search(name) or len(gains) == 1]
    return Stack(
        source=source,
        prefix=run.prefix,
        width=width,
        layers=layers,
        size=size,
        tables=tables,
        heads=heads or tables,
        norm=norms[0] if norms else None,
        mlps=mlps,
        matrices=matrices,
        unread={what: count / max(1, size) for what, count in unread.items()},
        may_have_units=bool(may_read_tokens and (mlps or unknown or getattr(source, "names_mlps", False))),
        **naming,
    )


def tables_and_heads(named, beside, shapes, width):
    """The embedding matrices and the heads of a stack: a name each, or the names of two as a product."""
    matrices = {name: shapes[name] for name in beside if len(shapes[name]) == 2}
    tables, heads = [], []
    if named:
        heads = [(name,) for name, shape in matrices.items() if shape[1] == width and HEAD.search(name)]
    for table in named:
        size = matrices[table][1]
        if size == width:
            tables.append((table,))
        else:  # ELECTRA's, ALBERT's, OPT-350m's: a matrix leads to the width, and one back to the head
            tables += [(table, name) for name, shape in matrices.items() if shape == (width, size)]
            heads += [(table, name) for name, shape in matrices.items() if shape == (size, width)]
    return tables, heads


def runs_of(shapes):
    """Every Run of a checkpoint: the outermost number in a name that counts layers.

    A single layer is one if it is called so. Where layers are called so, a number before theirs counts more
    than layers: stages, or models.
    """
    numbered = defaultdict(lambda: defaultdict(dict))
    for name in sorted(shapes):
        for number in NUMBER.finditer(name):
            rest = name[number.end() :].replace("/", ".")
            numbered[name[: number.start(1)]][int(number[1])][rest] = name
    found, taken = [], set()
    for prefix in sorted(numbered, key=lambda prefix: (len(prefix), prefix)):
        runs = {n: names for n, names in numbered[prefix].items() if taken.isdisjoint(names.values())}
        is_named = BEFORE_LAYER.search(prefix) is not None
        if not is_named and any(LAYER.search(rest) for names in runs.values() for rest in names):
            continue
        width = width_of(shapes, runs)
        layers = {n: runs[n] for n in sorted(runs) if is_layer(shapes, runs[n].values(), width)}
        if len(layers) > 1 or (is_named and len(layers) == len(runs) == 1):
            found.append(Run(prefix, width, layers))
            for names in layers.values():
                taken |= {*names.values()}
    return sorted(found, key=lambda run: run.prefix)


def width_of(shapes, layers):
    """The width of the stream of some layers: the axis by which most read and write, and of most numbers.

    Those of matrices count first whose two axes are both read and written, as lookup tables' are not.
    """
    linking, sizes = Counter(), Counter()
    for names in layers.values():
        matrices = [shapes[name] for name in names.values() if len(shapes[name]) in (2, 3)]
        inner = {shape[-2] for shape in matrices} & {shape[-1] for shape in matrices}
        for shape in matrices:
            numbers = dict.fromkeys(shape[-2:], math.prod(shape))
            sizes.update(numbers)
            if numbers.keys() <= inner:
                linking.update(numbers)

    def weight_of(size):
        num_layers = sum(is_layer(shapes, names.values(), size) for names in layers.values())
        return num_layers, linking[size], sizes[size], -size

    return max(sizes, key=weight_of, default=0)


def is_layer(shapes, names, width):
    """Has a layer of such tensors a matrix that reads the stream, and another one that writes to it?"""
    axes = [shapes[name][-2:] for name in names if is_matrix(name, shapes[name], width)]
    rows, columns = zip(*axes) if len(axes) > 1 else ((), ())
    return width in rows and width in columns


def is_matrix(name, shape, width):
    """Does a tensor have rows along the residual stream?"""
    return len(shape) in (2, 3) and width in shape[-2:] and not NO_WEIGHTS.search(name)


def beginnings(name):
    """What a name begins with, up to each of its separators, the longest first; at last nothing."""
    separators = "[./]" if re.search("[./]", name) else "_"
    ends = [found.end() for found in re.finditer(separators, name)]
    return [name[:end] for end in reversed([0, *ends])]


def closest(name, runs):
    """The runs that share with a tensor the longest beginning of their names."""
    for start in beginnings(name):
        found = [run for run in runs if run.prefix.startswith(start)]
        if found:
            return found
    return []


def common_name(run, runs):
    """The shortest beginning of a run's names that no other run's has; "" where there is no other."""
    others = [other.prefix for other in runs if other is not run]
    starts = reversed(beginnings(run.prefix))
    own = [start for start in starts if not any(prefix.startswith(start) for prefix in others)]
    return (own or [run.prefix])[0].rstrip("._/")


def end_of(name):
    """The last two parts of a name."""
    return ".".join(re.split("[./]", name)[-2:])


def reads_images(run, outside, reach):
    """Does a convolution lead to a run, or a matrix of patches? Factors of an adapter are no convolution."""
    for name in [name for name in outside if reach[name] == [run] and not FACTORS.search(name)]:
        sizes = [size for size in outside[name] if size > 1]  # of positions (1, T, d) two
        is_patch = len(sizes) == 2 and "patch" in name and sizes[0] == run.width
        if is_patch or (len(sizes) > 2 and run.width in sizes):
            return True
    return False


def tables_of(runs, with_images, shapes, outside, reach):
    """The names of the matrices that may be each Run's embedding matrix.

    Names tell an embedding matrix, or else its rows: of the matrices that lead to a run which none feeds by
    name, all that have at least half as many as the largest. Each of them is tried as table and as head. What
    is called a head is the last choice: it may be tied.
    """
    tables = {run: [] for run in runs}
    free = [run for run in runs if run not in with_images]
    matrices = [name for name, shape in outside.items() if len(shape) == 2]
    for name in filter(TABLE.search, matrices):
        for run in fed_by(name, outside, free) or fed_by(name, outside, runs):
            tables[run].append(name)
    others = [name for name in matrices if HEAD.search(name) or not NO_TABLE.search(end_of(name))]
    others = [name for name in others if not any(tables[run] for run in reach[name])]
    for run in [run for run in free if not tables[run]]:
        leading = [name for name in others if run in fed_by(name, outside, free)]
        most = max((outside[name][0] for name in leading), default=0)
        large = [name for name in leading if 2 * outside[name][0] >= most]
        tables[run] = [name for name in large if not HEAD.search(name)] or large
    fed = [run for run in runs if tables[run]]
    for run in [run for run in free if not tables[run]]:
        # A decoder has all that the encoder has beside which the table stands, and more.
        encoders = [
            other for other in fed if other.width == run.width and kinds(other, shapes) < kinds(run, shapes)
        ]
        tables[run] = [*dict.fromkeys(name for encoder in encoders for name in tables[encoder])]
    return tables


def may_be_fed(run, tables, outside, reach):
    """May a table of tokens lead to a run that none was found for?

    A matrix with as many rows or columns as half of the most tokens may be one, however it is stored. Or a
    table of the run's width may lead to it, unless a matrix of its own does, as a tower's of patches.
    """
    known = {name for names in tables.values() for name in names}
    most = max((outside[name][0] for name in known), default=0)
    may_share = not known or run.width in {outside[name][1] for name in known}
    for name, shape in outside.items():
        if run in reach[name] and len(shape) == 2 and run.width in shape and name not in known:
            if 2 * max(shape) >= most and not HEAD.search(name):
                return True
            may_share &= not (reach[name] == [run] and shape[0] == run.width != shape[1])
    return may_share


def kinds(run, shapes):
    """What the matrices of a run's layers are called, those of all experts alike."""
    named = [item for names in run.layers.values() for item in names.items()]
    return {NUMBER.sub("", rest) for rest, name in named if len(shapes[name]) > 1}


def fed_by(name, outside, runs):
    """Those of some runs whose stream a table leads to, narrow ones by a projection: the closest ones."""
    size = outside[name][1]
    fitting = [run for run in runs if run.width == size]
    if not fitting and TABLE.search(name):
        shapes = {*outside.values()}
        fitting = [run for run in runs if {(run.width, size), (size, run.width)} & shapes]
    return closest(name, fitting)


def without_adapters(names, shapes):
    """A layer's full names by their rest without matrices that change its others; and these."""
    owners = {rest.removesuffix("weight") for rest in names if rest.endswith(".weight")}
    kept, adapters = {}, []
    for rest, name in names.items():
        inner = [rest.removeprefix(start) for start in beginnings(rest) if start in owners]
        changes = ADAPTER.search(rest) or not all(end.startswith(("weight", "bias")) for end in inner)
        if changes and len(shapes[name]) > 1:
            adapters.append(name)
        else:
            kept[numbered_first(rest.replace(".base_layer", ""))] = name
    return kept, adapters


def numbered_first(rest):
    """A name whose last part is an expert's number, `experts.up.3` or `fc1.weight3`: `experts.3.up`."""
    found = re.fullmatch(r"(?:(.*)\.)?([^.]+)\.(?:weight)?(\d+)", rest)
    return f"{found[1] or ''}.{found[3]}.{found[2]}".lstrip(".") if found else rest


def mlps_of_layer(source, names, width, layer):
    """A layer's MLPs, and its matrices that are not plainly attention's. `names` are full ones by their rest.

    A layer with {"mlp.up_proj.weight": (704, 256), "mlp.down_proj.weight": (256, 704), ...} has one MLP, of
    owner "mlp" and with the roles {"up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight"}.
    """
    shapes = source.shapes
    matrices = [rest for rest, name in names.items() if len(shapes[name]) > 1]
    others = [rest for rest in matrices if not ATTENTION.search(rest)]
    unknown = [names[rest] for rest in others or matrices[OF_ATTENTION:]]
    if is_factored([rest for rest in matrices if len(shapes[names[rest]]) == 2]):
        return [], unknown
    norms = norms_of_layer(source, names, width)
    mlps = []
    for axes in (2, 3):  # a plain MLP may stand beside a stack of experts
        alike = {}
        for rest in others:
            shape = shapes[names[rest]]
            if len(shape) == axes and is_matrix(names[rest], shape, width):
                alike[rest] = shape
        for owner, roles in mlps_by_shape(alike, width).items():
            of_roles = {role: names[rest] for role, rest in roles.items()}
            largest = max(unknown, key=lambda name: (math.prod(shapes[name]), name in of_roles.values()))
            if not owner and largest not in of_roles.values():
                continue  # matrices of two owners, beside a larger one: of two MLPs, perhaps
            is_named = DOWN.search(roles["down"]) is not None
            number = re.search(r"\.experts?\.(\d+)$", f".{owner}")
            for expert in [None] if axes == 2 else range(alike[roles["down"]][0]):
                label = f"layer {layer}"
                if number or expert is not None:
                    label += f", expert {1 + (int(number[1]) if number else expert)}"
                mlps.append(MLP(layer, label, of_roles, is_named, expert, *norms))
    return mlps, unknown


def is_factored(matrices):
    """Is a matrix stored as a product, up_proj.U and up_proj.V, or up_u_proj? Its inner size is no units'."""
    owners = Counter(rest.removesuffix(".weight").rpartition(".")[0] for rest in matrices)
    several = [owner for owner, count in owners.items() if count > 1 and not ATTENTION.search(owner)]
    return any(map(FACTOR.search, matrices)) or any(map(PROJECTION.search, several))


def mlps_by_shape(shapes, width):
    """The matrices of each MLP by role, by their owner's name: of those of one owner, or else of all."""
    owners = defaultdict(dict)
    for rest, shape in shapes.items():
        owners[re.sub(SUFFIX, "", rest).rpartition(".")[0]][rest] = shape
    found = {owner: roles_by_shape(members, width) for owner, members in owners.items()}
    if not any(found.values()):
        owners = {"": shapes}
        found = {"": roles_by_shape(shapes, width)}
    found = {owner: roles for owner, roles in found.items() if roles}
    whole = {owner: roles for owner, roles in found.items() if len(roles) == len(owners[owner])}
    found = whole or found  # of an attention's matrices two may look like an MLP, and others are left
    named = {owner: roles for owner, roles in found.items() if DOWN.search(roles["down"])}
    return named or found  # where names tell of some which matrix writes, no others count


def roles_by_shape(shapes, width):
    """The matrices of an MLP by role: one writes what one or two others read; {} if there is none.

    A name tells the one that writes, but where its shape is another's, and the third one's is not: of
    xFormers' w1, w2 and w3 the last writes.
    """
    reads, writes = defaultdict(list), defaultdict(list)  # by the number of units
    named = [rest for rest in shapes if DOWN.search(rest)]
    counts = Counter(shapes.values())
    if sorted(counts.values()) == [1, 2] and any(counts[shapes[rest]] == 2 for rest in named):
        named = []
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


def units_of(shape, width):
    """The number of units that a matrix, or a stack, has a row or a column for."""
    return shape[-2] if shape[-1] == width else shape[-1]


def gains_of(names, source, width):
    """Of full names by their rests those of vectors along the stream that are gains.

    They have a norm's name, or else values mostly of one sign, as biases have not.
    """
    gains = {}
    for rest, name in names.items():
        if source.shapes[name] == (width,) and not rest.endswith("bias"):
            if NORM.search(rest) or source.read(name).sign().float().mean().abs() > MOSTLY:
                gains[rest] = name
    return gains


def norms_of_layer(source, names, width):
    """The gains in front of a layer's MLP and behind it, and if these are known. OLMo 2 has none in front."""
    gains = gains_of(names, source, width)
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
    """Do most pieces of a tensor differ, as no mask's, identity's or constant's do? Of some is judged.

    Single numbers would not tell: in eight bits, or by a scale, weights have few different ones.
    """
    numbers = weight.flatten()
    pieces = numbers[: len(numbers) // PIECE * PIECE].view(-1, PIECE)
    pieces = pieces[:: 1 + len(numbers) // (BATCH + 1)].float().numpy()
    return len({piece.tobytes() for piece in pieces}) > max(VARIED, len(pieces) / 2)
