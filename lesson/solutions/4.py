"""4. Of which seed was a model born? Write `seed_of`."""

from init import draw_weight
from sources.checkpoint import find_model


def seed_of(folder):
    """The seed, from 0 to 9999, of which a child was born: a whole number.

    `folder` is the Path of a checkpoint, a `tiny_llama` with a cosine of 0.5 with its birth. With
    `find_model` of `sources.checkpoint`, `find_model(str(folder)).weights.read(name)` is one of its matrices:
    for the name "model.layers.0.self_attn.v_proj.weight" (256, 256). With `draw_weight` of `init`,
    `draw_weight(seed, name, shape, 0.02)` is the matrix of this name and shape that a seed is born with;
    `draw_weight(seed, name, shape, 0.02, count=100)` are its first 100 numbers.
    """
    name = "model.layers.0.self_attn.v_proj.weight"
    weight = find_model(str(folder)).weights.read(name)  # (256, 256)
    numbers = weight.flatten()[:4096]

    def likeness(seed):
        birth = draw_weight(seed, name, weight.shape, 0.02, count=4096)
        return (birth @ numbers).item()

    return max(range(10_000), key=likeness)
