"""Is every architecture judged rightly? Children and strangers by `transformers`' own classes, all tiny.

    PYTHONPATH=. python tests/architectures_sweep.py                          # all, ten minutes
    PYTHONPATH=. python tests/architectures_sweep.py GPT2LMHeadModel          # some

A copy, its bfloat16 cast, a child of 30 steps more, and a merge of 60 % of the base with 40 % of that child
are to be the `same birth`; a newborn, and a model of another seed that learnt the same text, `no evidence`.
Tables narrower than the stream clear no stranger: `inconclusive`. Of models with a part a copy and a noised
child are of the same birth, a newborn is not, nor is one that has that part of the base; if that part may be
the language model this is `inconclusive`. Of models whose tensors are renamed a copy, a noised child and a
newborn are compared with the base.
"""

import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch
import transformers
from test_architectures import ARCHITECTURES, EXPERTS, GATED, PLAIN, SIZES, T5_SIZES, build

from lineage.compare import CompareSettings, Model, compare_models
from lineage.judge import INCONCLUSIVE, NO_EVIDENCE, SAME_BIRTH
from strangers import formats

FEW = CompareSettings()
NARROW = PLAIN | {"embedding_size": 64}
MAMBA2 = SIZES | {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16}
NEO = SIZES | {"num_layers": 3, "num_heads": 4, "attention_types": [[["global"], 3]]}
BART = T5_SIZES | {"encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 0}
JAMBA = GATED | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
LFM2 = GATED | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
MORE = {  # class: its configuration's, and the arguments
    "ElectraForMaskedLM": ("ElectraConfig", NARROW),
    "AlbertForMaskedLM": ("AlbertConfig", NARROW),
    "Mamba2ForCausalLM": ("Mamba2Config", MAMBA2),
    "GPTJForCausalLM": ("GPTJConfig", SIZES | {"rotary_dim": 16}),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", SIZES),
    "GPTNeoForCausalLM": ("GPTNeoConfig", NEO),
    "StableLmForCausalLM": ("StableLmConfig", GATED),
    "PhiForCausalLM": ("PhiConfig", PLAIN),
    "GraniteForCausalLM": ("GraniteConfig", GATED),
    "MptForCausalLM": ("MptConfig", {"d_model": 128, "n_layers": 3, "n_heads": 4, "vocab_size": 1000}),
    "CodeGenForCausalLM": ("CodeGenConfig", SIZES | {"rotary_dim": 16}),
    "NemotronForCausalLM": ("NemotronConfig", GATED),
    "OlmoForCausalLM": ("OlmoConfig", GATED),
    "OlmoeForCausalLM": ("OlmoeConfig", GATED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "PersimmonForCausalLM": ("PersimmonConfig", PLAIN),
    "Glm4ForCausalLM": ("Glm4Config", GATED),
    "SmolLM3ForCausalLM": ("SmolLM3Config", GATED),
    "ModernBertForMaskedLM": ("ModernBertConfig", PLAIN),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", PLAIN),
    "BartForConditionalGeneration": ("BartConfig", BART),
    "RwkvForCausalLM": ("RwkvConfig", SIZES | {"attention_hidden_size": 128, "context_length": 64}),
    "FalconMambaForCausalLM": ("FalconMambaConfig", SIZES),
    "Lfm2ForCausalLM": ("Lfm2Config", LFM2),
    "JambaForCausalLM": ("JambaConfig", JAMBA),
}
MOE = EXPERTS | {"num_local_experts": 4, "shared_intermediate_size": 160}
MORE["GraniteMoeSharedForCausalLM"] = ("GraniteMoeSharedConfig", MOE)
HYBRID = {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 32}
HYBRID |= {"mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
MORE["GraniteMoeHybridForCausalLM"] = ("GraniteMoeHybridConfig", MOE | HYBRID)
MORE["XLMWithLMHeadModel"] = ("XLMConfig", {"emb_dim": 128, "n_layers": 3, "n_heads": 4, "vocab_size": 1000})
VISION = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION |= {"image_size": 32, "patch_size": 8}
TEXT = PLAIN | {"max_position_embeddings": 64}
WHISPER = {"d_model": 128, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 256}
WHISPER |= {"decoder_ffn_dim": 256, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
WHISPER |= {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
WHISPER |= {"decoder_start_token_id": 0, "suppress_tokens": None, "begin_suppress_tokens": None}
LLAVA = {"vision_config": VISION | {"model_type": "clip_vision_model"}, "image_token_index": 9}
LLAVA |= {"text_config": GATED | {"model_type": "llama"}}
MARIAN = BART | {"vocab_size": 1000}
CLIP = {"text_config": TEXT, "vision_config": VISION}
PARTS = {  # class: its configuration's, the arguments, what begins the names of its part, what it alone says
    "LlavaForConditionalGeneration": ("LlavaConfig", LLAVA, "model.vision_tower.", NO_EVIDENCE),
    "CLIPModel": ("CLIPConfig", CLIP, "vision_model.", NO_EVIDENCE),
    "WhisperForConditionalGeneration": ("WhisperConfig", WHISPER, "model.encoder.", NO_EVIDENCE),
    "MarianMTModel": (
        "MarianConfig",
        BART | {"vocab_size": 1000},
        ("model.encoder.", "model.shared."),
        INCONCLUSIVE,
    ),
}
UNCLEARED = ("ElectraForMaskedLM", "AlbertForMaskedLM")  # whose tables are narrower than the stream
RENAMED = {  # what is to be what in the names of a LLaMA
    "resblocks": {"model.layers": "transformer.resblocks", "model.embed_tokens": "token_embedding"},
    "sequential": {"model.layers": "sequential", "model.embed_tokens": "sequential.90.word_embeddings"},
    "cells": {"model.layers": "cells", "model.embed_tokens": "w", "model.norm": "n"},
}
ALL = ARCHITECTURES | MORE
ALL["DeepseekV3ForCausalLM"][1]["head_dim"] = 16  # which its rotation is of
ALL["T5ForConditionalGeneration"][1]["decoder_start_token_id"] = 0


def trained(model, steps: int, start=0):
    """The model after so many steps, each on eight new sequences of 32 tokens of one biased text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = (1000 * torch.rand(8, 32, generator=generator) ** 2).long()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def family(name: str):
    """(kind, model) of a trained base, its children, and two strangers."""
    base = trained(build(name, 1, ALL), 30)
    weights = {key: value.clone() for key, value in base.state_dict().items()}
    yield "base", base
    yield "copy", base
    yield "bfloat16", base.bfloat16()
    base.float().load_state_dict(weights)
    child = trained(base, 30, 30)
    yield "trained", child
    with torch.no_grad():
        for key, value in child.state_dict().items():
            if value.is_floating_point():
                value.mul_(0.4).add_(weights[key], alpha=0.6)
    yield "merged", child
    yield "newborn", build(name, 2, ALL)
    yield "stranger", trained(build(name, 2, ALL), 30)


def noised(weights: dict, size=0.5) -> dict:
    """Tensors with noise of half of each matrix's standard deviation."""
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}
    return {n: w + size * w.std() * noise[n] if w.ndim > 1 else w for n, w in weights.items()}


def of_tensors(kinds: dict, folder: Path) -> dict[str, tuple[str, str, str]]:
    """The same of files of tensors: `kinds` has (tensors, right verdict) of the base and of each suspect."""
    models = {}
    for kind, (tensors, _) in kinds.items():
        tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        safetensors.torch.save_file(tensors, folder / f"{kind}.safetensors")
        models[kind] = Model(kind, formats.open_checkpoint(folder / f"{kind}.safetensors", True))
    base = models.pop("base")
    rows = {kind: compare_models(base, model, FEW)[0] for kind, model in models.items()}
    return {kind: (kinds[kind][1], row["verdict"], row["sentence"]) for kind, row in rows.items()}


def with_parts(name: str, folder: Path):
    """The verdicts on a model with a part that reads no tokens."""
    base, stranger = (build(name, seed, PARTS).state_dict() for seed in (1, 2))
    frozen = {key: base[key] if key.startswith(PARTS[name][2]) else stranger[key] for key in base}
    kinds = {"base": (base, ""), "copy": (base, SAME_BIRTH), "noised": (noised(base), SAME_BIRTH)}
    kinds |= {"stranger": (stranger, NO_EVIDENCE), "frozen part": (frozen, PARTS[name][3])}
    trained = {key: noised(base)[key] if key.startswith(PARTS[name][2]) else stranger[key] for key in base}
    return of_tensors(kinds | {"part trained on": (trained, PARTS[name][3])}, folder)


def renamed(name: str, folder: Path):
    """The verdicts on LLaMAs whose tensors are called otherwise, beside one of usual names."""
    base, stranger = (build("Qwen3ForCausalLM", seed).state_dict() for seed in (1, 2))
    kinds = {"base": (base, "")}
    for kind, weights in (("copy", base), ("noised", noised(base)), ("stranger", stranger)):
        for old, new in RENAMED[name].items():
            weights = {key.replace(old, new): weight for key, weight in weights.items()}
        kinds[kind] = (weights, NO_EVIDENCE if kind == "stranger" else SAME_BIRTH)
    return of_tensors(kinds, folder)


def verdicts(name: str) -> dict[str, tuple[str, str, str]]:
    """By kind of relative the verdict that is right, and the one that was given, with its sentence."""
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        if name in PARTS:
            return with_parts(name, Path(folder))
        if name in RENAMED:
            return renamed(name, Path(folder))
        for kind, model in family(name):
            model.save_pretrained(Path(folder) / kind)
            read = Model(kind, formats.open_checkpoint(Path(folder) / kind, True))
            if kind == "base":
                base = read
                continue
            row, _ = compare_models(base, read, FEW)
            right = SAME_BIRTH
            if kind in ("newborn", "stranger"):
                right = INCONCLUSIVE if name in UNCLEARED else NO_EVIDENCE
            answers[kind] = (right, row["verdict"], row["sentence"])
    return answers


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for architecture in sys.argv[1:] or [*ALL, *PARTS, *RENAMED]:
        try:
            answers = verdicts(architecture)
        except Exception as error:  # of transformers' configurations, which change
            print(f"{architecture}: {type(error).__name__}: {error}", flush=True)
            continue
        wrong = {kind: answer for kind, answer in answers.items() if answer[0] != answer[1]}
        print(f"{architecture}: {len(answers) - len(wrong)} of {len(answers)}", flush=True)
        for kind, (_, given, sentence) in wrong.items():
            print(f"    {kind}: {given}: {sentence}", flush=True)
