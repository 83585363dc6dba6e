"""The binding to libcolibri: a thin shelf over cffi. Internal; applications use the client.

`ffi` and `lib` never leave this module. Above it are Python values and one tree of exceptions:

    NativeError
    ├── InvalidArgument     an argument is out of its range; nothing changed
    ├── OutOfMemory         memory could not be had at open
    ├── IOFailure           the system refused a file operation
    ├── FormatError         the model file contradicts itself or its size
    ├── Unsupported         a version, feature or instruction set that this build lacks
    ├── Canceled            cancel() was called
    ├── NumericFailure      a row is not finite
    ├── ChecksumMismatch    bytes do not match their checksum
    └── CapacityError       more tokens, rows or sequences than the context was opened for

Threads: a Context belongs to one thread at a time; only cancel() and, on pages that nobody writes, kv_save() may be
called from others. The GIL is released while C runs.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from colibri.native._binding import ffi as _ffi  # type: ignore[import-not-found]
from colibri.native._binding import lib as _lib

PAGE_TOKENS: int = _lib.COLIBRI_PAGE_TOKENS
NUMERICS_VERSION: int = _lib.COLIBRI_NUMERICS_VERSION
ROW_NONE: int = _lib.COLIBRI_ROW_NONE
ROW_LOGITS: int = _lib.COLIBRI_ROW_LOGITS
ROW_SCORE: int = _lib.COLIBRI_ROW_SCORE

_KV_FORMATS = {"f32": _lib.COLIBRI_KV_F32, "f16": _lib.COLIBRI_KV_F16}
_ROUTING = {"exact": _lib.COLIBRI_ROUTING_EXACT, "static": _lib.COLIBRI_ROUTING_STATIC}
_WEIGHTS = {
    "map": _lib.COLIBRI_WEIGHTS_MAP,
    "read": _lib.COLIBRI_WEIGHTS_READ,
    "read-trunk": _lib.COLIBRI_WEIGHTS_READ_TRUNK,
}
_ERROR_BYTES = 1024
# What the pointers in a C struct point to, for as long as the struct lives.
_keep: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

Int32s: TypeAlias = "Sequence[int] | array[int] | np.ndarray[Any, np.dtype[np.int32]]"
Buffer: TypeAlias = bytes | bytearray | memoryview | np.ndarray[Any, Any]


class NativeError(Exception):
    """Base of all errors of the engine; `code` is the COLIBRI_E_* number."""

    code: ClassVar[int] = 0
    output_ids: list[int] = []  # noqa: RUF012  set on the instance by Context.infer: what was written before the error


class InvalidArgument(NativeError):
    code = _lib.COLIBRI_E_INVALID


class OutOfMemory(NativeError):
    code = _lib.COLIBRI_E_NOMEM


class IOFailure(NativeError):
    code = _lib.COLIBRI_E_IO


class FormatError(NativeError):
    code = _lib.COLIBRI_E_FORMAT


class Unsupported(NativeError):
    code = _lib.COLIBRI_E_UNSUPPORTED


class Canceled(NativeError):
    code = _lib.COLIBRI_E_CANCELED


class NumericFailure(NativeError):
    code = _lib.COLIBRI_E_NUMERIC


class ChecksumMismatch(NativeError):
    code = _lib.COLIBRI_E_CHECKSUM


class CapacityError(NativeError):
    code = _lib.COLIBRI_E_CAPACITY


_BY_CODE = {cls.code: cls for cls in NativeError.__subclasses__()}


def _check(code: int, message: Any) -> None:
    """Raises for a negative code; `message` is a C string."""
    if code != _lib.COLIBRI_OK:
        raise _BY_CODE.get(code, NativeError)(_text(message) or f"error {code}")


def _constant(name: str, value: str, constants: dict[str, int]) -> int:
    """What the engine calls an option's value."""
    try:
        return constants[value]
    except KeyError:
        raise InvalidArgument(f"{name}: {value!r} is none of {', '.join(constants)}") from None


def _text(c_string: Any) -> str:
    return str(_ffi.string(c_string).decode("utf-8", "replace"))


def _int32s(values: Int32s, name: str) -> Any:
    """An int32_t pointer over the values; arrays of the right type are not copied. NULL if there are none."""
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values, dtype=np.int32)
    elif not (isinstance(values, array) and values.typecode == "i"):
        try:
            values = array("i", values)
        except (OverflowError, TypeError) as error:
            raise InvalidArgument(f"{name}: {error}") from None
    return _ffi.from_buffer("int32_t[]", values) if len(values) else _ffi.NULL


def _joined(tables: Sequence[Int32s]) -> array[int]:
    """Page tables one after the other; an array('i') costs a memory copy, not a Python object a page."""
    joined = array("i")
    try:
        for table in tables:
            joined.extend(table)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(f"page_tables: {error}") from None
    return joined


def checksum(data: Buffer) -> int:
    """The 64-bit checksum of docs/format.md."""
    view = _ffi.from_buffer(data)
    return int(_lib.colibri_checksum(view, len(view)))


def isa_names() -> list[str]:
    """Instruction sets that this build has kernels for, the preferred one first."""
    names: list[str] = []
    while (name := _lib.colibri_isa_name(len(names))) != _ffi.NULL:
        names.append(_text(name))
    return names


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The fields of colibri_model_info."""

    file_bytes: int
    expert_bytes_total: int
    json_offset: int
    json_bytes: int
    fingerprint: bytes
    format_version: int
    n_layers: int
    hidden: int
    vocabulary: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    top_k: int
    expert_width: int
    shared_width: int
    max_positions: int
    n_shards: int
    end_tokens: tuple[int, ...]


class Model:
    """A read-only model file, mapped unless `weights` says otherwise. Any number of contexts and threads may use it.

    weights: `map`; `read`, all of it at open; `read-trunk`, all but the experts, for contexts with expert_ram_bytes.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights: str = "map") -> None:
        self._model: Any = None
        self._n_contexts = 0
        options = _new_struct("colibri_model_options_t", weights=_constant("weights", weights, _WEIGHTS))
        out, error = _ffi.new("colibri_model_t **"), _ffi.new("char[]", _ERROR_BYTES)
        _check(_lib.colibri_model_open_with(out, os.fsencode(path), options, error, _ERROR_BYTES), error)
        self._model = out[0]
        self.path = os.fspath(path)
        self.info = self._read_info()

    def _read_info(self) -> ModelInfo:
        info = _ffi.new("colibri_model_info_t *")
        info.struct_bytes = _ffi.sizeof("colibri_model_info_t")
        _check(_lib.colibri_model_get_info(self._model, info), _ffi.NULL)
        special: dict[str, Any] = {
            "fingerprint": bytes(_ffi.buffer(info.fingerprint)),
            "end_tokens": tuple(info.end_tokens[0 : info.n_end_tokens]),
        }
        plain: dict[str, Any] = {f.name: int(getattr(info, f.name)) for f in fields(ModelInfo) if f.name not in special}
        return ModelInfo(**plain, **special)

    @cached_property
    def shards(self) -> list[Path]:
        """The files beside this one that hold its experts (docs/format.md); none if they are in it."""
        n = self.info.n_shards
        beginning = f"{os.fsdecode(self.path)}.{self.info.fingerprint[:4].hex()}"
        return [Path(f"{beginning}-{number}-of-{n}") for number in range(1, n + 1)] if n > 1 else []

    @property
    def _handle(self) -> Any:
        if self._model is None:
            raise InvalidArgument("the model is closed")
        return self._model

    @cached_property
    def json(self) -> dict[str, Any]:
        """Configuration, tokenizer, chat template, generation defaults, provenance (docs/format.md)."""
        blob = bytes(_ffi.buffer(_lib.colibri_model_json(self._handle), self.info.json_bytes))
        try:
            value = json.loads(blob)
        except ValueError as error:
            raise FormatError(f"{self.path}: the JSON cannot be read: {error}") from None
        if not isinstance(value, dict):
            raise FormatError(f"{self.path}: the JSON is not an object")
        return value

    def verify(self) -> None:
        """Reads the whole file; raises ChecksumMismatch naming the first part whose checksum differs."""
        error = _ffi.new("char[]", _ERROR_BYTES)
        _check(_lib.colibri_model_verify(self._handle, error, _ERROR_BYTES), error)

    def close(self) -> None:
        """Unmaps the file. Every context must be closed before (InvalidArgument)."""
        if self._n_contexts:
            raise InvalidArgument(f"{self._n_contexts} contexts of the model are still open")
        model, self._model = self._model, None
        if model is not None:
            _lib.colibri_model_close(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_model", None) is not None and self._n_contexts == 0:
            self.close()


@dataclass(slots=True)
class Batch:
    """One step; see colibri_batch in colibri.h. All but the page tables have one entry a row."""

    tokens: Int32s
    positions: Int32s
    sequences: Int32s  # ascending from 0
    flags: Sequence[int] | bytes | bytearray  # ROW_*
    page_tables: Sequence[Sequence[int]]  # one a sequence: page numbers from position 0 on
    targets: Int32s | None = None  # read where ROW_SCORE is set
    want_routing: bool = False


@dataclass(slots=True)
class BatchResult:
    """row_status: 0 or NumericFailure.code. logprobs: where scored, else 0. routing: [n_rows, n_layers, top_k]."""

    row_status: list[int]
    logprobs: list[float] | None
    routing: np.ndarray[Any, np.dtype[np.int32]] | None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw one token; see colibri_sampling in colibri.h."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    position: int = 0
    history: Int32s = ()
    n_prompt: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    n_top_logprobs: int = 0
    allowed: Buffer | None = None  # bit mask, (vocabulary + 31) // 32 little-endian words of 32 bits

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token, its log-probability, and the most likely tokens with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class ExpertStats:
    """What became of expert_ram_bytes; see colibri_expert_stats in colibri.h."""

    slots: int
    slot_bytes: int
    slots_used: int
    hits: int
    misses: int
    read_ahead: int
    read_ahead_used: int
    bytes_read: int
    wait_ns: int


class Context:
    """KV pages, activations, held logits and threads, laid out once. See colibri_context_options for the arguments."""

    def __init__(
        self,
        model: Model,
        *,
        n_pages: int,
        kv_format: str = "f16",
        max_rows: int = 512,
        max_logits: int = 8,
        max_context: int = 0,
        prefill_threads: int = 0,
        decode_threads: int = 0,
        isa: str | None = None,
        seed: int = 0,
        expert_ram_bytes: int = 0,
        static_table: str | os.PathLike[str] | None = None,
        routing: str = "exact",
    ) -> None:
        self._context: Any = None
        self._model = model
        table = _ffi.NULL if static_table is None else _ffi.new("char[]", os.fsencode(static_table))
        name = _ffi.NULL if isa is None else _ffi.new("char[]", isa.encode())
        options = _new_struct(
            "colibri_context_options_t",
            n_pages=n_pages,
            kv_format=_constant("kv_format", kv_format, _KV_FORMATS),
            max_rows=max_rows,
            max_logits=max_logits,
            max_context=max_context,
            prefill_threads=prefill_threads,
            decode_threads=decode_threads,
            seed=seed,
            isa=name,
            expert_ram_bytes=expert_ram_bytes,
            static_table=table,
            routing=_constant("routing", routing, _ROUTING),
        )
        out, error = _ffi.new("colibri_context_t **"), _ffi.new("char[]", _ERROR_BYTES)
        _check(_lib.colibri_context_open(out, model._handle, options, error, _ERROR_BYTES), error)
        self._context = out[0]
        model._n_contexts += 1
        self.kv_format = kv_format
        self.page_bytes = int(_lib.colibri_kv_page_bytes(self._context))
        self.memory_bytes = int(_lib.colibri_context_bytes(self._context))
        self.table_checksum = int(_lib.colibri_context_table_checksum(self._context))  # 0: no static table
        self.isa = _text(_lib.colibri_context_isa(self._context))

    @property
    def _handle(self) -> Any:
        if self._context is None:
            raise InvalidArgument("the context is closed")
        return self._context

    def _check(self, code: int) -> None:
        if code != _lib.COLIBRI_OK:
            _check(code, _lib.colibri_last_error(self._context))

    @property
    def kv_overflows(self) -> int:
        """K or V values that did not fit the KV format since open."""
        return int(_lib.colibri_context_kv_overflows(self._handle))

    def expert_stats(self) -> ExpertStats:
        """Figures of the memory for experts; 0 slots where none was asked for. Any thread."""
        stats = _new_struct("colibri_expert_stats_t")
        _check(_lib.colibri_context_expert_stats(self._handle, stats), _ffi.NULL)
        return ExpertStats(**{f.name: int(getattr(stats, f.name)) for f in fields(ExpertStats)})

    def forward(self, batch: Batch) -> BatchResult:
        """Computes one step. A row that is not finite is told in row_status; errors but Canceled changed nothing."""
        handle, n_rows, info = self._handle, len(batch.tokens), self._model.info
        if not n_rows == len(batch.positions) == len(batch.sequences) == len(batch.flags):
            raise InvalidArgument("tokens, positions, sequences and flags differ in length")
        if batch.targets is not None and len(batch.targets) != n_rows:
            raise InvalidArgument(f"targets: {len(batch.targets)} for {n_rows} rows")
        row_status = array("i", bytes(4 * n_rows))
        logprobs = None if batch.targets is None else array("f", bytes(4 * n_rows))
        routing = np.empty((n_rows, info.n_layers, info.top_k), np.int32) if batch.want_routing else None
        try:
            flags = bytes(batch.flags)
        except ValueError as error:
            raise InvalidArgument(f"flags: {error}") from None
        c_batch = _new_struct(
            "colibri_batch_t",
            n_rows=n_rows,
            n_sequences=len(batch.page_tables),
            tokens=_int32s(batch.tokens, "tokens"),
            positions=_int32s(batch.positions, "positions"),
            sequences=_int32s(batch.sequences, "sequences"),
            flags=_ffi.from_buffer("uint8_t[]", flags),
            targets=_ffi.NULL if batch.targets is None else _int32s(batch.targets, "targets"),
            page_starts=_int32s(array("i", accumulate(map(len, batch.page_tables), initial=0)), "page_tables"),
            pages=_int32s(_joined(batch.page_tables), "page_tables"),
            row_status=_ffi.from_buffer("int32_t[]", row_status),
            logprobs=_ffi.NULL if logprobs is None else _ffi.from_buffer("float[]", logprobs),
            routing=_ffi.NULL if routing is None else _ffi.from_buffer("int32_t[]", routing),
        )
        self._check(_lib.colibri_forward(handle, c_batch))
        return BatchResult(row_status.tolist(), None if logprobs is None else logprobs.tolist(), routing)

    def logits(self, i: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Logits of the i-th row flagged ROW_LOGITS: [vocabulary], read-only, valid until the next forward or close."""
        row = _lib.colibri_logits(self._handle, i) if i >= 0 else _ffi.NULL
        if row == _ffi.NULL:
            raise InvalidArgument(f"row {i}: no logits are held")
        view = np.frombuffer(_ffi.buffer(row, 4 * self._model.info.vocabulary), np.float32)
        view.flags.writeable = False
        return view

    def sample(self, i: int, sampling: Sampling) -> Sampled:
        """Draws a token from the i-th held row, which stays as it is."""
        handle, s = self._handle, sampling
        history: Int32s = s.history if s.has_penalties else ()
        c_sampling = _new_struct(
            "colibri_sampling_t",
            temperature=s.temperature,
            top_p=s.top_p,
            min_p=s.min_p,
            repetition_penalty=s.repetition_penalty,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            top_k=s.top_k,
            n_top_logprobs=s.n_top_logprobs,
            seed=s.seed,
            position=s.position,
            history=_int32s(history, "history"),
            n_history=len(history),
            n_prompt=s.n_prompt if s.has_penalties else 0,
            bias_ids=_int32s(list(s.bias), "bias"),
            bias_values=_ffi.from_buffer("float[]", array("f", s.bias.values())) if s.bias else _ffi.NULL,
            n_bias=len(s.bias),
            allowed=self._mask(s.allowed),
        )
        out = _ffi.new("colibri_sampled_t *")
        self._check(_lib.colibri_sample(handle, i, c_sampling, out))
        n_top = min(s.n_top_logprobs, self._model.info.vocabulary)
        return Sampled(out.token, out.logprob, list(zip(out.top_ids[0:n_top], out.top_logprobs[0:n_top], strict=True)))

    def _mask(self, allowed: Buffer | None) -> Any:
        if allowed is None:
            return _ffi.NULL
        view = _ffi.from_buffer("uint32_t[]", allowed)
        needed = (self._model.info.vocabulary + 31) // 32
        if len(view) < needed:
            raise InvalidArgument(f"allowed: {needed} words are needed, got {len(view)}")
        return view

    def kv_save(self, page: int) -> tuple[bytes, int]:
        """Bytes of a page and their checksum. From any thread, on a page that nobody writes."""
        buffer, total = _ffi.new("char[]", self.page_bytes), _ffi.new("uint64_t *")
        code = _lib.colibri_kv_save(self._handle, _index(page), buffer, self.page_bytes, total)
        if code != _lib.COLIBRI_OK:
            raise _BY_CODE[code](f"page {page}: cannot be saved")
        return bytes(_ffi.buffer(buffer)), int(total[0])

    def kv_load(self, page: int, n_tokens: int, buffer: Buffer, checksum: int) -> None:
        """Copies saved bytes into a page, of which the first n_tokens (1..32) count; zero after ChecksumMismatch."""
        view = _ffi.from_buffer(buffer)
        self._check(_lib.colibri_kv_load(self._handle, _index(page), _index(n_tokens), view, len(view), checksum))

    def kv_copy(self, to_page: int, from_page: int, n_tokens: int) -> None:
        """Copies the first n_tokens positions of a page to another."""
        self._check(_lib.colibri_kv_copy(self._handle, _index(to_page), _index(from_page), _index(n_tokens)))

    def infer(self, input_ids: Int32s, max_output_len: int, temperature: float = 0.0) -> list[int]:
        """Continues the own sequence; returns the new tokens. An error carries those before it as `output_ids`."""
        output, n_output = _ffi.new("int32_t[]", max(max_output_len, 1)), _ffi.new("size_t *")
        ids = _int32s(input_ids, "input_ids")
        code = _lib.colibri_infer(self._handle, ids, len(input_ids), output, n_output, max_output_len, temperature)
        output_ids = list(output[0 : n_output[0]])
        try:
            self._check(code)
        except NativeError as error:
            error.output_ids = output_ids
            raise
        return output_ids

    @property
    def length(self) -> int:
        """Tokens in the context's own sequence."""
        return int(_lib.colibri_length(self._handle))

    def truncate(self, n_tokens: int) -> None:
        """Cuts the context's own sequence to its first n_tokens."""
        self._check(_lib.colibri_truncate(self._handle, _index(n_tokens)))

    def cancel(self) -> None:
        """Makes a running forward or infer raise Canceled at the next layer. Any thread."""
        _lib.colibri_cancel(self._handle)

    def close(self) -> None:
        """Joins the threads and frees everything."""
        context, self._context = self._context, None
        if context is not None:
            _lib.colibri_context_close(context)
            self._model._n_contexts -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_context", None) is not None:
            self.close()


def _index(value: int) -> int:
    """A number that fits C's uint32_t."""
    if not 0 <= value < 2**32:
        raise InvalidArgument(f"{value} is not in 0..{2**32 - 1}")
    return value


def _new_struct(name: str, **values: Any) -> Any:
    """A C struct with its struct_bytes set. Keeps alive what its pointers point to."""
    struct = _ffi.new(f"{name} *")
    struct.struct_bytes = _ffi.sizeof(name)
    for key, value in values.items():
        try:
            setattr(struct, key, value)
        except OverflowError as error:
            raise InvalidArgument(f"{key}: {error}") from None
    _keep[struct] = values
    return struct
