"""What would config.json say of a .gguf file?"""

from lib.settings import UserError
from weights.gguf import KEYS

MODELS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}  # that are run
NEUTRAL = ("0", "0.0", "1.0", "none")  # what a header may say of anything
TOKEN_TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def config_of_header(path, header):
    """config.json's keys for a GGUF; UserError if it says more than is followed."""
    name = header.values["general.architecture"]
    if name not in MODELS:
        raise UserError(f"{path}: of .gguf files {', '.join(MODELS)} are run, not {name}: take safetensors")
    config = {"rope_theta": 10_000.0, "num_key_value_heads": header.config["num_attention_heads"]}
    config["head_dim"] = header.config["hidden_size"] // header.config["num_attention_heads"]
    config |= {"model_type": MODELS[name], "tie_word_embeddings": HEAD not in header.tensors}
    config |= header.config
    config["vocab_size"] = header.tensors[TOKEN_TABLE].shape[0]
    if name == "gemma3":
        config["query_pre_attn_scalar"] = config["head_dim"]
    else:
        config.pop("sliding_window", None)
    not_followed = values_not_followed(header, config) + tensors_not_followed(header, name)
    if not_followed:
        raise UserError(f"{path}: {not_followed[0]} is not followed: take safetensors")
    return config


def values_not_followed(header, config):
    """What a header says of the model that is neither in config.json's keys nor implied by them."""
    implied = dict.fromkeys(("rope.dimension_count", "attention.value_length"), config["head_dim"])
    implied |= {"vocab_size": config["vocab_size"], "attention.causal": True}
    found = []
    for key, value in header.said.items():
        if KEYS.get(key) not in config and str(value) not in (*NEUTRAL, str(implied.get(key))):
            found.append(f"{header.values['general.architecture']}.{key} = {value}")
    return found


def tensors_not_followed(header, name):
    """Biases that the architecture does not have here, and what belongs to no layer, as factors of RoPE."""
    found = []
    for tensor in header.tensors:
        is_bias = tensor.endswith("bias") and name != "qwen2"
        if is_bias or not tensor.startswith(("model.", "lm_head.")):
            found.append(tensor)
    return found
