#!/usr/bin/env bash
# Question: a cache of one entry (a constant key and value in front of every layer, as a learned prefix has)
#   is given to model.generate(prompt, past_key_values=cache). Is the whole prompt read behind that entry?
# Expected from memory: yes. model(prompt, past_key_values=cache) reads all 12 tokens, at positions 1 to 12.
# Seen: generate drops the first token of the prompt, in silence: as many tokens as the cache has entries. It
#   takes them to be those in the cache, so 11 tokens stand at positions 1 to 11 and the logits are off. The
#   tokenizer's mask of 12 ones changes nothing. With a mask of 13 ones nothing is dropped and the logits are
#   those of the call.
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
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

layers, kv_heads, head_dim, length = 3, 2, 16, 12
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=layers,
    num_attention_heads=4,
    num_key_value_heads=kv_heads,
    intermediate_size=96,
    initializer_range=0.2,
    pad_token_id=0,
)
model = AutoModelForCausalLM.from_config(config).eval()
prompt = torch.randint(3, 64, (1, length))
entry = torch.randn(1, kv_heads, 1, head_dim)


def prefix():
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(entry.clone(), entry.clone(), layer)
    return cache


seen = []


def note(module, args, kwargs):
    seen.append((kwargs["input_ids"][0].tolist(), kwargs["position_ids"]))


with torch.no_grad():
    called = model(prompt, past_key_values=prefix()).logits[0, -1]
    without_first = model(
        prompt[:, 1:], past_key_values=prefix(), position_ids=torch.arange(1, length).unsqueeze(0)
    ).logits[0, -1]
model.model.register_forward_pre_hook(note, with_kwargs=True)


def generated(**options):
    """Tokens that the first step read, and how far its logits are from the plain call's."""
    seen.clear()
    answer = model.generate(
        prompt,
        past_key_values=prefix(),
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    tokens, positions = seen[0]
    print(len(tokens), "tokens read, positions", positions[0].tolist())
    return tokens, answer.logits[0][0]


for options in ({}, {"attention_mask": torch.ones(1, length, dtype=torch.long)}):
    tokens, logits = generated(**options)
    off = (logits - called).abs().max().item()
    print("   off the call by", off)
    assert tokens == prompt[0, 1:].tolist()
    assert off > 0.1
    assert torch.allclose(logits, without_first, atol=1e-4)
tokens, logits = generated(attention_mask=torch.ones(1, 1 + length, dtype=torch.long))
print("   off the call by", (logits - called).abs().max().item())
assert tokens == prompt[0].tolist()
assert torch.allclose(logits, called, atol=1e-4)
print("as described")
PY
