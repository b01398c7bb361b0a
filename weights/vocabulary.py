"""Which tokens does a checkpoint's tokenizer have, by what lies beside its weights?"""

import functools
import sys
from os.path import exists

import sentencepiece

from lib.files import check_regular, read_json
from lib.settings import rank
from weights.files import folder_of, is_gguf, open_gguf

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # the surest first


def token_ids(place):
    """Each token's id by its string, as a checkpoint's tokenizer has them; {} for one that has none.

    It only helps, so of a file that tells no such thing a word is said on stderr.
    """
    try:
        vocabulary = vocabulary_of(place)
        if isinstance(vocabulary, list):  # of strings, or of strings and their scores
            strings = [token[0] if isinstance(token, list) else token for token in vocabulary]
            vocabulary = dict(zip(strings, range(len(strings))))
        if not all(type(number) is int and number >= 0 for number in vocabulary.values()):
            raise ValueError("its tokens have no whole numbers")
        # a blank is written in one way
        return {token.replace("\u0120", "\u2581"): number for token, number in vocabulary.items()}
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        note(f"{place}: its tokenizer's file tells no vocabulary ({said}): tokens are known by their numbers")
        return {}


@functools.cache
def note(text) -> None:
    """Say something on stderr, once."""
    if rank() == 0:
        print(text, file=sys.stderr)


def vocabulary_of(place):
    """A checkpoint's tokens: their ids by string, or a list in the order of ids; by the surest file."""
    if is_gguf(place):
        return open_gguf(place).values.get("tokenizer.ggml.tokens", [])
    path = next(filter(exists, (folder_of(place) / name for name in VOCABULARIES)), None)
    if path is None:
        return []
    check_regular(path)
    if path.suffix == ".txt":
        return path.read_text("utf-8").splitlines()
    if path.suffix == ".json":
        values = read_json(path)
        return values["model"]["vocab"] if path.name == "tokenizer.json" else values
    try:
        coder = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        return coder.id_to_piece(list(range(coder.vocab_size())))
    except (RuntimeError, UnicodeDecodeError):  # a file of another kind, as Llama 3's
        return []
