"""The file's bytes in Python are those of the C header; checksum and fingerprint are those of docs/format.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from colibri.convert import format as file_format
from colibri.convert.format import HEADER, TENSOR_ENTRY, ArchFlag, Format, Role, TensorSpec
from colibri.native import checksum

C_HEADER = Path(__file__).parent.parent.parent / "native" / "src" / "file_format.h"
CONSTANTS = {
    "COLIBRI_FILE_VERSION": file_format.VERSION,
    "COLIBRI_FILE_HEADER_BYTES": file_format.HEADER_BYTES,
    "COLIBRI_FILE_TENSOR_ALIGN": file_format.TENSOR_ALIGN,
    "COLIBRI_FILE_EXPERT_ALIGN": file_format.EXPERT_ALIGN,
    "COLIBRI_FILE_NO_LAYER": file_format.NO_LAYER,
}


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def struct_members(text: str, name: str) -> list[str]:
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
    assert body is not None
    declarations = re.findall(r"^\s*\w+\s+([^;]+);", body[1], re.MULTILINE)
    return [re.sub(r"\[.*\]", "", member).strip() for line in declarations for member in line.split(",")]


def run_c(tmp_path: Path, statements: list[str]) -> list[str]:
    """Output lines of a C program that includes the header."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    includes = f'#include <stddef.h>\n#include <stdio.h>\n#include "{C_HEADER}"\n'
    source.write_text(includes + "int main(void) {\n" + "\n".join(statements) + "\nreturn 0;\n}\n")
    subprocess.run([compiler, "-std=c17", "-o", program, source], check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize(("struct", "dtype"), [("colibri_file_header", HEADER), ("colibri_file_tensor", TENSOR_ENTRY)])
def test_structs_have_the_names_offsets_and_sizes_of_the_c_header(
    struct: str, dtype: np.dtype[np.void], tmp_path: Path
) -> None:
    members = struct_members(without_comments(C_HEADER.read_text()), struct)
    where = [
        f'printf("{m} %zu %zu\\n", offsetof(struct {struct}, {m}), sizeof(((struct {struct} *)0)->{m}));'
        for m in members
    ]
    lines = run_c(tmp_path, [*where, f'printf("total %zu\\n", sizeof(struct {struct}));'])
    assert dtype.fields is not None
    expected = [f"{name} {offset} {field.itemsize}" for name, (field, offset, *_) in dtype.fields.items()]
    assert lines == [*expected, f"total {dtype.itemsize}"]


@pytest.mark.parametrize(
    ("prefix", "enum"), [("COLIBRI_FMT_", Format), ("COLIBRI_T_", Role), ("COLIBRI_ARCH_", ArchFlag)]
)
def test_enumerations_have_the_names_and_values_of_the_c_header(prefix: str, enum: type, tmp_path: Path) -> None:
    names = re.findall(rf"^\s*{prefix}(\w+) =", without_comments(C_HEADER.read_text()), re.MULTILINE)
    lines = run_c(tmp_path, [f'printf("{name} %u\\n", (unsigned){prefix}{name});' for name in names])
    assert lines == [f"{member.name} {member.value}" for member in enum]  # type: ignore[attr-defined]


def test_constants_have_the_values_of_the_c_header(tmp_path: Path) -> None:
    lines = run_c(tmp_path, [f'printf("%u\\n", (unsigned){name});' for name in CONSTANTS])
    assert lines == [str(value) for value in CONSTANTS.values()]


def reference_checksum(data: bytes) -> int:
    """docs/format.md, "Checksum", in Python integers."""
    blocks = data + bytes(-len(data) % 256)
    h = [0x9E3779B1 * (j + 1) % 2**32 for j in range(64)]
    for i in range(0, len(blocks), 4):
        j = i // 4 % 64
        h[j] = (h[j] ^ int.from_bytes(blocks[i : i + 4], "little")) * 0x85EBCA77 % 2**32
        h[j] ^= h[j] >> 15
    a = len(data) * 0x9E3779B97F4A7C15 % 2**64
    for lane in h:
        a = (a ^ lane) * 0x9FB21C651E98DF25 % 2**64
        a ^= a >> 32
    return a


@pytest.mark.parametrize("n_bytes", [0, 1, 3, 4, 255, 256, 257, 1000, 4096])
def test_the_checksum_is_the_documented_one(n_bytes: int) -> None:
    data = np.random.default_rng(n_bytes).bytes(n_bytes)
    assert checksum(data) == reference_checksum(data)


def test_parts_are_aligned_and_do_not_overlap() -> None:
    tensors = [TensorSpec(Role.Q, layer, fmt, 17, 33) for layer, fmt in enumerate((Format.F32, Format.BF16, Format.Q8))]
    layout = file_format.lay_out(tensors, n_expert_blocks=5, expert_bytes=70000, json_bytes=123)
    assert layout.expert_table == 4096 + 3 * 64
    assert layout.json >= layout.expert_table + 5 * 8
    ends = [layout.json + 123, *(at + spec.n_bytes for at, spec in zip(layout.tensors, tensors, strict=True))]
    starts = [*layout.tensors, layout.experts]
    assert all(end <= start for end, start in zip(ends, starts, strict=True))
    assert all(start % 64 == 0 for start in starts)
    assert layout.experts % 65536 == 0
    assert (layout.expert_stride, layout.file_bytes) == (131072, layout.experts + 5 * 131072)
