#!/usr/bin/env bash
# Question: does output_attentions=True change what a Falcon computes? (A model with rotary positions, built
#   as the library builds it by default, that is with sdpa; no mask given, or a mask of ones.)
# Expected from memory: no. Weights are asked for, so the layer computes them explicitly, with the same mask.
# Seen: the model is no longer causal. The mask made for sdpa is boolean, and the explicit path adds it to the
#   scores: a visible key gets +1, a hidden one +0, in place of 0 and -inf. With scores of zero a row is e : 1
#   between visible and hidden keys. A change of the last token moves earlier logits by 4. Nothing is printed.
#   With attn_implementation="eager" the same call is right.
# Versions: transformers 5.20.2, torch 2.13.0 (CPU), numpy 2.4.6. Seen 2026-11-28.
set -euo pipefail
T="$(mktemp -d)"
trap 'rm -rf "$T"' EXIT
python3 -m venv "$T/v"
"$T/v/bin/pip" install -q --no-compile --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 transformers==5.20.2
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$T/v/bin/python" - <<'PY'
import math

import torch
from transformers import AutoModelForCausalLM, FalconConfig

length = 12
tokens = torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(0))
changed = tokens.clone()
changed[0, -1] = (tokens[0, -1] + 1) % 64


def build(attention):
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@torch.no_grad()
def change_of_the_past(**options):
    """How far all logits but the last move when only the last token is another."""
    return (model(tokens, **options).logits - model(changed, **options).logits)[:, :-1].abs().max().item()


ones = torch.ones_like(tokens)
model = build(None)
print("attention by default:", model.config._attn_implementation)
causal = change_of_the_past()
asked = change_of_the_past(output_attentions=True)
asked_with_mask = change_of_the_past(output_attentions=True, attention_mask=ones)
print("past logits move by", causal, "and, asked for weights,", asked, "with a mask of ones", asked_with_mask)
assert causal == 0.0
assert asked > 0.1
assert asked_with_mask > 0.1

model = build("eager")
eager = change_of_the_past(output_attentions=True)
print("built with eager and asked for weights:", eager)
assert eager == 0.0

model = build(None)
with torch.no_grad():
    weights = model(tokens, output_attentions=True).attentions
    later = [layer.triu(1).sum(-1).mean().item() for layer in weights]
    print("mean weight on later keys, by layer", later)
    assert min(later) > 0.1, later

    for layer in model.transformer.h:
        layer.self_attention.query_key_value.weight.zero_()
    row = model(tokens, output_attentions=True).attentions[0][0, 0]
    visible = torch.ones(length, length).tril()
    expected = torch.softmax(visible, dim=-1)
    print("scores of zero: visible over hidden key", (row[0, 0] / row[0, 1]).item())
    assert math.isclose(row[0, 0] / row[0, 1], math.e, rel_tol=1e-5)
    assert torch.allclose(row, expected, atol=1e-6)

print("as described")
PY
