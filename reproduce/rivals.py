"""What do four similarities say of kin and strangers? Intrinsic, REEF, PCS and ICS (BB B.3.2)

    python -m reproduce.rivals nano_llama@42 nano_llama@42:7 nano_llama@43

Kin are models of one birth; the second one here has another token table. Each similarity is a number, and
says kin from 0.8 on. None says what strangers would give, so name a stranger as well. REEF reads random
tokens here, and held-out text in `reproduce/family.py`.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from init import SCHEMES
from lib.checkpoint import check_lengths, final_states, shortest_context
from lib.inputs import random_tokens
from lib.results import Experiment
from lib.runtime import progress
from lib.settings import Command, RunSettings, at_least, run_script
from seedprint import Models, common_vocabulary, comparable_models

RIVALS = ("intrinsic", "reef", "pcs", "ics")
THRESHOLD = 0.8  # of all four (BB B.3.2, after REEF)
TABLES = ("model.embed_tokens", "lm_head")


@dataclass
class Settings(RunSettings):
    """What `python -m reproduce.rivals` can be told."""

    models: Models = ()
    """BASE and SUSPECTs: checkpoint folders, or PRESET@SEED"""
    init: Literal[SCHEMES] = "gpt2"
    """how newborns are drawn"""
    input_seed: int = 0
    """seed of the random sequences"""
    num_sequences: at_least(2) = 200
    """random sequences that REEF reads"""
    sequence_length: int = 64
    """tokens in a sequence"""


def rivals(settings: Settings):
    """What does each rival say of each suspect? Writes rivals.json."""
    specs = comparable_models(settings.models, settings.init)
    T = settings.sequence_length
    check_lengths((T,), shortest_context(specs))
    experiment = Experiment("rivals", "BB B.3.2", settings)
    tokens = random_tokens(settings.input_seed, range(settings.num_sequences), T, common_vocabulary(specs))
    base = specs[0].open()
    rows = []
    for spec in progress(specs[1:], desc="rivals", unit=" suspects"):
        row = {"base": specs[0].name, "suspect": spec.name}
        row |= similarities(base, spec.open(), tokens, experiment.device, experiment.dtype)
        for name in RIVALS:
            row[f"{name}_verdict"] = "kin" if row[name] >= THRESHOLD else "stranger"
        rows.append(row)
    return experiment.save(rows)


def similarities(a, b, tokens, device, dtype):
    """All four of two sources that have attention and MLPs, by name."""
    return {
        "intrinsic": intrinsic(a, b),
        "reef": reef(a, b, tokens, device, dtype),
        "pcs": pcs(a, b),
        "ics": ics(a, b),
    }


def cosine(x, y):
    """Cosine of two tensors of one shape."""
    return ((x * y).sum() / x.norm() / y.norm()).item()


def layer_weight(source, layer, kind):
    """A projection of a layer, (out, in) float32; `kind` is "self_attn.q", "mlp.up" and so on."""
    return source.read(f"model.layers.{layer}.{kind}_proj.weight").float()


def intrinsic(a, b):
    """Correlation over layers of the standard deviations of W_Q, of W_K, of W_V, of W_O; mean of the four.

    Of models of two depths, the deeper one's are interpolated; NaN for a single layer.
    """
    depth = min(a.config.num_layers, b.config.num_layers)
    correlations = []
    for kind in ("q", "k", "v", "o"):
        profiles = [std_profile(source, kind, depth) for source in (a, b)]
        correlations.append(np.corrcoef(profiles)[0, 1])
    return np.mean(correlations)


def std_profile(source, kind, depth):
    """Standard deviation of a kind of matrix by layer, interpolated to `depth` layers."""
    layers = range(source.config.num_layers)
    stds = [layer_weight(source, layer, f"self_attn.{kind}").std().item() for layer in layers]
    return np.interp(np.linspace(0, 1, depth), np.linspace(0, 1, len(stds)), stds)


def reef(a, b, tokens, device, dtype):
    """CKA of the blocks' outputs at the last of tokens (n, T): the mean over matched layers."""
    kernels = [block_kernels(source, tokens, device, dtype) for source in (a, b)]
    return np.mean([cosine(x, y) for x, y in zip(*kernels)])


def block_kernels(source, tokens, device, dtype):
    """`centred_kernel` of the last position's states after each block."""
    kernels = []

    def keep(layer, x) -> None:
        kernels.append(centred_kernel(x[:, -1]))

    final_states(source, tokens, device, dtype, on_state=keep)
    return kernels


def centred_kernel(x):
    """Products of all pairs of rows of (n, d), the columns centred: (n, n) float64. Their cosine is CKA."""
    x = x.double()
    x = x - x.mean(0)
    return x @ x.T


def pcs(a, b):
    """Cosine of all parameters that two sources have alike in name and shape, but for token table and head.

    Gains count: since they are born as 1, strangers are far from orthogonal.
    """
    sums = np.zeros(3)  # of a b, of a a, of b b
    for name, shape in a.shapes.items():
        if not name.startswith(TABLES) and b.shapes.get(name) == shape:
            x = a.read(name).float()
            y = b.read(name).float()
            sums += [product.double().sum().item() for product in (x * y, x * x, y * y)]
    return sums[0] / (sums[1] * sums[2]) ** 0.5


def ics(a, b):
    """Cosine of the two models' X M X', centred, X (n, d) embeddings: mean over the invariant terms M."""
    n = min(4096, a.config.vocab_size, b.config.vocab_size)
    X = a.read("model.embed_tokens.weight")[:n].float()
    Y = b.read("model.embed_tokens.weight")[:n].float()
    cosines = []
    for M, N in zip(invariant_terms(a), invariant_terms(b)):
        x = X @ M @ X.T
        y = Y @ N @ Y.T
        cosines.append(cosine(x - x.mean(), y - y.mean()))
    return np.mean(cosines)


def invariant_terms(source):
    """Q'K, V'O' and U'D' of the last two layers, the last first: (d, d) each.

    Matrices as they are stored, (out, in); key-value heads are repeated for their queries.
    """
    for layer in reversed(range(source.config.num_layers)[-2:]):
        q, k, v, o = (layer_weight(source, layer, f"self_attn.{kind}") for kind in "qkvo")
        yield q.T @ repeat_heads(k, source.config)
        yield repeat_heads(v, source.config).T @ o.T
        yield layer_weight(source, layer, "mlp.up").T @ layer_weight(source, layer, "mlp.down").T


def repeat_heads(weight, config):
    """Key or value rows (G Dh, d), each head's repeated for the queries that share it: (H Dh, d)."""
    heads = weight.unflatten(0, (config.kv_heads, -1))  # (G, Dh, d)
    return heads.repeat_interleave(config.num_heads // config.kv_heads, 0).flatten(0, 1)


COMMANDS = {"": Command(rivals, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
