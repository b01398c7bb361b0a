"""What becomes of a newborn? The training loop (BB B.4), on one CPU or many GPUs.

    python train.py configs/laptop.py                          # learns something visible in five minutes
    python train.py --resume --out runs/laptop                 # goes on where it was stopped, or killed
    torchrun --nproc-per-node 8 train.py configs/nano_llama.py --attn-calibration attenuate

A run folder holds settings.json, metrics.jsonl (a line for each step), loss.png, and checkpoints: birth, the
steps that --keep names, and the newest two. Batches are a function of (data seed, step) for any number of
ranks and micro-batches, so that resuming needs no random state: on a CPU a run that was killed ends with the
same bits as one that was not. On SIGTERM or SIGINT a run finishes its step, saves, and exits with 0.
"""

import math
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from init import SCHEMES, newborn
from lib import checkpoint, data, runs, runtime
from lib.inputs import check_tokenizer
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from measure import attention
from model import CHOICES, PRESETS


@dataclass
class Settings(RunSettings):
    model: Literal[tuple(PRESETS)] = "tiny_llama"  # preset to train; its vocabulary is the tokenizer's
    seed: int = 42  # seed of the weights
    embedding_seed: int | None = None  # seed of embedding and head; None: the seed
    init: Literal[SCHEMES] = "gpt2"  # how the weights are drawn
    init_from: str | None = None  # start from this checkpoint folder or PRESET@SEED, in place of --model
    attn_calibration: Literal[CHOICES["attn_calibration"]] = "none"  # scaling of aggregated heads (BB 6.2)
    data: str | None = None  # prepared data set; None: that of source and tokenizer, made if missing
    source: tuple[str, ...] = ("python",)  # text of the default data set, as in python -m lib.data
    tokenizer: str = "bpe:4096"  # tokenizer of the default data set, as in python -m lib.data
    data_seed: int = 0  # seed of the order of the training sequences
    sequence_length: at_least(2) = 256  # tokens in a sequence
    global_batch_size: at_least(1) = 32  # sequences in a step, over all ranks
    micro_batch_size: at_least(1) = 32  # sequences in a forward pass
    max_iters: at_least(1) = 600  # number of steps; at the last, the learning rate is a tenth of its peak
    warmup_iters: at_least(0) = 100  # steps of linear warm-up
    learning_rate: at_least(1e-12, float) = 1e-3  # peak of the learning rate
    weight_decay: at_least(0, float) = 0.1  # weight decay of matrices; gains and biases have none
    grad_clip: at_least(1e-12, float) = 1.0  # largest norm of the gradient
    log_every: at_least(1) = 10  # steps between printed lines
    eval_every: at_least(1) = 100  # steps between evaluations
    eval_sequences: at_least(1) = 64  # held-out sequences of an evaluation, always the same
    track_sinks: bool = False  # log alpha_1 and the sink rate at evaluations, as sinks.py rate
    save_every: at_least(1) = 100  # steps between checkpoints to resume from
    keep: Literal["powers", "all", "last"] = "powers"  # steps to keep beside birth and the newest two
    compile: bool = field(default_factory=torch.cuda.is_available)  # compile the model; takes a C++ compiler
    resume: bool = False  # go on from the newest whole checkpoint in --out, with that run's settings
    out: str = "runs/default"  # run folder


# What may change with --resume; a new max_iters changes the learning rate's schedule, too.
MAY_CHANGE = {"device", "log_every", "eval_every", "eval_sequences", "track_sinks", "save_every", "compile"}
MAY_CHANGE |= {"resume", "out", "max_iters", "micro_batch_size"}


# ---- the loop ----------------------------------------------------------------------------------------------


def train(settings: Settings):
    """What becomes of a newborn? A line every --log-every steps tells the time left."""
    settings = runs.merged_settings(settings, MAY_CHANGE)
    settings, device, dtype = runtime.start(settings)
    if settings.global_batch_size < runtime.world_size():
        raise UserError(f"--global-batch-size {settings.global_batch_size}: less than one for each process")
    run = Path(settings.out)
    with runs.sole_owner(run):
        Training(settings, run, device, dtype).go_on()
    return run


class Training:
    """A run on its way: data, model and optimizer, and the number of steps that were made."""

    def __init__(self, settings: Settings, run, device, dtype):
        self.settings = settings
        self.run = run
        self.device = device
        self.dtype = dtype
        self.is_master = runtime.rank() == 0  # the process that writes and speaks
        self.tokens = open_data(settings, device)
        self.tokenizer = self.tokens.load_tokenizer()
        self.held_out = self.tokens.held_out(settings.eval_sequences, settings.sequence_length)
        model, state, moments = load_model(settings, self.tokens)
        self.raw_model = model.to(device).train()
        self.optimizer = make_optimizer(model, settings)
        self.is_new = state is None  # nothing to resume
        self.step = 0
        if state is not None:
            self.step = state.step
            checkpoint.restore(self.optimizer, model, state, moments)
        self.model = torch.compile(model) if settings.compile else model
        if runtime.world_size() > 1:  # gradients are stored once
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.step_tokens = settings.global_batch_size * settings.sequence_length
        flops = runtime.training_flops(model, settings.sequence_length)  # of a token
        self.peak = runtime.matmul_peak(device, dtype) / flops  # tokens/s

    def go_on(self) -> None:
        """Train up to --max-iters or a signal. A step is saved first, then evaluated, which may take long."""
        settings = self.settings
        if self.step > settings.max_iters:
            raise UserError(f"--max-iters {settings.max_iters}: {self.run} is at step {self.step} already")
        if self.is_master:
            runs.begin_logs(settings, self.run, -1 if self.is_new else self.step)  # -1: an empty log
            if self.is_new:
                runs.append_row(self.run, {"step": 0})
                self.save()
        stopped = False
        with runtime.listening_for_signals() as signals:
            self.evaluate_if_due()  # the newborn, or a step that was killed in its evaluation
            while self.step < settings.max_iters and not stopped:
                row, stopped = self.update(signals)
                step = self.step
                is_last = stopped or step == settings.max_iters
                is_kept = settings.keep == "powers" and runs.is_power_of_two(step)
                if self.is_master:
                    runs.append_row(self.run, row)
                    if step % settings.log_every == 0:
                        self.print_progress(row)
                    if is_last or is_kept or step % settings.save_every == 0:
                        self.save()
                self.evaluate_if_due()
        if self.is_master:
            runs.prune(self.run, settings.keep, self.step)
            if stopped:
                runs.draw_loss(self.run)
            print(f"{self.run} is at step {self.step}; --resume goes on, with a larger --max-iters if done")
        runtime.wait_for_all(self.device)

    def update(self, signals):
        """Make a step. Returns its row of metrics.jsonl, and whether any process was told to stop."""
        begun = time.perf_counter()
        # learning rate of this step
        rate = learning_rate(self.step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # micro-steps: gradients add up; ranks sum their losses and signals, so that all stop together
        loss = self.accumulate()
        sums = torch.stack([loss, loss.new_tensor(len(signals))])
        loss, num_signals = runtime.sum_over_ranks(sums).tolist()
        # clip
        parameters = self.raw_model.parameters()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.grad_clip).item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise runs.diverged(self.run, self.step, f"loss {loss}, gradient norm {grad_norm}")
        # step
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        speed = self.step_tokens / (time.perf_counter() - begun)
        row = {"step": self.step, "loss": loss, "lr": rate, "grad_norm": grad_norm}
        row |= {"tokens_per_second": speed, "mfu": speed / self.peak}
        return row, num_signals > 0

    def accumulate(self):
        """This rank's part of a step's mean loss; all ranks' gradient is added to `parameter.grad`."""
        settings = self.settings
        batch_size = settings.global_batch_size
        total = torch.zeros((), device=self.device)
        parts = micro_batches(batch_size, settings.micro_batch_size)
        for part in parts:
            sequences = [self.step * batch_size + i for i in part]  # beyond the data's end a new epoch begins
            windows = self.tokens.batch(settings.data_seed, sequences, settings.sequence_length)
            # DistributedDataParallel averages gradients over ranks in the backward pass where this is true
            self.model.require_backward_grad_sync = part == parts[-1]
            loss = loss_sum(self.model, *windows, self.device, self.dtype) / self.step_tokens
            (loss * runtime.world_size()).backward()  # the average times the number of ranks is the sum
            total += loss.detach()
        return total

    def evaluate_if_due(self) -> None:
        """Log the held-out loss of this step, in nats/token, and its sinks if tracked; print a sample."""
        settings = self.settings
        model = self.raw_model
        if self.step % settings.eval_every != 0 and self.step != settings.max_iters:
            return
        loss = evaluate(model, *self.held_out, settings.micro_batch_size, self.device, self.dtype)
        if not math.isfinite(loss):
            raise runs.diverged(self.run, self.step, f"held-out loss {loss}")
        values = {"val_loss": loss}
        if settings.track_sinks:
            inputs = self.held_out[0].to(self.device)  # (n, T)
            values |= attention.sink_statistics(model, inputs)[0]
        if self.is_master:
            runs.amend_row(self.run, self.step, values)
            runs.draw_loss(self.run)
            sample = generate(model, self.tokenizer, self.step)
            print(f"step {self.step}: held-out loss {loss:.4f}, {sample!r}", flush=True)

    def save(self) -> None:
        """Write the checkpoint of this step, and remove those that need not be kept."""
        state = checkpoint.TrainingState(self.step, self.tokens.meta.fingerprint)
        folder = self.run / f"step_{self.step:07}"
        checkpoint.save(folder, self.raw_model, self.optimizer, state, self.tokenizer)
        runs.prune(self.run, self.settings.keep, self.step)

    def print_progress(self, row) -> None:
        """Print a step's loss, its speed, and the time left."""
        speed = row["tokens_per_second"]
        last = self.settings.max_iters
        left = timedelta(seconds=round((last - self.step) * self.step_tokens / speed))
        text = f"step {self.step}/{last}  loss {row['loss']:.4f}  {speed:,.0f} tokens/s"
        print(f"{text}  MFU {100 * row['mfu']:.1f} %  {left} left", flush=True)


def learning_rate(step, settings: Settings):
    """Learning rate of update number `step`, from 0: a linear warm-up, then a cosine to a tenth (BB B.4)."""
    if step < settings.warmup_iters:
        return settings.learning_rate * (step + 1) / settings.warmup_iters
    done = (step - settings.warmup_iters) / max(1, settings.max_iters - settings.warmup_iters)
    return settings.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def micro_batches(count, size):
    """This rank's shard of range(count), in parts of `size`; the last one may be smaller."""
    shard = runtime.shard(count)
    return [shard[start : start + size] for start in range(0, len(shard), size)]


def loss_sum(model, inputs, targets, device, dtype):
    """Summed cross-entropy, in nats, of windows (n, T); the products in `dtype`, sums in float32."""
    with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
        return model(inputs.to(device), targets.to(device))


@torch.no_grad()
def evaluate(model, inputs, targets, batch_size, device, dtype):
    """Mean loss, in nats/token, of windows (n, T), some at a time, shared among the ranks."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in micro_batches(len(inputs), batch_size):
        total += loss_sum(model, inputs[part], targets[part], device, dtype)
    return (runtime.sum_over_ranks(total) / inputs.numel()).item()


def make_optimizer(model, settings: Settings):
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    decayed = {"params": matrices, "weight_decay": settings.weight_decay}
    undecayed = {"params": vectors, "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, undecayed], betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def generate(model, tokenizer, step):
    """48 tokens after BOS (none: token 0), at temperature 0.8: a function of the weights and the step."""
    tokens = torch.tensor([[tokenizer.bos or 0]], device=model.model.norm.weight.device)  # (1, T)
    generator = torch.Generator().manual_seed(step)
    for _ in range(48):
        state = model.hidden(tokens[:, -model.config.context_length :], last_only=True)  # (1, d)
        logits = model.unembed(state)[:, : tokenizer.vocab_size].cpu()
        token = torch.multinomial((logits / 0.8).softmax(1), 1, generator=generator)
        tokens = torch.cat((tokens, token.to(tokens)), dim=1)
    return tokenizer.decode(tokens[0, 1:].tolist())


# ---- data, model and settings ------------------------------------------------------------------------------


def open_data(settings: Settings, device):
    """The data set to train on; the default one is prepared, by rank 0, where it is missing."""
    folder = Path(settings.data or data.default_folder(settings.source, settings.tokenizer))
    if settings.data is None and runtime.rank() == 0 and not folder.exists():
        print(f"preparing {folder}, once")
        data.prepare(data.Settings(source=settings.source, tokenizer=settings.tokenizer))
    runtime.wait_for_all(device)
    tokens = data.TokenData(folder)
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
        spec = checkpoint.parse_spec(settings.init_from)
        check_tokenizer(spec, tokens)
        model = spec.load()
        if settings.attn_calibration not in ("none", model.config.attn_calibration):
            raise UserError(f"--init-from {spec.label} has the calibration {model.config.attn_calibration}")
    else:
        shape = {"attn_calibration": settings.attn_calibration, "vocab_size": tokens.vocab_size}
        config = replace(PRESETS[settings.model], **shape)
        model = newborn(config, settings.seed, settings.embedding_seed, settings.init)
    checkpoint.check_lengths((settings.sequence_length,), model.config.context_length)
    if tokens.vocab_size > model.config.vocab_size:
        sizes = f"{tokens.vocab_size} tokens, the model {model.config.vocab_size}"
        raise UserError(f"{tokens.folder} has {sizes}: change --tokenizer")
    return model, state, moments


def completed_settings(settings: Settings, flags):
    """What a command line with these flags means: to resume, what it leaves out is as in settings.json.

    UserError for flags that --init-from would leave without effect.
    """
    of_birth = {"model", "seed", "embedding_seed", "init"} if settings.init_from else set()
    for name in sorted(of_birth & flags):
        raise UserError(f"--{name.replace('_', '-')}: {settings.init_from} has its own; leave one out")
    defaults = Settings()
    in_config = {name for name, value in vars(settings).items() if value != getattr(defaults, name)}
    return runs.merged_settings(settings, MAY_CHANGE, flags | in_config)


COMMANDS = {"": Command(train, Settings(), completed_settings)}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
