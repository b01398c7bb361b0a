"""lib/formats.py: every way to store weights, and what is no folder of weights."""

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import KINDS, random_model, run_here

from lib import checkpoint, formats
from lib.files import read_json
from lib.settings import UserError


@pytest.fixture
def folder(tmp_path):
    """A folder of ours, `a`."""
    checkpoint.save(tmp_path / "a", random_model(KINDS["llama"]))
    return tmp_path / "a"


@pytest.mark.parametrize("suffix, is_sharded", [(".bin", False), (".bin", True), (".safetensors", True)])
def test_weights_do_not_hang_on_how_they_are_stored(suffix, is_sharded, folder):
    stem = {".bin": "pytorch_model", ".safetensors": "model"}[suffix]
    save = {".bin": torch.save, ".safetensors": safetensors.torch.save_file}[suffix]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if is_sharded:
        index = {}
        for number in (1, 2):
            part = list(tensors)[number - 1 :: 2]
            file = f"{stem}-{number:05}-of-00002{suffix}"
            save({name: tensors[name] for name in part}, folder / file)
            index |= dict.fromkeys(part, file)
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        save(tensors, folder / f"{stem}{suffix}")
    loaded = checkpoint.load(folder).state_dict()
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_a_single_file_in_place_of_its_folder(folder):
    """With config.json beside it, and without: then the token table tells the width."""
    file = folder / "model.safetensors"
    assert formats.Weights(file).config.d_model == 32
    (folder / "config.json").unlink()
    source = formats.Weights(file, any_architecture=True)
    assert (source.config, source.width) == (None, 32)
    with pytest.raises(UserError, match="config.json is missing"):
        formats.Weights(file)


def test_a_checkpoint_of_nano_gpt(tmp_path):
    """Its .pt file: weights beside other things, names of a compiled model, matrices as (outputs, inputs)."""
    torch.manual_seed(0)
    shapes = {"wte": (300, 64), "wpe": (32, 64)}
    for layer in range(2):
        shapes |= {f"h.{layer}.mlp.c_fc": (256, 64), f"h.{layer}.mlp.c_proj": (64, 256)}
    weights = {f"_orig_mod.transformer.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    torch.save({"model": weights, "iter_num": 7, "config": {"n_layer": 2}}, tmp_path / "ckpt.pt")
    plain = {name.removeprefix("_orig_mod."): weight for name, weight in weights.items()}
    torch.save({"model": plain}, tmp_path / "plain.pt")
    words = [tmp_path / "ckpt.pt", tmp_path / "plain.pt", "--permutations", 199, "--out", tmp_path]
    done = run_here("seedprint", "compare", *words)
    assert done.returncode == 0, done.stderr
    (row,) = read_json(tmp_path / "compare.json")["rows"]
    assert (row["units_found"], row["body_matched"]) == (256, pytest.approx(1, abs=1e-5))  # float32 sums


def test_a_mapped_tensor_is_read_as_it_is(tmp_path):
    """An OrderedDict with versions of its modules, as training scripts save it; changes stay the reader's."""
    module = torch.nn.Linear(3, 2).bfloat16()
    torch.save({"state_dict": module.state_dict(), "p": dict(module.named_parameters())}, tmp_path / "a.pt")
    stored = formats.open_tensors([tmp_path / "a.pt"])
    assert {name: tensor.shape for name, tensor in stored.items()} == {"weight": (2, 3), "bias": (2,)}
    torch.save({"wte.weight": module.weight}, tmp_path / "x.bin")
    source = formats.Weights(tmp_path / "x.bin", any_architecture=True)
    for _ in range(2):
        read = source.read("wte.weight")
        assert torch.equal(read, module.weight) and torch.equal(read, stored["weight"].read())
        read.detach().zero_()


# ---- hostile files -----------------------------------------------------------------------------------------


class Command:
    """What a pickle may do when it is opened."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Command(path.with_name("proof"))))


def cut_within(path: Path) -> None:
    torch.save({"a": torch.ones(3000)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:3000] + data[9000:])


def bomb(path: Path) -> None:
    """A pickle of 60 MB, packed into 60 KB."""
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer)
    with zipfile.ZipFile(buffer) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in whole.namelist():
            data = whole.read(entry)
            packed.writestr(entry, data + b"." * 60_000_000 if entry.endswith(".pkl") else data)


def holds(make):
    """Writes a value beside a tensor; `make` is a function of the path."""
    return lambda path: torch.save({"a": torch.ones(3), "x": make(path)}, path)


HOSTILE = {
    "a command": holds(lambda path: Command(path.with_name("proof"))),
    "a function of torch's own list": holds(lambda path: torch.device("cpu")),
    "five million numbers": holds(lambda path: [1] * 5_000_000),
    "stretched": holds(lambda path: torch.ones(1).expand(2**40)),
    "elsewhere": holds(lambda path: torch.empty(2**40, device="meta")),
    "sparse": holds(lambda path: torch.eye(3).to_sparse()),
    "a list": lambda path: torch.save([torch.ones(3)], path),
    "a pipe": os.mkfifo,
    "a bare pickle": bare_pickle,
    "cut within": cut_within,
    "a bomb": bomb,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_nothing_runs(name, tmp_path):
    HOSTILE[name](tmp_path / "x.bin")
    with pytest.raises(UserError, match="x.bin"):
        formats.open_tensors([tmp_path / "x.bin"])
    assert not (tmp_path / "proof").exists()


def test_shards_may_not_lead_elsewhere(folder):
    (folder / "model.safetensors").unlink()
    for name in ("../base/model.safetensors", "/etc/passwd", 7, ["a"], "pytorch_model.bin"):
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="index.json"):
            formats.Weights(folder)


def test_headers_of_gigabytes_and_of_numbers_without_end(tmp_path):
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(300_000)}).encode()
    for data in ((2**33).to_bytes(8, "little") + b"{}", len(header).to_bytes(8, "little") + header):
        path.write_bytes(data)
        with pytest.raises(UserError, match="a header of sane size"):
            formats.open_tensors([path])


def test_quantised_weights_are_refused(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    with pytest.raises(UserError, match="F8_E4M3.*dequantize"):
        formats.Weights(folder, any_architecture=True)
