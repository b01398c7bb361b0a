"""Train a model: what becomes of a newborn? On one CPU or many GPUs (BB B.4)

    python train.py configs/laptop.py                          # learns something visible in minutes
    python train.py configs/laptop.py                          # the same command goes on with its run
    python train.py --resume --out runs/laptop --max-iters 900 # so does this, with the run's own settings
    python train.py sample runs/laptop --prompt "def "         # writes text with a checkpoint
    python train.py eval runs/laptop --text book.txt           # its loss, over all whole windows of a text
    torchrun --nproc-per-node 8 train.py configs/nano_llama.py --attn-calibration attenuate

If --out holds a run, it goes on from its newest checkpoint. Only the settings in `runs.MAY_CHANGE` may differ
from those that it began with. With --resume, what is not given is as the run began.

Each epoch shuffles the training windows by the data seed, and each step takes the next ones, however many
ranks and micro-batches there are. So a run needs no random state: resumed with as many, on a CPU it ends with
the same bits. On SIGTERM, SIGINT or SIGUSR1 it stops after this step or the next, saves, and exits with 0.
"""

import math
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from init import SCHEMES
from lib import runtime
from lib.results import commit
from lib.settings import Command, RunSettings, UserError, at_least, from_values, rank, run_script, say
from measure.attention import sinks_by_length
from model import CHOICES, PRESETS
from sources import checkpoint, data, runs
from sources.sampling import EvalSettings, SampleSettings, evaluate, generate, sample

SINK_WINDOWS = 100  # how many --track-sinks reads (Gu et al.: 100)


@dataclass
class Settings(RunSettings):
    """The settings of a run, kept in its folder as settings.json."""

    model: Literal[tuple(PRESETS)] = "tiny_llama"  # preset to train; the tokenizer sets its vocabulary
    num_layers: at_least(1) | None = None  # blocks; None: the preset's
    num_heads: at_least(1) | None = None  # heads, each with its own keys and values; None: the preset's
    d_model: at_least(2) | None = None  # width of the residual stream; None: the preset's
    d_ff: at_least(1) | None = None  # neurons of an MLP; None: the preset's
    seed: int = 42  # seed of the weights
    embedding_seed: int | None = None  # seed of embedding and head; None: the seed
    init: Literal[SCHEMES] = "gpt2"  # how the weights are drawn
    init_from: str | None = None  # start from this checkpoint or PRESET@SEED instead of --model
    branch_from: str | None = None  # go on from a step that kept its optimizer, RUN/step_0000300, in --out
    # scaling of the heads' outputs (BB 6.2); None: the preset's
    attn_calibration: Literal[CHOICES["attn_calibration"]] | None = None
    explicit_sink: bool = False  # give heads a learned key and value in front of the text, as a preset may
    data: str | None = None  # data set; None: that of --source and --tokenizer, made if missing
    source: tuple[str, ...] = ("python",)  # text of that data set, as in python -m sources.data
    tokenizer: str = "bpe:4096"  # tokenizer of that data set, as in python -m sources.data
    data_seed: int = 0  # seed of the order of the training sequences
    sequence_length: at_least(2) = 256  # tokens in a sequence
    bos_first: bool = False  # begin every sequence with BOS, in training and evaluation
    global_batch_size: at_least(1) = 32  # sequences in a step, over all ranks
    micro_batch_size: at_least(1) = 32  # sequences in a forward pass
    max_iters: at_least(1) = 600  # steps; the learning rate falls to about a tenth of its peak
    warmup_iters: at_least(0) | None = None  # steps of linear warm-up; None: a sixth of all, 100 at most
    learning_rate: at_least(1e-12, float) = 1e-3  # peak of the learning rate
    weight_decay: at_least(0, float) = 0.1  # weight decay of matrices; vectors have none
    grad_clip: at_least(1e-12, float) = 1.0  # largest norm of the gradient
    log_every: at_least(1) = 10  # steps between printed lines
    eval_every: at_least(1) = 100  # steps between evaluations
    eval_sequences: at_least(1) = 64  # held-out sequences per evaluation, always the same
    track_sinks: bool = False  # log sink rates and alpha_1 at evaluations, by length, without and with BOS
    save_every: at_least(1) = 100  # steps between checkpoints to resume from
    # checkpoints to keep besides step 0 and the newest two; powers: 1, 2, 4, ...; all: all; last: none;
    # optimizers: all, with their optimizers, so that --branch-from can go on from each
    keep: Literal["powers", "all", "last", "optimizers"] = "powers"
    # number format of matrix products; None: bfloat16 on a GPU, else float32
    dtype: Literal["float32", "bfloat16"] | None = None
    compile: bool = field(default_factory=torch.cuda.is_available)  # compile the model
    peak_tflops: float | None = None  # of all devices together, to print which share of it training uses
    resume: bool = False  # what is not given is as the run in --out began
    out: str = "runs/default"  # run folder


def train(settings: Settings, defaults: Settings | None = None):
    """Train, or go on with the run in --out; prints the loss and the time left every --log-every steps.

    `defaults` are a config file's settings, which --init-from may contradict.
    """
    settings = from_values(Settings, vars(settings), "settings")
    run = runs.Run(settings.out)
    is_new = not run.has_steps()
    if is_new:
        settings = runs.start_settings(settings, defaults or Settings())
    else:
        settings = runs.resume_settings(settings, run)
    settings, device, dtype = runtime.start(settings)
    say(f"{run.folder}: a new run" if is_new else f"{run.folder}: the run there goes on")
    if settings.global_batch_size < runtime.world_size():
        raise UserError(f"--global-batch-size {settings.global_batch_size}: less than one per process")
    with run.lock():
        config = runs.new_config(settings) if is_new else None  # mistakes before any data are prepared
        tokens = data.open_data(settings, is_new)
        start = None  # the folder of the step that is gone on from
        if not is_new:
            start = checkpoint.steps(run.folder)[-1]
        elif settings.branch_from:
            start = Path(settings.branch_from)
        if start is None:
            model, step = runs.new_model(settings, config, tokens), 0
        else:
            model, step = runs.load_step(start, tokens)
        training = Training(settings, run, model, step, start, tokens, device, dtype)
        facts = {"step": step, "data set": tokens.meta.fingerprint, "commit": commit()}
        runs.check_agreement(facts | {"torch": torch.__version__} | asdict(settings))
        training.go_on()
    return run.folder


class Training:
    """A run: its data, its model, its optimizer, and the number of steps done."""

    def __init__(self, settings: Settings, run: runs.Run, model, step, start, tokens, device, dtype):
        self.settings = settings
        self.run = run
        self.step = step
        self.tokens = tokens
        self.device = device
        self.dtype = dtype
        self.raw_model = model.to(device).train()
        self.optimizers = make_optimizers(model, settings)
        if step > 0:
            runs.restore(self.optimizers, model, start)
        self.model = torch.compile(model) if settings.compile else model
        self.step_tokens = settings.global_batch_size * settings.sequence_length
        say(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")

    def go_on(self) -> None:
        """Train until --max-iters or a signal; evaluations come before saves."""
        settings, run = self.settings, self.run
        if self.step > settings.max_iters:
            raise UserError(f"--max-iters {settings.max_iters}: {run.folder} is at step {self.step} already")
        if runtime.world_size() > 1:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        rows = runtime.gathered(run.rows(settings, self.step, self.tokens))[0]  # what rank 0 has
        with runs.listening_for_signals() as signals:
            if self.is_due() and "val_loss" not in rows[-1]:  # a newborn; or a signal left an evaluation out
                rows[-1] |= self.evaluate()
            run.write_settings(settings, rows)
            if not run.has_steps():
                self.save()
            stopped = False
            while self.step < settings.max_iters and not stopped:
                row, stopped = self.update(signals)
                if self.is_due() and not stopped:
                    row |= self.evaluate()
                run.append(row)
                if self.step % settings.log_every == 0 or self.step == settings.max_iters:
                    self.tell(row)
                if stopped or self.is_to_save(row):
                    self.save()
                if "val_loss" in row:
                    run.draw_loss()
        run.draw_loss()
        if best := run.best():
            say(f"lowest held-out loss: {best['val_loss']:.4f}, of step {best['step']}")
        hint = "the same command goes on, and a larger --max-iters stretches the schedule"
        say(f"{run.folder} is at step {self.step} of {settings.max_iters}; {hint}")
        runtime.gathered()  # ranks end together

    def update(self, signals):
        """Do one step; returns its row, and whether to stop."""
        settings = self.settings
        started = time.perf_counter()
        rate = learning_rate(self.step, settings)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("scale", 1.0)
        # What a fork draws, as dropout does, depends on the step alone: a resumed run draws the same.
        torch.manual_seed((settings.seed * 10**9 + self.step) * runtime.world_size() + rank())
        loss = torch.zeros((), device=self.device)  # this rank's part of the step's mean loss
        parts = micro_batches(settings.global_batch_size, settings.micro_batch_size)
        for part in parts:
            sequences = [self.step * settings.global_batch_size + i for i in part]
            windows = self.tokens.batch(settings.data_seed, sequences, settings.sequence_length)
            # Average gradients over ranks in the last backward pass only (DDP reads this attribute).
            self.model.require_backward_grad_sync = part == parts[-1]
            part_loss = loss_sum(self.model, *windows, self.device, self.dtype) / self.step_tokens
            (part_loss * runtime.world_size()).backward()  # makes DDP's average a sum
            loss += part_loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.raw_model.parameters(), settings.grad_clip)
        # Ranks sum losses and signals, so all stop together; reading them waits for the device, once a step.
        sums = runtime.sum_over_ranks(torch.stack([loss, loss.new_tensor(len(signals))]))
        loss, num_signals, grad_norm = torch.cat((sums, norm[None])).tolist()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            best = self.run.best().get("step", 0)
            hint = "start again with a lower --learning-rate, or with --init-from the step with the lowest "
            hint += f"held-out loss, {self.run.step_folder(best)}"
            raise UserError(f"step {self.step}: loss {loss}, gradient norm {grad_norm}; {hint}")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        speed = self.step_tokens / (time.perf_counter() - started)
        row = {"step": self.step, "loss": loss, "lr": rate, "grad_norm": grad_norm}
        return row | {"tokens_per_second": speed}, num_signals > 0

    def is_due(self):
        """Whether the step is to be evaluated."""
        return self.step % self.settings.eval_every == 0 or self.step == self.settings.max_iters

    def is_to_save(self, row):
        """Whether the step is the last, one to resume from, or kept: a power of 2, or the best."""
        settings = self.settings
        if self.step == settings.max_iters or self.step % settings.save_every == 0:
            return True
        is_best = "val_loss" in row and self.run.best().get("step") == self.step
        is_power = self.step & (self.step - 1) == 0
        return settings.keep != "last" and (is_best or is_power)

    def save(self) -> None:
        self.run.save(self.step, self.raw_model, self.optimizers, self.tokens, self.settings.keep)

    def evaluate(self):
        """The held-out loss and, if tracked, sinks, as columns; prints a sample."""
        settings, model = self.settings, self.raw_model.eval()
        held_out = self.tokens.held_out(settings.eval_sequences, settings.sequence_length)
        loss = mean_loss(model, *held_out, settings.micro_batch_size, self.device, self.dtype)
        if not math.isfinite(loss):
            raise UserError(f"step {self.step}: held-out loss {loss}; try a lower --learning-rate")
        row = {"val_loss": loss, "val_windows": settings.eval_sequences}
        if rank() == 0:
            if settings.track_sinks:
                row["sinks"] = self.sinks()
            text = generate(model, self.tokens.tokenizer, torch.Generator().manual_seed(self.step))
            print(f"step {self.step}: held-out loss {loss:.4f}, {text!r}", flush=True)
        model.train()
        return row

    def sinks(self):
        """Rows for each length: held-out windows as they are and, if there is a BOS, with BOS first."""
        lengths = [self.settings.sequence_length]
        while lengths[-1] >= 64:
            lengths.append(lengths[-1] // 2)
        rows = []
        for bos_first in (False, True) if self.tokens.tokenizer.bos is not None else (False,):
            windows, _ = data.TokenData(self.tokens.folder, bos_first).held_out(SINK_WINDOWS, lengths[0])
            found = sinks_by_length(self.raw_model, windows.to(self.device), tuple(lengths))
            for T, (row, alpha) in found.items():
                kept = {name: row[name] for name in ("sink_rate", "constant_alpha")}
                kept["alpha1"] = alpha.mean(0).double().numpy().round(4).tolist()  # (L, H)
                rows.append({"sequence_length": T, "bos_first": bos_first} | kept)
        return rows

    def tell(self, row) -> None:
        speed, last = row["tokens_per_second"], self.settings.max_iters
        left = timedelta(seconds=round((last - self.step) * self.step_tokens / speed))
        used = ""
        if settings_peak := self.settings.peak_tflops:
            weights = sum(weight.numel() for weight in self.raw_model.blocks.parameters())
            weights += self.raw_model.head_weight.numel()
            flops = 6 * speed * weights  # (Kaplan 2020)
            used = f"{flops / settings_peak / 1e12:.0%} of {settings_peak:g} TFLOP/s  "
        say(f"step {self.step}/{last}  loss {row['loss']:.4f}  {speed:,.0f} tokens/s  {used}{left} left")


def learning_rate(step, settings: Settings):
    """Learning rate of step 0, 1, ...: a linear warm-up, then a cosine to a tenth of the peak (BB B.4)."""
    if step < settings.warmup_iters:
        return settings.learning_rate * (step + 1) / settings.warmup_iters
    done = (step - settings.warmup_iters) / (settings.max_iters - settings.warmup_iters)
    cosine = math.cos(math.pi * done)  # from 1 to -1
    return settings.learning_rate * (0.1 + 0.45 * (1 + cosine))


def micro_batches(count, size):
    """This rank's share of range(count), in consecutive ranges of at most `size`."""
    shard = runtime.shard(count)
    return [shard[start : start + size] for start in range(0, len(shard), size)]


def loss_sum(model, inputs, targets, device, dtype):
    """Summed cross-entropy of windows (n, T), in nats. bfloat16 leaves final norm and loss in float32."""
    with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
        return model(inputs.to(device), targets.to(device))


@torch.no_grad()
def mean_loss(model, inputs, targets, batch_size, device, dtype):
    """Mean loss of windows (n, T), in nats/token; ranks share the work."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in micro_batches(len(inputs), batch_size):
        total += loss_sum(model, inputs[part], targets[part], device, dtype)
    return runtime.sum_over_ranks(total).item() / inputs.numel()


def make_optimizers(model, settings: Settings):
    """AdamW of what is not frozen, with weight decay on matrices only: a list of optimizers.

    A group may have a "scale", by which its learning rate is multiplied.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    decayed = {"params": matrices, "weight_decay": settings.weight_decay}
    undecayed = {"params": others, "weight_decay": 0.0}
    return [torch.optim.AdamW([decayed, undecayed], betas=(0.9, 0.95), fused=True)]


def begun(out):
    """The settings that the run in a folder began with; None if there is no run."""
    return runs.Run(out).settings(Settings)


COMMANDS = {
    "": Command(train, Settings(), begun),
    "sample": Command(sample, SampleSettings()),
    "eval": Command(evaluate, EvalSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
