"""How is a model of model.py written to a folder, and read? As transformers does, if that can run it."""

import json
import re
import sys
from dataclasses import asdict, replace

import torch
from safetensors.torch import load_file, save_file

from init import without_numbers
from lib.files import as_user_error, atomic_file, atomic_folder, check_regular, read_json
from lib.settings import UserError, from_values
from model import ModelConfig, Transformer
from sources.answer import agree, answer_of, llama_answer
from weights.contents import finite

WEIGHTS = "model.safetensors"
ANSWER = "answer.json"  # the final state behind some fixed tokens
MARK = "bornbiased"  # of a config.json written here; also the model_type of models that only model.py runs
LAYER = r"model\.layers\.\d+\."
LLAMA_PARTS = r"self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|(input|post_attention)_layernorm"
LLAMA_PARTS = rf"({LAYER}({LLAMA_PARTS})|model\.(embed_tokens|norm)|lm_head)\.weight"
LLAMA_NAMES = re.compile(rf"{LLAMA_PARTS}|{LAYER}self_attn\.[qkv]_proj\.bias")  # of a LLaMA or a Qwen2, all
KEYS = {  # of config.json: our name, and Hugging Face's
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "head_dim": "head_dim",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "norm_epsilon": "rms_norm_eps",
    "num_kv_heads": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}


def save(folder, model, tokenizer=None) -> None:
    """Write a checkpoint folder, whole or not at all; UserError if the disk is full or read-only."""
    with atomic_folder(folder) as new:
        write(new, model, tokenizer)


def write(folder, model, tokenizer=None) -> None:
    """Write a checkpoint and its tokenizer's files into an empty folder."""
    parameters = dict(model.named_parameters())
    save_file(parameters, folder / WEIGHTS, {"format": "pt"})
    plain = without_numbers(model.config)
    weights = {name: parameter.detach().float().cpu() for name, parameter in parameters.items()}
    plain.eval().load_state_dict(weights, strict=False, assign=True)
    answer = answer_of(plain)
    (folder / ANSWER).write_text(json.dumps({"state": answer.tolist()}) + "\n")
    config = config_json(model.config, parameters)
    if config["model_type"] != MARK and not agree(answer, llama_answer(plain)):  # another forward pass
        config = {"model_type": MARK, **asdict(model.config)}
    if tokenizer is not None:
        tokenizer.save(folder, config["model_type"])
        special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.ends}
        (folder / "generation_config.json").write_text(json.dumps(special, indent=1) + "\n")
        if "architectures" in config:  # else transformers takes Llama's
            config |= special
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def config_json(config: ModelConfig, names=()):
    """What config.json says of a model, by its parameters' names: a LLaMA's or Qwen2's keys, or our own."""
    whole = replace(config, num_kv_heads=config.kv_heads, head_dim=config.head_size)
    family = "qwen2" if config.qkv_bias else "llama"
    values = {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        **{theirs: getattr(whole, ours) for ours, theirs in KEYS.items()},
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        MARK: True,
    }
    is_llama = all(map(LLAMA_NAMES.fullmatch, names)) and config_of(values, family) == whole
    return values if is_llama else {"model_type": MARK, **asdict(config)}


def is_marked(values):
    """Whether `config_json` wrote a config.json; what transformers has saved since may be another model."""
    return MARK in (values.get("model_type"), *values) and "transformers_version" not in values


def config_of(values, place):
    """The ModelConfig of what `config_json` wrote; UserError if it is damaged."""
    if values.get("model_type") == MARK:
        values = {name: value for name, value in values.items() if name != "model_type"}
        return from_values(ModelConfig, values, place)
    with as_user_error(place):
        own = {ours: values[theirs] for ours, theirs in KEYS.items()}
        own["rope_theta"] = values["rope_parameters"]["rope_theta"]
        own["qkv_bias"] = {"llama": False, "qwen2": True}[values["model_type"]]
    return from_values(ModelConfig, own, place)


def read_folder(folder, config: ModelConfig, device="cpu", dtype=torch.float32) -> Transformer:
    """The Transformer that `write` wrote into a folder, in eval mode, its blocks in `dtype`."""
    path = folder / WEIGHTS
    check_regular(path)
    with as_user_error(path):
        weights = load_file(path)
    model = build_model(config, dict(weights), path)
    if (folder / ANSWER).exists():
        with as_user_error(folder / ANSWER):
            answer = torch.tensor(read_json(folder / ANSWER)["state"])
        if not agree(answer, answer_of(model)):
            text = (
                f"{folder}: model.py has changed since this was written: the same weights give other states"
            )
            print(text, file=sys.stderr)
    return model.cast_blocks(dtype).to(device)


def build_model(config: ModelConfig, weights, place, device="cpu", dtype=torch.float32) -> Transformer:
    """The Transformer of tensors by name, in eval mode; UserError if they do not fit, or are not finite."""
    if config.num_layers > len(weights):  # building the layers might take all memory
        raise UserError(f"{place}: too few tensors for {config.num_layers} layers")
    model = without_numbers(config).cast_blocks(dtype)
    parameters = dict(model.named_parameters())
    check_shapes(place, weights, parameters)
    for name, weight in weights.items():
        weights[name] = finite(place, name, weight).to(device, parameters[name].dtype).contiguous()
    model.load_state_dict(weights, assign=True)  # without a copy
    return model.to(device).eval()


def check_shapes(place, weights, parameters) -> None:
    """UserError unless tensors have the names and shapes of a model's parameters."""
    expected = {(name, tuple(parameter.shape)) for name, parameter in parameters.items()}
    differing = expected ^ {(name, tuple(weight.shape)) for name, weight in weights.items()}
    if differing:
        name, shape = min(differing)
        hint = "was model.py or config.json changed since?"
        raise UserError(f"{place}: it does not fit model.py at {name} {shape}: {hint}")


def save_constants(path, constants, **facts) -> None:
    """Write constants, (G, Dh) each by layer, as keys.N and values.N (1, G, 1, Dh), with `facts` as metadata.

    So a key-value cache of `transformers` holds one token in layer N, counted from 0 (docs/sinks.md).
    """
    tensors = {}
    for layer, (key, value) in constants.items():
        tensors[f"keys.{layer - 1}"] = key[None, :, None].contiguous()
        tensors[f"values.{layer - 1}"] = value[None, :, None].contiguous()
    with atomic_file(path) as temporary:
        save_file(tensors, temporary, {name: str(fact) for name, fact in facts.items()})
