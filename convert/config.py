"""config.json, read with care: every value checked by key, and a record of which keys were looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ConfigError, UnsupportedModel

# Keys that say nothing about inference: initialisation, training, bookkeeping, and what text.py reads.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "torch_dtype",
        "transformers_version",
        "unsloth_version",
        "use_cache",
    }
)

# Keys that change what a model computes without changing which tensors it has, and the value that changes nothing
# (absent and null never do). A family that has such a feature reads its key; in any other the key is refused.
INERT: Mapping[str, Any] = {
    "alibi": False,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "parallel_attn": False,
    "residual_multiplier": 1.0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}


class Config:
    """One JSON object; getters raise ConfigError naming the key. `null` counts as absent, as it does for
    transformers.
    """

    def __init__(self, values: Any, where: str = "config.json") -> None:
        if not isinstance(values, dict):
            raise ConfigError("is not a JSON object", where=where)
        self.values: dict[str, Any] = values
        self._where = where
        self._read: set[str] = set()

    def error(self, key: str, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(message, where=f"{self._where}: {key}", hint=hint)

    def get(self, key: str) -> Any:
        """The raw value; None where absent."""
        self._read.add(key)
        return self.values.get(key)

    def integer(self, *keys: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        """An integer in [low, high] under the first of `keys` that is there; ConfigError if none is and there is no
        default.
        """
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if type(value) is not int:
                raise self.error(key, f"is {value!r}, not an integer")
            if not low <= value <= high:
                raise self.error(key, f"is {value}, outside {low}..{high}")
            return value
        if default is None:
            raise self.error(keys[0], "is missing")
        return default

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, f"is {value!r}, not a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, not true or false")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers; empty where absent."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(key, f"is {value!r}, not a list of integers")
        return value

    def section(self, key: str) -> Config | None:
        """A nested object, or None where absent."""
        value = self.get(key)
        return None if value is None else Config(value, f"{self._where}: {key}")

    def refuse_unread(self) -> None:
        """Refuses a key that nobody asked for, but that the model's results depend on."""
        for key in sorted(INERT.keys() & self.values.keys() - self._read):
            if self.values[key] not in (None, INERT[key]):
                family = self.values.get("model_type")
                raise UnsupportedModel(
                    f"is {self.values[key]!r}; colibri does not compute this in a {family} model",
                    where=f"{self._where}: {key}",
                )

    def unread(self) -> list[str]:
        """Keys that nobody asked for and that are not known to be harmless."""
        return sorted(set(self.values) - self._read - HARMLESS)
