"""What do the two papers say, and what was measured beside it?

BB is *Transformers Are Born Biased*, SO is *The Structural Origin of Attention Sink*. A judge reads rows of
a result, and returns what was measured, as text, and a list of cases: True, False, or None where an interval
has both answers. There are cases only where the paper states what can be checked without a threshold of ours.
"""

from itertools import pairwise

import numpy as np
from scipy.stats import binomtest
from scipy.stats import t as student

from lib.results import interval
from model import PRESETS
from reproduce.baselines import BASELINES, THRESHOLD

LEVEL, LOG10_LEVEL = 0.01, -2.0  # the papers' level of significance
TESTS = ["t-test", "U-test"]  # the paper's
PAPER_SEQUENCES = 10_000  # behind each row of BB Table 1


class Claim:
    """What a paper says, and how a result is read beside it."""

    def __init__(self, item, says, number="", result="", judge=None, *arguments, apart="", **where):
        self.item = item  # "Figure 1a"
        self.says = says  # in our words
        self.number = number  # the paper's
        self.result = result  # path under results/, without .json; "": not run here
        self.judge = judge  # of the rows that have the values `where`, and of these arguments
        self.arguments = arguments
        self.apart = apart  # rows of each value of this column are judged apart
        self.where = where

    def read(self, result):
        """What was measured, as text, and the verdict ("": none)."""
        rows = rows_where(result, **self.where)
        texts, cases = [], []
        for value in dict.fromkeys(row.get(self.apart) for row in rows):
            group = [row for row in rows if row.get(self.apart) == value]
            text, more = self.judge(group, *self.arguments)
            texts.append(f"{self.apart} {value}: {text}" if self.apart else text)
            cases += more
        return "; ".join(texts) or "not run here", verdict(cases)


def verdict(cases):
    """What follows from the cases of a claim; nothing if there are none."""
    if not cases:
        return ""
    if False in cases:
        return "does not hold"
    return "open" if None in cases else "holds"


def rows_where(result, part="rows", **where):
    """The rows of a result whose columns have some values, one or a list each.

    Layer 0 (the input) and step 0 (the newborn itself) are left out. `num_seeds`: of which a row is a mean.
    """
    chosen = []
    for row in result[part]:
        fits = all(row[name] in np.atleast_1d(values).tolist() for name, values in where.items())
        if fits and 0 not in (row.get("layer"), row.get("step")):
            chosen.append({"num_seeds": np.size(result["settings"].get("seed"))} | row)
    return chosen


def column(rows, name, **where):
    """The values of a column, of the rows whose columns have some values."""
    return np.array([row[name] for row in rows if where.items() <= row.items()])


def span(values):
    """The least and the largest of some values, as text."""
    return " to ".join(dict.fromkeys(f"{end:.4g}" for end in (min(values), max(values))))


def above(low, high, bound=0.0):
    """Is what lies between low and high above `bound`? None where the interval has both answers."""
    if low > bound:
        return True
    return False if high < bound else None


def below(low, high, bound=0.0):
    """Is it below? None where the interval has both answers."""
    return above(-high, -low, -bound)


def by_interval(rows, name, is_so, bound=0.0):
    """Is every row's interval `above` or `below` a bound?"""
    texts = [f"{row[name]:.4g} ({row['low']:.4g} to {row['high']:.4g})" for row in rows]
    return ", ".join(texts), [is_so(row["low"], row["high"], bound) for row in rows]


def by_mean(rows, name, is_so):
    """Is a column's mean over rows `above` or `below` zero, by its interval?"""
    if len(rows) < 2:
        return "too few runs to say", [None]
    return by_interval([interval(column(rows, name), name)], name, is_so)


def than_none(rows, calibration, name, is_so):
    """Is a column `above` or `below` in runs of a calibration, than in those of the same seeds with none?"""
    none = {row["seed"]: row[name] for row in rows if row["calibration"] == "none"}
    changed = [row for row in rows if row["calibration"] == calibration]
    paired = [row | {name: row[name] - none[row["seed"]]} for row in changed]
    text, cases = by_mean(paired, name, is_so)
    return f"{calibration} minus none: {text}, {len(paired)} seeds", cases


def raises(rows, *kinds):
    """Is alpha_k higher, by its interval, with one intervention than with another?"""
    a, b = (row for kind in kinds for row in rows if row["intervention"] == kind)
    text, _ = by_interval([a, b], "alpha_k", above)
    return f"{' and '.join(kinds)}: {text}", [above(a["low"] - b["high"], a["high"] - b["low"])]


def more_often(rows, name, chance):
    """Is a column true more often than by chance?"""
    hits = int(column(rows, name).sum())
    low, high = binomtest(hits, len(rows)).proportion_ci(method="wilson")
    return f"{hits} of {len(rows)} ({low:.2f} to {high:.2f})", [above(low, high, chance)]


def grows_with_length(rows):
    """Is the favourite's share, over all seeds, larger at the greatest length than at the least?"""
    texts, ends = [], []
    for T in sorted(set(column(rows, "sequence_length"))):
        counts = column(rows, "top1_count", sequence_length=T)
        sequences = column(rows, "num_sequences", sequence_length=T)
        low, high = binomtest(counts.sum(), sequences.sum()).proportion_ci(method="wilson")
        texts.append(f"{low:.2%} to {high:.2%} at T = {T}")
        ends += [low, high]
    return ", ".join(texts), [above(ends[-2] - ends[1], ends[-1] - ends[0])]


def within(rows):
    """Is the theory inside the seeds' 95 % interval of the mean cosine, in every row? None with one seed."""
    found, cases = [], []
    for row in rows:
        mean, freedom = row["mean_cosine"], row["num_seeds"] - 1
        half = student.ppf(0.975, freedom) * row["seed_std"] / max(1, freedom) ** 0.5  # NaN with one seed
        found.append(row | {"low": mean - half, "high": mean + half})
        cases.append(abs(row["theory"] - mean) <= half if freedom else None)
    text, _ = by_interval(found, "mean_cosine", above)
    return f"{text} where theory says {span(column(rows, 'theory'))}", cases


def rises(rows, name="mean_cosine", along="layer"):
    """Does a column rise from row to row?"""
    values, places = column(rows, name), column(rows, along)
    text = f"{values[0]:.4g} to {values[-1]:.4g} at {along} {places[0]} to {places[-1]}"
    return text, list(np.diff(values) > 0)


def ordered(rows, name, by, *kinds):
    """Row by row, does the size of a column fall from each kind to the next, as another column tells them?"""
    columns = [column(rows, name, **{by: kind}) for kind in kinds]
    texts = [f"{kind} {span(values)}" for kind, values in zip(kinds, columns)]
    cases = [abs(larger) > abs(smaller) for larger, smaller in pairwise(columns)]
    return ", ".join(texts), list(np.concatenate(cases))


def widening(rows):
    """From layer 2 on, is the full model ahead of MLP only, and more so with each layer?"""
    full, mlp = (column(rows, "mean_cosine", variant=kind)[1:] for kind in ("full", "mlp"))
    lead = full - mlp
    return f"ahead by {span(lead)}", [lead[0] > 0, *(np.diff(lead) > 0)]


def decay(rows):
    """Does the std of aggregated values fall with the position, by whole octaves (1, 2-3, 4-7, ...)?"""
    std = column(rows, "std")
    starts = 2 ** np.arange(int(np.log2(len(std) + 1)))
    octaves = [std[start - 1 : 2 * start - 1].mean() for start in starts]
    return f"{std[0]:.3f} at position 1 to {std[-1]:.3f} at {len(std)}", list(np.diff(octaves) < 0)


def first_stands_out(rows, name):
    """Is a column largest at position 1, in some layer?"""
    firsts = column(rows, name, position=1)
    largest = [max(column(rows, name, layer=layer)) for layer in column(rows, "layer", position=1)]
    return f"{span(firsts)} by layer", [any(firsts == largest)]


def ranges(rows, *names):
    """The least and the largest value of some columns; no case."""
    texts = [f"{name} {span(column(rows, name))}" for name in names]
    return f"{', '.join(texts)}, n = {len(rows)}", []


def times_theory(rows, name, theory):
    """What multiple of a theory's is what was measured? No case."""
    return f"{span(column(rows, name) / column(rows, theory))} times the theory", []


def beyond_chance(rows):
    """Is a newborn's favourite token beyond chance? If not: None with fewer sequences than the paper's."""
    texts, cases = [], []
    for row in rows:
        texts.append(f"{row['ratio']:.4g} x, log10 p {row['log10_p']:.1f}")
        is_beyond = row["log10_p"] < LOG10_LEVEL
        cases.append(is_beyond if is_beyond or row["num_sequences"] >= PAPER_SEQUENCES else None)
    return ", ".join(texts), cases


def own_favourites(rows):
    """Have the rows favourites of their own? None for one row, and where a favourite may be chance."""
    number = len(set(column(rows, "top1_token")))
    is_known = len(rows) > 1 and max(column(rows, "log10_p")) < LOG10_LEVEL
    return f"{number} favourites in {len(rows)} rows", [number == len(rows) if is_known else None]


def right_answers(rows):
    """Do both of the paper's tests call related what is, and nothing else? All is, unless `kin` tells."""
    t, u = column(rows, "paper_t_p"), column(rows, "paper_u_p")
    kin = [row.get("kin", True) for row in rows]
    right = np.equal(t < LEVEL, kin) & np.equal(u < LEVEL, kin)
    return f"{right.sum()} of {len(rows)} right, t-test p {span(t)}, U-test p {span(u)}", list(right)


def at_most(rows, bound, *names):
    """Are some columns nowhere above a bound, a number or another column?"""
    shown = [*names, bound] if bound in rows[0] else names
    text, _ = ranges(rows, *shown)
    return text, [row[name] <= row.get(bound, bound) for row in rows for name in names]


TEXT = {"part": "runs", "config": "text_sink"}  # our runs on text, none of a variant

# fmt: off
CLAIMS = [  # of each, what the paper says and its number; the result, its judge, and what that is given
    Claim("Figure 1a, Table 1a, Finding 1.1", "Nano GPT-2 prefers a token beyond chance", "58.5 x",
        "ten_thousand/probe", beyond_chance),
    Claim("Table 1b, Finding 1.1", "so does Nano LLaMA-2, with 10,000 sequences", "",
        "nano_llama/probe", beyond_chance),
    Claim("Table 1c, Finding 1.1", "so does the 1.2B GPT-2", "",
        "gpt2_1b/probe", beyond_chance),
    Claim("Finding 1.2, length", "the favourite's share grows with the sequence length", "",
        "lengths/probe", grows_with_length),
    Claim("Finding 1.3", "at a length each seed has a favourite of its own, though embeddings agree", "",
        "lengths/probe", own_favourites, apart="sequence_length"),
    Claim("Finding 2.1, Figures 1b, 2", "last states of random sequences grow alike with every layer", "",
        "layers", rises, variant="full", apart="sequence_length"),
    Claim("Finding 2.2", "more newborns prefer the direction's token than by chance (share lost)", "",
        "predict", more_often, "direction_matches", 1 / PRESETS["nano_gpt2"].vocab_size),
    Claim("Table 2", "final cosine: full > MLP only > attention only, which is about 0", "",
        "ablation", ordered, "mean_cosine", "variant", "full", "mlp", "attention"),
    Claim("Figure 3", "times uniform draws: full > MLP only > attention only, about 1", "",
        "ablation", ordered, "ratio", "variant", "full", "mlp", "attention"),
    Claim("Figure 4; Proposition 2, depth", "MLP only contracts with every block; ReLU: towards 1", "",
        "mlp", rises, stack=["standard", "mlp0_relu"], apart="stack"),
    Claim("Figure 5", "at every layer: bare ReLU blocks > standard ones with ReLU > tanh, which stays 0", "",
        "mlp", ordered, "mean_cosine", "stack", "mlp0_relu", "standard_relu", "mlp0_tanh"),
    Claim("Proposition 2, a block", "a ReLU MLP0 block gives 1/pi", "0.3183",
        "mlp", within, stack="mlp0_relu", layer=1),
    Claim("Figure 6", "GELU's asymmetry is engaged with LayerNorm only", "",
        "engage", ordered, "mean_cosine", "normed", True, False),
    Claim("Figure 7, layer 1", "MLP only contracts at once, attention only does not", "",
        "layers", ordered, "mean_cosine", "variant", "mlp", "attention", apart="sequence_length"),
    Claim("Figure 7, layer 2 on", "full is ahead of MLP only, more so with every layer", "",
        "layers", widening, apart="sequence_length"),
    Claim("Table 3", "Attn0 after MLP0 > MLP0 twice > MLP0 once", "0.98 > 0.49 > 0.31",
        "amplify", ordered, "mean_cosine", "stack", "mlp0_attn0", "mlp0_mlp0", "mlp0"),
    Claim("Proposition 4", "MLP0 twice: 0.49; then Attn0: 1 / (1 + (pi - 1) / T)", "0.979 at T = 100",
        "amplify", within, stack=["mlp0_attn0", "mlp0_mlp0"], apart="stack"),
    Claim("Figure 8; Proposition 5, depth", "a sequence's states grow alike with every layer, towards 1", "",
        "intra", rises, stack=["attention", "attn0"], sequence_length=512, apart="stack"),
    Claim("Figure 8, length", "more so in shorter sequences", "",
        "intra", ordered, "mean_cosine", "sequence_length", 32, 128, 512, stack="attention"),
    Claim("Proposition 5, formula", "1/T + (1 - 1/T) rho_L, accurate for long sequences", "",
        "intra", times_theory, "mean_cosine", "limit_theory", stack="attn0", apart="sequence_length"),
    Claim("Equation 2", "position 1 keeps its variance, later ones lose theirs", "std as 1/sqrt(i)",
        "variance", decay, apart="model"),
    Claim("Figure 9", "measured std nearly overlaps sigma/sqrt(i) (ours: from i = 16 on)", "1",
        "variance", times_theory, "std", "uniform_theory", position=range(16, 1025), apart="model"),
    Claim("Figure 10", "some hidden dimensions are largest far more often than others", "",
        "ten_thousand/probe", ranges, "dimension_ratio"),
    Claim("Figure 11", "every checkpoint is nearer to its birth than to another's", "",
        "persistence", at_most, "mean_tau", "stranger_mean_tau"),
    Claim("Tables 4a, 9", "LLaMA style and Qwen style: newborns are unrelated", "t from 0.094, U from 0.074",
        "lineage", right_answers, table=["4a", "9"], apart="table"),
    Claim("Tables 4b, 10", "a newborn and its trained self are related", "t up to 6e-4, U up to 3e-3",
        "lineage", right_answers, table=["4b, 8", "10"], apart="table"),
    Claim("Tables 4c, 11", "another's trained self is unrelated", "t from 0.026, U from 0.040",
        "lineage", right_answers, table=["4c", "11"], apart="table"),
    Claim("Tables 5, 12", "after a second corpus a child is related, another's child is not", "",
        "lineage", right_answers, table=["5", "12"], apart="table"),
    Claim("Tables 5, 12, The Stack", "also where that corpus is code; there every baseline fails"),
    Claim("Table 6", "models fine-tuned from Llama-2-7b on 5M to 500B tokens are related", "p < 0.01"),
    Claim("Table 7, attenuation", "perplexity falls from 21.33 to 21.02 (ours: held-out code)", "-0.015 nats",
        "text", than_none, "attenuate", "text_loss", below, **TEXT),
    Claim("Table 8", "baselines miss all of Table 4b, all < 0.8", "at most 0.149, 0.381, 0.581, 0.196",
        "lineage", at_most, THRESHOLD, *BASELINES, table="4b, 8"),
    Claim("Tables 4, 5, 7-14, their size", "12 layers; 10B tokens of OpenWebText, or 200,000 steps"),
    Claim("Figure 12, baseline", "a pretrained model has sinks at every length (ours: 64 to 256)", "",
        "smollm2/rate", by_interval, "sink_rate", above),
    Claim("Figure 12, amplification", "it lowers the sink rate (ours: at T = 64)", "",
        "text", than_none, "amplify", "sink_rate", below, **TEXT),
    Claim("Figure 12, attenuation", "it lowers the sink rate (ours: at T = 64)", "",
        "text", than_none, "attenuate", "sink_rate", below, **TEXT),
    Claim("Figure 13", "Gaussian matrices stand for unrelated models: p < 0.01 is rare", "0.01",
        "errors", by_interval, "rate", below, LEVEL, inputs="own embedding", test=TESTS, apart="test"),
    Claim("Figure 13, Gaussian inputs", "the same with Section 6.1.1's inputs", "0.01",
        "errors", by_interval, "rate", below, LEVEL, inputs="gaussian", test=TESTS, apart="test"),
    Claim("Figure 14", "Qwen style: every checkpoint is related to its birth", "p < 0.01",
        "qwen/persistence", right_answers),
    Claim("SO: variance", "the first layer's aggregated values vary most at position 1, then less", "",
        "smollm2/anatomy", decay, layer=1),
    Claim("SO: super neurons", "few neurons fire for the first token, writing to few dimensions", "",
        "smollm2/anatomy", ranges, "first", "others", "down_share", part="builders", apart="layer"),
    Claim("SO: dimension disparity", "where sinks are, the first state's max / mean surges", "> 200",
        "smollm2/anatomy", first_stands_out, "disparity"),
    Claim("SO: key lock", "one surging dimension makes the first key a row of W_K (ours: one vector)", "",
        "smollm2/anatomy", first_stands_out, "key_alignment"),
    Claim("SO: self-mask", "alpha_k rises if token k attends to itself alone (ours: in all layers)", "",
        "smollm2/intervene", raises, "self_mask", "none", changed="all", factor=None),
    Claim("SO: variance amplification", "alpha_k rises with its values' deviation (ours: in layer 1)", "",
        "smollm2/intervene", rises, "alpha_k", "factor", intervention="amplify", changed=1),
    Claim("SO: control", "deviation counts, not norm: amplifying does more (ours: in layer 1, by 32)", "",
        "smollm2/intervene", raises, "amplify", "scale", changed=1, factor=32.0),
    Claim("SO: head-wise RMSNorm, loss", "validation loss falls from 2.781 to 2.742", "-0.039 nats",
        "text", than_none, "headnorm", "val_loss", below, **TEXT),
    Claim("SO: head-wise RMSNorm, speed", "it learns faster (ours: mean loss of evaluations)", "",
        "text", than_none, "headnorm", "mean_loss", below, **TEXT),
    Claim("SO: head-wise RMSNorm, sinks", "there are none", "0",
        "text", at_most, 0, "sink_rate", calibration="headnorm", **TEXT),
    Claim("SO: disparity, trained", "head-wise RMSNorm lowers its mean of layers, 82.7 to 33.7", "-49.0",
        "text", than_none, "headnorm", "disparity", below, **TEXT),
    Claim("SO: effective rank, trained", "head-wise RMSNorm raises it: 343.7 to 446.0", "+102.3",
        "text", than_none, "headnorm", "effective_rank", above, **TEXT),
    Claim("SO: output projection", "strong columns go on reading what varies more", "tau 0.32",
        "text", by_mean, "output_tau", above, calibration="none", **TEXT),
    Claim("SO: output projection, SmolLM2", "so they do (ours: mean of 30 layers)", "tau 0.32",
        "smollm2/anatomy", by_mean, "output_tau", above, part="layers"),
]
# fmt: on
