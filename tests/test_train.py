"""train.py: the same run however it is cut, spread or interrupted; and what it says when it cannot go on."""

import errno
import json
import math
import os
import random
import resource
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import kill_training
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import KINDS, ROOT, assert_refused, random_model, run_here, run_script

import init
import train
from lib import runtime
from lib.settings import UserError, read_config_file
from measure import attention
from model import PRESETS
from sources import checkpoint, data, runs, sampling
from sources.runs import Run

pytestmark = pytest.mark.usefixtures("quick_training")
TWELVE = kill_training.SMALL | {"max_iters": 12, "log_every": 6, "learning_rate": 2e-3}
TWELVE |= {"eval_every": 5, "track_sinks": True}  # step 5 is not saved for itself
NO_MODEL = {"model": train.Settings().model, "d_model": None, "d_ff": None}  # beside init_from


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return kill_training.prepare(tmp_path_factory.mktemp("data"))


def small(tokens: Path, out: Path, **changes) -> train.Settings:
    return train.Settings(**{**TWELVE, "data": str(tokens), "out": str(out), **changes})


def config_file(settings: train.Settings, folder: Path) -> Path:
    lines = [f"{name} = {value!r}\n" for name, value in asdict(settings).items() if value is not None]
    path = folder / "config.py"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    return train.train(small(tokens, tmp_path_factory.mktemp("runs") / "whole"))


@pytest.fixture(scope="module")
def stopped(tokens, tmp_path_factory):
    return train.train(small(tokens, tmp_path_factory.mktemp("runs") / "stopped", max_iters=4))


@pytest.fixture
def copied(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "copied")


def rows_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return rows


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows_of(run)[1:]]


def steps_with_state(run: Path) -> list[str]:
    """The last digits of the steps that can be resumed."""
    return [step.name[-2:] for step in checkpoint.steps(run) if (step / "optimizer.safetensors").exists()]


def same_bits(run: Path, other: Path) -> bool:
    """Did two runs end with the same weights, optimiser and log?"""
    mine, theirs = kill_training.contents(run), kill_training.contents(other)
    last = checkpoint.steps(run)[-1].name
    names = [f"{last}/{name}" for name in ("model.safetensors", "optimizer.safetensors")]
    return all(mine[name] == theirs[name] for name in ["metrics.jsonl", *names])


def test_the_loop_against_a_plain_one(tokens, whole):
    text = data.TokenData(tokens)
    model = init.newborn(replace(PRESETS["backcopy"], d_model=64, d_ff=96), 42)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    expected = []
    for step in range(12):
        inputs, targets = text.batch(0, range(4 * step, 4 * step + 4), 16)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.55 + 0.45 * math.cos(math.pi * (step - 2) / 10)
        rate = 2e-3 * ((step + 1) / 2 if step < 2 else cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        expected.append({"step": step + 1, "loss": loss.item(), "lr": rate, "grad_norm": norm.item()})
    # Micro-batches of 3 and 1 sum in another order: float32 rounding, grown through twelve steps of AdamW.
    for row, numbers in zip(rows_of(whole)[1:], expected, strict=True):
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-4)
        assert row["lr"] == pytest.approx(numbers["lr"], rel=1e-12)
    inputs, targets = text.held_out(4, 16)
    with torch.no_grad():
        held_out = F.cross_entropy(model.eval()(inputs).flatten(0, 1), targets.flatten()).item()
    assert rows_of(whole)[-1]["val_loss"] == pytest.approx(held_out, rel=1e-4)


def test_two_processes_and_then_one(tokens, tmp_path):
    """Of five sequences one rank has two micro-batches. Only one rank writes and speaks."""
    changes = {"global_batch_size": 5, "micro_batch_size": 2, "explicit_sink": True}
    one = small(tokens, tmp_path / "one", **changes)
    two = small(tokens, tmp_path / "two", resume=True, **changes)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run_script(*torchrun, "train.py", config_file(two, tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": a new run") == done.stdout.count("step 12: held-out loss") == 1
    train.train(one)
    for settings in (one, two):
        train.train(replace(settings, resume=True, max_iters=20))
    rows = [rows_of(tmp_path / name) for name in ("one", "two")]
    assert len(rows[0]) == len(rows[1]) == 21
    for row, other in zip(*rows):
        for name in {"loss", "grad_norm", "val_loss"} & row.keys():
            # sums of float32 gradients in another order differ by 1e-7, which AdamW's steps let grow
            assert row[name] == pytest.approx(other[name], rel=1e-5)


EVALUATION = {"eval_every": 3, "eval_sequences": 2, "save_every": 2, "track_sinks": False}


# A bfloat16's products keep 8 bits: 0.4 % each, averaged over the many that make a loss.
@pytest.mark.parametrize("changes, tolerance", [(EVALUATION, 0), ({"dtype": "bfloat16"}, 5e-3)])
def test_losses_of_the_same_training(changes, tolerance, tokens, whole, tmp_path):
    other = train.train(small(tokens, tmp_path / "a", **changes))
    assert losses(other) == pytest.approx(losses(whole), rel=tolerance, abs=0)


def test_sinks_of_every_length(tokens, tmp_path):
    """The first 64 and 32 tokens of a window, as the text falls too where training has BOS first."""
    changes = {"sequence_length": 64, "bos_first": True, "track_sinks": True, "max_iters": 2}
    run = train.train(small(tokens, tmp_path / "a", **changes))
    cases = [(False, 64), (False, 32), (True, 64), (True, 32)]
    for row, (bos_first, T) in zip(rows_of(run)[-1]["sinks"], cases, strict=True):
        windows, _ = data.TokenData(tokens, bos_first).held_out(100, 64)
        alpha = attention.attention_to(checkpoint.load(run), windows[:, :T])[0][..., 0]  # (n, L, H)
        assert np.array(row["alpha1"]) == pytest.approx(alpha.mean(0).numpy(), abs=5e-5)  # four digits
        assert row["sink_rate"] == pytest.approx((alpha > 0.3).float().mean().item())
        assert (row["bos_first"], row["sequence_length"]) == (bos_first, T)


def test_a_run_folder(whole):
    assert [step.name[-2:] for step in checkpoint.steps(whole)] == ["00", "01", "02", "04", "08", "10", "12"]
    assert steps_with_state(whole) == ["10", "12"]  # the best so far is saved, too
    assert [row["step"] for row in rows_of(whole) if "val_loss" in row] == [0, 5, 10, 12]


def test_only_birth_and_the_newest_two_are_kept(tokens, tmp_path):
    run = train.train(small(tokens, tmp_path / "a", max_iters=7, save_every=2, keep="last"))
    assert [step.name[-2:] for step in checkpoint.steps(run)] == ["00", "06", "07"]


def test_the_default_data_set_is_prepared_on_first_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("module.txt").write_text(Path(random.__file__).read_text("utf-8") * 4)
    settings = small(None, "a", data=None, source=("module.txt",), tokenizer="bytes", max_iters=1)
    train.train(settings)
    assert "preparing data/" in capsys.readouterr().out
    train.train(replace(settings, out="b"))
    assert "preparing" not in capsys.readouterr().out


def test_configs():
    for path in (ROOT / "configs").glob("*.py"):
        settings = train.Settings(**read_config_file(str(path), train.Settings()))
        assert settings.sequence_length <= PRESETS[settings.model].context_length
        assert settings.out == f"runs/{path.stem}"


def test_sizes(tokens, tmp_path):
    """Of flags; heads bring their keys and width, and `none` of them changes what is not named."""
    sizes = {"num_layers": 3, "num_heads": 4, "d_model": 40, "d_ff": 24}
    run = train.train(small(tokens, tmp_path / "a", max_iters=1, **sizes))
    config = checkpoint.load(run).config
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert (config.kv_heads, config.head_size) == (4, 10)
    train.train(small(tokens, tmp_path / "a", max_iters=2, resume=True, **sizes))
    assert runs.new_config(train.Settings(d_ff=9)) == replace(PRESETS["tiny_llama"], d_ff=9)


def test_a_step_opens_in_transformers(whole, tmp_path):
    """Nothing but the folder: the same tokens and logits, and a text ends where ours does."""
    lines = [f"the number {i} is even\n" if i % 2 == 0 else f"{i} is odd\n" for i in range(300)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    out, source = str(tmp_path / "data"), (str(tmp_path / "text.jsonl"),)
    tokens = data.prepare(data.Settings(source=source, tokenizer="bpe:300", held_out=0.1, out=out))
    sizes = {"model": "tiny_qwen", "num_layers": 2, "d_model": 32, "d_ff": 48, "sequence_length": 32}
    changes = {"learning_rate": 1e-2, "global_batch_size": 16, "max_iters": 60, "save_every": 60}
    changes |= {"micro_batch_size": 16, "eval_every": 60, "track_sinks": False}
    run = train.train(small(tokens, tmp_path / "run", **sizes, **changes))
    folder = checkpoint.steps(run)[-1]
    ours, tokenizer = checkpoint.load(folder), data.TokenData(tokens).tokenizer
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    coder = transformers.AutoTokenizer.from_pretrained(folder)
    (ids,) = tokenizer.encode(["".join(lines)])
    assert coder("".join(lines))["input_ids"] == ids
    inputs = torch.tensor([ids[:64]])
    with torch.no_grad():
        assert torch.allclose(theirs(inputs).logits, ours(inputs), atol=1e-5)  # float32, two orders of sums
    prompt = torch.tensor([[tokenizer.bos, *tokenizer.encode(["the"])[0]]])
    written = theirs.generate(prompt, max_new_tokens=200, do_sample=False)[0].tolist()
    assert written[-1] in theirs.generation_config.eos_token_id and len(written) < 200
    sampled = run_here("train.py", "sample", run, "--prompt", "the", "--temperature", 0, "--device", "cpu")
    assert sampled.stdout.split("\n", 1)[1] == coder.decode(written[1:-1]) + "\n"
    with pytest.raises(UserError, match="with another tokenizer"):
        train.train(small(tokens, tmp_path / "new", init_from=str(whole), **NO_MODEL))


@pytest.mark.parametrize(("top_k", "temperature"), [(5, 1.7), (1000, 0.6)])
def test_sampling_by_hand(top_k, temperature):
    """Each token by the last eight alone, which the context holds; number 257 the tokenizer has not."""
    model = random_model(replace(KINDS["llama"], vocab_size=258, context_length=8))
    tokenizer = replace(data.load_tokenizer("bytes"), bos=None)  # so that no token ends a text
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    tokens = [0, *b"ab"]
    for _ in range(30):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[-8:]]))[0, -1, :257]
        best = logits.argsort(descending=True)[:top_k]
        choice = torch.multinomial((logits[best] / temperature).exp(), 1, generator=generators[0])
        tokens.append(best[choice].item())
    written = sampling.generate(model, tokenizer, generators[1], "ab", 30, temperature, top_k)
    assert written == tokenizer.decode(tokens[3:])


def test_killed_and_resumed():
    """The short version of tests/kill_training.py; two ranks, also told to stop in an evaluation."""
    done = run_script("tests/kill_training.py", 1)
    assert done.returncode == 0 and done.stdout.count("same bits") == 2, done.stdout + done.stderr
    assert "2 processes, eager: told in mean_loss to stop" in done.stdout


SIGNALS = [  # who is called, after how many steps, and the step that is saved
    (train, "learning_rate", 3, "04"),
    (train, "learning_rate", 4, "05"),  # whose evaluation is left out, and made when the run is resumed
    (train, "sinks_by_length", 4, "06"),  # of step 5, whose evaluation is finished, and another step done
]


@pytest.mark.parametrize("owner, stage, step, saved", SIGNALS)
def test_a_signal_saves_and_resuming_gives_the_same_bits(
    tokens, whole, tmp_path, monkeypatch, owner, stage, step, saved
):
    """A step is finished, and so is an evaluation that has begun."""
    function = getattr(owner, stage)
    run = tmp_path / "a"
    calls = []

    def interrupted(*words, **options):
        if not calls and checkpoint.steps(run) and len(losses(run)) == step:
            calls.append(stage)
            os.kill(os.getpid(), signal.SIGUSR1)
        return function(*words, **options)

    settings = small(tokens, run)
    with monkeypatch.context() as patch:
        patch.setattr(owner, stage, interrupted)
        patch.setattr(train, "generate", sampling.generate)
        train.train(settings)
    assert steps_with_state(run)[-1] == saved and "val_loss" not in rows_of(run)[-1]
    train.train(replace(settings, resume=True))
    assert same_bits(run, whole)


def test_a_null_in_settings_is_the_default(copied):
    """As runs of a time had it of --explicit-sink, when its default was None."""
    values = json.loads((copied / "settings.json").read_text())
    (copied / "settings.json").write_text(json.dumps(values | {"explicit_sink": None}))
    done = run_here("train.py", "--resume", "--out", copied, "--max-iters", 5)
    assert done.returncode == 0 and checkpoint.steps(copied)[-1].name == "step_0000005", done.stderr


def test_full_disk(tokens, whole, tmp_path):
    """Room for weights of 0.4 MB, but not for AdamW's state of 0.8: one line, no half a checkpoint."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
    try:
        done = run_here("train.py", config_file(small(tokens, tmp_path / "a"), tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_refused(done, "cannot write", "step_0000001")
    assert not (tmp_path / "a" / "step_0000001").exists()
    done = run_here("train.py", "--resume", "--out", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert same_bits(tmp_path / "a", whole)


def test_some_settings_may_change(copied, tmp_path):
    """Those of a config file or the command line win over the run's; what is not given is the run's."""
    config = tmp_path / "config.py"
    config.write_text(f"out = {str(copied)!r}\nmax_iters = 6\nresume = True\n")
    done = run_here("train.py", config, "--micro-batch-size", 4, "--no-track-sinks")
    assert done.returncode == 0, done.stderr
    changed = {"max_iters": 6, "micro_batch_size": 4, "track_sinks": False}
    assert json.loads((copied / "settings.json").read_text()).items() >= (TWELVE | changed).items()
    assert len(losses(copied)) == 6 and "sinks" not in rows_of(copied)[-1]
    config.write_text(config.read_text() + "learning_rate = 1e-3\n")  # the default, but not this run's
    assert_refused(run_here("train.py", config), "--learning-rate 0.002")


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--resume", "--keep", "last"], ["--keep powers"]),  # it would remove what was to be kept
        (["--resume", "--max-iters", 1], ["--max-iters 1", "is at step"]),
        ([], ["holds a run, started with --", "go on with that, or change --out"]),
    ],
)
def test_a_run_is_left_as_it_is(stopped, words, expected):
    before = kill_training.contents(stopped)
    assert_refused(run_here("train.py", "--out", stopped, *words), *expected)
    assert kill_training.contents(stopped) == before


def test_one_process_group_a_run(stopped, monkeypatch):
    words = ("train.py", "--resume", "--out", stopped, "--max-iters", 9)
    with Run(stopped).lock():
        assert_refused(run_here(*words), f"{stopped} is locked")
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert_refused(run_here(*words), "No locks available")


def test_resuming_where_there_is_no_run(tokens, whole, stopped, tmp_path):
    """What may be a typo is refused; what names a run's settings begins one."""
    for folder in (tmp_path / "typo", checkpoint.steps(stopped)[0]):
        refused = run_here("train.py", "--resume", "--out", folder, "--max-iters", 9)
        assert_refused(refused, f"no run in {folder}")
    assert not (tmp_path / "typo").exists()
    done = run_here("train.py", config_file(small(tokens, tmp_path / "a"), tmp_path), "--resume")
    assert done.returncode == 0 and f"{tmp_path / 'a'}: a new run" in done.stdout
    assert same_bits(tmp_path / "a", whole)


def test_settings_from_python(copied, stopped, tokens, tmp_path):
    begun = json.loads((stopped / "settings.json").read_text())
    train.train(replace(Run(copied).settings(train.Settings), max_iters=6))
    now = json.loads((copied / "settings.json").read_text())
    assert now == begun | {"max_iters": 6, "out": str(copied), "resume": True}
    with pytest.raises(UserError, match="settings: Expected"):
        train.train(small(tokens, tmp_path / "a", source="text.txt"))
    train.train(small(tokens, tmp_path / "b", warmup_iters=None, max_iters=6))
    assert json.loads((tmp_path / "b" / "settings.json").read_text())["warmup_iters"] == 1  # a sixth


def test_another_data_set_is_refused(copied, tokens, tmp_path):
    other = data.Settings(source=(str(ROOT / "train.py"),), tokenizer="bytes", out=str(tmp_path / "other"))
    data.prepare(other)
    settings = json.loads((copied / "settings.json").read_text())
    (copied / "settings.json").write_text(json.dumps(settings | {"data": other.out}))
    assert_refused(run_here("train.py", "--resume", "--out", copied), "is not the data set")


def test_steps_without_settings_are_no_run_to_start(copied, tokens, tmp_path):
    (copied / "settings.json").unlink()
    before = kill_training.contents(copied)
    config = config_file(small(tokens, copied), tmp_path)
    for words in ([], ["--resume"]):
        assert_refused(run_here("train.py", config, *words), f"{copied} holds a run", "settings.json")
    assert kill_training.contents(copied) == before


def test_what_a_killed_run_did_not_come_to_is_done(copied, stopped):
    """After its last save it removes what is not to be kept, and draws."""
    first, *_, last = checkpoint.steps(copied)
    shutil.copy(last / "optimizer.safetensors", first)
    (copied / "loss.png").unlink()
    train.train(Run(copied).settings(train.Settings))
    assert kill_training.contents(copied).keys() == kill_training.contents(stopped).keys()


def test_a_damaged_checkpoint_is_told(copied):
    newest = checkpoint.steps(copied)[-1]
    for name in ("optimizer.safetensors", "model.safetensors"):
        raw = (newest / name).read_bytes()
        (newest / name).write_bytes(raw[: len(raw) // 2])
        assert_refused(run_here("train.py", "--resume", "--out", copied), f"cannot read {newest / name}")
        (newest / name).write_bytes(raw)
    (newest / "optimizer.safetensors").unlink()
    assert_refused(run_here("train.py", "--resume", "--out", copied), "optimizer.safetensors")


def test_continual_training_from_a_checkpoint(tokens, whole, tmp_path):
    """It begins with its parent's weights, and goes on without its parent."""
    parent = shutil.copytree(whole, tmp_path / "parent")
    changes = {"max_iters": 1, "data_seed": 5} | NO_MODEL
    settings = small(tokens, tmp_path / "a", init_from=str(parent), **changes)
    run = train.train(settings)
    child, last = checkpoint.steps(run)[0], checkpoint.steps(whole)[-1]
    assert (child / "model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()
    shutil.rmtree(parent)
    train.train(replace(settings, resume=True, max_iters=2))
    assert len(losses(run)) == 2


@pytest.mark.parametrize("eval_every", [100, 1])  # found by a loss, by an evaluation
def test_divergence_is_told(tokens, tmp_path, eval_every):
    changes = {"learning_rate": 1.6e7, "warmup_iters": 0, "eval_every": eval_every}
    with pytest.raises(UserError, match="lower --learning-rate"):
        train.train(small(tokens, tmp_path / "a", **changes))


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--sequence-length", "257"], "--sequence-length 257"),
        (["--data", "none"], "no data set in none"),
        (["--init-from", "backcopy@1", "--attn-calibration", "headnorm"], "backcopy@1 has none"),
        (["--init-from", "backcopy@1", "--embedding-seed", "7"], "--embedding-seed"),
        (["--init-from", "runs/other", "--d-ff", "8"], "--d-ff"),
        (["--num-heads", "5", "--data", "none"], "inconsistent sizes"),  # before data are opened
    ],
)
def test_refusals(tokens, tmp_path, words, expected):
    settings = small(tokens, tmp_path / "new")
    assert_refused(run_here("train.py", config_file(settings, tmp_path), *words), expected)
    assert not checkpoint.steps(tmp_path / "new")


def test_machines_with_other_data_begin_nothing(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "gathered", lambda facts: [facts, facts | {"data set": "another"}])
    with pytest.raises(UserError, match="rank 0 has data set .*, rank 1 another"):
        train.train(small(tokens, tmp_path / "a"))
    assert not checkpoint.steps(tmp_path / "a")
