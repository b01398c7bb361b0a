"""What can a hostile or damaged folder, or a bad command line, do? Some 20 cases, a line each.

    python tests/hostile.py            # all of them: a minute
    python tests/hostile.py 8          # every eighth

A case is a folder damaged in one way and a command that reads it, or a command line that is a mistake. It
runs in a process forked after the imports, in a folder of its own. It must end with exit status 0 or 2,
without a traceback or a signal, in 20 s of a CPU and 2 GB, with no file opened or changed that is
neither in its folder nor the installation's, and no command run (Python announces each, PEP 578). What is
surely a mistake must end with 2.
"""

import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from ranks import processes
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import init
from lib import settings
from model import ModelConfig
from sources import data, saving

SECONDS, BYTES = 20, 2 * 2**30  # that a case may take
MODULES = {name: importlib.import_module(name) for name in "probe seedprint sinks train sources.data".split()}
WRITABLE = ["/dev/null", "/dev/shm", "/proc", *(str(Path.home() / name) for name in (".config", ".cache"))]
READABLE = [str(Path(__file__).parent.parent), sys.prefix, sys.base_prefix, "/usr", "/lib", "/etc", "/sys"]
READABLE = [os.path.realpath(path) for path in [*READABLE, "/dev/urandom", *WRITABLE]]  # .venv may be a link
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate", "os.symlink"}
TRAINING = {"model": "backcopy", "d_model": 64, "d_ff": 96, "device": "cpu", "dtype": "float32"}
TRAINING |= {"sequence_length": 16, "global_batch_size": 4, "micro_batch_size": 4, "warmup_iters": 2}
TRAINING |= {"compile": False, "max_iters": 3, "save_every": 2}
COMPARE = "seedprint compare FOLDER FOLDER"
PROBE = "probe --model FOLDER --num-sequences 4 --sequence-length 8"
RATE = "sinks rate --model FOLDER --num-sequences 2 --sequence-length 8 --text ../text.txt"
RESUME = "train --resume --out FOLDER --max-iters 4"
TRAIN = "train --data FOLDER"
for name, value in TRAINING.items():
    TRAIN += f" --{name.replace('_', '-')} {value}"


# ---- what is damaged ---------------------------------------------------------------------------------------


def make_templates(root: Path, names: set[str]) -> None:
    """A checkpoint of ours and a data set; a run that was stopped and a stranger, if they are named."""
    (root / "text.txt").write_text(Path(random.__file__).read_text("utf-8"))
    sets = data.Settings(source=(str(root / "text.txt"),), tokenizer="bpe:500", held_out=0.2)
    data.prepare(replace(sets, out=str(root / "data")))
    sys.stdout = open(os.devnull, "w")
    model = init.newborn(ModelConfig(500, 64, 2, 2, 32, 48, num_kv_heads=1), 1)
    saving.save(root / "checkpoint", model, tokenizer=data.TokenData(root / "data").tokenizer)
    if "run" in names:
        train = MODULES["train"]
        train.train(train.Settings(**TRAINING, data=str(root / "data"), out=str(root / "run")))
    if "stranger" in names:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=500, **sizes)).save_pretrained(root / "stranger")
        shutil.copy(root / "checkpoint/tokenizer.model", root / "stranger")


def piped(name: str) -> Callable:
    """A damage that puts a pipe in the place of a folder's file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def changed(name: str, change: Callable) -> Callable:
    return lambda folder: (folder / name).write_bytes(change(bytearray((folder / name).read_bytes())))


def with_json(name: str, **changes) -> Callable:
    return changed(name, lambda raw: json.dumps(json.loads(raw) | changes).encode())


def cut(raw: bytearray) -> bytearray:
    return raw[: len(raw) // 2]


CODE = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
FOLDERS = [  # the script and its words, what is copied, its damage; False: it is not surely a mistake
    (COMPARE, "checkpoint", "config.json a pipe", piped("config.json")),
    (COMPARE, "checkpoint", "endless header", changed("model.safetensors", lambda raw: b"\xff" * 8 + raw)),
    (COMPARE, "checkpoint", "a path of code", with_json("config.json", auto_map={"M": "evil.py"}), False),
    (PROBE, "checkpoint", "weights cut", changed("model.safetensors", cut)),
    (RATE, "stranger", "a path of code", with_json("config.json", **CODE), False),
    (RATE, "stranger", "code of a new type", with_json("config.json", model_type="evil", **CODE)),
    (RATE, "stranger", "code of the Hub", with_json("config.json", _attn_implementation="a/kernel"), False),
    (PROBE, "stranger", "layers without end", with_json("config.json", num_hidden_layers=10**9)),
    (PROBE, "stranger", "another width", with_json("config.json", hidden_size=64)),
    (PROBE, "stranger", "weights cut", changed("model.safetensors", cut)),
    (RESUME, "run", "moments a pipe", piped("step_0000003/optimizer.safetensors")),
    (TRAIN, "data", "tokenizer outside", with_json("meta.json", tokenizer_file="../outside")),
    (TRAIN, "data", "tokens cut", changed("train.bin", cut)),
]
LINES = """
sinks rate --text /dev/zero
seedprint compare pipe pipe
train --source pipe.txt
train --out /proc/x
sources.data bad.jsonl
"""  # command lines that are surely mistakes


# ---- a case's life -----------------------------------------------------------------------------------------


def live(words: str, place: Path) -> None:
    """Run a command in this process, watched; what is forbidden is written to the file `forbidden`."""
    os.chdir(place)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    signal.alarm(3 * SECONDS)  # of a busy machine
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)
    torch.set_num_threads(1)
    script, *words = words.replace("FOLDER", "folder").split()
    sys.argv = [f"{script}.py", *words]
    log = os.open("forbidden", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    readable = (*READABLE, str(place), str(place.parent / "text.txt"), str(place.parent / "data"))
    writable = (*WRITABLE, str(place))

    def watch(event: str, arguments: tuple) -> None:
        is_change = event in CHANGES
        if event in ("os.system", "os.exec"):
            os.write(log, f"{event}\n".encode())
        elif (is_change or event == "open") and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            is_change |= event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if not path.startswith(writable if is_change else readable):
                os.write(log, f"{event} {path}\n".encode(errors="replace"))

    sys.addaudithook(watch)
    code = 0
    try:
        settings.run_script(MODULES[script].COMMANDS, MODULES[script].__doc__)
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fault_of(place: Path, words, template=None, what="", damage=None, is_mistake=True) -> str:
    """Run a case in a place of its own; what is wrong with how it ended, "" if nothing."""
    place.mkdir()
    if template:
        shutil.copytree(place.parent / template, place / "folder")
        damage(place / "folder")
        (place / "outside").mkdir()
    else:  # what the words name
        os.mkfifo(place / "pipe")
        os.mkfifo(place / "pipe.txt")
        (place / "bad.jsonl").write_text('{"text": ' + "[" * 99999)
    child = os.fork()
    if child == 0:
        live(words, place)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    message = (place / "err").read_text(errors="replace").strip()
    forbidden = (place / "forbidden").read_text()
    shutil.rmtree(place, ignore_errors=True)
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    if "Traceback" in message or code not in (0, 2):
        return f"exit status {code}: {message[-300:]}"
    if code == 0 and is_mistake:
        return "not refused"
    if usage.ru_maxrss * 1024 > BYTES:
        return f"{usage.ru_maxrss / 2**20:.1f} GB"
    return forbidden and f"forbidden: {forbidden.splitlines()[0]}"


def main() -> None:
    """Run the cases, and print those that went wrong; exit status 1 if any did."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what was forked cannot use a GPU that its parent has seen
    stride = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    cases = [*FOLDERS, *[(line,) for line in LINES.strip().splitlines()]][::stride]
    faults = 0
    with tempfile.TemporaryDirectory() as root:
        root = Path(root).resolve()
        names = {case[1] for case in cases if len(case) > 1}
        maker = processes.Process(target=make_templates, args=(root, names))
        maker.start()
        maker.join()
        for number, case in enumerate(cases):
            fault = fault_of(root / f"case_{number}", *case)
            if fault:
                faults += 1
                print(f"{case[:3]}: {fault}", flush=True)
    print(f"{len(cases)} cases, {faults} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
