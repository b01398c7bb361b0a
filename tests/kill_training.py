"""Is a run that was killed, again and again, the run that was not? SIGKILL at random moments, then compare.

    python tests/kill_training.py 20

Trains a small model undisturbed; then the same run, killed after a random time and resumed until it is done,
as many times over as asked. Weights, optimiser and losses must come out the same, bit for bit.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import checkpoint
import data

FLAGS = "--model tiny_llama --sequence-length 16 --global-batch-size 4 --micro-batch-size 2 --max-iters 12"
FLAGS += " --warmup-iters 2 --eval-every 6 --eval-sequences 4 --save-every 3 --log-every 6"


def prepare(folder: Path) -> Path:
    """A small data set of Python text, as bytes."""
    text = folder / "text.txt"
    text.write_text(Path(random.__file__).read_text("utf-8") * 20)
    return data.prepare(
        data.Settings(source=(str(text),), tokenizer="bytes", held_out=0.2, out=str(folder / "tokens"))
    )


def command(tokens: Path, out: Path, *more: str) -> list[str]:
    """The training run's command line."""
    root = Path(__file__).parent.parent
    flags = [*FLAGS.split(), "--data", str(tokens), "--out", str(out), *more]
    return [sys.executable, str(root / "train.py"), *flags]


def outcome(run: Path) -> tuple[dict, dict, list]:
    """Final weights, optimiser state by parameter, and the numbers of metrics.jsonl that are not times."""
    last = checkpoint.steps(run)[-1]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [{k: v for k, v in row.items() if k not in ("tokens_per_second", "mfu")} for row in rows]
    state = checkpoint.load_state(last)["optimizer"]["state"]
    return checkpoint.load(str(last)).state_dict(), state, numbers


def same(a: tuple, b: tuple) -> bool:
    """Whether two outcomes are equal to the last bit."""
    weights = all(torch.equal(a[0][name], b[0][name]) for name in a[0].keys() | b[0].keys())
    state = all(torch.equal(a[1][i][key], b[1][i][key]) for i in a[1].keys() | b[1].keys() for key in a[1][i])
    return weights and state and a[2] == b[2]


def killed(tokens: Path, out: Path, draw: random.Random, longest: float, most: int = 6) -> tuple[int, tuple]:
    """Kill after random times below `longest` seconds, `most` times at most, and resume until it is done."""
    kills = 0
    while True:
        process = subprocess.Popen(
            command(tokens, out, "--resume"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _, error = process.communicate(timeout=draw.uniform(0.3, 1) * longest if kills < most else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0, error.decode()
        return kills, outcome(out)


def main() -> None:
    """Run as many killed runs as asked, after an undisturbed one."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        tokens, begun = prepare(Path(folder)), time.perf_counter()
        subprocess.run(command(tokens, Path(folder) / "whole"), check=True)
        took, expected = time.perf_counter() - begun, outcome(Path(folder) / "whole")
        for i in range(int(sys.argv[1])):
            kills, found = killed(tokens, Path(folder) / f"killed{i}", draw, took)
            print(
                f"run {i}: {kills} kills, {'same bits' if same(expected, found) else 'DIFFERENT'}", flush=True
            )
            if not same(expected, found):
                sys.exit(1)


if __name__ == "__main__":
    main()
