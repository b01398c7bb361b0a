"""weights/: every way to store weights, and what is no checkpoint, with what to do."""

import json
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import KINDS, random_model

from lib.files import read_json
from lib.settings import UserError
from lineage.stated import stated_counts
from sources import llama, saving
from sources.checkpoint import find_model
from weights.contents import open_weights


@pytest.fixture
def folder(tmp_path):
    saving.save(tmp_path / "a", random_model(KINDS["llama"]))
    return tmp_path / "a"


def test_a_single_file_in_place_of_its_folder(folder):
    file = folder / "model.safetensors"
    assert llama.transformer_config(file).d_model == 32
    (folder / "config.json").unlink()
    for place in (file, folder):
        source = open_weights(place, True)
        assert source.shapes["model.norm.weight"] == (32,)
        with pytest.raises(UserError, match="config.json is missing"):
            llama.transformer_config(place)


# ---- hostile files, and what is there instead of weights ---------------------------------------------------


class Command:
    def __init__(self, path: Path):
        self.proof = path.with_name("proof")

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def cut(path: Path, save=torch.save) -> None:
    save({"a": torch.ones(3000)}, path)
    path.write_bytes(path.read_bytes()[:5000])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345678\n"
HOSTILE = {  # a name: who writes the file
    "a_command.bin": lambda path: torch.save({"a": torch.ones(3), "x": Command(path)}, path),
    "a_list.bin": lambda path: torch.save([torch.ones(3)], path),
    "a_pipe.bin": os.mkfifo,
    "a_bare_pickle.bin": lambda path: path.write_bytes(pickle.dumps(Command(path))),
    "cut.bin": cut,
    "cut.safetensors": lambda path: cut(path, safetensors.torch.save_file),
    "of_torch_before_1.6.bin": lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
    "a_web_page.bin": lambda path: path.write_text("<!doctype html><html>"),
    "another_format.npz": lambda path: path.write_bytes(b"PK" + bytes(99)),
    "another_format.onnx": lambda path: path.write_bytes(bytes(99)),
    "git_lfs.safetensors": lambda path: path.write_bytes(POINTER),
    "git_lfs.gguf": lambda path: path.write_bytes(POINTER),
    "a_header_without_end": lambda path: path.write_bytes((2**63).to_bytes(8, "little") + b'{"'),
    "no_weights": Path.mkdir,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_nothing_runs(name, tmp_path):
    HOSTILE[name](tmp_path / name)
    with pytest.raises(UserError, match="git lfs pull" if "lfs" in name else name):
        open_weights(tmp_path / name, True)
    assert not (tmp_path / "proof").exists()


def test_no_index_leads_elsewhere(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.norm.weight": "/etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert llama.transformer_config(folder).d_model == 32
    (folder / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(UserError, match="names a file outside its folder"):
        find_model(str(folder)).transformer()


# ---- what is said of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kind, count",
    [
        ("model.layers.0.self_attn.q_proj.weight", torch.float8_e5m2, 2),
        ("model.layers.0.mlp.down_proj.qweight", torch.int32, 8),  # GPTQ, AWQ
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", torch.uint8, 2),  # MXFP4
        ("model.layers.0.mlp.up_proj.weight_packed", torch.uint32, 8),  # as MLX
    ],
)
def test_packed_weights_are_known_whatever_their_name(name, kind, count, folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["position_ids"] = torch.ones(1, 9).long()
    safetensors.torch.save_file(tensors | {name: torch.ones(32, 32).to(kind)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} has packed numbers: .*dequantize"):
        open_weights(folder)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    source = open_weights(folder, True)  # positions are no weights
    assert source.packed == {name: 32 * 32 * count} and name not in source.shapes


def test_integers_that_are_no_weights(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    others = {"model.layers.0.mlp._extra_state": torch.zeros(0, dtype=torch.uint8)}
    others |= {"hash.lookup": torch.ones(97, 2).long(), "model.attn.bias": torch.ones(9, 9).byte()}
    safetensors.torch.save_file(tensors | others, folder / "model.safetensors")
    assert open_weights(folder, True).shapes.keys() == tensors.keys()
    assert llama.transformer_config(folder) is not None


def spread(scale, sizes, shape):
    for axis, (n, size) in enumerate(zip(shape, sizes)):
        scale = scale.repeat_interleave(size, axis).narrow(axis, 0, n)
    return scale


SCALES = {  # of which shape, for how many numbers along each axis; and the block size that config.json says
    "blocks": ((4, 2), (13, 17), [13, 17]),  # DeepSeek, Qwen; the last ones are short
    "blocks of 128": ((3, 1, 1), (1, 128, 128), None),
    "rows": ((48, 1), (1, 999), None),
    "a number": ((1, 1), (999, 999), None),
}
MLP_MATRIX = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("scale_name", ["scale", "scale_inv"])
def test_fp8_is_read_with_its_scales(kind, scale_name, folder):
    count, sizes, block_size = SCALES[kind]
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    packed = torch.randn((3, 48, 32) if len(count) == 3 else (48, 32)).to(torch.float8_e4m3fn)
    codes = torch.randint(120, 135, count, dtype=torch.uint8)
    scale = 2.0 ** (codes.float() - 127)
    tensors[MLP_MATRIX] = packed.float() * spread(scale, sizes, packed.shape)
    stored = tensors | {MLP_MATRIX: packed, "x.scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    stored |= {"model.layers.0.self_attn.k_scale": torch.ones(1), "x.input_scale": torch.ones(())}
    said = {"quantization_config": {"weight_block_size": block_size}}
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | said))
    forms = [scale, codes, codes.view(torch.float8_e8m0fnu)]  # numbers, or exponents
    forms += [scale[:, 0]] if kind == "rows" else []
    forms += [scale.view(()), scale.view(1)] if kind == "a number" else []
    for form in forms:
        safetensors.torch.save_file(stored | {f"{MLP_MATRIX}_{scale_name}": form}, path)
        for source in [open_weights(folder, True)]:
            assert source.shapes.keys() == tensors.keys() and source.is_scaled
            for name in tensors:
                assert torch.equal(source.read(name), tensors[name]), name
    for wrong in (torch.full_like(codes, 255), torch.ones(3, 7, 2), torch.ones(3, 0, 2)):  # 255 is NaN
        safetensors.torch.save_file(stored | {f"{MLP_MATRIX}_{scale_name}": wrong}, path)
        with pytest.raises(UserError, match=MLP_MATRIX):
            open_weights(folder, True).read(MLP_MATRIX)


@pytest.mark.parametrize("name", ["", "scale", "scale_weight"])
def test_fp8_without_scales_that_are_known(name, folder):
    path = folder / "model.safetensors"
    stored = {"x.weight": torch.randn(9, 8).to(torch.float8_e4m3fn)}
    safetensors.torch.save_file(stored | {f"x.{name}": torch.ones(1)} if name else stored, path)
    source = open_weights(folder, True)
    assert not source.is_scaled and torch.equal(source.read("x.weight"), stored["x.weight"].float())


PARTS = [(), (slice(3, 7),), (2,), (1, slice(5, 9)), (slice(0, 2), 4), (slice(4, 4),)]
PARTS += [(torch.tensor([7, 0, 7, 3]),), (torch.tensor([4, 5]), 2), (torch.tensor([], dtype=torch.int64),)]


@pytest.mark.parametrize("save", [safetensors.torch.save_file, torch.save])
def test_a_part_is_that_of_the_whole(save, tmp_path):
    tensors = {"a.weight": torch.randn(9, 12), "experts": torch.randn(9, 12, 6)}
    tensors |= {"8.weight": torch.randn(9, 12).to(torch.float8_e4m3fn), "8.weight_scale": torch.rand(9)}
    tensors |= {"b.weight": torch.randn(9, 12, 200).to(torch.float8_e4m3fn)}
    tensors |= {"b.weight_scale_inv": torch.rand(9, 1, 2)}
    tensors |= {"half": torch.randn(9, 12).half(), "double": torch.randn(9, 12, 5).double()}
    tensors |= {"vector": torch.randn(9).bfloat16(), "number": torch.randn(())}
    save(tensors, tmp_path / "x")
    source = open_weights(tmp_path / "x", True)
    for name, shape in source.shapes.items():
        whole = source.read(name)
        assert tensors[name].itemsize == 1 or torch.equal(whole, tensors[name]) and whole.shape == shape
        for part in PARTS:
            if len(part) < len(shape):
                assert torch.equal(source.read(name, part), whole[part]), (name, part)


F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADERS = {  # of a file of 32 bytes of numbers
    "too few": {"a": F32},
    "overlapping": {"a": F32, "b": F32 | {"data_offsets": [8, 24]}, "c": F32 | {"data_offsets": [16, 32]}},
    "outside": {"a": F32 | {"shape": [4, 4], "data_offsets": [0, 64]}},
    "before": {"a": F32 | {"shape": [3, 4], "data_offsets": [-16, 32]}},
    "a wrong size": {"a": F32 | {"shape": [3, 3], "data_offsets": [0, 32]}},
    "backwards": {"a": F32 | {"dtype": "I32", "data_offsets": [32, 0]}},
    "nonsense": {"a": [F32]},
    "a list": [F32],
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_safetensors_refuses(name, tmp_path):
    text = json.dumps(HEADERS[name]).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(path)
    with pytest.raises(UserError, match="x.safetensors"):
        open_weights(path, True)


CONFIGS = [  # what config.json says, and how many layers and tokens are told; five tokens stand beside it
    ({"num_hidden_layers": 3, "vocab_size": 97}, 3, 97),
    ({"n_layer": 12, "text_config": {"num_layers": 7, "vocab_size": 8}}, 12, 8),
    ({"text_config": {"n_layers": 7}}, 7, 5),
    ({"num_hidden_layers": True, "vocab_size": 0, "text_config": [1]}, None, 5),
]


def test_what_is_told_beside_the_weights(folder):
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate("abcde")}))
    for config, layers, tokens in CONFIGS:
        (folder / "config.json").write_text(json.dumps(config))
        for place in (folder, folder / "model.safetensors"):
            assert stated_counts(place) == {"layers": layers, "tokens": tokens, "draft": None}


def test_what_an_optimizer_keeps_is_no_weight(tmp_path):
    moments = {"exp_avg": torch.ones(9, 4), "exp_avg_sq": torch.ones(9, 4), "step": torch.ones(())}
    states = {"0": moments, "model.layers.0.mlp.weight": moments, "model.layers.1.mlp.weight": moments}
    torch.save({"state": states, "param_groups": []}, tmp_path / "x")
    assert open_weights(tmp_path / "x", True).shapes == {}
    tensors = {f"{name}.{key}": tensor for name, kept in states.items() for key, tensor in kept.items()}
    safetensors.torch.save_file({k: t.clone() for k, t in tensors.items()}, tmp_path / "y")
    assert open_weights(tmp_path / "y", True).shapes == {}


def test_a_file_is_told_by_its_first_bytes(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "weights.bin")
    assert open_weights(tmp_path / "weights.bin", True).shapes["model.norm.weight"] == (32,)
    for size in (0x80, 0x280, 0x4B50):  # of a header, which then begins as a pickle does, or a zip file
        header = json.dumps({"wte.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}})
        (tmp_path / "y").write_bytes(size.to_bytes(8, "little") + header.ljust(size).encode() + bytes(16))
        assert open_weights(tmp_path / "y", True).shapes == {"wte.weight": (2, 2)}


def test_dictionaries_of_dictionaries(tmp_path):
    """As nanoGPT, Lightning and DeepSpeed have them, beside other models; and Megatron, a level deeper."""
    weights = {"wte.weight": torch.ones(3, 2)}
    torch.save({"ema": {"wte.weight": torch.zeros(3, 2)}, "step": 3, "state_dict": weights}, tmp_path / "x")
    source = open_weights(tmp_path / "x", True)
    for _ in range(2):  # changes stay the reader's
        assert torch.equal(source.read("wte.weight"), torch.ones(3, 2))
        source.read("wte.weight").zero_()
    deep = {"encoder": {"layers": {layer: {"mlp": {"weight": torch.ones(4, 4)}} for layer in range(2)}}}
    torch.save(deep | {"embedding.word_embeddings.weight": torch.ones(9, 4)}, tmp_path / "x")
    expected = {"embedding.word_embeddings.weight", *(f"encoder.layers.{n}.mlp.weight" for n in range(2))}
    assert open_weights(tmp_path / "x", True).shapes.keys() == expected


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pth"])
def test_a_shard_is_read_with_its_siblings_or_not_at_all(suffix, tmp_path):
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    separator = "." if suffix == ".pth" else "-"
    paths = [tmp_path / f"consolidated-{number:05}{separator}of-00002{suffix}" for number in (1, 2)]
    for number, path in enumerate(paths):
        save({f"h.{number}.weight": torch.ones(3, 2)}, path)
    for path in paths:
        assert open_weights(path, True).shapes.keys() == {"h.0.weight", "h.1.weight"}
    save({"h.0.weight": torch.ones(3, 2)}, paths[1])
    with pytest.raises(UserError, match="has a part of each matrix"):
        open_weights(paths[0], True)
    paths[0].unlink()
    with pytest.raises(UserError, match="one of 2 shards of a model, of which 1"):
        open_weights(paths[1], True)
