#!/usr/bin/env bash
# Question: the same tensors are saved with the same metadata, of several entries, again and again. Are the files
#   the same to the last byte, as whoever compares checkpoints by their SHA-256 takes for granted?
# Expected from memory: yes; the header's tensors are sorted, and a Python dictionary keeps its order.
# Seen: with one entry of metadata all files are equal. With three entries they come in several versions, even
#   within one process: the entries stand in another order from save to save. Tensors and their order are equal.
# Versions: safetensors 0.8.0, numpy 2.4.6. Seen 2026-11-29.
set -euo pipefail
T="$(mktemp -d)"
trap 'rm -rf "$T"' EXIT
python3 -m venv "$T/v"
"$T/v/bin/pip" install -q --no-compile --disable-pip-version-check numpy==2.4.6 safetensors==0.8.0
"$T/v/bin/python" - <<'PY'
import hashlib
import json

import numpy as np
from safetensors.numpy import save

tensors = {"a": np.arange(3.0), "b": np.arange(4.0)}
found = {}
for count in (1, 3):
    metadata = {name: "x" for name in ("format", "step", "data")[:count]}
    files = [save(tensors, metadata) for _ in range(40)]
    headers = [json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")]) for file in files]
    assert all(header == headers[0] for header in headers)  # as JSON they are one
    found[count] = len({hashlib.sha256(file).hexdigest() for file in files})
    print(f"{count} entries: {found[count]} different files of 40")
assert found[1] == 1
assert 1 < found[3] <= 6  # orders of three entries
PY
