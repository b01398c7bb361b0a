"""data.py: what goes in comes out, nothing looks done that is not, batches are functions of their number."""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import ROOT, assert_refused, run_script

import data
import tokenizer as tokenizer_module
from common import UserError
from tokenizer import load_tokenizer

LINES = Path(argparse.__file__).read_text("utf-8").splitlines(keepends=True)
TEXTS = [f"# {i}: café ☕\n" + "".join(LINES[4 * i : 4 * i + 4]) for i in range(400)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A .jsonl file of TEXTS."""
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def prepare(source, out, **more):
    more = {"tokenizer": "bytes", "held_out": 0.1} | more
    return data.prepare(data.Settings(source=(str(source),), out=str(out), **more))


def documents_of(folder, split):
    """The texts of a split, decoded from its shards."""
    tokens = data.TokenData(folder)
    tokenizer = tokens.load_tokenizer()
    stream = np.concatenate([np.asarray(shard) for shard in tokens.shards[split]])
    parts = np.split(stream, np.flatnonzero(stream == tokenizer.bos))[1:]
    assert all(part[0] == tokenizer.bos for part in parts)
    return [tokenizer.decode(part[1:].tolist()) for part in parts]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:500"])
def test_every_document_comes_back_from_exactly_one_split(corpus, tmp_path, tokenizer):
    folder = prepare(corpus, tmp_path / "set", tokenizer=tokenizer)
    train, val = documents_of(folder, "train"), documents_of(folder, "val")
    assert sorted(train + val) == sorted(TEXTS)
    assert [t for t in TEXTS if t in set(train)] == train, "order is kept"
    assert 0.05 < len(val) / len(TEXTS) < 0.16  # binomial: 0.1 within four standard errors of 0.015
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["documents"] == {"train": len(train), "val": len(val)}
    assert meta["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert meta["dtype"] == "uint16" and meta["vocab_size"] == (257 if tokenizer == "bytes" else 500)


def test_the_split_is_decided_by_the_document_alone(corpus, tmp_path):
    """Another order, other neighbours, another tokenizer: a held-out document stays held out."""
    backwards = tmp_path / "backwards.jsonl"
    backwards.write_text("".join(corpus.read_text().splitlines(keepends=True)[::-1][:200]))
    here = set(documents_of(prepare(corpus, tmp_path / "a"), "val"))
    there = set(documents_of(prepare(backwards, tmp_path / "b", tokenizer="bpe:400"), "val"))
    assert there == {text for text in here if text in TEXTS[200:]}


def test_sources_of_every_format_agree(corpus, tmp_path):
    zipped = tmp_path / "texts.jsonl.gz"
    zipped.write_bytes(gzip.compress(corpus.read_bytes()))
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text().replace('"text"', '"body"'))
    plain = prepare(corpus, tmp_path / "a")
    for i, (source, more) in enumerate(
        [(zipped, {}), (other, {"field": "body"}), (tmp_path / "texts*.gz", {})]
    ):
        same = prepare(source, tmp_path / f"same{i}", **more)
        for name in ("train_00000.bin", "val_00000.bin"):
            assert (same / name).read_bytes() == (plain / name).read_bytes()


def test_hub_source_offline(corpus, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(corpus.read_bytes())
    plain, hub = prepare(corpus, tmp_path / "a"), prepare(f"hf:{tmp_path / 'set'}", tmp_path / "b")
    assert (hub / "train_00000.bin").read_bytes() == (plain / "train_00000.bin").read_bytes()
    with pytest.raises(UserError, match="cannot read hf:"):
        prepare(f"hf:{tmp_path / 'nothing'}", tmp_path / "c")


def test_shards_make_one_stream(corpus, tmp_path):
    one, many = prepare(corpus, tmp_path / "one"), prepare(corpus, tmp_path / "many", shard_tokens=3000)
    whole, parts = data.TokenData(one).shards["train"], data.TokenData(many).shards["train"]
    assert len(whole) == 1 and len(parts) > 5
    assert np.array_equal(np.concatenate(parts), whole[0])


def test_bpe_is_repeatable_and_samples(corpus, tmp_path):
    first, again = (tokenizer_module.train_bpe("bpe:400", iter(TEXTS)) for _ in range(2))
    assert first == again
    sampled, resampled = (tokenizer_module.train_bpe("bpe:400", iter(TEXTS), sample=50) for _ in range(2))
    assert sampled == resampled


def test_bpe_reads_long_lines_and_forgets_the_threads():
    """A line longer than SentencePiece takes counts; the file is the same on any machine."""
    line = " ".join(TEXTS).replace("\n", " ") * 9
    assert len(line) > 20_000
    long, threads = load_tokenizer("bpe:400", iter([line])), torch.get_num_threads()
    assert len(long.encode([TEXTS[0]])[0]) < 0.9 * len(TEXTS[0])
    assert "".join(tokenizer_module.pieces(iter([line]))) == line
    first = tokenizer_module.train_bpe("bpe:400", iter(TEXTS))
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert tokenizer_module.train_bpe("bpe:400", iter(TEXTS)) == first
    finally:
        torch.set_num_threads(threads)


def test_bpe_keeps_every_byte():
    strange = [
        "  two  spaces\t\ttabs\r\n\n\n",
        "null \0 and bell \a",
        "日本語 👩‍👩‍👧 ﬁ é",
        "",
        " ",
        "x" * 5000,
    ]
    tokenizer = load_tokenizer("bpe:500", iter(TEXTS))
    for text, tokens in zip(strange, tokenizer.encode(strange)):
        assert tokenizer.decode(list(tokens)) == text


def test_a_sentencepiece_file_of_another_kind(tmp_path):
    """Llama 2's settings: a prefix of a space, normalisation; and a model without BOS is refused."""
    for bos in (1, -1):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS),
            model_prefix=str(tmp_path / f"bos{bos}"),
            vocab_size=400,
            model_type="bpe",
            byte_fallback=True,
            bos_id=bos,
            eos_id=-1,
            minloglevel=2,
        )
    tokenizer = load_tokenizer(str(tmp_path / "bos1.model"))
    assert tokenizer.bos == 1 and tokenizer.decode(tokenizer.encode(["def f"])[0]) == "def f"
    with pytest.raises(UserError, match="neither BOS nor EOS"):
        load_tokenizer(str(tmp_path / "bos-1.model"))


def test_python_and_its_docstrings(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n')
    assert data.docstrings(file) == "Module.\n\nClass.\n\nMethod."
    file.write_text("def broken(:")
    assert data.docstrings(file) == ""
    file.write_bytes(b"\0\xff")
    assert data.docstrings(file) == ""
    library = data.sources(("python",))
    assert any(f.name == "argparse.py" for f in library)
    assert not any("site-packages" in f.parts for f in library)
    assert any("torch" in f.parts for f in data.sources(("python+site",)))


def test_windows_and_batches(corpus, tmp_path):
    tokens = data.TokenData(prepare(corpus, tmp_path / "set", shard_tokens=3000))
    T = 40
    size = tokens.num_windows("train", T)
    assert size == sum((len(shard) - 1) // T for shard in tokens.shards["train"])
    inputs, targets = tokens.windows("train", range(size), T)
    assert inputs.shape == targets.shape == (size, T) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    first = np.asarray(tokens.shards["train"][0])
    assert np.array_equal(inputs[1], first[T : 2 * T]) and targets[0, -1] == first[T]
    # An epoch is a permutation of the windows, another epoch another one, and a batch is any range.
    epoch, _ = tokens.batch(0, range(size), T)
    assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, inputs.tolist()))
    assert not torch.equal(epoch, tokens.batch(0, range(size, 2 * size), T)[0])
    assert not torch.equal(epoch, tokens.batch(1, range(size), T)[0])
    fresh = data.TokenData(tokens.folder)
    across = fresh.batch(0, range(size - 3, size + 3), T)[0]
    assert torch.equal(across, tokens.batch(0, range(2 * size), T)[0][size - 3 : size + 3])
    last = tokens.num_windows("val", T) - 1
    numbers = [0, last // 4, last // 2, 3 * last // 4, last]
    for held, expected in zip(tokens.held_out(5, T), tokens.windows("val", numbers, T)):
        assert torch.equal(held, expected) and len(held.unique(dim=0)) == 5
    with pytest.raises(UserError, match="of one window"):
        tokens.num_windows("val", 10**6)


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "remove", "meta", "meta_type", "dtype", "bpe", "no_meta"]
)
def test_a_corrupt_data_set_is_refused(corpus, tmp_path, damage):
    folder = prepare(corpus, tmp_path / "set", tokenizer="bpe:400")
    shard, meta = folder / "train_00000.bin", folder / "meta.json"
    if damage == "flip":
        raw = bytearray(shard.read_bytes())
        raw[1234] ^= 1
        shard.write_bytes(raw)
    elif damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:-2])
    elif damage == "remove":
        shard.unlink()
    elif damage == "meta":
        meta.write_text(meta.read_text()[:100])
    elif damage == "meta_type":
        meta.write_text("[]")
    elif damage == "dtype":  # numpy would read bytes as pointers
        meta.write_text(meta.read_text().replace('"uint16"', '"O"'))
    elif damage == "bpe":
        (folder / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes() + b" ")
    else:
        meta.unlink()
    with pytest.raises(UserError, match=str(tmp_path)):
        data.TokenData(folder)


def test_bad_inputs(corpus, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": 3}\n')
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(corpus.read_bytes())[:-20])
    small = tmp_path / "small.txt"
    small.write_text("one document\n")
    for words, *expected in (
        ([bad], "bad.jsonl:2", "--field"),
        ([cut], "cannot read"),
        ([tmp_path / "none*.txt"], "no text in"),
        ([tmp_path], "no text in"),
        ([ROOT / "README.md"], "expected .txt"),
        ([small, "--tokenizer", "bytes"], "--held-out"),
        ([corpus, "--tokenizer", "bpe:10"], "bpe:10"),
        ([corpus, "--tokenizer", "bpe:x"], "bpe:N"),
        ([corpus, "--tokenizer", "bpe:5000000000"], "cannot train"),
        (["docstrings", "python"], "mixed"),
        ([corpus, "--tokenizer", ROOT / "README.md"], "no SentencePiece model"),
        ([corpus, "--tokenizer", "nothing"], "no tokenizer"),
        ([corpus, "--tokenizer", "tiktoken:gpt9"], "tiktoken"),
        ([corpus, "--held-out", "1.5"], "--held-out"),
    ):
        with pytest.raises(UserError) as error:
            main_in_process([*words, "--out", tmp_path / "out"])
        for word in expected:
            assert word in str(error.value)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def main_in_process(words):
    for _, work in data.plan(list(map(str, words))):
        work()


def test_tiktoken_offline_says_what_to_do(tmp_path):
    """No cache and no network: a line that names the cache's variable, not a network library's traceback."""
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "https_proxy": "http://127.0.0.1:9", "http_proxy": ""}
    result = run_script("data.py", "python", "--tokenizer", "tiktoken:gpt2", "--out", tmp_path / "x", env=env)
    assert_refused(result, "TIKTOKEN_CACHE_DIR")


def test_command_line_and_killed_preparation(corpus, tmp_path):
    """SIGKILL in the middle: no folder. The next preparation succeeds, and clears what was left."""
    big = tmp_path / "big.jsonl"
    big.write_text(corpus.read_text() * 200)
    command = [sys.executable, "data.py", str(big), "--tokenizer", "bytes", "--out", str(tmp_path / "set")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob(".set.*.new.tmp")):
        assert process.poll() is None
    process.kill()
    process.wait()
    assert not (tmp_path / "set").exists()
    result = run_script("data.py", corpus, "--tokenizer", "bytes", "--out", tmp_path / "set")
    assert result.returncode == 0, result.stderr
    assert "400 documents" in result.stdout and "validation tokens" in result.stdout
    assert not list(tmp_path.glob(".set*"))
    assert_refused(run_script("data.py", corpus, "--out", tmp_path / "set"), "exists", "--out")


def test_full_disk_leaves_nothing(corpus, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = [sys.executable, "data.py", str(corpus), "--tokenizer", "bytes", "--out", str(tmp_path / "set")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limit)
    assert_refused(result, "cannot write")
    assert os.listdir(tmp_path) == []


def test_memory_is_bounded(tmp_path):
    """A source of 60 MB in one file costs little more than one of 6 MB: a shard in the making is held."""
    code = "import common, data; common.run(data.plan);"
    code += "print(next(l for l in open('/proc/self/status') if 'VmHWM' in l))"
    peaks = []
    for megabytes in (6, 60):
        file = tmp_path / f"{megabytes}.txt"
        file.write_text("".join(f"{i:9} {'word ' * 20}\n" for i in range(megabytes * 10**6 // 111)))
        words = [file, "--tokenizer", "bytes", "--out", tmp_path / f"set{megabytes}", "--shard-tokens", 10**6]
        words += ["--held-out", 0.1]
        result = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout.split()[-2]))  # kB; getrusage would count the parent's, too
    assert peaks[1] < peaks[0] + 60_000, f"{peaks} kB"  # all of it in memory would be 54,000 and twice more


def test_default_folders_do_not_collide():
    """A name that says all, or one by its hash."""

    def folder(*source, tokenizer="bpe:4096"):
        return data.default_folder(data.Settings(source=source, tokenizer=tokenizer))

    assert str(folder("python")) == "data/python-bpe_4096" and str(folder("python+site")).endswith(
        "python+site-bpe_4096"
    )
    many = [
        folder("b/x*.txt"),
        folder("b/x?.txt"),
        folder("a/b.txt"),
        folder("a_b.txt"),
        folder(*["x" * 99] * 99),
    ]
    assert len(set(many)) == 5 and max(len(str(path)) for path in many) < 40


def test_a_line_is_a_line(tmp_path):
    """Control characters of a file's name reach the terminal escaped."""
    assert_refused(run_script("data.py", "no\n\x1b[31mthing", "--out", tmp_path / "x"), "no\\n\\x1b[31mthing")
