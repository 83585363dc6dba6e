"""The .colibri file as bytes: docs/format.md and native/src/file_format.h in numpy.

Owns the two structs, the constants, the checksum, the fingerprint, the placing of the parts, and which experts lie in
which shard. It knows neither checkpoints nor families. A test compiles the C header and compares every name, offset and
size with the dtypes here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from colibri.native import checksum

MAGIC = b"COLIBRI\x1a"
VERSION = 1
HEADER_BYTES = 4096
TENSOR_ALIGN = 64
EXPERT_ALIGN = 65536  # a mapping granule everywhere: 4, 16 and 64 KiB pages, Windows views
NO_LAYER = 0xFFFFFFFF
TILE_ROWS = 16
GROUP = 32  # quantisation group along k
MAX_LAYERS = 1024  # bits in dense_layers
MAX_END_TOKENS = 16
MAX_HEAD_DIM = 512  # what the attention kernels are built for


class Format(IntEnum):
    """COLIBRI_FMT_*"""

    VECTOR = 0
    F32 = 1
    BF16 = 2
    F16 = 3
    Q8 = 4
    Q4 = 5


class Role(IntEnum):
    """COLIBRI_T_*: what a tensor is."""

    EMBEDDING = 1
    HEAD = 2
    FINAL_NORM = 3
    INV_FREQ = 4

    ATTN_NORM = 16
    Q = 17
    K = 18
    V = 19
    O = 20  # noqa: E741 - the name it has everywhere
    Q_NORM = 21
    K_NORM = 22
    Q_BIAS = 23
    K_BIAS = 24
    V_BIAS = 25
    O_BIAS = 26
    QKV = 27
    QKV_BIAS = 28

    FFN_NORM = 32
    ROUTER = 33
    ROUTER_BIAS = 34
    SHARED_GATE = 35
    SHARED_UP = 36
    SHARED_DOWN = 37
    SHARED_EXPERT_GATE = 38
    DENSE_GATE = 40
    DENSE_UP = 41
    DENSE_DOWN = 42


class ArchFlag(IntFlag):
    """COLIBRI_ARCH_*"""

    TIED = 1 << 0
    QK_NORM_HEAD = 1 << 1
    QK_NORM_WHOLE = 1 << 2
    QKV_BIAS = 1 << 3
    O_BIAS = 1 << 4
    NORM_TOPK = 1 << 5
    SHARED_EXPERT = 1 << 6
    SHARED_GATED = 1 << 7
    ROUTER_SIGMOID = 1 << 8
    ROUTER_BIAS = 1 << 9
    QKV_CLIP = 1 << 10
    QKV_FUSED = 1 << 11


TENSOR_ENTRY = np.dtype(
    [
        ("role", "<u4"),
        ("layer", "<u4"),
        ("format", "<u4"),
        ("reserved0", "<u4"),
        ("rows", "<u8"),
        ("cols", "<u8"),
        ("offset", "<u8"),
        ("bytes", "<u8"),
        ("checksum", "<u8"),
        ("reserved1", "<u8"),
    ]
)

HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("file_bytes", "<u8"),
        ("header_checksum", "<u8"),
        ("fingerprint", "u1", 32),
        ("tensor_table_offset", "<u8"),
        ("n_tensors", "<u8"),
        ("expert_table_offset", "<u8"),
        ("n_expert_blocks", "<u8"),
        ("json_offset", "<u8"),
        ("json_bytes", "<u8"),
        ("json_checksum", "<u8"),
        ("expert_offset", "<u8"),
        ("expert_stride", "<u8"),
        ("expert_bytes", "<u8"),
        ("n_shards", "<u4"),
        ("shard_index", "<u4"),
        ("experts_per_shard", "<u4"),
        ("expert_format", "<u4"),
        ("arch_flags", "<u4"),
        ("n_layers", "<u4"),
        ("n_dense_layers_mask_words", "<u4"),
        ("hidden", "<u4"),
        ("vocabulary", "<u4"),
        ("n_heads", "<u4"),
        ("n_kv_heads", "<u4"),
        ("head_dim", "<u4"),
        ("rotary_dim", "<u4"),
        ("n_experts", "<u4"),
        ("top_k", "<u4"),
        ("expert_width", "<u4"),
        ("shared_width", "<u4"),
        ("dense_width", "<u4"),
        ("max_positions", "<u4"),
        ("rms_eps", "<f4"),
        ("attention_scale", "<f4"),
        ("rope_attention_factor", "<f4"),
        ("router_scale", "<f4"),
        ("qkv_clip", "<f4"),
        ("n_groups", "<u4"),
        ("top_k_groups", "<u4"),
        ("n_end_tokens", "<u4"),
        ("end_tokens", "<i4", MAX_END_TOKENS),
        ("dense_layers", "<u4", MAX_LAYERS // 32),
        ("reserved", "u1", 3652),
    ]
)

Bytes = npt.NDArray[np.uint8]


def align(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple


def tile_bytes(fmt: Format, cols: int) -> int:
    """Bytes of one tile of 16 rows of cols, a multiple of 64."""
    if fmt is Format.F32:
        return cols * TILE_ROWS * 4
    if fmt in (Format.BF16, Format.F16):
        return align(cols * TILE_ROWS * 2, TENSOR_ALIGN)
    if fmt in (Format.Q8, Format.Q4):
        groups = align(cols, GROUP) // GROUP
        weights = GROUP * TILE_ROWS // (2 if fmt is Format.Q4 else 1)
        return align(groups * (weights + TILE_ROWS * 2), TENSOR_ALIGN)
    raise ValueError(f"{fmt!r} has no tiles")


def matrix_bytes(fmt: Format, rows: int, cols: int) -> int:
    """Bytes of a matrix, or of a vector of f32."""
    if fmt is Format.VECTOR:
        return rows * cols * 4
    return align(rows, TILE_ROWS) // TILE_ROWS * tile_bytes(fmt, cols)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the table before its bytes are known. `layer` is NO_LAYER for the model's own."""

    role: Role
    layer: int
    format: Format
    rows: int
    cols: int

    @property
    def n_bytes(self) -> int:
        return matrix_bytes(self.format, self.rows, self.cols)


@dataclass(frozen=True)
class Layout:
    """Where every part of a file lies. All values are bytes from the beginning of the file."""

    tensor_table: int
    expert_table: int
    json: int
    tensors: tuple[int, ...]
    experts: int
    expert_bytes: int
    expert_stride: int
    file_bytes: int  # of a file in one piece; one with shards ends at `experts`


def lay_out(tensors: list[TensorSpec], n_expert_blocks: int, expert_bytes: int, json_bytes: int) -> Layout:
    """Places the parts in the order of docs/format.md."""
    expert_table = HEADER_BYTES + len(tensors) * TENSOR_ENTRY.itemsize
    json_offset = align(expert_table + n_expert_blocks * 8, TENSOR_ALIGN)
    position = align(json_offset + json_bytes, TENSOR_ALIGN)
    offsets = []
    for tensor in tensors:
        offsets.append(position)
        position = align(position + tensor.n_bytes, TENSOR_ALIGN)
    experts = align(position, EXPERT_ALIGN)
    stride = align(expert_bytes, EXPERT_ALIGN)
    return Layout(
        tensor_table=HEADER_BYTES,
        expert_table=expert_table,
        json=json_offset,
        tensors=tuple(offsets),
        experts=experts,
        expert_bytes=expert_bytes,
        expert_stride=stride,
        file_bytes=experts + n_expert_blocks * stride,
    )


@dataclass(frozen=True)
class Shard:
    """One of the files that hold the experts where the model's own does not: experts [first, first + n_experts) of
    every layer that has any, layer by layer. `number` counts from 1.
    """

    number: int
    n_shards: int
    first: int
    n_experts: int

    def file_bytes(self, n_layers: int, stride: int) -> int:
        return EXPERT_ALIGN + n_layers * self.n_experts * stride

    def offset(self, layer: int, expert: int, stride: int) -> int:
        """Where a block lies in the shard. `layer` counts those with experts only."""
        return EXPERT_ALIGN + (layer * self.n_experts + expert - self.first) * stride

    def path(self, model: Path, fingerprint: bytes) -> Path:
        """Beside the model, under its name. The fingerprint in it keeps the shards of one conversion from taking the
        place of another's: only the renaming of the model itself exchanges one for the other.
        """
        return model.with_name(f"{model.name}.{fingerprint[:4].hex()}-{self.number}-of-{self.n_shards}")


def make_shards(n_experts: int, n_shards: int) -> list[Shard]:
    """Experts in equal shares, or as nearly equal as can be; none for one shard: then they are in the file itself."""
    firsts = [number * n_experts // n_shards for number in range(n_shards + 1)]
    if n_shards == 1:
        return []
    return [Shard(i + 1, n_shards, first, end - first) for i, (first, end) in enumerate(pairwise(firsts))]


def header_checksum(header: npt.NDArray[np.void], tensor_table: npt.NDArray[np.void], expert_table: bytes) -> int:
    """Checksum of header (with this field zero), tensor table and expert table, one after the other."""
    blank = header.copy()
    blank["header_checksum"] = 0
    return checksum(blank.tobytes() + tensor_table.tobytes() + expert_table)


def fingerprint(header: npt.NDArray[np.void], tensor_table: npt.NDArray[np.void], expert_table: bytes) -> bytes:
    """SHA-256 of architecture and weights: what a KV cache depends on, and what neither tokenizer nor template
    change.
    """
    fields = HEADER.fields
    assert fields is not None
    table = tensor_table.copy()
    table["offset"] = 0
    digest = hashlib.sha256(header.tobytes()[fields["expert_format"][1] :])
    digest.update(table.tobytes())
    digest.update(expert_table)
    return digest.digest()
