"""What does a damaged checkpoint folder do? Damage one in many random ways and load it each time.

    python tests/corrupt_checkpoint.py 100 runs/laptop

Every case must end in a UserError of one line, or load the very weights that were saved (where the damage hit
what loading does not read).
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import init
from lib import checkpoint
from lib.settings import UserError

FILES = ["model.safetensors", "config.json", "state.pt", "checksums.json"]


INDEX_ENTRIES = ["../x.safetensors", "/etc/passwd", "none.safetensors", 3, None, "model.safetensors"]
WILD_VALUES = [0, -1, 10**9, 10**30, 1.5, "x", None, [], {}, True, float("nan")]


def flip_bits(path: Path, draw: random.Random, end: int) -> None:
    """Flip 1 to 50 bits among the first `end` bytes."""
    raw = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 5, 50])):
        place = draw.randrange(min(len(raw), end))
        raw[place] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


def damage(folder: Path, draw: random.Random, other: Path) -> str:
    """Damage one file of `folder`, `other` being a checkpoint to swap with; says what was done."""
    kind = draw.choice(["header", "bytes", "truncate", "grow", "remove", "swap", "config", "empty", "index"])
    name = draw.choice(FILES if kind == "swap" else FILES[:3])
    # Foreign folders have no checksums: there is nothing to check bytes against.
    is_foreign = kind == "config" or (kind != "bytes" and draw.random() < 0.5)
    if kind in ("header", "index"):
        name = "model.safetensors"
    if kind == "config":
        name = "config.json"
    path = folder / name
    what = name
    if kind == "header":
        flip_bits(path, draw, end=600)
    elif kind == "bytes":
        flip_bits(path, draw, end=path.stat().st_size)
    elif kind == "truncate":
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    elif kind == "grow":
        path.write_bytes(path.read_bytes() + b"x" * draw.randrange(1, 100))
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "remove":
        path.unlink()
    elif kind == "swap":
        shutil.copyfile(other / name, path)
    elif kind == "config":  # plausible or wild values
        config = json.loads(path.read_text())
        key = draw.choice(sorted(config))
        config[key] = draw.choice(WILD_VALUES)
        path.write_text(json.dumps(config))
        what = f"{name} {key} {config[key]!r}"
    else:
        entry = draw.choice(INDEX_ENTRIES)
        index = {"weight_map": {"lm_head.weight": entry}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        path.rename(folder / "moved.safetensors")
        what = str(entry)
    if is_foreign:
        (folder / "checksums.json").unlink(missing_ok=True)
        what += " without checksums"
    return f"{kind} {what}"


def trial(source: Path, other: Path, seed: int) -> tuple[str, str]:
    """Damage a copy of `source` and load it: what was done, and what came of it, or an AssertionError."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(source, copy)
        done = damage(copy, draw, other)
        try:
            model = checkpoint.load(str(copy))
            state = checkpoint.load_state(copy)
            assert "without" in done or state["step"] == 1, f"{done}: another state"
        except UserError as error:
            assert "\n" not in str(error) and str(copy) in str(error), f"{done}: {error}"
            return done, f"refused: {str(error).replace(str(copy), 'FOLDER')}"
        expected = checkpoint.load(str(source))
        for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b), f"{done}: {name} is wrong"
        tokens = torch.arange(20)[None]
        if "rope_theta" not in done and "eps" not in done and "context" not in done:
            assert torch.equal(expected(tokens), model(tokens)), f"{done}: another function"
        return done, "the weights that were saved"


def main() -> None:
    """Run as many trials as asked, on a checkpoint given or on a newborn one."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        other = Path(folder) / "other"
        if len(sys.argv) > 2:
            source = checkpoint.parse_spec(sys.argv[2]).folder
        else:
            checkpoint.save(source, init.newborn("tiny_llama", 1), {"step": 1})
        checkpoint.save(other, init.newborn("tiny_gpt2", 2), {"step": 2})
        for seed in range(int(sys.argv[1])):
            print(f"{seed:3}  {'  ->  '.join(trial(source, other, seed))}")


if __name__ == "__main__":
    main()
