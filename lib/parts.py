"""Which tensor of a checkpoint is what? Found by names and shapes, whatever the architecture.

    >>> from lib import checkpoint, parts
    >>> source = checkpoint.parse_spec("tiny_llama@42").open()
    >>> found = parts.find(source)
    >>> found.table, found.head, len(found.mlps), found.mlps[0].norm
    ('model.embed_tokens.weight', 'lm_head.weight', 6, 'model.layers.0.post_attention_layernorm.weight')

Projects name the same things differently, so each kind of thing has a pattern here. A source has `shapes` by
name, `width` (d, of the residual stream), `family` (config.json's model_type) and `read(name)`.
"""

import re
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
    "gate_up": "gate_up_proj|Wi",  # both in one, one above the other
    "gate": "gate_proj|w1|wi_0",
    "up": "up_proj|w3|wi_1|wi|c_fc|fc1|fc_in|lin1|dense_h_to_4h|intermediate\\.dense",
    "down": "down_proj|w2|wo|Wo|c_proj|fc2|fc_out|lin2|dense_4h_to_h|output\\.dense",
}
MLP_MATRIX = {role: re.compile(rf"^(?:(.*)\.)?(?:{names})(?:\.weight)?$") for role, names in ROLES.items()}
NORMS_IN_FRONT = (  # of an MLP: the first of these that the layer has; Falcon's and Phi's attention shares it
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
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
GAINS_FROM_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "nemotron")  # they store gain - 1
LAYERNORMS_WITHOUT_BIAS = ("cohere", "cohere2", "mpt", "dbrx", "olmo")
WRITERS = (  # matrices that write to the residual stream: its coordinates are their rows
    "o_proj|out_proj|c_proj|down_proj|fc2|fc_out|dense_4h_to_h|wo|Wo|w2|lin2|out_lin|output\\.dense"
    "|(?:self_attention|attention)\\.dense|SelfAttention\\.o|EncDecAttention\\.o"
)
WRITES = re.compile(rf"(?:^|\.)(?:{WRITERS})(?:\.weight)?$")
NO_WEIGHTS = re.compile(r"(?:\.bias|inv_freq|attn\.masked_bias|scales?)$")  # masks are called attn.bias


@dataclass(frozen=True)
class MLP:
    """One MLP, or one expert: its layer's number, counted through the model, and the names of its tensors."""

    layer: int
    label: str  # for a reader: "layer 3", "layer 3, expert 5"
    matrices: dict  # names by role: gate, up, down, or gate_up
    expert: int | None  # its place in a stack (experts, ...)
    norm: str | None  # in front of it
    norm_behind: str | None


@dataclass(frozen=True)
class Parts:
    """The names of a model's token table, head (the table itself, if tied) and final norm, and its MLPs."""

    table: str | None
    head: str | None
    norm: str | None
    mlps: list

    @property
    def missing(self):
        """What was not found of all that units are looked for with; "" if nothing."""
        names = {"token table": self.table, "MLPs": self.mlps}
        return " and ".join(name for name, found in names.items() if not found)


def find(source):
    """The Parts of a source. A table or an MLP of another width than the residual stream's is none."""
    outside, layers = {}, {}
    for name, shape in source.shapes.items():
        match = LAYER.search(name)
        if match is None:
            outside[name] = shape
        else:
            prefix = name[: match.end()]
            layers.setdefault((prefix[: match.start(1)], int(match[1])), {})[name[match.end() :]] = name
    tables = {name: shape for name, shape in outside.items() if len(shape) == 2 and shape[1] == source.width}
    gains = {name: shape for name, shape in outside.items() if shape == (source.width,)}
    table = first_match(TABLE, tables)
    head = first_match(HEAD, tables) or table
    norm = first_match(FINAL_NORM, gains)
    mlps = []
    stacks = {stack for stack, _ in layers}
    for layer, (stack, number) in enumerate(sorted(layers)):
        place = f"layer {number + 1}"
        if len(stacks) > 1:  # an encoder and a decoder
            place = f"{stack.split('.')[0]} {place}"
        mlps += mlps_of_layer(source, layer, place, layers[stack, number])
    return Parts(table, head, norm, mlps)


def first_match(pattern, names):
    """The first of some names, sorted, that a pattern matches."""
    return next(filter(pattern.search, sorted(names)), None)


def mlps_of_layer(source, layer, place, names):
    """The MLPs of one layer, whose tensors' `names` are given by the rest of their names."""
    owners = {}  # matrices by role, for each MLP or expert
    for rest, name in sorted(names.items()):
        for role, pattern in MLP_MATRIX.items():
            match = pattern.match(rest)
            shape = source.shapes[name]
            is_in_mlp = match and not ATTENTION.search(rest)
            if is_in_mlp and len(shape) in (2, 3) and source.width in shape[-2:]:
                owners.setdefault(match[1] or "", {}).setdefault(role, name)
    gains = {rest: name for rest, name in names.items() if source.shapes[name] == (source.width,)}
    norm = norm_in_front(gains)
    behind = gains.get(f"{NORM_BEHIND}.weight")
    mlps = []
    for owner, matrices in owners.items():
        shapes = [source.shapes[name] for name in matrices.values()]
        stacks = {shape[:-2] for shape in shapes}  # (), or (experts,)
        if "down" not in matrices or len(matrices) < 2 or len(stacks) > 1:
            continue
        experts = [None]
        if len(shapes[0]) == 3:
            experts = range(shapes[0][0])
        for expert in experts:
            number = expert
            if number is None and ".experts." in f".{owner}.":
                number = int(re.search(r"\d+$", owner)[0])
            label = place if number is None else f"{place}, expert {number + 1}"
            mlps.append(MLP(layer, label, matrices, expert, norm, behind))
    return mlps


def norm_in_front(names):
    """The name of the gain in front of a layer's MLP; None where the norm stands behind it (OLMo 2)."""
    has_one_behind = f"{NORM_BEHIND}.weight" in names
    for norm in NORMS_IN_FRONT[: 1 if has_one_behind else None]:
        rests = [rest for rest in sorted(names) if rest.endswith(f"{norm}.weight")]
        if rests:
            return names[rests[-1]]  # T5's feed-forward layer is a layer's last
    return None


# ---- matrices by the residual stream's coordinates ---------------------------------------------------------


def is_matrix(name, shape, width):
    """Does a tensor have rows along the residual stream?"""
    return len(shape) > 1 and width in shape[-2:] and not NO_WEIGHTS.search(name)


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
