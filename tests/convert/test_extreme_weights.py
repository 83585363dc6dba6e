"""Weights at the edges of their formats: zeros, subnormal numbers, and the largest that there are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - safetensors finds the dtype bfloat16 by name once this is imported
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colibri.convert import convert
from support import engine, reference_model

# A row of each: nothing, the least float32, the least normal number of f16 and of f32, and what q8 scales underflow at.
ROWS = (0.0, 1e-45, 6e-5, 1.2e-38, 1e-43)


@pytest.fixture(scope="module")
def edged(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Mixtral in float32; the first rows of every matrix are zero, subnormal or close to it."""
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("edged") / "checkpoint"))
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor.astype(np.float32)
        if tensor.ndim == 2 and not name.endswith("gate.weight"):
            signs = np.where(np.arange(tensor.shape[1]) % 2, np.float32(-1), np.float32(1))
            for row, value in enumerate(ROWS):
                tensors[name][row] = np.float32(value) * signs
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("quantize", ["f32", "bf16", "f16", "q8", "q4"])
def test_zero_and_subnormal_rows_stay_finite(quantize: str, edged: Path, tmp_path: Path) -> None:
    convert(edged, tmp_path / "model.colibri", quantize=quantize)
    model = reference_model.load(tmp_path / "model.colibri")
    matrices = [matrix.weights for matrix in model.tensors.values()]
    matrices += [matrix.weights for expert in model.experts.values() for matrix in expert]
    assert all(np.isfinite(weights).all() for weights in matrices)
    head = model.tensors[-1, "head"].weights
    above = 1.2 if quantize == "q4" else 1.01  # its levels have no mirror images
    assert (np.abs(head[: len(ROWS)]) <= above * np.array(ROWS)[:, None] + 2.0**-25).all()  # f16 rounds to 2^-24 steps
    tokens = np.array([0, 1, 2, 3, 4, 100, 0, 299], np.int32)
    logits, _ = engine.run(tmp_path / "model.colibri", tokens)
    assert np.isfinite(logits).all()
    assert np.abs(logits[:, : len(ROWS)]).max() < 0.01


@pytest.mark.parametrize("quantize", ["f32", "bf16", "q8", "q4"])
def test_weights_as_large_as_float32_fit_every_format_but_f16(
    quantize: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][7] = np.float32(3.3e38)
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "model.colibri", quantize=quantize)
    weights = reference_model.load(tmp_path / "model.colibri").tensors[-1, "head"].weights[7]
    np.testing.assert_allclose(weights, 3.3e38, rtol=0.02)
