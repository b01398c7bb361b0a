"""8. Which inputs deceive a test? Write `inputs`. To start again: git checkout answers/8.py"""


def inputs(num_sequences, T, d):
    """Random inputs on which the paper's test calls strangers kin: a float tensor (num_sequences, T, d).

    It has a vector of width d in place of each embedded token, and its sequences are independent.
    """
    raise NotImplementedError
