"""Matrices as the engine reads them: tiles of 16 rows, in f32, bf16, f16, q8 or q4 (docs/numerics.md, "Weights").

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

# What the 16 codes of q4 stand for: native/src/kernels/layout.h.
Q4_LEVELS = np.array([-127, -95, -74, -58, -44, -32, -21, -10, 0, 11, 22, 34, 47, 62, 79, 101], np.int8)
# The code of the nearest level, for -128 to 127.
Q4_NEAREST = np.abs(np.arange(-128, 128)[:, None] - Q4_LEVELS.astype(int)).argmin(axis=1).astype(np.uint8)
# Where a group's largest weight is tried: about the levels' lower end, and with a negative scale the same.
Q4_PLACES = np.array([sign * place for place in range(85, 150, 10) for sign in (-1, 1)], np.float32)
# Groups at a time: what is computed of them fits a second-level cache.
Q4_BLOCK_GROUPS = 2048


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


def quantize_q4(
    x: Floats, column_weights: Floats | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int8], Floats]:
    """x: [rows, cols], cols a multiple of 32 → codes 0 to 15 [rows, cols], the levels that they stand for, and scales
    [rows, cols / 32] that bf16 holds exactly, of either sign.

    The scales are searched for the least squared error of the decoded weights, each error weighted by its column's
    weight [cols] (None: all alike). See _search_q4_scales.
    """
    groups = x.reshape(-1, GROUP)
    codes = np.empty(groups.shape, np.uint8)
    scales = np.empty((len(groups), 1), np.float32)
    weights = np.ones((1, GROUP), np.float32)
    if column_weights is not None:
        weights = np.tile(column_weights.reshape(-1, GROUP).astype(np.float32), (x.shape[0], 1))
    for begin in range(0, len(groups), Q4_BLOCK_GROUPS):
        part = slice(begin, begin + Q4_BLOCK_GROUPS)
        codes[part], scales[part] = _quantize_q4_groups(groups[part], weights if len(weights) == 1 else weights[part])
    return codes.reshape(x.shape), Q4_LEVELS[codes].reshape(x.shape), scales.reshape(x.shape[0], -1)


def _quantize_q4_groups(groups: Floats, weights: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    # Exactly to sizes near 1, so that no square is too large or too small.
    exponents = np.frexp(np.abs(groups).max(axis=1, keepdims=True))[1]
    scales = np.ldexp(_search_q4_scales(np.ldexp(groups, -exponents), weights), exponents)
    scales = _round_to_bf16(scales)
    quotients = np.divide(groups, scales, out=np.zeros_like(groups), where=scales != 0)
    return _nearest_code(quotients), scales


def _nearest_code(quotients: Floats) -> npt.NDArray[np.uint8]:
    codes: npt.NDArray[np.uint8] = Q4_NEAREST[np.clip(np.rint(quotients), -128, 127).astype(np.int32) + 128]
    return codes


def _search_q4_scales(groups: Floats, weights: Floats) -> Floats:
    """Scales [n, 1] of groups [n, 32].

    For given codes the best scale is that of least squares. Which codes are best is found by trying: each scale that
    takes the group's largest weight to one of several places about either end of the levels gives codes, these a best
    scale, and the best of those is kept; it gives codes once more.
    """
    ends = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    per_end = np.divide(np.float32(1), ends, out=np.zeros_like(ends), where=ends != 0)
    weighted = groups * weights
    most = np.full_like(ends, -1)
    best = np.zeros_like(ends)

    def fit(inverse: Floats) -> tuple[Floats, Floats]:
        """The best scale for the codes that the inverse of a scale gives, and by how much it lessens the error."""
        levels = Q4_LEVELS.astype(np.float32)[_nearest_code(groups * inverse)]
        product = np.einsum("gi,gi->g", weighted, levels)[:, None]
        square = np.einsum("gi,gi->g", levels * weights, levels)[:, None]
        scale = np.divide(product, square, out=np.zeros_like(product), where=square > 0)
        return scale, product * scale

    for place in Q4_PLACES:
        scale, gain = fit(per_end * place)
        better = gain > most
        most, best = np.where(better, gain, most), np.where(better, scale, best)
    return fit(np.divide(np.float32(1), best, out=np.zeros_like(best), where=best != 0))[0]


def _round_to_bf16(x: Floats) -> Floats:
    """To nearest, ties to even."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


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


def _encode_integers(x: Floats, fmt: Format, error: QuantizationError) -> Bytes:
    padded = _pad(x, TILE_ROWS, GROUP)
    n_tiles, cols = padded.shape[0] // TILE_ROWS, padded.shape[1]
    if fmt is Format.Q8:
        integers, scales = quantize_q8(padded)
        stored = integers.view(np.uint8) ^ np.uint8(128)  # + 128 in two's complement
        weights = stored.reshape(n_tiles, TILE_ROWS, cols // 4, 4).transpose(0, 2, 1, 3)
    else:
        codes, integers, scales = quantize_q4(padded)
        # The first four quads of a group are the lower halves of its bytes, the last four the upper.
        halves = codes.reshape(n_tiles, TILE_ROWS, cols // GROUP, 2, 4, 4).transpose(3, 0, 2, 4, 1, 5)
        weights = halves[0] | halves[1] << 4
    decoded = integers.reshape(*scales.shape, GROUP) * scales[:, :, None]
    error.add(x, decoded.reshape(padded.shape)[: x.shape[0], : x.shape[1]])
    bf16 = (scales.view(np.uint32) >> 16).astype("<u2").reshape(n_tiles, TILE_ROWS, cols // GROUP).transpose(0, 2, 1)
    out = np.zeros((n_tiles, tile_bytes(fmt, cols)), np.uint8)
    n_weight_bytes = weights.size // n_tiles
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
    if fmt in (Format.Q8, Format.Q4):
        return _encode_integers(x, fmt, error)
    return _encode_float(x, fmt, error)


def decode(raw: bytes, fmt: Format, rows: int, cols: int) -> Floats:
    """What a matrix [rows, cols] or vector stands for, from its bytes: the inverse of `encode`, exact."""
    if fmt is Format.VECTOR:
        return np.frombuffer(raw, "<f4").reshape(rows, cols)
    tiles = np.frombuffer(raw, np.uint8).reshape(-1, tile_bytes(fmt, cols))
    if fmt in (Format.Q8, Format.Q4):
        matrix = _decode_integers(tiles, fmt, align(cols, GROUP))
    else:
        dtype = np.dtype({Format.F32: np.float32, Format.BF16: ml_dtypes.bfloat16, Format.F16: np.float16}[fmt])
        stored = tiles[:, : cols * TILE_ROWS * dtype.itemsize].view(dtype).reshape(-1, cols, TILE_ROWS)
        matrix = stored.transpose(0, 2, 1).astype(np.float32).reshape(-1, cols)
    return matrix[:rows, :cols]


def _decode_integers(tiles: Bytes, fmt: Format, cols: int) -> Floats:
    n_tiles, n_groups = len(tiles), cols // GROUP
    n_weight_bytes = TILE_ROWS * cols // (2 if fmt is Format.Q4 else 1)
    packed = tiles[:, :n_weight_bytes]
    if fmt is Format.Q8:
        stored = packed.reshape(n_tiles, cols // 4, TILE_ROWS, 4).transpose(0, 2, 1, 3)
        integers = (stored ^ np.uint8(128)).view(np.int8).reshape(n_tiles, TILE_ROWS, cols)
    else:
        halves = packed.reshape(n_tiles, n_groups, 4, TILE_ROWS, 4).transpose(0, 3, 1, 2, 4)
        codes = np.stack((halves & 15, halves >> 4), axis=3)  # [tile, row, group, half, quad, 4]
        integers = Q4_LEVELS[codes].reshape(n_tiles, TILE_ROWS, cols)
    raw = tiles[:, n_weight_bytes : n_weight_bytes + n_groups * TILE_ROWS * 2]
    bf16 = np.ascontiguousarray(raw).view("<u2").reshape(n_tiles, n_groups, TILE_ROWS).transpose(0, 2, 1)
    scales = (bf16.astype(np.uint32) << 16).view(np.float32)
    groups = integers.reshape(n_tiles, TILE_ROWS, n_groups, GROUP) * scales[:, :, :, None]
    return groups.reshape(-1, cols)
