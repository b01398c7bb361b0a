"""Which tensor of a checkpoint is what? Found by names and shapes, whatever the architecture.

    >>> from lib import checkpoint, parts
    >>> source = checkpoint.parse_spec("tiny_llama@42").open()
    >>> found = parts.find(source)
    >>> found.tables, found.heads, len(found.mlps), found.mlps[0].norm
    (['model.embed_tokens.weight'], ['lm_head.weight'], 6, 'model.layers.0.post_attention_layernorm.weight')

Projects name the same things differently, so each kind of thing has a pattern here; where names say nothing,
shapes do. A source has `shapes` by name, `width` (d, of the residual stream), `family` (config.json's
model_type) and `read(name)`.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d{1,9})\.")  # what comes first in a name; T5's has two
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
WRAPPERS = "model|transformer|gpt_neox|backbone|bert|language_model|base_model|module|_orig_mod"
PREFIX = re.compile(rf"^(?:(?:{WRAPPERS})\.)+")
TABLE_NAMES = "embed_tokens|wte|word_embeddings?|embed_in|tok_embeddings|embeddings?|shared"
TABLE = re.compile(rf"(?:^|\.)(?:{TABLE_NAMES})\.weight$")
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.weight$")
FINAL_NORM = re.compile(r"(?:^|\.)(?:norm|ln_f|norm_f|final_norm|final_layer_?norm)\.weight$")
ROLES = {  # of an MLP's matrices
    "gate_up": "gate_up_proj|Wi",  # both in one
    "gate": "gate_proj|w1|wi_0",
    "up": "up_proj|w3|v1|wi_1|wi|c_fc|fc1|fc_in|lin1|dense_h_to_4h|intermediate\\.dense",
    "down": "down_proj|w2|wo|Wo|c_proj|fc2|fc_out|lin2|dense_4h_to_h|output\\.dense",
}
MLP_MATRIX = {role: re.compile(rf"^(?:(.*)\.)?(?:{names})(?:\.weight)?$") for role, names in ROLES.items()}
NORMS_IN_FRONT = (  # of an MLP: the first of these that the layer has; Falcon's and Phi's attention shares it
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "norm_2",
    "ln_2",
    "ln_mlp",
    "ffn_norm",
    "mlp_norm",
    "final_layer_norm",
    "attention.output.LayerNorm",
    "layer_norm",
    "input_layernorm",
    "ln_1",
)
NORM_BEHIND = "post_feedforward_layernorm"  # Gemma 2 and 3, OLMo 2
GAINS_FROM_ONE = (
    "gemma gemma2 gemma3 gemma3_text paligemma qwen3_next nemotron".split()
)  # they store gain - 1
LAYERNORMS_WITHOUT_BIAS = ("cohere", "cohere2", "mpt", "dbrx", "olmo")
WRITERS = (  # matrices that write to the residual stream: its coordinates are their rows
    "o_proj|out_proj|c_proj|down_proj|fc2|fc_out|dense_4h_to_h|wo|Wo|w2|lin2|out_lin|output\\.dense"
    "|(?:self_attention|attention)\\.dense|SelfAttention\\.o|EncDecAttention\\.o"
)
WRITES = re.compile(rf"(?:^|\.)(?:{WRITERS})(?:\.weight)?$")
NO_WEIGHTS = re.compile(r"(?:\.bias|inv_freq|attn\.masked_bias|scales?)$")  # masks are called attn.bias
MOST_EXPERTS = 256  # of a stack that are told apart
MOST_TABLES = 4  # that may be a model's token table


@dataclass(frozen=True)
class MLP:
    """One MLP, or one expert: its layer's number, counted through the model, and the names of its tensors."""

    layer: int
    label: str  # for a reader: "layer 3", "layer 3, expert 5"
    matrices: dict  # names by role: gate, up, down, or gate_up
    expert: int | None  # its place in a stack (experts, ...)
    norm: str | None  # in front of it
    norm_behind: str | None
    is_named: bool  # or else found by shapes, so that gate and up may be each other


@dataclass(frozen=True)
class Parts:
    """What may be a model's token tables and heads (tables, if tied), its final norm, its MLPs, and more."""

    width: int
    tables: list
    heads: list
    norm: str | None
    mlps: list
    unknown: list  # matrices of layers without an MLP, which are not of attention

    @property
    def missing(self):
        """What was not found of all that units are looked for with; "" if nothing."""
        if len(self.tables) > MOST_TABLES:
            return "one token table"
        names = {"token table": self.tables, "MLPs": self.mlps}
        return " and ".join(name for name, found in names.items() if not found)


def find(source):
    """The Parts of a source. Where config.json's width fits no token table, the table's is right."""
    outside, layers = {}, {}
    for name, shape in source.shapes.items():
        match = LAYER.search(name)
        if 0 in shape:
            continue
        if match is None:
            outside[name] = shape
        else:
            prefix = name[: match.end()]
            layers.setdefault((prefix[: match.start(1)], int(match[1])), {})[name[match.end() :]] = name
    matrices = sorted(name for name, shape in outside.items() if len(shape) == 2)
    named = [name for name in matrices if TABLE.search(name)]
    width = source.width
    if named and all(outside[name][1] != width for name in named):
        width = outside[named[0]][1]
    matrices = [name for name in matrices if outside[name][1] == width]
    heads = [name for name in matrices if HEAD.search(name)]
    tables = [name for name in matrices if name in named]
    others = [name for name in matrices if name not in heads and outside[name][0] > width]
    if not tables and others:
        tables = [max(others, key=lambda name: outside[name][0])]
    gains = sorted(name for name, shape in outside.items() if shape == (width,) and FINAL_NORM.search(name))
    mlps, unknown = [], []
    stacks = {stack for stack, _ in layers}
    for layer, (stack, number) in enumerate(sorted(layers)):
        place = f"layer {number + 1}"
        if len(stacks) > 1:  # an encoder and a decoder
            place = f"{stack.split('.')[0]} {place}"
        names = {rest: name for rest, name in layers[stack, number].items() if not ATTENTION.search(rest)}
        shapes = {name: source.shapes[name] for name in names.values()}
        shapes = {name: shape for name, shape in shapes.items() if is_matrix(name, shape, width)}
        found = named_mlps(names, shapes, width)
        is_named = len(found) > 0
        if not is_named:
            found = mlps_by_shape(shapes, width)
        if not found:
            unknown += shapes
        norms = norms_of_layer(source, layers[stack, number], width)
        for owner, roles in found.items():
            for expert in experts_of(source.shapes[roles["down"]]):
                number = expert
                if number is None and re.search(r"\.experts\.(\d+)", f".{owner}"):
                    number = int(re.search(r"\.experts\.(\d+)", f".{owner}")[1])
                label = place if number is None else f"{place}, expert {number + 1}"
                mlps.append(MLP(layer, label, roles, expert, *norms, is_named))
    return Parts(width, tables, heads or tables[:1], next(iter(gains), None), mlps, unknown)


def experts_of(shape):
    """The places of the experts in a stack of matrices; one None for a matrix."""
    return [None] if len(shape) == 2 else range(min(shape[0], MOST_EXPERTS))


def units_of(shape, width):
    """The number of units that a matrix, or a stack, has a row or a column for."""
    return shape[-2] if shape[-1] == width else shape[-1]


def named_mlps(names, shapes, width):
    """The matrices of each MLP by their role, by the name of their owner, where names tell."""
    owners = defaultdict(dict)
    for rest, name in sorted(names.items()):
        for role, pattern in MLP_MATRIX.items():
            match = pattern.match(rest)
            if match and name in shapes:
                owners[match[1] or ""].setdefault(role, name)
    found = {}
    for owner, roles in owners.items():
        if "down" in roles and len(roles) > 1:
            if "gate" in roles and "up" not in roles:  # w1 and w2, without a w3
                roles["up"] = roles.pop("gate")
            units = {role: units_of(shapes[name], width) for role, name in roles.items()}
            if len(roles) == 2 and units.get("up") == 2 * units["down"]:
                roles["gate_up"] = roles.pop("up")
            if {units[role] for role in units} in ({units["down"]}, {units["down"], 2 * units["down"]}):
                found[owner] = roles
    return found


def mlps_by_shape(shapes, width):
    """The same of a layer's matrices whose names tell nothing: one writes what one or two others read."""
    reads, writes = defaultdict(list), defaultdict(list)
    for name, shape in sorted(shapes.items()):
        if shape[-1] != shape[-2]:
            kind = reads if shape[-1] == width else writes
            kind[units_of(shape, width), shape[:-2]].append(name)
    if sum(map(len, writes.values())) > sum(map(len, reads.values())):  # matrices are (inputs, outputs)
        reads, writes = writes, reads
    for (units, stack), down in writes.items():
        single, double = reads[units, stack], reads[2 * units, stack]
        if len(down) == 1 and len(single) == 2:
            return {"": {"gate": single[0], "up": single[1], "down": down[0]}}
        if len(down) == 1 and len(single) == 1:
            return {"": {"up": single[0], "down": down[0]}}
        if len(down) == 1 and len(double) == 1:
            return {"": {"gate_up": double[0], "down": down[0]}}
    return {}


def norms_of_layer(source, names, width):
    """The names of the gains in front of a layer's MLP and behind it; OLMo 2 has none in front."""
    gains = {rest: name for rest, name in names.items() if source.shapes[name] == (width,)}
    behind = gains.get(f"{NORM_BEHIND}.weight")
    for norm in NORMS_IN_FRONT[: None if behind is None else 1]:
        rests = [rest for rest in sorted(gains) if rest.endswith(f"{norm}.weight")]
        if rests:
            return gains[rests[-1]], behind  # T5's feed-forward layer is a layer's last
    return None, behind


# ---- matrices by the residual stream's coordinates ---------------------------------------------------------


def is_matrix(name, shape, width):
    """Does a tensor have rows along the residual stream?"""
    return len(shape) in (2, 3) and width in shape[-2:] and not NO_WEIGHTS.search(name)


def is_in_a_layer(name):
    """Is a tensor of a layer, not a table?"""
    return LAYER.search(name) is not None


def plain_name(name):
    """A tensor's name without what wraps the model, which differs between folders of one architecture."""
    return PREFIX.sub("", name)


def stores_inputs_first(source):
    """Are matrices stored as (inputs, outputs), as GPT-2's are, and nobody else's?"""
    d = source.width
    shapes = [shape for name, shape in source.shapes.items() if name.endswith("attn.c_attn.weight")]
    return any(shape[0] == d and shape[-1] != d for shape in shapes)


def residual_rows(weight: Tensor, name, width, inputs_first=False) -> Tensor:
    """A matrix, or a stack, as rows along the residual stream, (n, width): a writer's are its columns.

    The stream's axis is the one that is `width` long; where both are, the name decides.
    """
    by_columns = weight.shape[-1] == width
    if by_columns and weight.shape[-2] == width:
        writes = WRITES.search(name) is not None
        by_columns = writes == inputs_first
    if not by_columns:
        weight = weight.transpose(-1, -2)
    return weight.reshape(-1, width)
