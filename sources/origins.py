"""The settings and the model that a run of train.py starts or resumes with."""

from dataclasses import replace

from init import newborn
from lib.settings import UserError, say
from model import PRESETS
from sources import checkpoint
from sources.inputs import check_tokenizer
from sources.runs import Run

SIZES = ("num_layers", "num_heads", "d_model", "d_ff")  # of a preset; settings may change them

# Settings that may change with --resume. A new max_iters also changes the schedule of the learning rate.
MAY_CHANGE = {"device", "log_every", "eval_every", "eval_sequences", "track_sinks", "save_every", "compile"}
MAY_CHANGE |= {"resume", "out", "max_iters", "micro_batch_size"}


def completed(settings, flags, in_files):
    """The settings that a command line means: to resume, those of settings.json, changed by flags."""
    of_birth = {"model", "seed", "embedding_seed", "init", *SIZES} if settings.init_from else set()
    for name in sorted(of_birth & flags):
        raise UserError(f"--{name.replace('_', '-')}: {settings.init_from} sets it; leave one out")
    run = Run(settings.out)
    if settings.resume and run.settings_file.exists():
        return run.settings(settings, flags | in_files, MAY_CHANGE)
    if settings.resume and not (in_files or flags - MAY_CHANGE):
        raise UserError(f"no run in {run.folder} to resume: check --out, or start one without --resume")
    if settings.resume:
        say(f"no run in {run.folder} to resume: starting it")
    if settings.warmup_iters >= settings.max_iters:
        if "warmup_iters" in flags | in_files:
            hint = f"expected fewer than the {settings.max_iters} of --max-iters"
            raise UserError(f"--warmup-iters {settings.warmup_iters}: {hint}")
        settings = replace(settings, warmup_iters=settings.max_iters // 6)
        say(f"--warmup-iters {settings.warmup_iters}, a sixth of --max-iters: the default is too long")
    return settings


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
