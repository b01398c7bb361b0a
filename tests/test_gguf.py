"""strangers/gguf.py and tokenizer.json beside `transformers` and `tokenizers`; what is refused of files."""

import struct
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from architectures import build
from conftest import KINDS, ROOT, random_model, run_here
from test_gguf_tokenizers import add_tokenizer, fields_of, trained_bpe
from tokenizers import decoders, pre_tokenizers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hf import gguf_tokenizers
from lib.settings import UserError
from model import ModelConfig
from sources import checkpoint, data, inputs, saving
from weights import gguf_config, ranges
from weights.contents import open_weights
from weights.files import open_gguf
from weights.vocabulary import token_ids

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
    coder = trained_bpe(TEXT, 400)
    digits = pre_tokenizers.Digits(True)
    coder.pre_tokenizer = pre_tokenizers.Sequence([digits, coder.pre_tokenizer])
    coder.decoder = decoders.ByteLevel()
    return coder


def write(path, family, model, coder=None, more=(), said=None):
    """A .gguf file as llama.cpp's converter writes it: q and k of llama in pairs, some matrices packed.

    Of a model of ours or of `transformers`, whose up projections are rounded to what eight bits a number have
    of them, if these can be; one is added to Gemma's gains.
    """
    writer = gguf.GGUFWriter(path, family)
    config = model.config
    if isinstance(config, ModelConfig):
        raw = saving.config_json(config) | {"head_dim": config.head_size}
        raw["rope_theta"] = config.rope_theta
    else:
        raw = config.to_dict()
        rope = config.rope_parameters
        raw["rope_theta"] = rope.get("full_attention", rope)["rope_theta"]
    values = {key: raw[theirs] for theirs, key in KEYS.items() if raw.get(theirs) is not None}
    for key, value in (values | (said or {})).items():
        writer.add_key_value(f"{family}.{key}", value, gguf.GGUFValueType.get_type(value))
    if coder is not None:
        add_tokenizer(writer, **fields_of(coder, "smollm"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], raw["num_hidden_layers"])
    for name, weight in model.named_parameters():
        array = weight.detach().numpy() + (family == "gemma3" and "norm" in name)
        kinds = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        heads = raw.get(kinds.get(name.split(".")[-2]))
        if heads and family == "llama":
            paired = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2)
            array = np.ascontiguousarray(paired).reshape(array.shape)
        kind = None
        if name.endswith("up_proj.weight") and array.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quantize(np.ascontiguousarray(array), kind)
            weight.data = torch.from_numpy(gguf.dequantize(array, kind))
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), array, raw_dtype=kind)
    for name in more:
        writer.add_tensor(name, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, coder):
    model = random_model(replace(KINDS["llama_gqa"], vocab_size=400))
    return model, write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", model, coder)


@pytest.fixture(autouse=True)
def converted(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_tokenizers, "CONVERTED", tmp_path / "converted")


def logits_of(lens, tokens):
    return lens.unembed(lens.hidden(tokens))


# ---- weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama_gqa", "qwen2"])
def test_a_file_holds_the_model(kind, tmp_path):
    model = random_model(KINDS[kind])
    path = write(tmp_path / "a.gguf", kind.removesuffix("_gqa"), model)
    weights = dict(model.named_parameters())
    source = checkpoint.find_model(str(path)).weights
    assert source.shapes.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(source.read(name), weight), name
    tokens = torch.randint(97, (2, 30))
    # float32 rounding through three blocks; the logits are of order 1 to 10
    torch.testing.assert_close(logits_of(checkpoint.load(path), tokens), model(tokens), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("family", [*gguf_config.MODELS])
def test_models_of_transformers_run_as_they_are(family, tmp_path):
    model = build(gguf_config.MODELS[family])
    for block in model.model.layers:
        block.self_attn.scaling = block.self_attn.head_dim**-0.5  # the tiny Gemma's is another
    is_sliding = family == "gemma3"
    said = {"attention.sliding_window": model.config.sliding_window} if is_sliding else {}
    lens = checkpoint.load(write(tmp_path / "a.gguf", family, model, said=said))
    tokens = lens.probe_tokens(40)
    with torch.no_grad():
        theirs = model(tokens).logits
    torch.testing.assert_close(logits_of(lens, tokens), theirs, rtol=1e-4, atol=1e-5)  # gains are rounded


def test_a_part_is_that_of_the_whole_and_no_more_is_read(tiny, monkeypatch):
    source = checkpoint.find_model(str(tiny[1])).weights
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


def test_transformers_reads_the_same(tiny):
    model, path = tiny
    config = transformers.LlamaConfig(**saving.config_json(model.config))
    reference = transformers.LlamaForCausalLM(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    source = checkpoint.find_model(str(path)).weights
    assert theirs.keys() == source.shapes.keys()
    for name, weight in theirs.items():
        assert torch.equal(source.read(name), torch.as_tensor(weight)), name


def test_other_architectures_are_compared_only(tmp_path):
    model = random_model(ModelConfig(97, 64, 1, 2, 32, 64, tie_embeddings=True))
    more = ["blk.0.ffn_norm.weight", "blk.0.post_ffw_norm.weight"]
    path = write(tmp_path / "b.gguf", "gemma2", model, more=more)
    source = open_weights(path, True)
    names = {name for name, _ in model.named_parameters()}
    names |= {f"model.layers.0.{place}_feedforward_layernorm.weight" for place in ("pre", "post")}
    assert source.shapes.keys() == names
    with pytest.raises(UserError, match="are run, not gemma2"):
        checkpoint.load(path)


def test_what_a_file_says_is_followed_or_refused(tmp_path):
    model = random_model(KINDS["llama"])
    for said, more, word in (
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, [], "rope.scaling.type = yarn"),
        ({"rope.dimension_count": 4}, [], "rope.dimension_count = 4"),
        ({"attention.sliding_window": 16}, [], "attention.sliding_window = 16"),
        ({"attention.causal": False}, [], "attention.causal = False"),
        ({"vocab_size": 98}, [], "vocab_size = 98"),
        ({}, ["blk.0.attn_q.bias"], "q_proj.bias"),
        ({}, ["rope_freqs.weight"], "rope_freqs.weight"),  # Llama 3's factors of RoPE without what made them
    ):
        path = write(tmp_path / f"{word}.gguf", "llama", model, more=more, said=said)
        with pytest.raises(UserError, match=f"{word} is not followed"):
            checkpoint.load(path)
    plain = {"rope.dimension_count": 8, "rope.scaling.factor": 1.0, "rope.scaling.type": "none"}
    path = write(tmp_path / "plain.gguf", "llama", model, said=plain)
    assert checkpoint.find_model(str(path)).config.context_length == 700


def test_a_file_of_any_name(tiny, tmp_path):
    """As Ollama keeps them: its configuration, tokenizer, tokens and weights come of one header."""
    model, path = tiny
    blob = tmp_path / "sha256-4d7a"
    blob.write_bytes(path.read_bytes())
    (tmp_path / "M").mkdir()
    (tmp_path / "M" / "M.GGUF").symlink_to(blob)
    for name in (blob, tmp_path / "M"):
        spec = checkpoint.find_model(str(name))
        assert spec.config.d_model == 32
        assert spec.tokenizer_file.exists() and len(token_ids(spec.place)) == 400
        assert torch.equal(spec.transformer().model.embed_tokens.weight, model.model.embed_tokens.weight)
    again = tmp_path / "copy"
    again.write_bytes(path.read_bytes())
    assert gguf_tokenizers.tokenizer_folder(again) == spec.tokenizer_file.parent  # by its content


def test_every_kind_of_numbers_is_unpacked_or_refused(tmp_path):
    for kind in gguf.GGMLQuantizationType:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        path = tmp_path / f"{kind.name}.gguf"
        path.write_bytes(header(tensors=[tensor(256, kind=kind)]) + bytes(256 * size))
        try:
            values = open_gguf(path).tensors["x.x"]
        except UserError as error:
            assert f"Dequantization for {kind.name} is not yet implemented" in str(error)
        else:
            assert values.read().shape == (256,)


# ---- tokens ------------------------------------------------------------------------------------------------


def test_a_tokenizer_json(coder, tmp_path):
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
    assert tokenizer.encode([TEXT]) == [whole] and tokenizer.bos == 0 and tokenizer.prefix == (0,)


def test_eos_in_the_place_of_bos(coder, tmp_path):
    coder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    spec = SimpleNamespace(label="tiny", tokenizer=data.load_tokenizer(str(tmp_path / "tokenizer.json")))
    settings = inputs.TextSettings(bos="always", device="cpu", out=str(tmp_path))
    assert inputs.text_of(settings, spec) == "docstrings"
    assert inputs.prefix_of(settings, spec) == (0,)


def test_a_child_keeps_the_tokenizer(tiny, coder, tmp_path, monkeypatch):
    """Trained on from a .gguf file by its own tokenizer: `transformers` opens the folder, and we do."""
    monkeypatch.chdir(tmp_path)  # where the data set goes
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["--init-from", tiny[1], "--tokenizer", tiny[1], "--source", "text.txt", "--out", "run"]
    words += ["--sequence-length", 16, "--global-batch-size", 2, "--micro-batch-size", 2]
    done = run_here("train", *words, "--max-iters", 1, "--warmup-iters", 0, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    child = checkpoint.find_model("run")
    assert child.tokenizer_file.name == "tokenizer.json"
    tokenizer = data.load_tokenizer(str(child.tokenizer_file))
    theirs = transformers.AutoTokenizer.from_pretrained(child.place)
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
    "a part of a model": header(text(b"split.count") + struct.pack("<IH", 2, 3)),
}


def test_hostile_files_and_files_cut_anywhere_are_refused(tiny, tmp_path):
    path = tmp_path / "a.gguf"
    whole = tiny[1].read_bytes()
    cuts = [whole[:size] for size in np.geomspace(1, len(whole) - 64, 40).astype(int)]
    for content in (*HOSTILE.values(), *cuts):
        path.write_bytes(content)
        with pytest.raises(UserError, match="a.gguf"):
            open_gguf(path)
