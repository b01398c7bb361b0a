"""Write a checkpoint folder of LLaMA-2 7B's shape, random weights, bfloat16 in shards: 13 GB.

    python tests/write_shards.py /tmp/7b && python tests/streaming.py --folder /tmp/7b

A smaller one: python tests/write_shards.py FOLDER --layers 4 --width 1024
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import checkpoint  # noqa: E402

from model import ModelConfig  # noqa: E402

SHARD = 4e9  # bytes


def write(folder: Path, config: ModelConfig, seed: int = 0) -> None:
    """A newborn of `config`, a tensor at a time, in shards of up to SHARD bytes and their index."""
    folder.mkdir(parents=True, exist_ok=False)
    source, shard, size, shards = checkpoint.Newborn(config, seed), {}, 0, []
    for name in source.shapes:
        shard[name] = source.read(name).bfloat16()
        size += 2 * shard[name].numel()
        if size >= SHARD or name == list(source.shapes)[-1]:
            shards.append(list(shard))
            file = f"model-{len(shards):05}.safetensors"
            safetensors.torch.save_file(shard, folder / file, metadata={"format": "pt"})
            shard, size = {}, 0
    index = {name: f"model-{i + 1:05}.safetensors" for i, names in enumerate(shards) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(checkpoint.config_json(config)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    given = parser.parse_args()
    heads, d_ff = given.width // 128, given.width * 43 // 16
    torch.set_grad_enabled(False)
    config = ModelConfig(32000, 4096, given.layers, heads, given.width, d_ff)
    write(given.folder, replace(config, norm_epsilon=1e-5))


if __name__ == "__main__":
    main()
