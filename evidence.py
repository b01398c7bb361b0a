"""What do two models share, and could it be chance? Exact tests of their states and weights.

    >>> import evidence, checkpoint
    >>> a, b = checkpoint.tensors("nano_llama@42"), checkpoint.tensors("nano_llama@43")
    >>> C, skipped = evidence.weight_correlation(a, b)          # {"body": (d, d), "embedding": (d, d)}
    >>> evidence.diagonal_test(C["body"], ("body", 0))["z"]     # near 0: strangers

Birth draws every coordinate of the residual stream alike, and element-wise optimisers treat them alike:
without a common birth, a trained model is as likely as itself with its coordinates relabelled. So it is with
the hidden units of each MLP. Relabelling one of two models therefore gives the exact distribution of whatever
compares them, however trained and however dependent the rows (ours; BB compares with Gaussian matrices).

A model comes as a source, `checkpoint.tensors(spec)`, whose parameters are read one at a time.
"""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import norm, rankdata
from torch import Tensor

from common import UserError, bfloat16_is_fast, progress
from init import keyed_generator
from model import NORMS, Block, rope_table
from probe import DEFAULTS, random_tokens
from stats import student_log10_tail

SAME = -6.0  # log10 p from which on two models are of one birth
LEVEL = 0.01  # p up to which it is not ruled out
SAME_BIRTH, NO_EVIDENCE, INCONCLUSIVE = "same birth", "no evidence", "inconclusive: use more rows"
BATCH, ROWS = 1000, 2048  # permutations drawn at once, rows of a weight matrix converted at once


@torch.inference_mode()
def states(source, inputs: Tensor, device="cpu", dtype=torch.float32, last_only=False, on_state=None):
    """Final-norm states, (n, T, d) float32, of tokens (n, T) or of vectors (n, T, d): `Transformer.hidden`,
    but only one block and the inputs' stream are in memory. `on_state(layer, x)` after each block, 1..L.
    """
    config = source.config
    if not inputs.is_floating_point():
        inputs = F.embedding(inputs, source.read("model.embed_tokens.weight")).float()
    x = inputs.to(device, dtype)  # (n, T, d)
    rope, batch = rope_table(config, x), max(1, DEFAULTS[torch.device(device).type][2] // x.shape[1])
    with torch.device("meta"):
        block, final = Block(config), NORMS[config.norm](config.d_model, eps=config.norm_epsilon)

    def fill(module, prefix: str, dtype) -> None:
        for name in [name for name, _ in module.named_parameters()]:
            weight = source.read(f"{prefix}.{name}").to(device, dtype)
            module.load_state_dict({name: weight}, strict=False, assign=True)

    for layer in range(config.num_layers):
        fill(block, f"model.layers.{layer}", dtype)
        last = last_only and layer == config.num_layers - 1
        x = torch.cat([block(part, rope, last, None) for part in x.split(batch)])
        if on_state is not None:
            on_state(layer + 1, x)
    fill(final, "model.norm", torch.float32)
    x = final(x.float())
    if not x.isfinite().all():
        raise UserError("a model's states are not finite: check its weights for NaN")
    return x[:, -1] if last_only else x


def unit_ranks(rows: Tensor) -> Tensor:
    """Columns of (n, d) by their ranks, ties averaged, centred, of norm 1 (0 if constant); float32."""
    parts = []
    for part in rows.cpu().split(max(1, 2**24 // len(rows)), dim=1):  # ranks come in float64
        centred = rankdata(part.numpy(), axis=0) - (len(rows) + 1) / 2
        parts.append(torch.from_numpy(centred / np.maximum(np.linalg.norm(centred, axis=0), 1e-30)).float())
    return torch.cat(parts, dim=1)


def decorrelated(ranks: Tensor, ridge: float = 0.03) -> Tensor:
    """R (R'R + ridge)^(-1/2) of R (n, d), whose columns have norm 1, and again scaled to it.

    What all columns share, and training makes large, no longer drowns what is theirs; relabelling the columns
    before or after is the same. One square root of the smaller Gram matrix does it for n below d, too.
    """
    (n, d), varies = ranks.shape, ranks.norm(dim=0) > 0
    gram = (ranks.T @ ranks if d <= n else ranks @ ranks.T).double()
    values, vectors = torch.linalg.eigh(gram)
    root = ((vectors * (values.clamp(min=0) + ridge).rsqrt()) @ vectors.T).float()
    white = ranks @ root if d <= n else root @ ranks
    return white * (varies / white.norm(dim=0).clamp(min=1e-30))


def fingerprint(rows: Tensor) -> Tensor:
    """What the relabelling test compares of final states (n, d): their decorrelated ranks, (n, d) float32."""
    return decorrelated(unit_ranks(rows))


def relation(a: Tensor, b: Tensor) -> Tensor:
    """Correlation of every column of one fingerprint (n, d) with every one of the other, (d, d) float64."""
    return (a.T @ b).double()


class Correlation:
    """Pearson's correlation of every column of A with every column of B, over matrices that stream by.

    Each counts with its columns centred and its mean square 1: its mean row and its scale are the data's.
    """

    def __init__(self, d: int):
        self.products, self.squares = torch.zeros(d, d).double(), torch.zeros(2, d).double()

    def update(self, A: Tensor, B: Tensor) -> None:
        """Add rows (n, d) of each. Two bfloat16 matrices are multiplied as such: rounding is no bias here."""
        same = A.dtype if A.dtype == B.dtype == torch.bfloat16 and bfloat16_is_fast() else torch.float32
        means = [rows.mean(0, dtype=torch.float32) for rows in (A, B)]
        products, squares = torch.zeros(self.products.shape), torch.zeros_like(self.squares)
        for a, b in zip(A.split(ROWS), B.split(ROWS)):
            a, b = (rows.float() - mean for rows, mean in zip((a, b), means))
            products += a.to(same).T @ b.to(same)
            squares += torch.stack([a.square().sum(0), b.square().sum(0)])
        scale = squares.mean(1, keepdim=True).div(len(A)).clamp(min=1e-60)  # (2, 1): their mean squares
        self.products.add_(products, alpha=scale.prod().rsqrt().item())
        self.squares += squares / scale

    def value(self) -> Tensor | None:
        """(d, d) float64, 0 where a column is constant; None without rows, UserError for weights of NaN."""
        if not self.squares.isfinite().all():
            raise UserError("a model's weights are not finite: check them for NaN")
        scale = torch.outer(*self.squares).sqrt()
        return torch.where(scale > 0, self.products / scale, 0.0) if scale.any() else None


def residual_last(source, name: str) -> Tensor:
    """A matrix with its residual axis as columns, (n, d): attention output and MLP down are transposed."""
    weight = source.read(name)
    return weight.T if name.endswith(("o_proj.weight", "down_proj.weight")) else weight


def weight_correlation(a, b) -> tuple[dict[str, Tensor | None], list[str]]:
    """Correlations of the residual coordinates over the rows of all weight matrices, and the names left out.

    "body" has the matrices of the blocks, matched by name and shape; "embedding" has the embedding and the
    head, up to the shorter vocabulary.
    """
    matrices = [{k: v for k, v in source.shapes.items() if len(v) == 2} for source in (a, b)]
    sums = {kind: Correlation(a.config.d_model) for kind in ("body", "embedding")}
    skipped = sorted(matrices[0].keys() ^ matrices[1].keys())
    for name in progress([n for n in matrices[0] if n in matrices[1]], desc="weights", leave=False):
        body = name.startswith("model.layers.")
        if body and matrices[0][name] != matrices[1][name]:
            skipped.append(name)
            continue
        A, B = residual_last(a, name), residual_last(b, name)
        rows = min(len(A), len(B))
        sums["body" if body else "embedding"].update(A[:rows], B[:rows])
    return {kind: total.value() for kind, total in sums.items()}, skipped


def judged(z: float, log10_p: float, at_least: int, permutations: int) -> dict:
    """`z`, its tail `log10_p`, the exact `p` of the permutations, and whether the two say `same` birth.

    The tail is an approximation: a z of 250 is an effect, not a probability.
    """
    p = (1 + at_least) / (1 + permutations)
    return dict(z=float(z), log10_p=float(log10_p), p=p, same=bool(log10_p <= SAME and at_least == 0))


def diagonal_test(C: Tensor, key: tuple, permutations: int = 9999) -> dict:
    """Is the mean of C's diagonal, (d, d), above that of C with its columns relabelled?

    S = mean_j C[j, pi(j)] over uniform permutations pi has mean(C) and variance sum(C'^2) / (d^2 (d - 1)), C'
    doubly centred (Hoeffding 1951). Returns `matched` and `mismatched`, the means of the diagonal and of the
    rest; `judged` of S, its p being (1 + #{S(pi) >= S}) / (1 + P) for P permutations, a function of `key`;
    and `smallest_visible`, the least matched - mismatched whose normal tail would be 10^SAME.
    """
    d, values, coordinates = len(C), C.numpy(), np.arange(len(C))
    mean, total = C.mean().item(), C.sum().item()
    centred = C - C.mean(0) - C.mean(1, keepdim=True) + mean
    std = (centred.square().sum().item() / (d * d * max(1, d - 1))) ** 0.5
    if not std > 0:
        raise UserError("nothing varies in one of the models: there is nothing to compare")
    matched, at_least = values[coordinates, coordinates].mean(), 0
    generator = keyed_generator("relabel", *key)
    for start in range(0, permutations, BATCH):
        order = np.tile(coordinates, (min(BATCH, permutations - start), 1))
        sampled = values[coordinates, generator.permuted(order, axis=1)].mean(axis=1)
        at_least += int((sampled >= matched).sum())
    effects = dict(matched=float(matched), mismatched=float(total - matched * d) / (d * (d - 1)))
    effects["smallest_visible"], z = norm.isf(10**SAME).item() * std * d / (d - 1), (matched - mean) / std
    return effects | judged(z, norm.logsf(z) / math.log(10), at_least, permutations)


def relabelling_test(a, b, seed: int = 0, permutations: int = 9999) -> dict:
    """The `diagonal_test` of two models' states on the same inputs, arrays (n, d); see `like_rows`."""
    prints = (fingerprint(rows) for rows in like_rows(a, b))
    return diagonal_test(relation(*prints), ("relabel", seed), permutations)


def like_rows(a, b) -> tuple[Tensor, Tensor]:
    """Two arrays as float32 tensors (n, d); UserError unless of one shape, n > 2, d > 1, and finite."""
    a, b = (torch.as_tensor(rows).detach().float() for rows in (a, b))
    if a.shape != b.shape or a.ndim != 2 or min(a.shape[0], a.shape[1] + 1) < 3:
        raise UserError(f"expected two (n, d) arrays of one shape, n at least 3, not {a.shape} and {b.shape}")
    if not (a.isfinite().all() and b.isfinite().all()):
        raise UserError("the states are not finite")
    return a, b


def neuron_gram(source, layer: int, limit: int = 1024) -> Tensor:
    """How alike the hidden units of a layer's MLP are, (m, m), m the first units up to `limit`.

    For W (m, d), gate and up rows with the norm's gain folded in, and down columns: W (W'W + ridge)^-1 W',
    which no new basis of the residual stream alters, and in which no few directions outweigh the others.
    """
    name, gram = f"model.layers.{layer}", 0.0
    gain = source.read(f"{name}.post_attention_layernorm.weight").float()
    for kind in ("gate", "up", "down"):
        if f"{name}.mlp.{kind}_proj.weight" in source.shapes:
            weight = residual_last(source, f"{name}.mlp.{kind}_proj.weight")[:limit].float()
            weight = weight if kind == "down" else weight * gain
            square = weight.T @ weight
            square.diagonal().add_(square.trace().div(len(square)).clamp(min=1e-30))
            root = torch.linalg.cholesky_ex(square).L  # NaN, if there is one, goes on to `gram_test`
            half = torch.linalg.solve_triangular(root, weight.T, upper=False)
            gram = gram + half.T @ half
    return off_diagonal(gram)


def some(depth: int, count: int) -> list[int]:
    """Up to `count` layers of `depth`, evenly spaced."""
    return np.unique(np.linspace(0, depth - 1, min(count, depth)).round().astype(int)).tolist()


def coordinate_gram(source, layers: int) -> Tensor:
    """Products of the residual coordinates over some `layers`, which no order of neurons alters: (d, d)."""
    total = torch.zeros(source.config.d_model, source.config.d_model)
    prefixes = tuple(f"model.layers.{layer}." for layer in some(source.config.num_layers, layers))
    for name, shape in source.shapes.items():
        if name.startswith(prefixes) and len(shape) == 2:
            weight = residual_last(source, name).float()
            total += weight.T @ weight / weight.square().sum().clamp(min=1e-30)
    return off_diagonal(total)


def off_diagonal(gram: Tensor) -> Tensor:
    """A symmetric matrix without its diagonal, the rest centred."""
    m = len(gram)
    mean = (gram.sum() - gram.trace()) / (m * (m - 1))
    return (gram - mean).fill_diagonal_(0.0)


def gram_test(pairs, key: tuple, permutations: int = 99) -> dict:
    """Are the Gram matrices of each pair alike in the order they come in? Mantel's permutation test.

    `pairs` yields (m, m) matrices of A and B; each pair has permutations of its own, of B's rows and columns
    alike. Returns the `correlation` of the entries and `judged` of z, by the permutations' mean and standard
    deviation; since these are estimates, its tail is Student's.
    """
    generator, products, norms = keyed_generator("gram", *key), np.zeros(1 + permutations), np.zeros(2)
    for a, b in pairs:
        norms += a.square().sum().item(), b.square().sum().item()
        for i in range(1 + permutations):
            order = torch.from_numpy(generator.permutation(len(b)) if i else np.arange(len(b)))
            products[i] += torch.vdot(a.flatten(), b[order].index_select(1, order).flatten()).item()
    if not np.isfinite(norms).all():
        raise UserError("a model's weights are not finite: check them for NaN")
    spread, correlation = products[1:].std(ddof=1), products[0] / max(norms.prod() ** 0.5, 1e-300)
    t = (products[0] - products[1:].mean()) / spread if spread > 0 else 0.0
    at_least = int((products[1:] >= products[0]).sum())
    log10_p = student_log10_tail(t / (1 + 1 / permutations) ** 0.5, permutations - 1)
    return dict(correlation=float(correlation)) | judged(t, log10_p, at_least, permutations)


def neuron_pairs(a, b, layers: int):
    """Gram matrices of the hidden units of some `layers` that both models have."""
    for layer in some(min(a.config.num_layers, b.config.num_layers), layers):
        yield neuron_gram(a, layer), neuron_gram(b, layer)


@functools.lru_cache(maxsize=8)
def all_positions(source, n: int, T: int, seed: int, vocab, device, dtype, prepare=fingerprint) -> Tensor:
    """Fingerprint of every position of n random sequences of T tokens, (n T, d): each is a row."""
    tokens = random_tokens(seed, range(n), T, vocab)
    if tokens.numel() < 3:
        raise UserError("fewer than three rows have no ranks to compare: raise --num-sequences")
    return prepare(states(source, tokens, device, dtype).flatten(0, 1))


def decide(tests: dict[str, dict]) -> tuple[str, str]:
    """The verdict of the tests that were made, and what it rests on: on weights, wherever they can decide.

    A transplanted embedding ties the residual coordinates of strangers: `relabel` sees it at once,
    `any_order` and at times `body` once they are trained. Hidden units remain exchangeable (`basis_free`).
    """
    same = {name for name, test in tests.items() if test["same"]}
    tied = "embedding" in same and "basis_free" in tests
    if "body" in same and not (tied and "basis_free" not in same):
        return SAME_BIRTH, "the weights of the blocks"
    if "basis_free" in same:
        return SAME_BIRTH, "the hidden units, in any basis of the residual stream"
    if same & {"any_order", "body"}:
        units = "hidden units not" if "basis_free" in tests else "no hidden units to compare"
        return INCONCLUSIVE, f"blocks alike, {units}: noised or reordered kin, or a transplanted table"
    if not tests.keys() & {"body", "basis_free"}:
        return INCONCLUSIVE, "no matrices of one shape to compare"
    if "body" in tests and tests["body"]["p"] <= LEVEL / 2:  # Bonferroni: with `relabel` there are two
        return INCONCLUSIVE, "weights too close for chance, not close enough for kin"
    if "embedding" in same:
        return NO_EVIDENCE, "the embedding is transplanted or shared: the blocks, which decide, are unrelated"
    if tests["relabel"]["p"] <= LEVEL / 2:
        return INCONCLUSIVE, "the activations agree, the weights do not"
    return NO_EVIDENCE, "neither activations nor weights agree more than by chance"


def compare_pair(a, b, rows, seed: int, permutations: int, free=99, layers=4, always=False) -> tuple:
    """Every test of two sources and their fingerprints `rows`, (n, d): a row, and the correlation matrices.

    The two tests by Gram matrices, of `free` permutations and `layers` layers, are made `always`, or if the
    others find no kin, or an embedding that might tie them.
    """
    C, skipped = weight_correlation(a, b)
    C = {"relabel": relation(*rows)} | {kind: value for kind, value in C.items() if value is not None}
    tests = {kind: diagonal_test(value, (kind, seed), permutations) for kind, value in C.items()}
    mlps = "attention" not in (a.config.sublayers, b.config.sublayers) and a.config.d_ff == b.config.d_ff
    if mlps and (always or decide(tests)[0] != SAME_BIRTH or tests.get("embedding", {}).get("same")):
        tests["basis_free"] = gram_test(neuron_pairs(a, b, layers), ("basis_free", seed), free)
    if always or decide(tests)[0] != SAME_BIRTH:
        grams = [tuple(coordinate_gram(source, layers) for source in (a, b))]
        tests["any_order"] = gram_test(grams, ("any_order", seed), free)
    verdict, reason = decide(tests)
    row, test = dict(verdict=verdict, rests_on=reason, num_rows=len(rows[0])), tests["relabel"]
    row |= {name: test[name] for name in ("matched", "mismatched", "smallest_visible")}
    row |= dict(relabel_z=test["z"], relabel_log10_p=test["log10_p"], permutation_p=test["p"])
    for kind in ("body", "embedding"):
        for name in ("matched", "mismatched", "smallest_visible", "z", "log10_p", "p"):
            row[f"{kind}_{name}"] = tests[kind][name] if kind in tests else None
    for kind in ("any_order", "basis_free"):
        test = tests.get(kind) or dict(correlation=None, z=None, p=None)
        row |= {kind: test["correlation"], f"{kind}_z": test["z"], f"{kind}_p": test["p"]}
    return row | dict(skipped=skipped), C
