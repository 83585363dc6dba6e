"""inspect(): figures of a good file, and refusal of one that was cut, damaged or lies. The engine must agree each
time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri.convert import ModelFileError, inspect
from colibri.convert.format import HEADER, HEADER_BYTES, TENSOR_ENTRY, header_checksum
from colibri.native import Context, Model, NativeError


@pytest.fixture
def copy(tiny_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model_path, tmp_path / "copy.colibri"))


def refused_by_both(path: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        inspect(path)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(NativeError):
        Model(path)


def test_inspect_tells_architecture_layers_and_formats(tiny_q8_model_path: Path) -> None:
    inspection = inspect(tiny_q8_model_path, verify=True)
    assert inspection.family == "mixtral"
    assert {"n_layers": 2, "hidden": 64, "n_experts": 4, "top_k": 2}.items() <= inspection.architecture.items()
    assert inspection.architecture["flags"] == ["norm_topk", "qkv_fused"]
    assert [(plan.kind, plan.ffn_format) for plan in inspection.layers] == [("experts", "q8")] * 2
    assert inspection.formats["router"] == "f32"
    assert inspection.formats["embedding"] == "q8"
    assert (inspection.end_tokens, inspection.has_chat_template, inspection.verified) == ([0, 2], True, True)


def test_bytes_by_kind_add_up_to_the_file(tiny_q8_model_path: Path, tiny_qwen_model_path: Path) -> None:
    for path in (tiny_q8_model_path, tiny_qwen_model_path):
        inspection = inspect(path)
        assert sum(inspection.bytes_by_kind.values()) == inspection.file_bytes == path.stat().st_size
        assert min(inspection.bytes_by_kind.values()) >= 0


def test_resident_bytes_are_those_of_a_file_that_was_just_read(copy: Path) -> None:
    copy.read_bytes()
    resident = inspect(copy).resident_bytes
    assert resident is None or 0 < resident <= copy.stat().st_size + 65536


def test_inspect_tells_what_the_engine_takes_beside_the_file(tiny_model_path: Path) -> None:
    inspection = inspect(tiny_model_path)
    with Model(tiny_model_path) as model:
        context = Context(model, n_pages=5)
        assert inspection.buffer_bytes + 5 * inspection.kv_page_bytes == context.memory_bytes
        context.close()


def test_inspection_is_plain_data(tiny_model_path: Path) -> None:
    import json

    assert json.loads(json.dumps(inspect(tiny_model_path).to_dict()))["family"] == "mixtral"


@pytest.mark.parametrize("cut", ["one byte", "half"])
def test_a_file_that_was_cut_is_refused_with_both_sizes(copy: Path, cut: str) -> None:
    size = copy.stat().st_size
    keep = size - 1 if cut == "one byte" else size // 2
    with copy.open("r+b") as file:
        file.truncate(keep)
    refused_by_both(copy, f"expected {size} bytes", f"found {keep}")
    with pytest.raises(NativeError, match=f"{size}.*{keep}|{keep}.*{size}"):
        Model(copy)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 4095, 4096])
def test_a_file_that_is_barely_there_is_refused(copy: Path, keep: int) -> None:
    with copy.open("r+b") as file:
        file.truncate(keep)
    refused_by_both(copy)


def test_a_file_with_bytes_behind_its_end_is_refused(copy: Path) -> None:
    with copy.open("ab") as file:
        file.write(b"x")
    refused_by_both(copy, "too long")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(5000))
    refused_by_both(tmp_path / "model.gguf", "not a .colibri file")
    with pytest.raises(ModelFileError, match="nowhere"):
        inspect(tmp_path / "nowhere")


@pytest.mark.parametrize("offset", [9, 100, 150, 400, 4096, 4100, 4150])
def test_one_flipped_bit_in_header_or_tables_is_refused(copy: Path, offset: int) -> None:
    data = bytearray(copy.read_bytes())
    data[offset] ^= 1
    copy.write_bytes(data)
    refused_by_both(copy)


def test_verify_names_the_part_that_was_damaged(copy: Path) -> None:
    good = copy.read_bytes()
    header = np.frombuffer(good, HEADER, 1)[0]
    table = np.frombuffer(good, TENSOR_ENTRY, int(header["n_tensors"]), int(header["tensor_table_offset"]))
    expert = int(header["expert_offset"]) + 5 * int(header["expert_stride"])  # four experts a layer: layer 1, expert 1
    for offset, name in [(int(table[0]["offset"]), "embedding"), (expert, "layer 1 expert 1")]:
        data = bytearray(good)
        data[offset] ^= 1
        copy.write_bytes(data)
        inspect(copy)
        with pytest.raises(ModelFileError, match=name):
            inspect(copy, verify=True)


def test_damaged_json_is_refused(copy: Path) -> None:
    data = bytearray(copy.read_bytes())
    header = np.frombuffer(bytes(data), HEADER, 1)[0]
    data[int(header["json_offset"])] ^= 1
    copy.write_bytes(data)
    with pytest.raises(ModelFileError, match="JSON"):
        inspect(copy)


def forge(path: Path, change: Callable[[Any, Any], None]) -> None:
    """Changes header and tensor table and makes their checksum right again: a file that lies, not one that is
    damaged."""
    data = bytearray(path.read_bytes())
    header = np.frombuffer(data, HEADER, 1).copy()
    at, n = int(header[0]["tensor_table_offset"]), int(header[0]["n_tensors"])
    table = np.frombuffer(data, TENSOR_ENTRY, n, at).copy()
    experts = int(header[0]["expert_table_offset"])
    expert_table = bytes(data[experts : experts + 8 * int(header[0]["n_expert_blocks"])])
    change(header[0], table)
    header["header_checksum"] = header_checksum(np.asarray(header[0]), table, expert_table)
    data[at : at + table.nbytes] = table.tobytes()
    data[:HEADER_BYTES] = header.tobytes()
    path.write_bytes(data)


def set_header(field: str, value: float) -> Callable[[Any, Any], None]:
    def change(header: Any, table: Any) -> None:
        header[field] = value

    return change


def set_tensor(field: str, value: int, index: int = 0) -> Callable[[Any, Any], None]:
    def change(header: Any, table: Any) -> None:
        table[index][field] = value

    return change


def copy_tensor_offset(header: Any, table: Any) -> None:
    table[1]["offset"] = table[0]["offset"]


def copy_tensor_entry(header: Any, table: Any) -> None:
    table[1] = table[0]


LIES = {
    "another version": set_header("version", 2),
    "a size that is not the file's": set_header("file_bytes", 2**63),
    "a table that does not fit": set_header("n_tensors", 2**60),
    "a table whose size overflows": set_header("n_tensors", 2**58 + 1),
    "an expert table that does not fit": set_header("n_expert_blocks", 2**61),
    "a table behind the end": set_header("tensor_table_offset", 2**62),
    "JSON larger than the file": set_header("json_bytes", 2**64 - 1),
    "experts behind the end": set_header("expert_offset", 2**40),
    "experts that are not aligned": set_header("expert_offset", 65536 + 64),
    "a stride of zero": set_header("expert_stride", 0),
    "a stride whose product overflows": set_header("expert_stride", 2**61),
    "expert bytes that the shapes deny": set_header("expert_bytes", 64),
    "an unknown expert format": set_header("expert_format", 77),
    "no layers": set_header("n_layers", 0),
    "more layers than the mask holds": set_header("n_layers", 5000),
    "no hidden width": set_header("hidden", 0),
    "a hidden width that the tensors deny": set_header("hidden", 2**31),
    "no vocabulary": set_header("vocabulary", 0),
    "a vocabulary that the embedding denies": set_header("vocabulary", 301),
    "a dense layer that has experts": set_header("dense_layers", 1),
    "a tied head that is there": set_header("arch_flags", 1 | 1 << 5),
    "a missing norm of queries": set_header("arch_flags", 1 << 1 | 1 << 5),
    "an epsilon that is not a number": set_header("rms_eps", float("nan")),
    "an attention scale of zero": set_header("attention_scale", 0),
    "an infinite rotary factor": set_header("rope_attention_factor", float("inf")),
    "a shard of several": set_header("n_shards", 2),
    "groups of experts": set_header("n_groups", 4),
    "an end token outside the vocabulary": set_header("end_tokens", 300),
    "reserved bytes that are used": set_header("reserved", 1),
    "heads that do not divide": set_header("n_kv_heads", 3),
    "no experts": set_header("n_experts", 0),
    "more chosen than there are": set_header("top_k", 5),
    "a rotary width beyond the head": set_header("rotary_dim", 64),
    "more end tokens than there is room for": set_header("n_end_tokens", 17),
    "an unknown architecture flag": set_header("arch_flags", 1 << 30),
    "a tensor without rows": set_tensor("rows", 0),
    "a tensor whose product overflows": set_tensor("rows", 2**62),
    "a tensor with fewer bytes than its shape": set_tensor("bytes", 64),
    "a tensor behind the end": set_tensor("offset", 2**50),
    "a tensor over the header": set_tensor("offset", 0),
    "a tensor that is not aligned": set_tensor("offset", 65537),
    "a tensor of an unknown role": set_tensor("role", 999),
    "a tensor of an unknown format": set_tensor("format", 9),
    "a tensor of a layer that is not there": set_tensor("layer", 7, index=5),
    "overlapping tensors": copy_tensor_offset,
    "a tensor that stands twice": copy_tensor_entry,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(copy: Path, lie: str) -> None:
    forge(copy, LIES[lie])
    refused_by_both(copy)


def test_forging_without_a_lie_gives_a_good_file(copy: Path) -> None:
    """Otherwise the test above would prove the checksum only."""
    forge(copy, set_tensor("reserved1", 0))
    inspect(copy, verify=True)
    Model(copy).close()
