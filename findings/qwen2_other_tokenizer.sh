#!/usr/bin/env bash
# Question: a folder has a tokenizer.json, and a tokenizer_config.json whose tokenizer_class is
#   PreTrainedTokenizerFast. Does AutoTokenizer cut texts as that tokenizer.json does, whatever model_type
#   config.json names?
# Expected: yes. The class is the one that has no rules of its own, and for llama, qwen3, gpt2, mistral and
#   others the tokenizer.json is taken as it is.
# Seen: not for qwen2, nor for qwen3_5 and the types that share its tokenizer. There AutoTokenizer builds
#   Qwen2Tokenizer (or Qwen3_5Tokenizer) from the vocabulary and merges alone, with Qwen's own rule for cutting
#   words, in silence. Here a blank is dropped: "ab ab" has the tokens of "abab". So who trains a model of Qwen2's
#   shape with a tokenizer of another kind reads other tokens than he wrote.
# Versions: transformers 5.20.2, tokenizers 0.23.3. Seen 2026-11-28.
set -euo pipefail
T="$(mktemp -d)"
trap 'rm -rf "$T"' EXIT
python3 -m venv "$T/v"
"$T/v/bin/pip" install -q --no-compile --disable-pip-version-check transformers==5.20.2 tokenizers==0.23.3
cd "$T"
"$T/v/bin/python" - <<'PY'
import json
import os

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers

os.mkdir("model")
vocabulary = {"<unk>": 0, "a": 1, "b": 2, "\u2581": 3, "ab": 4, "\u2581ab": 5}
coder = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b"), ("\u2581", "ab")], unk_token="<unk>"))
coder.normalizer = normalizers.Replace(" ", "\u2581")
coder.decoder = decoders.Replace("\u2581", " ")
coder.save("model/tokenizer.json")
truth = coder.encode("ab ab").ids
print("tokenizer.json", truth)
with open("model/tokenizer_config.json", "w") as file:
    json.dump({"tokenizer_class": "PreTrainedTokenizerFast"}, file)

transformers.logging.set_verbosity_error()
seen = {}
for kind in ("llama", "gpt2", "mistral", "qwen3", "qwen2", "qwen3_5"):
    with open("model/config.json", "w") as file:
        json.dump({"model_type": kind, "vocab_size": 6}, file)
    loaded = transformers.AutoTokenizer.from_pretrained("model")
    tokens = loaded("ab ab", add_special_tokens=False).input_ids
    seen[kind] = tokens
    print(kind, type(loaded).__name__, tokens, repr(loaded.decode(tokens)))

assert truth == [4, 5]
assert all(seen[kind] == truth for kind in ("llama", "gpt2", "mistral", "qwen3"))
assert seen["qwen2"] == seen["qwen3_5"] == [4, 4]
print("as described")
PY
