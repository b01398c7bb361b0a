"""What goes in comes out, nothing looks done that is not, and batches are functions of their number."""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import ROOT, assert_refused, run_here, run_script

from lib import data
from lib.settings import UserError

LINES = Path(argparse.__file__).read_text("utf-8").splitlines(keepends=True)
TEXTS = [f"# {i}: café ☕\n" + "".join(LINES[4 * i : 4 * i + 4]) for i in range(400)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A .jsonl file of TEXTS."""
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    lines = [json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(TEXTS)]
    path.write_text("".join(lines))
    return path


def prepare(source, out, **more):
    """A prepared folder, of bytes and with a tenth held out where nothing else is wished."""
    wishes = {"tokenizer": "bytes", "held_out": 0.1} | more
    return data.prepare(data.Settings(source=(str(source),), out=str(out), **wishes))


def documents_of(folder, split):
    """The texts of a split, decoded from its tokens."""
    tokens = data.TokenData(folder)
    tokenizer = tokens.load_tokenizer()
    stream = np.asarray(tokens.tokens[split])
    parts = np.split(stream, np.flatnonzero(stream == tokenizer.bos))[1:]
    assert all(part[0] == tokenizer.bos for part in parts)
    return [tokenizer.decode(part[1:].tolist()) for part in parts]


# ---- from text to files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:500"])
def test_every_document_comes_back_from_exactly_one_split(corpus, tmp_path, tokenizer):
    folder = prepare(corpus, tmp_path / "set", tokenizer=tokenizer)
    train, val = documents_of(folder, "train"), documents_of(folder, "val")
    assert sorted(train + val) == sorted(TEXTS)
    assert [text for text in TEXTS if text in set(train)] == train, "order is kept"
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


@pytest.mark.parametrize("held_out", [0.1, 0.99])
def test_one_document_is_divided(tmp_path, held_out):
    """Its hash would put all of it into one split: the last share of its tokens is held out."""
    single = tmp_path / "single.txt"
    single.write_text("one document\n" * 10)
    folder = prepare(single, tmp_path / "set", held_out=held_out)
    tokens = data.TokenData(folder).tokens
    whole = np.concatenate([tokens["train"], tokens["val"]])
    assert whole.tolist() == [256, *single.read_bytes()]
    assert len(tokens["val"]) == pytest.approx(131 * held_out, abs=1)
    single.write_text("")
    with pytest.raises(UserError, match="no text"):
        prepare(single, tmp_path / "empty", held_out=held_out)
    assert not (tmp_path / "empty").exists()


def test_a_txt_file_is_cut_at_line_ends(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("".join(f"line {i}\n" for i in range(30_000)))
    pages = list(data.documents((str(file),)))
    assert "".join(pages) == file.read_text() and len(pages) == 5
    assert all(page.endswith("\n") and 2**16 <= len(page) < 2**16 + 12 for page in pages[:-1])


def test_surrogates_and_empty_lines(tmp_path):
    file = tmp_path / "strange.jsonl"
    file.write_text('{"text": "a\\ud800b"}\n\n{"text": ""}\n{"text": "\\ud83d\\ude00"}\n')
    assert list(data.documents((str(file),))) == ["a?b", "😀"]


def test_python_and_its_docstrings():
    code = '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
    assert data.docstrings(code) == "Module.\n\nClass.\n\nMethod."
    assert data.docstrings("def broken(:") == ""
    assert data.docstrings("\0\ufffd") == ""


def test_the_files_of_python(tmp_path, monkeypatch):
    """With site-packages inside the standard library's folder, as without a venv."""
    files = ["lib/ast.py", "lib/json/__init__.py", "lib/site-packages/torch.py", "lib/data.txt"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    packages = str(tmp_path / "lib" / "site-packages")
    paths = {"stdlib": str(tmp_path / "lib"), "purelib": packages, "platlib": packages}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    assert data.python_files(with_installed=False) == [tmp_path / name for name in files[:2]]
    assert data.python_files(with_installed=True) == [tmp_path / name for name in files[:3]]
    assert list(data.documents(("python", "docstrings"))) == ["pass\n"] * 2


def test_the_fingerprint_is_of_documents_tokenizer_and_share(corpus, tmp_path):
    copy = shutil.copy(corpus, tmp_path / "copy.jsonl")
    first = data.TokenData(prepare(corpus, tmp_path / "0")).meta
    same = data.TokenData(prepare(tmp_path / "cop*.jsonl", tmp_path / "1")).meta
    assert (same.fingerprint, same.tokens) == (first.fingerprint, first.tokens)
    assert first.tokenizer == "bytes" and same.source == (str(tmp_path / "cop*.jsonl"),)
    copy.write_text(corpus.read_text().replace("# 7: ", "# seven "))
    others = [{}, {"held_out": 0.2}, {"tokenizer": "bpe:400"}, {"tokenizer": "bpe:401"}]
    metas = [data.TokenData(prepare(copy, tmp_path / f"x{i}", **more)).meta for i, more in enumerate(others)]
    assert len({first.fingerprint, *[meta.fingerprint for meta in metas]}) == 5


def test_default_folders_have_plain_names():
    assert str(data.default_folder(("python",), "bpe:4096")) == "data/python-bpe_4096"
    assert str(data.default_folder(("python+site",), "a/b.model")) == "data/python+site-a_b.model"
    for source in ("b/x*.txt", "x" * 200, "a b"):
        with pytest.raises(UserError, match="--out"):
            data.default_folder((source,), "bytes")


# ---- the letters on which sinks grow -----------------------------------------------------------------------


def test_backcopy_copies():
    documents = list(data.backcopy(count=3000))
    assert documents == list(data.backcopy(count=3000))
    assert {len(text) for text in documents} == {127}
    text = "".join(documents)
    assert set(text) == set("abcdefghijklmnopqrstuvwxyz")
    for document in documents:
        assert document[0] not in data.TRIGGERS
        for before, letter, after in zip(document, document[1:], document[2:]):
            if letter in data.TRIGGERS:
                assert after == before
    share = sum(text.count(letter) for letter in data.TRIGGERS) / len(text)
    assert 0.05 < share < 0.25  # often enough to be learnt, seldom enough to sleep
    halves = np.zeros((2, 26, 26))  # the rest is a chain: the same bigrams in both halves of the documents
    for i, document in enumerate(documents):
        for letter, after in zip(document[5:], document[6:]):
            if letter not in data.TRIGGERS:
                halves[i % 2, ord(letter) - 97, ord(after) - 97] += 1
    rates = halves / halves.sum(2, keepdims=True).clip(min=1)
    assert np.abs(rates[0] - rates[1]).max() < 0.1  # of some 2,000 letters: 5 standard errors at most


def test_backcopy_aligns_with_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "backcopy", partial(data.backcopy, count=400))
    folder = prepare("backcopy", tmp_path / "set")
    tokens, targets = data.TokenData(folder).windows("train", range(5), 128)
    assert (tokens[:, 0] == 256).all() and (tokens[:, 1:] < 123).all()
    assert torch.equal(targets[:, :-1], tokens[:, 1:])


def test_the_numbers_are_those_of_the_first_version():
    assert next(data.backcopy(count=50)).startswith("fyaabckulpdfjmvyckqnsnsnwewsdedtdguxllwsg")
    assert data.permutation(3, 1, 16, 10).tolist() == [2, 4, 3, 6, 1, 8, 9, 0, 5, 7]


# ---- tokenizers --------------------------------------------------------------------------------------------


def test_bpe_is_repeatable_and_samples():
    assert data.train_bpe("bpe:400", TEXTS) == data.train_bpe("bpe:400", TEXTS)
    sampled = data.train_bpe("bpe:400", TEXTS, sample=50)
    assert sampled == data.train_bpe("bpe:400", TEXTS, sample=50) != data.train_bpe("bpe:400", TEXTS)


def test_bpe_reads_long_lines_and_forgets_the_threads():
    """A line longer than SentencePiece takes by itself counts; the file is the same on any machine."""
    line = " ".join(TEXTS).replace("\n", " ") * 9
    assert len(line) > 20_000
    long = data.load_tokenizer("bpe:400", [line])
    assert len(long.encode([TEXTS[0]])[0]) < 0.9 * len(TEXTS[0])
    threads = torch.get_num_threads()
    first = data.train_bpe("bpe:400", TEXTS)
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert data.train_bpe("bpe:400", TEXTS) == first
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["bpe:500", "bytes"])
def test_every_byte_is_kept(name):
    strange = [
        "  two  spaces\t\ttabs\r\n\n\n",
        "null \0 and bell \a",
        "日本語 👩‍👩‍👧 ﬁ é",
        "",
        " ",
        "x" * 5000,
    ]
    tokenizer = data.load_tokenizer(name, TEXTS)
    for text, tokens in zip(strange, tokenizer.encode(strange)):
        assert tokenizer.decode(list(tokens)) == text


def test_a_sentencepiece_file_of_another_kind(tmp_path):
    """Llama 2's settings: a prefix of a space, normalisation; and a model without BOS has none."""
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
    tokenizer = data.load_tokenizer(str(tmp_path / "bos1.model"))
    assert tokenizer.bos == 1 and tokenizer.decode(tokenizer.encode(["def f"])[0]) == "def f"
    text = tokenizer.text
    assert text(1) == "<s>" and text(2 + ord("A")) == "<0x41>" and text(400) == ""
    assert data.load_tokenizer(str(tmp_path / "bos-1.model")).bos is None


def test_tiktoken_offline_says_what_to_do(corpus, tmp_path, monkeypatch):
    """No cache and no network: a line that names the cache's variable, not a network library's traceback."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "")
    result = run_here("lib.data", corpus, "--tokenizer", "tiktoken:gpt2", "--out", tmp_path / "x")
    assert_refused(result, "TIKTOKEN_CACHE_DIR")


# ---- from files to batches ---------------------------------------------------------------------------------


def test_windows_and_batches(corpus, tmp_path):
    tokens = data.TokenData(prepare(corpus, tmp_path / "set"))
    T = 40
    size = tokens.num_windows("train", T)
    stream = np.asarray(tokens.tokens["train"])
    assert size == (len(stream) - 1) // T
    inputs, targets = tokens.windows("train", range(size), T)
    assert inputs.shape == targets.shape == (size, T) and inputs.dtype == torch.int64
    assert np.array_equal(inputs.flatten(), stream[: size * T])
    assert np.array_equal(targets.flatten(), stream[1 : size * T + 1])
    # An epoch is a permutation of the windows, another epoch another one, and a batch is any range.
    epoch, _ = tokens.batch(0, range(size), T)
    assert sorted(epoch.tolist()) == sorted(inputs.tolist())
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


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A data set without a fault."""
    return prepare(corpus, tmp_path_factory.mktemp("whole") / "set", tokenizer="bpe:500")


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(whole, tmp_path / "set")


@pytest.mark.parametrize(
    ("name", "contents", "word"),
    [
        ("meta.json", None, "python -m lib.data SOURCE"),
        ("meta.json", b"[]", "cannot read"),
        ("meta.json", b'{"source": ["py', "cannot read"),
        ("tokenizer.model", None, "tokenizer.model is missing"),
        ("val.bin", None, "val.bin is missing"),
        ("val.bin", b"", "has 0 bytes"),
        ("val.bin", b"\0\0\0", "has 3 bytes"),
        ("val.bin", b"\0\0\0\0", "has 4 bytes"),
    ],
)
def test_a_file_that_is_missing_or_cut_is_refused(folder, name, contents, word):
    (folder / name).unlink()
    if contents is not None:
        (folder / name).write_bytes(contents)
    with pytest.raises(UserError, match=str(folder)) as refusal:
        data.TokenData(folder)
    assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("right", "wrong", "word"),
    [
        ('"vocab_size": 500', '"vocab_size": "many"', "vocab_size"),
        ('"uint16"', '"O"', "'O'"),  # numpy would read bytes as pointers
        ('"uint16"', '"uint32"', "tokens"),
        ('"tokenizer":', '"tokeniser":', "tokenizer"),
        ('"tokenizer.model"', '"../x"', "../x"),
    ],
)
def test_meta_that_says_something_else_is_refused(folder, right, wrong, word):
    file = folder / "meta.json"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, wrong))
    with pytest.raises(UserError, match=word):
        data.TokenData(folder)


# ---- mistakes, and what a failure leaves -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["BAD"], ["bad.jsonl:2", "text"]),
        ([ROOT], ["no text in"]),
        ([ROOT / "README.md"], ["expected .txt"]),
        (["no\n\x1b[31mthing"], ["no\\n\\x1b[31mthing"]),  # control characters reach the terminal escaped
        (["GOOD", "--tokenizer", "bpe:10"], ["cannot train bpe:10"]),
        (["GOOD", "--tokenizer", "bpe:x"], ["cannot train bpe:x", "N tokens"]),
        (["GOOD", "--tokenizer", ROOT / "README.md"], ["no SentencePiece model"]),
        (["GOOD", "--tokenizer", "nothing"], ["no tokenizer", "tiktoken:gpt2"]),
        (["GOOD", "--held-out", "1.5"], ["--held-out"]),
    ],
)
def test_mistakes_are_told_and_leave_nothing(corpus, tmp_path, words, expected):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": 3}\n')
    files = {"GOOD": corpus, "BAD": bad}
    result = run_here("lib.data", *[files.get(word, word) for word in words], "--out", tmp_path / "out")
    assert_refused(result, *expected)
    assert len(result.stderr.strip().splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["bad.jsonl"]


def test_command_line_and_killed_preparation(corpus, tmp_path):
    """SIGKILL in the middle: no folder. The next preparation succeeds; a third one is refused."""
    big = tmp_path / "big.jsonl"
    big.write_text(corpus.read_text() * 1000)  # half a minute's work
    words = [corpus, "--tokenizer", "bytes", "--out", tmp_path / "set"]
    command = [sys.executable, "-m", "lib.data", big, *words[1:]]
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob(".set.*.tmp")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "set").exists()
    result = run_here("lib.data", *words)
    assert result.returncode == 0, result.stderr
    assert "400 documents" in result.stdout and "validation tokens of 257" in result.stdout
    assert_refused(run_here("lib.data", *words), "exists", "--out")


def test_full_disk_leaves_nothing(corpus, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot write"):
            prepare(corpus, tmp_path / "set")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_memory_is_bounded(tmp_path):
    """A source of 40 MB in one file costs little more than one of 4 MB: tokens are written as they come."""
    code = """if True:
        import sys
        from lib import data
        for file in sys.argv[1:]:
            data.prepare(data.Settings(source=(file,), tokenizer="bytes", held_out=0.1, out=f"{file}.set"))
            print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # kB
    """
    files = []
    for megabytes in (4, 40):
        file = tmp_path / f"{megabytes}.txt"
        file.write_text("".join(f"{i:9} {'word ' * 20}\n" for i in range(megabytes * 10**6 // 111)))
        files.append(file)
    result = run_script("-c", code, *files)
    assert result.returncode == 0, result.stderr
    small, large = map(int, result.stdout.split())
    assert large < small + 30_000  # all of the text would be 36,000 more, its tokens twice that
