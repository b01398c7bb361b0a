"""What becomes of a newborn? The training loop (BB B.4), on one CPU or many GPUs, that loses nothing.

    python train.py configs/laptop.py                          # learns something visible in five minutes
    python train.py configs/laptop.py --resume                 # goes on where it was stopped, or killed
    torchrun --nproc-per-node 8 train.py configs/nano_llama.py --attn-calibration attenuate
    python train.py configs/laptop.py --init-from runs/laptop --source docstrings --out runs/continued \
        --tokenizer runs/laptop/step_0000150/tokenizer.model

A run folder holds settings.json, metrics.jsonl (a line for each step), loss.png, and checkpoints: birth, the
steps that --keep names, and the newest two. Batches are a function of (data seed, step), the same for any
number of ranks and micro-batches, so resuming needs no random state: on a CPU a run that was killed ends with
the same bits as one that was not. SIGTERM and SIGINT finish the step, save, exit 0 (torchrun allows 30 s).
"""

import contextlib
import json
import math
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import common
import data
from attention import track
from common import UserError, setting
from figures import curves
from init import SCHEMES, keyed_generator, newborn
from model import CHOICES, PRESETS, Transformer, training_flops
from tokenizer import Tokenizer


@dataclass
class Settings(common.RunSettings):
    """What `train.py` can be told."""

    model: str = setting("tiny_llama", "preset to train", PRESETS)
    seed: int = setting(42, "seed of the weights")
    embedding_seed: int | None = setting(None, "seed of embedding and head (default: the seed)")
    init: str = setting("gpt2", "how the weights are drawn", SCHEMES)
    init_from: str | None = setting(None, "start from this checkpoint folder or PRESET@SEED instead")
    attn_calibration: str = setting("none", "of the aggregated heads (BB 6.2)", CHOICES["attn_calibration"])
    data: str | None = setting(None, "prepared data set (default: of source and tokenizer, made if missing)")
    source: tuple[str, ...] = setting(("python",), "text of the default data set, as in data.py")
    tokenizer: str = setting("bpe:4096", "of the default data set, as in data.py")
    data_seed: int = setting(0, "seed of the order of the training sequences")
    sequence_length: int = setting(256, "tokens in a sequence", least=1)
    global_batch_size: int = setting(32, "sequences in a step, over all ranks", least=1)
    micro_batch_size: int = setting(32, "sequences in a forward pass", least=1)
    max_iters: int = setting(600, "steps; the learning rate ends there at a tenth of its peak", least=1)
    warmup_iters: int = setting(100, "steps of linear warm-up", least=0)
    learning_rate: float = setting(1e-3, "peak of the learning rate", least=1e-12)
    weight_decay: float = setting(0.1, "of matrices; gains and biases have none", least=0)
    grad_clip: float = setting(1.0, "largest norm of the gradient", least=1e-12)
    log_every: int = setting(10, "steps between printed lines", least=1)
    eval_every: int = setting(100, "steps between evaluations", least=1)
    eval_sequences: int = setting(64, "held-out sequences of an evaluation, always the same", least=1)
    track_sinks: bool = setting(False, "log alpha_1 and sink rate at evaluations, as sinks.py rate")
    save_every: int = setting(100, "steps between checkpoints to resume from", least=1)
    keep: str = setting("powers", "checkpoints to keep, with the last", ("powers", "all", "last"))
    compile: bool = setting(True, "compile the model, on CUDA")
    resume: bool = setting(False, "go on from the newest whole checkpoint in --out")
    out: str = setting("runs/default", "run folder")


# What may change when a run goes on; with max_iters the learning rate's schedule does.
FREE = set("device log_every eval_every eval_sequences track_sinks save_every compile resume out".split())
FREE |= {"max_iters", "micro_batch_size"}


def learning_rate(step: int, s: Settings) -> float:
    """Of the step-th update, from 0: linear to the peak, then a cosine to a tenth of it (BB B.4)."""
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / s.warmup_iters
    done = (step - s.warmup_iters) / max(1, s.max_iters - s.warmup_iters)
    return s.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def open_data(s: Settings, device: torch.device) -> data.TokenData:
    """The data set to train on; the default one is prepared, by rank 0, where it is missing."""
    wanted = data.Settings(source=s.source, tokenizer=s.tokenizer)
    folder = Path(s.data) if s.data else data.default_folder(wanted)
    if s.data is None and not folder.exists() and common.rank() == 0:
        print(f"preparing {folder}, once")
        data.prepare(wanted)
    common.sum_over_ranks(torch.zeros((), device=device))  # the others wait for it
    tokens = data.TokenData(folder)
    for split in data.SPLITS:
        tokens.num_windows(split, s.sequence_length)  # a UserError if there is none
    return tokens


def build(s: Settings, tokens: data.TokenData) -> tuple[Transformer, dict | None]:
    """The model, float32 on the CPU, at birth or with its last state; checked to fit data and settings."""
    model, state = restore(Path(s.out), tokens.fingerprint) if s.resume else (None, None)
    if model is None and s.init_from:
        model = checkpoint.load(s.init_from, scheme=s.init)
        checkpoint.check_tokenizer(s.init_from, tokens)
        if s.attn_calibration not in ("none", model.config.attn_calibration):
            raise UserError(f"--init-from {s.init_from} has the calibration {model.config.attn_calibration}")
    elif model is None:
        config = replace(PRESETS[s.model], attn_calibration=s.attn_calibration)
        model = newborn(config, s.seed, s.embedding_seed, s.init)
    if s.track_sinks and model.config.sublayers == "mlp":
        raise UserError(f"--track-sinks: {s.init_from} has no attention")
    V, context = model.config.vocab_size, model.config.context_length
    if tokens.vocab_size > V:
        raise UserError(f"{tokens.folder} has {tokens.vocab_size} tokens, the model {V}: change --tokenizer")
    if s.sequence_length > context:
        raise UserError(f"--sequence-length {s.sequence_length}: the model's context is {context}")
    return model, state


def check(s: Settings, free: set[str] = FREE) -> None:
    """UserError for a run folder that holds another run: one whose settings differ, but for the `free`."""
    if s.global_batch_size < common.world_size():
        raise UserError(f"--global-batch-size {s.global_batch_size}: less than one for each process")
    run, known = Path(s.out), Path(s.out) / "settings.json"
    if checkpoint.steps(run) and not s.resume:
        raise UserError(f"{run} holds a run: go on with --resume, or choose another --out")
    if s.resume and (known.exists() or checkpoint.steps(run)):
        try:
            before, now = json.loads(known.read_text()), json.loads(json.dumps(asdict(s)))
            changed = [key for key in now if key not in free and before.get(key) != now[key]]
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"cannot read {known}: {error}") from None
        if changed:
            was = f"--{changed[0].replace('_', '-')} {before.get(changed[0])}"
            raise UserError(f"{run} was begun with {was}: resume with the same")


def restore(run: Path, fingerprint: str) -> tuple[Transformer, dict] | tuple[None, None]:
    """Model and state of the newest checkpoint that is whole; None if there is none yet.

    UserError if all are damaged, or if `fingerprint` says that the data set is another one now.
    """
    folders, error = checkpoint.steps(run)[::-1], None
    for folder in folders:
        try:
            state = checkpoint.load_state(folder)
            if state["data"] != fingerprint:
                raise UserError("the data set is another one than it was begun with")
            return checkpoint.load(str(folder)), {name: state[name] for name in ("step", "optimizer")}
        except (UserError, OSError, RuntimeError, ValueError, KeyError, TypeError) as problem:
            reason = (str(problem) or type(problem).__name__).splitlines()[0]
            error = error or reason  # of the newest
            if common.rank() == 0:
                print(f"skipping {folder}: {reason}")
    if folders:
        raise UserError(f"no checkpoint in {run} can be resumed: {error}")
    return None, None


def prune(run: Path, keep: str) -> None:
    """Remove the checkpoints not to be kept, and the optimiser's states, but for the newest two."""
    for folder in checkpoint.steps(run)[:-2]:
        step = int(folder.name.removeprefix("step_"))
        if keep == "all" or step == 0 or (keep == "powers" and step & (step - 1) == 0):
            (folder / "state.pt").unlink(missing_ok=True)
        else:
            shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.old.tmp")))


def loss_sum(model: torch.nn.Module, inputs: Tensor, targets: Tensor, device: torch.device, dtype) -> Tensor:
    """Summed cross-entropy, in nats, of windows (n, T); the products in `dtype`, sums in float32."""
    with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
        logits = model(inputs.to(device)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum")


def accumulate(model, tokens: data.TokenData, s: Settings, step: int, device: torch.device, dtype) -> Tensor:
    """This rank's share of a step's mean loss; all ranks' gradient is added to the parameters'."""
    mine, total, G = common.shard(s.global_batch_size), torch.zeros((), device=device), s.global_batch_size
    for start in range(mine.start, mine.stop, s.micro_batch_size):
        end = min(start + s.micro_batch_size, mine.stop)
        window = tokens.batch(s.data_seed, range(step * G + start, step * G + end), s.sequence_length)
        wait = end < mine.stop and isinstance(model, DistributedDataParallel)
        with model.no_sync() if wait else contextlib.nullcontext():
            loss = loss_sum(model, *window, device, dtype) / (G * s.sequence_length)
            (loss * common.world_size()).backward()  # DistributedDataParallel takes the ranks' mean
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(model: Transformer, inputs: Tensor, targets: Tensor, size: int, device, dtype) -> float:
    """Mean loss, in nats a token, of windows (n, T), `size` of them at a time, shared among the ranks."""
    mine, total = common.shard(len(inputs)), torch.zeros((), dtype=torch.float64, device=device)
    for start in range(mine.start, mine.stop, size):
        part = slice(start, min(start + size, mine.stop))
        total += loss_sum(model, inputs[part], targets[part], device, dtype)
    return (common.sum_over_ranks(total) / inputs.numel()).item()


@torch.no_grad()
def generate(model: Transformer, tokenizer: Tokenizer, length: int, step: int) -> str:
    """A sample of the model's text from BOS, at temperature 0.8; a function of the weights and `step`."""
    text = [tokenizer.bos]
    for u in keyed_generator("sample", step).random(length):
        window = torch.tensor([text[-model.config.context_length :]], device=model.model.norm.weight.device)
        logits = model.unembed(model.hidden(window, last_only=True))[0, : tokenizer.vocab_size]
        cumulative = (logits.double().cpu() / 0.8).softmax(0).cumsum(0)
        text.append(min(int(torch.searchsorted(cumulative, u)), tokenizer.vocab_size - 1))
    return tokenizer.decode(text[1:])


def append(path: Path, row: dict) -> None:
    """One more line of JSON."""
    try:
        with path.open("a") as log:
            log.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def diverged(run: Path, step: int, what: str) -> UserError:
    """What to say of a loss that is no number; the step's own checkpoint, if saved, is renamed: it is bad."""
    bad = run / f"step_{step:07}"
    if bad.exists() and step and common.rank() == 0:
        shutil.rmtree(run / f"diverged_{step:07}", ignore_errors=True)  # of an earlier attempt
        os.replace(bad, run / f"diverged_{step:07}")
    good = [folder for folder in checkpoint.steps(run) if folder != bad or not step]
    hint = f"--init-from {good[-1]} --out ANOTHER and a lower --learning-rate" if good else "other weights"
    return UserError(f"step {step}: {what}; try {hint}")


def plot(run: Path) -> None:
    """loss.png from metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [dict(step=r["step"], loss=r["loss"], split="training") for r in rows if "loss" in r]
    points = points[:: max(1, len(points) // 2000)]
    points += [dict(step=r["step"], loss=r["val_loss"], split="held out") for r in rows if "val_loss" in r]
    curves(points, run / "loss.png", "step", "loss", "split", {}, ("step", "loss, nats a token"), style="-")


@contextlib.contextmanager
def listening():
    """A list that SIGTERM and SIGINT append to, instead of ending the process."""
    received = []
    before = {n: signal.signal(n, lambda n, _: received.append(n)) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(s: Settings) -> Path:
    """Train as the settings say, from birth or from where the run stands; returns the run folder."""
    s, device, dtype = common.start(s)
    check(s)
    with common.alone(Path(s.out)):
        return loop(s, device, dtype)


def loop(s: Settings, device: torch.device, dtype: torch.dtype) -> Path:
    """The steps of a run that is this process group's alone."""
    run, tokens, master, T = Path(s.out), open_data(s, device), common.rank() == 0, s.sequence_length
    (raw, state), tokenizer = build(s, tokens), tokens.load_tokenizer()
    raw = raw.to(device).train()
    matrices, rest = ([p for p in raw.parameters() if (p.ndim > 1) is big] for big in (True, False))
    groups = [dict(params=matrices, weight_decay=s.weight_decay), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    step = state["step"] if state else 0
    if state:
        optimizer.load_state_dict(state.pop("optimizer"))
    model = torch.compile(raw) if s.compile and device.type == "cuda" else raw
    model = DistributedDataParallel(model) if common.world_size() > 1 else model
    peak, token_flops = common.known_peak(device, dtype), training_flops(raw.config, T)
    metrics, texts = run / "metrics.jsonl", {run / "settings.json": json.dumps(asdict(s), indent=1) + "\n"}
    lines = metrics.read_text(errors="replace").splitlines(True) if state and metrics.exists() else []
    texts[metrics] = "".join(lines[: step + 1])  # one for each step: what came after, or is torn, comes again
    for path in texts if master else ():
        with common.atomic_path(path) as new:
            new.write_text(texts[path])
    row, seconds, stop = None if state else {"step": 0}, [], False
    with listening() as signals:
        while True:
            if row is not None and (step % s.eval_every == 0 or step == s.max_iters):
                windows = tokens.held_out(s.eval_sequences, T)  # the same ones each time
                row["val_loss"] = held_out = evaluate(raw, *windows, s.micro_batch_size, device, dtype)
                if not math.isfinite(held_out):
                    raise diverged(run, step, f"held-out loss {held_out}")
                row |= track(raw, tokens, s.eval_sequences, T) if s.track_sinks else {}
                if master:
                    print(f"step {step}: held-out loss {held_out:.4f}, perplexity", end=" ")
                    sample = generate(raw, tokenizer, 48, step)
                    print(f"{math.exp(min(held_out, 700)):.1f}, {sample!r}", flush=True)
            done, power = stop or step >= s.max_iters, s.keep == "powers" and step & (step - 1) == 0
            if row is not None and master:
                append(metrics, row)
                if done or power or step % s.save_every == 0:
                    state = {"step": step, "optimizer": optimizer.state_dict(), "data": tokens.fingerprint}
                    named = tokens.tokenizer_file or tokens.tokenizer
                    checkpoint.save(run / f"step_{step:07}", raw, state, named)
                    prune(run, s.keep)
                if "val_loss" in row and not done:
                    plot(run)
            if done and master:
                prune(run, s.keep)
                plot(run)
                print(f"{run} is at step {step}; --resume goes on, up to --max-iters")
            if done:
                common.sum_over_ranks(torch.zeros((), device=device))  # rank 0 has saved
                return run
            begun = time.perf_counter()
            share = accumulate(model, tokens, s, step, device, dtype)
            both = torch.stack([share, share.new_tensor(len(signals))])
            loss, stop = common.sum_over_ranks(both).tolist()
            norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), s.grad_clip).item()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise diverged(run, step, f"loss {loss}, gradient norm {norm}")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, s)
            optimizer.step()
            optimizer.zero_grad()
            row, step = dict(step=step + 1, loss=loss, lr=learning_rate(step, s), grad_norm=norm), step + 1
            seconds.append(time.perf_counter() - begun)
            row["tokens_per_second"] = rate = s.global_batch_size * T / seconds[-1]
            row["mfu"] = rate * token_flops / peak
            if master and step % s.log_every == 0:
                mean = sum(seconds) / len(seconds)
                rate, left = s.global_batch_size * T / mean, timedelta(0, round((s.max_iters - step) * mean))
                print(f"step {step}/{s.max_iters}  loss {loss:.4f}  {rate:,.0f} tokens/s", end="  ")
                print(f"MFU {100 * rate * token_flops / peak:.1f} %  {left} left", flush=True)
                seconds = []


def plan(words: list[str]) -> list:
    """The settings of a command line, and what to do."""
    s = common.parse_settings(Settings, __doc__, words)
    return [(s, partial(train, s))]


if __name__ == "__main__":
    common.run(plan)
