"""What a family is: a description from which one converter and one forward pass do everything.

A family says how its configuration becomes an Architecture and what its tensors are called. Where checkpoints of one
family come with different names, the candidates stand in order; exactly one of them may be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..architecture import Architecture
from ..config import Config
from ..errors import UnsupportedModel
from ..format import ArchFlag, Role


@dataclass(frozen=True)
class ExpertNames:
    """One way to store a layer's experts, as templates over {layer} (and {expert}).

    Per expert: `gate`, `up` and `down` name one matrix each. Fused: `gate_up` [n_experts, 2 * width, hidden] has the
    rows of gate, then those of up; `down` is [n_experts, hidden, width].
    """

    down: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""

    @property
    def fused(self) -> bool:
        return bool(self.gate_up)


@dataclass(frozen=True)
class Family:
    """`names` and `experts` are templates; `ignored` are regular expressions of tensors that carry no information."""

    name: str
    model_types: tuple[str, ...]
    architecture: Callable[[Config], Architecture]
    names: Mapping[Role, tuple[str, ...]]
    experts: tuple[ExpertNames, ...]
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)


DECODER_NAMES: Mapping[Role, tuple[str, ...]] = {
    Role.EMBEDDING: ("model.embed_tokens.weight",),
    Role.HEAD: ("lm_head.weight",),
    Role.FINAL_NORM: ("model.norm.weight",),
    Role.ATTN_NORM: ("model.layers.{layer}.input_layernorm.weight",),
    Role.Q: ("model.layers.{layer}.self_attn.q_proj.weight",),
    Role.K: ("model.layers.{layer}.self_attn.k_proj.weight",),
    Role.V: ("model.layers.{layer}.self_attn.v_proj.weight",),
    Role.O: ("model.layers.{layer}.self_attn.o_proj.weight",),
    Role.FFN_NORM: ("model.layers.{layer}.post_attention_layernorm.weight",),
}

QKV_BIAS_NAMES: Mapping[Role, tuple[str, ...]] = {
    Role.Q_BIAS: ("model.layers.{layer}.self_attn.q_proj.bias",),
    Role.K_BIAS: ("model.layers.{layer}.self_attn.k_proj.bias",),
    Role.V_BIAS: ("model.layers.{layer}.self_attn.v_proj.bias",),
}

O_BIAS_NAMES: Mapping[Role, tuple[str, ...]] = {Role.O_BIAS: ("model.layers.{layer}.self_attn.o_proj.bias",)}

QK_NORM_NAMES: Mapping[Role, tuple[str, ...]] = {
    Role.Q_NORM: ("model.layers.{layer}.self_attn.q_norm.weight",),
    Role.K_NORM: ("model.layers.{layer}.self_attn.k_norm.weight",),
}

DENSE_NAMES: Mapping[Role, tuple[str, ...]] = {
    Role.DENSE_GATE: ("model.layers.{layer}.mlp.gate_proj.weight",),
    Role.DENSE_UP: ("model.layers.{layer}.mlp.up_proj.weight",),
    Role.DENSE_DOWN: ("model.layers.{layer}.mlp.down_proj.weight",),
}

MLP_EXPERTS: tuple[ExpertNames, ...] = (
    ExpertNames(
        gate="model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        up="model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        down="model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    ),
    ExpertNames(
        gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
        down="model.layers.{layer}.mlp.experts.down_proj",
    ),
)


def common_flags(config: Config) -> ArchFlag:
    """What most families ask in the same words, and leave off where it is not said."""
    flags = ArchFlag(0)
    if config.boolean("norm_topk_prob", False):
        flags |= ArchFlag.NORM_TOPK
    if config.boolean("tie_word_embeddings", False):
        flags |= ArchFlag.TIED
    return flags


def dense_layers(config: Config, n_layers: int) -> frozenset[int]:
    """As Qwen says it: layers without experts are those listed, and those that decoder_sparse_step leaves out."""
    listed = config.integers("mlp_only_layers")
    step = config.integer("decoder_sparse_step", default=1)
    dense = frozenset(layer for layer in range(n_layers) if layer in listed or (layer + 1) % step)
    if len(dense) == n_layers:
        raise UnsupportedModel("leaves no layer with experts", where="config.json: mlp_only_layers")
    return dense


def refuse_other_activation(config: Config) -> None:
    """Experts are SwiGLU."""
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"is {activation!r}; experts run with silu only", where="config.json: hidden_act")


def refuse_window(config: Config, max_positions: int, *, always: bool = False) -> None:
    """A sliding window as long as the context changes nothing; a shorter one is not implemented.

    It counts where `use_sliding_window` says so, or `always`, in a family that has no such key.
    """
    window = config.integer("sliding_window", default=max_positions, low=0)
    used = always or config.boolean("use_sliding_window", False)
    layer_types = config.get("layer_types") or []
    others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if others:
        raise UnsupportedModel(f"has layers of kind {', '.join(others)}", where="config.json: layer_types")
    if used and window < max_positions:
        raise UnsupportedModel(
            f"attention over the last {window} of {max_positions} positions is not supported",
            where="config.json: sliding_window",
            hint="a model that was trained with full attention has null here",
        )
