#!/usr/bin/env bash
# Question: a .gguf of the llama architecture says rope.scaling.type = linear, factor = 8 (as converters write
#   for models whose context was stretched). Does transformers load it with the factor?
# Expected from memory: yes, or an error. The keys are plain metadata, config.json has the same two numbers,
#   and the attention of every layer depends on them.
# Seen: rope_parameters is the default without a factor, nothing is printed at the default level of logging,
#   and the logits are to the bit those of the unscaled model, off by 9 from the scaled one's (logits reach
#   7). Only logging at level INFO names the keys that were passed over.
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
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer in range(LAYERS):
        for theirs, short in BLOCK_NAMES.items():
            names[f"model.layers.{layer}.{theirs}"] = f"blk.{layer}.{short}"
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        if "q_proj" in name:
            weight = interleaved(weight, HEADS)
        if "k_proj" in name:
            weight = interleaved(weight, KV_HEADS)
        writer.add_tensor(names[name.removesuffix(".weight")] + ".weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


torch.manual_seed(0)
plain = LlamaForCausalLM(config()).eval()
scaled = LlamaForCausalLM(config(rope_scaling={"rope_type": "linear", "factor": 8.0})).eval()
scaled.load_state_dict(plain.state_dict())
write(Path(folder) / "model.gguf", plain)
fields = gguf.GGUFReader(Path(folder) / "model.gguf").fields
print("the file says", {key: fields[key].contents() for key in fields if "rope.scaling" in key})

loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
tokens = torch.randint(3, VOCABULARY, (1, 64))
with torch.no_grad():
    logits = loaded(tokens).logits
    from_plain = (logits - plain(tokens).logits).abs().max().item()
    from_scaled = (logits - scaled(tokens).logits).abs().max().item()
print("loaded with", loaded.config.rope_parameters)
print("logits up to", logits.abs().max().item())
print("off the unscaled model by", from_plain, "and off the scaled one by", from_scaled)
assert "factor" not in loaded.config.rope_parameters
assert from_plain < 1e-4, from_plain
assert from_scaled > 1, from_scaled
PY
if grep -i "rope" "$T/stderr"; then echo "something was said of rope: no longer silent"; exit 1; fi
echo "as described"
