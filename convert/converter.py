"""convert(): a checkpoint folder becomes one .colibri file.

First everything is checked (plan.py); then tensors are read and encoded on several threads, and written one by one; the
header, without which no reader takes the file, comes last. The same model gives the same bytes, however its checkpoint
was split into files or its experts were stored, and whatever the threads.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from colibri.native import Model, NativeError, OutOfMemory, checksum

from .architecture import Architecture
from .checkpoint import Checkpoint, WeightSource, read_json
from .config import Config
from .errors import OutputError, TensorError, UnsupportedModel
from .families import find
from .format import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    TENSOR_ALIGN,
    TENSOR_ENTRY,
    TILE_ROWS,
    VERSION,
    ArchFlag,
    Bytes,
    Format,
    TensorSpec,
    align,
    fingerprint,
    header_checksum,
    lay_out,
    matrix_bytes,
)
from .plan import Part, Plan, make_plan
from .shards import ShardWriter, remove_strays, total_bytes
from .source import resolve_source
from .text import TextAssets, read_text_assets
from .tiles import Floats, QuantizationError, encode
from .writer import AtomicFile

FORMATS = {"f32": Format.F32, "bf16": Format.BF16, "f16": Format.F16, "q8": Format.Q8, "q4": Format.Q4}
ALIASES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "q8", "int4": "q4"}
# Source rows in memory at a time, as float32: long enough reads, and small beside the encoded tensor.
BAND_BYTES = 64 << 20
# What the error figures can add to the JSON after its place was fixed: two dozen kinds of about 80 bytes.
JSON_SLACK = 4096


@dataclass(frozen=True)
class Progress:
    """How far a conversion is: bytes of the result written, of all, and the tensor at hand."""

    done_bytes: int
    total_bytes: int
    what: str


@dataclass
class Report:
    """What a conversion did. `rounding`: per kind of tensor, how far encoded weights are from their source."""

    out: str
    family: str
    format: str
    file_bytes: int  # shards included
    shards: list[str]
    fingerprint: str
    n_tensors: int
    n_experts: int
    end_tokens: list[int]
    source_files: list[str]
    rounding: dict[str, dict[str, float | int]]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_format(name: str) -> Format:
    """The weight format of a --quantize value; long names are accepted."""
    try:
        return FORMATS[ALIASES.get(name, name)]
    except KeyError:
        raise UnsupportedModel(f"unknown format {name!r}; one of {', '.join(FORMATS)}", where="quantize") from None


def convert(
    source: str | Path,
    out: str | Path,
    *,
    quantize: str = "q8",
    expert_shards: int = 1,
    flash_attn_compatible: bool = True,
    progress: Callable[[Progress], None] | None = None,
    open_weights: Callable[[Path], WeightSource] = Checkpoint,
) -> Report:
    """Converts a checkpoint (a folder, or a model id in the local Hugging Face cache) and writes `out`.

    With expert_shards = N > 1 the experts go to N files beside it. `open_weights` opens the folder's weights; with
    another one than Checkpoint they need not be in files. They are read on several threads.
    `flash_attn_compatible`: q, k and v become one matrix, and their biases one vector; else each stays its own.

    Raises ConvertError; then `out` is as it was before. Memory: for each core one encoded tensor or expert, and a band
    of its source.
    """
    started = time.monotonic()
    weights = parse_format(quantize)
    folder, out = resolve_source(source), Path(out)
    config = Config(read_json(folder / "config.json"))
    family = find(config)
    architecture = family.architecture(config)
    if flash_attn_compatible:
        architecture = replace(architecture, flags=architecture.flags | ArchFlag.QKV_FUSED)
    config.refuse_unread()
    _check_shards(expert_shards, architecture)
    assets = read_text_assets(folder, architecture.vocabulary)
    with open_weights(folder) as checkpoint:
        plan = make_plan(checkpoint, family, architecture, weights)
        conversion = _Conversion(checkpoint, plan, assets, expert_shards, progress)
        shards = conversion.write(out)
        files = checkpoint.files
    unknown = [f"configuration key not known, ignored: {key}" for key in config.unread()]
    return Report(
        out=str(out),
        family=family.name,
        format=weights.name.lower(),
        file_bytes=conversion.total_bytes,
        shards=[path.name for path in shards],
        fingerprint=conversion.fingerprint.hex(),
        n_tensors=len(plan.tensors),
        n_experts=len(plan.experts),
        end_tokens=assets.end_tokens,
        source_files=[*assets.files, *files],
        rounding=conversion.error_figures(),
        notes=unknown + plan.notes + assets.notes,
        seconds=time.monotonic() - started,
    )


def _check_shards(n_shards: int, architecture: Architecture) -> None:
    if not 1 <= n_shards <= architecture.n_experts:
        raise UnsupportedModel(
            f"{n_shards} shards; a layer has {architecture.n_experts} experts, and a shard takes at least one of each",
            where="expert-shard",
        )


Errors = dict[str, QuantizationError]
Item = TypeVar("Item")
Result = TypeVar("Result")


def _in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """function(item) for every item, on as many threads as there are usable cores, and no further ahead than that."""
    n_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(n_threads, thread_name_prefix="colibri-convert") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > n_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Conversion:
    """One run: what is written where, and what was learned on the way (checksums, errors)."""

    def __init__(
        self,
        checkpoint: WeightSource,
        plan: Plan,
        assets: TextAssets,
        n_shards: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.plan = plan
        self.assets = assets
        self.errors: Errors = {}
        self.fingerprint = b""
        self._json_bytes = align(len(self._json()) + JSON_SLACK, TENSOR_ALIGN)
        shapes = plan.architecture.expert_shapes()
        expert_bytes = sum(matrix_bytes(plan.expert_format, *shape) for shape in shapes)
        specs = [spec for spec, _ in plan.tensors]
        self.layout = lay_out(specs, len(plan.experts), expert_bytes, self._json_bytes)
        self._n_shards = n_shards
        self._shard_bytes = total_bytes(n_shards, *self._expert_grid, self.layout.expert_stride)
        self._file_bytes = self.layout.file_bytes if n_shards == 1 else self.layout.experts
        self._progress = progress
        self._written = 0

    @property
    def total_bytes(self) -> int:
        return self._file_bytes + self._shard_bytes

    @property
    def _expert_grid(self) -> tuple[int, int]:
        """Experts of a layer, and layers that have any."""
        return self.plan.architecture.n_experts, len(self.plan.architecture.moe_layers)

    def write(self, out: Path) -> list[Path]:
        """Writes the file and returns its shards. All get their names only when all are on the disk, `out` last."""
        with ExitStack() as stack:
            file = stack.enter_context(AtomicFile(out, self._file_bytes, self._shard_bytes))
            stack.callback(remove_strays, out)
            shards = ShardWriter(out, self._n_shards, *self._expert_grid, self.layout.expert_stride, stack)
            table = self._write_tensors(file)
            expert_table = self._write_experts(file, shards)
            text = self._json().ljust(self._json_bytes)
            assert len(text) == self._json_bytes, "JSON_SLACK is too small"
            file.write_at(self.layout.json, text)
            file.write_at(self.layout.tensor_table, table.tobytes())
            file.write_at(self.layout.expert_table, expert_table)
            header = self._header(table, expert_table, checksum(text))
            self.fingerprint = header["fingerprint"].tobytes()
            shards.seal(header, file.partial)
            file.sync()  # the header vouches for what is behind it: it must not reach the disk first
            file.write_at(0, header.tobytes())
            _open_once(file.partial)
            paths = shards.commit(out, self.fingerprint)
            file.commit()
        self._tell("done", self.total_bytes)
        return paths

    def _write_tensors(self, file: AtomicFile) -> npt.NDArray[np.void]:
        table = np.zeros(len(self.plan.tensors), TENSOR_ENTRY)
        encoded = _in_order(self._encode_tensor, self.plan.tensors)
        places = zip(table, self.plan.tensors, self.layout.tensors, strict=True)
        for (entry, (spec, parts), offset), (data, errors) in zip(places, encoded, strict=True):
            file.write_at(offset, data)
            self._count(errors)
            entry["role"], entry["layer"], entry["format"] = spec.role, spec.layer, spec.format
            entry["rows"], entry["cols"] = spec.rows, spec.cols
            entry["offset"], entry["bytes"], entry["checksum"] = offset, len(data), checksum(data)
            self._tell(parts[0].name if parts else "inverse frequencies", len(data))
        return table

    def _write_experts(self, file: AtomicFile, shards: ShardWriter) -> bytes:
        checksums = np.zeros(len(self.plan.experts), "<u8")
        encoded = _in_order(self._encode_expert, self.plan.experts)
        for block, (parts, (data, errors)) in enumerate(zip(self.plan.experts, encoded, strict=True)):
            if shards.shards:
                shards.write_block(*divmod(block, self.plan.architecture.n_experts), data)
            else:
                file.write_at(self.layout.experts + block * self.layout.expert_stride, data)
            self._count(errors)
            checksums[block] = checksum(data)
            self._tell(parts[2].name, self.layout.expert_stride)
        return checksums.tobytes()

    def _encode_tensor(self, tensor: tuple[TensorSpec, tuple[Part, ...]]) -> tuple[Bytes, Errors]:
        (spec, parts), error = tensor, QuantizationError()
        if parts:
            data = self._encode(spec.format, spec.rows, spec.cols, parts, error)
        else:
            data = encode(self.plan.architecture.rope.inv_freq[None, :], Format.VECTOR, error)
        return data, {spec.role.name.lower(): error}

    def _encode_expert(self, parts: tuple[Part, Part, Part]) -> tuple[Bytes, Errors]:
        errors = {kind: QuantizationError() for kind in ("expert_gate", "expert_up", "expert_down")}
        fmt, pairs = self.plan.expert_format, zip(parts, errors.values(), strict=True)
        return np.concatenate(
            [self._encode(fmt, part.rows, part.cols, (part,), error) for part, error in pairs]
        ), errors

    def _count(self, errors: Errors) -> None:
        """In the order of the file, so that the sums do not depend on the threads."""
        for kind, error in errors.items():
            self.errors.setdefault(kind, QuantizationError()).merge(error)

    def _encode(self, fmt: Format, rows: int, cols: int, parts: tuple[Part, ...], error: QuantizationError) -> Bytes:
        """The bytes of one tensor, made a band of rows at a time."""
        out = np.empty(matrix_bytes(fmt, rows, cols), np.uint8)
        position = 0
        for band in self._bands(parts[0]) if len(parts) == 1 else self._joined(parts):
            try:
                data = encode(band, fmt, error)
            except OverflowError as overflow:
                names = ", ".join(part.name for part in parts)
                raise TensorError(str(overflow), where=names, hint="choose bf16, f32, q8 or q4") from None
            out[position : position + len(data)] = data
            position += len(data)
        return out

    def _joined(self, parts: tuple[Part, ...]) -> Iterator[Floats]:
        """Parts that are fused, as one band: a tile may begin in one and end in the next."""
        bands = [band for part in parts for band in self._bands(part)]
        yield np.concatenate(bands, axis=1 if parts[0].vector else 0)

    def _bands(self, part: Part) -> Iterator[Floats]:
        """The matrix [rows, cols] of a part, in bands of whole tiles."""
        if part.vector:
            yield self.checkpoint.read(part.name)[None, :]
            return
        band_rows = align(max(1, BAND_BYTES // (part.cols * 4)), TILE_ROWS)
        rows = slice(part.first_row, part.first_row + part.rows)
        yield from self.checkpoint.bands(part.name, rows, band_rows, part.index)

    def _header(self, table: npt.NDArray[np.void], expert_table: bytes, json_checksum: int) -> npt.NDArray[np.void]:
        header = np.zeros((), HEADER)
        header["magic"], header["version"], header["header_bytes"] = MAGIC, VERSION, HEADER_BYTES
        header["file_bytes"] = self._file_bytes
        header["tensor_table_offset"], header["n_tensors"] = self.layout.tensor_table, len(table)
        header["expert_table_offset"], header["n_expert_blocks"] = self.layout.expert_table, len(self.plan.experts)
        header["json_offset"], header["json_bytes"] = self.layout.json, self._json_bytes
        header["json_checksum"] = json_checksum
        header["expert_offset"], header["expert_stride"] = self.layout.experts, self.layout.expert_stride
        header["expert_bytes"], header["expert_format"] = self.layout.expert_bytes, self.plan.expert_format
        header["n_shards"] = self._n_shards
        header["experts_per_shard"] = -(-self.plan.architecture.n_experts // self._n_shards)
        _describe(header, self.plan.architecture)
        header["n_end_tokens"] = len(self.assets.end_tokens)
        header["end_tokens"][: len(self.assets.end_tokens)] = self.assets.end_tokens
        header["fingerprint"] = np.frombuffer(fingerprint(header, table, expert_table), np.uint8)
        header["header_checksum"] = header_checksum(header, table, expert_table)
        return header

    def error_figures(self) -> dict[str, dict[str, float | int]]:
        return {kind: error.to_dict() for kind, error in sorted(self.errors.items()) if error.n_weights}

    def _json(self) -> bytes:
        """Weight files are told by the fingerprint, so that their names and splitting leave no trace in the result."""
        document = self.assets.to_json() | {
            "family": self.plan.family.name,
            "source": self.assets.files,
            "converter": {"name": "colibri", "version": metadata.version("colibri-moe")},
            "quantization": {"format": self.plan.expert_format.name.lower(), "errors": self.error_figures()},
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    def _tell(self, what: str, n_bytes: int) -> None:
        if self._progress is None:
            return
        self._written = min(self._written + n_bytes, self.total_bytes)
        self._progress(Progress(self._written, self.total_bytes, what))


def _open_once(path: Path) -> None:
    """The engine has the last word: a file that it would refuse does not get its name."""
    try:
        Model(path).close()
    except OutOfMemory as error:
        hint = "raise the limit of address space: ulimit -v"
        raise OutputError(f"there is no memory to open what was written: {error}", hint=hint) from None
    except NativeError as error:
        raise UnsupportedModel(f"the engine cannot run this model: {error}") from None


def _describe(header: npt.NDArray[np.void], architecture: Architecture) -> None:
    """Fills in the architecture fields."""
    for name in ("n_layers", "hidden", "vocabulary", "n_heads", "n_kv_heads", "head_dim", "n_experts", "top_k"):
        header[name] = getattr(architecture, name)
    for name in ("expert_width", "shared_width", "dense_width", "max_positions"):
        header[name] = getattr(architecture, name)
    for name in ("rms_eps", "attention_scale", "router_scale", "qkv_clip"):
        header[name] = getattr(architecture, name)
    header["arch_flags"] = architecture.flags
    header["rotary_dim"] = architecture.rope.rotary_dim
    header["rope_attention_factor"] = architecture.rope.attention_factor
    for layer in architecture.dense_layers:
        header["dense_layers"][layer // 32] |= np.uint32(1 << layer % 32)
    header["n_dense_layers_mask_words"] = align(architecture.n_layers, 32) // 32
