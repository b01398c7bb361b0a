#!/usr/bin/env bash
# Question: a folder has a tokenizer.model by SentencePiece's trainer at its defaults (BPE with byte fallback)
#   and a config.json of model_type llama. Do SentencePiece, LlamaTokenizer and AutoTokenizer cut "hello
#   world" and "hello  world" (two spaces) alike?
# Expected from memory: yes; the model file says how to normalise (a space in front, runs of spaces as one),
#   and AutoTokenizer picks LlamaTokenizer for a llama.
# Seen: three readers, three answers. LlamaTokenizer keeps both spaces, whatever the file says. AutoTokenizer
#   builds a TokenizersBackend in place of a LlamaTokenizer and puts no space in front: "hello" is cut into
#   "h", "ello", for "▁hello" is the token. With a tokenizer_config.json that names LlamaTokenizer
#   AutoTokenizer agrees with it.
# Versions: transformers 5.20.2, sentencepiece 0.2.3, tokenizers 0.23.3, protobuf 7.36.2. Seen 2026-11-28.
set -euo pipefail
T="$(mktemp -d)"
trap 'rm -rf "$T"' EXIT
python3 -m venv "$T/v"
"$T/v/bin/pip" install -q --no-compile --disable-pip-version-check \
  numpy==2.4.6 transformers==5.20.2 sentencepiece==0.2.3 tokenizers==0.23.3 protobuf==7.36.2
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$T/v/bin/python" - "$T" <<'PY'
import json
import random
import sys
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer, LlamaTokenizer

folder = Path(sys.argv[1])
words = "hello world this is text one two three there the of first office".split()
dice = random.Random(0)
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(" ".join(dice.choices(words, k=12)) for _ in range(400)),
    model_prefix=str(folder / "tokenizer"),
    vocab_size=350,
    hard_vocab_limit=False,
    model_type="bpe",
    byte_fallback=True,
    unk_id=0,
    bos_id=1,
    eos_id=2,
    minloglevel=2,
)
(folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
by_class = LlamaTokenizer.from_pretrained(folder)
by_auto = AutoTokenizer.from_pretrained(folder)
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
by_auto_named = AutoTokenizer.from_pretrained(folder)


def cut(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids)


print("AutoTokenizer gives", type(by_auto).__name__)
print("and, with the class named,", type(by_auto_named).__name__)
for text in ("hello world", "hello  world"):
    print(repr(text))
    print("  SentencePiece ", reference.encode(text, out_type=str))
    print("  LlamaTokenizer", cut(by_class, text))
    print("  AutoTokenizer ", cut(by_auto, text))
    assert reference.encode(text, out_type=str) == ["▁hello", "▁world"]
    assert cut(by_auto_named, text) == cut(by_class, text)
assert cut(by_class, "hello world") == ["▁hello", "▁world"]
assert cut(by_class, "hello  world") == ["▁hello", "▁", "▁world"]
assert cut(by_auto, "hello world") == ["h", "ello", "▁world"]
assert type(by_auto) is not LlamaTokenizer
print("as described")
PY
