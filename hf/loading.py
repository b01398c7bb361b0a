"""How does a model of any architecture get into memory, with `transformers` to run it?

Weights and config.json are read by weights/, so that nothing of a folder is executed, and `transformers` is
handed tensors, and a configuration that asks for no kernels, adapters or code.
"""

import contextlib
import io
import os

os.environ.setdefault("USE_HUB_KERNELS", "NO")  # which models may ask for in their constructors

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf.check import check
from hf.lens import Lens
from lib.files import as_user_error
from lib.settings import UserError
from weights.contents import finite, open_weights
from weights.files import full_config, is_gguf

ROWS = 4096  # of a matrix that are read at a time
NO_PARAMETER = ("inv_freq", ".attn.bias", ".attn.masked_bias")  # how names of buffers end
LOAD = {"attn_implementation": "eager", "experts_implementation": "eager", "output_loading_info": True}
DROPPED = ("quantization_config", "fusion_config", "distributed_config", "auto_map", "transformers_weights")

transformers.logging.set_verbosity_error()  # it gives advice


def transformers_config(place):
    """The configuration of a checkpoint, by transformers; UserError for what is no language model."""
    raw = full_config(place)
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
    config = transformers_config(place)
    tensors = open_weights(place).tensors
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
        weights = {name: read_as(dtype, place, name, tensor) for name, tensor in tensors.items()}
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


def read_as(dtype, place, name, tensor):
    """A tensor of a checkpoint in a dtype; of a large matrix some rows at a time are read."""
    rows = tensor.shape[0] if len(tensor.shape) == 2 else 0
    if rows <= ROWS:
        weight = finite(place, name, tensor.read())
        return weight.to(dtype) if weight.is_floating_point() else weight
    weight = torch.empty(tensor.shape, dtype=dtype)
    for start in range(0, rows, ROWS):
        part = slice(start, min(rows, start + ROWS))
        weight[part] = finite(place, name, tensor.read((part,)))
    return weight


def memory_of(device):
    """Bytes of memory: those of a GPU that are free, or all of this machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def quiet():
    """A context in which transformers shows no bars."""
    return contextlib.redirect_stderr(io.StringIO())
