"""What does rounding to 8 bits cost a model, where some numbers of its stream are huge? (ours)"""

import contextlib

from torch import nn


@contextlib.contextmanager
def rounded_inputs(model, scale, T):
    """Within this context the blocks' projections read 8-bit inputs: -127 to 127, times a step.

    With `token` each position has its own step; with `tensor` one step serves a whole sequence, of T tokens.
    """
    dims = {"token": (2,), "tensor": (1, 2)}[scale]

    def hook(module, inputs):
        (x,) = inputs  # (B, T, d), or (B T, d)
        return rounded(x.reshape(-1, T, x.shape[-1]), dims).view(x.shape)

    with contextlib.ExitStack() as stack:
        for module in model.linears:
            stack.enter_context(module.register_forward_pre_hook(hook))
        yield


@contextlib.contextmanager
def rounded_weights(model, scale):
    """Within this context the blocks' projections have 8-bit weights.

    With `token` each output of a matrix has its own step; with `tensor` one step serves the matrix.
    """
    usual = {module: module.weight.data for module in model.linears}
    try:
        for module, weight in usual.items():
            inputs = 1 if isinstance(module, nn.Linear) else 0  # a Conv1D's matrix is (in, out)
            module.weight.data = rounded(weight, {"token": inputs, "tensor": (0, 1)}[scale])
        yield
    finally:
        for module, weight in usual.items():
            module.weight.data = weight


def rounded(x, dims):
    """Numbers as -127 to 127 times a step, the same along `dims`."""
    step = x.abs().amax(dims, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step
