"""Random models: the same name gives the same weights, and every file of a shape holds the same ones."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from colibri.bench import models
from colibri.bench.gguf_model import write_gguf
from colibri.bench.models import SHAPES, RandomWeights, full_config, make_model, write_checkpoint
from colibri.convert import inspect
from colibri.native import Model
from support import engine
from support.tiny_olmoe import TINY_OLMOE


def random_weights(folder: Path, config: dict[str, object]) -> RandomWeights:
    write_checkpoint(folder, config)
    return RandomWeights(folder)


def test_a_model_is_made_once_and_the_same_again(tmp_path: Path) -> None:
    one = make_model("tiny", folder=tmp_path / "one")
    assert make_model("tiny", folder=tmp_path / "one") == one
    other = make_model("tiny", folder=tmp_path / "other")
    assert one.read_bytes() == other.read_bytes()


def test_a_made_model_is_whole_and_runs(tmp_path: Path) -> None:
    path = make_model("tiny", folder=tmp_path)
    assert inspect(path, verify=True).family == "qwen2_moe"
    logits, _ = engine.run(path, np.arange(20, dtype=np.int32))
    assert np.isfinite(logits).all()
    assert np.std(logits) > 0


def test_depth_is_told_in_the_name_and_kept(tmp_path: Path) -> None:
    path = make_model("tiny", "f32", n_layers=3, folder=tmp_path)
    assert path.name == "tiny-3-f32.colibri"
    with Model(path) as model:
        assert model.info.n_layers == 3


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_normal_norms_one_and_biases_zero(name: str, tmp_path: Path) -> None:
    weights = random_weights(tmp_path, full_config(SHAPES[name], n_layers=1))
    router = weights.draw(weights.name(models.Role.ROUTER, 0))
    assert router.std() == pytest.approx(0.02, rel=0.1)
    assert abs(router.mean()) < 0.002
    assert (weights.draw("model.norm.weight") == 1).all()
    biases = [tensor for tensor in weights.tensors if tensor.endswith("bias")]
    assert bool(biases) == (weights.family.name == "qwen2_moe")
    assert all((weights.draw(bias) == 0).all() for bias in biases)


def test_no_two_tensors_are_alike(tmp_path: Path) -> None:
    weights = random_weights(tmp_path, full_config(SHAPES["tiny"]))
    drawn = {weights.draw(name).tobytes() for name, tensor in weights.tensors.items() if len(tensor.shape) == 2}
    assert len(drawn) == sum(len(tensor.shape) == 2 for tensor in weights.tensors.values())


def test_bands_are_the_rows_of_the_tensor(tmp_path: Path) -> None:
    weights = random_weights(tmp_path, full_config(SHAPES["tiny"]))
    name = "model.embed_tokens.weight"
    bands = list(weights.bands(name, slice(10, 50), 16))
    assert [len(band) for band in bands] == [16, 16, 8]
    assert (np.concatenate(bands) == weights.draw(name)[10:50]).all()


@pytest.mark.parametrize(("arch", "quantize"), [("olmoe", "q8_0"), ("qwen3moe", "q8_0"), ("olmoe", "f16")])
def test_a_gguf_holds_the_same_values(arch: str, quantize: str, tmp_path: Path) -> None:
    weights = random_weights(tmp_path, TINY_OLMOE)
    write_gguf(tmp_path / "x.gguf", weights, arch, quantize)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}

    def values(name: str) -> np.ndarray:
        tensor = tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])

    _, up, _ = weights.expert_names(1, 5)
    np.testing.assert_allclose(values("blk.1.ffn_up_exps.weight")[5], weights.draw(up), atol=4e-4)
    np.testing.assert_allclose(
        values("blk.0.attn_q.weight"), weights.draw("model.layers.0.self_attn.q_proj.weight"), atol=4e-4
    )
    assert (values("blk.0.ffn_gate_inp.weight") == weights.draw("model.layers.0.mlp.gate.weight")).all()
    assert values("blk.0.attn_q_norm.weight").shape == ((16,) if arch == "qwen3moe" else (64,))
