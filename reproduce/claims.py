"""What do the two papers say, and what was measured beside it?

    >>> from reproduce.claims import CLAIMS
    >>> [claim.item for claim in CLAIMS if claim.result == "amplify"]
    ['Table 3', 'Proposition 4']

BB is *Transformers Are Born Biased*, SO is *The Structural Origin of Attention Sink*. A claim's judge reads a
result, the dictionary of an experiment's JSON file, and returns what was measured, as text, and a verdict.
There is one only where the paper states what can be checked without a threshold of ours: an order, a sign, a
trend, a law inside an interval, its own level of significance.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t as student

from measure.cosines import interval, wilson

HOLDS, FAILS, OPEN, NONE = "holds", "does not hold", "open", ""
LEVEL, LOG10_LEVEL = 0.01, -2.0  # the papers' level of significance
PAPER_SEQUENCES = 10_000  # behind each row of BB Table 1
CHANCE = 1e-3  # more than any token's share of any vocabulary here
SIMILAR = 0.8  # from here on BB's rivals call two models kin


class Claim(NamedTuple):
    """What a paper says, and how a result is read beside it."""

    item: str  # "Figure 1a"
    says: str  # in our words
    number: str = ""  # the paper's
    result: str | None = None  # path under results/, without .json; None: not run here
    judge: Callable | None = None  # function of the result that returns a text and a verdict
    command: str = ""  # what would make the result, where it is not run here

    def read(self, result, judge):
        """The claim beside a result."""
        return self._replace(result=result, judge=judge)

    def made_by(self, command):
        """The claim where no result is, with the command that would make it."""
        return self._replace(command=command)


# ---- verdicts ----------------------------------------------------------------------------------------------


def above(low, high, bound=0.0):
    """Is what lies between low and high above `bound`? OPEN where the interval has both answers."""
    if low > bound:
        return HOLDS
    if high < bound:
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


# ---- from a result to what is said of it -------------------------------------------------------------------


def each(by, judge, *arguments, part="rows", **where):
    """A judge of a result: what `judge` says of its rows, for each value of the columns `by` (spaced) apart.

    `where` has the rows to read: columns with the value, or the values, that they must have. Layer 0 (the
    input) and step 0 (the newborn itself) are left out.
    """

    def judge_result(result):
        rows = pd.DataFrame(result[part])
        for column, values in where.items():
            rows = rows[rows[column].isin(np.atleast_1d(values).tolist())]
        for column in {"layer", "step"} & set(rows):
            rows = rows[rows[column] > 0]
        if rows.empty:
            return "no such rows", NONE
        rows = rows.assign(num_seeds=np.size(result["settings"].get("seed")))
        names = by.split()
        groups = rows.groupby(names) if names else [((), rows)]
        texts, verdicts = [], []
        for values, group in groups:
            text, verdict = judge(group, *arguments)
            labels = [f"{name} {value}" for name, value in zip(names, values, strict=True)]
            texts.append(f"{', '.join(labels)}: {text}")
            verdicts.append(verdict)
        if len(texts) == 1:
            return text, verdict
        return "; ".join(texts), all_hold(verdicts)

    return judge_result


def unjudged(judge):
    """The same without a verdict, for what the paper says without a number or an order."""
    return lambda result: (judge(result)[0], NONE)


def span(values):
    """The least and the largest of some values, None left out."""
    known = pd.Series(values, dtype=float).dropna()
    ends = [f"{end:.4g}" for end in (known.min(), known.max())]
    return " to ".join(dict.fromkeys(ends))


def bounded(value, low, high):
    """A value and its interval."""
    if np.isnan(low):
        return f"{value:.4g} (one seed)"
    return f"{value:.4g} ({low:.4g} to {high:.4g})"


# ---- judges of rows ----------------------------------------------------------------------------------------


def ranges(rows, *columns):
    """Least and largest value of some columns; no verdict."""
    texts = [f"{column} {span(rows[column])}" for column in columns]
    return f"{', '.join(texts)}, n = {len(rows)}", NONE


def rises(rows, value, along):
    """Does a column rise with another at every step?"""
    curve = rows.groupby(along)[value].mean()
    ends = f"{curve.iloc[0]:.4g} to {curve.iloc[-1]:.4g}"
    return f"{ends} at {along} {curve.index[0]} to {curve.index[-1]}", agreed(np.diff(curve) > 0)


def ordered(rows, value, along, by, *names):
    """At all `along`, does |value| fall from one name of the column `by` to the next (default: sorted)?"""
    values = rows.pivot_table(index=along, columns=by, values=value)
    values = values.reindex(columns=names or values.columns)
    falls = values.abs().diff(axis=1).iloc[:, 1:] < 0
    texts = [f"{name} {span(values[name])}" for name in values]
    return ", ".join(texts), agreed(falls.to_numpy().ravel())


def within(rows, theory):
    """Is the theory inside the seeds' 95 % interval of the mean cosine, in every row? OPEN with one seed."""
    freedom = rows["num_seeds"] - 1
    half = student.ppf(0.975, freedom) * rows["seed_std"] / freedom**0.5
    means = rows["mean_cosine"]
    texts = [bounded(*ends) for ends in zip(means, means - half, means + half, strict=True)]
    measured = f"{', '.join(texts)} where theory says {span(rows[theory])}"
    if half.isna().any():
        return measured, OPEN
    inside = (rows[theory] - means).abs() <= half
    verdict = HOLDS if inside.all() else FAILS
    return measured, verdict


def distance(rows, theory):
    """How far is the mean cosine from a theory? No verdict."""
    off = (rows["mean_cosine"] - rows[theory]).abs()
    return f"off by at most {off.max():.4f}, theory up to {rows[theory].max():.4f}", NONE


def lower(rows, first, second, key):
    """Is `key` lower in runs of one calibration than in those of the same seed with a second one?"""
    runs = rows.pivot(index="seed", columns="calibration", values=key).reindex(columns=[first, second])
    runs = runs.astype(float).dropna()
    if len(runs) < 2:
        return "too few runs to say", OPEN
    means = runs.mean()
    difference = interval(runs[first] - runs[second])
    measured = f"{first} {means[first]:.4g}, {second} {means[second]:.4g}: {bounded(*difference.values())}"
    return measured, above(-difference["high"], -difference["low"])


def above_zero(rows, key):
    """Is the mean of `key` over seeds above zero, by its interval?"""
    values = rows[key].astype(float).dropna()
    if len(values) < 2:
        return "too few runs to say", OPEN
    mean = interval(values)
    return bounded(*mean.values()), above(mean["low"], mean["high"])


def preference(rows):
    """Is a newborn's favourite token beyond chance? If not: OPEN with fewer sequences than the paper's."""
    row = next(rows.itertuples())
    number = row.num_sequences
    low, high = np.array(wilson(row.top1_count, number)) * number / row.uniform_max_count
    verdict = FAILS if number >= PAPER_SEQUENCES else OPEN
    if row.log10_p < LOG10_LEVEL:
        verdict = HOLDS
    return f"{bounded(row.ratio, low, high)} x, log10 p {row.log10_p:.1f}", verdict


def grows_with_length(rows):
    """Is the favourite's share, over all seeds, larger at the greatest length than at the least?"""
    sums = rows.groupby("sequence_length")[["top1_count", "num_sequences"]].sum()
    shares = [wilson(*counts) for counts in sums.to_numpy()]
    texts = [f"{low:.2%} to {high:.2%} at T = {T}" for T, (low, high) in zip(sums.index, shares, strict=True)]
    shortest, longest = shares[0], shares[-1]
    return ", ".join(texts), above(longest[0] - shortest[1], longest[1] - shortest[0])


def own_favourites(rows):
    """Have the rows favourites of their own? OPEN for one row, and where a favourite may be chance."""
    number = rows["top1_token"].nunique()
    measured = f"{number} favourites in {len(rows)} rows"
    if len(rows) == 1 or rows["log10_p"].max() >= LOG10_LEVEL:
        return measured, OPEN
    verdict = HOLDS if number == len(rows) else FAILS
    return measured, verdict


def same_token(rows, first, second):
    """Do two columns name the same token more often than by chance?"""
    hits = (rows[first] == rows[second]).sum()
    low, high = wilson(hits, len(rows))
    return f"{hits} of {len(rows)} ({low:.2f} to {high:.2f})", above(low, high, CHANCE)


def widening(rows):
    """From layer 2 on, is the full model ahead of MLP only, and more so with each layer?"""
    curves = rows.pivot_table(index="layer", columns="variant", values="mean_cosine")
    lead = (curves["full"] - curves["mlp"]).loc[2:]
    return f"ahead by {span(lead)}", all_hold([agreed(lead > 0), agreed(np.diff(lead) > 0)])


def decay(rows):
    """Does the std of aggregated values fall with the position, octave by octave (1, 2-3, 4-7, ...)?"""
    std = rows.set_index("position")["std"].sort_index()
    octaves = std.groupby(np.log2(std.index).astype(int)).mean()
    falls = agreed(np.diff(octaves) < 0)
    return f"{std.iloc[0]:.3f} at position 1 to {std.iloc[-1]:.3f} at {len(std)}", falls


def excess(rows, theory):
    """What multiple of a theory's is the std, from position 16 on? No verdict."""
    late = rows[rows["position"] >= 16]
    return f"{span(late['std'] / late[theory])} times the theory", NONE


def shifted_upward(rows):
    """Is tau with its birth above tau with a stranger at every checkpoint?"""
    gap = rows["mean_tau"] - rows["stranger_mean_tau"]
    return f"tau higher by {span(gap)} at {len(gap)} checkpoints", agreed(gap > 0)


def right_answers(rows):
    """Do both of the paper's tests say kin of kin alone, of every pair? All are kin where none is told."""
    kin = rows.get("kin", pd.Series(True, rows.index))
    right = (rows[["paper_t_p", "paper_u_p"]] < LEVEL).eq(kin, axis=0).all(axis=1)
    measured = f"{right.sum()} of {len(rows)} right, t-test p {span(rows['paper_t_p'])}"
    verdict = HOLDS if right.all() else FAILS
    return f"{measured}, U-test p {span(rows['paper_u_p'])}", verdict


def missed_kin(rows, *rivals):
    """Do all rivals miss every pair of kin?"""
    missed = rows[[*rivals]] < SIMILAR
    texts = [f"{name} misses {missed[name].sum()} ({span(rows[name])})" for name in rivals]
    verdict = HOLDS if missed.all(axis=None) else FAILS
    return f"of {len(rows)}: {', '.join(texts)}", verdict


def false_alarms(rows):
    """Are at most 1 % of strangers called kin, with every scheme and architecture?"""
    ends = rows[["low", "high"]].to_numpy()
    measured = f"{span(rows['rate'])} (intervals {span(ends.ravel())})"
    return measured, all_hold(above(-high, -low, -LEVEL) for low, high in ends)


def sink_heads(rows):
    """Has a trained model sink heads at every length?"""
    ends = rows[["sink_rate", "low", "high"]].to_numpy()
    measured = ", ".join(bounded(*row) for row in ends)
    return measured, all_hold(above(*row[1:]) for row in ends)


def raises(rows, kind, other):
    """Is alpha_k higher, by its interval, with one intervention than with another, at the largest factor?"""
    (value, low, high), (base, base_low, base_high) = [
        rows.loc[rows["intervention"] == name, ["alpha_k", "low", "high"]].iloc[-1] for name in (kind, other)
    ]
    measured = f"{kind} {bounded(value, low, high)}, {other} {bounded(base, base_low, base_high)}"
    return measured, above(low - base_high, high - base_low)


def no_sinks(rows):
    """Is no head of any run a sink head?"""
    return f"sink rate {span(rows['sink_rate'])} in {len(rows)} runs", agreed(rows["sink_rate"] == 0)


def first_stands_out(rows, key):
    """Is `key` largest at position 1, in some layer?"""
    values = rows.pivot_table(index="position", columns="layer", values=key)
    first, others = values.iloc[0], values.iloc[1:]
    measured = f"{span(first)} by layer, {span(first / others.median())} times the median"
    verdict = HOLDS if (first > others.max()).any() else FAILS
    return measured, verdict


# ---- what the papers say -----------------------------------------------------------------------------------

MODEL = "model seed sequence_length"  # one row of a probe

CLAIMS = [
    Claim("Figure 1a", "Nano GPT-2's favourite comes up more often than in uniform draws", "58.5 x").read(
        "ten_thousand/probe", each(MODEL, preference)
    ),
    Claim("Table 1a, Finding 1.1", "Nano GPT-2 prefers a token beyond chance").read(
        "probe", each(MODEL, preference)
    ),
    Claim("Table 1b, Finding 1.1", "so does Nano LLaMA-2, with 10,000 sequences").read(
        "nano_llama/probe", each(MODEL, preference)
    ),
    Claim("Table 1c, Finding 1.1", "so does the 1.2B GPT-2").read("gpt2_1b/probe", each(MODEL, preference)),
    Claim("Finding 1.2, length", "the favourite's share grows with the sequence length").read(
        "lengths/probe", each("model", grows_with_length)
    ),
    Claim("Finding 1.2, scale", "and is larger in the 1.2B model than in the nano one of Table 1a").read(
        "gpt2_1b/probe", unjudged(each("model", grows_with_length))
    ),
    Claim("Finding 1.3", "each seed has a favourite of its own, though token tables agree").read(
        "lengths/probe", each("model sequence_length", own_favourites)
    ),
    Claim("Figure 1b", "the preference comes of states that contract along a direction").read(
        "probe", each("model", ranges, "mean_cosine")
    ),
    Claim("Finding 2.1, Figure 2", "last states of random sequences grow alike with every layer").read(
        "layers", each("sequence_length", rises, "mean_cosine", "layer", variant="full")
    ),
    Claim("Finding 2.2", "more newborns prefer the direction's token than by chance (share lost)").read(
        "overlap", each("model", same_token, "direction_token", "top1_token")
    ),
    Claim("Table 2", "final cosine: full > MLP only > attention only, which is about 0").read(
        "ablation", each("model", ordered, "mean_cosine", "seed", "variant", "full", "mlp", "attention")
    ),
    Claim("Figure 3", "times uniform draws: full > MLP only > attention only, about 1").read(
        "ablation", each("model", ordered, "ratio", "seed", "variant", "full", "mlp", "attention")
    ),
    Claim("Figure 4", "MLP only contracts with every block").read(
        "mlp", each("stack", rises, "mean_cosine", "layer", stack="standard")
    ),
    Claim("Figure 5", "at every layer: bare ReLU blocks > standard ones with ReLU > tanh").read(
        "mlp", each("", ordered, "mean_cosine", "layer", "stack", "mlp0_relu", "standard_relu", "mlp0_tanh")
    ),
    Claim("Proposition 2, a block", "a ReLU MLP0 block gives 1/pi", "0.3183").read(
        "mlp", each("stack", within, "theory", stack="mlp0_relu", layer=1)
    ),
    Claim("Proposition 2, depth", "with every ReLU block it grows, towards 1", "1").read(
        "mlp", each("stack", rises, "mean_cosine", "layer", stack="mlp0_relu")
    ),
    Claim("Proposition 2, tanh", "with tanh it stays 0", "0").read(
        "mlp", each("stack", distance, "theory", stack="mlp0_tanh")
    ),
    Claim("Footnote 5", "ReLU's fall in deep layers may be vanishing states (ours: an epsilon)").read(
        "mlp",
        unjudged(each("stack", rises, "mean_cosine", "layer", stack=["mlp0_relu", "mlp0_relu_epsilon"])),
    ),
    Claim("Figure 6", "GELU's asymmetry is engaged with LayerNorm only").read(
        "engage", each("", ordered, "mean_cosine", "model", "normed", True, False)
    ),
    Claim("Figure 7, layer 1", "MLP only contracts at once, attention only does not").read(
        "layers", each("sequence_length", ordered, "mean_cosine", "layer", "variant", "mlp", "attention")
    ),
    Claim("Figure 7, layer 2 on", "full is ahead of MLP only, more so with every layer").read(
        "layers", each("sequence_length", widening)
    ),
    Claim("Table 3", "Attn0 after MLP0 > MLP0 twice > MLP0 once", "0.98 > 0.49 > 0.31").read(
        "amplify",
        each("sequence_length", ordered, "mean_cosine", "model", "stack", "mlp0_attn0", "mlp0_mlp0", "mlp0"),
    ),
    Claim(
        "Proposition 4", "MLP0 twice: 0.49; Attn0 after it: 1 / (1 + (pi - 1) / T)", "0.979 at T = 100"
    ).read("amplify", each("stack sequence_length", within, "theory", stack=["mlp0_attn0", "mlp0_mlp0"])),
    Claim("Figure 8, depth", "states of one sequence grow alike with every layer, towards 1").read(
        "intra", each("sequence_length", rises, "mean_cosine", "layer", stack="attention")
    ),
    Claim("Figure 8, length", "more so in shorter sequences").read(
        "intra", each("stack", ordered, "mean_cosine", "layer", "sequence_length", stack="attention")
    ),
    Claim("Proposition 5, depth", "in Attn0 they grow with every layer, towards 1", "1").read(
        "intra", each("sequence_length", rises, "mean_cosine", "layer", stack="attn0")
    ),
    Claim("Proposition 5, formula", "1/T + (1 - 1/T) rho_L, accurate for long sequences").read(
        "intra", each("sequence_length", distance, "limit_theory", stack="attn0")
    ),
    Claim("Equation 2", "position 1 keeps its variance, later ones lose theirs", "std as 1/sqrt(i)").read(
        "variance", each("model", decay)
    ),
    Claim("Figure 9", "measured std nearly overlaps sigma/sqrt(i) (ours: from i = 16 on)", "1").read(
        "variance", each("model", excess, "uniform_theory")
    ),
    Claim("Figure 10", "some hidden dimensions are largest far more often than others").read(
        "ten_thousand/probe", each("model", ranges, "dimension_ratio")
    ),
    Claim("Figure 11", "every checkpoint is nearer to its birth than to a stranger").read(
        "persistence", each("", shifted_upward)
    ),
    Claim("Table 4a", "LLaMA style: newborns are strangers", "t 0.357 to 0.678, U 0.335 to 0.565").read(
        "lineage", each("kin", right_answers, table="4a")
    ),
    Claim("Table 4b", "a newborn and its trained self are kin", "t 4e-10 to 6e-4, U 1e-9 to 3e-3").read(
        "lineage", each("kin", right_answers, table="4b, 8")
    ),
    Claim("Table 4c", "another's trained self is a stranger", "t 0.035 to 0.426, U 0.096 to 0.486").read(
        "lineage", each("kin", right_answers, table="4c")
    ),
    Claim("Table 5", "after a second corpus a child is kin, a stranger's child is not").read(
        "lineage", each("kin", right_answers, table="5")
    ),
    Claim("Tables 5, 12, The Stack", "also where that corpus is code; there every rival fails").made_by(
        "python train.py --init-from RUN --source hf:bigcode/the-stack-dedup --tokenizer FILE"
    ),
    Claim("Table 6", "models fine-tuned from Llama-2-7b on 5M to 500B tokens are kin", "p < 0.01").made_by(
        "python seedprint.py paper Llama-2-7b-hf vicuna-7b-v1.5"
    ),
    Claim("Table 7, attenuation", "WikiText-2's perplexity falls from 21.33 to 21.02", "-0.015 nats").read(
        "calibrations", each("", lower, "attenuate", "none", "text_loss", config="laptop")
    ),
    Claim("Table 7, amplification", "it is comparable: 21.33 and 21.95", "+0.029 nats").read(
        "calibrations", unjudged(each("", lower, "amplify", "none", "text_loss", config="laptop"))
    ),
    Claim("Table 8", "rivals miss all of Table 4b, all < 0.8", "at most 0.149, 0.381, 0.581, 0.196").read(
        "lineage", each("", missed_kin, "intrinsic", "reef", "pcs", "ics", table="4b, 8")
    ),
    Claim("Table 9", "Qwen style: newborns are strangers", "t 0.094 to 0.451, U 0.074 to 0.529").read(
        "lineage", each("kin", right_answers, table="9")
    ),
    Claim("Table 10", "a newborn and its trained self are kin", "t 1e-24 to 4e-13, U 2e-20 to 2e-11").read(
        "lineage", each("kin", right_answers, table="10")
    ),
    Claim("Table 11", "another's trained self is a stranger", "t 0.026 to 0.286, U 0.040 to 0.254").read(
        "lineage", each("kin", right_answers, table="11")
    ),
    Claim("Table 12", "after a second corpus a child is kin, a stranger's child is not").read(
        "lineage", each("kin", right_answers, table="12")
    ),
    Claim("Tables 4, 5, 7-14, their size", "12 layers; 10B tokens of OpenWebText, or 200,000 steps").made_by(
        "torchrun train.py configs/nano_llama.py"
    ),
    Claim("Figure 12, baseline", "a pretrained language model has sinks at every length").read(
        "smollm2/rate", each("checkpoint", sink_heads)
    ),
    Claim("Figure 12, amplification", "it lowers the sink rate").read(
        "calibrations", each("", lower, "amplify", "none", "sink_rate", config="laptop")
    ),
    Claim("Figure 12, attenuation", "it lowers the sink rate").read(
        "calibrations", each("", lower, "attenuate", "none", "sink_rate", config="laptop")
    ),
    Claim("Figure 12, amplification, a toy", "the same of models that sink: Bigram-Backcopy").read(
        "calibrations", each("", lower, "amplify", "none", "sink_rate", config="backcopy")
    ),
    Claim("Figure 12, attenuation, a toy", "the same of models that sink: Bigram-Backcopy").read(
        "calibrations", each("", lower, "attenuate", "none", "sink_rate", config="backcopy")
    ),
    Claim("Figure 12, both, a toy", "attenuation leaves fewer sinks than amplification").read(
        "calibrations", each("", lower, "attenuate", "amplify", "sink_rate", config="backcopy")
    ),
    Claim("Figure 13", "Gaussian matrices stand for strangers: p < 0.01 is rare (own tables)", "0.01").read(
        "errors", each("test", false_alarms, test=["t-test", "U-test"], inputs="own embedding")
    ),
    Claim("Figure 13, Gaussian inputs", "the same with the inputs that Section 6.1.1 describes", "0.01").read(
        "errors", each("test", false_alarms, test=["t-test", "U-test"], inputs="gaussian")
    ),
    Claim("Figure 14", "Qwen style: every checkpoint is kin of its birth", "p < 0.01").read(
        "qwen/persistence", each("", right_answers)
    ),
    Claim("Section 6.1.2", "so it is throughout training (ours: LLaMA style)", "p < 0.01").read(
        "persistence", each("", right_answers)
    ),
    Claim("SO: variance", "the first layer's aggregated values vary most at position 1, then less").read(
        "smollm2/anatomy", each("checkpoint", decay, layer=1)
    ),
    Claim("SO: super neurons", "few hidden units wake for the first token, writing to few dimensions").read(
        "smollm2/anatomy", each("layer", ranges, "first", "others", "down_share", part="super_neurons")
    ),
    Claim("SO: dimension disparity", "where sinks are, the first state's max / mean surges", "> 200").read(
        "smollm2/anatomy", each("checkpoint", first_stands_out, "dominance_ratio")
    ),
    Claim("SO: key lock", "one surging dimension makes the first key a row of W_K, for any token").read(
        "smollm2/anatomy", each("checkpoint", first_stands_out, "key_alignment")
    ),
    Claim("SO: self-mask", "alpha_k rises at once if token k attends to itself alone").read(
        "smollm2/intervene", each("", raises, "self_mask", "none", changed="all")
    ),
    Claim("SO: variance amplification", "alpha_k rises with its values' deviation").read(
        "smollm2/intervene", each("", rises, "alpha_k", "factor", intervention="amplify", changed=1)
    ),
    Claim("SO: control", "deviation counts, not norm: amplifying does more than scaling").read(
        "smollm2/intervene", each("", raises, "amplify", "scale", changed=1)
    ),
    Claim("SO: head-wise RMSNorm, loss", "validation loss falls from 2.781 to 2.742", "-0.039 nats").read(
        "calibrations", each("", lower, "headnorm", "none", "val_loss", config="laptop")
    ),
    Claim("SO: head-wise RMSNorm, speed", "it learns faster (ours: mean loss of evaluations)").read(
        "calibrations", each("", lower, "headnorm", "none", "mean_loss", config="laptop")
    ),
    Claim("SO: head-wise RMSNorm, sinks", "there are none (ours: a toy that sinks without)", "0").read(
        "calibrations", each("", no_sinks, config="backcopy", calibration="headnorm")
    ),
    Claim("SO: disparity, trained", "head-wise RMSNorm lowers it, layers' mean: 82.7 to 33.7", "-49.0").read(
        "calibrations", each("", lower, "headnorm", "none", "disparity", config="laptop")
    ),
    Claim("SO: effective rank, trained", "head-wise RMSNorm raises it: 343.7 to 446.0", "+102.3").read(
        "calibrations", each("", lower, "none", "headnorm", "effective_rank", config="laptop")
    ),
    Claim("SO: output projection", "strong columns go on reading what varies more", "tau 0.32").read(
        "calibrations", each("", above_zero, "output_tau", config="laptop", calibration="none")
    ),
    Claim("SO: sinks by layer", "from layer 5 on in 152M parameters; none with head-wise RMSNorm").made_by(
        "torchrun train.py configs/nano_llama.py --attn-calibration headnorm --track-sinks"
    ),
]
