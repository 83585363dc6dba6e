"""Models that are large in one dimension: a vocabulary of 151,936, and 300 experts. All else is tiny."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from colibri.convert import convert, inspect
from support import engine, reference_model

Tensors = dict[str, npt.NDArray[Any]]


def one_layer(source: Path, out: Path, keys: dict[str, Any], change: Callable[[Tensors], None]) -> Path:
    """The first layer of the tiny Qwen3-MoE, its head tied, with these keys and these changes, in f32."""
    checkpoint = Path(shutil.copytree(source, out / "checkpoint"))
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "mlp_only_layers": [], "layer_types": ["full_attention"], **keys}
    (checkpoint / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if ".layers." not in name or ".layers.0." in name}
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    convert(checkpoint, out / "model.colibri", quantize="f32")
    return out / "model.colibri"


def random_bf16(seed: int, *shape: int) -> npt.NDArray[Any]:
    weights = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (weights / np.float32(shape[-1] ** 0.5)).astype(ml_dtypes.bfloat16)


def assert_equals_reference(path: Path, tokens: list[int]) -> npt.NDArray[np.int32]:
    """Logits and routing are those of float64; returns the routing."""
    expected, experts = reference_model.forward(reference_model.load(path), tokens)
    logits, routing = engine.run(path, np.array(tokens, np.int32))
    np.testing.assert_array_equal(routing, experts)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))
    return routing


def test_a_vocabulary_of_151936(tiny_qwen_checkpoint: Path, tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"] = random_bf16(1, 151936, 48)

    path = one_layer(tiny_qwen_checkpoint, tmp_path, {"vocab_size": 151936}, widen)
    assert_equals_reference(path, [0, 151935, 65536, 131072, 299])


def test_300_experts(tiny_qwen_checkpoint: Path, tmp_path: Path) -> None:
    def multiply(tensors: Tensors) -> None:
        prefix = "model.layers.0.mlp"
        for name in [name for name in tensors if name.startswith(f"{prefix}.experts.")]:
            del tensors[name]
        tensors[f"{prefix}.gate.weight"] = random_bf16(2, 300, 48)
        tensors[f"{prefix}.experts.gate_up_proj"] = random_bf16(3, 300, 48, 48)
        tensors[f"{prefix}.experts.down_proj"] = random_bf16(4, 300, 48, 24)

    keys = {"num_experts": 300, "num_experts_per_tok": 8}
    path = one_layer(tiny_qwen_checkpoint, tmp_path, keys, multiply)
    assert inspect(path).architecture["n_experts"] == 300
    routing = assert_equals_reference(path, list(range(40)))
    assert routing.max() > 255  # an expert's number takes more than a byte
