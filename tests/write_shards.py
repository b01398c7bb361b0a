"""Write a checkpoint folder of LLaMA-2 7B's shape, random weights, bfloat16 in shards: 13 GB.

    python tests/write_shards.py /tmp/7b && python tests/streaming.py --folder /tmp/7b

A smaller one: python tests/write_shards.py FOLDER --layers 4 --width 1024
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import safetensors.torch

from lib import checkpoint
from model import ModelConfig

SHARD = 4e9  # bytes


def llama(layers: int = 32, width: int = 4096) -> ModelConfig:
    """LLaMA-2 7B's configuration, or a smaller one of its proportions; the width is a multiple of 128."""
    heads = width // 128
    return ModelConfig(32000, 4096, layers, heads, width, d_ff=width * 43 // 16, norm_epsilon=1e-5)


def write(folder: Path, config: ModelConfig, seed: int = 0, shard_bytes: float = SHARD) -> None:
    """Write a newborn, a tensor at a time, in shards of some `shard_bytes` and their index."""
    folder.mkdir(parents=True, exist_ok=False)
    source = checkpoint.Newborn(config, seed)
    names = list(source.shapes)
    index = {}  # file by parameter
    shard = {}
    size = 0
    for name in names:
        shard[name] = source.read(name).bfloat16()
        size += 2 * shard[name].numel()
        if size >= shard_bytes or name == names[-1]:
            file = f"model-{len(set(index.values())) + 1:05}.safetensors"
            safetensors.torch.save_file(shard, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(shard, file)
            shard = {}
            size = 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(checkpoint.config_json(config)))


def main() -> None:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    given = parser.parse_args()
    write(given.folder, llama(given.layers, given.width))


if __name__ == "__main__":
    main()
