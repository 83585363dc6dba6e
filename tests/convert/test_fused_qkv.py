"""q, k and v as one matrix with one bias vector: the same bits as apart, in every family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from colibri.convert import convert, inspect
from colibri.native import ROW_LOGITS, Batch, Context, Model

DATA = Path(__file__).parents[1] / "data"
# With: whole-width norm and clip (olmoe), a norm per head (qwen3), biases (qwen2), none of these (mixtral, deepseek).
FAMILIES = ["tiny-mixtral", "tiny-qwen2-moe", "tiny-qwen3-moe", "tiny-olmoe", "tiny-deepseek"]
PROMPT = [(7 * i * i + 3) % 251 for i in range(40)]


def logits_of(path: Path) -> npt.NDArray[np.uint32]:
    """[2, vocabulary] as bits: after the prompt, and after one token more, alone."""
    n = len(PROMPT)
    with Model(path) as model, Context(model, n_pages=2) as context:
        context.forward(Batch(PROMPT, range(n), [0] * n, bytes([0] * (n - 1) + [ROW_LOGITS]), [[0, 1]]))
        prompt = np.array(context.logits(0))
        context.forward(Batch([11], [n], [0], bytes([ROW_LOGITS]), [[0, 1]]))
        return np.stack([prompt, context.logits(0)]).view(np.uint32)


def with_biases(checkpoint: Path, folder: Path) -> Path:
    """A copy in which q, k and v have biases, and o."""
    shutil.copytree(checkpoint, folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    tensors = load_file(folder / "model.safetensors")
    random = np.random.default_rng(1)
    for name in [name for name in tensors if name.endswith("_proj.weight") and ".self_attn." in name]:
        bias = random.standard_normal(len(tensors[name])).astype(np.float32)
        tensors[name.replace("weight", "bias")] = bias
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_same_bits(checkpoint: Path, folder: Path, quantize: str) -> None:
    convert(checkpoint, folder / "fused.colibri", quantize=quantize)
    convert(checkpoint, folder / "apart.colibri", quantize=quantize, flash_attn_compatible=False)
    assert "qkv_fused" in inspect(folder / "fused.colibri", verify=True).architecture["flags"]
    assert "qkv_fused" not in inspect(folder / "apart.colibri", verify=True).architecture["flags"]
    assert np.array_equal(logits_of(folder / "apart.colibri"), logits_of(folder / "fused.colibri"))


@pytest.mark.parametrize("quantize", ["f32", "q8", "q4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fusing_changes_no_bit(name: str, quantize: str, tmp_path: Path) -> None:
    assert_same_bits(DATA / name, tmp_path, quantize)


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-olmoe"])
def test_biases_before_a_norm_are_fused_too(name: str, tmp_path: Path) -> None:
    assert_same_bits(with_biases(DATA / name, tmp_path / "checkpoint"), tmp_path, "q8")
