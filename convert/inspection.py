"""inspect(): what a .colibri file holds, checked as strictly as the engine checks it at open.

Reads the header and the tables, and with verify=True everything else. No field is believed before it was compared with
the file's real size, and no size read from the file becomes an allocation before that.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from colibri.native import Context, Model, NativeError, checksum

from .architecture import GATES, Architecture, tensor_specs
from .errors import ConfigError, ModelFileError
from .format import (
    EXPERT_ALIGN,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_END_TOKENS,
    MAX_LAYERS,
    NO_LAYER,
    TENSOR_ALIGN,
    TENSOR_ENTRY,
    VERSION,
    ArchFlag,
    Format,
    Role,
    align,
    fingerprint,
    header_checksum,
    make_shards,
    matrix_bytes,
)
from .rope import Rope
from .shards import ShardFile

_SHARED_ROLES = frozenset({Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN})
_DENSE_ROLES = (Role.DENSE_GATE, Role.DENSE_UP, Role.DENSE_DOWN)
_ATTENTION_MATRICES = (Role.Q, Role.K, Role.V, Role.QKV, Role.O)
_ATTENTION_ROLES = (*_ATTENTION_MATRICES, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS, Role.QKV_BIAS, Role.O_BIAS)
_POSITIVE_FIELDS = (
    "n_layers",
    "hidden",
    "vocabulary",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "n_experts",
    "top_k",
    "expert_width",
    "max_positions",
)


_POSITIVE_NUMBERS = ("rms_eps", "attention_scale", "rope_attention_factor", "router_scale")
# What Architecture describes; a file with another flag was made by a later version.
_READABLE_FLAGS = (
    ArchFlag.TIED
    | ArchFlag.QK_NORM_HEAD
    | ArchFlag.QK_NORM_WHOLE
    | ArchFlag.QKV_BIAS
    | ArchFlag.QKV_CLIP
    | ArchFlag.QKV_FUSED
    | ArchFlag.O_BIAS
    | ArchFlag.NORM_TOPK
    | ArchFlag.SHARED_EXPERT
    | ArchFlag.SHARED_GATED
)
_READABLE_FORMATS = frozenset(Format)


def _tensor_name(role: int, layer: int) -> str:
    name = Role(role).name.lower() if role in frozenset(Role) else f"role {role}"
    return name if layer == NO_LAYER else f"layer {layer} {name}"


@dataclass(frozen=True)
class LayerPlan:
    """What one layer is made of."""

    layer: int
    kind: str  # "experts" or "dense"
    attention_format: str
    ffn_format: str
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """A file and its shards in figures. `resident_bytes`: how much is in memory now (None where the system does not
    tell). `buffer_bytes`, `kv_page_bytes`: what the engine takes beside it with its defaults, without KV and for each
    page of KV.
    """

    path: str
    version: int
    family: str
    fingerprint: str
    tokenizer_fingerprint: str
    file_bytes: int  # shards included
    shards: dict[str, int]  # bytes by name
    architecture: dict[str, Any]
    layers: list[LayerPlan]
    bytes_by_kind: dict[str, int]
    formats: dict[str, str]
    alignment: dict[str, int]
    end_tokens: list[int]
    has_chat_template: bool
    converter: dict[str, Any]
    quantization: dict[str, Any]
    resident_bytes: int | None
    buffer_bytes: int
    kv_page_bytes: int
    verified: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ModelFile:
    """An opened file whose header and tables were checked, with its shards. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards: list[ShardFile] = []
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise ModelFileError(f"cannot be opened: {error.strerror}", where=str(path)) from None
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.header = self._read_header()
            self.tensors, self.expert_table = self._read_tables()
            self.architecture = self._read_architecture()
            self._check_tensors()
            self._check_experts()
            self._check_ranges()
            self._open_shards()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for file in (self._file, *(shard.file for shard in self.shards)):
            file.close()

    @property
    def total_bytes(self) -> int:
        return self.size + sum(shard.size for shard in self.shards)

    def error(self, message: str, hint: str | None = None) -> ModelFileError:
        return ModelFileError(message, where=str(self.path), hint=hint)

    def __getitem__(self, name: str) -> int:
        return int(self.header[name])

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Bytes of the file; the range was checked before."""
        return self._read(self._file, offset, n_bytes)

    def _read(self, file: BinaryIO, offset: int, n_bytes: int) -> bytes:
        data = os.pread(file.fileno(), n_bytes, offset)
        if len(data) != n_bytes:
            raise self.error(f"shrank while it was read: {n_bytes} bytes expected at {offset}, found {len(data)}")
        return data

    def _read_header(self) -> npt.NDArray[np.void]:
        raw = os.pread(self._file.fileno(), HEADER_BYTES, 0)
        if raw[:8] != MAGIC:
            raise self.error("is not a .colibri file", "convert a checkpoint with `colibrictl convert`")
        if len(raw) < HEADER_BYTES:
            raise self.error(f"cut short: expected at least {HEADER_BYTES} bytes, found {self.size}")
        header: npt.NDArray[np.void] = np.frombuffer(raw, HEADER)[0]
        if header["version"] != VERSION or header["header_bytes"] != HEADER_BYTES:
            raise self.error(f"is of version {header['version']}; this program reads version {VERSION}")
        if header["file_bytes"] != self.size:
            what = "cut short" if self.size < header["file_bytes"] else "too long"
            raise self.error(f"{what}: expected {header['file_bytes']} bytes, found {self.size}")
        if header["shard_index"] != 0:
            what = f"is shard {header['shard_index']} of {header['n_shards']} of a model"
            raise self.error(what, "look at the model that it lies beside")
        unknown = int(header["arch_flags"]) & ~int(_READABLE_FLAGS)
        if unknown:
            raise self.error(f"has architecture flags that this program does not know: {unknown:#x}")
        return header

    def _open_shards(self) -> None:
        for shard in make_shards(self["n_experts"], self["n_shards"]):
            n_layers = len(self.architecture.moe_layers)
            self.shards.append(ShardFile(shard, self.path, self.header, n_layers))

    def _read_tables(self) -> tuple[npt.NDArray[np.void], bytes]:
        table_bytes = self["n_tensors"] * TENSOR_ENTRY.itemsize
        expert_table_bytes = self["n_expert_blocks"] * 8
        self._demand_range("tensor table", self["tensor_table_offset"], table_bytes, 8)
        self._demand_range("expert table", self["expert_table_offset"], expert_table_bytes, 8)
        self._demand_range("JSON", self["json_offset"], self["json_bytes"], 1)
        tensors = np.frombuffer(self.read(self["tensor_table_offset"], table_bytes), TENSOR_ENTRY)
        expert_table = self.read(self["expert_table_offset"], expert_table_bytes)
        if header_checksum(np.asarray(self.header), tensors, expert_table) != self["header_checksum"]:
            raise self.error("header or tables are damaged: their checksum differs")
        return tensors, expert_table

    def _demand_range(self, what: str, offset: int, n_bytes: int, alignment: int) -> None:
        if offset < HEADER_BYTES or offset + n_bytes > self.size:
            raise self.error(f"{what}: {n_bytes} bytes at {offset} are not inside the file of {self.size}")
        if offset % alignment:
            raise self.error(f"{what}: offset {offset} is not a multiple of {alignment}")

    def _check_numbers(self) -> None:
        """Fields whose values can be judged alone."""
        for name in _POSITIVE_FIELDS:
            if self[name] == 0:
                raise self.error(f"{name} is zero")
        for name in _POSITIVE_NUMBERS:
            if not 0 < self.header[name] < np.inf:
                raise self.error(f"{name} is {self.header[name]}, not a finite number above 0")
        if not 1 <= self["n_shards"] <= self["n_experts"]:
            raise self.error(f"n_shards is {self['n_shards']}, and a layer has {self['n_experts']} experts")
        if self["experts_per_shard"] != -(-self["n_experts"] // self["n_shards"]):
            raise self.error(f"experts_per_shard is {self['experts_per_shard']}, not the largest share")
        if self["n_groups"] or self["top_k_groups"]:
            raise self.error("routes by groups of experts, which this program does not know")
        if self.header["reserved"].any():
            raise self.error("reserved bytes of the header are not zero")
        tokens = self.header["end_tokens"][: self["n_end_tokens"]]
        if self["n_end_tokens"] > MAX_END_TOKENS or (tokens < 0).any() or (tokens >= self["vocabulary"]).any():
            raise self.error(f"its {self['n_end_tokens']} end tokens are too many, or not in the vocabulary")

    def _read_architecture(self) -> Architecture:
        """The architecture fields, each in its range and in agreement with the others."""
        self._check_numbers()
        limits = {
            "n_layers": MAX_LAYERS,
            "rotary_dim": self["head_dim"],
            "n_kv_heads": self["n_heads"],
        }
        for name, limit in limits.items():
            if self[name] > limit:
                raise self.error(f"{name} is {self[name]}, more than {limit}")
        numbers = {name: self[name] for name in (*_POSITIVE_FIELDS, "dense_width", "shared_width")}
        mask = self.header["dense_layers"]
        dense = frozenset(i for i in range(MAX_LAYERS) if int(mask[i // 32]) >> i % 32 & 1)
        if dense and (max(dense) >= self["n_layers"] or self["dense_width"] == 0):
            raise self.error(f"dense_layers: layer {max(dense)} is not there, or dense_width is zero")
        if bool(self["shared_width"]) != (ArchFlag.SHARED_EXPERT in ArchFlag(self["arch_flags"])):
            raise self.error(f"shared_width is {self['shared_width']}, and the flag shared_expert says otherwise")
        try:
            architecture = Architecture(
                **numbers,
                rms_eps=float(self.header["rms_eps"]),
                rope=Rope(np.zeros(self["rotary_dim"] // 2, np.float32), float(self.header["rope_attention_factor"])),
                flags=ArchFlag(self["arch_flags"]),
                dense_layers=dense,
                router_scale=float(self.header["router_scale"]),
                qkv_clip=float(self.header["qkv_clip"]),
            )
        except ConfigError as error:
            raise self.error(f"its architecture cannot be: {error.where} {error.message}") from None
        n_blocks = len(architecture.moe_layers) * architecture.n_experts
        if self["n_expert_blocks"] != n_blocks:
            raise self.error(f"n_expert_blocks is {self['n_expert_blocks']}, the architecture demands {n_blocks}")
        return architecture

    def _check_tensors(self) -> None:
        """Exactly the tensors that the architecture demands, each of its shape, inside the file."""
        demanded = {(int(spec.role), spec.layer): spec for spec in tensor_specs(self.architecture, Format.F32)}
        for entry in self.tensors:
            name = self.tensor_name(entry)
            spec = demanded.pop((int(entry["role"]), int(entry["layer"])), None)
            if spec is None:
                raise self.error(f"{name}: stands twice, or has no place in this architecture")
            if (entry["rows"], entry["cols"]) != (spec.rows, spec.cols):
                raise self.error(f"{name}: is {entry['rows']} x {entry['cols']}, not {spec.rows} x {spec.cols}")
            fmt = int(entry["format"])
            if fmt not in _READABLE_FORMATS or (fmt == Format.VECTOR) != (spec.format is Format.VECTOR):
                raise self.error(f"{name}: cannot have format {fmt}")
            n_bytes = matrix_bytes(Format(fmt), spec.rows, spec.cols)
            if entry["bytes"] != n_bytes:
                raise self.error(f"{name}: has {entry['bytes']} bytes, its shape demands {n_bytes}")
            self._demand_range(name, int(entry["offset"]), n_bytes, TENSOR_ALIGN)
        for spec in demanded.values():
            raise self.error(f"{_tensor_name(spec.role, spec.layer)} is missing")

    def _check_experts(self) -> None:
        fmt = self["expert_format"]
        if fmt not in _READABLE_FORMATS or fmt == Format.VECTOR:
            raise self.error(f"expert_format {fmt} is unknown")
        n_bytes = sum(matrix_bytes(Format(fmt), *shape) for shape in self.architecture.expert_shapes())
        if self["expert_bytes"] != n_bytes:
            raise self.error(f"expert_bytes is {self['expert_bytes']}, the shapes demand {n_bytes}")
        if self["expert_stride"] != align(n_bytes, EXPERT_ALIGN):
            raise self.error(f"expert_stride is {self['expert_stride']}, not {align(n_bytes, EXPERT_ALIGN)}")
        if self["n_shards"] == 1:
            total = self["n_expert_blocks"] * self["expert_stride"]
            self._demand_range("experts", self["expert_offset"], total, EXPERT_ALIGN)
        elif self["expert_offset"] != self.size or self.size % EXPERT_ALIGN:
            raise self.error(
                f"expert_offset is {self['expert_offset']}; with shards it is the file's size, {self.size}"
            )

    def _check_ranges(self) -> None:
        """No two parts may overlap."""
        parts = [
            (0, HEADER_BYTES, "header"),
            (self["tensor_table_offset"], self.tensors.nbytes, "tensor table"),
            (self["expert_table_offset"], len(self.expert_table), "expert table"),
            (self["json_offset"], self["json_bytes"], "JSON"),
            (self["expert_offset"], self["n_expert_blocks"] * self["expert_stride"], "experts"),
            *((int(entry["offset"]), int(entry["bytes"]), self.tensor_name(entry)) for entry in self.tensors),
        ]
        parts.sort()
        for (offset, n_bytes, name), (following, _, other) in pairwise(parts):
            if offset + n_bytes > following:
                raise self.error(f"{name} and {other} overlap")

    def tensor_name(self, entry: npt.NDArray[np.void]) -> str:
        """Role and layer of a table entry in words."""
        return _tensor_name(int(entry["role"]), int(entry["layer"]))

    def json(self) -> dict[str, Any]:
        """The parsed JSON part; its checksum is compared first."""
        raw = self.read(self["json_offset"], self["json_bytes"])
        if checksum(raw) != self["json_checksum"]:
            raise self.error("JSON is damaged: its checksum differs")
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self.error(f"JSON cannot be read: {error}") from None
        if not isinstance(document, dict):
            raise self.error("JSON is not an object")
        return document

    def verify(self) -> None:
        """Reads everything and compares fingerprint and checksums; ModelFileError names the first part that differs."""
        header = np.asarray(self.header)
        if fingerprint(header, self.tensors, self.expert_table) != self.header["fingerprint"].tobytes():
            raise self.error("the fingerprint is not that of header and tables")
        for entry in self.tensors:
            if checksum(self.read(int(entry["offset"]), int(entry["bytes"]))) != entry["checksum"]:
                raise self.error(f"{self.tensor_name(entry)} is damaged: its checksum differs")
        expected = np.frombuffer(self.expert_table, "<u8")
        for (layer, expert, block), value in zip(self.experts(), expected, strict=True):
            if checksum(block) != value:
                raise self.error(f"layer {layer} expert {expert} is damaged: its checksum differs")

    def experts(self) -> Iterator[tuple[int, int, bytes]]:
        """(layer, expert, bytes of its three matrices) in the order of the blocks."""
        shard_of = [shard for shard in self.shards for _ in range(shard.shard.n_experts)]
        block = 0
        for number, layer in enumerate(self.architecture.moe_layers):
            for expert in range(self["n_experts"]):
                file, offset = self._file, self["expert_offset"] + block * self["expert_stride"]
                if shard_of:
                    file, offset = shard_of[expert].file, shard_of[expert].offset(number, expert)
                yield layer, expert, self._read(file, offset, self["expert_bytes"])
                block += 1

    def resident_bytes(self) -> int | None:
        """How much of the file and its shards the page cache holds."""
        figures = [_resident_bytes(self._file, self.size)]
        figures += [_resident_bytes(shard.file, shard.size) for shard in self.shards]
        known = [figure for figure in figures if figure is not None]
        return sum(known) if len(known) == len(figures) else None


def _resident_bytes(file: BinaryIO, size: int) -> int | None:
    """By mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    n_pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * n_pages)()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        status = libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), flags)
        del view  # the mapping cannot be closed while it is looked at
    return int(np.count_nonzero(np.frombuffer(bytes(flags), np.uint8) & 1)) * mmap.PAGESIZE if status == 0 else None


def inspect(path: str | Path, *, verify: bool = False) -> Inspection:
    """What a model file holds. With verify, every byte is read and every checksum compared. Raises ModelFileError."""
    with ModelFile(Path(path)) as file:
        document = file.json()
        if verify:
            file.verify()
        buffer_bytes, kv_page_bytes = _memory(Path(path))
        return Inspection(
            path=str(path),
            version=file["version"],
            family=str(document.get("family")),
            fingerprint=file.header["fingerprint"].tobytes().hex(),
            tokenizer_fingerprint=str(document.get("tokenizer_fingerprint")),
            file_bytes=file.total_bytes,
            shards={shard.path.name: shard.size for shard in file.shards},
            architecture=_architecture(file),
            layers=[_layer_plan(file, layer) for layer in range(file["n_layers"])],
            bytes_by_kind=_bytes_by_kind(file),
            formats=_formats(file),
            alignment={"tensors": TENSOR_ALIGN, "experts": EXPERT_ALIGN, "expert_stride": file["expert_stride"]},
            end_tokens=[int(token) for token in file.header["end_tokens"][: file["n_end_tokens"]]],
            has_chat_template=document.get("chat_template") is not None,
            converter=document.get("converter") or {},
            quantization=document.get("quantization") or {},
            resident_bytes=file.resident_bytes(),
            buffer_bytes=buffer_bytes,
            kv_page_bytes=kv_page_bytes,
            verified=verify,
        )


def _memory(path: Path) -> tuple[int, int]:
    """Bytes that the engine lays out beside the file, with its defaults: its buffers, and one KV page."""
    try:
        with Model(path) as model:
            context = Context(model, n_pages=1)
            try:
                return context.memory_bytes - context.page_bytes, context.page_bytes
            finally:
                context.close()
    except NativeError as error:
        raise ModelFileError(str(error), where=str(path)) from None


def _architecture(file: ModelFile) -> dict[str, Any]:
    """The architecture fields of the header as plain values; flags by name."""
    names = [name for name in HEADER.names or () if name not in ("dense_layers", "end_tokens", "reserved")]
    fields = {name: file.header[name].item() for name in names[names.index("n_layers") :]}
    del fields["n_dense_layers_mask_words"], fields["n_end_tokens"]
    return fields | {"flags": [flag.name.lower() for flag in ArchFlag(file["arch_flags"]) if flag.name]}


def _format_names(entries: list[npt.NDArray[np.void]]) -> str:
    return "+".join(sorted({Format(int(entry["format"])).name.lower() for entry in entries}))


def _layer_plan(file: ModelFile, layer: int) -> LayerPlan:
    own = [entry for entry in file.tensors if entry["layer"] == layer]
    n_bytes = sum(int(entry["bytes"]) for entry in own)
    attention = [entry for entry in own if entry["role"] in _ATTENTION_MATRICES]
    if layer in file.architecture.dense_layers:
        dense = [entry for entry in own if entry["role"] in _DENSE_ROLES]
        return LayerPlan(layer, "dense", _format_names(attention), _format_names(dense), n_bytes)
    n_bytes += file["n_experts"] * file["expert_bytes"]
    expert_format = Format(file["expert_format"]).name.lower()
    return LayerPlan(layer, "experts", _format_names(attention), expert_format, n_bytes)


def _kind(role: int) -> str:
    if role in (Role.EMBEDDING, Role.HEAD):
        return Role(role).name.lower()
    if role in GATES:
        return "router"
    if role in _SHARED_ROLES:
        return "shared experts"
    if role in _ATTENTION_ROLES:
        return "attention"
    return "dense layers" if role in _DENSE_ROLES else "norms and other vectors"


def _bytes_by_kind(file: ModelFile) -> dict[str, int]:
    """Where the bytes go; the sum is the size of the file and its shards."""
    counts: Counter[str] = Counter()
    for entry in file.tensors:
        counts[_kind(int(entry["role"]))] += int(entry["bytes"])
    counts["experts"] = file["n_expert_blocks"] * file["expert_bytes"]
    counts["JSON"] = file["json_bytes"]
    counts["header and tables"] = HEADER_BYTES * (1 + len(file.shards)) + file.tensors.nbytes + len(file.expert_table)
    counts["padding"] = file.total_bytes - counts.total()
    return dict(counts)


def _formats(file: ModelFile) -> dict[str, str]:
    """Format of each kind of tensor."""
    kinds: dict[str, list[npt.NDArray[np.void]]] = {}
    for entry in file.tensors:
        kinds.setdefault(_kind(int(entry["role"])), []).append(entry)
    return {kind: _format_names(own) for kind, own in kinds.items()} | {
        "experts": Format(file["expert_format"]).name.lower()
    }
