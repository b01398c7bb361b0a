"""lineage/layout.py: layouts that people bring, each with a disguised child of the base, and a stranger."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_layout import drawn, judged
from test_verdict import changed, folder_with, fused
from test_verdict import judged as judged_sources

from lib.settings import UserError
from lineage.judge import INCONCLUSIVE, NO_EVIDENCE, SAME_BIRTH
from model import ModelConfig
from reproduce.disguise import disguised, weights_of
from reproduce.robustness import noised
from strangers.formats import Newborn

CONFIG = ModelConfig(600, 64, 3, 4, 64, 192, num_kv_heads=2)
TIED = replace(CONFIG, tie_embeddings=True)
SQUARE = replace(CONFIG, d_ff=64, num_kv_heads=4)
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TWINS = pytest.mark.parametrize("who", ["guilty", "innocent"])
SURE = {"guilty": [SAME_BIRTH], "innocent": [NO_EVIDENCE]}  # which verdicts are right
HONEST = {"guilty": [SAME_BIRTH, INCONCLUSIVE], "innocent": [NO_EVIDENCE, INCONCLUSIVE]}


def reordered(weights: dict, count: int) -> dict:
    """Neurons in the reverse order, each in its own expert of `count`."""
    others = dict(weights)
    for name, weight in weights.items():
        if ".mlp." in name:
            axis = int("down" in name)
            others[name] = weight.unflatten(axis, (count, -1)).flip(axis + 1).flatten(axis, axis + 1)
    return others


def born(config: ModelConfig, who: str, count=1) -> dict:
    """The base; its noised child in another basis with its units in another order; or another draw."""
    source = noised(Newborn(config, 2 if who == "innocent" else 1), 0)
    if who != "guilty":
        return weights_of(source)
    child = noised(disguised(source, ("rotate", "signs")), 0.3)
    return reordered({name: child.read(name) for name in source.shapes}, count)


def as_nanotron(weights: dict) -> dict:
    names = {TABLE: "model.token_position_embeddings.pp_block.token_embedding.weight"}
    names |= {HEAD: "model.lm_head.pp_block.weight", "model.norm": "model.final_layer_norm.pp_block"}
    names |= {f"layers.{layer}.": f"decoder.{layer}.pp_block." for layer in range(3)}
    return changed(fused(weights), names)


def beside_decoys(weights: dict) -> dict:
    """As pi0.5: no table but a tied head, beside a norm's matrix (192, d) and one of time (64, d)."""
    queries = [weights[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in range(3)]
    decoys = {"model.norm.dense.weight": torch.cat(queries), "time_mlp_in.weight": queries[0].flip(0)}
    return changed(weights, {TABLE: HEAD}) | decoys


def parametrized(weights: dict) -> dict:
    start = TABLE.replace("weight", "parametrizations.weight.")
    adapters = {f"{start}0.lora_A": drawn(7, 5, 4, 64), f"{start}0.lora_B": drawn(8, 5, 600, 4)}
    return changed(weights, {TABLE: f"{start}original"}) | adapters


def slashed(weights: dict) -> dict:
    """As TensorFlow's GPT-2: square matrices (inputs, outputs), between slashes."""
    names = {"model.layers.": "h/", ".": "/", "up_proj": "c_fc", "down_proj": "c_proj"}
    turned = {name: weight.T for name, weight in weights.items() if "_proj." in name}
    return changed(weights | turned, names)


BY_PLACE = {TABLE: "position_and_token.tok.weight", HEAD: "to_logits.weight"}
LAYOUTS = {  # the architecture, its layout, what is right, and are adapters told?
    "A: position_and_token": (CONFIG, BY_PLACE, SURE, False),
    "A: project": (CONFIG, {TABLE: "project.tok.weight", HEAD: "project.unembed.weight"}, SURE, False),
    "A: nanotron": (CONFIG, as_nanotron, SURE, False),
    "A: lone head": (CONFIG, BY_PLACE | {TABLE: ""}, HONEST, False),
    "A: lone table": (CONFIG, {TABLE: "vocab.weight", HEAD: ""}, SURE, False),
    "A: decoys": (TIED, beside_decoys, SURE, False),
    "B: slashes": (replace(SQUARE, mlp="gelu"), slashed, SURE, False),
    "E: loop": (CONFIG, partial(dict, **{"model.adapter.weight": drawn(7, 64, 128)}), SURE, False),
    "E: prefix": (CONFIG, {"model.": "adapter.model.", HEAD: f"adapter.{HEAD}"}, SURE, False),
    "E: table": (CONFIG, parametrized, SURE, True),
}


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("who, base", [("guilty", "usual"), ("innocent", "alike")])
def test_tables_heads_and_adapters(case, who, base):
    config, change, right, is_told = LAYOUTS[case]
    of_base = change if base == "alike" else {}
    verdict, sentence = judged(changed(born(config, "base"), of_base), changed(born(config, who), change))
    assert verdict in right[who], (verdict, sentence)
    assert ("not looked at in B: adapters" in sentence) == is_told, sentence


def with_mlps(weights: dict, write, count: int) -> dict:
    """Each layer's MLP cut into `count` experts (gate, up, down), which `write` stores, beside a router."""
    others = {name: weight for name, weight in weights.items() if ".mlp." not in name}
    for layer in range(3):
        start = f"model.layers.{layer}.mlp."
        gate, up, down = (weights[f"{start}{view}_proj.weight"] for view in ("gate", "up", "down"))
        experts = zip(gate.chunk(count), up.chunk(count), down.chunk(count, dim=1))
        others |= {start + name: weight.contiguous() for name, weight in write([*experts]).items()}
        if count > 1:
            others[f"{start}router.weight"] = drawn(layer, count, 64)
    return others


def as_flax(weights: dict) -> dict:
    """Kernels (inputs, outputs), but for the MLP's, which are stored already."""
    names = {TABLE: "token_embedder.embedding", HEAD: "decoder.logits_dense.kernel"}
    names |= {"model.layers.": "decoder.layers_", "norm.weight": "norm.scale", "weight": "kernel", ".": "/"}
    turned = {n: w.T for n, w in weights.items() if n == HEAD or "_proj." in n or "router" in n}
    return changed(weights | turned, names)


def kernels(experts: list) -> dict:
    stacks = [torch.stack([matrix.T for matrix in views]).squeeze(0) for views in zip(*experts)]
    return dict(zip(("wi_0.kernel", "wi_1.kernel", "wo.kernel"), stacks))


def numbers_last(experts: list) -> dict:
    others = {}
    for view, matrices in zip(("gate", "up", "down"), zip(*experts)):
        others |= {f"experts.weight_{view}.{number}": matrix for number, matrix in enumerate(matrices)}
    return others


def grouped_linears(experts: list) -> dict:
    others = {}
    for number, (gate, up, down) in enumerate(experts):
        others[f"experts.linear_fc1.weight{number}"] = torch.cat([gate, up])
        others[f"experts.linear_fc2.weight{number}"] = down
    return others


def side_by_side(experts: list) -> dict:
    first = [torch.cat([gate, up]).T for gate, up, _ in experts]
    second = [down.T for *_, down in experts]
    return {"experts.weight1": torch.cat(first, dim=1), "experts.weight2": torch.cat(second)}


def as_megatron(experts: list) -> dict:
    """The same shapes, but the first is a view of (E, d, 2m), whose rows are no coordinates."""
    first = torch.stack([torch.cat([gate, up]).T for gate, up, _ in experts])
    return side_by_side(experts) | {"experts.weight1": first.reshape(64, -1)}


def as_xformers(experts: list) -> dict:
    """The last of three writes, not w2."""
    return {f"w{number}.weight": matrix for number, matrix in enumerate(experts[0], start=1)}


SHORT = {"self_attn.": "sa.", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
MLPS = {  # how are MLPs stored? The architecture, how many experts, and all the rest
    "B: kernels": (SQUARE, 1, kernels, as_flax, SURE),
    "B: kernels beside oblong attention": (replace(CONFIG, d_ff=64), 1, kernels, as_flax, SURE),
    "B: kernels of experts": (replace(SQUARE, d_ff=256), 4, kernels, as_flax, SURE),
    "B: w3 writes, and attention's wo": (CONFIG, 1, as_xformers, SHORT, SURE),
    "B: beside square wq, wk, wv, wo": (replace(CONFIG, num_kv_heads=4), 1, as_xformers, SHORT, SURE),
    "D: numbers last": (CONFIG, 4, numbers_last, {}, SURE),
    "D: grouped linears": (CONFIG, 4, grouped_linears, {}, SURE),  # as Transformer Engine's
    "D: side by side": (CONFIG, 4, side_by_side, {}, HONEST),  # (d, E 2m) and (E m, d)
    "D: Megatron": (CONFIG, 4, as_megatron, {}, HONEST),
}


@TWINS
@pytest.mark.parametrize("case", MLPS)
def test_how_mlps_are_stored(case, who):
    config, count, write, rest, right = MLPS[case]
    models = [with_mlps(born(config, kind, count), write, count) for kind in ("base", who)]
    verdict, sentence = judged(*[changed(weights, rest) for weights in models])
    assert verdict in right[who], (verdict, sentence)


@TWINS
def test_packed_experts(who, tmp_path):
    """As compressed-tensors has them, beside readable MLPs; a file with no others is refused."""
    suspect = born(CONFIG, who)
    packed = {}
    for layer in range(3):
        for view in ("gate", "up", "down"):
            start = f"model.layers.{layer}.mlp.experts.0.{view}_proj.weight_"
            packed |= {f"{start}packed": torch.ones(64, 24).int(), f"{start}scale": torch.ones(64, 2)}
    base = folder_with(tmp_path / "base", born(CONFIG, "base"))
    verdict, sentence = judged_sources(base, folder_with(tmp_path / "a", suspect | packed))
    assert verdict == (SAME_BIRTH if who == "guilty" else INCONCLUSIVE), sentence
    assert "not looked at in B: packed weights (" in sentence
    without = {name: weight for name, weight in suspect.items() if ".mlp." not in name}
    with pytest.raises(UserError, match="packed numbers"):
        judged_sources(base, folder_with(tmp_path / "b", without | packed))


SECOND = {  # a second model in the file, with a head: which one, and must it be kin, too?
    "teacher": (TIED, replace(CONFIG, num_layers=5), True),
    "action expert": (TIED, replace(CONFIG, num_layers=4, d_model=96), True),
    "small": (TIED, replace(CONFIG, num_layers=2, d_model=16, d_ff=32), False),
    "draft": (CONFIG, replace(CONFIG, num_layers=1), False),  # as EAGLE's, with a copy of the table
}


@TWINS
def test_a_student_that_cannot_be_read_beside_a_public_teacher(who):
    """Its table is stored (d, V): it may be anybody's."""
    teacher = weights_of(noised(Newborn(replace(CONFIG, num_layers=4), 7), 0))
    files = []
    for weights in (born(TIED, "base"), born(TIED, who)):
        student = changed(weights, {TABLE: "W_E"}) | {"W_E": weights[TABLE].T}
        names = {f"student.{name}": weight for name, weight in student.items()}
        files.append(names | {f"teacher.{name}": weight for name, weight in teacher.items()})
    verdict, sentence = judged(*files)
    assert verdict == INCONCLUSIVE and "its parts differ" in sentence, sentence


def test_one_layer_in_common_beside_a_stranger_is_doubtful():
    base, suspect = (changed(born(CONFIG, who), {}) for who in ("base", "innocent"))
    student = changed(born(CONFIG, "innocent"), {TABLE: f"student.{TABLE}", "model.layers": "student.layers"})
    for name in student:
        if ".layers.1." in name:
            student[name] = base[name.replace("student", "model")]
    verdict, sentence = judged(base, suspect | student)
    assert verdict == INCONCLUSIVE and "but no other layer's" in sentence, sentence


@TWINS
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("case", SECOND)
def test_a_second_model(case, who, is_shared):
    config, second, counts = SECOND[case]
    files = [born(config, "base"), born(config, who)]
    for weights, seed in zip(files, (7, 7 if is_shared else 8)):
        other = weights_of(noised(Newborn(second, seed), 0))
        if case == "draft":
            other |= {TABLE: weights[TABLE], HEAD: other[HEAD][:400]}
        weights |= {f"{case}.{name}": weight for name, weight in other.items()}
    verdict, sentence = judged(*files)
    expected = SAME_BIRTH if who == "guilty" else NO_EVIDENCE
    differ = counts and is_shared != (who == "guilty")
    assert verdict == (INCONCLUSIVE if differ else expected), sentence
    assert ("its parts differ" in sentence) == differ and (f"; its `{case}." in sentence) != counts, sentence
