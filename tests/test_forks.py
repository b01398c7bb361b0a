"""What people who fork it meet in their first hour: parameters, places, exports, numbers, messages."""

import gzip
import io
import json
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import kill_training
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
import transformers
from conftest import KINDS, ROOT, TEXTS, assert_refused, run_here, save_byte_tokenizer
from test_gguf_tokenizers import load_converted, write
from torch import nn

import init
import model
import train
from lib import results
from lib.files import read_json
from lib.settings import UserError
from sources import checkpoint, data, sampling, saving
from sources.checkpoint import load_tokenizer

pytestmark = pytest.mark.usefixtures("quick_training")
SMALL = kill_training.SMALL | {"max_iters": 4, "save_every": 2, "eval_every": 2}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return kill_training.prepare(tmp_path_factory.mktemp("data"))


def trained(tokens, out, **changes) -> Path:
    return train.train(train.Settings(**{**SMALL, "data": str(tokens), "out": str(out), **changes}))


class DyT(nn.Module):
    """tanh(alpha x) weight, and parameters of every other kind (Zhu et al. 2025)."""

    def __init__(self, width, eps):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.ones(width))
        self.layer_scale = nn.Parameter(torch.full((width,), 1e-4))
        self.frozen = nn.Parameter(torch.full((width, 2), 3.0), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(width))
        self.drawn_here = nn.Parameter(torch.empty(width, device="meta"))

    def forward(self, x):
        return torch.tanh(self.alpha * x) * self.weight + self.layer_scale * x + 0 * self.drawn_here


@pytest.fixture
def dyt(monkeypatch):
    monkeypatch.setitem(model.NORMS, "rmsnorm", DyT)


def test_constants_stay_as_their_constructors_write_them(dyt):
    born = init.newborn("backcopy", 5)
    norm = born.model.layers[0].input_layernorm
    assert (norm.alpha.item(), norm.alpha.ndim, norm.frozen.requires_grad) == (0.5, 0, False)
    assert (norm.weight == 1).all() and (norm.layer_scale == 1e-4).all() and (norm.frozen == 3).all()
    assert 0.01 < norm.drawn_here.std() < 0.03 and norm.drawn_here.isfinite().all()
    lazy = checkpoint.find_model("backcopy@5").weights
    for name, parameter in born.named_parameters():
        assert torch.equal(lazy.read(name), parameter), name


def test_matrices_and_biases_are_drawn_by_kind():
    class Gate(nn.Module):
        def __init__(self, width, eps):
            super().__init__()
            self.norm_gate = nn.Linear(width, width)  # a name with "norm" in it was 1 everywhere

        def forward(self, x):
            return x * self.norm_gate(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model.NORMS, "rmsnorm", Gate)
        gate = init.newborn("backcopy", 5).model.layers[0].input_layernorm.norm_gate
    assert gate.weight.std().item() == pytest.approx(0.02, rel=0.05) and (gate.bias == 0).all()


def test_a_constructor_that_draws_is_refused(monkeypatch):
    class Drawn(DyT):
        def __init__(self, width, eps):
            super().__init__(width, eps)
            self.alpha = nn.Parameter(torch.rand(()))

    monkeypatch.setitem(model.NORMS, "rmsnorm", Drawn)
    with pytest.raises(UserError, match="a constructor in model.py draws numbers"):
        init.newborn("backcopy", 5)


def test_frozen_unused_and_scalar_parameters_train_save_and_resume(dyt, tokens, tmp_path):
    """The optimizer decays matrices, trains all else that wants it, and resumed ends with the same bits."""
    whole = trained(tokens, tmp_path / "whole")  # in its warm-up --max-iters changes nothing
    assert read_json(checkpoint.steps(whole)[-1] / "config.json")["model_type"] == "bornbiased"  # no LLaMA's
    norm = checkpoint.load(whole).model.layers[0].input_layernorm
    assert norm.alpha != 0.5 and (norm.frozen == 3).all() and (norm.unused == 0).all()
    built = init.newborn("backcopy", 5)
    decayed, others = train.make_optimizers(built, train.Settings())[0].param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.ndim == 2 and p.requires_grad for p in decayed["params"])
    assert others["weight_decay"] == 0 and any(p is built.model.norm.alpha for p in others["params"])
    trained(tokens, tmp_path / "cut", max_iters=2)
    cut = trained(tokens, tmp_path / "cut", resume=True)
    for name in ("step_0000004/model.safetensors", "step_0000004/optimizer.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name


SIZES = {"vocab_size": 257, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
SIZES |= {"hidden_size": 32, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
STRANGERS = {
    "gpt2": transformers.GPT2Config(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES, intermediate_size=48, num_key_value_heads=2),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_sample_and_eval_of_a_strangers_folder(kind, tmp_path):
    """Greedy, beside `generate` of transformers; the loss beside its own, over all windows."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(STRANGERS[kind]).eval()
    theirs.save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path, "<|endoftext|>")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    prompt = torch.tensor([[0, *tokenizer.encode(["def f"])[0]]])
    written = theirs.generate(prompt, max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :].tolist()
    text = "def f" + tokenizer.decode(written[: written.index(0)] if 0 in written else written)
    words = ("--prompt", "def f", "--tokens", 40, "--temperature", 0, "--device", "cpu")
    sampled = run_here("train.py", "sample", tmp_path, *words)
    assert sampled.stdout.split("\n", 1)[1] == text + "\n", sampled.stderr
    file = tmp_path / "text.txt"
    file.write_text("".join(TEXTS[:20]))
    found = sampling.evaluate(sampling.EvalSettings(str(tmp_path), text=str(file), sequence_length=48))
    stream = torch.tensor([0, *tokenizer.encode(["".join(TEXTS[:20])])[0]])
    windows = stream.unfold(0, 49, 48)
    with torch.no_grad():
        logits = theirs(windows[:, :-1]).logits.double()
    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-6) and found["windows"] == len(windows)


def test_code_in_a_folder_is_not_run(tmp_path, monkeypatch):
    """Whatever the folder's files ask for; nor is the user asked whether it may."""
    torch.manual_seed(0)
    folder = tmp_path / "theirs"
    transformers.AutoModelForCausalLM.from_config(STRANGERS["qwen2"]).save_pretrained(folder)
    save_byte_tokenizer(folder, "<|endoftext|>")
    code = "from pathlib import Path\nPath(__file__).with_name('it_ran').touch()\n"
    code += "class Config: pass\nclass Model: pass\nclass Coder: pass\n"
    names = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    names["AutoTokenizer"] = ["theirs.Coder", "theirs.Coder"]
    for file in ("theirs.py", "configuration.py", "modeling.py", "setup.py", "__init__.py", "conftest.py"):
        (folder / file).write_text(code)
    for file in ("config.json", "tokenizer_config.json"):
        path = folder / file
        values = read_json(path) if path.exists() else {}
        path.write_text(json.dumps(values | {"auto_map": names, "tokenizer_class": "Coder"}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    monkeypatch.chdir(folder)  # where an import would find it
    (tmp_path / "text.txt").write_text("".join(TEXTS[:20]))
    few = ("--num-sequences", 2, "--device", "cpu", "--out", tmp_path / "out")
    commands = [
        ("probe", "--model", folder, *few),
        ("sinks", "--model", folder, "--sequence-length", 16, *few),
        ("seedprint", "compare", folder, folder, "--out", tmp_path / "out"),
        ("train", "sample", folder, "--tokens", 2, "--device", "cpu"),
        (
            "train",
            "eval",
            folder,
            "--text",
            tmp_path / "text.txt",
            "--sequence-length",
            16,
            "--device",
            "cpu",
        ),
    ]
    for words in commands:
        done = run_here(*words)
        assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("it_ran"))


@pytest.mark.parametrize("bos_first", [False, True])
def test_eval_of_a_run_reads_all_held_out_windows(bos_first, tokens, tmp_path):
    run = trained(tokens, tmp_path / "run", bos_first=bos_first)
    done = run_here("train.py", "eval", run)
    windows, targets = data.TokenData(tokens, bos_first).held_out(10**9, 16)
    with torch.no_grad():
        logits = checkpoint.load(run)(windows).double()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert f"all {len(windows):,} windows of 16 tokens" in done.stdout, done.stderr
    assert float(done.stdout.split(" nats")[0].split()[-1]) == pytest.approx(loss, abs=1e-6)
    assert_refused(run_here("train.py", "eval", "backcopy@1"), "no tokenizer")


def test_parameters_epochs_and_windows_are_told(tokens, tmp_path, capsys):
    run = trained(tokens, tmp_path / "run", eval_sequences=5000)
    printed = capsys.readouterr().out
    text = data.TokenData(tokens)
    assert f"{sum(p.numel() for p in checkpoint.load(run).parameters()):,} parameters" in printed
    assert f"4 steps are {4 * 4 / text.num_windows('train', 16):.3g} epochs" in printed
    assert f"an evaluation reads {text.num_windows('val', 16)} sequences, not 5000" in printed


def test_the_best_step_is_kept_and_told(tokens, tmp_path, monkeypatch, capsys):
    """Of evaluations at steps 0, 3, 6, ... number 6 is the best, and no power of two."""
    losses = iter([9.0, 5.0, 3.0, 4.0, 4.0, 4.0])
    monkeypatch.setattr(train, "mean_loss", lambda *_: next(losses))
    changes = {"max_iters": 15, "eval_every": 3, "save_every": 100, "warmup_iters": 2}
    run = trained(tokens, tmp_path / "run", **changes)
    assert [int(folder.name[-7:]) for folder in checkpoint.steps(run)] == [0, 1, 2, 4, 6, 8, 15]
    assert "lowest held-out loss: 3.0000, of step 6" in capsys.readouterr().out


def test_a_stdout_that_is_no_file(tmp_path, monkeypatch):
    """As a notebook's `%run`: its stdout has `write` and `flush`, and nothing else."""
    out = io.StringIO()
    words = ["--model", "backcopy", "--seed", "1", "--sequence-length", "8", "--num-sequences", "2"]
    monkeypatch.setattr(sys, "argv", ["contraction.py", "layers", *words, "--out", str(tmp_path)])
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=out.write, flush=out.flush))
    runpy.run_path(str(ROOT / "contraction.py"), run_name="__main__")
    assert "mean_cosine" in out.getvalue()


def test_train_in_a_thread(tokens, tmp_path):
    thread = threading.Thread(target=trained, args=(tokens, tmp_path / "run"))
    thread.start()
    thread.join()
    assert checkpoint.steps(tmp_path / "run")[-1].name == "step_0000004"


def test_home_in_a_config_file_and_after_an_equals_sign(tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    lines = [f"{name} = {value!r}\n" for name, value in (SMALL | {"max_iters": 1}).items()]
    (tmp_path / "config.py").write_text("".join(lines) + f"out = '~/a'\ndata = {str(tokens)!r}\n")
    for words, out in (([], "a"), (["--out=~/b"], "b")):
        done = run_here("train.py", tmp_path / "config.py", *words)
        assert done.returncode == 0 and (tmp_path / out / "step_0000001").exists(), done.stderr
    shutil.copytree(tokens, tmp_path / "set")
    found = sampling.evaluate(sampling.EvalSettings("a", data="set"))
    done = run_here("train.py", "eval", "a", "--data=~/set")
    assert f"{found['loss']:.6f}" in done.stdout and not (tmp_path / "~").exists()


def test_a_message_from_another_folder_names_what_works_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_here("train.py", "--data", "none")
    assert_refused(done, f"in {ROOT}, python -m sources.data SOURCE --out {tmp_path / 'none'}")


def test_no_blank_is_put_in_front_of_a_text(tmp_path):
    """By converters and readers that go by tokenizer_config.json and not by tokenizer.json's rules."""
    tokenizer = load_tokenizer("bpe:600", TEXTS)
    tokenizer.save(tmp_path)
    rules = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert rules["add_prefix_space"] is False
    (tmp_path / "tokenizer.json").unlink()  # so that it is made of tokenizer.model
    slow = transformers.LlamaTokenizer.from_pretrained(tmp_path)
    for text in ["return the", *TEXTS[:20]]:
        assert slow(text, add_special_tokens=False)["input_ids"] == tokenizer.encode([text])[0], text


def test_a_gguf_says_that_no_blank_is_put_in_front(tmp_path):
    tokenizer = load_tokenizer("bpe:600", TEXTS)
    coder = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
    numbers = list(range(coder.vocab_size()))
    types = [6 if coder.is_byte(i) else 3 if coder.is_control(i) else 2 if i == 0 else 1 for i in numbers]
    fields = {"tokens": coder.id_to_piece(numbers), "scores": coder.get_score(numbers), "token_type": types}
    read = load_converted(write(tmp_path / "a.gguf", "llama", model="llama", **fields))
    texts = ["return the", " return", *TEXTS[:50]]
    assert read.encode(texts) == tokenizer.encode(texts)
    assert [read.decode(tokens) for tokens in read.encode(texts)] == texts


def test_tuning_keeps_a_chat_models_tokenizer_whole(tmp_path):
    """From a folder to a data set to a step: chat template, pad and special tokens, and the same BOS."""
    theirs, prepared, step = tmp_path / "theirs", tmp_path / "set", tmp_path / "step"
    theirs.mkdir()
    save_byte_tokenizer(theirs, "<|endoftext|>")
    rules = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|endoftext|>"}
    rules |= {"pad_token": "!", "model_max_length": 77, "add_bos_token": False}
    (theirs / "tokenizer_config.json").write_text(json.dumps(rules))
    (theirs / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (theirs / "special_tokens_map.json").write_text(json.dumps({"pad_token": "!"}))
    (tmp_path / "text.txt").write_text("".join(TEXTS))
    file = str(theirs / "tokenizer.json")
    data.prepare(data.Settings(source=(str(tmp_path / "text.txt"),), tokenizer=file, out=str(prepared)))
    saving.save(step, init.newborn(KINDS["qwen2"], 1), data.TokenData(prepared).tokenizer)
    for name in ("chat_template.jinja", "special_tokens_map.json", "tokenizer.json"):
        assert (step / name).read_bytes() == (theirs / name).read_bytes()
    saved = json.loads((step / "tokenizer_config.json").read_text())
    assert saved.items() >= rules.items()
    coder = transformers.AutoTokenizer.from_pretrained(step)
    assert (coder.bos_token, coder.eos_token, coder.pad_token) == (None, "<|endoftext|>", "!")
    assert coder.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    again = load_tokenizer(str(step / "tokenizer.json"))
    assert (again.bos, again.eos, again.encode(TEXTS)) == (0, 0, load_tokenizer(file).encode(TEXTS))


def test_whose_commit(tmp_path, monkeypatch):
    """A copy inside another repository has none of it; code that git does not know of is dirty."""
    copy = tmp_path / "copy"
    (copy / "room").mkdir(parents=True)
    monkeypatch.setattr(results, "ROOT", copy)
    git = "git -c user.name=a -c user.email=a@b.c"
    for command, length, end in (
        ("echo 1 > copy/model.py", 0, ""),
        (f"git init -q && echo copy > .gitignore && git add .gitignore && {git} commit -qm another", 0, ""),
        (f"cd copy && git init -q && git add model.py && {git} commit -qm ours", 40, ""),
        ("echo no code > copy/notes.txt", 40, ""),
        ("echo 2 > copy/room/new.py", 46, "-dirty"),
        ("rm copy/room/new.py && echo 3 > copy/model.py", 46, "-dirty"),
    ):
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        commit = results.commit.__wrapped__() or ""
        assert len(commit) == length and commit.endswith(end), command


SHORT = "A document says a short thing.\n" * 18


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--block_size=8"], "did you mean sequence_length?"),
        (["--batch_size=12"], "did you mean global_batch_size or micro_batch_size?"),
        (["--dataset=books"], "did you mean source or data?"),
        (["--compile=False"], "--compile=False: expected --compile or --no-compile"),
        (["--sequence-length", "4096"], "context_length in model.py's PRESETS"),
        (["--init-from", "nano"], "nanoGPT's ckpt.pt"),
        (["sample", "nano/ckpt.pt"], "nanoGPT's ckpt.pt"),
        (["--source", "tables"], "load_dataset("),
        (["--source", "text.txt", "--tokenizer", "bpe:100"], "N is 277 at least"),
        (["nanogpt.py"], "did you mean sequence_length?"),
    ],
    ids=str,
)
def test_mistakes_of_the_first_hour(words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano").mkdir()
    torch.save({"model": {"transformer.wte.weight": torch.ones(3, 2)}}, tmp_path / "nano/ckpt.pt")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.parquet").touch()
    (tmp_path / "text.txt").write_text(SHORT)
    (tmp_path / "nanogpt.py").write_text("block_size = 64\n")
    done = run_here("train.py", *words)
    assert_refused(done, expected)
    assert "damaged" not in done.stderr


def test_least_n_suffices():
    assert load_tokenizer("bpe:277", [SHORT]).vocab_size == 277


def test_the_line_that_converts_tables_does(tmp_path, monkeypatch):
    """Of .jsonl.gz, .csv and .parquet."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "tables").mkdir()
    with gzip.open("tables/a.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:9]))
    refused = run_here("sources.data", "tables", "--tokenizer", "bytes")
    assert_refused(refused, "convert")
    line = refused.stderr.strip().split(": ")[-1].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(line, shell=True, check=True, capture_output=True)
    assert [text for text, _ in data.pieces(data.places_of(["text.jsonl"]))] == TEXTS[:9]


# ---- what a fork trains with -------------------------------------------------------------------------------


def two_optimizers(model, settings):
    """Muon for the blocks' matrices, at half the rate, and AdamW for the rest (docs/house.md)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in trained if all(parameter is not each for each in hidden)]
    matrices = {"params": hidden, "scale": 0.5}
    return [torch.optim.Muon([matrices], weight_decay=0.1), torch.optim.AdamW(others, betas=(0.9, 0.95))]


def files_of(run: Path) -> list:
    last = checkpoint.steps(run)[-1]
    return [(last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


class Dropped(model.Block):
    """A block with dropout on what it adds."""

    def forward(self, x, *args, **keywords):
        return x + F.dropout(super().forward(x, *args, **keywords) - x, 0.2, self.training)


@pytest.mark.parametrize("fork", ["two optimizers", "dropout"])
def test_a_fork_resumes_and_branches_with_the_same_bits(fork, tokens, tmp_path, monkeypatch):
    if fork == "dropout":
        monkeypatch.setattr(model, "Block", Dropped)
    else:
        monkeypatch.setattr(train, "make_optimizers", two_optimizers)
    whole = trained(tokens, tmp_path / "whole", max_iters=6, keep="optimizers", eval_every=3)
    steps = []

    def until_three(step, settings):
        steps.append(step)
        if step == 3 and steps.count(3) == 1:
            raise KeyboardInterrupt
        return rate(step, settings)

    rate = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", until_three)
    with pytest.raises(KeyboardInterrupt):
        trained(tokens, tmp_path / "part", max_iters=6, keep="optimizers", eval_every=3)
    trained(tokens, tmp_path / "part", max_iters=6, keep="optimizers", eval_every=3)
    assert steps.count(3) == 2
    monkeypatch.setattr(train, "learning_rate", rate)
    start = str(tmp_path / "whole" / "step_0000002")
    branch = trained(tokens, tmp_path / "branch", max_iters=6, branch_from=start, eval_every=3)
    for run in (tmp_path / "part", branch):
        assert files_of(run)[0] == files_of(whole)[0]
    assert files_of(tmp_path / "part")[1] == files_of(whole)[1]


def test_evaluation_drops_nothing(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "Block", Dropped)
    run = trained(tokens, tmp_path / "a")
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    held_out = data.TokenData(tokens).held_out(SMALL["eval_sequences"], SMALL["sequence_length"])
    saved = checkpoint.load(str(run))
    with torch.no_grad():
        loss = saved(*held_out).item() / held_out[0].numel()
    assert last["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_preset_is_trained_as_it_is(tokens, tmp_path, monkeypatch):
    """Its calibration and its sink count, unless --attn-calibration says otherwise."""
    from dataclasses import replace

    mine = replace(model.PRESETS["backcopy"], attn_calibration="attenuate", explicit_sink=True)
    monkeypatch.setitem(model.PRESETS, "backcopy", mine)
    config = checkpoint.load(str(trained(tokens, tmp_path / "a"))).config
    assert (config.attn_calibration, config.explicit_sink) == ("attenuate", True)
    undone = trained(tokens, tmp_path / "b", attn_calibration="none")
    config = checkpoint.load(str(undone)).config
    assert (config.attn_calibration, config.explicit_sink) == ("none", True)


def test_a_persistent_buffer_is_refused(monkeypatch):
    class Masked(model.Block):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("mask", torch.ones(4, 4))

    monkeypatch.setattr(model, "Block", Masked)
    with pytest.raises(UserError, match="mask is a buffer, but a checkpoint has"):
        init.newborn("tiny_llama", 1)
