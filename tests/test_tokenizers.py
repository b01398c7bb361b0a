"""Every tokenizer gives back the text that it was given."""

import json

import pytest
import sentencepiece
import transformers
from conftest import LINES, TEXTS, save_byte_tokenizer
from tokenizers import Tokenizer, models

import init
from lib.settings import UserError
from sources import checkpoint
from sources.tokenizers import load_tokenizer, train_bpe


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
    checkpoint.save(folder, init.newborn("backcopy", 1), ours)
    for place in (folder, tmp_path / "run"):
        assert load_tokenizer(str(place)).content == ours.content
    theirs.save(tmp_path)
    (folder / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    assert load_tokenizer(str(folder)).vocab_size == 500
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    assert load_tokenizer(str(folder)).vocab_size == 400
    checkpoint.save(tmp_path / "bytes", init.newborn("backcopy", 1), load_tokenizer("bytes"))
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
