"""Encoded weights say what they should: against the decoder of the reference reader, and on extreme values."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from colibri.convert.format import Format, matrix_bytes
from colibri.convert.tiles import Q4_LEVELS, QuantizationError, decode, encode, quantize_q4, quantize_q8
from support import reference_model
from support.reference_model import decode_matrix

SHAPES = [(16, 32), (1, 1), (17, 33), (48, 100), (5, 64)]
EXACT = {Format.F32: np.float32, Format.BF16: ml_dtypes.bfloat16, Format.F16: np.float16}


def random_weights(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", EXACT)
def test_float_tiles_decode_to_the_rounded_weights(fmt: Format, shape: tuple[int, int]) -> None:
    weights = random_weights(*shape)
    raw = encode(weights, fmt, QuantizationError()).tobytes()
    assert len(raw) == matrix_bytes(fmt, *shape)
    decoded = decode_matrix(raw, fmt.name.lower(), *shape)
    np.testing.assert_array_equal(decoded, weights.astype(EXACT[fmt]).astype(np.float64))


@pytest.mark.parametrize("shape", SHAPES)
def test_q8_tiles_decode_to_within_half_a_step_of_their_group(shape: tuple[int, int]) -> None:
    weights = random_weights(*shape)
    raw = encode(weights, Format.Q8, QuantizationError()).tobytes()
    assert len(raw) == matrix_bytes(Format.Q8, *shape)
    decoded = decode_matrix(raw, "q8", *shape)
    for start in range(0, shape[1], 32):
        group = slice(start, start + 32)
        # a step is amax / 127 rounded up to 8 bits of mantissa
        step = np.abs(weights[:, group]).max(axis=1, keepdims=True) / 127 * (1 + 2**-7)
        assert (np.abs(decoded[:, group] - weights[:, group]) <= step / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", [*EXACT, Format.Q8, Format.Q4])
def test_the_decoder_agrees_with_the_reference_reader(fmt: Format, shape: tuple[int, int]) -> None:
    raw = encode(random_weights(*shape), fmt, QuantizationError()).tobytes()
    np.testing.assert_array_equal(decode(raw, fmt, *shape), decode_matrix(raw, fmt.name.lower(), *shape))


@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-38, 1e-30, 1.0, 1e30, 3.4028235e38])
def test_q8_integers_stay_within_127_at_every_magnitude(magnitude: float) -> None:
    with np.errstate(under="ignore"):
        weights = (random_weights(64, 96).clip(-1, 1) * np.float32(magnitude)).astype(np.float32)
    weights[0, 0] = np.float32(magnitude)
    integers, scales = quantize_q8(weights)
    assert np.abs(integers.astype(int)).max() <= 127
    assert np.isfinite(scales).all()
    np.testing.assert_array_equal(scales, scales.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_q8_scales_are_never_below_amax_over_127() -> None:
    weights = random_weights(256, 320, seed=1)
    _, scales = quantize_q8(weights)
    amax = np.abs(weights.reshape(256, 10, 32)).max(axis=2)
    assert (scales >= amax / np.float32(127)).all()
    assert (scales <= amax / np.float32(127) * np.float32(1 + 2**-7)).all()


@pytest.mark.parametrize("fmt", [Format.Q8, Format.Q4])
def test_a_group_of_zeros_decodes_to_zero(fmt: Format) -> None:
    weights = random_weights(16, 64)
    weights[3, 32:] = 0
    decoded = decode_matrix(encode(weights, fmt, QuantizationError()).tobytes(), fmt.name.lower(), 16, 64)
    assert not decoded[3, 32:].any()
    assert decoded[3, :32].any()


def test_a_value_that_f16_cannot_hold_is_refused() -> None:
    with pytest.raises(OverflowError, match="f16"):
        encode(np.full((16, 16), 70000, np.float32), Format.F16, QuantizationError())


@pytest.mark.parametrize("fmt", [Format.Q8, Format.Q4])
def test_bands_of_rows_give_the_bytes_of_the_whole(fmt: Format) -> None:
    weights = random_weights(50, 40)
    whole = encode(weights, fmt, QuantizationError()).tobytes()
    bands = b"".join(encode(weights[i : i + 16], fmt, QuantizationError()).tobytes() for i in (0, 16, 32, 48))
    assert bands == whole


@pytest.mark.parametrize("fmt", [Format.Q8, Format.Q4])
def test_the_error_is_that_of_the_decoded_weights(fmt: Format) -> None:
    weights = random_weights(32, 64)
    error = QuantizationError()
    decoded = decode_matrix(encode(weights, fmt, error).tobytes(), fmt.name.lower(), 32, 64)
    expected = np.linalg.norm(decoded - weights) / np.linalg.norm(weights)
    assert error.to_dict()["relative_rms"] == pytest.approx(expected, rel=1e-5)
    assert error.to_dict()["largest"] == pytest.approx(np.abs(decoded - weights).max(), rel=1e-5)


def random_like_a_layer(kind: str) -> np.ndarray:
    """[64, 512], of a distribution such as weights have."""
    random = np.random.default_rng(5)
    shape = (64, 512)
    if kind == "outliers":
        return (random.standard_normal(shape) * np.where(random.random(shape) < 0.02, 10, 1)).astype(np.float32)
    draw = {
        "normal": lambda: random.standard_normal(shape),
        "heavy tails": lambda: random.standard_t(4, shape),
        "laplace": lambda: random.laplace(size=shape),
    }[kind]
    return draw().astype(np.float32)


KINDS = ["normal", "heavy tails", "laplace", "outliers"]


def decode_q4(weights: np.ndarray, column_weights: np.ndarray | None = None) -> np.ndarray:
    codes, levels, scales = quantize_q4(weights, column_weights)
    np.testing.assert_array_equal(levels, Q4_LEVELS[codes])
    return levels * np.repeat(scales.astype(np.float64), 32, axis=1)


def weighted_error(weights: np.ndarray, decoded: np.ndarray, column_weights: np.ndarray) -> float:
    return float(np.sum(column_weights * (weights.astype(np.float64) - decoded) ** 2))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weighted_error_of_q4_is_below_that_of_q4_0(kind: str, weighted: bool) -> None:
    """Q4_0 takes as many bits. With all columns alike, and with some that count more."""
    weights = random_like_a_layer(kind)
    columns = np.random.default_rng(6).exponential(size=512).astype(np.float32) if weighted else None
    q4_0 = dequantize(quantize(weights, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0)
    count = np.ones(512) if columns is None else columns
    ours = weighted_error(weights, decode_q4(weights, columns), count)
    assert ours < 0.8 * weighted_error(weights, q4_0, count)
    if columns is not None:
        assert ours < weighted_error(weights, decode_q4(weights), count)


def test_the_error_of_q4_is_below_that_of_q4_0_in_every_matrix_of_the_default_model() -> None:
    model = reference_model.load(Path(__file__).parents[2] / "models" / "default.colibri")
    matrices = [matrix for matrix in model.tensors.values() if matrix.integers]
    matrices += [matrix for expert in model.experts.values() for matrix in expert]
    for matrix in matrices:
        weights = matrix.weights.astype(np.float32)
        q4_0 = dequantize(quantize(weights, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0)
        count = np.ones(weights.shape[1])
        assert weighted_error(weights, decode_q4(weights), count) < 0.8 * weighted_error(weights, q4_0, count)


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_for_q4_scales_is_within_three_hundredths_of_trying_them_all(kind: str) -> None:
    weights = random_like_a_layer(kind)[:4]
    best = np.full((4, 16), np.inf)
    for scale in np.linspace(-1 / 80, 1 / 80, 1601):
        groups = weights.reshape(4, 16, 32).astype(np.float64)
        step = (scale if scale else 1) * np.abs(groups).max(axis=2, keepdims=True)
        nearest = np.abs((groups / step)[..., None] - Q4_LEVELS).argmin(axis=-1)
        best = np.minimum(best, np.sum((groups - Q4_LEVELS[nearest] * step) ** 2, axis=2))
    assert weighted_error(weights, decode_q4(weights), np.ones(512)) < 1.03 * best.sum()


def test_q4_takes_four_and_a_half_bits_a_weight() -> None:
    assert matrix_bytes(Format.Q4, 2048, 4096) * 8 == 4.5 * 2048 * 4096
    assert matrix_bytes(Format.Q4, 1408, 2048) * 8 == 4.5 * 1408 * 2048


@pytest.mark.parametrize("shape", SHAPES)
def test_q4_tiles_decode_to_what_was_quantized(shape: tuple[int, int]) -> None:
    weights = random_weights(*shape)
    raw = encode(weights, Format.Q4, QuantizationError()).tobytes()
    assert len(raw) == matrix_bytes(Format.Q4, *shape)
    padded = np.pad(weights, ((0, 0), (0, -shape[1] % 32)))
    np.testing.assert_array_equal(decode_matrix(raw, "q4", *shape), decode_q4(padded)[:, : shape[1]])


@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-38, 1e-30, 1.0, 1e30, 3.4028235e38])
def test_q4_stays_finite_and_near_at_every_magnitude(magnitude: float) -> None:
    with np.errstate(under="ignore"):
        weights = (random_weights(64, 96).clip(-1, 1) * np.float32(magnitude)).astype(np.float32)
    weights[0, 0] = np.float32(magnitude)
    decoded = decode_q4(weights)
    assert np.isfinite(decoded).all()
    assert np.abs(decoded - weights).max() <= max(0.2 * magnitude, 2.0**-126)


def test_weights_that_q4_holds_exactly_come_back() -> None:
    levels = np.random.default_rng(7).choice(Q4_LEVELS, (32, 64)).astype(np.float32)
    levels[:, ::32] = Q4_LEVELS[0]
    weights = levels * np.float32(2.0**-9)
    np.testing.assert_array_equal(decode_q4(weights), weights)
