"""Does the initialization fade in training? Each checkpoint of a run beside its first one (BB Figures 11, 14)

python -m reproduce.persistence runs/lineage/tiny_llama-1000
python -m reproduce.persistence runs/a --stranger runs/b       # and beside the same steps of another run
"""

from dataclasses import dataclass

import tyro

from init import newborn
from lib.figures import curves
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, UserError, run_script
from reproduce.robustness import STRANGER_SEED
from seedprint import (
    PaperSettings,
    kendall,
    last_outputs,
    outputs_of,
    paper_test,
    top_dimensions,
)
from sources.checkpoint import check_lengths, parse_spec, shortest_context, steps


@dataclass
class Settings(PaperSettings):
    """Whose checkpoints are compared, and with what."""

    models: tyro.conf.Positional[tuple[str, ...]] = ()  # one run folder
    stranger: str | None = None  # an unrelated run; None: a newborn of another seed


def persistence(settings: Settings):
    """Does the initialization fade? Compares each checkpoint of a run with it (BB Figures 11, 14).

    `mean_tau` and `std_tau` are over the half of the dimensions with the largest mean outputs at
    initialization. Each step is also compared with the same step of --stranger, or with its last one. Writes
    persistence.json and .png.
    """
    folders = steps(settings.models[0]) if len(settings.models) == 1 else []
    if len(folders) < 2 or folders[0].name != "step_0000000":
        raise UserError("persistence expects one run folder with step_0000000 and a later step")
    specs = [parse_spec(str(folder)) for folder in folders]
    compared = specs[:1]
    strangers = {}  # the unrelated run's checkpoints, by step
    if settings.stranger is not None:
        compared.append(parse_spec(settings.stranger))
        strangers = {folder.name: parse_spec(str(folder)) for folder in steps(settings.stranger)}
    if len({spec.config.d_model for spec in compared}) > 1:
        raise UserError("persistence compares models of one width")
    check_lengths((settings.paper_length,), shortest_context(compared), "--paper-length")
    experiment = Experiment("persistence", "BB Figures 11 and 14", settings)
    vocab_size = min(spec.config.vocab_size for spec in compared)
    birth = outputs_of(specs[0], vocab_size, experiment)
    chosen = top_dimensions(birth)
    if settings.stranger is None:
        where = (experiment.device, experiment.dtype)
        model = newborn(specs[0].config, STRANGER_SEED, None, settings.init, *where)
        last_stranger = last_outputs(model, vocab_size, settings).numpy()
    else:
        last_stranger = outputs_of(compared[1], vocab_size, experiment)
    rows = []
    for spec in progress(specs, desc="checkpoints"):
        step = spec.folder.name
        outputs = outputs_of(spec, vocab_size, experiment)
        stranger = outputs_of(strangers[step], vocab_size, experiment) if step in strangers else last_stranger
        row = {"step": int(step.removeprefix("step_"))}
        for prefix, states in (("", outputs), ("stranger_", stranger)):
            taus = kendall(birth, states, chosen)
            row |= {f"{prefix}mean_tau": taus.mean(), f"{prefix}std_tau": taus.std()}
        test = paper_test(birth, outputs)
        rows.append(row | {"paper_t_p": test["paper_t_p"], "paper_u_p": test["paper_u_p"]})
    result = experiment.save(rows)
    draw_persistence(experiment.folder / "persistence.png", rows)
    return result


def draw_persistence(path, rows) -> None:
    """Draw Kendall's tau with the initialization by step, and with a stranger's."""
    taus = []
    for row in rows[1:]:  # a logarithmic axis has no step 0
        for model, who in (("its own birth", ""), ("another birth", "stranger_")):
            spread = {"tau": row[f"{who}mean_tau"], "std": row[f"{who}std_tau"]}
            taus.append(spread | {"step": row["step"], "model": model, "zero": 0.0})
    question = "How long does a model rank inputs as at its birth? (shaded: std of dimensions)"
    keys = {"x": "step", "y": "tau", "series": "model", "band": "std", "theories": {"zero": "no relation"}}
    curves(taus, path, question, **keys, log="x", ylabel="Kendall's tau with birth")


COMMANDS = {"": Command(persistence, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
