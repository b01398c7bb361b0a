#!/usr/bin/env bash
# Question: two texts of six tokens are packed into one row, position_ids start again at 0. Are they kept
#   apart? And does use_cache, on by default, matter for it?
# Expected from memory: either they are kept apart or they are not. use_cache only says whether keys and
#   values are handed back for later calls; a single forward pass gives the same logits with and without.
# Seen: with use_cache=False the library recognises the packing and each text is read alone (equal to two
#   calls to 4e-6). By default, in training mode as well, a cache is made before the mask, packing is looked
#   for only where there is none, and the second text sees the first: logits are off by 6. Without packing
#   use_cache changes nothing. A mask of ones beside use_cache=False also joins the two texts. eager and sdpa
#   alike; nothing is printed.
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
from transformers import AutoModelForCausalLM, LlamaConfig

half = 6
tokens = torch.randint(3, 64, (1, 2 * half), generator=torch.Generator().manual_seed(0))
packed = torch.arange(half).repeat(2).unsqueeze(0)
ones = torch.ones_like(tokens)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    initializer_range=0.2,
)


def off(model, apart, **options):
    """Largest difference of the packed row's logits from those of the two texts read in two calls."""
    return (model(tokens, position_ids=packed, **options).logits - apart).abs().max().item()


for attention in ("eager", "sdpa"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        apart = torch.cat([model(tokens[:, :half]).logits, model(tokens[:, half:]).logits], dim=1)
        default = off(model, apart)
        no_cache = off(model, apart, use_cache=False)
        no_cache_ones = off(model, apart, use_cache=False, attention_mask=ones)
        model.train()
        training = off(model, apart)
        model.eval()
        unpacked = (model(tokens).logits - model(tokens, use_cache=False).logits).abs().max().item()
    print(
        f"{attention}: default {default:.3g}, training {training:.3g}, use_cache=False {no_cache:.3g}, "
        f"and a mask of ones {no_cache_ones:.3g}; not packed, with and without cache {unpacked:.3g}"
    )
    assert no_cache < 1e-4
    assert unpacked < 1e-4
    assert min(default, training, no_cache_ones) > 0.1
print("as described")
PY
