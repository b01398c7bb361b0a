"""How is the code divided? Draws docs/house.png: the rooms, and which imports which.

python -m reproduce.house
"""

import ast
from collections import defaultdict
from pathlib import Path

from lib.figures import BLUE, new_figure, save_figure
from lib.results import ROOT
from lib.settings import Command, OutputSettings, run_script

ROOMS = "lib weights model hf sources measure lineage scripts reproduce".split()  # from below
MODEL = ("model", "init")  # files that all else is built on


def room_of(module):
    """The room of a module: a folder; or the model, or a script."""
    first = module.split(".")[0]
    if first in ROOMS[:-2] or first == "reproduce":
        return first
    if first in MODEL:
        return "model"
    return "scripts" if (ROOT / f"{first}.py").exists() else None


def sizes_and_imports():
    """Lines by room, and pairs (room, room that it imports), read from the code."""
    lines, imports = defaultdict(int), set()
    paths = [*ROOT.glob("*.py")]
    for room in ROOMS:
        paths += ROOT.glob(f"{room}/*.py")
    for path in paths:
        room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        text = path.read_text()
        lines[room] += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                imports.add((room, room_of(node.module)))
            elif isinstance(node, ast.Import):
                imports |= {(room, room_of(alias.name)) for alias in node.names}
    return lines, {(a, b) for a, b in imports if b is not None and a != b}


def without_detours(imports):
    """The imports that no way through a third room says already."""
    kept = set()
    for a, b in imports:
        between = [room for room in ROOMS if (a, room) in imports and (room, b) in imports]
        if not between:
            kept.add((a, b))
    return kept


def house(settings: OutputSettings) -> None:
    """Draw the rooms of the house and their one-way imports"""
    lines, imports = sizes_and_imports()
    title = "Which room imports which? All ways lead down"
    figure, ((axes,),) = new_figure(title, 1, 1, width=6, height=5.5)
    for height, room in enumerate(ROOMS):
        axes.text(0, height, f"{room}  ({lines[room]:,} lines)", ha="center", va="center", zorder=3)
    for number, (a, b) in enumerate(sorted(without_detours(imports))):
        above, below = ROOMS.index(a), ROOMS.index(b)
        side, bend = 0.0, 0.0
        if above - below > 1:  # longer ones run outside, on both sides
            side, bend = (0.65, -0.3) if number % 2 else (-0.65, 0.3)
        style = {"arrowstyle": "->", "color": BLUE, "connectionstyle": f"arc3,rad={bend}"}
        axes.annotate("", (side, below + 0.2), (side, above - 0.2), arrowprops=style)
    axes.set(xlim=(-2, 2), ylim=(-0.6, len(ROOMS) - 0.4))
    axes.axis("off")
    save_figure(figure, Path(settings.out, "house.png"))


COMMANDS = {"": Command(house, OutputSettings(out="docs"))}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
