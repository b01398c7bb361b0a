"""Which architectures does the lens read? Every causal language model of `transformers`, tiny and random. (ours)

    python -m reproduce.architectures                      # writes docs/architectures.md: five minutes
    python -m reproduce.architectures llama gpt2           # prints what is found of these, and writes nothing

A model of each type is built with random weights, and read through `sources/lens.py`. At 24 positions, beyond
its window of 8, it is compared with itself as it is: the mean attention of each head with its own eager
weights, states with its `hidden_states`, and a hidden unit at zero with a model whose weight of that unit is
zero. At 7 positions a constant that is position 1's own key and value has to receive what position 1 does.
"""

import contextlib
import copy
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lib.settings import UserError
from sources.check import check
from sources.lens import Lens

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
V, d, H, G, L = 256, 64, 4, 2, 4
SIZES = {  # of all kinds of names
    V: ("vocab_size", "vocab_size_per_layer_input"),
    d: ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"),
    96: ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"),
    48: ("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"),
    L: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    H: ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
    G: ("num_key_value_heads", "o_groups", "index_n_heads", "max_window_layers", "num_experts_per_tok", "moe_k"),
    16: ("head_dim", "attention_head_dim", "v_head_dim", "mamba_d_head", "mamba_head_dim", "linear_key_head_dim"),
    128: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size"),
    8: ("sliding_window", "attention_window", "local_attention", "window_size", "rotary_dim", "qk_rope_head_dim"),
    4: ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "conv_kernel"),
    2: ("n_mamba_heads", "linear_num_key_heads", "eos_token_id"),
    1: ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "bos_token_id"),
    32: ("q_lora_rank", "kv_lora_rank"),
    0: ("pad_token_id", "num_kv_shared_layers", "num_nextn_predict_layers"),
}
SIZES[H] += ("linear_num_value_heads",)
SIZES[8] += ("qk_nope_head_dim", "state_size", "mamba_d_state", "mamba_n_heads", "mamba_num_heads", "chunk_size")
SIZES[8] += ("time_step_rank", "mamba_dt_rank")
SIZES[16] += ("linear_value_head_dim", "index_head_dim", "index_topk", "o_lora_rank", "hidden_size_per_layer_input")
