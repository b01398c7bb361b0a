"""README.md against the committed results: its every table is what the JSON says.

`python tests/test_readme.py` prints the tables anew, to be pasted after new results.
"""

import contextlib
import io
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

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
        add(cells(row)[0], "make probe", cells(row)[1], "n/a")
    flags = "--seed 42 --num-sequences 10000 --out results/ten_thousand"
    row = read("ten_thousand/probe.json")["rows"][0]
    add(cells(row)[0] + ", N = 10,000", f"python probe.py {flags}", cells(row)[1], "58.5 × (length n/a)")
    row = read("nano_llama/probe.json")["rows"][0]
    add(cells(row)[0], "python probe.py --model nano_llama --out results/nano_llama", cells(row)[1], "n/a")
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


def test_the_fork_it_section_works(tmp_path):
    """Its two lines, put where they say, give a new preset; its snippet runs as it stands."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    activation, preset = (line.split("  #")[0] for line in blocks[0].splitlines())
    for path in ROOT.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    source = (ROOT / "model.py").read_text()
    source = re.sub(r"(\nACTIVATIONS = .*\n)", lambda m: m[1] + activation + "\n", source)
    source = re.sub(r"(\nPRESETS = \{.*?\n\}\n)", lambda m: m[1] + preset + "\n", source, flags=re.DOTALL)
    source = source.replace("from dataclasses import dataclass", "from dataclasses import dataclass, replace")
    (tmp_path / "model.py").write_text(source)
    flags = ["--model", "nano_relu2", "--num-sequences", 2, "--sequence-length", 2, "--out", tmp_path / "out"]
    done = run_script(tmp_path / "probe.py", *flags)
    assert done.returncode == 0 and "nano_relu2" in done.stdout, done.stderr
    done = run_script("-c", blocks[1])
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 13, done.stderr


def test_committed_results_were_made_by_committed_code():
    for name in ("probe.json", "ten_thousand/probe.json", "nano_llama/probe.json", "bench.json"):
        assert re.fullmatch(r"[0-9a-f]{40}", read(name)["environment"]["commit"]), name


if __name__ == "__main__":
    print(probe_output(), *results_table(), *bench_table(), sep="\n")
