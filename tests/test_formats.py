"""strangers/formats.py: every way to store weights, and what is no checkpoint, with what to do."""

import json
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import KINDS, random_model
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from lib.files import read_json
from lib.settings import UserError
from sources import checkpoint
from sources.checkpoint import parse_spec
from strangers import formats


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
    loaded = parse_spec(str(folder)).load_own().state_dict()
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_a_single_file_in_place_of_its_folder(folder):
    """With config.json beside it, and without: then either is compared by its weights alone."""
    file = folder / "model.safetensors"
    assert formats.open_checkpoint(file).config.d_model == 32
    (folder / "config.json").unlink()
    for place in (file, folder):
        source = formats.open_checkpoint(place, True)
        assert source.config is None and source.shapes["model.norm.weight"] == (32,)
        with pytest.raises(UserError, match="config.json is missing"):
            formats.open_checkpoint(place)


# ---- hostile files -----------------------------------------------------------------------------------------


class Command:
    """What a pickle may do when it is opened."""

    def __init__(self, path: Path):
        self.proof = path.with_name("proof")

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def cut(path: Path, save=torch.save) -> None:
    save({"a": torch.ones(3000)}, path)
    path.write_bytes(path.read_bytes()[:5000])


HOSTILE = {
    "a command": lambda path: torch.save({"a": torch.ones(3), "x": Command(path)}, path),
    "a list": lambda path: torch.save([torch.ones(3)], path),
    "a pipe": os.mkfifo,
    "a bare pickle": lambda path: path.write_bytes(pickle.dumps(Command(path))),
    "cut": cut,
    "cut safetensors": lambda path: cut(path, safetensors.torch.save_file),
    "of torch before 1.6": lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
    "a web page": lambda path: path.write_text("<!doctype html><html>"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_nothing_runs(name, tmp_path):
    HOSTILE[name](tmp_path / "x.bin")
    with pytest.raises(UserError, match="x.bin"):
        formats.open_tensors([tmp_path / "x.bin"])
    assert not (tmp_path / "proof").exists()


def test_no_index_leads_elsewhere(folder):
    """Shards are known by their names, and those of two models are not mixed."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.norm.weight": "/etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert formats.open_checkpoint(folder).config.d_model == 32
    (folder / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(UserError, match="one of 1 shards of a model, of which 2 are here"):
        formats.open_checkpoint(folder)


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
        formats.open_checkpoint(folder)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    source = formats.open_checkpoint(folder, True)  # positions are no weights
    assert source.packed == {name: 32 * 32 * count} and name not in source.shapes


def test_integers_that_are_no_weights(folder):
    """A lookup table and a mask are left out; and Megatron's state of modules that have none."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    others = {"model.layers.0.mlp._extra_state": torch.zeros(0, dtype=torch.uint8)}
    others |= {"hash.lookup": torch.ones(97, 2).long(), "model.attn.bias": torch.ones(9, 9).byte()}
    safetensors.torch.save_file(tensors | others, folder / "model.safetensors")
    assert formats.open_checkpoint(folder, True).shapes.keys() == tensors.keys()
    assert formats.open_checkpoint(folder).config is not None


def in_fp8(weight, kind):
    """A matrix in FP8, its scales as several libraries keep them, and what torch makes of the two."""
    rows, columns = {"block": (13, 17), "row": (1, 999), "number": (999, 999)}[kind]
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    expected = torch.empty(weight.shape)
    scales = []
    for i in range(0, weight.shape[0], rows):
        for j in range(0, weight.shape[1], columns):
            block = (slice(i, i + rows), slice(j, j + columns))
            scale = weight[block].abs().max() / 448
            packed[block] = (weight[block] / scale).to(torch.float8_e4m3fn)
            expected[block] = packed[block].float() * scale
            scales.append(scale)
    shape = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    return packed, torch.stack(scales).view(shape), expected


FP8_FOLDERS = [  # how scales are kept, their name, and what config.json says
    ("block", "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [13, 17]}),  # DeepSeek, Qwen
    ("row", "weight_scale", {"quant_method": "compressed-tensors"}),
    ("number", "weight_scale", {"quant_method": "modelopt"}),
]


@pytest.mark.parametrize("kind, scale_name, said", FP8_FOLDERS)
def test_fp8_is_read_with_its_scales(kind, scale_name, said, folder):
    """For scripts that run a model, and for those that compare; scales are no weights."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    stored, expected = dict(tensors), dict(tensors)
    for name in tensors:
        if "_proj" in name:
            stored[name], scale, expected[name] = in_fp8(tensors[name], kind)
            module = name.removesuffix("weight")
            stored[f"{module}input_scale"] = torch.ones(())
            stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
            stored[module + scale_name] = scale[:, 0] if kind == "row" and "q_proj" in name else scale
            if kind == "number":
                stored[module + scale_name] = scale.view(()) if "k_proj" in name else scale.view(1)
    config = read_json(folder / "config.json") | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    for source in (formats.open_checkpoint(folder, True), formats.open_checkpoint(folder)):
        assert source.config is not None and source.shapes.keys() == tensors.keys()
        for name in tensors:
            assert torch.equal(source.read(name), expected[name]), name


def test_scales_that_are_exponents(folder):
    """255 of which is NaN; a marker is no weight. The last block is short."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    (folder / "config.json").write_text('{"quantization_config": {"weight_block_size": [1, 32]}}')
    packed = torch.randn(97, 80).to(torch.float8_e4m3fn)
    codes = torch.randint(120, 135, (97, 3), dtype=torch.uint8)
    expected = packed.float() * 2.0 ** (codes.float() - 127).repeat_interleave(32, 1)[:, :80]
    stored = tensors | {"x.weight": packed, "x.scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for scale in (codes, codes.view(torch.float8_e8m0fnu)):
        safetensors.torch.save_file(stored | {"x.weight_scale": scale}, path)
        source = formats.open_checkpoint(folder, True)
        assert source.shapes.keys() == {*tensors, "x.weight"} and source.is_scaled
        assert torch.equal(source.read("x.weight"), expected)
    safetensors.torch.save_file(stored | {"x.weight_scale": torch.full_like(codes, 255)}, path)
    with pytest.raises(UserError, match="not finite"):
        formats.open_checkpoint(folder, True).read("x.weight")


@pytest.mark.parametrize("name", ["", "scale", "scale_weight"])
def test_fp8_without_scales_that_are_known(name, folder):
    path = folder / "model.safetensors"
    stored = {"x.weight": torch.randn(9, 8).to(torch.float8_e4m3fn)}
    safetensors.torch.save_file(stored | {f"x.{name}": torch.ones(1)} if name else stored, path)
    source = formats.open_checkpoint(folder, True)
    assert not source.is_scaled and torch.equal(source.read("x.weight"), stored["x.weight"].float())


def test_scales_of_experts_and_scales_that_do_not_fit(tmp_path):
    weight = torch.randn(3, 256, 200)  # of three experts, in blocks of 128 where nothing tells their size
    scale = torch.rand(3, 2, 2)
    kept = {"a.experts.up_proj": weight.to(torch.float8_e4m3fn), "a.experts.up_proj_scale_inv": scale}
    safetensors.torch.save_file(kept, tmp_path / "x")
    scales = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :, :200]
    exact = kept["a.experts.up_proj"].float() * scales
    assert torch.equal(formats.open_checkpoint(tmp_path / "x", True).read("a.experts.up_proj"), exact)
    for shape in ((3, 7, 2), (3, 0, 2), (1, 3, 2, 2)):
        kept["a.experts.up_proj_scale_inv"] = torch.ones(shape)
        safetensors.torch.save_file(kept, tmp_path / "x")
        with pytest.raises(UserError, match="x: a.experts.up_proj"):
            formats.open_checkpoint(tmp_path / "x", True).read("a.experts.up_proj")


PARTS = [(), (slice(3, 7),), (2,), (1, slice(5, 9)), (slice(0, 2), 4), (slice(4, 4),)]
PARTS += [(torch.tensor([7, 0, 7, 3]),), (torch.tensor([4, 5]), 2), (torch.tensor([], dtype=torch.int64),)]


@pytest.mark.parametrize("save", [safetensors.torch.save_file, torch.save])
def test_a_part_is_that_of_the_whole(save, tmp_path):
    """Of matrices, experts, and FP8 with scales of rows and of blocks, to the bit; as torch has them."""
    tensors = {"a.weight": torch.randn(9, 12), "experts": torch.randn(9, 12, 6)}
    tensors |= {"8.weight": torch.randn(9, 12).to(torch.float8_e4m3fn), "8.weight_scale": torch.rand(9)}
    tensors |= {"b.weight": torch.randn(9, 12, 200).to(torch.float8_e4m3fn)}
    tensors |= {"b.weight_scale_inv": torch.rand(9, 1, 2)}
    tensors |= {"half": torch.randn(9, 12).half(), "double": torch.randn(9, 12, 5).double()}
    tensors |= {"vector": torch.randn(9).bfloat16(), "number": torch.randn(())}
    save(tensors, tmp_path / "x")
    source = formats.open_checkpoint(tmp_path / "x", True)
    for name, shape in source.shapes.items():
        whole = source.read(name)
        assert tensors[name].itemsize == 1 or torch.equal(whole, tensors[name]) and whole.shape == shape
        for part in PARTS:
            if len(part) < len(shape):
                assert torch.equal(source.read(name, part), whole[part]), (name, part)


def test_rows_of_a_newborn():
    source, rows = formats.open_spec(parse_spec("tiny_llama@3")), torch.tensor([7, 0, 7])
    assert torch.equal(source.read(formats.TOKEN_TABLE, (rows,)), source.read(formats.TOKEN_TABLE)[rows])
    assert source.told == {"layers": None, "tokens": None, "parts": ""}


F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADERS = {  # of a file of 32 bytes of numbers
    "too few": {"a": F32},
    "twice": {"a": F32, "b": F32},
    "overlapping": {"a": F32, "b": F32 | {"data_offsets": [8, 24]}, "c": F32 | {"data_offsets": [16, 32]}},
    "a hole": {"a": F32 | {"shape": [2], "data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [16, 32]}},
    "outside": {"a": F32 | {"shape": [4, 4], "data_offsets": [0, 64]}},
    "before": {"a": F32 | {"shape": [3, 4], "data_offsets": [-16, 32]}},
    "negative": {"a": F32 | {"shape": [-2, -4], "data_offsets": [0, 32]}},
    "no whole number": {"a": F32 | {"shape": [2.0, 4], "data_offsets": [0, 32]}},
    "a wrong size": {"a": F32 | {"shape": [3, 3], "data_offsets": [0, 32]}},
    "backwards": {"a": F32 | {"dtype": "I32", "data_offsets": [32, 0]}},
    "nonsense": {"a": [F32]},
    "a list": [F32],
    "no offsets": {"a": {"dtype": "F32", "shape": [8]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_safetensors_refuses(name, tmp_path):
    text = json.dumps(HEADERS[name]).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(path)
    with pytest.raises(UserError, match="x.safetensors"):
        formats.open_checkpoint(path, True)


def test_a_header_without_end(tmp_path):
    path = tmp_path / "x.safetensors"
    for size in (2**25 + 1, 2**63):
        path.write_bytes(size.to_bytes(8, "little") + b'{"')
        with pytest.raises(UserError, match="its header has"):
            formats.open_checkpoint(path, True)


def write_parts(folder, **files):
    """Files of torch.save by name, each of tensors by name."""
    for name, tensors in files.items():
        torch.save(tensors, folder / f"{name}.pt")


A, B, V, W = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4), torch.randn(4)
SIBLINGS = [  # files beside each other, and whether the first is then a part
    ({"rank_0": {"a": A, "v": V}, "rank_1": {"a": B, "v": V}}, True),
    ({"tp_rank_00": {"a": A}, "tp_rank_01": {"a": B}}, True),
    ({"stage1": {"h.0": A, "h.0.norm": V}, "stage2": {"h.1": B, "h.1.norm": W}}, True),  # nothing in common
    ({"ep2_rank1": {"a": A, "v": V}, "ep1_rank1": {"a": B, "v": W}, "ep2_rank0": {"a": B, "v": V}}, True),
    ({"rank_0": {"a": A}, "rank_1": Path("of no checkpoint")}, True),
    ({"epoch_1": {"a": A, "v": V}, "epoch_2": {"a": B, "v": W}}, False),
    ({"llama-2-7b": {"a": A, "v": V}, "llama-2-13b": {"a": B, "v": torch.ones(9)}}, False),
    ({"rank_0": {"a": A, "v": V}, "rank_0.bfloat16": {"a": A, "v": V}}, False),
    ({"v1.0": {"a": A, "v": V}, "v2.1": {"a": B, "v": V}}, False),  # two numbers
    ({"half_16": {"v": V.half()}, "half_32": {"v": V}}, False),
    ({"m-1-of-2": {"a": A}, "m-2-of-2": {"b": A}}, False),  # which are joined
    ({"ckpt": {"a": A}, "other": {"a": B}}, False),
]


@pytest.mark.parametrize("files, is_part", SIBLINGS)
def test_a_file_beside_the_other_parts_of_a_model(files, is_part, tmp_path):
    write_parts(tmp_path, **files)
    source = formats.open_checkpoint(tmp_path / f"{next(iter(files))}.pt", True)
    assert bool(source.told["parts"]) == is_part
    assert not is_part or source.told["parts"].endswith(" holds other parts of it")


def test_what_torch_writes_of_processes_and_joins(tmp_path):
    """One of each process is a part, what is joined of them is none, nor what one process wrote for all."""
    state = {"a.weight": torch.randn(4, 4)}
    for name, is_distributed in (("each", True), ("all", False)):
        writer = HuggingFaceStorageWriter(tmp_path / name, save_distributed=is_distributed)
        dcp.save(state, storage_writer=writer, no_dist=True)
    (tmp_path / "joined").mkdir()
    consolidate_safetensors_files(str(tmp_path / "each"), str(tmp_path / "joined"), {"a.weight": 1})
    told = {}
    for name in ("each", "all", "joined"):
        (path,) = (tmp_path / name).glob("*.safetensors")
        source = formats.open_checkpoint(path, True)
        assert torch.equal(source.read("a.weight"), state["a.weight"])
        told[name] = source.told["parts"]
    assert told.pop("each").startswith("DCP_SHARDING_INFO in shard-") and set(told.values()) == {""}


CONFIGS = [  # what config.json says, and how many layers and tokens are told; five tokens stand beside it
    ({"num_hidden_layers": 3, "vocab_size": 97}, 3, 97),
    ({"n_layer": 12, "text_config": {"num_layers": 7, "vocab_size": 8}}, 12, 8),
    ({"text_config": {"n_layers": 7}}, 7, 5),
    ({"num_hidden_layers": "3", "n_layer": -3, "n_layers": [3], "num_layers": 4}, 4, 5),
    ({"num_hidden_layers": True, "vocab_size": 9.0, "text_config": [1]}, None, 5),
    ({"num_hidden_layers": {"a": 1}, "vocab_size": 0, "text_config": "x"}, None, 5),
    (None, None, 5),
]


@pytest.mark.parametrize("config, layers, tokens", CONFIGS)
def test_what_is_told_beside_the_weights(config, layers, tokens, folder):
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate("abcde")}))
    told = {"layers": layers, "tokens": tokens, "parts": ""}
    assert formats.open_checkpoint(folder, True).told == told
    assert formats.open_checkpoint(folder / "model.safetensors", True).told == told


def test_what_an_optimizer_keeps_is_no_weight(tmp_path):
    """Under numbers, and under names of parameters, as FSDP's."""
    moments = {"exp_avg": torch.ones(9, 4), "exp_avg_sq": torch.ones(9, 4), "step": torch.ones(())}
    states = {"0": moments, "model.layers.0.mlp.weight": moments, "model.layers.1.mlp.weight": moments}
    torch.save({"state": states, "param_groups": []}, tmp_path / "x")
    assert formats.open_checkpoint(tmp_path / "x", True).shapes == {}
    tensors = {f"{name}.{key}": tensor for name, kept in states.items() for key, tensor in kept.items()}
    safetensors.torch.save_file({k: t.clone() for k, t in tensors.items()}, tmp_path / "y")
    assert formats.open_checkpoint(tmp_path / "y", True).shapes == {}


def test_a_config_that_contradicts_the_weights_is_refused_where_it_counts(folder):
    config = read_json(folder / "config.json")
    del config[checkpoint.OURS]
    for key, value, said in (
        ("tie_word_embeddings", True, r"lm_head.weight \(97, 32\) is unknown or missing, by its config.json"),
        ("vocab_size", 99, r"lm_head.weight \(97, 32\) is unknown or missing, by its config.json: correct"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        assert formats.open_checkpoint(folder, True).config is None
        with pytest.raises(UserError, match=said):
            parse_spec(str(folder)).load_own()


def test_mlps_are_named_by_their_size(folder):
    for config in ({}, {"text_config": {"moe_intermediate_size": 64}}):
        (folder / "config.json").write_text(json.dumps({"model_type": "x", "hidden_size": 32} | config))
        assert formats.open_checkpoint(folder, True).names_mlps == bool(config)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345678\n"


@pytest.mark.parametrize("names", ["", "a.pt notes.md", "config.json"])
def test_what_is_there_instead(names, tmp_path):
    for name in names.split():
        (tmp_path / name).write_text("{}")
    there = names.replace(" ", ", ") or "nothing"
    for is_any in (True, False):
        with pytest.raises(UserError, match=f"is missing: the folder has {there}. A file may be named"):
            formats.open_spec(parse_spec(str(tmp_path)), is_any)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "m.gguf"])
def test_a_pointer_of_git_lfs(name, tmp_path):
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(UserError, match="git lfs pull"):
        formats.open_checkpoint(tmp_path / name, True)


def test_a_file_is_told_by_its_first_bytes(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "weights.bin")
    assert formats.open_checkpoint(tmp_path / "weights.bin", True).shapes["model.norm.weight"] == (32,)
    for size in (0x80, 0x280, 0x4B50):  # of a header, which then begins as a pickle does, or a zip file
        header = json.dumps({"wte.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}})
        (tmp_path / "y").write_bytes(size.to_bytes(8, "little") + header.ljust(size).encode() + bytes(16))
        assert formats.open_checkpoint(tmp_path / "y", True).shapes == {"wte.weight": (2, 2)}


def test_dictionaries_of_dictionaries(tmp_path):
    """As nanoGPT, Lightning and DeepSpeed have them, beside other models; and Megatron, a level deeper."""
    weights = {"wte.weight": torch.ones(3, 2)}
    torch.save({"ema": {"wte.weight": torch.zeros(3, 2)}, "step": 3, "state_dict": weights}, tmp_path / "x")
    source = formats.open_checkpoint(tmp_path / "x", True)
    for _ in range(2):  # changes stay the reader's
        assert torch.equal(source.read("wte.weight"), torch.ones(3, 2))
        source.read("wte.weight").zero_()
    deep = {"encoder": {"layers": {layer: {"mlp": {"weight": torch.ones(4, 4)}} for layer in range(2)}}}
    torch.save(deep | {"embedding.word_embeddings.weight": torch.ones(9, 4)}, tmp_path / "x")
    expected = {"embedding.word_embeddings.weight", *(f"encoder.layers.{n}.mlp.weight" for n in range(2))}
    assert formats.open_checkpoint(tmp_path / "x", True).shapes.keys() == expected


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pth"])
def test_a_shard_is_read_with_its_siblings_or_not_at_all(suffix, tmp_path):
    """Alone its layers would be renumbered; files that have one matrix have parts of it."""
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    separator = "." if suffix == ".pth" else "-"
    paths = [tmp_path / f"consolidated-{number:05}{separator}of-00002{suffix}" for number in (1, 2)]
    for number, path in enumerate(paths):
        save({f"h.{number}.weight": torch.ones(3, 2)}, path)
    for path in paths:
        assert formats.open_checkpoint(path, True).shapes.keys() == {"h.0.weight", "h.1.weight"}
    save({"h.0.weight": torch.ones(3, 2)}, paths[1])
    with pytest.raises(UserError, match="has a part of each matrix"):
        formats.open_checkpoint(paths[0], True)
    paths[0].unlink()
    with pytest.raises(UserError, match="one of 2 shards of a model, of which 1"):
        formats.open_checkpoint(paths[1], True)


OTHER_FORMATS = ".onnx .h5 .keras .npz .npy .nemo .msgpack .tflite .pb .xml".split()


@pytest.mark.parametrize("suffix", OTHER_FORMATS)
def test_other_formats_are_not_called_damaged(suffix, tmp_path):
    path = tmp_path / f"m{suffix}"
    path.write_bytes(b"PK" + bytes(99) if suffix in (".keras", ".npz") else bytes(99))
    with pytest.raises(UserError, match="are not read here: load it where it was made") as error:
        formats.open_checkpoint(path, True)
    assert "damaged" not in str(error.value)
