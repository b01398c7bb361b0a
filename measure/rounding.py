"""What does rounding to 8 bits cost a model with massive activations? (ours)"""

import contextlib

from torch import nn


@contextlib.contextmanager
def rounded_inputs(model, scale, T):
    """A context in which the blocks' projections read inputs rounded to 8 bits: -127 to 127 times a step.

    With `token` each position has its own step; with `tensor` a sequence of T tokens shares one.
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
    """A context in which the blocks' projections have weights rounded to 8 bits.

    With `token` each output of a matrix has its own step; with `tensor` the matrix shares one.
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
    """x, rounded to -127 to 127 times a step, which is shared along `dims`."""
    step = x.abs().amax(dims, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step
