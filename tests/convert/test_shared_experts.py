"""Shared experts: nothing missing, nothing too much, and a gate that is what docs/numerics.md says.

DeepSeek-MoE has no class in transformers. But a Qwen2-MoE whose shared gate is zero weighs its shared expert by one
half, exactly; with its `down` doubled it is a DeepSeek-MoE. So the two families check each other, and transformers
both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - safetensors finds the dtype bfloat16 by name once this is imported
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colibri.convert import TensorError, convert, inspect
from colibri.native import Context, Model
from support import deepseek_reference, engine, reference_cases

DATA = Path(__file__).parent.parent / "data"


def changed(family: str, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a tiny checkpoint whose tensors were changed."""
    copy = Path(shutil.copytree(DATA / f"tiny-{family}", folder / family))
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.fixture
def twins(tmp_path: Path) -> tuple[Path, Path]:
    """The tiny DeepSeek-MoE, and the Qwen2-MoE that computes the same function."""
    deepseek = DATA / "tiny-deepseek"
    config = json.loads((deepseek / "config.json").read_text())
    qwen = Path(shutil.copytree(deepseek, tmp_path / "qwen"))
    keys = {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": config["n_routed_experts"],
        "shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        "mlp_only_layers": list(range(config["first_k_dense_replace"])),
        "qkv_bias": False,
    }
    (qwen / "config.json").write_text(json.dumps(config | keys))
    tensors = {}
    for name, tensor in load_file(deepseek / "model.safetensors").items():
        doubled = name.endswith("shared_experts.down_proj.weight")
        tensors[name.replace("shared_experts", "shared_expert")] = tensor + tensor if doubled else tensor
    for layer in range(1, config["num_hidden_layers"]):
        gate = np.zeros((1, config["hidden_size"]), np.float32)
        tensors[f"model.layers.{layer}.mlp.shared_expert_gate.weight"] = gate
    save_file(tensors, qwen / "model.safetensors", {"format": "pt"})
    return deepseek, qwen


def test_a_shared_gate_of_one_half_gives_the_bits_of_half_a_shared_expert(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    results = []
    for folder in twins:
        convert(folder, tmp_path / "model.colibri", quantize="f32")
        results.append(engine.run(tmp_path / "model.colibri", reference_cases.tokens()))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.oracle
def test_our_deepseek_reference_agrees_with_transformers(twins: tuple[Path, Path]) -> None:
    pytest.importorskip("transformers", reason="the live oracle needs transformers and torch")
    from support import transformers_oracle

    deepseek, qwen = twins
    logits, routing = deepseek_reference.run(deepseek, reference_cases.tokens())
    expected, experts = transformers_oracle.run(qwen, reference_cases.tokens())
    np.testing.assert_array_equal(routing, experts)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2-moe", "model.layers.1.mlp.shared_expert.gate_proj.weight"),
        ("qwen2-moe", "model.layers.2.mlp.shared_expert.down_proj.weight"),
        ("qwen2-moe", "model.layers.1.mlp.shared_expert_gate.weight"),
        ("deepseek", "model.layers.1.mlp.shared_experts.up_proj.weight"),
    ],
)
def test_a_missing_shared_tensor_is_named(family: str, name: str, tmp_path: Path) -> None:
    folder = changed(family, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(TensorError, match="missing from the checkpoint") as caught:
        convert(folder, tmp_path / "model.colibri")
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3-moe", "model.layers.0.mlp.shared_expert.gate_proj.weight"),
        ("olmoe", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("qwen2-moe", "model.layers.0.mlp.shared_expert_gate.weight"),  # a dense layer
        ("deepseek", "model.layers.1.mlp.shared_expert_gate.weight"),
    ],
)
def test_an_unexpected_shared_tensor_is_named(family: str, name: str, tmp_path: Path) -> None:
    folder = changed(family, tmp_path, lambda tensors: tensors.update({name: np.zeros((1, 48), np.float32)}))
    with pytest.raises(TensorError, match="has no place") as caught:
        convert(folder, tmp_path / "model.colibri")
    assert name in str(caught.value)


def test_a_shared_gate_that_depends_on_the_token_is_followed(tmp_path: Path) -> None:
    """In the tiny Qwen2-MoE it goes from shut to open (that its logits are those of transformers, test_parity says);
    here, that a gate held at one half gives something else.
    """

    def silence(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("shared_expert_gate.weight"):
                tensors[name] = np.zeros_like(tensors[name])

    convert(DATA / "tiny-qwen2-moe", tmp_path / "gated.colibri", quantize="f32")
    convert(changed("qwen2-moe", tmp_path, silence), tmp_path / "half.colibri", quantize="f32")
    gated, _ = engine.run(tmp_path / "gated.colibri", reference_cases.tokens())
    half, _ = engine.run(tmp_path / "half.colibri", reference_cases.tokens())
    assert np.abs(gated - half).max(axis=1).min() > 1e-3


def test_gates_stay_in_f32_whatever_the_weights_become(tmp_path: Path) -> None:
    """By exact name: shared_expert_gate is a gate, shared_expert.gate_proj is not."""
    convert(DATA / "tiny-qwen2-moe", tmp_path / "model.colibri", quantize="q8")
    formats = inspect(tmp_path / "model.colibri").formats
    assert (formats["router"], formats["shared experts"], formats["dense layers"]) == ("f32", "q8", "q8")


@pytest.mark.parametrize("family", ["qwen2-moe", "olmoe", "deepseek"])
def test_infer_runs_every_family_in_q8(family: str, tmp_path: Path) -> None:
    convert(DATA / f"tiny-{family}", tmp_path / "model.colibri", quantize="q8")
    with Model(tmp_path / "model.colibri") as model, Context(model, n_pages=2) as context:
        assert len(context.infer([5, 6, 7], 20)) > 0
