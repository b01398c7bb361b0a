"""How does a stranger's model of any architecture get into memory, with `transformers` to run it?

Weights and config.json are read by strangers/formats.py, so that nothing of a folder is executed, and
`transformers` is handed tensors, and a configuration that asks for no kernels, adapters or code. A .gguf file
is converted once, into models/converted, which git ignores, by its content.
"""

import contextlib
import io
import json
import math
import os
import re
import sys
import tempfile
from os.path import exists
from pathlib import Path

os.environ.setdefault("USE_HUB_KERNELS", "NO")  # which models may ask for in their constructors

import numpy as np
import torch
import transformers
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lib.files import as_user_error, atomic_folder
from lib.settings import UserError, rank
from sources.checkpoint import finite
from strangers.check import check
from strangers.formats import (
    NO_PARAMETER,
    TOKEN_TABLE,
    contents,
    converted_place,
    folder_of,
    open_gguf,
    packed_error,
    raw_config,
)
from strangers.lens import Lens

LOAD = {"attn_implementation": "eager", "experts_implementation": "eager", "output_loading_info": True}
LARGE = 2**30  # bytes of weights whose size is told
DROPPED = ("quantization_config", "fusion_config", "distributed_config", "auto_map", "transformers_weights")
FOLLOWED = re.compile(r"rope|attention|softcap|scale|expert|logit")  # keys of a header that change numbers
NEUTRAL = ("0", "0.0", "1.0", "none")
MEANT = ("attention.causal", "rope.scaling.finetuned")  # keys that may be true
KINDS = ("gpt2", "llama", "gemma4")  # of tokenizers
GPT2_RULES = ("default", "gpt-2", "smollm")
GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of those whose scores go by d / H, not by the head size
GGUF_KEYS = {  # of a header, behind the architecture's name: of a configuration
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim", "global_head_dim"),
    "attention.value_length": ("head_dim", "global_head_dim"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layer_norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "rope.dimension_count": ("rotary_dim",),
    "rope.freq_base": ("rope_theta",),
    "rope.scaling.factor": ("factor",),
    "rope.scaling.original_context_length": ("original_max_position_embeddings",),
    "rope.scaling.type": ("rope_type",),
}


def stranger_config(place):
    """The configuration of a checkpoint folder, by transformers; UserError for what is no language model."""
    raw = raw_config(place)
    if raw is None:
        adapter = folder_of(place) / "adapter_config.json"
        said = "it is an adapter: merge it into its base, and save that"
        raise UserError(f"{place}: {said if exists(adapter) else 'config.json is missing'}")
    with as_user_error(place):
        kind = raw.get("model_type")
        if raw.get("is_encoder_decoder") or kind not in list(CONFIG_MAPPING):
            raise UserError(f"{place}: a model of type {kind!r} is no decoder that transformers knows")
        raw = transformers.PreTrainedConfig._decode_special_floats(raw)  # as infinity is saved
        config = CONFIG_MAPPING[kind].from_dict({key: raw[key] for key in raw if key not in DROPPED})
        config._attn_implementation = "eager"  # whatever it says; of its parts, too
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UserError(f"{place}: a model of type {kind!r} is no causal language model")
    return config


def open_lens(place, device="cpu", dtype=torch.float32):
    """The Lens on a checkpoint folder's model, checked; UserError for what cannot be seen as it is."""
    config = stranger_config(place)
    _, tensors, packed = contents(place)
    if packed:
        raise packed_error(place, packed)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if all("lora" in name for name in tensors) or layers > len(tensors):
        raise UserError(f"{place}: too few tensors for {layers} layers: is it an adapter?")
    with as_user_error(place):
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        check_size(place, kind, config, device, dtype)
        with quiet():
            weights = {name: finite(place, name, tensor.read()) for name, tensor in tensors.items()}
            model, info = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **LOAD)
        del weights
        unread = [name for name in info["unexpected_keys"] if not NO_PARAMETER.search(name)]
        for problem in (info["missing_keys"], info["mismatched_keys"], info["error_msgs"], unread):
            if problem:
                said = f"{min(map(str, problem))} does not fit a {kind.__name__}, or is missing"
                raise UserError(f"{place}: {said}")
        lens = Lens(model.to(device).eval())
        try:
            check(lens)
        except UserError as error:
            raise UserError(f"{place} cannot be measured: {error}") from None
    return lens


def check_size(place, kind, config, device, dtype) -> None:
    """Say how large a model is, if it is; UserError if it takes more than memory has."""
    with torch.device("meta"), quiet():
        model = kind(config)
    numbers = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    size = numbers * dtype.itemsize
    if size > LARGE and rank() == 0:
        said = f"{numbers / 1e9:.3g} billion numbers, {size / 1e9:.3g} GB as {dtype}"
        print(f"{place}: {said}", file=sys.stderr)
    free = memory_of(torch.device(device))
    if size > free:
        said = f"{size / 1e9:.3g} GB in memory, and {free / 1e9:.3g} are free: try --dtype bfloat16"
        raise UserError(f"{place} takes {said}")


def memory_of(device):
    """Bytes of memory that are free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if exists("/proc/meminfo"):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    return math.inf


@contextlib.contextmanager
def quiet():
    """Within this context transformers shows no bars and no advice."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers.logging.set_verbosity(before)


# ---- .gguf -------------------------------------------------------------------------------------------------


def converted(path):
    """The folder of what a .gguf file holds, in the formats of transformers; the first call writes it."""
    folder = converted_place(path)
    if exists(folder):
        return folder
    header = open_gguf(path)
    numbers = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    if rank() == 0:
        print(f"converting {path} once, into {folder}: {4 * numbers / 1e9:.3g} GB", file=sys.stderr)
    with as_user_error(path), quiet(), tempfile.TemporaryDirectory() as place:
        (Path(place) / "model.gguf").symlink_to(path.absolute())  # beside nothing else
        config = AutoConfig.from_pretrained(place, gguf_file="model.gguf")
        follow_header(path, header, config)
        unpacked = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
        model, info = AutoModelForCausalLM.from_pretrained(
            place, gguf_file="model.gguf", config=config, **unpacked, **LOAD
        )
        missing = info["missing_keys"] or info["mismatched_keys"]
        if missing:
            raise UserError(f"{path}: {min(map(str, missing))} is missing")
        check_all_read(path, header, model)
        with atomic_folder(folder) as new:
            model.save_pretrained(new)
            write_tokenizer(path, header.values, new)
    return folder


def check_all_read(path, header, model) -> None:
    """UserError if transformers drops numbers of a file, as biases or factors of RoPE."""
    state = model.state_dict()
    reached = sum({weight.data_ptr(): weight.numel() for weight in state.values()}.values())  # once if tied
    unread = sum(math.prod(tensor.shape) for tensor in header.tensors.values()) - reached
    if unread > 0:
        name = min(header.tensors.keys() - state.keys(), default="a tensor")
        raise UserError(f"{path}: transformers drops {unread:,} numbers, such as {name}: take safetensors")


def follow_header(path, header, config) -> None:
    """Set what a header says of rotation and scores, and transformers drops; UserError for what cannot be."""
    values = header.values
    name = values["general.architecture"]
    own = f"{name}."
    said = {key.removeprefix(own): value for key, value in values.items() if key.startswith(own)}
    if TOKEN_TABLE in header.tensors:  # a header need not say
        config.vocab_size = header.tensors[TOKEN_TABLE].shape[0]
    if "context_length" in said:  # which transformers drops for GPT-2
        config.max_position_embeddings = said["context_length"]
    if name in GEMMAS:
        is_largest = said["block_count"] == GEMMAS[name]
        width = said["embedding_length"] // said["attention.head_count"]
        config.query_pre_attn_scalar = width if is_largest else said["attention.key_length"]
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope if "rope_type" in rope else rope.get("full_attention", {})
    if said.get("rope.scaling.type") == "linear":
        rope |= {"rope_type": "linear", "factor": said["rope.scaling.factor"]}
    known = {name: getattr(config, name) for name in config.attribute_map} | config.to_dict() | rope
    known.setdefault("head_dim", known["hidden_size"] // known["num_attention_heads"])
    known.setdefault("rotary_dim", known["head_dim"] * known.get("partial_rotary_factor", 1))
    for key, value in said.items():
        value = max(value) if isinstance(value, list | np.ndarray) else value
        if not FOLLOWED.search(key) or str(value) in NEUTRAL or (key in MEANT and value is True):
            continue
        ours = [known[theirs] for theirs in GGUF_KEYS.get(key, ()) if known.get(theirs) is not None]
        is_same = [
            abs(x - value) <= 1e-5 * abs(x) if isinstance(x, int | float) else x == value for x in ours
        ]
        if not any(is_same):
            expected = f"transformers has {ours[0]}" if ours else "transformers does not follow it"
            raise UserError(f"{path}: its header says {name}.{key} = {value}; {expected}: take safetensors")


def write_tokenizer(path, values, folder) -> None:
    """Write a .gguf file's tokenizer; nothing if how it cuts a text is not known."""
    kind, rule = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    if kind not in KINDS or (kind == "gpt2" and rule not in {*GGUF_PRE_TOKENIZER_SPLITS, *GPT2_RULES}):
        return
    architecture, parts, named = get_gguf_tokenizer(str(path))
    coder, _ = convert_gguf_tokenizer(architecture, parts)
    if rule == "smollm":  # which transformers does not know
        digits = pre_tokenizers.Digits(individual_digits=True)
        bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
        coder.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_as_letters])
    elif rule == "llama-bpe":
        coder.model.ignore_merges = True  # a word that is a token is taken whole
    elif rule == "qwen2":
        coder.normalizer = normalizers.NFC()
    content = json.loads(coder.to_str())
    count = len(values["tokenizer.ggml.tokens"])
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    adds_bos = values.get("tokenizer.ggml.add_bos_token", kind == "llama" or rule == "llama-bpe")
    config = {kind: named[kind] for kind in ("bos_token", "eos_token")} | {"add_bos_token": bool(adds_bos)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
