"""8. When do strangers look like kin? Write `is_child`."""


def is_child(shares):
    """Is a suspect a child of the base, at least in two of its layers: True or False.

    `shares` are numbers from 0 to 1, one for each layer of the suspect, from input to output: the share of
    its neurons that are matched in the closest layer of the base. Suspects have 6 to 30 layers.
    """
    raise NotImplementedError
