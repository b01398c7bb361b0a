"""What do the two papers say, and what was measured beside it?

    >>> from reproduce.claims import CLAIMS
    >>> [claim.item for claim in CLAIMS if claim.result == "engage"]
    ['Figure 6', 'ours: Figure 6 by theory']

BB is *Transformers Are Born Biased*, SO is *The Structural Origin of Attention Sink*. Every table, figure,
finding and proposition has an entry in `CLAIMS`, with a function that reads one result (an experiment's JSON
file, as a dictionary). There is a verdict only where the paper states what can be checked without a threshold
of ours: an order, a sign, a trend, a law inside an interval, its own level of significance. An item that
begins with "ours" never has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t as student

from measure.cosines import interval, wilson

HOLDS, FAILS, OPEN, NONE = "holds", "does not hold", "open", ""

LEVEL, LOG10_LEVEL = 0.01, -2.0  # the papers' level of significance
PAPER_SEQUENCES = 10_000  # behind each row of BB Table 1
CHANCE = 1e-3  # more than any token's share of any vocabulary here
PAPER_TESTS = ["paper_t_p", "paper_u_p"]


class Finding(NamedTuple):
    """What a function of a result returns."""

    measured: str  # ours, with its interval where there is one
    verdict: str = NONE


@dataclass(frozen=True)
class Claim:
    """What a paper says, or what we ask, and how a result is read beside it."""

    item: str
    """"Figure 1a"; "ours: the cure", which never gets a verdict"""
    says: str
    """in our words; of our own items, the question"""
    number: str = ""
    """the paper's number, or the theory's for ours"""
    result: str | None = None
    """path of the result under results/, without .json; None: not run here"""
    by: str = ""
    """columns, spaced, for each of whose values the rows are judged apart"""
    judge: Callable | None = None
    """function of a group of rows, and of the arguments, that returns a Finding"""
    arguments: tuple = ()
    """what else the judge is given"""
    where: dict = field(default_factory=dict)
    """the rows to read: columns with the value, or the values, that they must have"""
    part: str = "rows"
    """part of the result that holds the rows"""
    is_judged: bool = True
    """is there a verdict? Not of what a paper says without a number or an order"""
    figure: str = ""
    """PNG under results/ (default: the result's own)"""
    command: str = ""
    """what would make the result, where it is not run here"""

    def measure(self, result):
        """The Finding of a result, a dictionary: those of all groups of rows in one."""
        rows = chosen(result, self.part, self.where)
        if rows.empty:
            return Finding("no such rows")
        names = self.by.split()
        groups = rows.groupby(names) if names else [((), rows)]
        texts, verdicts = [], []
        for values, group in groups:
            finding = self.judge(group, *self.arguments)
            labels = [f"{plain(name)} {value}" for name, value in zip(names, values, strict=True)]
            texts.append(f"{', '.join(labels)}: {finding.measured}")
            verdicts.append(finding.verdict)
        measured = "; ".join(texts) if len(texts) > 1 else finding.measured
        if self.item.startswith("ours") or not self.is_judged:
            return Finding(measured)
        return Finding(measured, all_hold(verdicts))


# ---- verdicts ----------------------------------------------------------------------------------------------


def above(low, high, bound=0.0):
    """Is what lies between low and high above `bound`? OPEN where the interval has both answers."""
    if low > bound:
        return HOLDS
    if high < bound:
        return FAILS
    return OPEN


def rising(curve):
    """Does a curve rise at every step? FAILS if it ends no higher than it begins; OPEN between the two."""
    steps = np.diff(curve)
    if len(steps) == 0:
        return OPEN
    if steps.min() > 0:
        return HOLDS
    if steps.sum() <= 0:
        return FAILS
    return OPEN


def agreed(flags):
    """HOLDS if every flag is true, FAILS if none is, OPEN if some are or there is no flag."""
    answers = {bool(flag) for flag in flags}
    if len(answers) != 1:
        return OPEN
    return HOLDS if True in answers else FAILS


def all_hold(verdicts):
    """HOLDS if all hold, FAILS if one fails, NONE if nothing was judged, OPEN otherwise."""
    answers = set(verdicts) - {NONE}
    for verdict in (FAILS, OPEN, HOLDS):
        if verdict in answers:
            return verdict
    return NONE


# ---- from a result to a finding ----------------------------------------------------------------------------


def chosen(result, part, where):
    """The rows with these values, without layer 0 (the input) and step 0 (the newborn itself).

    Means over seeds get their 95 % interval, `low` to `high`: NaN where there is one seed.
    """
    rows = pd.DataFrame(result[part])
    for column, values in where.items():
        rows = rows[rows[column].isin(np.atleast_1d(values).tolist())]
    for column in {"layer", "step"} & set(rows):
        rows = rows[rows[column] > 0]
    if {"mean_cosine", "seed_std"} <= set(rows):
        freedom = len(result["settings"]["seed"]) - 1
        half = student.ppf(0.975, freedom) * rows["seed_std"] / freedom**0.5
        rows = rows.assign(low=rows["mean_cosine"] - half, high=rows["mean_cosine"] + half)
    return rows


def plain(name):
    """A column's name in words."""
    return name.replace("_", " ")


def span(values):
    """The least and the largest of some values, None left out."""
    known = pd.Series(values, dtype=float).dropna()
    form = ",.0f" if known.abs().max() >= 10_000 else ".4g"
    ends = [format(end, form) for end in (known.min(), known.max())]
    return " to ".join(dict.fromkeys(ends))


def bounded(value, low, high):
    """A value and its interval."""
    if np.isnan(low):
        return f"{value:.4g} (one seed)"
    return f"{value:.4g} ({low:.4g} to {high:.4g})"


# ---- what several claims ask -------------------------------------------------------------------------------


def ranges(rows, *columns: str):
    """Least and largest value of some columns; no verdict."""
    texts = [f"{plain(column)} {span(rows[column])}" for column in columns if column in rows]
    return Finding(f"{', '.join(texts)}, n = {len(rows)}")


def sentences(rows):
    """What is said of each row; no verdict."""
    return Finding("; ".join(rows["sentence"]))


def rises(rows, value, along):
    """Does a column rise with another at every step?"""
    curve = rows.groupby(along)[value].mean()
    ends = f"{curve.iloc[0]:.4g} to {curve.iloc[-1]:.4g}"
    return Finding(f"{ends} at {plain(along)} {curve.index[0]} to {curve.index[-1]}", rising(curve))


def ordered(rows, value, along, by, *names):
    """At all `along`, does |value| fall from one name of the column `by` to the next (default: sorted)?"""
    values = rows.pivot_table(index=along, columns=by, values=value)
    values = values.reindex(columns=names or values.columns)
    falls = values.abs().diff(axis=1).iloc[:, 1:] < 0
    texts = [f"{plain(str(name))} {span(values[name])}" for name in values]
    return Finding(", ".join(texts), agreed(falls.to_numpy().ravel()))


def within(rows, theory):
    """Is the theory inside the interval of the mean cosine, in every row? OPEN with one seed."""
    texts = [bounded(*row) for row in rows[["mean_cosine", "low", "high"]].to_numpy()]
    measured = f"{', '.join(texts)} where theory says {span(rows[theory])}"
    if rows["low"].isna().any():
        return Finding(measured, OPEN)
    inside = rows[theory].between(rows["low"], rows["high"])
    return Finding(measured, HOLDS if inside.all() else FAILS)


def distance(rows, theory):
    """How far is the mean cosine from a theory? No verdict."""
    off = (rows["mean_cosine"] - rows[theory]).abs()
    return Finding(f"off by at most {off.max():.4f}, theory up to {rows[theory].max():.4f}")


def excess(rows, theory):
    """What multiple of a theory's is the std, from position 16 on? No verdict."""
    late = rows[rows["position"] >= 16]
    return Finding(f"{span(late['std'] / late[theory])} times the theory")


def lower(rows, first, second, key, by="calibration"):
    """Is `key` lower in runs with `first` in the column `by` than in those of the same seed with `second`?"""
    runs = rows.pivot(index="seed", columns=by, values=key).reindex(columns=[first, second])
    runs = runs.astype(float).dropna()
    if len(runs) < 2:
        return Finding("too few runs to say", OPEN)
    means = runs.mean()
    difference = interval(runs[first] - runs[second])
    measured = f"{first} {means[first]:.4g}, {second} {means[second]:.4g}: {bounded(*difference.values())}"
    return Finding(measured, above(-difference["high"], -difference["low"]))


def positive(rows, key, low, high):
    """Is the interval of `key` above zero, in every row?"""
    ends = rows[[key, low, high]].to_numpy()
    texts = [bounded(*row) for row in ends]
    return Finding(", ".join(texts), all_hold(above(*row[1:]) for row in ends))


def above_zero(rows, key):
    """Is the mean of `key` over seeds above zero, by its interval?"""
    values = rows[key].astype(float).dropna()
    if len(values) < 2:
        return Finding("too few runs to say", OPEN)
    mean = interval(values)
    return Finding(bounded(*mean.values()), above(mean["low"], mean["high"]))


# ---- preference (BB section 3) -----------------------------------------------------------------------------


def preference(rows):
    """Is a newborn's favourite token beyond chance? If not: OPEN with fewer sequences than the paper's."""
    row = next(rows.itertuples())
    number = row.num_sequences
    low, high = np.array(wilson(row.top1_count, number)) * number / row.uniform_max_count
    verdict = FAILS if number >= PAPER_SEQUENCES else OPEN
    if row.log10_p < LOG10_LEVEL:
        verdict = HOLDS
    return Finding(f"{bounded(row.ratio, low, high)} x, log10 p {row.log10_p:.1f}", verdict)


def grows_with_length(rows):
    """Is the favourite's share, over all seeds, larger at the greatest length than at the least?"""
    sums = rows.groupby("sequence_length")[["top1_count", "num_sequences"]].sum()
    shares = [wilson(*counts) for counts in sums.to_numpy()]
    texts = [f"{low:.2%} to {high:.2%} at T = {T}" for T, (low, high) in zip(sums.index, shares, strict=True)]
    shortest, longest = shares[0], shares[-1]
    return Finding(", ".join(texts), above(longest[0] - shortest[1], longest[1] - shortest[0]))


def own_favourites(rows):
    """Have the rows favourites of their own? OPEN for one row, and where a favourite may be chance."""
    number = rows["top1_token"].nunique()
    measured = f"{number} favourites in {len(rows)} rows"
    if len(rows) == 1 or rows["log10_p"].max() >= LOG10_LEVEL:
        return Finding(measured, OPEN)
    return Finding(measured, HOLDS if number == len(rows) else FAILS)


# ---- contraction (BB section 4) ----------------------------------------------------------------------------


def widening(rows):
    """From layer 2 on, is the full model ahead of MLP only, and more so with each layer?"""
    curves = rows.pivot_table(index="layer", columns="variant", values="mean_cosine")
    lead = (curves["full"] - curves["mlp"]).loc[2:]
    return Finding(f"ahead by {span(lead)}", all_hold([agreed(lead > 0), rising(lead)]))


def same_token(rows, first, second):
    """Do two columns name the same token more often than by chance?"""
    hits = (rows[first] == rows[second]).sum()
    low, high = wilson(hits, len(rows))
    return Finding(f"{hits} of {len(rows)} ({low:.2f} to {high:.2f})", above(low, high, CHANCE))


def decay(rows):
    """Does the std of aggregated values fall with the position, octave by octave (1, 2-3, 4-7, ...)?"""
    std = rows.set_index("position")["std"].sort_index()
    octaves = std.groupby(np.log2(std.index).astype(int)).mean()
    return Finding(f"{std.iloc[0]:.3f} at position 1 to {std.iloc[-1]:.3f} at {len(std)}", rising(-octaves))


def slope(rows):
    """With which power of the width does contraction go, measured and by theory? No verdict."""
    curves = np.log(rows[["mean_cosine", "theory"]].clip(lower=1e-9))
    measured, law = np.polyfit(np.log(rows["d_model"]), curves, 1)[0]
    return Finding(f"width^{measured:.2f}, theory {law:.2f}")


# ---- lineage (BB sections 5 and 6.1) -----------------------------------------------------------------------


def shifted_upward(rows):
    """Is tau with its birth above tau with a stranger at every checkpoint?"""
    gap = rows["mean_tau"] - rows["stranger_mean_tau"]
    return Finding(f"tau higher by {span(gap)} at {len(gap)} checkpoints", agreed(gap > 0))


def right_answers(rows):
    """Do both of the paper's tests say kin of kin alone, of every pair? All are kin where none is told."""
    kin = rows.get("kin", pd.Series(True, rows.index))
    right = (rows[PAPER_TESTS] < LEVEL).eq(kin, axis=0).all(axis=1)
    measured = f"{right.sum()} of {len(rows)} right, t-test p {span(rows['paper_t_p'])}"
    return Finding(f"{measured}, U-test p {span(rows['paper_u_p'])}", HOLDS if right.all() else FAILS)


def missed_kin(rows, threshold, *rivals: str):
    """Do all rivals miss every pair of kin, by a threshold?"""
    missed = rows[[*rivals]] < threshold
    texts = [f"{name} misses {missed[name].sum()} ({span(rows[name])})" for name in rivals]
    return Finding(f"of {len(rows)}: {', '.join(texts)}", HOLDS if missed.all(axis=None) else FAILS)


def false_alarms(rows):
    """Are at most 1 % of strangers called kin, with every scheme and architecture?"""
    ends = rows[["low", "high"]].to_numpy()
    measured = f"{span(rows['rate'])} (intervals {span(ends.ravel())})"
    return Finding(measured, all_hold(above(-high, -low, -LEVEL) for low, high in ends))


# ---- sinks (BB section 6.2, SO) ----------------------------------------------------------------------------


def sink_heads(rows):
    """Has a trained model sink heads at every length? A newborn (PRESET@SEED) is shown beside it."""
    finding = positive(rows, "sink_rate", "low", "high")
    if "@" in rows["checkpoint"].iloc[0]:
        return Finding(finding.measured)
    return finding


def no_sinks(rows):
    """Is no head of any run a sink head?"""
    return Finding(f"sink rate {span(rows['sink_rate'])} in {len(rows)} runs", agreed(rows["sink_rate"] == 0))


def first_stands_out(rows, key):
    """Is `key` largest at position 1, in some layer?"""
    values = rows.pivot_table(index="position", columns="layer", values=key)
    first, others = values.iloc[0], values.iloc[1:]
    measured = f"{span(first)} by layer, {span(first / others.median())} times the median"
    return Finding(measured, HOLDS if (first > others.max()).any() else FAILS)


def same_settings(rows):
    """How many hyperparameters are the paper's? No verdict."""
    return Finding(f"{(rows['paper'] == rows['ours']).sum()} of {len(rows)} the same")


def interventions(result, model):
    """What SO says of its interventions, and how it is read of a result of `sinks.py intervene`."""
    amplified = {"intervention": "amplify", "factor": 16.0}
    all_factors = {"intervention": "amplify", "factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]}
    shift = ("shift", "shift_low", "shift_high")
    more = ("amplify_more", "amplify_more_low", "amplify_more_high")
    statements = {
        ("self-mask", "alpha_k rises at once if token k attends to itself alone"): (
            positive,
            shift,
            {"intervention": "self_mask"},
        ),
        ("variance amplification", "alpha_k rises if its values' deviation grows 16 times"): (
            positive,
            shift,
            amplified,
        ),
        ("variance amplification, factors", "alpha_k rises with every factor above 1"): (
            rises,
            ("alpha_k", "factor"),
            all_factors,
        ),
        ("control", "deviation counts, not norm: amplified 16 times it does more than scaled"): (
            positive,
            more,
            {"intervention": "scale", "factor": 16.0},
        ),
    }
    said = {}
    for (name, statement), (judge, arguments, where) in statements.items():
        said[f"SO: {name}{model}", statement, ""] = {
            "result": result,
            "judge": judge,
            "arguments": arguments,
            "part": "summary",
            "where": where,
        }
    return said


# ---- what the papers say -----------------------------------------------------------------------------------


SAID = {  # (item, what the paper says or we ask, its number or the theory's): how a result is read beside it
    ("Figure 1a", "Nano GPT-2's favourite comes up more often than in uniform draws", "58.5 x"): {
        "result": "ten_thousand/probe",
        "by": "model seed sequence_length",
        "judge": preference,
    },
    ("Table 1a, Finding 1.1", "Nano GPT-2 prefers a token beyond chance", ""): {
        "result": "probe",
        "by": "model seed sequence_length",
        "judge": preference,
    },
    ("Table 1b, Finding 1.1", "so does Nano LLaMA-2, with 10,000 sequences", ""): {
        "result": "nano_llama/probe",
        "by": "model seed sequence_length",
        "judge": preference,
    },
    ("Table 1c, Finding 1.1", "so does the 1.2B GPT-2", ""): {
        "result": "gpt2_1b/probe",
        "by": "model seed sequence_length",
        "judge": preference,
    },
    ("Finding 1.2, length", "the favourite's share grows with the sequence length", ""): {
        "result": "lengths/probe",
        "by": "model",
        "judge": grows_with_length,
    },
    ("Finding 1.2, scale", "and is larger in the 1.2B model than in the nano one of Table 1a", ""): {
        "result": "gpt2_1b/probe",
        "by": "model",
        "judge": grows_with_length,
        "is_judged": False,
    },
    ("Finding 1.3", "each seed has a favourite of its own, though token tables agree", ""): {
        "result": "lengths/probe",
        "by": "model sequence_length",
        "judge": own_favourites,
    },
    ("Finding 1.3, 1.2B", "a seed keeps its favourite at every length (ours: nano)", "23062; 20694"): {
        "result": "lengths/probe",
        "by": "model seed",
        "judge": own_favourites,
        "is_judged": False,
    },
    ("Figure 1b", "the preference comes of states that contract along a direction", ""): {
        "result": "probe",
        "by": "model",
        "judge": ranges,
        "arguments": ("mean_cosine",),
        "is_judged": False,
    },
    ("Finding 2.1, Figure 2", "last states of random sequences grow alike with every layer", ""): {
        "result": "layers",
        "by": "sequence_length",
        "judge": rises,
        "arguments": ("mean_cosine", "layer"),
        "where": {"variant": "full"},
    },
    ("Finding 2.2", "more newborns prefer the direction's token than by chance (share lost)", ""): {
        "result": "overlap",
        "by": "model",
        "judge": same_token,
        "arguments": ("direction_token", "top1_token"),
    },
    ("Table 2", "final cosine: full > MLP only > attention only, which is about 0", ""): {
        "result": "ablation",
        "by": "model",
        "judge": ordered,
        "arguments": ("mean_cosine", "seed", "variant", "full", "mlp", "attention"),
    },
    ("Figure 3", "times uniform draws: full > MLP only > attention only, about 1", ""): {
        "result": "ablation",
        "by": "model",
        "judge": ordered,
        "arguments": ("ratio", "seed", "variant", "full", "mlp", "attention"),
    },
    ("Figure 4", "MLP only contracts with every block", ""): {
        "result": "mlp",
        "by": "stack",
        "judge": rises,
        "arguments": ("mean_cosine", "layer"),
        "where": {"stack": "standard"},
    },
    ("Figure 5", "at every layer: bare ReLU blocks > standard ones with ReLU > tanh", ""): {
        "result": "mlp",
        "by": "model",
        "judge": ordered,
        "arguments": ("mean_cosine", "layer", "stack", "mlp0_relu", "standard_relu", "mlp0_tanh"),
    },
    ("Proposition 2, a block", "a ReLU MLP0 block gives 1/pi", "0.3183"): {
        "result": "mlp",
        "by": "stack",
        "judge": within,
        "arguments": ("theory",),
        "where": {"stack": "mlp0_relu", "layer": 1},
    },
    ("Proposition 2, depth", "with every ReLU block it grows, towards 1", "1"): {
        "result": "mlp",
        "by": "stack",
        "judge": rises,
        "arguments": ("mean_cosine", "layer"),
        "where": {"stack": "mlp0_relu"},
    },
    ("Proposition 2, tanh", "with tanh it stays 0", "0"): {
        "result": "mlp",
        "by": "stack",
        "judge": distance,
        "arguments": ("theory",),
        "where": {"stack": "mlp0_tanh"},
        "is_judged": False,
    },
    ("Footnote 5", "ReLU's fall in deep layers may be vanishing states (ours: an epsilon)", ""): {
        "result": "mlp",
        "by": "stack",
        "judge": rises,
        "arguments": ("mean_cosine", "layer"),
        "where": {"stack": ["mlp0_relu", "mlp0_relu_epsilon"]},
        "is_judged": False,
    },
    ("Figure 6", "GELU's asymmetry is engaged with LayerNorm only", ""): {
        "result": "engage",
        "by": "model",
        "judge": ordered,
        "arguments": ("mean_cosine", "model", "normed", True, False),
    },
    ("Figure 7, layer 1", "MLP only contracts at once, attention only does not", ""): {
        "result": "layers",
        "by": "sequence_length",
        "judge": ordered,
        "arguments": ("mean_cosine", "layer", "variant", "mlp", "attention"),
    },
    ("Figure 7, layer 2 on", "full is ahead of MLP only, more so with every layer", ""): {
        "result": "layers",
        "by": "sequence_length",
        "judge": widening,
    },
    ("Table 3", "Attn0 after MLP0 > MLP0 twice > MLP0 once", "0.98 > 0.49 > 0.31"): {
        "result": "amplify",
        "by": "sequence_length",
        "judge": ordered,
        "arguments": ("mean_cosine", "model", "stack", *["mlp0_attn0", "mlp0_mlp0"], "mlp0"),
    },
    ("Proposition 4", "MLP0 twice: 0.49; Attn0 after it: 1 / (1 + (pi - 1) / T)", "0.979 at T = 100"): {
        "result": "amplify",
        "by": "stack sequence_length",
        "judge": within,
        "arguments": ("theory",),
        "where": {"stack": ["mlp0_attn0", "mlp0_mlp0"]},
    },
    ("Figure 8, depth", "states of one sequence grow alike with every layer, towards 1", ""): {
        "result": "intra",
        "by": "sequence_length",
        "judge": rises,
        "arguments": ("mean_cosine", "layer"),
        "where": {"stack": "attention"},
    },
    ("Figure 8, length", "more so in shorter sequences", ""): {
        "result": "intra",
        "by": "stack",
        "judge": ordered,
        "arguments": ("mean_cosine", "layer", "sequence_length"),
        "where": {"stack": "attention"},
    },
    ("Figure 8, Attn0", "Attn0's curves closely match attention's", ""): {
        "result": "intra",
        "by": "sequence_length",
        "judge": ordered,
        "arguments": ("mean_cosine", "layer", "stack", "attn0", "attention"),
        "is_judged": False,
    },
    ("Proposition 5, depth", "in Attn0 they grow with every layer, towards 1", "1"): {
        "result": "intra",
        "by": "sequence_length",
        "judge": rises,
        "arguments": ("mean_cosine", "layer"),
        "where": {"stack": "attn0"},
    },
    ("Proposition 5, formula", "1/T + (1 - 1/T) rho_L, accurate for long sequences", ""): {
        "result": "intra",
        "by": "sequence_length",
        "judge": distance,
        "arguments": ("limit_theory",),
        "where": {"stack": "attn0"},
        "is_judged": False,
    },
    ("Equation 2", "position 1 keeps its variance, later ones lose theirs", "std as 1/sqrt(i)"): {
        "result": "variance",
        "by": "model",
        "judge": decay,
    },
    ("Figure 9", "measured std nearly overlaps sigma/sqrt(i) (ours: from i = 16 on)", "1"): {
        "result": "variance",
        "by": "model",
        "judge": excess,
        "arguments": ("uniform_theory",),
        "is_judged": False,
    },
    ("Figure 10", "some hidden dimensions are largest far more often than others", ""): {
        "result": "ten_thousand/probe",
        "by": "model",
        "judge": ranges,
        "arguments": ("dimension_ratio",),
        "is_judged": False,
    },
    ("Figure 11", "every checkpoint is nearer to its birth than to a stranger", ""): {
        "result": "persistence",
        "judge": shifted_upward,
    },
    ("Table 4a", "LLaMA style: two newborns are strangers", "t 0.357 to 0.678, U 0.335 to 0.565"): {
        "result": "lineage",
        "by": "kin",
        "judge": right_answers,
        "where": {"table": "4a"},
    },
    ("Table 4b", "a newborn and its trained self are kin", "t 4e-10 to 6e-4, U 1e-9 to 3e-3"): {
        "result": "lineage",
        "by": "kin",
        "judge": right_answers,
        "where": {"table": "4b, 8"},
    },
    ("Table 4c", "another's trained self is a stranger", "t 0.035 to 0.426, U 0.096 to 0.486"): {
        "result": "lineage",
        "by": "kin",
        "judge": right_answers,
        "where": {"table": "4c"},
    },
    ("Table 5", "after a second corpus a child is kin, a stranger's child is not", ""): {
        "result": "lineage",
        "by": "kin",
        "judge": right_answers,
        "where": {"table": "5"},
    },
    ("Tables 5, 12, The Stack", "also where that corpus is code; there every rival fails", ""): {
        "command": "python train.py --init-from RUN --source hf:bigcode/the-stack-dedup --tokenizer FILE"
    },
    ("Table 6", "models fine-tuned from Llama-2-7b on 5M to 500B tokens are kin", "p < 0.01"): {
        "command": "python seedprint.py paper Llama-2-7b-hf vicuna-7b-v1.5"
    },
    ("Table 7, attenuation", "perplexity of WikiText-2 falls from 21.33 to 21.02", "-0.015 nats"): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("attenuate", "none", "text_loss"),
        "where": {"config": ["laptop", "nano_llama"]},
    },
    ("Table 7, amplification", "it is comparable: 21.33 and 21.95", "+0.029 nats"): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("amplify", "none", "text_loss"),
        "where": {"config": ["laptop", "nano_llama"]},
        "is_judged": False,
    },
    ("Table 7, its size", "200,000 steps; on C4 30.36, amplified 28.70, attenuated 30.48", ""): {
        "command": "torchrun train.py configs/nano_llama.py --attn-calibration attenuate"
    },
    ("Table 8", "all rivals miss all of Table 4b, all < 0.8", "at most 0.149, 0.381, 0.581, 0.196"): {
        "result": "lineage",
        "by": "table",
        "judge": missed_kin,
        "arguments": (0.8, "intrinsic", "reef", "pcs", "ics"),
        "where": {"table": "4b, 8"},
    },
    ("Table 9", "Qwen style: two newborns are strangers", "t 0.094 to 0.451, U 0.074 to 0.529"): {
        "result": "lineage",
        "by": "kin",
        "judge": right_answers,
        "where": {"table": "9"},
    },
    ("Table 10", "a newborn and its trained self are kin", "t 1e-24 to 4e-13, U 2e-20 to 2e-11"): {
        "result": "lineage",
        "by": "kin",
        "judge": right_answers,
        "where": {"table": "10"},
    },
    ("Table 11", "another's trained self is a stranger", "t 0.026 to 0.286, U 0.040 to 0.254"): {
        "result": "lineage",
        "by": "kin",
        "judge": right_answers,
        "where": {"table": "11"},
    },
    ("Table 12", "after a second corpus a child is kin, a stranger's child is not", ""): {
        "result": "lineage",
        "by": "kin",
        "judge": right_answers,
        "where": {"table": "12"},
    },
    ("Tables 4, 5, 8-12, their size", "12 layers, 10B tokens of OpenWebText", ""): {
        "command": "python -m reproduce.family --scale paper"
    },
    ("Table 13", "the Nano LLaMA-2 that is trained", ""): {
        "result": "setup",
        "judge": same_settings,
        "where": {"table": "13"},
        "is_judged": False,
    },
    ("Table 14", "how it is trained", ""): {
        "result": "setup",
        "judge": same_settings,
        "where": {"table": "14"},
        "is_judged": False,
    },
    ("Figure 12, baseline", "a pretrained language model has sinks at every length", ""): {
        "result": "laptop/rate",
        "by": "checkpoint",
        "judge": sink_heads,
    },
    ("Figure 12, amplification", "it lowers the sink rate", ""): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("amplify", "none", "sink_rate"),
        "figure": "calibrated_rate.png",
        "where": {"config": ["laptop", "nano_llama"]},
    },
    ("Figure 12, attenuation", "it lowers the sink rate", ""): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("attenuate", "none", "sink_rate"),
        "figure": "calibrated_rate.png",
        "where": {"config": ["laptop", "nano_llama"]},
    },
    ("Figure 12, amplification, a toy", "the same of models that sink: Bigram-Backcopy", ""): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("amplify", "none", "sink_rate"),
        "figure": "calibrated_rate.png",
        "where": {"config": "backcopy"},
    },
    ("Figure 12, attenuation, a toy", "the same of models that sink: Bigram-Backcopy", ""): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("attenuate", "none", "sink_rate"),
        "figure": "calibrated_rate.png",
        "where": {"config": "backcopy"},
    },
    ("Figure 12, both, a toy", "attenuation leaves fewer sinks than amplification", ""): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("attenuate", "amplify", "sink_rate"),
        "figure": "calibrated_rate.png",
        "where": {"config": "backcopy"},
    },
    ("Figure 12, what is left, a toy", "attenuation leaves nearly none", "nearly 0"): {
        "result": "calibrations",
        "by": "config",
        "judge": no_sinks,
        "figure": "calibrated_rate.png",
        "where": {"config": "backcopy", "calibration": "attenuate"},
        "is_judged": False,
    },
    ("Figure 13", "Gaussian matrices stand for strangers, so p < 0.01 is rare (own tables)", "0.01"): {
        "result": "errors",
        "by": "test",
        "judge": false_alarms,
        "where": {"test": ["t-test", "U-test"], "inputs": "own embedding"},
    },
    ("Figure 13, Gaussian inputs", "the same with the inputs that Section 6.1.1 describes", "0.01"): {
        "result": "errors",
        "by": "test",
        "judge": false_alarms,
        "where": {"test": ["t-test", "U-test"], "inputs": "gaussian"},
    },
    ("Figure 14", "Qwen style: every checkpoint is kin of its birth", "p < 0.01"): {
        "result": "qwen/persistence",
        "judge": right_answers,
        "figure": "qwen/persistence_p.png",
    },
    ("Section 6.1.2", "so it is throughout training (ours: LLaMA style)", "p < 0.01"): {
        "result": "persistence",
        "judge": right_answers,
        "figure": "persistence_p.png",
    },
    ("SO: variance", "the first layer's aggregated values vary most at position 1, then less", ""): {
        "result": "sink_variance",
        "by": "checkpoint",
        "judge": decay,
        "where": {"layer": 1},
    },
    ("SO: super neurons", "few hidden units wake for the first token, writing to few dimensions", ""): {
        "result": "backcopy/anatomy",
        "by": "layer",
        "judge": ranges,
        "arguments": ("ratio", "down_share"),
        "part": "super_neurons",
        "is_judged": False,
    },
    ("SO: dimension disparity", "where sinks are, the first state's max / mean surges", "> 200"): {
        "result": "backcopy/anatomy",
        "by": "checkpoint",
        "judge": first_stands_out,
        "arguments": ("dominance_ratio",),
    },
    ("SO: super neurons, where position 1 is a sink", "the same", ""): {
        "result": "matching/anatomy",
        "by": "layer",
        "judge": ranges,
        "arguments": ("ratio", "down_share"),
        "part": "super_neurons",
        "is_judged": False,
    },
    ("SO: dimension disparity, where position 1 is a sink", "the same", "> 200"): {
        "result": "matching/anatomy",
        "by": "checkpoint",
        "judge": first_stands_out,
        "arguments": ("dominance_ratio",),
    },
    **interventions("backcopy/intervene", ""),
    **interventions("letter/intervene", ", BOS replaced by a letter"),
    **interventions("matching/intervene", ", where position 1 is a sink"),
    ("SO: head-wise RMSNorm, loss", "validation loss falls from 2.781 to 2.742", "-0.039 nats"): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("headnorm", "none", "val_loss"),
        "where": {"config": ["laptop", "nano_llama"]},
    },
    ("SO: head-wise RMSNorm, speed", "it learns faster (ours: mean loss of evaluations)", ""): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("headnorm", "none", "mean_loss"),
        "where": {"config": ["laptop", "nano_llama"]},
    },
    ("SO: head-wise RMSNorm, sinks", "there are none (ours: a toy that sinks without)", "0"): {
        "result": "calibrations",
        "by": "config",
        "judge": no_sinks,
        "figure": "calibrated_rate.png",
        "where": {"config": "backcopy", "calibration": "headnorm"},
    },
    ("SO: disparity, trained", "head-wise RMSNorm lowers it, mean of layers: 82.7 to 33.7", "-49.0"): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("headnorm", "none", "disparity"),
        "figure": "calibrated_disparity.png",
        "where": {"config": ["laptop", "nano_llama"]},
    },
    (
        "SO: effective rank, trained",
        "head-wise RMSNorm raises it, mean of layers: 343.7 to 446.0",
        "+102.3",
    ): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("none", "headnorm", "effective_rank"),
        "figure": "calibrated_effective_rank.png",
        "where": {"config": ["laptop", "nano_llama"]},
    },
    ("SO: output projection", "it keeps the discrepancy: strong columns read what varies more", "tau 0.32"): {
        "result": "calibrations",
        "by": "config",
        "judge": above_zero,
        "arguments": ("output_tau",),
        "where": {"config": ["laptop", "nano_llama"], "calibration": "none"},
    },
    ("SO: key lock", "a surging dimension makes the first key one row of W_K, whatever the token", ""): {
        "command": "python sinks.py anatomy --model runs/llama_60m --data data/openwebtext"
    },
    ("SO: sinks by layer", "from layer 5 on in 152M parameters; none with head-wise RMSNorm", ""): {
        "command": "torchrun train.py configs/nano_llama.py --attn-calibration headnorm --track-sinks"
    },
    ("ours: a LLaMA's layers", "does a newborn with SwiGLU contract?", "of order 1/d"): {
        "result": "nano_llama/layers",
        "by": "variant",
        "judge": ranges,
        "arguments": ("mean_cosine", "theory"),
    },
    ("ours: Figures 2, 7 by theory", "how far is the kernel recursion, without parameters?", "0"): {
        "result": "layers",
        "by": "variant",
        "judge": distance,
        "arguments": ("theory",),
    },
    ("ours: Figure 2's last layer", "is theory within the seeds' interval?", ""): {
        "result": "layers",
        "by": "variant sequence_length",
        "judge": within,
        "arguments": ("theory",),
        "where": {"layer": 12},
    },
    ("ours: Figures 4, 5 by theory", "and of standard MLP blocks?", "0"): {
        "result": "mlp",
        "by": "stack",
        "judge": distance,
        "arguments": ("theory",),
        "where": {"stack": ["standard", "standard_relu"]},
    },
    ("ours: Figure 6 by theory", "how far is the quadrature?", "0"): {
        "result": "engage",
        "by": "normed",
        "judge": distance,
        "arguments": ("theory",),
    },
    ("ours: Figure 8 by theory", "how far is the law that is exact in T?", "0"): {
        "result": "intra",
        "by": "stack",
        "judge": distance,
        "arguments": ("exact_theory",),
    },
    ("ours: Figure 9 by theory", "how far is the law with the logits' variance, from i = 16 on?", "1"): {
        "result": "variance",
        "by": "model",
        "judge": excess,
        "arguments": ("theory",),
    },
    ("ours: deeper layers", "how much of the decay is left there?", ""): {
        "result": "sink_variance",
        "by": "layer",
        "judge": decay,
        "where": {"layer": [2, 12]},
    },
    ("ours: tokens from weights", "do weights foretell the contraction direction's token?", ""): {
        "result": "predict",
        "by": "model",
        "judge": same_token,
        "arguments": ("predicted_token", "direction_token"),
    },
    ("ours: direction from weights", "and the direction (cosine), the mean cosine; in seconds?", "1"): {
        "result": "predict",
        "by": "model",
        "judge": ranges,
        "arguments": ("direction_cosine", "mean_cosine", "predicted_cosine", "seconds"),
    },
    ("ours: the cure", "is a newborn unprejudiced if units' common mean is cut?", "0, but for gpt2"): {
        "result": "cure",
        "by": "init",
        "judge": ranges,
        "arguments": ("mean_cosine", "log10_p", "down_std"),
    },
    ("ours: the cured's favourites", "are there any?", "1 x"): {
        "result": "centered/probe",
        "by": "model seed sequence_length",
        "judge": preference,
    },
    ("ours: a LLaMA to cure", "is there anything to cure?", "of order 1/d"): {
        "result": "nano_llama/cure",
        "by": "init",
        "judge": ranges,
        "arguments": ("mean_cosine", "log10_p"),
    },
    ("ours: width", "with which power of it does contraction go?", "0, 0.72, -0.99, -1.08"): {
        "result": "width",
        "by": "mlp scaling",
        "judge": slope,
    },
    ("ours: births, loss", "do the unprejudiced end at a lower held-out loss?", ""): {
        "result": "births",
        "judge": lower,
        "arguments": ("centered", "gpt2", "val_loss", "init"),
    },
    ("ours: births, contraction", "do they end with less of it?", ""): {
        "result": "births",
        "judge": lower,
        "arguments": ("centered", "gpt2", "mean_cosine", "init"),
    },
    ("ours: Tables 4, 5, 8-12", "what do our verdict and the rivals say of kin and strangers?", ""): {
        "result": "lineage",
        "by": "kin verdict",
        "judge": ranges,
        "arguments": ("permutation_p", "intrinsic", "reef", "pcs", "ics"),
    },
    ("ours: kin", "who is the base's kin?", "strangers: z of N(0, 1)"): {
        "result": "compare",
        "by": "suspect verdict",
        "judge": ranges,
        "arguments": ("units_found", "body_z", "relabel_z"),
    },
    ("ours: a family tree", "how far apart are kin and strangers?", "strangers: z of N(0, 1)"): {
        "result": "matrix",
        "by": "verdict",
        "judge": ranges,
        "arguments": ("units_found", "body_z", "relabel_z"),
    },
    ("ours: which seed?", "was the child born of seed 1000, of 100,000?", "yes"): {
        "result": "identify",
        "by": "seed",
        "judge": ranges,
        "arguments": ("family_log10_p", "cosine"),
        "where": {"seed": 1000},
    },
    ("ours: no such seed", "what is said of 100,000 others?", "log10 p of 0"): {
        "result": "outside/identify",
        "judge": ranges,
        "arguments": ("family_log10_p", "cosine"),
    },
    ("ours: error rates", "how often are strangers with tables of their own called kin?", "0.01"): {
        "result": "errors",
        "by": "test",
        "judge": false_alarms,
        "where": {"inputs": "own embedding"},
    },
    ("ours: error rates, one table", "and those that share their token table?", "0.01"): {
        "result": "errors",
        "by": "test",
        "judge": false_alarms,
        "where": {"inputs": "shared embedding"},
    },
    ("ours: error rates, weights", "and by tests of weights?", "0.01"): {
        "result": "errors",
        "by": "test",
        "judge": false_alarms,
        "where": {"inputs": "weights"},
    },
    (
        "ours: strangers' units",
        "which share of a layer's hidden units do newborn strangers share, at most?",
        "",
    ): {
        "result": "errors",
        "judge": ranges,
        "arguments": ("largest_share",),
        "where": {"test": "units"},
    },
    ("ours: trained strangers' units", "and strangers that learn one text on one token table?", ""): {
        "result": "trained",
        "by": "hidden",
        "judge": ranges,
        "arguments": ("share", "by_chance"),
    },
    ("ours: power", "what is found of a child, the more it is changed?", ""): {
        "result": "power",
        "by": "change",
        "judge": ranges,
        "arguments": ("units_share", "body_z", "closed_form_z"),
    },
    ("ours: layer maps", "of which layers was a hidden suspect made?", ""): {
        "result": "recipes",
        "by": "recipe",
        "judge": sentences,
    },
    ("ours: cost", "how many tokens until p < 1e-6? (BB reads 10,240,000)", ""): {
        "result": "cost",
        "by": "test",
        "judge": ranges,
        "arguments": ("tokens", "log10_p", "seconds"),
    },
    ("ours: a toy that sinks", "has a model of the Bigram-Backcopy task sinks?", ""): {
        "result": "backcopy/rate",
        "by": "checkpoint",
        "judge": sink_heads,
    },
    ("ours: token or position", "alpha_1 of Bigram-Backcopy's heads with letters first (BOS: above)?", ""): {
        "result": "backcopy/first",
        "by": "layer",
        "judge": ranges,
        "arguments": ("alpha1", "largest", "uniform_alpha1"),
    },
    (
        "ours: a sink on position 1",
        "a head's alpha_1; on which share of letters does any sink?",
        "",
    ): {
        "result": "positions",
        "by": "seed",
        "judge": ranges,
        "arguments": ("alpha1", "any_share", "norm_ratio"),
    },
    ("ours: its heads", "and of all heads of the first of these models?", ""): {
        "result": "matching/first",
        "by": "layer",
        "judge": ranges,
        "arguments": ("alpha1", "least", "uniform_alpha1"),
    },
    ("ours: its sink rate", "has it sink heads on held-out windows?", ""): {
        "result": "matching/rate",
        "by": "checkpoint",
        "judge": sink_heads,
    },
    ("ours: when it sinks", "what does BOS get at triggers, and where nothing is to be copied?", ""): {
        "result": "calibrations",
        "by": "config",
        "judge": ranges,
        "arguments": ("at_triggers", "elsewhere"),
        "where": {"config": "backcopy", "calibration": "none"},
    },
    ("ours: attention to position 1", "at birth and after text, beside uniform attention?", ""): {
        "result": "laptop/rate",
        "by": "checkpoint",
        "judge": ranges,
        "arguments": ("mean_alpha1", "uniform_alpha1"),
        "where": {"sequence_length": 64},
    },
    ("ours: attenuation", "does it end at a lower held-out loss?", ""): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("attenuate", "none", "val_loss"),
    },
    ("ours: head-wise RMSNorm, a toy", "does it end at a lower held-out loss?", ""): {
        "result": "calibrations",
        "by": "config",
        "judge": lower,
        "arguments": ("headnorm", "none", "val_loss"),
        "where": {"config": "backcopy"},
    },
    ("ours: disparity on text", "does position 1 stand out in a small model without sinks?", ""): {
        "result": "laptop/anatomy",
        "by": "checkpoint",
        "judge": first_stands_out,
        "arguments": ("dominance_ratio",),
    },
    ("ours: interventions on text", "do SO's raise alpha_k there, 16 times?", ""): {
        "result": "laptop/intervene",
        "by": "intervention",
        "judge": positive,
        "arguments": ("shift", "shift_low", "shift_high"),
        "part": "summary",
        "where": {"factor": 16.0, "changed": "all"},
    },
    ("ours: interventions on text, a layer at a time", "does amplifying in one layer, 16 times?", ""): {
        "result": "laptop/intervene",
        "by": "changed",
        "judge": positive,
        "arguments": ("shift", "shift_low", "shift_high"),
        "part": "summary",
        "where": {"intervention": "amplify", "factor": 16.0},
    },
    ("ours: soft signs on text", "does position 1 stand out in length, before there is a sink?", ""): {
        "result": "laptop/rate",
        "by": "checkpoint",
        "judge": ranges,
        "arguments": ("norm_ratio", "value_ratio", "first_share"),
    },
}
CLAIMS = tuple(Claim(*words, **reading) for words, reading in SAID.items())
