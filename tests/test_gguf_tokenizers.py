"""Tokenizers of converted .gguf files beside `transformers` and `sentencepiece`, on small files made here."""

import io
import json
import unicodedata

import gguf
import pytest
import sentencepiece
import tokenizers
import transformers
from conftest import ROOT
from tokenizers import models, pre_tokenizers, trainers

from hf import gguf_tokenizers
from sources import data

TEXT = (ROOT / "README.md").read_text()
PROSE = (
    "I'm, they'LL; 1234 + 56.7\n\n\n  if x:\r\n\treturn\u00a0§  中文字符，编码 \U0001f600 naïve "
    + TEXT[:3000]
)
REFERENCES = {"gpt-2": transformers.GPT2Tokenizer, "qwen2": transformers.Qwen2Tokenizer}
REFERENCES["default"] = transformers.GPT2Tokenizer


@pytest.fixture(autouse=True)
def converted(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_tokenizers, "CONVERTED", tmp_path / "converted")


def trained_bpe(text: str, vocab_size: int) -> tokenizers.Tokenizer:
    coder = tokenizers.Tokenizer(models.BPE())
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|end|>", "<|begin|>"], **options)
    coder.train_from_iterator(text.splitlines(True), trainer)
    return coder


def fields_of(coder: tokenizers.Tokenizer, pre: str) -> dict:
    """What a .gguf file says of a BPE whose first two tokens are special."""
    trained = json.loads(coder.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].get)
    merges = [" ".join(pair) for pair in trained["merges"]]
    types = [3, 3] + [1] * (len(tokens) - 2)
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}


def add_tokenizer(writer: gguf.GGUFWriter, **fields) -> None:
    for key, value in fields.items():
        add = writer.add_array if isinstance(value, list) else writer.add_string
        add(f"tokenizer.ggml.{key}", value)
    writer.add_bos_token_id(1)


def write(path, architecture="llama", **fields):
    """A .gguf file with nothing but a tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    add_tokenizer(writer, **fields)
    writer.add_head_count(1)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_converted(path):
    return data.load_tokenizer(str(gguf_tokenizers.tokenizer_folder(path) / "tokenizer.json"))


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "qwen2", "llama-bpe"])
def test_byte_level(pre, tmp_path):
    """GPT-2's and Qwen2's are classes of `transformers`, Llama 3's it reads from the file.

    SmolLM's is what its tokenizer.json says: digits one by one, then GPT-2's rule.
    """
    coder = trained_bpe(TEXT, 600)
    fields = fields_of(coder, pre)
    path = tmp_path / "a.gguf"
    if pre in REFERENCES:
        trained = json.loads(coder.to_str())["model"]
        reference = REFERENCES[pre](trained["vocab"], [tuple(pair) for pair in trained["merges"]])
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(True)
        coder.pre_tokenizer = pre_tokenizers.Sequence([digits, coder.pre_tokenizer])
        reference = transformers.PreTrainedTokenizerFast(tokenizer_object=coder)
    else:
        fields["token_type"][2] = 4  # "!", which is then never merged
        write(path, **fields)
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    write(path, **fields)
    tokenizer = load_converted(path)
    assert tokenizer.encode([PROSE]) == [reference(PROSE, add_special_tokens=False)["input_ids"]]
    spelt = tokenizer.encode(["a<|begin|>"])[0]  # a control token in a text is text
    assert 1 not in spelt and tokenizer.decode(spelt) == "a<|begin|>" and tokenizer.bos == 1
    decomposed = unicodedata.normalize("NFD", PROSE)
    is_one = tokenizer.encode([decomposed]) == tokenizer.encode([PROSE])
    assert is_one == (pre == "qwen2")  # its tokenizer.json says NFC


def test_sentencepiece(tmp_path):
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=trained,
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=["\u2581\u2581", "\n"],
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    numbers = range(theirs.vocab_size())
    tokens = [theirs.id_to_piece(number) for number in numbers]
    types = [1] * len(tokens)
    for number in numbers:
        kinds = (theirs.is_unknown(number), theirs.is_control(number), theirs.is_byte(number))
        types[number] = {(1, 0, 0): 2, (0, 1, 0): 3, (0, 0, 1): 6}.get(tuple(map(int, kinds)), 1)
    for symbol in ("\u2581\u2581", "\n"):
        number = tokens.index(symbol)
        types[number] = 4
        tokens[number] = symbol.replace("\u2581", " ")  # as llama.cpp's converter writes them
    scores = [theirs.get_score(number) for number in numbers]
    path = tmp_path / "a.gguf"
    write(path, "gemma3", model="llama", tokens=tokens, scores=scores, token_type=types)
    tokenizer = load_converted(path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    text = unicodedata.normalize("NFD", PROSE) + PROSE
    assert tokenizer.encode([text]) == [theirs.encode(text)]
    assert tokenizer.encode([text]) == [reference(text, add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text and tokenizer.bos == 1


def test_an_unknown_rule_gives_no_tokenizer(tmp_path):
    path = write(tmp_path / "a.gguf", model="gpt2", pre="new", tokens=["a"], token_type=[1], merges=[])
    assert not gguf_tokenizers.tokenizer_folder(path).exists()
