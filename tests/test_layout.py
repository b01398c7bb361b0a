"""lineage/layout.py: which tensors are the model, and what was not looked at?"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_verdict import BASE, CHILD, CONFIG, STRANGER, changed, row_by_both

from lineage import layout
from lineage.judge import INCONCLUSIVE, NO_EVIDENCE, SAME_BIRTH
from reproduce.disguise import as_source, disguised, weights_of
from reproduce.robustness import noised
from strangers.formats import Newborn

NOISED = noised(BASE, 0.5)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8


def row_of_pair(base: dict, suspect: dict) -> dict:
    """The row of two models, by their tensors."""
    return row_by_both(as_source(base, CONFIG), as_source(suspect, CONFIG))


def judged(base: dict, suspect: dict) -> tuple[str, str]:
    row = row_of_pair(base, suspect)
    return row["verdict"], row["sentence"]


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


# ---- stacks ------------------------------------------------------------------------------------------------

LAYER = "model.layers."
SPLIT = {f"{LAYER}{layer}.self_attn.": f"model.attentions.{layer}." for layer in range(3)}
SPLIT |= {f"{LAYER}{layer}.mlp.": f"model.ffns.{layer}." for layer in range(3)}
UNDERSCORES = {LAYER: "layers_", ".self_attn.": "_attn_", ".mlp.": "_mlp_", "_proj.weight": "_proj_weight"}


NAMES = {
    "sequential": {LAYER: "sequential.", "model.embed_tokens": "sequential.90.word_embeddings"},
    "no name": {LAYER: "transformer.", "model.embed_tokens.weight": "w"},
    "underscores": UNDERSCORES,
    "unit3": {LAYER: "unit", "model.embed_tokens": "embedder"},
    "lists of attention and MLPs": SPLIT,
    "compiled, and parallel": {"model.": "module._orig_mod.model."},
}


@pytest.mark.parametrize("case", NAMES)
def test_layers_of_any_name(case):
    """A copy, a noised child, a rotated one and a stranger, beside a base of usual names, and of these."""
    kinds = {"copy": BASE, "noised": NOISED, "rotated": CHILD, "stranger": STRANGER}
    renamed = {kind: changed(weights_of(source), NAMES[case]) for kind, source in kinds.items()}
    for base in (weights_of(BASE), renamed["copy"]):
        for kind, weights in renamed.items():
            answer, sentence = judged(base, weights)
            assert answer == (NO_EVIDENCE if kind == "stranger" else SAME_BIRTH), (kind, sentence)


def block(prefix: str, width: int, units: int) -> list:
    shapes = {"up": (units, width), "down": (width, units), "o": (width, width)}
    return [(f"{prefix}.{name}", shape) for name, shape in shapes.items()]


def test_the_outermost_number_counts_layers():
    """Inner ones are experts; where layers are called so, a number before theirs counts models."""
    experts = [each for i in (0, 1, 2) for e in range(4) for each in block(f"m.{i}.moe.{e}", 8, 12)]
    (run,) = layout.runs_of({name: shape for name, shape in experts})
    assert (run.prefix, run.width, len(run.layers)) == ("m.", 8, 3)
    models = dict(each for m in (0, 1) for i in (0, 1, 2) for each in block(f"models.{m}.layers.{i}", 8, 12))
    assert [run.prefix for run in layout.runs_of(models)] == ["models.0.layers.", "models.1.layers."]
    one = [dict(block(name, 8, 12)) for name in ("layers.0", "thing.0", "thing")]
    assert [len(layout.runs_of(tensors)) for tensors in one] == [1, 1, 1]
    assert not layout.runs_of({f"emb.{i}.weight": (300, 8) for i in range(4)})  # codebooks


# ---- parts -------------------------------------------------------------------------------------------------


def tower(seed: int, prefix: str, width=48, patch=True) -> dict:
    """Three layers that read no tokens."""
    weights = {f"{prefix}post_norm.weight": torch.ones(width)}
    if patch:
        weights[f"{prefix}patch.weight"] = drawn(seed, width, 3, 4, 4)
    for layer in range(3):
        start = f"{prefix}encoder.layers.{layer}."
        for number, name in enumerate(("q_proj", "k_proj", "v_proj", "out_proj")):
            weights[f"{start}self_attn.{name}.weight"] = drawn(100 * seed + 10 * layer + number, width, width)
        weights[f"{start}mlp.fc1.weight"] = drawn(100 * seed + 10 * layer + 5, 80, width)
        weights[f"{start}mlp.fc2.weight"] = drawn(100 * seed + 10 * layer + 6, width, 80)
    return weights


def with_noise(weights: dict, size=0.3) -> dict:
    noise = {name: drawn(len(name), *weight.shape) * 8 for name, weight in weights.items()}
    return {n: w + size * w.std() * noise[n] if w.ndim > 1 else w for n, w in weights.items()}


def action_expert(seed: int) -> dict:
    """Three layers beside a language model's, narrower, that no table of tokens leads to, as of pi0."""
    weights = {"action_in_proj.weight": drawn(seed, 48, 7), "action_out_proj.weight": drawn(seed, 7, 48)}
    return weights | tower(seed, "expert.", patch=False)


def patched(seed: int, pixels=50) -> dict:
    """A tower as wide as the language model, whose patches enter by a plain matrix, as in Llama 4."""
    weights = {"vision.patch_embedding.linear.weight": drawn(seed, 64, pixels)}
    return weights | tower(seed, "vision.", 64, patch=False)


def of_siglip2(seed: int) -> dict:
    """The same of patches with as many numbers as half of the tokens, and with an MLP behind the layers."""
    return patched(seed, 200) | {"vision.head.mlp.fc1.weight": drawn(seed, 200, 64)}


def renamed(seed: int) -> dict:
    return tower(seed, "x.y." if seed == 1 else "text_encoder.")


@pytest.mark.parametrize("part", [partial(tower, prefix="vpm."), renamed, action_expert, patched, of_siglip2])
def test_a_part_that_is_not_the_language_model_is_named(part):
    """By its bits, whatever it is called; kin are kin without it, or with another."""
    base = weights_of(BASE) | part(1)
    for source, verdict in ((CHILD, SAME_BIRTH), (STRANGER, NO_EVIDENCE)):
        parts = [({}, ""), (part(1), "begins bit for bit as the base's `")]
        parts += [(other, "was not looked at") for other in (part(2), with_noise(part(1)))]
        for more, said in parts:
            answer, sentence = judged(base, weights_of(source) | more)
            assert answer == verdict and said in sentence, sentence
            assert bool(more) == ("; its `" in sentence), sentence


def layers_of(seed: int, place: str) -> dict:
    return {n.replace(LAYER, place): w for n, w in weights_of(Newborn(CONFIG, seed)).items() if LAYER in n}


def beside(place: str, language: dict, seed: int) -> dict:
    """A stack of the model's width that has no table of its own."""
    names = {LAYER: "language.decoder.layers.", "model.embed_tokens.weight": "tok.weight"}
    return changed(language, names) | layers_of(seed, place)


def generator(language: dict, seed: int) -> dict:
    """As an image generator's, as large as the language model."""
    text = {f"text.{name}": weight for name, weight in language.items()}
    return text | layers_of(seed, "image.") | {"image.patch.weight": drawn(1, 64, 3, 4, 4)}


def of_t5(names: tuple, language: dict, seed: int) -> dict:
    """An encoder and a decoder on one embedding matrix, under one name or several."""
    table = language["model.embed_tokens.weight"]
    decoder = {name.replace(LAYER, "decoder.block."): w for name, w in language.items() if LAYER in name}
    cross = {f"decoder.block.{n}.cross_attn.q_proj.weight": drawn(9 * seed + n, 64, 64) for n in range(3)}
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
    "vit.": partial(beside, "vit."),
    "layers": partial(beside, "language.vision.layers."),
    "text encoder": partial(beside, "text_encoder.body."),
    "generator": generator,
    "T5": partial(of_t5, ("shared",)),
    "T5, three names": partial(of_t5, ("shared", "encoder.embed_tokens", "decoder.embed_tokens")),
    "MusicGen": of_music_gen,
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_a_part_that_may_be_the_language_model_must_agree(case):
    """Where one of two stacks is the base's, and the other is not, both are named."""
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
    """Of two bare encoders each is the model; beside a language model it is a part."""
    bare = tower(1, "")
    inside, without = weights_of(STRANGER) | tower(1, "vpm."), weights_of(STRANGER)
    assert "its `vpm.encoder.layers.*` begins bit for bit" in judged(bare, inside)[1]
    for suspect in (inside, weights_of(STRANGER) | tower(2, "vpm."), without):
        assert judged(bare, suspect)[0] == judged(suspect, bare)[0] == INCONCLUSIVE
    assert judged(bare, with_noise(bare))[0] == judged(bare, bare)[0] == SAME_BIRTH
    answer, sentence = judged(bare, tower(2, ""))
    assert answer == NO_EVIDENCE and "but a changed basis would hide a child" in sentence


def test_constants_in_a_list_are_no_part():
    """A transform and its inverse are the same in each of its places, and in models that never met."""
    forward = (torch.outer(torch.arange(64.0), torch.arange(64.0)) * torch.pi / 64).cos()
    fixed = {f"fft.{place}.forward": forward for place in range(3)}
    fixed |= {f"fft.{place}.inverse": torch.linalg.pinv(forward) for place in range(3)}
    assert judged(weights_of(BASE) | fixed, weights_of(STRANGER) | fixed)[0] == NO_EVIDENCE
    assert judged(weights_of(BASE) | fixed, weights_of(NOISED) | fixed)[0] == SAME_BIRTH
    answer, sentence = judged(fixed, fixed)
    assert answer == INCONCLUSIVE and "all layers of A have the same numbers" in sentence, sentence


def test_two_copies_of_a_model_in_a_file():
    for source, verdict in ((NOISED, SAME_BIRTH), (STRANGER, NO_EVIDENCE)):
        weights = weights_of(source)
        both = [{f"{part}.{name}": w for name, w in weights.items()} for part in ("ema_model", "online")]
        assert judged(weights_of(BASE), both[0] | both[1])[0] == verdict


# ---- a part is not the model -------------------------------------------------------------------------------


def rows(count: int, weights: dict) -> dict:
    """With so many rows of the tables."""
    return {name: w[:count] if "embed" in name or "head" in name else w for name, w in weights.items()}


SHALLOW = {f"{LAYER}2.": ""}
STUDENT = replace(CONFIG, num_layers=2, vocab_size=200)
TOLD = {  # what a file has, what is told of the whole, and what is said to be missing; of others nothing is
    "a stage": (SHALLOW, {"layers": 3}, "2 of 3 layers are here"),
    "a rank": (partial(rows, 150), {"tokens": 300}, "150 of 300 tokens are here"),
    "both": (
        lambda w: rows(150, changed(w, SHALLOW)),
        {"layers": 3, "tokens": 300},
        "2 of 3 layers are here; of B 150 of 300",
    ),
    "a file of two": (
        partial(rows, 150),
        {"parts": "a file of two"},
        "a part is not the model: of B a file of two",
    ),
    "pruned": (SHALLOW, {"layers": 2}, ""),
    "trimmed": (partial(rows, 200), {"tokens": 200}, ""),
    "more than is told": ({}, {"layers": 2, "tokens": 299}, ""),
    "nothing is told": (SHALLOW, {}, ""),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_part_clears_nobody(case):
    """A child is one by a part; of a stranger's part nothing is said, but of the whole, however small."""
    change, told, said = TOLD[case]
    base = as_source(weights_of(BASE), CONFIG)
    for source, verdict in ((CHILD, SAME_BIRTH), (STRANGER, INCONCLUSIVE if said else NO_EVIDENCE)):
        suspect = as_source(changed(weights_of(source), change), CONFIG)
        suspect.told = suspect.told | told
        row = row_by_both(base, suspect)
        assert row["verdict"] == verdict, row["sentence"]
        assert verdict == SAME_BIRTH or said in row["sentence"], row["sentence"]
        assert row_by_both(suspect, base)["verdict"] == verdict


ONE = replace(CONFIG, num_layers=1)


@pytest.mark.parametrize("name", [f"{LAYER}0.", "layer.0.", "blocks.0.", "encoder.0.", "unit0.", "cell."])
def test_a_single_layer_and_its_copies(name):
    """Whatever it is called; six copies of the base's are six layers, but those of a stranger are none."""
    base = noised(Newborn(ONE, 1), 0)
    kinds = {
        "noised": noised(base, 0.5),
        "disguised": disguised(base),
        "stranger": noised(Newborn(ONE, 2), 0),
    }
    for kind, source in kinds.items():
        weights = weights_of(source)
        copies = {n: w for n, w in weights.items() if LAYER not in n}
        for layer in range(6):
            copies |= {n.replace("0", str(layer)): w for n, w in weights.items() if LAYER in n}
        for suspect in (weights, copies):
            answer, sentence = judged(
                changed(weights_of(base), {f"{LAYER}0.": name} if name else {}), suspect
            )
            assert answer == (NO_EVIDENCE if kind == "stranger" else SAME_BIRTH), (kind, sentence)


# ---- what was not looked at --------------------------------------------------------------------------------


def with_adapters(weights: dict, names: tuple, rank: int) -> dict:
    """A pair of factors below each MLP matrix."""
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


def with_second_mlp(seed: int, source) -> dict:
    """Twelve layers of two MLPs each."""
    others = weights_of(noised(Newborn(source.config, seed), 0))
    second = {name.replace("mlp.", "mlp2."): weight for name, weight in others.items() if "mlp." in name}
    return changed(weights_of(source), {"mlp.": "mlp1."}) | second


def test_two_mlps_in_each_of_twelve_layers():
    deep = noised(Newborn(replace(CONFIG, num_layers=12), 1), 0)
    base = with_second_mlp(5, deep)
    answer, sentence = judged(base, with_noise(base))
    assert answer == SAME_BIRTH and "at least 192 of 192 neurons of 8 of the 8 layers" in sentence, sentence
    answer, sentence = judged(base, with_second_mlp(6, disguised(deep)))  # half of the neurons are the base's
    assert answer == SAME_BIRTH and " of 192 neurons of 8 of the 8 layers" in sentence, sentence
    answer, sentence = judged(base, with_second_mlp(6, Newborn(deep.config, 2)))
    assert answer == NO_EVIDENCE and "(8 of 12 layers were read), as by chance" in sentence, sentence


def factors(weight: torch.Tensor, rank: int) -> tuple:
    U, S, V = torch.linalg.svd(weight, full_matrices=False)
    return U[..., :rank] * S[..., None, :rank], V[..., :rank, :]


def as_products(names: tuple, rank: int, weights: dict) -> dict:
    """Each matrix of an MLP as a product of two."""
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
    usual, base = weights_of(BASE), change(weights_of(BASE))
    for pair in (
        (usual, change(weights_of(CHILD))),
        (base, change(weights_of(CHILD))),
        (base, weights_of(CHILD)),
    ):
        answer, sentence = judged(*pair)
        assert answer == INCONCLUSIVE and "MLPs stored as products" in sentence, sentence
    assert judged(base, with_noise(base))[0] == SAME_BIRTH
    for pair in ((usual, change(weights_of(STRANGER))), (base, change(weights_of(STRANGER)))):
        assert judged(*pair)[0] in (INCONCLUSIVE, NO_EVIDENCE)


def with_experts(weights: dict, seed: int) -> dict:
    """A stack of three experts in each layer, beside its plain MLP, as GraniteMoeShared's."""
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
    assert [len(mlps) for mlps in stack.mlps] == 3 * [1 + 3]
    answer, sentence = judged(base, with_noise(base))
    assert answer == SAME_BIRTH and "neurons of 3 of the 3 layers read were matched" in sentence, sentence
    assert judged(base, with_experts(weights_of(STRANGER), 2))[0] == NO_EVIDENCE
    others = with_experts(weights_of(BASE), 2)  # new experts on the base's MLPs
    answer, sentence = judged(base, others)
    assert answer == SAME_BIRTH and "of 3 of the 3 layers read were matched" in sentence, sentence


@pytest.mark.parametrize("size", [16, 64, 96])
def test_lookup_tables_in_layers(size):
    """As of n-grams, beside attention: they have most numbers, but the stream is read and written.

    Those of 96 numbers are as wide as MLPs, whose units are read and written, too.
    """

    def with_tables(source, seed: int) -> dict:
        weights = weights_of(source)
        for layer in range(3):
            memory = f"{LAYER}{layer}.memory."
            weights[f"{memory}table.weight"] = drawn(seed + layer, 3000, size)
            weights[f"{memory}to.weight"] = drawn(seed + 9 + layer, 64, size)
        return weights

    base = with_tables(BASE, 1)
    assert judged(base, with_tables(CHILD, 1))[0] == judged(base, weights_of(CHILD))[0] == SAME_BIRTH
    assert judged(base, with_tables(STRANGER, 50))[0] == NO_EVIDENCE
    assert judged(base, with_tables(STRANGER, 1))[0] == INCONCLUSIVE  # whose tables are the base's


@pytest.mark.parametrize("name", ["vision_bridge.weight", "text_projection", "classifier/kernel"])
def test_a_projection_beside_the_table_hides_nothing(name):
    """What leads into the stream, or out of it, beside a table that no name tells, and positions."""
    names = {"model.embed_tokens.weight": "tok_emb.weight", "lm_head.weight": "unembed.weight"}
    positions = {"pos_emb.weight": drawn(1, 400, 64)}
    base, child, stranger = (
        changed(weights_of(s), names) | {name: drawn(3, 64, 24)} | positions for s in (BASE, CHILD, STRANGER)
    )
    answer, sentence = judged(base, child)
    assert answer == SAME_BIRTH and "neurons of 3 of the 3 layers read were matched" in sentence, sentence
    assert judged(base, stranger)[0] == NO_EVIDENCE


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


def test_a_child_whose_table_was_not_found_is_not_cleared():
    base, noised_child, rotated = (as_keras(weights_of(source)) for source in (BASE, NOISED, CHILD))
    assert judged(base, rotated)[0] != NO_EVIDENCE
    assert judged(base, noised_child)[0] == SAME_BIRTH


@pytest.mark.parametrize("expert", range(4))
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
