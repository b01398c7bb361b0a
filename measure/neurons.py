"""Which hidden units of an MLP wake for the first position? SO's super neurons, by a ratio of ours."""

import pandas as pd


def super_neurons(layer, mlp, activation):
    """The ten hidden units of a layer for which position 1 stands out most, by mean |activation| (T, d_ff).

    `down_share` is the share of the unit's squared output weights that its largest, at `dimension`, holds.
    """
    first = activation[0]
    others = activation[1:].mean(0).clamp(min=1e-3 * activation.mean())  # no unit is dead
    gate = mlp.gate_proj or mlp.up_proj
    down = mlp.down_proj.weight.float().square().cpu()  # (d, d_ff)
    largest, dimension = down.max(dim=0)
    total = down.sum(0)
    of_units = {
        "ratio": first / others,
        "first": first,
        "others": others,
        "gate_norm": gate.weight.float().norm(dim=1),
        "up_norm": mlp.up_proj.weight.float().norm(dim=1),
        "down_norm": total.sqrt(),
        "down_share": largest / total.clamp(min=1e-30),
        "dimension": dimension,
    }
    table = pd.DataFrame({name: values.tolist() for name, values in of_units.items()})
    table.insert(0, "neuron", table.index)
    table.insert(0, "layer", layer)
    return table.nlargest(10, "ratio").to_dict("records")
