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
from lib.settings import Command, RunSettings, UserError, at_least, run_script
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
    """All four of two sources, by name; UserError for models without attention or MLP."""
    if a.config.sublayers != "full" or b.config.sublayers != "full":
        raise UserError("the rivals need models with attention and MLP")
    return {
        "intrinsic": intrinsic(a, b),
        "reef": reef(a, b, tokens, device, dtype),
        "pcs": pcs(a, b),
        "ics": ics(a, b),
    }


def layer_weight(source, layer, kind):
    """A projection of a layer, (out, in) float32; `kind` is "self_attn.q", "mlp.up" and so on."""
    return source.read(f"model.layers.{layer}.{kind}_proj.weight").float()


def intrinsic(a, b):
    """Correlation over layers of the standard deviations of W_Q, of W_K, of W_V, of W_O; mean of the four."""
    depth = min(a.config.num_layers, b.config.num_layers)
    correlations = []
    for kind in ("q", "k", "v", "o"):
        x = std_profile(a, kind, depth)
        y = std_profile(b, kind, depth)
        if x.std() == 0 or y.std() == 0:  # as of a single layer
            correlations.append(0.0)
        else:
            correlations.append(np.corrcoef(x, y)[0, 1])
    return np.mean(correlations)


def std_profile(source, kind, depth):
    """Standard deviation of a kind of matrix by layer, interpolated to `depth` layers."""
    stds = []
    for layer in range(source.config.num_layers):
        stds.append(layer_weight(source, layer, f"self_attn.{kind}").std().item())
    return np.interp(np.linspace(0, 1, depth), np.linspace(0, 1, len(stds)), stds)


def reef(a, b, tokens, device, dtype):
    """CKA of the blocks' outputs at the last of tokens (n, T): the mean over matched layers."""
    outputs_a = block_outputs(a, tokens, device, dtype)
    outputs_b = block_outputs(b, tokens, device, dtype)
    return np.mean([cka(x, y) for x, y in zip(outputs_a, outputs_b)])


def block_outputs(source, tokens, device, dtype):
    """Last-position states after each block, (n, d) float32 each."""
    outputs = []

    def keep(layer, x) -> None:
        outputs.append(x[:, -1].float().clone())

    final_states(source, tokens, device, dtype, on_state=keep)
    return outputs


def cka(x, y):
    """Linear centred kernel alignment of features (n, d1) and (n, d2)."""
    kernel_x = centred_kernel(x)
    kernel_y = centred_kernel(y)
    product = (kernel_x * kernel_y).sum()
    norms = kernel_x.norm() * kernel_y.norm()
    return (product / norms.clamp(min=1e-300)).item()


def centred_kernel(x):
    """Products of all pairs of rows of (n, d), the columns centred: (n, n) float64."""
    x = x.double()
    x = x - x.mean(0)
    return x @ x.T


def pcs(a, b):
    """Cosine of all parameters that two sources have alike in name and shape, but for token table and head.

    Gains count: since they are born as 1, strangers are far from orthogonal.
    """
    sums = np.zeros(3)  # of a b, of a a, of b b
    for name, shape in a.shapes.items():
        if name.startswith(TABLES) or b.shapes.get(name) != shape:
            continue
        x = a.read(name).float()
        y = b.read(name).float()
        for i, product in enumerate((x * y, x * x, y * y)):
            sums[i] += product.double().sum().item()
    dot, square_a, square_b = sums
    return dot / max((square_a * square_b) ** 0.5, 1e-300)


def ics(a, b):
    """Cosine of the two models' X M X', centred, X (n, d) embeddings: mean over the invariant terms M."""
    n = min(4096, a.config.vocab_size, b.config.vocab_size)
    X = a.read("model.embed_tokens.weight")[:n].float()
    Y = b.read("model.embed_tokens.weight")[:n].float()
    cosines = []
    for M, N in zip(invariant_terms(a), invariant_terms(b)):
        xy = centred_product(X, M, Y, N)
        xx = centred_product(X, M, X, M)
        yy = centred_product(Y, N, Y, N)
        cosines.append(xy / max(xx * yy, 1e-300) ** 0.5)
    return np.mean(cosines)


def centred_product(X, M, Y, N):
    """Sum of the entries of X M X', centred, times those of Y N Y'; X and Y are (n, d), M and N (d, d).

    Nothing (n, n) is made: with G = X'Y, the sum is that of the entries of M times those of G N G'.
    """
    G = X.T @ Y
    total = (M * (G @ N @ G.T)).double().sum().item()
    x = X.sum(0)
    y = Y.sum(0)
    mean_x = (x @ M @ x).item() / len(X)
    mean_y = (y @ N @ y).item() / len(Y)
    return total - mean_x * mean_y  # centring takes the means away


def invariant_terms(source):
    """Q'K, V'O' and U'D' of the last two layers, the last first: (d, d) each.

    Matrices as they are stored, (out, in); key-value heads are repeated for their queries.
    """
    for layer in reversed(range(source.config.num_layers)[-2:]):
        q = layer_weight(source, layer, "self_attn.q")
        k = repeat_heads(layer_weight(source, layer, "self_attn.k"), source.config)
        yield q.T @ k
        v = repeat_heads(layer_weight(source, layer, "self_attn.v"), source.config)
        o = layer_weight(source, layer, "self_attn.o")
        yield v.T @ o.T
        up = layer_weight(source, layer, "mlp.up")
        down = layer_weight(source, layer, "mlp.down")
        yield up.T @ down.T


def repeat_heads(weight, config):
    """Key or value rows (G Dh, d), each head's repeated for the queries that share it: (H Dh, d)."""
    heads = weight.unflatten(0, (config.kv_heads, -1))  # (G, Dh, d)
    return heads.repeat_interleave(config.num_heads // config.kv_heads, 0).flatten(0, 1)


COMMANDS = {"": Command(rivals, Settings())}

if __name__ == "__main__":
    run_script(COMMANDS, __doc__)
