"""What do the two papers say, and what was measured beside it?

    >>> from reproduce.claims import CLAIMS
    >>> [claim.item for claim in CLAIMS if claim.result == "amplify"]
    ['Table 3', 'Proposition 4']

BB is *Transformers Are Born Biased*, SO is *The Structural Origin of Attention Sink*. A judge reads rows of
a result, and returns what was measured, as text, and a list of cases: True, False, or None where an interval
has both answers. There are cases only where the paper states what can be checked without a threshold of ours.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest
from scipy.stats import t as student

from lib.results import interval
from model import PRESETS
from reproduce.baselines import BASELINES, THRESHOLD

LEVEL, LOG10_LEVEL = 0.01, -2.0  # the papers' level of significance
NANO_VOCABULARY = PRESETS["nano_gpt2"].vocab_size
PAPER_SEQUENCES = 10_000  # behind each row of BB Table 1


class NotRun(Exception):
    """A result has none of the rows that a claim is about."""


class Claim(NamedTuple):
    """What a paper says, and how a result is read beside it."""

    item: str  # "Figure 1a"
    says: str  # in our words
    number: str = ""  # the paper's
    result: str = ""  # path under results/, without .json; "": not run here
    judge: Callable | None = None  # of the result's JSON

    def read(self, result):
        """What was measured, as text, and the verdict ("": none)."""
        try:
            text, cases = self.judge(result)
        except NotRun:
            return "not run here", ""
        return text, verdict(cases)


def verdict(cases):
    """What follows from the cases of a claim; nothing if there are none."""
    if not cases:
        return ""
    if False in cases:
        return "does not hold"
    return "open" if None in cases else "holds"


def select(result, part="rows", **where):
    """The rows of a result whose columns have some values, one or a list each; NotRun if there are none.

    Layer 0 (the input) and step 0 (the newborn itself) are left out. `num_seeds`: of which a row is a mean.
    """
    chosen = []
    for row in result[part]:
        wanted = [row[name] in np.atleast_1d(values).tolist() for name, values in where.items()]
        if all(wanted) and 0 not in (row.get("layer"), row.get("step")):
            chosen.append({"num_seeds": np.size(result["settings"].get("seed"))} | row)
    if not chosen:
        raise NotRun
    return chosen


def apart(rows, name, judge, *arguments):
    """What a judge says of the rows of each value of a column: the texts, and all cases."""
    texts, cases = [], []
    for value in dict.fromkeys(row[name] for row in rows):
        text, more = judge([row for row in rows if row[name] == value], *arguments)
        texts.append(f"{name} {value}: {text}")
        cases += more
    return "; ".join(texts), cases


def column(rows, name):
    """The values of a column."""
    return np.array([row[name] for row in rows])


def curve(rows, value, along, **where):
    """A column's known values by another's, in its order; of the rows whose columns have some values."""
    chosen = [row for row in rows if where.items() <= row.items() and row[value] is not None]
    return dict(sorted((row[along], row[value]) for row in chosen))


def span(values):
    """The least and the largest of some values, as text."""
    ends = [f"{end:.4g}" for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def bounded(value, low, high):
    """A value and its interval, as text."""
    return f"{value:.4g} ({low:.4g} to {high:.4g})"


def above(low, high, bound=0.0):
    """Is what lies between low and high above `bound`? None where the interval has both answers."""
    if low > bound:
        return True
    return False if high < bound else None


def below(low, high, bound=0.0):
    """Is it below? None where the interval has both answers."""
    return above(-high, -low, -bound)


def by_interval(rows, value, is_so, bound=0.0):
    """Is every row's interval `above` or `below` a bound?"""
    texts = [bounded(row[value], row["low"], row["high"]) for row in rows]
    return ", ".join(texts), [is_so(row["low"], row["high"], bound) for row in rows]


def ranges(rows, *names, bound=None):
    """Least and largest value of some columns; are all below a bound? No case where there is none."""
    texts = [f"{name} {span(column(rows, name))}" for name in names]
    cases = []
    if bound is not None:
        cases = [max(row[name] for name in names) < bound for row in rows]
    return f"{', '.join(texts)}, n = {len(rows)}", cases


def exceeds(rows, larger, smaller):
    """Is one column above another in every row?"""
    text, _ = ranges(rows, larger, smaller)
    return text, list(column(rows, larger) > column(rows, smaller))


def ratio(rows, value, theory):
    """What multiple of a theory's is what was measured? No case."""
    return f"{span(column(rows, value) / column(rows, theory))} times the theory", []


def rises(rows, value="mean_cosine", along="layer"):
    """Does a column rise with another at every step?"""
    places, values = zip(*curve(rows, value, along).items())
    ends = f"{values[0]:.4g} to {values[-1]:.4g}"
    return f"{ends} at {along} {places[0]} to {places[-1]}", list(np.diff(values) > 0)


def ordered(rows, by, *names, value="mean_cosine", along="layer"):
    """At all `along`, does |value| fall from each name of the column `by` to the next?"""
    curves = [curve(rows, value, along, **{by: name}) for name in names]
    if not all(curves):
        raise NotRun
    cases = []
    for larger, smaller in pairwise(curves):
        cases += [abs(larger[place]) > abs(smaller[place]) for place in larger if place in smaller]
    return ", ".join(f"{name} {span(values.values())}" for name, values in zip(names, curves)), cases


def within(rows):
    """Is the theory inside the seeds' 95 % interval of the mean cosine, in every row? None with one seed."""
    texts, cases = [], []
    for row in rows:
        mean, freedom = row["mean_cosine"], row["num_seeds"] - 1
        half = student.ppf(0.975, freedom) * row["seed_std"] / max(1, freedom) ** 0.5  # NaN with one seed
        texts.append(bounded(mean, mean - half, mean + half))
        cases.append(abs(row["theory"] - mean) <= half if freedom else None)
    return f"{', '.join(texts)} where theory says {span(column(rows, 'theory'))}", cases


def widening(rows):
    """From layer 2 on, is the full model ahead of MLP only, and more so with each layer?"""
    full, mlp = (curve(rows, "mean_cosine", "layer", variant=name) for name in ("full", "mlp"))
    lead = [full[layer] - mlp[layer] for layer in full if layer >= 2]
    return f"ahead by {span(lead)}", [lead[0] > 0, *(np.diff(lead) > 0)]


def decay(rows):
    """Does the std of aggregated values fall with the position, octave by octave (1, 2-3, 4-7, ...)?

    An octave that the sequence does not fill is left out: at T = 64 it would be a single position.
    """
    std = list(curve(rows, "std", "position").values())
    octaves, first = [], 1
    while 2 * first - 1 <= len(std):
        octaves.append(np.mean(std[first - 1 : 2 * first - 1]))
        first *= 2
    return f"{std[0]:.3f} at position 1 to {std[-1]:.3f} at {len(std)}", list(np.diff(octaves) < 0)


def first_stands_out(rows, key):
    """Is `key` largest at position 1, in some layer?"""
    layers = sorted(set(column(rows, "layer")))
    curves = [list(curve(rows, key, "position", layer=layer).values()) for layer in layers]
    is_largest = any(values[0] > max(values[1:]) for values in curves)
    return f"{span([values[0] for values in curves])} by layer", [is_largest]


def preference(rows):
    """Is a newborn's favourite token beyond chance? If not: None with fewer sequences than the paper's."""
    texts, cases = [], []
    for row in rows:
        texts.append(f"{row['ratio']:.4g} x, log10 p {row['log10_p']:.1f}")
        is_beyond = row["log10_p"] < LOG10_LEVEL
        cases.append(is_beyond if is_beyond or row["num_sequences"] >= PAPER_SEQUENCES else None)
    return ", ".join(texts), cases


def grows_with_length(rows):
    """Is the favourite's share, over all seeds, larger at the greatest length than at the least?"""
    texts, ends = [], []
    for T in sorted(set(column(rows, "sequence_length"))):
        chosen = [row for row in rows if row["sequence_length"] == T]
        count = binomtest(sum(column(chosen, "top1_count")), sum(column(chosen, "num_sequences")))
        low, high = count.proportion_ci(method="wilson")
        texts.append(f"{low:.2%} to {high:.2%} at T = {T}")
        ends += [low, high]
    return ", ".join(texts), [above(ends[-2] - ends[1], ends[-1] - ends[0])]


def own_favourites(rows):
    """Have the rows favourites of their own? None for one row, and where a favourite may be chance."""
    number = len(set(column(rows, "top1_token")))
    is_known = len(rows) > 1 and max(column(rows, "log10_p")) < LOG10_LEVEL
    return f"{number} favourites in {len(rows)} rows", [number == len(rows) if is_known else None]


def more_often(rows, name, chance):
    """Is a column true more often than by chance?"""
    hits = int(column(rows, name).sum())
    low, high = binomtest(hits, len(rows)).proportion_ci(method="wilson")
    return f"{hits} of {len(rows)} ({low:.2f} to {high:.2f})", [above(low, high, chance)]


def right_answers(rows):
    """Do both of the paper's tests call related what is, and nothing else? All is, unless `kin` tells."""
    t, u = column(rows, "paper_t_p"), column(rows, "paper_u_p")
    kin = [row.get("kin", True) for row in rows]
    right = np.equal(t < LEVEL, kin) & np.equal(u < LEVEL, kin)
    return f"{right.sum()} of {len(rows)} right, t-test p {span(t)}, U-test p {span(u)}", list(right)


def false_alarms(result, inputs):
    """Are at most 1 % of unrelated pairs called related, by either test, scheme and architecture?"""
    chosen = select(result, test=["t-test", "U-test"], inputs=inputs)
    return apart(chosen, "test", by_interval, "rate", below, LEVEL)


def lower(rows, first, second, key):
    """Is `key` lower in runs of one calibration than in those of the same seed with a second one?"""
    a, b = (curve(rows, key, "seed", calibration=name) for name in (first, second))
    seeds = [seed for seed in a if seed in b]
    if len(seeds) < 2:
        return "too few runs to say", [None]
    differences = [a[seed] - b[seed] for seed in seeds]
    mean, low, high = interval(differences).values()
    text = f"{first} minus {second}: {bounded(mean, low, high)}, {len(seeds)} seeds"
    if below(low, high) is None:
        counts = np.arange(len(seeds) + 1, 10_000)  # with how many seeds would the interval be without zero?
        half = student.ppf(0.975, counts - 1) * np.std(differences, ddof=1) / np.sqrt(counts)
        enough = counts[half < abs(mean)]
        needed = f"{enough[0]:,}" if len(enough) else "more than 10,000"
        text += f"; {needed} would tell, if mean and deviation stayed"
    return text, [below(low, high)]


def above_zero(rows, key):
    """Is the mean of `key` over seeds above zero, by its interval?"""
    mean, low, high = interval(column(rows, key)).values()
    return bounded(mean, low, high), [above(low, high)]


def no_sinks(rows):
    """Is no head of any run a sink head?"""
    rates = column(rows, "sink_rate")
    return f"sink rate {span(rates)} in {len(rows)} runs", list(rates == 0)


def by_layer(rows):
    """The share of heads that sink, in the mean of runs, layer by layer; no verdict."""
    rates = np.mean([[layer["sink_rate"] for layer in row["layers"]] for row in rows], axis=0)
    return f"{' '.join(f'{rate:.0%}' for rate in rates)} of heads in layers 1 to {len(rates)}", []


def raises(rows, kind, other):
    """Is alpha_k higher, by its interval, with one intervention than with another?"""
    by_kind = {row["intervention"]: row for row in rows}
    a, b = by_kind[kind], by_kind[other]
    texts = [f"{row['intervention']} {bounded(row['alpha_k'], row['low'], row['high'])}" for row in (a, b)]
    return ", ".join(texts), [above(a["low"] - b["high"], a["high"] - b["low"])]


def of_table(table, says, number=""):
    """A claim about the pairs of one of BB's tables of lineage."""
    item = f"Table {table.partition(',')[0]}"
    return Claim(item, says, number, "lineage", lambda r: right_answers(select(r, table=table)))


def of_text(item, says, number, judge, *arguments, **where):
    """A claim about models trained on text: ours by configs/text_sink.py, as the measured text says."""

    def read(result):
        return apart(select(result, "runs", config="text_sink", **where), "config", judge, *arguments)

    return Claim(item, says, number, "text", read)


# fmt: off
CLAIMS = [  # of each, what the paper says; the result that is read, and by which judge
    Claim("Figure 1a", "Nano GPT-2's favourite comes up more often than in uniform draws", "58.5 x",
        "ten_thousand/probe", lambda r: preference(select(r))),
    Claim("Table 1a, Finding 1.1", "Nano GPT-2 prefers a token beyond chance", "",
        "probe", lambda r: preference(select(r))),
    Claim("Table 1b, Finding 1.1", "so does Nano LLaMA-2, with 10,000 sequences", "",
        "nano_llama/probe", lambda r: preference(select(r))),
    Claim("Table 1c, Finding 1.1", "so does the 1.2B GPT-2", "",
        "gpt2_1b/probe", lambda r: preference(select(r))),
    Claim("Finding 1.2, length", "the favourite's share grows with the sequence length", "",
        "lengths/probe", lambda r: grows_with_length(select(r))),
    Claim("Finding 1.3", "each seed has a favourite of its own, though embeddings agree", "",
        "lengths/probe", lambda r: apart(select(r), "sequence_length", own_favourites)),
    Claim("Figure 1b", "the preference comes of states that contract along a direction", "",
        "probe", lambda r: ranges(select(r), "mean_cosine")),
    Claim("Finding 2.1, Figure 2", "last states of random sequences grow alike with every layer", "",
        "layers", lambda r: apart(select(r, variant="full"), "sequence_length", rises)),
    Claim("Finding 2.2", "more newborns prefer the direction's token than by chance (share lost)", "",
        "predict", lambda r: more_often(select(r), "direction_matches", 1 / NANO_VOCABULARY)),
    Claim("Table 2", "final cosine: full > MLP only > attention only, which is about 0", "",
        "ablation", lambda r: ordered(select(r), "variant", "full", "mlp", "attention", along="seed")),
    Claim("Figure 3", "times uniform draws: full > MLP only > attention only, about 1", "",
        "ablation",
        lambda r: ordered(select(r), "variant", "full", "mlp", "attention", value="ratio", along="seed")),
    Claim("Figure 4", "MLP only contracts with every block", "",
        "mlp", lambda r: rises(select(r, stack="standard"))),
    Claim("Figure 5", "at every layer: bare ReLU blocks > standard ones with ReLU > tanh", "",
        "mlp", lambda r: ordered(select(r), "stack", "mlp0_relu", "standard_relu", "mlp0_tanh")),
    Claim("Proposition 2, a block", "a ReLU MLP0 block gives 1/pi", "0.3183",
        "mlp", lambda r: within(select(r, stack="mlp0_relu", layer=1))),
    Claim("Proposition 2, depth", "with every ReLU block it grows, towards 1", "1",
        "mlp", lambda r: rises(select(r, stack="mlp0_relu"))),
    Claim("Proposition 2, tanh", "with tanh it stays 0", "0",
        "mlp", lambda r: ranges(select(r, stack="mlp0_tanh"), "mean_cosine", "theory")),
    Claim("Figure 6", "GELU's asymmetry is engaged with LayerNorm only", "",
        "engage", lambda r: ordered(select(r), "normed", True, False, along="model")),
    Claim("Figure 7, layer 1", "MLP only contracts at once, attention only does not", "",
        "layers", lambda r: apart(select(r), "sequence_length", ordered, "variant", "mlp", "attention")),
    Claim("Figure 7, layer 2 on", "full is ahead of MLP only, more so with every layer", "",
        "layers", lambda r: apart(select(r), "sequence_length", widening)),
    Claim("Table 3", "Attn0 after MLP0 > MLP0 twice > MLP0 once", "0.98 > 0.49 > 0.31",
        "amplify",
        lambda r: ordered(select(r), "stack", "mlp0_attn0", "mlp0_mlp0", "mlp0", along="sequence_length")),
    Claim("Proposition 4", "MLP0 twice: 0.49; then Attn0: 1 / (1 + (pi - 1) / T)", "0.979 at T = 100",
        "amplify", lambda r: apart(select(r, stack=["mlp0_attn0", "mlp0_mlp0"]), "stack", within)),
    Claim("Figure 8, depth", "states of one sequence grow alike with every layer, towards 1", "",
        "intra", lambda r: apart(select(r, stack="attention"), "sequence_length", rises)),
    Claim("Figure 8, length", "more so in shorter sequences", "",
        "intra", lambda r: ordered(select(r, stack="attention"), "sequence_length", 32, 128, 512)),
    Claim("Proposition 5, depth", "in Attn0 they grow with every layer, towards 1", "1",
        "intra", lambda r: apart(select(r, stack="attn0"), "sequence_length", rises)),
    Claim("Proposition 5, formula", "1/T + (1 - 1/T) rho_L, accurate for long sequences", "",
        "intra",
        lambda r: apart(select(r, stack="attn0"), "sequence_length", ratio, "mean_cosine", "limit_theory")),
    Claim("Equation 2", "position 1 keeps its variance, later ones lose theirs", "std as 1/sqrt(i)",
        "variance", lambda r: apart(select(r), "model", decay)),
    Claim("Figure 9", "measured std nearly overlaps sigma/sqrt(i) (ours: from i = 16 on)", "1",
        "variance",
        lambda r: apart(select(r, position=range(16, 1025)), "model", ratio, "std", "uniform_theory")),
    Claim("Figure 10", "some hidden dimensions are largest far more often than others", "",
        "ten_thousand/probe", lambda r: ranges(select(r), "dimension_ratio")),
    Claim("Figure 11", "every checkpoint is nearer to its birth than to another's", "",
        "persistence", lambda r: exceeds(select(r), "mean_tau", "stranger_mean_tau")),
    of_table("4a", "LLaMA style: newborns are unrelated", "t 0.357 to 0.678, U 0.335 to 0.565"),
    of_table("4b, 8", "a newborn and its trained self are related", "t 4e-10 to 6e-4, U 1e-9 to 3e-3"),
    of_table("4c", "another's trained self is unrelated", "t 0.035 to 0.426, U 0.096 to 0.486"),
    of_table("5", "after a second corpus a child is related, another's child is not"),
    Claim("Tables 5, 12, The Stack", "also where that corpus is code; there every baseline fails"),
    Claim("Table 6", "models fine-tuned from Llama-2-7b on 5M to 500B tokens are related", "p < 0.01"),
    Claim("Table 7, attenuation", "WikiText-2's perplexity falls from 21.33 to 21.02", "-0.015 nats",
        "perplexity", lambda r: apart(select(r), "config", lower, "attenuate", "none", "text_loss")),
    Claim("Table 8", "baselines miss all of Table 4b, all < 0.8", "at most 0.149, 0.381, 0.581, 0.196",
        "lineage", lambda r: ranges(select(r, table="4b, 8"), *BASELINES, bound=THRESHOLD)),
    of_table("9", "Qwen style: newborns are unrelated", "t 0.094 to 0.451, U 0.074 to 0.529"),
    of_table("10", "a newborn and its trained self are related", "t 1e-24 to 4e-13, U 2e-20 to 2e-11"),
    of_table("11", "another's trained self is unrelated", "t 0.026 to 0.286, U 0.040 to 0.254"),
    of_table("12", "after a second corpus a child is related, another's child is not"),
    Claim("Tables 4, 5, 7-14, their size", "12 layers; 10B tokens of OpenWebText, or 200,000 steps"),
    Claim("Figure 12, baseline", "a pretrained language model has sinks at every length", "",
        "smollm2/rate", lambda r: by_interval(select(r), "sink_rate", above)),
    of_text("Figure 12, amplification", "it lowers the sink rate", "",
        lower, "amplify", "none", "sink_rate"),
    of_text("Figure 12, attenuation", "it lowers the sink rate", "",
        lower, "attenuate", "none", "sink_rate"),
    Claim("Figure 13", "Gaussian matrices stand for unrelated models: p < 0.01 is rare", "0.01",
        "errors", lambda r: false_alarms(r, "own embedding")),
    Claim("Figure 13, Gaussian inputs", "the same with Section 6.1.1's inputs", "0.01",
        "errors", lambda r: false_alarms(r, "gaussian")),
    Claim("Figure 14", "Qwen style: every checkpoint is related to its birth", "p < 0.01",
        "qwen/persistence", lambda r: right_answers(select(r))),
    Claim("Section 6.1.2", "so it is throughout training (ours: LLaMA style)", "p < 0.01",
        "persistence", lambda r: right_answers(select(r))),
    Claim("SO: variance", "the first layer's aggregated values vary most at position 1, then less", "",
        "smollm2/anatomy", lambda r: decay(select(r, layer=1))),
    Claim("SO: super neurons", "few hidden units wake for the first token, writing to few dimensions", "",
        "smollm2/anatomy",
        lambda r: apart(select(r, "builders"), "layer", ranges, "first", "others", "down_share")),
    Claim("SO: dimension disparity", "where sinks are, the first state's max / mean surges", "> 200",
        "smollm2/anatomy", lambda r: first_stands_out(select(r), "disparity")),
    Claim("SO: key lock", "one surging dimension makes the first key a row of W_K, for any token", "",
        "smollm2/anatomy", lambda r: first_stands_out(select(r), "key_alignment")),
    Claim("SO: self-mask", "alpha_k rises at once if token k attends to itself alone", "",
        "smollm2/intervene", lambda r: raises(select(r, changed="all", factor=None), "self_mask", "none")),
    Claim("SO: variance amplification", "alpha_k rises with its values' deviation", "",
        "smollm2/intervene",
        lambda r: rises(select(r, intervention="amplify", changed=1), "alpha_k", "factor")),
    Claim("SO: control", "deviation counts, not norm: amplifying does more than scaling", "",
        "smollm2/intervene", lambda r: raises(select(r, changed=1, factor=32.0), "amplify", "scale")),
    of_text("SO: head-wise RMSNorm, loss", "validation loss falls from 2.781 to 2.742", "-0.039 nats",
        lower, "headnorm", "none", "val_loss"),
    of_text("SO: head-wise RMSNorm, speed", "it learns faster (ours: mean loss of evaluations)", "",
        lower, "headnorm", "none", "mean_loss"),
    of_text("SO: head-wise RMSNorm, sinks", "there are none", "0",
        no_sinks, calibration="headnorm"),
    of_text("SO: disparity, trained", "head-wise RMSNorm lowers its mean of layers, 82.7 to 33.7", "-49.0",
        lower, "headnorm", "none", "disparity"),
    of_text("SO: effective rank, trained", "head-wise RMSNorm raises it: 343.7 to 446.0", "+102.3",
        lower, "none", "headnorm", "effective_rank"),
    of_text("SO: output projection", "strong columns go on reading what varies more", "tau 0.32",
        above_zero, "output_tau", calibration="none"),
    Claim("SO: sinks by layer", "from layer 5 on in 152M parameters", "",
        "text", lambda r: apart(select(r, "runs", config="text_eight_layers"), "config", by_layer)),
]
# fmt: on
