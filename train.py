"""What becomes of a newborn? The training loop (BB B.4), on one CPU or many GPUs.

    python train.py configs/laptop.py                          # learns something visible in minutes
    python train.py configs/laptop.py --source 'books/*.txt' --num-layers 4 --d-model 192     # text, size
    python train.py --resume --out runs/laptop                 # goes on where it was stopped or killed
    python train.py sample runs/laptop --prompt "def "         # prints what a checkpoint writes
    torchrun --nproc-per-node 8 train.py configs/nano_llama.py --attn-calibration attenuate

A run folder holds settings.json, metrics.jsonl (a line for each step), loss.png, and checkpoints: birth, the
newest two, and the steps that --keep selects. --resume loads the newest whole checkpoint, and cuts the log
off there. It takes the settings with which the run began; flags can change only those in MAY_CHANGE. Given a
config file or other flags, it begins a run that is not there. As a model, a run means its newest step.

`TokenData.batch` shuffles the training windows for each epoch by the data seed. A step takes the next windows
whatever the number of ranks and micro-batches. So a run resumes without any random state, and on a CPU it
ends with the same bits as a run that was never killed. On SIGTERM, SIGINT or SIGUSR1 a run finishes its step
or leaves its evaluation, saves, and exits with 0.
"""

import itertools
import math
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

import sinks
from init import SCHEMES, newborn
from lib import runtime
from lib.settings import Command, RunSettings, UserError, at_least, run_script
from model import CHOICES, FIRST_POSITIONS, PRESETS
from sources import checkpoint, data, runs
from sources.inputs import check_tokenizer
from sources.sampling import SampleSettings, generate, sample

SIZES = ("num_layers", "num_heads", "d_model", "d_ff")
SINK_WINDOWS = 100  # --track-sinks reads so many (Gu et al.: 100)


@dataclass
class Settings(RunSettings):
    """The settings of a run; its folder keeps them in settings.json."""

    model: Literal[tuple(PRESETS)] = "tiny_llama"  # preset to train, with the tokenizer's vocabulary
    num_layers: at_least(1) | None = None  # blocks; None: the preset's
    num_heads: at_least(1) | None = None  # heads, each with its own keys and values; None: the preset's
    d_model: at_least(2) | None = None  # width of the residual stream; None: the preset's
    d_ff: at_least(1) | None = None  # hidden units of an MLP; None: the preset's
    seed: int = 42  # seed of the weights
    embedding_seed: int | None = None  # seed of embedding and head; None: the seed
    init: Literal[SCHEMES] = "gpt2"  # how the weights are drawn
    init_from: str | None = None  # start from this checkpoint folder or PRESET@SEED, in place of --model
    attn_calibration: Literal[CHOICES["attn_calibration"]] = "none"  # scaling of the heads' outputs (BB 6.2)
    explicit_sink: bool = False  # give each key-value head a learnt key and value, in front of the text
    data: str | None = None  # data set; None: the one of source and tokenizer, made if missing
    source: tuple[str, ...] = ("python",)  # text of that data set, as in python -m sources.data
    tokenizer: str = "bpe:4096"  # tokenizer of that data set, as in python -m sources.data
    data_seed: int = 0  # seed of the order of the training sequences
    sequence_length: at_least(2) = 256  # tokens in a sequence
    bos_first: bool = False  # begin every sequence with BOS, in training and evaluation
    global_batch_size: at_least(1) = 32  # sequences in a step, over all ranks
    micro_batch_size: at_least(1) = 32  # sequences in a forward pass
    max_iters: at_least(1) = 600  # number of steps; by the last, the learning rate falls to about a tenth
    warmup_iters: at_least(0) = 100  # steps of linear warm-up
    learning_rate: at_least(1e-12, float) = 1e-3  # peak of the learning rate
    weight_decay: at_least(0, float) = 0.1  # weight decay of matrices; vectors have none
    grad_clip: at_least(1e-12, float) = 1.0  # largest norm of the gradient
    log_every: at_least(1) = 10  # steps between printed lines
    eval_every: at_least(1) = 100  # steps between evaluations
    eval_sequences: at_least(1) = 64  # held-out sequences of an evaluation, always the same
    track_sinks: bool = False  # log sink rates and alpha_1 at evaluations, by length, without and with BOS
    save_every: at_least(1) = 100  # steps between checkpoints to resume from
    # saved steps kept besides birth and the newest two; powers: 1, 2, 4, ...; all: all; last: none
    keep: Literal["powers", "all", "last"] = "powers"
    compile: bool = field(default_factory=torch.cuda.is_available)  # compile the model
    resume: bool = False  # go on from the newest whole checkpoint in --out, with its settings
    out: str = "runs/default"  # run folder


# Settings that may change with --resume. A new max_iters also changes the schedule of the learning rate.
MAY_CHANGE = {"device", "log_every", "eval_every", "eval_sequences", "track_sinks", "save_every", "compile"}
MAY_CHANGE |= {"resume", "out", "max_iters", "micro_batch_size"}


def train(settings: Settings):
    """What becomes of a newborn? A line every --log-every steps tells the time left."""
    if checkpoint.steps(settings.out) and not settings.resume:
        raise UserError(f"{settings.out} holds a run: go on with --resume, or choose another --out")
    settings, device, dtype = runtime.start(settings)
    if settings.global_batch_size < runtime.world_size():
        raise UserError(f"--global-batch-size {settings.global_batch_size}: less than one for each process")
    run = Path(settings.out)
    with runs.sole_owner(run):
        Training(settings, run, device, dtype).go_on()
    return run


class Training:
    """A run: its data, its model, its optimizer, and the number of steps done."""

    def __init__(self, settings: Settings, run, device, dtype):
        self.settings = settings
        self.run = run
        self.device = device
        self.dtype = dtype
        self.is_master = runtime.rank() == 0  # rank 0 writes and prints
        self.tokens = runs.open_data(settings, device)
        self.tokenizer = self.tokens.load_tokenizer()
        self.held_out = self.tokens.held_out(settings.eval_sequences, settings.sequence_length)
        model, state, moments = load_model(settings, self.tokens)
        model.make_angles(max(settings.sequence_length, FIRST_POSITIONS))  # none is made in a compiled model
        self.raw_model = model.to(device).train()
        self.optimizer = make_optimizer(model, settings)
        self.step = 0
        if state is not None:
            self.step = state.step
            checkpoint.restore(self.optimizer, model, state, moments)
        self.model = torch.compile(model) if settings.compile else model
        if runtime.world_size() > 1:  # a view: no second copy of the gradients
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self.model.broadcast_buffers = False  # all have the same; as a keyword torch warns of it
        self.step_tokens = settings.global_batch_size * settings.sequence_length
        flops = runtime.training_flops(model, settings.sequence_length)  # of a token
        self.peak = runtime.matmul_peak(device, dtype) / flops  # tokens/s

    def go_on(self) -> None:
        """Train up to --max-iters or a signal. A step due to be saved and evaluated is saved first."""
        settings = self.settings
        if self.step > settings.max_iters:
            raise UserError(f"--max-iters {settings.max_iters}: {self.run} is at step {self.step} already")
        if self.is_master:
            runs.begin(self.run, settings, self.step, self.tokens)
            if not checkpoint.steps(self.run):
                self.save()
        with runtime.listening_for_signals() as signals:
            stopped = self.evaluate_if_due(signals)  # of the newborn, or of a step that was only saved
            while self.step < settings.max_iters and not stopped:
                row, stopped = self.update(signals)
                step = self.step
                is_kept = settings.keep != "last" and runs.is_power_of_two(step)
                if self.is_master:
                    runs.append_row(self.run, row)
                    if step % settings.log_every == 0:
                        self.print_progress(row)
                    if stopped or step == settings.max_iters or is_kept or step % settings.save_every == 0:
                        self.save()
                stopped = stopped or self.evaluate_if_due(signals)
            if self.is_master:
                if stopped and not (self.run / f"step_{self.step:07}").exists():  # in its evaluation
                    self.save()
                if stopped:
                    runs.draw_loss(self.run)
                hint = "--resume goes on, and a larger --max-iters stretches the schedule"
                print(f"{self.run} is at step {self.step} of {settings.max_iters}; {hint}")
            runtime.wait_for_all(self.device)

    def update(self, signals):
        """Make one step. Returns its row, and whether to stop."""
        settings = self.settings
        begun = time.perf_counter()
        rate = learning_rate(self.step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = torch.zeros((), device=self.device)  # this rank's part of the step's mean loss
        parts = micro_batches(settings.global_batch_size, settings.micro_batch_size)
        for part in parts:
            sequences = [self.step * settings.global_batch_size + i for i in part]
            windows = self.tokens.batch(settings.data_seed, sequences, settings.sequence_length)
            # Only the last backward pass averages gradients over ranks (DistributedDataParallel reads this).
            self.model.require_backward_grad_sync = part == parts[-1]
            part_loss = loss_sum(self.model, *windows, self.device, self.dtype) / self.step_tokens
            (part_loss * runtime.world_size()).backward()  # DDP averages over ranks: this makes a sum of it
            loss += part_loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.raw_model.parameters(), settings.grad_clip)
        # Ranks sum their losses and signals, so that all stop together. A step waits for the device once.
        sums = runtime.sum_over_ranks(torch.stack([loss, loss.new_tensor(len(signals))]))
        loss, num_signals, grad_norm = torch.cat((sums, norm[None])).tolist()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise runs.diverged(self.run, self.step, f"loss {loss}, gradient norm {grad_norm}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        speed = self.step_tokens / (time.perf_counter() - begun)
        row = {"step": self.step, "loss": loss, "lr": rate, "grad_norm": grad_norm}
        row |= {"tokens_per_second": speed, "mfu": speed / self.peak}  # a share of the peak
        return row, num_signals > 0

    def evaluate_if_due(self, signals):
        """Log this step's held-out loss, and sinks if tracked, and print a sample; or tell of a signal."""
        settings = self.settings
        if self.step % settings.eval_every != 0 and self.step != settings.max_iters:
            return False
        model = self.raw_model
        loss = evaluate(model, *self.held_out, settings.micro_batch_size, self.device, self.dtype, signals)
        if loss is None:
            return True
        if not math.isfinite(loss):
            raise runs.diverged(self.run, self.step, f"held-out loss {loss}")
        values = {"val_loss": loss}
        if self.is_master:
            if settings.track_sinks:
                values["sinks"] = self.sinks(signals)
            text = generate(model, self.tokenizer, torch.Generator().manual_seed(self.step), signals=signals)
        stopped = runtime.any_signal(signals, self.device)
        if self.is_master and not stopped:
            runs.amend_row(self.run, self.step, values)
            runs.draw_loss(self.run)
            print(f"step {self.step}: held-out loss {loss:.4f}, {text!r}", flush=True)
        return stopped

    def sinks(self, signals):
        """Rows for each length: of held-out windows as they are and, if there is a BOS, with BOS first."""
        lengths = [self.settings.sequence_length]
        while lengths[-1] >= 64:
            lengths.append(lengths[-1] // 2)
        windows, _ = data.TokenData(self.tokens.folder).held_out(SINK_WINDOWS, lengths[0])  # (n, T), no BOS
        texts = {False: windows}
        if self.tokenizer.bos is not None:
            texts[True] = windows.clone()
            texts[True][:, 0] = self.tokenizer.bos
        rows = []
        for (bos_first, text), T in itertools.product(texts.items(), lengths):
            if signals:
                break
            found, alpha = sinks.sink_statistics(self.raw_model, text[:, :T].to(self.device))
            row = {"sequence_length": T, "bos_first": bos_first}
            row |= {name: found[name] for name in ("sink_rate", "constant_alpha")}
            by_head = alpha.mean(0).double().numpy().round(4)  # (L, H)
            rows.append(row | {"alpha1": by_head.tolist()})
        return rows

    def save(self) -> None:
        """Write this step's checkpoint, and remove those that --keep does not select."""
        state = checkpoint.TrainingState(self.step, self.tokens.meta.fingerprint)
        folder = self.run / f"step_{self.step:07}"
        checkpoint.save(folder, self.raw_model, self.optimizer, state, self.tokenizer)
        runs.prune(self.run, self.settings.keep, self.step)

    def print_progress(self, row) -> None:
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
    cosine = math.cos(math.pi * done)  # from 1 to -1
    return settings.learning_rate * (0.1 + 0.45 * (1 + cosine))


def micro_batches(count, size):
    """This rank's share of range(count), in parts of `size`; the last part may be smaller.

    Ranks take consecutive shares: of 32 sequences and two ranks, rank 0 takes the first 16.
    """
    shard = runtime.shard(count)
    return [shard[start : start + size] for start in range(0, len(shard), size)]


def loss_sum(model, inputs, targets, device, dtype):
    """Summed cross-entropy, in nats, of windows (n, T).

    With bfloat16, matrix products and the stream are in bfloat16, the final norm and the loss in float32.
    """
    with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
        return model(inputs.to(device), targets.to(device))


@torch.no_grad()
def evaluate(model, inputs, targets, batch_size, device, dtype, signals=()):
    """Mean loss, in nats/token, of windows (n, T), which ranks share; None if one of them got a signal."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses, and of signals
    for part in micro_batches(len(inputs), batch_size):
        if not signals:
            sums[0] += loss_sum(model, inputs[part], targets[part], device, dtype)
    sums[1] = len(signals)
    total, num_signals = runtime.sum_over_ranks(sums).tolist()
    if num_signals > 0:
        return None
    return total / inputs.numel()


def make_optimizer(model, settings: Settings):
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    decayed = {"params": matrices, "weight_decay": settings.weight_decay}
    undecayed = {"params": vectors, "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, undecayed], betas=(0.9, 0.95), fused=True)


def load_model(settings: Settings, tokens):
    """The model in float32; to resume, also its state and moments. UserError if it does not fit the data."""
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
        if settings.explicit_sink and not model.config.explicit_sink:
            raise UserError(f"--init-from {spec.label} has no explicit sink: `sinks.py transplant` makes one")
    else:
        config = model_config(settings, tokens.vocab_size)
        model = newborn(config, settings.seed, settings.embedding_seed, settings.init)
    checkpoint.check_lengths((settings.sequence_length,), model.config.context_length)
    if tokens.vocab_size > model.config.vocab_size:
        sizes = f"{tokens.vocab_size} tokens, the model {model.config.vocab_size}"
        raise UserError(f"{tokens.folder} has {sizes}: change --tokenizer")
    return model, state, moments


def model_config(settings: Settings, vocab_size):
    """The preset with the sizes of the settings; UserError if they do not fit one another."""
    changes = {"attn_calibration": settings.attn_calibration, "vocab_size": vocab_size}
    changes["explicit_sink"] = settings.explicit_sink
    for name in SIZES:
        if getattr(settings, name) is not None:
            changes[name] = getattr(settings, name)
    if settings.num_heads is not None:
        changes |= {"num_kv_heads": None, "head_dim": None}  # these follow from the number of heads
    try:
        return replace(PRESETS[settings.model], **changes)
    except ValueError as error:
        raise UserError(f"sizes that do not fit: {error}") from None


def completed_settings(settings: Settings, flags, in_files):
    """The settings of a command line; to resume, those of settings.json, changed by the flags."""
    of_birth = {"model", "seed", "embedding_seed", "init", *SIZES} if settings.init_from else set()
    for name in sorted(of_birth & flags):
        raise UserError(f"--{name.replace('_', '-')}: {settings.init_from} has its own; leave one out")
    if not settings.resume:
        return settings
    begun = runs.begun_settings(settings, may_begin=bool(in_files or flags - MAY_CHANGE))
    return runs.merged_settings(settings, begun, MAY_CHANGE, flags | in_files)


COMMANDS = {
    "": Command(train, Settings(), completed_settings),
    "sample": Command(sample, SampleSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
