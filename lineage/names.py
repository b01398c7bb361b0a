"""What do the names of tensors tell? (ours)

Names decide where shapes leave a choice: which matrix is an embedding or a head, and which one writes.
"""

import math
import re

NUMBER = re.compile(r"(?<!\d)(\d{1,9})[./_]")  # in a name: of a layer, or an expert
EXPERT = re.compile(r"([^.]+)\.(?:weight)?(\d+)$")  # whose number comes last
LAYER = re.compile(r"(?:^|[._/])(?:layers?|h|blocks?)[._/]?\d{1,9}[._/]")  # where layers are called so
# Masks are called attn.bias, and unrelated models share rotary tables
NO_WEIGHTS = re.compile(r"(?:\.bias|attn\.masked_bias|scales?|inv_freq|freqs_cis|(?:cos|sin)(?:_cached)?)$")
ATTENTION = re.compile(r"(?i)attn|attention|(?:^|\.)(?:[qkvo]_proj|[qkv]_lin|out_lin|to_(?:[qkv]+|out))\b")
ADDED = re.compile(r"(?i)(?:^|[._])(?:lora|vera|svd|dora|ia3|loha|lokr|hada)(?:[._]|$)")  # to a matrix
EMBEDDINGS = set("embed_tokens wte word_embedding word_embeddings embed_in tok_embeddings shared".split())
EMBEDDINGS |= {"embedding", "embeddings"}
LM_HEADS = {"lm_head", "lm_heads", "embed_out", "output"}
NO_EMBEDDING = ("pos", "wpe", "type", "patch", "proj", "score", "class", "pool", "kernel")  # in none's name
WRITE = set("down_proj w2 wo Wo W_out c_proj fc2 fc_out lin2 dense_4h_to_h output.dense".split())  # of MLPs
WRITERS = WRITE | set("o_proj out_proj out_lin self_attention.dense attention.dense".split())
WRITERS |= {"SelfAttention.o", "EncDecAttention.o", "attn.proj"}
ROUTER = {"gate", "router", "layer", "ffn_gate_inp"}
TURNS = "_shortcut_Q"  # SliceGPT's changes of basis end so


def words_of(name):
    """The parts of a name: model, layers, 0, ..."""
    return name.replace("/", ".").split(".")


def end_of(name):
    """The last two parts of a name."""
    return ".".join(words_of(name)[-2:])


def owner_of(name):
    """What a matrix is part of, by its name: of mlp.up_proj.weight `mlp`."""
    return name.removesuffix(".weight").removesuffix(".kernel").rpartition(".")[0]


def is_called(name, names):
    """Are the last one or two parts of a name among these?"""
    words = words_of(name.removesuffix(".weight").removesuffix("kernel").rstrip("./"))
    return words[-1] in names or ".".join(words[-2:]) in names


def is_embedding(name, shape):
    """Is a matrix called an embedding matrix?"""
    return len(shape) == 2 and name.endswith("weight") and is_called(name, EMBEDDINGS)


def is_lm_head(name):
    """Is a matrix called a head? Several are numbered."""
    return is_called(name.removesuffix(".weight").rstrip(".0123456789"), LM_HEADS)


def is_along(name, shape, width):
    """Does a tensor have an axis along the residual stream?"""
    return len(shape) in (2, 3) and width in shape[-2:] and not NO_WEIGHTS.search(name)


def leads_from_images(name, shape, width):
    """Is a tensor a convolution that leads to a stream, or a matrix of patches? No adapter's or head's is."""
    if ADDED.search(name) or ATTENTION.search(name):
        return False
    sizes = [size for size in shape if size > 1]  # of positions (1, T, d) two
    is_patch = len(sizes) == 2 and "patch" in name and sizes[0] == width
    return is_patch or (len(sizes) > 2 and width in sizes)


def adapters_among(names, shapes):
    """Those of a layer's names, {rest: full}, that are adapters: by a word, or by a place below a matrix."""
    owners = {rest.removesuffix("weight") for rest in names if rest.endswith(".weight")}
    added = []
    for rest, full in names.items():
        if len(shapes[full]) < 2:
            continue
        parts = rest.split(".")
        above = {".".join(parts[:length]) + "." for length in range(1, len(parts))}
        own = f"{'.'.join(parts[:-1])}."
        if parts[-1].startswith(("weight", "bias")):
            above.discard(own)  # the matrix itself
        if ADDED.search(full) or above & owners:
            added.append(full)
    return added


def expert_key(rest):
    """A name without its first number, and that number: of experts.7.up.weight experts.#.up.weight, 7."""
    number = NUMBER.search(rest)
    if number is None:
        return rest, None
    return f"{rest[: number.start(1)]}#{rest[number.end(1) :]}", int(number[1])


def size_of(names, shapes):
    """How many numbers some tensors have together."""
    return sum(math.prod(shapes[name]) for name in names)
