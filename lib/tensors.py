"""How are tensors read out of files, one at a time, whoever wrote them?

    >>> from pathlib import Path
    >>> files = TensorFiles([Path("/models/Llama-2-7b-hf/model-00001-of-00002.safetensors")])
    >>> files.shapes["model.embed_tokens.weight"]
    (32000, 4096)

A .safetensors file is a table of names before the numbers, and so is a .gguf file. A .bin file of torch.save
is a zip file with a pickle in it: torch reads its tensors alone (`weights_only`), and refuses all else.
"""

import math
import zipfile

import safetensors
import torch

from lib.files import LARGEST, check_regular, check_sum
from lib.gguf import GGUF
from lib.settings import UserError

FLOATS = ("F32", "BF16", "F16", "F64")  # numbers that are weights, as safetensors calls them
QUANTISED = ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2", "F4")  # numbers that stand for weights
NESTED = ("model", "state_dict", "model_state_dict")  # where training scripts put the weights
TORCH_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class SafetensorsFile:
    """The `shapes` and `types` of a .safetensors file's tensors, by name, and the tensors."""

    def __init__(self, path):
        self.path = path
        self.shapes = {}
        self.types = {}
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > LARGEST:
            raise UserError(f"cannot read {path}: its header has {header:,} bytes")
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_slice(name)
                self.shapes[name] = tuple(tensor.get_shape())
                self.types[name] = tensor.get_dtype()

    def read(self, name):
        """One tensor."""
        with safetensors.safe_open(self.path, "pt") as file:
            return file.get_tensor(name)


class TorchFile:
    """The same of a .bin file, which stays mapped into memory."""

    def __init__(self, path):
        check_zip(path)
        self.path = path
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for key in NESTED:
            if isinstance(values.get(key), dict):
                values = values[key]
        self.tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        size = path.stat().st_size
        for name, tensor in self.tensors.items():
            is_here = tensor.layout == torch.strided and tensor.device.type == "cpu"
            if not is_here or tensor.numel() * tensor.element_size() > size:
                raise UserError(f"{path}: {name} has other numbers than the file")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.types = {name: TORCH_TYPES.get(tensor.dtype, "other") for name, tensor in self.tensors.items()}

    def read(self, name):
        """One tensor."""
        return self.tensors[name].detach()


def check_zip(path) -> None:
    """UserError unless a file is a zip file as torch.save writes it: not compressed, its pickle not huge."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"cannot read {path}: it is no zip file, as torch.save has written since version 1.6")
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            is_huge = entry.filename.endswith(".pkl") and entry.file_size > LARGEST
            if entry.compress_type != zipfile.ZIP_STORED or is_huge:
                raise UserError(f"cannot read {path}: torch.save does not write {entry.filename} like this")


def open_file(path):
    """The tensors of one file; UserError for what is no file of tensors."""
    check_regular(path)
    try:
        if path.suffix == ".gguf":
            return GGUF(path)
        return TorchFile(path) if path.suffix in (".bin", ".pt", ".pth") else SafetensorsFile(path)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot read {path}: {type(error).__name__}: {reason}") from None


class TensorFiles:
    """The tensors of several files, read one at a time. Has `shapes` and `types`, by name.

    UserError for what is no such file, and for a tensor that two of them have.
    """

    def __init__(self, paths):
        self.files = {}  # by the name of a tensor
        self.shapes = {}
        self.types = {}
        self.paths = paths
        for path in paths:
            file = open_file(path)
            for name in file.shapes:
                if name in self.files:
                    raise UserError(f"{path}: {name} is in {self.files[name].path.name}, too")
                self.files[name] = file
            self.shapes |= file.shapes
            self.types |= file.types

    def check(self, expected, place, types=FLOATS) -> None:
        """UserError unless the tensors are the `expected` ones, by name and shape, and their files whole."""
        for name in sorted(expected.keys() | self.shapes):
            here = self.shapes.get(name, "missing")
            wanted = expected.get(name, "no such tensor")
            if here != wanted:
                raise UserError(f"{place}: {name} is {here}, expected {wanted}")
            if self.types[name] not in types:
                raise UserError(f"{place}: {name} is of type {self.types[name]}")
        self.check_sums()

    def check_sums(self) -> None:
        """UserError for files that are not those of checksums.json, where there is one."""
        for path in self.paths:
            check_sum(path, largest=math.inf)

    def read(self, name):
        """One tensor, in memory of its own."""
        try:
            return self.files[name].read(name).clone()
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:  # it may be gone by now
            raise UserError(f"cannot read {name}: {error}") from None
