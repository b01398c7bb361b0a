#!/usr/bin/env bash
# Question: gpt-oss and GraniteSWA both have one learned sink per head, a logit more in the softmax's
#   denominator. Do their rows of output_attentions mean the same?
# Expected from memory: yes; rows sum to 1 less the sink's share in both, since the two forms are one formula.
# Seen: gpt-oss returns the weights with the sink's column dropped, so rows sum to as little as 0.002 here and
#   what is missing is the sink's share. GraniteSWA scales the output by sigmoid(logsumexp - sink) afterwards
#   and returns weights that sum to 1 whatever the sink is: its logits move by several units when the sinks
#   change, its attentions of the first layer not at all. "Share on the sink = 1 - sum of the row" is right
#   for the one and always 0 for the other.
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
from transformers import AutoModelForCausalLM, GptOssConfig, GraniteSWAConfig

shape = dict(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
configs = {
    "gpt-oss": GptOssConfig(head_dim=16, num_local_experts=2, num_experts_per_tok=1, **shape),
    "GraniteSWA": GraniteSWAConfig(**shape),
}
torch.manual_seed(0)
tokens = torch.randint(3, 64, (1, 12))

# The two forms are one: a column more that is dropped, and a scale on the output.
scores, values, sink = torch.randn(5, 7), torch.randn(7, 3), torch.tensor(2.0)
column = torch.cat([scores, sink.expand(5, 1)], dim=1).softmax(-1)[:, :-1] @ values
scaled = (scores.softmax(-1) @ values) * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sink)
assert torch.allclose(column, scaled, atol=1e-6)

for name, config in configs.items():
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    answers = []
    for value in (-100.0, 2.0):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(value)
            answers.append(model(tokens, output_attentions=True))
    off, on = answers
    sums = on.attentions[0].sum(-1)
    moved = (off.logits - on.logits).abs().max().item()
    weights_moved = (off.attentions[0] - on.attentions[0]).abs().max().item()
    print(
        f"{name}: with sinks of 2 rows sum to {sums.min().item():.3f} ... {sums.max().item():.3f}; "
        f"sinks on or off move the logits by {moved:.2f}, the first layer's attentions by {weights_moved:.3f}"
    )
    assert moved > 0.1, moved
    if name == "gpt-oss":
        assert sums.min() < 0.5
        assert torch.allclose(on.attentions[0], off.attentions[0] * sums.unsqueeze(-1), atol=1e-5)
    else:
        assert torch.allclose(sums, torch.ones(()), atol=1e-5)
        assert weights_moved == 0.0
print("as described")
PY
