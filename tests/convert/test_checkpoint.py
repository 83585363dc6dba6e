"""Checkpoints that are cut, incomplete or not what they say: each refused by name, before anything is written."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colibri.convert import ConvertError, DamagedFile, MissingFile, TensorError, UnsupportedModel, convert

SHARD = "model-{:05d}-of-00002.safetensors"


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the weights after a change to the dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def split(folder: Path) -> None:
    """Deals the tensors out to two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SHARD.format(1 + i % 2) for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name, at in weight_map.items() if at == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refuse(folder: Path, kind: type[ConvertError], *words: str) -> None:
    """Conversion fails with this error and these words, and leaves nothing behind."""
    out = folder.parent / "out"
    out.mkdir()
    with pytest.raises(kind) as caught:
        convert(folder, out / "model.colibri", quantize="f32")
    for word in words:
        assert word in str(caught.value)
    assert list(out.iterdir()) == []


def test_shards_and_one_file_give_the_same_bytes(copy: Path, tmp_path: Path) -> None:
    convert(copy, tmp_path / "one.colibri")
    split(copy)
    convert(copy, tmp_path / "two.colibri")
    assert (tmp_path / "one.colibri").read_bytes() == (tmp_path / "two.colibri").read_bytes()


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "deepseek"])
def test_fused_experts_give_the_bytes_of_single_ones(family: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The layout that transformers 5 has in memory and can save: [experts, 2 * width, hidden], gate rows first."""
    source = tiny_checkpoint.parent / f"tiny-{family}"
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    fused = Path(shutil.copytree(source, tmp_path / "fused"))

    def fuse(tensors: dict[str, Any]) -> None:
        routers = [name for name in tensors if name.endswith(("moe.gate.weight", "mlp.gate.weight"))]
        for router in routers:
            old, new = router.removesuffix("gate.weight"), router.split(".")[2]
            names = [name for name in tensors if name.startswith(f"{old}experts.")]
            n_experts = len(names) // 3
            part = {
                p: [tensors.pop(f"{old}experts.{e}.{p}.weight") for e in range(n_experts)] for p in (gate, up, down)
            }
            pairs = zip(part[gate], part[up], strict=True)
            prefix = f"model.layers.{new}.mlp"
            tensors[f"{prefix}.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in pairs])
            tensors[f"{prefix}.experts.down_proj"] = np.stack(part[down])
            tensors[f"{prefix}.gate.weight"] = tensors.pop(router)

    edit(fused, fuse)
    for quantize in ("f32", "q8"):
        convert(source, tmp_path / "single.colibri", quantize=quantize)
        convert(fused, tmp_path / "fused.colibri", quantize=quantize)
        assert (tmp_path / "single.colibri").read_bytes() == (tmp_path / "fused.colibri").read_bytes()


@pytest.mark.parametrize("cut", ["one byte", "half"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_shard_that_was_cut_is_refused_with_both_sizes(copy: Path, cut: str, sharded: bool) -> None:
    if sharded:
        split(copy)
    path = copy / (SHARD.format(2) if sharded else "model.safetensors")
    size = path.stat().st_size
    keep = size - 1 if cut == "one byte" else size // 2
    with path.open("r+b") as file:
        file.truncate(keep)
    refuse(copy, DamagedFile, path.name, f"expected {size} bytes", f"found {keep}")


def test_a_shard_that_was_cut_inside_its_header_is_refused(copy: Path) -> None:
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    refuse(copy, DamagedFile, "expected at least", "found 100")


def test_a_shard_with_bytes_behind_its_data_is_refused(copy: Path) -> None:
    size = (copy / "model.safetensors").stat().st_size
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refuse(copy, DamagedFile, "too long", f"expected {size}", f"found {size + 1}")


def test_an_empty_shard_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"")
    refuse(copy, DamagedFile, "cut short")


def test_a_shard_that_the_index_names_but_is_missing_is_named(copy: Path) -> None:
    split(copy)
    (copy / SHARD.format(2)).unlink()
    refuse(copy, MissingFile, SHARD.format(2), "missing")


def test_a_tensor_that_the_index_promises_but_its_shard_lacks_is_named(copy: Path) -> None:
    split(copy)
    tensors = load_file(copy / SHARD.format(1))
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, copy / SHARD.format(1))
    refuse(copy, TensorError, name, SHARD.format(1), "index")


def test_a_shard_outside_the_folder_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    refuse(copy, DamagedFile, "outside the folder")


def test_files_that_the_index_does_not_name_are_not_read(copy: Path, tmp_path: Path) -> None:
    split(copy)
    (copy / "consolidated.safetensors").write_bytes(b"not safetensors at all")
    convert(copy, tmp_path / "model.colibri")


def test_a_missing_tensor_is_named(copy: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    edit(copy, lambda tensors: tensors.pop(name))
    refuse(copy, TensorError, name, "missing")


def test_missing_tensors_are_counted(copy: Path) -> None:
    def drop_experts(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "layers.0.block_sparse_moe.experts" in name]:
            del tensors[name]

    edit(copy, drop_experts)
    refuse(copy, TensorError, "layers.0.block_sparse_moe.experts.0.w1.weight", "and 7 more")


def test_a_left_over_tensor_is_named(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update({"model.layers.0.shared.weight": np.zeros(3, np.float32)}))
    refuse(copy, TensorError, "model.layers.0.shared.weight", "no place")


def test_more_experts_than_the_configuration_says_are_left_over(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
    refuse(copy, TensorError, "model.layers.0.block_sparse_moe.gate.weight", "[4, 64]", "[3, 64]")


def test_rotary_buffers_of_old_checkpoints_are_left_out_with_a_note(copy: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(copy, lambda tensors: tensors.update({name: np.zeros(8, np.float32)}))
    report = convert(copy, tmp_path / "model.colibri")
    assert any(name in note for note in report.notes)


def test_a_wrong_shape_is_told_with_both_shapes(copy: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit(copy, lambda tensors: tensors.update({name: tensors[name][:, :-1].copy()}))
    refuse(copy, TensorError, name, "[32, 63]", "[32, 64]")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_tensor(copy: Path, value: float) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[name][5, 7] = value

    edit(copy, spoil)
    refuse(copy, TensorError, name, "NaN or infinity")


def test_integer_weights_are_refused_by_tensor(copy: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(copy, lambda tensors: tensors.update({name: np.zeros((64, 64), np.int8)}))
    refuse(copy, UnsupportedModel, name, "I8")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_float_type_of_a_source_gives_the_same_file(
    dtype: Any, copy: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The tiny weights, rounded to f16 and bf16 both, are the same numbers in all four types."""

    def round_to(kind: Any) -> Callable[[dict[str, Any]], None]:
        def change(tensors: dict[str, Any]) -> None:
            for name, tensor in tensors.items():
                both = np.round(tensor.astype(np.float64) * 16) / 16  # few enough bits for every type
                tensors[name] = both.clip(-7, 7).astype(kind)

        return change

    other = Path(shutil.copytree(tiny_checkpoint, tmp_path / "other"))
    edit(copy, round_to(dtype))
    edit(other, round_to(np.float32))
    convert(copy, tmp_path / "a.colibri")
    convert(other, tmp_path / "b.colibri")
    assert (tmp_path / "a.colibri").read_bytes() == (tmp_path / "b.colibri").read_bytes()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"\xff" * 8, "claims a header"),
        (struct.pack("<Q", 50) + b"{", "cut short"),
        (struct.pack("<Q", 2) + b"[]", "not that of a safetensors file"),
        (struct.pack("<Q", 9) + b'{"a": 17}', "not that of a safetensors file"),
        (struct.pack("<Q", 3) + b"{{{", "not that of a safetensors file"),
        (struct.pack("<Q", 4000) + b"[" * 4000, "not that of a safetensors file"),
    ],
)
def test_a_lying_safetensors_header_is_refused(copy: Path, header: bytes, words: str) -> None:
    (copy / "model.safetensors").write_bytes(header)
    refuse(copy, DamagedFile, words)


def test_a_name_that_stands_twice_is_refused(copy: Path) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"a":{entry},"a":{entry}}}'.encode()
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refuse(copy, DamagedFile, "twice")


def test_a_tensor_in_two_shards_is_refused(copy: Path) -> None:
    split(copy)
    extra = {**load_file(copy / SHARD.format(1)), "model.norm.weight": np.ones(64, np.float32)}
    other = {**load_file(copy / SHARD.format(2)), "model.norm.weight": np.ones(64, np.float32)}
    save_file(extra, copy / SHARD.format(1))
    save_file(other, copy / SHARD.format(2))
    refuse(copy, TensorError, "model.norm.weight", "both")


def test_a_folder_without_weights_says_what_is_expected(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    refuse(copy, MissingFile, "model.safetensors", "safetensors")


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="nowhere"):
        convert(tmp_path / "nowhere", tmp_path / "out.colibri")


def test_a_model_id_is_found_in_the_local_cache(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "hub" / "models--tiny--mixtral"
    shutil.copytree(tiny_checkpoint, model / "snapshots" / "abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert convert("tiny/mixtral", tmp_path / "out.colibri").family == "mixtral"
    with pytest.raises(MissingFile, match="tiny/other"):
        convert("tiny/other", tmp_path / "out.colibri")
