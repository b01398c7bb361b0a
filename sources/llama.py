"""Can model.py be a LLaMA or a Qwen2 that transformers has saved? Then train.py goes on with it."""

import torch

from lib.files import as_user_error
from lib.settings import UserError, from_values
from model import ModelConfig, Transformer
from sources.saving import KEYS, build_model
from weights.contents import Weights, packed_error
from weights.files import full_config
from weights.gguf_config import HEAD, TOKEN_TABLE

NO_PARAMETER = ("inv_freq", ".attn.bias", ".attn.masked_bias")  # how names of buffers end
FAMILIES = {  # model_type: what its configurations leave out
    "llama": {"norm_epsilon": 1e-6},
    "qwen2": {"norm_epsilon": 1e-6, "qkv_bias": True},
}
SUPPORTED = {  # what our model does; other values of these keys are refused
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    "use_sliding_window": False,
    "per_layer_config": None,
    "rope_type": "default",
    "type": "default",  # of RoPE, in old ones
}


def transformer_config(place) -> ModelConfig:
    """The ModelConfig of a checkpoint of transformers; UserError if model.py cannot be that model."""
    values = full_config(place)
    if values is None:
        raise UserError(f"{place}: config.json is missing")
    family = values.get("model_type")
    if family not in list(FAMILIES):  # it may be a list or object, which has no hash
        known = ", ".join(FAMILIES)
        hint = "`seedprint.py compare` reads any, by its weights alone"
        raise UserError(f"{place}: model.py trains and reads {known}, not {family!r}. {hint}")
    with as_user_error(place):
        rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
        for key, supported in SUPPORTED.items():
            value = rope.get(key, values.get(key, supported))
            if value != supported:
                raise UserError(f"{place}: {key} {value!r} is not supported; expected {supported}")
        if set(values.get("layer_types") or ()) - {"full_attention"}:
            raise UserError(f"{place}: layers that slide are not supported")
        own = FAMILIES[family] | {ours: values[theirs] for ours, theirs in KEYS.items() if theirs in values}
        own["rope_theta"] = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
        return from_values(ModelConfig, own, place)


def load_transformer(weights: Weights, config, device="cpu", dtype=torch.float32) -> Transformer:
    """The Transformer with the weights of such a checkpoint; UserError if they do not fit."""
    if weights.packed:
        raise packed_error(weights.place, weights.packed)
    tensors = {}
    for name in weights.shapes:
        if not name.endswith(NO_PARAMETER):
            tensors[name] = weights.read(name)
    if config.tie_embeddings and HEAD in tensors:  # stored once, or twice
        if torch.equal(tensors[HEAD], tensors.setdefault(TOKEN_TABLE, tensors[HEAD])):
            del tensors[HEAD]
    return build_model(config, tensors, weights.place, device, dtype)
