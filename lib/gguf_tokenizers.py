"""How does a .gguf file's tokenizer cut a text? A file names its rules and leaves them out; here they are."""

import struct

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens, SentencePiece's numbers
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)  # with GPT-2's own rule
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
RULES = {  # by tokenizer.ggml.pre, what cuts a text before pairs are merged
    "gpt-2": [GPT2],
    "default": [GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2],
    "qwen2": [pre_tokenizers.Split(Regex(rf"{ENGLISH}|\p{{N}}|{OTHERS}"), "isolated"), BYTES],
    "llama-bpe": [pre_tokenizers.Split(Regex(rf"{ENGLISH}|\p{{N}}{{1,3}}|{OTHERS}"), "isolated"), BYTES],
}


def is_known(values):
    """Can text be cut by the tokenizer that a .gguf file's header describes?"""
    kind = values.get("tokenizer.ggml.model")
    return kind == "llama" or (kind == "gpt2" and values.get("tokenizer.ggml.pre") in RULES)


def byte_level_tokenizer(values):
    """What tokenizer.json says of a byte-level BPE (`gpt2`), as bytes, and BOS and EOS, as text, or None."""
    tokens = values["tokenizer.ggml.tokens"]
    types = values["tokenizer.ggml.token_type"]
    rule = values["tokenizer.ggml.pre"]
    numbers = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    # Llama 3 takes a word that is a token whole, whatever the merges say.
    coder = Tokenizer(models.BPE(numbers, merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        coder.normalizer = normalizers.NFC()
    coder.pre_tokenizer = pre_tokenizers.Sequence(RULES[rule])
    coder.decoder = decoders.ByteLevel()
    coder.add_special_tokens([tokens[i] for i in np.flatnonzero(types == CONTROL)])
    whole = [tokens[i] for i in np.flatnonzero(types == USER_DEFINED)]
    coder.add_tokens([AddedToken(token, normalized=False) for token in whole])
    named = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")]
    return coder.to_str().encode(), *[None if number is None else tokens[number] for number in named]


def sentencepiece_model(values):
    """The bytes of a SentencePiece .model file (`llama`: pieces with scores), by its message formats."""
    header = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    tokens = header["tokens"]
    types = np.array(header["token_type"])
    types[header.get("unknown_token_id", 0)] = UNKNOWN
    pieces = []
    for token, score, kind in zip(tokens, header["scores"], types, strict=True):
        if kind == USER_DEFINED:
            token = token.replace(" ", "\u2581")  # SentencePiece's blank
        score = struct.pack("<Bf", 2 << 3 | 5, score)
        pieces.append(part(1, part(1, token.encode()) + score + number(3, kind)))
    trainer = number(3, 2)  # BPE
    trainer += number(35, BYTE in types)  # are there bytes for characters that no piece has?
    for field, name in ((45, "unknown"), (46, "bos"), (47, "eos")):
        if f"{name}_token_id" in header:
            trainer += part(field, tokens[header[f"{name}_token_id"]].encode())
    prefix = number(3, header.get("add_space_prefix", True))
    normalizer = part(1, b"identity") + prefix + number(4, 0)  # 4: are blanks left out?
    return b"".join(pieces) + part(2, trainer) + part(3, normalizer)


def number(field, value):
    """A number of a protocol buffer: its field, then seven bits a byte, the lowest first."""
    return varint(field << 3) + varint(int(value))


def part(field, content):
    """Bytes, a text or a message of a protocol buffer."""
    return varint(field << 3 | 2) + varint(len(content)) + content


def varint(value):
    """A number, seven bits a byte; a set eighth bit says that more follow."""
    low = []
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])
