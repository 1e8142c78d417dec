"""Small random checkpoints in DeepSeek format, made by transformers' own classes (the oracle)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}
_V3: dict[str, Any] = {"num_nextn_predict_layers": 0, "n_group": 4, "topk_group": 2}

# name -> (family, overrides of _BASE)
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {**_V3, "q_lora_rank": 24, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "v3_yarn_plain_query": (
        "v3",
        {**_V3, "rope_parameters": {**_YARN, "mscale": 1.0}, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "v3_one_group_tied": (
        "v3",
        {**_V3, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True, "q_lora_rank": 16, "num_hidden_layers": 4,
         "first_k_dense_replace": 2},
    ),
    "v2_greedy": ("v2", {"topk_method": "greedy", "n_shared_experts": 2, "first_k_dense_replace": 0}),
    "v2_group_limited_yarn": (
        "v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 24,
         "routed_scaling_factor": 16.0, "rope_parameters": _YARN},
    ),
    "v3_all_dense": ("v3", {**_V3, "first_k_dense_replace": 3, "q_lora_rank": 24}),
    "v3_wide": (  # large enough for packed products, grouped experts and attention that is not folded
        "v3",
        {**_V3, "q_lora_rank": 96, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
         "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
         "v_head_dim": 64, "vocab_size": 1200, "n_routed_experts": 12},
    ),
}


def make_oracle(name: str) -> PreTrainedModel:
    """The named random model in float32, with eager attention and router biases that matter."""
    family, overrides = CONFIGURATIONS[name]
    values = {**_BASE, **overrides}
    config_class, model_class = {
        "v2": (DeepseekV2Config, DeepseekV2ForCausalLM), "v3": (DeepseekV3Config, DeepseekV3ForCausalLM)
    }[family]
    torch.manual_seed(hash_name(name))
    config = config_class(**values, attn_implementation="eager")
    model = model_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in key:
                value.copy_(torch.randn_like(value) * 0.05)
            elif "norm" in key:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif key.endswith("weight") or "proj" in key:
                value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5)
    return model


def hash_name(name: str) -> int:
    return sum(ord(c) for c in name)


def save(model: PreTrainedModel, folder: Path, *, sharded: bool = False) -> Path:
    """Write `model` as a checkpoint; sharded into many small files on request."""
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "5GB")
    return folder
