"""What can be done to a child until its hidden units are no longer found, and other tests fail? (ours)

    python -m reproduce.power tiny_llama@1000 runs/lineage/tiny_llama-1000    # noise, pruning, training steps

`reproduce/thief.py` changes the child. `reproduce/errors.py` has how often strangers are called kin.
"""

from dataclasses import dataclass

from lib.checkpoint import check_lengths, parse_spec, shortest_context, steps
from lib.figures import BLUE, legend_below, new_figure, save_figure, unique
from lib.inputs import random_tokens
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, UserError, run_script
from measure.verdict import SAME_BIRTH, compare_pair, read_model
from reproduce.thief import WAYS, hidden, narrowed, noised, pruned, rounded
from seedprint import (
    CompareSettings,
    PaperSettings,
    check_paper_settings,
    common_vocabulary,
    comparable_models,
    last_outputs,
    paper_test,
)

CHANGES = {  # name: the change, and its strengths
    "noise, in std of each matrix": (noised, (0.5, 1, 1.5, 2, 3, 4, 6)),
    "share of weights pruned": (pruned, (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)),
    "bits after rounding": (rounded, (8, 6, 4, 3, 2)),
    "share of coordinates and units kept": (narrowed, (0.75, 0.5, 0.25, 0.125, 0.0625)),
}
COLUMNS = ("change", "strength", "verdict", "units_found", "units", "body_z", "relabel_z", "closed_form_z")


@dataclass
class Settings(CompareSettings, PaperSettings):
    """What the comparisons can be told."""


def power(settings: Settings):
    """What does each test say of a child, the more it is changed? Writes power.json and power.png.

    UserError unless there are two models of one width and our architecture. If the second is a run, its
    checkpoints are compared, too.
    """
    if len(settings.models) != 2:
        raise UserError("expected two models, BASE and CHILD: checkpoint folders, or PRESET@SEED")
    base, child = comparable_models(settings.models, settings.init)
    check_lengths((settings.sequence_length,), shortest_context((base, child)))
    check_paper_settings(settings, (base, child))
    experiment = Experiment("power", "", settings)
    settings = experiment.settings
    vocab_size = common_vocabulary((base, child))
    indices = range(settings.num_sequences)
    tokens = random_tokens(settings.input_seed, indices, settings.sequence_length, vocab_size)
    reading = (tokens, experiment.device, experiment.dtype)
    base_model = read_model(base.name, base.open(), *reading)
    base_outputs = last_outputs(base_model.source, vocab_size, settings)
    numbers = (settings.input_seed, settings.permutations, settings.units, settings.layers)
    rows = []
    for change, strength, source in progress(changed(child), desc="power", unit=" changes"):
        suspect = read_model(child.name, source, *reading)
        row, _ = compare_pair(base_model, suspect, *numbers)
        row["closed_form_z"] = None  # the paper's test compares coordinates
        if source.width == base_model.source.width:
            row |= paper_test(base_outputs, last_outputs(source, vocab_size, settings), settings)
        told = {key: row[key] for key in (*COLUMNS[2:], "units_share")}
        rows.append({"change": change, "strength": strength} | told)
    draw_power(rows, experiment.folder / "power.png")
    return experiment.save(rows, COLUMNS)


def changed(child):
    """(change, strength, source) of everything that is done to a child, and of its checkpoints."""
    source = child.open()
    yield "way of hiding", "as it is", source
    for way in WAYS:
        yield "way of hiding", way, hidden(source, (way,))
    for name, (change, sizes) in CHANGES.items():
        for size in sizes:
            yield name, size, change(source, size)
    for folder in steps(child.name)[1:]:  # the first is a birth
        yield "training steps", int(folder.name.removeprefix("step_")), parse_spec(str(folder)).open()


def draw_power(rows, path) -> None:
    """Units found in the layer with the fewest by the strength of each change, a panel a change."""
    figure, grid = new_figure("Which changes hide a child's hidden units?", 2, 3, height=3, sharey=True)
    for axes, change in zip(grid.flat, unique(rows, "change")):
        line = [row for row in rows if row["change"] == change]
        shares = [100 * (row["units_share"] or 0) for row in line]
        axes.plot(shares, "o", color=BLUE, label="same birth")
        lost = [share if row["verdict"] != SAME_BIRTH else None for share, row in zip(shares, line)]
        axes.plot(lost, "o", color="white", mec=BLUE, label="another verdict")
        axes.set_xticks(range(len(line)), [str(row["strength"]) for row in line], rotation=45)
        axes.set(xlabel=change, ylim=(-4, 104), ylabel="% of units found")
    legend_below(figure, grid[0, 0])
    save_figure(figure, path)


COMMANDS = {"": Command(power, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
