"""What is said of two models, in words and in numbers? (ours)"""

from lineage.judge import BASE_R, HALF, Findings, rule_of

SAME_EMBEDDING = 0.99  # how alike copies are in any basis; trained children down to 0.67 (docs/lineage.md)
COLUMNS = "verdict sentence units units_found units_share r layer base_layer distance body_r body_z "
COLUMNS += "body_log10_p embedding_z table_likeness"  # of a row
COPIED = "a part may have been copied"
REMEDY = "an earlier checkpoint of the suspect, or a common ancestor, would tell"


def verdict_of(findings: Findings):
    """The verdict on two stacks, and a sentence."""
    verdict, rule = rule_of(findings)
    said = phrases(findings, rule)
    for stack in (findings.evidence.base, findings.evidence.suspect):
        unread = ", ".join(f"{what} ({share:.0%} of its layers)" for what, share in stack.unread.items())
        said.append(f"not looked at in {stack.model}: {unread}" if unread else "")
    return verdict, "; ".join(filter(None, said))


def phrases(findings: Findings, rule):
    """What is said where a rule holds."""
    evidence = findings.evidence
    embedding, coordinates = embedding_phrase(findings), coordinates_phrase(evidence.coordinates.body)
    if rule == "bare":
        return [f"nothing to compare: {evidence.bare}", embedding]
    if rule == "kin":
        return [found_phrase(findings), *changes(findings), embedding]
    if rule == "one layer":
        return [f"{found_phrase(findings)}, but no other layer's: {COPIED}", embedding, REMEDY]
    neurons = neurons_phrase(findings)
    if rule == "some coordinates":
        some = f"{coordinates}, but not in every kind of matrix of two layers: {COPIED}"
        return [some, neurons, embedding, REMEDY]
    if rule == "some bits":
        begin = "matrices begin bit for bit as the base's, but no whole MLP or layer"
        return [f"{begin}: {COPIED}", neurons, embedding, REMEDY]
    missing = missing_phrase(evidence)
    if rule == "no neurons":
        return [f"{coordinates}, but a changed basis would hide a child, and {findings.lack}", missing]
    if rule == "too many neurons":
        few = "more than unrelated models share there, but fewer, or more weakly, than a child"
        return [f"{neurons}: {few}", embedding, REMEDY]
    if rule == "part":
        return [f"{neurons}, but a part is not the model: {missing}", embedding]
    return [f"{neurons}, if their tokens mean the same", embedding]


def row_of(findings: Findings):
    """The row of two models: numbers; of neurons those of the layer that counts. And details."""
    evidence = findings.evidence
    body, embedding = evidence.coordinates.body, evidence.coordinates.embedding
    row = dict.fromkeys(COLUMNS.split())
    row["verdict"], row["sentence"] = verdict_of(findings)
    decisive = findings.decisive
    if decisive:
        row |= {"r": decisive.r, "layer": decisive.layer, "base_layer": decisive.base_layer}
    if decisive and decisive.match:
        match = decisive.match
        row |= {"units": match.units, "units_found": match.found, "units_share": match.share}
    row |= {"distance": findings.distance, "table_likeness": evidence.likeness}
    if body:
        row |= {"body_r": body.r, "body_z": body.z, "body_log10_p": body.log10_p}
    if embedding:
        row["embedding_z"] = embedding.z
    layers = []
    for each in findings.layers:
        if each.base_layer:
            shown = {key: getattr(each, key) for key in ("layer", "base_layer", "ground", "r", "distance")}
            for key in ("found", "units", "share", "by_chance"):
                shown[key] = getattr(each.match, key) if each.match else None
            layers.append(shown)
    return row, {"layers": layers, "layer_map": evidence.layer_map}


def layers_phrase(numbers):
    """Layers by their numbers: "layers 1-3", "layers 3, 5"."""
    numbers = sorted({*numbers})
    is_run = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
    shown = f"{numbers[0]}-{numbers[-1]}" if is_run else ", ".join(map(str, numbers))
    return f"layer{'s' if len(numbers) != 1 else ''} {shown}"


def found_phrase(findings):
    """What is the base's, for each ground."""
    phrases = []
    for ground in ("bits", "neurons", "coordinates"):
        layers = findings.on(ground)
        if not layers:
            continue
        own = layers_phrase(each.layer for each in layers)
        origins = layers_phrase(each.base_layer for each in layers)
        if ground == "bits":
            phrases.append(f"matrices of {own} begin bit for bit as those of the base's {origins}")
            continue
        if ground == "neurons":
            least = min((each.match for each in layers), key=lambda match: match.share)
            weakly = f", weakly (r = {least.r:.2f})" if least.r < BASE_R else ""
            phrase = f"at least {least.found:,} of {least.units:,} neurons of {len(layers)} of the "
            phrase += f"{len(findings.evidence.matches)} layers read were matched{weakly}"
        else:
            phrase = f"{coordinates_phrase(findings.evidence.coordinates.body)} in all matrices of {own}"
        phrases.append(phrase if own == origins else f"{phrase}, in {origins} of the base")
    return "; ".join(phrases)


def neurons_phrase(findings):
    """How many neurons were matched of a suspect that is not seen to be a child, and what that means."""
    most = findings.most_matched
    if findings.lack or most is None:
        return findings.lack or "neurons were not looked for"
    num_read, depth = len(findings.evidence.matches), len(findings.evidence.suspect.layers)
    phrase = f"at most {most.found:,} of {most.units:,} neurons of a layer were matched"
    if num_read < depth:
        phrase += f" ({num_read} of {depth} layers were read)"
    if not most.is_beyond_chance:
        return f"{phrase}, as by chance"
    phrase += f" ({most.share:.0%} of layer {most.layer}, r = {most.r:.2f})"
    if findings.is_above_strangers:
        return phrase
    return f"{phrase}, as of unrelated models that learnt the same words"


def changes(findings):
    """What was done to a suspect whose layers are the base's."""
    evidence, matches = findings.evidence, findings.with_neurons
    body, embedding = evidence.coordinates.body, evidence.coordinates.embedding
    changes = []
    if matches and evidence.suspect.width != evidence.base.width:
        changes.append(f"its width is {evidence.suspect.width:,}, not {evidence.base.width:,}")
    if matches and embedding and not embedding.agrees and not (body and body.agrees):
        changes.append("its residual basis was changed")
    if sum(match.in_place for match in matches) < sum(match.found for match in matches) / 2:
        changes.append("its neurons stand in another order")
    if findings.distance:
        how = "by training, merging, noise or rounding"
        changes.append(f"its matrices are at distance {findings.distance:.2g}, {how}")
    return changes


def coordinates_phrase(body):
    """How far the coordinates of the layers' weights agree, by the test that says most."""
    if body is None:
        return "no layers' matrices of one role and shape"
    agree = "agree" if body.agrees else "do not agree"
    numbers = f"r = {body.r:.2g}, z = {body.z:.1f}, log10 p = {body.log10_p:.1f}"
    return f"coordinates of the layers' weights {agree} ({numbers})"


def embedding_phrase(findings):
    """Is the suspect's embedding matrix the base's, in whatever basis?"""
    evidence = findings.evidence
    if not (evidence.base.embeddings and evidence.suspect.embeddings):
        return "no embedding matrices to compare"
    test, likeness = evidence.coordinates.embedding, evidence.likeness
    agrees = test is not None and test.agrees
    if likeness is None and agrees:
        likeness = test.r
    if likeness is not None and likeness > SAME_EMBEDDING:
        return "the base's embedding matrix"
    if likeness is not None and (agrees or findings.with_neurons):
        return "the base's embedding matrix, changed"  # neurons are matched as the base's alone shows them
    if likeness is None or likeness > HALF or evidence.equal or evidence.coordinates.layers:
        return "embedding matrices that were not seen to agree"
    return "a different embedding matrix"


def missing_phrase(evidence):
    """What is said to be elsewhere of the two models."""
    missing = []
    for stack in (evidence.base, evidence.suspect):
        missing += [f"of {stack.model} {phrase}" for phrase in stack.missing]
    return "; ".join(missing)
