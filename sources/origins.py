"""The model that a run starts or resumes with; settings are those of train.py."""

from dataclasses import replace

from init import newborn
from lib.settings import UserError
from model import PRESETS
from sources import checkpoint
from sources.inputs import check_tokenizer

SIZES = ("num_layers", "num_heads", "d_model", "d_ff")  # of a preset; settings may change them


def chosen(settings, run):
    """What a run starts with: a newborn's ModelConfig or --init-from's Spec; None if it resumes.

    UserError for an existing run without --resume, or settings that do not fit.
    """
    if run.has_begun():
        if not settings.resume:
            raise UserError(f"{run.folder} holds a run: continue it with --resume, or choose another --out")
        return None
    if not settings.init_from:
        origin = config = model_config(settings)
    else:
        origin = checkpoint.parse_spec(settings.init_from)
        config = origin.own_config
        for name in ("attn_calibration", "explicit_sink"):
            wish, has = getattr(settings, name), getattr(config, name)
            if wish not in ("none", False, has):
                raise UserError(f"--{name.replace('_', '-')} {wish}: {origin.label} has {has}")
    checkpoint.check_lengths((settings.sequence_length,), config.context_length)
    return origin


def model_config(settings):
    """The preset with the sizes of the settings; UserError if they are inconsistent."""
    changes = {name: getattr(settings, name) for name in SIZES if getattr(settings, name) is not None}
    if "num_heads" in changes:
        changes |= {"num_kv_heads": None, "head_dim": None}  # these follow from the number of heads
    changes |= {"attn_calibration": settings.attn_calibration, "explicit_sink": settings.explicit_sink}
    try:
        return replace(PRESETS[settings.model], **changes)
    except ValueError as error:
        raise UserError(f"inconsistent sizes: {error}") from None


def load_model(settings, run, origin, tokens):
    """The model in float32, and its step; UserError if it does not fit the data."""
    if origin is None:
        model, state = run.newest()
        if state.data != tokens.meta.fingerprint:
            raise UserError(f"{tokens.folder} is not the data set that {run.folder} was started with")
        return model, state.step
    if settings.init_from:
        check_tokenizer(origin, tokens)
        model = origin.load_own()
    else:
        config = replace(origin, vocab_size=tokens.vocab_size)
        model = newborn(config, settings.seed, settings.embedding_seed, settings.init)
    if tokens.vocab_size > model.config.vocab_size:
        sizes = f"{tokens.vocab_size} tokens, the model {model.config.vocab_size}"
        raise UserError(f"{tokens.folder} has {sizes}: use another --tokenizer")
    return model, 0
