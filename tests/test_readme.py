"""README.md and docs/: what they print is what the committed results have."""

import re

import pytest
from conftest import ROOT

from lib.files import read_json
from lib.results import print_rows
from reproduce.__main__ import RESULTS

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
