"""strangers/formats.py: every way to store weights, and what is no checkpoint, with what to do."""

import argparse
import json
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import KINDS, random_model, run_here

from lib.files import read_json
from lib.settings import UserError
from lineage.compare import CompareSettings, compare_models, read_model
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


def test_a_checkpoint_of_nano_gpt(tmp_path):
    """A copy is one, also of a compiled model: with bias=False, and matrices as (outputs, inputs)."""
    shapes = {"wte": (300, 64), "wpe": (32, 64), "ln_f": (64,)}
    for layer in range(2):
        shapes |= {f"h.{layer}.ln_1": (64,), f"h.{layer}.attn.c_attn": (192, 64)}
        shapes |= {f"h.{layer}.attn.c_proj": (64, 64), f"h.{layer}.ln_2": (64,)}
        shapes |= {f"h.{layer}.mlp.c_fc": (256, 64), f"h.{layer}.mlp.c_proj": (64, 256)}
    weights = {f"transformer.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    compiled = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    torch.save({"model": weights, "iter_num": 7, "config": {"n_layer": 2}}, tmp_path / "copy.pt")
    torch.save({"model": compiled}, tmp_path / "ckpt.pt")
    words = [tmp_path / "ckpt.pt", tmp_path / "copy.pt", "--thorough", "--out", tmp_path]
    done = run_here("seedprint", "compare", *words)
    assert done.returncode == 0, done.stderr
    (row,) = read_json(tmp_path / "compare.json")["rows"]
    assert row["units_found"] == 256 and row["distance"] < 1e-6, row  # float32 sums


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


def test_shards_may_not_lead_elsewhere(folder):
    (folder / "model.safetensors").unlink()
    for name in ("../base/model.safetensors", "/etc/passwd", 7):
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="index.json"):
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
    (folder / "config.json").write_text('{"model_type": "gpt_oss", "quantization": {"bits": 2}}')
    assert formats.open_checkpoint(folder, True).packed == {name: 32 * 32 * 2 * count}


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


@pytest.mark.parametrize("name", ["weight_scale", "scale", "scale_weight", "qscale_weight"])
def test_fp8_scales_of_any_name(name, folder):
    """As exponents, 255 of which is NaN, of blocks of 32 whose last is short; a marker is no weight."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    packed = torch.randn(97, 80).to(torch.float8_e4m3fn)
    codes = torch.randint(120, 135, (97, 3), dtype=torch.uint8)
    expected = packed.float() * 2.0 ** (codes.float() - 127).repeat_interleave(32, 1)[:, :80]
    stored = tensors | {"x.weight": packed, "x.scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for scale in (codes, codes.view(torch.float8_e8m0fnu)):
        safetensors.torch.save_file(stored | {f"x.{name}": scale}, path)
        source = formats.open_checkpoint(folder, True)
        assert source.shapes.keys() == {*tensors, "x.weight"} and source.is_scaled
        assert torch.equal(source.read("x.weight"), expected)
    safetensors.torch.save_file(stored | {f"x.{name}": torch.full_like(codes, 255)}, path)
    with pytest.raises(UserError, match="not finite"):
        formats.open_checkpoint(folder, True).read("x.weight")


def test_of_fp8_without_scales_no_distance_is_told(folder):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    base = read_model("", formats.open_checkpoint(folder, True))
    stored = {n: w.to(torch.float8_e4m3fn) if "_proj" in n else w for n, w in tensors.items()}
    safetensors.torch.save_file(stored, folder / "child")
    child = read_model("", formats.open_checkpoint(folder / "child", True))
    for is_thorough in (False, True):
        row, _ = compare_models(base, child, CompareSettings(thorough=is_thorough))
        assert row["verdict"] == "same birth" and row["distance"] is None


def test_scales_of_experts_and_scales_that_do_not_fit(tmp_path):
    weight = torch.randn(3, 256, 200)  # of three experts, in blocks of 128 where nothing tells their size
    scale = torch.rand(3, 2, 2)
    kept = {"a.experts.up_proj": weight.to(torch.float8_e4m3fn), "a.experts.up_proj_scale_inv": scale}
    safetensors.torch.save_file(kept, tmp_path / "x")
    scales = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :, :200]
    exact = kept["a.experts.up_proj"].float() * scales
    assert torch.equal(formats.open_checkpoint(tmp_path / "x", True).read("a.experts.up_proj"), exact)
    kept["a.experts.up_proj_scale_inv"] = torch.rand(3, 7, 2)
    safetensors.torch.save_file(kept, tmp_path / "x")
    with pytest.raises(UserError, match="x: a.experts.up_proj"):
        formats.open_checkpoint(tmp_path / "x", True).read("a.experts.up_proj")


PARTS = [(), (slice(3, 7),), (2,), (1, slice(5, 9)), (slice(0, 2), 4)]


@pytest.mark.parametrize("save", [safetensors.torch.save_file, torch.save])
def test_a_part_is_that_of_the_whole(save, tmp_path):
    """Of matrices, experts, layers in one tensor, and FP8 with scales of rows and of blocks, to the bit."""
    tensors = {"a.weight": torch.randn(9, 12), "experts": torch.randn(9, 12, 6)}
    tensors |= {"8.weight": torch.randn(9, 12).to(torch.float8_e4m3fn), "8.weight_scale": torch.rand(9)}
    tensors |= {"b.weight": torch.randn(9, 12, 200).to(torch.float8_e4m3fn)}
    tensors |= {"b.weight_scale_inv": torch.rand(9, 1, 2)}
    tensors |= {f"{x}/layers/w": torch.randn(shape) for x, shape in (("x", (3, 9, 12)), ("y", (9, 3, 12, 2)))}
    save(tensors, tmp_path / "x")
    source = formats.open_checkpoint(tmp_path / "x", True)
    for name, shape in source.shapes.items():
        whole = source.read(name)
        for part in PARTS:
            if len(part) < len(shape):
                assert torch.equal(source.read(name, part), whole[part]), (name, part)


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
        ("tie_word_embeddings", True, "set its tie_word_embeddings to false"),
        ("vocab_size", 99, r"is \(97, 32\), expected \(99, 32\) by config.json: correct"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        assert formats.open_checkpoint(folder, True).config is None
        with pytest.raises(UserError, match=said):
            parse_spec(str(folder)).load_own()


def test_mlps_that_nobody_found_are_missing(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "mlp" not in name}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    for config, verdict in (({}, True), ({"text_config": {"moe_intermediate_size": 64}}, False)):
        (folder / "config.json").write_text(json.dumps({"model_type": "x", "hidden_size": 32} | config))
        model = read_model("", formats.open_checkpoint(folder, True))
        (stack,) = model.stacks
        assert stack.missing == "MLPs" and stack.may_have_units is not verdict


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345678\n"


@pytest.mark.parametrize("names", ["", "ckpt.pt notes.md", "config.json"])
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
    for name in ("lora_A", "model.layers.0.mlp.up_proj.vera_lambda_b", "h.1.mlp.fc.hada_w1_a"):
        torch.save({f"{name}.weight": torch.ones(3, 3)}, tmp_path / "x")
        with pytest.raises(UserError, match="x is an adapter"):
            read_model("", formats.open_checkpoint(tmp_path / "x", True))


def test_dictionaries_of_dictionaries(tmp_path):
    """As nanoGPT, Lightning and DeepSpeed have them, beside other models; and Megatron, a level deeper."""
    weights = {"wte.weight": torch.ones(3, 2)}
    torch.save({"ema": {"wte.weight": torch.zeros(3, 2)}, "step": 3, "state_dict": weights}, tmp_path / "x")
    source = formats.open_checkpoint(tmp_path / "x", True)
    for _ in range(2):  # changes stay the reader's
        assert torch.equal(source.read("wte.weight"), torch.ones(3, 2))
        source.read("wte.weight").zero_()
    deep = {"encoder": {"layers": {layer: {"mlp": {"weight": torch.ones(4, 4)}} for layer in range(2)}}}
    deep["args"] = argparse.Namespace(tensor_model_parallel_size=1)
    torch.save(deep | {"embedding.word_embeddings.weight": torch.ones(9, 4)}, tmp_path / "x")
    expected = {"embedding.word_embeddings.weight", *(f"encoder.layers.{n}.mlp.weight" for n in range(2))}
    assert formats.open_checkpoint(tmp_path / "x", True).shapes.keys() == expected


def test_layers_along_either_axis_of_one_tensor(tmp_path):
    """As MaxText keeps them, with numbers in the names of matrices."""
    stored = {"layers/mlp/wi_0/kernel": torch.randn(4, 3, 6), "layers/mlp/wo/kernel": torch.randn(6, 3, 4)}
    for axis in (0, 1):
        tensors = {name: weight.transpose(0, 1 - axis).contiguous() for name, weight in stored.items()}
        safetensors.torch.save_file(tensors, tmp_path / f"{axis}.safetensors")
        source = formats.open_checkpoint(tmp_path / f"{axis}.safetensors", True)
        assert len(source.shapes) == 6
        for name, weight in stored.items():
            for layer in range(3):
                read = source.read(name.replace("layers/", f"layers/{layer}."))
                torch.testing.assert_close(read, weight[:, layer], rtol=0, atol=0)


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


@pytest.mark.parametrize(
    "name", ["consolidated.0{}.pth", "tp_rank_0{}.pt", "model-rank-{}-part-0.pt", "model{}-mp2.pt"]
)
def test_a_part_of_each_matrix_is_no_model(name, tmp_path):
    """As tensor parallelism leaves them: compared alone, it would be no evidence. The first may be alone."""
    paths = [tmp_path / name.format(number) for number in (0, 1)]
    for path in paths:
        torch.save({"wte.weight": torch.ones(3, 2)}, path)
    for path in paths:
        with pytest.raises(UserError, match="has a part of each matrix"):
            formats.open_checkpoint(path, True)
    paths[1].unlink()
    assert formats.open_checkpoint(paths[0], True).shapes == {"wte.weight": (3, 2)}
