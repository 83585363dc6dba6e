"""Rotary embedding types, resolved to numbers: the engine gets inverse frequencies and one factor, and knows no types.

Frequencies are rounded to float32 where transformers rounds them, so that both turn by the same angles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .config import Config
from .errors import UnsupportedModel
from .tiles import Floats


@dataclass(frozen=True)
class Rope:
    """inv_freq: [rotary_dim / 2]; attention_factor multiplies cosine and sine."""

    inv_freq: Floats
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class _Basis:
    """What every type starts from. Positions are those of the model, and those it was first trained on."""

    parameters: Config
    theta: float
    rotary_dim: int
    max_positions: int
    original_positions: int

    def wavelengths(self) -> Floats:
        """theta^(2i / rotary_dim): the exponent rounded to float32, then the power."""
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        return np.power(np.float64(self.theta), exponent.astype(np.float64)).astype(np.float32)

    def inv_freq(self) -> Floats:
        return np.float32(1) / self.wavelengths()


def _default(basis: _Basis) -> Rope:
    return Rope(basis.inv_freq())


def _linear(basis: _Basis) -> Rope:
    return Rope(basis.inv_freq() / np.float32(basis.parameters.number("factor")))


def _llama3(basis: _Basis) -> Rope:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between (Dubey et al. 2024)."""
    inv_freq = basis.inv_freq()
    factor = np.float32(basis.parameters.number("factor"))
    low, high = (basis.parameters.number(key) for key in ("low_freq_factor", "high_freq_factor"))
    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(basis.original_positions) / wavelength - np.float32(low)) / np.float32(high - low)
    ramp = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = np.where(wavelength > basis.original_positions / low, inv_freq / factor, ramp)
    return Rope(np.where(wavelength < basis.original_positions / high, inv_freq, scaled).astype(np.float32))


def _yarn(basis: _Basis) -> Rope:
    """YaRN (Peng et al. 2023): a ramp over dimensions between interpolated and kept frequencies, and a factor on
    attention.
    """
    parameters, dim = basis.parameters, basis.rotary_dim
    factor = parameters.number("factor", default=basis.max_positions / basis.original_positions)

    def dimension_of(turns: float) -> float:
        return dim * math.log(basis.original_positions / (turns * 2 * math.pi)) / (2 * math.log(basis.theta))

    low, high = dimension_of(parameters.number("beta_fast", 32.0)), dimension_of(parameters.number("beta_slow", 1.0))
    if parameters.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    keep = np.float32(1) - np.clip(ramp, 0, 1)
    interpolated = np.float32(1) / (np.float32(factor) * basis.wavelengths())
    inv_freq = interpolated * (1 - keep) + basis.inv_freq() * keep
    return Rope(inv_freq.astype(np.float32), _yarn_attention_factor(parameters, factor))


def _yarn_attention_factor(parameters: Config, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return parameters.number("attention_factor")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(parameters.number("mscale")) / magnitude(parameters.number("mscale_all_dim"))
    return magnitude(1.0)


_TYPES: dict[str, Callable[[_Basis], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def resolve(config: Config, *, head_dim: int, max_positions: int, default_theta: float) -> Rope:
    """From `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before); where both are, as
    transformers does: `rope_scaling` is taken, and a theta inside wins over one outside.
    """
    section = config.section("rope_scaling") or config.section("rope_parameters") or Config({})
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind not in _TYPES:
        raise UnsupportedModel(
            f"rotary embedding of type {kind!r} is not supported; supported: {', '.join(_TYPES)}",
            where="config.json: rope_parameters",
        )
    for place in (section, config):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel("rotates a part of each head only", where="config.json: partial_rotary_factor")
    original = section.integer("original_max_position_embeddings", default=max_positions)
    basis = _Basis(
        parameters=section,
        theta=section.number("rope_theta", config.number("rope_theta", default_theta)),
        rotary_dim=head_dim,
        max_positions=max_positions,
        original_positions=config.integer("original_max_position_embeddings", default=original),
    )
    return _TYPES[kind](basis)
