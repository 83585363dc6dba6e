"""The model families that colibri runs, and the refusal of the others."""

from __future__ import annotations

from ..config import Config
from ..errors import ConfigError, UnsupportedModel
from . import deepseek, mixtral, olmoe, qwen2_moe, qwen3_moe
from .base import ExpertNames, Family

__all__ = ["FAMILIES", "ExpertNames", "Family", "find"]

FAMILIES: tuple[Family, ...] = (
    mixtral.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    olmoe.FAMILY,
    deepseek.FAMILY,
)

# Under one of these names every family known to us says how many experts it has.
_EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def find(config: Config) -> Family:
    """The family of a configuration by its model_type. A dense model and an unknown family are refused with advice."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("is missing", where="config.json: model_type")
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            "the weights are already quantised",
            where="config.json: quantization_config",
            hint="start from the checkpoint in bf16, f16 or f32",
        )
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.model_types)
    if any(config.get(key) for key in _EXPERT_COUNT_KEYS):
        raise UnsupportedModel(
            f"{model_type!r} is a family that colibri does not know; it runs {supported}",
            where="config.json: model_type",
        )
    raise UnsupportedModel(
        f"{model_type!r} is a dense model; colibri runs Mixture-of-Experts models only ({supported})",
        where="config.json: model_type",
        hint="for dense models use an engine such as llama.cpp",
    )
