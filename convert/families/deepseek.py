"""DeepSeekMoE (Dai et al. 2024), as in DeepSeek-MoE 16B: many narrow experts, shared ones, the first layers dense.

Shared experts are one network of n_shared_experts times the width of an expert, without a gate. One expert's weight
alone is never normalised: with a top-k of one `norm_topk_prob` changes nothing. The later generations (V2 and on) are
other families, with another attention.
"""

from __future__ import annotations

from ..architecture import Architecture
from ..config import Config
from ..errors import UnsupportedModel
from ..format import ArchFlag, Role
from ..rope import resolve
from .base import (
    DECODER_NAMES,
    DENSE_NAMES,
    MLP_EXPERTS,
    O_BIAS_NAMES,
    QKV_BIAS_NAMES,
    Family,
    refuse_other_activation,
    refuse_window,
)


def _dense_layers(config: Config, n_layers: int) -> frozenset[int]:
    """The first `first_k_dense_replace`, and those whose number is no multiple of `moe_layer_freq`."""
    first = config.integer("first_k_dense_replace", default=0, low=0)
    frequency = config.integer("moe_layer_freq", default=1)
    dense = frozenset(layer for layer in range(n_layers) if layer < first or layer % frequency)
    if len(dense) == n_layers:
        raise UnsupportedModel("leaves no layer with experts", where="config.json: first_k_dense_replace")
    return dense


def _refuse_other_routers(config: Config) -> None:
    """Keys that later generations give a meaning and that change the routing weights."""
    scoring = config.get("scoring_func") or "softmax"
    if scoring != "softmax":
        raise UnsupportedModel(f"is {scoring!r}; this family routes by softmax", where="config.json: scoring_func")
    if config.number("routed_scaling_factor", 1.0) != 1.0:
        raise UnsupportedModel("scales routing weights", where="config.json: routed_scaling_factor")


def _flags(config: Config, top_k: int, n_shared: int) -> ArchFlag:
    flags = ArchFlag(0)
    if config.boolean("norm_topk_prob", False) and top_k > 1:
        flags |= ArchFlag.NORM_TOPK
    if config.boolean("tie_word_embeddings", False):
        flags |= ArchFlag.TIED
    if config.boolean("attention_bias", False):
        flags |= ArchFlag.QKV_BIAS | ArchFlag.O_BIAS
    if n_shared:
        flags |= ArchFlag.SHARED_EXPERT
    return flags


def architecture(config: Config) -> Architecture:
    refuse_other_activation(config)
    _refuse_other_routers(config)
    n_layers = config.integer("num_hidden_layers", default=28)
    hidden = config.integer("hidden_size", default=2048)
    n_heads = config.integer("num_attention_heads", default=16)
    head_dim = config.integer("head_dim", default=hidden // n_heads)
    max_positions = config.integer("max_position_embeddings", default=4096)
    refuse_window(config, max_positions)
    dense = _dense_layers(config, n_layers)
    dense_width = config.integer("intermediate_size", default=10944)
    top_k = config.integer("num_experts_per_tok", default=6)
    expert_width = config.integer("moe_intermediate_size", default=1408)
    n_shared = config.integer("n_shared_experts", default=0, low=0)
    return Architecture(
        n_layers=n_layers,
        hidden=hidden,
        vocabulary=config.integer("vocab_size", default=102400),
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", default=n_heads),
        head_dim=head_dim,
        n_experts=config.integer("n_routed_experts"),
        top_k=top_k,
        expert_width=expert_width,
        shared_width=n_shared * expert_width,
        dense_width=dense_width if dense else 0,
        dense_layers=dense,
        max_positions=max_positions,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=resolve(config, head_dim=head_dim, max_positions=max_positions, default_theta=1e4),
        flags=_flags(config, top_k, n_shared),
    )


FAMILY = Family(
    name="deepseek",
    model_types=("deepseek",),
    architecture=architecture,
    names={
        **DECODER_NAMES,
        **QKV_BIAS_NAMES,
        **O_BIAS_NAMES,
        **DENSE_NAMES,
        Role.ROUTER: ("model.layers.{layer}.mlp.gate.weight",),
        Role.SHARED_GATE: ("model.layers.{layer}.mlp.shared_experts.gate_proj.weight",),
        Role.SHARED_UP: ("model.layers.{layer}.mlp.shared_experts.up_proj.weight",),
        Role.SHARED_DOWN: ("model.layers.{layer}.mlp.shared_experts.down_proj.weight",),
    },
    experts=MLP_EXPERTS,
)
