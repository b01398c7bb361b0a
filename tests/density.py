"""How dense is the code? Syntax-tree nodes a code line.

    python tests/density.py [FILE.py ... | FOLDER ...]       # without words: all Python but tests and configs

A code line is neither blank, comment nor docstring. Counted are names, attributes, calls, operators,
subscripts and comparisons. Measured the same way: nanoGPT 4.2, nanochat 3.6, gpt-fast 4.0, CleanRL 4.4.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COUNTED = (ast.Name, ast.Attribute, ast.Call, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Subscript, ast.Compare)
LEFT_OUT = ("tests", "configs", "answers", "solutions")  # the last two are the lesson's


def python_files(folder: Path = ROOT) -> list[Path]:
    """All Python below a folder, without tests, configs, answers, solutions and what is hidden."""
    files = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if not any(part in LEFT_OUT or part.startswith(".") for part in parts):
            files.append(path)
    return files


def measure(path: Path) -> dict[str, int]:
    """Counts of one file: lines, code lines and nodes."""
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    docstring_lines = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstring_lines.update(range(node.lineno, node.end_lineno + 1))
    code = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#") and number not in docstring_lines:
            code += 1
    counts = {"lines": len(text.splitlines()), "code": code}
    counts["nodes"] = sum(isinstance(node, COUNTED) for node in nodes)
    return counts


def total(files: list[Path]) -> dict[str, int]:
    """The sum of the files' counts."""
    counts = [measure(path) for path in files]
    return {key: sum(count[key] for count in counts) for key in counts[0]}


def show(name: str, counts: dict[str, int]) -> None:
    """Print one line of the table."""
    numbers = "".join(f"{count:8}" for count in counts.values())
    print(f"{name:32}{numbers}{counts['nodes'] / max(1, counts['code']):8.2f}")


def main() -> None:
    """Print a line for each file, and their sum."""
    files = []
    for word in sys.argv[1:] or ["."]:
        path = Path(word)
        files += python_files(path) if path.is_dir() else [path]
    print("file".ljust(32) + "".join(f"{key:>8}" for key in ("lines", "code", "nodes", "a line")))
    for path in files:
        show(str(path), measure(path))
    show("all", total(files))


if __name__ == "__main__":
    main()
