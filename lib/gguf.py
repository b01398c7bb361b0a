"""What is in a .gguf file, as llama.cpp and Ollama keep models?

    >>> tensors = GGUF(smollm2()).tensors
    >>> tensors["model.layers.0.self_attn.k_proj.weight"].read().shape  # one at a time, dequantised
    torch.Size([192, 576])

The header is a stranger's, so it is read here: whatever it counts or points to must lie within the file. The
package `gguf` knows how numbers are packed, and what tensors are called.
"""

import math
import re
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from lib import gguf_tokenizers
from lib.settings import INSTALL, UserError

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LARGEST_HEADER = 2**25  # bytes; Gemma's, with 262,144 tokens, has half of it
MOST_TENSORS = 200_000  # DeepSeek-V3 has 91,000
PARTS = r"self_attn\.[qkvo]_(proj|norm)|mlp\.(experts\.)?(gate|up|down)_proj"
PARTS += r"|(input|post_attention|pre_feedforward|post_feedforward)_layernorm"
NAMES = re.compile(rf"model\.(embed_tokens|norm|layers\.\d+\.({PARTS}))|lm_head")  # Hugging Face's


class Stored(NamedTuple):
    """A tensor in a file, of any format; `read()` reads it, and whoever changes it copies it first."""

    shape: tuple
    kind: str  # of its numbers, as the file calls it
    read: Callable


class Header:
    """Numbers, strings and arrays, one after another; what lies beyond LARGEST_HEADER is an error."""

    def __init__(self, data):
        self.data = memoryview(data)[:LARGEST_HEADER]
        self.place = 0

    def number(self, kind):
        start = self.place
        self.place += struct.calcsize(f"<{kind}")
        return struct.unpack_from(f"<{kind}", self.data, start)[0]

    def value(self, kind=STRING):
        if kind == STRING:
            size = self.number("Q")
            self.place += size
            return str(self.data[self.place - size : self.place], "utf-8")
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            return [self.value() for _ in range(count)]
        array = np.frombuffer(self.data, f"<{NUMBERS[kind]}", count, self.place)
        self.place += array.nbytes
        return array


class GGUF:
    """A regular .gguf file; errors of many kinds, soon, for a damaged one.

    Has `values`, the header's, and `tensors`, each a Stored, by Hugging Face's names.
    """

    def __init__(self, path):
        try:
            import gguf
        except ImportError:
            raise UserError(f"{path} takes a package more: {INSTALL}") from None
        self.values, self.tensors = {}, {}
        data = np.memmap(path, np.uint8, "r").view(np.ndarray)  # whose slices are quick
        header = Header(data)
        if header.number("I") != gguf.GGUF_MAGIC or header.number("I") not in (2, 3):
            raise ValueError("expected GGUF of version 2 or 3")
        num_tensors, num_values = header.number("Q"), header.number("Q")
        if num_tensors > MOST_TENSORS:
            raise ValueError(f"{num_tensors:,} tensors")
        for _ in range(num_values):
            key = header.value()
            self.values[key] = header.value(header.number("I"))
        if self.values.get("split.count", 0) > 1:
            raise ValueError("one part of several; llama-gguf-split --merge joins them")
        architecture = self.values["general.architecture"]
        paired = {}  # heads whose rows of q and k stand in pairs to rotate
        if architecture == "llama":
            paired["q_proj"] = self.values["llama.attention.head_count"]
            paired["k_proj"] = self.values.get("llama.attention.head_count_kv", paired["q_proj"])
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        num_layers = min(self.values.get(f"{architecture}.block_count", 0), 256)  # their names are listed
        known = gguf.get_tensor_name_map(kinds.get(architecture, gguf.MODEL_ARCH.LLAMA), num_layers).mapping
        names = {name: theirs for theirs, (_, name) in known.items() if NAMES.fullmatch(theirs)}
        infos = []
        for _ in range(num_tensors):
            stem, _, suffix = header.value().rpartition(".")
            name = names.get(stem, stem.replace("blk.", "model.layers."))
            shape = tuple(header.number("Q") for _ in range(min(header.number("I"), 4)))[::-1]
            kind = gguf.GGMLQuantizationType(header.number("I"))
            infos.append((f"{name}.{suffix}", shape, kind, header.number("Q")))
        alignment = self.values.get("general.alignment", 32)
        start = -(-header.place // alignment) * alignment
        for name, shape, kind, place in infos:
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            size = math.prod(shape) // block * block_bytes
            numbers = data[start + place :][:size]
            if len(numbers) < size or 0 in shape or shape[-1] % block or name in self.tensors:
                raise ValueError(f"{name} of shape {shape} is not in the file, or twice")
            read = partial(unpacked, numbers.reshape(*shape[:-1], -1), kind, paired.get(name.split(".")[-2]))
            self.tensors[name] = Stored(shape, "F32", read)

    @property
    def has_known_tokenizer(self):
        """Can text be cut by its tokenizer?"""
        return gguf_tokenizers.is_known(self.values)


def unpacked(packed, kind, heads):
    """A tensor of packed numbers, float32; where `heads` is given, their rows are no longer in pairs."""
    import gguf

    rows = packed.shape[:-1]
    packed = packed.reshape(
        math.prod(rows) // math.gcd(math.prod(rows), 8), -1
    )  # 16 short rows at a time are slow
    weight = torch.from_numpy(np.require(gguf.dequantize(packed, kind), np.float32, "W")).view(*rows, -1)
    if heads:
        weight = weight.view(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
    return weight
