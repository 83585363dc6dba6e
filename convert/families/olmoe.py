"""OLMoE (Muennighoff et al. 2024): q and k normed over their whole width, q, k and v clamped where `clip_qkv` says so.

Top-k weights are normalised only where `norm_topk_prob` says so. `intermediate_size` is the width of an expert.
"""

from __future__ import annotations

from ..architecture import Architecture
from ..config import Config
from ..format import ArchFlag, Role
from ..rope import resolve
from .base import (
    DECODER_NAMES,
    MLP_EXPERTS,
    O_BIAS_NAMES,
    QK_NORM_NAMES,
    QKV_BIAS_NAMES,
    Family,
    common_flags,
    refuse_other_activation,
    refuse_window,
)


def _flags(config: Config) -> ArchFlag:
    flags = ArchFlag.QK_NORM_WHOLE | common_flags(config)
    if config.boolean("attention_bias", False):
        flags |= ArchFlag.QKV_BIAS | ArchFlag.O_BIAS
    if config.get("clip_qkv") is not None:
        flags |= ArchFlag.QKV_CLIP
    return flags


def architecture(config: Config) -> Architecture:
    refuse_other_activation(config)
    hidden = config.integer("hidden_size", default=2048)
    n_heads = config.integer("num_attention_heads", default=16)
    head_dim = config.integer("head_dim", default=hidden // n_heads)
    max_positions = config.integer("max_position_embeddings", default=4096)
    refuse_window(config, max_positions)
    flags = _flags(config)
    return Architecture(
        n_layers=config.integer("num_hidden_layers", default=16),
        hidden=hidden,
        vocabulary=config.integer("vocab_size", default=50304),
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", default=n_heads),
        head_dim=head_dim,
        n_experts=config.integer("num_experts", "num_local_experts", default=64),
        top_k=config.integer("num_experts_per_tok", default=8),
        expert_width=config.integer("intermediate_size", default=2048),
        max_positions=max_positions,
        rms_eps=config.number("rms_norm_eps", 1e-5),
        rope=resolve(config, head_dim=head_dim, max_positions=max_positions, default_theta=1e4),
        qkv_clip=config.number("clip_qkv") if ArchFlag.QKV_CLIP in flags else 0.0,
        flags=flags,
    )


FAMILY = Family(
    name="olmoe",
    model_types=("olmoe",),
    architecture=architecture,
    names={
        **DECODER_NAMES,
        **QK_NORM_NAMES,
        **QKV_BIAS_NAMES,
        **O_BIAS_NAMES,
        Role.ROUTER: ("model.layers.{layer}.mlp.gate.weight",),
    },
    experts=MLP_EXPERTS,
)
