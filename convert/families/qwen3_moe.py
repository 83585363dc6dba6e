"""Qwen3-MoE (Yang et al. 2025): q and k normed per head, explicit head_dim, some layers may be dense.

Top-k weights are normalised where `norm_topk_prob` says so; where it is absent they are not, as in the reference.
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
    O_BIAS_NAMES,
    QK_NORM_NAMES,
    QKV_BIAS_NAMES,
    Family,
    common_flags,
    dense_layers,
    refuse_other_activation,
    refuse_window,
)


def _flags(config: Config) -> ArchFlag:
    flags = ArchFlag.QK_NORM_HEAD | common_flags(config)
    if config.boolean("attention_bias", False):
        flags |= ArchFlag.QKV_BIAS | ArchFlag.O_BIAS
    return flags


def architecture(config: Config) -> Architecture:
    refuse_other_activation(config)
    n_layers = config.integer("num_hidden_layers", default=24)
    hidden = config.integer("hidden_size", default=2048)
    n_heads = config.integer("num_attention_heads", default=32)
    head_dim = config.integer("head_dim", default=hidden // n_heads)
    max_positions = config.integer("max_position_embeddings", default=32768)
    refuse_window(config, max_positions)
    dense = dense_layers(config, n_layers)
    dense_width = config.integer("intermediate_size", default=6144)
    return Architecture(
        n_layers=n_layers,
        hidden=hidden,
        vocabulary=config.integer("vocab_size", default=151936),
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", default=4),
        head_dim=head_dim,
        n_experts=config.integer("num_experts", "num_local_experts", default=128),
        top_k=config.integer("num_experts_per_tok", default=8),
        expert_width=config.integer("moe_intermediate_size", default=768),
        dense_width=dense_width if dense else 0,
        dense_layers=dense,
        max_positions=max_positions,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=resolve(config, head_dim=head_dim, max_positions=max_positions, default_theta=1e4),
        flags=_flags(config),
    )


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architecture=architecture,
    names={
        **DECODER_NAMES,
        **QK_NORM_NAMES,
        **QKV_BIAS_NAMES,
        **O_BIAS_NAMES,
        **DENSE_NAMES,
        Role.ROUTER: ("model.layers.{layer}.mlp.gate.weight",),
    },
    experts=MLP_EXPERTS,
)
