"""What becomes of a newborn? The training loop (BB B.4), on one CPU or many GPUs, that loses nothing.

    python train.py configs/laptop.py                          # learns something visible in ten minutes
    python train.py configs/laptop.py --resume                 # goes on where it was stopped, or killed
    torchrun --nproc-per-node 8 train.py configs/nano_llama.py --attn-calibration attenuate
    python train.py configs/laptop.py --init-from runs/laptop --source docstrings --out runs/continued

A run folder holds `settings.json`, `metrics.jsonl` (a line for each step), `loss.png`, and a checkpoint for
birth, for the steps that --keep names, and for the newest two saved. Batches are a function of (data seed,
step), the same for any number of ranks and micro-batches, and resuming needs no random state: on a CPU a run
that was killed ends with the same bits as one that was not. SIGTERM and SIGINT finish the step, save, exit 0.
"""

import contextlib
import io
import json
import math
import shutil
import signal
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import common
import data
from common import UserError, setting
from figures import curves
from init import SCHEMES, keyed_generator, newborn
from model import CHOICES, PRESETS, Transformer, forward_flops


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
    sequence_length: int = setting(256, "tokens in a sequence")
    global_batch_size: int = setting(32, "sequences in a step, over all ranks")
    micro_batch_size: int = setting(32, "sequences in a forward pass")
    max_iters: int = setting(600, "steps; the learning rate ends there at a tenth of its peak")
    warmup_iters: int = setting(100, "steps of linear warm-up")
    learning_rate: float = setting(1e-3, "peak of the learning rate")
    weight_decay: float = setting(0.1, "of matrices; gains and biases have none")
    grad_clip: float = setting(1.0, "largest norm of the gradient")
    log_every: int = setting(10, "steps between printed lines")
    eval_every: int = setting(100, "steps between evaluations")
    eval_sequences: int = setting(64, "held-out sequences of an evaluation, always the same")
    save_every: int = setting(100, "steps between checkpoints to resume from")
    keep: str = setting("powers", "checkpoints to keep, with the last", ("powers", "all", "last"))
    compile: bool = setting(True, "compile the model, on CUDA")
    resume: bool = setting(False, "go on from the newest whole checkpoint in --out")
    out: str = setting("runs/default", "run folder")


# What may change when a run goes on; with max_iters the learning rate's schedule does.
FREE = (
    "device log_every eval_every eval_sequences save_every keep compile resume out micro_batch_size max_iters"
)


def learning_rate(step: int, s: Settings) -> float:
    """Of the step-th update, from 0: linear to the peak, then a cosine to a tenth of it (BB B.4)."""
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / s.warmup_iters
    done = (step - s.warmup_iters) / max(1, s.max_iters - s.warmup_iters)
    return s.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def open_data(s: Settings) -> data.TokenData:
    """The data set to train on; the default one is prepared, by rank 0, where it is missing."""
    wanted = data.Settings(source=s.source, tokenizer=s.tokenizer)
    folder = Path(s.data) if s.data else data.default_folder(wanted)
    if s.data is None and not folder.exists() and common.rank() == 0:
        print(f"preparing {folder}, once")
        data.prepare(wanted)
    common.barrier()
    tokens = data.TokenData(folder)
    for split in data.SPLITS:
        tokens.num_windows(split, s.sequence_length)  # a UserError if there is none
    return tokens


def build(s: Settings, tokens: data.TokenData) -> Transformer:
    """The model at birth, float32 on the CPU, after checking that it fits data and settings."""
    if s.init_from:
        model = checkpoint.load(s.init_from, scheme=s.init)
        if s.attn_calibration not in ("none", model.config.attn_calibration):
            raise UserError(f"--init-from {s.init_from} has the calibration {model.config.attn_calibration}")
    else:
        config = replace(PRESETS[s.model], attn_calibration=s.attn_calibration)
        model = newborn(config, s.seed, s.embedding_seed, s.init)
    if tokens.vocab_size > model.config.vocab_size:
        sizes = f"{tokens.vocab_size} tokens, the model {model.config.vocab_size}"
        raise UserError(f"{tokens.folder} has {sizes}: prepare it with another --tokenizer")
    if s.sequence_length > model.config.context_length:
        raise UserError(
            f"--sequence-length {s.sequence_length}: the context is {model.config.context_length}"
        )
    return model


def check(s: Settings) -> None:
    """UserError for numbers that make no sense, or a run folder that is already, or otherwise, in use."""
    numbers = (
        "sequence_length global_batch_size micro_batch_size max_iters log_every eval_every eval_sequences"
    )
    for name in f"{numbers} save_every learning_rate grad_clip".split():
        if not 0 < getattr(s, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(s, name)}: expected a number above 0")
    if s.global_batch_size < common.world_size():
        raise UserError(
            f"--global-batch-size {s.global_batch_size} is too small for {common.world_size()} ranks"
        )
    run, known = Path(s.out), Path(s.out) / "settings.json"
    if not s.resume and checkpoint.steps(run):
        raise UserError(f"{run} holds a run: go on with --resume, or choose another --out")
    if s.resume and known.exists():
        try:
            before, now = json.loads(known.read_text()), json.loads(json.dumps(asdict(s)))
            changed = [key for key in now if key not in FREE.split() and before.get(key) != now[key]]
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"cannot read {known}: {error}") from None
        if changed:
            was, flag = before.get(changed[0]), changed[0].replace("_", "-")
            raise UserError(
                f"{run} was begun with --{flag} {was}, not {now[changed[0]]}: use the same to resume"
            )


def restore(run: Path, model: Transformer, optimizer: torch.optim.Optimizer) -> int:
    """Fill both from the newest checkpoint that is whole; its step, 0 if there is none yet."""
    folders, error = checkpoint.steps(run)[::-1], None
    for folder in folders:
        try:
            state = checkpoint.load_state(folder)
            weights = checkpoint.load(str(folder)).state_dict()
            model.load_state_dict(weights)
            optimizer.load_state_dict(state["optimizer"])
            return state["step"]
        except (UserError, RuntimeError, ValueError, KeyError, TypeError) as problem:
            error = problem
            if common.rank() == 0:
                print(f"skipping {folder}: {problem}")
    if folders:
        raise UserError(f"no checkpoint in {run} can be resumed: {error}")
    return 0


def prune(run: Path, keep: str) -> None:
    """Remove the checkpoints not to be kept, and the optimiser's states, but for the newest two."""
    for folder in checkpoint.steps(run)[:-2]:
        step = int(folder.name.removeprefix("step_"))
        if keep == "all" or step == 0 or (keep == "powers" and step & (step - 1) == 0):
            (folder / "state.pt").unlink(missing_ok=True)
        else:
            shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.old.tmp")))


@torch.no_grad()
def evaluate(model: Transformer, tokens: data.TokenData, s: Settings, autocast) -> float:
    """Mean loss, in nats a token, over fixed held-out windows, shared among the ranks."""
    numbers, device = tokens.held_out(s.eval_sequences, s.sequence_length), model.model.norm.weight.device
    mine, total = common.shard(len(numbers)), torch.zeros((), dtype=torch.float64, device=device)
    for start in range(mine.start, mine.stop, s.micro_batch_size):
        part = numbers[start : min(start + s.micro_batch_size, mine.stop)]
        inputs, targets = (x.to(device) for x in tokens.windows("val", part, s.sequence_length))
        with autocast():
            total += F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten(), reduction="sum")
    return (common.sum_over_ranks(total) / (len(numbers) * s.sequence_length)).item()


@torch.no_grad()
def generate(model: Transformer, tokenizer: data.Tokenizer, length: int, step: int) -> str:
    """A sample of the model's text from BOS, at temperature 0.8; a function of the weights and `step`."""
    device, text = model.model.norm.weight.device, [tokenizer.bos]
    draws = keyed_generator("sample", step).random(length)
    for u in draws:
        window = torch.tensor([text[-model.config.context_length :]], device=device)
        logits = model.unembed(model.hidden(window, last_only=True))[0, : tokenizer.vocab_size]
        cumulative = (logits.double().cpu() / 0.8).softmax(0).cumsum(0)
        text.append(min(int(torch.searchsorted(cumulative, u)), tokenizer.vocab_size - 1))
    return tokenizer.decode(text[1:])


def plot(run: Path) -> None:
    """loss.png from metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [dict(step=r["step"], loss=r["loss"], split="training") for r in rows if "loss" in r]
    points = points[:: max(1, len(points) // 2000)]
    points += [dict(step=r["step"], loss=r["val_loss"], split="held out") for r in rows if "val_loss" in r]
    curves(points, run / "loss.png", "step", "loss", "split", {}, ("step", "loss, nats a token"), style="-")


def kept_lines(path: Path, step: int) -> str:
    """The lines of metrics.jsonl up to a step: what came after, or is torn, will come again."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            kept += [line + "\n"] if json.loads(line)["step"] <= step else []
    return "".join(kept)


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
    device, dtype = common.start(s)
    check(s)
    run, tokens, world, master = Path(s.out), open_data(s), common.world_size(), common.rank() == 0
    tokenizer, metrics = tokens.load_tokenizer(), run / "metrics.jsonl"
    raw = build(s, tokens).to(device).train()
    matrices, rest = ([p for p in raw.parameters() if (p.ndim > 1) is big] for big in (True, False))
    groups = [dict(params=matrices, weight_decay=s.weight_decay), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(0.9, 0.95), fused=True)
    step = restore(run, raw, optimizer) if s.resume else 0
    resumed, G, T = step > 0 or bool(checkpoint.steps(run)), s.global_batch_size, s.sequence_length
    model = torch.compile(raw) if s.compile and device.type == "cuda" else raw
    model = DistributedDataParallel(model) if world > 1 else model
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype is torch.bfloat16)
    peak = common.sum_over_ranks(torch.tensor(common.matmul_peak(device, dtype), device=device)).item()
    flops = 3 * (
        forward_flops(raw.config, T) / T + 2 * raw.config.d_model * raw.config.vocab_size
    )  # a token's
    if master:
        with common.atomic_path(run / "settings.json") as new:
            new.write_text(json.dumps(asdict(s), indent=1) + "\n")
        with common.atomic_path(metrics) as new:
            new.write_text(kept_lines(metrics, step) if resumed else "")
    row, seconds = None if resumed else {"step": 0}, []
    with listening() as signals, metrics.open("a", buffering=1) if master else io.StringIO() as log:
        while True:
            done = step >= s.max_iters or (row or {}).pop("stop", False)
            if row is not None:
                if step % s.eval_every == 0 or step == s.max_iters:
                    row["val_loss"] = evaluate(raw, tokens, s, autocast)
                    if master:
                        text = generate(raw, tokenizer, 48, step)
                        print(f"step {step}: held-out loss {row['val_loss']:.4f}, perplexity ", end="")
                        print(f"{math.exp(row['val_loss']):.1f}; a sample: {text!r}", flush=True)
                log.write(json.dumps(row) + "\n")
                if done or step % s.save_every == 0 or (s.keep == "powers" and step & (step - 1) == 0):
                    if master:
                        state = {"step": step, "optimizer": optimizer.state_dict()}
                        checkpoint.save(run / f"step_{step:07}", raw, state, tokens.tokenizer_file)
                        prune(run, s.keep)
                        plot(run)
                    common.barrier()
            if done:
                return run
            begun, mine, sums = time.perf_counter(), common.shard(G), torch.zeros(2, device=device)
            for start in range(mine.start, mine.stop, s.micro_batch_size):
                end = min(start + s.micro_batch_size, mine.stop)
                inputs, targets = tokens.batch(s.data_seed, range(step * G + start, step * G + end), T)
                with contextlib.nullcontext() if end == mine.stop or world == 1 else model.no_sync():
                    with autocast():
                        logits = model(inputs.to(device)).float().flatten(0, 1)
                        loss = F.cross_entropy(logits, targets.to(device).flatten(), reduction="sum") / (
                            G * T
                        )
                    (loss * world).backward()  # ranks' gradients are averaged
                sums[0] += loss.detach()
            sums[1] = len(signals)
            loss, stop = common.sum_over_ranks(sums).tolist()
            norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), s.grad_clip).item()
            if not math.isfinite(loss) or not math.isfinite(norm):
                kept = checkpoint.steps(run)[-1]
                raise UserError(
                    f"step {step}: loss {loss}, gradient {norm}; {kept} is kept: lower --learning-rate"
                )
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, s)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            seconds.append(time.perf_counter() - begun)
            rate = G * T / seconds[-1]
            row = dict(
                step=step, loss=loss, lr=learning_rate(step - 1, s), grad_norm=norm, tokens_per_second=rate
            )
            row |= dict(mfu=rate * flops / peak, stop=stop > 0)
            if master and step % s.log_every == 0:
                mean, left = (
                    np.mean(seconds),
                    timedelta(seconds=round((s.max_iters - step) * np.mean(seconds))),
                )
                print(f"step {step}/{s.max_iters}  loss {loss:.4f}  {G * T / mean:,.0f} tokens/s  ", end="")
                print(f"MFU {100 * G * T / mean * flops / peak:.1f} %  {left} left", flush=True)
                seconds = []


def main() -> None:
    """Parse the command line and train."""
    run = train(common.parse_settings(Settings, __doc__))
    if common.rank() == 0:
        print(f"{checkpoint.steps(run)[-1]}; --resume goes on from there")


if __name__ == "__main__":
    common.run(main)
