"""5. Can a child be hidden? Write `hide`."""


def hide(weights):
    """The weights of a model that computes the same, with the coordinates of its stream elsewhere.

    `weights` is the state of a `tiny_llama`, a dictionary from the names of parameters to tensors. Their last
    axis is the stream's; but of `o_proj` and `down_proj`, which write to the stream, it is the first. Return
    a dictionary of the same names and shapes.
    """
    raise NotImplementedError
