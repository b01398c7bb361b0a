"""6. Can a head be put to rest? Write `sleep`."""


def sleep(model):
    """Make the first head of the first layer rest on token 0 wherever a sequence begins with it.

    `model` is a Transformer, a newborn `tiny_qwen` with 8 heads of 32 dimensions. Change it in place, but in
    the head's own rows alone, 0 to 31, of the weights and biases of `q_proj` and `k_proj` in
    `model.model.layers[0].self_attn`. Return nothing.
    """
    block = model.model.layers[0]
    attention = block.self_attn
    slowest = model.config.head_size // 2 - 1  # the dimension that RoPE turns least, by 0.01 in 64 positions
    token = block.input_layernorm(model.model.embed_tokens.weight[0])  # (d,), of length 16
    attention.k_proj.weight[slowest] = token  # the key is 256 for token 0, about 16 for others
    attention.q_proj.weight[slowest] = 0
    attention.q_proj.bias[slowest] = 0.5  # a logit of 0.5 * 256 / sqrt(32) = 23, whatever the query
