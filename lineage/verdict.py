"""What is said of two models? The row of a verdict, and a sentence with its reason (ours)."""

import numpy as np

from lineage.table import (
    BASE_R,
    HALF,
    NO_EVIDENCE,
    PART_IN_COMMON,
    SAME_BIRTH,
    SAME_TABLE,
    is_above_strangers,
)

COLUMNS = "verdict sentence units units_found units_share r layer base_layer distance body_r body_z "
COLUMNS += "body_log10_p embedding_z table_likeness part base_part"
EQUAL = {  # what is said of layers that are known by their bits
    "bits": "{} are bit for bit the base's {}",
    "beginnings": "{} begin bit for bit as the base's {}",
    "bits of MLPs": "MLPs of {} are bit for bit MLPs of the base's {}",
    "beginnings of MLPs": "MLPs of {} begin bit for bit as MLPs of the base's {}",
}
REMEDY = "an earlier checkpoint of the suspect, or a common ancestor, would tell"
OTHERS_TABLE = "embedding matrices that were not seen to agree"


def explain(base, suspect, pairs, verdict, pair):
    """The row of two Models, null where there is nothing, and for figures its `layers` and `layer_map`."""
    proviso = ""
    if pair.verdict == NO_EVIDENCE and base.vocabulary and suspect.vocabulary:
        proviso = ", if their tokenizers tell the truth"
    elif not (base.is_newborn and suspect.is_newborn):
        proviso = ", if their token numbers mean the same"
    sentence = sentence_of(pair, proviso)
    if len(pairs) > 1:
        sentence = f"its {title(pair.suspect)} and the base's {title(pair.base)}: {sentence}"
    row = row_of(pair) | {"verdict": verdict}
    kin = [other for other in pairs if other.verdict == SAME_BIRTH]
    if verdict == PART_IN_COMMON:
        common = max(kin, key=lambda other: other.suspect.size)
        row |= {"part": common.suspect.name, "base_part": common.base.name}
        how = "bit for bit" if all(row.ground == "bits" for row in common.rows) else "; ".join(found(common))
        copied = f"its {title(common.suspect)} is the base's {title(common.base)}, {how}"
        sentence = f"{copied}; the language models: {pair.verdict} ({sentence})"
    elif verdict == SAME_BIRTH:
        kin_stacks = [other.suspect for other in kin]
        for stack in suspect.stacks:
            if stack is not pair.suspect:
                said = "of one birth, too" if stack in kin_stacks else "not seen to be the base's"
                sentence += f"; {said}: its {title(stack)}"
    return row | {"sentence": sentence}, {"layers": layer_rows(pair), "layer_map": pair.match.layer_map}


def unread_row(error):
    """The row of a suspect that cannot be read: why not, and nothing else; and no layers."""
    row = dict.fromkeys(COLUMNS.split()) | {"verdict": "not read", "sentence": str(error)}
    return row, {"layers": [], "layer_map": {}}


def title(stack):
    """A stack for a reader: its name, and how many layers it has."""
    depth = len(stack.layers)
    return f"`{stack.name or '*'}` ({depth} layer{'s' if depth != 1 else ''})"


def row_of(pair):
    """The numbers of a pair; of units those of the layer that counts."""
    row = dict.fromkeys(COLUMNS.split()) | {"verdict": pair.verdict, "distance": mean_distance(pair)}
    layer = decisive_row(pair)
    if layer:
        row |= {"r": layer.r, "layer": layer.layer, "base_layer": layer.closest or layer.base_layer}
        if layer.closest:
            row |= {"units": layer.units, "units_found": layer.found, "units_share": layer.share}
    if "body" in pair.coordinates:
        body = pair.coordinates["body"]
        row |= {"body_r": body["matched"], "body_z": body["z"], "body_log10_p": body["log10_p"]}
    if "embedding" in pair.coordinates:
        row["embedding_z"] = pair.coordinates["embedding"]["z"]
    return row | {"table_likeness": pair.match.table_likeness}


def decisive_row(pair):
    """The row that counts: the least that is the base's, by units if any are, else the one with most."""
    if pair.with_units:
        return min(pair.with_units, key=lambda row: row.share)
    alike = [row for row in pair.rows if row.ground and row.r is not None]
    if alike:
        return min(alike, key=lambda row: row.r)
    return max(pair.match.rows, key=lambda row: row.share, default=None)


def layer_rows(pair):
    """For JSON: the rows of layers that were looked for by their units, or are the base's."""
    rows = []
    for row in pair.rows:
        if row.closest or row.ground:
            shown = {"layer": row.label, "base_layer": row.base_label or f"layer {row.base_layer}"}
            shown |= {"r": row.r, "distance": row.distance}
            for key in ("found", "units", "share", "by_chance"):
                shown[key] = getattr(row, key) if row.closest else None
            rows.append(shown | {"is_base": row.ground != "", "ground": row.ground})
    return rows


def mean_distance(pair):
    """The mean distance of layers that are the base's; None where neither units nor coordinates tell it."""
    distances = [row.distance for row in pair.rows if row.ground and row.distance is not None]
    return float(np.mean(distances)) if distances else None


def sentence_of(pair, proviso):
    """Why a pair has its verdict, in plain words; what was not looked at."""
    unread = []
    for stack in (pair.base, pair.suspect):
        shares = {what: f"{share:.0%}" for what, share in stack.unread.items()}
        of_model = f"of {stack.model}'s layers"
        unread += [f"{what} ({share} {of_model})" for what, share in shares.items() if share != "0%"]
    reason = reason_of(pair, proviso)
    return f"{reason}; not looked at: {' and '.join(unread)}" if unread else reason


def reason_of(pair, proviso):
    """The sentence of the rule that gave the verdict of a pair."""
    match pair.reason:
        case "bare":
            return f"nothing to compare: {pair.bare}; {table_phrase(pair)}"
        case "layers":
            return "; ".join([*found(pair), *changes(pair), table_phrase(pair)])
        case "one layer":
            copied = "but no other layer's, or few experts of each: a part may have been copied"
            return f"{'; '.join(found(pair))}, {copied}; {table_phrase(pair)}; {REMEDY}"
        case "coordinates":
            few = "but not in every kind of matrix of two layers: a part may have been copied"
            return f"{coordinates_phrase(pair)}, {few}; {units_phrase(pair)}; {table_phrase(pair)}; {REMEDY}"
        case "bits":
            few = "matrices in its layers are the base's bit for bit, but no whole MLP or layer"
            return f"{few}: a part may have been copied; {units_phrase(pair)}; {table_phrase(pair)}; {REMEDY}"
        case "coordinates alone":
            return f"{coordinates_phrase(pair)}, but a changed basis would hide a child, and {pair.lack}"
        case "between":
            between = "more than unrelated models share there, but fewer, or more weakly, than a child"
            return f"{units_phrase(pair)}: {between}; {table_phrase(pair)}; {REMEDY}"
        case "units":
            return f"{units_phrase(pair)}{proviso}; {table_phrase(pair)}"


def found(pair):
    """What is the base's, a phrase for each ground; coordinates only where nothing else shows the layers."""
    for ground, how in EQUAL.items():
        equal = {row.layer: row.base_layer for row in pair.rows if row.ground == ground}
        if equal:
            if len(equal) == 1 and how.startswith("{}"):
                how = how.replace(" are", " is").replace(" begin", " begins")
            yield how.format(layers_phrase(equal), layers_phrase(equal.values()))
    if pair.with_units:
        yield matched_phrase(pair)
    alike = dict.fromkeys(row.layer for row in pair.rows if row.ground == "coordinates")
    if alike:
        yield f"{coordinates_phrase(pair)} in every kind of matrix of {layers_phrase(alike)}"


def matched_phrase(pair):
    """How many units were matched, and in which layers; of the base's, unless each is in its own place."""
    least = decisive_row(pair)
    rows = pair.with_units
    origins = {row.layer: row.closest for row in rows}
    layers = f"{len(origins)} of {len({row.layer for row in pair.match.rows})} layers"
    if any(row.ground and not row.closest for row in pair.rows):
        layers = layers_phrase(origins)
    elif len(rows) == len(pair.match.rows):
        layers = "every layer"
    phrase = f"{least.found:,} of {least.units:,} neurons of {layers} were matched"
    if any(row.share > least.share for row in rows):
        phrase = f"at least {phrase}"
    if any(row.units != least.units for row in rows):
        phrase += f" ({least.share:.0%} of layer {least.layer})"
    if least.r < BASE_R:
        phrase += f", weakly (r = {least.r:.2f})"
    have_one_depth = len(pair.suspect.layers) == len(pair.base.layers)
    if len(origins) > 1 and have_one_depth and [*origins] == [*origins.values()]:
        return phrase
    return f"{phrase}, in {layers_phrase(origins.values())} of the base"


def layers_phrase(numbers):
    """Layers by their numbers: "layers 1-3, 5"."""
    runs = []  # of consecutive ones
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' if len(numbers) != 1 else ''} {', '.join(spans)}"


def units_phrase(pair):
    """How many units were matched of a suspect that is not seen to be a child, and what that means."""
    if pair.lack:
        return pair.lack
    most = decisive_row(pair)
    phrase = f"at most {most.found:,} of {most.units:,} neurons of a layer were matched"
    num_read, depth = len({row.layer for row in pair.match.rows}), len(pair.suspect.layers)
    if num_read < depth:
        phrase += f" ({num_read} of {depth} layers were read)"
    if not most.is_beyond_chance:
        return f"{phrase}, as by chance"
    phrase += f" ({most.share:.0%} of layer {most.layer}, r = {most.r:.2f})"
    if is_above_strangers(pair):
        return phrase
    return f"{phrase}, as of unrelated models that learnt the same words"


def changes(pair):
    """What was done to a suspect whose layers are the base's."""
    rows = pair.with_units
    if rows and pair.suspect.width != pair.base.width:
        yield f"its width is {pair.suspect.width:,}, not {pair.base.width:,}"
    if rows and "embedding" in pair.coordinates and not pair.agrees("embedding") and not pair.agrees("body"):
        yield "its residual basis was changed"
    if sum(row.in_place for row in rows) < sum(row.found for row in rows) / 2:
        yield "its neurons stand in another order"
    far = mean_distance(pair)
    what = "what matched neurons read" if rows else "what was read of their matrices"
    if far == 0 and rows:
        yield f"{what} is the base's, up to rounding"
    elif far:
        yield f"{what} is at distance {far:.2g}, by training, merging, noise or rounding"


def coordinates_phrase(pair):
    """How far the coordinates of the layers' weights agree."""
    if "body" not in pair.coordinates:
        return "no layers' matrices of one name and shape"
    body = pair.coordinates["body"]
    agree = "agree" if body["same"] else "do not agree"
    return f"coordinates of the layers' weights {agree} (r = {body['matched']:.2g}, z = {body['z']:.1f})"


def table_phrase(pair):
    """Is the suspect's embedding matrix the base's, in whatever basis?"""
    if not (pair.base.tables and pair.suspect.tables):
        return "not both have an embedding matrix"
    likeness = pair.match.table_likeness
    if likeness is None and pair.agrees("embedding"):
        likeness = pair.coordinates["embedding"]["matched"]
    if likeness is None:
        return OTHERS_TABLE
    if likeness > SAME_TABLE:
        return "the base's embedding matrix"
    if pair.agrees("embedding") or pair.with_units:  # units are matched as the base's matrix alone shows them
        return "the base's embedding matrix, changed"
    if likeness > HALF or any(row.ground for row in pair.rows):
        return OTHERS_TABLE
    return "a different embedding matrix"
