"""README.md against the committed results: its every table is what the JSON says.

`python tests/test_readme.py` prints the tables anew, to be pasted after new results.
"""

import contextlib
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, run_script
from scipy.stats import t

sys.path.insert(0, str(ROOT))

import experiment
import probe
import seedprint
import sinks
import train
from contraction import EXPERIMENTS
from contraction import Settings as ContractionSettings
from stats import split


def staged(name: str) -> str:
    """A result as git has it staged: `make probe` may have written another machine's over it."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout, so no telling which results are ours")
    command = ["git", "-C", str(ROOT), "show", f":results/{name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read(name: str) -> dict:
    """A staged JSON."""
    return json.loads(staged(name))


def probe_output() -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        experiment.print_result(read("probe.json"), probe.COLUMNS)
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


def claims_table() -> str:
    lines = ["| experiment | claim | measured | paper | |", "|---|---|---|---|---|"]
    for name in EXPERIMENTS:
        for claim in read(f"{name}.json")["claims"]:
            verdict = "holds" if claim["holds"] else "**does not hold**"
            paper = "n/a" if claim["paper"] is None else claim["paper"]
            lines.append(f"| `{name}` | {claim['claim']} | {claim['measured']} | {paper} | {verdict} |")
    return "\n".join(lines)


def sentences() -> list[str]:
    """The sentences of README's section on contraction that hold numbers."""
    rows = read("predict.json")["rows"]
    cosine = min(row["direction_cosine"] for row in rows)
    hits = sum(row["predicted_token"] == row["direction_token"] for row in rows)
    far = max(abs(row["mean_field_cosine"] - row["mean_cosine"]) for row in rows)
    predict = (
        f"for {len(rows)} seeds, in at most {max(row['seconds'] for row in rows):.1f} s each, the direction"
    )
    predict += (
        f" comes out with a cosine of at least {cosine:.3f} with the\nmeasured one, the same favourite token"
    )
    predict += f" in {hits} of {len(rows)}, and each newborn's own mean cosine to within {far:.3f}."
    inits = split(read("cure.json")["rows"], "init")
    plain, centered = ([row["mean_cosine"] for row in inits[init]] for init in ("gpt2", "centered"))
    cure = f"Over {len(plain)} seeds the mean cosine falls from {min(plain):.2f}–{max(plain):.2f} to at most"
    cure += f" {max(map(abs, centered)):.4f}, and the\ntop token's count to what uniform draws give."
    row = [row for row in read("nano_llama/layers.json")["rows"] if row["variant"] == "full"][-1]
    llama = f"For `nano_llama` at {row['sequence_length']} positions we measure {row['mean_cosine']:.4f};"
    llama += f" the kernel\nrecursion, with this term of order 1/d, says {row['theory']:.4f}."
    inits = split(read("nano_llama/cure.json")["rows"], "init")
    plain, centered, projected = (np.mean([row["mean_cosine"] for row in part]) for part in inits.values())
    llama += f" Centering does nothing for it ({plain:.4f} and\n{centered:.4f}, two seeds): its units' means"
    llama += f" differ in sign. Projecting out the mean output leaves {projected:.4f}."
    all_of_them, clear = (claim["measured"] for claim in read("overlap_20/overlap.json")["claims"])
    overlap = f"Over 20 seeds with 2,000 sequences each, it is for {all_of_them};\n"
    overlap += f"where the favourite leads the runner-up by two standard errors, for {clear}."
    last = json.loads(staged("laptop/metrics.jsonl").splitlines()[-1])
    laptop = "`configs/laptop.py` goes from ln 4096 = 8.3 nats a token"
    laptop += f" to {last['val_loss']:.2f} on\nheld-out text in {last['step']} steps"
    laptop += f" (training: {last['loss']:.2f})."
    files = {row["work"]: row for row in read("bench_files.json")["rows"]}
    speed = (
        f"Text is tokenized at {files['tokenize, tokenizer']['megabytes_per_second']:.1f} MB/s with a BPE of"
    )
    speed += f" 4,096; `nano_llama`\nis saved in {files['save nano_llama']['seconds']:.1f} s and loaded in"
    speed += f" {files['load nano_llama']['seconds']:.1f} s, checksums included (`python bench.py files`)."
    return [predict, cure, llama, overlap, laptop, speed]


def training_table() -> str:
    lines = [
        "| model | batch | ours: tokens/s | share of the matmul peak | × transformers |",
        "|---|---|---|---|---|",
    ]
    rows = split(read("bench_training.json")["rows"], "model")
    for model, (ours, theirs) in rows.items():
        batch = f"{ours['batch_size']} × {ours['sequence_length']}"
        line = f"| {model} | {batch} | {ours['tokens_per_second']:,.0f} | {ours['mfu']:.2f} "
        lines.append(line + f"| {theirs['speedup']:.2f} |")
    return "\n".join(lines)


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


def output(name: str, columns: str) -> str:
    """What an experiment printed: its rows and claims."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        experiment.print_result(read(name), columns)
    return text.getvalue().rstrip()


def compare_output() -> str:
    rows = read("compare.json")["rows"]
    columns = "suspect verdict relabel_z matched body_z body_matched embedding_z basis_free_z"
    verdicts = [f"{r['suspect']}: {r['verdict']} ({r['rests_on']})" for r in rows]
    return "\n".join([output("compare.json", columns), *verdicts])


def calibration_table() -> str:
    rows = split(read("calibrate.json")["rows"], "test", "inputs")
    first = next(iter(rows.values()))
    kinds = [f"{row['model']}, `{row['scheme']}`" for row in first]
    lines = [f"| test | what strangers read | {' | '.join(kinds)} |", "|---|---|" + "---|" * len(kinds)]
    for (test, inputs), part in sorted(rows.items(), key=lambda item: item[0][1] == "weights"):
        cells = [f"{100 * r['rate']:.1f} ({100 * r['low']:.1f}–{100 * r['high']:.1f})" for r in part]
        lines.append(f"| {test} | {inputs} | {' | '.join(cells)} |")
    return "\n".join(lines)


METHODS = {"paper_t_p": "t-test", "paper_u_p": "U-test", "intrinsic": "Intrinsic", "reef": "REEF"}
METHODS |= {"pcs": "PCS", "ics": "ICS", "relabelling": "relabelling, p < 0.01", "verdict": "`compare`"}


def lineage_table() -> str:
    lines = [f"| BB Table | pairs | {' | '.join(METHODS.values())} |", "|---|---|" + "---|" * len(METHODS)]
    for table, part in split(read("lineage.json")["rows"], "table").items():
        kin = sum(row["kin"] for row in part)
        pairs = (
            f"{kin} kin" if kin == len(part) else f"{len(part)} strangers" if not kin else "1 kin, 1 stranger"
        )
        right = [sum(row[f"{name}_right"] for row in part) for name in METHODS]
        lines.append(f"| {table} | {pairs} | {' | '.join(f'{n} of {len(part)}' for n in right)} |")
    return "\n".join(lines)


def cost_table() -> str:
    lines = ["| test | tokens | × fewer than 10,000 × 1,024 | seconds | log10 p |", "|---|---|---|---|---|"]
    for row in read("cost.json")["rows"]:
        fewer = f"{row['times_fewer_tokens']:,.0f}" if row["tokens"] else "none needed"
        cells = f"{row['tokens']:,} | {fewer} | {row['seconds']:.1f} | {row['log10_p']:.0f}"
        lines.append(f"| {row['test']} | {cells} |")
    return "\n".join(lines)


def lineage_sentences() -> list[str]:
    """The sentences of README's section on lineage that hold numbers."""
    found = read("identify.json")
    best, second = found["rows"][:2]
    seed = f"It names seed {best['seed']} among {found['candidates']:,} in"
    seed += f" {found['environment']['seconds']:.0f} seconds (cosine {best['cosine']:.2f}; the next"
    seed += f" best: {second['cosine']:.3f})."
    evaded = {row["suspect"].split("/")[-1]: row for row in read("evade/compare.json")["rows"]}
    evasion = "rotated z = {:.0f}, permuted z = {:.0f}".format(
        *(evaded[k]["basis_free_z"] for k in ("rotate", "permute"))
    )
    streaming = read("bench_streaming.json")["rows"]
    size, peak = streaming[0]["parameters"] / 1e9, max(row["anonymous_gb"] for row in streaming)
    minutes = " and ".join(f"{row['seconds'] / 60:.0f}" for row in streaming)
    memory = f"A folder of {size:.1f}B parameters against a noised copy and a stranger: {minutes} minutes,"
    memory += f"\n{peak:.1f} GB of memory."
    return [memory, seed, evasion]


def calibrations_table() -> str:
    """Means over seeds, with half the width of their 95 % intervals by Student's t."""
    names = {"val_loss": "held-out loss", "text_loss": "on WikiText-2", "mean_alpha1": "mean alpha_1"}
    names |= {"max_alpha1": "highest head", "sink_rate": "sink rate", "dominance_ratio": "dominance ratio"}
    lines = [
        f"| trained on | calibration | {' | '.join(names.values())} |",
        "|---|---|" + "---|" * len(names),
    ]
    for (config, kind), part in split(read("calibrations.json")["rows"], "config", "calibration").items():
        cells = []
        for name in names:
            values = [row[name] for row in part]
            if None in values:
                cells.append("n/a")
                continue
            half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
            cells.append(f"{np.mean(values):.3f} ± {half:.3f}")
        lines.append(f"| {config} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def judged(name: str) -> str:
    """A result's claims as a table."""
    lines = ["| claim | measured | paper | |", "|---|---|---|---|"]
    for claim in read(name)["claims"]:
        verdict = "holds" if claim["holds"] else "**does not hold**"
        paper = "n/a" if claim["paper"] is None else claim["paper"]
        lines.append(f"| {claim['claim']} | {claim['measured']} | {paper} | {verdict} |")
    return "\n".join(lines)


def sinks_sentences() -> list[str]:
    """The sentences of README's section on sinks that hold numbers."""
    found = split(read("calibrations.json")["rows"], "config", "calibration")["backcopy", "none"]
    awake, asleep = (np.mean([row[key] for row in found]) for key in ("at_triggers", "elsewhere"))
    sleep = f"pays {asleep:.2f} of its attention to BOS, but at the triggers {awake:.3f}"
    rows = [row for row in read("sink_variance.json")["rows"] if row["theory"] and row["position"] >= 16]
    off = max(abs(row["std"] / row["theory"] - 1) for row in rows)
    return [sleep, f"within {100 * off:.1f} % of it from position 16 on"]


def sinks_blocks() -> list[str]:
    columns = "checkpoint sequence_length sink_rate mean_alpha1 max_alpha1 uniform_alpha1"
    tables = [output("backcopy/rate.json", columns), calibrations_table(), judged("calibrations.json")]
    return [*tables, judged("backcopy/intervene.json"), judged("laptop/intervene.json"), *sinks_sentences()]


def test_every_table_is_what_the_results_say():
    readme = (ROOT / "README.md").read_text()
    tables = [probe_output(), "\n".join(results_table()), "\n".join(bench_table())]
    tables += [claims_table(), training_table()]
    tables += [compare_output(), calibration_table(), lineage_table(), cost_table(), *lineage_sentences()]
    tables += sinks_blocks()
    for block in tables + sentences():
        assert block in readme, f"README.md should hold:\n{block}"


def test_every_file_and_flag_that_the_readme_names_exists():
    readme = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\(([\w./-]+)\)", readme):
        assert (ROOT / path).exists(), path
    described = {"probe": probe.Settings, "contraction": ContractionSettings, "train": train.Settings}
    described |= {f"sinks.py {name}": found[1] for name, found in sinks.EXPERIMENTS.items()}
    described |= {f"seedprint.py {name}": command[0] for name, command in seedprint.COMMANDS.items()}
    for script, settings in described.items():
        flags = {"--" + name.replace("_", "-") for name in settings.__dataclass_fields__}
        script = script if " " in script else f"{script}.py"
        for line in re.findall(rf"{re.escape(script)} (.*?)(?:  |`|\n|#)", readme):
            assert set(re.findall(r"--[\w-]+", line)) <= flags | {"--help"}, line
            assert script != "contraction.py" or (line.split() or ["all"])[0] in [*EXPERIMENTS, "all"], line


def test_the_fork_it_section_works(tmp_path):
    """Its two lines, put where they say, give a new preset; its snippet runs as it stands."""
    before, section = (ROOT / "README.md").read_text().split("## Fork it")
    (attention,), blocks = (re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in (before, section))
    done = run_script("-c", attention)
    assert done.returncode == 0 and "[8, 6, 8, 2]" in done.stdout, done.stderr
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
    names = ["probe", "ten_thousand/probe", "nano_llama/probe", *EXPERIMENTS]
    names += ["bench", "bench_training", "bench_files", "bench_streaming", "evade/compare", "lineage"]
    names += [*seedprint.COMMANDS, "many_rows/compare", "calibrations", "sink_variance"]
    names += [f"{run}/{name}" for run in ("backcopy", "laptop") for name in ("rate", "anatomy", "intervene")]
    for name in [*names, "overlap_20/overlap", "nano_llama/layers", "nano_llama/cure"]:
        assert re.fullmatch(r"[0-9a-f]{40}", read(f"{name}.json")["environment"]["commit"]), name


if __name__ == "__main__":
    print(
        probe_output(),
        *results_table(),
        *bench_table(),
        claims_table(),
        training_table(),
        *sentences(),
        compare_output(),
        calibration_table(),
        lineage_table(),
        cost_table(),
        *lineage_sentences(),
        *sinks_blocks(),
        sep="\n",
    )
