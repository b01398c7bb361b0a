"""Twelve situations in which `compare` was once wrong, each with a stranger that was treated alike."""

import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from conftest import run_script
from kin import BASE, CONFIG, LAYER, RAW, STRANGER, changed, drawn, folder_with, judged, with_noise

from lib.settings import UserError
from lineage.judge import INCONCLUSIVE, NO_EVIDENCE, SAME_BIRTH
from model import ModelConfig
from reproduce.disguise import as_source, newborn_source, weights_of
from reproduce.robustness import cut, noised
from weights.contents import open_weights
from weights.vocabulary import token_ids

DEEP = replace(CONFIG, num_layers=12)


def deep(seed: int):
    return noised(newborn_source(DEEP, seed), 0)


def test_some_layers_of_a_deeper_model_both_ways():
    base = deep(1)
    for source, verdict in ((base, SAME_BIRTH), (deep(2), NO_EVIDENCE)):
        part = weights_of(noised(cut(source, [4, 5, 6, 7]), 0.05))
        assert judged(base, part)[0] == judged(part, base)[0] == verdict


def with_other_names(weights: dict) -> dict:
    """Meta's names, gate and up in one matrix, and rows of another vocabulary."""
    names = {"model.": "net.", "self_attn.": "attention.", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv"}
    names |= {"o_proj": "wo", "embed_tokens": "tok_embeddings", "lm_head": "output", "down_proj": "w2"}
    others = {}
    for name, weight in with_noise(weights, 0.05).items():
        if "embed" in name or "lm_head" in name:
            weight = drawn(len(name) + weight.shape[0], 280, 64)
        if "gate_proj" in name:
            others[name.replace("gate_proj", "w13")] = torch.cat(
                [weight, weights[name.replace("gate", "up")]]
            )
        elif "up_proj" not in name:
            others[name] = weight
    return changed(others, names | {"mlp.": "feed_forward."})


def without_the_first_layer(weights: dict) -> dict:
    others = {}
    for name, weight in with_noise(weights, 0.05).items():
        for layer in range(1, 12):
            if f"layers.{layer}." in name:
                others[name.replace(f".{layer}.", f".{layer - 1}.", 1)] = weight
        if "layers" not in name:
            others[name] = drawn(len(name), *weight.shape)
    return others


@pytest.mark.parametrize("change", [with_other_names, without_the_first_layer])
def test_neurons_that_stand_where_they_stood_under_a_new_vocabulary(change):
    base = deep(1)
    for source, verdict in ((base, SAME_BIRTH), (deep(2), NO_EVIDENCE)):
        suspect = change(weights_of(source))
        for pair in ((base, suspect), (suspect, base)):
            answer, sentence = judged(*pair)
            assert answer == verdict, sentence


# ---- experts -----------------------------------------------------------------------------------------------

EXPERTS, WIDE = 24, 32


def mixture(seed: int) -> dict:
    """Layers of 24 experts, each a tensor of its own, beside attention."""
    weights = {name: w for name, w in weights_of(deep(seed)).items() if ".mlp." not in name}
    for layer in range(12):
        start = f"{LAYER}{layer}.mlp."
        weights[f"{start}gate.weight"] = drawn(999 * seed + layer, EXPERTS, 64)
        for expert in range(EXPERTS):
            key = 10**6 * seed + 1000 * layer + expert
            for number, view in enumerate(("gate", "up", "down")):
                shape = (64, WIDE) if view == "down" else (WIDE, 64)
                weights[f"{start}experts.{expert}.{view}_proj.weight"] = drawn(3 * key + number, *shape)
    return weights


def with_experts(weights: dict, order: list, keep=lambda view, weight: weight) -> dict:
    """The experts of these numbers, in this order."""
    others = {}
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            others[name] = weight[order]
        elif ".experts." in name:
            start, _, rest = name.partition(".experts.")
            number, view, _ = rest.split(".")
            if int(number) in order:
                others[f"{start}.experts.{order.index(int(number))}.{view}.weight"] = keep(view, weight)
        else:
            others[name] = weight
    return others


def narrowed(view, weight):
    return weight[:, ::2] if view == "down_proj" else weight[::2]


ORDER = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("case", ["another order", "pruned", "narrowed"])
def test_experts_are_known_by_their_routers(case):
    base = mixture(1)
    for seed, verdict in ((1, SAME_BIRTH), (2, NO_EVIDENCE)):
        order = ORDER[:10] if case == "pruned" else ORDER
        kept = with_experts(mixture(seed), order, *([narrowed] if case == "narrowed" else []))
        suspect = with_noise(kept, 0.3)
        for pair in ((base, suspect), (suspect, base)):
            answer, sentence = judged(*pair)
            assert answer == verdict, sentence


def latent(weights: dict, seed: int) -> dict:
    """Each layer's MLP beside experts in a space of 24 dimensions."""
    others = dict(weights)
    for layer in range(12):
        start = f"{LAYER}{layer}.mixer."
        others[f"{start}to_latent.weight"] = drawn(seed + layer, 24, 64)
        others[f"{start}from_latent.weight"] = drawn(seed + layer + 50, 64, 24)
        for expert in range(20):
            key = seed + 100 * layer + expert
            others[f"{start}experts.{expert}.up_proj.weight"] = drawn(2 * key, 100, 24)
            others[f"{start}experts.{expert}.down_proj.weight"] = drawn(2 * key + 1, 24, 100)
    return others


def test_experts_off_the_stream_are_named():
    base = latent(weights_of(deep(1)), 10**6)
    for suspect in (latent(weights_of(deep(2)), 2 * 10**6), latent(with_noise(weights_of(deep(1))), 10**7)):
        answer, sentence = judged(base, suspect)
        assert answer != NO_EVIDENCE and "matrices beside the stream" in sentence, sentence


# ---- which files are the model -----------------------------------------------------------------------------


def write_shards(place, shards: dict, index: dict) -> None:
    """Files of tensors, and an index that names (tensor, file)."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps(RAW))
    for file, tensors in shards.items():
        tensors = {name: weight.contiguous().clone() for name, weight in tensors.items()}
        safetensors.torch.save_file(tensors, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_the_index_decides_which_files_are_read(tmp_path):
    child, other = weights_of(noised(BASE, 0.3)), weights_of(STRANGER)
    for who, own, old in (("child", child, other), ("innocent", other, weights_of(BASE))):
        # The model's own shards, whose names are not known, beside another one's single file
        names = sorted(own)
        halves = {"a.safetensors": names[:12], "b.safetensors": names[12:]}
        shards = {file: {name: own[name] for name in part} for file, part in halves.items()}
        index = {name: file for file, part in halves.items() for name in part}
        write_shards(tmp_path / who, shards | {"model.safetensors": old}, index)
        suspect = open_weights(tmp_path / who)
        assert [path.name for path in suspect.files] == ["a.safetensors", "b.safetensors"]
        assert judged(BASE, suspect)[0] == (SAME_BIRTH if who == "child" else NO_EVIDENCE)
    # An overlay: a tensor that stands in two files counts from the one that is named.
    overlay = {names[0]: own[names[0]] + 1}
    index[names[0]] = "over.safetensors"
    write_shards(tmp_path / "over", shards | {"over.safetensors": overlay}, index)
    assert torch.equal(open_weights(tmp_path / "over").read(names[0]), overlay[names[0]])
    # A stale index, of files that are gone, is none.
    write_shards(
        tmp_path / "stale", {"model.safetensors": child}, {name: "gone.safetensors" for name in child}
    )
    assert open_weights(tmp_path / "stale").shapes.keys() == child.keys()
    write_shards(tmp_path / "outside", {"model.safetensors": child}, {"x": "../child/a.safetensors"})
    with pytest.raises(UserError, match="outside its folder"):
        open_weights(tmp_path / "outside")


@pytest.mark.parametrize("vocabulary", [{"en": {"a": 1}}, {"a": "1"}, {"a": -0.5, "b": -1.25}, {"a": -3}])
def test_a_vocabulary_that_is_none_only_helps(vocabulary, tmp_path, capsys):
    folder = folder_with(tmp_path / "child", weights_of(noised(BASE, 0.3))).place
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    assert token_ids(folder) == {}
    assert "tells no vocabulary" in capsys.readouterr().err
    assert judged(BASE, open_weights(folder))[0] == SAME_BIRTH


# ---- what is said ------------------------------------------------------------------------------------------


def test_folded_scales_are_no_distance():
    """A norm's gains, folded into the matrices that read it, change no function, and no distance."""
    config = replace(CONFIG, d_ff=192)
    base = weights_of(noised(newborn_source(config, 1), 0))
    gains = (1.5 * torch.randn(64, generator=torch.Generator().manual_seed(0))).exp()
    folded = dict(base)
    for name, weight in base.items():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            folded[name] = weight * gains
    answer, sentence = judged(base, folded)
    assert answer == SAME_BIRTH and "at distance" not in sentence, sentence


def test_a_draft_with_a_vocabulary_of_its_own(tmp_path):
    draft = weights_of(noised(newborn_source(ModelConfig(300, 64, 1, 4, 64, 96, num_kv_heads=2), 5), 0))
    draft = {name: weight for name, weight in draft.items() if "embed" not in name}
    draft["lm_head.weight"] = draft["lm_head.weight"][:150]
    raw = RAW | {"vocab_size": 300, "draft_vocab_size": 150, "num_hidden_layers": 1}
    answer, sentence = judged(BASE, folder_with(tmp_path / "draft", draft, raw))
    assert "tokens are here" not in sentence and "the base's embedding" not in sentence, sentence
    assert answer != SAME_BIRTH


def test_sparse_files_are_named(tmp_path):
    weights = weights_of(BASE)
    sparse = {name: weight for name, weight in weights.items() if "_proj" not in name}
    for name in weights.keys() - sparse.keys():
        sparse[f"{name}.compressed"] = weights[name].flatten()[::2].clone()
        sparse[f"{name}.bitmask"] = torch.zeros(len(weights[name]), 8, dtype=torch.uint8)
    folder = folder_with(tmp_path / "sparse", sparse)
    with pytest.raises(UserError, match="sparse numbers without their zeros: .*run_compressed=False"):
        judged(BASE, folder)
    (tmp_path / "bin").mkdir()
    content = {name: weight.to_sparse() if weight.ndim > 1 else weight for name, weight in weights.items()}
    torch.save(content, tmp_path / "bin" / "pytorch_model.bin")
    with pytest.raises(UserError, match="is a sparse tensor: save what its to_dense"):
        open_weights(tmp_path / "bin")


def test_a_verdict_can_be_filed(tmp_path):
    """compare.json names files, sizes, and the SHA-256 of what was read; --status tells the verdict."""
    folder_with(tmp_path / "base", weights_of(BASE))
    folder_with(tmp_path / "child", weights_of(noised(BASE, 0.3)))
    folder_with(tmp_path / "other", weights_of(STRANGER))
    for suspect, status in (("child", 10), ("other", 12)):
        words = ("seedprint.py", "compare", tmp_path / "base", tmp_path / suspect, "--out", tmp_path / "out")
        assert run_script(*words).returncode == 0
        first = json.loads((tmp_path / "out" / "compare.json").read_text())
        assert run_script(*words, "--status").returncode == status
        again = json.loads((tmp_path / "out" / "compare.json").read_text())
        assert first["models"] == again["models"] and first["environment"]["version"]
        size = (tmp_path / "base" / "model.safetensors").stat().st_size
        assert first["models"][0]["files"] == {"model.safetensors": size}
        assert 0 < first["models"][0]["bytes_read"] and len(first["models"][0]["sha256"]) == 64


def test_one_expert_count_is_not_another(tmp_path):
    """A mixture beside a model without experts is compared by what both have."""
    assert judged(mixture(1), as_source(weights_of(deep(2)), DEEP))[0] in (NO_EVIDENCE, INCONCLUSIVE)
