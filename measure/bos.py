"""Does a model sink on BOS, or on position 1? (ours)"""

from collections import defaultdict

import numpy as np
import torch

from lib.runtime import progress
from measure.attention import Means, batches, constants_at, with_constants

ELSEWHERE = 10  # where a BOS that is not first stands


@torch.inference_mode()
def bos_or_position(model, text, bos, epsilon):
    """A row for each case and layer with attention: to BOS, to position 1 without BOS, or to a constant.

    Constants are those of BOS, and those of the first tokens of the same text (n, T). A head sinks above
    `epsilon`.
    """
    first = torch.cat((text.new_full((len(text), 1), bos), text), dim=1)
    within = text.clone()
    within[:, ELSEWHERE - 1] = bos
    of_bos = with_constants(model, constants_at(model, first[:1, :1]))
    of_first = with_constants(model, constants_at(model, text))
    cases = {  # by kind: who reads what, and the position whose attention is measured; 0 is a constant
        "BOS first": (model, first, 1),
        "BOS's constants, no BOS": (of_bos, text, 0),
        "no BOS": (model, text, 1),
        "constants of first tokens": (of_first, text, 0),
        f"BOS at position {ELSEWHERE}": (model, within, ELSEWHERE),
    }
    rows = []
    for kind, (reader, tokens, place) in progress(cases.items(), desc="bos", unit=" cases", leave=False):
        for row in rows_of_layers(reader, tokens, place, epsilon):
            rows.append({"kind": kind, "place": place} | row)
    return rows


def rows_of_layers(model, tokens, place, epsilon):
    """For each layer that attends: mean attention to a position, and the share of heads that sink there."""
    means = Means(len(tokens))

    def on_heads(layer, heads, q, k, v, alpha):
        at_place = alpha((place,))[..., 0]  # (B, H)
        means.add("alpha", layer, at_place)
        means.add("sink_rate", layer, (at_place > epsilon).float())

    for part in batches(tokens):
        model.hidden(part, on_heads=on_heads)
    rows = []
    for layer, alpha in means.of["alpha"].items():
        rate = means.of["sink_rate"][layer].mean().item()
        rows.append({"layer": layer, "alpha": alpha.mean().item(), "sink_rate": rate})
    return rows


def tell_bos(rows) -> None:
    """Print for each model in the rows of `bos_or_position` whether it sinks on BOS or on position 1."""
    rates = defaultdict(lambda: defaultdict(list))  # by model and kind, those of layers
    for row in rows:
        rates[row["checkpoint"]][row["kind"]].append(100 * row["sink_rate"])
    for label, by_kind in rates.items():
        kinds = ("BOS first", f"BOS at position {ELSEWHERE}", "no BOS")
        first, elsewhere, without = [np.mean(by_kind[kind]) for kind in kinds]
        where = "sinks on position 1, with BOS there or without"
        if max(first, without) < 1:
            where = "hardly sinks on position 1, with BOS there or without"
        elif without < first / 10:
            where = "sinks on BOS, not on position 1"
        elif first < without / 10:
            where = "sinks on position 1, but not on BOS there"
        said = f"{first:.1f} % of heads on BOS at position 1, {elsewhere:.1f} % on BOS at {ELSEWHERE}"
        print(f"{label} {where}: {said}, and {without:.1f} % on position 1 without BOS")
