"""lineage/judge.py: every combination of evidence, and folders that made it say something false."""

import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
import safetensors.torch
import scipy.stats
import torch
from sentencepiece import sentencepiece_model_pb2

from lib.settings import UserError
from lineage.compare import CompareSettings, Model, compare_models
from lineage.judge import (
    INCONCLUSIVE,
    NO_EVIDENCE,
    SAME_BIRTH,
    Pair,
    Row,
    beyond_chance,
    judge,
    mark_neurons,
    row_of,
)
from lineage.layout import find_stacks
from model import ModelConfig
from reproduce import disguise
from reproduce.disguise import as_source
from reproduce.robustness import noised
from sources import checkpoint
from strangers import formats
from strangers.formats import Newborn, token_ids

OUTCOMES = {
    "same": {"same": True, "p": 1e-4, "z": 250.0, "matched": 0.7, "log10_p": -300.0},
    "between": {"same": False, "p": 1e-3, "z": 3.1, "matched": 0.002, "log10_p": -3.0},
    "nothing": {"same": False, "p": 0.5, "z": 0.1, "matched": 0.0, "log10_p": -0.3},
}


def judged_pair(counts=None, depth=24, r=0.2, base_layers=None, units=1000, body=None, **more) -> Pair:
    """A judged pair of stacks of one depth: `counts` of 1,000 units by layer, from 1, one in the others.

    Without counts no units are looked for. `more` may have `equal` layers and those that are `alike`, `read`
    layers, another `lack`, and the `embedding`'s coordinates.
    """
    (stack,) = find_stacks(Newborn(ModelConfig(8, 4, depth, 1, 4, 4), 1), "B")
    stack.may_have_mlps = more.get("may_have_mlps", False)
    rows = []
    for layer in more.get("read", range(1, depth + 1)) if counts is not None else ():
        closest = (base_layers or {}).get(layer, layer)
        middle = stack.is_middle(layer) + stack.is_middle(closest)
        counted = {"found": counts.get(layer, 1), "units": units, "r": r, "by_chance": 1}
        rows.append(Row(layer, closest=closest, num_middle=middle, in_place=1000, **counted))
    mark_neurons(rows)
    tests = (("body", body), ("embedding", more.get("embedding")))
    coordinates = {kind: OUTCOMES[test] for kind, test in tests if test}
    pair = Pair(stack, stack, rows, {}, 4096, 0.06, coordinates, lack=more.get("lack", ""))
    pair.equal, pair.alike = more.get("equal", {}), more.get("alike", {})
    judge(pair)
    return pair


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
        pair = judged_pair(**how, body="nothing", embedding=embedding)
        assert pair.verdict == verdict and said in pair.sentence, pair.sentence
    row, _ = row_of(pair)
    told = next(each for each in pair.rows if each.layer == row["layer"])
    assert (row["units_found"], row["units"], row["r"]) == (told.found, told.units, told.r)


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
        assert judged_pair(**how).verdict == expected, how
    how |= {"body": "nothing", "may_have_mlps": True}  # a basis may have been changed
    assert judged_pair(**how).verdict == INCONCLUSIVE


def test_layers_count_once_whatever_shows_them():
    """A layer by its bits and one by its coordinates are two; of one layer both are one."""
    for equal, verdict in (({3: 4}, SAME_BIRTH), ({15: 15}, INCONCLUSIVE), ({3: 15}, INCONCLUSIVE)):
        assert judged_pair({}, body="same", alike={15: (0.9, 0.5)}, equal=equal).verdict == verdict, equal
    assert judged_pair({}, equal={3: 4, 5: 4}).verdict == INCONCLUSIVE
    pair = judged_pair({}, equal={4: 1, 5: 2, 6: 3})
    assert pair.verdict == SAME_BIRTH
    begin = "matrices of layers 4-6 begin bit for bit as those of the base's layers 1-3; "
    assert pair.sentence.startswith(begin), pair.sentence


def test_units_of_layers_of_several_widths():
    pair = judged_pair(ALL, r=0.95)
    pair.matched[3] = replace(pair.matched[3], found=256, units=512)
    judge(pair)
    assert "at least 256 of 512 neurons of 24 of the 24 layers read were matched" in pair.sentence


def test_chance_is_poisson_over_all_counts():
    row = judged_pair({1: 12}).matched[0]
    searches = (10**-6 / scipy.stats.poisson.sf(11, 1) / 3) ** 0.5  # three pairs of views, layers with layers
    assert beyond_chance(row, int(searches)) and not beyond_chance(row, int(searches) + 1)
    row = replace(row, found=900, by_chance=900, r=1.0)  # ties explain it
    assert not beyond_chance(row, 1)
    mark_neurons([row])
    assert not row.has_neurons_of_base


# ---- folders that were made to fool it ---------------------------------------------------------------------

CONFIG = ModelConfig(300, 64, 3, 4, 64, 96, num_kv_heads=2)
BASE = noised(Newborn(CONFIG, 1), 0)  # in memory
CHILD = disguise.disguised(BASE)
STRANGER = noised(Newborn(CONFIG, 2), 0)
RAW = {"model_type": "foreign", "hidden_size": 64}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
weights_of = disguise.weights_of


def changed(weights: dict, change) -> dict:
    """Tensors by `change`: a function of them, or parts of names by what they become; "" is left out."""
    if callable(change):
        return change(weights)
    others = {}
    for name, weight in weights.items():
        for old, new in change.items():
            name = name.replace(old, new) if new or old not in name else ""
        others[name] = weight
    others.pop("", None)
    return others


def folder_with(place, weights: dict, raw=RAW):
    place.mkdir()
    (place / "config.json").write_text(json.dumps(raw))
    weights = {name: weight.contiguous().clone() for name, weight in weights.items()}
    safetensors.torch.save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return formats.open_spec(checkpoint.parse_spec(str(place)), True)


def judged(base, suspect) -> tuple[str, str]:
    """The verdict of two sources, and its sentence."""
    row = row_by_both(base, suspect)
    return row["verdict"], row["sentence"]


def row_by_both(base, suspect) -> dict:
    """The row of two sources, with neurons whatever else tells; without them the verdict is the same."""
    models = [Model(name, source) for name, source in (("A", base), ("B", suspect))]
    glance, details = compare_models(*models, CompareSettings())
    row, more_details = compare_models(*models, CompareSettings(neurons=True))
    json.dumps([row, glance, details, more_details], allow_nan=False)
    assert row["verdict"] == glance["verdict"], (row["sentence"], glance["sentence"])
    return row


def random_rows(count: int) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(0))


def fused(weights: dict, turns=1, exchanged=False) -> dict:
    """Gate and up in one matrix: one above the other, or in several turns."""
    others = changed(weights, {"gate_proj": "", "up_proj": ""})
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp."
        pair = [weights[f"{mlp}{view}_proj.weight"].view(turns, -1, 64) for view in ("gate", "up")]
        if exchanged:
            pair.reverse()
        others[f"{mlp}gate_up_proj.weight"] = torch.cat(pair, 1).flatten(0, 1)
    return others


def first_tokens(weights: dict) -> dict:
    return weights | {name: weights[name][:100] for name in TABLES}


def dead(weights: dict) -> dict:
    return {name: 0 * weight if ".mlp." in name else weight for name, weight in weights.items()}


def alike(weights: dict) -> dict:
    return {name: weights[name.replace("up_proj", "gate_proj")] for name in weights}


def beside_a_stranger(weights: dict) -> dict:
    return weights_of(STRANGER) | changed(weights, {"model.": "a.", "lm_head": "a.head"})


def with_many_decoys(weights: dict) -> dict:
    return weights | {f"a{number}.embed_tokens.weight": random_rows(300) for number in range(30)}


def with_a_huge_token(weights: dict) -> dict:
    scale = torch.ones(300, 1)
    scale[7] = 1000
    return weights | {name: weights[name] * scale for name in TABLES}


def factored(weights: dict) -> dict:
    """Matrices of MLPs as products of two, (96, 64) and (64, 64)."""
    others = {}
    for name, weight in weights.items():
        if ".mlp." in name:
            U, S, V = torch.linalg.svd(weight, full_matrices=False)
            others |= {name.replace("weight", "U.weight"): U * S, name.replace("weight", "V.weight"): V}
        else:
            others[name] = weight
    return others


def with_a_narrow_table(weights: dict) -> dict:
    """As OPT-350m's, which is projected to the width of the stream."""
    return weights | {name: weights[name][:, :32] for name in TABLES}


IN_TURN = partial(fused, turns=96)
PQR = {"gate_proj": "p", "up_proj": "r", "down_proj": "q"}
RPQ = {"gate_proj": "r", "up_proj": "p", "down_proj": "q"}
DBRX = {"mlp.gate_proj.weight": "ffn.experts.mlp.w1", "mlp.up_proj.weight": "ffn.experts.mlp.v1"}
DBRX |= {"mlp.down_proj.weight": "ffn.experts.mlp.w2", "post_attention_layernorm": "norm_attn_norm.norm_2"}
FOUND = {  # what was done to the base, and to a hidden child or a stranger
    "p, q, r": (PQR, PQR),
    "gate after up": ({}, RPQ),
    "DBRX": (DBRX, DBRX),
    "layers moved, no head": ({}, {"lm_head.weight": "", "layers.0.": "layers.3."}),
    "halves and in turn": (fused, IN_TURN),
    "apart, and in turn, exchanged": ({}, partial(fused, turns=96, exchanged=True)),
    "beside a stranger": ({}, beside_a_stranger),
    "heads alone": ({"model.embed_tokens.weight": ""}, {"model.embed_tokens.weight": ""}),
    "few tokens": ({}, first_tokens),
    "a huge token": ({}, with_a_huge_token),
    "matrices of huge scale": ({}, lambda weights: {name: 1e18 * weights[name] for name in weights}),
    "float64": ({}, lambda weights: {name: weight.double() for name, weight in weights.items()}),
}
UNKNOWN = {  # what was done to both, and what the sentence says is missing
    "views alike": (alike, "chance finds as many as a copy would"),
    "dead units": (dead, "no layer has 16 neurons that live"),
    "many decoys": (with_many_decoys, "no single embedding matrix found in B"),
    "MLPs called attention": ({"mlp.": "self_attn."}, "no MLPs found in A"),
    "MLPs in factors": (factored, "no MLPs found in A"),
    "a narrow table": (with_a_narrow_table, "no single embedding matrix found in A"),
}


def judged_in_folders(place, of_base, of_suspect) -> list[tuple[str, str]]:
    """The verdicts, with their sentences, of a hidden child and of a stranger in foreign folders."""
    base = folder_with(place / "base", changed(weights_of(BASE), of_base))
    answers = []
    for name, source in (("child", CHILD), ("stranger", STRANGER)):
        answers.append(judged(base, folder_with(place / name, changed(weights_of(source), of_suspect))))
    return answers


@pytest.mark.parametrize("case", FOUND)
def test_children_are_found_and_strangers_are_not(case, tmp_path):
    (answer, sentence), stranger = judged_in_folders(tmp_path, *FOUND[case])
    if case == "beside a stranger":  # nothing tells which of the two is the model
        assert answer == INCONCLUSIVE, sentence
        for part, said in (("a", SAME_BIRTH), ("model", NO_EVIDENCE)):
            assert f"`{part}.layers.*` and the base's `model.layers.*`: {said}" in sentence, sentence
    else:
        assert answer == SAME_BIRTH and "neurons of 3 of the 3 layers read were matched" in sentence, sentence
    if case == "few tokens":  # enough to find a child, but not to say that there is none
        assert stranger[0] == INCONCLUSIVE and "share 100 tokens" in stranger[1]
    else:
        assert stranger[0] == NO_EVIDENCE, stranger


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_was_not_looked_for_is_no_evidence_of_nothing(case, tmp_path):
    change, said = UNKNOWN[case]
    child, stranger = judged_in_folders(tmp_path, change, change)
    if case == "views alike":  # a child is seen all the same
        assert child[0] == SAME_BIRTH
        child = stranger
    for answer, sentence in (child, stranger):
        assert answer == INCONCLUSIVE and said in sentence, sentence


@pytest.mark.parametrize("decoy", ["a.embed_tokens.weight", "a.lm_head.weight"])
@pytest.mark.parametrize("rows", [300, 2000])
def test_decoys_beside_the_table(decoy, rows, tmp_path):
    weights = weights_of(CHILD) | {decoy: random_rows(rows)}
    assert judged(BASE, folder_with(tmp_path / "a", weights))[0] == SAME_BIRTH


def test_layers_of_which_nothing_is_known(tmp_path):
    """Square matrices without names: an MLP may be among them, and a changed basis hides it."""
    base = Newborn(replace(CONFIG, d_ff=64), 1)
    sources = []
    for place, source in (("a", base), ("b", disguise.disguised(base))):
        sources.append(folder_with(tmp_path / place, changed(weights_of(source), PQR)))
    answer, sentence = judged(*sources)
    assert answer == INCONCLUSIVE and "a changed basis would hide a child" in sentence


# ---- what people bring -------------------------------------------------------------------------------------

PLAIN = replace(CONFIG, mlp="gelu", norm="layernorm")
TIED = replace(PLAIN, tie_embeddings=True)


def as_transformer_lens(weights: dict) -> dict:
    """GPT-2's matrices as TransformerLens stores them, (inputs, outputs)."""
    names = {"model.embed_tokens.weight": "embed.W_E", "model.layers.": "blocks.", "post_attention": "ln2"}
    names |= {"up_proj.weight": "W_in", "down_proj.weight": "W_out", "self_attn.": "attn."}
    names |= {"ln2_layernorm.weight": "ln2.w", "model.norm.weight": "ln_final.w"}
    others = changed(weights, names)
    return {name: weight.T if ".W_" in name and "mlp" in name else weight for name, weight in others.items()}


def pruned_each(weights: dict) -> dict:
    """Layers of 96, 88 and 80 units."""
    others = dict(weights)
    for layer in range(3):
        for view in ("gate", "up", "down"):
            name = f"model.layers.{layer}.mlp.{view}_proj.weight"
            units = torch.arange(96 - 8 * layer)
            others[name] = weights[name].index_select(int(view == "down"), units)
    return others


def with_more_tokens(weights: dict) -> dict:
    return weights | {name: torch.cat([weights[name], random_rows(20)]) for name in TABLES}


LLAMA = checkpoint.config_json(CONFIG)
BROUGHT = {  # the architecture, what was done to the base, and to the suspect, and its config.json
    "TransformerLens": (TIED, {}, as_transformer_lens, RAW),
    "nn.Transformer": (PLAIN, {}, {"up_proj": "linear1", "down_proj": "linear2"}, RAW),
    "the base has none": (PLAIN, {"lm_head.weight": ""}, {}, RAW),
    "a head though tied": (CONFIG, {}, {}, LLAMA | {"tie_word_embeddings": True}),
    "a stale vocabulary": (CONFIG, {}, with_more_tokens, LLAMA),
    "layers of several widths": (CONFIG, {}, pruned_each, LLAMA),
}


@pytest.mark.parametrize("case", BROUGHT)
def test_what_people_bring(case, tmp_path, capsys):
    """Copies, noised and rotated children are found, a stranger is not, whatever config.json says."""
    config, of_base, of_suspect, raw = BROUGHT[case]
    birth = noised(Newborn(config, 1), 0)
    base = folder_with(tmp_path / "base", changed(weights_of(birth), of_base))
    relatives = {"copy": birth, "noised": noised(birth, 0.5)}
    relatives |= {"rotated": disguise.disguised(birth, ("rotate",)), "stranger": Newborn(config, 2)}
    for name, source in relatives.items():
        weights = changed(weights_of(source), of_suspect)
        answer, sentence = judged(base, folder_with(tmp_path / name, weights, raw))
        assert answer == (NO_EVIDENCE if name == "stranger" else SAME_BIRTH), (name, sentence)
        assert name == "copy" or ("3 of the 3 layers" in sentence) == (name != "stranger"), sentence
    warned = capsys.readouterr().err
    assert ("it is read by its weights alone" in warned) == (raw is not RAW)


def test_no_row_of_a_table_agrees(tmp_path):
    """Units cannot be matched; bits and coordinates can, though the tables agree, or nothing does."""
    attention = {"mlp.": "self_attn."}  # no MLPs are found then
    base = folder_with(tmp_path / "base", changed(weights_of(BASE), attention))
    copied = weights_of(STRANGER) | {n: w for n, w in weights_of(BASE).items() if "attn" in n or n in TABLES}
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    moved = weights_of(noised(BASE, 1))
    moved |= {name: moved[name][order] for name in TABLES}
    suspects = {
        "copy": (
            weights_of(BASE),
            SAME_BIRTH,
            "of layers 1-3 begin bit for bit as those of the base's layers 1-3; the base's",
        ),
        "noised": (weights_of(noised(BASE, 2)), SAME_BIRTH, "in all matrices of layers 1-3"),
        "tokens moved": (moved, SAME_BIRTH, "; embedding matrices that were not seen to agree"),
        "copied attention": (copied, INCONCLUSIVE, "not in every kind of matrix of two layers"),
        "a copied table": (weights_of(Newborn(CONFIG, 2, 1)), INCONCLUSIVE, "a changed basis would hide"),
    }
    for name, (weights, verdict, said) in suspects.items():
        suspect = folder_with(tmp_path / name, changed(weights, attention))
        answer, sentence = judged(base, suspect)
        assert answer == verdict and said in sentence, (name, sentence)
    assert judged(BASE, folder_with(tmp_path / "a", copied))[0] == INCONCLUSIVE


def test_layers_at_other_places(tmp_path):
    """A merge by layers, of other names, beside a stranger's embedding matrix: bits alone can tell."""
    for layers, verdict in (({0: 1, 1: 2}, SAME_BIRTH), ({0: 1}, INCONCLUSIVE), ({}, NO_EVIDENCE)):
        weights = weights_of(STRANGER)
        for base_layer, layer in layers.items():
            for name in weights:
                if f"layers.{layer}." in name:
                    weights[name] = BASE.read(name.replace(f".{layer}.", f".{base_layer}."))
        renamed = changed(weights, PQR | {"layers.": "block_"})
        answer, sentence = judged(BASE, folder_with(tmp_path / str(len(layers)), renamed))
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
    formula = {f"model.layers.{layer}.dft.x": random_rows(64).cos() for layer in range(3)}
    others, stranger = (weights | changed(formula, {"x": "y"}) for weights in (others, stranger))
    base, others, stranger = (
        as_source(weights, CONFIG) for weights in (base | formula, others | changed(copied, names), stranger)
    )
    answer, sentence = judged(base, others)
    assert answer == (SAME_BIRTH if case == "each MLP" else INCONCLUSIVE) and said in sentence, sentence
    assert judged(base, stranger)[0] == NO_EVIDENCE


def in_three_values(weights: dict) -> dict:
    """Matrices of layers as BitNet's."""
    return {n: (w / w.std() / 2).round().clamp(-1, 1) if "_proj" in n else w for n, w in weights.items()}


def test_equal_bits_of_few_values():
    base, stranger = (in_three_values(weights_of(source)) for source in (BASE, STRANGER))
    thief = stranger | {name: weight for name, weight in base.items() if ".1.mlp." in name}
    sources = [as_source(weights, CONFIG) for weights in (base, stranger, thief)]
    assert judged(sources[0], sources[1])[0] == NO_EVIDENCE
    answer, sentence = judged(sources[0], sources[2])
    assert answer == INCONCLUSIVE and "of layer 2 begin bit for bit as those of" in sentence, sentence


def as_tokenizer_json(place, ids: dict) -> None:
    (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))


def as_tokenizer_model(place, ids: dict) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    for number, token in enumerate(sorted(ids, key=ids.get)):
        model.pieces.add(piece=token, score=0.0, type=2 if number == 0 else 1)  # the first is unknown
    model.trainer_spec.model_type = model.trainer_spec.BPE
    (place / "tokenizer.model").write_bytes(model.SerializeToString())


def as_vocab_json(place, ids: dict) -> None:
    (place / "vocab.json").write_text(json.dumps(ids))


def as_vocab_txt(place, ids: dict) -> None:
    (place / "vocab.txt").write_text("\n".join(sorted(ids, key=ids.get)))


@pytest.mark.parametrize("write", [as_tokenizer_json, as_tokenizer_model, as_vocab_json, as_vocab_txt])
def test_a_permuted_vocabulary(write, tmp_path):
    """Without a tokenizer it cannot be told from a stranger; with one it can, unless that lies."""
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    weights = weights_of(CHILD)
    permuted = weights | {name: weights[name][order] for name in TABLES}
    usual = {f"token_{number}": number for number in range(300)}
    theirs = {f"token_{string}": number for number, string in enumerate(order.tolist())}
    base = folder_with(tmp_path / "base", weights_of(BASE))
    write(tmp_path / "base", usual)
    few = {string if number < 65 else f"_{string}": number for string, number in theirs.items()}
    cases = {
        "plain": (permuted, None, NO_EVIDENCE, "if their tokens mean the same"),
        "true": (permuted, theirs, SAME_BIRTH, "3 of the 3 layers read"),
        "lying": (permuted, usual, NO_EVIDENCE, "if their tokens mean the same"),
        "lying of equal tokens": (weights, theirs, SAME_BIRTH, "3 of the 3 layers read"),
        "lying of few": (weights_of(noised(CHILD, 0.5)), few, SAME_BIRTH, "3 of the 3 layers read"),
    }
    for name, (tensors, vocabulary, expected, said) in cases.items():
        suspect = folder_with(tmp_path / name, tensors)
        if vocabulary:
            write(tmp_path / name, vocabulary)
        answer, sentence = judged(base, suspect)
        assert answer == expected and said in sentence, (name, sentence)
    (tmp_path / "base" / "tokenizer.json").unlink(missing_ok=True)
    (tmp_path / "base" / "tokenizer.model").write_bytes(b"IQ== 0")  # Llama 3's own: it tells nothing here
    assert write in (as_vocab_json, as_vocab_txt) or token_ids(tmp_path / "base") == {}


@pytest.mark.parametrize("case", ["biases", "no gains", "a score in place of the head"])
def test_a_llama_that_is_none(case, tmp_path):
    weights = weights_of(CHILD)
    if case == "biases":
        weights["model.layers.1.self_attn.o_proj.bias"] = torch.ones(64)
    elif case == "no gains":
        weights = {name: weight for name, weight in weights.items() if weight.ndim > 1}
    else:
        del weights["lm_head.weight"]
        weights["score.weight"] = torch.ones(1, 64)
    raw = checkpoint.config_json(CHILD.config)
    del raw[checkpoint.OURS]
    suspect = folder_with(tmp_path / "a", weights, raw)
    assert suspect.config is None and judged(BASE, suspect)[0] == SAME_BIRTH
    with pytest.raises(UserError, match="is unknown or missing"):
        checkpoint.parse_spec(str(tmp_path / "a")).load_own()


def test_coordinates_where_there_are_no_units(tmp_path):
    config = replace(CONFIG, sublayers="attention")
    answer, sentence = judged(Newborn(config, 1), Newborn(config, 2))
    assert answer == NO_EVIDENCE and "a changed basis would hide a child" in sentence
    without_units = folder_with(tmp_path / "a", dead(weights_of(BASE)))
    assert judged(without_units, without_units)[0] == SAME_BIRTH  # by all that it has


def test_constants_are_no_kinship(tmp_path):
    mask = {f"model.layers.{layer}.attn.causal": torch.ones(64, 64).tril() for layer in range(3)}
    others = {f"model.layers.{layer}.zeros": torch.zeros(64, 64) for layer in range(3)}
    others |= {f"model.layers.{layer}.mix": torch.eye(64) + 3 for layer in range(3)}
    others |= {f"model.layers.{layer}.rotary_emb.cos_cached": random_rows(64).cos() for layer in range(3)}
    sources = []
    for number, source in enumerate((BASE, STRANGER)):
        sources.append(folder_with(tmp_path / str(number), weights_of(source) | others | mask))
    assert judged(*sources)[0] == NO_EVIDENCE
    _, sentence = judged(sources[0], sources[0])
    assert "of layers 1-3 begin bit for bit as those of the base's layers 1-3; " in sentence


def test_tokens_that_are_all_alike_are_told(tmp_path):
    weights = weights_of(BASE)
    weights |= {name: weights[name][:2].repeat(150, 1) for name in TABLES}
    answer, sentence = judged(STRANGER, folder_with(tmp_path / "a", weights))
    assert answer == INCONCLUSIVE and "too few directions" in sentence


def test_what_was_done_is_told():
    ways = ((), ("neurons",), ("rotate",))
    same, shuffled, rotated = (judged(BASE, disguise.disguised(BASE, way))[1] for way in ways)
    assert same.endswith("the base's embedding matrix")
    assert "its neurons stand in another order" in shuffled and "basis" not in same + shuffled
    assert "its residual basis was changed" in rotated and "order" not in same + rotated
    # two random tables of 130 tokens in 64 dimensions share half of each dimension by chance
    few = replace(CONFIG, vocab_size=130)
    assert judged(Newborn(few, 1), Newborn(few, 2))[1].endswith("a different embedding matrix")


def test_of_few_tokens_a_copied_table_is_told_by_its_coordinates():
    """Of 100 tokens 64 dimensions span nearly all, as of 257 tokens 256: any two tables look alike."""
    few = Newborn(replace(CONFIG, vocab_size=100), 1)
    assert judged(few, few)[1].endswith("; the base's embedding matrix")
    turned = disguise.disguised(few, ("rotate",))
    assert judged(few, turned)[1].endswith("embedding matrices that were not seen to agree")
    strangers = [formats.open_spec(checkpoint.parse_spec(name)) for name in ("backcopy@1", "tiny_llama@7")]
    answer, sentence = judged(*strangers)
    assert answer == NO_EVIDENCE and sentence.endswith("embedding matrices that were not seen to agree")
