"""README.md against the committed results: its every table is what the JSON says.

`python tests/test_readme.py` prints the tables anew, to be pasted after new results.
"""

import contextlib
import io
import json
import re
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))

import common
import probe


def read(name: str) -> dict:
    """A result as git has it staged: `make probe` may have written another machine's over it."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout, so no telling which results are ours")
    command = ["git", "-C", str(ROOT), "show", f":results/{name}"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def probe_output() -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        common.print_result(read("probe.json"), probe.COLUMNS)
    return text.getvalue().rstrip()


def results_table() -> list[str]:
    lines = []

    def add(what, command, measured, paper):
        lines.append(f"| {what} | `{command}` | {measured} | {paper} |")

    def cells(row):
        measured = (
            f"token {row['top1_token']}, {100 * row['top1_frequency']:.1f} %, {row['ratio']:.1f} × uniform"
        )
        measured += f", log10 p {row['log10_p']:.1f}, mean cosine {row['mean_cosine']:.4f}"
        return f"Table 1: {row['model']}, seed {row['seed']}, T = {row['sequence_length']}", measured

    for row in read("probe.json")["rows"]:
        add(cells(row)[0], "make probe", cells(row)[1], "lost")
    flags = "--model nano_gpt2 nano_llama --seed 42 43 --sequence-length 64 256 --out results/lengths"
    for row in read("lengths/probe.json")["rows"]:
        if (row["model"], row["sequence_length"]) != ("nano_gpt2", 64):  # as above
            add(cells(row)[0], f"python probe.py {flags}", cells(row)[1], "lost")
    command = "python probe.py --seed {42..61} --out results/seeds"
    seeds = read("seeds/probe.json")["rows"]
    ratios, cosines = [row["ratio"] for row in seeds], [row["mean_cosine"] for row in seeds]
    measured = f"{min(ratios):.1f} to {max(ratios):.1f} ×, median {statistics.median(ratios):.1f} ×"
    add("Figure 1a: top token over uniform draws, seeds 42-61", command, measured, "58.5 × at N = 10,000")
    measured = f"{min(cosines):.3f} to {max(cosines):.3f}, mean {statistics.mean(cosines):.3f}"
    add("the same: mean cosine", command, measured, "lost")
    matches = f"{sum(row['direction_matches'] for row in seeds)} of {len(seeds)}"
    add("Finding 2.2: the mean direction names the top token", command, matches, "lost; N = 2,000, T = 1,024")
    return lines


def bench_table() -> list[str]:
    rows = {
        (r["model"], r["sequence_length"], r["implementation"], r["dtype"]): r
        for r in read("bench.json")["rows"]
    }
    lines = [
        "| model | T | ours, bf16: sequences/s | share | ours, fp32: share | × transformers bf16 | × fp32 |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for model, T in dict.fromkeys(key[:2] for key in rows):
        ours, exact = (rows[model, T, "bornbiased", dtype] for dtype in ("bfloat16", "float32"))
        theirs = [rows[model, T, "transformers", dtype]["speedup"] for dtype in ("bfloat16", "float32")]
        line = f"| {model} | {T} | {ours['sequences_per_second']:.1f} | {ours['share_of_peak']:.2f} "
        lines.append(line + f"| {exact['share_of_peak']:.2f} | {theirs[0]:.2f} | {theirs[1]:.2f} |")
    return lines


def test_every_table_is_what_the_results_say():
    readme = (ROOT / "README.md").read_text()
    for block in (probe_output(), "\n".join(results_table()), "\n".join(bench_table())):
        assert block in readme, f"README.md should hold:\n{block}"


def test_every_file_and_flag_that_the_readme_names_exists():
    readme = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\(([\w./-]+)\)", readme):
        assert (ROOT / path).exists(), path
    flags = {"--" + name.replace("_", "-") for name in probe.Settings.__dataclass_fields__}
    for line in re.findall(r"python probe.py (.*?)(?:  |`|\n|#)", readme):
        assert set(re.findall(r"--[\w-]+", line)) <= flags | {"--help"}, line


def test_committed_results_were_made_by_committed_code():
    for name in ("probe.json", "seeds/probe.json", "lengths/probe.json", "bench.json"):
        assert re.fullmatch(r"[0-9a-f]{40}", read(name)["environment"]["commit"]), name


if __name__ == "__main__":
    print(probe_output(), *results_table(), *bench_table(), sep="\n")
