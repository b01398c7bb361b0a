"""lineage/layout.py: which tensors are the model, and what was not looked at?"""

import pytest
import torch
from test_verdict import BASE, CHILD, CONFIG, STRANGER, changed, row_by_both

from lineage import layout
from lineage.disguise import as_source, disguised, weights_of
from lineage.table import INCONCLUSIVE, NO_EVIDENCE, PART_IN_COMMON, SAME_BIRTH
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
    "nothing": ({}, "B has no layers, but nothing: is it an optimizer's state?; not"),
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


LANGUAGE = {LAYER: "language.decoder.layers.", "model.embed_tokens.weight": "tok.weight"}


@pytest.mark.parametrize("tower", ["vit.", "language.vision.layers.", "text_encoder.body."])
def test_a_shared_stack_of_the_models_width_convicts_nobody(tower):
    """Nothing tells whether the table feeds it: strangers have a part in common, and a child is one."""
    layers = {n.replace(LAYER, tower): w for n, w in weights_of(Newborn(CONFIG, 9)).items() if LAYER in n}
    base, child, stranger = (changed(weights_of(s), LANGUAGE) | layers for s in (BASE, NOISED, STRANGER))
    assert judged(base, stranger)[0] == PART_IN_COMMON
    assert judged(base, child)[0] == SAME_BIRTH


def block(prefix: str, width: int, units: int) -> list:
    shapes = {"up": (units, width), "down": (width, units), "o": (width, width)}
    return [(f"{prefix}.{name}", shape) for name, shape in shapes.items()]


def test_the_outermost_number_counts_layers():
    """Inner ones are experts; where layers are called so, a number before theirs counts models."""
    experts = [each for i in (0, 1, 2) for e in range(4) for each in block(f"m.{i}.moe.{e}", 8, 12)]
    (stack,) = layout.runs_of({name: shape for name, shape in experts})
    assert (stack.prefix, stack.width, [*stack.layers]) == ("m.", 8, [0, 1, 2])
    models = dict(each for m in (0, 1) for i in (0, 1, 2) for each in block(f"models.{m}.layers.{i}", 8, 12))
    assert [run.prefix for run in layout.runs_of(models)] == ["models.0.layers.", "models.1.layers."]
    one = dict(block("layers.0", 8, 12))
    assert len(layout.runs_of(one)) == 1 and not layout.runs_of(dict(block("thing.0", 8, 12)))
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


@pytest.mark.parametrize("prefix", ["vpm.", "text_encoder."])
def test_a_tower_in_common(prefix):
    """By bits; in bfloat16; trained on in both; and the language models by themselves, whatever its name."""
    ours, theirs = weights_of(BASE), weights_of(STRANGER)
    frozen = tower(1, prefix)
    base = ours | frozen
    cases = {
        "frozen": (theirs | frozen, PART_IN_COMMON, "bit for bit; the language models: no evidence"),
        "bfloat16": (theirs | {n: w.bfloat16() for n, w in frozen.items()}, PART_IN_COMMON, "coordinates of"),
        "trained": (theirs | with_noise(frozen), PART_IN_COMMON, "in every kind of matrix of layers 1-3"),
        "another": (theirs | tower(2, prefix), NO_EVIDENCE, "as by chance"),
        "kin": (weights_of(NOISED) | frozen, SAME_BIRTH, "every layer were matched"),
        "kin alone": (weights_of(NOISED) | tower(2, prefix), SAME_BIRTH, "not seen to be the base's"),
        "no tower": (theirs, NO_EVIDENCE, "as by chance"),
        "renamed": (theirs | tower(1, "x.y."), PART_IN_COMMON, "its `x` (3 layers) is the base's `"),
    }
    for case, (suspect, verdict, said) in cases.items():
        answer, sentence = judged(base, suspect)
        assert answer == verdict and said in sentence, (case, sentence)


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


@pytest.mark.parametrize("part", [action_expert, patched, of_siglip2])
def test_what_no_table_leads_to_is_no_language_model(part):
    """Children are kin without it, or with another; strangers are not by having it."""
    base, child, stranger = (weights_of(source) for source in (BASE, CHILD, STRANGER))
    cases = [(child, SAME_BIRTH), (child | part(2), SAME_BIRTH), (stranger | part(2), NO_EVIDENCE)]
    for suspect, verdict in [*cases, (stranger | part(1), PART_IN_COMMON)]:
        answer, sentence = judged(base | part(1), suspect)
        assert answer == verdict, sentence


def test_a_bare_encoder_and_what_contains_it():
    """Both ways; and of two bare encoders each is the model."""
    bare, other = tower(1, ""), tower(2, "")
    inside = weights_of(STRANGER) | tower(1, "vpm.")
    for base, suspect, names in ((bare, inside, ("vpm", "")), (inside, bare, ("", "vpm"))):
        row = row_of_pair(base, suspect)
        assert (row["verdict"], (row["part"], row["base_part"])) == (PART_IN_COMMON, names), row["sentence"]
        assert "bit for bit" in row["sentence"]
    for unrelated in (weights_of(STRANGER) | tower(2, "vpm."), weights_of(STRANGER)):
        assert judged(bare, unrelated)[0] == judged(unrelated, bare)[0] == INCONCLUSIVE
    assert judged(bare, with_noise(bare))[0] == judged(bare, bare)[0] == SAME_BIRTH
    answer, sentence = judged(bare, other)
    assert answer == NO_EVIDENCE and "but a changed basis would hide a child" in sentence
    row = row_of_pair(bare, bare)
    assert row["part"] is None and row["base_part"] is None


def test_a_part_as_large_as_the_language_model_must_be_kin():
    """As an image generator's, which strangers train on one frozen language model."""

    def generator(source) -> dict:
        weights = {f"text.{name}": weight for name, weight in weights_of(BASE).items()}
        layers = {f"image.{name}": w for name, w in weights_of(source).items() if "layers" in name}
        return weights | layers | {"image.patch.weight": drawn(1, 64, 3, 4, 4)}

    base = generator(Newborn(CONFIG, 3))
    row = row_of_pair(base, generator(STRANGER))
    assert (row["verdict"], row["part"]) == (PART_IN_COMMON, "text"), row["sentence"]
    assert judged(base, with_noise(base))[0] == SAME_BIRTH


def test_constants_in_a_list_are_no_part():
    """A transform and its inverse are the same in each of its places, and in models that never met."""
    forward = (torch.outer(torch.arange(64.0), torch.arange(64.0)) * torch.pi / 64).cos()
    fixed = {f"fft.{place}.forward": forward for place in range(3)}
    fixed |= {f"fft.{place}.inverse": torch.linalg.pinv(forward) for place in range(3)}
    assert judged(weights_of(BASE) | fixed, weights_of(STRANGER) | fixed)[0] == NO_EVIDENCE
    assert judged(weights_of(BASE) | fixed, weights_of(NOISED) | fixed)[0] == SAME_BIRTH
    answer, sentence = judged(fixed, fixed)
    assert answer == INCONCLUSIVE and "all layers of A have the same numbers" in sentence, sentence


def encoder_and_decoder(seed: int, tables=("shared",)) -> dict:
    """As T5's: an encoder and a decoder on one embedding matrix, under one name or two."""
    weights = {f"{name}.weight": Newborn(CONFIG, seed).read("model.embed_tokens.weight") for name in tables}
    for start, number in (("encoder", seed), ("decoder", seed + 50)):
        layers = {n: w for n, w in weights_of(noised(Newborn(CONFIG, number), 0)).items() if "layers" in n}
        weights |= changed(layers, {LAYER: f"{start}.block."})
    for layer in range(3):
        weights[f"decoder.block.{layer}.cross_attn.q_proj.weight"] = drawn(10 * seed + layer, 64, 64)
    return weights | {"lm_head.weight": drawn(seed, 300, 64)}


TABLES = [("shared",), ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]


@pytest.mark.parametrize("tables", TABLES)
def test_an_encoder_and_a_decoder_on_one_table_are_kin_if_both_are(tables):
    """A child of every layer, or of some; strangers; and what strangers have that share a frozen encoder."""
    base, stranger = (encoder_and_decoder(seed, tables) for seed in (1, 2))
    answer, sentence = judged(base, with_noise(base))
    assert answer == SAME_BIRTH, sentence
    fewer = {name: weight for name, weight in base.items() if ".block.2." not in name}
    assert judged(base, fewer)[0] == SAME_BIRTH
    assert judged(base, stranger)[0] == NO_EVIDENCE
    for shallow in (stranger, {name: w for name, w in stranger.items() if ".block.2." not in name}):
        frozen = {name: w for name, w in base.items() if name.startswith(("encoder", "shared"))}
        row = row_of_pair(base, changed(shallow, {"encoder": ""}) | frozen)
        assert (row["verdict"], row["part"]) == (PART_IN_COMMON, "encoder"), row["sentence"]


def with_text_encoder(encoder: dict, seed: int) -> dict:
    """As MusicGen: a decoder of codebooks beside a text encoder with a table of its own."""
    names = {"model.": "decoder.", "lm_head": "decoder.lm_heads.0"}
    decoder = changed(weights_of(noised(Newborn(CONFIG, seed), 0)), names)
    table = decoder.pop("decoder.embed_tokens.weight")
    decoder |= {"decoder.embed_tokens.0.weight": table, "decoder.embed_tokens.1.weight": drawn(seed, 300, 64)}
    return {f"text_encoder.{name}": weight for name, weight in encoder.items()} | decoder


def test_a_text_encoder_is_a_part():
    text = {n: w for n, w in encoder_and_decoder(1).items() if n.startswith(("encoder", "shared"))}
    base = with_text_encoder(text, 7)
    assert [part.name for part in layout.find_stacks(as_source(base, CONFIG))] == ["decoder", "text_encoder"]
    strangers = (with_text_encoder(text, 8), with_text_encoder(with_noise(text), 8), encoder_and_decoder(1))
    for suspect in strangers:
        answer, sentence = judged(base, suspect)
        assert answer == PART_IN_COMMON and "is the base's `text_encoder` (3 layers)" in sentence, sentence
    assert judged(base, with_noise(base))[0] == SAME_BIRTH
    other = {n: w for n, w in encoder_and_decoder(2).items() if n.startswith(("encoder", "shared"))}
    assert judged(base, with_text_encoder(other, 8))[0] == NO_EVIDENCE


def test_two_models_in_a_file():
    for source, verdict in ((NOISED, SAME_BIRTH), (STRANGER, NO_EVIDENCE)):
        weights = weights_of(source)
        both = {f"ema_model.{n}": w for n, w in weights.items()}
        both |= {f"online.{n}": w for n, w in weights.items()}
        answer, sentence = judged(weights_of(BASE), both)
        assert answer == verdict and sentence.startswith("its `ema_model` (3 layers)"), sentence


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
        assert answer == verdict and "not looked at: adapters (" in sentence, sentence
        answer, sentence = judged(weights_of(BASE), with_adapters(weights_of(NOISED), names, rank))
        assert answer == SAME_BIRTH and "not looked at: adapters (" in sentence, sentence


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
    assert answer == INCONCLUSIVE and "not looked at: changes of basis (" in sentence, sentence


# ---- MLPs, tables and norms --------------------------------------------------------------------------------


def test_a_layer_without_units_beside_layers_that_coordinates_tell():
    for source, verdict in ((NOISED, SAME_BIRTH), (STRANGER, INCONCLUSIVE)):
        weights = changed(weights_of(source), {"0.mlp.": "0.self_attn."})
        answer, sentence = judged(weights_of(BASE), weights)
        assert answer == verdict, sentence


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
    assert len(layout.find_stacks(as_source(base, CONFIG))[0].mlps) == 3 * (1 + 3)
    answer, sentence = judged(base, with_noise(base))
    assert answer == SAME_BIRTH and "neurons of every layer were matched" in sentence, sentence
    assert judged(base, with_experts(weights_of(STRANGER), 2))[0] == NO_EVIDENCE
    suspect = with_experts(weights_of(STRANGER), 2)
    for part in ("input", "output"):  # an expert of the base under another number
        name = f"{LAYER}1.block_sparse_moe.{part}_linear.weight"
        suspect[name] = torch.cat([suspect[name][:2], base[name][:1]])
    answer, sentence = judged(base, suspect)
    assert answer == INCONCLUSIVE and "are bit for bit MLPs of the base's layer 2, but" in sentence, sentence
    suspect = weights_of(STRANGER)  # one expert of ten in each layer, bit for bit
    for layer in range(3):
        for part in ("input", "output"):
            name = f"{LAYER}{layer}.block_sparse_moe.{part}_linear.weight"
            suspect[name] = torch.cat([base[name][:1], drawn(layer, 8, *base[name].shape[1:])])
    answer, sentence = judged(base, suspect)
    assert answer == INCONCLUSIVE and "or few experts of each" in sentence, sentence
    others = with_experts(weights_of(BASE), 2)  # new experts on the base's MLPs
    answer, sentence = judged(base, others)
    assert answer == SAME_BIRTH and "of 3 of 3 layers were matched" in sentence, sentence


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


def test_a_lone_vector_is_a_gain_if_its_values_say_so():
    """A bias of another name is none: it scales nothing, and no distance is false."""
    pair = (weights_of(BASE), weights_of(disguised(BASE, ["neurons"])))
    base, child = ({n: w for n, w in weights.items() if "norm" not in n} for weights in pair)
    for name, values, is_copy in (("b_out", drawn(3, 64), True), ("gamma", 1 + drawn(3, 64), False)):
        vectors = {f"{LAYER}{layer}.mlp.{name}": values for layer in range(3)}
        row = row_of_pair(base, child | vectors)
        assert row["verdict"] == SAME_BIRTH and (row["distance"] < 1e-6) is is_copy, row


def test_where_no_norm_is_known_no_distance_is_told():
    weights = weights_of(BASE)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weights[name] = 1 + drawn(len(name), 64).abs() * 8
    odd = changed(weights, {"post_attention_layernorm.weight": "g2", "input_layernorm.weight": "g1"})
    row = row_of_pair(weights, odd)
    assert row["verdict"] == SAME_BIRTH and row["distance"] is None and "distance" not in row["sentence"]
    assert row_of_pair(weights, weights)["distance"] < 1e-6


def test_the_distance_of_models_whose_gate_is_called_up():
    """Signs of what is called gate may be flipped there."""
    swap = {"gate_proj": "swapped", "up_proj": "gate_proj", "swapped": "up_proj"}
    base, child = (changed(weights_of(source), swap) for source in (BASE, disguised(BASE, ["signs"])))
    row = row_of_pair(base, child)
    assert row["verdict"] == SAME_BIRTH and row["distance"] < 0.01


@pytest.mark.parametrize("name", ["vision_bridge.weight", "text_projection", "classifier/kernel"])
def test_a_projection_beside_the_table_hides_nothing(name):
    """What leads into the stream, or out of it, beside a table that no name tells, and positions."""
    names = {"model.embed_tokens.weight": "tok_emb.weight", "lm_head.weight": "unembed.weight"}
    positions = {"pos_emb.weight": drawn(1, 400, 64)}
    base, child, stranger = (
        changed(weights_of(s), names) | {name: drawn(3, 64, 24)} | positions for s in (BASE, CHILD, STRANGER)
    )
    answer, sentence = judged(base, child)
    assert answer == SAME_BIRTH and "neurons of every layer were matched" in sentence, sentence
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
    answer, sentence = judged(base, rotated)
    assert answer == INCONCLUSIVE and "no embedding matrix" in sentence, sentence
    assert judged(base, noised_child)[0] == SAME_BIRTH
