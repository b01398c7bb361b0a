#!/usr/bin/env bash
# Question: a forward hook zeroes the output of layer 1 of 3. Does output_hidden_states show it?
# Expected from memory: yes. The logits obey the hook, and hidden_states are what passes from layer to layer.
# Seen: it depends on whether hidden states were ever asked for before. The library records them by forward
#   hooks of its own, which it installs at the first call that asks, and torch runs hooks in order of
#   registration. My hook first, then the first call: hidden_states[2] is zero. A call first, then my hook:
#   hidden_states[2] is the output before my hook, though the logits are equal in both. So a look at the model
#   before the experiment changes what the experiment records. register_forward_hook(..., prepend=True) is
#   seen in both orders.
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
from transformers import LlamaConfig, LlamaForCausalLM

tokens = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def zero(module, args, output):
    return torch.zeros_like(output)


@torch.no_grad()
def run(look_first, prepend=False):
    """Logits, and the largest entry of each of the hidden states, under the hook."""
    model = build()
    if look_first:
        model(tokens, output_hidden_states=True)
    model.model.layers[1].register_forward_hook(zero, prepend=prepend)
    answer = model(tokens, output_hidden_states=True)
    return answer.logits, [state.abs().max().item() for state in answer.hidden_states]


logits_hook_first, hook_first = run(look_first=False)
logits_look_first, look_first = run(look_first=True)
prepended = run(look_first=True, prepend=True)[1]
print("hook, then the first call ", hook_first)
print("a call, then the hook     ", look_first)
print("a call, then it, prepended", prepended)
assert torch.equal(logits_hook_first, logits_look_first)
assert hook_first[2] == 0.0
assert look_first[2] > 1.0
assert prepended == hook_first
print("as described")
PY
