"""train.py: the same run however it is cut, spread or interrupted; and what it says when it cannot go on."""

import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import kill_training
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ROOT, assert_refused, run_here, run_script

import init
import train
from lib import checkpoint, data, runs, runtime
from lib.settings import UserError, read_config_file
from measure import attention
from model import PRESETS

pytestmark = pytest.mark.usefixtures("quick_training")
sample = train.generate  # the fixture puts a quicker one in its place
SMALL = {
    "model": "backcopy",
    "device": "cpu",
    "dtype": "float32",
    "sequence_length": 16,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 2e-3,
    "max_iters": 12,
    "warmup_iters": 2,
    "eval_every": 6,
    "eval_sequences": 4,
    "save_every": 3,
    "log_every": 6,
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A small prepared data set, of bytes."""
    return kill_training.prepare(tmp_path_factory.mktemp("data"))


def small(tokens: Path, out: Path, **changes) -> train.Settings:
    """The settings of a small run."""
    return train.Settings(**{**SMALL, "data": str(tokens), "out": str(out), **changes})


def words_of(settings: train.Settings) -> list[str]:
    """The command line that asks for these settings."""
    words = []
    for name, value in asdict(settings).items():
        if value != getattr(train.Settings(), name):
            flag = "--" + name.replace("_", "-")
            words += [flag] if value is True else [flag, str(value)]
    return words


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """An undisturbed run."""
    return train.train(small(tokens, tmp_path_factory.mktemp("runs") / "whole"))


def rows_of(run: Path) -> list[dict]:
    """What metrics.jsonl says, once it is complete: a line for each step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return rows


def losses(run: Path) -> list[float]:
    """The losses of all steps."""
    return [row["loss"] for row in rows_of(run)[1:]]


def same_bits(run: Path, other: Path) -> bool:
    """Did two runs end with the same weights, optimiser and log?"""
    mine = kill_training.contents(run)
    theirs = kill_training.contents(other)
    last = checkpoint.steps(run)[-1].name
    names = [
        "metrics.jsonl",
        f"{last}/model.safetensors",
        f"{last}/optimizer.safetensors",
        f"{last}/state.json",
    ]
    return all(mine[name] == theirs[name] for name in names)


# ---- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, expected",
    [
        (0, 0.25),  # of the peak: the first of four warm-up steps
        (3, 1.0),
        (4, 1.0),  # the cosine begins
        (9, 0.55 + 0.45 * math.cos(math.pi / 4)),
        (14, 0.55),  # half-way
        (23, 0.55 + 0.45 * math.cos(math.pi * 19 / 20)),
        (24, 0.1),  # where it ends
    ],
)
def test_learning_rate_in_closed_form(step, expected):
    settings = train.Settings(learning_rate=3e-4, warmup_iters=4, max_iters=24)
    assert train.learning_rate(step, settings) == pytest.approx(3e-4 * expected, rel=1e-12)


def test_the_loop_against_a_plain_one(tokens, whole):
    """Twelve steps of AdamW, warm-up, cosine, clipping and decay, written out from the settings."""
    text = data.TokenData(tokens)
    model = init.newborn("backcopy", 42)
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
    # Two micro-batches sum in another order: float32 rounding, grown through twelve steps of AdamW.
    for row, numbers in zip(rows_of(whole)[1:], expected, strict=True):
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-4)
    inputs, targets = text.held_out(4, 16)
    with torch.no_grad():
        held_out = F.cross_entropy(model.eval()(inputs).flatten(0, 1), targets.flatten()).item()
    assert rows_of(whole)[-1]["val_loss"] == pytest.approx(held_out, rel=1e-4)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_gradient_accumulation_is_one_batch(tokens, whole, tmp_path, micro_batch_size):
    other = train.train(small(tokens, tmp_path / "a", micro_batch_size=micro_batch_size))
    assert losses(other) == pytest.approx(losses(whole), rel=1e-4)  # rounding, as above


class Recorder(data.TokenData):
    """A data set that notes which sequences are asked for."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.asked = []

    def batch(self, data_seed: int, sequences, T: int) -> tuple:
        """The batch; its numbers are noted."""
        self.asked += list(sequences)
        return super().batch(data_seed, sequences, T)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_is_a_function_of_its_number(tokens, monkeypatch, ranks):
    """Step 3 reads sequences 15 to 19; the ranks' losses add up, and the mean of their gradients is one's."""
    settings = small(tokens, Path("nowhere"), global_batch_size=5)
    monkeypatch.setattr(runtime, "world_size", lambda: ranks)
    text = Recorder(tokens)
    losses, gradients = [], []
    for rank in range(ranks):
        model = init.newborn("backcopy", 42)
        monkeypatch.setattr(runtime, "rank", lambda rank=rank: rank)
        losses.append(train.accumulate(model, text, settings, 3, torch.device("cpu"), torch.float32))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert text.asked == [15, 16, 17, 18, 19]
    model = init.newborn("backcopy", 42)
    inputs, targets = text.batch(0, range(15, 20), 16)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert sum(losses).item() == pytest.approx(loss.item(), rel=1e-6)
    mean = torch.stack(gradients).mean(0)  # which DistributedDataParallel takes
    torch.testing.assert_close(mean, gradient, atol=1e-7, rtol=1e-4)


QUICK_AND_MORTAL = """
import os
import runpy
import signal

from lib import runs, runtime

runtime.matmul_peak = lambda device, dtype: 1e11  # only MFU needs it
append_row = runs.append_row


def append_row_and_die(run, row):
    append_row(run, row)
    if row["step"] == 13:
        os.kill(os.getpid(), signal.SIGKILL)


runs.append_row = append_row_and_die
runpy.run_path("train.py", run_name="__main__")
"""


def test_two_processes_and_then_one_give_the_losses_of_one(tokens, tmp_path):
    """Five sequences for two ranks, of which one has two micro-batches; only one rank writes and speaks.

    Rank 0 is killed at step 13 of 20, and one process goes on from step 12. Each loss is the same to 1e-5: a
    sum of float32 gradients in another order differs by 1e-7, which AdamW's steps let grow.
    """
    script = tmp_path / "mortal.py"
    script.write_text(QUICK_AND_MORTAL)
    settings = small(tokens, tmp_path / "two", global_batch_size=5, keep="last", max_iters=20)
    done = run_script(script, *words_of(settings), ranks=2, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and "Signal 9" in done.stderr
    assert done.stdout.count("held-out loss") == 3  # at steps 0, 6 and 12
    train.train(replace(settings, resume=True))
    one = train.train(replace(settings, out=str(tmp_path / "one")))
    assert len(losses(one)) == 20 and losses(tmp_path / "two") == pytest.approx(losses(one), rel=1e-5)
    last = [rows_of(run)[-1]["val_loss"] for run in (one, tmp_path / "two")]
    assert last[0] == pytest.approx(last[1], rel=1e-5)


def test_evaluation_never_touches_the_training_order(tokens, whole, tmp_path):
    changes = {"eval_every": 3, "eval_sequences": 2, "save_every": 2, "keep": "all", "track_sinks": True}
    other = train.train(small(tokens, tmp_path / "a", **changes))
    assert losses(other) == losses(whole)
    assert len(checkpoint.steps(other)) == 7
    windows, _ = data.TokenData(tokens).held_out(2, 16)
    alpha = attention.attention_to(checkpoint.load(other), windows)[..., 0]  # (n, L, H)
    last = rows_of(other)[-1]
    assert last["mean_alpha1"] == pytest.approx(alpha.mean().item(), rel=1e-5)
    assert last["max_alpha1"] == pytest.approx(alpha.max().item(), rel=1e-5)
    assert last["sink_rate"] == pytest.approx((alpha > 0.3).float().mean().item())


def test_bfloat16_is_close_to_float32(tokens, whole, tmp_path):
    run = train.train(small(tokens, tmp_path / "a", dtype="bfloat16"))
    # Products keep 8 bits: 0.4 % each, averaged over the many that make a loss.
    assert losses(run) == pytest.approx(losses(whole), rel=5e-3)


@pytest.mark.parametrize("kind", ["amplify", "attenuate", "headnorm"])
def test_calibrations_train(tokens, tmp_path, kind):
    run = train.train(small(tokens, tmp_path / "a", attn_calibration=kind, max_iters=2))
    model = checkpoint.load(run)
    assert model.config.attn_calibration == kind
    if kind == "headnorm":
        assert (model.model.layers[0].self_attn.head_norm.weight != 1).any()


def test_a_sample_is_the_models_text(tokens, whole):
    model = checkpoint.load(whole)
    tokenizer = data.TokenData(tokens).load_tokenizer()
    text = sample(model, tokenizer, 20, 3)
    assert text == sample(model, tokenizer, 20, 3) != sample(model, tokenizer, 20, 4)
    # By brute force: from all positions' logits, by the inverse of the distribution function.
    sequence = [tokenizer.bos]
    with torch.no_grad():
        for threshold in init.keyed_generator("sample", 3).random(20):
            logits = model(torch.tensor([sequence]))[0, -1, : tokenizer.vocab_size]
            cumulative = (logits.double() / 0.8).softmax(0).cumsum(0)
            sequence.append(int((cumulative < threshold).sum()))
    assert text == tokenizer.decode(sequence[1:])


# ---- the run folder ----------------------------------------------------------------------------------------


def test_a_run_folder(whole):
    assert [path.name[-2:] for path in checkpoint.steps(whole)] == ["00", "01", "02", "04", "08", "09", "12"]
    with_state = [path.name[-2:] for path in checkpoint.steps(whole) if (path / "state.json").exists()]
    assert with_state == ["09", "12"]
    assert (whole / "loss.png").stat().st_size > 5000
    assert json.loads((whole / "settings.json").read_text())["max_iters"] == 12
    birth = checkpoint.load(checkpoint.steps(whole)[0])
    newborn = init.newborn("backcopy", 42)
    assert all(torch.equal(a, b) for a, b in zip(birth.parameters(), newborn.parameters(), strict=True))
    rows = rows_of(whole)
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 6, 12]
    assert rows[1].keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_second", "mfu"}
    # The peak is 1e11 FLOP/s here; PaLM's count of a token's: 6 a weight that multiplies, and attention's.
    weights = sum(p.numel() for name, p in newborn.named_parameters() if p.ndim == 2 and "embed" not in name)
    per_token = 6 * weights + 12 * 2 * 128 * 16
    assert rows[1]["mfu"] == pytest.approx(rows[1]["tokens_per_second"] * per_token / 1e11, rel=0.01)


def test_transformers_opens_a_step(whole):
    """Its logits are those of the model that was trained."""
    step = checkpoint.steps(whole)[-1]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(step, attn_implementation="eager").eval()
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, checkpoint.load(step)(tokens), atol=1e-5, rtol=1e-4)


def test_a_presets_vocabulary_is_the_tokenizers(tmp_path, capsys):
    """As many tokens as bpe:400 has; said in the log; the tokenizer is saved beside the weights."""
    text = tmp_path / "many.jsonl"
    lines = [" ".join(f"{i * j % 9973:x}" for j in range(1, 60)) for i in range(200)]
    text.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    out = str(tmp_path / "tokens")
    folder = data.prepare(data.Settings(source=(str(text),), tokenizer="bpe:400", held_out=0.2, out=out))
    done = run_here("train.py", *words_of(small(folder, tmp_path / "run", max_iters=1)))
    assert done.returncode == 0, done.stderr
    assert "vocabulary of 400 tokens, the tokenizer's, in place of 257" in done.stdout
    step = checkpoint.steps(tmp_path / "run")[-1]
    assert checkpoint.load(step).model.embed_tokens.weight.shape == (400, 128)
    assert (step / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    assert rows_of(tmp_path / "run")[0]["val_loss"] == pytest.approx(math.log(400), abs=0.1)  # a newborn's
    with pytest.raises(UserError, match=r"400 tokens, the model 257: change --tokenizer"):
        train.train(small(folder, tmp_path / "new", init_from="backcopy@1"))


def test_the_default_data_set_is_prepared_on_first_use(tmp_path, monkeypatch, capsys):
    """From an empty folder, with a small stand-in for the standard library; not prepared twice."""
    monkeypatch.chdir(tmp_path)
    Path("module.txt").write_text(Path(random.__file__).read_text("utf-8") * 4)
    settings = small(None, tmp_path / "a", data=None, source=("module.txt",), tokenizer="bytes", max_iters=1)
    train.train(settings)
    assert "preparing data/" in capsys.readouterr().out
    train.train(replace(settings, out="b"))
    assert "preparing" not in capsys.readouterr().out
    Path("data/x_module.txt-bytes").symlink_to("module.txt-bytes")
    with pytest.raises(UserError, match="--data"):  # x/module.txt has another data set of that name
        train.train(replace(settings, source=("x/module.txt",), out="c"))
    assert same_bits(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_configs(config):
    settings = read_config_file(str(config), train.Settings())
    assert settings.sequence_length <= PRESETS[settings.model].context_length
    assert settings.global_batch_size % settings.micro_batch_size == 0
    first = config.read_text().splitlines()[0]
    assert first.startswith("# ") and settings.out == f"runs/{config.stem}"


# ---- killed, told to stop, resumed -------------------------------------------------------------------------


@pytest.mark.parametrize("words, count", [((3,), 6), (("full", 1), 1)])
def test_killed_or_without_room_and_resumed(words, count):
    """The short version of tests/kill_training.py: the run that is resumed ends with the same bits."""
    done = run_script("tests/kill_training.py", *words)
    assert done.returncode == 0 and done.stdout.count("same bits") == count, done.stdout + done.stderr


@pytest.fixture
def told_to_stop(monkeypatch):
    """A function that lets a signal come while the given step is computed."""
    accumulate = train.accumulate

    def arrange(number: int, at_step: int) -> None:
        def interrupted(model, tokens, settings, step, device, dtype):
            if step + 1 == at_step:
                os.kill(os.getpid(), number)
            return accumulate(model, tokens, settings, step, device, dtype)

        monkeypatch.setattr(train, "accumulate", interrupted)

    yield arrange
    monkeypatch.undo()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tokens, whole, tmp_path, told_to_stop, number):
    """Then --resume, and nothing but the folder, goes on to the same bits."""
    told_to_stop(number, at_step=5)
    before = signal.getsignal(number)
    done = run_here("train.py", *words_of(small(tokens, tmp_path / "a")))
    assert done.returncode == 0 and "at step 5; --resume goes on" in done.stdout, done.stderr
    assert signal.getsignal(number) is before
    assert len(losses(tmp_path / "a")) == 5
    assert checkpoint.read_state(checkpoint.steps(tmp_path / "a")[-1])[0].step == 5
    done = run_here("train.py", "--resume", "--out", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "a")) == 12 and same_bits(tmp_path / "a", whole)


@pytest.fixture(scope="module")
def stopped(tokens, tmp_path_factory):
    """A run of four steps, that may go on."""
    return train.train(small(tokens, tmp_path_factory.mktemp("runs") / "stopped", max_iters=4))


@pytest.fixture
def copied(stopped, tmp_path):
    """A copy of it, under another name."""
    return shutil.copytree(stopped, tmp_path / "copied")


def test_some_settings_may_change(copied):
    """Those of the command line win over the run's; what is not given is the run's."""
    words = ["--max-iters", 6, "--micro-batch-size", 4, "--log-every", 1, "--eval-every", 5, "--track-sinks"]
    done = run_here("train.py", "--resume", "--out", copied, *words)
    assert done.returncode == 0, done.stderr
    assert "step 5/6" in done.stdout and "step 5: held-out" in done.stdout
    stored = json.loads((copied / "settings.json").read_text())
    changed = {"max_iters": 6, "micro_batch_size": 4, "log_every": 1, "eval_every": 5}
    assert stored.items() >= {**SMALL, **changed, "track_sinks": True, "save_every": 3}.items()
    assert len(losses(copied)) == 6 and "sink_rate" in rows_of(copied)[-1]


@pytest.mark.parametrize(
    "flag, given, begun_with",
    [
        ("--learning-rate", 1e-3, 2e-3),  # train.py's own default, but not this run's
        ("--seed", 43, 42),
        ("--model", "tiny_llama", "backcopy"),
        ("--keep", "last", "powers"),  # it would remove what was to be kept
        ("--source", "docstrings", "python"),
        ("--init-from", "backcopy@1", None),
    ],
)
def test_other_settings_may_not_change(stopped, flag, given, begun_with):
    before = kill_training.contents(stopped)
    assert_refused(run_here("train.py", "--resume", "--out", stopped, flag, given), flag, str(begun_with))
    assert kill_training.contents(stopped) == before


def test_fewer_steps_than_are_done(stopped):
    before = (stopped / "settings.json").read_bytes()
    done = run_here("train.py", "--resume", "--out", stopped, "--max-iters", 1)
    assert_refused(done, "--max-iters 1", "is at step")
    assert (stopped / "settings.json").read_bytes() == before


def test_a_config_file_and_resume(copied, tmp_path):
    """The file's values count as given: equal ones are fine, others are refused, some may change."""
    config = tmp_path / "config.py"
    config.write_text(f"out = {str(copied)!r}\nmodel = 'backcopy'\nlearning_rate = 2e-3\nmax_iters = 5\n")
    assert_refused(run_here("train.py", config), "--resume")
    done = run_here("train.py", config, "--resume")
    assert done.returncode == 0, done.stderr
    assert len(losses(copied)) == 5
    config.write_text(config.read_text() + "weight_decay = 0.2\nresume = True\n")
    assert_refused(run_here("train.py", config), "--weight-decay 0.1")


@pytest.mark.parametrize(
    "text",
    [b"", b'{"max_iters": ', b"[1, 2]", b'{"max_iters": "many"}', b'{"max_iter": 3}', b"\xff\xfe", None],
)
def test_damaged_settings_are_refused(copied, text):
    if text is None:
        (copied / "settings.json").unlink()
    else:
        (copied / "settings.json").write_bytes(text)
    assert_refused(run_here("train.py", "--resume", "--out", copied), str(copied / "settings.json"))
    assert len(losses(copied)) == 4


def test_a_damaged_newest_checkpoint_is_passed_over(copied, stopped, capsys):
    """The one before it serves, with other settings of the log too; if none is whole, nothing is done."""
    newest = checkpoint.steps(copied)[-1]
    for name in ("state.json", "optimizer.safetensors", "model.safetensors", "config.json"):
        raw = bytearray((newest / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (newest / name).write_bytes(raw)
        done = run_here("train.py", "--resume", "--out", copied)
        assert done.returncode == 0 and f"skipping {newest}" in done.stdout, done.stderr
        assert same_bits(copied, stopped)
    for step in checkpoint.steps(copied):
        (step / "state.json").write_text("{")
    assert_refused(run_here("train.py", "--resume", "--out", copied), "can be resumed", str(newest))


def test_a_stray_newest_step_is_passed_over(copied):
    """It does not count as one of the newest two."""
    (copied / "step_0000009").mkdir()
    done = run_here("train.py", "--resume", "--out", copied, "--max-iters", 5)
    assert done.returncode == 0 and "is at step 5" in done.stdout, done.stderr
    with_state = [path.name[-1] for path in checkpoint.steps(copied) if (path / "state.json").exists()]
    assert with_state == ["4", "5"]


def test_a_checkpoint_is_no_run(copied):
    words = ["--resume", "--out", checkpoint.steps(copied)[0], "--max-iters", 5]
    assert_refused(run_here("train.py", *words), "no run in")


def test_a_run_survives_a_damaged_birth_and_log(copied, stopped):
    """Neither is needed to go on: the newest checkpoint knows the shape, what is torn comes again."""
    (copied / "step_0000000" / "config.json").write_text("{")
    with (copied / "metrics.jsonl").open("ab") as log:
        log.write(b'{"step": \xff\xfe')
    done = run_here("train.py", "--resume", "--out", copied, "--max-iters", 5)
    assert done.returncode == 0, done.stderr
    assert losses(copied)[:4] == losses(stopped) and len(losses(copied)) == 5


def test_another_data_set_is_refused(tokens, tmp_path):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    settings = small(folder, tmp_path / "a", max_iters=1)
    train.train(settings)
    meta = json.loads((folder / "meta.json").read_text())
    meta["fingerprint"] = meta["fingerprint"][::-1]
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="another data set"):
        train.train(replace(settings, resume=True, max_iters=2))


def test_one_process_group_a_run(stopped):
    """While another process holds the folder; it is as it was."""
    code = "import sys; from pathlib import Path; from lib.runs import sole_owner\n"
    code += "with sole_owner(Path(sys.argv[1])):\n    input(print('held', flush=True))"
    before = kill_training.contents(stopped)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(stopped)], cwd=ROOT, **pipes) as owner:
        assert owner.stdout.readline() == "held\n"
        refused = run_here("train.py", "--resume", "--out", stopped, "--max-iters", 9)
        owner.communicate("\n")
    assert_refused(refused, f"another process trains in {stopped}")
    assert kill_training.contents(stopped) == before


def test_continual_training_from_a_checkpoint(tokens, whole, tmp_path):
    """It begins with its parent's weights, and goes on without its parent."""
    parent = shutil.copytree(whole, tmp_path / "parent")
    settings = small(tokens, tmp_path / "a", init_from=str(parent), max_iters=1, data_seed=5)
    run = train.train(settings)
    birth = checkpoint.load(checkpoint.steps(run)[0])
    weights = checkpoint.load(whole)
    assert all(torch.equal(a, b) for a, b in zip(birth.parameters(), weights.parameters(), strict=True))
    shutil.rmtree(parent)
    train.train(replace(settings, resume=True, max_iters=2))
    assert len(losses(run)) == 2


# ---- what ends a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("eval_every", [100, 1])  # found by a loss, by an evaluation
def test_divergence_names_the_last_good_checkpoint(tokens, tmp_path, eval_every):
    changes = {"learning_rate": 1e18, "warmup_iters": 0, "eval_every": eval_every, "save_every": 1}
    run = tmp_path / "a"
    with pytest.raises(UserError, match="and a lower --learning-rate") as error:
        train.train(small(tokens, run, **changes))
    named = str(error.value).split("--init-from ")[1].split()[0]
    assert named == str(checkpoint.steps(run)[-1])
    inputs, targets = data.TokenData(tokens).batch(0, range(4), 16)
    with torch.no_grad():
        loss = F.cross_entropy(checkpoint.load(named)(inputs).flatten(0, 1), targets.flatten())
    assert loss.isfinite()
    assert all(math.isfinite(loss) for loss in losses(run))


def test_a_bad_checkpoint_is_set_aside(tmp_path):
    """Also where an earlier attempt diverged at the same step; a birth that is bad has no better one."""
    for name in ("step_0000000", "step_0000004", "diverged_0000004"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    assert "--init-from" in str(runs.diverged(tmp_path, 4, "loss nan"))
    assert (tmp_path / "diverged_0000004" / "config.json").read_text() == "step_0000004"
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step_0000000"]
    assert "try other weights" in str(runs.diverged(tmp_path, 0, "loss nan"))


def test_full_disk(tokens, tmp_path):
    """Room for a checkpoint's weights, but not for the optimiser's state: one line, no half a checkpoint."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, hard))  # weights 2.4 MB, AdamW's state twice that
    try:
        done = run_here("train.py", *words_of(small(tokens, tmp_path / "a", max_iters=1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_refused(done, "cannot write", "step_0000001", "File too large")
    assert [path.name for path in checkpoint.steps(tmp_path / "a")] == ["step_0000000"]
    assert not list((tmp_path / "a").glob(".step*"))
    assert run_here("train.py", "--resume", "--out", tmp_path / "a").returncode == 0
    assert len(losses(tmp_path / "a")) == 1


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--model", "tiny_lama"], ["tiny_llama"]),
        (["--sequence-length", "129"], ["--sequence-length 129", "context"]),
        (["--max-iters", "0"], ["max_iters", ">= 1"]),
        (["--data", "none"], ["no data set in none", "python -m lib.data"]),
        (["--init-from", "none"], ["no model 'none'"]),
        (["--init-from", "backcopy@1", "--attn-calibration", "headnorm"], ["has the calibration none"]),
        (["--out", "train.py/x"], ["--out", "train.py/x"]),
        (["--global-batchsize", "3"], ["--global-batch-size"]),
    ],
)
def test_refusals(tokens, tmp_path, words, expected):
    assert_refused(run_here("train.py", *words_of(small(tokens, tmp_path / "new")), *words), *expected)
    assert not checkpoint.steps(tmp_path / "new")


def test_a_run_is_not_overwritten(tokens, stopped):
    assert_refused(run_here("train.py", *words_of(small(tokens, stopped))), "holds a run", "--resume")


def test_resuming_where_there_is_no_run(tmp_path):
    assert_refused(run_here("train.py", "--resume", "--out", tmp_path / "typo"), "no run in", "typo")
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.txt", "tokenizer.json"])
def test_another_tokenizer_is_refused(tokens, tmp_path, name):
    """A checkpoint's own tokenizer must have made the data set, whoever wrote it down."""
    checkpoint.save(tmp_path / "own", init.newborn("backcopy", 1))
    (tmp_path / "own" / name).write_text("of its own")
    with pytest.raises(UserError, match=f"another tokenizer .*own/{name}"):
        train.train(small(tokens, tmp_path / "new", init_from=str(tmp_path / "own")))
