"""Turn text into token numbers, and back.

A tokenizer is bpe:N (N tokens, trained here on a text), a SentencePiece .model file, a tokenizer.json, a
folder, .gguf file or `smollm2` (a model's own), tiktoken:gpt2, or bytes. A special token spelled out in a
text, such as <|endoftext|>, is ordinary text.
"""

import functools
import io
import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path

import sentencepiece
import tiktoken
import tokenizers
from tokenizers import decoders, models, normalizers

from lib.files import as_user_error, check_regular, read_json
from lib.settings import UserError

PROBE = " Tell  two\n\tkinds (12 + 3) apart: é ﬁ 日本 👩.\r\n\n"  # different tokenizers cut it differently
BLANK = "\u2581"  # SentencePiece's
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # EOS, if no file beside a tokenizer names it


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token numbers and back, with any library."""

    vocab_size: int
    bos: int | None  # begins a document: BOS, or EOS where there is no BOS
    eos: int | None  # ends a text
    encode: Callable  # list of texts -> list of lists of token numbers
    decode: Callable  # list of token numbers -> text
    file: str  # name of its file
    content: bytes  # of the file
    piece: Callable | None = None  # token number -> text, if decoding one token loses its blank
    for_transformers: Callable = lambda: None  # -> content of a tokenizer.json; None if it has none
    prefix: tuple = ()  # the tokens that its own rule puts in front of a text
    beside: dict[str, bytes] = field(default_factory=dict)  # files beside a tokenizer.json, kept whole

    def text(self, token):
        """The text of a token; "" if the tokenizer does not have it."""
        if token >= self.vocab_size:
            return ""
        return self.piece(token) if self.piece else self.decode([token])

    @property
    def ends(self):
        """The tokens that end a document."""
        return sorted({self.bos, self.eos} - {None})

    def does_as(self, other):
        """Does another tokenizer make the same of a text? By its file, or its tokens and a probing text."""
        if self.content == other.content:
            return True
        sizes = [(each.vocab_size, each.ends) for each in (self, other)]
        if sizes[0] != sizes[1]:
            return False
        some = range(0, self.vocab_size, max(1, self.vocab_size // 1000))
        is_vocabulary = all(self.text(token) == other.text(token) for token in some)
        return is_vocabulary and self.encode([PROBE]) == other.encode([PROBE])

    def save(self, folder, model_type="") -> None:
        """Write its file and, if it has them, the files that `transformers` needs."""
        (folder / self.file).write_bytes(self.content)
        content = self.for_transformers()
        if content is None:
            return
        (folder / "tokenizer.json").write_bytes(content)
        for name, kept in self.beside.items():
            (folder / name).write_bytes(kept)
        theirs = json.loads(self.beside.get("tokenizer_config.json", "{}"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | theirs
        if not theirs:
            config |= {"clean_up_tokenization_spaces": False, "split_special_tokens": True}  # spelled: text
            if self.file == "tokenizer.model":
                config["add_prefix_space"] = False  # else others put a blank in front of a text
            if self.bos is not None:
                config["bos_token"] = self.text(self.bos)
                config["eos_token"] = self.text(self.bos if self.eos is None else self.eos)
        if model_type == "qwen2" and config["tokenizer_class"] == "PreTrainedTokenizerFast":
            config["auto_map"] = {"AutoTokenizer": [None, None]}  # else transformers 5 ignores tokenizer.json
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def named_tokenizer(name, texts=()) -> Tokenizer:
    """The tokenizer of a name, `bpe:N` trained on `texts`; UserError for an unknown name."""
    if name == "bytes" or name.startswith("tiktoken:"):
        return fileless_tokenizer(name)
    if name.startswith("bpe:"):
        return sentencepiece_tokenizer(name, train_bpe(name, texts))
    if not isfile(name):
        expected = "bpe:N, a .model or tokenizer.json, a model that has one, tiktoken:gpt2 or bytes"
        raise UserError(f"no tokenizer '{name}': expected {expected}")
    return read_tokenizer(Path(name))


def read_tokenizer(path) -> Tokenizer:
    """The tokenizer of a file."""
    check_regular(path)
    content = path.read_bytes()
    if path.name == "tokenizer.txt":
        return fileless_tokenizer(content.decode(errors="replace"))
    config = path.with_name("tokenizer_config.json")
    rules = read_json(config) if config.exists() else {}
    if path.suffix == ".json":
        return json_tokenizer(path, content, rules)
    return sentencepiece_tokenizer(str(path), content, rules.get("add_bos_token", True))


def fileless_tokenizer(name):
    """The tokenizer of UTF-8 bytes, with BOS 256, or one of tiktoken, which downloads it once."""
    if name == "bytes":
        return Tokenizer(
            vocab_size=257,
            bos=256,
            eos=None,
            encode=lambda texts: [list(text.encode()) for text in texts],
            decode=lambda tokens: bytes(token for token in tokens if token < 256).decode(errors="replace"),
            file="tokenizer.txt",
            content=b"bytes",
        )
    try:
        coder = tiktoken.get_encoding(name.removeprefix("tiktoken:"))
    except Exception as error:  # whatever the network library raises
        hint = "download it once elsewhere and set TIKTOKEN_CACHE_DIR to its cache folder"
        raise UserError(f"no {name} here: {hint}, or use bpe:N ({error!r})") from None
    return Tokenizer(
        vocab_size=coder.n_vocab,
        bos=coder.eot_token,
        eos=coder.eot_token,
        encode=coder.encode_ordinary_batch,
        decode=coder.decode,
        file="tokenizer.txt",
        content=name.encode(),
    )


def json_tokenizer(path, content, rules):
    """The tokenizer of a tokenizer.json's bytes; `rules` are those of the tokenizer_config.json beside it."""
    with as_user_error(path):
        coder = tokenizers.Tokenizer.from_buffer(content)
        coder.no_truncation()
        coder.no_padding()
        coder.encode_special_tokens = True  # as ordinary text
        encoding = coder.encode("a")
        vocab_size = 1 + max(coder.get_vocab().values())
        special = {token.content for token in coder.get_added_tokens_decoder().values() if token.special}
    # The rule of the file itself puts special tokens in front, or the one beside it BOS, as in transformers.
    num_front = (encoding.special_tokens_mask + [0]).index(0)
    prefix = tuple(encoding.ids[:num_front])
    bos = named_token(rules, "bos_token")
    eos = named_token(rules, "eos_token")
    if bos is None and prefix:
        bos = encoding.tokens[0]
    if eos is None:
        eos = next(filter(special.__contains__, ENDS), None)

    def encode(texts):
        try:
            return [encoding.ids for encoding in coder.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # its rules have no token for this text
            raise UserError(f"the tokenizer {path} cannot encode this text: {error}") from None

    eos = None if eos is None else coder.token_to_id(eos)
    bos = eos if bos is None else coder.token_to_id(bos)
    if not prefix and rules.get("add_bos_token") and bos is not None:
        prefix = (bos,)
    return Tokenizer(
        vocab_size=vocab_size,
        bos=bos,
        eos=eos,
        encode=encode,
        decode=functools.partial(coder.decode, skip_special_tokens=False),
        file="tokenizer.json",
        content=content,
        for_transformers=lambda: content,
        prefix=prefix,
        beside={name: (path.parent / name).read_bytes() for name in BESIDE if isfile(path.parent / name)},
    )


def named_token(rules, name):
    """The text of a token that a tokenizer_config.json names; None if it does not."""
    token = rules.get(name)
    return token["content"] if isinstance(token, dict) else token


def sentencepiece_tokenizer(name, model, adds_bos=False):
    """The tokenizer of a SentencePiece file's bytes."""
    with as_user_error(name):
        coder = sentencepiece.SentencePieceProcessor(model_proto=model)
    eos = None if coder.eos_id() == -1 else coder.eos_id()
    bos = eos if coder.bos_id() == -1 else coder.bos_id()
    return Tokenizer(
        vocab_size=coder.vocab_size(),
        bos=bos,
        eos=eos,
        encode=coder.encode,
        decode=coder.decode,
        file="tokenizer.model",
        content=model,
        piece=coder.id_to_piece,
        for_transformers=functools.cache(lambda: tokenizer_json(coder)),
        prefix=(bos,) if adds_bos and bos is not None else (),
    )


def tokenizer_json(coder):
    """The bytes of a tokenizer.json for a SentencePiece BPE like bpe:N; None if that cuts differently."""
    pieces = coder.id_to_piece(list(range(coder.vocab_size())))
    numbers = {piece: number for number, piece in enumerate(pieces)}
    merges = []  # the best pair first, which `tokenizers` merges first
    for number in sorted(numbers.values(), key=coder.get_score, reverse=True):
        piece = pieces[number]
        if coder.is_control(number) or coder.is_unknown(number) or coder.is_byte(number):
            continue
        for i in range(1, len(piece)):
            if piece[:i] in numbers and piece[i:] in numbers:
                merges.append((piece[:i], piece[i:]))
    model = models.BPE(numbers, merges, unk_token=pieces[coder.unk_id()], byte_fallback=True)
    fast = tokenizers.Tokenizer(model)
    fast.normalizer = normalizers.Replace(" ", BLANK)
    fast.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    is_same = fast.encode(PROBE).ids == coder.encode(PROBE)
    fast.add_special_tokens([piece for piece in pieces if coder.is_control(numbers[piece])])
    return fast.to_str().encode() if is_same else None


def train_bpe(name, texts, sample=400_000):
    """The bytes of a SentencePiece file: `bpe:N`, trained on a random `sample` of the lines of `texts`."""
    generator = random.Random(0)  # always the same sample; SentencePiece's own is not
    lines = []
    for i, line in enumerate(filter(str.strip, itertools.chain.from_iterable(map(str.splitlines, texts)))):
        if i < sample:
            lines.append(line)
        elif (place := generator.randrange(i + 1)) < sample:
            lines[place] = line
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=max(3, int(name.removeprefix("bpe:"))),  # below, it does not say what suffices
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=False,  # one token per space, as in GPT-2
            max_sentence_length=2**20,  # bytes; longer ones are left out
            num_threads=2,  # fixed: the file records it
            minloglevel=2,
        )
    except (RuntimeError, OSError, ValueError, OverflowError) as error:
        reason = str(error).split("] ")[-1] or "its N is too small, or the source empty"
        if "required_chars" in reason:
            reason = f"N is {re.search('vs ([0-9]+)', reason)[1]} at least, for the characters of this text"
        raise UserError(f"cannot train {name} (bpe:N, N tokens; or use bytes) here: {reason}") from None
    return model.getvalue()
