"""Is every architecture judged rightly? Children and strangers by `transformers`' own classes, all tiny.

    PYTHONPATH=. python tests/architectures_sweep.py                          # all, ten minutes
    PYTHONPATH=. python tests/architectures_sweep.py GPT2LMHeadModel          # some

A copy, its bfloat16 cast, a child of 30 steps more, and a merge of 60 % of the base with 40 % of that child
are to be the `same birth`; a newborn, and a model of another seed that learnt the same text, `no evidence`.
Tables narrower than the stream clear no stranger: `inconclusive`. Of models with a part a copy and a noised
child are of the same birth, a newborn is not, nor is one that has that part of the base; if that part may be
the language model this is `inconclusive`.
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from kin import with_noise
from test_architectures import ARCHITECTURES, EXPERTS, GATED, PLAIN, SIZES, T5_SIZES, build

from lineage.compare import CompareSettings, Model, compare_models
from lineage.judge import INCONCLUSIVE, NO_EVIDENCE, SAME_BIRTH
from reproduce.disguise import as_source
from weights.contents import open_weights

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
    "MarianMTModel": ("MarianConfig", MARIAN, ("model.encoder.", "model.shared."), INCONCLUSIVE),
}
UNCLEARED = ("ElectraForMaskedLM", "AlbertForMaskedLM")  # whose tables are narrower than the stream
ALL = ARCHITECTURES | MORE
ALL["DeepseekV3ForCausalLM"][1]["head_dim"] = 16  # which its rotation is of
ALL["T5ForConditionalGeneration"][1]["decoder_start_token_id"] = 0


def trained(model, steps: int, start=0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = (1000 * torch.rand(8, 32, generator=generator) ** 2).long()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def family(name: str):
    """(kind, right verdict, model) of a trained base, its children, and two strangers."""
    base = trained(build(name, 1, ALL), 30)
    weights = {key: value.clone() for key, value in base.state_dict().items()}
    yield "base", SAME_BIRTH, base
    yield "copy", SAME_BIRTH, base
    yield "bfloat16", SAME_BIRTH, base.bfloat16()
    base.float().load_state_dict(weights)
    child = trained(base, 30, 30)
    yield "trained", SAME_BIRTH, child
    with torch.no_grad():
        for key, value in child.state_dict().items():
            if value.is_floating_point():
                value.mul_(0.4).add_(weights[key], alpha=0.6)
    yield "merged", SAME_BIRTH, child
    right = INCONCLUSIVE if name in UNCLEARED else NO_EVIDENCE
    yield "newborn", right, build(name, 2, ALL)
    yield "stranger", right, trained(build(name, 2, ALL), 30)


def with_parts(name: str):
    """(kind, right verdict, tensors) of a model with a part that reads no tokens."""
    begin, of_part = PARTS[name][2:]
    base, stranger = (build(name, seed, PARTS).state_dict() for seed in (1, 2))
    child = with_noise(base, 0.5)
    part = {name for name in base if name.startswith(begin)}
    yield "base", SAME_BIRTH, base
    yield "copy", SAME_BIRTH, base
    yield "noised", SAME_BIRTH, child
    yield "stranger", NO_EVIDENCE, stranger
    yield "frozen part", of_part, stranger | {name: base[name] for name in part}
    yield "part trained on", of_part, stranger | {name: child[name] for name in part}


def verdicts(name: str) -> dict[str, tuple[str, str, str]]:
    """By kind of relative the verdict that is right, and the one that was given, with its sentence."""
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, right, made in with_parts(name) if name in PARTS else family(name):
            if isinstance(made, dict):
                source = as_source(made, None)
            else:
                made.save_pretrained(Path(folder) / kind)
                source = open_weights(Path(folder) / kind, True)
            model = Model(kind, source)
            if kind == "base":
                base = model
                continue
            row, _ = compare_models(base, model, CompareSettings())
            answers[kind] = (right, row["verdict"], row["sentence"])
    return answers


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for architecture in sys.argv[1:] or [*ALL, *PARTS]:
        try:
            answers = verdicts(architecture)
        except Exception as error:  # of transformers' configurations, which change
            print(f"{architecture}: {type(error).__name__}: {error}", flush=True)
            continue
        wrong = {kind: answer for kind, answer in answers.items() if answer[0] != answer[1]}
        print(f"{architecture}: {len(answers) - len(wrong)} of {len(answers)}", flush=True)
        for kind, (_, given, sentence) in wrong.items():
            print(f"    {kind}: {given}: {sentence}", flush=True)
