"""OpenAI's GPT-2: every script reads it, through the lens."""

from pathlib import Path

import torch
import transformers
from conftest import run_here, save_byte_tokenizer
from hub_server import serving
from test_hub import point_to, repositories

from lib.files import read_json

SIZES = {"vocab_size": 257, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}


def save_gpt2(folder: Path) -> None:
    """transformers' model of random weights, biases and norms, with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = ".ln_" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, 0.2)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder, "<|endoftext|>")


SCRIPTS = [  # what is asked, and the JSON that answers
    ("sinks rate", "rate"),
    ("reproduce.interventions bos", "bos"),
    ("reproduce.interventions intervene --position 3", "intervene"),
    ("reproduce.interventions ablate", "ablate"),
    ("probe", "probe"),
]


def test_every_script_on_what_the_hub_serves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_gpt2(tmp_path / "a")
    files, _ = repositories(tmp_path / "others")
    files["org/gpt2"] = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with serving(files) as server:
        point_to(server.url, monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        for words, name in SCRIPTS:
            length = ["--sequence-length", 16, "--num-sequences", 4, "--dtype", "float32"]
            done = run_here(*words.split(), "--model", "org/gpt2", *length)
            assert done.returncode == 0, done.stderr
            assert read_json(Path(f"out/{name}.json"))["rows"]
        for words in (["paper", "--paper-sequences", 20, "--paper-length", 9], ["compare"]):
            done = run_here("seedprint", *words, "org/gpt2", "org/gpt2")
            assert done.returncode == 0, done.stderr
