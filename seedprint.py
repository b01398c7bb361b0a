"""Are two models of one birth, and of which seed? (BB sections 5 and 6.1; the exact test is ours)

    python seedprint.py compare BASE SUSPECT               # checkpoint folders, or newborns: nano_gpt2@42
    python seedprint.py compare BASE SUSPECT STRANGER --paper-test --baselines
    python seedprint.py matrix MODEL MODEL MODEL           # all pairs, and a family tree
    python seedprint.py identify SUSPECT --seeds 0-99999   # which seed of init.py?
    python seedprint.py calibrate                          # how often is each test wrong?
    python seedprint.py cost BASE CHILD                    # how many tokens does each test need?
    python seedprint.py persistence RUN                    # does the birth fade in training?

A verdict rests on an exact test (`evidence.py`), on weights where they can decide. What it does not prove is
in the README. Models are read one block at a time: two of 7B parameters fit into a laptop's memory.
"""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.cluster.hierarchy import dendrogram, linkage
from scipy.spatial.distance import squareform
from scipy.stats import norm

import calibration
import common
from baselines import Inputs, PaperInputs, kendall, last_positions, open_models, similarities, top_dimensions
from baselines import paper_test as paper_test
from checkpoint import Newborn, check_tokenizer, steps, tensors
from common import UserError, setting
from data import TokenData
from evidence import all_positions, compare_pair, diagonal_test, relation
from evidence import relabelling_test as relabelling_test  # two tests of plain arrays, for others to call
from experiment import conduct, figure
from figures import save_figure
from init import STD, draw
from probe import random_tokens
from stats import student_log10_tail

VERDICT = "suspect verdict relabel_z matched body_z body_matched embedding_z basis_free_z"
JUDGED = " paper_k paper_mean_tau paper_t_p paper_u_p closed_form_z intrinsic reef pcs ics"
STRANGER = 2**31 - 1  # seed of the newborn that `persistence` compares where it is given none


@dataclass
class Compare(PaperInputs):
    """What `seedprint.py compare` can be told."""

    basis_free: bool = setting(False, "make the tests that no new basis or order fools in any case")
    neuron_permutations: int = setting(99, "relabellings of hidden units or coordinates in those", least=19)
    neuron_layers: int = setting(4, "layers that they read", least=1)
    paper_test: bool = setting(False, "make the paper's test as well")
    inputs: str = setting("tokens", "of the paper's test; gaussian is a trap", ("tokens", "gaussian"))
    baselines: bool = setting(False, "compute Intrinsic, REEF, PCS and ICS as well")
    data: str | None = setting(None, "data set whose held-out text REEF reads (default: random tokens)")


@dataclass
class Identify(common.RunSettings):
    """What `seedprint.py identify` can be told."""

    models: tuple[str, ...] = ()
    seeds: str = setting("0-99999", "candidates, FIRST-LAST")
    parameter: str = setting("model.layers.0.self_attn.v_proj.weight", "matrix to look for")
    numbers: int = setting(65_536, "of its first numbers to draw for each candidate", least=4)


@dataclass
class Persistence(PaperInputs):
    """What `seedprint.py persistence` can be told."""

    stranger: str | None = setting(None, "run of another birth (default: a newborn of another seed)")


# ---- pairs -------------------------------------------------------------------------------------------------


def compare(s: Compare) -> dict:
    """The first model against each of the others; writes compare.json and compare.png; returns the JSON."""
    specs, (sources, vocab) = s.models, open_models(s, s.paper_test)
    flags = ("inputs", "side", "top_k", "softmax_temperature", "paper_sequences", "paper_length")
    for name, owner in (dict.fromkeys(flags, "paper_test") | {"data": "baselines"}).items():
        if getattr(s, name) != getattr(Compare, name) and not getattr(s, owner):
            raise UserError(f"--{name} is for --{owner}".replace("_", "-"))
    text = TokenData(s.data) if s.data else None
    if text and text.vocab_size > vocab:
        raise UserError(f"--data {s.data} has {text.vocab_size} tokens, the models {vocab}")
    for spec in specs if text else ():
        check_tokenizer(spec, text)

    def measure(s: Compare, device, dtype) -> dict:
        rows, points, details = [], [], []
        for i, (spec, source) in enumerate(zip(specs[1:], sources[1:]), start=1):
            row, C = examine(sources[0], source, s, vocab, text, device, dtype)
            details.append({name: row.pop(name) for name in ("skipped", "reef_matrix") if name in row})
            rows.append(dict(base=specs[0], suspect=spec) | row)
            name = f"{i}: {clipped(spec)}"
            points += histogram(C["relabel"], f"activations, {name}", row["num_rows"])
            points += histogram(C["body"], f"weights, {name}", None) if "body" in C else []
        return dict(rows=rows, points=points, details=details)

    result = conduct(s, "compare", "BB 6.1", measure, VERDICT + JUDGED)
    for row in result["rows"] if common.rank() == 0 else ():
        print(f"{row['suspect']}: {row['verdict']} ({row['rests_on']})")
    return result


def examine(a, b, s: Compare, vocab: int, text: TokenData | None, device, dtype) -> tuple[dict, dict]:
    """All that `s` asks of a pair of sources: a row, and the correlation matrices of `compare_pair`."""
    at, paper = (s.input_seed, vocab, device, dtype), (s.paper_sequences, s.paper_length, s.inputs)
    prints = [all_positions(source, s.num_sequences, s.sequence_length, *at) for source in (a, b)]
    free = (s.neuron_permutations, s.neuron_layers, s.basis_free)
    row, C = compare_pair(a, b, prints, s.input_seed, s.permutations, *free)
    if s.paper_test:
        outputs = [last_positions(source, *paper, *at) for source in (a, b)]
        row |= paper_test(*outputs, *s.chosen(a.config.d_model))
    if s.baselines:
        tokens = random_tokens(s.input_seed, range(200), s.sequence_length, vocab)
        if text:
            tokens, _ = text.held_out(200, s.sequence_length)
        if len(tokens) < 200:
            raise UserError(f"{text.folder}: {len(tokens)} held-out windows, where REEF reads 200")
        row |= similarities(a, b, tokens, device, dtype)
    return row, C


def clipped(spec: str) -> str:
    """The end of a long name, for figures."""
    return spec if len(spec) < 28 else "..." + spec[-25:]


def histogram(C: torch.Tensor, title: str, num_rows: int | None):
    """Shares of matched and mismatched correlations by size; the law is what independent rows would give."""
    off = C[~torch.eye(len(C), dtype=bool)].numpy()
    edges, none = np.linspace(C.min().item(), C.max().item(), 61), [None] * 60
    law = (100 * np.diff(norm.cdf(edges, scale=num_rows**-0.5))).tolist() if num_rows else none
    for pairs, values, laws in (("mismatched", off, law), ("matched", C.diagonal().numpy(), none)):
        share = 100 * np.histogram(values, edges)[0] / len(values)
        for x, y, theory in zip(((edges[1:] + edges[:-1]) / 2).tolist(), share.tolist(), laws):
            yield dict(correlation=x, share=y, theory=theory, coordinates=pairs, evidence=title)


def matrix(s: Inputs) -> dict:
    """All pairs; writes matrix.json and matrix.png, a heat map and a family tree; returns the JSON."""
    specs, (sources, vocab) = s.models, open_models(s)

    def measure(s: Inputs, *on) -> dict:
        rows, at = [], (s.num_sequences, s.sequence_length, s.input_seed, vocab, *on)
        prints = [all_positions(source, *at) for source in sources]
        pairs = list(itertools.combinations(zip(specs, sources, prints), 2))
        for (a, one, its), (b, other, theirs) in common.progress(pairs, desc="matrix", unit=" pairs"):
            row, _ = compare_pair(one, other, (its, theirs), s.input_seed, s.permutations)
            del row["skipped"]
            rows.append(dict(a=a, b=b) | row)
        return dict(rows=rows)

    plot = lambda result, folder: plot_matrix(specs, result["rows"], folder / "matrix.png")  # noqa: E731
    return conduct(s, "matrix", "BB Table 4", measure, "a b " + VERDICT, plot=plot)


def plot_matrix(specs: tuple[str, ...], rows: list[dict], path: Path) -> None:
    """Correlations of body weights, with the z of activations written in, and the tree of their distances."""
    matched, z = ([row[key] or 0.0 for row in rows] for key in ("body_matched", "relabel_z"))
    value, z = squareform(matched) + np.eye(len(specs)), squareform(z)
    figure = Figure(figsize=(4 + 0.9 * len(specs), 2.2 + 0.55 * len(specs)), layout="constrained")
    tree, heat = figure.subplots(1, 2, width_ratios=(1, 2))
    style = dict(orientation="left", no_labels=True, color_threshold=0, above_threshold_color="black")
    order = dendrogram(linkage(1 - np.clip(matched, 0, 1), "average"), ax=tree, **style)["leaves"]
    tree.set(xlabel="1 - correlation", title="family tree")
    tree.spines[["top", "right", "left"]].set_visible(False)
    value, z = (found[np.ix_(order, order)] for found in (value, z))
    image = heat.imshow(value, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower")
    names = [clipped(specs[i]) for i in order]
    heat.set_xticks(range(len(specs)), names, rotation=40, ha="right", fontsize=8)
    heat.set_yticks(range(len(specs)), names, fontsize=8)
    heat.set_title("z of activations")
    for y, x in itertools.permutations(range(len(specs)), 2):
        colour = "black" if value[y, x] > 0.6 else "white"
        heat.text(x, y, f"{z[y, x]:.1f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, label="correlation of body weights")
    save_figure(figure, path)


# ---- which seed? -------------------------------------------------------------------------------------------


def identify(s: Identify) -> dict:
    """The seed of `init.py` whose draw of one matrix lies closest to the suspect's; writes identify.json.

    A newborn's numbers are Gaussian, so their cosine with any fixed numbers has a known law, and the search
    among all candidates costs its number (Bonferroni). UserError if the matrix is not there.
    """
    if len(s.models) != 1:
        raise UserError("identify expects one model: a checkpoint folder, or PRESET@SEED")
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", s.seeds)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not 0 <= last - first < 10**7:
        raise UserError(f"--seeds {s.seeds}: expected FIRST-LAST, as in 0-99999, ten million at most")
    source = tensors(s.models[0])
    shape = source.shapes.get(s.parameter, ())
    if len(shape) != 2:
        names = ", ".join(n for n in source.shapes if n.startswith("model.layers.0.") and "proj" in n)
        raise UserError(f"--parameter {s.parameter}: expected a matrix, like {names}")
    weight = source.read(s.parameter).flatten()[: s.numbers].double().numpy()
    m, candidates = len(weight), range(first, last + 1)
    if not np.isfinite(weight).all():
        raise UserError(f"{s.models[0]}: {s.parameter} is not finite: check it for NaN")
    unit = (weight / max(np.linalg.norm(weight), 1e-300)).astype(np.float32)

    def cosine_of(seed: int) -> float:
        numbers = draw(seed, s.parameter, shape, STD, m).numpy()
        return float(numbers @ unit) / float(np.linalg.norm(numbers))

    def measure(*_) -> dict:
        best, rows = [], []
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy draws outside the interpreter lock
            for i in common.progress(range(0, len(candidates), 256), desc="seeds", unit=" x 256"):
                seeds = candidates[i : i + 256]
                best = sorted([*best, *zip(pool.map(cosine_of, seeds), seeds)], reverse=True)[:10]
        for cosine, seed in best:
            t = cosine * ((m - 1) / max(1 - cosine**2, 1e-300)) ** 0.5
            family = float(min(0.0, student_log10_tail(t, m - 1) + np.log10(len(candidates))))
            rows.append(dict(seed=seed, cosine=cosine, z=cosine * m**0.5, family_log10_p=family))
        return dict(rows=rows, candidates=len(candidates))

    return conduct(s, "identify", "ours", measure, plot=None)


# ---- a life ------------------------------------------------------------------------------------------------


def persistence(s: Persistence) -> dict:
    """Every checkpoint of a run against its birth, and a stranger beside it (BB Figures 11 and 14).

    `mean_tau` and `std_tau` are of Kendall's tau over the birth's top dimensions; the stranger is of the same
    step where --stranger is a run that has it, and its last one elsewhere. Writes persistence.json and .png.
    """
    run = steps(s.models[0]) if len(s.models) == 1 else []
    if len(run) < 2 or run[0].name != "step_0000000":
        raise UserError("persistence expects one run folder with its birth, step_0000000, and a later step")
    others = {path.name: path for path in steps(s.stranger)} if s.stranger else {}
    opened = replace(s, models=(str(run[0]), str(run[-1]), *([s.stranger] if s.stranger else [])))
    sources, vocab = open_models(opened, paper=True)
    birth, width = sources[0], sources[0].config.d_model
    stranger = sources[2] if s.stranger else Newborn(birth.config, STRANGER, scheme=s.init)

    def measure(s: Persistence, *on) -> dict:
        paper = (s.paper_sequences, s.paper_length, "tokens", s.input_seed, vocab, *on)
        inputs, chosen_as = (s.num_sequences, s.sequence_length, s.input_seed, vocab, *on), s.chosen(width)
        born, born_rows = last_positions(birth, *paper), all_positions(birth, *inputs)
        chosen, rows, points, p = top_dimensions(born.numpy(), *chosen_as[:2]), [], [], []
        for folder in common.progress(run, desc="checkpoints"):
            child, step = tensors(str(folder)), int(folder.name.removeprefix("step_"))
            other = tensors(str(others[folder.name])) if folder.name in others else stranger
            output, strange = (last_positions(source, *paper) for source in (child, other))
            row = dict(step=step)
            for who, model, other in (("", "its own birth", output), ("stranger_", "another birth", strange)):
                tau = kendall(born.numpy(), other.numpy(), chosen, s.softmax_temperature)
                row |= {f"{who}mean_tau": float(tau.mean()), f"{who}std_tau": float(tau.std())}
                points.append(dict(step=step, tau=float(tau.mean()), std=float(tau.std()), model=model))
            C = relation(born_rows, all_positions(child, *inputs))
            test = diagonal_test(C, ("relabel", s.input_seed), s.permutations)
            row |= dict(relabel_z=test["z"], relabel_log10_p=test["log10_p"], permutation_p=test["p"])
            rows.append(row | paper_test(born, output, *chosen_as))
            logs = {f"{n}-test": np.log10(max(rows[-1][f"paper_{n.lower()}_p"], 1e-300)) for n in "tU"}
            for name, log10_p in ({"relabelling": test["log10_p"]} | logs).items():
                p.append(dict(step=step, test=name, minus_log10_p=-log10_p, level=2.0))
        points, p = ([point for point in drawn if point["step"]] for drawn in (points, p))  # log axes
        return dict(rows=rows, points=points, p=p)

    columns = "step mean_tau std_tau stranger_mean_tau stranger_std_tau relabel_z paper_t_p paper_u_p"
    plot = partial(figure, persistence_p="p")
    return conduct(s, "persistence", "BB Figures 11 and 14", measure, columns, plot=plot)


COMMANDS = {
    "compare": (Compare, compare),
    "matrix": (Inputs, matrix),
    "identify": (Identify, identify),
    "calibrate": (calibration.Settings, calibration.calibrate),
    "cost": (Inputs, calibration.cost),
    "persistence": (Persistence, persistence),
}


def plan(words: list[str]) -> list:
    """The settings of a command line, and what to do; the models are its words after the subcommand."""
    words, arguments = common.leading(words)
    if not words and {"-h", "--help"} & {*arguments}:
        print(__doc__ + "\nEach subcommand has a --help of its own.")
        return []
    settings_class, work = COMMANDS[common.choose(words[0] if words else "", COMMANDS, "subcommand")]
    settings = common.parse_settings(settings_class, __doc__, arguments)
    settings.models = tuple(words[1:])
    return [(settings, partial(work, settings))]


if __name__ == "__main__":
    common.run(plan)
