"""Of which layers was a suspect made? The rows of censuses (`measure/census.py`) as a sentence.

    >>> from measure.layers import makeup
    >>> row = {"share": 1.0, "base_layer": "layer 1"}
    >>> rows = [row | {"number": i, "base_number": j} for i, j in ((1, 1), (2, 2), (3, 5), (4, 6))]
    >>> makeup(rows, range(1, 7), range(1, 5))
    'layers 1–2 and 5–6 of the base, in this order; 3 and 4 are gone'

A fine-tune has its base's layers in their order. A pruned model lacks some, one that was scaled up in depth
repeats some, a mixture of experts may have several copies of each, and a merge has layers of several bases.
"""

from collections import Counter

KIN_SHARE = 0.2  # of a layer's hidden units found again: from here on it is the base's
AS_CLOSE = 0.001  # distances that differ by less are equal


def makeup(rows, base_layers, suspect_layers):
    """How a suspect was made of a base's layers; "" if it has all of them, in their order, and no others.

    `rows` are a census's, and the rest the numbers of all layers of both. Where not all were looked at,
    nothing is said of layers that are gone.
    """
    origins = {}  # of the suspect's layers, by number: those of its MLPs, or experts
    for row in rows:
        if row["share"] >= KIN_SHARE:
            origins.setdefault(row["number"], []).append(row["base_number"])
    if not origins:
        return ""
    sequence = [Counter(found).most_common(1)[0][0] for found in origins.values()]
    looked_at = list(dict.fromkeys(row["number"] for row in rows))
    experts = copies(rows)
    if sequence == looked_at and len(base_layers) == len(suspect_layers) and not experts:
        return ""
    ranges = [span(first, last) for first, last in runs(sequence)]
    text = f"{layers(sequence)} {listed(ranges)} of the base"
    if len(ranges) > 1:
        text += ", in this order"
    text += experts
    if len(looked_at) < len(suspect_layers):
        return f"{text} ({len(looked_at)} of {len(suspect_layers)} layers were looked at)"
    gone = [number for number in base_layers if number not in sequence]
    counts = Counter(sequence)
    repeated = sorted(number for number in counts if counts[number] > 1)
    new = [number for number in looked_at if number not in origins]
    for numbers, one, many in ((gone, "is gone", "are gone"), (repeated, "is repeated", "are repeated")):
        if numbers:
            text += f"; {in_words(numbers)} {one if len(numbers) == 1 else many}"
    if new:
        text += f"; the suspect's {layers(new)} {in_words(new)} came from elsewhere"
    return text


def copies(rows):
    """Words for a mixture of experts each of whose layers is copies of one MLP; "" for any other model."""
    if any("expert" in row["base_layer"] for row in rows):
        return ""
    counts = Counter(row["number"] for row in rows if row["share"] >= KIN_SHARE)
    most = max(counts.values())
    return f", each as {most} experts" if most > 1 else ""


def merger(censuses):
    """How a suspect was made of several bases' layers; "" unless at least two of them have a part in it.

    `censuses` has the rows of each base, by its name, all of the same layers of the suspect. A layer that is
    found in several bases came from the closest; if several are as close, from that of the layer below.
    """
    origins = []  # of each of the suspect's MLPs that was found: its base, and the layer's number there
    for rows in zip(*censuses.values()):
        found = {}
        for name, row in zip(censuses, rows):
            if row["share"] >= KIN_SHARE and row["distance"] is not None:
                found[name] = row
        if not found:
            continue
        least = min(row["distance"] for row in found.values())
        close = [name for name, row in found.items() if row["distance"] <= least + AS_CLOSE]
        base = origins[-1][0] if origins and origins[-1][0] in close else close[0]
        if (base, found[base]["base_number"]) not in origins[-1:]:  # another expert of the layer
            origins.append((base, found[base]["base_number"]))
    if len({base for base, _ in origins}) < 2:
        return ""
    parts = []
    start = 0
    for end in range(1, len(origins) + 1):
        if end == len(origins) or origins[end][0] != origins[start][0]:
            numbers = [number for _, number in origins[start:end]]
            ranges = listed([span(first, last) for first, last in runs(numbers)])
            parts.append(f"{layers(numbers)} {ranges} of {origins[start][0]}")
            start = end
    return f"{listed(parts)}, in this order"


# ---- words -------------------------------------------------------------------------------------------------


def runs(numbers):
    """The first and the last of each run of consecutive numbers: 1 2 3 2 3 is (1, 3), (2, 3)."""
    found = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def span(first, last):
    """A run in words: 3, or 3–5."""
    return f"{first}" if first == last else f"{first}–{last}"


def in_words(numbers):
    """Numbers in words: 3 and 4; 3, 5 and 7–9."""
    words = []
    for first, last in runs(numbers):
        if last - first == 1:
            words += [f"{first}", f"{last}"]
        else:
            words.append(span(first, last))
    return listed(words)


def layers(numbers):
    """The word for as many layers."""
    return "layer" if len(numbers) == 1 else "layers"


def listed(words):
    """Words as a sentence lists them: a, b and c."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
