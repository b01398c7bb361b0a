"""How fast is it, against the machine's limit and against transformers?

    python bench.py                                       # all of it: about ten minutes on 2 cores
    python bench.py forward --model nano_llama --sequence-length 512 --rounds 9
    python bench.py training

One table, in tokens a second. `forward` is the last position's final state of random sequences, `training` a
step of train.py: forward and backward pass in bfloat16 with float32 weights, clipping, AdamW. transformers'
model has the same shape, dtype and, in training, the same loop. In `forward`, each first picks its best batch
size. All take turns, in alternating order, as do the matrix products that measure the device's peak; medians
count. `share` is of that peak, in the products that the answer needs: what is computed beyond is a loss.
(What streaming a 7B folder costs: tests/streaming.py.)
"""

import statistics
from dataclasses import dataclass
from functools import partial

import torch

import checkpoint
import common
from common import UserError, seconds, setting
from experiment import conduct
from findings import claim
from init import newborn
from model import PRESETS, ModelConfig, forward_flops, training_flops
from train import loss_sum

TRAINED = {"tiny_llama": (32, 256), "nano_llama": (4, 512)}  # batch size, sequence length; on CUDA 32 x all
OURS, THEIRS = "ours", "transformers"


@dataclass
class Settings(common.RunSettings):
    """What `bench.py` can be told; `--dtype auto` times both."""

    model: tuple[str, ...] = setting(("nano_gpt2", "nano_llama", "nano_qwen"), "presets to time", PRESETS)
    sequence_length: tuple[int, ...] = setting((64, 512, 1024), "tokens in a sequence")
    rounds: int = setting(3, "measurements of each contestant; the median counts", least=1)
    tokens: int | None = setting(None, "in the largest of three batches; 2048, on CUDA 65536", least=1)
    work: tuple[str, ...] = ("forward", "training")  # words of the command line


def transformers_model(config: ModelConfig, head: bool = False) -> torch.nn.Module | None:
    """transformers' model of a preset's shape, random weights, SDPA; None if it is not installed.

    For the GPT-2 style it is GPT-NeoX without parallel residual: the one there with RoPE, LayerNorm and GELU.
    """
    try:
        import transformers
    except ImportError:
        return None
    shape = checkpoint.config_json(config)
    if config.mlp == "gelu":
        rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0}
        shape = {theirs: getattr(config, ours) for theirs, ours in checkpoint.KEYS.items()}
        shape |= {"model_type": "gpt_neox", "rope_parameters": rope, "use_parallel_residual": False}
    kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
    theirs = transformers.AutoConfig.for_model(**shape)
    return kind.from_config(theirs, attn_implementation="sdpa").eval()


def take_turns(works: dict, dtypes, rounds: int, device: torch.device) -> tuple[dict, dict]:
    """Median seconds of each of `works`, and FLOP/s of the matrix product in each dtype, in turns."""
    times, peaks = {key: [] for key in works}, {dtype: [] for dtype in dtypes}
    for turn in range(rounds):
        for dtype in peaks:
            peaks[dtype].append(common.matmul_peak(device, dtype))
        for key in list(works)[:: 1 if turn % 2 else -1]:
            times[key].append(seconds(works[key]))
    return tuple({key: statistics.median(v) for key, v in found.items()} for found in (times, peaks))


def row(name: str, work: str, T: int, dtype, rates: dict, flops: float, peak: float) -> dict:
    """One line: tokens a second of ours and of theirs (None: not installed); `flops` are of a token."""
    ours, theirs = rates[OURS], rates.get(THEIRS)
    named = dict(model=name, work=work, sequence_length=T, dtype=str(dtype).removeprefix("torch."))
    speed = {OURS: ours, THEIRS: theirs, "ratio": theirs and ours / theirs}
    return named | speed | dict(share=ours * flops / peak, peak_gflops=peak / 1e9)


@torch.inference_mode()
def forward_rows(s: Settings, name: str, device: torch.device, dtypes: list[torch.dtype]) -> list[dict]:
    """Last-position states of random sequences: a row for each length and dtype."""
    config, entries, rows = PRESETS[name], {}, []
    most = s.tokens or (65_536 if device.type == "cuda" else 2048)
    for dtype in dtypes:
        ours, theirs = newborn(name, 0, device=device, dtype=dtype), transformers_model(config)
        entries[OURS, dtype] = partial(ours.hidden, last_only=True)
        if theirs is not None:
            theirs = theirs.to(device, dtype)
            entries[THEIRS, dtype] = lambda tokens, m=theirs: m(tokens, use_cache=False)[0][:, -1]
    for T in common.progress(s.sequence_length, desc=name, unit=" lengths"):
        sizes = sorted({max(1, most // part // T) for part in (1, 2, 4)})
        tokens, best = torch.randint(config.vocab_size, (sizes[-1], T), device=device), {}
        for entry, work in entries.items():
            work(tokens[:1])  # the first call allocates
            tried = {n: min(seconds(work, tokens[:n]) for _ in range(2)) / n for n in sizes}
            best[entry] = min(tried, key=tried.get)
        works = {entry: partial(work, tokens[: best[entry]]) for entry, work in entries.items()}
        took, peaks = take_turns(works, dtypes, s.rounds, device)
        flops = forward_flops(config, T, last_only=True) / T
        for dtype in dtypes:
            rates = {who: best[who, of] * T / t for (who, of), t in took.items() if of == dtype}
            batch = {f"batch_size_{who}": n for (who, of), n in best.items() if of == dtype}
            rows.append(row(name, "forward", T, dtype, rates, flops, peaks[dtype]) | batch)
    return rows


def training_rows(s: Settings, name: str, device: torch.device) -> list[dict]:
    """Training steps of ours and of transformers' model in the same loop: one row."""
    config, (B, T) = PRESETS[name], TRAINED[name]
    if device.type == "cuda":
        B, T = 32, config.context_length
    ours, theirs = newborn(name, 0, device=device).train(), transformers_model(config, head=True)
    entries, works, dtype = {OURS: (ours, ours)}, {}, torch.bfloat16
    if theirs is not None:
        theirs = theirs.to(device).train()
        entries[THEIRS] = (theirs, lambda tokens: theirs(tokens, use_cache=False).logits)
    window = torch.randint(config.vocab_size, (B, T + 1), device=device)

    def step(model, logits, optimizer) -> torch.Tensor:
        loss = loss_sum(logits, window[:, :-1], window[:, 1:], device, dtype) / (B * T)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for who, (model, logits) in entries.items():
        works[who] = partial(step, model, logits, torch.optim.AdamW(model.parameters(), fused=True))
        works[who]()  # the first step allocates
    took, peaks = take_turns(works, [dtype], s.rounds, device)
    rates = {who: B * T / t for who, t in took.items()}
    return [row(name, f"training, {B} sequences", T, dtype, rates, training_flops(config, T), peaks[dtype])]


def verdicts(rows: list[dict]) -> list[dict]:
    """The project's speed targets, judged on the rows that speak of them."""
    claims = []

    def judge(text: str, values: list, target: float) -> None:
        values = [value for value in values if value is not None]
        if values:
            shown = [round(value, 3) for value in values]
            claims.append(claim(f"{text}: at least {target}", None, shown, min(values) >= target, OURS))

    for dtype, target in (("float32", 0.90), ("bfloat16", 0.72)):
        short = [r for r in rows if (r["work"], r["sequence_length"], r["dtype"]) == ("forward", 64, dtype)]
        judge(f"forward, T = 64, {dtype}: share of the matmul peak", [r["share"] for r in short], target)
    at = ("nano_llama", "forward", 512)
    llama = {r["dtype"]: r for r in rows if (r["model"], r["work"], r["sequence_length"]) == at}
    if {"bfloat16", "float32"} <= llama.keys() and llama["float32"][THEIRS]:
        ours = llama["bfloat16"][OURS]
        text = "nano_llama, T = 512: ours in bfloat16 over transformers in"
        judge(f"{text} bfloat16", [ours / llama["bfloat16"][THEIRS]], 1.15)
        judge(f"{text} float32, as it loads", [ours / llama["float32"][THEIRS]], 3.0)
    trained = [r for r in rows if r["work"].startswith("training")]
    judge("training: share of the matmul peak", [r["share"] for r in trained], 0.25)
    judge("training: ours over transformers", [r["ratio"] for r in trained], 1.1)
    return claims


def measure(dtypes: list[torch.dtype], s: Settings, device: torch.device, _) -> dict:
    """Every row that was asked for."""
    forward = [forward_rows(s, name, device, dtypes) for name in s.model if "forward" in s.work]
    training = [training_rows(s, name, device) for name in TRAINED if "training" in s.work]
    return dict(rows=sum(forward + training, []))


def plan(words: list[str]) -> list:
    """The settings of a command line, and what to do."""
    work, words = common.subcommand(words, ("forward", "training", "all"), "all", "benchmark")
    s = common.parse_settings(Settings, __doc__, words)
    checkpoint.shared_context(s.model, s.sequence_length)
    if work == "training" and (s.model, s.sequence_length) != (Settings.model, Settings.sequence_length):
        raise UserError(f"training times {' and '.join(TRAINED)}, without --model and --sequence-length")
    if work == "training" and s.dtype == "float32":
        raise UserError("training is timed in bfloat16, as train.py's products are: without --dtype float32")
    s.work = s.work if work == "all" else (work,)
    dtypes = [torch.bfloat16, torch.float32] if s.dtype == "auto" else [getattr(torch, s.dtype)]
    columns = "model work sequence_length dtype ours transformers ratio share peak_gflops"
    made = partial(measure, dtypes)
    return [(s, partial(conduct, s, "bench", "", made, columns, judge=verdicts, plot=None))]


if __name__ == "__main__":
    common.run(plan)
