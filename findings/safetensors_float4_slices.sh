#!/usr/bin/env bash
# Question: a packed tensor of 4-bit floats (torch.float4_e2m1fn_x2, two values a byte, shape [3, 4]) is saved
#   with safetensors. Can a part of it be read, as of any tensor?
# Expected from memory: yes; reading rows of a large tensor without the rest is what the format is for, and a
#   row is whole bytes.
# Seen: the header counts values, [3, 8], torch counts bytes, [3, 4]. The whole tensor comes back right;
#   get_slice says its shape is [3, 8], and then every slice, of rows or columns and even [:], raises a
#   RuntimeError of a shape that does not fit. The same bytes saved as uint8, and 8-bit floats, can be sliced.
# Versions: safetensors 0.8.0, torch 2.13.0 (CPU), numpy 2.4.6. Seen 2026-11-28.
set -euo pipefail
T="$(mktemp -d)"
trap 'rm -rf "$T"' EXIT
python3 -m venv "$T/v"
"$T/v/bin/pip" install -q --no-compile --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
export OMP_NUM_THREADS=1
"$T/v/bin/python" - "$T" <<'PY'
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

path = sys.argv[1] + "/packed.safetensors"
packed = torch.arange(12, dtype=torch.uint8).view(3, 4)
save_file(
    {
        "float4": packed.view(torch.float4_e2m1fn_x2),
        "float8": packed.clone().view(torch.float8_e4m3fn),
        "bytes": packed.clone(),
    },
    path,
)
slices = {"one row": slice(0, 1), "all": slice(None), "two columns": (slice(None), slice(0, 2))}
with safe_open(path, "pt") as file:
    for name in ("bytes", "float8"):
        for where in slices.values():
            assert torch.equal(file.get_slice(name)[where].view(torch.uint8), packed[where])
    whole = file.get_tensor("float4")
    part = file.get_slice("float4")
    print("tensor", list(whole.shape), "get_slice says", part.get_shape())
    assert torch.equal(whole.view(torch.uint8), packed)
    assert part.get_shape() == [3, 8]
    for name, where in slices.items():
        try:
            part[where]
        except RuntimeError as error:
            print(name, "->", error)
        else:
            raise SystemExit(f"{name} can be read now")
print("as described")
PY
