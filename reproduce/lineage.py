"""Who is related, and does the initialization fade? (BB 6, B.3: Tables 4, 5, 8 to 12, Figures 11, 14)

python -m reproduce.lineage tables runs/lineage                     # every method, every pair of the tables
python -m reproduce.lineage persistence runs/a --stranger runs/b    # a run's checkpoints beside its first
"""

import functools
from dataclasses import dataclass

import tyro

from lib.figures import curves
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, RunSettings, UserError, run_script
from lineage.compare import CompareSettings, Model, compare_models
from reproduce.baselines import BASELINES, similarities
from reproduce.runs import BASE, OTHER, SEEDS
from seedprint import PaperSettings, kendall, last_outputs, outputs_of, paper_test, top_dimensions
from sources.checkpoint import check_lengths, find_model, shortest_context, steps
from sources.data import TokenData, default_folder


@dataclass
class TableSettings(RunSettings):
    """The settings of `tables`."""

    folder: tyro.conf.Positional[str] = "runs/lineage"  # of the runs


@dataclass
class PersistenceSettings(PaperSettings):
    """Whose checkpoints are compared, and with what."""

    models: tyro.conf.Positional[tuple[str, ...]] = ()  # one run folder
    stranger: str = ""  # an unrelated run


def tables(settings: TableSettings):
    """Ask `compare`, the paper's test and four baselines about the pairs in the paper's tables."""
    experiment = Experiment("lineage", "BB Tables 4, 5, 8-12", settings)
    tokens, _ = TokenData(default_folder(("python",), "bpe:4096")).held_out(200, 64)
    pairs = table_pairs(f"{settings.folder}/tiny_llama", "4a", "4b, 8", "4c", "5")
    pairs += table_pairs(f"{settings.folder}/tiny_qwen", "9", "10", "11", "12")

    @functools.cache
    def read(folder):
        spec = find_model(folder)
        model = spec.model(experiment.device, experiment.dtype)
        outputs = last_outputs(model, model.config.vocab_size, PaperSettings())
        return model, Model(folder, spec.weights), outputs

    rows = []
    for table, base, suspect, kin in progress(pairs, desc="lineage", unit=" pairs"):
        models, weights, outputs = zip(read(base), read(suspect))
        row = {"table": table, "base": base, "suspect": suspect, "kin": kin}
        row |= compare_models(*weights, CompareSettings(neurons=True))[0]
        rows.append(row | paper_test(*outputs) | similarities(*models, tokens.to(experiment.device)))
    columns = ("table", "base", "suspect", "kin", "verdict", "paper_t_p", "paper_u_p", *BASELINES)
    return experiment.save(rows, columns)


def table_pairs(run, newborns, children, others, continued):
    """Rows (table, base, suspect, whether they are related) of a style's four tables."""
    child = {seed: f"{run}-{seed}" for seed in SEEDS}
    birth = {seed: f"{child[seed]}/step_0000000" for seed in SEEDS}
    unrelated = list(zip(SEEDS, SEEDS[1:] + SEEDS[:1]))  # each seed and the next
    pairs = [(newborns, birth[seed], birth[other], False) for seed, other in unrelated]
    pairs += [(children, birth[seed], child[seed], True) for seed in SEEDS]
    pairs += [(others, birth[seed], child[other], False) for seed, other in unrelated]
    pairs += [(continued, child[BASE], f"{child[seed]}-docstrings", seed == BASE) for seed in (BASE, OTHER)]
    return pairs


def persistence(settings: PersistenceSettings):
    """Does the initialization fade? Compares each checkpoint of a run with it (BB Figures 11, 14).

    `mean_tau` and `std_tau` are over the half of the dimensions with the largest mean outputs at
    initialization. Each step is also compared with the same step of --stranger, or with its last one.
    """
    folders = steps(settings.models[0]) if len(settings.models) == 1 else []
    if len(folders) < 2 or folders[0].name != "step_0000000" or not settings.stranger:
        raise UserError("persistence expects a run folder with step_0000000 and a later step, and --stranger")
    specs = [find_model(str(folder)) for folder in folders]
    last = find_model(settings.stranger)
    strangers = {folder.name: find_model(str(folder)) for folder in steps(settings.stranger)}
    if specs[0].config.d_model != last.config.d_model:
        raise UserError("persistence compares models of one width")
    check_lengths((settings.paper_length,), shortest_context([specs[0], last]), "--paper-length")
    experiment = Experiment("persistence", "BB Figures 11 and 14", settings)
    vocab_size = min(specs[0].config.vocab_size, last.config.vocab_size)
    birth = outputs_of(specs[0], vocab_size, experiment)
    chosen = top_dimensions(birth)
    rows, points = [], []
    for spec in progress(specs, desc="checkpoints"):
        row = {"step": int(spec.place.name.removeprefix("step_"))}
        outputs = outputs_of(spec, vocab_size, experiment)
        other = outputs_of(strangers.get(spec.place.name, last), vocab_size, experiment)
        for who, prefix, states in (("its own birth", "", outputs), ("another birth", "stranger_", other)):
            taus = kendall(birth, states, chosen)
            row |= {f"{prefix}mean_tau": taus.mean(), f"{prefix}std_tau": taus.std()}
            points.append(row | {"model": who, "tau": taus.mean(), "std": taus.std(), "zero": 0.0})
        test = paper_test(birth, outputs)
        rows.append(row | {"paper_t_p": test["paper_t_p"], "paper_u_p": test["paper_u_p"]})
    result = experiment.save(rows)
    question = "How long does a model rank inputs as at its birth? (shaded: std of dimensions)"
    keys = {"x": "step", "y": "tau", "series": "model", "band": "std", "theories": {"zero": "no relation"}}
    points = [point for point in points if point["step"] > 0]  # a logarithmic axis has no step 0
    path = experiment.folder / "persistence.png"
    curves(points, path, question, **keys, log="x", ylabel="Kendall's tau with birth")
    return result


COMMANDS = {
    "tables": Command(tables, TableSettings(dtype="float32")),
    "persistence": Command(persistence, PersistenceSettings()),
}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
