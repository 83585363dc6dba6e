"""The configuration of an OLMoE that is random and tiny; llama.cpp knows the architecture."""

from __future__ import annotations

from typing import Any

TINY_OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "hidden_size": 64,
    "vocab_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "norm_topk_prob": False,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
