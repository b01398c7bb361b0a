"""How fast is it, against the machine's limit and against transformers?

    python bench.py                                       # all of it: about a quarter of an hour on 2 cores
    python bench.py forward --model nano_llama --sequence-length 512 --rounds 9
    python bench.py training                              # the loop of train.py; files: data and checkpoints
    python tests/write_shards.py /tmp/7b && python bench.py streaming --folder /tmp/7b

In `forward`, each row is one way of computing the last position's final state for random sequences: this
project's model in bfloat16 and float32, and transformers' model of the same shape, without its head, in the
same dtypes (it loads in float32 unless told otherwise). Each contestant first picks its best batch size; then
all take turns, in alternating order, as do the matrix products that measure the device's peak. Medians count.
GFLOP/s counts the products the answer needs, the same for all: what a contestant computes beyond is its loss.
In `training`, both models go through train.py's forward and backward pass, in bfloat16, clipping and AdamW.
`streaming` compares a checkpoint folder with a noised copy and with a stranger, both made as they are read.
"""

import contextlib
import math
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import common
import data
import evidence
from common import UserError, claim, setting
from init import draw, newborn
from model import PRESETS, ModelConfig, forward_flops
from train import loss_sum

COLUMNS = "model sequence_length implementation dtype batch_size sequences_per_second gflops share_of_peak"
COLUMNS += " speedup"
TRAINED = {"tiny_llama": (32, 256), "nano_llama": (4, 512)}  # batch size, sequence length; on CUDA 32 x 2048
TOKENS = "2048, on CUDA 65536"


@dataclass
class Settings(common.RunSettings):
    """What `bench.py` can be told; `--dtype auto` times both."""

    model: tuple[str, ...] = setting(("nano_gpt2", "nano_llama", "nano_qwen"), "presets to time", PRESETS)
    sequence_length: tuple[int, ...] = setting((64, 512, 1024), "tokens in a sequence")
    rounds: int = setting(3, "measurements of each contestant; the median counts")
    tokens: int | None = setting(None, "tokens in the largest batch tried of three; " + TOKENS)
    megabytes: int = setting(30, "of text to tokenize in `files`")
    folder: str | None = setting(None, "checkpoint folder for `streaming`")


def transformers_model(config: ModelConfig, head: bool = False) -> torch.nn.Module | None:
    """transformers' model of a preset's shape, random weights, SDPA; None if it is not installed.

    For the GPT-2 style it is GPT-NeoX without parallel residual: the one there with RoPE, LayerNorm and GELU.
    """
    try:
        import transformers
    except ImportError:
        return None
    shape = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.context_length,
        attn_implementation="sdpa",
    )
    if config.mlp == "gelu":
        rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0}
        shape |= {"rope_parameters": rope, "use_parallel_residual": False, "hidden_act": "gelu"}
        return transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**shape)).eval()
    if config.qkv_bias:
        return transformers.Qwen2Model(transformers.Qwen2Config(**shape)).eval()
    kind = transformers.LlamaForCausalLM if head else transformers.LlamaModel
    return kind(transformers.LlamaConfig(**shape)).eval()


def contestants(name: str, device: torch.device, dtypes: list[torch.dtype]) -> dict:
    """(implementation, dtype) -> a function from tokens (B, T) to last-position states (B, d)."""
    entries = {}
    for dtype in dtypes:
        ours, theirs = newborn(name, 0, device=device, dtype=dtype), transformers_model(PRESETS[name])
        entries["bornbiased", dtype] = lambda tokens, ours=ours: ours.hidden(tokens, last_only=True)
        if theirs is not None:
            theirs = theirs.to(device, dtype)
            entries["transformers", dtype] = lambda tokens, m=theirs: m(tokens, use_cache=False)[0][:, -1]
    return entries


def seconds(work, *arguments) -> float:
    """Seconds that `work(*arguments)` takes; reading a number of its tensor waits for the device."""
    begun = time.perf_counter()
    work(*arguments).flatten()[0].item()
    return time.perf_counter() - begun


@torch.inference_mode()
def forward_rows(
    name: str, T: int, entries: dict, rounds: int, most: int, device: torch.device
) -> list[dict]:
    """One row for each contestant at length T."""
    config, times = PRESETS[name], {entry: [] for entry in entries}
    sizes = sorted({max(1, most // part // T) for part in (1, 2, 4)})
    tokens = torch.randint(config.vocab_size, (sizes[-1], T), device=device)
    best = {}
    for entry, work in entries.items():
        work(tokens[:1])  # the first call allocates
        best[entry] = min(
            sizes, key=lambda n, work=work: min(seconds(work, tokens[:n]) for _ in range(2)) / n
        )
    peaks = {dtype: [] for _, dtype in entries}
    for turn in range(rounds):
        for dtype in peaks:
            peaks[dtype].append(common.matmul_peak(device, dtype))
        for entry in list(entries)[:: 1 if turn % 2 else -1]:
            n = best[entry]
            times[entry].append(seconds(entries[entry], tokens[:n]) / n)
    rows = []
    for (implementation, dtype), samples in times.items():
        rate = 1 / statistics.median(samples)
        flops, peak = rate * forward_flops(config, T, last_only=True), statistics.median(peaks[dtype])
        ours = 1 / statistics.median(times[next(iter(times))])  # the first contestant: our fastest dtype
        rows.append(
            {
                "model": name,
                "sequence_length": T,
                "implementation": implementation,
                "dtype": str(dtype).removeprefix("torch."),
                "batch_size": best[implementation, dtype],
                "sequences_per_second": rate,
                "gflops": flops / 1e9,
                "peak_gflops": peak / 1e9,
                "share_of_peak": flops / peak,
                "speedup": ours / rate,  # of our fastest dtype over this row
            }
        )
    return rows


def training_rows(name: str, rounds: int, device: torch.device) -> list[dict]:
    """Training steps of ours and of transformers' model, taking turns, in bfloat16 with float32 weights."""
    config, (B, T) = PRESETS[name], (32, 2048) if device.type == "cuda" else TRAINED[name]
    ours, theirs = newborn(name, 0, device=device).train(), transformers_model(config, head=True)
    entries = {"bornbiased": (ours, ours)}
    if theirs is not None:
        theirs = theirs.to(device).train()
        entries["transformers"] = (theirs, lambda tokens: theirs(tokens, use_cache=False).logits)
    window = torch.randint(config.vocab_size, (B, T + 1), device=device)

    def step(model, logits, optimizer) -> torch.Tensor:
        loss = loss_sum(logits, window[:, :-1], window[:, 1:], device, torch.bfloat16) / (B * T)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    optimizers = {
        key: torch.optim.AdamW(model.parameters(), fused=True) for key, (model, _) in entries.items()
    }
    times, peaks = {key: [] for key in entries}, []
    for turn in tqdm(range(rounds + 1), desc=f"training {name}", unit=" rounds", disable=None):
        peaks.append(common.matmul_peak(device, torch.bfloat16))
        for key in list(entries)[:: 1 if turn % 2 else -1]:
            times[key].append(seconds(step, *entries[key], optimizers[key]))
    rows, flops = [], 3 * (forward_flops(config, T) + 2 * T * config.d_model * config.vocab_size)
    ours = statistics.median(times["bornbiased"][1:])  # the first step of each allocates
    for key, samples in times.items():
        took, row = statistics.median(samples[1:]), dict(model=name, batch_size=B, sequence_length=T)
        row |= dict(implementation=key, tokens_per_second=B * T / took)
        rows.append(row | dict(mfu=B * flops / took / statistics.median(peaks), speedup=took / ours))
    return rows


def file_rows(megabytes: int, device: torch.device) -> list[dict]:
    """MB/s of tokenizing this Python's source, and seconds to save and load nano_llama's weights."""
    rows, sources, model = [], iter(data.sources(("python",))), newborn("nano_llama", 0, device=device)
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "text.txt").open("w", errors="replace") as text,
    ):
        while text.tell() < megabytes * 10**6 and (source := next(sources, None)):
            text.writelines(data.documents(source, "", False))
        text.flush()
        for name in ("bpe:4096", f"{folder}/0/tokenizer.model", "bytes"):
            out, begun = f"{folder}/{len(rows)}", time.perf_counter()
            data.prepare(data.Settings(source=(text.name,), tokenizer=name, held_out=0.1, out=out))
            took = time.perf_counter() - begun
            work = "train bpe:4096 and tokenize" if not rows else f"tokenize, {Path(name).stem}"
            rows.append(dict(work=work, seconds=took, megabytes_per_second=text.tell() / took / 1e6))
        for work, act in (("save", checkpoint.save), ("load", lambda path, _: checkpoint.load(str(path)))):
            begun = time.perf_counter()
            act(Path(folder) / "model", model)
            rows.append(dict(work=f"{work} nano_llama", seconds=time.perf_counter() - begun))
    return rows


class Noised:
    """A source's tensors in bfloat16 with noise of `share` of their own std, made as they are read."""

    def __init__(self, source, share: float):
        self.source, self.share, self.config, self.shapes = source, share, source.config, source.shapes

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        weight = self.source.read(name)
        if weight.ndim == 2 and self.share:
            weight.add_(draw(-1, name, weight.shape, self.share * weight[:1024].float().std().item()))
        return weight.bfloat16()


@contextlib.contextmanager
def anonymous_peak():
    """A list that receives the peak of anonymous resident memory in the block, in bytes (Linux)."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            status = Path("/proc/self/status").read_text()
            peak[0] = max(peak[0], 1024 * int(status.split("RssAnon:")[1].split()[0]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def streaming_rows(folder: str, device: torch.device, dtype: torch.dtype) -> list[dict]:
    """Seconds and peak memory of comparing a folder with a noised copy and with a stranger."""
    base, rows = checkpoint.tensors(folder), []
    at = (16, 64, 0, base.config.vocab_size, device, dtype)
    size = sum(math.prod(shape) for shape in base.shapes.values())
    suspects = {"noised copy": Noised(base, 0.1), "stranger": Noised(checkpoint.Newborn(base.config, 1), 0)}
    for name, suspect in suspects.items():
        begun = time.perf_counter()
        with anonymous_peak() as peak:
            prints = [evidence.all_positions(source, *at) for source in (base, suspect)]
            read = time.perf_counter() - begun
            row, _ = evidence.compare_pair(base, suspect, prints, 0, 9999)
        row = {key: row[key] for key in ("verdict", "relabel_z", "body_z", "basis_free_z")}
        times = dict(states_seconds=read, seconds=time.perf_counter() - begun)
        rows.append(dict(suspect=name, parameters=size) | times | dict(anonymous_gb=peak[0] / 1e9) | row)
    return rows


def streaming_verdicts(rows: list[dict]) -> list[dict]:
    """The targets of layer streaming."""
    peak, found = max(row["anonymous_gb"] for row in rows), [row["verdict"] for row in rows]
    text = f"{rows[0]['parameters'] / 1e9:.1f}B parameters are compared in less than 3 GB of memory"
    right = found == ["same birth", "no evidence"]
    text_right = "the copy is kin and the stranger is not"
    return [claim(text, None, f"{peak:.2f} GB", peak < 3), claim(text_right, None, ", ".join(found), right)]


def verdicts(rows: list[dict]) -> list[dict]:
    """The project's speed targets, judged on the rows that speak of them."""
    found = {(r["model"], r["sequence_length"], r["implementation"], r["dtype"]): r for r in rows}
    claims = []
    for dtype, target in (("float32", 0.90), ("bfloat16", 0.72)):
        shares = [r["share_of_peak"] for key, r in found.items() if key[1:] == (64, "bornbiased", dtype)]
        if shares:
            text = f"T=64 in {dtype}: at least {target} of the matmul peak"
            claims.append(claim(text, None, [round(share, 3) for share in shares], min(shares) >= target))
    for dtype, target in (("bfloat16", 1.15), ("float32", 3.0)):
        row = found.get(("nano_llama", 512, "transformers", dtype))
        if row:
            text = f"nano_llama, T=512, bfloat16: at least {target} x transformers in {dtype}"
            claims.append(claim(text, None, round(row["speedup"], 3), row["speedup"] >= target))
    return claims


def training_verdicts(rows: list[dict]) -> list[dict]:
    """Targets of the training loop: a quarter of the peak, and faster than transformers."""
    claims = []
    for row in rows:
        if row["implementation"] == "transformers":
            text, ratio = f"{row['model']}: at least 1.1 x transformers in the same loop", row["speedup"]
            claims.append(claim(text, None, round(ratio, 3), ratio >= 1.1))
        else:
            text = f"{row['model']}: at least 0.25 of the matmul peak"
            claims.append(claim(text, None, round(row["mfu"], 3), row["mfu"] >= 0.25))
    return claims


def file_verdicts(rows: list[dict]) -> list[dict]:
    """The target of data preparation."""
    rate = next(row["megabytes_per_second"] for row in rows if row["work"] == "tokenize, tokenizer")
    return [claim("at least 3 MB/s with a BPE of 4,096 tokens", None, round(rate, 2), rate >= 3)]


def check(settings: Settings) -> None:
    """UserError for numbers that make no sense."""
    checkpoint.shared_context(settings.model, settings.sequence_length)
    if min(settings.rounds, settings.megabytes, settings.tokens or 1) < 1 or settings.tokens == 0:
        raise UserError("--rounds, --tokens and --megabytes: expected at least 1")


def main() -> None:
    """Parse the command line, time what was asked for, write JSON and print the tables."""
    choices = ("forward", "training", "files", "streaming", "all")
    chosen, arguments = common.subcommand(choices, "all", "benchmark")
    settings = common.parse_settings(Settings, __doc__, arguments)
    check(settings)
    if chosen == "streaming" and not (settings.folder and Path("/proc/self/status").exists()):
        raise UserError(
            "streaming expects Linux and --folder: python tests/write_shards.py makes one of 13 GB"
        )
    device, dtype = common.start(settings)

    def report(name: str, rows: list[dict], claims: list[dict], columns: str, started: float) -> None:
        environment = common.environment(device, dtype, started)
        common.report(settings, name, "", rows, claims, columns, environment=environment)

    if chosen in ("forward", "all"):
        dtypes = [torch.bfloat16, torch.float32] if settings.dtype == "auto" else [dtype]
        tokens = settings.tokens or (65_536 if device.type == "cuda" else 2048)
        started, rows = time.perf_counter(), []
        for name in settings.model:
            entries = contestants(name, device, dtypes)
            for T in tqdm(settings.sequence_length, desc=name, unit=" lengths", disable=None):
                rows += forward_rows(name, T, entries, settings.rounds, tokens, device)
        report("bench", rows, verdicts(rows), COLUMNS, started)
    if chosen in ("training", "all"):
        started = time.perf_counter()
        rows = [row for name in TRAINED for row in training_rows(name, settings.rounds, device)]
        report("bench_training", rows, training_verdicts(rows), " ".join(rows[0]), started)
    if chosen in ("files", "all"):
        started, rows = time.perf_counter(), file_rows(settings.megabytes, device)
        report("bench_files", rows, file_verdicts(rows), "work seconds megabytes_per_second", started)
    if chosen == "streaming":
        started, rows = time.perf_counter(), streaming_rows(settings.folder, device, dtype)
        columns = " ".join(rows[0])
        report("bench_streaming", rows, streaming_verdicts(rows), columns, started)


if __name__ == "__main__":
    common.run(main)
