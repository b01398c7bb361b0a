"""Imports point down, code is plain, nothing is hostile, and pages print what results have."""

import ast
import re

import pytest
from conftest import ROOT

from lib.files import read_json
from lib.results import print_rows
from reproduce.__main__ import RESULTS

ROOMS = ("lib", "weights", "hf", "sources", "measure", "lineage", "reproduce", "lesson")
LEFT_OUT = ("tests", "configs", "answers", "solutions")
SCRIPTS = ["contraction", "init", "model", "probe", "seedprint", "sinks", "train"]
# Floors from below: a file imports from floors below its own alone. On the last are files that may import
# each other, without a circle.
FLOORS = """
lib.settings lib.kernels / lib.files lib.runtime lib.random / lib.results lib.figures
/ weights.ranges weights.lazy / weights.gguf / weights.gguf_config weights.fp8 / weights.files
/ weights.storage weights.vocabulary / weights.contents weights.hub / model / init
/ hf.parts hf.gguf_tokenizers / hf.lens / hf.check / hf.loading
/ sources.answer / sources.tokenizers
sources.saving / sources.llama / sources.checkpoint / sources.newborns sources.data
/ sources.inputs / sources.runs sources.sampling
/ measure.theory measure.attention / measure.units / measure.anatomy measure.figures
measure.caveats / measure.transplant measure.watch
/ lineage.matching lineage.stated lineage.names / lineage.layers / lineage.layout lineage.views
/ lineage.samples / lineage.partners lineage.bits / lineage.coordinates / lineage.judge / lineage.align
/ lineage.wording / lineage.family lineage.births / lineage.compare / probe sinks seedprint
/ contraction train / reproduce / lesson
""".split("/")
FILES = {}  # by a module's name
for path in sorted(ROOT.rglob("*.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_ours = not any(part in LEFT_OUT or part.startswith(".") for part in parts)
    if is_ours and path.name != "__init__.py":
        FILES[".".join(parts)] = path
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported_modules(tree: ast.AST) -> set[str]:
    """Every module that a file may mean by its imports: `from lib import x` is lib and lib.x."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports name the whole path"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


GRAPH = {name: imported_modules(tree) & FILES.keys() for name, tree in TREES.items()}


def floor(module: str) -> int:
    """The number of a module's floor, from below; ValueError if it has no place in the house."""
    name = module.split(".")[0] if module.startswith(("reproduce.", "lesson.")) else module
    return [name in modules.split() for modules in FLOORS].index(True)


def test_seven_scripts():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == SCRIPTS
    assert {path.parent.name for path in FILES.values()} == {ROOT.name, *ROOMS}
    for folder in ROOMS:
        assert (ROOT / folder / "__init__.py").read_text() == ""


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down(name):
    for below in GRAPH[name]:
        is_reproduction = name.startswith("reproduce.") and below.startswith("reproduce.")
        assert floor(below) < floor(name) or is_reproduction, f"{name} imports {below}"


@pytest.mark.parametrize("name", FILES)
def test_house_rules(name):
    assert ast.get_docstring(TREES[name]), "a file opens with what it is for"
    assert not imported_modules(TREES[name]) & {"pickle", "marshal", "shelve"}
    for node in ast.walk(TREES[name]):
        if name != "lesson.check":  # which pytest runs
            assert not isinstance(node, ast.Assert), f"line {node.lineno}: a mistake deserves a message"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("exec", "eval", "compile", "os.system"), f"line {node.lineno}"
            if called == "torch.load":
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert keywords.get("weights_only") == "True", f"line {node.lineno}"


NAMES = {command: name for name, command in RESULTS.items()}
PRINTED = {}  # by a result's name: the lines that README shows below its command
PAGES = "".join((ROOT / page).read_text() for page in ("README.md", "docs/lineage.md"))
for block in re.findall(r"^```\n(\$ .*?)^```", PAGES, re.MULTILINE | re.DOTALL):
    command, *lines = block.rpartition("$ python ")[2].splitlines()
    if command in NAMES:
        PRINTED[NAMES[command]] = lines


def test_every_block_with_numbers_is_read():
    assert PRINTED.keys() == {"probe", "disguised/compare"}


@pytest.mark.parametrize("name", PRINTED)
def test_blocks_print_what_the_results_have(name, capsys):
    rows = read_json(ROOT / f"results/{name}.json")["rows"]
    lines = [line.split() for line in PRINTED[name] if line != "..."]
    print_rows(rows, lines[0])
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    sentences = [
        f"{row['suspect']}: {row['verdict']}: {row['sentence']}" for row in rows if "sentence" in row
    ]
    numbers = lines[: len(rows) + 1] if sentences else lines
    assert all(line in printed for line in numbers)
    assert sum(lines[len(numbers) :], []) == " ".join(sentences).split()
