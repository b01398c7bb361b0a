"""Every tokenizer gives back the text that it was given."""

import argparse
from pathlib import Path

import pytest
import sentencepiece

from lib.tokenizers import load_tokenizer, train_bpe

LINES = Path(argparse.__file__).read_text("utf-8").splitlines(keepends=True)
TEXTS = [f"# {i}: café ☕\n" + "".join(LINES[4 * i : 4 * i + 4]) for i in range(400)]


def test_bpe_is_repeatable_and_samples():
    """A line longer than SentencePiece takes by itself counts."""
    first = train_bpe("bpe:400", TEXTS)
    sampled = train_bpe("bpe:400", TEXTS, sample=50)
    assert sampled == train_bpe("bpe:400", TEXTS, sample=50) != first
    line = " ".join(TEXTS).replace("\n", " ") * 9
    long = load_tokenizer("bpe:400", [line])
    assert len(line) > 20_000 and len(long.encode([TEXTS[0]])[0]) < 0.9 * len(TEXTS[0])


@pytest.mark.parametrize("name", ["bpe:500", "bytes"])
def test_every_byte_is_kept(name):
    strange = ["  two  spaces\t\ttabs\r\n\n", "null \0 and bell \a", "日本語 👩‍👩‍👧 ﬁ é", "", " ", "x" * 5000]
    tokenizer = load_tokenizer(name, TEXTS)
    for text, tokens in zip(strange, tokenizer.encode(strange)):
        assert tokenizer.decode(list(tokens)) == text


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
