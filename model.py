"""The architecture: one pre-norm decoder that is a GPT-2, a LLaMA or a Qwen2, depending on its settings.

    x = embed(tokens);  L times: x += attention(norm(x)), x += mlp(norm(x));  logits = head(norm(x))  (BB 2.1)

Parameter names and the half-split rotation are those of Hugging Face's LLaMA. `init.newborn` draws matrices;
other parameters begin as they are written here. lib/kernels.py computes the loss and, on a CPU, rotation and
attention; tests compare it with the code here.

The *stream* x is the residual stream. A *state* is x at one position, after the final norm unless a layer is
named. Papers: BB is "Transformers Are Born Biased" (2602.05927), SO its sequel on sinks (2605.06611).

Shapes: B sequences, T positions, d model width, H heads, G key-value heads, Dh head size, V tokens, L layers.
"""

import contextlib
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib import kernels

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh, "swiglu": F.silu}
GATED = {"swiglu"}  # MLPs with a gate_proj, to whose output the activation is applied


class RMSNorm(nn.Module):
    """x / RMS(x) * weight over the last axis (BB 2.1); the mean square is computed in float32 or wider."""

    def __init__(self, width, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # makes no wide copy of x
        scale = (norm.square() / x.shape[-1] + self.eps).rsqrt()  # 1 / RMS(x)
        return x * scale.to(x.dtype) * self.weight.to(x.dtype)


NORMS = {"rmsnorm": RMSNorm, "layernorm": nn.LayerNorm}
CHOICES = {
    "norm": NORMS,
    "mlp": ACTIVATIONS,
    "sublayers": ("full", "attention", "mlp"),
    "attn_calibration": ("none", "amplify", "attenuate", "headnorm"),
}


@dataclass(frozen=True)
class ModelConfig:
    """The settings of an architecture; ValueError if they are inconsistent."""

    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int
    d_model: int
    d_ff: int
    num_kv_heads: int | None = None  # None: num_heads; fewer: grouped-query attention
    head_dim: int | None = None  # None: d_model / num_heads
    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-5
    mlp: str = "swiglu"
    qkv_bias: bool = False  # Qwen2
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    sublayers: str = "full"  # which sublayers a block has (BB 4.1)
    attn_calibration: str = "none"  # how the outputs of heads are scaled (BB 6.2)
    explicit_sink: bool = False  # a learned key and value per key-value head, before the text (2410.10781)

    @property
    def kv_heads(self):
        return self.num_kv_heads or self.num_heads  # G

    @property
    def head_size(self):
        return self.head_dim or self.d_model // self.num_heads  # Dh

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.num_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key-value heads cannot serve {self.num_heads} heads evenly")
        if self.head_size % 2 or (self.head_dim is None and self.d_model % self.num_heads):
            raise ValueError(f"heads of {self.d_model}/{self.num_heads}: RoPE needs an even, whole head_dim")


GPT2 = {"norm": "layernorm", "mlp": "gelu", "tie_embeddings": True}  # with RoPE; only norms have biases
PRESETS = {  # vocabulary, context, layers, heads, d_model, d_ff
    "nano_gpt2": ModelConfig(50257, 1024, 12, 12, 768, 3072, **GPT2),  # BB Table 1a: 124M parameters
    "nano_llama": ModelConfig(32000, 2048, 12, 12, 768, 2048),  # BB Tables 1b and 13: 134M
    "nano_qwen": ModelConfig(151936, 2048, 12, 12, 768, 3072, qkv_bias=True),  # BB Tables 9-12: 347M
    "llama_60m": ModelConfig(32000, 2048, 10, 8, 768, 1536),  # Gu et al.: 60M without embedding and head
    "gpt2_1b": ModelConfig(50257, 1024, 24, 32, 2048, 8192, **GPT2),  # BB Table 1c: 1.2B in its blocks
    "tiny_gpt2": ModelConfig(4096, 256, 6, 8, 256, 1024, **GPT2),
    "tiny_llama": ModelConfig(4096, 256, 6, 8, 256, 704),
    "tiny_qwen": ModelConfig(4096, 256, 6, 8, 256, 704, qkv_bias=True),
    "backcopy": ModelConfig(257, 128, 2, 1, 128, 512),  # for configs/backcopy.py: sinks grow in its training
    "text_sink": ModelConfig(2048, 512, 4, 2, 128, 344),  # for configs/text_sink.py: sinks grow on text
}


def rope(config: ModelConfig, x: Tensor, start=0):
    """RoPE's cosines and sines of T positions of x (B, T, d), after `start` others: (T, 1, Dh/2) each."""
    pair = torch.arange(0, config.head_size, 2, device=x.device)
    frequency = config.rope_theta ** (-pair.float() / config.head_size)  # radians per position, by pair
    angle = torch.outer(torch.arange(start, start + x.shape[1], device=x.device), frequency)[:, None]
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + Dh/2) of x (B, T, H, Dh) by its angle; cos and sin are (T, 1, Dh/2)."""
    if x.device.type == "cpu":
        return kernels.rotate(x, cos, sin)
    left, right = x.chunk(2, dim=-1)  # (B, T, H, Dh/2) each
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, hides: Tensor | None = None) -> Tensor:
    """Causal softmax(q k^T / sqrt(Dh)) v, (B, H, Q, Dh), of q (B, H, Q, Dh), k and v (B, G, K, Dh).

    q may be the last position alone. If there are more keys than queries, all queries see the first ones.
    `hides` (Q, K) marks what is hidden besides.
    """
    Q, K = q.shape[2], k.shape[2]
    if hides is not None:
        sees = torch.ones_like(hides).tril(K - Q) & ~hides
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=k.shape[1] < q.shape[1])
    if 1 < Q < K:
        first = q[:, :, :1].expand(-1, -1, K - Q, -1)  # is_causal pairs these copies with the first keys
        return causal_attention(torch.cat((first, q), dim=2), k, v)[:, :, K - Q :]
    if q.device.type == "cpu":
        return kernels.causal_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=Q > 1, enable_gqa=k.shape[1] < q.shape[1])


def weights_on(attention, q: Tensor, k: Tensor, positions: Tensor, hides: Tensor | None = None):
    """Yield the weights (B, H, Q, n) on some of K positions (K,), at most Dh at a time.

    Attention returns weighted sums of values. With one-hot values these are the weights, and no T x T matrix
    is stored. What stands in front of the text has the positions 0, -1, ... from its end; a position that no
    key has gets 0. For three tokens whose queries weigh the keys by

        (1, 0, 0), (0.5, 0.5, 0), (0.2, 0.3, 0.5)

    and positions (1, 2), the three keys' values are (1, 0), (0, 1) and (0, 0): query 3 returns (0.2, 0.3).
    """
    keys, _ = attention.with_front(k, k)
    T, Dh = k.shape[2:]
    places = torch.arange(1 + T - keys.shape[2], T + 1, device=k.device)  # the keys' positions
    for part in positions.split(Dh):
        one_hot = (places[:, None] == part).to(keys.dtype)  # (keys, n)
        values = F.pad(one_hot, (0, Dh - len(part))).expand_as(keys).contiguous()  # as wide as keys
        yield attention.attend(q, keys, values, hides)[..., : len(part)]


def mean_attention(attention, q: Tensor, k: Tensor, positions, lengths=None) -> Tensor:
    """alpha (B, H, K): the weight on each of K positions, averaged over the queries that see it (BB 6.2.1).

    In the example of `weights_on` alpha_1 is (1 + 0.5 + 0.2) / 3 and alpha_2 (0.5 + 0.3) / 2. Which queries
    see a position is asked of attention itself, by queries of zeros, which weigh alike all that they see.
    With `lengths` the means are over the first so many queries each, (lengths, B, H, K).
    """
    ends = lengths or (q.shape[2],)
    key = (q.shape[2], k.shape[2], len(attention.front()), ends, *positions)
    positions = torch.as_tensor(positions, device=k.device)
    sums = sums_by_length(weights_on(attention, q, k, positions), ends)
    if key not in attention.seen:
        seen = [(part > 0).float() for part in weights_on(attention, 0 * q[:1], k[:1], positions)]
        attention.seen[key] = sums_by_length(seen, ends).clamp(min=1)
    means = sums / attention.seen[key]
    return means[0] if lengths is None else means


def sums_by_length(parts, ends):
    """The sums of weights (B, H, Q, n) over the first queries up to each of some ends, (ends, B, H, K)."""
    sums = []
    for weights in parts:
        sums.append(torch.stack([weights[:, :, :end].sum(2, dtype=torch.float32) for end in ends]))
    return torch.cat(sums, dim=-1)


class Attention(nn.Module):
    """Causal multi-head attention with RoPE (BB Equation 2, once per head)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        d = config.d_model
        Dh = config.head_size
        self.q_proj = nn.Linear(d, config.num_heads * Dh, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d, config.kv_heads * Dh, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, config.kv_heads * Dh, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * Dh, d, bias=False)
        self.head_norm = RMSNorm(Dh, 1e-6) if config.attn_calibration == "headnorm" else None
        self.constants = []  # that measures put in front of the text: a key and a value each, (G Dh,)
        self.seen = {}  # how many queries see a position (`mean_attention`)
        self.sink_key = self.sink_value = None
        if config.explicit_sink:  # vectors, which have no weight decay
            self.sink_key = nn.Parameter(torch.zeros(config.kv_heads * Dh))  # init.py draws it
            self.sink_value = nn.Parameter(torch.zeros(config.kv_heads * Dh))

    def forward(self, x: Tensor, cos_sin, last_only=False, on_heads=None, cache=None) -> Tensor:
        Dh = self.config.head_size
        first = x.shape[1] - 1 if last_only else 0  # the first query's index; there are Q queries, 1 or T
        q = self.q_proj(x[:, first:]).unflatten(2, (-1, Dh))  # (B, Q, H, Dh)
        k = self.k_proj(x).unflatten(2, (-1, Dh))  # (B, T, G, Dh)
        v = self.v_proj(x).unflatten(2, (-1, Dh)).transpose(1, 2)  # (B, G, T, Dh)
        cos, sin = cos_sin  # (T, 1, Dh/2) each
        q = rotate(q, cos[first:], sin[first:]).transpose(1, 2)  # (B, H, Q, Dh)
        k = rotate(k, cos, sin).transpose(1, 2)  # (B, G, T, Dh)
        if cache is not None:  # keys and values of the tokens before these
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
            cache[:] = k, v
        heads = self.attend(q, *self.with_front(k, v))
        heads = self.calibrate(heads, k.shape[2])  # (B, H, Q, Dh)
        if on_heads is not None:
            replacement = on_heads(heads, q, k, v, partial(mean_attention, self, q, k))
            heads = heads if replacement is None else replacement
        return self.write(heads, x[:, first:])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hides: Tensor | None = None) -> Tensor:
        """Attention itself, as `causal_attention`: change it here, and all that measures it follows.

        It must be linear in v, and let `hides` (Q, K) hide keys from queries.
        """
        return causal_attention(q, k, v, hides)

    def write(self, heads: Tensor, x: Tensor) -> Tensor:
        """What heads (B, H, Q, Dh) write to the stream (B, Q, d); x (B, Q, d) is what their queries read."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))

    def front(self):
        """What stands in front of the text: a key and a value each, (G Dh,); keys are not rotated.

        So a query sees such a key at position 1, whose RoPE angle is 0.
        """
        own = [] if self.sink_key is None else [(self.sink_key, self.sink_value)]
        return own + self.constants

    def with_front(self, k: Tensor, v: Tensor):
        """k and v (B, G, T, Dh) with what stands in front, F: (B, G, F + T, Dh) each."""
        for key, value in reversed(self.front()):
            shape = (len(k), k.shape[1], 1, k.shape[3])
            k = torch.cat((key.to(k.dtype).view(1, *shape[1:]).expand(shape), k), dim=2)
            v = torch.cat((value.to(v.dtype).view(1, *shape[1:]).expand(shape), v), dim=2)
        return k, v

    def calibrate(self, heads: Tensor, T) -> Tensor:
        """Scale the outputs of heads at the last Q of positions i = 1..T, since a mean of i values shrinks.

        `amplify`: by sqrt(i); `attenuate`: by sqrt(i / context_length) (BB 6.2); `headnorm`: RMSNorm (SO).
        """
        kind = self.config.attn_calibration
        if kind == "none":
            return heads
        if kind == "headnorm":
            return self.head_norm(heads)
        position = torch.arange(T - heads.shape[2] + 1, T + 1, device=heads.device)
        length = {"amplify": 1, "attenuate": self.config.context_length}[kind]
        return heads * (position / length).sqrt().to(heads.dtype)[:, None]


class MLP(nn.Module):
    """down(phi(up x)); a gated MLP computes down(phi(gate x) * up x), with silu as the phi of SwiGLU."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.mlp]
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False) if config.mlp in GATED else None
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); an ablated sublayer and its norm are None."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        has_attention = config.sublayers != "mlp"
        has_mlp = config.sublayers != "attention"
        norm = partial(NORMS[config.norm], config.d_model, eps=config.norm_epsilon)
        self.input_layernorm = norm() if has_attention else None
        self.self_attn = Attention(config) if has_attention else None
        self.post_attention_layernorm = norm() if has_mlp else None
        self.mlp = MLP(config) if has_mlp else None

    def forward(self, x: Tensor, cos_sin=None, last_only=False, on_heads=None, cache=None) -> Tensor:
        stream = x[:, -1:] if last_only else x
        if self.self_attn is not None:
            stream = stream + self.self_attn(self.input_layernorm(x), cos_sin, last_only, on_heads, cache)
        if self.mlp is not None:
            stream = stream + self.mlp(self.post_attention_layernorm(stream))
        return stream


class Transformer(nn.Module):
    """The decoder: `model(tokens)` returns logits, `model.hidden(tokens)` the states that we measure.

    hf/lens.py offers these methods for models of transformers.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        V, d = config.vocab_size, config.d_model
        layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        norm = NORMS[config.norm](d, eps=config.norm_epsilon)
        table = torch.zeros(V, d)  # nn.Embedding would draw it, and import torch._dynamo
        embedding = nn.Embedding.from_pretrained(table, freeze=False)
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": layers, "norm": norm})
        self.lm_head = None if config.tie_embeddings else nn.Linear(d, V, bias=False)  # None: stays tied

    def cast_blocks(self, dtype) -> "Transformer":
        """Cast the blocks to `dtype`; embedding, final norm, head and logits stay float32."""
        self.model.layers.to(dtype)
        return self

    def new_cache(self):
        """An empty cache of keys and values for `hidden`, [(1, G, 0, Dh), the same] for each layer."""
        like = next(self.model.layers.parameters())
        empty = like.new_empty(1, self.config.kv_heads, 0, self.config.head_size)
        return [[empty, empty] for _ in self.blocks]

    def hidden(self, inputs: Tensor, last_only=False, on_state=None, on_heads=None, cache=None) -> Tensor:
        """Final-norm states (B, T, d), float32, of tokens (B, T) or of embeddings (B, T, d).

        ValueError beyond the context. `last_only`: the last block computes the last position alone, (B, d);
        there hooks see x, heads and q of that position, T = 1.
        `on_state(layer, x)` sees the stream (B, T, d) before the first block (as layer 0) and after each.
        `on_heads(layer, heads, q, k, v, alpha)` sees the calibrated outputs of heads (B, H, T, Dh), rotated
        q and k, v, and `mean_attention` as a function of positions; a tensor that it returns replaces heads.
        With a `cache` the tokens follow those that it has: all of a text at first, then one at a time.
        """
        start = 0 if cache is None else cache[0][0].shape[2]
        T = start + inputs.shape[1]
        if T > self.config.context_length:
            raise ValueError(f"{T} positions exceed the context of {self.config.context_length}")
        x = inputs if inputs.is_floating_point() else self.model.embed_tokens(inputs)
        dtype = next(self.model.layers.parameters()).dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        cos_sin = rope(self.config, x, start)
        if last_only and self.config.sublayers == "mlp":
            x = x[:, -1:]  # without attention, earlier positions do not matter
        if on_state is not None:
            on_state(0, x)
        for layer, block in enumerate(self.model.layers, start=1):
            hook = None if on_heads is None else partial(on_heads, layer)
            own = None if cache is None else cache[layer - 1]
            x = block(x, cos_sin, last_only and layer == self.config.num_layers, hook, own)
            if on_state is not None:
                on_state(layer, x)
        x = self.model.norm(x.to(self.model.norm.weight.dtype))
        return x[:, -1] if last_only else x

    def unembed(self, states: Tensor) -> Tensor:
        """Logits (..., V) of final-norm states (..., d)."""
        return F.linear(states, self.head_weight)

    @property
    def head_weight(self):
        """The head's matrix (V, d), which is the embedding matrix if they are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens: Tensor, targets=None) -> Tensor:
        """Logits (B, T, V), float32, of tokens (B, T); with targets (B, T) the summed loss in nats."""
        states = self.hidden(tokens)
        if targets is None:
            return self.unembed(states)
        return self.summed_loss(states.flatten(0, 1), targets.flatten())

    def summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of targets (n,), given final-norm states (n, d), in little memory."""
        return kernels.summed_cross_entropy(states, self.head_weight, targets)

    @property
    def blocks(self):
        return self.model.layers

    @property
    def device(self):
        return self.head_weight.device

    def down(self, layer):
        """A layer's MLP down projection, (d, d_ff); layers count from 1."""
        return self.blocks[layer - 1].mlp.down_proj.weight.detach()

    def output_weight(self, layer):
        """A layer's attention output projection, (d, H Dh)."""
        return self.blocks[layer - 1].self_attn.o_proj.weight.detach()

    @contextlib.contextmanager
    def hidden_units(self, on_units):
        """While open, `on_units(layer, units)` sees, and may replace, neurons (B, T, d_ff)."""

        def hook(layer, down_proj, inputs):
            (units,) = inputs
            return on_units(layer, units)

        with contextlib.ExitStack() as stack:
            for layer, block in enumerate(self.blocks, start=1):
                stack.enter_context(block.mlp.down_proj.register_forward_pre_hook(partial(hook, layer)))
            yield
