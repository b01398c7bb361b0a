"""strangers/hub.py: names of the Hub, against a server of its few routes on this machine."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import KINDS, random_model, run_script
from hub_server import COMMIT, serving
from huggingface_hub import constants

from lib.settings import UserError
from sources import checkpoint, saving
from weights import hub, ranges
from weights.files import INDEX

TOKENS = torch.randint(97, (2, 50), generator=torch.Generator().manual_seed(1))
NEVER = {"README.md": b"-", "modeling_x.py": b"-", "tf_model.h5": b"-", "original/consolidated.00.pth": b"-"}
NEVER |= {"onnx/model.onnx": b"-", "model.fp16.safetensors": b"-", "flax_model.msgpack": b"-"}
BESIDE = {"config.json", "tokenizer.txt"}


def repositories(folder: Path) -> tuple[dict, torch.nn.Module]:
    model = random_model(KINDS["llama"])
    saving.save(folder, model)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    config = {"config.json": (folder / "config.json").read_bytes(), "tokenizer.txt": b"bytes"} | NEVER
    whole = {"model.safetensors": (folder / "model.safetensors").read_bytes()}
    sharded, index = {}, {}
    for number in (1, 2):
        part = {name: tensors[name] for name in list(tensors)[number - 1 :: 2]}
        file = f"model-{number:05}-of-00002.safetensors"
        sharded[file] = safetensors.torch.save(part)
        index |= dict.fromkeys(part, file)
    sharded["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    torch.save(tensors, folder / "pytorch_model.bin")
    pickled = {"pytorch_model.bin": (folder / "pytorch_model.bin").read_bytes()}
    files = {
        "org/whole": config | whole | pickled | {"a.gguf": b"-"},
        "org/sharded": config | sharded | pickled,
        "org/pickled": config | pickled,
        "org/gated": config | whole,
        "org/one-gguf": NEVER | {"only.gguf": b"GGUF", "config.json": b"{}"},
        "org/ggufs": NEVER | {"a.gguf": b"GGUF a", "b.gguf": b"GGUF b"},
        "org/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"-"},
    }
    return files, model


def point_to(url: str, monkeypatch) -> None:
    """Make a server the Hub, as HF_ENDPOINT does before the library is imported."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A Hub on this machine, and its model; names are fetched into a new cache."""
    files, model = repositories(tmp_path / "model")
    with serving(files, gated=("org/gated",)) as server:
        point_to(server.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(checkpoint, "HUB_COMMITS", {})
        server.model = model
        yield server


def fetch(name: str) -> Path:
    return checkpoint.find_model(name).place


def logits(name: str) -> torch.Tensor:
    return checkpoint.find_model(name).transformer()(TOKENS)


def fetched(server) -> list[str]:
    paths = [path for command, path in server.requests if command == "GET" and "/resolve/" in path]
    server.requests.clear()
    return [path.split("/", 5)[5] for path in paths]


NAMES = "Qwen/Qwen2.5-0.5B HuggingFaceTB/SmolLM2-135M a/b.c-d_e a/b@abc1234 a/b@main a/B-GGUF/b-q4_k_m.gguf"
NAMES += " here/a gpt2 distilgpt2@main"  # a folder `here` is there; a bare word is like none of ours
PATHS = "runs/laptop data/x models/x results/x models/a/b.gguf /a/b ./a/b ../a/b ~/a/b a/b/c a//b /a a/"
PATHS += " a/b/c/d.gguf C:\\a\\b a/b@ a/b@c/d smollm tiny_llama"


def test_which_names_may_be_the_hubs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("fetched").mkdir()
    monkeypatch.setattr(hub, "fetch", lambda *_: Path("fetched"))
    for name in NAMES.split():
        assert checkpoint.find_model(name).place == Path("fetched"), name
    for name in PATHS.split():
        with pytest.raises(UserError, match="no model"):
            checkpoint.find_model(name)


@pytest.mark.parametrize(
    "repo, weights",
    [
        ("org/whole", {"model.safetensors"}),
        ("org/sharded", {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX}),
        ("org/pickled", {"pytorch_model.bin"}),
    ],
)
def test_one_format_of_weights_is_fetched_once(repo, weights, here, capsys, monkeypatch):
    files = here.repositories[repo]
    size = sum(len(files[name]) for name in (weights | BESIDE) - {INDEX}) / 1e9  # which comes first
    assert torch.equal(logits(repo), here.model(TOKENS))
    assert sorted(fetched(here)) == sorted(weights | BESIDE)
    assert capsys.readouterr().err == f"not here: fetching {repo} from the Hub, {size:.3g} GB\n"
    for name in (repo, f"{repo}@{COMMIT}", f"{repo}@step7"):
        assert torch.equal(logits(name), here.model(TOKENS))
        assert fetched(here) == [] and checkpoint.HUB_COMMITS[name] == COMMIT
    here.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(logits(repo), here.model(TOKENS))
    assert here.requests == [] and capsys.readouterr().err == ""


def test_a_gguf_file_is_fetched_if_it_is_named_or_alone(here):
    for repo, name, file in (
        ("org/one-gguf", "org/one-gguf", "only.gguf"),
        ("org/ggufs", "org/ggufs/b.gguf", "b.gguf"),
    ):
        assert fetch(name).name == file and fetch(name).read_bytes() == here.repositories[repo][file]
        assert fetched(here) == [file]
    assert fetch(f"org/ggufs@{COMMIT}/b.gguf").name == "b.gguf"


MISTAKES = {
    "org/nobody": "no model 'org/nobody' here, and the Hub answers RepositoryNotFoundError: check name",
    "org/gated": "GatedRepoError: .* terms at http://127.0.0.1:.*/org/gated, or type `hf auth login`",
    "org/ggufs": "has a.gguf, b.gguf: expected .*; org/ggufs/FILE.gguf names one of several",
    "org/ggufs/c.gguf": "has a.gguf, b.gguf: expected",
    "org/adapter": "has adapter_config.json, adapter_model.safetensors: expected safetensors, pytorch",
    "org/whole@nowhere": "no model 'org/whole' here, and the Hub answers RevisionNotFoundError",
    "a--b/c": "cannot read a--b/c",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, here):
    for in_parts in (False, True):
        with pytest.raises(UserError, match=MISTAKES[name]):
            checkpoint.find_model(name, weights_alone=in_parts)
    assert fetched(here) == [] and checkpoint.HUB_COMMITS == {}


def test_without_a_network(here, monkeypatch):
    place = fetch("org/whole")
    with socket.socket() as silent, socket.socket() as closed:
        for listener in (silent, closed):
            listener.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(hub, "TIMEOUT", 0.5)
        for listener in (silent, closed):
            point_to(f"http://127.0.0.1:{listener.getsockname()[1]}", monkeypatch)
            assert fetch("org/whole") == place
            with pytest.raises(UserError, match="org/other is not here, and the Hub is out of reach"):
                fetch("org/other")


def test_the_json_names_the_commit_and_one_process_fetches(here, tmp_path):
    env = {"HF_ENDPOINT": here.url, "HF_HOME": str(tmp_path / "home")}
    words = ("--model", "org/whole", "--num-sequences", 4, "--sequence-length", 8, "--device", "cpu")
    words += ("--dtype", "float32")
    done = run_script("tests/ranks.py", "probe.py", *words, "--out", tmp_path / "out", env=env)
    assert done.stderr.endswith("ended with [0, 0]\n"), done.stderr
    assert done.stderr.count("not here: fetching") <= 1  # none where rank 1 was done before rank 0 looked
    assert sorted(fetched(here)) == sorted({"model.safetensors"} | BESIDE)
    saved = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert saved["environment"]["hub"] == {"org/whole": COMMIT}
    assert saved["rows"][0]["model"] == "org/whole"


@pytest.fixture
def base(here, tmp_path, monkeypatch):
    """A Hub with a model of a hundred times the bytes that are fetched as one; it stands in a folder, too."""
    monkeypatch.setattr(ranges, "NEAR", 2**12)
    monkeypatch.setattr(ranges, "LARGEST", 2**17)
    folder = tmp_path / "base"
    saving.save(folder, random_model(replace(KINDS["llama"], vocab_size=600, d_model=128, d_ff=512)))
    here.repositories["org/base"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    return here


def looks(source) -> list:
    names = [name for name, shape in source.shapes.items() if len(shape) == 2]
    rows = (slice(8, 16), slice(64, 68), torch.tensor([100, 90]))
    return [(name, (part,)) for name in names for part in rows]


def read(name, parts, wholes=()) -> dict:
    source = checkpoint.find_model(str(name), weights_alone=True).weights
    found = {}
    for wanted in (parts or looks(source), [(name, ()) for name in wholes]):
        source.expect(wanted)
        found |= {(name, str(part)): source.read(name, part) for name, part in wanted}
    return found


def assert_same(some, others) -> None:
    assert some.keys() == others.keys()
    assert all(torch.equal(value, others[key]) for key, value in some.items())


MATRIX = "model.layers.1.mlp.up_proj.weight"


def test_what_is_read_is_fetched_once_and_kept(base, tmp_path, capsys, monkeypatch):
    local = read(tmp_path / "base", [], [MATRIX])
    assert_same(read("org/base", []), read(tmp_path / "base", []))
    size = len(base.repositories["org/base"]["model.safetensors"])
    assert 0 < base.sent < 0.7 * size
    before = base.sent
    matrix = 4 * local[MATRIX, "()"].numel()
    assert_same(read("org/base", [], [MATRIX]), local)
    assert base.sent - before < matrix  # not again what was looked at
    assert fetched(base).count("model.safetensors") < 80  # three for each of 23 matrices, or so
    told = re.findall(r"(\S+) GB$", capsys.readouterr().err, re.M)  # in three digits, without headers
    assert sum(map(float, told)) * 1e9 == pytest.approx(base.sent, rel=0.05)
    ranges.spans.cache_clear()  # as another process
    assert_same(read(f"org/base@{COMMIT}", [], [MATRIX]), local)
    assert fetched(base) == [] and capsys.readouterr().err == ""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_same(read("org/base", [], [MATRIX]), local)
    assert base.requests == []


def test_a_download_that_breaks_leaves_nothing_false(base, tmp_path):
    content = base.repositories["org/base"]["model.safetensors"]
    base.repositories["org/base"]["model.safetensors"] = Broken(content)
    with pytest.raises(UserError, match="cannot fetch more of org/base.* The same command takes it up"):
        read("org/base", [])
    (path,) = tmp_path.glob("cache/models--org--base/parts/*/model.safetensors")
    ranges.spans.cache_clear()
    assert 0 < sum(stop - start for start, stop in ranges.spans(path)) < len(content) / 2
    for start, stop in ranges.spans(path):
        assert ranges.read(path, start, stop) == content[start:stop]
    base.repositories["org/base"]["model.safetensors"] = content
    assert_same(read("org/base", []), read(tmp_path / "base", []))


class Broken(bytes):
    parts = 4

    def __getitem__(self, part):
        self.parts -= part.start != 0
        return super().__getitem__(part) if self.parts > 0 else b"-"


READ = """
import os, sys, torch
sys.path[:0] = ["tests", "."]
from test_hub import read, MATRIX
from sources import saving
from sources import saving
path = sys.argv[1 + (os.fork() == 0)]
torch.save(read("org/base", [], [MATRIX]), path)
if path == sys.argv[1]:
    assert os.wait()[1] == 0
"""


def test_two_processes_at_once(base, tmp_path):
    env = {"HF_ENDPOINT": base.url, "HF_HOME": str(tmp_path / "home")}
    paths = [tmp_path / "0", tmp_path / "1"]
    done = run_script("-c", READ, *paths, env=env)
    assert done.returncode == 0, done.stderr
    for path in paths:
        assert_same(torch.load(path), read(tmp_path / "base", [], [MATRIX]))


def test_a_server_without_ranges_sends_files_whole(base, tmp_path):
    base.has_ranges = False
    for _ in range(2):  # once
        assert_same(read("org/base", []), read(tmp_path / "base", []))
        assert base.sent == sum(map(len, base.repositories["org/base"].values()))


def test_a_gguf_file_is_read_by_ranges(base, tmp_path, monkeypatch):
    from test_gguf import write

    path = write(
        tmp_path / "only.gguf", "llama", random_model(replace(KINDS["llama"], d_model=128, d_ff=512))
    )
    base.repositories["org/one-gguf"]["only.gguf"] = path.read_bytes()
    parts = [(MATRIX, (slice(8, 16),)), ("model.layers.0.self_attn.q_proj.weight", (slice(40, 44),))]
    assert_same(read("org/one-gguf", parts), read(path, parts))
    assert base.sent < 0.2 * path.stat().st_size
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_same(read("org/one-gguf", parts), read(path, parts))
