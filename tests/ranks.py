"""A command under `torchrun`, without the seconds that it and each of its ranks take to import torch.

    python tests/ranks.py train.py CONFIG.py

Two ranks, forked from a process that has imported the script. stderr ends with their statuses.
"""

import importlib
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
    """Run the command of the command line."""
    script, *words = sys.argv[1:]
    module = importlib.import_module(script.removesuffix(".py"))
    port = free_port()
    ranks = [processes.Process(target=run, args=(rank, port, module, words)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    print(f"ended with {[process.exitcode for process in ranks]}", file=sys.stderr)


if __name__ == "__main__":
    main()
