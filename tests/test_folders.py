"""lib/folders.py: every way to store weights, and what is no folder of weights."""

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from conftest import KINDS, assert_refused, run_here

import init
from lib import checkpoint, folders
from lib.files import read_json
from lib.settings import UserError

CONFIG = KINDS["llama"]


def save(folder: Path, seed: int = 1, noise: float = 0.0) -> dict[str, torch.Tensor]:
    """A folder of ours with safetensors, and its tensors."""
    model = init.newborn(CONFIG, seed)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += noise * parameter.std() * torch.randn_like(parameter)
    checkpoint.save(folder, model)
    return safetensors.torch.load_file(folder / "model.safetensors")


def as_bin(folder: Path, tensors) -> None:
    """pytorch_model.bin in the place of safetensors."""
    torch.save(tensors, folder / "pytorch_model.bin")


def as_shards(suffix: str):
    """Writes two shards and an index, as Hugging Face names them."""
    stem = {".bin": "pytorch_model", ".safetensors": "model"}[suffix]

    def write(folder: Path, tensors) -> None:
        index = {}
        names = list(tensors)
        for number, part in enumerate((names[::2], names[1::2]), start=1):
            path = folder / f"{stem}-{number:05}-of-00002{suffix}"
            shard = {name: tensors[name] for name in part}
            torch.save(shard, path) if suffix == ".bin" else safetensors.torch.save_file(shard, path)
            index |= dict.fromkeys(part, path.name)
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": index}))

    return write


WAYS = {"bin": as_bin, "sharded bin": as_shards(".bin"), "shards": as_shards(".safetensors")}


def restored(folder: Path, write) -> None:
    """Store a folder's tensors in another way."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write(folder, tensors)


def verdicts(folder: Path, *suspects) -> list[dict]:
    """The rows of `compare`, without the names."""
    words = [folder / "base", *suspects, "--num-sequences", 2, "--permutations", 199]
    done = run_here("seedprint", "compare", *words, "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    rows = read_json(folder / "out" / "compare.json")["rows"]
    return [{key: value for key, value in row.items() if key != "suspect"} for row in rows]


@pytest.fixture
def family(tmp_path):
    """A base, its noised child, and a stranger."""
    save(tmp_path / "base")
    save(tmp_path / "child", noise=0.5)
    save(tmp_path / "stranger", seed=2)
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
def test_verdicts_do_not_hang_on_how_weights_are_stored(way, family):
    suspects = [family / "child", family / "stranger"]
    expected = verdicts(family, *suspects)
    assert [row["verdict"] for row in expected] == ["same birth", "no evidence"]
    for folder in suspects:
        restored(folder, WAYS[way])
    assert verdicts(family, *suspects) == expected
    loaded = checkpoint.load(family / "child")
    assert not any(parameter.isnan().any() for parameter in loaded.parameters())


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_single_file_in_place_of_its_folder(suffix, family):
    """With config.json beside it, and without: then the token table tells the width, and no state is read."""
    expected = verdicts(family, family / "child", family / "stranger")
    files = []
    for name in ("child", "stranger"):
        if suffix == ".bin":
            restored(family / name, as_bin)
        files += (family / name).glob(f"*model{suffix}")
    assert verdicts(family, *files) == expected
    for file in files:
        (file.parent / "config.json").unlink()
    for row, theirs in zip(verdicts(family, *files), expected):
        for key in ("verdict", "sentence", "units_found", "body_z"):
            assert row[key] == theirs[key]
        assert row["num_rows"] is None


def test_a_checkpoint_of_nano_gpt(tmp_path):
    """Its .pt file: weights beside other things, names of a compiled model, matrices as (outputs, inputs)."""
    torch.manual_seed(0)
    shapes = {"wte": (300, 64), "wpe": (32, 64)}
    for layer in range(2):
        shapes |= {f"h.{layer}.attn.c_attn": (192, 64), f"h.{layer}.attn.c_proj": (64, 64)}
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


def test_a_tensor_that_is_mapped_is_read_as_it_is(tmp_path):
    tensors = {
        "wte.weight": torch.randn(5, 3),
        "b.weight": torch.arange(4.0).bfloat16(),
        "c": torch.ones(2).half(),
    }
    torch.save(tensors, tmp_path / "x.bin")
    source = folders.Weights(tmp_path / "x.bin", any_architecture=True)
    assert source.shapes == {"wte.weight": (5, 3), "b.weight": (4,), "c": (2,)} and source.width == 3
    for name, tensor in tensors.items():
        read = source.read(name)
        assert torch.equal(read, tensor)
        read += 1
        assert torch.equal(source.read(name), tensor)


# ---- hostile files -----------------------------------------------------------------------------------------


class Command:
    """What a pickle may do when it is opened."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Command(path.with_name("proof"))))


def of_the_old_format(path: Path) -> None:
    torch.save({"model.norm.weight": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


def cut_within(path: Path) -> None:
    torch.save({"model.norm.weight": torch.ones(3000)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:3000] + data[9000:])


def bomb(path: Path) -> None:
    """A pickle of 60 MB, packed into 60 KB."""
    buffer = io.BytesIO()
    torch.save({"model.norm.weight": torch.ones(3)}, buffer)
    with zipfile.ZipFile(buffer) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in whole.namelist():
            data = whole.read(entry)
            packed.writestr(entry, data + b"." * 60_000_000 if entry.endswith(".pkl") else data)


def holds(make):
    """Writes a value beside a tensor; `make` is a function of the path."""
    return lambda path: torch.save({"model.norm.weight": torch.ones(3), "x": make(path)}, path)


HOSTILE = {
    "a command": holds(lambda path: Command(path.with_name("proof"))),
    "a bytearray": holds(lambda path: bytearray(9)),
    "a function of torch's own list": holds(lambda path: torch.device("cpu")),
    "five million numbers": holds(lambda path: [1] * 5_000_000),
    "stretched": holds(lambda path: torch.ones(1).expand(2**40)),
    "elsewhere": holds(lambda path: torch.empty(2**40, device="meta")),
    "sparse": holds(lambda path: torch.eye(3).to_sparse()),
    "a list": lambda path: torch.save([torch.ones(3)], path),
    "a pipe": os.mkfifo,
    "a bare pickle": bare_pickle,
    "the old format": of_the_old_format,
    "cut within": cut_within,
    "a bomb": bomb,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_nothing_runs(name, family):
    (family / "child" / "model.safetensors").unlink()
    HOSTILE[name](family / "child" / "pytorch_model.bin")
    words = ["compare", family / "base", family / "child", "--out", family / "out"]
    assert_refused(run_here("seedprint", *words), "pytorch_model.bin")
    assert not (family / "child" / "proof").exists()


def test_shards_may_not_lead_elsewhere(family):
    restored(family / "child", as_shards(".bin"))
    for name in ("../base/model.safetensors", "/etc/passwd", 7, "model.safetensors"):
        index = {"weight_map": {"model.norm.weight": name}}
        (family / "child" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="in this folder"):
            folders.Weights(family / "child")


def test_a_header_of_gigabytes(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**33).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match="header"):
        folders.open_tensors([path])


def test_more_tensors_than_any_model_has(tmp_path):
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(300_000)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="300,000 tensors"):
        folders.open_tensors([path])


def test_weights_of_a_state_dict_that_is_not_plain(tmp_path):
    """An OrderedDict with versions of its modules, and parameters: what training scripts save is read."""
    module = torch.nn.Linear(3, 2)
    torch.save({"state_dict": module.state_dict(), "p": dict(module.named_parameters())}, tmp_path / "a.pt")
    assert torch.equal(folders.open_tensors([tmp_path / "a.pt"])["weight"].read(), module.weight)


# ---- what needs a step more --------------------------------------------------------------------------------


def lora(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def quantised_by_config(folder: Path) -> Path:
    save(folder)
    config = read_json(folder / "config.json") | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantised_by_type(folder: Path) -> Path:
    tensors = save(folder)
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = read_json(folder / "config.json") | {"model_type": "deepseek_v3"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_the_hub(_: Path) -> str:
    return "meta-llama/Llama-2-7b-hf"


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


STEPS = {
    lora: ["LoRA adapter", "peft", "merge_and_unload"],
    quantised_by_config: ["quantised", "dequantize"],
    quantised_by_type: ["F8_E4M3", "quantised", "dequantize"],
    of_the_hub: ["no model", "hf download"],
    empty: ["config.json", "missing"],
}


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_what_it_is_and_the_line_to_type(make, tmp_path):
    words = ["compare", "tiny_llama@1", make(tmp_path / "x"), "--out", tmp_path / "out"]
    assert_refused(run_here("seedprint", *words), *STEPS[make])


def test_other_scripts_say_that_compare_reads_it(tmp_path):
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    words = ["--model", tmp_path / "gpt2", "--out", tmp_path / "out"]
    assert_refused(run_here("probe", *words), "gpt2", "seedprint.py compare")


ODD = {  # tensors in the place of others
    "a norm of two axes": {"model.norm.weight": (32, 32)},
    "a table of three": {"model.embed_tokens.weight": (10, 10, 32)},
    "a table of one": {"model.embed_tokens.weight": (32,)},
    "no units": {"model.layers.0.mlp.up_proj.weight": (0, 32)},
    "other units": {"model.layers.0.mlp.up_proj.weight": (7, 32)},
    "half a stack": {"model.layers.0.mlp.down_proj.weight": (4, 32, 12)},
    "a scalar": {"model.layers.0.post_attention_layernorm.weight": ()},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_shapes_end_in_a_word(name, tmp_path):
    """What fits is compared; what does not is refused, or left out."""
    shapes = {"model.embed_tokens.weight": (100, 32), "model.layers.0.self_attn.q_proj.weight": (32, 32)}
    shapes |= {"model.layers.0.mlp.up_proj.weight": (48, 32), "model.layers.0.mlp.down_proj.weight": (32, 48)}
    torch.manual_seed(0)
    for folder, changes in (("plain", {}), ("odd", ODD[name])):
        (tmp_path / folder).mkdir()
        tensors = {key: torch.randn(shape) for key, shape in (shapes | changes).items()}
        safetensors.torch.save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text('{"model_type": "new", "hidden_size": 32}')
    for pair in (("plain", "odd"), ("odd", "plain")):
        words = [*(tmp_path / folder for folder in pair), "--permutations", 199, "--out", tmp_path]
        done = run_here("seedprint", "compare", *words)
        assert done.returncode in (0, 2), done.stderr
