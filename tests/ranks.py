"""Commands under `torchrun`, without the seconds that it and each of its ranks take to import torch.

    python tests/ranks.py train.py CONFIG.py -- train.py OTHER.py

Two ranks of each command, one command after another, forked from a process that has imported their scripts.
What each rank ended with is the last line of stderr that a command leaves: `ended with [0, 0]`.
"""

import importlib
import itertools
import multiprocessing
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from lib import settings

# A process that was forked may compute only if its parent never did: the parent here only starts others.
processes = multiprocessing.get_context("fork")


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def become(rank: int, world_size: int, port: int) -> None:
    """Make this process a rank, as torchrun does."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}


def run(rank: int, port: int, module, words: list[str]) -> None:
    """Run a command as one of two ranks."""
    become(rank, 2, port)
    sys.argv = [module.__file__, *words]
    settings.run_script(module.COMMANDS, module.__doc__)


def main() -> None:
    """Run the commands of the command line."""
    groups = itertools.groupby(sys.argv[1:], lambda word: word == "--")
    commands = [list(words) for is_end, words in groups if not is_end]
    modules = [importlib.import_module(script.removesuffix(".py")) for script, *_ in commands]
    for module, (_, *words) in zip(modules, commands):
        port = free_port()
        ranks = [processes.Process(target=run, args=(rank, port, module, words)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        print(f"ended with {[process.exitcode for process in ranks]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
