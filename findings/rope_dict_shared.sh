#!/usr/bin/env bash
# Question: two configs, with rope_theta 10,000 and 500,000, are given one dict {"rope_type": "linear",
#   "factor": 8} as rope_scaling, as a constant of a script is. Does each keep its own rope_theta?
# Expected from memory: yes. A config reads its arguments and does not write into them.
# Seen: the second has rope_theta 10,000, in silence. The first config keeps the caller's dict itself as
#   rope_parameters and writes its rope_theta into it; the second finds it there, and the dict's wins over the
#   argument. Frequencies of the second model are those of 10,000, and its logits are off by 3. A later change
#   in one config's rope_parameters is also one in the other's. With a copy for each all is right.
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

shape = dict(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    initializer_range=0.2,
)
tokens = torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(config):
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()(tokens).logits


scaling = {"rope_type": "linear", "factor": 8.0}
own = LlamaConfig(rope_theta=500_000.0, rope_scaling=dict(scaling), **shape)
first = LlamaConfig(rope_theta=10_000.0, rope_scaling=scaling, **shape)
print("the caller's dict after one config:", scaling)
second = LlamaConfig(rope_theta=500_000.0, rope_scaling=scaling, **shape)
print("the second, asked for 500,000:     ", second.rope_parameters)
print("with a dict of its own:            ", own.rope_parameters)
off = (logits(second) - logits(own)).abs().max().item()
print("logits of the second off by", off)
assert scaling["rope_theta"] == 10_000.0
assert second.rope_parameters["rope_theta"] == 10_000.0
assert own.rope_parameters["rope_theta"] == 500_000.0
assert second.rope_parameters is first.rope_parameters
assert torch.equal(logits(second), logits(first))
assert off > 0.1, off
print("as described")
PY
