"""What do four published similarities say of two models? Intrinsic, REEF, PCS and ICS (BB B.3.2)

Each is a number, and calls two models related from 0.8 on. None says what unrelated models would give, so ask
for these as well. `python -m reproduce.trainings lineage` asks for all pairs of BB's tables.
"""

import numpy as np
import torch

BASELINES = ("intrinsic", "reef", "pcs", "ics")
THRESHOLD = 0.8  # of all four (BB B.3.2, after REEF)
TABLES = ("model.embed_tokens", "lm_head")


@torch.inference_mode()
def similarities(a, b, tokens):
    """All four of two models with attention and MLPs, by name; REEF reads tokens (n, T)."""
    return {
        "intrinsic": intrinsic(a, b),
        "reef": reef(a, b, tokens),
        "pcs": pcs(a, b),
        "ics": ics(a, b),
    }


def cosine(x, y):
    """The cosine of two tensors, all numbers of each in a row."""
    return ((x * y).sum() / x.norm() / y.norm()).item()


def layer_weight(model, layer, kind):
    """A projection of a layer from 0, (out, in) float32; `kind` is "self_attn.q", "mlp.up" and so on."""
    return model.get_parameter(f"model.layers.{layer}.{kind}_proj.weight").float()


def intrinsic(a, b):
    """Correlation over layers of the standard deviations of W_Q, of W_K, of W_V, of W_O; mean of the four."""
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
    """CKA of the blocks' outputs at the last of tokens (n, T): the mean over layers of one number."""
    kernels = zip(block_kernels(a, tokens), block_kernels(b, tokens))
    return np.mean([cosine(x, y) for x, y in kernels])


def block_kernels(model, tokens):
    """Products of all pairs of last states after each block, centred: (L, n, n). Their cosine is CKA."""
    states = []
    model.hidden(tokens, last_only=True, on_state=lambda layer, x: states.append(x[:, -1].double()))
    x = torch.stack(states[1:])  # (L, n, d); the first is of the embeddings
    x = x - x.mean(1, keepdim=True)
    return x @ x.mT


def pcs(a, b):
    """Cosine of all parameters but embeddings and head; gains are born as 1, so strangers are far from 0."""
    parameters = []
    for model in (a, b):
        chosen = [x.double().flatten() for name, x in model.named_parameters() if not name.startswith(TABLES)]
        parameters.append(torch.cat(chosen))
    return cosine(*parameters)


def ics(a, b):
    """Cosine of the two models' X M X', centred, X (n, d) embeddings: mean over the invariant terms M."""
    n = min(4096, a.config.vocab_size, b.config.vocab_size)
    X = a.model.embed_tokens.weight[:n].float()
    Y = b.model.embed_tokens.weight[:n].float()
    cosines = []
    for M, N in zip(invariant_terms(a), invariant_terms(b)):
        x = X @ M @ X.T  # (n, n)
        y = Y @ N @ Y.T
        cosines.append(cosine(x - x.mean(), y - y.mean()))
    return np.mean(cosines)


def invariant_terms(model):
    """Q'K, V'O' and U'D' of the last two layers, the last first, of matrices as they are stored: (d, d)."""
    for layer in reversed(range(model.config.num_layers)[-2:]):
        q, k, v, o = (layer_weight(model, layer, f"self_attn.{kind}") for kind in "qkvo")
        yield q.T @ repeat_heads(k, model.config)
        yield repeat_heads(v, model.config).T @ o.T
        yield layer_weight(model, layer, "mlp.up").T @ layer_weight(model, layer, "mlp.down").T


def repeat_heads(weight, config):
    """Key or value rows (G Dh, d), each head's repeated for the queries that share it: (H Dh, d)."""
    heads = weight.unflatten(0, (config.kv_heads, -1))  # (G, Dh, d)
    return heads.repeat_interleave(config.num_heads // config.kv_heads, 0).flatten(0, 1)
