"""A Hugging Face checkpoint as named tensors that are read when asked for.

Owns the folder, its index and its safetensors files. Everything that can be known without reading weights is checked at
open: that each shard is there, is as long as its header says, and holds what the index names. Only files that the index
names are opened (`consolidated.*` and the like are left alone). Weights come as float32, a band of rows at a time.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import ml_dtypes  # noqa: F401 - safetensors finds the dtype bfloat16 by name once this is imported
import numpy as np
import safetensors

from .errors import CheckpointError, DamagedFile, MissingFile, TensorError, UnsupportedModel
from .tiles import Floats

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit: a lying length must not become an allocation
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class SourceTensor:
    """Where a tensor is, and what its file says about it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path) -> Any:
    """The parsed file; MissingFile or DamagedFile."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise MissingFile("no such file", where=str(path)) from None


def parse_json(raw: bytes, where: str) -> Any:
    """The value of a JSON file that can also be written again; DamagedFile names `where`."""
    try:
        value = json.loads(raw)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair parses, but is no text
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"not JSON: {error}", where=where) from None
    return value


def read_safetensors_header(path: Path) -> dict[str, SourceTensor]:
    """The tensors of one file. Refuses a file that is shorter or longer than its header demands, with both sizes."""
    actual = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise DamagedFile(f"cut short: a safetensors file has at least 8 bytes, this one {actual}", where=str(path))
        (header_bytes,) = struct.unpack("<Q", head)
        if header_bytes > MAX_HEADER_BYTES:
            raise DamagedFile(f"claims a header of {header_bytes} bytes, more than {MAX_HEADER_BYTES}", where=str(path))
        if actual < 8 + header_bytes:
            raise DamagedFile(f"cut short: expected at least {8 + header_bytes} bytes, found {actual}", where=str(path))
        text = file.read(header_bytes)
    tensors, data_bytes = _parse_header(text, path)
    expected = 8 + header_bytes + data_bytes
    if actual != expected:
        what = "cut short" if actual < expected else "too long"
        raise DamagedFile(f"{what}: expected {expected} bytes, found {actual}", where=str(path))
    return tensors


def _parse_header(text: bytes, path: Path) -> tuple[dict[str, SourceTensor], int]:
    """Tensors and the bytes that their data take."""

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError("a name stands twice")
        return dict(pairs)

    tensors, end = {}, 0
    try:
        entries = json.loads(text, object_pairs_hook=refuse_duplicates)
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            shape = tuple(int(n) for n in entry["shape"])
            tensors[name] = SourceTensor(name, path.name, str(entry["dtype"]), shape)
            end = max(end, int(entry["data_offsets"][1]))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"its header is not that of a safetensors file: {error}", where=str(path)) from None
    return tensors, end


class WeightSource(Protocol):
    """Named weights of a folder that has the configuration: what a conversion asks of a Checkpoint."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...
    @property
    def files(self) -> Sequence[str]: ...
    def check_dtype(self, name: str) -> None: ...
    def read(self, name: str, index: tuple[slice | int, ...] = ...) -> Floats: ...
    def bands(self, name: str, rows: slice, band_rows: int, prefix: tuple[int, ...] = ...) -> Iterator[Floats]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


class Checkpoint:
    """An opened folder. A context manager; `tensors` maps names to what the files say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise MissingFile("no such folder", where=str(folder))
        self.files, index = self._find_files()
        self.tensors: dict[str, SourceTensor] = {}
        for file in self.files:
            self._add(read_safetensors_header(folder / file))
        for name, file in index.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise TensorError(f"{INDEX_FILE} says it is in {file}, but it is not", where=name)
        self._handles = {file: self._open(file) for file in self.files}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._handles.clear()

    def _find_files(self) -> tuple[list[str], dict[str, str]]:
        """The safetensors files to read, and what the index says. A single file wins, as in transformers."""
        if (self.folder / SINGLE_FILE).exists():
            return [SINGLE_FILE], {}
        if not (self.folder / INDEX_FILE).exists():
            raise MissingFile(
                f"neither {SINGLE_FILE} nor {INDEX_FILE} is there",
                where=str(self.folder),
                hint="pickled checkpoints (.bin, .pt) are not read; save the model with safetensors",
            )
        document = read_json(self.folder / INDEX_FILE)
        index = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise DamagedFile("has no weight_map of names to files", where=INDEX_FILE)
        files = sorted(set(index.values()))
        for file in files:
            if file != os.path.basename(file):
                raise DamagedFile(f"names a file outside the folder: {file}", where=INDEX_FILE)
            if not (self.folder / file).is_file():
                raise MissingFile(f"shard named in {INDEX_FILE} is missing", where=file)
        return files, index

    def _add(self, tensors: dict[str, SourceTensor]) -> None:
        for name, tensor in tensors.items():
            if name in self.tensors:
                raise TensorError(f"is in both {self.tensors[name].file} and {tensor.file}", where=name)
            self.tensors[name] = tensor

    def _open(self, file: str) -> Any:
        try:
            # The handle has no close(); dropping it unmaps the file.
            return safetensors.safe_open(self.folder / file, framework="numpy")
        except safetensors.SafetensorError as error:
            raise DamagedFile(str(error), where=str(self.folder / file)) from None
        except OSError as error:
            raise CheckpointError(f"cannot be opened: {error}", where=str(self.folder / file)) from None

    def check_dtype(self, name: str) -> None:
        """Refuses a stored type that is not a plain floating-point number."""
        tensor = self.tensors[name]
        if tensor.dtype not in READABLE_DTYPES:
            raise UnsupportedModel(
                f"is stored as {tensor.dtype}; the converter reads {', '.join(READABLE_DTYPES)}",
                where=name,
                hint="start from the checkpoint that was not quantised",
            )

    def read(self, name: str, index: tuple[slice | int, ...] = (slice(None),)) -> Floats:
        """A part of a tensor in float32. NaN and infinity are refused by the tensor's name."""
        part = self._handles[self.tensors[name].file].get_slice(name)[index]
        with np.errstate(over="ignore"):
            values: Floats = part.astype(np.float32)
        if not np.isfinite(values).all():
            raise TensorError("holds NaN or infinity", where=name, hint="the checkpoint is damaged or was saved badly")
        return values

    def bands(self, name: str, rows: slice, band_rows: int, prefix: tuple[int, ...] = ()) -> Iterator[Floats]:
        """Rows [start, stop) of a matrix in bands of at most band_rows: [band, cols]. `prefix` picks the matrix in a
        stack.
        """
        for start in range(rows.start, rows.stop, band_rows):
            yield self.read(name, (*prefix, slice(start, min(start + band_rows, rows.stop))))
