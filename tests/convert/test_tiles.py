"""Encoded weights say what they should: against the decoder of the reference reader, and on extreme values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from colibri.convert.format import Format, matrix_bytes
from colibri.convert.tiles import QuantizationError, encode, quantize_q8
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


def test_a_group_of_zeros_has_scale_zero_and_decodes_to_zero() -> None:
    weights = random_weights(16, 64)
    weights[3, 32:] = 0
    decoded = decode_matrix(encode(weights, Format.Q8, QuantizationError()).tobytes(), "q8", 16, 64)
    assert not decoded[3, 32:].any()
    assert decoded[3, :32].any()


def test_a_value_that_f16_cannot_hold_is_refused() -> None:
    with pytest.raises(OverflowError, match="f16"):
        encode(np.full((16, 16), 70000, np.float32), Format.F16, QuantizationError())


def test_bands_of_rows_give_the_bytes_of_the_whole() -> None:
    weights = random_weights(50, 40)
    whole = encode(weights, Format.Q8, QuantizationError()).tobytes()
    bands = b"".join(encode(weights[i : i + 16], Format.Q8, QuantizationError()).tobytes() for i in (0, 16, 32, 48))
    assert bands == whole


def test_the_error_is_that_of_the_decoded_weights() -> None:
    weights = random_weights(32, 64)
    error = QuantizationError()
    decoded = decode_matrix(encode(weights, Format.Q8, error).tobytes(), "q8", 32, 64)
    expected = np.linalg.norm(decoded - weights) / np.linalg.norm(weights)
    assert error.to_dict()["relative_rms"] == pytest.approx(expected, rel=1e-5)
    assert error.to_dict()["largest"] == pytest.approx(np.abs(decoded - weights).max(), rel=1e-5)
