"""Four published similarities of two models: intrinsic, REEF, PCS and ICS (BB B.3.2).

Each calls two models related from 0.8 on. None says what unrelated models give, so compute those as well.
`python -m reproduce.lineage tables runs/lineage` does it for all pairs of BB's tables.
"""

import numpy as np
import torch

BASELINES = ("intrinsic", "reef", "pcs", "ics")
THRESHOLD = 0.8  # of all four (BB B.3.2, after REEF)
TABLES = ("model.embed_tokens", "lm_head")


@torch.inference_mode()
def similarities(a, b, tokens):
    """All four similarities of two models, by name; REEF reads tokens (n, T)."""
    return {"intrinsic": intrinsic(a, b), "reef": reef(a, b, tokens), "pcs": pcs(a, b), "ics": ics(a, b)}


def cosine(x, y):
    """The cosine of two flattened tensors."""
    return ((x * y).sum() / x.norm() / y.norm()).item()


def layer_weight(model, layer, kind):
    """A projection, (out, in) float32, of a layer (from 0); `kind` is "self_attn.q", "mlp.up", ..."""
    return model.get_parameter(f"model.layers.{layer}.{kind}_proj.weight").float()


def intrinsic(a, b):
    """Correlation over layers of the standard deviations of W_Q, W_K, W_V and W_O; mean of the four."""
    correlations = []
    for kind in "qkvo":
        profiles = []
        for model in (a, b):
            layers = range(model.config.num_layers)
            weights = [layer_weight(model, layer, f"self_attn.{kind}") for layer in layers]
            profiles.append([weight.std().item() for weight in weights])
        correlations.append(np.corrcoef(*profiles)[0, 1])
    return np.mean(correlations)


def reef(a, b, tokens):
    """CKA of the blocks' outputs at the last of tokens (n, T), mean over layers."""
    return np.mean([cosine(x, y) for x, y in zip(block_kernels(a, tokens), block_kernels(b, tokens))])


def block_kernels(model, tokens):
    """Products of all pairs of centered last states after each block, (L, n, n); their cosine is CKA."""
    states = []
    model.hidden(tokens, last_only=True, on_state=lambda layer, x: states.append(x[:, -1].double()))
    x = torch.stack(states[1:])  # (L, n, d), without the embeddings
    x = x - x.mean(1, keepdim=True)
    return x @ x.mT


def pcs(a, b):
    """Cosine of all parameters but embeddings and head; all gains begin at 1, so it is far from 0."""
    parameters = []
    for model in (a, b):
        chosen = [x.double().flatten() for name, x in model.named_parameters() if not name.startswith(TABLES)]
        parameters.append(torch.cat(chosen))
    return cosine(*parameters)


def ics(a, b):
    """Cosine of the models' centered X M X', X (n, d) embeddings, mean over the invariant terms M."""
    n = min(4096, a.config.vocab_size, b.config.vocab_size)
    return np.mean([cosine(x, y) for x, y in zip(invariant_maps(a, n), invariant_maps(b, n))])


def invariant_maps(model, n):
    """Yield the centered X M X' for M = Q'K, V'O' and U'D' of the last two layers, last first."""
    X = model.model.embed_tokens.weight[:n].float()
    for layer in reversed(range(model.config.num_layers)[-2:]):
        q, k, v, o = (layer_weight(model, layer, f"self_attn.{kind}") for kind in "qkvo")
        up, down = (layer_weight(model, layer, f"mlp.{kind}") for kind in ("up", "down"))
        k = k.unflatten(0, (model.config.kv_heads, -1))  # (G, Dh, d)
        v = v.unflatten(0, (model.config.kv_heads, -1))
        times = model.config.num_heads // model.config.kv_heads  # that heads share them
        k = k.repeat_interleave(times, 0).flatten(0, 1)  # (H Dh, d)
        v = v.repeat_interleave(times, 0).flatten(0, 1)
        for M in (q.T @ k, v.T @ o.T, up.T @ down.T):  # (d, d), of stored matrices
            x = X @ M @ X.T  # (n, n)
            yield x - x.mean()
