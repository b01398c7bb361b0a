"""train.py: the same run however it is cut, spread or interrupted; and what it says when it cannot go on."""

import json
import math
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_refused, run_here, run_script
from kill_training import FLAGS, command, killed, outcome, prepare, same

import checkpoint
import common
import data
import init
import train
from common import UserError

pytestmark = pytest.mark.usefixtures("quick_training")
sample = train.generate


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A small prepared data set."""
    return prepare(tmp_path_factory.mktemp("data"))


def settings(tokens: Path, out: Path, words: str = "", **more) -> train.Settings:
    """The small run's settings, in float32."""
    s = common.parse_settings(train.Settings, "", f"{FLAGS} --dtype float32 {words}".split())
    return replace(s, data=str(tokens), out=str(out), **more)


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """An undisturbed run."""
    return train.train(settings(tokens, tmp_path_factory.mktemp("runs") / "whole"))


def losses(run: Path) -> list[float]:
    """The losses of all steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows[1:]]


def test_the_loop_against_a_plain_one(tokens, whole):
    """Twelve steps of AdamW, warm-up, cosine, clipping and decay, written out from the settings."""
    s, text = settings(tokens, whole), data.TokenData(tokens)
    model = init.newborn("tiny_llama", 42)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    expected = []
    for step in range(12):
        inputs, targets = text.batch(0, range(4 * step, 4 * step + 4), 16)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = (
            1e-3 * (step + 1) / 2 if step < 2 else 1e-3 * (0.55 + 0.45 * math.cos(math.pi * (step - 2) / 10))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        assert train.learning_rate(step, s) == pytest.approx(rate)
        optimizer.step()
        expected.append(loss.item())
    # Two micro-batches sum in another order: float32 rounding, grown through twelve steps of AdamW.
    assert losses(whole) == pytest.approx(expected, rel=1e-4)
    windows = text.held_out(4, 16)
    with torch.no_grad():
        held_out = F.cross_entropy(model.eval()(windows[0]).flatten(0, 1), windows[1].flatten()).item()
    last = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_loss"] == pytest.approx(held_out, rel=1e-4)


def test_a_run_folder(whole):
    assert [path.name[-2:] for path in checkpoint.steps(whole)] == ["00", "01", "02", "04", "08", "09", "12"]
    with_state = [path.name[-2:] for path in checkpoint.steps(whole) if (path / "state.pt").exists()]
    assert with_state == ["09", "12"]
    assert (whole / "loss.png").stat().st_size > 5000
    assert json.loads((whole / "settings.json").read_text())["max_iters"] == 12
    birth = checkpoint.load(str(checkpoint.steps(whole)[0]))
    newborn = init.newborn("tiny_llama", 42)
    assert all(torch.equal(a, b) for a, b in zip(birth.parameters(), newborn.parameters()))
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 6, 12]
    assert {"loss", "lr", "grad_norm", "tokens_per_second", "mfu"} <= rows[1].keys()


def test_evaluation_never_touches_the_training_order(tokens, whole, tmp_path):
    other = train.train(
        settings(tokens, tmp_path / "a", eval_every=3, eval_sequences=2, save_every=2, keep="all")
    )
    assert losses(other) == losses(whole)
    assert len(checkpoint.steps(other)) == 7


@pytest.mark.parametrize("size", [1, 3])
def test_gradient_accumulation(tokens, whole, tmp_path, size):
    other = train.train(settings(tokens, tmp_path / "a", micro_batch_size=size))
    assert losses(other) == pytest.approx(losses(whole), rel=1e-4)  # rounding, as above


def test_two_ranks_give_the_losses_of_one(tokens, tmp_path):
    one = settings(tokens, tmp_path / "1", "--global-batch-size 5 --save-every 20 --keep last")
    flags = "--dtype float32 --global-batch-size 5 --save-every 20 --keep last --data".split()
    done = run_script("train.py", *FLAGS.split(), *flags, tokens, "--out", tmp_path / "2", ranks=2)
    assert done.returncode == 0, done.stderr
    expected = losses(train.train(one))
    assert len(expected) == 12 and losses(tmp_path / "2") == pytest.approx(expected, rel=1e-4)  # as above


def test_resuming_needs_the_same_settings_and_data(tokens, whole, tmp_path):
    s = settings(tokens, tmp_path / "a", max_iters=4)
    train.train(s)
    with pytest.raises(UserError, match="--resume"):
        train.train(s)
    with pytest.raises(UserError, match="--learning-rate 0.001"):
        train.train(replace(s, resume=True, learning_rate=2e-3))
    train.train(replace(s, resume=True, max_iters=6))  # longer is allowed
    assert len(losses(tmp_path / "a")) == 6
    for name in ("tokens", "other"):
        (tmp_path / name).mkdir()
        for file in tokens.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    meta = json.loads((tmp_path / "other" / "meta.json").read_text())
    meta["shards"] = meta["shards"][:1] + meta["shards"]  # the same first shard twice: other batches
    (tmp_path / "other" / "meta.json").write_text(json.dumps(meta))
    train.train(settings(tmp_path / "tokens", tmp_path / "b", max_iters=1))
    (tmp_path / "tokens").rename(tmp_path / "gone")
    (tmp_path / "other").rename(tmp_path / "tokens")
    with pytest.raises(UserError, match="another one"):
        train.train(settings(tmp_path / "tokens", tmp_path / "b", resume=True))
    for path in checkpoint.steps(tmp_path / "a"):
        (path / "state.pt").unlink(missing_ok=True)
    with pytest.raises(UserError, match="can be resumed"):
        train.train(replace(s, resume=True))


def test_a_corrupt_newest_checkpoint_is_passed_over(tokens, whole, tmp_path, capsys):
    s = settings(tokens, tmp_path / "a")
    newest = checkpoint.steps(train.train(s))[-1]
    for name in ("state.pt", "model.safetensors"):
        raw = bytearray((newest / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (newest / name).write_bytes(raw)
        capsys.readouterr()
        train.train(replace(s, resume=True))
        assert f"skipping {newest}" in capsys.readouterr().out
        assert same(outcome(tmp_path / "a"), outcome(whole))


def test_killed_and_resumed(tokens, tmp_path):
    """The short version of tests/kill_training.py."""
    begun = time.perf_counter()
    subprocess.run(command(tokens, tmp_path / "whole"), check=True, stdout=subprocess.DEVNULL)
    took = time.perf_counter() - begun
    kills, found = killed(tokens, tmp_path / "killed", random.Random(5), took, most=1)
    assert (
        kills >= 1  # beside other work the first process may end before its turn comes
        and len(checkpoint.steps(tmp_path / "killed")) > 3
        and same(found, outcome(tmp_path / "whole"))
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tokens, whole, tmp_path, number):
    run = tmp_path / "a"
    process = subprocess.Popen(
        command(tokens, run, "--dtype", "float32", "--max-iters", "100000"), stdout=subprocess.PIPE, text=True
    )
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "--resume" in out
    saved = checkpoint.load_state(checkpoint.steps(run)[-1])["step"]
    assert 2 <= saved == len(losses(run))
    train.train(settings(tokens, run, max_iters=saved + 2, resume=True))
    assert len(losses(run)) == saved + 2


def test_nan_stops_and_the_last_good_checkpoint_is_kept(tokens, tmp_path, capsys):
    """The checkpoint that the message names has a finite loss; the bad one is set aside."""
    poisoned = init.newborn("tiny_llama", 1)
    with torch.no_grad():
        poisoned.model.layers[3].mlp.up_proj.weight[0, 0] = math.nan
    checkpoint.save(tmp_path / "poisoned", poisoned)
    flags = ["--init-from", tmp_path / "poisoned", "--data", tokens, "--out", tmp_path / "run"]
    assert_refused(run_here("train.py", *FLAGS.split(), *flags), "up_proj", "NaN")
    for rate, every in ((1e18, 100), (10.0, 1)):  # found by the loss, or by an evaluation
        out = tmp_path / f"rate{rate}"
        with pytest.raises(UserError, match="lower --learning-rate") as error:
            train.train(
                settings(tokens, out, "--save-every 1", learning_rate=rate, warmup_iters=0, eval_every=every)
            )
        named = str(error.value).split("--init-from ")[1].split()[0]
        assert named == str(checkpoint.steps(out)[-1])
        inputs, targets = data.TokenData(tokens).batch(0, range(4), 16)
        with torch.no_grad():
            assert F.cross_entropy(checkpoint.load(named)(inputs).flatten(0, 1), targets.flatten()).isfinite()
        losses(out)  # every line is whole


def test_continual_training_from_a_checkpoint(tokens, whole, tmp_path):
    s = settings(tokens, tmp_path / "a", init_from=str(whole), max_iters=1, data_seed=5)
    run = train.train(s)
    with pytest.MonkeyPatch.context() as patch:  # its parent is not needed to go on
        patch.setattr(checkpoint, "find", lambda spec: Path(spec) if "whole" not in spec else 1 / 0)
        train.train(replace(s, resume=True, max_iters=2))
    birth, parent = checkpoint.load(str(checkpoint.steps(run)[0])), checkpoint.load(str(whole))
    assert all(torch.equal(a, b) for a, b in zip(birth.parameters(), parent.parameters()))


@pytest.mark.parametrize("kind", ["amplify", "attenuate", "headnorm"])
def test_calibrations_train(tokens, tmp_path, kind):
    run = train.train(settings(tokens, tmp_path / "a", attn_calibration=kind, max_iters=2))
    model = checkpoint.load(str(run))
    assert model.config.attn_calibration == kind
    if kind == "headnorm":
        assert (model.model.layers[0].self_attn.head_norm.weight != 1).any()


def test_bfloat16_is_close_to_float32(tokens, whole, tmp_path):
    run = train.train(settings(tokens, tmp_path / "a", dtype="bfloat16"))
    # Products keep 8 bits: 0.4 % each, averaged over the many that make a loss.
    assert losses(run) == pytest.approx(losses(whole), rel=5e-3)


def test_a_sample_is_the_models_text(tokens, whole):
    model, tokenizer = checkpoint.load(str(whole)), data.TokenData(tokens).load_tokenizer()
    text = sample(model, tokenizer, 20, 3)
    assert text == sample(model, tokenizer, 20, 3) != sample(model, tokenizer, 20, 4)
    # By brute force: without `last_only`, from all logits.
    sequence = [tokenizer.bos]
    with torch.no_grad():
        for u in init.keyed_generator("sample", 3).random(20):
            p = (
                (model(torch.tensor([sequence]))[0, -1, : tokenizer.vocab_size].double() / 0.8)
                .softmax(0)
                .numpy()
            )
            sequence.append(int(np.searchsorted(p.cumsum(), u)))
    assert text == tokenizer.decode(sequence[1:])


def test_bad_inputs(tokens, whole, tmp_path):
    for words, *expected in (
        (["--model", "tiny_lama"], "tiny_llama"),
        (["--sequence-length", "257"], "context is 256"),
        (["--sequence-length", "0"], "--sequence-length 0"),
        (["--max-iters", "0"], "--max-iters 0"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--data", tmp_path / "none"], "no data set", "data.py"),
        (["--init-from", tmp_path / "none"], "no model"),
        (["--init-from", whole, "--attn-calibration", "headnorm"], "calibration none"),
        (["--out", whole], "--resume"),
        (["--global-batchsize", "3"], "did you mean --global-batch-size"),
    ):
        with pytest.raises(UserError) as error:
            words = ["--data", tokens, "--out", tmp_path / "new", *words]
            train.train(common.parse_settings(train.Settings, "", [*FLAGS.split(), *map(str, words)]))
        for word in expected:
            assert word in str(error.value)
        assert "\n" not in str(error.value)
    big = data.prepare(
        data.Settings(
            source=(str(tokens.parent / "text.txt"),),
            tokenizer="bpe:600",
            held_out=0.2,
            out=str(tmp_path / "b"),
        )
    )
    (tmp_path / "tokenizer.model").write_text("of its own")
    own = dict(state=None, tokenizer=tmp_path / "tokenizer.model")
    checkpoint.save(tmp_path / "own", init.newborn("tiny_llama", 1), **own)
    for name in ("tokenizer.model", "tokenizer.txt", "tokenizer.json"):
        with pytest.raises(UserError, match=f"another tokenizer .*own/{name}"):
            train.train(settings(tokens, tmp_path / "new", init_from=str(tmp_path / "own")))
        checkpoint.save(tmp_path / "own", init.newborn("tiny_llama", 1), tokenizer="tiktoken:gpt2")
        if name == "tokenizer.txt":  # a folder of Hugging Face's, whose tokens no data set here has
            (tmp_path / "own" / "tokenizer.txt").rename(tmp_path / "own" / "tokenizer.json")
    checkpoint.save(tmp_path / "small", init.newborn(replace(train.PRESETS["tiny_llama"], vocab_size=300), 1))
    with pytest.raises(UserError, match="600 tokens, the model 300"):
        train.train(settings(big, tmp_path / "new", init_from=str(tmp_path / "small")))


def test_full_disk_and_read_only_output(tokens, tmp_path):
    """Room for a checkpoint's weights, but not for the optimiser's state: one line, no half a checkpoint."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**25, 2**25))  # weights 28 MB, AdamW's state 55

    result = subprocess.run(
        command(tokens, tmp_path / "a"), cwd=ROOT, capture_output=True, text=True, preexec_fn=limit
    )
    assert_refused(result, "cannot write", "step_0000001")
    assert [path.name for path in checkpoint.steps(tmp_path / "a")] == ["step_0000000"]
    assert not list((tmp_path / "a").glob(".step*"))
    train.train(settings(tokens, tmp_path / "a", "--dtype auto", max_iters=1, resume=True))
    (tmp_path / "file").write_text("")
    assert_refused(run_here("train.py", *command(tokens, tmp_path / "file" / "x")[2:]), "--out")


def test_one_process_group_a_run(tokens, whole, tmp_path):
    with common.alone(whole), pytest.raises(UserError, match="another process trains"):
        train.train(settings(tokens, whole, resume=True))
    assert len(losses(whole)) == 12  # and as it was


def test_a_run_survives_a_damaged_birth_and_log(tokens, whole, tmp_path):
    """Neither is needed to go on: the newest whole checkpoint knows the shape, what is torn comes again."""
    s = settings(tokens, tmp_path / "a", init_from=str(whole), max_iters=3)
    birth = checkpoint.steps(train.train(s))[0]
    (birth / "config.json").write_text("{")
    with (tmp_path / "a" / "metrics.jsonl").open("ab") as log:
        log.write(b'{"step": \xff\xfe')
    train.train(replace(s, resume=True, max_iters=4))
    assert len(losses(tmp_path / "a")) == 4
    with pytest.raises(UserError, match="--keep powers"):  # it would remove what was to be kept
        train.train(replace(s, resume=True, keep="last"))


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_configs_parse(config):
    s = common.parse_settings(train.Settings, "", [str(config)])
    train.check(replace(s, out="/nonexistent"))
    assert s.sequence_length <= train.PRESETS[s.model].context_length
    assert s.global_batch_size % s.micro_batch_size == 0
    first = config.read_text().splitlines()[0]
    assert first.startswith("# ") and s.out == f"runs/{config.stem}"


def test_the_default_data_set_is_prepared_on_first_use(tmp_path, monkeypatch):
    """From an empty folder, with a small stand-in for the standard library."""
    text = tmp_path / "module.txt"
    text.write_text(Path(random.__file__).read_text("utf-8") * 20)
    monkeypatch.chdir(tmp_path)
    s = replace(
        settings(None, tmp_path / "run"), data=None, source=(str(text),), tokenizer="bytes", max_iters=1
    )
    with pytest.raises(UserError, match="--held-out"):  # few documents, and one in a hundred is held out
        train.train(replace(s, source=(str(tmp_path / "module.txt"),)))
    lines = "".join(json.dumps({"text": f"# {i}\n" * 20}) + "\n" for i in range(500))
    (tmp_path / "many.jsonl").write_text(lines)
    train.train(replace(s, source=(str(tmp_path / "many.jsonl"),)))
    assert list(tmp_path.glob("data/*/meta.json"))


def test_imports_nothing_at_import():
    """Importing train.py starts nothing and needs no optional package."""
    code = (
        "import sys, train; print([m for m in ('datasets', 'tiktoken', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_second_divergence_at_the_same_step(tmp_path):
    for name in ("step_0000000", "step_0000004", "diverged_0000004"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    assert "step_0000000" in str(train.diverged(tmp_path, 4, "loss nan"))
    assert (tmp_path / "diverged_0000004" / "config.json").read_text() == "step_0000004"
    assert not (tmp_path / "step_0000004").exists()
