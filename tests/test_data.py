"""What goes in comes out, nothing looks done that is not, and batches are functions of their number."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from conftest import LINES, ROOT, TEXTS, assert_refused, run_here, save_byte_tokenizer
from tokenizers import Tokenizer, models

import init
import train
from lib.settings import UserError
from sources import data, inputs, saving
from sources.checkpoint import load_tokenizer
from sources.tokenizers import train_bpe


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("corpus") / "texts.jsonl", TEXTS)


def prepare(source, out, **more):
    wishes = {"tokenizer": "bytes", "held_out": 0.1} | more
    return data.prepare(data.Settings(source=(str(source),), out=str(out), **wishes))


def texts(*source):
    return [text for text, _ in data.pieces(data.places_of(map(str, source)))]


def documents_of(folder, split):
    tokens = data.TokenData(folder)
    tokenizer = tokens.tokenizer
    stream = np.asarray(tokens.tokens[split])
    parts = np.split(stream, np.flatnonzero(stream == tokenizer.bos))[1:]
    assert all(part[0] == tokenizer.bos for part in parts)
    return [tokenizer.decode(part[1:].tolist()) for part in parts]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:500"])
def test_every_document_comes_back(corpus, tmp_path, tokenizer):
    """Each in one split, in order; held out are evenly spaced ones, a tenth of the tokens at most."""
    folder = prepare(corpus, tmp_path / "set", tokenizer=tokenizer)
    train, held_out = documents_of(folder, "train"), documents_of(folder, "val")
    places = [TEXTS.index(text) for text in held_out]
    assert train == [text for text in TEXTS if text not in held_out] and len(held_out) > 30
    assert set(np.diff(places)) <= {400 // len(held_out), 400 // len(held_out) + 1} and places[0] < 11
    meta = data.TokenData(folder).meta
    assert 0.05 <= meta.tokens["val"] / sum(meta.tokens.values()) <= 0.1
    assert meta.bytes == len("".join(TEXTS).encode())


@pytest.mark.parametrize(("num_bytes", "num_windows"), [(400, 1), (40_000, 3)])  # of held-out text
def test_of_long_documents_windows_are_held_out(tmp_path, num_bytes, num_windows):
    """Evenly spaced in one document; what is left over is all of the rest."""
    text = "".join(f"{i:07}\n" for i in range(num_bytes // 8))
    (tmp_path / "single.txt").write_text(text)
    folder = prepare(tmp_path / "single.txt", tmp_path / "set")
    tokens = data.TokenData(folder).tokens
    whole = [256, *text.encode()]
    size = int(0.1 * len(whole)) // num_windows
    gap = (len(whole) - num_windows * size) / num_windows
    train = tokens["train"].tolist()
    for i, window in enumerate(tokens["val"].reshape(num_windows, size).tolist()):
        start = i * len(whole) // num_windows + (len(whole) // num_windows - size) // 2
        assert whole[start : start + size] == window
        train[start:start] = window
        assert abs(start - (i + 0.5) * gap - i * size) <= 1  # half a gap before the first, and after the last
    assert train == whole


def test_short_documents_among_long_ones(tmp_path):
    lines = ["x" * 20_000 if i == 3 else "short" for i in range(20)]
    meta = data.TokenData(prepare(write_lines(tmp_path / "a.jsonl", lines), tmp_path / "set")).meta
    assert meta.held_out == "a window of them" and meta.tokens["val"] == 2011
    assert data.held_out_spans(np.arange(0, 1000, 100), 1000, 0.1)[1].tolist() == [[500, 600]]  # a tenth


def test_documents_of_files(tmp_path):
    """A .txt file is one document, cut at line ends; of JSON lines surrogates go, and empty texts."""
    long, strange = tmp_path / "long.txt", tmp_path / "strange.jsonl"
    long.write_text("".join(f"line {i}\n" for i in range(30_000)))
    pages, begins = zip(*data.pieces([long]))
    assert "".join(pages) == long.read_text()
    assert all(page.endswith("\n") and 2**16 <= len(page) < 2**16 + 12 for page in pages[:-1])
    assert begins == (True, *[False] * (len(pages) - 1))
    tokens = data.TokenData(prepare(long, tmp_path / "set")).tokens
    assert (tokens["train"] == 256).sum() + (tokens["val"] == 256).sum() == 1
    strange.write_text('{"text": "a\\ud800b"}\n\n{"text": ""}\n{"text": "\\ud83d\\ude00"}\n')
    assert texts(strange) == ["a?b", "😀"]
    lines = write_lines(tmp_path / "lines.jsonl", ["1234 " * 300_000, "short"])
    *long, last = data.pieces([lines])  # a single line is cut, too
    assert max(len(text) for text, _ in long) <= 2**17 and len(long) > 8
    assert "".join(text for text, _ in long) == "1234 " * 300_000 and last == ("short", True)


def test_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n\r\n")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "one\\r\\n"}\r\n{"text": "two"}\r\n')
    assert texts(tmp_path / "a.txt", tmp_path / "b.jsonl") == ["one\ntwo\nthree\n\n", "one\r\n", "two"]


def test_a_folder_means_all_text_in_it(tmp_path):
    """Not what is hidden, nor files of other kinds. A byte order mark is no text."""
    folder = tmp_path / "books"
    files = {"b.txt": "b", "a/c.md": "\ufeffc", "a/d.py": "d", "e.RST": "e", ".git/f.txt": "f", "g.png": "g"}
    files |= {"l.txt.gz": "l", "a/n.CSV": "n", "LICENSE": "o", "k.tex": "k"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    (folder / "i.jsonl").write_text('\ufeff{"text": "i"}\n{"text": "j"}')
    assert texts(folder) == ["c", "d", "b", "e", "i", "j", "k"]
    assert texts(f"{tmp_path}/b*") == texts(folder)
    assert sorted(texts(f"{folder}/**")) == sorted(texts(folder))  # a folder, and what is in it, once


def test_python_and_its_docstrings(tmp_path, monkeypatch):
    code = '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
    files = {"ast.py": code, "json/x.py": "def broken(:", "x.py": "\0?", "site-packages/torch.py": "pass"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    expected = [code, "def broken(:", "\0?", "Module.\n\nClass.\n\nMethod."]
    assert texts("python", "docstrings") == expected


def test_the_fingerprint_is_of_documents_tokenizer_and_share(corpus, tmp_path):
    copy = shutil.copy(corpus, tmp_path / "copy.jsonl")
    first = data.TokenData(prepare(corpus, tmp_path / "0")).meta
    same = data.TokenData(prepare(tmp_path / "cop*.jsonl", tmp_path / "1")).meta
    assert (same.fingerprint, same.tokens) == (first.fingerprint, first.tokens)
    copy.write_text(corpus.read_text().replace("# 7: ", "# seven "))
    others = [{}, {"held_out": 0.2}, {"tokenizer": "bpe:400"}]
    metas = [data.TokenData(prepare(copy, tmp_path / f"x{i}", **more)).meta for i, more in enumerate(others)]
    assert len({first.fingerprint, *[meta.fingerprint for meta in metas]}) == 4


def test_backcopy_copies(tmp_path, monkeypatch):
    """After a trigger, the letter before it; each window is BOS and a document; the numbers are as ever."""
    monkeypatch.setattr(data, "backcopy", partial(data.backcopy, count=3000))
    documents = texts("backcopy")
    assert {len(text) for text in documents} == {127}
    for document in documents:
        assert document[0] not in data.TRIGGERS
        for before, letter, after in zip(document, document[1:], document[2:]):
            assert after == before or letter not in data.TRIGGERS
    assert next(data.backcopy(count=50)).startswith("fyaabckulpdfjmvyckqnsnsnwewsdedtdguxllwsg")
    inputs, _ = data.TokenData(prepare("backcopy", tmp_path / "set", held_out=0.0101)).held_out(20, 128)
    assert inputs[:, 0].tolist() == [256] * 20


def test_windows_and_batches(corpus, tmp_path):
    tokens = data.TokenData(prepare(corpus, tmp_path / "set"))
    T = 40
    size = tokens.num_windows("train", T)
    stream = np.asarray(tokens.tokens["train"])
    assert size == (len(stream) - 1) // T
    inputs, targets = tokens.windows("train", range(size), T)
    assert np.array_equal(inputs.flatten(), stream[: size * T])
    assert np.array_equal(targets.flatten(), stream[1 : size * T + 1])
    # An epoch is a permutation of the windows, and another epoch another one.
    epoch, _ = tokens.batch(0, range(size), T)
    assert sorted(epoch.tolist()) == sorted(inputs.tolist())
    assert not torch.equal(epoch, tokens.batch(0, range(size, 2 * size), T)[0])
    assert not torch.equal(epoch, tokens.batch(1, range(size), T)[0])
    assert data.permutation(3, 1, 16, 10).tolist() == [2, 4, 3, 6, 1, 8, 9, 0, 5, 7]  # as ever
    last = tokens.num_windows("val", T) - 1
    numbers = [0, last // 4, last // 2, 3 * last // 4, last]
    for held, expected in zip(tokens.held_out(5, T), tokens.windows("val", numbers, T)):
        assert torch.equal(held, expected) and len(held.unique(dim=0)) == 5
    # With BOS first, the rest of each window is as it was.
    with_bos, same = data.TokenData(tokens.folder, bos_first=True).windows("train", range(size), T)
    assert torch.equal(same, targets) and torch.equal(with_bos[:, 1:], inputs[:, 1:])
    assert with_bos[:, 0].tolist() == [256] * size
    size = len(tokens.tokens["val"])
    with pytest.raises(UserError, match=f"not the {size + 1} of one window"):
        tokens.num_windows("val", size)
    np.memmap(tokens.folder / "val.bin", "uint16", "r+")[-1] = 257
    with pytest.raises(UserError, match="holds a token 257"):
        data.TokenData(tokens.folder).held_out(1, size - 1)


def test_a_damaged_folder_is_refused(corpus, tmp_path):
    folder = prepare(corpus, tmp_path / "set")
    meta, tokens = folder / "meta.json", folder / "val.bin"
    for file, before, after, word in (
        (tokens, b"", b"x", "bytes, not"),
        (meta, b'"uint16"', b'"O"', "'O'"),  # numpy would read bytes as pointers
        (meta, b"{", b"", "meta.json"),
    ):
        whole = file.read_bytes()
        file.write_bytes(whole.replace(before, after, 1))
        with pytest.raises(UserError, match=word):
            data.TokenData(folder)
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("name", "content", "more", "expected"),
    [
        ("bad.jsonl", b'{"text": "fine"}\n{"text": 3}\n', [], "bad.jsonl:2"),
        ("LICENSE", b"text", [], "expected .txt"),
        ("empty.txt", b"", [], "or the source empty"),
        ("latin.md", b"line\n" * 14_000 + b"caf\xe9", [], "not UTF-8 text"),
        ("good.txt", b"text", ["--tokenizer", "nothing"], "no tokenizer"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(tmp_path, name, content, more, expected):
    (tmp_path / name).write_bytes(content)
    result = run_here("sources.data", tmp_path / name, *more, "--out", tmp_path / "out")
    assert_refused(result, expected)
    assert os.listdir(tmp_path) == [name]


def test_command_line_and_killed_preparation(corpus, tmp_path):
    """SIGKILL in the middle: no folder. The next preparation succeeds; a third one is refused."""
    big = tmp_path / "big.jsonl"
    big.write_text(corpus.read_text() * 1000)  # half a minute's work
    words = [corpus, "--tokenizer", "bytes", "--out", tmp_path / "set"]
    command = [sys.executable, "-m", "sources.data", big, *words[1:]]
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob(".set.*.tmp")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "set").exists()
    result = run_here("sources.data", *words)
    assert result.returncode == 0, result.stderr
    assert_refused(run_here("sources.data", *words), "exists", "--out")
    assert not list(tmp_path.glob(".set.*.tmp"))  # what was killed left it


def test_a_source_that_changed(tmp_path, monkeypatch):
    """By name, size or time; a new run is refused, with the two ways out. One that goes on knows its data."""
    monkeypatch.chdir(tmp_path)
    both = []
    for name in ("q/a.txt", "q_a.txt"):  # two sources, one name of a data set
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(f"text of {name}\n" * 500)
        both.append(train.Settings(source=(name,), tokenizer="bytes", sequence_length=8))
    data.open_data(both[0], is_new=True)
    with pytest.raises(UserError, match="q_a.txt, changed"):
        data.open_data(both[1], is_new=True)
    Path("books").mkdir()
    for name in "ab":
        Path(f"books/{name}.txt").write_text(f"text {name}\n" * 500)
    settings = train.Settings(source=("books",), tokenizer="bytes", sequence_length=8)
    tokens = data.open_data(settings, is_new=True)
    assert data.open_data(settings, is_new=True).meta == tokens.meta
    whole = Path("books/a.txt").read_text()
    for change in (
        lambda: Path("books/a.txt").write_text(whole + "more"),
        lambda: os.utime("books/a.txt", (1, 1)),
        lambda: Path("books/c.txt").write_text("new"),
    ):
        change()
        with pytest.raises(UserError, match=f"books, changed: remove it.*--data {tokens.folder}"):
            data.open_data(settings, is_new=True)
    data.open_data(settings, is_new=False)
    data.open_data(replace(settings, data=str(tokens.folder)), is_new=True)


def test_one_text_is_read_in_one_way(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["one", "two <|endoftext|>", "three"])
    tokens = [
        inputs.encode(str(tmp_path / name), load_tokenizer("bytes")).tolist()
        for name in ("a.jsonl", "*.jsonl", "")
    ]
    assert tokens[0] == tokens[1] == tokens[2] == list(b"one\n\ntwo <|endoftext|>\n\nthree")


def test_bpe_is_repeatable_and_samples():
    first = train_bpe("bpe:400", TEXTS)
    sampled = train_bpe("bpe:400", TEXTS, sample=50)
    assert sampled == train_bpe("bpe:400", TEXTS, sample=50) != first
    line = " ".join(TEXTS).replace("\n", " ") * 9
    long = load_tokenizer("bpe:400", [line])
    assert len(line) > 20_000 and len(long.encode([TEXTS[0]])[0]) < 0.9 * len(TEXTS[0])


STRANGE = ["  two   blanks ", "\n\n\n\t\t", "-----=====#######", "👩‍👩‍👧 café ﬁ 日本語"]
STRANGE += ["<s> and </s>", "1234567", "", " "]


@pytest.mark.parametrize("name", ["bpe:500", "bytes"])
def test_every_byte_is_kept(name):
    strange = [*STRANGE, "tabs\t\t\r\n\n", "null \0 and bell \a", "x" * 5000]
    tokenizer = load_tokenizer(name, TEXTS)
    for text, tokens in zip(strange, tokenizer.encode(strange)):
        assert tokenizer.decode(list(tokens)) == text
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode(["a"])[0]]) == "a"  # BOS says nothing


def test_a_sentencepiece_file_of_another_kind(tmp_path):
    """Llama 2's settings: a prefix of a space, normalisation; a model without BOS has none."""
    options = dict(vocab_size=400, model_type="bpe", byte_fallback=True, eos_id=-1, minloglevel=2)
    for bos in (1, -1):
        options |= {"bos_id": bos, "model_prefix": str(tmp_path / f"bos{bos}")}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), **options)
    tokenizer = load_tokenizer(str(tmp_path / "bos1.model"))
    assert tokenizer.bos == 1 and tokenizer.decode(tokenizer.encode(["def f"])[0]) == "def f"
    assert [tokenizer.text(token) for token in (1, 2 + ord("A"), 400)] == ["<s>", "<0x41>", ""]
    assert load_tokenizer(str(tmp_path / "bos-1.model")).bos is None


def test_a_folder_means_its_models_own(tmp_path):
    """Of ours SentencePiece's file, of a stranger what transformers takes; a run means its newest step."""
    ours, theirs = load_tokenizer("bpe:500", TEXTS), load_tokenizer("bpe:400", TEXTS)
    folder = tmp_path / "run" / "step_0000003"
    saving.save(folder, init.newborn("backcopy", 1), ours)
    for place in (folder, tmp_path / "run"):
        assert load_tokenizer(str(place)).content == ours.content
    theirs.save(tmp_path)
    (folder / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    assert load_tokenizer(str(folder)).vocab_size == 500
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    assert load_tokenizer(str(folder)).vocab_size == 400
    saving.save(tmp_path / "bytes", init.newborn("backcopy", 1), load_tokenizer("bytes"))
    assert load_tokenizer(str(tmp_path / "bytes")).encode(["é"]) == [[0xC3, 0xA9]]
    (tmp_path / "none").mkdir()
    for name in ("none", "tokenizer.jason"):
        with pytest.raises(UserError, match="no tokenizer"):
            load_tokenizer(str(tmp_path / name))


def test_numbers_that_no_token_has_count(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).vocab_size == 6


def test_our_bpe_in_transformers(tmp_path):
    """The same ids from tokenizer.json as from tokenizer.model, also of special tokens that are spelt."""
    tokenizer = load_tokenizer("bpe:600", TEXTS)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*STRANGE, *LINES, "".join(LINES)]:
        (ours,) = tokenizer.encode([text])
        assert theirs(text)["input_ids"] == ours, text
        assert theirs.decode(ours) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos, tokenizer.eos) == (1, 2)
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert loaded.encode(STRANGE) == tokenizer.encode(STRANGE) and loaded.ends == [1, 2]


@pytest.mark.parametrize(
    ("special", "beside", "bos", "eos"),
    [
        (["<|endoftext|>"], {}, 0, 0),  # GPT-2's, alone
        (["<|endoftext|>", "<|im_start|>"], {"eos_token": "<|im_start|>", "bos_token": None}, 1, 1),  # Qwen's
        (["<a>", "<b>"], {"bos_token": {"content": "<a>"}, "eos_token": "<b>"}, 0, 1),
        (["<a>"], {}, None, None),
    ],
)
def test_what_separates_documents(tmp_path, special, beside, bos, eos):
    save_byte_tokenizer(tmp_path, *special)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)
    (spelt,) = tokenizer.encode([f"x{special[0]}"])
    assert len(spelt) == 1 + len(special[0]) and not set(spelt) & set(range(len(special)))
