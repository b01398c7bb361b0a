"""3. What does one layer do to a cosine? Write `relu_cosine`."""

import math


def relu_cosine(c):
    """The cosine of relu(W x) and relu(W y) for a random matrix W of very many rows: a number.

    `c`, a Python float from -1 to 1, is the cosine of the vectors x and y.
    """
    # E relu(a) relu(b) over normal a and b of correlation c = cos(angle), divided by E relu(a)^2 = 1/2
    angle = math.acos(c)
    return (math.sin(angle) + (math.pi - angle) * c) / math.pi
