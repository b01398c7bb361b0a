"""How often does each test of lineage call strangers kin, and what does it cost? (BB B.3.1; mostly ours)

    python seedprint.py calibrate --model tiny_llama --num-births 200
    python seedprint.py cost BASE CHILD

Newborns of different seeds are strangers by construction, so every rejection is an error. A test is sound if
its p is uniform; a sound test rejects 1 % at p <= 0.01. The setting decides: what the models read (tokens
through their own embedding, through one they share, or Gaussian vectors), and how they are drawn.
"""

import itertools
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.stats import kstest, norm

import baselines
import evidence
from checkpoint import Newborn
from common import UserError, progress, setting
from experiment import conduct, figure
from init import SCHEMES, keyed_generator
from model import PRESETS
from probe import gaussian_vectors, random_tokens
from stats import wilson

AUTHORS = 10_000 * 1024  # tokens that the paper's test reads (BB B.2, 5)
WEIGHTS = "weights"  # as if an input: what the tests of weights read
INPUTS = ("own embedding", "shared embedding", "gaussian")


@dataclass
class Settings(baselines.PaperInputs):
    """What `seedprint.py calibrate` can be told."""

    init: str = "gpt2"  # no flag: it is replaced by --schemes
    model: tuple[str, ...] = setting(("tiny_gpt2", "tiny_llama"), "presets to be born", PRESETS)
    schemes: tuple[str, ...] = setting(("gpt2", "normal"), "how they are drawn", SCHEMES)
    first_seed: int = setting(1, "seed of the first birth; the others follow", least=0)
    num_births: int = setting(200, "newborns with own embeddings, each compared with the next six", least=14)
    paper_births: int = setting(12, "of them for the paper's test, which takes longer; all pairs", least=3)
    permutations: int = setting(999, "relabellings; the smallest p is 1 / (1 + this)", least=99)


def calibrate(s: Settings) -> dict:
    """Every test in every setting; returns the JSON, written with calibrate.png and calibrate_tau.png.

    UserError for numbers that make no sense.
    """
    if s.models:
        raise UserError(f"unexpected argument '{s.models[0]}': calibrate makes its own births (see --help)")
    baselines.check(s, s.model, paper=True)
    columns = "test inputs scheme model num_pairs rejections rate low high ks_p"
    plot = partial(figure, calibrate_tau="taus")
    return conduct(s, "calibrate", "BB B.3.1, Figure 13", every_setting, columns, plot=plot)


def every_setting(s: Settings, device, dtype) -> dict:
    """A row for each test in each setting, and points of the two figures, of the first scheme."""
    rows, points, taus = [], [], []
    settings = list(itertools.product(s.model, s.schemes, INPUTS))
    settings += [(model, s.schemes[0], WEIGHTS) for model in s.model]  # once scaled, they know no scheme
    for model, scheme, inputs in progress(settings, desc="calibrate", unit=" settings"):
        key, drawn = dict(inputs=inputs, scheme=scheme, model=model), scheme == s.schemes[0]
        if inputs == WEIGHTS:
            by_test, drawn = exact_weights(s, model, scheme), False
        else:
            by_test = {"relabelling": exact_p(s, model, scheme, inputs, device, dtype)}
            paper, pooled = paper_p(s, model, scheme, inputs, device, dtype)
            by_test |= paper
            taus += spread(pooled, s, key) if drawn else []
        for test, p in by_test.items():
            pairs = p[np.triu_indices(len(p), 1)] if p.ndim == 2 else p
            rejected = int((pairs <= 0.01).sum())
            low, high = over_births(p <= 0.01) if p.ndim == 2 else wilson(rejected, len(p), 0.99)
            row = dict(test=test) | key | dict(num_pairs=len(pairs), rejections=rejected, low=low, high=high)
            rows.append(row | dict(rate=rejected / len(pairs), ks_p=float(kstest(pairs, "uniform").pvalue)))
            points += quantiles(pairs, key | dict(test=test)) if drawn else []
    return dict(rows=rows, points=points, taus=taus)


def births(s: Settings, model: str, scheme: str, inputs: str, count: int) -> list[Newborn]:
    """Strangers, with embeddings of their own or one for all."""
    shared = 0 if inputs == "shared embedding" else None
    return [Newborn(PRESETS[model], s.first_seed + i, shared, scheme) for i in range(count)]


def exact_p(s: Settings, model: str, scheme: str, inputs: str, device, dtype) -> np.ndarray:
    """The relabelling test's p for each birth and the six that follow it, (pairs,)."""
    d, vocab = PRESETS[model].d_model, PRESETS[model].vocab_size
    draw, width = (gaussian_vectors, d) if inputs == "gaussian" else (random_tokens, vocab)
    given = draw(s.input_seed, range(s.num_sequences), s.sequence_length, width)
    count = s.num_births if inputs == INPUTS[0] else max(14, s.num_births // 4)  # the others are traps
    final = (evidence.states(one, given, device, dtype) for one in births(s, model, scheme, inputs, count))
    prints, p = [evidence.fingerprint(rows.flatten(0, 1)) for rows in final], []
    for i, ahead in itertools.product(range(len(prints)), range(1, 7)):
        j = (i + ahead) % len(prints)
        C = evidence.relation(prints[i], prints[j])
        p.append(evidence.diagonal_test(C, (s.input_seed, i, j), s.permutations)["p"])
    return np.array(p)


def exact_weights(s: Settings, model: str, scheme: str) -> dict[str, np.ndarray]:
    """The p of the tests of weights for each birth and the next, (births,) each."""
    newborns, p = births(s, model, scheme, WEIGHTS, s.num_births), {"weights": [], "basis-free": []}
    for i, (a, b) in enumerate(zip(newborns, newborns[1:] + newborns[:1])):
        C, _ = evidence.weight_correlation(a, b)
        p["weights"].append(evidence.diagonal_test(C["body"], (s.input_seed, i), s.permutations)["p"])
        p["basis-free"].append(evidence.gram_test(evidence.neuron_pairs(a, b, 1), (s.input_seed, i))["p"])
    return {test: np.array(values) for test, values in p.items()}


def paper_p(s: Settings, model: str, scheme: str, inputs: str, device, dtype) -> tuple[dict, np.ndarray]:
    """The p of the paper's tests for all pairs, (births, births) each, and all pairs' taus."""
    config, kind = PRESETS[model], "gaussian" if inputs == "gaussian" else "tokens"
    paper = (s.paper_sequences, s.paper_length, kind, s.input_seed, config.vocab_size, device, dtype)
    newborns = births(s, model, scheme, inputs, s.paper_births)
    outputs = [baselines.last_positions(newborn, *paper).numpy() for newborn in newborns]
    chosen = s.chosen(config.d_model)
    p, pooled = {name: np.ones((len(outputs),) * 2) for name in ("t-test", "U-test", "closed form")}, []
    for i, j in itertools.combinations(range(len(outputs)), 2):
        taus = baselines.identity_taus(outputs[i], outputs[j], *chosen)
        said = baselines.judge_taus(taus, s.paper_sequences, config.d_model, *chosen)
        p["t-test"][i, j], p["U-test"][i, j] = said["paper_t_p"], said["paper_u_p"]
        p["closed form"][i, j] = norm.sf(said["closed_form_z"])
        pooled.append(taus)
    return p, np.concatenate(pooled)


def over_births(rejected: np.ndarray, resamples: int = 2000) -> tuple[float, float]:
    """99 % interval of the rate of `rejected`, (births, births) above the diagonal, by resampling births.

    Pairs that share a birth are not independent, so they cannot be resampled; where all pairs agree, the
    births say nothing of the spread, and the interval is Wilson's for as many pairs as are disjoint.
    """
    births, pairs = len(rejected), np.triu_indices(len(rejected), 1)
    if len(set(rejected[pairs])) == 1:
        return wilson(int(rejected[pairs][0]) * (births // 2), births // 2, 0.99)
    counts = keyed_generator("births", births).multinomial(births, np.full(births, 1 / births), resamples)
    weights = counts[:, pairs[0]] * counts[:, pairs[1]]  # (resamples, pairs)
    weights = weights[weights.sum(axis=1) > 0]
    low, high = np.quantile(weights @ rejected[pairs] / weights.sum(axis=1), (0.005, 0.995))
    return float(low), float(high)


def quantiles(p: np.ndarray, key: dict) -> list[dict]:
    """Sorted p beside what a uniform distribution gives, both as -log10, thinned to 60 points."""
    order = np.unique(np.geomspace(1, len(p), 60).round().astype(int)) - 1
    both = -np.log10([(order + 0.5) / len(p), np.sort(p)[order].clip(min=1e-12)])  # (2, points)
    key = key | dict(panel=f"{key['model']}, {key['inputs']}")
    return [key | dict(expected=x, observed=y, uniform=x) for x, y in both.T.tolist()]


def spread(taus: np.ndarray, s: Settings, key: dict) -> list[dict]:
    """The taus of strangers as a histogram, beside the Gaussian of independent rows (Figure 13)."""
    edges, key = np.linspace(-0.3, 0.3, 61), key | dict(panel=f"{key['model']}, {key['inputs']}")
    measured = 100 * np.histogram(np.clip(taus, -0.3, 0.3), edges)[0] / max(1, len(taus))
    law = 100 * np.diff(norm.cdf(edges, scale=baselines.kendall_std(s.paper_sequences)))
    bins = np.stack([(edges[1:] + edges[:-1]) / 2, measured, law], axis=1)  # (bins, 3)
    return [key | dict(tau=x, share=y, gaussian=z) for x, y, z in bins.tolist()]


def cost(s: baselines.Inputs) -> dict:
    """Tokens and seconds until each test says p < 1e-6 of two kin, doubling sequences; writes cost.json."""
    if len(s.models) != 2:
        raise UserError("cost expects two models of one birth")
    return conduct(s, "cost", "BB 5, 6.1", partial(tokens_needed, *baselines.open_models(s)), plot=None)


def tokens_needed(pair: list, vocab: int, s: baselines.Inputs, device, dtype) -> dict:
    """A row for each test of the two models."""
    T, at = s.sequence_length, (s.input_seed, vocab, device, dtype)

    def relabelling(prepare, n: int) -> float:
        C = evidence.relation(*(evidence.all_positions(source, n, T, *at, prepare) for source in pair))
        return evidence.diagonal_test(C, (s.input_seed,), s.permutations)["log10_p"]

    def paper(key: str, n: int) -> float:
        if n < 4:
            return 0.0
        outputs = (baselines.last_positions(source, n, T, "tokens", *at) for source in pair)
        said = baselines.paper_test(*outputs)[key]
        log_p = norm.logsf(said) if key.endswith("z") else np.log(max(said, 1e-300))
        return float(log_p / np.log(10))

    tests = {
        "relabelling": partial(relabelling, evidence.fingerprint),
        "relabelling, plain ranks": partial(relabelling, evidence.unit_ranks),
        "closed form": partial(paper, "closed_form_z"),
        "t-test": partial(paper, "paper_t_p"),
        "U-test": partial(paper, "paper_u_p"),
    }
    begun = time.perf_counter()
    C, rows = evidence.weight_correlation(*pair)[0]["body"], []
    if C is not None:
        log10_p = evidence.diagonal_test(C, (s.input_seed,), s.permutations)["log10_p"]
        if log10_p > evidence.SAME:  # a million rows would not show it either
            raise UserError("cost expects two models of one birth, but their weights do not agree")
        rows.append(dict(test="weights", tokens=0, seconds=time.perf_counter() - begun, log10_p=log10_p))
        rows[0] |= dict(reached=True, times_fewer_tokens=None)
    for name, test in progress(tests.items(), desc="cost"):
        for n in (-(-3 // T) * 2**k for k in range(15)):  # three rows at least
            for cached in (baselines.last_positions, evidence.all_positions, baselines.null_taus):
                cached.cache_clear()
            begun = time.perf_counter()
            log10_p = test(n)
            took = time.perf_counter() - begun
            if log10_p <= evidence.SAME:
                break
        row = dict(test=name, tokens=n * T, seconds=took, log10_p=log10_p, reached=log10_p <= evidence.SAME)
        rows.append(row | dict(times_fewer_tokens=AUTHORS / (n * T) if row["reached"] else None))
    return dict(rows=rows)
