"""measure/verdict.py: every combination of evidence, the sentences, and folders that were made to fool it."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import scipy.stats
import torch

from lib import checkpoint
from lib.checkpoint import Newborn
from measure.census import Census, Match
from measure.verdict import (
    INCONCLUSIVE,
    NO_EVIDENCE,
    SAME_BIRTH,
    chance_log10_p,
    compare_pair,
    read_model,
    verdict,
)
from model import ModelConfig
from reproduce import thief

TESTS = ("body", "embedding", "relabel")
OUTCOMES = {
    "same": {"same": True, "p": 1e-4, "z": 250.0, "matched": 0.7, "smallest_visible": 0.004},
    "between": {"same": False, "p": 1e-3, "z": 3.1, "matched": 0.002, "smallest_visible": 0.004},
    "nothing": {"same": False, "p": 0.5, "z": 0.1, "matched": 0.0, "smallest_visible": 0.004},
}
STRENGTH = {NO_EVIDENCE: 0, INCONCLUSIVE: 1, SAME_BIRTH: 2}
NO_MLPS = ("no MLPs found in B", False)


def census(*counts, units: int = 704, base_layers=None, tables=0.06, distance=0.2) -> Census:
    """Layers in which so many units were found."""
    matches = []
    for number, count in enumerate(counts, start=1):
        base = base_layers[number - 1] if base_layers else number
        matches.append(Match("", number, "", base, count, units, 1.0, 1, count, distance))
    return Census(matches, {}, base_layers is None, 4096, (256, 256), tables)


CENSUSES = {
    "none": None,
    "nothing": census(1, 4, 0),
    "learnt": census(44, 4, 0),
    "some": census(1, 100, 2),
    "kin": census(704, 3, 690),
}


def answer(units: str, outcomes: dict) -> str:
    """The verdict alone; a test of None was not made."""
    tests = {name: OUTCOMES[outcome] for name, outcome in outcomes.items() if outcome}
    judged, sentence = verdict(tests, CENSUSES[units], *(NO_MLPS if units == "none" else ()))
    assert sentence and "\n" not in sentence
    return judged


def combinations():
    """What the three tests of coordinates may say together; each may be missing."""
    for outcomes in itertools.product([None, *OUTCOMES], repeat=3):
        yield dict(zip(TESTS, outcomes))


def test_units_decide_wherever_they_were_looked_for():
    for outcomes in combinations():
        assert answer("kin", outcomes) == SAME_BIRTH
        assert answer("some", outcomes) == INCONCLUSIVE
        tied = outcomes["relabel"] == "same" and outcomes["embedding"] != "same"
        disagrees = outcomes["body"] == "same" or tied
        for units in ("nothing", "learnt"):
            assert answer(units, outcomes) == (INCONCLUSIVE if disagrees else NO_EVIDENCE), outcomes


def test_coordinates_of_weights_decide_elsewhere():
    expected = {None: INCONCLUSIVE, "same": SAME_BIRTH, "between": INCONCLUSIVE, "nothing": NO_EVIDENCE}
    for outcomes in combinations():
        assert answer("none", outcomes) == expected[outcomes["body"]], outcomes


@pytest.mark.parametrize("units", CENSUSES)
def test_more_likeness_of_blocks_never_weakens_a_verdict(units):
    for outcomes in combinations():
        words = ("nothing", "between", "same")
        strengths = [STRENGTH[answer(units, outcomes | {"body": word})] for word in words]
        assert strengths == sorted(strengths), outcomes


@pytest.mark.parametrize(
    "evidence, tests, said",
    [
        (census(704, 704), {}, "704 of 704 hidden units of every layer found again; "),
        (census(704, 698), {}, "at least 698 of 704 hidden units of every layer found again"),
        (census(704, 3), {}, "704 of 704 hidden units of 1 of 2 layers found again"),
        (census(704, 704, base_layers=(1, 4)), {}, "every layer found again, in layers 1, 4 of the base"),
        (census(704), {"body": "nothing", "embedding": "nothing"}, "its residual basis was changed"),
        (census(704), {}, "a distance of 0.2"),
        (
            census(704, tables=1.0, distance=0.0),
            {},
            "are the base's, to 0; its token table is the base's",
        ),
        (census(2, 1), {}, "at most 2 of 704 hidden units of a layer found again, as chance has it"),
        (census(2, 1, tables=1.0), {}, "its token table is the base's, which can be copied"),
        (census(25, 1), {}, "at most 25 of 704 hidden units of a layer found again, more than chance has it"),
        (census(2, 1), {"body": "same"}, "an earlier checkpoint would tell"),
        (census(2, 100), {}, "a common ancestor, or an earlier checkpoint"),
        (None, {"body": "same"}, "correlation 0.7, z = 250"),
        (None, {"body": "nothing"}, "a correlation of 0.004 would have been seen, a child whose basis"),
        (None, {}, "no MLPs found in B"),
    ],
)
def test_sentences(evidence, tests, said):
    outcomes = {name: OUTCOMES[word] for name, word in tests.items()}
    _, sentence = verdict(outcomes, evidence, *(() if evidence else NO_MLPS))
    assert said in sentence


def test_chance_is_poisson_over_all_counts():
    match = census(7).matches[0]
    expected = scipy.stats.poisson.sf(6, 1) * 3 * 4**2  # three pairs of views, four layers with four
    assert 10 ** chance_log10_p(match, 4) == pytest.approx(expected, rel=1e-9)
    assert chance_log10_p(census(0).matches[0], 4) == 0
    assert chance_log10_p(replace(match, by_chance=704), 4) == 0  # ties explain it
    # A small MLP's few units are no birth: 7 of 32 are 22 %, but chance has them once in 250 comparisons
    assert verdict({}, census(7, 1, 0, 2, units=32))[0] == NO_EVIDENCE


# ---- folders that were made to fool it ---------------------------------------------------------------------

CONFIG = ModelConfig(300, 64, 3, 4, 64, 96, num_kv_heads=2)
BASE = thief.noised(Newborn(CONFIG, 1), 0)  # in memory
CHILD = thief.hidden(BASE)
RAW = {"model_type": "foreign", "hidden_size": 64}
TOKENS = {f"token {number}": number for number in range(300)}


def weights_of(source) -> dict:
    """A source's tensors by name."""
    return {name: source.read(name) for name in source.shapes}


def renamed(weights: dict, **names) -> dict:
    """Tensors of which parts of names are others; a name of "" leaves a tensor out."""
    changed = {}
    for name, weight in weights.items():
        for old, new in names.items():
            name = name.replace(old, new) if new or old not in name else ""
        changed[name] = weight
    changed.pop("", None)
    return changed


def folder_with(place: Path, weights: dict, raw=RAW, vocabulary=None):
    """A folder of `transformers` with these tensors, opened."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps(raw))
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    safetensors.torch.save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    if vocabulary:
        (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return checkpoint.parse_spec(str(place)).open(any_architecture=True)


def judged(base, suspect, **numbers) -> tuple[str, str]:
    """The verdict of two sources, and its sentence; the row has the sentence's count."""
    models = [read_model(name, source) for name, source in (("A", base), ("B", suspect))]
    row, detail = compare_pair(*models, permutations=199, **numbers)
    json.dumps([row, detail["layers"], detail["layer_map"]], allow_nan=False)
    counted = re.search(r"([\d,]+) of ([\d,]+) hidden units", row["sentence"])
    if counted:
        assert [int(number) for number in counted.groups()] == [row["units_found"], row["units"]]
    return row["verdict"], row["sentence"]


PQR = {"gate_proj": "p", "up_proj": "r", "down_proj": "q"}
ONE_TWO_THREE = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
DBRX = {"mlp.gate_proj.weight": "ffn.experts.mlp.w1", "mlp.up_proj.weight": "ffn.experts.mlp.v1"}
DBRX |= {"mlp.down_proj.weight": "ffn.experts.mlp.w2", "post_attention_layernorm": "norm_attn_norm.norm_2"}


def fused(weights: dict, interleaved: bool) -> dict:
    """Gate and up in one matrix: its rows in turn, or one half above the other."""
    changed = renamed(weights, gate_proj="", up_proj="")
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp."
        pair = [weights[f"{mlp}{view}_proj.weight"] for view in ("gate", "up")]
        both = torch.stack(pair, 1).flatten(0, 1) if interleaved else torch.cat(pair)
        changed[f"{mlp}gate_up_proj.weight"] = both
    return changed


def from_one(weights: dict) -> dict:
    """Gains stored less one, as Gemma's."""
    return {name: weight - 1 if weight.ndim == 1 else weight for name, weight in weights.items()}


def with_gains(source, seed: int = 0):
    """A source whose gains are drawn."""
    generator = torch.Generator().manual_seed(seed)
    weights = weights_of(source)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weights[name] = 1 + 0.3 * torch.randn(weight.shape, generator=generator)
    return thief.as_source(weights, source.config)


def without_mlps(weights: dict) -> dict:
    """Hidden units that are all dead."""
    return {name: 0 * weight if ".mlp." in name else weight for name, weight in weights.items()}


NAMES = {
    "p, q, r": (PQR, PQR),
    "p, q, r and theirs": (PQR, {}),
    "gate and up the other way round": ({}, {"gate_proj": "r", "up_proj": "p", "down_proj": "q"}),
    "w1, w2, w3": (ONE_TWO_THREE, ONE_TWO_THREE),
    "w1, w2, w3 and theirs": ({}, ONE_TWO_THREE),
    "DBRX": (DBRX, DBRX),
    "layers' names": ({}, {"layers.": "block_"}),
    "a table's name": ({}, {"embed_tokens": "tokens_in", "lm_head": "tokens_out"}),
}


@pytest.mark.parametrize("names", NAMES)
def test_hidden_children_under_other_names(names, tmp_path):
    sources = []
    for place, source, changed in zip("ab", (BASE, CHILD), NAMES[names]):
        sources.append(folder_with(tmp_path / place, renamed(weights_of(source), **changed)))
    answer, sentence = judged(*sources)
    assert answer == SAME_BIRTH and "hidden units of every layer" in sentence, sentence
    assert "its residual basis was changed" in sentence or "tokens_in" in str(sources[1].shapes)


def test_two_sizes_of_a_configuration_swapped(tmp_path):
    raw = RAW | {"hidden_size": 96, "intermediate_size": 64}
    sources = [
        folder_with(tmp_path / "a", weights_of(BASE)),
        folder_with(tmp_path / "b", weights_of(CHILD), raw),
    ]
    assert judged(*sources)[0] == SAME_BIRTH


@pytest.mark.parametrize("base, suspect", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_gate_and_up_in_one_matrix(base, suspect, tmp_path):
    a = folder_with(tmp_path / "a", fused(weights_of(BASE), base))
    b = folder_with(tmp_path / "b", fused(weights_of(CHILD), suspect))
    stranger = folder_with(tmp_path / "c", fused(weights_of(Newborn(CONFIG, 2)), suspect))
    assert judged(a, b)[0] == SAME_BIRTH
    assert judged(a, stranger)[0] == NO_EVIDENCE


def up_above_gate(weights: dict) -> dict:
    """Gate and up in one matrix, the other way round."""
    changed = fused(weights, False)
    for name in [name for name in changed if "gate_up" in name]:
        changed[name] = torch.cat(changed[name].chunk(2)[::-1])
    return changed


def beside_a_stranger(weights: dict) -> dict:
    """Two models in one folder; the stranger's names are the usual ones."""
    return weights_of(Newborn(CONFIG, 2)) | renamed(weights, **{"model.": "a.", "lm_head": "a.head"})


MADE = {
    "up above gate": up_above_gate,
    "names of gate and up exchanged": lambda w: renamed(w, gate_proj="x", up_proj="gate_proj", x="up_proj"),
    "a table of zeros": lambda w: w | {"a.embed_tokens.weight": torch.zeros(300, 64)},
    "layers moved, no head": lambda w: renamed(w, **{"lm_head.weight": "", "layers.0.": "layers.3."}),
    "beside a stranger": beside_a_stranger,
}


@pytest.mark.parametrize("case", MADE)
def test_children_are_found(case, tmp_path):
    answer, sentence = judged(BASE, folder_with(tmp_path / "a", MADE[case](weights_of(CHILD))))
    layers = "3 of 6 layers" if "stranger" in case else "every layer"
    assert answer == SAME_BIRTH and f"of {layers} found again" in sentence, sentence


def test_units_whose_views_are_alike_tell_nothing():
    """Chance finds them all, in strangers, too."""
    sources = []
    for source in (BASE, CHILD, Newborn(CONFIG, 2)):
        weights = weights_of(source)
        for name in [name for name in weights if "up_proj" in name]:
            weights[name] = weights[name.replace("up_proj", "gate_proj")]
        sources.append(thief.as_source(weights, CONFIG))
    for suspect in sources[1:]:
        answer, sentence = judged(sources[0], suspect)
        assert answer == INCONCLUSIVE and "chance finds as many as a copy" in sentence, sentence


def test_dead_units_tell_nothing(tmp_path):
    dead = folder_with(tmp_path / "a", without_mlps(weights_of(BASE)))
    hidden = folder_with(tmp_path / "b", without_mlps(weights_of(CHILD)))
    answer, sentence = judged(dead, hidden)
    assert answer == INCONCLUSIVE and "no layer has 16 hidden units that live" in sentence
    assert judged(dead, dead)[0] == SAME_BIRTH  # by coordinates


def test_a_permuted_vocabulary(tmp_path):
    """Without a tokenizer it cannot be told from a stranger; with one it can, unless that lies."""
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    weights = weights_of(CHILD)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][order]
    permuted = {f"token {string}": number for number, string in enumerate(order.tolist())}
    base = folder_with(tmp_path / "a", weights_of(BASE), vocabulary=TOKENS)
    plain = folder_with(tmp_path / "b", weights)
    true = folder_with(tmp_path / "c", weights, vocabulary=permuted)
    lying = folder_with(tmp_path / "d", weights, vocabulary=TOKENS)
    answer, sentence = judged(base, plain)
    assert answer == NO_EVIDENCE and "if their token numbers mean the same" in sentence
    assert judged(base, true)[0] == SAME_BIRTH
    answer, sentence = judged(base, lying)
    assert answer == NO_EVIDENCE and "if their tokenizers tell the truth" in sentence
    other = folder_with(tmp_path / "e", weights_of(CHILD), vocabulary=permuted)  # its tokens are the base's
    assert judged(base, other)[0] == SAME_BIRTH


def test_too_few_shared_tokens(tmp_path):
    """A child may be found by few tokens, but a stranger has not been searched for."""
    for source, expected in ((CHILD, SAME_BIRTH), (Newborn(CONFIG, 2), INCONCLUSIVE)):
        weights = weights_of(source)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:100]
        answer, sentence = judged(BASE, folder_with(tmp_path / expected, weights))
        assert answer == expected, sentence
    assert "share 100 tokens" in sentence


@pytest.mark.parametrize("family", ["paligemma", "gemma", "llama", "nothing"])
def test_gains_less_one(family, tmp_path):
    """Whatever config.json calls them, of newborns, whose gains are 1, and of drawn ones."""
    raw = RAW | {"model_type": family, "text_config": {"model_type": "gemma", "hidden_size": 64}}
    if family == "llama":
        raw = checkpoint.config_json(CONFIG)
    for number, source in enumerate((BASE, with_gains(BASE))):
        a = folder_with(tmp_path / f"a{number}", from_one(weights_of(source)), RAW | {"model_type": "gemma"})
        b = folder_with(
            tmp_path / f"b{number}", from_one(weights_of(thief.hidden(source, ("neurons",)))), raw
        )
        for pair in ((b, b), (a, b), (b, a)):
            answer, sentence = judged(*pair)
            assert answer == SAME_BIRTH and "of every layer found again; " in sentence, sentence


@pytest.mark.parametrize("decoy", ["a.embed_tokens.weight", "a.lm_head.weight", "model.embeddings.weight"])
@pytest.mark.parametrize("rows", [5, 300, 2000])
def test_decoys_beside_the_table(decoy, rows, tmp_path):
    weights = weights_of(CHILD)
    weights[decoy] = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    assert judged(BASE, folder_with(tmp_path / "a", weights))[0] == SAME_BIRTH


def test_many_decoys(tmp_path):
    weights = weights_of(CHILD)
    for number in range(30):
        weights[f"a{number}.embed_tokens.weight"] = torch.randn(300, 64)
    answer, sentence = judged(BASE, folder_with(tmp_path / "a", weights))
    assert answer == INCONCLUSIVE and "no one token table found in B" in sentence


def test_experts_that_no_memory_holds(tmp_path):
    weights = weights_of(CHILD)
    weights["model.layers.0.mlp.experts.down_proj"] = torch.zeros(1, 64, 8)
    source = folder_with(tmp_path / "a", weights)
    source.shapes["model.layers.0.mlp.experts.down_proj"] = (2**40, 0, 32)
    source.shapes["model.layers.0.mlp.experts.gate_up_proj"] = (2**40, 32, 0)
    assert judged(BASE, source)[0] == SAME_BIRTH


def test_layers_of_which_nothing_is_known(tmp_path):
    """Square matrices without names: an MLP may be among them, and a changed basis hides it."""
    config = replace(CONFIG, d_ff=64)
    names = {"mlp.gate_proj": "p", "mlp.up_proj": "r", "mlp.down_proj": "q"}
    base = Newborn(config, 1)
    sources = [folder_with(tmp_path / "a", renamed(weights_of(base), **names))]
    sources.append(folder_with(tmp_path / "b", renamed(weights_of(thief.hidden(base)), **names)))
    answer, sentence = judged(*sources)
    assert answer == INCONCLUSIVE and "a changed basis would hide a child" in sentence


def test_a_decoy_beside_an_mlp_without_a_gate(tmp_path):
    base = Newborn(replace(CONFIG, mlp="gelu", norm="layernorm"), 1)
    weights = weights_of(thief.hidden(base))
    for layer in range(3):
        weights[f"model.layers.{layer}.mlp.c_fc.weight"] = torch.randn(96, 64)
    assert judged(base, folder_with(tmp_path / "a", weights))[0] == SAME_BIRTH


CONCEALED = {
    "MLPs called attention": {"mlp.": "self_attn."},
    "a table of another width": {"embed_tokens": "embeddings", "lm_head": ""},
    "parts without numbers": {"layers.0.": "first.", "layers.1.": "second.", "layers.2.": "third."},
}


@pytest.mark.parametrize("case", CONCEALED)
def test_mlps_that_are_not_found_are_no_evidence_of_nothing(case, tmp_path):
    sources = []
    for place, source in zip("ab", (BASE, CHILD)):
        weights = renamed(weights_of(source), **CONCEALED[case])
        if "width" in case:
            weights["model.embeddings.weight"] = torch.randn(300, 16)
        sources.append(folder_with(tmp_path / place, weights))
    answer, sentence = judged(*sources)
    assert answer in (SAME_BIRTH, INCONCLUSIVE), sentence
    assert answer == SAME_BIRTH or "MLPs found in A" in sentence


def test_attention_alone():
    config = replace(CONFIG, sublayers="attention")
    answer, sentence = judged(Newborn(config, 1), Newborn(config, 2))
    assert answer == NO_EVIDENCE and "basis was changed would not" in sentence
    assert judged(Newborn(config, 1), Newborn(config, 1))[0] == SAME_BIRTH


def test_a_stranger_of_few_tokens_has_another_table():
    """Two random tables of 130 tokens in 64 dimensions share half of each dimension by chance."""
    config = replace(CONFIG, vocab_size=130)
    sentence = judged(Newborn(config, 1), Newborn(config, 2))[1]
    assert sentence.endswith("its token table is another")


def test_a_copy_and_an_order_are_told():
    sentence = judged(BASE, BASE)[1]
    assert "its weights are the base's, to" in sentence and sentence.endswith("its token table is the base's")
    answer, sentence = judged(BASE, thief.hidden(BASE, ("neurons",)))
    assert answer == SAME_BIRTH and "its hidden units stand in another order" in sentence
    assert "basis" not in sentence
    answer, sentence = judged(BASE, thief.cut(BASE, (2, 0)))
    assert "in layers 3, 1 of the base" in sentence and "basis" not in sentence
