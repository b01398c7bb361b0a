"""What do the paper's test, Intrinsic, REEF, PCS and ICS say of a pair? (BB 6.1, B.3)

    python seedprint.py compare nano_llama@42 nano_llama@43 --paper-test --baselines

The paper's test asks whether Kendall's tau between the two models' outputs, over the dimensions that are
large in both, is above that of two Gaussian matrices. The other four are similarities with a threshold of
0.8; none says what strangers would give, so compare a stranger as well. Sources as in `evidence.py`.
"""

import functools
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from scipy.special import softmax
from torch import Tensor

from checkpoint import config_of, shared_context, tensors
from common import RunSettings, UserError, setting
from evidence import like_rows, states
from init import SCHEMES, keyed_generator
from probe import gaussian_vectors, random_tokens

THRESHOLD = 0.8  # of the four similarities (BB B.3.2, after REEF)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


# ---- the paper's test (BB 6.1.1, Algorithm 1) --------------------------------------------------------------


@dataclass
class Inputs(RunSettings):
    """The `models`, what the relabelling test reads, and how often it permutes."""

    models: tuple[str, ...] = ()  # words of the command line, not a flag
    num_sequences: int = setting(16, "random sequences; each of their positions is a row", least=1)
    sequence_length: int = setting(64, "tokens in a sequence")
    input_seed: int = setting(0, "seed of the random sequences and of the permutations")
    permutations: int = setting(9999, "relabellings; the smallest p is 1 / (1 + this)", least=199)
    init: str = setting("gpt2", "how newborns are drawn", SCHEMES)


@dataclass
class PaperInputs(Inputs):
    """What the paper's test reads: the last positions only."""

    paper_sequences: int = setting(1000, "random sequences of the paper's test; in the paper 10000", least=3)
    paper_length: int = setting(64, "tokens in each of them; in the paper 1024")
    side: str = setting("top", "dimensions of largest or smallest mean output", ("top", "bottom"))
    top_k: int | None = setting(None, "of them, in each model (default: half of the width)", least=1)
    softmax_temperature: float | None = setting(None, "softmax over the chosen; their code: 10", least=1e-6)

    def chosen(self, d: int) -> tuple[str, int, float | None]:
        """How the dimensions of models of width d are chosen, as `identity_taus` wants it; checked."""
        if self.top_k is not None and not 1 <= self.top_k <= d:
            raise UserError(f"--top-k {self.top_k}: expected 1 to {d}, the models' width")
        return self.side, self.top_k or d // 2, self.softmax_temperature


def check(s: Inputs, specs, paper: bool) -> None:
    """UserError for settings that make no sense for the models; those of the paper's test only if `paper`."""
    if paper:
        shared_context(specs, (s.paper_length,), "--paper-length")
        s.chosen(min(config_of(spec).d_model for spec in specs))
    shared_context(specs, (s.sequence_length,))


def open_models(s: Inputs, paper: bool = False) -> tuple[list, int]:
    """The models' sources and the size of the vocabulary they share; UserError if they cannot be compared."""
    if len(s.models) < 2:
        raise UserError("expected at least 2 models: checkpoint folders, or PRESET@SEED")
    check(s, s.models, paper)
    sources = [tensors(spec, s.init) for spec in s.models]
    widths = {spec: source.config.d_model for spec, source in zip(s.models, sources)}
    if len(set(widths.values())) > 1:
        raise UserError(f"only models of one width can be compared, not of {widths}")
    return sources, min(source.config.vocab_size for source in sources)


def top_dimensions(rows: np.ndarray, side: str, top_k: int) -> np.ndarray:
    """The `top_k` dimensions of largest mean output (n, d), or of smallest, for `side` "bottom"."""
    mean = rows.mean(axis=0, dtype=np.float64)
    return np.argsort(-mean if side == "top" else mean, kind="stable")[:top_k]


def kendall(a: np.ndarray, b: np.ndarray, chosen: np.ndarray, temperature: float | None = None) -> np.ndarray:
    """Kendall's tau-b of a's and b's columns j, (n, d) each, for j in `chosen`; 0 for a constant column.

    With a `temperature`, of their softmax over the chosen columns, as in the authors' code.
    """
    a, b = a[:, chosen].astype(np.float64), b[:, chosen].astype(np.float64)
    if temperature is not None:
        a, b = softmax(a / temperature, axis=1), softmax(b / temperature, axis=1)
    tau = [stats.kendalltau(x, y, method="asymptotic").statistic for x, y in zip(a.T, b.T)]
    return np.nan_to_num(np.array(tau, dtype=float))


def identity_taus(a, b, side: str, top_k: int, temperature: float | None) -> np.ndarray:
    """Kendall's tau of arrays (n, d) on the dimensions that are among the `top_k` of both."""
    chosen = np.intersect1d(*(top_dimensions(rows, side, top_k) for rows in (a, b)))
    return kendall(a, b, chosen, temperature) if len(chosen) else np.zeros(0)


@functools.lru_cache(maxsize=512)
def null_taus(n: int, d: int, side: str, top_k: int, temperature: float | None, trial: int) -> np.ndarray:
    """The same of two Gaussian matrices: the paper's null."""
    generator = keyed_generator("paper null", n, d, trial)
    a, b = (generator.standard_normal((n, d), np.float32) for _ in range(2))
    return identity_taus(a, b, side, top_k, temperature)


@functools.lru_cache(maxsize=8)
def last_positions(source, n: int, T: int, kind: str, input_seed: int, vocab: int, device, dtype) -> Tensor:
    """Final last-position states, (n, d), for n random sequences of T "tokens" or "gaussian" vectors."""
    d, parts = source.config.d_model, []
    draw, width = (gaussian_vectors, d) if kind == "gaussian" else (random_tokens, vocab)
    size = max(1, 2**27 // (T * d))  # sequences at a time: half a gigabyte of states
    for start in range(0, n, size):
        inputs = draw(input_seed, range(start, min(start + size, n)), T, width)
        parts.append(states(source, inputs, device, dtype, last_only=True))
    return torch.cat(parts).cpu()


def paper_test(a, b, side="top", top_k: int | None = None, temperature: float | None = None) -> dict:
    """The paper's test of last-position states on the same inputs, arrays (n, d); see `judge_taus`.

    UserError for a `top_k` that is not in 1..d, and for what `evidence.like_rows` refuses.
    """
    a, b = (rows.cpu().numpy() for rows in like_rows(a, b))
    n, d = a.shape
    settings = PaperInputs(side=side, top_k=top_k, softmax_temperature=temperature).chosen(d)
    return judge_taus(identity_taus(a, b, *settings), n, d, *settings)


def judge_taus(taus: np.ndarray, n: int, d: int, side: str, top_k: int, temperature, nulls: int = 10) -> dict:
    """What the paper's test says of the taus of the `paper_k` identity dimensions.

    p of the one-sided t- and U-tests against the taus of `nulls` Gaussian pairs, averaged; `closed_form_z` =
    mean tau / sqrt(2 (2n + 5) / (9 n (n - 1)) / k), whose error is that of k independent dimensions.
    """
    p, k, mean = [], len(taus), float(taus.mean()) if len(taus) else 0.0
    for trial in range(nulls):
        null = null_taus(n, d, side, top_k, temperature, trial)
        if min(k, len(null)) < 2:
            p.append((1.0, 1.0))  # too few dimensions to say anything
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # identical models: all taus are 1
            t = stats.ttest_ind(taus, null, alternative="greater").pvalue
        p.append((t, stats.mannwhitneyu(taus, null, alternative="greater").pvalue))
    t_p, u_p = np.nan_to_num(np.mean(p, axis=0), nan=1.0).tolist()
    error = kendall_std(n) / max(1, k) ** 0.5
    return dict(paper_k=k, paper_mean_tau=mean, paper_t_p=t_p, paper_u_p=u_p, closed_form_z=mean / error)


def kendall_std(n: int) -> float:
    """Standard deviation of Kendall's tau between independent columns of n rows."""
    return (2 * (2 * n + 5) / (9 * n * (n - 1))) ** 0.5


# ---- four similarities (BB B.3.2) --------------------------------------------------------------------------


def intrinsic(a, b) -> float:
    """Correlation of the layers' std of W_Q, W_K, W_V and W_O, z-scored over layers; the mean of the four."""
    values = []
    for kind in ATTENTION:
        profiles = []
        for source in (a, b):
            names = [f"model.layers.{i}.self_attn.{kind}.weight" for i in range(source.config.num_layers)]
            profiles.append([source.read(name).float().std().item() for name in names])
        grid = np.linspace(0, 1, min(map(len, profiles)))
        profiles = [np.interp(grid, np.linspace(0, 1, len(profile)), profile) for profile in profiles]
        flat = min(profile.std() for profile in profiles) == 0
        values.append(0.0 if flat else float(np.corrcoef(*profiles)[0, 1]))
    return float(np.mean(values))


def cka(x: Tensor, y: Tensor) -> float:
    """Linear centred kernel alignment of features (n, d1) and (n, d2)."""
    x, y = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    kx, ky = x @ x.T, y @ y.T  # (n, n)
    return ((kx * ky).sum() / (kx.norm() * ky.norm()).clamp(min=1e-300)).item()


def reef(a, b, tokens: Tensor, device, dtype) -> tuple[float, list[list[float]]]:
    """CKA of last-position block outputs on the same tokens (n, T): matched layers' mean, and all pairs."""
    outputs = [], []
    for source, layers in zip((a, b), outputs):
        keep = lambda _, x, to=layers: to.append(x[:, -1].float().clone())  # noqa: E731
        states(source, tokens, device, dtype, on_state=keep)
    matrix = [[cka(x, y) for y in outputs[1]] for x in outputs[0]]
    return float(np.mean([matrix[i][i] for i in range(min(map(len, outputs)))])), matrix


def pcs(a, b) -> float:
    """Cosine of all parameters the two have alike in name and shape, embeddings and head left out.

    Gains count: since they are born as 1, strangers are far from orthogonal.
    """
    sums = np.zeros(3)
    for name, shape in a.shapes.items():
        if not name.startswith(("model.embed_tokens", "lm_head")) and b.shapes.get(name) == shape:
            x, y = a.read(name).float(), b.read(name).float()
            sums += [float((p * q).double().sum()) for p, q in ((x, y), (x, x), (y, y))]
    return float(sums[0] / max((sums[1] * sums[2]) ** 0.5, 1e-300))


def invariant_terms(source):
    """Of the last two layers, the last first: Q'K, V'O' and U'D', (d, d) each.

    Q, K, V, O, U (up), D (down) as they are stored, (out, in); key-value heads repeated for their queries.
    """
    for layer in range(source.config.num_layers)[:-3:-1]:
        name, heads = f"model.layers.{layer}.", source.config.kv_heads
        q, k, v, o = (source.read(f"{name}self_attn.{kind}.weight").float() for kind in ATTENTION)
        k, v = (w.unflatten(0, (heads, -1)).repeat_interleave(len(q) // len(w), 0) for w in (k, v))
        up, down = (source.read(f"{name}mlp.{kind}_proj.weight").float() for kind in ("up", "down"))
        yield from (q.T @ k.flatten(0, 1), v.flatten(0, 1).T @ o.T, up.T @ down.T)


def ics(a, b) -> float:
    """Cosine of the models' X M X', M an invariant term, X embeddings (n, d), centred: the mean over terms.

    None of these (n, n) is made: the product of X M X' and Y N Y', summed, is that of M and G N G', G = X'Y.
    """
    n, cosines = min(4096, a.config.vocab_size, b.config.vocab_size), []
    X = [source.read("model.embed_tokens.weight")[:n].float() for source in (a, b)]
    pairs = {(i, j): X[i].T @ X[j] for i, j in ((0, 1), (0, 0), (1, 1))}
    for terms in zip(invariant_terms(a), invariant_terms(b)):
        sums = [float(x.sum(0) @ M @ x.sum(0)) / n for x, M in zip(X, terms)]
        xy, xx, yy = (
            float((terms[i] * (G @ terms[j] @ G.T)).double().sum()) - sums[i] * sums[j]
            for (i, j), G in pairs.items()
        )
        cosines.append(xy / max(xx * yy, 1e-300) ** 0.5)
    return float(np.mean(cosines))


def similarities(a, b, tokens: Tensor, device, dtype) -> dict:
    """All four, by name, and REEF's matrix; UserError if the models' attention is missing."""
    if "full" != a.config.sublayers or "full" != b.config.sublayers:
        raise UserError("the baselines need models with attention and MLP")
    matched, matrix = reef(a, b, tokens, device, dtype)
    return dict(intrinsic=intrinsic(a, b), reef=matched, pcs=pcs(a, b), ics=ics(a, b), reef_matrix=matrix)
