"""Does `compare` judge any architecture? `transformers`' own classes, three layers of width 128."""

import pytest
import safetensors.torch
import torch
import transformers
from kin import row_by_both

from lineage import layout
from lineage.names import WRITERS, is_called
from weights.contents import open_weights

SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
PLAIN = SIZES | {"intermediate_size": 256}
GATED = PLAIN | {"num_key_value_heads": 2, "head_dim": 32}
EXPERTS = GATED | {"moe_intermediate_size": 96, "num_experts_per_tok": 2, "num_experts": 3}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "v_head_dim": 32}
LATENT |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
DEEPSEEK = {"n_routed_experts": 3, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
T5_SIZES = {"d_model": 128, "d_ff": 256, "num_layers": 3, "num_heads": 4, "d_kv": 32, "vocab_size": 1000}
ARCHITECTURES = {  # class: its configuration's, the arguments, and how many MLPs its folders have
    "GPT2LMHeadModel": ("GPT2Config", SIZES, 3),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", PLAIN, 3),
    "OPTForCausalLM": ("OPTConfig", SIZES | {"ffn_dim": 256, "word_embed_proj_dim": 128}, 3),
    "BloomForCausalLM": ("BloomConfig", SIZES, 3),
    "FalconForCausalLM": ("FalconConfig", SIZES, 3),
    "GemmaForCausalLM": ("GemmaConfig", GATED, 3),
    "Gemma2ForCausalLM": ("Gemma2Config", GATED, 3),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GATED, 3),
    "Phi3ForCausalLM": ("Phi3Config", GATED, 3),
    "Olmo2ForCausalLM": ("Olmo2Config", GATED, 3),
    "MixtralForCausalLM": ("MixtralConfig", GATED | {"num_local_experts": 3}, 9),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 128}, 12),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", EXPERTS, 9),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", EXPERTS | LATENT | DEEPSEEK, 9),
    "MambaForCausalLM": ("MambaConfig", SIZES, 3),
    "BertForMaskedLM": ("BertConfig", PLAIN, 3),
    "T5ForConditionalGeneration": ("T5Config", T5_SIZES, 6),
    "MistralForCausalLM": ("MistralConfig", GATED, 3),
    "Qwen3ForCausalLM": ("Qwen3Config", GATED, 3),
}


SISTERS = "Bloom Gemma Gemma3 Mistral Qwen3 Qwen3Moe".split()  # stored as others are: in the sweep alone
HERE = [name for name in ARCHITECTURES if name.removesuffix("ForCausalLM") not in SISTERS]


def build(name: str, seed: int, choices=ARCHITECTURES) -> transformers.PreTrainedModel:
    config, arguments, *_ = choices[name]
    torch.manual_seed(seed)
    return getattr(transformers, name)(getattr(transformers, config)(**arguments))


@pytest.mark.parametrize("name", HERE)
def test_kin_and_strangers(name, tmp_path):
    base = build(name, 1)
    base.save_pretrained(tmp_path / "base")
    build(name, 2).save_pretrained(tmp_path / "stranger")
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.ndim > 1:  # noise of one standard deviation
                parameter += parameter.std() * torch.randn_like(parameter)
    base.save_pretrained(tmp_path / "kin")
    source = open_weights(tmp_path / "base", True)
    layers = [layer for stack in layout.find_stacks(source) for layer in stack.layers]
    assert sum(len(layer.mlps) for layer in layers) == ARCHITECTURES[name][2]
    kin, stranger = (row_by_both(source, open_weights(tmp_path / name, True)) for name in ("kin", "stranger"))
    assert kin["verdict"] == "same birth" and kin["body_z"] >= 30 and kin["units_share"] >= 0.95
    assert stranger["verdict"] == "no evidence" and abs(stranger["body_z"]) < 4
    assert stranger["units_found"] <= 8


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Olmo2ForCausalLM", "MixtralForCausalLM"])
def test_a_shuffled_mlp_with_gains_is_found(name, tmp_path):
    """Gains of every kind are drawn, and coordinates permuted with all that goes along them."""
    base = build(name, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    base.save_pretrained(tmp_path / "base")
    source = open_weights(tmp_path / "base", True)
    order = torch.randperm(128, generator=generator)
    tensors = {}
    for key, shape in source.shapes.items():
        weight = source.read(key)
        if is_called(key, WRITERS) and shape[0] == 128:
            weight = weight[order]
        elif shape[-1] == 128 and not key.endswith(("q_norm.weight", "k_norm.weight")):
            weight = weight[..., order]
        if "down_proj" in key or ".w2." in key:
            weight = weight.flip(1)  # the neurons the other way round
        elif "gate_up_proj" in key:
            weight = torch.cat([half.flip(0) for half in weight.chunk(2)])
        elif "gate_proj" in key or "up_proj" in key or ".w1." in key or ".w3." in key:
            weight = weight.flip(0)
        tensors[key] = weight.contiguous()
    base.config.save_pretrained(tmp_path / "child")
    safetensors.torch.save_file(tensors, tmp_path / "child" / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        models = [getattr(transformers, name).from_pretrained(tmp_path / kind) for kind in ("base", "child")]
        logits = [model(tokens).logits for model in models]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)  # float32 sums in another order
    child = row_by_both(source, open_weights(tmp_path / "child", True))
    assert child["units_share"] == 1


def test_children_and_strangers_of_the_sweep():
    from architectures_sweep import verdicts  # which reads this file

    for kind, (right, given, sentence) in verdicts("AlbertForMaskedLM").items():
        assert given == right, (kind, sentence)
