"""lineage/layout.py: which tensors are the model, and what was not looked at?"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from kin import BASE, CHILD, CONFIG, LAYER, NOISED, STRANGER, changed, drawn, judged, with_noise

from lineage import layout
from lineage.judge import INCONCLUSIVE, NO_EVIDENCE, SAME_BIRTH
from reproduce.disguise import as_source, disguised, newborn_source, weights_of
from reproduce.robustness import noised

LSTM = {f"rnn.weight_{kind}_l{layer}": drawn(layer, 256, 64) for kind in ("ih", "hh") for layer in (0, 1)}
ALONE = "embed_tokens.weight"
BARE = {  # files without layers, and what is said of them
    "a random table": ({ALONE: drawn(1, 300, 64)}, "alone; embedding matrices that were not"),
    "the base's table": ({ALONE: BASE.read(f"model.{ALONE}")}, "alone; the base's embedding matrix|"),
    "the same, changed": ({ALONE: NOISED.read(f"model.{ALONE}")}, "the base's embedding matrix, changed|"),
    "an LSTM": (LSTM, "no layers, but rnn.weight_ih_l0, rnn.weight_ih_l1, "),
    "nothing": ({}, "B has no layers, but nothing: is it an optimizer's state?"),
}


@pytest.mark.parametrize("case", BARE)
def test_of_a_model_without_layers_nothing_is_said(case):
    weights, said = BARE[case]
    answer, sentence = judged(weights_of(BASE), weights)
    assert answer == INCONCLUSIVE and said in f"{sentence}|", sentence
    assert judged(weights, weights_of(BASE))[0] == judged(weights, weights)[0] == INCONCLUSIVE


# ---- parts -------------------------------------------------------------------------------------------------


def layers_of(seed: int, place: str, config=CONFIG) -> dict:
    weights = weights_of(newborn_source(config, seed))
    return {name.replace(LAYER, place): weight for name, weight in weights.items() if LAYER in name}


def tower(seed: int, prefix: str, width=48, patch=True) -> dict:
    """Three layers that read no tokens."""
    config = replace(CONFIG, d_model=width, num_kv_heads=4, d_ff=80, mlp="gelu")
    weights = layers_of(seed, f"{prefix}encoder.layers.", config)
    if patch:
        weights[f"{prefix}patch.weight"] = drawn(seed, width, 3, 4, 4)
    return weights


def action_expert(seed: int) -> dict:
    """Three layers beside a language model's, narrower, that no table of tokens leads to, as of pi0."""
    weights = {"action_in_proj.weight": drawn(seed, 48, 7), "action_out_proj.weight": drawn(seed, 7, 48)}
    return weights | tower(seed, "expert.", patch=False)


def of_siglip2(seed: int) -> dict:
    """A tower as wide as the language model, whose patches of 200 numbers enter by a plain matrix."""
    weights = {"vision.patch_embedding.linear.weight": drawn(seed, 64, 200)}
    weights["vision.head.mlp.fc1.weight"] = drawn(seed, 200, 64)
    return weights | tower(seed, "vision.", 64, patch=False)


def renamed(seed: int) -> dict:
    return tower(seed, "x.y." if seed == 1 else "text_encoder.")


@pytest.mark.parametrize("part", [partial(tower, prefix="vpm."), renamed, action_expert, of_siglip2])
def test_a_part_that_is_not_the_language_model_is_named(part):
    base = weights_of(BASE) | part(1)
    for source, more, verdict, said in (
        (CHILD, {}, SAME_BIRTH, ""),
        (CHILD, part(2), SAME_BIRTH, "was not looked at"),
        (CHILD, with_noise(part(1)), SAME_BIRTH, "was not looked at"),
        (STRANGER, part(1), NO_EVIDENCE, "begins bit for bit as the base's `"),
    ):
        answer, sentence = judged(base, weights_of(source) | more)
        assert answer == verdict and said in sentence, sentence
        assert bool(more) == ("; its `" in sentence), sentence


def beside(place: str, language: dict, seed: int) -> dict:
    names = {LAYER: "language.decoder.layers.", "model.embed_tokens.weight": "tok.weight"}
    return changed(language, names) | layers_of(seed, place)


def generator(language: dict, seed: int) -> dict:
    text = {f"text.{name}": weight for name, weight in language.items()}
    return text | layers_of(seed, "image.") | {"image.patch.weight": drawn(1, 64, 3, 4, 4)}


def of_t5(language: dict, seed: int) -> dict:
    """An encoder and a decoder on one embedding matrix, under several names."""
    table = language["model.embed_tokens.weight"]
    decoder = {name.replace(LAYER, "decoder.block."): w for name, w in language.items() if LAYER in name}
    cross = {f"decoder.block.{n}.cross_attn.q_proj.weight": drawn(9 * seed + n, 64, 64) for n in range(3)}
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    tables = {"lm_head.weight": language["lm_head.weight"]} | {f"{name}.weight": table for name in names}
    return layers_of(seed, "encoder.block.") | decoder | cross | tables


def of_music_gen(language: dict, seed: int) -> dict:
    """A decoder of codebooks beside a text encoder with a table of its own."""
    names = {"model.embed_tokens.": "decoder.embed_tokens.0.", "model.": "decoder."}
    decoder = changed(language, names | {"lm_head": "decoder.lm_heads.0"})
    table = {"text_encoder.shared.weight": drawn(seed, 300, 64)}
    decoder |= {"decoder.embed_tokens.1.weight": drawn(len(decoder), 300, 64)}
    return decoder | layers_of(seed, "text_encoder.block.") | table


DOUBTFUL = {
    "text encoder": partial(beside, "text_encoder.body."),
    "generator": generator,
    "T5": of_t5,
    "MusicGen": of_music_gen,
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_a_part_that_may_be_the_language_model_must_agree(case):
    base = DOUBTFUL[case](weights_of(BASE), 7)
    verdicts = {}
    for who, source in (("child", NOISED), ("stranger", STRANGER)):
        for seed in (7, 8):
            answer, sentence = judged(base, DOUBTFUL[case](weights_of(source), seed))
            assert ("its parts differ: `" in sentence) == (answer == INCONCLUSIVE), sentence
            verdicts[who, seed] = answer
    expected = {("child", 7): SAME_BIRTH, ("stranger", 8): NO_EVIDENCE}
    assert verdicts == dict.fromkeys(verdicts, INCONCLUSIVE) | expected


def test_a_bare_encoder_and_what_contains_it():
    bare = tower(1, "")
    inside, without = weights_of(STRANGER) | tower(1, "vpm."), weights_of(STRANGER)
    assert "its `vpm.encoder.layers.*` begins bit for bit" in judged(bare, inside)[1]
    for suspect in (inside, weights_of(STRANGER) | tower(2, "vpm."), without):
        assert judged(bare, suspect)[0] == judged(suspect, bare)[0] == INCONCLUSIVE
    assert judged(bare, with_noise(bare))[0] == judged(bare, bare)[0] == SAME_BIRTH
    answer, sentence = judged(bare, tower(2, ""))
    assert answer == NO_EVIDENCE and "but a changed basis would hide a child" in sentence


def test_constants_are_no_kinship():
    """Masks and tables in layers, a transform and its inverse beside them, in models that never met."""
    forward = (torch.outer(torch.arange(64.0), torch.arange(64.0)) * torch.pi / 64).cos()
    constants = {"causal": torch.ones(64, 64).tril(), "zeros": torch.zeros(64, 64), "mix": torch.eye(64) + 3}
    constants |= {"rotary_emb.cos_cached": drawn(0, 64, 64).cos()}
    fixed, others = {}, {}
    for layer in range(3):
        fixed |= {f"fft.{layer}.forward": forward, f"fft.{layer}.inverse": torch.linalg.pinv(forward)}
        others |= {f"{LAYER}{layer}.{name}": weight for name, weight in constants.items()}
    for more in (fixed, others):
        base = weights_of(BASE) | more
        assert judged(base, weights_of(STRANGER) | more)[0] == NO_EVIDENCE
        assert judged(base, weights_of(NOISED) | more)[0] == SAME_BIRTH
    answer, sentence = judged(fixed, fixed)
    assert answer == INCONCLUSIVE and "all layers of A have the same numbers" in sentence, sentence


# ---- a part is not the model -------------------------------------------------------------------------------


def rows(count: int, weights: dict) -> dict:
    return {name: w[:count] if "embed" in name or "head" in name else w for name, w in weights.items()}


SHALLOW = {f"{LAYER}2.": ""}
TOLD = {  # what a file has, what is told of the whole, and what is said to be missing; of others nothing is
    "a stage": (SHALLOW, {"layers": 3}, "2 of 3 layers are here"),
    "a rank": (partial(rows, 150), {"tokens": 300}, "150 of 300 tokens are here"),
    "pruned": (SHALLOW, {"layers": 2}, ""),
    "trimmed": (partial(rows, 200), {"tokens": 200}, ""),
    "more than is told": ({}, {"layers": 2, "tokens": 299}, ""),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_part_clears_nobody(case, monkeypatch):
    """A child is one by a part; of a stranger's part nothing is said, but of the whole, however small."""
    change, told, said = TOLD[case]
    base = as_source(weights_of(BASE), CONFIG)
    stated = {"layers": None, "tokens": None, "draft": None} | told
    monkeypatch.setattr("lineage.layout.stated_counts", lambda place: stated)
    for source, verdict in ((CHILD, SAME_BIRTH), (STRANGER, INCONCLUSIVE if said else NO_EVIDENCE)):
        suspect = as_source(changed(weights_of(source), change), CONFIG)
        answer, sentence = judged(base, suspect)
        assert answer == verdict and (source is CHILD or said in sentence), sentence
    assert judged(suspect, base)[0] == verdict


ONE = replace(CONFIG, num_layers=1)


@pytest.mark.parametrize("name", [f"{LAYER}0.", "unit0.", "cell."])
def test_a_single_layer_and_its_copies(name):
    """Whatever it is called; six copies of the base's are six layers, but those of a stranger are none."""
    birth = noised(newborn_source(ONE, 1), 0)
    base = changed(weights_of(birth), {f"{LAYER}0.": name})
    kinds = ((noised(birth, 0.5), SAME_BIRTH), (disguised(birth), SAME_BIRTH))
    for source, verdict in (*kinds, (noised(newborn_source(ONE, 2), 0), NO_EVIDENCE)):
        weights = weights_of(source)
        assert judged(base, weights)[0] == verdict
        for layer in range(1, 6):
            weights |= {n.replace("0", str(layer)): w for n, w in weights.items() if f"{LAYER}0" in n}
        answer, sentence = judged(base, weights)
        assert answer == verdict, sentence


# ---- what was not looked at --------------------------------------------------------------------------------


def with_adapters(weights: dict, names: tuple, rank: int) -> dict:
    others = dict(weights)
    for number, (name, weight) in enumerate(weights.items()):
        if ".mlp." in name:
            below = name.removesuffix("weight")
            others |= {below + names[0]: drawn(number, rank, weight.shape[1])}
            others |= {below + names[1]: drawn(number + 500, weight.shape[0], rank)}
            others |= {f"{below}layer_norm_weight": torch.ones(64)}  # vectors are no adapters
    return others


@pytest.mark.parametrize("names", [("lora_a.weight", "lora_b.weight"), ("svd_v", "svd_u"), ("p.weight", "q")])
def test_adapters_are_told(names):
    for rank, verdict in ((1, NO_EVIDENCE), (48, INCONCLUSIVE)):  # a child may hide in large ones
        answer, sentence = judged(weights_of(BASE), with_adapters(weights_of(STRANGER), names, rank))
        assert answer == verdict and "not looked at in B: adapters (" in sentence, sentence
    answer, sentence = judged(weights_of(BASE), with_adapters(weights_of(NOISED), names, rank))
    assert answer == SAME_BIRTH and "not looked at in B: adapters (" in sentence, sentence


def sliced(source, kept: int) -> dict:
    """As SliceGPT: each layer in bases of its own, of which `kept` coordinates are left."""
    generator = torch.Generator().manual_seed(0)
    bases = [torch.linalg.qr(torch.randn(64, 64, generator=generator))[0] for _ in range(7)]
    weights = weights_of(source)
    others = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        others[name] = (weights[name] @ bases[0])[:, :kept]
    for layer in range(3):
        before, between, behind = bases[2 * layer : 2 * layer + 3]
        for name in [name for name in weights if f".{layer}." in name and "norm" not in name]:
            start, end = (before, between) if "attn" in name else (between, behind)
            writes = "o_proj" in name or "down_proj" in name
            others[name] = (end.T @ weights[name])[:kept] if writes else (weights[name] @ start)[:, :kept]
        others[f"{LAYER}{layer}.attn_shortcut_Q"] = (before.T @ between)[:kept, :kept]
        others[f"{LAYER}{layer}.mlp_shortcut_Q"] = (between.T @ behind)[:kept, :kept]
    return others


@pytest.mark.parametrize("kept", [64, 48])
@pytest.mark.parametrize("source", [BASE, STRANGER])
def test_bases_of_each_layer_hide_a_child(source, kept):
    answer, sentence = judged(weights_of(BASE), sliced(source, kept))
    assert answer == INCONCLUSIVE and "not looked at in B: changes of basis (" in sentence, sentence


# ---- MLPs and tables --------------------------------------------------------------------------------


def test_a_layer_without_units_beside_layers_that_coordinates_tell():
    for source, verdict in ((NOISED, SAME_BIRTH), (STRANGER, INCONCLUSIVE)):
        weights = changed(weights_of(source), {"0.mlp.": "0.self_attn."})
        answer, sentence = judged(weights_of(BASE), weights)
        assert answer == verdict, sentence


def factors(weight: torch.Tensor, rank: int) -> tuple:
    U, S, V = torch.linalg.svd(weight, full_matrices=False)
    return U[..., :rank] * S[..., None, :rank], V[..., :rank, :]


def as_products(names: tuple, rank: int, weights: dict) -> dict:
    others = {}
    for name, weight in weights.items():
        if ".mlp." in name:
            others |= dict(zip((name.replace(".weight", end) for end in names), factors(weight, rank)))
        else:
            others[name] = weight
    return others


def of_experts(weights: dict) -> dict:
    """Each layer's MLP as a stack of two experts, whose matrices are products with one matrix for both."""
    others = {name: weight for name, weight in weights.items() if ".mlp." not in name}
    for layer in range(3):
        start = f"{LAYER}{layer}.mlp."
        for view in ("gate", "up"):
            U, V = factors(weights[f"{start}{view}_proj.weight"], 24)
            others |= {f"{start}{view}_u": U.unflatten(0, (2, -1)), f"{start}{view}_v": V}
        V, U = factors(weights[f"{start}down_proj.weight"], 24)
        others |= {f"{start}down_v": V, f"{start}down_u": torch.stack(U.chunk(2, dim=1))}
    return others


PRODUCTS = {
    "u and v": partial(as_products, ("_u.weight", "_v.weight"), 24),
    "no names": partial(as_products, (".x", ".y"), 24),
    "of the width": partial(as_products, (".U.weight", ".V.weight"), 64),
    "experts": of_experts,
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_a_rank_is_not_a_neuron(case):
    """A disguised child is never cleared; a noised one is seen by its coordinates; a stranger is not kin."""
    change = PRODUCTS[case]
    base, child, stranger = (change(weights_of(source)) for source in (BASE, CHILD, STRANGER))
    for pair in ((BASE, child), (base, child), (base, CHILD)):
        answer, sentence = judged(*pair)
        assert answer == INCONCLUSIVE and "MLPs stored as products" in sentence, sentence
    assert judged(base, with_noise(base))[0] == SAME_BIRTH
    assert judged(base, stranger)[0] in (INCONCLUSIVE, NO_EVIDENCE)


def with_experts(weights: dict, seed: int) -> dict:
    others = changed(weights, {".mlp.": ".shared_mlp."})
    for layer in range(3):
        moe = f"{LAYER}{layer}.block_sparse_moe."
        others[f"{moe}input_linear.weight"] = drawn(100 * seed + layer, 3, 80, 64)
        others[f"{moe}output_linear.weight"] = drawn(100 * seed + layer + 10, 3, 64, 40)
        others[f"{moe}router.layer.weight"] = drawn(100 * seed + layer + 20, 3, 64)
    return others


def test_a_plain_mlp_beside_experts():
    base = with_experts(weights_of(BASE), 1)
    (stack,) = layout.find_stacks(as_source(base, CONFIG))
    assert [len(layer.mlps) for layer in stack.layers] == 3 * [1 + 3]
    answer, sentence = judged(base, with_noise(base))
    assert answer == SAME_BIRTH and "neurons of 3 of the 3 layers read were matched" in sentence, sentence
    assert judged(base, with_experts(weights_of(STRANGER), 2))[0] == NO_EVIDENCE
    others = with_experts(weights_of(BASE), 2)  # new experts on the base's MLPs
    answer, sentence = judged(base, others)
    assert answer == SAME_BIRTH and "of 3 of the 3 layers read were matched" in sentence, sentence


@pytest.mark.parametrize("size", [16, 64, 96])  # 96: as wide as MLPs, whose units are read and written, too
def test_lookup_tables_in_layers(size):
    def with_tables(source, seed: int) -> dict:
        weights = weights_of(source)
        for layer in range(3):
            memory = f"{LAYER}{layer}.memory."
            weights[f"{memory}table.weight"] = drawn(seed + layer, 3000, size)
            weights[f"{memory}to.weight"] = drawn(seed + 9 + layer, 64, size)
        return weights

    base = with_tables(BASE, 1)
    assert judged(base, weights_of(CHILD))[0] == SAME_BIRTH
    answer, sentence = judged(base, with_tables(STRANGER, 50))
    # Tables off the stream are compared by nothing that a changed basis would not hide.
    assert answer == (NO_EVIDENCE if size == 64 else INCONCLUSIVE), sentence
    assert ("matrices beside the stream" in sentence) == (size != 64)
    assert judged(base, with_tables(STRANGER, 1))[0] == INCONCLUSIVE  # whose tables are the base's


@pytest.mark.parametrize("expert", [0, 2])
def test_one_copied_expert_of_a_stack_is_no_kinship(expert):
    """In each layer, bit for bit; and a stack in another order is the base's, by its neurons."""
    base, stranger = weights_of(BASE), weights_of(STRANGER)
    for weights, seed in ((base, 1), (stranger, 100)):
        for layer in range(3):
            for number, (view, shape) in enumerate({"gate_up": (4, 160, 64), "down": (4, 64, 80)}.items()):
                weights[f"{LAYER}{layer}.mlp.experts.{view}_proj"] = drawn(seed + 10 * layer + number, *shape)
        for name in [name for name in weights if ".mlp." in name and name.endswith("weight")]:
            del weights[name]
    for name in [name for name in base if "experts" in name]:
        stranger[name][expert] = base[name][expert]
    assert judged(base, stranger)[0] != SAME_BIRTH
    moved = {name: weight.flip(0) if "experts" in name else weight for name, weight in base.items()}
    assert judged(base, moved)[0] == SAME_BIRTH
