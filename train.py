"""What becomes of a newborn? The training loop (BB B.4), on one CPU or many GPUs.

    python train.py configs/laptop.py                          # learns something visible in five minutes
    python train.py --resume --out runs/laptop                 # goes on where it was stopped, or killed
    torchrun --nproc-per-node 8 train.py configs/nano_llama.py --attn-calibration attenuate
    python train.py configs/laptop.py --init-from runs/laptop --source docstrings --out runs/continued
        --tokenizer runs/laptop/step_0000150/tokenizer.model   # on the same line

A run folder holds settings.json, metrics.jsonl (a line for each step), loss.png, and checkpoints: birth, the
steps that --keep names, and the newest two. Batches are a function of (data seed, step), the same for any
number of ranks and micro-batches, so resuming needs no random state: on a CPU a run that was killed ends with
the same bits as one that was not. On SIGTERM or SIGINT a run finishes its step, saves, and exits with 0;
under torchrun that must take less than 30 s.
"""

import math
import os
import shutil
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from init import SCHEMES, keyed_generator, newborn
from lib import checkpoint, data, runs, runtime
from lib.inputs import check_tokenizer
from lib.settings import Command, RunSettings, UserError, at_least, read_settings, run_script
from measure import attention
from model import CHOICES, PRESETS


@dataclass
class Settings(RunSettings):
    """What `train.py` can be told."""

    model: Literal[tuple(PRESETS)] = "tiny_llama"
    """preset to train; its vocabulary is the tokenizer's"""
    seed: int = 42
    """seed of the weights"""
    embedding_seed: int | None = None
    """seed of embedding and head; None: the seed"""
    init: Literal[SCHEMES] = "gpt2"
    """how the weights are drawn"""
    init_from: str | None = None
    """start from this checkpoint folder or PRESET@SEED, in place of --model"""
    attn_calibration: Literal[CHOICES["attn_calibration"]] = "none"
    """scaling of the aggregated heads (BB 6.2)"""
    data: str | None = None
    """prepared data set; None: that of source and tokenizer, made if missing"""
    source: tuple[str, ...] = ("python",)
    """text of the default data set, as in python -m lib.data"""
    tokenizer: str = "bpe:4096"
    """tokenizer of the default data set, as in python -m lib.data"""
    data_seed: int = 0
    """seed of the order of the training sequences"""
    sequence_length: at_least(2) = 256
    """tokens in a sequence"""
    global_batch_size: at_least(1) = 32
    """sequences in a step, over all ranks"""
    micro_batch_size: at_least(1) = 32
    """sequences in a forward pass"""
    max_iters: at_least(1) = 600
    """number of steps; at the last one the learning rate is a tenth of its peak"""
    warmup_iters: at_least(0) = 100
    """steps of linear warm-up"""
    learning_rate: at_least(1e-12, float) = 1e-3
    """peak of the learning rate"""
    weight_decay: at_least(0, float) = 0.1
    """weight decay of matrices; gains and biases have none"""
    grad_clip: at_least(1e-12, float) = 1.0
    """largest norm of the gradient"""
    log_every: at_least(1) = 10
    """steps between printed lines"""
    eval_every: at_least(1) = 100
    """steps between evaluations"""
    eval_sequences: at_least(1) = 64
    """held-out sequences of an evaluation, always the same"""
    track_sinks: bool = False
    """log alpha_1 and the sink rate at evaluations, as sinks.py rate"""
    save_every: at_least(1) = 100
    """steps between checkpoints to resume from"""
    keep: Literal["powers", "all", "last"] = "powers"
    """checkpoints to keep: of steps that are powers of two, all, or none; always birth and the newest two"""
    compile: bool = field(default_factory=torch.cuda.is_available)
    """compile the model; on a CPU that takes a C++ compiler"""
    resume: bool = False
    """go on from the newest whole checkpoint in --out, with that run's settings"""
    out: str = "runs/default"
    """run folder"""


# What may change with --resume; a new max_iters changes the learning rate's schedule, too.
MAY_CHANGE = {"device", "log_every", "eval_every", "eval_sequences", "track_sinks", "save_every", "compile"}
MAY_CHANGE |= {"resume", "out", "max_iters", "micro_batch_size"}


# ---- the loop ----------------------------------------------------------------------------------------------


def train(settings: Settings):
    """What becomes of a newborn? A line every --log-every steps tells the time left.

    Returns the run folder.
    """
    settings, device, dtype = runtime.start(settings)
    settings = runs.merged_settings(settings, MAY_CHANGE)
    compiler = os.environ.get("CXX", "g++")
    if settings.compile and device.type == "cpu" and shutil.which(compiler) is None:
        raise UserError(f"--compile: no compiler {compiler} is here; leave it out, or say --no-compile")
    if settings.global_batch_size < runtime.world_size():
        raise UserError(f"--global-batch-size {settings.global_batch_size}: less than one for each process")
    if not settings.resume:  # a mistake is told before any text is prepared
        config = PRESETS[settings.model]
        if settings.init_from:
            config = checkpoint.parse_spec(settings.init_from).config
        checkpoint.check_lengths((settings.sequence_length,), config.context_length)
    run = Path(settings.out)
    with runs.sole_owner(run):
        train_alone(settings, run, device, dtype)
    return run


def train_alone(settings: Settings, run, device, dtype) -> None:
    """Train in a run folder that is this process group's alone."""
    T = settings.sequence_length
    is_master = runtime.rank() == 0
    tokens = open_data(settings, device)
    tokenizer = tokens.load_tokenizer()
    raw_model, state, moments = load_model(settings, tokens)
    raw_model = raw_model.to(device).train()
    optimizer = make_optimizer(raw_model, settings)
    step = 0
    if state is not None:
        step = state.step
        if step > settings.max_iters:
            raise UserError(f"--max-iters {settings.max_iters}: {run} is at step {step} already")
        checkpoint.restore(optimizer, raw_model, state, moments)
    model = torch.compile(raw_model) if settings.compile else raw_model
    if runtime.world_size() > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # gradients are stored once
    peak = runtime.matmul_peak(device, dtype) / runtime.training_flops(raw_model, T)  # tokens a second
    evaluation_windows = tokens.held_out(settings.eval_sequences, T)
    if is_master:
        runs.begin_logs(settings, run, None if state is None else step)

    def evaluate_and_sample(step):
        """Held-out loss of the model as it is, and its sinks if they are tracked; prints a sample."""
        loss = evaluate(raw_model, *evaluation_windows, settings.micro_batch_size, device, dtype)
        if not math.isfinite(loss):
            raise runs.diverged(run, step, f"held-out loss {loss}")
        row = {"val_loss": loss}
        if settings.track_sinks:
            row |= attention.sink_statistics(raw_model, evaluation_windows[0].to(device))[0]
        if is_master:
            sample = generate(raw_model, tokenizer, 48, step)
            print(f"step {step}: held-out loss {loss:.4f}, {sample!r}", flush=True)
        return row

    def save(step) -> None:
        """Write the checkpoint of a step, and remove those that need not be kept."""
        state = checkpoint.TrainingState(step, tokens.meta.fingerprint)
        checkpoint.save(run / f"step_{step:07}", raw_model, optimizer, state, tokenizer)
        runs.prune(run, settings.keep, step)

    durations = []
    stopped = False
    with runtime.listening_for_signals() as signals:
        if state is None:  # the newborn
            row = {"step": 0} | evaluate_and_sample(step)
            if is_master:
                runs.append_row(run, row)
                save(step)
        while step < settings.max_iters and not stopped:
            begun = time.perf_counter()
            # learning rate of this step
            rate = learning_rate(step, settings)
            for group in optimizer.param_groups:
                group["lr"] = rate
            # micro-steps: gradients add up; ranks sum their losses and signals, so that all stop together
            part = accumulate(model, tokens, settings, step, device, dtype)
            sums = torch.stack([part, part.new_tensor(len(signals))])
            loss, num_signals = runtime.sum_over_ranks(sums).tolist()
            stopped = num_signals > 0
            # clip
            grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), settings.grad_clip).item()
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise runs.diverged(run, step, f"loss {loss}, gradient norm {grad_norm}")
            # step
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            seconds = time.perf_counter() - begun
            durations.append(seconds)
            is_last = stopped or step == settings.max_iters
            # evaluation
            speed = settings.global_batch_size * T / seconds
            row = {"step": step, "loss": loss, "lr": rate, "grad_norm": grad_norm}
            row |= {"tokens_per_second": speed, "mfu": speed / peak}
            if step % settings.eval_every == 0 or step == settings.max_iters:
                row |= evaluate_and_sample(step)
            # log
            if is_master:
                runs.append_row(run, row)
                if step % settings.log_every == 0:
                    print_progress(settings, row, fmean(durations), peak)
                    durations.clear()
                if "val_loss" in row or is_last:
                    runs.draw_loss(run)
            # checkpoint
            is_kept = settings.keep == "powers" and runs.is_power_of_two(step)
            if is_master and (is_last or is_kept or step % settings.save_every == 0):
                save(step)
    if is_master:
        runs.prune(run, settings.keep, step)
        print(f"{run} is at step {step}; --resume goes on, with a larger --max-iters if it is done")
    runtime.wait_for_all(device)


def learning_rate(step, settings: Settings):
    """Learning rate of update number `step`, from 0: a linear warm-up, then a cosine to a tenth (BB B.4)."""
    if step < settings.warmup_iters:
        return settings.learning_rate * (step + 1) / settings.warmup_iters
    done = (step - settings.warmup_iters) / max(1, settings.max_iters - settings.warmup_iters)
    return settings.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def make_optimizer(model, settings: Settings):
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def accumulate(model, tokens, settings: Settings, step, device, dtype):
    """This rank's part of a step's mean loss; the gradient over all ranks is added to `parameter.grad`."""
    T = settings.sequence_length
    batch_size = settings.global_batch_size
    parts = parts_of_share(batch_size, settings.micro_batch_size)
    total = torch.zeros((), device=device)
    for part in parts:
        sequences = [step * batch_size + i for i in part]  # beyond the data's end a new epoch begins
        inputs, targets = tokens.batch(settings.data_seed, sequences, T)  # (n, T) each
        # DistributedDataParallel averages gradients over ranks in the backward pass where this is true
        model.require_backward_grad_sync = part == parts[-1]
        loss = loss_sum(model, inputs, targets, device, dtype) / (batch_size * T)
        (loss * runtime.world_size()).backward()  # the average times the number of ranks is the sum
        total += loss.detach()
    return total


def parts_of_share(count, size):
    """This rank's share of range(count), in parts of `size`; the last one may be smaller."""
    share = runtime.share(count)
    return [share[start : start + size] for start in range(0, len(share), size)]


def loss_sum(model, inputs, targets, device, dtype):
    """Summed cross-entropy, in nats, of windows (n, T); the products in `dtype`, sums in float32."""
    with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
        return model(inputs.to(device), targets.to(device))


@torch.no_grad()
def evaluate(model, inputs, targets, batch_size, device, dtype):
    """Mean loss, in nats a token, of windows (n, T), some at a time, shared among the ranks."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts_of_share(len(inputs), batch_size):
        total += loss_sum(model, inputs[part], targets[part], device, dtype)
    return (runtime.sum_over_ranks(total) / inputs.numel()).item()


@torch.no_grad()
def generate(model, tokenizer, length, step):
    """A sample of the model's text from BOS, at temperature 0.8; a function of the weights and `step`.

    Where there is no BOS it is from the first token, whatever that is.
    """
    ids = [tokenizer.bos or 0]
    vocab_size = tokenizer.vocab_size
    device = model.model.norm.weight.device
    generator = keyed_generator("sample", step)
    for _ in range(length):
        window = torch.tensor([ids[-model.config.context_length :]], device=device)  # (1, T)
        logits = model.unembed(model.hidden(window, last_only=True))[0, :vocab_size]
        probabilities = (logits.double().cpu() / 0.8).softmax(0).numpy()
        ids.append(int(generator.choice(vocab_size, p=probabilities)))
    return tokenizer.decode(ids[1:])


# ---- data and model ----------------------------------------------------------------------------------------


def open_data(settings: Settings, device):
    """The data set to train on; the default one is prepared, by rank 0, where it is missing."""
    folder = Path(settings.data or data.default_folder(settings.source, settings.tokenizer))
    if settings.data is None and runtime.rank() == 0 and not folder.exists():
        print(f"preparing {folder}, once")
        data.prepare(data.Settings(source=settings.source, tokenizer=settings.tokenizer))
    runtime.wait_for_all(device)
    tokens = data.TokenData(folder)
    if settings.data is None:
        is_same = (settings.source, settings.tokenizer) == (tokens.meta.source, tokens.meta.tokenizer)
        if is_same and Path(settings.tokenizer).is_file():  # which may be another one by now
            content = data.load_tokenizer(settings.tokenizer).content
            is_same = content == tokens.tokenizer_file.read_bytes()
        if not is_same:
            made = f"{tokens.meta.source} by {tokens.meta.tokenizer}"
            raise UserError(f"{folder} was made of {made}: prepare another one, and name it by --data")
    tokens.num_windows("train", settings.sequence_length)  # a UserError if there is none
    return tokens


def load_model(settings: Settings, tokens):
    """The model, float32; if resumed, state and moments, too. UserError unless they fit the data."""
    state, moments = None, None
    if settings.resume and checkpoint.steps(settings.out):
        model, state, moments = runs.load_newest(Path(settings.out))
        if state.data != tokens.meta.fingerprint:
            raise UserError(f"{tokens.folder} is another data set than {settings.out} was begun with")
    elif settings.init_from:
        spec = checkpoint.parse_spec(settings.init_from, settings.init)
        check_tokenizer(spec, tokens)
        model = spec.load()
        if settings.attn_calibration not in ("none", model.config.attn_calibration):
            raise UserError(f"--init-from {spec.label} has the calibration {model.config.attn_calibration}")
    else:
        shape = {"attn_calibration": settings.attn_calibration, "vocab_size": tokens.vocab_size}
        config = replace(PRESETS[settings.model], **shape)
        model = newborn(config, settings.seed, settings.embedding_seed, settings.init)
    if tokens.vocab_size > model.config.vocab_size:
        sizes = f"{tokens.vocab_size} tokens, the model {model.config.vocab_size}"
        raise UserError(f"{tokens.folder} has {sizes}: change --tokenizer")
    return model, state, moments


def settings_of(words) -> Settings:
    """The settings of a command line; what it leaves out is as the run has it that is resumed."""
    read = partial(read_settings, words=words, document=__doc__)
    return runs.merged_settings(read(Settings()), MAY_CHANGE, read)


def print_progress(settings: Settings, row, seconds, peak) -> None:
    """Print the loss, the speed of steps that take so many seconds, and the time left."""
    step = row["step"]
    speed = settings.global_batch_size * settings.sequence_length / seconds
    left = timedelta(seconds=round((settings.max_iters - step) * seconds))
    text = f"step {step}/{settings.max_iters}  loss {row['loss']:.4f}  {speed:,.0f} tokens/s"
    print(f"{text}  MFU {100 * speed / peak:.1f} %  {left} left", flush=True)


COMMANDS = {"": Command(train, settings_of)}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
