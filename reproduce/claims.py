"""What do the two papers say, and what was measured beside it?

    >>> from reproduce.claims import CLAIMS
    >>> [claim.item for claim in CLAIMS if claim.result == "amplify"]
    ['Table 3', 'Proposition 4']

BB is *Transformers Are Born Biased*, SO is *The Structural Origin of Attention Sink*. A judge reads rows of
a result, and returns what was measured, as text, and a list of cases: True, False, or None where an interval
has both answers. One rule makes the verdict of every claim: it "holds" if all its cases do, it "does not
hold" if one case refutes it, and it is "open" otherwise. There are cases only where the paper states what can
be checked without a threshold of ours: an order, a sign, a trend, a law inside an interval, its own level of
significance.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from measure.cosines import interval, wilson
from model import PRESETS

LEVEL, LOG10_LEVEL = 0.01, -2.0  # the papers' level of significance
PAPER_SEQUENCES = 10_000  # behind each row of BB Table 1
SIMILAR = 0.8  # from here on BB's rivals call two models kin


class Claim(NamedTuple):
    """What a paper says, and how a result is read beside it."""

    item: str  # "Figure 1a"
    says: str  # in our words
    number: str = ""  # the paper's
    result: str | None = None  # path under results/, without .json; None: not run here
    read: Callable | None = None  # function of the result that returns a text and a verdict

    def beside(self, result, judge, *columns, **chosen):
        """The claim beside a result, which `read_rows` reads."""
        return self._replace(result=result, read=functools.partial(read_rows, judge, columns, **chosen))


def read_rows(judge, columns, result, apart="", part="rows", **where):
    """What a judge of some columns says of a result's rows, as text, and the verdict ("": none).

    Rows are judged apart for each value of the column `apart`. `where` has the values of the rows to read,
    one or a list for a column. Layer 0 (the input) and step 0 (the newborn itself) are left out.
    """
    groups = defaultdict(list)
    for row in result[part]:
        row = {"num_seeds": np.size(result["settings"].get("seed"))} | row  # over which a row is a mean
        wanted = [row[name] in np.atleast_1d(values).tolist() for name, values in where.items()]
        if all(wanted) and 0 not in (row.get("layer"), row.get("step")):
            groups[row.get(apart)].append(row)
    texts, cases = [], []
    for value, rows in groups.items():
        text, more = judge(rows, *columns)
        texts.append(f"{apart} {value}: {text}" if len(groups) > 1 else text)
        cases += more
    return "; ".join(texts) or "not run here", verdict(cases)


def verdict(cases):
    """What follows from the cases of a claim; nothing if there are none."""
    if not cases:
        return ""
    if False in cases:
        return "does not hold"
    return "open" if None in cases else "holds"


def above(low, high, bound=0.0):
    """Is what lies between low and high above `bound`? None where the interval has both answers."""
    if low > bound:
        return True
    return False if high < bound else None


def rising(values):
    """Is each value above the one before?"""
    return [after > before for before, after in pairwise(values)]


def column(rows, name):
    """The values of a column."""
    return np.array([row[name] for row in rows])


def curve(rows, value, along, **where):
    """A column's known values by another's, in its order; of the rows `where` columns have some values."""
    chosen = [row for row in rows if where.items() <= row.items() and row[value] is not None]
    return dict(sorted((row[along], row[value]) for row in chosen))


def span(values):
    """The least and the largest of some values, as text."""
    ends = [f"{end:.4g}" for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def bounded(value, low, high):
    """A value and its interval, as text."""
    return f"{value:.4g} ({low:.4g} to {high:.4g})"


# ---- judges: orders, trends and laws -----------------------------------------------------------------------


def ranges(rows, *names):
    """Least and largest value of some columns; no case."""
    texts = [f"{name} {span(column(rows, name))}" for name in names]
    return f"{', '.join(texts)}, n = {len(rows)}", []


def ratio(rows, value, theory):
    """What multiple of a theory's is what was measured? No case."""
    return f"{span(column(rows, value) / column(rows, theory))} times the theory", []


def rises(rows, value, along):
    """Does a column rise with another at every step?"""
    places, values = zip(*curve(rows, value, along).items())
    ends = f"{values[0]:.4g} to {values[-1]:.4g}"
    return f"{ends} at {along} {places[0]} to {places[-1]}", rising(values)


def ordered(rows, value, along, by, *names):
    """At all `along`, does |value| fall from each name of the column `by` to the next?"""
    curves = [curve(rows, value, along, **{by: name}) for name in names]
    if not all(curves):
        return "not run here", []
    cases = []
    for larger, smaller in pairwise(curves):
        cases += [abs(larger[place]) > abs(smaller[place]) for place in larger if place in smaller]
    return ", ".join(f"{name} {span(values.values())}" for name, values in zip(names, curves)), cases


def within(rows, theory):
    """Is the theory inside the seeds' 95 % interval of the mean cosine, in every row? None with one seed."""
    texts, cases = [], []
    for row in rows:
        mean, freedom = row["mean_cosine"], row["num_seeds"] - 1
        half = student.ppf(0.975, freedom) * row["seed_std"] / max(1, freedom) ** 0.5  # NaN with one seed
        texts.append(bounded(mean, mean - half, mean + half))
        cases.append(abs(row[theory] - mean) <= half if freedom else None)
    return f"{', '.join(texts)} where theory says {span(column(rows, theory))}", cases


def widening(rows):
    """From layer 2 on, is the full model ahead of MLP only, and more so with each layer?"""
    full, mlp = (curve(rows, "mean_cosine", "layer", variant=name) for name in ("full", "mlp"))
    lead = [full[layer] - mlp[layer] for layer in full if layer >= 2]
    return f"ahead by {span(lead)}", [lead[0] > 0, *rising(lead)]


def decay(rows):
    """Does the std of aggregated values fall with the position, octave by octave (1, 2-3, 4-7, ...)?

    An octave that the sequence does not fill is left out: at T = 64 it would be a single position.
    """
    std = list(curve(rows, "std", "position").values())
    octaves, first = [], 1
    while 2 * first - 1 <= len(std):
        octaves.append(np.mean(std[first - 1 : 2 * first - 1]))
        first *= 2
    return f"{std[0]:.3f} at position 1 to {std[-1]:.3f} at {len(std)}", rising(octaves[::-1])


def first_stands_out(rows, key):
    """Is `key` largest at position 1, in some layer?"""
    layers = sorted(set(column(rows, "layer")))
    curves = [list(curve(rows, key, "position", layer=layer).values()) for layer in layers]
    is_largest = any(values[0] > max(values[1:]) for values in curves)
    return f"{span([values[0] for values in curves])} by layer", [is_largest]


# ---- judges: tokens ----------------------------------------------------------------------------------------


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
        low, high = wilson(sum(column(chosen, "top1_count")), sum(column(chosen, "num_sequences")))
        texts.append(f"{low:.2%} to {high:.2%} at T = {T}")
        ends += [low, high]
    return ", ".join(texts), [above(ends[-2] - ends[1], ends[-1] - ends[0])]


def own_favourites(rows):
    """Have the rows favourites of their own? None for one row, and where a favourite may be chance."""
    number = len(set(column(rows, "top1_token")))
    is_known = len(rows) > 1 and max(column(rows, "log10_p")) < LOG10_LEVEL
    return f"{number} favourites in {len(rows)} rows", [number == len(rows) if is_known else None]


def same_token(rows, first, second):
    """Do two columns name the same token more often than uniform draws from the vocabulary?"""
    hits = (column(rows, first) == column(rows, second)).sum()
    low, high = wilson(hits, len(rows))
    chance = 1 / PRESETS[rows[0]["model"]].vocab_size
    return f"{hits} of {len(rows)} ({low:.2f} to {high:.2f})", [above(low, high, chance)]


# ---- judges: lineage ---------------------------------------------------------------------------------------


def shifted_upward(rows):
    """Is tau with its birth above tau with a stranger at every checkpoint?"""
    gap = column(rows, "mean_tau") - column(rows, "stranger_mean_tau")
    return f"tau higher by {span(gap)} at {len(gap)} checkpoints", list(gap > 0)


def right_answers(rows):
    """Do both of the paper's tests say kin of kin alone, of every pair? All are kin where none is told."""
    t, u = column(rows, "paper_t_p"), column(rows, "paper_u_p")
    kin = [row.get("kin", True) for row in rows]
    right = np.equal(t < LEVEL, kin) & np.equal(u < LEVEL, kin)
    return f"{right.sum()} of {len(rows)} right, t-test p {span(t)}, U-test p {span(u)}", list(right)


def missed_kin(rows, *rivals):
    """Do all rivals miss every pair of kin?"""
    text, _ = ranges(rows, *rivals)
    return text, [max(column(rows, name)) < SIMILAR for name in rivals]


def false_alarms(rows):
    """Are at most 1 % of strangers called kin, with every scheme and architecture?"""
    cases = [above(-row["high"], -row["low"], -LEVEL) for row in rows]
    return ", ".join(bounded(row["rate"], row["low"], row["high"]) for row in rows), cases


# ---- judges: attention sinks -------------------------------------------------------------------------------


def lower(rows, first, second, key):
    """Is `key` lower in runs of one calibration than in those of the same seed with a second one?"""
    a, b = (curve(rows, key, "seed", calibration=name) for name in (first, second))
    seeds = [seed for seed in a if seed in b]
    if len(seeds) < 2:
        return "too few runs to say", [None]
    mean, low, high = interval([a[seed] - b[seed] for seed in seeds]).values()
    return f"{first} minus {second}: {bounded(mean, low, high)}", [above(-high, -low)]


def above_zero(rows, key):
    """Is the mean of `key` over seeds above zero, by its interval?"""
    mean, low, high = interval(column(rows, key)).values()
    return bounded(mean, low, high), [above(low, high)]


def sink_heads(rows):
    """Has a trained model sink heads at every length?"""
    texts = [bounded(row["sink_rate"], row["low"], row["high"]) for row in rows]
    return ", ".join(texts), [above(row["low"], row["high"]) for row in rows]


def no_sinks(rows):
    """Is no head of any run a sink head?"""
    rates = column(rows, "sink_rate")
    return f"sink rate {span(rates)} in {len(rows)} runs", list(rates == 0)


def raises(rows, kind, other):
    """Is alpha_k higher, by its interval, with one intervention than with another?"""
    by_kind = {row["intervention"]: row for row in rows}
    a, b = by_kind[kind], by_kind[other]
    texts = [f"{row['intervention']} {bounded(row['alpha_k'], row['low'], row['high'])}" for row in (a, b)]
    return ", ".join(texts), [above(a["low"] - b["high"], a["high"] - b["low"])]


# ---- what the papers say -----------------------------------------------------------------------------------

CLAIMS = [
    Claim("Figure 1a", "Nano GPT-2's favourite comes up more often than in uniform draws", "58.5 x").beside(
        "ten_thousand/probe", preference
    ),
    Claim("Table 1a, Finding 1.1", "Nano GPT-2 prefers a token beyond chance").beside("probe", preference),
    Claim("Table 1b, Finding 1.1", "so does Nano LLaMA-2, with 10,000 sequences").beside(
        "nano_llama/probe", preference
    ),
    Claim("Table 1c, Finding 1.1", "so does the 1.2B GPT-2").beside("gpt2_1b/probe", preference),
    Claim("Finding 1.2, length", "the favourite's share grows with the sequence length").beside(
        "lengths/probe", grows_with_length
    ),
    Claim("Finding 1.3", "each seed has a favourite of its own, though token tables agree").beside(
        "lengths/probe", own_favourites, apart="sequence_length"
    ),
    Claim("Figure 1b", "the preference comes of states that contract along a direction").beside(
        "probe", ranges, "mean_cosine"
    ),
    Claim("Finding 2.1, Figure 2", "last states of random sequences grow alike with every layer").beside(
        "layers", rises, "mean_cosine", "layer", apart="sequence_length", variant="full"
    ),
    Claim("Finding 2.2", "more newborns prefer the direction's token than by chance (share lost)").beside(
        "overlap", same_token, "direction_token", "top1_token"
    ),
    Claim("Table 2", "final cosine: full > MLP only > attention only, which is about 0").beside(
        "ablation", ordered, "mean_cosine", "seed", "variant", "full", "mlp", "attention"
    ),
    Claim("Figure 3", "times uniform draws: full > MLP only > attention only, about 1").beside(
        "ablation", ordered, "ratio", "seed", "variant", "full", "mlp", "attention"
    ),
    Claim("Figure 4", "MLP only contracts with every block").beside(
        "mlp", rises, "mean_cosine", "layer", stack="standard"
    ),
    Claim("Figure 5", "at every layer: bare ReLU blocks > standard ones with ReLU > tanh").beside(
        "mlp", ordered, "mean_cosine", "layer", "stack", "mlp0_relu", "standard_relu", "mlp0_tanh"
    ),
    Claim("Proposition 2, a block", "a ReLU MLP0 block gives 1/pi", "0.3183").beside(
        "mlp", within, "theory", stack="mlp0_relu", layer=1
    ),
    Claim("Proposition 2, depth", "with every ReLU block it grows, towards 1", "1").beside(
        "mlp", rises, "mean_cosine", "layer", stack="mlp0_relu"
    ),
    Claim("Proposition 2, tanh", "with tanh it stays 0", "0").beside(
        "mlp", ranges, "mean_cosine", "theory", stack="mlp0_tanh"
    ),
    Claim("Figure 6", "GELU's asymmetry is engaged with LayerNorm only").beside(
        "engage", ordered, "mean_cosine", "model", "normed", True, False
    ),
    Claim("Figure 7, layer 1", "MLP only contracts at once, attention only does not").beside(
        "layers", ordered, "mean_cosine", "layer", "variant", "mlp", "attention", apart="sequence_length"
    ),
    Claim("Figure 7, layer 2 on", "full is ahead of MLP only, more so with every layer").beside(
        "layers", widening, apart="sequence_length"
    ),
    Claim("Table 3", "Attn0 after MLP0 > MLP0 twice > MLP0 once", "0.98 > 0.49 > 0.31").beside(
        "amplify", ordered, "mean_cosine", "sequence_length", "stack", "mlp0_attn0", "mlp0_mlp0", "mlp0"
    ),
    Claim(
        "Proposition 4", "MLP0 twice: 0.49; Attn0 after it: 1 / (1 + (pi - 1) / T)", "0.979 at T = 100"
    ).beside("amplify", within, "theory", apart="stack", stack=["mlp0_attn0", "mlp0_mlp0"]),
    Claim("Figure 8, depth", "states of one sequence grow alike with every layer, towards 1").beside(
        "intra", rises, "mean_cosine", "layer", apart="sequence_length", stack="attention"
    ),
    Claim("Figure 8, length", "more so in shorter sequences").beside(
        "intra", ordered, "mean_cosine", "layer", "sequence_length", 32, 128, 512, stack="attention"
    ),
    Claim("Proposition 5, depth", "in Attn0 they grow with every layer, towards 1", "1").beside(
        "intra", rises, "mean_cosine", "layer", apart="sequence_length", stack="attn0"
    ),
    Claim("Proposition 5, formula", "1/T + (1 - 1/T) rho_L, accurate for long sequences").beside(
        "intra", ratio, "mean_cosine", "limit_theory", apart="sequence_length", stack="attn0"
    ),
    Claim("Equation 2", "position 1 keeps its variance, later ones lose theirs", "std as 1/sqrt(i)").beside(
        "variance", decay, apart="model"
    ),
    Claim("Figure 9", "measured std nearly overlaps sigma/sqrt(i) (ours: from i = 16 on)", "1").beside(
        "variance", ratio, "std", "uniform_theory", apart="model", position=range(16, 1025)
    ),
    Claim("Figure 10", "some hidden dimensions are largest far more often than others").beside(
        "ten_thousand/probe", ranges, "dimension_ratio"
    ),
    Claim("Figure 11", "every checkpoint is nearer to its birth than to a stranger").beside(
        "persistence", shifted_upward
    ),
    Claim("Table 4a", "LLaMA style: newborns are strangers", "t 0.357 to 0.678, U 0.335 to 0.565").beside(
        "lineage", right_answers, table="4a"
    ),
    Claim("Table 4b", "a newborn and its trained self are kin", "t 4e-10 to 6e-4, U 1e-9 to 3e-3").beside(
        "lineage", right_answers, table="4b, 8"
    ),
    Claim("Table 4c", "another's trained self is a stranger", "t 0.035 to 0.426, U 0.096 to 0.486").beside(
        "lineage", right_answers, table="4c"
    ),
    Claim("Table 5", "after a second corpus a child is kin, a stranger's child is not").beside(
        "lineage", right_answers, apart="kin", table="5"
    ),
    Claim("Tables 5, 12, The Stack", "also where that corpus is code; there every rival fails"),
    Claim("Table 6", "models fine-tuned from Llama-2-7b on 5M to 500B tokens are kin", "p < 0.01"),
    Claim("Table 7, attenuation", "WikiText-2's perplexity falls from 21.33 to 21.02", "-0.015 nats").beside(
        "calibrations", lower, "attenuate", "none", "text_loss", config="laptop"
    ),
    Claim("Table 8", "rivals miss all of Table 4b, all < 0.8", "at most 0.149, 0.381, 0.581, 0.196").beside(
        "lineage", missed_kin, "intrinsic", "reef", "pcs", "ics", table="4b, 8"
    ),
    Claim("Table 9", "Qwen style: newborns are strangers", "t 0.094 to 0.451, U 0.074 to 0.529").beside(
        "lineage", right_answers, table="9"
    ),
    Claim("Table 10", "a newborn and its trained self are kin", "t 1e-24 to 4e-13, U 2e-20 to 2e-11").beside(
        "lineage", right_answers, table="10"
    ),
    Claim("Table 11", "another's trained self is a stranger", "t 0.026 to 0.286, U 0.040 to 0.254").beside(
        "lineage", right_answers, table="11"
    ),
    Claim("Table 12", "after a second corpus a child is kin, a stranger's child is not").beside(
        "lineage", right_answers, apart="kin", table="12"
    ),
    Claim("Tables 4, 5, 7-14, their size", "12 layers; 10B tokens of OpenWebText, or 200,000 steps"),
    Claim("Figure 12, baseline", "a pretrained language model has sinks at every length").beside(
        "smollm2/rate", sink_heads
    ),
    Claim("Figure 12, amplification", "it lowers the sink rate").beside(
        "calibrations", lower, "amplify", "none", "sink_rate", config="laptop"
    ),
    Claim("Figure 12, attenuation", "it lowers the sink rate").beside(
        "calibrations", lower, "attenuate", "none", "sink_rate", config="laptop"
    ),
    Claim("Figure 12, amplification, a toy", "the same of models that sink: Bigram-Backcopy").beside(
        "calibrations", lower, "amplify", "none", "sink_rate", config="backcopy"
    ),
    Claim("Figure 12, attenuation, a toy", "the same of models that sink: Bigram-Backcopy").beside(
        "calibrations", lower, "attenuate", "none", "sink_rate", config="backcopy"
    ),
    Claim("Figure 13", "Gaussian matrices stand for strangers: p < 0.01 is rare (own tables)", "0.01").beside(
        "errors", false_alarms, apart="test", test=["t-test", "U-test"], inputs="own embedding"
    ),
    Claim(
        "Figure 13, Gaussian inputs", "the same with the inputs that Section 6.1.1 describes", "0.01"
    ).beside("errors", false_alarms, apart="test", test=["t-test", "U-test"], inputs="gaussian"),
    Claim("Figure 14", "Qwen style: every checkpoint is kin of its birth", "p < 0.01").beside(
        "qwen/persistence", right_answers
    ),
    Claim("Section 6.1.2", "so it is throughout training (ours: LLaMA style)", "p < 0.01").beside(
        "persistence", right_answers
    ),
    Claim("SO: variance", "the first layer's aggregated values vary most at position 1, then less").beside(
        "smollm2/anatomy", decay, layer=1
    ),
    Claim("SO: super neurons", "few hidden units wake for the first token, writing to few dimensions").beside(
        "smollm2/anatomy", ranges, "first", "others", "down_share", apart="layer", part="super_neurons"
    ),
    Claim("SO: dimension disparity", "where sinks are, the first state's max / mean surges", "> 200").beside(
        "smollm2/anatomy", first_stands_out, "dominance_ratio"
    ),
    Claim("SO: key lock", "one surging dimension makes the first key a row of W_K, for any token").beside(
        "smollm2/anatomy", first_stands_out, "key_alignment"
    ),
    Claim("SO: self-mask", "alpha_k rises at once if token k attends to itself alone").beside(
        "smollm2/intervene", raises, "self_mask", "none", changed="all", factor=None
    ),
    Claim("SO: variance amplification", "alpha_k rises with its values' deviation").beside(
        "smollm2/intervene", rises, "alpha_k", "factor", intervention="amplify", changed=1
    ),
    Claim("SO: control", "deviation counts, not norm: amplifying does more than scaling").beside(
        "smollm2/intervene", raises, "amplify", "scale", changed=1, factor=32.0
    ),
    Claim("SO: head-wise RMSNorm, loss", "validation loss falls from 2.781 to 2.742", "-0.039 nats").beside(
        "calibrations", lower, "headnorm", "none", "val_loss", config="laptop"
    ),
    Claim("SO: head-wise RMSNorm, speed", "it learns faster (ours: mean loss of evaluations)").beside(
        "calibrations", lower, "headnorm", "none", "mean_loss", config="laptop"
    ),
    Claim("SO: head-wise RMSNorm, sinks", "there are none (ours: a toy that sinks without)", "0").beside(
        "calibrations", no_sinks, config="backcopy", calibration="headnorm"
    ),
    Claim(
        "SO: disparity, trained", "head-wise RMSNorm lowers it, layers' mean: 82.7 to 33.7", "-49.0"
    ).beside("calibrations", lower, "headnorm", "none", "disparity", config="laptop"),
    Claim("SO: effective rank, trained", "head-wise RMSNorm raises it: 343.7 to 446.0", "+102.3").beside(
        "calibrations", lower, "none", "headnorm", "effective_rank", config="laptop"
    ),
    Claim("SO: output projection", "strong columns go on reading what varies more", "tau 0.32").beside(
        "calibrations", above_zero, "output_tau", config="laptop", calibration="none"
    ),
    Claim("SO: sinks by layer", "from layer 5 on in 152M parameters; none with head-wise RMSNorm"),
]
