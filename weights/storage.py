"""How are tensors stored? In .safetensors files, and in files of torch.save.

Nothing is executed: a .safetensors file is a table of names before the numbers, and of a pickle
`weights_only` allows tensors and plain values alone.
"""

import json
import math
from functools import partial

import torch

from lib.files import GIT_LFS, as_user_error
from lib.settings import UserError
from weights import ranges
from weights.files import beginning
from weights.lazy import LazyTensor, row_numbers

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}
DTYPES |= {"I64": torch.int64, "BOOL": torch.bool}
CODES = {dtype: code for code, dtype in DTYPES.items()}
OTHER_ZIPS = (".keras", ".npz")  # a file of torch.save is a zip file, too
OTHER_FORMAT = "files of this format are not read here: load it where it was made, and save its weights as "
OTHER_FORMAT += ".safetensors, by torch.save, or as .gguf"
NESTED = ("model", "state_dict", "model_state_dict", "module")  # where training scripts put the weights


def open_tensors(paths, index=None):
    """The LazyTensors of several files, by name: those that an index, {name: path}, has in each; or all."""
    tensors = {}
    for path in paths:
        begun = beginning(path)
        is_safe = begun[8:9] == "{"  # behind the length of a header
        is_other = path.suffix.lower() in OTHER_ZIPS or not begun.startswith(("PK", GIT_LFS.decode()))
        if begun and is_other and not is_safe:
            raise UserError(f"{path}: {OTHER_FORMAT}")
        with as_user_error(path):
            found = safetensors_of(path) if is_safe else pickled_tensors(path)
        if index:
            found = {name: tensor for name, tensor in found.items() if index.get(name) == path}
        if tensors.keys() & found.keys():
            raise UserError(f"{path} has a part of each matrix, as other files: join the parts first")
        tensors |= found
    return tensors


def safetensors_of(path):
    """The LazyTensors of a .safetensors file, by name; they stand side by side, up to its end."""
    size = int.from_bytes(ranges.read(path, 0, 8), "little")
    if size > ranges.LARGEST_HEADER:
        raise ValueError(f"its header has {size:,} bytes")
    header = json.loads(ranges.read(path, 8, 8 + size))
    header.pop("__metadata__", None)
    tensors = {}
    begin = 8 + size  # of the numbers
    place = begin  # where the next tensor has to begin
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape = entry["shape"]
        dtype = DTYPES.get(entry["dtype"])
        start, stop = entry["data_offsets"]
        is_whole = begin + start == place and all(type(n) is int and n >= 0 for n in shape) and start <= stop
        if not is_whole or (dtype and stop - start != math.prod(shape) * dtype.itemsize):
            raise ValueError(f"{name} of shape {shape} does not stand where it should")
        rows = ranges.Rows(path, place, dtype.itemsize * math.prod(shape[-1:])) if dtype else None
        read = partial(part_of, rows, tuple(shape), dtype)
        tensors[name] = LazyTensor(tuple(shape), entry["dtype"], read, partial(spans_of, rows, tuple(shape)))
        place = begin + stop
    if place != path.stat().st_size:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, expected {place:,}")
    return tensors


def part_of(rows, shape, dtype, part=()):
    """A part of a tensor whose rows stand in a file; no more than its first to its last one is read."""
    numbers = row_numbers(shape, part)
    return rows.read(numbers.flatten()).view(dtype).view((*numbers.shape, *shape[-1:]))


def spans_of(rows, shape, part=()):
    """The bytes of a file that `part_of` reads."""
    return [rows.span(row_numbers(shape, part).flatten())]


def pickled_tensors(path):
    """The LazyTensors of a file of torch.save, by name."""
    values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    nested = [values[key] for key in NESTED if isinstance(values.get(key), dict)]
    return tensors_in(nested[0] if nested else values)


def tensors_in(values, prefix=""):
    """The LazyTensors in dictionaries of dictionaries, by their keys with dots between them."""
    tensors = {}
    for key, value in values.items():
        if isinstance(value, dict):
            tensors |= tensors_in(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise UserError(f"{prefix}{key} is a sparse tensor: save what its to_dense() gives")
        elif isinstance(value, torch.Tensor):
            tensors[f"{prefix}{key}"] = in_memory(value.detach())
    return tensors


def in_memory(tensor):
    """The LazyTensor of a tensor."""
    kind = CODES.get(tensor.dtype, str(tensor.dtype))
    return LazyTensor(tuple(tensor.shape), kind, lambda part=(): tensor[part].clone())
