"""What stands in front of a text, which files are read, and what a full disk does not end."""

import errno
import json
from pathlib import Path

import kill_training
import pytest
import torch
import torch.nn.functional as F
import transformers
from architectures import build
from conftest import TEXTS, save_byte_tokenizer
from test_lens import checked
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import train
from hf.lens import Lens
from lib.settings import UserError
from measure import attention
from measure.units import observe
from reproduce import hide, interventions
from sources import checkpoint, data, runs, sampling
from sources.checkpoint import load_tokenizer
from sources.inputs import TextSettings, prefix_of, read_tokens

SIZES = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 whose template puts two tokens in front, as GLM's does."""
    place = tmp_path_factory.mktemp("front")
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).save_pretrained(place)
    save_byte_tokenizer(place, "[gMASK]", "<sop>")
    coder = Tokenizer.from_file(str(place / "tokenizer.json"))
    front = [("[gMASK]", 0), ("<sop>", 1)]
    coder.post_processor = TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=front)
    coder.save(str(place / "tokenizer.json"))
    return place


def test_every_command_reads_the_template_in_front(folder, tmp_path, capsys):
    """The tokens that measures read; the loss beside transformers' own; text beside `generate`."""
    spec = checkpoint.find_model(str(folder))
    settings = TextSettings(num_sequences=4, device="cpu")
    assert prefix_of(settings, spec) == (0, 1)
    tokens = read_tokens(settings, spec, 20)
    assert tokens.shape == (4, 20) and (tokens[:, :2] == torch.tensor([0, 1])).all() and tokens[0, 2] > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    file = tmp_path / "text.txt"
    file.write_text("".join(TEXTS[:9]))
    found = sampling.evaluate(sampling.EvalSettings(str(folder), text=str(file), sequence_length=30))
    text = torch.tensor(spec.tokenizer.encode([file.read_text()])[0])
    windows = text[: len(text) // 29 * 29].view(-1, 29)
    read = torch.cat((torch.tensor([0, 1]).expand(len(windows), -1), windows), dim=1)
    with torch.no_grad():
        logits = theirs(read[:, :-1]).logits[:, 1:].double()
    loss = F.cross_entropy(logits.flatten(0, 1), windows.flatten()).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    num_bytes = sum(len(spec.tokenizer.decode(window).encode()) for window in windows.tolist())
    bits = loss * windows.numel() / torch.log(torch.tensor(2.0)).item() / num_bytes
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert "behind '[gMASK]<sop>'" in capsys.readouterr().out
    sampling.sample(sampling.SampleSettings(str(folder), prompt="de", tokens=12, temperature=0, device="cpu"))
    prompt = torch.tensor([[0, 1, *spec.tokenizer.encode(["de"])[0]]])
    with torch.no_grad():
        for _ in range(12):
            prompt = torch.cat((prompt, theirs(prompt).logits[:, -1:].argmax(-1)), dim=1)
    assert capsys.readouterr().out == "de" + spec.tokenizer.decode(prompt[0, 4:].tolist()) + "\n"


def test_a_tokenizer_is_one_by_what_it_does(tmp_path_factory, tmp_path):
    """As transformers saves it, in other bytes; with another token in one place it is another."""
    folder = tmp_path_factory.mktemp("own")
    save_byte_tokenizer(folder, "<s>")
    file = str(folder / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(tokenizer_file=file).save_pretrained(tmp_path)
    saved, own = (load_tokenizer(str(place / "tokenizer.json")) for place in (tmp_path, folder))
    assert saved.content != own.content and saved.does_as(own) and own.does_as(saved)
    values = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    assert not load_tokenizer(str(tmp_path / "tokenizer.json")).does_as(own)


# ---- layers that attend, and others ------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["granitemoehybrid", "qwen3_next", "jamba", "bamba"])
def hybrid(request) -> Lens:
    return checked(build(request.param))


def test_a_hybrid_carries_what_is_hidden(hybrid):
    tokens = hybrid.probe_tokens(16)
    with pytest.raises(UserError, match="still changes later states by"):
        hide.check_that_hiding_hides(hybrid, tokens[:1])


def test_an_intervention_counts_layers_as_the_model_does(hybrid):
    """The mean attention of the layers above the builder, by their own numbers."""
    tokens = hybrid.probe_tokens(16)
    alpha, _ = attention.attention_to(hybrid, tokens, (10,))
    layers = list(attention.queries_that_see_the_first(hybrid, 16))
    for builder in range(1, hybrid.config.num_layers):
        above = [place for place, layer in enumerate(layers) if layer > builder]
        if not above:
            with pytest.raises(UserError, match="attends"):
                interventions.intervened(hybrid, tokens, (builder, 0), 10, "all", "none", None)
            continue
        found, _ = interventions.intervened(hybrid, tokens, (builder, 0), 10, "all", "none", None)
        torch.testing.assert_close(found, alpha[:, above, :, 0].double().mean((1, 2)), rtol=0, atol=1e-6)


# ---- files -------------------------------------------------------------------------------------------------


def test_links_are_followed_once(tmp_path, capsys):
    for place in ("texts/a", "elsewhere/b", "texts/.hidden"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "one.txt").write_text(place)
    (tmp_path / "texts" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "texts" / "a" / "again").symlink_to(tmp_path / "texts")  # a circle
    (tmp_path / "texts" / "one.txt").symlink_to(tmp_path / "texts" / "a" / "one.txt")
    for name in (tmp_path / "texts", tmp_path / "tex*"):
        places = data.places_of((str(name),))
        texts = sorted(text for text, _ in data.pieces(places))
        assert texts == ["elsewhere/b", "texts/a"]
        assert "which is read already" in capsys.readouterr().out


@pytest.mark.usefixtures("quick_training")
def test_a_full_disk_ends_no_training_between_saves(tmp_path, monkeypatch, capsys):
    """Neither a line of the log nor the figure; what could not be written comes later, and the same bits."""
    tokens = kill_training.prepare(tmp_path)
    small = kill_training.SMALL | {"data": str(tokens), "max_iters": 6, "eval_every": 2, "save_every": 2}
    whole = train.train(train.Settings(**small, out=str(tmp_path / "whole")))
    opened, calls = Path.open, []

    def full(path, *args, **keywords):
        if path.name == "metrics.jsonl" and args == ("a",):
            calls.append(path)
            if len(calls) in (1, 2, 4):
                raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *args, **keywords)

    def no_figure(*args, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(runs, "curves", no_figure)
    run = train.train(train.Settings(**small, out=str(tmp_path / "full")))
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl cannot be written now") == 1 and said.count("cannot be drawn now") == 1
    logs = [
        [json.loads(line) for line in (each / "metrics.jsonl").read_text().splitlines()]
        for each in (whole, run)
    ]
    assert [row["step"] for row in logs[1]] == [row["step"] for row in logs[0]] == list(range(7))
    last = "step_0000006/model.safetensors"
    assert (whole / last).read_bytes() == (run / last).read_bytes()


def test_the_best_step_is_among_equal_evaluations(tmp_path):
    rows = [
        {"step": step, "val_loss": loss, "val_windows": n} for step, loss, n in ((1, 1.0, 1), (2, 3.0, 64))
    ]
    runs.write_log(tmp_path / "metrics.jsonl", rows + [{"step": 3, "val_loss": 2.0, "val_windows": 64}])
    assert runs.Run(tmp_path).best()["step"] == 3


# ---- neurons behind a norm ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["glm4", "gemma2", "olmo2"])
def test_contributions_behind_a_norm_are_exact(family):
    """Each sequence's products, times what its norm makes of that sequence, are what the MLP adds."""
    torch.manual_seed(1)
    lens = checked(build(family))
    tokens = torch.randint(lens.config.vocab_size, (12, 8), generator=torch.Generator().manual_seed(3))
    activity = observe(lens, tokens)
    states = {}
    lens.hidden(tokens, on_state=lambda layer, x: states.update({layer: x[:, 0].float()}))
    sign = activity.state[activity.layer, activity.dimension].sign()
    for layer in lens.normed_layers:
        added = (states[layer] - lens.without_units(layer, tokens[:, :1]))[:, activity.dimension].mean()
        total = activity.contributions()[layer - 1].sum()
        assert total.item() == pytest.approx((added * sign).item(), rel=1e-3, abs=1e-5)
