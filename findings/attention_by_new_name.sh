#!/usr/bin/env bash
# Question: the library's own eager attention, registered once more in AttentionInterface under a name of mine
#   and asked for by that name: does the model answer as with attn_implementation="eager"?
# Expected from memory: to the bit; it is the same function, and the mask is the model's affair.
# Seen: the function is called with attention_mask=None in every layer, so the decoder sees the future: logits
#   are off by 7 at the most, by 2 at the last position. A mask of ones, or of real padding, given to the
#   model is dropped with it. Masks are made by a second table, AttentionMaskInterface, that has no entry of
#   that name; nothing is printed. After one more line, which registers a mask of that name, the answer is
#   eager's to the bit.
# Versions: transformers 5.20.2, torch 2.13.0 (CPU), numpy 2.4.6. Seen 2026-11-28.
set -euo pipefail
T="$(mktemp -d)"
trap 'rm -rf "$T"' EXIT
python3 -m venv "$T/v"
"$T/v/bin/pip" install -q --no-compile --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 transformers==5.20.2
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$T/v/bin/python" - <<'PY'
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

masks = []


def mine(module, query, key, value, attention_mask, **options):
    masks.append(attention_mask)
    return eager_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register("mine", mine)


def build(attention):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


tokens = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))
ones = torch.ones_like(tokens)
padded = ones.clone()
padded[0, :4] = 0
eager = build("eager")
same = build("mine")
with torch.no_grad():
    for name, mask in (("no mask", None), ("ones", ones), ("four of padding", padded)):
        masks.clear()
        right = eager(tokens, attention_mask=mask).logits
        off = (same(tokens, attention_mask=mask).logits - right).abs()
        print(name, "| off by", off.max().item(), "| at the last position", off[0, -1].max().item())
        assert masks == [None] * 3
        assert off[0, -1].max() > 0.1

    AttentionMaskInterface.register("mine", eager_mask)
    for mask in (None, ones, padded):
        masks.clear()
        right = eager(tokens, attention_mask=mask).logits
        assert torch.equal(same(tokens, attention_mask=mask).logits, right)
        assert all(isinstance(seen, torch.Tensor) for seen in masks)
print("with a mask function of that name: equal")
print("as described")
PY
