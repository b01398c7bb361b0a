"""What do the papers claim, and does it hold? Every claim judged on the rows of its experiment.

A function takes the rows of the experiment of its name and yields claims; `holds` is computed, a bound is
part of the claim's text. A claim is BB's, SO's, `ours`, or of a `rival` method that BB compares itself with.
"""

import itertools

import numpy as np

from stats import column, split, wilson

VERDICTS = {True: "holds", False: "does not hold", None: "open"}


def claim(text: str, paper, measured, holds: bool | None, of: str = "BB") -> dict:
    """A line of a result: a claim, whose it is, the paper's number if known, what was measured, and if it
    holds, None where that is open."""
    found = dict(claim=text, of=of, paper=paper, measured=measured)
    return found | dict(holds=bool(holds), verdict=VERDICTS[holds])


def ours(text: str, measured, holds: bool | None) -> dict:
    """A claim that no paper makes."""
    return claim(text, None, measured, holds, "ours")


def above(low: float, high: float, than: float = 0.0) -> bool | None:
    """Is what has this interval more `than` that? None where the interval has both answers."""
    return None if low <= than <= high else low > than


def agreement(rows: list[dict], series: str, law: str, bounds: dict, of: str = "ours"):
    """For each value of `series`: is its `law` within its bound? (A quarter of it, if that is less: a cosine
    of nothing shall not pass for it; 0.01 where the law says zero.)"""
    for value, bound in bounds.items():
        part = [row for row in rows if row[series] == value and row[law] is not None]
        if part:
            theory = column(part, law)
            far = np.abs(column(part, "mean_cosine") - theory).max()
            bound = min(bound, theory.max() / 4) if theory.max() > 0.001 else 0.01
            text = f"{series} {value}: mean cosine within {bound:.2g} of its {law}".replace("_", " ")
            yield claim(text, None, f"{far:.4f}, where it is up to {theory.max():.4f}", far <= bound, of)


def probe(rows: list[dict]):
    """BB Findings 1.1 to 1.3 and 2.2, Figure 1a."""
    ratios, p, n = column(rows, "ratio"), column(rows, "log10_p"), rows[0]["num_sequences"]
    text = "every model prefers a token beyond chance, log10 p < -2 (Finding 1.1)"
    yield claim(text, None, f"weakest log10 p {p.max():.1f}", p.max() < -2)
    text = "the top token comes up 10 x as often as in uniform draws, in the median"
    measured = f"{ratios.min():.1f} to {ratios.max():.1f} x, median {np.median(ratios):.1f} x"
    paper = "58.5 x" if n == 10_000 and {row["model"] for row in rows} == {"nano_gpt2"} else None
    yield claim(f"{text}, at N = {n:,} (Figure 1a)", paper, measured, np.median(ratios) >= 10)
    models = [part for part in split(rows, "model", "seed").values() if len(part) > 1]
    if models:
        by_length = [sorted(part, key=lambda row: row["sequence_length"]) for part in models]
        counts = [column(part, "top1_frequency") for part in by_length]
        rising = sum(bool((np.diff(c) >= 0).all() and c[-1] > c[0]) for c in counts)
        text = "the preference grows with the sequence length, and never falls (Finding 1.2)"
        yield claim(text, None, f"{rising} of {len(models)} models", rising == len(models))
    seeds = [part for part in split(rows, "model", "sequence_length").values() if len(part) > 1]
    if seeds:
        distinct = sum(len({row["top1_token"] for row in part}) == len(part) for part in seeds)
        text = "each seed has a favourite of its own (Finding 1.3)"
        yield claim(text, None, f"{distinct} of {len(seeds)} comparisons", distinct == len(seeds))
    wide = column(rows, "dimension_ratio")
    text = "a dimension is largest 2 x as often as by chance, in median"
    yield claim(f"{text} (Figure 10)", None, f"{wide.min():.1f} to {wide.max():.1f} x", np.median(wide) >= 2)
    hits, n = int(column(rows, "direction_matches").sum()), len(rows)
    text = "the contraction direction's token is the top token, mostly (Finding 2.2)"
    yield claim(text, None, f"{hits} of {n} rows", above(*wilson(hits, n), 0.5))


def layers(rows: list[dict]):
    """BB Finding 2.1, Figures 2 and 7, and the kernel recursion (ours)."""
    for T, group in split(rows, "sequence_length").items():
        full, mlp, attention = (column(part, "mean_cosine") for part in split(group, "variant").values())
        first, widening = min(full[1], mlp[1]) - abs(attention[1]), full[-1] - mlp[-1] - (full[2] - mlp[2])
        judged = [
            ("unrelated sequences contract: final cosine above 0.1 (Finding 2.1)", full[-1], 0.1),
            ("at layer 1 attention only stays behind by 0.05 (Figure 7)", first, 0.05),
            ("from layer 2 on, full's lead over MLP only grows by 0.05 (Figure 7)", widening, 0.05),
        ]
        for text, value, least in judged if len(full) > 3 else judged[:2]:
            yield claim(f"T = {T}: {text}", None, f"{value:.4f}", value > least)
    yield from agreement(rows, "variant", "theory", {"full": 0.06, "mlp": 0.03, "attention": 0.03})


def ablation(rows: list[dict]):
    """BB Figure 3 and Table 2."""
    parts = split(rows, "variant")
    for kind, part in parts.items():
        p, expected = column(part, "log10_p"), kind != "attention"
        text = f"{kind}: {'prefers' if expected else 'does not prefer'} tokens, log10 p < -2 (Figure 3)"
        yield claim(text, None, f"log10 p {p.min():.1f} to {p.max():.1f}", all((p < -2) == expected))
    full, mlp, attention = (column(part, "mean_cosine") for part in parts.values())
    measured = f"{full.mean():.4f}, {mlp.mean():.4f}, {attention.mean():.4f}"
    holds = (full > mlp) & (mlp > np.abs(attention)) & (np.abs(attention) < 0.02)
    text = "final cosine: full > MLP only > attention only, which is below 0.02 (Table 2)"
    yield claim(text, None, measured, all(holds))


def overlap(rows: list[dict]):
    """BB Finding 2.2, over all newborns and over those whose favourite is clear."""
    top, second = column(rows, "top1_count"), column(rows, "runner_up_count")
    hits = column(rows, "direction_matches")
    clear = top - second > 2 * (top + second) ** 0.5
    for which, chosen in (("", top > 0), (", where it leads by two standard errors", clear)):
        if chosen.any():
            k, n = int(hits[chosen].sum()), int(chosen.sum())
            low, high = wilson(k, n)
            measured = f"{k} of {n}: {k / n:.2f}, 95 % interval {low:.2f} to {high:.2f}"
            text = f"most newborns' top token is the contraction direction's{which} (Finding 2.2)"
            yield claim(text, None, measured, above(low, high, 0.5))


def mlp(rows: list[dict]):
    """BB Figures 4 and 5, footnote 5, Proposition 2."""
    stacks = {stack: column(part, "mean_cosine") for stack, part in split(rows, "stack").items()}
    exact, floored, standard = (stacks[name] for name in ("mlp0_relu", "mlp0_relu_epsilon", "standard"))
    text = "ReLU MLP0: the drop in deep layers is an epsilon under the norms, not the states (footnote 5)"
    step, last, most = np.diff(exact).min(), floored[-1], floored.max()
    measured = f"without, no step below {step:.4f}; with, {most:.2f} to {last:.2f}"
    yield claim(text, None, measured, step > -0.005 and last < most / 2)
    text = "MLP only contracts with every layer (Figure 4)"
    yield claim(text, None, f"to {standard[-1]:.4f}", all(np.diff(standard) > 0))
    yield from agreement(rows, "stack", "theory", {"mlp0_relu": 0.02, "mlp0_tanh": 0.01}, "BB")
    yield from agreement(rows, "stack", "theory", {"standard": 0.03, "standard_relu": 0.03})


def engage(rows: list[dict]):
    """BB Figure 6."""
    normed, bare = (column(part, "mean_cosine").mean() for part in split(rows, "normed").values())
    text = "LayerNorm engages the asymmetry: ten times the cosine of the bare input (Figure 6)"
    yield claim(text, None, f"{normed:.4f} and {bare:.5f}", normed > 10 * abs(bare))
    yield from agreement(rows, "normed", "theory", {True: 0.02, False: 0.01})


def amplify(rows: list[dict]):
    """BB Table 3, Proposition 4."""
    once, twice, averaged = (column(part, "mean_cosine") for part in split(rows, "stack").values())
    measured = f"{once[0]:.3f}, {twice[0]:.3f}, {averaged[0]:.3f}"
    text = "MLP0, MLP0 twice, MLP0 and Attn0: averaging contracts most, the last above 0.97 (Table 3)"
    yield claim(text, "0.31, 0.49, 0.98", measured, averaged.min() > max(0.97, twice.max()))
    bounds = {"mlp0": 0.02, "mlp0_mlp0": 0.02, "mlp0_attn0": 0.01}
    yield from agreement(rows, "stack", "theory", bounds, "BB")


def intra(rows: list[dict]):
    """BB Figure 8, Proposition 5."""
    bare, full = (sorted(split(part, "sequence_length").items()) for part in split(rows, "stack").values())
    off = [np.abs(column(at, "mean_cosine") - column(at, "limit_theory")).max() for _, at in bare]
    text = f"attn0: within 0.02 of Proposition 5, a limit, at the longest length, T = {bare[-1][0]}"
    yield claim(text, None, f"{off[-1]:.4f}; at T = {bare[0][0]} {off[0]:.4f}", off[-1] <= 0.02)
    lengths = [column(at, "mean_cosine") for _, at in full]  # the paper's solid curves
    least = min(np.diff(c).min() for c in lengths)
    yield claim("the cosine grows with every layer (Figure 8)", None, f"by {least:.2g} or more", least > 0)
    if len(lengths) > 1:
        more = min((a[:8] - b[:8]).min() for a, b in itertools.pairwise(lengths))
        text = "shorter sequences contract more, in the first 8 layers (Figure 8)"
        yield claim(text, None, f"by {more:.2g} or more", more > 0)
    yield from agreement(rows, "stack", "exact_theory", {"attn0": 0.01, "attention": 0.02})


def variance(rows: list[dict]):
    """BB Figure 9, Equation 2."""
    far = [row for row in rows if row["position"] >= 16 and row["theory"] is not None]
    for law, of in {"uniform_theory": "BB", "theory": "ours"}.items() if far else ():
        off = np.abs(column(far, "std") / column(far, law) - 1).max()
        text = f"std of aggregated values within 3 % of its {law.replace('_', ' ')} from position 16 on"
        yield claim(text, None, f"off by {100 * off:.1f} %", off <= 0.03, of)


def predict(rows: list[dict]):
    """Ours: the favourite tokens from the weights alone."""
    cosines, seconds = column(rows, "direction_cosine"), column(rows, "seconds")
    predicted = column(rows, "predicted_token")
    named, top = (predicted == column(rows, f"{of}_token") for of in ("direction", "top1"))
    known, clear = rows[0]["predicted_cosine"] is not None, wilson(top.sum(), len(rows))
    lengths = split(rows, "sequence_length").values() if known else ()
    off = [abs(np.mean(column(at, "mean_cosine") - column(at, "predicted_cosine"))) for at in lengths]
    far = max(off, default=1.0)
    judged = [
        ("weights foretell the direction to 0.985", f"at least {cosines.min():.4f}", cosines.min() >= 0.985),
        ("and its token for 7 newborns of 8", f"{named.sum()} of {len(rows)}", named.mean() >= 7 / 8),
        ("which is the favourite of most newborns", f"{top.sum()} of {len(rows)}", above(*clear, 0.5)),
        ("in less than a second each", f"at most {seconds.max():.2f} s", seconds.max() < 1),
        ("the kernel recursion foretells the seeds' mean cosine to 0.06", f"{far:.4f}", far <= 0.06),
    ]
    yield from itertools.starmap(ours, judged[: 4 + known])


def cure(rows: list[dict]):
    """Ours: does the bias go when down projections cannot pass on what all hidden units share?"""
    inits = split(rows, "init")
    for init, part in inits.items():
        c, p = np.abs(column(part, "mean_cosine")), column(part, "log10_p")
        measured = f"cosine {c.min():.4f} to {c.max():.4f}, log10 p {p.min():.1f} to {p.max():.1f}"
        if init == "gpt2":
            text = "gpt2 is biased: every mean cosine above 0.1, some log10 p below -2"
            yield ours(text, measured, all(c > 0.1) and any(p < -2))
        else:
            text = f"{init} is unbiased: every mean cosine below 0.01, every log10 p above -2"
            yield ours(text, measured, all((c < 0.01) & (p > -2)))
    change = np.abs(column(inits["centered"], "down_std") / column(inits["gpt2"], "down_std") - 1).max()
    text = "centering changes the down projections' std by less than 1 %"
    yield ours(text, f"{100 * change:.3f} %", change < 0.01)


def width(rows: list[dict]):
    """Ours: GELU's contraction is a matter of pre-activations, SwiGLU's of finite width."""
    for (kind, scaling), part in split(rows, "mlp", "scaling").items():
        d = np.log(column(part, "d_model"))
        y = [np.log(column(part, key).clip(min=1e-9)) for key in ("mean_cosine", "theory")]
        slope, law = (np.polyfit(d, values, 1)[0] for values in y)
        slope = slope if all(column(part, "mean_cosine") > 0) else np.nan  # too few sequences to say
        text = f"{kind}, {scaling}: cosine ~ width^s with s within 0.1 of the theory's {law:.2f}"
        yield ours(text, f"{slope:.2f}", abs(slope - law) <= 0.1)


def compare(rows: list[dict]):
    """Ours: the verdicts, as claims of kinship; open where they are inconclusive."""
    for row in rows:
        keys = {"relabel_z": "activations z", "body_z": "weights z", "basis_free_z": "basis-free z"}
        measured = ", ".join(f"{name} {row[key]:.1f}" for key, name in keys.items() if row[key] is not None)
        text = f"{row['suspect']}: evidence of one birth with {row['base']}"
        yield ours(text, measured, {"same birth": True, "no evidence": False}.get(row["verdict"]))


def matrix(rows: list[dict]):
    """Ours: how many pairs are kin, and how clear it is."""
    best = lambda part: [max(row["body_z"] or 0.0, row["basis_free_z"] or 0.0) for row in part]  # noqa: E731
    kin, strangers = (best(split(rows, "verdict").get(it, ())) for it in ("same birth", "no evidence"))
    if kin and strangers:
        text = "kin and strangers are far apart in the z of their weights"
        measured = f"{len(kin)} of {len(rows)} pairs are kin, z at least {min(kin):.1f}; strangers' at most"
        yield ours(text, f"{measured} {max(strangers):.1f}", min(kin) > 10 * max(1, *strangers))


def identify(rows: list[dict]):
    """Ours: the seed, or none."""
    p, seed = rows[0]["family_log10_p"], f"seed {rows[0]['seed']}"
    of, got = (seed, seed) if p <= -6 else ("one of the candidates", "none")
    yield ours(f"the suspect was born of {of}", f"{got}; best family-wise log10 p {p:.1f}", p <= -6)


def calibrate(rows: list[dict]):
    """BB B.3.1: is the Gaussian null valid? Ours: are the permutation tests exact?"""
    exact = ("own embedding", "weights")  # the settings that the tests are made for
    for (test, inputs), part in split(rows, "test", "inputs").items():
        rates, ks = 100 * column(part, "rate"), column(part, "ks_p")
        within = all(row["low"] <= 0.01 <= row["high"] for row in part)
        known = max(row["high"] for row in part) < 0.1 or None  # open, where births are few
        text = f"{test}, {inputs}: the share of strangers with p <= 0.01 is compatible with 1 %"
        of = "BB" if test in ("t-test", "U-test") else "ours"
        yield claim(text, None, f"{rates.min():.1f} to {rates.max():.1f} %", within and known, of)
        if inputs in exact and test in ("relabelling", "weights", "basis-free"):
            text = f"{test}, {inputs}: p is uniform, by Kolmogorov and Smirnov's test at 0.01"
            yield ours(text, f"p at least {ks.min():.3f}", ks.min() > 0.01)


def cost(rows: list[dict]):
    """Ours: what the relabelling test saves."""
    row = next(row for row in rows if row["test"] == "relabelling")
    text = "the relabelling test says p < 1e-6 from a thousandth of the paper's 10,000 x 1,024 tokens"
    measured = f"{row['tokens']:,} tokens, {row['seconds']:.2f} s"
    yield ours(text, measured, (row["times_fewer_tokens"] or 0) > 1000)


def persistence(rows: list[dict]):
    """BB Figures 11 and 14."""
    later = [row for row in rows if row["step"]]
    gap = column(later, "mean_tau") - column(later, "stranger_mean_tau")
    text = "every checkpoint correlates with its birth more than a stranger does (Figure 11)"
    yield claim(text, None, f"tau higher by at least {gap.min():.4f}", gap.min() > 0)
    p = np.maximum(column(later, "paper_t_p"), column(later, "paper_u_p"))
    text = "the paper's tests recognise every checkpoint, p < 0.01 (Figure 14)"
    yield claim(text, "p < 0.01", f"{(p < 0.01).sum()} of {len(p)}, worst p {p.max():.2g}", p.max() < 0.01)
    z = column(later, "relabel_z")
    yield ours("so does the relabelling test, z > 5", f"z at least {z.min():.1f}", z.min() > 5)


def rate(rows: list[dict]):
    """BB Figure 12: are there sinks? Only at lengths where uniform attention is none."""
    for name, part in split([r for r in rows if r["uniform_alpha1"] < r["epsilon"]], "checkpoint").items():
        rates, uniform = column(part, "sink_rate"), column(part, "uniform_alpha1")
        text = f"{name}: some heads are sink heads, at every length (Figure 12)"
        yield claim(text, None, f"sink rate at least {rates.min():.3f}", all(column(part, "low") > 0))
        text = f"{name}: position 1 gets more than uniform attention gives it, at every length"
        times, holds = column(part, "mean_alpha1") / uniform, all(column(part, "alpha1_low") > uniform)
        yield ours(text, f"{times.min():.2f} to {times.max():.2f} times as much", holds)


def sink_variance(rows: list[dict]):
    """BB Figure 9, Equation 2, on any checkpoint."""
    for name, part in split(rows, "checkpoint").items():
        known = [row for row in part if row["theory"] is not None and row["position"] >= 16]
        if known:
            off = np.abs(column(known, "std") / column(known, "theory") - 1).max()
            text = f"{name}: layer 1 within 3 % of the theory from position 16 on"
            yield ours(text, f"off by {100 * off:.1f} %", off <= 0.03)
        layers = [column(layer, "std") for layer in split(part, "layer").values()]
        if len(layers[0]) >= 16:
            fall = [std[0] / std[-1] for std in layers]
            holds = min(fall) > 2 and all(std[0] == std.max() for std in layers)
            text = f"{name}: in every layer values vary most at position 1, twice as much as at the last"
            yield claim(text, None, f"{min(fall):.2f} to {max(fall):.2f} times", holds, "SO")


def anatomy(rows: list[dict]):
    """SO: does every link of the chain single out the first position?"""
    links = dict(std="variance", dominance_ratio="dominance", key_alignment="key collapse")
    links["alpha"] = "attention over uniform"
    for (name, part), key in itertools.product(split(rows, "checkpoint").items(), links):
        ratios = []
        for at in split(part, "layer").values():
            values = column(at, key) / (column(at, "uniform_alpha") if key == "alpha" else 1)
            if not (key == "key_alignment" and part[0][key] > 0.999):  # all begin with one token
                ratios.append(values[0] / max(np.median(values), 1e-30))
        if ratios and len(values) > 2:
            text = f"{name}: {links[key]} stands out at position 1, over 1.5 medians, in most layers (SO)"
            measured = f"{min(ratios):.2f} to {max(ratios):.2f} medians"
            yield claim(text, None, measured, np.mean(np.array(ratios) > 1.5) > 0.5, "SO")


def intervene(rows: list[dict]):
    """SO's interventions, on the summary over the layers that can tell: is a sink made, and by variance?"""
    for name, part in split(rows, "checkpoint").items():
        kinds = split(part, "intervention")
        (base,), (mask,) = kinds["none"], kinds["self_mask"]
        sweep, control = (sorted(kinds[k], key=lambda row: row["factor"]) for k in ("amplify", "scale"))
        made = [(f"its variation times {sweep[-1]['factor']:g}", sweep[-1])]
        made += [("attending only to itself", mask)] if base["position"] > 1 else []
        for what, row in made:
            text = f"{name}: {what}, position {base['position']} gets twice the attention (SO)"
            doubled = row["shift_low"] > 0 and row["alpha_k"] > 2 * base["alpha_k"]
            yield claim(text, None, f"{base['alpha_k']:.4f} to {row['alpha_k']:.4f}", doubled, "SO")
        if len(raised := [row for row in sweep if row["factor"] > 1]) > 1:
            measured = ", ".join(f"{row['factor']:g}: {row['shift_low']:+.2g} or more" for row in raised)
            rising = all(np.diff(column(raised, "alpha_k")) > 0) and raised[0]["shift_low"] > 0
            text = f"{name}: with its variation, alpha_k rises, beyond noise, at every factor above 1 (SO)"
            yield claim(text, None, measured, rising, "SO")
        low, high = (control[-1][f"amplify_more_{end}"] for end in ("low", "high"))
        text = f"{name}: variation, not norm: at factor {sweep[-1]['factor']:g} scaling does less (SO)"
        measured = f"alpha_k by scaling {control[-1]['alpha_k']:.4f}, less by {low:+.4f} to {high:+.4f}"
        yield claim(text, None, measured, above(low, high), "SO")
