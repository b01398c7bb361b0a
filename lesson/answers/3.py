"""3. What does one layer do to a cosine? Write `relu_cosine`."""


def relu_cosine(c):
    """The cosine of relu(W x) and relu(W y) for a random matrix W of very many rows: a number.

    `c`, a Python float from -1 to 1, is the cosine of the vectors x and y.
    """
    raise NotImplementedError
