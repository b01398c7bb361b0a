"""README.md and results/README.md against the committed results: every number is what the JSON says.

After new results: `git add results && PYTHONPATH=.:tests python tests/test_readme.py` puts their numbers in
the place of those of the last commit.
"""

import contextlib
import functools
import io
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, run_script
from scipy.stats import t

sys.path.insert(0, str(ROOT))

import checkpoint
import experiment
import families
import findings
import init
import kinship
import paper
import probe
import seedprint
import sinks
import train
from contraction import EXPERIMENTS
from contraction import Settings as ContractionSettings
from stats import column, interval, split

STAGED = ""  # where `git show` finds a file: "" is the index, "HEAD" the last commit


def staged(name: str) -> str:
    """A result as git has it staged: `make probe` may have written another machine's over it."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout, so no telling which results are ours")
    command = ["git", "-C", str(ROOT), "show", f"{STAGED}:results/{name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read(name: str) -> dict:
    """A staged JSON."""
    return json.loads(staged(name))


def probe_output() -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        experiment.print_result(read("probe.json"), probe.COLUMNS)
    return text.getvalue().rstrip()


HEADLINES = (
    "Figure 1a",
    "Table 1b, T = 64",
    "Finding 2.1, Figure 2",
    "Finding 2.2",
    "Footnote 5",
    "Table 3",
)
HEADLINES += ("Proposition 5", "Figure 9, Equation 2", "Figure 11", "Figure 14", "Table 7")
HEADLINES += ("Ours: the cure", "Ours: which seed?")


def headlines() -> str:
    """Some lines of results/README.md, without the column of figures."""
    lines = []
    for line in staged("README.md").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and cells[0] in (*HEADLINES, "of the paper", "---"):
            lines.append(f"| {' | '.join(cells[:6] + cells[7:])} |")
    return "\n".join(lines)


def summary() -> str:
    """What results/README.md says of itself."""
    return next(line for line in staged("README.md").splitlines() if line.startswith("Claims that hold"))


def sentences() -> list[str]:
    """The sentences of README's section on contraction that hold numbers."""
    rows = read("predict.json")["rows"]
    cosine = min(row["direction_cosine"] for row in rows)
    hits = sum(row["predicted_token"] == row["direction_token"] for row in rows)
    far = max(abs(row["mean_field_cosine"] - row["mean_cosine"]) for row in rows)
    slowest = ceil(max(row["seconds"] for row in rows), 1)
    predict = (
        f"for {len(rows)} seeds, in at most {slowest} s each, the direction comes out with a cosine of at"
    )
    predict += f" least {-ceil(-cosine, 3)} with the\nmeasured one, the same nearest token in {hits} of"
    predict += f" {len(rows)}, and each newborn's own mean cosine to within {ceil(far, 3)}. That\ntoken"
    tops = sum(row["predicted_token"] == row["top1_token"] for row in rows)
    predict += f" is also the most frequent one for {tops} of {len(rows)}."
    inits = split(read("cure.json")["rows"], "init")
    plain, centered = ([row["mean_cosine"] for row in inits[init]] for init in ("gpt2", "centered"))
    cure = f"Over {len(plain)} seeds the mean cosine falls from {min(plain):.2f}–{max(plain):.2f} to at most"
    counts = {init: sorted(row["top1_count"] for row in part) for init, part in inits.items()}
    (low, *_, high), (least, *_, most) = counts["gpt2"], counts["centered"]
    cure += (
        f" {max(map(abs, centered)):.4f}, and the\ntop token's count of {inits['gpt2'][0]['num_sequences']}"
    )
    cure += f" from {low}–{high} to {least}–{most}, where uniform draws give 1 or 2."
    row = [row for row in read("nano_llama/layers.json")["rows"] if row["variant"] == "full"][-1]
    llama = f"For `nano_llama` at {row['sequence_length']} positions we measure {row['mean_cosine']:.4f};"
    llama += f" the kernel\nrecursion, with this term of order 1/d, says {row['theory']:.4f}:"
    llama += f"\nonly {100 * row['theory'] / row['mean_cosine']:.0f} % of it."
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
    many = read("ten_thousand/probe.json")["rows"][0]
    thousands = f"seed 42's favourite comes up {many['ratio']:.1f} times as often as in uniform draws"
    rows = read("probe.json")["rows"], read("centered/probe.json")["rows"]
    counts, cosines = (
        [" and ".join(form.format(row[key]) for row in part) for part in rows]
        for key, form in (("top1_count", "{}"), ("mean_cosine", "{:.4f}"))
    )
    tokens = f"the favourites of seeds 42 and 43 come up {counts[0]} times when born\nby `gpt2`, {counts[1]}"
    tokens += " times when born by `centered`; uniform draws give"
    tokens += f" {rows[0][0]['uniform_max_count']:.1f} (mean cosines\n{cosines[0]}; {cosines[1]};"
    tokens += " `python probe.py --seed 42 43 --init centered`)."
    bare = split([row for row in read("intra.json")["rows"] if row["stack"] == "attn0"], "sequence_length")
    off = {T: max(abs(row["mean_cosine"] - row["limit_theory"]) for row in part) for T, part in bare.items()}
    limit = f"long sequences ({off[512]:.3f} off at 512 positions, {off[32]:.3f} at 32)"
    return [predict, limit, cure, tokens, llama, overlap, laptop, thousands, births()]


def ceil(value: float, digits: int) -> float:
    """Rounded up: what is said to be at most this is."""
    return math.ceil(value * 10**digits) / 10**digits


def births() -> str:
    """What `families.py births` found."""
    plain, centered = split(read("births.json")["rows"], "init").values()
    found = {key: column(centered, key) - column(plain, key) for key in ("val_loss", "mean_loss")}
    end, mean = ("{mean:+.2f} ({low:+.2f} to {high:+.2f})".format(**interval(v)) for v in found.values())
    cosines = [column(part, "mean_cosine").mean() for part in (plain, centered)]
    text = f"In held-out loss, the unprejudiced end {end} nats away, and are {mean}\naway in the mean of all"
    by_seed = ", ".join(f"{value:+.2f}" for value in found["val_loss"])
    text += f" evaluations after birth (95 % intervals; held out, seed by seed: {by_seed}). And training"
    text += " contracts by itself:\nunrelated random sequences"
    return text + " end with a mean cosine of {:.2f} (prejudiced) and {:.2f}.".format(*cosines)


def answers() -> str:
    """README's first table: questions, commands, and what came out."""
    newborn, many = read("probe.json")["rows"][0], read("ten_thousand/probe.json")["rows"][0]
    preference = f"token {newborn['top1_token']} {newborn['top1_count']} times of"
    preference += f" {newborn['num_sequences']:,}, where the luckiest of uniform draws comes up"
    preference += f" {newborn['uniform_max_count']:.0f} times; of {many['num_sequences']:,},"
    preference += f" {many['ratio']:.0f} times as often as that"
    rows = [r for r in read("layers.json")["rows"] if (r["variant"], r["sequence_length"]) == ("full", 64)]
    contraction = f"states of unrelated sequences contract: mean cosine {rows[-1]['mean_cosine']:.2f}; by"
    contraction += f" theory, with no free parameter, {rows[-1]['theory']:.2f}"
    kin, _, stranger, _ = read("compare.json")["rows"]
    verdict = f"a child's weights: z = {kin['body_z']:.0f}, a stranger's that read the same:"
    verdict += f" {stranger['body_z']:.1f}. Which of"
    verdict += " {candidates:,} seeds: {environment[seconds]:.0f} s".format(**read("identify.json"))
    runs = split(read("calibrations.json")["rows"], "config", "calibration")
    asleep = column(runs["backcopy", "none"], "elsewhere").mean()
    none, free = (sum(column(runs["backcopy", kind], "sink_rate") < 0.01) for kind in ("none", "attenuate"))
    sink = (
        f"not at birth; a head trained for a minute pays {asleep:.2f} of its attention to BOS, unless it has"
    )
    sink += f" work to do; `attenuate` leaves {free} of {len(runs['backcopy', 'none'])} such models without a"
    sink += f" sink, no calibration {none}"
    plain, centered = split(read("births.json")["rows"], "init").values()
    change = interval(column(centered, "val_loss") - column(plain, "val_loss"))
    birth = "better" if change["high"] < 0 else "worse" if change["low"] > 0 else "not told apart"
    birth += ": held-out loss {mean:+.2f} nats ({low:+.2f} to {high:+.2f})".format(**change)
    asked = (
        ("Which tokens does my untrained model already prefer?", "probe.py --seed 42", "a minute",
         preference),
        ("Why?", "contraction.py", "ten minutes", contraction),
        ("Is this checkpoint a child of that one, and of which seed?", "seedprint.py compare BASE SUSPECT",
         "seconds", verdict),
        ("Where does attention sink, and can I train without?", "sinks.py", "seconds", sink),
        ("Is an unprejudiced birth a better one?", "families.py births", "35 minutes", birth),
        ("Do the papers hold?", "paper.py --out mine", "four hours",
         "of BB's claims {} hold, {} do not, {} are open: [results](results/README.md)".format(
             *re.search(r"BB (\d+)/(\d+)/(\d+)", summary()).groups())),
    )  # fmt: skip
    lines = ["| you may have come to ask | | takes | what comes out |", "|---|---|---|---|"]
    for question, command, takes, answer in asked:
        anchor = re.sub(r"[^a-z -]", "", question.split(", and of")[0].lower()).replace(" ", "-")
        lines.append(f"| [{question}](#{anchor}) | `python {command}` | {takes} | {answer} |")
    return "\n".join(lines)


def calibration_headline() -> str:
    """The table of errors at a glance."""
    found = split(read("calibrate.json")["rows"], "test", "inputs")

    def rate(test: str, inputs: str, *schemes: str) -> str:
        rows = [row for row in found[test, inputs] if row["scheme"] in schemes]
        rates = [100 * row["rate"] for row in rows]
        low, high = (f"{f(rates):.1f}".removesuffix(".0") for f in (min, max))
        ends = (f"{100 * f(row[key] for row in rows):.0f}" for f, key in ((min, "low"), (max, "high")))
        return (f"{low} %" if low == high else f"{low} to {high} %") + " ({} to {})".format(*ends)

    lines = [
        "| strangers called kin at p ≤ 0.01: 1 % is right | each reads by its own table | both read the same"
    ]
    lines[0] += (
        " Gaussian vectors, born by BB's scheme | the same, born by Hugging Face's |\n|---|---|---|---|"
    )
    tests = {"t-test": "the paper's t-test", "U-test": "the paper's U-test"}
    for test, title in (tests | {"relabelling": "ours: activations"}).items():
        cells = [rate(test, "own embedding", "gpt2", "normal")]
        cells += [rate(test, "gaussian", scheme) for scheme in ("gpt2", "normal")]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, f"| ours: weights, which read nothing | {rate('weights', 'weights', 'gpt2')} | | |"]
    )


def stray() -> str:
    """What README says of the test of weights that strays."""
    weights = [row for row in read("calibrate.json")["rows"] if row["test"] == "weights"]
    worst = max(weights, key=lambda row: row["rate"])
    text = (
        f"Of `{worst['model']}`'s weights, {worst['rejections']} pairs in {worst['num_pairs']} are rejected,"
    )
    text += " more than the interval allows, while\ntheir p are uniform by Kolmogorov and Smirnov's test (p"
    text += f" = {worst['ks_p']:.2f}): the test is exact by construction,\nand of such intervals one in a"
    return text + " hundred misses."


def interventions() -> str:
    """What `sinks.py intervene` found on the model with a sink."""
    rows = {
        (row["intervention"], row["factor"]): row["alpha_k"]
        for row in read("backcopy/intervene.json")["summary"]
    }
    last = max(factor for kind, factor in rows if kind == "amplify")
    text = f"Moved {last:g} times as far from their mean, its values take position 5's attention from"
    text += (
        f" {rows['none', None]:.4f} to {rows['amplify', last]:.4f}; merely scaled\nby {last:g}, the control,"
    )
    text += f" to {rows['scale', last]:.4f}; attending only to itself, to {rows['self_mask', None]:.4f}."
    return text


def bench_table() -> str:
    names = "model work sequence_length dtype ours transformers ratio share".split()
    titles = ["model", "work", "T", "dtype", "ours", "transformers", "ratio", "share of the limit"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(names) + "|"]
    for row in read("bench.json")["rows"]:
        cells = [f"{row[name]:,.0f}" if name in ("ours", "transformers") else row[name] for name in names[:6]]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['ratio']:.2f} | {row['share']:.2f} |")
    return "\n".join(lines)


def bench_note() -> str:
    result = read("bench.json")
    of = {d: [row["peak_gflops"] for row in part] for d, part in split(result["rows"], "dtype").items()}
    ranges = (f"{min(of[d]):.0f} to {max(of[d]):.0f}" for d in ("bfloat16", "float32"))
    text = "the limit, measured beside each row, was {} GFLOP/s in bfloat16 and {} in float32,".format(
        *ranges
    )
    return f"{text}\non {result['environment']['threads']} cores of an {result['environment']['device']}."


def output(name: str, columns: str) -> str:
    """What an experiment printed: its rows and claims."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        experiment.print_result(read(name), columns)
    return text.getvalue().rstrip()


def compare_output() -> str:
    rows = read("compare.json")["rows"]
    verdicts = [f"{r['suspect']}: {r['verdict']} ({r['rests_on']})" for r in rows]
    return "\n".join([output("compare.json", seedprint.VERDICT + seedprint.JUDGED), *verdicts])


def calibration_table() -> str:
    """Rejection rates in per cent, with their intervals; what was measured once stands once."""
    rows = split(read("calibrate.json")["rows"], "test", "inputs")
    kinds = [(row["model"], row["scheme"]) for row in next(iter(rows.values()))]
    titles = [f"{model}, `{scheme}`" for model, scheme in kinds]
    lines = [f"| test | what strangers read | {' | '.join(titles)} |", "|---|---|" + "---|" * len(kinds)]
    for (test, inputs), part in sorted(rows.items(), key=lambda item: item[0][1] == "weights"):
        found = {(r["model"], r["scheme"]): r for r in part}
        cells = ["" for _ in kinds]
        for i, r in enumerate(found.get(kind) for kind in kinds):
            cells[i] = (
                f"{100 * r['rate']:.1f} ({100 * r['low']:.1f}–{100 * r['high']:.1f})" if r else "the same"
            )
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


def sinks_sentences() -> list[str]:
    """The sentences of README's section on sinks that hold numbers."""
    found = split(read("calibrations.json")["rows"], "config", "calibration")["backcopy", "none"]
    awake, asleep = (column(found, key) for key in ("at_triggers", "elsewhere"))
    sleep = (
        f"pays {asleep.mean():.2f} of its attention to BOS, but at the triggers {np.median(awake):.3f} in the"
    )
    sleep += f" median\nand {awake.max():.2f} at most"
    rows = [row for row in read("sink_variance.json")["rows"] if row["theory"] and row["position"] >= 16]
    off = max(abs(row["std"] / row["theory"] - 1) for row in rows)
    rates = [
        column(runs, "sink_rate")
        for kind, runs in split(read("calibrations.json")["rows"], "config", "calibration").items()
        if kind in (("backcopy", "none"), ("backcopy", "attenuate"))
    ]
    less = interval(rates[0] - rates[1])
    lowers = "`attenuate` lowers the sink rate by {mean:.2f} (95 % interval {low:.2f} to {high:.2f})".format(
        **less
    )
    return [sleep, lowers, f"within {100 * off:.1f} % of it from position 16 on"]


def blocks() -> list[str]:
    """All that README.md takes from the results."""
    columns = "checkpoint sequence_length sink_rate mean_alpha1 max_alpha1 uniform_alpha1"
    tables = [
        answers(),
        calibration_headline(),
        stray(),
        probe_output(),
        compare_output(),
        calibration_table(),
        lineage_table(),
        cost_table(),
    ]
    tables += [
        output("backcopy/rate.json", columns),
        calibrations_table(),
        interventions(),
        headlines(),
        summary(),
    ]
    return [*tables, bench_table(), bench_note(), *sentences(), *lineage_sentences(), *sinks_sentences()]


def test_every_number_is_what_the_results_say():
    readme = (ROOT / "README.md").read_text()
    for block in blocks():
        assert block in readme, f"README.md should hold:\n{block}"


def test_the_papers_tables_are_what_the_results_say(tmp_path, monkeypatch):
    """results/README.md from the staged JSON files alone."""
    for name in paper.COMMANDS:
        path = tmp_path / "results" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(staged(f"{name}.json"))
    for figure in (ROOT / "results").rglob("*.png"):
        path = tmp_path / figure.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    s = paper.Settings(out="results", runs="runs")
    monkeypatch.chdir(tmp_path)
    found = paper.report(s)
    assert found == staged("README.md") and "not made" not in found
    for item, *_ in paper.COVERAGE:
        assert f"| {item} |" in found


def test_committed_claims_are_what_the_code_says_of_the_committed_rows():
    for name in paper.COMMANDS:
        result = read(f"{name}.json")
        judges = {"lineage": kinship.judge, "calibrations": families.judge_calibrations}
        judges |= {"births": families.judge_births, "setup": paper.judge_setup}
        judge = judges.get(name) or getattr(findings, result["experiment"])
        if result["experiment"] in EXPERIMENTS:
            judge = functools.partial(experiment.judge_each, name.split("/")[-1])
        found = json.loads(json.dumps(list(judge(result.get("summary", result["rows"])))))
        assert found == result["claims"], name


def test_every_file_and_flag_that_the_readme_names_exists():
    readme = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\(([\w./-]+)\)", readme):
        assert (ROOT / path).exists(), path
    described = {"probe": probe.Settings, "contraction": ContractionSettings, "train": train.Settings}
    described |= {f"sinks.py {name}": found[1] for name, found in sinks.EXPERIMENTS.items()}
    described |= {"families": families.Settings, "paper": paper.Settings}
    described |= {f"seedprint.py {name}": command[0] for name, command in seedprint.COMMANDS.items()}
    for script, settings in described.items():
        flags = {"--" + name.replace("_", "-") for name in settings.__dataclass_fields__}
        script = script if " " in script else f"{script}.py"
        for line in re.findall(rf"{re.escape(script)} (.*?)(?:  |`|\n|#)", readme):
            assert set(re.findall(r"--[\w-]+", line)) <= flags | {"--help"}, line
            assert script != "contraction.py" or (line.split() or ["all"])[0] in [*EXPERIMENTS, "all"], line


def forked(tmp_path, number: int):
    """A copy of the code with one of README's three differences."""
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(diffs) == 3
    for path in ROOT.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    assert 0 < len(re.findall(r"^[+-](?!\+\+ |-- )", diffs[number], re.MULTILINE)) < 20
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "apply"], cwd=tmp_path, input=diffs[number], text=True, check=True)
    return tmp_path


def test_fork_an_activation(tmp_path):
    fork, flags = forked(tmp_path, 0), ["--seed", 1, 2, "--num-sequences", 60, "--sequence-length", 16]
    out = ["--out", tmp_path / "out"]
    done = run_script(fork / "contraction.py", "layers", "--model", "tiny_relu2", *flags, *out)
    assert done.returncode == 0 and "tiny_relu2" in done.stdout, done.stderr
    claims = json.loads((tmp_path / "out" / "layers.json").read_text())["claims"]
    assert next(c for c in claims if "variant full" in c["claim"])["holds"]  # its theory, within 0.06
    done = run_script(
        fork / "probe.py", "--model", "tiny_relu2", "--num-sequences", 4, "--sequence-length", 4, *out
    )
    assert done.returncode == 0 and "tiny_relu2" in done.stdout, done.stderr


def test_fork_a_calibration(tmp_path):
    fork, out = forked(tmp_path, 1), ["--out", tmp_path / "out"]
    flags = ["--model", "tiny_llama", "--attn-calibration", "half"]
    done = run_script(fork / "sinks.py", "variance", *flags, *out)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "sink_variance.json").read_text())
    assert result["claims"][0]["holds"], result["claims"][0]  # its law, within 3 %
    std = [row["std"] for row in result["rows"] if row["layer"] == 1]
    assert 1.5 < std[3] / std[63] < 2.5  # 16 ** 0.25 is 2; without it 4


def test_fork_a_test_of_lineage(tmp_path):
    fork, out = forked(tmp_path, 2), ["--out", tmp_path / "out"]
    for seed in (1, 2):
        checkpoint.save(tmp_path / f"born{seed}", init.newborn("tiny_gpt2", seed))
    specs = [tmp_path / "born1", "tiny_gpt2@1", tmp_path / "born2"]
    done = run_script(fork / "seedprint.py", "compare", *specs, *out)
    assert done.returncode == 0 and "direction_z" in done.stdout, done.stderr
    same, other = (
        row["direction_z"] for row in json.loads((tmp_path / "out" / "compare.json").read_text())["rows"]
    )
    assert same > 10 and abs(other) < 4


def test_the_snippets_work(capsys):
    before, section = (ROOT / "README.md").read_text().split("## Fork it")
    (attention,), (hooks,) = (
        re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in (before, section)
    )
    exec(attention, {})
    assert "[8, 6, 8, 2]" in capsys.readouterr().out
    exec(hooks, {})
    assert len(capsys.readouterr().out.splitlines()) == 13


def test_committed_results_were_made_by_committed_code():
    names = [*paper.COMMANDS, "bench", "bench_streaming", "evade/compare", "many_rows/compare"]
    for name in [*names, "overlap_20/overlap"]:
        assert re.fullmatch(r"[0-9a-f]{40}", read(f"{name}.json")["environment"]["commit"]), name


if __name__ == "__main__":
    now, STAGED = blocks(), "HEAD"
    readme = (ROOT / "README.md").read_text()
    for old, new in zip(blocks(), now):
        readme = readme.replace(old, new)
        print("" if new in readme else f"README.md should hold:\n{new}\n", end="")
    (ROOT / "README.md").write_text(readme)
