"""How does a stranger's model of any architecture get into memory, with `transformers` to run it?

Weights and config.json are read by strangers/formats.py, so that nothing of a folder is executed, and
`transformers` is handed tensors, and a configuration that asks for no kernels, adapters or code. Of a
.gguf file the tokenizer is written once, into models/converted, which git ignores, by the file's content.
"""

import contextlib
import io
import json
import os
from os.path import exists
from pathlib import Path

os.environ.setdefault("USE_HUB_KERNELS", "NO")  # which models may ask for in their constructors

import torch
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers.integrations.gguf import gguf_tokenizer_mapping as reading
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lib.files import as_user_error, atomic_folder
from lib.settings import UserError
from sources.checkpoint import finite
from sources.tokenizers import BLANK
from strangers.check import check
from strangers.formats import NO_PARAMETER, contents, is_gguf, open_gguf, run_config, sha256
from strangers.lens import Lens

CONVERTED = Path(__file__).parents[1] / "models" / "converted"  # tokenizers of .gguf files
LOAD = {"attn_implementation": "eager", "experts_implementation": "eager", "output_loading_info": True}
DROPPED = ("quantization_config", "fusion_config", "distributed_config", "auto_map", "transformers_weights")

transformers.logging.set_verbosity_error()  # it gives advice


def stranger_config(place):
    """The configuration of a checkpoint, by transformers; UserError for what is no language model."""
    raw = run_config(place)
    if raw is None:
        raise UserError(f"{place}: config.json is missing: merge an adapter into its base, and save that")
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
    """The Lens on a checkpoint's model, checked; UserError for what cannot be seen as it is."""
    config = stranger_config(place)
    tensors, _ = contents(place)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if layers > len(tensors):
        raise UserError(f"{place}: too few tensors for {layers} layers: is it an adapter?")
    with as_user_error(place):
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"), quiet():
            empty = kind(config)
        size = dtype.itemsize * sum(x.numel() for x in (*empty.parameters(), *empty.buffers()))
        most = memory_of(torch.device(device))
        if size > most:
            said = f"{size / 1e9:.3g} GB in memory, and there are {most / 1e9:.3g}: try --dtype bfloat16"
            raise UserError(f"{place} takes {said}")
        weights = {name: finite(place, name, tensor.read()) for name, tensor in tensors.items()}
        if is_gguf(place) and "gemma" in config.model_type:  # gains stand there as they are
            weights |= {name: weight - 1 for name, weight in weights.items() if "norm" in name}
        with quiet():
            model, info = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **LOAD)
        del weights
        unread = [name for name in info["unexpected_keys"] if not name.endswith(NO_PARAMETER)]
        for problem in (info["missing_keys"], info["mismatched_keys"], info["error_msgs"], unread):
            if problem:
                said = f"{min(map(str, problem))} does not fit a {kind.__name__}, or is missing"
                raise UserError(f"{place}: {said}: save the whole model, with its head")
        lens = Lens(model.to(device).eval())
        try:
            check(lens)
        except UserError as error:
            raise UserError(f"{place} cannot be measured: {error}") from None
    return lens


def memory_of(device):
    """Bytes of memory: those of a GPU that are free, or all of this machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def quiet():
    """A context in which transformers shows no bars."""
    return contextlib.redirect_stderr(io.StringIO())


def tokenizer_folder(path):
    """The folder of a .gguf file's tokenizer, written once; missing if how it cuts a text is not known."""
    folder, values = CONVERTED / sha256(path), open_gguf(path).values
    kind, rule = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    known = [*reading.GGUF_PRE_TOKENIZER_SPLITS, "default", "gpt-2", "smollm"]
    if exists(folder) or (kind != "llama" and (kind != "gpt2" or rule not in known)):
        return folder
    with as_user_error(path), quiet(), atomic_folder(folder) as new:
        architecture, parts, named = reading.get_gguf_tokenizer(str(path))
        coder, _ = reading.convert_gguf_tokenizer(architecture, parts)
        if rule == "smollm":  # which transformers does not know
            digits = pre_tokenizers.Digits(individual_digits=True)
            bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
            coder.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_as_letters])
        elif rule == "llama-bpe":
            coder.model.ignore_merges = True  # a word that is a token is taken whole
        elif rule == "qwen2":
            coder.normalizer = normalizers.NFC()
        if kind == "llama" and not values.get("tokenizer.ggml.add_space_prefix", True):  # no blank in front
            coder.normalizer, coder.pre_tokenizer = normalizers.Replace(" ", BLANK), None
            parts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
            coder.decoder = decoders.Sequence(parts)
        content = json.loads(coder.to_str())
        count = len(values["tokenizer.ggml.tokens"])
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
        (new / "tokenizer.json").write_text(json.dumps(content))
        adds_bos = values.get("tokenizer.ggml.add_bos_token", kind == "llama" or rule == "llama-bpe")
        config = {key: named[key] for key in ("bos_token", "eos_token")} | {"add_bos_token": bool(adds_bos)}
        (new / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
