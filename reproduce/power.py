"""What can be done to a child, or how little be read of it, until each test fails? (ours; BB 5, 6.1)

    python -m reproduce.power changes tiny_llama@1000 runs/lineage/tiny_llama-1000   # noise, pruning, steps
    python -m reproduce.power recipes BASE CHILD STRANGER                            # how to read a layer map
    python -m reproduce.power cost tiny_llama@1000 runs/lineage/tiny_llama-1000      # tokens and seconds

`reproduce/thief.py` changes the child. `reproduce/errors.py` has how often strangers are called kin.
"""

import lib.interrupt  # noqa: F401 # isort: skip
import math
import time
from dataclasses import dataclass

from scipy.stats import norm

from lib.checkpoint import check_lengths, parse_spec, shortest_context, steps
from lib.figures import layer_maps, strengths
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, UserError, at_least, run_script
from measure.census import Grafted, Units, unit_census
from measure.comparison import compare_pair, read_model, state_fingerprint, tokens_of
from measure.layers import makeup, merger
from measure.lineage import (
    CERTAIN_Z,
    SAME_LOG10_P,
    diagonal_test,
    null_taus,
    paper_test,
    relation,
    weight_correlations,
)
from measure.verdict import SAME_BIRTH
from reproduce.thief import WAYS, assembled, hidden, narrowed, noised, pruned, rounded, upcycled
from seedprint import (
    CompareSettings,
    PairSettings,
    PaperSettings,
    common_vocabulary,
    comparable_models,
    last_outputs,
)

PAPER_TESTS = ("t-test", "U-test", "closed form")
PAPER_KEYS = {"t-test": "paper_t_p", "U-test": "paper_u_p"}
AUTHORS_TOKENS = 10_000 * 1024  # that the paper's test reads (BB B.2, 5)
CHANGES = {  # name: the change, and its strengths
    "noise, in std of each matrix": (noised, (0.5, 1, 1.5, 2, 3, 4, 6)),
    "share of weights pruned": (pruned, (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)),
    "bits after rounding": (rounded, (8, 6, 4, 3, 2)),
    "share of coordinates and units kept": (narrowed, (0.75, 0.5, 0.25, 0.125, 0.0625)),
}
HIDING = "way of hiding"
STEPS = "training steps"
COLUMNS = ("change", "strength", "verdict", "units_found", "units", "body_z", "relabel_z", "closed_form_z")
NUM_EXPERTS = 4  # of the mixture that `recipes` makes


@dataclass
class PowerSettings(CompareSettings, PaperSettings):
    """What the comparisons can be told."""


@dataclass
class CostSettings(PairSettings):
    """What `cost` can be told."""

    sequence_length: int = 64
    """tokens in a sequence"""
    permutations: at_least(199) = 9999
    """relabellings; the smallest p is 1 / (1 + this)"""


# ---- a child that is changed -------------------------------------------------------------------------------


def changes(settings: PowerSettings):
    """What does each test say of a child, the more it is changed? Writes power.json and power.png.

    UserError unless there are two models of one width and our architecture. If the second is a run, its
    checkpoints are compared, too.
    """
    if len(settings.models) != 2:
        raise UserError("expected two models, BASE and CHILD: checkpoint folders, or PRESET@SEED")
    base, child = comparable_models(settings.models, settings.init)
    check_lengths((settings.sequence_length,), shortest_context((base, child)))
    check_lengths((settings.paper_length,), shortest_context((base, child)), "--paper-length")
    experiment = Experiment("power", "", settings)
    settings = experiment.settings
    vocab_size = common_vocabulary((base, child))
    base_model = read_model(base.name, base.open(), vocab_size, settings)
    base_outputs = last_outputs(base_model.source, vocab_size, settings)
    rows = []
    for change, strength, source in progress(list(changed(child)), desc="power", unit=" changes"):
        suspect = read_model(child.name, source, vocab_size, settings)
        row, _ = compare_pair(base_model, suspect, settings)
        if source.width == base_model.source.width:
            row |= paper_test(base_outputs, last_outputs(source, vocab_size, settings))
        else:
            row["closed_form_z"] = None  # the paper's test compares coordinates
        told = {key: row[key] for key in (*COLUMNS[2:], "units_share")}
        rows.append({"change": change, "strength": strength} | told)
    return experiment.save(rows, COLUMNS, draw_power)


def changed(child):
    """(change, strength, source) of everything that is done to a child, and of its checkpoints."""
    source = child.open()
    yield HIDING, "as it is", source
    for way in WAYS:
        if way != "signs" or source.config.mlp == "swiglu":
            yield HIDING, way, hidden(source, (way,))
    for name, (change, sizes) in CHANGES.items():
        for size in sizes:
            yield name, size, change(source, size)
    folders = [] if child.is_newborn else steps(child.name)
    for folder in folders[1:]:  # the first is a birth
        yield STEPS, int(folder.name.removeprefix("step_")), parse_spec(str(folder)).open()


def draw_power(result, folder) -> None:
    """power.png: units found, and z of coordinates, by the strength of each change."""
    rows = result["rows"]
    by_units = sum(row["verdict"] == SAME_BIRTH for row in rows)
    by_paper = sum((row["closed_form_z"] or 0) > CERTAIN_Z for row in rows)
    title = f"compare still recognises the child in {by_units} of {len(rows)} forms, by its hidden units; "
    of_one_width = sum(row["closed_form_z"] is not None for row in rows)
    title += f"the paper's closed form in {by_paper} of {of_one_width} of the same width (at p = 1e-6)"
    strengths(folder / "power.png", rows, title, CERTAIN_Z, "p = 1e-6", SAME_BIRTH)


# ---- how to read a layer map -------------------------------------------------------------------------------


def recipes(settings: PowerSettings):
    """What do layer maps show of a fine-tune, and of models cut, grown, up-cycled and merged, all hidden?

    They are made of a BASE, its CHILD and a STRANGER of one architecture. Writes recipes.json and .png.
    """
    if len(settings.models) != 3:
        raise UserError("expected three models, BASE, CHILD and STRANGER: checkpoint folders, or PRESET@SEED")
    specs = comparable_models(settings.models, settings.init)
    base, child, stranger = [spec.open() for spec in specs]
    if child.shapes != stranger.shapes:
        raise UserError("only a CHILD and a STRANGER of one architecture can be merged by layers")
    experiment = Experiment("recipes", "", settings)
    grafted = Grafted(stranger, base)  # the stranger's layers, seen through the tables that a merge has
    rows, maps = [], []
    for recipe, suspect in made_of(child, stranger).items():
        censuses = {}
        for name, source in {"base": base, "stranger": grafted}.items():
            if name == "stranger" and recipe != "merge":
                continue
            a, b = Units(source), Units(suspect)
            depth = len(b.numbers)
            censuses[name], layer_map = unit_census(a, b, tokens_of(a, b), settings.units, depth)
            sentence = makeup(censuses[name], layer_map["base_layers"], layer_map["suspect_layers"])
            sentence = sentence or "all layers, in their order"
            rows.append({"recipe": recipe, "base": name, "sentence": sentence})
            maps.append(layer_map)
    rows[-1]["sentence"] = merger(censuses)
    return experiment.save(rows, draw=draw_recipes, maps=maps)


def made_of(child, stranger):
    """A hidden suspect for each recipe; a merge has the stranger's upper half of layers."""
    depth = child.config.num_layers
    first, last = depth // 3, depth - depth // 3  # what lies between is removed, or repeated
    removed = [(child, number) for number in (*range(first), *range(last, depth))]
    repeated = [(child, number) for number in (*range(last), *range(first, depth))]
    merged = [(child if number < depth / 2 else stranger, number) for number in range(depth)]
    return {
        "fine-tune": hidden(child),
        "layers removed": hidden(assembled(removed)),
        "layers repeated": hidden(assembled(repeated)),
        "mixture of experts": upcycled(hidden(child, ("rotate", "neurons")), NUM_EXPERTS),
        "merge": hidden(assembled(merged)),
    }


def draw_recipes(result, folder) -> None:
    """recipes.png: the layer map of each recipe."""
    layer_maps(folder / "recipes.png", list(zip(result["rows"], result["maps"])))


# ---- cost --------------------------------------------------------------------------------------------------


def cost(settings: CostSettings):
    """How many tokens, and seconds, until each test says p < 1e-6 of two kin? Writes cost.json.

    UserError unless there are two models, of one birth as far as their weights tell.
    """
    if len(settings.models) != 2:
        raise UserError("cost expects two models of one birth")
    specs = comparable_models(settings.models, settings.init)
    T = settings.sequence_length
    check_lengths((T,), shortest_context(specs))
    experiment = Experiment("cost", "BB 5, 6.1", settings)
    pair = [spec.open() for spec in specs]
    settings = experiment.settings
    vocab_size = common_vocabulary(specs)
    begun = time.perf_counter()
    correlations, _ = weight_correlations(*pair)
    log10_p = coordinates_log10_p(correlations["body"], settings) if "body" in correlations else 0.0
    if log10_p > SAME_LOG10_P:  # a million rows would not show it either
        raise UserError("cost expects two models of one birth, but their weights do not agree")
    rows = [{"test": "weights", "tokens": 0, "seconds": time.perf_counter() - begun, "log10_p": log10_p}]
    for test in progress(("relabelling", *PAPER_TESTS), desc="cost"):
        fewest = math.ceil(3 / T) if test == "relabelling" else 4  # sequences that give it enough rows
        for doublings in range(15):
            n = fewest * 2**doublings
            null_taus.cache_clear()
            begun = time.perf_counter()
            log10_p = states_log10_p(test, pair, n, vocab_size, settings)
            seconds = time.perf_counter() - begun
            if log10_p <= SAME_LOG10_P:
                break
        rows.append({"test": test, "tokens": n * T, "seconds": seconds, "log10_p": log10_p})
    for row in rows:
        row["reached"] = row["log10_p"] <= SAME_LOG10_P
        has_read = row["reached"] and row["tokens"] > 0
        row["times_fewer_tokens"] = AUTHORS_TOKENS / row["tokens"] if has_read else None
    return experiment.save(rows)


def states_log10_p(test, pair, n, vocab_size, settings: CostSettings):
    """log10 p of a test of states, where the pair of sources read n random sequences."""
    T = settings.sequence_length
    common = {"input_seed": settings.input_seed, "device": settings.device, "dtype": settings.dtype}
    if test == "relabelling":
        reading = CompareSettings(num_sequences=n, sequence_length=T, **common)
        a, b = [state_fingerprint(source, vocab_size, reading) for source in pair]
        return coordinates_log10_p(relation(a, b), settings)
    reading = PaperSettings(paper_sequences=n, paper_length=T, **common)
    a, b = [last_outputs(source, vocab_size, reading) for source in pair]
    result = paper_test(a, b)
    if test == "closed form":
        return norm.logsf(result["closed_form_z"]) / math.log(10)
    return math.log(max(result[PAPER_KEYS[test]], 1e-300)) / math.log(10)


def coordinates_log10_p(C, settings: CostSettings):
    """log10 p of the exact test of coordinates whose correlations are C, (d, d)."""
    return diagonal_test(C, (settings.input_seed,), settings.permutations)["log10_p"]


COMMANDS = {
    "changes": Command(changes, PowerSettings()),
    "recipes": Command(recipes, PowerSettings()),
    "cost": Command(cost, CostSettings()),
}
FIGURES = {"power": draw_power, "recipes": draw_recipes}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
