"""lineage/judge.py: every combination of evidence, and folders that made it say something false."""

import functools
import itertools
import json
from dataclasses import replace

import pytest
import scipy.stats
import torch
from kin import BASE, CHILD, CONFIG, LAYER, STRANGER, TABLES, changed, drawn, folder_with, judged
from sentencepiece import sentencepiece_model_pb2

from lineage.coordinates import AlikeLayer, Coordinates, JointTest
from lineage.judge import (
    INCONCLUSIVE,
    NO_EVIDENCE,
    SAME_BIRTH,
    Evidence,
    NeuronMatch,
    chance_log10_p,
    findings_of,
    marked,
)
from lineage.layout import find_stacks
from lineage.wording import row_of
from model import ModelConfig
from reproduce.disguise import disguised, newborn_source, weights_of
from reproduce.robustness import noised
from weights.vocabulary import token_ids

OUTCOMES = {
    "same": JointTest(r=0.7, z=250.0, log10_p=-300.0),
    "between": JointTest(r=0.002, z=3.1, log10_p=-3.0),
    "nothing": JointTest(r=0.0, z=0.1, log10_p=-0.3),
}


@functools.cache
def stack_of(depth: int):
    return find_stacks(newborn_source(ModelConfig(8, 4, depth, 1, 4, 4), 1), "B")[0]


def judged_pair(counts=None, depth=24, r=0.2, base_layers=None, units=1000, body=None, **more) -> tuple:
    """Row and details of stacks of one depth: `counts` of 1,000 units by layer, from 1, one in the others.

    Without counts no units are looked for. `more` may have `equal` layers and those that are `alike`, `read`
    layers, another `lack`, and the `embedding`'s coordinates.
    """
    stack = replace(stack_of(depth), may_have_mlps=more.get("may_have_mlps", False))
    matches = []
    for layer in more.get("read", range(1, depth + 1)) if counts is not None else ():
        closest = (base_layers or {}).get(layer, layer)
        middle = stack.is_middle(layer) + stack.is_middle(closest)
        counted = {"found": counts.get(layer, 1), "units": units, "r": r, "by_chance": 1}
        matches.append(NeuronMatch(layer, closest, middle, in_place=1000, **counted))
    layers = {
        n: AlikeLayer(n, least_r, distance, True) for n, (least_r, distance) in more.get("alike", {}).items()
    }
    coordinates = Coordinates(OUTCOMES.get(body), OUTCOMES.get(more.get("embedding")), layers)
    found = {"matches": marked(matches), "num_tokens": 4096, "likeness": 0.06, "lack": more.get("lack", "")}
    return row_of(findings_of(Evidence(stack, stack, coordinates, more.get("equal", {}), **found)))


ALL = dict.fromkeys(range(1, 25), 1000)
LATE = {18: 70, 20: 100, 22: 160, 24: 370}  # what unrelated language models share
TAIL = {layer: 18 + layer for layer in range(1, 6)}  # layers of a model cut to its end
NOISED = dict.fromkeys(TAIL, 300)
MATCHES = {  # what was matched: the verdict, and what its sentence says
    "all, strongly": (dict(counts=ALL, r=0.95), SAME_BIRTH, "1,000 of 1,000 neurons of 24 of the 24 layers"),
    "all, weakly": (dict(counts=ALL, r=0.1), SAME_BIRTH, "layers read were matched, weakly (r = 0.10)"),
    "two in the middle": (dict(counts={9: 600, 10: 600}), SAME_BIRTH, "of 2 of the 24 layers"),
    "two late ones, strongly": (dict(counts={23: 300, 24: 300}, r=0.6), SAME_BIRTH, "of 2 of the 24 layers"),
    "one in the middle": (dict(counts={9: 600}), INCONCLUSIVE, "(r = 0.20), but no other"),
    "one layer twice": (dict(counts={9: 900, 10: 900}, base_layers={10: 9}), INCONCLUSIVE, "but no other"),
    "one of the read": (dict(counts={9: 900}, read=(9, 14, 19, 24)), INCONCLUSIVE, "but no other"),
    "one of few": (dict(counts={2: 600}, depth=6), INCONCLUSIVE, "1 of the 6 layers read"),
    "the only one": (dict(counts={1: 600}, depth=1, r=0.9), SAME_BIRTH, "of 1 of the 1 layers"),
    "some in the middle": (dict(counts={9: 120}), INCONCLUSIVE, "12% of layer 9"),
    "late ones": (dict(counts=LATE), NO_EVIDENCE, "(37% of layer 24, r = 0.20), as of unrelated"),
    "all late, weakly": (dict(counts={23: 900, 24: 900}), INCONCLUSIVE, "were matched (90% of layer"),
    "a noised tail": (dict(counts=NOISED, depth=7, base_layers=TAIL), INCONCLUSIVE, "30% of"),
    "the first, weakly": (dict(counts={1: 80}), NO_EVIDENCE, "(8% of layer 1, r = 0.20), as of unrelated"),
    "nothing": (dict(counts={}), NO_EVIDENCE, "at most 1 of 1,000 neurons of a layer were matched"),
    "few units": (dict(counts={9: 7}, units=32), NO_EVIDENCE, "at most 7 of 32"),  # chance has 22 % of them
}


@pytest.mark.parametrize("case", MATCHES)
def test_units_decide_by_share_strength_and_place(case):
    how, verdict, said = MATCHES[case]
    for embedding in (None, *OUTCOMES):
        row, details = judged_pair(**how, body="nothing", embedding=embedding)
        assert row["verdict"] == verdict and said in row["sentence"], row["sentence"]
    told = next(each for each in details["layers"] if each["layer"] == row["layer"])
    assert (row["units_found"], row["units"], row["r"]) == (told["found"], told["units"], told["r"])


def test_every_combination_of_coordinates():
    """They decide by every kind of matrix of two layers, whatever tables and units say; z alone does not."""
    few = dict.fromkeys(range(1, 25), (0.01, 0.5))
    kin = few | {4: (0.1, 0.5), 9: (0.7, 0.5)}
    choices = ([None, *OUTCOMES], [None, *OUTCOMES], (True, False), (few, kin))
    for body, embedding, has_units, alike in itertools.product(*choices):
        how = {"counts": {}} if has_units else {"lack": "no MLPs found in B"}
        how |= {"body": body, "embedding": embedding, "alike": alike if body == "same" else {}}
        expected = NO_EVIDENCE
        if body == "same":
            expected = SAME_BIRTH if alike == kin else INCONCLUSIVE
        elif not has_units and body in (None, "between"):
            expected = INCONCLUSIVE
        assert judged_pair(**how)[0]["verdict"] == expected, how
    how |= {"body": "nothing", "may_have_mlps": True}  # a basis may have been changed
    assert judged_pair(**how)[0]["verdict"] == INCONCLUSIVE


def test_layers_count_once_whatever_shows_them():
    for equal, verdict in (({3: 4}, SAME_BIRTH), ({15: 15}, INCONCLUSIVE), ({3: 15}, INCONCLUSIVE)):
        row, _ = judged_pair({}, body="same", alike={15: (0.9, 0.5)}, equal=equal)
        assert row["verdict"] == verdict, equal
    assert judged_pair({}, equal={3: 4, 5: 4})[0]["verdict"] == INCONCLUSIVE
    row, _ = judged_pair({}, equal={4: 1, 5: 2, 6: 3})
    assert row["verdict"] == SAME_BIRTH
    begin = "matrices of layers 4-6 begin bit for bit as those of the base's layers 1-3; "
    assert row["sentence"].startswith(begin), row["sentence"]


def test_chance_is_poisson_over_all_counts():
    match = NeuronMatch(1, 1, 2, found=12, units=1000, r=0.2, by_chance=1)
    searches = (10**-6 / scipy.stats.poisson.sf(11, 1) / 3) ** 0.5  # three pairs of views, layers with layers
    assert chance_log10_p(match, int(searches)) <= -6 < chance_log10_p(match, int(searches) + 1)
    match = replace(match, found=900, by_chance=900, r=1.0)  # ties explain it
    assert chance_log10_p(match, 1) > -6
    assert not marked([match])[0].is_base


# ---- files that were made to fool it -----------------------------------------------------------------------

PQR = {"gate_proj": "p", "up_proj": "r", "down_proj": "q"}


def test_layers_of_which_nothing_is_known():
    base = newborn_source(replace(CONFIG, d_ff=64), 1)
    answer, sentence = judged(*(changed(weights_of(source), PQR) for source in (base, disguised(base))))
    assert answer == INCONCLUSIVE and "a changed basis would hide a child" in sentence


def test_no_row_of_a_table_agrees():
    """Units cannot be matched; bits and coordinates can, though the tables agree, or nothing does."""
    attention = {"mlp.": "self_attn."}  # no MLPs are found then
    base = weights_of(BASE)
    copied = weights_of(STRANGER) | {n: w for n, w in base.items() if "attn" in n or n in TABLES}
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    moved = weights_of(noised(BASE, 1))
    moved |= {name: moved[name][order] for name in TABLES}
    bits = "of layers 1-3 begin bit for bit as those of the base's layers 1-3; the base's"
    for weights, verdict, said in (
        (base, SAME_BIRTH, bits),
        (weights_of(noised(BASE, 2)), SAME_BIRTH, "in all matrices of layers 1-3"),
        (moved, SAME_BIRTH, "; embedding matrices that were not seen to agree"),
        (copied, INCONCLUSIVE, "not in every kind of matrix of two layers"),
        (
            weights_of(newborn_source(CONFIG, 2, 1)),
            INCONCLUSIVE,
            "a changed basis would hide",
        ),  # a copied table
    ):
        answer, sentence = judged(changed(base, attention), changed(weights, attention))
        assert answer == verdict and said in sentence, sentence
    assert judged(BASE, copied)[0] == INCONCLUSIVE


def test_layers_at_other_places():
    for layers, verdict in (({0: 1, 1: 2}, SAME_BIRTH), ({0: 1}, INCONCLUSIVE), ({}, NO_EVIDENCE)):
        weights = weights_of(STRANGER)
        for base_layer, layer in layers.items():
            for name in weights:
                if f"layers.{layer}." in name:
                    weights[name] = BASE.read(name.replace(f".{layer}.", f".{base_layer}."))
        answer, sentence = judged(BASE, changed(weights, PQR | {"layers.": "block_"}))
        assert answer == verdict, sentence


MOVED = PQR | {".1.": ".2."}
COPIED = {  # matrices that a stranger has of the base, bit for bit, in place of its own; what is said then
    "an MLP": (".1.mlp.", ".2.mlp.", MOVED, "of layer 3 begin bit for bit as those of the base's layer 2,"),
    "each MLP": (".mlp.", ".mlp.", PQR, "of layers 1-3 begin bit for bit as those of the base's layers 1-3"),
    "a matrix": ("1.mlp.up", "1.mlp.up", {}, "a part may have been copied"),
    "it moved": (".1.self_attn.q", "none", {"1.self_attn.q_proj": "2.mix"}, "but no whole MLP or layer"),
}


@pytest.mark.parametrize("case", COPIED)
def test_equal_bits_anywhere_are_evidence(case):
    """Beside another attention and table, under other names; but not those of a formula, in each layer."""
    part, place, names, said = COPIED[case]
    base, stranger = weights_of(BASE), weights_of(STRANGER)
    copied = {name: weight for name, weight in base.items() if part in name}
    others = {name: weight for name, weight in stranger.items() if place not in name}
    formula = {f"{LAYER}{layer}.dft.x": drawn(0, 64, 64).cos() for layer in range(3)}
    base, formula = base | formula, changed(formula, {"x": "y"})
    answer, sentence = judged(base, others | changed(copied, names) | formula)
    assert answer == (SAME_BIRTH if case == "each MLP" else INCONCLUSIVE) and said in sentence, sentence
    assert judged(base, stranger | formula)[0] == NO_EVIDENCE


def in_three_values(weights: dict) -> dict:
    return {n: (w / w.std() / 2).round().clamp(-1, 1) if "_proj" in n else w for n, w in weights.items()}


def test_equal_bits_of_few_values():
    base, stranger = (in_three_values(weights_of(source)) for source in (BASE, STRANGER))
    thief = stranger | {name: weight for name, weight in base.items() if ".1.mlp." in name}
    assert judged(base, stranger)[0] == NO_EVIDENCE
    answer, sentence = judged(base, thief)
    assert answer == INCONCLUSIVE and "of layer 2 begin bit for bit as those of" in sentence, sentence


def sentencepiece_of(ids: dict) -> bytes:
    model = sentencepiece_model_pb2.ModelProto()
    for number, token in enumerate(sorted(ids, key=ids.get)):
        model.pieces.add(piece=token, score=0.0, type=2 if number == 0 else 1)  # the first is unknown
    model.trainer_spec.model_type = model.trainer_spec.BPE
    return model.SerializeToString()


def test_vocabularies_of_every_file(tmp_path):
    ids = {f"token_{number}": number for number in range(300)}
    files = {
        "vocab.txt": "\n".join(ids).encode(),
        "vocab.json": json.dumps(ids).encode(),
        "tokenizer.model": sentencepiece_of(ids),
        "tokenizer.json": json.dumps({"model": {"vocab": ids}}).encode(),
    }
    for name, content in files.items():
        folder = folder_with(tmp_path / f"with_{name}", {}).place
        (folder / name).write_bytes(content)
        assert token_ids(folder) == ids, name
    (tmp_path / "with_tokenizer.model" / "tokenizer.model").write_bytes(b"IQ== 0")  # Llama 3's own
    assert token_ids(tmp_path / "with_tokenizer.model") == {}


def test_a_permuted_vocabulary(tmp_path):
    """Without a tokenizer it cannot be told from a stranger; with one it can, unless that lies."""
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    weights = weights_of(CHILD)
    permuted = weights | {name: weights[name][order] for name in TABLES}
    usual = {f"token_{number}": number for number in range(300)}
    theirs = {f"token_{string}": number for number, string in enumerate(order.tolist())}
    few = {string if number < 65 else f"_{string}": number for string, number in theirs.items()}
    base = folder_with(tmp_path / "base", weights_of(BASE))
    (tmp_path / "base" / "vocab.json").write_text(json.dumps(usual))
    cases = {
        "plain": (permuted, {}, NO_EVIDENCE, "if their tokens mean the same"),
        "true": (permuted, theirs, SAME_BIRTH, "3 of the 3 layers read"),
        "lying": (permuted, usual, NO_EVIDENCE, "if their tokens mean the same"),
        "lying of equal tokens": (weights, theirs, SAME_BIRTH, "3 of the 3 layers read"),
        "lying of few": (weights_of(noised(CHILD, 0.5)), few, SAME_BIRTH, "3 of the 3 layers read"),
    }
    for name, (tensors, vocabulary, expected, said) in cases.items():
        suspect = folder_with(tmp_path / name, tensors)
        (tmp_path / name / "vocab.json").write_text(json.dumps(vocabulary))
        answer, sentence = judged(base, suspect)
        assert answer == expected and said in sentence, (name, sentence)


def test_coordinates_where_there_are_no_units():
    config = replace(CONFIG, sublayers="attention")
    answer, sentence = judged(newborn_source(config, 1), newborn_source(config, 2))
    assert answer == NO_EVIDENCE and "a changed basis would hide a child" in sentence
    dead = {name: 0 * weight if ".mlp." in name else weight for name, weight in weights_of(BASE).items()}
    assert judged(dead, dead)[0] == SAME_BIRTH  # by all that it has


def test_tokens_that_are_all_alike_are_told():
    weights = weights_of(BASE)
    weights |= {name: weights[name][:2].repeat(150, 1) for name in TABLES}
    answer, sentence = judged(STRANGER, weights)
    assert answer == INCONCLUSIVE and "too few directions" in sentence


def test_what_was_done_is_told():
    ways = ((), ("neurons",), ("rotate",))
    same, shuffled, rotated = (judged(BASE, disguised(BASE, way))[1] for way in ways)
    assert same.endswith("the base's embedding matrix")
    assert "its neurons stand in another order" in shuffled and "basis" not in same + shuffled
    assert "its residual basis was changed" in rotated and "order" not in same + rotated
    # two random tables of 130 tokens in 64 dimensions share half of each dimension by chance
    few = replace(CONFIG, vocab_size=130)
    assert judged(newborn_source(few, 1), newborn_source(few, 2))[1].endswith("a different embedding matrix")


def test_of_few_tokens_a_copied_table_is_told_by_its_coordinates():
    """Of 100 tokens 64 dimensions span nearly all, as of 257 tokens 256: any two tables look alike."""
    few = newborn_source(replace(CONFIG, vocab_size=100), 1)
    assert judged(few, few)[1].endswith("; the base's embedding matrix")
    turned = disguised(few, ("rotate",))
    assert judged(few, turned)[1].endswith("embedding matrices that were not seen to agree")
