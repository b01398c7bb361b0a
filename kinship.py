"""Who says rightly who is kin? Every method on children, continued children and strangers (BB 6.1, B.3).

    python families.py lineage    # BB Tables 4a-c, 5, 8-12

Strangers saw the same text in the same order; kin are a newborn and its child, and a child after a second
corpus. `families.py` trains them.
"""

import itertools
from dataclasses import replace

import common
import data
import train
from baselines import THRESHOLD, open_models
from evidence import SAME_BIRTH
from findings import claim
from seedprint import Compare, examine
from stats import column, split

SEEDS = (42, 123, 1000, 2000)
OPENWEBTEXT = dict(source=("hf:Skylion007/openwebtext",), tokenizer="bpe:32000")  # the papers' text
STORIES = dict(source=("hf:roneneldan/TinyStories",), max_iters=20_000)
T_TEST, U_TEST, SIMILARITIES = "paper_t_p", "paper_u_p", ("intrinsic", "reef", "pcs", "ics")
METHODS = (T_TEST, U_TEST, *SIMILARITIES, "relabelling", "verdict")
STYLES = {  # preset, or `tiny` for `nano`; steps of each seed's training, and of two seeds' second one
    "llama": ("tiny_llama", (150, 600, 600, 150), 200),
    "qwen": ("tiny_qwen", (60, 60, 60, 60), 40),
}
# The tables are called by their LLaMA numbers; what the paper calls them, where that differs.
NAMES = {"qwen": {"4a": "9", "4b": "10", "4c": "11", "5": "12"}, "llama": {"4b": "4b, 8"}}
PAPER = {  # numbers that survive in the paper's tables, in the order of their rows
    "4a": {T_TEST: (0.357, 0.678, 0.363, 0.434), U_TEST: (0.532, 0.565, 0.335, 0.481)},
    "4b, 8": {T_TEST: (2.20e-8, 7.09e-6, 5.58e-4, 4.00e-10), U_TEST: (6.28e-8, 1.37e-5, 2.81e-3, 1.27e-9),
        "intrinsic": (-0.021, 0.149, -0.252, -0.337), "reef": (0.375, 0.369, 0.381, 0.331),
        "pcs": (0.580, 0.581, 0.581, 0.581), "ics": (0.196, 0.188, 0.188, 0.188)},
    "4c": {T_TEST: (0.385, 0.035, 0.426, 0.388), U_TEST: (0.486, 0.096, 0.337, 0.287)},
    "9": {T_TEST: (0.094, 0.125, 0.451, 0.130), U_TEST: (0.074, 0.094, 0.529, 0.095)},
    "10": {T_TEST: (7.36e-15, 4.41e-13, 1.06e-24, 4.87e-24),
        U_TEST: (3.38e-13, 2.01e-11, 2.05e-19, 1.92e-20)},
    "11": {T_TEST: (0.286, 0.036, 0.026, 0.112), U_TEST: (0.254, 0.040, 0.043, 0.123)},
}  # fmt: skip


def family(s) -> dict[tuple, train.Settings]:
    """Of each style, runs of the seeds on one corpus in one order, and of two continued on a second one."""
    runs, small = {}, s.size != "paper"
    for style, (preset, steps, more) in STYLES.items():
        config, preset = ("", preset) if small else (preset.replace("tiny", "nano"),) * 2
        out, then = f"{s.runs}/lineage/{preset}", "docstrings" if small else "stories"
        first = dict(model=preset) if small else OPENWEBTEXT
        second = dict(source=("docstrings",), learning_rate=5e-4, warmup_iters=20, max_iters=more)
        second = first | second if small else STORIES
        for seed, count in zip(SEEDS, steps):
            changes = first | (dict(save_every=50, max_iters=count) if small else {})
            runs[style, seed, 1] = s.training(config, f"{out}-{seed}", seed=seed, **changes)
        for seed in (1000, 123):
            tokenizer = f"{data.default_folder(runs[style, seed, 1])}/tokenizer.model"
            changes = second | dict(seed=seed, init_from=f"{out}-{seed}", tokenizer=tokenizer)
            runs[style, seed, 2] = s.training(config, f"{out}-{seed}-{then}", **changes)
    chosen = s.seeds((1000, 123, 42, 2000))  # those that are continued come first
    return {key: run for key, run in runs.items() if key[1] in chosen}


def pairs(first: dict, second: dict) -> list[tuple]:
    """(table, base, suspect, whether they are kin) of every row of the tables, from folders by seed."""
    born, rows = {seed: f"{run}/step_0000000" for seed, run in first.items()}, []
    for seed, other in zip(first, [*first][1:] + [*first][:1]):
        rows.append(("4a", born[seed], born[other], False))  # two newborns
        rows.append(("4b", born[seed], first[seed], True))  # a newborn and its child
        rows.append(("4c", born[seed], first[other], False))  # and another's child, of the same data
    continued = [("5", first[1000], second[seed], seed == 1000) for seed in (1000, 123)]
    return sorted(rows + continued, key=lambda row: row[0])


def every_method(runs: dict, s, device, dtype) -> dict:
    """What every method says of each pair: a row."""
    asked, rows = Compare(paper_test=True, baselines=True, device=s.device, dtype=s.dtype), []
    text = train.open_data(next(iter(runs.values())), device)
    if s.size == "smoke":
        asked = replace(asked, paper_sequences=20, paper_length=8, sequence_length=8)
    for style in STYLES:
        first = {seed: run.out for (of, seed, n), run in runs.items() if (of, n) == (style, 1)}
        second = {seed: run.out for (of, seed, n), run in runs.items() if (of, n) == (style, 2)}
        listed = pairs(first, second)
        listed = listed[::2] if s.size == "smoke" else listed
        for i, (table, base, suspect, kin) in enumerate(common.progress(listed, desc=style, unit=" pairs")):
            (a, b), vocab = open_models(replace(asked, models=(base, suspect)), paper=True)
            row, _ = examine(a, b, asked, vocab, text, device, dtype)
            del row["reef_matrix"], row["skipped"]
            says = {name: row[name] < 0.01 for name in (T_TEST, U_TEST)}
            says |= {name: row[name] >= THRESHOLD for name in SIMILARITIES}
            says |= {"relabelling": row["permutation_p"] < 0.01, "verdict": row["verdict"] == SAME_BIRTH}
            key = dict(table=NAMES[style].get(table, table), base=base, suspect=suspect, kin=kin)
            for name in METHODS[:6]:
                theirs = PAPER.get(key["table"], {}).get(name)
                row[f"{name}_theirs"] = theirs[i % 4] if theirs and len(first) == 4 else None
            rows.append(key | row | {f"{name}_right": said == kin for name, said in says.items()})
    return dict(rows=rows)


def judge(rows: list[dict]):
    """BB Tables 4, 5, 8 to 12: who is right?"""
    for (table, part), name in itertools.product(split(rows, "table").items(), METHODS):
        right, theirs = column(part, f"{name}_right"), [row.get(f"{name}_theirs") for row in part]
        text = f"Table {table}: {name.replace('_', ' ')} is right on every pair"
        paper, measured = None, f"{right.sum()} of {len(part)}"
        if name in METHODS[:6]:
            spread = lambda values: f"{min(values):.2g} to {max(values):.2g}"  # noqa: E731
            measured += f", {spread([row[name] for row in part])}"
            paper = None if None in theirs else spread(theirs)
        of = "rival" if name in SIMILARITIES else "BB" if name in METHODS[:2] else "ours"
        yield claim(text, paper, measured, right.all(), of)
