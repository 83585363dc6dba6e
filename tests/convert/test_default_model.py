"""A checkpoint made of the default model says what the file says: to an independent reader, and to transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from colibri.convert import convert
from support import engine, reference_model

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "models" / "default.colibri"
TEXT = (
    "<|im_start|>user\nMy name is Ada and I live in Oslo.<|im_end|>\n<|im_start|>assistant\nNice to meet you, Ada."
    "<|im_end|>\n<|im_start|>user\nTell me a story about a red fox.<|im_end|>\n<|im_start|>assistant\n"
)
TOLERANCE = 2e-5  # of the largest logit: two right implementations in f32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("default") / "checkpoint"
    subprocess.run([sys.executable, ROOT / "tools" / "default_model_checkpoint.py", MODEL, folder], check=True)
    return folder


def test_the_checkpoint_holds_the_weights_of_the_file(checkpoint: Path) -> None:
    found = load_file(checkpoint / "model.safetensors")
    reference = reference_model.load(MODEL)
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], reference.tensors[-1, "embedding"].weights)
    np.testing.assert_array_equal(found["model.norm.weight"], reference.tensors[-1, "final_norm"].weights[0])
    for layer in range(reference.header["n_layers"]):
        prefix = f"model.layers.{layer}."
        np.testing.assert_array_equal(found[prefix + "mlp.gate.weight"], reference.tensors[layer, "router"].weights)
        np.testing.assert_array_equal(found[prefix + "self_attn.k_proj.weight"], reference.tensors[layer, "k"].weights)
        for expert in range(reference.header["n_experts"]):
            for name, matrix in zip(("gate", "up", "down"), reference.experts[layer, expert], strict=True):
                stored = found[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"]
                np.testing.assert_array_equal(stored, matrix.weights)


@pytest.mark.oracle
def test_transformers_computes_from_the_checkpoint_what_the_engine_does(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the live oracle needs transformers and torch")
    from transformers import AutoTokenizer

    from support import transformers_oracle

    tokens = np.array(AutoTokenizer.from_pretrained(checkpoint)(TEXT).input_ids, np.int32)
    expected, experts = transformers_oracle.run(checkpoint, tokens)
    convert(checkpoint, tmp_path / "default-f32.colibri", quantize="f32")
    logits, routing = engine.run(tmp_path / "default-f32.colibri", tokens)
    np.testing.assert_array_equal(routing, experts)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))
