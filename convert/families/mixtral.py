"""Mixtral (Jiang et al. 2024): grouped-query attention, softmax router whose top-k weights always sum to one.

The reference normalises whatever `norm_topk_prob` says, so it is not read as a choice here. Experts come as w1 (gate),
w3 (up), w2 (down) under `block_sparse_moe`, or fused under `mlp` where transformers 5 saved its own layout.
"""

from __future__ import annotations

from ..architecture import Architecture
from ..config import Config
from ..format import ArchFlag, Role
from ..rope import resolve
from .base import DECODER_NAMES, ExpertNames, Family, refuse_other_activation, refuse_window


def architecture(config: Config) -> Architecture:
    refuse_other_activation(config)
    hidden = config.integer("hidden_size", default=4096)
    n_heads = config.integer("num_attention_heads", default=32)
    head_dim = config.integer("head_dim", default=hidden // n_heads)
    max_positions = config.integer("max_position_embeddings", default=131072)
    refuse_window(config, max_positions, always=True)
    config.boolean("norm_topk_prob", True)
    flags = ArchFlag.NORM_TOPK
    if config.boolean("tie_word_embeddings", False):
        flags |= ArchFlag.TIED
    return Architecture(
        n_layers=config.integer("num_hidden_layers", default=32),
        hidden=hidden,
        vocabulary=config.integer("vocab_size", default=32000),
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", default=8),
        head_dim=head_dim,
        n_experts=config.integer("num_local_experts", "num_experts", default=8),
        top_k=config.integer("num_experts_per_tok", default=2),
        expert_width=config.integer("intermediate_size", default=14336),
        max_positions=max_positions,
        rms_eps=config.number("rms_norm_eps", 1e-5),
        rope=resolve(config, head_dim=head_dim, max_positions=max_positions, default_theta=1e6),
        flags=flags,
    )


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    architecture=architecture,
    names={
        **DECODER_NAMES,
        Role.ROUTER: (
            "model.layers.{layer}.block_sparse_moe.gate.weight",
            "model.layers.{layer}.mlp.gate.weight",
        ),
    },
    experts=(
        ExpertNames(
            gate="model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
            up="model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
            down="model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
        ),
        ExpertNames(
            gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
            down="model.layers.{layer}.mlp.experts.down_proj",
        ),
        ExpertNames(
            gate="model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
            up="model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
            down="model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
        ),
    ),
)
