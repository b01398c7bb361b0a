"""lineage/layout.py: names and shapes that people bring, of children of a base, and of a stranger."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from kin import BASE, CHILD, CONFIG, LAYER, STRANGER, TABLES, born, changed, drawn, folder_with, judged

from lib.settings import UserError
from lineage.judge import INCONCLUSIVE, NO_EVIDENCE, SAME_BIRTH
from reproduce.disguise import newborn_source, weights_of
from reproduce.robustness import noised
from sources import checkpoint, saving

TIED = replace(CONFIG, tie_embeddings=True)
PLAIN = replace(CONFIG, mlp="gelu", norm="layernorm")
SQUARE = replace(CONFIG, d_ff=64, num_kv_heads=4)
TABLE, HEAD = TABLES
RIGHT = {"turned": SAME_BIRTH, "noised": SAME_BIRTH, "stranger": NO_EVIDENCE}
SURE = {who: (verdict,) for who, verdict in RIGHT.items()}
HONEST = {who: (verdict, INCONCLUSIVE) for who, verdict in RIGHT.items()}


# ---- other names, tables and heads -------------------------------------------------------------------------


def with_tensors(others: dict, names: dict, weights: dict) -> dict:
    return changed(weights, names) | others


def decoys(name: str, rows: int, count=1) -> dict:
    return {f"{name.replace('a.', f'a{number}.')}.weight": drawn(0, rows, 64) for number in range(count)}


def as_pi05(weights: dict) -> dict:
    """No table but a tied head, beside a norm's matrix (192, d) and one of time (64, d)."""
    queries = [weights[f"{LAYER}{layer}.self_attn.q_proj.weight"] for layer in range(3)]
    others = {"model.norm.dense.weight": torch.cat(queries), "time_mlp_in.weight": queries[0].flip(0)}
    return with_tensors(others, {TABLE: HEAD}, weights)


def parametrized(weights: dict) -> dict:
    start = TABLE.replace("weight", "parametrizations.weight.")
    adapters = {f"{start}0.lora_A": drawn(7, 5, 4, 64), f"{start}0.lora_B": drawn(8, 5, 300, 4)}
    return with_tensors(adapters, {TABLE: f"{start}original"}, weights)


def as_keras(weights: dict) -> dict:
    """Kernels (inputs, outputs), those of attention by heads, and a first layer without a number."""
    others = {}
    for name, weight in changed(weights, {f"{LAYER}0": "decoder", LAYER: "decoder_"}).items():
        if "attn" in name:
            weight = weight.T.reshape(64, -1, 16) if "o_proj" not in name else weight.T.reshape(-1, 16, 64)
        elif weight.ndim > 1 and "embed" not in name:
            weight = weight.T
        others[name.replace("embed_tokens.weight", "embeddings").replace(".", "/")] = weight
    return others


def tables_alone(change, weights: dict) -> dict:
    return weights | {name: change(weights[name]) for name in TABLES}


def each(change, weights: dict) -> dict:
    return {name: change(weight) for name, weight in weights.items()}


HUGE = torch.ones(300, 1)
HUGE[7] = 1000
BY_PLACE = {TABLE: "position_and_token.tok.weight", HEAD: "to_logits.weight"}
SPLIT = {f"{LAYER}{layer}.self_attn.": f"model.attentions.{layer}." for layer in range(3)}
SPLIT |= {f"{LAYER}{layer}.mlp.": f"model.ffns.{layer}." for layer in range(3)}
UNDERSCORES = {LAYER: "layers_", ".self_attn.": "_attn_", ".mlp.": "_mlp_", "_proj.weight": "_proj_weight"}
POSITIONS = {"pos_emb.weight": drawn(1, 400, 64)}
UNNAMED = {TABLE: "tok_emb.weight", HEAD: "unembed.weight"}
LAYOUTS = {  # the architecture, its layout, and what is right of whom
    "sequential": (CONFIG, {LAYER: "sequential.", TABLE: "sequential.90.word_embeddings.weight"}, SURE),
    "no name": (CONFIG, {LAYER: "transformer.", TABLE: "w"}, SURE),
    "underscores": (CONFIG, UNDERSCORES, SURE),
    "unit3": (CONFIG, {LAYER: "unit", TABLE: "embedder.weight"}, SURE),
    "lists of attention and MLPs": (CONFIG, SPLIT, SURE),
    "compiled, and parallel": (CONFIG, {"model.": "module._orig_mod.model."}, SURE),
    "layers moved, no head": (CONFIG, {HEAD: "", "layers.0.": "layers.3."}, SURE),
    "heads alone": (CONFIG, {TABLE: ""}, HONEST),
    "position_and_token": (CONFIG, BY_PLACE, SURE),
    "project": (CONFIG, {TABLE: "project.tok.weight", HEAD: "project.unembed.weight"}, SURE),
    "a lone head": (CONFIG, BY_PLACE | {TABLE: ""}, HONEST),
    "a lone table": (CONFIG, {TABLE: "vocab.weight", HEAD: ""}, SURE),
    "nn.Transformer": (PLAIN, {"up": "linear1", "down": "linear2"}, SURE),
    "pi0.5": (replace(TIED, vocab_size=600), as_pi05, SURE),
    "Keras": (CONFIG, as_keras, HONEST),
    "a loop's adapter": (
        CONFIG,
        partial(with_tensors, {"model.adapter.weight": drawn(7, 64, 128)}, {}),
        SURE,
    ),
    "a prefix": (CONFIG, {"model.": "adapter.model.", HEAD: f"adapter.{HEAD}"}, SURE),
    "a table's adapters": (CONFIG, parametrized, SURE),
    "a decoy": (CONFIG, partial(with_tensors, decoys("a.embed_tokens", 300), {}), SURE),
    "a long decoy": (CONFIG, partial(with_tensors, decoys("a.lm_head", 2000), {}), SURE),
    "a huge token": (CONFIG, partial(tables_alone, lambda table: table * HUGE), SURE),
    "huge": (CONFIG, partial(each, lambda weight: 1e18 * weight), SURE),
    "float64": (CONFIG, partial(each, torch.Tensor.double), SURE),
    "few tokens": (
        CONFIG,
        partial(tables_alone, lambda table: table[:100]),
        SURE | {"stranger": (INCONCLUSIVE,)},  # enough to find a child, but not to say that there is none
    ),
}
for name in ("vision_bridge.weight", "text_projection", "classifier/kernel"):
    beside = {name: drawn(3, 64, 24)} | POSITIONS
    LAYOUTS[name] = (CONFIG, partial(with_tensors, beside, UNNAMED), SURE)


# ---- MLPs --------------------------------------------------------------------------------------------------


def fused(weights: dict, turns=1, exchanged=False) -> dict:
    others = changed(weights, {"gate_proj": "", "up_proj": ""})
    for layer in range(3):
        mlp = f"{LAYER}{layer}.mlp."
        pair = [weights[f"{mlp}{view}_proj.weight"].view(turns, -1, 64) for view in ("gate", "up")]
        if exchanged:
            pair.reverse()
        others[f"{mlp}gate_up_proj.weight"] = torch.cat(pair, 1).flatten(0, 1)
    return others


def experts_of(write, count: int, rest, weights: dict) -> dict:
    """Each layer's MLP cut into `count` experts (gate, up, down), which `write` stores, beside a router."""
    others = {name: weight for name, weight in weights.items() if ".mlp." not in name}
    for layer in range(3):
        start = f"{LAYER}{layer}.mlp."
        gate, up, down = (weights[f"{start}{view}_proj.weight"] for view in ("gate", "up", "down"))
        experts = zip(gate.chunk(count), up.chunk(count), down.chunk(count, dim=1))
        others |= {start + name: weight.contiguous() for name, weight in write([*experts]).items()}
        if count > 1:
            others[f"{start}router.weight"] = drawn(layer, count, 64)
    return changed(others, rest)


def as_flax(weights: dict) -> dict:
    """Kernels (inputs, outputs), but for the MLP's, which are stored already."""
    names = {TABLE: "token_embedder.embedding", HEAD: "decoder.logits_dense.kernel"}
    names |= {LAYER: "decoder.layers_", "norm.weight": "norm.scale", "weight": "kernel", ".": "/"}
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
    """(d, E 2m) and (E m, d)."""
    first = [torch.cat([gate, up]).T for gate, up, _ in experts]
    second = [down.T for *_, down in experts]
    return {"experts.weight1": torch.cat(first, dim=1), "experts.weight2": torch.cat(second)}


def as_megatron(experts: list) -> dict:
    """The same shapes, but the first is a view of (E, d, 2m), whose rows are no coordinates."""
    first = torch.stack([torch.cat([gate, up]).T for gate, up, _ in experts])
    return side_by_side(experts) | {"experts.weight1": first.reshape(64, -1)}


def as_xformers(experts: list) -> dict:
    return {f"w{number}.weight": matrix for number, matrix in enumerate(experts[0], start=1)}


SHORT = {"self_attn.": "sa.", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
DBRX = {"mlp.gate_proj.weight": "ffn.experts.mlp.w1", "mlp.up_proj.weight": "ffn.experts.mlp.v1"}
DBRX |= {"mlp.down_proj.weight": "ffn.experts.mlp.w2", "post_attention_layernorm": "norm_attn_norm.norm_2"}
EXCHANGED = partial(fused, turns=96, exchanged=True)
WIDE = replace(CONFIG, num_kv_heads=4)
LAYOUTS |= {
    "p, q, r": (CONFIG, {"gate_proj": "p", "up_proj": "r", "down_proj": "q"}, SURE),
    "gate after up": (CONFIG, {"gate_proj": "r", "up_proj": "p", "down_proj": "q"}, SURE),
    "DBRX": (CONFIG, DBRX, SURE),
    "halves": (CONFIG, fused, SURE),
    "in turn, exchanged": (CONFIG, EXCHANGED, SURE),
    "kernels": (SQUARE, partial(experts_of, kernels, 1, as_flax), SURE),
    "kernels by oblong ones": (replace(CONFIG, d_ff=64), partial(experts_of, kernels, 1, as_flax), SURE),
    "kernels of experts": (replace(SQUARE, d_ff=256), partial(experts_of, kernels, 4, as_flax), SURE),
    "w3 writes, and attention's wo": (CONFIG, partial(experts_of, as_xformers, 1, SHORT), SURE),
    "beside square wq, wk, wv, wo": (WIDE, partial(experts_of, as_xformers, 1, SHORT), SURE),
    "numbers last": (CONFIG, partial(experts_of, numbers_last, 4, {}), SURE),
    "grouped linears": (CONFIG, partial(experts_of, grouped_linears, 4, {}), SURE),
    "side by side": (CONFIG, partial(experts_of, side_by_side, 4, {}), HONEST),
    "Megatron": (CONFIG, partial(experts_of, as_megatron, 4, {}), HONEST),
}


def alike(weights: dict) -> dict:
    return {name: weights[name.replace("up_proj", "gate_proj")] for name in weights}


def dead(weights: dict) -> dict:
    return {name: 0 * weight if ".mlp." in name else weight for name, weight in weights.items()}


NARROW = partial(tables_alone, lambda table: table[:, :32])  # as OPT-350m's, which is projected
MANY = partial(with_tensors, decoys("a.embed_tokens", 300, 30), {})
HIDDEN = SURE | {"turned": (INCONCLUSIVE,), "stranger": (INCONCLUSIVE,)}
LAYOUTS |= {  # where neurons cannot tell
    "views alike": (CONFIG, alike, SURE | {"stranger": (INCONCLUSIVE,)}),
    "dead units": (CONFIG, dead, dict.fromkeys(RIGHT, (INCONCLUSIVE,))),
    "many decoys": (CONFIG, MANY, HIDDEN),
    "MLPs called attention": (CONFIG, {"mlp.": "self_attn."}, HIDDEN),
    "a narrow table": (CONFIG, NARROW, HIDDEN),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_children_are_found_and_strangers_are_not(case):
    config, change, right = LAYOUTS[case]
    usual = born(config, "base")
    same = changed(usual, change)
    for base, who in ((usual, "turned"), (same, "turned"), (same, "noised"), (same, "stranger")):
        verdict, sentence = judged(base, changed(born(config, who), change))
        assert verdict in right[who], (who, base is same, sentence)
        assert ("not looked at in B: adapters" in sentence) == (case == "a table's adapters"), sentence


# ---- files that cannot be read wholly ----------------------------------------------------------------------


@pytest.mark.parametrize("source, verdict", [(CHILD, SAME_BIRTH), (STRANGER, INCONCLUSIVE)])
def test_packed_experts(source, verdict, tmp_path):
    suspect = weights_of(source)
    packed = {}
    for layer in range(3):
        for view in ("gate", "up", "down"):
            start = f"{LAYER}{layer}.mlp.experts.0.{view}_proj.weight_"
            packed |= {f"{start}packed": torch.ones(64, 24).int(), f"{start}scale": torch.ones(64, 2)}
    answer, sentence = judged(BASE, folder_with(tmp_path / "a", suspect | packed))
    assert answer == verdict and "not looked at in B: packed weights (" in sentence, sentence
    without = {name: weight for name, weight in suspect.items() if ".mlp." not in name}
    with pytest.raises(UserError, match="packed numbers"):
        judged(BASE, folder_with(tmp_path / "b", without | packed))


def pruned_each(weights: dict) -> dict:
    others = dict(weights)
    for layer in range(3):
        for view in ("gate", "up", "down"):
            name = f"{LAYER}{layer}.mlp.{view}_proj.weight"
            units = torch.arange(96 - 8 * layer)
            others[name] = weights[name].index_select(int(view == "down"), units)
    return others


CONTRADICTED = {  # what config.json says otherwise than the weights have it, and what was done to these
    "a head though tied": ({"tie_word_embeddings": True}, {}),
    "a stale vocabulary": ({}, partial(tables_alone, lambda table: torch.cat([table, drawn(0, 20, 64)]))),
    "layers of several widths": ({}, pruned_each),
    "biases": ({}, partial(with_tensors, {f"{LAYER}1.self_attn.o_proj.bias": torch.ones(64)}, {})),
    "no gains": ({}, {"norm.weight": "", "layernorm.weight": ""}),
    "a score for a head": ({}, partial(with_tensors, {"score.weight": torch.ones(1, 64)}, {HEAD: ""})),
}


@pytest.mark.parametrize("case", CONTRADICTED)
def test_a_config_that_contradicts_the_weights(case, tmp_path):
    said, change = CONTRADICTED[case]
    raw = saving.config_json(CONFIG) | said
    del raw[saving.MARK]
    for who, verdict in RIGHT.items():
        suspect = folder_with(tmp_path / who, changed(born(CONFIG, who), change), raw)
        answer, sentence = judged(BASE, suspect)
        assert answer == verdict and ("3 of the 3 layers" in sentence) == (who != "stranger"), sentence
    with pytest.raises(UserError, match="does not fit model.py"):
        checkpoint.find_model(str(tmp_path / "turned")).transformer()


# ---- two models in a file ----------------------------------------------------------------------------------


def test_beside_a_stranger():
    both = weights_of(STRANGER) | changed(weights_of(CHILD), {"model.": "a.", HEAD: "a.head"})
    answer, sentence = judged(BASE, both)
    assert answer == INCONCLUSIVE, sentence
    for part, said in (("a", SAME_BIRTH), ("model", NO_EVIDENCE)):
        assert f"`{part}.layers.*` and the base's `model.layers.*`: {said}" in sentence, sentence


@pytest.mark.parametrize("who", ["turned", "stranger"])
def test_a_student_that_cannot_be_read_beside_a_public_teacher(who):
    """Its table is stored (d, V): it may be anybody's."""
    teacher = weights_of(noised(newborn_source(replace(CONFIG, num_layers=4), 7), 0))
    files = []
    for weights in (born(TIED, "base"), born(TIED, who)):
        student = changed(weights, {TABLE: "W_E"}) | {"W_E": weights[TABLE].T}
        names = {f"student.{name}": weight for name, weight in student.items()}
        files.append(names | {f"teacher.{name}": weight for name, weight in teacher.items()})
    verdict, sentence = judged(*files)
    assert verdict == INCONCLUSIVE and "its parts differ" in sentence, sentence


def test_one_layer_in_common_beside_a_stranger_is_doubtful():
    base, suspect = born(CONFIG, "base"), born(CONFIG, "stranger")
    student = changed(suspect, {TABLE: f"student.{TABLE}", "model.layers": "student.layers"})
    for name in student:
        if ".layers.1." in name:
            student[name] = base[name.replace("student", "model")]
    verdict, sentence = judged(base, suspect | student)
    assert verdict == INCONCLUSIVE and "but no other layer's" in sentence, sentence


SECOND = {  # a second model in the file, with a head: which one, and must it be kin, too?
    "teacher": (TIED, replace(CONFIG, num_layers=5), True),
    "action expert": (TIED, replace(CONFIG, num_layers=4, d_model=96), True),
    "small": (TIED, replace(CONFIG, num_layers=2, d_model=16, d_ff=32), False),
    "draft": (CONFIG, replace(CONFIG, num_layers=1), False),  # as EAGLE's, with a copy of the table
}


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("case", SECOND)
def test_a_second_model(case, is_shared):
    config, second, counts = SECOND[case]
    for who in ("turned", "stranger"):
        files = []
        for weights, seed in ((born(config, "base"), 7), (born(config, who), 7 if is_shared else 8)):
            other = weights_of(noised(newborn_source(second, seed), 0))
            if case == "draft":
                other |= {TABLE: weights[TABLE], HEAD: other[HEAD][:200]}
            files.append(weights | {f"{case}.{name}": weight for name, weight in other.items()})
        verdict, sentence = judged(*files)
        differ = counts and is_shared != (who == "turned")
        assert verdict == (INCONCLUSIVE if differ else RIGHT[who]), sentence
        assert ("its parts differ" in sentence) == differ, sentence
        assert (f"; its `{case}." in sentence) != counts, sentence


def test_two_copies_of_a_model_in_a_file():
    for who in ("noised", "stranger"):
        copies = [
            {f"{part}.{name}": w for name, w in born(CONFIG, who).items()} for part in ("ema", "online")
        ]
        assert judged(BASE, copies[0] | copies[1])[0] == RIGHT[who]
