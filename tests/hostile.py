"""What can a hostile or damaged folder, or a bad command line, do? 960 cases, and a table of what happened.

    python tests/hostile.py            # all of them: five minutes
    python tests/hostile.py 20         # every twentieth; with -v what they printed, and which were slow

A case is a folder damaged in one way and a command that reads it, or a command line with one bad word. It
runs in a process forked after the imports, in a folder of its own. It must end with exit status 0, or 2 and
one message; without a traceback or a signal, in 20 seconds and 2 GB, with no file opened or changed that is
neither in its folder nor the installation's (Python announces each, PEP 578). What is surely a mistake must
end with 2.
"""

import contextlib
import dataclasses
import gzip
import importlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import safetensors.torch
import torch
import torch._dynamo  # which an optimizer imports: once here, not in every process

import init
from lib import checkpoint, data, runtime, settings
from model import ModelConfig

SECONDS, BYTES = 20, 2 * 2**30  # that a case may take
SCRIPTS = ("probe", "contraction", "seedprint", "sinks", "train", "lib.data", "reproduce.errors")
SCRIPTS += ("reproduce.rivals", "reproduce.__main__")
MODULES = {name: importlib.import_module(name) for name in SCRIPTS}
READABLE = [
    Path(__file__).parent.parent,
    sys.prefix,
    sys.base_prefix,
    "/usr",
    "/lib",
    "/etc",
    "/proc",
    "/sys",
]
READABLE += ["/dev/null", "/dev/urandom", "/dev/shm", Path.home() / ".config", Path.home() / ".cache"]
WRITABLE = ["/dev/null", "/dev/shm", "/proc", Path.home() / ".cache", Path.home() / ".config"]
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate", "os.symlink"}
# A process that was forked may compute only if its parent never did: the parent here only starts others.
processes = multiprocessing.get_context("fork")


@dataclass
class Case:
    """One attack, and the command that meets it."""

    kind: str
    what: str
    words: list[str]  # the script, then its words; FOLDER stands for the folder
    template: str = ""  # the folder that is copied
    damage: Callable | None = None  # function of the copy
    must_refuse: bool = False


# ---- what is damaged ---------------------------------------------------------------------------------------


def make_templates(root: Path) -> None:
    """A checkpoint of ours, a stranger's with two shards, a run that was stopped, and a data set."""
    (root / "text.txt").write_text(Path(random.__file__).read_text("utf-8"))
    sets = data.Settings(source=(str(root / "text.txt"),), tokenizer="bpe:500", held_out=0.2)
    data.prepare(dataclasses.replace(sets, out=str(root / "data")))
    run = MODULES["train"].Settings(**TRAINING | {"data": str(root / "data"), "out": str(root / "run")})
    sys.stdout = open(os.devnull, "w")
    MODULES["train"].train(run)
    config = ModelConfig(500, 64, 2, 2, 32, 48, num_kv_heads=1)
    model = init.newborn(config, 1)
    checkpoint.save(root / "checkpoint", model, tokenizer=data.TokenData(root / "data").load_tokenizer())
    checkpoint.save(root / "stranger", model)
    weights = dict(model.named_parameters())
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[:9], names[9:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        safetensors.torch.save_file({name: weights[name].detach() for name in part}, root / "stranger" / file)
        index |= dict.fromkeys(part, file)
    (root / "stranger" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (root / "stranger" / "model.safetensors").unlink()
    (root / "stranger" / "checksums.json").unlink()


TRAINING = {  # settings of a run that takes a second
    "model": "backcopy",
    "device": "cpu",
    "dtype": "float32",
    "sequence_length": 16,
    "global_batch_size": 2,
    "micro_batch_size": 2,
    "max_iters": 3,
    "warmup_iters": 1,
    "eval_every": 9,
    "eval_sequences": 2,
    "save_every": 2,
}


def flags(values: dict) -> list[str]:
    """Settings as the words of a command line."""
    words = []
    for name, value in values.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return words


STEP_FILES = ("state.json", "optimizer.safetensors", "config.json", "model.safetensors", "checksums.json")
FILES = {  # of each template, what is read
    "checkpoint": ["config.json", "model.safetensors", "checksums.json", "tokenizer.model"],
    "stranger": ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"],
    "run": ["settings.json", "metrics.jsonl", ".lock", *(f"step_0000003/{name}" for name in STEP_FILES)],
    "data": ["meta.json", "train.bin", "val.bin", "tokenizer.model"],
}
COMMANDS = {  # that read a template, in turn
    "checkpoint": [
        "seedprint compare FOLDER FOLDER --num-sequences 2 --sequence-length 8 --permutations 199",
        "probe --model FOLDER --num-sequences 4 --sequence-length 8",
        "sinks rate --model FOLDER --num-sequences 2 --sequence-length 8 --text ../text.txt --bos",
    ],
    "stranger": [
        "seedprint compare FOLDER FOLDER --num-sequences 2 --sequence-length 8 --permutations 199",
        "probe --model FOLDER --num-sequences 4 --sequence-length 8",
        "contraction layers --model FOLDER --num-sequences 4 --sequence-length 8",
    ],
    "run": [
        "train --resume --out FOLDER --max-iters 4",
        "probe --model FOLDER --num-sequences 4 --sequence-length 8",
    ],
    "data": [
        f"train --data FOLDER {' '.join(flags(TRAINING))}",
        "sinks rate --model tiny_llama@1 --data FOLDER --num-sequences 2 --sequence-length 8",
    ],
}
WILD = [0, -1, 1, 3, 1e-300, 1e300, 10**15, 10**30, 1.5, True, None, [], [1], {}, {"a": 1}]
WILD += ["", "x", "../../outside", "/etc/passwd", "a\0b", "x" * 9999, float("nan"), float("-inf")]


def replaced(make: Callable) -> Callable:
    """A damage that puts something else in the place of a file."""

    def damage(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return damage


def sparse(path: Path) -> None:
    """Thirty gigabytes of nothing."""
    path.touch()
    os.truncate(path, 30 * 2**30)


def edited(path: Path, change: Callable) -> None:
    """Change a file's bytes; and, so that nobody notices by their sum, remove checksums.json."""
    path.write_bytes(change(bytearray(path.read_bytes())))
    (path.parent / "checksums.json").unlink(missing_ok=True)


def flipped(raw: bytearray, draw: random.Random, end: int) -> bytearray:
    """Up to 50 bits among the first `end` bytes."""
    for _ in range(draw.choice([1, 1, 5, 50])):
        raw[draw.randrange(min(len(raw), end))] ^= 1 << draw.randrange(8)
    return raw


ANY_FILE = {  # what may stand in the place of any file: is it surely a mistake?
    "missing": (lambda path: path.unlink(missing_ok=True), False),
    "empty": (replaced(lambda path: path.write_bytes(b"")), False),
    "pipe": (replaced(os.mkfifo), True),
    "device": (replaced(lambda path: path.symlink_to("/dev/zero")), True),
    "link to nowhere": (replaced(lambda path: path.symlink_to("nowhere")), False),
    "folder": (replaced(os.mkdir), True),
    "30 GB": (replaced(sparse), True),
    "noise": (replaced(lambda path: path.write_bytes(random.Random(0).randbytes(4096))), False),
    "nested": (replaced(lambda path: path.write_text("[" * 200_000)), False),
    "nested objects": (replaced(lambda path: path.write_text('{"a":' * 200_000)), False),
}
LENIENT = {"metrics.jsonl", "tokenizer.model", ".lock"}  # may be left out, or made anew


def folder_cases() -> list[Case]:
    """Every file of every template, damaged in every way."""
    cases = []
    for template, names in FILES.items():
        commands = itertools.cycle(COMMANDS[template])
        for name in names:
            for what, (damage, is_mistake) in ANY_FILE.items():
                cases.append(damaged(template, name, what, damage, next(commands), is_mistake))
            for seed in range(6):
                cases.append(damaged(template, name, *bytes_damage(name, seed), next(commands)))
            if name.endswith(".json"):
                for seed in range(24):
                    cases.append(damaged(template, name, *value_damage(name, seed), next(commands)))
    return cases + special_cases()


def damaged(template, name, what, damage, command, is_mistake=False) -> Case:
    """A case that damages one file. A run passes a damaged step over, and what is not read is no mistake."""
    is_mistake = is_mistake and template != "run" and name not in LENIENT
    if command.startswith(("lib.data", "sinks")) and name in ("train.bin", "val.bin", "checksums.json"):
        is_mistake = False
    return Case(
        template,
        f"{name}: {what}",
        command.split(),
        template,
        lambda folder: damage(folder / name),
        is_mistake,
    )


def bytes_damage(name: str, seed: int) -> tuple[str, Callable]:
    """Some of a file's bytes are others, cut off or added."""
    draw = random.Random(f"{name} {seed}")
    kind = ("header bits", "bits", "cut", "cut", "grown", "zeros")[seed]
    changes = {
        "header bits": lambda raw: flipped(raw, draw, 600),
        "bits": lambda raw: flipped(raw, draw, len(raw)),
        "cut": lambda raw: raw[: draw.randrange(max(1, len(raw)))],
        "grown": lambda raw: raw + b"x" * draw.randrange(1, 100),
        "zeros": lambda raw: bytes(len(raw)),
    }

    def damage(path: Path) -> None:
        if path.exists() and path.stat().st_size:
            edited(path, changes[kind])

    return f"{kind} {seed}", damage


def value_damage(name: str, seed: int) -> tuple[str, Callable]:
    """A value of a JSON file is another, is missing, or is one too many."""
    draw = random.Random(f"{name} {seed}")
    value = draw.choice(WILD)
    place = draw.random()

    def damage(path: Path) -> None:
        values = json.loads(path.read_text())
        keys = sorted(values)
        key = keys[int(place * len(keys))]
        if seed == 0:
            del values[key]
        elif seed == 1:
            values["one more"] = value
        elif isinstance(values[key], dict) and values[key] and seed % 2:
            values[key] = values[key] | {next(iter(values[key])): value}
        else:
            values[key] = value
        path.write_text(json.dumps(values))
        if path.name != "checksums.json":
            (path.parent / "checksums.json").unlink(missing_ok=True)

    return f"value {seed}", damage


def with_json(name: str, **changes) -> Callable:
    """A damage that changes values of a folder's JSON file, and removes its checksums."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        (path.parent / "checksums.json").unlink(missing_ok=True)

    return damage


def with_tensors(change: Callable, name="step_0000003/optimizer.safetensors") -> Callable:
    """A damage that changes a folder's tensors, a dictionary, and removes their checksums."""

    def damage(folder: Path) -> None:
        path = folder / name
        tensors = safetensors.torch.load_file(path)
        first = sorted(tensors)[0]
        change(tensors, first)
        safetensors.torch.save_file(tensors, path)
        (path.parent / "checksums.json").unlink(missing_ok=True)

    return damage


def special_cases() -> list[Case]:
    """Attacks that need more than one file's damage."""
    resume = "train --resume --out FOLDER --max-iters 4".split()
    train = COMMANDS["data"][0].split()
    compare = COMMANDS["checkpoint"][0].split()

    def outside_link(name: str) -> Callable:
        def damage(folder: Path) -> None:
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(folder.parent / "outside")

        return damage

    def replace_step(folder: Path) -> None:
        shutil.rmtree(folder / "step_0000003")
        (folder / "step_0000003").write_text("")

    def directory_state(folder: Path) -> None:
        (folder / "step_0000002" / "state.json").unlink()
        (folder / "step_0000002" / "state.json").mkdir()

    def junk_lines(folder: Path) -> None:
        lines = [
            "",
            "junk",
            "[1]",
            "[" * 99999,
            '{"step": "x"}',
            '{"step": 1e400}',
            '{"step": 2, "loss": "x"}',
        ]
        lines += ['{"step": 1, "loss": 1e999, "val_loss": [1]}', f'{{"step": 3, "loss": {"9" * 999}}}']
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("\n".join(lines))

    def beyond_the_vocabulary(folder: Path) -> None:
        path = folder / "train.bin"
        path.write_bytes(b"\xff" * path.stat().st_size)

    cases = [
        Case("run", "step is a file", resume, "run", replace_step),
        Case("run", "state is a folder", resume, "run", directory_state, True),
        Case("run", "step is a link", resume, "run", outside_link("step_0000003")),
        Case("run", "metrics is a link", resume, "run", outside_link("metrics.jsonl")),
        Case("run", "lock is a link", resume, "run", outside_link(".lock"), True),
        Case("run", "junk lines", resume, "run", junk_lines),
        Case("run", "another step", resume, "run", with_json("step_0000003/state.json", step=10**15)),
        Case("run", "no optimizer group", resume, "run", with_json("step_0000003/state.json", maximize=True)),
        Case("data", "beyond the vocabulary", train, "data", beyond_the_vocabulary, True),
    ]
    for name in ("../outside", "/etc/hostname", "tokenizer.txt"):
        meta = with_json("meta.json", tokenizer=name)
        cases.append(Case("data", f"tokenizer {name}", train, "data", meta, True))
    for size in (-1, 0, 499, 501, 2**30, 2**62):
        meta = with_json("meta.json", vocab_size=size)
        cases.append(Case("data", f"vocabulary of {size}", train, "data", meta, True))
    for what, change in {
        "shape": lambda tensors, name: tensors.update({name: tensors[name][:-1].clone()}),
        "type": lambda tensors, name: tensors.update({name: tensors[name].double()}),
        "name": lambda tensors, name: tensors.update({name + "x": tensors.pop(name)}),
        "one missing": lambda tensors, name: tensors.pop(name),
        "NaN": lambda tensors, name: tensors[name].fill_(float("nan")),
        "negative squares": lambda tensors, name: [tensor.fill_(-1.0) for tensor in tensors.values()],
    }.items():
        cases.append(Case("run", f"optimizer: {what}", resume, "run", with_tensors(change)))
    names = ["../outside", "/etc/passwd", "a\0.safetensors", "x" * 999 + ".safetensors", "none.safetensors"]
    for name in [*names, 7, None, ["x"]]:
        index = with_json("model.safetensors.index.json", weight_map={"lm_head.weight": name})
        cases.append(Case("stranger", f"index {name!r:.20}", compare, "stranger", index, True))
    no_ramp = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
    for key, value in {
        "rope_theta": 1e-300,
        "rms_norm_eps": 1e-300,
        "hidden_size": 2**39,
        "vocab_size": 2**39,
        "num_hidden_layers": 10**9,
        "num_attention_heads": 3,
        "max_position_embeddings": 4,
        "hidden_act": "gelu",
        "rope_scaling": no_ramp | {"original_max_position_embeddings": 64},
    }.items():
        change = with_json("config.json", rope_parameters=None, **{key: value})
        must_refuse = key != "hidden_act"  # that is another architecture, which `compare` reads, too
        cases.append(Case("checkpoint", f"{key} {value}", compare, "checkpoint", change, must_refuse))
    return cases


# ---- bad command lines -------------------------------------------------------------------------------------

SMALL = TRAINING | {  # values with which a command takes a second
    "models": ["backcopy@1", "backcopy@2"],
    "seed": 1,
    "num_sequences": 16,
    "sequence_length": 8,
    "paper_sequences": 20,
    "paper_length": 8,
    "permutations": 199,
    "numbers": 64,
    "seeds": "0-99",
    "source": "../text.txt",
    "tokenizer": "bytes",
    "num_births": 14,
    "trap_births": 3,
    "position": 3,
    "batch_size": 2,
}
BAD = ["", "-1", "0", "1", "nan", "inf", "-inf", "1e400", str(10**30), "-" + "9" * 400, "x"]
BAD += ["3 3", "1 2", "pipe", "device", "folder", "nowhere", "/dev/zero", "/proc/self/mem", "../outside"]
BAD += ["tiny_llama", "tiny_llama@", "backcopy@" + "9" * 400, "@", "backcopy@1@2"]
BAD += ["a\x01b\u202e", "\udcff", "--help", "None", "()", "hf:", "bpe:0", "bpe:-1", "bpe:99999999"]
BAD += ["tiktoken:none", "5-1", "0-", "a-b", "float64"]
SPELLED_OUT = """
probe --modle nano_gpt2
probe extra
probe pipe.py
probe folder.py
probe nowhere.py
probe --seed
probe --text x
sinks rates
sinks rate --epsilon 2
sinks --data nowhere
sinks --text pipe
sinks --text device
sinks --text /dev/zero
sinks --text text.txt
sinks --data a --text b
sinks intervene --layers 9
sinks intervene --position 999
seedprint
seedprint --seed 3
seedprint compare
seedprint compare backcopy@1
seedprint paper backcopy@1 tiny_llama@1
seedprint compare pipe pipe
seedprint compare folder folder
seedprint compare nowhere backcopy@1
seedprint identify backcopy@1 --seeds 9-1
seedprint identify backcopy@1 backcopy@2
seedprint identify backcopy@1 --parameter none
seedprint persistence folder
seedprint matrix backcopy@1
train --resume
train --resume --out folder
train --data nowhere
train --data pipe
train --data folder
train --model none
train --source nowhere.txt
train --source pipe.txt
train --tokenizer none
train --tokenizer pipe
train --init-from nowhere
train --init-from pipe
train --init-from folder
train --out /dev/null
train --out /proc/x
train --max-iters 0
train --learning-rate 1e400
train --learning-rate -1
train --sequence-length 99999 --data ../data
train bad.py
train loop.py
lib.data nowhere.txt
lib.data pipe.txt
lib.data folder
lib.data text.md
lib.data ../text.txt --tokenizer pipe
lib.data ../text.txt --tokenizer bpe:x
lib.data ../text.txt --held-out 2
lib.data bad.jsonl
lib.data long.jsonl
lib.data bomb.jsonl.gz
lib.data ../text.txt --out /proc/x --tokenizer bytes
lib.data backcopy
reproduce.__main__ --only none
reproduce.__main__ --scale none
reproduce.__main__ --text nowhere
reproduce.__main__ --out /proc/x
contraction layer
contraction layers --model nowhere
contraction cure --init centered
contraction mlp --model nowhere
contraction all --model folder
reproduce.errors rate
reproduce.errors cost backcopy@1
reproduce.rivals backcopy@1
probe --device cuda9
probe --out pipe
"""  # command lines that are surely mistakes


def small_words(defaults, without: str) -> list[str]:
    """The flags of a quick command, but for one."""
    words = []
    positional = []
    for field in fields(defaults):
        if field.name == without or field.name not in SMALL:
            continue
        values = SMALL[field.name] if isinstance(SMALL[field.name], list) else [SMALL[field.name]]
        if field.name in ("models", "source") and field.default in ((), ("python",)):
            positional += values
        else:
            words += ["--" + field.name.replace("_", "-"), *values]
    return [str(word) for word in [*positional, *words]]


def command_cases(count: int) -> list[Case]:
    """Bad values for the flags of all commands: a random sample, always the same, and some by hand."""
    combinations = []
    for script in SCRIPTS[:-1]:
        for name, command in MODULES[script].COMMANDS.items():
            if name in ("all", "persistence") or (script, name) == ("contraction", ""):
                continue
            defaults = command.defaults if not callable(command.defaults) else MODULES["train"].Settings()
            for field in fields(defaults):
                combinations += [(script, name, defaults, field.name, bad) for bad in BAD]
    sample = random.Random(0).sample(combinations, count)
    cases = []
    for script, name, defaults, flag, bad in sample:
        values = bad.split(" ") if bad else [""]
        positional = getattr(defaults, flag) in ((), ("python",)) and flag in ("models", "source")
        given = values if positional else ["--" + flag.replace("_", "-"), *values]
        words = [*filter(None, [script, name]), *given, *small_words(defaults, flag)]
        cases.append(Case(f"words of {script}", f"{name} --{flag} {bad!a:.30}", words))
    return cases + spelled_out_cases()


def spelled_out_cases() -> list[Case]:
    """Command lines that are surely mistakes."""
    lines = SPELLED_OUT.strip().splitlines()
    return [Case("spelled out", line, line.split(), must_refuse=True) for line in lines]


def furnish(folder: Path) -> None:
    """What the words name: a pipe, a device, an empty folder, and files that are not what they seem."""
    for name in ("pipe", "pipe.py", "pipe.txt"):
        os.mkfifo(folder / name)
    (folder / "device").symlink_to("/dev/zero")
    (folder / "folder").mkdir()
    (folder / "folder.py").mkdir()
    (folder / "text.md").write_text("text")
    (folder / "text.txt").write_text("text")
    (folder / "bad.py").write_text("max_iters = 1 /")
    (folder / "loop.py").write_text("def f(): f()\nf()")
    (folder / "bad.jsonl").write_text('{"text": ' + "[" * 99999)
    (folder / "long.jsonl").write_text('{"text": 3}')
    with gzip.open(folder / "bomb.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(80):
            file.write(bytes(2**20))


# ---- a case's life -----------------------------------------------------------------------------------------


def live(case: Case, place: Path) -> None:
    """Run a case's command in this process, watched; what is forbidden is written to the file `forbidden`."""
    os.chdir(place)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)
    torch.set_num_threads(1)
    script, *words = [word.replace("FOLDER", "folder") for word in case.words]
    sys.argv = [f"{script}.py", *words]
    log = os.open("forbidden", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    readable = [*map(str, READABLE), str(place), str(place.parent / "text.txt"), str(place.parent / "data")]
    writable = [*map(str, WRITABLE), str(place)]

    def watch(event: str, arguments: tuple) -> None:
        if event != "open" and event not in CHANGES:
            return
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        path = os.fsdecode(path)
        if event == "os.mkdir":  # it follows no link
            path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        else:
            path = os.path.realpath(path)
        allowed = writable
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            allowed = readable
        if not any(path.startswith(root) for root in allowed):
            os.write(log, f"{event} {path}\n".encode(errors="replace"))

    sys.addaudithook(watch)
    module = MODULES[script]
    code = 0
    try:
        settings.run_script(module.COMMANDS, module.__doc__)
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@dataclass
class Outcome:
    """What came of a case: `fault` is empty if nothing is wrong."""

    case: Case
    status: int
    seconds: float
    bytes: int
    message: str
    fault: str


def start(case: Case, number: int, root: Path) -> tuple[int, Path, float]:
    """Prepare a case's place and fork its process."""
    place = root / f"case_{number}"
    place.mkdir()
    if case.template:
        shutil.copytree(root / case.template, place / "folder")
        case.damage(place / "folder")
        (place / "outside").mkdir()
    else:
        furnish(place)
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        live(case, place)
    return child, place, begun


def finish(case: Case, place: Path, begun: float, status: int, usage) -> Outcome:
    """Judge a case whose process has ended; its place is removed."""
    seconds = time.monotonic() - begun
    errors = (place / "err").read_text(errors="replace")
    forbidden = (place / "forbidden").read_text() if (place / "forbidden").exists() else ""
    code = os.waitstatus_to_exitcode(status)
    message = errors.strip()
    lines = [line for line in message.splitlines() if line]
    is_box = bool(lines) and "For full helptext" in lines[-1]  # tyro's message
    fault = ""
    if code < 0:
        fault = f"signal {signal.Signals(-code).name} after {seconds:.0f} s"
    elif "Traceback" in errors:
        fault = "traceback"
    elif code not in (0, 2):
        fault = f"exit status {code}"
    elif code == 2 and not is_box and len([line for line in lines if ".py: " in line]) != 1:
        fault = f"{len(lines)} lines instead of one message"
    elif code == 2 and len(message) > 5000:
        fault = "a very long message"
    elif code == 0 and case.must_refuse:
        fault = "not refused"
    elif usage.ru_maxrss * 1024 > BYTES:
        fault = f"{usage.ru_maxrss / 2**20:.1f} GB"
    elif forbidden:
        fault = "forbidden: " + forbidden.splitlines()[0]
    shutil.rmtree(place, ignore_errors=True)
    return Outcome(case, code, seconds, usage.ru_maxrss * 1024, message, fault)


def run_all(cases: list[Case], root: Path, jobs: int = 2):
    """The outcomes of all cases, as they end; a case that takes too long is killed."""
    waiting = list(enumerate(cases))[::-1]
    running = {}  # by process
    while waiting or running:
        while waiting and len(running) < jobs:
            number, case = waiting.pop()
            child, place, begun = start(case, number, root)
            running[child] = (case, place, begun)
        child, status, usage = os.wait4(-1, os.WNOHANG)
        if child in running:
            yield finish(*running.pop(child), status, usage)
            continue
        for child, (_, _, begun) in running.items():
            if time.monotonic() - begun > SECONDS:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def main() -> None:
    """Run the cases, print those that went wrong and the table; exit status 1 if any did."""
    stride = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    runtime.matmul_peak = lambda device, dtype: 1e11  # only MFU needs it, and it takes a second
    faults = 0
    table = defaultdict(list)
    with tempfile.TemporaryDirectory() as root:
        root = Path(root).resolve()
        maker = processes.Process(target=make_templates, args=(root,))
        maker.start()
        maker.join()
        cases = (folder_cases() + command_cases(330))[::stride]
        for outcome in run_all(cases, root):
            table[outcome.case.kind].append(outcome)
            if "-v" in sys.argv and outcome.seconds > 3:
                print(f"{outcome.seconds:.1f} s: {outcome.case.what[:90]}")
            if outcome.fault:
                faults += 1
                last = outcome.message.splitlines()[-1:] or [""]
                print(
                    f"{outcome.case.kind}, {outcome.case.what}: {outcome.fault}: {last[0][:200]}", flush=True
                )
                if "-v" in sys.argv:
                    print(" ".join(outcome.case.words)[:400], outcome.message[-3000:], sep="\n", flush=True)
    print(f"{'':26} cases  refused  fine  faults  longest s  most MB")
    for kind, outcomes in table.items():
        refused = sum(outcome.status == 2 for outcome in outcomes)
        fine = sum(outcome.status == 0 for outcome in outcomes)
        bad = sum(bool(outcome.fault) for outcome in outcomes)
        longest = max(outcome.seconds for outcome in outcomes)
        most = max(outcome.bytes for outcome in outcomes) / 2**20
        print(f"{kind:26} {len(outcomes):5} {refused:8} {fine:5} {bad:7} {longest:10.1f} {most:8.0f}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
