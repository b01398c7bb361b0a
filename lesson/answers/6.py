"""6. Can a head be put to rest? Write `sleep`."""


def sleep(model):
    """Make the first head of the first layer rest on token 0 wherever a sequence begins with it.

    `model` is a Transformer, a newborn `tiny_qwen` with 8 heads of 32 dimensions. Change it in place, but in
    the head's own rows alone, 0 to 31, of the weights and biases of `q_proj` and `k_proj` in
    `model.model.layers[0].self_attn`. Return nothing.
    """
    raise NotImplementedError
