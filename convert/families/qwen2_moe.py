"""Qwen2-MoE (Yang et al. 2024) and Qwen1.5-MoE: biases on q, k and v; a shared expert with a gate.

Top-k weights are normalised only where `norm_topk_prob` says so; some layers may be dense.
"""

from __future__ import annotations

from ..architecture import Architecture
from ..config import Config
from ..format import ArchFlag, Role
from ..rope import resolve
from .base import (
    DECODER_NAMES,
    DENSE_NAMES,
    MLP_EXPERTS,
    QKV_BIAS_NAMES,
    Family,
    common_flags,
    dense_layers,
    refuse_other_activation,
    refuse_window,
)


def _flags(config: Config) -> ArchFlag:
    flags = ArchFlag.SHARED_EXPERT | ArchFlag.SHARED_GATED | common_flags(config)
    if config.boolean("qkv_bias", True):
        flags |= ArchFlag.QKV_BIAS
    return flags


def architecture(config: Config) -> Architecture:
    refuse_other_activation(config)
    n_layers = config.integer("num_hidden_layers", default=24)
    hidden = config.integer("hidden_size", default=2048)
    n_heads = config.integer("num_attention_heads", default=16)
    head_dim = config.integer("head_dim", default=hidden // n_heads)
    max_positions = config.integer("max_position_embeddings", default=32768)
    refuse_window(config, max_positions)
    dense = dense_layers(config, n_layers)
    dense_width = config.integer("intermediate_size", default=5632)
    return Architecture(
        n_layers=n_layers,
        hidden=hidden,
        vocabulary=config.integer("vocab_size", default=151936),
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", default=16),
        head_dim=head_dim,
        n_experts=config.integer("num_experts", "num_local_experts", default=60),
        top_k=config.integer("num_experts_per_tok", default=4),
        expert_width=config.integer("moe_intermediate_size", default=1408),
        shared_width=config.integer("shared_expert_intermediate_size", default=5632),
        dense_width=dense_width if dense else 0,
        dense_layers=dense,
        max_positions=max_positions,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=resolve(config, head_dim=head_dim, max_positions=max_positions, default_theta=1e4),
        flags=_flags(config),
    )


FAMILY = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    architecture=architecture,
    names={
        **DECODER_NAMES,
        **QKV_BIAS_NAMES,
        **DENSE_NAMES,
        Role.ROUTER: ("model.layers.{layer}.mlp.gate.weight",),
        Role.SHARED_GATE: ("model.layers.{layer}.mlp.shared_expert.gate_proj.weight",),
        Role.SHARED_UP: ("model.layers.{layer}.mlp.shared_expert.up_proj.weight",),
        Role.SHARED_DOWN: ("model.layers.{layer}.mlp.shared_expert.down_proj.weight",),
        Role.SHARED_EXPERT_GATE: ("model.layers.{layer}.mlp.shared_expert_gate.weight",),
    },
    experts=MLP_EXPERTS,
)
