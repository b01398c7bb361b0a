#!/usr/bin/env bash
# Question: a .gguf of the llama architecture holds biases of q, k, v and the output projection (as files of
#   models with attention_bias do). Does transformers load them, or say which tensors it left?
# Expected from memory: either. output_loading_info exists to name keys that were missing or unexpected.
# Seen: the eight biases are dropped. missing_keys, unexpected_keys, mismatched_keys and error_msgs are all
#   empty, nothing is printed at the default level of logging, and the logits are those of the model whose
#   biases are zero, off by 8 from the true ones.
# Versions: transformers 5.20.2, gguf 0.19.0, accelerate 1.15.0, torch 2.13.0 (CPU), numpy 2.4.6. Seen
#   2026-11-28.
set -euo pipefail
T="$(mktemp -d)"
trap 'rm -rf "$T"' EXIT
python3 -m venv "$T/v"
"$T/v/bin/pip" install -q --no-compile --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 transformers==5.20.2 gguf==0.19.0 accelerate==1.15.0
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$T/v/bin/python" - "$T" 2>"$T/stderr" <<'PY' || { cat "$T/stderr"; exit 1; }
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

folder = sys.argv[1]
LAYERS, HEADS, KV_HEADS, WIDTH, INNER, VOCABULARY = 2, 4, 2, 64, 96, 260
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config(**more):
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INNER,
        initializer_range=0.2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        **more,
    )


def interleaved(weight, heads):
    """Rows of a query or key matrix in GGUF's order: rotated pairs side by side, not half a head apart."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, model):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer in range(LAYERS):
        for theirs, short in BLOCK_NAMES.items():
            names[f"model.layers.{layer}.{theirs}"] = f"blk.{layer}.{short}"
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        module, _, kind = name.rpartition(".")
        if "q_proj" in name or "k_proj" in name:
            heads = HEADS if "q_proj" in name else KV_HEADS
            weight = interleaved(weight.reshape(len(weight), -1), heads).reshape(weight.shape)
        writer.add_tensor(f"{names[module]}.{kind}", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


torch.manual_seed(0)
model = LlamaForCausalLM(config(attention_bias=True)).eval()
without = LlamaForCausalLM(config()).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
without.load_state_dict({name: x for name, x in model.state_dict().items() if not name.endswith("bias")})
write(Path(folder) / "model.gguf", model)
tensors = gguf.GGUFReader(Path(folder) / "model.gguf").tensors
print("the file holds", [tensor.name for tensor in tensors if tensor.name.endswith("bias")])

loaded, info = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file="model.gguf", dtype=torch.float32, output_loading_info=True
)
loaded.eval()
tokens = torch.randint(3, VOCABULARY, (1, 64))
with torch.no_grad():
    logits = loaded(tokens).logits
    from_true = (logits - model(tokens).logits).abs().max().item()
    from_without = (logits - without(tokens).logits).abs().max().item()
print("loading info", {key: sorted(map(str, found)) for key, found in info.items()})
print("off the true model by", from_true, "and off the one without biases by", from_without)
assert not any(info.values()), info
assert from_without < 1e-4, from_without
assert from_true > 1, from_true
PY
if grep -i "bias" "$T/stderr"; then echo "something was said of biases: no longer silent"; exit 1; fi
echo "as described"
