"""How does a .gguf file's tokenizer cut a text? A file names its rules and leaves them out; here they are."""

import numpy as np
from sentencepiece import sentencepiece_model_pb2
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
    """The bytes of a SentencePiece .model file (`llama`: pieces with scores)."""
    header = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    tokens = header["tokens"]
    types = [int(kind) for kind in header["token_type"]]
    types[header.get("unknown_token_id", 0)] = UNKNOWN
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, header["scores"], types, strict=True):
        if kind == USER_DEFINED:
            token = token.replace(" ", "\u2581")  # SentencePiece's blank
        model.pieces.add(piece=token, score=score, type=kind)
    trainer = model.trainer_spec
    trainer.model_type = trainer.BPE
    trainer.byte_fallback = BYTE in types  # are there bytes for characters that no piece has?
    for name, field in (("unknown", "unk_piece"), ("bos", "bos_piece"), ("eos", "eos_piece")):
        if f"{name}_token_id" in header:
            setattr(trainer, field, tokens[header[f"{name}_token_id"]])
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = bool(header.get("add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()
