"""2. What do all states of a newborn share? Write `shared`."""


def shared(model):
    """The part of the stream that all sequences share, after each block: a float tensor (L, d).

    `model` is a Transformer, a newborn `tiny_gpt2` with ReLU: L = 6, d = 256. Its `model.model.embed_tokens`
    has the embeddings, and each `block` of `model.model.layers` has `input_layernorm`, `self_attn.v_proj`,
    `self_attn.o_proj`, `post_attention_layernorm` and `mlp`, which may all be called on vectors (..., d) of
    your own. No tokens can be read: `model.hidden` is None here.
    """
    raise NotImplementedError
