"""How fast is it, against the machine's limit and against transformers?

    python bench.py                                       # about eight minutes on 2 cores
    python bench.py --model nano_llama --sequence-length 512 --rounds 9

Each row is one way of computing the last position's final state for random sequences: this project's model
in bfloat16 and float32, and transformers' model of the same shape, without its head, in the same dtypes (it
loads in float32 unless told otherwise). Every contestant first picks its best batch size; then all take
turns, in alternating order, as do the matrix products that measure the device's peak. Medians count.
GFLOP/s counts the products the answer needs, the same for all: what a contestant computes beyond is its loss.
"""

import statistics
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

import common
from common import claim, setting
from init import newborn
from model import PRESETS, ModelConfig, forward_flops

COLUMNS = (
    "model sequence_length implementation dtype batch_size sequences_per_second gflops share_of_peak speedup"
)
TOKENS = "2048, on CUDA 65536"


@dataclass
class Settings(common.RunSettings):
    """What `bench.py` can be told; `--dtype auto` times both."""

    model: tuple[str, ...] = setting(("nano_gpt2", "nano_llama", "nano_qwen"), "presets to time", PRESETS)
    sequence_length: tuple[int, ...] = setting((64, 512, 1024), "tokens in a sequence")
    rounds: int = setting(3, "measurements of each contestant; the median counts")
    tokens: int | None = setting(
        None, "tokens in the largest batch tried, then a half and a quarter; " + TOKENS
    )


def transformers_model(config: ModelConfig) -> torch.nn.Module | None:
    """transformers' headless model of a preset's shape, random weights, SDPA; None if it is not installed.

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
    return transformers.LlamaModel(transformers.LlamaConfig(**shape)).eval()


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


def main() -> None:
    """Parse the command line, time everything, write bench.json and print the table."""
    settings = common.parse_settings(Settings, __doc__)
    context = min(PRESETS[name].context_length for name in settings.model)
    for T in settings.sequence_length:
        if not 1 <= T <= context:
            raise common.UserError(f"--sequence-length {T}: expected 1 to {context}, the models' context")
    if settings.rounds < 1 or (settings.tokens is not None and settings.tokens < 1):
        raise common.UserError("--rounds and --tokens: expected at least 1")
    device, dtype = common.start(settings)
    dtypes = [torch.bfloat16, torch.float32] if settings.dtype == "auto" else [dtype]
    tokens = settings.tokens or (65_536 if device.type == "cuda" else 2048)
    started, rows = time.perf_counter(), []
    for name in settings.model:
        entries = contestants(name, device, dtypes)
        for T in tqdm(settings.sequence_length, desc=name, unit=" lengths", disable=None):
            rows += forward_rows(name, T, entries, settings.rounds, tokens, device)
    environment = common.environment(device, dtype, started)
    common.report(settings, "bench", "", rows, verdicts(rows), COLUMNS, environment=environment)


if __name__ == "__main__":
    common.run(main)
