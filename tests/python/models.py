# SPDX-License-Identifier: Apache-2.0
"""Tiny random-weight models of each family, for the tests."""
import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 512, 128, 64, 8, 2
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2,
           "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
           "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_ROUTED = {"moe_intermediate_size": INTERMEDIATE, "num_experts_per_tok": TOPK}
_ONE_DENSE = {"intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS,
              "first_k_dense_replace": 1}

FAMILIES = {
    "Qwen3Moe": {**_COMMON, **_HEADS, **_ROUTED, "num_experts": EXPERTS},
    "GptOss": {**_COMMON, **_HEADS, "intermediate_size": INTERMEDIATE,
               "num_local_experts": EXPERTS, "num_experts_per_tok": TOPK,
               "layer_types": ["full_attention"] * 2},
    "Glm4Moe": {**_COMMON, **_HEADS, **_ROUTED, **_ONE_DENSE},
    "GlmMoeDsa": {**_COMMON, **_LATENT, **_ROUTED, **_ONE_DENSE, "index_topk": 8,
                  "index_head_dim": 32, "index_n_heads": 2},
    "DeepseekV3": {**_COMMON, **_LATENT, **_ROUTED, **_ONE_DENSE, "n_group": 2, "topk_group": 1},
    "DeepseekV4": {**_COMMON, **_ROUTED, "n_routed_experts": EXPERTS, "num_attention_heads": 4,
                   "q_lora_rank": 32, "o_lora_rank": 32},
    "MiniMaxM2": {**_COMMON, **_HEADS, "intermediate_size": INTERMEDIATE,
                  "num_local_experts": EXPERTS, "num_experts_per_tok": TOPK},
    "Mixtral": {**_COMMON, **_HEADS, "intermediate_size": INTERMEDIATE,
                "num_local_experts": EXPERTS, "num_experts_per_tok": TOPK},
}
UNGATED = ("NemotronH", {**_COMMON, "num_attention_heads": 4, "num_key_value_heads": 2})


def build(family, dtype=torch.bfloat16, **changes):
    """A model whose experts are as large a part of each layer's output as attention is."""
    torch.manual_seed(0)
    known = {**FAMILIES, **dict([UNGATED])}
    config = getattr(transformers, f"{family}Config")(**{**known[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(std=parameter.shape[-1] ** -.5 if "bias" not in name else .1)
    return model


def token_ids(batch=2, length=24):
    return torch.randint(2, VOCABULARY, (batch, length),
                         generator=torch.Generator().manual_seed(1))
