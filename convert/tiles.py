"""Matrices as the engine reads them: tiles of 16 rows, in f32, bf16, f16 or q8 (docs/numerics.md, "Weights").

Encoders take float32 [rows, cols] with rows a multiple of 16 or the last rows of the matrix, and return the tiles'
bytes; so a large matrix can be encoded a band of rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .format import GROUP, TILE_ROWS, Bytes, Format, align, tile_bytes

Floats = npt.NDArray[np.float32]


@dataclass
class QuantizationError:
    """Running error of encoded weights against their source."""

    squared_error: float = 0.0
    squared_weight: float = 0.0
    largest: float = 0.0
    n_weights: int = 0

    def add(self, source: Floats, decoded: Floats) -> None:
        difference = source - decoded
        self.largest = max(self.largest, float(np.max(np.abs(difference), initial=0.0)))
        self.squared_error += _sum_of_squares(difference)
        self.squared_weight += _sum_of_squares(source)
        self.n_weights += source.size

    def merge(self, other: QuantizationError) -> None:
        self.squared_error += other.squared_error
        self.squared_weight += other.squared_weight
        self.largest = max(self.largest, other.largest)
        self.n_weights += other.n_weights

    def to_dict(self) -> dict[str, float | int]:
        """`relative_rms`: root of the summed squared error over that of the weights; `largest`: absolute."""
        relative = (self.squared_error / self.squared_weight) ** 0.5 if self.squared_weight else 0.0
        return {
            "weights": self.n_weights,
            "relative_rms": float(f"{relative:.6g}"),
            "largest": float(f"{self.largest:.6g}"),
        }


def _sum_of_squares(x: Floats) -> float:
    """In float64 throughout: weights may be tiny or huge. Rows are summed first, so that the copy stays small."""
    return float(sum(np.sum(np.square(row, dtype=np.float64)) for row in np.array_split(x, max(1, x.size >> 16))))


def quantize_q8(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """x: [rows, cols], cols a multiple of 32 → integers [rows, cols] in ±127 and scales [rows, cols / 32] that bf16
    holds exactly.

    The scale is amax / 127 rounded up to bf16, so that dividing by it never gives more than 127.
    """
    groups = x.reshape(x.shape[0], -1, GROUP)
    amax = np.maximum(groups.max(axis=2), -groups.min(axis=2))
    exact = (amax / np.float32(127)).view(np.uint32)
    scales = ((exact + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    divisor = np.where(scales > 0, scales, np.float32(1))
    quotients = groups / divisor[:, :, None]
    integers = np.rint(quotients, out=quotients).astype(np.int8)
    return integers.reshape(x.shape), scales


def _pad(x: Floats, row_multiple: int, col_multiple: int) -> Floats:
    rows, cols = align(x.shape[0], row_multiple), align(x.shape[1], col_multiple)
    return np.pad(x, ((0, rows - x.shape[0]), (0, cols - x.shape[1])))


def _encode_float(x: Floats, fmt: Format, error: QuantizationError) -> Bytes:
    dtype = {Format.F32: np.float32, Format.BF16: ml_dtypes.bfloat16, Format.F16: np.float16}[fmt]
    with np.errstate(over="ignore"):
        stored = x.astype(dtype)
    if not np.isfinite(stored.astype(np.float32)).all():
        raise OverflowError(f"a value does not fit {fmt.name.lower()}")
    error.add(x, stored.astype(np.float32))
    tiles = _pad(stored, TILE_ROWS, 1).reshape(-1, TILE_ROWS, x.shape[1]).transpose(0, 2, 1)
    out = np.zeros((len(tiles), tile_bytes(fmt, x.shape[1])), np.uint8)
    raw = np.ascontiguousarray(tiles).view(np.uint8).reshape(len(tiles), -1)
    out[:, : raw.shape[1]] = raw
    return out.reshape(-1)


def _encode_q8(x: Floats, error: QuantizationError) -> Bytes:
    padded = _pad(x, TILE_ROWS, GROUP)
    cols = padded.shape[1]
    integers, scales = quantize_q8(padded)
    decoded = integers.reshape(*scales.shape, GROUP) * scales[:, :, None]
    error.add(x, decoded.reshape(padded.shape)[: x.shape[0], : x.shape[1]])
    n_tiles = padded.shape[0] // TILE_ROWS
    unsigned = integers.view(np.uint8) ^ np.uint8(128)  # + 128 in two's complement
    weights = unsigned.reshape(n_tiles, TILE_ROWS, cols // 4, 4).transpose(0, 2, 1, 3)
    bf16 = (scales.view(np.uint32) >> 16).astype("<u2").reshape(n_tiles, TILE_ROWS, cols // GROUP).transpose(0, 2, 1)
    out = np.zeros((n_tiles, tile_bytes(Format.Q8, cols)), np.uint8)
    n_weight_bytes = cols * TILE_ROWS
    out[:, :n_weight_bytes] = weights.reshape(n_tiles, -1)
    out[:, n_weight_bytes : n_weight_bytes + cols // GROUP * TILE_ROWS * 2] = (
        np.ascontiguousarray(bf16).view(np.uint8).reshape(n_tiles, -1)
    )
    return out.reshape(-1)


def encode(x: Floats, fmt: Format, error: QuantizationError) -> Bytes:
    """Rows of a matrix (or a vector) in a format; what rounding cost is added to `error`.

    Raises OverflowError where a finite value does not fit the format.
    """
    if fmt is Format.VECTOR:
        return np.ascontiguousarray(x, "<f4").view(np.uint8).reshape(-1)
    if fmt is Format.Q8:
        return _encode_q8(x, error)
    return _encode_float(x, fmt, error)
