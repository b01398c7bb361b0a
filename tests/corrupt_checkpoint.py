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

import checkpoint
import init
from common import UserError

FILES = ["model.safetensors", "config.json", "state.pt", "checksums.json"]


def damage(folder: Path, draw: random.Random, other: Path) -> str:
    """Damage one file of `folder`, `other` being a checkpoint to swap with; says what was done."""
    kind = draw.choice(["header", "bytes", "truncate", "grow", "remove", "swap", "config", "empty", "index"])
    name = draw.choice(FILES[:3] if kind in ("bytes", "truncate", "grow", "empty", "remove") else FILES)
    path = folder / name
    stranger = (
        kind != "bytes" and draw.random() < 0.5
    )  # as foreign folders are: nothing to check bytes against
    if kind == "header":
        name, path = FILES[0], folder / FILES[0]
    if kind in ("header", "bytes"):
        raw = bytearray(path.read_bytes())
        for _ in range(draw.choice([1, 1, 5, 50])):
            raw[draw.randrange(min(len(raw), 600) if kind == "header" else len(raw))] ^= 1 << draw.randrange(
                8
            )
        path.write_bytes(raw)
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
        name, path = FILES[1], folder / FILES[1]
        config = json.loads(path.read_text())
        key = draw.choice(sorted(config))
        config[key] = draw.choice([0, -1, 10**9, 10**30, 1.5, "x", None, [], {}, True, float("nan")])
        name = f"{name} {key} {config[key]!r}"
        path.write_text(json.dumps(config))
        stranger = True
    else:
        index = draw.choice(
            ["../x.safetensors", "/etc/passwd", "none.safetensors", 3, None, "model.safetensors"]
        )
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"lm_head.weight": index}})
        )
        (folder / FILES[0]).rename(folder / "moved.safetensors")
        name = str(index)
    if stranger:
        (folder / "checksums.json").unlink()
    return f"{kind} {name}{' without checksums' if stranger else ''}"


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
        source, other = (Path(folder) / name for name in ("source", "other"))
        if len(sys.argv) > 2:
            source = checkpoint.find(sys.argv[2])
        else:
            checkpoint.save(source, init.newborn("tiny_llama", 1), {"step": 1})
        checkpoint.save(other, init.newborn("tiny_gpt2", 2), {"step": 2})
        for seed in range(int(sys.argv[1])):
            print(f"{seed:3}  {'  ->  '.join(trial(source, other, seed))}")


if __name__ == "__main__":
    main()
