#!/usr/bin/env bash
# Question: weights of -1, 0 and 1 (a ternary model) are quantised with gguf's Q4_0, Q4_1, Q5_0, Q5_1. Do the
#   three values come back? The scale is the block's own, there are 16 or 32 codes for three values, and 1/8
#   is a float16.
# Expected from memory: yes, exactly, or nearly so; at the least 0 stays 0 and -1 is the mirror of 1.
# Seen: no form keeps them. Q4_0 has codes -8 to 7 and gives the 8 to whichever of -1 and 1 comes FIRST in a
#   block of 32: the other one comes back as 0.875 of itself (Q5_0: 0.9375). Q4_1 and Q5_1 keep both ends (to
#   5e-4), but no code is 0: all zeros return as -0.067 and as 0.032 (at scale 0.02 Q4_1's as +0.066), so what
#   was sparse is dense. MXFP4, smaller than Q4_0, is exact; at scale 0.02 it is off by 17 %, for its scales
#   are powers of 2.
# Versions: gguf 0.19.0, numpy 2.4.6. Seen 2026-11-28.
set -euo pipefail
T="$(mktemp -d)"
trap 'rm -rf "$T"' EXIT
python3 -m venv "$T/v"
"$T/v/bin/pip" install -q --no-compile --disable-pip-version-check \
  gguf==0.19.0 numpy==2.4.6
export OMP_NUM_THREADS=1
"$T/v/bin/python" - <<'PY'
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import dequantize, quantize

ternary = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], size=(64, 32)).astype(np.float32)


def after(kind, scale=1.0):
    """The ternary weights, through the quantiser at this scale and back."""
    weights = ternary * np.float32(scale)
    return dequantize(quantize(weights, kind), kind) / np.float32(scale)


for kind in (Type.Q4_0, Type.Q5_0, Type.Q4_1, Type.Q5_1, Type.MXFP4):
    for scale in (1.0, 0.02):
        values = np.unique(after(kind, scale).astype(np.float64).round(4))
        print(kind.name, "at scale", scale, "gives", values.tolist())

first = np.array([row[row != 0][0] for row in ternary])[:, None]
for kind, clipped in ((Type.Q4_0, 0.875), (Type.Q5_0, 0.9375)):
    expected = np.where(ternary == -first, clipped * ternary, ternary)
    assert np.array_equal(after(kind), expected), kind
for kind, zero in ((Type.Q4_1, -0.067), (Type.Q5_1, 0.032)):
    back = after(kind)
    assert np.allclose(back[ternary == 0], zero, atol=1e-3), kind
    assert np.allclose(back[ternary != 0], ternary[ternary != 0], atol=1e-3), kind
assert np.array_equal(after(Type.MXFP4), ternary)
assert np.isclose(np.abs(after(Type.Q4_0, 0.02)), 0.875, atol=1e-3).any()
assert np.isclose(np.abs(after(Type.MXFP4, 0.02)).max(), 1.1719, atol=1e-3)
print("as described")
PY
