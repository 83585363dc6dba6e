"""Qwen3-MoE (Yang et al. 2025): q and k normed per head, explicit head_dim, some layers may be dense.

Top-k weights are normalised where `norm_topk_prob` says so; where it is absent they are not, as in the reference.
"""

from __future__ import annotations

from ..architecture import Architecture
from ..config import Config
from ..errors import UnsupportedModel
from ..format import ArchFlag, Role
from ..rope import resolve
from .base import DECODER_NAMES, ExpertNames, Family, refuse_other_activation, refuse_window


def dense_layers(config: Config, n_layers: int) -> frozenset[int]:
    """Layers without experts: those listed, and those that decoder_sparse_step leaves out."""
    listed = config.integers("mlp_only_layers")
    step = config.integer("decoder_sparse_step", default=1)
    dense = frozenset(layer for layer in range(n_layers) if layer in listed or (layer + 1) % step)
    if len(dense) == n_layers:
        raise UnsupportedModel("leaves no layer with experts", where="config.json: mlp_only_layers")
    return dense


def _flags(config: Config) -> ArchFlag:
    flags = ArchFlag.QK_NORM_HEAD
    if config.boolean("norm_topk_prob", False):
        flags |= ArchFlag.NORM_TOPK
    if config.boolean("tie_word_embeddings", False):
        flags |= ArchFlag.TIED
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
    window = config.integer("sliding_window", default=4096)
    refuse_window(config, window if config.boolean("use_sliding_window", False) else None, max_positions)
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
        Role.Q_NORM: ("model.layers.{layer}.self_attn.q_norm.weight",),
        Role.K_NORM: ("model.layers.{layer}.self_attn.k_norm.weight",),
        Role.Q_BIAS: ("model.layers.{layer}.self_attn.q_proj.bias",),
        Role.K_BIAS: ("model.layers.{layer}.self_attn.k_proj.bias",),
        Role.V_BIAS: ("model.layers.{layer}.self_attn.v_proj.bias",),
        Role.O_BIAS: ("model.layers.{layer}.self_attn.o_proj.bias",),
        Role.ROUTER: ("model.layers.{layer}.mlp.gate.weight",),
        Role.DENSE_GATE: ("model.layers.{layer}.mlp.gate_proj.weight",),
        Role.DENSE_UP: ("model.layers.{layer}.mlp.up_proj.weight",),
        Role.DENSE_DOWN: ("model.layers.{layer}.mlp.down_proj.weight",),
    },
    experts=(
        ExpertNames(
            gate="model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
            up="model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
            down="model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
        ),
        ExpertNames(
            gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
            down="model.layers.{layer}.mlp.experts.down_proj",
        ),
    ),
)
