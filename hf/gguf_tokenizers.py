"""How does a .gguf file's tokenizer become a tokenizer.json?

It is written once, into models/converted, which git ignores, by the file's content.
"""

import contextlib
import io
import json
from os.path import exists

from tokenizers import decoders, normalizers, pre_tokenizers
from transformers.integrations.gguf import gguf_tokenizer_mapping as reading

from lib.files import ROOT, as_user_error, atomic_folder
from weights.files import open_gguf, sha256

CONVERTED = ROOT / "models" / "converted"
BLANK = "\u2581"  # SentencePiece's


def tokenizer_folder(path):
    """The folder of a .gguf file's tokenizer, written once; missing if how it cuts a text is not known."""
    folder = CONVERTED / sha256(path)
    values = open_gguf(path).values
    kind = values.get("tokenizer.ggml.model")
    rule = values.get("tokenizer.ggml.pre", "default")
    known = [*reading.GGUF_PRE_TOKENIZER_SPLITS, "default", "gpt-2", "smollm"]
    if exists(folder) or (kind != "llama" and (kind != "gpt2" or rule not in known)):
        return folder
    with as_user_error(path), contextlib.redirect_stderr(io.StringIO()), atomic_folder(folder) as new:
        architecture, parts, named = reading.get_gguf_tokenizer(str(path))
        coder, _ = reading.convert_gguf_tokenizer(architecture, parts)
        if rule == "smollm":  # which transformers does not know
            digits = pre_tokenizers.Digits(individual_digits=True)
            bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
            coder.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_as_letters])
        elif rule == "llama-bpe":
            coder.model.ignore_merges = True  # a word that is a token is taken whole
        elif rule == "qwen2":
            coder.normalizer = normalizers.NFC()
        if kind == "llama" and not values.get("tokenizer.ggml.add_space_prefix", True):  # no blank in front
            coder.normalizer, coder.pre_tokenizer = normalizers.Replace(" ", BLANK), None
            parts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
            coder.decoder = decoders.Sequence(parts)
        content = json.loads(coder.to_str())
        count = len(values["tokenizer.ggml.tokens"])
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
        (new / "tokenizer.json").write_text(json.dumps(content))
        adds_bos = values.get("tokenizer.ggml.add_bos_token", kind == "llama" or rule == "llama-bpe")
        config = {key: named[key] for key in ("bos_token", "eos_token")} | {"add_bos_token": bool(adds_bos)}
        (new / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
